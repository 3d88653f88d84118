"""The bill of a run: the sum over its attempts, however they ended; spot and other machines in closed form."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from tests.forked import stand_at, start
from tests.reports.runs import Clock, course, recipe, restarted, started, write

from steadytrain import events
from steadytrain.cli import main
from steadytrain.cost.bill import (
    Habits,
    bill_of,
    break_even,
    expect,
    habits,
    make_bill,
    merge_parts,
    parts_of,
    saved_parts,
    shares,
    spot_rows,
    what_if,
)
from steadytrain.cost.prices import Offer, Price, find_offer, parse_price
from steadytrain.errors import InputError, RunError
from steadytrain.monitor import RunHistory, read_history
from steadytrain.run import Run

PER_HOUR = 3.6  # a thousandth an hour each second
SETTINGS = ["--model", "digits", "--epochs", "12", "--batch-size", "32", "--device", "cpu", "--price", str(PER_HOUR)]
SETTINGS += ["--set", "parallel.compute_threads=1", "--set", "every.save_steps=20", "--set", "every.log_steps=5"]


def _words(digits: Path, run: Path) -> list[str]:
    return ["train", str(digits), "--run", str(run), *SETTINGS]


def _kill_after(digits: Path, run: Path, step: int) -> tuple[float, float]:
    """Start a run, and kill it after this step, with a checkpoint on the disk; when that step was written, and when it
    was killed."""
    child = start(stand_at, {step: run.with_name("never")}, main, _words(digits, run))
    deadline = time.monotonic() + 120
    path = run / "events.jsonl"
    while time.monotonic() < deadline and child.is_alive():
        seen = [e for e in events.read(path) if isinstance(e, events.Step)] if path.exists() else []
        if seen and seen[-1].step >= step and any((run / "checkpoints").glob("step-*")):
            child.kill()
            child.join(60)
            return seen[-1].time, time.time()
        time.sleep(0.02)
    raise AssertionError(f"the run came to no step {step}")


@pytest.mark.slow
def test_the_bill_of_a_run_that_was_killed_twice_is_the_sum_of_its_parts(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    spans = []
    for step in (25, 60):
        before = time.time()
        seen, killed = _kill_after(digits, folder, step)
        spans.append((before, seen, killed))
    before = time.time()
    last = start(main, _words(digits, folder))
    last.join(120)
    assert last.exitcode == 0
    spans.append((before, before, time.time()))

    run = Run.open(folder)
    bill = bill_of(run, read_history(run))
    assert bill is not None and bill.currency == "USD"
    assert [part.ended for part in bill.parts] == ["killed", "killed", "finished"]
    assert bill.so_far == pytest.approx(sum(part.money for part in bill.parts))
    assert bill.so_far == pytest.approx(PER_HOUR * bill.seconds / 3600)
    for part, (began, seen, ended) in zip(bill.parts, spans, strict=True):
        assert began - 0.1 <= part.began, "it is paid from the start of its process"
        assert seen - 0.1 <= part.began + part.seconds <= ended + 0.1, "to its last sign of life, and no longer"
    assert bill.device_seconds == bill.seconds <= sum(ended - began for began, _, ended in spans) + 0.3

    # The checkpoints hold it as well: what came before the last attempt to the last second.
    (folder / "events.jsonl").unlink()
    kept = make_bill(saved_parts(run))
    assert kept is not None
    assert [part.seconds for part in kept.parts[:2]] == pytest.approx(
        [part.seconds for part in bill.parts[:2]], abs=0.01
    )
    assert 0 < kept.parts[2].seconds <= bill.parts[2].seconds
    assert kept.so_far == pytest.approx(bill.so_far, rel=0.5) and kept.so_far <= bill.so_far


def test_a_lost_log_loses_the_bill_of_no_attempt_before(digits: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _kill_after(digits, folder, 25)
    (folder / "events.jsonl").unlink()
    assert main(_words(digits, folder)) == 0
    run = Run.open(folder)
    bill = bill_of(run, read_history(run))
    assert bill is not None
    assert [part.source for part in bill.parts] == ["checkpoint", "events"]
    assert all(part.seconds > 0 for part in bill.parts)
    [begun] = [e for e in run.events() if isinstance(e, events.Started)]
    assert begun.price and begun.price["spent"] == pytest.approx(bill.parts[0].money)


def test_of_an_attempt_that_both_know_the_longer_time_counts() -> None:
    price = parse_price("3.6")
    from steadytrain.cost.bill import BillPart

    saved = [BillPart(began=10.0, seconds=100.0, price=price, source="checkpoint"), BillPart(began=500.0, seconds=20.0)]
    logged = [BillPart(began=500.0, seconds=30.0, price=price), BillPart(began=900.0, seconds=5.0, price=price)]
    merged = merge_parts(saved, logged)
    assert [(part.began, part.seconds) for part in merged] == [(10.0, 100.0), (500.0, 30.0), (900.0, 5.0)]
    bill = make_bill(merged, left=100.0)
    assert bill is not None and bill.so_far == pytest.approx(0.135) and bill.at_end == pytest.approx(0.235)
    assert bill.until(510.0) == pytest.approx(0.110)


def test_each_attempt_has_its_own_price_and_one_given_replaces_all() -> None:
    from steadytrain.cost.bill import BillPart

    parts = [BillPart(began=0.0, seconds=3600.0, price=parse_price(text), machines=2) for text in ("1", "3")]
    bill, priced = make_bill(parts), make_bill(parts, price=parse_price("10"))
    assert bill is not None and bill.so_far == 8.0 and priced is not None and priced.so_far == 40.0
    with pytest.raises(InputError, match="USD and EUR"):
        make_bill([parts[0], replace(parts[1], price=parse_price("1 EUR"))])
    assert make_bill([replace(part, price=None) for part in parts]) is None


def test_a_run_of_a_version_without_prices_is_paid_by_the_one_given(tmp_path: Path) -> None:
    run = restarted(tmp_path)
    history = read_history(run)
    assert bill_of(run, history) is None
    bill = bill_of(run, history, price=parse_price("3.6"))
    assert bill is not None
    assert bill.seconds == pytest.approx(history.ledger().wall_seconds)
    assert [part.ended for part in bill.parts] == ["killed", "finished"]
    split = shares(bill, history)
    assert split.lost == pytest.approx(history.ledger().seconds["lost"] / 1000) and split.lost > 0
    assert split.per_epoch is not None
    assert split.per_epoch * 3 + split.lost + split.setup == pytest.approx(bill.so_far, rel=0.01)


def test_how_a_run_saves_and_starts_is_measured(tmp_path: Path) -> None:
    measured = habits(read_history(restarted(tmp_path)))
    assert measured.interruptions == 1 and measured.away == pytest.approx(3600, rel=0.01)
    assert measured.per_hour == pytest.approx(1 / measured.hours)
    assert measured.interval == pytest.approx(352 * 0.25, rel=0.05), (
        "an evaluation each epoch, and a checkpoint with it"
    )


@pytest.mark.parametrize("per_hour", [0.0, 0.05, 0.5, 2.0])
def test_the_expected_time_with_interruptions_is_that_of_a_simulation(per_hour: float) -> None:
    """Interruptions as a Poisson process, checkpoints as a clock: an oracle of its own."""
    work, interval, restart = 36_000.0, 300.0, 60.0
    draw = random.Random(1)

    def simulate() -> float:
        paid, saved = 0.0, 0.0
        while True:
            lasts = draw.expovariate(per_hour / 3600) if per_hour else math.inf
            if lasts - restart >= work - saved:
                return paid + restart * (paid > 0) + work - saved
            paid += lasts
            saved += max(0.0, lasts - restart) // interval * interval

    mean = sum(simulate() for _ in range(2000)) / 2000
    spot = expect(work, per_hour=per_hour, interval=interval, restart=restart)
    assert spot.paid_seconds == pytest.approx(mean, rel=0.02)
    assert spot.seconds == spot.paid_seconds, "without waiting for capacity"


def test_waiting_for_capacity_takes_time_and_no_money() -> None:
    expected = expect(36_000.0, per_hour=1.0, interval=600.0, restart=60.0, wait=1800.0)
    assert expected.paid_seconds == pytest.approx(36_000 / 0.9)
    assert expected.interruptions == pytest.approx(expected.paid_seconds / 3600)
    assert expected.seconds == pytest.approx(expected.paid_seconds + 1800 * expected.interruptions)
    assert expect(1.0, per_hour=10.0, interval=600.0, restart=60.0).paid_seconds == math.inf


def test_at_the_break_even_spot_costs_what_on_demand_does() -> None:
    even = break_even(1.0, 3.06, interval=600.0, restart=90.0)
    expected = expect(7200.0, per_hour=even, interval=600.0, restart=90.0)
    assert 1.0 * expected.paid_seconds == pytest.approx(3.06 * 7200)
    measured = Habits(interval=600.0, restart=90.0, interruptions=0, hours=1.0, away=None)
    offers = [
        Offer(cloud="aws", region="here", zone=zone, instance="p3.2xlarge", on_demand=3.06, spot=spot)
        for zone, spot in (("b", 1.2), ("a", 1.0))
    ]
    rows = spot_rows([*offers, replace(offers[0], spot=None)], 7200.0, measured, per_hour=even)
    assert [row.offer.zone for row in rows] == ["a", "b"]
    assert rows[0].money == pytest.approx(rows[0].on_demand_money)


def test_another_gpu_scales_what_is_computed_and_nothing_else(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe())
    begun = started(steps=60)
    begun = structs.replace(begun, machine={**begun.machine, "device": "Tesla K80", "precision": "fp32"})
    write(run, [begun, *course(0, 60, total=60)], Clock(), end=True)
    history = read_history(run)
    computing = history.ledger().share("update", "evaluation", "forward", "backward", "optimizer")
    assert computing > 0.9
    [row] = what_if(history, [find_offer("p3.2xlarge")], 3600.0)
    factor = math.sqrt((15.7 / 4.37) * (900 / 240))
    assert row.seconds == pytest.approx(3600 * (1 - computing + computing / factor))
    assert row.low <= row.seconds <= row.high and row.money == pytest.approx(3.06 * row.seconds / 3600)
    [same] = what_if(history, [find_offer("p2.xlarge")], 3600.0)
    assert same.seconds == pytest.approx(3600.0)
    assert what_if(history, [find_offer("c5.xlarge")], 3600.0) == [], "no GPU, no peak"


def test_a_log_that_was_edited_by_hand_ends_no_bill(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe())
    strange = structs.replace(started(), price={"per_hour": "much"}, machine={"hosts": "one", "ranks": None})
    write(run, [strange], Clock())
    with pytest.raises(RunError, match=r"no start of the run can be read in its event log \(1 line damaged\)"):
        read_history(run)
    (run.checkpoints / "step-00000007").mkdir(parents=True)
    (run.checkpoints / "step-00000007" / "state.json").write_text("{")
    assert saved_parts(run) == []
    assert make_bill(parts_of(RunHistory(run.recipe))) is None
    assert Price.from_dict(None) is None
