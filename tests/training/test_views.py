"""An image and its mirror image are averaged, and another size is what was asked for, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.errors import ModelError
from steadytrain.run import Run
from steadytrain.training import evaluate, restore, train
from steadytrain.training.inference.views import FlippedViews, with_flips, with_size


class Corner(nn.Module):
    """Logits from single pixels: what is at the left edge above and below, and in the middle."""

    def forward(self, images: Tensor) -> Tensor:
        middle = images.shape[2] // 2
        return torch.stack((images[:, 0, 0, 0], images[:, 0, -1, 0], images[:, 0, middle, middle]), 1)


def test_a_flip_is_averaged_with_the_image() -> None:
    images = torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    net = Corner()
    shares = (net(images).softmax(1) + net(images.flip(3)).softmax(1)) / 2
    torch.testing.assert_close(FlippedViews(net)(images).exp(), shares)


def test_a_run_is_evaluated_mirrored_and_at_another_size(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 0.5}))
    train(run)
    trained = restore(run)
    plain, flipped = evaluate(trained), evaluate(with_flips(trained))
    assert plain.n == flipped.n and plain.loss != flipped.loss
    capsys.readouterr()
    assert main(["evaluate", str(run.directory), "--tta", "flip", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tta"] == "flip" and document["loss"] == pytest.approx(flipped.loss)
    assert main(["evaluate", str(run.directory), "--tta", "ten-crop"]) == 2
    assert main(["evaluate", str(run.directory), "--size", "large"]) == 2


def test_what_cannot_be_seen_so_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"model.name": "mlp", "budget.epochs": 0.5}))
    train(run)
    trained = restore(run)
    with pytest.raises(ModelError, match="takes no images of 20 pixels"):
        with_size(trained, 20)
