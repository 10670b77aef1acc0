"""Embedding for PyTorch: the raw ops, their plain and fake implementations, autograd, and the function people call.

The contract is kernels/embedding.py. On CUDA the raw ops run embedding*.cu; elsewhere the plain implementations below.

    x = embedding(ids, weight)                                       # [B, T] and [V, D] -> [B, T, D]
    x = embedding(ids, weight, position_weight=places)               # + places[0 .. T - 1], added in fp32
    x = embedding(ids, weight, dtype=torch.bfloat16)                 # of an fp32 weight: rounded on the way
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fuselm.kernels import embedding as contract
from fuselm.kernels.torch_ops import (
    check_are_tensors,
    direct_apply,
    info,
    is_transformed,
    load_cuda,
    refuse_second_gradient,
    register,
)

_FIRST = 1  # mask of wanted outputs: forward has one
_DWEIGHT, _DPOSITION_WEIGHT = 1, 2
_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)  # by their numbers in fuselm.h
_NUMBERS: dict[Any, int] = {dtype: number for number, dtype in enumerate(_DTYPES)} | contract.DTYPE_NUMBERS

Dtype = torch.dtype | str | None


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    position_weight: Tensor | None = None,
    positions: Tensor | None = None,
    dtype: Dtype = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Rows of weight [V, D] for ids of any shape: ids' shape, and D behind it, in `dtype` or, left out, weight's.

    With `position_weight`, rows of it are added in fp32 before the one rounding: row t to the token at place t of ids'
    last dimension, or those that `positions` say, of ids' shape or of its last dimension. Gradients are sums in fp32 of
    a fixed order: equal calls give equal bits. Tokens whose id is `padding_idx` add nothing to weight's gradient. An id
    or a position that its table has no row for is refused on the CPU; on CUDA, where values are not looked at, that row
    is NaN and adds nothing to that table's gradient. Inside torch.func transforms and forward-mode differentiation
    torch's own lookup runs, with every derivative torch has, of tables in fp32.
    """
    compiling = is_compiling()
    if not compiling and is_transformed():
        return _transformed(ids, weight, position_weight, positions, dtype, padding_idx)
    # The fast path asks nothing it need not: the launcher refuses bad input, and only then check() looks for the words.
    try:
        number = 0 if dtype is None else _NUMBERS[dtype]
        padding = None if padding_idx is None else contract.padding_row(weight.shape[0], padding_idx)
        if (
            weight.requires_grad or (position_weight is not None and position_weight.requires_grad)
        ) and torch.is_grad_enabled():
            apply = _Embedding.apply if compiling else _apply
            out: Tensor = apply(ids, weight, position_weight, positions, number, padding)
        elif compiling or number or position_weight is not None or positions is not None:
            out = (_forward if compiling else _forward_now)(ids, weight, position_weight, positions, number, _FIRST)
        else:
            out = _forward_now(ids, weight)  # arguments that are their defaults would cost 0.6 us if they were passed
        return out
    except (RuntimeError, TypeError, KeyError, AttributeError, IndexError) as caught:
        error = caught
    _check(ids, weight, position_weight, positions, dtype)
    # No CUDA implementation yet: this is the first CUDA tensor.
    if isinstance(error, NotImplementedError) and ids.is_cuda and load_cuda():
        return embedding(
            ids, weight, position_weight=position_weight, positions=positions, dtype=dtype, padding_idx=padding_idx
        )
    raise error


def embedding_reference(
    ids: Tensor,
    weight: Tensor,
    *,
    position_weight: Tensor | None = None,
    positions: Tensor | None = None,
    dtype: Dtype = None,
    padding_idx: int | None = None,
) -> Tensor:
    """The same by torch's own lookup: the yardstick for errors and speed. It takes float64 too."""
    return _composed(F.embedding, ids, weight, position_weight, positions, dtype, padding_idx)


def _composed(
    look_up: Callable[..., Tensor],
    ids: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    positions: Tensor | None,
    dtype: Dtype,
    padding_idx: int | None,
) -> Tensor:
    out = look_up(ids, weight, padding_idx)
    wanted = weight.dtype if dtype is None else dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    if position_weight is not None:
        added = _first(position_weight, ids) if positions is None else look_up(positions, position_weight)
        if not out.dtype == added.dtype == wanted:  # where all are alike torch adds in fp32 by itself, in one pass
            out, added = _wide(out), _wide(added)
        out = out + added
    return out.to(wanted)


