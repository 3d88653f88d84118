"""Files that a run keeps on the disk: checkpoints and weights, written in a thread; when the next one is due."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeVar

from torch import Tensor

from steadytrain.cost.bill import BillPart, merge_parts, part_of
from steadytrain.distributed.engine import Engine
from steadytrain.events import Saved, Started
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.writer import Writer

T = TypeVar("T")


class Saver:
    """Writes checkpoints and weights of one attempt. Where ranks have parts of them, each has its own saver send them.

    Args:
        run: into whose folder.
        writer: copies and writes.
        started: the attempt's first event, with its number.
        earlier: what the attempts before used.
        began: when this one did, by ``time.perf_counter()``.
        engine: has the tensors.

    Attributes:
        seconds: until the last checkpoint was on the disk.
        is_hurried: the next one is wanted at once, by this rank.
    """

    def __init__(
        self,
        run: Run,
        writer: Writer[Saved | None],
        started: Started,
        earlier: Sequence[BillPart],
        began: float,
        engine: Engine,
    ) -> None:
        self._run, self._writer, self._engine = run, writer, engine
        self._started, self._earlier, self._began = started, earlier, began
        self._saved = time.monotonic()  # when the last one was asked for
        self._costs: list[float] = []  # what each took from training
        self._cost = 0.0  # their median, which every update asks for
        self.seconds = 0.0
        self.is_hurried = False

    def is_due(self, *, evaluated: bool = False) -> bool:
        """Return whether a checkpoint is due by time.

        What one costs is the median of those written so far: a disk that was busy once does not put the next one off.
        The first evaluation is always saved, and tells what a checkpoint costs. Where the last one is still being
        written, no other is due, but after an evaluation.
        """
        due = self._run.recipe.every.seconds_between_saves(self._cost, evaluated=evaluated)
        return time.monotonic() - self._saved >= due and (evaluated or not self._writer.is_writing("checkpoint"))

    def hurry(self) -> None:
        """Have the next checkpoint be due at once."""
        self._saved, self.is_hurried = -math.inf, True

    def spent(self) -> list[BillPart]:
        """Return what all attempts used up to now, this one included."""
        return merge_parts(self._earlier, [part_of(self._started, seconds=time.perf_counter() - self._began)])

    def save(self, step: int, state: Mapping[str, Any], began: float) -> None:
        """Have a checkpoint written, for which training has paused since ``began``; its copies are made at once."""
        spent = {"spent": json.dumps([part.to_dict() for part in self.spent()])}
        plain, live = checkpoints.split({**state, "about": {**state["about"], **spent}})
        place, keep = self._run.checkpoints, self._run.recipe.every.keep
        save = self._stage("checkpoint", live, partial(checkpoints.save, place, step, plain, keep=keep))
        paused, now = time.perf_counter() - began, time.time()

        def write() -> Saved | None:
            cpu_began = time.thread_time()
            if (written := save()) is None:
                return None
            return Saved(
                step=step,
                path=str(written.path.relative_to(self._run.directory)),
                bytes=written.bytes,
                seconds=time.perf_counter() - began,
                paused_seconds=paused,
                cpu_seconds=time.thread_time() - cpu_began,
                began=now - paused,
            )

        self._writer.submit("checkpoint", write)
        self._saved = time.monotonic()

    def export(self, name: str, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Have weights written into the run's folder, with what their users need; they are copied at once."""
        write = partial(checkpoints.write_weights, self._run.directory / name, about=about)
        self._writer.submit("weights", self._stage("weights", weights, write))

    def _stage(self, kind: str, live: Mapping[str, Tensor], write: Callable[..., T]) -> Callable[[], T | None]:
        """Copy tensors at once; return what the thread is to do: call ``write``, or send this rank's parts of them."""
        parts = self._engine.parts(live)
        if parts is None:
            return partial(write, tensors=self._writer.stage(kind, live))
        copies = self._writer.stage(kind, parts.own)
        if not self._engine.world.is_first:
            return partial(parts.send, copies)
        return partial(write, tensors=parts.whole, pieces=partial(parts.pieces, copies))

    def wait(self) -> None:
        """Wait until all is written."""
        self._writer.wait()

    def written(self) -> Iterator[Saved]:
        """Yield an event for each checkpoint that is on the disk since the last call.

        Raises:
            StorageError: one, or weights, could not be written.
        """
        for saved in self._writer.results():
            if saved is not None:
                self._costs.append(saved.cost)
                self._cost, self.seconds = median(self._costs), saved.seconds
                yield saved
