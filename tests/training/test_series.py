"""Series of photographs are found by their features, and by what their names share."""

from __future__ import annotations

import numpy as np
import pytest

from steadytrain.data.arrays import Ints
from steadytrain.data.sources.groups import group_keys
from steadytrain.training.features.series import find_series

CLASSES = ["oak", "elm"]


def scenes(num: int, frames: int, deviation: float) -> tuple[np.ndarray, Ints, Ints]:
    """Return features, labels and scenes of frames that lie about the centre of their scene."""
    rng = np.random.default_rng(0)
    scene = np.repeat(np.arange(num), frames)
    values = rng.normal(size=(num, 64))[scene] + deviation * rng.normal(size=(num * frames, 64))
    return values.astype(np.float32), scene % 2, scene


@pytest.mark.parametrize(
    "name",
    [
        "{c}/scene {s} frame {f}.jpg",
        "{c}/s{s:03d}_{f:02d}.png",
        "{c}/cam2-{s}-{f}.jpg",
        "{c}/{w}_left_{f}.jpg",
        "{c}/clip{s}/{f}.jpg",
        "tree{s}-{f}.jpg",
    ],
)
def test_names_tell_the_series_and_group_by_takes_what_they_share(name: str) -> None:
    values, labels, scene = scenes(40, 4, 0.3)
    words = [chr(97 + number // 26) + chr(97 + number % 26) for number in range(40)]
    names = [
        name.format(c=CLASSES[label], s=number, f=frame % 4, w=words[number])
        for frame, (label, number) in enumerate(zip(labels.tolist(), scene.tolist(), strict=True))
    ]
    series = find_series(values, labels, names)
    assert series is not None and series.group_by is not None and series.groups == 40
    keys = group_keys(names, labels, CLASSES, series.group_by)
    assert len(set(zip(keys, scene.tolist(), strict=True))) == 40
    assert "40 series" in series.words


def test_series_without_names_are_said_and_those_in_groups_are_not() -> None:
    values, labels, scene = scenes(40, 4, 0.3)
    names = [f"{CLASSES[label]}/IMG_{row:04d}.jpg" for row, label in enumerate(labels.tolist())]
    series = find_series(values, labels, names)
    assert series is not None and series.group_by is None and series.share > 0.9
    assert find_series(values, labels, names, groups=scene) is None


def test_images_that_stand_alone_are_no_series_whatever_their_names() -> None:
    values, labels, scene = scenes(160, 1, 1.0)
    for names in (
        [f"{CLASSES[label]}/scene{number // 4}_{number % 4}.jpg" for number, label in enumerate(labels.tolist())],
        [f"{CLASSES[label]}/{number}.jpg" for number, label in zip(scene.tolist(), labels.tolist(), strict=True)],
    ):
        assert find_series(values, labels, names) is None


def test_kinds_within_a_class_are_no_series() -> None:
    rng = np.random.default_rng(0)
    kind = np.repeat(np.arange(8), 20)
    values = (rng.normal(size=(8, 64))[kind] + rng.normal(size=(160, 64))).astype(np.float32)
    assert find_series(values, kind % 2, [f"{CLASSES[k % 2]}/kind{k}_{n}.jpg" for n, k in enumerate(kind)]) is None


@pytest.mark.parametrize("dimensions", [2, 4, 8, 12])
def test_independent_images_of_few_dimensions_are_no_series(dimensions: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(600, dimensions)) @ rng.normal(size=(dimensions, 128))
    names = [f"{CLASSES[row % 2]}/IMG_{row:04d}.jpg" for row in range(600)]
    assert find_series(values.astype(np.float32), np.arange(600) % 2, names) is None


def test_long_bursts_are_found() -> None:
    values, labels, scene = scenes(30, 20, 0.3)
    names = [
        f"{CLASSES[label]}/s{number}-{row}.jpg" for row, (label, number) in enumerate(zip(labels, scene, strict=True))
    ]
    series = find_series(values, labels, names)
    assert series is not None and series.groups == 30


def test_the_expression_matches_names_that_were_not_looked_at() -> None:
    values, labels, scene = scenes(40, 4, 0.3)
    names = [
        f"{CLASSES[label]}/s{number}-{row}.jpg" for row, (label, number) in enumerate(zip(labels, scene, strict=True))
    ]
    series = find_series(values, labels, names, others=[*names, "elm/cover.jpg"])
    assert series is not None and series.group_by is not None
    assert len(set(group_keys([*names, "elm/cover.jpg"], np.append(labels, 1), CLASSES, series.group_by))) == 41
