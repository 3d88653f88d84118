"""A run on images with several labels is told by mAP, and by the figures of each label."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.reports.runs import Clock, course, evaluated, finished, recipe, started, write

from steadytrain.data.results.predictions import LABELS_HEAD, read_label_predictions
from steadytrain.errors import DataError, InputError
from steadytrain.events import Ended, Evaluated
from steadytrain.format import NONE
from steadytrain.monitor import read_history
from steadytrain.reports.charts import charts
from steadytrain.reports.comparison import compare
from steadytrain.reports.mistakes import mistakes_section
from steadytrain.reports.page import page
from steadytrain.reports.summary import Account
from steadytrain.reports.tables import markdown, to_json, to_text
from steadytrain.run import Run

LABELS = ("hat", "sea", "sun")
PREDICTIONS = [  # true, probabilities
    ("sea;sun", (0.1, 0.9, 0.8)),
    ("sea", (0.1, 0.7, 0.9)),
    ("", (0.1, 0.8, 0.1)),
    ("sun", (0.2, 0.2, 0.7)),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose exact match is highest where its mAP is not."""
    run, begun = Run.create(tmp_path / "labels", recipe()), started(steps=60)
    data = {**begun.data, "classes": list(LABELS), "multi_label": True, "train": "labels.rec"}
    events = [event for event in course(0, 60, total=60) if not isinstance(event, Evaluated)]
    scores = ((20, 0.61, 0.3), (40, 0.72, 0.2), (60, 0.65, 0.4))
    events[-1:-1] = [
        replace(evaluated(step), mean_ap=mean_ap, top1=exact, top5=None) for step, mean_ap, exact in scores
    ]
    write(run, [replace(begun, data=data), *events], Clock(), end=True)
    lines = [",".join(("", "val.rec", str(n), true, "", "0", *map(str, p))) for n, (true, p) in enumerate(PREDICTIONS)]
    run.predictions.write_text("\n".join([",".join((*LABELS_HEAD, *LABELS)), *lines]) + "\n")
    return run


def test_the_best_evaluation_has_the_highest_map(run: Run) -> None:
    account = Account.of(run)
    best, last = account.summary.quality.best, account.summary.quality.last
    assert account.summary.quality.is_multi_label and best is not None and last is not None
    assert (best.step, best.value, best.interval) == (40, 0.72, None)
    assert (last.step, last.value, last.top1) == (60, 0.65, 0.4)
    assert run.progress().best == next(event for event in run.events() if getattr(event, "mean_ap", None) == 0.72)
    assert to_text([account.summary]).splitlines()[3].split()[:4] == ["best", "mAP", "72.0", "%"]


def test_labels_are_listed_with_average_precision_lowest_first(run: Run) -> None:
    figures = json.loads(to_json([Account.of(run)]))["runs"][0]
    sun, sea, hat = figures["per_class"]
    # Ranked by "sea": right, wrong, right, wrong; by "sun": wrong, right, right, wrong.
    assert [row["label"] for row in (sun, sea, hat)] == ["sun", "sea", "hat"]
    assert (sea["n"], sea["predicted"], sea["right"]) == (2, 3, 2)
    assert sea["ap"] == pytest.approx((1 + 2 / 3) / 2) and sun["ap"] == pytest.approx(7 / 12)
    assert (sun["precision"], sun["recall"]) == (2 / 3, 1.0)
    assert hat["ap"] is None and hat["recall"] is None, "no image has it"
    assert figures["is_multi_label"] and figures["per_epoch"][0]["val_mean_ap"] is not None
    text = markdown([Account.of(run)])
    assert "| best mAP | 72.0 % at epoch" in text and "top-1" not in text
    assert "| sun | 2 | 3 | 2 | 58.3 % | 66.7 % | 100.0 % | 80.0 % |" in text and "| hat |" not in text


def test_page_lists_labels_and_draws_only_measured_curves(run: Run) -> None:
    account = Account.of(run)
    [label, *_] = mistakes_section(account)["labels"]
    assert label["name"] == "sun"
    text = page([account])
    assert "Best mAP" in text and '<th scope="col">AP</th>' in text and "op-1 accuracy" not in text
    figure = next(figure for figure in charts([account.history]) if figure["id"] == "top1")
    train, val = figure["traces"]
    assert figure["title"] == "mAP" and train["y"] == [] and val["y"] == [0.61, 0.72, 0.65]
    assert "low" not in val, "there is no interval of mAP"
    point = next(point for point in read_history(run).points if point.series == "val")
    assert point.row[-3:] == (0.61, None, None)


def test_runs_of_labels_and_of_classes_each_keep_their_score(run: Run, tmp_path: Path) -> None:
    other = finished(tmp_path)
    accounts = [Account.of(run), Account.of(other)]
    text = to_text([account.summary for account in accounts], width=120)
    assert "mAP 72.0 %" in text and "top-1" not in text.splitlines()[0]
    table = markdown(accounts)
    assert "| best mAP | 72.0 % at epoch" in table and f"| best top-1 | {NONE} |" in table
    assert "best mAP</th>" in page(accounts) and "best top-1</th>" in page(accounts)


def test_several_labels_are_not_compared_image_by_image(run: Run) -> None:
    with pytest.raises((DataError, InputError), match="is of images with several labels each, and one class for each"):
        compare(run.directory, run.directory)


def test_damaged_file_of_labels_is_reported(run: Run) -> None:
    whole = run.predictions.read_text()
    run.predictions.write_text(whole.replace("0.9,0.8", "0.9,much"))
    with pytest.raises(DataError, match=r"line 2 of .*predictions\.csv is damaged"):
        read_label_predictions(run.predictions)
    assert "is damaged: write the file again." in mistakes_section(Account.of(run))["why"]
    run.predictions.write_text(whole.replace(",wrong,", ",", 1))
    with pytest.raises(DataError, match="does not begin with the columns file,shard,record,true,predicted,wrong"):
        read_label_predictions(run.predictions)
    assert isinstance(list(run.events())[-1], Ended)
