"""The page is whole, says what happened, and runs nothing that it was not made with."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.reports.runs import Clock, course, evaluated, finished, logged, recipe, restarted, started, step, write

from steadytrain.events import Failed, Halved, Noticed
from steadytrain.format import NONE
from steadytrain.intervals import spread
from steadytrain.monitor import diagnose
from steadytrain.reports import report
from steadytrain.reports.page import page
from steadytrain.reports.status import milestones
from steadytrain.reports.summary import Account, Epoch
from steadytrain.reports.tables import epoch_table, markdown
from steadytrain.reports.verdict import held_back, verdict_sentences
from steadytrain.run import Run

EVIL = "<script>alert(1)</script>&amp;\"'"


class Reader(HTMLParser):
    """Scripts with their types, addresses that a browser would fetch, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[str, str]] = []
        self.addresses: list[str] = []
        self.policy = self.visible = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._inside = tag
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "action")]
        if tag == "script":
            self.scripts.append((values.get("type") or "", ""))
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._inside != "style":
            self.visible += " " + " ".join(data.split())


def read(*runs: Run) -> Reader:
    return Reader(page([Account.of(run) for run in runs], now=0))


def digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def data(reader: Reader) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(dict(reader.scripts)["application/json"])
    return document


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    reader = read(finished(tmp_path))
    assert reader.addresses == []
    assert "default-src 'none'" in reader.policy


def test_the_policy_allows_the_two_scripts_of_the_page_and_no_other(tmp_path: Path) -> None:
    reader = read(finished(tmp_path))
    library = gzip.decompress(base64.b64decode(dict(reader.scripts)["application/gzip"])).decode()
    assert "plotly.js" in library[:100]
    allowed = re.search(r"script-src ([^;]*);", reader.policy)
    assert allowed is not None
    assert allowed[1].split() == [digest(library), digest(dict(reader.scripts)[""])]


def test_a_name_or_a_message_is_text_and_never_markup(tmp_path: Path) -> None:
    run = Run.create(tmp_path / EVIL.replace("/", "\u2215"), recipe())
    write(run, [started(), step(1), logged(1), logged(2), Failed(error="DataError", message=EVIL)], Clock())
    reader = read(run)
    assert [kind for kind, _ in reader.scripts] == ["application/json", "application/gzip", ""]
    assert EVIL in reader.visible
    assert data(reader)["runs"][0]["name"] == run.name


def test_no_line_ends_within_the_name_of_a_flag(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe())
    write(run, [started(), step(1), Failed(error="DataError", message="<b> with --fit or --label-column")], Clock())
    html = page([Account.of(run)], now=0)
    for flag in ("--fit", "--label-column"):
        assert f'<span style="white-space: nowrap">{flag}</span>' in html
    assert "&lt;b&gt; with <span" in html


def test_one_run_shows_its_figures_restart_notice_and_checkpoints(tmp_path: Path) -> None:
    text = read(restarted(tmp_path)).visible
    for word in (
        "restarted",
        "1 (96 steps repeated)",
        "stopped without a message: killed, or the machine went down",
        "restarted (attempt 2), 96 steps to repeat",
        "checkpoint step-00000800 is corrupt: passed over",
        "saved checkpoints/step-00001055, 2.2 MB in 31.0 ms",
        "cifar10-train.rec",
        "272,474",
    ):
        assert word in text, word


def test_several_runs_show_in_what_their_recipes_differ(tmp_path: Path) -> None:
    html = page([Account.of(finished(tmp_path)), Account.of(finished(tmp_path, "faster", lr=0.2))])
    differing = re.findall(r'<tr class="differs"><th scope="row">(.*?)</th>\s*<td>(.*?)</td><td>(.*?)</td>', html)
    assert differing == [("optim.lr", "0.1", "0.2")]


