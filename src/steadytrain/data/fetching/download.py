"""One file over HTTPS, whole and right or not at all: resumed, checked, from the first of several places that has it.

What came of a file lies in ``NAME.part``, and what its server said of it (RFC 9110: ETag, Last-Modified) in
``NAME.part.json``: another start asks for the rest, on the condition that the file is still the same. The checksum of
the whole decides in the end.

No address is followed blindly (:mod:`steadytrain.machine.web`): a server in a private network is spoken to only if the
user named it as a mirror.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import json
import os
import random
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any

from steadytrain import __version__
from steadytrain.errors import FailedError, InputError, StorageError, storage_errors
from steadytrain.files import create, read_table, replace_file
from steadytrain.format import Say, clean, count, duration, size
from steadytrain.machine.web import Origin, RefusedError, check_redirect, client, is_inner, origin_of, split_url

CHUNK_BYTES = 1 << 18
MAX_REDIRECTS = 5
SPARE_BYTES = 16 << 20  # bytes that a file may be longer than it is said to be, besides half of that
LONGEST_WAIT = 600.0  # seconds that a server may ask to wait before it is given up
SLOW_BYTES, SLOW_SECONDS = 1024.0, 60.0
"""A connection that brings fewer bytes a second for so long is closed, and opened again."""
TIMEOUT_SECONDS, MOST_ATTEMPTS = 30.0, 5  # seconds of silence, and attempts in a row that bring nothing
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts, which double
_MAX_DIGITS = 18
"""The most digits of a number of bytes that a server states; Python refuses to read one of 4,300."""

OnBytes = Callable[[int], object]
"""Called with the bytes of the file that are there."""


@dataclass(frozen=True, kw_only=True)
class WebFile:
    """A file on the web: its ``name`` here, the ``urls`` that have it, and what it must be.

    ``md5``, ``sha256``: in hexadecimal, empty where they are not known. ``bytes``: about how many, 0 if not known.
    """

    name: str
    urls: tuple[str, ...]
    md5: str = ""
    sha256: str = ""
    bytes: int = 0


class _TryAgainError(Exception):
    """A fault that may pass: ``seconds`` to wait, where the server says."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


def mirror_urls(mirrors: Iterable[str], name: str) -> tuple[str, ...]:
    """Return where mirrors have a file.

    Raises:
        InputError: an address that is none, holds a password, or is plain http outside of this machine's networks.

    >>> mirror_urls(["https://example.org/data/"], "a b.tgz")
    ('https://example.org/data/a%20b.tgz',)
    """
    return tuple(f"{_checked_mirror(mirror).rstrip('/')}/{urllib.parse.quote(name)}" for mirror in mirrors)


def _checked_mirror(mirror: str) -> str:
    parts = split_url(mirror)
    if parts is None or parts.scheme not in ("https", "http") or not parts.hostname:
        raise InputError(f"--mirror {mirror} is no web address: give one such as https://mirror.example.org/datasets")
    if "@" in parts.netloc:
        raise InputError(f"--mirror {clean(mirror)} holds a user or a password, which are not sent: leave them out")
    if parts.scheme == "http" and not is_inner(mirror):
        raise InputError(f"--mirror {mirror} is plain http across the internet: give an https address")
    return mirror


