"""The recipe's transforms of a training batch, on its device and in their order, before it is normalised.

Every number that is drawn is a pure function of the seed, the kind of transform and the position of the image in the
stream, so an image gets the same whatever batch, rank or attempt it is made in. Only mixing looks at another image: the
one that is half a micro-batch away; and a transform of the user's own draws for a whole micro-batch, from generators
seeded by the seed and the position of its first image. The micro-batches of an update do not depend on the ranks that
make it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from steadytrain.config.factories import import_factory
from steadytrain.config.transforms import MIXING, Transform, is_mixing
from steadytrain.data.arrays import Floats
from steadytrain.data.loader.sampler import TRANSFORMS, uniforms
from steadytrain.data.transforms import operations
from steadytrain.data.transforms.operations import to_device
from steadytrain.data.transforms.policies import augmix, autoaugment, randaugment, trivialaugment
from steadytrain.errors import RecipeError, did_you_mean, first_line

Apply = Callable[[Tensor, Floats, Transform, Tensor], Tensor]
"""A function of images uint8[n, H, W, C], which it may change, draws float64[n, ...], the transform and the colour
float32[C] of what is empty. It returns images of the same shape.
"""

OwnTransform = Callable[[Tensor], Tensor]
"""The user's own: of images uint8[B, C, H, W], as many of the same size, uint8 or floating point from 0 to 1."""


