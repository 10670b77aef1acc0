"""fuselm.nn's Embedding, GELU, SiLU, SwiGLU and RotaryEmbedding: as torch's where torch has them, else as the formula.

Knows torch and fuselm.nn. Norms and losses are in test_nn.py; what the ops compute in every corner in tests/kernels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fuselm.nn
from fuselm import ops
from fuselm.kernels.spec import Tolerance
from tests.kernels.arrays import assert_within_rule, error, to_numpy

F32, BF16 = torch.float32, torch.bfloat16
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
in_both = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return request.param


on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)


def drawn(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", seed: int = 0) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def with_gradients(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of all inputs for one that was drawn."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    y = function(*leaves)
    cotangent = drawn(*y.shape, dtype=y.dtype, device=str(y.device), seed=9)
    return [y.detach(), *torch.autograd.grad(y, leaves, cotangent)]


def assert_as_exact(ours: Callable[..., Any], theirs: Callable[..., Any], *inputs: Tensor) -> None:
    """The house's error rule for a result and its gradients, with torch's as the reference."""
    wide = [one.float() for one in inputs]
    columns = [
        with_gradients(ours, *inputs),
        with_gradients(theirs, *inputs),
        with_gradients(theirs, *(one.double() for one in inputs)),
        with_gradients(theirs, *wide),
    ]
    for index, (found, reference, exact, plain) in enumerate(zip(*columns, strict=True)):
        noise = error(to_numpy(plain), to_numpy(exact))
        values = (to_numpy(one) for one in (found, reference, exact))
        assert_within_rule(f"result {index}", *values, Tolerance(), noise, groups=found.numel())


# ---- embedding -------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[3, 1, 3], [0, 9, 2]])


def tables(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    """Our module and torch's with the same weight."""
    theirs = torch.nn.Embedding(*arguments, **options)
    ours = fuselm.nn.Embedding(*arguments, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def gradient_of(module: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    rows = module(ids)
    cotangent = drawn(*rows.shape, device=str(rows.device)).to(rows.dtype)
    (gradient,) = torch.autograd.grad(rows, module.weight, cotangent)
    return rows.detach(), gradient


@on_each_device
@in_both
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_an_embedding_and_its_gradient_are_torchs(device: str, dtype: torch.dtype, padding_idx: int | None) -> None:
    ours, theirs = tables(10, 8, padding_idx=padding_idx, dtype=dtype)
    for ids in (IDS, IDS[0], IDS[0, 0], IDS.int(), IDS[:, :0], IDS.t()):
        found, right = (gradient_of(module.to(device), ids.to(device)) for module in (ours, theirs))
        assert torch.equal(found[0], right[0])
        torch.testing.assert_close(found[1], right[1], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        if padding_idx is not None:
            assert not found[1][padding_idx].any()


def test_an_embeddings_state_arguments_and_words_are_torchs() -> None:
    for arguments, options in (((10, 8), {}), ((10, 8, 3), {}), ((10, 8), {"padding_idx": -2, "dtype": BF16})):
        ours, theirs = tables(*arguments, **options)
        assert repr(ours) == repr(theirs)
        assert (ours.padding_idx, ours.weight.dtype) == (theirs.padding_idx, theirs.weight.dtype)
        assert {name: value.shape for name, value in ours.state_dict().items()} == {"weight": (10, 8)}
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert isinstance(ours, torch.nn.Embedding)
    module = fuselm.nn.Embedding(10, 8, device="meta", dtype=BF16, out_dtype=F32)
    assert (module.weight.device.type, module.weight.dtype) == ("meta", BF16)
    assert repr(module) == "Embedding(10, 8, out_dtype=torch.float32)"


def test_a_fresh_embedding_starts_as_torchs() -> None:
    found = []
    for home in (fuselm.nn, torch.nn):
        torch.manual_seed(3)
        found.append(home.Embedding(20, 6, padding_idx=4).weight.detach())
    assert torch.equal(*found)
    assert not found[0][4].any()


@on_each_device
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [(F32, BF16), (F32, torch.float16), (BF16, F32), (BF16, BF16)], ids=str
)
def test_rows_come_in_the_dtype_asked_for_and_gradients_in_the_weights(
    device: str, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    ours, theirs = tables(10, 8, padding_idx=1, dtype=dtype)
    ours = copy.deepcopy(ours).to(device)
    ours.out_dtype = out_dtype
    rows, gradient = gradient_of(ours, IDS.to(device))
    assert (rows.dtype, gradient.dtype) == (out_dtype, dtype)
    assert torch.equal(rows.cpu(), theirs.weight[IDS].to(out_dtype))
    assert not gradient[1].any()
    again = fuselm.nn.Embedding(10, 8, _weight=ours.weight.detach(), padding_idx=1, out_dtype=out_dtype)
    assert torch.equal(again(IDS.to(device)), rows)


def test_a_pretrained_table_is_frozen_or_not_as_in_torch() -> None:
    weight = drawn(10, 8)
    for options in ({}, {"freeze": False}, {"padding_idx": 2}):
        ours, theirs = (home.Embedding.from_pretrained(weight, **options) for home in (fuselm.nn, torch.nn))
        assert type(ours) is fuselm.nn.Embedding
        assert repr(ours) == repr(theirs)
        assert ours.weight.requires_grad == theirs.weight.requires_grad
        assert ours.out_dtype is None
        assert torch.equal(ours(IDS), weight[IDS])


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 1.0},
        {"max_norm": 0.0},
        {"sparse": True},
        {"scale_grad_by_freq": True},
        {"sparse": True, "max_norm": 2.0},
    ],
)
def test_what_an_embedding_here_cannot_do_is_refused(options: dict[str, Any]) -> None:
    names = " and ".join(name for name in ("max_norm", "scale_grad_by_freq", "sparse") if name in options)
    with pytest.raises(ValueError, match=f"^Embedding: .* are not here; got {names}. Use torch.nn.Embedding."):
        fuselm.nn.Embedding(10, 8, **options)


