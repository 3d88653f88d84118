"""Micro-batches are shared among ranks so that each belongs to one of them, however many there are."""

from __future__ import annotations

import pytest

from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.training.step import Share, share_of


def shares(size: int, *, batch_size: int = 120, accumulate: int = 1, before: int | None = None) -> list[Share]:
    return [share_of(World(rank=rank, size=size), batch_size, accumulate, before) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_image_of_a_batch_is_one_ranks(size: int, accumulate: int) -> None:
    parts = shares(size, accumulate=accumulate)
    seen = [image for part in parts for image in range(part.offset, part.offset + part.images)]
    assert seen == list(range(120))
    assert {part.micro_batches for part in parts} == {accumulate * size}


@pytest.mark.parametrize(("before", "size"), [(4, 3), (4, 2), (4, 1), (2, 4), (3, 5), (6, 4)])
def test_micro_batches_stay_as_they_were_when_ranks_leave_and_join(before: int, size: int) -> None:
    parts = shares(size, before=before)
    assert sum(part.images for part in parts) == 120 and all(part.count for part in parts)
    assert parts[0].micro_batches == (before if size <= before else parts[0].micro_batches)
    assert parts[0].micro_batches % before == 0, "no micro-batch begins in the midst of an earlier one"


def test_a_batch_that_cannot_be_split_is_refused_with_those_that_can() -> None:
    with pytest.raises(RecipeError, match=r"batch_size=100 .* 3 equal parts, for 3 ranks: choose 99 or 102"):
        shares(3, batch_size=100)
    with pytest.raises(RecipeError, match=r"batch_size=2 .*: choose 4"):
        shares(4, batch_size=2)
    with pytest.raises(RecipeError, match=r"each of which makes 2 of its share"):
        shares(4, batch_size=12, accumulate=2)
