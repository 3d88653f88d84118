from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.monitor.rules import made
from tests.monitor.rules.made import evidence, feed, ledger, machine
from tests.reports.runs import finished, recipe, restarted, started

from steadytrain.cli import main
from steadytrain.cli.train import _print_verdict
from steadytrain.config import Recipe
from steadytrain.events import MachineStats, Started
from steadytrain.monitor import Cause, diagnose
from steadytrain.reports.verdict import verdict_brief, verdict_line, verdict_text
from steadytrain.run import Run
from steadytrain.training import train

CAUSE = Cause(
    name="threads",
    share=0.43,
    sentence="The loop waits 43 % of the time for images, and the only loader thread spends 91 % of it decoding.",
    evidence=("an update takes 1 s",),
    change="--threads 2",
    saves=0.38,
)


def test_the_verdict_of_a_run_is_printed_with_its_pace_and_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path)
    assert main(["diagnose", str(run.directory), "--all"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{run.directory}\n")
    assert "1. nothing" in output and "images/s in the steady state" in " ".join(output.split())
    assert "not measurable here:" in output


def test_a_short_run_is_diagnosed_in_ten_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = finished(tmp_path)
    assert main(["diagnose", str(run.directory)]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") <= 10 and "1. nothing" in said.out and "time: " in said.out
    assert said.err == "a short run: --all shows the evidence and the other causes\n"


def test_one_run_is_one_document_and_a_folder_is_a_list_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = finished(tmp_path), restarted(tmp_path)
    assert main(["diagnose", str(run.directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"] == str(run.directory) and document["causes"][0]["name"] == "nothing"
    assert sum(document["ledger"]["seconds"].values()) == pytest.approx(document["ledger"]["wall_seconds"], rel=0.01)
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [row["run"] for row in listed] == [str(run.directory), str(other.directory)]
    assert listed[0] == document


def test_a_restart_is_told_with_what_it_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = restarted(tmp_path)
    assert main(["diagnose", str(run.directory)]) == 0
    assert "was lost" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no run named"),
        (["no-such-run"], "no-such-run does not exist"),
        (["{run}", "--seconds", "3"], "need --probe"),
        (["{run}", "--force"], "need --probe"),
        (["{run}", "--model", "own:make"], "need --probe"),
        (["{run}", "--nonsense"], "--nonsense"),
        (["{empty}"], "no events"),
    ],
)
def test_a_wrong_use_is_told_in_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, empty = finished(tmp_path), Run.create(tmp_path / "empty", recipe())
    arguments = [word.format(run=run.directory, empty=empty.directory) for word in words]
    assert main(["diagnose", *arguments]) in (1, 2)
    output = capsys.readouterr()
    assert output.out == "" and message in output.err and len(output.err.splitlines()) == 1


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    facts = evidence(
        ledger=ledger(input_decode=35.0, evaluation=20.0, checkpoint=10.0, startup=10.0),
        feed=feed(decode=95.0),
        started=made.started(cores=4, compute_threads=4),
        machine=machine(cores=4, machine_cores=4, cpu=1.6, idle=2.4, missing=("pressure.io", "steal")),
        evaluations=(9, 20.0),
        checkpoints=(90, 10.0),
    )
    shown = verdict_text(diagnose(facts), "runs/a", width=width).splitlines()
    assert max(map(len, shown)) < width
    assert shown[2] == "1. threads: 25 % of the time"
    assert all(len(line) < width for line in verdict_brief(CAUSE, width=width))


def test_the_plain_line_can_be_taken_apart() -> None:
    line = verdict_line(CAUSE)
    assert line.startswith('verdict cause=threads share=0.430 saves=0.380 change="--threads 2" sentence="The loop')
    assert "\n" not in line
    assert "change" not in verdict_line(Cause(name="nothing", share=0.0, sentence="Nothing."))


def test_at_the_end_of_a_run_a_pipe_gets_the_plain_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _print_verdict(finished(tmp_path))
    output = capsys.readouterr()
    assert output.err.startswith("verdict cause=nothing ") and output.out == ""


def test_a_log_that_nothing_can_be_made_of_does_not_spoil_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "a", recipe())
    with run.log() as log:
        log.append(MachineStats(seconds=1.0, cores=1, machine_cores=1))
    _print_verdict(run)
    assert capsys.readouterr().err.startswith("no verdict: ")


def test_names_in_a_log_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "a", recipe())
    begun: Started = started()
    with run.log() as log:
        log.append(begun)
        log.append(MachineStats(seconds=1.0, cores=1, machine_cores=1, missing=("\x1b[2Jnonsense",)))
    assert main(["diagnose", str(run.directory)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_probe_tells_the_ceilings_and_the_verdict_knows_them(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    assert main(["diagnose", str(run.directory), "--probe", "--seconds", "0.3", "--json"]) == 0
    output = capsys.readouterr()
    assert "probe, images/s: loading alone" in output.err
    ceiling = json.loads(output.out)["ceiling"]
    assert ceiling["probed"] and ceiling["most"] == min(ceiling["feed"], ceiling["compute"])


def test_a_network_of_ones_own_is_probed_when_it_is_named(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "diagnosed.py").write_text(
        "from torch import nn\ndef make(num_classes, **told):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    run = Run.create(tmp_path / "run", recipe.with_({"model.name": "diagnosed:make"}))
    train(run, allow_import=True)
    words = ["diagnose", str(run.directory), "--probe", "--seconds", "0.3"]
    assert main(words) == 2
    assert "--model diagnosed:make" in capsys.readouterr().err
    assert main([*words, "--model", "diagnosed:make"]) == 0
