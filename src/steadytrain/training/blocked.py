"""A run's network in blocks of channels, tried on drawn images before the first update."""

from __future__ import annotations

import math

import torch

from steadytrain.errors import RecipeError, first_line
from steadytrain.models import Input
from steadytrain.precision.blocked import refused, use_blocks
from steadytrain.training.beside import put_back, undisturbed
from steadytrain.training.build import image_shape
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.transfer import Loaded, drawn

TRIED = 2
"""Images of the passes that are compared."""
CLOSE = 0.01
"""Share by which loss and gradients may differ: sums are taken in another order, which batch norms of two images and
many layers enlarge."""


def in_blocks(update: Update, state: State, told: Input, name: str) -> None:
    """Have the training passes of a network in blocks of channels (:func:`steadytrain.precision.use_blocks`).

    Args:
        update: as :func:`.build.update` makes it.
        state: of the run; no number of it changes.
        told: the images.
        name: of the network.

    Raises:
        ModelError: it cannot be, would gain nothing, or computes something else there.
        RecipeError: this is no CPU that has them.
    """
    device = state.engine.device
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        where = f"a {device.type.upper()}" if device.type != "cpu" else "a CPU for which torch was built without it"
        raise RecipeError(f"precision.blocked is oneDNN's layout on CPUs, and this trains on {where}: leave it out")
    with undisturbed(device), put_back(state.module):
        batch = drawn(TRIED, image_shape(told), device)
        before = _tried(update, state, batch)
        use_blocks(state.module, name, channels_last=state.policy.channels_last)
        try:
            after = _tried(update, state, batch)
        except Exception as error:
            raise refused(name, first_line(error)) from error
    for what, usual, now in zip(("loss", "norm of the gradients"), before, after, strict=True):
        if not math.isclose(usual, now, rel_tol=CLOSE):
            raise refused(name, f"two drawn images give a {what} of {now:.6g} instead of {usual:.6g}")


def _tried(update: Update, state: State, batch: Loaded) -> tuple[float, float]:
    """The loss of a pass, and the norm of its gradients, which nobody is given."""
    torch.manual_seed(0)
    loss, _ = update.objective(state.module, batch.images, batch.labels)
    trained = [one for one in state.module.parameters() if one.requires_grad]
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return loss.item(), torch.stack([one.norm() for one in found if one is not None]).norm().item()
