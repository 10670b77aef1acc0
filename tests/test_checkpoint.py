"""Run folders: bits that come back, what is whole after a kill or a full disk, and the words of every refusal."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from fuselm.checkpoint import DTYPES, Run, RunError, _read_tensors, create, open_run
from fuselm.config import ModelConfig, TrainConfig, changed
from fuselm.text.tokenizer import Tokenizer

MODEL = ModelConfig(vocab_size=8, context=16, num_layers=1, width=8, num_heads=2, ffn_width=16)
TRAIN = TrainConfig(steps=10, warmup=2)
TOKENIZER = Tokenizer.characters("abc\n")
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: Patch) -> None:
    """fsync is for when the power fails, which no test can make happen; without it the tests take half the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def make(folder: Path, **changes: Any) -> Run:
    given: dict[str, Any] = {"model": MODEL, "train": TRAIN, "data": {"corpus": "stories"}, "tokenizer": TOKENIZER}
    return create(folder, **(given | changes))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make(tmp_path / "run")


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"head.weight": np.full((3, 5), step, np.float32), "norm.weight": np.full(7, step, ml_dtypes.bfloat16)}


def save(run: Run, step: int, **changes: Any) -> None:
    given: dict[str, Any] = {"weights": arrays(step), "optimizer": arrays(-step), "state": {"step": step}}
    run.save(step, **(given | changes))


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def bits(tensors: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (array.dtype.name, array.shape, array.tobytes()) for name, array in sorted(tensors.items())}


# --- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_to_the_bit(run: Run, name: str) -> None:
    dtype = np.dtype(name)
    raw = np.random.default_rng(0).integers(0, 256, (6, 4 * dtype.itemsize), np.uint8)
    table = (raw % 2 if name == "bool" else raw).view(dtype)  # NaNs of every kind among the floats
    weights = {"table": table, "scalar": table[1, 1].reshape(()), "empty": table[:0]}
    weights |= {"turned": table.T[1:, ::2], "column": table[:, 1]}
    run.save(3, weights, {"first.table": table}, {})
    loaded = run.load()
    assert bits(loaded.weights) == bits(weights)
    assert bits(loaded.optimizer or {}) == bits({"first.table": table})


def test_the_library_reads_what_is_written_and_arrays_are_aligned(run: Run) -> None:
    weights = {"3 bytes": np.ones(3, np.uint8), "a/b c": np.arange(5.0), "größe": np.ones(1, np.float16)}
    run.save(0, weights | {"foreign": np.arange(4, dtype=">f4")}, {}, {})
    weights["foreign"] = np.arange(4, dtype="<f4")
    path = run.folder / "step-00000000" / "model.safetensors"
    assert bits(load_file(path)) == bits(weights)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "np"}
    assert all(item["data_offsets"][0] % weights[name].itemsize == 0 for name, item in header.items())
    assert path.stat().st_mode == (run.folder / "config.json").stat().st_mode  # whoever reads the one reads the other


def test_state_comes_back_equal(run: Run) -> None:
    state = {"loss": 0.1 + 0.2, "tiny": 5e-324, "minus": -0.0, "random": 2**127 + 1, "deep": [{"a": None}, True, "ü"]}
    save(run, 1, state=state)
    assert repr(run.load().state) == repr(state)


@pytest.mark.parametrize(
    "state",
    [{"loss": float("nan")}, {"a": [float("inf")]}, {"a": (1, 2)}, {"a": {1: 2}}, {"a": np.float32(1)}, {"a": b"x"}],
    ids=str,
)
def test_state_that_json_would_change_is_refused_before_anything_is_written(run: Run, state: Any) -> None:
    with pytest.raises(RunError, match=r"state\.json holds plain JSON with finite numbers.*Convert it"):
        save(run, 1, state=state)
    assert names(run.folder, "*step*") == []


