"""What is written of a damaged file: its index as MXNet would, its sound records byte for byte, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.checking.test_records import PNGS
from tests.data.packing.pictures import write_folder
from tests.data.recordio.damage import Original, labelled, made_of, read_original

from steadytrain.data.checking.records import examine_records
from steadytrain.data.checking.salvage import salvage, write_index
from steadytrain.data.packing.pack import PackedFile, pack
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, StorageError

READ = """
import hashlib, json, sys
import mxnet as mx
file = mx.recordio.MXIndexedRecordIO(sys.argv[1][:-4] + ".idx", sys.argv[1], "r")
told = [[key, *map(float, mx.recordio.unpack(file.read_idx(key))[0][:3])] for key in file.keys]
batches = mx.io.ImageRecordIter(path_imgrec=sys.argv[1], path_imgidx=sys.argv[1][:-4] + ".idx", data_shape=(3, 32, 32),
                                batch_size=1, preprocess_threads=1)
print("TOLD" + json.dumps([told, [float(batch.label[0].asnumpy()[0]) for batch in batches]]))
"""


@pytest.fixture(scope="module")
def cifar(data_folder: Path) -> Path:
    return data_folder / "mxnet-rec" / "im2rec" / "cifar120.rec"


def _salvage(data: bytes, folder: Path) -> PackedFile:
    """Write a damaged file, and salvage it over what was salvaged before."""
    (folder / "damaged.rec").write_bytes(data)
    return salvage(examine_records(folder / "damaged.rec", workers=0), folder / "whole.rec", force=True, workers=0)


def _framed(path: Path) -> list[bytes]:
    original = read_original(path)
    return [original.framed(number) for number in range(original.num)]


@pytest.mark.parametrize("name", ["cifar120", "photos40"])
def test_a_lost_index_is_written_as_mxnet_wrote_it(data_folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(data_folder / "mxnet-rec" / "im2rec" / f"{name}.rec", tmp_path / "a.rec")
    written = write_index(examine_records(tmp_path / "a.rec", workers=0))
    assert written == tmp_path / "a.idx"
    assert written.read_bytes() == (data_folder / "mxnet-rec" / "im2rec" / f"{name}.idx").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.idx", "a.rec"}


def test_a_good_index_stays_unless_forced_and_a_wrong_one_goes(tmp_path: Path) -> None:
    [(path, _)] = pack(write_folder(tmp_path / "data", {"a": 3, "b": 3}), tmp_path / "a")
    index = path.with_suffix(".idx")
    right = index.read_text()
    by_number = "".join(f"{n + 7}\t{line.split()[1]}\n" for n, line in enumerate(right.splitlines()))
    index.write_text(by_number)
    assert write_index(examine_records(path, workers=0)) is None
    assert index.read_text() == by_number
    assert write_index(examine_records(path, workers=0), force=True) == index
    assert index.read_text() == right
    index.write_text(right.replace("\t0\n", "\t4\n"))
    assert write_index(examine_records(path, workers=0)) == index
    assert index.read_text() == right


def test_ids_that_are_not_unique_are_replaced_by_numbers_as_keys(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(made_of(*(labelled(0, png, id=5) for png in PNGS[:3])).data)
    index = write_index(examine_records(tmp_path / "a.rec", workers=0))
    assert index is not None
    assert [line.split("\t")[0] for line in index.read_text().splitlines()] == ["0", "1", "2"]


def test_the_index_of_a_damaged_file_names_what_is_left(cifar: Path, tmp_path: Path) -> None:
    original = read_original(cifar)
    (tmp_path / "a.rec").write_bytes(original.with_bytes(original.offsets[7], b"\0"))
    assert write_index(examine_records(tmp_path / "a.rec", workers=0))
    with Records.open(tmp_path / "a.rec") as records:
        assert len(records) == 119


def test_file_without_records_to_index_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(bytes(99))
    with pytest.raises(DataError, match="holds no image records"):
        write_index(examine_records(tmp_path / "a.rec", workers=0))


def test_an_index_that_cannot_be_written_leaves_nothing(read_only_disk: Path, tmp_path: Path) -> None:
    examined = examine_records(_made(tmp_path), workers=0)
    shutil.rmtree(tmp_path / "made")
    (tmp_path / "made").symlink_to(read_only_disk)
    with pytest.raises(StorageError, match="is not writable"):
        write_index(examined)


def _made(folder: Path) -> Path:
    (folder / "made").mkdir()
    path = folder / "made" / "a.rec"
    path.write_bytes(made_of(*(labelled(n % 2, png, id=n) for n, png in enumerate(PNGS))).data)
    return path


def test_salvage_keeps_every_sound_record_byte_for_byte_and_says_what_was_lost(cifar: Path, tmp_path: Path) -> None:
    original = read_original(cifar)
    data = bytearray(original.data)
    data[original.offsets[3]] ^= 1  # a magic
    image = slice(original.offsets[50] + 40, original.offsets[51])
    data[image] = bytes(image.stop - image.start)
    done = _salvage(bytes(data[:-9]), tmp_path)
    numbers = [n for n in range(119) if n not in (3, 50)]
    assert _framed(done.path) == [original.framed(n) for n in numbers]
    keys = [line.split("\t")[0] for line in cifar.with_suffix(".idx").read_text().splitlines()]
    written = [line.split("\t")[0] for line in done.path.with_suffix(".idx").read_text().splitlines()]
    assert written == [keys[n] for n in numbers]
    assert [piece.name for piece in done.card.rejected] == [
        f"byte {original.offsets[119]:,} (id {keys[119]})",
        f"byte {original.offsets[3]:,} (id {keys[3]})",
        f"record 49 (id {keys[50]})",
    ]
    assert "cut short" in done.card.rejected[0].reason


@pytest.mark.usefixtures("in_children")
def test_salvaged_file_is_fine_and_has_a_card_like_packing_writes(tmp_path: Path) -> None:
    [(path, before)] = pack(write_folder(tmp_path / "data", {"cat": 15, "dog": 14}), tmp_path / "a")
    examined = examine_records(path, workers=0)
    card = salvage(examined, tmp_path / "b.rec", workers=2).card
    # Nothing was lost: all that follows from the records is the same.
    same = ("classes", "counts", "num_images", "height", "width", "channels", "mean", "std", "stats_images", "by_class")
    assert {name: getattr(card, name) for name in same} == {name: getattr(before, name) for name in same}
    assert (card.digest, card.spots, card.encodings) == (before.digest, before.spots, before.encodings)
    assert not card.rejected
    assert Card.from_json((tmp_path / "b.json").read_text()) == card
    report = examine_records(tmp_path / "b.rec", workers=0).report
    assert not report.findings.counts


def test_detection_records_are_salvaged_as_they_are(data_folder: Path, tmp_path: Path) -> None:
    original = read_original(data_folder / "mxnet-rec" / "benz_det" / "train.rec")
    done = _salvage(original.with_bytes(original.offsets[5], b"\0"), tmp_path)
    assert _framed(done.path) == original.untouched(original.offsets[5], original.offsets[5] + 1)
    assert (done.card.classes, done.card.label_width) == ((), 9)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_single_damage_there_is_untouched_records_are_salvaged(tmp_path: Path, data: st.DataObject) -> None:
    original: Original = made_of(*(labelled(n % 3, PNGS[n], id=n) for n in range(12)))
    at = data.draw(st.integers(0, len(original.data) - 1))
    cut = data.draw(st.integers(0, 2000))
    value = data.draw(st.integers(0, 255))
    damaged = original.without(at, at + cut) if cut else original.with_bytes(at, bytes([value]))
    untouched = original.untouched(at, at + max(cut, 1))
    if not untouched:
        return
    kept = _framed(_salvage(damaged, tmp_path).path)
    assert [record for record in kept if record in untouched] == untouched
    assert len(kept) <= len(untouched) + 2  # at most the damaged ones as well, where they can still be decoded


def test_damaged_file_and_existing_files_are_not_overwritten(cifar: Path, tmp_path: Path) -> None:
    shutil.copy(cifar, tmp_path / "a.rec")
    examined = examine_records(tmp_path / "a.rec", workers=0)
    with pytest.raises(DataError, match="the damaged file itself"):
        salvage(examined, tmp_path / "a.rec", force=True)
    (tmp_path / "b.rec").write_text("mine")
    with pytest.raises(DataError, match=r"b\.rec exists .* or give --force"):
        salvage(examined, tmp_path / "b.rec")
    assert (tmp_path / "b.rec").read_text() == "mine"


def test_a_file_without_a_sound_record_leaves_no_file(data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no sound record"):
        salvage(examine_records(data_folder / "mxnet-rec" / "im2rec" / "odd.rec", workers=0), tmp_path / "b.rec")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("decode", [True, False])
def test_without_decoding_every_framed_record_is_salvaged(tmp_path: Path, decode: bool) -> None:
    (tmp_path / "a.rec").write_bytes(made_of(labelled(0, PNGS[0]), labelled(1, b"<html>", id=1)).data)
    done = salvage(examine_records(tmp_path / "a.rec", workers=0, decode=decode), tmp_path / "b.rec", workers=0)
    assert done.card.num_images == (1 if decode else 2)


@pytest.mark.peer
def test_mxnet_reads_salvaged_records(cifar: Path, mxnet_python: str, tmp_path: Path) -> None:
    original = read_original(cifar)
    done = _salvage(original.without(original.offsets[60] + 50, original.offsets[60] + 57), tmp_path)
    variables = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE"}
    process = subprocess.run(
        [mxnet_python, "-c", READ, str(done.path)], env=variables, capture_output=True, text=True, check=True
    )
    records, labels = json.loads(process.stdout.split("TOLD")[1])
    with Records.open(done.path) as ours:
        assert [record[:1] + record[2:] for record in records] == [
            [id_, label, id_] for id_, label in zip(ours.record_ids.tolist(), ours.labels.tolist(), strict=True)
        ]
        assert labels == ours.labels.tolist()
    assert len(records) == 119
