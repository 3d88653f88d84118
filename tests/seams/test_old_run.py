"""A run folder of November 2026 is read, reported on, diagnosed, watched, evaluated and resumed by what came later.

``golden/run-2026-11`` was made on two cores by ``steady train marks.rec --run run --model mlp --procs 2`` and the like:
preempted by SIGTERM in its first attempt, which one process made and which began with ``--probe``; resumed by two
ranks, and killed together with them. The name of the machine was replaced.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.seams.frozen import Frozen, digest, first_difference, shape
from tests.seams.product import steady

import steadytrain as st
from steadytrain.config.plain import leaves

WORDS = ["--model", "mlp", "--set", "model.options.hidden=8", "--epochs", 2000, "--batch-size", 480, "--lr", 0.05]
WORDS += ["--device", "cpu", "--threads", 1, "--precision", "fp32"]
SET = ["optim.ema=0.9", "every.save_steps=50", "every.log_steps=10", "parallel.compute_threads=1", "data.pad=1"]
SET += ["data.holdout=0.2", "every.evaluate_epochs=250", "every.keep=1"]
WORDS += [word for setting in SET for word in ("--set", setting)]


@pytest.fixture
def old(work: Path, golden: Path) -> Path:
    """A copy of the folder, in the working directory: ``run``, beside its data."""
    shutil.copytree(golden / "run-2026-11", work, dirs_exist_ok=True)
    return Path("run")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_line_of_its_log_is_read_as_what_it_was(rank: int, old: Path) -> None:
    """Kinds may have other names by now; their fields and values are the same, but for those that nothing reads."""
    path = old / ("events-1.jsonl" if rank else "events.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    events = list(st.Run.open(old).events(rank))
    assert len(events) == len(lines)
    for event, line in zip(events, lines, strict=True):
        for field in line.keys() - {"v", "kind", "per_thread"}:
            assert json.loads(json.dumps(getattr(event, field))) == line[field], (line["kind"], field)


def test_its_recipe_keeps_its_name(old: Path, frozen: Frozen) -> None:
    recipe = st.Run.open(old).recipe
    frozen("old run/digest", recipe.digest)
    again = recipe.to_dict()
    was = json.loads((old / "recipe.json").read_text())
    was["precision"].pop("blocked")
    again["precision"].pop("blocked", None)
    was["parallel"].pop("threshold")
    for key, neutral in leaves(st.Recipe(data=st.Data(train="x"), model=st.Model("x")).to_dict()):
        part, _, name = key.rpartition(".")
        if part and name not in was[part]:
            assert again[part].pop(name) == neutral
    assert first_difference(was, json.loads(json.dumps(again)), "recipe") is None


def _ends(rows: list[Any]) -> list[Any]:
    """The first and last of many rows, and the digest of all."""
    return [*rows[:3], digest(json.dumps(rows).encode()), *rows[-2:]]


def test_its_report(old: Path, frozen: Frozen) -> None:
    document = steady("report", old, "--json").document
    (run,) = document["runs"]
    frozen("old run/report", {**run, "per_epoch": _ends(run["per_epoch"])})
    steady("report", old, "-o", "report.csv")
    frozen("old run/report.csv", _ends(Path("report.csv").read_text().splitlines()))
    frozen("old run/report.md", _ends(steady("report", old, "-o", "-").out.splitlines()))
    page = st.report([old], "page.html").read_text()
    assert "mlp" in page and "<script src" not in page


def test_its_diagnosis_and_ledger(old: Path, frozen: Frozen) -> None:
    frozen("old run/diagnose", steady("diagnose", old, "--json").document)
    frozen("old run/diagnose text", steady("diagnose", old, "--all").out.splitlines())
    ledger: Any = st.ledger(st.Run.open(old))
    figures = steady("diagnose", old, "--json").document["ledger"]
    assert dict(ledger.seconds) == figures["seconds"] and ledger.wall_seconds == figures["wall_seconds"]


def test_its_watch_page(old: Path, frozen: Frozen) -> None:
    document = steady("watch", old, "--json", "--seconds", 0).document
    frozen("old run/watch", shape(document, loose=["moment"]))


def test_its_best_weights_are_evaluated(old: Path, frozen: Frozen) -> None:
    document = steady("evaluate", old, "--weights", "best", "--device", "cpu", "--json").document
    assert (document["n"], document["top1"]) == (25, 0.84)
    frozen.bits("old run/evaluate", document["loss"])


def test_the_same_command_finishes_it(old: Path, frozen: Frozen) -> None:
    answer = steady("train", "marks.rec", "--run", old, *WORDS, "--json")
    (run,) = answer.document["runs"]
    assert (run["status"], run["steps_done"], run["attempts"]) == ("finished", 396, 3)
    frozen.bits("old run/last loss", run["last"]["loss"])
    content = (old / "model.safetensors").read_bytes()
    frozen.bits("old run/weights", digest(content[8 + int.from_bytes(content[:8], "little") :]))
    assert "resumed step=300" in answer.err
    diagnosis = steady("diagnose", old, "--json").document
    assert diagnosis["ledger"]["steps"] == 396 and diagnosis["ledger"]["seconds"]["lost"] > 0
