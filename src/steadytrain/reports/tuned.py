"""Evidence for a tuned recipe: the measurements, as a table and curves, and the choices with their reasons.

``steady tune`` writes this evidence into the recipe file, training keeps it with the run, and reports show it.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steadytrain.config import Recipe
from steadytrain.config.defaults import COMMENT_WIDTH, usual_recipe, write_toml
from steadytrain.config.plain import leaves, plain, to_toml
from steadytrain.errors import RecipeError
from steadytrain.events import refuse_link
from steadytrain.files import read_text, replace_file
from steadytrain.format import clean, count, duration, rate, size, text_table, wrap
from steadytrain.reports.plots import Panel, svg
from steadytrain.run import Run

Count = Annotated[int, Meta(ge=1, le=2**40)]
Figure = Annotated[float, Meta(ge=0, le=1e18)]


@dataclass(frozen=True)
class Choice:
    """A key of the recipe, its value (None, which TOML lacks, is left out there), and why."""

    key: str
    value: Any = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement: ``what`` (``updates``, ``loading``, ``both`` together), how, and the outcome.

    Args:
        batch_size: images of an update.
        precision, compile: how updates were computed.
        threads: of the loader; None: the default.
        images_per_second: 0 where it failed.
        memory_bytes: the most that was in use.
        error: what went wrong, a line; empty where nothing did.
    """

    what: str
    batch_size: Count
    precision: str
    compile: str
    threads: int | None = None
    images_per_second: Figure = 0.0
    memory_bytes: Figure | None = None
    error: str = ""

    def words(self) -> str:
        """Describe the measurement in a line."""
        parts = [f"{self.what} of {self.batch_size}", self.precision]
        parts += [] if self.compile == "none" else ["compiled"]
        parts += [] if self.what == "updates" or self.threads is None else [count(self.threads, "loader thread")]
        return f"{', '.join(parts)}: {clean(self.error) or f'{rate(self.images_per_second)} images/s'}"


@dataclass(frozen=True, kw_only=True)
class TuningEvidence:
    """The measurements and choices of a tuning.

    Args:
        batch_size, threads, precision: chosen: images of one process, and the loader's threads.
        choices: each with its reason.
        missing: what the time was too short for.
        default_rate, tuned_rate: images per second of loading and updates together; None: not measured.
        seconds: that it took.
        on: machine, versions and day, in words.
    """

    batch_size: Count
    threads: int | None = None
    precision: str
    choices: tuple[Choice, ...] = ()
    missing: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    default_rate: Figure | None = None
    tuned_rate: Figure | None = None
    seconds: Figure = 0.0
    on: str = ""

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
        """Build it from plain data; keys of older versions are left out. Raises RecipeError where a value cannot be."""
        try:
            return msgspec.convert(values, TuningEvidence)
        except msgspec.ValidationError as error:
            raise RecipeError(f"tuning is not what steady tune writes ({error}): leave the table out") from error


def _changed(part: Any) -> dict[str, Any]:
    """Return the fields of a part that are not as they are by default."""
    return {field.name: value for field in fields(part) if (value := getattr(part, field.name)) != field.default}


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
    if evidence.gain is None:
        return f"{words}; the recipe as it was has not been measured."
    return f"{words}, {evidence.gain:.2f} times the {rate(evidence.default_rate)} of the recipe as it was."


def remarks(evidence: TuningEvidence) -> list[str]:
    """Say what was left unmeasured for lack of time."""
    missing = ", ".join(dict.fromkeys(evidence.missing))
    return [f"The time was too short for: {missing}. The same command measures on."] if missing else []


def recipe_file(recipe: Recipe, evidence: TuningEvidence, *, finetune: bool, small: bool, name: str) -> str:
    """Return the recipe as TOML, each choice with its reason in a comment above it, and the evidence at the end.

    Args:
        recipe: the tuned recipe.
        finetune: whether it is for ``steady finetune``.
        small: whether its images are small, which have other defaults.
        name: of the file, for the command in its header.
    """
    usual = usual_recipe(str(recipe.data.train), model=recipe.model.name, finetune=finetune, small=small)
    reasons = {choice.key: clean(choice.reason) for choice in evidence.choices}
    lines, unwritten = write_toml(recipe, usual, reasons)
    verb = "finetune" if finetune else "train"
    command = f"steady {verb} --recipe {shlex.quote(name)}" + "".join(f" --set {key}=none" for key in unwritten)
    machine, _, versions = evidence.on.partition("; ")
    device, _, day = machine.rpartition(", ")
    head = [
        f"# {clean(recipe.model.name)} tuned for {clean(device)}, on {day}.",
        f"# {versions}; {duration(evidence.seconds)}.",
        *_comment(gain_text(evidence)),
        "#",
        f"#   {command}",
    ]
    for remark in remarks(evidence):
        head += ["#", *_comment(remark)]
    about = "# What was measured, for the report of the run: training reads nothing of it."
    return "\n".join([*head, "", *lines, "", about, *evidence.to_toml(), ""])


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(clean(text), COMMENT_WIDTH)]


def measurement_rows(evidence: TuningEvidence) -> list[list[str]]:
    """Format the measurements: the heads, then a line for each."""
    rows = [["measured", "batch", "precision", "compile", "threads", "images/s", "memory", ""]]
    for item in evidence.measurements:
        rows.append(
            [
                item.what,
                str(item.batch_size),
                item.precision,
                item.compile,
                "-" if item.what == "updates" else str(item.threads or "-"),
                rate(item.images_per_second) if item.images_per_second else "-",
                size(item.memory_bytes) if item.memory_bytes else "-",
                clean(item.error),
            ]
        )
    return rows


FIGURES = (1, 4, 5, 6)
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


def panels(evidence: TuningEvidence) -> list[Panel]:
    """Draw the charts of a tuning: updates by batch for each way to compute, and both together by threads."""
    curves: dict[str, dict[int, float]] = {}
    by_threads: dict[int, float] = {}
    for item in evidence.measurements:
        if item.what == "updates" and item.images_per_second:
            way = item.precision if item.compile == "none" else f"{item.precision}, compiled"
            curves.setdefault(way, {})[item.batch_size] = item.images_per_second
        is_chosen = (item.batch_size, item.precision) == (evidence.batch_size, evidence.precision)
        if item.what == "both" and item.images_per_second and item.threads is not None and is_chosen:
            by_threads[item.threads] = item.images_per_second
    charts = []
    for way, curve in curves.items():
        chosen = evidence.batch_size if way == evidence.precision else None
        charts.append(_chart(f"images/s of updates ({way})", "batch", curve, chosen))
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
