"""The update itself: what does not shrink with the batch, number formats, the optimizer, waits in the model's code."""

from __future__ import annotations

import math

from steadytrain.format import count, duration, percent
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import PASSES
from steadytrain.monitor.rules.cause import LEAST, TRUSTED, Cause, clip
from steadytrain.monitor.rules.pace import Pace, mean_pace

OPERATION_SECONDS = 50e-6
"""What the host needs for one tensor operation, at most, on a slow core."""

ENOUGH = 64
"""Images: where a batch of so many is still more fixed cost than work, it is the model that is small."""

WORTH_ANOTHER_BATCH = 0.1
"""Of the time: with less to gain nobody changes the batch, and the learning rate with it."""

LARGEST_BATCH = 1024
FIXED_LEFT = 0.1
"""A larger batch is large enough where its fixed cost is this part of its update."""

FEWEST_UPDATES = 20
"""Updates an epoch that a larger batch leaves, at least."""

WITHOUT_16_BITS = ("DEFAULT", "AVX2")
"""What torch calls the instructions of processors that compute 16 bits by way of 32."""

EMULATION = 0.85
"""Of a pass that computes 16 bits so: what it takes longer than in 32, for small convolutions; others lose less."""

MOST = 0.5
"""Of what does not shrink with the batch: where operations account for the rest, they may account for all of it."""

IN_USE = 0.65
"""Of the compute threads: where more of them are busy in the passes, nothing but a measured pass shows waiting."""


def model_waits(evidence: Evidence) -> Cause | None:
    """Find passes in which the processors have nothing to do: the model's code waits for something."""
    share, measured, machine = _share_waiting(evidence), evidence.measured, evidence.machine
    if share < LEAST:
        return None
    figures = []
    if measured is not None and measured.operations:
        figures.append(
            f"{duration(measured.fixed_seconds)} of a pass do not shrink with the batch, far more than its"
            f" {measured.operations:,} operations need"
        )
    if machine is not None and machine.cpu is not None:
        figures.append(f"the run uses {machine.cpu:.2f} cores")
    return Cause(
        name="model_waits",
        share=share,
        sentence=f"The model's own code waits, {percent(share)} of the time: in its passes the processors are idle.",
        evidence=tuple(figures),
        change="take out of the model's code what waits: time.sleep, a lock, a file, a request",
        saves=share,
    )


def launch(evidence: Evidence) -> Cause | None:
    """Find a model so small that calling its operations takes longer than what they compute."""
    return _fixed_cost(evidence, "launch")


def batch_size(evidence: Evidence) -> Cause | None:
    """Find a batch so small that what each update costs anyway is most of it."""
    return _fixed_cost(evidence, "batch_size")


def _fixed_cost(evidence: Evidence, name: str) -> Cause | None:
    """Find what does not shrink with the batch, as the cause that fits: a small model or a small batch."""
    pace, measured, recipe = mean_pace(evidence), evidence.measured, evidence.recipe
    if evidence.takes_turns:
        return None  # what does not shrink are threads that wait for each other
    is_small = _is_small_batch(evidence)
    if pace is None or measured is None or is_small is None or (name == "batch_size") != is_small:
        return None
    host = max(0.0, evidence.ledger.share("host") - _share_waiting(evidence))
    optimizing, batch = evidence.ledger.share("optimizer"), recipe.batch_size
    fixed = host + optimizing
    larger = _larger_batch(evidence, fixed, pace)
    share = clip(fixed if is_small and optimizing <= host else host)
    if share < WORTH_ANOTHER_BATCH:
        return None
    figures = [f"{duration(measured.fixed_seconds)} of a pass over {batch} images do not shrink with the batch"]
    if measured.operations:
        figures.append(f"a step is {count(measured.operations, 'tensor operation')}")
    if is_small:
        figures.append(f"the optimizer takes {percent(optimizing)} of the time")
        sentence = (
            f"Batches of {count(batch, 'image')} are too small: {percent(share)} of the time goes into what each update"
            " costs anyway."
        )
    else:
        if evidence.compiled is None:
            size = evidence.started.model.get("size")
            shape = f" --size {size}" if size else ""
            bench = f"steady bench train --model {recipe.model.name}{shape} --batch-size {batch}"
            figures.append(f"what compiled code would do with them: {bench} --compile none default")
        sentence = (
            f"The model is small: {percent(share)} of the time goes into calling its operations, however many images"
            " they are for."
        )
    change = "" if larger is None else _batch_change(larger)
    saves = 0.0 if larger is None else min(share, clip(fixed * (1 - batch / larger)))
    return Cause(name=name, share=share, sentence=sentence, evidence=tuple(figures), change=change, saves=saves)


