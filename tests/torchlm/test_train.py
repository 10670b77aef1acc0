"""The training loop: what it logs, keeps and skips, when it stops, and when it gives up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fuselm.checkpoint import open_run
from fuselm.data import open_prepared
from fuselm.data.shards import Shard
from fuselm.torchlm import train as train_module
from fuselm.torchlm.checks import check_data
from fuselm.torchlm.evaluate import Evaluation
from fuselm.torchlm.memory import CPU_TOKENS
from fuselm.torchlm.precision import LossScaler
from fuselm.torchlm.schedule import learning_rate
from fuselm.torchlm.state import snapshot, weight_arrays
from fuselm.torchlm.train import Trainer, TrainingFailed
from tests.torchlm.runs import (
    MOE,
    TRAIN,
    Records,
    assert_same_arrays,
    begin,
    bend_loss,
    make_run,
    memory_shard,
    of_kind,
    prepared,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data"))


def advance(trainer: Trainer, steps: int = 1) -> None:
    """Steps whose outcome is known when this returns, without what happens between them."""
    for _ in range(steps):
        trainer.advance()
        trainer._settle()


def state(trainer: Trainer) -> dict[str, np.ndarray]:
    """All arrays and counts that a step could change."""
    weights, averages, _ = snapshot(trainer)
    counts = [float(state["step"]) for state in trainer.optimizer.state.values()]
    named = {"counts": np.array(counts), **weights, **{f"optimizer.{name}": array for name, array in averages.items()}}
    return {name: array.copy() for name, array in named.items()}


def set_evaluations(trainer: Trainer, losses: Iterable[float]) -> None:
    values = iter(losses)
    trainer.evaluation = lambda: Evaluation(next(values), 10, None)  # type: ignore[method-assign]


# --- learning and logging --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, MOE, {"norm": "layer", "positions": "learned", "bias": True, "tied": True}])
def test_the_loss_falls(model: dict[str, Any], data: Path, tmp_path: Path) -> None:
    options = {"steps": 60, "batch_size": 16, "learning_rate": 2e-2, "eval_every": 30, "log_every": 1}
    trainer, records = begin(tmp_path / "run", data, train=options, model=model)
    trainer.train()
    first, last = of_kind(records, "step")[0]["loss"], of_kind(records, "step")[-1]["loss"]
    assert first == pytest.approx(math.log(trainer.tokenizer.vocab_size), abs=1.0)
    assert last < first - 1.0
    evaluations = of_kind(records, "eval")
    assert evaluations[1]["loss"] < evaluations[0]["loss"] < first


def test_each_step_is_told_of_after_its_records(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"log_every": 5})
    heard: list[tuple[int, int]] = []
    trainer.on_step = lambda step: heard.append((step, len(of_kind(records, "step"))))
    trainer.train()
    assert heard == [(step, (step >= 5) + (step >= 10) + (step >= 12)) for step in range(1, 13)]


def test_a_record_of_steps_has_the_mean_loss_since_the_one_before(data: Path, tmp_path: Path) -> None:
    single = begin(tmp_path / "single", data, train={"log_every": 1})
    several = begin(tmp_path / "several", data, train={"log_every": 5})
    for trainer, _ in (single, several):
        trainer.train()
    losses = [record["loss"] for record in of_kind(single[1], "step")]
    assert len(losses) == 12
    found = of_kind(several[1], "step")
    assert [record["step"] for record in found] == [5, 10, 12]  # the last step is told, too
    means = [sum(part) / len(part) for part in (losses[:5], losses[5:10], losses[10:])]
    assert [record["loss"] for record in found] == pytest.approx(means, rel=1e-12)
    assert [record["tokens"] for record in found] == [5 * 64, 10 * 64, 12 * 64]


def test_records_name_the_learning_rate_of_their_step_and_count_upwards(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"log_every": 1})
    trainer.train()
    shape = {"kind": "cosine", "peak": TRAIN["learning_rate"], "steps": 12, "warmup": 2, "floor": 0.1}
    expected = [learning_rate(step, decay_share=0.2, **shape) for step in range(12)]
    found = of_kind(records, "step")
    assert [record["learning_rate"] for record in found] == expected
    assert [record["seconds"] for record in records] == sorted(record["seconds"] for record in records)
    assert all(record["tokens_per_second"] > 0 and record["gradient_norm"] > 0 for record in found)
    assert {record["loss_scale"] for record in found} == {1.0}
    assert all(record["balance"] >= 1 - 1e-5 for record in of_kind(balances(data, tmp_path), "step"))
    assert "balance" not in found[0]


def balances(data: Path, tmp_path: Path) -> Records:
    trainer, records = begin(tmp_path / "experts", data, model=MOE)
    trainer.train()
    return records


def test_every_listener_gets_every_record(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data)
    second: Records = []
    trainer.listeners.append(lambda record: second.append(dict(record)))
    trainer.train()
    assert second == records
    assert {record["kind"] for record in records} == {"step", "eval", "save", "end"}


def test_samples_come_with_evaluations_or_as_often_as_asked(data: Path, tmp_path: Path) -> None:
    for every, steps in ((None, [6, 12]), (5, [5, 10, 12]), (0, [])):
        options = {"sample_every": every, "sample_tokens": 7}
        trainer, records = begin(tmp_path / f"run-{every}", data, train=options)
        trainer.train()
        samples = of_kind(records, "sample")
        assert [record["step"] for record in samples] == steps
        assert all(len(record["text"]) <= 7 for record in samples)
        assert all(
            set(record["text"]) <= set(trainer.tokenizer.decode(range(trainer.tokenizer.vocab_size)))
            for record in samples
        )


def test_the_same_seed_is_the_same_run_and_another_is_another(data: Path, tmp_path: Path) -> None:
    results = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        trainer, _ = begin(tmp_path / name, data, train={"seed": seed}, model={"dropout": 0.1})
        trainer.train()
        results.append(trainer.run.load("last").weights)
    assert_same_arrays(results[0], results[1])
    assert not np.array_equal(results[0]["embedding"], results[2]["embedding"])


# --- evaluation, best and patience -----------------------------------------------------------------------------------


def test_it_evaluates_now_and_then_and_at_the_end(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"eval_every": 5})
    trainer.train()
    found = of_kind(records, "eval")
    assert [record["step"] for record in found] == [5, 10, 12]
    assert found[-1]["loss"] == trainer.evaluation().loss
    assert trainer.run.saved["last"] == 12


def test_it_stops_when_the_loss_has_not_got_better_for_long_enough(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"steps": 100, "eval_every": 2, "patience": 3})
    set_evaluations(trainer, [2.0, 3.0, 3.0, 1.5, 1.5, math.nan, 1.6, 9.0])
    trainer.train()
    assert [record["best"] for record in of_kind(records, "eval")] == [True, False, False, True, False, False, False]
    assert (trainer.progress.step, trainer.progress.best_step, trainer.progress.best_loss) == (14, 8, 1.5)
    assert records[-1]["reason"] == "patience"
    assert trainer.run.saved == {"last": 14, "best": 8}
    again, records = begin(tmp_path / "run", data, train={"steps": 100, "eval_every": 2, "patience": 3})
    again.train()
    assert records == []  # nothing was left to do


def test_without_patience_it_goes_on_to_the_last_step(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"eval_every": 2})
    set_evaluations(trainer, [1.0, *[2.0] * 5])
    trainer.train()
    assert (trainer.progress.step, records[-1]["reason"]) == (12, "done")
    assert trainer.run.saved == {"last": 12, "best": 2}


def test_a_loss_that_is_no_number_is_never_the_best(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    set_evaluations(trainer, [math.nan, math.inf])
    trainer.train()
    assert trainer.progress.best_loss is None
    assert trainer.run.saved == {"last": 12}


# --- loss scaling ----------------------------------------------------------------------------------------------------


def overflow(trainer: Trainer, steps: set[int]) -> None:
    """Make one element of the gradients infinite in these steps, and leave the loss as it is."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return grad.index_fill(0, torch.tensor([1]), math.inf) if trainer.progress.step + 1 in steps else grad

    trainer.model.embedding.register_hook(hook)


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> LossScaler:
    """What every trainer of the test begins with: a scale for fp32, whose digits a power of two does not change."""
    found = LossScaler(enabled=True, scale=1024.0, patience=4)
    monkeypatch.setattr(train_module, "LossScaler", lambda enabled: dataclasses.replace(found))
    return found


