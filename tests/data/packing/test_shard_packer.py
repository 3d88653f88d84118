"""Packing by several processes: the files of one, whoever dies, joins late or does a shard twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.data.packing.pictures import write_folder
from tests.store import Bucket

from steadytrain.cli import main
from steadytrain.data.images.encode import PackSettings
from steadytrain.data.packing import shard_packer
from steadytrain.data.packing.pack import PackedFile, PackRequest, pack
from steadytrain.data.packing.shard_packer import ShardPacker
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.select import Selection
from steadytrain.errors import DataError, StorageError, TooManyBadError

SUFFIXES = (".rec", ".idx", ".json", ".lst", ".hashes")
WORKER = """
import os, signal, sys, time
from steadytrain.data.packing import shard_packer as worker
from steadytrain.data.packing.pack import PackRequest
source, out, shards, rank, size, pause, stop, alone = sys.argv[1:]
worker.POLL_SECONDS, worker.SILENT_SECONDS = 0.05, 2.0
shape = {"shards": int(shards), "rank": int(rank), "size": int(size)}
if int(alone):  # as on another machine, that does not see the locks of this one
    shape["local_ranks"] = range(int(rank), int(rank) + 1)
    worker.lock_at_once = lambda file: True
stops = [int(stop)]
def pace(done, total):
    time.sleep(float(pause) * (0 < done < total))
    if 0 < stops[0] < done < total:
        stops[0] = 0
        os.kill(os.getpid(), signal.SIGSTOP)
request = PackRequest(sources=(source,))
packed = worker.ShardPacker(request=request, out=out, **shape, progress=pace).run()
print(sum(file.card.num_images for file in packed))
"""


def pack_shards(request: PackRequest, out: str | Path, **options: Any) -> list[PackedFile]:
    return ShardPacker(request=request, out=out, **options).run()


def _count(packed: list[PackedFile]) -> int:
    return sum(file.card.num_images for file in packed)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 photographs of three classes, and one that is none."""
    folder = tmp_path_factory.mktemp("made") / "photos"
    write_folder(folder, {"cat": 40, "dog": 30, "elk": 30}, size=(90, 70), suffix=".jpg")
    (folder / "dog" / "bad.jpg").write_bytes(b"")
    return folder


def _files(folder: Path, stem: str = "x") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob(f"{stem}-*"))}


def _start(
    source: str | Path,
    out: str | Path,
    shards: int,
    rank: int = 0,
    size: int = 1,
    *,
    pause: float = 0.0,
    stop: int = 0,
    alone: bool = False,
) -> subprocess.Popen[str]:
    """Start a process that packs; it pauses for so many seconds in each shard, when its images are half written.

    With ``stop`` it stops itself there once, as SIGSTOP does, when it has seen more images than that; ``alone``: as on
    a machine of its own.
    """
    words = [str(word) for word in (source, out, shards, rank, size, pause, stop, int(alone))]
    return subprocess.Popen([sys.executable, "-c", WORKER, *words], stdout=subprocess.PIPE, text=True)


def _wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
    until = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return value


def _owners(notes: Path) -> dict[int, str]:
    """Process id -> a shard whose lock it holds."""
    names = {path.stat().st_ino: path.stem for path in notes.glob("0*.lock")}
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    locks = [(int(row[4]), int(row[5].rpartition(":")[2])) for row in rows if row[1] == "FLOCK"]
    return {pid: names[inode] for pid, inode in locks if inode in names}