def precision(evidence: Evidence) -> Cause | None:
    """Find another number format that was measured to be faster, or is known to be."""
    measured, name = evidence.measured, evidence.recipe.precision.name
    passes = measured.passes if measured is not None and measured.passes.get("full", 0.0) > 0 else {}
    tried = {other: passes[other] for other in ("fp32", "bf16", "fp16") if other in passes and other != name}
    if not tried:
        return _no_tensor_cores(evidence) or _emulated_precision(evidence)
    best = min(tried, key=lambda name: tried[name])
    # Where more threads compute than there are cores, both were tried with as many: what is left then is compared.
    turns = min((seconds for other, seconds in passes.items() if other.startswith("threads=")), default=None)
    full = passes["full"] if turns is None else turns
    rest = 1.0 if turns is None else min(1.0, turns / max(evidence.mean_seconds(*PASSES), 1e-9))
    left = tried[best] / full
    share = clip(evidence.ledger.share(*PASSES) * rest * (1 - left))
    if left > 1 - TRUSTED or share < LEAST:
        return None
    sentence = (
        f"{name} makes it slower here: {best} would save {percent(share)} of the time."
        if name != "fp32"
        else f"{name} is slower here than {best}, which would save {percent(share)} of the time."
    )
    figures = (f"a pass takes {duration(full)} in {name} and {duration(tried[best])} in {best}",)
    return _precision_cause(share, sentence, figures, best)


def _emulated_precision(evidence: Evidence) -> Cause | None:
    """Find 16 bits on a processor that has no instructions for them, where no pass was measured."""
    name, isa = evidence.recipe.precision.name, str(evidence.started.machine.get("isa", ""))
    share = clip(evidence.ledger.share(*PASSES) * EMULATION)
    if name == "fp32" or not evidence.on_cpu or isa not in WITHOUT_16_BITS or share < LEAST:
        return None
    sentence = f"{name} is emulated on this processor: fp32 would save about {percent(share)} of the time."
    return _precision_cause(share, sentence, (f"its vector instructions are {isa}, which multiply no 16 bits",), "fp32")


def _no_tensor_cores(evidence: Evidence) -> Cause | None:
    """Find fp32 on a GPU whose tensor cores are idle while its multiprocessors are not."""
    if evidence.recipe.precision.name != "fp32" or evidence.on_cpu or not evidence.devices:
        return None
    device = evidence.devices[0]
    busy, share = device.sm_active or 0.0, clip(0.4 * evidence.ledger.share(*PASSES))
    if device.tensor_active is None or device.tensor_active >= 0.05 or busy < 0.5 or share < LEAST:
        return None
    sentence = f"Training runs in fp32, and the GPU's tensor cores are idle: bf16 would save about {percent(share)}."
    figures = (f"tensor cores busy {percent(device.tensor_active)}, multiprocessors {percent(busy)}",)
    return _precision_cause(share, sentence, figures, "bf16")


def _precision_cause(share: float, sentence: str, figures: tuple[str, ...], better: str) -> Cause:
    change = f"--precision {better}"
    return Cause(name="precision", share=share, sentence=sentence, evidence=figures, change=change, saves=share)


def optimizer(evidence: Evidence) -> Cause | None:
    """Find an optimizer that takes a large part of each update."""
    share, pace, recipe = evidence.ledger.share("optimizer"), mean_pace(evidence), evidence.recipe
    if pace is None or share < max(LEAST, 0.15 * pace.loop):
        return None
    if _is_small_batch(evidence) and share <= evidence.ledger.share("host"):
        return None
    parameters, seconds = evidence.started.model.get("trainable", 0), evidence.mean_seconds("optimizer")
    larger = _larger_batch(evidence, share, pace)
    return Cause(
        name="optimizer",
        share=share,
        sentence=f"The optimizer takes {percent(share)} of the time: it costs the same for each update, however small.",
        evidence=(f"{recipe.optim.name} takes {duration(seconds)} an update for {parameters:,} trained parameters",),
        change="" if larger is None else _batch_change(larger),
        saves=0.0 if larger is None else share * (1 - recipe.batch_size / larger),
    )


