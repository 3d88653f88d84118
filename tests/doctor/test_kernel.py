"""What is not there is None, and never an error."""

from __future__ import annotations

from pathlib import Path

from steadytrain.machine.procfs import beside, chosen, counters, number, read, table


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert read(gone) is None and number(gone) is None and chosen(gone) is None
    assert counters(gone) == {} and table(read(gone)) == {} and beside(gone, "*") == []


def test_a_folder_in_place_of_a_file_is_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_bytes_that_are_no_text_are_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"model\xff 1\n")
    assert (read(tmp_path / "a") or "").startswith("model")


def test_a_limit_that_is_the_word_max_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert number(tmp_path / "memory.max") is None


def test_the_chosen_word_is_the_one_in_brackets(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert chosen(tmp_path / "enabled") == "madvise"
