"""Evidence for a tuned recipe: the measurements, as a table and curves, and the choices with their reasons.

``steady tune`` writes this evidence into the recipe file, training keeps it with the run, and reports show it.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from steadytrain.config.plain import build, check_types, leaves, plain, shorten, to_toml
from steadytrain.config.settings import require
from steadytrain.errors import RecipeError
from steadytrain.events import refuse_link
from steadytrain.files import read_text, replace_file
from steadytrain.format import clean, count, percent, rate, size, text_table, wrap
from steadytrain.reports.plots import Panel, svg
from steadytrain.run import Run

WAITED_SHARE = 0.05
"""Share of the time that a thread may wait for processors which others use; above it the figures are disturbed."""


@dataclass(frozen=True)
class Choice:
    """A key of the recipe, its value, and why."""

    key: str
    value: Any
    reason: str

    def __post_init__(self) -> None:
        check_types(self, "tuning.choices")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement: ``what`` (``updates``, ``loading``, ``both`` together, the learning ``rate``), how, the outcome.

    Args:
        batch_size: images of an update, in ``accumulate`` parts.
        precision, channels_last, compile: how updates were computed.
        threads: of the loader; None: the default.
        images_per_second: 0 where it failed.
        suggestion: the learning rate of a range test.
        memory_bytes: the most that was in use.
        waited_share: of the time, in which a thread was ready and others had the processors.
        is_settled: all images were kept decoded that would be.
        error: what went wrong, a line; empty where nothing did.
    """

    what: str
    batch_size: int
    precision: str
    channels_last: bool
    compile: str
    accumulate: int = 1
    threads: int | None = None
    images_per_second: float = 0.0
    suggestion: float | None = None
    memory_bytes: float | None = None
    waited_share: float = 0.0
    is_settled: bool = True
    error: str = ""

    def __post_init__(self) -> None:
        check_types(self, "tuning.measurements")
        for name in ("batch_size", "accumulate"):
            require(getattr(self, name) >= 1, f"tuning.measurements.{name}", getattr(self, name), "1 or more")

    def words(self) -> str:
        """Describe the measurement in a line."""
        parts = [f"{self.what} of {self.batch_size}", self.precision]
        parts += [] if self.channels_last else ["channels first"]
        parts += [] if self.compile == "none" else ["compiled"]
        parts += [] if self.what == "updates" or self.threads is None else [count(self.threads, "loader thread")]
        result = f"{rate(self.images_per_second)} images/s" if self.suggestion is None else f"{self.suggestion:g}"
        return f"{', '.join(parts)}: {clean(self.error) or result}"


@dataclass(frozen=True, kw_only=True)
class TuningEvidence:
    """The measurements and choices of a tuning.

    Args:
        batch_size, threads: chosen: images that go through the network at a time, and the loader's threads.
        ranks: that train together; every figure is one rank's, measured while the others did the same.
        precision, channels_last: chosen.
        choices: each with its reason.
        advice: what else would help.
        missing: what the time was too short for.
        default_rate, tuned_rate: images per second of loading and updates together; None: not measured.
        seconds: that it took.
        on: machine, versions and day, in words.
    """

    batch_size: int
    threads: int | None = None
    precision: str
    channels_last: bool
    choices: tuple[Choice, ...] = ()
    advice: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    default_rate: float | None = None
    tuned_rate: float | None = None
    seconds: float = 0.0
    on: str = ""
    ranks: int = 1

    def __post_init__(self) -> None:
        check_types(self, "tuning")

    @property
    def gain(self) -> float | None:
        """Speed over that of the recipe before; None: not measured."""
        if not self.default_rate or not self.tuned_rate:
            return None
        return self.tuned_rate / self.default_rate

    def to_toml(self) -> list[str]:
        """Write it as the table ``[tuning]`` of a recipe file."""
        lines = ["[tuning]"]
        for name, value in _changed(self).items():
            if name in ("choices", "measurements"):
                lines += [f"{name} = [", *(f"    {to_toml(_changed(row))}," for row in value), "]"]
            else:
                lines.append(f"{name} = {to_toml(value)}")
        return lines

    @staticmethod
    def from_dict(values: object) -> TuningEvidence:
        """Build it from plain data. Raises RecipeError where a key or a value cannot be."""
        if not isinstance(values, Mapping):
            raise RecipeError(f"tuning is {values!r}; it must be a table of keys and values")
        # A choice without a value is None, which TOML lacks; older versions tried foreach variants of the optimizer.
        choices = tuple(build(Choice, {"value": None, **row}, "tuning.choices") for row in _tables(values, "choices"))
        measurements = tuple(
            build(Measurement, {k: v for k, v in row.items() if k != "foreach"}, "tuning.measurements")
            for row in _tables(values, "measurements")
        )
        return build(TuningEvidence, {**values, "choices": choices, "measurements": measurements}, "tuning")


