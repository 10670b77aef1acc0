"""What add and mul promise beyond the generic suite: every way to broadcast and its gradient, dtypes, what is saved.

The generic suite carries the numbers of tensors that kernels serve alone. Here tensors are repeated along any
dimension, have none or no elements, are mapped over, and are numbers, which is refused.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fuselm import ops
from fuselm.kernels import add as add_contract
from fuselm.kernels import elementwise as contract
from fuselm.kernels import mul as mul_contract
from fuselm.kernels.spec import DTYPE_EPS, InputSpec, RefusedInput
from fuselm.kernels.torch_ops.add import add_reference
from fuselm.kernels.torch_ops.mul import mul_reference
from tests.kernels.arrays import lay_out, make_arrays, to_numpy, torch_tensor
from tests.kernels.problems import DEVICES
from tests.kernels.test_generic_torch_machinery import RawCalls

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

SCALE = 0.3
REFERENCES = {"add": add_reference, "mul": mul_reference}
OPTIONS: dict[str, dict[str, Any]] = {"add": {"scale": SCALE}, "mul": {}}

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
of_each_op = pytest.mark.parametrize("op", ["add", "mul"])
in_mixed_dtypes = pytest.mark.parametrize(
    "dtypes", ["float32 float32", "bfloat16 bfloat16", "bfloat16 float32", "float16 bfloat16"]
)

# Shapes of x and y; each is also taken the other way round.
PAIRS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((1,), ()),
    ((5, 7), ()),
    ((5, 7), (1,)),
    ((5, 7), (1, 1)),
    ((5, 7), (7,)),
    ((5, 7), (5, 1)),
    ((5, 1), (1, 7)),
    ((5, 1), (7,)),
    ((9,), (3, 1, 9)),
    ((3, 4, 64), (64,)),
    ((3, 4, 64), (1, 1, 64)),
    ((3, 4, 64), (4, 64)),
    ((3, 4, 64), (3, 1, 64)),
    ((3, 1, 64), (4, 1)),
    ((2, 1, 3, 1, 2, 1, 2, 8), (2, 1, 2, 1, 3, 1, 8)),
    ((0, 7), (7,)),
    ((0, 7), (1, 1)),
    ((3, 0), (3, 1)),
    ((3, 0), (1,)),
    ((0,), ()),
    ((0,), (4, 1)),
]
over_pairs = pytest.mark.parametrize(("x_shape", "y_shape"), [*PAIRS, *(pair[::-1] for pair in PAIRS[1:])], ids=str)


def drawn(x_shape: tuple[int, ...], y_shape: tuple[int, ...], dtypes: str, seed: int = 0) -> dict[str, np.ndarray]:
    """x, y and dout."""
    x_dtype, y_dtype = dtypes.split()
    full = np.broadcast_shapes(x_shape, y_shape)
    dtype = x_dtype if x_dtype == y_dtype else "float32"
    specs = {"x": InputSpec(x_shape, x_dtype), "y": InputSpec(y_shape, y_dtype), "dout": InputSpec(full, dtype)}
    return make_arrays(specs, seed)


def assert_right(op: str, given: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Out, dx and dy are the formulas' in float64, but for a rounding of each product and of the sum."""
    x, y, dout = (given[name].astype(np.float64) for name in ("x", "y", "dout"))
    terms = {"x": dout, "y": SCALE * dout} if op == "add" else {"x": dout * y, "y": dout * x}
    step = DTYPE_EPS[str(given["dout"].dtype)]
    right = {"out": x + SCALE * y if op == "add" else x * y}
    allowed = {"out": step * (np.abs(x) + np.abs(y) if op == "add" else np.abs(right["out"]))}
    for name, own in (("x", x), ("y", y)):
        axes = contract.repeated(own.shape, dout.shape)
        right[name] = terms[name].sum(axes).reshape(own.shape)
        slack = 4 * step * np.sqrt((terms[name] ** 2).sum(axes)).reshape(own.shape)
        allowed[name] = slack + DTYPE_EPS[str(given[name].dtype)] * np.abs(right[name])
    for name, array in found.items():
        like = given["dout" if name == "out" else name]
        assert (array.shape, array.dtype) == (like.shape, like.dtype), name
        assert (np.abs(array.astype(np.float64) - right[name]) <= allowed[name] + 1e-12).all(), name


