"""``steady pack`` as it is typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.data.packing.pictures import write_folder

from steadytrain.cli import main


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``photos/`` in the working directory: two classes, one bad file, one that is no image."""
    write_folder(tmp_path / "photos", {"cat": 6, "dog": 5}, size=(100, 80), suffix=".jpg")
    (tmp_path / "photos" / "dog" / "bad one.jpg").write_text("<html>404")
    (tmp_path / "photos" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def test_a_person_reads_what_was_packed(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "photos", "out"]) == 0
    output, error = capsys.readouterr()
    lines = output.splitlines()
    assert lines[0].startswith("out.rec: 11 images, ")
    assert lines[1:4] == [
        "  classes   2: cat 6, dog 5",
        "  pixels    100 x 80",
        "  stored    11 jpg; 11 byte for byte",
    ]
    assert lines[4].startswith("  channels  3, mean (0.")
    assert lines[5:] == [
        "  left out  1, because they cannot be used:",
        "    dog/bad one.jpg: an HTML page, not an image",
    ]
    assert "1 file without an image suffix skipped (notes.txt)" in error
    assert "packing photos: done=12 total=12" in error


def test_names_cannot_steer_the_terminal(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "dog" / "a\x1b[2Jb.jpg").touch()
    assert main(["pack", "photos", "out"]) == 0
    assert main(["pack", "photos", "none", "--max-bad", "0"]) == 1
    output, error = capsys.readouterr()
    assert "    dog/a?[2Jb.jpg: empty: 0 bytes" in output.splitlines()
    assert "dog/a?[2Jb.jpg (empty: 0 bytes)" in error
    assert "\x1b" not in output + error


