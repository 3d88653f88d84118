"""The time of runs by bucket, in words, bars and stacked charts: each bucket of the ledger has a name and a colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadytrain.format import NONE, duration, percent, rate
from steadytrain.monitor import Ledger, Slice

LEAST_SECONDS = 0.001
LEAST_SHARE = 0.0005  # share of a bar: less than a pixel
LETTERED_SHARE = 0.055  # a share from here on has room for its figure


@dataclass(frozen=True)
class Bucket:
    """The label and colour of a bucket of ``ledger.BUCKETS``, and what its name does not say; ``ink``: of its text."""

    label: str
    colour: str
    meaning: str = ""
    ink: str = "#000000"


# The colours are of one family for what belongs together (green: the update itself, orange: waiting for images, blue:
# what the run does beside it), and stand out from a white and from a near-black page.
BUCKETS_SHOWN: Mapping[str, Bucket] = {
    "forward": Bucket("forward pass", "#2f9169", "predictions and loss"),
    "backward": Bucket("backward pass", "#4fae86", "gradients"),
    "optimizer": Bucket("optimizer", "#86c9a8", "new weights from the gradients"),
    "update": Bucket("updates", "#3d9f78", "of which nothing tells the parts"),
    "evaluation": Bucket("evaluation", "#3d7dd6", "on the validation and test images"),
    "checkpoint": Bucket("checkpoints", "#86aee6", "checking the weights and saving"),
    "host": Bucket("host: Python, launches", "#b5559b", "between the parts of an update"),
    "transfer": Bucket("transfer to the device", "#8a77d8", "of batches"),
    "communication": Bucket("waiting for other ranks", "#2f93a8"),
    "input_storage": Bucket("waiting: storage", "#b5431c", "for a batch, while the data loader read", "#ffffff"),
    "input_decode": Bucket("waiting: decoding", "#d4691e", "for a batch, while the data loader decoded"),
    "input_augment": Bucket("waiting: augmentation", "#e58f4a", "for a batch, while the data loader cut and resized"),
    "input_batch": Bucket("waiting: batching", "#efb47f", "for a batch, while the data loader put it together"),
    "input_other": Bucket("waiting: other", "#c79a78", "for a batch, while the loader was not busy"),
    "epoch_gap": Bucket("epoch gap", "#e0b23c", "for the first batch of an epoch, beyond the usual wait"),
    "logging": Bucket("logging", "#a8942a", "log lines, and what was done with them"),
    "measuring": Bucket("measuring", "#c9bc6c", "what the run spent on measuring itself"),
    "warmup": Bucket("warm-up", "#8d96a3", "compiling, and what the first updates took beyond a usual one"),
    "probe": Bucket("probe", "#5b8c3e", "features of the frozen network, and the classifier's fit to them"),
    "startup": Bucket("start-up", "#6d7683", "the process, the data, the model, what was saved", "#ffffff"),
    "lost": Bucket("lost to restarts", "#cf4646", "after the checkpoint that the next start resumed from"),
    "other": Bucket("other", "#b9bfc7"),
}
"""Buckets in the order in which they are stacked: useful work first."""


def largest_buckets(ledger: Ledger) -> list[str]:
    """Return the buckets that are large enough to be seen, the largest first."""
    shown = (name for name in BUCKETS_SHOWN if ledger.share(name) >= LEAST_SHARE)
    return sorted(shown, key=lambda name: -ledger.seconds[name])


@dataclass(frozen=True)
class TimePart:
    """One piece of a bar: ``width`` and ``text`` (empty where there is no room, written in ``ink``) of its share."""

    bucket: str
    label: str
    colour: str
    ink: str
    width: str
    text: str


def bar(seconds: Mapping[str, float]) -> list[TimePart]:
    """Return the pieces of a stacked bar, in the order of ``BUCKETS_SHOWN``, without those thinner than a pixel."""
    total = sum(seconds.values())
    shares = {name: seconds.get(name, 0.0) / total for name in BUCKETS_SHOWN} if total > 0 else {}
    return [
        TimePart(
            bucket=name,
            label=f"{BUCKETS_SHOWN[name].label}: {duration(seconds[name])}, {share_of(share)}",
            colour=BUCKETS_SHOWN[name].colour,
            ink=BUCKETS_SHOWN[name].ink,
            width=f"{100 * share:.3f}%",
            text=f"{100 * share:.0f}\N{NARROW NO-BREAK SPACE}%" if share >= LETTERED_SHARE else "",
        )
        for name, share in shares.items()
        if share >= LEAST_SHARE
    ]


def rows(ledgers: Sequence[Ledger]) -> list[dict[str, Any]]:
    """Return a row for each bucket that is large enough in any run to be seen in a bar.

    Each: ``label``, ``meaning``, ``colour``, and for each run a pair ``cells`` of seconds and share, in words.
    """

    def cells(ledger: Ledger, name: str) -> tuple[str, str]:
        seconds = ledger.seconds[name]
        return (duration(seconds), share_of(ledger.share(name))) if seconds >= LEAST_SECONDS else (NONE, NONE)

    return [
        {**vars(bucket), "cells": [cells(ledger, name) for ledger in ledgers]}
        for name, bucket in BUCKETS_SHOWN.items()
        if any(ledger.share(name) >= LEAST_SHARE for ledger in ledgers)
    ]


def sentence(ledger: Ledger) -> str:
    """Describe a run's ledger as text beside the bar: the largest shares first."""
    names = largest_buckets(ledger)[:5]
    return ", ".join(f"{BUCKETS_SHOWN[name].label} {share_of(ledger.share(name))}" for name in names)


