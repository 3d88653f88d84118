"""The live page of a run, or of all runs of a folder: a server for browsers on this machine, with server-sent events.

It listens on 127.0.0.1 alone and answers only to that name, so that no page of the network can read it through a
browser. Nothing is read while nobody looks; each look reads what was written since the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import re
import secrets
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadytrain.cost.prices import Price
from steadytrain.errors import InputError
from steadytrain.events import DeviceStats
from steadytrain.format import NONE, clean, duration, money, number, percent, rate, whole_number
from steadytrain.machine.process import return_free_memory
from steadytrain.machine.web_server import LimitedServer, ServerLimits
from steadytrain.monitor.series import COLUMNS, MAX_POINTS, THINNED_BY, ChartPoint, ChartRow, six_digits
from steadytrain.reports.charts import LIVE_CHARTS, MAX_CURVES, TEMPLATES, score_chart, style
from steadytrain.reports.page import best_hero, packed_plotly, probe_heroes, render, script, test_heroes
from steadytrain.reports.run_list import DAMAGED, RunRow, list_runs, row_cells, sort_rows
from steadytrain.reports.status import milestones
from steadytrain.reports.time_spent import BUCKETS_SHOWN, largest_buckets, stacked
from steadytrain.reports.verdict import ceiling_line
from steadytrain.reports.watch import RunSnapshot, Watch, snapshot
from steadytrain.run import Run

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
LIMITS = ServerLimits(connections=128, requests=96, answer_seconds=10.0)
MAX_STREAMS = 32
"""Pages that are sent events at the same time; each may have all of a run's points under way."""
MAX_PAGES = 8
"""Pages of runs that are kept though nobody looks at them."""
SLICES = 240
MAX_MILESTONES = 40
TYPED = ("--", "steady ", "taskset ", "export ", "numactl ")  # a change that is typed as it stands


@dataclass(frozen=True)
class View:
    """The state of the run at one time: its points (the first ``count`` of them), and its texts as JSON."""

    generation: int
    points: Sequence[ChartPoint]
    count: int
    state: str
    account: str


class Viewer:
    """Read a run for all open pages: at most once a second, and not at all while none is open.

    Attributes:
        share: of the events that have been read, at first.
        num_streams: pages that are sent events.
    """

    def __init__(self, run: Run, price: Price | None = None) -> None:
        self.boot = secrets.token_hex(4)  # points are numbered anew by each server
        self.share = 0.0
        self.num_streams = 0
        self._price = price
        self._watch = Watch(run)
        self._lock = asyncio.Lock()
        self._last: tuple[float, View] | None = None
        self._account: tuple[object, str] = (None, "")

    async def view(self) -> View:
        """Return the run's state, at most a second old."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] >= LOOK_SECONDS * 0.9:
                view = await asyncio.to_thread(self._look)
                self._last = (time.monotonic(), view)
            return self._last[1]

    def _look(self) -> View:
        watch = self._watch
        for share in watch.read_in_parts():
            self.share = share
        now = snapshot(watch, price=self._price)
        facts = (watch.generation, watch.history.num_facts, now.signs.status)
        if self._account[0] != facts:
            self._account = (facts, _json(account(watch, now)))
        points = watch.history.points
        return View(watch.generation, points, len(points), _json(state(now)), self._account[1])


class _RunPage:
    """The page of one run: its files, and its events as they come.

    Args:
        price: of an hour of each of its machines; None: what it recorded, if anything.
        closing: whether the server is about to stop: streams then end.
        up: the address of the page of all runs, from this one; empty: there is none.
    """

    def __init__(self, run: Run, price: Price | None, closing: Callable[[], bool], up: str = "") -> None:
        self.viewer = Viewer(run, price)
        self._closing = closing
        constants = {
            "columns": {name: list(columns) for name, columns in COLUMNS.items()},
            "buckets": {name: {"label": look.label, "colour": look.colour} for name, look in BUCKETS_SHOWN.items()},
            "limit": MAX_POINTS,
            "thinned": THINNED_BY,
            "charts": [asdict(chart) for chart in LIVE_CHARTS],
        }
        shown = {"name": run.name, "model": run.recipe.model.name, "directory": str(run.directory)}
        names = {key: clean(text) for key, text in shown.items()} | {"up": up}
        self._fixed = {
            "": ("text/html", render("live.html.j2", constants, charts=LIVE_CHARTS[:-1], **names).encode()),
            **_styles(),
            "live.js": ("text/javascript", script("live.js").encode()),
        }

    async def answer(self, path: str, request: Request) -> Response:
        """Return one of the page's files, or the stream of its events."""
        if path == "plotly.js":
            return await asyncio.to_thread(_plotly)
        if path != "events":
            return _still(self._fixed, path)
        if self.viewer.num_streams >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages of this run are open, as many as there may be: close one"
            return PlainTextResponse(text, status_code=503, headers={"retry-after": "5"})
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return _Events(self.viewer, _stream(self.viewer, after, self._closing))


