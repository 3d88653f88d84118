"""Logs of MXNet's trainers of every era: ``Module.fit``'s lines and ``Speedometer``'s, of one worker or several;
those of Gluon's, GluonCV's and Horovod's scripts.

Several workers write into one file, as a rule without their names, and in asynchronous training they are in different
epochs at a time. As MXNet's own ``parse_log.py`` has it, a figure of an epoch is the mean over all lines of it.

>>> reader = MXNetLines()
>>> for line in ("Epoch[0] Train-accuracy=0.5", "Epoch[0] Time cost=70.1", "Epoch[0] Validation-accuracy=0.625"):
...     _ = reader.take(line)
>>> [run] = reader.runs()
>>> run.epochs[0].mean("val", "top1"), run.epochs[0].training_seconds
(0.625, 70.1)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from steadytrain.errors import InputError, did_you_mean
from steadytrain.interop.logs.run import MAX_EPOCH, NAN, LogEpoch, LogPoint, LogRun
from steadytrain.interop.logs.settings import add_namespace, fraction, number, stamp, whole
from steadytrain.interop.mxnet.networks import FAMILIES

MAX_NAMES, MAX_OTHERS = 4096, 12
"""Prefixes of lines that are taken for names of workers, and metrics that are named though they are not shown."""
MOST_MISSING = 4
"""A worker that is more epochs ahead than this is in another run: of fewer, the lines may be missing."""

_LINE = re.compile(
    r"(?:(?:Epoch|Iter)\[(?P<epoch>\d{1,7})\]"
    r"|\[Epoch (?P<bracketed>\d{1,7})(?: Batch (?P<batch>\d{1,10})[^\]]{0,12})?\])"
    r"[:,]?\s*(?:Rank ?\[(?P<rank>\d{1,7})\]\s*)?"
)
_BATCH = re.compile(r"Batch ?\[(?:\d+-)?(\d{1,10})\]\s*")
_SPEED = re.compile(r"\bSpeed[:=] ?(\S+) samples/s")
_METRIC = re.compile(r"(?:(Train|Validation)-)?([A-Za-z][\w.\-]{0,99})=(\S+)")  # bounded: searching is linear
_WORDS = re.compile(r"\b(loss|ppl)[ :]+([-+.\w]+)")
_EVAL_SECONDS = re.compile(r"Eval duration = (\S+) seconds")
_RATE = re.compile(r"(?:Update\[\d+\]: Change|Adjust) learning rate to (\S+)")
_SECTION = re.compile(r"(?:train(?:ing)?|valid(?:ation)?|test)\s*[:=]", re.IGNORECASE)
_OF_FIT = ("Train-", "Validation-", "Time cost=")
"""Beginnings of the lines of ``Module.fit`` about an epoch."""
_STARTS = ("start with arguments", "Start training with", "Training begin: using optimizer", "Namespace(")
NO_MEMORY = r"(?<!CUDA )out of memory|_ALLOC_FAILED|Memory allocation failed"  # of a GPU; PyTorch words it otherwise
# What is no part of a worker's name in front of a line: clocks and dates of any country, seconds since a start, levels.
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_NO_NAME = re.compile(
    r"(?:\d{4}-\d\d-\d\d[ T]|\b)\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z\b|[+-]\d\d:?\d\d\b)?|"
    # Numbers that begin within a word may be of a host: ip-10-0-1-5, 10.0.0.1:9091, node1.2.
    r"(?<![\w.-])(?:\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?![\d.-])|\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?|\d+\.\d+(?![\d.])|\d{9,}\b)|"
    rf"\b{_MONTH}[ -]+\d{{1,2}}\b|\b\d{{1,2}}[ -]{_MONTH}\b|"
    r"\b(?:INFO|DEBUG|WARNING|ERROR|root|[AP]M|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)(?:[a-z]*day)?|[IWEF]\d{4})\b|[^\w.-]+"
)
_ESTIMATOR = re.compile(
    r"\[Epoch (\d{1,7})\](?: [Bb]egin, current learning rate: (\S+)|"
    r" ?\[(?:Batch|Step) (\d{1,10})[^\]]{0,12}\].*?time/\S+ \S+| [Ff]inished in ([\d.]+)s[,:])(.*)|Train finished using"
)
_STAMP_LENGTH = len("2018-03-07 05:23:13,528")

# Names and blanks are bounded: so the time is linear in the length of a line, whatever it holds.
_TOKEN = re.compile(
    r"\b(?P<section>train(?:ing)?|val(?:id(?:ation)?)?|test(?:ing)?|eval(?:uation)?)\s{0,40}:\s{0,40}(?=[a-z])"
    r"|(?P<name>[a-z][\w@.\-]{0,99}(?: cost)?)\s{0,40}[:=]\s{0,40}"
    r"(?P<value>(?:[-+]?(?:\d[\w.+\-]*|\.\d+)|[-+]?(?:nan|inf)\b)%?)",
    re.IGNORECASE,
)
_PART = re.compile(r"(?:(train(?:ing)?)|val(?:id(?:ation)?)?|test|eval)(?:[-_ ](.+))?", re.IGNORECASE)
_SPEEDS, _TIMES, _RATES = ("speed", "throughput"), ("time", "time cost", "time_cost"), ("lr", "learning_rate")
_LOSSES = {"cross-entropy", "loss", "lossvalue", "softmax-cross-entropy", "softmaxcrossentropyloss", "celoss"}
_LOSSES |= {"nll-loss", "ce"}
_SCORE = r"(?:acc(?:uracy)?|prec(?:ision)?|err(?:or)?)"
_TOP = re.compile(rf"(?:{_SCORE}[-_@]?)?(?:top[-_]?(?:k_accuracy_)?|@)?(?P<k>[15])(?:[-_]?{_SCORE})?")
_ERROR = re.compile(r"(?:^|[-_@]|\d)err(?:or)?(?:$|[-_@]|\d)")


@dataclass
class _Worker:
    """A worker's position: the number of its run in the file, its epoch, and whether the epoch's training is over."""

    run: int
    epoch: int = -1
    is_timed: bool = False


@dataclass
class _Reading:
    """A run that is being read: the names of workers that wrote an epoch's time, and log lines; the metric that is
    shown as each of our figures in training and validation, and those that are not shown; the first and the newest
    epoch, the learning rate, and each worker's newest log line. Horovod's lines say ranks (``Rank[3]``): where those
    of speed do not, they are of all ranks.
    """

    run: LogRun
    timed: set[str] = field(default_factory=set)
    logging: set[str] = field(default_factory=set)
    shown: dict[tuple[str, str], str] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    first: int = -1
    newest: int = -1
    lr: float = NAN
    last: dict[str, LogPoint] = field(default_factory=dict)
    overlaps: bool = False
    is_language: bool = False
    is_ranked: bool = False
    has_ranked_speeds: bool = False

    def figure(self, part: str, metric: str, *, of_batch: bool = False) -> str:
        """Return which of our figures a metric is; empty where it is none, or another metric is shown as that one.

        An accuracy of log lines may have another name than that of the epoch's own line.
        """
        kind = kind_of(metric)
        self.is_language |= kind == "perplexity"
        place = (f"{part} batch" if of_batch and kind != "loss" else part, kind)
        if kind in ("top1", "top5", "loss") and self.shown.setdefault(place, metric) != metric:
            kind = ""
        if not kind and len(self.others) < MAX_OTHERS:
            self.others.add(metric[:40])
        return kind


class MXNetLines:
    """Parser of lines of MXNet's logs into runs."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._readings = [_Reading(LogRun("MXNet"))]
        self._workers: dict[str, _Worker] = {}
        self._names: dict[str, str] = {}  # of workers, by what stands in front of their lines
        self._start = ""  # a line that a program begins with, until an epoch says what it began

    def take(self, line: str) -> bool:
        """Parse a line; return False if it is none of MXNet's."""
        if not (line := _of_estimator(line)):
            return True
        match = _LINE.search(line)
        if match is None:
            return self._take_other(line)
        epoch, text = int(match["epoch"] or match["bracketed"]), line[match.end() :]
        batch = _BATCH.match(text)
        batches = float(match["batch"] or (batch[1] if batch else NAN))
        text = text[batch.end() :] if batch else text
        figures = _figures_of_epoch(text, batches, is_bracketed=match["bracketed"] is not None)
        is_training = not math.isnan(batches) or text.startswith(("Train-", "Time cost=")) or figures is not None
        is_known = is_training or text.startswith("Validation-") or "loss" in text or _METRIC.match(text) is not None
        if epoch > MAX_EPOCH or not is_known:
            return False
        self.num_lines += 1
        name = self._worker_name(line[: match.start()], match["rank"])
        if figures is not None:  # behind its time a worker may write more of an epoch
            last = self._workers.get(name)
            is_training = last is None or not (last.is_timed and last.epoch == epoch)
        worker = self._worker_at(name, epoch, is_training)
        reading = self._readings[worker.run]
        reading.is_ranked |= match["rank"] is not None
        reading.run.ended_as = ""
        run, time = reading.run, stamp(line, match.start() + 1)
        run.note_time(time)
        if figures is not None:
            _take_figures(reading, name, run.epoch(epoch), figures, time)
            worker.is_timed |= math.isfinite(figures.seconds)
        elif not math.isnan(batches):
            reading.logging.add(name)
            speed = _SPEED.search(text)
            reading.has_ranked_speeds |= speed is not None and match["rank"] is not None
            _take_batch(reading, name, epoch, batches, number(speed[1]) if speed else NAN, text, time)
            run.epoch(epoch).ended = time
        elif text.startswith("Time cost="):
            seconds = number(text[10:].partition(" ")[0])
            if seconds >= 0:
                run.epoch(epoch).seconds.append(seconds)
            run.epoch(epoch).ended = time
            worker.is_timed = True
            reading.timed.add(name)
        else:
            _take_metrics(reading, run.epoch(epoch), text, time)
        return True

    def _take_other(self, line: str) -> bool:
        reading = self._readings[-1]
        if rate := _RATE.search(line):
            reading.lr = number(rate[1])
            self.num_lines += 1
        elif re.search(NO_MEMORY, line) and reading.run.settings:
            reading.run.epoch(max(0, reading.newest))
            reading.run.ended_as = "out of memory"
        elif not any(start in line for start in _STARTS):
            return False
        elif reading.newest >= 0:
            self._start = line
        else:
            _add_start(reading.run, line)
        return True

    def _worker_name(self, prefix: str, rank: str | None) -> str:
        """Return what names the worker in front of a line, and its rank; empty where nothing does."""
        if rank is not None and len(self._workers) <= MAX_NAMES:
            return f"{self._worker_name(prefix, None)} rank {rank}".strip()
        if not prefix or len(self._workers) > MAX_NAMES:
            return ""
        key = prefix[_STAMP_LENGTH:] if prefix[:2] == "20" and prefix[4:5] == "-" else prefix
        if (name := self._names.get(key)) is None:
            name = _NO_NAME.sub(" ", prefix).strip()[-200:]
            if len(self._names) < MAX_NAMES:
                self._names[key] = name
        return name

    def _worker_at(self, name: str, epoch: int, is_training: bool) -> _Worker:
        """Return the worker that wrote a line, in the run that the line belongs to.

        A worker with a name goes from epoch to epoch: what does not is another run. Several without names may be in
        different epochs: another run is one that is back at the first epoch after the second is over, or the third
        begun.
        """
        worker = self._workers.setdefault(name, _Worker(len(self._readings) - 1))
        reading = self._readings[worker.run]
        if is_training and worker.epoch >= 0:
            first, last = reading.first, reading.newest
            newest = reading.run.epochs.get(last, LogEpoch(last))
            is_over = bool(newest.seconds and newest.val) and not reading.overlaps  # asynchronous workers go on
            if name:
                again = epoch < worker.epoch or epoch > worker.epoch + MOST_MISSING
                again = again or (epoch == worker.epoch and worker.is_timed)
            else:
                again = epoch > last + MOST_MISSING or (epoch <= last and bool(self._start))
                again = again or epoch == first <= last - (1 if is_over else 2)
            if again and self._start and first < epoch <= last:
                reading.run.drop_from(epoch)
                reading.newest = epoch - 1
                reading.run.notice(f"trained again from epoch {epoch + 1} on, after a checkpoint")
                for other in self._workers.values():
                    if other.run == worker.run and other.epoch >= epoch:
                        other.epoch = epoch - 1
            elif again:
                self._begin_run(worker)
        if is_training:
            self._start = ""
        reading = self._readings[worker.run]
        reading.overlaps |= is_training and epoch < worker.epoch
        reading.first = epoch if reading.first < 0 else min(reading.first, epoch)
        reading.newest = max(reading.newest, epoch)
        if epoch > worker.epoch:
            worker.epoch, worker.is_timed = epoch, False
        return worker

    def _begin_run(self, worker: _Worker) -> None:
        worker.run, worker.epoch, worker.is_timed = worker.run + 1, -1, False
        if worker.run == len(self._readings):
            self._readings.append(_Reading(LogRun("MXNet")))
            _add_start(self._readings[-1].run, self._start)

    def runs(self) -> list[LogRun]:
        """Return the runs of the file, each with an epoch at least."""
        readings = [reading for reading in self._readings if reading.run.epochs]
        for reading in readings:
            _settle(reading)
        return [reading.run for reading in readings]


