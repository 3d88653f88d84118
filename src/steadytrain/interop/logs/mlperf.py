"""Logs of MLPerf's training benchmarks: ``:::MLPv0.5.0 resnet TIME (file) KEY: VALUE``, in 0.6 ``:::MLL TIME KEY:
{...}``, since 0.7 ``:::MLLOG {...}``.

>>> reader = MLPerfLines()
>>> for line in (":::MLPv0.5.0 resnet 100.5 (train.py:49) train_epoch: 0",
...              ':::MLPv0.5.0 resnet 220.5 (train.py:49) eval_accuracy: {"epoch": 0, "value": 0.25}'):
...     _ = reader.take(line)
>>> [run] = reader.runs()
>>> run.epochs[0].mean("val", "top1"), run.epochs[0].training_seconds
(0.25, 120.0)
"""

from __future__ import annotations

import math
import re
from typing import Any

from steadytrain.interop.logs.run import MAX_EPOCH, NAN, LogEpoch, LogRun
from steadytrain.interop.logs.settings import add_setting, first_number, fraction, parse_json, plain_number, whole

FORMAT = "MLPerf"
_TEXT = re.compile(
    r":::ML(?:P?v?[\d.]+ (?P<benchmark>\S+)|L) (?P<time>\d+(?:\.\d*)?) (?:\([^)]*\) )?(?P<key>\w+)"
    r"(?: ?: ?(?P<value>.*))?"
)
_STARTS, _STOPS = ("train_epoch", "epoch_start"), ("eval_start", "block_stop", "epoch_stop", "train_epoch_stop")
_IMAGES = ("train_samples", "num_train_examples", "preproc_num_train_examples", "input_size")
_BATCH = ("global_batch_size", "input_batch_size")
_SETTINGS = {"opt_base_learning_rate": "lr", "opt_learning_rate": "lr", "seed": "seed", "run_set_random_seed": "seed"}


class MLPerfLines:
    """Parser of MLPerf's lines into runs."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._runs = [LogRun(FORMAT)]
        self._began: dict[int, float] = {}  # when each epoch of the newest run began
        self._epoch = self._evaluated = -1  # the newest that began, and that was evaluated
        self._resumed, self._stopped = NAN, NAN  # when training went on, and stopped for the evaluation at hand

    def take(self, line: str) -> bool:
        """Parse a line; return False if it is none of MLPerf's."""
        _, mark, text = line.partition(":::ML")
        if not mark:
            return False
        if text.startswith("LOG "):
            document = parse_json(text[4:])
            if not isinstance(document, dict) or not isinstance(key := document.get("key"), str):
                return False
            metadata = document.get("metadata")
            milliseconds = plain_number(document.get("time_ms"))
            self._take(key, {"value": document.get("value"), "metadata": metadata}, milliseconds / 1000, NAN)
        elif match := _TEXT.match(mark + text):
            add_setting(self._runs[-1], "model", match["benchmark"])
            value = parse_json(match["value"] or "null")
            self._take(match["key"], value, float(match["time"]), first_number(value, ("epoch_num", "epoch")))
        else:
            return False
        self.num_lines += 1
        return True

    def _take(self, key: str, value: Any, time: float, number: float) -> None:
        about: Any = value
        if isinstance(value, dict) and "value" in value:  # since 0.6 there is metadata beside it
            about = value.get("metadata")
            number = first_number(about, ("epoch_num", "epoch")) if math.isnan(number) else number
            value = value["value"]
        if key == "run_start" and self._runs[-1].epochs:
            self._runs.append(LogRun(FORMAT))
            self._began, self._epoch, self._evaluated, self._stopped = {}, -1, -1, NAN
        run = self._runs[-1]
        if key == "run_start":
            run.began = time
        elif key == "block_start":
            self._resumed, self._stopped = time, NAN
        elif key == "run_stop":
            run.ended_as = "aborted" if re.search("abort|false", str(about).lower()) else "success"
        elif key in _STARTS:
            number = plain_number(value) if math.isnan(number) else number
            if 0 <= number <= MAX_EPOCH:
                if self._evaluated < number and self._epoch >= 0:  # some list all epochs at the end
                    self._end(run.epoch(self._epoch), time)
                self._epoch = int(number) if self._evaluated < number else self._epoch
                self._began.setdefault(int(number), time)
                run.began = time if math.isnan(run.began) else run.began
            self._stopped = NAN
        elif key in _STOPS:
            if math.isnan(self._stopped) and not time <= self._resumed:  # lines of one moment are in any order
                self._stopped = time
            if key == "epoch_stop" and (epoch := int(number) if 0 <= number <= MAX_EPOCH else self._epoch) >= 0:
                self._end(run.epoch(epoch), time)
        elif key == "eval_accuracy" and (epoch := int(number) if 0 <= number <= MAX_EPOCH else self._epoch) >= 0:
            facts = run.epoch(epoch)
            self._end(facts, time if math.isnan(self._stopped) else self._stopped)
            facts.evaluated, self._stopped, self._evaluated = time, NAN, max(epoch, self._evaluated)
            if math.isfinite(top1 := fraction(plain_number(value))):
                facts.val["top1"] = [top1]
        elif key == "submission_benchmark":
            add_setting(run, "model", value)
        elif key in _SETTINGS:
            add_setting(run, _SETTINGS[key], value)
        elif key in _IMAGES or key in _BATCH:
            run.settings.setdefault(key, value if isinstance(value, int | float) else None)

    def _end(self, facts: LogEpoch, time: float) -> None:
        """Note when the training of an epoch was over, by the first line that says so."""
        began = self._began.get(facts.number, NAN)
        if math.isnan(facts.ended):
            facts.ended = time
            if time >= began:
                facts.seconds = [time - began]

    def runs(self) -> list[LogRun]:
        """Return the runs of the file, each with an epoch at least; their epochs count from 0."""
        if self._epoch >= 0 and not self._runs[-1].ended_as and self._runs[-1].epochs:
            self._runs[-1].epoch(self._epoch)  # it began: the log was cut
        runs = [run for run in self._runs if run.epochs]
        for run in runs:
            if 0 not in run.epochs and 0 not in self._began:  # benchmarks that count from 1
                run.epochs = {number - 1: facts for number, facts in run.epochs.items()}
                for number, facts in run.epochs.items():
                    facts.number = number
            run.num_images = next((n for key in _IMAGES if (n := whole(run.settings.get(key)))), None)
            run.batch_size = whole(run.settings.get("global_batch_size"))
            if run.num_images and run.batch_size:
                run.steps_per_epoch = run.num_images / run.batch_size
            elif batch := run.settings.get("input_batch_size"):
                run.notice(f"input_batch_size is {batch}: of one device in some programs, of all in others")
            benchmark = str(run.settings.get("model.name", "resnet"))
            if not benchmark.startswith(("resnet", "image")):
                run.notice(f"the accuracy of MLPerf's {benchmark} is shown as top-1, which it may not be")
        return runs
