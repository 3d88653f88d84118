"""The list beside a record file: MXNet's form to the byte, and what a record is called by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.data.recordio.lst import RecordList, format_line, parse_line
from steadytrain.data.recordio.reader import Records

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9).filter(lambda name: name.strip() == name)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _as_mxnet_reads(text: str) -> list[tuple[int, str, list[float]]]:
    """The rules of ``im2rec``'s read_list and of ``ImageIter``, which open a list as text of UTF-8."""
    rows = [[field.strip() for field in line.strip().split("\t")] for line in text.splitlines()]
    return [(int(row[0]), row[-1], [float(value) for value in row[1:-1]]) for row in rows if len(row) >= 3]


@pytest.mark.parametrize("name", ["cifar120", "photos40"])
def test_lines_are_those_of_im2rec_to_the_byte(data_folder: Path, name: str) -> None:
    text = (data_folder / "mxnet-rec" / "im2rec" / f"{name}.lst").read_text()
    lines = [parse_line(line) for line in text.splitlines()]
    assert "".join(format_line(line.id, line.labels, line.path) for line in lines) == text


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.lists(FLOATS, min_size=1, max_size=4), NAMES)
def test_a_line_stays_a_line_and_labels_keep_their_value(id_: int, labels: list[float], name: str) -> None:
    text = format_line(id_, labels, name)
    assert text.count("\n") == 1 and text.endswith("\n") and "\r" not in text
    line = parse_line(text)
    assert line.id == id_ and np.array_equal(np.array(line.labels, np.float32), np.array(labels, np.float32))
    if not set("\t\n\r") & set(name):
        assert line.path == name
        assert len(name.splitlines()) > 1 or _as_mxnet_reads(text)[0][:2] == (id_, name)


def test_what_would_break_a_line_is_spelled_out() -> None:
    assert format_line(1, 2, "a\tb\nc\rd\udce9.jpg") == "1\t2.000000\ta\\tb\\nc\\rd\\xe9.jpg\n"


@pytest.mark.parametrize("name", ["cifar120", "photos40"])
def test_records_of_mxnet_are_named_by_its_list(data_folder: Path, name: str) -> None:
    path = data_folder / "mxnet-rec" / "im2rec" / f"{name}.rec"
    lines = (path.with_suffix(".lst")).read_text().splitlines()
    with Records.open(path) as records:
        names = list(records.names())
        assert records.describe(7) == f"record 7 of {path} ({names[7]})"
    assert names == [line.split("\t")[2] for line in lines]


def test_a_record_is_named_only_by_a_line_with_its_id_and_label(tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("4\t1\tone.jpg\n5\t2\t7\tvector.jpg\nno line\n6\t0\ttwice.jpg\n6\t0\tagain.jpg\n")
    listed = RecordList.read(tmp_path / "a.lst")
    assert listed.name(4, [1]) == "one.jpg"
    assert listed.name(4, [0]) == listed.name(9, [1]) == listed.name(2**63 + 4, [1]) == ""
    assert listed.name(5, [2, 7]) == listed.name(5, [2]) == "vector.jpg"  # im2rec stores the first one alone
    assert listed.name(5, [2, 8]) == listed.name(5, [2, 7, 1]) == listed.name(6, [0]) == ""
