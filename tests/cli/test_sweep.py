"""``steady sweep`` as it is typed, with real runs of digits."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.terminal import on_terminal, unstyled
from tests.forked import start

from steadytrain.cli import main, train
from steadytrain.config import Data, Model, Recipe
from steadytrain.errors import RunError
from steadytrain.events import Ended, Evaluated, Resumed, Started
from steadytrain.reports import spread
from steadytrain.run import Run
from steadytrain.tuning import sweep_trainers
from steadytrain.tuning.sweep import Range
from steadytrain.tuning.sweep_runs import _point_of
from steadytrain.tuning.sweep_trainers import LOG, ProcessTrainer, Slot, resume_command

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = """
batch_size = 32

[model]
name = "digits"

[optim]
lr = 0.05
warmup_epochs = 0

[budget]
epochs = 3

[data]
pad = 1
holdout = 0.2

[parallel]
device = "cpu"
threads = 1
compute_threads = 1
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train each run in this process, by the words that a process of its own gets, where that is not the fact."""

    def start(self: ProcessTrainer, run: Run, slot: Slot, until: float | None) -> SimpleNamespace:
        with (run.directory / LOG).open("a") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                code = main(resume_command(run, self._allowed, until))
            except (KeyError, OSError):  # of a network of the user's
                code = 1
                traceback.print_exc()
        return SimpleNamespace(returncode=code, poll=lambda: code, wait=lambda: code)

    monkeypatch.setattr(ProcessTrainer, "_start", start)


def command(recipe: Path, digits: Path, folder: Path, *words: str) -> list[str]:
    return ["sweep", str(recipe), str(digits), "--run", str(folder), *words]


def table(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())["rows"]
    return rows


def results(folder: Path) -> list[dict[str, Any]]:
    """The table without what depends on how fast this machine was."""
    slow = ("seconds", "seconds_to_target", "cost", "cost_to_target")
    return [{name: value for name, value in row.items() if name not in slow} for row in table(folder)]


def runs_of(folder: Path) -> list[Run]:
    return [Run.open(path.parent) for path in sorted(folder.glob("*/*/recipe.json"))]


def top1s(run: Run) -> list[tuple[float, float]]:
    return [(event.epoch, event.top1) for event in run.events() if isinstance(event, Evaluated)]


@pytest.mark.usefixtures("in_process")
def test_a_grid_with_seeds_is_a_table_of_means_best_first(
    recipe_file: Path,
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "sweep"
    words = command(recipe_file, digits, folder, "--over", "lr=1e-6,0.05", "--seeds", "2", "--target", "0.3")
    assert main([*words, "--price", "3600"]) == 0
    printed = capsys.readouterr()
    good, bad = table(folder)
    assert (good["name"], bad["name"]) == ("lr=0.05", "lr=1e-06")
    assert [row["finished"] for row in (good, bad)] == [2, 2]
    bests = [Run.open(folder / "lr=0.05" / f"seed-{k}").progress().best for k in (0, 1)]
    expected = spread([event.top1 for event in bests if event is not None and event.is_best])
    assert expected is not None and good["best"] == pytest.approx(expected.mean)
    assert good["best_spread"]["std"] == pytest.approx(expected.std)
    firsts = [next(at for at, top1 in top1s(Run.open(folder / "lr=0.05" / f"seed-{k}")) if top1 >= 0.3) for k in (0, 1)]
    assert good["epochs_to_target"] == sum(firsts) / 2 and (good["reached"], bad["reached"]) == (2, 0)
    assert 0 < good["cost_to_target"] < good["cost"] == pytest.approx(2 * good["seconds"], rel=0.1), "one a second"
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["case", "best", "top-1"] and lines[1].startswith("lr=0.05 ")
    assert (
        "time to 30.0" in (folder / "report.html").read_text()
        and "lr=0.05: 2 seeds" in (folder / "report.html").read_text()
    )
    before = {run.directory: run.log_path().read_bytes() for run in runs_of(folder)}
    assert main([*words, "--price", "3600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == json.loads((folder / "sweep.json").read_text())["rows"]
    assert {run.directory: run.log_path().read_bytes() for run in runs_of(folder)} == before, "finished runs are kept"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_that_is_stopped_midway_comes_to_the_same_table(
    recipe_file: Path, digits: Path, tmp_path: Path, number: signal.Signals
) -> None:
    words = ("--over", "lr=0.02,0.05", "--seeds", "2", "--epochs", "6", "--set", "every.save_steps=3")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(command(recipe_file, digits, whole, *words)) == 0
    child = subprocess.Popen(
        [sys.executable, "-m", "steadytrain", *command(recipe_file, digits, killed, *words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    second, deadline = killed / "lr=0.02" / "seed-1" / "checkpoints", time.monotonic() + 120
    while not list(second.glob("step-*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(number)
    code = child.wait(60)
    assert code == (75 if number == signal.SIGTERM else -number)
    wait_until_free(killed)
    assert not (killed / "sweep.json").exists()
    assert main(command(recipe_file, digits, killed, *words)) == 0
    assert results(killed) == results(whole)
    stopped = [run for run in runs_of(killed) if sum(isinstance(e, Started) for e in run.events()) > 1]
    assert [run.directory.parent.name for run in stopped] == ["lr=0.02"]
    assert any(isinstance(event, Resumed) for event in stopped[0].events())


def wait_until_free(folder: Path) -> None:
    """Until no process of a killed sweep trains there any more: they save, and end."""
    deadline = time.monotonic() + 60
    while any(run.is_held() for run in runs_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.usefixtures("in_process")
def test_a_search_without_optuna_is_refused_before_the_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    (tmp_path / "photos").mkdir()
    assert main(["sweep", "photos", "--over", "lr=1e-3..1 log", "--search", "4"]) == 2
    said = capsys.readouterr().err
    assert "--search needs Optuna" in said and "reading" not in said


@pytest.mark.slow
def test_halving_stops_the_worst_at_the_same_epochs_and_the_best_ends_as_without(
    recipe_file: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    words = ("--over", "lr=1e-6,1e-5,0.05", "--epochs", "3")
    assert main(command(recipe_file, digits, tmp_path / "halved", *words, "--halving")) == 0
    rows = {row["name"]: row for row in table(tmp_path / "halved")}
    assert {name: (row["status"], row["epochs"]) for name, row in rows.items()} == {
        "lr=0.05": ("finished", 3.0),
        "lr=1e-05": ("stopped at epoch 1", 1.0),
        "lr=1e-06": ("stopped at epoch 1", 1.0),
    }
    assert "epoch 1: 1 case goes on" in capsys.readouterr().err
    kept = Run.open(tmp_path / "halved" / "lr=0.05" / "seed-0")
    assert [event.status for event in kept.events() if isinstance(event, Ended)] == ["preempted", "finished"]
    assert main(command(recipe_file, digits, tmp_path / "alone", "--over", "lr=0.05", "--epochs", "3")) == 0
    assert top1s(kept) == top1s(Run.open(tmp_path / "alone" / "lr=0.05" / "seed-0"))
    before = [run.log_path().read_bytes() for run in runs_of(tmp_path / "halved")]
    assert main(command(recipe_file, digits, tmp_path / "halved", *words, "--halving")) == 0
    assert [run.log_path().read_bytes() for run in runs_of(tmp_path / "halved")] == before


@pytest.mark.usefixtures("in_process")
def test_a_search_goes_on_where_it_was_and_tries_what_it_would_have(
    recipe_file: Path, digits: Path, tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    words = ("--over", "lr=1e-3..1e-1 log", "batch_size=16,32", "--epochs", "1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(command(recipe_file, digits, whole, *words, "--search", "3")) == 0
    assert main(command(recipe_file, digits, parts, *words, "--search", "1")) == 0
    assert main(command(recipe_file, digits, parts, *words, "--search", "3")) == 0
    assert results(parts) == results(whole) and len(table(whole)) == 3
    rates = [row["changes"]["optim.lr"] for row in table(whole)]
    assert len(set(rates)) == 3 and all(1e-3 <= rate <= 1e-1 for rate in rates)
    assert {row["changes"]["batch_size"] for row in table(whole)} <= {16, 32}


def test_each_trial_of_a_search_says_on_a_terminal_that_it_trains(
    recipe_file: Path, digits: Path, tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    words = command(recipe_file, digits, tmp_path / "runs", "--over", "lr=1e-3..1e-1 log", "--search", "2")
    code, sent = on_terminal([sys.executable, "-m", "steadytrain", *words, "--epochs", "1"], 100)
    first, _, second = unstyled(sent).partition("1 of 2 trials")
    assert code == 0 and "training; steady report" in first and "training; steady report" in second


@pytest.mark.parametrize(
    "params", [{"model.name": '"own:net"'}, {"model.name": '"mlp"', "optim.loss": '"own:loss"'}, {"optim.lr": 5.0}, {}]
)
def test_values_that_only_the_journal_of_a_search_has_are_refused(params: dict[str, Any]) -> None:
    over = {"optim.lr": Range(0.1, 1.0)} if "optim.lr" in params else {"model.name": ["mlp", "resnet20"]}
    with pytest.raises(RunError, match=r"the journal of the search has .*, which is none of its values"):
        _point_of(SimpleNamespace(params=params, number=3), over)  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_process")
def test_a_trial_that_cannot_be_built_has_failed_and_the_search_ends(
    recipe_file: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    over = ("--over", "batch_size=32,18", "optim.accumulate=1,4")
    words = command(recipe_file, digits, tmp_path / "sweep", *over, "--epochs", "1")
    for _ in range(2):
        assert main([*words, "--search", "4"]) == 1
        rows = table(tmp_path / "sweep")
        together = {tuple(row["changes"].values()): (row["status"], row["why"]) for row in rows}
        failed = together.pop((18, 4))
        assert failed[0] == "failed" and "batch_size=18 cannot be split" in failed[1], "though each value alone can be"
        assert together and set(together.values()) == {("finished", "")}
        assert sorted(row["name"][:3] for row in rows) == ["000", "001", "002", "003"]
    shown = capsys.readouterr()
    assert re.search(r"^failed: case 00\d,batch_size=18,accumulate=4: ", shown.err, re.MULTILINE)
    assert max(map(len, shown.out.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_search_that_is_repeated_trains_again_what_failed(
    recipe_file: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    Path("sick_net.py").write_text(
        f"import os\n{NET.replace('make', 'build')}\ndef make(num_classes, channels):\n"
        "    if os.path.exists('sick'):\n        raise OSError('no device')\n    return build(num_classes, channels)\n"
    )
    words = command(recipe_file, digits, tmp_path / "sweep", "--model", "sick_net:make", "--over", "lr=0.01..0.1")
    Path("sick").touch()
    assert main([*words, "--epochs", "1", "--search", "1"]) == 1
    [row] = table(tmp_path / "sweep")
    assert row["status"] == "failed" and "no device" in row["why"]
    Path("sick").unlink()
    assert main([*words, "--epochs", "1", "--search", "1"]) == 0
    assert [(again["name"], again["status"]) for again in table(tmp_path / "sweep")] == [(row["name"], "finished")]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_search_stops_a_trial_that_is_worse_than_the_median(
    recipe_file: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one, where one that is complete is enough to be compared with."""
    pytest.importorskip("optuna")
    monkeypatch.setattr("steadytrain.tuning.sweep_runs.LEAST_COMPLETE", 1)
    words = ("--over", "lr=1e-7..1e-1 log", "--search", "2", "--halving", "--seed", "4")
    folder = tmp_path / "sweep"
    assert main(command(recipe_file, digits, folder, *words)) == 0
    good, bad = table(folder)
    assert (good["status"], bad["status"]) == ("finished", "stopped at epoch 1")
    assert good["name"].startswith("000,") and good["changes"]["optim.lr"] > bad["changes"]["optim.lr"]
    logs = [run.log_path().read_bytes() for run in runs_of(folder)]
    assert main(command(recipe_file, digits, folder, *words)) == 0
    assert [run.log_path().read_bytes() for run in runs_of(folder)] == logs and table(folder) == [good, bad]


