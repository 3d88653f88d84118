"""Ranks as users start them, on real images: what they make together is what one process makes."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests import forked
from tests.distributed.ranks import as_group

from steadytrain import events, training
from steadytrain.cli import main
from steadytrain.config import Data, Model, Parallel, Recipe
from steadytrain.data.results.predictions import read_predictions
from steadytrain.distributed import heartbeat
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group
from steadytrain.errors import StalledError
from steadytrain.launch import supervise
from steadytrain.launch.supervise import free_port, rank_variables
from steadytrain.monitor import collectives, diagnose
from steadytrain.monitor.watchdog import StallLimits
from steadytrain.run import Run
from steadytrain.training.loop import attempt

COMMAND = [sys.executable, "-m", "steadytrain", "train"]
SETTINGS = ["--model", "digits", "--epochs", "4", "--batch-size", "32", "--lr", "0.05", "--device", "cpu"]
SETTINGS += ["--set", "parallel.compute_threads=1", "--set", "every.save_steps=7", "--set", "every.log_steps=5"]
SETTINGS += ["--set", "data.pad=1", "--set", "data.holdout=0.2"]


def start(digits: Path, run: Path, *words: str) -> subprocess.Popen[str]:
    command = [*COMMAND, str(digits), "--run", str(run), *SETTINGS, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def trained(digits: Path, run: Path, *words: str) -> str:
    """What was printed by a run that went well."""
    child = start(digits, run, *words)
    output, _ = child.communicate(timeout=800)  # to compile takes long on a busy machine
    assert child.returncode == 0, output
    return output


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Without the running statistics of batch norms, which are the first rank's own."""
    tensors = load_file(run / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "running_" not in name and "num_batches" not in name}


def same(path: Path, other: Path) -> bool:
    ours, theirs = weights(path), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def of_kind(run: Path, kind: type[events.Event], rank: int = 0) -> list[events.Event]:
    return [event for event in Run.open(run).events(rank) if isinstance(event, kind)]


def steps(run: Path) -> int:
    path = run / "events.jsonl"
    return max((e.step for e in events.read(path) if isinstance(e, events.Step)), default=0) if path.exists() else 0


def wait_for_step(child: subprocess.Popen[str] | ForkServerProcess, run: Path, step: int) -> None:
    def has_ended() -> bool:
        return not child.is_alive() if isinstance(child, ForkServerProcess) else child.poll() is not None

    deadline = time.monotonic() + 120
    while steps(run) < step and not has_ended() and time.monotonic() < deadline:
        time.sleep(0.02)


