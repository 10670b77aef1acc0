"""What a run is refused for: token files that are not its model's, a device or a precision that it cannot have.

It knows configs, token files and devices; it makes no model and no folder, so that a refusal comes before either.

    check_run(model, config, shards, "auto")
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fuselm import ops as public_ops
from fuselm.checkpoint import RunError
from fuselm.config import ModelConfig, TrainConfig
from fuselm.data.loader import Loader
from fuselm.data.shards import Shard
from fuselm.text.tokenizer import Tokenizer
from fuselm.torchlm.graph import check_device
from fuselm.torchlm.memory import pick_micro_batch
from fuselm.torchlm.precision import pick_device, pick_precision


def check_data(
    model: ModelConfig, config: TrainConfig, shards: Mapping[str, Shard], tokenizer: Tokenizer | None
) -> None:
    """Refuse token files of another tokenizer, not whole or too short, or with ids that the model has no row for."""
    for split, shard in shards.items():
        header = shard.header
        if tokenizer is not None and header.fingerprint not in (None, tokenizer.fingerprint):
            raise ValueError(
                f"Token files are made by the run's own tokenizer; {split} is of another one. Prepare the corpus with "
                "the tokenizer.json in the run's folder, or begin a new run."
            )
        if header.vocab_size is not None and header.vocab_size > model.vocab_size:
            raise ValueError(
                f"The model has {model.vocab_size} tokens; {split} may have ids up to {header.vocab_size - 1}. "
                "Give the model a larger vocab_size."
            )
        if header.version:  # ours, and so with a checksum
            shard.verify()
    if shards["valid"].tokens.size < 2:
        raise ValueError("A validation split has at least 2 tokens; this one has fewer. Use a longer corpus.")
    # The loader has the words for a corpus that is too short for a row or a batch.
    Loader(shards["train"], batch_size=config.batch_size, context=model.context, rows=config.rows)


def device_for(name: str, cuda_graph: bool | None) -> torch.device:
    """The device of this name, if a session can be there that asks for CUDA graphs or does not."""
    device = pick_device(name)
    if cuda_graph:
        check_device(device)
    return device


def precision_of_run(begun_in: str | None, asked: str, device: torch.device) -> str:
    """The precision that the run began in, whatever "auto" is on this device."""
    try:
        return pick_precision(begun_in or asked, device)
    except ValueError as error:
        if begun_in is None:
            raise
        raise RunError(f"This run began in {begun_in}, and goes on only so: {str(error).partition('. ')[0]}.") from None


def check_run(model: ModelConfig, config: TrainConfig, shards: Mapping[str, Shard], device_name: str) -> None:
    """Everything that a Trainer would refuse, without making one: for whoever has not made the run's folder yet."""
    device = device_for(device_name, config.cuda_graph)
    precision = pick_precision(config.precision, device)
    check_data(model, config, shards, None)
    public_ops.choose(model.impl, model.op_impl, device=str(device))
    if config.micro_batch is None:
        pick_micro_batch(model, config.batch_size, device, precision)
