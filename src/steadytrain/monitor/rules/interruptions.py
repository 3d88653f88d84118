"""What interrupts training: starts, restarts, compiling, evaluations, checkpoints, log lines."""

from __future__ import annotations

import math
from collections.abc import Iterator

from steadytrain.format import count, duration, percent
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, clip
from steadytrain.monitor.rules.pace import mean_pace

USUAL_EVALUATION = 0.10  # of the time: what an evaluation after each epoch may well take
WANTED = 0.05  # of the time: what evaluations are to take afterwards
LONGEST_LINE = 0.1  # seconds that a log line may take, on any terminal
USUAL_MINUTES = 5.0  # between two checkpoints
LONG_SECONDS = 5.0  # for making data, model or state ready: that it takes as long is worth a word of its own
STARTING = {"data": "Opening the data", "model": "Building the model", "state": "Preparing the optimizer state"}


def interruptions(evidence: Evidence) -> Iterator[Cause]:
    """Find evaluations, checkpoints and log lines that are too long, or too frequent."""
    ledger, every = evidence.ledger, evidence.recipe.every
    share, (num, seconds) = ledger.share("evaluation"), evidence.evaluations
    if share >= (LEAST if every.evaluate_epochs < 1 else USUAL_EVALUATION):
        often = "each epoch" if every.evaluate_epochs == 1 else f"every {every.evaluate_epochs:g} epochs"
        figures = [f"{count(num, 'evaluation')} of {duration(seconds / max(num, 1))}, one {often}"]
        if num_val := evidence.started.data.get("num_val"):
            figures.append(f"{num_val:,} images each")
        rest = share / (1 - share) if share < 1 else 1e6
        rarer = max(1, math.ceil(every.evaluate_epochs * rest * (1 - WANTED) / WANTED - 1e-9))  # whole epochs
        fewer = max(1, math.floor(num * every.evaluate_epochs / rarer))  # one always ends the run
        is_short = num <= 1 or fewer >= num
        short = f"The evaluation takes {percent(share)} of the time: the run is short, or the validation set is large."
        yield Cause(
            name="evaluation",
            share=share,
            sentence=short if is_short else f"{count(num, 'evaluation')} take {percent(share)} of the time.",
            evidence=tuple(figures),
            change="" if is_short else f"--set every.evaluate_epochs={rarer}",
            saves=0.0 if is_short else share * (1 - fewer / num),
            is_usual=num <= 1,
        )

    share, (num, seconds) = ledger.share("checkpoint"), evidence.checkpoints
    if share >= LEAST:
        each = seconds / max(num, 1)
        minutes = max(USUAL_MINUTES, float(math.ceil(each / (WANTED / 2) / 60)))
        fewer = 1 + math.floor(ledger.wall_seconds * (1 - share) / 60 / minutes)
        is_rare = every.save_minutes is None and every.save_steps is None  # saving bounds its share by itself
        is_short = is_rare or fewer >= num
        often = f", every {count(every.save_steps, 'update')}" if every.save_steps and not is_short else ""
        changes = ["--set every.save_steps=none"] if every.save_steps else []
        if every.save_minutes is not None and (not changes or minutes != every.save_minutes):
            changes.append(f"--set every.save_minutes={minutes:g}")
        why = ", because the run is short" if is_short else ""
        yield Cause(
            name="checkpoint",
            share=share,
            sentence=f"Writing {count(num, 'checkpoint')}{often} takes {percent(share)} of the time{why}.",
            evidence=(f"{count(num, 'checkpoint')} of {duration(each)}",),
            change="" if is_short else " ".join(changes),
            saves=0.0 if is_short else share * (1 - fewer / num),
            is_usual=is_short,
        )

    share, steps, seconds = ledger.share("logging"), max(ledger.steps, 1), ledger.seconds["logging"]
    if share < LEAST:
        return
    update = sum(seconds for name, seconds in evidence.step_parts.items() if name != "logging")
    if every.log_steps > 1 and seconds / steps * every.log_steps > max(LONGEST_LINE, 2 * update):
        # No line takes that long: all updates do.
        yield Cause(
            name="logging",
            share=share,
            sentence=f"Writing the event log takes {percent(share)} of the time: the run's folder is slow.",
            evidence=(f"{duration(seconds / steps)} at each update, even at those without a log line",),
            change="put the run's folder on a local disk: --run FOLDER",
            saves=share,
        )
        return
    each = seconds / max(1.0, ledger.steps / every.log_steps)
    seldom = every.log_steps * 2 ** math.ceil(math.log2(share / (LEAST / 3)))
    yield Cause(
        name="logging",
        share=share,
        sentence=f"Writing log lines and the code that reads the events delay the loop for {percent(share)} of the "
        "time.",
        evidence=(f"a line every {count(every.log_steps, 'update')}, {duration(each)} a line",),
        change=f"--set every.log_steps={seldom}",
        saves=share * (1 - every.log_steps / seldom),
    )


