"""Whole files and folders: what is seen while they are written, after a failure, and after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuselm.files import partial_path, whole_file, whole_folder, write_whole


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    with whole_file(path) as file:
        file.write(b"some")
        assert not path.exists()
        file.write(b"thing")
    assert path.read_bytes() == b"something"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "old")
    with pytest.raises(TypeError), whole_file(tmp_path / "file") as file:
        file.writelines([b"new", None])
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]


def test_threads_that_write_one_file_do_not_mix(tmp_path: Path) -> None:
    texts = [bytes([65 + i]) * 100_000 for i in range(4)]
    for _ in range(5):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda text: write_whole(tmp_path / "file", text), texts))
        assert (tmp_path / "file").read_bytes() in texts


def test_files_of_a_folder_take_their_places_together(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    write_whole(tmp_path / "kept", "kept")
    with whole_folder(tmp_path, last="a") as staging:
        write_whole(staging / "a", "new")
        write_whole(staging / "b", "new")
        assert (tmp_path / "a").read_text() == "old"
        assert not (tmp_path / "b").exists()
    found = {entry.name: entry.read_text() for entry in tmp_path.iterdir()}
    assert found == {"a": "new", "b": "new", "kept": "kept"}
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path, last="a") as staging:
        (staging / "a").rename(staging / "no" / "such" / "folder")
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == found


def test_a_failure_leaves_no_empty_folder_and_none_that_was_there_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(FileNotFoundError), whole_folder(tmp_path / "there" / "new" / "data", last="a") as staging:
        (staging / "a").unlink()
    assert [entry.name for entry in tmp_path.rglob("*")] == ["there"]
    with whole_folder(tmp_path / "there" / "new" / "data", last="a") as staging:
        write_whole(staging / "a", "new")
    assert (tmp_path / "there" / "new" / "data" / "a").read_text() == "new"


def test_what_a_killed_process_left_is_swept_up_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "train[1].tokens"
    program = (
        "import os, pathlib, sys; from fuselm.files import partial_path\n"
        "partial_path(pathlib.Path(sys.argv[1])).write_text('half')"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, env=environment)
    mine = partial_path(path)
    mine.write_text("at work")
    assert len(list(tmp_path.iterdir())) == 2
    write_whole(path, "whole")
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, mine.name}