@pytest.mark.usefixtures("scaler")
def test_an_overflow_skips_the_step_and_halves_the_scale(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data)
    advance(trainer, 2)
    overflow(trainer, {3})
    before = state(trainer)
    assert trainer.scaler.scale == 1024.0
    advance(trainer)
    assert_same_arrays(state(trainer), before)
    assert trainer.scaler.scale == 512.0
    (skip,) = of_kind(records, "skip")
    assert (skip["step"], skip["loss_scale"]) == (3, 1024.0)
    assert "gradient norm inf" in skip["reason"]
    assert trainer.progress.bad_steps == 0  # what the scale is there for counts as no fault
    advance(trainer, 4)
    assert trainer.scaler.scale == 1024.0
    assert (trainer.progress.step, trainer.progress.updates) == (7, 6)
    assert {float(one["step"]) for one in trainer.optimizer.state.values()} == {6.0}


@pytest.mark.usefixtures("scaler")
def test_a_scaled_run_is_the_run_without_a_scale(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, records = begin(tmp_path / "scaled", data, train={"log_every": 1})
    scaled.train()
    monkeypatch.setattr(train_module, "LossScaler", LossScaler)
    plain, expected = begin(tmp_path / "plain", data, train={"log_every": 1})
    plain.train()
    assert scaled.scaler.scale == 8192.0
    assert_same_arrays(scaled.run.load("last").weights, plain.run.load("last").weights)
    for name in ("loss", "gradient_norm"):
        assert [r[name] for r in of_kind(records, "step")] == [r[name] for r in of_kind(expected, "step")]
    scales = [record["loss_scale"] for record in of_kind(records, "step")]
    assert scales == [1024.0] * 4 + [2048.0] * 4 + [4096.0] * 4


@pytest.mark.usefixtures("scaler")
def test_overflows_for_ever_end_the_run_once_the_scale_is_1(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"steps": 100, "bad_steps": 3, "eval_every": 100})
    overflow(trainer, set(range(100)))
    before = {name: array.copy() for name, array in weight_arrays(trainer.model).items()}
    with pytest.raises(TrainingFailed, match=r"Steps 11 to 13 were bad .* the last good checkpoint is none yet\."):
        trainer.train()
    assert [r["loss_scale"] for r in of_kind(records, "skip")] == [2.0**power for power in range(10, 0, -1)] + [1.0] * 3
    assert_same_arrays(weight_arrays(trainer.model), before)
    _, optimizer, _ = snapshot(trainer)
    assert not any(array.any() for name, array in optimizer.items() if name.startswith("exp_avg"))
    assert {float(one["step"]) for one in trainer.optimizer.state.values()} == {0.0}


