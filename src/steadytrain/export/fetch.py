"""Fetch images from addresses that a client names: only from an allow-list, and not from private addresses by accident.

An address is fetched if it begins with one of the server's prefixes: the same scheme, host and port, and the prefix's
path or what lies below it. Redirects are followed within the list. The host's name is resolved once, and the
connection goes to the resolved address: where that is not a public one (this machine, a private network, a cloud's
metadata service), the image is refused unless private addresses are allowed. Proxies are not used.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import h11

from steadytrain.errors import InputError

REDIRECTS = 3
_CHUNK = 2**16
_MOVED = (301, 302, 303, 307, 308)


class FetchError(Exception):
    """An image cannot be fetched; the message says why, for the client."""


class Origin(NamedTuple):
    """Scheme, host and port of an address."""

    scheme: str
    host: str
    port: int


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
    url: str, prefixes: Sequence[str], *, max_bytes: int, seconds: float, allow_private: bool = False
) -> bytes:
    """Read an image.

    Args:
        url: where it is.
        prefixes: the allow-list.
        max_bytes: of the image; no more is read.
        seconds: for all of it, redirects included.
        allow_private: also from addresses that are not public.

    Raises:
        FetchError: not in the list, too large, too slow, or no such image.
    """
    try:
        async with asyncio.timeout(seconds):
            for _ in range(REDIRECTS + 1):
                if not is_allowed(url, prefixes):
                    raise FetchError(f"{url} is not in this server's list of addresses (--allow-url)")
                response, content = await _get(url, max_bytes, allow_private)
                if response.status_code == 200:
                    return content
                place = next((value for name, value in response.headers if name == b"location"), None)
                if response.status_code not in _MOVED or place is None:
                    raise FetchError(f"{url} answers with status {response.status_code}")
                url = urljoin(url, place.decode("latin-1"))
    except TimeoutError:
        raise FetchError(f"{url} takes longer than {seconds:g} s") from None
    except (OSError, h11.ProtocolError, ValueError) as error:
        raise FetchError(f"{url} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    raise FetchError(f"{url} is redirected more than {REDIRECTS} times")


async def _get(url: str, max_bytes: int, allow_private: bool) -> tuple[h11.Response, bytes]:
    """Ask for an address; return the response and, of status 200, its content. Raises FetchError and kin of OSError."""
    parts = urlsplit(url)
    origin = _origin(parts)
    address = await _resolve(origin, allow_private)
    tls = {"ssl": _tls(), "server_hostname": origin.host} if origin.scheme == "https" else {}
    reader, writer = await asyncio.open_connection(address, origin.port, **tls)  # type: ignore[arg-type]
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = [("host", parts.netloc), ("accept", "image/*"), ("connection", "close")]
        connection, response, content = h11.Connection(h11.CLIENT), None, bytearray()
        writer.write(connection.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, h11.Response):
                response = event
                if response.status_code != 200:
                    return response, b""
            elif isinstance(event, h11.Data):
                content += event.data
                if len(content) > max_bytes:
                    raise FetchError(f"{url} has more than {max_bytes:,} bytes (--max-bytes)")
        assert response is not None
        return response, bytes(content)
    finally:
        writer.close()


@functools.cache
def _tls() -> ssl.SSLContext:
    """Read this machine's certificates, once: it takes long enough for other requests to notice."""
    return ssl.create_default_context()


async def _resolve(origin: Origin, allow_private: bool) -> str:
    """Look up an address of a host that may be used. Raises FetchError, OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    addresses = [str(info[4][0]) for info in infos]
    usable = [address for address in addresses if allow_private or _is_public(address)]
    if not usable:
        raise FetchError(
            f"{origin.host} is at {addresses[0]}, an address inside a network, which is not allowed (--allow-private)"
        )
    return usable[0]


def _origin(parts: SplitResult) -> Origin:
    """Return what an address connects to. Raises ValueError."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError
    return Origin(parts.scheme, parts.hostname.rstrip("."), parts.port or (443 if parts.scheme == "https" else 80))


def _is_plain(parts: SplitResult) -> bool:
    """Return whether an address has no user's name and no path that a server might read as another one."""
    path = unquote(unquote(parts.path))
    is_odd = "\\" in path or not path.isprintable() or ".." in path.split("/") or not parts.path.isascii()
    return "@" not in parts.netloc and not is_odd


def _is_public(address: str) -> bool:
    """Return whether an address is a public one.

    >>> [_is_public(text) for text in ("93.184.215.14", "10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "::1")]
    [True, False, False, False, False]
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = parsed if mapped is None else mapped
    return parsed.is_global and not parsed.is_multicast
