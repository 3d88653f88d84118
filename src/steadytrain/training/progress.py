"""The display of a call from Python while it trains: a line that is written over, and a row for each evaluation."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO

from steadytrain.config import Recipe
from steadytrain.config.calls import in_python
from steadytrain.events import Ended, Evaluated, Event, Logged, Noticed, ProbeProgress, Started, Step, Tested
from steadytrain.format import duration, epoch, percent, rate, score_name
from steadytrain.monitor.history import RunScore


def wants_progress(progress: bool | None) -> TextIO | None:
    """Return where progress is written: in a notebook its cell, in a terminal standard error, else nowhere.

    Args:
        progress: as a user gave it; None: only where somebody looks on.
    """
    in_notebook = "ipykernel" in sys.modules
    if progress is None:
        progress = in_notebook or (sys.stderr is not None and sys.stderr.isatty())
    return (sys.stdout if in_notebook else sys.stderr) if progress else None


def show_progress(events: Iterable[Event], recipe: Recipe, out: TextIO) -> Iterator[Event]:
    """Yield events, and write on ``out`` how far training is: a row for each evaluation, and what was noticed."""
    began, steps, first, num_train, width, drawn = time.monotonic(), 0, 0, 0, 0, 0.0
    newest: Logged | None = None

    def write(text: str, *, stays: bool) -> None:
        nonlocal width
        text = text if stays else text[: shutil.get_terminal_size().columns - 1]
        out.write(f"\r{text.ljust(width)}" + ("\n" if stays else ""))
        out.flush()
        width = 0 if stays else len(text)

    def bar(step: int, reached: float, images_per_second: float) -> None:
        nonlocal drawn
        drawn, done = time.monotonic(), step - first
        left = (drawn - began) / done * (steps - step) if done > 0 else math.nan
        parts = [f"epoch {epoch(reached)}", percent(step / steps if steps else None, 0)]
        parts += [] if newest is None else [f"loss {newest.loss:.4f}"]
        parts += [f"{rate(images_per_second)} images/s"]
        parts += [f"{duration(left)} left"] if math.isfinite(left) else []
        write("  ".join(parts), stays=False)

    write("starting", stays=False)
    try:
        for event in events:
            if isinstance(event, Started):
                steps, first, began = event.steps, event.step, time.monotonic()
                classes, num_train = event.data.get("classes") or (), event.data.get("num_train", 0)
                images = f"{num_train:,} images in {len(classes):,} classes"
                write(f"{recipe.model.name}, {images}: {f'{steps:,} updates' if steps else 'a probe'}", stays=True)
            elif isinstance(event, ProbeProgress):
                write(event.bar[1], stays=False)
            elif isinstance(event, Logged):
                newest = event
                bar(event.step, event.epoch, event.images_per_second)
            elif isinstance(event, Step):  # a line of the log may be a minute away
                if num_train and event.seconds > 0 and time.monotonic() - drawn >= 0.5:
                    speed = event.n / event.seconds if newest is None else newest.images_per_second
                    bar(event.step, event.position / num_train, speed)
            elif isinstance(event, Evaluated):
                parts = [f"epoch {epoch(event.epoch)}" if event.step else "probe"]
                parts += [f"loss {newest.loss:.4f}"] if newest is not None else []
                name = score_name(event.mean_ap is not None)
                parts += [f"validation loss {event.loss:.4f}", f"{name} {percent(event.score, 1)}"]
                write("  ".join(parts), stays=True)
            elif isinstance(event, Tested):
                name, figures = score_name(event.mean_ap is not None), RunScore.of(event).words
                write(f"test, {event.seen}: {name} {figures}", stays=True)
            elif isinstance(event, Noticed):
                write(in_python(event.message), stays=True)
            elif isinstance(event, Ended):
                write(f"{event.words} after {duration(event.seconds)}", stays=True)
            yield event
    finally:
        if width:  # what was waited for, also where an error ends it
            out.write(f"\r{' ' * width}\r")
            out.flush()
