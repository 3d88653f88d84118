"""A rule of the verdict that another package adds: one file, and the line of its metadata that names it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.seams.product import STEADY, Answer

GOLDEN = Path(__file__).parents[1] / "golden" / "run-2026-11" / "run"
RULE = """
from steadytrain.monitor.rules import Cause, VerdictRule


def short_runs(evidence):
    if evidence.ledger.steps < 1000:
        updates = evidence.ledger.steps
        sentence = f"The run has only {updates} updates."
        yield Cause(name="few_updates", share=0.9, sentence=sentence, change="--epochs 1000", saves=0.5)


RULE = VerdictRule("short_runs", short_runs, explains={"few_updates": ("startup",)}, slows={"few_updates": "updates"})
"""


def diagnose(folder: Path, *words: str, code: str = RULE) -> Answer:
    """Run ``steady diagnose`` where a package with a rule is installed."""
    (folder / "my_rule.py").write_text(code)
    about = folder / "my_rule-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rule\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[steadytrain.rules]\nshort_runs = my_rule:RULE\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [*STEADY, "diagnose", str(GOLDEN), *words]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)


def test_a_rule_in_one_file_is_a_part_of_the_verdict(tmp_path: Path) -> None:
    answer = diagnose(tmp_path, "--json")
    assert answer.code == 0, answer.err
    causes = {cause["name"]: cause for cause in answer.document["causes"]}
    assert next(iter(causes)) == "few_updates"
    assert answer.document["ceiling"]["without"] in ("", "few_updates")
    assert "The run has only" in diagnose(tmp_path).out


@pytest.mark.parametrize(
    ("code", "why"),
    [("import nothing_of_the_kind\n", "cannot be loaded"), ("RULE = 3\n", "is of type int; it must be a VerdictRule")],
)
def test_a_rule_that_cannot_be_used_is_named_and_ours_give_the_verdict(tmp_path: Path, code: str, why: str) -> None:
    answer = diagnose(tmp_path, code=code)
    assert answer.code == 0 and "my_rule:RULE" in answer.err and why in answer.err and answer.out
    assert "Traceback" not in answer.err
