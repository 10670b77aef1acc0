"""What RMSNorm promises beyond the generic suite: transforms, second derivatives, calls with the wrong kind of thing.

The generic suite carries the numbers. On a GPU: corners of the kernels that only raw calls or odd bits reach.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fuselm import ops
from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.torch_ops.rms_norm import rms_norm_reference

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

X = torch.linspace(-2, 3, 24, dtype=torch.float32).reshape(3, 8)
WEIGHT = torch.linspace(0.5, 1.5, 8)


def loss(norm: Any) -> Any:
    return lambda x: (norm(x, WEIGHT) ** 3).sum()


def test_forward_mode_derivatives_are_those_of_the_formula() -> None:
    tangent = torch.ones_like(X)
    found = torch.func.jvp(loss(ops.rms_norm), (X,), (tangent,))[1]
    assert torch.allclose(found, torch.func.jvp(loss(rms_norm_reference), (X,), (tangent,))[1])
    assert found.abs() > 0


def test_dual_numbers_keep_their_tangent() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        tangent = torch.autograd.forward_ad.unpack_dual(ops.rms_norm(dual, WEIGHT)).tangent
    assert tangent is not None
    assert tangent.abs().max() > 0


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.hessian, lambda f: torch.func.vmap(torch.func.grad(f))]
)
def test_function_transforms_give_what_the_formula_gives(transform: Any) -> None:
    assert torch.allclose(transform(loss(ops.rms_norm))(X), transform(loss(rms_norm_reference))(X), atol=1e-5)


def test_a_weight_without_memory_is_refused() -> None:
    with pytest.raises(RefusedInput, match="one device"):
        ops.rms_norm(X, torch.empty(8, device="meta"))


@pytest.mark.parametrize("wrong", [[1.0, 2.0], np.ones(8, np.float32), 3.0])
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    with pytest.raises(RefusedInput, match=r"x must be a torch\.Tensor; got a " + type(wrong).__name__):
        ops.rms_norm(wrong)
    with pytest.raises(RefusedInput, match=r"weight must be a torch\.Tensor"):
        ops.rms_norm(X, wrong)


def test_jax_refuses_a_second_derivative_at_once() -> None:
    jax = pytest.importorskip("jax")
    import fuselm.jax

    x = jax.numpy.asarray(X.numpy())

    def jax_loss(x: Any) -> Any:
        return (fuselm.jax.rms_norm(x) ** 3).sum()

    for twice in (jax.hessian(jax_loss), jax.grad(lambda x: jax.grad(jax_loss)(x).sum())):
        with pytest.raises(TypeError, match="has one derivative"):
            twice(x)


@pytest.mark.parametrize("wrong", [None, [1.0], X])
def test_jax_names_what_is_no_array(wrong: Any) -> None:
    pytest.importorskip("jax")
    import fuselm.jax

    with pytest.raises(RefusedInput, match="x must be a jax or numpy array; got a " + type(wrong).__name__):
        fuselm.jax.rms_norm(wrong)


@pytest.mark.gpu
def test_rms_norm_of_a_row_alone_has_the_bits_it_has_among_many_signs_of_zero_too(cuda: str) -> None:
    x = torch.linspace(-2, 3, 9000 * 1024, device=cuda).reshape(9000, 1024).to(torch.bfloat16)
    weight = torch.full((1024,), -0.0, dtype=torch.bfloat16, device=cuda)
    alone, among = ops.rms_norm(x[:1], weight)[0], ops.rms_norm(x, weight)[0]
    assert torch.equal(alone.view(torch.int16), among.view(torch.int16))
    assert not torch.signbit(alone[0])  # -2 times -0


@pytest.mark.gpu
@pytest.mark.parametrize("width", [7, 8])
def test_rms_norm_backward_fills_the_gradient_of_the_residual_when_it_is_asked_for(cuda: str, width: int) -> None:
    dy, h = (torch.randn(3, width, device=cuda) for _ in range(2))
    rstd, weight = torch.ones(3, device=cuda), torch.ones(width, device=cuda)
    dx, dresidual, _ = torch.ops.fuselm.rms_norm_backward(dy, h, rstd, weight, None, 0.0, 0b011)
    assert torch.equal(dx, dresidual)


@pytest.mark.gpu
def test_rms_norm_backward_refuses_tensors_that_do_not_belong_together(cuda: str) -> None:
    dy, h = torch.randn(3, 8, device=cuda).to(torch.bfloat16), torch.randn(3, 8, device=cuda)
    rstd, of_h = torch.ones(3, device=cuda), torch.randn(3, 8, device=cuda)
    backward = torch.ops.fuselm.rms_norm_backward
    backward(dy, h, rstd, None, of_h, 0.0, 0b011)
    with pytest.raises(RuntimeError, match="a kernel was refused"):
        backward(dy, h, rstd, None, of_h.to(torch.bfloat16), 0.0, 0b011)
    with pytest.raises(RuntimeError, match="a kernel was refused"):
        backward(dy, h, torch.ones(6, device=cuda)[::2], None, of_h, 0.0, 0b011)


# Widths and rows that take the kernels for odd and for wide rows, wide ones and most odd ones round several times, and
# that end amid a bundle.
MANY_ROWS = [(4099, 7), (999, 63), (20011, 257), (7001, 1001), (2003, 2049), (803, 8191), (299, 16383)]
MANY_ROWS += [(300, 20488), (100, 65536), (40, 262144)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", MANY_ROWS, ids=str)
def test_odd_and_wide_rows_have_the_bits_they_have_element_by_element(
    cuda: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x, dy = (torch.randn(shape, device=cuda, generator=made).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], device=cuda, generator=made).to(dtype).requires_grad_()
    found = {}
    for kind, rows in {"close": x, "apart": columns_apart(x)}.items():
        leaf = rows.detach().requires_grad_()
        y = ops.rms_norm(leaf, weight, eps=1e-6)
        found[kind] = (y, *torch.autograd.grad(y, (leaf, weight), dy))
    for close, apart in zip(found["close"][:2], found["apart"][:2], strict=True):
        assert torch.equal(close, apart)
    xhat = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)
    terms = dy.double() * xhat
    # One rounding of the result, and of each term and sum in fp32.
    allowed = torch.finfo(dtype).eps * terms.sum(0).abs() + 2**-19 * terms.square().sum(0).sqrt()
    for _, _, dweight in found.values():
        assert ((dweight.double() - terms.sum(0)).abs() <= allowed).all()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 1001, 32768])
def test_where_the_weight_lies_changes_no_bit(cuda: str, width: int) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    x, dy = (torch.randn(37, width, device=cuda, generator=made).to(torch.bfloat16) for _ in range(2))
    flat = torch.randn(width + 1, device=cuda, generator=made).to(torch.bfloat16)
    found = []
    for weight in (flat[1:], flat[1:].clone()):  # misaligned, as a view into a buffer of parameters may be
        leaf = x.detach().requires_grad_()
        y = ops.rms_norm(leaf, weight)
        found.append((y, *torch.autograd.grad(y, leaf, dy), ops.rms_norm(x[:1], weight), y[:1]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*found[0][2:])


def columns_apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with every other element unused: no kernel that moves vectors can take them."""
    return torch.stack((x, x), dim=-1)[..., 0]
