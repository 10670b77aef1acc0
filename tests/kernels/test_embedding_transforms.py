"""Embedding inside torch.func transforms and forward-mode differentiation, and exported by JAX with sizes unknown.

There torch's own lookup, or jnp's, runs; test_embedding.py has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

from fuselm import ops
from fuselm.kernels.spec import RefusedInput
from fuselm.kernels.torch_ops import embedding as implementation
from fuselm.kernels.torch_ops.embedding import embedding_reference
from tests.kernels.test_embedding import IDS, in_each_dtype, table

# Torch's own forward-mode rules are scripted, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

SAME = torch.ones(4096, dtype=torch.long)  # in bf16 a sum of ones stops at 256, in fp16 at 2048


def total(ids: Tensor = SAME, **more: Any) -> Callable[[Tensor], Tensor]:
    return lambda weight: ops.embedding(ids, weight, **more).float().sum()


def batched_total(weight: Tensor) -> Tensor:
    return vmap(lambda ids: ops.embedding(ids, weight))(SAME.view(2, -1)).float().sum()


@in_each_dtype
def test_gradients_are_added_up_in_fp32(dtype: torch.dtype) -> None:
    weight = table(3, 2, dtype=dtype)
    right = torch.tensor([[0.0, 0.0], [4096.0, 4096.0], [0.0, 0.0]], dtype=dtype)
    for function in (total(), total(dtype=torch.float32), batched_total):
        assert torch.equal(grad(function)(weight), right)
    found = vmap(grad(total()))(torch.stack([weight, -weight]))
    assert torch.equal(found, torch.stack([right, right]))

    def of_places(places: Tensor) -> Tensor:
        return total(position_weight=places, positions=SAME)(weight)

    assert torch.equal(grad(of_places)(weight), right)


@in_each_dtype
def test_so_they_are_for_whoever_differentiates_a_transform(dtype: torch.dtype) -> None:
    weight = table(3, 2, dtype=dtype).requires_grad_()
    (found,) = torch.autograd.grad(batched_total(weight), weight)
    assert found[1].tolist() == [4096.0, 4096.0]
    with forward_ad.dual_level():
        rows = ops.embedding(SAME, forward_ad.make_dual(weight, torch.ones_like(weight)))
        assert torch.equal(forward_ad.unpack_dual(rows).tangent, torch.ones_like(rows))
        assert torch.autograd.grad(rows.float().sum(), weight)[0][1].tolist() == [4096.0, 4096.0]


@in_each_dtype
@pytest.mark.parametrize("wanted", [None, torch.float32, "bfloat16"])
def test_rows_are_the_same_bits_in_a_transform(dtype: torch.dtype, wanted: Any) -> None:
    weights = torch.stack([table(5, 8, dtype=dtype), table(5, 8, dtype=dtype, seed=1)])
    for places in (None, table(4, 8, dtype=dtype, seed=2), table(4, 8, dtype=torch.bfloat16, seed=3)):
        more = {"position_weight": places, "dtype": wanted}
        found = vmap(lambda weight, more=more: ops.embedding(IDS, weight, **more))(weights)
        rows, _ = jvp(lambda weight, more=more: ops.embedding(IDS, weight, **more), (weights[0],), (weights[1],))
        assert torch.equal(found, torch.stack([ops.embedding(IDS, weight, **more) for weight in weights]))
        assert torch.equal(rows, found[0])
        assert rows.dtype == embedding_reference(IDS, weights[0], **more).dtype


def test_where_values_are_not_looked_at_a_row_that_is_not_there_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where torch's own lookup would end the process. It adds to no gradient of its table."""
    monkeypatch.setattr(implementation, "_looks_at_values", lambda ids: False)
    weight, places = table(4, 3), table(5, 3, seed=1)
    ids, positions = torch.tensor([3, 4, -1, 0]), torch.tensor([0, 1, 5, 7])

    def rows(weight: Tensor, places: Tensor) -> Tensor:
        return ops.embedding(ids, weight, position_weight=places, positions=positions)

    found, _ = jvp(rows, (weight, places), (weight, places))
    assert torch.equal(found[0], weight[3] + places[0])
    assert found[1:].isnan().all()
    of_weight, of_places = grad(lambda *tables: rows(*tables).sum(), argnums=(0, 1))(weight, places)
    assert of_weight.sum(1).tolist() == [3.0, 0.0, 0.0, 3.0]  # each token gives 1 to each column
    assert of_places.sum(1).tolist() == [3.0, 3.0, 0.0, 0.0, 0.0]
    alone = vmap(lambda one: ops.embedding(one, weight))(ids)
    assert torch.equal(alone[[0, 3]], weight[[3, 0]])
    assert alone[1:3].isnan().all()


