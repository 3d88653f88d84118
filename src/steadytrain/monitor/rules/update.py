"""The update itself: what does not shrink with the batch, number formats, the optimizer, waits for a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, linear_regression

from steadytrain.config.parts import GRAPH_OPTIMIZERS
from steadytrain.config.phases import parse_train
from steadytrain.events import Compiled, StepMeasured, ThreadStats
from steadytrain.format import count, duration, percent
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import COMPUTE, PASSES
from steadytrain.monitor.rules.cause import LEAST, TRUSTED, Cause, VerdictRule, clip
from steadytrain.monitor.rules.host import disturbed, loop_time, slower_stretch, steadiest_part
from steadytrain.monitor.rules.pace import Pace, mean_pace

ENOUGH = 64  # images: where a batch of so many is still more fixed cost than work, it is the model that is small
WORTH_ANOTHER_BATCH = 0.1  # of the time: with less to gain nobody changes the batch, and the learning rate with it
LARGEST_BATCH = 1024
FIXED_LEFT = 0.1  # a larger batch is large enough where its fixed cost is this part of its update
FEWEST_UPDATES = 20  # updates an epoch that a larger batch leaves, at least
GROWN = 1.4  # times its first fifth: what a part of updates takes in the last, at least
EVENLY = 0.6  # share of the growth of another part: whoever waits for processors lengthens each by about as much
RISES = 1.15  # times the fifth before: what is no noise, four times in a row
GREATEST_FALL = 0.25  # share of that rise: what a fifth may take less than the one before
SHORTEST_PART = 1e-4  # seconds: times of less are no unit
GROWING = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "update": "the update",
    "host": "launching operations",
    "transfer": "copying batches",
    "communication": "the exchange of gradients",
}
HELD_UP = 0.25  # of a forward pass: for as long the thread that launches it is away, where no wait for a GPU is in it
# What torch calls the instructions of processors that compute 16 bits by way of 32.
WITHOUT_16_BITS = ("DEFAULT", "AVX2")
# Of a pass that computes 16 bits so: what it takes longer than in 32, for small convolutions; others lose less.
EMULATION = 0.85


def fixed_costs(evidence: Evidence) -> Iterator[Cause]:
    """Find what does not shrink with the batch: a small model or a small batch, the optimizer."""
    pace, recipe = mean_pace(evidence), evidence.recipe
    measured = evidence.newest(StepMeasured) if evidence.on_cpu else None  # a GPU's gaps are in the ledger
    if pace is None:
        return
    batch, calling, optimizing = recipe.batch_size, evidence.ledger.share("host"), evidence.ledger.share("optimizer")
    loop = loop_time(evidence)
    if loop is not None:  # code of others is no call of an operation, nor is waiting for a processor
        if evidence.on_cpu:
            optimizing = max(0.0, optimizing * (1 - loop.queued / loop.passes) - loop.optimizer)
        calling = max(0.0, calling - loop.foreign + loop.optimizer) * (1 - loop.queued / loop.passes)
    host, is_small = calling, False
    if not evidence.on_cpu:
        yield from _launching(evidence, calling, pace)
    if measured is not None and measured.passes.get("full", 0.0) > 0 and host >= LEAST:
        per_image = (measured.passes["full"] - measured.fixed_seconds) / max(measured.batch_size, 1)
        is_small = measured.batch_size < ENOUGH and measured.fixed_seconds <= per_image * ENOUGH
        figures = [f"{duration(measured.fixed_seconds)} of a pass over {batch} images do not shrink with the batch"]
        if is_small:
            host += _idle_cores(evidence, per_image)
        larger, change = _larger_batch(evidence, host + optimizing, pace)
        share = clip(host + optimizing if is_small and optimizing <= host else host)
        if measured.operations:
            figures.append(f"a step has {count(measured.operations, 'tensor operation')}")
        if is_small:
            figures.append(f"the optimizer takes {percent(optimizing)} of the time")
            sentence = (
                f"{_small_batches(batch, larger)}: {percent(share)} of the time goes into the fixed cost of each"
                " update."
            )
        else:
            if evidence.newest(Compiled) is None:
                size = evidence.started.model.get("size")
                shape = f" --size {size}" if size else ""
                bench = f"steady bench train --model {recipe.model.name}{shape} --batch-size {batch}"
                figures.append(f"measure the effect of compiling: {bench} --compile none default")
            sentence = (
                f"The model is small: {percent(share)} of the time goes into calling its operations,"
                " whatever the batch size."
            )
        saves = pace.saved_by_updates(min(share, clip((host + optimizing) * (1 - batch / larger))))
        name = "batch_size" if is_small else "launch"
        # Where more threads compute than there are cores, what does not shrink are threads that wait for each other.
        if share >= WORTH_ANOTHER_BATCH * (1 + disturbed(evidence)) and not evidence.takes_turns:
            yield Cause(name=name, share=share, sentence=sentence, evidence=tuple(figures), change=change, saves=saves)

    if optimizing < max(LEAST, 0.15 * pace.loop) or (is_small and optimizing <= calling):
        return
    parameters, seconds = evidence.started.model.get("trainable", 0), evidence.mean_seconds("optimizer")
    larger, change = _larger_batch(evidence, optimizing, pace)
    yield Cause(
        name="optimizer",
        share=optimizing,
        sentence=f"The optimizer takes {percent(optimizing)} of the time: its cost per update does not depend"
        " on the batch size.",
        evidence=(f"{recipe.optim.name} takes {duration(seconds)} per update for {parameters:,} trained parameters",),
        change=change,
        saves=pace.saved_by_updates(optimizing * (1 - batch / larger)),
    )


def _launching(evidence: Evidence, share: float, pace: Pace) -> Iterator[Cause]:
    """Find a GPU that waits for the host: it computes operations faster than they are launched."""
    recipe, host, device = evidence.recipe, evidence.mean_seconds("host"), evidence.mean_seconds(*COMPUTE)
    if share < WORTH_ANOTHER_BATCH * (1 + disturbed(evidence)):
        return
    images, ranks = recipe.batch_size, max(1, len(evidence.ranks))
    is_small = images / ranks < ENOUGH and host * images / ranks <= device * ENOUGH
    larger, change = _larger_batch(evidence, share, pace)
    saves = pace.saved_by_updates(share * (1 - images / larger))
    is_recorded = recipe.records_graphs
    if not is_recorded and ranks == 1 and recipe.optim.name in GRAPH_OPTIMIZERS:
        change, saves = "--graph", share
    elif not is_recorded and recipe.precision.compile == "none" and recipe.optim.accumulate == 1:
        change, saves = "--compile reduce-overhead", 0.0
    sentence = (
        f"The GPU waits {percent(share)} of the time for the host: launching an update takes longer than computing it."
    )
    if is_small:
        sentence = (
            f"{_small_batches(images, larger)}: the GPU waits {percent(share)} of the time for the host to launch its"
            " operations."
        )
    yield Cause(
        name="batch_size" if is_small else "launch",
        share=share,
        sentence=sentence,
        evidence=(
            f"the GPU works {duration(device)} for each update, and waits {duration(host)} for the host",
            *_held_up(evidence),
        ),
        change=change,
        saves=saves,
    )


def _held_up(evidence: Evidence) -> Iterator[str]:
    """Describe for how much of a forward pass the thread that launches it waits for the interpreter's lock."""
    threads, measured = evidence.newest(ThreadStats), evidence.newest(StepMeasured)
    if threads is None or (measured is not None and measured.syncs):  # then it waits for the GPU as well
        return
    forward = threads.loop.get("forward")
    if forward is None or "ran" not in forward:
        return
    away = 1 - (forward["ran"] + forward.get("queued", 0.0)) / max(forward["seconds"], 1e-9)
    if away >= HELD_UP:
        others = "the loader's threads" if threads.feed else "other threads"  # those of this process alone
        yield f"the training thread waits {percent(away)} of a forward pass for the interpreter's lock ({others})"


