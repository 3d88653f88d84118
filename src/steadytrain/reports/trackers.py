"""Send what a run has logged to a tracking service: TensorBoard, MLflow, Weights & Biases, trackio, or one of your own.

Only the run's folder is read, while it trains or afterwards, by a process of its own: a service that hangs or fails
costs the run nothing. What was sent is remembered in the folder (``tracked.json``), so that a resumed run continues the
curves that it began.

A package adds a service by an entry point of the group ``steadytrain.trackers``: a callable that takes a
:class:`TrackedRun` and returns a :class:`Tracker`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from steadytrain.config.plain import leaves
from steadytrain.errors import FailedError, InputError, did_you_mean, first_line
from steadytrain.events import EpochTrained, Evaluated, Event, Logged, LogReader
from steadytrain.files import replace_file
from steadytrain.monitor import diagnose
from steadytrain.run import Run, RunProgress

GROUP = "steadytrain.trackers"
LOOK_SECONDS = 2.0
IDLE_SECONDS = 20.0
"""So long a run may be nobody's before it counts as ended: a command that begins opens its log before its lock."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a service is given it.

    Attributes:
        name: the run's name.
        folder: its folder.
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

    Attributes:
        id: the service's own name for the run, to go on with it later.
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
        mlflow = import_module("mlflow")
        self._mlflow = mlflow
        if not run.id:
            mlflow.set_experiment(run.project)
        begun = mlflow.start_run(run_id=run.id or None, run_name=None if run.id else run.name)
        self.id = begun.info.run_id
        if not run.id:
            values = {key: str(value)[:500] for key, value in run.recipe.items()}
            mlflow.log_params(values)

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        client = self._mlflow.MlflowClient()
        entity = import_module("mlflow.entities").Metric
        at = int(seconds * 1000)
        client.log_batch(self.id, metrics=[entity(name, value, at, step) for name, value in values.items()])

    def text(self, name: str, text: str) -> None:
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
        """Leave the file where it is."""

    def close(self, status: str) -> None:
        self._trackio.finish()


TRACKERS: dict[str, tuple[str, Callable[[TrackedRun], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WeightsAndBiases),
    "trackio": ("trackio", Trackio),
}
"""By name: the package that it needs, and what begins it."""


def parse_trackers(text: str) -> tuple[str, ...]:
    """Read names that stand between commas.

    Raises:
        InputError: an unknown name, or a package that is not installed.

    >>> parse_trackers("")
    ()
    >>> parse_trackers("comet")
    Traceback (most recent call last):
        ...
    steadytrain.errors.InputError: unknown tracker 'comet': mlflow, tensorboard, trackio or wandb.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    others = {point.name for point in entry_points(group=GROUP)}
    known = sorted(TRACKERS.keys() | others)
    for name in names:
        if name not in known:
            choices = f"{', '.join(known[:-1])} or {known[-1]}"
            raise InputError(f"unknown tracker {name!r}: {choices}.{did_you_mean(name, known)}")
        if name not in others and find_spec(package := TRACKERS[name][0]) is None:
            raise InputError(f"{name} needs the package {package}: pip install {package}")
    return names


def send(run: Run, names: Sequence[str], *, follow: bool = False) -> None:
    """Send a run to services: what was not sent before, and at its end the verdict, the report and the best weights.

    Args:
        run: the run; of several ranks, rank 0's log.
        names: of services.
        follow: go on until the run has ended, or until nobody trains it.

    Raises:
        InputError: an unknown name, or a package that is not installed.
        FailedError: a service failed; the others were served.
    """
    failures = list[str]()
    sendings = dict[str, _Sending]()
    for name in parse_trackers(",".join(names)):
        try:
            sendings[name] = _Sending(run, name)
        except Exception as error:  # noqa: BLE001
            failures.append(f"{name}: {first_line(error)}")
    progress = RunProgress()
    for events in _looks(run, follow, progress):
        for name, sending in list(sendings.items()):
            try:
                sending.take(events)
            except Exception as error:  # noqa: BLE001
                failures.append(f"{name}: {first_line(error)}")
                del sendings[name]
    for name, sending in sendings.items():
        try:
            sending.close(_status(progress))
        except Exception as error:  # noqa: BLE001
            failures.append(f"{name}: {first_line(error)}")
    if failures:
        raise FailedError(f"not all of {run.directory} was sent ({'; '.join(failures)}): steady report sends the rest")


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
    elif isinstance(event, Evaluated):
        values = {"val/loss": event.loss, "val/top1": event.top1, "val/top5": event.top5, "val/mean_ap": event.mean_ap}
        values |= {"epoch": event.epoch}
    else:
        return {}
    return {name: value for name, value in values.items() if value is not None}


class _Sending:
    """A run on its way to one service."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name
        self._sent = _sent(run).get(name, {})
        self._last = self._sent_until = float(self._sent.get("time", 0.0))
        self._step = int(self._sent.get("step", -1))
        recipe = dict(leaves(run.recipe.to_dict()))
        folder = run.directory.resolve()
        about = TrackedRun(run.name, folder, folder.parent.name, recipe, str(self._sent.get("id", "")), self._step)
        own = {point.name: point for point in entry_points(group=GROUP)}
        begin = own[name].load() if name in own else TRACKERS[name][1]
        self._tracker: Tracker = begin(about)
        if not self._sent:
            self._tracker.text("recipe", json.dumps(run.recipe.to_dict(), indent=1))

    def take(self, events: Sequence[Event]) -> None:
        before = self._last
        for event in events:
            if event.time > self._sent_until and (values := scalars_of(event)):
                self._tracker.scalars(values, event.step, event.time)  # type: ignore[attr-defined]
                self._last, self._step = event.time, event.step  # type: ignore[attr-defined]
        self._sent_until = 0.0  # what the next look finds is new
        if self._last != before:
            self._remember()

    def close(self, status: str) -> None:
        from steadytrain.reports import report

        self._tracker.text("verdict", str(diagnose(self._run)))
        with suppress(InputError):  # a run that has not begun
            self._tracker.file(report(self._run, self._run.directory / "report.html"))
        if (best := self._run.directory / "best.safetensors").exists():
            self._tracker.file(best)
        self._tracker.close(status)
        self._remember()

    def _remember(self) -> None:
        sent = _sent(self._run) | {self._name: {"id": self._tracker.id, "time": self._last, "step": self._step}}
        replace_file(self._run.directory / "tracked.json", json.dumps(sent, indent=1))


def _sent(run: Run) -> dict[str, dict[str, Any]]:
    """Return what was sent before, by service; empty where that is unknown or unreadable."""
    with suppress(OSError, ValueError):
        found = json.loads((run.directory / "tracked.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {name: value for name, value in found.items() if isinstance(value, dict)}
    return {}


def _looks(run: Run, follow: bool, progress: RunProgress) -> Iterator[list[Event]]:
    """Yield the events of a run as they come, which ``progress`` takes in; the last time after it has ended."""
    reader = LogReader(run.log_path(), condensed=True)
    idle_since = time.monotonic()
    while True:
        is_held = run.is_held()  # before the look: nothing is written after the last one
        events = list(reader.read())
        for event in events:
            progress.take(event)
        yield events
        is_over = progress.started is not None and not progress.is_open
        if not follow or (is_over and not is_held and not events):
            return
        if is_held or events:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > IDLE_SECONDS:
            return
        time.sleep(LOOK_SECONDS)


def _status(progress: RunProgress) -> str:
    """Return how the newest attempt ended, in the words of :meth:`Tracker.close`."""
    if progress.failed is not None:
        return "failed"
    return "unknown" if progress.ended is None else progress.ended.status
