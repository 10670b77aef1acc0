"""What LayerNorm promises beyond the generic suite: rows far from 0, constant rows, transforms, wrong kinds of things.

The generic suite carries the numbers. On a GPU: corners of the kernels that only raw calls or odd bits reach.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fuselm import ops
from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.torch_ops.layer_norm import layer_norm_reference
from tests.kernels.problems import DEVICES

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)

X = torch.linspace(-2, 3, 24, dtype=torch.float32).reshape(3, 8).sin()
WEIGHT = torch.linspace(0.5, 1.5, 8)
BIAS = torch.linspace(1.0, -1.0, 8)


def loss(norm: Any) -> Any:
    return lambda x: (norm(x, WEIGHT, BIAS) ** 3).sum()


# ---- numbers -------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("width", [40, 333, 1024, 8192, 40000])
def test_a_row_far_from_zero_keeps_the_digits_fp32_left_it(device: str, width: int) -> None:
    """Whole numbers around 100 000: fp32 holds them and their differences exactly, but not one of their squares."""
    made = torch.Generator().manual_seed(0)
    x = 100_000.0 + torch.randint(-8, 9, (5, width), generator=made)
    dy = torch.randn(5, width, generator=made)
    leaf = x.to(device).requires_grad_()
    y = ops.layer_norm(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy.to(device))
    exact = x.double().requires_grad_()
    truth = torch.nn.functional.layer_norm(exact, (width,))
    (dtruth,) = torch.autograd.grad(truth, exact, dy.double())
    # The mean may be off by a few steps of fp32 at 100 000, 1/128 each: of a standard deviation of 5 that is 1e-2. Made
    # from mean(h^2), the variance would be off by hundreds.
    assert (y.detach().cpu() - truth.detach()).abs().max() < 1e-2
    assert (dx.cpu() - dtruth).abs().max() < 1e-2


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 1000, 4096, 24000])
def test_a_constant_row_becomes_the_bias(device: str, dtype: torch.dtype, width: int) -> None:
    x = torch.full((3, width), -4.0, dtype=dtype, device=device, requires_grad=True)
    weight = torch.full((width,), 2.0, dtype=dtype, device=device)
    bias = torch.linspace(-1, 1, width, device=device).to(dtype)
    y = ops.layer_norm(x, weight, bias)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    # Exact where the mean must be; elsewhere it may be a step of fp32 off, which 1 / sqrt(eps) makes 316 times larger.
    slack = 0.0 if width & (width - 1) == 0 else 1e-3 + torch.finfo(dtype).eps
    assert (y - bias).abs().max() <= slack
    assert dx.abs().max() <= slack


@on_each_device
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(device: str, bad: float) -> None:
    x = X.to(device).clone()
    x[1, 3] = bad
    y = ops.layer_norm(x, WEIGHT.to(device), BIAS.to(device))
    assert y[1].isnan().all()
    assert torch.equal(y[::2], ops.layer_norm(X.to(device), WEIGHT.to(device), BIAS.to(device))[::2])


def test_the_result_is_that_of_the_sum_it_returns() -> None:
    x, residual = X.to(torch.bfloat16), torch.linspace(-1, 1, 24).reshape(3, 8).to(torch.float16)
    y, summed = ops.layer_norm(x, WEIGHT, BIAS, residual=residual)
    assert torch.equal(summed, (x.float() + residual.float()).to(torch.float16))
    assert torch.equal(y, ops.layer_norm(summed.float(), WEIGHT, BIAS).to(torch.bfloat16))


# ---- transforms ----------------------------------------------------------------------------------------------------


def test_forward_mode_derivatives_are_those_of_the_formula() -> None:
    tangent = X.square()
    found = torch.func.jvp(loss(ops.layer_norm), (X,), (tangent,))[1]
    assert torch.allclose(found, torch.func.jvp(loss(layer_norm_reference), (X,), (tangent,))[1])
    assert found.abs() > 0.1


def test_dual_numbers_keep_their_tangent() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X.square())
        tangent = torch.autograd.forward_ad.unpack_dual(ops.layer_norm(dual, WEIGHT, BIAS)).tangent
    assert tangent is not None
    assert tangent.abs().max() > 0


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.hessian, lambda f: torch.func.vmap(torch.func.grad(f))]
)
def test_function_transforms_give_what_the_formula_gives(transform: Any) -> None:
    found, expected = transform(loss(ops.layer_norm))(X), transform(loss(layer_norm_reference))(X)
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.abs().max() > 0.1


def test_jax_refuses_a_second_derivative_at_once() -> None:
    jax = pytest.importorskip("jax")
    import fuselm.jax

    x = jax.numpy.asarray(X.numpy())

    def jax_loss(x: Any) -> Any:
        return (fuselm.jax.layer_norm(x) ** 3).sum()

    for twice in (jax.hessian(jax_loss), jax.grad(lambda x: jax.grad(jax_loss)(x).sum())):
        with pytest.raises(TypeError, match="has one derivative"):
            twice(x)


# ---- the wrong kind of thing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_without_memory_is_refused(name: str) -> None:
    with pytest.raises(RefusedInput, match=f"one device; got x on cpu and {name} on meta"):
        ops.layer_norm(X, **{name: torch.empty(8, device="meta")})


@pytest.mark.parametrize("wrong", [[1.0, 2.0], np.ones(8, np.float32), 3.0])
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    with pytest.raises(RefusedInput, match=r"x must be a torch\.Tensor; got a " + type(wrong).__name__):
        ops.layer_norm(wrong)
    for name in ("weight", "bias", "residual"):
        with pytest.raises(RefusedInput, match=name + r" must be a torch\.Tensor"):
            ops.layer_norm(X, **{name: wrong})


@pytest.mark.parametrize("wrong", [None, [1.0], X])
def test_jax_names_what_is_no_array(wrong: Any) -> None:
    pytest.importorskip("jax")
    import fuselm.jax

    with pytest.raises(RefusedInput, match="x must be a jax or numpy array; got a " + type(wrong).__name__):
        fuselm.jax.layer_norm(wrong)


# ---- raw calls and odd bits ----------------------------------------------------------------------------------------


def backward_arguments(device: str, width: int) -> tuple[torch.Tensor, ...]:
    """dy, h, mean, rstd of three rows."""
    made = torch.Generator().manual_seed(0)
    dy, h = (torch.randn(3, width, generator=made).to(device) for _ in range(2))
    return dy, h, h.mean(1), 1 / h.std(1, correction=0)


@on_each_device
@pytest.mark.parametrize("width", [7, 8, 1024])
def test_layer_norm_backward_gives_what_is_asked_for_and_no_more(device: str, width: int) -> None:
    ops.layer_norm(torch.ones(1, 8, device=device))  # what is built or loaded on first use is there now
    dy, h, mean, rstd = backward_arguments(device, width)
    weight, bias = torch.full((width,), 0.5, device=device), torch.zeros(width, device=device)
    backward = torch.ops.fuselm.layer_norm_backward
    everything = backward(dy, h, mean, rstd, weight, bias, None, 0b1111)
    assert torch.equal(everything[0], everything[1])
    for outputs in range(1, 16, 2):  # dx is always wanted
        some = backward(dy, h, mean, rstd, weight, bias, None, outputs)
        for index, (one, known) in enumerate(zip(some, everything, strict=True)):
            if outputs >> index & 1:
                assert torch.equal(one, known) if index < 2 else torch.allclose(one, known, rtol=1e-5, atol=1e-5)
            else:
                assert one is None


@pytest.mark.gpu
def test_layer_norm_backward_refuses_tensors_that_do_not_belong_together(cuda: str) -> None:
    ops.layer_norm(torch.ones(1, 8, device=cuda))
    dy, h, mean, rstd = backward_arguments(cuda, 8)
    dy, of_h = dy.to(torch.bfloat16), torch.randn(3, 8, device=cuda)
    backward = torch.ops.fuselm.layer_norm_backward
    backward(dy, h, mean, rstd, None, None, of_h, 0b0011)
    apart = torch.ones(6, device=cuda)[::2]
    for wrong in (
        (dy, h, mean, rstd, None, None, of_h.to(torch.bfloat16), 0b0011),
        (dy, h, apart, rstd, None, None, of_h, 0b0011),
        (dy, h, mean, apart, None, None, of_h, 0b0011),
        (dy, h, mean[:2], rstd, None, None, of_h, 0b0011),
        (dy, h, mean, rstd, of_h[0, :7], None, of_h, 0b0011),
        (dy, h, mean, rstd, None, of_h[0, :7], of_h, 0b1011),
    ):
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            backward(*wrong)


@pytest.mark.gpu
def test_layer_norm_of_a_row_alone_has_the_bits_it_has_among_many_signs_of_zero_too(cuda: str) -> None:
    x = torch.linspace(-2, 3, 9000 * 1024, device=cuda).reshape(9000, 1024).to(torch.bfloat16)
    for value in (-0.0, 0.0):
        weight, bias = (torch.full((1024,), zero, dtype=torch.bfloat16, device=cuda) for zero in (value, -0.0))
        alone, among = ops.layer_norm(x[:1], weight, bias)[0], ops.layer_norm(x, weight, bias)[0]
        assert torch.equal(alone.view(torch.int16), among.view(torch.int16))


# Widths and rows that take the kernels for odd and for wide rows, wide ones and most odd ones round several times, and
# that end amid a bundle.
MANY_ROWS = [(4099, 7), (999, 63), (20011, 257), (7001, 1001), (2003, 2049), (803, 8191), (299, 16383)]
MANY_ROWS += [(300, 20488), (1100, 20488), (1061, 32768), (100, 65536), (40, 262144)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", MANY_ROWS, ids=str)
def test_odd_and_wide_rows_have_the_bits_they_have_element_by_element(
    cuda: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x, dy = (torch.randn(shape, device=cuda, generator=made).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[1], device=cuda, generator=made).to(dtype).requires_grad_() for _ in range(2))
    found = {}
    for kind, rows in {"close": x, "apart": columns_apart(x)}.items():
        leaf = rows.detach().requires_grad_()
        y = ops.layer_norm(leaf, weight, bias, eps=1e-6)
        found[kind] = (y, *torch.autograd.grad(y, (leaf, weight, bias), dy))
    for close, apart in zip(found["close"][:2], found["apart"][:2], strict=True):
        assert torch.equal(close, apart)
    centred = x.double() - x.double().mean(1, keepdim=True)
    xhat = centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-6)
    for index, terms in ((2, dy.double() * xhat), (3, dy.double())):
        # One rounding of the result, and of each term and sum in fp32.
        allowed = torch.finfo(dtype).eps * terms.sum(0).abs() + 2**-19 * terms.square().sum(0).sqrt()
        for results in found.values():
            assert ((results[index].double() - terms.sum(0)).abs() <= allowed).all()


# Where rows lie, in standard deviations: of 16 bits, the variance comes from one pass up to 8, from two beyond. Rows at
# 20000 are of one number.
CENTRES = [0.0, 1.0, -7.5, 8.5, 100.0, -250.0, 20000.0]
WIDTHS = [8, 64, 256, 512, 768, 1000, 1001, 1024, 2048, 4096, 8192, 16384, 20488, 32768, 65536]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_near_and_far_from_zero_side_by_side(cuda: str, width: int, dtype: torch.dtype) -> None:
    """Each has the bits it has alone and element by element, and an error no larger than torch's."""
    made = torch.Generator(cuda).manual_seed(0)
    few, rows = len(CENTRES), 1100 if width <= 32768 else 300
    centres = torch.tensor(CENTRES, device=cuda).repeat(rows)[:rows]
    x = (torch.randn(rows, width, device=cuda, generator=made) + centres[:, None]).to(dtype)
    dy = torch.randn(rows, width, device=cuda, generator=made).to(dtype)
    weight, bias = (torch.randn(width, device=cuda, generator=made).to(dtype) for _ in range(2))

    def both(op: Any, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = op(leaf, weight.to(x.dtype), bias.to(x.dtype))
        return y.detach(), *torch.autograd.grad(y, leaf, dy)

    def torchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (width,), weight, bias)

    ours = both(ops.layer_norm, x, dy)
    for row in range(few):
        for among, alone in zip(ours, both(ops.layer_norm, x[row : row + 1], dy[row : row + 1]), strict=True):
            assert torch.equal(among[row : row + 1], alone)
    for among, apart in zip(ours, both(ops.layer_norm, columns_apart(x[: 4 * few]), dy[: 4 * few]), strict=True):
        assert torch.equal(among[: 4 * few], apart)
    for found, theirs, exact in zip(ours, both(torchs, x, dy), both(torchs, x.double(), dy.double()), strict=True):
        scale = exact.square().mean(1).sqrt()
        errors = [(one.double() - exact).square().mean(1).sqrt() / scale for one in (found, theirs)]
        for kind in range(few):
            our, their = (error[kind::few].mean() for error in errors)
            assert our <= 1.05 * their + 2e-6, CENTRES[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0, 5, 1299, 1300, 1 << 62, -1])