def growth(evidence: Evidence) -> Iterator[Cause]:
    """Find parts of the update that take longer and longer: something is kept from step to step.

    Where a large part stays behind the others and takes longer as well, it is the clock by which they are timed: cores
    that were taken away, or a slower processor, are no growth. What an update took before it grew is read off
    the straight line through all stretches, down to the first step of the attempt.
    """
    parts, wall, recipe = evidence.parts, evidence.ledger.wall_seconds, evidence.recipe
    if len(parts) < 4 or wall <= 0 or recipe.data.grow_size or parse_train(recipe.model.train).has_phases:
        return  # larger images, or more layers that are trained, take longer
    updates = [part.images / recipe.batch_size for part in parts]
    clock = steadiest_part(parts[0], parts[-1])
    speeds = [part.seconds[clock] / parts[0].seconds[clock] if clock else 1.0 for part in parts]
    behind = speeds[-1]
    if behind < GROWN or min(speeds) <= 0:
        speeds = [1.0] * len(parts)  # less is the noise of the clock itself
    middles = [part.step - num / 2 - evidence.started.step for part, num in zip(parts, updates, strict=True)]
    lost = dict[str, float]()
    for name in parts[0].seconds:
        times = [part.seconds[name] / speed for part, speed in zip(parts, speeds, strict=True)]
        if times[-1] >= GROWN * times[0] and _grows_steadily(times):
            slope, begin = linear_regression(middles, times)
            if begin < 0:  # it grows faster and faster: what it was before, the first two stretches tell
                slope = (times[1] - times[0]) / max(middles[1] - middles[0], 1e-9)
                begin = times[0] - slope * middles[0]
            began, earlier = min(max(0.0, begin), times[0]), max(0.0, middles[0] - updates[0] / 2)
            lost[name] = slope * earlier**2 / 2 + sum(
                (part.seconds[name] - began * speed) * num
                for part, speed, num in zip(parts, speeds, updates, strict=True)
            )
    share = clip(sum(lost.values()) / wall)
    if share < LEAST:
        return
    first, last = parts[0], parts[-1]
    worst = max(lost, key=lambda name: lost[name])
    times_longer = last.seconds[worst] / max(first.seconds[worst], 1e-9)
    is_disturbed = disturbed(evidence) * evidence.ledger.share(*PASSES, "optimizer") >= share / 2
    if is_disturbed and (clock is None or behind >= EVENLY * times_longer):
        return  # whoever waits for processors more and more does so in all parts
    longer = f"{times_longer:.1f} times as long as" if first.seconds[worst] >= SHORTEST_PART else "far longer than"
    yield Cause(
        name="growth",
        share=share,
        sentence=f"Updates take longer and longer: by step {last.step:,} {GROWING.get(worst, worst)} takes {longer} by"
        f" step {first.step:,}. That costs {percent(share)} of the time.",
        evidence=tuple(
            f"{GROWING.get(name, name)} takes "
            + ", ".join(f"{duration(part.seconds[name])} by step {part.step:,}" for part in parts)
            for name in sorted(lost, key=lambda name: -lost[name])
        ),
        change=(
            "" if slower_stretch(evidence) is None else "see that the processor keeps its clock (heat, other guests); "
        )
        + "look in the model, its hooks, the loss and the optimizer for what is kept from one step to the next: a list"
        " or a graph that grows",
        saves=share,
    )


