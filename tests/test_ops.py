"""The choice of implementations, and ops as the model calls them against float64 formulas, gradients included.

Formulas are those of tests/torchlm/oracle.py, written apart from the ops' own; gradients come from their differences.
Every corner of every op is tested in tests/kernels, AdamW in test_optim.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselm import ops
from fuselm.kernels import torch_ops
from fuselm.kernels.spec import op_names
from fuselm.kernels.torch_ops import choose as choosing
from fuselm.kernels.torch_ops.choose import GOES_WITH
from tests.torchlm import oracle

Arrays = dict[str, np.ndarray]
NAMES = tuple(name for name in ops.__all__ if name not in ("Ops", "choose"))


def arrays(**shapes: tuple[int, ...]) -> Arrays:
    """Random numbers that fp32 holds exactly, in float64."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32).astype(np.float64) for name, shape in shapes.items()}


def assert_op(
    op: Callable[..., Any], formula: Callable[..., Any], inputs: Arrays, atol: float = 2e-6, **constants: Any
) -> None:
    """Results are the formula's, and for a random gradient coming in, so are the gradients of every input."""
    tensors = {name: torch.tensor(array, dtype=torch.float32, requires_grad=True) for name, array in inputs.items()}
    given = {
        name: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for name, value in constants.items()
    }
    found, expected = op(**tensors, **given), formula(**inputs, **constants)
    found, expected = (one if isinstance(one, tuple) else (one,) for one in (found, expected))
    rng = np.random.default_rng(99)
    weights = [rng.standard_normal(np.shape(one)).astype(np.float32).astype(np.float64) for one in expected]
    for mine, truth in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.detach().numpy(), truth, rtol=2e-6, atol=atol)
    sum((one * torch.tensor(w, dtype=torch.float32)).sum() for one, w in zip(found, weights, strict=True)).backward()

    def weighted(changed: oracle.Weights) -> float:
        results = formula(**changed, **constants)
        results = results if isinstance(results, tuple) else (results,)
        return sum(float((one * w).sum()) for one, w in zip(results, weights, strict=True))

    for name, tensor in tensors.items():
        assert tensor.grad is not None, name
        truth = oracle.gradient(weighted, inputs, name)
        np.testing.assert_allclose(tensor.grad.numpy(), truth, rtol=1e-5, atol=5 * atol, err_msg=f"gradient of {name}")


# ---- names and choices ----------------------------------------------------------------------------------------------


def test_every_name_is_an_op_from_the_file_that_it_is_said_to_be_in() -> None:
    assert len(set(ops.__all__)) == len(ops.__all__)
    assert set(op_names()) <= set(NAMES)
    for name in NAMES:
        function = getattr(ops, name)
        assert (function.__name__, function.__module__) == (name, choosing.home(name))
        assert function.__doc__
    assert dir(ops) == sorted(ops.__all__)


def test_an_unknown_op_is_an_attribute_error_that_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"fuselm.ops has no op 'softmin'; it has .*\bsoftmax\b"):
        _ = ops.softmin
    with pytest.raises(AttributeError, match=r"fuselm has no op 'softmin'; it has .*\bsoftmax\b"):
        _ = ops.choose("auto").softmin


def test_auto_is_what_fuselm_ops_has_and_torch_is_the_plain_formula() -> None:
    auto, reference = ops.choose("auto"), ops.choose("torch")
    for name in NAMES:
        assert getattr(auto, name) is getattr(ops, name)
        assert getattr(reference, name) is not getattr(auto, name)
        assert reference.impls[name] == "torch"
    assert reference.rms_norm.__name__ == "rms_norm_reference"
    assert set(auto.impls) == set(reference.impls) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_putting_one_op_back_changes_that_op_alone(name: str) -> None:
    """And what is the same of views."""
    auto, reference, mixed = ops.choose("auto"), ops.choose("torch"), ops.choose("auto", {name: "torch"})
    for other in NAMES:
        expected = reference if other == name or GOES_WITH.get(other) == name else auto
        assert getattr(mixed, other) is getattr(expected, other)
        assert mixed.impls[other] == expected.impls[other]


def test_what_goes_with_an_op_can_be_told_apart_from_it() -> None:
    mixed = ops.choose("torch", {"rope": "torch", "rope_qkv": "auto"})
    assert (mixed.rope.__name__, mixed.rope_qkv.__name__) == ("rope_reference", "rope_qkv")


