"""Limits of an HTTP server: connections, requests at hand, and the time that a client may take.

A connection waits for its client while a request's head or body is still to come, or an answer to be taken. Where there
are too many, the one that has waited longest makes room for a new one, so that clients that send nothing, or a byte a
second, keep nobody out. A request is at hand, and counts, once its body is there.

Until its first head is complete, a connection is a bare socket: a transport and a parser cost ten times as much, and
thousands that come at once and send nothing would hold up everybody. Then uvicorn's protocol answers it, behind one
that sees what comes and goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadytrain.machine.platform import allow_open_files

LINGER_SECONDS, LINGER_BYTES = 2.0, 64 * 2**20
"""Seconds and bytes of a request that are still read after it was answered before its end."""
ACCEPTS, OPENS, BACKLOG = 1024, 8, 4096
"""Connections accepted, and given a parser, in one turn of the event loop; those that the system holds until then."""
FREE_PLACES, REPEAT_SECONDS = 8, 2.0
"""Requests for free paths that may wait for a parser; seconds in which others like them get the answer before."""
MAX_HEAD_BYTES = 16 * 2**10
"""Bytes of a head after which it goes to the parser, complete or not: h11 refuses longer ones."""
_LATE = ("408 Request Timeout", "the request's head was not complete in time")
_END_OF_HEAD = re.compile(rb"\n\r?\n")


class Early(JSONResponse):
    """An answer to a request that was not read to its end; it closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                remaining = LINGER_BYTES
                while remaining > 0:
                    message = await receive()
                    if message["type"] != "http.request" or not message.get("more_body"):
                        break
                    remaining -= len(message["body"])
        await send({"type": "http.response.body", "body": b""})


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of a server for its clients.

    Args:
        connections: at the same time. Beyond them, the one that has waited longest for its client is closed.
        requests: at hand; fewer than connections, the rest of which waits for clients. Beyond them, a new one is
            answered 503.
        head_seconds: for the first request's head.
        answer_seconds: for the client to take an answer, or a part of it.
        free_paths: that are answered however many requests are at hand, such as a health check.
    """

    connections: int = 512
    requests: int = 384
    head_seconds: float = 10.0
    answer_seconds: float = 30.0
    free_paths: Collection[str] = ()


class _Connection(asyncio.Protocol):
    """A connection with a transport, between that and uvicorn's protocol.

    ``head``: bytes that were read before there was a transport: the first request's head.
    """

    transport: asyncio.Transport

    def __init__(self, head: bytes, clients: _Clients) -> None:
        self.head, self._clients, self._limits = head, clients, clients.limits
        self._loop = asyncio.get_running_loop()
        self._late: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None
        self._is_answering = self._awaits_body = self._counts = self._is_cut = False
        self._is_lost = asyncio.Event()
        self._protocol = clients.make_protocol(self)

    # -- what the transport calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(0)  # writing is paused until the system has taken all that was written
        self._protocol.connection_made(transport)
        self._clients.num_open += 1
        self.data_received(self.head)  # its request begins at once

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; the head of a request has to be complete in time."""
        if not self._is_answering and self._late is None:
            self._late = self._loop.call_later(self._limits.head_seconds, self._end_late)
        try:
            self._protocol.data_received(data)
        except h11.LocalProtocolError:  # a body that is no HTTP, of a request whose answer has begun
            self.transport.close()

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Wait for the client to take the answer, for a limited time, also while the connection is being closed."""
        self._untaken = self._loop.call_later(self._limits.answer_seconds, self.transport.abort)
        self._protocol.pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
        self._protocol.resume_writing()
        if self._is_answering and not self._awaits_body:
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._untaken):
            if timer is not None:
                timer.cancel()
        self._clients.waiting.pop(self, None)
        self._clients.num_open -= 1
        self._protocol.connection_lost(exc)
        self._is_lost.set()

    # -- what the server calls -----------------------------------------------------------------------------------------

    def begin(self, *, has_body: bool, counts: bool) -> None:
        """Note that a request's head is complete; ``counts``: it is at hand once its body is there."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._is_answering, self._awaits_body, self._counts = True, has_body, counts
        if has_body:
            self._wait()
        else:
            self._go_on()

    async def receive(self, receive: Receive) -> Message:
        """Return the next part of the body."""
        message = await receive()
        if self._awaits_body and not message.get("more_body"):
            self._awaits_body = False
            self._go_on()
        return message

    async def send(self, send: Send, message: Message) -> None:
        """Send a part of the answer, unless the connection is over."""
        self._is_cut = self.transport.is_closing()
        if not self._is_cut:
            await send(message)

    async def finish(self) -> None:
        """Note that the application is through with a request."""
        self._is_answering = False
        self._wait()
        self._clients.at_hand.discard(self)
        if self._is_cut:
            await self._is_lost.wait()  # else uvicorn complains of an answer that was not sent

    def _wait(self) -> None:
        """Join those that wait for their clients, at the end."""
        if not self._is_lost.is_set():
            self._clients.waiting.pop(self, None)
            self._clients.waiting[self] = None

    def _go_on(self) -> None:
        """Leave those that wait: the request is there."""
        self._clients.waiting.pop(self, None)
        if self._counts:
            self._clients.at_hand.add(self)

    def _end_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_refusal(*_LATE))
            self.transport.close()


