"""The one way to time passes: until the device has done its work.

Compiling, the choice of compute threads, the cost of a step, the bench and the probe all time their work here.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from steadytrain.config import Recipe
from steadytrain.distributed.engine import Engine
from steadytrain.machine import facts
from steadytrain.machine.facts import cache_folder
from steadytrain.training.data import DeviceBatch, random_batch
from steadytrain.training.memory import is_out_of_memory
from steadytrain.training.precision import DTYPES
from steadytrain.training.state import State, preserve_buffers, preserve_process
from steadytrain.training.step import Forward, Update

Seconds = Callable[[], float]
"""Reads a clock."""

_LONG_SECONDS = {
    "cpu": {512: 0.02, 1024: 0.008, 2048: 0.008, 4096: 0.0},
    "cuda": {2048: 0.02, 8192: 0.0},
}
"""Side -> seconds of one matrix product that are long enough to tell of multiplying; a faster one is followed by a
larger one. A short product tells of threads that wait for each other; 0.02 s for a small one is an emulation, or a GPU
whose memory may not have room for more."""
_PEAK_SECONDS, _MOST_PRODUCTS = 0.06, 64

SHORT_SECONDS = 0.05
"""The longest pass by one thread that may be too short for more. In a longer one the operations are large enough for
all threads.
"""
FEW, FEW_SECONDS, FORWARDS = 2, 0.25, 3
"""Images of first forward passes, and how long a pass of all images may take, which is so many forward passes: no long
one is made in vain."""
ROUNDS = 5
SLACK = 1.2
"""Times the shortest pass that fewer threads may take and still be chosen. Passes are timed alone; in a run the loader
takes turns with them, and all threads wait for the one whose turn it is not.
"""


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(device: torch.device, work: Callable[[], object], clock: Seconds = time.perf_counter) -> float:
    """Return the seconds of some work, until the device has done it."""
    wait_for(device)
    began = clock()
    work()
    wait_for(device)
    return clock() - began


def images_per_second(
    device: torch.device, work: Callable[[], int], *, seconds: float, least: int
) -> tuple[float, float]:
    """Repeat some work, which returns its images, for so long and at least so often; return the rate, and seconds."""
    images, times, began = 0, 0, time.perf_counter()

    def repeat() -> None:
        nonlocal images, times
        while times < least or time.perf_counter() - began < seconds:
            images += work()
            times += 1

    passed = timed(device, repeat)
    return images / passed, passed


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass that updates nothing; the caller restores the network.

    It is exchanged with nobody, but where ranks have parts of parameters, which all make it: what one of them had not
    exchanged would be in its next gradients.

    Args:
        module: a run's own network, as its engine calls it, or a copy.
        forward: what computes its loss.
        batch: what the pass is made of.
        engine: of the run, or one process's for a copy.
        micro_batches: that the batch is split into.
    """

    module: nn.Module
    forward: Forward
    batch: DeviceBatch
    engine: Engine
    micro_batches: int = 1

    @property
    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of each micro-batch."""
        images, labels = (tensor.chunk(self.micro_batches) for tensor in (self.batch.images, self.batch.labels))
        return zip(images, labels, strict=True)

    def run(self) -> None:
        """Add the gradients of the batch to the module's."""
        for images, labels in self.parts:
            with self.engine.micro_batch(last=self.engine.is_sharded):
                loss, _ = self.forward(self.module, images, labels)
                self.engine.backward(loss / self.micro_batches if self.micro_batches > 1 else loss, last=False)

    def seconds(self, clock: Seconds = time.perf_counter) -> float:
        """Return the seconds of one pass."""
        self.module.zero_grad(set_to_none=True)
        return timed(self.engine.device, self.run, clock)

    def fastest(self, rounds: int, clock: Seconds = time.perf_counter) -> float:
        """Return the seconds of the fastest of some passes: whatever disturbs only adds."""
        return min(self.seconds(clock) for _ in range(rounds))


