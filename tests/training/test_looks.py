"""The verdict of a real run whose network sleeps."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steadytrain.config import Recipe
from steadytrain.monitor import Cause, diagnose
from steadytrain.run import Run
from steadytrain.training import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a thread waits for is read from /proc")

NETWORKS = """
import time, torch

class Sleepy(torch.nn.Sequential):
    def forward(self, x):
        if self.training:
            time.sleep(0.02)
        return super().forward(x)

def sleepy(num_classes, in_chans):
    return Sleepy(torch.nn.Flatten(), torch.nn.Linear(64 * in_chans, num_classes))
"""


def judged(recipe: Recipe, folder: Path, network: str, updates: int) -> Cause:
    """Train that network, and return the first cause that is not another process."""
    short = recipe.with_(
        {
            "data.size": 8,
            "budget.epochs": None,
            "budget.steps": updates,
            "every.save_minutes": 60.0,
            "every.log_steps": 50,
        }
    )
    run = Run.create(folder, short.with_({"model.name": network}))
    gc.collect()
    gc.freeze()  # what other tests have left in this process: a run searches it for garbage at its log lines
    train(run, allow_import=True)
    return next(cause for cause in diagnose(run).causes if cause.name not in ("noisy_neighbour", "nothing"))


def test_a_network_that_sleeps_is_told_so_by_file_and_line(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    write_module("sleepy_net", NETWORKS)
    cause = judged(recipe, tmp_path / "run", "sleepy_net:sleepy", 150)
    line = next(number for number, text in enumerate(NETWORKS.splitlines(), 1) if "time.sleep" in text)
    assert cause.name == "model_waits" and f"sleepy_net.py:{line})" in cause.sentence