def _changed(part: Any) -> dict[str, Any]:
    """Return the fields of a part that are not as they are by default."""
    return {field.name: value for field in fields(part) if (value := getattr(part, field.name)) != field.default}


def _tables(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return a list of tables. Raises RecipeError where it is none."""
    items = values.get(name, ())
    if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
        raise RecipeError(f"tuning.{name} is {shorten(items)}; it must be a list of tables")
    return list(items)


def evidence_of(run: Run) -> TuningEvidence | None:
    """Read the evidence for a run's recipe; None if it was not tuned, or the file cannot be read."""
    try:
        return TuningEvidence.from_dict(json.loads(read_text(run.tuning)))
    except (OSError, ValueError, RecursionError):  # RecipeError is a ValueError
        return None


def keep_evidence(run: Run, evidence: TuningEvidence) -> None:
    """Write the evidence for a run's recipe into its folder. Raises StorageError, and RunError where it is a link."""
    refuse_link(run.tuning)
    replace_file(run.tuning, json.dumps(plain(evidence), indent=2) + "\n")


def gain_text(evidence: TuningEvidence) -> str:
    """Describe how fast the tuned recipe is, and how fast it was before."""
    if evidence.tuned_rate is None:
        return "Loading and updates were not measured together."
    words = f"{rate(evidence.tuned_rate)} images/s of loading and updates together"
    words += f" on each of {evidence.ranks} ranks, their exchange not counted" if evidence.ranks > 1 else ""
    if evidence.gain is None:
        return f"{words}; the recipe as it was has not been measured."
    return f"{words}, {evidence.gain:.2f} times the {rate(evidence.default_rate)} of the recipe as it was."


def remarks(evidence: TuningEvidence) -> list[str]:
    """Return the advice, and what was left unmeasured for lack of time."""
    if not evidence.missing:
        return list(evidence.advice)
    missing = ", ".join(dict.fromkeys(evidence.missing))
    return [*evidence.advice, f"The time was too short for: {missing}. The same command measures on."]


def measurement_rows(evidence: TuningEvidence) -> list[list[str]]:
    """Format the measurements: the heads, then a line for each."""
    rows = [["measured", "batch", "precision", "layout", "compile", "threads", "images/s", "memory", ""]]
    for item in evidence.measurements:
        notes = [item.error] if item.error else []
        waited = item.waited_share
        notes += [f"waited {percent(waited)} for processors"] if waited > WAITED_SHARE else []
        notes += [] if item.is_settled else ["images were still being decoded"]
        rows.append(
            [
                item.what,
                f"{item.batch_size}{'' if item.accumulate == 1 else f' / {item.accumulate}'}",
                item.precision,
                "NHWC" if item.channels_last else "NCHW",
                item.compile,
                "-" if item.what == "updates" else str(item.threads or "-"),
                rate(item.images_per_second) if item.images_per_second else "-",
                size(item.memory_bytes) if item.memory_bytes else "-",
                clean("; ".join(notes)),
            ]
        )
    return rows


FIGURES = (1, 5, 6, 7)
"""Columns of :func:`measurement_rows` that hold figures."""


def table(evidence: TuningEvidence, width: int) -> str:
    """Format the evidence in lines of at most ``width`` columns: each measurement, then the :func:`summary`."""
    rows, lines = measurement_rows(evidence), []
    for line, row in zip(text_table([row[:-1] for row in rows], right=FIGURES).splitlines(), rows, strict=True):
        lines.append(line)
        if len(line) + 2 + len(row[-1]) <= width:
            lines[-1] = f"{line}  {row[-1]}".rstrip()
        else:
            lines += wrap(row[-1], width, "    ")
    return "\n".join([*lines, "", *summary(evidence, width)])


def summary(evidence: TuningEvidence, width: int) -> list[str]:
    """Format the choices with their reasons and what they gain together, in lines of at most ``width`` columns."""
    lines = []
    for choice in evidence.choices:
        lines += wrap(f"{choice.key} = {_value(choice.value)}: {choice.reason}", width, "", "    ")
    for remark in ["", gain_text(evidence), *remarks(evidence)]:
        lines += wrap(remark, width, "") or [""]
    return lines


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value))