def test_the_table_of_seconds_has_one_column_a_run_where_there_are_many(tmp_path: Path) -> None:
    text = page([Account.of(finished(tmp_path, name)) for name in ("a", "b", "c")])
    table = text[text.index('<table class="spent many">') :].partition("</table>")[0]
    row = table[table.index("evaluation") :].partition("</tr>")[0]
    assert row.count("<td>") == 3 and row.count("<td>2.2 %<small>6.00 s</small></td>") == 3


def test_page_says_that_runs_share_a_recipe(tmp_path: Path) -> None:
    assert "All runs have the same recipe." in read(finished(tmp_path, "a"), finished(tmp_path, "b")).visible


def test_traces_are_linked_from_where_the_page_is(tmp_path: Path) -> None:
    run = finished(tmp_path, "first run")
    trace = run.directory / "profile" / "step-00000010.json.gz"
    trace.parent.mkdir()
    trace.touch()
    (tmp_path / "pages").mkdir()
    html = report(run, tmp_path / "pages" / "a.html").read_text()
    [address] = re.findall(rf'<a href="([^"]*)">Trace {trace.name}</a>', html)
    assert address == f"../first%20run/profile/{trace.name}" and "file://" not in html
    alone = page([Account.of(run)])
    assert f"Trace {trace.name}" in alone and "<a href" not in alone, "a page of unknown place links to nothing"


def test_a_warning_is_at_the_head_of_a_run_of_no_verdict(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), Noticed(message="warning: no compiler")], Clock())
    account = Account.of(run)
    (run.directory / "events-1.jsonl").touch()
    (run.directory / "events.jsonl").unlink()  # as if the run of two ranks had been moved meanwhile
    assert held_back(account) == ["warning: no compiler"]


def test_files_that_packing_rejected_are_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    begun = started()
    data = {**begun.data, "num_rejected": 1234, "rejected": [["a/<b>.jpg", "truncated"]]}
    write(run, [replace(begun, data=data)], Clock())
    text = read(run).visible
    assert "1,234 files of the training data were rejected" in text
    assert "a/<b>.jpg: truncated" in text


def test_a_run_in_which_nothing_was_logged_yet_has_a_page_without_curves(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started()], Clock())
    reader = read(run)
    assert "Nothing was logged or evaluated yet." in reader.visible
    assert reader.scripts == []


def test_a_probe_has_a_page_without_curves_and_without_a_speed(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(steps=0), evaluated(0)], Clock(), end=True)
    reader = read(run)
    assert reader.scripts == []  # of a single point there is no curve
    assert "no updates" in reader.visible and "0.00 overall" not in reader.visible
    assert "No updates were made" in reader.visible and "made yet" not in reader.visible


def test_a_learning_rate_is_not_drawn_where_nothing_was_learned(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe(epochs=1))
    steps = [step(k) for k in range(1, 353)]
    write(run, [started(steps=352), *steps, logged(352), evaluated(352)], Clock(), end=True)
    reader = read(run)
    assert reader.scripts == [] and "Learning rate" not in reader.visible and "Figures" in reader.visible


def test_a_run_whose_epochs_have_no_figures_has_no_table_of_dashes(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe(epochs=0.2))
    write(run, [started(steps=2, num_val=0), step(1), step(2)], Clock(), end=True)
    account = Account.of(run)
    dashes = dataclasses.replace(account, epochs=(Epoch(epoch=1, step=2),))
    assert epoch_table(dashes)[1] == [] and "Epochs of" not in markdown([dashes])
    visible = Reader(page([dashes])).visible
    assert "No epoch has figures yet." in visible and "No updates were made" not in visible


def test_the_time_to_an_accuracy_is_sorted_by_its_seconds(tmp_path: Path) -> None:
    accounts = [on(tmp_path, "a", "a.rec", best=0.8), on(tmp_path, "b", "a.rec", best=0.5, lr=0.2)]
    text = page(accounts, target=0.7)
    cells = re.findall(r'<td class="figure" data-value="([^"]*)">([^<]*)(?:<small>epoch [^<]*</small>)?</td><td>', text)
    assert [value != "" for value, _ in cells] == [True, False] and float(cells[0][0]) > 0 and cells[1][1] == NONE


