"""A run folder: what a run is, its tokenizer, and its last and its best checkpoint as named numpy arrays.

Knows no framework: PyTorch and JAX share names and arrays. Whether they fit a model is the caller's to say.

    run = create("runs/demo", model=model, train=train, data={"corpus": "stories"}, tokenizer=tokenizer)
    run.save(400, weights, optimizer, {"loss": 1.5}, best_loss=1.5)
    checkpoint = open_run("runs/demo").load("best", weights_only=True)

    config.json          {"fuselm": version, "model": {...}, "train": {...}, "data": {...}}
    tokenizer.json
    checkpoints.json     {"last": "step-00000400", "best": "step-00000300", "best_loss": 1.234}
    step-00000400/       model.safetensors, state.json, and optimizer.safetensors in the last alone

A step's folder is on the disk before checkpoints.json names it, and removed only when it no longer does. So a process
killed at any point leaves both checkpoints whole, and the next save removes what else it left.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  numpy learns the name bfloat16 from it
import numpy as np
from safetensors import SafetensorError, safe_open

from fuselm import __version__
from fuselm.config import ModelConfig, TrainConfig, from_json, to_json
from fuselm.files import locked, partial_path, sync_folder, whole_folder, write_whole
from fuselm.text.tokenizer import Tokenizer

CONFIG, TOKENIZER, SWITCH = "config.json", "tokenizer.json", "checkpoints.json"
DATA = "data"  # the tokenised corpus, where the run made it itself
LOCK, CLAIM, PROBE, HIDDEN = ".lock", ".training", ".probe", re.compile(r"\.(lock|training|probe|.+\.partial)")
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
STEP = re.compile(r"step-(\d{8,})(-\d+)?")
MAX_JSON_BYTES = 16 << 20
REMEDY = ". If it was edited, undo that; if it is not a run's, use another folder."
# What safetensors calls each dtype that numpy can read back from it.
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
DTYPES |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}

Arrays = Mapping[str, np.ndarray]
Json = Mapping[str, Any]


class RunError(ValueError):
    """A run folder that cannot be made, written or read as asked."""


class FolderError(RunError):
    """A folder that this run cannot have; another one would do."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved at a step. A run is resumed from its last one: the best one's `optimizer` is None."""

    step: int
    weights: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray] | None
    state: dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run folder that is there: made by `create`, opened by `open_run`."""

    folder: Path
    model: ModelConfig
    train: TrainConfig | None
    data: Json

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was made with."""
        if not (path := self.folder / TOKENIZER).is_file():
            raise RunError(f"The run in {self.folder} has no {TOKENIZER}. Put the one it was trained with there.")
        return Tokenizer.load(path)

    @property
    def saved(self) -> dict[str, int]:
        """The steps of the checkpoints that are there, as {"last": 400, "best": 300}."""
        switch = _read_switch(self.folder)
        return {which: int(switch[which].split("-")[1]) for which in ("last", "best") if which in switch}

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to resume from."""
        return "last" in self.saved

    @property
    def best_loss(self) -> float | None:
        return _read_switch(self.folder).get("best_loss")

    def check_writable(self, bytes_needed: int) -> None:
        """Refuse now what would fail at the first save: a folder that cannot be written, a disk that is too full."""
        check_writable(self.folder, bytes_needed)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Train here and be the only one: a second process is refused, since each would undo the other's work."""
        with (self.folder / CLAIM).open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderError(
                    f"A run is trained by one process at a time; another one is at work on {self.folder}. Wait for it, "
                    "or use another folder."
                ) from None
            yield

    def save(
        self, step: int, weights: Arrays, optimizer: Arrays | None, state: Json, *, best_loss: float | None = None
    ) -> None:
        """Save what becomes the last checkpoint, and the best one where `best_loss` is given.

        Without an optimizer nothing can be resumed from it: it is the best one only, and the last stays what it was.
        `state` is plain JSON and comes back equal, floats to the bit.
        """
        if step < 0 or (best_loss is not None and not math.isfinite(best_loss)):
            raise RunError(f"A step is 0 or more and a best loss finite; got step {step}, loss {best_loss}.")
        if optimizer is None and best_loss is None:
            raise RunError("A checkpoint without an optimizer is kept as the best; got no best_loss. Give either.")
        files = {MODEL: _tensor_chunks(weights)} | ({} if optimizer is None else {OPTIMIZER: _tensor_chunks(optimizer)})
        files[STATE] = [_json_text(STATE, state).encode()]
        try:
            with locked(self.folder / LOCK, f"Another process saves into {self.folder}; waiting for it."):
                _publish(self.folder, step, files, best_loss)
        except OSError as error:
            whole = " and ".join(f"the {which} one of step {at}" for which, at in self.saved.items()) or "none yet"
            raise RunError(
                f"A checkpoint is saved whole or not at all; that of step {step} could not be saved in {self.folder} "
                f"({error.strerror or error}). Whole ones there: {whole}. Make room there, and resume."
            ) from error

    def load(self, which: Literal["last", "best"] = "last", *, weights_only: bool = False) -> Checkpoint:
        """Read a checkpoint; `weights_only` leaves the optimizer of the last, twice the size of its weights, unread."""
        while True:
            if (name := _read_switch(self.folder).get(which)) is None or which not in ("last", "best"):
                there = " and ".join(self.saved) or "none yet"
                raise RunError(f"{self.folder} has no {which} checkpoint; it has {there}. Train it first.")
            step = self.folder / name
            try:
                optimizer = None if weights_only or which == "best" else _read_tensors(step / OPTIMIZER)
                weights, state = _read_tensors(step / MODEL), _read_json(step / STATE)
                return Checkpoint(int(name.split("-")[1]), weights, optimizer, state)
            except (FileNotFoundError, RunError) as error:
                # Gone because a process has saved since its name was read? Then there is a newer one.
                if _read_switch(self.folder).get(which) == name:
                    remedy = "Put the file back from a copy, or load the other of last and best."
                    raise RunError(f"The {which} checkpoint cannot be read: {error}. {remedy}") from None


