"""A run to its end: attempt after attempt, and what becomes of one whose numbers are not finite any more."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.config import Recipe
from steadytrain.config.foreign import instead_in_python
from steadytrain.distributed.peers import Peers
from steadytrain.distributed.process_group import Group, ranks_of
from steadytrain.errors import DivergedError, InputError, SteadyError
from steadytrain.events import Evaluated, Event, Logged, Started, Tested
from steadytrain.format import RowTable
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.data import OpenedData
from steadytrain.training.loop.attempt import attempts
from steadytrain.training.loop.replay import ReplayStoppedError, replay
from steadytrain.training.loop.steering import OnEvent
from steadytrain.training.loop.tracking import tracking
from steadytrain.training.progress import show_progress, wants_progress

LONGEST_SECONDS = 600.0
"""The most seconds of training since the newest checkpoint that are repeated without asking, to find what was not
finite.
"""

MOST_REMEDIES = 5
"""Updates of a run that are left out, or from which on its rate is halved, by itself."""

_DOES = {
    "skip": "leaving that update out",
    "slower": "halving the learning rate from there on",
    "fp32": "computing in fp32 from there on",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt: ``status`` (finished, interrupted, preempted), updates done, last evaluation, run.

    ``tested``: the evaluation of the best weights on test images, which no choice has seen; None without any.
    """

    status: str
    step: int
    evaluated: Evaluated | None
    run: Run = field(repr=False)
    tested: Tested | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = "" if name.startswith("_") else instead_in_python(name, dir(self))
            raise AttributeError(f"a result has no attribute {name!r}{hint}", name=name, obj=self)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the best weights, as of :class:`.Evaluation`; of test images as ``test_top1``."""
        best = self.run.progress().best or self.evaluated
        values = {} if best is None else _figures(best)
        return values | ({} if self.tested is None else {f"test_{k}": v for k, v in _figures(self.tested).items()})

    @property
    def history(self) -> RowTable:
        """A row for each evaluation: ``epoch``, ``step``, the training loss before it, and its figures."""
        rows, loss = RowTable(), None
        for event in self.run.events():
            if isinstance(event, Started):  # at a checkpoint: what came after it is done again
                rows = RowTable(row for row in rows if row["step"] <= event.step)
            elif isinstance(event, Logged):
                loss = event.loss
            elif isinstance(event, Evaluated):
                rows = RowTable(row for row in rows if row["step"] != event.step)
                rows.append({"epoch": event.epoch, "step": event.step, "train_loss": loss, **_figures(event)})
        return rows


def _figures(score: Evaluated | Tested) -> dict[str, float]:
    names = ("n", "loss", "top1", "top5", "mean_ap", "macro_recall", "macro_f1")
    return {name: value for name in names if (value := getattr(score, name)) is not None}


def train_opened(
    run: Run,
    *,
    allow_import: bool | None = None,
    progress: bool | None = None,
    opened: OpenedData | None = None,
    on_event: OnEvent | None = None,
) -> Outcome:
    """Train a run to its end, on data that the caller may have open, and return how it came out."""
    events: Iterable[Event] = run_steps(run, allow_import=allow_import, opened=opened, on_event=on_event)
    if (out := wants_progress(progress)) is not None:
        events = show_progress(events, run.recipe, out)
    for _ in events:
        pass
    now = run.progress()
    assert now.ended is not None, "run_steps() returned without an Ended event"
    return Outcome(now.ended.status, now.ended.step, now.evaluated, run.as_decided(), now.tested)


def repeat(
    recipe: Recipe,
    number: int = 5,
    /,
    *,
    run: str | Path,
    allow_import: bool | None = None,
    progress: bool | None = None,
) -> tuple[Outcome, ...]:
    """Train a recipe with several seeds, one run after another, and return how each came out.

    What a seed decides: initial weights, order, augmentation and, without validation data, which images are held out.
    The same call resumes: finished runs are left as they are. ``st.report(run, "report.html")`` shows all of them and
    the mean with its 95 % interval; :func:`steadytrain.reports.spread` computes those of any figure.

    Args:
        recipe: with the first seed.
        number: of seeds, from 2 to 1000.
        run: the folder of the runs, which are called ``seed-0``, ``seed-1``, ...
        allow_import, progress: as of :func:`~steadytrain.train`.

    Raises:
        SteadyError: as of :meth:`Run.create_repeats` and :func:`~steadytrain.train`.
    """
    runs = Run.create_repeats(run, recipe, number)
    outcomes = list[Outcome]()
    for repeat in runs:
        outcomes.append(train_opened(repeat, allow_import=allow_import, progress=progress))
        if outcomes[-1].status != "finished":  # the others would begin on a machine that goes
            break
    return tuple(outcomes)


def run_steps(
    run: Run | str | Path,
    *,
    stop: Callable[[], str | None] = lambda: None,
    allow_import: bool | None = None,
    began: float | None = None,
    probe: bool = False,
    group: Peers | None = None,
    opened: OpenedData | None = None,
    explains: bool = False,
    say: Callable[[str], None] = lambda message: None,
    on_event: OnEvent | None = None,
) -> Iterator[Event]:
    """Take a run from where it stands to its end, yielding each event, as :func:`steadytrain.steps` does.

    Args:
        run, stop, allow_import, say: as there.
        began: when the attempt began, by ``time.perf_counter()``; what was done since is start-up. None: now.
        probe: measure first how fast the loader, the updates and both can be, which changes nothing of the run.
        group: the processes that train it together, each of which calls this; None: this process is alone.
        opened: the data, if the caller has them open already, who closes them afterwards.
        explains: find out for the DivergedError of a run that stops which images it was; that takes time.
        on_event: is called with each event, and may decide (:mod:`.steering`); in one process.
    """
    run, ranks = Run.open(run), ranks_of(group)
    if on_event is not None and group is not None:
        raise InputError("on_event decides in one process, and several train this run")
    since = time.time() - (0.0 if began is None else time.perf_counter() - began)
    with tracking(run, is_first=group is None or group.world.is_first) as begin_tracking:
        while True:
            try:
                yield from attempts(
                    run,
                    stop=stop,
                    allow_import=allow_import,
                    began=began,
                    since=since,
                    probe=probe,
                    group=group,
                    opened=opened,
                    on_locked=begin_tracking,
                    on_event=on_event,
                )
            except DivergedError as error:
                if group is not ranks or (run.recipe.every.nonfinite == "stop" and not explains):
                    raise
                problem = error.with_traceback(None)  # which holds the session, and so the memory of its device
            else:
                return

            run = run if group else run.as_decided()
            hear = stop if ranks is None else (lambda ranks=ranks: stop() or ranks.heartbeat.stop)
            explain = partial(_explained, run, problem, allow_import, say, hear, since)
            find = partial(_remedied, run, problem, explain, say)
            run = find() if ranks is None else _agreed(run, find, problem, ranks)
            began, probe = None, False


def _agreed(run: Run, find: Callable[[], Run], problem: DivergedError, group: Group) -> Run:
    """Let the first rank find a remedy, and return the run with it on every rank.

    Raises:
        DivergedError: on all ranks, there is none.
    """
    if run.recipe.every.nonfinite == "stop":
        command = f"steady replay {shlex.quote(str(run.directory))}"
        raise DivergedError(f"{problem}; {command} finds the update, the layer and the images")
    answer: tuple[str, dict[str, tuple[int, ...]]] = "", {}
    if group.world.is_first:
        try:
            every = find().recipe.every
            answer = "", {f"every.{name}": getattr(every, name) for name in _DOES}
        except DivergedError as error:
            answer = str(error), {}
    message, changes = group.all_gather_json(answer)[0]
    if message:
        raise DivergedError(message)
    return Run(run.directory, run.recipe.with_(changes))


def _remedied(
    run: Run, error: DivergedError, explain: Callable[[], tuple[int | None, str]], say: Callable[[str], None]
) -> Run:
    """Return a run that is not finite any more with the remedy of its recipe, to go on from its newest checkpoint.

    As it is, if somebody asks to stop: the next attempt hears it, and is to have the same chance. ``explain`` finds the
    update that was not finite first, and says so in a line.

    Raises:
        DivergedError: it is to stop, or has no remedy left; with the update, the layer and the images, which are saved.
    """
    every, name = run.recipe.every, run.recipe.every.nonfinite
    try:
        step, why = explain()
    except ReplayStoppedError as stopped:
        if name == "stop":
            raise DivergedError(f"{error}; which images it was is not known ({stopped})") from None
        return run
    command = f"steady resume {shlex.quote(str(run.directory))}"
    if name == "stop" or (step is None and name != "fp32"):
        updates = ",".join(map(str, (*every.skip, step)))
        advice = "" if step is None else f"; {command} --set every.skip=[{updates}] leaves that update out"
        raise DivergedError(f"{why}{advice}")
    before: tuple[int, ...] = getattr(every, name)
    saved = checkpoints.newest(run.checkpoints, say) if name == "fp32" else None
    first = step
    if name == "fp32":
        done = 0 if saved is None else checkpoints.step_of(saved)
        if run.recipe.after(done).precision.name == "fp32":
            raise DivergedError(f"{why}; every.nonfinite=fp32 has no remedy: it is computed in fp32 already")
        first = done + 1
    elif step in before or len(before) >= MOST_REMEDIES:
        raise DivergedError(f"{why}; every.nonfinite={name} has done what it can (every.{name} is {list(before)})")
    say(f"{why}; going on from the newest checkpoint, {_DOES[name]} (every.{name})")
    return Run.create(run.directory, run.recipe.with_({f"every.{name}": (*before, first)}))


def _explained(
    run: Run,
    error: DivergedError,
    allow_import: bool | None,
    say: Callable[[str], None],
    stop: Callable[[], str | None],
    since: float,
) -> tuple[int | None, str]:
    """Return the update that was not finite first, and a line with its layer and images, which are saved.

    None where it is not known; the line says how to find it.
    """
    command = f"steady replay {shlex.quote(str(run.directory))}"
    newest = max((path.stat().st_mtime for path in run.checkpoints.glob("step-*")), default=None)
    progress = run.progress()
    began = newest or (progress.started.time if progress.started else 0.0)
    if time.time() - began > LONGEST_SECONDS:
        return None, f"{error}; {command} finds the update, the layer and the images"
    try:
        replayed = replay(run, allow_import=allow_import, say=say, stop=stop, since=since)
    except ReplayStoppedError:
        raise
    except SteadyError as other:
        return None, f"{error}; which images it was is not known ({other})"
    return replayed.step, f"{error}; {replayed.words}; its images: {run.directory}/replay/step-{replayed.step:08d}"
