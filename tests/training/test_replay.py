"""An update of a run is made again to the last bit; the layer and the images that were not finite are named."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from steadytrain.cli import main
from steadytrain.cli import replay as cli_replay
from steadytrain.config import Recipe
from steadytrain.errors import DivergedError, InputError, RecipeError, RunError
from steadytrain.events import Logged, Started, Step
from steadytrain.run import Run
from steadytrain.training import steps
from steadytrain.training.loop.replay import replay

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
    monkeypatch.setattr(cli_replay, "MOST_REMEDIES", 1)
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
    with pytest.raises(RecipeError, match=r"every.skip is \(0,\); it must be numbers of updates, which begin at 1"):
        recipe.with_({"every.skip": [0]})
