"""Limits of an HTTP server: connections, requests at hand, and the time that a client may take.

A connection waits for its client while a request's head or body is still to come, or an answer to be taken. Where there
are too many, the one that has waited longest makes room for a new one, so that clients that send nothing, or a byte a
second, keep nobody out. Each decision looks at a few connections, however many there are.

Until its first head is complete, a connection is a bare socket: a transport and a parser cost ten times as much, and
thousands that come at once and send nothing would hold up everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from steadytrain.machine.process import allow_open_files

LINGER_SECONDS, LINGER_BYTES = 2.0, 64 * 2**20
"""How long, and how much of, a request is read that was answered before its end."""
ACCEPTS, OPENS, BACKLOG = 1024, 8, 4096
"""Connections that are accepted, and that are given a parser, in one turn of the event loop; and those that the system
holds until they are accepted."""
RETRY_SECONDS = 0.1
"""Until connections are accepted again, where the process may open no more files."""
MAX_HEAD_BYTES = 16 * 2**10
"""Of a head that is not complete: h11 refuses longer ones."""
SLOW_AFTER, SLOW_RATE = 1.0, 1000
"""A request waits for a slow client after so many seconds with fewer bytes a second; it may be given up for others."""
_LOOKED_AT = 8
"""Requests that are looked at for one that is slow."""
_LATE = ("408 Request Timeout", "the request's head was not complete in time")
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE)


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
        connections: at the same time. Beyond them, the one that has waited longest for a request is closed.
        requests: at hand; fewer than connections, the rest of which waits for requests. Beyond them, one of a slow
            client is given up, or the new one is answered 503.
        head_seconds: for a request's head.
        answer_seconds: for the client to take an answer, or a part of it.
        free_paths: that are answered whatever else is at hand, such as a health check.
    """

    connections: int = 512
    requests: int = 384
    head_seconds: float = 10.0
    answer_seconds: float = 30.0
    free_paths: Collection[str] = ()


@dataclass(eq=False, slots=True)
class _Caller:
    """A connection whose first head is not complete, or just complete; ``is_free``: of a request for a free path."""

    connection: socket.socket
    since: float
    is_watched: bool = False
    is_free: bool = False
    received: bytearray = field(default_factory=bytearray)

    def end(self, status: str = "", error: str = "") -> None:
        """Close the connection; send an answer before, if one is given."""
        with contextlib.suppress(OSError):
            if status:
                self.connection.send(_refusal(status, error))
        self.connection.close()


