"""How fast models train on a GPU, beside a plain PyTorch model, and whether they learn the same with torch's ops in the
kernels' place; whether a resumed run is the same run; whole runs.

Every row is measured in a process of its own: the first step is then a first step. All goes into gpu/train.json, from
which the README's table is made (readme.py). The training path is the real one (torchlm/train.py) on random tokens.

    python -m fuselm.bench.train --part speed                         # also curves, resume, runs; all without --part
    python -m fuselm.bench.train --part speed --only "gpt-124m ours"  # these rows anew, the others stay
    python -m fuselm.bench.train --row tinystories ours compile       # one row, as JSON, and no file

`plain` is plain_model.py with torch's fused AdamW; it neither clips gradients nor checks them, ours does both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fuselm.bench import machine
from fuselm.files import write_whole

PRESETS = ("tinystories", "gpt-124m")
ROWS = (
    ("plain", "compile"),
    ("ours", "eager"),
    ("ours", "compile"),
    ("ours", "eager deterministic"),
    ("ours", "eager torch"),
)
# Runs whose result is written down: name, and the command after `fuselm train`.
RUNS = {"tinylm": ["--preset", "tinylm"], "naive-char": ["--preset", "naive-char"]}
PARTS = ("speed", "curves", "resume", "runs")
STEPS = {"tinystories": 60, "gpt-124m": 25}
WARM_UP = 5
CHECK_STEPS = 40
# Who learns: with which ops, from which seed. The last says how far apart two runs of the same model are anyway.
LEARNERS = (("auto", 0), ("torch", 0), ("torch", 1))
CURVE_STEPS, CURVE_EVERY, STORY_BYTES = 300, 10, 3_000_000
Row = dict[str, Any]


def plain_row(preset_name: str) -> Row:
    """The yardstick: plain PyTorch under torch.compile."""
    import torch

    from fuselm.bench.plain_model import PlainModel
    from fuselm.config import preset

    begin = time.monotonic()
    chosen = preset(preset_name)
    config, batch = chosen.model(int(chosen.tokens)), chosen.train().batch_size
    ids = torch.randint(0, config.vocab_size, (4, batch, config.context + 1), device="cuda")
    model = PlainModel(config).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    loss_of = torch.compile(model)

    def step(number: int) -> None:
        rows = ids[number % 4]
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _timed(step, STEPS[preset_name], batch * config.context, begin)


def our_row(preset_name: str, mode: str, folder: Path) -> Row:
    """The trainer itself, as `fuselm train` runs it."""
    import torch.cuda  # noqa: F401  both rows start their clock with torch imported

    begin = time.monotonic()
    trainer = _trainer(
        preset_name, folder, "torch" if "torch" in mode else "auto", compile="compile" in mode,
        deterministic="deterministic" in mode,
    )  # fmt: skip
    from fuselm.torchlm.precision import attention_backends

    with attention_backends("deterministic" in mode):
        row = _timed(lambda number: trainer.advance(), STEPS[preset_name], trainer.tokens_per_step, begin)
    return {**row, "micro_batch": trainer.micro_batch, "ops": trainer.model.ops.impls["rms_norm"]}


def _timed(step: Any, steps: int, tokens: int, begin: float) -> Row:
    import torch

    step(0)
    torch.cuda.synchronize()
    first = time.monotonic() - begin
    for number in range(WARM_UP):
        step(number)
    torch.cuda.synchronize()
    start = time.monotonic()
    for number in range(steps):
        step(number)
    torch.cuda.synchronize()
    seconds = (time.monotonic() - start) / steps
    return {
        "tokens_per_step": tokens,
        "tokens_per_second": round(tokens / seconds),
        "step_ms": round(1e3 * seconds, 3),
        "first_step_s": round(first, 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def _trainer(preset_name: str, folder: Path, impl: str = "auto", tokens: Any = None, **training: Any) -> Any:
    """A trainer of a preset on random tokens, or on these."""
    import numpy as np

    from fuselm.checkpoint import create
    from fuselm.config import preset
    from fuselm.data import open_shard
    from fuselm.text import Tokenizer
    from fuselm.torchlm.train import Trainer

    chosen = preset(preset_name)
    config = chosen.model(int(chosen.tokens), impl=impl)
    if tokens is None:
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, 4_000_000, dtype=np.uint16)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", tokens)
    shard = open_shard(folder / "tokens.npy")
    run = create(
        folder / "run", model=config, train=chosen.train(**training), data={}, tokenizer=Tokenizer.characters("ab")
    )
    return Trainer(run, {"train": shard, "valid": shard}, device="cuda")


# --- learning --------------------------------------------------------------------------------------------------------


def losses(preset_name: str, impl: str, seed: int, folder: Path) -> list[float]:
    """The running mean of the loss every CURVE_EVERY steps, on the bytes of the built-in stories."""
    import numpy as np

    from fuselm.data.stories import stories

    text, made = bytearray(), stories()
    while len(text) < STORY_BYTES:
        text += next(made).encode()
    tokens = np.frombuffer(bytes(text), np.uint8).astype(np.uint16)
    trainer = _trainer(preset_name, folder, impl, tokens, seed=seed, compile=False)
    found = []
    for step in range(1, CURVE_STEPS + 2):  # a step's loss is read while the next one runs
        trainer.advance()
        if step > 1 and (step - 1) % CURVE_EVERY == 0:
            found.append(round(trainer.progress.mean_loss, 5))
    return found


def curves() -> list[Row]:
    """What each of the LEARNERS makes of each preset."""
    rows = []
    for name in PRESETS:
        for impl, seed in LEARNERS:
            found = _child("--losses", name, impl, str(seed))
            rows.append({"preset": name, "impl": impl, "seed": seed, "every": CURVE_EVERY, **found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


# --- resuming --------------------------------------------------------------------------------------------------------


def weights_after(folder: Path, steps: int) -> str:
    """Go on to a step, save, and give a digest of weights and averages; a process of its own each time."""
    trainer = _trainer("tinystories", folder, deterministic=True, compile=False)
    from fuselm.torchlm.precision import attention_backends
    from fuselm.torchlm.state import snapshot

    with attention_backends(True):
        while trainer.progress.step < steps:
            trainer.advance()
        trainer.save()
    weights, optimizer, _ = snapshot(trainer)
    digest = hashlib.sha256()
    for name, array in sorted({**weights, **optimizer}.items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def resume_check(folder: Path) -> Row:
    """The same run three times: whole, again, and stopped half-way and resumed in another process."""

    def child(name: str, steps: int) -> str:
        found: str = _child("--weights-after", str(folder / name), str(steps))["sha256"]
        return found

    whole, again = child("whole", CHECK_STEPS), child("again", CHECK_STEPS)
    child("resumed", CHECK_STEPS // 2)
    resumed = child("resumed", CHECK_STEPS)
    return {"steps": CHECK_STEPS, "sha256": whole, "again_equal": whole == again, "resumed_equal": whole == resumed}


# --- the record ------------------------------------------------------------------------------------------------------


def _child(*arguments: str) -> Row:
    """A row from a process of its own: its last line of output."""
    command = [sys.executable, "-m", "fuselm.bench.train", *arguments]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return {**found, "process_s": round(time.monotonic() - begin, 1)}


def rows_with(text: str) -> list[tuple[str, str, str]]:
    """Preset, model and mode of the rows of speed that have this text in their names."""
    names = [(preset, *row) for preset in PRESETS for row in ROWS]
    return [name for name in names if text in " ".join(name)]


def speed(only: str = "") -> Iterator[Row]:
    """A row for each preset and way to run it, or for those that have this text in their names."""
    for preset, model, mode in rows_with(only):
        row = {"preset": preset, "model": model, "mode": mode, **_child("--row", preset, model, mode)}
        print(json.dumps(row), flush=True)
        yield row


def merged(rows: Sequence[Row], new: Row) -> list[Row]:
    """Rows of speed with a new one in the place of the one of its name, in the order in which they are measured."""

    def name(row: Row) -> tuple[str, str, str]:
        return row["preset"], row["model"], row["mode"]

    found = {name(row): row for row in (*rows, new)}
    return [found[key] for key in rows_with("") if key in found]


def whole_runs(pictures: Path) -> list[Row]:
    """Each run of RUNS through the command line, alone on the machine; its curve beside the record."""
    rows = []
    for name, arguments in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / name
            command = [sys.executable, "-m", "fuselm", "train", *arguments, "--out", str(run), "--json"]
            begin = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
            found = json.loads(done.stdout.strip().splitlines()[-1])
            shutil.copy(run / "curve.png", pictures / f"{name}.png")
        found.pop("run")
        facts = {"name": name, "command": f"fuselm train {' '.join(arguments)}"}
        rows.append({**facts, **found, "process_s": round(time.monotonic() - begin, 1)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def record(out: Path, parts: Sequence[str], only: str = "") -> None:
    """Measure and write the file; what is not measured now stays as it is. A row of speed is kept once it is there."""
    for part in parts:
        if part == "speed":
            for row in speed(only):
                dated = {**row, "date": machine.today()}
                _keep(out, part, merged(_kept(out).get(part, []), dated))
        elif part == "curves":
            _keep(out, part, curves())
        elif part == "runs":
            _keep(out, part, whole_runs(out.parent))
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = resume_check(Path(folder))
            print(json.dumps(found), flush=True)
            _keep(out, part, found)


def _kept(out: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return kept


def _keep(out: Path, part: str, found: Any) -> None:
    """Write a part, with the date on which each part was measured: the file's own is that of the last one."""
    kept = _kept(out)
    measured = {**kept.get("measured", {}), part: machine.today()}
    write_whole(
        out, json.dumps({**kept, **machine.describe("cuda"), "measured": measured, part: found}, indent=1) + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; needs a CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m fuselm.bench.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu/train.json"))
    parser.add_argument("--part", choices=PARTS, help="measure this alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="of speed, the rows with this in their names")
    parser.add_argument("--row", nargs=3, metavar=("PRESET", "WHO", "MODE"))
    parser.add_argument("--losses", nargs=3, metavar=("PRESET", "IMPL", "SEED"))
    parser.add_argument("--weights-after", nargs=2, metavar=("FOLDER", "STEPS"))
    given = parser.parse_args(arguments)
    if given.only and (given.part != "speed" or not rows_with(given.only)):
        names = ", ".join(" ".join(name) for name in rows_with(""))
        parser.error(
            f"--only is for --part speed and has to be in one of its rows; got {given.only!r}. They are: {names}"
        )
    if given.row:
        name, who, mode = given.row
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(plain_row(name) if who == "plain" else our_row(name, mode, Path(folder))))
    elif given.losses:
        name, impl, seed = given.losses
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({"losses": losses(name, impl, int(seed), Path(folder))}))
    elif given.weights_after:
        print(json.dumps({"sha256": weights_after(Path(given.weights_after[0]), int(given.weights_after[1]))}))
    else:
        record(given.out, [given.part] if given.part else PARTS, given.only)


if __name__ == "__main__":
    main()
