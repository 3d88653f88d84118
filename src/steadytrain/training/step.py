"""One update: a share of the batch, forward, loss, backward, optimizer, average. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from steadytrain.data.transforms import Augmentation
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.optim import Loss, set_lr, set_momentum
from steadytrain.training.clock import Clock
from steadytrain.training.data import DeviceBatch
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import Policy
from steadytrain.training.state import State

Forward: TypeAlias = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of a network, images uint8 [B, H, W, C] and labels int64 [B], or float32 [B, K] of mixed images or of
several labels. It returns the mean loss, a float32 scalar, and counts for the meters, float32 [3] without a gradient:
the sum of losses, right answers, images.
"""

Work: TypeAlias = Callable[["Update", State, Tensor, Tensor], None]
"""The device's work of an update: of the update, the state, images uint8 [B, H, W, C] and labels int64 [B], or
float32 [B, K] of mixed images."""


@dataclass(frozen=True)
class Objective:
    """The training loss: a :data:`Forward`, operation by operation.

    An answer is right if it is the label; of a mixed image, the label that has the largest share. Of several labels it
    is right if each label is: given a probability above 0.5 where the image has it, or more than half of it.

    Args:
        policy: numbers, device and memory format.
        mean, std: of the images, as :meth:`steadytrain.training.precision.Policy.images` takes them.
        loss: of logits and labels, from :func:`steadytrain.optim.make_loss`.
        num_labels: of which an image may have several; None: it has one class.
    """

    policy: Policy
    mean: Sequence[float] | None
    std: Sequence[float] | None
    loss: Loss
    num_labels: int | None = None

    def __call__(self, module: nn.Module, images_BHWC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = self.passes(module, images_BHWC, labels)
        return loss, self.counts(loss.detach(), logits, labels)

    def passes(self, module: nn.Module, images_BHWC: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss, a float32 scalar, and the logits [B, K]."""
        images = self.policy.images(images_BHWC, self.mean, self.std)
        with self.policy.autocast():
            logits = module(images)
            return self.loss(logits.float(), labels), logits

    def counts(self, losses: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the counts for the meters, float32 [..., 3].

        Args:
            losses: mean losses, float32 [...]: of one micro-batch, or stacked ones of several of one size.
            logits, labels: [..., B, K]; [..., B] or [..., B, K].
        """
        n = torch.full_like(losses, logits.shape[-2])
        if self.num_labels is not None:
            is_right = ((logits > 0) == (labels > 0.5)).all(-1)
        else:
            is_right = logits.argmax(-1) == (labels if labels.dim() < logits.dim() else labels.argmax(-1))
        right = is_right.sum(-1, dtype=n.dtype)
        return torch.stack((losses * n, right, n), -1)


@dataclass(frozen=True)
class Share:
    """The micro-batches ``first`` to ``end - 1`` of the ``micro_batches`` of a batch, which one rank trains on.

    A batch is a number of micro-batches of one size, in the order of the stream, that does not depend on the ranks. So
    an update is the same sum, with the same batch statistics, however many ranks make it: where a rank is gone, the
    others take more each, and the batch, the order of the samples and the learning rate stay.

    >>> ranks = [Share(128, 4, first, end) for first, end in ((0, 1), (1, 2), (2, 4))]
    >>> [(share.offset, share.images) for share in ranks]
    [(0, 32), (32, 32), (64, 64)]
    """

    batch_size: int
    micro_batches: int
    first: int
    end: int

    @cached_property
    def size(self) -> int:
        """Images of a micro-batch."""
        return self.batch_size // self.micro_batches

    @cached_property
    def count(self) -> int:
        """Micro-batches of this rank."""
        return self.end - self.first

    @property
    def offset(self) -> int:
        """The first image of the batch that is this rank's."""
        return self.first * self.size

    @cached_property
    def images(self) -> int:
        """Images of this rank."""
        return self.count * self.size

    def times(self, n: int) -> int:
        """Return how many batches of this size an update is made of, in which ``n`` images are this rank's."""
        return max(1, n // self.images)

    def positions(self, start: int, n: int) -> NDArray[np.int64]:
        """Return where ``n`` images of this rank stand, int64[n], of an update that begins at ``start``.

        A batch that has grown is several of this share's ``batch_size`` in a row, and a rank has its part of each.

        >>> Share(4, 2, 1, 2).positions(100, 4).tolist()
        [102, 103, 106, 107]
        """
        first = start + self.offset
        if n <= self.images:
            return np.arange(first, first + n)
        starts = range(first, first + self.times(n) * self.batch_size, self.batch_size)
        return np.concatenate([np.arange(at, at + self.images) for at in starts])


def images_per_rank(share: Share, ranks: int) -> list[int]:
    """Return how many images of a batch each of ``ranks`` ranks computes, as :func:`share_of` shares them.

    >>> images_per_rank(Share(128, 4, 0, 1), 3)
    [32, 32, 64]
    """
    first = [share.micro_batches * rank // ranks for rank in range(ranks + 1)]
    return [share.size * (end - begin) for begin, end in pairwise(first)]


def share_of(world: World, batch_size: int, accumulate: int, before: int | None = None, *, even_for: str = "") -> Share:
    """Compute this rank's share of each batch.

    Args:
        accumulate: micro-batches that each rank makes of its share, when the run begins.
        before: micro-batches of an update when the run began; None: it begins now.
        even_for: what needs equally many on all ranks, since they wait for each other in each pass; empty: nothing.

    Raises:
        RecipeError: the batch cannot be split so.

    >>> share_of(World(rank=1, size=2), 128, 1).images, share_of(World(), 128, 1, before=4).count
    (64, 4)
    >>> share_of(World(rank=2, size=3), 128, 1)
    Traceback (most recent call last):
    steadytrain.errors.RecipeError: batch_size=128 cannot be split into 3 equal parts, for 3 ranks: choose 126 or 129
    """
    parts = before or accumulate * world.size
    count = next((n for n in range(parts, batch_size + 1, parts) if n >= world.size and batch_size % n == 0), None)
    if count is None or (before is None and count != parts):
        low, high = batch_size // parts * parts, -(-batch_size // parts) * parts
        fitting = f"{low} or {high}" if low else f"{high}"
        times = f", each of which makes {accumulate} of its share (optim.accumulate)" if accumulate > 1 else ""
        raise RecipeError(
            f"batch_size={batch_size} cannot be split into {parts} equal parts, for {world.size} ranks{times}:"
            f" choose {fitting}"
        )
    if even_for and count % world.size:
        raise RecipeError(
            f"{count} micro-batches cannot be shared equally among {world.size} ranks, as {even_for} needs:"
            f" use as many ranks as the run began with, or a divisor of {count}"
        )
    return Share(batch_size, count, count * world.rank // world.size, count * (world.rank + 1) // world.size)


def run_operations(update: Update, state: State, images_BHWC: Tensor, labels: Tensor) -> None:
    """Do the work of an update operation by operation: micro-batches, their gradients, the optimizer."""
    size, limit = update.share.size, update.limit
    if limit is None:
        _add_gradients(update, state, images_BHWC, labels, size)
    else:
        limit.fit(lambda at_once: _add_gradients(update, state, images_BHWC, labels, at_once), size, state)
    update.clock.to("optimizer")
    if update.clip_norm is not None:
        state.policy.unscale(state.optimizer)
        norm = nn.utils.clip_grad_norm_(update.parameters, update.clip_norm)
        state.meters.add_norm(state.engine.whole(norm))
    state.policy.step(state.optimizer)


def _add_gradients(update: Update, state: State, images_BHWC: Tensor, labels: Tensor, at_once: int) -> None:
    """Add up the gradients of a batch: of each micro-batch ``at_once`` images at a time, or a few less."""
    # A batch that has grown is made of several of the first size.
    times, size = update.share.times(labels.shape[0]), update.share.size
    count, clock = update.share.count * times, update.clock
    # The engine averages over ranks, each of which has its part of the micro-batches.
    divisor = update.share.micro_batches * times / state.engine.world.size
    passes = -(-size // at_once)  # of a micro-batch
    parts: Iterable[tuple[Tensor, Tensor]] = [(images_BHWC, labels)]
    if count > 1:
        parts = zip(images_BHWC.chunk(count), labels.chunk(count), strict=True)
    if passes > 1:
        halves = (zip(*(tensor.tensor_split(passes) for tensor in part), strict=True) for part in parts)
        parts = (half for part in halves for half in part)
    is_one = count * passes == 1
    forward = update.forward if is_one or update.forward_in_parts is None else update.forward_in_parts
    counts_later = forward is update.objective
    for k, (images, right) in enumerate(parts):
        last = k == count * passes - 1
        share = divisor if passes == 1 else divisor * size / len(right)  # of its mean in that of all
        with state.engine.micro_batch(last=last):
            clock.to("forward")
            if counts_later:
                loss, logits = update.objective.passes(update.call, images, right)
            else:
                loss, counts = forward(update.call, images, right)
            clock.to("backward")
            state.engine.backward(state.policy.scale(loss if share == 1 else loss / share), last=last)
            if counts_later:
                state.meters.add_later(loss.detach(), logits.detach(), right, update.objective.counts)
            else:
                state.meters.add(counts)


def pass_over(update: Update, state: State, batch: DeviceBatch) -> None:
    """Take up a batch without an update of it: the weights stay, and step and position go on."""
    cursor, of_all = state.cursor, update.share.batch_size * update.share.times(batch.labels.shape[0])
    state.engine.begin_update(cursor.position)
    cursor.step, cursor.position = state.engine.end_update(cursor.step, cursor.position, of_all)
    state.engine.finish_update(cursor.step)
    update.clock.to("host")
    update.clock.updated(cursor.step, of_all)


@dataclass(frozen=True)
class Update:
    """The parts that all updates of a run share.

    Args:
        call: the engine's module, called on float images [B, C, H, W], giving logits [B, K].
        parameters: those that the optimizer updates.
        forward: computes the objective: itself, whose counting can wait, or code with the counting in it.
        share: of each batch, this rank's.
        clock: is told what an update is doing.
        image_shape: height, width and channels of the images.
        work: operation by operation, or by a recorded graph of all of them.
        augmentation: transforms of the images before that; None: there are none.
        limit: how many images of a micro-batch go through the network at a time; None: all of them.
        forward_in_parts: computes the objective where several passes add up gradients; None: ``forward`` does.
    """

    call: nn.Module
    parameters: tuple[nn.Parameter, ...]
    objective: Objective
    forward: Forward
    clip_norm: float | None
    share: Share
    clock: Clock
    image_shape: tuple[int, int, int]
    work: Work = run_operations
    augmentation: Augmentation | None = None
    limit: PassLimit | None = None
    forward_in_parts: Forward | None = None

    def __call__(self, state: State, batch: DeviceBatch, lr: float, momentum: float | None = None) -> None:
        """Train on one batch, or this rank's share of it, micro-batch by micro-batch; None leaves the momentum."""
        set_lr(state.optimizer, lr)
        if momentum is not None:
            set_momentum(state.optimizer, momentum)
        images, labels = batch.images, batch.labels
        position = state.engine.begin_update(state.cursor.position)
        if self.augmentation is not None:
            self.clock.to("forward")
            images, labels = self.augmentation(images, labels, self.share.positions(position, len(labels)))
        self.work(self, state, images, labels)
        cursor, of_all = state.cursor, self.share.batch_size * self.share.times(labels.shape[0])
        step, start = cursor.step, cursor.position
        cursor.step, cursor.position = state.engine.end_update(step, start, of_all)
        state.engine.finish_update(cursor.step)
        if state.ema is not None:
            state.ema.update(state.module, cursor.step - step)
        self.clock.to("host")
        self.clock.updated(cursor.step, cursor.position - start)
