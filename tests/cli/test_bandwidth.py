"""``steady bandwidth`` as it is typed: real ranks on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from steadytrain.cli import bandwidth, main
from steadytrain.config import Recipe
from steadytrain.distributed.world import World
from steadytrain.machine import facts
from steadytrain.training.profile import bench


@pytest.mark.slow
def test_a_person_reads_a_table_that_fits_60_columns(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bandwidth", "--model", "mlp", "--procs", "2", "--seconds", "0.1"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("mlp: ") and lines[0].endswith(" of gradients")
    assert lines[1].startswith("2 ranks on ")
    assert lines[3].split()[-4:] == ["ms", "push+pull", "GB/s/rank", "error"]
    assert [" ".join(line.split()[:4]) for line in lines[4:9]] == [
        "6 tensors one by",
        "1 bucket at once",
        "1 bucket as fp16",
        "1 bucket as bf16",
        " ".join(["a", "single", "number", lines[8].split()[-1]]),
    ]
    assert " ".join(lines[10].split()) == "an update computes for 100.0 ms 1.00 s 10.0 s"
    assert [line.split("  ")[0] for line in lines[11:18]][::6] == ["one device alone", "async, 1 server"]
    assert any(line.startswith("* ") for line in lines[18:])
    assert max(map(len, lines)) <= 60


@pytest.mark.slow
def test_inside_a_launcher_the_ranks_are_its_own() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = ["steadytrain", "bandwidth", "--model", "mlp", "--seconds", "0.1", "--json", "--batch-size", "32"]
    process = subprocess.run([*launcher, *words], capture_output=True, text=True, check=True, timeout=120)
    document = json.loads(process.stdout)
    [engines] = document["engines"]
    assert document["procs"] == 2 and 0 < engines["step_seconds"] < 1
    assert engines["recommended"] in {row["engine"] for row in engines["engines"]}


@pytest.mark.slow
def test_an_unknown_model_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bandwidth", "--model", "resnet2O", "--seconds", "1"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "resnet2O'" in line]
    assert len(errors) == 1 and errors[0].startswith("steady: there is no model 'resnet2O'. Did you mean resnet")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--procs", "1"], "--procs is 1; it must be from 2 to 256: a single rank has nothing to exchange"),
        (["--seconds", "0"], "--seconds is 0.0; it must be above 0, up to 3600"),
        (["--backend", "mpi"], "--backend"),
        (["--step-seconds", "0"], "--step-seconds is 0.0; it must be above 0, up to 3600"),
        (["--step-seconds", "1", "--batch-size", "8"], "and --batch-size measures it: omit one"),
        (["--backend", "nccl", "--procs", "200"], "--backend nccl needs a GPU for each of 200 ranks"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["bandwidth", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_launchers_ranks_are_not_asked_for_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["bandwidth", "--procs", "4"]) == 2
    assert "--procs is 4, and torchrun has started 2 ranks: omit --procs" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "devices"), [(4, ["cuda:0", "cuda:3"]), (1, ["cpu", "cpu"]), (0, ["cpu", "cpu"])])
def test_ranks_measure_their_update_on_a_gpu_where_each_has_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, devices: list[str]
) -> None:
    """As the exchange does: without a GPU for each, it is measured on CPUs."""
    asked: list[str] = []

    def measure(recipe: Recipe, **how: object) -> SimpleNamespace:
        asked.append(recipe.parallel.device)
        return SimpleNamespace(step_seconds={"p50": 0.1})

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(facts, "accelerators", lambda: (None,) * gpus)
    for rank in (0, 3):
        bandwidth._measure_step(World(rank=rank, size=4, local_rank=rank, local_size=4), "mlp", 32, 28)
    assert asked == devices
