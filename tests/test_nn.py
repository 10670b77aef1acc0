"""fuselm.nn against torch.nn: the same arguments, state, words of repr, errors and numbers.

Knows torch and fuselm.nn. What the op computes in every corner is tested in tests/kernels; here a module must be one
that can be swapped into a model and out of it again.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import fuselm.nn
from fuselm import ops
from fuselm.kernels.spec import Tolerance
from tests.kernels.arrays import assert_within_rule, error, to_numpy

SHAPES = [(16,), (4, 8), 24]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def pair(*arguments: Any, **options: Any) -> tuple[fuselm.nn.RMSNorm, torch.nn.RMSNorm]:
    """Our module and torch's, with the same random weight."""
    ours, theirs = fuselm.nn.RMSNorm(*arguments, **options), torch.nn.RMSNorm(*arguments, **options)
    if theirs.weight is not None:
        with torch.no_grad():
            theirs.weight.normal_(1.0, 0.5, generator=torch.Generator().manual_seed(1))
            ours.weight.copy_(theirs.weight)
    return ours, theirs


def rows(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    trailing = (shape,) if isinstance(shape, int) else shape
    return torch.randn(6, 5, *trailing, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_as_exact(what: str, ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """The house's error rule, with torch's module as the reference."""
    exact = truth.detach().numpy()
    noise = error(exact.astype(np.float32), exact)
    assert_within_rule(what, to_numpy(ours), to_numpy(theirs), exact, Tolerance(), noise, groups=30)


def truth_of(module: torch.nn.RMSNorm) -> torch.nn.RMSNorm:
    """Torch's module in float64, with eps as it is in fp32: there eps=None means another number."""
    exact = copy.deepcopy(module).double()
    exact.eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return exact


# ---- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_are_interchangeable(shape: Any, affine: bool) -> None:
    ours, theirs = pair(shape, elementwise_affine=affine)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    fresh_ours, fresh_theirs = (
        fuselm.nn.RMSNorm(shape, elementwise_affine=affine),
        torch.nn.RMSNorm(shape, elementwise_affine=affine),
    )
    fresh_ours.load_state_dict(theirs.state_dict(), strict=True)
    fresh_theirs.load_state_dict(ours.state_dict(), strict=True)
    for fresh, source in ((fresh_ours, theirs), (fresh_theirs, ours)):
        for name, parameter in source.named_parameters():
            assert torch.equal(fresh.get_parameter(name), parameter)


def test_a_state_dict_of_another_width_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        fuselm.nn.RMSNorm(8).load_state_dict(torch.nn.RMSNorm(9).state_dict())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_fresh_module_starts_as_torchs(shape: Any) -> None:
    ours, theirs = fuselm.nn.RMSNorm(shape), torch.nn.RMSNorm(shape)
    assert torch.equal(ours.weight, theirs.weight)
    assert (ours.normalized_shape, ours.eps) == (theirs.normalized_shape, theirs.eps)
    assert isinstance(ours, torch.nn.RMSNorm)


def test_a_fresh_module_with_an_offset_scales_by_one() -> None:
    module = fuselm.nn.RMSNorm(16, offset=1.0)
    assert torch.equal(module.weight, torch.zeros(16))
    assert torch.equal(module(rows(16)), fuselm.nn.RMSNorm(16)(rows(16)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtype_and_device_are_those_asked_for(dtype: torch.dtype) -> None:
    module = fuselm.nn.RMSNorm(8, device="meta", dtype=dtype)
    assert module.weight.device.type == "meta"
    assert module.weight.dtype == dtype
    assert fuselm.nn.RMSNorm(8).to(dtype).weight.dtype == dtype


@pytest.mark.parametrize("arguments", [(8,), ((4, 8), 1e-6), (8, None, False)])
def test_repr_is_torchs(arguments: tuple[Any, ...]) -> None:
    assert repr(fuselm.nn.RMSNorm(*arguments)) == repr(torch.nn.RMSNorm(*arguments))


def test_repr_names_what_torch_does_not_have() -> None:
    module = fuselm.nn.RMSNorm(8, offset=1.0, cast_mode="llama")
    assert repr(module) == repr(torch.nn.RMSNorm(8))[:-1] + ", offset=1.0, cast_mode='llama')"


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_results_and_gradients_are_as_exact_as_torchs(shape: Any, affine: bool, eps: float | None, dtype: Any) -> None:
    ours, theirs = pair(shape, eps, affine, dtype=dtype)
    x, cotangent = rows(shape, dtype), rows(shape, dtype, seed=2)
    results = []
    for module in (ours, theirs, truth_of(theirs)):
        double = module is not ours and module is not theirs
        inputs = (x.double() if double else x).clone().requires_grad_()
        y = module(inputs)
        wanted = [inputs, *module.parameters()]
        results.append((y, *torch.autograd.grad(y, wanted, cotangent.to(y.dtype))))
    for what, *values in zip(("y", "gradient of x", "gradient of weight"), *results, strict=False):
        assert_as_exact(what, *values)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"offset": 1.0}, {"cast_mode": "llama"}])
def test_the_residual_form_norms_the_sum_it_returns(shape: Any, options: dict[str, Any]) -> None:
    module = fuselm.nn.RMSNorm(shape, **options)
    with torch.no_grad():
        module.weight.normal_(generator=torch.Generator().manual_seed(4))
    x, residual = rows(shape, torch.bfloat16), rows(shape, torch.float32, seed=3)
    y, summed = module(x, residual)
    assert torch.equal(summed, x + residual)
    width = module.weight.numel()
    flat = ops.rms_norm(
        x.reshape(6, 5, width), module.weight.flatten(), residual=residual.reshape(6, 5, width), **options
    )
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.equal(y.reshape(6, 5, width), flat[0])


def test_a_training_step_is_torchs() -> None:
    """Two layers and a norm between them, ten steps of AdamW: the same losses, to fp32's noise."""

    def losses(norm: torch.nn.Module) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), norm, torch.nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, target = torch.randn(64, 16), torch.randn(64, 4)
        seen = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    theirs = losses(torch.nn.RMSNorm(32))
    assert theirs[-1] < 0.95 * theirs[0]
    np.testing.assert_allclose(losses(fuselm.nn.RMSNorm(32)), theirs, rtol=2e-5)


# ---- as part of a model --------------------------------------------------------------------------------------------


def test_a_deep_copy_is_a_module_of_its_own() -> None:
    module = fuselm.nn.RMSNorm(16, 1e-6, offset=1.0, cast_mode="llama")
    with torch.no_grad():
        module.weight.normal_(generator=torch.Generator().manual_seed(5))
    twin = copy.deepcopy(module)
    expected = module(rows(16, torch.bfloat16))
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(twin(rows(16, torch.bfloat16)), expected)
    assert not torch.equal(module(rows(16, torch.bfloat16)), expected)
    assert repr(twin) == repr(module)


def test_functional_call_uses_the_weight_it_is_given() -> None:
    module = fuselm.nn.RMSNorm(16)
    weight = torch.full((16,), 3.0, requires_grad=True)
    y = torch.func.functional_call(module, {"weight": weight}, (rows(16),))
    assert torch.equal(y, ops.rms_norm(rows(16), weight))
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert torch.count_nonzero(gradient)
    assert module.weight.grad is None


def test_evaluation_without_grad_gives_what_training_gives() -> None:
    module = fuselm.nn.RMSNorm(16)
    trained = module(rows(16))
    with torch.no_grad():
        evaluated = module.eval()(rows(16))
    assert trained.requires_grad
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, trained)


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
@pytest.mark.parametrize("shape", [(16,), (4, 8)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_compiles_without_a_break(shape: tuple[int, ...], with_residual: bool) -> None:
    module = fuselm.nn.RMSNorm(shape)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    arguments = (rows(shape), rows(shape, seed=1)) if with_residual else (rows(shape),)
    for a, b in zip(torch.utils._pytree.tree_leaves(compiled(*arguments)), as_list(module(*arguments)), strict=True):
        assert torch.equal(a, b)


def as_list(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "x"),
    [
        ((16,), torch.ones(2, 15)),
        ((16,), torch.ones(16, 2)),
        ((4, 8), torch.ones(2, 32)),
        ((4, 8), torch.ones(8)),
        ((4, 8), torch.ones(8, 4)),
        ((16,), torch.ones(2, 16, dtype=torch.int64)),
        ((16,), torch.tensor(1.0)),
    ],
    ids=["short", "turned", "flat", "too-few-dimensions", "swapped", "integers", "scalar"],
)
def test_what_torch_refuses_is_refused(shape: tuple[int, ...], x: torch.Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        torch.nn.RMSNorm(shape)(x)
    with pytest.raises((RuntimeError, ValueError), match=r"; got .*\. "):
        fuselm.nn.RMSNorm(shape)(x)


def test_a_residual_of_another_shape_is_refused() -> None:
    for shape in ((16,), (4, 4)):
        with pytest.raises((RuntimeError, ValueError), match="residual"):
            fuselm.nn.RMSNorm(shape)(rows(shape), torch.ones(3, *shape))


def test_an_unknown_cast_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="cast_mode must be"):
        fuselm.nn.RMSNorm(16, cast_mode="none")(rows(16))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu_results_are_as_exact_as_torchs(shape: Any, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    ours, theirs = pair(shape, dtype=dtype)
    x = rows(shape, dtype)
    y, reference = ours.cuda()(x.cuda()), theirs.cuda()(x.cuda())
    assert_as_exact("y", y.cpu(), reference.cpu(), truth_of(theirs).cpu()(x.double()))


def test_a_residual_of_another_shape_is_refused_also_where_it_has_as_many_numbers() -> None:
    with pytest.raises(ValueError, match="residual must have x's shape"):
        fuselm.nn.RMSNorm((4, 8))(torch.randn(3, 4, 8), torch.randn(3, 8, 4))


@pytest.mark.parametrize("wrong", [{"cast_mode": "none"}, {"offset": 1.0, "elementwise_affine": False}])
def test_options_that_could_not_be_kept_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="RMSNorm: cast_mode must be"):
        fuselm.nn.RMSNorm(8, **wrong)
