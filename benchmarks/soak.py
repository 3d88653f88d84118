"""What stays behind: a training that is restarted every minute with its page open; and a run of a million events.

``restarts``  ``steady train`` on small images is stopped by SIGTERM every minute, each fourth time by SIGKILL, and
              given again, while ``steady watch --web`` is open, one client follows its events and another loads the
              page. The last start goes on for ``--last`` seconds. Memory, threads and open files of both are recorded
              every two seconds. The slope of memory is a least-squares line over means of stretches, with its 95 %
              interval: of the page's process, by the hour and by thousand lines of the log, and of the last start of
              the training after its first third. What is left after each stop by SIGTERM is counted: shared memory,
              temporary files, and files of the run under temporary names.
``updates``   a small network is trained in this process, with an evaluation every 23 updates and a checkpoint every
              50: the slope of memory by thousand updates, after the first third.
``events``    a log of a million lines, in the proportions of a real run, is read by each view of it: wall and processor
              seconds until it has answered in full, and its largest memory: once of a log that was never read, then of
              one that was, as it is after the end of its training.

usage: python benchmarks/soak.py [restarts] [updates] [events] [--seconds 900] [--updates 6000]
                                  [--every 60] [--last 0] [--lines 1000000] [--save]
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import numpy as np
import psutil
from PIL import Image

import machine
from steadytrain.config import Budget, Data, Every, Model, Recipe
from steadytrain.events import Step
from steadytrain.run import Run

BAR_SECONDS, BAR_BYTES = 2.0, 300 * 2**20
IMAGES, EPOCH_BLOCKS = 480, 3
"""Of the long log: images of an update; an epoch is so many times what is repeated."""
PROGRESS = "import sys; from steadytrain.run import Run; assert Run.open(sys.argv[1]).progress().finished"
PARTS = ("restarts", "updates", "events")
STRETCHES, STUDENT = 12, 2.228
"""Means that a line is laid through, and how many standard errors its 95 % interval has then."""
GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "run-2026-11" / "run"


def get(port: int, path: str) -> Iterator[bytes]:
    """Ask for a path; yield the answer as it comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        while piece := connection.recv(1 << 16):
            yield piece


def start(*words: str, quiet: bool = True) -> subprocess.Popen[str]:
    """Start a command of steadytrain."""
    to = subprocess.DEVNULL if quiet else subprocess.PIPE
    return subprocess.Popen([*machine.STEADY, *words], stdout=to, stderr=subprocess.DEVNULL, text=True)


