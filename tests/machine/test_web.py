"""The HTTP client speaks to checked addresses alone, and asks about each redirect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from urllib.error import HTTPError

import pytest

from steadytrain.machine.web import PrivateAddressError, RefusedError, client, is_public


class _Moving(BaseHTTPRequestHandler):
    """Redirects /3 to /2, /2 to /1 and /1 to /0, which is there."""

    def do_GET(self) -> None:
        left = int(self.path[1:])
        self.send_response(302 if left else 200)
        if left:
            self.send_header("Location", f"/{left - 1}")
        self.send_header("Content-Length", "0" if left else "4")
        self.end_headers()
        self.wfile.write(b"" if left else b"here")

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Moving) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_private_address_is_spoken_to_only_where_it_is_trusted(port: int, host: str) -> None:
    with pytest.raises(PrivateAddressError, match="not of the internet"):
        client(on_redirect=bool).open(f"http://{host}:{port}/0", timeout=30)
    trusted = client(on_redirect=bool, trusted=frozenset({("127.0.0.1", port)}))
    with trusted.open(f"http://127.0.0.1:{port}/0", timeout=30) as answer:
        assert answer.read() == b"here"


def test_redirects_are_asked_about_and_counted(port: int) -> None:
    asked: list[str] = []
    address = f"http://127.0.0.1:{port}"
    with client(on_redirect=asked.append, trusted=None, max_redirects=2).open(f"{address}/2", timeout=30) as answer:
        assert (answer.read(), asked) == (b"here", [f"{address}/1", f"{address}/0"])
    with pytest.raises(RefusedError, match="more than 2 times"):
        client(on_redirect=bool, trusted=None, max_redirects=2).open(f"{address}/3", timeout=30)

    def refuse(url: str) -> None:
        raise RefusedError(f"not to {url}")

    with pytest.raises(RefusedError, match=f"not to {address}/0"):
        client(on_redirect=refuse, trusted=None).open(f"{address}/1", timeout=30)


class _Lasting(BaseHTTPRequestHandler):
    """Keeps connections, and tells each from others; hangs up after /last, and says more than is read of /more."""

    protocol_version = "HTTP/1.1"
    connections = 0
    timeout = 30

    def setup(self) -> None:
        super().setup()
        type(self).connections += 1
        self.number = str(self.connections).encode()

    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Content-Length", "100000" if self.path == "/more" else "1")
        self.end_headers()
        self.wfile.write(self.number * (100_000 if self.path == "/more" else 1))
        self.close_connection = self.path == "/last"  # without a word of it

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def test_a_connection_is_kept_by_its_thread_where_it_can_be_used_again() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Lasting) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        kept = threading.local()
        opener = client(on_redirect=bool, trusted=None, kept=kept)

        def ask(path: str) -> str:
            with opener.open(f"http://127.0.0.1:{server.server_port}{path}", timeout=30) as answer:
                return str(answer.read(1).decode())

        try:
            assert [ask("/"), ask("/"), ask("/more"), ask("/"), ask("/last")] == ["1", "1", "1", "2", "2"]
            time.sleep(0.2)  # until the server has hung up
            assert [ask("/"), ask("/")] == ["3", "3"]
            with pytest.raises(HTTPError):
                ask("/none")
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(ask, "/").result() != "3"
        finally:
            vars(kept).clear()  # hangs up: the server waits for its connections
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "address",
    [
        *("64:ff9b::a00:1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),  # NAT64, and its own networks
        *("2002:7f00:1::", "2002:a9fe:a9fe::1"),  # 6to4
        *("::7f00:1", "::ffff:0:7f00:1", "::ffff:169.254.169.254"),  # IPv4 within IPv6
        *("fec0::1", "fe80::1%eth0", "fd00::1", "ff0e::1", "2001:db8::1", "3fff::1", "5f00::1", "100::1"),
        *("192.0.0.192", "192.0.0.8", "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255"),
    ],
)
def test_addresses_that_lead_into_a_network_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::1", "::ffff:8.8.8.8"]
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)
