"""Batches to where the model is, without holding up the loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from steadytrain.data.loader import Batch, ResidentBatch
from steadytrain.training.clock import Clock


@dataclass(frozen=True)
class Loaded:
    """A batch on the device: images uint8 [B, H, W, C], labels int64 [B]; and the host's wait for the feed."""

    images: torch.Tensor
    labels: torch.Tensor
    wait_seconds: float


def drawn(n: int, shape: tuple[int, int, int], device: torch.device, *, num_classes: int = 1) -> Loaded:
    """A batch of ``n`` random images that nobody took, the same each time, and labels below ``num_classes``.

    Args:
        shape: of an image: height, width, channels.
        device: where it is to lie.
    """
    own = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=own)
    labels = torch.randint(0, num_classes, (n,), generator=own)
    return Loaded(images.to(device), labels.to(device), 0.0)


def load(batches: Iterable[Batch], device: torch.device, clock: Clock | None = None) -> Iterator[Loaded]:
    """Yield each batch on the device; ``clock``, if there is one, is told of the wait and of the transfer.

    On a CPU the tensors are the feed's own buffers, not copies. On a GPU the next batch is copied from pinned
    memory, or gathered from images that are there already, on a stream of its own while the current one is used.
    """
    clock = clock or Clock(time.perf_counter())
    waits = _waits(batches, clock)
    if device.type != "cuda":
        for batch, seconds in waits:
            yield Loaded(_images(batch, device), torch.from_numpy(batch.labels), seconds)
        return
    yield from _ahead(waits, device, clock)


def _images(batch: Batch, device: torch.device) -> torch.Tensor:
    if isinstance(batch, ResidentBatch):
        return batch.gather()
    return torch.from_numpy(batch.images).to(device, non_blocking=True)


def _waits(batches: Iterable[Batch], clock: Clock) -> Iterator[tuple[Batch, float]]:
    iterator = iter(batches)
    while True:
        clock.to("input")
        began = time.perf_counter()
        batch = next(iterator, None)
        seconds = time.perf_counter() - began
        clock.to("host")
        if batch is None:
            return
        yield batch, seconds
        del batch  # the buffer may go back to the pool before the next one is asked for


def _ahead(waits: Iterator[tuple[Batch, float]], device: torch.device, clock: Clock) -> Iterator[Loaded]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copying: deque[tuple[Any, Batch]] = deque()

    def start() -> tuple[Loaded, Any] | None:
        told = next(waits, None)
        if told is None:
            return None
        batch, seconds = told
        clock.to("transfer")
        with torch.cuda.stream(stream):
            images = _images(batch, device)
            labels = torch.from_numpy(batch.labels).to(device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        copying.append((done, batch))  # the pinned buffer must outlive its copy
        clock.to("host")
        return Loaded(images, labels, seconds), done

    coming = start()
    while coming is not None:
        loaded, done = coming
        torch.cuda.current_stream(device).wait_event(done)
        for tensor in (loaded.images, loaded.labels):
            tensor.record_stream(torch.cuda.current_stream(device))
        while copying and copying[0][0].query():
            copying.popleft()
        coming = start()
        yield loaded
