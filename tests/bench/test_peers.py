"""How peers are called: Liger and QuACK as their own signatures want it, torch as people write it, and who cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuselm.bench import peers, tensors
from fuselm.kernels.linear_cross_entropy import HeadCase
from fuselm.kernels.spec import Case, ops

OPS = ops()  # before a test puts something else in the place of imports
LOSS_CASE = Case("", (6, 40), "float32", {}, {"targets": "int64"}, row_wise=False)
ALL_OPTIONS = {"ignore_index": 3, "z_loss": 0.5, "label_smoothing": 0.1, "reduction": "sum", "softcap": 30.0}
HEAD_CASE = HeadCase("", (6, 8), "float32", {}, {"weight": "float32"}, vocabulary=40, targets=(0, 40))
NORM_CASE = Case("", (4, 8), "float32", {}, {"weight": "float32", "bias": "float32"})


class Calls:
    """Stands for a peer's module: every attribute is an autograd function, and a function, that notes its arguments."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.arguments, self.named = answer, (), {}

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(apply=self) if name.endswith("Function") else self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.arguments, self.named = arguments, named
        return self.answer


def called(monkeypatch: pytest.MonkeyPatch, peer: str, op: str, case: Case, answer: Any = None) -> tuple[Any, Calls]:
    """A peer's answer for a case, and what it was called with."""
    module = Calls(answer)
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: module)
    found = peers.implementations(op, case, "cuda", (peer,))[peer]
    assert found.call is not None, found.note
    result = found.call(**tensors.make_inputs(OPS[op], case, "cpu"), **case.options)
    return result, module


@pytest.mark.parametrize(
    ("options", "settings"),
    [({}, (-100, 0.0, 0.0, "mean", None)), (ALL_OPTIONS, (3, 0.5, 0.1, "sum", 30.0))],
)
def test_ligers_losses_get_every_setting_in_their_order(
    options: dict[str, Any], settings: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = (torch.ones(()), None, None, None)
    case = Case("", (2, 3, 40), "float32", options, {"targets": "int64"}, row_wise=False)
    loss, calls = called(monkeypatch, "liger", "cross_entropy", case, answer)
    assert loss is answer[0]
    assert [tuple(given.shape) for given in calls.arguments[:2]] == [(6, 40), (6,)]
    assert calls.arguments[2:] == (None, *settings)
    head = HeadCase("", (2, 3, 8), "float32", options, {"weight": "float32"}, vocabulary=40, targets=(0, 40))
    _, calls = called(monkeypatch, "liger", "linear_cross_entropy", head, answer)
    assert [tuple(given.shape) for given in calls.arguments[:3]] == [(6, 8), (40, 8), (6,)]
    assert calls.arguments[3:] == (None, None, *settings)


def test_ligers_losses_are_timed_in_the_passes_they_have_and_never_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: Calls(None))
    for op, case, overwritten in (("cross_entropy", LOSS_CASE, ("logits",)), ("linear_cross_entropy", HEAD_CASE, ())):
        peer = peers.implementations(op, case, "cuda", ("liger",))["liger"]
        assert (peer.passes, peer.capture, peer.overwrites) == (("forward", "both"), False, overwritten)


def test_liger_norms_and_softmax_take_their_tensors_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = called(monkeypatch, "liger", "layer_norm", NORM_CASE)
    assert [tuple(given.shape) for given in calls.arguments[:3]] == [(4, 8), (8,), (8,)]
    assert calls.arguments[3] == 1e-5
    _, calls = called(monkeypatch, "liger", "softmax", Case("", (4, 8)))
    assert [tuple(given.shape) for given in calls.arguments] == [(4, 8)]


def test_quack_is_asked_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    y, calls = called(monkeypatch, "quack", "softmax", Case("", (2, 2, 8)), torch.zeros(4, 8))
    assert (tuple(y.shape), tuple(calls.arguments[0].shape)) == ((2, 2, 8), (4, 8))
    case = Case("", (6, 40), "float32", {"ignore_index": 3}, {"targets": "int64"}, row_wise=False)
    _, calls = called(monkeypatch, "quack", "cross_entropy", case)
    assert calls.named == {"ignore_index": 3}


@pytest.mark.parametrize(
    ("peer", "op", "case", "says"),
    [
        ("liger", "layer_norm", Case("", (4, 8), "float32", {}, {"weight": "float32"}), "a weight and a bias always"),
        ("liger", "softmax", Case("", (4, 8), "float32", {"causal": True}), "no mask, no causal"),
        ("liger", "softmax", Case("", (4, 8), "float32", {"scale": 0.5}), "no scale"),
        ("liger", "softmax", Case("", (4, 8), "float32", {}, {"mask": "float32"}), "no mask"),
        ("liger", "softmax", Case("", (2, 131072)), "at most 65536; the case's have 131072"),
        ("liger", "cross_entropy", Case("", (4, 8), "float32", {"inplace": True}), "it has no inplace"),
        ("quack", "cross_entropy", Case("", (4, 8), "float32", {"z_loss": 0.1}), "it has no z_loss"),
        ("quack", "layer_norm", NORM_CASE, "no counterpart of layer_norm"),
    ],
)
def test_what_a_peer_lacks_is_said(peer: str, op: str, case: Case, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib, "import_module", lambda name: Calls(None))
    found = peers.implementations(op, case, "cuda", (peer,))[peer]
    assert found.call is None
    assert says in found.note


def test_only_a_head_has_a_floor_of_matmuls() -> None:
    assert "matmuls" in peers.implementations("linear_cross_entropy", HEAD_CASE, "cpu")
    assert "matmuls" not in peers.implementations("softmax", Case("", (4, 8)), "cpu")


@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("rms_norm", Case("", (4, 8), "float32", {}, {"weight": "float32"})),
        ("layer_norm", NORM_CASE),
        ("softmax", Case("", (4, 8))),
        ("cross_entropy", LOSS_CASE),
        ("linear_cross_entropy", HEAD_CASE),
    ],
)
def test_what_people_write_in_torch_is_the_reference_without_its_branches(op: str, case: Case) -> None:
    bare = peers.bare_torch(op, case, "cpu")
    assert bare is not peers.reference(op)
    given = tensors.make_inputs(OPS[op], case, "cpu")
    torch.testing.assert_close(bare(**given), peers.reference(op)(**given))


def test_a_case_with_options_or_other_tensors_is_the_references() -> None:
    options = Case("", (4, 8), "float32", {"causal": True})
    assert peers.bare_torch("softmax", options, "cpu") is peers.reference("softmax")
    residual = Case("", (4, 8), "float32", {}, {"weight": "float32", "residual": "float32"})
    assert peers.bare_torch("rms_norm", residual, "cpu") is peers.reference("rms_norm")