# --- making and opening ----------------------------------------------------------------------------------------------


def create(
    folder: str | Path,
    *,
    model: ModelConfig,
    train: TrainConfig | None,
    data: Json,
    tokenizer: Tokenizer | None,
    overwrite: bool = False,
) -> Run:
    """Make a run folder. One that holds the same run is opened, one that holds another is refused.

    `overwrite` starts anew: the checkpoints of the run in the folder are removed, whatever its config.
    """
    folder = Path(folder)
    config = {"model": to_json(model), "train": train and to_json(train), "data": dict(data)}
    text = _json_text(CONFIG, {"fuselm": __version__, **config})
    if (folder / CONFIG).is_file():
        run = open_run(folder)  # what is no run is not overwritten either
        if not overwrite:
            _check_same(run, config, tokenizer)
            if tokenizer is not None and not (folder / TOKENIZER).is_file():  # killed while it made the run
                tokenizer.save(folder / TOKENIZER)
            return run
    else:
        check_free(folder)
    check_writable(folder)
    with locked(folder / LOCK, f"Another process saves into {folder}; waiting for it."):
        for name in (SWITCH, TOKENIZER):  # gone before the config changes, as they do not belong to the new one
            (folder / name).unlink(missing_ok=True)
        _sweep(folder)
        with whole_folder(folder, last=TOKENIZER) as staging:
            write_whole(staging / CONFIG, text)
            if tokenizer is not None:
                tokenizer.save(staging / TOKENIZER)
        sync_folder(folder)
    return open_run(folder)


def open_run(folder: str | Path) -> Run:
    """The run of a folder."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        found = "is a file" if folder.is_file() else f"has no {CONFIG}" if folder.is_dir() else "is not there"
        raise RunError(f"A run is a folder with {CONFIG}; {folder} {found}. Give the folder of a run.")
    document = _read_json(folder / CONFIG, REMEDY)
    written, here = (re.match(r"(\d+)\.(\d+)", str(version)) for version in (document.get("fuselm"), __version__))
    if written and here and tuple(map(int, written.groups())) > tuple(map(int, here.groups())):
        found = f"{folder} is from {document['fuselm']}, and this is {__version__}"
        raise RunError(f"A run is read by the fuselm that wrote it or a newer one; {found}. Update fuselm.")
    try:
        train = None if document["train"] is None else from_json(TrainConfig, document["train"])
        run = Run(folder, from_json(ModelConfig, document["model"]), train, dict(document["data"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        rule = f"A run's config has its model, train and data; {folder / CONFIG} does not"
        raise RunError(f"{rule} ({error}){REMEDY}") from None
    _read_switch(folder)  # a broken one is told now, not when the first checkpoint is to be saved
    return run


def check_free(folder: Path) -> None:
    """Refuse a folder that holds other people's files."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if names := sorted(name for name in names if not HIDDEN.fullmatch(name)):
        shown = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
        raise FolderError(f"A run gets a folder of its own; {folder} holds other files: {shown}. Use another folder.")


def _check_same(run: Run, asked: Json, tokenizer: Tokenizer | None) -> None:
    there = {"model": to_json(run.model), "train": run.train and to_json(run.train), "data": run.data}
    different = [line for part in there for line in _differences(part, there[part], asked[part])]
    if tokenizer is not None and (run.folder / TOKENIZER).is_file() and run.tokenizer() != tokenizer:
        different.append("another tokenizer")
    if different:
        shown = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
        remedy = "Use another folder, or --overwrite (overwrite=True) to lose what is there and start anew."
        raise FolderError(f"A run keeps its config; {run.folder} has {shown}. {remedy}")


def _differences(part: str, there: Any, asked: Any) -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(asked, Mapping):
        for name in dict.fromkeys([*there, *asked]):
            yield from _differences(f"{part}.{name}", there.get(name), asked.get(name))
    elif there != asked:
        texts = (json.dumps(value, ensure_ascii=False) for value in (there, asked))
        old, new = (
            text if len(text) <= 60 else f"{text[:30]}…{text[-29:]}" for text in texts
        )  # paths differ at the end
        yield f"{part} = {old} (asked for: {new})"


