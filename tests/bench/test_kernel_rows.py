"""Rows: which cases are taken, what a row holds, how errors are judged, and that a failing peer ends nothing."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fuselm.bench import accuracy, kernels, latency, liger, merging, peers, quack, report, tensors
from fuselm.bench.kernels import Plan
from fuselm.bench.report import Results
from fuselm.kernels.embedding import EmbeddingCase
from fuselm.kernels.linear_cross_entropy import HeadCase
from fuselm.kernels.spec import Case, OpSpec, ops

PLAN = Plan(("rms_norm",), "cpu", ("fused", "torch"), quick=True, containing="residual 256x1024")


@pytest.fixture(scope="module")
def results() -> Results:
    found = Results()
    kernels.run(PLAN, found)
    return found


def test_each_pass_and_implementation_has_a_row(results: Results) -> None:
    assert {(row["pass"], row["impl"]) for row in results.rows} == {
        (which, impl) for which in ("forward", "backward") for impl in ("fused", "torch")
    }
    assert results.notes == []


def test_rows_have_exactly_the_fields_of_the_schema(results: Results) -> None:
    assert all(set(row) == set(report.ROW_FIELDS) for row in results.rows)
    assert all(set(row) == set(report.HOST_FIELDS) for row in results.host)
    assert {row["impl"] for row in results.host} == {"fused", "torch"}


def test_row_figures_follow_from_one_another(results: Results) -> None:
    case = Case("", (256, 1024), "bfloat16", {}, {"weight": "bfloat16", "residual": "bfloat16"})
    for row in results.rows:
        cost = ops()["rms_norm"].cost(case, row["pass"])
        assert (row["bytes"], row["flops"], row["device"]) == (cost.bytes, cost.flops, "cpu")
        assert row["share_of_copy"] == pytest.approx(row["copy_us"] / row["gpu_us"], rel=1e-3)
        assert row["tbytes_per_s"] == pytest.approx(row["bytes"] / row["gpu_us"] / 1e6, rel=1e-3)
        assert row["gpu_us_p10"] <= row["gpu_us"] <= row["gpu_us_p90"]


def test_errors_are_those_of_bfloat16_and_torch_is_its_own_reference(results: Results) -> None:
    for row in results.rows:
        assert 0 < row["rms_error"] < 2**-7
        if row["impl"] == "torch":
            assert (row["max_error"], row["rms_error"]) == (row["reference_error"], row["reference_rms_error"])


def test_csv_and_json_give_the_rows_back(results: Results) -> None:
    written = list(csv.DictReader(io.StringIO(report.to_csv(results.rows, report.ROW_FIELDS))))
    assert [row["shape"] for row in written] == ["256x1024"] * 4
    assert [float(row["gpu_us"]) for row in written] == [row["gpu_us"] for row in results.rows]
    assert json.loads(report.to_json({"gpu": None, **results.tables()}))["rows"] == results.rows


def test_an_error_in_one_element_is_found() -> None:
    case = Case("", (64, 32))
    truth = {"y": torch.ones(64, 32, dtype=torch.float64)}
    got = {"y": torch.ones(64, 32)}
    assert accuracy.errors(case, got, truth) == accuracy.Errors(0.0, 0.0)
    got["y"][-1, -1] = 3.0
    assert accuracy.errors(case, got, truth).max == pytest.approx(2.0)
    got["y"][0, 0] = math.nan
    assert math.isnan(accuracy.errors(case, got, truth).max or 0.0)


def test_large_cases_are_compared_at_rows_all_over_and_without_sums_over_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "MAX_ELEMENTS", 8 * 32)
    op, case = ops()["rms_norm"], Case("", (64, 32), "float32", {}, {"weight": "float32"})
    inputs = tensors.make_inputs(op, case, "cpu")
    cotangents = {"y": torch.ones(64, 32)}
    truth = accuracy.backward_truth(op, case, inputs, cotangents)
    whole = op.oracle_backward(torch, {k: v.double() for k, v in inputs.items()}, {"y": cotangents["y"].double()}, {})
    assert set(truth) == {"x"}
    assert torch.equal(truth["x"], whole["x"][::8])


def test_a_peer_that_raises_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel for this\nand a long trace")

    fine = peers.Peer(peers.reference("rms_norm"))
    offered = {"fused": fine, "liger": peers.Peer(broken), "quack": peers.Peer(None, "not installed")}
    monkeypatch.setattr(kernels.peers, "implementations", lambda *arguments: offered)
    found = Results()
    kernels.run(PLAN, found)
    assert {row["impl"] for row in found.rows} == {"fused"}
    notes = {(note["impl"], note["pass"]): note["note"] for note in found.notes}
    assert notes[("liger", "forward")] == notes[("liger", "backward")] == "RuntimeError: no kernel for this"
    assert notes[("quack", "")] == "not installed"


def test_wrong_numbers_become_a_note_and_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = peers.reference("rms_norm")
    offered = {"liger": peers.Peer(lambda **given: tuple(part * math.nan for part in plain(**given)))}
    monkeypatch.setattr(kernels.peers, "implementations", lambda *arguments: {**offered, "fused": peers.Peer(plain)})
    found = Results()
    kernels.run(PLAN, found)
    assert {row["impl"] for row in found.rows} == {"fused"}
    assert "NaN" in found.notes[0]["note"]


def test_short_calls_take_turns_elsewhere_in_memory_and_all_repeats_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    places: list[int] = []
    times = {"a": itertools.cycle([[6.0, 4.0], [5.0, 3.0]]), "b": itertools.cycle([[5.0], [6.0]])}

    class Clock:
        device = "cpu"

        def device_samples(self, call: Callable[[], str], capture: bool, most: int) -> tuple[list[float], bool]:
            order.append(call())
            assert most == 3
            return next(times[order[-1]]), capture and order[-1] == "a"

    def row(us: float, which: str = "forward") -> dict[str, Any]:
        timed = {"gpu_us": us, "gpu_us_p10": us, "gpu_us_p90": us, "graph": False, "share_of_copy": 1.0}
        return {**timed, "pass": which, "bytes": 18_000_000, "copy_us": 2.25, "tbytes_per_s": 0.0, "impl": "kept"}

    def implementation(name: str) -> Callable[..., str]:
        def call(**given: torch.Tensor) -> str:
            places.append(given["x"].data_ptr())
            return name

        return call

    def made(*arguments: Any) -> Callable[[], str]:
        assert not any(call() for call in calls), "the call before is still there"
        call = made_by_kernels(*arguments)
        calls.append(weakref.ref(call))
        return call

    calls: list[weakref.ref[Any]] = []
    made_by_kernels = kernels.make_call
    monkeypatch.setattr(kernels, "make_call", made)

    op = ops()["softmax"]
    case = next(case for case in op.bench_cases if not case.options)
    case = replace(case, shape=(2, 8))
    bench = kernels.Bench(op, case, Clock(), tensors.make_inputs(op, case, "cpu"))  # type: ignore[arg-type]
    rows = {"a": row(5.0), "b": row(6.0), "far": row(6.6)}
    other = row(9.0, "backward"), peers.Peer(None)
    assert kernels.worth_turns([(rows["far"], other[1]), other]) == [(rows["far"], other[1]), other]
    turns = kernels.Turns(first=8, repeats=3, more=((4, 1.3), (8, 1.04)))
    kernels.take_turns(bench, [(rows[name], peers.Peer(implementation(name))) for name in rows], turns)
    assert order == ["a", "b", "b", "a"] * 6  # none is always the first
    assert places[::2] == places[1::2]  # both see the same memory in a turn
    assert len({bench.tensors["x"].data_ptr(), *places}) == 12 + 1  # and other memory in the next
    assert rows["a"] == row(5.0) | {
        "gpu_us": 4.5,
        "gpu_us_p10": 3.0,
        "gpu_us_p90": 6.0,
        "graph": True,
        "share_of_copy": 0.5,
        "tbytes_per_s": 4.0,
    }
    assert (rows["b"]["gpu_us"], rows["b"]["graph"]) == (5.5, False)
    assert rows["far"] == row(6.6)  # too far behind for a second look
    kernels.take_turns(bench, [], turns)  # nothing short, nothing to do
    assert len(order) == 2 * 12
    times["b"] = itertools.cycle([[4.6], [4.7]])
    kernels.take_turns(bench, [(rows[name], peers.Peer(implementation(name))) for name in rows], turns)
    assert len(order) == 2 * 12 + 2 * 20  # too close to say after twelve turns
    assert rows["b"]["gpu_us"] == 4.65
    order.clear()
    times["b"] = itertools.cycle([[6.4]])
    kernels.take_turns(bench, [(rows[name], peers.Peer(implementation(name))) for name in ("a", "b")], turns)
    assert len(order) == 2 * 8  # far enough apart


def test_the_two_best_of_a_pass_may_be_close() -> None:
    near = [({"pass": which}, peers.Peer(None)) for which in ("forward", "backward", "forward", "forward")]
    assert kernels.close_calls(near, [[10.0], [5.0], [10.3, 10.4], [12.0]], 1.04) == [0, 2]
    assert kernels.close_calls(near, [[10.0], [5.0], [10.5], [12.0]], 1.04) == []
    assert kernels.close_calls(near, [[10.0], [5.0], [10.5], [12.0]], 1.3) == [0, 2, 3]


@pytest.mark.parametrize("layout", ["contiguous", "strided", "columns", "offset", "transposed"])
def test_inputs_elsewhere_hold_and_lie_as_they_did(layout: str) -> None:
    op, case = ops()["softmax"], Case("", (2, 3, 4, 8), "bfloat16", layout=layout)
    bench = kernels.Bench(op, case, None, tensors.make_inputs(op, case, "cpu"))  # type: ignore[arg-type]
    here, there = bench.tensors["x"], bench.elsewhere(math.inf).tensors["x"]
    assert torch.equal(here, there)
    assert (here.stride(), here.storage_offset()) == (there.stride(), there.storage_offset())
    assert here.data_ptr() != there.data_ptr()
    assert bench.elsewhere(8).tensors["x"] is here  # too large to be moved


def test_a_peer_that_works_in_place_gets_copies_in_forward_too() -> None:
    op, case = ops()["softmax"], Case("", (2, 8))
    bench = kernels.Bench(op, case, None, tensors.make_inputs(op, case, "cpu"))  # type: ignore[arg-type]
    before = bench.tensors["x"].clone()
    bench.call("forward", peers.Peer(lambda x: x.zero_(), overwrites=("x",), in_place=True))()
    assert torch.equal(bench.tensors["x"], before)
    bench.call("forward", peers.Peer(lambda x: x.zero_(), overwrites=("x",)))()
    assert not bench.tensors["x"].any()


def test_calls_that_are_short_or_hot_take_turns_and_others_do_not() -> None:
    memory, arithmetic = {"bytes": 1000, "flops": 1000}, {"bytes": 1000, "flops": 1000_000}
    assert kernels.turns_of({"gpu_us": 19.0, **memory}) == kernels.SHORT
    assert kernels.turns_of({"gpu_us": 19.0, **arithmetic}) == kernels.SHORT
    assert kernels.turns_of({"gpu_us": 80_000.0, **arithmetic}) == kernels.HOT
    assert kernels.turns_of({"gpu_us": 80_000.0, **memory}) is None


def test_a_used_up_budget_is_noted_case_by_case() -> None:
    found = Results()
    kernels.run(replace(PLAN, seconds=-1.0), found)
    assert found.rows == []
    assert [(note["pass"], note["note"]) for note in found.notes] == [
        ("", kernels.TOO_LATE),
        ("latency", kernels.TOO_LATE),
    ]


def test_what_is_done_is_left_out() -> None:
    plan = Plan(("softmax",), "cuda")
    row = {"op": "softmax", "impl": "fused", "case": "plain", "dtype": "bfloat16"}
    case = next(case for case in ops()["softmax"].bench_cases if (case.name, case.dtype) == ("plain", "bfloat16"))
    done = merging.measured_labels({"rows": [{**row, "shape": list(case.shape)}], "host": [row]})
    left = [kernels.step_label(*step) for step in kernels.in_turn(replace(plan, done=done))]
    everything = [kernels.step_label(*step) for step in kernels.in_turn(plan)]
    assert set(everything) - set(left) == {kernels.case_label("softmax", case), "softmax latencies"}
    assert len(left) == len(everything) - 2


def test_ops_take_turns_and_large_cases_come_first() -> None:
    plan = Plan(("layer_norm", "softmax"), "cuda")
    steps = list(kernels.in_turn(plan))
    assert [op.name for op, _ in steps[:6]] == ["layer_norm", "softmax"] * 3
    assert [case for _, case in steps[2:4]] == [None, None]  # latencies, after one case each
    of_norm = [case for op, case in steps if op.name == "layer_norm" and case is not None]
    sizes = [kernels.is_large(ops()["layer_norm"], case) for case in of_norm]
    assert sizes == sorted(sizes, reverse=True)
    assert sorted(map(repr, of_norm)) == sorted(map(repr, ops()["layer_norm"].bench_cases))
    assert kernels.steps(plan) == len(steps)


def test_rows_are_in_the_registrys_order_whatever_was_measured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_case(op: OpSpec, case: Case, timer: object, plan: Plan, results: Results) -> None:
        results.rows.append({"op": op.name, "case": case.name, "dtype": case.dtype, "shape": list(case.shape)})

    monkeypatch.setattr(kernels, "is_large", lambda op, case: case.dtype == "float32")
    monkeypatch.setattr(kernels, "_measure_case", measure_case)
    monkeypatch.setattr(kernels.latency, "measure", lambda *arguments: None)
    measured: list[str] = []
    of_one = Plan(("rms_norm", "softmax"), "cpu", ("torch",), quick=True, containing="rms_norm")
    assert {op.name for op, _ in kernels.in_turn(of_one)} == {"rms_norm"}
    plan = Plan(("rms_norm",), "cpu", ("torch",), quick=True, containing="plain")
    found = Results()
    kernels.run(plan, found, measured.append)
    assert [label.split()[-1] for label in measured] == ["float32", "latencies", "bfloat16"]
    assert [row["dtype"] for row in found.rows] == ["bfloat16", "float32"]


def test_a_pass_that_a_peer_lacks_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {"liger": peers.Peer(peers.reference("rms_norm"), "no backward", passes=("forward",))}
    monkeypatch.setattr(kernels.peers, "implementations", lambda *arguments: offered)
    monkeypatch.setattr(kernels.latency, "measure", lambda *arguments: None)
    found = Results()
    kernels.run(PLAN, found)
    assert [row["pass"] for row in found.rows] == ["forward"]
    assert [(note["pass"], note["note"]) for note in found.notes] == [("backward", "no backward")]


def test_a_result_that_is_not_the_ops_is_timed_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = peers.reference("rms_norm")
    nothing = peers.Peer(lambda **given: tuple(part * math.nan for part in plain(**given)), compares=False)
    monkeypatch.setattr(kernels.peers, "implementations", lambda *arguments: {"matmuls": nothing})
    monkeypatch.setattr(kernels.latency, "measure", lambda *arguments: None)
    found = Results()
    kernels.run(PLAN, found)
    assert found.notes == []
    assert {row["rms_error"] for row in found.rows} == {None}
    assert all(row["gpu_us"] > 0 for row in found.rows)


def test_quick_takes_one_case_of_each_kind() -> None:
    op = ops()["rms_norm"]
    quick, full = Plan(("rms_norm",), "cuda", quick=True).cases(op), Plan(("rms_norm",), "cuda").cases(op)
    assert full == list(op.bench_cases)
    assert [(case.name, case.dtype) for case in quick] == list(dict.fromkeys((case.name, case.dtype) for case in full))


def test_a_cpu_gets_fewer_rows_of_the_same_width() -> None:
    op = ops()["rms_norm"]
    for case in Plan(("rms_norm",), "cpu").cases(op):
        assert case.size <= kernels.CPU_ELEMENTS
        assert case.shape[-1] in {full.shape[-1] for full in op.bench_cases}


def test_cutting_down_keeps_the_width_and_shrinks_a_vocabulary() -> None:
    assert latency.cut_down(Case("", (4, 16, 1024, 1000)), 5000).shape == (1, 1, 5, 1000)
    assert latency.cut_down(Case("", (8, 1000)), 10).shape == (1, 1000)
    head = latency.cut_down(HeadCase("head of 500", (64, 32), vocabulary=500, targets=(0, 500)), 320)
    assert (head.name, head.shape, head.vocabulary, head.targets) == ("head of 10", (10, 32), 10, (0, 10))
    words = latency.cut_down(EmbeddingCase("words", (64, 32), vocabulary=500, drawn=(3, 400)), 320)
    assert (words.shape, words.vocabulary, words.drawn) == ((10, 32), 10, None)


def test_heads_that_are_the_same_once_cut_down_are_measured_once() -> None:
    cases = Plan(("linear_cross_entropy",), "cpu").cases(ops()["linear_cross_entropy"])
    assert sorted((case.name, case.shape) for case in cases) == [("head of 512", (rows, 4096)) for rows in (64, 512)]


@pytest.mark.parametrize("name", ["liger", "quack"])
def test_gpu_peers_say_why_they_are_not_there_on_a_cpu(name: str) -> None:
    peer = peers.implementations("rms_norm", Case("", (4, 8)), "cpu", (name,))[name]
    assert peer.call is None
    assert "GPU" in peer.note


def test_a_peer_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    for module in (liger, quack):
        monkeypatch.setattr(module, "import_module", absent)
    found = peers.implementations("rms_norm", Case("", (4, 8)), "cuda", ("liger", "quack"))
    assert [peer.call for peer in found.values()] == [None, None]
    assert "liger_kernel" in found["liger"].note


def test_liger_is_not_asked_for_a_residual_of_another_dtype() -> None:
    case = Case("", (4, 8), "bfloat16", {}, {"weight": "bfloat16", "residual": "float32"})
    assert "residual in x's dtype" in peers.implementations("rms_norm", case, "cuda", ("liger",))["liger"].note


@pytest.mark.parametrize("layout", ["contiguous", "strided", "columns", "offset", "transposed"])
def test_layouts_hold_the_same_values(layout: str) -> None:
    values = torch.arange(120.0).reshape(2, 3, 4, 5)
    laid_out = tensors.lay_out(values, layout, "cpu")
    assert torch.equal(laid_out, values)
    assert (laid_out.is_contiguous() and laid_out.storage_offset() == 0) == (layout == "contiguous")


def test_inputs_are_the_same_each_time_and_leaves_where_asked() -> None:
    op, case = ops()["rms_norm"], Case("", (3, 8), "bfloat16", {}, {"weight": "float32"})
    first, second = tensors.make_inputs(op, case, "cpu"), tensors.make_inputs(op, case, "cpu", grad=True)
    assert torch.equal(first["x"], second["x"])
    assert (first["weight"].dtype, first["weight"].shape) == (torch.float32, (8,))
    assert second["x"].is_leaf
    assert second["x"].requires_grad
    assert not first["x"].requires_grad
