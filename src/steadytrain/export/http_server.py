"""The HTTP server of a model: within limits, and with an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from steadytrain.errors import InputError
from steadytrain.export.serve import ServeSettings, Service
from steadytrain.machine import facts
from steadytrain.machine.process import ASKED_TWICE_SECONDS, keep_memory
from steadytrain.machine.web_server import BACKLOG, LimitedServer, ServerLimits
from steadytrain.reports.live import HOSTS
from steadytrain.training import Trained

HEAD_SECONDS, KEEP_ALIVE_SECONDS = 10.0, 65
PROBES = ("/health", "/ping", "/ready")
"""Answered whatever else is at hand: who is not answered here would stop the server."""


class _Server(LimitedServer):
    """A server whose first signal lets requests at hand be answered, and whose second ends the process at once."""

    def __init__(self, service: Service, limits: ServerLimits, on_ready: Callable[[Service], object]) -> None:
        times = {"timeout_keep_alive": KEEP_ALIVE_SECONDS, "timeout_graceful_shutdown": 1}
        super().__init__(service.app, limits, **times)
        self._service, self._on_ready, self._is_announced = service, on_ready, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining_since is None:
            self._service.draining_since = time.monotonic()
        elif time.monotonic() > self._service.draining_since + ASKED_TWICE_SECONDS:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

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
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter of a name that is none: a..b
        why = getattr(error, "strerror", None) or "it is no name of a machine"
        raise InputError(f"cannot listen on {host} port {port} ({why}): choose another --host or --port") from error


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
    seconds = settings.timeout_seconds
    limits = ServerLimits(head_seconds=min(HEAD_SECONDS, seconds), answer_seconds=seconds, free_paths=PROBES)
    server = _Server(service, limits, on_ready)

    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each broken form

    async def answer() -> None:
        service.batcher.start()
        await server.serve(sockets=[listener])

    try:
        asyncio.run(answer())
    finally:
        service.close()
    if service.batcher.failure is not None:
        raise service.batcher.failure
    return service.num_cut