def page_of(*words: str) -> tuple[subprocess.Popen[str], int]:
    """Start a command that serves a page; return its process and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(*words, "--port", str(port))
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.02)
    return process, port


def samples_of(process: psutil.Process) -> dict[str, int]:
    """Return memory, threads and files of a process and its children."""
    row = {"rss": 0, "own": 0, "threads": 0, "files": 0, "processes": 0}
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            rss = each.memory_info().rss
            row["rss"] += rss
            row["own"] += rss if each == process else 0
            row["threads"] += each.num_threads()
            row["files"] += each.num_fds()
            row["processes"] += 1
    return row


def slope(rows: Sequence[dict[str, Any]], over: str = "at", unit: float = 3600, what: str = "own") -> dict[str, float]:
    """Return megabytes an hour, and by how much they may be wrong; empty of too few rows.

    Samples that follow one another are alike: the line is laid through the means of equal stretches.
    """
    if len(rows) < 4 * STRETCHES:
        return {}
    parts = [rows[len(rows) * n // STRETCHES : len(rows) * (n + 1) // STRETCHES] for n in range(STRETCHES)]
    x = [fmean(row[over] / unit for row in part) for part in parts]
    y = [fmean(row[what] / 1e6 for row in part) for part in parts]
    line = linear_regression(x, y)
    rest = sum((b - line.intercept - line.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(rest / (STRETCHES - 2) / sum((a - fmean(x)) ** 2 for a in x))
    return {"slope": line.slope, "plus_minus": STUDENT * error}


def left(folder: Path, run: Path) -> dict[str, list[str]]:
    """Return what a stopped command has left."""
    shared = sorted(path.name for path in Path(os.environ["STEADYTRAIN_SHM"]).iterdir())
    parts = [
        str(path.relative_to(run)) for path in run.rglob("*") if ".part" in path.name or path.name.endswith(".new")
    ]
    return {"shared": shared, "temporary": sorted(path.name for path in (folder / "tmp").iterdir()), "parts": parts}


def restarts(folder: Path, seconds: float, every: float, last: float) -> dict[str, Any]:
    """Train, stop and start again, with the page open; go on at the end for so many seconds."""
    os.environ |= {"TMPDIR": str(folder / "tmp"), "STEADYTRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    os.environ["STEADYTRAIN_SHM"] = tempfile.mkdtemp(dir="/dev/shm")  # other programs have files there, too
    (folder / "tmp").mkdir()
    draw = np.random.default_rng(0)
    for number in range(400):
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    run = folder / "run"
    words = ["train", str(folder / "images"), "--val-fraction", "0.1", "--model", "resnet20", "--size", "32"]
    words += ["--epochs", "100000", "--batch-size", "32", "--device", "cpu", "--run", str(run)]
    words += ["--set", "every.save_steps=50"]
    before = left(folder, folder)
    starts, of_page, codes, lefts = list[list[dict[str, Any]]](), list[dict[str, Any]](), list[int](), list[Any]()
    page: subprocess.Popen[str] | None = None
    is_over, loads, follows = threading.Event(), list[float](), [0]
    threads = list[threading.Thread]()

    def follow(port: int) -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                for _ in get(port, "/events"):
                    follows[0] += 1
                    if is_over.is_set():
                        break
            is_over.wait(0.2)

    def load(port: int) -> None:
        while not is_over.wait(5):
            since = time.perf_counter()
            with contextlib.suppress(OSError):
                if b"".join(get(port, "/")).startswith(b"HTTP/1.1 200"):
                    loads.append(time.perf_counter() - since)

    end = time.monotonic() + seconds
    while not starts or time.monotonic() < end:
        process, rows, began = start(*words), list[dict[str, Any]](), time.monotonic()
        known = psutil.Process(process.pid)
        is_last = last > 0 and began + every + last >= end
        span = last if is_last else every
        while time.monotonic() - began < span and process.poll() is None:
            if page is None and (run / "events.jsonl").exists():
                page, port = page_of("watch", str(run), "--web")
                threads = [threading.Thread(target=task, args=(port,), daemon=True) for task in (follow, load)]
                for thread in threads:
                    thread.start()
            time.sleep(2)
            rows.append({"at": time.monotonic() - began, **samples_of(known)})
            if page is not None:
                with (run / "events.jsonl").open("rb") as log:
                    lines = sum(1 for _ in log)
                of_page.append({"at": time.monotonic(), "lines": lines, **samples_of(psutil.Process(page.pid))})
        if process.poll() is not None and process.returncode != 75:
            raise SystemExit(f"steady {' '.join(words)} ended with {process.returncode}")
        is_killed = len(starts) % 4 == 3 and not is_last  # what that leaves has to be gone after the next stop
        process.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
        codes.append(process.wait(600))
        starts.append(rows)
        found = left(folder, run)
        lefts += [] if is_killed else [found]
        machine.say(f"start {len(starts)}: exit {codes[-1]}, left {found}, page {of_page[-1] if of_page else None}")
        if is_last:
            break
    is_over.set()
    if page is not None:
        page.send_signal(signal.SIGINT)
        page.wait(60)
    made = (run / "events.jsonl").read_bytes().count(b'"kind":"Step"')
    ends = [row[-1] for row in starts if row]
    half, longest = of_page[len(of_page) // 2 :], starts[-1][len(starts[-1]) // 3 :]
    shutil.rmtree(os.environ["STEADYTRAIN_SHM"])
    return {
        "seconds": seconds,
        "last_seconds": last,
        "starts": len(starts),
        "exits": sorted(set(codes)),
        "updates": made,
        "train": {
            "rss_mb_at_the_end_of_each_start": [row["own"] / 1e6 for row in ends],
            "rss_mb_of_the_last_start": [row["own"] / 1e6 for row in (starts[-1][0], longest[0], longest[-1])],
            "mb_per_hour_of_the_last_start": slope(longest),
            "mb_per_hour_with_children": slope(longest, what="rss"),
            "threads": sorted({row["threads"] for row in ends}),
            "files": sorted({row["files"] for row in ends}),
        },
        "page": {
            "mb_per_hour": slope(of_page),
            "mb_per_hour_of_the_second_half": slope(half),
            "mb_per_thousand_lines": slope(of_page, "lines", 1000),
            "lines": of_page[-1]["lines"] if of_page else 0,
            "rss_mb": [of_page[0]["rss"] / 1e6, of_page[-1]["rss"] / 1e6] if of_page else [],
            "threads": sorted({row["threads"] for row in of_page}),
            "files": [min(row["files"] for row in of_page), max(row["files"] for row in of_page)] if of_page else [],
            "pieces_of_events": follows[0],
            "loads": len(loads),
            "median_load_seconds": median(loads) if loads else None,
        },
        "left_before": before,
        "left": {
            key: sorted({name for each in lefts for name in each[key]}) for key in ("shared", "temporary", "parts")
        },
    }


def updates(folder: Path, number: int) -> dict[str, Any]:
    """Train in this process; read its memory every hundred updates."""
    from steadytrain.training import steps  # the memory of torch would count for that of each view

    draw = np.random.default_rng(0)
    for image in range(400):
        path = folder / "small" / "ab"[image % 2] / f"{image}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    data = Data(train=str(folder / "small"), size=8, holdout=0.1)
    every = Every(save_steps=50, evaluate_epochs=1)
    recipe = Recipe(data=data, model=Model("mlp"), batch_size=16, budget=Budget(steps=number), every=every)
    known, rows, kinds = psutil.Process(), list[dict[str, Any]](), Counter[str]()
    for event in steps(Run.create(folder / "updates", recipe)):
        kinds[event.kind] += 1
        if isinstance(event, Step) and event.step % 100 == 0:
            rows.append({"step": event.step, **samples_of(known)})
    late = rows[len(rows) // 3 :]
    return {
        "updates": number,
        "evaluations": kinds["Evaluated"],
        "checkpoints": kinds["Saved"],
        "mb_per_thousand_updates": slope(late, "step", 1000),
        "rss_mb": [row["own"] / 1e6 for row in (rows[0], late[0], late[-1])],
        "threads": sorted({row["threads"] for row in late}),
        "files": sorted({row["files"] for row in late}),
    }


def a_long_run(folder: Path, lines: int) -> Path:
    """Repeat what a kept run wrote between its start and its end until its log has so many lines."""
    run = folder / "long"
    run.mkdir()
    (run / "recipe.json").write_bytes((GOLDEN / "recipe.json").read_bytes())
    events = [json.loads(line) for line in (GOLDEN / "events.jsonl").read_bytes().splitlines()]
    last = next(number for number, event in enumerate(events) if event["kind"] == "Ended")
    first = next(number for number, event in enumerate(events) if event["kind"] == "Step")
    block = events[first:last]
    steps, seconds = events[last]["step"], events[last]["time"] - events[first]["time"]
    repeats = -(-(lines - first - 1) * EPOCH_BLOCKS // (len(block) * EPOCH_BLOCKS + 1))
    per_epoch = EPOCH_BLOCKS * steps  # the kept run's network sees its few images five times in an update
    events[0] |= {"steps": repeats * steps, "steps_per_epoch": float(per_epoch), "batch_size": IMAGES}
    events[0]["data"] |= {"num_train": IMAGES * per_epoch}

    def moved(event: dict[str, Any], number: int) -> dict[str, Any]:
        rises = {"time": seconds, "step": steps, "position": IMAGES * steps, "images": IMAGES * steps}
        if event["kind"] == "FeedStats":
            rises |= {key: event[key] for key in event if key.endswith("seconds") or key in ("asked", "starved")}
        event = event | {key: event[key] + number * rise for key, rise in rises.items() if key in event}
        if event["kind"] == "Accounted":
            event["wall_seconds"] += number * seconds
            event["seconds"] = event["seconds"] | {"update": event["seconds"].get("update", 0.0) + number * seconds}
        return event | ({"epoch": event["step"] / per_epoch} if "epoch" in event else {})

    def trained(at: dict[str, Any], number: int) -> dict[str, Any]:
        epoch = {"epoch": number // EPOCH_BLOCKS, "n": IMAGES * per_epoch, "loss": 1.0, "top1": 0.5}
        return {**at, "v": 1, "kind": "EpochTrained", "step": number * steps, **epoch, "images_per_second": 2000.0}

    def line(event: dict[str, Any]) -> str:
        return json.dumps(event, separators=(",", ":")) + "\n"

    with (run / "events.jsonl").open("w", encoding="utf-8") as log:
        log.writelines(map(line, events[:first]))
        for number in range(repeats):
            log.writelines(line(moved(event, number)) for event in block)
            if number and number % EPOCH_BLOCKS == 0:
                at = moved(block[-1], number)
                log.write(line(trained({key: at[key] for key in ("time", "attempt", "rank")}, number)))
        log.write(line(moved(events[last], repeats - 1) | {"status": "finished"}))
    return run


def timed(*words: str, program: Sequence[str] = machine.STEADY) -> dict[str, Any]:
    """Run a command; return its seconds and its largest memory."""
    since = time.perf_counter()
    process = subprocess.Popen([*program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    row = {"seconds": time.perf_counter() - since, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return row | {"largest_bytes": usage.ru_maxrss << 10, "exit": process.returncode}


def served(words: Sequence[str], is_answered: Callable[[int], bool]) -> dict[str, Any]:
    """Start a server; return the seconds until it has answered in full, and its largest memory until then."""
    since = time.perf_counter()
    process, port = page_of(*words)
    known, largest = psutil.Process(process.pid), 0
    answered = threading.Event()

    def ask() -> None:
        while not is_answered(port):
            time.sleep(0.05)
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while not answered.wait(0.05):
        largest = max(largest, known.memory_info().rss)
    row = {"seconds": time.perf_counter() - since, "cpu_seconds": sum(known.cpu_times()[:2])}
    row["largest_bytes"] = max(largest, known.memory_info().rss)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    return row


def has_the_run(port: int) -> bool:
    """Follow the events of a run's page until all points and the account have come."""
    b"".join(get(port, "/"))
    waiting, text = {b"event: all", b"event: account", b"event: state"}, b""
    for piece in get(port, "/events"):
        text = text[-20:] + piece
        waiting = {name for name in waiting if name not in text}
        if not waiting:
            return True
    return False


