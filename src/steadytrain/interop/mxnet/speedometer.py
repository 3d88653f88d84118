"""Write the events of a run as MXNet's training scripts wrote their log, for tools that read such logs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from steadytrain.events import EpochTrained, Evaluated, Event, Logged, Saved, Started


class Speedometer:
    """Format events as MXNet 1.9.1's ``Speedometer`` and ``fit`` did.

    As there, epochs count from 0, ``Batch [20-40]`` names the updates of the epoch since the line before, an epoch has
    one line of validation, and its time cost is that of its updates alone.

    >>> log = Speedometer()
    >>> event = Logged(time=0, step=20, epoch=0.2, loss=2.0, top1=0.25, lr=0.1, images_per_second=99, wait_share=0)
    >>> list(log.lines(event))
    ['Epoch[0] Batch [0-20]\\tSpeed: 99.00 samples/sec\\taccuracy=0.250000\\tcross-entropy=2.000000']
    """

    def __init__(self) -> None:
        self._steps, self._steps_per_epoch = 0, 0.0  # of the whole run
        self._epoch = self._batch = 0  # where the line before ended
        self._validated = 0  # epochs that have a line of validation
        self._progress: Callable[[float], float] = float  # updates, as batches of the first size

    def lines(self, event: Event) -> Iterator[str]:
        """Yield the lines of one event, without the time and the node before them."""
        match event:
            case Started():
                self._steps_per_epoch, self._steps = event.steps_per_epoch, event.steps
                self._progress = event.batches.progress
            case Logged():
                epoch = max(0, int(event.epoch - 1e-9))
                batch = event.step - int(epoch * self._steps_per_epoch)
                first = self._batch if epoch == self._epoch and self._batch < batch else 0
                self._epoch, self._batch = epoch, batch
                yield (
                    f"Epoch[{epoch}] Batch [{first}-{batch}]\tSpeed: {event.images_per_second:.2f} samples/sec"
                    f"\taccuracy={event.top1:f}\tcross-entropy={event.loss:f}"
                )
            case EpochTrained() if self._epochs(event.step) >= event.epoch and event.n:  # no epoch that is cut short
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

    def stamped(self, event: Event) -> Iterator[str]:
        """Yield the lines of one event behind its time and the node, as the scripts' ``logging`` wrote them."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        for line in self.lines(event):
            yield f"{stamp},{int(event.time % 1 * 1000):03d} Node[0] {line}"

    def _epochs(self, step: int) -> int:
        """Return how many epochs are over after an update. The run's last update ends its epoch, complete or not."""
        progress = self._progress(max(0, step - 1) if (is_last := step >= self._steps) else step)
        return is_last + math.floor(progress / self._steps_per_epoch + 1e-9)
