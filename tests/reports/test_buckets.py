"""Every bucket of the ledger has a name and a colour of its own."""

from __future__ import annotations

import re

from steadytrain.monitor.ledger import BUCKETS, empty
from steadytrain.reports.buckets import SHOWN, largest


def test_no_bucket_is_left_out_and_none_is_taken_for_another() -> None:
    assert set(SHOWN) == set(BUCKETS)
    assert len({one.label for one in SHOWN.values()}) == len({one.colour for one in SHOWN.values()}) == len(BUCKETS)
    assert all(re.fullmatch("#[0-9a-f]{6}", one.colour) for one in SHOWN.values())
    assert max(len(one.label) for one in SHOWN.values()) <= 24, "room on a terminal of 60 columns"


def test_the_largest_come_first_and_empty_ones_not_at_all() -> None:
    assert largest(empty() | {"input_decode": 3.0, "forward": 5.0, "other": 0.1}) == [
        "forward",
        "input_decode",
        "other",
    ]
    assert largest(empty()) == []
