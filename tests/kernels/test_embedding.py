"""What embedding promises beyond the generic suite: strays, the order of sums, positions, dtypes, transforms, vmap.

The generic suite carries the numbers. Here is also a model in numpy of how the CUDA kernels sort tokens and cut sums
into pieces: the plan is tested without a GPU, and a GPU's bits are held against the order that the contract names.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselm import ops
from fuselm.kernels import embedding as contract
from fuselm.kernels.embedding import GROUPS, PIECE
from fuselm.kernels.spec import RefusedInput, TensorInfo
from fuselm.kernels.torch_ops.embedding import embedding_reference
from tests.kernels.arrays import LAYOUTS, lay_out, to_numpy
from tests.kernels.problems import DEVICES

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
in_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)

IDS = torch.tensor([[1, 4, 1], [0, 1, 3]])


def table(rows: int, width: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=made, device=device).to(dtype)


def drawn(kind: str, tokens: int, rows: int) -> np.ndarray:
    """Ids of a kind: even, all equal, as uneven as words are, or some of them outside."""
    rng = np.random.default_rng(tokens)
    if kind == "equal":
        return np.full(tokens, rows // 2)
    if kind == "words":
        return np.minimum(rng.zipf(1.3, tokens) - 1, rows - 1)
    return rng.integers(-3, rows + 3, tokens) if kind == "strays" else rng.integers(0, rows, tokens)


def gradients(ids: Tensor, weight: Tensor, dout: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """Of weight and, where there is one, of a table of positions."""
    leaves = [weight.detach().requires_grad_()]
    if "position_weight" in more:
        leaves.append(more["position_weight"].detach().requires_grad_())
        more["position_weight"] = leaves[1]
    return torch.autograd.grad(ops.embedding(ids, leaves[0], **more), leaves, dout)


# ---- rows ----------------------------------------------------------------------------------------------------------


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("width", [1, 24, 77, 1000])
def test_rows_are_the_tables_own(device: str, dtype: torch.dtype, width: int) -> None:
    weight = table(9, width, device, dtype)
    for ids in (torch.tensor(8), torch.arange(8, -1, -1), torch.full((1, 2, 1, 3, 1, 2, 2), 5)):
        for kind in (torch.int32, torch.int64):
            assert torch.equal(ops.embedding(ids.to(device, kind), weight), weight[ids.to(device)])


@on_each_device
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [24, 77])
def test_how_tables_and_positions_lie_changes_no_bit(device: str, layout: str, width: int) -> None:
    ids, positions = IDS.to(device), torch.tensor([[2, 0, 4], [4, 3, 3]], device=device)
    weight, places = table(5, width, device), table(6, width, device, torch.bfloat16, seed=1)
    for dtype in (torch.float32, torch.bfloat16):
        expected = ops.embedding(ids, weight, position_weight=places, positions=positions, dtype=dtype)
        lying = {"position_weight": lay_out(places, layout), "positions": lay_out(positions, layout)}
        assert torch.equal(ops.embedding(ids, lay_out(weight, layout), dtype=dtype, **lying), expected)
        plain = ops.embedding(ids, lay_out(weight, layout), dtype=dtype)
        assert torch.equal(plain, ops.embedding(ids, weight, dtype=dtype))


@on_each_device
def test_ids_that_are_a_window_of_longer_rows(device: str) -> None:
    """As a model's inputs are: all tokens of a row but its last."""
    text = torch.randint(50, (6, 33), generator=torch.Generator().manual_seed(0)).to(device)
    weight = table(50, 40, device)
    dout = table(6 * 32, 40, device, seed=1).view(6, 32, 40)
    for found, right in zip(
        gradients(text[:, :-1], weight, dout), gradients(text[:, :-1].contiguous(), weight, dout), strict=True
    ):
        assert torch.equal(found, right)
    assert torch.equal(ops.embedding(text[:, :-1], weight), weight[text[:, :-1]])


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 31])
def test_dtype_is_what_a_conversion_would_have_made(
    device: str, dtype: torch.dtype, wanted: torch.dtype, width: int
) -> None:
    ids, weight = IDS.to(device), table(5, width, device, dtype)
    name = str(wanted).removeprefix("torch.")
    expected = F.embedding(ids, weight).to(wanted)
    for way in (wanted, name):
        assert torch.equal(ops.embedding(ids, weight, dtype=way), expected)
    (dweight,) = gradients(ids, weight, torch.ones_like(expected), dtype=wanted)
    assert dweight.dtype == dtype
    assert dweight.float().sum(1).tolist() == [width, 3 * width, 0, width, width]


