"""Heat maps: their mass lies on what decides, they change with the weights, and they lie over what the network saw."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from steadytrain.config import Precision
from steadytrain.config.parts import ImageFit
from steadytrain.models import Input
from steadytrain.models.nets import Digits
from steadytrain.training.inference.heat_maps import CELLS, LEAST_SIDE, draw, heat_maps
from steadytrain.training.inference.trained import Trained
from steadytrain.training.inference.views import Tta, with_views
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import Policy

SIDE, MARK = 28, 8
COLOURS = torch.tensor([[230, 60, 60], [60, 60, 230]], dtype=torch.uint8)
PLACES = ((0, 0), (2, 18), (10, 10), (20, 5), (20, 20))


def vit(num_classes: int) -> nn.Module:
    options: dict[str, Any] = {
        "img_size": SIDE,
        "patch_size": (4, 7),
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "reg_tokens": 2,
    }
    net: nn.Module = timm.models.VisionTransformer(num_classes=num_classes, **options)
    return net


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "cnn": lambda classes: Digits(num_classes=classes, channels=3, width=8),
    "vit": vit,
}


def marked(labels: Tensor, places: Tensor, generator: torch.Generator) -> Tensor:
    """Draw noise with a mark of the class's colour at a place; of the last class without any: uint8 [B, H, W, C]."""
    images = torch.randint(90, 160, (len(labels), SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
    for image, label, (row, column) in zip(images, labels.tolist(), places.tolist(), strict=True):
        if label < 2:
            image[row : row + MARK, column : column + MARK] = COLOURS[label]
    return images


def as_trained(
    module: nn.Module, *, is_multi_label: bool = False, fit: ImageFit = "crop", crop: float = 1.0
) -> Trained:
    half = (0.5, 0.5, 0.5)
    input = Input(size=SIDE, channels=3, mean=half, std=half, fit=fit, crop=crop)
    policy = Policy(Precision("fp32"), torch.device("cpu"))
    names = ("red", "blue", "none")
    return Trained(module.eval(), policy, input, names, "own", Path("own"), is_multi_label=is_multi_label)


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request: pytest.FixtureRequest) -> Trained:
    """A network that tells the colour of a small mark at any place."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    trained = as_trained(NETWORKS[request.param](3))
    module, rate = trained.module.train(), 2e-3 if request.param == "vit" else 1e-2
    optimizer = torch.optim.AdamW(module.parameters(), rate)
    for _ in range(120):
        labels = torch.randint(0, 3, (48,), generator=generator)
        places = torch.randint(0, SIDE - MARK + 1, (48, 2), generator=generator)
        images = trained.policy.images(marked(labels, places, generator), trained.input.mean, trained.input.std)
        loss = functional.cross_entropy(module(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if loss < 0.02:
            break
    module.eval()
    return trained


def maps_of(trained: Trained, images: Tensor, outputs: Tensor) -> NDArray[np.float32]:
    return heat_maps(trained, images, outputs, PassLimit("evaluation", on_halved=print))


def shares_on_mark(maps: NDArray[np.float32], places: Tensor) -> list[float]:
    """Return the share of each map that lies on its mark, or so near that what is covered there touches it."""
    cell, shares = SIDE / CELLS, []
    centres = (np.arange(CELLS) + 0.5) * cell
    for cells, place in zip(maps, places.tolist(), strict=True):
        rows, columns = ((centres > first - cell) & (centres < first + MARK + cell) for first in place)
        shares.append(float(cells[np.ix_(rows, columns)].sum() / cells.sum()))
    return shares


def test_the_mass_of_a_map_lies_on_the_mark_wherever_it_is(trained: Trained) -> None:
    places, generator = torch.tensor(PLACES * 2), torch.Generator().manual_seed(1)
    labels = torch.tensor([0] * len(PLACES) + [1] * len(PLACES))
    images = marked(labels, places, generator)
    assert (trained.module(trained.policy.images(images, (0.5,) * 3, (0.5,) * 3)).argmax(1) == labels).all()
    maps = maps_of(trained, images, labels[:, None])
    assert maps.shape == (10, 1, CELLS, CELLS) and maps.max() == 1 and maps.min() == 0
    shares = shares_on_mark(maps[:, 0], places)
    assert min(shares) > 0.36, "twice the share of the picture"
    assert np.mean(shares) > 0.6


def test_maps_tell_classes_apart_by_what_was_learned(trained: Trained) -> None:
    """Of two marks each class has its own; by weights that are drawn anew it has not.

    Adebayo et al. 2018, "Sanity Checks for Saliency Maps".
    """
    red, blue = torch.tensor(PLACES[:1] * 2 + PLACES[4:]), torch.tensor(PLACES[3:] + PLACES[1:2])
    images = marked(torch.zeros(3, dtype=torch.int64), red, torch.Generator().manual_seed(2))
    for image, (row, column) in zip(images, blue.tolist(), strict=True):
        image[row : row + MARK, column : column + MARK] = COLOURS[1]

    def lead(network: Trained) -> float:
        """Return how much more of each class's map lies on its own mark than on the other's."""
        maps = maps_of(network, images, torch.tensor([[0, 1]] * len(images))) + 1e-6
        own = shares_on_mark(maps[:, 0], red) + shares_on_mark(maps[:, 1], blue)
        other = shares_on_mark(maps[:, 0], blue) + shares_on_mark(maps[:, 1], red)
        return float(np.mean(own) - np.mean(other))

    others, leads = copy.deepcopy(trained), list[float]()
    for seed in range(6):
        torch.manual_seed(seed)
        for part in others.module.modules():
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        leads.append(lead(others))
    assert lead(trained) > 0.4 > 2 * abs(np.mean(leads))


class Channels(nn.Module):
    """A network whose logit of each label is the sum of one colour: what decides is known."""

    def forward(self, images: Tensor) -> Tensor:
        return images.clamp(min=0).sum((2, 3))


def test_each_label_has_a_map_of_its_own() -> None:
    image = torch.zeros(1, SIDE, SIDE, 3, dtype=torch.uint8)
    image[0, :8, :8, 0] = image[0, 20:, 20:, 2] = 255
    red, green, blue = maps_of(as_trained(Channels(), is_multi_label=True), image, torch.tensor([[0, 1, 2]]))[0]
    assert red[:3, :3].sum() > 0.99 * red.sum()
    assert blue[-3:, -3:].sum() > 0.99 * blue.sum() and not green.any()


@pytest.mark.parametrize("tta", ["flip", "five-crop"])
def test_a_map_of_several_views_lies_where_the_image_is(tta: Tta) -> None:
    trained = with_views(as_trained(Channels(), crop=0.875), tta)
    side = trained.input.size
    assert side is not None
    image = torch.zeros(1, side, side, 3, dtype=torch.uint8)
    image[0, 4:10, 4:10, 0] = 255
    cells = maps_of(trained, image, torch.tensor([[0]]))[0, 0]
    assert cells[:4, :4].sum() > 0.9 * cells.sum()


@pytest.mark.parametrize(
    ("fit", "size", "dark"),
    [
        ("crop", (400, 200), (20, 100)),
        ("squash", (400, 200), None),
        ("pad", (400, 200), None),
        ("crop", (40, 80), (64, 8)),
    ],
)
def test_a_map_lies_over_the_part_that_the_network_saw(fit: ImageFit, size: tuple[int, int], dark: object) -> None:
    file = io.BytesIO()
    Image.new("RGB", size, (200, 200, 200)).save(file, "PNG")
    cells = np.zeros((CELLS, CELLS), np.float32)
    cells[CELLS // 2, CELLS // 2] = 1
    drawn = Image.open(io.BytesIO(draw(as_trained(Channels(), fit=fit), file.getvalue(), cells)))
    width, height = drawn.size
    assert max(drawn.size) == max(*size, LEAST_SIDE) and abs(width / height - size[0] / size[1]) < 0.02
    pixels = np.asarray(drawn).astype(int)
    red, _, blue = pixels[height // 2, width // 2]
    assert red > blue + 60, "the middle is seen, and hot"
    is_dark = (pixels.max(2) < 100).mean()
    assert is_dark == pytest.approx(0.5 if dark else 0, abs=0.02)
    assert dark is None or pixels[dark[1], dark[0]].max() < 80  # type: ignore[index]


def test_a_turned_photograph_is_upright_under_its_map() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (300, 200)).save(file, "JPEG", exif=exif)
    cells = np.zeros((CELLS, CELLS), np.float32)
    assert Image.open(io.BytesIO(draw(as_trained(Channels()), file.getvalue(), cells))).size == (200, 300)
