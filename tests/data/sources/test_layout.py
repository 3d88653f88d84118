"""Data sets as the tools and contests that people come from hand them out: names of splits never become classes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from tests.data.sources.samples import content, encoded, found, write_tar

import steadytrain as st
from steadytrain.data.checking.sources import examine_source
from steadytrain.data.sources.listing import Listing
from steadytrain.errors import DataError
from steadytrain.training.data import open_named

Files = Mapping[str, bytes]


def _images(*names: str) -> dict[str, bytes]:
    return {name: encoded(number) + name.encode() for number, name in enumerate(names)}


def _folder(files: Files, path: Path) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def _tar(files: Files, path: Path) -> Path:
    return write_tar(path.with_suffix(".tar"), {f"release/{name}": data for name, data in files.items()})


def _zip(files: Files, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path.with_suffix(".zip")


def _labels(listings: Iterable[Listing], files: Files) -> dict[str, dict[str, object]]:
    """The label of each image, by split and by the image's name; each image's bytes are those of its name."""
    labels: dict[str, dict[str, object]] = {}
    for listing in listings:
        part = labels.setdefault(listing.split, {})
        for number, name in enumerate(listing.names):
            short = name.removeprefix("release/")
            assert content(listing, number) == files[short]
            label = listing.labels[number]
            part[short] = (
                listing.classes[label]
                if listing.classes
                else "+".join(name for name, value in zip(listing.label_names, label, strict=True) if value)
            )
    return labels


HUGGING_FACE = {
    **_images("train/1.png", "train/2.png", "test/1.png"),
    "train/metadata.csv": b"file_name,label\n1.png,cat\n2.png,dog\n",
    "test/metadata.csv": b"file_name,label\n1.png,dog\n",
}
KAGGLE = {
    **_images("train/00a.jpg", "train/00b.jpg", "test/00c.jpg"),
    "labels.csv": b"id,breed\n00a,boxer\n00b,collie\n",
    "sample_submission.csv": b"id,boxer,collie\n00c,0.5,0.5\n",
}
LAYOUTS: dict[str, tuple[Files, dict[str, dict[str, object]]]] = {
    "Hugging Face, a table in each split": (
        HUGGING_FACE,
        {"train": {"train/1.png": "cat", "train/2.png": "dog"}, "test": {"test/1.png": "dog"}},
    ),
    "Hugging Face, JSON lines": (
        {
            **_images("train/1.png", "train/2.png", "validation/1.png"),
            "train/metadata.jsonl": b'{"file_name": "1.png", "label": "cat"}\n{"file_name": "2.png", "label": "dog"}\n',
            "validation/metadata.jsonl": b'{"file_name": "1.png", "label": "cat"}\n\n',
        },
        {"train": {"train/1.png": "cat", "train/2.png": "dog"}, "val": {"validation/1.png": "cat"}},
    ),
    "Hugging Face, images one level deeper": (
        {
            **_images("train/images/1.png", "train/images/2.png", "test/images/1.png"),
            "train/metadata.csv": b"file_name,label\nimages/1.png,cat\nimages/2.png,dog\n",
            "test/metadata.csv": b"file_name,label\nimages/1.png,dog\n",
        },
        {"train": {"train/images/1.png": "cat", "train/images/2.png": "dog"}, "test": {"test/images/1.png": "dog"}},
    ),
    "Hugging Face, one table above the splits": (
        {
            **_images("train/1.png", "train/2.png", "test/1.png"),
            "metadata.csv": b"file_name,label\ntrain/1.png,cat\ntrain/2.png,dog\ntest/1.png,dog\n",
        },
        {"train": {"train/1.png": "cat", "train/2.png": "dog"}, "test": {"test/1.png": "dog"}},
    ),
    "Hugging Face, without splits": (
        {**_images("1.png", "2.png"), "metadata.csv": b"file_name,label\n1.png,cat\n2.png,dog\n"},
        {"": {"1.png": "cat", "2.png": "dog"}},
    ),
    "Roboflow, several labels": (
        {
            **_images("train/a.jpg", "train/b.jpg", "valid/a.jpg", "test/a.jpg"),
            "train/_classes.csv": b"filename, Rash, Acne\na.jpg, 1, 1\nb.jpg, 0, 0\n",
            "valid/_classes.csv": b"filename, Acne, Rash\na.jpg, 1, 0\n",
            "test/_classes.csv": b"filename, Rash, Acne\na.jpg, 1, 0\n",
            "README.roboflow.txt": b"exported",
        },
        {
            "train": {"train/a.jpg": "Rash+Acne", "train/b.jpg": ""},
            "val": {"valid/a.jpg": "Acne"},
            "test": {"test/a.jpg": "Rash"},
        },
    ),
    "Roboflow, folders": (
        {**_images("train/cat/1.jpg", "train/dog/1.jpg", "valid/cat/1.jpg", "test/dog/1.jpg"), "README.txt": b"x"},
        {
            "train": {"train/cat/1.jpg": "cat", "train/dog/1.jpg": "dog"},
            "val": {"valid/cat/1.jpg": "cat"},
            "test": {"test/dog/1.jpg": "dog"},
        },
    ),
    "Kaggle, labels.csv": (KAGGLE, {"": {"train/00a.jpg": "boxer", "train/00b.jpg": "collie"}}),
    "Kaggle, labels.csv of both splits with equal names": (
        {
            **_images("train/1.jpg", "train/2.jpg", "test/1.jpg", "test/3.jpg"),
            "labels.csv": b"id,label\n1,cat\n2,dog\n3,dog\n",
        },
        {"train": {"train/1.jpg": "cat", "train/2.jpg": "dog"}, "test": {"test/3.jpg": "dog"}},
    ),
    "Kaggle, a folder twice and train_labels.csv": (
        {
            **_images("train/train/1.jpg", "train/train/2.jpg", "test/test/3.jpg"),
            "train_labels.csv": b"id,label\n1,cat\n2,dog\n",
        },
        {"": {"train/train/1.jpg": "cat", "train/train/2.jpg": "dog"}},
    ),
    "Kaggle, train_images and train.csv": (
        {
            **_images("train_images/1.jpg", "train_images/2.jpg", "test_images/3.jpg"),
            "train.csv": b"image,label\n1.jpg,cat\n2.jpg,dog\n",
            "sample_submission.csv": b"image,label\n3.jpg,cat\n",
            "label_num_to_disease_map.json": b"{}",
            "train_tfrecords/1.tfrec": b"x",
        },
        {"": {"train_images/1.jpg": "cat", "train_images/2.jpg": "dog"}},
    ),
    "Kaggle, one folder of images and tables of splits": (
        {
            **_images("images/Train_0.jpg", "images/Train_1.jpg", "images/Test_0.jpg"),
            "train.csv": b"image_id,healthy,rust\nTrain_0,1,0\nTrain_1,0,1\n",
            "test.csv": b"image_id\nTest_0\n",
            "sample_submission.csv": b"image_id,healthy,rust\nTest_0,0.5,0.5\n",
        },
        {"": {"images/Train_0.jpg": "healthy", "images/Train_1.jpg": "rust"}},
    ),
    "Kaggle, seg_train": (
        _images("seg_train/seg_train/sea/1.jpg", "seg_train/seg_train/ice/1.jpg", "seg_test/seg_test/sea/2.jpg")
        | _images("seg_pred/seg_pred/9.jpg"),
        {
            "train": {"seg_train/seg_train/sea/1.jpg": "sea", "seg_train/seg_train/ice/1.jpg": "ice"},
            "test": {"seg_test/seg_test/sea/2.jpg": "sea"},
        },
    ),
    "Kaggle, test images without labels": (
        _images("train/cat/1.jpg", "train/dog/1.jpg", "test/2.jpg", "test/3.jpg"),
        {"train": {"train/cat/1.jpg": "cat", "train/dog/1.jpg": "dog"}},
    ),
    "Keras": (
        {**_images("train/cats/1.jpg", "train/dogs/1.jpg", "validation/cats/2.jpg"), "vectorize.py": b"x"},
        {
            "train": {"train/cats/1.jpg": "cats", "train/dogs/1.jpg": "dogs"},
            "val": {"validation/cats/2.jpg": "cats"},
        },
    ),
    "fastai, a table beside folders of classes": (
        {
            **_images("train/3/1.png", "train/7/1.png", "valid/3/2.png"),
            "labels.csv": b"name,label\ntrain/3/1.png,0\ntrain/7/1.png,1\nvalid/3/2.png,0\n",
        },
        {"train": {"train/3/1.png": "3", "train/7/1.png": "7"}, "val": {"valid/3/2.png": "3"}},
    ),
    "AutoGluon": (
        {
            **_images("train/bag/1.jpg", "train/hat/1.jpg", "test/bag/2.jpg"),
            "train.csv": b"image,label\ntrain/bag/1.jpg,0\ntrain/hat/1.jpg,1\n",
        },
        {"train": {"train/bag/1.jpg": "bag", "train/hat/1.jpg": "hat"}, "test": {"test/bag/2.jpg": "bag"}},
    ),
    "Kaggle, parts of a set": (
        {
            **_images("HAM_images_part_1/1.jpg", "HAM_images_part_2/2.jpg"),
            "HAM_metadata.csv": b"image_id,label\n1,nv\n2,mel\n",
        },
        {"": {"HAM_images_part_1/1.jpg": "nv", "HAM_images_part_2/2.jpg": "mel"}},
    ),
    "pictures that belong to no split": (
        {**KAGGLE, **_images("cover.png", "figures/1.png", "extra/2.png")},
        {"": {"train/00a.jpg": "boxer", "train/00b.jpg": "collie"}},
    ),
    "splits one level deeper than their table": (
        {
            **_images("data/train/1.jpg", "data/train/2.jpg", "data/test/3.jpg"),
            "labels.csv": b"path,label\ntrain/1.jpg,a\ntrain/2.jpg,b\ntest/3.jpg,b\n",
            "README": b"",
        },
        {"train": {"data/train/1.jpg": "a", "data/train/2.jpg": "b"}, "test": {"data/test/3.jpg": "b"}},
    ),
    "splits and their table one level deeper": (
        {
            **_images("data/train/1.jpg", "data/train/2.jpg", "data/test/3.jpg", "cover.png"),
            "data/train.csv": b"id,label\n1,a\n2,b\n",
            "README": b"",
        },
        {"": {"data/train/1.jpg": "a", "data/train/2.jpg": "b"}},
    ),
    "masks beside images": (
        {
            **_images("train/images/1.jpg", "train/images/2.jpg", "train/masks/1.png", "val/images/1.jpg"),
            "train.csv": b"id,label\n1,a\n2,b\n",
            "val.csv": b"id,label\n1,b\n",
        },
        {"train": {"train/images/1.jpg": "a", "train/images/2.jpg": "b"}, "val": {"val/images/1.jpg": "b"}},
    ),
    "parts of the training set": (
        {**_images("train_1/1.jpg", "train_2/2.jpg", "test_1/3.jpg"), "labels.csv": b"id,label\n1,a\n2,b\n"},
        {"": {"train_1/1.jpg": "a", "train_2/2.jpg": "b"}},
    ),
    "a test set alone": (
        {**_images("test/1.jpg", "test/2.jpg"), "test/metadata.csv": b"file_name,label\n1.jpg,a\n2.jpg,b\n"},
        {"": {"test/1.jpg": "a", "test/2.jpg": "b"}},
    ),
    "splits in the folders of the classes": (
        _images("cat/train/1.jpg", "cat/test/1.jpg", "dog/train/1.jpg", "dog/test/2.jpg"),
        {
            "train": {"cat/train/1.jpg": "cat", "dog/train/1.jpg": "dog"},
            "test": {"cat/test/1.jpg": "cat", "dog/test/2.jpg": "dog"},
        },
    ),
    "splits beside the classes": (
        _images("cat/1.jpg", "dog/1.jpg", "cow/1.jpg", "test/cat/2.jpg", "test/dog/2.jpg", "Validation/set/cat/3.jpg"),
        {
            "train": {"cat/1.jpg": "cat", "cow/1.jpg": "cow", "dog/1.jpg": "dog"},
            "val": {"Validation/set/cat/3.jpg": "cat"},
            "test": {"test/cat/2.jpg": "cat", "test/dog/2.jpg": "dog"},
        },
    ),
    "a class called test": (
        _images("cat/1.jpg", "dog/1.jpg", "test/2.jpg", "val/left/1.jpg"),
        {"": {"cat/1.jpg": "cat", "dog/1.jpg": "dog", "test/2.jpg": "test", "val/left/1.jpg": "val"}},
    ),
    **{
        f"{train} and {test}": (
            _images(f"{train}/cat/1.jpg", f"{train}/dog/1.jpg", f"{test}/cat/2.jpg"),
            {"train": {f"{train}/cat/1.jpg": "cat", f"{train}/dog/1.jpg": "dog"}, split: {f"{test}/cat/2.jpg": "cat"}},
        )
        for train, test, split in [
            ("X_train", "X_test", "test"),
            ("training_set", "test_set", "test"),
            ("Training Images", "Validation Images", "val"),
            ("asl_alphabet_train", "asl_alphabet_test", "test"),
            ("train2017", "val2017", "val"),
            ("trainval", "test", "test"),
            ("TRAIN", "holdout", "test"),
            ("train", "hold_out", "test"),
            ("train", "eval", "val"),
            ("train", "test1", "test"),
        ]
    },
}


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_of_other_tools_are_read_as_handed_out(
    tmp_path: Path, case: str, pack: Callable[[Files, Path], Path]
) -> None:
    files, expected = LAYOUTS[case]
    listings = found(pack(files, tmp_path / "set"), tmp_path / "scratch")
    assert _labels(listings, files) == expected


BESIDE = ("cat/1.jpg", "dog/1.jpg")


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
def test_a_line_says_that_folders_beside_classes_are_splits(
    tmp_path: Path, pack: Callable[[Files, Path], Path]
) -> None:
    messages: list[str] = []
    source = pack(_images(*BESIDE, "testing/cat/2.jpg", "dev/dog/2.jpg"), tmp_path / "set")
    found(source, tmp_path / "scratch", messages)
    assert messages == [
        f"{source}: {name}, which holds folders of the classes' names, is no class, but the {split} set"
        for name, split in [("dev", "val"), ("testing", "test")]
    ]


def test_a_class_list_says_that_a_split_s_folder_is_a_class(tmp_path: Path) -> None:
    source = _folder(_images(*BESIDE, "test/cat/2.jpg"), tmp_path / "set")
    [listing] = found(source, tmp_path / "scratch", classes=("cat", "dog", "test"))
    assert listing.counts() == (1, 1, 1)


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train/cat/1.jpg", "train/dog/1.jpg"], r"train \(cat, dog\) and folders of the same names beside it: keep"),
        (["test/cat/1.jpg", "test1/cat/1.jpg"], r"test1 \(cat\) and test: keep one"),
        (["test/cat/1.jpg", "test/dog/1.jpg", "test/cow/1.jpg"], "cow"),
    ],
    ids=["two training sets", "two tests", "a class without training images"],
)
def test_splits_beside_classes_that_fit_badly_are_refused(
    tmp_path: Path, names: list[str], message: str, pack: Callable[[Files, Path], Path]
) -> None:
    with pytest.raises(DataError, match=message):
        found(pack(_images(*BESIDE, *names), tmp_path / "set"), tmp_path / "scratch")


def test_images_left_out_are_reported(tmp_path: Path) -> None:
    messages: list[str] = []
    source = _folder({**KAGGLE, **_images("extra/2.png")}, tmp_path / "set")
    assert len(found(source, tmp_path / "scratch", messages)[0]) == 2
    assert [message.removeprefix(f"{source}: ") for message in messages] == [
        "no labels for the images in test; they are left out",
        "extra holds images of no split; they are left out",
    ]


def test_zips_of_splits_beside_their_table(tmp_path: Path) -> None:
    """As contests hand data out: train.zip, test.zip and labels.csv in one folder."""
    for split in ("train", "test"):
        _zip({name: data for name, data in KAGGLE.items() if name.startswith(split)}, tmp_path / "set" / split)
    for name in ("labels.csv", "sample_submission.csv"):
        (tmp_path / "set" / name).write_bytes(KAGGLE[name])
    with pytest.raises(DataError, match=r"have no classes .* --labels"):
        found(tmp_path / "set", tmp_path / "scratch")
    messages: list[str] = []
    table = tmp_path / "set" / "labels.csv"
    [listing] = found(tmp_path / "set", tmp_path / "scratch", messages, labels=table)
    assert (listing.classes, listing.labels.tolist()) == (("boxer", "collie"), [0, 1])
    assert content(listing, 1) == KAGGLE["train/00b.jpg"]
    assert messages[-1].startswith(f"skipped: {table} names 2 images missing in")


def test_zips_of_splits_with_their_tables_inside(tmp_path: Path) -> None:
    for split in ("train", "test"):
        inside = {name.partition("/")[2]: data for name, data in HUGGING_FACE.items() if name.startswith(split)}
        _zip(inside, tmp_path / "set" / split)
    train, test = found(tmp_path / "set", tmp_path / "scratch")
    assert (train.split, train.classes, train.labels.tolist()) == ("train", ("cat", "dog"), [0, 1])
    assert (test.split, test.labels.tolist()) == ("test", [1])


def test_labels_that_are_named_split_as_the_folders_do(tmp_path: Path) -> None:
    files = {**_images("train/1.jpg", "train/2.jpg", "test/3.jpg"), "x.csv": b"id,label\n1,cat\n2,dog\n3,dog\n"}
    for pack in (_folder, _tar):
        source = pack(files, tmp_path / "set")
        listings = found(source, tmp_path / "scratch", labels=tmp_path / "set" / "x.csv")
        assert _labels(listings, files) == {
            "train": {"train/1.jpg": "cat", "train/2.jpg": "dog"},
            "test": {"test/3.jpg": "dog"},
        }


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["class1/1.jpg", "class2/1.jpg"], ("class1", "class2")),
        (["with_mask/1.jpg", "without_mask/1.jpg"], ("with_mask", "without_mask")),
        (["mask/1.jpg", "face/1.jpg"], ("face", "mask")),
        (["part1/1.jpg", "bolt/1.jpg"], ("bolt", "part1")),
        (["train/1.jpg", "bus/1.jpg", "test/2.jpg"], ("bus", "test", "train")),
        (["train_station/1.jpg", "test_tube/1.jpg"], ("test_tube", "train_station")),
        (["bullet_train/1.jpg", "freight_train/1.jpg"], ("bullet_train", "freight_train")),
        (["train/1.jpg", "test_vehicle/1.jpg"], ("test_vehicle", "train")),
        (["Dev/1.jpg", "Val/1.jpg", "Alex/1.jpg"], ("Alex", "Dev", "Val")),
        (["train/new/1.jpg", "train/1.jpg", "train/old/1.jpg", "plane/old/1.jpg", "plane/2.jpg"], ("plane", "train")),
        # What they hold says nothing of classes, differs, or lies beside images.
        (["cat/images/1.jpg", "cat/masks/1.png", "dog/images/1.jpg", "dog/masks/1.png"], ("cat", "dog")),
        (["cat/batch1/1.jpg", "cat/batch2/1.jpg", "dog/batch1/1.jpg", "dog/batch2/1.jpg"], ("cat", "dog")),
        (["cat/original/1.jpg", "cat/cropped/1.jpg", "dog/original/1.jpg", "dog/cropped/1.jpg"], ("cat", "dog")),
        (["oak/alba/1.jpg", "oak/rubra/1.jpg", "elm/alba/1.jpg", "elm/minor/1.jpg"], ("elm", "oak")),
        (
            [f"cat/{year}/1.jpg" for year in (18, 19, 20)] + [f"dog/{year}/1.jpg" for year in (19, 20, 21)],
            ("cat", "dog"),
        ),
        (
            ["cat/old/1.jpg", "cat/new/1.jpg", "cat/2.jpg", "cat/3.jpg", "dog/old/1.jpg", "dog/new/1.jpg"],
            ("cat", "dog"),
        ),
    ],
)
def test_classes_whose_names_sound_like_splits(
    tmp_path: Path, names: list[str], classes: tuple[str, ...], pack: Callable[[Files, Path], Path]
) -> None:
    [listing] = found(pack(_images(*names), tmp_path / "set"), tmp_path / "scratch")
    assert (listing.split, listing.classes) == ("", classes)


NO_LABELS = {
    "flat": (
        ["train/a1x.jpg", "test/1.jpg"],
        r"\(train and test are splits, and no table holds labels\): give .* --labels",
    ),
    "numbered": (["X_train/1.jpg", "X_test1/1.jpg"], "X_train and X_test1 are splits"),
    "no training set": (["val/1.jpg", "test/1.jpg"], "val and test are splits"),
    "tables without a training set": (
        ["val/1.jpg", "test/1.jpg", "val/labels.csv", "test/labels.csv"],
        "has no training set among val, test: give one of these folders",
    ),
    "classes without a training set": (
        ["val/cat/1.jpg", "val/dog/1.jpg", "test/cat/1.jpg"],
        "holds test and val, but no folder train: give one of them, or rename",
    ),
    "labels in names": (
        ["train/cat.0.jpg", "train/cat.1.jpg", "train/dog.0.jpg", "train/dog.1.jpg", "test1/1.jpg"],
        r"names seem to begin with the class \(cat, dog\); make a table of them, .* the same command again.*sed -nE",
    ),
    "one level deeper": (["data/train/1.jpg", "data/test/1.jpg"], "train and (data/)?test are splits"),
    "beside figures": (["train/1.jpg", "test/1.jpg", "figures/1.png", "cover.png"], "train and test are splits"),
    "boxes beside images": (["train/images/1.jpg", "train/labels/1.txt", "valid/images/1.jpg"], "/images are splits"),
    "boxes beside one folder of images": (
        ["images/a.jpg", "images/b.jpg", "annotations/a.xml"],
        r"no classes \(no table holds labels\): give their labels with --labels FILE",
    ),
    "images and masks": (
        ["images/cat_1.jpg", "images/cat_2.jpg", "images/dog_1.jpg", "images/dog_2.jpg", "masks/cat_1.png"],
        r"names seem to begin with the class \(cat, dog\)",
    ),
    "parts of a set": (["images_001/1.jpg", "images_002/2.jpg"], "images_001 and images_002 are parts of one set"),
    "folds": (
        ["fold1/a/1.jpg", "fold1/b/1.jpg", "fold2/a/1.jpg", "fold2/b/1.jpg"],
        r"holds fold1, fold2, each with folders of the same names \(a, b\), so these may be .* parts of one set: s",
    ),
    "parts of a split": (["train1/1.jpg", "train2/1.jpg"], "no table holds labels"),
    "annotations in folders of the classes' names": (
        ["Images/a/1.jpg", "Images/b/1.jpg", "Annotation/a/1.xml", "Annotation/b/1.xml"],
        r"1 class folder holds no image in .* \(Annotation\): .* \(did you mean .*Images.*\? It holds a, b\)",
    ),
    "two of a split": (["train/a/1.jpg", "train/b/1.jpg", "test1/a/1.jpg", "test2/a/1.jpg"], "both test1 and test2"),
}


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
@pytest.mark.parametrize("case", NO_LABELS)
def test_splits_without_labels_are_refused_with_the_remedy(
    tmp_path: Path, case: str, pack: Callable[[Files, Path], Path]
) -> None:
    names, message = NO_LABELS[case]
    with pytest.raises(DataError, match=message) as error:
        found(pack(_images(*names), tmp_path / "set"), tmp_path / "scratch")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (["annotations/train.csv"], r"\(no table beside them\): if annotations/train.csv has .* --labels .*train.csv$"),
        ([f"labels/{number}.csv" for number in range(9)], "no table holds labels"),  # boxes
    ],
)
def test_a_table_in_another_folder_is_named_with_the_flag(tmp_path: Path, beside: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        found(_folder(_images("images/1.jpg", "images/2.jpg", *beside), tmp_path / "set"), tmp_path / "scratch")


def _trees(*tops: str, inside: Iterable[str] = ("cat", "dog")) -> list[str]:
    return [f"{top}/{inner}/{number}.png" for top in tops for inner in inside for number in range(2)]


ALIKE = {
    "two tests": (_trees("train", "test_A", "test_B"), "train --test test_A"),
    "a word for a split that is not known": (_trees("train", "devel"), "train --val devel"),
    "no word for a split": (_trees("augmented", "original"), "augmented --val original"),
    "two training sets": (_trees("train_clean", "train_noisy", "val"), "train_clean --val val"),
    "two training sets, one of which is certain": (_trees("train", "train_lq", "test"), "train --test test"),
    "without labels": (_trees("labeled", "unlabeled"), "labeled --val unlabeled"),
    "folds": (_trees(*(f"fold_{number}" for number in range(5))), "fold_0 --val fold_1"),
    "sites with splits": (_trees("A", "B", inside=("train/cat", "train/dog", "val/cat", "val/dog")), "A --val B"),
    "sites within splits": (
        _trees(*(f"{split}/{site}" for split in ("train", "val") for site in "AB")),
        "train/A --val train/B",
    ),
    "sites in the only split": (_trees("train/A", "train/B"), "train/A --val train/B"),
    "parts of one class that are called like splits": (
        _trees("30", "31", inside=("hsf_0", "hsf_1", "train_30")),
        "30 --val 31",
    ),
    "splits within folders of their names": (
        _trees("seg_train/seg_train", "seg_test/seg_test", "more_train/more_train"),
        "seg_train/seg_train --test seg_test/seg_test",
    ),
    "one more folder around the classes": (_trees("A/images", "B/images", "C/shots"), "A/images --val B/images"),
    "patients, some of one class": (_trees(*map(str, range(20, 39))) + _trees("39", inside=["cat"]), "20 --val 21"),
    "other spellings": (_trees("train") + _trees("devel", inside=("Cat", "DOG ")), None),
    "a rare class that one lacks": (_trees("train", inside="abcdef") + _trees("devel", inside="abcde"), None),
    "one of another kind": (_trees("train", "devel") + _trees("misc", inside="xyz"), "train --val devel"),
    "a folder of figures": (_trees("train", "devel", "figures", "misc")[:-2], "train --val devel"),
    "names with blanks": (_trees("my 'own' set", "-x"), "-x --val my 'own' set"),
}


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
@pytest.mark.parametrize("case", ALIKE)
def test_folders_of_the_same_folders_are_no_classes(
    tmp_path: Path, case: str, pack: Callable[[Files, Path], Path]
) -> None:
    names, _ = ALIKE[case]
    source = pack(_images(*names), tmp_path / "set")
    with pytest.raises(DataError, match=r"holds .*, each with folders of the same names \(.*, so these may be splits"):
        found(source, tmp_path / "scratch")
    report = examine_source(source)
    num_images = len(names) if source.is_dir() else 0  # it is not looked into what packing refuses
    assert (report.classes, report.num_images, report.is_usable) == ({}, num_images, False)


@pytest.mark.skipif(shutil.which("sed") is None, reason="there is no sed here")
@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
@pytest.mark.parametrize("case", [case for case in ALIKE if ALIKE[case][1]])
def test_the_command_for_each_meaning_of_such_folders_works(
    tmp_path: Path, case: str, pack: Callable[[Files, Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, words = ALIKE[case]
    assert words is not None
    monkeypatch.chdir(tmp_path)
    source = pack(_images(*names), Path("a set"))
    with pytest.raises(DataError) as error:
        found(source, tmp_path / "scratch")
    message = str(error.value)
    if source.is_file():
        if not shutil.which("unzip" if source.suffix == ".zip" else "tar"):
            pytest.skip("nothing unpacks it here")
        subprocess.run(["bash", "-c", message.split("Unpack it (")[1].split("). Splits")[0]], check=True)
    folder = Path(f"{source}-unpacked" if source.is_file() else source, "release" * (source.suffix == ".tar"))

    _, _, train, flag, place = shlex.split(message.split("Splits: ")[1].split("; ")[0])
    top, other = words.split(f" {flag} ")
    assert [train, place] == [f"{folder}/{name}" for name in (top, other)]
    split = flag.removeprefix("--")
    with closing(open_named(st.Data(train=train, **{split: place}))) as opened:  # type: ignore[arg-type]
        part = getattr(opened, split)
        inside = tuple(sorted({name.rsplit("/", 2)[1] for name in names if name.startswith(f"{top}/")}))
        assert (opened.train.class_list, part and part.class_list) == (inside,) * 2

    tops = {name.split("/")[names[0].startswith("train/A")] for name in names}
    if "groups (" in message:
        _, _, train, _, group_by = shlex.split(message.split("in each class: ")[1].split("; ")[0])
        with closing(open_named(st.Data(train=train, group_by=group_by))) as opened:
            assert set(opened.train.class_list) == tops

    if "parts of one set: " in message:
        _, _, *parts, _ = shlex.split(message.split("parts of one set: ")[1].split("; classes")[0])
        [packed, *_] = st.pack(parts, tmp_path / "out")
        assert packed.card.classes == inside

    command = message.split("classes: ")[1].split(", and give")[0]
    subprocess.run(["bash", "-c", command], check=True)
    listings = found(shlex.split(message.split(", and give ")[1])[0], tmp_path / "scratch")
    assert set(listings[0].classes) == tops
    assert sum(map(len, listings)) == len(names)


def test_a_class_list_says_that_such_folders_are_classes(tmp_path: Path) -> None:
    source = _folder(_images(*_trees("cat", "dog", inside=("left", "right"))), tmp_path / "set")
    [listing] = found(source, tmp_path / "scratch", classes=("cat", "cow", "dog"))
    assert listing.counts() == (4, 0, 4)
    split = _folder(_images(*_trees("train/cat", "train/dog", "val/cat", inside=("left", "right"))), tmp_path / "split")
    train, val = found(split, tmp_path / "scratch", classes=("cat", "cow", "dog"))
    assert (train.counts(), val.counts()) == ((4, 0, 4), (4, 0, 0))
    alone = _tar(_images(*_trees("train/cat", "train/dog", inside=("left", "right"))), tmp_path / "alone")
    [train] = found(alone, tmp_path / "scratch", classes=("cat", "cow", "dog"))
    assert train.counts() == (4, 0, 4)


@pytest.mark.skipif(shutil.which("sed") is None, reason="there is no sed here")
@pytest.mark.parametrize(
    ("images", "val"),
    [
        (
            [
                "train/cat.0.jpg",
                "train/cat.1.jpg",
                "train/dog.0.jpg",
                "train/dog (1).jpg",
                "val/cat.7.jpg",
                "val/dog.2.jpg",
            ],
            2,
        ),
        (["images/great_cat_1.jpg", "images/great_cat_2.jpg", "images/été_1.jpg", "images/été_2.jpg"], 0),
        (["cat-1.jpg", "cat-2.jpg", "d2dog-1.jpg", "d2dog-2.jpg"], 0),
    ],
)
def test_the_command_for_labels_in_names_makes_the_table(tmp_path: Path, images: list[str], val: int) -> None:
    folder = _folder(_images(*images), tmp_path / "a set")
    with pytest.raises(DataError, match="make a table of them") as error:
        found(folder, tmp_path / "scratch")
    subprocess.run(["bash", "-c", str(error.value)[str(error.value).index("(cd ") :]], check=True)
    labels = folder / "labels.csv" if "--labels" in str(error.value) else None
    train, *more = found(folder, tmp_path / "scratch", labels=labels)
    assert len(train.classes) == 2 and len(train) == len(images) - val
    for name, label in zip(train.names, train.labels, strict=True):
        assert train.classes[label] in name
    assert [len(part) for part in more] == [val] * bool(val)


def test_folders_of_splits_that_are_classes_go_in_as_a_list(tmp_path: Path) -> None:
    folder = _folder(_images("train/a.jpg", "test/b.jpg"), tmp_path / "set")
    with pytest.raises(DataError, match="if these folders are classes") as error:
        found(folder, tmp_path / "scratch")
    command = str(error.value)
    subprocess.run(["bash", "-c", command[command.index("(cd ") : command.index(", then")]], check=True)
    [listing] = found(folder / "list.txt", tmp_path / "scratch")
    assert (listing.classes, listing.labels.tolist()) == (("test", "train"), [0, 1])


def test_tables_that_may_each_hold_the_labels_are_named(tmp_path: Path) -> None:
    files = {**_images("train/1.jpg", "test/2.jpg"), "a.csv": b"id,label\n1,cat\n", "b.csv": b"id,label\n1,cat\n"}
    with pytest.raises(DataError, match=r"several tables, each of which may hold the labels \(a\.csv, b\.csv\)"):
        found(_folder(files, tmp_path / "set"), tmp_path / "scratch")


def test_lines_of_json_are_a_table(tmp_path: Path) -> None:
    _folder(_images("1.png", "2.png"), tmp_path)
    path = tmp_path / "labels.jsonl"
    path.write_text('{"file_name": "1.png", "tags": ["wet", "warm"]}\n{"file_name": "2.png", "tags": ["wet"]}\n')
    [listing] = found(path, tmp_path / "scratch")
    assert (listing.label_names, listing.labels.tolist()) == (("warm", "wet"), [[1, 1], [0, 1]])
    path.write_text('{"file_name": "1.png", "label": "a"}\n[1]\n')
    with pytest.raises(DataError, match=r"labels\.jsonl: line 2 is not a JSON object"):
        found(path, tmp_path / "scratch")


def test_other_column_of_a_test_table_is_not_read_as_labels(tmp_path: Path) -> None:
    files = {
        **_images("train/1.png", "train/2.png", "test/3.png", "test/4.png"),
        "train.csv": b"image,patient,label\n1.png,7,0\n2.png,8,1\n",
        "test.csv": b"image,patient\n3.png,1\n4.png,0\n",
    }
    remarks: list[str] = []
    [listing] = found(_folder(files, tmp_path / "set"), tmp_path / "scratch", remarks)
    assert listing.names == ["train/1.png", "train/2.png"]
    assert any("test.csv: no column 'label', which holds the labels of the training set" in text for text in remarks)
    val = {name.replace("test", "val"): data for name, data in files.items()}
    with pytest.raises(DataError, match=r"val\.csv: no column 'label'.*\(the columns: image, patient\)"):
        found(_folder(val, tmp_path / "val"), tmp_path / "scratch")


def test_zips_of_splits_have_their_labels_in_the_same_column(tmp_path: Path) -> None:
    for split, table in (
        ("train", b"image,age,label\n1.png,7,0\n2.png,8,1\n"),
        ("val", b"image,age\n1.png,1\n2.png,0\n"),
    ):
        _zip({**_images("1.png", "2.png"), "metadata.csv": table}, tmp_path / "set" / split)
    with pytest.raises(DataError, match=r"no column 'label'.*\(the columns: image, age\): call the column"):
        found(tmp_path / "set", tmp_path / "scratch")


def test_the_tables_of_splits_have_their_labels_in_the_same_column(tmp_path: Path) -> None:
    files = {
        **_images("train/1.png", "train/2.png", "val/3.png", "val/4.png"),
        "train.csv": b"image,finding\n1.png,a\n2.png,b\n",
        "val.csv": b"image,tag,finding\n3.png,b,a\n4.png,a,b\n",
    }
    listings = found(_folder(files, tmp_path / "set"), tmp_path / "scratch")
    assert _labels(listings, files)["val"] == {"val/3.png": "a", "val/4.png": "b"}


def test_manifests_beside_splits_name_the_classes_of_numbers(tmp_path: Path) -> None:
    def lines(split: str, key: str, *labels: object, **beside: object) -> bytes:
        rows = [
            {"source-ref": f"s3://b/set/{split}/{number}.png", key: label, f"{key}-metadata": beside}
            for number, label in enumerate(labels)
        ]
        return "".join(f"{json.dumps(row)}\n" for row in rows).encode()

    images = _images(*(f"{split}/{number}.png" for split in ("train", "validation") for number in range(2)))
    one = {f"{split}.manifest": lines(split, "job", 0, 1) for split in ("train", "validation")}
    listings = found(_folder({**images, **one}, tmp_path / "one"), tmp_path / "scratch")
    assert [(listing.split, listing.classes) for listing in listings] == [("train", ("0", "1")), ("val", ("0", "1"))]
    names = {"class-map": {"0": "cat", "1": "dog"}}
    several = {f"{split}.manifest": lines(split, "job", [0, 1], [1], **names) for split in ("train", "validation")}
    files = {**images, **several}
    listings = found(_folder(files, tmp_path / "several"), tmp_path / "scratch")
    assert _labels(listings, files)["val"] == {"validation/0.png": "cat+dog", "validation/1.png": "dog"}


@pytest.mark.parametrize("place", ["train.lst", "train/images.lst"])
def test_a_list_of_mxnet_s_beside_or_in_the_folder_of_its_split(tmp_path: Path, place: str) -> None:
    files = {**_images("train/1.png", "train/2.png", "test/3.png"), place: b"9\t1\t1.png\n4\t0\t2.png\n"}
    [listing] = found(_folder(files, tmp_path / "set"), tmp_path / "scratch")
    assert (listing.names, listing.labels.tolist()) == (["train/1.png", "train/2.png"], [1, 0])
    assert listing.ids is not None and listing.ids.tolist() == [9, 4]
    with pytest.raises(DataError, match=r"\.lst in an archive: unpack it"):
        found(_zip(files, tmp_path / "set"), tmp_path / "scratch")


def test_a_table_that_leads_nowhere_names_the_folder_to_give(tmp_path: Path) -> None:
    files = {**_images("a/b/1.png", "c/2.png"), "labels.csv": b"id,label\nb/1,cat\nb/2,dog\n"}
    folder = _folder(files, tmp_path / "set")
    with pytest.raises(DataError, match=r"give .*set/a in place of .*set$"):
        found(folder, tmp_path / "scratch", labels=folder / "labels.csv")


def test_the_check_of_splits_without_labels_counts_no_classes(tmp_path: Path) -> None:
    report = examine_source(_folder(_images("train/a.jpg", "train/b.jpg", "test1/1.jpg"), tmp_path / "set"))
    assert (report.classes, report.num_images, report.is_usable) == ({}, 3, False)


@pytest.mark.parametrize("names", [["bus", "plane", "train"], ["beach", "office", "test_lab", "train_station"]])
def test_one_tar_for_each_class_whose_name_sounds_like_a_split(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write_tar(tmp_path / "set" / f"{name}.tar", _images("0.jpg", "1.jpg"))
    [listing] = found(tmp_path / "set", tmp_path / "scratch")
    assert (listing.split, listing.classes, listing.counts()) == ("", tuple(names), (2,) * len(names))


def test_tars_of_splits_and_others_with_folders_of_classes_are_still_refused(tmp_path: Path) -> None:
    for name in ("train", "extra"):
        write_tar(tmp_path / "set" / f"{name}.tar", _images("cat/0.jpg", "dog/1.jpg"))
    with pytest.raises(DataError, match=r"some file names name a split and some do not \(extra\.tar\)"):
        found(tmp_path / "set", tmp_path / "scratch")


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
def test_a_class_may_lack_a_split_that_others_have(tmp_path: Path, pack: Callable[[Files, Path], Path]) -> None:
    files = _images("cat/Train/1.jpg", "cat/Val/2.jpg", "dog/Train/3.jpg")
    listings = found(pack(files, tmp_path / "set"), tmp_path / "scratch")
    assert _labels(listings, files) == {
        "train": {"cat/Train/1.jpg": "cat", "dog/Train/3.jpg": "dog"},
        "val": {"cat/Val/2.jpg": "cat"},
    }


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cat/train/1.jpg", "cat/test/2.jpg", "dog/3.jpg"], r"\(cat: test, train\), and not every folder"),
        (["cat/1.jpg", "dog/1.jpg", "prueba/cat/1.jpg", "prueba/dog/1.jpg"], r"prueba \(cat, dog\) .* move prueba out"),
        (["a b/1.jpg", "dog/1.jpg", "new/A B/1.jpg", "new/dog/1.jpg", "new/elk/1.jpg"], r"new \(A B, dog, elk\) and"),
    ],
)
def test_test_images_never_become_training_images_of_a_class(
    tmp_path: Path, names: list[str], message: str, pack: Callable[[Files, Path], Path]
) -> None:
    source = pack(_images(*names), tmp_path / "set")
    with pytest.raises(DataError, match=message):
        found(source, tmp_path / "scratch")


def test_a_class_called_test_is_said(tmp_path: Path) -> None:
    messages: list[str] = []
    source = _folder(_images("cat/1.jpg", "dog/1.jpg", "test/2.jpg", "valid/3.jpg"), tmp_path / "set")
    found(source, tmp_path / "scratch", messages)
    assert messages == [f"warning: {source}: test is read as a class: if it holds images of all classes, move it out"]


@pytest.mark.parametrize("pack", [_folder, _tar, _zip])
def test_masks_and_recycle_bins_inside_a_class_are_left_out(
    tmp_path: Path, pack: Callable[[Files, Path], Path]
) -> None:
    messages: list[str] = []
    names = ["cat/images/1.jpg", "cat/masks/1.png", "cat/images/#recycle/2.jpg", "dog/1.jpg", "dog/_thumbs/1.jpg"]
    source = pack(_images(*names), tmp_path / "set")
    [listing] = found(source, tmp_path / "scratch", messages)
    assert listing.counts() == (1, 1)
    assert messages == [
        f"{source}: cat/masks/, cat/images/#recycle/, dog/_thumbs/ left out, named like recycle bins, caches and masks:"
        " rename what is a class"
    ]


def test_of_splits_in_another_language_the_largest_is_trained_on(tmp_path: Path) -> None:
    names = [
        f"{split}/{word}/{n}.jpg" for split, count in [("测试", 1), ("训练", 3)] for word in "ab" for n in range(count)
    ]
    source = _folder(_images(*names), tmp_path / "set")
    with pytest.raises(DataError, match=f"steady train '{source}/训练' --val '{source}/测试'"):
        found(source, tmp_path / "scratch")


def test_archives_of_two_splits_are_never_classes(tmp_path: Path) -> None:
    for stem in ("training_cat", "training_dog", "validation_cat"):
        _tar(_images("1.jpg", "2.jpg"), tmp_path / "set" / stem)
    with pytest.raises(DataError, match="holds classes that the class list lacks"):
        found(tmp_path / "set", tmp_path / "scratch")


@pytest.mark.parametrize(
    "names",
    [
        ["cat/1.jpg", "cat/dog/2.jpg", "dog/3.jpg"],
        ["0/1/a.jpg", "0/2/b.jpg", "1/3/c.jpg", "2/d.jpg", "3/e.jpg", "4/f.jpg"],
        ["1/2/a.jpg", "2/1/b.jpg", "3/1/c.jpg"],
    ],
)
def test_groups_in_classes_may_be_called_as_some_classes_are(tmp_path: Path, names: list[str]) -> None:
    files = _images(*names)
    [listing] = found(_folder(files, tmp_path / "set"), tmp_path / "scratch")
    assert _labels([listing], files) == {"": {name: name.partition("/")[0] for name in names}}


def test_test_images_in_an_archive_of_their_own_need_no_labels(tmp_path: Path) -> None:
    """As in a folder: train.zip has folders of classes, test.zip has images alone."""
    _zip(_images("train/cat/1.png", "train/dog/2.png"), tmp_path / "set" / "train")
    test = _zip(_images("test/3.png", "test/4.png"), tmp_path / "set" / "test")
    messages: list[str] = []
    [listing] = found(tmp_path / "set", tmp_path / "scratch", messages)
    assert (listing.split, listing.classes) == ("train", ("cat", "dog"))
    assert messages[-1].startswith(f"skipped: the images in {test} have no classes")
    test.write_bytes(test.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"test\.zip is cut short"):
        found(tmp_path / "set", tmp_path / "scratch")


@pytest.mark.skipif(shutil.which("tar") is None or shutil.which("sed") is None, reason="there is no tar or sed here")
def test_the_command_for_labels_in_names_reads_the_archive_of_the_split(tmp_path: Path) -> None:
    train = _images("train/cat.0.jpg", "train/cat.1.jpg", "train/dog.0.jpg", "train/dog.1.jpg")
    for name, files in (("train", train), ("test1", _images("test1/1.jpg"))):
        (tmp_path / "a set").mkdir(exist_ok=True)
        _tar(files, tmp_path / "a set" / name)
    with pytest.raises(DataError, match=r"run the same command again with --labels labels\.csv: tar -tf ") as error:
        found(tmp_path / "a set", tmp_path / "scratch")
    command = str(error.value)[str(error.value).index("tar -tf ") :]
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    [listing] = found(tmp_path / "a set", tmp_path / "scratch", labels=tmp_path / "labels.csv")
    assert (listing.split, listing.classes, listing.labels.tolist()) == ("train", ("cat", "dog"), [0, 0, 1, 1])


def test_folders_called_train_test_and_meta_are_no_files_of_cifar(tmp_path: Path) -> None:
    files = _images("train/0/1.png", "train/1/2.png", "test/0/3.png", "test/1/4.png", "meta/0.png")
    train, test = found(_folder(files, tmp_path / "set"), tmp_path / "scratch")
    assert [(part.split, len(part)) for part in (train, test)] == [("train", 2), ("test", 2)]


def test_folders_called_like_archives_are_folders(tmp_path: Path) -> None:
    [listing] = found(_folder(_images("cat.zip/1.png", "dog.tar/2.png"), tmp_path / "set"), tmp_path / "scratch")
    assert listing.classes == ("cat.zip", "dog.tar")


def test_parts_of_a_training_set_are_packed_by_the_command_in_the_message(tmp_path: Path) -> None:
    source = _folder(
        _images("train.X1/a/1.png", "train.X2/b/2.png", "val.X/a/3.png", "val.X/b/4.png"), tmp_path / "set"
    )
    parts = rf"{source}/train\.X1 {source}/train\.X2"
    with pytest.raises(DataError, match=rf"both train\.X1 and train\.X2: keep .*: steady pack {parts} OUT"):
        found(source, tmp_path / "scratch")


def test_images_in_another_folder_that_the_table_names_are_the_training_set(tmp_path: Path) -> None:
    """They were merged with those of val and test, whose names are shorter than the word train."""
    names = [f"{folder}/{number}.png" for folder in ("photos", "val", "test") for number in range(2)]
    table = "".join(f"{name},{'cat' if '0' in name else 'dog'}\n" for name in names)
    source = _folder({**_images(*names), "labels.csv": f"path,label\n{table}".encode()}, tmp_path / "set")
    messages: list[str] = []
    listings = found(source, tmp_path / "scratch", messages)
    assert {part.split: list(part.names) for part in listings} == {
        "train": names[:2],
        "val": names[2:4],
        "test": names[4:],
    }
    assert not messages


PARTS = [
    ("images_001", "images_002"),
    ("train_1", "train_2"),
    ("set_part_1", "set_part_2"),
    ("photos-20260101T080910Z-001", "photos-20260101T080910Z-002"),
]


@pytest.mark.parametrize("pack", [_tar, _zip])
@pytest.mark.parametrize("names", PARTS)
def test_archives_that_are_parts_of_one_set_are_no_classes(
    tmp_path: Path, names: tuple[str, str], pack: Callable[[Files, Path], Path]
) -> None:
    for number, name in enumerate(names):
        pack(_images(f"images/{number}a.png", f"images/{number}b.png"), tmp_path / "set" / name)
    with pytest.raises(DataError, match=r"the images in .*set have no classes"):
        found(tmp_path / "set", tmp_path / "scratch")
    (tmp_path / "labels.csv").write_text("path,label\n0a.png,cat\n0b.png,dog\n1a.png,cat\n1b.png,dog\n")
    [listing] = found(tmp_path / "set", tmp_path / "scratch", labels=tmp_path / "labels.csv")
    assert (listing.classes, listing.labels.tolist()) == (("cat", "dog"), [0, 1, 0, 1])
