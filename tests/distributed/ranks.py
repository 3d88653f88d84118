"""A function as several ranks: processes of their own that exchange tensors over gloo."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.forked import context, importable

from steadytrain.distributed import heartbeat, process_group
from steadytrain.distributed.process_group import Group, init_group
from steadytrain.distributed.world import World
from steadytrain.launch.supervise import free_port

InGroup = Callable[[Group], dict[str, Any]]
SECONDS = 60.0


def as_group(program: InGroup, size: int) -> list[dict[str, Any]]:
    """What ``program(group)`` returns on each rank of a :class:`Group`: tensors, plain values and tables of them.

    ``program`` is of a module's top level, or a ``partial`` of one, with whatever can be pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        codes = _run(program, size, folder, {}, set())
        last = "".join(path.read_text()[-2000:] for path in sorted(Path(folder).glob("*.err")))
        assert codes == [0] * size, f"ranks ended with {codes}: {last}"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]


def codes_of(
    program: InGroup, size: int, constants: Mapping[str, float] | None = None, *, ends: set[int] | None = None
) -> tuple[list[int | None], str]:
    """The exit codes of ranks that do not all come back, and what they said; None of those that hang (``ends``).

    Args:
        constants: of :mod:`steadytrain.distributed.heartbeat` or :mod:`steadytrain.distributed.process_group`.
        ends: ranks that hang when the others have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        codes = _run(program, size, folder, constants or {}, ends or set())
        return codes, "".join((Path(folder) / f"{rank}.err").read_text() for rank in range(size))


def _run(program: InGroup, size: int, folder: str, constants: Mapping[str, float], ends: set[int]) -> list[int | None]:
    forks, port = context(), free_port()
    ranks = [
        forks.Process(target=_member, args=(rank, size, port, program, folder, dict(constants))) for rank in range(size)
    ]
    with importable():
        for process in ranks:
            process.start()
    try:
        for rank, process in enumerate(ranks):
            if rank not in ends:
                process.join(SECONDS)
        return [None if rank in ends else child.exitcode for rank, child in enumerate(ranks)]
    finally:
        for process in ranks:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def _member(rank: int, size: int, port: int, program: InGroup, folder: str, constants: dict[str, float]) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(Path(folder) / f"{rank}.err", os.O_CREAT | os.O_WRONLY), 2)
    for name, value in constants.items():
        setattr(heartbeat if hasattr(heartbeat, name) else process_group, name, value)
    with init_group(World(rank=rank, size=size, local_rank=rank, local_size=size, port=port)) as group:
        torch.save(program(group), Path(folder) / f"{rank}.pt")
