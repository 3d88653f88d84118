"""The one HTTP client, which speaks to checked addresses alone.

A host's name is looked up once, and the connection goes to an address that was checked: a server in a private network,
on this machine or at a cloud's metadata address is refused unless it is trusted. Each redirect is asked about.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from functools import cache
from multiprocessing.connection import wait
from typing import IO, Any

Origin = tuple[str, int]
"""A host, in lower case, and its port."""
_NAT64, _GLOBAL_UNICAST = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("2000::/3")
_DOCUMENTATION, _PROTOCOLS = ipaddress.ip_network("3fff::/20"), ipaddress.ip_network("192.0.0.0/24")
"""Releases of Python before 3.13 (and some of 3.11 and 3.12) know only parts of these as not global."""
_AZURE = ipaddress.ip_address("168.63.129.16")  # answers every machine there about itself
_PLAIN_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]*)?", re.ASCII | re.IGNORECASE)
_INNER_ENDINGS = ["arpa", "corp", "home", "internal", "intranet", "lan", "local", "localdomain", "localhost", "private"]
"""Set aside for private networks (RFC 6761, 6762, 8375, ICANN): a proxy might look them up there."""


class RefusedError(ValueError):
    """An address that is not spoken to, or an answer that is not taken; the message says why."""


class PrivateAddressError(RefusedError):
    """An address that is not of the internet: the ``host`` whose it is, and the ``address``."""

    def __init__(self, host: str, address: str) -> None:
        super().__init__(f"{host} is at {address}, an address that is not of the internet: refused")
        self.host, self.address = host, address


def split_url(url: str) -> urllib.parse.SplitResult | None:
    """Return the parts of an address; None where it is none."""
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def origin_of(url: str) -> Origin | None:
    """Return what an address connects to; None where it is none.

    >>> origin_of("https://Example.org./a")
    ('example.org', 443)
    """
    parts = split_url(url)
    if parts is None or not parts.hostname:
        return None
    return parts.hostname.rstrip("."), parts.port or (443 if parts.scheme == "https" else 80)


def is_public(address: str) -> bool:
    """Return whether an IP address is of the internet: not private, of this machine, of a link, nor reserved.

    An IPv6 address that stands for one of IPv4 is what that is: mapped, by NAT64 (RFC 6052) or 6to4 (RFC 3056). Of the
    others only global unicast counts, 2000::/3, without what is set aside for documents (RFC 9637).

    >>> [is_public(a) for a in ("93.184.215.14", "10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1")]
    [True, False, False, False, False, False]
    >>> [is_public(a) for a in ("64:ff9b::5db8:d70e", "64:ff9b::a00:1", "2002:7f00:1::", "fec0::1", "::7f00:1")]
    [True, False, False, False, False]
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        inner = ip.ipv4_mapped or ip.sixtofour or translated
        if inner is None and (ip not in _GLOBAL_UNICAST or ip in _DOCUMENTATION):
            return False
        ip = inner or ip
    return ip.is_global and not ip.is_multicast and ip not in _PROTOCOLS and ip != _AZURE


