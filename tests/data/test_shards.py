"""Token files: what goes in comes out, whole or not at all, and what cannot be right is refused in words."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuselm.data.shards import (
    HEADER_BYTES,
    MAGIC,
    Concatenated,
    Shard,
    ShardError,
    ShardHeader,
    ShardWriter,
    open_shard,
)

FINGERPRINT = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
SEPARATOR = 9
# Each example writes to a disk, which takes as long as it takes.
FILES = settings(max_examples=30, deadline=None, derandomize=True)


def write(
    path: Path,
    blocks: Iterable[Sequence[int] | np.ndarray],
    vocab_size: int = 300,
    separator: int | None = SEPARATOR,
    fingerprint: str = FINGERPRINT,
) -> Shard:
    with ShardWriter(path, vocab_size=vocab_size, fingerprint=fingerprint, separator=separator) as writer:
        for block in blocks:
            writer.append(np.asarray(block))
    return open_shard(path)


def document_starts(ids: Sequence[int], separator: int | None) -> list[int]:
    """The definition, one id at a time."""
    return [i for i in range(len(ids)) if i == 0 or ids[i - 1] == separator]


def edit_header(path: Path, **changes: object) -> None:
    data = path.read_bytes()
    fields = {**json.loads(data[len(MAGIC) : HEADER_BYTES]), **changes}
    path.write_bytes((MAGIC + json.dumps(fields).encode()).ljust(HEADER_BYTES) + data[HEADER_BYTES:])


# --- writing and reading ---------------------------------------------------------------------------------------------


@FILES
@given(ids=st.lists(st.integers(0, 15), max_size=60), separator=st.sampled_from([None, 0, SEPARATOR]))
def test_ids_and_document_starts_come_back(ids: list[int], separator: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shard = write(Path(folder) / "a.tokens", [ids], separator=separator)
        assert shard.tokens.tolist() == ids
        assert shard.documents.tolist() == document_starts(ids, separator)
        assert (len(shard), shard.header.num_documents) == (len(ids), len(shard.documents))
        shard.verify()


@FILES
@given(ids=st.lists(st.integers(0, 15), max_size=60), cuts=st.lists(st.integers(0, 60)))
def test_the_bytes_do_not_depend_on_how_ids_were_cut_into_blocks(ids: list[int], cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, pieces = Path(folder) / "whole.tokens", Path(folder) / "pieces.tokens"
        write(whole, [ids])
        write(pieces, np.split(np.array(ids, dtype=np.int64), sorted(cuts)))
        assert whole.read_bytes() == pieces.read_bytes()


def test_blocks_larger_than_what_is_handled_at_once_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).integers(0, 12, 1000)
    whole = write(tmp_path / "a.tokens", [ids])
    monkeypatch.setattr("fuselm.data.shards.BLOCK", 7)
    write(tmp_path / "b.tokens", [ids]).verify()
    assert whole.path.read_bytes() == (tmp_path / "b.tokens").read_bytes()
    np.save(tmp_path / "c.npy", ids)
    assert open_shard(tmp_path / "c.npy", separator=SEPARATOR).documents.tolist() == whole.documents.tolist()


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "train.tokens"
    source = {"split": "train", "corpus": "stories"}
    with ShardWriter(path, vocab_size=300, fingerprint=FINGERPRINT, separator=9, source=source) as writer:
        writer.append(np.array([1, 9, 299]))
    data = path.read_bytes()
    body = bytes([1, 0, 9, 0, 43, 1]) + bytes(2) + bytes([0] * 8) + bytes([2] + [0] * 7)
    assert data[HEADER_BYTES:] == body
    assert data.startswith(MAGIC)
    assert json.loads(data[len(MAGIC) : HEADER_BYTES]) == {
        "version": 1,
        "dtype": "uint16",
        "byte_order": "little",
        "num_tokens": 3,
        "num_documents": 2,
        "vocab_size": 300,
        "fingerprint": FINGERPRINT,
        "sha256": hashlib.sha256(body).hexdigest(),
        "separator": 9,
        "source": source,
    }
    # Literal, so that a change of the format is a decision: it wants a new version and a reader for the old one.
    assert hashlib.sha256(data).hexdigest() == "573d24c8eac0f2d363d999b70e0304faf0c550a5ebf4f511d1f7257359431720"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32"), (2**31, "uint32")])
def test_the_vocabulary_decides_the_dtype(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    shard = write(tmp_path / "a.tokens", [np.array([0, vocab_size - 1], dtype=np.uint32)], vocab_size=vocab_size)
    assert shard.header.dtype == dtype == shard.tokens.dtype.name
    assert shard.tokens.tolist() == [0, vocab_size - 1]


def test_tokens_are_mapped_not_read(tmp_path: Path) -> None:
    assert isinstance(write(tmp_path / "a.tokens", [[1, 2]]).tokens, np.memmap)
    np.save(tmp_path / "a.npy", np.array([1, 2]))
    assert isinstance(open_shard(tmp_path / "a.npy").tokens, np.memmap)


def test_the_order_of_source_keys_does_not_change_the_bytes(tmp_path: Path) -> None:
    for name, source in (("a", {"corpus": "x", "split": "y"}), ("b", {"split": "y", "corpus": "x"})):
        with ShardWriter(tmp_path / name, vocab_size=2, fingerprint=FINGERPRINT, separator=None, source=source) as one:
            one.append(np.array([0, 1]))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.array([0, 300]), "0 to 299, as vocab_size is 300; got 300"),
        (np.array([5, -1]), "got -1"),
        (np.array([2**64 - 1], dtype=np.uint64), "got 18446744073709551615"),
        (np.array([1.0]), "one-dimensional array of integers; got float64"),
        (np.array([True]), "got bool"),
        (np.array([[1]]), r"shape \(1, 1\)"),
    ],
)
def test_ids_that_are_none_are_refused_and_leave_no_file(tmp_path: Path, ids: np.ndarray, words: str) -> None:
    with pytest.raises(ShardError, match=words):
        write(tmp_path / "a.tokens", [[1, 2], ids])
    assert list(tmp_path.iterdir()) == []


def test_a_refused_block_leaves_the_writer_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    with ShardWriter(path, vocab_size=300, fingerprint=FINGERPRINT, separator=9) as writer:
        writer.append(np.array([1, 9]))
        with pytest.raises(ShardError):
            writer.append(np.array([9, 2, 300]))
        writer.append(np.array([], dtype=np.float64))
        writer.append(np.array([3]))
    assert open_shard(path).tokens.tolist() == [1, 9, 3]
    assert open_shard(path).documents.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size is 1 to"),
        ({"vocab_size": 2**31 + 1}, "vocab_size is 1 to"),
        ({"fingerprint": "short"}, "64 lower-case hex digits; got 'short'"),
        ({"separator": 300}, "0 to 299; got 300"),
        ({"separator": -1}, "got -1"),
        ({"source": {"text": "x" * 4096}}, "header is 4096 bytes"),
        ({"source": {"path": Path("x")}}, "dict of JSON values"),
        ({"source": {"loss": float("nan")}}, "dict of JSON values"),
    ],
)
def test_a_writer_is_refused_before_it_touches_the_disk(tmp_path: Path, changes: dict, words: str) -> None:
    arguments = {"vocab_size": 300, "fingerprint": FINGERPRINT, "separator": 9, **changes}
    with pytest.raises(ShardError, match=words):
        ShardWriter(tmp_path / "new" / "a.tokens", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_appending_outside_the_with_block_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.tokens", vocab_size=300, fingerprint=FINGERPRINT, separator=None)
    with pytest.raises(ShardError, match="inside the writer's `with` block"):
        writer.append(np.array([1]))
    with writer:
        writer.append(np.array([1]))
    with pytest.raises(ShardError, match="inside the writer's `with` block"):
        writer.append(np.array([2]))
    assert open_shard(tmp_path / "a.tokens").tokens.tolist() == [1]


# --- interruptions ---------------------------------------------------------------------------------------------------

WRITER = f"""
import sys
import numpy as np
from fuselm.data.shards import ShardWriter

