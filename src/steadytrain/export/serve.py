"""A model over HTTP: ``POST /predict``, health, metrics, and a page to drop a picture on.

The event loop reads requests, within limits on bytes, time and connections, and answers them; :mod:`batching` decodes
and computes. What a client does wrong is a status from 400 to 499 and one line of JSON, ``{"error": ...}``; an image
that cannot be used costs the others of its request nothing.

Where an answer is given before a request was read to its end, a bounded rest of it is read and thrown away before the
connection is closed: closed at once, it would be reset, and the client might never see the answer.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import math
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from steadytrain.data.images.decode import BadImageError
from steadytrain.errors import InputError, SteadyError
from steadytrain.export.batching import Answer, Batcher, BusyError, PassError, TooManyPixelsError
from steadytrain.export.fetch import FetchError, fetch, parse_prefix
from steadytrain.export.openapi import description_of_api, page_of_api
from steadytrain.export.payload import (
    HOW,
    KEYS,
    Posted,
    inflated,
    read_body,
    read_form,
    refusal,
    require_options,
    too_large,
    too_many_images,
    valid,
)
from steadytrain.files import Closing
from steadytrain.machine.web_server import Early
from steadytrain.models.registry import licence_note
from steadytrain.reports.charts import TEMPLATES
from steadytrain.reports.live import guarded
from steadytrain.reports.mistakes import PHOTOGRAPH_PIXELS, open_pictures, thumbnail
from steadytrain.reports.page import render, script
from steadytrain.reports.run_list import list_runs
from steadytrain.reports.summary import Account
from steadytrain.run import Run
from steadytrain.training import Trained
from steadytrain.training.inference.heat_maps import MEANING, PASSES, data_address, draw

MAX_HELD_BYTES = 256 * 2**20
"""The most bytes of all requests at hand, unless one request may have more: what is beyond gets 429."""
FETCHES = 8  # addresses that are read at the same time, for all requests
DROPPED = 499  # as nginx has it: the client went away
PAGE_FILES = ("/", "/docs", "/page.css", "/serve.css", "/serve.js")
OPEN_PATHS = (*PAGE_FILES, "/openapi.json", "/health", "/ping", "/ready")
"""Paths that need no token: the page without anything of the model, and health probes."""
OF_PROXIES = ("forwarded", "x-forwarded-for", "x-real-ip", "via")  # their headers: they may ask for anybody
ROUTES = (*OPEN_PATHS, "/predict", "/model", "/example", "/metrics")
PREDICT_PATHS = (
    *("/predict", "/predict/", "/predict/{name}", "/invocations"),
    *("/predictions/{name}", "/v1/models/{name}:predict"),
)
"""Ours; curl -T adds the file's name after a slash; then those of SageMaker, TorchServe and TensorFlow Serving."""
_PREDICT = re.compile("|".join(re.sub(r"\{name\}", "[^/]+", path) for path in PREDICT_PATHS))
T = TypeVar("T")
STAGES = ("queue", "decode", "network")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Limits and timeouts of a server.

    Args:
        threads: that decode.
        max_batch: images in a pass of the network at most; None: chosen by measuring.
        max_wait_ms: that a decoded image waits at most for others that are being received or decoded.
        max_queue: images before the network at most; more get 429.
        max_bytes: of a request, and of an image that is fetched.
        max_pixels: of an image.
        max_images: of a request.
        timeout_seconds: for a client to send a request, for its answer, and for the client to take that.
        grace_seconds: for requests at hand, once the server was asked to stop.
        token: that clients send as ``Authorization: Bearer TOKEN``; None: everybody is answered.
        allow_urls: prefixes of addresses that images may be fetched from.
        allow_private: also where they are inside a network.
        allow_origins: origins of web pages that may use the server (CORS); ``*``: of all.
        abstain_at: share of answers that are to be right; answers that are less probable are not sure.
        json_log: write a line of JSON for each request on standard error.

    Raises:
        InputError: a value is out of range.
    """

    threads: int
    max_batch: int | None = None
    max_wait_ms: float = 5.0
    max_queue: int = 256
    max_bytes: int = 32 * 2**20
    max_pixels: int = 25_000_000
    max_images: int = 64
    timeout_seconds: float = 30.0
    grace_seconds: float = 20.0
    token: str | None = None
    allow_urls: tuple[str, ...] = ()
    allow_private: bool = False
    allow_origins: tuple[str, ...] = ()
    json_log: bool = False
    abstain_at: float | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("threads", 1, 256),
            ("max_batch", 1, 4096),
            ("max_wait_ms", 0, 60_000),
            ("max_queue", 1, 1_000_000),
            ("max_bytes", 1, 2**31),
            ("max_pixels", 1, 100_000_000),
            ("max_images", 1, 100_000),
            ("timeout_seconds", 0.1, 3600),
            ("grace_seconds", 0, 3600),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"--{name.replace('_', '-')} is {value:,}; it must be from {low:,} to {high:,}")
        if self.max_images > self.max_queue:
            raise InputError(
                f"--max-images is {self.max_images:,} and --max-queue {self.max_queue:,}: the queue must hold a request"
            )
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise InputError("--token is empty, or has other than printable ASCII characters: choose another one")
        for prefix in self.allow_urls:
            parse_prefix(prefix)
        for origin in self.allow_origins:
            if origin != "*" and not re.fullmatch(
                r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:\d+)?|https?://\[[0-9a-f:]+\](:\d+)?", origin
            ):
                raise InputError(
                    f"--allow-origin is {origin!r}; it must be a page's scheme, host and port without a path, such as"
                    " http://localhost:3000, or * for all pages"
                )


class ServeMeters:
    """Metrics for Prometheus; docs/serve.md has the table."""

    def __init__(self, queued: Callable[[], float], in_flight: Callable[[], float]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("steady_requests", "Requests.", ["route", "status"], registry=registry)
        self.images = Counter("steady_images", "Images of answered requests.", ["outcome"], registry=registry)
        self.info = Gauge("steady_model_info", "The model: always 1.", ["name", "version"], registry=registry)
        Gauge("steady_queue_images", "Images before the network.", registry=registry).set_function(queued)
        Gauge("steady_requests_in_flight", "Requests not answered yet.", registry=registry).set_function(in_flight)
        sizes = [2**k for k in range(11)]
        self._batch = Histogram("steady_batch_images", "Images in a pass.", buckets=sizes, registry=registry)
        seconds: dict[str, Any] = {"buckets": SECONDS, "registry": registry}
        self.total = Histogram("steady_request_seconds", "Of a request for predictions, to its answer.", **seconds)
        stages = Histogram(
            "steady_stage_seconds", "Queue and decode: of an image; network: of a pass.", ["stage"], **seconds
        )
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        for outcome in ("ok", "error"):
            self.images.labels(outcome)

    def observe(self, what: str, value: float) -> None:
        """Record a measurement of the batcher: of a ``batch`` its images, of one of :data:`STAGES` its seconds."""
        (self._batch if what == "batch" else self._stages[what]).observe(value)


@dataclass(frozen=True)
class ServeResult:
    """The outcome of an image: an answer, or an error with its HTTP status."""

    name: str
    answer: Answer | None = None
    error: str = ""
    status: int = 422


class _InMemory(MultiPartParser):
    spool_max_size = 2**31  # a server may have no disk to write to; the request's bytes are limited
    is_whole = False

    def on_end(self) -> None:
        self.is_whole = True


class Body(Closing):
    """The bytes of one request as they come, within the limits; counted with those of all others while it is open."""

    def __init__(self, request: Request, service: Service) -> None:
        self._request, self._service, self._size = request, service, 0

    def close(self) -> None:
        """Count its bytes no more."""
        self._service.held_bytes -= self._size

    def count(self, size: int) -> None:
        """Add bytes that the request is to hold. Raises HTTPException where they are too many."""
        service, limit = self._service, self._service.settings.max_bytes
        self._size += size
        service.held_bytes += size
        if self._size > limit:
            raise too_large(f"more than {limit:,} bytes")
        if service.held_bytes > max(MAX_HELD_BYTES, limit):
            raise refusal(429, "the server holds as many bytes of requests as it may: try again", retry_after=1)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body. Raises HTTPException, ClientDisconnect."""
        limit, headers = self._service.settings.max_bytes, self._request.headers
        declared, encoding = headers.get("content-length", ""), headers.get("content-encoding", "identity")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large(f"{int(declared):,} bytes, more than {limit:,}")
        if encoding.strip().lower() not in ("", "identity"):
            async for piece in inflated(self._request.stream(), encoding, self.count):
                yield piece
                await asyncio.sleep(0)  # others are answered meanwhile
            return
        async for chunk in self._request.stream():
            self.count(len(chunk))
            yield chunk

    async def read(self) -> bytes:
        """Return all of it."""
        return b"".join([chunk async for chunk in self.chunks()])


