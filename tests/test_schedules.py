"""Schedules: pure, never wasteful, MXNet's own laws by name, and torch's where they are the same."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.config import Budget, Data, Every, Model, Optim, Recipe
from steadytrain.config.laws import find_law, law_names, law_of
from steadytrain.config.schedules import Plateau, momentum, schedule, spans
from steadytrain.config.stages import parse_schedule
from steadytrain.config.timeline import Timeline
from steadytrain.errors import RecipeError

EXAMPLES = {
    "exponential": "exponential,to=0.01",
    "factor": "factor,every=1.5",
    "restarts": "restarts,every=1.5,times=2,shrink=0.5",
    "triangular": "triangular,every=1.5",
    "mxnet/factor": "mxnet/factor,step=5",
}
TEXTS = [EXAMPLES.get(law, law) for law in law_names()]
CHAINS = ["cosine:0.2,to=0.5 constant:0.1 linear", "inverse-sqrt linear:0.2", "one-cycle:0.3,to=0.1 constant"]
OURS = [text for text in TEXTS + CHAINS if not text.startswith("mxnet/")]


@st.composite
def specs(draw: st.DrawFn, texts: list[str]) -> Optim:
    text = draw(st.sampled_from(texts))
    rises = law_of(parse_schedule(text)[0]).rises
    return Optim(
        schedule=text,
        warmup=draw(st.sampled_from(["linear", "linear:0.2", "constant:0.3", "power:2"])),
        warmup_epochs=0.0 if rises else draw(st.floats(0, 0.4)),
        milestones=(1.0, 2.5),
        power=draw(st.floats(0.5, 3)),
        final=draw(st.floats(0, 1)),
    )


@given(specs(TEXTS + CHAINS), st.integers(20, 60), st.floats(0.5, 20), st.randoms())
def test_the_rate_depends_on_the_update_alone(spec: Optim, steps: int, per_epoch: float, random: Any) -> None:
    rate = schedule(spec, steps=steps, steps_per_epoch=per_epoch)
    in_order = [rate(k) for k in range(steps)]
    shuffled = random.sample(range(steps), steps)
    assert {k: rate(k) for k in shuffled} == dict(enumerate(in_order))
    again = schedule(spec, steps=steps, steps_per_epoch=per_epoch)
    assert again(steps - 1) == in_order[-1]


@given(specs(OURS), st.integers(20, 60), st.floats(0.5, 20))
def test_no_update_is_spent_at_rate_zero(spec: Optim, steps: int, per_epoch: float) -> None:
    rate = schedule(spec, steps=steps, steps_per_epoch=per_epoch)
    assert all(0 < rate(k) <= 1 + 1e-12 for k in range(steps))


@given(specs(CHAINS), st.integers(40, 400))
def test_a_stage_begins_where_the_one_before_it_ended(spec: Optim, steps: int) -> None:
    placed = spans(spec, steps=steps, steps_per_epoch=40)
    for before, after in itertools.pairwise(placed):
        assert before.end == after.begin
        left = law_of(before.stage).share(before, before.end)
        right = law_of(after.stage).share(after, after.begin)
        assert left == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("text", [text for text in OURS if not law_of(parse_schedule(text)[0]).rises])
def test_the_peak_comes_right_after_the_warm_up(text: str) -> None:
    rate = schedule(Optim(schedule=text, warmup_epochs=2, milestones=(3,), final=0.001), steps=40, steps_per_epoch=4)
    assert [rate(k) for k in range(9)] == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


def test_a_warm_up_is_linear_constant_or_a_power() -> None:
    def warm(words: str) -> list[float]:
        rate = schedule(Optim(schedule="constant", warmup=words, warmup_epochs=4), steps=9, steps_per_epoch=1)
        return [rate(k) for k in range(5)]

    assert warm("linear:0.2") == pytest.approx([0.4, 0.6, 0.8, 1, 1])
    assert warm("constant:0.1") == [0.1, 0.1, 0.1, 1, 1]
    assert warm("power:2") == [1 / 16, 4 / 16, 9 / 16, 1, 1]


def test_falling_laws_end_at_final() -> None:
    for name in ("cosine", "poly", "linear", "exponential"):
        rate = schedule(Optim(schedule=name, final=0.25), steps=10, steps_per_epoch=1)
        assert rate(10) == rate(1000) == pytest.approx(0.25)
        assert rate(9) > 0.25


def test_a_step_comes_when_its_epochs_are_done() -> None:
    rate = schedule(Optim(schedule="step", milestones=(2, 3), factor=0.1), steps=20, steps_per_epoch=4)
    assert [rate(7), rate(8), rate(11), rate(12)] == pytest.approx([1, 0.1, 0.1, 0.01])
    rate = schedule(Optim(schedule="factor,every=2", factor=0.1, final=0.005), steps=40, steps_per_epoch=4)
    assert [rate(7), rate(8), rate(16), rate(24), rate(39)] == pytest.approx([1, 0.1, 0.01, 0.005, 0.005])


def test_a_chain_of_warm_up_law_and_cool_down() -> None:
    """Zhai et al. 2022: an inverse square root whose time is the warm-up's, then linear to 0."""
    rate = schedule(Optim(schedule="inverse-sqrt linear:2", warmup_epochs=1), steps=100, steps_per_epoch=10)
    assert [rate(k) for k in range(9, 80)] == pytest.approx([math.sqrt(10 / max(k, 10)) for k in range(9, 80)])
    assert rate(90) == pytest.approx(rate(80) / 2) and rate(99) == pytest.approx(rate(80) / 20)


