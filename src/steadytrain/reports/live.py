"""The page of a run that is watched: a server for the browsers of this machine, and events as they come.

It listens on 127.0.0.1 alone and answers only to that name, so that no page of the network can read it through a
browser. Nothing is read while nobody looks; each look reads what was written since the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadytrain import __version__
from steadytrain.errors import InputError
from steadytrain.reports import live_words, points
from steadytrain.reports.buckets import SHOWN
from steadytrain.reports.curves import MAX_POINTS
from steadytrain.reports.points import Point
from steadytrain.reports.snapshot import now
from steadytrain.reports.watched import Watched
from steadytrain.run import Run

TEMPLATES = Path(__file__).parent / "templates"
HOSTS = {"127.0.0.1", "localhost"}
PORT_OF_HOST = re.compile(r":\d+$")  # any: the page may come through a tunnel
PORT = 8321
LOOK_SECONDS = 1.0
ALIVE_SECONDS = 15.0
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
COLUMNS = {"train": points.TRAIN, "val": points.VAL, "rate": points.RATE, "feed": points.FEED}
COLUMNS |= {"machine": points.MACHINE, "device": points.DEVICE}


@dataclass(frozen=True)
class Look:
    """What a look at the run saw: its points (the first ``count`` of them), and its words as JSON."""

    generation: int
    points: Sequence[Point]
    count: int
    state: str
    account: str


class Looking:
    """Looks at a run for all who have its page open: at most once a second, and not at all where there is nobody."""

    def __init__(self, run: Run, price: float | None = None) -> None:
        self.boot = secrets.token_hex(4)  # points are numbered anew by each server
        self.share = 0.0
        self._price = price
        self._watched = Watched(run)
        self._lock = asyncio.Lock()
        self._last: tuple[float, Look] | None = None
        self._account: tuple[object, str] = (None, "")

    async def look(self) -> Look:
        """The run now, or as it was less than a second ago."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] >= LOOK_SECONDS * 0.9:
                look = await asyncio.to_thread(self._look)
                self._last = (time.monotonic(), look)
            return self._last[1]

    def _look(self) -> Look:
        for share in self._watched.reading():
            self.share = share
        seen = now(self._watched, price=self._price)
        told = self._watched.told
        facts = (self._watched.generation, told.facts, seen.signs.status)
        if self._account[0] != facts:
            self._account = (facts, _json(live_words.account(self._watched, seen)))
        state = _json(live_words.state(seen))
        return Look(self._watched.generation, told.points, len(told.points), state, self._account[1])


