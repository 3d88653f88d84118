"""Command lines of MXNet 1.9.1's image-classification tools, read as command lines of ours.

Every flag of a trainer that somebody typed either becomes words of ours or is left out with a reason; none is passed
over silently. Defaults of the old scripts hold (80 epochs, a batch of 128, ...), but not their faults
(:data:`~steadytrain.interop.mxnet.trainers.NO_AUGMENTATION`).

>>> words = "--network resnet --num-layers 50 --data-train a.rec --batch-size 64 --lr 0.1 --lr-step-epochs 30,60"
>>> " ".join(translate("train_imagenet.py", words.split()).commands[0][:4])
'train a.rec --model timm/resnetv2_50'
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steadytrain.errors import InputError, did_you_mean
from steadytrain.interop.mxnet.flags import Translated
from steadytrain.interop.mxnet.tools import ALIASES, TOOLS
from steadytrain.interop.mxnet.trainers import TRAINERS, translate_trainer

PROGRAMS = (*TRAINERS, *TOOLS)
"""Names of the old tools, without ``.py``."""


def translate(program: str, words: Sequence[str], *, workers: int = 1) -> Translated:
    """Read an old command line.

    Args:
        program: such as ``train_imagenet``, with or without ``.py``, with dashes or underscores.
        words: that followed it.
        workers: processes that train together: a batch was that of each.

    Raises:
        InputError: a program, a flag or a value that the old tools did not have either, or that has no counterpart.
    """
    name = Path(program).name.removesuffix(".py").replace("-", "_")
    name = ALIASES.get(name, name)
    if name in TRAINERS:
        return translate_trainer(name, words, workers)
    if name not in PROGRAMS:
        near = did_you_mean(name, PROGRAMS)
        raise InputError(f"no tool of MXNet's is called {program!r}: there are {', '.join(PROGRAMS)}.{near}")
    return TOOLS[name](words)