path, blocks = sys.argv[1], int(sys.argv[2])
with ShardWriter(path, vocab_size=300, fingerprint="{FINGERPRINT}", separator={SEPARATOR}) as writer:
    for _ in range(blocks):
        writer.append(np.full(100_000, 7))
    print("writing", flush=True)
    sys.stdin.read()  # until the test is done with this process
"""


def stop_while_writing(path: Path, blocks: int, how: signal.Signals) -> int:
    command = [sys.executable, "-c", WRITER, str(path), str(blocks)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(how)
        return process.wait(60)


@pytest.mark.parametrize("blocks", [0, 3])
def test_kill_leaves_the_old_file_and_the_next_writer_sweeps_up(tmp_path: Path, blocks: int) -> None:
    path = tmp_path / "train.tokens"
    write(path, [[1, 2, 3]])
    before = path.read_bytes()
    assert stop_while_writing(path, blocks, signal.SIGKILL) == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2  # what was written is there, under a name nobody opens
    assert write(path, [[4, 5]]).tokens.tolist() == [4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_control_c_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "train.tokens"
    write(path, [[1, 2, 3]])
    before = path.read_bytes()
    stop_while_writing(path, 2, signal.SIGINT)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "train.tokens"
    write(path, [[1, 2, 3]])

    def blocks() -> Iterator[list[int]]:
        yield [4]
        raise error

    with pytest.raises(error):
        write(path, blocks())
    assert open_shard(path).tokens.tolist() == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_while_finishing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.tokens"
    write(path, [[1, 2, 3]])

    def full_disk(_: object) -> bytes:
        raise OSError("No space left on device")

    writer = ShardWriter(path, vocab_size=300, fingerprint=FINGERPRINT, separator=None)
    monkeypatch.setattr("fuselm.data.shards._render", full_disk)
    with pytest.raises(OSError, match="No space left"), writer:
        writer.append(np.array([4]))
    assert open_shard(path).tokens.tolist() == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


# --- refusals of a reader --------------------------------------------------------------------------------------------


def test_the_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [[1]]).path
    assert open_shard(path, fingerprint=FINGERPRINT).tokens.tolist() == [1]
    with pytest.raises(ShardError, match="made by 0123456789ab…, and this is fedcba987654…"):
        open_shard(path, fingerprint=OTHER)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.tokens", [np.arange(10), [SEPARATOR, 1]]).path.read_bytes()
    cut = tmp_path / "cut.tokens"
    for length in [1, 5, len(MAGIC), len(MAGIC) + 1, 500, *range(HEADER_BYTES - 2, len(whole))]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ShardError, match="truncated: .* it has " + str(length)):
            open_shard(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(ShardError, match="longer than it should be"):
        open_shard(cut)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is empty"),
        (b"Once upon a time", "starts with b'Once upon a ti'"),
        (MAGIC.ljust(HEADER_BYTES), "it is not JSON"),
        (MAGIC + b"\xff" * HEADER_BYTES, "it is not JSON"),
        (MAGIC + b"[" * HEADER_BYTES, "it is not JSON"),
        ((MAGIC + b"[]").ljust(HEADER_BYTES), "it is not JSON"),
        ((MAGIC + b"{}").ljust(HEADER_BYTES), "'version' is None"),
    ],
)
def test_a_file_that_is_no_token_file_is_refused(tmp_path: Path, contents: bytes, words: str) -> None:
    (tmp_path / "a.tokens").write_bytes(contents)
    with pytest.raises(ShardError, match=words):
        open_shard(tmp_path / "a.tokens")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="does not exist"):
        open_shard(tmp_path / "none.tokens")
    with pytest.raises(ShardError, match="is a folder"):
        open_shard(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "up to version 1; .* is of version 2. Update fuselm"),
        ({"version": 0}, "'version' is 0"),
        ({"version": True}, "'version' is True"),
        ({"byte_order": "big"}, "'byte_order' is 'big'"),
        ({"dtype": "float32"}, "'dtype' is 'float32'"),
        ({"dtype": []}, "'dtype' is"),
        ({"num_tokens": -1}, "'num_tokens' is -1"),
        ({"num_tokens": 3.0}, "'num_tokens' is 3.0"),
        ({"num_documents": 4}, "'num_documents' is 4"),
        ({"num_documents": 0}, "'num_documents' is 0"),
        ({"vocab_size": None}, "'vocab_size' is None"),
        ({"fingerprint": "Z" * 64}, "'fingerprint' is 'ZZ"),
        ({"sha256": None}, "'sha256' is None"),
        ({"separator": 300}, "'separator' is 300"),
        ({"source": "stories"}, "'source' is 'stories'"),
        ({"num_tokens": 10**15}, "truncated"),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    path = write(tmp_path / "a.tokens", [[1, 2, 3]]).path
    edit_header(path)
    open_shard(path)  # the edit alone is harmless
    edit_header(path, **changes)
    with pytest.raises(ShardError, match=words):
        open_shard(path)


def test_verify_finds_a_flipped_bit_in_tokens_padding_and_index(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [[1, 2, 9]]).path
    data = path.read_bytes()
    for place in range(HEADER_BYTES, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ShardError, match="damaged: its header promises sha256"):
            open_shard(path).verify()


# --- .npy files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "u4", "i4", "i8", "u8"])
def test_npy_files_of_any_integers_are_read(tmp_path: Path, dtype: str) -> None:
    ids = [3, 9, 9, 4, 100, 9]
    np.save(tmp_path / "a.npy", np.array(ids, dtype=dtype))
    shard = open_shard(tmp_path / "a.npy", fingerprint=FINGERPRINT)  # it names no tokenizer, so any goes
    assert (shard.tokens.tolist(), shard.documents.tolist()) == (ids, [0])
    assert (shard.header.fingerprint, shard.header.vocab_size) == (None, None)
    shard.verify()
    assert open_shard(tmp_path / "a.npy", separator=9).documents.tolist() == document_starts(ids, 9)
    assert Concatenated(shard).rows(np.array([1, 2]), 4).tolist() == [[9, 9, 4, 100], [9, 4, 100, 9]]


@pytest.mark.parametrize(
    "array",
    [np.zeros(3), np.zeros((2, 2), dtype=np.int32), np.array(1), np.zeros(2, dtype=bool), np.array(["a"])],
    ids=["float", "two dimensions", "scalar", "bool", "text"],
)
def test_npy_files_of_anything_else_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ShardError, match="one-dimensional array of integers"):
        open_shard(tmp_path / "a.npy")


def test_npy_files_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, None], dtype=object), allow_pickle=True)
    with pytest.raises(ShardError, match="cannot be mapped"):
        open_shard(tmp_path / "a.npy")


def test_npy_files_cut_short_anywhere_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(20, dtype=np.uint16))
    whole = (tmp_path / "a.npy").read_bytes()
    for length in (*range(0, 130, 10), *range(130, len(whole), 3)):
        (tmp_path / "cut.npy").write_bytes(whole[:length])
        with pytest.raises(ShardError):
            open_shard(tmp_path / "cut.npy")


def test_an_npy_header_that_python_cannot_read_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(20, dtype=np.uint16))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes().replace(b"}", b"{"))
    with pytest.raises(ShardError, match="cannot be mapped"):
        open_shard(tmp_path / "a.npy")


@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_npy_ids_that_do_not_fit_a_batch_are_refused_when_read(tmp_path: Path, wrong: int) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, wrong]))
    shard = open_shard(tmp_path / "a.npy")
    with pytest.raises(ShardError, match="Ids are 0 to"):
        shard.verify()
    with pytest.raises(ShardError, match="Ids are 0 to"):
        Concatenated(shard).rows(np.array([1]), 2)


def test_a_separator_is_for_npy_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [[1, SEPARATOR, 2]]).path
    assert open_shard(path, separator=SEPARATOR).documents.tolist() == [0, 2]
    with pytest.raises(ShardError, match="end with id 9, as its header says; asked for 2"):
        open_shard(path, separator=2)


# --- several as one --------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), length=st.integers(1, 9))
def test_rows_of_several_shards_are_those_of_one(lengths: list[int], length: int) -> None:
    ids = np.arange(sum(lengths), dtype=np.uint16)
    header = ShardHeader(1, "uint16", 0, 1, 300, FINGERPRINT, None, None, {})
    tokens = Concatenated(
        [
            Shard(Path("none"), replace(header, num_tokens=part.size), part, np.zeros(1, dtype=np.uint64), None)
            for part in np.split(ids, np.cumsum(lengths)[:-1])
        ]
    )
    assert tokens.num_tokens == ids.size
    starts = np.arange(max(0, ids.size - length + 1))[::-1]
    assert tokens.rows(starts, length).tolist() == [list(range(s, s + length)) for s in starts]


def test_documents_of_several_shards_are_counted_through(tmp_path: Path) -> None:
    shards = [
        write(tmp_path / "a.tokens", [[1, 9, 2]]),
        write(tmp_path / "b.tokens", []),
        write(tmp_path / "c.tokens", [[9, 3]]),
    ]
    assert Concatenated(shards).documents().tolist() == [0, 2, 3, 4]  # a document ends with its shard


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": OTHER}, "the same fingerprint"),
        ({"vocab_size": 301}, "the same vocab_size: .* has 300, .* has 301"),
        ({"vocab_size": 2**17}, "the same dtype"),
    ],
)
def test_shards_that_differ_are_not_read_as_one(tmp_path: Path, changes: dict, words: str) -> None:
    shards = [write(tmp_path / "a.tokens", [[1]]), write(tmp_path / "b.tokens", [[1]], **changes)]
    with pytest.raises(ShardError, match=words):
        Concatenated(shards)


def test_no_shards_at_all_are_refused() -> None:
    with pytest.raises(ShardError, match="one or more shards; got none"):
        Concatenated([])


def test_a_damaged_index_is_refused_where_it_is_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [[1, 9, 1, 9, 1, 9]]).path
    data = path.read_bytes()
    path.write_bytes(data[:-8] + (2).to_bytes(8, "little"))
    with pytest.raises(ShardError, match="index is damaged"):
        Concatenated(open_shard(path)).documents()