def test_three_processes_write_the_files_of_one(photos: Path, tmp_path: Path) -> None:
    options = ["--val-fraction", "0.3", "--seed", "5", "--shards", "4", "--shorter-side", "40"]
    pack(photos, tmp_path / "one" / "x", val_fraction=0.3, seed=5, shards=4, shorter_side=40)
    command = [sys.executable, "-m", "steadytrain", "pack", str(photos), str(tmp_path / "three" / "x"), *options]
    done = subprocess.run([*command, "--procs", "3", "--json"], capture_output=True, text=True, check=True)
    files = _files(tmp_path / "three")
    assert files == _files(tmp_path / "one")
    assert len(files) == 2 * 4 * len(SUFFIXES)
    cards = json.loads(done.stdout)
    assert [card["path"] for card in cards] == [str(tmp_path / "three" / name) for name in files if name[-4:] == ".rec"]
    assert sum(card["num_images"] for card in cards) == 100 and sum(len(card["rejected"]) for card in cards) == 1
    assert {path.name for path in (tmp_path / "three").iterdir()} == {*files}
    with Records.open(tmp_path / "three" / "x-train-{00000..00003}-of-00004.rec") as records:
        assert sorted(records.record_ids.tolist()) == sorted(set(records.record_ids.tolist()))
        assert records.classes == ("cat", "dog", "elk")
        assert len(records) == sum(card["num_images"] for card in cards if "x-train-" in card["path"])


def test_a_killed_worker_costs_nothing_but_time(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "whole" / "x", shards=9)
    out = tmp_path / "cut" / "x"
    killed = _start(photos, out, 9, 1, 3, pause=600)
    notes = out.with_name(".x.plan")
    shard = _wait_for(lambda: _owners(notes).get(killed.pid))
    others = [_start(photos, out, 9, rank, 3) for rank in (0, 2)]
    _wait_for(lambda: list(out.parent.glob("*.rec")))
    killed.kill()
    killed.communicate()
    assert not out.with_name(f"x-{shard}-of-00009.rec").exists()
    assert [(other.communicate()[0], other.returncode) for other in others] == [("100\n", 0)] * 2
    assert _files(out.parent) == _files(tmp_path / "whole")
    assert not notes.exists()


@pytest.mark.slow
def test_all_may_die_and_any_number_goes_on(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "whole" / "x", shards=9)
    out = tmp_path / "cut" / "x"
    workers = [_start(photos, out, 9, rank, 2, pause=0.3) for rank in range(2)]
    _wait_for(lambda: list(out.parent.glob("*.rec")))
    for worker in workers:
        worker.kill()
        worker.communicate()
    assert 0 < len(list(out.parent.glob("*.rec"))) < 9
    with _start(photos, out, 9) as last:
        assert last.communicate()[0] == "100\n"
    assert _files(out.parent) == _files(tmp_path / "whole")


