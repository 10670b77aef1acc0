"""The tokenizer's rows: training, encoding and decoding, against tiktoken and Hugging Face tokenizers.

One run, one machine, the same text, vocabulary and number of threads for all; libraries take turns, and medians count.
Each repeat begins with a library that has seen none of the text, and what it gives is compared with what the others
gave: a speed of other ids is no speed. Knows the tasks and the rows; how libraries are called is tokenizer_peers.py's,
what needs a process of its own tokenizer_process.py's. A call here takes seconds, so it is timed by the clock alone.

    results = Results()
    run(Plan(megabytes=10, threads=2), Path("results"), results, on_step=print)
    print(summary(results.rows)["encode_tiktoken_speedup"])
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fuselm.bench import tokenizer_peers as peers
from fuselm.bench.report import Row
from fuselm.bench.tokenizer_peers import Coder
from fuselm.bench.tokenizer_process import Sample, run_apart, timed
from fuselm.bench.tokenizer_rows import ALONE, TASKS, Results, make_row
from fuselm.files import write_whole
from fuselm.text.tokenizer import Tokenizer

# tokenizers encodes about 1.5 MB/s in one thread: it gets a tenth of the text, or the bench would be waiting for it.
SLOW, SLOW_SHARE = "tokenizers", 10
SMALL_CHARACTERS, SMALL_CALLS = 40, 5000
THREAD_REPEATS = 3
TRAINED = "tokenizer.json"
REPLACEMENT, MOST_REPLACED = "\ufffd", 0.001

OnStep = Callable[[str], None]


class Mismatch(RuntimeError):
    """Two libraries with one vocabulary have made different things of one text; the message says where."""


@dataclass(frozen=True)
class Plan:
    """What to measure. Without a corpus, the built-in stories; without a vocabulary, the one trained in the run."""

    megabytes: float
    threads: int
    corpus: Path | None = None
    vocabulary: Path | None = None
    vocab_size: int = 10_000
    repeats: int = 3
    stream_megabytes: float = 20
    label: str = ""

    def tasks(self) -> dict[str, tuple[str, ...]]:
        """The tasks of this plan, and who takes part in each."""
        gone = peers.missing()
        return {
            task: tuple(name for name in names if name not in gone)
            for task, names in TASKS.items()
            if task != "encode_iterable" or self.stream_megabytes
        }

    def repeats_of(self, task: str) -> int:
        """A long text is read once: its memory is what is asked for. Threads are timed often: they are quick."""
        if task == "encode_iterable":
            return 1
        return THREAD_REPEATS * self.repeats if ALONE in TASKS[task] else self.repeats


@dataclass(frozen=True)
class Work:
    """What a library is given in a task, what must come out, and the sizes that its row states."""

    given: Any
    expected: Any
    megabytes: float
    tokens: int


@dataclass
class Bench:
    """A run under way: the corpus as a file and as a text, and where the vocabulary is, or will be after `train`."""

    plan: Plan
    folder: Path
    results: Results
    on_step: OnStep
    corpus: Path
    text: str
    vocabulary: Path

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary to encode with."""
        return Tokenizer.load(self.vocabulary)

    @functools.cached_property
    def part(self) -> str:
        """The part of the text that the slow one is given."""
        return part_of(self.text, SLOW_SHARE)


def run(plan: Plan, folder: Path, results: Results, on_step: OnStep = lambda text: None) -> None:
    """Measure what the plan names into `results`, which is right at any moment it is interrupted.

    Files that are needed on the way are made in `folder`, an empty one, and left there.
    """
    for name in peers.missing():
        results.note("", name, f"{name} is not installed: `pip install {name}` to compare with it")
    on_step("corpus")
    data, replaced = read_corpus(plan.corpus, plan.megabytes) if plan.corpus else (made_up_corpus(plan.megabytes), 0)
    if replaced:
        results.note("", "", f"{replaced} bytes of the corpus that are no UTF-8 were replaced by U+FFFD")
    corpus = folder / "corpus.txt"
    write_whole(corpus, data)
    results.megabytes = len(data) / 1e6
    vocabulary = plan.vocabulary or folder / TRAINED
    bench = Bench(plan, folder, results, on_step, corpus, data.decode(), vocabulary)
    del data
    for task, names in plan.tasks().items():
        if task != "train" and not vocabulary.exists():
            return  # there is a note that says why the training failed
        _MEASURES[task](bench, task, names)


def steps(plan: Plan) -> int:
    """How many times `run` will report a step."""
    return 1 + sum(len(names) * plan.repeats_of(task) for task, names in plan.tasks().items())


# --- the text --------------------------------------------------------------------------------------------------------


