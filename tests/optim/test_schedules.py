"""Schedules: pure, never wasteful, and MXNet's own laws where they coincide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.config import Optim
from steadytrain.optim.schedules import schedule

LAWS = get_args(get_type_hints(Optim)["schedule"])

SPECS = st.builds(
    Optim,
    schedule=st.sampled_from(LAWS),
    warmup_epochs=st.floats(0, 4),
    milestones=st.just((1.0, 2.5)),
    power=st.floats(0.5, 3),
    final=st.floats(0, 1),
)


@given(SPECS, st.integers(1, 60), st.floats(0.5, 20), st.randoms())
def test_the_rate_depends_on_the_update_alone(spec: Optim, steps: int, per_epoch: float, random: Any) -> None:
    rate = schedule(spec, steps=steps, steps_per_epoch=per_epoch)
    in_order = [rate(k) for k in range(steps)]
    shuffled = random.sample(range(steps), steps)
    assert {k: rate(k) for k in shuffled} == dict(enumerate(in_order))
    again = schedule(spec, steps=steps, steps_per_epoch=per_epoch)
    assert again(steps - 1) == in_order[-1]


@given(SPECS, st.integers(1, 60), st.floats(0.5, 20))
def test_no_update_is_spent_at_rate_zero(spec: Optim, steps: int, per_epoch: float) -> None:
    rate = schedule(spec, steps=steps, steps_per_epoch=per_epoch)
    assert all(0 < rate(k) <= 1 for k in range(steps))


@pytest.mark.parametrize("name", LAWS)
def test_the_peak_comes_right_after_the_warm_up(name: str) -> None:
    rate = schedule(Optim(schedule=name, warmup_epochs=2, milestones=(3,)), steps=20, steps_per_epoch=4)  # type: ignore[arg-type]
    assert [rate(k) for k in range(9)] == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


def test_falling_laws_end_at_final() -> None:
    for name in ("cosine", "poly"):
        rate = schedule(Optim(schedule=name, final=0.25), steps=10, steps_per_epoch=1)
        assert rate(10) == rate(1000) == pytest.approx(0.25)
        assert rate(9) > 0.25


def test_a_step_comes_when_its_epochs_are_done() -> None:
    rate = schedule(Optim(schedule="step", milestones=(2, 3), factor=0.1), steps=20, steps_per_epoch=4)
    assert [rate(7), rate(8), rate(11), rate(12)] == pytest.approx([1, 0.1, 0.1, 0.01])


@pytest.fixture
def mxnet(data_folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((data_folder / "mxnet-golden" / "schedules.json").read_text())["sweeps"]
    return told


@pytest.mark.parametrize("warm", ["no_warmup", "linear5"])
@pytest.mark.parametrize("law", ["cosine", "cosine_final", "poly_default", "poly_pwr0.5", "poly_pwr1_final"])
def test_cosine_and_poly_are_mxnets_one_update_earlier(mxnet: dict[str, Any], law: str, warm: str) -> None:
    told = mxnet[f"{law}.{warm}"]
    args = told["args"]
    spec = Optim(
        schedule="cosine" if law.startswith("cosine") else "poly",
        final=args.get("final_lr", 0) / args["base_lr"],
        power=args.get("pwr", 2),
        warmup_epochs=args.get("warmup_steps", 0),
    )
    rate = schedule(spec, steps=args["max_update"], steps_per_epoch=1)
    at = dict(zip(told["num_update"], told["lr"], strict=True))
    warmup = args.get("warmup_steps", 0)
    for k in range(warmup, 23):
        assert args["base_lr"] * rate(k) == pytest.approx(at[k], abs=1e-12)
    for k in range(warmup - 1):
        assert args["base_lr"] * rate(k) == pytest.approx(at[k + 1], abs=1e-12)


@pytest.mark.parametrize("warm", ["no_warmup", "linear5"])
@pytest.mark.parametrize("law", ["multifactor", "multifactor_one"])
def test_steps_are_mxnets_at_the_same_update(mxnet: dict[str, Any], law: str, warm: str) -> None:
    told = mxnet[f"{law}.{warm}"]
    args = told["args"]
    spec = Optim(
        schedule="step",
        milestones=tuple(args["step"]),
        factor=args["factor"],
        warmup_epochs=args.get("warmup_steps", 0),
    )
    rate = schedule(spec, steps=16, steps_per_epoch=1)
    for num_update, lr in zip(told["num_update"], told["lr"], strict=True):
        if num_update:
            assert args["base_lr"] * rate(num_update - 1) == pytest.approx(lr, rel=1e-12)
