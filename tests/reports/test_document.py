"""docs/report.md explains every figure of a report, and no other."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from tests.reports.runs import finished

from steadytrain.data.results.predictions import ImageResult
from steadytrain.monitor.ledger import Ledger, empty
from steadytrain.reports.summary import Epoch, summarise
from steadytrain.reports.time_spent import to_dict

TEXT = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
NOTHING = Ledger(wall_seconds=0.0, away_seconds=0.0, seconds=empty(), steps=0, images=0)


def explained(text: str) -> list[str]:
    """The names in the first column of the tables."""
    rows = re.findall(r"^\| (`[^|]*?) \|", text, re.M)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_every_field_is_explained(tmp_path: Path) -> None:
    images, _, figures = TEXT.partition("## What the figures mean")
    document = explained(figures)
    there = [*summarise(finished(tmp_path)).to_dict(), *(field.name for field in fields(Epoch))]
    assert sorted(document) == sorted([*there, "per_epoch", "per_class", "ledger", *to_dict(NOTHING)])
    assert explained(images) == list(ImageResult._fields)
