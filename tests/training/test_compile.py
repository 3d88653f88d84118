"""Compiled code trains the same network, goes on bit for bit, says what it cost; where it cannot be made, none is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests import forked

from steadytrain.cli import main
from steadytrain.events import Compiled, Event, Noticed, Started
from steadytrain.reports.page import page
from steadytrain.reports.summary import Account
from steadytrain.reports.verdict import held_back
from steadytrain.run import Run
from steadytrain.training import checkpoints

NET = """
import os, signal, torch
from torch.optim.optimizer import register_optimizer_step_post_hook

class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(1)
        self.hidden = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, num_classes)

    def forward(self, images):
        hidden = torch.relu(self.hidden(self.norm(images).flatten(1)))
        HERE
        return self.head(torch.nn.functional.dropout(hidden, DROPPED))

def make(num_classes, **told):
    register_optimizer_step_post_hook(count)
    return Net(num_classes)

done = 0

def count(*told):
    global done
    done += 1
    if done == int(os.environ.get("KILLED_AFTER", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
"""

Train = Callable[..., list[Event]]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: nothing can be compiled")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for all runs of this file: what one of them compiled, the others find."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def train(digits: Path, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train six updates of ``NET`` in a process of its own; what the run tells.

    One that compiles loads torch by itself: it reads the compiler's settings as it is loaded.
    """

    def run(
        name: str,
        *words: str,
        statement: str = "pass",
        dropped: float = 0.1,
        code: int = 0,
        function: Callable[[list[str]], int] = main,
        **more: str,
    ) -> list[Event]:
        (tmp_path / "own_net.py").write_text(NET.replace("HERE", statement).replace("DROPPED", str(dropped)))
        command = ["train", str(digits), "--run", str(tmp_path / name)]
        command += ["--model", "own_net:make", "--batch-size", "32", "--lr", "0.05", "--device", "cpu", "--size", "8"]
        settings = ("data.pad=1", "parallel.compute_threads=1", "budget.steps=6", "every.save_steps=2")
        command += [*(word for setting in settings for word in ("--set", setting)), *words]
        more |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "STEADYTRAIN_CACHE": str(kept)}
        # What the compiler can is not asked of it by each process; no workers of its own start for one small network.
        more |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if "--compile" in words and function is main:
            usual = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
            command = [sys.executable, "-m", "steadytrain", *command]
            done = subprocess.run(command, env=usual | more, capture_output=True, timeout=300, text=True)
            assert done.returncode == code, done.stderr
        else:
            monkeypatch.syspath_prepend(tmp_path)
            process = forked.start(function, command, errors=tmp_path / "errors", variables=more)
            process.join(300)
            assert process.exitcode == code, (tmp_path / "errors").read_text()
        return list(Run.open(tmp_path / name).events())

    return run


@pytest.mark.slow
@needs_compiler
def test_compiled_code_trains_the_same_network(train: Train, tmp_path: Path) -> None:
    train("compiled", "--compile", dropped=0.0)
    train("eager", dropped=0.0)
    first, other = (
        checkpoints.read_weights(tmp_path / name / "model.safetensors")[0] for name in ("compiled", "eager")
    )
    for name, value in first.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon", "lbsgd", "timm/lamb"])
def test_any_optimizer_updates_what_was_compiled(train: Train, tmp_path: Path, name: str) -> None:
    """Compiled is the network alone, once for all optimizers: its code is found in the cache."""
    words = ["--optimizer", name, "--lr", "0.001"]
    train("compiled", "--compile", *words, dropped=0.0)
    train("eager", *words, dropped=0.0)
    first, other = (
        checkpoints.read_weights(tmp_path / name / "model.safetensors")[0] for name in ("compiled", "eager")
    )
    for key, value in first.items():
        torch.testing.assert_close(value, other[key], rtol=1e-3, atol=1e-4)


@needs_compiler
@pytest.mark.slow
def test_what_compiling_made_and_cost_is_told_and_its_code_is_kept(train: Train, kept: Path) -> None:
    happened = train("run", "--compile", dropped=0.0)
    [compiled] = [event for event in happened if isinstance(event, Compiled)]
    assert compiled.mode == "default" and compiled.graphs == 1 and list(compiled.breaks) == []
    assert compiled.seconds > 0 < compiled.compiled_seconds and compiled.images == 32
    [started] = [event for event in happened if isinstance(event, Started)]
    assert started.machine["compile"] == "default" and started.startup["compile"] >= compiled.seconds
    assert list((kept / "compiled").iterdir()), "code is kept for the next attempt"


@pytest.mark.slow
@needs_compiler
def test_a_killed_run_goes_on_to_the_same_bits(train: Train, tmp_path: Path, weights: Callable[[Path], bytes]) -> None:
    train("whole", "--compile")
    train("killed", "--compile", code=-9, KILLED_AFTER="5")
    happened = train("killed", "--compile")
    assert [event.step for event in happened if isinstance(event, Started)] == [0, 4]
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")


@pytest.mark.parametrize("name", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_run_without_it_never_imports_the_compiler(name: str, digits: Path, tmp_path: Path) -> None:
    """It takes seconds, and torch's own optimizers do it at their first step. Nor timm, for a net of ours."""
    words = ["train", str(digits), "--run", str(tmp_path / "run"), "--model", "digits", "--batch-size", "32"]
    settings = [f"optim.name={name}", "optim.lr=0.01", "optim.ema=0.9", "optim.clip_norm=1", "every.save_steps=2"]
    words += [word for setting in (*settings, "budget.steps=4") for word in ("--set", setting)]
    code = f"import sys; from steadytrain.cli import main; main({words}); print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, text=True, check=True)
    imported = done.stdout.splitlines()[-1]
    assert (tmp_path / "run" / "model.safetensors").exists() and "'torch.optim'" in imported
    assert not any(f"'{name}'" in imported for name in ("torch._dynamo", "torch._inductor", "timm"))


@pytest.mark.slow
@needs_compiler
def test_where_python_comes_between_is_told(train: Train, tmp_path: Path) -> None:
    happened = train("run", "--compile", here="torch._dynamo.graph_break()")
    [compiled] = [event for event in happened if isinstance(event, Compiled)]
    lines = (tmp_path / "own_net.py").read_text().splitlines()
    line = lines.index("        torch._dynamo.graph_break()") + 1
    assert compiled.graphs > 1 and len(compiled.breaks) == 1 and f"own_net.py:{line}: " in compiled.breaks[0]


def _without_compiler(words: list[str]) -> int:
    """``steady`` in a process that has loaded torch, with what it reads of CXX and its like as it is loaded."""
    from torch._inductor import config

    config.cpp.cxx, config.force_disable_caches = ("no-such-compiler",), True
    return main(words)


def test_a_machine_without_a_compiler_trains_as_if_nobody_had_asked(
    train: Train, tmp_path: Path, weights: Callable[[Path], bytes]
) -> None:
    """Running statistics, dropout's draws and weights are those of a run that never tried."""
    train("eager")
    happened = train("tried", "--compile", function=_without_compiler)
    assert not [event for event in happened if isinstance(event, Compiled)]
    assert "compile" not in next(event for event in happened if isinstance(event, Started)).machine
    messages = [
        event.message for event in happened if isinstance(event, Noticed) and "cannot be compiled" in event.message
    ]
    assert len(messages) == 1 and "no-such-compiler" in messages[0]
    assert messages[0].startswith("warning: the network cannot be compiled")
    assert messages[0].endswith("training without (see steady doctor)")
    assert [type(event) for event in happened[:2]] == [Started, Noticed], "before all that is only worth knowing"
    account = Account.of(Run.open(tmp_path / "tried"))
    assert held_back(account)[0] == messages[0] and page([account]).count("cannot be compiled") > 1
    assert weights(tmp_path / "tried") == weights(tmp_path / "eager")
