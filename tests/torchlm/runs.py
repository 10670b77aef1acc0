"""Training runs small enough for tests: a corpus of a few built-in stories, a model of one layer, a run in a folder.

Knows fuselm's own parts and pytest's folders alone. Runs differ from one another in what a test names:

    folder = prepared(tmp_path / "data")
    trainer, records = begin(tmp_path / "run", folder, train={"steps": 12}, model={"dropout": 0.1})
    trainer.train()
    assert_same_state(run, other)                     # both last checkpoints, to the bit
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuselm.checkpoint import Checkpoint, Run, create
from fuselm.config import ModelConfig, TrainConfig
from fuselm.data import open_corpus, open_prepared
from fuselm.data.prepare import character_tokenizer, prepare
from fuselm.data.shards import Shard, ShardHeader
from fuselm.text.tokenizer import Tokenizer
from fuselm.torchlm.train import Trainer
from tests.kernels.arrays import assert_same_bits

CORPUS_BYTES = 12_000
MODEL: dict[str, Any] = {"context": 16, "num_layers": 1, "width": 16, "num_heads": 2, "ffn_width": 32}
TRAIN: dict[str, Any] = {
    "steps": 12, "batch_size": 4, "warmup": 2, "eval_every": 6, "log_every": 3, "sample_every": 0,
    "learning_rate": 5e-3, "seed": 3,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2}
LATENT: dict[str, Any] = {"attention": "latent", "kv_latent": 8, "rope_head_dim": 4}

Records = list[dict[str, Any]]


def prepared(folder: Path) -> Path:
    """Some stories by characters, as `fuselm data prepare` makes them."""
    corpus = open_corpus("stories", limit_bytes=CORPUS_BYTES)
    prepare(corpus, character_tokenizer(corpus), folder, threads=1)
    return folder


def make_run(
    folder: Path, data: Path, *, train: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None
) -> Run:
    """A run folder, new or the one that is there, for a prepared corpus."""
    tokenizer = Tokenizer.load(data / "tokenizer.json")
    return create(
        folder,
        model=ModelConfig(**{"vocab_size": tokenizer.vocab_size, **MODEL, **(model or {})}),
        train=TrainConfig(**{**TRAIN, **(train or {})}),
        data={},
        tokenizer=tokenizer,
    )


def begin(
    folder: Path,
    data: Path,
    *,
    train: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> tuple[Trainer, Records]:
    """A trainer of such a run, from its last checkpoint where it has one, and the list its records go to."""
    records: Records = []
    run = make_run(folder, data, train=train, model=model)
    return Trainer(run, open_prepared(data), device=device, listeners=[lambda r: records.append(dict(r))]), records


def stop_after(trainer: Trainer, step: int) -> None:
    """Ask the run to stop while it makes this step, as a signal would."""
    inner = trainer.advance

    def advance() -> None:
        if trainer.progress.step + 1 == step:
            trainer.stop()
        inner()

    trainer.advance = advance  # type: ignore[method-assign]


def bend_loss(trainer: Trainer, bend: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
    """Change the loss by the number of the step that is made with it, from 1."""
    inner = trainer.loss

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        value, balance = inner(inputs, targets)
        return bend(trainer.progress.step + 1, value), balance

    trainer.loss = loss


def of_kind(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def assert_same_arrays(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert sorted(ours) == sorted(theirs)
    for name in ours:
        assert_same_bits(name, ours[name], theirs[name])


def assert_same_state(ours: Run, theirs: Run) -> None:
    """All that decides the next step is the same, to the bit; how long it took may differ."""
    one, other = without_time(ours.load("last")), without_time(theirs.load("last"))
    assert (one.step, one.state) == (other.step, other.state)
    assert one.optimizer is not None
    assert other.optimizer is not None
    assert_same_arrays(one.weights, other.weights)
    assert_same_arrays(one.optimizer, other.optimizer)


def without_time(checkpoint: Checkpoint) -> Checkpoint:
    checkpoint.state["progress"]["seconds"] = 0.0
    return checkpoint


def memory_shard(tokens: Any, dtype: str = "uint16", vocab_size: int | None = None) -> Shard:
    """A token file that was never on a disk."""
    array = np.array(tokens, dtype=dtype)
    header = ShardHeader(1, dtype, array.size, 1, vocab_size, None, None, None, {})
    return Shard(Path("memory"), header, array, np.zeros(1, dtype=np.uint64), None)


def child_environment() -> dict[str, str]:
    """For a process that computes as this one does."""
    threads = str(torch.get_num_threads())
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
