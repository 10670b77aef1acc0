"""The tokenizer: text to token ids and back. Byte-level BPE, or one token for each character.

Special tokens are treated as tiktoken treats them: `encode` refuses a text that contains one unless it is allowed (it
becomes its id) or said not to be disallowed (it is ordinary text); `encode_ordinary` knows none. Decoding never raises.
How words are split and merged is bpe.py's; files are formats.py's; text that comes token by token is stream.py's.

    tokenizer = Tokenizer(*train_bpe("stories.txt", 10_000), special_tokens=["<|endoftext|>"])
    tokenizer.decode(tokenizer.encode("Once upon a time"))
    tokenizer.save("tokenizer.json"); Tokenizer.load("tokenizer.json")
"""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fuselm.text import bpe
from fuselm.text.blocks import BLOCK_BYTES, blocks, is_short, slices, thread_count, utf8
from fuselm.text.characters import CharacterEncoder
from fuselm.text.reference import Batch, RefusedSpecial

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "\ufffd".encode()  # what an id that is none decodes to
NO_ID = (1 << 32) - 1
MAX_IDS = 1 << 22  # tables have a row for each id up to the highest: one wild id must not fill the memory

Names = Literal["all"] | Collection[str]
Masks = tuple[bytes | None, bytes | None]  # a byte for each special: is it allowed, is it refused; None: none is


class SpecialTokenError(ValueError):
    """A text contains a special token that was neither allowed nor said to be text."""

    def __init__(self, token: str, remedy: str) -> None:
        super().__init__(token, remedy)  # both: what another process sends is made anew of them
        self.token, self.remedy = token, remedy

    def __str__(self) -> str:
        rule = "which is refused unless the caller says what it means."
        return f"The text contains the special token {self.token!r}, {rule} {self.remedy}"


