"""The results of a tuning: a recipe file with the reasons and the evidence, and plain data for JSON."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import asdict
from typing import Any

from steadytrain.config.defaults import COMMENT_WIDTH, SMALL, usual_recipe, write_toml
from steadytrain.config.plain import plain
from steadytrain.format import clean, duration
from steadytrain.reports.tuned import gain_text, remarks
from steadytrain.tuning.tune import Tuned


def recipe_file(tuned: Tuned, *, finetune: bool, name: str) -> str:
    """Return the recipe as TOML, each choice with its reason in a comment above it, and the evidence at the end.

    Args:
        tuned: the result.
        finetune: whether the recipe is for ``steady finetune``.
        name: of the file, for the command in its header.
    """
    recipe, evidence, small = tuned.recipe, tuned.evidence, tuned.facts["largest_side"] <= SMALL
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


def document(tuned: Tuned) -> dict[str, Any]:
    """Convert a tuning to plain data for JSON."""
    evidence = tuned.evidence
    return {
        "recipe": tuned.recipe.to_dict(),
        "choices": [plain(choice) for choice in evidence.choices],
        "advice": list(evidence.advice),
        "missing": list(evidence.missing),
        "default_images_per_second": evidence.default_rate,
        "tuned_images_per_second": evidence.tuned_rate,
        "gain": evidence.gain,
        "seconds": evidence.seconds,
        "facts": dict(tuned.facts),
        "trials": [
            {"what": trial.what, **asdict(trial.setting), **plain(vars(trial.outcome))} for trial in tuned.trials
        ],
    }