def _transformed(
    ids: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    positions: Tensor | None,
    dtype: Dtype,
    padding_idx: int | None,
) -> Tensor:
    """The reference where torch differentiates it, of tables in fp32: in 16 bits it adds gradients up in 16 bits."""
    _check(ids, weight, position_weight, positions, dtype)
    padding = None if padding_idx is None else contract.padding_row(weight.shape[0], padding_idx)
    places = None if position_weight is None else _wide_if_learned(position_weight)
    given = (ids, _wide_if_learned(weight), places, positions, dtype or weight.dtype, padding)
    try:
        return _composed(F.embedding if _looks_at_values(ids) else _look_up_or_nan, *given)
    except IndexError:  # on a CPU torch's lookup looks at the values too
        for name, indices, table in (("ids", ids, weight), ("positions", positions, position_weight)):
            if indices is not None and table is not None:
                _refuse_strays(name, torch.func.debug_unwrap(indices), table)
        raise


def _looks_at_values(ids: Tensor) -> bool:
    """Whether torch's lookup refuses a row that is not there. On CUDA it ends whatever else the process does there."""
    return ids.device.type == "cpu"


def _look_up_or_nan(indices: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """As F.embedding; NaN for a row that is not there, which adds nothing to the table's gradient."""
    near = indices.clamp(0, table.shape[0] - 1)
    return F.embedding(near, table, padding_idx).masked_fill((near != indices)[..., None], torch.nan)


def _wide_if_learned(table: Tensor) -> Tensor:
    """In fp32, exactly; what is constant in every transform is no sum, and spared the copy."""
    learned = table.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(table)
    return table.float() if learned else table


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _first(position_weight: Tensor, ids: Tensor) -> Tensor:
    """The rows for ids without positions: [T, D], of a single id [D]."""
    tokens = contract.tokens_of(tuple(ids.shape))
    return position_weight[:tokens].reshape(*ids.shape[-1:], position_weight.shape[-1])


def _check(ids: Any, weight: Any, position_weight: Any, positions: Any, dtype: Any) -> None:
    optional = {"position_weight": position_weight, "positions": positions}
    check_are_tensors(contract.NAME, {"ids": ids, "weight": weight}, optional)
    ids_info, weight_info = info(ids), info(weight)
    assert ids_info is not None
    assert weight_info is not None
    name = dtype if dtype is None or isinstance(dtype, str) else repr(dtype).removeprefix("torch.")
    contract.check(ids_info, weight_info, info(position_weight), info(positions), name)


class _Embedding(torch.autograd.Function):
    """Of the tables backward needs to know what they look like, and keeps none of them."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        position_weight: Tensor | None,
        positions: Tensor | None,
        number: int,
        padding: int | None,
    ) -> Tensor:
        forward = _forward if is_compiling() else _forward_now
        out: Tensor = forward(ids, weight, position_weight, positions, number, _FIRST)
        # -1 adds to no gradient.
        ctx.save_for_backward(ids if padding is None else ids.masked_fill(ids == padding, -1), positions)
        ctx.weight = weight.shape, weight.dtype
        if position_weight is not None:
            ctx.position_weight = position_weight.shape, position_weight.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        ids, positions = ctx.saved_tensors
        _, wants_weight, wants_places = ctx.needs_input_grad[:3]
        with torch.no_grad():
            weight = _like(ctx.weight, dout)
            places = _like(ctx.position_weight, dout) if wants_places else None
            wanted = _DWEIGHT * wants_weight | _DPOSITION_WEIGHT * wants_places
            dweight, dplaces = _backward(dout, ids, weight, places, positions if wants_places else None, wanted)
        if torch.is_grad_enabled():
            dweight, dplaces = refuse_second_gradient("embedding", [dweight, dplaces], [dout])
        return None, dweight, dplaces, None, None, None


def _like(table: tuple[torch.Size, torch.dtype], dout: Tensor) -> Tensor:
    """What looks like a table and takes the memory of one number; nobody reads it."""
    shape, dtype = table
    return torch.empty((), dtype=dtype, device=dout.device).expand(shape)


_apply = direct_apply(_Embedding)

# ---- raw ops -------------------------------------------------------------------------------------------------------


# Defaults as in the schema: torch leaves out what is one when it calls these.
def _plain_forward(
    ids: Tensor,
    weight: Tensor,
    position_weight: Tensor | None = None,
    positions: Tensor | None = None,
    dtype: int = 0,
    outputs: int = _FIRST,
) -> Tensor:
    _check(ids, weight, position_weight, positions, _DTYPES[dtype])
    out = _looked_up("ids", ids, weight)
    if position_weight is not None:
        if positions is None:
            added = _first(position_weight, ids)
        else:
            added = _looked_up("positions", positions, position_weight)
        out = out.float() + added.float()
    return out.to(_DTYPES[dtype] or weight.dtype)


def _looked_up(name: str, indices: Tensor, table: Tensor) -> Tensor:
    """Rows of a table; an index that it has no row for is refused on the CPU and NaN elsewhere."""
    if indices.device.type != "cpu":
        inside = indices.clamp(0, table.shape[0] - 1)
        return F.embedding(inside, table).masked_fill((inside != indices)[..., None], torch.nan)
    _refuse_strays(name, indices, table)
    return F.embedding(indices, table)


def _refuse_strays(name: str, indices: Tensor, table: Tensor) -> None:
    inside = indices.clamp(0, table.shape[0] - 1)
    if not torch.equal(inside, indices):
        place = tuple((inside != indices).nonzero()[0].tolist())
        table_info = info(table)
        assert table_info is not None
        raise contract.stray(name, int(indices[place]), place, table_info)


def _fake_forward(
    ids: Tensor,
    weight: Tensor,
    position_weight: Tensor | None = None,
    positions: Tensor | None = None,
    dtype: int = 0,
    outputs: int = _FIRST,
) -> Tensor:
    _check(ids, weight, position_weight, positions, _DTYPES[dtype])
    return weight.new_empty((*ids.shape, weight.shape[1]), dtype=_DTYPES[dtype] or weight.dtype)


def _plain_backward(
    dout: Tensor,
    ids: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    positions: Tensor | None,
    outputs: int,
) -> tuple[Tensor | None, Tensor | None]:
    dweight = _summed(dout, ids, weight) if outputs & _DWEIGHT else None
    if position_weight is None or not outputs & _DPOSITION_WEIGHT:
        return dweight, None
    if positions is not None:
        return dweight, _summed(dout, positions.expand(ids.shape), position_weight)
    tokens = contract.tokens_of(tuple(ids.shape))
    dplaces = torch.zeros(position_weight.shape, dtype=position_weight.dtype, device=dout.device)
    rows = dout.reshape(ids.numel() // max(tokens, 1), tokens, dout.shape[-1])  # [B, T, D]
    dplaces[:tokens] = rows.sum(0, dtype=torch.float32)
    return dweight, dplaces


def _summed(dout: Tensor, indices: Tensor, table: Tensor) -> Tensor:
    """A table's gradient, added up in fp32 in the order of the tokens."""
    rows = dout.reshape(-1, dout.shape[-1]).float()  # [N, D]
    flat = indices.reshape(-1)
    known = torch.where(flat == flat.clamp(0, table.shape[0] - 1), flat, -1)  # -1: adds to nothing
    total: Tensor = torch.ops.aten.embedding_dense_backward(rows, known, table.shape[0], -1, False)
    return total.to(table.dtype)


def _fake_backward(
    dout: Tensor,
    ids: Tensor,
    weight: Tensor,
    position_weight: Tensor | None,
    positions: Tensor | None,
    outputs: int,
) -> tuple[Tensor | None, Tensor | None]:
    dweight = weight.new_empty(weight.shape) if outputs & _DWEIGHT else None
    if position_weight is None or not outputs & _DPOSITION_WEIGHT:
        return dweight, None
    return dweight, position_weight.new_empty(position_weight.shape)


_forward = register(
    "embedding_forward(Tensor ids, Tensor weight, Tensor? position_weight=None, Tensor? positions=None, int dtype=0,"
    " int outputs=1) -> Tensor",
    _plain_forward,
    _fake_forward,
)
# The same dispatch without a Python frame around it (0.2 us a call). Dynamo knows only the overload.
_forward_now = _forward._op
_backward = register(
    "embedding_backward(Tensor dout, Tensor ids, Tensor weight, Tensor? position_weight, Tensor? positions,"
    " int outputs) -> (Tensor, Tensor)",
    _plain_backward,
    _fake_backward,
)
