"""Batches of token rows, in an order that (seed, epoch) alone decide, so that a run resumes exactly where it stopped.

It knows where rows start, who reads which and in what order; it does not know files (shards.py), devices or frameworks:
batches are numpy arrays.

    loader = Loader([open_shard("train.tokens")], batch_size=32, context=256, seed=1)
    for batch in loader:                    # forever, epoch after epoch; batch.inputs and batch.targets: [B, T] int32
        ...
    Loader(shards, batch_size=32, context=256, seed=1, **loader.state())  # goes on with the very next batch

A row is context + 1 tokens: the inputs, and the same shifted by one. How a corpus is cut into rows:

- `rows="stream"`: every `context` tokens, across documents and shards. Unshuffled it is cut from the first token on.
  Shuffled, each epoch is cut from its own phase on, a place among the first `context` tokens, so that a token has other
  neighbours in the next epoch; every epoch has the rows that fit after the last phase, at most one fewer than in order.
- `rows="documents"`: a row starts at the last document start that leaves no token out, or where the row before ended
  while a document is longer than a row; what two rows share is seen twice. The last row ends at the last token.

Global batch k of an epoch is rows [k * B * R, (k + 1) * B * R) of its order for R ranks, and each rank reads its B
consecutive ones. Rows at the end of an epoch that do not fill a global batch are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np

from fuselm.data.shards import Concatenated, Shard

RowMode = Literal["stream", "documents"]
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the step of splitmix64
MIX_A, MIX_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ROUNDS = 8  # a Feistel network is statistically fine from about 4 on; small corpora have few bits, so some more
ROWS_AHEAD = 4096  # rows placed at once: to place 64 alone takes 0.3 ms, three times as long as to read them


class Batch(NamedTuple):
    """Inputs and, shifted by one, targets: both [B, T], int32, C-contiguous."""

    inputs: np.ndarray
    targets: np.ndarray


class Loader(Iterator[Batch]):
    """An endless iterator of this rank's batches; `state()` says where it stands, for all ranks alike.

    `position` counts the rows that all ranks together have consumed in `epoch`. A run may be resumed on another number
    of ranks as long as batch_size * world_size stays the same.
    """

    def __init__(
        self,
        shards: Shard | Sequence[Shard],
        *,
        batch_size: int,
        context: int,
        seed: int = 0,
        shuffle: bool = True,
        rows: RowMode = "stream",
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        position: int = 0,
    ) -> None:
        _check_ranks(rank, world_size)
        self.batch_size, self.context, self.seed, self.shuffle = batch_size, context, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self._tokens = Concatenated(shards)
        self._rows = _cut(self._tokens, batch_size, context, rows, shuffle)
        self.rows_per_epoch = self._rows.count
        self.steps_per_epoch = self.rows_per_epoch // self.global_batch_size
        if self.steps_per_epoch == 0:
            message = f"An epoch holds a global batch or more, batch_size * world_size = {self.global_batch_size} rows"
            remedy = "Use a smaller batch_size or context, or a longer corpus."
            raise ValueError(f"{message}; this corpus has {self.rows_per_epoch} of {context} tokens. {remedy}")
        _check_place(epoch, position, self.global_batch_size, self.steps_per_epoch)
        self._epoch, self._step = epoch, position // self.global_batch_size
        self._ahead = _Ahead(-1, 0, np.zeros((0, batch_size), dtype=np.int64))

    @property
    def global_batch_size(self) -> int:
        """Rows that all ranks together read in one step."""
        return self.batch_size * self.world_size

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = _read(self._tokens, self._next_starts(), self.context)
        self._advance()  # only now: a read that failed is tried again
        return batch

    def next_starts(self) -> np.ndarray:
        """Where the rows of the next batch start, [B]: for whoever holds the tokens elsewhere, as on a GPU."""
        starts = self._next_starts()
        self._advance()
        return starts

    def state(self) -> dict[str, int]:
        """Where the next batch stands: give it to a new Loader, on every rank, to go on from there."""
        return {"epoch": self._epoch, "position": self._step * self.global_batch_size}

    def order(self, epoch: int) -> np.ndarray:
        """Where this rank's rows start in an epoch, in the order of reading: int64 [steps_per_epoch, B].

        A start counts tokens from the first of the first shard on. With the tokens in the memory of a GPU, row i is
        tokens[start : start + context + 1] there.
        """
        _check_place(epoch, 0, self.global_batch_size, self.steps_per_epoch)
        return self._starts(epoch, 0, self.steps_per_epoch)

    def _advance(self) -> None:
        self._step += 1
        if self._step == self.steps_per_epoch:
            self._epoch, self._step = self._epoch + 1, 0

    def _next_starts(self) -> np.ndarray:
        ahead = self._ahead
        if ahead.epoch != self._epoch or not ahead.step <= self._step < ahead.step + len(ahead.starts):
            last = min(self._step + -(-ROWS_AHEAD // self.batch_size), self.steps_per_epoch)
            ahead = self._ahead = _Ahead(self._epoch, self._step, self._starts(self._epoch, self._step, last))
        return ahead.starts[self._step - ahead.step]

    def _starts(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Where this rank's rows of steps first .. last - 1 start: [last - first, B]."""
        steps = np.arange(first, last, dtype=np.int64)[:, None]  # [steps, 1]
        places = steps * self.global_batch_size + self.rank * self.batch_size + np.arange(self.batch_size)  # [steps, B]
        if not self.shuffle:
            return self._rows.starts(places, phase=0)
        phase_key, *round_keys = _keys(self.seed, epoch, 1 + ROUNDS)
        rows = permute(places.reshape(-1), self.rows_per_epoch, round_keys).reshape(places.shape)
        return self._rows.starts(rows, phase=phase_key % self._rows.phases)


