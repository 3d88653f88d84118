"""What ``steady launch --dry-run`` prints and writes for each launcher; nothing is started."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.seams.frozen import Frozen, plain_text
from tests.seams.product import steady

TRAIN = ["--", "train", "my cats.rec", "--run", "runs/$(x)", "--lr", "0.1"]
TRAIN_SHARED = ["--", "train", "/data/my cats.rec", "--run", "/data/runs/$(x)", "--lr", "0.1"]
"""Where the machines share nothing of this one."""
COMMON = ["--env", "OMP_NUM_THREADS=4", "--env", "HF_TOKEN", "--set", "port=29500", "--set", "restarts=3"]
BATCH = ["--nodes", "2", "--procs", "8", "--set", "name=cats", "--set", "minutes=240", "--set", "cpus=16"]
BATCH += ["--set", "memory_gb=64", "--set", "gpus=2", "--set", "image=registry.example/steadytrain:1"]
CLAIM = ["--set", "kubernetes.claim=photos"]
PLANS = {
    "local": ["--procs", "2", "--set", "restarts=3"],
    "ssh": ["--on", "ssh", "--hosts", "hosts", "--sync", "cats", "--exclude", "*.tmp", *COMMON],
    "elastic": ["--on", "ssh", "--hosts", "hosts", "--nodes", "1:2", "--procs", "2", *COMMON],
    "mpi": ["--on", "mpi", "--hosts", "plain", *COMMON[:6]],
    "mpich": ["--on", "mpi", "--procs", "4", "--set", "mpi.kind=mpich", "--set", "port=29500"],
    "slurm": ["--on", "slurm", *BATCH, *COMMON[:4], "--set", "restarts=3", "--set", "slurm.partition=gpu"],
    "kubernetes": ["--on", "kubernetes", *BATCH, *COMMON[:2], *CLAIM],
    "jobset": ["--on", "kubernetes", *BATCH, "--set", "restarts=3", *CLAIM, "--set", "kubernetes.kind=jobset"],
}


@pytest.fixture
def machines(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of two hosts, and a secret to hand over."""
    (work / "hosts").write_text("# two machines\nme@gpu1:2222 slots=2\ngpu2\n")
    (work / "plain").write_text("gpu1 slots=4\ngpu2 slots=4\n")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return work


def _without_places(text: str, work: Path) -> str:
    """Without this machine's Python and folder; which module starts the ranks of a machine is the product's own."""
    text = plain_text(text, {sys.executable: "PYTHON", str(work): "WORK"})
    return re.sub(r"-m steadytrain\.[\w.]+", "-m steadytrain.MODULE", text)


def _command(name: str) -> list[str]:
    return TRAIN_SHARED if name in ("kubernetes", "jobset") else TRAIN


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_each_launcher(name: str, machines: Path, frozen: Frozen) -> None:
    output = steady("launch", *PLANS[name], "-o", "out", "--dry-run", *_command(name))
    assert "hf_secret" not in output.out
    frozen(f"plans/{name}", _without_places(output.out, machines).splitlines())
    written = {path.name: _without_places(path.read_text(), machines) for path in sorted(Path().glob("out/*"))}
    assert all(text.strip() in _without_places(output.out, machines) for text in written.values())
    frozen(f"plans/{name} files", sorted(written))


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_as_json(name: str, machines: Path, frozen: Frozen) -> None:
    document = steady("launch", *PLANS[name], "--dry-run", "--json", *_command(name)).document
    frozen(f"documents/launch {name}", _masked(document, machines))


def _masked(value: Any, work: Path) -> Any:
    """Long programs that are sent to other machines are the product's own: only that there are any is kept."""
    if isinstance(value, dict):
        return {key: _masked(inner, work) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner, work) for inner in value]
    if isinstance(value, str):
        return "<program>" if "import " in value else _without_places(value, work)
    return value
