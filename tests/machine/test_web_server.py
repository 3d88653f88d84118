"""A server's limits on connections, requests and time, before real connections."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

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


@pytest.fixture
def port() -> Iterator[int]:
    routes = [
        Route("/take", _take, methods=["POST"]),
        *(Route(path, handler) for path, handler in (("/hold", _hold), ("/long", _long))),
        Route("/health", lambda request: PlainTextResponse("alive")),
    ]
    server = LimitedServer(Starlette(routes=routes), LIMITS, timeout_graceful_shutdown=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        HELD.set()
        server.should_exit = True
        thread.join()
        HELD.clear()


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


def test_slow_bodies_keep_nobody_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "SLOW_AFTER", 0.05)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(port, BODY)) for _ in range(LIMITS.requests)]
        assert asked(port, "/health").endswith(b"alive")
        time.sleep(0.2)
        assert asked(port, "/take", body=b"12345").endswith(b"5"), "one of them was given up"
        assert b"503 Service Unavailable" in whole_answer(slow[0]), "the one that had waited longest"
        assert all(map(is_open, slow[1:]))


def test_clients_that_were_refused_and_go_on_sending_keep_nobody_out(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(connect(port, BODY))
            time.sleep(0.02)
        assert asked(port, "/health").endswith(b"alive")


def test_a_body_that_comes_fast_is_not_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "SLOW_AFTER", 0.05)
    with contextlib.ExitStack() as stack:
        fast = [stack.enter_context(connect(port, BODY + bytes(80_000))) for _ in range(LIMITS.requests)]
        time.sleep(0.2)
        assert b"503 Service" in asked(port, "/take", body=b"12345")
        for connection in fast:
            connection.sendall(bytes(10_000))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        assert asked(port, "/take", body=b"12345").endswith(b"5")


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
