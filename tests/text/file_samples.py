"""What the tests of tokenizer files share: special tokens that are hard to carry, and texts full of them.

Knows no test. Everything is the same in every run.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

from fuselm.text.bpe import Merges, Vocab
from fuselm.text.tokenizer import Tokenizer
from tests.text.samples import COMMON, CONTRACTIONS, SPACES, mixture

# Some contain others, some have characters outside GPT-2's alphabet, one is invisible.
SPECIALS = ["<|endoftext|>", "<|end|>", "<|end|>ing", "<|", "of text", "†é", "\n\n\n", "é†é"]
FIRST_SPECIAL = 256 + 3000  # behind the merges of the trained vocabulary


@functools.cache
def samples() -> list[str]:
    """Texts with much of everything, special tokens and parts of them."""
    chooser = random.Random(7)
    plain = [mixture(30_000, seed=3), "", " ", "\n", "Don't  stop 'S we'll\u0301 !!!", "".join(map(chr, range(1000)))]
    pieces = [*SPECIALS, *SPACES, *COMMON, *CONTRACTIONS, "<|endoftext", "|>", "<", "é"]
    return plain + ["".join(chooser.choices(pieces, k=chooser.randint(1, 30))) for _ in range(300)]


def with_hard_specials(vocabulary: tuple[Vocab, Merges]) -> Tokenizer:
    """The merges that all tests of text share, with the special tokens above."""
    vocab, merges = vocabulary
    return Tokenizer({token: data for token, data in vocab.items() if token < FIRST_SPECIAL}, merges, SPECIALS)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def ids_of(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, allowed_special="all") for text in samples()]


def byte_vocabulary(*more: bytes) -> dict[int, bytes]:
    return dict(enumerate([*(bytes([byte]) for byte in range(256)), *more]))