class Acceptor:
    """Accepts connections, and reads the first head of each; those that are complete are opened a few at a time.

    Args:
        limiter: whose connections make room for new ones.
        num_open: returns how many connections have been opened and are not over.
        open_connection: gives a connection a parser, which begins with the bytes that were read.
    """

    def __init__(
        self, limiter: Limiter, num_open: Callable[[], int], open_connection: Callable[[socket.socket, bytes], None]
    ) -> None:
        self._limiter, self._num_open, self._open_connection = limiter, num_open, open_connection
        self._loop = asyncio.get_running_loop()
        self._listeners: Sequence[socket.socket] = ()
        self._silent: OrderedDict[int, _Caller] = OrderedDict()
        self._ready: deque[_Caller] = deque()

    def listen(self, listeners: Sequence[socket.socket]) -> None:
        """Begin to accept connections."""
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Accept no more, and close the connections that are not opened."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        self._listeners = ()
        while self._silent:
            self._take(next(iter(self._silent))).end()
        while self._ready:
            self._ready.popleft().end()

    def end_late(self) -> None:
        """Close the connections whose first head was not complete in time."""
        begin = self._loop.time() - self._limiter.limits.head_seconds
        while self._silent:
            number, caller = next(iter(self._silent.items()))
            if caller.since >= begin:
                return
            self._take(number).end(*_LATE)

    def _accept(self, listener: socket.socket) -> None:
        """Accept what waits, before the system has no more places; watch only those that are left in the end."""
        limit, fresh = self._limiter.limits.connections, list[int]()
        for _ in range(ACCEPTS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError:  # the process may open no more files
                if not self._make_room():
                    self._loop.remove_reader(listener)
                    self._loop.call_later(RETRY_SECONDS, self._accept_again, listener)
                break
            number = connection.fileno()
            self._silent[number] = _Caller(connection, self._loop.time())
            fresh.append(number)
            self._read(number)  # a request may have come with the connection
            if len(self._silent) + len(self._ready) + self._num_open() > limit:
                self._make_room()
        for number in fresh:
            caller = self._silent.get(number)
            if caller is not None and not caller.is_watched:
                caller.is_watched = True
                caller.connection.setblocking(False)
                self._loop.add_reader(number, self._read, number)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._accept, listener)

    def _read(self, number: int) -> None:
        caller = self._silent[number]
        try:
            piece = caller.connection.recv(MAX_HEAD_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            piece = b""
        if not piece:
            self._take(number).end()
            return
        begin = max(0, len(caller.received) - 2)
        caller.received += piece
        # What is no HTTP from its first byte on is refused at once, by the parser, and so is a head that is too long.
        if (
            _END_OF_HEAD.search(caller.received, begin)
            or caller.received[0] <= 0x20
            or len(caller.received) > MAX_HEAD_BYTES
        ):
            self._take(number)
            if not self._ready:
                self._loop.call_soon(self._open_some)
            caller.is_free = _path_of(caller.received) in self._limiter.limits.free_paths
            (self._ready.appendleft if caller.is_free else self._ready.append)(caller)

    def _take(self, number: int) -> _Caller:
        """Remove a connection from the silent ones."""
        caller = self._silent.pop(number)
        if caller.is_watched:
            self._loop.remove_reader(number)
        return caller

    def _open_some(self) -> None:
        for _ in range(min(OPENS, len(self._ready))):
            caller = self._ready.popleft()
            self._open_connection(caller.connection, bytes(caller.received))
        if self._ready:
            self._loop.call_soon(self._open_some)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest; return whether there was one.

        An eighth of the places is for those that have just come.
        """
        limit = self._limiter.limits.connections
        if len(self._silent) > limit // 8:
            self._take(next(iter(self._silent))).end()
        elif self._limiter.idle:
            next(iter(self._limiter.idle)).give_way()
        elif self._ready and not self._ready[-1].is_free:  # those of free paths stand first
            error = f"the server has {limit} connections, as many as it may: try again"
            self._ready.pop().end("503 Service Unavailable", error)
        elif self._silent:
            self._take(next(iter(self._silent))).end()
        else:
            return False
        return True


class Limiter:
    """The connections of one server that wait for their clients, those that have waited longest first.

    Attributes:
        idle: without a request, or with the rest of one that is answered already.
        receiving: with a request whose body is still to come, or whose answer is to be taken.
        num_requests: at hand, but for free paths.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.idle: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self.receiving: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self.num_requests = 0

    def has_room(self, new: LimitedProtocol) -> bool:
        """Return whether a new request may be answered; one of a slow client is given up for it where need be."""
        if self.num_requests < self.limits.requests:
            return True
        for _ in range(min(_LOOKED_AT, len(self.receiving))):
            longest = next(iter(self.receiving))
            if longest is new:
                return False
            if longest.is_slow():
                longest.give_way()
                return True
            self.receiving.move_to_end(longest)
        return False


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with the limits of a :class:`Limiter`; ``received``: bytes that were read before."""

    def __init__(self, *args: Any, limiter: Limiter, received: bytes, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limiter, self._application, self._first = limiter, self.app, received
        self.app = self._admit
        self._untaken: asyncio.TimerHandle | None = None
        self._queue: OrderedDict[LimitedProtocol, None] | None = None
        self._request: object = None
        self._refused: object = None
        self._since, self._received = 0.0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused until the system has taken all that was written
        self._timer = self.loop.call_later(self._limiter.limits.head_seconds, self._late)
        self.data_received(self._first)
        self._first = b""

    def data_received(self, data: bytes) -> None:
        """Read on; the head of a request has to be complete in time."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._timer.cancel()
        elif self._timer.cancelled():
            self._timer = self.loop.call_later(self._limiter.limits.head_seconds, self._late)
        self._note()
        self._received += len(data)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP: no other answer is sent to a request whose body it came in."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        """Wait for the client to take the answer, for a limited time, also while the connection is being closed."""
        super().pause_writing()
        self._untaken = self.loop.call_later(self._limiter.limits.answer_seconds, self.transport.abort)
        self._note()

    def resume_writing(self) -> None:
        """Go on: the client has taken the whole answer."""
        if self._untaken is not None:
            self._untaken.cancel()
        super().resume_writing()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and leave the queues."""
        self._timer.cancel()
        if self._untaken is not None:
            self._untaken.cancel()
        super().connection_lost(exc)
        self._note(is_over=True)

    def is_slow(self) -> bool:
        """Return whether the request at hand waits for a client that sends, or takes, too little."""
        seconds = self.loop.time() - self._since
        return seconds > SLOW_AFTER and self._received < SLOW_RATE * seconds

    def give_way(self) -> None:
        """Close the connection, for another one."""
        if self.cycle is not None and not (self.cycle.response_started or self.transport.is_closing()):
            self._refuse("503 Service Unavailable", "other clients need the place: send the request faster")
        self._close()
        if self.transport.get_write_buffer_size():  # closed, it would wait for its client to take that
            self.transport.abort()
        self.connections.discard(self)
        self._note(is_over=True)

    def _note(self, *, is_over: bool = False) -> None:
        """Enter the queue of those that wait for their clients, at its end, or leave it."""
        limiter, cycle = self._limiter, self.cycle
        queue: OrderedDict[LimitedProtocol, None] | None = None
        if not (is_over or self.transport.is_closing()):
            is_answered = cycle is not None and (cycle.response_started or cycle is self._refused)
            if cycle is None or cycle.response_complete or (is_answered and cycle.more_body):
                queue = limiter.idle
            elif cycle.more_body or self.flow.write_paused:
                queue = limiter.receiving
        if queue is self._queue and cycle is self._request:
            return
        if self._queue is not None:
            self._queue.pop(self, None)
        if queue is not None:
            queue[self] = None
        self._queue, self._request, self._since, self._received = queue, cycle, self.loop.time(), 0

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if there is room, and if its end is certain."""
        _use_origin_form(scope)
        limiter, names = self._limiter, {name for name, _ in scope["headers"]}
        if not scope["http_version"].startswith("1."):
            error = f"the request is of HTTP/{scope['http_version']}: this server has 1.0 and 1.1"
            await Early({"error": error}, 505)(scope, receive, send)
        elif names >= {b"content-length", b"transfer-encoding"}:  # RFC 9112, 6.1: a proxy may see two requests
            error = "the request has both Content-Length and Transfer-Encoding: send one of them"
            await Early({"error": error}, 400)(scope, receive, send)
        elif scope["path"] in limiter.limits.free_paths:
            await self._application(scope, receive, send)
        elif not limiter.has_room(self):
            self._refused = self.cycle
            self._note()
            error = f"the server has {limiter.limits.requests} requests at hand, as many as it may: try again"
            await Early({"error": error}, 503, {"retry-after": "1"})(scope, receive, send)
        else:
            limiter.num_requests += 1
            try:
                await self._application(scope, receive, send)
            finally:
                limiter.num_requests -= 1

    def _late(self) -> None:
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            if self.conn.trailing_data[0] or self.cycle is None:
                self._refuse(*_LATE)
            self._close()

    def _refuse(self, status: str, error: str) -> None:
        """Write an answer past the application, which has begun none."""
        self.transport.write(_refusal(status, error))

    def _close(self) -> None:
        if not self.transport.is_closing():
            if self.conn.our_state is h11.IDLE:
                self.conn.send(h11.ConnectionClosed())
            self.transport.close()


class LimitedServer(uvicorn.Server):
    """uvicorn's server, within limits.

    Args:
        app: the ASGI application.
        limits: of connections, requests and time.
        settings: more of uvicorn's.
    """

    def __init__(self, app: Any, limits: ServerLimits, **settings: Any) -> None:
        quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
        fixed: dict[str, Any] = {"http": "h11", "ws": "none", "lifespan": "off"}
        super().__init__(uvicorn.Config(app, **quiet, **fixed, **settings))
        self._limiter = Limiter(limits)
        self._acceptor: Acceptor | None = None
        allow_open_files(limits.connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets."""
        await super().startup([])
        self._acceptor = Acceptor(self._limiter, lambda: len(self.server_state.connections), self._open)
        self._acceptor.listen(sockets or ())

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose time is over."""
        assert self._acceptor is not None
        self._acceptor.end_late()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, and let requests at hand be answered."""
        assert self._acceptor is not None
        self._acceptor.close()
        await super().shutdown(sockets)

    def _open(self, connection: socket.socket, received: bytes) -> None:
        def protocol() -> LimitedProtocol:
            state, app_state = self.server_state, self.lifespan.state
            return LimitedProtocol(self.config, state, app_state, limiter=self._limiter, received=received)

        async def open_connection() -> None:
            with contextlib.suppress(OSError):  # the client is gone
                await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

        task = asyncio.create_task(open_connection())
        self.server_state.tasks.add(task)  # where uvicorn has its own
        task.add_done_callback(self.server_state.tasks.discard)


def _refusal(status: str, error: str) -> bytes:
    """Format an answer that ends its connection."""
    text = json.dumps({"error": error})
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()


def _path_of(head: bytes | bytearray) -> str:
    """Return the path that a head asks for, as it is written; empty where there is none."""
    words = head[: head.find(b"\n")].split(b" ", 2)
    return words[1].partition(b"?")[0].decode("latin-1") if len(words) == 3 else ""


def _use_origin_form(scope: Scope) -> None:
    """Read a target such as ``http://HOST/PATH``, as one would send to a proxy (RFC 9112, 3.2.2): its host counts."""
    match = _ABSOLUTE.fullmatch(scope["raw_path"])
    if match is not None:
        scope["raw_path"] = match[2] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))
        scope["headers"] = [(b"host", match[1]), *(pair for pair in scope["headers"] if pair[0] != b"host")]
