"""What was predicted for each image, as a file: read back as it was written, a million lines in little time."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from steadytrain.cli import main
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.results.predictions import HEAD, ImageResult, read_predictions, write_predictions
from steadytrain.errors import DataError


def shards(folder: Path) -> Records:
    """Two record files of three images each, classes 0, 1 and 2."""
    for name in ("a", "b"):
        with RecordWriter(folder / f"{name}.rec") as writer:
            for i in range(3):
                writer.write(pack_header(i, id=i) + b"no image", key=i)
    return Records.open(folder / "{a,b}.rec")


def test_written_predictions_are_read_back_with_their_record_numbers(tmp_path: Path) -> None:
    outputs = np.array([[1, 0.5, 2.0, 3], [2, 0.75, 0.25, 1]], np.float32)
    with shards(tmp_path) as records:
        write_predictions(tmp_path / "p.csv", records, np.array([0, 5]), ('a "quoted", name', "b", "c"), outputs)
        first, second = read_predictions(tmp_path / "p.csv")
        assert [records.number(row.shard, row.record) for row in (first, second)] == [0, 5]
        with pytest.raises(IndexError, match="record 3 of b"):
            records.number("b.rec", 3)
    assert first == ImageResult("", "a.rec", 0, 'a "quoted", name', "b", 0.135335, 0.5, 2.0, 3)
    assert second == ImageResult("", "b.rec", 2, "c", "c", 0.778801, 0.75, 0.25, 1)
    assert sorted(path.name for path in tmp_path.glob("*p.csv*")) == ["p.csv"]


@pytest.mark.parametrize(
    ("text", "message"), [("a,b\n1,2\n", "does not begin with the columns"), (f"{HEAD}\nx,y\n", "line 2 of ")]
)
def test_another_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_predictions(tmp_path / "p.csv"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("p.txt", "ends in .txt: it is a CSV file"),
        ("no/p.csv", "does not exist: make it"),
        ("mine.csv", "exists and is no list of predictions"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_evaluated(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.csv").write_text("a,b\n")
    assert main(["evaluate", str(tmp_path / "no-run"), "--per-image", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_names_that_a_spreadsheet_would_compute_are_read_back_equal(tmp_path: Path) -> None:
    names = (
        "=1+1",
        "+1",
        "-1",
        "@x",
        "\t=1",
        "=cmd|' /C calc'!A0",
        '=HYPERLINK("http://x")',
        "'=1",
        "NA",
        "007",
        "1e5",
        "a\nb",
    )
    outputs = np.array([[number, 0.5, 0.7, 1] for number in range(len(names))], np.float32)
    with shards(tmp_path) as records:
        write_predictions(tmp_path / "p.csv", records, np.arange(len(names)) % 6, names, outputs)
    assert tuple(row.predicted for row in read_predictions(tmp_path / "p.csv")) == names
    with (tmp_path / "p.csv").open(newline="", encoding="utf-8") as file:
        assert tuple(row["predicted"] for row in csv.DictReader(file)) == names
