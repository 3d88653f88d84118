"""What every engine must do; each one is a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from steadytrain.distributed.ddp import DDPEngine
from steadytrain.distributed.engine import Engine, SingleEngine
from steadytrain.distributed.process_group import init_group
from steadytrain.distributed.world import World
from steadytrain.launch.supervise import free_port

CPU = torch.device("cpu")


@contextmanager
def single() -> Iterator[Engine]:
    yield SingleEngine(CPU)


@contextmanager
def synchronous() -> Iterator[Engine]:
    with init_group(World(port=free_port())) as group:
        yield DDPEngine(group, CPU)


ENGINES: dict[str, Callable[[], AbstractContextManager[Engine]]] = {"single": single, "synchronous": synchronous}


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with ENGINES[request.param]() as made:
        yield made


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


def test_clipping_scales_to_the_limit_and_tells_the_norm_before(engine: Engine) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert engine.clip([weight], 1.0).item() == pytest.approx(5.0)
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_a_small_gradient_is_not_clipped(engine: Engine) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([0.3, 0.4])
    engine.clip([weight], 1.0)
    assert weight.grad.tolist() == pytest.approx([0.3, 0.4])


def test_the_update_runs_once(engine: Engine) -> None:
    done: list[int] = []
    engine.step(lambda: done.append(1))
    assert done == [1]


def test_state_goes_out_and_comes_in_again(engine: Engine) -> None:
    engine.load_state_dict(engine.state_dict())


def test_the_sum_over_one_rank_is_the_value_and_leaves_it_as_it_is(engine: Engine) -> None:
    value = torch.tensor([1.0, 2.0])
    assert engine.sum(value).tolist() == [1.0, 2.0]
    assert [one.tolist() for one in engine.all_gather(value)] == [[1.0, 2.0]]


def test_aligning_changes_nothing_on_the_first_rank(engine: Engine) -> None:
    module = torch.nn.BatchNorm1d(2)
    module.running_mean = torch.tensor([1.0, 2.0])
    engine.broadcast_buffers(module)
    assert module.running_mean.tolist() == [1.0, 2.0]
