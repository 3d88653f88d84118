"""The bytes of batches: images, labels, ids and positions for fixed seeds, wherever and by whomever they are made."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.seams.frozen import Frozen
from tests.seams.images import write_marks, write_photos
from tests.seams.product import BlockShuffle, Crop, ImageLoader, ImageLoaderDataset, Unpacked

import steadytrain as st

SMALL = Crop(kind="pad-crop", size=8, pad=2, flip=True, channels=1)
LARGE = Crop(kind="resized-crop", size=24, flip=True)
CROPS = {
    "resized-crop": LARGE,
    "bicubic": Crop(kind="resized-crop", size=20, area=(0.3, 0.9), flip=True, interpolation="bicubic"),
    "none": Crop(kind="none", size=24, crop=0.875),
    "grey": Crop(kind="resized-crop", size=16, channels=1),
    "pad-crop": Crop(kind="pad-crop", size=28, pad=4, flip=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    """A folder with photos/ and marks/, and the packs of both."""
    root = tmp_path_factory.mktemp("batches")
    st.pack(write_photos(root / "photos", golden / "images"), root / "photos", encoding="pass")
    st.pack(write_marks(root / "marks", 60), root / "marks")
    return root


@pytest.fixture(scope="module")
def photos(folders: Path) -> Iterator[Any]:
    with st.Records.open(folders / "photos.rec") as records:
        yield records


@pytest.fixture(scope="module")
def marks(folders: Path) -> Iterator[Any]:
    with st.Records.open(folders / "marks.rec") as records:
        yield records


def stream(batches: Iterable[Any]) -> str:
    """The digest of all samples, in order, whatever the size of the batches."""
    whole = list(batches)
    digest = hashlib.sha256()
    for part in ("images", "labels", "ids", "positions"):
        joined = np.concatenate([getattr(batch, part) for batch in whole])
        digest.update(f"{part} {joined.dtype} {joined.shape}".encode() + joined.tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", CROPS)
def test_batches_of_every_crop(name: str, photos: Any, frozen: Frozen) -> None:
    frozen(f"batches/{name}", stream(ImageLoader(photos, CROPS[name], batch_size=6, stop=240, seed=3, threads=2)))


def test_threads_a_child_process_and_the_size_of_batches_change_no_byte(
    photos: Any, marks: Any, frozen: Frozen
) -> None:
    for name, source, crop in (("photos", photos, LARGE), ("marks", marks, SMALL)):
        whole = stream(ImageLoader(source, crop, batch_size=40, stop=160, seed=7, threads=1))
        frozen(f"batches/{name}", whole)
        assert stream(ImageLoader(source, crop, batch_size=8, stop=160, seed=7, threads=3, keep_bytes=0)) == whole
        with ImageLoader(source, crop, batch_size=16, stop=160, seed=7, threads=2, place="process") as loader:
            assert stream(loader) == whole


def test_a_loader_that_starts_later_gives_the_rest(marks: Any) -> None:
    def loader(start: int) -> Any:
        return ImageLoader(marks, SMALL, batch_size=10, start=start, stop=180, seed=1, threads=2)

    rest = [batch for batch in loader(0) if batch.positions[0] >= 70]
    assert stream(loader(70)) == stream(rest)


def test_the_shares_of_ranks_together_are_the_whole(marks: Any, frozen: Frozen) -> None:
    options: dict[str, Any] = {"stop": 144, "seed": 5, "threads": 1}
    whole = ImageLoader(marks, SMALL, batch_size=12, **options)
    frozen("batches/whole", stream(whole))
    turns = [ImageLoader(marks, SMALL, batch_size=12, shard=(rank, 3), **options) for rank in range(3)]
    assert stream(batch for batches in zip(*turns, strict=True) for batch in batches) == stream(whole)
    shares = [(0, 4), (4, 6), (10, 2)]
    parts = [ImageLoader(marks, SMALL, batch_size=size, share=(first, 12), **options) for first, size in shares]
    assert stream(batch for batches in zip(*parts, strict=True) for batch in batches) == stream(whole)


def test_evaluation_has_an_order_of_its_own(photos: Any, folders: Path, frozen: Frozen) -> None:
    crop = Crop(kind="none", size=20, crop=0.9)
    frozen("batches/evaluation", stream(ImageLoader(photos, crop, batch_size=5, train=False, threads=2)))
    chosen = np.array([9, 2, 4, 11])
    frozen("batches/chosen", stream(ImageLoader(photos, crop, batch_size=3, train=False, ids=chosen)))
    with ImageLoader(photos, crop, batch_size=5, train=False, threads=2, place="process") as loader:
        first = stream(loader)
        assert first == stream(loader) == stream(ImageLoader(photos, crop, batch_size=7, train=False, threads=1))


def test_blocks_shuffle_in_stretches(marks: Any, frozen: Frozen) -> None:
    blocks = BlockShuffle(size=4, window=3)
    frozen("batches/blocks", stream(ImageLoader(marks, SMALL, batch_size=12, stop=120, seed=5, blocks=blocks)))


def test_images_that_are_not_packed_give_the_batches_of_their_pack(folders: Path, photos: Any, frozen: Frozen) -> None:
    options: dict[str, Any] = {"batch_size": 6, "stop": 36, "seed": 3, "threads": 2}
    with Unpacked.open(folders / "photos") as source:
        upright = np.array([number for number in range(len(source)) if "turned" not in source.name(number)])
        frozen("batches/unpacked", stream(ImageLoader(source, LARGE, **options)))
        messages = stream(ImageLoader(source, LARGE, ids=upright, **options))
    assert messages == stream(ImageLoader(photos, LARGE, ids=upright, **options))


def test_a_dataset_for_pytorch_gives_the_same_tensors_and_goes_on(marks: Any, frozen: Frozen) -> None:
    whole = list(ImageLoader(marks, SMALL, batch_size=12, stop=168, seed=5, threads=1))
    dataset = ImageLoaderDataset(marks, SMALL, batch_size=12, steps=10, seed=5, threads=1)
    pairs = []
    for pair in dataset:
        pairs.append(pair)
        if len(pairs) == 4:
            break
    frozen("batches/state", dataset.state_dict())
    pairs += list(dataset)
    dataset.close()
    assert len(pairs) == len(whole)
    for (images, labels), batch in zip(pairs, whole, strict=True):
        assert np.array_equal(images.numpy(), batch.images.transpose(0, 3, 1, 2))
        assert np.array_equal(labels.numpy(), batch.labels)


def test_what_cannot_be_decoded_is_told_and_replaced(folders: Path, tmp_path: Path, frozen: Frozen) -> None:
    content = (folders / "photos.rec").read_bytes()
    jpeg = content.index(b"\xff\xd8\xff")
    (tmp_path / "photos.rec").write_bytes(content[: jpeg + 4] + b"\0" * 600 + content[jpeg + 604 :])
    (tmp_path / "photos.idx").write_bytes((folders / "photos.idx").read_bytes())
    values: list[Any] = []
    with st.Records.open(tmp_path / "photos.rec") as records:
        loader = ImageLoader(records, LARGE, batch_size=8, stop=64, seed=2, threads=1, on_bad=values.append)
        frozen("batches/damaged", stream(loader))
    frozen("batches/damaged said", sorted({bad.id for bad in values}))
