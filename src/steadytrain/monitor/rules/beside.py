"""What interrupts training: evaluations, checkpoints, log lines. All of it can be done less often."""

from __future__ import annotations

import math

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST, Cause, duration, percent, some

USUAL_EVALUATION = 0.10
"""Of the time: what an evaluation after each epoch may well take."""

WANTED = 0.05
"""Of the time: what evaluations are to take afterwards."""

LONGEST_LINE = 0.1
"""Seconds that a log line may take, on any terminal."""

USUAL_MINUTES = 5.0
"""Between two checkpoints."""


def evaluation(evidence: Evidence) -> Cause | None:
    """Evaluations are too long, or too frequent."""
    share, (count, seconds) = evidence.ledger.share("evaluation"), evidence.evaluations
    every = evidence.recipe.every.evaluate_epochs
    if share < (LEAST if every < 1 else USUAL_EVALUATION):
        return None
    told = [f"{some(count, 'evaluation')} of {duration(seconds / max(count, 1))}, one {_often(every)}"]
    if evidence.started.data.get("num_val"):
        told.append(f"{evidence.started.data['num_val']:,} images each")
    apart = _rarer(every, share)
    fewer = max(1, math.floor(count * every / apart))  # one always ends the run
    if count <= 1 or fewer >= count:
        sentence = f"The evaluation takes {percent(share)} of the time: the run is short, or the validation set large."
        return Cause(name="evaluation", share=share, sentence=sentence, evidence=tuple(told), is_usual=count <= 1)
    sentence = f"{some(count, 'evaluation')} take {percent(share)} of the time."
    return Cause(
        name="evaluation",
        share=share,
        sentence=sentence,
        evidence=tuple(told),
        change=f"--set every.evaluate_epochs={apart:g}",
        saves=share * (1 - fewer / count),
    )


def checkpoint(evidence: Evidence) -> Cause | None:
    """Checkpoints are too long, or too frequent."""
    share, (count, seconds) = evidence.ledger.share("checkpoint"), evidence.checkpoints
    if share < LEAST:
        return None
    every, wall = evidence.recipe.every, evidence.ledger.wall_seconds
    each = seconds / max(count, 1)
    minutes = max(USUAL_MINUTES, float(math.ceil(each / (WANTED / 2) / 60)))
    fewer = 1 + math.floor(wall * (1 - share) / 60 / minutes)
    told = (f"{some(count, 'checkpoint')} of {duration(each)}",)
    if fewer >= count:
        sentence = f"Writing {some(count, 'checkpoint')} takes {percent(share)} of the time, because the run is short."
        return Cause(name="checkpoint", share=share, sentence=sentence, evidence=told, is_usual=True)
    often = f", every {some(every.save_steps, 'update')}" if every.save_steps else ""
    sentence = f"Writing {some(count, 'checkpoint')}{often} takes {percent(share)} of the time."
    changes = ["--set every.save_steps=none"] if every.save_steps else []
    if not changes or minutes != every.save_minutes:
        changes.append(f"--set every.save_minutes={minutes:g}")
    return Cause(
        name="checkpoint",
        share=share,
        sentence=sentence,
        evidence=told,
        change=" ".join(changes),
        saves=share * (1 - fewer / count),
    )


def logging(evidence: Evidence) -> Cause | None:
    """Log lines, or whoever reads them, hold the loop up."""
    share, every = evidence.ledger.share("logging"), evidence.recipe.every.log_steps
    if share < LEAST:
        return None
    if _at_each_update(evidence):
        each = evidence.ledger.seconds["logging"] / max(evidence.ledger.steps, 1)
        told = (f"{duration(each)} at each update, also at those without a line",)
        sentence = f"Writing down what happens takes {percent(share)} of the time: the run's folder is slow."
        change = "put the run into a folder on a disk of this machine: --run FOLDER"
        return Cause(name="logging", share=share, sentence=sentence, evidence=told, change=change, saves=share)
    lines = max(1.0, evidence.ledger.steps / every)
    each = evidence.ledger.seconds["logging"] / lines
    rarer = every * 2 ** math.ceil(math.log2(share / (LEAST / 3)))
    sentence = f"Log lines, and whoever takes them, hold the loop up for {percent(share)} of the time."
    told = (f"a line each {some(every, 'update')}, {duration(each)} a line",)
    return Cause(
        name="logging",
        share=share,
        sentence=sentence,
        evidence=told,
        change=f"--set every.log_steps={rarer}",
        saves=share * (1 - every / rarer),
    )


def _often(epochs: float) -> str:
    """How often that is.

    >>> _often(1.0), _often(3.0), _often(0.05)
    ('each epoch', 'every 3 epochs', 'every 0.05 epochs')
    """
    return "each epoch" if epochs == 1 else f"every {epochs:g} epochs"


def _at_each_update(evidence: Evidence) -> bool:
    """Whether it is each update that is held up, and not those alone that end with a line: no line takes that long."""
    every, steps = evidence.recipe.every.log_steps, max(evidence.ledger.steps, 1)
    update = sum(seconds for name, seconds in evidence.step_parts.items() if name != "logging")
    return every > 1 and evidence.ledger.seconds["logging"] / steps * every > max(LONGEST_LINE, 2 * update)


def _rarer(every: float, share: float) -> float:
    """Epochs between two evaluations so that they take a twentieth of the time; whole ones.

    >>> _rarer(1.0, 0.3), _rarer(0.1, 0.9), _rarer(1.0, 0.12)
    (9.0, 18.0, 3.0)
    """
    rest = share / (1 - share) if share < 1 else 1e6
    return float(max(1, math.ceil(every * rest * (1 - WANTED) / WANTED - 1e-9)))
