"""Train the cases of a sweep: all of them, the best of them for longer, or those that a search chooses.

What is decided follows from the logs of the runs: a sweep that was interrupted continues where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from steadytrain.config import Recipe
from steadytrain.errors import InputError, RunError
from steadytrain.format import Say, count
from steadytrain.monitor import read_history
from steadytrain.tuning.sweep import Case, Point, Range, Space, SweepSpec, Values, is_diverged, points
from steadytrain.tuning.sweep_trainers import PendingSweep, Trainer

if TYPE_CHECKING:
    from types import ModuleType

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

FACTOR = 3
"""Successive halving: after each rung the best 1 / FACTOR of the cases go on, for FACTOR times as long."""
LEAST_COMPLETE = 4
"""Trials of a search that have to be complete before others are compared with their median and stopped."""
NONE_YET = -1e6
"""The :attr:`~.Evaluated.goodness` of a case without an evaluation that counts: below any other, and finite."""
SEARCH_FILE = "search.journal"
"""File in the folder of the sweep: the trials of a search."""


def score_at(case: Case, rung: float) -> float:
    """Return the mean over seeds of the first evaluation from epoch ``rung`` on, else the last; or :data:`NONE_YET`."""
    scores = []
    for run in case.runs:
        try:
            evaluated = read_history(run, all_ranks=False).evaluated
        except RunError:
            return NONE_YET
        later = [event for event in evaluated if event.epoch >= rung - 1e-9]
        if not evaluated or (not later and is_diverged(run)):
            return NONE_YET
        goodness = (later or evaluated[-1:])[0].goodness
        scores.append(goodness if math.isfinite(goodness) else NONE_YET)
    return fmean(scores)


def best_score(case: Case) -> float:
    """Return the mean over seeds of the best evaluation; a run without any counts as :data:`NONE_YET`."""
    best = [run.progress().best for run in case.runs]
    return fmean(NONE_YET if event is None else event.goodness for event in best)


def rungs(epochs: float, period: float, cases: int) -> list[float]:
    """Return the epochs at which the worst cases are stopped: multiples of the period between two evaluations.

    Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization": of n cases,
    the n / :data:`FACTOR` best go on, for as many times as long.

    >>> rungs(27, 1, 9), rungs(10, 1, 5), rungs(10, 1, 2), rungs(2, 1, 27)
    ([3.0, 9.0], [3.0], [], [1.0])
    """
    levels = 0
    while FACTOR ** (levels + 1) <= cases:
        levels += 1
    levels_up = (max(1, math.floor(epochs / FACTOR**level / period + 1e-9)) * period for level in range(levels, 0, -1))
    return [float(rung) for rung in dict.fromkeys(levels_up) if rung < epochs - 1e-9]


def _rungs_of(recipes: Sequence[Recipe], cases: int) -> list[float]:
    """Return the rungs of recipes. Raises InputError if their lengths differ, or no case could be stopped."""
    epochs = {recipe.budget.epochs for recipe in recipes}
    if len(epochs) > 1 or None in epochs:
        raise InputError("--halving compares cases at the same epoch: give all of them the same --epochs, and no steps")
    whole, period = recipes[0].budget.epochs or 0.0, max(recipe.every.evaluate_epochs for recipe in recipes)
    levels = rungs(whole, period, cases)
    if not levels:
        raise InputError(
            f"--halving has nothing to stop: {count(cases, 'case')} of {whole:g} epochs, evaluated every"
            f" {period:g}; give {FACTOR} cases or more, and --set every.evaluate_epochs={whole / FACTOR:.3g} or less"
        )
    return levels


@dataclass(frozen=True)
class SweepOutcome:
    """Outcome of a sweep: its cases, the names of those that were stopped early -> the epoch, and the points that
    have no valid recipe, each with the reason."""

    cases: Sequence[Case]
    stopped: Mapping[str, float] = field(default_factory=dict)
    failed: Sequence[tuple[Point, str]] = ()


def run_sweep(
    spec: SweepSpec,
    space: Space,
    cases: Sequence[Case],
    trainer: Trainer,
    folder: Path,
    *,
    seed: int,
    create: Callable[[Sequence[Point]], list[Case]],
    say: Say,
) -> SweepOutcome:
    """Train the cases, or those that a search chooses; what an array has not trained yet is left as it is.

    ``seed`` and ``create``: as for :func:`search`. Raises InterruptedSweep, and whatever halving and searching do.
    """
    if spec.search is not None:
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / SEARCH_FILE
        return search(journal, space.over, spec.search, trainer, seed=seed, create=create, prunes=spec.halving, say=say)
    method = ", by successive halving" if spec.halving else ""
    say(f"{count(len(cases), 'case')}, {count(len(cases) * spec.seeds, 'run')}{method}")
    stopped: Mapping[str, float] = {}
    try:
        if spec.halving:
            stopped = halve(cases, trainer, say)
        else:
            trainer.train([run for case in cases for run in case.runs])
    except PendingSweep as pending:
        say(str(pending))
    return SweepOutcome(cases, stopped)


def halve(cases: Sequence[Case], trainer: Trainer, say: Say) -> dict[str, float]:
    """Train all cases to the first rung, the best third of them to the next, and the last ones to their ends.

    Returns:
        Names of the cases that were stopped -> the epoch.

    Raises:
        InputError: the cases are not of one length, there is no evaluation before the end, or there are too few.
    """
    levels = _rungs_of([case.runs[0].recipe for case in cases], len(cases))

    def keep(rung: float, alive: Sequence[Case]) -> list[Case]:
        scores = {case.point.name: score_at(case, rung) for case in alive}
        if max(scores.values()) <= NONE_YET:
            say(f"epoch {rung:g}: no case has an evaluation: all have failed")
            return []
        number = max(1, round(len(alive) / FACTOR))
        kept = sorted(alive, key=lambda case: scores[case.point.name], reverse=True)[:number]
        say(f"epoch {rung:g}: {count(len(kept), 'case goes', 'cases go')} on, the best: {kept[0].point.name}")
        return kept

    return _train_in_rungs(cases, levels, trainer, keep)


def import_optuna() -> ModuleType:
    """Import Optuna, which searches. Raises InputError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise InputError("--search needs Optuna, which is missing: pip install 'steadytrain[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _train_in_rungs(
    cases: Sequence[Case],
    levels: Sequence[float],
    trainer: Trainer,
    keep: Callable[[float, Sequence[Case]], Sequence[Case]],
) -> dict[str, float]:
    """Train cases up to each rung in turn, go on with those that ``keep`` returns, and train the last to their ends.

    Returns:
        Names of the cases that were stopped -> the epoch.
    """
    alive, stopped = list(cases), dict[str, float]()
    for rung in levels:
        trainer.train([run for case in alive for run in case.runs], until=rung)
        kept = list(keep(rung, alive))
        stopped |= {case.point.name: rung for case in alive if case not in kept}
        alive = kept
    trainer.train([run for case in alive for run in case.runs])
    return stopped


