"""Which of rope's outputs learn, and Jacobians of one of them; test_rope.py has what their gradients are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fuselm.nn
from fuselm import ops
from fuselm.kernels.torch_ops.rope import rope_reference
from tests.kernels.test_rope import drawn, tables, weights

NAMES = {"plain": ("q", "k"), "normed": ("q", "k", "q_weight", "k_weight")}
LEARNERS = [
    (kind, some)
    for kind, names in NAMES.items()
    for n in range(1, 1 + len(names))
    for some in itertools.combinations(names, n)
]
over_learners = pytest.mark.parametrize(
    ("kind", "learners"), LEARNERS, ids=lambda value: "-".join(value) if isinstance(value, tuple) else value
)


def arguments(kind: str, learners: tuple[str, ...]) -> dict[str, Tensor]:
    """q, k, the tables and, normed, weights; learners require a gradient."""
    cos, sin = tables(5, 8)
    given = {"q": drawn(2, 5, 4, 8), "k": drawn(2, 5, 2, 8, seed=1), "cos": cos, "sin": sin}
    given |= weights(8, kind == "normed")
    return {name: tensor.requires_grad_(name in learners) for name, tensor in given.items()}


@over_learners
def test_what_is_made_of_nothing_that_learns_does_not_learn(kind: str, learners: tuple[str, ...]) -> None:
    right = rope_reference(**arguments(kind, learners))
    given = arguments(kind, learners)
    found = ops.rope(**given)
    assert [y.requires_grad for y in found] == [y.requires_grad for y in right]
    leaves = [given[name] for name in learners]
    gradients = torch.autograd.grad([y.sum() for y in found if y.requires_grad], leaves)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("kind", "learners"), [("plain", ("q",)), ("plain", ("k",)), ("normed", ("k_weight",))])
def test_nor_does_it_when_compiled(backend: str, kind: str, learners: tuple[str, ...]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(ops.rope, fullgraph=True, backend=backend)
    found, right = (rope(**arguments(kind, learners)) for rope in (compiled, rope_reference))
    assert [y.requires_grad for y in found] == [y.requires_grad for y in right]
    torch.testing.assert_close(found, right)


def test_keys_that_do_not_learn_may_be_kept_from_step_to_step() -> None:
    """Written into a cache, they would tie each step to the graph of the one before, which is gone."""
    rotary, cache = fuselm.nn.RotaryEmbedding(8, 16), torch.zeros(2, 10, 2, 8)
    for step in range(2):
        q, k = drawn(2, 5, 4, 8).requires_grad_(), drawn(2, 5, 2, 8, seed=1)
        q_out, k_out = rotary(q, k)
        cache[:, 5 * step : 5 * step + 5] = k_out
        (q_out.sum() * cache.sum()).backward()
        assert q.grad is not None


@over_learners
def test_a_batch_of_gradients_is_each_of_them(kind: str, learners: tuple[str, ...]) -> None:
    """As torch.autograd.functional.jacobian(..., vectorize=True) asks for them."""
    given = arguments(kind, learners)
    for name, y in zip("qk", ops.rope(**given), strict=True):
        wanted = [given[learner] for learner in learners if learner[0] == name]
        if not wanted:
            continue
        sent = drawn(3, *y.shape, seed=5)
        many = torch.autograd.grad(y, wanted, sent, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(y, wanted, one, retain_graph=True) for one in sent]
        for found, right in zip(many, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(right))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("number", [True, False])
def test_an_eps_that_is_a_truth_value_is_refused_when_compiled_too(number: Any) -> None:
    given = arguments("normed", ())
    torch.compiler.reset()
    with pytest.raises(ValueError, match="rope: eps must be a Python number; got eps of type bool"):
        torch.compile(ops.rope, backend="eager")(**given, eps=number)