def _way(item: Measurement | TuningEvidence, compile: str = "none") -> str:
    compiled = "" if compile == "none" else ", compiled"
    return f"{item.precision}, channels {'last' if item.channels_last else 'first'}{compiled}"


def panels(evidence: TuningEvidence) -> list[Panel]:
    """Draw the charts of a tuning: updates by batch for each way to compute, and both together by threads."""
    curves: dict[str, dict[int, float]] = {}
    by_threads: dict[int, float] = {}
    for item in evidence.measurements:
        images, speed = item.batch_size // item.accumulate, item.images_per_second
        if item.what == "updates" and speed and item.accumulate == 1:
            curves.setdefault(_way(item, item.compile), {})[images] = speed
        is_chosen = (images, _way(item)) == (evidence.batch_size, _way(evidence))
        if item.what == "both" and speed and item.threads is not None and is_chosen:
            by_threads[item.threads] = speed
    charts = [
        _chart(f"images/s of updates ({way})", "batch", curve, evidence.batch_size if way == _way(evidence) else None)
        for way, curve in curves.items()
    ]
    charts.append(_chart("images/s of loading and updates", "loader threads", by_threads, evidence.threads))
    return [chart for chart in charts if len(chart.x) > 1]


def _chart(title: str, x_title: str, curve: Mapping[int, float], chosen: int | None) -> Panel:
    x = sorted(curve)
    marks = [(number, "chosen") for number in x if number == chosen]
    ticks = [(number, f"{number:,}") for number in x]
    speeds = [curve[number] for number in x]
    return Panel(title, x, [speeds], x_title, log_x=x_title == "batch", marks=marks, ticks=ticks)


def section(run: Run) -> dict[str, Any] | None:
    """Format the evidence for a run's recipe for its page; None if it was not tuned."""
    evidence = evidence_of(run)
    if evidence is None:
        return None
    values = dict(leaves(run.recipe.to_dict()))
    pictures = [
        {"title": panel.title, "source": f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"}
        for panel in panels(evidence)
        if (picture := svg([panel], title=panel.title))
    ]
    heads, *rows = measurement_rows(evidence)
    return {
        "intro": f"steady tune: {evidence.on}" if evidence.on else "by steady tune",
        "gain": gain_text(evidence),
        "choices": [_choice_cells(choice, values) for choice in evidence.choices],
        "remarks": remarks(evidence),
        "pictures": pictures,
        "heads": heads,
        "rows": rows,
        "figures": FIGURES,
    }


def _choice_cells(choice: Choice, values: Mapping[str, Any]) -> dict[str, str]:
    used = values.get(choice.key)
    differs = choice.key in values and used != choice.value
    other = f"this run has {_value(used)}" if differs else ""
    return {"key": choice.key, "value": _value(choice.value), "other": other, "reason": choice.reason}
