"""What is said of validation images: those that are held out, and those that are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.data.packing.pictures import write_folder

from steadytrain.config import Data
from steadytrain.training.data import open_data


def _messages(train: Path, val: Path | None = None) -> list[str]:
    messages: list[str] = []
    open_data(Data(train=str(train), val=None if val is None else str(val)), seed=0, say=messages.append)
    return messages


@pytest.mark.parametrize(
    ("counts", "subject"),
    [
        ({"cat": 18, "dog": 1}, "class dog has no validation image, and one image in all, so its accuracy"),
        ({"ant": 1, "cat": 18, "dog": 1}, "2 classes (ant, dog) have no validation image, and one image in all, so"),
    ],
)
def test_a_class_that_is_not_held_out_is_named(tmp_path: Path, counts: dict[str, int], subject: str) -> None:
    messages = _messages(write_folder(tmp_path / "photos", counts))
    [message] = [message for message in messages if "no validation image" in message]
    assert message.startswith(subject) and message.endswith("add images, or give --val DATA")


def test_so_few_validation_images_measure_nothing(tmp_path: Path) -> None:
    few = _messages(write_folder(tmp_path / "few", {"cat": 18, "dog": 2}))
    assert (
        "5 validation images cannot measure accuracy (one image is 20 points of top-1): add images, or give --val DATA,"
        " with 20 or more"
    ) in few
    many = _messages(write_folder(tmp_path / "many", {"cat": 150, "dog": 150}))
    assert not any("measure" in message for message in many)


def test_a_class_that_given_validation_data_lack_is_named(tmp_path: Path) -> None:
    train = write_folder(tmp_path / "train", {"cat": 4, "dog": 4, "elk": 4})
    val = write_folder(tmp_path / "val", {"cat": 16, "dog": 16})
    messages = _messages(train, val)
    assert (
        "class elk has no validation image, so its accuracy is not measured: add images, or give --val DATA" in messages
    )
    assert not any("cannot measure" in message for message in messages)
