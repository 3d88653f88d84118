"""What a notebook shows: results as the report has them, and the notebook of the documents from end to end."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.reports.runs import finished

import steadytrain
from steadytrain.cost.bill import BillPart, make_bill
from steadytrain.cost.prices import Price
from steadytrain.monitor import diagnose, ledger
from steadytrain.reports.notebook import (
    VIEWS,
    bill_html,
    diagnosis_html,
    evaluation_html,
    ledger_html,
    prediction_html,
    run_html,
)
from steadytrain.training.inference.inference import Prediction

NOTEBOOK = Path(__file__).parents[2] / "docs" / "guides" / "first-steps.ipynb"


def test_a_run_shows_accuracy_verdict_and_curves(tmp_path: Path) -> None:
    run = finished(tmp_path, "a<b")
    html = run_html(run)
    assert "a&lt;b" in html and "Best top-1 accuracy" in html and "images/s, steady" in html
    picture = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert picture is not None
    drawn = base64.b64decode(picture[1]).decode()
    assert drawn.count("<polyline") == 4 and "<script" not in drawn  # accuracy and loss, of training and validation
    assert "<style" not in html  # the notebook's own look stays as it is


def test_a_verdict_and_a_ledger_show_where_the_time_went(tmp_path: Path) -> None:
    run = finished(tmp_path)
    for html in (diagnosis_html(diagnose(run)), ledger_html(ledger(run))):
        assert "evaluation" in html and "%" in html


def test_an_evaluation_shows_its_figures_and_no_arrays() -> None:
    evaluation = SimpleNamespace(n=1000, loss=0.5, top1=0.87, score=0.87, top5=0.99, mean_ap=None, outputs=[[0.25]])
    html = evaluation_html(evaluation)
    assert "87.0 %" in html and "1,000" in html and "0.25" not in html


def test_a_bill_shows_its_amount_its_price_and_each_attempt() -> None:
    parts = [BillPart(began=0.0, seconds=1800.0, ended="killed"), BillPart(began=9e3, seconds=3600.0, ended="finished")]
    bill = make_bill(parts, price=Price(name="a<b", per_hour=2.0))
    assert bill is not None
    html = bill_html(bill)
    assert "Cost: 3.00 USD" in html and "a&lt;b" in html
    assert "1.00 USD for 30 min 00 s (killed)" in html and "2.00 USD for 1 h 00 min (finished)" in html


def test_a_prediction_shows_its_classes_or_why_there_are_none() -> None:
    hat = Prediction(Path("photos/1.jpg"), ("hat", "<b>"), (0.93, 0.05))
    assert "1.jpg" in prediction_html(hat) and "93.0 %" in prediction_html(hat) and "&lt;b&gt;" in prediction_html(hat)
    assert "no image" in prediction_html(Prediction(Path("2.txt"), error="2.txt: no image"))


@pytest.mark.parametrize("place", VIEWS)
def test_what_is_shown_is_a_type_of_that_name(place: tuple[str, str]) -> None:
    assert isinstance(getattr(import_module(place[0]), place[1]), type)


def test_ipython_is_told_when_a_name_is_used_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, str], Callable[[Any], str]] = {}
    formatter = SimpleNamespace(for_type_by_name=lambda module, name, view: told.update({(module, name): view}))
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert issubclass(steadytrain.Run, object)
    assert told == dict(VIEWS)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert issubclass(steadytrain.Run, object)  # IPython is imported, and no shell runs


def test_the_notebook_of_the_documents_is_clean() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell.get("outputs", []) == [] and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_of_the_documents_runs(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    assert "Best top-1 accuracy" in shown and "data:image/svg+xml" in shown and "backward pass" in shown
    progress = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert progress.count("1,618 images in 10 classes") == 1 and progress.count("\nfinished after") <= 1
    assert progress.count("finished after") == 1 and (tmp_path / "report.html").exists()