def test_large_json_is_refused_when_written_and_when_read(run: Run) -> None:
    with pytest.raises(RunError, match=r"at most 16 MiB; got something else \(17 MiB\)"):
        save(run, 1, state={"text": "x" * (17 << 20)})
    with (run.folder / "config.json").open("ab") as file:
        file.truncate(17 << 20)
    with pytest.raises(RunError, match=r"config\.json is a JSON object of at most 16 MiB; this one is not \(17 MiB\)"):
        open_run(run.folder)


@pytest.mark.parametrize(
    "weights",
    [{"x": np.ones(2, np.complex64)}, {"x": np.array(["text"])}, {"x": np.array([None])}, {"__metadata__": np.ones(2)}],
    ids=str,
)
def test_arrays_that_would_not_come_back_are_refused(run: Run, weights: Any) -> None:
    with pytest.raises(RunError, match=r"Arrays are of float64.*got .* of '(x|__metadata__)'"):
        save(run, 1, weights=weights)
    assert run.saved == {}


# --- last and best ---------------------------------------------------------------------------------------------------


def test_the_best_is_kept_while_the_last_moves_on(run: Run) -> None:
    assert (run.has_checkpoint, run.best_loss) == (False, None)
    save(run, 100, best_loss=2.5)
    assert run.saved == {"last": 100, "best": 100}
    assert names(run.folder, "step*") == ["step-00000100"]
    assert run.load("best").optimizer is None
    save(run, 200)
    save(run, 300)
    assert open_run(run.folder).saved == {"last": 300, "best": 100}
    assert (run.has_checkpoint, run.best_loss) == (True, 2.5)
    assert names(run.folder, "step*") == ["step-00000100", "step-00000300"]
    for found, step in ((run.load("best"), 100), (run.load(), 300)):
        assert (found.step, found.state, bits(found.weights)) == (step, {"step": step}, bits(arrays(step)))
    assert names(run.folder / "step-00000100") == ["model.safetensors", "state.json"]
    assert run.load(weights_only=True).optimizer is None


def test_without_an_optimizer_only_the_best_moves(run: Run) -> None:
    save(run, 10, optimizer=None, best_loss=3.0)
    assert (run.has_checkpoint, run.saved) == (False, {"best": 10})
    with pytest.raises(RunError, match="has no last checkpoint; it has best"):
        run.load()
    save(run, 20)
    save(run, 30, optimizer=None, best_loss=2.0)
    assert run.saved == {"last": 20, "best": 30}


def test_a_step_saved_again_takes_the_place_of_the_first(run: Run) -> None:
    save(run, 100, best_loss=2.0)
    for state in ({"again": 1}, {"again": 2}, {"again": 3}):
        save(run, 100, state=state)
        assert run.load().state == state
        assert run.load("best").state == {"step": 100}
        assert run.saved == {"last": 100, "best": 100}
    assert len(names(run.folder, "step*")) == 2


def test_what_cannot_be_saved_or_loaded_is_refused(run: Run) -> None:
    for step, loss in ((-1, None), (1, float("nan")), (1, float("inf"))):
        with pytest.raises(RunError, match="A step is 0 or more and a best loss finite"):
            save(run, step, best_loss=loss)
    with pytest.raises(RunError, match="kept as the best; got no best_loss"):
        save(run, 1, optimizer=None)
    with pytest.raises(RunError, match="has no best checkpoint; it has none yet"):
        run.load("best")
    save(run, 1, best_loss=1.0)
    with pytest.raises(RunError, match="has no best_loss checkpoint; it has last and best"):
        run.load("best_loss")  # type: ignore[arg-type]


# --- killed, interrupted, full ---------------------------------------------------------------------------------------

