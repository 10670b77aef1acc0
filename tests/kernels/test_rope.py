"""What rope promises beyond the generic suite: complex numbers, packed views, positions, in place, one token alone.

The generic suite carries the numbers and how q may lie. Here k lies anyhow too, heads are of any number, and tokens
have the same bits wherever they stand.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselm import ops
from fuselm.kernels import rope as contract
from fuselm.kernels.spec import DTYPE_EPS, RefusedInput
from fuselm.kernels.torch_ops.rope import rope_reference
from tests.kernels.arrays import LAYOUTS, lay_out
from tests.kernels.problems import DEVICES

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)
in_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
both_ways = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
normed_or_not = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def drawn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)


def tables(rows: int, width: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin of rows of positions, for heads of that width."""
    frequencies = 100.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def weights(width: int, normed: bool, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    if not normed:
        return {}
    return {f"{x}_weight": 1 + 0.3 * drawn(width, dtype=dtype, device=device, seed=7 + i) for i, x in enumerate("qk")}


# ---- what it computes ----------------------------------------------------------------------------------------------


def turned_as_complex(x: Tensor, places: np.ndarray, width: int, interleaved: bool) -> np.ndarray:
    """Each pair a complex number, times e^(i angle): [B, T, heads, H] at places [B, T]."""
    numbers = x.double().numpy()
    order = np.arange(width).reshape(-1, 2).T if interleaved else np.arange(width).reshape(2, -1)
    z = numbers[..., order[0]] + 1j * numbers[..., order[1]]
    angles = places[..., None, None] * 100.0 ** (-np.arange(width // 2) / (width // 2))  # [B, T, 1, H/2]
    z = z * np.exp(1j * angles)
    out = np.empty_like(numbers)
    out[..., order[0]], out[..., order[1]] = z.real, z.imag
    return out


@pytest.mark.parametrize("compiled", [False, True])
def test_the_eps_that_is_not_given_is_the_contracts(compiled: bool) -> None:
    """Of heads so small that it counts: torch.compile reads a literal in its place."""
    q, (cos, sin), by_weights = 1e-4 * drawn(1, 3, 2, 8), tables(3, 8), weights(8, True)
    rope = torch.compile(ops.rope, backend="aot_eager") if compiled else ops.rope
    found = rope(q, q, cos, sin, **by_weights)
    assert all(map(torch.equal, found, ops.rope(q, q, cos, sin, eps=contract.DEFAULT_EPS, **by_weights)))
    assert not torch.equal(found[0], ops.rope(q, q, cos, sin, eps=2.0**-22, **by_weights)[0])


@both_ways
@in_each_dtype
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1), (1, 5), (5, 3), (0, 2), (2, 0)], ids=str)
def test_rope_is_a_product_of_complex_numbers(heads: tuple[int, int], dtype: torch.dtype, interleaved: bool) -> None:
    q, k = (drawn(2, 6, count, 20, dtype=dtype, seed=count) for count in heads)
    cos, sin = tables(40, 20)
    positions = torch.tensor([[3, 39, 0, 7, 7, 1], [5, 4, 3, 2, 1, 0]])
    for given, places in (({}, np.arange(6) * np.ones((2, 1))), ({"positions": positions}, positions.numpy())):
        found = ops.rope(q, k, cos, sin, interleaved=interleaved, **given)
        for x, y in zip((q, k), found, strict=True):
            assert y.dtype == dtype
            right = turned_as_complex(x, places, 20, interleaved)
            step = DTYPE_EPS[str(dtype).removeprefix("torch.")]
            np.testing.assert_allclose(y.double().numpy(), right, rtol=step, atol=2e-6)


@both_ways
@normed_or_not
def test_turning_back_restores_what_was_turned(interleaved: bool, normed: bool) -> None:
    q, k = drawn(2, 9, 3, 64), drawn(2, 9, 2, 64, seed=1)
    cos, sin = tables(9, 64)
    there = ops.rope(q, k, cos, sin, interleaved=interleaved, **weights(64, normed))
    back = torch.ops.fuselm.rope_forward(*there, cos, sin, None, None, None, 1e-6, interleaved, True)[:2]
    expected = (q, k)
    if normed:
        norms = weights(64, True)
        expected = tuple(ops.rms_norm(x, norms[f"{name}_weight"]) for name, x in (("q", q), ("k", k)))
    torch.testing.assert_close(back, expected, rtol=0, atol=4e-6)


