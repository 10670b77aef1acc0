"""fuselm.jax.adamw and global_norm: pytrees, jit, donation, masters and skipped steps; on CUDA the bits of PyTorch.

Truth is the contract's oracle, in float64; the yardstick of errors is torch's own AdamW.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fuselm import ops
from fuselm.kernels import adamw as contract
from fuselm.kernels.spec import RefusedInput, Tolerance
from tests.kernels.arrays import assert_same_bits, assert_within_rule, numpy_dtype, to_numpy, torch_tensor

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1}
LR = 2.0**-10  # the same number in fp32 and in float64
SHAPES = {"table": (40, 33), "bias": (7,), "scale": (), "none": (0,), "empty": (3, 0), "deep": (1,) * 8 + (5,)}
PLATFORMS = ("cpu", pytest.param("gpu", marks=pytest.mark.gpu))


class Layer(NamedTuple):
    weight: Any
    bias: Any


def fused() -> Any:
    import fuselm.jax

    return fuselm.jax


@pytest.fixture
def place(jax: ModuleType, request: pytest.FixtureRequest) -> Any:
    """A jax device, by the platform that a test is parametrized with."""
    try:
        return jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip(f"JAX sees no {request.param}")


on_each_platform = pytest.mark.parametrize("place", PLATFORMS, indirect=True)


def drawn(seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(s)).astype(numpy_dtype(dtype)) for name, s in SHAPES.items()}


def tree_on(jax: ModuleType, device: Any, tree: Any) -> Any:
    return jax.tree.map(lambda array: jax.device_put(array, device), tree)


def assert_trees_equal(jax: ModuleType, ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for index, (one, other) in enumerate(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)):
        assert_same_bits(f"leaf {index}", np.asarray(one), np.asarray(other))


def flat(arrays: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(array)) for array in arrays])


# ---- numbers ---------------------------------------------------------------------------------------------------------


def truth(dtype: str, steps: int) -> list[np.ndarray]:
    columns: list[list[np.ndarray]] = [[], [], []]
    for name, array in drawn(0, dtype).items():
        now = (array.astype(np.float64), np.zeros(array.shape), np.zeros(array.shape))
        for step in range(1, steps + 1):
            grad = drawn(step, dtype)[name].astype(np.float64)
            now = contract.oracle(now[0], grad, *now[1:], step=step, lr=LR, **OPTIONS)
        for column, one in zip(columns, now, strict=True):
            column.append(one)
    return [flat(column) for column in columns]


def torchs(dtype: str, wide: str, steps: int, device: str) -> list[np.ndarray]:
    params = {
        name: torch.nn.Parameter(torch_tensor(array.astype(numpy_dtype(wide)), device))
        for name, array in drawn(0, dtype).items()
    }
    optimizer = torch.optim.AdamW(params.values(), lr=LR, foreach=True, **OPTIONS)
    for step in range(1, steps + 1):
        for name, grad in drawn(step, dtype).items():
            params[name].grad = torch_tensor(grad.astype(numpy_dtype(wide)), device)
        optimizer.step()
    averages = [[optimizer.state[p][name] for p in params.values()] for name in ("exp_avg", "exp_avg_sq")]
    return [flat(to_numpy(one) for one in column) for column in (params.values(), *averages)]


@on_each_platform
@pytest.mark.parametrize(
    ("dtype", "master"), [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", True)]
)
def test_errors_are_no_larger_than_torchs(jax: ModuleType, place: Any, dtype: str, master: bool) -> None:
    steps = 8
    params = tree_on(jax, place, drawn(0, dtype))
    state = fused().adamw_init(params, master_weights=master)
    step_on = jax.jit(lambda params, grads, state: fused().adamw(params, grads, state, lr=LR, **OPTIONS))
    for step in range(1, steps + 1):
        params, state = step_on(params, tree_on(jax, place, drawn(step, dtype)), state)
    assert float(state.step) == steps
    there = "cuda" if place.platform == "gpu" else "cpu"
    exact, wide = truth(dtype, steps), torchs(dtype, "float32", steps, there)
    stepped, reference = params, torchs(dtype, dtype, steps, there)[0]
    if master:
        assert_trees_equal(jax, params, jax.tree.map(lambda one: one.astype(dtype), state.master))
        stepped, reference = state.master, wide[0]
    found = [flat([tree[name] for name in SHAPES]) for tree in (stepped, state.exp_avg, state.exp_avg_sq)]
    for what, ours, theirs, right in zip(("stepped", "m", "v"), found, (reference, *wide[1:]), exact, strict=True):
        assert_within_rule(what, ours, theirs, right, Tolerance())


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "master"), [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", True)]
)
def test_on_cuda_a_step_has_pytorchs_bits(jax: ModuleType, place: Any, dtype: str, master: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    names = [name for name, shape in SHAPES.items() if len(shape) <= 8]
    arrays, grads = ({name: drawn(seed, dtype)[name] for name in names} for seed in (0, 1))
    params, given = tree_on(jax, place, arrays), tree_on(jax, place, grads)
    state = fused().adamw_init(params, master_weights=master)
    theirs = [torch_tensor(arrays[name], "cuda") for name in names]
    averages = [[torch.zeros_like(one, dtype=torch.float32) for one in theirs] for _ in range(2)]
    masters = [one.float() for one in theirs] if master else None
    decays = {name: 0.0 if name == "bias" else 0.1 for name in names}
    lr, scale = torch.tensor(1e-3, device="cuda"), torch.tensor(0.3, device="cuda")
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
    step_on = jax.jit(
        lambda p, g, s: fused().adamw(p, g, s, lr=1e-3, grad_scale=np.float32(0.3), weight_decay=decays, **options)
    )
    for step in (1, 2):
        params, state = step_on(params, given, state)
        ops.adamw(
            theirs,
            [torch_tensor(grads[name], "cuda") for name in names],
            *averages,
            masters=masters,
            step=torch.tensor(float(step), device="cuda"),
            lr=lr,
            grad_scale=scale,
            weight_decay=[decays[name] for name in names],
            **options,
        )
    trees = [params, state.exp_avg, state.exp_avg_sq, *([state.master] if master else [])]
    for tree, tensors in zip(trees, (theirs, *averages, *([masters] if master else [])), strict=True):
        for name, tensor in zip(names, tensors, strict=True):
            assert_same_bits(name, np.asarray(tree[name]), to_numpy(tensor))


# ---- trees, jit, donation --------------------------------------------------------------------------------------------


def model(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    fp32 = [rng.standard_normal((4, 6)).astype(np.float32) for _ in range(3)]
    layers = [Layer(fp32[0], fp32[0][0]), Layer(fp32[1].astype(numpy_dtype("bfloat16")), fp32[1][0])]
    return {"layers": layers, "head": (fp32[2], None)}


@on_each_platform
@pytest.mark.parametrize("master", [False, True])
def test_a_tree_of_any_form_comes_back_in_it(jax: ModuleType, place: Any, master: bool) -> None:
    """Dicts, lists, named tuples and None; each leaf as if it were alone."""
    params, grads = (tree_on(jax, place, model(seed)) for seed in (0, 1))
    state = fused().adamw_init(params, master_weights=master)
    new, after = fused().adamw(params, grads, state, lr=LR, **OPTIONS)
    forms = [jax.tree.structure(tree) for tree in (params, new, after.exp_avg, after.exp_avg_sq)]
    assert len(set(forms)) == 1
    assert (after.master is None) is not master
    for index in range(5):
        alone = [jax.tree.leaves(tree)[index] for tree in (params, grads)]
        own, its = fused().adamw([alone[0]], [alone[1]], fused().adamw_init([alone[0]]), lr=LR, **OPTIONS)
        for tree, one in ((new, own), (after.exp_avg, its.exp_avg), (after.exp_avg_sq, its.exp_avg_sq)):
            assert_same_bits(f"leaf {index}", np.asarray(jax.tree.leaves(tree)[index]), np.asarray(one[0]))
    if master:
        sizes = [leaf.size for leaf in jax.tree.leaves(after.master)]
        assert sizes == [0, 0, 0, 24, 0]  # in the order of the leaves: head, two layers


@on_each_platform
def test_under_jit_what_is_donated_is_stepped_and_what_is_not_is_kept(jax: ModuleType, place: Any) -> None:
    params, grads = (tree_on(jax, place, model(seed)) for seed in (0, 1))
    traces = []

    def step(params: Any, grads: Any, state: Any, lr: Any) -> Any:
        traces.append(lr)
        return fused().adamw(params, grads, state, lr=lr, **OPTIONS)

    kept, donated = jax.jit(step), jax.jit(step, donate_argnums=(0, 2))
    before = jax.tree.map(np.array, params)
    expected = params, fused().adamw_init(params, master_weights=True)
    for number in (1, 2):
        expected = kept(expected[0], grads, expected[1], LR * number)
    assert_trees_equal(jax, params, before)
    found = jax.tree.map(lambda leaf: leaf.copy(), params), fused().adamw_init(params, master_weights=True)
    for number in (1, 2):
        given = found
        found = donated(found[0], grads, found[1], LR * number)
    assert_trees_equal(jax, found, expected)
    assert len(traces) == 1  # neither a later step nor another learning rate is another program
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((given[1].exp_avg, given[1].exp_avg_sq)))


@on_each_platform
def test_a_skipped_step_leaves_no_trace_and_is_not_counted(jax: ModuleType, place: Any) -> None:
    params, grads = (tree_on(jax, place, model(seed)) for seed in (0, 1))
    bad = jax.tree.map(lambda leaf: leaf * math.nan, grads)
    state = fused().adamw_init(params, master_weights=True)

    @jax.jit
    def step(params: Any, grads: Any, state: Any, skip: Any) -> Any:
        scale = fused().global_norm(grads)
        return fused().adamw(params, grads, state, lr=LR, grad_scale=scale, skip=skip, **OPTIONS)

    first = step(params, grads, state, False)
    skipped = step(first[0], bad, first[1], True)
    assert_trees_equal(jax, skipped, first)
    assert float(skipped[1].step) == 1
    assert_trees_equal(jax, step(*[skipped[0], grads, skipped[1]], False), step(first[0], grads, first[1], False))


def test_decays_of_a_tree_are_each_leafs_own(jax: ModuleType) -> None:
    params, grads = model(0), model(1)
    decays = {"layers": [Layer(0.1, 0), Layer(0.2, 0.0)], "head": (0.3, None)}
    found, _ = fused().adamw(params, grads, fused().adamw_init(params), lr=LR, weight_decay=decays)
    for index, decay in enumerate((0.3, 0.1, 0.0, 0.2, 0.0)):
        expected, _ = fused().adamw(params, grads, fused().adamw_init(params), lr=LR, weight_decay=decay)
        assert_same_bits("leaf", *(np.asarray(jax.tree.leaves(tree)[index]) for tree in (found, expected)))


def test_more_groups_than_a_launch_takes(jax: ModuleType) -> None:
    params, grads = ([np.full(3, value, np.float32)] * 20 for value in (1.0, 0.5))
    decays = [0.1 * index for index in range(20)]
    found, _ = fused().adamw(params, grads, fused().adamw_init(params), lr=0.5, weight_decay=decays)
    expected = [1.0 - 0.5 * decay - 0.5 for decay in decays]
    np.testing.assert_allclose(np.stack(found)[:, 0], expected, atol=1e-6)


def test_updates_too_small_for_16_bits_add_up_in_a_master(jax: ModuleType) -> None:
    params = [jax.numpy.ones(4, jax.numpy.bfloat16)]
    grads = [jax.numpy.ones(4, jax.numpy.bfloat16)]
    step = jax.jit(lambda p, s: fused().adamw(p, grads, s, lr=1e-4, weight_decay=0.0))
    ends = []
    for master in (False, True):
        now, state = params, fused().adamw_init(params, master_weights=master)
        for _ in range(300):
            now, state = step(now, state)
        ends.append(float(now[0][0]))
    assert ends == [1.0, 0.96875]  # 0.97, in bf16
    assert state.master[0] == pytest.approx(np.full(4, 0.97), abs=1e-5)


def test_a_tree_without_leaves_and_leaves_without_elements(jax: ModuleType) -> None:
    for params in ({}, {"a": None}, [np.zeros((0,), np.float32), np.zeros((3, 0), np.float16)]):
        state = fused().adamw_init(params, master_weights=True)
        new, after = fused().adamw(params, params, state, lr=LR)
        assert_trees_equal(jax, (new, after._replace(step=state.step)), (params, state))
        assert float(after.step) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu"], indirect=True)
def test_on_cuda_hundreds_of_leaves_are_two_launches(jax: ModuleType, place: Any) -> None:
    params, grads = (
        tree_on(
            jax,
            place,
            [np.random.default_rng(i + seed).standard_normal(1 + i % 50).astype(np.float32) for i in range(700)],
        )
        for seed in (0, 1000)
    )
    new, state = jax.jit(lambda p, g, s: fused().adamw(p, g, s, lr=LR))(params, grads, fused().adamw_init(params))
    for index in range(0, 700, 33):
        alone = [params[index]], [grads[index]]
        own, its = fused().adamw(*alone, fused().adamw_init(alone[0]), lr=LR)
        assert_trees_equal(jax, (new[index], state.exp_avg[index]), (own[0], its.exp_avg[0]))


# ---- refusals --------------------------------------------------------------------------------------------------------

LEAF = np.ones((2, 3), np.float32)


def test_a_none_in_all_trees_is_no_leaf(jax: ModuleType) -> None:
    """A layer without a bias, say. One that params have and another tree has not is refused: see below."""
    params = {"w": LEAF, "b": None}
    made, state = fused().adamw(params, params, fused().adamw_init(params, master_weights=True), lr=0.1)
    expected, _ = fused().adamw([LEAF], [LEAF], fused().adamw_init([LEAF]), lr=0.1)
    assert made["b"] is state.exp_avg["b"] is state.exp_avg_sq["b"] is state.master["b"] is None
    assert_trees_equal(jax, made["w"], expected[0])


def test_an_fp32_leaf_becomes_what_its_master_is_whatever_it_was(jax: ModuleType) -> None:
    state = fused().adamw_init([LEAF])
    made, after = fused().adamw([LEAF * 7], [LEAF], state._replace(master=[LEAF]), lr=0.1)
    expected, _ = fused().adamw([LEAF], [LEAF], state, lr=0.1)
    assert_trees_equal(jax, made, expected)
    assert_trees_equal(jax, after.master, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grads": [None]}, r"grads must be a pytree of params' form; got PyTreeDef\(\[None\]\) for .*Pass one like"),
        ({"exp_avg": [None]}, "exp_avgs must be a pytree of params' form"),
        ({"params": [None]}, "grads must be a pytree of params' form"),
        ({"grads": [LEAF, LEAF]}, "grads must be a pytree of params' form; got .* Pass one like params"),
        (
            {"grads": [LEAF[0]]},
            r"each of grads must have its parameter's shape .*; got grads\[0\] \[3\] for .* \[2, 3\]",
        ),
        ({"grads": [LEAF.astype(np.int32)]}, r"gradient must be a real floating-point tensor; got grads\[0\] of int32"),
        ({"grads": [1.0]}, r"grads\[0\] must be a jax or numpy array; got a float"),
        ({"params": [1.0]}, r"params\[0\] must be a jax or numpy array; got a float"),
        ({"params": [LEAF.astype(np.int32)]}, r"parameter must be float64, .*; got params\[0\] of int32"),
        ({"params": [LEAF.astype(np.float64)]}, "for JAX a parameter must be float32, .*; got .* float64. Convert it"),
        ({"exp_avg": [LEAF.astype(np.float16)]}, r"states of a float32 parameter must be float32; got exp_avgs\[0\]"),
        ({"exp_avg_sq": {"a": LEAF}}, "exp_avg_sqs must be a pytree of params' form"),
        ({"master": [LEAF.astype(np.float16)]}, r"master of a float32 parameter must be float32; got masters\[0\]"),
        ({"master": [LEAF[0]]}, "each of masters must have its parameter's shape"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers, 0 or more and below 1; got \(0.9, 1.0\)"),
        ({"betas": (-0.5, 0.9)}, "betas must be two numbers"),
        ({"lr": -0.1}, "lr must be a number, 0 or more, or a 0-dim tensor; got -0.1"),
        ({"lr": lambda step: 0.1}, "lr must be a number, 0 or more"),
        ({"weight_decay": -1.0}, "weight_decay must be a number, 0 or more; got -1.0"),
        ({"betas": (np.float32(0.5), 0.9)}, "betas must be two numbers, 0 or more and below 1"),
        ({"eps": LEAF}, "eps must be a Python number"),
        ({"weight_decay": [0.1, 0.2]}, "weight_decay must be a pytree of params' form"),
        ({"weight_decay": [LEAF]}, "weight_decay must be a Python number"),
        ({"weight_decay": True}, "weight_decay must be a Python number; got weight_decay of type bool"),
        ({"weight_decay": np.float32(0.1)}, "weight_decay must be a Python number; got weight_decay of type float32"),
        ({"lr": LEAF[0]}, r"lr must be a number or a 0-dim tensor; got lr float32\[3\]"),
        ({"lr": np.float32(-1)}, r"lr must be a number, 0 or more, or a 0-dim tensor; got np.float32\(-1.0\)"),
        ({"grad_scale": LEAF[0]}, r"grad_scale must be a number or a 0-dim tensor; got grad_scale float32\[3\]"),
        ({"grad_scale": "x"}, "grad_scale must be a number or a 0-dim tensor; got a str"),
        ({"skip": LEAF[0] > 0}, r"skip must be a number or a 0-dim tensor; got skip bool\[3\]"),
        ({"skip": "no"}, "skip must be a number or a 0-dim tensor; got a str"),
    ],
    ids=range(31),
)
def test_the_op_refuses_with_a_reason_and_a_remedy(change: dict[str, Any], words: str, jax: ModuleType) -> None:
    state = fused().adamw_init([LEAF])
    state = state._replace(**{name: change[name] for name in ("exp_avg", "exp_avg_sq", "master") if name in change})
    call = {"params": [LEAF], "grads": [LEAF], "lr": 0.1, **change}
    for name in ("exp_avg", "exp_avg_sq", "master"):
        call.pop(name, None)
    with pytest.raises(RefusedInput, match=f"^adamw: .*{words}"):
        fused().adamw(state=state, **call)


# ---- the norm --------------------------------------------------------------------------------------------------------


@on_each_platform
def test_the_norm_of_a_tree_is_that_of_all_its_elements(jax: ModuleType, place: Any) -> None:
    tree = {**drawn(0), "layers": model(3), "long": np.random.default_rng(1).standard_normal(20_001)}
    tree["long"] = tree["long"].astype(np.float16)
    right = math.sqrt(sum(float(np.square(leaf.astype(np.float64)).sum()) for leaf in jax.tree.leaves(tree)))
    placed = tree_on(jax, place, tree)
    for norm in (fused().global_norm, jax.jit(fused().global_norm)):
        found = norm(placed)
        assert (found.shape, found.dtype) == ((), np.float32)
        assert float(found) == pytest.approx(right, rel=1e-6)
        assert float(norm(placed)) == float(found)


@on_each_platform
def test_the_norm_of_nothing_is_0_and_of_what_is_no_number_none(jax: ModuleType, place: Any) -> None:
    norm = fused().global_norm
    for tree in ({}, [None], [np.zeros((0,), np.float32), np.zeros((3, 0), np.float32)]):
        assert float(norm(tree_on(jax, place, tree))) == 0.0
    for bad in (math.nan, math.inf):
        found = float(norm(tree_on(jax, place, [np.ones(3, np.float32), np.array([1.0, bad], np.float32)])))
        assert math.isnan(found) if math.isnan(bad) else found == math.inf


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["gpu"], indirect=True)
def test_on_cuda_a_norm_has_pytorchs_bits(jax: ModuleType, place: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    leaves = [np.random.default_rng(i).standard_normal(n).astype(np.float32) for i, n in enumerate((5, 8192, 30_001))]
    found = fused().global_norm(tree_on(jax, place, leaves))
    assert float(found) == float(ops.global_norm([torch_tensor(leaf, "cuda") for leaf in leaves]))


@pytest.mark.parametrize("wrong", [np.ones(3, np.int32), np.ones(3, np.complex64), np.ones(3, bool)])
def test_what_is_no_real_number_has_no_norm(jax: ModuleType, wrong: np.ndarray) -> None:
    with pytest.raises(RefusedInput, match=f"real floating-point dtype; got number 1 of {wrong.dtype}. Leave it out"):
        fused().global_norm([np.ones(2, np.float32), wrong])
    with pytest.raises(RefusedInput, match="leaf 0 must be a jax or numpy array; got a float"):
        fused().global_norm([1.0])
