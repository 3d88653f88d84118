"""``steady serve`` under load: images per second beside direct inference and other servers, latency, and a soak.

In turns, each contender alone on the machine with its client:

``direct``    a process that decodes the same files with as many threads as the server and computes batches of the same
              size with the same module, as fast as it can: what ``steady predict`` reaches
``steady``    ``steady serve``, under wrk on loopback with two batches of connections, an image a request
``litserve``  LitServe with the same model and batch (``peers/serve_litserve.py``)
``fastapi``   a plain FastAPI application, an image at a time (``peers/serve_fastapi.py``)

Client and server share the machine's cores, so beside images per second stand the processor seconds of the server
alone for an image. Then ``steady`` gets requests at a constant rate of 70 % of what it reached: p50 and p99 from the
moment a request was due. ``--soak-minutes`` sends good requests beside malformed, huge, slow and cut ones, and looks at
statuses and memory (with ``--rounds 0`` alone, as ``serve_soak``). The weights are random: speed does not depend on
them.

usage: python benchmarks/serve.py --images FOLDER --peers PYTHON [--rounds 3] [--seconds 20] [--soak-minutes 10]
           [--save]

wrk is the Debian package of that name; ``--peers`` is a Python with litserve, fastapi, torch and timm.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image

import machine

HERE = Path(__file__).resolve().parent
BATCH, LOAD = 32, 0.7
BAR_RATE, BAR_P99 = 0.9, 2.0
LUA = """
local bodies, at = {}, 0
for path in io.lines("LIST") do
  local file = io.open(path, "rb")
  bodies[#bodies + 1] = file:read("*a")
  file:close()
end
request = function()
  at = at % #bodies + 1
  return wrk.format("POST", "/predict", {["Content-Type"] = "KIND"}, bodies[at])
end
"""


@dataclass(frozen=True)
class Contender:
    """A server: its command (PORT is replaced), where it says that it is ready, and the content type that it takes."""

    command: list[str]
    ready: str
    kind: str


# -- direct inference ------------------------------------------------------------------------------------------------


def direct(weights: str, model: str, folder: str, seconds: float) -> None:
    """Decode and compute for some seconds; print images per second and processor seconds for an image."""
    from steadytrain.machine.process import share_cores

    share_cores()  # as every command of steadytrain does
    import torch

    from steadytrain.data.loader import default_threads
    from steadytrain.data.loader.decode import Scratch
    from steadytrain.export.batching import PixelRoom, decode_square, open_image
    from steadytrain.training import restore
    from steadytrain.training.build import evaluation_crop

    trained = restore(weights, model=model, device="cpu")
    crop, threads = evaluation_crop(trained.input), default_threads(pin=True)
    files = itertools.cycle([path.read_bytes() for path in sorted(Path(folder).iterdir())])
    most = 10**8
    room = PixelRoom(most)

    def squares() -> Any:
        scratch = Scratch()
        squares = []
        for data in itertools.islice(files, BATCH // threads):
            squares.append(decode_square(data, open_image(data, max_pixels=most), crop, scratch, room))
        return np.stack(squares)

    def compute(batch: Any) -> None:
        with torch.no_grad(), trained.policy.autocast():
            images = trained.policy.images(torch.from_numpy(batch), trained.input.mean, trained.input.std)
            trained.probabilities(trained.module(images).float()).topk(5)

    with ThreadPoolExecutor(threads) as pool:
        coming = [pool.submit(squares) for _ in range(2 * threads)]
        done, began, spent = -2 * BATCH, 0.0, 0.0
        while done <= 0 or time.perf_counter() - began < seconds:
            if done == 0:
                began, spent = time.perf_counter(), time.process_time()
            parts, coming = coming[:threads], coming[threads:]
            batch = np.concatenate([part.result() for part in parts])
            coming += [pool.submit(squares) for _ in range(threads)]
            compute(batch)
            done += BATCH
        wall, cpu = time.perf_counter() - began, time.process_time() - spent
        print(json.dumps({"images_per_second": done / wall, "cpu_seconds_per_image": cpu / done}))


# -- servers under wrk -----------------------------------------------------------------------------------------------


@contextmanager
def running(contender: Contender, port: int) -> Iterator[psutil.Process]:
    """Start a server and wait until it is ready; end it at the end."""
    command = [word.replace("PORT", str(port)) for word in contender.command]
    with tempfile.TemporaryFile() as log:
        # As ours has it: threads that spin while they wait would take the cores from the client, and from each other.
        environment = {"GOMP_SPINCOUNT": "1000", **os.environ}
        process = psutil.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while True:
                with suppress(OSError):
                    if urllib.request.urlopen(f"http://127.0.0.1:{port}{contender.ready}", timeout=5).status == 200:
                        break
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"{command[:3]} ended: {log.read().decode()[-800:]}")
                time.sleep(0.2)
            yield process
        finally:
            children = process.children(recursive=True) if process.is_running() else []  # else its words are raised
            process.terminate()
            try:
                process.wait(30)
            except psutil.TimeoutExpired:
                process.kill()
            for child in children:
                with suppress(psutil.Error):
                    child.kill()


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its children until now."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def under_wrk(contender: Contender, port: int, script: Path, seconds: float, connections: int) -> dict[str, float]:
    """Load a server; return images per second, latencies in seconds and processor seconds for an image."""
    with running(contender, port) as process:
        url = f"http://127.0.0.1:{port}/predict"
        base = ["wrk", "-t1", f"-c{connections}", "--timeout", "60s", "--latency", "-s", str(script)]
        subprocess.run([*base, "-d5s", url], check=True, capture_output=True)
        before = cpu_seconds(process)
        out = subprocess.run([*base, f"-d{seconds:g}s", url], check=True, capture_output=True, text=True).stdout
        spent = cpu_seconds(process) - before
    match = re.search(r"(\d+) requests in ([\d.]+)(s|m)", out)
    assert match is not None, out
    requests, wall = int(match[1]), float(match[2]) * (60 if match[3] == "m" else 1)
    failed = sum(int(number) for number in re.findall(r"Non-2xx or 3xx responses: (\d+)", out))
    if failed or not requests or "Socket errors" in out:
        raise SystemExit(f"{contender.command[1]}: {out}")
    return {"images_per_second": requests / wall, "cpu_seconds_per_image": spent / requests}


# -- a constant rate -------------------------------------------------------------------------------------------------


async def ask(port: int, head: bytes, body: bytes) -> int:
    """Send one request on a connection of its own; return its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        answer = await reader.read()
        return int(answer.split(b" ", 2)[1]) if answer else 0
    finally:
        writer.close()


HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/jpeg\r\n"


async def at_rate(port: int, bodies: list[bytes], rate: float, seconds: float) -> dict[str, float]:
    """Send requests at a constant rate, whether they are answered or not; return latencies since they were due."""
    began, latencies = time.perf_counter() + 0.1, list[float]()

    async def one(number: int) -> None:
        due = began + number / rate
        await asyncio.sleep(due - time.perf_counter())
        status = await ask(port, HEAD, bodies[number % len(bodies)])
        assert status == 200, status
        latencies.append(time.perf_counter() - due)

    await asyncio.gather(*(one(number) for number in range(int(rate * seconds))))
    p50, p90, p99 = np.percentile(latencies, [50, 90, 99]).tolist()
    return {
        "images_per_second": rate,
        "n": len(latencies),
        "p50_seconds": p50,
        "p90_seconds": p90,
        "p99_seconds": p99,
        "p99_to_p50": p99 / p50,
    }


# -- the soak --------------------------------------------------------------------------------------------------------


class Soak:
    """Clients of every kind against one server."""

    def __init__(self, port: int, bodies: list[bytes], end: float) -> None:
        self.port, self.bodies, self.end = port, bodies, end
        self.statuses: dict[str, Counter[int]] = defaultdict(Counter)
        self.latencies: list[float] = []
        self.random = random.Random(0)

    def goes_on(self) -> bool:
        """Return whether time is left."""
        return time.monotonic() < self.end

    async def good(self) -> None:
        """Send photographs, one after another."""
        while self.goes_on():
            since = time.perf_counter()
            self.statuses["good"][await ask(self.port, HEAD, self.random.choice(self.bodies))] += 1
            self.latencies.append(time.perf_counter() - since)

    async def malformed(self) -> None:
        """Send truncated and altered photographs, wrong types, broken forms and JSON, no HTTP at all."""
        form = b"content-type: multipart/form-data; boundary=x\r\n"
        start = HEAD.rpartition(b"content-type")[0]
        while self.goes_on():
            body = bytearray(self.random.choice(self.bodies))
            kind = self.random.randrange(6)
            if kind == 0:
                sent = HEAD, bytes(body[: self.random.randrange(len(body) // 2)])
            elif kind == 1:
                place = self.random.randrange(200)
                body[place : place + 60] = self.random.randbytes(60)
                sent = HEAD, bytes(body)
            elif kind == 2:
                sent = start + b"content-type: application/json\r\n", b'{"images": [' + self.random.randbytes(40)
            elif kind == 3:
                sent = start + form, b"--x\r\n" + self.random.randbytes(300)
            elif kind == 4:
                sent = start + b"content-type: text/html\r\n", b"<html>"
            else:
                sent = b"\x16\x03\x01" + self.random.randbytes(30) + b"\r\n\r\n", b""
            with suppress(OSError, ValueError):
                # An altered photograph may still be one.
                self.statuses["altered" if kind == 1 else "malformed"][await ask(self.port, *sent)] += 1
            await asyncio.sleep(0.02)

    async def huge(self) -> None:
        """Send more bytes than allowed, announced or not, and a small file of very many pixels."""
        bomb = io.BytesIO()
        Image.new("L", (8000, 5000)).save(bomb, "PNG")
        large = bytes(3 * 2**20)
        while self.goes_on():
            for head, body in ((HEAD, large), (HEAD + b"expect: 100-continue\r\n", large), (HEAD, bomb.getvalue())):
                with suppress(OSError):
                    self.statuses["huge"][await ask(self.port, head, body)] += 1
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
                for _ in range(24):
                    writer.write(b"%x\r\n" % 2**17 + bytes(2**17) + b"\r\n")
                answer = await reader.read()
                self.statuses["huge"][int(answer.split(b" ", 2)[1])] += 1
                writer.close()
            await asyncio.sleep(0.5)

    async def slow(self, *, in_head: bool) -> None:
        """Send a byte a second, of the head or of the body, until the server ends it."""
        while self.goes_on():
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(HEAD if in_head else HEAD + b"content-length: 90000\r\n\r\n")
                answer = asyncio.ensure_future(reader.read())
                while not answer.done():
                    writer.write(b"x")
                    await asyncio.wait({answer}, timeout=1)
                text = answer.result()
                self.statuses["slow"][int(text.split(b" ", 2)[1]) if text else 0] += 1
                writer.close()

    async def cut(self) -> None:
        """Send requests whose client goes away: in the head, in the body, or before the answer."""
        while self.goes_on():
            body = self.random.choice(self.bodies)
            text = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(text[: self.random.choice((20, len(text) // 2, len(text)))])
                await asyncio.sleep(self.random.random() * 0.05)
                writer.transport.abort()
                self.statuses["cut"][0] += 1
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Run all clients, until time is over."""
        many = [self.slow(in_head=number % 2 == 0) for number in range(40)]
        await asyncio.gather(self.good(), self.good(), self.malformed(), self.huge(), self.cut(), *many)


async def soak(process: psutil.Process, port: int, bodies: list[bytes], minutes: float) -> dict[str, Any]:
    """Soak a server; return statuses by kind of client, and its memory over time."""
    clients = Soak(port, bodies, time.monotonic() + 60 * minutes)
    memory, done = list[int](), asyncio.ensure_future(clients.run())
    while not done.done():
        memory.append(process.memory_info().rss)
        await asyncio.wait({done}, timeout=5)
    done.result()
    quarter = len(memory) // 4
    before, after = (median(part) for part in (memory[quarter : 2 * quarter], memory[-quarter:]))
    refused = [status for kind in ("malformed", "huge", "slow") for status in clients.statuses[kind]]
    half = len(clients.latencies) // 2
    return {
        "minutes": minutes,
        "statuses": {kind: dict(sorted(counts.items())) for kind, counts in clients.statuses.items()},
        "rss_bytes": {"second_quarter": before, "last_quarter": after, "largest": max(memory), "smallest": min(memory)},
        "rss_growth": after / before - 1,
        "open_files": process.num_fds(),
        "good_p50_seconds": [median(clients.latencies[:half]), median(clients.latencies[half:])],
        "only_4xx_for_bad": all(400 <= status < 500 for status in refused),
        "good_all_answered": set(clients.statuses["good"]) == {200},
    }


# -- all of it -------------------------------------------------------------------------------------------------------


def contenders(weights: Path, model: str, peers: Path | None) -> dict[str, Contender]:
    """Return the servers to load."""
    steady = [*machine.STEADY, "serve", str(weights), "--model", model, "--device", "cpu"]
    servers = {"steady": Contender([*steady, "--port", "PORT", "--max-batch", str(BATCH)], "/ready", "image/jpeg")}
    if peers is not None:
        for name, path, kind, more in (
            ("litserve", "/health", "application/json", [str(BATCH)]),
            ("fastapi", "/health", "image/jpeg", []),
        ):
            words = [str(peers), str(HERE / "peers" / f"serve_{name}.py"), str(weights), model, "PORT", *more]
            servers[name] = Contender(words, path, kind)
    return servers


def write_script(folder: Path, kind: str, paths: list[Path]) -> Path:
    """Write what wrk sends: each file as a body, or in JSON."""
    if kind == "application/json":
        import base64

        encoded = []
        for path in paths:
            encoded.append(folder / f"{path.stem}.json")
            encoded[-1].write_text(json.dumps({"image": base64.b64encode(path.read_bytes()).decode()}))
        paths = encoded
    listed = folder / f"{kind.replace('/', '-')}.txt"
    listed.write_text("\n".join(map(str, paths)) + "\n")
    script = listed.with_suffix(".lua")
    script.write_text(LUA.replace("LIST", str(listed)).replace("KIND", kind))
    return script


def measure(args: argparse.Namespace, folder: Path, paths: list[Path]) -> dict[str, Any]:
    """Measure all contenders in turns, and ours at a constant rate."""
    import timm
    import torch

    weights = folder / "weights.pth"
    torch.save(timm.create_model(args.model.removeprefix("timm/")).state_dict(), weights)
    servers = contenders(weights, args.model, args.peers)
    scripts = {name: write_script(folder, server.kind, paths) for name, server in servers.items()}
    turns: dict[str, list[dict[str, float]]] = defaultdict(list)
    command = [sys.executable, __file__, "--direct", str(weights), args.model, str(args.images), str(args.seconds)]
    for number in range(args.rounds):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        turns["direct"].append(json.loads(output.splitlines()[-1]))
        for place, (name, server) in enumerate(servers.items()):
            port = args.port + 10 * number + place
            turns[name].append(under_wrk(server, port, scripts[name], args.seconds, 2 * BATCH))
            machine.say(number, name, turns[name][-1])
    figures = {
        name: {key: median(row[key] for row in rows) for key in rows[0]} | {"turns": rows}
        for name, rows in turns.items()
    }
    ratios = [
        s["images_per_second"] / d["images_per_second"] for s, d in zip(turns["steady"], turns["direct"], strict=True)
    ]
    bodies = [path.read_bytes() for path in paths]
    with running(servers["steady"], args.port + 9):
        rate = LOAD * figures["steady"]["images_per_second"]  # type: ignore[operator]
        asyncio.run(at_rate(args.port + 9, bodies, rate, 5))
        loaded = asyncio.run(at_rate(args.port + 9, bodies, rate, max(args.seconds, 60)))
    return {
        "contenders": figures,
        "steady_to_direct": median(ratios),
        "steady_to_direct_turns": ratios,
        "direct_to_steady_cpu_seconds": figures["direct"]["cpu_seconds_per_image"]  # type: ignore[operator]
        / figures["steady"]["cpu_seconds_per_image"],
        "at_70_percent": loaded,
        "met": {"rate": median(ratios) >= BAR_RATE, "p99": loaded["p99_to_p50"] <= BAR_P99},
    }


def main() -> int:
    """Measure, record, and return 1 where a bar is missed."""
    parser = machine.parser(__doc__, rounds=3)
    parser.add_argument("--images", type=Path, required=True, help="a folder of JPEG files")
    parser.add_argument("--model", default="timm/resnet50")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--soak-minutes", type=float, default=0)
    parser.add_argument("--soak-model", default="timm/test_resnet")
    parser.add_argument("--port", type=int, default=18400)
    args = parser.parse_args()
    if shutil.which("wrk") is None and args.rounds:
        parser.error("wrk is not installed: apt install wrk")
    paths = sorted(args.images.iterdir())
    document: dict[str, Any] = {"model": args.model, "batch": BATCH, "images": len(paths)}
    document["mean_bytes"] = round(sum(path.stat().st_size for path in paths) / len(paths))
    with tempfile.TemporaryDirectory() as folder:
        if args.rounds:
            document |= measure(args, Path(folder), paths)
        if args.soak_minutes:
            import timm
            import torch

            weights = Path(folder) / "soak.pth"
            torch.save(timm.create_model(args.soak_model.removeprefix("timm/")).state_dict(), weights)
            server = contenders(weights, args.soak_model, None)["steady"]
            limits = ["--max-bytes", str(2**20), "--timeout-seconds", "5", "--max-pixels", "10000000"]
            server = Contender([*server.command, *limits], server.ready, server.kind)
            with running(server, args.port + 8) as process:
                bodies = [path.read_bytes() for path in paths]
                document["soak"] = asyncio.run(soak(process, args.port + 8, bodies, args.soak_minutes))
                document["soak"]["model"] = args.soak_model
    machine.record("serve" if args.rounds else "serve_soak", document, save=args.save)
    return 0 if all(document.get("met", {}).values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--direct"]:
        direct(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
        sys.exit(0)
    sys.exit(main())
