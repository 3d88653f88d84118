"""Flags of timm, torchvision and MXNet that augment images, read as ``--transforms`` and keys of the recipe.

MXNet's are those of its training scripts (``--max-random-rotate-angle``) and the parameters of its ImageRecordIter
(``--max-rotate-angle``). :mod:`steadytrain.cli.foreign_flags` reads command lines by this table and its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from steadytrain.config.transforms import split_transforms
from steadytrain.errors import InputError, did_you_mean


@dataclass
class FlagReading:
    """Translation so far: transforms by name, keys of the recipe, flags of ours, notes for the user.

    ``parts``: what several flags say together, such as the step of a schedule, until all of them are read.
    """

    transforms: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, dict[int, str]] = field(default_factory=dict)
    colours: dict[str, str] = field(default_factory=dict)
    mixing: str | None = None
    magnitude: str | None = None
    erased: str | None = None
    noise: bool = True
    flags: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def words(self, named: str | None) -> list[str]:
        """Return flags of ours; ``named``: the transforms that ``--transforms`` named besides."""
        if self.erased and self.noise:
            self.notes.append(f"{self.erased} is read as --transforms {self.transforms['erase']}: {_PIXELS}")
        transforms = dict(self.transforms)
        if self.colours:
            values = (self.colours.get(name, "0") for name in ("brightness", "contrast", "saturation"))
            transforms["color"] = f"color:{','.join(values)}"
        for name in ("mixup", "cutmix"):
            if self.mixing is not None and name in transforms:
                transforms[name] += f",{self.mixing}"
        if self.magnitude is not None and transforms.get("policy", "").startswith("randaugment"):
            transforms["policy"] = f"randaugment:2,{self.magnitude}"
        texts = [*split_transforms(named or ""), *transforms.values()]
        words = [*self.flags, *(("--transforms", ",".join(texts)) if texts or named else ())]
        for key, ends in self.pairs.items():
            low, high = (ends.get(end, usual) for end, usual in enumerate(_USUAL[key]))
            words += ["--set", f"{key}=[{low},{high}]"]
        return words + [word for key, value in self.keys.items() for word in ("--set", f"{key}={value}")]


_USUAL = {"data.area": ("0.08", "1"), "data.ratio": ("0.75", "1.3333")}
Read = Callable[[FlagReading, str, list[str]], None]
"""Of the reading, the flag and its values."""


def is_number(word: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", word))


def is_zero(value: str) -> bool:
    return is_number(value) and float(value) == 0


def _transform(name: str) -> Read:
    """Read a number as the first value of a transform; 0 is none."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        if not is_zero(values[0]):
            reading.transforms[name] = f"{name}:{','.join(values)}"

    return read


def _reprob(reading: FlagReading, word: str, values: list[str]) -> None:
    _transform("erase")(reading, word, values)
    reading.erased = None if is_zero(values[0]) else f"{word} {values[0]}"


def _remode(reading: FlagReading, word: str, values: list[str]) -> None:
    reading.noise = values[0] != "const"


def _interpolation(reading: FlagReading, word: str, values: list[str]) -> None:
    if values[0] not in ("bilinear", "bicubic"):
        raise InputError(f"{word} is {values[0]!r}; images are resized by one filter: bilinear or bicubic")
    reading.keys["data.interpolation"] = values[0]


def _end(key: str, end: int) -> Read:
    """Read one end of a range."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        reading.pairs.setdefault(key, {})[end] = values[0]

    return read


def _range(key: str) -> Read:
    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        if len(values) != 2:
            raise InputError(f"{word} needs two numbers, such as {word} {' '.join(_USUAL[key])}")
        reading.pairs[key] = dict(enumerate(values))

    return read


def _hflip(reading: FlagReading, word: str, values: list[str]) -> None:
    if not is_number(values[0]) or float(values[0]) not in (0, 0.5):
        raise InputError(f"{word} is {values[0]}; half of the images are flipped (0.5), or none (0)")
    reading.keys["data.flip"] = "false" if is_zero(values[0]) else "true"


def _mirror(reading: FlagReading, word: str, values: list[str]) -> None:
    reading.keys["data.flip"] = "false" if values[0] in ("0", "False", "false") else "true"


def _repeats(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read timm's number of repeats (0: none), or torchvision's."""
    times = float(values[0]) if is_number(values[0]) else 0.5
    if times % 1 or times < 0:
        raise InputError(f"{word} is {values[0]}; it must be a whole number, such as {word} 3")
    reading.keys["data.repeats"] = f"{max(1, times):.0f}"


