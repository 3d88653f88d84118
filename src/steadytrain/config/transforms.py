"""The transforms that a recipe names, such as ``randaugment:2,9``: their words, parameters and one order.

Whatever order they are written in, they are applied in the order of :data:`KINDS`, after the loader's crop and
horizontal flip and before images are normalised. What each computes is in :mod:`steadytrain.data.transforms`. Those of
the user's own, ``pkg.mod:factory``, come before ``erase``, in the order in which they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from steadytrain.config.factories import FACTORY
from steadytrain.config.foreign import our_value
from steadytrain.config.words import number
from steadytrain.errors import RecipeError, did_you_mean


@dataclass(frozen=True)
class Parameter:
    """One number of a transform: its default, and its limits; ``words`` if it is one of these words instead."""

    name: str
    default: float = 0.0
    low: float = 0.0
    high: float = 1.0
    is_whole: bool = False
    words: tuple[str, ...] = ()

    @property
    def limit(self) -> str:
        """The limits in words."""
        if self.words:
            return f"one of {', '.join(self.words)}"
        return f"{'a whole number ' * self.is_whole}from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class TransformKind:
    """One kind of transform: its parameters in the order they are written, where it comes from, what it does.

    ``number`` tells its random draws from those of other kinds: it must never change. ``is_needed``: the first
    parameter has no default.
    """

    number: int
    meaning: str
    source: str
    parameters: tuple[Parameter, ...] = ()
    is_needed: bool = False

    @property
    def usual(self) -> list[float | str]:
        """The default of each parameter."""
        return [parameter.words[0] if parameter.words else parameter.default for parameter in self.parameters]


_P = Parameter("probability", 0.5)
_LEVELS = "autocontrast, equalise, posterise, solarise, rotate, shear, translate"

KINDS: dict[str, TransformKind] = {
    "vflip": TransformKind(0, "flip images vertically", "-", (_P,)),
    "rotate": TransformKind(
        1, "rotate by up to so many degrees, either way", "-", (Parameter("degrees", 15, 0, 180),), is_needed=True
    ),
    "shear": TransformKind(
        2, "shear rows by up to this share of the height", "-", (Parameter("ratio", 0.1),), is_needed=True
    ),
    "randaugment": TransformKind(
        3,
        "draw operations of one magnitude (of 30), which may vary by a standard deviation; skip some",
        "Cubuk et al. 2020",
        (
            Parameter("operations", 2, 1, 8, is_whole=True),
            Parameter("magnitude", 9, 0, 30),
            Parameter("deviation", 0, 0, 10),
            Parameter("probability", 1),
        ),
    ),
    "trivialaugment": TransformKind(
        4, "draw one operation, and its magnitude from a wide range", "Mueller and Hutter 2021"
    ),
    "autoaugment": TransformKind(
        5,
        "draw one of 25 learned pairs of operations",
        "Cubuk et al. 2019",
        (Parameter("policy", words=("imagenet", "cifar10", "svhn")),),
    ),
    "augmix": TransformKind(
        6,
        f"mix chains of operations ({_LEVELS}) of a magnitude (of 10) with the image",
        "Hendrycks et al. 2020",
        (
            Parameter("magnitude", 3, 0, 10),
            Parameter("chains", 3, 1, 8, is_whole=True),
            Parameter("operations", 3, 1, 8, is_whole=True),
        ),
    ),
    "color": TransformKind(
        7,
        "change brightness, contrast, saturation (one number is for these three) and hue by up to these shares",
        "Howard 2013",
        (Parameter("brightness", 0.4), Parameter("contrast"), Parameter("saturation"), Parameter("hue", high=0.5)),
        is_needed=True,
    ),
    "grey": TransformKind(8, "make images grey", "-", (Parameter("probability", 0.1),), is_needed=True),
    "erase": TransformKind(
        9,
        "erase a box of up to a share of the area: the mean colour takes its place",
        "Zhong et al. 2020",
        (Parameter("probability", 0.25), Parameter("least", 0.02, 0.0, 1.0), Parameter("most", 1 / 3, 0.0, 1.0)),
    ),
    "mixup": TransformKind(
        10,
        "blend pairs of images and their labels, with a share drawn from Beta(alpha, alpha)",
        "Zhang et al. 2018",
        (Parameter("alpha", 0.2, 1e-3, 100), Parameter("probability", 1)),
    ),
    "cutmix": TransformKind(
        11,
        "put a box of another image into each, and blend labels by area",
        "Yun et al. 2019",
        (Parameter("alpha", 1, 1e-3, 100), Parameter("probability", 1)),
    ),
}
"""Every transform, in the order in which they are applied."""

OWN = TransformKind(12, "a transform of your own, such as one of torchvision.transforms.v2", "-")
"""The row of any transform by ``pkg.mod:factory``."""
POLICIES = ("randaugment", "trivialaugment", "autoaugment", "augmix")
"""Transforms of which a recipe has at most one."""
MIXING = ("mixup", "cutmix")
"""Transforms that mix images. Where a recipe has both, each image gets one of them, drawn with equal chances."""


@dataclass(frozen=True)
class Transform:
    """One transform of a recipe: its name, and a value for each parameter of its kind.

    >>> str(Transform.parse("RandAugment:2,9")), str(Transform.parse("color:0.4"))
    ('randaugment:2,9', 'color:0.4')
    """

    name: str
    values: tuple[float | str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Return whether the name is the path of a factory of the user's own."""
        return ":" in self.name

    @property
    def kind(self) -> TransformKind:
        return OWN if self.is_own else KINDS[self.name]

    def number(self, name: str) -> float:
        """Return the value of a parameter."""
        names = [parameter.name for parameter in self.kind.parameters]
        return float(self.values[names.index(name)])

    def __str__(self) -> str:
        """Write it as a recipe holds it: without the last values that are usual."""
        usual, values = self.kind.usual, list(self.values)
        if self.name == "color" and len(set(values[:3])) == 1 and values[3] == 0:
            values = values[:1]
        while len(values) > (2 if self.name == "randaugment" else 1) and values[-1] == usual[len(values) - 1]:
            values.pop()
        shown = [value if isinstance(value, str) else f"{value:.6g}" for value in values]
        return f"{self.name}:{','.join(shown)}" if shown else self.name

    @staticmethod
    def parse(text: str) -> Transform:
        """Read ``NAME``, ``NAME:VALUE,VALUE`` or ``pkg.mod:factory``.

        Raises:
            RecipeError: no such transform, or a value that it cannot have.
        """
        name, colon, arguments = text.strip().partition(":")
        name = name.strip().lower().replace("_", "-")
        if name not in KINDS and FACTORY.fullmatch(text.strip()):
            return Transform(text.strip())
        if name not in KINDS:  # other libraries call it otherwise
            name, same_colon, same = our_value("transforms", name).partition(":")
            colon, arguments = (colon, arguments) if colon else (same_colon, same)
        if name not in KINDS:
            raise RecipeError(
                f"data.transforms has {text!r}; the transforms are {', '.join(KINDS)} and pkg.mod:factory."
                f"{did_you_mean(name, KINDS)}"
            )
        kind = KINDS[name]
        words = [word.strip() for word in arguments.split(",")] if colon else []
        usage = f"{name}:{','.join(parameter.name.upper() for parameter in kind.parameters)}"
        if len(words) > len(kind.parameters):
            takes = f"write {usage}" if kind.parameters else "it takes no values"
            raise RecipeError(f"data.transforms has {text!r}, which has too many values: {takes}")
        if not words and kind.is_needed:
            example = f"{name}:{kind.parameters[0].default:g}"
            raise RecipeError(f"data.transforms has {text!r} without a value: write {usage}, such as {example}")
        values = [_value(parameter, word, text, usage) for parameter, word in zip(kind.parameters, words, strict=False)]
        if name == "color" and len(values) == 1:
            values *= 3  # one number for brightness, contrast and saturation
        values += kind.usual[len(values) :]
        transform = Transform(name, tuple(values))
        if name == "erase" and transform.number("least") > transform.number("most"):
            raise RecipeError(f"data.transforms has {text!r}: the least share of the area is above the most")
        return transform


