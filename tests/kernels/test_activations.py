"""What the activations promise beyond the generic suite: every 16-bit number, tails, infinities, packed as separate.

The generic suite carries the numbers of ordinary size. Here is also the fit that gelu's kernel has for 16 bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fuselm import ops
from fuselm.kernels import activations, gelu
from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.spec import ops as registry
from fuselm.kernels.torch_ops.geglu import geglu_reference
from fuselm.kernels.torch_ops.gelu import gelu_reference
from fuselm.kernels.torch_ops.relu2 import relu2_reference
from fuselm.kernels.torch_ops.silu import silu_reference
from fuselm.kernels.torch_ops.swiglu import swiglu_reference
from tests.kernels.arrays import TORCH_DTYPES, lay_out, numpy_dtype, to_numpy, torch_tensor
from tests.kernels.problems import DEVICES

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

INF, NAN = math.inf, math.nan
TANH = {"approximate": "tanh"}
UNARY: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu", {}),
    "relu2": ("relu2", {}),
    "gelu": ("gelu", {}),
    "gelu-tanh": ("gelu", TANH),
}
GATED: dict[str, tuple[str, dict[str, Any]]] = {
    "swiglu": ("swiglu", {}),
    "geglu": ("geglu", {}),
    "geglu-tanh": ("geglu", TANH),
}
REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "silu": silu_reference,
    "relu2": relu2_reference,
    "gelu": gelu_reference,
    "swiglu": swiglu_reference,
    "geglu": geglu_reference,
}

FORMULAS: dict[str, activations.Formula] = {  # of x, or of the gate
    "silu": activations.silu,
    "relu2": activations.relu2,
    "gelu": activations.gelu,
    "swiglu": activations.silu,
    "geglu": activations.gelu,
}

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
in_16_bits = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
in_each_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
over_unary = pytest.mark.parametrize("kind", UNARY)
over_gated = pytest.mark.parametrize("kind", GATED)


def value_and_slope(call: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """f(x) and f'(x) as the op's forward and backward give them."""
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    return to_numpy(y), to_numpy(slope)


def unary_op(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    op, options = UNARY[kind]
    return lambda x: getattr(ops, op)(x, **options)


def truth_of(kind: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same in float64."""
    op, options = {**UNARY, **GATED}[kind]
    with np.errstate(over="ignore"):
        return FORMULAS[op](np, x.astype(np.float64), options)


# ---- the fit of gelu's kernel --------------------------------------------------------------------------------------

ERFC = np.vectorize(math.erfc, otypes=[np.float64])


def tail(x: np.ndarray) -> np.ndarray:
    """Phi(-|x|) in float64."""
    return 0.5 * ERFC(np.abs(x.astype(np.float64)) * math.sqrt(0.5))


def fitted_tail(x: np.ndarray) -> np.ndarray:
    """Phi(-|x|) by the fit, as exact as float64 is, of the coefficients that the kernel has."""
    t = 1 / (1 + float(np.float32(gelu.FIT_UNIT)) * np.abs(x))
    return t * np.polynomial.polynomial.polyval(t, np.float32(gelu.FIT).astype(np.float64)) * np.exp(-0.5 * x * x)


def replayed_tail(x: np.ndarray) -> np.ndarray:
    """The same as the kernel computes it: every step rounded to fp32, a product and its sum as one."""

    def rounded(values: Any) -> np.ndarray:  # float64 holds the product of two fp32 numbers
        return np.asarray(values, np.float64).astype(np.float32).astype(np.float64)

    x = x.astype(np.float64)
    t = rounded(1 / rounded(float(np.float32(gelu.FIT_UNIT)) * np.abs(x) + 1))
    power = rounded(np.exp2(rounded(rounded(x * x) * float(np.float32(-0.5 * math.log2(math.e))))))
    first, *rest = np.float32(gelu.FIT[::-1]).astype(np.float64)
    total = np.full_like(x, first)
    for coefficient in rest:
        total = rounded(total * t + coefficient)
    return rounded(rounded(total * t) * power)


def relative_error(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(found / right - 1).max())


