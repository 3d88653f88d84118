"""Folders, shards and tables in a store: what is packed, trained and checked is what it would be from a local disk."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.store import Bucket, FaultProxy

from steadytrain.cli import main
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.unpacked import Unpacked
from steadytrain.data.storage import object_cache
from steadytrain.errors import DataError, StorageError


def _put_folder(bucket: Bucket, folder: Path, key: str) -> str:
    for path in sorted(folder.rglob("*.png"))[::8]:
        bucket.put(f"{key}/{path.relative_to(folder).as_posix()}", path)
    return bucket.uri(key)


def _copy(folder: Path, to: Path) -> Path:
    for path in sorted(folder.rglob("*.png"))[::8]:
        (to / path.relative_to(folder).parent).mkdir(parents=True, exist_ok=True)
        (to / path.relative_to(folder)).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_of_images_is_packed_as_a_local_one(
    slash: str, bucket: Bucket, digits_folder: Path, tmp_path: Path
) -> None:
    uri = _put_folder(bucket, digits_folder, "sets/digits")
    [(there, card)] = pack(uri + slash, tmp_path / "there")
    [(here, _)] = pack(_copy(digits_folder, tmp_path / "digits"), tmp_path / "here")
    assert there.read_bytes() == here.read_bytes() and card.source == uri + slash
    assert there.with_suffix(".lst").read_text() == here.with_suffix(".lst").read_text()


def test_a_folder_is_fetched_once_through_faults_and_again_where_it_changed(
    bucket: Bucket, digits_folder: Path, fault_proxy: FaultProxy
) -> None:
    uri, messages = _put_folder(bucket, digits_folder, "digits"), list[str]()
    fault_proxy.matches, fault_proxy.faults = ".png", [503, "reset", "cut"]
    with Unpacked.open(uri, say=messages.append) as images:
        first = [bytes(images.image(number)) for number in range(len(images))]
    assert len(first) == 50 and messages[0].startswith("fetching 50 objects (")
    asked = len(fault_proxy.requests)
    with Unpacked.open(uri, say=messages.append) as images:
        assert [bytes(images.image(number)) for number in range(len(images))] == first
    assert len(messages) == 1 and not any(".png" in path for path, _ in fault_proxy.requests[asked:])
    bucket.put("digits/0/new.png", next(digits_folder.rglob("*.png")))
    with Unpacked.open(uri) as images:
        assert len(images) == 51


def test_shards_are_read_as_local_ones(bucket: Bucket, digits_folder: Path, tmp_path: Path) -> None:
    paths = sorted(digits_folder.rglob("*.png"))[::8]
    for number in range(2):
        with tarfile.open(tmp_path / f"shard-{number}.tar", "w") as tar:
            for path in paths[number::2]:
                (tmp_path / "label.cls").write_text(path.parent.name)
                tar.add(path, f"{path.stem}.png")
                tar.add(tmp_path / "label.cls", f"{path.stem}.cls")
        bucket.put(f"shard-{number}.tar", tmp_path / f"shard-{number}.tar")
    for pattern in ("shard-{0..1}.tar", "shard-*.tar"):
        with Unpacked.open(bucket.uri(pattern)) as there, Unpacked.open(tmp_path / pattern) as local:
            assert there.labels.tolist() == local.labels.tolist() and there.classes == local.classes
            assert all(bytes(there.image(n)) == bytes(local.image(n)) for n in range(len(local)))


@pytest.mark.slow
def test_more_shards_than_a_process_may_open_files(bucket: Bucket, digits_folder: Path, tmp_path: Path) -> None:
    paths = sorted(digits_folder.rglob("*.png"))[::4]
    for number in range(100):
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            tar.add(paths[number], f"{paths[number].parent.name}/{number}.png")
        bucket.put(f"x-{number:03}.tar", tmp_path / "x.tar")
    program = (
        "import resource, sys; from steadytrain.data.packing.pack import pack\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (180, 4096))\n"
        "told = []; pack(sys.argv[1], sys.argv[2], say=told.append); print(told[0])"
    )
    command = [sys.executable, "-c", program, bucket.uri("x-{000..099}.tar"), str(tmp_path / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"fetching 100 objects of {bucket.uri('x-{000..099}.tar')} (")
    with Records.open(tmp_path / "packed.rec") as records:
        assert len(records) == 100


def test_records_are_packed_again_and_checked_like_local_ones(
    bucket: Bucket, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = bucket.put_records(digits.parent, "digits")
    [(there, _)], [(here, _)] = pack(uri, tmp_path / "there"), pack(digits, tmp_path / "here")
    assert there.read_bytes() == here.read_bytes()
    assert main(["check", uri, "--json"]) == main(["check", str(digits), "--json"]) == 0
    assert main(["check", uri, "--index"]) == 2
    assert "not into a store" in capsys.readouterr().err


@pytest.mark.slow
def test_training_packs_a_folder_once(
    bucket: Bucket, digits_folder: Path, fault_proxy: FaultProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = _put_folder(bucket, digits_folder, "digits")
    for _ in range(2):
        assert main(["feed", uri, "--seconds", "0.05", "--batch-size", "8", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["n"] == 50
    assert sum(path.endswith(".png") for path, _ in fault_proxy.requests) == 50


def test_a_changed_shard_is_fetched_anew(bucket: Bucket, digits_folder: Path, tmp_path: Path) -> None:
    counts = []
    for count in (20, 30):
        with tarfile.open(tmp_path / "x.tar", "w") as tar:
            for path in sorted(digits_folder.rglob("*.png"))[: 8 * count : 8]:
                tar.add(path, path.relative_to(digits_folder))
        with Unpacked.open(bucket.put("x.tar", tmp_path / "x.tar")) as images:
            counts.append(len(images))
    assert counts == [20, 30]


def test_missing_or_too_large_object_is_an_error(
    bucket: Bucket, digits_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"there is no object s3://\w+/nothing$"):
        pack(bucket.uri("nothing"), tmp_path / "out")
    monkeypatch.setattr(object_cache, "LEAST_LIMIT", 1000)
    monkeypatch.setenv("STEADYTRAIN_OBJECT_BYTES", "2000")
    with pytest.raises(StorageError, match=r"digits/ has [\d.]+ kB, of which 1.0 kB can be in the cache at once"):
        pack(_put_folder(bucket, digits_folder, "digits"), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
