"""A probe is shown as what it is everywhere: images that went through the network, and no updates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.reports.probes import probe_alone, progress
from tests.reports.runs import Clock, evaluated, finished, recipe, started, step, write

from steadytrain.cli.watch import final_lines, screen_lines, state_line
from steadytrain.data.results.predictions import HEAD
from steadytrain.events import Event
from steadytrain.format import NONE
from steadytrain.monitor import diagnose, ledger
from steadytrain.reports import live, tables
from steadytrain.reports.notebook import run_html
from steadytrain.reports.page import page
from steadytrain.reports.run_list import list_runs, row_cells
from steadytrain.reports.status import milestones
from steadytrain.reports.summary import Account, summarise
from steadytrain.reports.verdict import verdict_text
from steadytrain.reports.watch import Watch, snapshot
from steadytrain.run import Run

OF_UPDATES = re.compile(
    r"epoch 0|0 of 0|step 0|0\.00/0|0 images/s|, steady|steady state|warm-?up|no data yet", re.IGNORECASE
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(tmp_path / "runs" / "probe", recipe().with_({"model.train": "probe", "budget.epochs": 0}))
    write(made, list(probe_alone()), Clock(), end=True)
    return made


def seen(run: Run) -> Watch:
    watch = Watch(run)
    watch.read()
    return watch


def test_its_report_has_its_own_figures_and_no_row_of_dashes(run: Run) -> None:
    account = Account.of(run)
    text, markdown = tables.to_text([account.summary]), tables.markdown([account])
    for shown in (text, markdown):
        assert "features of 794 images in 1 min 19 s, classifier fitted in 24.0 s" in shown
        assert not OF_UPDATES.search(shown) and "by the probe" in shown
    assert NONE not in text and "last top-1" not in text and "## Epochs" not in markdown
    assert "learning rate" not in markdown and "batch size" not in markdown
    (document,) = json.loads(tables.to_json([account]))["runs"]
    assert (document["probe"]["total"], document["probe"]["fit_seconds"]) == (794, 24.0)
    assert document["ledger"]["seconds"]["probe"] == pytest.approx(103.4)


def test_its_page_is_headed_by_its_own_figures(run: Run) -> None:
    html = page([Account.of(run)])
    visible = " ".join(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)).split())
    heroes = visible[: visible.index("What held it back")]
    assert "through the frozen network: 794 of 794 images" in heroes and "Classifier fitted in 24.0 s" in heroes
    assert NONE not in heroes and not OF_UPDATES.search(heroes)
    assert "features of 794 images" in run_html(run) and "0 of 0" not in run_html(run)


def test_its_page_carries_what_draws_its_only_chart(run: Run) -> None:
    assert 'id="library"' not in page([Account.of(run)])
    rows = [f",val.rec,{i},cat,{'cat' if i else 'dog'},0.5,{0.9 - i / 100},0.7,1" for i in range(40)]
    run.predictions.write_text("\n".join([HEAD, *rows]) + "\n")
    html = page([Account.of(run)])
    assert 'id="chart-coverage"' in html and 'id="chart-top1"' not in html
    assert all(f'id="{part}"' in html for part in ("data", "library", "no-curves")) and "Curves drawn by plotly" in html


def test_the_list_of_runs_calls_it_a_probe(run: Run, tmp_path: Path) -> None:
    (row,) = list_runs(tmp_path / "runs")
    assert row_cells(row, 0.0)["epochs"] == "probe"
    both = tables.to_text([summarise(run), summarise(finished(tmp_path))])
    assert re.search(r"^probe +finished +probe +50\.0 %", both, re.MULTILINE)


def test_the_page_of_a_finished_probe_has_its_wall_time_and_no_empty_plots(run: Run) -> None:
    watch = seen(run)
    now = snapshot(watch)
    state = live.state(now)
    heroes = {hero["label"]: hero["value"] for hero in state["heroes"]}
    assert heroes["Wall time"] not in ("", NONE) and heroes["Images per second"] == "10.0"
    assert (state["percent"], state["steps"]) == ("100 %", "")
    assert state["epochs"] == "features of 794 images in 1 min 19 s, classifier fitted in 24.0 s"
    assert all(line["step"] == "" for line in milestones(watch.history))
    lines = "\n".join(final_lines(now, 80))
    assert "best top-1 50.0 %" in lines and "by the probe" in lines and not OF_UPDATES.search(lines)


def test_a_watcher_sees_how_many_images_are_done_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "run", recipe().with_({"model.train": "probe+full"}))
    write(run, [started(), progress(0), progress(412)], Clock())
    monkeypatch.setattr("steadytrain.reports.status.RECENT_SECONDS", float("inf"))  # on another machine
    watch = seen(run)
    now = snapshot(watch)
    state = live.state(now)
    assert (state["percent"], state["epochs"]) == ("52 %", "features: 412 of 794 images, 10 images/s, 0:38 left")
    assert "features=412/794" in state_line(now)
    drawn = "\n".join(screen_lines(now, 80, 30))
    assert "features: 412 of 794 images, 10 images/s, 0:38 left" in drawn
    write_more(run, [progress(794)])
    watch.read()
    assert live.state(snapshot(watch))["epochs"] == "fitting the classifier"


def test_a_probe_that_was_stopped_has_no_time_left(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe().with_({"model.train": "probe", "budget.epochs": 0}))
    write(run, [started(steps=0), progress(412)], Clock())
    assert "features: 412 of 794 images, 10 images/s" in tables.to_text([summarise(run)])
    shown = "\n".join(final_lines(snapshot(seen(run)), 80))
    assert "412 of 794" in shown and "left" not in shown


def test_a_run_of_a_probe_and_updates_shows_both(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe().with_({"model.train": "probe+full"}))
    fitted = progress(794, fit_seconds=24.0, features=1280, penalty=0.1, top1=0.8)
    write(run, [started(), fitted, evaluated(0), *map(step, range(1, 1056)), evaluated(1055, 0.6)], Clock(), end=True)
    words = tables.facts(summarise(run))
    assert words["probe"].startswith("features of 794 images") and words["epochs"] == "3 of 3"
    assert words["steps"] == "1,055 of 1,055" and "at epoch 3" in words["best top-1"]
    assert live.state(snapshot(seen(run)))["epochs"] == "epoch 3.00 of 3"


def test_images_that_were_looked_at_before_a_probe_was_given_up_are_no_summary(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe().with_({"model.train": "probe+full"}))
    write(run, [started(), progress(0), *map(step, range(1, 1056)), evaluated(1055)], Clock(), end=True)
    assert tables.facts(summarise(run))["probe"] == NONE


def test_its_verdict_is_its_own(run: Run) -> None:
    text = verdict_text(diagnose(run), "probe", width=100)
    assert "No bottleneck found: features of 794 images in 1 min 19 s" in text
    assert not OF_UPDATES.search(text) and "probe 86 %" in text
    held = ledger(run)
    assert sum(held.seconds.values()) == pytest.approx(held.wall_seconds)


def write_more(run: Run, events: list[Event]) -> None:
    """Go on with the newest attempt."""
    with (run.directory / "events.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({**event.to_dict(), "attempt": 1, "time": 1_790_000_000.0}) + "\n")


@pytest.mark.parametrize("queued", [67.7, 5.0])
def test_processes_that_take_the_cores_of_a_probe_are_its_verdict(tmp_path: Path, queued: float) -> None:
    run = Run.create(tmp_path / "run", recipe().with_({"model.train": "probe", "budget.epochs": 0}))
    crowd = {"cpu": 0.3, "others": 1.7, "idle": 0.0, "pressure": {"cpu": 1.0, "io": 0.0, "memory": 0.0}}
    write(run, list(probe_alone(queued=queued, machine=crowd)), Clock(), end=True)
    cause, *others = diagnose(run).causes
    assert cause.name == "noisy_neighbour" and cause.share == pytest.approx(queued / 120, abs=0.01)
    assert f"the training thread waited for a core {round(100 * 79.4 / 120 * queued / 103.4)} % of the time" in (
        cause.evidence
    )
    assert "warmup" not in [other.name for other in others] and "Other processes" in cause.sentence


def test_others_that_take_nothing_from_a_probe_are_not_blamed(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe().with_({"model.train": "probe", "budget.epochs": 0}))
    beside = {"cpu": 1.0, "others": 0.4, "idle": 0.6, "pressure": {"cpu": 0.05, "io": 0.0, "memory": 0.0}}
    write(run, list(probe_alone(machine=beside)), Clock(), end=True)
    assert diagnose(run).causes[0].name == "nothing"


def test_a_probe_that_waits_for_slow_decoding_says_so(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe().with_({"model.train": "probe", "budget.epochs": 0}))
    slow = {"decode_seconds": 76.0, "cpu_seconds": 76.0, "blocked_seconds": 0.0, "wait": 60.0}
    write(run, list(probe_alone(machine={"cpu": 1.1, "idle": 0.9}, **slow)), Clock(), end=True)
    cause = diagnose(run).causes[0]
    assert cause.name in ("threads", "decode") and "decoding images" in cause.sentence
    assert 0.3 < cause.share <= 60 / 120 and cause.evidence[0].startswith("features of a batch take")
