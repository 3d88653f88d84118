"""What any rank wants all do, after the same update, and once."""

from __future__ import annotations

import time
from typing import Any

import torch
from tests.distributed.ranks import as_group

from steadytrain.distributed.process_group import Group
from steadytrain.training import consensus
from steadytrain.training.consensus import Together, Wish

UPDATES = 20


def _together(group: Group) -> Together:
    """One that asks after each update, however short."""
    consensus.PAUSE = 0.0  # in a process of its own
    return Together(group)


def _saves(group: Group) -> dict[str, Any]:
    """A checkpoint that is due on the first rank until it is written, as one by the clock is."""
    agreement = _together(group)
    due, at, seconds = group.world.is_first, list[int](), 0.0
    for update in range(UPDATES):
        decision = agreement.ask(Wish(save=due and update >= 5, save_seconds=1.5 if group.world.is_first else 0.0))
        seconds = max(seconds, decision.save_seconds)
        if decision.save:
            at.append(update)
            due = False
    agreement.close()
    return {"at": torch.tensor(at), "seconds": seconds}


def test_what_is_due_is_saved_once_by_all() -> None:
    first, second = as_group(_saves, 2)
    assert len(first["at"]) == 1 and first["at"].tolist() == second["at"].tolist()
    assert second["seconds"] == 1.5  # how long that takes, which a notice on its machine is told with


def _measures(group: Group) -> dict[str, torch.Tensor]:
    """A measuring that the second rank wants once, and an evaluation, after which all ask at once."""
    agreement = _together(group)
    at: list[int] = []
    asked: list[bool] = []
    for update in range(UPDATES):
        if agreement.ask(Wish(measure=update == 5 and not group.world.is_first)).measure:
            at.append(update)
        if update == 5:
            agreement.ask_now(Wish())
        if update == 15:
            asked.append(agreement.ask_now(Wish(stop=None if group.world.is_first else "SIGTERM")).stop == "SIGTERM")
    agreement.close()
    return {"at": torch.tensor(at), "asked": torch.tensor(asked)}


def test_what_was_wanted_before_an_evaluation_is_not_forgotten_in_it() -> None:
    for answer in as_group(_measures, 2):
        assert len(answer["at"]) == 1 and answer["at"][0] > 5 and answer["asked"].tolist() == [True]


def _stops(group: Group) -> dict[str, torch.Tensor]:
    """Nothing lies between the rounds before the first update, and each update takes its time."""
    agreement = Together(group)
    for _ in range(3):
        agreement.ask_now(Wish())
    update = 0
    for update in range(UPDATES):
        time.sleep(0.2)
        if agreement.ask(Wish(stop="SIGTERM" if update >= 3 else None)).stop:
            break
    agreement.close()
    return {"at": torch.tensor(update)}


def test_a_signal_soon_after_the_start_is_heard_at_once() -> None:
    assert [int(answer["at"]) for answer in as_group(_stops, 2)] == [4, 4]