def read_corpus(path: Path, megabytes: float) -> tuple[bytes, int]:
    """The beginning of a text file, to a line end where there is one; a ValueError says what is wrong with it.

    A few bytes that are no UTF-8, as real files have them, become U+FFFD: not every library takes them. Their number
    comes second.
    """
    size = max(int(megabytes * 1e6), 1)
    with path.open("rb") as file:
        data = file.read(size)
        if file.read(1):
            data = data[: data.rfind(b"\n", len(data) // 2) + 1 or _character_end(data)]
    if not data.strip():
        raise ValueError(f"A corpus has text in it; the beginning of {path} has none. Name another file.")
    text, known = data.decode("utf-8", "replace"), data.count(REPLACEMENT.encode())
    replaced = text.count(REPLACEMENT) - known
    if replaced > len(text) * MOST_REPLACED:
        raise ValueError(
            f"A corpus is UTF-8 text; {path} has {replaced} bytes that are not in {len(text)} characters. "
            "Is it compressed, or in another encoding? Convert it, or name another file."
        )
    return text.encode(), replaced


def _character_end(data: bytes) -> int:
    """Where the last whole character of a text ends that was cut anywhere."""
    start = len(data)
    while start > 0 and data[start - 1] & 0xC0 == 0x80:
        start -= 1
    return max(start - 1, 0) if data[-1] & 0x80 else len(data)


def made_up_corpus(megabytes: float) -> bytes:
    """Built-in stories, with an empty line between them."""
    from fuselm.data.stories import stories

    size, parts = 0, []
    for story in stories(0):
        parts.append(story.strip().encode() + b"\n\n")
        size += len(parts[-1])
        if size >= megabytes * 1e6:
            break
    return b"".join(parts)


def part_of(text: str, share: int) -> str:
    """The first of so many equal parts of a text, to the end of a line where there is one."""
    size = len(text) // share + 1
    return text[: text.rfind("\n", size // 2, size) + 1 or size]


# --- measuring -------------------------------------------------------------------------------------------------------


def _train(bench: Bench, task: str, names: Sequence[str]) -> None:
    plan, megabytes = bench.plan, bench.corpus.stat().st_size / 1e6

    def measure(name: str) -> Sample:
        save = str(bench.folder / TRAINED) if name == "fuselm" else ""
        options = {"impl": name, "corpus": str(bench.corpus), "vocab_size": plan.vocab_size, "save": save}
        return run_apart("train", plan.threads, **options)

    rows = _in_turn(bench, task, plan.threads, dict.fromkeys(names, megabytes), measure)
    for row in rows:
        if row["tokens"] < plan.vocab_size:
            words = f"{row['impl']} found a vocabulary of {row['tokens']} in the text, not {plan.vocab_size}"
            bench.results.note(task, "", words)


def _encode(bench: Bench, task: str, names: Sequence[str]) -> None:

    def prepared(text: str) -> tuple[str, np.ndarray]:
        return text, bench.tokenizer.encode_array(text, disallowed_special=())

    works = _works(bench, names, prepared)
    calls: dict[str, Callable[[Coder, Any], Any]] = {
        "encode": lambda coder, text: coder.encode(text),
        "encode_array": lambda coder, text: _arrays(coder)(text, 1),
    }
    _compared(bench, task, 1, works, calls[task])


def _encode_threads(bench: Bench, task: str, names: Sequence[str]) -> None:
    """Several threads and one in turn: a machine that is slower for a while is so for both."""
    # Of bytes, UTF-8 as files have it, because Python makes it of a str in one thread.
    given = bench.text.encode() if task == "encode_bytes_threads" else bench.text
    works = _works(bench, names, lambda text: (given, bench.tokenizer.encode_array(text, disallowed_special=())))

    def measure(name: str) -> Sample:
        threads = 1 if name == ALONE else bench.plan.threads
        return _sample(bench, task, "fuselm", works[name], lambda coder, text: _arrays(coder)(text, threads))

    _in_turn(bench, task, bench.plan.threads, {name: work.megabytes for name, work in works.items()}, measure)


def _arrays(coder: Coder) -> Callable[[Any, int], np.ndarray]:
    assert coder.encode_array, "TASKS names libraries that encode to arrays"
    return coder.encode_array


def _encode_batch(bench: Bench, task: str, names: Sequence[str]) -> None:
    """Documents into lists. tokenizers goes into a process of its own, where it uses the threads it is told to."""

    def cut(text: str) -> tuple[list[str], np.ndarray]:
        texts = peers.documents(text)
        return texts, np.concatenate([bench.tokenizer.encode_array(one, disallowed_special=()) for one in texts])

    works, threads = _works(bench, names, cut), bench.plan.threads
    part, ids = bench.folder / "part.txt", bench.folder / "ids.npy"
    write_whole(part, bench.part)

    def measure(name: str) -> Sample:
        if name != SLOW:
            return _sample(bench, task, name, works[name], lambda coder, texts: coder.encode_batch(texts, threads))
        options = {"impl": name, "corpus": str(part), "vocabulary": str(bench.vocabulary), "ids": str(ids)}
        sample = run_apart("batch", threads, **options)
        check_same(bench.tokenizer, task, name, np.load(ids), works[name].expected)
        return sample

    _in_turn(bench, task, threads, {name: work.megabytes for name, work in works.items()}, measure)


def _decode(bench: Bench, task: str, names: Sequence[str]) -> None:
    works = _works(bench, names, lambda text: (bench.tokenizer.encode_ordinary(text), text))
    _compared(bench, task, 1, works, lambda coder, ids: coder.decode(ids))


def _encode_iterable(bench: Bench, task: str, names: Sequence[str]) -> None:
    megabytes = bench.plan.stream_megabytes
    options = {"corpus": str(bench.corpus), "vocabulary": str(bench.vocabulary), "megabytes": megabytes}
    _in_turn(bench, task, 1, dict.fromkeys(names, megabytes), lambda name: run_apart("stream", 1, **options))


def _small(bench: Bench, task: str, names: Sequence[str]) -> None:
    """One short text, encoded again and again: what a call costs."""
    text = bench.text[:SMALL_CHARACTERS]
    expected = bench.tokenizer.encode_array(text, disallowed_special=())

    def measure(name: str) -> Sample:
        coder = peers.make(name, bench.tokenizer)
        check_same(bench.tokenizer, task, name, peers.flat(coder.encode(text)), expected)
        encode = coder.encode

        def calls() -> None:
            for _ in itertools.repeat(None, SMALL_CALLS):
                encode(text)

        seconds, _ = timed(calls)
        return Sample(seconds / SMALL_CALLS, len(expected))

    _in_turn(bench, task, 1, dict.fromkeys(names, len(text.encode()) / 1e6), measure)


_MEASURES: dict[str, Callable[[Bench, str, Sequence[str]], None]] = {
    "train": _train,
    "encode": _encode,
    "encode_array": _encode,
    "encode_threads": _encode_threads,
    "encode_bytes_threads": _encode_threads,
    "encode_batch": _encode_batch,
    "decode": _decode,
    "encode_iterable": _encode_iterable,
    "small": _small,
}


def _works(bench: Bench, names: Sequence[str], make: Callable[[str], tuple[Any, Any]]) -> dict[str, Work]:
    """What each library is given: the text or the part of it that the slow one gets, made into what the task wants."""

    def work(text: str) -> Work:
        given, expected = make(text)
        tokens = len(given if isinstance(expected, str) else expected)
        return Work(given, expected, len(text.encode()) / 1e6, tokens)

    whole = work(bench.text)
    return {name: work(bench.part) if name == SLOW else whole for name in names}


def _compared(
    bench: Bench, task: str, threads: int, works: Mapping[str, Work], call: Callable[[Coder, Any], Any]
) -> None:
    megabytes = {name: work.megabytes for name, work in works.items()}
    _in_turn(bench, task, threads, megabytes, lambda name: _sample(bench, task, name, works[name], call))


def _sample(bench: Bench, task: str, name: str, work: Work, call: Callable[[Coder, Any], Any]) -> Sample:
    coder = peers.make(name, bench.tokenizer)
    peers.warm_up(coder, bench.text)
    seconds, result = timed(lambda: call(coder, work.given))
    got = result if isinstance(result, str) else peers.flat(result)
    check_same(bench.tokenizer, task, name, got, work.expected)
    return Sample(seconds, work.tokens)


def _in_turn(
    bench: Bench, task: str, threads: int, megabytes: Mapping[str, float], measure: Callable[[str], Sample]
) -> list[Row]:
    """A sample of each library, then another of each, and rows made of them; interrupted, of those there are."""
    samples: dict[str, list[Sample]] = {name: [] for name in megabytes}
    failed: set[str] = set()
    repeats = bench.plan.repeats_of(task)
    rows: list[Row] = []
    try:
        for repeat in range(repeats):
            names = list(megabytes)
            first = repeat % len(names)  # not always the same one after the same other
            for name in [*names[first:], *names[:first]]:
                bench.on_step(f"{task} {repeat + 1}/{repeats}: {name}")
                if name in failed:
                    continue
                try:
                    samples[name].append(measure(name))
                except Mismatch:
                    raise
                except Exception as error:
                    failed.add(name)
                    words = str(error).strip().partition("\n")[0][:300]
                    bench.results.note(task, name, f"{type(error).__name__}: {words}")
    finally:
        counts = {name: 1 if name == ALONE else threads for name in samples}
        rows += [make_row(task, name, counts[name], megabytes[name], some) for name, some in samples.items() if some]
        bench.results.rows += rows
    return rows


def check_same(tokenizer: Tokenizer, task: str, name: str, got: Any, expected: Any) -> None:
    """Refuse a library's ids or text when they are not fuselm's."""
    if isinstance(expected, str):
        if got == expected:
            return
        place = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), -1)
        place = min(len(got), len(expected)) if place < 0 else place
        has, wanted = got[place : place + 20], expected[place : place + 20]
        raise Mismatch(f"{task}: {name} has another text from character {place} on: {has!r} instead of {wanted!r}.")
    if np.array_equal(got, expected):
        return
    size = min(len(got), len(expected))
    different = np.flatnonzero(got[:size] != expected[:size])
    place = int(different[0]) if len(different) else size
    has, wanted = (ids[place : place + 4].tolist() for ids in (got, expected))
    before = tokenizer.decode(expected[max(place - 10, 0) : place])
    raise Mismatch(f"{task}: {name} has other ids from {place} on: {has} instead of {wanted}, after {before!r}.")
