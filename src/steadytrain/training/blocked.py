"""A run's network in blocks of channels, tried on drawn images before the first update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from steadytrain.errors import RecipeError, first_line
from steadytrain.models import Input
from steadytrain.training.build import image_shape
from steadytrain.training.isolation import foreign_random, put_back, undisturbed
from steadytrain.training.precision.blocked import refused, use_blocks
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.transfer import Loaded, drawn

TRIED = 8
"""Images of the passes that are compared: with fewer, batch norms of deep networks make much of any rounding."""
CLOSE, CLOSE_GRADIENTS = 0.01, 0.2
"""Shares by which loss and buffers, and each gradient, may differ. Sums are taken in another order, and a ReLU of
nearly 0 may open: gradients of a ResNet-50 differ by up to a twentieth. What is computed wrongly differs by more."""
LEAST = 0.01
"""Share of the largest gradient, or of 1 in each value of a buffer, below which no closeness is asked for."""
IDLE = 0.1
"""While passes are compared, scales of norms that are 0, as at the end of residual branches at first: such a branch
would not be seen. With 1, rounding would grow from block to block."""
_GRADIENT = "gradient of "


def in_blocks(update: Update, state: State, told: Input, name: str) -> None:
    """Have the training passes of a network in blocks of channels (:func:`steadytrain.training.precision.use_blocks`).

    Before the first update of a run, drawn images are sent both ways: loss, gradients and buffers must agree.

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
    batch = drawn(TRIED, image_shape(told), device)
    with undisturbed(device), _no_norm_idle(state.module):
        is_new = state.cursor.step == 0
        usual = _tried(update, state, batch) if is_new else {}
        before = _random_states()
        with put_back(state.module):
            use_blocks(state.module, name, channels_last=state.policy.channels_last)
        if _random_states() != before:
            raise refused(name, "it draws random numbers outside of its modules, which would be the same in each pass")
        if is_new:
            try:
                now = _tried(update, state, batch)
            except Exception as error:
                raise refused(name, first_line(error)) from error
            _require_close(usual, now, name)


def _tried(update: Update, state: State, batch: Loaded) -> dict[str, Tensor]:
    """The loss of a pass, the gradients, which nobody is given, and the buffers, which are put back."""
    torch.manual_seed(0)
    with put_back(state.module):
        loss, _ = update.objective(state.module, batch.images, batch.labels)
        trained = {name: one for name, one in state.module.named_parameters() if one.requires_grad}
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        told = {f"{_GRADIENT}{name}": one for name, one in zip(trained, found, strict=True) if one is not None}
        kept = {f"buffer {name}": one.clone() for name, one in state.module.named_buffers()}
        return {"loss": loss.detach()} | told | kept


def _require_close(usual: Mapping[str, Tensor], now: Mapping[str, Tensor], name: str) -> None:
    largest = max(float(one.norm()) for what, one in usual.items() if what.startswith(_GRADIENT))
    for what, value in usual.items():
        is_gradient = what.startswith(_GRADIENT)
        least = LEAST * (largest if is_gradient else value.numel() ** 0.5)
        apart = float((now[what].double() - value.double()).norm()) / max(float(value.double().norm()), least)
        if not apart <= (CLOSE_GRADIENTS if is_gradient else CLOSE):
            raise refused(name, f"drawn images give another {what} there (by {apart:.2g} of it)")


@contextmanager
def _no_norm_idle(module: nn.Module) -> Iterator[None]:
    """Meanwhile, norms whose scales are 0 have others."""
    norms = [one for one in module.modules() if isinstance(one, _BatchNorm) and one.weight is not None]
    idle = [one.weight.data for one in norms if not one.weight.any()]
    for weight in idle:
        weight.fill_(IDLE)
    try:
        yield
    finally:
        for weight in idle:
            weight.zero_()


def _random_states() -> tuple[object, ...]:
    """Where all generators of random numbers stand."""
    return bytes(torch.get_rng_state().numpy()), *foreign_random()