def download(
    file: WebFile,
    folder: Path,
    *,
    mirrors: Iterable[str] = (),
    progress: OnBytes = lambda _: None,
    say: Say = lambda _: None,
    room_bytes: int = 0,
) -> Path:
    """Fetch a file into a folder, or find it there, and return its path; go on where an earlier call was killed.

    Args:
        mirrors: addresses of folders that have the file, tried before its own.
        progress: called with the bytes that are there.
        room_bytes: of the disk, that have to be free besides those of the file.

    Raises:
        InputError: a mirror that is no address.
        FailedError: no place has the right file; what came of it stays, to go on from.
        StorageError: no room, or the folder cannot be written.
    """
    target, mirrors = folder / file.name, tuple(mirrors)
    urls = (*mirror_urls(mirrors, file.name), *file.urls)
    trusted = frozenset(origin for mirror in mirrors if (origin := origin_of(mirror)) is not None)
    with storage_errors(target):
        if target.exists():
            if not (wrong := _wrong(target, file)):
                progress(target.stat().st_size)
                return target
            say(f"{target} is not what it should be ({wrong}): it is fetched again")
            target.unlink()
        part = folder / f"{file.name}.part"
        needed = file.bytes - (part.stat().st_size if part.exists() else 0) + room_bytes
        if needed > (free := shutil.disk_usage(folder).free):
            raise StorageError(
                f"{folder} has {size(free)} free, and {file.name} with what is made of it takes {size(needed)}: free"
                " some room, or choose a folder on another disk with -o"
            )
        reasons = []
        for url in urls:
            try:
                _fetch_from(url, file, target, trusted, progress, say)
                return target
            except RefusedError as error:
                reasons.append(f"{url}: {error}")
                if url != urls[-1]:
                    say(f"{url}: {error}; the next place is tried")
    raise FailedError(
        f"{file.name} could not be fetched ({'; '.join(reasons)}): run the same command again, which resumes where this"
        f" ended, or put the file into {folder} yourself, or give --mirror URL"
    )


def _fetch_from(url: str, file: WebFile, target: Path, trusted: frozenset[Origin], progress: OnBytes, say: Say) -> None:
    """Fetch a file from one place, in as many attempts as bring something; RefusedError where it cannot be had."""
    opener = client(trusted=trusted, on_redirect=partial(check_redirect, trusted=trusted), max_redirects=MAX_REDIRECTS)
    part, notes = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    failures, is_whole, is_second = 0, True, False
    for left in (part, notes):
        if left.is_symlink():  # not ours: what is fetched would be written where it leads
            left.unlink()
    while True:
        before = part.stat().st_size if part.exists() else 0
        is_whole &= not before
        try:
            _receive(opener, url, file, part, notes, progress)
        except _TryAgainError as error:
            come = part.stat().st_size if part.exists() else 0
            failures = 1 if come > before else failures + 1
            if failures >= MOST_ATTEMPTS:
                raise RefusedError(f"{error}, {count(failures, 'time')} in a row") from error
            wait = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1))
            wait *= random.uniform(0.5, 1.0)  # many clients must not come back at once
            if error.seconds is not None:
                if error.seconds > LONGEST_WAIT:
                    raise RefusedError(f"{error}, and asks to wait {duration(error.seconds)}") from error
                wait = max(wait, error.seconds)
            say(f"{url}: {error}; going on in {duration(wait)}" if wait >= 1 else f"{url}: {error}; going on")
            time.sleep(wait)
            continue
        wrong = _wrong(part, file)
        if not wrong:
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(target)
            notes.unlink(missing_ok=True)
            return
        part.unlink()
        notes.unlink(missing_ok=True)
        if is_whole or is_second:
            raise RefusedError(f"it has other bytes than it should ({wrong})")
        # Pieces of several files may have come together: once more, from the beginning.
        say(f"{url}: what came in pieces has other bytes than it should; fetching it again from the beginning")
        is_whole = is_second = True


