"""Logs that are tables: CSV files of Lightning, Keras and timm, and files with a JSON object for each epoch.

What a column means, its name says: ``val_acc``, ``eval_top1``, ``test_acc1`` and ``valid/accuracy`` are one thing.

>>> meaning("val_accuracy"), meaning("train_loss_step"), meaning("lr-SGD"), meaning("val_f1")
(('val', 'top1', ''), ('train', 'loss', 'step'), ('', 'lr', ''), None)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from steadytrain.format import count
from steadytrain.interop.logs.run import MAX_EPOCH, NAN, LogPoint, LogRun
from steadytrain.interop.logs.settings import fraction, number, parse_json

VAL, TRAIN = {"val", "valid", "validation", "eval", "test", "dev"}, {"train", "training", "tr"}
_NAMES = {
    "loss": "loss",
    "top1": (
        "acc, accuracy, acc1, top1, prec1, acc 1, top 1, acc top1, top1 acc, accuracy top1, top1 accuracy, "
        "categorical accuracy, sparse categorical accuracy, binary accuracy, multiclassaccuracy"
    ),
    "top5": (
        "acc5, top5, prec5, acc 5, top 5, acc top5, top5 acc, top k categorical accuracy, "
        "sparse top k categorical accuracy"
    ),
    "error": "error rate",
    "lr": "lr, learning rate",
}
FIGURES = {tuple(name.split()): figure for figure, names in _NAMES.items() for name in names.split(", ")}
"""The words of a column's name, without those of its phase -> the figure."""

Meaning = tuple[str, str, str]
MAX_STEPS = 2**40


@lru_cache(maxsize=4096)
def meaning(name: str) -> Meaning | None:
    """Return what a column holds: phase (``train``, ``val``, empty), figure, and ``step`` or ``epoch`` if told so."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.strip().lower()[:200].replace("@", "")) if word]
    if words and words[0] == "lr":
        return "", "lr", ""
    per = words.pop() if words and words[-1] in ("step", "epoch") and len(words) > 1 else ""
    phase = "val" if VAL & set(words) else "train" if TRAIN & set(words) else ""
    figure = FIGURES.get(tuple(word for word in words if word not in VAL | TRAIN | {"metrics"}))
    return (phase, figure, per) if figure else None


class _TableRun:
    """The rows of one run: each column by epoch, points by the number of their step, and each epoch's last step."""

    def __init__(self, format: str) -> None:
        self.run = LogRun(format)
        self.columns: dict[tuple[int, Meaning], tuple[int, float, float]] = {}  # how many values, sum, and the newest
        self.steps: dict[int, float] = {}
        self.first = self.newest = -1
        self.largest_score = 0.0
        self._point: LogPoint | None = None

    def add(self, epoch: int, step: float, figures: Iterable[tuple[Meaning, float]]) -> None:
        """Add a row."""
        self.first, self.newest = epoch if self.first < 0 else self.first, epoch
        self.run.epoch(epoch)
        has_step = 0 <= step < MAX_STEPS
        if has_step:
            self.steps[epoch] = max(step, self.steps.get(epoch, 0.0))
        for what, value in figures:
            phase, figure, per = what
            if figure in ("top1", "top5", "error"):
                self.largest_score = max(self.largest_score, value)
            num, total, _ = self.columns.get((epoch, what), (0, 0.0, NAN))
            self.columns[epoch, what] = num + 1, total + value, value
            if has_step and phase != "val" and per != "epoch" and figure not in ("top5", "error"):
                if self._point is None or (self._point.epoch, self._point.batch) != (epoch, step + 1):
                    self._point = self.run.add_point(LogPoint(epoch, step + 1))
                setattr(self._point, figure, value)

    def drop_from(self, epoch: int) -> None:
        """Forget an epoch and those after it."""
        self.run.drop_from(epoch)
        self.columns = {key: column for key, column in self.columns.items() if key[0] < epoch}
        self.steps = {number: step for number, step in self.steps.items() if number < epoch}
        self._point = None

    def settle(self) -> LogRun:
        """Return the run, with means of its epochs and points within them; accuracies above 1 are percents."""
        run, percents = self.run, self.largest_score > 1 or self.run.format == "timm"
        if self.steps and (per_epoch := (self.steps[max(self.steps)] + 1) / (max(self.steps) + 1)) >= 1:
            run.steps_per_epoch = per_epoch
        for (epoch, (phase, figure, per)), (num, total, newest) in self.columns.items():
            facts = run.epoch(epoch)
            value = newest if phase == "val" or per == "epoch" or figure == "lr" else total / num
            value = fraction(value, percents=percents) if figure in ("top1", "top5", "error") else value
            figure, value = ("top1", 1 - value) if figure == "error" else (figure, value)
            if figure == "lr":
                if epoch not in self.steps:
                    run.add_point(LogPoint(epoch, 1.0, lr=value))
            elif math.isfinite(value) and (phase == "val" or per != "step" or figure not in facts.train):
                (facts.val if phase == "val" else facts.train)[figure] = [value]
        for point in run.points:
            point.top1 = fraction(point.top1, percents=percents)
            if run.steps_per_epoch and point.epoch in self.steps:
                point.batch = min(max(0.0, point.batch - point.epoch * run.steps_per_epoch), run.steps_per_epoch)
        run.points.sort(key=lambda point: (point.epoch, point.batch))
        return run


