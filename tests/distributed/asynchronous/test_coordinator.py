"""The coordinator of asynchronous workers: each batch is made once, whatever dies, and the bound on staleness holds."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.distributed.asynchronous.coordinator import Coordinator


class Servers:
    """What servers know: whose updates were made, how many, and what each worker has pulled."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.pulled: dict[int, int] = {}
        self.staleness: list[int] = []

    async def was_applied(self, batch: int) -> bool:
        return batch in self.made

    def push(self, rank: int, batch: int) -> int:
        self.staleness.append(len(self.made) - self.pulled[rank])
        self.made.append(batch)
        self.pulled[rank] = len(self.made)
        return len(self.made)


async def work(
    coordinator: Coordinator, servers: Servers, rank: int, draw: random.Random, deaths: Counter[int], ahead: int
) -> None:
    """Train as a worker does, at a pace of its own; die now and then, and come back."""
    while True:
        await coordinator.join(rank, 1.0)
        had: list[int] = []
        servers.pulled[rank] = len(servers.made)
        await coordinator.pull(rank, servers.pulled[rank])
        while True:
            if not had:
                await coordinator.rest(rank)
                more = await coordinator.assign(rank, ahead, 1.0)
                if more is None:
                    return
                had += more
                servers.pulled[rank] = len(servers.made)
                await coordinator.pull(rank, servers.pulled[rank])
                continue
            batch = had.pop(0)
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
            if deaths[rank] and draw.random() < 0.2:
                deaths[rank] -= 1
                break
            begun = await coordinator.begin(rank, batch)
            assert begun is not None
            *_, more = begun
            if deaths[rank] and draw.random() < 0.1:
                deaths[rank] -= 1
                break
            await asyncio.sleep(0)
            pulled = servers.push(rank, batch)
            if deaths[rank] and draw.random() < 0.1:
                deaths[rank] -= 1
                break
            await asyncio.sleep(0)
            await coordinator.end(rank, batch, pulled)
            had += more or []


async def train(size: int, steps: int, seed: int, deaths: int, bound: int | None, ahead: int) -> Servers:
    coordinator, servers = Coordinator(size, bound), Servers()
    coordinator._was_applied = servers.was_applied
    await coordinator.open({}, steps=steps, step=0, unfinished=[], after=0)
    left = Counter(dict.fromkeys(range(size), deaths))
    draw = random.Random(seed)
    await asyncio.gather(*(work(coordinator, servers, rank, draw, left, ahead) for rank in range(size)))
    return servers


@given(size=st.integers(1, 4), steps=st.integers(1, 40), seed=st.integers(0, 10**6), deaths=st.integers(0, 3))
def test_each_batch_is_made_once_whatever_workers_die(size: int, steps: int, seed: int, deaths: int) -> None:
    servers = asyncio.run(train(size, steps, seed, deaths, None, 3))
    assert sorted(servers.made) == list(range(steps))
    assert servers.made[-1] == steps - 1, "the last batch ends with the final weights"


@given(size=st.integers(2, 4), seed=st.integers(0, 10**6), more=st.integers(0, 2), deaths=st.integers(0, 2))
def test_no_push_is_staler_than_the_bound(size: int, seed: int, more: int, deaths: int) -> None:
    bound = size - 1 + more
    servers = asyncio.run(train(size, 40, seed, deaths, bound, 2))
    assert sorted(servers.made) == list(range(40))
    assert max(servers.staleness) <= bound


def test_one_worker_is_never_stale() -> None:
    servers = asyncio.run(train(1, 20, 0, 0, None, 2))
    assert set(servers.staleness) == {0}


def test_what_a_checkpoint_says_is_unfinished_is_made_after_it() -> None:
    async def program() -> tuple[dict[str, Any], list[int]]:
        coordinator, servers = Coordinator(2), Servers()
        await coordinator.open({}, steps=10, step=0, unfinished=[], after=0)
        first, second = await coordinator.assign(0, 2), await coordinator.assign(1, 2)
        assert (first, second) == ([0, 1], [2, 3])
        servers.pulled[1] = 0
        for batch in second or []:
            await coordinator.begin(1, batch)
            await coordinator.end(1, batch, servers.push(1, batch))
        saved = await coordinator.pause()
        resumed, server_set = Coordinator(1), Servers()
        await resumed.open({}, steps=10, **saved)
        await work(resumed, server_set, 0, random.Random(0), Counter(), 2)
        return saved, sorted(servers.made + server_set.made)

    saved, updates = asyncio.run(program())
    assert saved == {"step": 2, "unfinished": [0, 1, 4, 5], "after": 6}
    assert updates == list(range(10))


def test_a_pause_waits_for_pushes_and_lets_none_begin() -> None:
    async def program() -> None:
        coordinator = Coordinator(2)
        await coordinator.open({}, steps=10, step=0, unfinished=[], after=0)
        await coordinator.assign(0, 1)
        await coordinator.assign(1, 1)
        await coordinator.begin(1, 1)
        paused = asyncio.create_task(coordinator.pause())
        await coordinator.pull(0, 0)
        other = asyncio.create_task(coordinator.begin(0, 0))
        await asyncio.sleep(0.01)
        assert not paused.done() and not other.done()
        await coordinator.end(1, 1, 1)
        assert (await paused)["step"] == 1
        assert not other.done()
        await coordinator.resume()
        begun = await other
        assert begun[:2] == (1, 1)

    asyncio.run(program())


def test_with_bound_zero_all_wait_for_each_other_and_end_together() -> None:
    async def program() -> list[str | None]:
        coordinator = Coordinator(2, 0)
        await coordinator.open({}, steps=10, step=0, unfinished=[], after=0)
        first = asyncio.create_task(coordinator.arrive(0, 0, "SIGTERM"))
        await asyncio.sleep(0.01)
        assert not first.done()
        return [await coordinator.arrive(1, 0), await first]

    assert asyncio.run(program()) == ["SIGTERM", "SIGTERM"]


@pytest.mark.parametrize("bound", [None, 0])
def test_the_end_of_the_first_worker_is_the_end(bound: int | None) -> None:
    async def program() -> object:
        coordinator = Coordinator(2, bound)
        await coordinator.open({}, steps=10, step=0, unfinished=[], after=0)
        await coordinator.leave(0)
        return await (coordinator.arrive(1, 0) if bound == 0 else coordinator.assign(1))

    assert asyncio.run(program()) == ("closed" if bound == 0 else None)
