"""Scores of verdicts: pure functions of what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

BARS = {"named": 0.95, "share": 0.03, "saving": 0.10}
"""Of the single faults named first; what a share and a predicted saving may be off by."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One round of one fault: seconds of a sound run, of the faulty one, of the mended one, and what was named.

    Args:
        causes: of the verdict on the faulty run, as (name, share, saves), what costs most first.
        counted: seconds that were injected where nothing can hide them.
        mended: how the third run came about: ``advice`` or ``removed``.
        others: cores that were taken from the judged run by what is none of the benchmark.
    """

    clean: float
    faulty: float
    remedied: float | None
    counted: float
    causes: tuple[tuple[str, float, float], ...]
    mended: str = ""
    others: float = 0.0


def truth(trials: Sequence[Trial], how: str) -> float:
    """Return the share of the faulty run that the fault takes: of the fastest runs, since disturbances only add.

    >>> one = Trial(clean=6.0, faulty=9.0, remedied=None, counted=1.0, causes=())
    >>> other = Trial(clean=7.0, faulty=8.0, remedied=None, counted=1.0, causes=())
    >>> truth([one, other], "wall"), truth([other], "counted")
    (0.25, 0.125)
    """
    if how == "counted":
        return median(trial.counted / trial.faulty for trial in trials)
    return 1 - min(trial.clean for trial in trials) / min(trial.faulty for trial in trials)


def spread(trials: Sequence[Trial], how: str) -> float:
    """Return the uncertainty of the truth: half of what it differs by between the rounds, each taken alone.

    >>> one = Trial(clean=6.0, faulty=10.0, remedied=None, counted=1.0, causes=())
    >>> other = Trial(clean=6.0, faulty=8.0, remedied=None, counted=1.0, causes=())
    >>> f"{spread([one, other], 'wall'):.3f}"
    '0.075'
    """
    alone = [truth([trial], how) for trial in trials]
    return (max(alone) - min(alone)) / 2


def saving(trials: Sequence[Trial]) -> float | None:
    """Return the share of the faulty run that the change saves, of the fastest runs."""
    mended = [trial.remedied for trial in trials if trial.remedied is not None]
    return 1 - min(mended) / min(trial.faulty for trial in trials) if mended else None


def named(trials: Iterable[Trial], expected: Sequence[str]) -> list[tuple[float, float]]:
    """Share and saving of the expected cause in each verdict that has one; of several, of the best.

    >>> one = Trial(clean=6, faulty=8, remedied=None, counted=0, causes=(("decode", 0.5, 0.4), ("threads", 0.3, 0.2)))
    >>> named([one], ("threads", "decode")), named([one], ("storage",))
    ([(0.3, 0.2)], [])
    """
    causes = []
    for trial in trials:
        of_cause = {name: (share, saves) for name, share, saves in reversed(trial.causes)}
        causes += [of_cause[name] for name in expected if name in of_cause][:1]
    return causes


def single(trials: Sequence[Trial], expected: Sequence[str], how: str) -> dict[str, Any]:
    """Score one fault, or a sound run, whose verdict should be ``nothing``."""
    causes = named(trials, expected)
    real, saved = truth(trials, how), saving(trials)
    share = median(part for part, _ in causes) if causes else None
    saves = median(part for _, part in causes) if causes else None
    return {
        "expected": list(expected),
        "named_first": dict(Counter(place(trial.causes, 0) for trial in trials)),
        "named_second": dict(Counter(place(trial.causes, 1) for trial in trials)),
        "right_first": sum(place(trial.causes, 0) in expected for trial in trials),
        "trials": len(trials),
        "share_true": real,
        "share_true_spread": spread(trials, how),
        "share_told": share,
        "share_off": None if share is None else share - real,
        "saving_measured": saved,
        "saving_predicted": saves,
        "saving_off": None if not saves or saved is None else saves - saved,
        "mended_by": dict(Counter(trial.mended for trial in trials if trial.mended)),
    }


def pair(trials: Sequence[Trial], expected: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Score two faults at a time: each should be among the first two causes."""
    firsts = [{place(trial.causes, 0), place(trial.causes, 1)} for trial in trials]
    return {
        "expected": [list(names) for names in expected],
        "named_first": dict(Counter(place(trial.causes, 0) for trial in trials)),
        "named_second": dict(Counter(place(trial.causes, 1) for trial in trials)),
        "right_two": sum(all(first & set(names) for names in expected) for first in firsts),
        "trials": len(trials),
        "share_true": truth(trials, "wall"),
        "shares_told": [
            median(s for s, _ in causes) if (causes := named(trials, names)) else None for names in expected
        ],
    }


def summary(singles: Mapping[str, Mapping[str, Any]], pairs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures that the bars are about."""
    trials, right = _sum(singles, "trials"), _sum(singles, "right_first")
    pair_trials, pair_right = _sum(pairs, "trials"), _sum(pairs, "right_two")
    shares = [abs(row["share_off"]) for row in singles.values() if row["share_off"] is not None]
    noise = [row["share_true_spread"] for row in singles.values()]
    savings = [abs(row["saving_off"]) for row in singles.values() if row["saving_off"] is not None]
    return {
        "singles": len(singles),
        "right_first": right / trials if trials else None,
        "pairs": len(pairs),
        "right_in_top_two": pair_right / pair_trials if pair_trials else None,
        "shares_within_bar": _within(shares, BARS["share"]),
        "median_truth_spread": median(noise) if noise else None,
        "largest_share_off": max(shares, default=None),
        "savings_within_bar": _within(savings, BARS["saving"]),
        "largest_saving_off": max(savings, default=None),
        "bars": BARS,
    }


def place(causes: Sequence[tuple[str, float, float]], at: int) -> str:
    """Return the name of the cause at a place; a dash where there is none."""
    return causes[at][0] if at < len(causes) else "-"


def _sum(rows: Mapping[str, Mapping[str, Any]], key: str) -> int:
    return sum(int(row[key]) for row in rows.values())


def _within(values: Sequence[float], bar: float) -> str:
    return f"{sum(value <= bar for value in values)} of {len(values)}"