def ranks_of(child: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """By their rank."""
    processes = psutil.Process(child.pid).children()
    by_rank = {int(process.environ()["RANK"]): process for process in processes if "RANK" in process.environ()}
    assert sorted(by_rank) == list(range(count))
    return [by_rank[rank] for rank in range(count)]


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by two ranks from beginning to end."""
    run = tmp_path_factory.mktemp("ranks") / "whole"
    outcomes = _as_ranks([[str(digits), "--run", str(run)]] * 2, run.parent)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    return run


@pytest.mark.slow
def test_two_ranks_recompute_to_the_same_bits(digits: Path, whole: Path, tmp_path: Path) -> None:
    trained(digits, tmp_path / "again", "--procs", "2", "--recompute")
    assert same(whole, tmp_path / "again")
    ours, theirs = (load_file(run / "model.safetensors") for run in (tmp_path / "again", whole))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), "running statistics too"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: nothing can be compiled")
def test_ranks_compile_each_for_itself_and_train_together(digits: Path, tmp_path: Path) -> None:
    one = ["--procs", "1", "--set", "optim.accumulate=2", "--compile"]
    for name, words in (("ranks", ["--compile"]), ("eager", []), ("one", one)):  # in bf16 they round at other places
        trained(digits, tmp_path / name, "--procs", "2", "--precision", "fp32", *words)
    assert same(tmp_path / "ranks", tmp_path / "one"), "the same code, in one piece"
    for rank in (0, 1):
        [compiled] = of_kind(tmp_path / "ranks", events.Compiled, rank)
        assert isinstance(compiled, events.Compiled) and compiled.images == 32
        assert compiled.graphs == 1 and not compiled.breaks
    ours, theirs = weights(tmp_path / "ranks"), weights(tmp_path / "eager")
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-4)


def test_an_evaluation_by_ranks_counts_every_image_once(whole: Path, tmp_path: Path, digits: Path) -> None:
    evaluations = [event for event in of_kind(whole, events.Evaluated) if isinstance(event, events.Evaluated)]
    assert [event.n for event in evaluations] == [80] * 4
    rows = list(read_predictions(whole / "predictions.csv"))
    assert len({row.record for row in rows}) == len(rows) == 80
    assert sum(row.rank == 1 for row in rows) / 80 == [event.top1 for event in evaluations if event.is_best][-1]


def _train_as_rank(group: Group, folder: str) -> dict[str, Any]:
    for _ in training.steps(Run.open(folder), group=group):
        pass
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ, "a later run in this process has another folder"
    return {}


def test_two_ranks_rank_all_images_for_the_average_precision_of_labels(labels_recipe: Recipe, tmp_path: Path) -> None:
    from sklearn.metrics import average_precision_score

    run = Run.create(tmp_path / "run", labels_recipe.with_({"budget.epochs": 2}))
    as_group(partial(_train_as_rank, folder=str(run.directory)), 2)
    evaluations = [
        event for event in of_kind(tmp_path / "run", events.Evaluated) if isinstance(event, events.Evaluated)
    ]
    best = max(evaluations, key=lambda event: event.score)
    assert [event.n for event in evaluations] == [80, 80] and best.mean_ap is not None
    with (tmp_path / "run" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    labels = [[name in row["true"].split(";") for name in ("even", "large", "round")] for row in rows]
    scores = [[float(row[name]) for name in ("even", "large", "round")] for row in rows]
    assert len({row["record"] for row in rows}) == 80
    assert average_precision_score(labels, scores) == pytest.approx(best.mean_ap, abs=1e-9)


def test_each_rank_has_a_log_of_its_own_and_the_steps_are_the_same(whole: Path) -> None:
    first, second = of_kind(whole, events.Step), of_kind(whole, events.Step, rank=1)
    numbers = [[getattr(e, "step", None) for e in log] for log in (first, second)]
    assert numbers[0] == numbers[1] == list(range(1, 41))
    assert {e.rank for e in second} == {1}
    means = [
        [getattr(e, name) for e in of_kind(whole, events.EpochTrained, rank) for name in ("epoch", "n", "loss", "top1")]
        for rank in (0, 1)
    ]
    assert means[0] == means[1] and means[0][:2] == [1, 320]
    event = of_kind(whole, events.Accounted, rank=1)[-1]
    assert isinstance(event, events.Accounted) and event.seconds["communication"] > 0


def test_a_run_goes_on_after_a_killed_rank_and_by_one_process_after_a_termination(
    digits: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["train", str(digits), "--run", str(run), *SETTINGS, "--procs", "2"]
    gates = {step: tmp_path / f"after-{step}" for step in (5, 14)}
    child = forked.start(forked.stand_at, gates, forked.steady, words, errors=tmp_path / "errors")
    wait_for_step(child, run, 5)
    _, second = sorted(rank.pid for rank in psutil.Process(child.pid).children())
    os.kill(second, signal.SIGKILL)
    gates[5].touch()
    wait_for_step(child, run, 14)
    child.terminate()
    gates[14].touch()
    child.join(120)
    output = (tmp_path / "errors").read_text()
    assert child.exitcode == 75, output
    assert "rank 1 was killed by SIGKILL" in output
    assert output.count("started attempt=1") == 1, "the first rank alone speaks"
    assert main(["train", str(digits), "--run", str(run), *SETTINGS, "--procs", "1"]) == 0
    killed, resumed = (event for event in of_kind(run, events.Resumed) if isinstance(event, events.Resumed))
    assert (killed.ranks_before, killed.ranks) == (2, 2) and 0 <= killed.images_repeated <= 7 * 32
    assert (resumed.ranks_before, resumed.ranks) == (2, 1)
    assert _schedule(run) == _schedule(whole)
    assert same(whole, run), "one process accumulates what two ranks had"


def test_a_run_is_gone_on_with_by_as_many_ranks_as_it_was_begun_with(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe(data=Data(train=str(digits)), model=Model("digits"), parallel=Parallel(device="cpu", procs=2))
    run, started = Run.create(tmp_path / "run", recipe).directory, list[int]()

    def keep(words: object, procs: int, **told: object) -> int:
        started.append(procs)
        return 0

    monkeypatch.setattr(supervise, "keep_ranks", keep)
    assert main(["resume", str(run)]) == 0 and started == [2]
    assert f"{run}: 2 ranks, as it was started with (--procs changes that)" in capsys.readouterr().err
    assert main(["resume", str(run), "--procs", "3"]) == 0 and started == [2, 3]
    assert "as it was started with" not in capsys.readouterr().err


@pytest.mark.slow
def test_steady_resume_alone_starts_the_ranks_again(digits: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = start(digits, run, "--procs", "2", "--until", "1")
    assert child.wait(120) == 75
    done = subprocess.run([sys.executable, "-m", "steadytrain", "resume", str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [resumed] = of_kind(run, events.Resumed)
    assert isinstance(resumed, events.Resumed) and (resumed.ranks_before, resumed.ranks) == (2, 2)
    assert same(whole, run)


@pytest.mark.slow
def test_a_run_goes_on_with_more_ranks_in_the_same_order(digits: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = start(digits, run, "--procs", "2")
    wait_for_step(child, run, 10)
    child.terminate()
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 75, output
    trained(digits, run, "--procs", "3")
    resumed = of_kind(run, events.Resumed)[-1]
    assert isinstance(resumed, events.Resumed) and (resumed.ranks_before, resumed.ranks) == (2, 3)
    assert _schedule(run) == _schedule(whole)
    for name, weight in weights(run).items():
        torch.testing.assert_close(weight, weights(whole)[name], rtol=0, atol=0.05)


def _schedule(run: Path) -> dict[int, tuple[int, float]]:
    """Position and learning rate of each update, as it was made last."""
    return {e.step: (e.position, e.lr) for e in of_kind(run, events.Step) if isinstance(e, events.Step)}


@pytest.mark.slow
def test_killed_ranks_cost_what_was_not_saved_and_nothing_else(digits: Path, whole: Path, tmp_path: Path) -> None:
    run, kills = tmp_path / "run", [(1, 10), (0, 25)]
    child = start(digits, run, "--procs", "2")
    for victim, step in kills:
        wait_for_step(child, run, step)
        os.kill(ranks_of(child, 2)[victim].pid, signal.SIGKILL)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0, output
    assert all(f"rank {victim} was killed by SIGKILL" in output for victim, _ in kills)
    assert same(whole, run)
    costs = [event for event in of_kind(run, events.Resumed) if isinstance(event, events.Resumed)]
    assert len(costs) == len(kills) and all(0 <= cost.images_repeated <= 7 * 32 for cost in costs)


@pytest.mark.slow
def test_four_killed_ranks_go_on_to_every_bit_of_the_uninterrupted_run(digits: Path, tmp_path: Path) -> None:
    """Of more than two numbers, the order in which they are added is in the last bits of their sum."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    words = ["--procs", "4", "--epochs", "1"]
    trained(digits, whole, *words)
    child = start(digits, run, *words)
    wait_for_step(child, run, 10)
    os.kill(ranks_of(child, 4)[2].pid, signal.SIGKILL)
    output, _ = child.communicate(timeout=800)
    assert child.returncode == 0 and "rank 2 was killed by SIGKILL" in output, output
    ours, theirs = (load_file(path / "model.safetensors") for path in (run, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_rank_that_has_other_images_is_named(digits: Path, tmp_path: Path) -> None:
    """Ranks of two machines, say, one of which has an older copy."""
    (tmp_path / "other").mkdir()
    for part in digits.parent.glob("digits.*"):
        (tmp_path / "other" / part.name).write_bytes(part.read_bytes())
    seldom = ["--set", "every.evaluate_epochs=2"]  # in no digest, but where ranks have to meet
    run = ["--run", str(tmp_path / "run")]
    answers = _as_ranks([[str(digits), *run], [str(tmp_path / "other" / "digits.rec"), *run, *seldom]], tmp_path)
    assert answers[0][0] == 2 and "rank 1" in answers[0][1] and "another recipe" in answers[0][1]
    assert "data.train: " in answers[0][1] and "every.evaluate_epochs: 2.0 and 1.0" in answers[0][1]


@pytest.mark.slow
def test_ranks_of_a_finished_run_all_say_so_where_they_share_no_disk(digits: Path, whole: Path, tmp_path: Path) -> None:
    words = [[str(digits), "--run", str(place)] for place in (whole, tmp_path / "elsewhere")]
    answers = _as_ranks(words, tmp_path)
    assert [code for code, _ in answers] == [0, 0], answers


def _as_ranks(words: Sequence[Sequence[str]], folder: Path) -> list[tuple[int | None, str]]:
    """The exit code and the standard error, which is written into ``folder``, of ``steady train`` as so many ranks.

    Args:
        words: of each rank: the data, and what comes after :data:`SETTINGS`.
    """
    port = free_port()
    children = [
        forked.start(
            main,
            ["train", data, *SETTINGS, *own_words],
            errors=folder / f"{rank}.err",
            variables=rank_variables(rank, len(words), port) if len(words) > 1 else {},
        )
        for rank, (data, *own_words) in enumerate(words)
    ]
    for child in children:
        child.join(120)
    return [(child.exitcode, (folder / f"{rank}.err").read_text()) for rank, child in enumerate(children)]


@pytest.mark.slow
def test_two_ranks_and_two_micro_batches_of_one_process_augment_to_the_same_bits(digits: Path, tmp_path: Path) -> None:
    factory = "tests.data.transforms.test_augment:blur_or_flip"
    words = ["--transforms", f"rotate:10,randaugment:2,9,color:0.4,{factory},erase:0.25,mixup:0.2,cutmix:1"]
    trained(digits, tmp_path / "ranks", "--procs", "2", *words)
    trained(digits, tmp_path / "alone", "--set", "optim.accumulate=2", *words)
    assert same(tmp_path / "ranks", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["average", "diloco"])
def test_local_ranks_that_are_killed_between_two_averages_go_on_to_the_same_bits(
    digits: Path, tmp_path: Path, outer: str
) -> None:
    words = ["--procs", "2", "--engine", "local", "--sync-every", "5", "--local-from", "1"]
    words += ["--set", f"parallel.outer={outer}"]
    trained(digits, tmp_path / "whole", *words)
    for rank in (0, 1):
        accounted = of_kind(tmp_path / "whole", events.Accounted, rank)[-1]
        assert isinstance(accounted, events.Accounted) and accounted.seconds["communication"] > 0
    best = max(e.top1 for e in of_kind(tmp_path / "whole", events.Evaluated) if isinstance(e, events.Evaluated))
    assert best > (0.7 if outer == "average" else 0.4)  # of six averages, in which its momentum only begins
    run = tmp_path / "run"
    child = start(digits, run, *words)
    wait_for_step(child, run, 23)  # saved after 21, averaged after 20 and 25
    os.kill(ranks_of(child, 2)[1].pid, signal.SIGKILL)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0 and "rank 1 was killed by SIGKILL" in output, output
    ours, theirs = (load_file(place / "model.safetensors") for place in (run, tmp_path / "whole"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items()), "running statistics too"


@pytest.mark.slow
def test_local_ranks_go_on_as_any_number_of_them_or_by_another_engine(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for words in (
        ["--procs", "2", "--engine", "local", "--sync-every", "5", "--until", "1"],
        ["--procs", "3", "--engine", "local", "--sync-every", "5", "--until", "2"],
        ["--procs", "1", "--engine", "local", "--until", "3"],
    ):
        resumed = subprocess.run(
            [sys.executable, "-m", "steadytrain", "resume", str(run), *words]
            if run.exists()
            else [*COMMAND, str(digits), "--run", str(run), *SETTINGS, *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert resumed.returncode == 75, resumed.stderr
    trained(digits, run, "--procs", "2")
    top1 = [e.top1 for e in of_kind(run, events.Evaluated) if isinstance(e, events.Evaluated)]
    assert len(top1) == 4 and top1[-1] > 0.7


@pytest.mark.slow
def test_parts_of_parameters_train_as_whole_ones_and_go_on_in_one_process(
    digits: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [*COMMAND, str(digits), "--run", str(run), *SETTINGS, "--procs", "2", "--set", "parallel.shard=true"]
    process = subprocess.run([*words, "--until", "2"], capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 75, process.stderr
    trained(digits, tmp_path / "other", "--procs", "2", "--set", "parallel.shard=true")
    trained(digits, run, "--procs", "1")
    for place in (run, tmp_path / "other"):
        ours, theirs = weights(place), weights(whole)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "words",
    [
        ["--ema", "0.9"],
        ["--train", "head:1+full", "--ema", "0.9"],
        ["--train", "discriminative", "--set", "optim.clip_norm=1"],
        ["--recompute"],
        ["--compile"],
    ],
    ids=["copies", "phases", "rates", "recompute", "compiled"],
)
def test_parts_of_parameters_go_with_what_fine_tuning_needs(digits: Path, tmp_path: Path, words: list[str]) -> None:
    copies = ["--set", "parallel.shard_ranks=1"] * (words == ["--ema", "0.9"])
    trained(digits, tmp_path / "whole", "--procs", "2", *words)
    trained(digits, tmp_path / "parts", "--procs", "2", "--set", "parallel.shard=true", *words, *copies)
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-2, atol=1e-3)
    losses = [
        [event.loss for event in of_kind(tmp_path / run, events.Evaluated) if isinstance(event, events.Evaluated)]
        for run in ("parts", "whole")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.slow
def test_ranks_with_parts_that_are_killed_while_they_save_go_on_to_the_same_bits(digits: Path, tmp_path: Path) -> None:
    words = ["--procs", "2", "--set", "parallel.shard=true", "--ema", "0.9", "--set", "every.save_steps=2"]
    trained(digits, tmp_path / "whole", *words)
    run = tmp_path / "run"
    child = start(digits, run, *words)
    wait_for_step(child, run, 9)
    deadline = time.monotonic() + 60
    while not (run / "checkpoints" / ".part").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(ranks_of(child, 2)[0].pid, signal.SIGKILL)  # the one that writes
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 0 and "rank 0 was killed by SIGKILL" in output, output
    ours, theirs = (load_file(place / "model.safetensors") for place in (run, tmp_path / "whole"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


PARTIAL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, channels, at_random):
        super().__init__()
        self.body, self.block = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.spare, self.head = nn.Linear(8, 5), nn.Linear(8, num_classes)
        self.at_random, self.passes = at_random, 0

    def forward(self, images):
        images = torch.relu(self.body(images))
        if self.at_random == "drawn" and not (self.training and torch.rand(()) < 0.5):
            images = images + self.block(images)
        elif self.at_random == "late":
            self.passes += self.training and images.shape[0] > 2  # not those before the run
            if self.passes < 4:
                images = images + self.block(images)
        return self.head(images.mean((2, 3)))

def make(num_classes, channels=3, at_random=""):
    return Net(num_classes, channels, at_random)
"""


@pytest.fixture
def partial_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a network that uses a part of its parameters."""
    (tmp_path / "partial_net.py").write_text(PARTIAL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _train_partly(digits: Path, run: Path, *words: str, ranks: int = 2) -> list[tuple[int | None, str]]:
    """What ranks that train :data:`PARTIAL` answer, and say on standard error."""
    own_words = [str(digits), "--run", str(run), "--model", "partial_net:make", *words]
    return _as_ranks([own_words] * ranks, run.parent)


def test_parameters_without_a_gradient_are_left_by_ranks_as_by_one_process(digits: Path, partial_net: Path) -> None:
    words = ["--precision", "fp32", "--epochs", "1"]
    answers = _train_partly(digits, partial_net / "two", *words)
    assert [code for code, _ in answers] == [0, 0], answers
    left = "4 parameters get no gradient and stay as they are: block.weight, block.bias, spare.weight"
    assert left in answers[0][1]
    [(code, output)] = _train_partly(digits, partial_net / "one", *words, "--set", "optim.accumulate=2", ranks=1)
    assert code == 0, output
    assert same(partial_net / "two", partial_net / "one")


def test_layers_that_ranks_leave_out_at_random_are_trained(digits: Path, partial_net: Path) -> None:
    words = ["--set", "model.options.at_random=drawn", "--precision", "fp32", "--epochs", "2"]
    answers = _train_partly(digits, partial_net / "run", *words)
    assert [code for code, _ in answers] == [0, 0], answers
    output = answers[0][1]
    assert "partial_net.py:14): ranks agree on them in each update" in output
    assert "stay as they are: spare.weight, spare.bias" in output


def test_an_error_of_a_network_is_named_once_by_all_ranks_with_the_file_of_its_traceback(
    digits: Path, partial_net: Path
) -> None:
    broken = PARTIAL.replace("self.passes < 4:", 'self.passes == 4 and __import__("os").environ["RANK"] == "1":')
    broken = broken.replace("images = images + self.block(images)\n        return", '{}["my key"]\n        return')
    (partial_net / "partial_net.py").write_text(broken)
    answers = _train_partly(digits, partial_net / "run", "--set", "model.options.at_random=late")
    assert [code for code, _ in answers] == [4, 1], answers
    path = partial_net / "run" / "traceback-1.txt"
    for _, output in answers:
        assert f"KeyError: 'my key' ({path} has the traceback)" in output and "KeyError: KeyError" not in output
    assert "partial_net.py" in path.read_text()


def test_layers_that_are_left_out_later_are_named_without_a_traceback(digits: Path, partial_net: Path) -> None:
    (partial_net / "partial_net.py").write_text(PARTIAL.replace("nn.Linear(8, 5)", "nn.Identity()"))
    answers = _train_partly(digits, partial_net / "run", "--set", "model.options.at_random=late")
    assert [code for code, _ in answers] == [1, 1], answers
    output = "".join(output for _, output in answers)
    assert "Traceback" not in output
    assert "brought no gradient to block.weight (of 2 parameters) on rank" in output


@pytest.mark.parametrize("key", ["parallel.shard=true", "model.batch_norm=synchronous"])
def test_layers_left_out_at_random_are_refused_where_ranks_compute_them_together(
    digits: Path, partial_net: Path, key: str
) -> None:
    words = ["--set", "model.options.at_random=drawn", "--set", key]
    answers = _train_partly(digits, partial_net / "run", *words)
    assert [code for code, _ in answers] == [2, 2], answers
    output = "".join(output for _, output in answers)
    assert "Traceback" not in output
    assert "partial_net:make may leave out some (it looks at a value in" in output


def _steady_of_which_rank_1_never_comes(words: list[str]) -> int:
    """``steady`` with short limits, whose rank 1 sleeps in update 13."""
    backward, passes = Engine.backward, [0]

    def backward_or_sleep(engine: Engine, loss: torch.Tensor, *, last: bool) -> None:
        passes[0] += last
        if passes[0] == 13 and engine.world.rank == 1:
            time.sleep(100)
        backward(engine, loss, last=last)

    Engine.backward = backward_or_sleep  # type: ignore[method-assign, assignment]
    quick = {"update": 1.0, "hang": 1.0, "exchange": 2.0, "grace": 1.0, "look": 0.05}
    patch = pytest.MonkeyPatch()  # of a process of its own
    patch.setattr(attempt, "StallLimits", partial(StallLimits, **quick))
    patch.setattr(collectives, "LEAST_SECONDS", 0.5)
    patch.setattr(heartbeat, "_STANDS", 0.5)
    return forked.steady(words)


def test_a_rank_that_never_comes_is_named_with_the_collective_it_is_missing_in(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "LEAST_SECONDS", 0.5)
    run = tmp_path / "run"
    words = ["train", str(digits), "--run", str(run), *SETTINGS, "--procs", "2", "--set", "every.stall_minutes=0.1"]
    child = forked.start(_steady_of_which_rank_1_never_comes, words, errors=tmp_path / "errors")
    child.join(100)
    assert child.exitcode == StalledError.exit_code
    stalled = next(event for event in of_kind(run, events.Stalled) if isinstance(event, events.Stalled))
    assert stalled.what == "rank" and "rank 1 is at backward of update 13" in stalled.culprit
    assert "gloo:all_reduce, number " in stalled.culprit and stalled.culprit.endswith(
        ("not begun by rank 1", "nothing is known of rank 1")  # where it has not stood for long
    )
    (hang,) = diagnose(run).hangs
    assert (
        hang.startswith("gloo:all_reduce, number ") and "not begun by rank 1; rank 1 is in backward_or_sleep (" in hang
    )
