"""One update of a run, made again: the same weights, the same images, the same draws; and where it is not finite.

The run itself is read only. A copy of its recipe and of the newest checkpoint before the update is trained forward, as
:func:`.attempt.attempts` always does, which gives the same bits as the run had. The update is then computed with a look
at the output of every layer.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from steadytrain.data.loader import Batch
from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.errors import DivergedError, InputError, RunError, storage_errors
from steadytrain.events import Ended, Event, Step, refuse_link
from steadytrain.files import create
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.data import load
from steadytrain.training.loop.attempt import attempts
from steadytrain.training.loop.updates import Events
from steadytrain.training.session.opening import open_session
from steadytrain.training.session.session import Session, set_phase

NEVER = 1e9
FOLDER = "replay"
"""The folder below a run that :func:`replay` writes."""


class ReplayStoppedError(RunError):
    """Somebody asked to stop before the update was found."""


@dataclass(frozen=True, kw_only=True)
class ReplayedUpdate:
    """An update computed again: its images, its loss and its gradients.

    Args:
        step: its number, from 1.
        loss: of its batch, before the optimizer changes a weight.
        lr: the learning rate.
        ids: of its samples: records of the training data.
        names: of these, in words.
        positions: where they stand in the stream.
        labels: a class each, or the labels or mixed shares.
        layer: the first whose output was not finite; ``loss`` where only that was; empty where all were.
        samples: which of the batch that output was not finite for; empty where it was for all or none.
        gradients: parameters whose gradients were not finite, nearest to the loss first, where the loss was.
        images: the files of the images as the network saw them.
    """

    step: int
    loss: float
    lr: float
    ids: tuple[int, ...]
    names: tuple[str, ...]
    positions: tuple[int, ...]
    labels: tuple[Any, ...]
    layer: str
    samples: tuple[int, ...]
    gradients: tuple[str, ...]
    images: tuple[str, ...]

    @property
    def is_finite(self) -> bool:
        """Return whether loss and gradients were finite."""
        return math.isfinite(self.loss) and not self.layer and not self.gradients

    @property
    def words(self) -> str:
        """Word in one line what was not finite, and for which images."""
        if self.is_finite:
            return f"update {self.step}: the loss is {self.loss:.6g}, and it and all gradients are finite"
        if not self.layer:
            first = f"update {self.step}: the loss is {self.loss:.6g}, and gradients are not finite, first of"
            return f"{first} {self.gradients[0]}; images {_listed(self.ids)}"
        where = "the loss" if self.layer == "loss" else f"the output of layer {self.layer}"
        blamed = [f"{self.ids[i]} ({self.names[i]})" for i in self.samples]
        which = f"for {_listed(blamed)}" if blamed else f"for all images of the batch: {_listed(self.ids)}"
        return f"update {self.step}: first not finite: {where}, {which}"


def _listed(values: Any, most: int = 4) -> str:
    values = list(values)
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def replay(
    run: Run | str | Path,
    step: int | None = None,
    *,
    output: str | Path | None = None,
    allow_import: bool | None = None,
    say: Callable[[str], None] = lambda message: None,
    stop: Callable[[], str | None] = lambda: None,
    since: float | None = None,
) -> ReplayedUpdate:
    """Compute an update of a run again, in this process, and save its images and what it was made of.

    Args:
        run: one of ours, which may still train.
        step: the update, from 1; None: the first after the newest checkpoint that is not finite.
        output: a folder; None: ``replay/step-N`` in the run's.
        allow_import: as of :func:`~steadytrain.training.steps`.
        say: takes a line about what is done.
        stop: as of :func:`~steadytrain.training.steps`.
        since: as of :func:`.attempt.attempts`.

    Raises:
        InputError: the run has no such update, or is asynchronous.
        RunError: no update was found that is not finite, or an earlier one is not.
        ReplayStoppedError: it was stopped.
        SteadyError: data or checkpoint cannot be used.
    """
    run = Run.open(run)
    if run.recipe.parallel.engine == "async":
        raise InputError(
            f"{run.directory}: the batches of asynchronous workers depend on their speed: none is replayed"
        )
    if step is not None and step < 1:
        raise InputError(f"--step is {step}; updates are counted from 1")
    if output is None:
        refuse_link(run.directory / FOLDER)
    if words := run.outside_notice():
        say(words)
    train = partial(attempts, allow_import=allow_import, since=since)
    number = _first_not_finite(run, train, say, stop) if step is None else step
    try:
        return _replay(run, number, output, train, say, stop, allow_import)
    except DivergedError as error:
        if step is not None:
            raise RunError(f"an update before {step} is not finite already ({error}): leave out --step") from error
    # It left weights that made the next loss not finite.
    return _replay(run, number - 1, output, train, say, stop, allow_import)


def _first_not_finite(
    run: Run, train: Callable[..., Events], say: Callable[[str], None], stop: Callable[[], str | None]
) -> int:
    """Return the first update after the newest checkpoint whose loss is not finite."""
    with _copy_of(run, math.inf, {"every.log_steps": 1}) as (copy, begin):
        say(f"looking for the first update after {begin} that is not finite")
        last = begin
        try:
            for event in train(copy, stop=stop):
                last = event.step if isinstance(event, Step) else last
            _require_end(event)
        except DivergedError:
            return last
    finite = f"every update of {run.directory} after {begin} is finite: name one by --step"
    raise RunError(finite if last else f"{run.directory} has no update to replay: it is a probe")


def _require_end(event: Event) -> None:
    """Raise ReplayStoppedError for the last event of a copy that was stopped before its end."""
    if isinstance(event, Ended) and event.status != "finished":
        raise ReplayStoppedError(f"stopped at update {event.step}, before it was found")


@contextmanager
def _copy_of(run: Run, before: float, changes: dict[str, object]) -> Iterator[tuple[Run, int]]:
    """Copy recipe and newest intact checkpoint of up to ``before`` updates to a folder that is removed afterwards."""
    quiet: dict[str, object] = {"every.save_minutes": NEVER, "every.save_steps": None, "every.stall_minutes": None}
    quiet |= {"every.upload": None, "every.track": None}
    if not run.recipe.waits_for_evaluations:  # otherwise no weight depends on them
        quiet["every.evaluate_epochs"] = NEVER
    run.refuse_links()
    with scratch_beside(run.directory / FOLDER) as folder:
        saved = (
            place for place in reversed(checkpoints.saved(run.checkpoints)) if checkpoints.step_of(place) <= before
        )
        place = next((place for place in saved if checkpoints.damage(place) is None), None)
        if place is None and run.recipe.model.batch_norm != "synchronous":  # as many micro-batches as its ranks made
            started = run.progress().started
            parts = None if started is None else started.machine.get("micro_batches")
            quiet |= {"optim.accumulate": parts} if parts else {}
        copy = Run.create(folder / "run", run.recipe.with_(quiet | changes))
        if place is not None:
            with storage_errors(folder):
                shutil.copytree(place, copy.checkpoints / place.name)
        yield copy, 0 if place is None else checkpoints.step_of(place)


def _replay(
    run: Run,
    step: int,
    output: str | Path | None,
    train: Callable[..., Events],
    say: Callable[[str], None],
    asked: Callable[[], str | None],
    allow_import: bool | None,
) -> ReplayedUpdate:
    """Train a copy to the update before, and compute this one."""
    with _copy_of(run, step - 1, {}) as (copy, begin):
        if begin < step - 1:
            say(f"training from update {begin} to {step - 1}, as the run did")
            at = begin

            def stop() -> str | None:
                return "SIGTERM" if at >= step - 1 else asked()

            for event in train(copy, stop=stop):
                at = event.step if isinstance(event, Step) else at
            if at < step - 1:
                _require_end(event)
                raise InputError(f"--step is {step}; {run.directory} ends with update {at}")
        with copy.log() as log, open_session(copy, log, allow_import=allow_import) as session:
            if step > session.timeline.steps:
                raise InputError(f"--step is {step}; {run.directory} has {session.timeline.steps} updates")
            folder = run.directory / FOLDER / f"step-{step:08d}" if output is None else Path(output)
            if output is None:
                refuse_link(folder)
            return _compute(session, step, folder)


def _compute(session: Session, step: int, folder: Path) -> ReplayedUpdate:
    """Compute the next update of a session up to its gradients."""
    state, update = session.state, session.update
    if step - 1 in session.phase_steps:
        epoch = state.cursor.position / session.data.num_train
        set_phase(session.recipe, session.built, session.first_epochs, epoch)
    lr = session.lr(step - 1)
    size = session.timeline.batches.size(step - 1) // session.timeline.batches.stages[0].images
    parts: list[Batch] = list(itertools.islice(session.feed, size))
    loaded = [*load(parts, state.engine.device, ahead=False)]
    images, labels = (torch.cat([getattr(part, name) for part in loaded]) for name in ("images", "labels"))
    positions = np.concatenate([part.positions for part in parts])
    if update.augmentation is not None:
        images, labels = update.augmentation(images, labels, positions)
    count = update.share.count * update.share.times(len(labels))
    losses, watch = [], _LayerWatch(state.module, len(labels) // count)
    state.optimizer.zero_grad(set_to_none=True)
    with watch.looking():
        for number, (some, right) in enumerate(zip(images.chunk(count), labels.chunk(count), strict=True)):
            watch.first = number * (len(labels) // count)
            loss, _ = update.objective.passes(state.module, some, right)
            losses.append(loss.detach())
            (loss / count).backward()  # type: ignore[no-untyped-call]
    mean = float(torch.stack(losses).mean())
    layer = watch.layer or ("" if math.isfinite(mean) else "loss")
    bad = [name for name, p in state.module.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    ids = tuple(int(number) for part in parts for number in part.ids)
    replayed = ReplayedUpdate(
        step=step,
        loss=mean,
        lr=lr,
        ids=ids,
        names=tuple(session.data.train.describe(number) for number in ids),
        positions=tuple(positions.tolist()),
        labels=tuple(labels.tolist()),
        layer=layer,
        samples=() if len(watch.samples) in (0, len(ids)) else tuple(watch.samples),
        gradients=() if layer else tuple(reversed(bad)),
        images=tuple(f"{place:04d}-{number}.png" for place, number in enumerate(ids)),
    )
    _write(replayed, images, folder)
    return replayed


class _LayerWatch:
    """Looks at the output of each layer for the first that is not finite; waits for the device each time."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.layer, self.samples = "", list[int]()
        self.first = 0  # of the micro-batch, in the batch
        self._module, self._size = module, size

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look within the block."""
        leaves = [(name, part) for name, part in self._module.named_modules() if not any(part.children())]
        handles = [part.register_forward_hook(self._hook(name or type(part).__name__)) for name, part in leaves]
        handles.append(self._module.register_forward_hook(self._hook("the network's last")))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(part: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.is_floating_point() or self.layer not in ("", name):
                return
            if not output.isfinite().all():
                self.layer = name
                rows = output.shape[0] if output.dim() else 0
                if rows == self._size:  # each image has a row of it
                    bad = (~output.isfinite()).flatten(1).any(1) if output.dim() > 1 else ~output.isfinite()
                    self.samples += [self.first + int(row) for row in bad.nonzero().flatten()]

        return look


def _write(update: ReplayedUpdate, images_BHWC: Tensor, folder: Path) -> None:
    """Save images as the network saw them, and what is known of them."""
    pixels = images_BHWC.detach().round().clamp(0, 255).to(torch.uint8).cpu().numpy()
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in zip(update.images, pixels, strict=True):
            with create(folder / name) as file:  # a link of that name is not followed
                Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
        text = json.dumps(asdict(update) | {"loss": update.loss if math.isfinite(update.loss) else str(update.loss)})
        with create(folder / "batch.json") as file:
            file.write(f"{text}\n".encode("utf-8", "backslashreplace"))
