"""What a pass calls: forward alone, backward alone, or both as a training step has them, on memory that stays whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fuselm.bench import kernels, passes, peers, tensors
from fuselm.bench.peers import Peer
from fuselm.bench.report import Results
from fuselm.kernels.linear_cross_entropy import HeadCase
from fuselm.kernels.spec import Case, ops

LOSS, HEAD = ops()["cross_entropy"], ops()["linear_cross_entropy"]
CASE = Case("mean", (6, 40), "float32", {}, {"targets": "int64"}, row_wise=False)
HEAD_CASE = HeadCase("head", (6, 8), "float32", {}, {"weight": "float32"}, vocabulary=40, targets=(0, 40))


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets)


class Overwriting(torch.autograd.Function):
    """A loss that leaves its gradient where the logits were, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        loss = plain_loss(logits, targets)
        chosen = torch.nn.functional.one_hot(targets, logits.shape[-1])
        if logits.requires_grad:
            logits.detach().copy_((torch.softmax(logits, -1) - chosen) / len(targets))
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        return ctx.saved_tensors[0], None


SPOILING = Peer(lambda logits, targets: Overwriting.apply(logits, targets), overwrites=("logits",))


def test_both_is_the_gradient_of_the_loss_for_an_incoming_one() -> None:
    given = tensors.make_inputs(LOSS, CASE, "cpu")
    found = passes.named(LOSS, CASE, "both", passes.make_call("both", LOSS, CASE, given, Peer(plain_loss))())
    right = LOSS.oracle_backward(torch, {k: v.double() if k == "logits" else v for k, v in given.items()},
                                 {"loss": torch.ones((), dtype=torch.float64)}, {})  # fmt: skip
    assert set(found) == {"logits"}
    torch.testing.assert_close(found["logits"].double(), right["logits"], rtol=1e-5, atol=1e-7)


def test_targets_want_no_gradient_and_inputs_stay_as_they_were() -> None:
    given = tensors.make_inputs(LOSS, CASE, "cpu")
    seen: list[bool] = []

    def noting(logits: Tensor, targets: Tensor) -> Tensor:
        seen.extend((logits.requires_grad, targets.requires_grad))
        return plain_loss(logits, targets)

    passes.make_call("both", LOSS, CASE, given, Peer(noting))()
    assert seen == [True, False]
    assert not given["logits"].requires_grad


def test_a_peer_that_overwrites_its_input_has_one_of_its_own() -> None:
    given = tensors.make_inputs(LOSS, CASE, "cpu")
    before = given["logits"].clone()
    call = passes.make_call("both", LOSS, CASE, given, SPOILING)
    first = call()[0].clone()
    assert torch.equal(given["logits"], before)
    assert torch.allclose(first, passes.make_call("both", LOSS, CASE, given, Peer(plain_loss))()[0], atol=1e-6)


def test_an_overwriting_peer_spoils_no_row_and_its_errors_are_those_of_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = {"liger": SPOILING, "fused": Peer(plain_loss)}
    monkeypatch.setattr(kernels.peers, "implementations", lambda *arguments: offered)
    monkeypatch.setattr(kernels.latency, "measure", lambda *arguments: None)
    found = Results()
    kernels.run(kernels.Plan(("cross_entropy",), "cpu", ("liger", "fused"), quick=True, containing="mean"), found)
    assert found.notes == []
    errors = {(row["impl"], row["pass"]): row["rms_error"] for row in found.rows}
    assert errors["liger", "both"] < 0.02  # of bf16
    assert errors["fused", "both"] < 0.02


def test_matmuls_are_three_products_of_the_right_shapes_and_are_timed_in_a_step_alone() -> None:
    peer = peers.implementations("linear_cross_entropy", HEAD_CASE, "cpu", ("matmuls",))["matmuls"]
    assert (peer.passes, peer.compares) == (("both",), False)
    given = tensors.make_inputs(HEAD, HEAD_CASE, "cpu")
    found = passes.named(HEAD, HEAD_CASE, "both", passes.make_call("both", HEAD, HEAD_CASE, given, peer)())
    logits = given["hidden"] @ given["weight"].t()
    torch.testing.assert_close(found["hidden"], logits @ given["weight"])
    torch.testing.assert_close(found["weight"], logits.t() @ given["hidden"])


def test_a_pass_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="forward, backward or both; got 'sideways'"):
        passes.make_call("sideways", LOSS, CASE, tensors.make_inputs(LOSS, CASE, "cpu"), Peer(plain_loss))