@on_each_device
@in_each_dtype
@normed_or_not
def test_both_ways_to_pair_are_one_permutation_apart(dtype: torch.dtype, normed: bool, device: str) -> None:
    q, k = drawn(2, 5, 4, 64, dtype=dtype, device=device), drawn(2, 5, 2, 64, dtype=dtype, device=device, seed=1)
    order = torch.arange(64).view(2, 32).T.reshape(-1).to(device)  # pairs (i, i + 32) become neighbours
    given = weights(64, normed, dtype, device)
    halves = ops.rope(q, k, *tables(5, 64, device), **given)
    permuted = {name: weight[order] for name, weight in given.items()}
    neighbours = ops.rope(q[..., order], k[..., order], *tables(5, 64, device), interleaved=True, **permuted)
    for one, other in zip(halves, neighbours, strict=True):
        if normed:  # added up in another order
            torch.testing.assert_close(one[..., order], other)
        else:
            assert torch.equal(one[..., order], other)


# ---- positions -----------------------------------------------------------------------------------------------------


@on_each_device
@in_each_dtype
@both_ways
@normed_or_not
@pytest.mark.parametrize("width", [6, 40, 64])
def test_positions_may_be_said_in_any_way(
    dtype: torch.dtype, interleaved: bool, normed: bool, width: int, device: str
) -> None:
    q, k = (drawn(3, 7, count, width, dtype=dtype, device=device, seed=count) for count in (4, 2))
    cos, sin = tables(11, width, device)
    places = torch.arange(7, device=device)
    given: dict[str, Any] = {"interleaved": interleaved, **weights(width, normed, dtype, device)}
    expected = ops.rope(q, k, cos, sin, **given)
    said = [places, places.int(), places.expand(3, 7), places.expand(3, 7).int().contiguous()]
    said.append(torch.stack((places, -places), dim=-1)[:, 0])  # with gaps between them
    for positions in said:
        found = ops.rope(q, k, cos, sin, positions=positions, **given)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("stray", "words"), [(-1, "position -1 at [1, 2]"), (5, "position 5 at [1, 2] for tables of 5 rows")]
)
@normed_or_not
@pytest.mark.parametrize("learns", [False, True])
def test_a_cpu_refuses_positions_that_the_tables_lack(stray: int, words: str, normed: bool, learns: bool) -> None:
    positions = torch.zeros(2, 3, dtype=torch.int64)
    positions[1, 2] = stray
    q, k = drawn(2, 3, 4, 8).requires_grad_(learns), drawn(2, 3, 2, 8)
    for rope in (ops.rope, rope_reference):
        with pytest.raises(RefusedInput) as caught:
            rope(q, k, *tables(5, 8), positions=positions, **weights(8, normed))
        assert words in str(caught.value)
        assert "at least 0 and below" in str(caught.value)


STRAYS = [0, -1, 4, 5, 2**31 - 1, -(2**31)]


@pytest.mark.gpu
@both_ways
@normed_or_not
@pytest.mark.parametrize("width", [6, 40, 64])
@pytest.mark.parametrize("copies", [1, 4000])
def test_a_gpu_has_no_number_at_positions_that_the_tables_lack(
    cuda: str, interleaved: bool, normed: bool, width: int, copies: int
) -> None:
    positions = torch.tensor(STRAYS).repeat(copies)
    q, k = drawn(2, 6 * copies, 4, width, device=cuda), drawn(2, 6 * copies, 2, width, device=cuda)
    for dtype in (torch.int32, torch.int64):
        sent = positions.to(cuda, dtype)
        found = ops.rope(
            q,
            k,
            *tables(5, width, cuda),
            positions=sent,
            interleaved=interleaved,
            **weights(width, normed, device=cuda),
        )
        inside = (sent >= 0) & (sent < 5)
        for y in found:
            assert y[:, inside].isfinite().all()
            assert y[:, ~inside].isnan().all()


@normed_or_not
def test_jax_has_no_number_at_positions_that_the_tables_lack(normed: bool, jax: ModuleType) -> None:
    import fuselm.jax

    q, k = drawn(2, 6, 4, 8).numpy(), drawn(2, 6, 2, 8).numpy()
    cos, sin = (table.numpy() for table in tables(5, 8))
    given = {name: weight.numpy() for name, weight in weights(8, normed).items()}
    for rows, kept in ((5, [0, 2]), (0, [])):
        found = fuselm.jax.rope(q, k, cos[:rows], sin[:rows], positions=np.asarray(STRAYS, np.int32), **given)
        for y in map(np.asarray, found):
            assert np.isfinite(y[:, kept]).all()
            assert np.isnan(np.delete(y, kept, axis=1)).all()


# ---- one token alone -----------------------------------------------------------------------------------------------


