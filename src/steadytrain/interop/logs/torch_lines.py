"""Log lines of PyTorch's trainers: timm, torchvision's references, and PyTorch's ImageNet example.

>>> reader = TorchLines()
>>> for line in ("Train: 0 [  32/33 (100%)]  Loss: 1.336 (4.00)  Time: 0.934s,    8.57/s  (0.218s,   36.68/s)  "
...              "LR: 5.000e-04  Data: 0.000 (0.014)",
...              "Test: [  29/29]  Time: 0.041 (0.064)  Loss:  0.5951 (0.5882)  Acc@1: 81.2500 (87.5000)  "
...              "Acc@5: 100.0000 (99.3750)"):
...     _ = reader.take(line)
>>> [run] = reader.runs()
>>> run.format, run.epochs[0].mean("train", "loss"), run.epochs[0].mean("val", "top1")
('timm', 4.0, 0.875)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from steadytrain.interop.logs.run import MAX_EPOCH, MAX_STEPS_PER_EPOCH, NAN, LogEpoch, LogPoint, LogRun
from steadytrain.interop.logs.settings import add_namespace, add_setting, clock_seconds, fraction, number, stamp, whole

_TIMM = re.compile(
    r"Train: (\d{1,7}) \[\s*(\d{1,10})/(\d{1,10}) [^\]]*\]\s+Loss:\s*(\S+) \(\s*(\S+?)\)"
    r"(?:.*?Time:\s*(\S+?)s,\s*(\S+?)/s\s+\(\s*(\S+?)s,\s*(\S+?)/s\))?"
    r"(?:.*?LR: (\S+))?(?:.*?Data: (\S+) \(\s*(\S+?)\))?"
)
_TORCHVISION = re.compile(r"Epoch: \[(\d{1,7})\](\s*)\[\s*(\d{1,10})/(\d{1,10})\]")
_TEST = re.compile(r"Test(?: \((EMA)\))?:(?: (EMA))?\s*\[\s*(\d{1,10})/(\d{1,10})\]")
_TOTAL = re.compile(r"(?:Epoch: \[(\d{1,7})\]|Test:(?: EMA)?)\s+Total time: (.{1,40})")
_RESULT = re.compile(
    r"(?:\*|Test:\s{0,40}(EMA)?)\s{1,40}(?:Acc|Prec)@1:? (\S+)\s+(?:Acc|Prec)@5:? (\S+)(?:\s+loss (\S+))?"
)
_PAIR = re.compile(r"([A-Za-z][\w@/]{0,99}):?\s{1,40}([-+.\w]+)(?:\s*\(\s*([-+.\w]+)\))?")
_MODEL = re.compile(r"Model (\S+) created, param count:\s*(\d+)")
_PLANNED = re.compile(r"Scheduled epochs: (\d+)")
_NAMES = {"loss": ("loss",), "top1": ("acc1", "acc@1", "prec@1"), "top5": ("acc5", "acc@5", "prec@5")}


class TorchLines:
    """Parser of log lines of PyTorch's trainers into runs."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._runs = [LogRun("timm")]
        self._epoch = -1
        self._batch = -1
        self._start = ""
        self._takers: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], bool]], ...] = (
            (_TIMM, self._take_timm),
            (_TORCHVISION, self._take_epoch),
            (_TEST, self._take_test),
            (_RESULT, self._take_result),
            (_TOTAL, self._take_total),
        )

    def take(self, line: str) -> bool:
        """Parse a line; return False if it is none of these."""
        matches = ((pattern.search(line), take) for pattern, take in self._takers)
        is_figure = any(match is not None and take(match, line) for match, take in matches)
        self.num_lines += is_figure
        return is_figure or self._take_start(line)

    def runs(self) -> list[LogRun]:
        """Return the runs of the file, each with an epoch at least."""
        runs = [run for run in self._runs if run.epochs]
        for run in runs:
            world = whole(run.settings.get("world_size"), 1_000_000)
            if run.format == "torchvision" and world and world > 1:
                per_rank = whole(run.settings.get("batch_size"))
                run.batch_size = per_rank * world if per_rank else None
                for point in run.points:
                    point.images_per_second *= world
                run.notice(f"images/s are those of one process times {world}, the processes (world_size)")
        return runs

    @property
    def _run(self) -> LogRun:
        return self._runs[-1]

    def _go_to(self, epoch: int, batch: int, of: int, name: str) -> LogRun | None:
        """Go to a batch of an epoch, in a new run unless it follows the last one; return None if it is absurd."""
        if epoch > MAX_EPOCH or not 0 < of < MAX_STEPS_PER_EPOCH or batch > of:
            return None
        is_behind = epoch < self._epoch or (epoch == self._epoch and batch < self._batch)
        if self._run.epochs and self._epoch >= 0 and (is_behind or self._run.format != name):
            if self._run.format == name and epoch > min(self._run.epochs):
                self._run.drop_from(epoch)
                self._run.notice(f"trained again from epoch {epoch + 1} on, after a checkpoint")
            else:
                self._runs.append(LogRun(name))
                add_namespace(self._run, self._start)
        self._start = ""
        self._run.format = name
        self._run.steps_per_epoch = float(of)
        self._epoch, self._batch = epoch, batch
        return self._run

    def _facts(self) -> LogEpoch:
        return self._run.epoch(max(0, self._epoch))

    def _take_timm(self, match: re.Match[str], line: str) -> bool:
        epoch, batch, of = int(match[1]), int(match[2]), int(match[3])
        run = self._go_to(epoch, batch, of, "timm")
        if run is None:
            return False
        seconds, rate = number(match[6] or ""), number(match[7] or "")
        mean_seconds, wait = number(match[8] or ""), number(match[11] or "")
        share = wait / seconds if seconds > 0 and 0 <= wait <= seconds else NAN
        facts, lr = run.epoch(epoch), number(match[10] or "")
        if seconds > 0 and rate > 0 and run.batch_size is None:
            run.batch_size = whole(round(seconds * rate))
        time = stamp(line, match.start() + 1)
        loss = _finite_or_notice(run, match[4], epoch)
        run.add_point(LogPoint(epoch, batch + 1, loss, NAN, lr, rate if rate > 0 else NAN, share, time))
        if math.isfinite(number(match[5])):
            facts.train["loss"] = [number(match[5])]
        facts.seconds = [mean_seconds * of] if batch + 1 >= of and mean_seconds > 0 else []
        facts.ended = time
        run.note_time(time)
        return True

    def _take_epoch(self, match: re.Match[str], line: str) -> bool:
        epoch, batch, of = int(match[1]), int(match[3]), int(match[4])
        run = self._go_to(epoch, batch, of, "torchvision" if match[2] else "PyTorch ImageNet example")
        if run is None:
            return False
        values = _pairs(line[match.end() :])
        facts, time = run.epoch(epoch), stamp(line, match.start() + 1)
        now, means = _figures(values, 0), _figures(values, 1)
        loss, top1 = now.get("loss", NAN), now.get("top1", NAN)
        if "loss" in values and math.isnan(loss):
            _finite_or_notice(run, "nan", epoch)
        seconds, wait, rate, lr = (values.get(name, (NAN, NAN))[0] for name in ("time", "data", "img/s", "lr"))
        share = wait / seconds if seconds > 0 and 0 <= wait <= seconds else NAN
        run.add_point(LogPoint(epoch, batch + 1, loss, top1, lr, rate if rate > 0 else NAN, share, time))
        facts.train |= {name: [value] for name, value in means.items()}
        facts.ended = time
        run.note_time(time)
        return True

    def _take_test(self, match: re.Match[str], line: str) -> bool:
        facts = self._facts()
        for name, value in _figures(_pairs(line[match.end() :]), 1).items():  # the newest line has the means
            (facts.ema if match[1] or match[2] else facts.val)[name] = [value]
        facts.evaluated = stamp(line, match.start() + 1)
        return True

    def _take_result(self, match: re.Match[str], line: str) -> bool:
        part = self._facts().ema if match[1] else self._facts().val
        for name, text in (("top1", match[2]), ("top5", match[3])):
            if math.isfinite(value := fraction(number(text), percents=True)):
                part[name] = [value]
        if match[4] and math.isfinite(number(match[4])):
            part["loss"] = [number(match[4])]
        return True

    def _take_total(self, match: re.Match[str], line: str) -> bool:
        seconds = clock_seconds(match[2])
        if not seconds >= 0:
            return False
        if match[1]:
            self._run.epoch(min(int(match[1]), MAX_EPOCH)).seconds = [seconds]
        else:
            self._facts().val_seconds = seconds
        return True

    def _take_start(self, line: str) -> bool:
        if "Namespace(" in line:
            if self._run.epochs:
                self._start = line
                return True
            return add_namespace(self._run, line)
        target = self._run if not self._run.epochs else None
        if (model := _MODEL.search(line)) and target:
            add_setting(target, "model", model[1])
            target.settings["model.parameters"] = int(model[2][:15])
        elif (planned := _PLANNED.search(line)) and target:
            add_setting(target, "epochs", int(planned[1][:9]))
        else:
            return False
        return True


def _pairs(text: str) -> dict[str, tuple[float, float]]:
    """Return the figures of a line, by name in lower case: the value, and the mean behind it in brackets."""
    pairs: dict[str, tuple[float, float]] = {}
    for name, value, mean in _PAIR.findall(text[:4096]):
        now = number(value)
        pairs.setdefault(name.lower(), (now, number(mean) if mean else now))
    return pairs


def _figures(values: dict[str, tuple[float, float]], which: int) -> dict[str, float]:
    """Return the figures that a line has, accuracies as fractions; ``which``: 0 the value, 1 the mean."""
    figures = {}
    for name, words in _NAMES.items():
        value = next((values[word][which] for word in words if word in values), NAN)
        value = value if name == "loss" else fraction(value, percents=True)
        if math.isfinite(value):
            figures[name] = value
    return figures


def _finite_or_notice(run: LogRun, text: str, epoch: int) -> float:
    value = number(text)
    if math.isnan(value):
        run.notice(f"the training loss is not a number in epoch {epoch + 1}")
    return value