@dataclass(frozen=True)
class Augmentation:
    """The transforms of training batches.

    Args:
        transforms: in the order in which they are applied.
        fill: of each channel, from 0 to 1: the colour of what is empty.
        group: images of a micro-batch: each is mixed with another of the same, and what is the user's own gets them
            together.
        own_transforms: what :func:`make_own` has made of the user's own transforms, by name.

    >>> augmentation = Augmentation((Transform.parse("mixup:0.2"),), seed=0, fill=(0.5,), num_classes=3, group=4)
    >>> images = torch.zeros(4, 8, 8, 1, dtype=torch.uint8)
    >>> mixed, targets = augmentation(images, torch.tensor([0, 1, 2, 2]), np.arange(4))
    >>> targets.shape, targets.sum(1).tolist()
    (torch.Size([4, 3]), [1.0, 1.0, 1.0, 1.0])
    """

    transforms: tuple[Transform, ...]
    seed: int
    fill: tuple[float, ...]
    num_classes: int
    group: int
    own_transforms: Mapping[str, OwnTransform] = field(default_factory=dict)
    _fills: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_mixing(self) -> bool:
        """Return whether labels become float32[B, K]."""
        return is_mixing(self.transforms)

    def __call__(self, images: Tensor, labels: Tensor, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return transformed copies of images uint8[B, H, W, C] and labels int64[B].

        Labels are float32[B, K], a share of each class, if images are mixed.

        ``positions``: int64[B], where the images stand in the stream.
        """
        device = images.device
        if device not in self._fills:
            self._fills[device] = torch.tensor([round(255 * value) for value in self.fill], device=device).float()
        images, fill = images.clone(), self._fills[device]
        for transform in self.transforms:
            if transform.is_own:
                images = self._apply_own(images, transform, positions)
            elif transform.name not in MIXING:
                images = APPLY[transform.name](images, self.draws(transform, positions), transform, fill)
        return self._mix(images, labels, positions) if self.is_mixing else (images, labels)

    def _apply_own(self, images: Tensor, transform: Transform, positions: NDArray[np.int64]) -> Tensor:
        """Call the user's own transform with each micro-batch; what it draws depends on its first position alone."""
        apply, number = self.own_transforms[transform.name], list(self.own_transforms).index(transform.name)
        parts = []
        for start in range(0, len(images), self.group):
            part, first = images[start : start + self.group], positions[start : start + 1]
            draw = uniforms(self.seed, first, number + 1, TRANSFORMS + transform.kind.number)[0, number]
            with _seeded(int(draw * 2**32), images.device):
                parts.append(_call_own(transform.name, apply, part))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def draws(self, transform: Transform, positions: NDArray[np.int64]) -> Floats:
        """Draw the numbers of a transform: float64[B, n]."""
        number = DRAWS[transform.name](transform)
        return uniforms(self.seed, positions, number, TRANSFORMS + transform.kind.number)

    def targets(self, labels: Tensor) -> Tensor:
        """Return labels int64[B] in the form in which the loss gets them: as they are, or as shares of each class."""
        if not self.is_mixing or labels.dim() == 2:
            return labels
        return functional.one_hot(labels, self.num_classes).float()

    def _mix(self, images: Tensor, labels: Tensor, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Mix each image with the one that is half a micro-batch away, by mixup or by cutmix."""
        n, height, width, _ = images.shape
        transforms = [transform for transform in self.transforms if transform.name in MIXING]
        draws_of = {transform.name: self.draws(transform, positions) for transform in transforms}
        chosen = {
            name: draws[:, 0] < transform.number("probability")
            for transform, (name, draws) in zip(transforms, draws_of.items(), strict=True)
        }
        if len(transforms) == 2:
            is_mixup = draws_of["mixup"][:, 1] < 0.5
            chosen = {"mixup": chosen["mixup"] & is_mixup, "cutmix": chosen["cutmix"] & ~is_mixup}
        group = min(self.group, n)
        others = np.roll(np.arange(n).reshape(-1, group), -(group // 2), axis=1).reshape(-1)
        partners, own_shares = images.index_select(0, to_device(others, images)), np.ones(n)
        for transform in transforms:
            draws, rows = draws_of[transform.name], np.flatnonzero(chosen[transform.name])
            shares = operations.beta_quantiles(transform.number("alpha"), draws[rows, 2])
            where = to_device(rows, images)
            first, second = images.index_select(0, where), partners.index_select(0, where)
            if transform.name == "mixup":
                weights = to_device(shares, images)[:, None, None, None]
                result = (first * weights + second * (1 - weights)).round_().to(torch.uint8)
            else:
                ratios = np.full(len(rows), width / height)
                corners = operations.boxes(height, width, 1 - shares, ratios, draws[rows, 3:5], whole=False)
                result = torch.where(operations.inside(height, width, corners, images), second, first)
                top, left, bottom, right = corners.T
                shares = 1 - (bottom - top) * (right - left) / (height * width)
            images.index_copy_(0, where, result)
            own_shares[rows] = shares
        targets, share = self.targets(labels), to_device(own_shares, images)[:, None]
        return images, targets * share + targets.index_select(0, to_device(others, images)) * (1 - share)


def make_own(
    transforms: Iterable[Transform], device: torch.device | None, shape: tuple[int, int, int], *, allow_import: bool
) -> dict[str, OwnTransform]:
    """Import the user's own transforms, make them, and try each on two images.

    Args:
        transforms: of a recipe; those that are named otherwise are left out.
        device: where they work; None: on the CPU.
        shape: height, width and channels of the images.
        allow_import: whether the user's own code or command line named them, and not a file.

    Raises:
        RecipeError: one may not be imported, fails, or gives no images of the same shape.
    """
    functions: dict[str, OwnTransform] = {}
    device = device or torch.device("cpu")
    for name in (transform.name for transform in transforms if transform.is_own):
        factory = import_factory(
            name,
            key="data.transforms",
            flag="--transforms",
            what="a transform",
            allow_import=allow_import,
            hint=did_you_mean(name.partition(":")[0], APPLY),
        )
        try:
            apply = factory()
            if isinstance(apply, torch.nn.Module):
                apply = apply.to(device)
            with _seeded(0, device):
                _call_own(name, apply, torch.zeros(2, *shape, dtype=torch.uint8, device=device))
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(f"data.transforms={name} failed: {type(error).__name__}: {first_line(error)}") from error
        functions[name] = apply
    return functions


def _call_own(name: str, apply: OwnTransform, images: Tensor) -> Tensor:
    """Call a transform of the user's own with images uint8[B, H, W, C]. Raises RecipeError where it gives no such."""
    result = apply(images.permute(0, 3, 1, 2))
    n, height, width, channels = images.shape
    if not isinstance(result, Tensor) or result.shape != (n, channels, height, width):
        is_tensor = isinstance(result, Tensor)
        kind = f"{result.dtype} of shape {list(result.shape)}" if is_tensor else f"a {type(result).__name__}"
        raise RecipeError(
            f"data.transforms={name} gave {kind}; of images uint8 [B, C, H, W] it must give as many of the same size,"
            " uint8 or floating-point numbers from 0 to 1"
        )
    if result.is_floating_point():
        result = (result * 255).round_().clamp_(0, 255)
    return result.permute(0, 2, 3, 1).to(torch.uint8).contiguous()


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's, NumPy's and Python's generators (32 bits), and restore them on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _vflip(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    flips = to_device(draws[:, 0] < transform.number("probability"), images)
    return torch.where(flips[:, None, None, None], images.flip(1), images)


def _rotate(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    return operations.warp(images, operations.turns((2 * draws[:, 0] - 1) * transform.number("degrees")), fill)


def _shear(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    maps = operations.turns(np.zeros(len(images)))
    maps[:, 0, 1] = (2 * draws[:, 0] - 1) * transform.number("ratio")
    return operations.warp(images, maps, fill)


def _color(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue by one linear map of each image's colours.

    Levels beyond 0 and 255 are cut off once, at the end.
    """
    channels, shares = images.shape[3], 2 * draws - 1
    bright, contrast, saturated = (
        1 + shares[:, k] * transform.number(name) for k, name in enumerate(("brightness", "contrast", "saturation"))
    )
    maps = operations.brightness(bright * contrast, channels)
    if channels == 3:
        maps = operations.saturation(saturated, channels) @ maps
        if transform.number("hue"):
            maps = operations.hue(shares[:, 3] * transform.number("hue")) @ maps
    # A grey level stays as it is under the maps of saturation and hue.
    towards = operations.grey_levels(images) * to_device(bright * (1 - contrast), images)
    return operations.recolor(images, to_device(maps, images), towards[:, None].expand(-1, channels))


def _grey(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    rows = np.flatnonzero(draws[:, 0] < transform.number("probability"))
    if images.shape[3] == 3 and len(rows):
        where = to_device(rows, images)
        maps = to_device(operations.saturation(np.zeros(len(rows)), 3), images)
        grey = operations.recolor(images.index_select(0, where), maps, torch.zeros_like(maps[:, 0]))
        images.index_copy_(0, where, grey)
    return images


def _erase(images: Tensor, draws: Floats, transform: Transform, fill: Tensor) -> Tensor:
    """Erase a box: its share of the area is uniform, its ratio log-uniform from 0.3 to 1 / 0.3."""
    height, width = images.shape[1:3]
    least, most = transform.number("least"), transform.number("most")
    areas = np.where(draws[:, 0] < transform.number("probability"), least + draws[:, 1] * (most - least), 0)
    corners = operations.boxes(height, width, areas, 0.3 ** (2 * draws[:, 2] - 1), draws[:, 3:5], whole=True)
    return torch.where(operations.inside(height, width, corners, images), fill.to(torch.uint8), images)


APPLY: dict[str, Apply] = {
    "vflip": _vflip,
    "rotate": _rotate,
    "shear": _shear,
    "randaugment": randaugment,
    "trivialaugment": trivialaugment,
    "autoaugment": autoaugment,
    "augmix": augmix,
    "color": _color,
    "grey": _grey,
    "erase": _erase,
}
"""The function of each transform, but for those that mix images."""

DRAWS: dict[str, Callable[[Transform], int]] = {
    **dict.fromkeys(("vflip", "rotate", "shear", "grey"), lambda transform: 1),
    "randaugment": lambda transform: 4 * int(transform.number("operations")),
    "trivialaugment": lambda transform: 3,
    "autoaugment": lambda transform: 5,
    "augmix": lambda transform: 2 + int(transform.number("chains")) * (2 + 3 * int(transform.number("operations"))),
    "color": lambda transform: 4,
    **dict.fromkeys(("erase", "mixup", "cutmix"), lambda transform: 5),
}
"""Numbers that each transform draws for an image."""