def with_gradients(x: dict[str, Tensor], sent: dict[str, Tensor], **given: Any) -> dict[str, Tensor]:
    """q and k turned, and their gradients."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in x.items()}
    found = dict(zip(("q_out", "k_out"), ops.rope(**leaves, **given), strict=True))
    gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), [sent[name] for name in x])
    return {name: tensor.detach() for name, tensor in found.items()} | dict(zip(("dq", "dk"), gradients, strict=True))


def token(tensors: dict[str, Tensor], row: int, place: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1, place : place + 1] for name, tensor in tensors.items()}


@on_each_device
@in_each_dtype
@both_ways
@normed_or_not
@pytest.mark.parametrize("width", [14, 64, 96, 128, 264])
def test_a_token_has_the_same_bits_alone_and_among_others(
    dtype: torch.dtype, interleaved: bool, normed: bool, width: int, device: str
) -> None:
    batch, tokens = (8, 700) if device == "cuda" else (3, 5)  # enough for the kernel for many
    shapes = {"q": (batch, tokens, 5, width), "k": (batch, tokens, 3, width)}
    x, sent = (
        {
            name: drawn(*shape, dtype=dtype, device=device, seed=seed + i)
            for i, (name, shape) in enumerate(shapes.items())
        }
        for seed in (0, 2)
    )
    cos, sin = tables(tokens, width, device)
    given: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved}
    given |= weights(width, normed, dtype, device)
    everything = with_gradients(x, sent, **given)
    for row, place in ((0, 0), (1, tokens - 1), (batch - 1, tokens // 2)):
        positions = torch.tensor([place], device=device)
        alone = with_gradients(token(x, row, place), token(sent, row, place), positions=positions, **given)
        for name, expected in token(everything, row, place).items():
            assert torch.equal(alone[name], expected), name


@on_each_device
@in_each_dtype
@both_ways
@normed_or_not
@pytest.mark.parametrize("heads", [(6, 2), (1, 3)], ids=str)
def test_how_q_and_k_lie_changes_no_bit(
    dtype: torch.dtype, interleaved: bool, normed: bool, heads: tuple[int, int], device: str
) -> None:
    for width in (6, 40, 64, 100, 256, 512):
        q, k, dq, dk = (drawn(2, 5, heads[i % 2], width, dtype=dtype, device=device, seed=i) for i in range(4))
        given: dict[str, Any] = dict(zip(("cos", "sin"), tables(5, width, device), strict=True))
        given |= {"interleaved": interleaved, **weights(width, normed, dtype, device)}
        expected = with_gradients({"q": q, "k": k}, {"q": dq, "k": dk}, **given)
        for one, other in zip(LAYOUTS, (*LAYOUTS[2:], *LAYOUTS[:2]), strict=True):
            x = {"q": lay_out(q, one), "k": lay_out(k, other)}
            found = with_gradients(x, {"q": lay_out(dq, other), "k": lay_out(dk, one)}, **given)
            for name, right in expected.items():
                assert torch.equal(found[name], right), (width, one, other, name)


@on_each_device
@normed_or_not
def test_how_tables_and_weights_lie_changes_no_bit(normed: bool, device: str) -> None:
    q, k = drawn(2, 5, 4, 64, device=device), drawn(2, 5, 2, 64, device=device)
    cos, sin = tables(5, 64, device)
    given = weights(64, normed, device=device)
    expected = ops.rope(q, k, cos, sin, **given)
    for layout in LAYOUTS:
        lying = {name: lay_out(weight, layout) for name, weight in given.items()}
        found = ops.rope(q, k, lay_out(cos, layout), lay_out(sin, layout), **lying)
        assert all(map(torch.equal, found, expected)), layout


# ---- packed, and in place ------------------------------------------------------------------------------------------


class Watched(TorchDispatchMode):
    """The names of all ops that are dispatched, and where rope's q and k lie."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.places: list[tuple[int, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        if func.namespace == "fuselm":
            self.places += [(x.data_ptr(), x.stride()) for x in args[:2]]
        return func(*args, **(kwargs or {}))


