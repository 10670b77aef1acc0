"""What the tokenizer bench does in a fresh process: one training, one threaded batch, one pass over a long text.

Fresh, because the peak memory of a process is that of everything it has ever done, and because `tokenizers` asks only
once in a process how many threads it may use. A job imports only what it needs, so the memory it starts with is the
library's own; it is reported beside the peak. Knows jobs and clocks; what is compared with what is tokenizer.py's.

    sample = run_apart("train", threads=2, impl="tokenizers", corpus="corpus.txt", vocab_size=10_000)
    print(sample.seconds, sample.peak_rss_mb)
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SPECIALS = ("<|endoftext|>",)
MODULE = "fuselm.bench.tokenizer_process"


@dataclass(frozen=True)
class Sample:
    """One measurement. `tokens` are the ids made; of a training, the entries of the vocabulary."""

    seconds: float
    tokens: int
    peak_rss_mb: float | None = None
    start_rss_mb: float | None = None


class JobFailed(RuntimeError):
    """A job's process ended badly; the message is the last thing it said."""


def run_apart(job: str, threads: int, **options: Any) -> Sample:
    """Do a job in a fresh process that may use so many threads."""
    # Rayon is what `tokenizers` has its threads from; the second one keeps it from going back to one thread.
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    # -P: the current folder is not on the path, so a tokenizers.py in it is not taken for the library.
    command = (sys.executable, "-P", "-m", MODULE, job, json.dumps({"threads": threads, **options}))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise JobFailed(lines[-1])
    return Sample(**json.loads(done.stdout.splitlines()[-1]))


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds of one call, and what it returned: whoever frees that does so after the clock has stopped."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        result = call()
        return time.perf_counter() - start, result
    finally:
        if was_on:
            gc.enable()


def memory_mb(field: str) -> float:
    """VmRSS (resident now) or VmHWM (the most there was) of this process.

    Not getrusage: its ru_maxrss starts from the memory of the process that started this one, and said 499 MB in a child
    of 9 MB whose parent held 500.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024 / 1e6
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# --- jobs ------------------------------------------------------------------------------------------------------------


def train(impl: str, corpus: str, vocab_size: int, threads: int, save: str = "") -> Sample:
    """Train a vocabulary on a file, and save it where that is asked for."""
    prepare = _fuselm_training if impl == "fuselm" else _tokenizers_training
    call, finish = prepare(corpus, vocab_size, threads)
    start_rss = memory_mb("VmRSS")
    seconds, result = timed(call)
    peak_rss = memory_mb("VmHWM")
    return Sample(seconds, finish(result, save), peak_rss, start_rss)


def _fuselm_training(corpus: str, vocab_size: int, threads: int) -> tuple[Callable[[], Any], Callable[[Any, str], int]]:
    from fuselm.text.bpe import backend, train_bpe

    backend()  # loads the library

    def finish(trained: Any, save: str) -> int:
        from fuselm.text.tokenizer import Tokenizer

        vocab, merges = trained
        if save:
            Tokenizer(vocab, merges, SPECIALS).save(save)
        return len(vocab)

    return lambda: train_bpe(corpus, vocab_size, SPECIALS, threads=threads), finish


def _tokenizers_training(
    corpus: str, vocab_size: int, threads: int
) -> tuple[Callable[[], Any], Callable[[Any, str], int]]:
    library = importlib.import_module("tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=byte_level.alphabet(),
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    return lambda: tokenizer.train([corpus], trainer), lambda _, save: tokenizer.get_vocab_size()


def batch(impl: str, corpus: str, vocabulary: str, ids: str, threads: int) -> Sample:
    """Encode the documents of a file in several threads, and leave all their ids in a file."""
    import numpy as np

    from fuselm.bench.tokenizer_peers import documents, flat, make, warm_up
    from fuselm.text.tokenizer import Tokenizer

    coder = make(impl, Tokenizer.load(vocabulary))
    texts = documents(Path(corpus).read_bytes().decode())
    warm_up(coder, texts[0])
    seconds, result = timed(lambda: coder.encode_batch(texts, threads))
    made = flat(result)
    np.save(ids, made)
    return Sample(seconds, len(made))


def stream(corpus: str, vocabulary: str, megabytes: float, threads: int) -> Sample:
    """Go over the ids of a file's lines, read again and again until there were so many megabytes."""
    from fuselm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(vocabulary)
    copies, lines = _how_often(Path(corpus), int(megabytes * 1e6))
    tokens = 0
    start_rss = memory_mb("VmRSS")

    def read() -> None:
        nonlocal tokens
        for _ in tokenizer.encode_iterable(_lines(corpus, copies, lines), disallowed_special=()):
            tokens += 1

    seconds, _ = timed(read)
    return Sample(seconds, tokens, memory_mb("VmHWM"), start_rss)


def _how_often(corpus: Path, size: int) -> tuple[int, int]:
    """How many times the whole file, and how many of its lines after that, make `size` bytes. Counted beforehand."""
    copies, rest = divmod(size, corpus.stat().st_size)
    lines = 0
    with corpus.open("rb") as file:
        while rest > 0 and (line := file.readline()):
            rest -= len(line)
            lines += 1
    return copies, lines


def _lines(corpus: str, copies: int, lines: int) -> Iterator[str]:
    for copy in range(copies + 1):
        with open(corpus, encoding="utf-8", newline="") as file:
            yield from file if copy < copies else islice(file, lines)


JOBS: dict[str, Callable[..., Sample]] = {"train": train, "batch": batch, "stream": stream}


def main() -> None:
    """Do the job that the two arguments name and describe; its sample is the last line of stdout."""
    job, options = sys.argv[1:]
    print(json.dumps(asdict(JOBS[job](**json.loads(options)))))


if __name__ == "__main__":
    main()
