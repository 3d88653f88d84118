"""``steady serve`` as its clients meet it: a real process on this machine's own address, started once."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import http.client
import http.server
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message
from tests.data.packing.odd_files import banded
from tests.reports.test_browser import browser, chromium

import steadytrain
from steadytrain.cli.serve import _flags
from steadytrain.errors import InputError
from steadytrain.export import batching, containers
from steadytrain.export.batching import Batcher, PixelRoom
from steadytrain.export.fetch import FetchError, fetch, is_allowed, parse_prefix
from steadytrain.export.http_server import listen
from steadytrain.export.payload import LONG_TEXT
from steadytrain.export.serve import ServeSettings, Service, _unless_gone, describe
from steadytrain.training import Trained, predict, restore

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["browser", "chromium"]

TOKEN = "s3cret"
MODEL = "timm/test_resnet"
WAIT_MS, TIMEOUT, MAX_QUEUE, MAX_IMAGES, MAX_BYTES, MAX_PIXELS = 5000, 6, 8, 4, 8 * 2**20, 1_000_000
BOUNDARY = "----steady"


@dataclass(frozen=True)
class Server:
    """A running server: its process, its port, its weights, where its messages go, and where it may fetch images."""

    process: subprocess.Popen[str]
    port: int
    weights: Path
    messages: Path
    pictures: str


@dataclass(frozen=True)
class Reply:
    """Status, headers and JSON of a response."""

    status: int
    headers: Mapping[str, str]
    body: Any


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A large and a small JPEG, a progressive one and one on its side, a PNG with transparency, a grey WebP."""
    folder = tmp_path_factory.mktemp("images")
    rough = np.random.default_rng(7).integers(0, 256, (12, 16, 4), np.uint8)
    smooth = Image.fromarray(rough, "RGBA").resize((640, 480), Image.Resampling.BICUBIC)
    smooth.convert("RGB").save(folder / "large.jpg", quality=92)
    smooth.convert("RGB").resize((97, 203)).save(folder / "small.jpg", quality=80)
    smooth.convert("RGB").save(folder / "progressive.jpg", progressive=True)
    smooth.resize((200, 180)).save(folder / "clear.png")
    smooth.convert("L").save(folder / "grey.webp")
    lying = Image.Exif()
    lying[0x0112] = 6
    smooth.convert("RGB").save(folder / "lying.jpg", exif=lying)
    return {path.name: path for path in sorted(folder.iterdir())}


class _Pictures(http.server.BaseHTTPRequestHandler):
    """Serves one picture, one that is too large, and redirects into and out of the folder."""

    picture, timeout = b"", 5  # seconds for a client that has given up and has not closed its connection yet
    is_asked, may_answer = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        if self.path == "/pictures/slow":
            self.is_asked.set()
            self.may_answer.wait(20)
        moved = {"/pictures/moved": "/pictures/1.jpg", "/pictures/out": "/secret"}
        if self.path in moved:
            self.send_response(302)
            self.send_header("location", moved[self.path])
            self.end_headers()
            return
        content = {"/pictures/1.jpg": self.picture, "/pictures/huge": bytes(MAX_BYTES + 1), "/secret": self.picture}
        content["/pictures/half"] = bytes(MAX_BYTES // 2)
        self.send_response(200 if self.path in content else 404)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(content.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def pictures(images: dict[str, Path]) -> Iterator[str]:
    """Address of a folder of another server on this machine."""
    _Pictures.picture = images["large.jpg"].read_bytes()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}/pictures"
        other.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pictures: str) -> Iterator[Server]:
    """A server of a network with random weights, with narrow limits and a long wait for full batches."""
    folder = tmp_path_factory.mktemp("serve")
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet").state_dict(), folder / "w.pth")
    flags: dict[str, object] = {"--port": 0, "--max-batch": 32, "--max-wait-ms": WAIT_MS, "--timeout-seconds": TIMEOUT}
    flags |= {
        "--max-queue": MAX_QUEUE,
        "--max-images": MAX_IMAGES,
        "--max-bytes": MAX_BYTES,
        "--max-pixels": MAX_PIXELS,
    }
    flags |= {"--allow-url": pictures, "--model": MODEL, "--device": "cpu"}
    words = [str(word) for pair in flags.items() for word in pair]
    command = [
        sys.executable,
        "-m",
        "steadytrain",
        "serve",
        str(folder / "w.pth"),
        *words,
        "--allow-private",
        "--json-log",
    ]
    messages = folder / "messages"
    with messages.open("w") as stderr:
        environment = {**os.environ, "STEADYTRAIN_TOKEN": TOKEN}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    assert process.stdout is not None
    url = process.stdout.readline()
    assert url, messages.read_text()
    port = int(url.rpartition(":")[2].strip("/\n"))
    yield Server(process, port, folder / "w.pth", messages, pictures)
    process.stdout.close()
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def trained(server: Server) -> Trained:
    """The same weights in this process."""
    return restore(server.weights, model=MODEL, device="cpu")


def ask(
    server: Server, path: str, body: bytes | Iterator[bytes] | None = None, kind: str = "image/jpeg", **more: str
) -> Reply:
    """Send one request, a POST if it has a body, on a connection of its own."""
    headers = {"authorization": f"Bearer {TOKEN}"} | ({"content-type": kind} if body is not None else {})
    headers |= {name.replace("_", "-"): value for name, value in more.items()}
    method = headers.pop("method", "GET" if body is None else "POST")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, body=body, headers={key: value for key, value in headers.items() if value})
        response = connection.getresponse()
        content = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return Reply(
            response.status, dict(response.headers.items()), json.loads(content) if is_json else content.decode()
        )
    finally:
        connection.close()