def starts(evidence: Evidence) -> Iterator[Cause]:
    """Find work that was lost when an attempt was killed, and a start that is much of the run."""
    ledger, pace = evidence.ledger, mean_pace(evidence)
    share, seconds = ledger.share("lost"), ledger.seconds["lost"]
    if share >= LEAST:
        num, written = evidence.checkpoints
        each = written / num if num else 1.0
        restarts = max(evidence.attempts - 1, 1)
        # Young's interval (J. W. Young, Comm. ACM 17, 1974, 530-531): what is written and what is lost cost the same.
        apart = math.sqrt(2 * each * ledger.wall_seconds / max(evidence.attempts, 1))
        left = min(1.0, apart * restarts / seconds)  # half of it is lost, and half of it written
        change, saves = "", 0.0
        if left <= 0.9 and pace is not None:
            saves = share * (1 - left)
            change = f"--set every.save_minutes={apart / 60:.0f}"
            if apart < 120:
                change = f"--set every.save_steps={max(1, round(apart / pace.step))}"
        yield Cause(
            name="restart",
            share=share,
            sentence=f"{percent(share)} of the time was lost: work after the last checkpoint before an interruption.",
            evidence=(
                f"{duration(seconds)} were repeated after {count(restarts, 'restart')}",
                f"a checkpoint takes {duration(each)} to write",
            ),
            change=change,
            saves=saves,
        )

    share, seconds = ledger.share("startup"), ledger.seconds["startup"]
    if share < LEAST:
        return
    parts = sorted(evidence.started.startup.items(), key=lambda part: -part[1])
    parts = [(name, spent) for name, spent in parts if name != "compile"]
    figures = tuple(f"{name}: {duration(spent)}" for name, spent in parts)
    name, spent = next((part for part in parts if part[0] != "process"), ("", 0.0))
    part = spent / ledger.wall_seconds
    if spent < LONG_SECONDS or part < LEAST:
        sentence = f"Starting took {duration(seconds)}, {percent(share)} of the time, because the run is short."
        yield Cause(name="startup", share=share, sentence=sentence, evidence=figures, is_usual=True)
    else:
        sentence = f"{STARTING.get(name, name)} took {duration(spent)}, {percent(part)} of the time."
        yield Cause(name="startup", share=clip(part), sentence=sentence, evidence=figures)


def compilation(evidence: Evidence) -> Iterator[Cause]:
    """Find compiled code that earns its time in no run as short as this, or is made anew, and a long warm-up."""
    compiled, started, ledger = evidence.compiled, evidence.started, evidence.ledger
    if compiled is None:
        share, seconds = ledger.share("warmup"), ledger.seconds["warmup"]
        sentence = f"Warming up took {duration(seconds)}, {percent(share)} of the time, because the run is short."
        yield Cause(name="warmup", share=share, sentence=sentence, is_usual=True)
    else:
        wall, images = ledger.wall_seconds, max(0, started.steps - started.step) * started.batch_size
        gain = (compiled.eager_seconds - compiled.compiled_seconds) * images / max(compiled.images, 1)
        if gain < compiled.seconds and wall > 0:
            paid = compiled.images_until_paid
            took = f"Compiling took {duration(compiled.seconds)}, {percent(compiled.seconds / wall)} of the time"
            why = f"pays off after {paid:,} images; this run has {images:,}" if paid else "never pays off"
            with_it, without = duration(compiled.compiled_seconds), duration(compiled.eager_seconds)
            yield Cause(
                name="compile",
                share=clip((compiled.seconds + max(0.0, -gain)) / wall),
                sentence=f"{took}, which {why}.",
                evidence=(f"a pass takes {with_it}, and {without} without it", *compiled.breaks[:3]),
                change="omit --compile (precision.compile=none)",
                saves=clip((compiled.seconds - gain) / wall),
            )

    parts, (_, middle, slow) = evidence.step_parts, evidence.step_seconds
    mean = sum(seconds for name, seconds in parts.items() if name not in ("input", "logging"))
    # Updates all over the run take many times as long as the others.
    if mean_pace(evidence) is None or mean <= 0 or not started.machine.get("compile") or not 0 < 3 * middle <= slow:
        return
    usual = max(0.0, middle - evidence.wait_seconds[1])
    share = max(0.0, ledger.share("forward", "backward", "update") * (1 - usual / mean))
    yield Cause(
        name="recompile",
        share=share,
        sentence=f"The network is recompiled throughout the run: {percent(share)} of the time.",
        evidence=(f"an update takes {duration(middle)}, but one in twenty {duration(slow)} or more",),
    )
