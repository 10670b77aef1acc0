"""Splits, counts, merges, encodes and decodes random bytes with a library that watches every memory access.

A program: test_sanitizers.py runs it with the sanitizers' own libraries loaded first, as they must be. It ends well, or
with the report of the first read or write outside of what was allocated, or of arithmetic that C++ does not define.
"""

from __future__ import annotations

import random

import numpy as np

from fuselm.text import native, reference

FLAGS = ("-O0", "-std=c++20", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
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
    ends = np.array([start, end, end, len(data)], np.int64)
    assert encoder.encode_batch(data, ends, allowed)[0].tolist() == twin.encode_batch(data, ends, allowed)[0].tolist()
    assert encoder.find_special(data, allowed) == twin.find_special(data, allowed)
    encoder.find_cut(data, start, start, end)


def main() -> None:
    """A few hundred texts, then one that is long."""
    native.FLAGS = FLAGS
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
    print("nothing found")


if __name__ == "__main__":
    main()