# --- steps that are no good ------------------------------------------------------------------------------------------


def nan_at(trainer: Trainer, steps: set[int]) -> None:
    bend_loss(trainer, lambda step, loss: loss * math.nan if step in steps else loss)


def test_a_single_nan_is_skipped_and_named(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"bad_steps": 2, "log_every": 1})
    nan_at(trainer, {1, 5, 12})
    trainer.train()
    skips = of_kind(records, "skip")
    assert [record["step"] for record in skips] == [1, 5, 12]
    assert all(record["reason"].startswith("loss nan, gradient norm") for record in skips)
    assert (trainer.progress.step, trainer.progress.updates, trainer.progress.bad_steps) == (12, 9, 1)
    assert {float(one["step"]) for one in trainer.optimizer.state.values()} == {9.0}
    assert all(np.isfinite(array).all() for array in trainer.run.load("last").weights.values())
    assert [math.isnan(record["loss"]) for record in of_kind(records, "step")] == [
        step in (1, 5, 12) for step in range(1, 13)
    ]


def test_a_skipped_step_changes_nothing_but_the_counts_of_steps(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data)
    nan_at(trainer, {4})
    advance(trainer, 3)
    before, mean = state(trainer), trainer.progress.mean_loss
    place = trainer.feed.state()
    advance(trainer)
    assert_same_arrays(state(trainer), before)
    assert (trainer.progress.mean_loss, trainer.progress.updates) == (mean, 3)
    assert trainer.feed.state()["position"] == place["position"] + 4  # its rows are not tried again
    advance(trainer)
    assert (trainer.progress.updates, trainer.progress.bad_steps) == (4, 0)


