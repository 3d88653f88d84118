"""The update itself: what does not shrink with the batch, number formats, the optimizer, waits in the model's code."""

from __future__ import annotations

import math

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import PASSES
from steadytrain.monitor.rules.cause import LEAST, TRUSTED, Cause, duration, percent, some, within
from steadytrain.monitor.rules.pace import Pace
from steadytrain.monitor.rules.stretches import on_cpu, pass_seconds, takes_turns, whole

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
"""Of the compute threads: where more of them are busy in the passes, nothing but a measured pass tells of waiting."""


def model_waits(evidence: Evidence) -> Cause | None:
    """During the passes the processors have nothing to do: the model's code waits for something."""
    share = _waiting(evidence)
    if share < LEAST:
        return None
    measured, machine = evidence.measured, evidence.machine
    told = []
    if measured is not None and measured.operations:
        told.append(
            f"{duration(measured.fixed_seconds)} of a pass do not shrink with the batch, far more than its"
            f" {measured.operations:,} operations need"
        )
    if machine is not None and machine.cpu is not None:
        told.append(f"the run uses {machine.cpu:.2f} cores")
    sentence = f"The model's own code waits, {percent(share)} of the time: in its passes the processors are idle."
    change = "take out of the model's code what waits: time.sleep, a lock, a file, a request"
    return Cause(name="model_waits", share=share, sentence=sentence, evidence=tuple(told), change=change, saves=share)


def launch(evidence: Evidence) -> Cause | None:
    """The model is so small that calling its operations takes longer than what they compute."""
    return _fixed(evidence, "launch")


def batch_size(evidence: Evidence) -> Cause | None:
    """The batch is so small that what each update costs anyway is most of it."""
    return _fixed(evidence, "batch_size")


def precision(evidence: Evidence) -> Cause | None:
    """Another number format was measured to be faster."""
    measured, own = evidence.measured, evidence.recipe.precision.name
    if measured is None or measured.passes.get("full", 0.0) <= 0:
        return _no_tensor_cores(evidence) or _emulated(evidence)
    tried = {name: seconds for name, seconds in measured.passes.items() if name in ("fp32", "bf16", "fp16")}
    tried.pop(own, None)
    if not tried:
        return _no_tensor_cores(evidence) or _emulated(evidence)
    best = min(tried, key=lambda name: tried[name])
    # Where more threads compute than there are cores, both were tried with as many: what is left then is compared.
    turns = min((seconds for name, seconds in measured.passes.items() if name.startswith("threads=")), default=None)
    full = measured.passes["full"] if turns is None else turns
    left = tried[best] / full
    rest = 1.0 if turns is None else min(1.0, turns / max(pass_seconds(evidence), 1e-9))
    share = within(evidence.ledger.share(*PASSES) * rest * (1 - left))
    if left > 1 - TRUSTED or share < LEAST:
        return None
    sentence = (
        f"{own} makes it slower here: {best} would save {percent(share)} of the time."
        if own != "fp32"
        else f"{own} is slower here than {best}, which would save {percent(share)} of the time."
    )
    told = (f"a pass takes {duration(full)} in {own} and {duration(tried[best])} in {best}",)
    return Cause(
        name="precision", share=share, sentence=sentence, evidence=told, change=f"--precision {best}", saves=share
    )


def optimizer(evidence: Evidence) -> Cause | None:
    """The optimizer takes a large part of each update."""
    share = evidence.ledger.share("optimizer")
    pace = whole(evidence)
    if pace is None or share < max(LEAST, 0.15 * pace.loop):
        return None
    if _is_small_batch(evidence) and share <= evidence.ledger.share("host"):
        return None
    recipe, parameters = evidence.recipe, evidence.started.model.get("trainable", 0)
    seconds = evidence.ledger.seconds["optimizer"] / max(evidence.ledger.steps, 1)
    told = (f"{recipe.optim.name} takes {duration(seconds)} an update for {parameters:,} trained parameters",)
    sentence = f"The optimizer takes {percent(share)} of the time: it costs the same for each update, however small."
    larger = _larger(evidence, _wanted(recipe.batch_size, share, pace))
    if larger is None:
        return Cause(name="optimizer", share=share, sentence=sentence, evidence=told)
    return Cause(
        name="optimizer",
        share=share,
        sentence=sentence,
        evidence=told,
        change=_batch_change(larger),
        saves=share * (1 - recipe.batch_size / larger),
    )