def every_number(dtype: str, largest: float) -> np.ndarray:
    """All numbers that 16 bits have, up to a size."""
    numbers = np.arange(2**16, dtype=np.uint16).view(numpy_dtype(dtype))
    with np.errstate(invalid="ignore"):  # some are NaN, of which nothing is true
        return numbers[np.abs(numbers.astype(np.float64)) <= largest]


def test_the_fit_is_as_close_as_it_says() -> None:
    near, far = np.linspace(0, 6, 60_001), np.linspace(6, 13, 7001)
    assert 6e-7 < relative_error(fitted_tail(near), tail(near)) < 7.2e-7
    assert relative_error(fitted_tail(far), tail(far)) < 4.5e-4


@in_16_bits
def test_the_fit_survives_fp32(dtype: str) -> None:
    x = every_number(dtype, 5.99).astype(np.float64)
    assert len(x) > 30_000
    assert relative_error(replayed_tail(x), tail(x)) < 1.6e-6


def test_the_kernel_has_the_numbers_of_the_fit() -> None:
    source = Path(activations.__file__).with_suffix(".cuh").read_text(encoding="utf-8")
    unit = re.search(r"kFitUnit = ([-\d.]+)f;", source)
    fit = re.search(r"kFit\[\] = \{([^}]*)\}", source)
    assert unit
    assert fit
    assert float(unit[1]) == gelu.FIT_UNIT
    assert tuple(float(number.strip().removesuffix("f")) for number in fit[1].split(",")) == gelu.FIT


# ---- every number that 16 bits have --------------------------------------------------------------------------------


def steps(truth: np.ndarray, dtype: str) -> np.ndarray:
    """The distance of a dtype's numbers at the size of these."""
    exponent = np.floor(np.log2(np.maximum(np.abs(truth), 1e-300)))
    smallest, bits = (-24, 10) if dtype == "float16" else (-133, 7)
    return np.exp2(np.maximum(exponent - bits, smallest))


def assert_rounded_from_truth(what: str, found: np.ndarray, truth: np.ndarray, x: np.ndarray, slack: float) -> None:
    """Each is the truth rounded, but for 0.01 of a step, what a fit may be off below -6, and `slack` around 0."""
    dtype = str(found.dtype)
    with np.errstate(over="ignore"):
        too_large = np.isinf(truth.astype(found.dtype))
    assert np.array_equal(np.isinf(found.astype(np.float64)), too_large), what
    kept = ~too_large
    found, truth, x = found[kept].astype(np.float64), truth[kept], x[kept].astype(np.float64)
    # 1e-36: what is less than a normal fp32 number on its way is 0.
    allowed = 0.51 * steps(truth, dtype) + np.where(x < -6, 5e-4 * np.abs(truth), 0) + 1e-36
    allowed += np.where(np.abs(x) < 2, slack, 0)
    wrong = np.flatnonzero(~(np.abs(found - truth) <= allowed))
    assert not len(wrong), f"{what} of {x[wrong[0]]}: {found[wrong[0]]}, not {truth[wrong[0]]}; {len(wrong)} are wrong"


@on_each_device
@in_16_bits
@over_unary
def test_every_16_bit_number_is_the_truth_rounded(device: str, dtype: str, kind: str) -> None:
    x = every_number(dtype, 65504.0)
    found = value_and_slope(unary_op(kind), torch_tensor(x, device))
    truth = truth_of(kind, x)
    assert_rounded_from_truth("value", found[0], truth[0], x, 0.0)
    # A slope is the difference of two numbers where it crosses 0, at -0.75 or -1.28.
    assert_rounded_from_truth("slope", found[1], truth[1], x, 4e-7)


@on_each_device
@in_16_bits
@over_gated
def test_gated_ones_round_once(device: str, dtype: str, kind: str) -> None:
    op, options = GATED[kind]
    gate = every_number(dtype, 8.0)
    up = np.resize(np.linspace(0.5, 1.0, 1009), gate.shape).astype(gate.dtype)
    y = getattr(ops, op)(torch_tensor(gate, device), torch_tensor(up, device), **options)
    truth = truth_of(kind, gate)[0] * up.astype(np.float64)
    assert_rounded_from_truth("y", to_numpy(y), truth, gate, 0.0)