def test_bad_steps_in_a_row_end_the_run_and_name_the_last_good_checkpoint(data: Path, tmp_path: Path) -> None:
    options = {"steps": 40, "eval_every": 4, "bad_steps": 5}
    trainer, records = begin(tmp_path / "run", data, train=options)
    nan_at(trainer, set(range(10, 40)))
    with pytest.raises(TrainingFailed) as failed:
        trainer.train()
    words = str(failed.value)
    assert words.startswith("Steps 10 to 14 were bad and were not made (loss nan, gradient norm")
    assert f"the last good checkpoint is step 8 in {tmp_path / 'run'}." in words
    assert "begin a new run with a lower learning rate" in words
    assert [record["step"] for record in of_kind(records, "skip")] == [10, 11, 12, 13, 14]
    run = open_run(tmp_path / "run")
    assert run.saved["last"] == 8  # and not 12, from where it would go wrong again
    kept = run.load("last")
    assert all(np.isfinite(array).all() for array in kept.weights.values())
    assert kept.optimizer is not None
    assert all(np.isfinite(array).all() for name, array in kept.optimizer.items() if not name.startswith("random"))
    resumed, _ = begin(tmp_path / "run", data, train=options)  # the data, say, has been mended
    resumed.train()
    assert (resumed.progress.step, resumed.progress.updates) == (40, 40)


def test_bad_steps_that_are_not_in_a_row_do_not_end_it(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"bad_steps": 2, "steps": 30})
    nan_at(trainer, set(range(1, 30, 2)))
    trainer.train()
    assert len(of_kind(records, "skip")) == 15


def test_a_spike_is_skipped_after_some_steps_and_not_before(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"steps": 30, "eval_every": 100, "bad_steps": 2})
    bend_loss(trainer, lambda step, loss: loss * 5 if step in (10, 25) else loss)
    advance(trainer, 24)
    before = state(trainer)
    mean = trainer.progress.mean_loss
    assert of_kind(records, "skip") == []  # at step 10 there is no mean to go by
    advance(trainer)
    assert_same_arrays(state(trainer), before)
    (skip,) = of_kind(records, "skip")
    assert skip["step"] == 25
    assert f"over 3 times its running mean {mean:.4g}" in skip["reason"]
    assert trainer.progress.mean_loss == mean  # a spike does not make the next one look small
    advance(trainer, 5)
    assert (trainer.progress.step, trainer.progress.updates) == (30, 29)


def test_spikes_in_a_row_end_the_run(data: Path, tmp_path: Path) -> None:
    trainer, _ = begin(tmp_path / "run", data, train={"steps": 60, "eval_every": 100, "bad_steps": 3})
    bend_loss(trainer, lambda step, loss: loss * 5 if step > 30 else loss)
    with pytest.raises(TrainingFailed, match=r"Steps 31 to 33 .*over 3 times its running mean"):
        trainer.train()


def test_the_factor_of_a_spike_is_the_configs(data: Path, tmp_path: Path) -> None:
    trainer, records = begin(tmp_path / "run", data, train={"steps": 30, "eval_every": 100, "spike_factor": 6.0})
    bend_loss(trainer, lambda step, loss: loss * 5 if step == 25 else loss)
    trainer.train()
    assert of_kind(records, "skip") == []


# --- refusals --------------------------------------------------------------------------------------------------------


def other_shard(shard: Shard, **changes: Any) -> Shard:
    return dataclasses.replace(shard, header=dataclasses.replace(shard.header, **changes))


def test_data_that_does_not_fit_is_refused(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", data)
    shards = open_prepared(data)
    check_data(run.model, run.train, shards, run.tokenizer())
    one_row = dataclasses.replace(run.train, batch_size=1)
    short = {**shards, "train": memory_shard(range(17))}  # one that names no tokenizer, of one row
    check_data(run.model, one_row, short, run.tokenizer())
    with pytest.raises(ValueError, match="An epoch holds a global batch or more"):
        check_data(run.model, run.train, short, run.tokenizer())
    with pytest.raises(ValueError, match=r"the run's own tokenizer; valid is of another one\. Prepare the corpus with"):
        check_data(
            run.model,
            run.train,
            {**shards, "valid": other_shard(shards["valid"], fingerprint="0" * 64)},
            run.tokenizer(),
        )
    with pytest.raises(ValueError, match=r"The model has \d+ tokens; train may have ids up to 999\. Give the model"):
        check_data(
            run.model, run.train, {**shards, "train": other_shard(shards["train"], vocab_size=1000)}, run.tokenizer()
        )
    with pytest.raises(ValueError, match=r"context \+ 1 = 17 tokens; the corpus has 16\. Use a smaller context"):
        check_data(run.model, run.train, {**shards, "train": memory_shard(range(16))}, run.tokenizer())


def test_the_rows_at_once_are_the_configs_or_what_fits(data: Path, tmp_path: Path) -> None:
    assert begin(tmp_path / "given", data, train={"micro_batch": 2})[0].micro_batch == 2
    rows = CPU_TOKENS // 16
    assert begin(tmp_path / "found", data, train={"batch_size": 2 * rows})[0].micro_batch == rows
