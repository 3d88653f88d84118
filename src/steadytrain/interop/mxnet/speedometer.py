"""Events of a run as the log of MXNet's training scripts, for the tools that read those."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from steadytrain.events import EpochTrained, Evaluated, Event, Logged, Saved, Started


class Speedometer:
    """Format events as MXNet 1.9.1's ``Speedometer`` and ``fit`` did.

    Epochs count from 0. ``Batch [20-40]`` are the updates of the epoch that the figures are of. An epoch has one
    validation, and the time cost of its updates alone, as there.

    >>> log = Speedometer()
    >>> event = Logged(time=0, step=20, epoch=0.2, loss=2.0, top1=0.25, lr=0.1, images_per_second=99, wait_share=0)
    >>> list(log.lines(event))
    ['Epoch[0] Batch [0-20]\\tSpeed: 99.00 samples/sec\\taccuracy=0.250000\\tcross-entropy=2.000000']
    """

    def __init__(self) -> None:
        self._per_epoch, self._batch, self._epoch = 0.0, 0, 0
        self._steps = self._validated = 0
        self._progress: Callable[[float], float] = float

    def lines(self, event: Event) -> Iterator[str]:
        """Yield the lines of one event, without the time and the node before them."""
        match event:
            case Started():
                self._per_epoch, self._steps = event.steps_per_epoch, event.steps
                self._progress = event.batches.progress
            case Logged():
                epoch = max(0, int(event.epoch - 1e-9))
                batch = event.step - int(epoch * self._per_epoch)
                first = self._batch if epoch == self._epoch and self._batch < batch else 0
                self._epoch, self._batch = epoch, batch
                yield (
                    f"Epoch[{epoch}] Batch [{first}-{batch}]\tSpeed: {event.images_per_second:.2f} samples/sec"
                    f"\taccuracy={event.top1:f}\tcross-entropy={event.loss:f}"
                )
            case EpochTrained() if self._epochs(event.step) >= event.epoch and event.n:  # not before an interruption
                yield f"Epoch[{event.epoch - 1}] Train-accuracy={event.top1:f}"
                yield f"Epoch[{event.epoch - 1}] Train-cross-entropy={event.loss:f}"
                yield f"Epoch[{event.epoch - 1}] Time cost={event.n / (event.images_per_second or math.inf):.3f}"
            case Saved():
                yield f'Saved checkpoint to "{event.path}"'
            case Evaluated() if (epochs := self._epochs(event.step)) > self._validated:
                self._validated, epoch = epochs, epochs - 1
                yield f"Epoch[{epoch}] Validation-accuracy={event.top1:f}"
                if event.top5 is not None:
                    yield f"Epoch[{epoch}] Validation-top_k_accuracy_5={event.top5:f}"
                yield f"Epoch[{epoch}] Validation-cross-entropy={event.loss:f}"

    def _epochs(self, step: int) -> int:
        """Return the epochs that have ended after an update, which belongs to the one of its first image."""
        if step >= self._steps:
            return 1 + math.floor(self._progress(max(0, step - 1)) / self._per_epoch + 1e-9)
        return math.floor(self._progress(step) / self._per_epoch + 1e-9)

    def stamped(self, event: Event) -> Iterator[str]:
        """Yield them as ``logging`` wrote them: with the event's time."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        for line in self.lines(event):
            yield f"{stamp},{int(event.time % 1 * 1000):03d} Node[0] {line}"