# Imports once and forks a child for each kill, which takes milliseconds. Every array and the state of a checkpoint hold
# its step, so one look tells whether they belong together.
NURSERY = """
import os, random, signal, sys, time
import numpy as np
from fuselm.checkpoint import open_run

os.fsync = lambda handle: None
run = open_run(sys.argv[1])

def save(step, size):
    optimizer = {"first": np.full(size, step), "second": np.full(size, step)} if step % 4 else None
    best_loss = 100.0 / step if step % 3 == 0 or step % 4 == 0 else None
    run.save(step, {"w": np.full(size, step), "b": np.full(3, step)}, optimizer, {"step": step}, best_loss=best_loss)

def check():
    found = {which: run.load(which) for which in ("last", "best")}
    assert set(found["last"].optimizer) == {"first", "second"}
    for one in found.values():
        assert set(one.weights) == {"w", "b"} and one.state == {"step": one.step}
        assert all((array == one.step).all() for array in [*one.weights.values(), *(one.optimizer or {}).values()])
    return found["last"].step, found["best"].step

def in_child(work, *arguments):
    if not (pid := os.fork()):
        try:
            work(*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    return pid
"""

AT_RANDOM = """
def forever(step):
    while True:
        step += 1
        save(step, 40_000)

save(3, 40_000)
step, kills = 3, random.Random(0)
for _ in range(25):
    pid = in_child(forever, step)
    time.sleep(kills.uniform(0.005, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    step, before = max(check()), step
    assert step >= before
assert step > 3, "it was killed before it could save anything"
"""

AT_EVERY_CALL = """
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir")

def dies_at(count, step):
    left = [count]
    def hook(event, arguments):
        if event in CALLS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(step, 4)

outcomes = set()
for step in (6, 8, 10):  # becomes both, the best only, the last only
    count, killed = 0, True
    while killed:
        save(3, 4), save(5, 4)  # whatever the last kill left is swept
        left = sorted(path.name for path in run.folder.iterdir() if path.name.endswith(".partial") or path.is_dir())
        assert len(left) == 2 and all(name.startswith("step-") for name in left), left
        before = check()
        _, status = os.waitpid(in_child(dies_at, count, step), 0)
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0
        outcomes.add((step, killed, before != check()))
        count += 1
for step in (6, 8, 10):  # kills before the switch, kills after it, and no kill
    assert {(step, True, False), (step, True, True), (step, False, True)} < outcomes
"""


@pytest.mark.parametrize("program", [AT_RANDOM, AT_EVERY_CALL], ids=["at random", "at every call"])
def test_a_kill_at_any_point_leaves_both_checkpoints_whole(run: Run, program: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", NURSERY + program, str(run.folder)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_the_remains_of_a_kill_are_swept_and_other_files_are_not(run: Run, monkeypatch: Patch) -> None:
    save(run, 1)
    for name in ("step-00000009", "step-00000001-copy", "notes"):
        (run.folder / name).mkdir()
    (run.folder / ".step.elsewhere-1-abcd.partial" / "half").mkdir(parents=True)
    kept = {"step-00000001-copy", "notes", ".lock", "config.json", "tokenizer.json", "checkpoints.json"}
    left: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda handle: left.append((run.folder / "step-00000009").exists()))
    save(run, 2)
    assert set(names(run.folder)) == kept | {"step-00000002"}
    assert not left[0], "its room was needed before"