def metrics(server: Server) -> dict[tuple[str, ...], float]:
    """Every sample of /metrics, by its name and its labels' values."""
    families = text_string_to_metric_families(ask(server, "/metrics").body)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that comes soon."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def half_a_request(server: Server, content: bytes) -> Iterator[socket.socket]:
    """A request of which all but the last byte was sent: batches wait for it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        lines = ["POST /predict HTTP/1.1", "host: localhost", f"authorization: Bearer {TOKEN}", "connection: close"]
        head = "\r\n".join([*lines, f"content-length: {len(content)}", "", ""])
        before = metrics(server)["steady_requests_in_flight",]
        connection.sendall(head.encode() + content[:-1])
        until(lambda: metrics(server)["steady_requests_in_flight",] > before)
        yield connection


def reply_on(connection: socket.socket) -> tuple[int, Any]:
    """Read a response."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def form(*files: tuple[str, bytes], **fields: str) -> tuple[bytes, str]:
    """A form with files, and its content type."""
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    for name, content in files:
        head = f'Content-Disposition: form-data; name="images"; filename="{name}"\r\ncontent-type: image/jpeg\r\n\r\n'
        parts.append(head.encode() + content)
    body = b"".join(f"--{BOUNDARY}\r\n".encode() + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()
    return body, f"multipart/form-data; boundary={BOUNDARY}"


def pairs(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Classes and probabilities of an image in a response."""
    assert row["error"] is None
    return [(class_name["class"], class_name["probability"]) for class_name in row["classes"]]


def test_a_request_that_was_given_up_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def give_up() -> None:
        async def gone() -> Message:
            return {"type": "http.disconnect"}

        futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
        with pytest.raises(ClientDisconnect):
            await _unless_gone(Request({"type": "http"}, gone), asyncio.gather(*futures, return_exceptions=True))
        await asyncio.sleep(0)
        assert all(future.cancelled() for future in futures), "nothing computes them"
        del futures
        gc.collect()

    asyncio.run(give_up())
    assert not caplog.records


def test_answers_equal_predict_to_the_last_digit(server: Server, trained: Trained, images: dict[str, Path]) -> None:
    for path in images.values():
        (expected,) = predict(trained, [path], top=7)
        reply = ask(server, "/predict?top=7", path.read_bytes(), kind="application/octet-stream")
        assert (reply.status, reply.body["model"]) == (200, MODEL)
        (row,) = reply.body["images"]
        assert pairs(row) == list(zip(expected.classes, expected.probabilities, strict=True)), path.name


def test_what_of_an_image_is_not_used_is_said(server: Server, images: dict[str, Path]) -> None:
    body, kind = form(("deep.tif", banded(5, 0, 0)), ("plain.jpg", images["small.jpg"].read_bytes()))
    deep, plain = ask(server, "/predict", body, kind=kind).body["images"]
    assert deep["note"] == "it has 5 bands, of which the first 3 are kept" and deep["classes"]
    assert "note" not in plain
    assert "note" in ask(server, "/openapi.json").body["components"]["schemas"]["Image"]["properties"]


def test_a_host_that_is_no_name_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: host.encode("idna"))  # as it begins
    with pytest.raises(InputError, match=r"cannot listen on a\.\.b port 80 \("):
        listen("a..b", 80)


def test_an_image_is_explained_by_a_picture(server: Server, trained: Trained, images: dict[str, Path]) -> None:
    content = images["large.jpg"].read_bytes()
    drawn = ask(server, "/predict?explain=1&top=2", content).body["images"][0]
    plain = ask(server, "/predict?top=2", content).body["images"][0]
    assert {name: value for name, value in drawn.items() if name != "map"} == plain
    head, _, data = drawn["map"].partition(",")
    (expected,) = predict(trained, images["large.jpg"], explain=1)
    assert head == "data:image/jpeg;base64" and base64.b64decode(data) == expected.maps[0]
    body, kind = form(("a.jpg", content), ("b.jpg", content), explain="1")
    many, unknown = ask(server, "/predict", body, kind), ask(server, "/predict?explain=2", content)
    assert many.status == unknown.status == 400
    assert "one image at a time, not 2" in many.body["error"] and "0 or 1" in unknown.body["error"]
    assert ask(server, "/model").body["no_maps"] is None


def test_a_map_that_takes_too_long_is_not_offered(trained: Trained) -> None:
    service = Service(lambda: trained, ServeSettings(threads=1, timeout_seconds=10), hosts=None)
    try:
        service.batcher.rate = 1.0
        assert "a heat map takes 50 s here, of 5 s" in str(service._why_no_maps)
        service.batcher.rate = 100.0
        assert service._why_no_maps is None
    finally:
        service.close()


def test_forms_and_json_give_each_image_its_answer_or_its_error(
    server: Server, trained: Trained, images: dict[str, Path]
) -> None:
    good = [images["large.jpg"], images["clear.png"]]
    expected = [prediction.classes[0] for prediction in predict(trained, good)]
    body, kind = form(*((path.name, path.read_bytes()) for path in good), ("bad.jpg", b"no image"), top="1")
    reply = ask(server, "/predict", body, kind=kind)
    assert reply.status == 200
    assert [row["image"] for row in reply.body["images"]] == ["large.jpg", "clear.png", "bad.jpg"]
    assert [row["classes"][0]["class"] for row in reply.body["images"][:2]] == expected
    assert all(len(row["classes"]) == 1 for row in reply.body["images"][:2])
    assert reply.body["images"][2]["error"] == "text, not an image"
    encoded = [base64.b64encode(path.read_bytes()).decode() for path in good]
    document = {"images": [encoded[0], f"data:image/png;base64,{encoded[1]}", "***"], "top": 2}
    reply = ask(server, "/predict", json.dumps(document).encode(), kind="application/json")
    assert reply.status == 200
    assert [row["classes"][0]["class"] for row in reply.body["images"][:2]] == expected
    assert reply.body["images"][2] == {"image": "images[2]", "classes": [], "error": "it is not base64"}


def test_the_first_commands_that_people_type_work(server: Server, images: dict[str, Path]) -> None:
    jpeg = images["large.jpg"].read_bytes()
    expected = ask(server, "/predict?top=2", jpeg).body["images"][0]["classes"]
    text = base64.b64encode(jpeg)
    escaped = quote_plus(text.decode()).encode()
    sent: list[tuple[str, bytes, str, str]] = [
        ("POST", jpeg, "/predict?top=2", "application/x-www-form-urlencoded"),  # curl --data-binary
        ("PUT", jpeg, "/predict?top=2", ""),  # curl -T
        ("PUT", jpeg, "/predict/large.jpg?top=2", ""),  # curl -T to an address with a slash at its end
        ("POST", jpeg, "/predict?top_k=2", "application/json"),  # a client's default
        ("POST", jpeg, "/predictions/any?top=2", "text/plain"),  # TorchServe
        ("POST", jpeg, "/invocations?top=2", "binary/octet-stream"),  # SageMaker
        ("POST", b"image=%s&top=2" % text, "/predict", "application/x-www-form-urlencoded"),  # curl -d, a bare plus
        ("POST", b"top=2&image=%s" % escaped, "/predict", "application/x-www-form-urlencoded"),
        ("POST", text, "/predict?top=2", "text/plain"),
        ("POST", b"data:image/jpeg;base64," + base64.encodebytes(jpeg), "/predict?top=2", "text/plain"),
        ("POST", b'{"image": "%s", "top": 2}' % text, "/predict", ""),
    ]
    for method, body, path, kind in sent:
        reply = ask(server, path, body, kind=kind, method=method)
        assert reply.status == 200 and reply.body["images"][0]["classes"] == expected, (method, path, kind)


def test_a_field_of_a_form_may_hold_base64(server: Server, images: dict[str, Path]) -> None:
    png = images["clear.png"].read_bytes()
    expected = ask(server, "/predict?top=1", png).body["images"][0]["classes"]
    body, kind = form(image=base64.encodebytes(png).decode(), top="1")
    assert ask(server, "/predict", body, kind=kind).body["images"] == [
        {"image": "image", "classes": expected, "error": None}
    ]


def _spelled(data: bytes) -> dict[str, str]:
    """Base64 as the libraries of several languages write it."""
    plain = base64.b64encode(data).decode()
    return {
        "plain": plain,
        "lines": base64.encodebytes(data).decode(),
        "CRLF": "\r\n".join(plain[start : start + 64] for start in range(0, len(plain), 64)),
        "of addresses": base64.urlsafe_b64encode(data).decode(),
        "unpadded": base64.urlsafe_b64encode(data).decode().rstrip("="),
        "data:": f"data:image/png;charset=binary;base64,{plain}",
    }


@pytest.mark.parametrize("name", ["small", "large"])
def test_base64_is_taken_as_libraries_write_it(
    server: Server, images: dict[str, Path], tmp_path: Path, name: str
) -> None:
    picture = Image.open(images["large.jpg"]).resize((30, 20) if name == "small" else (300, 200))
    picture.save(tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert (len(data) < LONG_TEXT / 2) == (name == "small")
    expected = ask(server, "/predict?top=1", data).body["images"][0]["classes"]
    for spelling, text in _spelled(data).items():
        keys: list[dict[str, Any]] = [{"image": text}, {"images": text}, {"images": [text]}, {"inputs": text}]
        keys += [{"instances": [{"b64": text}]}, {"instances": [{"image_bytes": {"b64": text}}]}, {"data": text}]
        for document in keys:
            for body in (json.dumps(document | {"top": 1}), "\ufeff" + json.dumps(document | {"top": 1}, indent=1)):
                reply = ask(server, "/predict", body.encode(), kind="application/json")
                assert reply.status == 200, (spelling, document.keys(), reply)
                assert reply.body["images"][0]["classes"] == expected
    reply = ask(server, "/predict", json.dumps({"image": data[:40].hex() + "!"}).encode(), kind="application/json")
    assert (reply.status, reply.body["error"]) == (422, "it is not base64")
    for named, kind in (
        (b'{"image": "cat.jpg"}', "application/json"),
        (b"image=my+cat.jpg", "application/x-www-form-urlencoded"),
    ):
        reply = ask(server, "/predict", named, kind=kind)
        assert reply.status == 422
        assert "the name of a file: curl -F image=@cat.jpg" in reply.body["error"], kind


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate"])
def test_bodies_may_be_compressed(server: Server, images: dict[str, Path], encoding: str) -> None:
    jpeg = images["large.jpg"].read_bytes()
    expected = ask(server, "/predict", jpeg).body
    pack = zlib.compress if encoding == "deflate" else gzip.compress
    assert ask(server, "/predict", pack(jpeg), content_encoding=encoding).body == expected
    if encoding != "deflate":
        assert ask(server, "/predict", pack(jpeg[:999]) + pack(jpeg[999:]), content_encoding=encoding).body == expected


def _answer(service: Service, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer of an application whose model is not loaded."""
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": sent,
        "query_string": b"",
        "http_version": "1.1",
    }
    start: dict[str, Any] = {}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        start.update(message if message["type"] == "http.response.start" else {})

    async def answer() -> None:
        await service.app(scope, receive, send)

    asyncio.run(answer())
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}