@pytest.mark.slow
def test_a_worker_may_join_late(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    with _start(photos, out, 30, pause=0.3) as first:
        _wait_for(lambda: list(tmp_path.glob("*.rec")))
        with _start(photos, out, 30, pause=0.05) as second:
            _wait_for(lambda: second.pid in _owners(tmp_path / ".x.plan"))
            assert second.communicate()[0] == first.communicate()[0] == "100\n"
    pack(photos, tmp_path / "whole" / "x", shards=30)
    assert _files(tmp_path) == _files(tmp_path / "whole")


@pytest.mark.slow
def test_one_that_was_only_slow_does_no_harm(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "whole" / "x", shards=9)
    out = tmp_path / "slow" / "x"
    with _start(photos, out, 9, 0, 2, stop=20, alone=True) as stopped:
        _wait_for(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
        packed = {path.name for path in out.parent.glob("*.rec")}
        with _start(photos, out, 9, 1, 2, alone=True) as other:
            assert other.communicate()[0] == "100\n"
        files = _files(out.parent)
        stopped.send_signal(signal.SIGCONT)
        assert (stopped.communicate()[0], stopped.wait()) == ("100\n", 0)
    assert len(packed) == 1, "it was stopped in the second shard"
    assert files == _files(out.parent) == _files(tmp_path / "whole")
    assert {path.name for path in out.parent.iterdir()} == {*files}


def test_the_part_of_a_machine_that_is_gone_is_packed_by_another(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "whole" / "x", shards=5)
    with _start(photos, tmp_path / "x", 5, 0, 2, alone=True) as first:
        assert first.communicate(timeout=60)[0] == "100\n"
    assert _files(tmp_path) == _files(tmp_path / "whole")


def _put_folder(bucket: Bucket, folder: Path, key: str) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            bucket.put(f"{key}/{path.relative_to(folder).as_posix()}", path)
    return bucket.uri(f"{key}/")


def test_a_folder_in_a_bucket_becomes_the_files_of_the_folder_on_a_disk(bucket: Bucket, tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 9, "dog": 12})
    (photos / "cat" / "bad.jpg").write_bytes(b"")
    source = _put_folder(bucket, photos, "raw/photos")
    pack(source, tmp_path / "x", shards=4)
    workers = [_start(source, bucket.uri("sets/x"), 4, rank, 2) for rank in range(2)]
    assert [worker.communicate()[0] for worker in workers] == ["21\n", "21\n"]
    for name, content in _files(tmp_path).items():
        assert bucket.get(f"sets/{name}") == content, name
    assert not [name for name in bucket.names() if ".x.plan" in name]
    assert not list((tmp_path / "cache" / "packing").glob("*"))


def test_an_archive_in_a_bucket_is_fetched_by_each_machine(bucket: Bucket, photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(photos, "photos")
    source = bucket.put("raw/photos.tar", tmp_path / "photos.tar")
    pack(source, tmp_path / "x", shards=3)
    assert _count(pack_shards(PackRequest(sources=(source,)), bucket.uri("sets/x"), shards=3)) == 100
    for name, content in _files(tmp_path).items():
        assert bucket.get(f"sets/{name}") == content, name


def _zip(folder: Path, place: Path) -> Path:
    with zipfile.ZipFile(place / "photos.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.jpg")):
            archive.write(path, path.relative_to(folder))
    return place / "photos.zip"


def _table(folder: Path, place: Path) -> Path:
    rows = [f"{path.relative_to(folder)},{n % 2},{n % 3}" for n, path in enumerate(sorted(folder.rglob("*.jpg")))]
    (folder / "vectors.csv").write_text("\n".join(["file,spotted,tail", *rows]))
    return folder / "vectors.csv"


def _classes(folder: Path, place: Path) -> Path:
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(folder.rglob("*.jpg"))]
    (folder / "classes.csv").write_text("\n".join(["file,species", *rows]))
    return folder / "classes.csv"


def _arrays(folder: Path, place: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 9, 7), np.uint8)
    for name, array in (("images", pixels), ("labels", np.arange(90, dtype=np.uint8) % 10)):
        shape = array.shape
        head = bytes([0, 0, 8, len(shape)]) + b"".join(side.to_bytes(4, "big") for side in shape)
        (place / f"train-{name}-idx{len(shape)}-ubyte").write_bytes(head + array.tobytes())
    return place / "train-images-idx3-ubyte"


def _records(folder: Path, place: Path) -> Path:
    return pack(folder, place / "photos")[0].path


