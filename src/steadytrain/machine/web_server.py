"""Limits of an HTTP server: connections, requests at hand, and the time that a client may take.

A connection waits for its client while a request's head or body is still to come, or an answer to be taken. Where there
are too many, the one that has waited longest makes room for a new one, so that clients that send nothing, or a byte a
second, keep nobody out. Each decision looks at a few connections, however many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from steadytrain.machine.process import allow_open_files

LINGER_SECONDS, LINGER_BYTES = 2.0, 64 * 2**20
"""How long, and how much of, a request is read that was answered before its end."""
ACCEPTS, BACKLOG = 32, 4096
"""Connections that are taken in one turn of the event loop, and those that the system holds until then. In each turn as
many may have to go: a new one has its turn to send a request before it is among those that have waited longest."""
SLOW_AFTER, SLOW_RATE = 1.0, 1000
"""A request waits for a slow client after so many seconds with fewer bytes a second; it may be given up for others."""
_LOOKED_AT = 8
"""Requests that are looked at for one that is slow."""


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
    """uvicorn's protocol with the limits of a :class:`Limiter`."""

    def __init__(self, *args: Any, limiter: Limiter, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limiter, self._application = limiter, self.app
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
        self._note()
        if len(self.connections) > self._limiter.limits.connections and self._limiter.idle:
            next(iter(self._limiter.idle)).give_way()

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
        limiter, names = self._limiter, {name for name, _ in scope["headers"]}
        if b"content-length" in names and b"transfer-encoding" in names:  # RFC 9112, 6.1: a proxy may see two requests
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
                self._refuse("408 Request Timeout", "the request's head was not complete in time")
            self._close()

    def _refuse(self, status: str, error: str) -> None:
        """Write an answer past the application, which has begun none."""
        text = json.dumps({"error": error})
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(text)}\r\n\r\n{text}".encode())

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
        limiter = Limiter(limits)

        def protocol(*args: Any, **more: Any) -> LimitedProtocol:
            return LimitedProtocol(*args, limiter=limiter, **more)

        quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
        fixed: dict[str, Any] = {"http": protocol, "ws": "none", "lifespan": "off", "backlog": ACCEPTS}
        super().__init__(uvicorn.Config(app, **quiet, **fixed, **settings))
        allow_open_files(limits.connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio takes as many connections in a turn as it lets the system hold: that is told again."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
