"""``steady bench train``: what the updates of a recipe reach by themselves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from steadytrain.cli import main

NET = ["bench", "train", "--model", "digits", "--size", "8", "--channels", "1", "--classes", "10", "--device", "cpu"]
QUICK = ["--seconds", "0.05", "--threads", "1"]


def test_one_combination_tells_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NET, *QUICK, "--batch-size", "32", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert (row["model"], row["batch_size"], row["precision"], row["compile"]) == ("digits", 32, "fp32", "none")
    assert row["updates"] >= 5 and row["memory_bytes"] > 0
    seconds = row["step_seconds"]
    assert 0 < seconds["p50"] <= seconds["p90"] <= seconds["p99"]
    parts = row["parts"]
    assert set(parts) == {"forward", "backward", "optimizer", "host"} and min(parts.values()) >= 0
    mean = 32 / row["images_per_second"]
    assert sum(parts.values()) == pytest.approx(mean, rel=0.05)
    assert row["of_peak"] == pytest.approx(row["flops_per_second"] / row["peak_flops"])


def test_flops_are_three_times_those_of_a_forward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    perceptron = ["bench", "train", "--model", "mlp", "--size", "28", "--channels", "1", "--classes", "10"]
    assert main([*perceptron, "--device", "cpu", *QUICK, "--batch-size", "16", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    multiplied = 784 * 128 + 128 * 64 + 64 * 10
    assert row["flops_per_second"] / row["images_per_second"] == pytest.approx(3 * 2 * multiplied)


def test_a_table_has_a_row_for_each_and_says_why_one_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "speeds.html"
    assert main([*NET, *QUICK, "--batch-size", "8", "--precision", "fp32", "tf32", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("digits: ") and "images 1x8x8, on cpu" in lines[0]
    assert lines[1].startswith("peak, measured here with a large matrix multiplication: ")
    assert lines[1].endswith("FLOP/s in fp32 by 1 thread")
    rows = [line.split() for line in lines if line.startswith(("fp32 ", "tf32 "))]
    assert [(row[0], row[6]) for row in rows] == [("fp32", "8"), ("tf32", "8")]
    assert all("which a CPU does not have" in " ".join(row) for row in rows if row[0] == "tf32")
    page = plot.read_text(encoding="utf-8")
    assert '"name":"fp32 NHWC"' in page and "tf32 NHWC" not in page and "<script src" not in page


@pytest.mark.slow
def test_nothing_measured_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2, "", "a warning\nsteady: tf32 which a CPU does not have\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert main([*NET, *QUICK, "--precision", "tf32"]) == 1
    assert "  tf32 which a CPU does not have\n" in capsys.readouterr().out


def test_what_cannot_be_is_refused_with_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NET, "--seconds", "0"]) == 2
    assert "--seconds is 0.0; it must be above 0" in capsys.readouterr().err
    assert main([*NET, "--batch-size", "0", "--json"]) == 2
    assert "batch_size is 0; it must be 1 to" in capsys.readouterr().err
    assert main(["bench", "train", "--model", "resnet21", "--json"]) == 2
    assert "resnet20" in capsys.readouterr().err
