"""The board in shared memory: entries in order, with all that they speak of, and the flag of whoever waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from steadytrain.data.loader.board import Board, board_bytes
from steadytrain.data.loader.shared_memory import Slots
from steadytrain.data.loader.times import Times

PROJECT = Path(__file__).parents[2]


def two(places: int) -> tuple[Board, Board]:
    memory = memoryview(bytearray(board_bytes(places)))
    return Board(memory, places), Board(memory, places)


def test_entries_are_read_in_order_from_the_other_side() -> None:
    writes, reads = two(5)
    for number in range(17):
        assert reads.made == number
        assert not writes.put(1000 + number)
        assert reads[number] == 1000 + number
    assert [reads[number] for number in range(12, 17)] == [1012, 1013, 1014, 1015, 1016]


def test_whoever_waits_is_to_be_told_once() -> None:
    writes, reads = two(5)
    assert reads.ask(0)
    assert writes.put(7) and not writes.put(8)
    assert not reads.ask(1)  # there already
    assert reads.ask(2)


def test_what_was_done_comes_across() -> None:
    writes, reads = two(5)
    done, seen = Times(3, 2**40 + 1, 0.5, 0.25, 0.75, 0.125, 1e-9, 0.625), Times()
    writes.tell(done, True, False, 2**35 + 3)
    assert reads.did(seen) == (True, False, 2**35 + 3) and seen == done
    assert all(type(count) is int for count in (seen.images, seen.bytes))


def test_an_entry_comes_with_all_that_was_written_before_it() -> None:
    entries = 2_000
    slots = Slots((64, 4, 4, 1), 8)
    program = f"""
from steadytrain.data.loader.shared_memory import Slots
slots = Slots((64, 4, 4, 1), 8, file={slots.file})
for number in range({entries}):
    while number - slots.each[0].labels[0] >= 7: pass
    slots.each[1 + number % 7].ids[:] = number
    slots.board.put(1 + number % 7)
"""
    with subprocess.Popen([sys.executable, "-c", program], pass_fds=[slots.file], cwd=PROJECT) as other:
        for number in range(entries):
            while slots.board.made <= number and other.poll() is None:
                os.sched_yield()
            assert (slots.each[slots.board[number]].ids == number).all()
            slots.each[0].labels[0] = number + 1
    assert other.returncode == 0
