"""Logs that were edited, damaged or made by strangers: every view of a run comes to an end without a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.monitor.rules import made
from tests.reports.measured_runs import measured

from steadytrain.cli.render import describe_event, event_line
from steadytrain.cli.watch import final_lines, state_line
from steadytrain.cost.prices import parse_price
from steadytrain.events import (
    Ceilings,
    Compiled,
    EpochTrained,
    Event,
    Failed,
    FeedPlaced,
    Halved,
    Resumed,
    ServerStats,
    Stalled,
    Unreadable,
    from_json,
)
from steadytrain.monitor import diagnose
from steadytrain.reports import accounts
from steadytrain.reports.costs import Question, run_cost
from steadytrain.reports.page import page
from steadytrain.reports.tables import comma_separated, markdown, to_json, to_text
from steadytrain.reports.verdict import verdict_text
from steadytrain.reports.watch import Watch, snapshot
from steadytrain.run import Run

RARE: tuple[Event, ...] = (
    made.threads(("forward", "python", "f (a.py:3)", 9.0), others=({"name": "x", "ran": 3.0, "place": "a"},)),
    made.measured(syncs=("a.py:3",), operations=40, forward_flops=1e9, peak_flops=1e12),
    made.machine(other_processes=({"pid": 3, "name": "x", "user": "u", "cores": 1.0, "disk_bytes": 1e6},)),
    ServerStats(
        step=50,
        seconds=9.0,
        pushes=30,
        staleness=1.0,
        staleness_max=3,
        servers=({"seconds": 1.0, "update_seconds": 0.5, "pushed_bytes": 1e6, "pulled_bytes": 1e6},),
    ),
    FeedPlaced(step=1, place="threads", reason="x"),
    Resumed(step=0, images_repeated=0, seconds_away=3.0, ranks_before=1, ranks=1),
    Halved(message="h", images=64),
    Stalled(step=3, what="step", seconds=3.0, expected_seconds=1.0, culprit="x", stacks="s.txt"),
    Compiled(
        step=0, mode="default", seconds=9.0, graphs=1, breaks=(), images=64, eager_seconds=0.5, compiled_seconds=0.4
    ),
    Ceilings(
        step=3,
        feed_images_per_second=500.0,
        compute_images_per_second=600.0,
        both_images_per_second=450.0,
        seconds=5.0,
    ),
    EpochTrained(step=50, epoch=1, n=6400, loss=1.0, top1=0.5, images_per_second=500.0),
    Failed(error="X", message="m"),
)
WRONG: tuple[Any, ...] = ("x", None, True, -1, 0, 0.5, 10**400, float("nan"), {}, [[0, 0, 0]])


def logged(folder: Path) -> tuple[Run, list[dict[str, Any]]]:
    """A run, and its lines, in which every kind of event comes."""
    run = measured(folder, steps=30, gpus=1, began=1_790_000_000.0)
    lines = [json.loads(line) for line in run.log_path().read_text().splitlines()]
    lines[0]["price"] = {"per_hour": 1.0, "currency": "USD", "name": "x", "date": "2026-01-01", "spent": 0.0}
    lines[0]["data"] |= {"num_rejected": 1, "rejected": [["a", "b"]], "channels": 3, "largest_side": 300}
    rare = [json.loads(json.dumps(replace(event, time=lines[-2]["time"], attempt=1).to_dict())) for event in RARE]
    return run, [*lines[:-1], *rare, lines[-1]]


def edited(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The line with each of its values, and those within them, wrong or missing; but not when and where it was."""

    def places(value: Any, depth: int) -> Iterator[tuple[Any, ...]]:
        keys = list(value) if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
        for key in keys if depth else ():
            yield (key,)
            yield from ((key, *rest) for rest in places(value[key], depth - 1))

    for place in places({key: line[key] for key in line if key not in ("v", "kind", "time", "attempt", "rank")}, 2):
        for wrong in WRONG:
            copy = json.loads(json.dumps(line))
            inner = copy
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            yield copy
        del inner[place[-1]]
        yield copy


@pytest.mark.parametrize("first", ["Started", "other"])
def test_wrong_values_of_every_field_of_every_kind_end_no_view(tmp_path: Path, first: str) -> None:
    run, lines = logged(tmp_path)
    kinds = {line["kind"]: number for number, line in enumerate(lines)}
    texts = [[json.dumps(line)] for line in lines]
    for kind, number in kinds.items():
        if (kind == "Started") == (first == "Started"):
            texts[number] += [json.dumps(copy) for copy in edited(lines[number])]
    run.log_path().write_text("\n".join(text for group in texts for text in group) + "\n")
    events = list(run.events())
    num_damaged = sum(isinstance(event, Unreadable) for event in events)
    assert 100 < num_damaged < len(events)
    for event in events:
        event_line(event)
        list(describe_event(event))
    reported = accounts([run])
    for render in (markdown, to_json, comma_separated, page):
        assert render(reported)
    assert to_text([account.summary for account in reported], 80)
    assert verdict_text(diagnose(run), "x")
    for question in (Question(price=None), Question(price=parse_price("2"), target=0.5, what_if=True)):
        assert run_cost(run, question).to_text(80)
    watch = Watch(run)
    watch.read()
    now = snapshot(watch)
    assert state_line(now) and final_lines(now, 80) and json.dumps(now.to_dict(), allow_nan=False)
    assert from_json("[" * 100_000) is None
