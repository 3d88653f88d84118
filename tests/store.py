"""A real object store on this machine (moto's S3 server), and a proxy before it that injects faults."""

from __future__ import annotations

import http.client
import http.server
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a moto server."""
    pytest.importorskip("moto")
    port, log = _free_port(), (tmp_path_factory.mktemp("moto") / "log").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(address, timeout=1).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < until, "moto did not start"
                time.sleep(0.05)
        yield address
    finally:
        server.terminate()
        server.wait()
        log.close()


class Bucket:
    """A bucket of its own, whose objects are put and removed without the code under test, and without faults."""

    def __init__(self, address: str, name: str) -> None:
        from obstore.store import S3Store

        self.address = address
        self.name = name
        urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT"), timeout=30).close()
        self._store = S3Store(
            name,
            endpoint=address,
            region="us-east-1",
            access_key_id="tests",
            secret_access_key="tests",
            client_options={"allow_http": True},
        )

    def uri(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, data: bytes | Path) -> str:
        """Put an object; its URI."""
        self._store.put(key, data if isinstance(data, bytes) else data.read_bytes(), use_multipart=False)
        return self.uri(key)

    def get(self, key: str) -> bytes:
        """The content of an object. Raises FileNotFoundError."""
        return bytes(self._store.get(key).bytes())

    def names(self) -> list[str]:
        return [meta["path"] for chunk in self._store.list() for meta in chunk]

    def remove(self, key: str) -> None:
        self._store.delete(key)

    def put_records(self, folder: Path, stem: str) -> str:
        """Put a record file, its index and its card; the URI of the first."""
        for suffix in (".idx", ".json"):
            self.put(f"{stem}{suffix}", folder / f"{stem}{suffix}")
        return self.put(f"{stem}.rec", folder / f"{stem}.rec")


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """A new bucket, and an environment that leads to its server and has a cache of its own."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "AKIAWHOREADSTHIS",
        "AWS_SECRET_ACCESS_KEY": "not-to-be-shown",
        "AWS_REGION": "us-east-1",
        "STEADYTRAIN_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    return Bucket(s3_server, f"b{time.time_ns()}")


Answer = Callable[[http.server.BaseHTTPRequestHandler, str], bool]
"""Answers a request in the server's place, or returns False."""


class FaultProxy:
    """Hands requests on to a server, but for those that ``faults`` names: each fault is used once, in turn.

    A fault is a status (503), a status and an S3 code (``(400, "ExpiredToken")``), ``reset``, ``stall`` or
    ``cut`` (half of the body). ``matches``: the paths that they are for, and that wait ``delay_seconds``; ``method``,
    if any. ``requests``: path and Range of each. ``most_at_once``: of how many paths requests have waited at a time.
    """

    def __init__(self, target: str, host: str = "127.0.0.1") -> None:
        self.faults: list[int | tuple[int, str] | str] = []
        self.matches = ".rec"
        self.method = ""
        self.requests: list[tuple[str, str]] = []
        self.methods: list[tuple[str, str]] = []
        self.stall_seconds = 1.0
        self.delay_seconds = 0.0
        self.most_at_once = 0
        self._delayed: list[str] = []
        self._closed = threading.Event()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with suppress(ConnectionError, BrokenPipeError):
                    proxy._answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._target = target.removeprefix("http://")
        self._server = http.server.ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.address = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.requests.append((request.path, request.headers.get("Range", "")))
        self.methods.append((request.command, request.path))
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        fault = self.faults.pop(0) if self.faults and self._is_meant(request) else None
        request.close_connection = True
        if fault == "reset":
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
            return
        if fault == "stall" and self._closed.wait(self.stall_seconds):
            return
        if isinstance(fault, int | tuple):
            status, code = (fault, "InternalError") if isinstance(fault, int) else fault
            text = f"<Error><Code>{code}</Code><AWSAccessKeyId>AKIAWHOREADSTHIS</AWSAccessKeyId></Error>".encode()
            self._send(request, status, {"Content-Length": str(len(text))}, text)
            return
        if self.matches in request.path:
            self._delayed.append(request.path)
            self.most_at_once = max(self.most_at_once, len(set(self._delayed)))
            time.sleep(self.delay_seconds)
            self._delayed.remove(request.path)
        connection = http.client.HTTPConnection(self._target, timeout=30)
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        data = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() != "transfer-encoding"}
        headers["Content-Length"] = headers.get("Content-Length", str(len(data)))
        self._send(request, answer.status, headers, data[: len(data) // 2] if fault == "cut" else data)
        connection.close()

    def _is_meant(self, request: http.server.BaseHTTPRequestHandler) -> bool:
        return self.matches in request.path and self.method in ("", request.command)

    @staticmethod
    def _send(request: http.server.BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes) -> None:
        request.send_response_only(status)
        for name, value in {**headers, "Connection": "close"}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data)

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def fault_proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the bucket's server, which the environment leads to."""
    proxy = FaultProxy(bucket.address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    yield proxy
    proxy.close()