def _sampler(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read torchvision's flag of repeats, or DeiT's, which are 3 unless another says how many."""
    reading.keys.setdefault("data.repeats", "3")


def _resized_crop(reading: FlagReading, word: str, values: list[str]) -> None:
    if values[0] not in ("0", "False", "false"):
        reading.keys["data.augment"] = "resized-crop"


def _colour(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read MXNet's brightness, contrast or saturation."""
    if not is_zero(values[0]):
        reading.colours[word.lstrip("-")] = values[0]


def _jitter(reading: FlagReading, word: str, values: list[str]) -> None:
    if len(values) == 1 and is_zero(values[0]):
        return
    reading.transforms["color"] = f"color:{','.join(values)}"


def _mixing(reading: FlagReading, word: str, values: list[str]) -> None:
    reading.mixing = values[0]


def _magnitude(reading: FlagReading, word: str, values: list[str]) -> None:
    reading.magnitude = values[0]


def fixed(*accepted: str, nearest: str) -> Read:
    """Accept a flag that says what is done anyway, and name the nearest for any other value."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        value = values[0] if values else ""
        if not any(
            value == usual or (is_number(value) and is_number(usual) and float(value) == float(usual))
            for usual in accepted
        ):
            raise InputError(f"{f'{word} {value}'.strip()} has no counterpart here: {nearest}")

    return read


def _policy(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read a policy in timm's words (``rand-m9-mstd0.5-inc1``) or torchvision's (``ta_wide``)."""
    text = values[0].lower()
    if text in ("none", ""):
        return
    name, *parts = text.split("-")
    same = {
        "ra": "randaugment:2,9",
        **dict.fromkeys(("ta_wide", "ta"), "trivialaugment"),
        "augmix": "augmix",
        **{policy: f"autoaugment:{policy}" for policy in ("imagenet", "cifar10", "svhn")},
        **dict.fromkeys(("original", "originalr", "v0", "v0r"), "autoaugment:imagenet"),
    }
    if name in same and not parts:
        reading.transforms["policy"] = same[name]
    elif name in ("rand", "augmix"):
        reading.transforms["policy"] = transform = _timm_policy(name, parts, text)
        if name == "rand":
            reading.notes.append(
                f"{word} {text} is read as --transforms {transform}: timm counts magnitudes to 10 and these to 30, and"
                " its operations include invert and a second solarise"
            )
    else:
        near = did_you_mean(text, [*same, "rand-m9", "augmix-m3-w3"])
        raise InputError(
            f"{word} is {text!r}; it must be one of {', '.join(same)}, rand-m9-mstd0.5 or augmix-m3-w3-d3.{near}"
        )


def _timm_policy(name: str, parts: list[str], text: str) -> str:
    """Translate timm's ``rand`` or ``augmix`` with its sections, such as ``m9``, ``mstd0.5``, ``n2``, ``p0.5``."""
    parsed: dict[str, str] = {}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)([0-9.]+)", part)
        if match is None or match[1] not in ("m", "mstd", "n", "p", "inc", "w", "d"):
            raise InputError(
                f"the part {part!r} of {text!r} has no counterpart here: leave it out (docs: augmentation)"
            )
        parsed[match[1]] = match[2]
    if name == "augmix":
        return f"augmix:{parsed.get('m', '3')},{parsed.get('w', '3')},{parsed.get('d', '3')}"
    magnitude, deviation = 3 * float(parsed.get("m", "10")), 3 * float(parsed.get("mstd", "0"))
    return f"randaugment:{parsed.get('n', '2')},{min(magnitude, 30):g},{min(deviation, 10):g},{parsed.get('p', '0.5')}"