def _grows_steadily(times: Sequence[float]) -> bool:
    """Return whether a straight line describes these times better than a single step does, with no great fall between.

    What sets in and stays is a fault of another kind, whatever the machine adds to single stretches. What rises from
    each to the next grows as well, on whatever line.

    >>> [_grows_steadily(times) for times in ([40, 54, 55, 70, 66], [10, 10, 30, 40, 41], [25, 31, 38, 53, 117])]
    [True, False, True]
    """
    if all(after >= RISES * before for before, after in pairwise(times)):
        return True
    slope, begin = linear_regression(range(len(times)), times)
    off_line = sum((value - begin - slope * at) ** 2 for at, value in enumerate(times))
    off_step = min(
        sum((value - fmean(level)) ** 2 for level in (times[:at], times[at:]) for value in level)
        for at in range(1, len(times))
    )
    fall = max(before - after for before, after in pairwise(times))
    return slope > 0 and off_line < off_step and fall <= GREATEST_FALL * (times[-1] - times[0])


def precision(evidence: Evidence) -> Iterator[Cause]:
    """Find another number format that was measured to be faster, or is known to be."""
    measured, name, isa = (
        evidence.newest(StepMeasured),
        evidence.recipe.precision.name,
        str(evidence.started.machine.get("isa", "")),
    )
    computing = evidence.ledger.share(*(PASSES if evidence.on_cpu else set(PASSES) - {"host"}))
    passes = measured.passes if measured is not None and measured.passes.get("full", 0.0) > 0 else {}
    candidates = {other: passes[other] for other in ("fp32", "bf16", "fp16") if other in passes and other != name}
    if candidates:
        best = min(candidates, key=lambda name: candidates[name])
        # Where more threads compute than there are cores, both were tried with as many: what is left is compared.
        tried = (seconds for other, seconds in passes.items() if other.startswith("threads="))
        turns = min(tried, default=None) if evidence.takes_turns else None
        full = passes["full"] if turns is None else turns
        unqueued = 1.0 if turns is None else min(1.0, turns / max(evidence.mean_seconds(*PASSES), 1e-9))
        left = candidates[best] / full
        share = clip(computing * unqueued * (1 - left))
        if left > 1 - TRUSTED - disturbed(evidence):
            return
        sentence = f"{name} is slower here than {best}, which would save {percent(share)} of the time."
        if name != "fp32":
            sentence = f"{name} is slower here: {best} would save {percent(share)} of the time."
        figure = f"a pass takes {duration(full)} in {name} and {duration(candidates[best])} in {best}"
    elif name != "fp32" and evidence.on_cpu and isa in WITHOUT_16_BITS:
        best, share = "fp32", clip(computing * EMULATION)
        sentence = f"{name} is emulated on this processor: fp32 would save about {percent(share)} of the time."
        figure = f"its vector instructions are {isa}, which have no 16-bit multiplication"
    elif name == "fp32" and not evidence.on_cpu and evidence.devices:
        best, share = "bf16", clip(0.4 * computing)
        tensor = max((device.tensor_active or 0.0 for device in evidence.devices), default=0.0)
        busy = min((device.sm_active or 0.0 for device in evidence.devices), default=0.0)
        if any(device.tensor_active is None for device in evidence.devices) or tensor >= 0.05 or busy < 0.5:
            return
        sentence = (
            f"Training runs in fp32, and the GPU's tensor cores are idle: bf16 would save about {percent(share)}."
        )
        figure = f"tensor cores busy {percent(tensor)}, multiprocessors {percent(busy)}"
    else:
        return
    change, pace = f"--precision {best}", mean_pace(evidence)
    saves = pace.saved_by_updates(share) if pace is not None else share
    yield Cause(name="precision", share=share, sentence=sentence, evidence=(figure,), change=change, saves=saves)


