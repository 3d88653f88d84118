"""The server of an asynchronous run: what it makes of a model's parameters, to whom it gives which batch, and when."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadytrain import optim
from steadytrain.config import Optim
from steadytrain.distributed.asynchronous.server import (
    ParameterServer,
    ServerState,
    Training,
    Vector,
    compress,
    decompress,
    layouts_of,
)
from steadytrain.distributed.compression import CompressionName
from steadytrain.optim import kinds

CPU = torch.device("cpu")
UPDATES = 4


def model() -> nn.Sequential:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(45, 7))
    return module.to(memory_format=torch.channels_last)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0, "lr_scale": 0.5}]


def gradients(parameters: Sequence[torch.Tensor], update: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    return [torch.randn(p.shape, generator=generator).to(memory_format=_format(p)) for p in parameters]


def _format(parameter: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if parameter.dim() == 4 else torch.contiguous_format


def flat(tensors: Sequence[torch.Tensor]) -> Vector:
    return torch.cat([tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors]).numpy()


def keep_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    """A schedule that leaves the rates of the groups as they are."""


def published(spec: Optim, saved: ServerState | None = None) -> tuple[Training, list[torch.Tensor]]:
    """Return what worker 0 publishes of a model, or of what was saved of it, and the model's parameters."""
    make: Callable[..., torch.optim.Optimizer] = partial(optim.build, spec, lr=0.1, device=CPU, seed=5)
    local = make(groups_of(model()))
    parameters = [p for group in local.param_groups for p in group["params"]]
    training = Training(
        layouts=layouts_of(parameters),
        weights=flat(parameters) if saved is None else saved.weights,
        optimizer=local.state_dict() if saved is None else saved.optimizer,
        make=make,
        set_rates=keep_rates,
        staleness_power=0.0,
        steps=1000,
        step=0 if saved is None else saved.step,
        unfinished=[],
        after=0 if saved is None else saved.after,
    )
    return training, parameters


class Server:
    """A server that is called as if there were no other workers at the time."""

    def __init__(self, spec: Optim, saved: ServerState | None = None) -> None:
        self.training, self.parameters = published(spec, saved)
        self.server = ParameterServer(3)
        asyncio.run(self.server.open({}, self.training))

    def push(self, gradient: Vector, rank: int = 0, missing: Sequence[int] = ()) -> Vector:
        before = gradient.copy()
        [batch] = asyncio.run(self.server.assign(rank)) or []
        weights = asyncio.run(self.server.push(rank, batch, "none", missing, gradient)).weights
        assert np.array_equal(gradient, before), "what lies in shared memory must not be written to"
        return weights

    def save(self) -> ServerState:
        return asyncio.run(self.server.save())


