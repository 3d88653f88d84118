"""Record files from a data set's name: its files are fetched, its split is read, and the images are packed.

Nothing is unpacked. Images are read where they lie in their archive, and what lists them is read into memory, within
limits: a name in an archive never becomes a path. Arrays (STL-10, SVHN) become a tar of PNG files first.
"""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.fetching.catalogue import DataSet, find_data_set
from steadytrain.data.fetching.download import download, mirror_urls
from steadytrain.data.images.encode import Encoding, PackSettings
from steadytrain.data.packing.pack import PackedFile, PackRequest, mute, pack_request
from steadytrain.data.recordio.card import Card, card_path
from steadytrain.data.sources.archives import TAR_ERRORS
from steadytrain.data.sources.select import Selection
from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.errors import DataError, RunError, storage_errors
from steadytrain.files import lock_at_once, open_lock, replacing
from steadytrain.format import Say, size

MAX_LIST_BYTES = 64 << 20  # bytes of a file that lists images
MAX_ARRAY_BYTES = 1 << 30
MAX_INNER_BYTES = 4 << 30
MAX_MEMBERS = 2_000_000
MAX_STREAM_BYTES = 64 << 30

ImageRow = tuple[str, str, str]
"""An image's path in its archive, its class, and its split."""


class FetchProgress(NamedTuple):
    """Callbacks for progress: bytes of a file so far and of all, images packed so far and of all.

    The name of the file is empty once all are there.
    """

    fetched: Callable[[str, int, int], object] = lambda name, done, total: None
    packed: Callable[[int, int], object] = lambda done, total: None


