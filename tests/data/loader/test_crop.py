"""The geometry of cuts: what is taken lies in the image, and is what was asked for."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.loader.pictures import Pictures, encode, scene
from timm.data.transforms_factory import create_transform

from steadytrain.config import Data
from steadytrain.config.parts import ImageFit
from steadytrain.data.loader import ImageLoader
from steadytrain.data.loader.crop import NEVER_SHRUNK, Crop, CropPlan, crop_for
from steadytrain.data.loader.decode import cut_from
from steadytrain.data.loader.sampler import uniforms
from steadytrain.errors import InputError

FITS: list[ImageFit] = ["crop", "squash", "pad"]
sizes = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=8).map(np.array)


def plan_of(cut: Crop, sizes: np.ndarray, seed: int = 0) -> CropPlan:
    return cut.plan(sizes, uniforms(seed, np.arange(len(sizes)), cut.num_draws))


def lies_within(plan: CropPlan, sizes: np.ndarray) -> bool:
    left, top, right, bottom = plan.boxes.T
    inside = (left >= 0) & (left < right) & (right <= sizes[:, 1]) & (top >= 0) & (top < bottom)
    return bool((inside & (bottom <= sizes[:, 0])).all())


def has_no_gap(plan: CropPlan, size: int) -> bool:
    """Whether every square lies within its resized box."""
    return bool((plan.corners >= 0).all() and (plan.corners + size <= plan.resized).all())


@given(sizes=sizes, seed=st.integers(0, 2**63 - 1), size=st.integers(1, 300))
def test_every_box_lies_within_its_image(sizes: np.ndarray, seed: int, size: int) -> None:
    for cut in (
        Crop(kind="resized-crop", size=size),
        Crop(kind="pad-crop", size=size, pad=size // 3),
        Crop(kind="none", size=size, crop=0.875),
    ):
        for fit in FITS:
            plan = plan_of(replace(cut, fit=fit), sizes, seed)
            assert lies_within(plan, sizes)
            assert cut.kind == "pad-crop" or fit == "pad" or has_no_gap(plan, size)


@given(sizes=sizes, seed=st.integers(0, 2**63 - 1), size=st.integers(1, 300))
def test_shrinking_leaves_enough_and_boxes_fit_its_grid(sizes: np.ndarray, seed: int, size: int) -> None:
    plan = plan_of(Crop(kind="resized-crop", size=size), sizes, seed)
    each = plan.shrinks[:, None]
    assert set(plan.shrinks.tolist()) <= {1, 2, 4, 8}
    assert (plan.boxes[:, :2] % each == 0).all()
    assert ((plan.boxes[:, 2:] % each == 0) | (plan.boxes[:, 2:] == sizes[:, ::-1])).all()
    sides = plan.boxes[:, 2:] - plan.boxes[:, :2]
    assert ((plan.shrinks == 1) | (sides / each >= 1.5 * size).all(axis=1)).all()


@given(sizes=sizes, seed=st.integers(0, 2**63 - 1))
def test_a_plan_for_many_images_is_the_plans_for_each(sizes: np.ndarray, seed: int) -> None:
    for cut in (Crop(kind="resized-crop", size=64, flip=True), Crop(kind="pad-crop", size=64, flip=True)):
        draws = uniforms(seed, np.arange(len(sizes)), cut.num_draws)
        together = cut.plan(sizes, draws)
        for row in range(len(sizes)):
            alone = cut.plan(sizes[row : row + 1], draws[row : row + 1])
            for part in ("boxes", "resized", "corners", "flips", "shrinks"):
                assert np.array_equal(getattr(alone, part)[0], getattr(together, part)[row])


def test_random_boxes_have_the_asked_areas_and_ratios() -> None:
    n = 20_000
    plan = plan_of(Crop(kind="resized-crop", size=224, area=(0.2, 0.6), ratio=(0.75, 4 / 3)), np.full((n, 2), 400))
    assert (plan.shrinks == 1).all(), "so no box was moved to a coarser grid"
    width, height = (plan.boxes[:, 2:] - plan.boxes[:, :2]).T
    area, ratio = width * height / 400**2, width / height
    # Sides are whole pixels: at 200 pixels half of one is 0.25 %.
    assert area.min() > 0.198 and area.max() < 0.605
    assert ratio.min() > 0.745 and ratio.max() < 1.345
    assert abs(area.mean() - 0.4) < 0.005, "the area is uniform"
    assert abs(np.log(ratio).mean()) < 0.01, "the ratio is log-uniform"
    free = 400 - width
    assert abs((plan.boxes[free > 20, 0] / free[free > 20]).mean() - 0.5) < 0.01


def test_no_try_that_fits_takes_the_largest_centred_box_allowed() -> None:
    sizes = np.array([[100, 2000], [2000, 100], [300, 300]])
    cut = Crop(kind="resized-crop", size=224, area=(0.99, 1.0), ratio=(1.0, 1.01))
    # 200,000 pixels in a nearly square box do not fit into 100 rows; in 300 x 300 some try does or the whole is taken.
    plan = plan_of(cut, sizes)
    assert plan.boxes[:2].tolist() == [[949, 0, 1050, 100], [0, 950, 100, 1050]]
    assert (plan.boxes[2, 2:] - plan.boxes[2, :2]).min() >= 298


def test_evaluation_takes_the_centre_of_the_resized_image() -> None:
    cut = Crop(kind="resized-crop", size=224, crop=0.875, flip=True).for_evaluation()
    plan = plan_of(cut, np.array([[256, 256], [512, 1024], [333, 500]]))
    assert plan.boxes.tolist() == [[0, 0, 256, 256], [0, 0, 1024, 512], [0, 0, 500, 333]]
    # 500 * 256 / 333 = 384.4: torchvision makes it 384 wide and begins at column 80.
    assert plan.resized.tolist() == [[256, 256], [256, 512], [256, 384]]
    assert plan.corners.tolist() == [[16, 16], [16, 144], [16, 80]]
    assert not plan.flips.any() and cut.num_draws == 0


def test_evaluation_at_a_pretrained_crop_is_that_of_timm() -> None:
    resize, centre = create_transform((3, 224, 224), crop_pct=0.95, interpolation="bilinear").transforms[:2]
    picture = scene(0, 300, 401)
    theirs = np.asarray(centre(resize(picture)))
    cut = Crop(kind="none", size=224, crop=0.95, interpolation="bilinear")
    ours = next(iter(ImageLoader(Pictures([encode(picture)]), cut, batch_size=1, train=False))).images[0]
    assert np.abs(ours.astype(int) - theirs).max() <= 2


@pytest.mark.parametrize(("fit", "mode"), [("squash", "squash"), ("pad", "border")])
@pytest.mark.parametrize("shape", [(60, 401), (300, 75), (224, 224), (7, 300)], ids=str)
@pytest.mark.parametrize("crop", [1.0, 0.875])
def test_whole_images_are_evaluated_as_timm_does(fit: ImageFit, mode: str, shape: tuple[int, int], crop: float) -> None:
    mean = (0.2, 0.4, 0.6)
    options: dict[str, Any] = {"crop_pct": crop, "interpolation": "bilinear", "crop_mode": mode, "mean": mean}
    resize, centre = create_transform((3, 96, 96), **options).transforms[:2]
    picture = scene(0, *shape)
    theirs = np.asarray(centre(resize(picture)))
    cut = Crop(kind="none", size=96, crop=crop, fit=fit, fill=tuple(round(255 * value) for value in mean))
    ours = next(iter(ImageLoader(Pictures([encode(picture)]), cut, batch_size=1, train=False))).images[0]
    assert np.abs(ours.astype(int) - theirs).max() <= 2


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("shape", [(60, 401), (300, 75), (333, 500), (97, 96), (7, 300), (131, 130)], ids=str)
@pytest.mark.parametrize(("size", "crop"), [(96, 1.0), (96, 0.875), (97, 0.9), (95, 0.95)])
def test_the_documented_preprocessing_of_exported_files_is_that_of_the_loader(
    fit: ImageFit, shape: tuple[int, int], size: int, crop: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about: dict[str, Any] = {"size": size, "crop": crop, "fit": fit, "mean": (0.2, 0.4, 0.6), "std": (0.5, 0.25, 0.2)}
    about = {"input": {**about, "interpolation": "bilinear"}, "temperature": 1.0, "classes": ["a", "b"]}
    session = mock.Mock()
    session.get_modelmeta.return_value.custom_metadata_map = {"steadytrain": json.dumps(about)}
    session.run.return_value = [np.zeros((1, 2), np.float32)]
    monkeypatch.setitem(sys.modules, "onnxruntime", mock.Mock(InferenceSession=lambda path: session))
    monkeypatch.chdir(tmp_path)
    picture = scene(0, *shape)
    picture.save("cat.jpg", "PNG")
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    exec(page.split("To use it without steadytrain:")[1].split("```python\n")[1].split("```")[0], {})
    [images] = session.run.call_args.args[1]["images"]
    theirs = 255 * (images.transpose(1, 2, 0) * (0.5, 0.25, 0.2) + (0.2, 0.4, 0.6))
    cut = Crop(kind="none", size=size, crop=crop, fit=fit, fill=(51, 102, 153) if fit == "pad" else ())
    ours = next(iter(ImageLoader(Pictures([encode(picture)]), cut, batch_size=1, train=False))).images[0]
    assert np.abs(ours - theirs).max() <= 2.5


@pytest.mark.parametrize("fit", ["squash", "pad"])
def test_random_boxes_of_whole_images_have_the_ratio_of_the_image_and_reach_its_ends(fit: ImageFit) -> None:
    sizes = np.tile([[1000, 200], [150, 900]], (2_000, 1))
    plan = plan_of(Crop(kind="resized-crop", size=50, area=(0.2, 1.0), fit=fit), sizes)
    (left, top, right, bottom), (height, width) = plan.boxes.T, sizes.T
    relative = ((right - left) / width) / ((bottom - top) / height)
    assert relative.min() > 0.68 and relative.max() < 1.47, "3/4 to 4/3, moved to whole pixels of a shrunk JPEG"
    assert ((right - left) * (bottom - top) / (height * width)).min() > 0.19
    long_first, long_last = np.where(height > width, (top, bottom), (left, right))
    longer = sizes.max(axis=1)
    assert (long_first < 0.05 * longer).mean() > 0.2 and (long_last > 0.95 * longer).mean() > 0.2
    inside = np.minimum(plan.corners + 50, plan.resized) - plan.corners.clip(0)
    assert (inside == (50 if fit == "squash" else plan.resized)).all(), "all of a box is in its square"


def test_the_share_that_evaluation_sees_is_that_of_the_pixels() -> None:
    sizes = np.array([[120, 480], [300, 400], [100, 100]])
    seen = [Crop(kind="resized-crop", size=96, fit=fit).seen(sizes).round(2).tolist() for fit in FITS]
    assert seen == [[0.25, 0.75, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    part = Crop(kind="none", size=96, crop=0.5, fit="pad").seen(sizes)
    assert part.round(2).tolist() == [0.5, 0.33, 0.25], "all of a height of 48, and half of the width"


def test_every_shift_of_a_padded_crop_is_equally_likely() -> None:
    n = 81_000
    plan = plan_of(Crop(kind="pad-crop", size=32, pad=4), np.full((n, 2), 32))
    corner = plan.corners
    assert corner.min() == -4 and corner.max() == 4
    counts = np.bincount((corner[:, 0] + 4) * 9 + corner[:, 1] + 4, minlength=81)
    assert np.abs(counts - 1000).max() < 160  # five standard deviations


def test_half_of_the_images_are_mirrored() -> None:
    flips = plan_of(Crop(kind="none", size=32, flip=True), np.full((10_000, 2), 32)).flips
    assert abs(flips.mean() - 0.5) < 0.025
    assert not plan_of(Crop(kind="pad-crop", size=32), np.full((100, 2), 32)).flips.any()


def test_a_square_may_fall_into_the_padding_altogether() -> None:
    sizes = np.full((500, 2), 8)
    plan = plan_of(Crop(kind="pad-crop", size=8, pad=20), sizes)
    outside = ((plan.corners <= -8) | (plan.corners >= 8)).any(axis=1)
    assert 0 < outside.sum() < 500


@st.composite
def plans(draw: st.DrawFn) -> tuple[Crop, CropPlan, tuple[int, int]]:
    """A cut of any kind, and a plan for an image that is not shrunk, of this height and width."""
    kinds: list[Literal["none", "pad-crop", "resized-crop"]] = ["none", "pad-crop", "resized-crop"]
    interpolations: list[Literal["bilinear", "bicubic"]] = ["bilinear", "bicubic"]
    size, kind = draw(st.integers(1, 40)), draw(st.sampled_from(kinds))
    interpolation = draw(st.sampled_from(interpolations))
    crop, pad = draw(st.sampled_from([1.0, 0.95, 0.875, 0.5, 0.1])), draw(st.integers(0, 12))
    fit: ImageFit = draw(st.sampled_from(FITS))
    flip = draw(st.booleans())
    cut = Crop(kind=kind, size=size, crop=crop, pad=pad, flip=flip, interpolation=interpolation, fit=fit)
    shape = draw(st.integers(1, NEVER_SHRUNK)), draw(st.integers(1, NEVER_SHRUNK))
    return cut, plan_of(cut, np.array([shape]), draw(st.integers(0, 2**32))), shape


WAYS: dict[str, dict[str, Any]] = {
    "fastest": {},
    "torch": {"images.jpeg.parts": None},
    "Pillow": {"images.jpeg.parts": None, "loader.decode._kernel": lambda _: None},
}


@pytest.mark.parametrize("way", WAYS)
@given(case=plans())
def test_no_pixel_counts_but_those_that_are_needed(way: str, case: tuple[Crop, CropPlan, tuple[int, int]]) -> None:
    cut, plan, shape = case
    left, top, right, bottom = cut.needed(plan)[0].tolist()
    image = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    other = 255 - image
    other[top:bottom, left:right] = image[top:bottom, left:right]
    got, expected = np.zeros((2, cut.size, cut.size, 3), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(f"steadytrain.data.{name}", value)
        cut_from(expected, image, cut, plan, 0)
        cut_from(got, other, cut, plan, 0)
    assert np.array_equal(got, expected)


def test_less_is_needed_than_the_image_where_a_window_is_seen() -> None:
    evaluated = Crop(kind="none", size=224, crop=0.875, interpolation="bicubic")
    needed = evaluated.needed(plan_of(evaluated, np.array([[375, 500], [500, 375], [256, 256], [256, 400]])))
    sides = needed[:, 2:] - needed[:, :2]
    assert sides.tolist() == [[339, 339], [339, 339], [224, 224], [224, 224]]
    assert needed[2:].tolist() == [[16, 16, 240, 240], [88, 16, 312, 240]]


@pytest.mark.parametrize(
    ("largest", "channels", "expected"),
    [
        (32, 3, Crop(kind="pad-crop", size=32, flip=True, crop=1.0, channels=3)),
        (28, 1, Crop(kind="pad-crop", size=32, flip=False, crop=1.0, channels=1)),
        (500, 3, Crop(kind="resized-crop", size=32, flip=True, crop=0.875, channels=3)),
    ],
)
def test_a_recipe_leaves_the_choice_to_the_images(largest: int, channels: int, expected: Crop) -> None:
    assert channels in (1, 3)
    assert crop_for(Data(train="a.rec"), size=32, channels=channels, largest=largest) == expected  # type: ignore[arg-type]


def test_what_a_recipe_says_goes_before_the_model_and_the_images() -> None:
    data = Data(train="a.rec", augment="none", flip=False, crop=0.9, pad=2, area=(0.3, 1.0))
    cut = crop_for(data, size=224, channels=3, largest=30, crop=0.95, interpolation="bicubic")
    assert (cut.kind, cut.flip, cut.crop, cut.interpolation) == ("none", False, 0.9, "bicubic")
    assert crop_for(Data(train="a.rec"), size=224, channels=3, largest=300, crop=0.95).crop == 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "pad_crop"}, "crop.kind is 'pad_crop'.*Did you mean pad-crop"),
        ({"size": 0}, "crop.size is 0; it must be 1 pixel or more"),
        ({"size": 22.4}, "crop.size is 22.4; it must be a whole number"),
        ({"area": (0.5, 0.1)}, "crop.area is .*two increasing fractions"),
        ({"ratio": (0.0, 1.0)}, "crop.ratio is .*above 0"),
        ({"pad": -1}, "crop.pad is -1"),
        ({"crop": 1.5}, "crop.crop is 1.5; it must be a fraction"),
        ({"interpolation": "nearest"}, "crop.interpolation is 'nearest'; it must be 'bilinear' or 'bicubic'"),
        ({"fit": "letterbox"}, "crop.fit is 'letterbox'; it must be 'crop' or 'squash' or 'pad'"),
        ({"channels": 4}, "crop.channels is 4; it must be 1 or 3"),
    ],
)
def test_a_cut_that_cannot_be_is_refused_with_the_limit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Crop(**{"kind": "none", "size": 16, **options})
