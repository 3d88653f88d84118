"""The parts of a step: forward and backward passes beside the run, on a copy of its network.

Nothing of the run changes, not a bit of it: the passes belong to a copy of the network (weights, running statistics and
whatever else its code keeps), their gradients are thrown away with it, and random states and the number of compute
threads are restored. Optimizer, average, loss scale, meters and the place in the stream are not touched at all.

A pass with the run's batch and one with another size tell which seconds do not shrink with the batch: Python, and the
launch of each operation. One more pass counts operations, multiplications, and waits for a value on the host.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steadytrain.distributed.engine import Engine
from steadytrain.errors import first_line
from steadytrain.events import StepMeasured
from steadytrain.machine import facts
from steadytrain.training.clock import WARM_UP
from steadytrain.training.compute.timing import Pass, Seconds, peak_flops, wait_for
from steadytrain.training.data import DeviceBatch
from steadytrain.training.device import seconds_between, tick
from steadytrain.training.precision import Policy
from steadytrain.training.session.session import Session
from steadytrain.training.state import preserve_process
from steadytrain.training.usage import network_line

SECONDS = 0.3
"""Seconds in which the machine's peak is measured, once in a process."""
ROUNDS = 3
FEW = 32
"""Images of a micro-batch: fewer are compared with more of them, since small operations do not scale down."""
TIMES = 4

LEAST_UPDATES = 20
SHARE, SUSPECT_SHARE = 0.01, 0.07
"""The most that measuring may take, as shares of the seconds that updates will take: of any run, and of a short one
that is set up in a way which often costs several times as much.
"""
SHORT_RUN_SECONDS, LEAST_RUN_SECONDS, SUSPECT_SECONDS = 0.6, 15.0, 2.0
"""Seconds that measuring may always take, on a run with so many seconds of updates; and on a suspect one."""

_BY_VALUE = frozenset(
    f"aten::{name}" for name in ("nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive")
)
"""Operations whose answer, or its size, is only known when a device has computed it."""


def allowed_seconds(step_seconds: float, updates_left: int, *, is_suspect: bool = False) -> float:
    """Return the seconds that measuring may take beside the updates that are still to come.

    >>> [allowed_seconds(step, left) for step, left in ((0.01, 200_000), (0.01, 2_000), (0.01, 100), (1.0, 300))]
    [20.0, 0.6, 0.01, 3.0]
    >>> round(allowed_seconds(0.01, 1_000, is_suspect=True), 2), allowed_seconds(1.0, 300, is_suspect=True)
    (0.7, 3.0)
    """
    seconds = step_seconds * updates_left
    short = min(SUSPECT_SHARE * seconds, SUSPECT_SECONDS) if is_suspect else 0.0
    return max(SHARE * seconds, short, SHORT_RUN_SECONDS if seconds >= LEAST_RUN_SECONDS else 0.0)


