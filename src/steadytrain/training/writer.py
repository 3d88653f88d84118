"""The writer: what is to be saved is copied at once, and written in a thread while training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch
from torch import Tensor

from steadytrain.training.checkpoints import stage

R = TypeVar("R")


class Writer(Generic[R]):
    """Writes files in a thread, one after another, in the order in which they were asked for.

    Of each kind of file one is on its way at a time: the next of its kind uses the same memory for its copies. After an
    error nothing more is written, so that what is on the disk is as if writing had stopped there.

    Args:
        device: of the tensors; copies of a GPU's go into page-locked memory, where there is enough of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steady-writer")
        self._asked: deque[tuple[str, Future[R]]] = deque()
        self._memory: dict[str, Tensor] = {}
        self._error: BaseException | None = None

    def stage(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the host, as :func:`.checkpoints.stage` does, for the next file of a kind.

        It waits for the one before, and raises what writing has raised.
        """
        wait([future for other, future in self._asked if other == kind])
        if self._error is not None:
            raise self._error
        size = sum(value.nbytes for value in tensors.values())
        memory = self._memory.get(kind)
        if memory is None or memory.nbytes < size:
            self._memory.pop(kind, None)
            memory = self._memory[kind] = _host_memory(size, pinned=self._is_pinned)
        return stage(tensors, memory)

    def submit(self, kind: str, write: Callable[[], R]) -> None:
        """Let the thread call ``write``, which has nothing but copies of :meth:`stage` and plain values."""
        self._asked.append((kind, self._thread.submit(self._call, write)))

    def is_writing(self, kind: str) -> bool:
        """Return whether a file of a kind is on its way."""
        return any(other == kind and not future.done() for other, future in self._asked)

    def wait(self) -> None:
        """Wait until nothing is on its way; raises nothing."""
        wait([future for _, future in self._asked])

    def results(self) -> Iterator[R]:
        """Yield what the calls that are over have returned, in their order; raises what the first to fail raised."""
        while self._asked and self._asked[0][1].done():
            _, future = self._asked.popleft()
            if future.exception() is not None:
                self._asked.clear()  # the others raise the same
            try:
                yield future.result()
            finally:
                del future  # what it raises refers to this frame, and would keep open files with it

    def close(self) -> None:
        """Write what was asked for, and end the thread."""
        self._thread.shutdown()
        self._error = None  # which refers to the frames that it came through, and so to open files

    def _call(self, write: Callable[[], R]) -> R:
        if self._error is not None:
            raise self._error
        try:
            return write()
        except BaseException as error:
            self._error = error
            raise


def _host_memory(size: int, *, pinned: bool) -> Tensor:
    if pinned:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # no page-locked memory is left: copies into other memory take longer
            pass
    return torch.empty(size, dtype=torch.uint8)
