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

from steadytrain.data.packing.memory import images_of, source_of
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError

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
def test_paths_are_not_copied(photos: Path, make: Callable[[Any], Any]) -> None:
    paths = [str(path) for path in sorted(photos.rglob("*.jpg"))]
    said: list[str] = []
    table = pandas.DataFrame({"image": paths, "species": ["cat"] * 3 + ["dog"] * 3})
    data = make(table)
    path = Path(source_of(data, say=said.append))
    assert path.suffix == ".csv" and f"{Path(paths[0]).absolute()},cat" in path.read_text()
    assert any("transform" in line for line in said) == (getattr(data, "transform", None) is np.asarray)


def test_a_transform_is_named_and_not_applied() -> None:
    said: list[str] = []
    data = FakeData(4, (3, 8, 8), 2, transform=lambda image: torch.zeros(3, 8, 8))
    with Records.open(source_of(data, say=said.append)) as records:
        assert np.asarray(Image.open(io.BytesIO(records.image(0)))).std() > 1
    assert "the transform of the FakeData is not applied" in said[0] and "transforms=" in said[0]
    assert data.transform is not None


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
