"""Memory that runs out: half as many images go through the network at a time, and the run goes on.

Ranks wait for each other within an update: one that cannot take part would leave the others waiting. So several ranks
try a pass before the first update and agree on the smallest number; where memory runs out in an update all the same,
that rank ends the attempt, and all begin the next one with as few images as it can take.
"""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch

from steadytrain.errors import FailedError, RankLostError, SteadyError, first_line
from steadytrain.events import Halved
from steadytrain.format import count
from steadytrain.training.state import State, buffers_of

T = TypeVar("T")

_ONE_VALUE = "Expected more than 1 value per channel"
"""Torch's message where a batch norm refuses a single image of one pixel."""

_NO_MEMORY = (
    *("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "defaultcpuallocator"),
    *("could not create a primitive", "can't start new thread"),  # oneDNN, Python
    *("out_of_memory", "cudaerrormemoryallocation", "alloc_failed", "allocation_failed"),  # codes, those of cuDNN 9 too
    *("cublas_status_not_initialized", "cudnn_status_not_initialized"),  # no room for a library's own memory
    *("unable to find a valid cudnn algorithm", "unable to find an engine to execute"),  # none whose workspace has room
    *("failed to cuda calloc", "failed to cuda malloc", "failed to cuda host"),  # NCCL's buffers
)
"""Messages of a full memory, in lower case: those of torch's allocators, of the system, and of libraries, some of which
do not say it clearly.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: on a GPU, in torch's allocator on a CPU, or in Python.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(ValueError())
    (True, True, False)
    >>> is_out_of_memory(RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory"))
    True
    >>> is_out_of_memory(RuntimeError("could not create a primitive"))  # oneDNN's words for it, and for little else
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, SteadyError):  # it may quote one
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)
    return isinstance(error, MemoryError)


class Snapshot:
    """State that an update's passes change besides gradients: buffers, meters and random states."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, torch.Tensor | None], str]] | None = None
        self._live: list[torch.Tensor | None] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # those of a kind are copied at once
        self._generators: dict[str, torch.Tensor] = {}
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._sums, self._changes = torch.empty(0), -1

    def take(self, state: State) -> None:
        """Keep them as they are now; nothing waits for the device."""
        if self._places is None:
            self._places = [(part._buffers, name) for part, name, _ in buffers_of(state.module)]
        meters = state.meters
        if meters.changes != self._changes:
            self._sums, self._changes = meters.all_but_waiting.clone(), meters.changes
        self._waiting = meters.waiting.copy()
        live = [buffers[name] for buffers, name in self._places]
        if len(live) != len(self._live) or not all(map(operator.is_, live, self._live)):
            self._live = live  # at first, and where a module has put another tensor in a buffer's place
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for tensor in live:
                if tensor is not None:
                    by_dtype.setdefault(tensor.dtype, []).append(tensor)
            self._groups = [(group, [tensor.clone() for tensor in group]) for group in by_dtype.values()]
        else:
            for group, copies in self._groups:
                torch._foreach_copy_(copies, group)
        self._generators = {"cpu": torch.get_rng_state()}
        if (device := state.engine.device).type == "cuda":
            self._generators["cuda"] = torch.cuda.get_rng_state(device)

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Make them what they were, and drop all gradients."""
        assert self._places is not None
        state.module.zero_grad(set_to_none=True)
        state.optimizer.zero_grad(set_to_none=True)
        for (buffers, name), tensor in zip(self._places, self._live, strict=True):
            buffers[name] = tensor
        for group, copies in self._groups:
            torch._foreach_copy_(group, copies)
        state.meters.all_but_waiting.copy_(self._sums)
        state.meters.waiting[:] = self._waiting
        torch.set_rng_state(self._generators["cpu"])
        if (device := state.engine.device).type == "cuda":
            torch.cuda.set_rng_state(self._generators["cuda"], device)
            torch.cuda.empty_cache()


@dataclass
class PassLimit:
    """The number of images in one pass of the network: all of them until memory runs out, then half as many.

    Args:
        during: what the passes are for.
        on_halved: is told each time.
        images: at a time, at most; None: as many as there are.
        mode: where memory runs out, ``halve`` and go on; ``restart``: halve, and end the attempt of this rank; or do
            nothing about it (``fixed``).
    """

    during: Literal["update", "evaluation"]
    on_halved: Callable[[Halved], None]
    images: int | None = None
    mode: Literal["halve", "restart", "fixed"] = "halve"
    _snapshot: Snapshot = field(default_factory=Snapshot, repr=False, compare=False)

    def at_once(self, images: int) -> int:
        """Return how many of so many images go through the network at a time.

        >>> limit = PassLimit("update", print, images=8)
        >>> limit.at_once(32), limit.at_once(4)
        (8, 4)
        """
        return images if self.images is None else min(self.images, images)

    def fit(self, work: Callable[[int], T], images: int, state: State | None = None) -> T:
        """Call ``work`` with the number of images to take at a time, again with half as many where memory runs out.

        Args:
            work: as often as need be.
            images: that there are.
            state: what work changes, made as it was before work is called again; None: it changes nothing.

        Raises:
            FailedError: memory is not enough for one image.
            RankLostError: memory ran out, and all ranks are to start again.

        >>> def work(at_once):
        ...     if at_once > 10:
        ...         raise MemoryError("no room")
        ...     return at_once
        >>> PassLimit("evaluation", lambda halved: print(halved.images)).fit(work, 32)
        16
        8
        8
        """
        if self.mode == "fixed":
            return work(self.at_once(images))
        if state is not None and self.mode == "halve":
            self._snapshot.take(state)
        while True:
            at_once = self.at_once(images)
            try:
                return work(at_once)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            except ValueError as error:
                if self.images is None or not str(error).startswith(_ONE_VALUE):
                    raise
                raise FailedError(
                    _too_little(f"more than one image at a time, as batch norms need ({error})")
                ) from error
            # Here the error is gone, and with it the frames that held what was computed.
            self._halve(at_once, reason)
            if state is not None and self.mode == "halve":
                self._snapshot.restore(state)
            elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()

    def agree(self, images: int) -> None:
        """Take over the limit of another rank, whose memory is smaller."""
        if self.images is None or images < self.images:
            self.images = images
            message = f"another rank has memory for {count(images, 'image')} at a time in an {self.during}"
            self.on_halved(Halved(message=f"{message}: so it is on this one", during=self.during, images=images))

    def _halve(self, images: int, reason: str) -> None:
        if images == 1:
            raise FailedError(_too_little(f"one image at a time ({reason})"))
        self.images = (images + 1) // 2
        what = f"memory ran out in an {self.during} ({reason})"
        message = f"{what}: {self.images} instead of {images} images at a time from here on"
        if self.during == "update":
            message += "; an update stays the mean over its batch, but batch norms see fewer images"
        self.on_halved(Halved(message=message, during=self.during, images=self.images))
        if self.mode == "restart":
            raise RankLostError(f"{what}: all ranks start again, with {count(self.images, 'image')} at a time")


def _too_little(what: str) -> str:
    return (
        f"the memory is not enough for {what}: choose smaller images (--size) or a smaller model, or give --recompute,"
        " which keeps every bit and takes more time"
    )
