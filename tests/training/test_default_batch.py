"""The batch of a user who names none: one for each GPU, and one that all ranks on CPUs can share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import steadytrain as st
from steadytrain.cli import main
from steadytrain.cli.options import TrainingOptions
from steadytrain.cli.train import draft_run, recipe_for
from steadytrain.config.defaults import apply_changes, fit_to_data, usual_recipe
from steadytrain.distributed.world import World
from steadytrain.format import per_rank
from steadytrain.training.step import images_per_rank, share_of

QUICK = TrainingOptions(model="mlp", epochs=4, device="cpu")


@pytest.fixture(autouse=True)
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_digits: Callable[[Path, int, int], Path]) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_digits(Path("digits"), 1000, 10)


@pytest.mark.parametrize(("finetune", "small", "each"), [(False, False, 128), (False, True, 128), (True, False, 16)])
def test_each_gpu_has_a_batch_of_its_own(finetune: bool, small: bool, each: int) -> None:
    usual = usual_recipe("photos", finetune=finetune, small=small)
    for ranks in (1, 2, 3, 8, 40, 64):
        recipe = fit_to_data(usual, 10**6, chosen=(), ranks=ranks, on_gpus=True)
        assert recipe.batch_size == ranks * each
        times = ranks if usual.optim.base_batch_size else 1  # a rate for any batch stays
        before = usual.optim.scaled_lr(usual.batch_size)
        assert recipe.optim.scaled_lr(recipe.batch_size) == pytest.approx(before * times)
    assert fit_to_data(usual, 10**6, chosen={"batch_size"}, ranks=8, on_gpus=True).batch_size == usual.batch_size


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("images", [100, 700, 10**6])
def test_from_1_to_64_ranks_no_default_is_refused(on_gpus: bool, accumulate: int, images: int) -> None:
    for finetune in (False, True):
        usual = usual_recipe("photos", finetune=finetune, small=False)
        recipe = apply_changes(usual, {}, {"optim.accumulate": accumulate})
        for ranks in range(1, 65):
            fitted = fit_to_data(recipe, images, chosen=("optim.accumulate",), ranks=ranks, on_gpus=on_gpus)
            shares = images_per_rank(share_of(World(size=ranks), fitted.batch_size, accumulate), ranks)
            assert len(set(shares)) == 1 and shares[0] >= (accumulate if ranks == 1 else 2 * accumulate)
            assert sum(shares) <= max(0.1 * images, 4 * accumulate * ranks), "as many updates as the images allow"


def test_ranks_on_cpus_share_the_batch_of_one() -> None:
    usual = usual_recipe("photos", finetune=False, small=False)
    batches = [fit_to_data(usual, 10**6, chosen=(), ranks=ranks).batch_size for ranks in (1, 2, 3, 4, 7, 64)]
    assert batches == [128, 128, 126, 128, 126, 128]


def test_what_torch_sees_says_whether_ranks_run_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    gpus = TrainingOptions(model="mlp", epochs=1, device="cuda")
    assert recipe_for("digits", gpus, finetune=False, ranks=2).batch_size == 2 * 32  # a tenth of 900, two halved 128
    assert recipe_for("digits", QUICK, finetune=False, ranks=2).batch_size == 64
    assert recipe_for("digits", gpus, finetune=True, ranks=4).batch_size == 4 * 16
    assert recipe_for("digits", QUICK, finetune=True, ranks=4).batch_size == 16
    assert recipe_for("digits", QUICK, finetune=True, ranks=4, on_gpus=True).batch_size == 64


def test_the_same_command_with_other_ranks_goes_on_with_the_batch_of_its_run() -> None:
    recipe, folder = draft_run("digits", QUICK, finetune=True, ranks=8, on_gpus=True)
    assert recipe.batch_size == 64
    st.Run.create(folder, recipe)
    for ranks in (1, 3, 8):
        again, same = draft_run("digits", QUICK, finetune=True, ranks=ranks, on_gpus=True)
        assert same == folder and again.digest == recipe.digest
    named = TrainingOptions(model="mlp", epochs=4, device="cpu", batch_size=32, run=str(folder))
    assert draft_run("digits", named, finetune=True, ranks=3, on_gpus=True)[0].batch_size == 32
    longer = TrainingOptions(model="mlp", epochs=5, device="cpu", run=str(folder))
    assert draft_run("digits", longer, finetune=True, ranks=1)[0].batch_size == 16, "it is another recipe"


def test_images_of_each_rank_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits", "--model", "mlp", "--epochs", "1", "--device", "cpu", "--procs", "3", "--explain"]
    assert main(words) == 0
    assert "of 63 images (21 on each of 3 ranks): 1 epoch" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images_per_rank"] == [21, 21, 21]
    assert main([*words, "--batch-size", "64"]) == 2
    assert "cannot be split into 3 equal parts, for 3 ranks: choose 63 or 66" in capsys.readouterr().err
    assert per_rank(images_per_rank(share_of(World(size=3), 1024, 1, before=8), 3)) == "256 to 384 on each of 3 ranks"


@pytest.mark.parametrize(("device", "images"), [("cuda", "1,024"), ("cpu", "128")])
def test_a_schedule_is_that_of_the_ranks(device: str, images: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--num-train", "100000", "--procs", "8", "--device", device]) == 0
    assert f" {images}\n" in capsys.readouterr().out