def _of_estimator(line: str) -> str:
    """Word a line of Gluon's Estimator as the scripts do; empty for one that repeats figures of others.

    A batch's line has the validation of the epoch before; an evaluation ends with a line that is always of epoch 0.

    >>> _of_estimator("[Epoch 1] Finished in 0.5s, training accuracy: 0.9, validation accuracy: 0.8")
    '[Epoch 1] time: 0.5 train-accuracy=0.9 val-accuracy=0.8'
    """
    if (match := _ESTIMATOR.search(line)) is None:
        return line
    epoch, lr, batch, seconds, text = match.groups()
    if lr:
        return f"Adjust learning rate to {lr}"
    figures = re.findall(r"\b(train|val)[a-z]{0,8} ([\w.\-]{1,99}): ([-+.\w]+)", text or "")
    trained = [f"{name}={value}" for part, name, value in figures if part == "train"]
    if batch:
        return f"{line[: match.start()]}Epoch[{epoch}] Batch [{batch}]\t" + "\t".join(trained)
    ended = [f"[Epoch {epoch}] time: {seconds}", *(f"{part}-{name}={value}" for part, name, value in figures)]
    return line[: match.start()] + " ".join(ended) if trained else ""


@dataclass
class _Figures:
    """Figures of a line: names of metrics with their values as text; seconds, images/s and rate are NaN if unknown."""

    train: list[tuple[str, str]] = field(default_factory=list)
    val: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = NAN
    images_per_second: float = NAN
    lr: float = NAN


