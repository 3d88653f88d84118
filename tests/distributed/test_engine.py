"""The engine: one suite for a process alone and for a group of one; then real ranks over gloo that update together."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from tests.distributed.ranks import as_group, codes_of
from torch import nn

from steadytrain.distributed import engine as engine_module
from steadytrain.distributed.compression import CompressionName
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.local import LocalEngine, Outer
from steadytrain.distributed.process_group import Group, init_group
from steadytrain.distributed.world import World
from steadytrain.errors import FailedError
from steadytrain.launch.supervise import free_port
from steadytrain.training.ema import Ema

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["alone", "group", "local alone", "local", "local later", "diloco"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "alone":
        yield Engine(CPU)
    elif request.param == "local alone":
        yield LocalEngine(CPU, every=2)
    else:
        with init_group(World(port=free_port())) as group:
            if request.param == "group":
                yield Engine(CPU, group)
            else:
                outer = Outer() if request.param == "diloco" else None
                yield LocalEngine(CPU, group, every=2, first=3 if request.param == "local later" else 0, outer=outer)


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_parts_of_a_batch_add_up_to_the_whole(engine: Engine) -> None:
    images = torch.arange(12.0).reshape(4, 3)
    whole, parts = _model(), _model()
    whole(images).mean().backward()
    call = engine.prepare(parts)
    for k, part in enumerate(images.chunk(2)):
        with engine.micro_batch(last=k == 1):
            engine.backward(call(part).mean() / 2, last=k == 1)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_module_keeps_its_parameters_and_their_names(engine: Engine) -> None:
    module = _model()
    before = dict(module.named_parameters())
    engine.prepare(module)
    after = dict(module.named_parameters())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)


def test_a_function_of_the_network_is_called_within_the_exchange(engine: Engine) -> None:
    """Compiled code is such a function: nothing of what ranks exchange lies between its parts."""
    call, images = engine.prepare(module := _model()), torch.arange(12.0).reshape(4, 3)
    if call is module:
        return  # nothing is exchanged in a pass
    engine.backward(call(images, by=lambda network, images: network(images).square().mean()), last=True)
    alone = _model()
    alone(images).square().mean().backward()
    for a, b in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_state_goes_out_and_comes_in_again(engine: Engine) -> None:
    engine.load_state_dict(engine.state_dict())


def test_the_sum_over_one_rank_is_the_value_and_leaves_it_as_it_is(engine: Engine) -> None:
    value = torch.tensor([1.0, 2.0])
    assert engine.sum(value).tolist() == [1.0, 2.0]
    assert [gathered.tolist() for gathered in engine.all_gather(value)] == [[1.0, 2.0]]


def test_aligning_changes_nothing_on_the_first_rank(engine: Engine) -> None:
    module = torch.nn.BatchNorm1d(2)
    module.running_mean = torch.tensor([1.0, 2.0])
    engine.prepare(module)
    with engine.settled(module):
        assert module.running_mean.tolist() == [1.0, 2.0]
    assert module.running_mean.tolist() == [1.0, 2.0]


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _images(parts: int) -> torch.Tensor:
    return torch.randn(parts, 5, 6, generator=torch.Generator().manual_seed(7))


def _updates(group: Group, numbers: list[int], parts: int, *, recorded: bool = False) -> Tensors:
    """Three updates of a net, of whose micro-batches this rank makes some."""
    net = _net()
    if recorded and group.world.rank:  # the first rank's values count
        with torch.no_grad():
            next(net.parameters()).zero_()
    engine = Engine(CPU, group, recorded=recorded)
    exposed: list[int] = []
    engine.on_exposed = lambda: exposed.append(1)
    call = engine.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for k in numbers:
            last = k == numbers[-1]
            with engine.micro_batch(last=last):
                engine.backward(call(_images(parts)[k]).square().mean() * group.world.size / parts, last=last)
        optimizer.step()
        optimizer.zero_grad()
    engine.broadcast_buffers(net)
    return {**net.state_dict(), "exposed": torch.tensor(len(exposed))}


@pytest.fixture(autouse=True)
def _as_many_threads() -> Iterator[None]:
    """As the ranks have: how a product is split among threads is in its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _alone(parts: int) -> Tensors:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for k in range(parts):
            (net(_images(parts)[k]).square().mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


def _parameters(tensors: Tensors) -> Tensors:
    return {name: tensors[name] for name, _ in _net().named_parameters()}


def _killed(group: Group, compress: CompressionName, begins: tuple[int, ...]) -> Tensors:
    """Eight updates; before those of ``begins``, counted from 0, a new process continues from the checkpoint."""
    rank, size = group.world.rank, group.world.size
    states: tuple[Any, Any, Any] | None = None
    for step in range(8):
        if step in begins:
            net, engine = _net(), Engine(CPU, group, compress=compress, power_from=4)
            next(net.children()).requires_grad_(step >= 3)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            if states is not None:
                engine.load(net, optimizer, *states[:2])
                engine.load_state_dict(states[2])
            call = engine.prepare(net, step)
        elif step == 3:  # another phase
            next(net.children()).requires_grad_(True)
            call = engine.prepare(net, step)
        for micro in range(1 + rank % 2):  # unequal shares
            images = _images(8)[(step + 2 * rank + micro) % 8]
            with engine.micro_batch(last=micro == rank % 2):
                loss = (call(images) - step).square().mean() / size
                engine.backward(loss, last=micro == rank % 2)
        optimizer.step()
        optimizer.zero_grad()
        engine.finish_update(step + 1)
        states = copy.deepcopy((net.state_dict(), optimizer.state_dict(), engine.state_dict()))
    return dict(net.state_dict())


def _whole_and_killed(group: Group) -> dict[str, Tensors]:
    begins = {"whole": (0,), "killed": (0, 5), "killed twice": (0, 2, 6), "killed between phases": (0, 3)}
    return {
        f"{compress} {name}": _killed(group, compress, at)
        for compress in ("none", "bf16", "powersgd")
        for name, at in begins.items()
    }


@pytest.mark.parametrize("size", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_were_killed_go_on_to_every_bit_of_the_uninterrupted_run(size: int) -> None:
    """More than two: a sum of two numbers has no order."""
    for rank in as_group(_whole_and_killed, size):
        for program, tensors in rank.items():
            whole = rank[program.split()[0] + " whole"]
            assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items()), program


def _norm_net() -> nn.Sequential:
    """With batch norms that have seen nothing yet."""
    torch.manual_seed(3)
    convolutions = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(45, 3))


