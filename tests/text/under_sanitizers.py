"""Splits, counts, merges, encodes and decodes random bytes with a library that watches every memory access.

A program: test_sanitizers.py runs it with the sanitizers' own libraries loaded first, as they must be. It ends well, or
with the report of the first read or write outside of what was allocated, of arithmetic that C++ does not define, or, in
a run that watches threads instead, of two that touch one place without order.

    python tests/text/under_sanitizers.py address,undefined        # or: thread
"""

from __future__ import annotations

import random
import sys

import numpy as np

from fuselm.text import native, reference

FLAGS = ("-std=c++20", "-fPIC", "-pthread", "-shared", "-fno-sanitize-recover=all")
SPECIALS = [b"<s>", b"<s>a", b" <x>", b"le"]
IDS = [1000, 1001, 1002, 1003]
ALPHABET = [*b"aabbelt01 '\n<>s!\0", *"é中😀\u3000".encode()]


def some_bytes(chooser: random.Random) -> bytes:
    """Bytes of any kind, of the lengths at which paths change, or of any other."""
    length = chooser.choice(
        [chooser.randrange(70), chooser.randrange(12, 20), chooser.randrange(28, 36), chooser.randrange(400)]
    )
    if chooser.random() < 0.3:
        return chooser.randbytes(length)
    if chooser.random() < 0.3:  # long words
        return bytes(chooser.choices(b"abet", k=length))
    return bytes(chooser.choices(ALPHABET, k=length))


def train(chooser: random.Random) -> np.ndarray:
    """Left, right and made of merges of random texts."""
    trainer = native.NativeTrainer(SPECIALS)
    for _ in range(8):
        data = some_bytes(chooser)
        trainer.count(data, [len(data) // 3, len(data) // 3, len(data)])
    trainer.merge(chooser.randrange(200))
    rows = [(left, right, 256 + rank) for rank, (left, right) in enumerate(trainer.merges())]
    return np.array(rows, np.uint32).reshape(-1, 3)


def use(chooser: random.Random, encoder: native.NativeEncoder, twin: reference.ReferenceEncoder) -> None:
    """Call everything on one text."""
    data, allowed = some_bytes(chooser), bytes(chooser.randrange(2) for _ in SPECIALS)
    start, end = sorted(chooser.randrange(len(data) + 1) for _ in range(2))
    assert native.split(data) == reference.split(data)
    assert encoder.encode(data[start:end], allowed).tolist() == twin.encode(data[start:end], allowed).tolist()
    assert encoder.encode(data).tolist() == twin.encode(data).tolist()
    batch = (data, np.array([start, end, end, len(data)], np.int64))
    (ids, counts), (expected, _) = (next(one.encode_batches([batch], allowed, None, 1)) for one in (encoder, twin))
    assert ids.tolist() == expected.tolist()
    assert counts.sum() == len(ids)
    encoder.find_cut(data, start, start, end)


def watch_memory() -> None:
    """A few hundred texts, then one that is long."""
    chooser = random.Random(1)
    for _ in range(12):
        arguments = (range(256), train(chooser), SPECIALS, IDS)
        encoder, twin = native.NativeEncoder(*arguments), reference.ReferenceEncoder(*arguments)
        for _ in range(20):
            use(chooser, encoder, twin)
        encoder.encode(bytes(chooser.choices(b"abet", k=20_000)))
    starts = np.arange(258, dtype=np.int64)  # the bytes, and one more entry for what is no id
    ids = np.array([*range(256), 256, 300, 2**32 - 1], np.uint32)
    assert bytes(native.decode(bytes(range(256)) + b"?", starts, ids)) == bytes(range(256)) + b"???"


def watch_threads() -> None:
    """Six threads, and more words than the caches hold: they drive out one another's all the time."""
    chooser = random.Random(2)
    encoder = native.NativeEncoder(range(256), train(chooser), SPECIALS, IDS)
    words = [bytes(chooser.choices(b"abelt", k=chooser.choice([3, 6, 9, 12, 30]))) for _ in range(60_000)]
    batches = []
    for _ in range(60):
        data = b" ".join(chooser.choices(words, k=2500))
        batches.append((data, np.array([len(data) // 2, len(data)], np.int64)))
    alone, together = (
        [ids.tolist() for ids, _ in encoder.encode_batches(batches * 2, None, b"\1\0\0\0", threads)]
        for threads in (1, 6)
    )
    assert alone == together
    left_early = encoder.encode_batches(batches, None, None, 6)
    next(left_early)
    left_early.close()


if __name__ == "__main__":
    sanitizers = sys.argv[1]
    # Without optimisation a report names the line; threads have to meet one another, so they must be fast.
    native.FLAGS = (*FLAGS, "-O1" if sanitizers == "thread" else "-O0", f"-fsanitize={sanitizers}")
    watch_threads() if sanitizers == "thread" else watch_memory()
    print("nothing found")
