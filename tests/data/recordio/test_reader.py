"""Record files as their readers see them: ours, MXNet's, and those found in the wild."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.data.packing.pictures import write_folder
from tests.data.storage.faults import PASSING, Faults

from steadytrain.data.images.encode import to_ppm
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.framing import MAGIC, pack_header
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import DataError, StorageError

PICTURE = to_ppm(np.zeros((4, 4, 3), np.uint8))
LETTERS = [chr(ord("a") + i).encode() * (i + 1) for i in range(26)]


def _write(path: Path, payloads: list[bytes], labels: list[int] | None = None, card: Card | None = None) -> Path:
    with RecordWriter(path) as writer:
        for i, payload in enumerate(payloads):
            writer.write(pack_header(labels[i] if labels else i, id=i) + payload, key=i)
        if card is not None:
            values = {**json.loads(card.to_json()), "bytes": writer.num_bytes, "digest": writer.digest}
            del values["checksum"]
            writer.companions[".json"] = json.dumps(values)
    return path


def test_what_mxnet_wrote_is_read_to_the_byte(data_folder: Path) -> None:
    folder = data_folder / "mxnet-rec" / "im2rec"
    truth = json.loads((folder / "odd.json").read_text())
    with Records.open(folder / "odd.rec") as records:  # its .json is no card, and is not taken for one
        digests = [bytes(records.image(i)).hex() for i in range(len(truth["payloads_hex"]))]
        assert digests == truth["payloads_hex"]
        with pytest.raises(DataError, match="1 to 3 labels"):
            _ = records.labels


@pytest.mark.parametrize(("name", "classes"), [("cifar120", ("airplane", "cat", "ship")), ("photos40", ("a", "b"))])
def test_ids_and_labels_are_those_of_the_list_that_mxnet_packed(
    data_folder: Path, name: str, classes: tuple[str, ...]
) -> None:
    path = data_folder / "mxnet-rec" / "im2rec" / f"{name}.rec"
    lines = [line.split("\t") for line in path.with_suffix(".lst").read_text().splitlines()]
    with Records.open(path) as records:
        assert records.record_ids.tolist() == [int(index) for index, _, _ in lines]
        assert records.labels.tolist() == [float(label) for _, label, _ in lines]
        assert records.labels.dtype == np.int64
        assert records.classes == classes  # the folders in the list beside it
        assert records.card is None
        assert records.channels == 3
        assert records.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_detection_labels_found_in_the_wild_are_vectors(data_folder: Path) -> None:
    with Records.open(data_folder / "mxnet-rec" / "benz_det" / "train.rec") as records:
        assert records.labels.dtype == np.float32
        assert records.labels.shape == (12, 9)
        assert records.labels[0, :4].tolist() == [4, 5, 780, 438]
        assert records.classes == ()


def test_a_file_without_an_index_found_in_the_wild_opens(data_folder: Path) -> None:
    with Records.open(data_folder / "mxnet-rec" / "ai_fit" / "validation.rec") as records:
        assert len(records) == 98
        assert records.record_ids.tolist() == list(range(98))
        assert all(bytes(records.image(i)[:2]) == b"\xff\xd8" for i in range(98))


def test_a_file_with_nothing_in_it_found_in_the_wild_says_what_it_is(data_folder: Path) -> None:
    with pytest.raises(DataError, match=r"Git LFS pointer.*git lfs pull"):
        Records.open(data_folder / "mxnet-rec" / "empty" / "validation.rec")


@pytest.mark.parametrize("name", ["odd", "cifar120", "photos40"])
def test_scanning_finds_what_the_index_says(data_folder: Path, tmp_path: Path, name: str) -> None:
    source = data_folder / "mxnet-rec" / "im2rec" / f"{name}.rec"
    shutil.copy(source, tmp_path / "bare.rec")
    with Records.open(source) as indexed, Records.open(tmp_path / "bare.rec") as scanned:
        assert len(scanned) == len(indexed)
        assert all(scanned.image(i) == indexed.image(i) for i in range(len(indexed)))


def test_images_outlive_the_reader(tmp_path: Path) -> None:
    with Records.open(_write(tmp_path / "a.rec", LETTERS)) as records:
        image = records.image(2)
        assert image.readonly
    assert bytes(image) == b"ccc"
    with pytest.raises(DataError, match="closed"):
        records.image(2)
    records.close()


def test_records_in_parts_are_put_together(tmp_path: Path) -> None:
    payload = b"1234" + MAGIC.to_bytes(4, "little") * 2 + b"5"
    with Records.open(_write(tmp_path / "a.rec", [b"x", payload])) as records:
        assert bytes(records.image(1)) == payload
        assert records.labels.tolist() == [0, 1]


@pytest.mark.parametrize("indexed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_million_records_take_tens_of_megabytes(tmp_path: Path, indexed: bool) -> None:
    n = 1_280_000
    table = np.zeros(
        n, [("magic", "<u4"), ("size", "<u4"), ("flag", "<u4"), ("label", "<f4"), ("id", "<u8"), ("id2", "<u8")]
    )
    table["magic"], table["size"], table["label"], table["id"] = MAGIC, 24, np.arange(n) % 1000, np.arange(n)[::-1]
    table.tofile(tmp_path / "a.rec")
    if indexed:
        (tmp_path / "a.idx").write_text("".join([f"{key}\t{32 * key}\n" for key in range(n)]))
    before = _own_memory()
    with Records.open(tmp_path / "a.rec") as records:
        assert records.labels.shape == (n,)
        assert records.labels[1234567] == 567
        assert records.record_ids[0] == n - 1
        assert len(records.image(n - 1)) == 0
        assert _own_memory() - before < 120e6


def _own_memory() -> int:
    """Bytes of this process that no file backs."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def test_numbers_outside_are_refused(tmp_path: Path) -> None:
    with Records.open(_write(tmp_path / "a.rec", LETTERS)) as records:
        for number in (-1, 26):
            with pytest.raises(IndexError, match="which has 26"):
                records.image(number)


