"""Losses and right answers of updates: counted together, as if each had been counted at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from steadytrain.config import Optim, Precision
from steadytrain.distributed.engine import Engine
from steadytrain.optim import make_loss
from steadytrain.training.memory import Snapshot
from steadytrain.training.precision import Policy
from steadytrain.training.state import MOST_WAITING, WAITING_BYTES, Cursor, Meters, State
from steadytrain.training.step import Objective

CPU = torch.device("cpu")
KINDS = ("classes", "mixed", "several labels")


def _objective(kind: str = "classes", classes: int = 7) -> Objective:
    return Objective(
        Policy(Precision(name="fp32"), CPU), None, None, make_loss(Optim("sgd")), classes if kind == KINDS[2] else None
    )


def _answers(kind: str, count: int, images: int = 9, classes: int = 7) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        logits = torch.randn(images, classes, generator=generator)
        logits[0] = 1.0  # a tie
        labels = torch.randint(0, classes, (images,), generator=generator)
        if kind != "classes":
            labels = torch.rand(images, classes, generator=generator).round()
        yield torch.rand((), generator=generator) / 3, logits, labels


@pytest.mark.parametrize("kind", KINDS)
def test_counting_later_gives_the_same_sums_to_the_last_bit(kind: str) -> None:
    at_once, later, engine, objective = Meters(CPU), Meters(CPU), Engine(CPU), _objective(kind)
    for number, (loss, logits, labels) in enumerate(_answers(kind, 3 * MOST_WAITING + 5)):
        if number == MOST_WAITING + 3:
            assert at_once.take(engine) == later.take(engine)
        if number == 2 * MOST_WAITING + 1:
            for meters in (at_once, later):
                meters.end_epoch(1, number)
        rows = 9 if number < MOST_WAITING // 2 else 4  # another size, as of a batch that grows
        at_once.add(objective.counts(loss, logits[:rows], labels[:rows]))
        later.add_later(loss, logits[:rows], labels[:rows], objective.counts)
        labels.fill_(0)  # the loader has its memory back
    assert at_once.take_epochs(engine) == later.take_epochs(engine)
    assert torch.equal(at_once.sums, later.sums) and at_once.sums[2] > 0


def test_right_answers_are_those_of_the_labels() -> None:
    logits = torch.tensor([[[0.0, 2.0], [3.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    counts = _objective(classes=2).counts(torch.tensor([0.5, 2.0]), logits, torch.tensor([[1, 1], [1, 1]]))
    assert counts.tolist() == [[1.0, 1.0, 2.0], [4.0, 2.0, 2.0]]


def test_what_waits_to_be_counted_takes_little_memory() -> None:
    meters, objective = Meters(CPU), _objective(classes=1000)
    most = 0
    for loss, logits, labels in _answers("classes", 12, images=64, classes=1000):
        meters.add_later(loss, logits, labels, objective.counts)
        most = max(most, sum(logits.nbytes + labels.nbytes for _, logits, labels in meters.waiting))
    assert 0 < most <= WAITING_BYTES
    for images, classes, columns in ((256, 1000, slice(None)), (64, 10_000, slice(0, 10))):
        [(loss, logits, labels)] = _answers("classes", 1, images=images, classes=classes)
        meters = Meters(CPU)
        meters.add_later(loss, logits[:, columns], labels, objective.counts)
        assert not meters.waiting and meters.sums[2] == images


def test_passes_that_are_made_again_are_counted_once() -> None:
    net, objective = nn.BatchNorm1d(3), _objective()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = State(net, optimizer, objective.policy, Engine(CPU), None, Meters(CPU), Cursor())
    first, second, third = _answers("classes", 3)
    state.meters.add_later(*first, objective.counts)
    snapshot = Snapshot()
    snapshot.take(state)
    state.meters.add_later(*second, objective.counts)
    assert state.meters.sums[2] == 18  # read meanwhile
    snapshot.restore(state)
    state.meters.add_later(*third, objective.counts)
    assert state.meters.sums[2] == 18
