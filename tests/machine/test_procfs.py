"""Files of the kernel; what is not there is None, and never an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.machine.trees import tree

from steadytrain.machine.procfs import (
    TICKS,
    ProcessorSeconds,
    parse_table,
    pressure_seconds,
    processor_seconds,
    read,
    read_counters,
)


def test_longer_than_the_kernel_gives_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * 200_000 + b"\nlast 7\n")
    assert read_counters(path) == {"last": 7}


def test_counters_have_the_whole_name_and_kilobytes_become_bytes(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    path.write_text("nr_periods 9\nnr_throttled 4\nread_bytes: 5\nMemFree:   4 kB\nmax -1\nlimit max\na b 3\n")
    assert read_counters(path) == {"nr_periods": 9, "nr_throttled": 4, "read_bytes": 5, "MemFree": 4096}


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert read(gone) is None and pressure_seconds(gone) is None and processor_seconds(gone) == {}
    assert read_counters(gone) == {} and parse_table(read(gone)) == {}


def test_a_folder_in_place_of_a_file_is_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_bytes_that_are_no_text_are_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"model\xff 1\n")
    assert (read(tmp_path / "a") or "").startswith("model")


def test_what_became_of_a_processors_seconds(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/stat": "cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 100 0 200 800 50 0 0 10 70 0\nintr 5"})
    seconds = ProcessorSeconds(*(ticks / TICKS for ticks in (300, 800, 50, 10)))
    assert processor_seconds(root) == processor_seconds(root, frozenset({0})) == {0: seconds}
    assert processor_seconds(root, frozenset({1})) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_processors_memory_and_pressure_of_this_machine() -> None:
    seconds = processor_seconds()
    assert set(seconds) >= os.sched_getaffinity(0)
    assert all(second.busy >= 0 and second.idle >= 0 for second in seconds.values())
    assert read_counters("/proc/meminfo")["MemTotal"] > 1 << 20
    pressure = Path("/proc/pressure/cpu")
    assert read(pressure) is None or pressure_seconds(pressure) is not None