@on_each_device
@in_each_dtype
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_tail_of_gelu_is_no_worse_than_torchs(device: str, dtype: str, approximate: str) -> None:
    x = torch.linspace(-13, -5, 4096, device=device).to(TORCH_DTYPES[dtype])
    truth = truth_of("gelu-tanh" if approximate == "tanh" else "gelu", to_numpy(x))
    ours = value_and_slope(lambda x: ops.gelu(x, approximate=approximate), x)
    theirs = value_and_slope(lambda x: gelu_reference(x, approximate=approximate), x)
    for found, reference, right in zip(ours, theirs, truth, strict=True):
        error, allowed = (np.abs(values.astype(np.float64) - right) for values in (found, reference))
        step = steps(right, dtype) if dtype != "float32" else np.spacing(np.abs(right).astype(np.float32))
        assert np.sqrt((error**2).mean()) <= 1.05 * np.sqrt((allowed**2).mean()) + 0.5 * step.max()
        assert error.max() <= 1.05 * allowed.max() + step.max()


# ---- infinities, zeros and what is none ----------------------------------------------------------------------------

#                    x:   30    -30  1e4  -1e4  inf  -inf  nan
TAILS = {
    "silu": ([30.0, 0.0, 1e4, 0.0, INF, NAN, NAN], [1.0, 0.0, 1.0, 0.0, NAN, NAN, NAN]),
    "gelu": ([30.0, 0.0, 1e4, 0.0, INF, NAN, NAN], [1.0, 0.0, 1.0, 0.0, NAN, NAN, NAN]),
    "gelu-tanh": ([30.0, 0.0, 1e4, 0.0, INF, NAN, NAN], [1.0, 0.0, 1.0, 0.0, NAN, NAN, NAN]),
    "relu2": ([900.0, 0.0, 1e8, 0.0, INF, 0.0, NAN], [60.0, 0.0, 2e4, 0.0, INF, 0.0, NAN]),
}
FAR = [30.0, -30.0, 1e4, -1e4, INF, -INF, NAN]


@on_each_device
@in_each_dtype
@over_unary
@pytest.mark.parametrize("width", [7, 64])  # by itself, and among others
def test_far_out_it_is_what_torch_has(device: str, dtype: str, kind: str, width: int) -> None:
    kind_of = TORCH_DTYPES[dtype]
    x = torch.tensor(FAR).repeat(10)[:width].to(device, kind_of)
    for found, right in zip(value_and_slope(unary_op(kind), x), TAILS[kind], strict=True):
        expected = torch.tensor(right, dtype=torch.float64).repeat(10)[:width].to(kind_of)
        # 30 has a logistic function that is not quite 1, and -30 one that is not quite 0.
        torch.testing.assert_close(torch_tensor(found), expected, rtol=1e-2, atol=1e-11, equal_nan=True)


@on_each_device
@over_unary
def test_the_table_of_tails_is_torchs(device: str, kind: str) -> None:
    op, options = UNARY[kind]
    x = torch.tensor(FAR, device=device)
    if device == "cpu" and kind == "gelu":
        x = x.half().clamp(-2e4, INF)[:5]  # its fp32 kernel has NaN for inf on a CPU, its fp16 kernel has not
    found = value_and_slope(lambda x: REFERENCES[op](x, **options), x)
    for values, right in zip(found, TAILS[kind], strict=True):
        np.testing.assert_allclose(values.astype(np.float64), right[: len(values)], rtol=1e-2, atol=1e-11)


@on_each_device
@in_each_dtype
@over_unary
def test_zero_stays_zero(device: str, dtype: str, kind: str) -> None:
    x = torch.tensor([0.0, -0.0] * 9, dtype=TORCH_DTYPES[dtype], device=device)
    y, slope = value_and_slope(unary_op(kind), x)
    assert not y.astype(np.float64).any()
    sign = np.signbit(y.astype(np.float64))
    assert np.array_equal(sign, np.zeros(18, bool) if kind == "relu2" else np.tile([False, True], 9))
    assert (slope.astype(np.float64) == (0.0 if kind == "relu2" else 0.5)).all()


@on_each_device
@in_each_dtype
def test_where_relu2_is_flat_no_gradient_comes_through(device: str, dtype: str) -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, -INF, 2.0, NAN], dtype=TORCH_DTYPES[dtype], device=device)
    for sent in (INF, NAN):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(ops.relu2(leaf), leaf, torch.full_like(x, sent))
        assert dx[:4].tolist() == [0.0] * 4
        assert not dx[4:].isfinite().any()