def _photos() -> torch.Tensor:
    return 3 + torch.randn(8, 2, 7, 7, generator=torch.Generator().manual_seed(5))


def _train_norms(images: torch.Tensor, engine: Engine, momentum: float | None = 0.1) -> Tensors:
    """Two updates; what the network has become, and what it makes of all photos."""
    net = _norm_net()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = momentum
    call = engine.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        engine.backward(call(images).square().mean(), last=True)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = net.eval()(_photos())
    return {**net.state_dict(), "logits": logits}


def _train_half(group: Group, momentum: float | None = 0.1) -> Tensors:
    half = _photos().chunk(2)[group.world.rank]
    return _train_norms(half, Engine(CPU, group, synchronize_norms=True), momentum)


def _settle(images: torch.Tensor, engine: Engine) -> Tensors:
    """Running statistics that averaged weights have of images of their own."""
    net = _norm_net()
    ema = Ema(net, 0.5, copied=engine.copy(net))
    engine.prepare(net)
    ema.settle(net, images, share=1.0)
    return {name: value for name, value in ema.module.state_dict().items() if "running" in name}


def _programs(group: Group) -> dict[str, Tensors]:
    rank = group.world.rank
    return {
        "two": _updates(group, [rank], 2),
        "recorded": _updates(group, [rank], 2, recorded=True),
        "uneven recorded": _updates(group, [[0], [1, 2]][rank], 3, recorded=True),
        "uneven": _updates(group, [[0], [1, 2]][rank], 3),  # one has twice as many micro-batches
        "norms": _train_half(group),
        "mean of all": _train_half(group, momentum=None),
        "kernels": _by_kernels(group),
        "average": _settle(_photos().chunk(2)[rank], Engine(CPU, group, synchronize_norms=True)),
    }


