"""A record file that is written to, cut or replaced while it is read: told, never taken for damage, never a crash."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.data.checking.test_records import PNGS
from tests.data.recordio.damage import labelled, made_of

from steadytrain.data.checking.records import examine_records
from steadytrain.data.checking.salvage import salvage
from steadytrain.errors import DataError

LONG = made_of(*(labelled([n % 2, 1.0], PNGS[n % 24] + bytes(1000), id=n) for n in range(300)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """300 records in 0.5 MB, of label vectors, which are read apart from the blocks of the file."""
    (tmp_path / "a.rec").write_bytes(LONG.data)
    return tmp_path / "a.rec"


def once(act: Callable[[], object]) -> Callable[[int, int], None]:
    """Progress that does something when it is first told of any."""
    waiting = [act]

    def advance(done: int, total: int) -> None:
        assert 0 < done <= total
        if waiting:
            waiting.pop()()

    return advance


def test_records_appended_during_a_check_are_not_read_and_reported(path: Path) -> None:
    def grow() -> None:
        with path.open("ab") as file:
            file.write(LONG.data[:100])

    report = examine_records(path, workers=0, progress=once(grow)).report
    assert (report.num_images, report.bytes) == (300, len(LONG.data))
    assert [finding.kind for finding in report.findings.of("changing")] == ["changing"]
    assert not report.findings.counts["cut-short"]
    assert not report.is_usable


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("left", [0, 60_000, 400_000])
def test_file_that_shrinks_ends_the_check_in_one_clear_line(path: Path, left: int, decode: bool) -> None:
    with pytest.raises(DataError, match=r"a\.rec became shorter while being read .*: wait until it is written"):
        examine_records(path, workers=0, decode=decode, progress=once(lambda: os.truncate(path, left)))


def test_replaced_file_is_reported(path: Path) -> None:
    def replace() -> None:
        path.with_suffix(".new").write_bytes(bytes(len(LONG.data)))
        path.with_suffix(".new").replace(path)

    findings = examine_records(path, workers=0, progress=once(replace)).report.findings
    assert findings.counts["changing"] == 1
    assert not findings.counts["stray-bytes"]


def test_unchanged_file_is_not_reported(path: Path) -> None:
    assert not examine_records(path, workers=2).report.findings.counts["changing"]


def test_salvage_of_a_file_that_was_cut_since_leaves_nothing_behind(path: Path) -> None:
    examined = examine_records(path, workers=0)
    os.truncate(path, 100_000)
    with pytest.raises(DataError, match="while it is read"):
        salvage(examined, path.with_name("out.rec"), workers=2)
    assert [file.name for file in path.parent.iterdir()] == ["a.rec"]