def rates_text(ledger: Ledger) -> str:
    """Format wall time, pauses, and both rates in a line."""
    away = f", and {duration(ledger.away_seconds)} between its starts" if ledger.away_seconds >= 0.05 else ""
    words = f"{duration(ledger.wall_seconds)} of wall time{away}"
    if not ledger.images_per_second:  # a probe makes no updates
        return words
    steady = rate(ledger.steady_images_per_second)
    return f"{words}; {rate(ledger.images_per_second)} images/s overall, {steady} in updates alone"


def to_dict(ledger: Ledger) -> dict[str, Any]:
    """Return a ledger for JSON: every bucket, its share, and both rates."""
    return {
        "wall_seconds": ledger.wall_seconds,
        "away_seconds": ledger.away_seconds,
        "steps": ledger.steps,
        "images": ledger.images,
        "images_per_second": ledger.images_per_second,
        "steady_images_per_second": ledger.steady_images_per_second,
        "seconds": dict(ledger.seconds),
        "shares": ledger.shares,
    }


def share_of(share: float) -> str:
    """Format a share in percent with one decimal; ``< 0.1 %`` if it rounds to nothing.

    >>> share_of(0.1234), share_of(0.0002), share_of(0.0)
    ('12.3 %', '< 0.1 %', '0.0 %')
    """
    return "< 0.1 %" if 0 < share < LEAST_SHARE else percent(share, 1)


def stacked(slices: Sequence[Slice]) -> dict[str, Any]:
    """Return the shares of the time of each slice, for the buckets that hold anything.

    Returns:
        ``edges``: where the slices begin and the last one ends, in seconds of the run (one more than slices);
        ``buckets``: each ``name`` and its ``shares`` (of each slice, 0 to 1), in the order of ``BUCKETS_SHOWN``.
    """
    edges = [0.0]
    for piece in slices:
        edges.append(edges[-1] + piece.ended - piece.began)
    lengths = [sum(piece.seconds.values()) or 1.0 for piece in slices]
    buckets = []
    for name in BUCKETS_SHOWN:
        seconds = [piece.seconds.get(name, 0.0) for piece in slices]
        if any(seconds):
            shares = [round(spent / length, 5) for spent, length in zip(seconds, lengths, strict=True)]
            buckets.append({"name": name, "shares": shares})
    return {"edges": [round(edge, 3) for edge in edges], "buckets": buckets}
