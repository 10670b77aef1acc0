"""What softmax promises beyond the generic suite: what a mask hides, the gradient of a smaller mask, transforms, vmap.

The generic suite carries the numbers. Here masks hold -inf, lie anyhow, learn, and are mapped over.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fuselm import ops
from fuselm.kernels import softmax as contract
from fuselm.kernels.spec import DTYPE_EPS, RefusedInput
from fuselm.kernels.torch_ops.softmax import softmax_reference
from tests.kernels.arrays import lay_out, make_arrays, to_numpy, torch_tensor
from tests.kernels.problems import DEVICES, InputSpec
from tests.torchlm import oracle

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
in_each_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])

X = torch.linspace(-2, 3, 24, dtype=torch.float32).reshape(3, 8)
MASK = torch.where(torch.arange(8) % 3 == 0, -torch.inf, 0.5)


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return make_arrays({"x": InputSpec(shape, dtype)}, seed)["x"]


def hidden_keys(*shape: int) -> np.ndarray:
    """0, and -inf for a third of the keys and for all keys of the first and the last row."""
    mask = np.where(np.random.default_rng(1).random(shape) < 0.33, -np.inf, 0.0)
    mask.reshape(-1, shape[-1])[[0, -1]] = -np.inf
    return mask


# ---- what may not be seen -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 7), {}),
        ((2, 3, 5), {"scale": 0.3}),
        ((2, 4, 4), {"causal": True, "scale": 2.0}),
        ((2, 3, 5), {"causal": True}),
        ((1, 1, 6), {"causal": True}),
        ((2, 5, 3), {"causal": True}),
    ],
)
def test_softmax_is_its_formula(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    x = drawn(shape, "float32")
    truth = oracle.masked_softmax(x.astype(np.float64), **options)
    np.testing.assert_allclose(ops.softmax(torch_tensor(x), **options).numpy(), truth, rtol=2e-6)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("width", [5, 64, 1001, 9000])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_seen_behind_minus_infinity(device: str, dtype: str, width: int, causal: bool) -> None:
    x, mask, dy = drawn((2, 7, width), dtype), hidden_keys(7, width), drawn((2, 7, width), dtype, 2)
    given = {"x": x.astype(np.float64), "mask": np.broadcast_to(mask, x.shape)}
    options = {"causal": causal, "scale": 0.5}
    leaf = torch_tensor(x, device).requires_grad_()
    y = ops.softmax(leaf, mask=torch.tensor(mask, dtype=torch.float32, device=device), **options)
    (dx,) = torch.autograd.grad(y, leaf, torch_tensor(dy, device))
    truth = contract.oracle(np, given, options)["y"]
    gradient = contract.oracle_backward(np, given, {"y": dy.astype(np.float64)}, options)["x"]
    assert not truth[:, [0, -1]].any()
    step = DTYPE_EPS[dtype]
    for found, right in ((y, truth), (dx, gradient)):
        values = to_numpy(found).astype(np.float64)
        assert np.abs(values - right).max() <= 4 * step * np.abs(right).max()
        assert not values[truth == 0].any()


@on_each_device
@in_each_dtype
def test_a_row_of_minus_infinity_is_not_a_number_without_a_mask(device: str, dtype: str) -> None:
    x = torch.tensor([[-math.inf] * 9, [0.0] * 9], device=device).to(getattr(torch, dtype))
    for scale in (1.0, 0.5):
        y = ops.softmax(x, scale=scale)
        assert y[0].isnan().all()
        assert torch.equal(y[1], torch.softmax(x[1], -1))


@on_each_device
def test_a_row_of_minus_infinity_is_zeros_with_a_mask_or_causal(device: str) -> None:
    x = torch.full((2, 3, 3), -math.inf, device=device, requires_grad=True)
    for options in ({"causal": True}, {"mask": torch.zeros(3, device=device)}):
        y = ops.softmax(x, **options)
        assert not y.any()
        assert not torch.autograd.grad(y.sum(), x)[0].any()


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("width", [9, 1001, 1024, 9000, 40960])
@pytest.mark.parametrize("scale", [1.0, -1.0])
@pytest.mark.parametrize("most", [1e9, 1e10, 1e30, math.inf])
def test_the_largest_numbers_a_dtype_has_are_numbers(
    device: str, dtype: str, width: int, scale: float, most: float
) -> None:
    # Scores are multiplied by log2(e) on their way, which rounds: to infinity, or far from their neighbours.
    kind = getattr(torch, dtype)
    most = min(most, torch.finfo(kind).max)
    x = torch.full((4, width), -most, dtype=kind, device=device) * scale
    x[1, 3] = x[1, width - 1] = most * scale
    x[2, 1:] = 2.0 * scale
    y = ops.softmax(x, scale=scale).float().cpu()
    expected = torch.zeros(4, width)
    expected[0] = expected[3] = 1 / width  # -max is as good as any other number where there is no better
    expected[1, 3] = expected[1, width - 1] = 0.5
    expected[2, 1:] = 1 / (width - 1)
    torch.testing.assert_close(y, expected, rtol=2 * DTYPE_EPS[dtype], atol=0)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("width", [9, 1024, 40960])
@pytest.mark.parametrize("least", [-1e9, -1e10, -1e30, -math.inf])
def test_a_finite_mask_hides_no_row_whole(device: str, dtype: str, width: int, least: float) -> None:
    kind = getattr(torch, dtype)
    least = max(least, torch.finfo(torch.float32).min)
    mask = torch.zeros(2, width, device=device)
    mask[0], mask[1, 1:] = least, least
    y = ops.softmax(torch.zeros(3, 2, width, dtype=kind, device=device), mask=mask).float().cpu()
    torch.testing.assert_close(y[:, 0], torch.full((3, width), 1 / width), rtol=2 * DTYPE_EPS[dtype], atol=0)
    assert (y[:, 1, 0] == 1).all()
    assert (y[:, 1, 1:] == 0).all()


@on_each_device
def test_large_numbers_stay_finite(device: str) -> None:
    x = torch.tensor([[1e4, 1e4, -1e30], [3e38, 0.0, -3e38]], device=device)
    assert ops.softmax(x).tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]
    mask = torch.tensor([0.0, -3e38, 0.0], device=device)
    assert ops.softmax(x, mask=mask).tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_cases_have_the_masks_they_name() -> None:
    shapes = {case.name: contract.mask_shape(case) for case in (*contract.CASES, *contract.BENCH_CASES)}
    assert shapes["mask of keys"] == (3, 1, 1, 64)
    assert shapes["mask for all heads"] == (1, 1, 8, 72)
    assert shapes["mask"] == (4, 1, 1, 1024)
    assert shapes["plain"] == ()


SHAPE = (3, 2, 5, 24)
MASK_SHAPES = [(24,), (1,), (), (5, 1), (1, 1, 5, 24), (3, 1, 1, 24), (2, 5, 24), (3, 2, 5, 1), (1, 2, 1, 24), SHAPE]
over_masks = pytest.mark.parametrize("mask_shape", MASK_SHAPES, ids=str)


def mask_gradient(x: np.ndarray, mask: np.ndarray, dy: np.ndarray, options: dict[str, Any]) -> tuple[Any, Any]:
    """The gradient of a mask in float64, and how far off a sum of that many rounded terms may be."""
    given = {"x": x.astype(np.float64), "mask": np.broadcast_to(mask.astype(np.float64), x.shape)}
    dy64 = dy.astype(np.float64)
    y = contract.oracle(np, given, options)["y"]
    terms = contract.oracle_backward(np, given, {"y": dy64}, options)["mask"]
    # What a term is the difference of: y dy and y sum(y dy).
    sizes = y * (np.abs(dy64) + np.abs(y * dy64).sum(-1, keepdims=True))

    def summed(values: np.ndarray) -> np.ndarray:
        aligned = (1,) * (x.ndim - mask.ndim) + mask.shape
        axes = tuple(i for i, size in enumerate(aligned) if size != x.shape[i])
        return values.sum(axes).reshape(mask.shape)

    right = summed(terms)
    slack = 4 * DTYPE_EPS[str(x.dtype)] * np.sqrt(summed(sizes**2))
    return right, slack + DTYPE_EPS[str(mask.dtype)] * np.abs(right)


def mask_problem(mask_shape: tuple[int, ...], dtypes: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dtype, mask_dtype = dtypes.split()
    return drawn(SHAPE, dtype), drawn(mask_shape, mask_dtype, 1), drawn(SHAPE, dtype, 2)


in_mixed_dtypes = pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 bfloat16", "bfloat16 float32"])
with_options = pytest.mark.parametrize("options", [{}, {"scale": 0.3, "causal": True}], ids=["plain", "causal"])


@on_each_device
@in_mixed_dtypes
@with_options
@over_masks
def test_a_mask_learns_from_all_that_it_was_added_to(
    device: str, dtypes: str, options: dict[str, Any], mask_shape: tuple[int, ...]
) -> None:
    x, mask, dy = mask_problem(mask_shape, dtypes)
    right, allowed = mask_gradient(x, mask, dy, options)
    for x_learns in (False, True):
        leaf = torch_tensor(mask, device).requires_grad_()
        y = ops.softmax(torch_tensor(x, device).requires_grad_(x_learns), mask=leaf, **options)
        (found,) = torch.autograd.grad(y, leaf, torch_tensor(dy, device))
        assert found.shape == mask_shape
        assert found.dtype == leaf.dtype
        assert (np.abs(to_numpy(found).astype(np.float64) - right) <= allowed).all()


@in_mixed_dtypes
@pytest.mark.parametrize("mask_shape", [(), (3, 1, 1, 24), (2, 5, 24), SHAPE], ids=str)
def test_a_mask_learns_in_jax_too(dtypes: str, mask_shape: tuple[int, ...], jax: ModuleType) -> None:
    import fuselm.jax

    options = {"scale": 0.3, "causal": True}
    x, mask, dy = mask_problem(mask_shape, dtypes)
    right, allowed = mask_gradient(x, mask, dy, options)
    pull_back = jax.vjp(lambda x, mask: fuselm.jax.softmax(x, mask=mask, **options), x, mask)[1]
    found = np.asarray(pull_back(jax.numpy.asarray(dy))[1])
    assert found.shape == mask_shape
    assert found.dtype == mask.dtype
    assert (np.abs(found.astype(np.float64) - right) <= allowed).all()


@on_each_device
@in_mixed_dtypes
@over_masks
def test_how_a_mask_lies_changes_no_bit(device: str, dtypes: str, mask_shape: tuple[int, ...]) -> None:
    x, mask, _ = (torch_tensor(array, device) for array in mask_problem(mask_shape, dtypes))
    expected = ops.softmax(x, mask=mask, scale=0.3)
    lying = [lay_out(mask, layout) for layout in ("strided", "offset", "transposed", "columns")]
    for other in (*lying, mask.expand(SHAPE), mask.expand(SHAPE).contiguous()):
        assert torch.equal(ops.softmax(x, mask=other, scale=0.3), expected)


def test_a_mask_of_bools_is_refused_with_what_to_pass_instead() -> None:
    with pytest.raises(RefusedInput, match=r"got mask bool\[8\].* Pass numbers to add: where\(seen, 0.0, -inf\)"):
        ops.softmax(X, mask=torch.ones(8, dtype=torch.bool))


def test_a_mask_without_memory_is_refused() -> None:
    with pytest.raises(RefusedInput, match="one device"):
        ops.softmax(X, mask=torch.empty(8, device="meta"))


# ---- derivatives and transforms in torch ----------------------------------------------------------------------------


def loss(softmax: Any, **options: Any) -> Any:
    return lambda x: (softmax(x, **options) ** 3).sum()


over_options = pytest.mark.parametrize(
    "options", [{}, {"scale": 0.5, "causal": True}, {"mask": MASK}], ids=["plain", "causal", "mask"]
)


@over_options
def test_forward_mode_derivatives_are_those_of_the_formula(options: dict[str, Any]) -> None:
    tangent = torch.linspace(0, 1, 24).reshape(3, 8)
    found, right = (torch.func.jvp(loss(f, **options), (X,), (tangent,))[1] for f in (ops.softmax, softmax_reference))
    assert torch.allclose(found, right)
    assert found.abs() > 0


def test_dual_numbers_keep_their_tangent() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.linspace(0, 1, 24).reshape(3, 8))
        tangent = torch.autograd.forward_ad.unpack_dual(ops.softmax(dual)).tangent
    assert tangent is not None
    assert tangent.abs().max() > 0


@over_options
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
def test_function_transforms_give_what_the_formula_gives(transform: Any, options: dict[str, Any]) -> None:
    found, right = (transform(loss(f, **options))(X) for f in (ops.softmax, softmax_reference))
    assert torch.allclose(found, right, atol=1e-6)
    assert found.isfinite().all()


def test_a_vmapped_gradient_is_the_gradient_of_each() -> None:
    x = torch.stack((X, 2 * X))
    found = torch.func.vmap(torch.func.grad(loss(ops.softmax, causal=True)))(x)
    assert torch.allclose(found, torch.stack([torch.func.grad(loss(ops.softmax, causal=True))(one) for one in x]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_has_a_second_derivative(dtype: torch.dtype) -> None:
    """Of 16 bits too, where its first one is made from the rounded result."""
    found = []
    for kind in (dtype, torch.float32):
        x = (X / 3).to(dtype).to(kind).requires_grad_()
        (first,) = torch.autograd.grad(loss(softmax_reference, causal=True)(x), x, create_graph=True)
        found.append(torch.autograd.grad(first.float().square().sum(), x)[0].float())
    assert torch.allclose(*found, rtol=0.02, atol=0.02 * found[1].abs().max().item())
    assert found[1].abs().max() > 0


@pytest.mark.parametrize("wrong", [[1.0, 2.0], np.ones(8, np.float32), 3.0])
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    with pytest.raises(RefusedInput, match=r"x must be a torch\.Tensor; got a " + type(wrong).__name__):
        ops.softmax(wrong)
    with pytest.raises(RefusedInput, match=r"mask must be a torch\.Tensor"):
        ops.softmax(X, mask=wrong)


# ---- JAX ------------------------------------------------------------------------------------------------------------


@in_each_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_jax_sees_nothing_behind_minus_infinity(dtype: str, causal: bool, jax: ModuleType) -> None:
    import fuselm.jax

    x, mask, dy = drawn((2, 7, 65), dtype), hidden_keys(7, 65), drawn((2, 7, 65), dtype, 2)
    given = {"x": x.astype(np.float64), "mask": np.broadcast_to(mask, x.shape)}
    call = functools.partial(fuselm.jax.softmax, mask=mask.astype(np.float32), causal=causal)
    y, pull_back = jax.vjp(call, jax.numpy.asarray(x))
    truth = contract.oracle(np, given, {"causal": causal})["y"]
    gradient = contract.oracle_backward(np, given, {"y": dy.astype(np.float64)}, {"causal": causal})["x"]
    for found, right in ((y, truth), (pull_back(jax.numpy.asarray(dy))[0], gradient)):
        values = np.asarray(found).astype(np.float64)
        assert np.abs(values - right).max() <= 4 * DTYPE_EPS[dtype] * np.abs(right).max()
        assert not values[truth == 0].any()


def test_jax_has_no_number_for_a_row_of_minus_infinity_without_a_mask(jax: ModuleType) -> None:
    import fuselm.jax

    x = np.full((2, 4, 4), -np.inf, np.float32)
    assert np.isnan(np.asarray(fuselm.jax.softmax(x))).all()
    assert not np.asarray(fuselm.jax.softmax(x, causal=True)).any()


def vmapped_and_looped(jax: ModuleType, x: np.ndarray, mask: np.ndarray, axes: Any, **options: Any) -> Any:
    """Outputs and both gradients, by vmap and one after another."""
    import fuselm.jax

    def all_of_it(x: Any, mask: Any) -> Any:
        y, pull_back = jax.vjp(lambda x, mask: fuselm.jax.softmax(x, mask=mask, **options), x, mask)
        return y, *pull_back(jax.numpy.cos(jax.numpy.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    size = next(array.shape[axis] for array, axis in zip((x, mask), axes, strict=True) if axis is not None)
    members = [
        all_of_it(*(a if axis is None else np.take(a, i, axis) for a, axis in zip((x, mask), axes, strict=True)))
        for i in range(size)
    ]
    mapped = jax.vmap(all_of_it, in_axes=axes)
    folded = "scan" not in str(jax.make_jaxpr(mapped)(x, mask))
    return mapped(x, mask), [np.stack(parts) for parts in zip(*members, strict=True)], folded


@pytest.mark.parametrize(
    ("x_shape", "mask_shape", "axes"),
    [
        ((3, 4, 5, 7), (7,), (0, None)),
        ((3, 4, 5, 7), (4, 1, 7), (0, None)),
        ((3, 4, 5, 7), (3, 7), (0, 0)),
        ((3, 4, 5, 7), (5, 1, 3), (0, 2)),
        ((4, 5, 7), (3, 5, 7), (None, 0)),
        ((4, 5, 7, 3), (3,), (3, 0)),
        ((2, 1, 2, 1, 2, 1, 1, 3, 5), (5,), (0, None)),
        ((2, 1, 2, 1, 2, 1, 1, 3, 5), (2, 3, 5), (0, 0)),
    ],
    ids=str,
)
def test_vmap_over_rows_and_masks_equals_a_loop(x_shape: Any, mask_shape: Any, axes: Any, jax: ModuleType) -> None:
    x, mask = drawn(x_shape, "float32"), drawn(mask_shape, "float32", 1)
    mapped, looped, folded = vmapped_and_looped(jax, x, mask, axes, causal=True, scale=0.5)
    for found, right in zip(mapped, looped, strict=True):
        assert found.shape == right.shape
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
    assert folded == (len(x_shape) <= contract.MAX_RANK)  # a mask and nine axes: one call after another


def test_vmap_adds_an_axis_to_the_most_there_can_be(jax: ModuleType) -> None:
    import fuselm.jax

    x = drawn((2, 1, 2, 1, 2, 1, 1, 3, 5), "float32")
    for options in ({}, {"causal": True}):
        mapped = jax.vmap(functools.partial(fuselm.jax.softmax, **options))
        assert "scan" not in str(jax.make_jaxpr(mapped)(x))
        np.testing.assert_allclose(mapped(x), oracle.masked_softmax(x.astype(np.float64), **options), rtol=1e-5)


def test_jax_refuses_a_second_derivative_at_once(jax: ModuleType) -> None:
    import fuselm.jax

    x = jax.numpy.asarray(X.numpy())
    jax_loss = loss(fuselm.jax.softmax)
    for twice in (jax.hessian(jax_loss), jax.grad(lambda x: jax.grad(jax_loss)(x).sum())):
        with pytest.raises(TypeError, match="has one derivative"):
            twice(x)


@pytest.mark.parametrize("wrong", [None, [1.0], X])
def test_jax_names_what_is_no_array(wrong: Any, jax: ModuleType) -> None:
    import fuselm.jax

    with pytest.raises(RefusedInput, match="x must be a jax or numpy array; got a " + type(wrong).__name__):
        fuselm.jax.softmax(wrong)


# ---- corners that only a GPU has ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_softmax_backward_refuses_tensors_that_do_not_belong_together(cuda: str) -> None:
    dy = torch.randn(3, 8, device=cuda)
    ops.softmax(dy)  # the kernels are loaded now
    for y in (torch.ones(3, 9, device=cuda), torch.ones(4, 8, device=cuda), torch.ones(3, 8, device=cuda).int()):
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            torch.ops.fuselm.softmax_backward(dy, y, 1.0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4099, 7), (20011, 257), (7001, 1001), (803, 8191), (300, 20488), (40, 262144)])
def test_odd_and_wide_rows_have_the_bits_they_have_element_by_element(
    cuda: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x, dy = (torch.randn(shape, device=cuda, generator=made).to(dtype) for _ in range(2))
    found = []
    for rows, sent in ((x, dy), (lay_out(x, "columns"), lay_out(dy, "columns"))):
        leaf = rows.detach().requires_grad_()
        y = ops.softmax(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, sent)))
    for close, apart in zip(*found, strict=True):
        assert torch.equal(close, apart)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_row_and_its_gradient_have_the_same_bits_among_few_and_among_many(cuda: str, dtype: torch.dtype) -> None:
    """Few rows, many that L2 holds, rows with gaps between them, and rows that are no vectors: a kernel for each."""
    made = torch.Generator(cuda).manual_seed(0)
    for width in (*range(128, 1161, 8), 1536, 2048, 4096, 8192):
        x, dy = (torch.randn(600, width, device=cuda, generator=made).to(dtype) for _ in range(2))
        x[3] *= 1e4  # with the last scale, scores past 2^30
        for scale in (0.7, -0.7, 7e5) if width % 128 == 0 else (0.7,):
            found = []
            for layout in ("few", "contiguous", "strided", "columns"):
                rows, sent = (t[:7] if layout == "few" else lay_out(t, layout) for t in (x, dy))
                leaf = rows.detach().requires_grad_()
                y = ops.softmax(leaf, scale=scale)
                found.append((y, *torch.autograd.grad(y, leaf, sent)))
            for few, many, *others in zip(*found, strict=True):
                assert torch.equal(few, many[:7]), (width, scale)
                assert all(torch.equal(many, other) for other in others), (width, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 600])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_no_number_is_where_torch_has_it(cuda: str, dtype: torch.dtype, rows: int) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    for width in (264, 512, 768, 1024, 2048, 4096, 8192):
        x = torch.randn(rows, width, device=cuda, generator=made).to(dtype)
        x[0] = -torch.inf
        x[1, width // 2], x[2, -1], x[3, 1:] = torch.nan, torch.inf, -torch.inf
        x[4, 5], x[5] = torch.finfo(dtype).max, torch.finfo(dtype).min
        got, right = ops.softmax(x), torch.softmax(x.double(), -1)
        torch.testing.assert_close(got.double(), right, rtol=16 * torch.finfo(dtype).eps, atol=1e-30, equal_nan=True)


@pytest.mark.gpu
def test_rows_that_l2_does_not_hold_have_the_same_bits_too(cuda: str) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x, dy = (torch.randn(300_000, 768, device=cuda, generator=made).bfloat16() for _ in range(2))
    found = []
    for rows, sent in ((x, dy), (x[-1000:].clone(), dy[-1000:].clone())):
        leaf = rows.detach().requires_grad_()
        y = ops.softmax(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, sent)))
    for many, some in zip(*found, strict=True):
        assert torch.equal(many[-1000:], some)


SHARED_MASKS = [
    ((2, 5, 9, 768), "B1TS"),
    ((2, 5, 9, 1024), "B1TS"),
    ((2, 3, 2, 7, 4096), "B1NTS"),
    ((5, 9, 8192), "TS"),
]
SHARED_MASKS += [
    ((3, 7, 11, 20488), "B1TS"),
    ((3, 2, 3, 131072), "TS"),
    ((2, 3, 5, 1, 512), "B1TNS"),
    ((4, 6, 64), "1TS"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", ["bfloat16 bfloat16", "float16 float32", "float32 bfloat16"])
@pytest.mark.parametrize(("shape", "letters"), SHARED_MASKS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_share_a_mask_have_the_bits_they_have_element_by_element(
    cuda: str, shape: tuple[int, ...], letters: str, dtypes: str, causal: bool
) -> None:
    dtype, mask_dtype = (getattr(torch, name) for name in dtypes.split())
    made = torch.Generator(cuda).manual_seed(0)
    x = torch.randn(shape, device=cuda, generator=made).to(dtype)
    sizes = [1 if letter == "1" else size for letter, size in zip(letters, shape[-len(letters) :], strict=True)]
    mask = torch.randn(sizes, device=cuda, generator=made)
    mask[..., 1::3] = -torch.inf
    mask[..., -1, :] = -4.0  # hides nothing: all columns alike
    mask = mask.to(mask_dtype)
    found = ops.softmax(x, mask=mask, scale=0.7, causal=causal)
    apart = lay_out(mask, "columns")
    assert apart.stride(-1) != 1
    assert torch.equal(found, ops.softmax(x, mask=apart, scale=0.7, causal=causal))
    right = softmax_reference(x.double(), mask=mask.double(), scale=0.7, causal=causal)
    assert (found.double() - right).abs().max() <= 8 * DTYPE_EPS[dtypes.split()[0]] * right.max()
