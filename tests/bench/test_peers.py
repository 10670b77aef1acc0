"""How peers are called: Liger and QuACK as their own signatures want it, torch as people write it, and who cannot."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fuselm.ops
from fuselm.bench import bare, liger, peers, quack, tensors
from fuselm.kernels.linear_cross_entropy import HeadCase
from fuselm.kernels.spec import Case, InputSpec, ops

OPS = ops()
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


def stand_in(monkeypatch: pytest.MonkeyPatch, answer: Any = None) -> Calls:
    """Put a stand-in in the place of every module of Liger and QuACK."""
    module = Calls(answer)
    for peer in (liger, quack):
        monkeypatch.setattr(peer, "import_module", lambda name: module)
    return module


def called(monkeypatch: pytest.MonkeyPatch, peer: str, op: str, case: Case, answer: Any = None) -> tuple[Any, Calls]:
    """A peer's answer for a case, and what it was called with."""
    module = stand_in(monkeypatch, answer)
    found = peers.implementations(op, case, "cuda", (peer,))[peer]
    assert found.call is not None, found.note
    result = found.call(**tensors.make_inputs(OPS[op], case, "cpu"), **case.options)
    return result, module


def pretend_op(monkeypatch: pytest.MonkeyPatch, op: str, given: dict[str, torch.Tensor]) -> None:
    """Let the registry have an op of these inputs, whether it has it yet or not."""
    specs = {name: InputSpec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in given.items()}
    for module in (liger, peers):
        monkeypatch.setattr(module, "ops", lambda: {op: SimpleNamespace(inputs=lambda case: specs)})


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
    stand_in(monkeypatch)
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
        ("liger", "cross_entropy", replace(LOSS_CASE, options={"inplace": True}), "it has no inplace"),
        ("quack", "cross_entropy", Case("", (4, 8), "float32", {"z_loss": 0.1}), "it has no z_loss"),
        ("quack", "layer_norm", NORM_CASE, "no counterpart of layer_norm"),
    ],
)
def test_what_a_peer_lacks_is_said(peer: str, op: str, case: Case, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
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


# ---- ops of plain calls --------------------------------------------------------------------------------------------

X, Y = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), torch.linspace(-2, 2, 64).view(4, 16)
IDS, TABLE = torch.tensor([[3, 0, 3], [1, 1, 4]]), torch.linspace(-1, 1, 40).view(5, 8)
HEADS = {"q": torch.randn(2, 3, 4, 8), "k": torch.randn(2, 3, 2, 8), "cos": torch.randn(7, 4), "sin": torch.randn(7, 4)}
PACKED = {"qkv": torch.randn(2, 3, 6, 8), "cos": HEADS["cos"], "sin": HEADS["sin"]}
PLACES = torch.tensor([[6, 0, 2], [1, 1, 5]])
NORMS = {"q_weight": torch.linspace(0.5, 2, 8), "k_weight": torch.linspace(2, 0.5, 8)}

PLAIN_CALLS = [
    ("gelu", {"x": X}, {}),
    ("gelu", {"x": X}, {"approximate": "tanh"}),
    ("silu", {"x": X}, {}),
    ("relu2", {"x": X}, {}),
    ("swiglu", {"gate": X, "up": Y}, {}),
    ("swiglu", {"gate": X}, {}),
    ("geglu", {"gate": X, "up": Y}, {"approximate": "tanh"}),
    ("geglu", {"gate": X}, {}),
    ("add", {"x": X, "y": Y[0]}, {"scale": 0.5}),
    ("mul", {"x": X, "y": Y}, {}),
    ("embedding", {"ids": IDS, "weight": TABLE}, {}),
    ("embedding", {"ids": IDS, "weight": TABLE, "position_weight": TABLE}, {}),
    ("embedding", {"ids": IDS, "weight": TABLE, "position_weight": TABLE, "positions": IDS}, {}),
    ("rope", HEADS, {}),
    ("rope", {**HEADS, "positions": PLACES}, {}),
    ("rope", {**HEADS, "positions": PLACES[0], **NORMS}, {"interleaved": True, "eps": 0.1}),
    ("rope", {**HEADS, **NORMS}, {}),
    ("rope_qkv", PACKED, {}),
    ("rope_qkv", {**PACKED, "positions": PLACES}, {"kv_heads": 1, "interleaved": True}),
]


