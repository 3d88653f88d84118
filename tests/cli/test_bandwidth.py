"""``steady bandwidth`` as it is typed: real ranks on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from steadytrain.cli import main


@pytest.mark.slow
def test_a_person_reads_a_table_that_fits_60_columns(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bandwidth", "--model", "mlp", "--procs", "2", "--seconds", "0.1"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("mlp: ") and lines[0].endswith(" of gradients")
    assert lines[1].startswith("2 ranks on ")
    assert lines[3].split()[-3:] == ["ms", "push+pull", "GB/s/rank"]
    assert [" ".join(line.split()[:4]) for line in lines[4:9]] == [
        "6 tensors one by",
        "1 bucket at once",
        "1 bucket as fp16",
        "1 bucket as bf16",
        " ".join(["a", "single", "number", lines[8].split()[-1]]),
    ]
    assert len(lines) == 9
    assert max(map(len, lines)) <= 60


@pytest.mark.slow
def test_inside_a_launcher_the_ranks_are_its_own() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = ["steadytrain", "bandwidth", "--model", "mlp", "--seconds", "0.1", "--json"]
    process = subprocess.run([*launcher, *words], capture_output=True, text=True, check=True, timeout=120)
    document = json.loads(process.stdout)
    assert document["procs"] == 2 and [backend["backend"] for backend in document["backends"]] == ["gloo"]


@pytest.mark.slow
def test_an_unknown_model_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bandwidth", "--model", "resnet2O", "--seconds", "1"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "resnet2O'" in line]
    assert len(errors) == 1 and errors[0].startswith("steady: there is no model 'resnet2O'. Did you mean resnet")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--procs", "1"], "--procs is 1; it must be from 2 to 256"),
        (["--seconds", "0"], "--seconds is 0; it must be above 0, up to 3600"),
        (["--backend", "mpi"], "--backend"),
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
