"""A folder is packed once: again after a change, by one process at a time, and never by halves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from tests.data.packing.odd_files import of_bits
from tests.data.packing.pictures import picture, write_folder

from steadytrain.data.packing.pack import pack
from steadytrain.data.packing.prepare import Prepared, prepare
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, StorageError, TooManyBadError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "my photos", {"cat": 6, "dog": 5}, size=(400, 300), suffix=".jpg")


def _prepare(source: Path, cache: Path, messages: list[str] | None = None, **options: object) -> Prepared:
    return prepare(source, cache=cache, say=(messages if messages is not None else []).append, **options)  # type: ignore[arg-type]


def _copies(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "packed").iterdir() if not path.name.startswith("."))


def test_a_record_file_is_taken_as_it_is(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "a")
    assert _prepare(tmp_path / "a.rec", tmp_path / "cache") == Prepared(tmp_path / "a.rec", None)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match=r"there is no file .*b\.rec"):
        _prepare(tmp_path / "b.rec", tmp_path / "cache")


def test_a_folder_is_packed_once_aloud(photos: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    first = _prepare(photos, tmp_path / "cache", messages)
    stamp = first.train.stat().st_mtime_ns
    assert _prepare(photos, tmp_path / "cache", messages) == first
    assert first.train.stat().st_mtime_ns == stamp
    assert messages == [
        f"packing {photos} once into {first.train.parent}; later runs reuse it",
        f"using the packed copy of {photos}",
    ]
    with Records.open(first.train) as records:
        assert records.card is not None
        assert records.card.height == (256, 256, 256)
        assert records.classes == ("cat", "dog")


def test_what_images_have_lost_is_said_of_a_copy_and_of_a_pack_too(tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(of_bits(16, states=False, colour=0))
    pack(tmp_path / "images", tmp_path / "a")
    for source in ("images", "images", "a.rec"):
        messages: list[str] = []
        _prepare(tmp_path / source, tmp_path / "cache", messages)
        assert [line for line in messages if "have 16 bits" in line] == [
            "4 images have 16 bits a channel, of which 8 are kept"
        ]


def test_other_settings_make_another_copy_beside_it(photos: Path, tmp_path: Path) -> None:
    sides = {}
    for side in (100, None, 256):
        with Records.open(_prepare(photos, tmp_path / "cache", shorter_side=side).train) as records:
            assert records.card is not None
            sides[side] = records.card.height[1]
    assert sides == {100: 100, None: 300, 256: 256}
    assert len(_copies(tmp_path / "cache")) == 3


def _touch(photos: Path) -> None:
    os.utime(photos / "cat" / "0000.jpg", ns=(1, 1))


def _add(photos: Path) -> None:
    picture(77).save(photos / "dog" / "new.png")


def _rename(photos: Path) -> None:
    (photos / "dog").rename(photos / "hound")


@pytest.mark.parametrize("change", [_touch, _add, _rename])
def test_a_change_in_the_folder_replaces_a_copy_that_nobody_needs(photos: Path, tmp_path: Path, change: object) -> None:
    messages: list[str] = []
    before = _prepare(photos, tmp_path / "cache", messages)
    os.utime(before.train.parent, (1, 1))
    assert callable(change)
    change(photos)
    after = _prepare(photos, tmp_path / "cache", messages)
    assert after != before
    assert _copies(tmp_path / "cache") == [after.train.parent.name]
    assert messages[-1] == f"removing {before.train.parent}: the copy of an earlier state"


def test_a_copy_that_is_open_or_was_just_asked_for_stays(photos: Path, tmp_path: Path) -> None:
    first = _prepare(photos, tmp_path / "cache")
    os.utime(first.train.parent, (1, 1))
    with Records.open(first.train):
        _touch(photos)
        second = _prepare(photos, tmp_path / "cache")
    _add(photos)
    third = _prepare(photos, tmp_path / "cache")
    assert _copies(tmp_path / "cache") == sorted(copy.train.parent.name for copy in (second, third))


def test_splits_give_both_parts(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_folder(tmp_path / "data" / split, {"a": 3, "b": 3})
    prepared = _prepare(tmp_path / "data", tmp_path / "cache")
    assert prepared.val is not None
    assert prepared.only("val") == prepared.val != prepared.only("train")
    with Records.open(prepared.train) as train, Records.open(prepared.val) as val:
        assert (len(train), len(val)) == (6, 6)
    assert Prepared(prepared.train, None).only("val") == prepared.train


def test_no_more_is_packed_than_what_is_asked_for(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "data" / split, {"a": 3, "b": 3})
    val = _prepare(tmp_path / "data", tmp_path / "cache", only="val")
    assert [path.name for path in val.train.parent.glob("*.rec")] == ["data-val.rec"]
    assert val.only("val") == val.train
    assert _prepare(tmp_path / "data", tmp_path / "cache", only="val") == val
    both = _prepare(tmp_path / "data", tmp_path / "cache")
    assert both.val is not None
    with Records.open(both.val) as all_of_it, Records.open(val.train) as part:
        assert [bytes(all_of_it.image(number)) for number in range(6)] == [bytes(part.image(n)) for n in range(6)]
    assert _prepare(tmp_path / "data", tmp_path / "cache", only="val") == both


@pytest.mark.parametrize("suffix", [".lst", ".idx", ".json", ".rec"])
def test_a_damaged_copy_is_made_again_byte_for_byte(photos: Path, tmp_path: Path, suffix: str) -> None:
    train = _prepare(photos, tmp_path / "cache").train
    whole = {path.name: path.read_bytes() for path in train.parent.glob("data.*")}
    file = train.with_suffix(suffix)
    good = file.read_bytes()
    for damaged in (b"", good[: len(good) // 2], _flipped(good, 1), _flipped(good, 0x80), None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        said: list[str] = []
        assert _prepare(photos, tmp_path / "cache", messages=said).train == train
        assert {path.name: path.read_bytes() for path in train.parent.glob("data.*")} == whole
        assert f"{photos} is made again" in "".join(said)
        assert file.name in "".join(said) or suffix == ".rec"


def _flipped(data: bytes, bits: int) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ bits]) + data[middle + 1 :]


def test_a_class_list_by_name_or_by_card(photos: Path, tmp_path: Path) -> None:
    names = ("dog", "elk", "cat")
    by_name = _prepare(photos, tmp_path / "cache", classes=names)
    with Records.open(by_name.train) as records:
        assert records.classes == names
        assert set(records.labels.tolist()) == {0, 2}
    card = by_name.train.with_suffix(".json")
    assert _prepare(photos, tmp_path / "cache", classes=card) == by_name


def test_records_of_other_classes_are_refused_with_the_remedy(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "train")
    pack(write_folder(tmp_path / "new", {"cat": 2, "elk": 2}), tmp_path / "val")
    card = tmp_path / "train.json"
    with pytest.raises(DataError) as raised:
        _prepare(tmp_path / "val.rec", tmp_path / "cache", classes=card)
    assert str(raised.value).endswith(
        f"val.rec has other classes (without dog; with elk): pack it with --classes {card}"
    )


def test_bad_files_are_told(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "bad.jpg").write_bytes(b"")
    messages: list[str] = []
    _prepare(photos, tmp_path / "cache", messages)
    assert messages[-1] == "left out 1 file that cannot be used: cat/bad.jpg (empty: 0 bytes)"


def test_too_many_bad_files_leave_no_copy_and_name_the_way_on(photos: Path, tmp_path: Path) -> None:
    for number in range(6):
        (photos / "cat" / f"bad{number}.jpg").write_bytes(b"")
    with pytest.raises(TooManyBadError, match=r"--max-bad \(steady pack .* OUT --max-bad N, then use OUT\.rec\)"):
        _prepare(photos, tmp_path / "cache")
    assert _copies(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_said_with_both_remedies(photos: Path) -> None:
    with pytest.raises(StorageError, match=r"STEADYTRAIN_CACHE .*or pack it yourself: steady pack"):
        _prepare(photos, Path("/proc/steady"))


def test_the_cache_is_where_the_environment_says(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "told"))
        assert prepare(photos, say=print).train.is_relative_to(tmp_path / "told")
        patch.delenv("STEADYTRAIN_CACHE")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert prepare(photos, say=print).train.is_relative_to(tmp_path / "xdg" / "steadytrain")


SCRIPT = """
import sys, time
from pathlib import Path
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.reader import Records
source, cache, go = sys.argv[1:]
def wait(done, total):
    while go and not Path(go).exists():
        time.sleep(0.01)
