"""Files of the kernel that are opened once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from steadytrain.machine.open_files import Kept


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "cpu.stat"
    path.write_text("nr_periods 1\nnr_throttled 0\n")
    kept = Kept(path)
    assert kept.count("nr_throttled") == 0
    path.write_text("nr_periods 9\nnr_throttled 4\n")
    assert (kept.count("nr_throttled"), kept.count("nr"), kept.count("throttled")) == (4, None, None)
    kept.close()
    assert kept.read() == b"" and kept.count("nr_throttled") is None


def test_longer_than_the_kernel_gives_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * 200_000 + b"\nlast 7\n")
    kept = Kept(path)
    assert len(kept.read()) == 200_008 and kept.count("last") == 7
    kept.close()


@pytest.mark.parametrize(("text", "number"), [("4096\n", 4096), ("max\n", None), ("-1\n", None), ("", None)])
def test_a_limit_or_none(tmp_path: Path, text: str, number: int | None) -> None:
    path = tmp_path / "memory.max"
    path.write_text(text)
    kept = Kept(path)
    assert kept.number() == number
    kept.close()


def test_what_is_not_there_says_nothing(tmp_path: Path) -> None:
    assert Kept(tmp_path / "nothing").read() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_process_that_has_ended_says_nothing_more() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        kept = Kept(Path(f"/proc/{child.pid}/stat"))
        assert kept.read().startswith(f"{child.pid} (".encode())
    assert kept.read() == b""
    kept.close()