def has_the_list(port: int) -> bool:
    """Ask for the list of runs; say whether it has been read."""
    return b'"reading":false' in b"".join(get(port, "/runs.json"))


def events(folder: Path, lines: int) -> dict[str, Any]:
    """Let each view show a run with a long log."""
    os.environ["STEADYTRAIN_CACHE"] = str(folder / "cache")
    run = a_long_run(folder, lines)
    log, page = run / "events.jsonl", str(folder / "page.html")
    other = folder / "other"
    shutil.copytree(run, other)
    view: dict[str, Callable[[], dict[str, Any]]] = {
        "steady report": lambda: timed("report", str(run), "-o", "-"),
        "steady report -o page.html": lambda: timed("report", str(run), "-o", page),
        "steady report of two": lambda: timed("report", str(run), str(other), "-o", page),
        "steady diagnose": lambda: timed("diagnose", str(run)),
        "steady cost": lambda: timed("cost", str(run)),
        "steady runs": lambda: timed("runs", str(run)),
        "steady watch": lambda: timed("watch", str(run), "--seconds", "0"),
        "steady watch --web": lambda: served(["watch", str(run), "--web"], has_the_run),
        "steady report --serve": lambda: served(["report", "--serve", str(folder)], has_the_list),
        "what a restart reads": lambda: timed("-c", PROGRESS, str(run), program=[sys.executable]),
    }
    rows: dict[str, Any] = {"import alone (steady --version)": timed("--version")}
    rows["steady report, of a log that was never read"] = timed("report", str(run), "-o", "-")
    timed("diagnose", str(other))
    for name, look in view.items():
        row = look()
        row["holds"] = row["seconds"] <= BAR_SECONDS and row["largest_bytes"] <= BAR_BYTES
        rows[name] = row
        machine.say(f"{name}: {row}")
    with log.open("rb") as file:
        return {"lines": sum(1 for _ in file), "bytes": log.stat().st_size, "views": rows}


def main() -> None:
    """Measure, and record."""
    parser = machine.parser(__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--every", type=float, default=60)
    parser.add_argument("--last", type=float, default=0, help="seconds of the last start, within --seconds")
    parser.add_argument("--updates", type=int, default=6000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    args = parser.parse_args()
    chosen = args.parts or [*PARTS]
    rows = dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "events" in chosen:
            rows["events"] = events(folder, args.lines)
        if "updates" in chosen:
            os.environ["STEADYTRAIN_CACHE"] = str(folder / "cache")
            rows["updates"] = updates(folder, args.updates)
        if "restarts" in chosen:
            rows["restarts"] = restarts(folder, args.seconds, args.every, args.last)
    machine.record(machine.of_cases("soak", chosen, PARTS), rows, save=args.save)


if __name__ == "__main__":
    main()
