"""``benchmarks/gpu_session.py`` rehearsed: a word that is wrong in it would cost ten minutes of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
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


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_session_passes_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    done = rehearse("--device", "cpu", "--quick", "--seconds", "1400", "-o", str(out))
    steps = json.loads(out.read_text(encoding="utf-8"))["steps"]
    assert done.returncode == 0, {name: step for name, step in steps.items() if not step["passes"]}


def test_each_update_of_the_session_passes_on_a_pretended_gpu(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    done = rehearse("--device", "fake", "-o", str(out))
    waits = json.loads(out.read_text(encoding="utf-8"))["steps"]["waits"]
    assert done.returncode == 0, done.stdout
    assert waits["cases"] > 40 and waits["failed"] == {}