@on_each_device
@over_gated
def test_a_closed_gate_of_infinity_is_not_a_number(device: str, kind: str) -> None:
    op, options = GATED[kind]
    gate = torch.tensor([[-INF, INF, NAN, 1.0, 0.0]], device=device)
    up = torch.tensor([[1.0, 1.0, 1.0, NAN, INF]], device=device)
    y = getattr(ops, op)(gate, up, **options)[0]
    assert y.isnan().tolist() == [True, False, True, True, True]
    assert y[1] == INF


# ---- gate and up, packed or apart ----------------------------------------------------------------------------------


@on_each_device
@in_each_dtype
@over_gated
@pytest.mark.parametrize("shape", [(1,), (1, 64), (7, 33), (12, 1000), (3, 4, 80), (300, 768)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "offset", "columns"])
def test_packed_has_the_bits_of_separate(device: str, dtype: str, kind: str, shape: Any, layout: str) -> None:
    op, options = GATED[kind]
    made = torch.Generator().manual_seed(0)
    gate, up, dy = (torch.randn(shape, generator=made).to(device, TORCH_DTYPES[dtype]) for _ in range(3))
    packed = lay_out(torch.cat((gate, up), -1), layout).requires_grad_()
    gate, up = gate.requires_grad_(), up.requires_grad_()
    together, separate = getattr(ops, op)(packed, **options), getattr(ops, op)(gate, up, **options)
    assert torch.equal(together, separate)
    (dpacked,) = torch.autograd.grad(together, packed, dy)
    assert dpacked.is_contiguous()
    assert torch.equal(dpacked, torch.cat(torch.autograd.grad(separate, (gate, up), dy), -1))


def test_halves_of_a_packed_tensor_are_separate_ones_too() -> None:
    packed = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ops.swiglu(packed), ops.swiglu(*packed.chunk(2, dim=-1)))


@pytest.mark.parametrize("kind", [*UNARY, *GATED])
def test_cost_counts_every_tensor_once(kind: str) -> None:
    op = registry()[kind.removesuffix("-tanh")]
    for case in (*op.cases, *op.bench_cases):
        specs, element = op.inputs(case), 4 if case.dtype == "float32" else 2
        coming = sum(math.prod(spec.shape) for spec in specs.values())
        made = coming // 2 if "gate" in specs else coming
        assert op.cost(case, "forward").bytes == element * (coming + made)
        assert op.cost(case, "backward").bytes == element * (2 * coming + made)


# ---- one number without dimensions ---------------------------------------------------------------------------------


