"""A training for each test of a cluster, and the one that all of them are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.machines import run
from tests.cluster.trained import Training, prepare


@pytest.fixture
def training(data_folder: Path, tmp_path: Path) -> Training:
    """A training for one test, whose processes end with it."""
    return prepare(data_folder, tmp_path, "run")


@pytest.fixture(scope="session")
def reference(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The training that steady itself started two ranks for; every other one is compared with it."""
    training = prepare(data_folder, tmp_path_factory.mktemp("reference"), "run")
    run(training.command("--procs", "2"), more=training.variables)
    training.require_each_once(ranks=2)
    return training
