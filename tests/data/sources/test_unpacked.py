"""Sources read where they lie: the same images, labels, classes and names as packing makes of them."""

from __future__ import annotations

import errno
import os
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.packing.odd_files import encoded
from tests.data.packing.pictures import picture, write_folder
from tests.data.sources.samples import write_tar

from steadytrain.data.images.decode import BadImageError, decode
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.unpacked import Unpacked
from steadytrain.errors import DataError, StorageError

CLASSES = {"cat": 5, "dog": 4, "emu": 3}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def as_folder(photos: Path, at: Path) -> Path:
    return photos


def as_tar(photos: Path, at: Path) -> Path:
    with tarfile.open(at / "photos.tar", "w") as tar:
        tar.add(photos, "photos")
    return at / "photos.tar"


def as_tar_gz(photos: Path, at: Path) -> Path:
    with tarfile.open(at / "photos.tar.gz", "w:gz") as tar:
        tar.add(photos, "photos")
    return at / "photos.tar.gz"


def as_zip(photos: Path, at: Path) -> Path:
    with zipfile.ZipFile(at / "photos.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(photos.rglob("*.png")):
            file.write(path, path.relative_to(photos.parent))
    return at / "photos.zip"


def as_list(photos: Path, at: Path) -> Path:
    paths = sorted(photos.rglob("*.png"))
    lines = [f"{100 + n}\t{n % 2}\t{path.relative_to(photos)}" for n, path in enumerate(paths)]
    (photos / "photos.lst").write_text("\n".join(lines) + "\n")
    return photos / "photos.lst"


def as_shards(photos: Path, at: Path) -> str:
    paths = sorted(photos.rglob("*.png"))
    for shard in range(2):
        members = {}
        for n, path in enumerate(paths[shard::2]):
            members[f"{shard}{n:04d}.png"] = path.read_bytes()
            members[f"{shard}{n:04d}.cls"] = str(sorted(CLASSES).index(path.parent.name)).encode()
        write_tar(at / f"s-{shard:05d}.tar", members)
    return str(at / "s-{00000..00001}.tar")


KINDS = [as_folder, as_tar, as_tar_gz, as_zip, as_list, as_shards]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
def test_all_is_as_in_a_pack_of_it(tmp_path: Path, kind: Callable[[Path, Path], object]) -> None:
    source = kind(write_folder(tmp_path / "photos", CLASSES), tmp_path)
    pack(str(source), tmp_path / "set", workers=1)
    with Records.open(tmp_path / "set.rec") as packed, Unpacked.open(str(source), say=lambda _: None) as unpacked:
        assert len(unpacked) == len(packed) == 12
        assert np.array_equal(unpacked.labels, packed.labels)
        assert unpacked.classes == packed.classes
        assert np.array_equal(unpacked.record_ids, packed.record_ids)
        for number in range(12):
            assert unpacked.image(number) == bytes(packed.image(number))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[3:])
def test_image_bytes_lie_at_the_stated_offsets(tmp_path: Path, kind: Callable[[Path, Path], object]) -> None:
    source = kind(write_folder(tmp_path / "photos", CLASSES), tmp_path)
    with Unpacked.open(str(source), say=lambda _: None) as unpacked:
        places = unpacked.extents(np.array([7, 2]))
        for row, number in enumerate([7, 2]):
            data = Path(places.paths[places.file[row]]).read_bytes()
            part = data[places.offset[row] : places.offset[row] + places.size[row]]
            assert kind is as_zip or part == unpacked.image(number)


def test_decompressed_files_go_when_the_source_is_closed(tmp_path: Path, cache: Path) -> None:
    messages: list[str] = []
    unpacked = Unpacked.open(as_tar_gz(write_folder(tmp_path / "photos", CLASSES), tmp_path), say=messages.append)
    assert any("decompressing" in line for line in messages)
    assert [path for path in cache.rglob("*") if path.is_file()]
    unpacked.close()
    unpacked.close()
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_folder_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "file"))
    with Unpacked.open(write_folder(tmp_path / "photos", CLASSES)) as unpacked:
        assert len(unpacked) == 12


