"""The works of the benchmark of feeds: the same images as files, records and tar files, and what is done with them.

``originals``
    200 ImageNet originals of about 110 kB, one of a class, as they came.
``packed``
    Those packed by steadytrain at 256 pixels, quality 95 (about 44 kB); the packed JPEGs are everybody's files.
``cifar10``
    CIFAR-10's 50,000 training images as PNG.

Each original stands sixteen times in its class, under as many names, so that an epoch takes seconds and not a moment.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import machine
from steadytrain.data.images import encode
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records

COPIES = 16
SHARDS = 8
AHEAD = 4  # batches made ahead by everyone
SAME = 100.0  # decibels that stand for the same bytes
SIZE, RESIZE, PAD = 224, 256, 4
ARCHIVES = {
    "originals": "imagenet-sample-200.tar",
    "packed": "imagenet-sample-200.tar",
    "cifar10": "cifar10-png.tar.zst",
}


@dataclass(frozen=True)
class Work:
    """One data set in all its forms.

    Args:
        name: one of ``ARCHIVES``.
        files, records, shards: the same bytes, as a folder of classes, as records, and as tar files.
        marked: records of the same pixels with restart markers, added without decoding; None: that cannot be had.
    """

    name: str
    files: Path
    records: Path
    shards: list[Path]
    marked: Path | None

    @property
    def is_small(self) -> bool:
        """Return whether its images are small, and are kept in memory."""
        return self.name == "cifar10"

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that are measured."""
        return ("train",) if self.is_small else ("train", "evaluate")

    @property
    def num_images(self) -> int:
        """In an epoch."""
        return sum(1 for folder in self.classes for _ in folder.iterdir())

    @property
    def classes(self) -> list[Path]:
        """Its folders, in the order of their labels."""
        return sorted(path for path in self.files.iterdir() if path.is_dir())

    def job(self, phase: str, cores: int, setting: dict[str, Any]) -> dict[str, Any]:
        """Return the job of a contender."""
        small = self.is_small
        records = self.marked if setting.get("marked") and self.marked else self.records
        return {
            "files": str(self.files),
            "records": str(records),
            "index": str(records.with_suffix(".idx")),
            "shards": [str(shard) for shard in self.shards],
            "classes": len(self.classes),
            "kind": "pad" if small else "crop",
            "train": phase == "train",
            "size": 32 if small else SIZE,
            "resize": 32 if small else RESIZE,
            "pad": PAD,
            "batch_size": 128 if small else 64,
            "ahead": AHEAD,
            "cores": cores,
            "setting": setting,
        }


def make(name: str, data: Path, out: Path) -> Work:
    """Unpack, pack, and write the tar files.

    Args:
        name: ``originals``, ``packed`` or ``cifar10``.
        data: the folder that holds its archive.
        out: where to, a folder of this work's own.
    """
    archive = data / ARCHIVES[name]
    files = _cifar10(archive, out) if name == "cifar10" else _originals(archive, out / "originals")
    settings: dict[str, Any] = {"encoding": "pass"}
    if name == "packed":
        settings = {"encoding": "jpg", "shorter_side": RESIZE, "quality": 95}
    records = pack(files, out / "set.rec", **settings)[0].path
    if name == "packed":
        files = files_of(records, out / "packed")
    return Work(
        name, files, records, _tars(files, out / "shards"), _marked(files, out) if name == "originals" else None
    )


def psnr(images: NDArray[np.uint8], work: Work) -> float:
    """Return how near the first image of each class, uint8[n, 224, 224, 3], comes to Pillow's evaluation, in decibels.

    Peers round the longer side and half pixels of the centre either way: of these squares the nearest is compared with.
    ``SAME`` is the most that is told.
    """
    pairs = zip(images, work.classes, strict=True)
    error = np.mean([min(_error(image, other) for other in _evaluated(min(home.iterdir()))) for image, home in pairs])
    return float(min(SAME, 10 * np.log10(255**2 / error))) if error else SAME


def _error(image: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    return float(np.mean((image.astype(np.float32) - other) ** 2))


def _evaluated(path: Path) -> Iterator[NDArray[np.uint8]]:
    image = Image.open(path).convert("RGB")
    scale = RESIZE / min(image.size)
    for rounded in (math.floor, math.ceil):
        sides = tuple(rounded(round(side * scale, 6)) for side in image.size)
        resized = np.asarray(image.resize((sides[0], sides[1]), Image.Resampling.BILINEAR))
        tops, lefts = ({(side - SIZE) // 2, (side - SIZE + 1) // 2} for side in resized.shape[:2])
        yield from (resized[top : top + SIZE, left : left + SIZE] for top in tops for left in lefts)


def _originals(archive: Path, out: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(out / "once", filter="data")
    for number, path in enumerate(sorted((out / "once").rglob("*.JPEG"))):
        _copies(path, out / "files" / f"{number:03}")
    return out / "files"


def _copies(path: Path, home: Path) -> None:
    home.mkdir(parents=True)
    for copy in range(COPIES):
        (home / f"{copy:02}.jpg").hardlink_to(path)


def _marked(files: Path, out: Path) -> Path | None:
    """Write the files with restart markers, where the native decoder is there, which adds them."""
    if encode.native is None:
        return None
    return pack(files, out / "marked.rec", mark_kept=True)[0].path


def files_of(records: Path, out: Path) -> Path:
    """Write the packed images as files."""
    with Records.open(records) as opened:
        for number, label in enumerate(opened.labels.tolist()):
            home = out / f"{label:03}"
            home.mkdir(parents=True, exist_ok=True)
            (home / f"{number:06}.jpg").write_bytes(opened.image(number))
    return out


def _cifar10(archive: Path, out: Path) -> Path:
    return machine.unpacked(archive, out / "files") / "train"


def _tars(files: Path, out: Path) -> list[Path]:
    """Write the files as WebDataset's shards, dealt out in turn."""
    out.mkdir()
    samples = list(_samples(files))
    paths = [out / f"set-{number}.tar" for number in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for number, (file, label) in list(enumerate(samples))[shard::SHARDS]:
                _add(tar, f"{number:06}{file.suffix}", file.read_bytes())
                _add(tar, f"{number:06}.cls", str(label).encode())
    return paths


def _samples(files: Path) -> Iterator[tuple[Path, int]]:
    for label, folder in enumerate(sorted(path for path in files.iterdir() if path.is_dir())):
        yield from ((path, label) for path in sorted(folder.iterdir()))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
