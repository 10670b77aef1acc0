"""What cross-entropy promises beyond the generic suite: gradients in place, second backwards, strays, transforms.

The generic suite carries the numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselm import ops
from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.torch_ops import cross_entropy_plain
from fuselm.kernels.torch_ops.cross_entropy import cross_entropy_reference, torch_loss
from tests.kernels.problems import DEVICES

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
over_reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}
# Narrow, odd, odd and wide, wider than any block's registers.
SHAPES = [(6, 8), (33, 1001), (3, 50257), (5, 131072)]


def problem(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which every third is ignored or outside."""
    made = torch.Generator(device).manual_seed(0)
    logits = torch.randn(shape, generator=made, device=device).to(dtype)
    targets = torch.randint(shape[-1], shape[:-1], generator=made, device=device)
    targets.view(-1)[::3] = -100
    targets.view(-1)[4::6] = shape[-1]
    return logits, targets


def gradient(logits: Tensor, targets: Tensor, factor: float = 1.0, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient for an incoming `factor`; the logits are what a model made."""
    leaf = logits.detach().requires_grad_()
    loss = ops.cross_entropy(leaf * 1, targets, **options)
    loss.backward(torch.full_like(loss, factor))
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


class RawNames(TorchDispatchMode):
    """Remembers the names of the raw ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fuselm":
            self.names.append(func.name().removeprefix("fuselm::cross_entropy_"))
        return func(*args, **(kwargs or {}))


# ---- one backward, and more ----------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [9, 1024, 10000, 50304])
@pytest.mark.parametrize("incoming", [1.0, 0.5])
@pytest.mark.parametrize("least", [-1e10, -1e30, -3.4e38])
def test_the_largest_logits_a_dtype_has_are_numbers(
    device: str, dtype: torch.dtype, width: int, incoming: float, least: float
) -> None:
    # Logits are multiplied by log2(e) on their way, which rounds: to infinity, or to somewhere far from each other.
    least = max(least, torch.finfo(dtype).min)
    logits = torch.full((2, width), least, dtype=dtype, device=device, requires_grad=True)
    loss = ops.cross_entropy(logits, torch.tensor([1, width - 1], device=device))
    assert loss.item() == pytest.approx(np.log(width), rel=1e-6)
    (dlogits,) = torch.autograd.grad(loss * incoming, logits)
    expected = torch.full((2, width), 0.5 * incoming / width)
    expected[0, 1] = expected[1, width - 1] = 0.5 * incoming * (1 / width - 1)
    # A gradient that is not 1 is applied by way of the log-sum-exp, of which fp32 keeps 0.4 % of e^it at 65504.
    rtol = torch.finfo(dtype).eps if incoming == 1 else 8e-3
    torch.testing.assert_close(dlogits.float().cpu(), expected, rtol=rtol, atol=1e-7)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("largest", [9.0e4, 1.2e7, 3.7749e8, 1e9, 1e12])
def test_one_logit_far_above_the_others_takes_all(device: str, dtype: torch.dtype, largest: float) -> None:
    logits = torch.zeros(2, 1000, dtype=dtype, device=device)
    logits[:, 0] = min(largest, torch.finfo(dtype).max)
    logits.requires_grad_()
    expected = torch.zeros(2, 1000)
    expected[1, 0], expected[1, 7] = 0.5, -0.5
    loss = ops.cross_entropy(logits, torch.tensor([0, 7], device=device))
    for incoming in (0.5, 1.0):  # by way of the log-sum-exp, then made anew from it
        (dlogits,) = torch.autograd.grad(loss * incoming, logits, retain_graph=True)
        torch.testing.assert_close(dlogits.float().cpu(), expected * incoming, rtol=1e-2, atol=1e-6)


@on_each_device
@over_reductions
def test_the_gradient_is_made_by_forward_and_made_anew_for_a_second_backward(device: str, reduction: str) -> None:
    logits, targets = problem((6, 8), device)
    logits.requires_grad_()
    ops.cross_entropy(logits, targets)  # what is built or loaded on first use is there now
    with RawNames() as raw:
        loss = ops.cross_entropy(logits, targets, reduction=reduction)
        one = torch.ones_like(loss)
        (first,) = torch.autograd.grad(loss, logits, one, retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(loss, logits, one, retain_graph=True)
        (third,) = torch.autograd.grad(loss, logits, 3 * one)
    assert raw.names == ["forward", "correct", "backward", "backward"]
    assert torch.equal(first, kept)
    # Made anew from the lse, which is rounded: the last bits may be others.
    torch.testing.assert_close(second, first)
    torch.testing.assert_close(third, 3 * first)
    assert len({g.data_ptr() for g in (first, second, third)}) == 3


@on_each_device
def test_rows_of_incoming_ones_and_others_mix(device: str) -> None:
    logits, targets = problem((6, 8), device, torch.bfloat16)
    logits.requires_grad_()
    sent = torch.tensor([1.0, 1.0, 0.5, -2.0, 1.0, 0.0], device=device)
    losses = ops.cross_entropy(logits, targets, reduction="none")
    (found,) = torch.autograd.grad(losses, logits, sent, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(losses, logits, sent)[0], rtol=2**-7, atol=0)
    assert not found[5].any()


def test_a_batch_of_gradients_is_a_jacobian() -> None:
    logits, targets = problem((4, 6))
    logits.requires_grad_()
    losses = ops.cross_entropy(logits, targets, reduction="none")
    (jacobian,) = torch.autograd.grad(losses, logits, torch.eye(4), is_grads_batched=True)
    rows = cross_entropy_reference(logits, targets, reduction="none")
    for row in range(4):
        torch.testing.assert_close(jacobian[row], torch.autograd.grad(rows[row], logits, retain_graph=True)[0])


# ---- in place ------------------------------------------------------------------------------------------------------


@on_each_device
@over_reductions
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_place_the_loss_and_the_gradient_have_the_same_bits(
    device: str, reduction: str, options: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    logits, targets = problem(shape, device, dtype)
    plain_loss, plain_gradient = gradient(logits, targets, reduction=reduction, **options)
    loss, found = gradient(logits, targets, reduction=reduction, **options, inplace=True)
    assert torch.equal(loss, plain_loss)
    assert torch.equal(found, plain_gradient)


@on_each_device
@over_reductions
def test_in_place_the_gradient_lies_where_the_logits_were(device: str, reduction: str) -> None:
    logits, targets = problem((6, 8), device)
    scores = logits.requires_grad_() * 1
    version = scores._version
    loss = ops.cross_entropy(scores, targets, reduction=reduction, inplace=True)
    assert scores._version > version
    expected = gradient(logits, targets, reduction=reduction)[1]
    assert torch.equal(scores.detach(), expected)
    (found,) = torch.autograd.grad(loss, scores, torch.ones_like(loss))
    assert found.data_ptr() == scores.data_ptr()
    assert torch.equal(found, expected)


@on_each_device
@over_reductions
@pytest.mark.parametrize("factor", [0.0, 0.5, -3.0])
def test_in_place_another_incoming_gradient_is_multiplied_in(device: str, reduction: str, factor: float) -> None:
    logits, targets = problem((33, 77), device)
    _, expected = gradient(logits, targets, factor, reduction=reduction)
    _, found = gradient(logits, targets, factor, reduction=reduction, inplace=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@on_each_device
@pytest.mark.parametrize("layout", ["strided", "transposed"])
def test_in_place_only_the_logits_are_written_over(device: str, layout: str) -> None:
    logits, targets = problem((6, 8), device)
    memory = torch.full((12, 16), 7.0, device=device)
    view = memory[:6, :8] if layout == "strided" else memory.t()[:6, :8]
    scores = view.copy_(logits).detach()
    before = memory.clone()
    leaf = torch.zeros((), device=device, requires_grad=True)
    ops.cross_entropy(_Through.apply(leaf, scores), targets, inplace=True).backward()
    changed = memory != before
    here = changed[:6, :8] if layout == "strided" else changed.t()[:6, :8]
    assert int(changed.sum()) == int(here.sum()) > 0
    torch.testing.assert_close(scores.detach(), gradient(logits, targets)[1])


class _Through(torch.autograd.Function):
    """Memory of somebody's own as something a model made."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, memory: Tensor) -> Tensor:
        ctx.mark_dirty(memory)
        return memory

    @staticmethod
    def backward(ctx: Any, sent: Tensor) -> Any:
        return sent.sum(), None


def test_in_place_has_one_backward() -> None:
    logits, targets = problem((6, 8))
    loss = ops.cross_entropy(logits.requires_grad_() * 1, targets, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"has one backward.*Leave inplace out where a graph is kept"):
        loss.backward()


def test_who_kept_the_logits_hears_that_they_are_gone() -> None:
    logits, targets = problem((6, 8))
    loss = ops.cross_entropy(torch.tanh(logits.requires_grad_()), targets, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_gradient_in_place_that_was_written_over_is_not_handed_out() -> None:
    logits, targets = problem((6, 8))
    scores = logits.requires_grad_() * 1
    loss = ops.cross_entropy(scores, targets, inplace=True)
    with torch.no_grad():
        scores.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_a_gradient_to_make_in_place_leaves_the_logits_alone() -> None:
    logits, targets = problem((6, 8))
    before = logits.clone()
    plain = ops.cross_entropy(logits, targets)
    assert torch.equal(ops.cross_entropy(logits, targets, inplace=True), plain)
    with torch.no_grad():
        assert torch.equal(ops.cross_entropy(logits.requires_grad_(), targets, inplace=True), plain)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("view", [False, True])
def test_in_place_over_a_leaf_is_refused(view: bool) -> None:
    logits, targets = problem((6, 8))
    leaf = logits.requires_grad_()
    with pytest.raises(RefusedInput, match=r"cannot write over a leaf.*float32\[6, 8\].*leave inplace out"):
        ops.cross_entropy(leaf[:] if view else leaf, targets, inplace=True)


def test_in_place_over_shared_memory_is_refused() -> None:
    row = torch.randn(8, requires_grad=True) * 1
    with pytest.raises(RefusedInput, match=r"share a place in memory.*contiguous"):
        ops.cross_entropy(row.expand(6, 8), torch.zeros(6, dtype=torch.long), inplace=True)


@pytest.mark.filterwarnings("default")
def test_in_place_is_left_to_the_compiler() -> None:
    logits, targets = problem((6, 8))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(leaf: Tensor) -> tuple[Tensor, Tensor]:
        scores = leaf * 1
        return ops.cross_entropy(scores, targets, inplace=True), scores

    leaf = logits.clone().requires_grad_()
    loss, scores = step(leaf)
    loss.backward()
    assert torch.equal(scores, logits)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient(logits, targets)[1])


# ---- targets -------------------------------------------------------------------------------------------------------


@on_each_device
def test_the_type_of_the_targets_changes_no_bit(device: str) -> None:
    logits, targets = problem((33, 77), device)
    for found, expected in zip(gradient(logits, targets.int()), gradient(logits, targets), strict=True):
        assert torch.equal(found, expected)


@on_each_device
@pytest.mark.parametrize("index", [-(2**40), 2**40])
def test_an_ignore_index_that_no_target_can_be_ignores_none(device: str, index: int) -> None:
    logits, targets = problem((6, 8), device)
    expected = gradient(logits, targets)
    for found, right in zip(gradient(logits, targets.int(), ignore_index=index), expected, strict=True):
        assert torch.equal(found, right)


@on_each_device
@over_reductions
@pytest.mark.parametrize("target", [-100, -1, 8])
def test_rows_that_do_not_count_may_hold_anything(device: str, reduction: str, target: int) -> None:
    logits, targets = problem((6, 8), device)
    targets[2] = target
    expected = gradient(logits, targets, reduction=reduction, **ALL)
    logits[2] = torch.nan
    for found, right in zip(gradient(logits, targets, reduction=reduction, **ALL), expected, strict=True):
        assert torch.equal(found, right)


@on_each_device
@over_reductions
def test_logits_of_minus_infinity_have_no_share(device: str, reduction: str) -> None:
    logits, targets = problem((33, 77), device)
    logits[:, 70:] = -torch.inf
    targets = targets.clamp(max=69)
    whole = gradient(logits, targets, reduction=reduction, z_loss=0.01)
    part = gradient(logits[:, :70], targets, reduction=reduction, z_loss=0.01)
    torch.testing.assert_close(whole[0], part[0])
    torch.testing.assert_close(whole[1][:, :70], part[1])
    assert not whole[1][:, 70:].any()


@on_each_device
def test_large_logits_overflow_nothing(device: str) -> None:
    logits = torch.tensor([[3e38, 0.0, -3e38], [3e38, 3e38, -3e38], [-3e38, -3e38, -3e38]], device=device)
    losses = ops.cross_entropy(logits, torch.zeros(3, dtype=torch.long, device=device), reduction="none")
    torch.testing.assert_close(losses.cpu(), torch.tensor([1.0, 2.0, 3.0]).log())


@on_each_device
def test_when_debugging_the_first_stray_target_is_named(device: str) -> None:
    logits, targets = problem((2, 3, 8), device)
    targets[:] = -100
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert ops.cross_entropy(logits, targets) == 0
        targets[1, 0], targets[1, 2] = 8, -5
        with pytest.raises(RefusedInput, match=r"got target 8 at \[1, 0\] for rows of 8 logits and ignore_index=-100"):
            ops.cross_entropy(logits, targets)
        assert ops.cross_entropy(logits.to("meta"), targets.to("meta")).is_meta
    assert ops.cross_entropy(logits, targets) == 0


@on_each_device
@pytest.mark.parametrize("grad", [False, True])
def test_many_losses_are_added_up_in_float64_and_rounded_once(device: str, grad: bool) -> None:
    logits, targets = problem((100_003, 5), device)
    losses = ops.cross_entropy(logits, targets, reduction="none").double()
    counts = (targets >= 0) & (targets < 5)
    logits.requires_grad_(grad)
    assert ops.cross_entropy(logits, targets, reduction="sum") == losses.sum().float()
    assert ops.cross_entropy(logits, targets) == (losses.sum() / counts.sum()).float()


# ---- raw calls -----------------------------------------------------------------------------------------------------


@on_each_device
def test_a_count_that_is_given_is_what_a_mean_divides_by(device: str) -> None:
    """As for a batch that is worked off in parts."""
    logits, targets = problem((33, 77), device)
    ops.cross_entropy(logits, targets)
    scalars = (-100, 0.0, 0.0, 0.0)
    count = torch.tensor(50.0, device=device)
    raw = torch.ops.fuselm
    loss, _, lse, counted, dlogits = raw.cross_entropy_forward(logits, targets, count, *scalars, True, 0b10111)
    assert counted is None
    total, summed = gradient(logits, targets, reduction="sum")
    torch.testing.assert_close(loss, total / 50)
    torch.testing.assert_close(dlogits, summed / 50)
    one = torch.ones((), device=device)
    again = raw.cross_entropy_backward(logits, targets, lse, one, count, *scalars, 1)
    torch.testing.assert_close(again, dlogits)
    over = logits.clone()
    in_place = raw.cross_entropy_inplace(over, targets, count, *scalars, True, 0b0011)
    assert torch.equal(in_place[0], loss)
    assert in_place[2:] == (None, None)
    assert torch.equal(over, dlogits)


# ---- transforms and words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
def test_function_transforms_give_what_the_formula_gives(transform: Any, options: dict[str, Any]) -> None:
    logits, targets = problem((3, 5))
    found, expected = (
        transform(lambda x, loss=loss: loss(x, targets, **options))(logits)
        for loss in (ops.cross_entropy, cross_entropy_reference)
    )
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected)


def test_forward_mode_derivatives_are_those_of_the_formula() -> None:
    logits, targets = problem((3, 5))
    tangent = torch.linspace(-1, 1, 15).view(3, 5)
    found = torch.func.jvp(lambda x: ops.cross_entropy(x, targets), (logits,), (tangent,))[1]
    torch.testing.assert_close(found, (gradient(logits, targets)[1] * tangent).sum())


@over_reductions
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_the_yardstick_of_speed_is_that_of_errors_where_torch_takes_the_targets(
    reduction: str, options: dict[str, Any]
) -> None:
    logits, targets = problem((33, 77), dtype=torch.bfloat16)
    targets[targets == 77] = -100
    torch.testing.assert_close(
        torch_loss(logits, targets, **options, reduction=reduction),
        cross_entropy_reference(logits, targets, **options, reduction=reduction),
    )


@pytest.mark.parametrize("wrong", [None, [1.0, 2.0], np.ones(8, np.float32), 3.0])
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    logits, targets = problem((6, 8))
    with pytest.raises(RefusedInput, match=r"logits must be a torch\.Tensor; got a " + type(wrong).__name__):
        ops.cross_entropy(wrong, targets)
    with pytest.raises(RefusedInput, match=r"targets must be a torch\.Tensor"):
        ops.cross_entropy(logits.requires_grad_(), wrong)


# ---- JAX -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrays(jax: Any) -> tuple[Any, Any]:
    logits, targets = problem((6, 8))
    return jax.numpy.asarray(logits.numpy()), jax.numpy.asarray(targets.int().numpy())


@over_reductions
@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_jax_in_place_gives_the_same(jax: Any, arrays: Any, reduction: str, factor: float) -> None:
    import fuselm.jax

    logits, targets = arrays

    def step(x: Any, inplace: bool) -> Any:
        return (factor * fuselm.jax.cross_entropy(x, targets, reduction=reduction, inplace=inplace, **ALL)).sum()

    for transform in (lambda f: f, jax.jit):
        both = [transform(jax.value_and_grad(lambda x, flag=flag: step(x * 1, flag)))(logits) for flag in (False, True)]
        for plain, in_place in zip(*both, strict=True):
            np.testing.assert_allclose(in_place, plain, rtol=1e-6, atol=1e-7)
    assert np.array_equal(logits, problem((6, 8))[0].numpy())  # XLA has kept what is still needed


@over_reductions
def test_jax_in_place_takes_vmap(jax: Any, arrays: Any, reduction: str) -> None:
    import fuselm.jax

    logits, targets = arrays
    stacked = jax.numpy.stack([logits, 2 * logits])

    def slope(x: Any, inplace: bool) -> Any:
        return jax.grad(lambda x: fuselm.jax.cross_entropy(x, targets, reduction=reduction, inplace=inplace).sum())(x)

    plain, in_place = (jax.vmap(lambda x, flag=flag: slope(x, flag))(stacked) for flag in (False, True))
    np.testing.assert_allclose(in_place, plain, rtol=1e-6, atol=1e-7)


def test_jax_names_a_stray_target_in_torchs_words_when_debugging(jax: Any, arrays: Any) -> None:
    import fuselm.jax

    logits, targets = arrays
    with torch.autograd.set_detect_anomaly(True, check_nan=False), pytest.raises(RefusedInput) as heard:
        ops.cross_entropy(*problem((6, 8)))
    with jax.debug_nans(True):
        with pytest.raises(RefusedInput) as caught:
            fuselm.jax.cross_entropy(logits, targets)
        traced = jax.jit(fuselm.jax.cross_entropy)(logits, targets)
    assert str(caught.value) == str(heard.value)
    np.testing.assert_allclose(traced, fuselm.jax.cross_entropy(logits, targets), rtol=1e-6)


def test_jax_refuses_a_second_derivative_at_once(jax: Any, arrays: Any) -> None:
    import fuselm.jax

    logits, targets = arrays

    def loss(x: Any) -> Any:
        return fuselm.jax.cross_entropy(x, targets)

    for twice in (jax.hessian(loss), jax.grad(lambda x: jax.grad(loss)(x).sum())):
        with pytest.raises(TypeError, match="has one derivative"):
            twice(logits)


def test_jax_takes_numpy_arrays_and_an_ignore_index_of_any_size(jax: Any) -> None:
    import fuselm.jax

    logits, targets = problem((6, 8))
    expected = ops.cross_entropy(logits, targets).numpy()
    for index in (-100, 2**40):
        found = fuselm.jax.cross_entropy(logits.numpy(), targets.int().numpy(), ignore_index=index)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("wrong", [None, [1.0], torch.ones(8)])
def test_jax_names_what_is_no_array(jax: Any, arrays: Any, wrong: Any) -> None:
    import fuselm.jax

    with pytest.raises(RefusedInput, match="logits must be a jax or numpy array; got a " + type(wrong).__name__):
        fuselm.jax.cross_entropy(wrong, arrays[1])
    with pytest.raises(RefusedInput, match="targets must be a jax or numpy array"):
        fuselm.jax.cross_entropy(arrays[0], wrong)


@over_reductions
@pytest.mark.parametrize("shape", [(7,), (40, 7), (3, 20, 7), (2, 1, 9, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_the_rows_have_the_bits_of_all_of_them(
    shape: tuple[int, ...], dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets = problem(shape, dtype=dtype) if len(shape) > 1 else (torch.randn(7).to(dtype), torch.tensor(3))
    apart = logits.mT.contiguous().mT if len(shape) > 1 else logits
    options = [{"reduction": reduction, "inplace": inplace, **ALL} for inplace in (False, True)]
    whole = [gradient(logits, targets, 0.5, **each) for each in options]
    for part in (1, 7, 50, 200):  # elements; rows of these shapes have seven
        monkeypatch.setattr(cross_entropy_plain, "PART", part)
        for given in (logits, apart):
            for each, (loss, dlogits) in zip(options, whole, strict=True):
                found = gradient(given, targets, 0.5, **each)
                assert torch.equal(found[0], loss)
                assert torch.equal(found[1], dlogits)
