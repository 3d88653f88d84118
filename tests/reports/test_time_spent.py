"""Where the time went, as people see it: bars that fill their width, figures that can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.reports.runs import Clock, finished, recipe, restarted, started, step, write

from steadytrain.format import NONE
from steadytrain.monitor.ledger import BUCKETS, Ledger, empty
from steadytrain.reports.page import page
from steadytrain.reports.summary import Account
from steadytrain.reports.tables import markdown, to_json
from steadytrain.reports.time_spent import (
    BUCKETS_SHOWN,
    bar,
    largest_buckets,
    rates_text,
    rows,
    sentence,
    share_of,
    to_dict,
)
from steadytrain.run import Run

TOLD = Ledger(
    wall_seconds=200.0,
    away_seconds=30.0,
    seconds=empty() | {"startup": 9.95, "forward": 100.0, "input_decode": 90.0, "other": 0.05},
    steps=100,
    images=1000,
)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_the_figure_in_a_bar_can_be_read(bucket: str) -> None:
    bright, dark = sorted(map(luminance, (BUCKETS_SHOWN[bucket].ink, BUCKETS_SHOWN[bucket].colour)), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """By W3C's WCAG 2.1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_a_bar_is_as_wide_as_its_shares_and_leaves_out_what_cannot_be_seen() -> None:
    parts = bar(TOLD.seconds)
    assert [(part.bucket, part.width) for part in parts] == [
        ("forward", "50.000%"),
        ("input_decode", "45.000%"),
        ("startup", "4.975%"),
    ]
    assert [bool(part.text) for part in parts] == [True, True, False]
    assert bar(empty()) == []


def test_only_buckets_that_some_run_has_get_a_row() -> None:
    other = Ledger(wall_seconds=1.0, away_seconds=0.0, seconds=empty() | {"lost": 1.0}, steps=0, images=0)
    cells = {row["label"]: row["cells"] for row in rows([TOLD, other])}
    assert cells["forward pass"] == [("1 min 40 s", "50.0 %"), (NONE, NONE)]
    assert cells["lost to restarts"] == [(NONE, NONE), ("1.00 s", "100.0 %")]
    assert not {"evaluation", "other"} & set(cells), "nothing, and next to nothing"


def test_largest_shares_are_named_in_a_sentence() -> None:
    assert sentence(TOLD) == "forward pass 50.0 %, waiting: decoding 45.0 %, start-up 5.0 %"
    assert rates_text(TOLD) == (
        "3 min 20 s of wall time, and 30.0 s between its starts; 5.00 images/s overall, 5.26 in updates alone"
    )
    probe = Ledger(wall_seconds=20.1, away_seconds=0.0, seconds=empty() | {"evaluation": 20.1}, steps=0, images=0)
    assert rates_text(probe) == "20.1 s of wall time", "a run without updates has no rates"


def test_a_share_that_rounds_to_nothing_is_there() -> None:
    assert (share_of(0.0), share_of(0.0004), share_of(0.0005)) == ("0.0 %", "< 0.1 %", "0.1 %")


def test_json_has_every_bucket_and_both_rates(tmp_path: Path) -> None:
    run = json.loads(to_json([Account.of(restarted(tmp_path))]))["runs"][0]
    held = run["ledger"]
    assert list(held["seconds"]) == list(held["shares"]) == list(BUCKETS)
    assert sum(held["seconds"].values()) == pytest.approx(held["wall_seconds"]) == pytest.approx(run["seconds"])
    assert held["images_per_second"] == run["images_per_second_overall"] < held["steady_images_per_second"]
    assert held["away_seconds"] == pytest.approx(3600)
    assert to_dict(TOLD)["shares"]["forward"] == 0.5


def test_what_a_restart_lost_is_in_every_report(tmp_path: Path) -> None:
    parts = Account.of(restarted(tmp_path))
    assert parts.ledger.seconds["lost"] == pytest.approx(96 * 0.25, rel=0.02)
    assert any(line.startswith("| lost to restarts | 24.") for line in markdown([parts]).splitlines())
    assert "lost to restarts" in page([parts])


def test_a_run_that_only_began_has_a_page_without_seconds(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started()], Clock())
    parts = Account.of(run)
    assert parts.summary.speed.images_per_second_overall is None
    assert "Where the time went" in page([parts])


def test_overall_counts_images_once_and_the_time_of_both(tmp_path: Path) -> None:
    through, again = Account.of(finished(tmp_path)).summary.speed, Account.of(restarted(tmp_path)).summary.speed
    assert through.images_per_second_overall is not None
    assert again.images_per_second_overall is not None
    assert again.images_per_second_overall < 0.95 * through.images_per_second_overall


def test_the_wall_time_begins_with_the_process(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    began = replace(started(), startup={"process": 3.0, "model": 1.0})
    write(run, [began, *map(step, range(1, 41))], Clock())
    assert Account.of(run).summary.speed.seconds == pytest.approx(4.0 + 40 * 0.25)


def test_no_bucket_is_left_out_and_none_is_taken_for_another() -> None:
    assert set(BUCKETS_SHOWN) == set(BUCKETS)
    assert (
        len({value.label for value in BUCKETS_SHOWN.values()})
        == len({value.colour for value in BUCKETS_SHOWN.values()})
        == len(BUCKETS)
    )
    assert all(re.fullmatch("#[0-9a-f]{6}", value.colour) for value in BUCKETS_SHOWN.values())
    assert max(len(value.label) for value in BUCKETS_SHOWN.values()) <= 24, "room on a terminal of 60 columns"


def test_the_largest_come_first_and_empty_ones_not_at_all() -> None:
    seconds = empty() | {"input_decode": 3.0, "forward": 5.0, "other": 0.1}
    ledger = Ledger(wall_seconds=8.1, away_seconds=0.0, seconds=seconds, steps=1, images=1)
    assert largest_buckets(ledger) == ["forward", "input_decode", "other"]
    assert largest_buckets(Ledger(wall_seconds=0.0, away_seconds=0.0, seconds=empty(), steps=0, images=0)) == []
