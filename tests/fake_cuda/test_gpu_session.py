"""``benchmarks/gpu_session.py`` rehearsed: a word that is wrong in it would cost ten minutes of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fake_cuda.device import fake_gpu

from steadytrain.cli import join_verb, parse
from steadytrain.training.precision import Policy

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = ("verdicts", "resumed", "inference", "tests", "ranks", "commands")
"""Steps that start commands."""


@pytest.fixture(scope="module")
def gpu_steps() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module("gpu_steps")
    for name in ("gpu_steps", "peers", "peers.commands"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def gpu_accuracy(gpu_steps: ModuleType) -> Iterator[ModuleType]:
    yield import_module("gpu_accuracy")
    sys.modules.pop("gpu_accuracy", None)


def job_of(gpu_steps: ModuleType, folder: Path, *, device: str, quick: bool = True) -> Any:
    (folder / "step").mkdir()
    return gpu_steps.Job(
        device=device,
        quick=quick,
        folder=folder / "step",
        data=None,
        seconds=600.0,
        out=folder / "step" / "figures.json",
        began=time.monotonic(),
    )


def rehearse(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the session's command."""
    command = [sys.executable, str(BENCHMARKS / "gpu_session.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=BENCHMARKS.parent)


def test_the_command_writes_what_each_step_found_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    done = rehearse("--device", "cpu", "--quick", "--only", "telemetry", "-o", str(out))
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["rehearsal"] and document["steps"]["telemetry"]["left_out"] == "no GPU"
    assert "| telemetry | yes |" in done.stdout


def test_what_a_pretended_gpu_cannot_do_is_left_out_by_name(gpu_steps: ModuleType) -> None:
    names = [name for name in gpu_steps.STEPS if name not in gpu_steps.WITHOUT_VALUES]
    done = rehearse("--device", "fake", "--only", *names)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"| {name} | yes | 0 | left_out: a pretended GPU computes nothing |" in done.stdout


def test_a_rehearsal_on_a_cpu_is_never_taken_for_a_measurement() -> None:
    done = rehearse("--device", "cpu")
    assert done.returncode == 2 and "add --quick" in done.stderr


@pytest.mark.parametrize(
    "name", ["card", *(pytest.param(name, marks=pytest.mark.slow) for name in ("modes", "waits", "ledger", "small"))]
)
def test_a_step_passes_on_a_cpu(
    gpu_steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def answered(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, "{}", "")

    monkeypatch.setattr(gpu_steps.subprocess, "run", answered)  # the doctor has tests of its own
    figures = gpu_steps.STEPS[name][0](job_of(gpu_steps, tmp_path, device="cpu"))
    assert figures["passes"], figures
    json.dumps(figures)


def test_the_session_names_a_wait_for_a_pretended_gpu_but_where_a_notice_says_so(
    gpu_steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp16_rmsprop = {"precision.name": "fp16", "optim.name": "rmsprop"}
    with fake_gpu():
        job = job_of(gpu_steps, tmp_path, device="cuda")
        assert gpu_steps.waits_of(job, fp16_rmsprop) is None
        monkeypatch.setattr(Policy, "remark_on", lambda self, optimizer, name: None)
        reason = gpu_steps.waits_of(job, fp16_rmsprop)
        assert reason is not None and "RuntimeError: a wait: " in reason
        wrong = "fp16 waits for the GPU once in each update"
        monkeypatch.setattr(Policy, "remark_on", lambda self, optimizer, name: setattr(self, "notes", (wrong,)))
        assert "and they do not" in gpu_steps.waits_of(job, {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [pytest.param(True, marks=pytest.mark.slow), False])
def test_each_command_of_a_step_is_one_that_steady_takes(
    gpu_steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, quick: bool
) -> None:
    asked: list[list[str]] = []

    def child(words: Sequence[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
        asked.append(list(words))
        return subprocess.CompletedProcess(list(words), 0, "{}", "")

    def kill_after(words: Sequence[str], run: Path, step: int, seconds: float) -> int:
        asked.append(list(words))
        return step

    monkeypatch.setattr(gpu_steps, "child", child)
    monkeypatch.setattr(gpu_steps, "kill_after", kill_after)
    monkeypatch.setattr(gpu_steps, "packed", lambda job: tmp_path / "photos.rec")
    job = job_of(gpu_steps, tmp_path, device=device, quick=quick)
    for name in COMMANDS:
        gpu_steps.STEPS[name][0](job)
    commands = [words[len(gpu_steps.STEADY) :] for words in asked if words[: len(gpu_steps.STEADY)] == gpu_steps.STEADY]
    assert {words[0] for words in commands} >= {"train", "diagnose", "bench", "finetune", "tune", "scale", "bandwidth"}
    for words in commands:
        parse(join_verb(words))
    ranks = [json.loads(words[-1]) for words in asked if words[1].endswith("gpu_steps.py")]
    assert len(ranks) == 6 and all(set(rank) == {"device", "changes"} for rank in ranks)


@pytest.mark.parametrize("has_weights", [False, True])
def test_each_fine_tuning_of_the_session_is_one_that_steady_takes(
    gpu_steps: ModuleType, gpu_accuracy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_weights: bool
) -> None:
    asked: list[list[str]] = []

    def child(words: Sequence[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
        asked.append(list(words))
        return subprocess.CompletedProcess(list(words), 1, "", "ended")

    monkeypatch.setattr(gpu_accuracy, "child", child)
    monkeypatch.setattr(gpu_accuracy, "packed", lambda job: tmp_path / "photos.rec")
    job = job_of(gpu_steps, tmp_path, device="cuda", quick=False)
    if has_weights:
        job = replace(job, weights=tmp_path)
        (tmp_path / "vit_base_patch14_dinov2.lvd142m.safetensors").touch()
        (tmp_path / "convnext_tiny.safetensors").touch()
    for name in ("convnext", "dinov2"):
        figures = gpu_accuracy.STEPS[name][0](job)
        assert figures["rc"] == 1 and not figures["passes"] and (figures["weights"] == "random") != has_weights
    for words in asked:
        parse(join_verb(words[len(gpu_steps.STEADY) :]))
        assert words[words.index("--budget-minutes") + 1] == "5.00" and ("--weights" in words) == has_weights


def test_all_steps_of_accuracy_are_planned_for_fifteen_minutes(gpu_accuracy: ModuleType) -> None:
    assert sum(seconds for _, seconds in gpu_accuracy.STEPS.values()) <= 900


def test_airbench_reads_the_same_images_and_labels(
    gpu_steps: ModuleType, gpu_accuracy: ModuleType, tmp_path: Path
) -> None:
    folder = gpu_accuracy.drawn_cifar(job_of(gpu_steps, tmp_path, device="cpu"))
    gpu_accuracy.write_for_airbench(folder / "cifar10-test.rec", tmp_path / "test.pt")
    data = torch.load(tmp_path / "test.pt")
    assert data["images"].shape == (64, 32, 32, 3) and data["images"].dtype == torch.uint8
    assert data["labels"].bincount().tolist() == [7] * 4 + [6] * 6 and data["classes"][9] == "class9"
    (path,) = (folder / "cifar10" / "test" / "class9").glob("9.png")
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image))
    assert any(torch.equal(pixels, row) for row in data["images"][data["labels"] == 9])


def test_ffcv_is_named_where_it_is_not_built(
    gpu_steps: ModuleType, gpu_accuracy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_accuracy, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_accuracy, "absent_libraries", lambda: "pkg-config finds no opencv4")
    figures = gpu_accuracy.ffcv(job_of(gpu_steps, tmp_path, device="cpu"))
    assert figures == {"passes": True, "left_out": "FFCV is not built here: pkg-config finds no opencv4"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_steps_of_accuracy_pass_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    done = rehearse("--device", "cpu", "--quick", "--only", "accuracy", "-o", str(out))
    steps = json.loads(out.read_text(encoding="utf-8"))["steps"]
    assert done.returncode == 0, {name: step for name, step in steps.items() if not step["passes"]}
    assert steps["cifar94"]["rows"]["airbench94"] == {"left_out": "it needs a GPU"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_session_passes_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    done = rehearse("--device", "cpu", "--quick", "--seconds", "1400", "-o", str(out))
    steps = json.loads(out.read_text(encoding="utf-8"))["steps"]
    assert done.returncode == 0, {name: step for name, step in steps.items() if not step["passes"]}


@pytest.mark.slow
def test_each_update_of_the_session_passes_on_a_pretended_gpu(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    done = rehearse("--device", "fake", "-o", str(out))
    waits = json.loads(out.read_text(encoding="utf-8"))["steps"]["waits"]
    assert done.returncode == 0, done.stdout
    assert waits["cases"] > 40 and waits["failed"] == {}
