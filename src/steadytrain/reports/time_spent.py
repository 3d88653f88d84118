"""Where the time of runs went, in words and in bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steadytrain.monitor.ledger import Ledger
from steadytrain.reports.buckets import SHOWN
from steadytrain.reports.format import NONE, duration, number, rate

LEAST_SECONDS = 0.001
LEAST_SHARE = 0.0005  # of a bar: less than a pixel
LETTERED_SHARE = 0.055  # a share from here on has room for its figure


MEANING = {
    "forward": "predictions and loss",
    "backward": "gradients",
    "optimizer": "new weights from the gradients",
    "update": "of which nothing tells the parts",
    "evaluation": "on the validation images",
    "checkpoint": "checking the weights and saving",
    "host": "between the parts of an update",
    "transfer": "of batches",
    "communication": "",
    "input_storage": "for a batch, while the feed read",
    "input_decode": "for a batch, while the feed decoded",
    "input_augment": "for a batch, while the feed cut and resized",
    "input_batch": "for a batch, while the feed put it together",
    "input_other": "for a batch, of a feed that was not busy or told nothing",
    "epoch_gap": "for the first batch of an epoch, beyond the usual wait",
    "logging": "log lines, and what was done with them",
    "measuring": "what the run spent on measuring itself",
    "warmup": "compiling, and what the first updates took beyond a usual one",
    "startup": "the process, the data, the model, what was saved",
    "lost": "after the checkpoint that the next start went on from",
    "other": "",
}
"""What a bucket's name does not say."""

INKS = ("#ffffff", "#000000")


@dataclass(frozen=True)
class Part:
    """One piece of a bar: ``width`` and ``text`` (empty where there is no room, written in ``ink``) of its share."""

    bucket: str
    label: str
    colour: str
    ink: str
    width: str
    text: str


def bar(seconds: Mapping[str, float]) -> list[Part]:
    """The pieces of a stacked bar, in the order of ``buckets.SHOWN``, without those that are thinner than a pixel."""
    total = sum(seconds.values())
    shares = {bucket: seconds.get(bucket, 0.0) / total for bucket in SHOWN} if total > 0 else {}
    return [
        Part(
            bucket=bucket,
            label=f"{SHOWN[bucket].label}: {duration(seconds[bucket])}, {share_of(share)}",
            colour=SHOWN[bucket].colour,
            ink=ink(SHOWN[bucket].colour),
            width=f"{100 * share:.3f}%",
            text=f"{100 * share:.0f}\N{NARROW NO-BREAK SPACE}%" if share >= LETTERED_SHARE else "",
        )
        for bucket, share in shares.items()
        if share >= LEAST_SHARE
    ]


def ink(colour: str) -> str:
    """Black or white, whichever can better be read on a colour.

    >>> ink("#2f9169"), ink("#8f3f0c")
    ('#000000', '#ffffff')
    """
    return max(INKS, key=lambda one: contrast(one, colour))


def contrast(one: str, other: str) -> float:
    """How well a colour (``#rrggbb``) can be told from another, from 1 to 21 (W3C, WCAG 2.1, contrast ratio)."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rows(ledgers: Sequence[Ledger]) -> list[dict[str, Any]]:
    """A row for each bucket that any run has a share in worth telling: not one that a bar could not show, either.

    Each: ``label``, ``meaning``, ``colour``, and for each run a pair ``cells`` of seconds and share, in words.
    """
    return [
        {
            "label": shown.label,
            "meaning": MEANING[bucket],
            "colour": shown.colour,
            "cells": [_cells(told, bucket) for told in ledgers],
        }
        for bucket, shown in SHOWN.items()
        if any(told.share(bucket) >= LEAST_SHARE for told in ledgers)
    ]


def _cells(told: Ledger, bucket: str) -> tuple[str, str]:
    seconds = told.seconds[bucket]
    return (duration(seconds), share_of(told.share(bucket))) if seconds >= LEAST_SECONDS else (NONE, NONE)


def sentence(told: Ledger) -> str:
    """A run's ledger for those who cannot see the bar: the largest shares first."""
    largest = sorted(told.shares.items(), key=lambda one: -one[1])[:5]
    return ", ".join(f"{SHOWN[bucket].label} {share_of(share)}" for bucket, share in largest if share >= LEAST_SHARE)


def to_words(told: Ledger) -> str:
    """Wall time, pauses, and both rates, in a line."""
    away = f", and {duration(told.away_seconds)} between its starts" if told.away_seconds >= 0.05 else ""
    return (
        f"{duration(told.wall_seconds)} of wall time{away}; {rate(told.images_per_second)} images/s overall,"
        f" {rate(told.steady_images_per_second)} in updates alone"
    )


def to_dict(told: Ledger) -> dict[str, Any]:
    """A ledger for JSON: every bucket, its share, and both rates."""
    return {
        "wall_seconds": told.wall_seconds,
        "away_seconds": told.away_seconds,
        "steps": told.steps,
        "images": told.images,
        "images_per_second": told.images_per_second,
        "steady_images_per_second": told.steady_images_per_second,
        "seconds": dict(told.seconds),
        "shares": told.shares,
    }


def share_of(share: float) -> str:
    """A share in percent with one decimal; what is there but rounds to nothing is told as such.

    >>> share_of(0.1234), share_of(0.0002), share_of(0.0)
    ('12.3 %', '< 0.1 %', '0.0 %')
    """
    return "< 0.1 %" if 0 < share < LEAST_SHARE else number(100 * share, 1, " %")
