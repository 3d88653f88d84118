"""What every engine must do; each one is a row of the table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from steadytrain.engines import Engine, Single

ENGINES: dict[str, Callable[[], Engine]] = {"single": lambda: Single(torch.device("cpu"))}


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_parts_of_a_batch_add_up_to_the_whole(engine: Engine) -> None:
    images = torch.arange(12.0).reshape(4, 3)
    whole, parts = _model(), _model()
    whole(images).mean().backward()
    call = engine.prepare(parts)
    for k, part in enumerate(images.chunk(2)):
        engine.backward(call(part).mean() / 2, last=k == 1)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


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


def test_the_mean_over_equal_ranks_is_the_value(engine: Engine) -> None:
    assert engine.mean(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_closing_twice_is_fine(engine: Engine) -> None:
    engine.barrier()
    engine.close()
    engine.close()
