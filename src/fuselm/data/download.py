"""Downloads that can be interrupted: one file from one URL, whole and verified or not there.

Bytes go to `<name>.part`, and the next run (or the next attempt) asks the server for the rest. When all of them are
there they are verified, and the file takes its name in one step. Two processes that want the same file download it
once. A file that was put in place by hand is verified in the same way and used. What the bytes mean is not known here:
`check` may look at them and refuse. Standard library only.

    path = fetch(url, cache_dir() / "corpora" / "input.txt", sha256="86c4…", size=1115394, on_progress=bar.update)

What failed in passing (a broken connection, a timeout, a busy server) is tried again after each of RETRY_DELAYS
seconds, and from the beginning of that list whenever an attempt got further than all before. Ctrl-C leaves the `.part`
for the next run.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fuselm.files import locked, write_whole

RETRY_DELAYS = (1.0, 2.0, 4.0)  # seconds
TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 18
BUSY = {408, 425, 429, 500, 502, 503, 504}  # answers that may be another one in a moment

Progress = Callable[[int, int | None], None]  # bytes there, bytes in all where the server says
Check = Callable[[Path], None]  # raises ValueError for a file that is not the one that is wanted


class DownloadError(OSError):
    """A file that could not be had: the sentence says why, and where to put it by hand."""


class _PassingError(Exception):
    """What may go better next time."""


@dataclass(frozen=True)
class _Wanted:
    """One download: from where, to where, and how the file is known as the right one."""

    url: str
    path: Path
    sha256: str | None
    size: int | None
    check: Check | None

    @property
    def part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part")

    @property
    def validator(self) -> Path:
        """The server's name for the version that the part is of; a part of another version must not be continued."""
        return self.path.with_name(f"{self.path.name}.part.version")

    @property
    def stamp(self) -> Path:
        """Says which file was verified, so that a large one is not read again at every use."""
        return self.path.with_name(f".{self.path.name}.verified")

    def forget_part(self) -> None:
        self.part.unlink(missing_ok=True)
        self.validator.unlink(missing_ok=True)

    def remedy(self) -> str:
        known = [f"{self.size:,} bytes"] if self.size is not None else []
        known += [f"sha256 {self.sha256}"] if self.sha256 else []
        described = f" ({', '.join(known)})" if known else ""
        return f"fetch it by other means and put it at {self.path.absolute()}{described}"


