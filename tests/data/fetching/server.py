"""A server of files on this machine that fails as servers do: cut, slow, busy, wrong, elsewhere, changed."""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fault:
    """What goes wrong with one answer: ``status`` instead of a file, or the file ``cut`` after so many bytes.

    ``redirect``: to an address; ``no_ranges``: all of it, whatever was asked for; ``ignores_if_range``; ``drip``:
    seconds between bytes.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    redirect: str = ""
    no_ranges: bool = False
    ignores_if_range: bool = False
    drip: float = 0.0


@dataclass
class Server:
    """What it serves, how, and what was asked of it: a path and its headers each time.

    It stands still when it has sent ``stands_at`` bytes in all, until that is more.
    """

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    every: Fault = field(default_factory=Fault)
    stands_at: float = math.inf
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent: int = 0

    @property
    def ranges(self) -> list[str]:
        """The ranges that were asked for, empty for whole files."""
        return [headers.get("Range", "") for _, headers in self.asked]


@contextmanager
def serve(files: Mapping[str, bytes], *, context: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serve files by name until the block ends; with a ``context`` by TLS."""
    server = Server("", dict(files))
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), _handler(lambda: server))
    httpd.daemon_threads = False
    server.address = f"http{'s' if context else ''}://127.0.0.1:{httpd.server_address[1]}"
    if context:
        httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.stands_at = math.inf
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def _handler(server_of: Callable[[], Server]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            server, name = server_of(), self.path.rpartition("/")[2]
            server.asked.append((self.path, dict(self.headers.items())))
            fault = server.faults.pop(0) if server.faults else server.every
            self.close_connection = True
            if fault.redirect or fault.status or name not in server.files:
                self.send_response(fault.status or (302 if fault.redirect else 404))
                for key, value in {**fault.headers, **({"Location": fault.redirect} if fault.redirect else {})}.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._send(server, name, fault)

        def _send(self, server: Server, name: str, fault: Fault) -> None:
            data, etag = server.files[name], server.etags.get(name, '"1"')
            asked = self.headers.get("Range", "")
            is_same = fault.ignores_if_range or self.headers.get("If-Range", etag) == etag
            start = 0
            if asked and is_same and not fault.no_ranges:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                if start >= len(data):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(data)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(data) - start))
            self.send_header("ETag", etag)
            self.end_headers()
            end = len(data) if fault.cut is None else min(len(data), start + fault.cut)
            step = 1 if fault.drip else 4096
            try:
                for place in range(start, end, step):
                    while server.sent >= server.stands_at:
                        time.sleep(0.005)
                    self.wfile.write(data[place : min(place + step, end)])
                    server.sent += min(step, end - place)
                    if fault.drip:
                        self.wfile.flush()
                        time.sleep(fault.drip)
            except OSError:
                pass  # the client had enough

    return Handler
