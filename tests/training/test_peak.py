"""How much this machine multiplies in a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadytrain.training.compute import timing
from steadytrain.training.compute.timing import peak_flops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_was_measured() -> Iterator[None]:
    timing._peak.cache_clear()
    yield
    timing._peak.cache_clear()


@pytest.mark.parametrize("numbers", ["fp32", "bf16"])
def test_a_machine_multiplies_what_it_multiplies_and_is_asked_once(numbers: str) -> None:
    peak = peak_flops(CPU, numbers)
    assert 1e8 < peak < 1e15
    began = time.process_time()
    assert peak_flops(CPU, numbers) == peak
    assert time.process_time() - began < 2 * 1024**3 / peak  # no product was made again


def test_measuring_draws_no_random_number_of_the_process() -> None:
    before = torch.get_rng_state()
    peak_flops(CPU, "fp32")
    assert torch.equal(torch.get_rng_state(), before)


class Gpu:
    """A GPU in virtual time, on which a product takes its operations divided by ``flops``, and the host no time."""

    def __init__(self, flops: float, room: int = 2**40) -> None:
        self.flops, self.room, self.seconds, self.waits, self.sides = flops, room, 0.0, 0, list[int]()

    def rand(self, rows: int, columns: int, **more: Any) -> torch.Tensor:
        if rows * columns * 4 > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.sides.append(rows)
        return torch.empty(rows, columns, device="meta")

    def mm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.seconds += 2 * len(a) ** 3 / self.flops

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        event = SimpleNamespace()
        event.record = lambda stream: vars(event).update(at=self.seconds)
        event.elapsed_time = lambda later: 1e3 * (later.at - event.at)
        return event

    def install(self, patch: pytest.MonkeyPatch) -> Gpu:
        patch.setattr(torch, "rand", self.rand)
        patch.setattr(torch, "mm", self.mm)
        patch.setattr(torch, "Generator", lambda device: None)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.cuda, "Event", self.event)
        return self


@pytest.mark.parametrize("tflops", [0.5, 8, 989])
def test_a_gpu_is_measured_by_its_own_clock_and_hardly_waited_for(
    monkeypatch: pytest.MonkeyPatch, tflops: float
) -> None:
    gpu = Gpu(tflops * 1e12).install(monkeypatch)
    assert peak_flops(torch.device("cuda", 0), "bf16") == pytest.approx(tflops * 1e12)
    assert gpu.waits <= 6, "no wait for each product"
    assert max(gpu.sides) == (2048 if tflops < 1 else 8192), "a large product, but for a slow GPU"


def test_a_gpu_without_room_for_the_large_product_is_measured_by_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(1e13, room=2**26).install(monkeypatch)
    assert peak_flops(torch.device("cuda", 0), "fp32") == pytest.approx(1e13) and max(gpu.sides) == 2048
    monkeypatch.setattr(gpu, "room", 0)
    timing._peak.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        peak_flops(torch.device("cuda", 0), "fp32")
