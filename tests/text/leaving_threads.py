"""Leaves threads of C++ at their work in one of the ways that a program may, and ends well or with a signal.

A program: test_threads.py runs it, since what goes wrong here takes the process with it.

    python tests/text/leaving_threads.py cycle        # or: fork, resume, daemon, suspended
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import pytest

from fuselm.text.tokenizer import Tokenizer

# Two long words: a thread has one of them in hands for a good while.
WORD = bytes(random.Random(1).choices(b"abcdefghijklmnop", k=1 << 18)) + b" there,"


def tokenizer() -> Tokenizer:
    pairs = [(bytes([a]), bytes([b])) for a in range(97, 113) for b in range(97, 113)]
    tokens = [*(bytes([byte]) for byte in range(256)), *(left + right for left, right in pairs)]
    return Tokenizer(dict(enumerate(tokens)), pairs)


class Reader:
    """A tokenizer and its ids that hold one another: only the collector finds that nobody holds them."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        self.ids = self.tokenizer.encode_blocks(self.pieces(), threads=3)

    def pieces(self) -> Iterator[bytes]:
        while True:
            yield WORD * 2


def cycle() -> None:
    gc.disable()
    for _ in range(5):
        reader = Reader()
        next(reader.ids)
        del reader
        gc.collect()


def in_child(work: Callable[[], object]) -> None:
    child = os.fork()
    if not child:
        work()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def fork() -> None:
    reader = Reader()
    next(reader.ids)
    in_child(reader.ids.close)
    in_child(lambda: None)
    assert len(next(reader.ids))  # the parent goes on


def resume() -> None:
    several, alone = Reader(), tokenizer().encode_iterable(iter([WORD] * 9))
    next(several.ids)
    first = next(alone)

    def go_on() -> None:
        assert len([first, *alone]) == len(tokenizer().encode_bytes(WORD * 9))
        with pytest.raises(RuntimeError, match="cannot go on in a forked process"):
            list(islice(several.ids, 20))

    in_child(go_on)


def daemon() -> None:
    def work() -> None:
        for ids in Reader().ids:
            np.sum(ids)

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.5)


def suspended() -> None:
    global left  # until the interpreter takes its modules down
    left = Reader()
    next(left.ids)


if __name__ == "__main__":
    {"cycle": cycle, "fork": fork, "resume": resume, "daemon": daemon, "suspended": suspended}[sys.argv[1]]()
    print("left", flush=True)
