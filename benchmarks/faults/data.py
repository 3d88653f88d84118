"""The data of the runs, packed once: CIFAR-10 as bare pixels, and photographs, as they came and made smaller."""

from __future__ import annotations

import subprocess
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import machine
from steadytrain.data.packing.pack import pack

TRAIN_IMAGES, VAL_IMAGES, TEST_IMAGES = 5_000, 250, 5_000
COPIES, CLASSES = 4, 10  # of each photograph, so that an epoch takes seconds; dealt out to so many classes
SMALL_SIDE = 160


def make(archives: Path, out: Path) -> dict[str, Path]:
    """Unpack and pack what is not there yet; names -> record files.

    ``cifar``, ``cifar_val`` (a few) and ``cifar_test`` (many): 32 pixels, nothing to decode; ``photos``: JPEGs of 160
    pixels on the shorter side; ``originals``: the same as they came, about
    500 x 375; ``cifar_bare``: the records of ``cifar`` alone, without card and index.

    Args:
        archives: the folder that holds cifar10-png.tar.zst and imagenet-sample-200.tar.
        out: where to.
    """
    if not (out / "files").exists():
        part = out / "files.part"
        _unpack_cifar(archives / "cifar10-png.tar.zst", part)
        _unpack_photos(archives / "imagenet-sample-200.tar", part)
        part.rename(out / "files")
    files = out / "files"
    names = ("cifar", "cifar_val", "cifar_test")
    packed = {name: _packed(files / name, out / f"{name}.rec", encoding="raw") for name in names}
    packed["originals"] = _packed(files / "photos", out / "originals.rec", encoding="pass")
    packed["photos"] = _packed(files / "photos", out / "photos.rec", shorter_side=SMALL_SIDE)
    packed["cifar_bare"] = out / "bare" / "cifar.rec"
    if not packed["cifar_bare"].exists():
        _write(packed["cifar_bare"], packed["cifar"].read_bytes())
    return packed


def packed_again(source: Path, flags: Sequence[str]) -> Path:
    """Pack records again with these flags of ``steady pack``, as a verdict may advise."""
    out = source.with_name("-".join([source.stem, *(flag.removeprefix("--") for flag in flags)]))
    if not out.with_suffix(".rec").exists():
        subprocess.run(
            [*machine.STEADY, "pack", str(source), str(out), *flags],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return out.with_suffix(".rec")


def _packed(files: Path, record: Path, **settings: object) -> Path:
    return record if record.exists() else pack(files, record, **settings)[0].path  # type: ignore[arg-type]


def _unpack_cifar(archive: Path, out: Path) -> None:
    limits = {"cifar": ("train", TRAIN_IMAGES), "cifar_val": ("test", VAL_IMAGES), "cifar_test": ("test", TEST_IMAGES)}
    with machine.opened(archive) as tar:
        _deal(tar, limits, out)


def _deal(tar: tarfile.TarFile, limits: dict[str, tuple[str, int]], out: Path) -> None:
    """Link the first images of each class into each set of their split, up to so many."""
    seen: Counter[tuple[str, str]] = Counter()
    for member in tar:
        if not member.isfile():
            continue
        part, kind, file = Path(member.name).parts[-3:]
        content = tar.extractfile(member).read()  # type: ignore[union-attr]
        for name, (split, images) in limits.items():
            if part == split and seen[part, kind] < images // 10:
                _write(out / name / kind / file, content)
        seen[part, kind] += 1


def _unpack_photos(archive: Path, out: Path) -> None:
    with tarfile.open(archive) as tar:
        members = sorted((m for m in tar if m.name.endswith(".JPEG")), key=lambda m: m.name)
        for number, member in enumerate(members):
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            for copy in range(COPIES):
                _write(out / "photos" / str(number % CLASSES) / f"{number:03}-{copy}.jpg", content)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