@on_each_device
def test_positions_are_added_before_the_one_rounding(device: str) -> None:
    weight, places = table(5, 64, device, torch.bfloat16), table(4, 64, device, seed=1)
    found = ops.embedding(IDS.to(device), weight, position_weight=places)
    assert torch.equal(found, (weight.float()[IDS.to(device)] + places[:3]).bfloat16())


# ---- strays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("value", [-1, 5, 2**31 - 1])
@pytest.mark.parametrize("with_grad", [False, True])
def test_an_id_without_a_row_is_refused_on_the_cpu(kind: torch.dtype, value: int, with_grad: bool) -> None:
    ids, weight = IDS.clone().to(kind), table(5, 8).requires_grad_(with_grad)
    ids[1, 2] = value
    words = rf"ids must be at least 0 and below the number of rows of weight; got {value} at \[1, 2\] for weight "
    with pytest.raises(RefusedInput, match=words + r"float32\[5, 8\] on cpu. Correct it"):
        ops.embedding(ids, weight)
    with pytest.raises(RefusedInput, match=rf"positions must be .* rows of position_weight; got {value} at \[1, 2\]"):
        ops.embedding(IDS, weight, position_weight=weight, positions=ids)


# Rows of less than a warp's vectors, of one block's and of several, and no whole vectors; few tokens, and many: of 2113
# and more each has a block no longer, and a lane has four of them, or not quite.
@pytest.mark.gpu
@in_each_dtype
@pytest.mark.parametrize("width", [8, 64, 136, 264, 1000, 1032, 77])
@pytest.mark.parametrize("tokens", [1, 7, 264, 265, 2112, 2113, 6001])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_on_cuda_few_and_many_rows_are_the_tables_own_and_strays_nan(
    cuda: str, dtype: torch.dtype, width: int, tokens: int, kind: torch.dtype
) -> None:
    weight, ids = table(50, width, cuda, dtype), torch.from_numpy(drawn("strays", tokens, 50)).to(cuda)
    if tokens > 1:
        ids[0], ids[tokens // 2] = -1, 50
    known = (ids >= 0) & (ids < 50)
    expected = weight[ids.clamp(0, 49)].masked_fill(~known[:, None], torch.nan)
    apart = torch.zeros(tokens, 3, dtype=kind, device=cuda)[:, 1].copy_(ids)  # three apart
    for given in (ids.to(kind), apart, ids.to(kind)[:1].expand(tokens)):
        right = expected if given.stride(0) else expected[:1].expand(tokens, width)
        torch.testing.assert_close(ops.embedding(given, weight), right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 264, 77])
@pytest.mark.parametrize("batch", [1, 3, 4, 5, 9])
def test_on_cuda_positions_for_a_batch_are_those_of_each_sequence(cuda: str, width: int, batch: int) -> None:
    """From four sequences on a row of positions is read once for four of them."""
    ids = torch.from_numpy(drawn("strays", batch * 13, 50)).to(cuda).view(batch, 13)
    for dtype, wanted in ((torch.bfloat16, None), (torch.float32, torch.float16), (torch.float32, None)):
        weight, places = table(50, width, cuda, dtype), table(13, width, cuda, dtype, seed=1)
        found = ops.embedding(ids, weight, position_weight=places, dtype=wanted)
        each = [ops.embedding(one, weight, position_weight=places, dtype=wanted) for one in ids]
        torch.testing.assert_close(found, torch.stack(each), rtol=0, atol=0, equal_nan=True)
        known = (ids >= 0) & (ids < 50)
        right = (weight.float()[ids.clamp(0, 49)] + places.float()).to(found.dtype)
        assert torch.equal(found[known], right[known])
        assert found[~known].isnan().all()


