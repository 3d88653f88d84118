"""Children: the same answers in the same order, and an end to all of them, whatever happens."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from steadytrain.errors import FailedError, StorageError
from steadytrain.machine.worker_pool import map_in_children

PORTIONS = [list(range(at, min(at + 3, 20))) for at in range(0, 20, 3)]


def squares(portion: Sequence[int], *, ending: int | None = None) -> list[int]:
    """Squares; the child that is given ``ending`` is killed."""
    if ending in portion:
        os.kill(os.getpid(), signal.SIGKILL)
    return [number * number for number in portion]


def failing(portion: Sequence[int]) -> list[int]:
    """Squares, from a disk that has no seven."""
    if 7 in portion:
        raise StorageError("cannot read 7: Input/output error")
    return squares(portion)


def noisy(portion: Sequence[int]) -> list[int]:
    """Squares, from a library that prints."""
    print("look at me")
    os.write(1, b"and me")
    return squares(portion)


def _died(number: int, how: str) -> list[str]:
    return [f"{number}: {how}"]


@pytest.fixture(autouse=True)
def _found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    # The functions above are found by the name of this file's module, which the children must be able to import.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_answers_come_in_order_however_many_children(workers: int) -> None:
    answers = list(map_in_children(PORTIONS, squares, _died, workers=workers))
    assert answers == [[number * number for number in portion] for portion in PORTIONS]


def test_only_the_item_that_kills_its_child_is_given_up() -> None:
    answers: Iterator[Any] = map_in_children(PORTIONS, partial(squares, ending=7), _died, workers=2)
    values: list[Any] = [part for answer in answers for part in answer]
    assert values == [number * number if number != 7 else "7: SIGKILL" for number in range(20)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_system_is_no_crash_of_a_child_and_costs_no_item(workers: int) -> None:
    answers = map_in_children(PORTIONS, failing, _died, workers=workers)
    assert [next(answers), next(answers)] == [[0, 1, 4], [9, 16, 25]]
    with pytest.raises(StorageError, match="cannot read 7: Input/output error"):
        next(answers)


def test_what_a_library_prints_is_not_taken_for_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(map_in_children(PORTIONS[:2], noisy, _died, workers=1)) == [[0, 1, 4], [9, 16, 25]]
    out, error = capfd.readouterr()
    assert out == ""
    assert "and me" in error


def test_portions_are_taken_as_they_are_needed_and_children_end_early(
    children: Callable[[], list[psutil.Process]],
) -> None:
    taken = []

    def portions() -> Iterator[list[int]]:
        for number in range(1000):
            taken.append(number)
            yield [number]

    answers = map_in_children(portions(), squares, _died, workers=2)
    assert next(answers) == [0]
    assert len(taken) < 20
    assert len(children()) == 2
    answers.close()
    assert not children()


def test_a_python_that_does_not_start_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FailedError, match="cannot start /nowhere/python"):
        list(map_in_children(PORTIONS, squares, _died, workers=2))
