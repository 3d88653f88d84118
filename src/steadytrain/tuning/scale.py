"""Predict how fast several devices train together, from measurements of one device alone.

docs/scale.md has the model of an update, its sources, and what it leaves out: rings within machines and between them,
buckets of gradients that go while the backward pass does, and devices that wait for the slowest and for the loader.

>>> gradients = tuple(Gradient(bytes=1_000_000, ready=k / 10) for k in range(1, 11))
>>> device = MeasuredDevice(batch_size=32, forward_seconds=0.03, backward_seconds=0.06, update_seconds=0.01,
...                 gradients=gradients)
>>> four = predict(device, 4, MachineCluster(between=parse_link("10GbE")))
>>> round(four.images_per_second), round(four.efficiency, 2), four.limit
(1155, 0.9, 'network')
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

from steadytrain.errors import InputError, did_you_mean
from steadytrain.format import count, percent

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which a bucket is full: torch's defaults, which training uses."""

SMALL_LOSS = 0.05
"""Share of an update up to which losses do not count: "compute" is what limits."""

SAME = 0.001
"""Share by which rates may differ and are the same."""

LEAST_EFFICIENCY = 0.8
"""Efficiency of the recommended number: an image then costs a quarter more than on one device. A choice."""

MAX_DEVICES = 4096


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """The connection between two devices.

    Args:
        name: as the user wrote it.
        latency_seconds: of one message from a device to the next.
        bytes_per_second: of payload that a device sends while it receives as much.
        source: where both figures come from.
        is_local: it joins devices of one machine.
    """

    name: str
    latency_seconds: float
    bytes_per_second: float
    source: str
    is_local: bool = False


_GBIT = 1.25e8  # bytes per second
_NCCL = "latency of a ring's step by NCCL's tuning table"
_KINDS: tuple[tuple[str, float, dict[str, float], bool], ...] = (  # source, latency, bytes per second, local
    (
        "TCP in frames of 1500 bytes; half of the median round trip within a pod, 216 us (Guo et al. 2015, Pingmesh)",
        108e-6,
        {f"{gigabits}GbE": gigabits * _GBIT * 1448 / 1538 for gigabits in (1, 10, 25, 40, 100)},
        False,
    ),
    (
        f"InfiniBand, 30 bytes of headers to 4096; {_NCCL}",
        14e-6,
        {name: gigabits * _GBIT * 4096 / 4126 for name, gigabits in (("edr", 100), ("hdr", 200), ("ndr", 400))},
        False,
    ),
    (
        f"MXNet's tools/bandwidth measured 11.1 GB/s for each of two GPUs on 16 lanes of PCIe 3; {_NCCL}",
        5.7e-6,
        {"pcie3": 11.1e9, "pcie4": 22.2e9},
        True,
    ),
    (
        f"links of a GPU, each way, by NVIDIA's data sheet; {_NCCL}",
        3.4e-6,
        {"nvlink1": 80e9, "nvlink2": 150e9, "nvlink": 300e9, "nvlink3": 300e9, "nvlink4": 450e9},
        True,
    ),
)
LINKS: Mapping[str, NetworkLink] = {
    name: NetworkLink(name=name, latency_seconds=latency, bytes_per_second=rate, source=source, is_local=is_local)
    for source, latency, rates, is_local in _KINDS
    for name, rate in rates.items()
}
"""Links by name, each with physical figures. NVLink 1 to 4 belong to P100, V100, A100 (``nvlink`` as well) and H100."""

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_MEASURED = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)\s*(us|µs|ms|s)\s*,\s*([0-9.]+)\s*([kMG](?:bit|B))(?:/s|ps)?")


