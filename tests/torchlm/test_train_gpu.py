"""Training on a GPU: 16-bit precisions, determinism to the bit, the resident corpus, the optimiser, every preset."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from fuselm.config import PRESETS
from fuselm.data.loader import Loader
from fuselm.kernels.spec import Tolerance
from fuselm.optim import AdamW
from fuselm.torchlm import feed as feed_module
from fuselm.torchlm.feed import Feed
from fuselm.torchlm.precision import attention_backends
from fuselm.torchlm.state import weight_arrays
from fuselm.torchlm.train import Interrupted, Trainer
from tests.kernels.arrays import assert_same_bits, assert_within_rule, to_numpy
from tests.test_optim import give, gradients, parameters
from tests.torchlm.runs import (
    LATENT,
    MOE,
    Records,
    assert_same_arrays,
    assert_same_state,
    begin,
    memory_shard,
    of_kind,
    prepared,
    stop_after,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

WIDE = {"width": 64, "num_heads": 4, "ffn_width": 128, "num_layers": 2, "context": 32}
LEARN = {"steps": 20, "batch_size": 32, "learning_rate": 1e-2, "warmup": 2, "log_every": 1, "eval_every": 20}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _undo_determinism() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def on_gpu(folder: Path, data: Path, model: dict[str, Any], **train: Any) -> tuple[Trainer, Records]:
    return begin(folder, data, model={**WIDE, **model}, train={**LEARN, **train}, device="cuda")


# --- precisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "model"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("fp16", {}),
        ("bf16", MOE),
        ("bf16", {**LATENT, "kv_latent": 32, "rope_head_dim": 16}),
        ("bf16", {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "dropout": 0.1}),
    ],
    ids=["fp32", "bf16", "fp16", "experts", "latent", "layer-norm"],
)
def test_twenty_steps_bring_the_loss_down(precision: str, model: dict[str, Any], data: Path, tmp_path: Path) -> None:
    trainer, records = on_gpu(tmp_path / "run", data, model, precision=precision)
    assert trainer.precision == precision
    trainer.train()
    losses = [record["loss"] for record in of_kind(records, "step")]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.5
    assert trainer.progress.updates >= 15  # fp16 may skip a few steps until its scale fits
    assert all(parameter.dtype == torch.float32 for parameter in trainer.parameters)
    assert trainer.evaluation().loss < losses[0]


def test_the_loss_is_that_of_a_cpu(data: Path, tmp_path: Path) -> None:
    results = {}
    for device, precision in (("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")):
        options: dict[str, Any] = {**LEARN, "precision": precision}
        trainer, records = begin(tmp_path / f"{device}-{precision}", data, model=WIDE, train=options, device=device)
        trainer.train()
        results[device, precision] = [record["loss"] for record in of_kind(records, "step")]
    assert results["cuda", "fp32"] == pytest.approx(results["cpu", "fp32"], rel=1e-3)
    assert results["cuda", "bf16"] == pytest.approx(results["cpu", "fp32"], rel=3e-2)


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale(data: Path, tmp_path: Path) -> None:
    trainer, records = on_gpu(tmp_path / "run", data, {}, precision="fp16")
    trainer.scaler.scale = 256.0  # small enough to overflow only when it is made to

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad * math.inf if trainer.progress.step == 2 else grad

    trainer.model.embedding.register_hook(hook)
    for _ in range(2):
        trainer.advance()
    before = {name: array.copy() for name, array in weight_arrays(trainer.model).items()}
    trainer.advance()
    assert trainer.scaler.scale == 128.0
    assert_same_arrays(weight_arrays(trainer.model), before)
    assert [record["step"] for record in of_kind(records, "skip")] == [3]
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {2.0}
    trainer.advance()
    assert trainer.progress.updates == 3
    assert not np.array_equal(weight_arrays(trainer.model)["embedding"], before["embedding"])


# --- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [16, 32])  # 32: in one part, and so by 16-bit twins of weights
@pytest.mark.parametrize("model", [{"dropout": 0.1}, MOE, {"attention_path": "written", "norm": "layer"}])
def test_a_deterministic_run_again_and_resumed_has_the_same_bits(
    model: dict[str, Any], micro_batch: int, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"precision": "bf16", "deterministic": True, "micro_batch": micro_batch}
    runs = []
    for name in ("first", "second"):
        trainer, _ = on_gpu(tmp_path / name, data, model, **options)
        trainer.train()
        runs.append(trainer.run)
    for stop in (7, None):
        trainer, _ = on_gpu(tmp_path / "resumed", data, model, **options)
        if stop is None:
            trainer.train()
        else:
            stop_after(trainer, stop)
            with pytest.raises(Interrupted):
                trainer.train()
    assert_same_state(runs[0], runs[1])
    assert_same_state(trainer.run, runs[0])


# --- CUDA graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [16, 32])
@pytest.mark.parametrize(
    ("precision", "model"),
    [
        ("bf16", {"dropout": 0.1}),
        ("fp16", {}),
        ("fp32", {"norm": "layer", "positions": "learned", "bias": True, "tied": True, "attention_path": "written"}),
        ("bf16", MOE),
        ("bf16", {**LATENT, "kv_latent": 32, "rope_head_dim": 16}),
    ],
    ids=["dropout", "fp16", "layer-norm", "experts", "latent"],
)
def test_a_graphed_run_again_and_resumed_has_the_bits_of_an_eager_one(
    precision: str, model: dict[str, Any], micro_batch: int, data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"precision": precision, "deterministic": True, "micro_batch": micro_batch}
    eager, _ = on_gpu(tmp_path / "eager", data, model, cuda_graph=False, **options)
    eager.train()
    graphed, _ = on_gpu(tmp_path / "graphed", data, model, cuda_graph=True, **options)
    graphed.train()
    assert_same_state(graphed.run, eager.run)
    for stop in (7, None):
        resumed, _ = on_gpu(tmp_path / "resumed", data, model, cuda_graph=True, **options)
        if stop is None:
            resumed.train()
        else:
            stop_after(resumed, stop)
            with pytest.raises(Interrupted):
                resumed.train()
    assert_same_state(resumed.run, eager.run)


def test_a_graphed_run_whose_step_waits_goes_on_without_a_graph_to_the_same_bits(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16", "deterministic": True, "micro_batch": 16}
    eager, _ = on_gpu(tmp_path / "eager", data, {"dropout": 0.1}, cuda_graph=False, **options)
    eager.train()
    first, _ = on_gpu(tmp_path / "parts", data, {"dropout": 0.1}, cuda_graph=True, **options)
    stop_after(first, 7)
    with pytest.raises(Interrupted):
        first.train()
    second, _ = on_gpu(tmp_path / "parts", data, {"dropout": 0.1}, cuda_graph=True, **options)
    loss = second.loss

    def waits(inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        value, balance = loss(inputs, targets)
        value.item()
        return value, balance

    second.loss = waits
    with pytest.warns(RuntimeWarning, match="This run goes on without one"):
        second.train()
    assert_same_state(second.run, eager.run)


def test_the_usual_attention_can_be_recorded_and_dropout_has_the_same_masks(data: Path, tmp_path: Path) -> None:
    """Its backward adds up in no fixed order: so the first loss alone is the same to the bit."""
    losses = []
    for graphed in (False, True):
        trainer, records = on_gpu(
            tmp_path / str(graphed), data, {"dropout": 0.1}, precision="bf16", cuda_graph=graphed, micro_batch=16
        )
        trainer.train()
        losses.append([record["loss"] for record in of_kind(records, "step")])
    assert losses[0][0] == losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_graphed_step_that_overflows_is_skipped_and_the_next_has_half_the_scale(data: Path, tmp_path: Path) -> None:
    trainer, records = on_gpu(tmp_path / "run", data, {}, precision="fp16", cuda_graph=True, steps=30)
    trainer.scaler.scale = 2.0**36  # a logit's gradient is 2 ** -10 or so, and fp16 ends at 2 ** 16
    for _ in range(30):
        trainer.advance()
    skips = of_kind(records, "skip")
    assert 5 < len(skips) < 30
    assert [record["loss_scale"] for record in skips] == [2.0 ** (36 - index) for index in range(len(skips))]
    assert trainer.progress.updates == 30 - len(skips)


def test_where_nobody_says_small_steps_are_a_graph_and_those_with_hooks_are_not(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16", "deterministic": True}
    by_itself, _ = on_gpu(tmp_path / "by-itself", data, {}, **options)
    by_itself.train()
    asked, _ = on_gpu(tmp_path / "asked", data, {}, cuda_graph=True, **options)
    asked.train()
    hooked, _ = on_gpu(tmp_path / "hooked", data, {}, **options)
    called: list[int] = []
    hooked.model.norm.register_forward_hook(lambda *given: called.append(1))
    for _ in range(3):
        hooked.advance()
    assert (by_itself.is_graphed, asked.is_graphed, hooked.is_graphed, len(called)) == (True, True, False, 3)
    ours, theirs = by_itself.run.load("last"), asked.run.load("last")
    assert_same_arrays(ours.weights, theirs.weights)


@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_a_compiled_model_can_be_recorded(data: Path, tmp_path: Path) -> None:
    torch.compiler.reset()
    trainer, records = on_gpu(tmp_path / "run", data, {}, precision="bf16", cuda_graph=True, compile=True)
    trainer.train()
    losses = [record["loss"] for record in of_kind(records, "step")]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1.5


# --- the corpus on the GPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_resident_and_copied_rows_are_the_loaders(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    top = 2**16 if dtype == "uint16" else 2**31
    shard = memory_shard(np.random.default_rng(0).integers(0, top, 5000), dtype)
    place: dict[str, Any] = {"batch_size": 8, "context": 32, "seed": 1}
    device = torch.device("cuda")
    resident = Feed(shard, device=device, **place)
    monkeypatch.setattr(feed_module, "RESIDENT_SHARE", 0.0)
    copied = Feed(shard, device=device, **place)
    assert (resident.resident, copied.resident) == (True, False)
    loader = Loader(shard, **place)
    for _ in range(2 * loader.steps_per_epoch):
        batch = next(loader)
        for feed in (resident, copied):
            (first, targets), (second, _) = list(feed.next(4))
            assert first.device.type == "cuda"
            assert first.tolist() + second.tolist() == batch.inputs.tolist()
            assert targets.tolist() == batch.targets[:4].tolist()


# --- the optimiser ---------------------------------------------------------------------------------------------------


def moved(dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(param.detach().to("cuda", dtype)) for param in parameters(torch.float32)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("default")  # the compiler's own deprecations
def test_errors_of_fifty_steps_are_no_larger_than_torchs(compiled: bool) -> None:
    torch.compiler.reset()
    # The compiler rounds an average's two products apart: 12 % more error, measured on a CPU.
    tolerance = Tolerance(rms=1.25) if compiled else Tolerance()
    lr = 2.0**-9
    ours, theirs, exact = moved(torch.float32), moved(torch.float32), moved(torch.float64)
    our_optimizer = AdamW(ours, lr=lr, weight_decay=0.1)
    if compiled:
        our_optimizer.compile()
    optimizers: list[Any] = [our_optimizer]
    optimizers += [torch.optim.AdamW(theirs, lr=lr, weight_decay=0.1, foreach=True)]
    optimizers += [torch.optim.AdamW(exact, lr=lr, weight_decay=0.1, foreach=False)]
    columns = []
    for optimizer, params in zip(optimizers, (ours, theirs, exact), strict=True):
        for step in range(50):
            give(params, [grad.to("cuda", params[0].dtype) for grad in gradients(step, torch.float32)])
            optimizer.step()
        averages = [[optimizer.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
        columns.append([torch.cat([t.detach().flatten() for t in tensors]) for tensors in (params, *averages)])
    for what, actual, reference, truth in zip(("param", "exp_avg", "exp_avg_sq"), *columns, strict=True):
        assert_within_rule(what, to_numpy(actual), to_numpy(reference), to_numpy(truth), tolerance)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("default")
def test_a_skipped_step_changes_no_bit(compiled: bool) -> None:
    torch.compiler.reset()
    params = moved(torch.float32)
    optimizer = AdamW(params, lr=0.01)
    if compiled:
        optimizer.compile()

    def step(number: int, factor: float, skip: bool) -> None:
        give(params, [grad.to("cuda") * factor for grad in gradients(number, torch.float32)])
        optimizer.step(grad_scale=torch.tensor(0.5, device="cuda"), skip=torch.tensor(skip, device="cuda"))

    for number in range(2):
        step(number, 1.0, False)
    names = ("exp_avg", "exp_avg_sq", "step")
    tensors = [*params, *(optimizer.state[param][name] for param in params for name in names)]
    before = [to_numpy(tensor).copy() for tensor in tensors]
    for factor in (math.nan, math.inf, 1.0):
        step(2, factor, True)
        optimizer.uncount()
        for index, (tensor, kept) in enumerate(zip(tensors, before, strict=True)):
            assert_same_bits(f"tensor {index}", to_numpy(tensor), kept)
    step(3, 1.0, False)
    assert not np.array_equal(to_numpy(params[0]), before[0])


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_steps_at_its_full_size(name: str, data: Path, tmp_path: Path) -> None:
    chosen = PRESETS[name]
    shape = dict(chosen.shape)
    if not isinstance(chosen.tokens, str):
        shape["vocab_size"] = chosen.model(chosen.tokens).vocab_size
    options = {"steps": 3, "batch_size": 2, "warmup": 1, "precision": "bf16"}
    trainer, records = begin(tmp_path / "run", data, model=shape, train={**chosen.training, **options}, device="cuda")
    losses = []
    with attention_backends(False):
        for _ in range(3):  # steps alone: the checkpoint of the largest would be gigabytes
            trainer.advance()
            losses.append(trainer.losses()[-1])
    assert (trainer.progress.updates, of_kind(records, "skip")) == (3, [])
    expected = math.log(trainer.run.model.vocab_size)
    assert 0.8 * expected < losses[0] < 1.5 * expected
    assert all(math.isfinite(loss) for loss in losses)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in trainer.parameters)
    del trainer
    torch.cuda.empty_cache()
