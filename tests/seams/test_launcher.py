"""A launcher of another package is one file: it is chosen, set and shown like ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from steadytrain.cli import main

LAUNCHER = """
from dataclasses import dataclass

from steadytrain.launch import Command, Job, Launcher, Plan, PlanStage


@dataclass(frozen=True, kw_only=True)
class Grid:
    queue: str = "all.q"


def render(job: Job) -> Plan:
    argv = ("qsub", "-q", job.options_of(Grid).queue, "-t", f"1-{job.size}", job.python, *job.program)
    return Plan(stages=(PlanStage(kind="submit", commands=(Command(argv=argv),)),))


LAUNCHER = Launcher(render=render, takes={"minutes"}, options=(Grid,), names=("sge",))
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one file and one entry point."""
    about = tmp_path / "grid_engine-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: grid-engine\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[steadytrain.launchers]\ngrid = grid_engine:LAUNCHER\n")
    (tmp_path / "grid_engine.py").write_text(LAUNCHER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["grid", "sge"])
def test_a_launcher_in_one_file_renders_a_job_with_its_own_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--on", name, "--procs", "4", "--set", "grid.queue=gpu.q", "--set", "gpus=2", "--dry-run", "--json"]
    assert main(["launch", *words, "--", "train", "/data/a.rec"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["on"] == "grid" and plan["ranks"] == 4
    assert plan["stages"][0]["commands"][0]["argv"][:5] == ["qsub", "-q", "gpu.q", "-t", "1-4"]
    assert plan["notes"] == ["gpus: not used by grid"]


def test_its_options_and_its_name_are_checked_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--on", "grid", "--set", "grid.que=a", "--dry-run", "--", "train", "/data/a.rec"]) == 2
    assert "unknown key 'grid.que'. Did you mean queue?" in capsys.readouterr().err
    assert main(["launch", "--on", "grit", "--dry-run", "--", "train", "/data/a.rec"]) == 2
    assert "unknown launcher 'grit'" in (error := capsys.readouterr().err) and "Did you mean grid?" in error


def test_a_broken_package_is_named_where_it_is_asked_for_and_breaks_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid_engine.py").write_text("import nothing_of_the_kind\n")
    sys.modules.pop("grid_engine", None)
    assert main(["launch", "--on", "slurm", "--dry-run", "--", "train", "/data/a.rec"]) == 0
    capsys.readouterr()
    assert main(["launch", "--on", "grid", "--dry-run", "--", "train", "/data/a.rec"]) == 2
    error = capsys.readouterr().err
    assert "the launcher grid cannot be used: grid_engine:LAUNCHER cannot be loaded" in error
