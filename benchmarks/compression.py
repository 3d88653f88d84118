"""Seconds to exchange compressed gradients over slow links: two ranks in network namespaces, joined by a shaped cable.

For each rate of the cable: seconds of an exchange of all gradients of a model, as ``steady bandwidth`` measures it, in
32 bits, as fp16 and bf16, and how many times faster than in 32 bits.

Needs root on Linux (``ip`` and ``tc`` of iproute2). Nothing but the two namespaces of its own is touched.

usage: python benchmarks/compression.py [--model resnet50] [--seconds 10] [--rates 100mbit ...] [--save]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import machine

RATES = ("100mbit", "1gbit", "10gbit", "")  # "": as fast as this machine copies
NETWORK = "10.63.255"
PORT = 29871
SECONDS = 3600.0


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate")
    parser.add_argument("--rates", nargs="*", default=list(RATES), help="as tc takes them; '' for an unshaped cable")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"seconds": arguments.seconds, "links": []}
    with cable() as ends:
        for rate in arguments.rates:
            shape(ends, rate)
            rows = measured(ends, arguments.model, arguments.seconds)
            document |= {"model": rows["model"], "bytes": 4 * rows["parameters"]}
            (gloo,) = rows["backends"]
            document["links"].append({"rate": rate or "unshaped", **row(gloo)})
            machine.say(json.dumps(document["links"][-1]))
    machine.record("compression", document, save=arguments.save)


def row(gloo: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of an exchange of all gradients, each way, and how many times faster than plain buckets."""
    seconds = {way["way"]: round(way["seconds"], 5) for way in gloo["ways"]}
    faster = {way: round(seconds["buckets"] / seconds[way], 2) for way in ("fp16", "bf16")}
    return {"latency_seconds": round(gloo["latency_seconds"], 6), "seconds": seconds, "times_faster": faster}


@contextmanager
def cable() -> Iterator[list[str]]:
    """Make two namespaces with an address each, and remove them at the end; yield their names."""
    names = [f"steady{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def shape(ends: list[str], rate: str, burst: str = "1mb") -> None:
    """Let each end send no faster than ``rate``, but for so much at once."""
    for name in ends:
        tc = ["tc", "-n", name, "qdisc"]
        subprocess.run([*tc, "del", "dev", "eth0", "root"], check=False, capture_output=True)
        if rate:
            run(*tc, "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")


def measured(ends: list[str], model: str, seconds: float) -> dict[str, Any]:
    """Run ``steady bandwidth`` with a rank in each namespace; return its document."""
    words = ["bandwidth", "--model", model, "--backend", "gloo", "--seconds", str(seconds), "--json"]
    document: dict[str, Any] = json.loads(in_both(ends, "steadytrain", *words))
    return document


def in_both(ends: list[str], module: str, *words: str, cores: Sequence[int] = ()) -> bytes:
    """Run a module as a rank in each namespace; return what the first prints. ``cores``: one for each rank."""
    ranks = []
    for rank, name in enumerate(ends):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": f"{NETWORK}.1", "MASTER_PORT": PORT}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        pinned = ["taskset", "-c", str(cores[rank])] if cores else []
        command = ["ip", "netns", "exec", name, *pinned, sys.executable, "-m", module, *words]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    try:
        (out, _), _ = [process.communicate(timeout=SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        raise SystemExit(f"the ranks ended with {[process.returncode for process in ranks]}")
    assert isinstance(out, bytes)
    return out


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