@pytest.fixture(params=[1.75, -0.5, -30.0])
def number(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.tensor(request.param)


@on_each_device
@in_each_dtype
@over_unary
def test_one_number_is_a_row_of_one(device: str, dtype: str, kind: str, number: torch.Tensor) -> None:
    x, call = number.to(device, TORCH_DTYPES[dtype]), unary_op(kind)
    for found, right in zip(value_and_slope(call, x), value_and_slope(call, x.reshape(1)), strict=True):
        assert found.shape == ()
        assert found.tobytes() == right.tobytes()
    assert torch.equal(call(x), call(x.reshape(1))[0])


@pytest.mark.filterwarnings("default")  # the compiler's own
@on_each_device
@over_unary
def test_one_number_is_compiled_as_a_row_of_one(device: str, kind: str) -> None:
    """The graph must not call a launcher with less than rows."""
    x, call = torch.tensor(0.75, device=device), unary_op(kind)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for found, right in zip(value_and_slope(compiled, x), value_and_slope(call, x), strict=True):
        assert found.shape == ()
        assert found.tobytes() == right.tobytes()
    assert torch.equal(compiled(x), call(x))


@over_unary
def test_transforms_may_leave_one_number(kind: str) -> None:
    x, call = torch.linspace(-2, 3, 6), unary_op(kind)
    op, options = UNARY[kind]
    vmap, grad = torch.func.vmap, torch.func.grad
    torch.testing.assert_close(vmap(call)(x), call(x))
    torch.testing.assert_close(vmap(vmap(call))(x.view(2, 3)), call(x).view(2, 3))
    slopes = vmap(grad(lambda x: REFERENCES[op](x, **options)))(x)
    torch.testing.assert_close(vmap(grad(call))(x), slopes)
    torch.testing.assert_close(grad(call)(x[4]), slopes[4])
    torch.testing.assert_close(grad(grad(call))(x[4]), grad(grad(lambda x: REFERENCES[op](x, **options)))(x[4]))


@over_unary
def test_jax_takes_one_number_too(kind: str, jax: ModuleType) -> None:
    import fuselm.jax

    op, options = UNARY[kind]
    x = jax.numpy.linspace(-2, 3, 6)

    def call(x: Any) -> Any:
        return getattr(fuselm.jax, op)(x, **options)

    rows, slopes = call(x), jax.grad(lambda x: call(x).sum())(x)
    assert np.array_equal(call(x[4]), rows[4])
    assert np.array_equal(call(np.asarray(x[4])), rows[4])
    np.testing.assert_allclose(jax.jit(jax.vmap(call))(x), rows, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(jax.vmap(jax.vmap(jax.grad(call)))(x.reshape(2, 3)).reshape(6), slopes, rtol=1e-5)


@over_gated
def test_a_gate_of_one_number_has_no_last_dimension(kind: str) -> None:
    op, options = GATED[kind]
    one = torch.tensor(1.0)
    for given in ((one,), (one, one)):
        with pytest.raises(RefusedInput, match=rf"{op}: gate must have 1 to 8 dimensions .* got gate float32\[\]"):
            getattr(ops, op)(*given, **options)
        with pytest.raises(RefusedInput, match="gate must have 1 to 8 dimensions"):
            torch.func.vmap(lambda *given: getattr(ops, op)(*given, **options))(*(torch.ones(3) for _ in given))


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [[1.0, 2.0], np.ones(8, np.float32), 3.0, None])
@pytest.mark.parametrize("op", [op for op, _ in (*UNARY.values(), *GATED.values())])
def test_what_is_no_tensor_is_named(op: str, wrong: Any) -> None:
    with pytest.raises(RefusedInput, match=r"must be a torch\.Tensor; got a " + type(wrong).__name__):
        getattr(ops, op)(wrong)
    if op in ("swiglu", "geglu") and wrong is not None:
        with pytest.raises(RefusedInput, match=r"up must be a torch\.Tensor"):
            getattr(ops, op)(torch.ones(8), wrong)


def test_an_up_without_memory_is_refused() -> None:
    for op in ("swiglu", "geglu"):
        with pytest.raises(RefusedInput, match=f"{op}: all tensors must be on one device"):
            getattr(ops, op)(torch.ones(4, 8), torch.empty(4, 8, device="meta"))


@pytest.mark.gpu
def test_raw_ops_refuse_tensors_that_do_not_belong_together(cuda: str) -> None:
    x = torch.randn(3, 8, device=cuda)
    for op in REFERENCES:
        getattr(ops, op)(x)  # the kernels are loaded now
    raw = torch.ops.fuselm
    others = (torch.ones(3, 9, device=cuda), torch.ones(8, device=cuda), x.bfloat16(), x.int())
    for other in others:
        for call in (
            lambda dy: raw.silu_backward(dy, x),
            lambda dy: raw.gelu_backward(dy, x, True),
            lambda dy: raw.relu2_backward(dy, x),
            lambda up: raw.swiglu_forward(x, up),
            lambda up: raw.geglu_forward(x, up, False),
            lambda up: raw.swiglu_backward(x, x, up),
            lambda gate: raw.geglu_backward(x, gate, x, True),
            lambda dy: raw.swiglu_packed_backward(dy, torch.ones(3, 16, device=cuda)),
            lambda dy: raw.geglu_packed_backward(dy, torch.ones(3, 16, device=cuda)),
        ):
            with pytest.raises(RuntimeError, match="a kernel was refused"):
                call(other)
    for call in (raw.swiglu_packed_forward, raw.geglu_packed_forward):
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            call(torch.ones(3, 7, device=cuda))


# ---- kernels that only many elements have --------------------------------------------------------------------------


@pytest.mark.gpu
@in_each_dtype
@pytest.mark.parametrize("kind", [*UNARY, *GATED])
@pytest.mark.parametrize("layout", ["strided", "offset", "transposed", "columns"])
def test_many_elements_have_the_bits_of_few(cuda: str, dtype: str, kind: str, layout: str) -> None:
    op, options = {**UNARY, **GATED}[kind]
    call = getattr(ops, op)
    shape = (16, 12, 64, 512)  # 6.3 million: more vectors than the device has threads
    x = torch.randn(shape, device=cuda, generator=torch.Generator(cuda).manual_seed(0)).to(TORCH_DTYPES[dtype])
    whole = value_and_slope(lambda x: call(x, **options), x)
    few = [value_and_slope(lambda x: call(x, **options), x[i]) for i in (0, 9, 15)]
    lying = value_and_slope(lambda x: call(x, **options), lay_out(x, layout))
    for one, other in zip(whole, lying, strict=True):
        assert one.tobytes() == other.tobytes()
    for i, some in zip((0, 9, 15), few, strict=True):
        for one, other in zip(whole, some, strict=True):
            assert one[i].tobytes() == other.tobytes()


# ---- kernels that only few elements have ---------------------------------------------------------------------------

# One block of any size, whole blocks of whole warps and of parts of them, no whole blocks, odd counts.
FEW = [(1, n) for n in (1, 7, 8, 768, 1000, 1024, 1750, 4096, 8072, 12_345, 14_336)]
FEW += [(7, 1000), (64, 248), (64, 256), (64, 768), (64, 1000), (64, 1536), (64, 16_144)]


def assert_few_have_the_bits_of_scattered(cuda: str, dtype: str, kind: str, shape: tuple[int, int]) -> None:
    """Beside elements one by one, which begin off any vector."""
    op, options = {**UNARY, **GATED}[kind]
    call = lambda x: getattr(ops, op)(x, **options)  # noqa: E731
    made = torch.Generator(cuda).manual_seed(0)
    packed = torch.randn(shape[0], 2 * shape[1], device=cuda, generator=made).to(TORCH_DTYPES[dtype])
    half = packed[:, : shape[1]]
    for x in (half.contiguous(), half) if kind in UNARY else (packed,):
        whole, scattered = value_and_slope(call, x), value_and_slope(call, lay_out(x, "offset"))
        assert all(one.tobytes() == other.tobytes() for one, other in zip(whole, scattered, strict=True)), shape


@pytest.mark.gpu
@in_each_dtype
@pytest.mark.parametrize("kind", [*UNARY, *GATED])
def test_few_elements_have_the_bits_of_scattered_ones(cuda: str, dtype: str, kind: str) -> None:
    for shape in FEW:
        assert_few_have_the_bits_of_scattered(cuda, dtype, kind, shape)


@pytest.mark.gpu
@in_each_dtype
@pytest.mark.parametrize("kind", ["silu", "swiglu"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_where_few_elements_end_bits_stay(cuda: str, dtype: str, kind: str, more: int) -> None:
    vector = 16 // TORCH_DTYPES[dtype].itemsize
    vectors = 2048 * torch.cuda.get_device_properties(cuda).multi_processor_count
    for rows in (1, 64):
        assert_few_have_the_bits_of_scattered(cuda, dtype, kind, (rows, (vectors // rows + more) * vector))


@pytest.mark.gpu
@in_each_dtype
@over_gated
@pytest.mark.parametrize("shape", [(1, 8), (1, 4096), (64, 768), (64, 1000)], ids=str)
def test_one_gradient_of_two_has_the_bits_of_both(cuda: str, dtype: str, kind: str, shape: tuple[int, int]) -> None:
    op, options = GATED[kind]
    made = torch.Generator(cuda).manual_seed(0)
    packed, dy = (torch.randn(shape[0], n, device=cuda, generator=made) for n in (2 * shape[1], shape[1]))
    packed, dy = packed.to(TORCH_DTYPES[dtype]), dy.to(TORCH_DTYPES[dtype])
    apart = packed.chunk(2, -1)
    for halves in (apart, [half.contiguous() for half in apart]):
        found = []
        for wanted in ((True, True), (True, False), (False, True)):
            leaves = [half.detach().requires_grad_(wants) for half, wants in zip(halves, wanted, strict=True)]
            getattr(ops, op)(*leaves, **options).backward(dy)
            found.append([leaf.grad for leaf in leaves])
        both, first, second = found
        assert first[1] is None
        assert second[0] is None
        assert torch.equal(both[0], first[0])
        assert torch.equal(both[1], second[1])


# ---- derivatives and transforms in torch ---------------------------------------------------------------------------

X = torch.linspace(-2, 3, 24, dtype=torch.float32).reshape(3, 8)


def loss(call: Callable[..., torch.Tensor], options: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (call(x, **options) ** 3).sum()


@pytest.mark.parametrize("kind", [*UNARY, *GATED])
def test_transforms_and_forward_mode_give_what_the_formula_gives(kind: str) -> None:
    op, options = {**UNARY, **GATED}[kind]
    ours, theirs = loss(getattr(ops, op), options), loss(REFERENCES[op], options)
    tangent = torch.linspace(0, 1, 24).reshape(3, 8)
    found, right = (torch.func.jvp(one, (X,), (tangent,))[1] for one in (ours, theirs))
    assert torch.allclose(found, right)
    assert found.abs() > 0
    for transform in (torch.func.grad, torch.func.hessian):
        assert torch.allclose(transform(ours)(X), transform(theirs)(X), atol=1e-6)
    twice = torch.stack((X, 2 * X))
    mapped = torch.func.vmap(torch.func.grad(ours))(twice)
    assert torch.allclose(mapped, torch.stack([torch.func.grad(ours)(one) for one in twice]))


# ---- JAX -----------------------------------------------------------------------------------------------------------


@in_each_dtype
@over_unary
def test_jax_has_the_same_tails(dtype: str, kind: str, jax: ModuleType) -> None:
    import fuselm.jax

    op, options = UNARY[kind]
    x = jax.numpy.asarray(FAR, dtype)
    y, pull_back = jax.vjp(lambda x: getattr(fuselm.jax, op)(x, **options), x)
    for found, right in zip((y, *pull_back(jax.numpy.ones_like(y))), TAILS[kind], strict=True):
        with np.errstate(over="ignore"):
            expected = np.asarray(right).astype(numpy_dtype(dtype)).astype(np.float64)
        np.testing.assert_allclose(np.asarray(found).astype(np.float64), expected, rtol=1e-2, atol=1e-11)


@in_each_dtype
@over_gated
def test_jax_packs_as_torch_does(dtype: str, kind: str, jax: ModuleType) -> None:
    import fuselm.jax

    op, options = GATED[kind]
    call = getattr(fuselm.jax, op)
    packed = jax.random.normal(jax.random.key(0), (5, 48)).astype(dtype)
    gate, up = packed[:, :24], packed[:, 24:]
    together, back = jax.vjp(lambda packed: call(packed, **options), packed)
    separate, back_apart = jax.vjp(lambda gate, up: call(gate, up, **options), gate, up)
    assert np.array_equal(together, separate)
    assert np.array_equal(back(together)[0], jax.numpy.concatenate(back_apart(together), -1))


@pytest.mark.parametrize("kind", [*UNARY, *GATED])
def test_vmap_adds_an_axis_to_the_most_there_can_be(kind: str, jax: ModuleType) -> None:
    import fuselm.jax

    op, options = {**UNARY, **GATED}[kind]
    x = np.random.default_rng(0).standard_normal((2, 1, 2, 1, 2, 1, 1, 3, 6)).astype(np.float32)

    def call(x: Any) -> Any:
        return getattr(fuselm.jax, op)(x, **options)

    assert "scan" not in str(jax.make_jaxpr(jax.vmap(call))(x))
    np.testing.assert_allclose(jax.vmap(call)(x), np.stack([call(one) for one in x]), rtol=1e-6)


@pytest.mark.parametrize("kind", [*UNARY, *GATED])
def test_jax_refuses_a_second_derivative_at_once(kind: str, jax: ModuleType) -> None:
    import fuselm.jax

    op, options = {**UNARY, **GATED}[kind]
    x = jax.numpy.asarray(X.numpy())
    twice = jax.hessian(lambda x: (getattr(fuselm.jax, op)(x, **options) ** 3).sum())
    with pytest.raises(TypeError, match="has one derivative"):
        twice(x)
