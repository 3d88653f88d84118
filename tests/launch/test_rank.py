"""A program of one's own is told its rank in torchrun's words, whatever has started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def start(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    shown = folder / "show.py"
    shown.write_text(f"import json, os, sys\nprint(json.dumps([[os.environ[n] for n in {NAMES}], sys.argv[1:]]))\n")
    command = [sys.executable, "-P", "-m", "steadytrain.launch.rank", "--", str(shown), "--lr", "a b"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("variables", "messages"),
    [
        (OPEN_MPI | MEETING, ["3", "4", "1", "2", "10.0.0.1", "29500"]),
        (KUBERNETES | MEETING, ["1", "2", "0", "1", "10.0.0.1", "29500"]),
    ],
    ids=["Open MPI", "Kubernetes"],
)
def test_its_place_is_told(tmp_path: Path, variables: dict[str, str], messages: list[str]) -> None:
    ended = start(tmp_path, **variables)
    assert json.loads(ended.stdout) == [messages, ["--lr", "a b"]], ended.stderr


def test_alone_it_meets_nobody_and_may_still_call_a_group_its_own(tmp_path: Path) -> None:
    (*place, address, port), _ = json.loads(start(tmp_path).stdout)
    assert place == ["0", "1", "0", "1"] and address == "127.0.0.1" and int(port) > 0


def test_half_a_world_is_refused_in_one_line(tmp_path: Path) -> None:
    ended = start(tmp_path, RANK="1")
    assert ended.returncode == 1 and ended.stderr.startswith("steady: ") and ended.stderr.count("\n") == 1