def packed_heads(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, N + 2 K, H] as one projection makes it, and q and k in it."""
    packed = drawn(2, 5, 4 + 2 + 2, 64, dtype=dtype, device=device)
    return packed, packed[:, :, :4], packed[:, :, 4:6]


@on_each_device
@pytest.mark.parametrize("inplace", [False, True])
def test_packed_views_are_read_where_they_lie(inplace: bool, device: str) -> None:
    packed, q, k = packed_heads(device)
    expected = ops.rope(q.clone(), k.clone(), *tables(5, 64, device))
    rest = packed[:, :, 6:].clone()
    with Watched() as watched:
        found = ops.rope(q, k, *tables(5, 64, device), inplace=inplace)
    assert watched.places == [(q.data_ptr(), q.stride()), (k.data_ptr(), k.stride())]
    assert [name for name in watched.names if "fuselm" in name] == [
        f"fuselm::rope_{'inplace' if inplace else 'forward'}"
    ]
    assert not any(word in name for name in watched.names for word in ("clone", "contiguous"))
    assert all(map(torch.equal, found, expected))
    assert torch.equal(packed[:, :, 6:], rest)
    assert torch.equal(packed[:, :, :4], expected[0]) == inplace


@on_each_device
@in_each_dtype
@both_ways
@normed_or_not
def test_in_place_gives_the_bits_of_out_of_place(
    dtype: torch.dtype, interleaved: bool, normed: bool, device: str
) -> None:
    for width, layout in ((64, "contiguous"), (64, "offset"), (40, "transposed"), (6, "columns"), (96, "strided")):
        q, k = (drawn(2, 5, count, width, dtype=dtype, device=device, seed=count) for count in (4, 3))
        given: dict[str, Any] = {"interleaved": interleaved, **weights(width, normed, dtype, device)}
        expected = ops.rope(q, k, *tables(5, width, device), **given)
        mine = lay_out(q, layout).clone(memory_format=torch.preserve_format), lay_out(k, layout)
        versions = [x._version for x in mine]
        found = ops.rope(*mine, *tables(5, width, device), inplace=True, **given)
        assert all(one is other for one, other in zip(found, mine, strict=True))
        assert all(map(torch.equal, found, expected)), (width, layout)
        assert all(x._version > before for x, before in zip(mine, versions, strict=True))


@on_each_device
@pytest.mark.parametrize("views", [False, True], ids=["whole", "views"])
@pytest.mark.parametrize("learning", ["qk", "q", "k"])
def test_gradients_flow_through_what_was_written_over(views: bool, learning: str, device: str) -> None:
    base = {name: drawn(2, 5, 4, 16, device=device, seed=i) for i, name in enumerate("qk")}
    sent = [drawn(2, 5, 2 if views else 4, 16, device=device, seed=9 + i) for i in range(2)]
    results = []
    for inplace in (False, True):
        leaves = {name: x.clone().requires_grad_(name in learning) for name, x in base.items()}
        made = {name: x * 2 for name, x in leaves.items()}
        parts = [x[:, :, 1:3] if views else x for x in made.values()]
        found = ops.rope(*parts, *tables(5, 16, device), inplace=inplace)
        used = [(y, g) for y, g in zip(found, sent, strict=True) if y.requires_grad]
        gradients = torch.autograd.grad(
            [y for y, _ in used], [leaves[name] for name in learning], [g for _, g in used], allow_unused=True
        )
        results.append((found, gradients))
        if inplace:
            assert all(one is other for one, other in zip(found, parts, strict=True))
            assert [y.requires_grad for y in found] == [name in learning for name in "qk"]
    for (out, gradients), (out_in_place, gradients_in_place) in [results]:
        assert all(map(torch.equal, out, out_in_place))
        assert all(map(torch.equal, gradients, gradients_in_place))


def test_in_place_with_weights_wants_no_gradients() -> None:
    q, k, cos, sin = drawn(2, 5, 4, 8), drawn(2, 5, 2, 8), *tables(5, 8)
    norms = weights(8, True)
    expected = ops.rope(q, k, cos, sin, **norms)
    for learner in (q, norms["q_weight"]):
        learner.requires_grad_()
        with pytest.raises(RefusedInput, match=r"since backward needs q and k as they were; .* torch.no_grad\(\)"):
            ops.rope(q * 1 if learner is q else q, k, cos, sin, inplace=True, **norms)
        learner.requires_grad_(False)
    with torch.no_grad():
        assert all(map(torch.equal, ops.rope(q.requires_grad_(), k, cos, sin, inplace=True, **norms), expected))


def test_what_cannot_be_written_over_is_refused_and_left_as_it_was() -> None:
    cos, sin = tables(5, 8)
    k = drawn(2, 5, 4, 8)
    leaf = drawn(2, 5, 4, 8).requires_grad_()
    split = (leaf * 1).split(2, dim=2)
    cases = [
        ((leaf, k), "a leaf that requires a gradient"),
        ((leaf[:, :, 1:], k), "nor over a view of one"),
        ((split[0], k), "by split or chunk"),
        ((drawn(2, 5, 1, 8).expand(2, 5, 4, 8), k), "several elements share a place"),
        ((k, drawn(2, 1, 2, 8).expand(2, 5, 2, 8)), "several elements share a place"),
        ((drawn(600).as_strided((2, 5, 4, 8), (100, 20, 4, 1)), k), "several elements share a place"),
        ((k, k), "share places in memory"),
        ((k, k[:, :, :2]), "share places in memory"),
        ((k[:, :, :3], k[:, :, 2:]), "share places in memory"),
    ]
    for given, words in cases:
        before = [x.detach().clone() for x in given]
        with pytest.raises(RefusedInput, match=f"inplace cannot write over .*{words}.* leave inplace out"):
            ops.rope(*given, cos, sin, inplace=True)
        assert all(map(torch.equal, given, before))


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_inplace_is_true_or_false(wrong: Any) -> None:
    with pytest.raises(RefusedInput, match="inplace must be True or False; got inplace of type"):
        ops.rope(drawn(1, 1, 1, 8), drawn(1, 1, 1, 8), *tables(5, 8), inplace=wrong)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("learns", [False, True])
def test_a_compiled_call_writes_over_its_arguments_too(learns: bool) -> None:
    q, k, cos, sin = drawn(2, 5, 4, 8), drawn(2, 5, 2, 8), *tables(5, 8)
    expected = ops.rope(q, k, cos, sin)
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k: ops.rope(q, k, cos, sin, inplace=True), fullgraph=True, backend="aot_eager")
    leaf = q.clone().requires_grad_(learns)
    mine, other = leaf * 1, k.clone()
    found = compiled(mine, other)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(mine, expected[0])
    assert torch.equal(other, expected[1])
    if learns:
        (gradient,) = torch.autograd.grad(found[0].sum(), leaf)
        whole = q.clone().requires_grad_()
        assert torch.equal(gradient, torch.autograd.grad(ops.rope(whole, k, cos, sin)[0].sum(), whole)[0])


@pytest.mark.filterwarnings("default")
@on_each_device
@normed_or_not
def test_the_raw_op_in_place_passes_opcheck(normed: bool, device: str) -> None:
    q, k = drawn(2, 5, 4, 16, device=device), drawn(2, 5, 2, 16, device=device)
    ops.rope(q, k, *tables(5, 16, device))  # what is built or loaded on first use is there now
    norms = weights(16, normed, device=device).values() if normed else (None, None)
    arguments = (q, k, *tables(5, 16, device), None, *norms, 1e-6, False, False, 0)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fuselm.rope_inplace.default, arguments, test_utils=checks)


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cos", "sin"])
@normed_or_not
def test_tables_that_want_a_gradient_are_refused(name: str, normed: bool) -> None:
    given = dict(zip(("cos", "sin"), tables(5, 8), strict=True))
    given[name].requires_grad_()
    q, k = drawn(2, 5, 4, 8), drawn(2, 5, 2, 8)
    with pytest.raises(RefusedInput, match=rf"have no gradient; got a {name} .* Pass {name}.detach\(\)"):
        ops.rope(q, k, **given, **weights(8, normed))
    with torch.no_grad():
        ops.rope(q, k, **given, **weights(8, normed))


def loss(rope: Any, **options: Any) -> Any:
    def of(q: Tensor) -> Tensor:
        turned = rope(q, q[:, :, :1], *tables(5, 8), **options)
        return sum((y**3).sum() for y in turned)

    return of


over_options = pytest.mark.parametrize(
    "options",
    [{}, {"interleaved": True, "positions": torch.tensor([4, 0, 2])}, weights(8, True), {"inplace": False}],
    ids=["plain", "positions", "normed", "named"],
)


@over_options
def test_forward_mode_derivatives_are_those_of_the_formula(options: dict[str, Any]) -> None:
    q, tangent = drawn(2, 3, 4, 8), drawn(2, 3, 4, 8, seed=1)
    found, right = (torch.func.jvp(loss(f, **options), (q,), (tangent,))[1] for f in (ops.rope, rope_reference))
    assert torch.allclose(found, right)
    assert found.abs() > 0


@over_options
@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.hessian, lambda f: torch.func.vmap(torch.func.grad(lambda q: f(q[None])))]
)
def test_function_transforms_give_what_the_formula_gives(transform: Any, options: dict[str, Any]) -> None:
    q = drawn(2, 3, 4, 8)
    found, right = (transform(loss(f, **options))(q) for f in (ops.rope, rope_reference))
    assert torch.allclose(found, right, atol=1e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize("wrong", [[1.0, 2.0], np.ones((1, 1, 1, 8), np.float32), 3.0])
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    good = {"q": drawn(1, 1, 1, 8), "k": drawn(1, 1, 1, 8), "cos": tables(5, 8)[0], "sin": tables(5, 8)[1]}
    for name in (*good, "positions"):
        with pytest.raises(RefusedInput, match=rf"{name} must be a torch\.Tensor; got a " + type(wrong).__name__):
            ops.rope(**(good | {name: wrong}))


def test_a_table_without_memory_is_refused() -> None:
    cos, sin = tables(5, 8)
    with pytest.raises(RefusedInput, match="one device"):
        ops.rope(drawn(1, 1, 1, 8), drawn(1, 1, 1, 8), cos, sin.to("meta"))


def test_cost_counts_every_tensor_once() -> None:
    (case,) = (case for case in contract.BENCH_CASES if case.name == "qk-norm" and case.shape[1] > 1)
    vectors = 4 * 1024 * (32 + 8)
    assert contract.cost(case, "forward").bytes == 2 * vectors * 256 + 1024 * 128 * 4 + 2 * 256
    assert contract.cost(case, "backward").bytes == 3 * vectors * 256 + 1024 * 128 * 4 + 4 * 256 + 4 * vectors


# ---- JAX -----------------------------------------------------------------------------------------------------------


def jax_inputs(*, normed: bool = False) -> dict[str, np.ndarray]:
    cos, sin = tables(9, 8)
    tensors = {"q": drawn(2, 3, 4, 8), "k": drawn(2, 3, 2, 8, seed=1), "cos": cos, "sin": sin, **weights(8, normed)}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def test_jax_writes_over_nothing(jax: ModuleType) -> None:
    import fuselm.jax

    with pytest.raises(TypeError, match="inplace"):
        fuselm.jax.rope(**jax_inputs(), inplace=True)


@normed_or_not
def test_jax_gives_the_tables_no_gradient(normed: bool, jax: ModuleType) -> None:
    import fuselm.jax

    gradients = jax.grad(lambda given: sum((y**2).sum() for y in fuselm.jax.rope(**given)))(jax_inputs(normed=normed))
    assert not np.asarray(gradients["cos"]).any()
    assert not np.asarray(gradients["sin"]).any()
    assert np.asarray(gradients["q"]).any()


@normed_or_not
@pytest.mark.parametrize("mapped", [("positions",), ("q", "positions"), ("k",)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (2, 3)], ids=str)
def test_jax_maps_over_positions(
    normed: bool, mapped: tuple[str, ...], shape: tuple[int, ...], jax: ModuleType
) -> None:
    import fuselm.jax

    rng = np.random.default_rng(0)
    given = jax_inputs(normed=normed) | {"positions": rng.integers(0, 9, shape)}
    stacked = {name: np.stack([given[name]] * 3) for name in mapped}
    if "positions" in mapped:
        stacked["positions"] = rng.integers(0, 9, (3, *shape))
    both = given | stacked
    axes = {name: 0 if name in mapped else None for name in given}

    def turned(given: dict[str, Any]) -> Any:
        return fuselm.jax.rope(**given)

    found = jax.vmap(turned, in_axes=(axes,))(both)
    for index in range(3):
        alone = turned(given | {name: array[index] for name, array in stacked.items()})
        for many, one in zip(found, alone, strict=True):
            np.testing.assert_allclose(np.asarray(many[index]), np.asarray(one), rtol=1e-6, atol=1e-6)


@normed_or_not
def test_jax_refuses_a_second_derivative_at_once(normed: bool, jax: ModuleType) -> None:
    import fuselm.jax

    given = jax_inputs(normed=normed)

    def jax_loss(q: Any) -> Any:
        return (fuselm.jax.rope(**(given | {"q": q}))[0] ** 3).sum()

    for twice in (jax.hessian(jax_loss), jax.grad(lambda q: jax.grad(jax_loss)(q).sum())):
        with pytest.raises(TypeError, match="has one derivative"):
            twice(given["q"])


@pytest.mark.parametrize("name", ["q", "k", "cos", "sin"])
def test_jax_names_what_is_no_array(name: str, jax: ModuleType) -> None:
    import fuselm.jax

    with pytest.raises(RefusedInput, match=f"{name} must be a jax or numpy array; got a list"):
        fuselm.jax.rope(**(jax_inputs() | {name: [1.0]}))


# ---- CUDA ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_rope_refuses_raw_calls_that_do_not_belong_together(cuda: str) -> None:
    q, k, (cos, sin) = drawn(2, 5, 4, 8, device=cuda), drawn(2, 5, 2, 8, device=cuda), tables(5, 8, cuda)
    norms = tuple(weights(8, True, device=cuda).values())
    _, _, q_rstd, k_rstd = torch.ops.fuselm.rope_forward(q, k, cos, sin, None, *norms, 1e-6, False, False, 15)
    backward = torch.ops.fuselm.rope_backward
    assert all(t is not None for t in backward(q, k, q, k, q_rstd, k_rstd, cos, sin, None, *norms, False, 15))
    wrong = [
        lambda: torch.ops.fuselm.rope_forward(q, k, cos, sin, None, None, None, 1e-6, False, False, 15),
        lambda: torch.ops.fuselm.rope_inplace(
            q, k[:, :, :1].expand(2, 5, 2, 8), cos, sin, None, None, None, 1e-6, False, False, 0
        ),
        lambda: backward(q[:1], k, q, k, q_rstd, k_rstd, cos, sin, None, *norms, False, 15),
        lambda: backward(q, k.half(), q, k, q_rstd, k_rstd, cos, sin, None, *norms, False, 15),
        lambda: backward(q, k, q, k, q_rstd.half(), k_rstd, cos, sin, None, *norms, False, 15),
        lambda: backward(q, k, q, k, q_rstd, k_rstd[:, :, :1].expand(2, 5, 2), cos, sin, None, *norms, False, 15),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError, match="a kernel was refused"):
            call()


@pytest.mark.gpu
@in_each_dtype
@both_ways
@normed_or_not
def test_few_and_many_and_element_by_element_are_the_same_bits(
    cuda: str, dtype: torch.dtype, interleaved: bool, normed: bool
) -> None:
    """Every width: a kernel for a few tokens, one for many, and one for what is no vectors."""
    for width in range(2, 514, 2 if dtype == torch.bfloat16 else 26):
        q, k, dq, dk = (drawn(2, 1500, (5, 3)[i % 2], width, dtype=dtype, device=cuda, seed=i) for i in range(4))
        given: dict[str, Any] = dict(zip(("cos", "sin"), tables(1500, width, cuda), strict=True))
        given |= {"interleaved": interleaved, **weights(width, normed, dtype, cuda)}
        many = with_gradients({"q": q, "k": k}, {"q": dq, "k": dk}, **given)
        few = with_gradients({"q": q[:, :9], "k": k[:, :9]}, {"q": dq[:, :9], "k": dk[:, :9]}, **given)
        apart = {name: lay_out(x, "columns") for name, x in (("q", q), ("k", k))}
        one_by_one = with_gradients(apart, {"q": lay_out(dq, "columns"), "k": lay_out(dk, "columns")}, **given)
        for name, right in many.items():
            assert torch.equal(one_by_one[name], right), (width, name)
            assert torch.equal(few[name], right[:, :9]), (width, name)


# Tokens on both sides of where kernels change hands on a card of 132 multiprocessors, four rows of a batch; halves that
# are whole vectors, one and a half, and less.
@pytest.mark.gpu
@in_each_dtype
@both_ways
@pytest.mark.parametrize(
    ("heads", "width", "tokens"),
    [
        ((12, 12), 64, (1, 64, 1024, 1500)),
        ((25, 5), 40, (1, 64, 3000)),
        ((3, 0), 24, (2, 40_000)),
        ((0, 7), 100, (1, 3000)),
    ],
    ids=str,
)
def test_the_kernel_for_the_usual_few_has_the_bits_of_the_others(
    cuda: str, dtype: torch.dtype, interleaved: bool, heads: tuple[int, int], width: int, tokens: tuple[int, ...]
) -> None:
    """Without positions, with them, element by element; packed, and in place."""
    for count in tokens:
        packed = drawn(4, count, sum(heads) + 2, width, dtype=dtype, device=cuda)
        x = packed.split((*heads, 2), dim=2)[:2]
        cos, sin = tables(count, width, cuda)
        given: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved}
        found = ops.rope(*x, **given)
        positions = torch.arange(count, device=cuda)
        for one_by_one in (
            ops.rope(*x, positions=positions, **given),
            ops.rope(*(lay_out(y, "columns") for y in x), **given),
        ):
            assert all(map(torch.equal, found, one_by_one)), count
        whole = [y.contiguous() for y in x]
        assert all(map(torch.equal, found, ops.rope(*whole, **given))), count
        back = [
            torch.ops.fuselm.rope_forward(*given_back, cos, sin, None, None, None, 1e-6, interleaved, True)[:2]
            for given_back in (whole, x, [lay_out(y, "columns") for y in x])
        ]
        assert all(torch.equal(one, other) for turned in back[:2] for one, other in zip(turned, back[2], strict=True))
        transposed = (y.transpose(0, 1).contiguous().transpose(0, 1) for y in x)
        assert all(map(torch.equal, found, ops.rope(*transposed, **given))), count
        wide = [
            torch.cat((table, table), dim=-1)[:, : width // 2] for table in (cos, sin)
        ]  # rows with gaps between them
        assert all(map(torch.equal, found, ops.rope(*x, *wide, interleaved=interleaved))), count
        rest = packed[:, :, sum(heads) :].clone()
        ops.rope(*x, inplace=True, **given)
        assert all(map(torch.equal, found, x)), count
        assert torch.equal(packed[:, :, sum(heads) :], rest)


@pytest.mark.gpu
@in_each_dtype
@both_ways
@pytest.mark.parametrize("width", [8, 24, 40, 56, 72, 104, 120, 184, 216, 248, 16, 32, 48, 64, 80, 96, 112])
def test_halves_that_end_within_a_vector_or_a_line_have_the_bits_of_any_layout(
    cuda: str, dtype: torch.dtype, interleaved: bool, width: int
) -> None:
    tokens = 200_000 // width
    q, k = (drawn(5, tokens, count, width, dtype=dtype, device=cuda, seed=count) for count in (11, 3))
    positions = torch.arange(tokens, device=cuda).flip(0).expand(5, tokens)
    cos, sin = tables(tokens, width, cuda)
    for more in ({}, {"positions": positions}):
        given: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved, **more}
        found = ops.rope(q, k, **given)
        for layout in ("offset", "columns"):
            assert all(map(torch.equal, found, ops.rope(lay_out(q, layout), lay_out(k, layout), **given))), layout
        back = torch.ops.fuselm.rope_forward(
            *found, cos, sin, more.get("positions"), None, None, 1e-6, interleaved, True
        )
        torch.testing.assert_close(back[:2], (q, k), rtol=0, atol=4e-6 if dtype == torch.float32 else 0.07)
        mine = q.clone(), k.clone()
        ops.rope(*mine, inplace=True, **given)
        assert all(map(torch.equal, found, mine))


@pytest.mark.gpu
@in_each_dtype
@pytest.mark.parametrize("heads", [(32, 8), (33, 1), (1, 40), (4, 0)], ids=str)
def test_gradients_with_weights_are_those_of_more_tokens(cuda: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """A block or several for a side, and kernels for many: dq and dk to the bit, the weights' beside the oracle."""
    for width in (40, 128, 512):
        q, k, dq, dk = (drawn(1, 3000, heads[i % 2], width, dtype=dtype, device=cuda, seed=i) for i in range(4))
        given = dict(zip(("cos", "sin"), tables(3000, width, cuda), strict=True))
        norms = weights(width, True, torch.float32, cuda)
        many = with_gradients({"q": q, "k": k}, {"q": dq, "k": dk}, **given, **norms)
        for count in (1, 2, 60, 200):
            x, sent = {"q": q[:, :count], "k": k[:, :count]}, {"q": dq[:, :count], "k": dk[:, :count]}
            few = with_gradients(x, sent, **given, **norms)
            for name, right in many.items():
                assert torch.equal(few[name], right[:, :count]), (width, count, name)
            leaves = [weight.clone().requires_grad_() for weight in norms.values()]
            turned = ops.rope(**x, **given, q_weight=leaves[0], k_weight=leaves[1])
            found = torch.autograd.grad(turned, leaves, list(sent.values()))
            exact = {name: y.double() for name, y in (x | given | norms).items()}
            exact |= {name: table[:count] for name, table in exact.items() if name in ("cos", "sin")}
            arrived = {f"{name}_out": y.double() for name, y in sent.items()}
            truth = contract.oracle_backward(torch, exact, arrived, {"eps": 2.0**-23})
            for name, gradient in zip(norms, found, strict=True):
                assert (gradient.double() - truth[name]).abs().max() <= 2**-20 * (count * max(heads)) ** 0.5 * 4


