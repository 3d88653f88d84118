"""An update of a run is made again to the last bit; the layer and the images that were not finite are named."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.distributed.ranks import as_group

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.distributed.process_group import Group
from steadytrain.errors import DivergedError, InputError, RecipeError, RunError
from steadytrain.events import Ended, Logged, Noticed, Started, Step
from steadytrain.machine import notices
from steadytrain.run import Run
from steadytrain.training import steps, train
from steadytrain.training.loop import steps as loop_steps
from steadytrain.training.loop.replay import ReplayedUpdate, _copy_of, _write, replay

NET = """\
import torch
from torch import nn

class Scaled(nn.Module):
    def forward(self, x):
        return x / (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))  # of one colour: by nothing

def make(num_classes):
    return nn.Sequential(nn.Flatten(1), nn.Unflatten(1, (1, 8, 8)), Scaled(), nn.BatchNorm2d(1), nn.Dropout(0.1),
                         nn.Flatten(), nn.Linear(64, num_classes))
"""


ROUNDED = """\
import torch
from torch import nn
from torch.nn import functional as F

class Scaled(nn.Module):
    def forward(self, x):  # the mean of a white image but for one grey pixel is 1 in 16 bits, and less in 32
        mean = F.linear(x.flatten(1), torch.full((1, x[0].numel()), 1 / x[0].numel()))
        return x / (1 - mean)[..., None, None]

def make(num_classes):
    return nn.Sequential(nn.Flatten(1), nn.Unflatten(1, (1, 8, 8)), Scaled(), nn.BatchNorm2d(1), nn.Flatten(),
                         nn.Linear(64, num_classes))
