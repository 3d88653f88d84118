"""Packing as its users see it: what comes out, what is left out, and what is never left behind."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.data.packing.pictures import picture, write_folder

from steadytrain.data.images.encode import PackSettings
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, StorageError, TooManyBadError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seventy pictures of two classes: enough for children to be started."""
    return write_folder(tmp_path / "photos", {"cat": 40, "dog": 30}, size=(90, 70), suffix=".jpg")


def _spoil(folder: Path, count: int) -> None:
    for path in sorted(folder.glob("*/*"))[:count]:
        path.write_bytes(path.read_bytes()[:200])


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_packed_records_can_be_read(photos: Path, tmp_path: Path) -> None:
    [(path, card)] = pack(photos, tmp_path / "out" / "photos")
    assert sorted(_files(path.parent)) == [f"photos.{end}" for end in ("hashes", "idx", "json", "lst", "rec")]
    with Records.open(path) as records:
        assert records.card == card == Card.from_json(path.with_suffix(".json").read_text())
        assert records.classes == ("cat", "dog")
        assert records.labels.tolist() == [0] * 40 + [1] * 30
        assert records.record_ids.tolist() == list(range(70))
        originals = sorted(photos.glob("*/*.jpg"))
        assert [bytes(records.image(i)) for i in range(70)] == [original.read_bytes() for original in originals]


def test_card_describes_the_records(photos: Path, tmp_path: Path) -> None:
    picture(99, (300, 50)).save(photos / "cat" / "wide.png")
    (photos / "cat" / "bad.jpg").write_bytes(b"")
    [(path, card)] = pack(photos, tmp_path / "photos.rec")
    assert (card.classes, card.counts, card.num_images) == (("cat", "dog"), (41, 30), 71)
    assert (card.height, card.width, card.channels) == ((50, 70, 70), (90, 90, 300), 3)
    assert (card.encodings, card.kept) == ({"jpg": 71}, 70)
    assert card.rejected == (("cat/bad.jpg", "empty: 0 bytes"),)
    assert card.bytes == path.stat().st_size
    assert card.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert card.settings == PackSettings().to_dict()
    assert (card.stats_images, card.by_class, card.source) == (71, True, str(photos))
    assert all(0.3 < mean < 0.7 for mean in card.mean)


def test_the_bytes_are_the_same_whatever_the_number_of_workers(photos: Path, tmp_path: Path) -> None:
    _spoil(photos, 3)
    files = []
    for workers in (1, 2, 5):
        pack(photos, tmp_path / str(workers) / "a", shorter_side=40, workers=workers)
        files.append(_files(tmp_path / str(workers)))
    assert files[0] == files[1] == files[2]


def test_splits_share_one_class_list(tmp_path: Path) -> None:
    for split, classes in {"train": {"a": 3, "b": 3}, "validation": {"b": 2}, "test": {"a": 1}}.items():
        write_folder(tmp_path / "data" / split, classes)
    messages: list[str] = []
    packed = pack(tmp_path / "data", tmp_path / "out", say=messages.append)
    assert [file.path.name for file in packed] == ["out-train.rec", "out-val.rec", "out-test.rec"]
    assert all(file.card.classes == ("a", "b") for file in packed)
    assert [file.card.counts for file in packed] == [(3, 3), (0, 2), (1, 0)]
    assert messages == ["val: 1 of 2 classes has no image here (a)", "test: 1 of 2 classes has no image here (b)"]
    with Records.open(packed[1].path) as records:
        assert records.labels.tolist() == [1, 1]
    messages.clear()
    pack(tmp_path / "data" / "train", tmp_path / "shards", shards=2, say=messages.append)
    assert not messages  # that a class lies in one shard alone is nothing odd