def test_pages_of_an_allowed_origin_may_use_the_server(trained: Trained) -> None:
    shop, other = "http://shop.example", "http://evil.example"
    asks = {"access_control_request_method": "POST", "access_control_request_headers": "content-type,authorization"}
    settings = ServeSettings(threads=1, token=TOKEN, allow_origins=(shop,))
    service = Service(lambda: trained, settings, hosts=None)
    status, headers = _answer(service, "OPTIONS", "/predict", origin=shop, **asks)
    assert status == 200 and headers["access-control-allow-origin"] == shop
    assert (
        "POST" in headers["access-control-allow-methods"] and "authorization" in headers["access-control-allow-headers"]
    )
    status, headers = _answer(service, "OPTIONS", "/predict", origin=other, **asks)
    assert status == 400 and "access-control-allow-origin" not in headers
    assert _answer(service, "GET", "/ready", origin=shop)[1]["access-control-allow-origin"] == shop
    assert "access-control-allow-origin" not in _answer(service, "GET", "/ready", origin=other)[1]
    plain = Service(lambda: trained, ServeSettings(threads=1, token=TOKEN), hosts=None)
    status, headers = _answer(plain, "OPTIONS", "/predict", origin=shop, **asks)
    assert status == 405 and "access-control-allow-origin" not in headers
    for own, foreign in ((plain, other), (plain, "null"), (service, other)):  # a browser without Fetch Metadata
        assert _answer(own, "POST", "/ready", host="127.0.0.1:8000", origin=foreign)[0] == 403
        assert _answer(own, "POST", "/ready", host="127.0.0.1:8000", origin="http://127.0.0.1:8000")[0] in (401, 405)
    assert _answer(service, "POST", "/ready", host="127.0.0.1:8000", origin=shop)[0] in (401, 405)
    of_a_page = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "cors"}
    for method in ("POST", "PUT", "GET"):
        assert _answer(service, method, "/ready", origin=other, **of_a_page)[0] == 403
        assert _answer(plain, method, "/predict", origin=shop, **of_a_page)[0] == 403
        assert _answer(service, method, "/nowhere", origin=shop, **of_a_page)[0] in (401, 404)
    form = {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate"}
    assert _answer(plain, "POST", "/predict", **form)[0] == 403
    assert _answer(plain, "GET", "/docs", **form)[0] == 200
    for wrong in ("shop.example", "http://shop.example/page", "null", ""):
        with pytest.raises(InputError, match="--allow-origin is"):
            ServeSettings(threads=1, allow_origins=(wrong,))


def test_the_interface_is_described_for_programs_and_people(server: Server, images: dict[str, Path]) -> None:
    document = ask(server, "/openapi.json", authorization="").body
    assert document["openapi"].startswith("3.1") and document["paths"]["/predict"]["post"]["security"] == [
        {"token": []}
    ]

    def resolve(reference: str) -> Any:
        value = document
        for key in reference.removeprefix("#/").split("/"):
            value = value[key]
        return value

    references = re.findall(r'"\$ref": "([^"]+)"', json.dumps(document))
    assert references and all(resolve(reference) for reference in references)
    assert document["paths"]["/predict"].keys() == {"post", "put"}
    assert all("401" in document["paths"][path]["get"]["responses"] for path in ("/model", "/example", "/metrics"))
    schemas = document["components"]["schemas"]
    example = json.dumps(schemas["Request"]["example"]).encode()
    assert ask(server, "/predict", example, kind="application/json", method="PUT").status == 200
    assert ask(server, "/predict", example.replace(b"3", b"3.0"), kind="application/json").status == 200
    answer = ask(server, "/predict", images["small.jpg"].read_bytes()).body
    assert set(schemas["Answer"]["required"]) == answer.keys()
    assert set(schemas["Image"]["required"]) == answer["images"][0].keys()
    assert set(schemas["Model"]["required"]) <= ask(server, "/model").body.keys()
    for path, methods in document["paths"].items():
        no_run = 404 if path == "/example" else 200
        assert ask(server, path).status == (405 if "get" not in methods else no_run), path
    page = ask(server, "/docs", authorization="").body
    assert all(path in page for path in document["paths"]) and "curl -T cat.jpg" in page
    assert not re.findall(r"(?:src|href)=.(?:https?:)?//", page) and page.count("<script") == 1


def test_addresses_are_fetched_from_the_list_alone(server: Server, images: dict[str, Path]) -> None:
    alone = ask(server, "/predict", images["large.jpg"].read_bytes()).body["images"][0]["classes"]
    names = ["1.jpg", "moved", "out", "huge"]
    body = json.dumps({"urls": [f"{server.pictures}/{name}" for name in names]}).encode()
    image, moved, out, huge = ask(server, "/predict", body, kind="application/json").body["images"]
    assert [class_name["class"] for class_name in image["classes"]] == [prediction["class"] for prediction in alone]
    assert moved["classes"] == image["classes"]
    assert "secret is not in this server's list" in out["error"]
    assert f"more than {MAX_BYTES:,} bytes" in huge["error"]
    too_much = {"urls": [f"{server.pictures}/half"] * MAX_IMAGES}  # each is small enough, all of them are not
    reply = ask(server, "/predict", json.dumps(too_much).encode(), kind="application/json")
    assert (reply.status, reply.body["error"][:20]) == (413, "the request has more")
    odd = ask(server, "/predict", b'{"urls": ["http://\\ud800/"]}', kind="application/json")
    assert (odd.status, odd.body["images"][0]["image"]) == (422, "http://?/")
    elsewhere = {"urls": [server.pictures.replace("/pictures", "/secret")]}
    reply = ask(server, "/predict", json.dumps(elsewhere).encode(), kind="application/json")
    assert (reply.status, reply.body["images"][0]["classes"]) == (422, [])


def test_addresses_are_not_read_for_a_client_that_went_away(server: Server) -> None:
    dropped = ("steady_requests_total", "/predict", "499")
    before = metrics(server).get(dropped, 0)
    body = json.dumps({"urls": [f"{server.pictures}/slow"]}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as gone:
        lines = f"POST /predict HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
        gone.sendall(f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert _Pictures.is_asked.wait(20)
    until(lambda: metrics(server).get(dropped, 0) == before + 1)
    _Pictures.may_answer.set()


def test_addresses_inside_a_network_are_refused_unless_allowed(pictures: str) -> None:
    with pytest.raises(FetchError, match=r"127\.0\.0\.1, an address inside a network"):
        asyncio.run(fetch(f"{pictures}/1.jpg", [pictures], max_bytes=10**6, seconds=5))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/1.jpg"
        with pytest.raises(FetchError, match=r"takes longer than 0\.2 s"):
            asyncio.run(fetch(url, [url], max_bytes=10**6, seconds=0.2, allow_private=True))
    allowed = ["https://a.org/photos"]
    for url in ("https://a.org/photos", "https://a.org:443/photos/x.jpg?w=3", "HTTPS://A.ORG/photos/a/b"):
        assert is_allowed(url, allowed), url
    tricks = ["http://a.org/photos/1", "https://a.org/photos/../x", "https://a.org/photos/%2e%2e/x"]
    tricks += ["https://a.org@b.org/photos/", "https://a.org.b.org/photos/", "https://a.org:444/photos/"]
    tricks += ["https://a.org/photos\\..\\x", "https://a.org/photosx", "file:///photos", "//a.org/photos"]
    assert [url for url in tricks if is_allowed(url, allowed)] == []
    with pytest.raises(InputError, match=r"--allow-url is 'a\.org'"):
        parse_prefix("a.org")


class _Silent(http.server.BaseHTTPRequestHandler):
    """Answers half a picture and no more, or leads elsewhere."""

    timeout = 5

    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/out" else 200)
        self.send_header("location", "http://localhost:1/out")
        self.send_header("content-length", "9")
        self.end_headers()
        self.wfile.write(b"half")
        with suppress(OSError):
            self.rfile.read(1)  # until the client closes the connection

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@contextmanager
def no_answer(kind: str) -> Iterator[str]:
    """The address of a picture that does not come."""
    if kind in ("half", "out"):
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Silent) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/{kind}"
            finally:
                server.shutdown()
                thread.join()
        return
    one, other = socket.socket(), socket.socket()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, one, other:
        if kind == "unconnected":  # the system holds no more connections than these
            for filler in (one, other):
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
        scheme = "https" if kind == "no TLS" else "http"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/x.jpg"


def open_sockets() -> set[str]:
    """The sockets of this process."""
    numbers = list(Path("/proc/self/fd").iterdir())
    return {target for number in numbers if (target := _link_of(number)).startswith("socket:")}


def _link_of(number: Path) -> str:
    try:
        return str(number.readlink())
    except OSError:  # it is closed by now
        return ""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not tell what is open")
@pytest.mark.parametrize("kind", ["silent", "unconnected", "no TLS", "half", "out"])
def test_a_fetch_that_is_given_up_closes_its_connection_at_once(kind: str) -> None:
    async def give_up(url: str) -> None:
        before = open_sockets()
        task = asyncio.ensure_future(fetch(url, [url], max_bytes=10**6, seconds=60, allow_private=True))
        if kind == "out":
            with suppress(FetchError):
                await task
        else:
            while not open_sockets() - before:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
        end = time.monotonic() + 20  # a fetch has 60 s
        while open_sockets() - before:
            assert time.monotonic() < end, "it is open still"
            await asyncio.sleep(0.01)

    with no_answer(kind) as url:
        gc.disable()  # it would close what nobody refers to
        try:
            asyncio.run(give_up(url))
        finally:
            gc.enable()


def test_slow_addresses_hold_up_no_other_request(server: Server) -> None:
    body = json.dumps({"urls": [f"{server.pictures}/slow"]}).encode()
    lines = f"POST /predict HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
    _Pictures.may_answer.clear()
    before = metrics(server)["steady_requests_in_flight",]
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(8)]
        for connection in slow:
            connection.sendall(f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: metrics(server)["steady_requests_in_flight",] == before + len(slow))
        assert ask(server, "/predict", b'{"top": 1}', kind="application/json").status == 400
        for connection in slow:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
    _Pictures.may_answer.set()


def _png(width: int, height: int) -> bytes:
    """A file that says it has so many pixels, and has none."""
    held = io.BytesIO()
    Image.new("L", (1, 1)).save(held, "PNG")
    size = b"IHDR" + struct.pack(">2I", width, height) + held.getvalue()[24:29]
    return held.getvalue()[:12] + size + struct.pack(">I", zlib.crc32(size)) + held.getvalue()[33:]


def test_what_a_client_does_wrong_is_a_status_and_one_line(server: Server, images: dict[str, Path]) -> None:
    jpeg = images["large.jpg"].read_bytes()
    many, kind = form(*[("a.jpg", jpeg[:100])] * (MAX_IMAGES + 1))
    unnamed, _ = form(("a.jpg", jpeg))
    text, _ = form(top="3")
    json_kind = "application/json"
    cases: list[tuple[Reply, int, str]] = [
        (ask(server, "/predict", jpeg, authorization="Bearer wrong"), 401, "needs a token"),
        (ask(server, "/predict", jpeg, authorization=""), 401, "Authorization: Bearer TOKEN"),
        (ask(server, "/nothing"), 404, "no such page"),
        (ask(server, "/predict"), 405, "GET is not allowed"),
        (ask(server, "/", jpeg), 405, "POST is not allowed here: images go to POST /predict, as curl -T cat.jpg"),
        (ask(server, "/cat.jpg", jpeg, method="PUT"), 404, "images go to POST /predict"),
        (ask(server, "/predict", jpeg[2:], kind="application/x-www-form-urlencoded"), 422, "curl -d changes"),
        (ask(server, "/predict", method="OPTIONS", origin="http://shop.example"), 405, "--allow-origin"),
        (ask(server, "/predict", jpeg, content_encoding="br"), 415, "send the body plain, or as gzip"),
        (ask(server, "/predict", jpeg, content_encoding="gzip"), 400, "the body is not gzip"),
        (ask(server, "/predict", gzip.compress(jpeg)[:-20], content_encoding="gzip"), 400, "cut short"),
        (ask(server, "/predict", gzip.compress(bytes(9 * MAX_BYTES)), content_encoding="gzip"), 413, "more than"),
        (ask(server, "/predict", b""), 400, "the body is empty"),
        (ask(server, "/predict", b"{", kind=json_kind), 400, "not JSON"),
        (ask(server, "/predict", b"[" * 50_000, kind=json_kind), 400, "not JSON"),
        (ask(server, "/predict", b"[]", kind=json_kind), 400, "must be a JSON object"),
        (ask(server, "/predict", b'{"images": [1]}', kind=json_kind), 400, "images must be a list of strings"),
        (ask(server, "/predict", b'{"instances": [[[0.1]]]}', kind=json_kind), 400, "an image's file in base64"),
        (ask(server, "/predict", b'{"top": 3}', kind=json_kind), 400, "no image"),
        (ask(server, "/predict", b'{"top": 1}', kind=json_kind), 400, "its keys: 'top'. Please send \"image\": BASE64"),
        (ask(server, "/predict", text, kind=kind), 400, "its keys: 'top'. Please send files, as curl -F image=@"),
        (ask(server, "/predict", unnamed, kind="multipart/form-data"), 400, "boundary"),
        (ask(server, "/predict", b"nonsense", kind="multipart/form-data; boundary=x"), 400, "cannot be read"),
        (ask(server, "/predict", many[:900], kind=kind), 400, "its end is missing"),
        (ask(server, "/predict?top=0", jpeg), 400, "top is '0'; it must be a whole number from 1"),
        (ask(server, "/predict?tops=3", jpeg), 400, "Did you mean top?"),
        (ask(server, "/predict?threshold=0.5", jpeg), 400, "leave out the threshold"),
        (ask(server, "/predict", bytes(MAX_BYTES + 1)), 413, f"{MAX_BYTES + 1:,} bytes, more than {MAX_BYTES:,}"),
        (ask(server, "/predict", iter([bytes(MAX_BYTES)] * 3)), 413, f"more than {MAX_BYTES:,} bytes"),
        (ask(server, "/predict", many, kind=kind), 413, f"more than {MAX_IMAGES} images"),
        (ask(server, "/predict", _png(1001, 1000)), 413, f"1,001,000 pixels, more than {MAX_PIXELS:,}"),
        (ask(server, "/predict", _png(60_000, 60_000)), 422, "pixels, more than"),
        (ask(server, "/predict", jpeg[:5000]), 422, ""),
        (ask(server, "/predict", b"GIF89a" + bytes(50)), 422, ""),
        (ask(server, "/predict", b"\x00" * 100, kind="image/svg+xml"), 422, ""),
    ]
    for reply, status, words in cases:
        assert reply.status == status, (reply, words)
        assert words in reply.body["error"] and "\n" not in reply.body["error"]
    refused = ask(server, "/health", host="evil.example")
    assert refused.status == 403 and "on its own machine only" in refused.body["error"]
    assert ask(server, "/predict", jpeg).status == 200
    assert ask(server, "/health", authorization="").status == ask(server, "/ready", authorization="").status == 200


@pytest.mark.slow
def test_no_body_takes_much_more_memory_than_its_bytes(server: Server, images: dict[str, Path]) -> None:
    def memory(name: str) -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
        return 1024 * int(status.partition(f"{name}:")[2].split()[0])

    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8)
    held = io.BytesIO()
    Image.fromarray(noise).save(held, "PNG")
    large = base64.b64encode(held.getvalue())
    assert ask(server, "/predict", b'{"images": ["%s"]}' % large, kind="application/json").status == 200
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not tell a process's peak of memory")
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5", encoding="ascii")
    before, most = memory("VmRSS"), MAX_BYTES - 100
    parts = [b"[],", b'"",', b"{},", b"1,", b'"AAAAAAAAAAAAAAAAAAAAAAAAAAAA",', b"1", "\U0001f600".encode()]
    parts += [rb"\u0041", rb"\/", rb"\""]
    bodies = [b'{"images": [' + part * (most // len(part)) for part in parts]
    bodies += [b'{"images": ["' + part * (most // len(part)) + b'"]}' for part in parts]
    bodies += [b'{"images": [' + part * (most // len(part)) + part.rstrip(b",") + b"]}" for part in parts]
    bodies.append(b"{" + b",".join(b'"%d":0' % number for number in range(most // 11)) + b"}")
    for body in bodies:
        reply = ask(server, "/predict", body, kind="application/json")
        assert reply.status in (400, 413, 422) and reply.body["error"].count("\n") == 0, body[:40]
    heads, kind = form(("a.jpg", b""))
    flood = heads.replace(b"content-type: image/jpeg\r\n", b"a: b\r\n" * (most // 6))
    assert ask(server, "/predict", flood, kind=kind).status == 400
    assert memory("VmHWM") - before < 6 * MAX_BYTES


def test_json_writers_may_escape_the_signs_of_base64(server: Server, images: dict[str, Path]) -> None:
    data = images["clear.png"].read_bytes()
    expected = ask(server, "/predict", data).body["images"][0]["classes"]
    text = base64.b64encode(data)
    assert len(text) > LONG_TEXT and b"+" in text and b"/" in text
    for plus, slash in ((b"+", rb"\/"), (rb"\u002B", rb"\u002F")):
        escaped = text.replace(b"/", slash).replace(b"+", plus)
        body = b'{"top": 5, "images": ["%s", "data:image%spng;base64,%s"]}' % (escaped, slash, escaped)
        rows = ask(server, "/predict", body, kind="application/json").body["images"]
        for row in rows:  # two in a batch: the last bits of a probability may differ
            assert [name for name, _ in pairs(row)] == [prediction["class"] for prediction in expected]
            assert [p for _, p in pairs(row)] == pytest.approx(
                [prediction["probability"] for prediction in expected], rel=1e-5
            )
    twice = b'{"images": ["%s", "\\u00000"]}' % text
    assert ask(server, "/predict", twice, kind="application/json").body["images"][1]["error"] == "it is not base64"


def test_a_client_that_takes_no_answer_loses_its_connection(server: Server) -> None:
    line = f"GET /model HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
    before = metrics(server)["process_open_fds",]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(line.encode() * 500)  # their answers are more than the system holds
        until(lambda: metrics(server)["steady_requests_in_flight",] == 2)
        until(lambda: metrics(server)["steady_requests_in_flight",] == 1)
        until(lambda: metrics(server)["process_open_fds",] <= before)


def test_nothing_tells_where_files_lie_on_the_server(server: Server, trained: Trained) -> None:
    assert any(str(server.weights) in note for note in trained.notes), "the server's own messages do"
    assert str(server.weights.parent) not in json.dumps(ask(server, "/model").body)
    about = describe(replace(trained, name="mxnet:/srv/secret/resnet-18", licence="cc-by-nc-4.0"))
    assert about["name"] == "mxnet:resnet-18" and "secret" not in json.dumps(about)
    assert about["licence_note"].startswith("NON-COMMERCIAL")


def test_large_images_are_decoded_in_turns() -> None:
    room, inside, most = PixelRoom(10), 0, 0

    def decode(pixels: int) -> None:
        nonlocal inside, most
        with room.take(pixels):
            inside += pixels
            most = max(most, inside)
            time.sleep(0.001)
            inside -= pixels

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, [3, 4, 9, 12, 1, 6] * 5))
    assert most == 12 and inside == 0, "one that is larger than the room is decoded alone"


def test_small_images_do_not_wait_for_large_ones_and_those_given_up_are_not_decoded(
    trained: Trained, images: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = images["small.jpg"].read_bytes(), images["large.jpg"].read_bytes()
    decoded = list[str]()
    monkeypatch.setattr(batching, "LARGE_PIXELS", 100_000)
    names = {small: "small", large: "large"}

    def upright(data: bytes, **more: int) -> bytes:
        decoded.append(names[data])
        return data

    monkeypatch.setattr(batching, "upright", upright)

    async def answers() -> None:
        measured = list[str]()
        limits = {"max_batch": 1, "max_wait": 0.0, "max_queue": 16, "max_pixels": MAX_PIXELS, "threads": 1}
        batcher = Batcher(lambda: trained, **limits, observe=lambda what, value: measured.append(what))  # type: ignore[arg-type]
        batcher.start()
        try:
            while not batcher.is_ready:
                await asyncio.sleep(0.01)
            with batcher._large_room.take(MAX_PIXELS):
                waiting = batcher.submit([large] * 3)
                await asyncio.wait_for(batcher.submit([small])[0], 20)
                assert decoded == ["small"]
                for answer in waiting:
                    answer.cancel()
            while batcher.queued:
                await asyncio.sleep(0.01)
            assert decoded == ["small"] and measured.count("network") == 1
            await asyncio.wait_for(batcher.submit([large])[0], 20)
            assert decoded == ["small", "large"]
        finally:
            batcher.close()

    asyncio.run(answers())


def test_images_of_a_batch_do_not_wait_for_the_heat_map_of_another(
    trained: Trained, images: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, may_draw, measured = images["large.jpg"].read_bytes(), threading.Event(), list[str]()

    def heat_maps(trained: Trained, images: torch.Tensor, *more: object) -> np.ndarray:
        measured.append("map")
        assert may_draw.wait(20)
        return np.ones((1, 1, 7, 7), np.float32)

    monkeypatch.setattr(batching, "heat_maps", heat_maps)
    limit: dict[str, Any] = {"max_batch": 4, "max_wait": 20.0, "max_queue": 16, "max_pixels": MAX_PIXELS, "threads": 1}

    async def answers() -> None:
        batcher = Batcher(lambda: trained, **limit, observe=lambda what, value: measured.append(what))
        batcher.start()
        try:
            while not batcher.is_ready:
                await asyncio.sleep(0.01)
            with batcher.arriving():
                drawn, given_up = (batcher.submit([content], explain=True)[0] for _ in range(2))
                plain = batcher.submit([content] * 2)
                given = await asyncio.wait_for(asyncio.gather(*plain), 20)
                assert not drawn.done() and all(answer.heat_map is None for answer in given)
                given_up.cancel()
                may_draw.set()
            assert (await asyncio.wait_for(drawn, 20)).heat_map is not None
            assert [what for what in measured if what in ("network", "map")] == ["network", "map"]
        finally:
            may_draw.set()
            batcher.close()

    asyncio.run(answers())


def test_requests_that_come_together_share_a_pass(server: Server, trained: Trained, images: dict[str, Path]) -> None:
    files = [images[name] for name in ("large.jpg", "clear.png", "grey.webp")]
    before = metrics(server)
    with half_a_request(server, files[0].read_bytes()) as last, ThreadPoolExecutor() as pool:
        replies = pool.map(lambda path: ask(server, "/predict", path.read_bytes()), files)
        until(lambda: metrics(server)["steady_queue_images",] == 3)
        last.sendall(files[0].read_bytes()[-1:])
        together = [reply.body["images"][0] for reply in replies]
        assert reply_on(last)[0] == 200
    after = metrics(server)
    counted = {name: after[name] - before[name] for name in after if name in before}
    assert counted["steady_batch_images_count",] == 1 and counted["steady_batch_images_sum",] == 4
    for row, alone in zip(together, predict(trained, files), strict=True):
        assert [name for name, _ in pairs(row)] == list(alone.classes)
        assert [p for _, p in pairs(row)] == pytest.approx(alone.probabilities, rel=1e-5)


def test_a_full_queue_answers_429_and_says_when_to_come_again(server: Server, images: dict[str, Path]) -> None:
    jpeg = images["small.jpg"].read_bytes()
    body, kind = form(*[("a.jpg", jpeg)] * MAX_IMAGES)
    with half_a_request(server, jpeg) as last, ThreadPoolExecutor() as pool:
        full = [pool.submit(ask, server, "/predict", body, kind) for _ in range(MAX_QUEUE // MAX_IMAGES)]
        until(lambda: metrics(server)["steady_queue_images",] == MAX_QUEUE)
        refused = ask(server, "/predict", jpeg)
        last.sendall(jpeg[-1:])
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        assert f"the queue is full ({MAX_QUEUE} images)" in refused.body["error"]
        assert [request.result().status for request in full] == [200] * len(full)
    assert ask(server, "/predict", jpeg).status == 200


def test_slow_clients_are_answered_408_and_clients_that_go_away_are_dropped(
    server: Server, images: dict[str, Path]
) -> None:
    jpeg = images["small.jpg"].read_bytes()
    before = metrics(server)
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as head,
        half_a_request(server, jpeg) as slow,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as gone,
    ):
        head.sendall(b"POST /predict HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
        lines = f"POST /predict HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
        gone.sendall(f"{lines}content-length: {len(jpeg)}\r\n\r\n".encode() + jpeg)
        until(lambda: metrics(server)["steady_queue_images",] == 1)
        gone.close()
        until(lambda: ("steady_requests_total", "/predict", "499") in metrics(server))
        assert reply_on(head)[0] == 408
        status, body = reply_on(slow)
        assert status == 408 and body["error"] == f"the request was not complete after {TIMEOUT} s: send it faster"
    after = metrics(server)
    assert after["steady_batch_images_sum",] == before["steady_batch_images_sum",], "nothing of it was computed"
    assert after["steady_queue_images",] == 0


def test_metrics_count_what_was_asked(server: Server, images: dict[str, Path]) -> None:
    before = metrics(server)
    jpeg = images["small.jpg"].read_bytes()
    for _ in range(3):
        assert ask(server, "/predict", jpeg).status == 200
    assert ask(server, "/predict", b"no image").status == 422
    after = metrics(server)

    def counted(*name: str) -> float:
        return after[name] - before.get(name, 0)

    assert counted("steady_requests_total", "/predict", "200") == 3
    assert counted("steady_requests_total", "/predict", "422") == 1
    assert counted("steady_images_total", "ok") == counted("steady_batch_images_sum") == 3
    assert counted("steady_images_total", "error") == 1
    assert counted("steady_request_seconds_count") == counted("steady_stage_seconds_count", "decode") == 4
    assert counted("steady_stage_seconds_count", "queue") == 3
    assert 0 < counted("steady_stage_seconds_sum", "network") < counted("steady_request_seconds_sum")
    assert after["process_resident_memory_bytes",] > 0
    about = ask(server, "/model").body
    assert after["steady_model_info", MODEL, about["version"]] == 1
    assert (about["num_classes"], about["classes"][1], about["max_batch"]) == (1000, "goldfish", 32)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "dark"),
    [pytest.param(390, True, id="390-dark"), pytest.param(1100, False, id="1100-light", marks=pytest.mark.slow)],
)
def test_the_page_classifies_pictures(
    server: Server, trained: Trained, images: dict[str, Path], browser: Browser, width: int, dark: bool
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme="dark" if dark else "light")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#access").is_visible(), "the server has a token"
    page.fill("#token", TOKEN)
    page.click("#access button")
    page.wait_for_selector("#access", state="hidden")
    assert page.locator("h1").inner_text() == MODEL
    names = ["large.jpg", "clear.png"]
    sent = {name: images[name].read_bytes() for name in names} | {"notes.txt": b"no image"}
    files: Any = [{"name": name, "mimeType": "", "buffer": content} for name, content in sent.items()]
    page.set_input_files("#files", files)
    page.wait_for_selector("#answers li:nth-child(3)[data-answered]")
    page.wait_for_selector("#answers li:nth-child(1)[data-answered]")
    bad, *shown = page.locator("#answers li").all()
    assert bad.locator(".bad").is_visible(), "what is no image says so"
    for item, expected in zip(reversed(shown), predict(trained, [images[name] for name in names]), strict=True):
        assert item.locator(".class span").all_inner_texts() == list(expected.classes)
    picture, button = shown[-1].locator("img"), shown[-1].locator(".why")
    button.click()
    page.wait_for_selector(".why[aria-pressed=true]")
    assert str(picture.get_attribute("src")).startswith("data:image/jpeg") and "came from" in str(
        picture.get_attribute("alt")
    )
    button.click()
    assert str(picture.get_attribute("src")).startswith("blob:") and not picture.get_attribute("alt")
    assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    assert [text for text in complaints if not re.search("status of (401|422)", text)] == []
    if place := os.environ.get("STEADYTRAIN_SCREENSHOTS"):
        page.screenshot(path=f"{place}/serve-{width}.png", full_page=True)


def test_the_health_check_of_the_container_asks_this_server(server: Server) -> None:
    text = containers.render("w.pth", "s.whl", image="cats")["Dockerfile"]
    command = json.loads(text.partition("    CMD ")[2].splitlines()[0])
    command[0], command[2] = sys.executable, command[2].replace(str(containers.PORT), str(server.port))
    assert subprocess.run(command, check=False).returncode == 0
    command[2] = command[2].replace("/health", "/nothing")
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 1


def test_the_wheel_in_a_container_s_folder_installs_this_steadytrain_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("network")
    written = containers.write(tmp_path / "out", tmp_path / "model.onnx", image="cats")
    (wheel,) = (path for path in written if path.suffix == ".whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--target", str(tmp_path / "installed"), str(wheel)], check=True)
    installed = tmp_path / "installed" / "steadytrain"
    package = Path(steadytrain.__file__).parent
    for path in package.rglob("*.*"):
        if path.suffix in (".py", ".toml", ".html", ".css", ".js", ".md", ".typed"):
            assert (installed / path.relative_to(package)).read_bytes() == path.read_bytes()
    code = "import steadytrain, importlib.metadata as m; print(steadytrain.__file__, m.version('steadytrain'))"
    asked = [sys.executable, "-c", code]
    done = subprocess.run(asked, env={"PYTHONPATH": str(tmp_path / "installed")}, capture_output=True, text=True)
    assert done.stdout.split() == [str(installed / "__init__.py"), steadytrain.__version__], done.stderr
    assert (tmp_path / "installed" / "bin" / "steady").exists()


def test_containers_run_as_nobody_and_the_manifest_is_valid(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text("network")
    (tmp_path / "model.bin").write_text("weights")
    image = "registry.example.com/Cats_and_dogs:1"
    written = containers.write(tmp_path / "out", tmp_path / "model.xml", image=image, words=["--max-batch", "8"])
    (wheel,) = (path.name for path in written if path.suffix == ".whl")
    assert sorted(path.name for path in written) == ["Dockerfile", "kubernetes.yaml", "model.bin", "model.xml", wheel]
    lines = (tmp_path / "out" / "Dockerfile").read_text().splitlines()
    assert f"USER {containers.USER}:{containers.USER}" in lines
    assert any("--only-binary=:all:" in line and f'"/tmp/{wheel}[serve,openvino]"' in line for line in lines)
    assert f'COPY ["{wheel}", "/tmp/"]' in lines and not any("--mount" in line for line in lines)  # any builder
    assert json.loads(lines[-1].removeprefix("ENTRYPOINT "))[-2:] == ["--max-batch", "8"]
    deployment, service = yaml.safe_load_all((tmp_path / "out" / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] and container["image"] == image
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["metadata"]["name"] == "cats-and-dogs"
    with pytest.raises(InputError, match="needs other files beside it"):
        (tmp_path / "net-0001.params").write_text("arrays")
        containers.write(tmp_path / "out", tmp_path / "net-0001.params", image=image)
    late = containers.render("model.onnx", wheel, image="registry.example.com/3d:1", grace_seconds=60)[
        "kubernetes.yaml"
    ]
    assert "terminationGracePeriodSeconds: 70" in late and "name: steady-3d" in late
    with pytest.raises(InputError, match="is no file: export the model first"):
        containers.write(tmp_path / "out", tmp_path / "none.onnx", image=image)
    checked = pytest.importorskip("kubernetes_validate")
    for manifest in (deployment, service):
        checked.validate(manifest, checked.latest_version(), strict=True)


def test_a_container_is_started_with_the_flags_that_were_given() -> None:
    settings = ServeSettings(threads=3, max_batch=8, token="s3cret", allow_urls=("https://a.org/x",), json_log=True)
    words = _flags(settings, {"--model": "digits", "--size": None, "--precision": None, "--threads": 3})
    assert words == [
        *("--model", "digits", "--threads", "3", "--max-batch", "8"),
        *("--allow-url", "https://a.org/x", "--json-log"),
    ]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(InputError, match="--max-batch is 0; it must be from 1 to 4,096"):
        ServeSettings(threads=1, max_batch=0)
    with pytest.raises(InputError, match="--max-images is 64 and --max-queue 8: the queue must hold a request"):
        ServeSettings(threads=1, max_queue=8)


def test_sigterm_answers_the_requests_at_hand_and_then_ends(server: Server, images: dict[str, Path]) -> None:
    """The last test of the file: it stops the server."""
    jpeg = images["large.jpg"].read_bytes()
    with half_a_request(server, jpeg) as last, ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, server, "/predict", jpeg) for _ in range(2)]
        until(lambda: metrics(server)["steady_queue_images",] == 2)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: ask(server, "/ready").status == 503)
        assert ask(server, "/ready").body == {"status": "stopping"}
        late = ask(server, "/predict", jpeg)
        assert late.status == 503 and "stopping" in late.body["error"]
        last.sendall(jpeg[-1:])
        assert reply_on(last)[0] == 200
        assert [request.result().status for request in waiting] == [200, 200]
    assert server.process.wait(60) == 0
    *lines, end = server.messages.read_text().splitlines()
    assert end == "stopped: pending requests were answered"
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert logged[-1]["path"] == "/predict" and {line["status"] for line in logged} >= {200, 401, 413, 429, 503}
    assert not [line for line in lines if "Traceback" in line]