def parse_figures(text: str) -> _Figures:
    """Parse figures of an epoch as Gluon's, GluonCV's and Horovod's scripts write them, behind the epoch's number.

    A word such as ``validation:`` says whose the figures after it are.

    >>> line = parse_figures("train=0.41 val=0.45 loss=1.6 time: 28.0")
    >>> line.train, line.val, line.seconds
    ([('accuracy', '0.41'), ('loss', '1.6')], [('accuracy', '0.45')], 28.0)
    >>> parse_figures("validation: err-top1=0.72 err-top5=0.46").val
    [('err-top1', '0.72'), ('err-top5', '0.46')]
    """
    figures = _Figures()
    is_val = False
    for token in _TOKEN.finditer(text):
        if section := token["section"]:
            is_val = not section.lower().startswith("train")
            continue
        name, value = token["name"], token["value"]
        if name.lower() in _SPEEDS:
            figures.images_per_second = number(value)
        elif name.lower() in _RATES:
            figures.lr = number(value)
        elif name.lower() not in _TIMES:
            part = _PART.fullmatch(name)
            is_of_val = is_val if part is None else part[1] is None
            metric = name if part is None else part[2] or "accuracy"
            (figures.val if is_of_val else figures.train).append((metric, value))
        elif not is_val:
            figures.seconds = number(value)
    return figures