def validation_batches(
    shards: Shard | Sequence[Shard],
    batch_size: int,
    context: int,
    limit: int | None = None,
    *,
    rows: RowMode = "stream",
) -> Iterator[Batch]:
    """Every row once, in order; the last batch may be smaller. `limit` is the most rows to read.

    The tokens after the last whole row of a stream, fewer than `context`, are left out.
    """
    tokens = Concatenated(shards)
    cut = _cut(tokens, batch_size, context, rows, shuffle=False)
    if limit is not None:
        _check_positive("limit", limit)
    count = cut.count if limit is None else min(limit, cut.count)
    places = (np.arange(first, min(first + batch_size, count)) for first in range(0, count, batch_size))
    return (_read(tokens, cut.starts(place, phase=0), context) for place in places)


def _read(tokens: Concatenated, starts: np.ndarray, context: int) -> Batch:
    ids = tokens.rows(starts, context + 1)  # [B, T + 1]
    return Batch(ids[:, :-1].astype(np.int32, order="C"), ids[:, 1:].astype(np.int32, order="C"))  # [B, T] each


# --- where rows start ------------------------------------------------------------------------------------------------


class _Ahead(NamedTuple):
    """The starts of some steps from `step` of `epoch` on: [steps, B]."""

    epoch: int
    step: int
    starts: np.ndarray


@dataclass(frozen=True)
class _Rows:
    """A corpus cut into rows: every `context` tokens from a phase on, or at the places of a table."""

    count: int
    context: int
    phases: int = 1
    table: np.ndarray | None = None

    def starts(self, rows: np.ndarray, phase: int) -> np.ndarray:
        return rows * self.context + phase if self.table is None else self.table[rows]


