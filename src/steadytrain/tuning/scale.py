"""Predict how fast several devices train together, from measurements of one device alone.

An update is a forward pass, a backward pass and the optimizer. While the backward pass goes on, gradients that are
ready are exchanged in buckets, one after another; the exchange that remains when the pass ends is exposed and makes the
update longer. The parts of the model and their sources:

- An exchange of ``B`` bytes among ``n`` devices in a ring takes ``2 (n - 1) (latency + B / n / bandwidth)``: a
  reduce-scatter and an all-gather of ``n - 1`` steps each (Thakur, Rabenseifner and Gropp 2005, "Optimization of
  Collective Communication Operations in MPICH", section 4; Patarasuk and Yuan 2009 show that no other way needs fewer
  bytes). Parameter servers on the same machines move as many (Jiang et al. 2020, BytePS, section 2).
- Between machines of ``g`` devices it is a reduce-scatter within each machine, a ring between the machines, and an
  all-gather within each (Jia et al. 2018, "Highly Scalable Deep Learning Training System", section 3.4). The devices
  of a machine share its network: together they send what one device per machine would.
- Buckets are filled in the order in which gradients are ready, the first with 1 MiB, the others with 25 MiB. A bucket
  starts when its last gradient is ready and the one before it is through (Li et al. 2020, "PyTorch Distributed",
  section 3.2; Shi et al. 2018, "A DAG Model of Synchronous SGD", section IV).
- Passes over fewer images take ``fixed + images * per_image`` seconds, by two measured sizes.
- The loader of a machine gives so many images a second at most, however many devices wait for it.
- All devices wait for the slowest. Where an update varies by a share `spread`, independently on each, it takes
  ``1 + spread * m`` as long, ``m`` being the expected maximum of `n` normal numbers (Blom 1958: the quantile at
  ``(n - 3/8) / (n + 1/4)``).

What it leaves out: devices that are slower all the time, and that an exchange through a CPU takes time from what that
CPU computes. Both make real updates longer.

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
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

from steadytrain.errors import InputError, did_you_mean
from steadytrain.format import count, percent

Limit = Literal["compute", "network", "latency", "slowest", "input", "overhead"]

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which a bucket is full: torch's defaults, which training uses."""

SMALL_LOSS = 0.05
"""Up to this share of an update lost, "compute" is what limits."""

SAME = 0.001
"""Rates that differ less are the same."""

LEAST_EFFICIENCY = 0.8
"""Of the recommended number: an image then costs a quarter more than on one device. A choice, not a measurement."""

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


def _known_links() -> dict[str, NetworkLink]:
    """Return the known links by name, with physical figures."""
    tcp = (
        "line rate x 1448/1538, which TCP leaves of frames of 1500 bytes; latency: half of the median round trip within"
        " a pod, 216 us (Guo et al. 2015, Pingmesh)"
    )
    nccl = "latency of a ring's step by NCCL's tuning table"
    pcie = f"MXNet's tools/bandwidth measured 11.1 GB/s for each of two GPUs on 16 lanes; {nccl}"
    rows: list[tuple[str, float, float, str, bool]] = [
        *((f"{gigabits}GbE", 108e-6, gigabits * 1.25e8 * 1448 / 1538, tcp, False) for gigabits in (1, 10, 25, 40, 100)),
        *(
            (name, 14e-6, gigabits * 1.25e8 * 4096 / 4126, f"InfiniBand, 30 bytes of headers to 4096; {nccl}", False)
            for name, gigabits in (("edr", 100), ("hdr", 200), ("ndr", 400))
        ),
        ("pcie3", 5.7e-6, 11.1e9, pcie, True),
        ("pcie4", 5.7e-6, 22.2e9, f"{pcie}; its lanes are twice as fast", True),
        *(
            (name, 3.4e-6, links * rate * 1e9, f"{links} links of {rate} GB/s (NVIDIA's data sheet); {nccl}", True)
            for name, links, rate in (
                ("nvlink1", 4, 20),
                ("nvlink2", 6, 25),
                ("nvlink", 12, 25),
                ("nvlink3", 12, 25),
                ("nvlink4", 18, 25),
            )
        ),
    ]
    return {
        name: NetworkLink(name=name, latency_seconds=latency, bytes_per_second=rate, source=source, is_local=is_local)
        for name, latency, rate, source, is_local in rows
    }