def sync(evidence: Evidence) -> Cause | None:
    """The model's code waits for the device in each step."""
    measured = evidence.measured
    if measured is None or not measured.syncs:
        return None
    where = ", ".join(str(place) for place in measured.syncs[:3])
    if on_cpu(evidence):
        sentence = "The model's code asks for values in each step; on a CPU that costs nothing, on a GPU it would."
        return Cause(name="sync", share=0.0, sentence=sentence, evidence=(where,))
    share = evidence.ledger.share("host")
    sentence = (
        f"The model's code waits for the GPU in each step, at {where}: {percent(share)} of the time the GPU then waits"
        " for the host."
    )
    change = f"keep the value on the device at {measured.syncs[0]}: no .item(), .cpu(), print or if on a tensor"
    return Cause(name="sync", share=share, sentence=sentence, evidence=(where,), change=change, saves=share)


def _fixed(evidence: Evidence, name: str) -> Cause | None:
    """What does not shrink with the batch, told as the cause that fits: a small model or a small batch."""
    pace, measured = whole(evidence), evidence.measured
    if takes_turns(evidence):
        return None  # what does not shrink are threads that wait for each other
    small = _is_small_batch(evidence)
    if pace is None or small is None or (name == "batch_size") != small:
        return None
    host = max(0.0, evidence.ledger.share("host") - _waiting(evidence))
    optimizing = evidence.ledger.share("optimizer")
    fixed = host + optimizing
    own = evidence.recipe.batch_size
    larger = _larger(evidence, _wanted(own, fixed, pace))
    share = within(fixed if small and optimizing <= host else host)
    saves = 0.0 if larger is None else min(share, within(fixed * (1 - own / larger)))
    if share < WORTH_ANOTHER_BATCH:
        return None
    assert measured is not None
    told = [f"{duration(measured.fixed_seconds)} of a pass over {own} images do not shrink with the batch"]
    if measured.operations:
        told.append(f"a step is {some(measured.operations, 'tensor operation')}")
    if small:
        told.append(f"the optimizer takes {percent(evidence.ledger.share('optimizer'))} of the time")
        sentence = (
            f"Batches of {some(own, 'image')} are too small: {percent(share)} of the time goes into what each update"
            " costs anyway."
        )
    else:
        if evidence.compiled is None:
            told.append(f"what compiled code would do with them: {_bench(evidence)} --compile none default")
        sentence = (
            f"The model is small: {percent(share)} of the time goes into calling its operations, however many images"
            " they are for."
        )
    change = "" if larger is None else _batch_change(larger)
    return Cause(name=name, share=share, sentence=sentence, evidence=tuple(told), change=change, saves=saves)


def _bench(evidence: Evidence) -> str:
    """The command that measures this model by itself."""
    recipe, size = evidence.recipe, evidence.started.model.get("size")
    shape = f" --size {size}" if size else ""
    return f"steady bench train --model {recipe.model.name}{shape} --batch-size {recipe.batch_size}"


def _is_small_batch(evidence: Evidence) -> bool | None:
    """Whether the batch rather than the model is small, where one of them is; None where neither is."""
    measured, pace = evidence.measured, whole(evidence)
    if measured is None or pace is None or measured.passes.get("full", 0.0) <= 0:
        return None
    if evidence.ledger.share("host") - _waiting(evidence) < LEAST:
        return None
    each = (measured.passes["full"] - measured.fixed_seconds) / max(measured.batch_size, 1)
    return measured.batch_size < ENOUGH and measured.fixed_seconds <= each * ENOUGH


def _wanted(own: int, fixed: float, pace: Pace) -> int:
    """The batch of which the fixed cost is a tenth: a power of two."""
    rest = max(pace.loop - fixed, 1e-3)
    times = fixed / rest * (1 - FIXED_LEFT) / FIXED_LEFT
    return int(own * 2 ** max(1, math.ceil(math.log2(max(2.0, times)))))