def _cut(tokens: Concatenated, batch_size: int, context: int, rows: str, shuffle: bool) -> _Rows:
    _check_positive("batch_size", batch_size)
    _check_positive("context", context)
    total = tokens.num_tokens
    if total < context + 1:
        message = f"A row is context + 1 = {context + 1} tokens; the corpus has {total}."
        raise ValueError(f"{message} Use a smaller context or a longer corpus.")
    if rows == "documents":
        table = document_rows(tokens.documents(), total, context)
        return _Rows(len(table), context, table=table)
    if rows != "stream":
        message = f"Rows are cut from the 'stream' or at 'documents'; got rows={rows!r}."
        raise ValueError(f"{message} Use one of the two.")
    if not shuffle:
        return _Rows((total - 1) // context, context)
    # As many rows as fit after the last of all `context` phases; a corpus too short for that is one row, and its phases
    # are the places where one fits.
    count = max(1, total // context - 1)
    return _Rows(count, context, phases=min(context, total - count * context))


def document_rows(documents: np.ndarray, num_tokens: int, context: int) -> np.ndarray:
    """Where rows of context + 1 tokens start so that they start with documents and leave no token out.

    From a row at s the next one starts at the last document start in (s, s + context], or at s + context when there is
    none. Only documents can be chosen from afar, so the chain from document to document is worked out for all of them
    at once, walked, and then filled with the rows inside long documents.
    """
    ends = np.append(documents[1:], num_tokens)
    inner = (ends - documents - 1) // context  # rows that start inside the document when one starts at its start
    reach = documents + (inner + 1) * context
    following = np.searchsorted(documents, reach, side="right") - 1
    following[-1] = len(documents)
    chosen = _walk(following)
    counts = inner[chosen] + 1
    firsts = np.cumsum(counts) - counts  # the number of the row at each chosen document's start
    strides = np.full(int(counts.sum()), context, dtype=np.int64)
    strides[0] = 0
    strides[firsts[1:]] = np.diff(documents[chosen]) - inner[chosen[:-1]] * context
    starts = np.cumsum(strides, out=strides)
    last = num_tokens - context - 1  # a row that would run past the end is moved back to it
    return np.append(starts[: np.searchsorted(starts, last)], last)


def _walk(following: np.ndarray) -> np.ndarray:
    """0, following[0], following[following[0]] and so on, up to len(following)."""
    block, here, visited = 1 << 18, 0, []
    for first in range(0, len(following), block):
        # A list is several times as quick to walk as an array, and too large to make of all of them.
        part, steps = following[first : first + block].tolist(), []
        while here < first + len(part):
            steps.append(here)
            here = part[here - first]
        visited.append(np.array(steps, dtype=np.int64))
    return np.concatenate(visited)


# --- order -----------------------------------------------------------------------------------------------------------


def permute(places: np.ndarray, count: int, keys: Sequence[int]) -> np.ndarray:
    """The images of `places` under a permutation of range(count) that the keys name, each found without the others.

    A Feistel network permutes the numbers below the next power of two; whoever lands at or above count goes through it
    again until it does not (cycle walking), which keeps it a permutation. numpy's own shuffles are not used: their
    stream may change with a version of numpy, and a resumed run would then read other rows.
    """
    bits = (count - 1).bit_length()
    images = np.empty(places.shape, dtype=np.int64)
    for first in range(0, len(places), 1 << 15):  # blocks that stay in the cache
        values = _feistel(places[first : first + (1 << 15)].astype(np.uint64), bits, keys)
        outside = np.flatnonzero(values >= np.uint64(count))
        while outside.size:
            values[outside] = _feistel(values[outside], bits, keys)
            outside = outside[values[outside] >= np.uint64(count)]
        images[first : first + (1 << 15)] = values.astype(np.int64)
    return images


def _feistel(values: np.ndarray, bits: int, keys: Sequence[int]) -> np.ndarray:
    """A permutation of the numbers of `bits` bits: each half in turn is xored with a function of the other one."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    high, low = values >> low_bits, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_mixed(high + np.uint64(key)) & low_mask)
        else:
            high = high ^ (_mixed(low + np.uint64(key)) & high_mask)
    return (high << low_bits) | low


def _mixed(values: np.ndarray) -> np.ndarray:
    """The output function of splitmix64; products wrap around, as they should."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_A)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_B)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, epoch: int, count: int) -> list[int]:
    """The first numbers of a splitmix64 stream of its own for each (seed, epoch)."""
    state = _mixed_one(_mixed_one(seed + GOLDEN) + epoch)
    return [_mixed_one(state + number * GOLDEN) for number in range(1, count + 1)]


def _mixed_one(value: int) -> int:
    # `_mixed` in Python's integers: numpy warns when a product of two scalars wraps around.
    value &= MASK
    value = (value ^ (value >> 30)) * MIX_A & MASK
    value = (value ^ (value >> 27)) * MIX_B & MASK
    return value ^ (value >> 31)


# --- refusals --------------------------------------------------------------------------------------------------------


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is at least 1; got {value}. Give a positive number.")


def _check_ranks(rank: int, world_size: int) -> None:
    _check_positive("world_size", world_size)
    if not 0 <= rank < world_size:
        message = f"Ranks are 0 to {world_size - 1}, as world_size is {world_size}; got rank {rank}."
        raise ValueError(f"{message} Give each process its own rank.")


def _check_place(epoch: int, position: int, global_batch_size: int, steps: int) -> None:
    if epoch < 0:
        raise ValueError(f"Epochs count from 0; got {epoch}. Give what state() returned.")
    if position % global_batch_size:
        message = f"A position is a multiple of batch_size * world_size = {global_batch_size}; got {position}."
        raise ValueError(f"{message} Resume with the global batch size that the run was stopped with.")
    if not 0 <= position < steps * global_batch_size:
        message = f"A position is below the {steps * global_batch_size} rows that an epoch reads; got {position}."
        raise ValueError(f"{message} Resume on the corpus and with the context that the run was stopped with.")
