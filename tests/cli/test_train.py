"""``steady train`` as it is typed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from steadytrain.cli import main

QUICK = ["--model", "mlp", "--epochs", "1", "--batch-size", "32", "--device", "cpu"]


def test_folders_are_packed_before_the_run_and_their_reuse_is_said_once(
    write_digits: Callable[[Path, int, int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_digits(tmp_path / "photos", 80, 2)
    write_digits(tmp_path / "others", 40, 2)
    assert main(["train", "photos", "--val", "others", *QUICK]) == 0
    first, _, after = capsys.readouterr().err.partition("started attempt=1")
    assert [line.split(" once ")[0].split(":")[0] for line in first.splitlines()] == [
        "packing photos",
        "packing images",
        "packing others",
        "packing images",
    ]
    assert "packed copy" not in after and "packing" not in after
    assert main(["train", "photos", *QUICK, "--seed", "1"]) == 0
    assert capsys.readouterr().err.count("using the packed copy of photos") == 1