class StepMeasuring:
    """Decides when a run measures its steps: once in an attempt, where that costs next to nothing.

    ``allowed``: the seconds that it may take, when it is due.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._updates, self._seconds = 0, 0.0
        self.allowed = 0.0
        recipe = session.recipe
        # Batch norms that wait for those of other ranks cannot be measured by one alone; and passes call operations one
        # by one, which tells nothing of a recorded graph.
        engine = session.state.engine
        waits = engine.is_sharded or (engine.world.size > 1 and recipe.model.batch_norm == "synchronous")
        self._is_open = not (waits or recipe.parallel.graph)
        # On a CPU, these often cost much: 16-bit numbers, more or fewer compute threads than cores, batches of a few
        # images.
        self._is_on_cpu = session.state.engine.device.type == "cpu"
        self._is_suspect = recipe.precision.name != "fp32" or recipe.batch_size < FEW

    def is_due(self, seconds: float) -> bool:
        """Return whether to measure now, after an update that took so long; at most once."""
        if not self._is_open:
            return False
        self._updates += 1
        self._seconds += seconds if self._updates > WARM_UP else 0.0
        if self._updates < LEAST_UPDATES:
            return False
        self._is_open = False
        left = self._session.timeline.steps - self._session.state.cursor.step
        typical = self._seconds / (self._updates - WARM_UP)
        # The network's own code may have set the threads since the run began.
        is_suspect = self._is_on_cpu and (self._is_suspect or _tries_threads(self._session, torch.get_num_threads()))
        self.allowed = allowed_seconds(typical, left, is_suspect=is_suspect)
        usual = (6.0 if self._session.recipe.batch_size >= FEW else 5.0 * TIMES) * typical + SECONDS
        return usual <= self.allowed


def measure_step(
    session: Session, batch: DeviceBatch, *, allowed: float = math.inf, clock: Seconds = time.perf_counter
) -> StepMeasured | None:
    """Measure what a step of this run is made of; the run goes on as if nothing had been.

    ``passes`` of the event, each the fastest of some: ``full``, the run's batch; ``other``, a quarter of it, or on a
    processor four times as many (made by repeating it) where there are fewer than :data:`FEW` images in a micro-batch;
    ``fp32`` where the run computes in 16 bits, ``bf16`` where it does not and the processor multiplies it natively;
    ``threads=N`` where it computes with more threads than the N cores (then so is the pass with other numbers), or with
    fewer that were not chosen by trial; ``other threads=N``, the larger batch, where it computes with fewer than the N
    cores. Of compiled code there is ``full`` alone, as measured when it was made, and no count of
    operations. On a GPU ``fixed_seconds`` is the time in which the device waits for the host, by a pass that was queued
    before it began; where the network's code waits for the device, by the two sizes, as on a processor.

    Args:
        batch: the run's next one, or one it has had; only read.
        allowed: seconds after which no further pass is begun that can be left out: a machine may have become busy.
        clock: reads seconds; another one in tests.

    Returns:
        None where the network refuses: it cannot be copied, or takes no other batch. A notice tells why.
    """
    device = session.state.engine.device
    try:
        with preserve_process(device), session.clock.within("measuring"):
            module, update = copy.deepcopy(session.state.module), session.update
            module.zero_grad(set_to_none=True)
            n = update.share.images  # of a batch that has grown, one of the first size is measured
            batch = replace(batch, images=batch.images[:n], labels=batch.labels[:n])
            if update.augmentation is not None:
                batch = replace(batch, labels=update.augmentation.targets(batch.labels))
            at_once = update.share.size if update.limit is None else update.limit.at_once(update.share.size)
            passes = update.share.count * -(-update.share.size // at_once)
            full = Pass(module, update.objective, batch, Engine(device), passes)
            return _measure(session, full, allowed, clock)
    except Exception as error:  # noqa: BLE001 - a network of the user's own may raise anything
        reason = first_line(error)
        session.notice(f"what a step is made of cannot be measured here ({reason}): training continues without")
        return None


def _measure(session: Session, full: Pass, allowed: float, clock: Seconds) -> StepMeasured:
    began, peak = clock(), peak_flops(session.state.engine.device, session.recipe.precision.products)
    device, compiled = session.state.engine.device, session.compiled
    size = other_size = len(full.batch.labels)
    other = full
    if compiled is None:  # of compiled code another size would have to be compiled as well
        # There is surely memory for a larger batch on a CPU alone: a GPU may be full of the run's own.
        may_grow = device.type == "cpu" and facts.resident_bytes() * (TIMES + 1) < facts.memory_bytes()
        other_size = _other_size(size, full.micro_batches, may_grow=may_grow)
        repeats = -(-other_size // size)
        images, labels = (torch.cat([x] * repeats)[:other_size] for x in (full.batch.images, full.batch.labels))
        other = replace(full, batch=replace(full.batch, images=images, labels=labels))
    # What one micro-batch calls; this also makes ready what a batch of this size needs.
    images, labels = next(other.parts)
    with Operations() as operations:
        loss, _ = other.forward(other.module, images, labels)
        operations.counts_flops = False
        loss.backward()  # type: ignore[no-untyped-call]
    if compiled is not None:
        passes, fixed = {"full": compiled.compiled_seconds * full.micro_batches}, 0.0
    else:
        less, more = (other, full) if other_size < size else (full, other)
        rounds: list[list[float]] = []
        while not rounds or (len(rounds) < ROUNDS and (clock() - began) * (1 + 1 / len(rounds)) < allowed):
            rounds.append([part.seconds(clock) for part in (less, more, less)])
        fast, slow = min(min(times[::2]) for times in rounds), min(times[1] for times in rounds)
        passes = {"full": slow, "other": fast} if more is full else {"full": fast, "other": slow}
        if device.type == "cuda" and not operations.waits:
            fixed = passes["full"] - _device_seconds(full, passes["full"])
        else:  # no pass that waits can be queued: where the straight line through two sizes meets zero images
            fixed = (passes["other"] * size - passes["full"] * other_size) / (size - other_size)
        fixed = min(max(fixed, 0.0), *passes.values())
        cores, threads = facts.cores(), torch.get_num_threads()
        is_idle = device.type == "cpu" and more is other and threads < cores
        if is_idle and clock() - began + 2 * passes["other"] < allowed:
            torch.set_num_threads(cores)  # the caller restores it
            other.seconds(clock)  # warm-up
            passes[f"other threads={cores}"] = other.fastest(ROUNDS, clock)
            torch.set_num_threads(threads)
        if clock() - began + (1 + ROUNDS) * passes["full"] < allowed:
            passes |= _alternatives(session, full, clock)
    return StepMeasured(
        step=session.state.cursor.step,
        batch_size=size,
        other_batch_size=other_size,
        passes=passes,
        fixed_seconds=fixed,
        operations=None if compiled is not None else operations.count * full.micro_batches,
        syncs=tuple(operations.waits),
        forward_flops=operations.flops * full.micro_batches / other_size,
        peak_flops=peak,
        seconds=clock() - began,
    )


def _other_size(batch_size: int, micro_batches: int, *, may_grow: bool) -> int:
    """Images of the other batch. Two to a micro-batch at least: batch norms refuse a single value a channel.

    >>> [_other_size(size, 1, may_grow=False) for size in (128, 9, 4, 2, 1)], _other_size(128, 4, may_grow=False)
    ([32, 2, 2, 4, 2], 32)
    >>> [_other_size(size, 1, may_grow=True) for size in (128, 9, 4, 2, 1)], _other_size(128, 4, may_grow=True)
    ([32, 36, 16, 8, 4], 32)
    """
    part = batch_size // micro_batches
    if may_grow and part < FEW:
        return micro_batches * part * TIMES
    return micro_batches * (max(2, part // TIMES) if part >= TIMES else 2 * part)


def _device_seconds(full: Pass, seconds: float) -> float:
    """Time a pass on the GPU alone: it is kept busy until the host has queued the pass, so no kernel waits for it."""
    device = full.engine.device
    full.module.zero_grad(set_to_none=True)
    cycles = int(2 * seconds * 2e9)  # no GPU has a clock much faster
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    begin = tick(device)
    full.run()
    end = tick(device)
    wait_for(device)
    return seconds_between(begin, end)


def _alternatives(session: Session, full: Pass, clock: Seconds) -> dict[str, float]:
    """Seconds of the full pass as the run does not do it, where that might be faster, and memory is enough."""
    spec, device, cores = session.recipe.precision, session.state.engine.device, facts.cores()
    seconds: dict[str, float] = {}

    def measure(name: str, other: Pass) -> None:
        try:
            other.seconds(clock)  # warm-up
            seconds[name] = other.fastest(ROUNDS, clock)
        except torch.OutOfMemoryError:
            pass

    threads = torch.get_num_threads()
    if device.type == "cpu" and _tries_threads(session, threads):
        torch.set_num_threads(cores)
        measure(f"threads={cores}", full)
        torch.set_num_threads(min(threads, cores))  # number formats are compared as the run computes; not in turns
    name: Literal["fp32", "bf16"] = "bf16" if spec.name in ("fp32", "tf32") else "fp32"
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if name == "fp32" or has_bf16:
        module = copy.deepcopy(full.module).float() if spec.is_pure else full.module
        objective = replace(session.update.objective, policy=Policy(replace(spec, name=name), device))
        measure(name, replace(full, module=module, forward=objective))
    return seconds


def _tries_threads(session: Session, threads: int) -> bool:
    """Return whether as many threads as cores may be faster: there are more, or fewer that nobody tried others for."""
    machine = session.started.machine
    are_tried = session.state.engine.world.size > 1 or (
        "threads_seconds" in machine and threads == machine["compute_threads"]
    )
    return threads > facts.cores() or (threads < facts.cores() and not are_tried)


class Operations(TorchDispatchMode):
    """A mode that counts every operation of this thread and of the backward passes that it begins.

    Attributes:
        count: operations, as the host calls them.
        flops: floating-point operations of convolutions and matrix products, as
            :mod:`torch.utils.flop_counter` counts them, while ``counts_flops``.
        waits: where the host waits for a value, ``file:line`` -> how often: the innermost line that is neither torch's
            nor ours. A scalar (``.item()``, ``float()``, ``if tensor:``) counts on every device, also where it is there
            already, since on another device it would not be; a copy to the host and a size that depends on values count
            where the tensor is on another device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # brings Triton with it, which no start should wait for

        self._flops_of = flop_registry
        self.count = 0
        self.flops = 0
        self.counts_flops = True
        self.waits: dict[str, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what is looked at is never compiled: torch need not import its compiler to leave this out

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.count += 1
        if self.counts_flops and func._overloadpacket in self._flops_of:
            self.flops += self._flops_of[func._overloadpacket](*args, **kwargs, out_val=out)
        if _waits(func, args, out) and (place := network_line(sys._getframe().f_back, until=__file__)):
            self.waits[place] = self.waits.get(place, 0) + 1
        return out


def _waits(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Return whether the host has to wait for this operation's values."""
    name = func._schema.name
    if name == "aten::_local_scalar_dense":
        return True
    if not args or not isinstance(args[0], torch.Tensor) or args[0].device.type in ("cpu", "meta"):
        return False
    if name == "aten::_to_copy":
        return isinstance(out, torch.Tensor) and out.device.type == "cpu"
    if name == "aten::index":
        return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in _BY_VALUE