def test_the_step_at_which_the_loss_was_lost_is_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), *map(step, range(1, 61)), logged(20), logged(40, loss=math.nan)], Clock())
    assert "step 40 the training loss is not finite from here on" in read(run).visible


@pytest.mark.slow
def test_page_of_a_long_run_has_a_few_megabytes(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe(epochs=30))
    write(run, [started(steps=10_547), *(logged(i, loss=1 / i) for i in range(1, 10_001))], Clock())
    assert len(page([Account.of(run)])) < 3_500_000


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    parts = [Account.of(finished(tmp_path))]
    assert page(parts, now=1e9) == page(parts, now=1e9)


def on(folder: Path, name: str, data: str, *, best: float, lr: float = 0.1, seed: int = 0) -> Account:
    """A run on another data set."""
    run = Run.create(folder / name, recipe(lr, seed=seed))
    begun = started()
    changes = [replace(begun, data={**begun.data, "train": data}), *course(0, 352, total=352, best=best, seed=seed)]
    write(run, changes, Clock(), end=True)
    return Account.of(run)


def test_runs_are_ranked_among_those_on_the_same_data(tmp_path: Path) -> None:
    accounts = [
        on(tmp_path, "easy", "a.rec", best=0.99),
        on(tmp_path, "worse", "b.rec", best=0.5),
        on(tmp_path, "better", "b.rec", best=0.7, lr=0.2),
    ]
    text = page(accounts)
    tables = re.findall(r'<table class="runs sortable">(.*?)</table>', text, re.DOTALL)
    ranks = [re.findall(r'<span class="place">(\d*)</span>.*?</span>([a-z]+)</span>', table) for table in tables]
    assert ranks == [[("1", "easy")], [("1", "better"), ("2", "worse")]]
    assert "lr 0.2" in tables[1] and "lr" not in tables[0].replace("url", "")
    assert "accuracies on different images do not compare" in text
    titles = re.findall(r"<h3>(cifar10-train[^<]*)</h3>", text)
    assert len(set(titles)) == 2 and "(a.rec, cifar10-val." in titles[0], "of one name, told apart by what was read"


def test_repeats_are_one_row_with_their_mean_and_spread(tmp_path: Path) -> None:
    accounts = [on(tmp_path, f"seed-{seed}", "a.rec", best=0.8, seed=seed) for seed in range(3)]
    accounts.append(on(tmp_path, "other", "a.rec", best=0.5, lr=0.2))
    tops = spread(account.summary.quality.best.top1 for account in accounts[:3] if account.summary.quality.best)
    assert tops is not None
    (table,) = re.findall(r'<table class="runs sortable">(.*?)</table>', page(accounts), re.DOTALL)
    first, second = table.split('<th scope="row">')[1:]
    assert "3 seeds" in first and f"<b>{100 * tops.mean:.1f} %</b>" in first and f"± {100 * tops.std:.1f}" in first
    assert "other" in second and "seed-" not in second and "seeds" not in second


def test_twelve_of_many_runs_are_shown_and_the_rest_unfolds(tmp_path: Path) -> None:
    accounts = [on(tmp_path, f"run{i:02}", "a.rec", best=0.5 + i / 100) for i in range(15)]
    text = page(accounts)
    first, second = re.findall(r'<table class="runs sortable">(.*?)</table>', text, re.DOTALL)
    assert first.count('<th scope="row">') == 12 and second.count('<th scope="row">') == 3
    assert "3 more runs</summary>" in text and '<span class="place">13</span>' in second


def test_of_many_runs_the_best_have_curves_and_the_parts_of_each_are_folded(tmp_path: Path) -> None:
    accounts = [on(tmp_path, f"run{i:02}", "a.rec", best=0.5 + i / 100) for i in range(18)]
    text = page(accounts)
    pressed = re.findall(r'aria-pressed="true" data-toggle="(\d+)"', text)
    assert [int(run) for run in pressed] == list(range(17, 1, -1))
    assert re.findall(r'aria-pressed="false" data-toggle="(\d+)"', text) == ["0", "1"] and "2 more curves" in text
    assert text.count("<summary>Each of the runs</summary>") == 5
    assert "<summary>Each of the runs</summary>" not in page(accounts[:3])


