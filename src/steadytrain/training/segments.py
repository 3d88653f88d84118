"""A GPU's memory in segments that grow, so that what is free between tensors is found again.

torch takes memory from the driver in segments. As it comes, a segment keeps its size, and a tensor that fits into none
of the gaps gets another segment, however much is free in all of them together: batches of training and of evaluation,
or a network whose parts are computed again, can so end for want of memory that is there. A segment that grows gets
more memory at its end, at addresses kept for it; torch calls it expandable.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from steadytrain.config import Recipe

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""By which a user tells torch how to hand out memory; whoever sets one has decided."""
RECORDING = ("reduce-overhead", "max-autotune")
"""Modes of compiled code that record graphs."""
_TRIED_BYTES = 2 << 20  # more than torch takes from a segment that it shares between small tensors


def settle(recipe: Recipe, device: torch.device) -> str:
    """Let segments on this GPU grow from here on, and say how memory is handed out.

    Not where the user has said something to torch (:data:`VARIABLES`), where the driver cannot, and where updates are
    recorded as graphs: a graph's memory has to stay where it is, and torch has had faults in both together.

    Args:
        recipe: of the run; whether it records graphs.
        device: a GPU, before the run puts anything there.

    Returns:
        ``growing``, ``fixed``, or the variable that decides.
    """
    asked = [name for name in VARIABLES if os.environ.get(name)]
    if asked:
        return asked[0]
    if sys.platform != "linux" or torch.version.cuda is None:
        return "fixed"
    is_recorded = recipe.parallel.graph or recipe.precision.compile in RECORDING
    if not is_recorded and _grow(True) and _is_had(device):
        return "growing"
    _grow(False)  # another run in this process may have let them
    return "fixed"


def _is_had(device: torch.device) -> bool:
    """Whether memory can be had; some virtual GPUs map none to addresses that are kept for it."""
    try:
        torch.empty(_TRIED_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError:
        return False
    return True


def _grow(grows: bool) -> bool:
    """Tell torch; whether this torch can be told, which it can by no public name while it runs."""
    tell: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if tell is None:
        return False
    tell(f"expandable_segments:{grows}")
    return True
