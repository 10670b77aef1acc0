"""What a name or a path gives: documents, in splits that are disjoint, complete and fixed."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuselm.data import download
from fuselm.data.corpora import (
    SEPARATOR,
    SPECS,
    Corpus,
    CorpusError,
    CorpusSpec,
    RemoteFile,
    corpus_names,
    open_corpus,
    open_spec,
    strip_gutenberg,
)
from fuselm.data.download import DownloadError

BOOK = "\r\n".join(
    [
        "\ufeffThe Project Gutenberg eBook of A Small Book",
        "Release date: today",
        "*** START OF THE PROJECT GUTENBERG EBOOK A SMALL BOOK ***",
        "",
        "  A Small Book",
        "",
        *(f"“Line {number}” of the book." for number in range(100)),
        "",
        "End of the Project Gutenberg EBook of A Small Book, by Nobody",
        "*** END OF THE PROJECT GUTENBERG EBOOK A SMALL BOOK ***",
        "*** START: FULL LICENSE ***",
        "Terms of use.",
    ]
).encode()
BODY = "\n".join(["A Small Book", "", *(f"“Line {number}” of the book." for number in range(100))]).encode()


def numbered(count: int) -> list[bytes]:
    return [f"story number {index}".encode() for index in range(count)]


def write(path: Path, documents: list[bytes]) -> Path:
    path.write_bytes(f"\n{SEPARATOR}\n".encode().join(documents))
    return path


def both(corpus: Corpus) -> tuple[list[bytes], list[bytes]]:
    return list(corpus.documents("train")), list(corpus.documents("valid"))


# --- splits of local text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, 21, 40, 99, 1000])
def test_of_many_documents_every_twentieth_is_for_validation(tmp_path: Path, count: int) -> None:
    documents = numbered(count)
    train, valid = both(open_corpus(write(tmp_path / "a.txt", documents)))
    assert valid == documents[19::20]
    assert train == [document for index, document in enumerate(documents) if index % 20 != 19]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda text: text.strip()), min_size=1, max_size=19))
def test_of_few_documents_the_last_tenth_of_the_text_is_for_validation(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        corpus = open_corpus(path)
        whole = "".join(texts).encode()
        train = b"".join(corpus.source.documents("train"))
        valid = b"".join(corpus.source.documents("valid"))
    assert train + valid == whole
    assert 0 <= len(train) - max(1, int(0.9 * len(whole))) <= 3  # no character is cut in two
    train.decode()
    valid.decode()


def test_one_text_is_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("0123456789" * 10)
    train, valid = both(open_corpus(tmp_path / "book.txt"))
    assert train == [b"0123456789" * 9]
    assert valid == [b"0123456789"]


def test_a_split_by_position_cuts_one_document_and_leaves_the_others_whole(tmp_path: Path) -> None:
    train, valid = both(open_corpus(write(tmp_path / "a.txt", [b"a" * 50, b"b" * 45, b"c" * 5])))
    assert train == [b"a" * 50, b"b" * 40]
    assert valid == [b"b" * 5, b"c" * 5]


def test_bytes_that_are_not_utf8_are_kept_and_split(tmp_path: Path) -> None:
    text = b"x" + b"\x9f" * 99
    (tmp_path / "a.txt").write_bytes(text)
    train, valid = both(open_corpus(tmp_path / "a.txt"))
    assert b"".join(train + valid) == text
    assert valid


def test_each_call_starts_from_the_first_document(tmp_path: Path) -> None:
    corpus = open_corpus(write(tmp_path / "a.txt", numbered(100)))
    begun = corpus.documents("train")
    assert list(islice(begun, 3)) == numbered(3)
    assert next(corpus.documents("train")) == b"story number 0"
    assert next(begun) == b"story number 3"


def test_a_text_too_small_for_validation_is_still_there_for_training(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é")
    corpus = open_corpus(tmp_path / "a.txt")
    assert list(corpus.documents("train")) == ["é".encode()]
    with pytest.raises(CorpusError, match=r"a\.txt is too small: its part for validation has no text\. Add text, or"):
        corpus.documents("valid")


def test_there_is_no_third_split(tmp_path: Path) -> None:
    corpus = open_corpus(write(tmp_path / "a.txt", numbered(3)))
    with pytest.raises(ValueError, match="one of train, valid; got 'test'"):
        corpus.documents("test")
    with pytest.raises(ValueError, match="one of train, valid; got 'test'"):
        corpus.bytes_hint("test")


# --- folders and files -----------------------------------------------------------------------------------------------


def test_a_folder_is_its_files_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "two.txt", numbered(60)[30:])
    write(tmp_path / "a.txt", numbered(30))
    (tmp_path / ".notes.txt").write_text("hidden")
    (tmp_path / "c.bin").write_bytes(bytes(100))
    train, valid = both(open_corpus(tmp_path))
    assert valid == [b"story number 19", b"story number 39", b"story number 59"]
    assert sorted(train + valid) == sorted(numbered(60))


@pytest.mark.parametrize("valid_name", ["valid.jsonl", "validation.txt.gz", "validation-00000-of-00001.txt"])
def test_a_folder_that_comes_split_stays_so(tmp_path: Path, valid_name: str) -> None:
    write(tmp_path / "train.txt", numbered(40))
    contents = b'{"text": "held out"}' if valid_name.endswith("jsonl") else b"held out"
    (tmp_path / valid_name).write_bytes(gzip.compress(contents) if valid_name.endswith("gz") else contents)
    (tmp_path / "README.md").write_text("not a part of it")
    train, valid = both(open_corpus(tmp_path))
    assert train == numbered(40)
    assert valid == [b"held out"]


def test_a_folder_with_train_alone_is_split_like_any_other(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", numbered(40))
    (tmp_path / "valid.bin").write_bytes(bytes(100))
    assert list(open_corpus(tmp_path).documents("valid")) == numbered(40)[19::20]


def test_nothing_to_read_is_an_error_when_the_corpus_is_opened(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"has no text: below it are no files, or only hidden and binary ones"):
        open_corpus(tmp_path)
    blank = tmp_path / "blank.txt"
    blank.write_text(f" \n{SEPARATOR}\n\n")
    with pytest.raises(CorpusError, match=r"blank\.txt has no text: it is empty or blank"):
        open_corpus(blank)
    with pytest.raises(CorpusError, match="has no text: its files are empty or blank"):
        open_corpus(tmp_path)
    write(tmp_path / "train.txt", numbered(2))
    (tmp_path / "valid.txt").write_text("")
    with pytest.raises(CorpusError, match=r"has no text for valid: valid\.txt is empty or blank"):
        open_corpus(tmp_path)


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"'~no one/hen' is neither"):
        open_corpus("~no one/hen")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match=r"a file or a folder; .*pipe is neither\. Save the text"):
        open_corpus(tmp_path / "pipe")


def test_a_compressed_file_that_breaks_off_ends_in_an_error(tmp_path: Path) -> None:
    packed = gzip.compress(write(tmp_path / "a.txt", numbered(5000)).read_bytes())
    (tmp_path / "b.txt.gz").write_bytes(packed[: len(packed) // 2])
    documents = open_corpus(tmp_path / "b.txt.gz").documents("train")
    with pytest.raises(CorpusError, match=r"b\.txt\.gz breaks off"):
        list(documents)


def test_a_name_that_is_no_corpus_and_no_path_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(
        CorpusError, match=r"stories, tinyshakespeare, wizard-of-oz, tinystories, or the path.*'nowhere'"
    ):
        open_corpus("nowhere")
    with pytest.raises(CorpusError, match=r"or the path of a file or folder with text; .*missing\.txt"):
        open_corpus(tmp_path / "missing.txt")
    assert corpus_names() == ("stories", "little-stories", "tinyshakespeare", "wizard-of-oz", "tinystories")


# --- limits and descriptions -----------------------------------------------------------------------------------------


def test_a_limit_gives_whole_documents_that_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", [b"x" * 10] * 40)
    corpus = open_corpus(path, limit_bytes=35)
    assert both(corpus) == ([b"x" * 10] * 3, [b"x" * 10] * 2)
    assert corpus.bytes_hint("train") == 35
    assert "at most 35 bytes" in corpus.describe()


def test_a_limit_leaves_the_split_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", numbered(100))
    _, valid = both(open_corpus(path, limit_bytes=40))
    assert valid == [b"story number 19", b"story number 39"]


def test_a_limit_cuts_a_single_long_text_between_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 100)
    assert list(open_corpus(tmp_path / "a.txt", limit_bytes=7).documents("train")) == ["ééé".encode()]


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_is_positive(limit: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, or None for no limit; got {limit}"):
        open_corpus("stories", limit_bytes=limit)


def test_hints_are_near_what_is_there(tmp_path: Path) -> None:
    corpus = open_corpus(write(tmp_path / "a.txt", [b"x" * 1000] * 200))
    for split in ("train", "valid"):
        assert corpus.bytes_hint(split) == pytest.approx(sum(map(len, corpus.documents(split))), rel=0.02)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"text of unknown length"))
    assert open_corpus(tmp_path / "b.txt.gz").bytes_hint("train") is None


def test_descriptions_say_how_a_corpus_is_split(tmp_path: Path) -> None:
    many, few = write(tmp_path / "many.txt", numbered(25)), write(tmp_path / "few.txt", numbered(1))
    assert open_corpus(many).describe() == f"{many}: 1 file, 20 documents or more, every 20th for validation"
    assert open_corpus(few).describe() == f"{few}: 1 file, 1 document, the last tenth of the text for validation"
    assert open_corpus(few).separator == "<|endoftext|>"
    assert "validation file of its own" in open_corpus("tinystories").describe()


# --- stories ---------------------------------------------------------------------------------------------------------


def test_stories_are_endless_and_so_have_limits() -> None:
    corpus = open_corpus("stories")
    assert (corpus.bytes_hint("train"), corpus.bytes_hint("valid")) == (20_000_000, 1_000_000)
    short = open_corpus("stories", limit_bytes=20_000)
    train, valid = both(short)
    assert 15_000 < sum(map(len, train)) <= 20_000
    assert 15_000 < sum(map(len, valid)) <= 20_000
    assert not set(train) & set(valid)
    longer = open_corpus("stories", limit_bytes=2_000_000)
    assert (longer.bytes_hint("train"), longer.bytes_hint("valid")) == (2_000_000, 100_000)


def test_little_stories_are_stories_of_fewer_words() -> None:
    def words(documents: list[bytes]) -> set[bytes]:
        return {word for document in documents for word in document.split()}

    little, full = (both(open_corpus(name, limit_bytes=200_000)) for name in ("little-stories", "stories"))
    assert 3 * len(words(little[0])) < len(words(full[0]))
    assert not set(little[0]) & set(little[1])


def test_stories_follow_their_seed() -> None:
    first, again, other = (both(open_corpus("stories", seed=seed, limit_bytes=5000))[0] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_path_that_has_the_name_of_a_corpus_is_still_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories").write_text("my own " * 10)
    assert b"my own" in next(open_corpus("./stories").documents("train"))
    assert b"my own" in next(open_corpus(Path("stories")).documents("train"))


# --- downloads -------------------------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the URL it is served at; downloads go to a cache of their own and do not wait between attempts."""
    monkeypatch.setenv("FUSELM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "RETRY_DELAYS", (0.0,))
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def remote(folder: Path, url: str, name: str, content: bytes) -> RemoteFile:
    (folder / name).write_bytes(content)
    return RemoteFile(f"{url}/{name}", len(content), hashlib.sha256(content).hexdigest())


def test_a_downloaded_text_is_split_by_position(served: tuple[Path, str], tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    spec = CorpusSpec("plays", "plays", remote(*served, "input.txt", b"0123456789" * 10))
    corpus = open_spec(spec, on_progress=lambda *step: seen.append(step))
    assert seen == []  # nothing is fetched before it is asked for
    assert both(corpus) == ([b"0123456789" * 9], [b"0123456789"])
    assert seen[-1] == (100, 100)
    assert (corpus.bytes_hint("train"), corpus.bytes_hint("valid")) == (90, 10)
    assert (tmp_path / "cache" / "corpora" / "plays" / "input.txt").exists()


def test_a_corpus_with_a_validation_file_fetches_only_what_is_asked_for(
    served: tuple[Path, str], tmp_path: Path
) -> None:
    separated = f"\n{SEPARATOR}\n".encode()
    train = remote(*served, "big-train.txt", separated.join(numbered(50)))
    valid = remote(*served, "big-valid.txt", separated.join([b"held", b"out"]))
    corpus = open_spec(CorpusSpec("big", "many stories", train, valid))
    assert list(corpus.documents("valid")) == [b"held", b"out"]
    folder = tmp_path / "cache" / "corpora" / "big"
    assert not (folder / "big-train.txt").exists()
    assert list(corpus.documents("train")) == numbered(50)
    assert corpus.bytes_hint("train") == train.size


def test_offline_the_error_names_the_place_in_the_cache_and_a_file_put_there_is_used(
    served: tuple[Path, str], tmp_path: Path
) -> None:
    folder, url = served
    file = remote(folder, url, "input.txt", b"text " * 20)
    (folder / "input.txt").unlink()
    corpus = open_spec(CorpusSpec("plays", "plays", file))
    with pytest.raises(DownloadError) as caught:
        corpus.documents("train")
    place = tmp_path / "cache" / "corpora" / "plays" / "input.txt"
    assert all(part in str(caught.value) for part in (file.url, f"put it at {place}", str(file.sha256)))
    place.write_bytes(b"text " * 20)
    assert b"".join(chain(*both(corpus))) == b"text " * 20


def test_the_named_corpora_are_pinned_where_they_can_be() -> None:
    for spec in SPECS.values():
        for file in filter(None, (spec.train, spec.valid)):
            assert file.url.startswith("https://")
            sums = [sum_ for sum_ in (file.sha256, spec.clean_sha256) if sum_]
            assert [len(bytes.fromhex(sum_)) for sum_ in sums] == [32]
    assert len({spec.path(spec.train) for spec in SPECS.values()}) == len(SPECS)


# --- books -----------------------------------------------------------------------------------------------------------


def test_a_gutenberg_text_is_the_book_alone() -> None:
    assert strip_gutenberg(BOOK, "A Small Book") == BODY
    older = BOOK.replace(b"OF THE PROJECT", b"OF THIS PROJECT").removeprefix(b"\xef\xbb\xbf").replace(b"\r", b"")
    assert strip_gutenberg(older, "a small book") == BODY


@pytest.mark.parametrize("cut", [b"*** START OF", b"*** END OF"])
def test_a_text_without_both_lines_of_gutenberg_is_refused(cut: bytes) -> None:
    with pytest.raises(CorpusError, match="this one lacks them"):
        strip_gutenberg(BOOK.replace(cut, b"***"), "A Small Book")
    with pytest.raises(CorpusError, match=r"It is not Another Book but \*\*\* START OF THE .* A SMALL BOOK"):
        strip_gutenberg(BOOK, "Another Book")


def gutenberg_spec(file: RemoteFile, clean_sha256: str) -> CorpusSpec:
    clean = partial(strip_gutenberg, title="A Small Book")
    return CorpusSpec("small-book", "A Small Book", RemoteFile(file.url), clean=clean, clean_sha256=clean_sha256)


def test_a_downloaded_book_is_stripped_and_its_edition_recognised(served: tuple[Path, str]) -> None:
    file = remote(*served, "pg1.txt", BOOK)
    corpus = open_spec(gutenberg_spec(file, hashlib.sha256(BODY).hexdigest()))
    train, valid = both(corpus)
    assert train[0] + valid[0] == BODY
    assert "edition" not in corpus.describe()
    other = open_spec(gutenberg_spec(file, "0" * 64))
    assert f"an edition of its own (sha256 {hashlib.sha256(BODY).hexdigest()[:16]}…)" in other.describe()


def test_a_page_in_place_of_a_book_is_not_kept(served: tuple[Path, str], tmp_path: Path) -> None:
    corpus = open_spec(gutenberg_spec(remote(*served, "pg1.txt", b"<html>Are you a robot?</html>"), "0" * 64))
    with pytest.raises(DownloadError, match="not the file that is wanted: A Project Gutenberg text has lines"):
        corpus.documents("train")
    assert not list((tmp_path / "cache" / "corpora" / "small-book").glob("pg1*"))
