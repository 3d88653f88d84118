"""``steady tune``, and what ``steady train`` leaves to measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.forked import start

from steadytrain.cli import main
from steadytrain.events import Started
from steadytrain.launch.supervise import free_port, rank_variables
from steadytrain.run import Run

QUICK = ["--device", "cpu", "--set", "parallel.compute_threads=1", "--set", "data.pad=1"]


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow  # needs a machine that leaves half a minute for measuring
def test_the_tuned_recipe_trains_and_is_explained(
    digits: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tune = ["tune", str(digits), "--model", "digits", "--epochs", "1", "--minutes", "0.5", *QUICK]
    tune += ["--set", "precision.name=fp32"]  # which leaves fewer things to measure
    assert main([*tune, "-o", "tuned.toml"]) == 0
    printed = capsys.readouterr()
    assert "batch_size = " in printed.out and "images/s" in printed.err
    text = (tmp_path / "tuned.toml").read_text()
    assert text.startswith("# digits tuned for ") and "#   steady train --recipe tuned.toml" in text

    assert main(["train", "--recipe", "tuned.toml", "--run", "run"]) == 0
    trained = Run.open("run").recipe
    assert Run.open("run").finished() is not None
    capsys.readouterr()
    assert main([*tune, "-o", "tuned.toml", "--json"]) == 0
    explained = capsys.readouterr()
    document = json.loads(explained.out)
    assert document["recipe"]["batch_size"] == trained.batch_size
    assert document["recipe"]["optim"]["lr"] == trained.optim.lr
    assert "updates" in {trial["what"] for trial in document["trials"]} <= {"updates", "loading", "both"}
    assert main([*tune, "-o", "tuned.toml"]) == 0
    assert capsys.readouterr().out.startswith("measured")


@pytest.mark.slow
def test_batch_threads_and_precision_may_be_left_to_measuring(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["--batch-size", "auto", "--threads", "auto", "--precision", "auto"]
    command = ["train", str(digits), "--model", "digits", "--epochs", "1", *QUICK, *auto, "--run", "run"]
    assert main(command) == 0
    assert "batch_size = " in capsys.readouterr().err
    recipe = Run.open("run").recipe
    assert recipe.parallel.threads != 0 and 2 <= recipe.batch_size <= 40  # None where a busy machine leaves no time
    assert main(command) == 0  # finished: it keeps what was chosen
    assert Run.open("run").recipe == recipe and "measuring" not in capsys.readouterr().err
    assert main([*command[:-2], "--explain"]) == 0  # without a folder: the same choices, and so the same run
    assert f"as measured before: batch_size = {recipe.batch_size}" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_agree_on_a_batch(digits: Path) -> None:
    words = ["train", str(digits), "--model", "digits", "--epochs", "1", *QUICK, "--batch-size", "auto"]
    port = free_port()
    ranks = [
        start(main, [*words, "--run", "run"], errors=f"{rank}.err", variables=rank_variables(rank, 2, port))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0], Path("0.err").read_text() + Path("1.err").read_text()
    run = Run.open("run")
    assert run.finished() is not None and run.recipe.batch_size % 2 == 0
    (started,) = (event for event in run.events() if isinstance(event, Started))
    assert started.machine["ranks"] == 2


@pytest.mark.parametrize("words", [["--set", "parallel.procs=2"], ["--device", "cuda:0,1"]])
def test_one_process_is_tuned(digits: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["tune", str(digits), "--model", "digits", *words]) == 2
    assert "one process is tuned" in capsys.readouterr().err


def test_what_cannot_be_is_refused(digits: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tune", str(digits), "--minutes", "0"]) == 2
    assert "--minutes is 0; it must be above 0" in capsys.readouterr().err
    assert main(["tune", str(digits), "-o", "tuned.json"]) == 2
    assert "ends in .toml" in capsys.readouterr().err
    (tmp_path / "mine.toml").write_text("# mine\n[optim]\nlr = 0.1\n")
    assert main(["tune", str(digits), "-o", "mine.toml"]) == 2
    assert "is no tuned recipe" in capsys.readouterr().err
    assert main(["tune", str(digits), "-o", "gone/tuned.toml"]) == 2
    assert "the folder gone does not exist" in capsys.readouterr().err
    assert main(["train", str(digits), "--batch-size", "fast"]) == 2
