"""Views of results in a notebook: a run with its curves, verdict, ledger and bill; an evaluation; a prediction.

IPython is told of them by the package, when a public name is used within IPython; nothing else needs it.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from steadytrain.cost.bill import Bill
from steadytrain.format import clean, duration, money, number, percent, score_name
from steadytrain.monitor import Diagnosis, Ledger
from steadytrain.reports.charts import charts, has_line
from steadytrain.reports.page import heroes_and_verdict, render
from steadytrain.reports.plots import Panel, svg
from steadytrain.reports.summary import Account
from steadytrain.reports.tables import known_facts
from steadytrain.reports.time_spent import rows
from steadytrain.reports.verdict import verdict_sentences
from steadytrain.run import Run

FIGURES = ("top1", "loss")


def run_html(run: Run) -> str:
    """Return a run as HTML: its heroes, verdict, curves and figures. Raises RunError if nothing was started in it."""
    account = Account.of(run)
    heroes, verdict = heroes_and_verdict(account)
    (figures,) = known_facts([account.summary])
    return _html(account.summary.name, heroes=heroes, lines=verdict, picture=_curves(account), facts=figures)


def diagnosis_html(diagnosis: Diagnosis) -> str:
    """Return a verdict as HTML: its sentences, the evidence of the first cause, and where the time went."""
    evidence = {f"evidence {k}": text for k, text in enumerate(diagnosis.causes[0].evidence, 1)}
    lines = [line[:1].upper() + line[1:] for line in verdict_sentences(diagnosis)]
    return _html("Verdict", lines=lines, facts=evidence | _times(diagnosis.ledger))


def ledger_html(ledger: Ledger) -> str:
    """Return where the time of a run went as HTML."""
    return _html(f"{duration(ledger.wall_seconds)} in all", facts=_times(ledger), is_open=True)


def evaluation_html(evaluation: Any) -> str:
    """Return the figures of a ``training.evaluation.Evaluation`` as HTML."""
    name = score_name(evaluation.mean_ap is not None)
    top5 = {} if evaluation.top5 is None else {"top-5": percent(evaluation.top5, 1)}
    figures = {name: percent(evaluation.score, 1), **top5, "loss": number(evaluation.loss, 4)}
    return _html("Evaluation", facts={"images": number(evaluation.n), **figures}, is_open=True)


def bill_html(bill: Bill) -> str:
    """Return what a run cost as HTML: the amount, the price, and each attempt."""
    attempts = {
        f"attempt {k}": f"{money(part.money)} {bill.currency} for {duration(part.seconds)} ({part.ended or 'saved'})"
        for k, part in enumerate(bill.parts, 1)
    }
    figures = {"an hour": f"{money(bill.per_hour)} {bill.currency}", "wall time": duration(bill.seconds), **attempts}
    return _html(f"Cost: {bill}", lines=[f"Price: {bill.price}"], facts=figures, is_open=True)


def prediction_html(prediction: Any) -> str:
    """Return the classes of a ``training.inference.inference.Prediction`` as HTML, or why there are none."""
    chances = zip(prediction.classes, prediction.probabilities, strict=True)
    facts = {name: percent(chance, 1) for name, chance in chances}
    return _html(prediction.path.name, lines=[prediction.error] if prediction.error else (), facts=facts, is_open=True)


VIEWS: Mapping[tuple[str, str], Callable[[Any], str]] = {
    ("steadytrain.run", "Run"): run_html,
    ("steadytrain.training.loop.steps", "Outcome"): lambda outcome: run_html(outcome.run),
    ("steadytrain.training.evaluation", "Evaluation"): evaluation_html,
    ("steadytrain.training.inference.inference", "Prediction"): prediction_html,
    ("steadytrain.cost.bill", "Bill"): bill_html,
    ("steadytrain.monitor.rules.diagnose", "Diagnosis"): diagnosis_html,
    ("steadytrain.monitor.ledger", "Ledger"): ledger_html,
}
"""Module and name of a type -> its HTML. By name, as some of them need torch."""


def register() -> None:
    """Tell the IPython that runs here, if one does, how to show what this package returns."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    for (module, name), view in VIEWS.items():
        formatter.for_type_by_name(module, name, view)


def _html(title: str, **values: Any) -> str:
    blank: dict[str, Any] = {"heroes": (), "lines": (), "picture": "", "facts": {}, "is_open": False}
    return render("notebook.html.j2", None, title=title, **(blank | values))


def _times(ledger: Ledger) -> dict[str, str]:
    """Return the label of each bucket of a ledger, with its time and share."""
    return {row["label"]: f"{seconds} ({share})" for row in rows([ledger]) for seconds, share in row["cells"]}


def _curves(account: Account) -> str:
    """Draw accuracy and loss over epochs as a picture of its own, whose styles stay in it: an address of data."""
    figures = [figure for figure in charts([account.history]) if figure["id"] in FIGURES and has_line(figure)]
    if not figures:
        return ""
    picture = svg([_panel(figure) for figure in figures], title=clean(account.summary.name))
    return f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"


def _panel(figure: Mapping[str, Any]) -> Panel:
    """Put a figure's traces on one axis: where one has no point, its line goes on to the next."""
    points = [dict(zip(trace["epoch"], trace["y"], strict=True)) for trace in figure["traces"]]
    x = sorted({epoch for trace in points for epoch in trace})
    curves = [[math.nan if (y := trace.get(epoch)) is None else y for epoch in x] for trace in points]
    return Panel(f"{figure['title']} (training faint)", x, curves, "epoch", from_zero=False)