def test_labels_cannot_be_changed_by_one_of_their_readers(tmp_path: Path) -> None:
    with Records.open(_write(tmp_path / "a.rec", LETTERS)) as records, pytest.raises(ValueError, match="read-only"):
        records.labels[0] = 7


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    payloads = [i.to_bytes(4, "little") * (i % 97 + 1) for i in range(2000)]
    with Records.open(_write(tmp_path / "a.rec", payloads)) as records, ThreadPoolExecutor(8) as threads:
        order = np.random.default_rng(0).permutation(2000).tolist() * 5
        assert all(threads.map(lambda i: bytes(records.image(i)) == payloads[i], order))


Labelled = tuple[float | list[float], bytes]


def _faces(*, width: int = 1, num_identities: int = 3) -> list[Labelled]:
    """Records as sets of faces have them: two images of each identity; of labels behind the first one nobody knows."""
    n = 2 * num_identities
    images: list[Labelled] = [
        (k % num_identities if width == 1 else [k % num_identities, 0.5], b"x%d" % k) for k in range(n)
    ]
    ends = [[1.0 + 2 * k, 3.0 + 2 * k] for k in range(num_identities)]
    return [([n + 1.0, n + 1.0 + num_identities], b""), *images, *((end, b"") for end in ends)]


def _write_labelled(path: Path, records: list[Labelled]) -> Path:
    with RecordWriter(path) as writer:
        for i, (label, image) in enumerate(records):
            writer.write(pack_header(label, id=i) + image, key=i)
    return path


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("width", [1, 2])
def test_records_about_identities_are_skipped_and_counted(width: int, indexed: bool, tmp_path: Path) -> None:
    path = _write_labelled(tmp_path / "faces.rec", _faces(width=width))
    if not indexed:
        path.with_suffix(".idx").unlink()
    remarks: list[str] = []
    with Records.open(path) as records:
        assert [bytes(records.image(n)) for n in range(len(records))] == [b"x%d" % n for n in range(6)]
        assert records.labels.tolist() == [0, 1, 2, 0, 1, 2] and records.classes == ("0", "1", "2")
        assert records.record_ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert records.describe(0) == f"record 1 of {path}" and records.number("faces.rec", 6) == 5
        assert records.places(np.array([5])) == [("", "faces.rec", 6)]
        with pytest.raises(IndexError):
            records.number("faces.rec", 0)
    real = [(label, PICTURE if image else b"") for label, image in _faces(width=width)]
    with Records.open(_write_labelled(tmp_path / "real.rec", real)) as records:
        records.require_images(remarks.append)
    [remark] = remarks
    assert "4 records have labels and no picture (as in sets of faces" in remark
    assert ("the first of 2 labels is the class" in remark) is (width == 2)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_picture_that_is_missing_does_not_make_several_labels_one(lost: int, tmp_path: Path) -> None:
    labels: list[Labelled] = [([1.0, 1.0], b"a"), ([0.0, 1.0], b"b"), ([1.0, 1.0], b"c")]
    labels[lost] = (labels[lost][0], b"")
    with Records.open(_write_labelled(tmp_path / "a.rec", labels)) as records:
        assert len(records) == 2 and records.labels.shape == (2, 2)


