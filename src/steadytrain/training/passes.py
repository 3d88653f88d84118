"""What a step is made of: forward and backward passes beside the run, on a copy of its network.

Nothing of the run changes, not a bit of it: the passes belong to a copy of the network (weights, running statistics and
whatever else its code keeps), their gradients are thrown away with it, and random states and the number of compute
threads are put back. Optimizer, average, loss scale, meters and the place in the stream are not touched at all.

Measured are: the pass with the run's batch and with a batch of another size, whose difference tells which seconds do
not shrink with the batch (Python, the launch of each operation); the same pass with other numbers or fewer threads,
where those may help; and, in one more pass, the operations, the multiplications, and the places where the network waits
for a value on the host. It costs what :func:`cost_estimate` says, of which :data:`SECONDS` are for the machine's peak,
once in a process.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from steadytrain.errors import first_line
from steadytrain.events import StepMeasured
from steadytrain.machine import facts
from steadytrain.training import precision
from steadytrain.training.isolation import undisturbed
from steadytrain.training.loss import Objective
from steadytrain.training.operations import Operations
from steadytrain.training.peak import peak_flops, wait_for
from steadytrain.training.session import Session
from steadytrain.training.transfer import Loaded

SECONDS = 0.3
SHARE = 0.005
"""Of the seconds spent in updates: the most that measuring may take."""
ROUNDS = 3
FEW = 32
"""Images of a micro-batch: fewer are compared with more of them, since small operations do not scale down."""
TIMES = 4

Clock = Callable[[], float]


def cost_estimate(typical_step_seconds: float, batch_size: int) -> float:
    """Seconds that :func:`measure_step` will take, for a run whose updates take this long.

    >>> cost_estimate(0.05, 128), cost_estimate(0.05, 8)
    (0.6, 1.3)
    """
    steps = 6.0 if batch_size >= FEW else 5.0 * TIMES
    return round(steps * typical_step_seconds + SECONDS, 6)


def measure_step(session: Session, batch: Loaded, *, clock: Clock = time.perf_counter) -> StepMeasured | None:
    """Measure what a step of this run is made of; the run goes on as if nothing had been.

    ``passes`` of the event, each the fastest of some, since whatever disturbs only adds: ``full``, the run's batch;
    ``other``, a quarter of it, or on a processor four times as many (made by repeating it) where there are fewer
    than :data:`FEW` images in a micro-batch; ``fp32`` where the run computes in 16 bits, ``bf16`` where it does not and
    the processor multiplies it natively; ``threads=N`` where it computes with more threads than the N cores, and then
    the pass with other numbers is made with as many, too. Of compiled code there is ``full`` alone, as measured when it
    was made, and no operations are told. On a GPU ``fixed_seconds`` is the time in which the device
    waits for the host, by a pass that was queued before it began.

    Args:
        session: of the run, with its network in training mode.
        batch: the run's next one, or one it has had; only read.
        clock: seconds; another one in tests.

    Returns:
        None where the network refuses: it cannot be copied, or takes no other batch. ``session.notices`` tells why.
    """
    device = session.state.engine.device
    try:
        with undisturbed(device):
            return _measured(session, _Passes.of(session), batch, clock)
    except Exception as error:  # noqa: BLE001 - a network of the user's own may raise anything
        told = first_line(error)
        session.notices.put(f"what a step is made of cannot be measured here ({told}): training goes on without")
        return None


@dataclass(frozen=True)
class _Passes:
    """Forward and backward as an update does them, on a network of its own."""

    module: nn.Module
    objective: Objective
    accumulate: int

    @staticmethod
    def of(session: Session) -> _Passes:
        module, update = copy.deepcopy(session.state.module), session.update
        module.zero_grad(set_to_none=True)
        return _Passes(module, update.objective, update.share.own)

    @property
    def device(self) -> torch.device:
        return self.objective.policy.device

    def loss(self, images_BHWC: Tensor, labels: Tensor) -> Tensor:
        return self.objective(self.module, images_BHWC, labels)[0]

    def run(self, batch: Loaded) -> None:
        """One pass with all of a batch, in as many parts as the run's updates have."""
        parts = zip(batch.images.chunk(self.accumulate), batch.labels.chunk(self.accumulate), strict=True)
        for images, labels in parts:
            (self.loss(images, labels) / self.accumulate).backward()  # type: ignore[no-untyped-call]

    def seconds(self, batch: Loaded, clock: Clock) -> float:
        """Of one pass, until the device has done it."""
        self.module.zero_grad(set_to_none=True)
        wait_for(self.device)
        began = clock()
        self.run(batch)
        wait_for(self.device)
        return clock() - began