class _FolderPage:
    """The page of all runs of a folder, which leads to the page of each.

    The list is read while somebody looks, so often that it takes at most a fifth of a processor.
    """

    def __init__(self, folder: Path, closing: Callable[[], bool]) -> None:
        self._folder, self._closing = folder, closing
        self._look: asyncio.Task[None] | None = None
        self._looked = -math.inf
        self._took = 0.0
        self._rows: list[RunRow] | None = None
        self._error = ""
        self._pages: OrderedDict[str, _RunPage] = OrderedDict()
        self._name = clean(str(Path.cwd() if folder == Path() else folder))
        self._fixed = {**_styles(), "runs.js": ("text/javascript", script("page.js", "sort.js", "runs.js").encode())}

    async def answer(self, path: str, request: Request) -> Response:
        """Return one of the page's files, the rows as JSON, or what a run's own page has."""
        first, _, rest = path.partition("/")
        if first == "run":
            key, slash, rest = rest.partition("/")
            await self._read()
            row = next((row for row in self._rows or () if key_of(row) == key and row.status != DAMAGED), None)
            if row is None or not slash:
                return PlainTextResponse("there is no such run", status_code=404)
            return await self._page(key, row).answer(rest, request)
        if path == "plotly.js":
            return await asyncio.to_thread(_plotly)
        if path not in ("", "runs.json"):
            return _still(self._fixed, path)
        await self._read()
        kind, text = ("application/json", _json(self._document())) if path else ("text/html", self._page_of_runs())
        return Response(text, media_type=kind, headers={"cache-control": "no-store"})

    async def _read(self) -> None:
        """Look again where that is due; wait for it a moment at most, as it may take long the first time."""
        if self._look is None or self._look.done():
            if time.monotonic() - self._looked < max(LOOK_SECONDS, 4 * self._took):
                return
            self._look = asyncio.create_task(asyncio.to_thread(self._list))
        await asyncio.wait({self._look}, timeout=LOOK_SECONDS)

    def _list(self) -> None:
        began = time.monotonic()
        try:
            self._rows, self._error = list_runs(self._folder), ""
        except InputError as error:
            self._rows, self._error = [], clean(str(error))
        self._looked = time.monotonic()
        self._took = self._looked - began

    def _sorted(self) -> list[RunRow]:
        """Return the runs of each data set, the best first; accuracies on different images do not compare."""
        rows = sort_rows(self._rows or [], "best")
        sets = list(dict.fromkeys(row.data for row in rows))
        return sorted(rows, key=lambda row: sets.index(row.data))

    def _document(self) -> dict[str, Any]:
        rows, now = self._sorted(), time.time()
        keys = ["" if row.status == DAMAGED else key_of(row) for row in rows]
        shown = [{"key": key, "began": r.began or 0.0, **row_cells(r, now)} for key, r in zip(keys, rows, strict=True)]
        counts = Counter(row.status for row in rows)
        words = ", ".join(f"{number} {status}" for status, number in counts.most_common())
        return {"reading": self._rows is None, "error": self._error, "counts": words, "rows": shown}

    def _page_of_runs(self) -> str:
        """Return the page, with the curves of the best runs over each other."""
        document, rows = self._document(), self._sorted()
        drawn = [i for i, row in enumerate(rows) if row.curve and len(row.curve["y"]) > 1][:MAX_CURVES]
        for run, i in enumerate(drawn):
            document["rows"][i]["curve"] = run
        runs = [{"name": rows[i].name, **style(run)} for run, i in enumerate(drawn)]
        curves = {"runs": runs, "figures": score_chart([rows[i].curve for i in drawn])}
        names = row_cells(RunRow(name="", directory="", status=""), 0.0)
        heads = [head for head in names if any(cell[head] for cell in document["rows"])]
        return render("runs.html.j2", curves, folder=self._name, heads=heads, **document)

    def _page(self, key: str, row: RunRow) -> _RunPage:
        """Return a run's page; of those that nobody looks at only the newest are kept."""
        if key not in self._pages:
            self._pages[key] = _RunPage(Run.open(row.directory), None, self._closing, up="../../")
        self._pages.move_to_end(key)
        for old in [old for old, page in self._pages.items() if not page.viewer.num_streams][:-MAX_PAGES]:
            del self._pages[old]
        return self._pages[key]


