"""Files of the kernel: read once, or opened once and read again; what is not there is None, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.machine.procfs import (
    KernelFile,
    counter,
    matching,
    parse_int,
    parse_table,
    pressure_seconds,
    processor_seconds,
    read,
    read_choice,
    read_counters,
    read_meminfo,
)


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "cpu.stat"
    path.write_text("nr_periods 1\nnr_throttled 0\n")
    file = KernelFile(path)
    assert counter(file.read(), "nr_throttled") == 0
    path.write_text("nr_periods 9\nnr_throttled 4\n")
    assert (counter(file.read(), "nr_throttled"), counter(file.read(), "nr"), counter(file.read(), "throttled")) == (
        4,
        None,
        None,
    )
    file.close()
    assert file.read() == b"" and counter(file.read(), "nr_throttled") is None


def test_longer_than_the_kernel_gives_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * 200_000 + b"\nlast 7\n")
    file = KernelFile(path)
    assert len(file.read()) == 200_008 and counter(file.read(), "last") == 7
    file.close()


@pytest.mark.parametrize(("text", "number"), [("4096\n", 4096), ("max\n", None), ("-1\n", None), ("", None)])
def test_a_limit_or_none(tmp_path: Path, text: str, number: int | None) -> None:
    path = tmp_path / "memory.max"
    path.write_text(text)
    file = KernelFile(path)
    assert file.number() == number
    file.close()


def test_what_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert KernelFile(tmp_path / "nothing").read() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_process_that_has_ended_says_nothing_more() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        file = KernelFile(Path(f"/proc/{child.pid}/stat"))
        assert file.read().startswith(f"{child.pid} (".encode())
    assert file.read() == b""
    file.close()


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert read(gone) is None and parse_int(read(gone)) is None and read_choice(gone) is None
    assert read_counters(gone) == {} and parse_table(read(gone)) == {} and matching(gone, "*") == []


def test_a_folder_in_place_of_a_file_is_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_bytes_that_are_no_text_are_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"model\xff 1\n")
    assert (read(tmp_path / "a") or "").startswith("model")


def test_a_limit_that_is_the_word_max_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert parse_int(read(tmp_path / "memory.max")) is None


def test_the_chosen_word_is_the_one_in_brackets(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert read_choice(tmp_path / "enabled") == "madvise"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_processors_memory_and_pressure_of_this_machine() -> None:
    seconds = processor_seconds((read("/proc/stat") or "").encode())
    assert set(seconds) >= os.sched_getaffinity(0)
    assert all(one.busy >= 0 and one.idle >= 0 for one in seconds.values())
    assert read_meminfo()["MemTotal"] > 1 << 20
    pressure = read("/proc/pressure/cpu")
    assert pressure is None or pressure_seconds(pressure.encode()) is not None