def pass_of(update: Update, state: State, images: int | None = None) -> Pass:
    """Make the pass of a run's micro-batch, or of ``images``, which are drawn; of no more than memory has room for."""
    device, size = state.engine.device, update.share.size
    n = min(images or size, size if update.limit is None else update.limit.at_once(size))
    num_labels = update.objective.num_labels
    batch = random_batch(n, update.image_shape, device, num_labels=num_labels)
    if update.augmentation is not None:
        batch = replace(batch, labels=update.augmentation.targets(batch.labels))
    return Pass(update.call, update.objective, batch, state.engine)


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
    generator, dtype = torch.Generator(device), DTYPES.get(numbers, torch.float32)
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = products.fp32_precision
    if device.type == "cuda":
        products.fp32_precision = convolutions.fp32_precision
    peak = 0.0
    try:
        with torch.no_grad():
            for side, long in _LONG_SECONDS[device.type].items():
                a, b = (torch.rand(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
                seconds = _fastest_product(device, a, b)
                peak = 2.0 * side**3 / seconds
                if seconds >= long:
                    break
    except RuntimeError as error:
        if not peak or not is_out_of_memory(error):
            raise  # else the smaller product counts
    finally:
        if device.type == "cuda":
            products.fp32_precision = before
    return peak


def _fastest_product(device: torch.device, a: Tensor, b: Tensor) -> float:
    """Seconds; on a CPU without what other processes took of the cores meanwhile."""
    out = a @ b
    if device.type == "cuda":
        return _fastest_by_events(device, lambda: torch.mm(a, b, out=out))
    times: list[float] = []
    worked, end = time.process_time(), time.perf_counter() + _PEAK_SECONDS
    while not times or time.perf_counter() < end:
        times.append(timed(device, lambda: torch.mm(a, b, out=out)))
    cores = min(torch.get_num_threads(), facts.cores())
    return min(*times, (time.process_time() - worked) / len(times) / cores) or min(times)


def _fastest_by_events(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds between two of the device's own events; many follow each other, and the host waits once for them all."""
    times = int(_PEAK_SECONDS / max(timed(device, work), _PEAK_SECONDS / _MOST_PRODUCTS))
    stream = torch.cuda.current_stream(device)
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(max(2, times) + 1)]  # type: ignore[no-untyped-call]
    for number, event in enumerate(events):
        if number:
            work()
        event.record(stream)
    wait_for(device)
    return min(float(before.elapsed_time(after)) for before, after in pairwise(events)) / 1e3


def use_fastest_threads(recipe: Recipe, update: Update, state: State, notice: Callable[[str], None]) -> dict[str, Any]:
    """Compute with the best number of threads from here on; return what to add to the facts of the machine.

    Threads that work together wait for each other at the end of each operation. Where operations are small that can
    take longer than the work itself, and the loader wants a core as well. So passes over drawn images are timed by one
    thread, two, four and so on up to one a core, before the first update. The number changes the order of sums, and so
    the last bits of weights: what was measured is kept in the cache, and the same command gives the same bits.

    There is no choice on a GPU, on one core, where the recipe names the number or wants the same bits whatever was
    measured, where a pass is long, and where nothing can be kept. ``notice`` is called where not every core computes.
    """
    cache, most, device = cache_folder(), torch.get_num_threads(), state.engine.device
    is_free = recipe.parallel.compute_threads is None and not recipe.parallel.deterministic
    if device.type != "cpu" or most == 1 or not is_free or cache is None:
        return {}
    key = {
        "model": recipe.model.name,
        "shapes": [tuple(tensor.shape) for tensor in state.module.state_dict().values()],
        "precision": vars(recipe.precision),
        "batch": (update.share.size, *update.image_shape),
        "machine": (facts.cpu_model(), most, torch.__version__),
    }
    file = cache / "threads" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    try:
        seconds = {int(count): float(took) for count, took in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        try:
            with preserve_process(device), preserve_buffers(state.module):
                seconds = _seconds_by_threads(update, state, most)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return {}  # the first update will say so
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(seconds), encoding="utf-8")
        except OSError:
            return {}
    if not seconds:
        return {}
    count = min(number for number, took in seconds.items() if took <= SLACK * min(seconds.values()))
    torch.set_num_threads(count)
    if count < max(seconds):
        timings = ", ".join(f"{took * 1e3:.2f} ms with {number}" for number, took in seconds.items())
        notice(
            f"compute threads: {count} of {max(seconds)}: a pass takes {timings}"
            f" (--set parallel.compute_threads={max(seconds)} for all)"
        )
    return {"compute_threads": count, "threads_seconds": seconds}


def _seconds_by_threads(update: Update, state: State, most: int) -> dict[int, float]:
    """Seconds of a pass by numbers of threads; nothing where it is long."""
    torch.set_num_threads(1)  # what threads that wait for each other take tells nothing of the work
    few = pass_of(update, state, FEW)
    with torch.no_grad():
        *_, forward = (timed(few.engine.device, lambda: few.forward(few.module, *next(few.parts))) for _ in range(2))
    if FORWARDS * forward >= FEW_SECONDS * len(few.batch.labels) / update.share.size:
        return {}
    full_pass, seconds = pass_of(update, state), {}
    for count in sorted({most, *(1 << k for k in range(int(math.log2(most)) + 1))}):
        torch.set_num_threads(count)
        full_pass.seconds()  # warm-up
        if count == 1 and full_pass.seconds() > SHORT_SECONDS:
            return {}
        seconds[count] = full_pass.fastest(ROUNDS)
    return seconds
