"""Packing into a store: the files of a local pack, visible only when whole, and none sent twice after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.store import Bucket, FaultProxy

from steadytrain.cli import main
from steadytrain.data.packing.pack import pack
from steadytrain.errors import DataError

SUFFIXES = (".rec", ".idx", ".json", ".lst")


def _there(bucket: Bucket, key: str) -> bytes | None:
    try:
        return bucket.get(key)
    except FileNotFoundError:
        return None


def test_what_is_packed_into_a_store_is_what_is_packed_on_a_disk(
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


def test_a_kill_while_sending_costs_no_file_that_is_there(
    bucket: Bucket, digits_folder: Path, fault_proxy: FaultProxy
) -> None:
    fault_proxy.matches = "-00002-of-00004.rec"
    fault_proxy.method = "PUT"
    fault_proxy.stall_seconds = 60
    fault_proxy.faults = ["stall"]
    command = [sys.executable, "-m", "steadytrain", "pack", str(digits_folder), bucket.uri("x"), "--shards", "4"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while fault_proxy.faults:
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert _there(bucket, "x-00001-of-00004.rec") and _there(bucket, "x-00002-of-00004.rec") is None
    before = len(fault_proxy.requests)
    assert subprocess.run(command, env=dict(os.environ), capture_output=True, check=True).returncode == 0
    sent = [path.rpartition("/")[2] for method, path in fault_proxy.methods[before:] if method == "PUT"]
    assert sorted(sent) == ["x-00002-of-00004.rec", "x-00003-of-00004.rec"]
    packed = pack(digits_folder, Path(os.environ["STEADYTRAIN_CACHE"]) / "local", shards=4)
    for number, (path, _) in enumerate(packed):
        assert bucket.get(f"x-{number:05}-of-00004.rec") == path.read_bytes()