def test_one_op_alone_can_have_its_kernel() -> None:
    mixed = ops.choose("torch", {"rms_norm": "auto"})
    assert mixed.rms_norm is ops.rms_norm
    assert all(getattr(mixed, name) is getattr(ops.choose("torch"), name) for name in NAMES if name != "rms_norm")


def test_fused_is_refused_where_no_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in (("fused",), ("auto", {"rms_norm": "fused"})):
        with pytest.raises(ValueError, match=r"need a CUDA device; this is a machine without a GPU. Use impl 'auto'"):
            ops.choose(*arguments)
    with pytest.raises(ValueError, match=r"need a CUDA device; this is cpu. Use impl 'auto'"):
        ops.choose("fused", device="cpu")


def test_fused_is_refused_where_the_kernels_could_not_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_ops, "load_cuda", lambda: True)
    monkeypatch.setattr(torch_ops, "cuda_state", lambda: "plain")
    with pytest.raises(ValueError, match=r"needs the kernels built; they could not be. `fuselm doctor` says why"):
        ops.choose("fused", device="cuda:0")


def test_fused_takes_the_kernels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch_ops, "load_cuda", lambda: True)
    monkeypatch.setattr(torch_ops, "cuda_state", lambda: "fused")
    fused = ops.choose("fused")
    assert fused.rms_norm is ops.rms_norm
    assert fused.impls == dict.fromkeys(NAMES, "fused")
    assert ops.choose("fused", {"rms_norm": "torch"}).impls["rms_norm"] == "torch"


