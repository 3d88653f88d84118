"""Packing into a store: the files of a local pack, visible only when whole, and none sent twice after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.store import Bucket, FaultProxy

from steadytrain.cli import main
from steadytrain.data.packing.pack import pack
from steadytrain.data.storage.store import WRITE_BYTES, ObjectPlace, Store
from steadytrain.errors import DataError

SUFFIXES = (".rec", ".idx", ".json", ".lst")


def _there(bucket: Bucket, key: str) -> bytes | None:
    try:
        return bucket.get(key)
    except FileNotFoundError:
        return None


def test_records_packed_into_a_store_equal_those_on_disk(
    bucket: Bucket, digits_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(digits_folder, tmp_path / "x", val_fraction=0.2)
    assert main(["pack", str(digits_folder), bucket.uri("sets/x"), "--val-fraction", "0.2"]) == 0
    assert f"{bucket.uri('sets/x-val.rec')}: 80 images" in capsys.readouterr().out
    for split in ("train", "val"):
        for suffix in SUFFIXES:
            assert bucket.get(f"sets/x-{split}{suffix}") == (tmp_path / f"x-{split}{suffix}").read_bytes()
    assert not list((tmp_path / "cache" / "outgoing").iterdir())


def test_nothing_is_replaced_unasked(bucket: Bucket, digits_folder: Path) -> None:
    bucket.put("x.rec", b"precious")
    with pytest.raises(DataError, match=r"x\.rec exists: choose another name, or give --force to replace"):
        pack(digits_folder, bucket.uri("x"))
    assert bucket.get("x.rec") == b"precious"
    pack(digits_folder, bucket.uri("x.rec"), force=True)
    assert len(bucket.get("x.rec")) > 10_000


def _kill_while_it_stalls(command: list[str], proxy: FaultProxy) -> None:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while proxy.faults:
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()


def test_a_kill_while_sending_costs_no_file_that_is_there(
    bucket: Bucket, digits_folder: Path, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault_proxy.matches, fault_proxy.method = ".rec", "PUT"
    fault_proxy.stall_seconds = 60
    fault_proxy.faults = ["", "", "", "stall", "stall", "stall", "stall"]  # three come through: four are on their way
    command = [sys.executable, "-m", "steadytrain", "pack", str(digits_folder), bucket.uri("x"), "--shards", "8"]
    _kill_while_it_stalls(command, fault_proxy)
    names = {f"x-{number:05}-of-00008.rec" for number in range(8)}
    there = {name for name in names if _there(bucket, name)}
    assert len(there) == 3
    before = len(fault_proxy.methods)
    assert main(command[3:]) == 0
    sent = [path.rpartition("/")[2] for method, path in fault_proxy.methods[before:] if method == "PUT"]
    assert set(sent) == names - there and len(sent) == 5
    packed = pack(digits_folder, Path(os.environ["STEADYTRAIN_CACHE"]) / "local", shards=8)
    for number, (path, _) in enumerate(packed):
        assert bucket.get(f"x-{number:05}-of-00008.rec") == path.read_bytes()


def _write_noise(folder: Path) -> Path:
    """Images whose records are more than one part of a large object."""
    for number in range(40):
        (path := folder / "ab"[number % 2] / f"{number}.png").parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (420, 420, 3), np.uint8)
        Image.fromarray(pixels).save(path, compress_level=0)
    return folder


def _client(bucket: Bucket) -> Any:
    boto3 = pytest.importorskip("boto3")
    return boto3.client("s3", endpoint_url=bucket.address, region_name="us-east-1")


def _uploads(client: Any, bucket: Bucket) -> list[str]:
    """Objects of which parts are there, and billed."""
    return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])]


@pytest.mark.parametrize(
    ("options", "name", "key"),
    [
        ([], "SIGINT", "x.rec"),
        pytest.param([], "SIGTERM", "x.rec", marks=pytest.mark.slow),
        pytest.param(["--procs", "2", "--shards", "1"], "SIGINT", "x-00000-of-00001.rec", marks=pytest.mark.slow),
        pytest.param(["--procs", "1", "--shards", "1"], "SIGTERM", "x-00000-of-00001.rec", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_command_waits_for_no_upload_and_leaves_no_parts(
    bucket: Bucket, tmp_path: Path, fault_proxy: FaultProxy, options: list[str], name: str, key: str
) -> None:
    client, source = _client(bucket), str(_write_noise(tmp_path / "noise"))
    fault_proxy.matches, fault_proxy.method, fault_proxy.stall_seconds = key, "PUT", 120
    fault_proxy.faults = ["", "stall"]
    words = ["pack", source, bucket.uri("x"), "--encoding", "pass", *options]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", "from steadytrain.__main__ import run; raise SystemExit(run())", *words]
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    while fault_proxy.faults:
        assert child.poll() is None
        time.sleep(0.02)
    os.killpg(child.pid, signal.Signals[name])
    printed, errors = child.communicate(timeout=fault_proxy.stall_seconds - 5)
    assert child.returncode == (130 if name == "SIGINT" else -signal.SIGTERM) and not printed
    assert (
        errors.endswith("steady: interrupted: the same command resumes, or starts over\n") and "Traceback" not in errors
    )
    assert not _there(bucket, key) and not _uploads(client, bucket)
    assert main([*words[:-4], "--shards", "1", "--procs", "1"] if options else words) == 0
    pack(source, tmp_path / "local" / "x", encoding="pass", shards=1 if options else None)
    assert bucket.get(key) == (tmp_path / "local" / key).read_bytes()


def test_upload_of_a_killed_process_is_removed_by_the_remaining_ones(
    bucket: Bucket, tmp_path: Path, fault_proxy: FaultProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    client, source = _client(bucket), str(_write_noise(tmp_path / "noise"))
    fault_proxy.matches, fault_proxy.method, fault_proxy.stall_seconds = ".rec", "PUT", 60
    fault_proxy.faults = ["", "stall"]
    words = ["pack", source, bucket.uri("x"), "--encoding", "pass", "--shards", "1", "--procs", "1"]
    _kill_while_it_stalls([sys.executable, "-m", "steadytrain", *words], fault_proxy)
    client.create_multipart_upload(Bucket=bucket.name, Key="x-of-somebody-else.rec")
    assert _uploads(client, bucket) == ["x-00000-of-00001.rec", "x-of-somebody-else.rec"]
    assert main(words) == 0
    assert f"removed from s3://{bucket.name} the parts of 1 upload that had been cut short" in capsys.readouterr().err
    assert _uploads(client, bucket) == ["x-of-somebody-else.rec"]
    pack(source, tmp_path / "local" / "x", encoding="pass", shards=1)
    assert bucket.get("x-00000-of-00001.rec") == (tmp_path / "local" / "x-00000-of-00001.rec").read_bytes()


def test_a_kill_leaves_no_parts_behind_when_the_command_has_run_again(
    bucket: Bucket, tmp_path: Path, fault_proxy: FaultProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    client = _client(bucket)
    _write_noise(tmp_path / "noise")
    other = client.create_multipart_upload(Bucket=bucket.name, Key="of-somebody-else")["UploadId"]
    fault_proxy.matches, fault_proxy.method, fault_proxy.stall_seconds = "x.rec", "PUT", 60
    fault_proxy.faults = ["", "stall"]
    source, out = str(tmp_path / "noise"), bucket.uri("x")
    command = [sys.executable, "-m", "steadytrain", "pack", source, out, "--encoding", "pass"]
    _kill_while_it_stalls(command, fault_proxy)
    assert set(_uploads(client, bucket)) == {"x.rec", "of-somebody-else"}
    assert main(command[3:]) == 0
    assert f"removed from s3://{bucket.name} the parts of 1 upload that had been cut short" in capsys.readouterr().err
    [left] = client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    assert (left["Key"], left["UploadId"]) == ("of-somebody-else", other)
    [(path, _)] = pack(source, tmp_path / "local", encoding="pass")
    assert bucket.get("x.rec") == path.read_bytes() and path.stat().st_size > WRITE_BYTES


def test_a_part_that_fails_costs_no_other_part(bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path) -> None:
    (tmp_path / "x.rec").write_bytes(content := os.urandom(3 * WRITE_BYTES + 5))
    fault_proxy.method = "PUT"
    fault_proxy.faults = ["", (503, "SlowDown")]
    Store(place := ObjectPlace.parse(bucket.uri("x.rec"))).write(place, tmp_path / "x.rec")
    assert bucket.get("x.rec") == content
    assert [method for method, _ in fault_proxy.methods].count("PUT") == 5  # four parts, and one of them again
