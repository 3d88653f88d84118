"""Log files of NVIDIA's DeepLearningExamples: lines of ``DLLL`` and a JSON object (``dllogger.JSONStreamBackend``).

>>> reader = DLLoggerLines()
>>> for line in ('DLLL {"type": "LOG", "step": [0, 99], "data": {"train.loss": 6.5, "train.total_ips": 800.0}}',
...              'DLLL {"type": "LOG", "step": [0], "data": {"train.loss": 6.9, "val.top1": 12.5, "val.top5": 30.0}}'):
...     _ = reader.take(line)
>>> [run] = reader.runs()
>>> run.epochs[0].mean("val", "top1"), run.points[0].images_per_second
(0.125, 800.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from steadytrain.interop.logs.run import MAX_EPOCH, MAX_STEPS_PER_EPOCH, NAN, LogPoint, LogRun
from steadytrain.interop.logs.settings import add_setting, first_number, fraction, parse_json, plain_number

FORMAT = "NVIDIA DLLogger"
LOSS = ("train.loss", "loss", "train_loss", "total_loss")
TOP1 = ("train.top1", "top1", "train_top1")
RATE = ("train.total_ips", "train.compute_ips", "total_ips", "train_throughput", "throughput", "images/s", "samples/s")
VAL = {
    "loss": ("val.loss", "val_loss", "validation_loss"),
    "top1": ("val.top1", "val_top1", "val.acc", "accuracy", "val_accuracy"),
    "top5": ("val.top5", "val_top5"),
}


class DLLoggerLines:
    """Parser of lines of DLLogger into runs."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._runs = [LogRun(FORMAT)]
        self._scores: list[float] = []
        self._position = (-1, -1)

    def take(self, line: str) -> bool:
        """Parse a line; return False if it is none of DLLogger's."""
        _, mark, text = line.partition("DLLL ")
        if not mark:
            return False
        document = parse_json(text)
        data = document.get("data") if isinstance(document, dict) else None
        if not isinstance(data, dict):
            return isinstance(document, dict) and document.get("type") == "METADATA"
        self.num_lines += 1
        step = document.get("step")
        if step == "PARAMETER":
            if self._runs[-1].epochs:
                self._runs.append(LogRun(FORMAT))
                self._position = (-1, -1)
            for name, value in data.items():
                add_setting(self._runs[-1], name, value)
        elif isinstance(step, list | int) and not isinstance(step, bool):
            self._take_step(step if isinstance(step, list) else [step], data, plain_number(document.get("timestamp")))
        return True

    def _take_step(self, step: list[Any], data: Mapping[str, Any], time: float) -> None:
        places = [place for place in step[:2] if isinstance(place, int) and not isinstance(place, bool)]
        if len(places) < min(2, len(step)) or not places or not 0 <= places[0] <= MAX_EPOCH:
            return  # the summary at the end, or none of ours
        epoch, batch = places[0], places[1] if len(places) > 1 else -1
        if epoch < self._position[0] and epoch <= min(self._runs[-1].epochs, default=0):
            self._runs.append(LogRun(FORMAT))
        run = self._runs[-1]
        self._position = (epoch, batch)
        facts = run.epoch(epoch)
        run.note_time(time)
        loss, top1, rate, lr = (first_number(data, names) for names in (LOSS, TOP1, RATE, ("train.lr", "lr")))
        if len(step) > 2:  # a batch of the validation
            return
        top1 = self._score(top1)
        if not 0 <= batch < MAX_STEPS_PER_EPOCH:  # the whole epoch
            facts.train |= {name: [value] for name, value in (("loss", loss), ("top1", top1)) if math.isfinite(value)}
            values = {name: first_number(data, words) for name, words in VAL.items()}
            stated = {name: value for name, value in values.items() if math.isfinite(value)}
            facts.val |= {name: [value if name == "loss" else self._score(value)] for name, value in stated.items()}
            facts.evaluated = time if stated else facts.evaluated
            facts.ended = time if math.isnan(facts.ended) else facts.ended
            return
        if math.isfinite(loss) or math.isfinite(rate):
            wait, seconds = first_number(data, ("train.data_time",)), first_number(data, ("train.compute_time",))
            share = wait / (wait + seconds) if wait >= 0 and seconds > 0 else NAN
            run.add_point(LogPoint(epoch, batch + 1, loss, top1, lr, rate if rate > 0 else NAN, share, time))
            facts.ended = time

    def _score(self, value: float) -> float:
        self._scores.append(value)
        return value

    def runs(self) -> list[LogRun]:
        """Return the runs of the file, each with an epoch at least; accuracies above 1 are percents."""
        percents = any(score > 1 for score in self._scores)
        runs = [run for run in self._runs if run.epochs]
        for run in runs:
            for facts in run.epochs.values():
                for part in (facts.train, facts.val):
                    for name in part.keys() & {"top1", "top5"}:
                        part[name] = [fraction(value, percents=percents) for value in part[name]]
            for point in run.points:
                point.top1 = fraction(point.top1, percents=percents)
        return runs