def search(
    journal: Path,
    over: Mapping[str, Values],
    number: int,
    trainer: Trainer,
    *,
    seed: int,
    create: Callable[[Sequence[Point]], list[Case]],
    prunes: bool = False,
    say: Say = lambda message: None,
) -> SweepOutcome:
    """Try ``number`` cases, each chosen by the results of those before (Optuna's TPE sampler).

    Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization". Each trial's numbers are drawn by its own
    number, so an interrupted search goes on as if it had not been. A trial whose recipe cannot be made has failed, and
    counts. A run that fails gives its trial its best, :data:`NONE_YET` without any, and the sampler keeps
    that; the run itself is trained again when the search is repeated.

    Args:
        journal: the file of the trials; created if missing.
        over: a key of the recipe -> its values or its range.
        number: of trials, those of the journal included.
        trainer: of their runs; as many trials as it trains at once are chosen before the result of any of them.
        create: creates the cases of some points; raises InputError if a recipe is invalid.
        prunes: stop a trial that at a ninth or a third of its epochs is worse than the median of the complete ones.

    Raises:
        InputError: Optuna is not installed, or the journal is of a search over other values.
    """
    optuna = import_optuna()
    study = _open_study(optuna, journal, over)
    states = optuna.trial.TrialState
    complete = study.get_trials(deepcopy=False, states=(states.COMPLETE,))
    trainer.train([run for case in create([_point_of(trial, over) for trial in complete]) for run in case.runs])
    while running := _choose_trials(optuna, study, over, number, trainer.at_once, seed):
        cases: dict[str, Case] = {}
        numbers: dict[str, int] = {}
        for trial in running:
            point = _point_of(trial, over)
            try:
                [cases[point.name]] = create([point])
            except RunError:  # of the folder, whatever the recipe
                raise
            except InputError as error:
                optuna.trial.Trial(study, trial._trial_id).set_user_attr("why", str(error))
                study.tell(trial.number, state=states.FAIL)
                say(f"failed: {error}")
            numbers[point.name] = trial.number
        if not cases:
            continue

        def keep(rung: float, alive: Sequence[Case], numbers: Mapping[str, int] = numbers) -> list[Case]:
            return [case for case in alive if not _is_pruned(optuna, study, numbers[case.point.name], case, rung)]

        levels = _rungs_of([case.runs[0].recipe for case in cases.values()], FACTOR**2) if prunes else []
        stopped = _train_in_rungs(list(cases.values()), levels, trainer, keep)
        for name in cases.keys() - stopped.keys():
            study.tell(numbers[name], best_score(cases[name]))
        trials = study.get_trials(deepcopy=False)
        is_known = any(trial.state == states.COMPLETE for trial in trials)
        best = f"; the best so far: {_point_of(study.best_trial, over).name}" if is_known else ""
        say(f"{len(trials)} of {number} trials{best}")
    tried = [(trial, _point_of(trial, over)) for trial in study.get_trials(deepcopy=False)[:number]]
    return SweepOutcome(
        create([point for trial, point in tried if trial.state != states.FAIL]),
        {point.name: (trial.last_step or 0) / 1000 for trial, point in tried if trial.state == states.PRUNED},
        [(point, str(trial.user_attrs.get("why", ""))) for trial, point in tried if trial.state == states.FAIL],
    )