class Tokenizer:
    """A vocabulary with its merges and special tokens. It never changes; any number of threads may use one."""

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Iterable[str] | Mapping[str, int] | None = None,
    ) -> None:
        self._set_up(dict(vocab), list(merges), special_tokens or ())
        self.unknown: str | None = None
        ordinary = self._ordinary()
        byte_ids = [ordinary.get(bytes([byte]), -1) for byte in range(256)]
        if -1 in byte_ids:
            raise ValueError(
                f"A byte-level vocabulary has a token for each of the 256 bytes; {bytes([byte_ids.index(-1)])!r} has "
                "none. Is it another kind of vocabulary, or are its tokens not decoded from their printable form?"
            )
        triples = [_merge_ids(ordinary, left, right) for left, right in self.merges]
        table = np.array(triples, np.uint32).reshape(-1, 3)
        self._encoder: bpe.Encoder = bpe.make_encoder(byte_ids, table, *self._special_lists())

    @classmethod
    def characters(
        cls,
        text: str,
        special_tokens: Iterable[str] | Mapping[str, int] | None = None,
        *,
        unknown: str | None = None,
    ) -> Tokenizer:
        """One token for each different character of a text, in the order of their code points.

        A character that is not there is refused, or encoded as `unknown`, which is then one of the vocabulary.
        """
        unknown = None if unknown is None else utf8(unknown).decode()
        alphabet = sorted({*utf8(text).decode(), *(unknown or "")})
        if not alphabet:
            raise ValueError("A character vocabulary is made of a text's characters; got an empty text.")
        return cls._of_characters({i: c.encode() for i, c in enumerate(alphabet)}, special_tokens or (), unknown)

    @classmethod
    def _of_characters(
        cls, vocab: dict[int, bytes], special_tokens: Iterable[str] | Mapping[str, int], unknown: str | None
    ) -> Tokenizer:
        self = cls.__new__(cls)
        self._set_up(vocab, [], special_tokens)
        self.unknown = unknown
        # A special of one character is in the alphabet too: where it is not allowed, it is text like any other.
        texts = [(text.decode(), token) for token, text in reversed(self.vocab.items())]
        specials = self.special_tokens
        alphabet = {text: token for text, token in texts if text not in specials or len(text) == 1}
        self._encoder = CharacterEncoder(alphabet, *self._special_lists(), unknown)
        return self

    def _set_up(
        self,
        vocab: dict[int, bytes],
        merges: list[tuple[bytes, bytes]],
        special_tokens: Iterable[str] | Mapping[str, int],
    ) -> None:
        vocab = {int(token): bytes(text) for token, text in vocab.items()}
        if bad := [token for token in vocab if not 0 <= token < MAX_IDS]:
            raise ValueError(f"Token ids are from 0 to {MAX_IDS - 1}; got {bad[0]}. Number the tokens anew.")
        self.special_tokens = _number_specials(vocab, special_tokens)
        # In the order of ids, specials included: what decoding and files need.
        whole = vocab | {token: utf8(text) for text, token in self.special_tokens.items()}
        self.vocab = dict(sorted(whole.items()))
        self.merges = merges
        self.vocab_size = max(self.vocab, default=-1) + 1

    def _ordinary(self) -> dict[bytes, int]:
        """Bytes to ids, without the specials unless a merge makes them too; the lowest id counts."""
        specials = set(self.special_tokens.values())
        made = {left + right for left, right in self.merges}
        kept = [(text, token) for token, text in self.vocab.items() if token not in specials or text in made]
        return dict(reversed(kept))

    def _special_lists(self) -> tuple[list[bytes], list[int]]:
        return [utf8(text) for text in self.special_tokens], list(self.special_tokens.values())

    # --- encoding ----------------------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, allowed_special: Names = (), disallowed_special: Names = "all", threads: int | None = 1
    ) -> list[int]:
        """The ids of a text. In several threads, None for one on each core, a long one is encoded sooner."""
        return self._encode_list(text, self._masks(allowed_special, disallowed_special), threads)

    def encode_ordinary(self, text: str, *, threads: int | None = 1) -> list[int]:
        """The ids of a text in which special tokens are text like any other."""
        return self._encode_list(text, (None, None), threads)

    def encode_bytes(self, data: bytes, *, threads: int | None = 1) -> list[int]:
        """The ids of any bytes, UTF-8 or not; special tokens are bytes like any other."""
        return self._encode_list(bytes(memoryview(data)), (None, None), threads)

    def encode_array(
        self,
        text: str | bytes,
        *,
        allowed_special: Names = (),
        disallowed_special: Names = "all",
        threads: int | None = 1,
    ) -> np.ndarray:
        """The ids of a text as uint32: no Python object for each, so the fastest way to encode much."""
        masks = self._masks(allowed_special, disallowed_special)
        if is_short(text) and threads == 1:
            return self._encode_block(utf8(text), masks)
        # Every page of memory that is touched costs: grow one array rather than join many. English fits at once.
        ids, count = np.empty(len(text) // 3 + BLOCK_BYTES, np.uint32), 0
        for part in self._stream(slices(text), masks, threads):
            if count + len(part) > len(ids):
                ids.resize(2 * len(ids) + len(part), refcheck=False)
            ids[count : count + len(part)] = part
            count += len(part)
        ids.resize(count, refcheck=False)
        return ids

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        allowed_special: Names = (),
        disallowed_special: Names = "all",
        threads: int | None = None,
    ) -> list[list[int]]:
        """The ids of each text, encoded in several threads."""
        if isinstance(texts, str | bytes):
            raise TypeError("A batch is a list of texts; got one text. Put it into a list, or call `encode`.")
        masks, found = self._masks(allowed_special, disallowed_special), []
        batches = _batches(map(utf8, texts))
        for ids, counts in self._encode_batches(batches, masks, thread_count(threads)):
            whole, stops = self._as_list(ids), np.cumsum(counts).tolist()
            found += [whole[a:b] for a, b in zip([0, *stops], stops, strict=False)]
        return found

    def encode_iterable(
        self, pieces: Iterable[str | bytes], *, allowed_special: Names = (), disallowed_special: Names = "all"
    ) -> Iterator[int]:
        """The ids of a text that comes in pieces (the lines of an open file, say), one by one, in constant memory.

        They are the ids of the whole text, wherever it is cut into pieces (but not within a surrogate pair). Only a
        word that has no end is held whole.
        """
        _check_pieces(pieces)
        found = self._stream(pieces, self._masks(allowed_special, disallowed_special), threads=1)
        return chain.from_iterable(ids.tolist() for ids in found)

    def encode_blocks(
        self,
        pieces: Iterable[str | bytes],
        *,
        allowed_special: Names = (),
        disallowed_special: Names = "all",
        threads: int | None = None,
    ) -> Iterator[np.ndarray]:
        """The same in arrays of ids, encoded in several threads: what files of any size are tokenised with."""
        _check_pieces(pieces)
        found = self._stream(pieces, self._masks(allowed_special, disallowed_special), threads)
        return (ids.copy() for ids in found)

    def _stream(self, pieces: Iterable[str | bytes], masks: Masks, threads: int | None) -> Iterator[np.ndarray]:
        """The ids of a text in pieces, block by block; those of one stand until the next is asked for."""
        whole = blocks(map(utf8, pieces), self._encoder.find_cut)
        batches = ((block, np.array([len(block)], np.int64)) for block in whole)
        return (ids for ids, _ in self._encode_batches(batches, masks, thread_count(threads)))

    def _encode_batches(
        self, batches: Iterable[Batch], masks: Masks, threads: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        try:
            yield from self._encoder.encode_batches(batches, *masks, threads)
        except RefusedSpecial as found:
            raise self._special_error(found) from None

    def _encode_block(self, block: bytes, masks: Masks) -> np.ndarray:
        try:
            return self._encoder.encode(block, *masks)
        except RefusedSpecial as found:
            raise self._special_error(found) from None

    def _encode_list(self, text: str | bytes, masks: Masks, threads: int | None) -> list[int]:
        if is_short(text) and threads == 1:
            return self._as_list(self._encode_block(utf8(text), masks))
        ids: list[int] = []
        for part in self._stream(slices(text), masks, threads):
            ids += self._as_list(part)
        return ids

    def _as_list(self, ids: np.ndarray) -> list[int]:
        """Python ints, each of them shared by all its occurrences: making new ones would take longer than encoding."""
        return ids.tolist() if len(ids) < 64 else self._ints[ids].tolist()

    @functools.cached_property
    def _ints(self) -> np.ndarray:
        return np.array(range(self.vocab_size), dtype=object)

    # --- special tokens ----------------------------------------------------------------------------------------------

    def _masks(self, allowed: Names, disallowed: Names) -> Masks:
        """A byte for each special: whether it is allowed, and whether it is refused."""
        if not allowed and (disallowed == "all" or not disallowed):  # what most calls ask for
            return None, b"\1" * len(self.special_tokens) if disallowed and self.special_tokens else None
        taken = set(self.special_tokens) if allowed == "all" else self._known(allowed)
        refused = set(self.special_tokens) - taken if disallowed == "all" else self._known(disallowed)
        return (
            bytes(text in taken for text in self.special_tokens) if taken else None,
            bytes(text in refused for text in self.special_tokens) if refused else None,
        )

    def _known(self, names: Names) -> set[str]:
        if isinstance(names, str):
            raise TypeError(f'Special tokens are named in a set, or by "all"; got the string {names!r}.')
        if strange := set(names) - set(self.special_tokens):
            has = ", ".join(map(repr, self.special_tokens)) or "none"
            raise ValueError(f"{sorted(strange)[0]!r} is not a special token of this tokenizer; it has {has}.")
        return set(names)

    def _special_error(self, found: RefusedSpecial) -> SpecialTokenError:
        name = list(self.special_tokens)[found.index]
        remedy = f"Pass allowed_special={{{name!r}}} to encode it as one token, or disallowed_special=() to encode it "
        return SpecialTokenError(name, remedy + "as ordinary text.")

    @property
    def end_of_text(self) -> int | None:
        """The id of <|endoftext|>, where there is one."""
        return self.special_tokens.get(END_OF_TEXT)

    # --- decoding ----------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """The text of whole numbers. Never raises: bytes that are no UTF-8, and ids that are none, become U+FFFD."""
        return str(self._bytes(_as_uint32(ids)), "utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, exactly; an id that is none is refused."""
        ids = ids.reshape(-1) if isinstance(ids, np.ndarray) else list(ids)
        known = _as_uint32(ids)
        if len(bad := np.flatnonzero(self._holes[np.minimum(known, self.vocab_size)])):
            raise ValueError(
                f"A token id is one of the {len(self.vocab)} in the vocabulary, below {self.vocab_size}; "
                f"got {ids[bad[0]]} at place {bad[0]}. `decode` would put U+FFFD there."
            )
        return bytes(self._bytes(known))

    def decode_batch(self, batch: Iterable[Iterable[int]]) -> list[str]:
        """The text of each list of ids."""
        return [self.decode(ids) for ids in batch]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; those of U+FFFD when it is none."""
        return self.vocab.get(token, UNKNOWN)

    @functools.cached_property
    def _holes(self) -> np.ndarray:
        """Which ids below vocab_size are none."""
        holes = np.ones(self.vocab_size + 1, bool)
        holes[list(self.vocab)] = False
        return holes

    @functools.cached_property
    def _byte_table(self) -> tuple[bytes, np.ndarray]:
        """The bytes of all ids in a row, one entry more for any other id, and where each one starts."""
        texts = [self.token_bytes(token) for token in range(self.vocab_size + 1)]
        return b"".join(texts), np.cumsum([0, *map(len, texts)], dtype=np.int64)

    def _bytes(self, ids: np.ndarray) -> memoryview:
        return bpe.backend().decode(*self._byte_table, ids)

    # --- identity and files ------------------------------------------------------------------------------------------

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides ids and texts: shards and checkpoints carry it."""
        vocab = [[token, text.hex()] for token, text in self.vocab.items()]
        merges = [[left.hex(), right.hex()] for left, right in self.merges]
        document = [vocab, merges, sorted(self.special_tokens.items()), self.kind, self.unknown]
        return hashlib.sha256(json.dumps(document).encode()).hexdigest()

    @property
    def kind(self) -> str:
        """ "bpe" or "characters"."""
        return "characters" if isinstance(self._encoder, CharacterEncoder) else "bpe"

    def save(self, path: str | Path) -> Path:
        """Write a tokenizer.json that Hugging Face tokenizers reads too; into a folder under that name."""
        from fuselm.text import formats

        return formats.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json, a folder of GPT-2's two files, or a tiktoken rank file."""
        from fuselm.text import formats

        return formats.load(Path(path))

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and for other processes, which build their own C++ side; files are formats.py's."""
        return _rebuild, (self.kind, self.vocab, self.merges, self.special_tokens, self.unknown)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.vocab_size} ids, {len(self.special_tokens)} special)"