# ---- broadcasting in torch ------------------------------------------------------------------------------------------


@on_each_device
@of_each_op
@in_mixed_dtypes
@over_pairs
def test_whatever_is_repeated_learns_from_all_that_it_went_into(
    device: str, op: str, dtypes: str, x_shape: Any, y_shape: Any
) -> None:
    given = drawn(x_shape, y_shape, dtypes)
    for wanted in (("x",), ("y",), ("x", "y")):
        leaves = {name: torch_tensor(given[name], device).requires_grad_(name in wanted) for name in ("x", "y")}
        out = getattr(ops, op)(**leaves, **OPTIONS[op])
        assert out.is_contiguous()
        gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], torch_tensor(given["dout"], device))
        found = {"out": out, **dict(zip(wanted, gradients, strict=True))}
        assert_right(op, given, {name: to_numpy(tensor) for name, tensor in found.items()})


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPE_EPS, DTYPE_EPS)), ids=str)
@of_each_op
def test_the_result_has_the_dtype_both_have_or_fp32(op: str, dtypes: tuple[str, str]) -> None:
    """As torch has it for two tensors with dimensions, here for those without as well."""
    first, second = (getattr(torch, name) for name in dtypes)
    expected = first if first == second else torch.float32
    assert torch.promote_types(first, second) == expected
    for shapes in (((4,), (4,)), ((4,), ()), ((), (4,)), ((), ())):
        x, y = torch.ones(shapes[0], dtype=first), torch.ones(shapes[1], dtype=second)
        assert getattr(ops, op)(x, y).dtype == REFERENCES[op](x, y).dtype == expected


@on_each_device
@of_each_op
@in_mixed_dtypes
@pytest.mark.parametrize("y_shape", [(), (24,), (5, 1), (1, 1, 24), (3, 1, 24), (3, 5, 24)], ids=str)
def test_how_y_lies_changes_no_bit(device: str, op: str, dtypes: str, y_shape: Any) -> None:
    given = {name: torch_tensor(array, device) for name, array in drawn((3, 5, 24), y_shape, dtypes).items()}
    x, y, dout = (given[name] for name in ("x", "y", "dout"))
    found = []
    lying = [lay_out(y, layout) for layout in ("contiguous", "strided", "offset", "transposed", "columns")]
    for other in (*lying, y.expand(3, 5, 24)):
        leaves = x.detach().requires_grad_(), other.detach()
        out = getattr(ops, op)(*leaves, **OPTIONS[op])
        found.append((out, *torch.autograd.grad(out, leaves[0], dout)))
    for other in found[1:]:
        assert all(torch.equal(one, same) for one, same in zip(other, found[0], strict=True))


@on_each_device
@of_each_op
def test_a_tensor_may_meet_itself(device: str, op: str) -> None:
    x = torch.linspace(-2, 3, 24, device=device).reshape(3, 8).requires_grad_()
    dout = torch.ones(3, 8, device=device)
    (found,) = torch.autograd.grad(getattr(ops, op)(x, x), x, dout)
    assert torch.equal(found, 2 * dout if op == "add" else 2 * x)


# ---- what runs, and what is kept ------------------------------------------------------------------------------------


def raw_calls(op: str, x: torch.Tensor, y: torch.Tensor, **options: Any) -> list[tuple[Any, Any]]:
    """The raw ops of a forward and a backward, with their arguments, for all that requires grad."""
    with RawCalls() as watched:
        out = getattr(ops, op)(x, y, **options)
        wanted = [leaf for leaf in (x, y) if leaf.requires_grad]
        torch.autograd.grad(out, wanted, torch.ones_like(out))
    return watched.calls


def names(calls: list[tuple[Any, Any]]) -> list[str]:
    return [func.name().removeprefix("fuselm::") for func, _ in calls]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def test_the_gradients_of_a_plain_sum_are_dout_itself() -> None:
    x, y, dout = leaf(3, 8), leaf(3, 8), torch.randn(3, 8)
    found = torch.autograd.grad(ops.add(x, y), (x, y), dout)
    assert {gradient.data_ptr() for gradient in found} == {dout.data_ptr()}
    assert names(raw_calls("add", x, y)) == ["add_forward"]
    assert names(raw_calls("add", x, y, scale=2.0)) == ["add_forward", "add_backward"]


