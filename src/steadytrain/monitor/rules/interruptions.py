"""What interrupts training: starts, restarts, compiling, evaluations, checkpoints, log lines."""

from __future__ import annotations

import math

from steadytrain.format import count, duration, percent
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, clip
from steadytrain.monitor.rules.pace import mean_pace

USUAL_EVALUATION = 0.10
"""Of the time: what an evaluation after each epoch may well take."""

WANTED = 0.05
"""Of the time: what evaluations are to take afterwards."""

LONGEST_LINE = 0.1
"""Seconds that a log line may take, on any terminal."""

USUAL_MINUTES = 5.0
"""Between two checkpoints."""

LONG_SECONDS = 5.0
"""For making data, model or state ready: that it takes as long is worth a word of its own."""

STARTING = {"data": "Opening the data", "model": "Making the model", "state": "Making what an update needs"}


def evaluation(evidence: Evidence) -> Cause | None:
    """Find evaluations that are too long, or too frequent."""
    share, (num, seconds) = evidence.ledger.share("evaluation"), evidence.evaluations
    every = evidence.recipe.every.evaluate_epochs
    if share < (LEAST if every < 1 else USUAL_EVALUATION):
        return None
    often = "each epoch" if every == 1 else f"every {every:g} epochs"
    figures = [f"{count(num, 'evaluation')} of {duration(seconds / max(num, 1))}, one {often}"]
    if num_val := evidence.started.data.get("num_val"):
        figures.append(f"{num_val:,} images each")
    rarer = _rarer(every, share)
    fewer = max(1, math.floor(num * every / rarer))  # one always ends the run
    if num <= 1 or fewer >= num:
        sentence = f"The evaluation takes {percent(share)} of the time: the run is short, or the validation set large."
        return Cause(name="evaluation", share=share, sentence=sentence, evidence=tuple(figures), is_usual=num <= 1)
    return Cause(
        name="evaluation",
        share=share,
        sentence=f"{count(num, 'evaluation')} take {percent(share)} of the time.",
        evidence=tuple(figures),
        change=f"--set every.evaluate_epochs={rarer:g}",
        saves=share * (1 - fewer / num),
    )


def _rarer(every: float, share: float) -> float:
    """Return the epochs between two evaluations so that they take a twentieth of the time; whole ones.

    >>> _rarer(1.0, 0.3), _rarer(0.1, 0.9), _rarer(1.0, 0.12)
    (9.0, 18.0, 3.0)
    """
    rest = share / (1 - share) if share < 1 else 1e6
    return float(max(1, math.ceil(every * rest * (1 - WANTED) / WANTED - 1e-9)))


def checkpoint(evidence: Evidence) -> Cause | None:
    """Find checkpoints that are too long, or too frequent."""
    share, (num, seconds) = evidence.ledger.share("checkpoint"), evidence.checkpoints
    if share < LEAST:
        return None
    every, each = evidence.recipe.every, seconds / max(num, 1)
    minutes = max(USUAL_MINUTES, float(math.ceil(each / (WANTED / 2) / 60)))
    fewer = 1 + math.floor(evidence.ledger.wall_seconds * (1 - share) / 60 / minutes)
    figures = (f"{count(num, 'checkpoint')} of {duration(each)}",)
    if fewer >= num:
        sentence = f"Writing {count(num, 'checkpoint')} takes {percent(share)} of the time, because the run is short."
        return Cause(name="checkpoint", share=share, sentence=sentence, evidence=figures, is_usual=True)
    often = f", every {count(every.save_steps, 'update')}" if every.save_steps else ""
    changes = ["--set every.save_steps=none"] if every.save_steps else []
    if not changes or minutes != every.save_minutes:
        changes.append(f"--set every.save_minutes={minutes:g}")
    return Cause(
        name="checkpoint",
        share=share,
        sentence=f"Writing {count(num, 'checkpoint')}{often} takes {percent(share)} of the time.",
        evidence=figures,
        change=" ".join(changes),
        saves=share * (1 - fewer / num),
    )


def logging(evidence: Evidence) -> Cause | None:
    """Find log lines, or readers of them, that hold the loop up."""
    share, every = evidence.ledger.share("logging"), evidence.recipe.every.log_steps
    if share < LEAST:
        return None
    steps, seconds = max(evidence.ledger.steps, 1), evidence.ledger.seconds["logging"]
    update = sum(seconds for name, seconds in evidence.step_parts.items() if name != "logging")
    if every > 1 and seconds / steps * every > max(LONGEST_LINE, 2 * update):  # no line takes that long: all updates do
        return Cause(
            name="logging",
            share=share,
            sentence=f"Writing down what happens takes {percent(share)} of the time: the run's folder is slow.",
            evidence=(f"{duration(seconds / steps)} at each update, also at those without a line",),
            change="put the run into a folder on a disk of this machine: --run FOLDER",
            saves=share,
        )
    each = seconds / max(1.0, evidence.ledger.steps / every)
    rarer = every * 2 ** math.ceil(math.log2(share / (LEAST / 3)))
    return Cause(
        name="logging",
        share=share,
        sentence=f"Log lines, and whoever takes them, hold the loop up for {percent(share)} of the time.",
        evidence=(f"a line each {count(every, 'update')}, {duration(each)} a line",),
        change=f"--set every.log_steps={rarer}",
        saves=share * (1 - every / rarer),
    )