def test_a_test_set_stays_one(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_folder(tmp_path / "data" / split, {"a": 3, "b": 3})
    packed = pack(tmp_path / "data", tmp_path / "out")
    assert [file.path.name for file in packed] == ["out-train.rec", "out-test.rec"]


@pytest.mark.slow
def test_real_photographs_in_splits(extracted: Callable[[str], Path], tmp_path: Path) -> None:
    packed = pack(extracted("clothing-10.tar"), tmp_path / "clothing", shorter_side=128, workers=2)
    assert [file.card.num_images for file in packed] == [640, 250, 275]
    assert all(len(file.card.classes) == 10 and not file.card.rejected for file in packed)
    assert all(file.card.height[0] == file.card.width[0] == 128 for file in packed)


def test_small_images_of_a_list_give_the_very_bytes_that_mxnet_wrote(
    data_folder: Path, extracted: Callable[[str], Path], tmp_path: Path
) -> None:
    theirs = data_folder / "mxnet-rec" / "im2rec" / "cifar120.rec"
    root = extracted("mxnet-rec/im2rec/sources.tar") / "img"
    [(path, card)] = pack(theirs.with_suffix(".lst"), tmp_path / "ours", root=root, workers=2)
    assert path.read_bytes() == theirs.read_bytes()
    assert path.with_suffix(".idx").read_text() == theirs.with_suffix(".idx").read_text()
    assert (card.kept, card.classes, card.counts) == (120, ("airplane", "cat", "ship"), (40, 40, 40))


def test_a_list_keeps_its_order_ids_and_label_vectors(photos: Path, tmp_path: Path) -> None:
    names = [str(path.relative_to(photos)) for path in sorted(photos.glob("*/*.jpg"))][::-7]
    (tmp_path / "a.lst").write_text("".join(f"{90 - i}\t{i}.5\t{i * i}\t{name}\n" for i, name in enumerate(names)))
    [(path, card)] = pack(tmp_path / "a.lst", tmp_path / "a", root=photos)
    assert (card.classes, card.label_width, card.by_class) == ((), 2, False)
    assert path.with_suffix(".idx").read_text().splitlines()[0] == "90\t0"
    with Records.open(path) as records:
        assert records.record_ids.tolist() == [90 - i for i in range(10)]
        assert records.labels.tolist() == [[i + 0.5, i * i] for i in range(10)]
        assert bytes(records.image(1)) == (photos / names[1]).read_bytes()


def test_the_list_names_the_file_of_each_record_and_is_a_source_again(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "a\ttab.jpg").write_bytes((photos / "cat" / "0000.jpg").read_bytes())
    (photos / "dog" / "empty.jpg").write_bytes(b"")
    [(path, _)] = pack(photos, tmp_path / "a")
    lines = path.with_suffix(".lst").read_text().splitlines()
    images = sorted(str(file.relative_to(photos)) for file in photos.glob("*/*.jpg") if file.name != "empty.jpg")
    assert [line.split("\t")[2] for line in lines] == [name.replace("\t", "\\t") for name in images]
    with Records.open(path) as records:
        assert [line.split("\t")[:2] for line in lines] == [
            [str(id_), f"{label}.000000"] for id_, label in zip(records.record_ids, records.labels, strict=True)
        ]
        assert records.describe(0) == f"record 0 of {path} ({images[0]})"
    (photos / "cat" / "a\ttab.jpg").rename(photos / "cat" / "a\\ttab.jpg")
    [again] = pack(path.with_suffix(".lst"), tmp_path / "again", root=photos)
    assert again.path.read_bytes() == path.read_bytes()
    [repacked] = pack(path, tmp_path / "repacked", encoding="pass")
    for other in (again.path, repacked.path):
        assert other.with_suffix(".lst").read_text().replace("\\\\", "\\") == "\n".join(lines) + "\n"


@pytest.mark.parametrize("by", ["packing", "im2rec"])
def test_a_damaged_list_is_noticed_before_names_are_missed(photos: Path, tmp_path: Path, by: str) -> None:
    path = pack(photos, tmp_path / "p")[0].path
    listed = path.with_suffix(".lst")
    whole = listed.read_bytes()
    if by == "im2rec":
        path.with_suffix(".json").unlink()

    def said() -> list[str]:
        remarks: list[str] = []
        with Records.open(path) as records:
            records.require_images(remarks.append)
        return remarks

    assert said() == []
    for damaged in (b"", whole[: len(whole) // 2]):
        listed.write_bytes(damaged)
        assert len(said()) == 1 and "names of files may be missing or wrong; pack again" in said()[0]
    listed.write_bytes(whole.replace(b"cat", b"bat", 1))
    assert len(said()) == (by == "packing"), "only of its own lists does packing know each byte"
    listed.unlink()
    assert said() == [], "records without a list are named by their numbers"


def test_shards_and_archives_have_lists(photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(photos, "photos")
    packed = pack(tmp_path / "photos.tar", tmp_path / "a", shards=2, val_fraction=0.2)
    lists = [file.path.with_suffix(".lst").read_text().splitlines() for file in packed]
    assert [len(lines) for lines in lists] == [file.card.num_images for file in packed]
    members = {line.split("\t")[2] for lines in lists for line in lines}
    assert members == {str(file.relative_to(photos)) for file in photos.glob("*/*.jpg")}
    with Records.open(tmp_path / "a-train-{00000..00001}-of-00002.rec") as records:
        place, name = packed[1].path, lists[1][0].split("\t")[2]
        assert records.describe(packed[0].card.num_images) == f"record 0 of {place} ({name})"


@pytest.mark.parametrize("force", [False, True])
def test_a_list_of_the_users_is_never_overwritten(photos: Path, tmp_path: Path, force: bool) -> None:
    names = sorted(str(path.relative_to(photos)) for path in photos.glob("*/*.jpg"))
    mine = "".join(f"{number}\t{int(name < 'd') * 1}\t{name}\n" for number, name in enumerate(names))
    path = tmp_path / "my a.lst"
    path.write_text(mine)
    pack(path, tmp_path / "my a", root=photos)
    messages: list[str] = []
    pack(path, tmp_path / "my a", root=photos, say=messages.append)
    assert any("is packed already" in message for message in messages)
    with Records.open(tmp_path / "my a.rec") as records:
        assert records.describe(3) == f"record 3 of {records.path} ({names[3]})"
    pack(path, tmp_path / "my a", root=photos, force=True)
    (tmp_path / "b-val.lst").write_text("notes of mine\n")
    for out, share in ((tmp_path / "my a", None), (tmp_path / "b", 0.2)):
        with pytest.raises(DataError, match=r"\.lst is in the way, and packing did not write it: rename it"):
            pack(photos, out, val_fraction=share, force=force)
    assert path.read_text() == mine
    assert (tmp_path / "b-val.lst").read_text() == "notes of mine\n"


def test_a_list_that_packing_wrote_is_replaced_with_the_rest(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "a")
    with pytest.raises(DataError, match="--force to replace"):
        pack(photos, tmp_path / "a", shorter_side=16)
    (photos / "cat" / "0000.jpg").unlink()
    [(path, card)] = pack(photos, tmp_path / "a", force=True)
    assert len(path.with_suffix(".lst").read_text().splitlines()) == card.num_images


def test_a_card_fixes_the_classes(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "train")
    new = write_folder(tmp_path / "new", {"dog": 2})
    [(_, card)] = pack(new, tmp_path / "new", classes=tmp_path / "train.json")
    assert (card.classes, card.counts) == (("cat", "dog"), (0, 2))
    write_folder(new, {"elk": 1})
    with pytest.raises(DataError, match="the class list lacks: elk"):
        pack(new, tmp_path / "newer", classes=tmp_path / "train.json")


def test_five_bad_files_are_left_out_and_six_are_too_many(photos: Path, tmp_path: Path) -> None:
    _spoil(photos, 5)
    [(_, card)] = pack(photos, tmp_path / "five" / "a")
    assert (len(card.rejected), card.counts) == (5, (35, 30))
    _spoil(photos, 6)
    with pytest.raises(TooManyBadError, match=r"more than 5 \(the larger of 1 % and 5\): cat/0000.jpg \(.*--max-bad"):
        pack(photos, tmp_path / "six" / "a", workers=2)
    assert not (tmp_path / "six").exists()
    assert len(pack(photos, tmp_path / "six" / "a", max_bad=6)[0].card.rejected) == 6


def test_one_in_a_hundred_may_be_bad(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "many", {"a": 300, "b": 300}, size=(8, 8))
    _spoil(folder, 6)
    assert len(pack(folder, tmp_path / "many.rec")[0].card.rejected) == 6
    with pytest.raises(TooManyBadError, match=r"more than --max-bad 0: a/0000\.png"):
        pack(folder, tmp_path / "none.rec", max_bad=0)


def test_one_limit_holds_for_all_splits_and_nothing_of_any_is_left(tmp_path: Path) -> None:
    for split in ("train", "val"):
        _spoil(write_folder(tmp_path / "data" / split, {"a": 9, "b": 9}), 3)
    with pytest.raises(TooManyBadError, match="too many of the 36 images"):
        pack(tmp_path / "data", tmp_path / "out" / "data")
    assert not (tmp_path / "out").exists()


def test_a_class_that_loses_all_its_images_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"a": 2, "b": 9})
    _spoil(folder, 2)
    with pytest.raises(DataError, match=r"no image of class a can be used: a/0000\.png"):
        pack(folder, tmp_path / "out")
    shutil.rmtree(folder / "b")
    write_folder(folder, {"b": 2})
    _spoil(folder, 4)
    with pytest.raises(DataError, match="no image can be used"):
        pack(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_grey_images_make_a_grey_set(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"a": 3, "b": 3})
    assert pack(folder, tmp_path / "colour")[0].card.channels == 3
    [(path, card)] = pack(folder, tmp_path / "grey", grey=True)
    assert (card.channels, len(card.mean), card.kept) == (1, 1, 0)
    with Records.open(path) as records:
        assert records.channels == 1


def test_progress_is_reported_and_ends_at_the_total(photos: Path, tmp_path: Path) -> None:
    pairs: list[tuple[int, int]] = []
    pack(photos, tmp_path / "a", progress=lambda done, total: pairs.append((done, total)))
    assert pairs[-1] == (70, 70)
    assert pairs == sorted(pairs)


def test_interrupted_packing_leaves_nothing(photos: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(photos, tmp_path / "out" / "a", progress=stop, workers=2)
    assert not (tmp_path / "out").exists()


def test_replacing_is_asked_for_and_leaves_nothing_old(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "a")
    before = _files(tmp_path / "photos" / "cat")
    with pytest.raises(DataError, match=r"a\.rec, a\.idx, a\.json exist in .*--force"):
        pack(photos, tmp_path / "a", shorter_side=16)
    shutil.rmtree(photos / "cat")
    write_folder(photos, {"elk": 4})
    assert pack(photos, tmp_path / "a", force=True)[0].card.classes == ("dog", "elk")
    with Records.open(tmp_path / "a.rec") as records:
        assert len(records) == 34
    assert before


def test_small_and_large_statistics_are_of_a_stated_sample(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.data.packing.pack.COUNTED_IMAGES", 30)
    [(path, card)] = pack(photos, tmp_path / "a")
    assert card.stats_images == 24  # every third of seventy
    with Records.open(path) as records:
        from steadytrain.data.images.decode import decode

        pixels = [np.asarray(decode(records.image(i))).reshape(-1, 3) / 255 for i in range(0, 70, 3)]
    assert card.mean == pytest.approx(np.concatenate(pixels).mean(axis=0), rel=1e-9)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", {}, "there is no file or folder .*nowhere"),
        ("photo", {}, r"Did you mean photos\?"),
        ("photos", {"root": "x"}, "--root goes with a .lst"),
        ("photos/cat/0000.jpg", {}, "a JPEG image"),
        ("photos", {"workers": 0}, "--workers is 0"),
        ("photos", {"max_bad": -1}, "--max-bad is -1"),
        ("photos", {"classes": "none.json"}, "cannot read the card none.json"),
    ],
)
def test_impossible_requests_are_refused(
    photos: Path, tmp_path: Path, source: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        pack(tmp_path / source, tmp_path / "out", **options)  # type: ignore[arg-type]


def test_a_folder_is_no_name_for_the_output(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder: give a name in it, such as .*/photos"):
        pack(photos, tmp_path)


def test_a_disk_that_fills_up_at_the_very_end_leaves_no_split_behind(tmp_path: Path, small_disk: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "photos" / split, {"cat": 3, "dog": 3}, size=(64, 64))
    train, val = (file.path.stat().st_size for file in pack(tmp_path / "photos", tmp_path / "there"))
    assert train + val < 1 << 20, "so that nothing reaches the disk before all is packed"
    free = os.statvfs(small_disk)
    (small_disk / "other").write_bytes(bytes(free.f_bavail * free.f_frsize - val - train // 2))
    with pytest.raises(StorageError, match="the disk is full"):
        pack(tmp_path / "photos", small_disk / "photos")
    assert [path.name for path in small_disk.iterdir()] == ["other"]
