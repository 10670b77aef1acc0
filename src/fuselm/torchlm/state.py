"""All that decides a run's next step, as named arrays and plain JSON, and back.

Weights and averages are fp32 and exact; a random generator's state is bytes; floats survive JSON to the bit. Knows the
trainer's parts; where files lie is checkpoint.py's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fuselm.checkpoint import Checkpoint, Run, RunError
from fuselm.optim import AdamW
from fuselm.torchlm.model import Transformer

if TYPE_CHECKING:
    from fuselm.torchlm.train import Trainer

Arrays = dict[str, np.ndarray]
AVERAGES = ("exp_avg", "exp_avg_sq")


def snapshot(trainer: Trainer) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """Weights, the optimiser's arrays with the random state, and everything else."""
    optimizer = optimizer_arrays(trainer.model, trainer.optimizer)
    optimizer["random.cpu"] = torch.get_rng_state().numpy()
    if trainer.device.type == "cuda":
        optimizer["random.cuda"] = torch.cuda.get_rng_state(trainer.device).numpy()
    state = {
        "progress": dataclasses.asdict(trainer.progress),
        "loader": trainer.feed.state(),
        "loss_scale": {"scale": trainer.scaler.scale, "good_steps": trainer.scaler.good_steps},
        "micro_batch": trainer.micro_batch,
        "precision": trainer.precision,
    }
    return weight_arrays(trainer.model), optimizer, state


def restore(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, int]:
    """Put everything back; returns where the loader goes on."""
    if checkpoint.optimizer is None:
        raise RunError(f"Step {checkpoint.step} holds weights only; a run goes on from one with the optimiser's state.")
    try:
        return _restore(trainer, checkpoint, checkpoint.optimizer)
    except (KeyError, TypeError) as error:
        raise RunError(
            f"A checkpoint says where the run stands; that of step {checkpoint.step} lacks {error}. Was it edited?"
        ) from None


def _restore(trainer: Trainer, checkpoint: Checkpoint, arrays: Arrays) -> dict[str, int]:
    saved = checkpoint.state
    load_weights(trainer.model, checkpoint.weights)
    load_optimizer(trainer.model, trainer.optimizer, arrays, saved["progress"]["updates"])
    torch.set_rng_state(torch.from_numpy(arrays["random.cpu"]))
    if trainer.device.type == "cuda" and "random.cuda" in arrays:
        torch.cuda.set_rng_state(torch.from_numpy(arrays["random.cuda"]), trainer.device)
    trainer.progress = dataclasses.replace(trainer.progress, **saved["progress"])
    trainer.scaler = dataclasses.replace(trainer.scaler, **saved["loss_scale"])
    trainer.micro_batch = saved["micro_batch"]
    place: dict[str, int] = saved["loader"]
    return place


def load_model(run: Run, which: Literal["best", "last"] = "best", *, device: str = "cpu") -> Transformer:
    """The model of a run with its best or its last weights, in fp32 and ready to be asked."""
    model = Transformer(run.model, device=device)
    load_weights(model, run.load(which, weights_only=True).weights)
    return model.eval()


def weight_arrays(model: nn.Module) -> Arrays:
    """Every parameter by name, on the host."""
    return {name: _array(parameter) for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, arrays: Arrays) -> None:
    """Set every parameter; names and shapes must be the model's."""
    wanted = dict(model.named_parameters())
    missing, extra = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    if missing or extra:
        raise RunError(
            f"A checkpoint has the model's tensors; this one lacks {', '.join(missing[:3]) or 'none'} and has "
            f"{', '.join(extra[:3]) or 'none'} besides. Was it made with another config?"
        )
    for name, parameter in wanted.items():
        if parameter.shape != arrays[name].shape:
            shapes = f"{list(arrays[name].shape)} for {list(parameter.shape)}"
            raise RunError(f"{name} in the checkpoint has another shape: {shapes}. Was it made with another config?")
        parameter.copy_(torch.from_numpy(arrays[name]))


def optimizer_arrays(model: nn.Module, optimizer: AdamW) -> Arrays:
    """Both averages of every parameter that has taken a step."""
    return {
        f"{average}.{name}": _array(optimizer.state[parameter][average])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for average in AVERAGES
    }


def load_optimizer(model: nn.Module, optimizer: AdamW, arrays: Arrays, updates: int) -> None:
    """Set the averages, and how many steps they are of."""
    for name, parameter in model.named_parameters():
        if f"exp_avg.{name}" not in arrays:
            continue
        state: dict[str, Tensor] = {"step": torch.tensor(float(updates))}
        for average in AVERAGES:
            state[average] = torch.from_numpy(arrays[f"{average}.{name}"]).to(parameter.device)
        optimizer.state[parameter] = state


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
