"""The batch of a user who names none: one for each GPU, and one that all ranks on CPUs can share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import steadytrain as st
from steadytrain.cli import main
from steadytrain.cli.options import TrainingOptions
from steadytrain.cli.train import open_draft, ranks_of_batch, recipe_for
from steadytrain.config import Recipe
from steadytrain.config.defaults import apply_changes, fit_to_data, usual_recipe
from steadytrain.config.timeline import Timeline
from steadytrain.distributed.world import World
from steadytrain.events import Started
from steadytrain.format import per_rank
from steadytrain.training.session.opening import _begun_with, own_share
from steadytrain.training.step import images_per_rank, share_of

QUICK = TrainingOptions(flags={"model": "mlp", "epochs": 4, "device": "cpu"}, set=("model.pretrained=false",))


def draft_run(data: str, options: TrainingOptions, **more: Any) -> tuple[Recipe, Path]:
    with open_draft(data, options, **more) as draft:
        return draft.recipe, draft.folder


@pytest.fixture
def data(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return str(digits)


@pytest.mark.parametrize(("finetune", "small", "each"), [(False, False, 128), (False, True, 128), (True, False, 16)])
def test_each_gpu_has_a_batch_of_its_own(finetune: bool, small: bool, each: int) -> None:
    usual = usual_recipe("photos", finetune=finetune, small=small)
    for ranks in (1, 2, 3, 8, 40, 64):
        recipe = fit_to_data(usual, 10**6, chosen=(), ranks=ranks, on_gpus=True)
        assert recipe.batch_size == ranks * each
        times = ranks if usual.optim.base_batch_size else 1  # a rate for any batch stays
        before = Timeline(usual, 0).peak
        assert Timeline(recipe, 0).peak == pytest.approx(before * times)
    assert fit_to_data(usual, 10**6, chosen={"batch_size"}, ranks=8, on_gpus=True).batch_size == usual.batch_size


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("images", [100, 10**6])
def test_from_1_to_64_ranks_no_default_is_refused(on_gpus: bool, accumulate: int, images: int) -> None:
    for finetune in (False, True):
        usual = usual_recipe("photos", finetune=finetune, small=False)
        recipe = apply_changes(usual, {}, {"optim.accumulate": accumulate})
        for ranks in (1, 2, 3, 5, 7, 8, 40, 64):
            fitted = fit_to_data(recipe, images, chosen=("optim.accumulate",), ranks=ranks, on_gpus=on_gpus)
            shares = images_per_rank(share_of(World(size=ranks), fitted.batch_size, accumulate), ranks)
            assert len(set(shares)) == 1 and shares[0] >= (accumulate if ranks == 1 else 2 * accumulate)
            assert sum(shares) <= max(0.1 * images, 4 * accumulate * ranks), "as many updates as the images allow"


def test_ranks_on_cpus_share_the_batch_of_one() -> None:
    usual = usual_recipe("photos", finetune=False, small=False)
    batches = [fit_to_data(usual, 10**6, chosen=(), ranks=ranks).batch_size for ranks in (1, 2, 3, 4, 7, 64)]
    assert batches == [128, 128, 126, 128, 126, 128]


def test_the_device_says_whether_ranks_run_on_gpus(data: str) -> None:
    gpus = replace(QUICK, flags={"model": "mlp", "epochs": 1, "device": "cuda"})
    assert recipe_for(data, gpus, finetune=True, ranks=2).batch_size == 2 * 16, "of other machines, it may be"
    assert recipe_for(data, QUICK, finetune=True, ranks=2).batch_size == 16
    assert recipe_for(data, QUICK, finetune=True, ranks=2, on_gpus=True).batch_size == 2 * 16


def test_the_same_command_with_other_ranks_goes_on_with_the_batch_of_its_run(data: str) -> None:
    recipe, folder = draft_run(data, QUICK, finetune=True, ranks=2, on_gpus=True)
    assert recipe.batch_size == 32
    st.Run.create(folder, recipe)
    for ranks in (1, 3, 8):
        again, same = draft_run(data, QUICK, finetune=True, ranks=ranks, on_gpus=True)
        assert same == folder and again.digest == recipe.digest
    named = replace(QUICK, flags={**QUICK.flags, "batch_size": 24}, run=str(folder))
    assert draft_run(data, named, finetune=True, ranks=3, on_gpus=True)[0].batch_size == 24
    longer = replace(QUICK, flags={**QUICK.flags, "epochs": 5}, run=str(folder))
    assert draft_run(data, longer, finetune=True, ranks=1)[0].batch_size == 16, "it is another recipe"
    slower = replace(QUICK, flags={**QUICK.flags, "warmup_epochs": 2.0}, run=str(folder))
    assert draft_run(data, slower, finetune=True, ranks=1)[0].optim.warmup_epochs == 2.0, "the user's own"
    assert recipe_for(data, QUICK, finetune=True).batch_size == 16, "runs of a sweep are others"


def test_asynchronous_workers_share_no_batch(data: str) -> None:
    free = TrainingOptions(flags={"device": "cpu", "procs": 3}, set=("parallel.engine=async",))
    assert ranks_of_batch(data, free) == 1


def test_images_of_each_rank_are_shown(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", data, "--model", "mlp", "--epochs", "1", "--device", "cpu", "--procs", "3", "--explain"]
    assert main(words) == 0
    assert "of 30 images (10 on each of 3 ranks): 1 epoch" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images_per_rank"] == [10, 10, 10]
    assert per_rank(images_per_rank(share_of(World(size=3), 1024, 1, before=8), 3)) == "256 to 384 on each of 3 ranks"


@pytest.mark.parametrize(("device", "images"), [("cuda", "1,024"), ("cpu", "128")])
def test_a_schedule_is_that_of_the_ranks(device: str, images: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--num-train", "100000", "--procs", "8", "--device", device]) == 0
    assert f" {images}\n" in capsys.readouterr().out


def test_a_run_that_was_lost_before_its_first_checkpoint_goes_on_with_other_ranks(data: str) -> None:
    recipe, folder = draft_run(data, QUICK, finetune=True, ranks=8, on_gpus=True)
    run, seven = st.Run.create(folder, recipe), World(size=7)
    assert _begun_with(run, recipe, seven, None) == {"micro_batches": None}  # it never began
    with run.log() as log:
        begun = {"digest": recipe.digest, "step": 0, "steps": 1, "steps_per_epoch": 1.0, "batch_size": 32}
        log.append(Started(machine={"micro_batches": 8}, **begun))  # type: ignore[arg-type]
    share = own_share(recipe, seven, _begun_with(run, recipe, seven, None), print)
    assert images_per_rank(share, 7) == [4] * 6 + [8]
    assert _begun_with(run, recipe, World(size=4), None) is None
