"""The results of a tuning: evidence for reports, a recipe file with the reasons, and plain data for JSON."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from steadytrain.config.defaults import COMMENT_WIDTH, SMALL, usual_recipe, write_toml
from steadytrain.config.plain import plain
from steadytrain.format import clean, duration
from steadytrain.machine import facts
from steadytrain.reports.tuned import Measurement, TuningEvidence, gain_words, remarks
from steadytrain.tuning.tune import Trial, Tuned


def measurement(trial: Trial) -> Measurement:
    """Convert a trial to the measurement that reports show."""
    setting, figures = trial.setting, trial.outcome.figures
    return Measurement(
        what=trial.what,
        **asdict(setting),
        images_per_second=_short(trial.outcome.images_per_second),
        suggestion=figures.get("suggestion"),
        memory_bytes=figures.get("memory_bytes") and _short(figures["memory_bytes"]),
        waited_share=_short(figures.get("waited_share", 0.0)),
        is_settled=figures.get("is_settled", True),
        error="" if trial.outcome.trouble is None else trial.outcome.error or trial.outcome.trouble,
    )


def _short(value: float) -> float:
    """Round to five digits: no measurement has more.

    >>> _short(2227.630790495914), _short(375918592)
    (2227.6, 375920000.0)
    """
    return float(f"{value:.5g}")


def evidence(tuned: Tuned) -> TuningEvidence:
    """Convert a tuning to the evidence that reports show."""
    recipe, machine = tuned.recipe, facts.facts()
    device = machine["cpu"] if tuned.facts["device_type"] == "cpu" else tuned.facts["device"]
    versions = ", ".join(f"{name} {version}" for name, version in tuned.facts["versions"].items())
    day = datetime.now(UTC).date().isoformat()
    return TuningEvidence(
        batch_size=recipe.batch_size // recipe.optim.accumulate // tuned.ranks,
        threads=recipe.parallel.threads,
        precision=recipe.precision.name,
        channels_last=recipe.precision.channels_last,
        choices=tuned.choices,
        advice=tuned.advice,
        missing=tuned.missing,
        measurements=tuple(map(measurement, tuned.trials)),
        default_rate=tuned.default_rate and _short(tuned.default_rate),
        tuned_rate=tuned.tuned_rate and _short(tuned.tuned_rate),
        seconds=_short(tuned.seconds),
        ranks=tuned.ranks,
        on=f"{device}, {machine['cores']} cores, {day}; {versions}",
    )


def recipe_file(tuned: Tuned, *, finetune: bool, name: str) -> str:
    """Return the recipe as TOML, each choice with its reason in a comment above it, and the evidence at the end.

    Args:
        tuned: the result.
        finetune: whether the recipe is for ``steady finetune``.
        name: of the file, for the command in its header.
    """
    recipe, small = tuned.recipe, tuned.facts["largest_side"] <= SMALL
    usual = usual_recipe(str(recipe.data.train), model=recipe.model.name, finetune=finetune, small=small)
    reasons = {choice.key: clean(choice.reason) for choice in tuned.choices}
    lines, unwritten = write_toml(recipe, usual, reasons)
    verb, shown = "finetune" if finetune else "train", evidence(tuned)
    command = f"steady {verb} --recipe {shlex.quote(name)}" + "".join(f" --set {key}=none" for key in unwritten)
    machine, _, versions = shown.on.partition("; ")
    device, _, day = machine.rpartition(", ")
    head = [
        f"# {clean(tuned.recipe.model.name)} tuned for {clean(device)}, on {day}.",
        f"# {versions}; {duration(tuned.seconds)}.",
        *_comment(gain_words(shown)),
        "#",
        f"#   {command}",
    ]
    for remark in remarks(shown):
        head += ["#", *_comment(remark)]
    about = "# What was measured, for the report of the run: training reads nothing of it."
    return "\n".join([*head, "", *lines, "", about, *shown.to_toml(), ""])


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(clean(text), COMMENT_WIDTH)]


def document(tuned: Tuned) -> dict[str, Any]:
    """Convert a tuning to plain data for JSON."""
    return {
        "recipe": tuned.recipe.to_dict(),
        "choices": [plain(choice) for choice in tuned.choices],
        "advice": list(tuned.advice),
        "missing": list(tuned.missing),
        "default_images_per_second": tuned.default_rate,
        "tuned_images_per_second": tuned.tuned_rate,
        "gain": tuned.gain,
        "seconds": tuned.seconds,
        "facts": dict(tuned.facts),
        "trials": [
            {"what": trial.what, **asdict(trial.setting), **plain(vars(trial.outcome))} for trial in tuned.trials
        ],
    }