@pytest.mark.parametrize(
    ("job", "batch"),
    [("", 3 * 10), ('name = "sizes"\nprocs = 3\ngpus = 3\n', 3 * 8), ('name = "sizes"\nprocs = 3\ngpus = 0\n', 3 * 10)],
)
def test_a_default_batch_is_that_of_the_ranks_of_a_run(
    recipe_file: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, batch: int
) -> None:
    recipe_file.write_text(RECIPE.replace("batch_size = 32", ""))
    made: list[Recipe] = []

    def recipe_for(*args: Any, **more: Any) -> Recipe:
        made.append(train.recipe_for(*args, **more))
        return made[-1]

    monkeypatch.setattr("steadytrain.cli.sweep.recipe_for", recipe_for)
    (tmp_path / "job.toml").write_text(job)
    words = command(recipe_file, digits, tmp_path / "sweep", "--over", "lr=0.02,0.05", "--dry-run")
    place = ["--on", "slurm", "--job", str(tmp_path / "job.toml")] if job else ["--procs", "3"]
    assert main([*words, *place]) == 0
    assert {recipe.batch_size for recipe in made} == {batch}


def test_runs_elsewhere_are_shown_and_nothing_is_made(
    recipe_file: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(recipe_file, digits, tmp_path / "sweep", "--over", "lr=0.02,0.05", "--seeds", "2", "--dry-run")
    assert main(words) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    runs = [tmp_path / "sweep" / f"lr={rate}" / f"seed-{seed}" for rate in (0.02, 0.05) for seed in (0, 1)]
    assert lines == [["steady", "resume", str(run)] for run in runs]

    (tmp_path / "gpu.toml").write_text('name = "sizes"\nminutes = 30\n[slurm]\npartition = "gpu"\n')
    assert main([*words, "--on", "slurm", "--job", str(tmp_path / "gpu.toml"), "--parallel", "3"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-3%3\n" in script and "#SBATCH --partition=gpu\n" in script
    assert f"    2) set -- -P -m steadytrain resume {runs[2]} ;;" in script
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_runs_at_a_time_give_the_same_table(recipe_file: Path, digits: Path, tmp_path: Path) -> None:
    """More than there are cores, on a machine of two."""
    words = ("--over", "lr=0.02,0.05,0.1", "--epochs", "1")
    assert main(command(recipe_file, digits, tmp_path / "one", *words)) == 0
    assert main(command(recipe_file, digits, tmp_path / "three", *words, "--parallel", "3")) == 0
    assert results(tmp_path / "one") == results(tmp_path / "three")


@pytest.mark.usefixtures("in_process")
def test_a_run_that_diverges_is_a_result(recipe_file: Path, digits: Path, tmp_path: Path) -> None:
    words = command(recipe_file, digits, tmp_path / "sweep", "--over", "lr=0.05,1e30", "--epochs", "1")
    assert main(words) == 0
    assert [(row["name"], row["status"]) for row in table(tmp_path / "sweep")] == [
        ("lr=0.05", "finished"),
        ("lr=1e+30", "diverged"),
    ]


@pytest.mark.usefixtures("in_process")
def test_where_every_case_fails_it_is_said_why_and_nothing_goes_on(
    recipe_file: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    Path("failing_net.py").write_text(f"{NET.replace('make', 'build')}\ndef make(**options): raise KeyError('swsh')\n")
    words = command(recipe_file, digits, tmp_path / "sweep", "--model", "failing_net:make", "--over", "lr=1,2,3")
    assert main([*words, "--epochs", "3", "--halving"]) == 1
    errors = capsys.readouterr().err
    assert (
        errors.count("KeyError: 'swsh'") == 3 and "all have failed" in errors and "%" not in errors.split("halving")[1]
    )
    assert {row["status"] for row in table(tmp_path / "sweep")} == {"failed"}


@pytest.mark.usefixtures("in_process")
def test_the_recipe_file_says_what_to_sweep_and_train_reads_it_too(
    recipe_file: Path, digits: Path, tmp_path: Path
) -> None:
    recipe_file.write_text(f"{RECIPE}\n[sweep]\nseeds = 2\n[sweep.cases]\nplain = {{}}\nnone = {{ optim.lr = 1e-6 }}\n")
    assert main(command(recipe_file, digits, tmp_path / "sweep", "--epochs", "1")) == 0
    assert [(row["name"], row["seeds"]) for row in table(tmp_path / "sweep")] == [("plain", 2), ("none", 2)]
    assert (
        main(["train", str(digits), "--recipe", str(recipe_file), "--epochs", "1", "--run", str(tmp_path / "a")]) == 0
    )


NET = """
from torch import nn

def make(num_classes, channels, **options):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
"""


@pytest.mark.usefixtures("in_process")
def test_code_is_imported_for_the_command_line_and_never_for_a_file(
    recipe_file: Path,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("swept_net.py").write_text(NET)
    words = command(recipe_file, digits, tmp_path / "sweep", "--epochs", "1")
    assert main([*words, "--over", "model=swept_net:make,mlp"]) == 0
    assert {row["name"]: row["status"] for row in table(tmp_path / "sweep")} == {
        "name=swept_net-make": "finished",
        "name=mlp": "finished",
    }
    recipe_file.write_text(f'{RECIPE}\n[sweep.cases]\nown = {{ model.name = "swept_net:make" }}\n')
    assert main(words) == 2
    assert "names the code swept_net:make, which is not imported for a file" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "cases"), [("batches", 10), ("optimizers", 4), ("schedules", 12)])
def test_the_tables_of_the_old_practice_are_sweeps(
    name: str, cases: int, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every case is a recipe that can be; nothing is trained here."""
    monkeypatch.setattr("steadytrain.tuning.sweep_trainers.ProcessTrainer.train", lambda self, runs, until=None: None)
    words = command(RECIPES / f"cifar10-{name}.toml", digits, tmp_path / "sweep", "--holdout", "0.2")
    assert main(words) == 0
    assert len(runs_of(tmp_path / "sweep")) == cases
    assert len({run.recipe.digest for run in runs_of(tmp_path / "sweep")}) == cases


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--over", "optim.lrr=0.1"], "case lrr=0.1: unknown key 'optim.lrr'. Did you mean lr?"),
        (["--over", "optimizer=sgd,adamww"], "case name=adamww: optim.name is 'adamww'"),
        (["--over", "batch_size=64,0"], "case batch_size=0: batch_size is 0; it must be 1 to 1048576"),
        (["--over", "batch_size"], "--over 'batch_size' must be KEY=VALUE,VALUE, such as --over batch_size=64,256"),
        (["--over", "lr=0.1..1"], "optim.lr has a range, from which a search draws: add --search N"),
        (
            ["--over", "model=resnet20,resnet2O"],
            "case name=resnet2O: there is no model 'resnet2O'. Did you mean resnet",
        ),
        ([], "nothing is to be swept: give --over KEY=VALUE,VALUE, or a table [sweep] in"),
        (["--over", "lr=1,2", "--seeds", "0"], "--seeds is 0; it must be from 1 to 1000"),
        (["--over", "lr=1,2", "--repeats", "3"], "steady sweep takes no --repeats: use --seeds"),
        (["--over", "lr=1,2", "--halving"], "--halving has nothing to stop: 2 cases of 3 epochs"),
        (["--over", "lr=1,2", "--on", "ssh"], "--on"),
        (["--over", "lrr=1e-3..1", "--search", "3"], "unknown key 'lrr'"),
        (["--over", "lr=1e-3..1 lgo", "--search", "3"], "optim.lr is '1e-3..1 lgo'"),
        (["--over", "batch_size=0..64", "--search", "3"], "batch_size is 0; it must be 1 to 1048576"),
        (["--over", "optimizer=sgd,adamww", "--search", "3"], "optim.name is 'adamww'"),
        (["--over", "lr=1,2", "--job", "gpu.toml"], "--job describes jobs elsewhere: add --on slurm"),
        (["--over", "lr=1,2", "--search", "3", "--on", "slurm"], "a search waits for its runs"),
        (["--over", "lr=1,2", "--search", "3", "--dry-run"], "--dry-run shows runs that are known beforehand"),
        (["--over", "lr=1,2", "--until", "3"], "--until"),
        (["--over", "lr=1,2", "--target", "90"], "--target is 90; it must be above 0, up to 1"),
        (["--over", "lr=1,2", "--device", "mps"], "sees no GPU of a Mac"),
        (["--over", "lr=1,2", "--batch-size", "auto"], "batch_size cannot be auto in a sweep"),
    ],
)
def test_wrong_words_are_refused_before_any_run_begins(
    recipe_file: Path,
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    message: str,
) -> None:
    assert main(command(recipe_file, digits, tmp_path / "sweep", *words)) == 2
    assert message in capsys.readouterr().err
    assert not any(run.progress().started for run in runs_of(tmp_path / "sweep"))


def test_until_stops_at_an_evaluation_and_the_same_command_goes_on(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(digits), "--model", "mlp", "--epochs", "4", "--batch-size", "32", "--device", "cpu"]
    words += ["--holdout", "0.2", "--set", "parallel.compute_threads=1"]
    run = ["--run", str(tmp_path / "run")]
    assert main([*words, *run, "--until", "2"]) == 75
    assert [epoch for epoch, _ in top1s(Run.open(tmp_path / "run"))] == [1.0, 2.0]
    assert main([*words, *run, "--until", "1.5"]) == 75
    assert "was evaluated at epoch 1.5 already" in capsys.readouterr().err
    assert main([*words, *run]) == 0
    assert main([*words, "--run", str(tmp_path / "whole")]) == 0
    assert top1s(Run.open(tmp_path / "run")) == top1s(Run.open(tmp_path / "whole"))
    assert main([*words, "--run", str(tmp_path / "end"), "--until", "4"]) == 0, "the last evaluation ends the run"
    assert main([*words, *run, "--until", "0"]) == 2


def test_processes_end_with_the_sweep(recipe_file: Path, digits: Path, tmp_path: Path) -> None:
    """Where it is killed, what it has started saves and ends."""
    folder = tmp_path / "sweep"
    child = start(main, command(recipe_file, digits, folder, "--over", "lr=0.02,0.05", "--epochs", "500"))
    first, deadline = folder / "lr=0.02" / "seed-0", time.monotonic() + 120
    while not list((first / "checkpoints").glob("step-*")) and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.kill()
    child.join(60)
    wait_until_free(folder)
    [ended] = [event for event in Run.open(first).events() if isinstance(event, Ended)]
    assert ended.status == "preempted"


@pytest.mark.parametrize(("device", "num_slots"), [("auto", 3), ("cuda", 3), ("cpu", 1), ("cuda:1", 1)])
def test_a_run_at_a_time_on_each_gpu_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, device: str, num_slots: int
) -> None:
    monkeypatch.setattr(sweep_trainers, "accelerators", lambda: (None,) * 3)
    recipe = Recipe(data=Data(train="a"), model=Model("mlp")).with_({"parallel.device": device})
    assert len(sweep_trainers.slots_for(recipe, None)) == num_slots
