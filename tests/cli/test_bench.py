"""``steady bench train``: what the updates of a recipe reach by themselves."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from steadytrain.cli import bench, main
from steadytrain.cli.bench import _bench_table

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


def test_without_a_size_the_models_own_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "train", "--model", "lenet", "--channels", "1", "--classes", "10", "--device", "cpu"]
    assert main([*command, *QUICK, "--batch-size", "8", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["size"] == 28


def test_a_table_has_a_row_for_each_and_says_why_one_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(words: Sequence[str]) -> SimpleNamespace:
        """As the process of its own that each combination has, which would load torch."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(list(words))
        return SimpleNamespace(code=code, output=out.getvalue(), last_line=err.getvalue().strip().rpartition("\n")[2])

    monkeypatch.setattr(bench, "run_steady", run_here)
    assert main([*NET, *QUICK, "--batch-size", "8", "--precision", "fp32", "tf32"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("digits: ") and "images 1 x 8 x 8, on cpu" in lines[0] and "layout NHWC" in out
    assert "peak, measured here with a large matrix multiplication: " in out
    assert "FLOP/s in fp32 by 1 thread" in " ".join(out.split())
    rows = [line.split() for line in lines if line.startswith(("fp32 ", "tf32 "))]
    assert [row[:2] for row in rows] == [["fp32", "8"], ["tf32", "8"]]
    assert "not measured (precision tf32, batch 8): " in out and "which a CPU does not have" in " ".join(out.split())


def of_gpu(setting: dict[str, Any], **figures: Any) -> dict[str, Any]:
    """A row as large as one gets."""
    parts = dict.fromkeys(("forward", "backward", "optimizer", "host"), 1.2345)
    row = {"model": "timm/vit_large_patch14_clip_336.openai_ft_in12k_in1k", "parameters": 304_293_864, "size": 336}
    row |= {"channels": 3, "device": "NVIDIA H100 80GB HBM3", "threads": 16, "layout": "channels-last", "graph": False}
    row |= {"images_per_second": 12345.6, "step_seconds": dict.fromkeys(("p50", "p90", "p99"), 1.2345), "parts": parts}
    row |= {"flops_per_second": 612.3e12, "peak_flops": 789e12, "of_peak": 0.77, "memory_bytes": 79_123_456_789}
    return {**row, "recompute": False, "compile": "none", "compile_seconds": None, **setting, **figures}


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_table_is_never_wider_than_the_terminal(width: int) -> None:
    values = product(("fp32", "pure-bf16"), ("none", "reduce-overhead"), (False, True), (64, 1024))
    settings = [dict(zip(("precision", "compile", "graph", "batch_size"), row, strict=True)) for row in values]
    rows = [of_gpu(setting, compile_seconds=None if setting["compile"] == "none" else 312.0) for setting in settings]
    rows[3] = {
        **settings[3],
        "layout": "channels-last",
        "threads": None,
        "recompute": False,
        "error": "no memory " * 20,
    }
    lines = list(_bench_table(rows, width))
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if line.startswith("precision"))
    assert head.split("  ")[-1] and "images/s" in head and "memory GB" in head
    assert ("optimizer ms" in head) == (width == 200) == ("left out at this width" not in "\n".join(lines))
    assert sum("12,346" in line for line in lines) == len(rows) - 1
    assert "789 TFLOP/s in fp32" in "\n".join(lines)


def test_what_all_rows_share_is_said_once_above_them() -> None:
    rows = [of_gpu({"precision": "bf16", "batch_size": batch}) for batch in (64, 128)]
    text = list(_bench_table(rows, 80))
    assert "precision bf16, layout NHWC, compile none" in " ".join(" ".join(text).split())
    head = next(line for line in text if line.lstrip().startswith("batch"))
    assert head.split() == [
        *("batch", "images/s", "p50", "ms", "forward", "ms", "backward", "ms", "GFLOP/s", "of", "peak", "memory", "GB"),
    ]


def test_nothing_measured_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(code=1, output="", last_line="no memory")
    monkeypatch.setattr(bench, "run_steady", lambda words: ended)
    assert main([*NET, *QUICK]) == 1
    assert "not measured (batch 32): no memory\n" in capsys.readouterr().out


def test_what_cannot_be_is_refused_with_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NET, "--seconds", "0"]) == 2
    assert "--seconds is 0; it must be above 0" in capsys.readouterr().err
    assert main([*NET, "--batch-size", "0", "--json"]) == 2
    assert "--batch-size is 0; it must be from 1 to" in capsys.readouterr().err
    assert main(["bench", "train", "--model", "digits", "--size", "0", "--json"]) == 2
    assert "--size is 0; it must be from 1 to 4096" in capsys.readouterr().err
    assert main(["bench", "train", "--model", "resnet21", "--json"]) == 2
    assert "resnet20" in capsys.readouterr().err
