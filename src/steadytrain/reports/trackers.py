"""Send what a run has logged to a tracking service: TensorBoard, MLflow, Weights & Biases, trackio, or one of your own.

Only the run's folder is read, while it trains or afterwards, by a process of its own: a service that hangs or fails
costs the run nothing. What was sent is remembered in the folder (``tracked-NAME.json``): a resumed run continues the
curves that it began.

A package adds a service by an entry point of the group ``steadytrain.trackers``: a callable that takes a
:class:`TrackedRun` and returns a :class:`Tracker`.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from steadytrain.config.factories import load_entry_point
from steadytrain.config.plain import leaves
from steadytrain.errors import FailedError, InputError, SteadyError, did_you_mean, first_line, storage_errors
from steadytrain.events import (
    EpochTrained,
    Evaluated,
    Event,
    Logged,
    LogReader,
    Score,
    Tested,
    open_no_follow,
    refuse_link,
)
from steadytrain.files import lock, lock_at_once
from steadytrain.format import clean
from steadytrain.monitor import diagnose
from steadytrain.run import Run, RunProgress

GROUP = "steadytrain.trackers"
LOOK_SECONDS = 2.0
GRACE_SECONDS = 20.0
"""A process that sends a run may take so long to finish once the one that trains it is gone."""
NICE = 5
"""The training comes first."""
RECORD_BYTES = 400
MOST_SHOWN = 160
"""Characters of what a service says of a failure."""
IDLE_SECONDS = 20.0
"""Seconds for which a run may be nobody's before it counts as ended: a command opens its log before its lock."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a service is given it.

    Attributes:
        project: the name of the folder that holds it, for services that group runs.
        recipe: every setting, by its key, such as ``optim.lr``.
        id: the service's own name for the run, from the time before; empty at first.
        step: the last step that was sent before; -1 at first.
    """

    name: str
    folder: Path
    project: str
    recipe: Mapping[str, Any]
    id: str
    step: int


class Tracker(Protocol):
    """A service that takes what a run logs. Whatever it raises ends the sending, never the training.

    ``id``: the service's own name for the run, to go on with it later.
    """

    id: str

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Take the values of one moment: ``train/loss``, ``val/top1``, ``lr``, ...; ``seconds`` since 1970."""

    def text(self, name: str, text: str) -> None:
        """Take a text: the recipe, or the verdict."""

    def file(self, path: Path) -> None:
        """Take a file: the report, the best weights."""

    def close(self, status: str) -> None:
        """Finish; ``status`` is ``finished``, ``interrupted``, ``preempted``, ``failed`` or ``unknown``."""


class TensorBoard:
    """Writes event files to ``tensorboard/`` in the run's folder; ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = "tensorboard"
        self._proto = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(
            str(run.folder / self.id)
        )
        self._last = run.step

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        if step < self._last:  # hides what a killed attempt had sent beyond
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._writer.add_event(self._proto.Event(step=step, wall_time=seconds, session_log=start))
        self._last = step
        rows = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(self._summary(value=rows), step, seconds)

    def text(self, name: str, text: str) -> None:
        make = import_module("tensorboard.plugins.text.summary_v2").text_pb
        self._add(make(name, f"```\n{text}\n```"), 0, time.time())

    def _add(self, summary: object, step: int, seconds: float) -> None:
        self._writer.add_event(self._proto.Event(step=step, wall_time=seconds, summary=summary))

    def file(self, path: Path) -> None:
        """Leave the file where it is: this service keeps none."""

    def close(self, status: str) -> None:
        self._writer.close()


class MLflow:
    """Sends to the server that ``MLFLOW_TRACKING_URI`` names; without it, to MLflow's usual store on this machine."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing is sent to others; it fails, too
        mlflow = import_module("mlflow")
        self._mlflow = mlflow
        if not run.id:
            mlflow.set_experiment(run.project)
        self.id = mlflow.start_run(run_id=run.id or None, run_name=None if run.id else run.name).info.run_id
        self._parameters = {key: str(value)[:500] for key, value in run.recipe.items()}

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        client = self._mlflow.MlflowClient()
        entity = import_module("mlflow.entities").Metric
        at = int(seconds * 1000)
        client.log_batch(self.id, metrics=[entity(name, value, at, step) for name, value in values.items()])

    def text(self, name: str, text: str) -> None:
        if name == "recipe":  # not at the beginning: what fails here leaves a run that is known by its id
            self._mlflow.log_params(self._parameters)
        self._mlflow.log_text(text, f"{name}.txt")

    def file(self, path: Path) -> None:
        self._mlflow.log_artifact(str(path))

    def close(self, status: str) -> None:
        names = {"finished": "FINISHED", "failed": "FAILED", "unknown": "RUNNING"}
        self._mlflow.end_run(names.get(status, "KILLED"))


