"""Figures of an epoch as Gluon's, GluonCV's and Horovod's scripts write them, and what the names of metrics mean.

>>> line = parse_figures("train=0.41 val=0.45 loss=1.6 time: 28.0")
>>> line.train, line.val, line.seconds
([('accuracy', '0.41'), ('loss', '1.6')], [('accuracy', '0.45')], 28.0)
>>> parse_figures("validation: err-top1=0.72 err-top5=0.46").val
[('err-top1', '0.72'), ('err-top5', '0.46')]
>>> kind_of("err-top1"), score("err-top1", "0.75"), kind_of("acc@5"), kind_of("mae")
('top1', 0.25, 'top5', '')
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from steadytrain.interop.logs.run import NAN
from steadytrain.interop.logs.settings import fraction, number

# Names and blanks are bounded: so the time is linear in the length of a line, whatever it holds.
_TOKEN = re.compile(
    r"\b(?P<section>train(?:ing)?|val(?:id(?:ation)?)?|test(?:ing)?|eval(?:uation)?)\s{0,40}:\s{0,40}(?=[a-z])"
    r"|(?P<name>[a-z][\w@.\-]{0,99}(?: cost)?)\s{0,40}[:=]\s{0,40}"
    r"(?P<value>(?:[-+]?(?:\d[\w.+\-]*|\.\d+)|[-+]?(?:nan|inf)\b)%?)",
    re.IGNORECASE,
)
_PART = re.compile(r"(?:(train(?:ing)?)|val(?:id(?:ation)?)?|test|eval)(?:[-_ ](.+))?", re.IGNORECASE)
_SPEED, _SECONDS, _LR = ("speed", "throughput"), ("time", "time cost", "time_cost"), ("lr", "learning_rate")
_LOSSES = ("cross-entropy", "loss", "softmax-cross-entropy", "softmaxcrossentropyloss", "celoss", "nll-loss", "ce")
_SCORE = r"(?:acc(?:uracy)?|prec(?:ision)?|err(?:or)?)"
_TOP = re.compile(rf"(?:{_SCORE}[-_@]?)?(?:top[-_]?(?:k_accuracy_)?|@)?(?P<k>[15])(?:[-_]?{_SCORE})?")
_ERROR = re.compile(r"(?:^|[-_@]|\d)err(?:or)?(?:$|[-_@]|\d)")


@dataclass
class Figures:
    """Figures of a line: names of metrics with their values as text; seconds, images/s and rate are NaN if unknown."""

    train: list[tuple[str, str]] = field(default_factory=list)
    val: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = NAN
    images_per_second: float = NAN
    lr: float = NAN


def parse_figures(text: str) -> Figures:
    """Parse the text behind an epoch's number; a word such as ``validation:`` says whose the figures after it are."""
    figures = Figures()
    is_val = False
    for token in _TOKEN.finditer(text):
        if section := token["section"]:
            is_val = not section.lower().startswith("train")
            continue
        name, value = token["name"], token["value"]
        if name.lower() in _SPEED:
            figures.images_per_second = number(value)
        elif name.lower() in _LR:
            figures.lr = number(value)
        elif name.lower() not in _SECONDS:
            part = _PART.fullmatch(name)
            is_of_val = is_val if part is None else part[1] is None
            metric = name if part is None else part[2] or "accuracy"
            (figures.val if is_of_val else figures.train).append((metric, value))
        elif not is_val:
            figures.seconds = number(value)
    return figures


def kind_of(metric: str) -> str:
    """Return which of our figures a metric is (top1, top5, loss, perplexity); empty for others."""
    name = metric.lower()
    if name in ("accuracy", "acc", "err", "error"):
        return "top1"
    if (top := _TOP.fullmatch(name)) and not name.isdigit():
        return f"top{top['k']}"
    if name in ("ppl", "perplexity"):
        return "perplexity"
    return "loss" if name in _LOSSES else ""


def score(metric: str, text: str) -> float:
    """Return an accuracy as a fraction: what an error leaves of 1; NaN for what is none."""
    value = fraction(number(text), percents=text.rstrip(",;").endswith("%"))
    return round(1 - value, 12) if _ERROR.search(metric.lower()) else value
