"""Flags of timm, torchvision and MXNet that augment images mean the same here, or say what comes nearest."""

from __future__ import annotations

import pytest

from steadytrain.cli import parse
from steadytrain.cli.foreign_flags import read_flags
from steadytrain.cli.options import TrainingOptions
from steadytrain.config import Data, Recipe
from steadytrain.config.defaults import usual_recipe
from steadytrain.errors import InputError


def recipe(text: str) -> Recipe:
    options: TrainingOptions = parse(["train", "photos", *text.split()]).get("options", TrainingOptions())
    return options.recipe_over(usual_recipe("photos", finetune=False, small=False))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "--vflip 0.5 --hflip 0.5 --reprob 0.25 --remode const",
            {"transforms": ("vflip:0.5", "erase:0.25"), "flip": True},
        ),
        ("--mixup 0.8 --cutmix 1.0 --mixup-prob 1", {"transforms": ("mixup:0.8", "cutmix:1")}),
        ("--aa rand-m9-mstd0.5-inc1", {"transforms": ("randaugment:2,27,1.5,0.5",)}),
        ("--aa=rand-m7-n3-p1", {"transforms": ("randaugment:3,21",)}),
        ("--aa augmix-m5-w4-d2", {"transforms": ("augmix:5,4,2",)}),
        ("--auto-augment ta_wide --random-erase 0.1", {"transforms": ("trivialaugment", "erase:0.1")}),
        ("--auto-augment ra --ra-magnitude 12", {"transforms": ("randaugment:2,12",)}),
        ("--color-jitter 0.4 --grayscale-prob 0.2", {"transforms": ("color:0.4", "grey:0.2")}),
        ("--color-jitter 0.4 0.3 0.2 0.1 --transforms vflip", {"transforms": ("vflip:0.5", "color:0.4,0.3,0.2,0.1")}),
        ("--color-jitter 0 --mixup 0", {"transforms": ()}),
        ("--scale 0.2 0.9 --ratio 0.8 1.25", {"area": (0.2, 0.9), "ratio": (0.8, 1.25)}),
        ("--train-interpolation bicubic --hflip 0", {"interpolation": "bicubic", "flip": False}),
        ("--random-mirror 1 --max-random-rotate-angle 10", {"flip": True, "transforms": ("rotate:10",)}),
        ("--rand-mirror 0 --max-shear-ratio 0.1", {"flip": False, "transforms": ("shear:0.1",)}),
        ("--random-resized-crop 1 --min-random-area 0.3", {"augment": "resized-crop", "area": (0.3, 1.0)}),
        ("--aug-repeats 3", {"repeats": 3}),
        ("--aug-repeats 0", {"repeats": 1}),
        ("--ra-sampler --ra-reps 4", {"repeats": 4}),
        ("--ra-reps 2 --ra-sampler", {"repeats": 2}),
        ("--repeated-aug --hflip 0.5", {"repeats": 3, "flip": True}),
        ("--max-random-scale 1 --random-h 0 --pca-noise 0 --rotate -1", {"transforms": ()}),
    ],
)
def test_a_flag_of_another_trainer_sets_what_it_means(text: str, expected: dict[str, object]) -> None:
    data = recipe(text).data
    assert {name: getattr(data, name) for name in expected} == expected
    others = Data.__dataclass_fields__.keys() - expected.keys() - {"from_file"}
    usual = usual_recipe("photos", finetune=False, small=False).data
    assert all(getattr(data, name) == getattr(usual, name) for name in others)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--hflip 0.3", "half of the images are flipped"),
        ("--aug-repeats 2.5", "a whole number"),
        ("--aa rnd-m9", "Did you mean rand-m9"),
        ("--aa rand-m9-x3", "the part 'x3'"),
        ("--pca-noise 0.1", "--transforms color:0.4,0.4,0.4,0.1"),
        ("--rand-crop 1", "--set data.augment=resized-crop"),
        ("--scale 0.2", "it must be 2 numbers"),
        ("--recount 3", "one erased box at most"),
        ("--mixup", "--mixup needs a value"),
        ("--train-interpolation random", "bilinear or bicubic"),
    ],
)
def test_what_has_no_counterpart_names_the_nearest(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_flags(["photos", *text.split()])


def test_a_note_says_where_the_meaning_is_only_nearly_the_same() -> None:
    for text, word in (("--aa rand-m9", "magnitudes to 10"), ("--reprob 0.3", "mean colour")):
        _, notes = read_flags(["photos", *text.split()])
        assert len(notes) == 1 and word in notes[0] and "is read as --transforms" in notes[0]
    assert read_flags(["photos", "--aa", "ta_wide", "--reprob", "0"])[1] == []
