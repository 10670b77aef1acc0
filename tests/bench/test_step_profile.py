"""Where a step's time goes: kinds of kernels by their names, and a profile of real steps on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuselm.bench import step_profile
from fuselm.bench.step_profile import MOST_KERNELS, by_kind, idle_us, kind_of, profiled, short, summed

NORM = (
    "void fuselm::(anonymous namespace)::norm_forward_kernel<fuselm::Format<__nv_bfloat16, 8>, false, 4>"
    "(fuselm::TensorView, float, long)"
)
FLAT = (
    "void fuselm::elementwise::flat_kernel<fuselm::activation::Gated<fuselm::activation::Silu>, 2, 128>(unsigned long)"
)
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NORM, "fuselm"),
        (FLAT, "fuselm"),
        ("fuselm::rms_norm_forward", "fuselm"),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("aten::mm", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1", "attention"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
            "attention",
        ),
        ("triton_red_fused__to_copy_add_mul_pow_12", "torch.compile"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        (COPY, "copy"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>(int)", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>(int)", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)", "reduction"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int)", "sort and index"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::LpNormFunctor<float>>(int)",
            "reduction",
        ),
        ("void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float>(int)", "dropout"),
        ("something_nobody_knows", "other"),
    ],
)
def test_a_kernels_name_tells_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "called"),
    [
        (NORM, "fuselm norm_forward"),
        (FLAT, "fuselm elementwise"),
        ("fuselm::rms_norm_forward", "fuselm::rms_norm_forward"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, f<int>>>(int)", "reduce_kernel"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<f, 2>(f*)", "CatArrayBatchedCopy"),
        ("nvjet_tst_256x128", "nvjet_tst_256x128"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_a_kernel_is_called_by_a_name_that_can_be_read(name: str, called: str) -> None:
    assert short(name) == called


def test_kernels_of_a_name_are_one_row_of_one_step() -> None:
    events = [(NORM, 10.0, 1)] * 8 + [("nvjet_a", 30.0, 1)] * 4 + [("Optimizer.step#AdamW.step", 1e6, 1)]
    assert summed(events, steps=4) == [
        {"kind": "matmul", "kernel": "nvjet_a", "calls": 1.0, "ms": pytest.approx(0.03)},
        {"kind": "fuselm", "kernel": "fuselm norm_forward", "calls": 2.0, "ms": pytest.approx(0.02)},
    ]


def test_kernels_of_one_name_and_two_kinds_are_two_rows() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::{}<float>, std::array<char*, 3>>(int)"
    found = summed([(name.format("FillFunctor"), 1.0, 1), (name.format("CUDAFunctor_add"), 1e3, 1)], steps=1)
    assert [(row["kind"], row["ms"]) for row in found] == [("elementwise", 1.0), ("copy", pytest.approx(1e-3))]


def test_a_profiler_that_sees_nothing_is_no_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "_events", lambda profiler, on_gpu: [])
    with pytest.raises(RuntimeError, match="the profiler saw none on cpu"):
        profiled(lambda: torch.ones(1), torch.device("cpu"), steps=1)


def test_what_counts_little_is_one_row() -> None:
    rows = summed([(f"nvjet_{number}", 100.0 - number, 1) for number in range(MOST_KERNELS + 3)], steps=1)
    kept = step_profile._largest(rows)
    assert len(kept) == MOST_KERNELS + 1
    assert kept[-1] == {"kind": "other", "kernel": "3 more", "calls": 3.0, "ms": pytest.approx(0.117)}


def test_kinds_are_summed_and_idle_time_is_one_of_them() -> None:
    found = {"gap_ms": 0.5, "kernels": summed([(NORM, 1e3, 1), (FLAT, 2e3, 1), ("nvjet_a", 9e3, 1)], steps=1)}
    assert by_kind(found) == [
        {"kind": "matmul", "ms": 9.0}, {"kind": "fuselm", "ms": 3.0}, {"kind": "nothing", "ms": 0.5},
    ]  # fmt: skip


def event(name: str, device: str, us: float, annotation: bool = False, start: float = 0.0) -> Any:
    where, span = SimpleNamespace(name=device), SimpleNamespace(elapsed_us=lambda: us, start=start, end=start + us)
    return SimpleNamespace(name=name, device_type=where, time_range=span, is_user_annotation=annotation)


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], 0.0),
        ([(5.0, 9.0)], 0.0),
        ([(7.0, 9.0), (0.0, 4.0), (4.0, 5.0)], 2.0),
        ([(0.0, 10.0), (2.0, 3.0), (11.0, 12.0)], 1.0),  # one within another
        ([(0.0, 5.0), (3.0, 7.0), (8.5, 9.0)], 1.5),
    ],
)
def test_idle_is_when_no_kernel_runs(spans: list[tuple[float, float]], idle: float) -> None:
    assert idle_us(spans) == idle


@pytest.mark.parametrize(
    ("step_ms", "gap_ms", "slower_ms"),
    [
        (9.0, 1.0, 2.0),  # the profile's own gaps, and kernels that took less than they do otherwise
        (6.5, 0.5, 0.0),  # a host that the profiler made slower
        (5.0, 0.0, 0.0),
    ],
)
def test_a_step_is_kernels_and_gaps_and_what_it_takes_longer_when_nobody_looks(
    step_ms: float, gap_ms: float, slower_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [event("nvjet_a", "CUDA", 4e3), event(NORM, "CUDA", 2e3, start=5e3), event("aten::mm", "CPU", 1e5)]
    clock = iter((0.0, step_ms / 1e3))
    monkeypatch.setattr(step_profile, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(step_profile, "wait", lambda device: None)
    monkeypatch.setattr("torch.profiler.profile", lambda **given: nullcontext(SimpleNamespace(events=lambda: events)))
    found = profiled(lambda: None, torch.device("cuda"), steps=1)
    assert (found["step_ms"], found["gap_ms"], found["slower_ms"]) == (step_ms, gap_ms, slower_ms)
    assert [row["ms"] for row in by_kind(found)] == [4.0, 2.0, gap_ms, slower_ms]


def test_on_a_gpu_kernels_count_and_annotations_around_them_do_not() -> None:
    events = [event(NORM, "CUDA", 5.0), event("aten::mm", "CPU", 99.0), event("## Call", "CUDA", 50.0, annotation=True)]
    found = step_profile._events(SimpleNamespace(events=lambda: events), on_gpu=True)
    assert found == [(NORM, 5.0, 1)]


def test_a_profile_of_real_steps() -> None:
    made: list[int] = []
    a = torch.randn(128, 128)

    def step() -> None:
        made.append(1)
        (a @ a).softmax(-1).sum()

    found = profiled(step, torch.device("cpu"), steps=3)
    assert len(made) == 1 + 3 + 3
    calls = {row["kernel"]: row["calls"] for row in found["kernels"]}
    assert (calls["aten::mm"], calls["aten::_softmax"], calls["aten::sum"]) == (1.0, 1.0, 1.0)
    assert all(row["ms"] > 0 for row in found["kernels"])
    assert found["step_ms"] > 0
    assert found["gap_ms"] >= 0
    assert "slower_ms" not in found