def _measured(session: Session, passes: _Passes, batch: Loaded, clock: Clock) -> StepMeasured:
    if session.compiled is not None:
        return _as_compiled(session, passes, batch, session.compiled.compiled_seconds)
    other = _resized(batch, _other_size(len(batch.labels), passes.accumulate, may_grow=_may_grow(passes.device)))
    operations = _operations(passes, other)
    less, more = sorted((batch, other), key=lambda one: len(one.labels))
    rounds = [[passes.seconds(one, clock) for one in (less, more, less)] for _ in range(ROUNDS)]
    seconds = {len(more.labels): min(one[1] for one in rounds), len(less.labels): min(min(one[::2]) for one in rounds)}
    told = {"full": seconds[len(batch.labels)], "other": seconds[len(other.labels)]}
    if passes.device.type == "cuda":
        fixed = told["full"] - _device_seconds(passes, batch, told["full"])
    else:
        fixed = _fixed(told["full"], len(batch.labels), told["other"], len(other.labels))
    return StepMeasured(
        step=session.state.cursor.step,
        batch_size=len(batch.labels),
        other_batch_size=len(other.labels),
        passes=told | _others(session, passes, batch, clock),
        fixed_seconds=min(max(fixed, 0.0), *told.values()),
        operations=operations.count * passes.accumulate,
        syncs=tuple(operations.waits),
        forward_flops=operations.flops * passes.accumulate / len(other.labels),
        peak_flops=peak_flops(passes.device, session.recipe.precision.products),
    )


def _as_compiled(session: Session, passes: _Passes, batch: Loaded, seconds: float) -> StepMeasured:
    """Of compiled code, whose passes were measured as it was made: another size would have to be compiled as well."""
    operations = _operations(passes, batch)
    return StepMeasured(
        step=session.state.cursor.step,
        batch_size=len(batch.labels),
        other_batch_size=len(batch.labels),
        passes={"full": seconds * passes.accumulate},
        fixed_seconds=0.0,
        syncs=tuple(operations.waits),
        forward_flops=operations.flops * passes.accumulate / len(batch.labels),
        peak_flops=peak_flops(passes.device, session.recipe.precision.products),
    )


def _may_grow(device: torch.device) -> bool:
    """Whether there is surely memory for a larger batch: never on a GPU, which may be full of the run's own."""
    return device.type == "cpu" and facts.resident_bytes() * (TIMES + 1) < facts.memory_bytes()


def _other_size(batch_size: int, accumulate: int, *, may_grow: bool) -> int:
    """Images of the other batch. Two to a micro-batch at least: batch norms refuse a single value a channel.

    >>> [_other_size(size, 1, may_grow=False) for size in (128, 9, 4, 2, 1)], _other_size(128, 4, may_grow=False)
    ([32, 2, 2, 4, 2], 32)
    >>> [_other_size(size, 1, may_grow=True) for size in (128, 9, 4, 2, 1)], _other_size(128, 4, may_grow=True)
    ([32, 36, 16, 8, 4], 32)
    """
    part = batch_size // accumulate
    if may_grow and part < FEW:
        return accumulate * part * TIMES
    return accumulate * (max(2, part // TIMES) if part >= TIMES else 2 * part)


def _resized(batch: Loaded, size: int) -> Loaded:
    """The first images of a batch, which is repeated if it has not as many."""
    repeats = -(-size // len(batch.labels))
    images, labels = torch.cat([batch.images] * repeats), torch.cat([batch.labels] * repeats)
    return replace(batch, images=images[:size], labels=labels[:size])


def _fixed(full: float, full_size: int, other: float, other_size: int) -> float:
    """Where the straight line through two sizes meets zero images.

    >>> _fixed(40.0, 32, 16.0, 8)
    8.0
    """
    return (other * full_size - full * other_size) / (full_size - other_size)


def _operations(passes: _Passes, batch: Loaded) -> Operations:
    """What one micro-batch asks for; it also makes ready what a batch of this size needs, before it is timed."""
    parts = batch.images.chunk(passes.accumulate), batch.labels.chunk(passes.accumulate)
    seen = Operations()
    with seen:
        loss = passes.loss(parts[0][0], parts[1][0])
        seen.counts_flops = False
        loss.backward()  # type: ignore[no-untyped-call]
    return seen


def _device_seconds(passes: _Passes, batch: Loaded, seconds: float) -> float:
    """How long a GPU itself takes: it is kept busy until the host has queued the pass, so no kernel waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    passes.module.zero_grad(set_to_none=True)
    cycles = int(2 * seconds * 2e9)  # no GPU has a clock much faster
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    begin.record()
    passes.run(batch)
    end.record()
    wait_for(passes.device)
    return float(begin.elapsed_time(end)) / 1000


def _others(session: Session, passes: _Passes, batch: Loaded, clock: Clock) -> dict[str, float]:
    """The full pass as the run does not do it, where that might be faster."""
    told: dict[str, float | None] = {}
    spec = session.recipe.precision
    device, cores = passes.device, facts.cores()
    if device.type == "cpu" and torch.get_num_threads() > cores:
        torch.set_num_threads(cores)  # the caller puts it back
        told[f"threads={cores}"] = _warm(passes, batch, clock)
    name = _other_numbers(spec.name, device)
    if name is not None:
        module = copy.deepcopy(passes.module).float() if spec.is_pure else passes.module
        objective = replace(passes.objective, policy=precision.policy(replace(spec, name=name), device))
        other = replace(passes, module=module, objective=objective)
        told[name] = _warm(other, batch, clock)
    return {key: value for key, value in told.items() if value is not None}


def _warm(passes: _Passes, batch: Loaded, clock: Clock) -> float | None:
    """Seconds of the fastest of some passes after a first one, which makes things ready. None where memory is short."""
    try:
        passes.seconds(batch, clock)
        return min(passes.seconds(batch, clock) for _ in range(ROUNDS))
    except torch.OutOfMemoryError:
        return None


def _other_numbers(name: str, device: torch.device) -> Literal["fp32", "bf16"] | None:
    if name not in ("fp32", "tf32"):
        return "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else None
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else None