def in_one_process(spec: Optim, updates: range) -> tuple[Vector, dict[str, Any]]:
    optimizer = optim.build(spec, groups_of(model()), lr=0.1, device=CPU, seed=5)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for update in updates:
        for parameter, gradient in zip(parameters, gradients(parameters, update), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return flat(parameters), optimizer.state_dict()


@pytest.mark.parametrize("name", kinds())
def test_a_server_makes_what_the_optimizer_makes_in_one_process(name: str) -> None:
    spec = Optim(name)
    whole, state = in_one_process(spec, range(UPDATES))
    ours = Server(spec)
    for update in range(UPDATES):
        got = ours.push(flat(gradients(ours.parameters, update)))
    if name != "dcasgd":  # its delay is that of one update
        np.testing.assert_array_equal(got, whole)
    saved = ours.save().optimizer["state"]
    assert saved.keys() == state["state"].keys()
    for number, values in state["state"].items():
        assert saved[number].keys() == values.keys()
        for key, value in values.items():
            if name != "dcasgd" and isinstance(value, torch.Tensor):
                torch.testing.assert_close(saved[number][key], value, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam", "ftml", "muon", "sgld"])
def test_what_is_saved_goes_on_the_same_with_another_server(name: str) -> None:
    first = Server(Optim(name))
    for update in range(UPDATES):
        first.push(flat(gradients(first.parameters, update)))
    second = Server(Optim(name), first.save())
    for update in range(UPDATES, 2 * UPDATES):
        sent = flat(gradients(first.parameters, update))
        np.testing.assert_array_equal(second.push(sent), first.push(sent))


def test_a_batch_is_applied_once_and_only_from_its_worker() -> None:
    ours = Server(Optim("sgd"))
    sent = flat(gradients(ours.parameters, 0))
    once = ours.push(sent)
    for rank, batch in ((0, 0), (1, 0), (1, 7)):
        pushed = asyncio.run(ours.server.push(rank, batch, "none", [], sent))
        assert pushed.step == 1 and np.array_equal(pushed.weights, once)


@pytest.mark.parametrize("nesterov", [True, False])
def test_each_workers_gradients_move_a_momentum_of_its_own(nesterov: bool) -> None:
    """As if each worker had an optimizer, all of them on the same weights; so one worker is one process."""
    spec, pushing = Optim("sgd", nesterov=nesterov), (0, 1, 1, 0, 2, 1, 0, 2)
    ours, groups = Server(spec), groups_of(model())
    optimizers = [optim.build(spec, groups, lr=0.1, device=CPU) for _ in range(3)]
    parameters = [p for group in groups for p in group["params"]]
    for update, rank in enumerate(pushing):
        for parameter, gradient in zip(parameters, gradients(parameters, update), strict=True):
            parameter.grad = gradient
        sent = flat([p.grad for p in parameters if p.grad is not None])
        optimizers[rank].step()
        np.testing.assert_array_equal(ours.push(sent, rank), flat(parameters))
    saved = ours.save().optimizer["state"]
    for number, parameter in enumerate(parameters):
        momentum_buffers = [optimizer.state[parameter]["momentum_buffer"] for optimizer in optimizers]
        torch.testing.assert_close(saved[number]["momentum_buffer"], sum(momentum_buffers) / 3, rtol=2e-5, atol=1e-6)


def test_workers_of_a_resumed_run_begin_with_the_momentum_of_its_checkpoint() -> None:
    first = Server(Optim("sgd"))
    for update in range(UPDATES):
        first.push(flat(gradients(first.parameters, update)))
    sent = flat(gradients(first.parameters, UPDATES))
    ours = [Server(Optim("sgd"), first.save()).push(sent, rank) for rank in (0, 5)]
    wanted = first.push(sent)
    for weights in ours:
        np.testing.assert_array_equal(weights, wanted)


def test_dcasgd_compensates_the_delay_of_the_worker_that_pushes() -> None:
    """Zheng et al. 2017, equation 10: g + lamda * g * g * (w now - w that the worker had)."""
    ours = Server(Optim("dcasgd", weight_decay=0.0, options={"lamda": 2.0}))
    start = flat(ours.parameters)
    for rank in (0, 1):
        asyncio.run(ours.server.pull(rank, computes=True))
    first, second = (flat(gradients(ours.parameters, update)) for update in (0, 1))
    groups = groups_of(model())

    def of_each(values: Sequence[float]) -> Vector:
        sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        return np.repeat(np.array(values, np.float32), sizes)

    rates = of_each([group["lr"] for group in ours.training.optimizer["param_groups"]])
    decay = of_each([group["weight_decay"] for group in groups])
    after_first = start - rates * (first + decay * start)
    np.testing.assert_allclose(ours.push(first), after_first, rtol=1e-5, atol=1e-6)
    compensated = second + 2.0 * second * second * (after_first - start) + decay * after_first
    wanted = after_first - rates * compensated
    np.testing.assert_allclose(ours.push(second, rank=1), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_compressed_pushes_are_half_as_large(form: CompressionName) -> None:
    _, parameters = published(Optim("sgd"))
    gradient = torch.from_numpy(flat(gradients(parameters, 0)))
    sent = compress(gradient, form)
    assert sent.nbytes == 2 * len(gradient)
    torch.testing.assert_close(decompress(sent, form), gradient, rtol=0.01, atol=0.01)


def test_missing_gradients_leave_their_parameters_alone() -> None:
    ours = Server(Optim("adamw"))
    before = flat(ours.parameters)
    after = ours.push(flat(gradients(ours.parameters, 0)), missing=[0])
    end = ours.parameters[0].numel()
    assert np.array_equal(after[:end], before[:end]) and not np.array_equal(after[end:], before[end:])


# -- batches ---------------------------------------------------------------------------------------------------------


def one_weight(steps: int, *, step: int = 0, unfinished: Sequence[int] = (), after: int = 0) -> Training:
    make: Callable[..., torch.optim.Optimizer] = partial(optim.build, Optim("sgd"), lr=0.0, device=CPU)
    parameter = nn.Parameter(torch.zeros(1))
    return Training(
        layouts=layouts_of([parameter]),
        weights=np.zeros(1, np.float32),
        optimizer=make([{"params": [parameter]}]).state_dict(),
        make=make,
        set_rates=keep_rates,
        staleness_power=0.0,
        steps=steps,
        step=step,
        unfinished=unfinished,
        after=after,
    )


class Log:
    """The batches whose updates were made, in order, and how stale they were."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.staleness: list[int] = []


async def work(server: ParameterServer, log: Log, rank: int, draw: random.Random, deaths: Counter[int]) -> None:
    """Train as a worker does, at a pace of its own; die now and then, and come back."""

    async def push(batch: int) -> list[int] | None:
        before = server._step
        pushed = await server.push(rank, batch, "none", [], np.ones(1, np.float32))
        assert pushed.step > before
        log.made.append(batch)
        log.staleness.append(pushed.staleness)
        return pushed.batches

    while True:
        await server.join(rank, 1.0)
        had: list[int] = []
        while True:
            if not had:
                if (more := await server.assign(rank, 2, 1.0)) is None:
                    return
                had += more
                await server.pull(rank, computes=True)
                continue
            batch = had.pop(0)
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            if deaths[rank] and draw.random() < 0.2:  # before it pushes
                deaths[rank] -= 1
                break
            more = await push(batch)
            if deaths[rank] and draw.random() < 0.2:  # before it hears of its update
                deaths[rank] -= 1
                break
            had += more or []


async def train(size: int, steps: int, seed: int, deaths: int) -> Log:
    server, log = ParameterServer(size), Log()
    await server.open({}, one_weight(steps))
    left, draw = Counter(dict.fromkeys(range(size), deaths)), random.Random(seed)
    await asyncio.gather(*(work(server, log, rank, draw, left) for rank in range(size)))
    return log


@given(size=st.integers(1, 4), steps=st.integers(1, 40), seed=st.integers(0, 10**6), deaths=st.integers(0, 3))
def test_each_batch_is_made_once_whatever_workers_die(size: int, steps: int, seed: int, deaths: int) -> None:
    log = asyncio.run(train(size, steps, seed, deaths))
    assert sorted(log.made) == list(range(steps))
    assert log.made[-1] == steps - 1, "the last batch ends with the final weights"


def test_one_worker_is_never_stale() -> None:
    assert set(asyncio.run(train(1, 20, 0, 0)).staleness) == {0}


def test_what_a_checkpoint_says_is_unfinished_is_made_after_it() -> None:
    async def program() -> tuple[ServerState, list[int]]:
        server, log = ParameterServer(2), Log()
        await server.open({}, one_weight(10))
        assert (await server.assign(0, 2), await server.assign(1, 2)) == ([0, 1], [2, 3])
        for batch in (2, 3):
            await server.push(1, batch, "none", [], np.ones(1, np.float32))
        saved = await server.save()
        resumed = ParameterServer(1)
        again = one_weight(10, step=saved.step, unfinished=saved.unfinished, after=saved.after)
        await resumed.open({}, again)
        await work(resumed, log, 0, random.Random(0), Counter())
        return saved, sorted([2, 3, *log.made])

    saved, updates = asyncio.run(program())
    assert (saved.step, saved.unfinished, saved.after) == (2, [0, 1, 4, 5], 6)
    assert updates == list(range(10))


def test_the_end_of_the_first_worker_is_the_end() -> None:
    async def program() -> object:
        server = ParameterServer(1)
        await server.open({}, one_weight(10))
        await server.leave(0)
        return await server.assign(1)

    assert asyncio.run(program()) is None