def _receive(
    opener: urllib.request.OpenerDirector, url: str, file: WebFile, part: Path, notes: Path, progress: OnBytes
) -> None:
    """Receive the rest of a file, or all of it where the server gives no parts or has another file by now."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": f"steadytrain/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator := _validator(notes, url):
            headers["If-Range"] = validator
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:  # there is no rest, or the file is shorter by now
                if str(error.headers.get("Content-Range", "")).rpartition("/")[2] == str(have):
                    return
                part.unlink()
                raise _TryAgainError("it has no rest of this file: from the beginning", 0.0) from error
            if error.code in (408, 425, 429) or error.code >= 500:
                raise _TryAgainError(f"HTTP {error.code}", _retry_after(error.headers)) from error
            raise RefusedError(f"HTTP {error.code} {error.reason}") from error
    except (http.client.HTTPException, OSError) as error:
        raise _passing(error) from error
    with response:
        start, length = _span(response, have)
        total: int | None = None if length is None else start + length
        most = file.bytes + file.bytes // 2 + SPARE_BYTES if file.bytes else None
        if most is not None and (total or 0) > most:
            raise RefusedError(f"it has {size(total or 0)}, and not about {size(file.bytes)}")
        if not start:
            headers = {name: response.headers.get(name, "") for name in ("ETag", "Last-Modified")}
            marks = {"url": url, "etag": headers["ETag"], "modified": headers["Last-Modified"]}
            replace_file(notes, json.dumps(marks))  # they tell whether the file there is still the same
        come = _write(response, part, start, most, progress)
        if total is not None and come < total:
            raise _TryAgainError(f"the connection ended after {size(come)} of {size(total)}")


def _write(response: http.client.HTTPResponse, part: Path, start: int, most: int | None, progress: OnBytes) -> int:
    """Write what comes behind the first ``start`` bytes, and return how many there are then."""
    come = start
    with part.open("r+b") if start else create(part) as out:
        out.seek(start)
        out.truncate()
        progress(come)
        slow_since, slow_from = time.monotonic(), come
        while True:
            try:
                data = response.read1(CHUNK_BYTES)
            except (http.client.HTTPException, OSError) as error:
                out.flush()
                raise _passing(error) from error
            if not data:
                return come
            out.write(data)
            come += len(data)
            progress(come)
            if most is not None and come > most:
                raise RefusedError(f"it sends more than {size(most)}")
            now = time.monotonic()
            if now - slow_since >= SLOW_SECONDS:
                if (come - slow_from) / (now - slow_since) < SLOW_BYTES:
                    raise _TryAgainError(f"fewer than {size(SLOW_BYTES)} a second for {duration(SLOW_SECONDS)}")
                slow_since, slow_from = now, come


def _span(response: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """Return where the content of a response begins in the file, and its length (None: not said)."""
    length = str(response.headers.get("Content-Length", ""))
    if response.status != 206:
        return 0, int(length) if length.isdecimal() and len(length) <= _MAX_DIGITS else None
    unit, _, span = str(response.headers.get("Content-Range", "")).partition(" ")
    first, _, last = span.partition("/")[0].partition("-")
    is_readable = all(end.isdecimal() and len(end) <= _MAX_DIGITS for end in (first, last))
    if unit.lower() != "bytes" or not is_readable or int(first) != have:
        raise RefusedError(f"it answers with another part ({span[:60] or 'none'}) than was asked for")
    return have, int(last) + 1 - have


def _validator(notes: Path, url: str) -> str:
    """Return what a part of this place's file is asked for on the condition of; empty where nothing can be.

    A weak ETag is none for a part (RFC 9110, 13.1.5).
    """
    if (document := read_table(notes)).get("url") != url:
        return ""
    etag, modified = str(document.get("etag", "")), str(document.get("modified", ""))
    return etag if etag and not etag.startswith("W/") else modified


def _retry_after(headers: Message) -> float | None:
    """Return the seconds that a server asks to wait, of either form that the header has; None where it does not."""
    text = str(headers.get("Retry-After", "")).strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time()) if text else None
    except (TypeError, ValueError, OverflowError):
        return None


def _passing(error: BaseException) -> Exception:
    """Return the error for a fault of the connection; it may pass, unless it is a refusal or about a certificate."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, RefusedError):
        return reason
    if isinstance(reason, ssl.SSLCertVerificationError):
        return RefusedError(f"its certificate cannot be trusted ({reason.verify_message})")
    if isinstance(reason, TimeoutError):
        return _TryAgainError("it does not answer")
    return _TryAgainError(f"the connection failed ({reason})")


def _wrong(path: Path, file: WebFile) -> str:
    """Return the checksum by which a file differs; empty if it is right."""
    expected = {name: value for name in ("md5", "sha256") if (value := getattr(file, name))}
    digests: dict[str, Any] = {name: hashlib.new(name, usedforsecurity=False) for name in expected}
    with path.open("rb") as stream:
        while data := stream.read(1 << 20):
            for digest in digests.values():
                digest.update(data)
    for name, value in expected.items():
        if digests[name].hexdigest() != value:
            return f"{name} {digests[name].hexdigest()}, not {value}"
    return ""
