"""A server's limits on connections, requests and time, before real connections."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from steadytrain.machine import web_server
from steadytrain.machine.web_server import LimitedServer, ServerLimits

LIMITS = ServerLimits(connections=12, requests=4, head_seconds=60, answer_seconds=0.3, free_paths=("/health",))
BODY = b"POST /take HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90000\r\n\r\n"
HELD = threading.Event()


async def _take(request: Request) -> Response:
    """Answer with the size of the body."""
    try:
        return PlainTextResponse(str(len(await request.body())))
    except ClientDisconnect:
        return Response(status_code=499)


def _hold(request: Request) -> Response:
    """Compute, on a thread of its own, until the test says so."""
    HELD.wait(20)
    return PlainTextResponse("held")


async def _long(request: Request) -> Response:
    """Answer with more than the system takes for a client that does not read."""
    return PlainTextResponse("x" * 2**24)


@contextlib.contextmanager
def serving(listener: socket.socket, limits: ServerLimits = LIMITS) -> Iterator[int]:
    """The port of a server."""
    routes = [
        Route("/take", _take, methods=["POST"]),
        *(Route(path, handler) for path, handler in (("/hold", _hold), ("/long", _long))),
        Route("/health", lambda request: PlainTextResponse("alive")),
        Route("/host", lambda request: PlainTextResponse(request.headers["host"])),
    ]
    server = LimitedServer(Starlette(routes=routes), limits, timeout_graceful_shutdown=1)
    with listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            HELD.set()
            server.should_exit = True
            thread.join()
            HELD.clear()


@pytest.fixture
def port() -> Iterator[int]:
    with serving(socket.create_server(("127.0.0.1", 0))) as number:
        yield number


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(sent)
    return connection


def whole_answer(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            answer += piece
    return answer


def asked(port: int, path: str, *, body: bytes = b"") -> bytes:
    """The answer to a request on a connection of its own."""
    method = "POST" if body else "GET"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with connect(port, head.encode() + body) as connection:
        return whole_answer(connection)


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


@pytest.mark.parametrize("path", ["/health", "/take", "/nowhere"])
def test_a_body_that_is_no_http_leaves_no_traceback(port: int, path: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    for apart in (False, True):
        with connect(port, head + (b"5\r\n12345\r\n" if apart else b"")) as connection:
            if apart:
                time.sleep(0.05)
            connection.sendall(b"\nno size\r\n")
            whole_answer(connection)
    assert asked(port, "/health").endswith(b"alive")
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not caplog.records


def test_idle_connections_are_closed_oldest_first(port: int) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(port)) for _ in range(40)]
        assert b"200 OK" in asked(port, "/health")
        open_ones = [place for place, connection in enumerate(idle) if is_open(connection)]
        assert len(open_ones) <= LIMITS.connections
        assert open_ones == list(range(40 - len(open_ones), 40)), "those that have waited longest were closed"
        assert len(open_ones) >= LIMITS.connections - 1, "and no others"


def test_slow_bodies_keep_nobody_out(port: int) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(port, BODY)) for _ in range(LIMITS.connections)]
        time.sleep(0.2)
        assert asked(port, "/health").endswith(b"alive")
        assert asked(port, "/take", body=b"12345").endswith(b"5")
        time.sleep(0.2)
        still = list(map(is_open, slow))
        assert not still[0] and still == sorted(still), "those that had waited longest were closed"
        assert sum(still) >= LIMITS.connections - 2, "and no others"


def test_clients_that_were_refused_and_go_on_sending_keep_nobody_out(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(connect(port, BODY))
            time.sleep(0.02)
        assert asked(port, "/health").endswith(b"alive")


def test_a_request_counts_once_its_body_is_there(port: int) -> None:
    with contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(connect(port, BODY + bytes(80_000))) for _ in range(2 * LIMITS.requests)]
        assert asked(port, "/take", body=b"12345").endswith(b"5")
        for connection in uploads:
            connection.sendall(bytes(10_000))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert asked(port, "/take", body=b"12345").endswith(b"5")


def test_one_health_check_too_many_gets_the_answer_of_the_same_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(path: str, more: str = "") -> bytes:
        return f"GET {path} HTTP/1.1\r\nhost: a\r\n{more}\r\n".encode()

    limits = replace(LIMITS, free_paths=("/health", "/host"))
    with serving(socket.create_server(("127.0.0.1", 0)), limits) as port:
        with connect(port, get("/host")) as connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
            connection.sendall(get("/health", "connection: close\r\n"))  # its answer is not that of the first
            assert whole_answer(connection).endswith(b"alive")
        assert asked(port, "/health").endswith(b"alive")
        monkeypatch.setattr(web_server, "FREE_PLACES", 0)
        assert asked(port, "/health").endswith(b"alive")
        with connect(port, get("/host")) as connection:
            assert whole_answer(connection).endswith(b"\r\n\r\na")
        with connect(port, get("/health", "x: y\r\n")) as other:
            assert b"503 Service Unavailable" in whole_answer(other)


def test_requests_beyond_the_limit_are_answered_503_but_for_health(port: int) -> None:
    request = b"GET /hold HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with contextlib.ExitStack() as stack:
        at_hand = [stack.enter_context(connect(port, request)) for _ in range(LIMITS.requests)]
        assert asked(port, "/health").endswith(b"alive")
        refused = asked(port, "/take", body=b"12345")
        assert b"503 Service Unavailable" in refused and b"retry-after: 1" in refused
        assert b"4 requests at hand, as many as it may: try again" in refused
        HELD.set()
        assert all(whole_answer(connection).endswith(b"held") for connection in at_hand)
    assert asked(port, "/take", body=b"12345").endswith(b"5")


def test_a_client_that_takes_no_answer_loses_its_connection(port: int) -> None:
    with connect(port, b"GET /long HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
        time.sleep(1)
        assert len(whole_answer(connection)) < 2**24


def test_a_request_with_two_lengths_ends_its_connection(port: int) -> None:
    twice = b"POST /take HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    with connect(port, twice + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n") as connection:
        answer = whole_answer(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b"both Content-Length and Transfer-Encoding" in answer


CLOSE = b"host: a\r\nconnection: close\r\n"
CHUNKED = b"POST /take HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
ODD: dict[str, tuple[bytes, list[int], bytes]] = {
    "as to a proxy, without a path": (b"GET HTTP://b HTTP/1.1\r\n" + CLOSE + b"\r\n", [404], b""),
    "escapes in the path": (b"GET /%68ealt%68 HTTP/1.1\r\n" + CLOSE + b"\r\n", [200], b"alive"),
    "a path that leads up": (b"GET /../../health HTTP/1.1\r\n" + CLOSE + b"\r\n", [404], b""),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", [200], b"alive"),
    "lines that end without a return": (b"GET /health HTTP/1.1\nhost: a\nconnection: close\n\n", [200], b"alive"),
    "HEAD": (b"HEAD /health HTTP/1.1\r\n" + CLOSE + b"\r\n", [200], b"\r\n\r\n"),
    "two at once": (b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /health HTTP/1.0\r\n\r\n", [200, 200], b"alive"),
    "chunks with extensions and a trailer": (
        CHUNKED + b'3;a="b;c"\r\nabc\r\n2 \r\nde\r\n0\r\nx: y\r\n\r\n',
        [200],
        b"5",
    ),
    "100-continue": (
        b"POST /take HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 1\r\n" + CLOSE + b"\r\nx",
        [200],
        b"1",
    ),
    "an upgrade": (
        b"GET /health HTTP/1.1\r\nupgrade: websocket\r\nhost: a\r\nconnection: upgrade, close\r\n\r\n",
        [200],
        b"alive",
    ),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [505], b""),
    "HTTP/0.9": (b"GET /health\r\n\r\n", [400], b""),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", [400], b""),
    "CONNECT": (b"CONNECT b:443 HTTP/1.1\r\n" + CLOSE + b"\r\n", [404], b""),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", [400], b""),
    "two hosts": (b"GET /health HTTP/1.1\r\nhost: b\r\n" + CLOSE + b"\r\n", [400], b""),
    "a space before the colon": (b"GET /health HTTP/1.1\r\nx : y\r\n" + CLOSE + b"\r\n", [400], b""),
    "a zero in a header": (b"GET /health HTTP/1.1\r\nx: \0y\r\n" + CLOSE + b"\r\n", [400], b""),
    "two lengths": (
        b"POST /take HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n" + CLOSE + b"\r\nxy",
        [400],
        b"",
    ),
    "a length below zero": (b"POST /take HTTP/1.1\r\ncontent-length: -1\r\n" + CLOSE + b"\r\n", [400], b""),
    "a length with a sign": (b"POST /take HTTP/1.1\r\ncontent-length: +1\r\n" + CLOSE + b"\r\nx", [400], b""),
    "another coding": (
        b"POST /take HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n" + CLOSE + b"\r\n0\r\n\r\n",
        [400],
        b"",
    ),
    "chunks that are none": (CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n", [400], b""),
    "a long name": (b"GET /health HTTP/1.1\r\n" + b"x" * 20_000, [400], b""),
    "a long path": (b"GET /" + b"x" * 20_000, [400], b""),
    "many headers": (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 4_000, [400], b""),
}


@pytest.mark.parametrize("in_pieces", [False, True])
def test_odd_requests_are_answered_as_http_has_it(port: int, in_pieces: bool) -> None:
    answers = {}
    for name, (request, _, ending) in ODD.items():
        size = 7 if in_pieces and len(request) < 1000 else 5000
        with connect(port) as connection:
            with contextlib.suppress(OSError):  # it may be refused before its end
                for start in range(0, len(request), size):
                    connection.sendall(request[start : start + size])
            answer = whole_answer(connection)
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]
        is_right = answer.endswith(ending)
        answers[name] = ([status for status in statuses if status != 100], ending if is_right else answer)
    assert answers == {name: (statuses, ending) for name, (_, statuses, ending) in ODD.items()}


def test_a_head_that_comes_too_late_is_answered_408() -> None:
    limits = ServerLimits(connections=12, requests=4, head_seconds=0.1)
    with serving(socket.create_server(("127.0.0.1", 0)), limits) as port, connect(port) as silent:
        with connect(port, b"GET /health HTTP/1.1\r\nhost: a\r\nx: ") as late:
            assert whole_answer(late).startswith(b"HTTP/1.1 408 ")
        assert whole_answer(silent).startswith(b"HTTP/1.1 408 ")


def test_a_process_that_may_open_no_more_files_goes_on_answering() -> None:
    class Full(socket.socket):
        """A listener for whose connections there are no files, three times."""

        times = 3

        def accept(self) -> tuple[socket.socket, object]:
            if self.times and HELD.is_set():
                self.times -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listener = Full()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with serving(listener) as port, connect(port) as idle:
        assert asked(port, "/health").endswith(b"alive") and is_open(idle)
        HELD.set()
        assert asked(port, "/health").endswith(b"alive")
        assert listener.times == 0
        assert not is_open(idle), "it made room"


def test_a_request_for_health_goes_before_those_that_wait(port: int) -> None:
    head = b"POST /take HTTP/1.1\r\nhost: a\r\ncontent-length: 90000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(port, head))
        for _ in range(20):
            assert asked(port, "/health").endswith(b"alive")
