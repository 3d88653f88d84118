"""The rate finder: a suggestion that trains well, the same each time; no run is touched."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.errors import FailedError
from steadytrain.run import Run
from steadytrain.training import train
from steadytrain.training.profile.rate_finder import HIGHEST, LOWEST, find_rate, read_curve


def test_the_suggestion_is_the_same_each_time_and_trains_better_than_rates_far_from_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    curve = find_rate(recipe, updates=60)
    assert curve == find_rate(recipe, updates=60)
    assert curve.rates[0] == LOWEST and curve.rates[-1] <= HIGHEST * (1 + 1e-9)
    accuracy = {}
    for factor in (0.01, 1, 100):
        run = Run.create(tmp_path / str(factor), recipe.with_({"optim.lr": curve.suggestion * factor}))
        try:
            outcome = train(run)
            accuracy[factor] = 0.0 if outcome.evaluated is None else outcome.evaluated.top1
        except FailedError:  # it diverged
            accuracy[factor] = 0.0
    assert accuracy[1] > max(accuracy[0.01], accuracy[100]), (curve.suggestion, accuracy)


def test_the_suggestion_is_at_most_a_tenth_of_the_rate_that_diverged() -> None:
    rates = [1e-4 * 10 ** (k / 20) for k in range(60)]
    losses = [2.3 - 1.5 * k / 54 for k in range(55)] + [2.0, 6.0, 20.0, 80.0, math.inf]
    steep = [2.3] * 40 + [2.3 - 0.1 * k for k in range(15)] + [6.0, 20.0, 80.0, 90.0, math.inf]
    for curve in (losses, steep):
        suggested = read_curve(rates, curve, diverged=True)
        assert suggested.diverged == rates[-1]
        assert suggested.suggestion == pytest.approx(min(suggested.slowed, rates[-1] / 10), rel=0.05)
    assert suggested.steepest > rates[-1] / 10
    assert len(suggested.smoothed) == 59 and all(map(math.isfinite, suggested.smoothed))


def test_the_suggestion_is_where_the_fall_slows_down_and_not_where_it_is_steepest() -> None:
    """As of pretrained weights: fitted by 1e-3, which harms nothing, and worse only above 1e-2."""
    rates = [1e-6 * 10 ** (k / 20) for k in range(100)]
    fall = [1.5 / (1 + (2e-4 / rate) ** 1.5) for rate in rates]
    losses = [2.5 - part + 40 * rate for part, rate in zip(fall, rates, strict=True)]
    curve = read_curve(rates, losses, diverged=False)
    assert curve.steepest == pytest.approx(2e-4, rel=0.5)
    assert 6e-4 < curve.suggestion < 2e-3


def test_a_loss_that_never_falls_says_so() -> None:
    rates = [1e-4 * 10 ** (k / 20) for k in range(60)]
    with pytest.raises(FailedError, match=r"the loss did not fall at any rate from 0\.0001 to"):
        read_curve(rates, [2.0 + 0.01 * k for k in range(60)], diverged=False)


def test_the_command_prints_a_flag_and_draws_the_curve_and_touches_no_run(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"optim.base_batch_size": 16}))
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    plot = tmp_path / "rates.svg"
    assert main(["schedule", "--find-lr", str(run.directory), "--updates", "24", "-o", str(plot), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lr"] == pytest.approx(document["suggestion"] / 2, rel=0.06)  # the recipe doubles it for its batch
    assert plot.read_text().count("<polyline") == 2
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before
    assert main(["schedule", "--find-lr", str(run.directory), "--updates", "24"]) == 0
    assert capsys.readouterr().out.startswith(
        f"--lr {document['lr']:g}, which is {document['suggestion']:g} for batches of"
    )
    assert main(["schedule", "--find-lr", str(run.directory), "--updates", "5"]) == 2
    assert "--updates is 5; it must be from 20" in capsys.readouterr().err
    assert main(["schedule", "--find-lr", "--num-train", "5"]) == 2
