"""Byte-level BPE in plain Python: the definition that bpe.cpp is tested against, and what runs where no compiler is.

Short rather than fast: hundreds of times slower than bpe.cpp. The same classes and methods as native.py, the same
results. Text is bytes; bytes that are no UTF-8 count as characters of no class, one each.

    split(b"Don't stop")                 # [b"Don", b"'t", b" stop"]
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from fuselm.text.blocks import in_order
from fuselm.text.unicode import LETTERS, NUMBERS, SPACES, character_set

Batch = tuple[bytes, np.ndarray]  # texts that lie one behind the other, and where each one ends


@functools.cache
def _pattern() -> re.Pattern[str]:
    """GPT-2's pattern, the classes written out: Python's `re` has no \\p{L}, and its \\s is another."""
    letter, number, space = map(character_set, (LETTERS, NUMBERS, SPACES))
    return re.compile(
        rf"'(?:[sdmt]|ll|ve|re)| ?[{letter}]+| ?[{number}]+| ?[^{space}{letter}{number}]+"
        rf"|[{space}]+(?![^{space}])|[{space}]+"
    )


def split(data: bytes) -> list[bytes]:
    """The words of a text."""
    # surrogateescape turns an invalid byte into a lone surrogate, which is in no class, and back.
    text = data.decode("utf-8", "surrogateescape")
    return [word.encode("utf-8", "surrogateescape") for word in _pattern().findall(text)]


def merge_pair(symbols: tuple[int, ...], pair: tuple[int, int], made: int) -> tuple[int, ...]:
    """The symbols with every occurrence of the pair replaced, left to right."""
    merged: list[int] = []
    i = 0
    while i < len(symbols):
        found = symbols[i : i + 2] == pair
        merged.append(made if found else symbols[i])
        i += 2 if found else 1
    return tuple(merged)


class RefusedSpecial(Exception):
    """A text contains a special token that was refused."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class SpecialFinder:
    """Special tokens in a text: the leftmost, and of those the longest."""

    def __init__(self, specials: Sequence[bytes]) -> None:
        self.specials = list(specials)

    def find(self, data: bytes, start: int, allowed: bytes | None) -> tuple[int, int]:
        """Index and place of the first special from `start` on, or -1 and the end; `allowed` None allows all."""
        names = [text for i, text in enumerate(self.specials) if allowed is None or allowed[i]]
        longest_first = sorted(names, key=len, reverse=True)
        match = re.compile(b"|".join(map(re.escape, longest_first))).search(data, start) if names else None
        return (self.specials.index(match[0]), match.start()) if match else (-1, len(data))

    def pieces(self, data: bytes, allowed: bytes | None) -> Iterator[tuple[bytes, int]]:
        """The text between specials, each with the index of the special behind it (-1 at the end)."""
        start = 0
        while start < len(data):
            which, where = self.find(data, start, allowed)
            yield data[start:where], which
            start = where + len(self.specials[which]) if which >= 0 else len(data)

    def find_cut(self, data: bytes, start: int, searched: int, end: int) -> int:
        """A place in data[searched:end] where data[start:end] can be cut without changing its words, or 0."""
        longest = max(map(len, self.specials), default=4)
        for place in range(end - max(4, longest), searched, -1):
            before, after = data[place - 1 : place], data[place : place + 1]
            # Behind a visible ASCII character a space always begins a word. There are other cuts; these are enough.
            if after in (b" ", b"\n", b"\t", b"\r") and b"!" <= before <= b"~" and not self.spans(data, place):
                return place
        return 0

    def spans(self, data: bytes, place: int) -> bool:
        return any(0 <= data.find(s, max(0, place - len(s) + 1), place + len(s) - 1) < place for s in self.specials)