class WeightsAndBiases:
    """Sends to Weights & Biases; with ``WANDB_MODE=offline``, writes below ``wandb/`` in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or secrets.token_hex(6)
        self._run = import_module("wandb").init(
            project=run.project, name=run.name, id=self.id, resume="allow", dir=str(run.folder), config=dict(run.recipe)
        )
        for names in ("train/*", "val/*", "speed/*", "lr", "epoch"):  # steps may repeat after a kill
            self._run.define_metric(names, step_metric="update")

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log({**values, "update": step})

    def text(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def file(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class Trackio:
    """Sends to trackio: a local data base, or the Space that its settings name."""

    def __init__(self, run: TrackedRun) -> None:
        self._trackio = import_module("trackio")
        self.id = run.id or run.name
        config = {
            key: value if isinstance(value, int | float | str) else str(value) for key, value in run.recipe.items()
        }
        resume = "allow" if run.id else "never"
        begun = self._trackio.init(project=run.project, name=self.id, resume=resume, config=config)
        self.id = run.id or str(getattr(begun, "name", self.id))  # another one where that was taken

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._trackio.log(dict(values), step=step)

    def text(self, name: str, text: str) -> None:
        self._trackio.log({name: text})

    def file(self, path: Path) -> None:
        """Send the file as an artefact; older versions of the service keep none."""
        if hasattr(self._trackio, "log_artifact"):
            kind = "model" if path.suffix == ".safetensors" else "report"
            self._trackio.log_artifact(path, name=f"{self.id}-{path.stem}", type=kind)

    def close(self, status: str) -> None:
        self._trackio.finish()


Begin = Callable[[TrackedRun], Tracker]
TRACKERS: dict[str, tuple[str, Begin]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WeightsAndBiases),
    "trackio": ("trackio", Trackio),
}
"""Trackers by name: the package that each needs, and what begins it."""


def find_trackers(text: str) -> dict[str, Callable[[], Begin]]:
    """Look up names that stand between commas: ours, and those of other packages' entry points, which come first.

    Returns:
        By name, what loads it. That raises InputError where the package that it needs is missing or broken.

    Raises:
        InputError: an unknown name.

    >>> list(find_trackers("")), list(find_trackers("mlflow, wandb"))
    ([], ['mlflow', 'wandb'])
    >>> find_trackers("comet")
    Traceback (most recent call last):
        ...
    steadytrain.errors.InputError: unknown tracker 'comet': mlflow, tensorboard, trackio or wandb.
    """
    loaders: dict[str, Callable[[], Begin]] = {name: partial(_load_ours, name) for name in TRACKERS}
    loaders |= {
        point.name: partial(load_entry_point, point, cast("type[Begin]", Callable))
        for point in entry_points(group=GROUP)
    }
    known = sorted(loaders)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in loaders:
            choices = f"{', '.join(known[:-1])} or {known[-1]}"
            raise InputError(f"unknown tracker {name!r}: {choices}.{did_you_mean(name, known)}")
    return {name: loaders[name] for name in names}


def _load_ours(name: str) -> Begin:
    package, begin = TRACKERS[name]
    if find_spec(package) is None:
        raise InputError(f"{name} needs the package {package}: pip install {package}")
    return begin


def send(run: Run, names: str, *, follow: bool = False, ended: threading.Event | None = None) -> None:
    """Send a run to services: what was not sent before, and at its end the verdict, the report and the best weights.

    Args:
        run: the run; of several ranks, rank 0's log.
        names: of services, with commas between.
        follow: go on until the run has ended, or until nobody trains it.
        ended: set once the process that trains it has ended; None: it is found out from the run's files.

    Raises:
        InputError: an unknown name, or a package that is not installed.
        FailedError: a service failed; the others were served.
    """
    trackers = find_trackers(names)
    begins = {name: load() for name, load in trackers.items()}
    sendings = [_Sending(run, name) for name in trackers]
    progress = RunProgress()
    with ExitStack() as stack:
        for sending in sendings:
            sending.attempt(lambda each: each.begin(begins[each.name], stack, waits=ended is not None))
        for events in _looks(run, follow, progress, ended):
            for sending in sendings:
                sending.attempt(lambda each, events=events: each.take(events))  # type: ignore[misc]
            if all(sending.failure for sending in sendings):
                break
        for sending in sendings:
            sending.attempt(lambda each: each.close(_status(progress)))
    failures = [f"{sending.name}: {sending.failure}" for sending in sendings if sending.failure]
    if failures:
        again = f"steady report {shlex.quote(str(run.directory))} --to {names} sends the rest"
        raise FailedError(f"not all of {run.directory} was sent ({'; '.join(failures)}): {again}")


def main() -> None:
    """Send a run while the process that started this one trains it (see :mod:`steadytrain.training.loop.tracking`).

    Standard input names the run and the service; at its next line, or its end, the training has ended. Standard output
    gets a line if something failed. What services print is seen by nobody.
    """
    request = json.loads(sys.stdin.readline())
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if hasattr(os, "nice"):
        os.nice(NICE)
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        ended.set()
        sys.stdin.read()  # until the trainer is gone, or has no more patience
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        send(Run.open(request["run"]), request["name"], follow=True, ended=ended)
    except SteadyError as error:
        print(clean(str(error)), file=answer, flush=True)
        os._exit(1)  # a service's own threads may never end
    except Exception as error:  # noqa: BLE001 - at the edge of a process
        print(f"{request['name']}: {clean(first_line(error))}", file=answer, flush=True)
        os._exit(1)
    os._exit(0)


SENT = (Logged, EpochTrained, Evaluated, Tested)
"""Events whose numbers are curves."""


def scalars_of(event: Event) -> dict[str, float]:
    """Return the numbers of an event that are curves; empty for most kinds.

    >>> scalars_of(Evaluated(step=4, epoch=1.0, n=10, loss=0.5, top1=0.9, top5=None, seconds=1.0))
    {'val/loss': 0.5, 'val/top1': 0.9, 'epoch': 1.0}
    """
    values: dict[str, float | None]
    if isinstance(event, Logged):
        values = {"train/loss": event.loss, "train/top1": event.top1, "train/grad_norm": event.grad_norm}
        values |= {"lr": event.lr, "epoch": event.epoch}
        values |= {"speed/images_per_second": event.images_per_second, "speed/wait_share": event.wait_share}
    elif isinstance(event, EpochTrained):
        values = {"train/epoch_loss": event.loss, "train/epoch_top1": event.top1}
        values |= {"speed/epoch_images_per_second": event.images_per_second}
    elif isinstance(event, Score):
        of = "val" if isinstance(event, Evaluated) else "test"
        values = {f"{of}/{name}": getattr(event, name) for name in ("loss", "top1", "top5", "mean_ap")}
        values |= {"epoch": event.epoch}
    else:
        return {}
    return {name: value for name, value in values.items() if value is not None}


class _Sending:
    """A run on its way to one service; ``failure``: why it takes nothing any more; empty while it does."""

    def __init__(self, run: Run, name: str) -> None:
        self.name, self.failure = name, ""
        self._run = run
        self._tracker: Tracker

    def attempt(self, do: Callable[[_Sending], object]) -> None:
        """Do something with the service, unless it has failed; whatever it raises is kept as its failure."""
        if not self.failure:
            try:
                do(self)
            except Exception as error:  # noqa: BLE001
                line, is_ours = first_line(error), isinstance(error, SteadyError)
                self.failure = line if is_ours else textwrap.shorten(line, MOST_SHOWN, placeholder=" ...")

    def begin(self, begin: Begin, stack: ExitStack, *, waits: bool) -> None:
        """Begin, or go on with, the service's own run, while no other process sends this one to it."""
        run, path = self._run, self._run.directory / f"tracked-{self.name}.json"
        folder = run.directory / self.name  # of a service that writes into the run's
        refuse_link(folder, f"remove the link, make one elsewhere that leads here (ln -s {folder} OTHER)")
        with storage_errors(path):
            open_no_follow(path, "ab").close()
            self._file = stack.enter_context(open_no_follow(path, "r+b"))
        if waits:
            lock(self._file)
        elif not lock_at_once(self._file):
            raise FailedError("another process is sending it there now")
        sent = self._sent()
        self._last = self._sent_until = sent.get("time", 0.0)
        self._step = sent.get("step", -1)
        recipe = dict(leaves(run.recipe.to_dict()))
        folder = run.directory.resolve()
        about = TrackedRun(run.name, folder, folder.parent.name or "runs", recipe, sent.get("id", ""), self._step)
        self._tracker = begin(about)
        self._remember()
        if not self._last:
            self._tracker.text("recipe", json.dumps(run.recipe.to_dict(), indent=1))

    def take(self, events: Sequence[Event]) -> None:
        before = self._last
        try:
            for event in events:
                if event.time > self._sent_until and (values := scalars_of(event)):
                    self._tracker.scalars(values, event.step, event.time)  # type: ignore[attr-defined]
                    self._last, self._step = event.time, event.step  # type: ignore[attr-defined]
        finally:
            if self._last != before:
                self._remember()
        self._sent_until = 0.0  # what the next look finds is new

    def close(self, status: str) -> None:
        from steadytrain.reports import report

        with suppress(InputError):  # a run that has not begun
            self._tracker.text("verdict", str(diagnose(self._run)))
        page, best = self._run.directory / "report.html", self._run.directory / "best.safetensors"
        with suppress(InputError):  # the same, or there is something else of that name
            refuse_link(page)
            self._tracker.file(report(self._run, page))
        if best.exists() and not best.is_symlink():  # a link may lead out of the run
            self._tracker.file(best)
        self._tracker.close(status)
        self._remember()

    def _sent(self) -> dict[str, Any]:
        """Return what was sent before; empty where that is unknown or unreadable."""
        with suppress(ValueError, RecursionError, TypeError, LookupError, OverflowError):
            record = json.loads(self._file.read())
            return {"id": str(record["id"]), "time": float(record["time"]), "step": int(record["step"])}
        return {}

    def _remember(self) -> None:
        """Write what was sent, at the same length each time: a kill leaves the one or the other."""
        text = json.dumps({"id": self._tracker.id, "time": self._last, "step": self._step})
        self._file.seek(0)
        self._file.write(f"{text:<{RECORD_BYTES}}\n".encode())


def _looks(run: Run, follow: bool, progress: RunProgress, ended: threading.Event | None) -> Iterator[list[Event]]:
    """Yield the events of a run as they come, which ``progress`` takes in; the last time after it has ended.

    The process that trains it may make several attempts, with a pause between: only ``ended`` says that it is the last.
    """
    reader = LogReader(run.log_path())
    told = ended is not None
    ended = ended or threading.Event()
    idle_since = time.monotonic()
    while True:
        is_last = ended.is_set() or not follow
        is_held = run.is_held()  # before the look: nothing is written after the last one
        events, is_new = list[Event](), False
        for event in reader.read():
            progress.take(event)
            is_new = True
            if isinstance(event, SENT):
                events.append(event)
        yield events
        is_over = progress.started is not None and not progress.is_open
        if is_last or (is_over and not is_held and not is_new and not told):
            return
        if is_held or is_new or told:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > IDLE_SECONDS:
            return
        ended.wait(LOOK_SECONDS)


def _status(progress: RunProgress) -> str:
    """Return how the newest attempt ended, in the words of :meth:`Tracker.close`."""
    if progress.failed is not None:
        return "failed"
    return "unknown" if progress.ended is None else progress.ended.status
