"""A source of images of another package is one file: it is trained on, packed and checked like ours."""

from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from steadytrain.cli import main

SOURCE = """
import struct

import numpy as np

from steadytrain.data.names import Names
from steadytrain.data.sources.listing import FileList, Listing, Pieces
from steadytrain.data.sources.source import Request, SourceKind
from steadytrain.errors import DataError

MAGIC = b"ALBUM\\0"


def recognise(request: Request) -> bool:
    return [path.suffix for path in request.paths] == [".album"]


def list_album(request: Request) -> list[Listing]:
    data = request.where.read_bytes()
    if not data.startswith(MAGIC):
        raise DataError(f"{request.where} is no album: make it again")
    at, starts, sizes, labels = len(MAGIC), [], [], []
    while at < len(data):
        label, size = struct.unpack_from("<BI", data, at)
        starts.append(at + 5)
        sizes.append(size)
        labels.append(label)
        at += 5 + size
    lengths, number = np.array(sizes, np.int64), len(sizes)
    places = Pieces((str(request.where),), np.zeros(number, np.int32), np.array(starts, np.int64), lengths)
    times = np.full(number, request.where.stat().st_mtime_ns, np.int64)
    pages = FileList(Names(f"page {page}" for page in range(number)), lengths, times, places)
    classes = tuple(request.classes or ("dark", "light"))
    return [pages.listing(range(number), np.array(labels, np.int64), root=request.where, classes=classes)]


SOURCE = SourceKind(name="a photo album", recognise=recognise, list=list_album)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one file and one entry point."""
    about = tmp_path / "photo_album-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: photo-album\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[steadytrain.sources]\nalbum = photo_album:SOURCE\n")
    (tmp_path / "photo_album.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("photo_album", None)


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """20 dark and 20 light images of 8 x 8 pixels."""
    random, pages = np.random.default_rng(1), [b"ALBUM\0"]
    for number in range(40):
        pixels = random.integers(0, 100, (8, 8, 3), np.uint8) + np.uint8(150 * (number % 2))
        Image.fromarray(pixels).save(png := io.BytesIO(), "PNG")
        pages.append(struct.pack("<BI", number % 2, len(png.getvalue())) + png.getvalue())
    path = tmp_path / "holidays.album"
    path.write_bytes(b"".join(pages))
    return path


def test_a_source_in_one_file_is_packed_checked_and_trained_on(
    album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(album), str(tmp_path / "packed")]) == 0
    card = json.loads((tmp_path / "packed.json").read_text())
    assert (card["classes"], card["counts"]) == (["dark", "light"], [20, 20])
    capsys.readouterr()

    assert main(["check", str(album), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["classes"] == {"dark": 20, "light": 20}

    words = ["--model", "mlp", "--epochs", "2", "--batch-size", "8", "--device", "cpu", "--run", str(tmp_path / "run")]
    assert main(["train", str(album), *words]) == 0
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert next(event for event in events if event["kind"] == "Started")["data"]["classes"] == ["dark", "light"]


def test_what_it_refuses_and_options_that_do_not_apply_are_told_like_ours(
    album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(album), str(tmp_path / "out"), "--label-column", "x"]) == 2
    assert "--label-column x names a column of a table" in capsys.readouterr().err
    album.write_bytes(b"\0\1\2\3" * 100)
    assert main(["pack", str(album), str(tmp_path / "out")]) == 2
    assert f"{album} is no album: make it again" in capsys.readouterr().err


def test_a_broken_package_is_named_and_breaks_nothing_else(
    album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photo_album.py").write_text("import nothing_of_the_kind\n")
    folder = tmp_path / "photos"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (name == "cat" and "red") or "blue").save(folder / name / "1.png")
    assert main(["pack", str(folder), str(tmp_path / "out")]) == 0
    assert "photo_album" not in capsys.readouterr().err  # nothing asked for it

    assert main(["pack", str(album), str(tmp_path / "album")]) == 2
    error = capsys.readouterr().err
    assert "the source album cannot be used: photo_album:SOURCE cannot be loaded" in error
    assert "is not a kind of file that can be read" in error
