"""The bytes of RecordIO, and a writer that leaves a whole file or none."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.errors import DataError, StorageError
from steadytrain.records.index import scan
from steadytrain.records.recordio import (
    MAX_PAYLOAD,
    RecordWriter,
    frame,
    pack_header,
    read_payload,
    unpack,
)

MAGIC = bytes.fromhex("0a23d7ce")
# Written by MXNet 1.9.1.
GOLDEN = {
    b"abcd" + MAGIC + b"ef": "0a23d7ce 04000020 61626364 0a23d7ce 02000060 65660000",
    MAGIC + MAGIC: "0a23d7ce 00000020 0a23d7ce 00000040 0a23d7ce 00000060",
    b"ab" + MAGIC + b"cd": "0a23d7ce 08000000 6162 0a23d7ce 6364",
}
PAYLOADS = st.lists(st.sampled_from([MAGIC, b"", b"a", b"bc", b"wxyz", b"\0" * 7]), max_size=9).map(b"".join)


@pytest.mark.parametrize("payload", GOLDEN)
def test_frames_are_those_of_mxnet(payload: bytes) -> None:
    assert frame(payload) == bytes.fromhex(GOLDEN[payload])


def test_headers_are_those_of_mxnet() -> None:
    golden = "00000000 00006041 20263301 00000000 0000000000000000"
    assert pack_header(14.0, id=20129312) == bytes.fromhex(golden)
    assert unpack(pack_header([1.0, 2.5, -3.0], id=8) + b"!").labels == (1.0, 2.5, -3.0)


@settings(deadline=None)
@given(st.lists(PAYLOADS, min_size=1, max_size=5))
def test_every_payload_comes_back_and_is_found(payloads: list[bytes]) -> None:
    file = memoryview(b"".join(frame(payload) for payload in payloads))
    assert [bytes(read_payload(file, int(at))) for at in scan(file)] == payloads


@settings(deadline=None)
@given(PAYLOADS)
def test_no_aligned_magic_is_left_inside_a_part(payload: bytes) -> None:
    framed = frame(payload)
    words = [framed[at : at + 4] for at in range(0, len(framed), 4)]
    at = 0
    parts = 0
    while at < len(framed):
        parts += 1
        at += 8 + ((int.from_bytes(framed[at + 4 : at + 8], "little") & MAX_PAYLOAD) + 3) // 4 * 4
    assert words.count(MAGIC) == parts


def test_short_payloads_are_named_as_such() -> None:
    with pytest.raises(DataError, match="10 bytes is too short for an image header"):
        unpack(b"0123456789")
    with pytest.raises(DataError, match="too short for the 2 labels"):
        unpack(pack_header([1.0, 2.0], id=0)[:-1])


def test_files_appear_only_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.rec"
    with RecordWriter(path) as writer:
        writer.write(pack_header(1, id=5) + b"one", key=5)
        writer.beside[".json"] = "{}"
        assert [p.name for p in path.parent.iterdir()] == [".a.rec.part"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.idx", "a.json", "a.rec"]
    assert path.with_suffix(".idx").read_text() == "5\t0\n"
    assert writer.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert writer.num_bytes == path.stat().st_size


KILLED = """
import os, sys
from pathlib import Path
from steadytrain.records.recordio import RecordWriter
renames = []
def kill(event, args):
    if event == "os.rename":
        renames.append(args)
        len(renames) == int(sys.argv[2]) and os.kill(os.getpid(), 9)
sys.addaudithook(kill)
with RecordWriter(Path(sys.argv[1]) / "a.rec") as writer:
    writer.write(b"x", key=0)
    writer.beside[".json"] = "{}"
"""


@pytest.mark.parametrize("rename", [1, 2, 3])
def test_a_kill_between_two_names_leaves_no_records_without_index_and_card(tmp_path: Path, rename: int) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(rename)]).returncode == -9
    assert not (tmp_path / "a.rec").exists()


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(b"half", key=0)
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("mine")
    with pytest.raises(DataError, match=r"a\.json exists in .*--force"):
        RecordWriter(tmp_path / "a.rec")
    with RecordWriter(tmp_path / "a.rec", force=True) as writer:
        writer.write(b"x", key=0)
    # The card of what was there before would be a lie about what is there now.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.idx", "a.rec"]


def test_a_second_writer_is_refused_and_a_killed_one_is_succeeded(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    killed = "import os, sys, pathlib; from steadytrain.records.recordio import RecordWriter as W"
    killed += "; w = W(pathlib.Path(sys.argv[1])); w.write(b'x' * (1 << 21), key=0); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed, str(path)]).returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == [".a.rec.part"]
    with RecordWriter(path) as writer:
        with pytest.raises(DataError, match="being written by another process"):
            RecordWriter(path)
        writer.write(b"whole", key=0)
    assert path.read_bytes() == frame(b"whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.idx", "a.rec"]


FULL = """
import sys
from pathlib import Path
from steadytrain.errors import StorageError
from steadytrain.records.recordio import RecordWriter
try:
    with RecordWriter(Path(sys.argv[1]) / "a.rec") as writer:
        for key in range(64):
            writer.write(bytes(1 << 16), key)
except StorageError as error:
    print(error, [p.name for p in Path(sys.argv[1]).iterdir()])
"""


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=512k none "{disk}" && exec "{sys.executable}" "{script}" "{disk}"'
    told = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount], capture_output=True)
    if told.returncode:
        pytest.skip(f"no small disk can be mounted here: {told.stderr.decode().strip()}")
    assert told.stdout.decode().startswith(f"the disk is full at {disk}/a.rec: free some room")
    assert told.stdout.decode().endswith("[]\n")


def test_a_folder_that_cannot_be_written_is_said() -> None:
    with pytest.raises(StorageError, match=r"/proc/steady"):
        RecordWriter(Path("/proc/steady/a.rec"))
