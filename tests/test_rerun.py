"""``benchmarks/rerun.py``: README's figures are read out of the records, and what differs here is said so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def rerun() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module("rerun")
    for name in [name for name in sys.modules if name in ("rerun", "machine") or name.split(".")[0] == "peers"]:
        sys.modules.pop(name)


def test_each_row_finds_its_figures_in_the_record_that_readme_states(rerun: ModuleType) -> None:
    found = {name: row.figures(rerun.readme_record(name)) for name, row in rerun.ROWS.items()}
    rounded = {name: [round(value, 2) for value in figures.values()] for name, figures in found.items()}
    assert rounded == {
        "loader": [1.27, 2.54],
        "train": [1.58, 1.27, 0.88, 1.7],
        "kills": [1.0, 1.0],
        "serve": [0.94, 0.3, 0.54],
        "verdict": [0.94],
    }


def test_what_differs_by_more_than_a_fifth_is_said_so(rerun: ModuleType) -> None:
    lines = rerun.table(
        {"train": {"resnet20, over MXNet": 1.5, "resnet20, over a plain PyTorch loop": 2.0}}
    ).splitlines()
    assert "differs" not in lines[2] and lines[2].startswith("| train | resnet20, over MXNet | 1.5 | 1.58 (2026-")
    assert lines[3].endswith("| 1.57 **differs** |")


def test_a_row_that_cannot_be_measured_is_named_with_its_remedy(
    rerun: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerun, "shutil", SimpleNamespace(which=lambda name: None))
    setting = rerun.Setting(None, tmp_path, tmp_path, quick=True, peers=False)
    assert rerun.run(["loader", "serve"], setting) == {}
    assert setting.missing == [
        "row loader: needs imagenet-sample-200.tar in --data, or --photos FOLDER",
        "row serve: needs wrk: apt install wrk",
    ]


def test_faults_are_injected_where_the_code_is() -> None:
    """In a process of its own: they change modules. A function that was renamed would fail at the hour of measuring."""
    code = (
        "from faults.patches import PATCHES\n"
        "for of in ('decode', 'augment', 'gather', 'read', 'optimizer'):\n"
        "    PATCHES['slowed']({'of': of, 'how': 'sleep', 'seconds': 0.0, 'begin': 0.0, 'end': 1.0})\n"
        "for name in ('slow_decoder', 'waiting_decoder', 'slow_augmentation', 'waiting_gather', 'far_source',\n"
        "             'epoch_gap', 'slow_disk', 'slow_log', 'slow_updates'):\n"
        "    PATCHES[name](0.0)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, check=True)