def fetch(
    url: str,
    path: Path,
    *,
    sha256: str | None = None,
    size: int | None = None,
    check: Check | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """`path`, downloaded from `url` first when it is not there; verified in either case."""
    _require_secure(url)
    wanted = _Wanted(url, path, sha256, size, check)
    if _is_there(wanted):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with locked(lock, f"fuselm: another process is downloading {path.name}; waiting for it"):
        if not _is_there(wanted):  # the one that this one waited for may have brought it
            _download(wanted, on_progress)
            _note_verified(wanted)
    return path


def _is_there(wanted: _Wanted) -> bool:
    """Whether there is a file in place and it is the right one; a wrong one is an error, for it may be the user's."""
    if not wanted.path.exists():
        return False
    if not _was_verified(wanted):
        if problem := _problem(wanted, wanted.path):
            raise DownloadError(
                f"{wanted.path.absolute()} is not the file from {wanted.url}: {problem}. Remove it, or "
                f"{wanted.remedy()}."
            )
        with suppress(OSError):  # a folder that only others may write to: verified at every use, then
            _note_verified(wanted)
    return True


def _download(wanted: _Wanted, on_progress: Progress | None) -> None:
    resumed = wanted.part.exists()
    _transfer(wanted, on_progress)
    problem = _problem(wanted, wanted.part)
    if problem and resumed:  # the old part may be of other bytes: once more, all of it
        wanted.forget_part()
        _transfer(wanted, on_progress)
        problem = _problem(wanted, wanted.part)
    if problem:
        wanted.forget_part()
        raise DownloadError(
            f"What {wanted.url} gives is not the file that is wanted: {problem}. It was removed; try again later, or "
            f"{wanted.remedy()}."
        )
    with wanted.part.open("rb") as file:
        os.fsync(file.fileno())  # the rename must not reach the disk before the bytes
    wanted.part.replace(wanted.path)
    wanted.forget_part()


# --- is it the right file? -------------------------------------------------------------------------------------------


def _problem(wanted: _Wanted, path: Path) -> str:
    """Why a file is not the one that is wanted; empty when it is."""
    size = path.stat().st_size
    if wanted.size is not None and size != wanted.size:
        return f"it has {size:,} bytes instead of {wanted.size:,}"
    if wanted.sha256 is not None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != wanted.sha256:
            return f"its sha256 is {digest} instead of {wanted.sha256}"
    try:
        if wanted.check:
            wanted.check(path)
    except ValueError as error:
        return str(error).rstrip(".")
    return ""


def _was_verified(wanted: _Wanted) -> bool:
    try:
        return wanted.stamp.read_text() == _stamp_of(wanted)
    except OSError:
        return False


def _note_verified(wanted: _Wanted) -> None:
    write_whole(wanted.stamp, _stamp_of(wanted))


def _stamp_of(wanted: _Wanted) -> str:
    state = wanted.path.stat()
    return f"{wanted.url} {wanted.sha256} {wanted.size} verified of {state.st_size} bytes, {state.st_mtime_ns}\n"


# --- the bytes -------------------------------------------------------------------------------------------------------


def _transfer(wanted: _Wanted, on_progress: Progress | None) -> None:
    """Get every byte into the part, in as many attempts as it takes."""
    furthest, delays = _size(wanted.part), iter(RETRY_DELAYS)
    while True:
        try:
            return _attempt(wanted, on_progress or (lambda done, total: None))
        except _PassingError as error:
            if _size(wanted.part) > furthest:  # a server that always starts over does not count as getting on
                furthest, delays = _size(wanted.part), iter(RETRY_DELAYS)
            delay = next(delays, None)
            if delay is None:
                raise DownloadError(
                    f"Could not download {wanted.url}: {error}. Try again (what has arrived is kept), or "
                    f"{wanted.remedy()}."
                ) from error
            time.sleep(delay)


def _attempt(wanted: _Wanted, on_progress: Progress) -> None:
    """One request: the rest of the part, or all of it."""
    have = _resumable(wanted)
    if have and have == wanted.size:
        return  # it broke off between the last byte and the rename
    response = _open(wanted, have)
    if response is None:
        return
    with response:
        start = have if _continues_at(response, have) else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        if wanted.size is not None and total is not None and total != wanted.size:
            raise DownloadError(
                f"{wanted.url} is {total:,} bytes long and should be {wanted.size:,}: it is another file now, or a "
                f"page about an error. Try again later, or {wanted.remedy()}."
            )
        if not start:
            wanted.forget_part()
            write_whole(wanted.validator, _version(response))
        with wanted.part.open("ab") as part:
            done = _copy(response, part, start, total, on_progress)
    if total is not None and done != total:
        raise _PassingError(f"the connection broke off after {done:,} of {total:,} bytes")


def _resumable(wanted: _Wanted) -> int:
    """How many bytes of the part can be kept: none that are too many, or that nothing would ever prove right."""
    have = _size(wanted.part)
    too_many = wanted.size is not None and have > wanted.size
    return 0 if too_many or not (wanted.sha256 or _saved_version(wanted)) else have


def _open(wanted: _Wanted, have: int) -> Any:
    """The server's answer; None when it has nothing after what is there already."""
    headers = {"User-Agent": "fuselm", "Accept-Encoding": "identity"}  # identity: a range is of the bytes we store
    if have:
        headers["Range"] = f"bytes={have}-"
        if version := _saved_version(wanted):
            headers["If-Range"] = version  # another version by now: the server sends all of it
    opener = urllib.request.build_opener(_SecureRedirects)
    try:
        return opener.open(urllib.request.Request(wanted.url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            return _refused(wanted, have, error)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise DownloadError(
                f"Could not download {wanted.url}: the server's certificate is not trusted here ({error.reason}). "
                f"Install the certificates that this machine lacks, or {wanted.remedy()}."
            ) from error
        raise _PassingError(f"no connection ({error.reason})") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _PassingError(f"no answer ({error})") from error


def _refused(wanted: _Wanted, have: int, error: urllib.error.HTTPError) -> None:
    """Returns only when the refusal means that the part is whole."""
    if error.code == 416:
        if have and error.headers.get("Content-Range", "").replace(" ", "") == f"bytes*/{have}":
            return
        wanted.forget_part()
        raise _PassingError("what had arrived does not fit the server's file, and was thrown away") from error
    if error.code in BUSY:
        raise _PassingError(f"the server answers {error.code} {error.reason}") from error
    raise DownloadError(
        f"Could not download {wanted.url}: the server answers {error.code} {error.reason}. If that lasts, "
        f"{wanted.remedy()}."
    ) from error


def _continues_at(response: Any, have: int) -> bool:
    """Whether an answer carries on where the part ends; a server may ignore the wish and send everything."""
    if response.status != 206:
        return False
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if not match or int(match[1]) != have:
        raise DownloadError(
            f"A server that was asked for the bytes from {have} on sent {response.headers.get('Content-Range')!r}: "
            "it cannot be downloaded from in parts."
        )
    return have > 0


def _copy(response: Any, part: IO[bytes], done: int, total: int | None, on_progress: Progress) -> int:
    on_progress(done, total)
    while chunk := _read(response, done):
        part.write(chunk)
        done += len(chunk)
        on_progress(done, total)
    return done


def _read(response: Any, done: int) -> bytes:
    # Errors of the network are caught here, apart from those of the disk: a full disk is not worth another attempt.
    try:
        return bytes(response.read1(CHUNK))  # read1: what arrived before a break is kept
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise _PassingError(
            f"the connection broke off after {done:,} bytes ({error or type(error).__name__})"
        ) from error


def _version(response: Any) -> str:
    """What If-Range takes: a strong ETag or a date; empty when the server gives neither."""
    tag = response.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", "")


def _saved_version(wanted: _Wanted) -> str:
    try:
        return wanted.validator.read_text()
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# --- https -----------------------------------------------------------------------------------------------------------


def _require_secure(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        raise DownloadError(f"Downloads go over https (plain http to this machine alone); got {url}.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects as usual, but none that would leave https."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _require_secure(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