def is_inner(url: str, *, looks_up: bool = True) -> bool:
    """Return whether a web address leads to this machine, its network or a cloud's metadata, or cannot be judged.

    A host counts whose name has such an address or none, or is not in plain letters: clients disagree on what others
    mean. The first answer for a name counts as long as this process lives. ``looks_up``: unless a proxy does that.

    >>> is_inner("http://169.254.169.254/a.rec"), is_inner("http://localhost/a"), is_inner("s3://bucket/a.rec")
    (True, True, False)
    >>> is_inner("http://2852039166/a"), is_inner("http://[::ffff:10.0.0.1]/a"), is_inner("http://8.8.8.8/a.rec")
    (True, True, False)
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in ("http", "https"):
        return False
    plain = _PLAIN_HOST.fullmatch(rest.partition("/")[0])
    if plain is None:
        return True
    host = plain[1].strip("[]").rstrip(".").lower()
    try:
        return not is_public(host)
    except ValueError:  # a name; one of numbers alone is an address in disguise
        labels = host.split(".")
    if len(labels) == 1 or labels[-1] in _INNER_ENDINGS or re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        return True
    is_proxied = scheme.lower() in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    try:
        return looks_up and not is_proxied and _has_inner_address(host)
    except (OSError, UnicodeError):
        return True


@cache
def _has_inner_address(host: str) -> bool:
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return not all(is_public(str(address[0])) for *_, address in addresses)


def check_redirect(url: str, *, trusted: frozenset[Origin] | None = frozenset(), schemes: str = "https") -> None:
    """Raise RefusedError for a redirect by another scheme, or into a network; not to what is trusted, None: all."""
    parts, origin = split_url(url), origin_of(url)
    if parts is None or origin is None or parts.scheme not in ("http", "https"):
        raise RefusedError(f"it redirects to {url[:200]!r}, which is no web address")
    if trusted is None or origin in trusted:
        return
    if parts.scheme not in schemes.split():
        raise RefusedError(f"it redirects to {url[:200]}, which is not https: refused")
    if is_inner(url, looks_up=False):  # a name is looked up when it is connected to
        raise RefusedError(f"it redirects to {url[:200]}, an address that is not of the internet: refused")


def proxies() -> frozenset[Origin]:
    """Return the proxies that this machine is set up with: they may be in its own network."""
    origins = (origin_of(url) for url in urllib.request.getproxies().values() if "://" in url)
    return frozenset(origin for origin in origins if origin is not None)


def client(
    *,
    trusted: frozenset[Origin] | None = frozenset(),
    on_redirect: Callable[[str], object],
    max_redirects: int = 5,
    uses_proxies: bool = True,
    connections: list[socket.socket] | None = None,
    certificates: ssl.SSLContext | None = None,
    kept: threading.local | None = None,
) -> urllib.request.OpenerDirector:
    """Return what opens addresses, by ``open(url, timeout=...)``.

    Opening raises RefusedError, ``urllib.error.HTTPError`` for an answer other than 2xx, and kin of OSError and
    ``http.client.HTTPException``.

    Args:
        trusted: hosts and ports whose addresses may be private; None: all.
        on_redirect: called with each address that an answer redirects to; raises to refuse it.
        max_redirects: so many are followed.
        uses_proxies: speak to the proxies that the environment names; they are trusted.
        connections: gets every connection as soon as it is begun, for another thread to shut down.
        certificates: those to trust; None: read this machine's.
        kept: where threads keep their connections for more requests; None: they are closed.
    """
    if trusted is not None and uses_proxies:
        trusted |= proxies()
    handlers: list[urllib.request.BaseHandler] = [] if uses_proxies else [urllib.request.ProxyHandler({})]
    handler = _Handler(trusted, connections, certificates or ssl.create_default_context())
    handler.kept = kept
    return urllib.request.build_opener(*handlers, handler, _Redirects(on_redirect, max_redirects))


class _Connection(http.client.HTTPConnection):
    """Connects to checked addresses alone."""

    trusted: frozenset[Origin] | None = frozenset()
    connections: list[socket.socket] | None = None
    kept: list[tuple[socket.socket, http.client.HTTPResponse]] | None = None  # to the same server, with the last answer

    def connect(self) -> None:
        while self.kept:
            self.sock, last = self.kept.pop()
            if last.isclosed() and last.length == 0 and not wait([self.sock], 0):  # read to its end, and not hung up
                return
            self.sock.close()
        self.sock = self._connected()
        if getattr(self, "_tunnel_host", None):
            self._tunnel()  # type: ignore[attr-defined]

    def _connected(self) -> socket.socket:
        """Connect to a checked address of the host. Raises OSError, or RefusedError where none may be used."""
        refused, failure = "", OSError(f"no address of {self.host}")
        may_be_private = self.trusted is None or (self.host.lower().rstrip("."), self.port) in self.trusted
        for family, kind, protocol, _, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            if not may_be_private and not is_public(str(address[0])):
                refused = refused or str(address[0])
                continue
            sock = socket.socket(family, kind, protocol)
            if self.connections is not None:
                self.connections.append(sock)
            try:
                sock.settimeout(self.timeout)
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
                continue
            return sock
        if refused:
            raise PrivateAddressError(self.host, refused)
        raise failure

    def request(self, *words: Any, **options: Any) -> None:
        words[3]["Connection"] = "close" if self.kept is None else "keep-alive"  # of the headers
        super().request(*words, **options)

    def getresponse(self) -> http.client.HTTPResponse:
        response = super().getresponse()
        if self.kept is not None and not response.will_close:
            self.kept[:], self.sock = [(self.sock, response)], None  # urllib would close it
        return response


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """Adds TLS to the connection that :class:`_Connection` makes."""

    def connect(self) -> None:
        _Connection.connect(self)
        if isinstance(self.sock, ssl.SSLSocket):
            return  # that was kept
        context: ssl.SSLContext = self._context  # type: ignore[attr-defined]
        name = getattr(self, "_tunnel_host", None) or self.host
        self.sock = context.wrap_socket(self.sock, server_hostname=name, do_handshake_on_connect=False)
        if self.connections is not None:
            self.connections.append(self.sock)
        self.sock.do_handshake()  # which another thread can end


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens addresses by connections that check where they go."""

    kept: threading.local | None = None

    def __init__(
        self, trusted: frozenset[Origin] | None, connections: list[socket.socket] | None, certificates: ssl.SSLContext
    ) -> None:
        super().__init__()
        self._trusted, self._connections, self._certificates = trusted, connections, certificates

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        if "@" in request.host:
            raise RefusedError("it holds a user or a password, which are not sent: leave them out")
        return super().http_request(request)

    https_request = http_request

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._opened_by(_Connection, req), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._opened_by(_TlsConnection, req), req, context=self._certificates)

    def _opened_by(self, kind: type[_Connection], req: Any) -> Callable[..., http.client.HTTPConnection]:
        def open_connection(host: str, /, **options: Any) -> http.client.HTTPConnection:
            connection = kind(host, **options)
            connection.trusted, connection.connections = self._trusted, self._connections
            if self.kept is not None and not req._tunnel_host:  # which leads elsewhere
                connection.kept = vars(self.kept).setdefault(f"{kind.__name__} {host}", [])
            return connection

        return open_connection


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects that its user lets it."""

    max_redirections = max_repeats = 100  # they are counted below

    def __init__(self, on_redirect: Callable[[str], object], most: int) -> None:
        self._on_redirect, self._most = on_redirect, most

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        self._on_redirect(newurl)
        if sum(getattr(req, "redirect_dict", {}).values()) >= self._most:
            raise RefusedError(f"it redirects more than {self._most} times")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