def kind_of(metric: str) -> str:
    """Return which of our figures a metric is (top1, top5, loss, perplexity); empty for others.

    >>> kind_of("err-top1"), kind_of("acc@5"), kind_of("mae")
    ('top1', 'top5', '')
    """
    name = metric.lower()
    if name in ("accuracy", "acc", "err", "error"):
        return "top1"
    if (top := _TOP.fullmatch(name)) and not name.isdigit():
        return f"top{top['k']}"
    if name in ("ppl", "perplexity"):
        return "perplexity"
    return "loss" if name in _LOSSES else ""


def score(metric: str, text: str) -> float:
    """Return an accuracy as a fraction: what an error leaves of 1; NaN for what is none.

    >>> score("err-top1", "0.75")
    0.25
    """
    value = fraction(number(text), percents=text.rstrip(",;").endswith("%"))
    return round(1 - value, 12) if _ERROR.search(metric.lower()) else value


def _add_start(run: LogRun, line: str) -> None:
    """Add the arguments that a program begins with; in 2015 it named its devices: ``[gpu(0), gpu(1)]``."""
    add_namespace(run, line)
    if gpus := re.findall(r"\bgpu\((\d{1,4})\)", line):
        run.settings.setdefault("gpus", ",".join(gpus))


def _figures_of_epoch(text: str, batches: float, *, is_bracketed: bool) -> _Figures | None:
    """Return the figures of a line of Gluon's or Horovod's about a whole epoch; None for another line."""
    if text.startswith(_OF_FIT) and not is_bracketed and math.isnan(batches):
        return None
    figures = parse_figures(text)
    if not math.isnan(batches):  # Horovod's last line of an epoch names its last batch
        return figures if "Time cost" in text else None
    has_any = bool(figures.train or figures.val) or figures.seconds >= 0 or figures.images_per_second > 0
    is_whole = is_bracketed or figures.images_per_second > 0 or _SECTION.match(text) is not None
    return figures if has_any and is_whole else None