@pytest.mark.parametrize("padding_idx", [np.int64(3), np.int32(-7), torch.tensor(3)], ids=repr)
def test_a_padding_idx_may_be_whatever_counts(padding_idx: Any) -> None:
    module, right = fuselm.nn.Embedding(10, 8, padding_idx=padding_idx), fuselm.nn.Embedding(10, 8, padding_idx=3)
    right.load_state_dict(module.state_dict())
    assert (type(module.padding_idx), repr(module)) == (int, repr(right))
    assert not module.weight[3].any()
    for found, expected in zip(gradient_of(module, IDS), gradient_of(right, IDS), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("padding_idx", [True, "last", 1.5, [1]], ids=repr)
def test_a_padding_idx_that_does_not_count_is_refused(padding_idx: Any) -> None:
    words = r"^Embedding: padding_idx must be a whole number, a row of the table; got .* leave padding_idx out\.$"
    with pytest.raises(ValueError, match=words):
        fuselm.nn.Embedding(10, 8, padding_idx=padding_idx)


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.int32, "float64", float, 7], ids=repr)
def test_rows_of_no_dtype_that_a_table_may_have_are_refused_at_once(out_dtype: Any) -> None:
    words = r"^Embedding: out_dtype must be torch\.float32, torch\.float16 or torch\.bfloat16; got .*\. Leave it out"
    with pytest.raises(ValueError, match=words):
        fuselm.nn.Embedding(10, 8, out_dtype=out_dtype)
    by_name: Any = "bfloat16"  # as ops.embedding takes it
    assert fuselm.nn.Embedding(10, 8, out_dtype=by_name)(IDS).dtype == BF16