def torch_rates(make: Any, steps: int) -> tuple[list[float], list[float]]:
    """The rates and the momenta of one of torch's schedulers at each update, by its own optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.95)
    scheduler = make(optimizer)
    rates, momenta = [], []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        momenta.append(float(optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return rates, momenta


def test_one_cycle_is_torchs() -> None:
    """Ours reaches ``to`` at the update after the last, torch's at the last: 41 updates there are 40 here, and one."""
    spec = Optim(schedule="one-cycle,up=0.25,to=0.000004", momentum=0.95)
    rate = schedule(spec, steps=40, steps_per_epoch=4)
    moves = momentum(spec, steps=40, steps_per_epoch=4)
    assert moves is not None
    # torch's rise ends at pct_start * total - 1
    rates, momenta = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=41, pct_start=11 / 41), 41
    )
    assert [rate(k) for k in range(41)] == pytest.approx(rates, abs=1e-12)
    assert [moves(k) for k in range(41)] == pytest.approx(momenta, abs=1e-12)


@pytest.mark.parametrize("shrink", [1.0, 0.5])
def test_triangular_is_torchs(shrink: float) -> None:
    rate = schedule(Optim(schedule=f"triangular,every=4,from=0.1,shrink={shrink}"), steps=60, steps_per_epoch=5)
    rates, _ = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
            optimizer, 0.1, 1.0, 10, mode="triangular" if shrink == 1 else "triangular2", cycle_momentum=False
        ),
        60,
    )
    assert [rate(k) for k in range(60)] == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_restarts_are_torchs(times: int) -> None:
    spec = Optim(schedule=f"restarts,every=2,times={times}", final=0.01)
    rate = schedule(spec, steps=100, steps_per_epoch=5)
    rates, _ = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, times, eta_min=0.01), 100
    )
    assert [rate(k) for k in range(100)] == pytest.approx(rates, abs=1e-9)


@pytest.mark.parametrize("on", ["top1", "loss"])
def test_plateau_is_torchs(on: str) -> None:
    values = [0.5, 0.4, 0.6, 0.6, 0.55, 0.61, 0.3, 0.3, 0.3, 0.7, 0.69, 0.2, 0.2, 0.2, 0.2, 0.1, 0.9, 0.8, 0.8, 0.8]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max" if on == "top1" else "min", factor=0.5, patience=2, threshold=0, min_lr=0.1, eps=0
    )
    spec = Optim(schedule=f"plateau,patience=3,factor=0.5,to=0.1,on={on}")  # torch waits one more than its patience
    span, ours = spans(spec, steps=9, steps_per_epoch=1)[0], Plateau()
    for value in values:
        theirs.step(value)
        ours = ours.after(span.stage, value if on == "top1" else -value)
        assert span.lowered(ours.drops) == optimizer.param_groups[0]["lr"]
    assert ours.drops > 2


