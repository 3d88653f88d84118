"""``steady cost`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.reports.runs import Clock, course, finished, recipe, restarted, started, write

import steadytrain as st
from steadytrain.cli import main
from steadytrain.run import Run

Captured = pytest.CaptureFixture[str]


def test_a_run_is_told_by_attempts_and_purposes_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    run = restarted(Path())
    words = ["--instance", "p2.16xlarge", "--target", "0.8", "--interruptions", "0.2"]
    assert main(["cost", str(run.directory), *words]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    for what in ("killed", "finished", "work done again", "an epoch", "to top-1 80.0 %", "price of 2018-03-16"):
        assert what in out, what
    for what in ("us-east-1e", "us-west-2", "interruptions an hour: 0.2 (as given)", "spot against on demand"):
        assert what in out, what


def test_json_is_one_document_whose_attempts_add_up(tmp_path: Path, capsys: Captured) -> None:
    run = restarted(tmp_path)
    assert main(["cost", str(run.directory), "--price", "3.6", "--target", "0.999", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "steadytrain-cost"
    assert document["so_far"] == pytest.approx(sum(attempt["money"] for attempt in document["attempts"]))
    assert document["so_far"] == pytest.approx(document["seconds"] / 1000)
    assert document["target"]["money"] is None and 0.8 < document["target"]["best"] < 0.999
    assert document["price"]["date"] and document["shares"]["lost"] > 0 and document["at_end"] is None
    bill = st.bill(run.directory, price="3.6")
    assert (bill.so_far, bill.at_end, len(bill.parts)) == (document["so_far"], None, len(document["attempts"]))
    with pytest.raises(st.SteadyError, match="no price is known of"):
        st.bill(run)


def test_a_folder_of_runs_has_a_sum(tmp_path: Path, capsys: Captured) -> None:
    finished(tmp_path / "runs")
    restarted(tmp_path / "runs")
    assert main(["cost", str(tmp_path / "runs"), "--price", "3.6 EUR"]) == 0
    out = capsys.readouterr().out
    assert "2 runs: " in out.splitlines()[-1] and out.rstrip().endswith("EUR")


def test_other_machines_are_marked_as_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create("a", recipe())
    begun = started(steps=60)
    begun = replace(begun, machine={**begun.machine, "device": "Tesla K80", "precision": "fp32"})
    write(run, [begun, *course(0, 60, total=60)], Clock(), end=True)
    assert main(["cost", str(run.directory), "--price", "0.9", "--what-if"]) == 0
    out = capsys.readouterr().out
    assert "ESTIMATE" in out and "41 % too slow" in out and "V100" in out
    assert max(map(len, out.splitlines())) <= 80
    asked = ["cost", str(run.directory), "--price", "0.9", "--what-if", "--json"]
    assert main([*asked, "--cloud", "AWS", "--region", "us-east-1"]) == 0
    offers = [row["offer"] for row in json.loads(capsys.readouterr().out)["what_if"]]
    assert {(offer["cloud"], offer["region"]) for offer in offers} == {("aws", "us-east-1")}
    assert offers


def test_the_price_that_a_run_recorded_needs_no_flag(tmp_path: Path, capsys: Captured) -> None:
    run = Run.create(tmp_path / "a", recipe())
    price = {"name": "as given", "per_hour": 3.6, "currency": "USD", "date": "2026-11-24", "spent": 0.0}
    write(run, [replace(started(steps=60), price=price), *course(0, 60, total=60)], Clock(), end=True)
    assert main(["cost", str(run.directory)]) == 0
    assert "3.6 USD/h (as given; price of 2026-11-24)" in " ".join(capsys.readouterr().out.split())
    assert main(["report", str(run.directory), "-o", "-"]) == 0
    assert "| cost | " in capsys.readouterr().out
    assert main(["watch", str(run.directory), "--seconds", "0"]) == 0
    assert "cost: " in capsys.readouterr().out


def test_the_table_of_prices(capsys: Captured) -> None:
    assert main(["cost", "prices", "p2", "aws"]) == 0
    out = capsys.readouterr().out
    assert "p2.16xlarge" in out and "2017-03-16" in out and "p3" not in out.partition("sources")[0]
    assert max(map(len, out.splitlines())) <= 80
    assert main(["cost", "prices", "V100", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["prices"]
    assert {row["accelerator"] for row in rows} == {"V100"} and all(row["source"] and row["date"] for row in rows)


def test_a_refresh_says_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "vms.csv").write_text("InstanceType,Region,Price\nx9.huge,us-east-1,7.5\nx9.tiny,us-east-1,\n")
    assert main(["cost", "prices", "--refresh", str(tmp_path / "vms.csv"), "--cloud", "aws"]) == 0
    assert capsys.readouterr().out.startswith("kept 1 price of aws, of 20")
    assert main(["cost", "prices", "x9"]) == 0
    assert "7.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no run named"),
        (["gone"], "does not exist"),
        (["run", "--what-if"], "no price is known of run: give --price 2.40"),
        (["run", "--price", "-1"], "--price is -1"),
        (["run", "--instance", "p3.2xlrge"], "Did you mean p3.2xlarge"),
        (["run", "--instance", "p3.2xlarge", "--price", "1"], "exclude each other"),
        (["run", "--region", "us-east-1"], "need --instance"),
        (["prices", "--refresh", "https://example.org/aws/vms.csv"], "fetch it first (curl -LO"),
        (["run", "--price", "1", "--target", "90"], "--target is 90; it must be from 0 to 1"),
        (["run", "--refresh", "x.csv"], "steady cost prices --refresh"),
        (["prices", "nothing-like-it"], "no price matches"),
        (["prices", "--price", "3"], "--price asks about a run"),
        (["prices", "--refresh", "gone.csv"], "cannot read gone.csv"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    words: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(tmp_path, "run")
    assert main(["cost", *words]) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1


def test_without_a_price_the_hours_are_shown(tmp_path: Path, capsys: Captured) -> None:
    run = restarted(tmp_path)
    assert main(["cost", str(run.directory)]) == 0
    out = capsys.readouterr().out
    seconds = st.bill(run, price="1").seconds
    for what in ("of wall time in 2 attempts", f"{seconds / 3600:.3g} hours of devices, 1 at a time"):
        assert what in out, what
    assert "no price is known: --price 2.40 (an hour)" in out
    assert max(map(len, out.splitlines())) <= 100
    assert main(["cost", str(run.directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["price"] is None and document["so_far"] is None
    assert document["seconds"] == pytest.approx(seconds) and len(document["attempts"]) == 2
    assert main(["cost", str(run.directory), "--target", "0.9"]) == 2
    assert "no price is known of" in capsys.readouterr().err


def test_runs_with_and_without_a_price_are_shown_together(tmp_path: Path, capsys: Captured) -> None:
    for name, price in (("a", 3.6), ("b", None)):
        run = Run.create(tmp_path / name, recipe())
        known = {"name": "as given", "per_hour": price, "currency": "USD", "date": "2026-11-24", "spent": 0.0}
        begun = replace(started(steps=60), price=known if price else None)
        write(run, [begun, *course(0, 60, total=60)], Clock(), end=True)
    assert main(["cost", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "USD" in out and "no price is known" in out and "2 runs" not in out