@pytest.mark.gpu
@in_each_dtype
@pytest.mark.parametrize("width", [16, 77])
@pytest.mark.parametrize("tokens", [40, 3000])
def test_on_cuda_a_stray_is_nan_and_adds_to_nothing(cuda: str, dtype: torch.dtype, width: int, tokens: int) -> None:
    weight, places = table(7, width, cuda, dtype), table(9, width, cuda, dtype, seed=1)
    ids, positions = (torch.from_numpy(drawn("strays", tokens, rows)).to(cuda) for rows in (7, 9))
    ids[0], ids[1] = -(2**40), 2**40
    dout = table(tokens, width, cuda, dtype, seed=2)
    for more in ({}, {"position_weight": places, "positions": positions}):
        out = ops.embedding(ids, weight, **more)
        known = (ids >= 0) & (ids < 7)
        seen = known & (positions >= 0) & (positions < 9) if more else known
        assert out[~seen].isnan().all()
        assert not out[seen].isnan().any()
        dweight = gradients(ids, weight, dout, **more)[0]
        assert torch.equal(dweight, gradients(ids[known], weight, dout[known])[0])


def test_in_jax_a_stray_is_nan_and_adds_to_nothing(jax: ModuleType) -> None:
    import fuselm.jax

    ids, weight = np.array([1, -1, 5, 4, -5], np.int32), table(5, 8).numpy()
    out, pull_back = jax.vjp(lambda weight: fuselm.jax.embedding(ids, weight), weight)
    assert np.isnan(out).all(1).tolist() == [False, True, True, False, True]
    dweight = np.asarray(pull_back(jax.numpy.ones_like(out))[0])
    assert dweight[:, 0].tolist() == [0, 1, 0, 0, 1]
    placed = fuselm.jax.embedding(ids[:1], weight, position_weight=weight, positions=np.array([7], np.int32))
    assert np.isnan(placed).all()


# ---- sums ----------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("kind", ["even", "equal", "words"])
@pytest.mark.parametrize("tokens", [1, 64, 256, 257, 5000])
def test_sums_over_repeated_ids_are_those_of_a_float64_loop(device: str, kind: str, tokens: int) -> None:
    ids = drawn(kind, tokens, 37)
    weight, dout = table(37, 12, device), table(tokens, 12, device, seed=1)
    truth, sizes = np.zeros((37, 12)), np.zeros((37, 12))
    for index, row in zip(ids, to_numpy(dout).astype(np.float64), strict=True):
        truth[index] += row
        sizes[index] += np.abs(row)
    (found,) = gradients(torch.from_numpy(ids).to(device), weight, dout)
    assert (np.abs(to_numpy(found) - truth) <= 1e-5 * sizes).all()
    assert not to_numpy(found)[sizes == 0].any()


@on_each_device
def test_tokens_are_added_up_in_their_order(device: str) -> None:
    """In fp32 1e8 + 1 is 1e8: the order shows."""
    ids = torch.tensor([2, 0, 2, 2, 2], device=device)
    sent = torch.tensor([1e8, 5.0, 1.0, -1e8, 1.0], device=device)[:, None].expand(5, 16)
    weight = table(3, 16, device)
    assert gradients(ids, weight, sent)[0][:, 0].tolist() == [5.0, 0.0, 1.0]
    sent = sent[[2, 1, 0, 4, 3]]  # 1, 1e8, 1 and -1e8 for row 2
    assert gradients(ids, weight, sent)[0][:, 0].tolist() == [5.0, 0.0, 0.0]


@on_each_device
@pytest.mark.parametrize("tokens", [200, 5000])
def test_a_row_of_the_gradient_depends_on_its_own_tokens_alone(device: str, tokens: int) -> None:
    ids = torch.from_numpy(drawn("words", tokens, 50)).to(device)
    weight, dout = table(50, 40, device), table(tokens, 40, device, seed=1)
    (everything,) = gradients(ids, weight, dout)
    for row in (0, 1, 2, 49):
        own = ids == row
        assert torch.equal(gradients(ids[own], weight, dout[own])[0][row], everything[row])


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("batch", [2, 40, 64, 1100])
def test_counted_positions_are_those_of_a_range(device: str, dtype: torch.dtype, batch: int) -> None:
    ids = torch.from_numpy(drawn("even", 5 * batch, 13)).to(device).view(batch, 5)
    weight, places = table(13, 24, device, dtype), table(8, 24, device, dtype, seed=1)
    dout = table(batch * 5, 24, device, dtype, seed=2).view(batch, 5, 24)
    counted = gradients(ids, weight, dout, position_weight=places)
    for positions in (torch.arange(5, device=device), torch.arange(5, device=device).expand(batch, 5).int()):
        more = {"position_weight": places, "positions": positions}
        assert torch.equal(ops.embedding(ids, weight, **more), ops.embedding(ids, weight, position_weight=places))
        given = gradients(ids, weight, dout, **more)
        assert torch.equal(given[0], counted[0])
        if device == "cuda":
            assert torch.equal(given[1], counted[1])
        # On the CPU torch's own sum over the batch is more exact than one token after another.
        torch.testing.assert_close(given[1], counted[1], rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-4)
        assert not given[1][5:].any()