def test_every_row_is_there_whatever_the_memory_of_the_counter_held(cuda: str, bits: int) -> None:
    """Blocks that stay draw their rows from a counter in memory that nobody has cleared."""
    made = torch.Generator(cuda).manual_seed(0)
    x = torch.randn(1300, 20480, device=cuda, generator=made).to(torch.bfloat16)
    weight, bias = (torch.randn(20480, device=cuda, generator=made).to(torch.bfloat16) for _ in range(2))
    alone = torch.cat([ops.layer_norm(rows, weight, bias) for rows in x.split(100)])  # so few have no counter
    for _ in range(4):
        torch.full_like(x, np.nan)  # given back at once: y will lie there, and the counter in one of the next
        scraps = [torch.full((1,), bits, dtype=torch.int64, device=cuda) for _ in range(64)]
        del scraps
        assert torch.equal(ops.layer_norm(x, weight, bias), alone)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 200])
def test_rows_of_one_large_number_give_the_weight_no_gradient(cuda: str, rows: int) -> None:
    x = torch.full((rows, 16384), 60000.0, dtype=torch.float16, device=cuda)
    weight = torch.ones(16384, dtype=torch.float16, device=cuda, requires_grad=True)
    y = ops.layer_norm(x, weight)
    (dweight,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert not y.any()
    assert not dweight.any()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 1001, 32768])
def test_where_the_weight_and_the_bias_lie_changes_no_bit(cuda: str, width: int) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x, dy = (torch.randn(37, width, device=cuda, generator=made).to(torch.bfloat16) for _ in range(2))
    flat = torch.randn(2 * width + 1, device=cuda, generator=made).to(torch.bfloat16)
    weight, bias = flat[1 : width + 1], flat[width + 1 :]  # misaligned, as views into a buffer of parameters may be
    found = []
    for parameters in ((weight, bias), (weight.clone(), bias.clone()), (weight.clone(), bias)):
        leaf = x.detach().requires_grad_()
        y = ops.layer_norm(leaf, *parameters)
        found.append((y, *torch.autograd.grad(y, leaf, dy), ops.layer_norm(x[:1], *parameters), y[:1]))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert torch.equal(one, same)
    assert torch.equal(*found[0][2:])


def columns_apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with every other element unused: no kernel that moves vectors can take them."""
    return torch.stack((x, x), dim=-1)[..., 0]
