"""Downloads from real servers on loopback: whole, interrupted, resumed, wrong, absent."""

from __future__ import annotations

import hashlib
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fuselm.data import download
from fuselm.data.download import DownloadError, fetch

CONTENT = random.Random(0).randbytes(1_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Behaviour:
    """How the server answers, and what it was asked."""

    content: bytes = CONTENT
    etag: str | None = '"one"'
    ranges: bool = True
    lengths: bool = True
    break_after: list[int] = field(default_factory=list)  # bytes sent by the first answers, which then break off
    statuses: list[int] = field(default_factory=list)  # codes of the first answers
    redirect: str | None = None
    requests: list[tuple[str | None, str | None]] = field(default_factory=list)  # Range, If-Range


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def do_GET(self) -> None:
        behaviour = self.behaviour
        behaviour.requests.append((self.headers["Range"], self.headers["If-Range"]))
        if behaviour.redirect:
            return self.answer(302, {"Location": behaviour.redirect})
        if behaviour.statuses:
            return self.answer(behaviour.statuses.pop(0), {})
        start, total = self.start(), len(behaviour.content)
        if start >= total > 0:
            return self.answer(416, {"Content-Range": f"bytes */{total}"})
        headers = {"ETag": behaviour.etag} if behaviour.etag else {}
        if behaviour.lengths:
            headers["Content-Length"] = str(total - start)
        if start:
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        limit = behaviour.break_after.pop(0) if behaviour.break_after else total
        self.answer(206 if start else 200, headers, behaviour.content[start : start + limit])

    def start(self) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        another = self.headers["If-Range"] not in (None, self.behaviour.etag)
        return int(match[1]) if match and self.behaviour.ranges and not another else 0

    def answer(self, code: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    handler = type("Bound", (Handler,), {"behaviour": behaviour})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/file.txt"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _no_waiting_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRY_DELAYS", (0.0, 0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "corpora" / "name" / "file.txt"


def leftovers(path: Path) -> list[str]:
    """What is beside the file, other than the lock and the note that it was verified."""
    notes = {path.name, f".{path.name}.lock", f".{path.name}.verified"}
    return sorted(other.name for other in path.parent.iterdir() if other.name not in notes)


def interrupt_after(count: int) -> download.Progress:
    def on_progress(done: int, total: int | None) -> None:
        if done >= count:
            raise KeyboardInterrupt

    return on_progress


def interrupted(url: str, path: Path, sha256: str | None = SHA256) -> int:
    """Press Ctrl-C in the middle of a download; how much has arrived."""
    with pytest.raises(KeyboardInterrupt):
        fetch(url, path, sha256=sha256, on_progress=interrupt_after(300_000))
    assert not path.exists()
    return path.with_name("file.txt.part").stat().st_size


# --- a good day ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [True, False])
def test_a_download_is_whole_and_reports_its_progress(path: Path, lengths: bool) -> None:
    seen: list[tuple[int, int | None]] = []
    with serving(Behaviour(lengths=lengths)) as url:
        result = fetch(url, path, sha256=SHA256, size=len(CONTENT), on_progress=lambda *step: seen.append(step))
    assert result == path
    assert path.read_bytes() == CONTENT
    assert leftovers(path) == []
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert (seen[0][0], seen[-1][0]) == (0, len(CONTENT))
    assert {total for _, total in seen} == {len(CONTENT) if lengths else None}


def test_a_file_that_is_there_is_not_asked_for_again(path: Path) -> None:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        fetch(url, path, sha256=SHA256)
        fetch(url, path, sha256=SHA256)
    assert len(behaviour.requests) == 1
    fetch(url, path, sha256=SHA256)  # and not when the server is gone


def test_two_at_once_download_once(path: Path) -> None:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        threads = [threading.Thread(target=fetch, args=(url, path), kwargs={"sha256": SHA256}) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(behaviour.requests) == 1
    assert path.read_bytes() == CONTENT


def test_redirects_are_followed_but_never_out_of_https(path: Path) -> None:
    with serving(Behaviour()) as target, serving(Behaviour(redirect=target)) as url:
        fetch(url, path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    with (
        serving(Behaviour(redirect="http://example.org/file.txt")) as url,
        pytest.raises(DownloadError, match=r"over https .*; got http://example\.org/file\.txt"),
    ):
        fetch(url, path.with_name("other.txt"))
    with pytest.raises(DownloadError, match="over https"):
        fetch("ftp://127.0.0.1/file.txt", path.with_name("other.txt"))


# --- interruptions ---------------------------------------------------------------------------------------------------


def test_after_ctrl_c_the_rest_is_fetched(path: Path) -> None:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        have = interrupted(url, path)
        fetch(url, path, sha256=SHA256)
    assert 0 < have < len(CONTENT)
    assert behaviour.requests == [(None, None), (f"bytes={have}-", '"one"')]
    assert path.read_bytes() == CONTENT
    assert leftovers(path) == []


def test_a_connection_that_breaks_off_is_taken_up_again_as_long_as_it_gets_on(path: Path) -> None:
    behaviour = Behaviour(break_after=[100_000] * 6)  # more often than there are retries without any progress
    with serving(behaviour) as url:
        fetch(url, path, sha256=SHA256)
    assert path.read_bytes() == CONTENT
    assert [wanted for wanted, _ in behaviour.requests] == [None, *(f"bytes={n}00000-" for n in range(1, 7))]


def test_a_server_that_ignores_ranges_is_read_from_the_beginning(path: Path) -> None:
    behaviour = Behaviour(ranges=False, break_after=[300_000])
    with serving(behaviour) as url:
        fetch(url, path, sha256=SHA256)
    assert behaviour.requests[1][0] == "bytes=300000-"
    assert path.read_bytes() == CONTENT


def test_a_server_that_always_breaks_off_at_the_same_place_is_given_up(path: Path) -> None:
    behaviour = Behaviour(ranges=False, break_after=[300_000] * 100)
    with (
        serving(behaviour) as url,
        pytest.raises(DownloadError, match=r"broke off after 300,000 of 1,000,000 bytes\. Try again"),
    ):
        fetch(url, path, sha256=SHA256)
    assert len(behaviour.requests) == 1 + 3
    assert leftovers(path) == ["file.txt.part", "file.txt.part.version"]


def test_another_version_on_the_server_is_not_joined_to_the_old_part(path: Path) -> None:
    other = random.Random(1).randbytes(900_000)
    with serving(behaviour := Behaviour()) as url:
        interrupted(url, path, sha256=None)
        behaviour.content, behaviour.etag = other, '"two"'
        fetch(url, path)
    assert path.read_bytes() == other


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_version_or_a_checksum_nothing_is_resumed(path: Path, etag: str | None) -> None:
    with serving(behaviour := Behaviour(etag=etag)) as url:
        interrupted(url, path, sha256=None)
        fetch(url, path)
    assert behaviour.requests == [(None, None), (None, None)]
    assert path.read_bytes() == CONTENT


def test_with_a_checksum_a_part_of_unknown_version_is_resumed(path: Path) -> None:
    with serving(behaviour := Behaviour(etag=None)) as url:
        have = interrupted(url, path)
        fetch(url, path, sha256=SHA256)
    assert behaviour.requests[1] == (f"bytes={have}-", None)
    assert path.read_bytes() == CONTENT


def test_a_part_that_turns_out_wrong_costs_one_more_download(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.with_name("file.txt.part").write_bytes(b"?" * 1000)
    with serving(behaviour := Behaviour()) as url:
        fetch(url, path, sha256=SHA256)
    assert [wanted for wanted, _ in behaviour.requests] == ["bytes=1000-", None]
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(("part", "requests"), [(CONTENT, 1), (CONTENT + b"more", 2)], ids=["whole", "too long"])
def test_a_part_with_nothing_after_it_is_whole_or_thrown_away(path: Path, part: bytes, requests: int) -> None:
    path.parent.mkdir(parents=True)
    path.with_name("file.txt.part").write_bytes(part)
    with serving(behaviour := Behaviour()) as url:
        fetch(url, path, sha256=SHA256)
    assert len(behaviour.requests) == requests
    assert path.read_bytes() == CONTENT


def test_a_part_of_the_full_size_needs_no_server(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.with_name("file.txt.part").write_bytes(CONTENT)
    fetch("http://127.0.0.1:9/file.txt", path, sha256=SHA256, size=len(CONTENT))
    assert path.read_bytes() == CONTENT


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again(path: Path) -> None:
    with serving(behaviour := Behaviour(statuses=[503, 429, 500])) as url:
        fetch(url, path, sha256=SHA256)
    assert len(behaviour.requests) == 4
    assert path.read_bytes() == CONTENT


def test_a_missing_file_is_not_asked_for_again(path: Path) -> None:
    behaviour = Behaviour(statuses=[404] * 9)
    with serving(behaviour) as url, pytest.raises(DownloadError, match=r"answers 404 .*put it at .*file\.txt"):
        fetch(url, path)
    assert len(behaviour.requests) == 1


def test_wrong_bytes_are_removed_and_both_sums_named(path: Path) -> None:
    wrong = bytes(len(CONTENT))
    with serving(Behaviour(content=wrong)) as url, pytest.raises(DownloadError) as caught:
        fetch(url, path, sha256=SHA256, size=len(CONTENT))
    message = str(caught.value)
    assert hashlib.sha256(wrong).hexdigest() in message
    assert SHA256 in message
    assert not path.exists()
    assert leftovers(path) == []


def test_a_file_of_another_length_is_refused_before_it_is_downloaded(path: Path) -> None:
    seen: list[int] = []
    with (
        serving(Behaviour(content=CONTENT[:500])) as url,
        pytest.raises(DownloadError, match="is 500 bytes long and should be 1,000,000"),
    ):
        fetch(url, path, size=len(CONTENT), on_progress=lambda done, total: seen.append(done))
    assert seen == []


def test_a_check_of_the_caller_refuses_a_file(path: Path) -> None:
    def check(candidate: Path) -> None:
        if b"a page about an error" in candidate.read_bytes():
            raise ValueError("It is a page.")

    with (
        serving(behaviour := Behaviour(content=b"a page about an error")) as url,
        pytest.raises(DownloadError, match=r"not the file that is wanted: It is a page\. It was removed"),
    ):
        fetch(url, path, check=check)
    assert leftovers(path) == []
    with serving(behaviour) as url:
        behaviour.content = b"the text"
        assert fetch(url, path, check=check).read_bytes() == b"the text"


def test_a_full_disk_is_no_reason_to_try_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_copy", full)
    with serving(behaviour := Behaviour()) as url, pytest.raises(OSError, match="No space left"):
        fetch(url, path)
    assert len(behaviour.requests) == 1


def test_offline_the_error_says_where_to_put_the_file(path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file.txt"
        with pytest.raises(DownloadError) as caught:
            fetch(url, path, sha256=SHA256, size=len(CONTENT))
    message = str(caught.value)
    assert all(part in message for part in (url, str(path.absolute()), SHA256, "1,000,000 bytes", "no connection"))
    path.write_bytes(CONTENT)
    assert fetch(url, path, sha256=SHA256, size=len(CONTENT)) == path


def test_a_file_put_there_by_hand_is_verified_and_kept(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something else")
    url = "https://example.invalid/file.txt"
    with pytest.raises(
        DownloadError, match=r"file\.txt is not the file from https.* its sha256 is [0-9a-f]{64} instead"
    ):
        fetch(url, path, sha256=SHA256)
    assert path.read_bytes() == b"something else"
    path.write_bytes(CONTENT)
    fetch(url, path, sha256=SHA256)
    path.write_bytes(CONTENT[::-1])  # verified once is not verified for ever
    with pytest.raises(DownloadError, match="its sha256 is"):
        fetch(url, path, sha256=SHA256)