@pytest.mark.parametrize(
    ("impl", "overrides", "words"),
    [
        ("fast", {}, "one of auto, fused, torch; got 'fast' for every op"),
        ("auto", {"softmax": "fast"}, "one of auto, fused, torch; got 'fast' for softmax"),
        ("auto", {"softmin": "torch"}, r"no op 'softmin' to choose for; there are .*\bsoftmax\b"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(impl: str, overrides: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.choose(impl, overrides)


# ---- norms ----------------------------------------------------------------------------------------------------------


def layer_norm(
    x: np.ndarray, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5, residual: np.ndarray | None = None
) -> Any:
    total = x if residual is None else x + residual
    y = oracle.layer_norm(total, weight, bias, eps)
    return y if residual is None else (y, total)


@pytest.mark.parametrize("names", [(), ("weight",), ("weight", "bias")], ids=["bare", "weight", "bias"])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm_is_its_formula(names: tuple[str, ...], with_residual: bool, eps: float) -> None:
    """With a residual the gradient is that of both results: the norm, and the sum that goes on."""
    shapes: dict[str, tuple[int, ...]] = {"x": (2, 3, 8)} | dict.fromkeys(names, (8,))
    inputs = arrays(**(shapes | ({"residual": (2, 3, 8)} if with_residual else {})))
    assert_op(ops.layer_norm, layer_norm, inputs, eps=eps)


def test_layer_norm_without_an_eps_has_torchs() -> None:
    x = torch.tensor([[0.0, 0.002]])
    np.testing.assert_allclose(ops.layer_norm(x).numpy(), layer_norm(x.double().numpy()), rtol=1e-5)


# ---- losses ---------------------------------------------------------------------------------------------------------


TARGETS = np.array([[3, 0, -100, 1], [2, -100, 4, 4]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z": {"z_loss": 0.2},
    "softcap": {"softcap": 1.5},
    "ignore-4": {"ignore_index": 4, "targets": np.where(TARGETS == -100, 4, TARGETS)},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0},
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy_is_its_formula(name: str, reduction: str) -> None:
    options = {"targets": TARGETS, **OPTIONS[name]}
    assert_op(ops.cross_entropy, oracle.cross_entropy, arrays(logits=(2, 4, 5)), reduction=reduction, **options)


def linear_cross_entropy(
    hidden: np.ndarray, weight: np.ndarray, bias: np.ndarray | float = 0.0, **options: Any
) -> np.ndarray:
    options.pop("max_bytes", None)
    return oracle.cross_entropy(hidden @ weight.T + bias, **options)


@pytest.mark.parametrize("max_bytes", [None, 1, 60, 10_000], ids=["whole", "a-row", "3-rows", "room-enough"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["plain", "ignore-4", "all"])
def test_linear_cross_entropy_is_its_formula_in_any_number_of_blocks(
    name: str, reduction: str, max_bytes: int | None
) -> None:
    options = {"targets": TARGETS, **OPTIONS[name], "reduction": reduction, "max_bytes": max_bytes}
    inputs = arrays(hidden=(2, 4, 3), weight=(5, 3))
    assert_op(ops.linear_cross_entropy, linear_cross_entropy, inputs, **options)
    assert_op(ops.linear_cross_entropy, linear_cross_entropy, {**inputs, **arrays(bias=(5,))}, **options)


@pytest.mark.parametrize("max_bytes", [None, 40])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_no_target_is_0_and_so_are_its_gradients(reduction: str, max_bytes: int | None) -> None:
    targets = torch.full((6,), -100)
    hidden, weight, logits = (torch.randn(*shape, requires_grad=True) for shape in ((6, 3), (5, 3), (6, 5)))
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": reduction}
    losses = (
        ops.cross_entropy(logits, targets, **options),
        ops.linear_cross_entropy(hidden, weight, targets, max_bytes=max_bytes, **options),
    )
    assert [loss.item() for loss in losses] == [0.0, 0.0]
    sum(losses).backward()
    for leaf in (hidden, weight, logits):
        assert leaf.grad is not None
        assert not leaf.grad.any()


# ---- embedding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "positions", [None, [5, 0, 2], [[5, 0, 2], [1, 1, 4]]], ids=["from-0", "of-all", "of-each-row"]
)
def test_embedding_is_a_look_up_of_words_and_places(positions: Any) -> None:
    """Word 3 comes three times, and its gradient is the sum of all three."""
    ids = np.array([[3, 1, 3], [0, 3, 2]])
    assert_op(ops.embedding, oracle.embedding, arrays(weight=(5, 4)), ids=ids)
    where: dict[str, Any] = {} if positions is None else {"positions": np.array(positions)}
    assert_op(ops.embedding, oracle.embedding, arrays(weight=(5, 4), position_weight=(6, 4)), ids=ids, **where)


# ---- rope -----------------------------------------------------------------------------------------------------------

HEAD, PLACES = 6, 10
ANGLES = np.outer(np.arange(PLACES), 30.0 ** (-np.arange(HEAD // 2) / 3))  # [S, H/2]
TABLES = {name: f(ANGLES).astype(np.float32).astype(np.float64) for name, f in (("cos", np.cos), ("sin", np.sin))}


def fp32(**constants: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in constants.items()}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "positions", [None, [4, 0, 9], [[1, 2, 3], [7, 5, 7]]], ids=["from-0", "of-all", "of-each-row"]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_is_its_formula(interleaved: bool, positions: Any, normed: bool) -> None:
    """Two query heads to a key head; with weights, q and k are normed first."""
    more: dict[str, Any] = {"interleaved": interleaved} | (
        {} if positions is None else {"positions": np.array(positions)}
    )
    shapes: dict[str, tuple[int, ...]] = {"q": (2, 3, 2, HEAD), "k": (2, 3, 1, HEAD)}
    if normed:
        shapes |= {"q_weight": (HEAD,), "k_weight": (HEAD,)}
        more["eps"] = 0.01

    def op(**given: Any) -> Any:
        return ops.rope(**{**given, "cos": given["cos"].float(), "sin": given["sin"].float()})

    assert_op(op, oracle.rope, arrays(**shapes), **TABLES, **more)


def qk(seed: int = 0, tokens: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, 4, HEAD, generator=generator), torch.randn(2, tokens, 2, HEAD, generator=generator)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_back_restores(interleaved: bool) -> None:
    cos, sin = fp32(**TABLES).values()
    q, k = qk()
    there = ops.rope(q, k, cos, sin, interleaved=interleaved)
    back = ops.rope(*there, cos, -sin, interleaved=interleaved)
    assert (there[0][:, 1:] - q[:, 1:]).abs().min(dim=1).values.max() > 0.1
    torch.testing.assert_close(back, (q, k), rtol=0, atol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_distances_alone(interleaved: bool) -> None:
    cos, sin = fp32(**TABLES).values()
    q, k = qk()
    products = []
    for start in (0, 1, 5):
        a, b = ops.rope(q, k, cos, sin, positions=torch.arange(start, start + 5), interleaved=interleaved)
        products.append(torch.einsum("btnh,bsnh->bnts", a[:, :, :2], b))
    torch.testing.assert_close(products[1], products[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(products[2], products[0], rtol=0, atol=5e-6)
    unturned = torch.einsum("btnh,bsnh->bnts", q[:, :, :2], k)
    assert (products[0] - unturned).abs().max() > 0.5


def test_both_ways_to_pair_are_one_permutation_apart() -> None:
    cos, sin = fp32(**TABLES).values()
    q, k = qk()
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # pairs (i, i + 3) become neighbours
    halves, neighbours = ops.rope(q, k, cos, sin), ops.rope(q[..., order], k[..., order], cos, sin, interleaved=True)
    for one, other in zip(halves, neighbours, strict=True):
        assert torch.equal(one[..., order], other)


def test_in_place_rope_writes_over_what_it_was_given() -> None:
    cos, sin = fp32(**TABLES).values()
    q, k = qk()
    expected = ops.rope(q, k, cos, sin)
    assert not torch.equal(expected[0], q)
    found = ops.rope(q, k, cos, sin, inplace=True)
    assert found[0] is q
    assert found[1] is k
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


# ---- activations ----------------------------------------------------------------------------------------------------


def scaled(inputs: Arrays) -> Arrays:
    """From tiny to where an activation is flat, either side of 0."""
    return {name: (3 * array).astype(np.float32).astype(np.float64) for name, array in inputs.items()}


@pytest.mark.parametrize(
    ("op", "formula", "options"),
    [
        ("gelu", oracle.gelu, {}),
        ("gelu", oracle.tanh_gelu, {"approximate": "tanh"}),
        ("silu", oracle.silu, {}),
        ("relu2", oracle.relu2, {}),
    ],
    ids=["gelu", "gelu-tanh", "silu", "relu2"],
)
def test_activations_are_their_formulas(op: str, formula: Any, options: dict[str, Any]) -> None:
    inputs = scaled(arrays(x=(4, 10)))
    assert_op(lambda x: getattr(ops, op)(x, **options), formula, inputs, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "formula", "options"),
    [
        ("swiglu", oracle.silu, {}),
        ("geglu", oracle.gelu, {}),
        ("geglu", oracle.tanh_gelu, {"approximate": "tanh"}),
    ],
    ids=["swiglu", "geglu", "geglu-tanh"],
)
def test_gated_activations_are_their_formulas_packed_or_not(op: str, formula: Any, options: dict[str, Any]) -> None:
    def gated(gate: np.ndarray, up: np.ndarray | None = None) -> np.ndarray:
        gate, up = (gate[..., :4], gate[..., 4:]) if up is None else (gate, up)
        return formula(gate) * up

    def ours(**given: Tensor) -> Tensor:
        return getattr(ops, op)(**given, **options)

    assert_op(ours, gated, scaled(arrays(gate=(5, 4), up=(5, 4))), atol=1e-5)
    assert_op(ours, gated, scaled(arrays(gate=(5, 8))), atol=1e-5)


def test_add_and_mul_broadcast() -> None:
    inputs = arrays(x=(2, 3, 4), y=(3, 1))
    assert_op(ops.add, lambda x, y: x + y, inputs)
    assert_op(ops.add, lambda x, y, scale: x + scale * y, inputs, scale=-0.5)
    assert_op(ops.mul, lambda x, y: x * y, inputs)


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "op",
    [
        lambda x: ops.softmax(x, scale=3.0, causal=True),
        lambda x: ops.layer_norm(x, torch.ones(64, dtype=x.dtype), torch.ones(64, dtype=x.dtype)),
        lambda x: ops.layer_norm(x, torch.full((64,), 1.001), torch.full((64,), 0.3)),
        lambda x: ops.rope(x[None], x[None], *(torch.linspace(0, 1, 32 * 64).view(64, 32) for _ in "cs"))[0],
        lambda x: ops.swiglu(x),
    ],
    ids=["softmax", "layer_norm", "layer_norm-fp32-weights", "rope", "swiglu"],
)
def test_16_bit_results_are_rounded_once_and_keep_their_dtype(op: Any, dtype: torch.dtype) -> None:
    x = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = op(x.float()).to(dtype)
    found = op(x)
    assert found.dtype == dtype
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps > 0).double().mean() < 0.01


def test_a_loss_of_16_bit_logits_is_fp32() -> None:
    logits = (10 * torch.randn(50, 30, generator=torch.Generator().manual_seed(0))).half()
    targets = torch.arange(50) % 30
    found = ops.cross_entropy(logits, targets)
    assert found.dtype == torch.float32
    expected = oracle.cross_entropy(logits.double().numpy(), targets.numpy())
    assert found.item() == pytest.approx(float(expected), rel=1e-6)


def test_without_jax_its_ops_say_what_to_install() -> None:
    program = "import sys; sys.modules['jax'] = None; from fuselm import jax; jax.softmax"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ModuleNotFoundError: fuselm.jax.softmax needs JAX" in ended.stderr
    assert "pip install -e '.[jax]'" in ended.stderr
