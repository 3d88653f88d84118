"""Operations on pixels are those of torchvision, image by image, on real photographs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import AutoAugmentPolicy
from torchvision.transforms.v2 import AutoAugment, InterpolationMode, RandAugment
from torchvision.transforms.v2 import functional as oracle

from steadytrain.data.transforms import operations
from steadytrain.data.transforms.policies import USUAL, WIDE, Op, apply_ops, learned, values_of

IMAGES = Path(__file__).parents[2] / "golden" / "images"
FILL = torch.tensor([124.0, 116.0, 104.0])
BLACK = torch.zeros(3)
"""With another colour, torchvision takes the share of an edge pixel that is empty twice."""
N = 8

_NAMES = {
    Op.SHEAR_X: "ShearX",
    Op.SHEAR_Y: "ShearY",
    Op.TRANSLATE_X: "TranslateX",
    Op.TRANSLATE_Y: "TranslateY",
    Op.AUTOCONTRAST: "AutoContrast",
}
NAMES = {op: _NAMES.get(op, op.name.capitalize()) for op in Op}


@pytest.fixture(scope="module")
def photographs() -> Tensor:
    """uint8[8, 48, 64, 3], parts of real photographs, some of them dark or flat."""
    parts = []
    for path in sorted(IMAGES.glob("*.jpg"))[:N] * N:
        with Image.open(path) as opened:
            parts.append(np.asarray(opened.convert("RGB").resize((64, 48))))
    images = np.stack(parts[:N])
    images[1] //= 3
    images[2] = images[2] // 2 + 90
    return torch.from_numpy(images)


def apart(ours: Tensor, theirs: list[Tensor]) -> int:
    """Return the largest difference in levels."""
    expected = torch.stack([image.permute(1, 2, 0) for image in theirs])
    return int((ours.int() - expected.int()).abs().max())


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.IDENTITY], ids=lambda op: op.name.lower())
@pytest.mark.parametrize("ranges", [USUAL, WIDE], ids=["usual", "wide"])
def test_each_operation_of_a_policy_is_torchvisions(photographs: Tensor, op: Op, ranges: object) -> None:
    assert ranges in (USUAL, WIDE)
    levels, signs = np.linspace(0, 1, N), np.where(np.arange(N) % 2, 1.0, -1.0)
    ops = np.full(N, op)
    values = values_of(ops, levels, signs, USUAL if ranges is USUAL else WIDE, 48, 64)
    ours = photographs.clone()
    apply_ops(ours, ops, values, BLACK)
    space = RandAugment(interpolation=InterpolationMode.BILINEAR)
    theirs = [
        space._apply_image_or_video_transform(
            image.permute(2, 0, 1),
            NAMES[op],
            value / 255 if op is Op.SOLARIZE else value,
            InterpolationMode.BILINEAR,
            {Tensor: None},
        )
        for image, value in zip(photographs, values.tolist(), strict=True)
    ]
    # torchvision rounds grey levels down, and then the result.
    assert apart(ours, theirs) <= (2 if op in (Op.COLOR, Op.CONTRAST) else 1)
    assert not torch.equal(ours, photographs)


@pytest.mark.parametrize("op", [op for op in Op if op not in (Op.COLOR, Op.IDENTITY)], ids=lambda op: op.name.lower())
def test_each_operation_takes_grey_images(photographs: Tensor, op: Op) -> None:
    grey = photographs[..., :1].contiguous()
    ours = grey.clone()
    apply_ops(ours, np.full(N, op), np.full(N, 3.0 if op is Op.POSTERIZE else 0.3), FILL[:1])
    assert ours.shape == grey.shape and not torch.equal(ours, grey)


def test_rotation_is_torchvisions(photographs: Tensor) -> None:
    degrees = np.linspace(-170, 170, N)
    ours = operations.warp(photographs, operations.turns(degrees), BLACK)
    theirs = [
        oracle.rotate(image.permute(2, 0, 1), angle, InterpolationMode.BILINEAR)
        for image, angle in zip(photographs, degrees.tolist(), strict=True)
    ]
    assert apart(ours, theirs) <= 1
    flat = operations.warp(FILL.to(torch.uint8).expand(N, 48, 64, 3), operations.turns(degrees), FILL)
    assert torch.equal(flat, FILL.to(torch.uint8).expand(N, 48, 64, 3)), "what is empty has the colour that was given"


Maps = Callable[[np.ndarray, int], np.ndarray]


@pytest.mark.parametrize(
    ("maps", "adjust"),
    [(operations.brightness, oracle.adjust_brightness), (operations.saturation, oracle.adjust_saturation)],
    ids=["brightness", "saturation"],
)
def test_changes_of_colour_are_torchvisions(
    photographs: Tensor, maps: Maps, adjust: Callable[[Tensor, float], Tensor]
) -> None:
    factors = np.linspace(0, 2, N)
    ours = operations.recolor(photographs, operations.to_device(maps(factors, 3), photographs), torch.zeros(N, 3))
    theirs = [adjust(image.permute(2, 0, 1), f) for image, f in zip(photographs, factors.tolist(), strict=True)]
    assert apart(ours, theirs) <= (1 if adjust is oracle.adjust_brightness else 2)


def test_a_turn_of_hue_keeps_grey_and_comes_back() -> None:
    turned = operations.hue(np.array([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(turned[[0, 2]], np.stack([np.eye(3)] * 2), atol=1e-9)
    np.testing.assert_allclose(turned[1] @ np.full(3, 100.0), np.full(3, 100.0), atol=1e-9)


def test_the_learned_policies_are_the_published_ones() -> None:
    ops = {name: op for op, name in NAMES.items()}
    for name in ("imagenet", "cifar10", "svhn"):
        theirs = AutoAugment(AutoAugmentPolicy[name.upper()])._policies
        expected = [[(ops[word], chance, float(level or 0)) for word, chance, level in pair] for pair in theirs]
        assert learned(name).tolist() == [[list(row) for row in pair] for pair in expected]
    assert learned("svhn")[0].tolist() == [[Op.SHEAR_X, 0.9, 4], [Op.INVERT, 0.2, 0]]


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 2.0, 8.0])
def test_the_quantiles_are_those_of_the_beta_distribution(alpha: float) -> None:
    uniform = np.linspace(0.001, 0.5, 500)
    np.testing.assert_allclose(
        operations.beta_quantiles(alpha, 1 - uniform), 1 - operations.beta_quantiles(alpha, uniform)
    )
    quantiles = operations.beta_quantiles(alpha, uniform)
    drawn = np.sort(np.random.default_rng(0).beta(alpha, alpha, 400_000))
    shares = np.searchsorted(drawn, quantiles) / len(drawn)
    assert np.abs(shares - uniform).max() < 4e-3


def test_a_large_batch_is_moved_in_pieces_to_the_same_pixels() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, 32, 32, 3), dtype=torch.uint8, generator=draw)
    assert images.numel() > 2 * operations.PIECE
    maps, fill = operations.turns(np.linspace(-90, 90, 100)), torch.tensor([120.0, 110.0, 100.0])
    alone = torch.cat([operations.warp(images[k : k + 1], maps[k : k + 1], fill) for k in range(100)])
    assert torch.equal(operations.warp(images, maps, fill), alone)
