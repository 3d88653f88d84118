"""Fetch images from addresses that a client names: only from an allow-list, and not from private addresses by accident.

An address is fetched if it begins with one of the server's prefixes: the same scheme, host and port, and the prefix's
path or what lies below it. Redirects are followed within the list. The host's name is resolved once, and the
connection goes to the resolved address: where that is not a public one (this machine, a private network, a cloud's
metadata service), the image is refused unless private addresses are allowed. Proxies are not used.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from urllib.parse import SplitResult, unquote, urlsplit

from steadytrain.errors import InputError
from steadytrain.machine.web import Origin, PrivateAddressError, RefusedError, client, origin_of

REDIRECTS = 3


class FetchError(Exception):
    """An image cannot be fetched; the message says why, for the client."""


def parse_prefix(text: str) -> str:
    """Check an entry of the allow-list, such as ``https://images.example.com/photos``.

    Raises:
        InputError: no http or https address of a host.
    """
    try:
        parts = urlsplit(text)
        _origin(parts)
    except ValueError:
        raise InputError(
            f"--allow-url is {text!r}; it must be an address such as https://images.example.com/photos"
        ) from None
    if parts.query or parts.fragment or not _is_plain(parts):
        raise InputError(f"--allow-url is {text!r}; it must end with a path, without ?, #, .. or a user's name")
    return text


def is_allowed(url: str, prefixes: Sequence[str]) -> bool:
    """Return whether an address begins with one of the prefixes, compared part by part.

    >>> is_allowed("https://a.org/photos/1.jpg", ["https://a.org/photos"])
    True
    >>> is_allowed("https://a.org/photos2/1.jpg", ["https://a.org/photos"])
    False
    >>> is_allowed("https://a.org@b.org/photos/1.jpg", ["https://a.org/"])
    False
    """
    try:
        parts = urlsplit(url)
        origin = _origin(parts)
    except ValueError:
        return False
    if not _is_plain(parts):
        return False
    for prefix in map(urlsplit, prefixes):
        folder = prefix.path.rstrip("/") + "/"
        if origin == _origin(prefix) and f"{parts.path}/".startswith(folder):
            return True
    return False


async def fetch(
    url: str,
    prefixes: Sequence[str],
    *,
    max_bytes: int,
    seconds: float,
    allow_private: bool = False,
    threads: Executor | None = None,
) -> bytes:
    """Read an image.

    Args:
        url: where it is.
        prefixes: the allow-list.
        max_bytes: of the image; no more is read.
        seconds: for all of it, redirects included.
        allow_private: also from addresses that are not public.
        threads: one of them reads; None: the event loop's own.

    Raises:
        FetchError: not in the list, too large, too slow, or no such image.
    """

    def check(address: str) -> None:
        if not is_allowed(address, prefixes):
            raise FetchError(f"{address} is not in this server's list of addresses (--allow-url)")

    check(url)
    connections = _Connections()
    trusted = None if allow_private else frozenset[Origin]()
    opener = client(
        trusted=trusted,
        on_redirect=check,
        max_redirects=REDIRECTS,
        uses_proxies=False,
        connections=connections,
        certificates=_certificates(),
    )
    try:
        async with asyncio.timeout(seconds):
            get = functools.partial(_get, url, opener, connections, max_bytes=max_bytes, seconds=seconds)
            return await asyncio.get_running_loop().run_in_executor(threads, get)
    except TimeoutError:
        raise FetchError(f"{url} takes longer than {seconds:g} s") from None
    except PrivateAddressError as error:
        raise FetchError(
            f"{error.host} is at {error.address}, an address inside a network, which is not allowed (--allow-private)"
        ) from None
    except RefusedError:
        raise FetchError(f"{url} is redirected more than {REDIRECTS} times") from None
    except urllib.error.HTTPError as error:
        with error:
            raise FetchError(f"{error.url} answers with status {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise FetchError(f"{url} cannot be read: {getattr(reason, 'strerror', None) or reason}") from None
    finally:
        connections.end()  # a thread may still read from one, or only now make one


class _Connections(list[socket.socket]):
    """The connections of a fetch: once it is over, one that a thread makes late ends at once."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False
        self._lock = threading.Lock()  # the number of one that was closed may be another's already

    def append(self, connection: socket.socket) -> None:
        """Add a connection."""
        with self._lock:
            super().append(connection)
        if self._is_over:
            self.end()

    def end(self) -> None:
        """End those that there are, and those to come: a thread that waits for one goes on, and closes it."""
        self._is_over = True
        with self._lock:
            for connection in self:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all, also those of answers that nobody has closed."""
        with self._lock:
            for connection in self:
                if (number := connection.detach()) >= 0:
                    socket.close(number)


_certificates = functools.cache(ssl.create_default_context)  # reading them takes long enough for others to notice


def _get(
    url: str, opener: urllib.request.OpenerDirector, connections: _Connections, *, max_bytes: int, seconds: float
) -> bytes:
    """Ask for an address; return its content."""
    request = urllib.request.Request(url, headers={"Accept": "image/*"})
    try:
        with opener.open(request, timeout=seconds) as response:
            if response.status != 200:
                raise FetchError(f"{url} answers with status {response.status}")
            content: bytes = response.read(max_bytes + 1)
    finally:
        connections.close()
    if len(content) > max_bytes:
        raise FetchError(f"{url} has more than {max_bytes:,} bytes (--max-bytes)")
    return content


def _origin(parts: SplitResult) -> tuple[str, Origin]:
    """Return the scheme of an address, and what it connects to. Raises ValueError."""
    origin = origin_of(parts.geturl())
    if parts.scheme not in ("http", "https") or origin is None:
        raise ValueError
    return parts.scheme, origin


def _is_plain(parts: SplitResult) -> bool:
    """Return whether an address has no user's name and no path that a server might read as another one."""
    path = unquote(unquote(parts.path))
    is_odd = "\\" in path or not path.isprintable() or ".." in path.split("/") or not parts.path.isascii()
    return "@" not in parts.netloc and not is_odd
