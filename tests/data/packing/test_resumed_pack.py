"""Packing that is cut short goes on: the bytes are those of work that was left alone, whenever and however it ended."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
from tests.data.packing.pictures import write_folder

from steadytrain.data.packing.pack import pack
from steadytrain.errors import DataError, StorageError, TooManyBadError

SCRIPT = """
import importlib, json, os, pathlib, signal, sys
importlib.import_module("steadytrain.data.packing.pack").MARK_SECONDS = 0.0
from steadytrain.data.packing.pack import pack
source, out, options, stop = sys.argv[1:]
journal = pathlib.Path(out).with_name("." + pathlib.Path(out).name + ".rec.journal")
def stop_at_last(done, total):
    if stop and journal.exists() and journal.read_bytes().count(b"\\n") >= int(stop):
        os.kill(os.getpid(), signal.SIGSTOP)
print("begun", flush=True)
pack(source, out, workers=2, say=lambda text: print(text, flush=True), progress=stop_at_last, **json.loads(options))
"""
SOURCES = {
    "folder": ("photos", "{}"),
    "tar": ("photos.tar.gz", '{"shorter_side": 40}'),
    "splits": ("photos", '{"val_fraction": 0.3, "seed": 5}'),
    "shards": ("photos", '{"shards": 3, "grey": true}'),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs with two bad files among them, as a folder and as a compressed tar."""
    place = tmp_path_factory.mktemp("made")
    photos = write_folder(place / "photos", {"cat": 90, "dog": 80, "elk": 80}, size=(90, 70), suffix=".jpg")
    (photos / "cat" / "bad.jpg").write_bytes(b"")
    (photos / "elk" / "page.jpg").write_text("<html>")
    with tarfile.open(place / "photos.tar.gz", "w:gz") as tar:
        tar.add(photos, "photos")
    return place


def _start(source: Path, out: Path, options: str, *, stop: str = "") -> subprocess.Popen[str]:
    """Start a process that packs, and that stops itself when the journal has ``stop`` lines."""
    command = [sys.executable, "-c", SCRIPT, str(source), str(out), options, stop]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=source.parent)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _pack_with_ends(source: Path, out: Path, options: str, how: signal.Signals, seed: int) -> list[str]:
    """Run the same command until it is done, ending it early a few times; returns what all of them said."""
    draw = random.Random(seed)
    messages: list[str] = []
    for early in (True, True, False):
        with _start(source, out, options) as process:
            assert process.stdout is not None
            messages.append(process.stdout.readline())
            if early:
                time.sleep(draw.uniform(0, 0.6))
                process.send_signal(how)
            output, error = process.communicate()
            messages += output.splitlines()
            # The one before may have been done when it was ended: then this one finds its files.
            if process.returncode == 0 or "exist in" in error:
                return messages
    raise AssertionError(messages)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("folder", signal.SIGKILL),
        pytest.param("tar", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("shards", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("splits", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("tar", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("folder", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_ended_at_any_moment_the_same_command_comes_to_the_same_bytes(
    made: Path, tmp_path: Path, kind: str, how: signal.Signals
) -> None:
    name, options = SOURCES[kind]
    with _start(made / name, tmp_path / "whole" / "a", options) as process:
        assert process.communicate()[1] == ""
    seed = random.randrange(1 << 30)
    _pack_with_ends(made / name, tmp_path / "cut" / "a", options, how, seed)
    assert _files(tmp_path / "cut") == _files(tmp_path / "whole"), f"seed {seed}"


def _cut_short(source: Path, out: Path, options: str = "{}") -> None:
    """Kill packing once something of it has been marked."""
    with _start(source, out, options, stop="5") as process:
        while process.poll() is None and psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.005)
        process.kill()


def test_notice_says_where_packing_resumes(made: Path, tmp_path: Path) -> None:
    _cut_short(made / "photos", tmp_path / "a")
    messages: list[str] = []
    pack(made / "photos", tmp_path / "a", say=messages.append)
    assert [line for line in messages if line.startswith("continuing after ")]
    assert messages[-1].endswith(" of 252 images, which were packed before")


def test_what_a_kill_left_when_all_was_in_place_goes_with_the_same_command(tmp_path: Path) -> None:
    photos, out = write_folder(tmp_path / "photos", {"cat": 3, "dog": 3}, size=(9, 7), suffix=".jpg"), tmp_path / "out"
    pack(photos, out / "x", workers=1)
    files = _files(out)
    for name in (".x.rec.journal", ".x.idx.part", ".x.lst.part"):
        (out / name).write_text("left")
    pack(photos, out / "x", workers=1)
    assert _files(out) == files


def test_other_settings_or_another_source_begin_anew_and_that_is_said(made: Path, tmp_path: Path) -> None:
    for name, options in {"a": {"quality": 80, "shorter_side": 50}, "b": {"exclude": ["elk"]}}.items():
        _cut_short(made / "photos", tmp_path / name)
        messages: list[str] = []
        pack(made / "photos", tmp_path / name, say=messages.append, **options)  # type: ignore[arg-type]
        assert [line.partition(":")[0] for line in messages] == [f"{name}.rec starts over"]


def test_files_that_were_left_out_before_count(made: Path, tmp_path: Path) -> None:
    _cut_short(made / "photos", tmp_path / "a")
    with pytest.raises(TooManyBadError, match=r"more than --max-bad 0: cat/bad\.jpg \(empty: 0 bytes\)"):
        pack(made / "photos", tmp_path / "a", max_bad=0)


def test_a_disk_that_fills_up_costs_nothing_that_was_marked(
    made: Path, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["steadytrain.data.packing.pack"], "MARK_SECONDS", 0.0)
    pack(made / "photos", tmp_path / "whole")
    size = (tmp_path / "whole.rec").stat().st_size
    (small_disk / "other").write_bytes(bytes((2 << 20) - size // 2))
    with pytest.raises(StorageError, match=r"the disk is full at .* and run the same command again"):
        pack(made / "photos", small_disk / "a")
    (small_disk / "other").unlink()
    messages: list[str] = []
    pack(made / "photos", small_disk / "a", say=messages.append)
    assert any(line.startswith("continuing after") for line in messages)
    assert (small_disk / "a.rec").read_bytes() == (tmp_path / "whole.rec").read_bytes()


def test_two_at_once_on_one_output_do_not_meet(made: Path, tmp_path: Path) -> None:
    with _start(made / "photos", tmp_path / "a", "{}") as first:
        assert first.stdout is not None
        first.stdout.readline()
        while not (tmp_path / ".a.rec.journal").exists():
            time.sleep(0.005)
        with pytest.raises(DataError, match=r"a\.rec is being written by another process|a\.rec, .* exist"):
            pack(made / "photos", tmp_path / "a")
        assert first.communicate()[1] == ""
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        f"a.{end}" for end in ("hashes", "idx", "json", "lst", "rec")
    ]