@pytest.mark.parametrize(("op", "given", "options"), PLAIN_CALLS)
def test_plain_calls_take_the_ops_options_and_give_its_results(
    op: str, given: dict[str, torch.Tensor], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = getattr(fuselm.ops, op)(**given, **options)
    pretend_op(monkeypatch, op, given)
    written = peers.bare_torch(op, Case("", (4, 16), "float32", options), "cpu")
    torch.testing.assert_close(written(**given, **options), expected)


def test_a_result_in_another_dtype_is_that_of_the_same_rows() -> None:
    wanted = bare.embedding(IDS, TABLE, dtype="bfloat16")
    assert torch.equal(wanted, bare.embedding(IDS, TABLE, dtype=torch.bfloat16))
    assert torch.equal(wanted, TABLE[IDS].bfloat16())


def test_what_nobody_writes_is_left_to_the_reference() -> None:
    assert bare.takes("rope", [*HEADS, "positions", "interleaved"])
    assert not bare.takes("rope", [*HEADS, "inplace"])
    assert not bare.takes("rope", ["q", "k"])
    assert not bare.takes("norm_of_all", ["x"])


def test_tables_are_made_once_for_the_tensors_of_a_case() -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    call = bare.with_tables(lambda q, k, cos, sin, *rest: seen.append((cos, sin)))
    q = HEADS["q"].bfloat16()
    for _ in range(2):
        call(**{**HEADS, "q": q})
    call(**{**HEADS, "q": q, "positions": PLACES})
    call(**{**HEADS, "q": q, "cos": HEADS["cos"].clone()})
    assert seen[0][0] is seen[1][0]
    assert len({id(cos) for cos, _ in seen}) == 3
    assert [tuple(cos.shape) for cos, _ in seen] == [(3, 8), (3, 8), (2, 3, 8), (3, 8)]
    assert seen[0][0].dtype == torch.bfloat16
    assert torch.equal(seen[0][1][:, :4], HEADS["sin"][:3].bfloat16())


def of_liger(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    given: dict[str, torch.Tensor],
    options: dict[str, Any],
    answer: Any = None,
) -> tuple[peers.Peer, Calls]:
    """Liger's peer of a case, called if it can do it, and what it was called with."""
    module = stand_in(monkeypatch, answer)
    pretend_op(monkeypatch, op, given)
    peer = peers.implementations(op, Case("", (4, 16), "float32", options), "cuda", ("liger",))["liger"]
    if peer.call is not None:
        peer.call(**given, **options)
    return peer, module


def test_liger_writes_over_gate_and_up_where_they_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = {"gate": X, "up": Y}
    for op, options in (("swiglu", {}), ("geglu", {"approximate": "tanh"})):
        peer, calls = of_liger(monkeypatch, op, apart, options)
        assert (peer.overwrites, peer.in_place, peer.capture) == (("gate", "up"), False, True)
        assert calls.arguments == (X, Y)
    peer, calls = of_liger(monkeypatch, "swiglu", {"gate": X}, {})
    assert (peer.overwrites, calls.arguments) == ((), (X,))
    peer, calls = of_liger(monkeypatch, "geglu", {"gate": X}, {"approximate": "tanh"})
    assert [tuple(half.shape) for half in calls.arguments] == [(4, 8), (4, 8)]


def test_liger_turns_heads_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = (torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 3, 8))
    peer, calls = of_liger(monkeypatch, "rope", HEADS, {}, turned)
    assert (peer.overwrites, peer.in_place) == (("q", "k"), True)
    q, k, cos, sin = calls.arguments
    assert [tuple(x.shape) for x in (q, k, cos, sin)] == [(2, 4, 3, 8), (2, 2, 3, 8), (3, 8), (3, 8)]
    assert q.data_ptr() == HEADS["q"].data_ptr()


def test_liger_looks_rows_up_and_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = of_liger(monkeypatch, "embedding", {"ids": IDS, "weight": TABLE}, {"dtype": "bfloat16"}, TABLE[IDS])
    assert calls.arguments == (TABLE, IDS)
    _, calls = of_liger(monkeypatch, "relu2", {"x": X}, {})
    assert calls.arguments == (X,)


@pytest.mark.parametrize(
    ("op", "given", "options", "says"),
    [
        ("gelu", {"x": X}, {}, "no counterpart of gelu"),
        ("geglu", {"gate": X, "up": Y}, {}, "by tanh"),
        ("swiglu", {"gate": X, "up": Y.bfloat16()}, {}, "one dtype"),
        ("relu2", {"x": torch.empty(1, 70000)}, {}, "at most 65536; the case's have 70000"),
        ("swiglu", {"gate": torch.empty(1, 140000)}, {}, "the case's have 70000"),
        ("embedding", {"ids": IDS, "weight": TABLE, "position_weight": TABLE}, {}, "no positions"),
        ("rope", HEADS, {"interleaved": True}, "halves, not neighbours"),
        ("rope", {**HEADS, **NORMS}, {}, "no norm of q and k"),
        ("rope", HEADS, {"inplace": True}, "it has no inplace"),
    ],
)
def test_what_liger_lacks_of_them_is_said(
    op: str, given: dict[str, torch.Tensor], options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, _ = of_liger(monkeypatch, op, given, options)
    assert peer.call is None
    assert says in peer.note


def test_under_torch_compile_the_tables_are_ready_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lambda *rest: given.append(rest))
    pretend_op(monkeypatch, "rope", HEADS)
    peers.implementations("rope", Case("", (2, 3, 4, 8)), "cpu", ("compile",))["compile"].call(**HEADS)
    (call,) = given
    assert [tuple(x.shape) for x in call[:4]] == [(2, 3, 4, 8), (2, 3, 2, 8), (3, 8), (3, 8)]
    assert call[4:] == (False, None, None, None)
