"""Data in memory become a file that their content names: the same images and labels, whatever held them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision.datasets import FakeData, ImageFolder

import steadytrain as st
from steadytrain.data.packing.memory import images_of, source_of
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, StorageError
from steadytrain.training.data import open_data

IMAGES: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 255, (6, 9, 12, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])
CHANNELS_FIRST = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
pandas = pytest.importorskip("pandas")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number, image in enumerate(IMAGES):
        path = Path("photos", "cat" if number < 3 else "dog", f"{number}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return Path("photos")


class Pairs:
    """A map-style data set that is nobody's subclass, of dictionaries or of pairs."""

    def __init__(self, as_row: bool = False) -> None:
        self.as_row = as_row

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, number: int) -> Any:
        image, label = Image.fromarray(IMAGES[number]), int(LABELS[number])
        return {"image": image, "label": label} if self.as_row else (image, label)


@pytest.mark.parametrize(
    "data",
    [
        (IMAGES, LABELS),
        (IMAGES.astype(np.int64), LABELS.tolist()),
        (IMAGES / 255, np.eye(3)[LABELS]),
        (list(IMAGES), LABELS),
        (CHANNELS_FIRST, torch.from_numpy(LABELS)),
        list(zip(IMAGES, LABELS, strict=True)),
        TensorDataset(CHANNELS_FIRST / 255, torch.from_numpy(LABELS)),
        Subset(Pairs(), range(6)),  # type: ignore[arg-type]
        Pairs(),
        Pairs(as_row=True),
        {"image": list(IMAGES), "label": LABELS},
        pandas.DataFrame({"img": list(map(Image.fromarray, IMAGES)), "Label": LABELS}),
    ],
    ids=lambda data: type(data).__name__,
)
def test_one_content_is_one_file_with_every_pixel(data: Any) -> None:
    path = source_of(data)
    assert Path(path).stem.rpartition("-")[2] == Path(source_of((IMAGES, LABELS))).stem.rpartition("-")[2]
    with Records.open(path) as records:
        assert records.classes == ("0", "1", "2") and records.labels.tolist() == LABELS.tolist()
        stored = [np.asarray(Image.open(io.BytesIO(records.image(number)))) for number in range(6)]
    assert (np.stack(stored) == IMAGES).all()


def test_other_labels_or_pixels_are_another_file() -> None:
    first = source_of((IMAGES, LABELS))
    assert source_of((IMAGES, LABELS[::-1])) != first != source_of((255 - IMAGES, LABELS))


def test_the_bytes_of_a_file_stay(photos: Path) -> None:
    paths = sorted(photos.rglob("*.jpg"))
    for images in ([Image.open(path) for path in paths], [path.read_bytes() for path in paths]):
        with Records.open(source_of((images, ["a", "b"] * 3))) as records:
            assert [bytes(records.image(number)) for number in range(6)] == [path.read_bytes() for path in paths]
    changed = Image.open(paths[0])
    changed.paste((1, 2, 3), (0, 0, 12, 9))
    with Records.open(source_of([(changed, "a"), (Image.open(paths[1]), "b")])) as records:
        assert Image.open(io.BytesIO(records.image(0))).getpixel((0, 0)) == (1, 2, 3)


def test_photographs_are_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the top is at the right
    Image.fromarray(IMAGES[0]).save("turned.jpg", exif=exif)
    loaded = Image.open(io.BytesIO(Path("turned.jpg").read_bytes()))
    for image in (Image.open("turned.jpg"), loaded):
        with Records.open(source_of([(image, "a"), (IMAGES[1], "b")])) as records:
            assert Image.open(io.BytesIO(records.image(0))).size == (9, 12)


@pytest.mark.parametrize(
    "make",
    [
        lambda table: table,
        lambda table: ImageFolder("photos", transform=np.asarray),
        lambda table: Subset(ImageFolder("photos"), range(6)),
        lambda table: list(table.itertuples(index=False, name=None)),
        lambda table: {"path": table.image.tolist(), "species": table.species.tolist()},
    ],
)
def test_paths_are_not_copied(photos: Path, make: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in sorted(photos.rglob("*.jpg"))]
    table = pandas.DataFrame({"image": paths, "species": ["cat"] * 3 + ["dog"] * 3})
    data = make(table)
    path = Path(source_of(data))
    assert path.suffix == ".csv" and f"{Path(paths[0]).absolute()},cat" in path.read_text()
    assert ("the transform of" in capsys.readouterr().err) == (getattr(data, "transform", None) is np.asarray)


class Transformed:
    """A data set that calls its transform without a look whether there is one."""

    transform: Callable[..., Any]
    transforms: Callable[..., Any]

    @staticmethod
    def fail(*values: Any) -> None:
        raise AssertionError("the transform was applied")

    def __init__(self) -> None:
        self.transform = self.transforms = self.fail

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return self.transforms(self.transform(IMAGES[number]), number)


