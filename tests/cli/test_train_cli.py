"""`fuselm train`: a whole small run, what it writes and says, signals, resuming, and its refusals."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fuselm import checkpoint
from fuselm.checkpoint import open_run
from fuselm.cli import app
from fuselm.cli.train import SAME_WISH_SECONDS
from fuselm.cli.train_plan import make_plan
from fuselm.config import PRESETS
from fuselm.torchlm.log import read_log
from fuselm.torchlm.sample import sample
from fuselm.torchlm.state import load_model
from fuselm.torchlm.train import Trainer
from tests.torchlm.runs import child_environment, prepared

SHAPE = (
    "--preset", "tiny", "--device", "cpu", "--batch-size", "2", "--context", "16", "--set", "num_layers=1", "--set",
    "width=16", "--set", "num_heads=2", "--set", "ffn_width=32", "--set", "log_every=1",
)  # fmt: skip
TINY = (*SHAPE, "--steps", "6", "--set", "eval_every=3", "--set", "sample_tokens=5")


def fuselm(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has been trained to its end; tests only look at it."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    result = fuselm(data, *TINY, "--out", out, "--samples", "2")
    assert result.exit_code == 0, result.output
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", ".probe")
    }


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_in_one_folder(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "tokenizer.json", "checkpoints.json", "log.jsonl", "curve.png", "report.md"} <= names
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "![" in (finished / "report.md").read_text()
    run = open_run(finished)
    assert (run.saved["last"], run.model.width, run.model.context) == (6, 16, 16)
    assert run.train is not None
    assert (run.train.steps, run.train.batch_size, run.train.warmup) == (6, 2, 1)  # the preset's, in proportion
    kinds = [(record["kind"], record["step"]) for record in read_log(finished / "log.jsonl")]
    assert [step for kind, step in kinds if kind == "step"] == [1, 2, 3, 4, 5, 6]
    assert (
        [step for kind, step in kinds if kind == "eval"] == [step for kind, step in kinds if kind == "sample"] == [3, 6]
    )
    assert kinds[-1] == ("end", 6)


def test_it_says_what_it_does_and_what_to_type_next(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run"
    result = fuselm(data, *TINY, "--out", out)
    assert result.exit_code == 0, result.output
    assert "cpu, fp32; 6 steps, 2 rows of 16 tokens a step" in result.stderr
    assert "step 6: validation loss " in result.stderr
    assert "best validation loss " in result.stdout
    assert f"fuselm plot '{out}'" in result.stdout


def test_what_is_seen_of_samples_is_printable_and_the_log_has_them_as_they_are(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "texts", lambda *_: [("a\x1b[2Jb\0", True)])
    result = fuselm(data, *TINY, "--out", tmp_path / "run")
    assert "  | a\ufffd[2Jb\ufffd\n" in result.stderr
    assert result.stdout.startswith("\na\ufffd[2Jb\ufffd\n")
    texts = [record["text"] for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "sample"]
    assert texts == ["a\x1b[2Jb\0"] * 2


def test_the_same_command_again_finds_nothing_left_to_do(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = (data, *TINY, "--out", out, "--json")
    first = fuselm(*command)
    before = contents(out)
    second = fuselm(*command)
    assert (first.exit_code, second.exit_code) == (0, 0), second.output
    after = contents(out)
    kept = [name for name in before if name.startswith("step-") or name in ("checkpoints.json", "config.json")]
    assert any(name.startswith("step-") for name in kept)
    assert [after.get(name) for name in kept] == [before[name] for name in kept]
    steps = [record["step"] for record in read_log(out / "log.jsonl") if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    answers = [json.loads(result.stdout.splitlines()[-1]) for result in (first, second)]
    assert answers[0]["best_loss"] == answers[1]["best_loss"]


@pytest.mark.parametrize(("name", "was"), [("cuda_graph", False), ("log_every", 10), ("eval_every", 5)])
def test_a_run_that_was_fitted_otherwise_when_it_was_begun_goes_on_so(
    name: str, was: Any, data: Path, tmp_path: Path
) -> None:
    """What nobody has asked for is no reason to refuse the command that began a run."""
    out = tmp_path / "run"
    command = (data, *SHAPE[:-2], "--steps", "6", "--set", "sample_every=0", "--out", out, "--samples", "0")
    assert fuselm(*command).exit_code == 0
    config = json.loads((out / "config.json").read_text())
    assert config["train"][name] != was
    config["train"][name] = was
    (out / "config.json").write_text(json.dumps(config))
    again = fuselm(*command)
    assert again.exit_code == 0, again.output
    if name != "cuda_graph":  # which is a session's
        other = fuselm(*command, "--set", f"{name}=2")
        assert (other.exit_code, f"train.{name}" in other.stderr) == (1, True)


@pytest.mark.parametrize("how", ["again", "resumed"])
def test_whether_steps_are_a_graph_is_a_sessions_to_say(
    how: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph changes no result: a run that has trouble with one goes on without."""
    out = tmp_path / "run"
    command = (data, *TINY, "--out", out, "--samples", "0") if how == "again" else ("--resume", out, "--samples", "0")
    assert fuselm(data, *TINY, "--out", out, "--samples", "0").exit_code == 0
    asked: list[bool | None] = []
    made = Trainer.__init__

    def noting(self: Trainer, *given: Any, **options: Any) -> None:
        made(self, *given, **options)
        asked.append(self.cuda_graph)

    monkeypatch.setattr(Trainer, "__init__", noting)
    for flag in ((), ("--no-cuda-graph",)):
        found = fuselm(*command, *flag)
        assert found.exit_code == 0, found.output
    assert asked == [None, False]
    refused = fuselm(*command, "--cuda-graph")
    assert (refused.exit_code, refused.stderr) == (
        1,
        "error: A CUDA graph is of a GPU's work; the device is cpu. Leave --cuda-graph out.\n",
    )