def application(run: Run, *, price: float | None = None, closing: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The page of a run.

    Args:
        run: to watch.
        price: of an hour of its machine.
        closing: whether the server is about to stop: streams then end.
    """
    looking = Looking(run, price)
    fixed = {
        "/": ("text/html", _page(run).encode()),
        "/page.css": ("text/css", (TEMPLATES / "page.css").read_bytes()),
        "/live.css": ("text/css", (TEMPLATES / "live.css").read_bytes()),
        "/live.js": ("text/javascript", (TEMPLATES / "live.js").read_bytes()),
    }

    def still(request: Request) -> Response:
        media_type, content = fixed[request.url.path]
        return Response(content, media_type=media_type, headers={"cache-control": "no-store"})

    def plotly(request: Request) -> Response:
        return _plotly()

    def events(request: Request) -> Response:
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        stream = _stream(looking, after, closing)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    routes = [Route(path, still) for path in fixed]
    return _guarded(Starlette(routes=[*routes, Route("/plotly.js", plotly), Route("/events", events)]))


def server(run: Run, *, price: float | None = None) -> uvicorn.Server:
    """A server of the page; set ``should_exit`` to end it."""
    app = application(run, price=price, closing=lambda: made.should_exit)
    made = uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
    )
    return made


def serve(run: Run, listener: socket.socket, *, price: float | None = None, seconds: float | None = None) -> None:
    """Answer until Ctrl-C, or for so many seconds."""
    made = server(run, price=price)

    async def answer() -> None:
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, lambda: setattr(made, "should_exit", True))
        await made.serve(sockets=[listener])

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(answer())


def listening(port: int | None = None) -> socket.socket:
    """A socket on this machine alone: on ``port``, or on the usual one, or, where that is taken, on a free one.

    Raises:
        InputError: the port that was asked for cannot be had.
    """
    if port is not None and not 0 <= port <= 65535:
        raise InputError(f"--port is {port}; a port is from 1 to 65535")
    try:
        return socket.create_server(("127.0.0.1", PORT if port is None else port))
    except OSError as error:
        if port is None:
            return socket.create_server(("127.0.0.1", 0))
        raise InputError(
            f"port {port} cannot be had ({error.strerror}): choose another --port, or leave it out for a free one"
        ) from error


async def _stream(looking: Looking, after: str, closing: Callable[[], bool]) -> AsyncIterator[str]:
    """Server-sent events: ``all`` points once, then those that are new; words where they changed."""
    first = asyncio.create_task(looking.look())
    while not (await asyncio.wait({first}, timeout=0.5))[0]:
        yield _message("reading", _json(looking.share))
    where, told, heard = _where(looking, after), dict[str, str](), time.monotonic()
    while not closing():
        look = await looking.look()
        parts = [_points(looking, look, where), *_news(told, {"account": look.account, "state": look.state})]
        where = (look.generation, look.count)
        if sent := "".join(parts):
            heard = time.monotonic()
            yield sent
        elif time.monotonic() - heard > ALIVE_SECONDS:
            heard = time.monotonic()
            yield ": still here\n\n"
        for _ in range(4):  # short, so that Ctrl-C is heard
            if not closing():
                await asyncio.sleep(LOOK_SECONDS / 4)


def _news(told: dict[str, str], given: dict[str, str]) -> Iterable[str]:
    for kind, text in given.items():
        if told.get(kind) != text:
            told[kind] = text
            yield _message(kind, text)


def _points(looking: Looking, look: Look, where: tuple[int, int] | None) -> str:
    """What the browser lacks: everything, thinned, or the rows since the last that it has; nothing if it has all."""
    name = f"{looking.boot}.{look.generation}.{look.count}"
    if where is None or where[0] != look.generation or where[1] > look.count:
        return _message("all", _json(_rows(look.points[: look.count], thin=True)), name)
    if where[1] == look.count:
        return ""
    return _message("more", _json(_rows(look.points[where[1] : look.count])), name)


def _rows(new: Sequence[Point], *, thin: bool = False) -> dict[str, list[points.Row]]:
    rows: dict[str, list[points.Row]] = {}
    for point in new:
        rows.setdefault(point.series, []).append(point.row)
    if not thin:
        return rows
    # The column by which a series is thinned is the one whose spikes are to be seen.
    by = {"train": points.TRAIN.index("loss"), "val": points.VAL.index("loss"), "rate": points.RATE.index("steady")}
    return {series: points.thinned(held, by.get(series, 1)) for series, held in rows.items()}


def _where(looking: Looking, after: str) -> tuple[int, int] | None:
    """Generation and number of the last point that a browser has, as it says; None where that tells nothing."""
    boot, _, rest = after.partition(".")
    generation, _, count = rest.partition(".")
    if boot != looking.boot or not (generation.isdecimal() and count.isdecimal()):
        return None
    return int(generation), int(count)


def _message(kind: str, data: str, name: str = "") -> str:
    return f"event: {kind}\n" + (f"id: {name}\n" if name else "") + f"data: {data}\n\n"


def _json(value: Any) -> str:
    """One line, as a server-sent event must be; JSON escapes line ends within texts."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _page(run: Run) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    told = {
        "columns": {name: list(columns) for name, columns in COLUMNS.items()},
        "buckets": {name: {"label": one.label, "colour": one.colour} for name, one in SHOWN.items()},
        "limit": MAX_POINTS,
    }
    # JSON that can stand in an element whatever is in it.
    data = _json(told).replace("<", "\\u003c").replace("&", "\\u0026")
    return environment.get_template("live.html.j2").render(
        name=run.name,
        model=run.recipe.model.name,
        directory=str(run.directory),
        version=__version__,
        data=Markup(data),
    )


@functools.cache
def _plotly() -> Response:
    from plotly.offline import get_plotlyjs

    packed = gzip.compress(get_plotlyjs().encode(), 5, mtime=0)
    headers = {"content-encoding": "gzip", "cache-control": "private, max-age=86400"}
    return Response(packed, media_type="text/javascript", headers=headers)


def _guarded(app: ASGIApp) -> ASGIApp:
    """Answer only who asks for this machine by its own name, and say with each answer what the page may do."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        hosts = [value.decode("latin-1").lower() for name, value in scope.get("headers", []) if name == b"host"]
        if len(hosts) == 1 and PORT_OF_HOST.sub("", hosts[0]) in HOSTS:
            await app(scope, receive, send_with_headers)
        else:
            refusal = PlainTextResponse("this page is for its own machine: open it as 127.0.0.1", status_code=403)
            await refusal(scope, receive, send_with_headers)

    return guarded
