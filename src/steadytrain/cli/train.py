"""``steady train``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from steadytrain.cli.choices import Choices


def train(
    data: Annotated[str | None, Parameter(help="A .rec, or whatever steady pack takes.")] = None,
    /,
    *,
    choices: Choices = Choices(),  # noqa: B008
) -> int:
    """Train a classifier from scratch; the same command again resumes it.

    Examples
    --------
    steady train photos/
    steady train cifar10-train.rec --val cifar10-val.rec --model resnet20 --epochs 3
    steady train photos/ --procs auto
    """
    from steadytrain.cli.running import begin

    return begin(data, choices, finetune=False)