def test_json_is_the_last_line_and_has_the_best_loss(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = fuselm(data, *TINY, "--out", out, "--json", "--samples", "0")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["run"] == str(out)
    assert answer["best_loss"] == open_run(out).best_loss
    assert answer["best_step"] == open_run(out).saved["best"]


def test_the_presets_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = fuselm("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    rows = json.loads(fuselm("--list", "--json").stdout)
    assert {row["name"]: row["corpus"] for row in rows} == {name: one.corpus for name, one in PRESETS.items()}
    assert all(row["parameters"] > 10_000 and row["about"] for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_csv_has_a_row_for_each_step_also_when_it_is_asked_for_later(
    data: Path, tmp_path: Path, finished: Path
) -> None:
    result = fuselm(data, *TINY, "--out", tmp_path / "run", "--samples", "0", "--log-csv", tmp_path / "a" / "run.csv")
    assert result.exit_code == 0, result.output
    shutil.copytree(finished, tmp_path / "copy")
    result = fuselm("--resume", tmp_path / "copy", "--samples", "0", "--log-csv", tmp_path / "later.csv")
    assert result.exit_code == 0, result.output
    for path in (tmp_path / "a" / "run.csv", tmp_path / "later.csv"):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows if row["train_loss"]] == [1, 2, 3, 4, 5, 6]
        assert [int(row["step"]) for row in rows if row["valid_loss"]] == [3, 6]


def test_tensorboard_files_lie_in_the_run(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    result = fuselm(data, *TINY, "--out", tmp_path / "run", "--samples", "0", "--tensorboard")
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "run" / "tensorboard").glob("events.*")]


def test_text_is_tokenised_into_the_run_and_overwrite_begins_anew(tmp_path: Path) -> None:
    text, out = tmp_path / "hen.txt", tmp_path / "run"
    text.write_text("Once upon a time there was a little red hen who lived by the sea.\n" * 60)
    options = (text, *TINY, "--preset", "naive-char", "--samples", "0", "--out", out)
    assert fuselm(*options).exit_code == 0
    assert (out / "data" / "prepared.json").is_file()
    assert open_run(out).model.vocab_size == len(set(text.read_text()))
    result = fuselm(*options, "--steps", "4", "--overwrite")
    assert result.exit_code == 0, result.output
    assert open_run(out).saved["last"] == 4
    steps = [record["step"] for record in read_log(out / "log.jsonl") if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("letters", "asked", "at"),
    [
        (1_000, (), [4, 8, 12, 16, 20]),  # 100 letters of validation are soon read
        (4_000, (), [5, 10, 15, 20]),  # of 400, four times are as much work as 20 steps of 2 x 16
        (40_000, (), [20]),
        (40_000, ("--set", "eval_every=10"), [10, 20]),
    ],
)
def test_a_short_run_validates_for_no_longer_than_it_trains(
    letters: int, asked: tuple[str, ...], at: list[int], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("hens" * (letters // 4))
    options = (*SHAPE, "--preset", "naive-char", "--steps", "20", "--samples", "0", *asked, "--out", tmp_path / "run")
    assert fuselm(tmp_path / "text.txt", *options).exit_code == 0
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [record["step"] for record in records if record["kind"] == "eval"] == at
    assert "finished already at step 20 of 20" in fuselm(tmp_path / "text.txt", *options).stderr


def test_a_run_as_long_as_its_presets_evaluates_as_often(tmp_path: Path) -> None:
    for steps in (5000, 6000):
        plan = make_plan("naive-char", None, tmp_path, {"steps": steps}, [], None, None, overwrite=False)
        assert "eval_every" not in plan.unasked
        assert plan.train.eval_every == PRESETS["naive-char"].train().eval_every


@pytest.mark.parametrize(
    ("steps", "settings", "every"), [(8, [], 1), (60, [], 3), (500, [], 10), (60, ["log_every=10"], 10)]
)
def test_a_short_run_has_a_curve_of_more_than_a_few_points(
    steps: int, settings: list[str], every: int, tmp_path: Path
) -> None:
    plan = make_plan("tiny", None, tmp_path, {"steps": steps}, settings, None, None, overwrite=False)
    assert plan.train.log_every == every


def test_the_size_of_the_vocabulary_is_that_of_the_tokenizer_it_trains(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("stories", "--limit-mb", "0.1", *TINY, "--samples", "0", "--out", out, "--set")
    result = fuselm(*command, "vocab_size=300")
    assert result.exit_code == 0, result.output
    run = open_run(out)
    assert run.model.vocab_size == run.tokenizer().vocab_size == 300
    assert "finished already" in fuselm(*command, "vocab_size=300").stderr
    assert_refused(fuselm(*command, "vocab_size=310"), "data.tokens = 300 (asked for: 310)")


def test_each_text_has_a_folder_of_its_own_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [tmp_path / "hen.txt", tmp_path / "other" / "my.sea.txt.gz"]
    texts[1].parent.mkdir()
    texts[0].write_text("Once upon a time there was a little red hen. " * 60)
    texts[1].write_bytes(gzip.compress(b"She lived by the sea, which was blue. " * 60))
    options = ("--preset", "naive-char", "--samples", "0", "--steps", "2", "--set", "width=16", "--set", "ffn_width=32")
    for text in texts:
        assert fuselm(text, *options).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["hen-naive-char", "my.sea-naive-char"]
    texts[0].unlink()  # the run has what it needs, and is found without
    assert "finished already at step 2 of 2" in fuselm(texts[0], *options).stderr


def test_a_prepared_folder_of_a_built_in_corpus_name_is_not_that_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`./stories` is the folder; a preset whose corpus is the built-in one trained on it without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hen.txt").write_text("Once upon a time there was a little red hen. " * 60)
    prepared = CliRunner().invoke(app, ["data", "prepare", "hen.txt", "--characters", "--out", "stories"])
    assert prepared.exit_code == 0, prepared.output
    options = (*TINY, "--samples", "0", "--limit-mb", "0.1")
    assert fuselm("stories", *options, "--out", "built-in").exit_code == 0
    assert open_run(tmp_path / "built-in").data["corpus"] == "stories"
    found = fuselm("./stories", *TINY, "--samples", "0", "--out", "folder")
    assert found.exit_code == 0, found.output
    assert open_run(tmp_path / "folder").data["corpus"] == str(tmp_path / "stories")


def test_a_text_is_the_same_however_its_path_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        (folder / "hen.txt").write_text("Once upon a time there was a little red hen. " * 60)
    options = (*TINY, "--preset", "naive-char", "--samples", "0", "--out", tmp_path / "run")
    assert fuselm("hen.txt", *options).exit_code == 0
    for same in (tmp_path / "hen.txt", "other/../hen.txt", "~/hen.txt"):
        assert "finished already at step 6 of 6" in fuselm(same, *options).stderr
    assert_refused(fuselm("other/hen.txt", *options), "data.corpus = ")
    monkeypatch.chdir("other")
    assert "finished already at step 6 of 6" in fuselm("../hen.txt", *options).stderr
    assert_refused(fuselm("hen.txt", *options), "data.corpus = ")


def test_a_run_whose_corpus_was_noted_as_it_was_typed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hen.txt").write_text("Once upon a time there was a little red hen. " * 60)
    options = (*TINY, "--preset", "naive-char", "--samples", "0", "--out", tmp_path / "run")
    assert fuselm("hen.txt", *options).exit_code == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["data"]["corpus"] = "hen.txt"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert "finished already at step 6 of 6" in fuselm("./hen.txt", *options).stderr


@pytest.mark.parametrize("corpus", [None, "little-stories"])
def test_the_text_of_a_preset_is_trained_in_the_folder_of_its_name(corpus: str | None) -> None:
    plan = make_plan("demo", corpus, None, {}, [], None, None, overwrite=False)
    assert plan.out == Path("runs/demo")


@pytest.mark.parametrize(
    ("corpus", "folder"),
    [
        ("stories", "stories-demo"),
        ("notes/v1.2/", "v1.2-demo"),
        ("a/book.JSONL.zst", "book-demo"),
        ("hen", "hen-demo"),
        ("notes/v1/..", "notes-demo"),
    ],
)
def test_another_text_is_trained_in_a_folder_of_both_names(corpus: str, folder: str) -> None:
    assert make_plan("demo", corpus, None, {}, [], None, None, overwrite=False).out == Path("runs") / folder


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_from_there(number: signal.Signals, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = (*SHAPE, "--steps", "400", "--set", "eval_every=400", "--set", "sample_every=0", "--samples", "0")
    command = [sys.executable, "-m", "fuselm", "train", str(data), *options, "--out", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=child_environment()
    ) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if (out / "log.jsonl").exists() and (out / "log.jsonl").stat().st_size:
                break
            time.sleep(0.005)
        # Again and again until it ends, as when `timeout` signals make and all it has started, and make hands it on.
        first = time.monotonic()
        while process.poll() is None and time.monotonic() - first < SAME_WISH_SECONDS / 2:
            process.send_signal(number)
            time.sleep(0.002)
        _, words = process.communicate(timeout=60)
    assert process.returncode == 130, words
    step = open_run(out).saved["last"]
    assert 0 < step < 400
    assert f"stopped at step {step}; everything is saved" in words
    assert f"go on with: fuselm train --resume {out}" in words
    assert "Traceback" not in words
    result = fuselm("--resume", out, "--device", "cpu", "--samples", "0")
    assert result.exit_code == 0, result.output
    assert f"going on from step {step} of 400" in result.stderr
    assert open_run(out).saved["last"] == 400
    steps = [record["step"] for record in read_log(out / "log.jsonl") if record["kind"] == "step"]
    assert steps == list(range(1, 401))


# --- refusals --------------------------------------------------------------------------------------------------------


def assert_refused(result: Result, says: str) -> None:
    """One sentence on stderr and exit code 1."""
    assert result.exit_code == 1, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert says in errors[0]
    assert errors[0] == result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def trained(folder: Path) -> bool:
    return (folder / "checkpoints.json").exists() or (folder / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("{data}", "--preset", "tini"), "no preset 'tini'; the presets are demo, tinylm, "),
        (("{data}", "--preset", "tini"), "Did you mean tiny?"),
        (("{data}", "--set", "num_heads=5"), "got width 16 and 5 heads. Take 4 heads, or give head_dim."),
        (("{data}", "--set", "num_head=4"), "no field 'num_head'; there are vocab_size, "),
        (("{data}", "--set", "learning_rte=1"), "Did you mean learning_rate?"),
        (("{data}", "--seed", str(2**70)), "seed is 0 or more and below 2**63"),
        (("{data}", "--set", "num_head=4"), "Did you mean num_heads?"),
        (("{data}", "--set", "dropout"), "--set takes name=value; got 'dropout'."),
        (("{data}", "--set", "vocab_size=300"), "the prepared corpus has its own. Leave vocab_size out."),
        (("stories", "--tokenizer", "{data}/tokenizer.json", "--set", "vocab_size=300"), "--tokenizer names another."),
        (("stories", "--preset", "naive-char", "--set", "vocab_size=300"), "naive-char has a token for each character"),
        (("nowhere", "--set", "vocab_size=99"), "at least 256 bytes and its special tokens"),
        (("stories", "--set", "vocab_size=many"), "vocab_size is a whole number; got 'many'."),
        (("{data}", "--set", "width=wide"), "width is a whole number; got 'wide'."),
        (("{data}", "--set", "schedule=cosin"), "one of cosine, linear, wsd, constant; got 'cosin'"),
        (("{data}", "--micro-batch", "3"), "micro_batch divides batch_size; got 3 for 2."),
        (("{data}", "--steps", "0"), "steps is a number above 0; got 0."),
        (("{data}", "--samples", "-1"), "--samples is 0 or more; got -1."),
        (("{data}", "--precision", "fp16"), "fp16 trains on a GPU; the device is the CPU. Use --precision fp32"),
        (("{data}", "--precision", "fp8"), "one of auto, fp32, bf16, fp16; got 'fp8'"),
        (("{data}", "--device", "tpu"), "A device is auto, cpu, cuda or cuda:1; got 'tpu'."),
        (("{data}", "--impl", "fused"), "fused"),
        (("{data}", "--tokenizer", "{data}/tokenizer.json"), "is tokenised already; --tokenizer and --limit-mb come"),
        (("{data}", "--limit-mb", "1"), "is tokenised already; --tokenizer and --limit-mb come too late."),
        (("{data}", "--context", "12000"), "A row is context + 1 = 12001 tokens; the corpus has "),
        (("{data}", "--batch-size", "900"), "An epoch holds a global batch or more"),
        (("{small}",), "Use a smaller context or a longer corpus."),
        (("{empty}",), "empty.txt has no text"),
        (("nowhere",), "A corpus is one of stories, "),
        (("{data}", "--out", "{file}/run"), "A run writes into its folder; {file}/run refuses (Not a directory)."),
        (("{data}", "--out", "{file}"), "A run is a folder; {file} is a file."),
        (("{data}", "--out", "/proc/fuselm"), "A run writes into its folder; /proc/fuselm refuses ("),
        (("{full}", "--out", "{full}/run"), "What is made of {full} cannot lie inside it: the next run would read it."),
        (("{data}", "--out", "{full}"), "{full} holds other files: thesis.txt. Use another folder."),
    ],
)
@pytest.mark.filterwarnings("default")  # a small text gives a small vocabulary, with a warning
def test_what_cannot_be_done_is_refused_before_a_step_is_made(
    arguments: tuple[str, ...], says: str, data: Path, tmp_path: Path
) -> None:
    names = {"data": data, "file": tmp_path / "file", "full": tmp_path / "full"}
    names |= {"small": tmp_path / "small.txt", "empty": tmp_path / "empty.txt"}
    names["file"].write_text("a file")
    names["small"].write_text("too short")
    names["empty"].write_text("")
    names["full"].mkdir()
    (names["full"] / "thesis.txt").write_text("do not touch")
    filled = [argument.format(**names) for argument in arguments]
    result = fuselm(filled[0], *TINY, "--out", tmp_path / "run", *filled[1:])
    assert_refused(result, says.format(**names))
    assert not trained(tmp_path / "run")
    assert contents(names["full"]) == {"thesis.txt": b"do not touch"}
    assert names["file"].read_text() == "a file"


def test_a_folder_that_a_run_cannot_have_is_refused_with_the_option_that_names_it(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file")
    for taken in (finished, tmp_path, tmp_path / "file", tmp_path / "file" / "run"):
        result = fuselm(data, *TINY, "--set", "width=32", "--out", taken)
        assert_refused(result, "Use another")
        assert result.stderr.endswith(". --out names the folder.\n")


def test_a_gpu_that_is_not_there_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = fuselm(data, *TINY, "--out", tmp_path / "run", "--device", "cuda")
    assert_refused(result, "This machine has 0 CUDA devices; got 'cuda'. Use cpu or auto.")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_too_full_is_refused(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 5000, 5000))
    result = fuselm(data, *TINY, "--out", tmp_path / "run")
    assert_refused(result, "has 0 MB free. Make room, or use a folder on another disk.")
    assert not trained(tmp_path / "run")


def test_a_folder_that_refuses_to_be_written_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_whole(path: Path, text: str | bytes) -> None:
        raise OSError(30, os.strerror(30), str(path))

    monkeypatch.setattr(checkpoint, "write_whole", write_whole)
    result = fuselm(data, *TINY, "--out", tmp_path / "run")
    assert_refused(result, f"{tmp_path / 'run'} refuses (Read-only file system). Use another.")


def test_a_disk_that_fills_up_on_the_way_leaves_the_last_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checkpoint._publish

    def publish(folder: Path, step: int, *rest: Any) -> None:
        if step == 6:
            raise OSError(28, os.strerror(28))
        whole(folder, step, *rest)

    monkeypatch.setattr(checkpoint, "_publish", publish)
    out = tmp_path / "run"
    assert_refused(fuselm(data, *TINY, "--out", out), "Make room there, and resume.")
    assert open_run(out).saved["last"] == 3
    monkeypatch.undo()
    assert fuselm(data, *TINY, "--out", out).exit_code == 0
    assert open_run(out).saved["last"] == 6


# --- a run that is there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--set", "width=32"), "has model.width = 16 (asked for: 32)"),
        (("--steps", "60"), "has train.steps = 6 (asked for: 60)"),
        (("--lr", "0.5"), "has train.learning_rate = 0.003 (asked for: 0.5)"),
        (("--preset", "small"), 'data.preset = "tiny" (asked for: "small")'),
    ],
)
def test_a_folder_of_another_config_is_refused_by_field_and_values(
    change: tuple[str, ...], says: str, data: Path, finished: Path
) -> None:
    before = contents(finished)
    result = fuselm(data, *TINY, "--out", finished, *change)
    if "--preset" in change:
        assert result.exit_code == 1, result.output  # many fields differ, and the first ones are named
        assert "A run keeps its config" in result.stderr
    else:
        assert_refused(result, says)
    assert contents(finished) == before


def test_other_data_for_a_run_is_refused(finished: Path, tmp_path: Path) -> None:
    other = prepared(tmp_path / "other")
    assert_refused(fuselm(other, *TINY, "--out", finished), "data.corpus = ")


def test_data_that_was_moved_is_wanted_back(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data")
    run = begun_with(data, tmp_path / "run")
    data.rename(tmp_path / "moved")
    assert_refused(fuselm("--resume", run), f"{data}, with which it was begun, holds no prepared corpus. Put that back")
    (tmp_path / "moved").rename(data)
    assert fuselm("--resume", run, "--device", "cpu", "--samples", "0").exit_code == 0


def test_a_corpus_that_is_not_there_is_said_before_the_run_that_is(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("once upon a time there was a very small story\n" * 400)
    assert fuselm(text, *TINY, "--out", out).exit_code == 0
    assert_refused(fuselm(tmp_path / "missing.txt", *TINY, "--out", out), "missing.txt' is neither.")
    assert_refused(fuselm("stories", *TINY, "--out", out), "A run keeps its config")
    text.unlink()  # of which the run has all that it needs
    assert fuselm(text, *TINY, "--out", out).exit_code == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--steps", "9"), "--steps"),
        (("--lr", "0.1"), "--learning-rate"),
        (("--preset", "tiny", "--set", "width=16"), "--preset, --set"),
        (("stories",), "CORPUS"),
        (("--out", "x", "--micro-batch", "1", "--no-compile"), "--out, --micro-batch, --compile"),
        (("--limit-mb", "1"), "--limit-mb"),
    ],
)
def test_resume_takes_no_other_config(more: tuple[str, ...], named: str, finished: Path) -> None:
    before = contents(finished)
    says = f"--resume goes on with the config in the folder; got {named} as well. Leave that out."
    assert_refused(fuselm("--resume", finished, *more), says)
    assert contents(finished) == before


def test_resume_wants_a_run(tmp_path: Path, data: Path) -> None:
    assert_refused(fuselm("--resume", tmp_path / "nowhere"), f"{tmp_path / 'nowhere'} is not there.")
    assert_refused(fuselm("--resume", tmp_path), f"A run is a folder with config.json; {tmp_path} has no config.json.")
    assert_refused(fuselm("--resume", data), "has no config.json")


def begun_with(data: Path, out: Path) -> Path:
    result = fuselm(data, *TINY, "--out", out, "--samples", "0")
    assert result.exit_code == 0, result.output
    return out


def test_a_prepared_folder_of_another_tokenizer_is_refused_on_resume(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data")
    out = begun_with(data, tmp_path / "run")
    before = contents(out)
    shutil.rmtree(data)
    text = tmp_path / "text.txt"
    text.write_text("another text with other letters: ÄÖÜ. " * 50)
    prepare = ["data", "prepare", str(text), "--characters", "--out", str(data)]
    assert CliRunner().invoke(app, prepare).exit_code == 0
    for command in (("--resume", out), (data, *TINY, "--out", out)):
        assert_refused(fuselm(*command), f"A run keeps its data; {data} has changed since it began (train_tokens).")
    assert contents(out) == before


@pytest.mark.parametrize(
    ("name", "tamper", "says"),
    [
        ("train.tokens", lambda raw: raw[:-100], "is truncated"),
        ("train.tokens", lambda raw: raw + b"12345678", "is longer than it should be"),
        ("valid.tokens", lambda raw: b"", "is empty"),
        ("prepared.json", lambda raw: raw.replace(b"a", b"b"), "are made together"),
        ("prepared.json", lambda raw: b"{", "is not JSON"),
        ("tokenizer.json", lambda raw: raw[:-10], "tokenizer.json"),
    ],
)
@pytest.mark.parametrize("resumed", [True, False])
def test_a_prepared_folder_that_was_tampered_with_is_refused(
    name: str, tamper: Any, says: str, resumed: bool, finished: Path, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(data, tmp_path / "data")
    command: tuple[Any, ...] = (tmp_path / "data", *TINY, "--out", tmp_path / "run")
    if resumed:
        shutil.copytree(finished, tmp_path / "run")
        config = tmp_path / "run" / "config.json"
        config.write_text(config.read_text().replace(str(data), str(tmp_path / "data")))
        command = ("--resume", tmp_path / "run")
    (tmp_path / "data" / name).write_bytes(tamper((tmp_path / "data" / name).read_bytes()))
    before = contents(tmp_path / "run") if resumed else {}
    result = fuselm(*command)
    assert_refused(result, says)
    assert not resumed or contents(tmp_path / "run") == before
    assert resumed or not trained(tmp_path / "run")


@pytest.mark.parametrize("wrong", [("--context", "12000"), ("--batch-size", "900"), ("--impl", "fused")])
def test_a_refused_run_does_not_occupy_its_folder(wrong: tuple[str, str], data: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "run"
    assert fuselm(data, *TINY, "--out", out, *wrong).exit_code == 1
    assert list(tmp_path.iterdir()) == []
    assert fuselm(data, *TINY, "--out", out, "--steps", "1").exit_code == 0


def test_a_validation_split_without_a_target_is_refused_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abc " * 300)
    (tmp_path / "valid.txt").write_text("a")
    result = fuselm(tmp_path, *TINY, "--preset", "naive-char", "--out", tmp_path.parent / "run")
    assert_refused(result, "A validation split has at least 2 tokens")


def test_a_changed_byte_of_the_data_is_noticed(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    tokens = bytearray((copy / "train.tokens").read_bytes())
    tokens[5000] ^= 1
    (copy / "train.tokens").write_bytes(tokens)
    assert_refused(fuselm(copy, *TINY, "--out", tmp_path / "run"), "train.tokens is damaged")


def test_resuming_does_not_overwrite(data: Path, tmp_path: Path) -> None:
    assert fuselm(data, *TINY, "--out", tmp_path / "run").exit_code == 0
    assert_refused(fuselm("--resume", tmp_path / "run", "--overwrite"), "got --overwrite as well")


def test_a_run_that_was_killed_before_it_saved_begins_again_and_says_so(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fuselm(data, *TINY, "--out", run).exit_code == 0
    (run / "checkpoints.json").unlink()  # as if it had never saved; the log is there
    again = fuselm("--resume", run, "--device", "cpu", "--samples", "0")
    assert again.exit_code == 0, again.output
    assert "from the beginning: the run in this folder was ended before it saved" in again.stderr
    assert "from the beginning" not in fuselm(data, *TINY, "--out", run, "--overwrite").stderr


def test_other_peoples_files_are_left_alone(data: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "folder" / "data"
    shutil.copytree(data, theirs)
    before = (theirs / "train.tokens").read_bytes()
    result = fuselm("stories", "--limit-mb", "0.1", *TINY, "--out", tmp_path / "folder")
    assert_refused(result, "holds other files: data. Use another folder.")
    assert (theirs / "train.tokens").read_bytes() == before


def test_a_refused_overwrite_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fuselm("stories", "--limit-mb", "0.1", *TINY, "--out", run).exit_code == 0
    short = tmp_path / "short.txt"
    short.write_text("too short for a row")
    assert fuselm(short, *TINY, "--out", run, "--overwrite").exit_code == 1
    assert fuselm("--resume", run).exit_code == 0


def test_a_prepared_folder_is_found_from_anywhere(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    assert fuselm(data.name, *TINY, "--out", tmp_path / "run").exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert fuselm("--resume", tmp_path / "run").exit_code == 0


def test_a_second_process_is_refused(data: Path, tmp_path: Path) -> None:
    assert fuselm(data, *TINY, "--out", tmp_path / "run").exit_code == 0
    with open_run(tmp_path / "run").claimed():
        assert_refused(fuselm("--resume", tmp_path / "run"), "trained by one process at a time; another one is at work")


def test_the_report_is_of_this_run(data: Path, tmp_path: Path) -> None:
    assert fuselm(data, *TINY, "--out", tmp_path / "run").exit_code == 0
    page = (tmp_path / "run" / "report.md").read_text()
    for words in ("| parameters | ", "| trained on | ", "| validated on | ", "## A sample of the best weights"):
        assert words in page
    assert f"fuselm train --resume {tmp_path / 'run'}" in page
    assert "\\['" not in page  # no list of Python's in a cell


def test_json_is_all_of_stdout(data: Path, tmp_path: Path) -> None:
    result = fuselm(data, *TINY, "--out", tmp_path / "run", "--json")
    assert json.loads(result.stdout)["best_loss"] > 0


def test_without_matplotlib_there_is_a_report_all_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = fuselm(data, *TINY, "--out", tmp_path / "run")
    assert result.exit_code == 0
    assert "curve.png was not drawn" in result.stderr
    assert "weights, report.md. Next" in result.stdout
    assert (tmp_path / "run" / "report.md").is_file()


def test_a_short_text_gets_a_smaller_batch_unless_one_was_asked_for(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text of a few hundred letters. " * 12)
    tiny = ("--preset", "naive-char", "--steps", "2", "--set", "width=16", "--set", "ffn_width=32", "--out")
    result = fuselm(text, *tiny, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "rows of 64 tokens: 4 a step, not 128" in result.stderr
    again = fuselm(text, *tiny, tmp_path / "run")
    assert again.exit_code == 0, again.output
    assert "finished already at step 2 of 2" in again.stderr
    assert_refused(fuselm(text, *tiny, tmp_path / "other", "--batch-size", "128"), "An epoch holds a global batch")
    assert not (tmp_path / "other").exists()


def test_a_trained_model_can_be_asked(data: Path, tmp_path: Path) -> None:
    assert fuselm(data, *TINY, "--out", tmp_path / "run").exit_code == 0
    run = open_run(tmp_path / "run")
    model = load_model(run)
    for name, array in run.load("best", weights_only=True).weights.items():
        assert (dict(model.named_parameters())[name].detach().numpy() == array).all()
    [text] = sample(model, run.tokenizer().encode("Once upon"), max_tokens=5)
    assert len(text.ids) == 5


def test_a_run_that_lost_its_data_gets_it_again(tmp_path: Path) -> None:
    command = ("stories", "--limit-mb", "0.1", *TINY, "--out", tmp_path / "run")
    assert fuselm(*command).exit_code == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    shutil.rmtree(tmp_path / "run" / "data")  # as after a kill between the two
    again = fuselm(*command)
    assert again.exit_code == 0, again.output
    assert "finished already" in again.stderr
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert (tmp_path / "run" / "data" / "train.tokens").is_file()


def test_a_run_that_somebody_trains_is_not_overwritten(tmp_path: Path) -> None:
    command = ("stories", "--limit-mb", "0.1", *TINY, "--out", tmp_path / "run")
    assert fuselm(*command).exit_code == 0
    with open_run(tmp_path / "run").claimed():
        assert_refused(fuselm(*command, "--overwrite"), "trained by one process at a time")
    assert open_run(tmp_path / "run").has_checkpoint
