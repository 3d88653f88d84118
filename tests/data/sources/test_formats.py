"""What other tools write is named, and the command in the message makes a source of it: each is run."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data.packing.pictures import write_folder
from tests.data.sources.samples import encoded, found

from steadytrain.cli import main
from steadytrain.errors import DataError
from steadytrain.format import fold

WORDS = ("cat", "dog")
PIXELS = np.random.default_rng(0).integers(0, 255, (12, 8, 8, 3), dtype=np.uint8)
NUMBERS = np.arange(12) % 3


def _file(path: Path, content: str | bytes | dict[str, Any] | list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _pictures(folder: Path, first: int = 0) -> None:
    for number in range(4):  # of the same names in each split
        _file(folder / f"{number}.png", encoded(first + number))


def _coco(folders: tuple[str, ...], annotations: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for split, folder in enumerate(folders):
            _pictures(root / folder, 10 * split)
            objects = [{"image_id": n, "category_id": 5 + (n + split) % 2} for n in (0, 1, 2, 3, 3)]
            names = [{"id": 5 + k, "name": word} for k, word in enumerate(WORDS)]
            images = [{"id": n, "file_name": f"{n}.png"} for n in range(4)]
            path = root / annotations.format(folder.rpartition("/")[2])
            _file(path, {"info": {}, "licenses": [], "images": images, "annotations": objects, "categories": names})

    return make


def _voc(images: str, annotations: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for split, folder in enumerate(("train", "valid") if "{}" in images else ("",)):
            _pictures(root / images.format(folder), 10 * split)
            for n in range(4):
                text = f"<object><name>{WORDS[(n + split) % 2]}</name></object>"
                text = f"<annotation>\n  <filename>{n}.png</filename>{text}</annotation>"
                _file(root / annotations.format(folder) / f"{n}.xml", text)
        if "JPEGImages" in images:
            _pictures(root / images.replace("JPEGImages", "SegmentationClass"), 50)
            for n in range(4):
                (root / images / f"{n}.png").rename(root / images / f"{n}.jpg")
                path = root / annotations / f"{n}.xml"
                path.write_text(path.read_text().replace(".png", ".jpg"))

    return make


def _yolo(images: str, labels: str, names: tuple[str, str]) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for split, folder in enumerate(("train", "val") if "{}" in images else ("",)):
            _pictures(root / images.format(folder), 10 * split)
            for n in range(4):
                _file(
                    root / labels.format(folder) / f"{n}.txt", f"{(n + split) % 2} 0.5 .5 0.25 1e-05\n" * (n != 2 or 1)
                )
        _file(root / names[0], names[1])

    return make


def _cvat(root: Path) -> None:
    _pictures(root / "images")
    tags = [
        f'<image id="{n}" name="{n}.png"><{"tag" if n else "box"} label="{WORDS[n % 2]}"/></image>' for n in range(4)
    ]
    _file(
        root / "annotations.xml",
        f"<?xml version='1.0'?>\n<annotations><version>1.1</version>{''.join(tags)}</annotations>",
    )


def _label_studio(root: Path) -> None:
    _pictures(root / "upload")
    tasks = [
        {"id": n, "annotations": [{"result": [{"value": {"choices": [WORDS[n % 2]]}}]}], "data": {"image": url}}
        for n, url in enumerate(
            [f"/data/upload/1/{n}.png" for n in range(2)] + [f"/data/local-files/?d={n}.png" for n in (2, 3)]
        )
    ]
    _file(root / "project-1.json", tasks)


def _label_studio_short(root: Path) -> None:
    _pictures(root / "upload")
    _file(root / "min.json", [{"image": f"/u/{n}.png", "annotator": 1, "choice": WORDS[n % 2]} for n in range(4)])


def _fiftyone(root: Path) -> None:
    _pictures(root / "data")
    samples = [
        {"filepath": f"data/{n}.png", "truth": {"_cls": "Classification", "label": WORDS[n % 2]}} for n in range(4)
    ]
    _file(root / "samples.json", {"samples": samples})
    _file(root / "metadata.json", {"name": "pets"})


def _fiftyone_classes(root: Path) -> None:
    _pictures(root / "data")
    _file(root / "labels.json", {"classes": WORDS, "labels": {str(n): n % 2 for n in range(4)}})


def _datumaro(root: Path) -> None:
    _pictures(root / "images" / "default")
    items: list[dict[str, Any]] = [
        {"id": str(n), "annotations": [{"type": "label", "label_id": n % 2}], "image": {"path": f"{n}.png"}}
        for n in range(4)
    ]
    del items[0]["image"]
    names = [{"name": word, "parent": ""} for word in WORDS]
    _file(
        root / "annotations" / "default.json", {"info": {}, "categories": {"label": {"labels": names}}, "items": items}
    )


def _create_ml(root: Path) -> None:
    for split, folder in enumerate(("train", "valid")):
        _pictures(root / folder, 10 * split)
        places = [{"label": WORDS[(n + split) % 2], "coordinates": {"x": 1, "y": 1}} for n in range(4)]
        images = [{"image": f"{n}.png", "annotations": [place]} for n, place in enumerate(places)]
        _file(root / folder / "_annotations.createml.json", images)


TABLES: dict[str, tuple[Callable[[Path], None], str]] = {
    "COCO": (_coco(("train2017", "val2017"), "annotations/instances_{}.json"), "COCO"),
    "COCO, images": (_coco(("images/train", "images/val"), "annotations/{}.json"), "COCO"),
    "COCO, flat": (_coco((".",), "annotations.json"), "COCO"),
    "COCO of Roboflow": (_coco(("train", "valid"), "{}/_annotations.coco.json"), "COCO"),
    "VOC": (_voc("VOCdevkit/VOC2007/JPEGImages", "VOCdevkit/VOC2007/Annotations"), "Pascal VOC"),
    "VOC of Roboflow": (_voc("{}", "{}"), "Pascal VOC"),
    "VOC of labelImg": (_voc("images", "annotations"), "Pascal VOC"),
    "YOLO": (_yolo("images/{}", "labels/{}", ("data.yaml", "nc: 2\nnames: [cat, dog]\n")), "YOLO"),
    "YOLO, names": (_yolo("images/{}", "labels/{}", ("my.yaml", "names:\n  0: cat\n  1: dog\n")), "YOLO"),
    "YOLO of Roboflow": (_yolo("{}/images", "{}/labels", ("data.yaml", "names: ['cat', 'dog']\n")), "YOLO"),
    "YOLO of CVAT": (_yolo("obj_train_data", "obj_train_data", ("obj.names", "cat\ndog\n")), "YOLO"),
    "YOLO of labelImg": (_yolo("pets", "pets", ("pets/classes.txt", "cat\ndog\n")), "YOLO"),
    "CVAT": (_cvat, "CVAT"),
    "Label Studio": (_label_studio, "Label Studio"),
    "Label Studio, short": (_label_studio_short, "Label Studio"),
    "FiftyOne": (_fiftyone, "FiftyOne"),
    "FiftyOne, classes": (_fiftyone_classes, "FiftyOne"),
    "Datumaro": (_datumaro, "Datumaro"),
    "Create ML of Roboflow": (_create_ml, "Create ML"),
}


def _refused(source: Path, scratch: Path) -> str:
    with pytest.raises(DataError) as error:
        found(source, scratch)
    return str(error.value)


def _run(message: str, folder: Path) -> None:
    """Run the command in a message as a user would, with this Python."""
    folder.mkdir()
    command = fold(message, 72).splitlines()[-1].strip()  # as a terminal shows it
    assert command.startswith("python3 -c ")
    subprocess.run(command.replace("python3", sys.executable, 1), shell=True, cwd=folder, check=True, timeout=60)


@pytest.mark.parametrize("case", TABLES)
def test_annotations_become_a_table_by_the_command_in_the_message(tmp_path: Path, case: str) -> None:
    make, name = TABLES[case]
    source = tmp_path / "it's a set"
    make(source)
    message = _refused(source, tmp_path / "scratch")
    assert message.startswith(f"{source} holds ") and name in message.partition(": ")[0]
    _run(message, tmp_path / "work")
    listings = found(source, tmp_path / "scratch", labels=tmp_path / "work" / "labels.csv")
    assert [listing.classes for listing in listings] == [("cat", "dog")] * len(listings)
    splits = [["", "train", "valid", "val"], [""]]["flat" in case or len(listings) == 1]
    for number, listing in enumerate(listings):  # each image has its own label, not that of its namesake
        assert listing.split in splits
        pairs = [(int(Path(name).stem), label) for name, label in zip(listing.names, listing.labels, strict=True)]
        assert sorted(pairs) == [(n, (n + number) % 2) for n in range(4)]
        assert not any("Segmentation" in name for name in listing.names)


def test_a_single_file_of_annotations_is_named_too(tmp_path: Path) -> None:
    _label_studio_short(tmp_path / "set")
    message = _refused(tmp_path / "set" / "min.json", tmp_path / "scratch")
    assert message.startswith(f"{tmp_path / 'set' / 'min.json'} is an export of Label Studio: make a table")


def test_birds_are_told_both_ways(tmp_path: Path) -> None:
    root, lines = tmp_path / "CUB_200_2011", dict[str, list[str]]()
    for number in range(8):
        name = f"{1 + number // 4:03}.{('Albatross', 'Auklet')[number // 4]}/{number}.jpg"
        _file(root / "images" / name, encoded(number, "JPEG"))
        values = (("images", name), ("image_class_labels", 1 + number // 4), ("train_test_split", number % 2))
        for file, value in values:
            lines.setdefault(file, []).append(f"{number + 1} {value}")
    for file, text in lines.items():
        _file(root / f"{file}.txt", "\n".join(text) + "\n")
    _file(root / "bounding_boxes.txt", "1 60.0 27.0 325.0 304.0\n")
    _file(root / "attributes" / "certainties.txt", "1 not visible\n")
    for source in (tmp_path, root):
        message = _refused(source, tmp_path / "scratch")
        assert f"CUB-200): give {root}/images, whose folders are the classes" in message
    command = re.search(r"\(cd .*labels\.csv\)", message)
    assert command is not None
    subprocess.run(command[0], shell=True, check=True)
    train, val = found(root / "labels.csv", tmp_path / "scratch")
    assert train.classes == ("001.Albatross", "002.Auklet")
    assert [Path(name).stem for name in train.names] == ["1", "3", "5", "7"]
    assert val.labels.tolist() == [0, 0, 1, 1]


def _npz(path: Path) -> None:
    parts = {"train": slice(0, 6), "val": slice(6, 9), "test": slice(9, 12)}  # two of one size, as MedMNIST's
    arrays: dict[str, Any] = {f"{split}_images": PIXELS[part] for split, part in parts.items()}
    arrays |= {f"{split}_labels": NUMBERS[part, None] for split, part in parts.items()}
    np.savez(path / "a.npz", **arrays)


def _keras(path: Path) -> None:
    np.savez(path / "a.npz", x_train=PIXELS[:6], y_train=NUMBERS[:6], x_test=PIXELS[6:] / 255.0, y_test=NUMBERS[6:])


def _npy(path: Path) -> None:
    for split, part in {"train": slice(0, 6), "test": slice(6, 12)}.items():
        np.save(path / f"X_{split}.npy", PIXELS[part, ..., 0])
        np.save(path / f"y_{split}.npy", NUMBERS[part])


def _matlab(path: Path) -> None:
    io_ = pytest.importorskip("scipy.io")
    for split, part in {"train": slice(0, 6), "test": slice(6, 12)}.items():
        values = {"X": PIXELS[part].transpose(1, 2, 3, 0), "y": NUMBERS[part, None].astype(np.uint8)}
        io_.savemat(path / f"{split}_32x32.mat", values)


def _pickled(path: Path) -> None:
    data = {
        "train": PIXELS[:6],
        "train_labels": NUMBERS[:6].tolist(),
        "test": PIXELS[6:],
        "test_labels": NUMBERS[6:].tolist(),
    }
    (path / "a.pkl").write_bytes(pickle.dumps(data))


def _hdf5(path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    for split, part in {"train": slice(0, 6), "test": slice(6, 12)}.items():
        with h5py.File(path / f"{split}_x.h5", "w") as x, h5py.File(path / f"{split}_y.h5", "w") as y:
            x["x"], y["y"] = PIXELS[part], NUMBERS[part].reshape(-1, 1, 1, 1)


ARRAYS: dict[str, tuple[Callable[[Path], None], str]] = {
    "npz": (_npz, "NumPy arrays (.npz)"),
    "npz of Keras": (_keras, "NumPy arrays (.npz)"),
    "npy": (_npy, "NumPy arrays (.npy)"),
    "mat": (_matlab, "a MATLAB file"),
    "pickle": (_pickled, "a Python pickle, which runs whatever code it holds when it is read"),
    "hdf5": (_hdf5, "an HDF5 file"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_become_folders_of_classes_by_the_command_in_the_message(tmp_path: Path, case: str) -> None:
    make, name = ARRAYS[case]
    source = tmp_path / "set"
    source.mkdir()
    make(source)
    message = _refused(source, tmp_path / "scratch")
    assert message.startswith(f"{source} holds {name}") and "images" in message
    _run(message, tmp_path / "work")
    listings = found(tmp_path / "work" / "images", tmp_path / "scratch")
    assert sum(map(len, listings)) == 12 and len(listings) > 1
    for listing in listings:
        assert listing.classes == ("0", "1", "2")
        for path, label in zip(listing.names, listing.labels, strict=True):
            with Image.open(listing.root / path) as image:
                pixels = np.array(image)
            same = [
                row
                for row in range(12)
                if np.array_equal(pixels, PIXELS[row] if pixels.ndim > 2 else PIXELS[row, ..., 0])
            ]
            assert [NUMBERS[row] for row in same] == [label]


def test_one_file_of_arrays_is_named_too(tmp_path: Path) -> None:
    _keras(tmp_path)
    message = _refused(tmp_path / "a.npz", tmp_path / "scratch")
    assert message.startswith(f"{tmp_path / 'a.npz'} is NumPy arrays (.npz): write its images into a folder")
    _run(message, tmp_path / "work")
    assert [part.split for part in found(tmp_path / "work" / "images", tmp_path / "scratch")] == ["train", "test"]


OTHERS: dict[str, tuple[str, bytes, str]] = {
    "data.mdb": ("LMDB", bytes(16) + b"\xde\xc0\xef\xbe" + bytes(4000), "pip install lmdb"),
    "normal/1.dcm": ("DICOM", bytes(128) + b"DICM" + bytes(200), "pip install pydicom"),
    "IM0001": ("DICOM", bytes(128) + b"DICM" + bytes(200), "pip install pydicom"),
    "1.0.0/mnist-train.tfrecord-00000-of-00001": ("TFRecord", bytes(64), "tensorflow"),
    "train.h5": ("HDF5", b"\x89HDF\r\n\x1a\n" + bytes(99), "h5py"),
    "train.feather": ("Feather", b"ARROW1\0\0" + bytes(99), "pandas"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_needs_a_library_is_named_with_it(tmp_path: Path, name: str) -> None:
    form, content, library = OTHERS[name]
    _file(tmp_path / "set" / name, content)
    message = _refused(tmp_path / "set", tmp_path / "scratch")
    assert form in message.partition(": ")[0] and library in message
    code = re.search(r"python3 -c '(.*)'", message)
    assert code is not None
    compile(code[1], "command", "exec")


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not there")
def test_feather_becomes_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    (tmp_path / "set").mkdir()
    images = [encoded(number) for number in range(4)]
    pandas.DataFrame({"image": images, "label": [*WORDS] * 2}).to_feather(tmp_path / "set" / "a.feather")
    _run(_refused(tmp_path / "set", tmp_path / "scratch"), tmp_path / "work")
    [listing] = found(tmp_path / "work" / "images.parquet", tmp_path / "scratch")
    assert (listing.classes, listing.labels.tolist()) == (WORDS, [0, 1, 0, 1])


@pytest.mark.parametrize("folders", [("train2017", "val2017"), ("images",)])
@pytest.mark.parametrize("form", ["zip", "tar", "gztar"])
def test_inside_an_archive_they_are_named(tmp_path: Path, form: str, folders: tuple[str, ...]) -> None:
    _coco(folders, "annotations/instances_{}.json")(tmp_path / "set")
    archive = shutil.make_archive(str(tmp_path / "set"), form, tmp_path / "set")
    message = _refused(Path(archive), tmp_path / "scratch")
    assert message.startswith(f"{archive} holds annotations of COCO's form: unpack it")


def test_a_description_of_a_set_is_no_table(tmp_path: Path) -> None:
    _file(tmp_path / "data.yaml", "path: ../photos\ntrain: train\nnames: [cat, dog]\n")
    message = _refused(tmp_path / "data.yaml", tmp_path / "scratch")
    assert message.startswith(f"{tmp_path / 'data.yaml'} is a description of a set, as Ultralytics reads it: give")


def test_check_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set").mkdir()
    _keras(tmp_path / "set")
    for source in (tmp_path / "set", tmp_path / "set" / "a.npz"):
        assert main(["check", str(source)]) != 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "write its images into a folder for each class, and give that, images: python3 -c" in shown


def test_a_folder_of_classes_keeps_its_own_message(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    (tmp_path / "photos" / "bird").mkdir()
    _coco((".",), "annotations.json")(tmp_path)
    (tmp_path / "annotations.json").rename(tmp_path / "photos" / "annotations.json")
    np.save(tmp_path / "photos" / "features.npy", PIXELS)
    assert "1 class folder holds no image" in _refused(tmp_path / "photos", tmp_path / "scratch")
    (tmp_path / "photos" / "bird").rmdir()
    assert found(tmp_path / "photos", tmp_path / "scratch")[0].classes == ("cat", "dog")


def test_a_mistake_in_the_table_is_not_taken_for_the_annotations(tmp_path: Path) -> None:
    _coco(("train2017",), "annotations/instances_{}.json")(tmp_path / "set")
    _file(tmp_path / "labels.csv", "path,labels\n0.png,cat\nnowhere.png\n")
    with pytest.raises(DataError, match="line 3"):
        found(tmp_path / "set", tmp_path / "scratch", labels=tmp_path / "labels.csv")


@pytest.mark.parametrize(
    "labels",
    [
        [{"image": f"{n}.png", "label": WORDS[n % 2]} for n in range(4)],
        {f"{n}.png": WORDS[n % 2] for n in range(4)},
        {f"{n}.png": {"label": WORDS[n % 2]} for n in range(4)},
        {word: [f"{n}.png" for n in range(4) if WORDS[n % 2] == word] for word in WORDS},
        {"path": {str(n): f"{n}.png" for n in range(4)}, "label": {str(n): WORDS[n % 2] for n in range(4)}},
        {"data": [{"image": f"{n}.png", "label": WORDS[n % 2]} for n in range(4)]},
    ],
    ids=["records", "pairs", "objects", "paths of classes", "pandas", "one list"],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_labels_in_json_become_a_table(tmp_path: Path, labels: Any, indent: int | None) -> None:
    _pictures(tmp_path)
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(labels, indent=indent))
    for source in (path, tmp_path):
        with pytest.raises(DataError, match=f"JSON with labels: write .* and give {path}l: ") as refused:
            found(source, tmp_path / "scratch")
        subprocess.run(["sh", "-c", str(refused.value).partition("labels.jsonl: ")[2]], check=True)
        [listing] = found(f"{path}l", tmp_path / "scratch")
        pairs = {name: listing.classes[n] for name, n in zip(listing.names, listing.labels, strict=True)}
        assert pairs == {f"{n}.png": WORDS[n % 2] for n in range(4)}
        Path(f"{path}l").unlink()
