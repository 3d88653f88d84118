"""A law of the learning rate that another package adds: one file, chosen, checked and plotted like ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.seams.product import steady

LAW = """
import math

from steadytrain.config.laws import SHARE, Law, LawParameter


def share(span, step):
    to, waves = span.number("to"), span.stage.values["waves"]
    return to + (span.level - to) * (1 + math.cos(2 * math.pi * waves * span.passed(step))) / 2


WAVES = LawParameter(lambda value: value >= 1 and value % 1 == 0, "a whole number of waves")
LAW = Law(share=share, takes={"waves": WAVES, "to": SHARE}, needs="waves")
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one file and one entry point."""
    about = tmp_path / "waving-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: waving\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[steadytrain.schedules]\nwaves = waving:LAW\n")
    (tmp_path / "waving.py").write_text(LAW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "waving", raising=False)


def rates(schedule: str) -> list[float]:
    """Return the learning rate of each update of a run of eight."""
    words = ["--lr", "1", "--batch-size", "10", "--epochs", "1", "--warmup-epochs", "0", "--num-train", "80"]
    words += ["--set", "optim.base_batch_size=none"]
    document = steady("schedule", "--schedule", schedule, *words, "--json").document
    return [round(row["lr"], 6) for row in document["moments"]]


def test_a_law_in_one_file_sets_the_rate_of_every_update() -> None:
    assert rates("waves,waves=2,to=0.5") == [1, 0.75, 0.5, 0.75, 1, 0.75, 0.5, 0.75]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("waves", "waves needs waves, such as waves,waves=30"),
        ("waves,waves=1.5", "waves's waves must be a whole number of waves"),
        ("waves,wave=2", "waves has no parameter 'wave': it takes waves, to. Did you mean waves?"),
        ("wavs,waves=2", "Did you mean waves?"),
    ],
)
def test_its_name_and_its_parameters_are_checked_like_ours(schedule: str, message: str) -> None:
    assert message in steady("schedule", "--num-train", 80, "--schedule", schedule, code=2).err


def test_a_law_that_cannot_be_loaded_is_named_and_breaks_no_other(tmp_path: Path) -> None:
    (tmp_path / "waving.py").write_text("import nothing_of_the_kind\n")
    assert rates("constant") == [1] * 8
    error = steady("schedule", "--num-train", 80, "--schedule", "waves,waves=2", code=2).err
    assert "waving:LAW cannot be loaded" in error and "Traceback" not in error