def key_of(row: RunRow) -> str:
    """Return what stands for a run in the address of its page; it may be called anything."""
    return hashlib.sha256(row.name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _styles() -> dict[str, tuple[str, bytes]]:
    return {name: ("text/css", (TEMPLATES / name).read_bytes()) for name in ("page.css", "live.css")}


def _still(files: Mapping[str, tuple[str, bytes]], path: str) -> Response:
    if path not in files:
        return PlainTextResponse("there is no such page", status_code=404)
    media_type, content = files[path]
    return Response(content, media_type=media_type, headers={"cache-control": "no-store"})


def application(
    shown: Run | Path, *, price: Price | None = None, closing: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Return the page of a run, or of a folder of runs, as an ASGI application.

    Args:
        price: of an hour of each of a run's machines; None: what it recorded, if anything.
        closing: whether the server is about to stop: streams then end.
    """
    page = _RunPage(shown, price, closing) if isinstance(shown, Run) else _FolderPage(shown, closing)

    async def answer(request: Request) -> Response:
        return await page.answer(request.path_params["path"], request)

    return guarded(Starlette(routes=[Route("/{path:path}", answer)]))


def make_server(shown: Run | Path, *, price: Price | None = None) -> uvicorn.Server:
    """Return a server of the page of a run, or of a folder of runs; set ``should_exit`` to end it."""
    app = application(shown, price=price, closing=lambda: server.should_exit)
    server = LimitedServer(app, LIMITS, timeout_graceful_shutdown=3)
    return server


def serve(
    shown: Run | Path, listener: socket.socket, *, price: Price | None = None, seconds: float | None = None
) -> None:
    """Serve until Ctrl-C, or for so many seconds."""
    server = make_server(shown, price=price)

    async def answer() -> None:
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, lambda: setattr(server, "should_exit", True))
        await server.serve(sockets=[listener])

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(answer())


def listening(port: int | None = None) -> socket.socket:
    """Open a socket on the loopback interface: on ``port``, else on the usual port, or a free one if that is taken.

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
            f"port {port} is not available ({error.strerror}): choose another --port, or leave it out for a free one"
        ) from error


class _Events(StreamingResponse):
    """A stream of events, counted while it is open."""

    def __init__(self, viewer: Viewer, stream: AsyncIterator[str]) -> None:
        super().__init__(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._viewer.num_streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._viewer.num_streams -= 1
            if not self._viewer.num_streams:
                return_free_memory()


async def _stream(viewer: Viewer, after: str, closing: Callable[[], bool]) -> AsyncIterator[str]:
    """Send ``all`` points once, then new ones, and texts when they change (server-sent events)."""
    first = asyncio.create_task(viewer.view())
    while not (await asyncio.wait({first}, timeout=0.5))[0]:
        yield _message("reading", _json(viewer.share))
    sent_last, place, heard = dict[str, str](), _place(viewer, after), time.monotonic()
    while not closing():
        view = await viewer.view()
        parts = [_new_points(viewer, view, place)]
        for kind, text in {"account": view.account, "state": view.state}.items():
            if sent_last.get(kind) != text:
                sent_last[kind] = text
                parts.append(_message(kind, text))
        place = (view.generation, view.count)
        if sent := "".join(parts):
            heard = time.monotonic()
            yield sent
        elif time.monotonic() - heard > ALIVE_SECONDS:
            heard = time.monotonic()
            yield ": still here\n\n"
        for _ in range(4):  # short, so that Ctrl-C is heard
            if not closing():
                await asyncio.sleep(LOOK_SECONDS / 4)


def _new_points(viewer: Viewer, view: View, place: tuple[int, int] | None) -> str:
    """Return the points that the browser lacks: all, or those after its last one; '' if it has all."""
    name = f"{viewer.boot}.{view.generation}.{view.count}"
    rows: dict[str, list[ChartRow]] = {}
    is_new = place is None or place[0] != view.generation or place[1] > view.count
    for point in view.points[0 if is_new or place is None else place[1] : view.count]:
        rows.setdefault(point.series, []).append(tuple(map(six_digits, point.row)))
    if is_new:
        return _message("all", _json(rows), name)
    return _message("more", _json(rows), name) if rows else ""


def _place(viewer: Viewer, after: str) -> tuple[int, int] | None:
    """Parse the generation and number of the last point that a browser has; None where it has none of this server."""
    boot, _, numbers = after.partition(".")
    generation, _, count = numbers.partition(".")
    begun, point = whole_number(generation), whole_number(count)
    return None if boot != viewer.boot or begun is None or point is None else (begun, point)


def _message(kind: str, data: str, name: str = "") -> str:
    return f"event: {kind}\n" + (f"id: {name}\n" if name else "") + f"data: {data}\n\n"


def _json(value: Any) -> str:
    """Return one line, as a server-sent event must be; JSON escapes line ends within texts."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


@functools.cache
def _plotly() -> Response:
    headers = {"content-encoding": "gzip", "cache-control": "private, max-age=86400"}
    return Response(packed_plotly(), media_type="text/javascript", headers=headers)


def guarded(app: ASGIApp, *, hosts: Collection[str] | None = HOSTS, origins: Collection[str] = ()) -> ASGIApp:
    """Answer only requests to one of these hosts, and of no other site's page; add a strict content security policy.

    Args:
        hosts: names without a port; None: any. No page of the network can reach this machine's own by another name.
        origins: of pages of other sites that may ask; ``*``: of all.
    """

    async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        names = [value.decode("latin-1").lower() for name, value in scope.get("headers", []) if name == b"host"]
        if hosts is not None and (len(names) != 1 or PORT_OF_HOST.sub("", names[0]) not in hosts):
            error = "this page is available on its own machine only: open it as 127.0.0.1"
        elif _is_of_another_site(scope, origins):
            error = "pages of other sites are refused: steady serve --allow-origin ORIGIN allows one"
        else:
            await app(scope, receive, send_with_headers)
            return
        await JSONResponse({"error": error}, 403)(scope, receive, send_with_headers)

    return guarded_app


def _is_of_another_site(scope: Scope, origins: Collection[str]) -> bool:
    """Return whether a browser asks for another site's page (Fetch Metadata, or Origin), other than by a link."""
    headers = dict(scope.get("headers", []))
    origin, site = headers.get(b"origin", b""), headers.get(b"sec-fetch-site", b"none")
    is_own = site in (b"none", b"same-origin")
    if b"sec-fetch-site" not in headers and origin and scope["method"] == "POST":  # an older browser, or plain HTTP
        is_own = origin.partition(b"://")[2] == headers.get(b"host")
    if is_own or "*" in origins or origin.decode("latin-1") in origins:
        return False
    return not (scope["method"] in ("GET", "HEAD") and headers.get(b"sec-fetch-mode") == b"navigate")


def state(now: RunSnapshot) -> dict[str, Any]:
    """Format what changes from second to second: progress, speed, time left."""
    progress, feed, resources = now.progress, now.feed, now.resources
    share, words = now.bar or (0.0, "")
    return {
        "status": now.signs.status,
        "silent": now.signs.silent or now.stalled is not None,
        "standing": str(now.signs),
        "alarms": list(now.alarms()),
        "share": round(share, 4),
        "percent": percent(share, 0) if words else "",
        "epochs": words,
        "steps": f"step {progress.step:,} of {progress.steps:,}" if progress.steps else "",
        "seconds": round(now.seconds, 1),
        "score": "mAP" if now.is_multi_label else "Top-1 accuracy",
        "heroes": _heroes(now),
        "feed": resources.get("batches ready", ""),
        "starved": "" if feed is None else percent(feed.starved, 0),
        "cores": resources.get("cores", ""),
        "memory": resources.get("memory", ""),
        "devices": [_device(device, resources[f"GPU {device.index}"]) for device in now.devices],
    }


def account(watch: Watch, now: RunSnapshot) -> dict[str, Any]:
    """Format what changes at each account: the ledger, as a table and over time, the verdict, milestones."""
    document: dict[str, Any] = {"rows": [], "timeline": None, "verdict": None, "happened": [], "missing": ""}
    ledger, diagnosis = now.ledger, now.diagnosis
    if ledger is not None:
        document["wall"] = duration(ledger.wall_seconds)
        document["rows"] = [
            {
                "name": name,
                "label": now.label(name),
                "seconds": duration(ledger.seconds[name]),
                "share": percent(ledger.share(name), 1),
            }
            for name in largest_buckets(ledger)
        ]
        document["timeline"] = stacked(watch.history.timeline(SLICES))
        document["happened"] = milestones(watch.history)[-MAX_MILESTONES:][::-1]
    if diagnosis is not None:
        first, *more = (
            {
                "sentence": cause.sentence,
                "share": percent(cause.share, 0) if cause.share >= 0.005 else "",
                "evidence": list(cause.evidence),
                "change": cause.change,
                "typed": cause.change.startswith(TYPED),
                "saves": cause.saving,
            }
            for cause in diagnosis.causes
        )
        is_sound = diagnosis.causes[0].name == "nothing"
        document["verdict"] = {**first, "then": more[:2], "ceiling": "" if is_sound else ceiling_line(diagnosis)}
        document["missing"] = "; ".join(diagnosis.not_measurable)
    return document


def _heroes(now: RunSnapshot) -> list[dict[str, str]]:
    def hero(label: str, value: str, more: str = "") -> dict[str, str]:
        return {"label": label, "value": value, "more": more}

    best, rates = now.best, now.images_per_second
    loss = None if now.logged is None else f"loss {number(now.logged.loss, 4)}"
    if best is None:
        more = "no evaluation yet" if loss is None else f"in training; {loss}"
        name = "Exact match" if now.is_multi_label else "Top-1 accuracy"
        heroes = [hero(name, percent(now.logged.top1 if now.logged else None, 1), more)]
    else:
        label, value, more = best_hero(best, now.is_multi_label)
        heroes = [hero(label, value, more + ("" if loss is None else f"; train {loss}"))]
    heroes += [hero(*words) for words in test_heroes(now.test)]
    steady = f"{rate(rates.steady)} steady, {rate(rates.overall)} overall" if rates.overall else ""
    if not now.progress.step and now.probe is not None:
        heroes += [hero(*words) for words in probe_heroes(now.probe)]
    elif rates.now is None:
        heroes.append(hero("Images per second", rate(rates.steady), steady))
    else:
        heroes.append(hero("Images per second, now", rate(rates.now), steady))
    heroes = [hero for hero in heroes if hero["value"] != NONE or now.signs.status == "running" or hero is heroes[0]]
    per_epoch = duration(now.seconds / now.progress.epoch) + " an epoch" if now.progress.epoch >= 1 else ""
    heroes.append(hero("Wall time", duration(now.seconds) if now.started else NONE, per_epoch))
    if now.signs.status == "running" and now.progress.steps:
        left = now.remaining_seconds
        more = "evaluations and checkpoints included" if left is not None else "available after the first log lines"
        heroes.append(hero("Time left", duration(left), more))
    if now.cost is not None:
        bill = now.cost
        at_end = f"about {money(bill.at_end)} at the end; " if bill.at_end is not None else ""
        dated = f", price of {bill.price.date}" if bill.price.date else ""
        more = f"{at_end}{bill.per_hour:.6g} {bill.currency} an hour{dated}"
        heroes.append(hero("Cost so far", f"{money(bill.so_far)} {bill.currency}", more))
    return heroes


def _device(device: DeviceStats, words: str) -> dict[str, Any]:
    missing = f"not measurable here: {', '.join(device.missing)}" if device.missing else ""
    return {"index": device.index, "name": device.name, "now": words, "missing": missing}