prepared = prepare(source, cache=cache, say=lambda text: print(text, flush=True), workers=1, progress=wait)
with Records.open(prepared.train) as records:
    print(len(records), prepared.train)
"""


def _start(photos: Path, cache: Path, go: Path | str = "") -> subprocess.Popen[str]:
    """A process that prepares, and stops in the middle until the file ``go`` is there."""
    command = [sys.executable, "-c", SCRIPT, str(photos), str(cache), str(go)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_make_one_copy(photos: Path, tmp_path: Path) -> None:
    with _start(photos, tmp_path / "cache", tmp_path / "go") as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("packing")
        with _start(photos, tmp_path / "cache") as second:
            assert second.stdout is not None
            assert second.stdout.readline() == f"another process is packing {photos}: waiting for it\n"
            (tmp_path / "go").touch()
            lines = [first.communicate()[0].splitlines()[-1], second.communicate()[0].splitlines()[-1]]
    assert lines[0] == lines[1]
    assert lines[0].startswith("11 ")
    assert len(_copies(tmp_path / "cache")) == 1


def test_a_kill_in_the_middle_leaves_no_copy_and_no_lock(photos: Path, tmp_path: Path) -> None:
    with _start(photos, tmp_path / "cache", tmp_path / "never") as first:
        assert first.stdout is not None
        assert first.stdout.readline().startswith("packing")
        part = tmp_path / "cache" / "packed"
        while not list(part.glob(".*.part/.data.rec.part")):
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
    assert _copies(tmp_path / "cache") == []
    prepared = _prepare(photos, tmp_path / "cache")
    with Records.open(prepared.train) as records:
        assert len(records) == 11
    assert not list(part.glob(".*.part"))
    assert not list(part.glob(".*.scratch-*"))


MARKED = """
import importlib, sys
importlib.import_module("steadytrain.data.packing.pack").MARK_SECONDS = 0
""" + SCRIPT.replace("total):", "total):\n    done > 60 and time.sleep(60)")


@pytest.mark.slow
def test_a_kill_costs_a_copy_no_more_than_the_last_seconds(photos: Path, tmp_path: Path) -> None:
    write_folder(photos, {"cat": 80, "dog": 80}, size=(30, 20), suffix=".jpg")
    command = [sys.executable, "-c", MARKED, str(photos), str(tmp_path / "cache"), ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while not any(path.read_bytes().count(b"\n") > 2 for path in tmp_path.glob("cache/packed/.*.part/.*.journal")):
            time.sleep(0.01)
        process.kill()
    messages: list[str] = []
    prepared = _prepare(photos, tmp_path / "cache", messages)
    assert any(line.startswith("continuing after ") for line in messages)
    whole = _prepare(photos, tmp_path / "other")
    assert prepared.train.read_bytes() == whole.train.read_bytes()


@pytest.mark.parametrize("name", ["photos.tar", "photos.tar.gz"])
def test_an_archive_is_read_once_and_again_after_a_change(photos: Path, tmp_path: Path, name: str) -> None:
    archive = tmp_path / "archives" / name

    def write() -> None:
        archive.parent.mkdir(exist_ok=True)
        with tarfile.open(archive, "w:gz" if name.endswith("gz") else "w") as tar:
            tar.add(photos, "photos")

    write()
    messages: list[str] = []
    first = _prepare(archive, tmp_path / "cache", messages)
    again: list[str] = []
    assert _prepare(archive, tmp_path / "cache", again) == first
    assert again == [f"using the packed copy of {archive}"], "nothing is decompressed again"
    _add(photos)
    write()
    with Records.open(_prepare(archive, tmp_path / "cache").train) as records:
        assert len(records) == 12


def test_labels_of_their_own_and_a_root_go_with_a_source(photos: Path, tmp_path: Path) -> None:
    lines = [f"{path.relative_to(photos)},{path.parent.name}\n" for path in sorted(photos.glob("*/*"))]
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.csv").write_text("path,label\n" + "".join(lines))
    prepared = _prepare(tmp_path / "lists" / "a.csv", tmp_path / "cache", root=photos)
    with Records.open(prepared.train) as records:
        assert records.labels.tolist() == [0] * 6 + [1] * 5
    with pytest.raises(DataError, match=r"give --root |with --root\b"):
        _prepare(tmp_path / "lists" / "a.csv", tmp_path / "cache")


def test_labels_that_nothing_can_learn_are_refused_before_they_are_packed(photos: Path, tmp_path: Path) -> None:
    names = [str(path.relative_to(photos)) for path in sorted(photos.glob("*/*"))]
    (photos / "a.csv").write_text("path,wet,warm\n" + "".join(f"{name},1,0.5\n" for name in names))
    with pytest.raises(DataError, match=r"other values than 0 and 1 \(0\.5 in image 0\): training needs one class"):
        _prepare(photos / "a.csv", tmp_path / "cache", trainable=True)
    assert not (tmp_path / "cache").exists()
    (photos / "a.csv").write_text("path,labels\n" + "".join(f"{name},a;{name.split('/')[0]}\n" for name in names))
    with Records.open(_prepare(photos / "a.csv", tmp_path / "cache", trainable=True).train) as records:
        assert records.labels.shape == (11, 3)
        assert records.class_list == ("a", "cat", "dog")


def test_without_a_home_the_remedy_is_told(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("STEADYTRAIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(StorageError, match="no home folder for a cache: set STEADYTRAIN_CACHE"):
        prepare(photos)
