"""A writer that leaves a whole file or none, and takes up the work of one that was killed."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.data.recordio.framing import frame, pack_header
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import DataError, StorageError


def test_files_appear_only_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.rec"
    with RecordWriter(path) as writer:
        writer.write(pack_header(1, id=5) + b"one", key=5)
        writer.companions[".json"] = "{}"
        assert [p.name for p in path.parent.iterdir()] == [".a.rec.part"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.idx", "a.json", "a.rec"]
    assert path.with_suffix(".idx").read_text() == "5\t0\n"
    assert writer.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert writer.num_bytes == path.stat().st_size


KILLED = """
import os, sys
from pathlib import Path
from steadytrain.data.recordio.writer import RecordWriter
renames = []
def kill(event, args):
    if event == "os.rename":
        renames.append(args)
        len(renames) == int(sys.argv[2]) and os.kill(os.getpid(), 9)
sys.addaudithook(kill)
with RecordWriter(Path(sys.argv[1]) / "a.rec") as writer:
    writer.write(b"x", key=0)
    writer.companions[".json"] = "{}"
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
    killed = "import os, sys, pathlib; from steadytrain.data.recordio.writer import RecordWriter as W"
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
from steadytrain.data.recordio.writer import RecordWriter
try:
    with RecordWriter(Path(sys.argv[1]) / "a.rec") as writer:
        for key in range(64):
            writer.write(bytes(1 << 16), key)
except StorageError as error:
    print(error, [p.name for p in Path(sys.argv[1]).iterdir()])
"""


def test_full_disk_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=512k none "{disk}" && exec "{sys.executable}" "{script}" "{disk}"'
    process = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount], capture_output=True
    )
    if process.returncode:
        pytest.skip(f"no small disk can be mounted here: {process.stderr.decode().strip()}")
    assert process.stdout.decode().startswith(f"the disk is full at {disk}/a.rec: free some space")
    assert process.stdout.decode().endswith("[]\n")


def test_folder_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(StorageError, match=r"/proc/steady"):
        RecordWriter(Path("/proc/steady/a.rec"))


RECORDS = [pack_header(k % 3, id=k) + bytes([k]) * (k * 37 % 300) for k in range(40)]
WORK = """
import os, pickle, sys
from pathlib import Path
from steadytrain.data.recordio.writer import RecordWriter
records, kill_at, path = pickle.load(sys.stdin.buffer)
with RecordWriter(path, work="photos") as writer:
    for key in range(writer.notes[-1] + 1 if writer.notes else 0, len(records)):
        writer.write(records[key], key)
        if key % 7 == 6:
            writer.mark(key)
        if key == kill_at:
            os.kill(os.getpid(), 9)
