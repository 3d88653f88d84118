"""Remedies: commands that can be copied as they stand, and then do what is said of them."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest
from tests.data.checking.test_records import PNGS
from tests.data.packing.pictures import write_folder
from tests.data.recordio.damage import labelled, made_of

from steadytrain.cli import main
from steadytrain.data.checking.findings import Report
from steadytrain.data.checking.records import examine_records
from steadytrain.data.checking.sources import examine_source
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records

LABELLED = made_of(*(labelled(n % 2, png, id=n) for n, png in enumerate(PNGS)))


def commands(report: Report) -> list[list[str]]:
    """The remedies that are commands, as a shell takes them apart."""
    return [shlex.split(do)[1:] for do, _ in report.remedies if do.startswith("steady ")]


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 24 records, one of which is damaged, in a folder whose name needs quotes; without an index."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "it's ünder here" / "a b.rec"
    path.parent.mkdir()
    path.write_bytes(LABELLED.with_bytes(LABELLED.offsets[3], b"\0"))
    return path


def test_remedies_for_a_damaged_file_work(damaged: Path) -> None:
    salvage, index = commands(examine_records(damaged, workers=0).report)
    assert main(salvage) == 1  # the damage is still there
    with Records.open(damaged.with_name("a b-salvaged.rec")) as records:
        assert len(records) == 23
    assert main(index) == 1
    assert len(damaged.with_suffix(".idx").read_text().splitlines()) == 23
    assert commands(examine_records(damaged, workers=0).report) == [salvage]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who is refused")
def test_what_lies_on_a_read_only_place_is_salvaged_elsewhere(damaged: Path) -> None:
    damaged.parent.chmod(0o555)
    try:
        salvage, _ = commands(examine_records(damaged, workers=0).report)
        assert main(salvage) == 1
        assert Path("a b-salvaged.rec").exists()
    finally:
        damaged.parent.chmod(0o755)


def test_a_file_without_one_whole_record_is_to_be_fetched_again(damaged: Path) -> None:
    damaged.write_bytes(LABELLED.data[:100])
    [(do, why)] = examine_records(damaged, workers=0).report.remedies
    assert (do, why) == ("fetch or copy it again", "not one whole record is there")


def test_more_bad_images_than_packing_allows_can_be_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_folder(tmp_path / "my photos.v2", {"cat": 12, "dog": 12})
    for number in range(7):
        (source / "cat" / f"{number}.jpg").write_text("no image")
    [command] = commands(examine_source(source, workers=0))
    assert command == ["pack", str(source), "my photos.v2", "--max-bad", "7"]
    assert main(command) == 0
    with Records.open("my photos.v2.rec") as records:
        assert len(records) == 24


def test_no_command_is_given_that_packing_would_refuse(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "data", {"cat": 12})
    for number in range(7):
        (source / "cat" / f"{number}.jpg").write_text("no image")
    assert not commands(examine_source(source, workers=0))


def test_remedy_asks_for_the_root_of_a_list_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_folder(tmp_path / "in here", {"cat": 12, "dog": 12})
    lines = [f"{n}\t{n % 2}\t{('cat', 'dog')[n % 2]}/{n + 12 * (n % 2):04d}.png\n" for n in range(12)]
    bad = [f"{n}\t{n % 2}\tgone/{n}.png\n" for n in range(50, 70)]
    Path("a.lst").write_text("".join([*lines, *bad]))
    refused = examine_source("a.lst", workers=0)  # of which none is found: packing itself says where they are
    assert not commands(refused)
    [finding] = refused.findings.of("refused")
    assert finding.detail.endswith("give --root 'in here'")
    Path("gone").mkdir()
    Path("gone/50.png").write_bytes((source / "cat" / "0000.png").read_bytes())
    [[*command, folder]] = commands(examine_source("a.lst", workers=0))
    assert (command, folder) == (["check", "a.lst", "--root"], "FOLDER")
    [command] = commands(examine_source("a.lst", root=source, workers=0))
    assert command[-2:] == ["--max-bad", "20"]
    assert main(command) == 0


def test_an_index_that_fits_no_more_is_written_anew(tmp_path: Path) -> None:
    [(path, _)] = pack(write_folder(tmp_path / "data", {"cat": 12, "dog": 12}), tmp_path / "a")
    right = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(b"\0\xff\n")
    [command] = commands(examine_records(path, workers=0).report)
    assert main(command) == 0
    assert path.with_suffix(".idx").read_bytes() == right


def test_unreadable_index_is_reported_and_records_are_checked(tmp_path: Path) -> None:
    [(path, _)] = pack(write_folder(tmp_path / "data", {"cat": 12, "dog": 12}), tmp_path / "a")
    path.with_suffix(".idx").unlink()
    path.with_suffix(".idx").mkdir()
    report = examine_records(path, workers=0).report
    assert [finding.detail for finding in report.findings.of("index-wrong")] == ["Is a directory"]
    assert report.num_sound == 24
    shutil.rmtree(path.with_suffix(".idx"))