def test_a_program_reads_one_json_document(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "photos", "out.rec", "--shorter-side", "40", "--json"]) == 0
    [card] = json.loads(capsys.readouterr().out)
    assert (card["path"], card["num_images"], card["counts"]) == ("out.rec", 11, [6, 5])
    assert card["settings"]["shorter_side"] == 40
    assert card["rejected"] == [{"name": "dog/bad one.jpg", "reason": "an HTML page, not an image"}]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["photo", "out"], 2, "there is no file or folder photo. Did you mean photos?"),
        (["photos/cat", "out"], 2, "the images in photos/cat have no classes"),
        (["photos", "photos/cat"], 2, "photos/cat is a folder: give a name in it, such as photos/cat/photos"),
        (["photos", "."], 2, ". is a folder: give a name in it, such as photos"),
        (["photos", "out", "--quality", "0"], 2, "--quality is 0; it must be from 1 to 100"),
        (["photos", "out", "--qualty", "90"], 2, "Did you mean --quality?"),
        (["photos", "out", "--encoding", "jpeg"], 2, "jpeg"),
        (["photos", "out", "--max-bad", "0"], 1, "dog/bad one.jpg (an HTML page, not an image)"),
        (["photos", "/proc/out"], 1, "/proc/out.rec"),
        (["photos", "out", "--classes", "x.json"], 2, "cannot read the card x.json"),
        (["a.lst", "out"], 2, "a.lst: line 2: 2 fields separated by tabs"),
        (["photos"], 2, "one name only, photos: name the images, then the output (steady pack photos OUT)"),
        (["https://me:pw@a.org/b.tar", "out"], 2, "holds a user or a password"),
        (["photos", "out", "--shards", "0"], 2, "0 shards of 12 images: it must be from 1 to 12"),
        (["photos", "out", "--val-fraction", "1.5"], 2, "the fraction to hold out is 1.5"),
        (["photos", "out", "--val-fraction", "0.5", "--seed", "-1"], 2, "--seed is -1; it must be from 0"),
        (["photos", "out", "--val-fraction", "0.5", "--train-per-class", "2"], 2, "use one of them"),
        (["photos", "out", "--exclude", "dgo"], 2, "there is no class dgo. Did you mean dog?"),
        (["photos", "out", "--only", "cat"], 2, "1 of 2 classes would be left"),
        (["photos", "out", "--labels", "no.csv"], 2, "there is no file of labels no.csv"),
        (["s3:/photos/raw/", "out"], 2, "is no URI of a store here"),
        (["photos", "gcs://photos/out"], 2, "gcs://photos/out is no URI of a store here"),
        (["photos-{0..3}.tar", "out"], 2, "no file for 4 of its names (photos-0.tar"),
    ],
)
def test_every_mistake_is_one_line_and_leaves_nothing(
    photos: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    Path("a.lst").write_text("0\t0\tcat/0000.jpg\n1\tcat/0001.jpg\n")
    assert main(["pack", *words]) == code
    out, error = capsys.readouterr()
    lines = [line for line in error.splitlines() if line.startswith("steady: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert out == ""
    assert not list(Path().glob("*out*"))
    assert not list(Path().glob(".*"))


def test_a_path_with_spaces_that_was_not_quoted_is_told(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos.rename("my photos")
    assert main(["pack", "my", "photos", "out"]) == 2
    assert "there is nothing called my: quote a path that has spaces ('my photos')" in capsys.readouterr().err


def test_sources_are_merged_split_and_written_in_shards(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(Path("new"), {"dog": 4, "elk": 5}, size=(100, 80), suffix=".jpg")
    command = ["pack", "photos", "new", "out", "--val-fraction", "0.3", "--shards", "2", "--exclude", "cat", "--json"]
    assert main(command) == 0
    cards = json.loads(capsys.readouterr().out)
    names = [f"out-{split}-{part}-of-00002.rec" for split in ("train", "val") for part in ("00000", "00001")]
    assert [card["path"] for card in cards] == names
    assert all(card["classes"] == ["dog", "elk"] for card in cards)
    counts = [card["counts"] for card in cards]
    assert [sum(column) for column in zip(*counts[:2], strict=True)] == [6, 3]
    assert [sum(column) for column in zip(*counts[2:], strict=True)] == [3, 2]
    assert sum(len(card["rejected"]) for card in cards) == 1


def test_labels_come_from_a_file_of_their_own(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = write_folder(Path("x"), {"flat": 4}) / "flat"
    lines = [f"{path.stem},{'odd' if number % 2 else 'even'}\n" for number, path in enumerate(sorted(flat.iterdir()))]
    Path("labels.csv").write_text("image_id,label\n" + "".join(lines))
    assert main(["pack", str(flat), "out"]) == 2
    assert "or give their labels with --labels FILE" in capsys.readouterr().err
    assert main(["pack", str(flat), "out", "--labels", "labels.csv"]) == 0
    assert "classes   2: even 2, odd 2" in capsys.readouterr().out


def test_nothing_is_overwritten_unless_forced(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "photos", "out"]) == 0
    before = Path("out.rec").read_bytes()
    assert main(["pack", "photos", "out", "--grey"]) == 2
    assert "out.rec, out.idx, out.json exist in .: choose another name, or give --force" in capsys.readouterr().err
    assert Path("out.rec").read_bytes() == before
    assert main(["pack", "photos", "out", "--grey", "--force"]) == 0
    assert Path("out.rec").read_bytes() != before


def test_the_same_command_again_finds_its_files(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pack", "photos", "out", "--val-fraction", "0.3"]
    assert main(command) == 0
    before = [path.stat().st_mtime_ns for path in sorted(Path().glob("out*"))]
    first = capsys.readouterr().out
    assert main(command) == 0
    again = capsys.readouterr()
    assert again.out == first
    assert "out-train.rec is packed already, from these images with these settings: it stays" in again.err
    assert [path.stat().st_mtime_ns for path in sorted(Path().glob("out*"))] == before
    assert main([*command, "--seed", "7"]) == 2, "other images on each side"
    image = next(iter(Path("photos").glob("*/*")))
    os.utime(image, (time.time() + 5, time.time() + 5))
    assert main(command) == 2, "an image has changed since"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ro", "disk/out.rec is not writable (Read-only file system): choose another folder"),
        ("size=24k", "the disk is full at disk/out.rec: free some space"),
    ],
)
def test_a_disk_that_cannot_be_written_is_said(photos: Path, options: str, message: str) -> None:
    Path("disk").mkdir()
    script = f"""
        mount -t tmpfs -o {options} none disk && echo mounted || exit
        "{sys.executable}" -m steadytrain pack photos disk/out
        echo $?
        ls -A disk
    """
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.startswith("mounted"):
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert done.stdout == "mounted\n1\n"
    assert f"steady: {message}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM)])
def test_an_interruption_as_children_begin_is_one_line_and_leaves_nothing(name: str, code: int, photos: Path) -> None:
    write_folder(photos, {"cat": 100}, size=(100, 80), suffix=".jpg")
    command = [sys.executable, "-m", "steadytrain", "pack", "photos", "out", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        while process.poll() is None and not psutil.Process(process.pid).children():
            time.sleep(0.001)
        os.killpg(process.pid, signal.Signals[name])  # as a terminal does
        out, error = process.communicate()
    assert (process.returncode, out) == (code, b"")
    assert b"Traceback" not in error
    assert error.endswith(b"steady: interrupted: the same command resumes, or starts over\n")
    assert not list(Path().glob("*out*")) and not list(Path().glob(".*"))


def test_the_command_needs_no_torch(photos: Path) -> None:
    script = "import sys; from steadytrain.cli import main; code = main(['pack', 'photos', 'out'])"
    done = subprocess.run([sys.executable, "-c", f"{script}; sys.exit(code or 'torch' in sys.modules)"])
    assert done.returncode == 0