@pytest.mark.parametrize(
    "data", [FakeData(4, (3, 8, 8), 2, transform=lambda image: torch.zeros(3, 8, 8)), Transformed()]
)
def test_a_transform_is_named_and_not_applied(data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    name = type(data).__name__
    with Records.open(source_of(data)) as records:
        assert np.asarray(Image.open(io.BytesIO(records.image(0)))).std() > 1
    (images_of(data) or [])[0]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(f"the transform of the {name} is not applied" in line for line in lines)
    assert "transforms=" in lines[0] and data.transform is not None


def test_labels_that_a_data_set_changes_are_refused(photos: Path) -> None:
    data = ImageFolder(str(photos), target_transform=lambda label: 1 - label)
    for given in (data, Subset(data, [1, 2])):
        with pytest.raises(DataError, match="the ImageFolder has a target_transform"):
            source_of(given)
    assert len(images_of(data) or ()) == 6


@pytest.mark.parametrize(
    "make",
    [
        lambda images, labels: (images, labels),
        lambda images, labels: [images, labels],
        lambda images, labels: (list(images), labels),
        lambda images, labels: pandas.DataFrame({"image": images, "label": labels}),
        lambda images, labels: {"image": images, "label": labels},
    ],
)
@pytest.mark.parametrize("as_paths", [False, True])
def test_a_series_is_read_in_its_order(photos: Path, make: Callable[[Any, Any], Any], as_paths: bool) -> None:
    order = [3, 0, 5, 2]
    paths = sorted(map(str, photos.rglob("*.jpg")))
    frame = pandas.DataFrame({"image": paths if as_paths else list(IMAGES), "label": [*"abcdef"]}).iloc[order]
    path = source_of(make(frame.image, frame.label))
    if as_paths:
        pairs = [line.rsplit(",", 1) for line in Path(path).read_text().splitlines()[1:]]
        assert [(Path(p).name, label) for p, label in pairs] == [(f"{k}.jpg", "abcdef"[k]) for k in order]
        return
    with Records.open(path) as records:
        assert [records.classes[label] for label in records.labels] == ["abcdef"[k] for k in order]
        stored = [np.asarray(Image.open(io.BytesIO(records.image(number)))) for number in range(4)]
    assert (np.stack(stored) == IMAGES[order]).all()
    assert next(image for image, _ in images_of(frame.image) or ()) is frame.image.iloc[0]


@pytest.mark.parametrize("missing", [None, float("nan"), pandas.NA, pandas.NaT])
@pytest.mark.parametrize("column", ["image", "label"])
def test_a_row_without_a_label_or_an_image_is_named(missing: Any, column: str) -> None:
    rows: dict[str, list[Any]] = {"image": ["a.jpg", "b.jpg", "c.jpg"], "label": ["x", "y", "x"]}
    rows[column][1] = missing
    with pytest.raises(
        DataError, match=rf"row 1 .*in the column '{column}': drop it, data.dropna\(subset=\['{column}'\]\)"
    ):
        source_of(pandas.DataFrame(rows))
    for pairs in (list(zip(*rows.values(), strict=True)), tuple(map(pandas.Series, rows.values()))):
        with pytest.raises(DataError, match=rf"row 1 .* has no {column}: leave it out"):
            source_of(pairs)


@pytest.mark.parametrize("values", [[[1, 1], [0, 0]] * 3, [[0, 1], [1, 0]] * 3])
def test_several_columns_of_labels_are_their_vectors(values: list[list[int]]) -> None:
    frame = pandas.DataFrame({"image": list(IMAGES), "sharp": np.array(values)[:, 0], "bright": np.array(values)[:, 1]})
    with Records.open(source_of(frame, label_column=["bright", "sharp"])) as records:
        assert tuple(records.class_list) == ("bright", "sharp")
        assert records.labels.tolist() == [[b, a] for a, b in values]


@pytest.mark.parametrize("labels", [LABELS[:, None], torch.from_numpy(LABELS)[:, None], LABELS[:, None].tolist()])
def test_a_column_of_labels_is_a_list_of_them(labels: Any) -> None:
    assert source_of((IMAGES, labels)) == source_of((IMAGES, LABELS))
    texts = np.array([*"abcabc"])
    assert source_of((IMAGES, texts[:, None])) == source_of((IMAGES, texts))


class ClassLabel:
    names = ("a", "b", "c")


class List:
    """As of Hugging Face: a feature of several values."""

    feature = ClassLabel()


def test_lists_of_class_numbers_are_refused() -> None:
    data = Pairs(as_row=True)
    for feature in (List(), [ClassLabel()]):
        data.features = {"image": object(), "labels": feature}  # type: ignore[attr-defined]
        with pytest.raises(DataError, match=r"'labels' lists the classes .* data\.map\(.*range\(3\)"):
            source_of(data)


def test_a_cache_that_cannot_be_written_is_named(photos: Path) -> None:
    Path("cache").write_text("")
    frame = pandas.DataFrame({"image": sorted(map(str, photos.rglob("*.jpg"))), "label": [*"ababab"]})
    for data in (frame, (IMAGES, LABELS)):
        with pytest.raises(StorageError, match="cache"):
            source_of(data)


def test_several_labels_are_vectors() -> None:
    with Records.open(source_of((IMAGES, np.array([[1, 1, 0]] * 6)))) as records:
        assert records.labels.tolist() == [[1, 1, 0]] * 6


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((IMAGES.astype(float), LABELS), "image 0 of the arrays: .* values from 0 to 25.*; they must be from 0 to 1"),
        ((IMAGES / 127.5 - 1, LABELS), "undo the normalisation"),
        ((IMAGES.astype(np.uint16) * 257, LABELS), r"257\)\.astype\('uint8'\)"),
        ((IMAGES.astype(object), LABELS), r"the type object; give image\.astype"),
        ((IMAGES.reshape(6, -1), LABELS), r"the shape \(324,\); it must be height x width"),
        ((IMAGES[..., :2], LABELS), "with 1, 3 or 4 channels"),
        ((IMAGES, LABELS[:5]), "6 images and 5 labels"),
        ((IMAGES, [0, None, 1, 2, 0, 1]), "a label of the arrays is None"),
        ((IMAGES, LABELS - 1), "label -1"),
        (IMAGES, "pairs of an image and a label"),
        ([], "nothing in it"),
        ((["a.jpg", "b.jpg", "c.jpg"], None), "pairs of an image and a label"),
        ({}, "name it with path_column="),
        (pandas.DataFrame({0: ["a.jpg"], 1: ["a"]}), "columns 0, 1 none is called like 'path'"),
        (DataLoader(Pairs()), r"its \.dataset"),  # type: ignore[arg-type]
        ({"train": pandas.DataFrame({"a": [1]})}, r"data\['train'\], and val= another"),
        (pandas.DataFrame({"pic": list(IMAGES), "label": LABELS}), "name it with path_column="),
        (pandas.DataFrame({"image": ["a.jpg"], "kind": ["a"]}), "name it with label_column="),
    ],
)
def test_what_cannot_be_right_is_refused(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        source_of(data)


def test_images_to_predict_need_no_labels(photos: Path) -> None:
    paths = [str(path) for path in photos.rglob("*.jpg")]
    assert [image for image, _ in images_of(pandas.DataFrame({"image": paths})) or ()] == paths
    assert images_of(paths) is images_of("photos") is images_of(b"") is None
    for data, count in ((IMAGES, 6), (IMAGES[..., 0], 6), (IMAGES[0], 1), (Pairs(), 6), (CHANNELS_FIRST[0], 1)):
        assert len(images_of(data) or ()) == count


@pytest.mark.parametrize("as_text", [False, True])
def test_classes_name_the_numbers_of_a_table_of_paths_and_give_their_order(photos: Path, as_text: bool) -> None:
    names, paths = ["dog", "cat"], sorted(map(str, photos.rglob("*.jpg")))
    labels = [Path(path).parts[1] if as_text else names.index(Path(path).parts[1]) for path in paths]
    for data in (pandas.DataFrame({"path": paths, "label": labels}), list(zip(paths, labels, strict=True))):
        recipe = st.default_recipe(data, model="mlp", classes=names)
        sets, recipe_classes = open_data(recipe.data, seed=0), recipe.data.classes
        assert sets.train.classes == ("dog", "cat") and sorted(sets.train.labels.tolist()) == [0] * 3 + [1] * 3
    columns = pandas.DataFrame({"path": paths, "classes": [1, 0, 1, 0, 1, 0]})  # which is no class list
    recipe = st.default_recipe(columns, model="mlp", label_column="classes")
    assert open_data(recipe.data, seed=0).train.labels.tolist() == [1, 0, 1, 0, 1, 0]
    given: Any = np.array(names)
    assert st.default_recipe(list(zip(paths, labels, strict=True)), classes=given).data.classes == recipe_classes
    with pytest.raises(DataError, match="classes= names 'cat' twice"):
        st.default_recipe(columns, classes=["cat", "dog", "cat"])
    with pytest.raises(DataError, match="a label of the dataframe is 2, and there are 2 classes: dog, cat"):
        st.default_recipe(pandas.DataFrame({"path": paths, "label": [2] * 6}), classes=names)