@pytest.mark.gpu
@both_ways
@normed_or_not
@pytest.mark.parametrize("layout", ["contiguous", "offset"])
def test_more_elements_than_32_bits_can_count(cuda: str, interleaved: bool, normed: bool, layout: str) -> None:
    batch, tokens, heads, width = 2, 33_000, 257, 128
    size = batch * tokens * heads * width
    assert size > 2**31
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 10 * size:
        pytest.skip("not enough GPU memory is free")
    made = torch.Generator(cuda).manual_seed(0)
    flat = torch.randn(size + 8, device=cuda, generator=made, dtype=torch.bfloat16)
    q = (flat[1 : size + 1] if layout == "offset" else flat[:size]).view(batch, tokens, heads, width)
    k = torch.randn(batch, tokens, 1, width, device=cuda, generator=made, dtype=torch.bfloat16)
    given: dict[str, Any] = dict(zip(("cos", "sin"), tables(tokens, width, cuda), strict=True))
    given |= {"interleaved": interleaved, **weights(width, normed, torch.bfloat16, cuda)}
    everything = with_gradients({"q": q, "k": k}, {"q": q, "k": k}, **given)
    ends = [(0, 0), (0, tokens - 1), (1, 0), (1, tokens - 1)]
    ends += [divmod(2**31 // (heads * width) + step, tokens) for step in (-1, 0, 1)]
    for row, place in ends:
        x = token({"q": q, "k": k}, row, place)
        alone = with_gradients(x, x, positions=torch.tensor([place], device=cuda), **given)
        for name, right in alone.items():
            assert torch.equal(everything[name][row : row + 1, place : place + 1], right), (row, place, name)
    del flat, q, k, everything
    torch.cuda.empty_cache()


@pytest.mark.gpu
@in_each_dtype
@pytest.mark.parametrize("width", [64, 100, 512])
def test_gradients_of_weights_are_sums_over_all_tokens_and_heads(cuda: str, dtype: torch.dtype, width: int) -> None:
    q, k, dq, dk = (drawn(3, 4099, (7, 3)[i % 2], width, dtype=dtype, device=cuda, seed=i) for i in range(4))
    given = dict(zip(("cos", "sin"), tables(4099, width, cuda), strict=True))
    norms = {name: weight.requires_grad_() for name, weight in weights(width, True, torch.float32, cuda).items()}
    turned = ops.rope(q, k, **given, **norms)
    found = torch.autograd.grad(turned, list(norms.values()), [dq, dk])
    inputs = {"q": q, "k": k, **given, **norms}
    exact = {name: x.detach().double() for name, x in inputs.items()}
    right = contract.oracle_backward(torch, exact, {"q_out": dq.double(), "k_out": dk.double()}, {})
    for name, gradient in zip(norms, found, strict=True):
        count = 3 * 4099 * 7
        assert (gradient.double() - right[name]).abs().max() <= 2**-20 * count**0.5 * 4
    again = torch.autograd.grad(ops.rope(q, k, **given, **norms), list(norms.values()), [dq, dk])
    assert all(map(torch.equal, found, again))