def test_labels_whose_noise_is_that_of_floats_are_class_numbers(tmp_path: Path) -> None:
    labels: list[Labelled] = [(0.0, b"a"), (1.0000001, b"b"), (1.999999, b"c"), (-1e-7, b"d")]
    with Records.open(_write_labelled(tmp_path / "a.rec", labels)) as records:
        assert records.labels.tolist() == [0, 1, 2, 0] and records.labels.dtype == np.int64
    with Records.open(_write_labelled(tmp_path / "b.rec", [*labels, (1.001, b"e")])) as records:
        assert records.labels.dtype == np.float32


def test_labels_that_cannot_be_used_name_the_command_that_names_them(tmp_path: Path) -> None:
    path = _write_labelled(tmp_path / "a b.rec", [(0.0, b"a"), ([1.0, 0.0], b"b")])
    with Records.open(path) as records, pytest.raises(DataError, match=r"1 to 2 labels.*: steady check '.*a b\.rec'"):
        _ = records.labels


def test_a_tfrecord_by_this_name_is_named_for_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train.rec"
    path.write_bytes((90).to_bytes(8, "little") + bytes(4) + b"\xff\xd8\xff" + bytes(87) + bytes(4))
    with pytest.raises(DataError, match=r"this is a TFRecord file .*: write its images to a folder"):
        Records.open(path)


