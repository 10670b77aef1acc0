"""Batches: which rows there are, in what order, who reads them, and that a stopped run goes on where it stopped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fuselm.data.loader import Batch, Loader, document_rows, permute, validation_batches
from fuselm.data.shards import Shard, ShardError, ShardHeader, ShardWriter, open_shard

same_every_run = settings(deadline=None, derandomize=True)
KEYS = [3, 1, 4, 1, 5, 9, 2, 6]


def shard(tokens: Sequence[int] | np.ndarray, documents: Sequence[int] = (0,), dtype: str = "uint16") -> Shard:
    """One in memory: the loader cannot tell, and a disk would only be scenery."""
    header = ShardHeader(1, dtype, len(tokens), len(documents), 2**16, "0" * 64, None, None, {})
    return Shard(Path("memory"), header, np.array(tokens, dtype=dtype), np.array(documents, dtype=np.uint64), None)


def counting(num_tokens: int, documents: Sequence[int] = (0,)) -> Shard:
    """The token at a place is the number of the place, so that a batch tells where it was read."""
    return shard(np.arange(num_tokens), documents)


def take(loader: Loader, count: int) -> list[Batch]:
    return list(itertools.islice(loader, count))


def same(ours: Sequence[Batch], theirs: Sequence[Batch]) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(a.inputs, b.inputs) and np.array_equal(a.targets, b.targets)
        for a, b in zip(ours, theirs, strict=True)
    )


def first_tokens(batches: Sequence[Batch]) -> list[int]:
    """Of a counting corpus: where the rows start."""
    return [int(start) for batch in batches for start in batch.inputs[:, 0]]


# --- batches and rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_targets_are_inputs_shifted_by_one(dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**16, 1000)
    loader = Loader(shard(tokens, dtype=dtype), batch_size=4, context=7)
    for starts, batch in zip(loader.order(0), take(loader, loader.steps_per_epoch), strict=True):
        for array, shift in ((batch.inputs, 0), (batch.targets, 1)):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
            assert array.tolist() == [tokens[s + shift : s + shift + 7].tolist() for s in starts]


@pytest.mark.parametrize(("num_tokens", "rows"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_an_unshuffled_stream_is_read_in_order_from_its_first_token(num_tokens: int, rows: int) -> None:
    loader = Loader(counting(num_tokens), batch_size=1, context=4, shuffle=False)
    assert loader.rows_per_epoch == loader.steps_per_epoch == rows
    assert first_tokens(take(loader, 2 * rows)) == [4 * i for i in range(rows)] * 2


@same_every_run
@given(num_tokens=st.integers(2, 200), context=st.integers(1, 40), seed=st.integers(0, 2**64 - 1))
def test_a_shuffled_stream_is_cut_without_overlap_from_a_phase_on(num_tokens: int, context: int, seed: int) -> None:
    assume(num_tokens > context)
    loader = Loader(counting(num_tokens), batch_size=1, context=context, seed=seed)
    assert loader.rows_per_epoch == max(1, num_tokens // context - 1)
    for epoch in range(3):
        starts = np.sort(loader.order(epoch).reshape(-1))
        assert 0 <= starts[0] < context
        assert starts[-1] + context < num_tokens
        assert np.all(np.diff(starts) == context)


def test_every_phase_comes_up() -> None:
    loader = Loader(counting(100), batch_size=1, context=5)
    assert {int(loader.order(epoch).min()) for epoch in range(60)} == {0, 1, 2, 3, 4}


def test_epochs_and_seeds_differ_in_order_and_in_phase() -> None:
    orders = [
        Loader(counting(5000), batch_size=8, context=16, seed=seed).order(epoch)
        for seed in (0, 1, 2**40, -1)
        for epoch in range(4)
    ]
    assert len({order.tobytes() for order in orders}) == 16
    assert len({tuple(order.reshape(-1) // 16) for order in orders}) == 16  # the same but for the phase would not do
    assert len({int(order.min()) for order in orders}) > 4


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # Literal: a run that was stopped under another version of numpy, or of this file, must find its rows again.
    loader = Loader(counting(2000), batch_size=2, context=100, seed=1234)
    assert loader.order(0)[:4].tolist() == [[377, 577], [1677, 1377], [1077, 877], [1477, 1277]]
    assert loader.order(7)[:3].tolist() == [[1551, 551], [951, 51], [1751, 651]]
    documents = Loader(counting(60, range(0, 60, 3)), batch_size=6, context=3, seed=5, rows="documents")
    assert documents.order(1)[:2].tolist() == [[51, 18, 48, 33, 36, 12], [56, 45, 15, 39, 24, 54]]


@pytest.mark.parametrize("rows", ["stream", "documents"])
def test_next_starts_are_where_the_next_batch_would_be_read(rows: Any) -> None:
    corpus = counting(300, range(0, 300, 11))
    reading = Loader(corpus, batch_size=4, context=7, seed=3, rows=rows)
    placing = Loader(corpus, batch_size=4, context=7, seed=3, rows=rows)
    for number in range(3 * reading.steps_per_epoch):  # over the ends of epochs
        batch = next(reading)
        starts = next(placing).inputs[:, 0] if number % 5 == 4 else placing.next_starts()  # in any mixture
        assert starts.tolist() == batch.inputs[:, 0].tolist()
        assert placing.state() == reading.state()


# --- permutation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 1023, 1025, 65535, 65537])
def test_the_permutation_is_one(count: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(count), count, KEYS)), np.arange(count))


@same_every_run
@given(
    count=st.integers(1, 3000),
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9),
    data=st.data(),
)
def test_a_place_is_permuted_without_the_others(count: int, keys: list[int], data: st.DataObject) -> None:
    images = permute(np.arange(count), count, keys)
    assert np.array_equal(np.sort(images), np.arange(count))
    places = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), dtype=np.int64)
    assert np.array_equal(permute(places, count, keys), images[places])


def test_the_permutation_of_a_corpus_too_large_for_a_table() -> None:
    count = 2**62 - 57
    images = permute(np.arange(1000), count, KEYS)
    assert len(set(images.tolist())) == 1000
    assert images.min() >= 0
    assert images.max() < count
    assert images.max() > count // 2


def test_the_permutation_leaves_no_trace_of_the_order() -> None:
    images = permute(np.arange(20_011), 20_011, KEYS)
    neighbours = np.corrcoef(images[:-1], images[1:])[0, 1]
    places = np.corrcoef(np.arange(images.size), images)[0, 1]
    assert max(abs(neighbours), abs(places)) < 0.03  # four standard deviations of a random one


def test_literal_values_of_the_permutation() -> None:
    assert permute(np.arange(10), 10, KEYS).tolist() == [3, 2, 1, 8, 5, 4, 7, 6, 9, 0]
    large = [307420585566, 646621931939, 357263576682, 554965213690, 961050795653]
    assert permute(np.arange(5), 10**12, KEYS).tolist() == large


# --- documents -------------------------------------------------------------------------------------------------------


def next_start(start: int, documents: Sequence[int], context: int) -> int:
    """The rule as it is stated."""
    reachable = [document for document in documents if start < document <= start + context]
    return reachable[-1] if reachable else start + context


@same_every_run
@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=30), context=st.integers(1, 12))
def test_rows_of_documents_follow_the_rule_and_leave_no_token_out(lengths: list[int], context: int) -> None:
    num_tokens, documents = sum(lengths), [sum(lengths[:i]) for i in range(len(lengths))]
    assume(num_tokens > context)
    last = num_tokens - context - 1
    expected = [0]
    while expected[-1] < last:
        expected.append(min(next_start(expected[-1], documents, context), last))
    corpus = counting(num_tokens, documents)
    loader = Loader(corpus, batch_size=1, context=context, rows="documents", shuffle=False)
    batches = take(loader, loader.steps_per_epoch)
    assert first_tokens(batches) == expected
    assert {int(t) for batch in batches for t in batch.targets.flat} == set(range(1, num_tokens))
    shuffled = Loader(corpus, batch_size=1, context=context, rows="documents")
    assert sorted(first_tokens(take(shuffled, len(expected)))) == expected


def test_rows_start_with_documents_where_documents_fit() -> None:
    documents = np.cumsum([0, *np.random.default_rng(0).integers(1, 17, 500)])
    starts = document_rows(documents[:-1], int(documents[-1]), 16)
    assert set(starts[:-1].tolist()) <= set(documents.tolist())


def test_rows_of_many_documents_are_found_block_by_block() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 5, 300_000)  # more than are walked at once
    documents, num_tokens = np.cumsum(lengths) - lengths, int(lengths.sum())
    starts = document_rows(documents, num_tokens, 32)
    following = documents[np.searchsorted(documents, starts[:-2] + 32, side="right") - 1]
    expected = np.where(following > starts[:-2], following, starts[:-2] + 32)
    assert np.array_equal(starts[1:-1], expected)
    assert (starts[0], starts[-1]) == (0, num_tokens - 33)


# --- stopping and going on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["stream", "documents"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_resumed_at_any_step_reads_what_it_would_have_read(rows: Any, shuffle: bool, world_size: int) -> None:
    corpus = counting(131, [0, 5, 9, 40, 61, 63, 80, 101, 126])
    for rank in range(world_size):
        arguments: dict[str, Any] = {"context": 5, "seed": 3, "shuffle": shuffle, "rows": rows, "rank": rank}
        arguments |= {"batch_size": 2, "world_size": world_size}
        loader = Loader(corpus, **arguments)
        steps = 2 * loader.steps_per_epoch + 3
        states, batches = [], []
        for _ in range(steps):
            states.append(loader.state())
            batches.append(next(loader))
        assert len({tuple(state.values()) for state in states}) == steps
        assert states[-1]["epoch"] == 2
        for step, state in enumerate(states):
            assert same(take(Loader(corpus, **arguments, **state), steps - step), batches[step:])


def test_a_run_may_go_on_with_another_number_of_ranks() -> None:
    corpus = counting(500)
    alone = Loader(corpus, batch_size=6, context=5, seed=1)
    take(alone, 9)
    state = alone.state()
    expected = take(alone, 12)
    for world_size in (2, 3, 6):
        ranks = [
            Loader(corpus, batch_size=6 // world_size, context=5, seed=1, rank=rank, world_size=world_size, **state)
            for rank in range(world_size)
        ]
        together = [
            Batch(np.concatenate([b.inputs for b in batches]), np.concatenate([b.targets for b in batches]))
            for batches in zip(*(take(rank, 12) for rank in ranks), strict=True)
        ]
        assert same(together, expected)
        assert [rank.state() for rank in ranks] == [alone.state()] * world_size


def test_position_counts_the_rows_of_all_ranks() -> None:
    loader = Loader(counting(101), batch_size=2, context=5, world_size=3, shuffle=False)  # 20 rows, 3 steps of 6
    positions = [loader.state() for _ in range(5) if next(loader)]
    assert [tuple(state.values()) for state in positions] == [(0, 6), (0, 12), (1, 0), (1, 6), (1, 12)]


def test_a_read_that_failed_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = counting(101)
    loader, other = (Loader(corpus, batch_size=2, context=5) for _ in range(2))

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr("fuselm.data.shards.Concatenated.rows", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    assert same(take(loader, 3), take(other, 3))


# --- ranks and orders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_read_apart_and_together_all_but_the_rest(world_size: int) -> None:
    loaders = [
        Loader(counting(1000), batch_size=4, context=7, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    rows = [row for loader in loaders for row in first_tokens(take(loader, loader.steps_per_epoch))]
    count = loaders[0].rows_per_epoch
    assert len(set(rows)) == len(rows) == count - count % (4 * world_size)
    # In the order of the epoch: a global batch is the ranks' batches one after another.
    whole = Loader(counting(1000), batch_size=4 * world_size, context=7).order(0)
    assert np.array_equal(np.concatenate([loader.order(0) for loader in loaders], axis=1), whole)


@same_every_run
@given(
    num_tokens=st.integers(40, 400),
    batch_size=st.integers(1, 4),
    context=st.integers(1, 9),
    ahead=st.integers(1, 12),
    rows=st.sampled_from(["stream", "documents"]),
    shuffle=st.booleans(),
)
def test_order_is_what_iteration_reads(
    num_tokens: int, batch_size: int, context: int, ahead: int, rows: Any, shuffle: bool
) -> None:
    corpus = counting(num_tokens, range(0, num_tokens, 11))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fuselm.data.loader.ROWS_AHEAD", ahead)  # how far rows are placed ahead must not be seen
        loader = Loader(corpus, batch_size=batch_size, context=context, rows=rows, shuffle=shuffle, seed=9)
        for epoch in range(2):
            order = loader.order(epoch)
            assert (order.dtype, order.shape) == (np.int64, (loader.steps_per_epoch, batch_size))
            assert first_tokens(take(loader, loader.steps_per_epoch)) == order.reshape(-1).tolist()


# --- several shards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["stream", "documents"])
def test_several_shards_are_read_as_one(rows: Any) -> None:
    documents = list(range(0, 300, 10))
    whole = counting(300, documents)
    cuts = itertools.pairwise((0, 20, 30, 200, 300))
    parts = [shard(np.arange(start, end), range(0, end - start, 10)) for start, end in cuts]
    one, several = (Loader(shards, batch_size=3, context=13, rows=rows) for shards in (whole, parts))
    assert one.rows_per_epoch == several.rows_per_epoch
    assert same(take(one, 20), take(several, 20))


def test_files_are_read_as_arrays_are(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 400)
    for name, part in (("a", tokens[:150]), ("b", tokens[150:])):
        with ShardWriter(tmp_path / name, vocab_size=50, fingerprint="0" * 64, separator=None) as writer:
            writer.append(part)
        np.save(tmp_path / f"{name}.npy", part)
    expected = take(Loader(shard(tokens), batch_size=4, context=9, seed=2), 15)
    for names in (("a", "b"), ("a.npy", "b.npy")):
        shards = [open_shard(tmp_path / name) for name in names]
        assert same(take(Loader(shards, batch_size=4, context=9, seed=2), 15), expected)
    with pytest.raises(ShardError, match="the same fingerprint"):
        Loader([open_shard(tmp_path / "a"), open_shard(tmp_path / "b.npy")], batch_size=4, context=9)


# --- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "sizes"), [(None, [4, 4, 2]), (100, [4, 4, 2]), (10, [4, 4, 2]), (8, [4, 4]), (5, [4, 1]), (1, [1])]
)
def test_validation_reads_each_row_once_in_order(limit: int | None, sizes: list[int]) -> None:
    batches = list(validation_batches(counting(53), 4, 5, limit))
    assert [len(batch.inputs) for batch in batches] == [len(batch.targets) for batch in batches] == sizes
    assert first_tokens(batches) == [5 * i for i in range(sum(sizes))]


def test_validation_can_follow_documents() -> None:
    batches = list(validation_batches(counting(20, [0, 3, 9]), 2, 5, rows="documents"))
    assert first_tokens(batches) == [0, 3, 8, 9, 14]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size is at least 1; got 0"),
        ({"context": 0}, "context is at least 1; got 0"),
        ({"context": 100}, "A row is context [+] 1 = 101 tokens; the corpus has 100"),
        ({"batch_size": 10}, "world_size = 10 rows; this corpus has 9 of 10 tokens"),
        ({"world_size": 5}, "world_size = 10 rows; this corpus has 9"),
        ({"rows": "sentences"}, "got rows='sentences'"),
        ({"world_size": 0}, "world_size is at least 1; got 0"),
        ({"rank": 1}, "Ranks are 0 to 0, as world_size is 1; got rank 1"),
        ({"rank": -1}, "got rank -1"),
        ({"epoch": -1}, "Epochs count from 0; got -1"),
        ({"position": 3}, "multiple of batch_size [*] world_size = 2; got 3"),
        ({"position": 8}, "below the 8 rows that an epoch reads; got 8"),
        ({"position": -2}, "got -2"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    arguments = {"batch_size": 2, "context": 10, **changes}
    with pytest.raises(ValueError, match=words) as refusal:
        Loader(counting(100), **arguments)
    assert str(refusal.value).endswith(".")


def test_validation_is_refused_at_the_call_not_at_the_first_batch() -> None:
    for arguments, words in (((0, 5), "batch_size"), ((2, 100), "A row is"), ((2, 5, 0), "limit is at least 1")):
        with pytest.raises(ValueError, match=words):
            validation_batches(counting(50), *arguments)


def test_an_empty_corpus_is_refused() -> None:
    for rows in ("stream", "documents"):
        with pytest.raises(ValueError, match="the corpus has 0"):
            Loader(shard([], []), batch_size=1, context=1, rows=rows)


def test_a_path_in_place_of_a_shard_is_refused_with_the_way_to_open_it() -> None:
    with pytest.raises(TypeError, match="open_prepared"):
        Loader("data/stories", batch_size=1, context=1)  # type: ignore[arg-type]