"""


def work(path: Path, kill_at: int) -> int:
    text = pickle.dumps((RECORDS, kill_at, path))
    return subprocess.run([sys.executable, "-c", WORK], input=text).returncode


@pytest.mark.parametrize("kills", [[5], [6], [20], [12, 13, 14, 39]])
def test_killed_work_goes_on_and_ends_in_the_bytes_of_uninterrupted_work(tmp_path: Path, kills: list[int]) -> None:
    assert work(tmp_path / "whole" / "a.rec", -1) == 0
    for kill_at in kills:
        assert work(tmp_path / "a.rec", kill_at) == -9
    assert work(tmp_path / "a.rec", -1) == 0
    for suffix in (".rec", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / "whole" / f"a{suffix}").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.idx", "a.rec", "whole"]


def test_marked_work_is_taken_up_with_its_notes_and_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    assert work(path, 20) == -9
    with RecordWriter(path, work="photos") as writer:
        assert writer.notes == [6, 13, 20]
        assert len(writer) == 21
    assert writer.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_mark_that_a_kill_cut_short_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    assert work(path, 20) == -9
    journal = tmp_path / ".a.rec.journal"
    journal.write_bytes(journal.read_bytes()[:-9])
    with RecordWriter(path, work="photos") as writer:
        assert writer.notes == [6, 13]
        assert writer.num_bytes == sum(len(frame(record)) for record in RECORDS[:14])


@pytest.mark.parametrize("name", [".a.rec.journal", ".a.rec.part"])
@pytest.mark.parametrize("place", [0.05, 0.4, 0.9])
def test_work_is_taken_up_to_the_last_mark_before_a_flipped_bit(tmp_path: Path, name: str, place: float) -> None:
    assert work(tmp_path / "whole" / "a.rec", -1) == 0
    path = tmp_path / "a.rec"
    with pytest.raises(KeyboardInterrupt), RecordWriter(path, work="photos") as writer:
        for key in range(21):
            writer.write(RECORDS[key], key)
            if key % 7 == 6:
                writer.mark(key)
        raise KeyboardInterrupt
    content = bytearray((tmp_path / name).read_bytes())
    content[round(place * len(content))] ^= 1
    (tmp_path / name).write_bytes(content)
    with RecordWriter(path, work="photos") as writer:
        assert writer.notes in ([], [6], [6, 13])
        for key in range(len(writer), len(RECORDS)):
            writer.write(RECORDS[key], key)
    for suffix in (".rec", ".idx"):
        assert path.with_suffix(suffix).read_bytes() == (tmp_path / "whole" / f"a{suffix}").read_bytes()


@pytest.mark.parametrize("lines", [(0, 1, 1), (0, 2), (0, 2, 1)], ids=["twice", "missing", "in another order"])
def test_marks_count_only_in_their_order(tmp_path: Path, lines: tuple[int, ...]) -> None:
    path, journal = tmp_path / "a.rec", tmp_path / ".a.rec.journal"
    with pytest.raises(KeyboardInterrupt), RecordWriter(path, work="photos") as writer:
        for key in range(2):
            writer.write(RECORDS[key], key)
            writer.mark(key)
        raise KeyboardInterrupt
    written = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(written[line] for line in lines))
    with RecordWriter(path, work="photos") as writer:
        assert writer.notes == [0][: lines[1] % 2]


@pytest.mark.parametrize("other", ["cats", None])
def test_other_work_starts_over(tmp_path: Path, other: str | None) -> None:
    path = tmp_path / "a.rec"
    assert work(path, 20) == -9
    with RecordWriter(path, work=other) as writer:
        assert not writer.notes
        writer.write(b"whole", key=0)
    assert path.read_bytes() == frame(b"whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.idx", "a.rec"]


def test_ctrl_c_keeps_what_was_marked_and_an_error_in_the_data_does_not(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    for error, stays in ((KeyboardInterrupt(), True), (DataError("bad"), False)):
        with pytest.raises(type(error)), RecordWriter(path, work="photos") as writer:
            writer.write(b"one", key=len(writer))
            writer.mark("one")
            raise error
        assert (tmp_path / ".a.rec.part").exists() is stays


TWO = """
import os, pickle, sys
from contextlib import ExitStack
from pathlib import Path
from steadytrain.data.recordio.writer import RecordWriter
records, kill_after, folder = pickle.load(sys.stdin.buffer)
with ExitStack() as stack:
    writers = [stack.enter_context(RecordWriter(folder / f"{name}.rec", work=name)) for name in "ab"]
    for writer in writers:
        for key in range(len(writer), len(records)):
            writer.write(records[key], key)
        writer.mark(len(records))
        writer.companions[".json"] = "{}"
    for number, writer in enumerate(writers):
        if number == kill_after:
            os.kill(os.getpid(), 9)
        writer.place()
    if kill_after == 2:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("kill_after", [0, 1, 2])
def test_a_kill_while_files_are_put_in_place_costs_nothing(tmp_path: Path, kill_after: int) -> None:
    for folder, kill in ((tmp_path / "whole", -1), (tmp_path / "cut", kill_after), (tmp_path / "cut", -1)):
        text = pickle.dumps((RECORDS, kill, folder))
        code = subprocess.run([sys.executable, "-c", TWO], input=text).returncode
        assert code == (0 if kill < 0 else -9)
    whole, cut = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("whole", "cut"))
    assert cut == whole
    assert sorted(cut) == ["a.idx", "a.json", "a.rec", "b.idx", "b.json", "b.rec"]


def test_finished_file_is_not_removed_by_later_work(tmp_path: Path) -> None:
    text = pickle.dumps((RECORDS, 1, tmp_path))
    assert subprocess.run([sys.executable, "-c", TWO], input=text).returncode == -9
    with pytest.raises(DataError, match=r"a\.rec, a\.idx, a\.json exist in"):
        RecordWriter(tmp_path / "a.rec", work="other")
    assert (tmp_path / "a.rec").exists()