def test_labels_that_are_no_class_numbers_stay_numbers(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for i, label in enumerate([0.5, 2.0, -1.0]):
            writer.write(pack_header(label, id=i), key=i)
    with Records.open(tmp_path / "a.rec") as records:
        assert records.labels.tolist() == [[0.5], [2.0], [-1.0]]
        assert records.classes == ()


def test_a_label_beyond_all_reason_makes_no_million_classes(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.rec", [b"", b""], labels=[0, 2**24])
    with Records.open(path) as records, pytest.raises(DataError, match="labels run up to 16,777,216"):
        _ = records.classes


def test_a_card_tells_labels_ids_classes_and_digest(tmp_path: Path) -> None:
    card = Card(classes=("cat", "dog", "elk"), counts=(2, 0, 1), num_images=3, channels=1, by_class=True)
    with Records.open(_write(tmp_path / "a.rec", LETTERS[:3], labels=[0, 0, 2], card=card)) as records:
        assert records.labels.tolist() == [0, 0, 2]
        assert records.record_ids.tolist() == [0, 1, 2]
        assert records.classes == ("cat", "dog", "elk")
        assert records.channels == 1
        assert records.digest == hashlib.sha256(records.path.read_bytes()).hexdigest()


def test_a_card_of_other_records_is_found_out(tmp_path: Path) -> None:
    card = Card(classes=("cat", "dog"), counts=(2, 1), num_images=3, by_class=True)
    swapped = _write(tmp_path / "swapped.rec", LETTERS[:3], labels=[0, 1, 1], card=card)
    with pytest.raises(DataError, match=r"swapped\.rec: its labels are not those of its card"):
        Records.open(swapped)
    longer = _write(tmp_path / "longer.rec", LETTERS[:3], labels=[0, 0, 1], card=card)
    with longer.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=r"longer\.json does not describe longer\.rec"):
        Records.open(longer)


def test_an_index_of_another_file_is_found_out(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.rec", LETTERS)
    _write(tmp_path / "b.rec", LETTERS[::-1])
    shutil.copy(tmp_path / "b.idx", tmp_path / "a.idx")
    with pytest.raises(DataError, match=r"a\.idx does not fit a\.rec.*--index writes it again"):
        Records.open(path)
    (tmp_path / "a.idx").unlink()
    assert len(Records.open(path)) == 26


@pytest.mark.parametrize("lost", [0, 12, 25])
def test_an_index_that_lacks_a_record_is_refused(tmp_path: Path, lost: int) -> None:
    path = _write(tmp_path / "a.rec", LETTERS)
    index = tmp_path / "a.idx"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    place = int(lines[lost].split()[1])
    with (
        Records.open(path) as records,
        pytest.raises(DataError, match=f"begins at byte {place:,} is not in its index of 25"),
    ):
        _ = records.labels
    index.unlink()
    with Records.open(path) as records:
        assert len(records.labels) == 26


def test_an_index_of_blank_lines_is_as_good_as_none(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.rec", LETTERS)
    path.with_suffix(".idx").write_text("\n\n")
    with Records.open(path) as records:
        assert len(records) == 26


def test_labels_beyond_the_classes_of_the_card_are_refused(tmp_path: Path) -> None:
    card = Card(classes=("a", "b"), counts=(1, 2), num_images=3)
    path = _write(tmp_path / "a.rec", LETTERS[:3], labels=[0, 1, 2], card=card)
    with Records.open(path) as records, pytest.raises(DataError, match=r"a\.rec has label 2, its card lists 2 classes"):
        _ = records.labels


def test_images_without_a_header_have_no_say_in_channels_and_sides(tmp_path: Path) -> None:
    grey, too_large = b"P5 3 2 255\n" + bytes(6), b"P6 50000 50000 255\n"
    with Records.open(_write(tmp_path / "a.rec", [b"no image", grey, too_large])) as records:
        assert (records.channels, records.largest_side) == (1, 3)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, indexed: bool) -> None:
    path = _write(tmp_path / "a.rec", LETTERS)
    path.write_bytes(path.read_bytes()[:-20])
    if not indexed:
        path.with_suffix(".idx").unlink()
    with pytest.raises(DataError, match=r"a\.rec.*cut short"):
        Records.open(path)


def test_damage_in_the_middle_is_named_by_its_record(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.rec", [bytes(64)] * 5000)
    damaged = bytearray(path.read_bytes())
    damaged[96 * 4321] ^= 0xFF
    path.write_bytes(damaged)
    with Records.open(path) as records, pytest.raises(DataError, match=r"record 4321 of .* is damaged"):
        records.image(4321)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"PK\3\4 a zip", "not a record file"), (b"\n", "not a record file")],
)
def test_files_that_are_none_say_so(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.rec").write_bytes(content)
    with pytest.raises(DataError, match=message):
        Records.open(tmp_path / "a.rec")


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*a\.rec"):
        Records.open(tmp_path / "a.rec")


def test_a_folder_is_no_record_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        Records.open(tmp_path)


def test_card_of_another_file_of_the_same_size_is_refused(tmp_path: Path) -> None:
    sources = [write_folder(tmp_path / name, {"a": 9, "b": 9}, size=(300, 200), suffix=".ppm") for name in ("x", "y")]
    for path in sources[1].glob("*/*"):
        data = path.read_bytes()
        path.write_bytes(data[:15] + data[:14:-1])  # turned round, behind its header
    (one, _), (two, _) = (
        pack(source, source.with_name(f"{source.name}.rec"), encoding="pass")[0] for source in sources
    )
    assert one.stat().st_size == two.stat().st_size
    one.write_bytes(two.read_bytes())
    with pytest.raises(DataError, match="it is not the file that its card describes"):
        Records.open(one)


def test_an_index_that_names_a_record_twice_is_refused(tmp_path: Path) -> None:
    path = pack(write_folder(tmp_path / "photos", {"a": 3, "b": 3}), tmp_path / "a")[0].path
    lines = path.with_suffix(".idx").read_text().splitlines()
    path.with_suffix(".idx").write_text("\n".join([*lines[:-1], lines[0]]) + "\n")
    with pytest.raises(DataError, match=r"a\.idx names a record twice: .*--index writes it again"):
        Records.open(path)


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_read_error_that_passes_costs_no_record(number: int, tmp_path: Path, faults: Faults) -> None:
    path = _write(tmp_path / "a.rec", LETTERS)
    with Records.open(path) as records:
        for i, letters in enumerate(LETTERS):
            faults.fail(path, number, i % 5)
            assert bytes(records.image(i)) == letters


@pytest.mark.parametrize("suffix", [".rec", ".json"])
def test_records_are_opened_whole_or_not_at_all(suffix: str, tmp_path: Path, faults: Faults) -> None:
    path = pack(write_folder(tmp_path / "photos", {"cat": 3, "dog": 2}), tmp_path / "a")[0].path
    faults.fail(path.with_suffix(suffix), errno.ESTALE, 3)
    with Records.open(path) as records:
        assert records.classes == ("cat", "dog") and len(records) == 5 and not faults.waiting
    faults.fail(path.with_suffix(suffix), errno.ESTALE, 6)
    with pytest.raises(StorageError, match=rf"a\{suffix}: .*\(ESTALE, {errno.ESTALE}\)"):
        Records.open(path)


@pytest.mark.parametrize("size", [1, 20_000])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_read_error_while_headers_are_read_costs_no_record(
    size: int, indexed: bool, tmp_path: Path, faults: Faults
) -> None:
    path = _write(tmp_path / "a.rec", [letter * size for letter in LETTERS[:9]])
    if not indexed:
        path.with_suffix(".idx").unlink()
    faults.fail_once_open(path, errno.EIO, 3)
    with Records.open(path) as records:
        assert records.labels.tolist() == records.record_ids.tolist() == list(range(9)) and not faults.waiting
    faults.fail_once_open(path, errno.EIO, 99)
    with pytest.raises(StorageError, match=rf"a\.rec: .*\(EIO, {errno.EIO}\)"):
        Records.open(path)


def test_a_read_error_that_stays_is_no_damaged_record(tmp_path: Path, faults: Faults) -> None:
    path = _write(tmp_path / "a.rec", LETTERS)
    with Records.open(path) as records:
        faults.fail(path, errno.EIO, 99)
        with pytest.raises(StorageError, match=r"a\.rec: .*\(EIO, 5\).*the same command resumes"):
            records.image(3)
        faults.fail(path, errno.EIO, 0)
        assert bytes(records.image(3)) == b"dddd"


@pytest.mark.parametrize("becomes", ["removed", "replaced"])
def test_records_that_are_others_after_a_read_error_are_not_mixed(becomes: str, tmp_path: Path, faults: Faults) -> None:
    path = _write(tmp_path / "a.rec", LETTERS)
    with Records.open(path) as records:
        assert bytes(records.image(1)) == b"bb"
        if becomes == "removed":
            path.unlink()
        else:
            (tmp_path / "other.rec").write_bytes(path.read_bytes().replace(b"bb", b"xx"))
            (tmp_path / "other.rec").replace(path)
        old = tmp_path / ("a.rec (deleted)")
        faults.fail(old, errno.ESTALE, 1)  # by the name that the system gives a file without one
        with pytest.raises(StorageError, match=rf"{path} .*(put it back|was replaced).* run the same command again"):
            records.image(1)


def test_large_images_are_read_whole(tmp_path: Path) -> None:
    large = os.urandom(9 << 20)
    with Records.open(_write(tmp_path / "a.rec", [b"x", large, b"y"])) as records:
        assert records.image(1) == large and bytes(records.image(2)) == b"y"


def test_reading_heads_ahead_survives_a_truncated_file(tmp_path: Path) -> None:
    for shard in range(2):
        with RecordWriter(tmp_path / f"part-{shard}.rec") as writer:
            for number in range(5):
                writer.write(pack_header(0, id=number) + b"x" * 5000, key=number)
    with Records.open(tmp_path / "part-*.rec") as records:
        records.settle(np.array([9, 0, 4, 5, 9]))
        records.settle(np.array([], dtype=np.int64))
        os.truncate(tmp_path / "part-1.rec", 100)
        records.settle(np.array([9, 0]))
        with pytest.raises(StorageError):
            records.image(9)
    records.settle(np.array([1]))


def test_a_new_index_is_advised_only_where_it_helps(tmp_path: Path) -> None:
    path = _write(tmp_path / "a b.rec", LETTERS)
    whole, index = path.read_bytes(), path.with_suffix(".idx").read_text()
    for text in (index + "x\n", index + "0\t0\n", index + "90\t7\n"):
        path.with_suffix(".idx").write_text(text)
        with pytest.raises(DataError, match=r"steady check '.*a b\.rec' --index writes it again$"):
            Records.open(path)
    path.with_suffix(".idx").write_text(index)
    path.write_bytes(whole[:-10])
    with pytest.raises(DataError, match=r"records themselves are damaged \(cut short.*: copy both") as refused:
        Records.open(path)
    assert "--index" not in str(refused.value)