class _Rows:
    """Rows of a table that become runs."""

    def __init__(self, format: str) -> None:
        self.num_lines = 0
        self._format = format
        self._runs = [_TableRun(format)]
        self._unreadable = 0

    def add(self, epoch: float, step: float, figures: Sequence[tuple[Meaning, float]]) -> None:
        """Add a row; epochs that begin again are another run, or train again from a checkpoint."""
        rows = self._runs[-1]
        if math.isnan(epoch) and rows.newest >= 0 and figures:  # a row of Lightning's that names a step alone
            epoch = float(rows.newest)
        if not 0 <= epoch <= MAX_EPOCH:
            self._unreadable += 1
            return
        if epoch < rows.newest:
            if epoch <= rows.first:
                rows = _TableRun(self._format)
                self._runs.append(rows)
            else:
                rows.drop_from(int(epoch))
        rows.add(int(epoch), step, figures)

    def runs(self) -> list[LogRun]:
        """Return the runs of the table, each with an epoch at least."""
        runs = [rows.settle() for rows in self._runs if rows.newest >= 0]
        for run in runs:
            if self._unreadable:
                run.notice(f"{count(self._unreadable, 'line')} could not be read")
        return runs


class Table(_Rows):
    """A CSV file whose first line names its columns."""

    def __init__(self, names: Sequence[str], delimiter: str, format: str) -> None:
        super().__init__(format)
        self._names = list(names)
        self._delimiter = delimiter
        unnamed = "val" if format in ("fastai", "Ultralytics") else ""  # their metrics are of the validation images
        known = ((i, what) for i, name in enumerate(names) if (what := meaning(name)))
        self._columns = [(i, (what[0] or unnamed, *what[1:])) for i, what in known]
        self._epoch = self._names.index("epoch")
        self._step = self._names.index("step") if "step" in self._names else -1
        self._counts_from_one = False

    @staticmethod
    def of_header(line: str) -> Table | None:
        """Return a reader of the table that a line begins; None where the line names no epoch, or nothing known."""
        for delimiter in (",", ";", "\t"):
            names = [name.strip().strip('"') for name in line.split(delimiter)]
            known = [name for name in names if meaning(name)]
            if "epoch" in names and known and "run" not in names:  # a report of ours names runs
                formats = {",eval_": "timm", ",step,": "Lightning", ",metrics/": "Ultralytics"}
                usual = "fastai" if {"train_loss", "valid_loss"} <= set(names) else "Keras"
                joined = f",{','.join(names)},"
                return Table(names, delimiter, next((f for mark, f in formats.items() if mark in joined), usual))
        return None

    def take(self, line: str) -> bool:
        """Take a line in: a row, or the header once more."""
        cells = line.split(self._delimiter)
        if len(cells) != len(self._names):
            if line.strip():
                self.add(NAN, NAN, ())
            return True
        if cells[self._epoch].strip().strip('"') == "epoch":
            return True
        self.num_lines += 1
        figures = [(kind, value) for i, kind in self._columns if cells[i] and not math.isnan(value := number(cells[i]))]
        step = number(cells[self._step]) if self._step >= 0 else NAN
        epoch = number(cells[self._epoch])
        self._counts_from_one |= self.num_lines == 1 and epoch == 1 and self._format == "Ultralytics"
        self.add(epoch - self._counts_from_one, step, figures)
        return True


class JsonTable(_Rows):
    """A file with a JSON object in each line, which has an ``epoch``: as DeiT, MAE and ConvNeXt write them."""

    @staticmethod
    def of_line(line: str) -> JsonTable | None:
        """Return a reader that has taken the line in; None where it is no such object."""
        table = JsonTable("JSON lines")
        return table if table.take(line) else None

    def take(self, line: str) -> bool:
        """Parse a line; return False if it is no object with an epoch and a figure that is known."""
        document = parse_json(line) if line.lstrip().startswith("{") else None
        if not isinstance(document, dict) or "kind" in document or "epoch" not in document:
            return False
        numbers = {str(k): float(v) for k, v in document.items() if isinstance(v, int | float) and abs(v) <= 1e15}
        figures = [(what, value) for name, value in numbers.items() if (what := meaning(name)) is not None]
        if not figures:
            return False
        self.num_lines += 1
        self.add(numbers.get("epoch", NAN), numbers.get("step", NAN), figures)
        return True