def _open_study(optuna: ModuleType, journal: Path, over: Mapping[str, Values]) -> Study:
    """Open the study of a journal, or begin it. Raises InputError if it is of a search over other values."""
    storages = optuna.storages.journal
    study: Study = optuna.create_study(
        storage=storages.JournalStorage(storages.JournalFileBackend(str(journal))),
        study_name="sweep",
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=LEAST_COMPLETE),
        load_if_exists=True,
    )
    space = {
        key: [values.low, values.high, values.is_log] if isinstance(values, Range) else {"values": values}
        for key, values in over.items()
    }
    journal_space = study.user_attrs.get("space", space)
    if journal_space != space:
        raise InputError(
            f"{journal} is of a search over other values ({json.dumps(journal_space)}): repeat that command, or name"
            " another folder with --run"
        )
    study.set_user_attr("space", space)
    return study


def _choose_trials(
    optuna: ModuleType, study: Study, over: Mapping[str, Values], number: int, at_once: int, seed: int
) -> list[FrozenTrial]:
    """Return the trials to train now: those that an earlier command has left, else the next; none at the end."""
    distributions = {key: _distribution(values) for key, values in over.items()}
    while True:
        trials = study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state == optuna.trial.TrialState.RUNNING]
        if len(trials) >= number or (running and len(trials) % at_once == 0):
            return running
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(trials))
        study.ask(dict(distributions))


def _is_pruned(optuna: ModuleType, study: Study, number: int, case: Case, rung: float) -> bool:
    """Report the score of a trial at a rung, and stop it if it is worse there than the median."""
    trial = optuna.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
    trial.report(score_at(case, rung), step=round(1000 * rung))  # Optuna counts steps in integers
    is_worse: bool = trial.should_prune()
    if is_worse:
        study.tell(number, state=optuna.trial.TrialState.PRUNED)
    return is_worse


def _point_of(trial: FrozenTrial, over: Mapping[str, Values]) -> Point:
    values: dict[str, Any] = {
        key: json.loads(value) if isinstance(over.get(key), list) else value for key, value in trial.params.items()
    }
    for key in over.keys() | values.keys():  # the journal may be a stranger's: what it says becomes flags of a command
        value, known = values.get(key), over.get(key, [])
        is_in_range = isinstance(known, Range) and isinstance(value, int | float) and known.low <= value <= known.high
        if not is_in_range and (isinstance(known, Range) or value not in known):
            raise RunError(
                f"the journal of the search has {key}={value!r} in trial {trial.number}, which is none of its values:"
                " it was edited, or is of another search; name another folder with --run"
            )
    [point] = points({key: [values[key]] for key in over})
    return Point(f"{trial.number:03d},{point.name}", values)


def _distribution(values: Values) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution([json.dumps(value) for value in values])
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), log=values.is_log)
    return FloatDistribution(values.low, values.high, log=values.is_log)
