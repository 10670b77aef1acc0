"""What the loss of a head promises beyond the generic suite: blocks, their memory, numbers that 16 bits do not hold.

The generic suite carries the numbers, with a tolerance for incoming gradients that make 16 bits round twice; here the
one that training sends, 1, is held to the ordinary tolerance.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuselm import ops
from fuselm.kernels import linear_cross_entropy as contract
from fuselm.kernels import torch_ops
from fuselm.kernels.spec import RefusedInput, Tolerance
from fuselm.kernels.torch_ops import blocks, cross_entropy_plain, pieces, weight_sum
from fuselm.kernels.torch_ops import cross_entropy as rows_loss
from fuselm.kernels.torch_ops import linear_cross_entropy as torch_head_loss
from fuselm.kernels.torch_ops.blocks import DWEIGHT, Blocks
from fuselm.kernels.torch_ops.linear_cross_entropy import _is_plain, linear_cross_entropy_reference
from tests.kernels.arrays import assert_within_rule, float64, to_numpy
from tests.kernels.problems import DEVICES, all_numpy, op_of, problem_of, reference_of, run, solve

NAME = contract.NAME
ONE_LOSS = [case for case in contract.CASES if case.size and case.options.get("reduction") != "none"]  # by forward
on_each_device = pytest.mark.parametrize("device", DEVICES, indirect=True)


def head(rows: int, width: int, words: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    made = torch.Generator().manual_seed(rows + width + words)
    hidden = torch.randn(rows, width, generator=made)
    weight = torch.randn(words, width, generator=made) / math.sqrt(width)
    targets = torch.randint(words, (rows,), generator=made).to(device)
    leaves = {name: t.to(dtype).to(device).requires_grad_() for name, t in (("hidden", hidden), ("weight", weight))}
    return {**leaves, "targets": targets}


def gradients(given: dict[str, Any], dloss: float = 1.0, **options: Any) -> dict[str, Tensor]:
    loss = ops.linear_cross_entropy(**given, **options)
    names = [name for name, tensor in given.items() if tensor.requires_grad]
    made = torch.autograd.grad(loss, [given[name] for name in names], torch.full_like(loss, dloss))
    return dict(zip(names, made, strict=True))


def exact(given: dict[str, Any], dloss: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """The same in float64, all logits at once."""
    inputs = {name: to_numpy(tensor) for name, tensor in given.items()}
    made = contract.oracle_backward(np, float64(inputs), {"loss": np.float64(dloss)}, options)
    return {name: torch.from_numpy(array) for name, array in made.items()}


@on_each_device
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-4}, {"softcap": 5.0}]
)
def test_without_gradients_a_small_head_is_a_matmul_and_a_loss(device: str, options: dict[str, Any]) -> None:
    given = {name: tensor.detach() for name, tensor in head(6, 16, 24, device=device).items()}
    assert _is_plain(**given, bias=None)
    assert not _is_plain(**{name: tensor.to("meta") for name, tensor in given.items()}, bias=None)  # nor other devices
    found = ops.linear_cross_entropy(**given, **options)
    blocks = ops.linear_cross_entropy(**given, **options, max_bytes=4 * 24 * 2)  # blocks of two rows
    plain = ops.cross_entropy(torch.nn.functional.linear(given["hidden"], given["weight"]), given["targets"], **options)
    assert found.item() == plain.item()
    torch.testing.assert_close(found, blocks, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"targets": torch.zeros(3, 2, dtype=torch.long)},
        {"weight": torch.zeros(24, 15)},
        {"bias": torch.zeros(1)},
        {"bias": torch.zeros(6, 24)},
        {"hidden": torch.zeros(6, 0), "weight": torch.zeros(24, 0)},
        {"label_smoothing": torch.tensor(0.1)},
        {"z_loss": np.float32(0.1)},
        {"reduction": "average"},
    ],
    ids=lambda wrong: " ".join(wrong),
)
def test_a_small_head_is_refused_with_the_same_words(wrong: dict[str, Any]) -> None:
    given = {name: tensor.detach() for name, tensor in head(6, 16, 24).items()} | wrong
    with pytest.raises(RefusedInput) as small:
        ops.linear_cross_entropy(**given)
    with pytest.raises(RefusedInput) as large:
        ops.linear_cross_entropy(**given, max_bytes=1000)
    assert str(small.value) == str(large.value)


# ---- blocks --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 100_000), st.integers(1, 300_000), st.sampled_from([2, 4]), st.integers(1, 1 << 30))
def test_blocks_fit_and_are_as_few_and_as_equal_as_whole_tiles_allow(
    rows: int, words: int, element_bytes: int, max_bytes: int
) -> None:
    size = contract.block_rows(rows, words, element_bytes, max_bytes)
    most = max_bytes // (words * element_bytes)  # that fit
    assert 1 <= size <= max(most, 1)
    if rows <= most:
        assert size == max(rows, 1)
        return
    tile = contract.ROWS_OF_TILE if most >= contract.ROWS_OF_TILE else 1
    largest = max(most // tile * tile, 1)
    blocks = math.ceil(rows / size)
    assert size % tile == 0
    assert blocks <= math.ceil(rows / largest)
    assert size - tile < rows / math.ceil(rows / largest)  # the next smaller would need one more


def test_a_vocabulary_of_128k_in_bf16_goes_by_blocks_of_1024_rows() -> None:
    assert contract.block_rows(16384, 128_256, 2, contract.DEFAULT_MAX_BYTES) == 1024


def test_many_tiles_are_512_whole_ones_of_words() -> None:
    assert contract.has_many_tiles(512 * 256, 256)
    assert not contract.has_many_tiles(512 * 256 - 1, 256)
    assert not contract.has_many_tiles(512 * 256, 255)
    assert contract.has_many_tiles(10_000 // 256 * 256, 14 * 256)
    assert not contract.has_many_tiles(10_000, 13 * 256)


@given(
    st.integers(1024, 40_000),
    st.integers(4096, 18_000).map(lambda n: 8 * n),
    st.integers(128, 1250).map(lambda n: 8 * n),
    st.integers(1 << 24, 1 << 28),
)
def test_first_pieces_fit_into_dweight_and_what_else_is_allowed(
    rows: int, words: int, width: int, max_bytes: int
) -> None:
    found = contract.first_pieces(rows, words, width, max_bytes, 132)
    most = min(width, max_bytes // (2 * contract.PIECE_WORDS + 4 * width)) // contract.ROWS_OF_TILE
    is_worth = most * contract.ROWS_OF_TILE > contract.block_rows(rows, words, 2, max_bytes)
    if found is None:
        assert not is_worth or rows < width or words > 131_072
        return
    taken, piece = found
    assert contract.block_rows(rows, words, 2, max_bytes) < taken <= min(rows, width)
    assert taken == rows or taken % contract.ROWS_OF_TILE == 0
    assert contract.PIECE_WORDS <= piece < words
    assert piece % contract.TILE_WORDS == 0
    assert 2 * taken * piece + 4 * taken * width <= max_bytes


def test_heads_of_128k_begin_with_all_their_columns_in_rows() -> None:
    for rows, words, piece in [(4096, 128_256, 19_968), (16384, 128_256, 19_968), (8192, 131_072, 22_016)]:
        assert contract.first_pieces(rows, words, 4096, contract.DEFAULT_MAX_BYTES, 132) == (4096, piece)
    assert contract.first_pieces(32768, 50_304, 768, contract.DEFAULT_MAX_BYTES, 132) is None  # blocks are larger
    assert contract.first_pieces(4096, 128_255, 4096, contract.DEFAULT_MAX_BYTES, 132) is None  # no vectors
    assert contract.first_pieces(4096, 131_080, 4096, contract.DEFAULT_MAX_BYTES, 132) is None  # a cluster of 16


@pytest.mark.parametrize("rows", [48, 130])  # all of them in pieces, and some in blocks after them
@pytest.mark.parametrize("many", [1, 512])  # a gradient that a matmul makes, or the kernel that adds up
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum", "softcap": 5.0}, {"label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": 7}],
    ids=str,
)
def test_a_head_that_begins_in_pieces_is_worth_what_blocks_are(
    rows: int, many: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = head(rows, 64, 300, torch.bfloat16)
    given["bias"] = torch.linspace(-1, 1, 300).bfloat16().requires_grad_()
    given["targets"][::7] = 7
    truth = exact(given, **options)
    plain = gradients(given, **options)
    monkeypatch.setattr(contract, "MANY_TILES", 0 if many == 1 else many)
    monkeypatch.setattr(blocks, "plan_pieces", lambda *arguments: (48, 104))  # three pieces, of 104, 104 and 92 words
    taken: list[int] = []
    inplace = pieces.inplace
    monkeypatch.setattr(pieces, "inplace", lambda *arguments: taken.append(len(arguments[1])) or inplace(*arguments))
    found = gradients(given, **options, max_bytes=300 * 2 * 40)
    assert taken == [48]
    for name, right in truth.items():
        assert rms_error(found[name], right) <= 1.2 * rms_error(plain[name], right) + 1e-7, name
    for name in ("hidden", "weight", "bias"):  # the gradient of one alone
        alone = {key: t if key in (name, "targets") else t.detach() for key, t in given.items()}
        (only,) = gradients(alone, **options, max_bytes=300 * 2 * 40).values()
        assert rms_error(only, truth[name]) <= 1.2 * rms_error(plain[name], truth[name]) + 1e-7, name
    assert taken == [48, 48]  # dweight's memory is what pieces lie in


class Peak(TorchDispatchMode):
    """Remembers how many bytes of what was made under it were there at most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {StorageWeakRef(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.made = {ref: size for ref, size in self.made.items() if not ref.expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (ref := StorageWeakRef(tensor.untyped_storage())) not in known:
                self.made[ref] = tensor.untyped_storage().nbytes()
        self.bytes = max(self.bytes, sum(self.made.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_cpu_holds_no_more_than_the_logits_may_take(
    dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy_plain, "PART", 1 << 12)
    for name in ("_inplace", "_backward"):  # raw ops would hide what they make
        monkeypatch.setattr(rows_loss, name, getattr(rows_loss, "_plain" + name))
    given = head(512, 8, 1000, dtype)
    plain = [t.detach() for t in given.values()]
    scalars = (-100, 0.1, 1e-3, 5.0)
    limit = 1 << 19  # of 2 MB of logits in fp32
    with Peak() as peak:
        if reduction == "mean":
            found = torch_head_loss._plain_forward(*plain, None, *scalars, True, limit, 0b11111)
        else:
            ones = torch.ones(512)
            found = torch_head_loss._plain_backward(*plain, None, ones, ones, *scalars, limit, 0b11)
    results = sum(t.nbytes for t in found if t is not None)
    # Beside blocks of logits: the weight and its gradient in fp32, hidden and a share of dhidden, numbers of rows, and
    # what a loss's formula makes of a part.
    others = 2 * 4 * 1000 * 8 + 2 * 4 * 512 * 8 + 12 * 4 * 512 + 10 * 4 * (1 << 12)
    assert limit // 2 < peak.bytes <= limit + results + others


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1000, 1324])  # all of them in pieces, and some in blocks after them
def test_a_head_begins_in_pieces_on_a_gpu(cuda: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = head(rows, 1024, 33_024, torch.bfloat16, cuda)
    given["bias"] = torch.linspace(-1, 1, 33_024).bfloat16().to(cuda).requires_grad_()
    given["targets"][::7] = -100
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0}
    leaves = ("hidden", "weight", "bias")
    doubles = {name: t.detach().double().requires_grad_() if name in leaves else t for name, t in given.items()}
    truth = torch.autograd.grad(
        linear_cross_entropy_reference(**doubles, **options), [doubles[name] for name in leaves]
    )
    torchs = torch.autograd.grad(linear_cross_entropy_reference(**given, **options), [given[name] for name in leaves])
    taken: list[int] = []
    inplace = pieces.inplace
    monkeypatch.setattr(pieces, "inplace", lambda *arguments: taken.append(len(arguments[1])) or inplace(*arguments))
    found = gradients(given, **options, max_bytes=48 << 20)
    assert taken == ([min(rows, 1024)] if weight_sum.serves(given["hidden"], given["weight"]) else [])
    for name, right, yardstick in zip(leaves, truth, torchs, strict=True):
        assert rms_error(found[name], right) <= 1.05 * rms_error(yardstick, right) + 1e-7, name
    assert all(torch.equal(a, found[name]) for name, a in gradients(given, **options, max_bytes=48 << 20).items())


@on_each_device
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_block_is_worth_what_several_are(device: str, dtype: torch.dtype, reduction: str) -> None:
    """One's targets are counted by the loss's kernel, those of several by torch's; some do not count."""
    given = head(96, 32, 200, dtype, device)
    given["targets"][::7], given["targets"][5] = -100, 200
    one, several = (ops.linear_cross_entropy(**given, reduction=reduction, max_bytes=n) for n in (None, 9000))
    torch.testing.assert_close(one, several, rtol=1e-6, atol=0)
    for name in ("hidden", "weight"):
        a, b = (torch.autograd.grad(loss, given[name], retain_graph=True)[0].double() for loss in (one, several))
        assert torch.linalg.norm(a - b) <= (2.0**-8 if dtype.itemsize == 2 else 1e-6) * torch.linalg.norm(a)


@pytest.mark.parametrize(("reduction", "sizes"), [("mean", [3, 3, 3, 1]), ("none", [3, 3, 3, 1, *[1] * 10])])
def test_blocks_never_hold_more_logits_than_allowed(
    reduction: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 79 bytes, 20 for a row. A mean is done with them after forward; losses make them again, half as many."""
    seen: list[int] = []

    def watched(raw: Any) -> Any:
        def call(logits: Tensor, *others: Any) -> Any:
            seen.append(len(logits))
            return raw(logits, *others)

        return call

    for name in ("_forward", "_inplace", "_backward"):
        monkeypatch.setattr(rows_loss, name, watched(getattr(rows_loss, name)))
    given = head(10, 3, 5)
    ops.linear_cross_entropy(**given, reduction=reduction, max_bytes=79).sum().backward()
    assert seen == sizes
    ops.linear_cross_entropy(**given, reduction=reduction)
    assert seen[len(sizes) :] == [10]


@pytest.mark.parametrize(("library", "logit_bytes"), [(object(), 4), (None, 16)], ids=["kernels", "plain"])
def test_jax_never_makes_all_logits(library: object, logit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    import fuselm.jax
    from fuselm.kernels.jax_ops import linear_cross_entropy as jax_head_loss

    monkeypatch.setattr(jax_head_loss, "native_library", lambda: library)
    hidden, weight = np.ones((100, 8), np.float32), np.ones((60, 8), np.float32)
    most = 30 * 60 * logit_bytes

    def loss(hidden: Any, weight: Any) -> Any:
        return fuselm.jax.linear_cross_entropy(hidden, weight, np.zeros(100, np.int32), max_bytes=most)

    steps = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, weight))
    assert "f32[25,60]" in steps
    assert "[100,60]" not in steps


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_jax_on_a_cpu_holds_no_more_than_the_logits_may_take(dtype: str, reduction: str) -> None:
    jax = pytest.importorskip("jax")
    import fuselm.jax

    if jax.default_backend() != "cpu":
        pytest.skip("XLA compiles for a GPU here")
    limit, width = 1 << 19, 8  # of 2 MB of logits in fp32

    def loss(hidden: Any, weight: Any, targets: Any) -> Any:
        options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}
        return fuselm.jax.linear_cross_entropy(hidden, weight, targets, max_bytes=limit, **options).sum()

    given = [jax.ShapeDtypeStruct((rows, width), dtype) for rows in (512, 1000)]
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given, jax.ShapeDtypeStruct((512,), "int32"))
    held = lowered.compile().memory_analysis().temp_size_in_bytes
    # Beside blocks: copies of hidden, weight and their gradients, and numbers of rows.
    assert limit // 3 < held <= limit + 4 * 4 * (512 + 1000) * width + 12 * 4 * 512


@on_each_device
def test_large_bf16_weights_are_within_a_rounding_for_each_block(device: str) -> None:
    given = head(160, 256, 300, torch.bfloat16, device)
    truth, largest = exact(given), 300 * 2 * 32
    found = gradients(given, max_bytes=largest)["weight"]
    assert found.dtype == torch.bfloat16
    once = (gradients(given)["weight"].double().cpu() - truth["weight"]).square().mean().sqrt()
    blockwise = (found.double().cpu() - truth["weight"]).square().mean().sqrt()
    assert blockwise <= math.sqrt(5) * once


@on_each_device
def test_fp32_weights_of_16_bit_rows_are_added_up_in_fp32(device: str) -> None:
    given = head(160, 64, 90, torch.bfloat16, device)
    given["weight"] = given["weight"].detach().float().requires_grad_()
    whole, blocks = gradients(given)["weight"], gradients(given, max_bytes=90 * 2 * 32)["weight"]
    assert blocks.dtype == torch.float32
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-7)
    assert not torch.equal(whole, whole.bfloat16().float())


# ---- numbers -------------------------------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("case", ONE_LOSS, ids=lambda case: case.name)
@pytest.mark.parametrize("power", [1.0, 0.25])
def test_an_incoming_1_or_power_of_two_is_rounded_once(case: contract.HeadCase, power: float, device: str) -> None:
    made = problem_of(NAME, case)
    problem = solve(made.op, case, made.inputs, {"loss": np.asarray(power, np.float32)})
    found, reference = (all_numpy(run(f, problem, device)[1]) for f in (op_of(NAME), reference_of(NAME)))
    for name, gradient in found.items():
        groups, noise = problem.groups(gradient.shape), problem.noise[f"d{name}"]
        assert_within_rule(name, gradient, reference[name], problem.gradients[name], Tolerance(), noise, groups)


@on_each_device
@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_a_mean_over_many_fp16_rows_neither_vanishes_nor_overflows(device: str, scale: float) -> None:
    """1 / 70,000 of a small share is next to nothing in fp16, and a sum over 70,000 rows more than it holds."""
    given = head(70_000, 4, 6, torch.float16, device)
    with torch.no_grad():
        given["hidden"].abs_().add_(1)
        given["targets"].fill_(2)
    found, truth = gradients(given, scale), exact(given, scale)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float16
        error = torch.linalg.norm(gradient.double().cpu() - truth[name])
        smallest = 2.0**-24 * math.sqrt(gradient.numel())  # as far as fp16 goes down
        assert error <= 2.0**-10 * torch.linalg.norm(truth[name]) + smallest, name


@on_each_device
def test_a_second_backward_over_a_kept_graph_has_the_bits_of_the_first(device: str) -> None:
    given = head(40, 24, 50, torch.float16, device)
    loss = ops.linear_cross_entropy(**given, max_bytes=1500)
    wanted = [given["hidden"], given["weight"]]
    first = torch.autograd.grad(loss * 3.7, wanted, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss * 3.7, wanted, retain_graph=True)
    half = torch.autograd.grad(loss * 0.5, wanted)
    for one, before, again, other in zip(first, kept, second, half, strict=True):
        assert torch.equal(one, before)  # what was given away is not written to
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_a_batch_of_incoming_gradients_gives_a_batch_of_gradients() -> None:
    given = head(9, 8, 7)
    loss = ops.linear_cross_entropy(**given)
    sent = torch.tensor([1.0, -2.0, 0.5])
    (batch,) = torch.autograd.grad(loss, given["weight"], sent, is_grads_batched=True, retain_graph=True)
    for factor, member in zip(sent, batch, strict=True):
        assert torch.allclose(member, torch.autograd.grad(loss, given["weight"], factor, retain_graph=True)[0])


# ---- targets, refusals, transforms ---------------------------------------------------------------------------------


def test_a_target_beyond_the_vocabulary_is_refused_when_debugging() -> None:
    given = head(6, 4, 5)
    given["targets"][3] = 5
    assert torch.isfinite(ops.linear_cross_entropy(**given))
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(RefusedInput, match=r"^linear_cross_entropy: .*target 5 at \[3\] for rows of 5"),
    ):
        ops.linear_cross_entropy(**given)


def test_jax_refuses_a_target_beyond_the_vocabulary_when_debugging() -> None:
    jax = pytest.importorskip("jax")
    import fuselm.jax

    hidden, weight, targets = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), np.array([1, 9], np.int32)
    assert np.isfinite(fuselm.jax.linear_cross_entropy(hidden, weight, targets))
    with (
        jax.debug_nans(True),
        pytest.raises(RefusedInput, match=r"^linear_cross_entropy: .*target 9 at \[1\] for rows of 4"),
    ):
        fuselm.jax.linear_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("argument", ["hidden", "weight", "targets", "bias"])
def test_what_is_no_tensor_is_named(argument: str) -> None:
    with pytest.raises(RefusedInput, match=rf"{argument} must be a torch\.Tensor; got a list"):
        ops.linear_cross_entropy(**{**head(2, 3, 4), argument: [1.0, 2.0]})


@pytest.mark.parametrize("argument", ["hidden", "weight", "targets", "bias"])
def test_jax_names_what_is_no_array(argument: str) -> None:
    pytest.importorskip("jax")
    import fuselm.jax

    arrays = {"hidden": np.ones((2, 3)), "weight": np.ones((4, 3)), "targets": np.zeros(2, np.int32)}
    with pytest.raises(RefusedInput, match=f"{argument} must be a jax or numpy array; got a list"):
        fuselm.jax.linear_cross_entropy(**{**arrays, argument: [1.0, 2.0]})


def test_jax_refuses_a_second_derivative_at_once() -> None:
    jax = pytest.importorskip("jax")
    import fuselm.jax

    weight, targets = np.ones((4, 3), np.float32), np.zeros(2, np.int32)
    with pytest.raises(TypeError, match=r"fuselm\.jax\.linear_cross_entropy has one derivative"):
        jax.hessian(lambda hidden: fuselm.jax.linear_cross_entropy(hidden, weight, targets))(
            np.ones((2, 3), np.float32)
        )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward-mode rules
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.jacfwd])
def test_function_transforms_give_what_the_formula_gives(transform: Any) -> None:
    given = head(4, 3, 5)
    weight, targets = given["weight"].detach(), given["targets"]
    found, expected = (
        transform(lambda hidden, f=f: f(hidden, weight, targets, softcap=2.0, max_bytes=20))(given["hidden"].detach())
        for f in (ops.linear_cross_entropy, linear_cross_entropy_reference)
    )
    assert found.abs().max() > 0
    assert torch.allclose(found, expected, atol=1e-6)


# ---- CUDA ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_raw_ops_made_of_other_ops_are_there_for_cuda_before_any_kernel_is(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fuselm::{NAME}_{name}", "CUDA")
    assert f"{NAME}_{name}" not in torch_ops._PLAIN  # which would be registered for CUDA once more


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("max_bytes", [1 << 17, None])
def test_the_host_never_waits_for_the_device(
    cuda: str, dtype: torch.dtype, reduction: str, max_bytes: int | None
) -> None:
    given = head(300, 64, 1000, dtype, cuda)

    def step() -> None:
        ops.linear_cross_entropy(**given, reduction=reduction, max_bytes=max_bytes).sum().backward()

    step()  # what is loaded on first use is there now
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode itself is a prototype
            torch.cuda.set_sync_debug_mode("error")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 16384])  # one block and two
def test_the_gradient_of_many_tiles_is_made_in_its_own_memory(cuda: str, rows: int) -> None:
    """Although one in fp32 would be allowed: it would be written, read and rounded once more."""
    given = head(rows, 4096, 10_240, torch.bfloat16, cuda)
    few = head(rows, 128, 10_240, torch.bfloat16, cuda)
    torch_ops.load_cuda()
    is_served = weight_sum.serves(given["hidden"], given["weight"])
    for tensors, many in ((given, True), (few, False)):
        blocks = Blocks(*tensors.values(), None, contract.DEFAULT_MAX_BYTES, DWEIGHT)
        assert blocks.dweight is not None
        assert (blocks.dweight.dtype == torch.bfloat16) is (many and (blocks.is_one or is_served))
        assert (blocks.exponents is not None) is (many and is_served and not blocks.is_one)


@pytest.mark.gpu
def test_memory_stays_far_below_what_all_logits_take(cuda: str) -> None:
    given = head(8192, 256, 65_536, torch.bfloat16, cuda)
    gradients(given, max_bytes=32 << 20)  # cuBLAS has its workspace now
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = gradients(given, max_bytes=32 << 20)
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated() - before
    assert all(torch.isfinite(gradient).all() for gradient in made.values())
    own = (32 << 20) + sum(t.nbytes for t in made.values())
    assert held <= own + (8 << 20)
    assert held < 2 * 8192 * 65_536 / 8


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "words"), [(4096, 128_256), (16384, 128_256), (64, 10_240), (4096, 10_240), (16384, 10_240)]
)
def test_a_large_head_is_as_right_as_torch_with_all_logits(cuda: str, rows: int, words: int) -> None:
    made = torch.Generator(cuda).manual_seed(0)
    hidden = torch.randn(rows, 4096, device=cuda, generator=made).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(words, 4096, device=cuda, generator=made) / 64).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(words, (rows,), device=cuda, generator=made)
    truth = exact_in_blocks(hidden.detach(), weight.detach(), targets)
    found = []
    for op in (ops.linear_cross_entropy, linear_cross_entropy_reference):
        loss = op(hidden, weight, targets)
        results = (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))
        found.append([rms_error(result, right) for result, right in zip(results, truth, strict=True)])
        del loss, results
    # At the default bound of memory the weight's gradient is added up over 1, 13, 1, 1 and 2 blocks, the first of a
    # vocabulary of 128256 in pieces.
    for ours, torchs in zip(*found, strict=True):
        assert ours <= 1.05 * torchs + 1e-7, found


def exact_in_blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss and its gradients in float64, on the device: all logits would be 17 GB."""
    rows, words = hidden.shape[0], weight.double()
    loss, dweight, dhidden = torch.zeros((), dtype=torch.float64, device=hidden.device), torch.zeros_like(words), []
    for start in range(0, rows, 2048):
        block, right = hidden[start : start + 2048].double(), targets[start : start + 2048, None]
        logits = block @ words.T
        loss += (logits.logsumexp(1, keepdim=True) - logits.gather(1, right)).sum() / rows
        dlogits = logits.softmax(1).scatter_add_(1, right, -torch.ones_like(right, dtype=torch.float64)) / rows
        dhidden.append(dlogits @ words)
        dweight += dlogits.T @ block
    return loss, torch.cat(dhidden), dweight


def rms_error(found: Tensor, right: Tensor) -> float:
    return float(((found.double() - right).square().mean() / right.square().mean()).sqrt())


@pytest.mark.filterwarnings("default")  # compilers may warn
def test_inductor_is_told_of_an_op_before_it_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch before 2.13 writes out what the op is computed from, which above twelve layers has no end."""
    from torch._inductor import config as inductor
    from torch._inductor import exc, lowering

    op, told, tell = torch.ops.fuselm.linear_cross_entropy_forward.default, [], lowering.make_fallback

    def note(op: Any, **how: Any) -> None:
        told.append((op, sys._getframe(1).f_globals["__name__"]))
        tell(op, **how)

    def refuse(*arguments: Any) -> str:
        raise AssertionError("inductor writes out what an op is computed from")

    monkeypatch.setattr(torch_ops, "_WORDY_INDUCTOR", True)
    monkeypatch.setattr(lowering, "make_fallback", note)
    monkeypatch.setattr(exc.OperatorIssue, "operator_str", staticmethod(refuse))
    monkeypatch.delitem(lowering.lowerings, op, raising=False)
    torch._dynamo.reset()
    made = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=made, requires_grad=True) for n in (6, 11))
    targets = torch.arange(6)
    compiled = torch.compile(lambda: ops.linear_cross_entropy(2 * hidden, weight, targets), fullgraph=True)
    with inductor.patch(force_disable_caches=True):
        assert torch.equal(compiled(), ops.linear_cross_entropy(2 * hidden, weight, targets))
    assert (op, torch_ops.__name__) in told
