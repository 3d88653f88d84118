"""What a feed has done, as it is told."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.data.loader.times import Times


@dataclass(frozen=True, kw_only=True)
class FeedTimes:
    """What a feed has done since it was made, summed over its threads.

    ``bytes`` are encoded ones, ``kept_bytes`` those of decoded images that are kept, ``shared_bytes`` those of them
    that other processes of the machine have as well, ``device_bytes`` those that are on the device as well; ``read``,
    ``decode``, ``augment`` (cutting, resizing, mirroring, of kept images too) and ``batch`` (order and draws) are busy
    seconds, of which the threads were on a processor for ``cpu``; ``blocked`` are seconds that threads waited because
    enough batches were ready. Of the batches ``asked`` for ``starved`` were not ready; ``ready`` were on the average,
    and ``depth`` can be. ``by_loop``: whoever iterates makes the batches. ``per_thread``: images, and busy,
    cpu and blocked seconds of each thread of this process.
    """

    images: int
    bytes: int
    kept_bytes: int
    shared_bytes: int
    device_bytes: int
    read_seconds: float
    decode_seconds: float
    augment_seconds: float
    batch_seconds: float
    blocked_seconds: float
    cpu_seconds: float
    threads: int
    asked: int
    starved: int
    ready: float
    depth: int
    by_loop: bool
    per_thread: list[dict[str, float]]


def of_thread(times: Times) -> dict[str, float]:
    """What is told of one thread."""
    busy = times.read_seconds + times.decode_seconds + times.augment_seconds + times.batch_seconds
    return {
        "images": times.images,
        "busy_seconds": busy,
        "cpu_seconds": times.cpu_seconds,
        "blocked_seconds": times.blocked_seconds,
    }