def _rebuild(
    kind: str, vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]], specials: dict[str, int], unknown: str | None
) -> Tokenizer:
    if kind == "bpe":
        return Tokenizer(vocab, merges, specials)
    return Tokenizer._of_characters(vocab, specials, unknown)


def _merge_ids(ordinary: Mapping[bytes, int], left: bytes, right: bytes) -> tuple[int, int, int]:
    try:
        return ordinary[left], ordinary[right], ordinary[left + right]
    except KeyError as error:
        raise ValueError(
            f"Both parts of a merge and what it makes are in the vocabulary; {error.args[0]!r} of the merge "
            f"{left!r} + {right!r} is not. The vocabulary and the merges belong to different tokenizers."
        ) from None


def _number_specials(vocab: Mapping[int, bytes], special_tokens: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """An id for each special token: the one it is given, else the one it has in the vocabulary, else the next free."""
    texts = bpe.check_special_tokens(special_tokens)
    names = [text.decode() for text in texts]
    if isinstance(special_tokens, Mapping):
        numbered = dict(zip(names, special_tokens.values(), strict=True))
        taken = dict(vocab)
        for name, token in numbered.items():
            wrong = f"The special token {name!r} cannot have the id {token}"
            if not 0 <= token < MAX_IDS:
                raise ValueError(f"{wrong}: ids are from 0 to {MAX_IDS - 1}.")
            if taken.setdefault(token, utf8(name)) != utf8(name):
                raise ValueError(f"{wrong}: it is {taken[token]!r}.")
        return numbered
    known = {text: token for token, text in vocab.items()}
    free = max(vocab, default=-1) + 1
    fresh = {text: free + i for i, text in enumerate(text for text in texts if text not in known)}
    return {name: known.get(text, fresh.get(text, -1)) for name, text in zip(names, texts, strict=True)}


def _as_uint32(ids: Iterable[int]) -> np.ndarray:
    """Ids as an array; what has no place in 32 bits is 2^32 - 1, which is no id either."""
    if not isinstance(ids, np.ndarray):
        ids = ids if isinstance(ids, list) else list(ids)
        # The standard library's array takes half the time of np.fromiter, and never wraps a number round.
        try:
            return np.asarray(array("I", ids))
        except OverflowError:
            return np.asarray(array("I", [token if 0 <= token < 1 << 32 else NO_ID for token in ids]))
    if ids.dtype.kind not in "iu" and ids.size:
        raise TypeError(f"Token ids are whole numbers; got an array of {ids.dtype}.")
    if ids.dtype.itemsize > 4 or ids.dtype.kind != "u":
        ids = ids.astype(np.int64)  # a uint64 past 2^63 becomes negative, and so none
        ids = np.where((ids >= 0) & (ids < NO_ID), ids, NO_ID)
    return np.ascontiguousarray(ids.reshape(-1), np.uint32)


def _check_pieces(pieces: Iterable[str | bytes]) -> None:
    if isinstance(pieces, str | bytes):
        raise TypeError("A text comes in pieces here, as the lines of a file do; got one text. Put it into a list.")


def _batches(texts: Iterable[bytes]) -> Iterator[Batch]:
    """Texts in batches that are worth a thread's while."""
    held: list[bytes] = []
    ends: list[int] = []
    for text in texts:
        held.append(text)
        ends.append((ends[-1] if ends else 0) + len(text))
        if ends[-1] >= BLOCK_BYTES // 4:
            yield b"".join(held), np.array(ends, np.int64)
            held, ends = [], []
    if held:
        yield b"".join(held), np.array(ends, np.int64)
