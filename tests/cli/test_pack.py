"""``steady pack`` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.records.pictures import write_folder

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
    told, error = capsys.readouterr()
    lines = told.splitlines()
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
    assert "1 file without an image's suffix passed over (notes.txt)" in error
    assert "packing photos: done=12 total=12" in error


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
        (["photos/cat", "out"], 2, "the images in photos/cat are in no class"),
        (["photos", "photos/cat"], 2, "photos/cat is a folder: give a name in it, such as photos/cat/photos"),
        (["photos", "."], 2, ". is a folder: give a name in it, such as photos"),
        (["photos", "out", "--quality", "0"], 2, "--quality is 0; it must be from 1 to 100"),
        (["photos", "out", "--qualty", "90"], 2, "Did you mean --quality?"),
        (["photos", "out", "--encoding", "jpeg"], 2, "jpeg"),
        (["photos", "out", "--max-bad", "0"], 1, "dog/bad one.jpg (an HTML page, not an image)"),
        (["photos", "/proc/out"], 1, "/proc/out.rec"),
        (["photos", "out", "--classes", "x.json"], 2, "cannot read the card x.json"),
        (["a.lst", "out"], 2, "a.lst: line 2: 2 fields separated by tabs"),
    ],
)
def test_every_mistake_is_one_line_and_leaves_nothing(
    photos: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    Path("a.lst").write_text("0\t0\tcat/0000.jpg\n1\tcat/0001.jpg\n")
    assert main(["pack", *words]) == code
    out, error = capsys.readouterr()
    told = [line for line in error.splitlines() if line.startswith("steady: ")]
    assert len(told) == 1
    assert message in told[0]
    assert out == ""
    assert not list(Path().glob("*out*"))
    assert not list(Path().glob(".*"))


def test_nothing_is_overwritten_unless_forced(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "photos", "out"]) == 0
    before = Path("out.rec").read_bytes()
    assert main(["pack", "photos", "out", "--grey"]) == 2
    assert "out.rec, out.idx, out.json exist in .: choose another name, or give --force" in capsys.readouterr().err
    assert Path("out.rec").read_bytes() == before
    assert main(["pack", "photos", "out", "--grey", "--force"]) == 0
    assert Path("out.rec").read_bytes() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ro", "disk/out.rec is not writable (Read-only file system): choose another folder"),
        ("size=24k", "the disk is full at disk/out.rec: free some room"),
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


def test_the_command_needs_no_torch(photos: Path) -> None:
    script = "import sys; from steadytrain.cli import main; code = main(['pack', 'photos', 'out'])"
    done = subprocess.run([sys.executable, "-c", f"{script}; sys.exit(code or 'torch' in sys.modules)"])
    assert done.returncode == 0