def parse_link(text: str) -> NetworkLink:
    """Read a link's name, or its latency and its bandwidth.

    Raises:
        InputError: it is neither, or a figure is invalid.

    >>> parse_link("0.1 ms,10 Gbit/s").bytes_per_second, parse_link("25gbe").name
    (1250000000.0, '25GbE')
    """
    links = {name.lower(): link for name, link in LINKS.items()}
    if (link := links.get(text.strip().lower())) is not None:
        return link
    if (match := _MEASURED.fullmatch(text.strip())) is not None:
        try:
            latency, rate = float(match[1]) * _SECONDS[match[2]], float(match[3]) * _BYTES[match[4]]
        except ValueError:
            latency, rate = 0.0, 0.0
        if rate > 0:
            return NetworkLink(name=text.strip(), latency_seconds=latency, bytes_per_second=rate, source="as given")
    raise InputError(
        f"the link {text!r} is unknown: name one of {', '.join(LINKS)}, or its latency and bandwidth, such as"
        f' "0.1 ms,10 Gbit/s".{did_you_mean(text, LINKS)}'
    )


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of one parameter: its ``bytes``, and when it is ``ready``, as a share of the backward pass."""

    bytes: int
    ready: float


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """The measured times of one device alone, with ``batch_size`` images.

    Args:
        forward_seconds, backward_seconds: of the passes of an update.
        update_seconds: of the rest: the optimizer, and the host between updates.
        spread: the standard deviation of an update, as a share of it.
        gradients: in the order in which they are ready.
    """

    batch_size: int
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    gradients: tuple[Gradient, ...]
    spread: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of an update."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds


@dataclass(frozen=True, kw_only=True)
class MachineCluster:
    """Machines of ``per_machine`` devices each: the link ``between`` them, and ``within`` one (None: the same)."""

    between: NetworkLink
    per_machine: int = 1
    within: NetworkLink | None = None

    def shape(self, devices: int) -> tuple[int, int]:
        """Return how many machines so many devices fill, and how many devices are on each."""
        on_each = min(devices, self.per_machine)
        return math.ceil(devices / on_each), on_each

    def all_reduce_seconds(self, bytes: float, devices: int, *, has_latency: bool = True) -> float:
        """Return the seconds in which so many devices get the sum of ``bytes`` that each of them has.

        ``has_latency``: False: over links whose messages arrive at once.

        >>> link = NetworkLink(name="x", latency_seconds=0.5, bytes_per_second=100.0, source="")
        >>> cluster = MachineCluster(between=link)
        >>> cluster.all_reduce_seconds(400, 1), cluster.all_reduce_seconds(400, 2), cluster.all_reduce_seconds(400, 4)
        (0.0, 5.0, 9.0)
        """
        rings = zip(self.shape(devices), (self.between, self.within or self.between), strict=True)
        return sum(
            2 * (n - 1) * (has_latency * link.latency_seconds + bytes / n / link.bytes_per_second) for n, link in rings
        )


def fit_link(backend: Mapping[str, Any], ranks: int) -> NetworkLink:
    """Fit a link to one back end of a document of ``steady bandwidth --json``: a single number, and all buckets."""
    (whole,) = (way for way in backend["ways"] if way["way"] == "buckets")
    few, many = 4, whole["bytes"]
    steps = 2 * (ranks - 1)
    rate = steps / ranks * (many - few) / max(whole["seconds"] - backend["latency_seconds"], 1e-9)
    return NetworkLink(
        name=f"{backend['backend']} here",
        latency_seconds=max(0.0, backend["latency_seconds"] / steps - few / ranks / rate),
        bytes_per_second=rate,
        source=f"fitted to all-reduces of {ranks} ranks here: {few} and {many:,.0f} bytes",
    )


def even_gradients(sizes: Sequence[int]) -> tuple[Gradient, ...]:
    """Return the gradients of parameters of so many bytes each, which are ready evenly, those of the last layer first.

    The median forecast differs by 0.01 % from one by the moments at which they are ready, of five networks.

    >>> even_gradients([100, 8])
    (Gradient(bytes=8, ready=0.5), Gradient(bytes=100, ready=1.0))
    """
    return tuple(Gradient(bytes=num, ready=k / len(sizes)) for k, num in enumerate(reversed(sizes), 1))


def buckets(
    gradients: Sequence[Gradient], *, first_bytes: float = FIRST_BUCKET, most_bytes: float = BUCKET
) -> list[Gradient]:
    """Group gradients into buckets, as DDP does: each is closed once it is full, and ready with its last gradient.

    >>> [(bucket.bytes, bucket.ready) for bucket in buckets(
    ...     [Gradient(bytes=3, ready=0.2), Gradient(bytes=3, ready=0.5), Gradient(bytes=9, ready=1.0)],
    ...     first_bytes=4, most_bytes=8)]
    [(6, 0.5), (9, 1.0)]
    """
    filled: list[Gradient] = []
    open_bytes, ready = 0, 0.0
    for gradient in gradients:
        open_bytes, ready = open_bytes + gradient.bytes, max(ready, gradient.ready)
        if open_bytes >= (most_bytes if filled else first_bytes):
            filled.append(Gradient(bytes=open_bytes, ready=ready))
            open_bytes = 0
    if open_bytes:
        filled.append(Gradient(bytes=open_bytes, ready=ready))
    return filled


def exposed_seconds(exchanged: Sequence[Gradient], backward_seconds: float, cost: Callable[[int], float]) -> float:
    """Return how long the exchange of buckets goes on after a backward pass of so many seconds.

    Args:
        exchanged: the buckets, in their order.
        cost: seconds of a bucket's exchange, by its bytes.
    """
    end = 0.0
    for bucket in exchanged:
        end = max(end, bucket.ready * backward_seconds) + cost(bucket.bytes)
    return max(0.0, end - backward_seconds)


def expected_maximum(n: int) -> float:
    """Approximate the expected maximum of ``n`` independent standard normal numbers.

    >>> [round(expected_maximum(n), 2) for n in (1, 2, 8, 64)]  # exactly: 0, 0.56, 1.42, 2.34
    [0.0, 0.59, 1.43, 2.34]
    """
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


@dataclass(frozen=True, kw_only=True)
class ScalePrediction:
    """The predicted speed of a number of devices.

    Args:
        batch_size: images of an update, on all devices.
        efficiency: images per second over those of one device, times the devices.
        exchange_seconds: of an update's gradients, hidden or not; ``exposed_seconds`` of them are not hidden.
        losses: seconds of an update that are lost, by cause: ``network`` (bandwidth), ``latency``,
            ``slowest`` (all wait for that device) and ``input``.
        limit: the largest loss, or ``compute`` where all of them together are small.
    """

    devices: int
    machines: int
    batch_size: int
    images_per_second: float
    efficiency: float
    step_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    losses: Mapping[str, float]
    limit: str


def predict(
    device: MeasuredDevice,
    devices: int,
    cluster: MachineCluster,
    *,
    loader_images_per_second: float = math.inf,
    bucket_bytes: float = BUCKET,
) -> ScalePrediction:
    """Predict the speed of a number of devices, each with the batch that was measured on one.

    ``loader_images_per_second``: of one machine. ``bucket_bytes``: after which a bucket is full; 0: none has two.
    """
    machines, on_each = cluster.shape(devices)
    batch_size = device.batch_size * devices
    filled = buckets(device.gradients, first_bytes=min(FIRST_BUCKET, bucket_bytes), most_bytes=bucket_bytes)
    all_reduce = partial(cluster.all_reduce_seconds, devices=devices)
    exposed = exposed_seconds(filled, device.backward_seconds, all_reduce)
    by_bytes = exposed_seconds(filled, device.backward_seconds, partial(all_reduce, has_latency=False))
    slowest = device.step_seconds * device.spread * expected_maximum(devices)
    step = device.step_seconds + exposed + slowest
    # The machine with the most devices waits longest for its loader.
    waiting = max(0.0, batch_size * on_each / devices / loader_images_per_second - step)
    losses = {"network": by_bytes, "latency": exposed - by_bytes, "slowest": slowest, "input": waiting}
    step += waiting
    rate = batch_size / step
    alone_rate = min(device.batch_size / device.step_seconds, loader_images_per_second)
    return ScalePrediction(
        devices=devices,
        machines=machines,
        batch_size=batch_size,
        images_per_second=rate,
        efficiency=rate / (devices * alone_rate),
        step_seconds=step,
        exchange_seconds=sum(all_reduce(bucket.bytes) for bucket in filled),
        exposed_seconds=exposed,
        losses=losses,
        limit="compute" if sum(losses.values()) <= SMALL_LOSS * step else max(losses, key=losses.__getitem__),
    )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The recommended number of devices.

    Args:
        devices: recommended: the largest number whose efficiency is high enough.
        fastest: the number that trains fastest.
        worse_from: the first number after the fastest that trains slower; None: more is never worse.
    """

    devices: int
    fastest: int
    worse_from: int | None
    words: tuple[str, ...]