@pytest.mark.parametrize(
    ("op", "x", "y", "expected"),
    [
        ("add", leaf(3, 8), leaf(8), ["add_backward_row"]),
        ("add", leaf(1, 8), leaf(3, 8), ["add_backward_row"]),
        ("add", leaf(3, 1), leaf(8), ["add_backward_row"]),
        ("add", leaf(3, 8), leaf(3, 1), []),
        ("mul", leaf(3, 8), leaf(3, 8), ["mul_backward"]),
        ("mul", leaf(3, 8), leaf(8), ["mul_backward_row"]),
        ("mul", leaf(1, 1, 8), leaf(2, 3, 8), ["mul_backward_row"]),
        ("mul", leaf(3, 8), leaf(8).detach(), ["mul_forward"]),
        ("mul", leaf(3, 8).detach(), leaf(8), ["mul_backward_row"]),
        ("mul", leaf(3, 8).detach(), leaf(3, 8), ["mul_forward"]),
        ("mul", leaf(3, 8), leaf(), ["mul_forward", "mul_forward"]),
        ("mul", leaf(3, 1), leaf(8), ["mul_forward", "mul_forward"]),
    ],
    ids=lambda value: str(list(value.shape)) if isinstance(value, torch.Tensor) else str(value),
)
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_each_gradient_has_its_kernel(op: str, x: torch.Tensor, y: torch.Tensor, expected: list[str]) -> None:
    """The raw ops of tensors that are repeated; opcheck looks at them here, the generic suite at the others."""
    calls = raw_calls(op, x, y)
    assert names(calls) == [f"{op}_forward", *expected]
    for func, args in calls:
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(func, args, test_utils=checks)


@of_each_op
@pytest.mark.parametrize(("x_shape", "y_shape"), [((6, 8), (8,)), ((8,), (2, 3, 8)), ((6, 8), (6, 1)), ((6, 8), ())])
@pytest.mark.filterwarnings("default")
def test_compiled_without_a_break_a_repeated_tensor_learns_the_same(op: str, x_shape: Any, y_shape: Any) -> None:
    given = {name: torch_tensor(array) for name, array in drawn(x_shape, y_shape, "bfloat16 bfloat16").items()}
    function = getattr(ops, op)
    torch.compiler.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [given[name].detach().requires_grad_() for name in ("x", "y")]
        out = call(*leaves, **OPTIONS[op])
        results.append((out, *torch.autograd.grad(out, leaves, given["dout"])))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@of_each_op
@pytest.mark.filterwarnings("default")
def test_compiled_a_tensor_may_meet_itself_too(op: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(getattr(ops, op), fullgraph=True, backend="aot_eager")
    x = torch.linspace(-2, 3, 24).reshape(3, 8).requires_grad_()
    (found,) = torch.autograd.grad(compiled(x, x), x, torch.ones(3, 8))
    assert torch.equal(found, torch.full((3, 8), 2.0) if op == "add" else 2 * x)


@pytest.mark.parametrize("wanted", ["x", "y", "xy"])
def test_mul_keeps_only_what_a_gradient_needs(wanted: str) -> None:
    leaves = {name: torch.randn(3, 8).requires_grad_(name in wanted) for name in "xy"}
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = ops.mul(**leaves)
        other = {"x": "y", "y": "x"}
        assert sorted(kept) == sorted(leaves[other[name]].data_ptr() for name in wanted)
        torch.autograd.grad(out.sum(), [leaves[name] for name in wanted])


def test_add_keeps_nothing() -> None:
    x, y = leaf(3, 8), leaf(8)
    out = ops.add(x, y, scale=0.5)
    with torch.no_grad():
        x.zero_(), y.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), y)[0], torch.full((8,), 1.5))


# ---- refusals -------------------------------------------------------------------------------------------------------


@of_each_op
@pytest.mark.parametrize("number", [2.0, 3, True, 1j])
@pytest.mark.parametrize("with_grad", [False, True])
def test_a_number_is_refused_with_what_to_write_instead(op: str, number: Any, with_grad: bool) -> None:
    x = torch.ones(3).requires_grad_(with_grad)
    sign = {"add": r"\+", "mul": r"\*"}[op]
    words = rf"{op}: y must be a tensor; got a {type(number).__name__}\. For a number write x {sign} 2\.0\."
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, pytest.raises(RefusedInput, match=words):
            getattr(ops, op)(x, number)
        with mode, pytest.raises(RefusedInput, match="x must be a tensor"):
            getattr(ops, op)(number, x)


