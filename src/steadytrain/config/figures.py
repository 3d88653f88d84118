"""The figures by which the best weights are chosen: what each is called, which way is better, and what it needs."""

from __future__ import annotations

import math
from typing import NamedTuple

USUAL = "top1-loss"
"""The figure of a new run, unless images may have several labels; ``benchmarks/results/best_weights.json`` says why."""


class Figure(NamedTuple):
    """A figure's label; its ``sign``, by which the highest is the best; whether it needs the outputs for all images."""

    label: str
    sign: int = 1
    needs_outputs: bool = False


FIGURES = {
    USUAL: Figure("top-1"),
    "top1": Figure("top-1"),
    "top5": Figure("top-5"),
    "loss": Figure("loss", sign=-1),
    "macro-recall": Figure("macro recall"),
    "f1": Figure("macro F1"),
    "auc": Figure("AUC", needs_outputs=True),
    "map": Figure("mAP", needs_outputs=True),
}
"""Figures by their names in a recipe. Means over classes, or labels, weigh all of them the same."""


def figure_name(chosen: str | None, *, is_multi_label: bool) -> str:
    """Return the figure by which a new run chooses its best weights; of several labels for an image, top-1 is mAP.

    >>> figure_name(None, is_multi_label=False), figure_name("top1", is_multi_label=True)
    ('top1-loss', 'map')
    """
    name = chosen or USUAL
    return "map" if is_multi_label and name in (USUAL, "top1") else name


def is_better(figure: str, now: tuple[float, float], best: tuple[float, float], n: int) -> bool:
    """Return whether an evaluation of ``n`` images replaces the best: of each its figure times the sign, and its loss.

    By ``top1-loss`` the lower loss decides within a standard error of top-1. What is no number is never better.

    >>> now, best = (0.80, 0.5), (0.82, 0.6)
    >>> [is_better(name, now, best, n) for name, n in (("top1-loss", 60), ("top1-loss", 6000), ("top1", 60))]
    [True, False, False]
    """
    (value, loss), (best_value, best_loss) = now, best
    if not math.isfinite(loss):
        return False
    if figure != USUAL or not math.isfinite(best_value):
        return value > best_value
    margin = (best_value * (1 - best_value) / n) ** 0.5
    return value > best_value + margin or (value >= best_value - margin and loss < best_loss)