def test_page_begins_with_scores_then_time_then_machine(tmp_path: Path) -> None:
    for text in (page([Account.of(finished(tmp_path, "a"))]), page([Account.of(finished(tmp_path, n)) for n in "bc"])):
        wanted = ["Results", "chart-top1", ">Mistakes<", "Where the time went", "chart-rate", "Data and machine"]
        places = [text.index(word) for word in wanted]
        assert places == sorted(places)


def test_a_recipe_shows_what_differs_from_the_defaults_and_folds_the_rest(tmp_path: Path) -> None:
    text = page([Account.of(finished(tmp_path, lr=0.3))])
    changed, whole = text[text.index("<h2>Recipe</h2>") :].split("<summary>")[:2]
    assert "optim.lr" in changed and "optim.momentum" not in changed
    assert re.match(r"All \d+ settings", whole) and "optim.momentum" in whole


def test_a_figure_that_is_not_known_has_neither_a_place_at_the_head_nor_a_column(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "short", recipe())
    write(run, [started(), *map(step, range(1, 5)), evaluated(4)], Clock())
    text = page([Account.of(run)])
    head = text[text.index('<dl class="heroes">') :].partition("</dl>")[0]
    assert "Images per second" in head and "overall" in head and f"<dd>{NONE}" not in head
    epochs = text[text.index("<h2>Epochs</h2>") :].partition("</table>")[0]
    assert "val top-1" in epochs and "train loss" not in epochs


def test_headings_go_down_one_level_at_a_time_and_pictures_have_words(tmp_path: Path) -> None:
    text = page([Account.of(finished(tmp_path)), Account.of(restarted(tmp_path))])
    levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert (
        text.count('class="chart"')
        == text.count('class="chart" id="chart-')
        == len(re.findall(r'role="img" aria-label="[^"]+: a curve', text))
    )


def test_the_verdict_stands_at_the_head_of_a_runs_page_and_with_each_of_several(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path / name, recipe()) for name in "ab"]
    for run in runs:
        write(run, [started(), *course(0, 352, total=352)], Clock(), end=True)
    sentence = " ".join(verdict_sentences(diagnose(runs[0]))[0].split())
    alone = read(runs[0]).visible
    assert "What held it back:" in alone and sentence[1:] in alone
    assert alone.index("What held it back:") < alone.index("Where the time went")
    several = read(*runs).visible
    assert "What held it back:" not in several and several.count(sentence[1:]) == 2


def test_a_day_is_said_once_among_what_happened(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(steps=20), *course(0, 20, total=20)], Clock(), end=True)
    first, *_, last = milestones(Account.of(run).history)
    visible = read(run).visible
    assert first["day"] == last["day"] and first["time"] != last["time"]
    assert f"{first['day']} {first['time']}" in visible
    assert last["time"] in visible and f"{last['day']} {last['time']}" not in visible


def test_only_warnings_are_marked_among_what_happened(tmp_path: Path) -> None:
    said = [
        Noticed(message="licence of the weights: unknown"),
        Noticed(message="warning: labels.csv: these may be splits"),
        Halved(message="out of memory: 8 images at a time", images=8),
    ]
    later = [
        Noticed(message="checkpoint step-00000010 is corrupt: passed over", step=10),
        Noticed(message="licence of the weights: unknown", step=10),
        Noticed(message="fine-tuning raised validation top-1", step=20),
    ]
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(steps=20), *said, *course(0, 20, total=20), *later], Clock(), end=True)
    tones = {line["what"]: line["tone"] for line in milestones(Account.of(run).history)}
    marked = [tones[notice.message] for notice in (*said, *later)]
    assert marked == ["", "warn", "warn", "warn", "", ""]
