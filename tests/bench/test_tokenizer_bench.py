"""`fuselm bench tokenizer`: its rows, figures and files, who is compared with whom, and how it ends when it cannot."""

from __future__ import annotations

import csv
import gc
import importlib.util
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fuselm.bench import tokenizer as bench
from fuselm.bench import tokenizer_peers as peers
from fuselm.bench import tokenizer_process as process
from fuselm.bench.tokenizer_process import JobFailed, Sample
from fuselm.bench.tokenizer_rows import ALONE, TASKS, Results, make_row, summary
from fuselm.cli import app
from fuselm.text.blocks import thread_count
from fuselm.text.bpe import train_bpe
from fuselm.text.tokenizer import Tokenizer

HERE = [name for name in peers.NAMES if importlib.util.find_spec(name)]
SMALL = ["bench", "tokenizer", "--quick", "--vocab-size", "400", "--repeats", "1", "--stream-megabytes", "0"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def in_one_line(text: str) -> str:
    """A message without the frame and the line breaks that a terminal's width puts into it."""
    return " ".join(text.replace("│", " ").split())


def some_text(size: int) -> str:
    """Lines of words, numbers and signs, some of them not ASCII, and a special token that is meant as text."""
    chosen = random.Random(0)
    words = ["naïve", "東京", "don't", "1984", "--", "x\ty", "<|endoftext|>"]
    words += ["".join(chosen.choices("aeinorst", k=chosen.randint(2, 9))) for _ in range(200)]
    lines: list[str] = []
    while sum(map(len, lines)) < size:
        lines.append(" ".join(chosen.choices(words, k=12)) + "\n" * chosen.randint(1, 2))
    return "".join(lines)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(some_text(60_000), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def vocabulary(corpus: Path) -> Tokenizer:
    return Tokenizer(*train_bpe(corpus, 400, process.SPECIALS), process.SPECIALS)


@pytest.fixture(scope="module")
def whole_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run of everything, as the command prints it, and the folder it wrote into."""
    out = tmp_path_factory.mktemp("results") / "new"
    options = ["--corpus", str(corpus), "--vocab-size", "400", "--threads", "2", "--repeats", "1", "--json"]
    result = invoke("bench", "tokenizer", *options, "--stream-megabytes", "0.1", "--label", "mill", "--out", str(out))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1]), out


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_every_library_here_has_a_row_in_each_of_its_tasks(whole_run: tuple[dict[str, Any], Path]) -> None:
    found = [(row["task"], row["impl"]) for row in whole_run[0]["rows"]]
    assert found == [(task, name) for task, names in TASKS.items() for name in names if name in (*HERE, ALONE)]


def test_rows_state_sizes_threads_and_memory(whole_run: tuple[dict[str, Any], Path], corpus: Path) -> None:
    rows = {(row["task"], row["impl"]): row for row in whole_run[0]["rows"]}
    whole = pytest.approx(corpus.stat().st_size / 1e6, rel=1e-4)
    assert rows["encode", "fuselm"]["megabytes"] == whole
    assert {task: rows[task, "fuselm"]["threads"] for task in TASKS} == {
        **dict.fromkeys(TASKS, 1), "train": 2, "encode_threads": 2, "encode_bytes_threads": 2, "encode_batch": 2
    }  # fmt: skip
    assert rows["train", "fuselm"]["tokens"] == 400
    assert rows["encode_iterable", "fuselm"]["repeats"] == 1
    for name, threads in (("fuselm", 2), (ALONE, 1)):
        row = rows["encode_bytes_threads", name]
        assert (row["threads"], row["repeats"], row["megabytes"]) == (threads, 3 * 1, whole)
    for task in ("train", "encode_iterable"):
        assert 0 < rows[task, "fuselm"]["start_rss_mb"] <= rows[task, "fuselm"]["peak_rss_mb"]
    small = rows["small", "fuselm"]
    assert small["us_per_call"] == pytest.approx(small["seconds"] * 1e6, rel=1e-3)
    assert all(row["seconds_min"] <= row["seconds"] <= row["seconds_max"] for row in rows.values())


def test_speedups_are_the_ratios_of_the_rows(whole_run: tuple[dict[str, Any], Path]) -> None:
    document, _ = whole_run
    speed = {(row["task"], row["impl"]): row["mb_per_s"] for row in document["rows"]}
    expected = {
        f"{task}_{name}_speedup": pytest.approx(speed[task, "fuselm"] / speed[task, name], rel=1e-3)
        for task, name in speed
        if name not in ("fuselm", ALONE)
    }
    for name, task in {"threads_speedup": "encode_threads", "bytes_threads_speedup": "encode_bytes_threads"}.items():
        expected[name] = pytest.approx(speed[task, "fuselm"] / speed[task, ALONE], rel=1e-3)
    assert {key: value for key, value in document.items() if key.endswith("_speedup")} == expected


def test_the_json_line_says_what_was_measured_on_what(whole_run: tuple[dict[str, Any], Path]) -> None:
    document, _ = whole_run
    assert (document["label"], document["threads"], document["corpus"]) == ("mill", 2, "corpus.txt")
    assert document["cpu"]
    assert set(HERE[1:]) <= set(document["versions"])
    assert document["train_peak_rss_mb"] > document["train_start_rss_mb"] > 0
    assert document["encode_iterable_peak_rss_mb"] > 0


def test_files_hold_the_rows_and_a_picture_and_nothing_is_left_behind(whole_run: tuple[dict[str, Any], Path]) -> None:
    document, out = whole_run
    assert sorted(path.name for path in out.iterdir()) == ["rows.csv", "rows.json", "tokenizer.png"]
    assert [Path(name).name for name in document["files"]] == ["rows.csv", "rows.json", "tokenizer.png"]
    assert (out / "tokenizer.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((out / "rows.json").read_text())
    assert kept["rows"] == document["rows"]
    assert kept["threads_speedup"] == document["threads_speedup"]
    with (out / "rows.csv").open(newline="") as file:
        assert [(row["task"], row["mb_per_s"]) for row in csv.DictReader(file)] == [
            (row["task"], str(row["mb_per_s"])) for row in document["rows"]
        ]


# --- endings ---------------------------------------------------------------------------------------------------------


def test_without_peers_fuselm_is_measured_alone(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda names=peers.NAMES: [n for n in names if n in peers.NAMES[1:]])
    monkeypatch.setattr(bench, "TASKS", {"train": TASKS["train"], "small": TASKS["small"]})
    result = invoke(*SMALL, "--corpus", str(corpus), "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["task"], row["impl"]) for row in rows] == [("train", "fuselm"), ("small", "fuselm")]
    assert "tokenizers is not installed: `pip install tokenizers`" in result.stderr
    table = [line.split() for line in result.stdout.splitlines()]
    assert [words[:3] for words in table[1:3]] == [
        ["train", "fuselm", str(thread_count(None))],
        ["small", "fuselm", "1"],
    ]
    assert max(map(len, result.stdout.splitlines()[:3])) <= 80


def test_other_ids_end_the_run_and_it_says_where(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(tokenizer: Tokenizer) -> peers.Coder:
        return peers.Coder(lambda text: [*tokenizer.encode_ordinary(text)[:-1], 7], None, lambda *_: [], lambda _: "")

    monkeypatch.setitem(peers._MAKERS, "tiktoken", other)
    monkeypatch.setattr(peers, "missing", lambda names=peers.NAMES: [])
    monkeypatch.setattr(bench, "TASKS", {"train": ("fuselm",), "encode": ("fuselm", "tiktoken")})
    result = invoke(*SMALL, "--corpus", str(corpus), "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "encode: tiktoken has other ids from" in in_one_line(result.stderr)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["task"], row["impl"]) for row in rows] == [("train", "fuselm"), ("encode", "fuselm")]


def test_the_first_difference_is_named(vocabulary: Tokenizer) -> None:
    ids = np.array(vocabulary.encode_ordinary("the cat"), np.uint32)
    changed = ids.copy()
    changed[2] = 0
    before = vocabulary.decode(ids[:2])
    bench.check_same(vocabulary, "encode", "tiktoken", ids, ids)
    with pytest.raises(bench.Mismatch, match=rf"tiktoken has other ids from 2 on: \[0, .* after '{before}'"):
        bench.check_same(vocabulary, "encode", "tiktoken", changed, ids)
    with pytest.raises(bench.Mismatch, match=rf"from {len(ids) - 1} on: \[\] instead of"):
        bench.check_same(vocabulary, "encode", "tiktoken", ids[:-1], ids)
    with pytest.raises(bench.Mismatch, match="another text from character 4 on: 'dog' instead of 'cat'"):
        bench.check_same(vocabulary, "decode", "tiktoken", "the dog", "the cat")


@pytest.mark.parametrize(("failing", "code"), [("fuselm", 1), ("tokenizers", 0)])
def test_only_a_failure_of_our_own_is_a_failure(
    failing: str, code: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(name: str, threads: int, impl: str = "", **options: object) -> Sample:
        if impl == failing:
            raise JobFailed("out of luck")
        return Sample(0.5, 400, 20.0, 10.0)

    monkeypatch.setattr(bench, "run_apart", job)
    monkeypatch.setattr(peers, "missing", lambda names=peers.NAMES: [])
    result = invoke(*SMALL, "--corpus", str(corpus), "--out", str(tmp_path))
    assert result.exit_code == code, result.output
    document = json.loads((tmp_path / "rows.json").read_text())
    assert {"task": "train", "impl": failing, "note": "JobFailed: out of luck"} in document["notes"]
    assert [row["impl"] for row in document["rows"]] == ["tokenizers" if failing == "fuselm" else "fuselm"]


def test_interrupting_keeps_what_was_measured(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def job(name: str, threads: int, **options: object) -> Sample:
        calls.append(name)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return Sample(0.5, 400, 20.0, 10.0)

    monkeypatch.setattr(bench, "run_apart", job)
    result = invoke(*SMALL, "--corpus", str(corpus), "--repeats", "3", "--out", str(tmp_path))
    assert result.exit_code == 130
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["task"], row["impl"], row["seconds"], row["repeats"]) == ("train", "fuselm", 0.5, 1)
    assert not list(tmp_path.glob(".bench-*"))
    assert "interrupted" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--corpus", "none.txt"], "cannot read none.txt: No such file or directory"),
        (["--corpus", "."], "cannot read .: Is a directory"),
        (["--corpus", "empty.txt"], "A corpus has text in it"),
        (["--corpus", "latin.txt"], "latin.txt has 1 bytes that are not in 4 characters"),
        (["--gpt2-vocab", "nowhere"], "there is none at nowhere"),
        (["--gpt2-vocab", "."], "vocab.json with merges.txt or encoder.json with vocab.bpe; . has none of them"),
        (["--gpt2-vocab", "letters.json"], "letters.json is of another kind: characters"),
        (["--megabytes", "0"], "a size is a number above 0; got 0.0"),
        (["--stream-megabytes", "inf"], "a size is a number above 0; got inf"),
        (["--threads", "0"], "--threads"),
        (["--repeats", "0"], "--repeats"),
        (["--vocab-size", "100"], "--vocab-size"),
        (["--out", "empty.txt"], "name a folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("it ran"))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    Tokenizer.characters("abc").save(tmp_path / "letters.json")
    result = invoke("bench", "tokenizer", *options)
    assert result.exit_code == 2, result.output
    assert says in in_one_line(result.stderr)


def test_help_teaches_by_example() -> None:
    shown = in_one_line(invoke("bench", "tokenizer", "--help").stdout)
    assert "fuselm bench tokenizer --quick" in shown
    assert "--gpt2-vocab" in shown


# --- its parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HERE[1:])
def test_a_peer_with_the_same_vocabulary_does_the_same(name: str, vocabulary: Tokenizer) -> None:
    coder, text = peers.make(name, vocabulary), some_text(3000)
    ids = vocabulary.encode_ordinary(text)
    assert coder.encode(text) == ids
    assert coder.decode(ids) == text
    texts = [text[:1000], text[1000:]]
    assert [list(one) for one in coder.encode_batch(texts, 2)] == [vocabulary.encode_ordinary(one) for one in texts]
    if coder.encode_array:
        assert coder.encode_array(text, 1).tolist() == ids


def test_libraries_take_turns_and_medians_count(tmp_path: Path) -> None:
    seen: list[str] = []
    seconds = {"fuselm": iter([3.0, 1.0, 2.0]), "tiktoken": iter([4.0, 40.0, 5.0])}

    def measure(name: str) -> Sample:
        seen.append(name)
        return Sample(next(seconds[name]), 10)

    plan = bench.Plan(megabytes=1, threads=1, repeats=3)
    run = bench.Bench(plan, tmp_path, Results(), lambda text: None, tmp_path, "", tmp_path)
    rows = bench._in_turn(run, "encode", 1, {"fuselm": 10.0, "tiktoken": 10.0}, measure)
    assert seen == ["fuselm", "tiktoken", "tiktoken", "fuselm", "fuselm", "tiktoken"]
    assert [(row["seconds"], row["seconds_min"], row["seconds_max"], row["mb_per_s"]) for row in rows] == [
        (2.0, 1.0, 3.0, 5.0),
        (5.0, 4.0, 40.0, 2.0),
    ]
    assert summary(rows) == {"encode_tiktoken_speedup": 2.5}


def test_of_memory_the_worst_repeat_counts() -> None:
    row = make_row("train", "fuselm", 1, 1.0, [Sample(1.0, 5, 30.0, 10.0), Sample(1.0, 5, 20.0, 11.0)])
    assert (row["peak_rss_mb"], row["start_rss_mb"]) == (30.0, 11.0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_of_a_job_is_not_that_of_who_started_it(corpus: Path) -> None:
    held = np.ones(150_000_000, np.uint8)
    sample = process.run_apart("train", 1, impl="fuselm", corpus=str(corpus), vocab_size=300)
    assert sample.peak_rss_mb is not None
    assert 5 < sample.peak_rss_mb < held.nbytes / 1e6


def test_a_failed_job_says_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"none\.txt"):
        process.run_apart("train", 1, impl="fuselm", corpus=str(tmp_path / "none.txt"), vocab_size=300)


def test_a_job_is_told_how_many_threads_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(command: tuple[str, ...], env: dict[str, str], **options: object) -> object:
        assert json.loads(command[-1])["threads"] == 3
        return subprocess.CompletedProcess(
            command, 0, json.dumps({"seconds": int(env["RAYON_NUM_THREADS"]), "tokens": 1})
        )

    monkeypatch.setattr(process.subprocess, "run", started)
    assert process.run_apart("train", 3).seconds == 3


@pytest.mark.parametrize("copies", [0.4, 1, 2.5])
def test_a_long_text_is_the_corpus_again_and_again(
    copies: float, corpus: Path, vocabulary: Tokenizer, tmp_path: Path
) -> None:
    size = int(corpus.stat().st_size * copies)
    data = (corpus.read_bytes() * 3)[:size]
    rest = (corpus.read_bytes() * 3)[size:]
    whole = data if data.endswith(b"\n") else data + rest[: rest.index(b"\n") + 1]
    path = vocabulary.save(tmp_path / "tokenizer.json")
    sample = process.stream(str(corpus), str(path), size / 1e6, threads=1)
    assert abs(sample.tokens - len(vocabulary.encode_bytes(whole))) <= 2  # an empty line may end up on either side


def test_the_collector_rests_while_the_clock_runs() -> None:
    seconds, was_on = process.timed(gc.isenabled)
    assert (was_on, gc.isenabled()) == (False, True)
    assert seconds >= 0
    with pytest.raises(ZeroDivisionError):
        process.timed(lambda: 1 // 0)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("text", "size", "read"),
    [("one\ntwo\nthree", 9, "one\ntwo\n"), ("one\ntwo", 100, "one\ntwo"), ("éééé", 5, "éé"), ("one é", 5, "one ")],
)
def test_a_corpus_ends_with_a_line_or_at_least_a_character(text: str, size: int, read: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8")
    assert bench.read_corpus(tmp_path / "corpus.txt", size / 1e6) == (read.encode(), 0)


def test_a_few_bytes_that_are_no_text_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"word " * 1000 + "\ufffd".encode() + b"\xb0\n")
    data, replaced = bench.read_corpus(tmp_path / "corpus.txt", 1)
    assert (data.decode()[-3:], replaced) == ("\ufffd\ufffd\n", 1)


def test_stories_stand_in_for_a_corpus() -> None:
    data = bench.made_up_corpus(0.02)
    assert 20_000 <= len(data) < 40_000
    assert data.decode().endswith("\n\n")


def test_documents_are_the_whole_text_in_pieces_that_end_with_lines() -> None:
    text = some_text(50_000)
    texts = peers.documents(text)
    assert "".join(texts) == text
    assert all(one.endswith("\n") for one in texts)
    assert all(len(one) < 2 * peers.DOCUMENT_CHARACTERS for one in texts)
    assert len(peers.documents("a" * 25_000)) == 3