@of_each_op
@pytest.mark.parametrize("wrong", [[1.0, 2.0], np.ones(8, np.float32), None])
def test_what_is_no_tensor_is_named(op: str, wrong: Any) -> None:
    with pytest.raises(RefusedInput, match=r"y must be a torch\.Tensor; got a " + type(wrong).__name__):
        getattr(ops, op)(torch.ones(8), wrong)


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("scale", [True, False])
def test_a_scale_that_is_a_truth_value_is_refused_when_compiled_too(scale: bool) -> None:
    x = torch.ones(3)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, scale: ops.add(x, x, scale=scale), backend="eager")
    for number in (0.5, 2, 0.25, -3.0):
        assert torch.equal(compiled(x, number), x + number)
    with pytest.raises(RefusedInput, match="add: scale must be a Python number; got scale of type bool"):
        compiled(x, scale)


@of_each_op
def test_tensors_of_two_devices_are_refused(op: str) -> None:
    """Torch would take one without dimensions from anywhere."""
    for shape in ((3,), ()):
        with pytest.raises(RefusedInput, match=r"one device; got x on cpu and y on meta\. Move y to cpu\."):
            getattr(ops, op)(torch.ones(3), torch.empty(shape, device="meta"))


# ---- derivatives and transforms in torch ----------------------------------------------------------------------------

X, Y = torch.linspace(-2, 3, 24).reshape(3, 8), torch.linspace(0.5, 2, 8)


def loss(function: Any, **options: Any) -> Any:
    return lambda x, y: (function(x, y, **options) ** 3).sum()


@of_each_op
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
@pytest.mark.parametrize("place", [0, 1])
def test_function_transforms_give_what_the_formula_gives(op: str, transform: Any, place: int) -> None:
    functions = (getattr(ops, op), REFERENCES[op])
    found, right = (transform(loss(f, **OPTIONS[op]), argnums=place)(X, Y) for f in functions)
    assert torch.allclose(found, right)
    assert found.abs().max() > 0


@of_each_op
def test_forward_mode_derivatives_are_those_of_the_formula(op: str) -> None:
    tangents = (torch.ones_like(X), torch.linspace(0, 1, 8))
    functions = (getattr(ops, op), REFERENCES[op])
    found, right = (torch.func.jvp(loss(f, **OPTIONS[op]), (X, Y), tangents)[1] for f in functions)
    assert torch.allclose(found, right)
    assert found.abs() > 0


@of_each_op
def test_a_vmapped_op_is_the_op_of_each(op: str) -> None:
    function = getattr(ops, op)
    x = torch.stack((X, 2 * X))
    assert torch.equal(torch.func.vmap(function, (0, None))(x, Y), torch.stack([function(one, Y) for one in x]))


@of_each_op
def test_the_reference_has_a_second_derivative(op: str) -> None:
    y = Y.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(REFERENCES[op], **OPTIONS[op])(X, y), y, create_graph=True)
    assert torch.autograd.grad(first.sum(), y)[0].abs().max() > 0


# ---- JAX ------------------------------------------------------------------------------------------------------------


@of_each_op
@pytest.mark.parametrize(
    ("x_shape", "y_shape", "dtypes"),
    [
        ((), (), "float32 float32"),
        ((5, 7), (), "bfloat16 bfloat16"),
        ((7,), (5, 7), "bfloat16 float32"),
        ((5, 1), (1, 7), "float16 bfloat16"),
        ((3, 1, 16), (4, 1), "float32 float32"),
        ((0, 7), (1, 1), "float32 float32"),
        ((0,), (), "bfloat16 bfloat16"),
        ((3, 0), (3, 1), "float32 float32"),
    ],
    ids=str,
)
def test_whatever_is_repeated_learns_in_jax_too(
    op: str, x_shape: Any, y_shape: Any, dtypes: str, jax: ModuleType
) -> None:
    import fuselm.jax

    given = drawn(x_shape, y_shape, dtypes)
    call = lambda x, y: getattr(fuselm.jax, op)(x, y, **OPTIONS[op])  # noqa: E731
    out, pull_back = jax.vjp(call, given["x"], given["y"])
    dx, dy = pull_back(jax.numpy.asarray(given["dout"]))
    assert_right(op, given, {name: np.asarray(array) for name, array in (("out", out), ("x", dx), ("y", dy))})