_HUE = "--transforms color:0.4,0.4,0.4,0.1 changes brightness, contrast, saturation and hue by up to these shares"
_AREAS = "--set data.area=[0.08,1] says what share of the area random crops take"
_PIXELS = "boxes get the mean colour (--remode const), where timm fills them with noise"

READERS: dict[str, Read] = {
    # timm and torchvision
    **dict.fromkeys(("aa", "auto-augment", "autoaugment"), _policy),
    "vflip": _transform("vflip"),
    "hflip": _hflip,
    "reprob": _reprob,
    **dict.fromkeys(("random-erase", "random-erasing"), _transform("erase")),
    "remode": _remode,
    "recount": fixed("1", nearest="each image has one erased box at most"),
    **dict.fromkeys(("color-jitter", "jitter"), _jitter),
    "grayscale-prob": _transform("grey"),
    **dict.fromkeys(("mixup", "mixup-alpha"), _transform("mixup")),
    **dict.fromkeys(("cutmix", "cutmix-alpha"), _transform("cutmix")),
    "mixup-prob": _mixing,
    "mixup-switch-prob": fixed("0.5", nearest="with mixup and cutmix, each image gets one of them with equal chances"),
    "mixup-mode": fixed("elem", nearest="each image has a share of its own, as --mixup-mode elem"),
    "ra-magnitude": _magnitude,
    "scale": _range("data.area"),
    "ratio": _range("data.ratio"),
    "train-interpolation": _interpolation,
    **dict.fromkeys(("aug-repeats", "ra-reps"), _repeats),
    **dict.fromkeys(("ra-sampler", "repeated-aug"), _sampler),
    "gaussian-blur-prob": fixed("0", nearest="--transforms trivialaugment has a sharpness that blurs as well"),
    **dict.fromkeys(("rotation", "degrees"), _transform("rotate")),
    # MXNet's scripts, and its ImageRecordIter
    **dict.fromkeys(("random-mirror", "rand-mirror"), _mirror),
    "random-resized-crop": _resized_crop,
    **dict.fromkeys(("max-random-rotate-angle", "max-rotate-angle"), _transform("rotate")),
    **dict.fromkeys(("max-random-shear-ratio", "max-shear-ratio"), _transform("shear")),
    "min-random-area": _end("data.area", 0),
    "max-random-area": _end("data.area", 1),
    **dict.fromkeys(("min-random-aspect-ratio", "min-aspect-ratio"), _end("data.ratio", 0)),
    **dict.fromkeys(("max-random-aspect-ratio", "max-aspect-ratio"), _end("data.ratio", 1)),
    **dict.fromkeys(("brightness", "contrast", "saturation"), _colour),
    **dict.fromkeys(
        ("max-random-h", "max-random-s", "max-random-l", "random-h", "random-s", "random-l"), fixed("0", nearest=_HUE)
    ),
    "pca-noise": fixed("0", nearest=_HUE),
    "rotate": fixed("-1", "0", nearest="--transforms rotate:15 rotates by up to 15 degrees, either way"),
    **dict.fromkeys(("random-crop", "rand-crop"), fixed("0", nearest=f"--set data.augment=resized-crop; {_AREAS}")),
    **dict.fromkeys(
        ("max-random-scale", "min-random-scale", "max-crop-size", "min-crop-size"), fixed("1", "-1", nearest=_AREAS)
    ),
    "fill-value": fixed(nearest="what is empty gets the mean colour (data.mean)"),
    "inter-method": fixed("1", nearest="--set data.interpolation=bicubic, or bilinear, which is 1"),
}
"""Flag, without its dashes -> what reads it."""

MOST_VALUES = {"color-jitter": 4, "jitter": 4, "scale": 2, "ratio": 2}
"""Values that a flag may have, where it is not one."""
