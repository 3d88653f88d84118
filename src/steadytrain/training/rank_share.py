"""Which part of each update's batch a rank trains on: whole micro-batches, whose number does not depend on the ranks.

A batch is a number of micro-batches of one size, in the order of the stream. Ranks take turns of neighbours among them:
so an update is the same sum, with the same statistics in its batch norms, however many ranks make it. Where a rank is
gone, the others take more each, and the batch, the order of the samples and the learning rate stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError


@dataclass(frozen=True)
class Share:
    """Micro-batches ``first`` to ``end - 1`` of the ``micro_batches`` of a batch are a rank's.

    >>> [(one.offset, one.images) for rank in range(3) for one in [Share(128, 4, *part(4, rank, 3))]]
    [(0, 32), (32, 32), (64, 64)]
    """

    batch_size: int
    micro_batches: int
    first: int
    end: int

    @property
    def size(self) -> int:
        """Images of a micro-batch."""
        return self.batch_size // self.micro_batches

    @property
    def own(self) -> int:
        """Micro-batches of this rank."""
        return self.end - self.first

    @property
    def offset(self) -> int:
        """The first image of the batch that is this rank's."""
        return self.first * self.size

    @property
    def images(self) -> int:
        """How many are."""
        return self.own * self.size


def part(n: int, rank: int, size: int) -> tuple[int, int]:
    """The share of ``n`` things in a row that a rank has: from, up to but not with."""
    return n * rank // size, n * (rank + 1) // size


def share(world: World, batch_size: int, accumulate: int, before: int | None = None, *, is_even: bool = False) -> Share:
    """The share of this rank.

    Args:
        world: rank and number of ranks.
        batch_size: images of an update.
        accumulate: micro-batches that each rank is to make of its share, when the run begins.
        before: micro-batches of an update when the run began; None: it begins now.
        is_even: all ranks have to have equally many: their batch norms wait for each other.

    Raises:
        RecipeError: the batch cannot be split so.

    >>> share(World(rank=1, size=2), 128, 1).images, share(World(), 128, 1, before=4).own
    (64, 4)
    >>> share(World(rank=2, size=3), 128, 1)
    Traceback (most recent call last):
    steadytrain.errors.RecipeError: batch_size=128 cannot be split into 3 equal parts, for 3 ranks: choose 126 or 129
    """
    wanted = before or accumulate * world.size
    count = next((n for n in range(wanted, batch_size + 1, wanted) if n >= world.size and batch_size % n == 0), None)
    if count is None or (before is None and count != wanted):
        low, high = batch_size // wanted * wanted, -(-batch_size // wanted) * wanted
        fitting = f"{low} or {high}" if low else f"{high}"
        times = f", each of which makes {accumulate} of its share (optim.accumulate)" if accumulate > 1 else ""
        raise RecipeError(
            f"batch_size={batch_size} cannot be split into {wanted} equal parts, for {world.size} ranks{times}:"
            f" choose {fitting}"
        )
    if is_even and count % world.size:
        raise RecipeError(
            f"{count} micro-batches cannot be shared equally among {world.size} ranks, as model.batch_norm=synchronous"
            f" needs: use as many ranks as the run began with, or a divisor of {count}"
        )
    return Share(batch_size, count, *part(count, world.rank, world.size))