@pytest.mark.parametrize("make", [_zip, _table, _classes, _arrays, _records])
def test_every_kind_of_source_can_be_shared(make: Callable[[Path, Path], Path], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", {"cat": 40, "dog": 40}, suffix=".jpg")
    source = make(folder, tmp_path)
    pack(source, tmp_path / "one" / "x", shards=3, encoding="png")
    request = PackRequest(sources=(str(source),), settings=PackSettings(encoding="png"))
    assert len(pack_shards(request, tmp_path / "two" / "x", shards=3)) == 3
    assert _files(tmp_path / "two") == _files(tmp_path / "one")


def test_more_shards_where_there_is_more(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_packer, "SHARD_IMAGES", 40)
    packed = pack_shards(PackRequest(sources=(str(photos),)), tmp_path / "x")
    assert [(file.path.name, file.card.num_images + len(file.card.rejected)) for file in packed] == [
        ("x-00000-of-00003.rec", 34),
        ("x-00001-of-00003.rec", 34),
        ("x-00002-of-00003.rec", 33),
    ]


def _half_packed(source: str | Path, out: Path) -> PackRequest:
    """Pack not all: the process is ended by a full disk."""
    request = PackRequest(sources=(str(source),))

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise StorageError("the disk is full")

    with pytest.raises(StorageError, match="the disk is full"):
        pack_shards(request, out, shards=5, progress=stop)
    return request


def test_shards_of_other_images_or_settings_are_refused(photos: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", {"cat": 40, "dog": 40})
    request = _half_packed(folder, tmp_path / "x")
    settings = replace(request, settings=PackSettings(quality=80))
    other = replace(request, sources=(str(photos),))

    def require_refused() -> None:
        with pytest.raises(DataError, match=r"x-0000.-of-00005 was packed before, --quality was 95: give the same"):
            pack_shards(settings, tmp_path / "x", shards=5)
        with pytest.raises(DataError, match=r"x-0000.-of-00005 was packed before, of .*photos: give the same source"):
            pack_shards(other, tmp_path / "x", shards=5)
        (new := folder / "cat" / "new.png").write_bytes(next((folder / "cat").iterdir()).read_bytes())
        with pytest.raises(DataError, match="was packed before, of other images"):
            pack_shards(request, tmp_path / "x", shards=5)
        new.unlink()

    require_refused()
    assert _count(pack_shards(request, tmp_path / "x", shards=5)) == 80
    require_refused()  # nor where all is packed: it would be taken for this packing


def test_an_object_that_changes_while_it_is_packed_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", {"cat": 20, "dog": 20})
    source = _put_folder(bucket, folder, "raw")
    last = sorted((folder / "dog").iterdir())[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1

    def change(done: int, total: int) -> None:
        bucket.put(f"raw/dog/{last.name}", bytes(content))  # of the same size

    with pytest.raises(DataError, match=rf"raw/dog/{last.name} was changed after it was listed"):
        pack_shards(PackRequest(sources=(source,)), tmp_path / "x", shards=5, progress=change)


def test_files_that_are_in_the_way_stay(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "x-00001-of-00002.lst").write_text("mine")
    with pytest.raises(DataError, match=r"x-00001-of-00002\.lst exists already, and no such command began x"):
        pack_shards(PackRequest(sources=(str(photos),)), tmp_path / "x", shards=2)
    assert (tmp_path / "x-00001-of-00002.lst").read_text() == "mine"


def test_a_second_command_finds_all_done(photos: Path, tmp_path: Path) -> None:
    request = PackRequest(sources=(str(photos),))
    first = pack_shards(request, tmp_path / "x", shards=2)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    messages: list[str] = []
    assert pack_shards(request, tmp_path / "x", shards=2, say=messages.append) == first
    assert messages == ["all 2 shards are packed already; to pack again, remove them first"]
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_shard_that_is_older_than_an_image_of_it_is_packed_anew(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", {"cat": 6, "dog": 6}, size=(40, 30), suffix=".jpg")
    request = PackRequest(sources=(str(photos),))
    pack_shards(request, tmp_path / "x", shards=2)
    before = _files(tmp_path)
    changed = sorted((photos / "dog").iterdir())
    changed[-1].write_bytes(changed[0].read_bytes())
    pack_shards(request, tmp_path / "x", shards=2)
    after = _files(tmp_path)
    records = [name for name in before if name.endswith(".rec") and before[name] != after[name]]
    assert records == ["x-00001-of-00002.rec"]


def test_the_images_left_out_are_counted_over_all_shards(photos: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", {"cat": 40, "dog": 40})
    for number in range(6):
        (folder / "cat" / f"bad{number}.png").write_bytes(b"")
    request = PackRequest(sources=(str(folder),))
    with pytest.raises(TooManyBadError, match=r"more than 5 \(the larger of 1 % and 5\): cat/bad0"):
        pack_shards(request, tmp_path / "x", shards=8)
    packed = pack_shards(request, tmp_path / "x", shards=8, max_bad=6)
    assert sum(len(file.card.rejected) for file in packed) == 6


def test_a_class_that_loses_all_its_images_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "photos", {"cat": 40, "dog": 40, "elk": 1})
    next((folder / "elk").iterdir()).write_bytes(b"")
    with pytest.raises(DataError, match="no image of class elk can be used: elk/0080"):
        pack_shards(PackRequest(sources=(str(folder),)), tmp_path / "x", shards=2)


def test_what_several_processes_cannot_share_is_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], bucket: Bucket
) -> None:
    with tarfile.open(tmp_path / "photos.tar.gz", "w:gz") as tar:
        tar.add(photos / "cat", "cat")
        tar.add(photos / "dog", "dog")
    with pytest.raises(DataError, match=r"photos\.tar\.gz is compressed as a whole.*: decompress it first"):
        pack_shards(PackRequest(sources=(str(tmp_path / "photos.tar.gz"),)), tmp_path / "x")
    few = write_folder(tmp_path / "few", {"cat": 2, "dog": 2})
    source = _put_folder(bucket, few, "raw")
    held_out = PackRequest(sources=(source,), selection=Selection(val_fraction=0.1))
    with pytest.raises(DataError, match=r"would compare all images of .*: pack with one process, or put the images"):
        pack_shards(held_out, tmp_path / "x")
    splits = _put_folder(bucket, write_folder(tmp_path / "flat", {"train": 2, "test1": 2}), "flat")
    with pytest.raises(DataError, match=r"no folders of classes \(train, test1 are splits\): .* with one process"):
        pack_shards(PackRequest(sources=(splits,)), tmp_path / "x")
    bucket.put("raw/labels.csv", b"file,label\n")
    with pytest.raises(DataError, match=r"raw/labels\.csv is in no class folder"):
        pack_shards(PackRequest(sources=(source,)), tmp_path / "x")
    assert main(["pack", str(photos), str(tmp_path / "x"), "--procs", "2", "--force"]) == 2
    assert "--force with several processes" in capsys.readouterr().err
    assert main(["pack", str(photos), str(tmp_path / "x"), "--procs", "0"]) == 2
    assert "--procs is 0; it must be from 1 to 1024" in capsys.readouterr().err
    assert not list(tmp_path.glob("x*")) and not list(tmp_path.glob(".x*"))


@pytest.mark.slow
def test_the_ranks_of_a_launcher_pack_together(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "one" / "x", shards=6)
    words = ["launch", "--procs", "2", "--", "pack", str(photos), str(tmp_path / "two" / "x"), "--shards", "6"]
    done = subprocess.run([sys.executable, "-m", "steadytrain", *words], capture_output=True, text=True, check=True)
    assert "x-{00000..00005}-of-00006.rec: 100 images" in done.stdout
    assert _files(tmp_path / "two") == _files(tmp_path / "one")


# The command, each rank of which waits at the end of its second shard for a file: there is time to kill something.
WAITING_COMMAND = """
import os, sys, time
from steadytrain.cli import main
from steadytrain.data.packing.shard_packer import DiskFolder
write, done = DiskFolder.write, []
def write_when_told(folder, name, content):
    while done and name.endswith(".rec") and not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    write(folder, name, content)
    done.extend([name] if name.endswith(".rec") else [])
DiskFolder.write = write_when_told
sys.exit(main(sys.argv[2:]))
"""


def _start_command(source: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Start ``steady pack`` with options; it goes on to its end where there is a file ``go`` beside ``out``."""
    words = [str(out.with_name("go")), "pack", str(source), str(out), "--shards", "6", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", WAITING_COMMAND, *words], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def _packing_ranks(command: int, out: Path, count: int) -> dict[int, psutil.Process]:
    """Wait until ranks of a command pack a shard each; return their processes by rank."""
    _wait_for(lambda: len(_owners(out.with_name(f".{out.name}.plan"))) == count)
    ranks = psutil.Process(command).children()
    return {int(process.environ()["RANK"]): process for process in ranks}


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_is_told_and_the_command_succeeds(rank: int, photos: Path, tmp_path: Path) -> None:
    with _start_command(photos, tmp_path / "x", "--procs", "2", "--json") as process:
        _packing_ranks(process.pid, tmp_path / "x", 2)[rank].kill()
        (tmp_path / "go").touch()
        printed, errors = process.communicate(timeout=60)  # its shard is free at once
    assert process.returncode == 0, errors
    assert f"rank {rank} was killed by SIGKILL: the others do its work" in errors
    assert sum(card["num_images"] for card in json.loads(printed)) == 100
    pack(photos, tmp_path / "one" / "x", shards=6)
    assert _files(tmp_path) == _files(tmp_path / "one")


@pytest.mark.parametrize(
    ("name", "is_for_all", "code"),
    [
        ("SIGINT", True, 130),
        pytest.param("SIGTERM", False, 143, marks=pytest.mark.slow),
        pytest.param("SIGTERM", True, 143, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_command_says_so_and_continues(
    name: str, is_for_all: bool, code: int, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches all processes of a command, SIGTERM mostly the first one only."""
    out = tmp_path / "x"
    with _start_command(photos, out, "--procs", "2") as process:
        _packing_ranks(process.pid, out, 2)
        _wait_for(lambda: list(tmp_path.glob("*.rec")))
        family = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if is_for_all else os.kill)(process.pid, signal.Signals[name])
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (code, "")
    assert errors.splitlines()[-1] == "steady: interrupted: the same command resumes, or starts over"
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert 0 < len(list(tmp_path.glob("*.rec"))) < 6
    assert not list(tmp_path.glob("**/.*.scratch-*"))
    monkeypatch.setattr(shard_packer, "POLL_SECONDS", 0.05)
    assert main(["pack", str(photos), str(out), "--shards", "6", "--procs", "1"]) == 0
    pack(photos, tmp_path / "one" / "x", shards=6)
    assert _files(tmp_path) == _files(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["all ranks", "the command"])
def test_after_an_end_of_all_the_same_command_continues(killed: str, photos: Path, tmp_path: Path) -> None:
    with _start_command(photos, tmp_path / "x", "--procs", "2") as process:
        ranks = list(_packing_ranks(process.pid, tmp_path / "x", 2).values())
        _wait_for(lambda: list(tmp_path.glob("*.rec")))
        for victim in ranks if killed == "all ranks" else [process]:
            victim.kill()
        errors = process.communicate(timeout=60)[1]
    if killed == "all ranks":
        assert process.returncode == 128 + signal.SIGKILL
        assert errors.splitlines()[-1].endswith("SIGKILL: no rank is left, run the same command again to continue")
    assert not psutil.wait_procs(ranks, timeout=60)[1]
    assert 0 < len(list(tmp_path.glob("*.rec"))) < 6
    (tmp_path / "go").touch()
    with _start_command(photos, tmp_path / "x", "--procs", "2") as process:
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "6 shards are packed already" in errors
    assert "x-{00000..00005}-of-00006.rec: 100 images" in printed
    pack(photos, tmp_path / "one" / "x", shards=6)
    assert _files(tmp_path) == _files(tmp_path / "one")


@pytest.mark.slow
def test_ranks_of_a_machine_go_on_where_rank_0_is_killed(photos: Path, tmp_path: Path) -> None:
    words = ["--size", "2", "--procs", "2", "--independent", "--name", "gpu1", "--", "-m", "steadytrain"]
    words += ["pack", str(photos), str(tmp_path / "x"), "--shards", "6"]
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "steadytrain.launch.node", *words]

    def first_rank() -> psutil.Process | None:
        for process in psutil.Process(node.pid).children():
            with suppress(psutil.Error):
                if process.environ().get("RANK") == "0":
                    return process
        return None

    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as node:
        _wait_for(first_rank).kill()
        errors = node.communicate(timeout=60)[1]
    assert node.returncode == 0, errors
    assert "[gpu1] rank 0 was killed by SIGKILL: the others do its work" in errors
    assert "of 6 shards" in errors and len(list(tmp_path.glob("*.rec"))) == 6