class Service:
    """The application, with its state.

    Attributes:
        draining_since: when it was asked to stop (``time.monotonic()``); None: it was not.
        in_flight: requests that are not answered yet.
        num_cut: of them, those that the server did not wait for when it stopped.
        held_bytes: of requests that are being read.
    """

    def __init__(self, load: Callable[[], Trained], settings: ServeSettings, *, hosts: Collection[str] | None) -> None:
        self.settings = settings
        self.draining_since: float | None = None
        self.in_flight = self.num_cut = self.held_bytes = 0
        self.description: dict[str, Any] = {}
        self._is_private, self._picture = hosts is not None, ""
        self.meters = ServeMeters(lambda: self.batcher.queued, lambda: self.in_flight)
        self.batcher = Batcher(
            lambda: self._describe(load()),
            max_batch=settings.max_batch,
            max_wait=settings.max_wait_ms / 1000,
            max_queue=settings.max_queue,
            max_pixels=settings.max_pixels,
            threads=settings.threads,
            observe=self.meters.observe,
            abstain_at=settings.abstain_at,
        )
        self._fetches = asyncio.Semaphore(FETCHES)
        self._drawing = asyncio.Semaphore(1)  # a map lies over the whole picture: 16 bytes a pixel as it is decoded
        self._fetchers = ThreadPoolExecutor(FETCHES, "fetch")  # its own: a slow fetch holds up no other request
        self._routed = Starlette(
            routes=[
                *(Route(path, self._predict, methods=["POST", "PUT"]) for path in PREDICT_PATHS),
                *(Route(path, self._page_file) for path in PAGE_FILES),
                Route("/openapi.json", self._openapi),
                *(Route(path, self._health) for path in ("/health", "/ping")),
                Route("/ready", self._ready),
                Route("/model", self._model),
                Route("/example", self._example),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={HTTPException: _answer_refusal},
        )
        origins = settings.allow_origins
        methods, shown = ("GET", "POST", "PUT"), ("retry-after",)
        shared = CORSMiddleware(
            self._account, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=shown
        )
        self.app = guarded(shared if origins else self._account, hosts=hosts, origins=origins)

    def close(self) -> None:
        """End the threads."""
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self.batcher.close()

    def _describe(self, trained: Trained) -> Trained:
        self.description = describe(trained)
        if self._is_private:  # others may see no image of the data
            self._picture = _example_of(trained)
        self.meters.info.labels(trained.title, self.description["version"]).set(1)
        return trained

    @property
    def is_drained(self) -> bool:
        """Return whether the server was asked to stop, and may: all requests are answered, or their time is over."""
        if self.draining_since is None:
            return False
        return not self.in_flight or time.monotonic() - self.draining_since > self.settings.grace_seconds

    # -- around each request -------------------------------------------------------------------------------------------

    async def _account(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if its token is right; count it, and log it if that was asked for."""
        began, status = time.perf_counter(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        path = scope["path"]
        route = path if path in ROUTES else "/predict" if _PREDICT.fullmatch(path) else "other"
        self.in_flight += 1
        try:
            if path in OPEN_PATHS or scope["method"] == "OPTIONS" or self._has_token(scope):
                await self._routed(scope, receive, send_and_note)
            else:
                body = {"error": "this server needs a token: send the header Authorization: Bearer TOKEN"}
                await Early(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send_and_note)
        finally:
            self.in_flight -= 1
            self.meters.requests.labels(route, str(status)).inc()
            seconds = time.perf_counter() - began
            if route == "/predict":
                self.meters.total.observe(seconds)
            if self.settings.json_log:
                client = (scope.get("client") or ("",))[0]
                line = {"time": time.time(), "client": client, "method": scope["method"], "path": path}
                line |= {"status": status, "seconds": round(seconds, 6), "images": scope.get("num_images")}
                print(json.dumps(line), file=sys.stderr, flush=True)

    def _has_token(self, scope: Scope) -> bool:
        token = self.settings.token
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, value = sent.partition(b" ")
        return token is None or (kind.lower() == b"bearer" and secrets.compare_digest(value.strip(), token.encode()))

    # -- routes --------------------------------------------------------------------------------------------------------

    async def _page_file(self, request: Request) -> Response:
        content, media_type = _page_files()[request.url.path]
        return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(description_of_api(has_token=self.settings.token is not None))

    async def _ready(self, request: Request) -> Response:
        state: Literal["ready", "starting", "stopping"] = "ready" if self.batcher.is_ready else "starting"
        state = state if self.draining_since is None else "stopping"
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def _model(self, request: Request) -> Response:
        self._require_ready(is_early=False)
        judge = self.batcher.judge
        more = {"max_batch": self.batcher.max_batch, "limits": None if judge is None else judge.document}
        example = self._shows_picture(request)
        return JSONResponse(self.description | more | {"no_maps": self._why_no_maps, "example": example})

    def _shows_picture(self, request: Request) -> bool:
        """Return whether there is an example, and nothing says that a proxy asks for somebody else."""
        return bool(self._picture) and not any(name in request.headers for name in OF_PROXIES)

    async def _example(self, request: Request) -> Response:
        self._require_ready(is_early=False)
        if not self._shows_picture(request):
            raise refusal(404, "there is no example: its run or data are gone, or others are served", is_early=False)
        return Response(base64.b64decode(self._picture.partition(",")[2]), media_type="image/jpeg")

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.meters.registry), media_type=CONTENT_TYPE_LATEST)

    async def _predict(self, request: Request) -> Response:
        self._require_ready()
        limit = self.settings.timeout_seconds
        try:
            with Body(request, self) as body:
                with self.batcher.arriving():
                    try:
                        async with asyncio.timeout(limit):
                            posted, options = await self._read(request, body)
                    except TimeoutError:
                        raise refusal(408, f"the request was not complete after {limit:g} s: send it faster") from None
                    top, threshold, explain = self._options({**request.query_params, **options}, len(posted))
                    results = await _unless_gone(request, self._fetch_all(posted, body))
                    data = results[0].data if explain and isinstance(results[0], Posted) else b""
                    del posted  # each image is dropped once it is decoded
                    waiting = self._submit(results, explain=explain)
                await self._wait(request, list(waiting.values()))
                for index, future in waiting.items():
                    results[index] = _outcome(results[index].name, future)
                picture = await self._draw(data, results[0])
        except ClientDisconnect:
            return Response(status_code=DROPPED)
        request.scope["num_images"] = len(results)
        kind = content_type(request)
        if kind == "application/x-www-form-urlencoded" and len(results) == 1 and results[0].error:
            results[0] = replace(
                results[0], error=f"{results[0].error}; curl -d changes a file's bytes, {HOW} does not"
            )
        return self._answer(results, top, threshold, picture)

    @property
    def _why_no_maps(self) -> str | None:
        """Reason for no heat maps; None where there are."""
        seconds, most = PASSES / self.batcher.rate, self.settings.timeout_seconds / 2
        takes = f"a heat map takes {seconds:.0f} s here, of {most:g} s (half of --timeout-seconds)"
        return f"{takes}: steady predict --explain draws it" if seconds > most else None

    async def _draw(self, data: bytes, result: ServeResult | Posted) -> dict[str, str]:
        """Return the picture of a heat map as a data address, for the answer; empty where there is none."""
        answer = result.answer if isinstance(result, ServeResult) else None
        if answer is None or answer.heat_map is None or self.batcher.trained is None:
            return {}
        async with self._drawing:
            picture = await asyncio.to_thread(draw, self.batcher.trained, data, answer.heat_map)
        return {"map": data_address(picture)}

    def _require_ready(self, *, is_early: bool = True) -> None:
        if self.draining_since is not None:
            raise refusal(503, "the server is stopping: ask another one", retry_after=1, is_early=is_early)
        if not self.batcher.is_ready:
            raise refusal(503, "the model is being loaded: try again", retry_after=2, is_early=is_early)

    # -- from a request to its images ----------------------------------------------------------------------------------

    async def _read(self, request: Request, body: Body) -> tuple[list[Posted], Mapping[str, Any]]:
        """Read a request's images and options. Raises HTTPException, ClientDisconnect."""
        kind, most = content_type(request), self.settings.max_images
        options: Mapping[str, Any] = {}
        if kind == "multipart/form-data":
            posted, options = await self._read_form(request, body)
            form = "form"
        else:
            content = await body.read()
            if not content:
                raise refusal(400, f"the body is empty: send an image, as {HOW} does", is_early=False)
            posted, options, form = await asyncio.to_thread(read_body, content, kind, max_images=most)
        if not posted:
            names = ", ".join(repr(name[:40]) for name in sorted(options)[:8]) or "none"
            wanted = (
                'send "image": BASE64, or "url"' if form == "json" else "send files, as curl -F image=@cat.jpg does"
            )
            raise refusal(400, f"the request has no image; its keys: {names}. Please {wanted}", is_early=False)
        if len(posted) > most:
            raise too_many_images(len(posted), most)
        return posted, options

    async def _read_form(self, request: Request, body: Body) -> tuple[list[Posted], Mapping[str, Any]]:
        most = self.settings.max_images
        stream: Any = body.chunks()
        try:
            limit = self.settings.max_bytes
            parser = _InMemory(
                request.headers, stream, max_files=most, max_fields=most + len(KEYS), max_part_size=limit
            )
            form = await parser.parse()
        except MultiPartException as error:
            if "Too many files" in error.message:
                raise too_large(f"more than {most:,} images") from None
            boundary = "; leave the header content-type to your client" if "boundary" in error.message.lower() else ""
            raise refusal(400, f"the form cannot be read: {error.message}{boundary}") from None
        if not parser.is_whole:
            raise refusal(400, "the form cannot be read: its end is missing", is_early=False)
        items = form.multi_items()
        files = [value for _, value in items if isinstance(value, UploadFile)]
        posted = [Posted(valid(file.filename or ""), await file.read()) for file in files]
        await form.close()
        texts = [(name, value.encode("utf-8", "replace")) for name, value in items if isinstance(value, str)]
        more, options = read_form(texts, max_images=most)
        return posted + more, options

    def _options(self, options: Mapping[str, Any], num_images: int) -> tuple[int, float, bool]:
        """Return how many classes to answer at most, the threshold of labels, and whether to explain the first class.

        Raises:
            HTTPException: one is not possible.
        """
        trained = self.batcher.trained
        assert trained is not None
        options = require_options(options)
        top = _number(options, "top", "a whole number from 1", int, lambda value: value >= 1)
        threshold = _number(options, "threshold", "a probability from 0 to 1", float, lambda value: 0 <= value < 1)
        if threshold is not None and not trained.is_multi_label:
            raise refusal(400, "the model names one class for each image: leave out the threshold", is_early=False)
        explain = bool(_number(options, "explain", "0 or 1", int, lambda value: value in (0, 1)))
        if explain and (num_images > 1 or self._why_no_maps):
            many = f"explain takes one image at a time, not {num_images:,}"
            raise refusal(400, self._why_no_maps or many, is_early=False)
        usual = len(trained.classes) if trained.is_multi_label else 5
        return min(top or usual, len(trained.classes)), 0.5 if threshold is None else threshold, explain

    async def _fetch_all(self, posted: Sequence[Posted], body: Body) -> list[ServeResult | Posted]:
        """Fetch the images that a request names by address; what has none is a Result already."""
        settings = self.settings
        if not settings.allow_urls and any(image.url for image in posted):
            raise refusal(403, "this server fetches no addresses (--allow-url): send the image itself", is_early=False)

        async def get(image: Posted) -> ServeResult | Posted:
            if image.error:
                return ServeResult(image.name, error=image.error)
            if not image.url:
                return image
            try:
                async with self._fetches:
                    data = await fetch(
                        image.url,
                        settings.allow_urls,
                        max_bytes=settings.max_bytes,
                        seconds=settings.timeout_seconds / 2,
                        allow_private=settings.allow_private,
                        threads=self._fetchers,
                    )
                body.count(len(data))
            except FetchError as error:
                return ServeResult(image.name, error=str(error))
            return Posted(image.name, data)

        tasks = [asyncio.ensure_future(get(image)) for image in posted]
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                return list(await asyncio.gather(*tasks))
        except TimeoutError:
            message = f"the addresses were not read within {settings.timeout_seconds:g} s: send fewer at a time"
            raise refusal(503, message, retry_after=1, is_early=False) from None
        finally:
            for task in tasks:  # after a refusal some go on, and would count bytes that nobody takes off again
                task.cancel()

    def _submit(self, results: list[ServeResult | Posted], *, explain: bool) -> dict[int, asyncio.Future[Answer]]:
        """Queue the images among the results, which are then Results without an answer. Raises HTTPException."""
        indices = [index for index, result in enumerate(results) if isinstance(result, Posted)]
        try:
            images = [results[index].data for index in indices]  # type: ignore[union-attr]
            futures = self.batcher.submit(images, explain=explain)
        except BusyError as error:
            message = f"the queue is full ({self.settings.max_queue:,} images): {error}"
            raise refusal(429, message, retry_after=error.retry_after, is_early=False) from None
        for index in indices:
            results[index] = ServeResult(results[index].name)
        return dict(zip(indices, futures, strict=True))

    # -- from answers to a response ------------------------------------------------------------------------------------

    async def _wait(self, request: Request, futures: Sequence[asyncio.Future[Answer]]) -> None:
        """Wait until all are done.

        Raises:
            ClientDisconnect, HTTPException: the client went away, or time is over; the images are dropped.
        """
        if not futures:
            return
        limit = self.settings.timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await _unless_gone(request, asyncio.gather(*futures, return_exceptions=True))
        except TimeoutError:
            message = f"no answer after {limit:g} s: the server is too busy"
            raise refusal(503, message, retry_after=1, is_early=False) from None

    def _answer(
        self, results: Sequence[ServeResult | Posted], top: int, threshold: float, more: Mapping[str, str]
    ) -> Response:
        trained = self.batcher.trained
        assert trained is not None
        rows, statuses = [], set()
        for result in results:
            assert isinstance(result, ServeResult)
            classes = [] if result.answer is None else ranked(trained, result.answer, top, threshold)
            lost = f"it has {'; '.join(result.answer.lost)}" if result.answer and result.answer.lost else ""
            judgement = None if result.answer is None else result.answer.judgement
            row = {"image": result.name, "classes": classes, "error": result.error or None}
            known = {} if judgement is None else judgement.document
            rows.append(row | ({"note": lost} if lost else {}) | known | {**more})
            statuses.add(200 if result.answer is not None else result.status)
            self.meters.images.labels("ok" if result.answer is not None else "error").inc()
        status = 200 if 200 in statuses else statuses.pop() if len(statuses) == 1 else 422
        about = {"model": self.description["name"], "version": self.description["version"], "images": rows}
        return JSONResponse(about | ({} if status == 200 else {"error": rows[0]["error"]}), status)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the work's result; it is cancelled where the client of a request that was read goes away.

    Raises:
        ClientDisconnect: it did.
    """
    # After the request's end there is nothing to receive but that the client went away.
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio prints what nobody asks for
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers, message, method = dict(error.headers or {}), "", request.method
    if error.detail == "Not Found":  # as the router has it
        message = "there is no such page: /docs lists them"
        if method in ("POST", "PUT"):
            message = f"there is no such page: images go to POST /predict, as {HOW} sends them"
    elif error.detail == "Method Not Allowed":
        message = f"{method} is not allowed here: images go to POST /predict, as {HOW} sends them"
        if method == "OPTIONS" and "origin" in request.headers:
            message = "pages of other origins are refused: steady serve --allow-origin ORIGIN allows one"
    kind = Early if "connection" in headers or (message and method not in ("GET", "HEAD")) else JSONResponse
    return kind({"error": message or error.detail}, error.status_code, headers)


def content_type(request: Request) -> str:
    """Return the content type that a request names, in lower case and without parameters; empty if there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _outcome(name: str, future: asyncio.Future[Answer]) -> ServeResult:
    """Return what became of an image. Raises HTTPException where the network failed."""
    error = future.exception()
    if isinstance(error, PassError):
        raise refusal(500, str(error), is_early=False)
    if isinstance(error, BadImageError):
        return ServeResult(name, error=str(error), status=413 if isinstance(error, TooManyPixelsError) else 422)
    answer = future.result()
    if not math.isfinite(float(answer.logits.sum())):
        return ServeResult(name, error="the network's output is no number for this image", status=500)
    return ServeResult(name, answer)


def ranked(trained: Trained, answer: Answer, top: int, threshold: float) -> list[dict[str, Any]]:
    """Return an image's likeliest classes, as ``steady predict`` does: of several labels those above a threshold."""
    outputs, p = answer.logits.topk(top).indices.tolist(), answer.probabilities.tolist()
    if trained.is_multi_label:
        outputs = [k for k in outputs if p[k] > threshold]
    return [{"class": trained.classes[k], "probability": p[k]} for k in outputs]


def _number(
    options: Mapping[str, Any], name: str, what: str, kind: Callable[[str], Any], is_allowed: Callable[[Any], bool]
) -> Any:
    """Return a number of a request, None where there is none. Raises HTTPException."""
    if name not in options:
        return None
    given = options[name]
    try:
        value = kind(str(int(given) if isinstance(given, float) and given.is_integer() else given))  # 3.0 in JSON is 3
        if is_allowed(value):
            return value
    except ValueError:
        pass
    raise refusal(400, f"{name} is {str(options[name])[:40]!r}; it must be {what}", is_early=False)


def describe(trained: Trained) -> dict[str, Any]:
    """Return what ``/model`` says, without any path. ``version``: the first 12 digits of the weights' file's sha256."""
    input = trained.input
    return {
        "name": trained.title,
        "version": _digest(trained)[:12],
        "licence": trained.licence,
        "licence_note": licence_note(trained.licence) if trained.licence else None,
        "num_classes": len(trained.classes),
        "classes": list(trained.classes),
        "multi_label": trained.is_multi_label,
        "size": input.size,
        "channels": input.channels,
        "mean": input.mean,
        "std": input.std,
        "crop": input.crop,
        "interpolation": input.interpolation,
        "fit": input.fit,
        "temperature": trained.temperature,
        "device": str(trained.policy.device),
        **_score_of(trained),
    }


def _score_of(trained: Trained) -> dict[str, Any]:
    """Return the data and the accuracy of the run whose best weights these are; nothing of others."""
    if trained.path.name != "best.safetensors" or not Run.is_run(trained.path.parent):
        return {}
    (row,) = list_runs(trained.path.parent)
    return {"data": row.data, "metric": row.metric, "best": row.best, "best_95": [row.low, row.high]}


def _example_of(trained: Trained) -> str:
    """Return a validation image of the run whose weights these are, as a data address; nothing where it is gone."""
    try:
        with open_pictures(Account.of(Run.open(trained.path.parent)), "val") as records:
            return thumbnail(records, 0, PHOTOGRAPH_PIXELS[0])
    except SteadyError:
        return ""


def _digest(trained: Trained) -> str:
    if trained.path.is_file():
        with trained.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for name, tensor in trained.module.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


@functools.cache
def _page_files() -> dict[str, tuple[bytes, str]]:
    return {
        "/": (render("serve.html.j2", {}, meaning=MEANING).encode(), "text/html"),
        "/docs": (render("serve_docs.html.j2", {}, **page_of_api()).encode(), "text/html"),
        "/page.css": ((TEMPLATES / "page.css").read_bytes(), "text/css"),
        "/serve.css": ((TEMPLATES / "serve.css").read_bytes(), "text/css"),
        "/serve.js": (script("serve.js").encode(), "text/javascript"),
    }