def check_writable(folder: Path, bytes_needed: int = 0) -> None:
    """Refuse where a run could not be saved: a file, a folder that cannot be written, a disk that is too full."""
    if folder.is_file():
        raise FolderError(f"A run is a folder; {folder} is a file. Use another path.")
    try:
        write_whole(folder / PROBE, bytes(4096))  # os.access says yes to root whatever the file system says
        (folder / PROBE).unlink()
    except OSError as error:
        raise FolderError(f"A run writes into its folder; {folder} refuses ({error.strerror}). Use another.") from error
    if (free := shutil.disk_usage(folder).free) < bytes_needed:
        need = f"{bytes_needed / 1e6:,.0f} MB; {folder} has {free / 1e6:,.0f} MB free"
        raise FolderError(f"The run's checkpoints need {need}. Make room, or use a folder on another disk.")


# --- saving ----------------------------------------------------------------------------------------------------------


def _read_switch(folder: Path) -> dict[str, Any]:
    """checkpoints.json, the names of the folders that count; empty before anything is saved."""
    path, remedy = folder / SWITCH, '. Write {"last": NAME} into it by hand, with the name of a step\'s folder there.'
    switch = _read_json(path, remedy) if path.exists() else {}
    names = [switch[which] for which in ("last", "best") if which in switch]
    # Runs come from other people, too: a name leads nowhere but into this folder.
    if not all(isinstance(name, str) and STEP.fullmatch(name) for name in names):
        raise RunError(f"{path} names folders such as step-00000400; this one has {switch}{remedy}")
    return switch


def _publish(folder: Path, step: int, files: Mapping[str, list[Any]], best_loss: float | None) -> None:
    """Write a step's folder, name it in the switch, and remove what is named no more."""
    _sweep(folder)  # first: what a killed process left takes room that this one needs
    partial = partial_path(folder / "step")
    try:
        partial.mkdir()
        for name, chunks in files.items():
            with (partial / name).open("xb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(partial)
        # Resumed from an earlier step, a run comes to this one again; the folder of that name counts until the switch.
        names = (f"step-{step:08d}" + (f"-{number}" if number > 1 else "") for number in range(1, 1000))
        name = next(name for name in names if not (folder / name).exists())
        partial.rename(folder / name)
        sync_folder(folder)
        last = {"last": name} if OPTIMIZER in files else {}
        best = {} if best_loss is None else {"best": name, "best_loss": float(best_loss)}
        write_whole(folder / SWITCH, _json_text(SWITCH, _read_switch(folder) | last | best))
        sync_folder(folder)
    finally:
        _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove the steps that the switch does not name. Whoever does holds the lock, so nobody is writing them."""
    last, best = map(_read_switch(folder).get, ("last", "best"))
    for path in folder.iterdir():
        is_step = STEP.fullmatch(path.name) or (path.name.startswith(".step.") and HIDDEN.fullmatch(path.name))
        if is_step and path.name not in (last, best):
            shutil.rmtree(path, ignore_errors=True)  # what cannot be removed now is tried again at the next save
    if best and best != last:
        (folder / best / OPTIMIZER).unlink(missing_ok=True)


# --- files -----------------------------------------------------------------------------------------------------------


def _tensor_chunks(tensors: Arrays) -> list[Any]:
    """A safetensors file in pieces: the length of the header, the header, then every array where it lies in memory.

    The library's own writer makes files that only their owner can read, and tells of a full disk by no OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    chunks, end = [], 0
    # Wide dtypes first, so that every array is aligned to its own.
    for name, array in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        dtype, start, end = array.dtype, end, end + array.nbytes
        if dtype.name not in DTYPES or name == "__metadata__":
            raise RunError(f"Arrays are of {', '.join(DTYPES)}; got {dtype} of {name!r}. Convert or rename it.")
        header[name] = {"dtype": DTYPES[dtype.name], "shape": array.shape, "data_offsets": [start, end]}
        chunks.append(np.asarray(array, dtype.newbyteorder("<"), order="C").reshape(-1).view(np.uint8).data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *chunks]


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except (SafetensorError, AttributeError, TypeError) as error:  # the latter two: a dtype that numpy does not have
        raise RunError(f"{path} is no whole safetensors file ({error})") from None


def _json_text(name: str, document: Json) -> str:
    """The text of a JSON file; what would not come back equal is refused."""
    try:
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        if json.loads(text) != document:
            raise ValueError("a tuple comes back as a list, and a key that is no text as text")
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"{len(text) >> 20} MiB")
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"{name} holds plain JSON with finite numbers, at most {MAX_JSON_BYTES >> 20} MiB"
        raise RunError(f"{rule}; got something else ({error}). Convert it, or keep it as an array.") from None
    return text


def _read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"{size >> 20} MiB")
        document = json.loads(path.read_bytes())
        if not isinstance(document, dict):
            raise ValueError(f"a {type(document).__name__}")
    except (ValueError, RecursionError) as error:
        rule = f"{path} is a JSON object of at most {MAX_JSON_BYTES >> 20} MiB"
        raise RunError(f"{rule}; this one is not ({error}){remedy}") from None
    return document