def test_an_id_that_the_table_has_no_row_for_is_refused() -> None:
    for wrong in (10, -1):
        with pytest.raises((ValueError, IndexError)):
            fuselm.nn.Embedding(10, 8)(torch.tensor([0, wrong]))


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_an_embedding_compiles_without_a_break() -> None:
    torch.compiler.reset()
    module = fuselm.nn.Embedding(10, 8, padding_idx=3, out_dtype=BF16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, right = (gradient_of(one, IDS) for one in (module, copy.deepcopy(module)))
    assert torch.equal(compiled(IDS), right[0])
    (gradient,) = torch.autograd.grad(compiled(IDS).float().sum(), module.weight)
    assert not gradient[3].any()
    assert torch.equal(found[1], right[1])


# ---- activations -----------------------------------------------------------------------------------------------------

ACTIVATIONS = [("GELU", {}), ("GELU", {"approximate": "tanh"}), ("SiLU", {})]


@on_each_device
@in_both
@pytest.mark.parametrize(("kind", "options"), ACTIVATIONS, ids=["gelu", "gelu-tanh", "silu"])
def test_an_activation_and_its_gradient_are_as_exact_as_torchs(
    device: str, dtype: torch.dtype, kind: str, options: dict[str, Any]
) -> None:
    ours, theirs = (getattr(home, kind)(**options) for home in (fuselm.nn, torch.nn))
    for x in (drawn(31, 33, dtype=dtype, device=device), drawn(6, 40, dtype=dtype, device=device)[:, 3:20]):
        assert_as_exact(ours, theirs, x)
    assert ours(drawn(0, 4, device=device)).shape == (0, 4)


@pytest.mark.parametrize(("kind", "options"), ACTIVATIONS, ids=["gelu", "gelu-tanh", "silu"])
def test_an_activations_state_and_words_are_torchs(kind: str, options: dict[str, Any]) -> None:
    ours, theirs = (getattr(home, kind)(**options) for home in (fuselm.nn, torch.nn))
    assert repr(ours) == repr(theirs)
    assert ours.state_dict() == {}
    assert isinstance(ours, type(theirs))


def test_what_an_activation_here_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^SiLU: .*; got inplace=True\. Leave it out\."):
        fuselm.nn.SiLU(inplace=True)
    assert repr(fuselm.nn.SiLU(inplace=False)) == "SiLU()"
    with pytest.raises((ValueError, RuntimeError), match="approximate"):
        fuselm.nn.GELU(approximate="cubic")(drawn(3))


@on_each_device
@in_both
def test_swiglu_is_its_formula_of_two_tensors_or_of_two_halves(device: str, dtype: torch.dtype) -> None:
    """As exact as torch's two ops, of which the first rounds before the second."""
    module = fuselm.nn.SwiGLU()

    def formula(gate: Tensor, up: Tensor | None = None) -> Tensor:
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return torch.nn.functional.silu(gate) * up

    packed = drawn(9, 5, 66, dtype=dtype, device=device)
    assert_as_exact(module, formula, packed)
    assert_as_exact(module, formula, *(half.contiguous() for half in packed.chunk(2, dim=-1)))
    assert torch.equal(module(packed), module(*packed.chunk(2, dim=-1)))
    assert module.state_dict() == {}


def test_a_gate_that_is_no_two_halves_is_refused() -> None:
    for wrong in (drawn(3, 7), (drawn(3, 4), drawn(3, 5))):
        with pytest.raises((ValueError, RuntimeError)):
            fuselm.nn.SwiGLU()(*(wrong if isinstance(wrong, tuple) else (wrong,)))


# ---- rotary embedding ------------------------------------------------------------------------------------------------

HEAD = 8


def heads(tokens: int = 5, dtype: torch.dtype = F32, device: str = "cpu") -> tuple[Tensor, Tensor]:
    shapes = ((2, tokens, 4, HEAD), (2, tokens, 2, HEAD))
    q, k = (drawn(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(shapes))
    return q, k


def turned(x: Tensor, positions: Tensor, base: float, interleaved: bool) -> Tensor:
    """By complex numbers, in float64: a pair (a, b) is a + bi, turned by position * base^(-2 i / H)."""
    wide = x.double()
    pairs = wide.unflatten(-1, (-1, 2)) if interleaved else torch.stack(wide.chunk(2, dim=-1), dim=-1)
    places = positions.double().expand(x.shape[:2])[:, :, None, None]  # [B, T, 1, 1]
    angles = places * base ** (-2 * torch.arange(HEAD // 2, dtype=torch.float64, device=x.device) / HEAD)
    result = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    return result.flatten(-2) if interleaved else torch.cat(result.unbind(-1), dim=-1)


@on_each_device
@in_both
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_queries_and_keys_turn_by_the_formula(device: str, dtype: torch.dtype, interleaved: bool, base: float) -> None:
    module = fuselm.nn.RotaryEmbedding(HEAD, 2048, base, interleaved=interleaved, device=device)
    given = heads(dtype=dtype, device=device)
    everywhere = torch.arange(5, device=device)
    for positions in (
        None,
        torch.tensor([7, 0, 2047, 3, 3]),
        torch.tensor([[5, 0, 2000, 1, 9], [1024, 3, 3, 7, 2047]]),
    ):
        there = None if positions is None else positions.to(device)
        found = module(*given, there)
        for x, y in zip(given, found, strict=True):
            right = turned(x, everywhere if there is None else there, base, interleaved)
            assert (y.dtype, y.shape) == (x.dtype, x.shape)
            torch.testing.assert_close(y.double(), right, rtol=torch.finfo(dtype).eps, atol=2e-6)


def test_an_angle_of_a_far_position_is_right_to_fp32() -> None:
    """In fp32 the angle itself would be off by 0.004 there."""
    module = fuselm.nn.RotaryEmbedding(HEAD, 100_001)
    exact = 100_000 * 10000.0 ** (-2 * 0 / HEAD), 100_000 * 10000.0 ** (-2 / HEAD)
    assert module.cos[-1, :2].tolist() == pytest.approx([math.cos(angle) for angle in exact], abs=1e-7)
    assert module.sin[-1, :2].tolist() == pytest.approx([math.sin(angle) for angle in exact], abs=1e-7)


@on_each_device
def test_gradients_turn_back(device: str) -> None:
    module = fuselm.nn.RotaryEmbedding(HEAD, device=device)
    q, k = (x.requires_grad_() for x in heads(device=device))
    rotated = module(q, k)
    gradients = torch.autograd.grad(rotated, (q, k), [x.detach() for x in rotated])
    torch.testing.assert_close(gradients, (q.detach(), k.detach()), rtol=0, atol=2e-6)


@on_each_device
def test_in_place_it_writes_over_what_it_was_given(device: str) -> None:
    module = fuselm.nn.RotaryEmbedding(HEAD, interleaved=True, device=device)
    expected = module(*heads(device=device))
    q, k = heads(device=device)
    found = module(q, k, inplace=True)
    assert (found[0].data_ptr(), found[1].data_ptr()) == (q.data_ptr(), k.data_ptr())
    for one, other in zip((q, k), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(BF16), lambda m: m.double(), lambda m: m.bfloat16().float()]
)
def test_tables_stay_what_they_are_in_a_model_of_another_dtype(cast: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), fuselm.nn.RotaryEmbedding(HEAD, 300))
    tables = model[1].cos.clone(), model[1].sin.clone()
    model = cast(model)
    assert model[0].weight.dtype == cast(torch.nn.Linear(1, 1)).weight.dtype
    for now, before in zip((model[1].cos, model[1].sin), tables, strict=True):
        assert now.dtype == F32
        assert torch.equal(now, before)
    assert {name for name, _ in model[1].named_buffers()} == {"cos", "sin"}
    found, right = model[1](*heads(dtype=BF16)), fuselm.nn.RotaryEmbedding(HEAD, 300)(*heads(dtype=BF16))
    assert torch.equal(found[0], right[0])


def test_tables_are_no_part_of_a_state() -> None:
    module = fuselm.nn.RotaryEmbedding(HEAD)
    assert module.state_dict() == {}
    module.load_state_dict({}, strict=True)
    assert list(module.parameters()) == []
    twin = copy.deepcopy(module)
    assert twin.cos.data_ptr() != module.cos.data_ptr()
    assert torch.equal(twin.cos, module.cos)


def test_tables_follow_to_another_device_and_come_back_from_none() -> None:
    """A model made without memory and given some gets its tables too, though no state dict has them."""
    module = fuselm.nn.RotaryEmbedding(HEAD, 50)
    right = module.cos.clone(), module.sin.clone()
    assert module.to("meta").cos.is_meta
    with torch.device("meta"):
        made = fuselm.nn.RotaryEmbedding(HEAD, 50)
    assert made.cos.is_meta
    assert made.half().cos.dtype == F32
    whole = fuselm.nn.RotaryEmbedding(HEAD, 50)  # beside parameters that have no memory yet
    for empty in (module, made, fuselm.nn.RotaryEmbedding(HEAD, 50, device="meta"), whole):
        filled = empty.to_empty(device="cpu")
        assert filled.cos.dtype == F32
        assert torch.equal(filled.cos, right[0])
        assert torch.equal(filled.sin, right[1])


@pytest.mark.gpu
def test_tables_go_to_a_gpu_and_back_in_fp32() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    module = fuselm.nn.RotaryEmbedding(HEAD, 50)
    right = module.cos.clone()
    for move in (lambda m: m.cuda(), lambda m: m.to("cuda", BF16), lambda m: m.half().cuda()):
        moved = move(copy.deepcopy(module))
        assert (moved.cos.device.type, moved.cos.dtype) == ("cuda", F32)
        assert torch.equal(moved.cpu().cos, right)
    with torch.device("cuda"):
        assert fuselm.nn.RotaryEmbedding(HEAD).sin.is_cuda


@pytest.mark.parametrize(
    "wrong",
    [{"head_dim": wrong} for wrong in (7, 0, -2, 514, 64.0, "64", None, True)]
    + [{"max_positions": wrong} for wrong in (0, -1, 10.5, 10.0, "10", None, True)]
    + [{"base": wrong} for wrong in (0.0, -1.0, math.nan, math.inf, 10**400, "x", None, True)],
    ids=str,
)
def test_tables_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    options = {"head_dim": HEAD, **wrong}
    (name, value), *_ = wrong.items()
    with pytest.raises(
        ValueError, match=rf"^RotaryEmbedding: head_dim is even .*; got .*{name}={value!r}[,.].* Pairs of"
    ):
        fuselm.nn.RotaryEmbedding(**options)


def test_sizes_may_be_whatever_counts_and_the_largest_head_turns() -> None:
    module = fuselm.nn.RotaryEmbedding(np.int64(HEAD), np.int32(5), np.float32(500.0))
    assert repr(module) == repr(fuselm.nn.RotaryEmbedding(HEAD, 5, 500.0))
    assert all(map(torch.equal, module(*heads()), fuselm.nn.RotaryEmbedding(HEAD, 5, 500.0)(*heads())))
    q = drawn(1, 3, 2, 512)
    assert fuselm.nn.RotaryEmbedding(512)(q, q)[0].shape == q.shape


def test_more_tokens_than_positions_and_other_heads_are_refused() -> None:
    module = fuselm.nn.RotaryEmbedding(HEAD, 4)
    with pytest.raises((ValueError, RuntimeError)):
        module(*heads(tokens=5))
    with pytest.raises((ValueError, RuntimeError)):
        fuselm.nn.RotaryEmbedding(HEAD + 2)(*heads())


def test_it_says_what_it_is() -> None:
    assert repr(fuselm.nn.RotaryEmbedding(64)) == "RotaryEmbedding(64, max_positions=2048, base=10000.0)"
    module = fuselm.nn.RotaryEmbedding(64, 8, 5e5, interleaved=True)
    assert repr(module) == "RotaryEmbedding(64, max_positions=8, base=500000.0, interleaved=True)"


@pytest.mark.filterwarnings("default")
def test_activations_and_rotation_compile_without_a_break() -> None:
    torch.compiler.reset()
    rotary, packed = fuselm.nn.RotaryEmbedding(HEAD), drawn(3, 6)
    layers = [fuselm.nn.GELU("tanh"), fuselm.nn.SiLU(), fuselm.nn.SwiGLU()]

    def whole(x: Tensor, q: Tensor, k: Tensor) -> Any:
        return [layer(x) for layer in layers], rotary(q, k)

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    found, right = (torch.utils._pytree.tree_leaves(one(packed, *heads())) for one in (compiled, whole))
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    assert ops.swiglu(packed).shape == (3, 3)
