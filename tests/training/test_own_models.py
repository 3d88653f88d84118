"""A module or a function of the user's as the model: trained, resumed, restored, and asked for where it is missing."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests import forked
from torch import nn

import steadytrain as st
from steadytrain.cli import main
from steadytrain.errors import ModelError
from steadytrain.models import objects
from steadytrain.training.checkpoints import newest, step_of

QUICK = {"budget.epochs": 1, "parallel.device": "cpu", "parallel.threads": 1, "parallel.compute_threads": 1}

SCRIPT = """
import os, sys
import steadytrain as st
from torch import nn

def main():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    changes = {"budget.epochs": 1, "parallel.device": "cpu", "parallel.compute_threads": 1, "every.save_steps": 1}
    run = st.Run.create("run", st.default_recipe("digits", changes, model=net))
    is_first = run.progress().started is None
    for event in st.steps(run):
        if isinstance(event, st.events.Saved) and event.step == 2 and is_first:
            os._exit(1)  # as where it is killed
        if isinstance(event, st.events.Started):
            print("began at", event.step, file=sys.stderr, flush=True)

main()
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_digits: Callable[[Path, int, int], Path]) -> Path:
    """A working directory of its own, with digits in it."""
    monkeypatch.chdir(tmp_path)
    write_digits(Path("digits"), 120, 10)
    return tmp_path


def net(classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, classes))


def test_a_module_is_trained_and_its_run_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    recipe = st.default_recipe("digits", {**QUICK, "model.name": module})
    assert recipe == st.default_recipe("digits", QUICK, model=module)
    assert st.Recipe.from_json(recipe.to_json()).model.name == recipe.model.name
    run = st.train(st.Run.create("run", recipe)).run
    assert st.evaluate(run).n == st.evaluate("run").n > 0
    monkeypatch.setattr(objects, "_GIVEN", {})  # as in another process
    with pytest.raises(ModelError, match=r"was not given in this process: give it again"):
        st.restore("run")
    trained = st.restore("run", model=lambda num_classes: net(num_classes))
    assert len(trained.classes) == 10
    monkeypatch.setattr(objects, "_GIVEN", {})
    again = st.default_recipe("digits", QUICK, model=net())  # the same code gives the same run
    assert st.train(st.Run.create("run", again)).status == "finished"


def test_a_module_is_fine_tuned_from_its_own_weights() -> None:
    module = net()
    updated = {**QUICK, "model.train": "discriminative"}  # the weights of a probe have no statistics either
    outcome = st.finetune("digits", updated, model=module, run="tuned")
    recipe = outcome.run.recipe
    assert (recipe.model.pretrained, recipe.model.batch_norm) == (False, "train")  # it has no statistics yet
    assert recipe.model.train == "discriminative"  # nor features worth a probe
    tuned = st.restore(outcome.run)
    finished = st.finetune("digits", QUICK, model=tuned.module, run="tuned-again").run.recipe
    assert (finished.model.batch_norm, finished.model.train) == ("frozen", "probe+discriminative")


def test_a_module_with_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a classifier for 10 classes gives \[2, 10\]: give it such a last layer"):
        st.train(st.Run.create("run", st.default_recipe("digits", QUICK, model=net(9))))


def _run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def _ran(folder: Path) -> tuple[int | None, str]:
    """The exit code of the script in a process of its own, and what it said."""
    process = forked.start(_run_script, str(folder / "train.py"), errors=folder / "said")
    process.join(120)
    return process.exitcode, (folder / "said").read_text()


def test_an_interrupted_run_of_a_module_goes_on_by_the_same_script(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "train.py").write_text(SCRIPT)
    assert _ran(work) == (1, "began at 0\n")
    assert main(["resume", "run"]) == 2
    assert "is a Python object (Sequential), and was not given in this process" in capsys.readouterr().err
    saved = newest(work / "run" / "checkpoints")
    assert saved is not None and step_of(saved) >= 2  # another may have been written before the event of this came
    assert _ran(work) == (0, f"began at {step_of(saved)}\n")


def test_a_module_whose_sizes_are_not_known_yet_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    images = np.random.default_rng(0).integers(0, 255, (40, 12, 12, 3), dtype=np.uint8)
    data, small = (images, [0, 1] * 20), {"epochs": 1, "device": "cpu", "batch_size": 8}
    net = nn.Sequential(nn.LazyConv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    first, second = (st.train(data, model=net, run=f"runs/{name}", **small) for name in "ab")  # type: ignore[arg-type]
    assert first.run.weights.read_bytes() == second.run.weights.read_bytes()
    assert nn.parameter.is_lazy(next(net.parameters()))  # the user's own stays as it is

    def make(num_classes: int) -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(4, 3, 2), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(num_classes))

    assert st.train(data, model=make, run="runs/made", **small).status == "finished"  # type: ignore[arg-type]
    for wrong, words in (
        (make(2), "give a function that makes it"),
        (nn.Sequential(nn.Conv2d(3, 4, 25)), "another size="),
    ):
        with pytest.raises(st.SteadyError, match=words):
            st.train(data, model=wrong, run="runs/wrong", **small)  # type: ignore[arg-type]
        assert not Path("runs/wrong").exists()
