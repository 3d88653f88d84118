"""How many threads compute on a CPU: where a pass is short, few if more gain little.

Threads that work together wait for each other at the end of each operation. Where operations are small that can take
longer than the work itself, and the feed wants a core as well. So passes over drawn images are timed by one thread,
two, four and so on up to one a core, before the first update and without a trace in it. The number changes the order of
sums, and so the last bits of weights: what was measured is kept in the cache, and the same command gives the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from steadytrain.config import Recipe
from steadytrain.machine import facts
from steadytrain.machine.facts import cache_folder
from steadytrain.models import Input
from steadytrain.training.build import image_shape
from steadytrain.training.isolation import put_back, undisturbed
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.transfer import drawn
from steadytrain.training.trial import Trial

SHORT_SECONDS = 0.05
"""Of a pass by one thread. In a longer one the operations are large enough for all of them."""
FEW, FEW_SECONDS = 2, 0.25
"""Images of first passes, and how long one of all images may take, judging by those: no long one is made in vain. The
way forward of a network that is far too long for it tells as much, in a fraction of the time."""
ROUNDS = 5
SLACK = 1.2
"""Of the shortest time: fewer threads that take no longer are better. Passes are timed alone; in a run the feed takes
turns with them, and all threads wait for the one whose turn it is not."""


def use_fastest_threads(
    recipe: Recipe, update: Update, state: State, told: Input, notice: Callable[[str], None]
) -> dict[str, Any]:
    """Compute with the best number of threads from here on; what there is to add to the facts of the machine.

    Args: as :func:`measured_threads` has them; ``notice`` is told where not every core computes.
    """
    seconds = measured_threads(recipe, update, state, told)
    if not seconds:
        return {}
    count, most = best(seconds), max(seconds)
    torch.set_num_threads(count)
    if count < most:
        each = ", ".join(f"{took * 1e3:.2f} ms with {number}" for number, took in seconds.items())
        notice(
            f"compute threads: {count} of {most}: a pass takes {each} (--set parallel.compute_threads={most} for all)"
        )
    return {"compute_threads": count, "threads_seconds": seconds}


def measured_threads(recipe: Recipe, update: Update, state: State, told: Input) -> dict[int, float]:
    """Seconds of a pass by numbers of threads, as measured here once; nothing where there is no choice to make.

    There is none on a GPU, on one core, where the recipe names the number or wants the same bits whatever was measured,
    where a pass is long, and where nothing can be kept.

    Args:
        recipe: as the run has it.
        update: as :func:`.build.update` makes it.
        state: of the run; the same afterwards.
        told: the images.
    """
    folder, most = cache_folder(), torch.get_num_threads()
    free = recipe.parallel.compute_threads is None and not recipe.parallel.deterministic
    if state.engine.device.type != "cpu" or most == 1 or not free or folder is None:
        return {}
    place = folder / "threads" / f"{_digest(recipe, update, state, told)}.json"
    if (known := _read(place)) is not None:
        return known
    size, shape, device = update.share.size, image_shape(told), state.engine.device
    seconds: dict[int, float] = {}
    with undisturbed(device), put_back(state.module):
        torch.set_num_threads(1)  # what threads that wait for each other take tells nothing of the work
        few = Trial(update, state, drawn(min(FEW, size), shape, device))
        if _is_within(FEW_SECONDS * len(few.batch.labels) / size, few):
            seconds = _measure(Trial(update, state, drawn(size, shape, device)), most)
    return seconds if _kept(place, seconds) else {}


def best(seconds: Mapping[int, float]) -> int:
    """The fewest threads that take not much longer than any other number.

    >>> best({1: 1.05, 2: 1.0, 4: 1.3}), best({1: 1.6, 2: 1.0})
    (1, 2)
    """
    least = min(seconds.values())
    return min(count for count, took in seconds.items() if took <= SLACK * least)


def _is_within(limit: float, trial: Trial) -> bool:
    """Whether a pass takes fewer seconds; the way forward alone, where that is too long already."""
    trial.seconds_forward()  # makes things ready, which takes longer than the pass of a small network
    if trial.seconds_forward() >= limit:
        return False
    trial.seconds(trial.update.objective)
    return trial.seconds(trial.update.objective) < limit


def _measure(trial: Trial, most: int) -> dict[int, float]:
    forward = trial.update.objective
    told: dict[int, float] = {}
    for count in _counts(most):
        torch.set_num_threads(count)
        trial.seconds(forward)  # makes things ready
        if not told and trial.seconds(forward) > SHORT_SECONDS:
            return {}
        told[count] = trial.fastest(forward, rounds=ROUNDS)
    return told


def _counts(most: int) -> list[int]:
    """Powers of two, and all.

    >>> _counts(2), _counts(12)
    ([1, 2], [1, 2, 4, 8, 12])
    """
    return sorted({most, *(1 << k for k in range(int(math.log2(most)) + 1))})


def _digest(recipe: Recipe, update: Update, state: State, told: Input) -> str:
    """Of all that a pass is made of, and of the machine."""
    about: dict[str, Any] = {
        "model": recipe.model.name,
        "shapes": [tuple(tensor.shape) for tensor in state.module.state_dict().values()],
        "precision": vars(recipe.precision),
        "batch": (update.share.size, *image_shape(told)),
        "machine": (facts.cpu_model(), torch.get_num_threads(), torch.__version__),
    }
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _read(place: Path) -> dict[int, float] | None:
    try:
        return {int(count): float(took) for count, took in json.loads(place.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return None


def _kept(place: Path, seconds: Mapping[int, float]) -> bool:
    """Whether it could be written, for the next run to find."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(seconds), encoding="utf-8")
    except OSError:
        return False
    return True
