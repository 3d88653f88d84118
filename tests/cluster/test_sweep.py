"""``steady sweep`` on other machines comes to the table of the same sweep on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.test_sweep import RECIPE, command, results
from tests.cluster.machines import Slurm
from tests.cluster.trained import wait_until

from steadytrain.events import Ended
from steadytrain.run import Run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_sweep_is_an_array_whose_table_the_same_command_reads(slurm: Slurm, digits: Path, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "sweep"
    recipe.write_text(RECIPE)
    words = ["--over", "lr=1e-6,1e-5,0.05", "--halving"]

    def sweep(*more: str, to: Path = folder) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "steadytrain", *command(recipe, digits, to, *words, *more)],
            env={**os.environ, **slurm.variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def wait_for_array() -> None:
        number, end = json.loads((folder / "slurm.json").read_text())["job"], time.monotonic() + 200
        while slurm.tell(["squeue", "--noheader", "--states", "all", "--jobs", number, "--format", "%T"]).split():
            states = set(slurm.tell(["squeue", "--noheader", "--jobs", number, "--format", "%T"]).split())
            if not states:
                return
            assert time.monotonic() < end, states
            time.sleep(0.5)

    assert "submitted 3 runs as array job" in sweep("--on", "slurm", "--parallel", "2")
    assert "is not finished, " in sweep("--on", "slurm", "--parallel", "2")
    wait_for_array()
    assert "submitted 1 run as array job" in sweep("--on", "slurm", "--parallel", "2")
    wait_for_array()
    assert "submitted" not in sweep("--on", "slurm", "--parallel", "2")
    sweep(to=tmp_path / "here")
    assert results(folder) == results(tmp_path / "here")


def test_a_task_saves_before_its_time_is_up_and_is_queued_again(slurm: Slurm, digits: Path, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "sweep"
    recipe.write_text(RECIPE)
    (tmp_path / "job.toml").write_text("minutes = 1\n[slurm]\nsignal_seconds = 30\n")
    words = ["--over", "lr=0.05", "--seeds", "2", "--epochs", "100000", "--on", "slurm", "--job", "job.toml"]
    subprocess.run(
        [sys.executable, "-P", "-m", "steadytrain", *command(recipe, digits, folder, *words)],
        env={**os.environ, **slurm.variables},
        cwd=tmp_path,
        check=True,
    )
    number, runs = json.loads((folder / "slurm.json").read_text())["job"], [*folder.glob("*/*/recipe.json")]
    try:
        wait_until(lambda: min(Run.open(path.parent).progress().attempt for path in runs) > 1, "new starts", 300)
    finally:
        slurm.tell(["scancel", number])
    for path in runs:
        ended = [event.status for event in Run.open(path.parent).events() if isinstance(event, Ended)]
        assert ended[0] == "preempted" and len(runs) == 2