def fetch(
    name: str,
    folder: str | Path,
    *,
    mirrors: Sequence[str] = (),
    shorter_side: int | None = None,
    workers: int | None = None,
    force: bool = False,
    advance: FetchProgress | None = None,
    say: Say = mute,
) -> list[PackedFile]:
    """Fetch a data set and pack it into ``FOLDER/NAME-train.rec``, ``-val.rec`` and, where it has one, ``-test.rec``.

    What is there is not fetched again; a call that was killed goes on, to the same bytes.

    Args:
        name: of the catalogue.
        folder: made if it is not there; the files as they came lie in its ``downloads/NAME``.
        mirrors: addresses of folders that have the files, tried first.
        shorter_side: scale larger images down to so many pixels on their shorter side.
        force: pack again over what is there.

    Raises:
        InputError: no such data set, or a mirror that is no address.
        FailedError: a file could not be fetched, with the reasons of each place.
        DataError: a file is not what it should be.
        StorageError: no room, or the folder cannot be written.
    """
    data_set, advance = find_data_set(name), advance or FetchProgress()
    folder = Path(folder)
    out = folder / f"{data_set.name}.rec"
    mirror_urls(mirrors, ""), PackSettings(shorter_side=shorter_side)  # refused before a folder is made
    if not force and (packed := _already(folder, data_set)):
        say(f"{packed[0].path} is there: nothing to do (--force packs it again)")
        return packed
    downloads = folder / "downloads" / data_set.name
    with storage_errors(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
        lock = open_lock(downloads / ".lock")
    with lock:
        if not lock_at_once(lock):
            raise RunError(f"another process is fetching into {downloads}: wait for it, or choose another folder")
        paths, left = {}, data_set.bytes
        for file in data_set.files:
            left -= file.bytes
            paths[file.name] = download(
                file,
                downloads,
                mirrors=mirrors,
                progress=lambda done, file=file: advance.fetched(file.name, done, file.bytes),  # type: ignore[misc]
                say=say,
                room_bytes=left + data_set.bytes,
            )
        advance.fetched("", 0, 0)
        if data_set.clutter:
            say(
                f"left out: {data_set.clutter}, {data_set.clutter_images:,} images of none of the"
                f" {data_set.classes} classes, which no classifier can get right (steady pack keeps them)"
            )
        with scratch_beside(folder / f"{data_set.name}-lists") as scratch:
            selection = Selection(
                exclude=[data_set.clutter] if data_set.clutter else [],
                train_per_class=data_set.train_per_class,
                val_fraction=data_set.val_fraction,
                test_validates=not data_set.has_test,
            )
            encoding: Encoding = "png" if data_set.layout in ("stl10", "svhn") else "auto"  # their pixels, without loss
            request = PackRequest(
                sources=(str(_source(data_set, downloads, paths)),),
                labels=_split_table(data_set, paths, scratch),
                selection=selection,
                settings=PackSettings(encoding=encoding, shorter_side=shorter_side),
            )
            return pack_request(request, out, workers=workers, force=force, progress=advance.packed, say=say)


def _already(folder: Path, data_set: DataSet) -> list[PackedFile]:
    """Return the record files that are there, whole with their cards; nothing where one of them is not."""
    files = []
    splits = ("train", "val", "test") if data_set.has_test else ("train", "val")
    for split in splits:
        path = folder / f"{data_set.name}-{split}.rec"
        try:
            card = Card.from_json(card_path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, DataError):
            continue
        if path.exists() and path.stat().st_size == card.bytes:
            files.append(PackedFile(path, card))
    return files if len(files) == len(splits) else []


def _source(data_set: DataSet, downloads: Path, paths: Mapping[str, Path]) -> Path:
    """Return what is packed: an archive as it came, one from within another, a folder of files, or a tar of arrays."""
    first = paths[data_set.files[0].name]
    match data_set.layout:
        case "files":
            return downloads
        case "inner":
            return _write_once(downloads / data_set.inner, lambda target: _take_out(first, data_set.inner, target))
        case "stl10":
            return _write_once(downloads / "stl10.tar", lambda target: _write_pictures(_stl10(first), target))
        case "svhn":
            return _write_once(downloads / "svhn.tar", lambda target: _write_pictures(_svhn(paths), target))
    return first


def _write_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Write a file, whole or not at all, unless it is there."""
    if not target.exists():
        with replacing(target) as part:
            write(part)
    return target


def _take_out(archive: Path, name: str, target: Path) -> None:
    """Copy the member of a zip that is called ``name``, wherever it lies in it, within limits, to ``target``."""
    try:
        with zipfile.ZipFile(archive) as outer:
            info = next((info for info in outer.infolist() if info.filename.rpartition("/")[2] == name), None)
            if info is None or info.file_size > MAX_INNER_BYTES:
                raise DataError(f"{archive} holds no {name}, or one of more than {size(MAX_INNER_BYTES)}")
            with outer.open(info) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(f"{archive} is damaged ({error}): delete it, and run the same command again") from error


def _read_members(archive: Path, names: Iterable[str], limit: int = MAX_LIST_BYTES) -> dict[str, bytes]:
    """Read files of a tar into memory, by the ends of their names; the tar is read once, and nothing is unpacked.

    Raises:
        DataError: it is damaged, lacks one of them, or exceeds the limits of an archive.
    """
    missing, contents = set(names), dict[str, bytes]()
    try:
        with tarfile.open(archive, mode="r|*") as tar:
            for number, member in enumerate(tar):
                if number > MAX_MEMBERS or member.offset > MAX_STREAM_BYTES:
                    raise DataError(f"{archive} has more than {MAX_MEMBERS:,} members or {size(MAX_STREAM_BYTES)}")
                name = next((end for end in missing if f"/{member.name}".endswith(f"/{end}")), None)
                if name is None or not member.isfile():
                    continue
                if member.size > limit or (source := tar.extractfile(member)) is None:
                    raise DataError(f"{archive}: {name} has {size(member.size)}, more than {size(limit)}")
                contents[name] = source.read()
                missing.remove(name)
                if not missing:
                    return contents
    except DataError:
        raise
    except (*TAR_ERRORS, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive} is damaged ({error}): delete it, and run the same command again") from error
    raise DataError(f"{archive} holds no {', '.join(sorted(missing))}: it is another file than it should be")


def _split_table(data_set: DataSet, paths: Mapping[str, Path], scratch: Path) -> Path | None:
    """Write the table of a data set whose split is in lists of its own; None for one whose folders tell it."""
    if (read := _LISTS.get(data_set.layout)) is None:
        return None
    table = scratch / f"{data_set.name}.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        writer.writerows(read(paths))
    return table


def _lines(data: bytes) -> list[str]:
    return [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]


def _pets(paths: Mapping[str, Path]) -> Iterator[ImageRow]:
    """``Abyssinian_100 1 1 1``: the breed is the name without its number."""
    lists = _read_members(paths["annotations.tar.gz"], ["trainval.txt", "test.txt"])
    for split, name in (("train", "trainval.txt"), ("val", "test.txt")):
        for line in _lines(lists[name]):
            if not line.startswith("#"):
                image = line.split()[0]
                yield f"images/{image}.jpg", image.rpartition("_")[0], split


def _list_of_each_split(
    archive: str, lists: Mapping[str, str], image: str, paths: Mapping[str, Path]
) -> Iterator[ImageRow]:
    """``apple_pie/1005649``: what ``image`` is formatted with, behind its class."""
    texts = _read_members(paths[archive], lists.values())
    for split, name in lists.items():
        for line in _lines(texts[name]):
            yield image.format(line.strip()), line.partition("/")[0], split


def _cub200(paths: Mapping[str, Path]) -> Iterator[ImageRow]:
    """``1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg``, and ``1 0``: is it to train with?"""
    lists = _read_members(paths["CUB_200_2011.tgz"], ["CUB_200_2011/images.txt", "CUB_200_2011/train_test_split.txt"])
    is_training = dict(line.split() for line in _lines(lists["CUB_200_2011/train_test_split.txt"]))
    for line in _lines(lists["CUB_200_2011/images.txt"]):
        number, image = line.split()
        yield f"CUB_200_2011/images/{image}", image.partition("/")[0], "train" if is_training[number] == "1" else "val"


def _flowers102(paths: Mapping[str, Path]) -> Iterator[ImageRow]:
    labels = np.atleast_1d(_matlab(paths["imagelabels.mat"])["labels"]).ravel()
    ids = _matlab(paths["setid.mat"])
    for split, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid")):
        for number in np.atleast_1d(ids[key]).ravel().tolist():
            yield f"jpg/image_{int(number):05d}.jpg", f"{int(labels[int(number) - 1]):03d}", split


_FOOD101 = {"train": "meta/train.txt", "val": "meta/test.txt"}
_DTD = {"train": "labels/train1.txt", "val": "labels/val1.txt", "test": "labels/test1.txt"}
_LISTS: Mapping[str, Callable[[Mapping[str, Path]], Iterator[ImageRow]]] = {
    "pets": _pets,
    "food101": partial(_list_of_each_split, "food-101.tar.gz", _FOOD101, "food-101/images/{}.jpg"),
    "cub200": _cub200,
    "dtd": partial(_list_of_each_split, "dtd-r1.0.1.tar.gz", _DTD, "dtd/images/{}"),
    "flowers102": _flowers102,
}


def _matlab(path: Path) -> Mapping[str, Any]:
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError:
        raise DataError(
            f"{path.name} is a MATLAB file, which scipy reads: pip install 'steadytrain[imagenet]', and run the same"
            " command again"
        ) from None
    try:
        read: Mapping[str, Any] = loadmat(path)
    except Exception as error:
        raise DataError(f"{path} cannot be used: it is damaged, or no MATLAB file ({error})") from error
    return read


ImageArrays = tuple[str, Sequence[str], NDArray[np.uint8], NDArray[np.int64]]
"""A split, the names of the classes, its images [N, H, W, 3] and its labels [N]."""


def _stl10(archive: Path) -> Iterator[ImageArrays]:
    """Images as columns of planes: 3 x 96 x 96 bytes, each plane turned over; labels from 1."""
    names = ["class_names.txt", "train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin"]
    members = _read_members(archive, [f"stl10_binary/{name}" for name in names], MAX_ARRAY_BYTES)
    classes = _lines(members["stl10_binary/class_names.txt"])
    for split, part in (("train", "train"), ("val", "test")):
        data = np.frombuffer(members[f"stl10_binary/{part}_X.bin"], np.uint8)
        labels = np.frombuffer(members[f"stl10_binary/{part}_y.bin"], np.uint8)
        if len(data) != len(labels) * 3 * 96 * 96 or (
            len(labels) and not 1 <= labels.min() <= labels.max() <= len(classes)
        ):
            raise DataError(f"{archive}: {part}_X.bin and {part}_y.bin do not belong together")
        yield split, classes, data.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1), labels.astype(np.int64) - 1


def _svhn(paths: Mapping[str, Path]) -> Iterator[ImageArrays]:
    """Images [32, 32, 3, N]; the label of the digit 0 is 10."""
    for split, name in (("train", "train_32x32.mat"), ("val", "test_32x32.mat")):
        document = _matlab(paths[name])
        images, labels = np.asarray(document["X"]), np.asarray(document["y"]).ravel()
        if images.ndim != 4 or images.dtype != np.uint8 or images.shape[3] != len(labels):
            raise DataError(f"{paths[name]} does not hold images of bytes with a label each")
        yield split, [str(digit) for digit in range(10)], images.transpose(3, 0, 1, 2), labels.astype(np.int64) % 10


def _write_pictures(parts: Iterable[ImageArrays], target: Path) -> None:
    """Write arrays as a tar of PNG files, ``train/CLASS/00001.png``: the same bytes each time."""
    with tarfile.open(target, "w") as tar:
        for split, classes, images, labels in parts:
            for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True), 1):
                data = io.BytesIO()
                Image.fromarray(np.ascontiguousarray(image)).save(data, "PNG", compress_level=1)
                member = tarfile.TarInfo(f"{split}/{classes[label]}/{number:06}.png")
                member.size = data.tell()
                data.seek(0)
                tar.addfile(member, data)