LINKS: Mapping[str, NetworkLink] = _known_links()
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
        fixed_seconds: of the passes, the part that does not shrink with the batch.
        spread: the standard deviation of an update, as a share of it.
        gradients: in the order in which they are ready.
    """

    batch_size: int
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    gradients: tuple[Gradient, ...]
    fixed_seconds: float = 0.0
    spread: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of an update."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    def with_batch(self, images: int) -> MeasuredDevice:
        """Return the same device with another batch.

        >>> device = MeasuredDevice(batch_size=8, forward_seconds=1, backward_seconds=3, update_seconds=1, gradients=(),
        ...                 fixed_seconds=2)
        >>> device.with_batch(4).step_seconds
        4.0
        """
        passes = self.forward_seconds + self.backward_seconds
        shrunk = self.fixed_seconds + (passes - self.fixed_seconds) * images / self.batch_size
        times = shrunk / passes if passes else 1.0
        return replace(
            self,
            batch_size=images,
            forward_seconds=self.forward_seconds * times,
            backward_seconds=self.backward_seconds * times,
        )


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

    def all_reduce_seconds(self, bytes: float, devices: int) -> float:
        """Return the seconds in which so many devices get the sum of ``bytes`` that each of them has.

        >>> link = NetworkLink(name="x", latency_seconds=0.5, bytes_per_second=100.0, source="")
        >>> cluster = MachineCluster(between=link)
        >>> cluster.all_reduce_seconds(400, 1), cluster.all_reduce_seconds(400, 2), cluster.all_reduce_seconds(400, 4)
        (0.0, 5.0, 9.0)
        """
        machines, on_each = self.shape(devices)
        return _ring_seconds(bytes, machines, self.between) + _ring_seconds(bytes, on_each, self.within or self.between)


def _ring_seconds(bytes: float, n: int, link: NetworkLink) -> float:
    return 2 * (n - 1) * (link.latency_seconds + bytes / n / link.bytes_per_second)


def fit_link(small: tuple[float, float], large: tuple[float, float], devices: int, *, name: str) -> NetworkLink:
    """Fit a link to two measured all-reduces, each by its bytes and its seconds.

    >>> truth = NetworkLink(name="x", latency_seconds=0.001, bytes_per_second=1e8, source="")
    >>> cluster = MachineCluster(between=truth)
    >>> small, large = ((size, cluster.all_reduce_seconds(size, 4)) for size in (4, 4e8))
    >>> fitted = fit_link(small, large, 4, name="here")
    >>> round(fitted.latency_seconds, 6), round(fitted.bytes_per_second)
    (0.001, 100000000)
    """
    (few, quick), (many, slow) = small, large
    steps = 2 * (devices - 1)
    rate = steps / devices * (many - few) / max(slow - quick, 1e-9)
    latency = max(0.0, quick / steps - few / devices / rate)
    source = f"fitted to all-reduces of {devices} ranks here: {few:,.0f} and {many:,.0f} bytes"
    return NetworkLink(name=name, latency_seconds=latency, bytes_per_second=rate, source=source)


def fit_backend(backend: Mapping[str, Any], ranks: int) -> NetworkLink:
    """Fit a link to one back end of a document of ``steady bandwidth --json``: a single number, and all buckets."""
    (whole,) = (way for way in backend["ways"] if way["way"] == "buckets")
    small, large = (4.0, backend["latency_seconds"]), (float(whole["bytes"]), whole["seconds"])
    return fit_link(small, large, ranks, name=f"{backend['backend']} here")


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


def exposed_seconds(
    exchanged: Sequence[Gradient], backward_seconds: float, cost: Callable[[int], float], *, overlap: bool = True
) -> float:
    """Return how long the exchange of buckets goes on after a backward pass of so many seconds.

    Args:
        exchanged: the buckets, in their order.
        cost: seconds of a bucket's exchange, by its bytes.
        overlap: without it, the first bucket starts when the pass has ended.
    """
    end = 0.0 if overlap else backward_seconds
    for bucket in exchanged:
        end = max(end, bucket.ready * backward_seconds) + cost(bucket.bytes)
    return max(0.0, end - backward_seconds) if exchanged else 0.0


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
            ``slowest`` (all wait for that device), ``input`` and ``overhead`` (what does not shrink with the batch).
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
    limit: Limit

    def seconds(self, images: float) -> float:
        """Return the seconds to train on a number of images."""
        return images / self.images_per_second

    def cost(self, images: float, price: float) -> float:
        """Return the cost of training on a number of images; ``price``: of a device for an hour."""
        return price * self.devices * self.seconds(images) / 3600


def predict(
    device: MeasuredDevice,
    devices: int,
    cluster: MachineCluster,
    *,
    is_strong: bool = False,
    loader_images_per_second: float = math.inf,
    overlap: bool = True,
    bucket_bytes: float = BUCKET,
) -> ScalePrediction:
    """Predict the speed of a number of devices.

    Args:
        device: the measured times of one device.
        is_strong: its batch is split among all; else each device has a batch of that size (weak scaling).
        loader_images_per_second: of one machine.
        overlap: gradients are exchanged while the backward pass goes on.
        bucket_bytes: after which a bucket is full; 0: each gradient by itself.
    """
    machines, on_each = cluster.shape(devices)
    alone = device.with_batch(math.ceil(device.batch_size / devices)) if is_strong else device
    batch_size = device.batch_size * (1 if is_strong else devices)
    filled = buckets(device.gradients, first_bytes=min(FIRST_BUCKET, bucket_bytes), most_bytes=bucket_bytes)

    def exposed(cluster: MachineCluster) -> float:
        def cost(bytes: int) -> float:
            return cluster.all_reduce_seconds(bytes, devices)

        return exposed_seconds(filled, alone.backward_seconds, cost, overlap=overlap)

    exchange = sum(cluster.all_reduce_seconds(bucket.bytes, devices) for bucket in filled)
    exposed_exchange = exposed(cluster)
    within = cluster.within and replace(cluster.within, latency_seconds=0.0)
    by_bytes = exposed(replace(cluster, between=replace(cluster.between, latency_seconds=0.0), within=within))
    slowest = alone.step_seconds * device.spread * expected_maximum(devices)
    step = alone.step_seconds + exposed_exchange + slowest
    # The machine with the most devices waits longest for its loader.
    waiting = max(0.0, batch_size * on_each / devices / loader_images_per_second - step)
    ideal = device.step_seconds * batch_size / (devices * device.batch_size)
    losses = {
        "network": by_bytes,
        "latency": exposed_exchange - by_bytes,
        "slowest": slowest,
        "input": waiting,
        "overhead": max(0.0, alone.step_seconds - ideal),
    }
    step += waiting
    largest: Any = max(losses, key=lambda name: losses[name])
    rate = batch_size / step
    alone_rate = min(device.batch_size / device.step_seconds, loader_images_per_second)
    return ScalePrediction(
        devices=devices,
        machines=machines,
        batch_size=batch_size,
        images_per_second=rate,
        efficiency=rate / (devices * alone_rate),
        step_seconds=step,
        exchange_seconds=exchange,
        exposed_seconds=exposed_exchange,
        losses=losses,
        limit="compute" if sum(losses.values()) <= SMALL_LOSS * step else largest,
    )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The recommended number of devices.

    Args:
        devices: recommended: the largest number whose efficiency is high enough.
        fastest: the number that trains fastest.
        worse_from: the first number after the fastest that trains slower; None: more is never worse.
        words: the same in sentences.
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
    "overhead": "with more, a device's share of the batch is too small to keep it busy",
}


def advise(predictions: Sequence[ScalePrediction], *, least_efficiency: float = LEAST_EFFICIENCY) -> Advice:
    """Recommend a number of devices.

    Args:
        predictions: for rising numbers of devices, from 1 on.
        least_efficiency: of the recommended number.
    """
    efficient = [row for row in predictions if row.efficiency >= least_efficiency - 1e-9]
    chosen, last = efficient[-1], predictions[-1]
    efficiency = f"at an efficiency of {percent(chosen.efficiency)}"
    if chosen is last:
        words = [f"recommended: all {count(last.devices, 'device')}, {efficiency}"]
    else:
        following = predictions[predictions.index(chosen) + 1]
        reason = _REASONS[following.limit]
        words = [f"recommended: {chosen.devices} of {count(last.devices, 'device')}, {efficiency}; {reason}"]
    fastest, slower = predictions[0], list[ScalePrediction]()
    for prediction in predictions[1:]:
        if prediction.images_per_second > fastest.images_per_second:
            if slower:  # it recovers
                words.append(f"{_span(slower)} slower than {fastest.devices} (limit: {slower[0].limit})")
            fastest, slower = prediction, []
        elif prediction.images_per_second < (1 - SAME) * fastest.images_per_second:
            slower.append(prediction)
    worse_from = slower[0].devices if slower else None
    if slower:
        most, least = (f"{row.images_per_second:,.4g} images/s" for row in (fastest, last))
        words.append(
            f"more is worse: {most} with {fastest.devices}, {least} with {last.devices} (limit: {slower[0].limit})"
        )
    elif fastest is not last:
        words.append(f"more than {fastest.devices} adds nothing (limit: {last.limit})")
    return Advice(devices=chosen.devices, fastest=fastest.devices, worse_from=worse_from, words=tuple(words))


def _span(predictions: Sequence[ScalePrediction]) -> str:
    first, last = predictions[0].devices, predictions[-1].devices
    return f"{first} devices are" if first == last else f"{first} to {last} devices are"


def counts(most: int, *also: int) -> list[int]:
    """Return the numbers of devices to show: powers of two up to ``most``, itself, and others.

    >>> counts(12, 5)
    [1, 2, 4, 5, 8, 12]
    """
    powers = {1 << k for k in range(most.bit_length())}
    return sorted(n for n in powers | {most, *also} if 1 <= n <= most)
