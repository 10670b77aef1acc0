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
from tests.kernels.arrays import Error, assert_within_rule, error, to_numpy

SHAPES = [(16,), (4, 8), 24]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
NORMS = ["RMSNorm", "LayerNorm"]
# What may be said to a norm of either kind about its parameters.
PARAMETERS = [
    ("RMSNorm", {}),
    ("RMSNorm", {"elementwise_affine": False}),
    ("LayerNorm", {}),
    ("LayerNorm", {"bias": False}),
    ("LayerNorm", {"elementwise_affine": False}),
]
over_norms = pytest.mark.parametrize("kind", NORMS)
over_parameters = pytest.mark.parametrize(("kind", "options"), PARAMETERS)


def pair(kind: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Our module and torch's, with the same random parameters."""
    ours, theirs = getattr(fuselm.nn, kind)(*arguments, **options), getattr(torch.nn, kind)(*arguments, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(1.0, 0.5, generator=generator)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def rows(shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    trailing = (shape,) if isinstance(shape, int) else shape
    return torch.randn(6, 5, *trailing, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results_of(module: Any, x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, and the gradients of x and of every parameter."""
    inputs = x.detach().clone().requires_grad_()
    y = module(inputs)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(y, [inputs, *parameters.values()], cotangent.to(y.dtype))
    return {"y": y} | {f"d{name}": gradient for name, gradient in zip(("x", *parameters), gradients, strict=True)}


def fp32_noise(module: Any, x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, Error]:
    """What torch's module errs by in fp32, over a few inputs next to the given one: one alone may be lucky."""
    in_fp32, exact = copy.deepcopy(module).float(), truth_of(copy.deepcopy(module).float())
    draws: dict[str, list[Error]] = {}
    for step in range(4):
        near = x.float() * (1 + step / 4096)
        truth = results_of(exact, near.double(), cotangent)
        for name, found in results_of(in_fp32, near, cotangent).items():
            draws.setdefault(name, []).append(error(to_numpy(found), to_numpy(truth[name])))
    return {
        name: Error(float(np.sqrt(np.mean([e.rms**2 for e in errors]))), max(e.max for e in errors))
        for name, errors in draws.items()
    }


def assert_as_exact(ours: Any, theirs: Any, x: torch.Tensor, cotangent: torch.Tensor, device: str = "cpu") -> None:
    """The house's error rule for the result and every gradient, with torch's module as the reference."""
    truth, noise = results_of(truth_of(theirs), x.double(), cotangent), fp32_noise(theirs, x, cotangent)
    there = (x.to(device), cotangent.to(device))
    found, reference = (results_of(module.to(device), *there) for module in (ours, theirs))
    assert found.keys() == reference.keys() == truth.keys()
    for name, exact in truth.items():
        values = (to_numpy(found[name]), to_numpy(reference[name]), to_numpy(exact))
        assert_within_rule(name, *values, Tolerance(), noise[name], groups=min(30, exact.numel()))


def truth_of(module: Any) -> Any:
    """Torch's module in float64, with eps as it is in fp32: there eps=None means another number."""
    exact = copy.deepcopy(module).double()
    exact.eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return exact


# ---- state ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@over_parameters
def test_state_dicts_are_interchangeable(kind: str, options: dict[str, Any], shape: Any) -> None:
    ours, theirs = pair(kind, shape, **options)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    fresh_ours, fresh_theirs = (getattr(home, kind)(shape, **options) for home in (fuselm.nn, torch.nn))
    fresh_ours.load_state_dict(theirs.state_dict(), strict=True)
    fresh_theirs.load_state_dict(ours.state_dict(), strict=True)
    for fresh, source in ((fresh_ours, theirs), (fresh_theirs, ours)):
        for name, parameter in source.named_parameters():
            assert torch.equal(fresh.get_parameter(name), parameter)


@over_norms
def test_a_state_dict_of_another_width_is_refused(kind: str) -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        getattr(fuselm.nn, kind)(8).load_state_dict(getattr(torch.nn, kind)(9).state_dict())


@pytest.mark.parametrize("shape", SHAPES)
@over_parameters
def test_a_fresh_module_starts_as_torchs(kind: str, options: dict[str, Any], shape: Any) -> None:
    ours, theirs = (getattr(home, kind)(shape, **options) for home in (fuselm.nn, torch.nn))
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert (ours.normalized_shape, ours.eps) == (theirs.normalized_shape, theirs.eps)
    assert isinstance(ours, getattr(torch.nn, kind))


def test_a_fresh_module_with_an_offset_scales_by_one() -> None:
    module = fuselm.nn.RMSNorm(16, offset=1.0)
    assert torch.equal(module.weight, torch.zeros(16))
    assert torch.equal(module(rows(16)), fuselm.nn.RMSNorm(16)(rows(16)))


@over_norms
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtype_and_device_are_those_asked_for(kind: str, dtype: torch.dtype) -> None:
    norm = getattr(fuselm.nn, kind)
    module = norm(8, device="meta", dtype=dtype)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", dtype)}
    assert {p.dtype for p in norm(8).to(dtype).parameters()} == {dtype}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("RMSNorm", (8,)),
        ("RMSNorm", ((4, 8), 1e-6)),
        ("RMSNorm", (8, None, False)),
        ("LayerNorm", (8,)),
        ("LayerNorm", ((4, 8), 1e-6)),
        ("LayerNorm", (8, 1e-5, False)),
        ("LayerNorm", (8, 1e-5, True, False)),
    ],
)
def test_repr_is_torchs(kind: str, arguments: tuple[Any, ...]) -> None:
    assert repr(getattr(fuselm.nn, kind)(*arguments)) == repr(getattr(torch.nn, kind)(*arguments))


def test_repr_names_what_torch_does_not_have() -> None:
    module = fuselm.nn.RMSNorm(8, offset=1.0, cast_mode="llama")
    assert repr(module) == repr(torch.nn.RMSNorm(8))[:-1] + ", offset=1.0, cast_mode='llama')"


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@over_parameters
@pytest.mark.parametrize("eps", [None, 1e-5, 0.1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_results_and_gradients_are_as_exact_as_torchs(
    kind: str, options: dict[str, Any], shape: Any, eps: float | None, dtype: Any
) -> None:
    ours, theirs = pair(kind, shape, dtype=dtype, **options, **({} if eps is None else {"eps": eps}))
    assert_as_exact(ours, theirs, rows(shape, dtype), rows(shape, dtype, seed=2))


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_residual_form_of_a_layer_norm_norms_the_sum_it_returns(shape: Any, bias: bool) -> None:
    module = pair("LayerNorm", shape, bias=bias)[0]
    x, residual = rows(shape, torch.bfloat16), rows(shape, torch.float32, seed=3)
    y, summed = module(x, residual)
    assert torch.equal(summed, x + residual)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.equal(y, module(summed).to(torch.bfloat16))


@over_norms
def test_a_training_step_is_torchs(kind: str) -> None:
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

    theirs = losses(getattr(torch.nn, kind)(32))
    assert theirs[-1] < 0.95 * theirs[0]
    np.testing.assert_allclose(losses(getattr(fuselm.nn, kind)(32)), theirs, rtol=2e-5)


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


@over_norms
def test_functional_call_uses_the_weight_it_is_given(kind: str) -> None:
    module, op = getattr(fuselm.nn, kind)(16), {"RMSNorm": ops.rms_norm, "LayerNorm": ops.layer_norm}[kind]
    weight = torch.full((16,), 3.0, requires_grad=True)
    y = torch.func.functional_call(module, {"weight": weight}, (rows(16),))
    assert torch.equal(y, op(rows(16), weight))
    (gradient,) = torch.autograd.grad(y.square().sum(), weight)
    assert torch.count_nonzero(gradient)
    assert module.weight.grad is None


@over_norms
def test_evaluation_without_grad_gives_what_training_gives(kind: str) -> None:
    module = pair(kind, 16)[0]
    trained = module(rows(16))
    with torch.no_grad():
        evaluated = module.eval()(rows(16))
    assert trained.requires_grad
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, trained)


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
@over_norms
@pytest.mark.parametrize("shape", [(16,), (4, 8)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_compiles_without_a_break(kind: str, shape: tuple[int, ...], with_residual: bool) -> None:
    module = pair(kind, shape)[0]
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    arguments = (rows(shape), rows(shape, seed=1)) if with_residual else (rows(shape),)
    for a, b in zip(torch.utils._pytree.tree_leaves(compiled(*arguments)), as_list(module(*arguments)), strict=True):
        assert torch.equal(a, b)


def as_list(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


# ---- errors --------------------------------------------------------------------------------------------------------


@over_norms
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
def test_what_torch_refuses_is_refused(kind: str, shape: tuple[int, ...], x: torch.Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        getattr(torch.nn, kind)(shape)(x)
    with pytest.raises((RuntimeError, ValueError), match=r"; got .*\. "):
        getattr(fuselm.nn, kind)(shape)(x)


@over_norms
def test_a_residual_of_another_shape_is_refused(kind: str) -> None:
    for shape in ((16,), (4, 4)):
        with pytest.raises((RuntimeError, ValueError), match="residual"):
            getattr(fuselm.nn, kind)(shape)(rows(shape), torch.ones(3, *shape))


@over_norms
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("wrong", [[1.0, 2.0], "a", 3.0, np.ones((2, 2, 4), np.float32), np.ones((2, 2), np.float32)])
def test_what_is_no_tensor_is_refused_in_the_ops_words(kind: str, shape: tuple[int, ...], wrong: Any) -> None:
    module, x = getattr(fuselm.nn, kind)(shape), torch.ones(3, *shape)
    got = rf"must be a torch\.Tensor; got a {type(wrong).__name__}\. Pass torch\.as_tensor"
    if not isinstance(wrong, np.ndarray) or wrong.shape[-len(shape) :] == shape:
        with pytest.raises(ValueError, match=rf"_norm: x {got}\(x\)\."):
            module(wrong)
    with pytest.raises(ValueError, match=rf"_norm: residual {got}\(residual\)\."):
        module(x, wrong)
    with pytest.raises(ValueError, match=r"_norm: x must be a torch\.Tensor; got a NoneType"):
        module(None)


@pytest.mark.parametrize("offset", [None, "1", True, torch.tensor(1.0), np.float32(1.0)])
def test_an_offset_that_is_no_number_is_refused(offset: Any) -> None:
    with pytest.raises(ValueError, match=r"^RMSNorm: offset must be a Python number; got .*\. Leave it out for 0\.$"):
        fuselm.nn.RMSNorm(4, offset=offset)


def test_an_unknown_cast_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="cast_mode must be"):
        fuselm.nn.RMSNorm(16, cast_mode="none")(rows(16))


@pytest.mark.gpu
@over_norms
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu_results_are_as_exact_as_torchs(kind: str, shape: Any, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    ours, theirs = pair(kind, shape, dtype=dtype)
    assert_as_exact(ours, theirs, rows(shape, dtype), rows(shape, dtype, seed=2), "cuda")


@over_norms
def test_a_residual_of_another_shape_is_refused_also_where_it_has_as_many_numbers(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind}: residual must have x's shape"):
        getattr(fuselm.nn, kind)((4, 8))(torch.randn(3, 4, 8), torch.randn(3, 8, 4))


@pytest.mark.parametrize("wrong", [{"cast_mode": "none"}, {"offset": 1.0, "elementwise_affine": False}])
def test_options_that_could_not_be_kept_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="RMSNorm: cast_mode must be"):
        fuselm.nn.RMSNorm(8, **wrong)


# ---- losses --------------------------------------------------------------------------------------------------------

LOSS_OPTIONS = [{}, {"ignore_index": 3}, {"reduction": "sum", "label_smoothing": 0.1}, {"reduction": "none"}]


def loss_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and targets for the classes, which are the last of one dimension or the second of more."""
    made = torch.Generator().manual_seed(0)
    classes = shape[-1] if len(shape) == 1 else shape[1]
    places = shape[:1] + shape[2:] if len(shape) > 1 else ()
    return torch.randn(shape, generator=made).to(dtype), torch.randint(classes, places, generator=made)


@pytest.mark.parametrize("options", LOSS_OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(7,), (6, 7), (6, 7, 5), (2, 7, 3, 4)], ids=str)
def test_a_loss_and_its_gradient_are_torchs(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    logits, targets = loss_inputs(shape)
    found = []
    for loss in (fuselm.nn.CrossEntropyLoss(**options), torch.nn.CrossEntropyLoss(**options)):
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, targets)
        value.sum().backward()
        found.append((value.detach(), leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_loss_takes_what_the_op_takes() -> None:
    logits, targets = loss_inputs((6, 7), torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    own: dict[str, Any] = {"z_loss": 0.01, "softcap": 2.0}
    value = fuselm.nn.CrossEntropyLoss(**own, inplace=True)(scores := leaf * 1, targets)
    assert torch.equal(value, ops.cross_entropy(logits, targets, **own))
    value.backward()
    assert leaf.grad is not None
    assert torch.equal(scores, leaf.grad)  # in place: where the logits were


def test_a_loss_has_torchs_state_and_says_what_it_adds() -> None:
    ours, theirs = fuselm.nn.CrossEntropyLoss(label_smoothing=0.1), torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    assert ours.state_dict() == theirs.state_dict() == {}
    assert repr(ours) == repr(theirs)
    assert (
        repr(fuselm.nn.CrossEntropyLoss(softcap=30.0, inplace=True)) == "CrossEntropyLoss(softcap=30.0, inplace=True)"
    )


def test_weighted_classes_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"no weights here; got weight \[7\]. Use torch.nn.CrossEntropyLoss"):
        fuselm.nn.CrossEntropyLoss(torch.ones(7))


def test_classes_that_come_last_are_refused_in_the_modules_own_words() -> None:
    loss = fuselm.nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match=r"got input \[2, 8, 5\] and target \[2, 8\]\. .* pass input.movedim\(-1, 1\)"):
        loss(torch.randn(2, 8, 5), torch.zeros(2, 8, dtype=torch.long))