def sync(evidence: Evidence) -> Iterator[Cause]:
    """Find model code that waits for the device in each step."""
    measured = evidence.newest(StepMeasured)
    if measured is None or not measured.syncs:
        return
    places, share = ", ".join(str(place) for place in measured.syncs[:3]), evidence.ledger.share("host")
    if evidence.on_cpu:
        sentence = "The model's code reads tensor values in each step; that costs nothing on a CPU, but would on a GPU."
        yield Cause(name="sync", share=0.0, sentence=sentence, evidence=(places,))
        return
    # Between its waits the host launches operations of the passes one by one: the ledger counts that as the passes.
    fixed = measured.fixed_seconds / max(measured.passes.get("full", 0.0), 1e-9)
    share = max(share, clip(evidence.ledger.share(*PASSES) * min(1.0, fixed)))
    figures = [places, f"{duration(measured.fixed_seconds)} of a pass do not shrink with the batch"]
    figures += [
        f"GPU {device.index} was busy {percent(device.utilisation)} of the time"
        for device in evidence.devices
        if device.utilisation is not None
    ]
    yield Cause(
        name="sync",
        share=share,
        sentence=f"The model's code waits for the GPU in each step, at {places}, and then the GPU waits for the host: "
        f"that costs {percent(share)} of the time.",
        evidence=tuple(figures),
        change=f"keep the value on the device at {measured.syncs[0]}: avoid .item(), .cpu(), print and if on a tensor",
        saves=share,
    )


def _idle_cores(evidence: Evidence, per_image: float) -> float:
    """Return the share of the time that a larger batch saves since more threads than this one's can compute it.

    ``each``: seconds that an image adds to a pass with the threads of the run, which are the fastest for its batch.
    """
    measured = evidence.newest(StepMeasured)
    if measured is None or "threads_seconds" not in evidence.started.machine or per_image <= 0:
        return 0.0
    for name, seconds in measured.passes.items():
        if name.startswith("other threads="):
            then = max(0.0, seconds - measured.fixed_seconds) / measured.other_batch_size
            return evidence.ledger.share("forward", "backward") * clip(1 - then / per_image)
    return 0.0


def _small_batches(batch: int, larger: int) -> str:
    """Word that batches are small. The data or the device may have room for no ``larger`` ones."""
    reason = "too small" if larger > batch else "small, and the data or the device has room for no larger ones"
    return f"Batches of {count(batch, 'image')} are {reason}"


def _larger_batch(evidence: Evidence, fixed: float, pace: Pace) -> tuple[int, str]:
    """Return the batch of which a ``fixed`` share is a tenth, as far as data and device have room, and its flags.

    It is a power of two; the run's own batch and no flags where there is none.
    """
    batch, most = evidence.recipe.batch_size, float(LARGEST_BATCH)
    times = fixed / max(pace.loop - fixed, 1e-3) * (1 - FIXED_LEFT) / FIXED_LEFT
    ideal = int(batch * 2 ** max(1, math.ceil(math.log2(max(2.0, times)))))
    if evidence.num_train:
        most = min(most, evidence.num_train / FEWEST_UPDATES)
    for device in evidence.devices:
        if device.memory_bytes and device.memory_total_bytes:
            most = min(most, batch * 0.9 * device.memory_total_bytes / device.memory_bytes)
    larger = 1 << math.floor(math.log2(max(1.0, min(most, ideal))))
    if larger <= batch:
        return batch, ""
    return larger, f"--batch-size {larger}, with a learning rate to match (--lr)"


RULES = (
    VerdictRule("growth", growth, slows={"growth": "updates"}),
    VerdictRule("fixed_costs", fixed_costs, explains={"batch_size": ("launch", "optimizer", "logging")}),
    VerdictRule("precision", precision),
    VerdictRule("sync", sync, explains={"sync": ("launch", "batch_size")}),
)