def _take_figures(reading: _Reading, name: str, facts: LogEpoch, figures: _Figures, time: float) -> None:
    """Add the figures of an epoch's own line."""
    if figures.seconds >= 0:
        facts.seconds.append(figures.seconds)
        reading.timed.add(name)
    if figures.images_per_second > 0:
        facts.rates.append(figures.images_per_second)
    if math.isfinite(figures.lr):
        facts.lr = figures.lr
    _add_figures(reading, facts, "train", figures.train)
    if figures.val:
        _add_figures(reading, facts, "val", figures.val)
        facts.evaluated = time
    else:
        facts.ended = time


def _take_batch(
    reading: _Reading, name: str, epoch: int, batches: float, speed: float, metrics: str, time: float
) -> None:
    """Parse a line of ``Speedometer``; several lines of one batch, each with its own metric, make one point."""
    figures = [(metric, value) for _, metric, value in _METRIC.findall(metrics)] or _WORDS.findall(metrics)
    top1 = loss = NAN
    for metric, text in figures:
        if metric == "lr":
            reading.lr = number(text)
            continue
        kind = reading.figure("train", metric, of_batch=True)
        top1 = score(metric, text) if kind == "top1" else top1
        loss = number(text) if kind == "loss" else loss
    last = reading.last.get(name)
    if last is not None and (last.epoch, last.batch) == (epoch, batches):
        is_more = (math.isnan(last.top1) and not math.isnan(top1)) or (math.isnan(last.loss) and not math.isnan(loss))
        if is_more or (math.isnan(top1) and math.isnan(loss)):
            last.top1 = last.top1 if math.isnan(top1) else top1
            last.loss = last.loss if math.isnan(loss) else loss
            return
    point = LogPoint(epoch, batches, loss, top1, reading.lr, speed if speed > 0 else NAN, time=time)
    reading.last[name] = reading.run.add_point(point)


def _take_metrics(reading: _Reading, facts: LogEpoch, line: str, time: float) -> None:
    is_val = line.startswith("Validation-")
    figures = [(metric, value) for _, metric, value in _METRIC.findall(line)]
    if not figures:  # a language model's evaluation
        figures, is_val = _WORDS.findall(line), True
        if (seconds := _EVAL_SECONDS.search(line)) and number(seconds[1]) >= 0:
            facts.val_seconds = number(seconds[1])
    _add_figures(reading, facts, "val" if is_val else "train", figures)
    if is_val:
        facts.evaluated = time


def _add_figures(reading: _Reading, facts: LogEpoch, part: str, figures: Sequence[tuple[str, str]]) -> None:
    """Add metrics of training or validation to an epoch."""
    values = facts.val if part == "val" else facts.train
    for metric, text in figures:
        kind, value = reading.figure(part, metric), number(text)
        if math.isfinite(value) and (kind not in ("", "perplexity") or metric in reading.others):
            values.setdefault(f"{metric}=", []).append(value)  # as the log calls it, for format_epochs
        value = value if kind == "loss" else score(metric, text)
        if kind in ("top1", "top5", "loss") and math.isfinite(value):
            values.setdefault(kind, []).append(value)
        elif kind in ("top1", "loss"):
            name = "validation" if part == "val" else "training"
            reading.run.notice(f"the {name} {metric} of epoch {facts.number + 1} is {text[:20]}")


