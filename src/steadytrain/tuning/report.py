"""The results of a tuning: a recipe file with the reasons, a table of the measurements, and data for JSON."""

from __future__ import annotations

import json
import shlex
import textwrap
from dataclasses import asdict
from typing import Any

from steadytrain.config.defaults import COMMENT_WIDTH, SMALL, usual_recipe, write_toml
from steadytrain.config.plain import plain
from steadytrain.format import clean, count, duration, rate, size, text_table, wrap
from steadytrain.tuning.trials import Trial
from steadytrain.tuning.tune import Tuned


def trial_text(trial: Trial) -> str:
    """Describe a measurement in a line."""
    setting = trial.setting
    parts = [f"{trial.what} of {setting.batch_size}", setting.precision]
    parts += [] if setting.compile == "none" else ["compiled"]
    has_loader = trial.what != "updates" and setting.threads is not None
    parts += [count(setting.threads or 0, "loader thread")] if has_loader else []
    result = clean(trial.outcome.failure) or f"{rate(trial.outcome.images_per_second)} images/s"
    return f"{', '.join(parts)}: {result}"


def gain_text(tuned: Tuned) -> str:
    """Describe how fast the tuned recipe is, and how fast it was before."""
    if tuned.tuned_rate is None:
        return "Loading and updates were not measured together."
    words = f"{rate(tuned.tuned_rate)} images/s of loading and updates together"
    if tuned.gain is None:
        return f"{words}; the recipe as it was has not been measured."
    return f"{words}, {tuned.gain:.2f} times the {rate(tuned.default_rate)} of the recipe as it was."


def missing_text(tuned: Tuned) -> str:
    """Say what was left unmeasured for lack of time; empty where nothing was."""
    missing = ", ".join(dict.fromkeys(tuned.missing))
    return f"The time was too short for: {missing}. The same command measures on." if missing else ""


def recipe_file(tuned: Tuned, *, finetune: bool, name: str) -> str:
    """Return the recipe as TOML, each choice with its reason in a comment above it.

    Args:
        finetune: whether the recipe is for ``steady finetune``.
        name: of the file, for the command in its header.
    """
    recipe, small = tuned.recipe, tuned.facts["largest_side"] <= SMALL
    usual = usual_recipe(str(recipe.data.train), model=recipe.model.name, finetune=finetune, small=small)
    reasons = {choice.key: clean(choice.reason) for choice in tuned.choices}
    lines, unwritten = write_toml(recipe, usual, reasons)
    verb = "finetune" if finetune else "train"
    command = f"steady {verb} --recipe {shlex.quote(name)}" + "".join(f" --set {key}=none" for key in unwritten)
    versions = ", ".join(f"{name} {version}" for name, version in tuned.facts["versions"].items())
    head = [
        f"# {clean(recipe.model.name)} tuned for {clean(tuned.machine)}, on {tuned.day}.",
        f"# {versions}; {duration(tuned.seconds)}.",
        *_comment(gain_text(tuned)),
        "#",
        f"#   {command}",
    ]
    if missing := missing_text(tuned):
        head += ["#", *_comment(missing)]
    return "\n".join([*head, "", *lines, ""])


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(clean(text), COMMENT_WIDTH)]


def table(tuned: Tuned, width: int) -> str:
    """Format measurements, choices with their reasons and the gain, in lines of at most ``width`` columns."""
    rows = [["measured", "batch", "precision", "compile", "threads", "images/s", "memory"]]
    errors = [""]
    for trial in tuned.trials:
        setting, speed = trial.setting, trial.outcome.images_per_second
        threads = "-" if trial.what == "updates" else str(setting.threads or "-")
        memory = trial.outcome.figures.get("memory_bytes")
        cells = [trial.what, str(setting.batch_size), setting.precision, setting.compile, threads]
        rows.append([*cells, rate(speed) if speed else "-", size(memory) if memory else "-"])
        errors.append(clean(trial.outcome.failure))
    lines = []
    for line, error in zip(text_table(rows, right=(1, 4, 5, 6)).splitlines(), errors, strict=True):
        fits = len(line) + 2 + len(error) <= width
        lines += [f"{line}  {error}".rstrip()] if fits else [line, *wrap(error, width, "    ")]
    lines.append("")
    for choice in tuned.choices:
        value = choice.value if isinstance(choice.value, str) else json.dumps(choice.value)
        lines += wrap(f"{choice.key} = {value}: {choice.reason}", width, "", "    ")
    lines += ["", *wrap(gain_text(tuned), width, "")]
    lines += wrap(missing, width, "") if (missing := missing_text(tuned)) else []
    return "\n".join(lines)


def document(tuned: Tuned) -> dict[str, Any]:
    """Convert a tuning to plain data for JSON."""
    return {
        "recipe": tuned.recipe.to_dict(),
        "choices": [plain(choice) for choice in tuned.choices],
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