def test_a_plateau_depends_on_how_often_there_is_an_evaluation() -> None:
    def recipe(text: str, epochs: float) -> Recipe:
        every = Every(evaluate_epochs=epochs)
        return Recipe(data=Data(train="x"), model=Model("mlp"), optim=Optim(schedule=text), every=every)

    assert recipe("plateau", 1).digest != recipe("plateau", 2).digest
    assert recipe("cosine", 1).digest == recipe("cosine", 2).digest
    with pytest.raises(RecipeError, match="there is nothing to evaluate on"):
        recipe("plateau", 1).with_({"data.holdout": 0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", "'cosin' must be one of .* Did you mean cosine"),
        ("multi-factor", r"Did you mean step\?"),
        ("", "must be one of"),
        ("cosine,min=0.1", "cosine has no parameter 'min': it takes to"),
        ("constant,to=1", "constant has no parameter 'to': it takes none"),
        ("cosine,to=2", "cosine's to must be a share of the peak, 0 to 1"),
        ("cosine:0", "epochs of a stage must be above 0, such as cosine:30"),
        ("factor", "factor needs every, such as factor,every=30"),
        ("cosine cosine", "all stages but one need their epochs"),
        ("plateau:2 cosine", "plateau must be its last stage"),
        ("constant:2 one-cycle", "one-cycle begins low: put it first"),
        ("mxnet/cosine:2 constant", "mxnet/cosine counts updates from the first one: use it alone"),
        ("mxnet/factor,step=0", "step must be a whole number, 1 or more"),
        ("mxnet/factor,step=2/3", "step must be a whole number, 1 or more"),
        ("step", "optim.milestones is .*; it must be given for schedule=step"),
        ("exponential", "exponential cannot fall to 0"),
    ],
)
def test_a_schedule_that_cannot_be_says_why(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Optim(schedule=text)


def test_every_parameter_has_a_limit() -> None:
    for law in law_names():
        row = find_law(law)
        assert row is not None
        for name in row.takes:
            with pytest.raises(RecipeError, match=f"{law}'s {name} must be"):
                parse_schedule(f"{law},{name}=wrong")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Optim(schedule="cosine:80 constant:15"), "95 epochs are more than the 10 of the run"),
        (Optim(schedule="cosine:8 constant"), "cosine ends at 0, so constant would train nothing: end it higher"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_says_why(spec: Optim, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        schedule(spec, steps=100, steps_per_epoch=10)


def test_a_rising_law_has_no_warm_up() -> None:
    with pytest.raises(RecipeError, match="one-cycle begins low and rises by itself"):
        Optim(schedule="one-cycle", warmup_epochs=1)
    with pytest.raises(RecipeError, match=r"optim.warmup is 'cosine'; it must be linear"):
        Optim(warmup="cosine")


# MXNet 1.9.1 -------------------------------------------------------------------------------------


@pytest.fixture
def mxnet(data_folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((data_folder / "mxnet-golden" / "schedules.json").read_text())
    return document


def by_name(cls: str, args: dict[str, Any]) -> tuple[Optim, int]:
    """The recipe of one of MXNet's schedulers, an epoch of which is one update; and its updates."""
    law = {"Factor": "factor", "MultiFactor": "multi-factor", "Poly": "poly", "Cosine": "cosine"}[
        cls.removesuffix("Scheduler")
    ]
    text = f"mxnet/{law}"
    if law == "factor":
        text += f",step={args['step']},to={args.get('stop_factor_lr', 1e-8) / args['base_lr']}"
    elif law == "multi-factor":
        text += f",step={'/'.join(map(str, args['step']))}"
    else:
        text += f",max_update={args['max_update']},to={args.get('final_lr', 0) / args['base_lr']}"
    begin = args.get("warmup_begin_lr", 0.0) / args["base_lr"]
    spec = Optim(
        lr=args["base_lr"],
        schedule=text,
        factor=args.get("factor", 1),
        power=args.get("pwr", 2),
        warmup=f"{args.get('warmup_mode', 'linear')}:{begin}",
        warmup_epochs=args.get("warmup_steps", 0),
    )
    return spec, 40


def test_mxnets_schedulers_by_name_give_its_rates(mxnet: dict[str, Any]) -> None:
    """All 44 sweeps, at every num_update from 1 on: update k is num_update k + 1."""
    for name, sweep in mxnet["sweeps"].items():
        spec, steps = by_name(sweep["class"], sweep["args"])
        rate = schedule(spec, steps=steps, steps_per_epoch=1)
        for num_update, lr in zip(sweep["num_update"], sweep["lr"], strict=True):
            if num_update:
                assert spec.lr * rate(num_update - 1) == pytest.approx(lr, rel=1e-12, abs=1e-18), (name, num_update)
    assert len(mxnet["sweeps"]) == 44


LIVING = """
import json, sys
import mxnet as mx
rates = []
for name, constants in json.loads(sys.argv[1]):
    schedule = getattr(mx.lr_scheduler, name)(**constants)
    rates.append([schedule(number) for number in range(1, 41)])
print("RATES" + json.dumps(rates))
"""


@pytest.mark.peer
def test_a_living_mxnet_gives_the_same_rates_for_other_constants(mxnet_python: str) -> None:
    draw, asked = random.Random(1), []
    for name in ("FactorScheduler", "MultiFactorScheduler", "PolyScheduler", "CosineScheduler"):
        for mode in ("linear", "constant"):
            constants: dict[str, Any] = {"base_lr": draw.uniform(0.01, 1), "warmup_steps": draw.randint(0, 7)}
            constants |= {"warmup_begin_lr": draw.uniform(0, 0.01), "warmup_mode": mode}
            if name in ("FactorScheduler", "MultiFactorScheduler"):
                steps = draw.randint(2, 9) if name[0] == "F" else sorted(draw.sample(range(8, 40), 3))
                constants |= {"step": steps, "factor": draw.uniform(0.1, 0.9)}
            else:
                constants |= {"max_update": draw.randint(20, 35), "final_lr": draw.uniform(0, 0.01)}
            asked.append((name, constants))
    command = [mxnet_python, "-c", LIVING, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for (name, constants), theirs in zip(asked, json.loads(done.stdout.split("RATES")[1]), strict=True):
        spec, steps = by_name(name, constants)
        rate = schedule(spec, steps=steps, steps_per_epoch=1)
        assert [spec.lr * rate(k) for k in range(40)] == pytest.approx(theirs, rel=1e-12, abs=1e-18), constants


DEVIATIONS = {
    "cosine_first_call_after_max": "asked first after its end, it trains at the peak; here at its last rate",
    "poly_first_call_after_max": "the same",
    "cosine_skip_over_max": "skipping over its end keeps the rate of the last call; here its last rate",
    "poly_skip_over_max": "the same",
    "factor_backwards": "it never goes back up; here a rate depends on the update alone",
    "multifactor_backwards": "the same",
    "cosine_warmup_is_max": "divides by zero at one update; here the peak, as at those after it",
    "poly_warmup_is_max": "the same",
    "poly_final_above_base": "final_lr above base_lr makes the rate rise; here final is a share of the peak, 0 to 1",
}
"""Where MXNet's answer to a call depends on the calls before it, or is an error; all else is the same."""


def test_mxnets_orders_of_calls_agree_or_are_named(mxnet: dict[str, Any]) -> None:
    deviating = set()
    for name, order in mxnet["orders"].items():
        try:
            spec, steps = by_name(order["class"], order["args"])
        except RecipeError:
            deviating.add(name)
            continue
        rate = schedule(spec, steps=steps, steps_per_epoch=1)
        for num_update, lr in zip(order["num_update"], order["lr"], strict=True):
            expected = math.nan if isinstance(lr, str) else pytest.approx(lr, rel=1e-12, abs=1e-18)
            if num_update and spec.lr * rate(num_update - 1) != expected:
                deviating.add(name)
    assert deviating == DEVIATIONS.keys()


def test_after_its_end_a_law_of_mxnet_keeps_its_last_rate() -> None:
    for law in ("poly", "cosine"):
        rate = schedule(Optim(schedule=f"mxnet/{law},max_update=16,to=0.1"), steps=20, steps_per_epoch=1)
        assert rate(15) == rate(16) == rate(29) == pytest.approx(0.1)
        spec, steps = by_name("CosineScheduler", {"base_lr": 0.1, "max_update": 8, "warmup_steps": 8})
        assert schedule(spec, steps=steps, steps_per_epoch=1)(7) == 1


def test_what_mxnet_refuses_is_refused(mxnet: dict[str, Any]) -> None:
    """But for a tuple of steps and whole numbers written as floats, which say the same here."""
    accepted = []
    for refused in mxnet["refused"]:
        args = {"base_lr": 0.01, **refused["args"]}
        try:
            by_name(refused["class"], args)
        except (RecipeError, IndexError):
            continue
        accepted.append(refused["args"])
    same = [{"step": 2, "warmup_steps": 2.0}, {"step": [3, 5]}, {"max_update": 10.0}]
    assert accepted == same


@pytest.mark.parametrize("warm", ["no_warmup", "linear5"])
@pytest.mark.parametrize("law", ["cosine", "cosine_final", "poly_default", "poly_pwr0.5", "poly_pwr1_final"])
def test_cosine_and_poly_are_mxnets_one_update_earlier(mxnet: dict[str, Any], law: str, warm: str) -> None:
    sweep = mxnet["sweeps"][f"{law}.{warm}"]
    args = sweep["args"]
    spec = Optim(
        schedule="cosine" if law.startswith("cosine") else "poly",
        final=args.get("final_lr", 0) / args["base_lr"],
        power=args.get("pwr", 2),
        warmup_epochs=args.get("warmup_steps", 0),
    )
    rate = schedule(spec, steps=args["max_update"], steps_per_epoch=1)
    at = dict(zip(sweep["num_update"], sweep["lr"], strict=True))
    warmup = args.get("warmup_steps", 0)
    for k in range(warmup, 23):
        assert args["base_lr"] * rate(k) == pytest.approx(at[k], abs=1e-12)
    for k in range(warmup - 1):
        assert args["base_lr"] * rate(k) == pytest.approx(at[k + 1], abs=1e-12)


@pytest.mark.parametrize("warm", ["no_warmup", "linear5"])
@pytest.mark.parametrize("law", ["multifactor", "multifactor_one"])
def test_steps_are_mxnets_at_the_same_update(mxnet: dict[str, Any], law: str, warm: str) -> None:
    sweep = mxnet["sweeps"][f"{law}.{warm}"]
    args = sweep["args"]
    spec = Optim(
        schedule="step",
        milestones=tuple(args["step"]),
        factor=args["factor"],
        warmup_epochs=args.get("warmup_steps", 0),
    )
    rate = schedule(spec, steps=16, steps_per_epoch=1)
    for num_update, lr in zip(sweep["num_update"], sweep["lr"], strict=True):
        if num_update:
            assert args["base_lr"] * rate(num_update - 1) == pytest.approx(lr, rel=1e-12)


def test_updates_of_a_grown_batch_have_the_rates_of_the_images_that_they_begin_at() -> None:
    optim = Optim(schedule="one-cycle", lr=0.4, warmup_epochs=0.0)
    recipe = Recipe(data=Data(train="x"), model=Model("x"), optim=optim, budget=Budget(epochs=2), batch_size=16)
    even, grown = Timeline(recipe, 64), Timeline(recipe.with_({"optim.grow_batch": ["2@1"]}), 64)
    assert (even.steps, grown.steps) == (8, 6)
    same = {0: 0, 1: 1, 4: 4, 5: 6}  # an update of the grown batch, and the one that begins at the same image
    assert [grown.lr(step) for step in same] == [even.lr(step) for step in same.values()]
    assert [grown.momentum(step) for step in same] == [even.momentum(step) for step in same.values()]
    assert [grown.update_at(epoch) for epoch in (0, 0.5, 1, 1.25, 2)] == [0, 2, 4, 5, 6]
    assert grown.epoch(96) == 1.5 and grown.epoch(160) == 2  # the end, though the last batch goes beyond it