@dataclass(slots=True)
class _Silent:
    """A connection whose first head is not complete, or just complete."""

    connection: socket.socket
    since: float
    received: bytearray = field(default_factory=bytearray)

    def end(self, answer: bytes = b"") -> None:
        """Close the connection, after an answer if there is one."""
        with contextlib.suppress(OSError):
            if answer:
                self.connection.send(answer)
        self.connection.close()


class _Clients:
    """Accepts connections, reads the first head of each, and holds all of them within limits.

    Attributes:
        num_open: connections that have a transport.
        waiting: of them, those that wait for their clients, longest first.
        at_hand: those whose request is there, but for free paths.
    """

    def __init__(self, limits: ServerLimits, make_protocol: Callable[[_Connection], asyncio.Protocol]) -> None:
        self.limits, self.make_protocol = limits, make_protocol
        self._loop = asyncio.get_running_loop()
        self._silent: OrderedDict[int, _Silent] = OrderedDict()
        self._ready: deque[_Silent] = deque()
        self._free: deque[_Silent] = deque()
        self._repeated: dict[bytes, tuple[float, bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_open = 0
        self.waiting: OrderedDict[_Connection, None] = OrderedDict()
        self.at_hand: set[_Connection] = set()

    def accept(self, listener: socket.socket) -> None:
        """Accept what waits, before the system has no more places; watch only those that are left in the end."""
        fresh = list[int]()
        for _ in range(ACCEPTS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError:  # the process may open no more files
                self._make_room()
                break
            connection.setblocking(False)
            number = connection.fileno()
            self._silent[number] = _Silent(connection, self._loop.time())
            fresh.append(number)
            self._read(number)  # a request may have come with the connection
            if len(self._silent) + len(self._ready) + len(self._free) + self.num_open > self.limits.connections:
                self._make_room()
        for number in fresh:
            if number in self._silent:
                self._loop.add_reader(number, self._read, number)

    def close(self) -> None:
        """Close the connections that have no transport."""
        while self._silent:
            self._take(next(iter(self._silent))).end()
        while ready := self._free or self._ready:
            ready.pop().end()

    def end_late(self) -> None:
        """Close the connections whose first head was not complete in time."""
        begin = self._loop.time() - self.limits.head_seconds
        while self._silent and next(iter(self._silent.values())).since < begin:
            self._take(next(iter(self._silent))).end(_refusal(*_LATE))

    def repeat(self, head: bytes, send: Send) -> Send:
        """Return ``send``, which keeps a short answer for those who send the same head just after."""
        headers: list[tuple[bytes, bytes]] = []

        async def send_and_keep(message: Message) -> None:
            if message.get("status") == 200:
                headers.extend(message["headers"])
            elif headers and not message.get("more_body"):
                fields = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
                answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + fields + b"\r\n" + message["body"]
                self._repeated.pop(head, None)
                self._repeated[head] = (self._loop.time(), answer)
                if len(self._repeated) > FREE_PLACES:
                    del self._repeated[next(iter(self._repeated))]
            await send(message)

        return send_and_keep if head.startswith(b"GET ") and head.find(b"\r\n\r\n") == len(head) - 4 else send

    def _read(self, number: int) -> None:
        client = self._silent[number]
        try:
            piece = client.connection.recv(MAX_HEAD_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        if not piece:
            self._take(number).end()
            return
        begin = max(0, len(client.received) - 2)
        client.received += piece
        # What is no HTTP from its first byte on is refused at once, by the parser, and so is a head that is too long.
        is_refused = client.received[0] <= 0x20 or len(client.received) > MAX_HEAD_BYTES
        if is_refused or _END_OF_HEAD.search(client.received, begin):
            self._serve(self._take(number))

    def _serve(self, client: _Silent) -> None:
        """Let a request wait for a parser; one too many for a free path gets the answer of the same one before."""
        is_free = _path_of(client.received) in self.limits.free_paths
        if is_free and len(self._free) >= FREE_PLACES:
            head, now = bytes(client.received), self._loop.time()
            error = "too many ask for this at the same time: try again"
            at, answer = self._repeated.get(head, (now, _refusal("503 Service Unavailable", error)))
            if now - at < REPEAT_SECONDS:
                client.end(answer)
                return
            self._repeated[head] = (now, answer)  # until this one is answered
        if not (self._free or self._ready):
            self._loop.call_soon(self._open_some)
        (self._free if is_free else self._ready).append(client)

    def _take(self, number: int) -> _Silent:
        """Remove a connection from the silent ones."""
        self._loop.remove_reader(number)
        return self._silent.pop(number)

    def _open_some(self) -> None:
        """Give a parser to a few connections, those of free paths first."""
        for _ in range(OPENS):
            if ready := self._free or self._ready:
                task = asyncio.create_task(self._open(ready.popleft()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if self._free or self._ready:
            self._loop.call_soon(self._open_some)

    async def _open(self, client: _Silent) -> None:
        connection = _Connection(bytes(client.received), self)
        with contextlib.suppress(OSError):  # the client is gone
            await self._loop.connect_accepted_socket(lambda: connection, client.connection)

    def _make_room(self) -> None:
        """Close the connection that has waited longest. Half of the places are for those that have just come."""
        if len(self._silent) > self.limits.connections // 2:
            self._take(next(iter(self._silent))).end()
        elif self.waiting:
            self.waiting.popitem(last=False)[0].transport.abort()
        elif self._ready:
            error = f"the server has {self.limits.connections} connections, as many as it may: try again"
            self._ready.pop().end(_refusal("503 Service Unavailable", error))
        elif self._silent:
            self._take(next(iter(self._silent))).end()


class LimitedServer(uvicorn.Server):
    """uvicorn's server, within limits; ``settings``: more of uvicorn's."""

    def __init__(self, app: ASGIApp, limits: ServerLimits, **settings: Any) -> None:
        quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
        fixed: dict[str, Any] = {"http": "h11", "interface": "asgi3", "ws": "none", "lifespan": "off"}
        super().__init__(uvicorn.Config(self._answer, **quiet, **fixed, **settings))
        self._app, self._limits = app, limits
        allow_open_files(limits.connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        await super().startup([])
        self._clients = _Clients(self._limits, self._protocol)
        self._listeners = sockets or []
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            asyncio.get_running_loop().add_reader(listener, self._clients.accept, listener)

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose time is over."""
        self._clients.end_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and let requests at hand be answered."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        self._clients.close()
        await super().shutdown(sockets)

    def _protocol(self, connection: _Connection) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state={"connection": connection})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if there is room, and if its end is certain."""
        connection: _Connection = scope["state"].pop("connection")
        headers = dict(scope["headers"])
        head, connection.head = connection.head, b""  # it is that of the first request alone
        refusal, is_free = self._refusal(scope, headers), scope["path"] in self._limits.free_paths
        has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        connection.begin(has_body=has_body, counts=not is_free)
        receive, send = partial(connection.receive, receive), partial(connection.send, send)
        try:
            await (refusal or self._app)(scope, receive, self._clients.repeat(head, send) if is_free else send)
        finally:
            await connection.finish()

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Early | None:
        """Return the answer to a request that the application is not to see."""
        limit, version = self._limits.requests, scope["http_version"]
        if not version.startswith("1."):
            return Early({"error": f"the request is of HTTP/{version}: this server has 1.0 and 1.1"}, 505)
        if headers.keys() >= {b"content-length", b"transfer-encoding"}:  # RFC 9112, 6.1: a proxy may see two requests
            error = "the request has both Content-Length and Transfer-Encoding: send one of them"
            return Early({"error": error}, 400)
        if len(self._clients.at_hand) >= limit and scope["path"] not in self._limits.free_paths:
            error = f"the server has {limit} requests at hand, as many as it may: try again"
            return Early({"error": error}, 503, {"retry-after": "1"})
        return None


def _refusal(status: str, error: str) -> bytes:
    """Format an answer that ends its connection."""
    text = json.dumps({"error": error})
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()


def _path_of(head: bytes | bytearray) -> str:
    """Return the path that a head asks for, as it is written; empty where there is none."""
    words = head[: head.find(b"\n")].split(b" ", 2)
    return words[1].partition(b"?")[0].decode("latin-1") if len(words) == 3 else ""
