"""Code made for a run's network on its machine, before the first update: what it takes, and what it gains.

What is compiled (``torch.compile``) is the objective: images to numbers, the network, the loss, and the way back. That
is tried on drawn images, with passes that leave no trace, and timed beside torch's own kernels: so the run begins with
code that is ready, knows what it gains, and does without where it cannot be made. Shapes never change: each micro-batch
has as many images as the first. Code is kept in the cache for the next attempt, and for other runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from steadytrain.config import Recipe
from steadytrain.distributed.process_group import Group
from steadytrain.errors import first_line
from steadytrain.events import Compiled
from steadytrain.machine.facts import cache_folder
from steadytrain.models import Input
from steadytrain.training.build import image_shape
from steadytrain.training.isolation import put_back, undisturbed
from steadytrain.training.loss import Forward
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.transfer import drawn
from steadytrain.training.trial import Trial

SETTLING = {"cpu": 1, "cuda": 4}
"""Passes until compiled code runs at its own speed: on a GPU, graphs of its kernels are recorded in the first ones."""

_PLUMBING = (str(Path(torch.__file__).parent), contextlib.__file__, str(Path(__file__).parent))


def compiled(
    recipe: Recipe,
    update: Update,
    state: State,
    told: Input,
    group: Group | None,
    notice: Callable[[str], None],
) -> tuple[Update, Compiled | None]:
    """The update by compiled code; as it was, and None, where any rank cannot compile: ``notice`` is told why.

    Args:
        recipe: which mode.
        update: as :func:`.build.update` makes it.
        state: of the run; the same afterwards.
        told: the images.
        group: the ranks, each of which calls this.
    """
    with undisturbed(state.engine.device), put_back(state.module), _code_kept():
        trial = Trial(update, state, drawn(update.share.size, image_shape(told), state.engine.device))
        made = _tried(trial, recipe.precision.compile)
    refused = made if isinstance(made, str) else ""
    for rank, reason in enumerate([refused] if group is None else group.all_gather_json(refused)):
        if reason:
            where = "" if group is None else f" on rank {rank} ({group.hosts[rank]})"
            notice(f"the network cannot be compiled{where} ({reason}): training goes on without")
            return update, None
    assert not isinstance(made, str)
    forward, event = made
    return replace(update, forward=forward), event


def _tried(trial: Trial, mode: str) -> tuple[Forward, Compiled] | str:
    """Compiled code and what there is to tell of it; where there is none, the reason."""
    eager, state = trial.update.objective, trial.state
    trial.seconds(eager)
    usual = trial.fastest(eager)
    before = _graphs(), len(_breaks())
    try:
        forward: Forward = torch.compile(eager.__call__, mode=mode, dynamic=False)
        settling = SETTLING[state.engine.device.type]
        first = sum(trial.seconds(forward) for _ in range(settling))
        fastest = trial.fastest(forward)
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise
        return _reason(error)
    return forward, Compiled(
        step=state.cursor.step,
        mode=mode,
        seconds=max(0.0, first - settling * fastest),
        graphs=_graphs() - before[0],
        breaks=tuple(dict.fromkeys(_breaks()[before[1] :])),
        images=len(trial.batch.labels) * state.engine.world.size,
        eager_seconds=usual,
        compiled_seconds=fastest,
    )


@contextlib.contextmanager
def _code_kept() -> Iterator[None]:
    """Meanwhile, compiled code is written where all that can be made again is, unless the user has said otherwise.

    Torch itself sets the variable, to its own default, when it first looks for it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds, which only this needs

    folder, name = cache_folder(), "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    if folder is None or before not in (None, default_cache_dir()):
        yield
        return
    os.environ[name] = str(folder / "compiled")
    try:
        yield
    finally:
        os.environ[name] = before or default_cache_dir()


def _graphs() -> int:
    """Pieces of code that this process has compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _breaks() -> list[str]:
    """Where Python came between them, and the reason: the innermost line that is neither torch's nor Python's own."""
    told = []
    for reason in torch._dynamo.utils.graph_break_reasons:
        places = [(frame.filename, frame.lineno) for frame in reason.user_stack]
        place = next((place for place in reversed(places) if not place[0].startswith(_PLUMBING)), None)
        if place is not None:  # the wrapper by which ranks exchange gradients is never compiled
            told.append(f"{_short(place[0])}:{place[1]}: {reason.reason.strip().partition(chr(10))[0]}")
    return told


def _short(file: str) -> str:
    here = Path.cwd()
    return str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else file


def _reason(error: BaseException) -> str:
    """What lies behind the compiler's own wrappings of an error."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return first_line(error)
