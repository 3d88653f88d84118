"""The HTTP server of a model: uvicorn, with limits on time and connections, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from steadytrain.errors import InputError
from steadytrain.export.serve import ServeSettings, Service
from steadytrain.machine import facts
from steadytrain.machine.process import keep_memory
from steadytrain.reports.live import HOSTS
from steadytrain.training import Trained

MAX_CONNECTIONS = 512
"""Beyond it, the connection that has waited longest without a request is closed for each new one."""
HEAD_SECONDS, KEEP_ALIVE_SECONDS = 10.0, 65


class Protocol(H11Protocol):
    """uvicorn's protocol, with the limits that it lacks.

    They are on the time for a request's head, on the time in which a client takes an answer, and on connections.
    """

    head_seconds = HEAD_SECONDS
    answer_seconds = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused until the system has taken all that was written
        self._untaken: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.head_seconds, self._late)
        if len(self.connections) > MAX_CONNECTIONS:
            others = (other for other in self.connections if isinstance(other, Protocol) and other is not self)
            idle = [other for other in others if other.is_waiting]
            if idle:
                min(idle, key=lambda other: other._since)._close()
            else:
                self._close()

    @property
    def is_waiting(self) -> bool:
        """Whether the connection has no pending request."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Read on; the head of a request has to be complete in time."""
        super().data_received(data)
        if not self.is_waiting:
            self._timer.cancel()
        elif self._timer.cancelled():
            self._since = self.loop.time()
            self._timer = self.loop.call_later(self.head_seconds, self._late)

    def pause_writing(self) -> None:
        """Wait for the client to take the answer, for a limited time, also while the connection is being closed."""
        super().pause_writing()
        self._untaken = self.loop.call_later(self.answer_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has taken the whole answer."""
        if self._untaken is not None:
            self._untaken.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._timer.cancel()
        if self._untaken is not None:
            self._untaken.cancel()
        super().connection_lost(exc)

    def _late(self) -> None:
        if self.is_waiting and not self.transport.is_closing():
            if self.conn.trailing_data[0] or self.cycle is None:
                text = b'{"error":"the request\'s head was not complete in time"}'
                lines = (b"HTTP/1.1 408 Request Timeout", b"content-type: application/json", b"connection: close")
                head = b"\r\n".join([*lines, b"content-length: %d" % len(text)])
                self.transport.write(head + b"\r\n\r\n" + text)
            self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            if self.conn.our_state is h11.IDLE:
                self.conn.send(h11.ConnectionClosed())
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server; a first signal lets requests at hand be answered, a second one ends the process at once."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[Service], object]) -> None:
        super().__init__(config)
        self._service, self._on_ready, self._is_announced = service, on_ready, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining_since is not None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._service.draining_since = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        batcher = self._service.batcher
        if batcher.failure is not None or self._service.is_drained:
            self.should_exit, self._service.num_cut = True, self._service.in_flight
        elif batcher.is_ready and not self._is_announced:
            self._is_announced = True
            self._on_ready(self._service)
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """Open the socket that a server listens on. Raises InputError if the address cannot be used."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port is {port}; a port is from 0 (any that is free) to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another --host or --port"
        ) from error


def serve(
    load: Callable[[], Trained],
    settings: ServeSettings,
    listener: socket.socket,
    *,
    on_ready: Callable[[Service], object] = lambda service: None,
) -> int:
    """Answer requests until SIGTERM or SIGINT, then finish pending ones; return how many were left unanswered.

    Args:
        load: returns the model, on a thread of its own; ``/ready`` answers 503 meanwhile.
        settings: limits.
        listener: a socket that listens; on this machine's own address, only requests to that name are answered.
        on_ready: called once, when the model is warm.

    Raises:
        SteadyError: whatever ``load`` raises.
    """
    keep_memory(facts.memory_bytes(), all_threads=True)  # before there are threads: one of them computes
    host = listener.getsockname()[0]
    service = Service(load, settings, hosts={*HOSTS, "[::1]"} if host in ("127.0.0.1", "::1") else None)
    times = {"head_seconds": min(HEAD_SECONDS, settings.timeout_seconds), "answer_seconds": settings.timeout_seconds}
    protocol = type("Protocol", (Protocol,), times)
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "lifespan": "off"}
    limits: dict[str, Any] = {"timeout_keep_alive": KEEP_ALIVE_SECONDS, "timeout_graceful_shutdown": 1}
    server = _Server(uvicorn.Config(service.app, http=protocol, ws="none", **quiet, **limits), service, on_ready)

    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each broken form

    async def answer() -> None:
        service.batcher.start()
        await server.serve(sockets=[listener])

    try:
        asyncio.run(answer())
    finally:
        service.batcher.close()
    if service.batcher.failure is not None:
        raise service.batcher.failure
    return service.num_cut
