"""Who of a tree of processes trains and who makes batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low

from steadytrain.monitor.process_watch.facts import Moment, ProcessLoad

_SPAWNED = ("multiprocessing.spawn", "multiprocessing-fork")
_SERVER = "multiprocessing.forkserver"  # starts workers for its parent: neither trains nor feeds
_LEAST_OF_A_HEAD = 0.02
_WORKER_NAMES = ("pt_data_worker", "pt_main_worker")


def roles(moments: Sequence[Moment]) -> tuple[set[int], set[int]]:
    """The processes that train, and the workers, by number.

    A worker is a child that runs its parent's program (forked), or that calls itself one, and has no children; a
    process with workers trains. Spawned children train themselves where they hold a GPU, or where nobody does and
    their parent only waits for them. Without workers, those train that use the most processor time.
    """
    newest = {one.pid: one for moment in moments for one in moment.processes}
    used: Counter[int] = Counter()
    for moment in moments:
        for one in moment.processes:
            used[one.pid] += one.cpu * moment.seconds  # type: ignore[assignment]
    workers = {pid for pid, one in newest.items() if _is_worker(one, newest)}
    ranks = _ranks(workers, newest, used)
    workers -= ranks
    heads = ranks | ({_head(pid, newest) for pid in workers} & set(newest) - workers)
    rest = [pid for pid, one in newest.items() if pid not in workers and _SERVER not in one.command]
    if not rest:
        return set(newest), set()
    most = max(used[pid] for pid in rest)
    busy = {pid for pid in rest if used[pid] >= max(0.25 * most, 1e-9)}
    by_memory = {max(rest, key=lambda pid: newest[pid].memory_bytes or 0)}
    return heads or busy or by_memory, workers


def _head(worker: int, newest: Mapping[int, ProcessLoad]) -> int:
    """For whom a worker works: its parent, or the one whose server that is."""
    parent = newest[worker].parent
    server = newest.get(parent)
    return server.parent if server is not None and _SERVER in server.command else parent


def _ranks(workers: set[int], newest: Mapping[int, ProcessLoad], used: Mapping[int, float]) -> set[int]:
    """Those of the spawned children that train."""
    spawned = {
        pid
        for pid in workers
        if any(word in newest[pid].command for word in _SPAWNED)
        and newest[pid].command != newest[newest[pid].parent].command  # forked by one that was spawned
    }
    if any(one.devices for one in newest.values()):
        return {pid for pid in spawned if newest[pid].devices}
    by_parent: Counter[int] = Counter()
    for pid in spawned:
        by_parent[newest[pid].parent] += used[pid]  # type: ignore[assignment]
    return {pid for pid in spawned if used[newest[pid].parent] < _LEAST_OF_A_HEAD * by_parent[newest[pid].parent]}


def _is_worker(one: ProcessLoad, newest: Mapping[int, ProcessLoad]) -> bool:
    parent = newest.get(one.parent)
    if parent is None or any(other.parent == one.pid for other in newest.values()):
        return False
    if _SERVER in one.command and _SERVER not in parent.command:
        return False
    named = any(word in one.command for word in _SPAWNED) or one.name in _WORKER_NAMES
    return named or (bool(one.command) and one.command == parent.command)


def crew(moments: Sequence[Moment], workers: set[int]) -> list[list[tuple[ProcessLoad, float]]]:
    """The workers as many as there are at a time, though each epoch may start others, with the seconds of each look."""
    each = [sorted((one for one in moment.processes if one.pid in workers), key=_place) for moment in moments]
    num = median_low([len(there) for there in each if there] or [0])
    return [
        [(there[place], moment.seconds) for there, moment in zip(each, moments, strict=True) if place < len(there)]
        for place in range(num)
    ]


def _place(one: ProcessLoad) -> tuple[int, int]:
    return one.parent, one.pid


def renewed(moments: Sequence[Moment], workers: set[int], within_seconds: float) -> list[bool]:
    """For each moment whether workers were started anew at most so many seconds before."""
    known: set[int] = set()
    found, last = [], -within_seconds
    for moment in moments:
        there = {one.pid for one in moment.processes if one.pid in workers}
        if known and there - known:
            last = moment.at
        known |= there
        found.append(moment.at - last < within_seconds)
    return found