def sync(evidence: Evidence) -> Cause | None:
    """Find model code that waits for the device in each step."""
    measured = evidence.measured
    if measured is None or not measured.syncs:
        return None
    places, share = ", ".join(str(place) for place in measured.syncs[:3]), evidence.ledger.share("host")
    if evidence.on_cpu:
        sentence = "The model's code asks for values in each step; on a CPU that costs nothing, on a GPU it would."
        return Cause(name="sync", share=0.0, sentence=sentence, evidence=(places,))
    return Cause(
        name="sync",
        share=share,
        sentence=(
            f"The model's code waits for the GPU in each step, at {places}: {percent(share)} of the time the GPU then"
            " waits for the host."
        ),
        evidence=(places,),
        change=f"keep the value on the device at {measured.syncs[0]}: no .item(), .cpu(), print or if on a tensor",
        saves=share,
    )


def _is_small_batch(evidence: Evidence) -> bool | None:
    """Tell whether the batch rather than the model is small, where one of them is; None where neither is."""
    measured = evidence.measured
    if measured is None or mean_pace(evidence) is None or measured.passes.get("full", 0.0) <= 0:
        return None
    if evidence.ledger.share("host") - _share_waiting(evidence) < LEAST:
        return None
    each = (measured.passes["full"] - measured.fixed_seconds) / max(measured.batch_size, 1)
    return measured.batch_size < ENOUGH and measured.fixed_seconds <= each * ENOUGH


def _larger_batch(evidence: Evidence, fixed: float, pace: Pace) -> int | None:
    """Return the batch of which a ``fixed`` share is a tenth, as far as data and device have room; None if none.

    It is a power of two.
    """
    batch, most = evidence.recipe.batch_size, float(LARGEST_BATCH)
    times = fixed / max(pace.loop - fixed, 1e-3) * (1 - FIXED_LEFT) / FIXED_LEFT
    wanted = int(batch * 2 ** max(1, math.ceil(math.log2(max(2.0, times)))))
    if evidence.num_train:
        most = min(most, evidence.num_train / FEWEST_UPDATES)
    for device in evidence.devices:
        if device.memory_bytes and device.memory_total_bytes:
            most = min(most, batch * 0.9 * device.memory_total_bytes / device.memory_bytes)
    larger = 1 << math.floor(math.log2(max(1.0, min(most, wanted))))
    return larger if larger > batch else None


def _batch_change(larger: int) -> str:
    return f"--batch-size {larger}, with a learning rate to match (--lr)"


def _share_waiting(evidence: Evidence) -> float:
    """Return the share of the wall time that the model's code waits, on a CPU.

    Processor time bounds it from both sides: while it computes, the run uses a core at least and all of its compute
    threads at most. In between it is what no operation accounts for where the passes were measured, and else what the
    forward pass takes beyond half of the backward one, as it does where nothing waits.
    """
    pace, measured, machine = mean_pace(evidence), evidence.measured, evidence.machine
    if pace is None or not evidence.on_cpu or machine is None or machine.cpu is None or pace.is_saturated:
        return 0.0
    if evidence.takes_turns:
        return 0.0
    ledger, passes = evidence.ledger, evidence.ledger.share(*PASSES)
    fed = 0.0 if pace.feed is None else pace.busy * pace.on_processor / pace.step * pace.loop
    used = max(0.0, machine.cpu * pace.loop - fed)  # cores of the passes, as if they lasted all the time
    threads = max(1, min(pace.compute_threads, pace.cores))
    least, most = max(0.0, passes - used), max(0.0, passes - used / threads)
    if measured is not None and measured.operations:
        excess = measured.fixed_seconds - measured.operations * OPERATION_SECONDS
        waits = pace.loop * excess / pace.step if excess > MOST * measured.fixed_seconds else 0.0
    elif used > IN_USE * threads * passes:
        return 0.0  # threads that wait for each other at the end of each small operation, and no more than that
    else:
        waits = ledger.share("forward") - ledger.share("backward") / 2
    share = clip(min(max(waits, least), most))
    return share if share >= 0.1 * passes else 0.0
