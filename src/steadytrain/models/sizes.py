"""How many values each of a network's parameters has: what its gradients weigh on their way between machines."""

from __future__ import annotations

import torch

from steadytrain.config import Model
from steadytrain.errors import ModelError
from steadytrain.models.build import Built, build


def parameter_sizes(model: Model, *, num_classes: int = 1000, allow_import: bool = False) -> tuple[str, list[int]]:
    """The network's name in full, and the number of values of each trained parameter, in the network's own order.

    It is built without values where it can be, so this takes little memory and draws nothing.

    Args:
        model: name and options.
        num_classes: outputs.
        allow_import: import a ``pkg.mod:factory``; only if the user named it on this command line.

    Raises:
        ModelError: no such model or option.
    """
    built = _built(model, num_classes, allow_import)
    return built.name, [one.numel() for one in built.module.parameters() if one.requires_grad]


def _built(model: Model, num_classes: int, allow_import: bool) -> Built:
    state = torch.get_rng_state()
    try:
        with torch.device("meta"):
            return build(model, num_classes=num_classes, channels=3, size=None, allow_import=allow_import)
    except ModelError:  # it reads values as it is built
        return build(model, num_classes=num_classes, channels=3, size=None, allow_import=allow_import)
    finally:
        torch.set_rng_state(state)
