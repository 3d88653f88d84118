"""``steady feed`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from tests.data.loader.pictures import encode, scene

from steadytrain.cli import main


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``photos/`` in the working directory: two classes of JPEGs of 90 x 70 pixels."""
    for number in range(20):
        folder = tmp_path / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encode(scene(number, 70, 90), "JPEG"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``digits.rec`` in the working directory: 40 grey PNGs of 8 x 8 pixels."""
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        folder = tmp_path / "digits" / str(number % 4)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(encode(scene(number, 8, 8, mode="L")))
    assert main(["pack", "digits", "digits"]) == 0
    return tmp_path / "digits.rec"


def test_a_folder_is_measured_as_training_would_read_it(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["feed", "photos", "--size", "48", "--seconds", "0.2", "--batch-size", "2", "--threads", "2", "--json"]
    assert main(words) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert (document["n"], document["size"], document["batch_size"], document["threads"]) == (20, 48, 2, 2)
    assert document["work"] == "training: resized-crop to 48 x 48, flip"
    assert document["images"] >= 2 and document["images_per_second"] > 0 and document["first_pass"] is not None
    assert document["images_per_second_per_thread"] == pytest.approx(document["images_per_second"] / 2)
    shares = [document[f"{name}_share"] for name in ("read", "decode", "augment", "batch", "blocked")]
    assert 0 < sum(shares) <= 1.05
    assert "packing photos once" in output.err and "measuring for 0.2 seconds" in output.err


def test_a_person_reads_rates_and_shares(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["feed", "digits.rec", "--seconds", "0.1", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("digits.rec: 40 images, ") and lines[0].endswith(" kB per image")
    assert lines[1].startswith("training: pad-crop to 8 x 8; batches of 128, 1 thread on ")
    assert " images/s, " in lines[3] and "MB/s read" in lines[3]
    assert lines[4] == "(decoded images are cached, 2.6 kB)"
    assert [line.split()[0] for line in lines[7:]] == ["read", "decode", "crop", "batch", "blocked", "other"]


def test_evaluation_is_measured_too(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["feed", "digits.rec", "--eval", "--seconds", "0.1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["work"] == "evaluation: resize, centre 8 x 8" and document["images"] > 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.rec"], "there is no file nothing.rec"),
        (["digits.rec", "--seconds", "0"], "--seconds is 0; it must be above 0"),
        (["digits", "--threads", "0"], "--threads is 0; it must be from 1 to 256"),
        (["digits", "--size", "0"], "--size is 0; it must be from 1 to 4096"),
        (["digits", "--batch-size", "0"], "--batch-size is 0; it must be from 1 to 1048576"),
        (["digits.rec", "--augment", "crop"], "augment"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    digits: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    capsys.readouterr()
    assert main(["feed", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_each_transform_is_measured_alone_and_all_together(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "feed",
        "photos",
        "--size",
        "32",
        "--seconds",
        "0.1",
        "--batch-size",
        "4",
        "--transforms",
        "grey:0.5,vflip",
    ]
    assert main([*words, "--json"]) == 0
    speeds = json.loads(capsys.readouterr().out)["transforms"]
    assert [speed["transform"] for speed in speeds] == ["vflip:0.5", "grey:0.5", "all of these"]
    assert all(speed["images_per_second"] == pytest.approx(4 / speed["seconds"]) for speed in speeds)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["vflip:0.5", "grey:0.5", "all"]
    assert main([*words[:2], "--transforms", "vflip", "--eval"]) == 2


def test_what_the_model_will_see_is_written_as_a_picture(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "cat").rename(photos / "<b>cat")
    words = ["feed", "photos", "--size", "32", "--transforms", "mixup:1,erase:1"]
    assert main([*words, "--show", "grid.png"]) == 0
    with Image.open("grid.png") as grid:
        assert grid.width == 8 * (128 + 4) + 4 and grid.height == 3 * (128 + 4 + 14) + 4
    assert main([*words, "--show", "grid.jpg"]) == 2
    assert "it must end with .png" in capsys.readouterr().err
