"""What the norms promise alike, beyond the generic suite."""

from __future__ import annotations

import pytest
import torch

from fuselm import ops
from tests.kernels.problems import as_tuple

PARAMETERS = {"rms_norm": 1, "layer_norm": 2}  # a weight; a weight and a bias


@pytest.mark.gpu
@pytest.mark.parametrize("op_name", PARAMETERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [264, 520, 768, 1000, 1024, 2048])
def test_a_row_has_the_same_bits_among_few_and_among_many(
    cuda: str, width: int, dtype: torch.dtype, op_name: str
) -> None:
    op, made = getattr(ops, op_name), torch.Generator(cuda).manual_seed(0)
    x, residual = (torch.randn(9000, width, device=cuda, generator=made).to(dtype) for _ in range(2))
    parameters = [torch.randn(width, device=cuda, generator=made).to(dtype) for _ in range(PARAMETERS[op_name])]
    for more in ({}, {"residual": residual}):
        among = as_tuple(op(x, *parameters, **more))
        for rows in (1, 70, 1000, 4096):
            given = {name: tensor[:rows] for name, tensor in more.items()}
            for few, many in zip(as_tuple(op(x[:rows], *parameters, **given)), among, strict=True):
                assert torch.equal(few, many[:rows])