@on_each_device
def test_backward_keeps_no_table(device: str) -> None:
    """So a table may be written over before its gradient is asked for, as with torch's own."""
    weight = table(5, 8, device).requires_grad_()
    out = ops.embedding(IDS.to(device), weight, position_weight=table(4, 8, device, seed=1).requires_grad_())
    with torch.no_grad():
        weight.zero_()
    out.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [1, 3, 0, 1, 1]


# ---- the plan of the kernels ---------------------------------------------------------------------------------------


def summed(rows: np.ndarray) -> np.ndarray:
    """The contract's order for the tokens of one row, in fp32."""
    count = max(len(rows) // PIECE, 1)
    pieces = np.zeros((count, rows.shape[1]), np.float32)
    for k, row in enumerate(rows):
        pieces[min(k // PIECE, count - 1)] += row
    groups = min(count, GROUPS)
    sums = np.zeros((groups, rows.shape[1]), np.float32)
    for p, piece in enumerate(pieces):
        sums[p % groups] += piece
    total = np.zeros(rows.shape[1], np.float32)
    for group in sums:
        total += group
    return total


def table_gradient(ids: np.ndarray, dout: np.ndarray, rows: int) -> np.ndarray:
    """A whole table's, row by row."""
    out = np.zeros((rows, dout.shape[1]), np.float32)
    for row in range(rows):
        if (ids == row).any():
            out[row] = summed(dout[ids == row])
    return out


class Plan:
    """embedding_backward.cu's sort: blocks have every so many-th row and read all ids, warps a slice of them each."""

    def __init__(self, ids: np.ndarray, rows: int, block_rows: int, warps: int = 4) -> None:
        slices = math.ceil(len(ids) / warps / 32) * 32
        self.places: dict[int, tuple[int, int, bool, bool]] = {}  # token, row, long, begins a piece
        self.heads: dict[int, tuple[int, int, int]] = {}  # of long rows: row, first place, tokens
        self.valid = 0
        blocks = math.ceil(rows / block_rows)
        for block in range(blocks):
            own = range(block, rows, blocks)
            start = int(((ids >= 0) & (ids < rows) & (ids % blocks < block)).sum())
            parts = [ids[w * slices : (w + 1) * slices] for w in range(warps)]
            counts = np.array([[(part == row).sum() for row in own] for part in parts])
            totals, before = counts.sum(0), counts.cumsum(0) - counts
            starts = totals.cumsum() - totals
            for w, part in enumerate(parts):
                for k, index in enumerate(part):
                    if index in own:
                        n = int(index) // blocks
                        self._put(w * slices + k, int(index), start + starts[n], int(before[w, n]), int(totals[n]))
                        before[w, n] += 1
            self.valid = start + int(totals.sum())

    def _put(self, token: int, row: int, first: int, rank: int, count: int) -> None:
        place, long = int(first) + rank, count >= 2 * PIECE
        begins = rank % PIECE == 0 and (rank == 0 or rank // PIECE < count // PIECE)
        assert place not in self.places
        self.places[place] = (token, row, long, begins)
        if place % PIECE == 0 and long and rank < PIECE:
            self.heads[place // PIECE] = (row, place - rank, count)

    def gradient(self, dout: np.ndarray, rows: int, chunk: int) -> np.ndarray:
        """The other two kernels: pieces by the chunk they begin in, then those of long rows together."""
        out = np.zeros((rows, dout.shape[1]), np.float32)
        partial: dict[int, np.ndarray] = {}
        for first in range(0, self.valid, chunk):
            for place in range(first, min(first + chunk, self.valid)):
                _, row, long, begins = self.places[place]
                if not begins:
                    continue
                end = place + 1
                while end < self.valid and not self.places[end][3]:
                    end += 1
                assert end - place < 2 * PIECE
                piece = np.zeros(dout.shape[1], np.float32)
                for at in range(place, end):
                    piece += dout[self.places[at][0]]
                if long:
                    assert place // PIECE not in partial  # no two pieces share a place in the workspace
                    partial[place // PIECE] = piece
                else:
                    out[row] = piece
        for row, first, count in self.heads.values():
            pieces = [partial.pop(first // PIECE + p) for p in range(count // PIECE)]
            groups = [sum(pieces[g::GROUPS], np.zeros_like(pieces[0])) for g in range(min(GROUPS, len(pieces)))]
            out[row] = sum(groups, np.zeros_like(pieces[0]))
        assert not partial  # every piece found its row
        return out


@pytest.mark.parametrize("kind", ["even", "equal", "words", "strays"])
@pytest.mark.parametrize(("tokens", "rows", "block_rows"), [(1, 3, 1), (300, 7, 3), (700, 90, 16), (1200, 5, 2)])
def test_the_plan_sorts_tokens_and_keeps_their_order(kind: str, tokens: int, rows: int, block_rows: int) -> None:
    ids = drawn(kind, tokens, rows)
    dout = table(tokens, 3).numpy()
    plan = Plan(ids, rows, block_rows)
    known = np.flatnonzero((ids >= 0) & (ids < rows))
    assert plan.valid == len(known)
    blocks = math.ceil(rows / block_rows)
    right = known[np.lexsort((ids[known] // blocks, ids[known] % blocks))]  # stable
    assert [plan.places[at][0] for at in range(plan.valid)] == right.tolist()
    expected = table_gradient(ids, dout, rows)
    for chunk in (8, 32):
        np.testing.assert_array_equal(plan.gradient(dout, rows, chunk), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["even", "equal", "words", "strays"])
@pytest.mark.parametrize("rows", [3, 700, 5000])
@pytest.mark.parametrize("width", [13, 256])
@pytest.mark.parametrize("tokens", [100, 256, 257, 3000, 40000])
def test_on_cuda_sums_have_the_bits_of_the_contracts_order(
    cuda: str, kind: str, rows: int, width: int, tokens: int
) -> None:
    ids = drawn(kind, tokens, rows)
    weight, dout = table(rows, width, cuda), table(tokens, width, cuda, seed=1)
    (found,) = gradients(torch.from_numpy(ids).to(cuda), weight, dout)
    np.testing.assert_array_equal(to_numpy(found), table_gradient(ids, to_numpy(dout), rows))


@pytest.mark.gpu
def test_on_cuda_more_rows_than_blocks_at_once_and_more_tokens_than_a_block_keeps(cuda: str) -> None:
    """A table of 300,000 rows takes several waves of sorting blocks; 200,000 tokens are read twice."""
    ids = torch.randint(300_000, (200_000,), generator=torch.Generator().manual_seed(0)).to(cuda)
    weight, dout = table(300_000, 8, cuda), table(200_000, 8, cuda, seed=1)
    (found,) = gradients(ids, weight, dout)
    right = torch.zeros(300_000, 8, dtype=torch.float64, device=cuda).index_add_(0, ids, dout.double())
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, gradients(ids, weight, dout)[0])


@pytest.mark.gpu
def test_embedding_backward_refuses_tensors_that_do_not_belong_together(cuda: str) -> None:
    ids, weight = IDS.to(cuda), table(5, 8, cuda)
    ops.embedding(ids, weight)  # the kernels are loaded now
    for dout in (torch.ones(2, 3, 9, device=cuda), torch.ones(3, 3, 8, device=cuda), torch.ones(6, 8, device=cuda)):
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            torch.ops.fuselm.embedding_backward(dout, ids, weight, None, None, 1)


# ---- derivatives and transforms in torch ---------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
def test_function_transforms_give_what_torch_gives(transform: Any) -> None:
    places = table(3, 2, seed=1)

    def loss(embedding: Any) -> Any:
        return lambda weight: (embedding(IDS, weight, position_weight=places) ** 3).sum()

    found, right = (transform(loss(f))(table(5, 2)) for f in (ops.embedding, embedding_reference))
    assert torch.equal(found, right)
    assert found.abs().max() > 0


def test_forward_mode_and_vmap_take_torchs_own_way() -> None:
    weight, tangent = table(5, 4), table(5, 4, seed=1)
    _, moved = torch.func.jvp(lambda w: ops.embedding(IDS, w), (weight,), (tangent,))
    assert torch.equal(moved, tangent[IDS])
    mapped = torch.func.vmap(lambda ids: ops.embedding(ids, weight))(IDS)
    assert torch.equal(mapped, weight[IDS])


@pytest.mark.parametrize("wrong", [[1, 2], np.ones(3, np.int64), 3])
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    with pytest.raises(RefusedInput, match=r"ids must be a torch\.Tensor; got a " + type(wrong).__name__):
        ops.embedding(wrong, table(5, 8))
    with pytest.raises(RefusedInput, match=r"got a Embedding. Pass its parameter, weight\.weight"):
        ops.embedding(IDS, torch.nn.Embedding(5, 8))  # type: ignore[arg-type]


def test_more_ids_than_31_bits_count_are_refused() -> None:
    ids, weight = TensorInfo((2**16, 2**15), "int32"), TensorInfo((5, 8), "float32")
    with pytest.raises(RefusedInput, match=r"at most 2147483647; got ids int32\[65536, 32768\]. Take them in parts"):
        contract.check(ids, weight, None, None, None)


# ---- JAX -----------------------------------------------------------------------------------------------------------


def mapped_and_looped(jax: ModuleType, axes: tuple[Any, ...], *arrays: Any) -> None:
    """Outputs and gradients of (ids, weight, places, positions) by vmap are those of one call after another."""
    import fuselm.jax

    def all_of_it(ids: Any, weight: Any, places: Any, positions: Any) -> Any:
        def call(weight: Any, places: Any) -> Any:
            return fuselm.jax.embedding(ids, weight, position_weight=places, positions=positions)

        out, pull_back = jax.vjp(call, weight, places)
        return out, *pull_back(jax.numpy.cos(jax.numpy.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    size = next(a.shape[0] for a, axis in zip(arrays, axes, strict=True) if axis == 0)
    members = [
        all_of_it(*(a if x is None else np.asarray(a[i]) for a, x in zip(arrays, axes, strict=True)))
        for i in range(size)
    ]
    mapped = jax.vmap(all_of_it, in_axes=axes)(*arrays)
    for found, *right in zip(mapped, *members, strict=True):
        np.testing.assert_allclose(found, np.stack(right), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "positions", "axes"),
    [
        ((3, 4), None, (0, None, None, None)),
        ((3, 2, 4), (4,), (0, None, None, None)),
        ((3, 2, 4), (2, 4), (0, None, None, None)),
        ((3, 2, 4), (3, 2, 4), (0, None, None, 0)),
        ((3, 2, 4), (3, 4), (0, None, None, 0)),
        ((2, 4), (3, 4), (None, None, None, 0)),
        ((3,), None, (0, None, None, None)),
        ((3,), (3,), (0, None, None, 0)),
        ((3,), (), (0, None, None, None)),
        ((3, 1, 2, 1, 2, 1, 1, 2), None, (0, None, None, None)),
        ((3, 1, 2, 1, 2, 1, 1, 2), (1, 2, 1, 2, 1, 1, 2), (0, None, None, None)),
        ((3, 2, 4), None, (0, 0, None, None)),
    ],
    ids=str,
)
def test_vmap_over_ids_positions_and_tables_equals_a_loop(
    shape: Any, positions: Any, axes: Any, jax: ModuleType
) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, shape).astype(np.int32)
    weight = table(6, 5).numpy()
    weight = np.stack([weight, 2 * weight, -weight]) if axes[1] == 0 else weight
    given = None if positions is None else rng.integers(0, 7, positions).astype(np.int32)
    mapped_and_looped(jax, axes, ids, weight, table(7, 5, seed=1).numpy(), given)


@pytest.mark.parametrize("dtype", ["bfloat16", np.float16])
def test_jax_takes_its_own_dtypes_and_their_names(dtype: Any, jax: ModuleType) -> None:
    import fuselm.jax

    weight = table(5, 8).numpy()
    out = fuselm.jax.embedding(IDS.numpy(), weight, dtype=dtype)
    assert out.dtype == jax.numpy.dtype(dtype)
    np.testing.assert_array_equal(out, weight[IDS.numpy()].astype(out.dtype))


def test_jax_refuses_a_second_derivative_at_once(jax: ModuleType) -> None:
    import fuselm.jax

    def loss(weight: Any) -> Any:
        return (fuselm.jax.embedding(IDS.numpy(), weight) ** 3).sum()

    with pytest.raises(TypeError, match="has one derivative"):
        jax.grad(lambda weight: jax.grad(loss)(weight).sum())(table(5, 2).numpy())