_REASONS = {
    "compute": "more are less efficient",
    "network": "more would wait for the network's bandwidth",
    "latency": "more would wait for the network's latency",
    "slowest": "more would wait for the slowest of them",
    "input": "more would wait for the loader",
}


def advise(predictions: Sequence[ScalePrediction], *, least_efficiency: float = LEAST_EFFICIENCY) -> Advice:
    """Recommend a number of devices.

    Args:
        predictions: for rising numbers of devices, from 1 on.
        least_efficiency: of the recommended number.
    """
    chosen = [row for row in predictions if row.efficiency >= least_efficiency - 1e-9][-1]
    last = predictions[-1]
    fastest = max(predictions, key=lambda row: row.images_per_second)  # of equals the one with the fewest devices
    efficiency = f"at an efficiency of {percent(chosen.efficiency)}"
    if chosen is last:
        words = [f"recommended: all {count(last.devices, 'device')}, {efficiency}"]
    else:
        reason = _REASONS[predictions[predictions.index(chosen) + 1].limit]
        words = [f"recommended: {chosen.devices} of {count(last.devices, 'device')}, {efficiency}; {reason}"]
    beyond = predictions[predictions.index(fastest) + 1 :]
    slower = [row for row in beyond if row.images_per_second < (1 - SAME) * fastest.images_per_second]
    if slower:
        most, least = (f"{row.images_per_second:,.4g} images/s" for row in (fastest, last))
        words.append(
            f"more is worse: {most} with {fastest.devices}, {least} with {last.devices} (limit: {slower[0].limit})"
        )
    elif beyond:
        words.append(f"more than {fastest.devices} adds nothing (limit: {last.limit})")
    return Advice(
        devices=chosen.devices,
        fastest=fastest.devices,
        worse_from=slower[0].devices if slower else None,
        words=tuple(words),
    )


def counts(most: int, *also: int) -> list[int]:
    """Return the numbers of devices to show: powers of two up to ``most``, itself, and others.

    >>> counts(12, 5)
    [1, 2, 4, 5, 8, 12]
    """
    powers = {1 << k for k in range(most.bit_length())}
    return sorted(n for n in powers | {most, *also} if 1 <= n <= most)
