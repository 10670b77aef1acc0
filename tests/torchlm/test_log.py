"""What a run writes of itself: JSONL that survives a crash anywhere, one table as CSV, and TensorBoard's files."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from fuselm.torchlm.log import CSV_FIELDS, CsvLines, JsonLines, TensorBoard, read_log

RECORDS: list[dict[str, Any]] = [
    {"kind": "step", "step": 1, "seconds": 0.5, "loss": 4.25, "tokens": 64, "learning_rate": 0.1, "mfu": None},
    {"kind": "sample", "step": 1, "seconds": 0.5, "text": "Zoë, 🐓\n\u2028and\x85\r \x00 the rest"},
    {"kind": "eval", "step": 1, "seconds": 0.5, "loss": 4.5, "bits_per_byte": 6.5, "best": True, "took": 0.1},
    {"kind": "save", "step": 1, "seconds": 0.5, "best": True},
    {"kind": "step", "step": 2, "seconds": 1.0, "loss": 4.0, "tokens": 128, "learning_rate": 0.05, "mfu": 0.4},
    {"kind": "skip", "step": 3, "seconds": 1.5, "reason": "loss nan", "loss_scale": 1.0},
]


def write(path: Path, records: list[dict[str, Any]] = RECORDS, keep_until: int = 0) -> None:
    log = JsonLines(path, keep_until=keep_until)
    for record in records:
        log(record)
    log.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_records_come_back_as_they_were(path: Path) -> None:
    write(path)
    assert list(read_log(path)) == RECORDS
    assert path.read_bytes().count(b"\n") == len(RECORDS)


def test_every_record_is_on_the_disk_at_once(path: Path) -> None:
    log = JsonLines(path, keep_until=0)
    for count, record in enumerate(RECORDS, start=1):
        log(record)
        assert len(list(read_log(path))) == count
    log.close()


def test_what_is_no_number_is_null(path: Path) -> None:
    write(path, [{"kind": "step", "step": 1, "loss": math.nan, "gradient_norm": math.inf, "mfu": None}])

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert found == {"kind": "step", "step": 1, "loss": None, "gradient_norm": None, "mfu": None}


def test_a_log_cut_at_any_byte_keeps_its_whole_lines_and_is_gone_on_with(path: Path) -> None:
    write(path)
    whole = path.read_bytes()
    first, second = (whole.index(letter.encode()) for letter in "ë🐓")
    ends = [at for at in range(len(whole) + 1) if whole[:at].endswith(b"}")]
    for cut in (*range(0, len(whole), 7), first + 1, second + 1, second + 2, second + 3, *ends, len(whole)):
        kept = whole[:cut].count(b"\n") + (cut in ends and whole[cut : cut + 1] == b"\n")
        path.write_bytes(whole[:cut])
        assert list(read_log(path)) == RECORDS[:kept], cut
        more = {"kind": "step", "step": 9, "loss": 1.0}
        write(path, [more], keep_until=8)
        assert list(read_log(path)) == [*RECORDS[:kept], more], cut
        assert path.read_bytes().count(b"\n") == kept + 1


@pytest.mark.parametrize(("until", "kept"), [(0, 0), (1, 4), (2, 5), (3, 6), (99, 6)])
def test_steps_that_are_made_again_are_dropped_first(until: int, kept: int, path: Path) -> None:
    write(path)
    write(path, [{"kind": "end", "step": 100, "reason": "done"}], keep_until=until)
    assert list(read_log(path)) == [*RECORDS[:kept], {"kind": "end", "step": 100, "reason": "done"}]


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "7", '{"step": 3}', "", "{", "null"])
def test_lines_that_are_no_records_are_left_out(line: str, path: Path) -> None:
    write(path, RECORDS[:1])
    with path.open("a") as file:
        file.write(line + "\n" + json.dumps(RECORDS[3]) + "\n")
    assert list(read_log(path)) == [RECORDS[0], RECORDS[3]]


# --- CSV -------------------------------------------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_has_a_row_for_each_step_and_evaluation(path: Path, tmp_path: Path) -> None:
    table = CsvLines(tmp_path / "new" / "folder" / "run.csv", path)
    for record in RECORDS:
        table(record)
    table.close()
    found = rows(tmp_path / "new" / "folder" / "run.csv")
    assert [row["step"] for row in found] == ["1", "1", "2"]
    assert [row["train_loss"] for row in found] == ["4.25", "", "4.0"]
    assert [row["valid_loss"] for row in found] == ["", "4.5", ""]
    assert [row["bits_per_byte"] for row in found] == ["", "6.5", ""]
    assert [row["mfu"] for row in found] == ["", "", "0.4"]
    assert all(tuple(row) == CSV_FIELDS for row in found)


def test_a_resumed_run_has_the_whole_table(path: Path, tmp_path: Path) -> None:
    write(path)
    table = CsvLines(tmp_path / "run.csv", path)
    table({"kind": "step", "step": 4, "loss": 3.0})
    table.close()
    assert [(row["step"], row["train_loss"]) for row in rows(tmp_path / "run.csv")] == [
        ("1", "4.25"),
        ("1", ""),
        ("2", "4.0"),
        ("4", "3.0"),
    ]


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_reads_the_numbers_and_the_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, step=0)
    for record in RECORDS:
        board(record)
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 4.25), (2, 4.0)]
    assert [(event.step, event.value) for event in events.Scalars("valid/bits_per_byte")] == [(1, 6.5)]
    assert [event.step for event in events.Scalars("train/mfu")] == [2]
    assert "valid/best" not in events.Tags()["scalars"]
    (sample,) = events.Tensors("sample/text_summary")
    assert "Zoë, 🐓" in sample.tensor_proto.string_val[0].decode()


def test_tensorboard_forgets_steps_that_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begun, loss in ((0, 1.0), (2, 5.0)):
        board = TensorBoard(tmp_path, step=begun)
        for step in range(begun + 1, 5):
            board({"kind": "step", "step": step, "loss": loss})
        board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 5.0), (4, 5.0)]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"--tensorboard needs the package tensorboard\. Install it, or leave it out"):
        TensorBoard(tmp_path, step=0)
