"""The ledger's buckets as people see them: a name and a colour for each, useful work first.

The colours are of one family for what belongs together (green: the update itself, orange: waiting for images, blue:
what the run does beside it), and can be told from a white and from a near-black page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """How a bucket of ``watch.ledger.BUCKETS`` is called and drawn."""

    label: str
    colour: str


SHOWN: Mapping[str, Bucket] = {
    "forward": Bucket("forward pass", "#2f9169"),
    "backward": Bucket("backward pass", "#4fae86"),
    "optimizer": Bucket("optimizer", "#86c9a8"),
    "update": Bucket("updates", "#3d9f78"),
    "evaluation": Bucket("evaluation", "#3d7dd6"),
    "checkpoint": Bucket("checkpoints", "#86aee6"),
    "host": Bucket("host: Python, launches", "#b5559b"),
    "transfer": Bucket("transfer to the device", "#8a77d8"),
    "communication": Bucket("waiting for other ranks", "#2f93a8"),
    "input_storage": Bucket("waiting: storage", "#b5431c"),
    "input_decode": Bucket("waiting: decoding", "#d4691e"),
    "input_augment": Bucket("waiting: augmentation", "#e58f4a"),
    "input_batch": Bucket("waiting: batching", "#efb47f"),
    "input_other": Bucket("waiting: other", "#c79a78"),
    "epoch_gap": Bucket("epoch gap", "#e0b23c"),
    "logging": Bucket("logging", "#a8942a"),
    "measuring": Bucket("measuring", "#c9bc6c"),
    "warmup": Bucket("warm-up", "#8d96a3"),
    "startup": Bucket("start-up", "#6d7683"),
    "lost": Bucket("lost to restarts", "#cf4646"),
    "other": Bucket("other", "#b9bfc7"),
}
"""In the order in which they are stacked."""


def largest(seconds: Mapping[str, float]) -> list[str]:
    """The buckets that hold something, the largest first.

    >>> largest({"forward": 2.0, "startup": 0.0, "evaluation": 3.0})
    ['evaluation', 'forward']
    """
    return sorted((name for name in SHOWN if seconds.get(name, 0.0) > 0), key=lambda name: -seconds[name])
