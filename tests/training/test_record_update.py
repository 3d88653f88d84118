"""An update as one graph: the same weights, from memory that stays where it is; where there is none, that is said.

A CPU has no graphs. What stands in for one here is a tape of the operations that were asked for, with their tensors and
numbers, which is played without any Python of ours: a number of the host's that was baked in, or a tensor that moves,
gives other weights. GPUs: ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steadytrain.config import Budget, Data, Model, Optim, Parallel, Precision, Recipe
from steadytrain.distributed.process_group import init_group
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.launch.supervise import free_port
from steadytrain.run import Run
from steadytrain.training import train
from steadytrain.training.compute import compile
from steadytrain.training.compute.compile import WARM_UP, RecordedWork
from steadytrain.training.data import load
from steadytrain.training.session import opening
from steadytrain.training.session.opening import open_session
from steadytrain.training.session.session import Session
from steadytrain.training.state import State

UPDATES = 9


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations, and plays them with the memory and the numbers that they had."""

    def __init__(self, state: State) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state, self.recorded = state, 0
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def warm(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        kept = _kept(self.state)
        before = [tensor.clone() for tensor in kept]
        with self:
            work()
        for tensor, was in zip(kept, before, strict=True):  # a recording does nothing
            tensor.copy_(was)
        return self.play

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, output))
        return output

    @torch.no_grad()
    def play(self) -> None:
        for func, args, kwargs, output in self.operations:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(place, torch.Tensor) and place is not value:
                    place.copy_(value)


def _kept(state: State) -> list[torch.Tensor]:
    """All tensors that an update changes."""
    kept = [*state.module.state_dict().values(), state.meters.sums]
    return kept + [
        value for of in state.optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)
    ]


def _recipe(digits: Path, optim: Optim, precision: Precision = Precision()) -> Recipe:  # noqa: B008 - frozen
    return Recipe(
        data=Data(train=str(digits), holdout=0.0),
        model=Model("digits"),
        optim=optim,
        precision=precision,
        budget=Budget(steps=UPDATES),
        parallel=Parallel(compute_threads=1),
        batch_size=16,
    )


def _updated(session: Session) -> Iterator[list[int]]:
    """Updates with a learning rate that changes; where in memory all lies that they change."""
    state = session.state
    for number, batch in zip(range(UPDATES), load(session.feed, state.engine.device), strict=False):
        session.update(state, batch, 0.1 / (number + 1))
        yield [tensor.data_ptr() for tensor in _kept(state)]


@contextmanager
def _session(folder: Path, recipe: Recipe) -> Iterator[Session]:
    run = Run.create(folder, recipe)
    with run.lock(), run.log() as log, open_session(run, log, allow_import=False) as session:
        yield session


def _weights(session: Session) -> list[torch.Tensor]:
    """All that an update changes, and the average."""
    averages = [] if session.state.ema is None else list(session.state.ema.module.state_dict().values())
    return [tensor.clone() for tensor in (*_kept(session.state), *averages)]


@pytest.mark.parametrize(
    "optim",
    [
        Optim("sgd"),
        Optim("adamw", clip_norm=1.0),
        Optim("sgd", accumulate=4, ema=0.9),
        Optim("sgd", momentum=0.0, label_smoothing=0.1),
    ],
    ids=["sgd", "adamw-clipped", "accumulated-averaged", "plain"],
)
def test_weights_are_those_of_single_operations(digits: Path, tmp_path: Path, optim: Optim) -> None:
    notices: list[str] = []
    with _session(tmp_path / "plain", _recipe(digits, optim)) as session:
        assert len(list(_updated(session))) == UPDATES
        plain = _weights(session)
    with _session(tmp_path / "graph", _recipe(digits, optim)) as session:
        tape = Tape(session.state)
        session = replace(session, update=replace(session.update, work=RecordedWork(tape, notices.append)))
        places = list(_updated(session))
        replayed = _weights(session)
    assert tape.recorded == 1 and len(notices) == 1 and "as one CUDA graph" in notices[0]
    assert all(torch.equal(this, other) for this, other in zip(plain, replayed, strict=True))
    assert all(place == places[WARM_UP] for place in places[WARM_UP:])


def test_rates_are_the_hosts_again_between_updates(digits: Path, tmp_path: Path) -> None:
    """What is saved with the optimizer are numbers, whatever a graph reads."""
    with _session(tmp_path / "run", _recipe(digits, Optim("adamw"))) as session:
        session = replace(session, update=replace(session.update, work=RecordedWork(Tape(session.state), print)))
        for _ in _updated(session):
            groups = session.state.optimizer.state_dict()["param_groups"]
            assert all(type(group["lr"]) is float and not group["capturable"] for group in groups)