def test_bytes_reach_the_disk_before_names_and_names_before_the_switch(run: Run, monkeypatch: Patch) -> None:
    events: list[str] = []
    rename = os.rename

    def renamed(old: Path, new: Path) -> None:
        events.append(f"={new}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.readlink(f"/proc/self/fd/{handle}")))
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", renamed)
    save(run, 1)
    short = re.sub(r"\.(step|checkpoints\.json)\.\S+?\.partial", r"\1~", " ".join(events))
    step = "step~/model.safetensors step~/optimizer.safetensors step~/state.json step~ =step-00000001 ."
    expected = f"{step} checkpoints.json~ =checkpoints.json ."
    assert short.replace(f"{run.folder}/", "").replace(str(run.folder), ".") == expected


def test_a_write_that_fails_leaves_the_checkpoint_before_it_whole(run: Run) -> None:
    save(run, 1, best_loss=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # a real failure in the middle of a file
    try:
        with pytest.raises(RunError, match=r"step 2 could not be saved .*File too large.*the last one of step 1"):
            save(run, 2, weights={"x": np.ones(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(run.folder, "*step*") == ["step-00000001"]
    assert bits(run.load().weights) == bits(arrays(1))
    save(run, 2)
    assert run.saved == {"last": 2, "best": 1}


@pytest.mark.parametrize("room", range(6))
def test_a_full_disk_at_any_sync_leaves_a_whole_checkpoint(run: Run, monkeypatch: Patch, room: int) -> None:
    save(run, 1)
    left = [None] * room

    def full(handle: int) -> None:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.pop()

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*Make room there, and resume"):
        save(run, 2)
    assert run.saved == {"last": 1}
    assert bits(run.load().weights) == bits(arrays(1))
    assert names(run.folder, "*step*") == ["step-00000001"]


def test_a_reader_that_loses_its_checkpoint_to_a_newer_one_reads_that(run: Run, monkeypatch: Patch) -> None:
    save(run, 1)

    def slow(path: Path) -> dict[str, np.ndarray]:
        tensors = _read_tensors(path)
        if path.name == "optimizer.safetensors" and "00000001" in str(path):
            save(run, 2)
        return tensors

    monkeypatch.setattr("fuselm.checkpoint._read_tensors", slow)
    found = run.load()
    assert (found.step, found.state, bits(found.weights)) == (2, {"step": 2}, bits(arrays(2)))


# --- making and opening ----------------------------------------------------------------------------------------------


def test_a_run_is_opened_as_it_was_made(tmp_path: Path) -> None:
    made = make(tmp_path / "deep" / "run")
    found = open_run(str(tmp_path / "deep" / "run"))
    assert found == made
    assert (found.model, found.train, found.tokenizer()) == (MODEL, TRAIN, TOKENIZER)
    assert list(json.loads((made.folder / "config.json").read_text())) == ["fuselm", "model", "train", "data"]
    bare = make(tmp_path / "bare", train=None, tokenizer=None)
    assert open_run(bare.folder).train is None
    with pytest.raises(RunError, match=r"has no tokenizer\.json"):
        bare.tokenizer()


def test_another_config_is_refused_by_name_and_value(run: Run) -> None:
    words = r"model\.width = 8 \(asked for: 16\), data\.rows = null \(asked for: \"x{29}…x{23}/häns\"\)\. Use .* or"
    with pytest.raises(RunError, match=words):
        make(run.folder, model=changed(MODEL, width=16), data={"corpus": "stories", "rows": "x" * 99 + "/häns"})
    with pytest.raises(RunError, match=r"train\.seed = 0 \(asked for: 7\)\. Use"):
        make(run.folder, train=changed(TRAIN, seed=7))
    with pytest.raises(RunError, match=r"train = .* \(asked for: null\)"):
        make(run.folder, train=None)
    with pytest.raises(RunError, match="another tokenizer"):
        make(run.folder, tokenizer=Tokenizer.characters("xyz"))
    with pytest.raises(RunError, match=r"\) and 2 more\. Use"):
        make(run.folder, train=changed(TRAIN, seed=7, steps=9, warmup=1, clip=0.5, eps=1e-9))


def test_the_same_run_is_opened_and_overwriting_starts_anew(run: Run) -> None:
    save(run, 5, best_loss=1.0)
    assert make(run.folder).saved == make(run.folder, tokenizer=None).saved == {"last": 5, "best": 5}
    (run.folder / "notes.txt").write_text("mine")
    again = make(run.folder, model=changed(MODEL, width=16), tokenizer=None, overwrite=True)
    assert (again.model.width, again.saved) == (16, {})
    assert names(run.folder) == [".lock", "config.json", "notes.txt"]


def test_a_run_killed_while_it_was_made_is_made_whole(run: Run) -> None:
    (run.folder / "tokenizer.json").unlink()
    assert make(run.folder).tokenizer() == TOKENIZER
    (run.folder.parent / "new" / ".files.elsewhere-1-abcd.partial").mkdir(parents=True)
    assert make(run.folder.parent / "new").tokenizer() == TOKENIZER


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match=r"holds other files: thesis\.tex\. Use another folder"):
        make(tmp_path, overwrite=overwrite)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(RunError, match="if it is not a run's, use another folder"):
        make(tmp_path, overwrite=overwrite)
    assert names(tmp_path) == ["config.json", "thesis.tex"]


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file", "is a file"), (tmp_path, "has no config"), (tmp_path / "no", "not there")):
        with pytest.raises(RunError, match=f"A run is a folder with config.json; .*{words}"):
            open_run(path)


def test_a_newer_run_is_refused_and_an_older_one_is_not(run: Run) -> None:
    path = run.folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"fuselm": "12.0.1", "model": {"new": "things"}}))
    with pytest.raises(RunError, match=r"is from 12\.0\.1, and this is .* Update fuselm"):
        open_run(run.folder)
    path.write_text(json.dumps(config | {"fuselm": "0.0.9"}))
    assert open_run(run.folder).model == MODEL


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "\xff", "[" * 100_000, '{"model": 3}', '{"model": {}, "train": null, "data": {}}'],
    ids=lambda text: text[:12],
)
def test_a_broken_config_is_refused_in_words(run: Run, text: str) -> None:
    path = run.folder / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match=r"config\.json .*If it was edited, undo that"):
        open_run(run.folder)