def test_each_split_of_a_source_is_opened_by_its_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos" / "train", {"cat": 2, "dog": 3})
    write_folder(tmp_path / "photos" / "val", {"cat": 1, "dog": 1})
    with Unpacked.open(tmp_path / "photos") as train, Unpacked.open(tmp_path / "photos", split="val") as val:
        assert (len(train), len(val), train.classes) == (5, 2, val.classes)
        assert val.name(1).startswith("val/dog/")
    with pytest.raises(DataError, match="no part for test: it has train and val"):
        Unpacked.open(tmp_path / "photos", split="test")


def test_another_process_reads_on_its_own(tmp_path: Path) -> None:
    with Unpacked.open(as_tar(write_folder(tmp_path / "photos", CLASSES), tmp_path)) as unpacked:
        unpacked.image(0)
        copy: Unpacked = pickle.loads(pickle.dumps(unpacked))
        with copy:
            assert [copy.image(n) for n in range(12)] == [unpacked.image(n) for n in range(12)]


def test_many_shards_and_many_threads(tmp_path: Path) -> None:
    images = [encoded(picture(n, (8, 8))) for n in range(148)]
    for n, image in enumerate(images):
        write_tar(tmp_path / f"s-{n:05d}.tar", {f"{n}.jpg": image, f"{n}.cls": str(n % 2).encode()})
    before = num_open()
    wrong: list[int] = []
    with Unpacked.open(str(tmp_path / "s-*.tar")) as unpacked:

        def read() -> None:
            wrong.extend(n for n in range(len(images)) if unpacked.image(n) != images[n])

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert num_open() == before


def num_open() -> int:
    """Files that this process holds open, where the system tells."""
    held = Path("/proc/self/fd")
    return len(list(held.iterdir())) if held.exists() else 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_what_lies_on_its_side_comes_out_upright(tmp_path: Path, orientation: int, kind: str) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 1, "dog": 1})
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = photos / "cat" / "0000.png"
    file.write_bytes(encoded(kind=kind, exif=exif.tobytes()))
    with Unpacked.open(photos) as unpacked:
        data = unpacked.image(0)
    assert np.array_equal(np.asarray(decode(data)), np.asarray(decode(file.read_bytes())))
    assert (data == file.read_bytes()) == (orientation == 1)


def test_an_image_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 2, "dog": 1})
    with Unpacked.open(photos) as unpacked:
        (photos / unpacked.listing.names[0]).unlink()
        with pytest.raises(BadImageError, match="no such file"):
            unpacked.image(0)
        with pytest.raises(IndexError, match="which has 3"):
            unpacked.image(3)
    tar = as_tar(write_folder(tmp_path / "others", CLASSES), tmp_path)
    with Unpacked.open(tar) as unpacked:
        os.truncate(tar, 2000)
        with pytest.raises(BadImageError, match="cut short"):
            unpacked.image(11)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_of_a_zip_is_refused_as_packing_refuses_it(tmp_path: Path, method: int) -> None:
    image = encoded(picture(1, (40, 30)), "BMP")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w", method) as file:
        for name in ("cat/1.bmp", "cat/2.bmp", "dog/1.bmp", "dog/2.bmp"):
            file.writestr(name, image)
    with Unpacked.open(tmp_path / "photos.zip") as unpacked:
        piece = unpacked.listing.places(1, 2)[0]
        assert not isinstance(piece, str)
        with (tmp_path / "photos.zip").open("r+b") as archive:
            archive.seek(piece.offset + piece.size - 9)
            archive.write(b"\x5a")
        for _ in range(2):
            assert unpacked.image(0) == image
            with pytest.raises(BadImageError, match="damaged"):
                unpacked.image(1)
    (packed,) = pack(tmp_path / "photos.zip", tmp_path / "set")
    assert [(file.name, "damaged" in file.reason) for file in packed.card.rejected] == [("cat/2.bmp", True)]


def test_a_disk_without_room_is_said_where_an_archive_is_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = as_tar_gz(write_folder(tmp_path / "photos", {"cat": 2, "dog": 2}), tmp_path)

    def full(path: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("steadytrain.data.sources.archives.shutil.disk_usage", full)
    with pytest.raises(StorageError):
        Unpacked.open(source)