def test_what_cannot_be_recorded_goes_on_operation_by_operation(digits: Path, tmp_path: Path) -> None:
    class Refusing(Tape):  # type: ignore[no-untyped-call]
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            try:
                work()  # leaves gradients behind, as a recording that ends in its midst does
                raise RuntimeError("operation not permitted when stream is capturing\nsee the manual")
            finally:
                raise ValueError("the recording was in disorder")

    notices: list[str] = []
    with _session(tmp_path / "run", _recipe(digits, Optim("sgd"))) as session:
        session = replace(
            session, update=replace(session.update, work=RecordedWork(Refusing(session.state), notices.append))
        )
        assert len(list(_updated(session))) == UPDATES
        assert session.state.cursor.step == UPDATES
    assert notices == [
        "updates cannot be recorded as a graph (operation not permitted when stream is capturing):"
        " training continues without"
    ]


def test_what_one_rank_cannot_record_no_rank_replays(digits: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def refusals(words: str) -> list[str]:
        said.append(words)
        return ["out of room on rank 1 (b)"]  # the other rank's

    with _session(tmp_path / "plain", _recipe(digits, Optim("sgd"))) as session:
        assert len(list(_updated(session))) == UPDATES
        plain = _weights(session)
    notices: list[str] = []
    with _session(tmp_path / "run", _recipe(digits, Optim("sgd"))) as session:
        tape = Tape(session.state)
        session = replace(session, update=replace(session.update, work=RecordedWork(tape, notices.append, refusals)))
        assert len(list(_updated(session))) == UPDATES
        replayed = _weights(session)
    assert said == [""] and tape.recorded == 1
    assert notices == ["updates cannot be recorded as a graph (out of room on rank 1 (b)): training continues without"]
    assert all(torch.equal(this, other) for this, other in zip(plain, replayed, strict=True))


def test_ranks_record_their_exchange_with_the_update(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, weights, notices = _recipe(digits, Optim("sgd", accumulate=2)), [], list[str]()
    monkeypatch.setattr(compile, "CudaRecorder", lambda device: None)
    for name in ("plain", "graph"):
        recipe = recipe.with_({"parallel.graph": name == "graph"})
        monkeypatch.setattr(opening, "prepare_device", lambda recipe, world: torch.device("cpu"))
        run = Run.create(tmp_path / name, recipe)
        with init_group(World(port=free_port())) as group, run.lock(), run.log() as log:
            with open_session(run, log, allow_import=False, group=group) as session:
                work = session.update.work
                if isinstance(work, RecordedWork):
                    assert session.update.call is session.state.module, "no wrapper of torch's"
                    tape = work._recorder = Tape(session.state)
                    work._notice = notices.append
                assert len(list(_updated(session))) == UPDATES
                weights.append(_weights(session))
            assert not isinstance(work, RecordedWork) or work._graph is None, "NCCL ends no group before"
    assert any("all_reduce" in str(func) or "allreduce" in str(func) for func, *_ in tape.operations)
    assert len(notices) == 1 and "as one CUDA graph" in notices[0]
    assert all(torch.equal(this, other) for this, other in zip(*weights, strict=True))


def test_ranks_that_exchange_otherwise_are_told_that_they_do_not_record(digits: Path) -> None:
    recipe, notices = _recipe(digits, Optim("sgd")), list[str]()
    recipe = recipe.with_({"parallel.graph": True, "parallel.compress": "fp16"})
    engine: Any = SimpleNamespace(is_recordable=False, device=torch.device("cpu"))
    update: Any = SimpleNamespace()
    state: Any = SimpleNamespace(engine=engine)
    group: Any = SimpleNamespace(hosts=["a"])
    assert compile.record_update(recipe, update, state, group, notices.append) is update
    assert notices == ["--graph cannot record how ranks exchange gradients that are compressed: training without it"]


def test_a_cpu_has_no_graphs(digits: Path, tmp_path: Path) -> None:
    recipe = _recipe(digits, Optim("sgd")).with_({"parallel.graph": True, "parallel.device": "cpu"})
    with pytest.raises(RecipeError, match=r"parallel\.graph=True wants a GPU.*leave --graph out"):
        train(Run.create(tmp_path / "run", recipe))


def test_two_ways_to_record_exclude_each_other(digits: Path) -> None:
    with pytest.raises(RecipeError, match=r"compile='reduce-overhead' and parallel\.graph=True exclude each other"):
        _recipe(digits, Optim("sgd"), Precision(compile="reduce-overhead")).with_({"parallel.graph": True})
