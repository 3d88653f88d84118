"""Views of an image are averaged as they should be, and another size is what was asked for, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.errors import InputError, ModelError
from steadytrain.run import Run
from steadytrain.training import evaluate, restore, train
from steadytrain.training.inference.views import Views, with_size, with_views


class Corner(nn.Module):
    """Logits from single pixels: what is at the left edge above and below, and in the middle."""

    def forward(self, images: Tensor) -> Tensor:
        middle = images.shape[2] // 2
        return torch.stack((images[:, 0, 0, 0], images[:, 0, -1, 0], images[:, 0, middle, middle]), 1)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def test_a_flip_is_averaged_with_the_image(images: Tensor) -> None:
    net = Corner()
    shares = (net(images).softmax(1) + net(images.flip(3)).softmax(1)) / 2
    torch.testing.assert_close(Views(net, "flip", 12)(images).exp(), shares)


@pytest.mark.parametrize("count", [5, 10])
def test_crops_are_torchvisions(images: Tensor, count: int) -> None:
    from torchvision.transforms.v2 import functional

    crop = functional.five_crop if count == 5 else functional.ten_crop
    views = Views(Corner(), "five-crop" if count == 5 else "ten-crop", 8)
    expected = torch.stack([Corner()(view).softmax(1) for view in crop(images, [8, 8])]).mean(0)
    torch.testing.assert_close(views(images).exp(), expected)
    torch.testing.assert_close(views(images.to(memory_format=torch.channels_last)).exp(), expected)


def test_a_run_is_evaluated_in_views_and_at_another_size(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"data.crop": 0.8, "budget.epochs": 0.5}))
    train(run)
    trained = restore(run)
    plain, flipped, crops = (
        evaluate(some) for some in (trained, with_views(trained, "flip"), with_views(trained, "ten-crop"))
    )
    assert plain.n == flipped.n == crops.n and len({plain.loss, flipped.loss, crops.loss}) == 3
    capsys.readouterr()
    assert main(["evaluate", str(run.directory), "--tta", "flip", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tta"] == "flip" and document["loss"] == pytest.approx(flipped.loss)
    assert main(["evaluate", str(run.directory), "--tta", "five-crops"]) == 2
    assert main(["evaluate", str(run.directory), "--size", "large"]) == 2


def test_what_cannot_be_seen_so_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"model.name": "mlp", "budget.epochs": 0.5}))
    train(run)
    trained = restore(run)
    with pytest.raises(InputError, match="use --tta flip"):
        with_views(trained, "five-crop")
    with pytest.raises(ModelError, match="takes no images of 20 pixels"):
        with_size(trained, 20)