def _settle(reading: _Reading) -> None:
    """Count the workers, join their log lines, and derive the updates of an epoch."""
    run = reading.run
    per_epoch = [len(facts.seconds) or len(facts.train.get("top1", ())) for facts in run.epochs.values()]
    # Loggers of one worker may have several names, too: those count that wrote an epoch's time, as each worker does.
    run.num_workers = max(1, len(reading.timed or reading.logging), *per_epoch)
    first = run.epochs[min(run.epochs)]
    if math.isfinite(first.ended) and first.seconds:
        run.began = min(run.began, first.ended - first.training_seconds)
    groups: dict[tuple[int, float], list[LogPoint]] = {}
    for point in sorted(run.points, key=lambda point: (point.epoch, point.batch)):
        groups.setdefault((point.epoch, point.batch), []).append(point)
    lr = run.settings.get("optim.lr")
    run.points = []
    factor = 1 if reading.is_ranked and not reading.has_ranked_speeds else run.num_workers
    for (epoch, batch), points in groups.items():
        point = LogPoint(epoch, batch, lr=float(lr) if isinstance(lr, int | float) else NAN)
        for name in ("loss", "top1", "lr", "images_per_second", "time"):
            known = [value for each in points if math.isfinite(value := getattr(each, name))]
            if known:
                setattr(point, name, fmean(known) * (factor if name == "images_per_second" else 1))
        run.points.append(point)
    shown = max((point.batch for point in run.points), default=0.0)
    between = [b.batch - a.batch for a, b in pairwise(run.points) if a.epoch == b.epoch]
    name, layers = str(run.settings.get("model.name", "")), whole(run.settings.get("num_layers"), 10_000)
    if layers and name.startswith(tuple(FAMILIES)) and not re.search(r"\d\d", name):  # others have one depth
        run.settings["model.name"] = f"{name}-{layers}"
    batch_size, examples = whole(run.settings.get("batch_size")), whole(run.settings.get("num_examples"))
    if batch_size and (num_gpus := run.settings.get("num_gpus")) is not None:  # Gluon's scripts have it for each GPU
        run.batch_size = batch_size = batch_size * (whole(num_gpus, 10**6) or 1) * run.num_workers
    if batch_size and examples:
        updates = examples / batch_size / run.num_workers
        if not shown or shown - 1 <= updates <= shown + max(between, default=shown) + 1:  # else another data set's
            run.steps_per_epoch, run.batch_size = max(1.0, updates), batch_size * run.num_workers
    if reading.others:
        losses = {name for (_, kind), name in reading.shown.items() if kind == "loss"}
        is_loss = losses and any(kind_of(name) == "loss" for name in reading.others)
        which = f" (the loss that is shown is {' and '.join(sorted(losses))})" if is_loss else ""
        run.notice(f"metrics that are not shown: {', '.join(sorted(reading.others))}{which}")
    if reading.overlaps and run.num_workers > 1:
        run.notice("the workers were in different epochs at a time, as in asynchronous training")
    if reading.is_language:
        run.notice("this is the log of a language model, which counts perplexity: samples are words, and none is right")


def format_epochs(run: LogRun, metrics: Sequence[str], *, markdown: bool = True) -> str:
    """Write the epochs of a log as MXNet's ``parse_log.py`` printed them: means over the workers, seconds of training.

    Args:
        run: of MXNet.
        metrics: names as the log has them, such as ``accuracy``; what an epoch lacks is ``nan``.
        markdown: or with tabs between the columns (``--format none``).

    Raises:
        InputError: no epoch has one of the metrics.

    >>> epoch = LogEpoch(0, {"accuracy=": [0.25]}, {"accuracy=": [0.5, 0.75]}, seconds=[70.12])
    >>> run = LogRun("MXNet", epochs={0: epoch})
    >>> print(format_epochs(run, ["accuracy"]))
    | epoch | train-accuracy | val-accuracy | time |
    | --- | --- | --- | --- |
    |  1 | 0.250000 | 0.625000 | 70.1 |
    """
    parts = [part for facts in run.epochs.values() for part in (facts.train, facts.val)]
    known = dict.fromkeys(name.removesuffix("=") for part in parts for name in part if name.endswith("="))
    for metric in metrics:
        if metric not in known:
            available = f"it has {', '.join(known)}" if known else "it has none: steady report shows what there is"
            raise InputError(f"{run.directory} has no metric {metric!r}: {available}.{did_you_mean(metric, known)}")
    names = [f"{part}-{metric}" for part in ("train", "val") for metric in metrics]
    rows = [["epoch", *names, "time"], ["---"] * (len(names) + 2)] if markdown else [["epoch", *names, "time"]]
    for epoch, facts in sorted(run.epochs.items()):
        means = [facts.mean(part, f"{metric}=") for part in ("train", "val") for metric in metrics]
        rows.append([f"{epoch + 1:2d}", *(f"{value:f}" for value in means), f"{facts.training_seconds:.1f}"])
    return "\n".join(f"| {' | '.join(row)} |" if markdown else "\t".join(row) for row in rows)