def restart(evidence: Evidence) -> Cause | None:
    """Find work done since the last checkpoint that was lost when an attempt was killed."""
    share, seconds = evidence.ledger.share("lost"), evidence.ledger.seconds["lost"]
    if share < LEAST:
        return None
    num, written = evidence.checkpoints
    each = written / num if num else 1.0
    restarts = max(evidence.attempts - 1, 1)
    # Young's interval (J. W. Young, Comm. ACM 17, 1974, 530-531): what is written and what is lost cost the same.
    apart = math.sqrt(2 * each * evidence.ledger.wall_seconds / max(evidence.attempts, 1))
    left = min(1.0, apart * restarts / seconds)  # half of it is lost, and half of it written
    pace, change, saves = mean_pace(evidence), "", 0.0
    if left <= 0.9 and pace is not None:
        saves = share * (1 - left)
        change = f"--set every.save_minutes={apart / 60:.0f}"
        if apart < 120:
            change = f"--set every.save_steps={max(1, round(apart / pace.step))}"
    return Cause(
        name="restart",
        share=share,
        sentence=f"{percent(share)} of the time was lost: done after the last checkpoint before an attempt was ended.",
        evidence=(
            f"{duration(seconds)} were done again after {count(restarts, 'restart')}",
            f"a checkpoint takes {duration(each)} to write",
        ),
        change=change,
        saves=saves,
    )


def startup(evidence: Evidence) -> Cause | None:
    """Find a start that is much of the run, as in every short run."""
    share, seconds = evidence.ledger.share("startup"), evidence.ledger.seconds["startup"]
    if share < LEAST:
        return None
    parts = sorted(evidence.started.startup.items(), key=lambda part: -part[1])
    parts = [(name, spent) for name, spent in parts if name != "compile"]
    figures = tuple(f"{name}: {duration(spent)}" for name, spent in parts)
    name, spent = next((part for part in parts if part[0] != "process"), ("", 0.0))
    part = spent / evidence.ledger.wall_seconds
    if spent < LONG_SECONDS or part < LEAST:
        sentence = f"Starting took {duration(seconds)}, {percent(share)} of the time, because the run is short."
        return Cause(name="startup", share=share, sentence=sentence, evidence=figures, is_usual=True)
    sentence = f"{STARTING.get(name, name)} took {duration(spent)}, {percent(part)} of the time."
    return Cause(name="startup", share=clip(part), sentence=sentence, evidence=figures)


def compilation(evidence: Evidence) -> Cause | None:
    """Find compiled code that earns its time in no run as short as this, or never, and a long warm-up."""
    compiled, started, wall = evidence.compiled, evidence.started, evidence.ledger.wall_seconds
    if compiled is None:
        share, seconds = evidence.ledger.share("warmup"), evidence.ledger.seconds["warmup"]
        sentence = f"Warming up took {duration(seconds)}, {percent(share)} of the time, because the run is short."
        return None if share < LEAST else Cause(name="compile", share=share, sentence=sentence, is_usual=True)
    images = max(0, started.steps - started.step) * started.batch_size
    gain = (compiled.eager_seconds - compiled.compiled_seconds) * images / max(compiled.images, 1)
    share = clip((compiled.seconds + max(0.0, -gain)) / wall)
    if share < LEAST or gain >= compiled.seconds:
        return None
    paid = compiled.images_until_paid
    took = f"Compiling took {duration(compiled.seconds)}, {percent(compiled.seconds / wall)} of the time"
    why = "is never earned again" if paid is None else f"is earned after {paid:,} images; this run has {images:,}"
    passes = f"a pass takes {duration(compiled.compiled_seconds)}, and {duration(compiled.eager_seconds)} without it"
    return Cause(
        name="compile",
        share=share,
        sentence=f"{took}, which {why}.",
        evidence=(passes, *compiled.breaks[:3]),
        change="leave --compile out (precision.compile=none)",
        saves=clip((compiled.seconds - gain) / wall),
    )


def recompilation(evidence: Evidence) -> Cause | None:
    """Find updates all over the run that take many times as long as the others: they compile anew."""
    parts, (_, middle, slow) = evidence.step_parts, evidence.step_seconds
    if mean_pace(evidence) is None or not evidence.started.machine.get("compile") or not 0 < 3 * middle <= slow:
        return None
    usual = max(0.0, middle - evidence.wait_seconds[1])
    mean = sum(seconds for name, seconds in parts.items() if name not in ("input", "logging"))
    share = max(0.0, evidence.ledger.share("forward", "backward", "update") * (1 - usual / mean)) if mean > 0 else 0.0
    if share < LEAST:
        return None
    return Cause(
        name="recompile",
        share=share,
        sentence=f"Compiled code is made anew all over the run: {percent(share)} of the time.",
        evidence=(f"an update takes {duration(middle)}, but one in twenty {duration(slow)} or more",),
    )
