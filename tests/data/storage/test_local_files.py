"""Reads of local files: what passes is tried again with a fresh open, what stays is told as the system's error."""

from __future__ import annotations

import errno
import os
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from tests.data.packing.pictures import write_folder
from tests.data.storage.faults import PASSING, Faults

from steadytrain.data.packing.pack import pack
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.sources.listing import Piece, read_file, read_piece
from steadytrain.data.sources.unpacked import Unpacked
from steadytrain.data.storage.local_files import read_patiently
from steadytrain.errors import StorageError


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_an_error_that_passes_costs_nothing(number: int, tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(b"some bytes")
    for count in (1, 4):
        faults.fail(path, number, count)
        assert read_file(str(path)) == b"some bytes"
        faults.fail(path, number, count)
        assert read_piece(Piece(str(path), 5, 5)) == b"bytes"
    assert not faults.waiting


def test_a_part_of_a_file_is_not_taken_for_all_of_it(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(b"some bytes")
    faults.give_part(path, 2)
    assert read_file(str(path)) == b"some bytes"
    faults.give_part(path, 1)
    assert read_piece(Piece(str(path), 0, 10)) == b"some bytes"


def test_an_error_that_stays_names_its_number_its_file_and_what_to_do(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(b"some bytes")
    faults.fail(path, errno.ESTALE, 99)
    with pytest.raises(
        StorageError, match=rf"{path}: .*\(ESTALE, {errno.ESTALE}\), in 6 tries.*the same command resum"
    ):
        read_file(str(path))


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    tries = []

    def read() -> None:
        tries.append(1)
        raise TimeoutError

    with pytest.raises(StorageError, match=r"cannot read x: TimeoutError"):
        read_patiently(read, "x")
    assert pauses == sorted(pauses) and 5 < sum(pauses) < 60 and len(tries) == len(pauses) + 1


def test_permanent_errors_of_a_file_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    for number in (errno.ENOENT, errno.EACCES, errno.ELOOP, errno.ENOTDIR):

        def read(number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with pytest.raises(OSError, match=os.strerror(number)):
            read_patiently(read, "x")


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_packing_leaves_nothing_out_for_an_error_that_passes(number: int, tmp_path: Path, faults: Faults) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 5, "dog": 4})
    for path in list(photos.rglob("*.png"))[::3]:
        faults.fail(path, number, 2)
    [packed] = pack(photos, tmp_path / "out")
    assert packed.card.num_images == 9 and not packed.card.rejected


def test_packing_ends_with_an_error_that_stays_and_goes_on_when_it_has_passed(tmp_path: Path, faults: Faults) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 5, "dog": 4})
    [whole] = pack(photos, tmp_path / "whole")
    faults.fail(photos / "dog" / "0007.png", errno.EIO, 6)
    with pytest.raises(StorageError, match=r"0007\.png.*EIO, 5"):
        pack(photos, tmp_path / "out", max_bad=9)
    assert not (tmp_path / "out.rec").exists()
    [packed] = pack(photos, tmp_path / "out")
    assert packed.card.digest == whole.card.digest


def test_a_cached_copy_is_whole_or_there_is_none(tmp_path: Path, faults: Faults) -> None:
    photos, cache = write_folder(tmp_path / "photos", {"cat": 5, "dog": 4}), tmp_path / "cache"
    faults.fail(photos / "cat" / "0001.png", errno.ESTALE, 6)
    with pytest.raises(StorageError, match=r"0001\.png.*ESTALE"):
        prepare(photos, cache=cache, say=lambda _: None)
    assert not [path for path in (cache / "packed").iterdir() if path.is_dir()]
    faults.fail(photos / "cat" / "0001.png", errno.ESTALE, 1)
    assert prepare(photos, cache=cache, say=lambda _: None).train.with_suffix(".lst").read_text().count("\n") == 9


def test_classes_are_found_where_the_file_system_reports_no_entry_types(tmp_path: Path, faults: Faults) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 3, "dog": 3, "zebra": 3})
    faults.fail_scan(photos, errno.ESTALE, 1)
    [packed] = pack(photos, tmp_path / "out")
    assert packed.card.classes == ("cat", "dog", "zebra")


def test_a_member_of_an_archive_is_tried_again(tmp_path: Path, faults: Faults) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 3, "dog": 3})
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(photos, "photos")
    with Unpacked.open(tmp_path / "photos.tar") as images:
        whole = [images.image(number) for number in range(6)]
    with Unpacked.open(tmp_path / "photos.tar") as images:
        faults.fail(tmp_path / "photos.tar", errno.EIO, 2)
        assert [images.image(number) for number in range(6)] == whole
    assert not faults.waiting


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["photos.tar", "photos.tar.gz", "photos.zip"])
def test_archives_are_listed_and_decompressed_whole_or_not_at_all(
    name: str, number: int, tmp_path: Path, faults: Faults
) -> None:
    photos, archive = write_folder(tmp_path / "photos", {"cat": 3, "dog": 3}), tmp_path / name
    if name.endswith("zip"):
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in photos.rglob("*.png"):
                file.write(path, path.relative_to(tmp_path))
    else:
        with tarfile.open(archive, "w:gz" if name.endswith("gz") else "w") as tar:
            tar.add(photos, "photos")
    for order in (faults.fail, faults.fail_reads):
        order(archive, number, 4)
        [packed] = pack(archive, tmp_path / "out", force=True)
        assert packed.card.num_images == 6 and not faults.waiting
        order(archive, number, 6)
        with pytest.raises(StorageError, match=f"cannot read {archive}: .*the same command resumes"):
            pack(archive, tmp_path / "out", force=True)