def _larger(evidence: Evidence, wanted: int) -> int | None:
    """The largest power of two up to ``wanted`` that the data and the device have room for; None where none is."""
    own = evidence.recipe.batch_size
    most = float(LARGEST_BATCH)
    if num_train := float(evidence.started.data.get("num_train", 0) or 0):
        most = min(most, num_train / FEWEST_UPDATES)
    for device in evidence.devices:
        if device.memory_bytes and device.memory_total_bytes:
            most = min(most, own * 0.9 * device.memory_total_bytes / device.memory_bytes)
    larger = 1 << math.floor(math.log2(max(1.0, min(most, wanted))))
    return larger if larger > own else None


def _batch_change(larger: int) -> str:
    return f"--batch-size {larger}, with a learning rate to match (--lr)"


def _waiting(evidence: Evidence) -> float:
    """Share of the wall time that the model's code waits, on a CPU.

    Processor time bounds it from both sides: while it computes, the run uses a core at least and all of its compute
    threads at most. In between it is what no operation accounts for where the passes were measured, and else what the
    forward pass takes beyond half of the backward one, as it does where nothing waits.
    """
    pace, measured, machine = whole(evidence), evidence.measured, evidence.machine
    if pace is None or not on_cpu(evidence) or machine is None or machine.cpu is None or pace.is_saturated:
        return 0.0
    if takes_turns(evidence):
        return 0.0
    ledger, passes = evidence.ledger, evidence.ledger.share(*PASSES)
    fed = 0.0 if pace.feed is None else pace.busy * pace.on_processor / pace.step * pace.loop
    used = max(0.0, machine.cpu * pace.loop - fed)  # cores of the passes, as if they lasted all the time
    threads = max(1, min(pace.compute_threads, pace.cores))
    least, most = max(0.0, passes - used), max(0.0, passes - used / threads)
    if measured is not None and measured.operations:
        excess = measured.fixed_seconds - measured.operations * OPERATION_SECONDS
        told = pace.loop * excess / pace.step if excess > MOST * measured.fixed_seconds else 0.0
    elif used > IN_USE * threads * passes:
        return 0.0  # threads that wait for each other at the end of each small operation, and no more than that
    else:
        told = ledger.share("forward") - ledger.share("backward") / 2
    share = within(min(max(told, least), most))
    return share if share >= 0.1 * passes else 0.0


def _emulated(evidence: Evidence) -> Cause | None:
    """16 bits on a processor that has no instructions for them, where no pass was measured."""
    name, isa = evidence.recipe.precision.name, str(evidence.started.machine.get("isa", ""))
    if name == "fp32" or not on_cpu(evidence) or isa not in WITHOUT_16_BITS:
        return None
    share = within(evidence.ledger.share(*PASSES) * EMULATION)
    if share < LEAST:
        return None
    sentence = f"{name} is emulated on this processor: fp32 would save about {percent(share)} of the time."
    told = (f"its vector instructions are {isa}, which multiply no 16 bits",)
    return Cause(
        name="precision", share=share, sentence=sentence, evidence=told, change="--precision fp32", saves=share
    )


def _no_tensor_cores(evidence: Evidence) -> Cause | None:
    """fp32 on a GPU whose tensor cores are idle while its multiprocessors are not."""
    if evidence.recipe.precision.name != "fp32" or on_cpu(evidence) or not evidence.devices:
        return None
    device = evidence.devices[0]
    if device.tensor_active is None or device.tensor_active >= 0.05 or (device.sm_active or 0.0) < 0.5:
        return None
    passes = evidence.ledger.share(*PASSES)
    saves = within(0.4 * passes)
    if saves < LEAST:
        return None
    sentence = f"Training runs in fp32, and the GPU's tensor cores are idle: bf16 would save about {percent(saves)}."
    told = (f"tensor cores busy {percent(device.tensor_active)}, multiprocessors {percent(device.sm_active or 0.0)}",)
    return Cause(
        name="precision", share=saves, sentence=sentence, evidence=told, change="--precision bf16", saves=saves
    )