# --- broken checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"last": "../other"}', '{"best": 3}', "{", '{"last": "step-00000001/.."}', "[1]"])
def test_a_broken_switch_is_refused_with_what_to_write(run: Run, text: str) -> None:
    save(run, 1)
    (run.folder / "checkpoints.json").write_text(text)
    for act in (run.load, lambda: open_run(run.folder), lambda: save(run, 2)):
        with pytest.raises(RunError, match=r'checkpoints\.json .*Write \{"last": NAME\} into it by hand'):
            act()
    (run.folder / "checkpoints.json").write_text('{"last": "step-00000001"}')
    assert run.load().step == 1


FLOAT8 = b'{"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}'
DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 5),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": lambda path: path.unlink(),
    "replaced": lambda path: path.write_bytes(b"\x80\x04\x95 not what it says it is"),
    "of a dtype numpy lacks": lambda path: path.write_bytes(len(FLOAT8).to_bytes(8, "little") + FLOAT8 + b"x"),
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_named_and_the_other_checkpoint_still_loads(run: Run, file: str, damage: str) -> None:
    save(run, 1, best_loss=1.0)
    save(run, 2)
    DAMAGES[damage](run.folder / "step-00000002" / file)
    with pytest.raises(RunError, match=f"The last checkpoint cannot be read.*{file}.*Put the file back") as caught:
        run.load()
    assert "\n" not in str(caught.value)
    assert run.load("best").step == 1
    if file == "optimizer.safetensors":
        assert bits(run.load(weights_only=True).weights) == bits(arrays(2))


# --- where a run may be written --------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    # /proc takes no files from anybody, root included.
    with pytest.raises(RunError, match=r"A run writes into its folder; /proc/self/run refuses \(.+\)\. Use another"):
        make(Path("/proc/self/run"))
    with pytest.raises(RunError, match="/proc/self refuses"):
        Run(Path("/proc/self"), MODEL, None, {}).check_writable(0)
    (tmp_path / "file").write_text("mine")
    for path, words in ((tmp_path / "file", "A run is a folder; .* is a file"), (tmp_path / "file" / "run", "refuses")):
        with pytest.raises(RunError, match=words):
            make(path)


def test_a_disk_with_too_little_room_is_refused_with_both_sizes(run: Run, monkeypatch: Patch) -> None:
    before = names(run.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    with pytest.raises(RunError, match=r"need 1,500 MB; .* has 1,000 MB free\. Make room"):
        run.check_writable(1_500_000_000)
    run.check_writable(1_000_000_000)
    assert names(run.folder) == before