class Kernels:
    """What torch's kernels for synchronous batch norms compute on a GPU, by the definition of ``nn.SyncBatchNorm``."""

    def batch_norm_stats(self, x: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
        assert x.is_contiguous(memory_format=torch.channels_last) or x.is_contiguous()
        return x.mean((0, 2, 3)), (x.var((0, 2, 3), unbiased=False) + eps).rsqrt()

    def batch_norm_gather_stats_with_counts(
        self, x: torch.Tensor, means: torch.Tensor, invstds: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        running_mean, running_var, momentum, eps, counts = rest
        shares = (counts / counts.sum())[:, None]
        mean = (means * shares).sum(0)
        var = ((invstds**-2 - eps + (means - mean) ** 2) * shares).sum(0)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
        return mean, (var + eps).rsqrt()

    def batch_norm_elemt(self, x: torch.Tensor, *values: torch.Tensor | float) -> torch.Tensor:
        weight, bias, mean, invstd = (torch.as_tensor(value).view(1, -1, 1, 1) for value in values[:4])
        return (x - mean) * invstd * weight + bias

    def batch_norm_backward_reduce(self, dy: torch.Tensor, x: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
        mean, invstd = values[:2]
        sum_dy, sum_dy_xmu = dy.sum((0, 2, 3)), (dy * (x - mean.view(1, -1, 1, 1))).sum((0, 2, 3))
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy

    def batch_norm_backward_elemt(self, dy: torch.Tensor, x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        *channels, counts = values
        assert counts.dtype == torch.int32
        mean, invstd, weight, sum_dy, sum_dy_xmu = (value.view(1, -1, 1, 1) for value in channels)
        n = counts.sum()
        return (dy - sum_dy / n - (x - mean) * invstd**2 * sum_dy_xmu / n) * invstd * weight


def _by_kernels(group: Group) -> Tensors:
    """As on GPUs, whose kernels a CPU has not; no number may be read from the device between two layers."""
    kernels = Kernels()
    with ExitStack() as stack:
        for name in [name for name in dir(Kernels) if name.startswith("batch_norm")]:
            stack.enter_context(mock.patch.object(torch, name, getattr(kernels, name)))
        stack.enter_context(mock.patch.object(engine_module, "_has_kernels", return_value=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "__float__", side_effect=AssertionError("a wait")))
        stack.enter_context(mock.patch.object(torch.Tensor, "item", side_effect=AssertionError("a wait")))
        return _train_half(group)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Tensors]]:
    """What two ranks end up with, by program."""
    return as_group(_programs, 2)


@pytest.mark.parametrize("program", ["two", "recorded"])
def test_two_ranks_equal_one_process_that_accumulates_to_the_last_bit(
    ranks: list[dict[str, Tensors]], program: str
) -> None:
    first, second = (rank[program] for rank in ranks)
    alone = _alone(2)
    for name, value in _parameters(first).items():
        assert torch.equal(value, alone[name]) and torch.equal(value, second[name]), name


@pytest.mark.parametrize("program", ["uneven", "uneven recorded"])
def test_ranks_with_unequal_numbers_of_micro_batches_make_the_same_update(
    ranks: list[dict[str, Tensors]], program: str
) -> None:
    first, second = (rank[program] for rank in ranks)
    alone = _alone(3)
    for name, value in _parameters(first).items():
        assert torch.equal(value, second[name]), name
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-6)


def test_the_first_ranks_running_statistics_count(ranks: list[dict[str, Tensors]]) -> None:
    first, second = (rank["two"] for rank in ranks)
    assert torch.equal(first["1.running_mean"], second["1.running_mean"])
    assert not torch.equal(first["1.running_mean"], torch.zeros(8))


@pytest.mark.parametrize("program", ["uneven", "uneven recorded"])
def test_it_is_told_when_the_gradients_are_computed_once_in_an_update(
    ranks: list[dict[str, Tensors]], program: str
) -> None:
    assert [int(rank[program]["exposed"]) for rank in ranks] == [3, 3]


@pytest.mark.parametrize("program", ["norms", "mean of all", "kernels"])
def test_synchronous_norms_take_halves_of_a_batch_as_the_whole(ranks: list[dict[str, Tensors]], program: str) -> None:
    whole = _train_norms(_photos(), Engine(CPU), momentum=None if program == "mean of all" else 0.1)
    for norms in (rank[program] for rank in ranks):
        assert norms.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(norms[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_averaged_weights_take_their_statistics_over_all_ranks_as_well(ranks: list[dict[str, Tensors]]) -> None:
    whole = _settle(_photos(), Engine(CPU))
    for settled in (rank["average"] for rank in ranks):
        assert len(settled) == 4
        for name, value in whole.items():
            torch.testing.assert_close(settled[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_synchronous_norms_of_timm_keep_their_activation() -> None:
    from timm.layers.norm_act import BatchNormAct2d  # here, so that the ranks need not import it

    norm = BatchNormAct2d(2, act_layer=nn.ReLU)
    expected = norm(_photos())
    with init_group(World(port=free_port())) as group:
        synchronous = Engine(CPU, group, synchronize_norms=True).prepare(norm)
        torch.testing.assert_close(synchronous(_photos()), expected, rtol=1e-4, atol=1e-5)


class _Partial(nn.Module):
    """A network with a parameter that is never used, and a layer that one rank leaves out."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.spare = nn.Linear(3, 40), nn.Linear(40, 40), nn.Parameter(torch.ones(2))
        self.skips = skips

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = self.first(images)
        return images if self.skips else self.block(images)


def _update_in_part(compress: CompressionName, group: Group) -> Tensors:
    engine = Engine(CPU, group, compress=compress)
    engine.finds_unused = True
    module = _Partial(skips=group.world.rank == 1)
    call = engine.prepare(module)
    for _ in range(3):  # an unfinished exchange is noticed in the next one
        module.zero_grad(set_to_none=True)
        with engine.micro_batch(last=True):
            engine.backward(call(torch.ones(4, 3)).square().mean(), last=True)
        engine.finish_update(1)
    return {name: value.grad for name, value in module.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("compress", ["none", "fp16", "powersgd"])
def test_ranks_agree_on_parts_that_some_of_them_leave_out(compress: CompressionName) -> None:
    first, second = as_group(partial(_update_in_part, compress), 2)
    assert first.keys() == second.keys() == {"first.weight", "first.bias", "block.weight", "block.bias"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    if compress == "none":
        whole = [_Partial(skips=skips) for skips in (False, True)]
        for module in whole:
            module(torch.ones(4, 3)).square().mean().backward()
        grad = whole[0].block.weight.grad
        assert grad is not None
        torch.testing.assert_close(first["block.weight"], grad / 2)


def _update_unawares(group: Group) -> Tensors:
    engine, module = Engine(CPU, group), _Partial(skips=group.world.rank == 1)
    del module.spare
    call = engine.prepare(module)
    with engine.micro_batch(last=True):
        try:
            engine.backward(call(torch.ones(4, 3)).square().mean(), last=True)
        except FailedError as error:
            print(error, file=sys.stderr)
            raise SystemExit(7) from error
    return {}


def test_a_gradient_that_does_not_come_ends_the_ranks_and_is_named() -> None:
    codes, said = codes_of(_update_unawares, 2, ends={0})
    assert codes[1] == 7 and "no gradient to block.weight (of 2 parameters) on rank 1" in said
