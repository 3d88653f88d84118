"""What a run pays for beginning: starts, compilation, and what a restart does again."""

from __future__ import annotations

import math

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, duration, percent, some, within
from steadytrain.monitor.rules.stretches import whole

LONG_SECONDS = 5.0
"""For making data, model or state ready: that it takes as long is worth a word of its own."""

STARTING = {"data": "Opening the data", "model": "Making the model", "state": "Making what an update needs"}


def restart(evidence: Evidence) -> Cause | None:
    """Work done since the last checkpoint was lost when an attempt was killed."""
    share, seconds = evidence.ledger.share("lost"), evidence.ledger.seconds["lost"]
    if share < LEAST:
        return None
    count, written = evidence.checkpoints
    each = written / count if count else 1.0
    between = evidence.ledger.wall_seconds / max(evidence.attempts, 1)
    # Young's interval (J. W. Young, Comm. ACM 17, 1974, 530-531): what is written and what is lost cost the same.
    apart = math.sqrt(2 * each * between)
    left = min(1.0, apart * max(evidence.attempts - 1, 1) / seconds)  # half of it is lost, and half of it written
    told = (
        f"{duration(seconds)} were done again after {some(max(evidence.attempts - 1, 1), 'restart')}",
        f"a checkpoint takes {duration(each)} to write",
    )
    sentence = f"{percent(share)} of the time was lost: done after the last checkpoint before an attempt was ended."
    pace = whole(evidence)
    if left > 0.9 or pace is None:
        return Cause(name="restart", share=share, sentence=sentence, evidence=told)
    change = f"--set every.save_minutes={apart / 60:.0f}"
    if apart < 120:
        change = f"--set every.save_steps={max(1, round(apart / pace.step))}"
    return Cause(name="restart", share=share, sentence=sentence, evidence=told, change=change, saves=share * (1 - left))


def startup(evidence: Evidence) -> Cause | None:
    """A short run is mostly its start; there is nothing to mend."""
    share, seconds = evidence.ledger.share("startup"), evidence.ledger.seconds["startup"]
    if share < LEAST:
        return None
    in_it = {name: spent for name, spent in evidence.started.startup.items() if name != "compile"}
    parts = sorted(in_it.items(), key=lambda part: -part[1])
    told = tuple(f"{name}: {duration(spent)}" for name, spent in parts)
    name, spent = next((part for part in parts if part[0] != "process"), ("", 0.0))
    part = spent / evidence.ledger.wall_seconds
    if spent < LONG_SECONDS or part < LEAST:
        sentence = f"Starting took {duration(seconds)}, {percent(share)} of the time, because the run is short."
        return Cause(name="startup", share=share, sentence=sentence, evidence=told, is_usual=True)
    sentence = f"{STARTING.get(name, name)} took {duration(spent)}, {percent(part)} of the time."
    return Cause(name="startup", share=within(part), sentence=sentence, evidence=told)


def compilation(evidence: Evidence) -> Cause | None:
    """Code was made that earns its time in no run as short as this, or never; the first updates took long."""
    told, started, wall = evidence.compiled, evidence.started, evidence.ledger.wall_seconds
    if told is None:
        return _warming_up(evidence)
    images = max(0, started.steps - started.step) * started.batch_size
    gain = (told.eager_seconds - told.compiled_seconds) * images / max(told.images, 1)
    share = within((told.seconds + max(0.0, -gain)) / wall)
    if share < LEAST or gain >= told.seconds:
        return None
    paid = told.images_until_paid
    passes = f"a pass takes {duration(told.compiled_seconds)}, and {duration(told.eager_seconds)} without it"
    why = "is never earned again" if paid is None else f"is earned after {paid:,} images; this run has {images:,}"
    return Cause(
        name="compile",
        share=share,
        sentence=f"Compiling took {duration(told.seconds)}, {percent(told.seconds / wall)} of the time, which {why}.",
        evidence=(passes, *told.breaks[:3]),
        change="leave --compile out (precision.compile=none)",
        saves=within((told.seconds - gain) / wall),
    )


def _warming_up(evidence: Evidence) -> Cause | None:
    share, seconds = evidence.ledger.share("warmup"), evidence.ledger.seconds["warmup"]
    if share < LEAST:
        return None
    sentence = f"Warming up took {duration(seconds)}, {percent(share)} of the time, because the run is short."
    return Cause(name="compile", share=share, sentence=sentence, is_usual=True)


def recompilation(evidence: Evidence) -> Cause | None:
    """Updates all over the run take many times as long as the others: they compile anew."""
    pace, parts = whole(evidence), evidence.step_parts
    middle, slow = evidence.step_seconds[1:]
    if pace is None or not evidence.started.machine.get("compile") or middle <= 0 or slow < 3 * middle:
        return None
    usual = max(0.0, middle - evidence.wait_seconds[1])
    mean = sum(seconds for name, seconds in parts.items() if name not in ("input", "logging"))
    share = max(0.0, evidence.ledger.share("forward", "backward", "update") * (1 - usual / mean)) if mean > 0 else 0.0
    if share < LEAST:
        return None
    sentence = f"Compiled code is made anew all over the run: {percent(share)} of the time."
    told = (f"an update takes {duration(middle)}, but one in twenty {duration(slow)} or more",)
    return Cause(name="recompile", share=share, sentence=sentence, evidence=told)