class ReferenceTrainer(SpecialFinder):
    """Counts words, then merges the most frequent pair, again and again."""

    def __init__(self, specials: Sequence[bytes]) -> None:
        super().__init__(specials)
        self.words: Counter[tuple[int, ...]] = Counter()
        self.pairs: Counter[tuple[int, int]] = Counter()
        self.where: defaultdict[tuple[int, int], set[tuple[int, ...]]] = defaultdict(set)
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.made: list[tuple[int, int]] = []

    def count(self, data: bytes, ends: Sequence[int]) -> None:
        """Count the words of texts that lie one behind the other in `data`."""
        for start, end in pairwise([0, *ends]):
            for piece, _ in self.pieces(data[start:end], None):
                for word, count in Counter(split(piece)).items():
                    self._change(tuple(word), count)

    def merge(self, wanted: int) -> int:
        """Make up to `wanted` more merges; fewer when no pair is left. Returns how many."""
        for done in range(wanted):
            if not self.pairs:
                return done
            # The most frequent; of those the one whose byte strings are greatest.
            best = max(self.pairs, key=lambda pair: (self.pairs[pair], self.tokens[pair[0]], self.tokens[pair[1]]))
            made = len(self.tokens)
            self.tokens.append(self.tokens[best[0]] + self.tokens[best[1]])
            self.made.append(best)
            for word in list(self.where[best]):
                count = self.words[word]
                self._change(word, -count)
                self._change(merge_pair(word, best, made), count)
        return wanted

    def merges(self) -> list[tuple[int, int]]:
        """All merges so far as pairs of ids: 0 to 255 are the bytes, 256 + i is what merge i made."""
        return list(self.made)

    def _change(self, word: tuple[int, ...], by: int) -> None:
        """Add to the count of a word and of its pairs; what falls to nothing is forgotten."""
        self.words[word] += by
        gone = not self.words[word]
        if gone:
            del self.words[word]
        for pair in pairwise(word):
            self.pairs[pair] += by
            if not self.pairs[pair]:
                del self.pairs[pair]
            if gone:
                self.where[pair].discard(word)
            else:
                self.where[pair].add(word)


class PlainEncoder(SpecialFinder, ABC):
    """What encoders in Python share: specials become their ids, what is between them is encoded by `encode_piece`."""

    def __init__(self, specials: Sequence[bytes], special_ids: Sequence[int]) -> None:
        super().__init__(specials)
        self.special_ids = [np.array([token], np.uint32) for token in special_ids]

    @abstractmethod
    def encode_piece(self, piece: bytes) -> np.ndarray:
        """The ids of a text without specials."""

    def encode(self, data: bytes, allowed: bytes | None = None, refused: bytes | None = None) -> np.ndarray:
        """The ids of a text; `allowed` and `refused` have a byte for each special, None names none."""
        if refused is not None and (bad := self.find(data, 0, refused)[0]) >= 0:
            raise RefusedSpecial(bad)
        parts = [np.empty(0, np.uint32)]
        for piece, which in self.pieces(data, allowed or bytes(len(self.specials))):
            parts.append(self.encode_piece(piece))
            if which >= 0:
                parts.append(self.special_ids[which])
        return np.concatenate(parts)

    def encode_batches(
        self, batches: Iterable[Batch], allowed: bytes | None, refused: bytes | None, threads: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids of each batch, and how many each text has."""

        def encode(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
            data, ends = batch
            parts = [self.encode(data[start:end], allowed, refused) for start, end in pairwise([0, *ends.tolist()])]
            return np.concatenate([np.empty(0, np.uint32), *parts]), np.array([len(part) for part in parts], np.int64)

        return in_order(encode, batches, threads)


class ReferenceEncoder(PlainEncoder):
    """A vocabulary that encodes."""

    def __init__(
        self, byte_ids: Sequence[int], merges: np.ndarray, specials: Sequence[bytes], special_ids: Sequence[int]
    ) -> None:
        super().__init__(specials, special_ids)
        self.byte_ids = list(byte_ids)
        self.ranks: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, (left, right, made) in enumerate(merges.tolist()):
            self.ranks.setdefault((left, right), (rank, made))

    def encode_piece(self, piece: bytes) -> np.ndarray:
        """The ids of a text without specials."""
        return np.array([token for word in split(piece) for token in self.encode_word(word)], np.uint32)

    def encode_word(self, word: bytes) -> list[int]:
        """Join the neighbours of lowest rank, the leftmost first, until none can be joined."""
        ids = [self.byte_ids[byte] for byte in word]
        while found := [(self.ranks[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in self.ranks]:
            (_, made), place = min(found, key=lambda item: (item[0][0], item[1]))
            ids[place : place + 2] = [made]
        return ids


def decode(table: bytes, starts: np.ndarray, ids: np.ndarray) -> memoryview:
    """The bytes of uint32 ids: token i has table[starts[i]:starts[i + 1]], an id that is none the last entry."""
    known = len(starts) - 2
    places = [min(token, known) for token in ids.tolist()]
    return memoryview(b"".join(table[starts[i] : starts[i + 1]] for i in places))