NINE = (2, 1, 2, 1, 2, 1, 1, 3, 5)


@of_each_op
@pytest.mark.parametrize(
    ("x_shape", "y_shape", "axes"),
    [
        ((3, 4, 5), (5,), (0, None)),
        ((3, 4, 5), (3, 5), (0, 0)),
        ((4, 5), (5, 3), (None, 1)),
        ((3,), (3, 4, 5), (0, 0)),
        ((4, 5, 3), (4, 5), (2, None)),
        (NINE, (5,), (0, None)),
        (NINE, NINE, (0, 0)),
    ],
    ids=str,
)
def test_vmap_equals_a_loop(op: str, x_shape: Any, y_shape: Any, axes: Any, jax: ModuleType) -> None:
    import fuselm.jax

    x, y = (make_arrays({"x": InputSpec(shape, "float32")}, seed)["x"] for seed, shape in enumerate((x_shape, y_shape)))

    def all_of_it(x: Any, y: Any) -> Any:
        out, pull_back = jax.vjp(lambda x, y: getattr(fuselm.jax, op)(x, y, **OPTIONS[op]), x, y)
        return out, *pull_back(jax.numpy.cos(jax.numpy.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    mapped = jax.vmap(all_of_it, in_axes=axes)(x, y)
    size = next(a.shape[axis] for a, axis in zip((x, y), axes, strict=True) if axis is not None)
    members = [
        all_of_it(*(a if axis is None else np.take(a, i, axis) for a, axis in zip((x, y), axes, strict=True)))
        for i in range(size)
    ]
    for found, parts in zip(mapped, zip(*members, strict=True), strict=True):
        np.testing.assert_allclose(found, np.stack(parts), rtol=1e-5, atol=1e-6)


@of_each_op
def test_a_mapped_axis_is_one_launch_for_the_most_there_can_be(op: str, jax: ModuleType) -> None:
    import fuselm.jax

    function = jax.vmap(getattr(fuselm.jax, op))
    assert "scan" not in str(jax.make_jaxpr(function)(np.ones(NINE[:8]), np.ones(NINE[:8])))
    assert "scan" in str(jax.make_jaxpr(function)(np.ones(NINE), np.ones(NINE)))


@of_each_op
def test_jax_refuses_a_second_derivative_at_once(op: str, jax: ModuleType) -> None:
    import fuselm.jax

    jax_loss = loss(getattr(fuselm.jax, op))
    for place in (0, 1):
        first = jax.grad(jax_loss, argnums=place)
        with pytest.raises(TypeError, match="has one derivative"):
            jax.grad(lambda y, first=first: first(X.numpy(), y).sum())(Y.numpy())


# ---- the registry ---------------------------------------------------------------------------------------------------


def test_cases_have_the_shapes_they_name() -> None:
    shapes = {case.name: contract.shapes(case) for case in (*add_contract.CASES, *add_contract.BENCH_CASES)}
    assert shapes["one row, x"] == ((1, 136), (150, 136))
    assert shapes["for all heads"] == ((2, 3, 8, 72), (2, 1, 8, 72))
    assert shapes["one number for all"] == ((40, 24), ())
    assert shapes["row"] == ((32768, 14336), (14336,))


def test_costs_count_every_tensor_once() -> None:
    plain, row = (contract.pair_case("", (32, 64), "bfloat16", y=y) for y in (None, "D"))
    mixed = contract.pair_case("", (32, 64), "bfloat16", "float32")
    size = 32 * 64 * 2
    add, mul = add_contract.cost, mul_contract.cost
    assert [add(case, "forward").bytes for case in (plain, row, mixed)] == [3 * size, 2 * size + 128, 5 * size]
    assert [add(case, "backward").bytes for case in (plain, row, mixed)] == [0, size + 128, 3 * size]
    assert [mul(case, "backward").bytes for case in (plain, row)] == [5 * size, 3 * size + 256]
    for spec in (add_contract.SPEC, mul_contract.SPEC):
        assert all(spec.cost(case, which).bytes > 0 for case in spec.bench_cases for which in spec.passes)


# ---- corners that only a GPU has ------------------------------------------------------------------------------------

ROW_SHAPES = [(1, 4096), (2, 8), (7, 1), (64, 4096), (128, 264), (129, 264), (1000, 64), (100_000, 3), (513, 1001)]
ROW_SHAPES += [(3001, 72), (5000, 768), (4099, 1000), (260, 20_488), (150, 300_000)]


@pytest.mark.gpu
@of_each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_the_sum_of_a_row_has_the_same_bits_however_rows_lie(
    cuda: str, op: str, dtype: torch.dtype, shape: Any
) -> None:
    """By vectors and element by element; the first of these sums is compared with float64's."""
    made = torch.Generator(cuda).manual_seed(0)
    x, dout = (torch.randn(shape, device=cuda, generator=made).to(dtype) for _ in range(2))
    y = torch.randn(shape[-1:], device=cuda, generator=made).to(dtype)
    found = []
    for layout in ("contiguous", "strided", "offset", "columns", "contiguous"):
        leaves = lay_out(x, layout).detach().requires_grad_(), y.detach().requires_grad_()
        out = getattr(ops, op)(*leaves, **OPTIONS[op])
        found.append(torch.autograd.grad(out, leaves, lay_out(dout, layout)))
    for other in found[1:]:
        assert all(torch.equal(one, same) for one, same in zip(other, found[0], strict=True))
    terms = dout.double() * (SCALE if op == "add" else x.double())
    right, allowed = terms.sum(0), 2.0**-20 * terms.square().sum(0).sqrt()
    assert ((found[0][1].double() - right).abs() <= allowed + torch.finfo(dtype).eps * right.abs()).all()
    product = dout if op == "add" else dout * y
    assert torch.equal(found[0][0], product)


@pytest.mark.gpu
@of_each_op
def test_a_row_of_another_dtype_learns_from_many_rows(cuda: str, op: str) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x = torch.randn(2000, 520, device=cuda, generator=made).bfloat16()
    y, dout = (torch.randn(shape, device=cuda, generator=made) for shape in ((520,), (2000, 520)))
    leaves = x.requires_grad_(), y.requires_grad_()
    dx, dy = torch.autograd.grad(getattr(ops, op)(*leaves), leaves, dout)
    terms = dout.double() if op == "add" else dout.double() * x.double()
    assert (dy.double() - terms.sum(0)).abs().max() <= 2.0**-18 * terms.square().sum(0).sqrt().max()
    assert torch.equal(dx, (dout if op == "add" else dout * y).bfloat16())


# One block of any size, whole blocks of whole warps and of parts of them, no whole blocks, odd counts.
FEW = [(1, n) for n in (1, 7, 8, 768, 1000, 1024, 1750, 4096, 8072, 12_345, 14_336)]
FEW += [(7, 1000), (64, 248), (64, 256), (64, 768), (64, 1000), (64, 16_144)]


@pytest.mark.gpu
@of_each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_elements_have_the_right_bits_however_they_lie(
    cuda: str, op: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x, y, dout = (torch.randn(shape, device=cuda, generator=made).to(dtype) for _ in range(3))
    scale = torch.tensor(SCALE).double().item()  # as fp32 has it
    for other in (y, y[:1]):  # of the same shape, and one row for all
        total = (x.double() + scale * other.double()).float().to(dtype)
        right = (total, dout, (SCALE * dout.float()).to(dtype)) if op == "add" else (x * other, dout * other, dout * x)
        for layout in ("contiguous", "strided", "offset", "columns"):
            leaves = [lay_out(one, layout).detach().requires_grad_() for one in (x, other)]
            wanted = leaves if other is y else leaves[:1]
            out = getattr(ops, op)(*leaves, **OPTIONS[op])
            for one, same in zip((out, *torch.autograd.grad(out, wanted, dout)), right, strict=False):
                assert torch.equal(one, same)


@pytest.mark.gpu
def test_launchers_refuse_tensors_that_do_not_belong_together(cuda: str) -> None:
    dout = torch.randn(3, 8, device=cuda)
    ops.add(dout, dout)  # the kernels are loaded now
    raw = torch.ops.fuselm
    for row in (torch.ones(9, device=cuda), torch.ones(3, 8, device=cuda), torch.ones((), device=cuda), dout[0].int()):
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            raw.add_backward_row(dout, row, 1.0, 1)
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            raw.mul_backward_row(dout, dout, row, 3)
    for other in (torch.ones(4, 8, device=cuda), torch.ones(8, device=cuda), dout.long()):
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            raw.mul_backward(dout, other, dout, 3)