"""


@pytest.fixture
def rounded(poisoned: Recipe, write_module: Callable[[str, str], Path]) -> Recipe:
    """The same with an image that a network takes in fp32 and not in 16 bits."""
    write_module("rounded_net", ROUNDED)
    pixels = np.full((8, 8), 255, np.uint8)
    pixels[0, 0] = 254
    Image.fromarray(pixels).save(Path(poisoned.data.train) / "3" / "poison.png")
    own = {"model.name": "rounded_net:make", "data.mean": (0.0,), "data.std": (1.0,), "every.nonfinite": "fp32"}
    return poisoned.with_(own)


@pytest.fixture
def poisoned(
    write_digits: Callable[[Path, int, int], Path],
    write_module: Callable[[str, str], Path],
    recipe: Recipe,
    tmp_path: Path,
) -> Recipe:
    """160 digits, 10 updates in two epochs; one image of a single colour, which the network divides by nothing."""
    folder = write_digits(tmp_path / "images", 160, 10)
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(folder / "3" / "poison.png")
    write_module("scaled_net", NET)
    own = {"model.name": "scaled_net:make", "data.train": str(folder), "data.holdout": 0.0, "data.pad": 0}
    return recipe.with_({**own, "every.log_steps": 3, "every.save_steps": 2})


def test_the_layer_and_the_image_that_were_not_finite_are_named(poisoned: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", poisoned)
    with pytest.raises(DivergedError):
        list(steps(run, allow_import=True))
    before = sorted(run.directory.rglob("*"))
    found = replay(run, output=tmp_path / "batch", allow_import=True)
    assert sorted(run.directory.rglob("*")) == before
    assert found.layer == "2" and len(found.samples) == 1 and not math.isfinite(found.loss)
    (place,) = found.samples
    assert "poison.png" in found.names[place]
    assert found.words.startswith(
        f"update {found.step}: first not finite: the output of layer 2, for {found.ids[place]} ("
    )
    saved = np.asarray(Image.open(tmp_path / "batch" / found.images[place]))
    assert len(found.images) == 32 and (saved == 7).all()
    document = json.loads((tmp_path / "batch" / "batch.json").read_text())
    assert (document["loss"], document["layer"], document["ids"]) == ("nan", "2", list(found.ids))


def test_the_loss_of_a_replayed_update_is_that_of_the_run_to_the_last_bit(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe.with_({"every.log_steps": 1, "every.save_steps": 6}))
    losses = {event.step: event.loss for event in steps(run) if isinstance(event, Logged)}
    for step in (1, 14, 20):  # before any checkpoint that is left, after one, the last
        found = replay(run, step, output=tmp_path / "batch")
        assert found.is_finite and np.float32(found.loss) == np.float32(losses[step])
        assert found.positions == tuple(range(32 * (step - 1), 32 * step))
    with pytest.raises(InputError, match=r"--step is 21; .*/a (has 20 updates|ends with update 20)"):
        replay(run, 21)
    with pytest.raises(InputError, match="--step is 0; updates are counted from 1"):
        replay(run, 0)
    with pytest.raises(RunError, match=r"every update of .*/a after 20 is finite: name one by --step"):
        replay(run)


def test_a_command_that_loses_its_numbers_says_which_image_it_was(
    poisoned: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(poisoned.to_json())
    words = ["train", "--recipe", str(file), "--model", "scaled_net:make", "--run", str(tmp_path / "a")]
    assert main(words) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        last.startswith("steady: the loss is nan at step ") and "first not finite: the output of layer 2, for" in last
    )
    assert "poison.png" in last
    (folder,) = (tmp_path / "a" / "replay").iterdir()
    (step,) = re.findall(r"; update (\d+): ", last)
    advice = f"; steady resume {tmp_path / 'a'} --set every.skip=[{step}] leaves that update out"
    assert last.endswith(f"its images: {folder}{advice}") and len(list(folder.glob("*.png"))) == 32
    started = [event for event in Run.open(tmp_path / "a").events() if isinstance(event, Started)]
    assert len(started) == 1  # looking back is no attempt of the run
    assert main(["replay", str(tmp_path / "a"), "--json"]) == 2  # the network of a file is not imported
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "a"), "--model", "scaled_net:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(folder)


def test_a_run_that_is_to_skip_goes_on_without_the_update_and_with_the_same_bits_again(
    poisoned: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: Callable[[Path], bytes]
) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(poisoned.with_({"every.nonfinite": "skip"}).to_json())
    words = ["train", "--recipe", str(file), "--model", "scaled_net:make"]
    assert main([*words, "--run", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().err
    assert "going on from the newest checkpoint, leaving that update out (every.skip)" in said
    skipped = Run.open(tmp_path / "a").recipe.every.skip
    assert len(skipped) == 2  # the image comes in each epoch
    named = poisoned.with_({"every.skip": skipped})
    list(steps(Run.create(tmp_path / "b", named), allow_import=True))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    # The command that knows nothing of them leaves them in the run.
    assert Run.create(tmp_path / "a", poisoned).recipe.every.skip == skipped


def test_a_lower_rate_that_does_not_help_ends_the_run_after_some_times(
    poisoned: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_steps, "MOST_REMEDIES", 1)
    file = tmp_path / "recipe.json"
    file.write_text(poisoned.with_({"every.nonfinite": "slower", "optim.schedule": "constant"}).to_json())
    words = ["train", "--recipe", str(file), "--model", "scaled_net:make", "--run", str(tmp_path / "a")]
    assert main(words) == 1
    (step,) = Run.open(tmp_path / "a").recipe.every.slower
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.endswith(f"; every.nonfinite=slower has done what it can (every.slower is [{step}])")
    rates = [
        (event.attempt, event.step, event.lr) for event in Run.open(tmp_path / "a").events() if isinstance(event, Step)
    ]
    usual = {number: lr for attempt, number, lr in rates if attempt == 1}
    assert all(lr == usual[number] * (0.5 if number >= step else 1) for attempt, number, lr in rates if attempt == 2)


def test_updates_that_are_left_out_do_not_go_with_workers_of_servers(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"every.skip and parallel.engine='async' exclude each other"):
        recipe.with_({"every.skip": [3], "parallel.engine": "async"})
    with pytest.raises(RecipeError, match=r"every.fp32 and parallel.engine='async' exclude each other"):
        recipe.with_({"every.fp32": [3], "parallel.engine": "async"})
    with pytest.raises(RecipeError, match=r"every.skip is \(0,\); it must be numbers of updates, which begin at 1"):
        recipe.with_({"every.skip": [0]})


def _numbers(run: Run) -> list[tuple[int, str]]:
    return [(event.step, event.machine["precision"]) for event in run.events() if isinstance(event, Started)]


@pytest.mark.parametrize("numbers", ["bf16", "pure-bf16"])
def test_a_run_that_16_bits_do_not_suffice_goes_on_in_fp32_from_its_newest_checkpoint(
    rounded: Recipe, tmp_path: Path, weights: Callable[[Path], bytes], numbers: str
) -> None:
    recipe = rounded.with_({"precision.name": numbers, "optim.ema": 0.9})
    run = Run.create(tmp_path / "a", recipe)
    said: list[str] = []
    ended = list(steps(run, allow_import=True, say=said.append))[-1]
    assert isinstance(ended, Ended) and ended.status == "finished"
    (first,) = Run.open(run.directory).recipe.every.fp32
    assert _numbers(run) == [(0, numbers), (first - 1, "fp32")] and 1 < first < 7
    assert said[-1].endswith("; going on from the newest checkpoint, computing in fp32 from there on (every.fp32)")
    assert "poison.png" in said[-1]
    # Set by hand, the attempt changes there by itself; and an update after it is replayed in fp32.
    named = Run.create(tmp_path / "b", recipe.with_({"every.fp32": (first,), "every.keep": 1}))
    assert train(named, allow_import=True, progress=False).status == "finished"
    assert _numbers(named) == _numbers(run) and weights(run.directory) == weights(named.directory)
    assert replay(named, first + 1, output=tmp_path / "batch", allow_import=True).is_finite
    # The command that knows nothing of it leaves it in the run, whose digest is the same.
    assert Run.create(run.directory, recipe).recipe.every.fp32 == (first,)
    assert list(steps(run, allow_import=True)) == []


def test_fp32_is_no_remedy_for_a_run_that_computes_in_it(poisoned: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", poisoned.with_({"every.nonfinite": "fp32"}))
    with pytest.raises(DivergedError, match=r"poison.*every.nonfinite=fp32 has no remedy: it is computed in fp32"):
        train(run, allow_import=True, progress=False)


def test_training_from_python_follows_the_policy_of_its_recipe(
    poisoned: Recipe, tmp_path: Path, weights: Callable[[Path], bytes]
) -> None:
    run = Run.create(tmp_path / "a", poisoned.with_({"every.nonfinite": "skip"}))
    assert train(run, allow_import=True, progress=False).status == "finished"
    skipped = Run.open(run.directory).recipe.every.skip
    named = Run.create(tmp_path / "b", poisoned.with_({"every.skip": skipped}))
    list(steps(named, allow_import=True))
    assert len(skipped) == 2 and weights(run.directory) == weights(named.directory)


def _train_as_rank(group: Group, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    said: list[str] = []
    error = ""
    try:
        list(steps(Run.open(folder), group=group, allow_import=True, say=said.append))
    except DivergedError as diverged:
        error = str(diverged)
    return {"error": error, "said": said[-1:]}


@pytest.mark.parametrize("policy", ["skip", "fp32"])
def test_ranks_go_on_together_by_the_policy_of_their_recipe(rounded: Recipe, tmp_path: Path, policy: str) -> None:
    run = Run.create(tmp_path / "a", rounded.with_({"every.nonfinite": policy, "precision.name": "bf16"}))
    first, second = as_group(partial(_train_as_rank, folder=str(run.directory)), 2)
    assert (first["error"], second["error"], second["said"]) == ("", "", [])
    assert "poison.png" in first["said"][0]
    assert run.progress().finished is not None and (run.directory / "model.safetensors").exists()
    every = Run.open(run.directory).recipe.every
    for rank in (0, 1):
        began = [event for event in run.events(rank) if isinstance(event, Started)]
        assert [event.step for event in began][1] == (every.fp32 or (began[1].step + 1,))[0] - 1
        assert began[-1].machine["precision"] == ("fp32" if policy == "fp32" else "bf16")
    assert len(every.skip) == (2 if policy == "skip" else 0)


def test_ranks_that_have_no_remedy_end_with_one_message(poisoned: Recipe, tmp_path: Path) -> None:
    recipe = poisoned.with_({"every.nonfinite": "fp32"})
    run = Run.create(tmp_path / "a", recipe)
    first, second = as_group(partial(_train_as_rank, folder=str(run.directory)), 2)
    assert first["error"] == second["error"]
    assert "poison.png" in first["error"] and first["error"].endswith("it is computed in fp32 already")


def test_the_first_update_of_ranks_is_replayed_with_the_batch_norms_of_each(recipe: Recipe, tmp_path: Path) -> None:
    """Two micro-batches are what two ranks compute."""
    ranks = Run.create(tmp_path / "a", recipe.with_({"optim.accumulate": 2, "budget.epochs": 0.1}))
    losses = [event.loss for event in steps(ranks) if isinstance(event, Logged)]
    forgotten = Run(ranks.directory, recipe.with_({"budget.epochs": 0.1}))  # as a recipe of ranks says it
    shutil.rmtree(ranks.checkpoints)
    assert np.float32(replay(forgotten, 1, output=tmp_path / "batch").loss) == np.float32(losses[0])


def test_a_notice_that_comes_while_an_update_is_replayed_stops_the_run(
    poisoned: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "notice"
    monkeypatch.setattr(notices, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(loop_steps, "_explained", lambda *_: (file.write_text("60"), (3, "an update"))[1])
    own = {"every.nonfinite": "slower", "every.notices": f"file:{file}", "optim.lr": 0.01}
    run = Run.create(tmp_path / "a", poisoned.with_(own))
    words = [e.message for e in steps(run, allow_import=True) if isinstance(e, Noticed)]
    ended = run.progress().ended
    assert ended is not None and ended.status == "preempted"
    assert any("this machine is to be given up" in line for line in words)


def test_a_wish_to_stop_while_an_update_is_replayed_leaves_the_run_to_the_next_attempt(
    poisoned: Recipe, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "a", poisoned.with_({"every.nonfinite": "skip"}))
    said: list[str] = []
    events = list(steps(run, allow_import=True, say=said.append, stop=lambda: "SIGTERM" if said else None))
    assert isinstance(events[-1], Ended) and events[-1].status == "preempted"
    assert Run.open(run.directory).recipe.every.skip == () and said == [said[0]]


def test_what_a_replay_saves_is_written_through_no_link(tmp_path: Path) -> None:
    values = {"step": 1, "loss": 0.5, "lr": 0.1, "ids": (7,), "names": ("a",), "positions": (0,), "labels": (0,)}
    found = ReplayedUpdate(**values, layer="", samples=(), gradients=(), images=("7.png",))  # type: ignore[arg-type]
    mine = tmp_path / "mine"
    mine.write_text("mine")
    folder = tmp_path / "replay" / "step-00000001"
    folder.mkdir(parents=True)
    for name in ("7.png", "batch.json"):
        (folder / name).symlink_to(mine)
    _write(found, torch.zeros(1, 4, 4, 3), folder)
    assert mine.read_text() == "mine" and json.loads((folder / "batch.json").read_text())["ids"] == [7]
    assert Image.open(folder / "7.png").size == (4, 4)


def test_a_run_whose_replay_is_a_link_writes_nowhere_else(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    (tmp_path / "mine").mkdir()
    (run.directory / "replay").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match="replay is a link to"):
        replay(run, 1)
    assert not any((tmp_path / "mine").iterdir())


def test_the_copy_that_is_replayed_is_sent_nowhere(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe.with_({"every.track": "tensorboard", "every.upload": "s3://bucket/a"}))
    with _copy_of(run, math.inf, {}) as (copy, _):
        assert copy.recipe.every.track is None is copy.recipe.every.upload