def test_a_second_derivative_is_there() -> None:
    def cubes(weight: Tensor) -> Tensor:
        return (ops.embedding(IDS, weight, padding_idx=-1).float() ** 3).sum()

    weight = table(5, 2).bfloat16()
    found = hessian(cubes)(weight)
    assert (found.shape, found.dtype) == ((5, 2, 5, 2), torch.bfloat16)
    counts = torch.tensor([1.0, 3.0, 0.0, 1.0, 0.0])  # of ids; the last row is the padding
    right = (6 * weight.float() * counts[:, None]).flatten()
    torch.testing.assert_close(found.float().view(10, 10).diagonal(), right, rtol=0.02, atol=0)


@pytest.mark.parametrize("padding_idx", [5, -6, True, "last", 1.5])
def test_a_padding_idx_that_is_no_row_is_refused(padding_idx: Any) -> None:
    words = rf"padding_idx must be a row of weight, a whole number from -5 to 4; got padding_idx={padding_idx!r}\."
    for call in (grad(total(IDS, padding_idx=padding_idx)), total(IDS, padding_idx=padding_idx)):
        with pytest.raises(RefusedInput, match=words):
            call(table(5, 8))


def test_an_id_without_a_row_is_refused_by_its_value_and_place() -> None:
    weight, ids = table(5, 8), IDS.clone()
    ids[1, 2] = 9
    words = r"^embedding: ids must be at least 0 and below .* of weight; got 9 at \[1, 2\] for weight float32\[5, 8\]"
    for call in (
        lambda: grad(total(ids))(weight),
        lambda: vmap(total(ids))(torch.stack([weight, weight])),
        lambda: vmap(lambda some: ops.embedding(some, weight))(ids),
        lambda: vmap(vmap(lambda one: ops.embedding(one, weight)))(ids),
    ):
        with pytest.raises(RefusedInput, match=words):
            call()
    words = r"^embedding: positions must be .* rows of position_weight; got 9 at \[1, 2\] for position_weight "
    with pytest.raises(RefusedInput, match=words):
        grad(total(IDS, position_weight=weight, positions=ids))(weight)


@pytest.mark.parametrize("wrong", [np.dtype("float32"), np.float32, torch.int32], ids=str)
def test_what_is_no_dtype_of_torchs_is_refused(wrong: Any) -> None:
    with pytest.raises(RefusedInput, match="dtype must be float32, float16, bfloat16 or None; got dtype "):
        ops.embedding(IDS, table(5, 8), dtype=wrong)


# ---- JAX -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "more"),
    [("b, t", ()), ("t", ()), ("b, t", ("places",)), ("b, t", ("places", "positions"))],
    ids=["two", "one", "places", "positions"],
)
def test_jax_exports_it_for_ids_of_any_number(sizes: str, more: tuple[str, ...], jax: ModuleType) -> None:
    import fuselm.jax

    weight, places = (jax.numpy.asarray(table(rows, 8, seed=rows).numpy()) for rows in (5, 16))

    def rows_and_gradients(ids: Any, weight: Any) -> Any:
        given = {"position_weight": places} if "places" in more else {}
        if "positions" in more:
            given["positions"] = ids
        rows, pull_back = jax.vjp(lambda weight: fuselm.jax.embedding(ids, weight, **given), weight)
        return rows, pull_back(rows)[0]

    scope = jax.export.SymbolicScope(("t <= 16",))
    shapes = jax.export.symbolic_shape(sizes, scope=scope), jax.export.symbolic_shape("v, 8", scope=scope)
    unknown = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, ("int32", "float32"), strict=True))
    exported = jax.export.export(jax.jit(rows_and_gradients))(*unknown)
    ids = np.array([[1, 2, 3], [0, 4, 4]], np.int32)
    ids = ids if sizes == "b, t" else ids[1]
    for found, right in zip(exported.call(ids, weight), rows_and_gradients(ids, weight), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6)
