"""The most that this machine multiplies in a second, by a large matrix product: what a network may be held against."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from steadytrain.machine import facts
from steadytrain.training.precision import DTYPES

_LONG_SECONDS = {512: 0.02, 1024: 0.008, 2048: 0.008, 4096: 0.0}
"""Side -> seconds of one product that are long enough to tell of multiplying; if it is faster, a larger one is asked.

A short product tells of threads that wait for each other; 0.02 s for a small one is an emulation, slow for certain.
"""
_MEASURED_SECONDS = 0.06


def peak_flops(device: torch.device, numbers: str) -> float:
    """Floating-point operations per second of a large matrix product, measured once in a process (0.1 s).

    Args:
        device: where; a CPU with torch's present number of threads.
        numbers: as :attr:`steadytrain.config.Precision.products`. On a GPU whose convolutions take fp32 to tensor cores
            (TF32), so does this product.
    """
    return _peak(device, numbers, torch.get_num_threads())


@lru_cache(maxsize=8)
def _peak(device: torch.device, numbers: str, threads: int) -> float:
    dtype = DTYPES.get(numbers, torch.float32)
    with torch.no_grad(), _as_convolutions(device):
        for side, long in _LONG_SECONDS.items():
            seconds = _seconds(device, dtype, side)
            if seconds >= long:
                break
        return 2.0 * side**3 / seconds


def _seconds(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Of one product, the best of some; on a CPU without what other processes took of the cores meanwhile."""
    own = torch.Generator(device)
    a, b = (torch.rand(side, side, device=device, generator=own).to(dtype) for _ in range(2))
    out = a @ b
    best, times, worked = float("inf"), 0, time.process_time()
    end = time.perf_counter() + _MEASURED_SECONDS
    while not times or time.perf_counter() < end:
        wait_for(device)
        began = time.perf_counter()
        torch.mm(a, b, out=out)
        wait_for(device)
        best, times = min(best, time.perf_counter() - began), times + 1
    if device.type != "cpu":
        return best
    cores = min(torch.get_num_threads(), facts.cores())
    return min(best, (time.process_time() - worked) / times / cores) or best


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _as_convolutions(device: torch.device) -> Iterator[None]:
    """Products in the formats that convolutions are allowed on a GPU."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, products.fp32_precision = products.fp32_precision, convolutions.fp32_precision
    try:
        yield
    finally:
        products.fp32_precision = before
