"""Files of every kind become the documents they hold; broken ones become errors that say where."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuselm.data.readers import CorpusError, MissingPackageError, read_documents, size_hint, split_documents, text_files

SEPARATOR = b"<|endoftext|>"


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".bz2": partial(bz2.compress, compresslevel=1),  # in blocks of 100 kB
    ".zst": zstd,
}


def documents(path: Path) -> list[bytes]:
    return list(read_documents(path))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def write_parquet(path: Path, columns: dict[str, Any], rows_in_group: int = 100) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path, row_group_size=rows_in_group)
    return path


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"one\ntwo\n", [b"one\ntwo\n"]),
        (b"one\n<|endoftext|>\ntwo", [b"one", b"two"]),
        (b"one<|endoftext|>two", [b"one", b"two"]),
        (b"one\n\n<|endoftext|>\n\ntwo\n", [b"one\n", b"\ntwo\n"]),
        (b"one\r\n<|endoftext|>\r\ntwo\r\n<|endoftext|>\r\n", [b"one", b"two"]),
        (b"<|endoftext|>\none\n<|endoftext|>\n\n<|endoftext|>  <|endoftext|>", [b"one"]),
        (b"<|endoftext|", [b"<|endoftext|"]),
        (b"\xff\xfe caf\xe9 \xf0\x9f", [b"\xff\xfe caf\xe9 \xf0\x9f"]),
        (b" \n\t\n", []),
        (b"", []),
    ],
)
def test_text_is_cut_at_separators_and_otherwise_as_it_stands(
    tmp_path: Path, text: bytes, expected: list[bytes]
) -> None:
    assert documents(write(tmp_path / "a.txt", text)) == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"<|", SEPARATOR, SEPARATOR[:7], SEPARATOR[7:]])), st.data())
def test_where_chunks_end_does_not_matter(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = list(split_documents([text]))
    assert list(split_documents(pieces)) == whole
    assert len(whole) == text.count(SEPARATOR) + 1


def test_documents_come_before_the_stream_ends() -> None:
    endless = cycle([b"one\n<|endof", b"text|>\ntwo", b"<|endoftext|>"])
    assert list(islice(split_documents(endless), 4)) == [b"one", b"two", b"one", b"two"]


def test_separators_are_found_across_the_chunks_of_a_large_file(tmp_path: Path) -> None:
    stories = [bytes([97 + index % 26]) * (300_000 + index) for index in range(12)]
    assert documents(write(tmp_path / "a.txt", b"\n<|endoftext|>\n".join(stories))) == stories


@pytest.mark.parametrize("name", ["a.md", "LICENSE", "code.py", "a.TXT"])
def test_any_file_that_is_text_is_read(tmp_path: Path, name: str) -> None:
    assert documents(write(tmp_path / name, b"some text")) == [b"some text"]


def test_binary_files_are_refused(tmp_path: Path) -> None:
    noise = bytes(random.Random(0).randbytes(4096))
    path = write(tmp_path / "train.tokens", b"fuselm tokens\n\0\0\0\0")
    with pytest.raises(CorpusError, match=r"train\.tokens holds binary data; name the folder of token files"):
        list(read_documents(path))
    with pytest.raises(CorpusError, match=r"UTF-8 text; .*picture\.bin holds binary data"):
        documents(write(tmp_path / "picture.bin", noise))
    with pytest.raises(CorpusError, match=r"train\.tokens holds binary data; name the folder of token files"):
        documents(write(tmp_path / "train.tokens", noise))
    with pytest.raises(CorpusError, match="binary"):
        documents(write(tmp_path / "nothing-but-controls", noise.replace(b"\0", b"\1")))
    with pytest.raises(CorpusError, match=r"binary data; convert UTF-16 with `iconv"):
        documents(write(tmp_path / "wide.txt", "wide".encode("utf-16")))


# --- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [*COMPRESSORS, ".GZ"])
def test_compressed_files_are_read_as_what_is_inside(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESSORS[suffix.lower()]
    assert documents(write(tmp_path / f"a.txt{suffix}", compress(b"one<|endoftext|>two"))) == [b"one", b"two"]
    assert documents(write(tmp_path / f"b.jsonl{suffix}", compress(b'{"text": "one"}\n'))) == [b"one"]
    assert documents(write(tmp_path / f"c{suffix}", compress(b""))) == []


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_may_have_several_members(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESSORS[suffix]
    joined = compress(b"one<|endof") + compress(b"") + compress(b"text|>two")
    assert documents(write(tmp_path / f"a.txt{suffix}", joined)) == [b"one", b"two"]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compressed_file_that_breaks_off_is_an_error(tmp_path: Path, suffix: str) -> None:
    text = bytes(random.Random(1).choices(b"abcdefgh \n", k=600_000))  # several blocks of most formats
    packed = COMPRESSORS[suffix](text)
    for share in (0.1, 0.5, 0.99):
        path = write(tmp_path / f"a.txt{suffix}", packed[: int(len(packed) * share)])
        with pytest.raises(CorpusError, match=r"a\.txt\.\w+ breaks off or is damaged after [\d,]+ unpacked") as caught:
            documents(path)
        count = int(str(caught.value).split(" unpacked")[0].rpartition(" ")[2].replace(",", ""))
        assert share * len(text) - 150_000 <= count < len(text)  # what is before the block that is not whole


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_damaged_compressed_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    packed = bytearray(COMPRESSORS[suffix](bytes(random.Random(2).randbytes(50)).hex().encode() * 3))
    packed[: len(packed) // 2] = b"?" * (len(packed) // 2)
    with pytest.raises(CorpusError, match="breaks off or is damaged after 0 unpacked bytes"):
        documents(write(tmp_path / f"a.txt{suffix}", bytes(packed)))


@pytest.mark.parametrize(("name", "package"), [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    suffix = name[name.rindex(".") :]
    with pytest.raises(MissingPackageError, match=rf"Reading {suffix} files needs {package}: `pip install {package}`"):
        documents(write(tmp_path / name, b"anything"))
    assert issubclass(MissingPackageError, ImportError)


# --- records ---------------------------------------------------------------------------------------------------------


def test_jsonl_gives_the_text_of_each_line(tmp_path: Path) -> None:
    texts = ["one\ntwo", "naïve 🦊", "a <|endoftext|> inside", "", "last"]
    lines = [json.dumps({"id": index, "text": text}) for index, text in enumerate(texts)]
    data = ("\ufeff" + "\r\n\n".join(lines)).encode()
    expected = [text.encode() for text in texts if text]
    assert documents(write(tmp_path / "a.jsonl", data)) == expected
    assert documents(write(tmp_path / "a.ndjson", data)) == expected


def test_jsonl_lines_may_be_longer_than_a_chunk(tmp_path: Path) -> None:
    texts = ["a" * 2_500_000, "b", "c" * 1_100_000]
    data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    assert documents(write(tmp_path / "a.jsonl", data)) == [text.encode() for text in texts]


def test_jsonl_keeps_bytes_and_halves_of_pairs_that_are_not_utf8(tmp_path: Path) -> None:
    data = b'{"text": "caf\xe9"}\n{"text": "\\ud83d!"}'
    assert documents(write(tmp_path / "a.jsonl", data)) == [b"caf\xe9", b"\xed\xa0\xbd!"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "cut o', r"not JSON \(Unterminated string"),
        (b'{"content": "x", "id": 1}', r'has the keys "content", "id"\.'),
        (b"{}", r"has the keys none\."),
        (b'["text"]', "is a JSON list"),
        (b'{"text": 5}', r'has the keys "text", and its "text" is a int'),
    ],
)
def test_a_wrong_line_of_jsonl_is_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(CorpusError, match=rf'a\.jsonl, line 3: .*"text" field.*{complaint}'):
        documents(path)


def test_parquet_gives_the_text_of_each_row(tmp_path: Path) -> None:
    texts = [f"Ünïcode {index}" if index % 7 else None for index in range(1000)]
    path = write_parquet(tmp_path / "a.parquet", {"id": list(range(1000)), "text": texts})
    assert documents(path) == [text.encode() for text in texts if text]


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"{index}" for index in range(2000)]}, rows_in_group=500)
    last = parquet.read_metadata(path).row_group(3).column(0)
    data = bytearray(path.read_bytes())
    start = last.dictionary_page_offset
    data[start : start + last.total_compressed_size] = b"\xff" * last.total_compressed_size
    stream = read_documents(write(path, bytes(data)))
    assert [next(stream) for _ in range(1000)] == [f"{index}".encode() for index in range(1000)]
    with pytest.raises(CorpusError, match="not a whole"):
        list(stream)


def test_a_wrong_parquet_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r'other\.parquet: .* has a "text" column; this one has "story", "id"'):
        documents(write_parquet(tmp_path / "other.parquet", {"story": ["x"], "id": [1]}))
    with pytest.raises(CorpusError, match=r'numbers\.parquet: the "text" column holds strings; .* int64'):
        documents(write_parquet(tmp_path / "numbers.parquet", {"text": [1]}))
    whole = write_parquet(tmp_path / "whole.parquet", {"text": ["x" * 100] * 100}).read_bytes()
    with pytest.raises(CorpusError, match=r"cut\.parquet is not a whole \.parquet file"):
        documents(write(tmp_path / "cut.parquet", whole[:-20]))
    with pytest.raises(CorpusError, match=r"unpack .*x\.parquet\.gz first"):
        documents(write(tmp_path / "x.parquet.gz", gzip.compress(whole)))


# --- folders ---------------------------------------------------------------------------------------------------------


def test_folders_give_what_is_text_in_order_of_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.jsonl", "a.py", ".hidden.txt", ".git/config", "zipped.txt.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, gzip.compress(b"text") if name.endswith(".gz") else b"text")
    write(tmp_path / "picture.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    write(tmp_path / "archive.tar.gz", gzip.compress(b"name" + bytes(600)))
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    found = [path.relative_to(tmp_path).as_posix() for path in text_files(tmp_path)]
    assert found == ["a.py", "a/b/c.jsonl", "a/z.md", "b.txt", "zipped.txt.gz"]


def test_only_plain_files_have_a_size_beforehand(tmp_path: Path) -> None:
    assert size_hint(write(tmp_path / "a.txt", b"12345")) == 5
    assert size_hint(write(tmp_path / "a.txt.gz", gzip.compress(b"12345"))) is None
    assert size_hint(write(tmp_path / "a.parquet", b"")) is None


def test_what_fuselm_writes_into_a_folder_is_not_read_from_it(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("a note")
    for name in ("tokenizer.json", "prepared.json"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in text_files(tmp_path)] == ["note.txt"]