def _value(parameter: Parameter, word: str, text: str, usage: str) -> float | str:
    """Read one value. Raises RecipeError with the parameter's limits."""
    message = f"data.transforms has {text!r}: {parameter.name} is {word!r}; it must be {parameter.limit} ({usage})"
    if parameter.words:
        if word.lower() not in parameter.words:
            raise RecipeError(f"{message}.{did_you_mean(word, parameter.words)}")
        return word.lower()
    value = number(word)
    if not parameter.low <= value <= parameter.high or (parameter.is_whole and value % 1):
        raise RecipeError(message)
    return value


def parse_transforms(texts: Iterable[str]) -> tuple[Transform, ...]:
    """Read the transforms of a recipe; return them in the order in which they are applied.

    Raises:
        RecipeError: as :meth:`Transform.parse`; one of them twice, or two policies.

    >>> [str(transform) for transform in parse_transforms(["mixup:0.2", "randaugment:2,9"])]
    ['randaugment:2,9', 'mixup:0.2']
    """
    order = list(KINDS)
    order.insert(order.index("erase"), "")
    parsed = map(Transform.parse, texts)
    transforms = sorted(parsed, key=lambda transform: order.index("" if transform.is_own else transform.name))
    names = [transform.name for transform in transforms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"data.transforms has {twice} twice: each is applied once; keep one of them")
    if len(policies := [name for name in names if name in POLICIES]) > 1:
        raise RecipeError(f"data.transforms has {' and '.join(policies)}: choose one of them")
    return tuple(transforms)


def split_transforms(text: str) -> tuple[str, ...]:
    """Split what a flag says, where a comma stands between transforms as well as between the values of one.

    >>> split_transforms("randaugment:2,9,mixup:0.2,vflip")
    ('randaugment:2,9', 'mixup:0.2', 'vflip')
    """
    parts: list[str] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if parts and re.match(r"[0-9.]", word):
            parts[-1] += f",{word}"
        else:
            parts.append(word)
    return () if parts == ["none"] else tuple(parts)


def is_mixing(transforms: Iterable[Transform]) -> bool:
    """Return whether any of the transforms mixes labels."""
    return any(transform.name in MIXING for transform in transforms)
