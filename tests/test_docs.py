"""What the documents say is so: their commands parse, their paths exist, the README's Python runs.

Steps of docs/adding-an-op.md are followed by tests/kernels/test_adding_an_op.py, the README's tree by test_house.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fuselm.cli import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Where a path in a document may start: a reader sees which from the sentence around it.
BASES = ("", "src/fuselm", "src/fuselm/kernels", "docs")
# Made by commands: there on a machine that ran them.
MADE = re.compile(
    r"runs/.*|results/?|gpu/(\w+\.json|roofline\.png)|rows\.(csv|json)|\.venv.*|~/.*"
    r"|(tokenizer|prepared|config|checkpoints|state)\.json|(vocab|encoder)\.json|merges\.txt"
    r"|log\.jsonl|curve\.png|report\.md|\w+\.safetensors"
)

over_documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def blocks(text: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text))


def commands(text: str) -> list[list[str]]:
    """Every command line that a document shows, in a block of shell or between backquotes, split into words."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    split = (
        shlex.split(line.partition("|")[0], comments=True) for line in [*lines, *code_spans(text)] if "'" not in line
    )
    return [words for words in split if words]


def unknown_words(words: list[str]) -> list[str]:
    """The words of a `fuselm ...` command that the command line does not know."""
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    if getattr(command, "commands", None) and rest and not rest[0].startswith("-"):
        return rest[:1]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    return [word for word in rest if word.startswith("-") and word not in known]


@over_documents
def test_shown_commands_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands(path.read_text(encoding="utf-8")):
        if Path(words[0]).name == "fuselm" and not words[0].endswith("/"):
            assert unknown_words(words) == [], f"{path.name} shows {' '.join(words)}"
        elif words[0] == "make" and len(words) > 1:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{path.name} shows {' '.join(words)}"
        elif words[1:2] == ["-m"] and words[2].startswith("fuselm"):
            assert (ROOT / "src" / f"{words[2].replace('.', '/')}.py").exists(), f"{path.name} shows {' '.join(words)}"


def test_a_command_that_is_not_there_is_noticed() -> None:
    assert unknown_words(["fuselm", "bench", "kernels", "--quick"]) == []
    assert unknown_words(["fuselm", "bench", "kernels", "--fast"]) == ["--fast"]
    assert unknown_words(["fuselm", "fly"]) == ["fly"]
    assert commands("`make test` and\n```sh\nfuselm doctor --json | tail -1  # a note\n```\n") == [
        ["fuselm", "doctor", "--json"],
        ["make", "test"],
    ]


@over_documents
def test_mentioned_paths_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    created = set(re.findall(r"^File: `([^`]+)`$", text, re.MULTILINE))
    looks_like_a_path = re.compile(r"[\w.~-]+(/[\w.-]+)*/?")
    suffixes = (".py", ".md", ".cu", ".cuh", ".h", ".cpp", ".cc", ".json", ".toml", ".txt", ".yml", "/")
    spans = {span for span in code_spans(text) if looks_like_a_path.fullmatch(span) and len(span) > 4}
    for span in spans:
        wanted = "/" in span or span.endswith(suffixes)
        if not wanted or span in created or MADE.fullmatch(span) or span in ("utils.py", ".cuh", ".cpp"):
            continue
        assert any((ROOT / base / span).exists() for base in BASES) or is_a_file_name(span), f"{path.name}: {span}"


def is_a_file_name(name: str) -> bool:
    return "/" not in name and any(ROOT.joinpath("src").rglob(name))


@over_documents
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose(path.read_text(encoding="utf-8"))):
        assert target.startswith("https://") or (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("program", blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python"))
def test_python_in_the_readme_runs(program: str) -> None:
    if "import jax" in program:
        pytest.importorskip("jax")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "1024" in finished.stdout
