"""The figures by which the best weights are chosen: what each is called, which way is better, and what it needs."""

from __future__ import annotations

import math

from steadytrain.format import percent

USUAL = "top1-loss"
"""The figure of a new run, unless images may have several labels; ``benchmarks/results/best_weights.json`` says why."""
FIGURES = {USUAL: "top-1", "top1": "top-1", "top5": "top-5", "loss": "loss"}
FIGURES |= {"macro-recall": "macro recall", "f1": "macro F1", "auc": "AUC", "map": "mAP"}
"""Their names in a recipe -> in words. Means over classes, or labels, weigh all of them the same."""
SIGN = {**dict.fromkeys(FIGURES, 1), "loss": -1}  # times it, the highest is the best
NEED_OUTPUTS = ("auc", "map")  # those for all images at once; the others are counted


def figure_value(figure: str, value: float) -> str:
    """Return a figure's value as a user reads it: shares in percent, the loss and the AUC as numbers.

    >>> figure_value("top1", 0.85), figure_value("f1", 0.3254), figure_value("auc", 0.9321)
    ('85.0 %', '32.5 %', '0.9321')
    """
    return f"{value:.4f}" if figure in ("loss", "auc") else percent(value, 1)


def figure_words(figure: str | None, value: float | None, mean_ap: float | None) -> str:
    """Return a figure and its value, such as "AUC 0.9321"; empty for those that each evaluation shows anyway."""
    shown = (USUAL, "top1", "top5", "loss", *(["map"] if mean_ap is not None else []))
    return (
        ""
        if figure not in FIGURES or figure in shown or value is None
        else f"{FIGURES[figure]} {figure_value(figure, value)}"
    )


def is_better(figure: str, now: tuple[float, float], best: tuple[float, float], n: int) -> bool:
    """Return whether an evaluation of ``n`` images replaces the best: of each its figure times the sign, and its loss.

    By ``top1-loss`` the lower loss decides within a standard error of top-1. What is no number is never better.
    """
    (value, loss), (best_value, best_loss) = now, best
    if figure != USUAL or not math.isfinite(loss + best_value):
        return math.isfinite(loss) and value > best_value
    margin = (best_value * (1 - best_value) / n) ** 0.5
    return value > best_value + margin or (value >= best_value - margin and loss < best_loss)
