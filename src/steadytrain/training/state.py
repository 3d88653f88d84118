"""The state that an update changes, saved and loaded bit for bit; and leaving it, and the process, as they were."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from steadytrain.config.schedules import Plateau
from steadytrain.distributed.engine import Engine
from steadytrain.errors import RunError
from steadytrain.format import few
from steadytrain.training.checkpoints import join, split
from steadytrain.training.ema import Ema
from steadytrain.training.precision import DTYPES, Policy, products, restore_products


@dataclass
class Cursor:
    """The position of a run: ``step`` updates done, ``position`` samples of the continuous stream consumed."""

    step: int = 0
    position: int = 0


class EpochSums(NamedTuple):
    """An epoch, the last of its updates so far, their images, and the means over these."""

    epoch: int
    step: int
    n: int
    loss: float
    top1: float


Count: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of mean losses [...], logits [..., B, K] and labels [..., B] or [..., B, K]. It returns float32 [..., 3]:
the sum of losses, right answers, images.
"""

MOST_WAITING, WAITING_BYTES = 32, 2**20
"""Micro-batches that are counted together, at most, and the bytes of their logits and labels until then."""


class Meters:
    """Sums on the device. Since the last log line: loss, right answers, images, gradient norm, updates; then of the
    epoch at hand: loss, right answers, images.
    """

    def __init__(self, device: torch.device) -> None:
        self.all_but_waiting = torch.zeros(8, device=device)
        self.waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Losses, logits and labels of micro-batches that are still to be counted, all of one size."""
        self._line, self._epoch = self.all_but_waiting[:5], self.all_but_waiting[5:]
        self._counts = self.all_but_waiting.as_strided((2, 3), (5, 1))  # of line and epoch, in one addition
        self._ended: list[tuple[int, int, torch.Tensor]] = []
        self.changes = 0
        """The number of changes of what has not waited."""
        self._count: Count | None = None
        self._room = 0

    @property
    def sums(self) -> torch.Tensor:
        """All sums, float32 [8]; waits for nothing."""
        self.count_waiting()
        return self.all_but_waiting

    def add(self, counts: torch.Tensor) -> None:
        """Count one micro-batch: float32 [3], the sum of losses, right answers, images."""
        self._counts += counts
        self.changes += 1

    def add_later(self, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, count: Count) -> None:
        """Count one micro-batch together with later ones, if it is small; the sums are the same to the last bit.

        For a small network the dozen operations of ``count`` take longer to call than its own.

        Args:
            loss, logits, labels: as ``count`` takes them, without gradients.
            count: the same in all calls.
        """
        on_cpu = labels.device.type == "cpu"
        if self.waiting and (
            len(self.waiting) >= self._room
            or self.waiting[0][1].shape != logits.shape
            or self.waiting[0][2].shape != labels.shape
        ):
            self.count_waiting()
        if not self.waiting:
            self._count = count
            # A part keeps the whole of its memory.
            held = logits.untyped_storage().nbytes()
            held += labels.nbytes if on_cpu else labels.untyped_storage().nbytes()
            self._room = min(WAITING_BYTES // held, MOST_WAITING)
        if self._room < 2:
            self.add(count(loss, logits, labels))
            return
        # On a CPU labels lie in the loader's memory, which it wants back.
        self.waiting.append((loss, logits, labels.clone() if on_cpu else labels))

    def count_waiting(self) -> None:
        """Count what waits, before something else is counted without waiting."""
        if not self.waiting:
            return
        assert self._count is not None
        losses, logits, labels = zip(*self.waiting, strict=True)
        self.waiting.clear()
        for counts in self._count(torch.stack(losses), torch.stack(logits), torch.stack(labels)).unbind():
            self.add(counts)  # one by one, or the last bit of a sum would depend on how many have waited

    def add_norm(self, norm: torch.Tensor) -> None:
        """Count one update's gradient norm; one that is not finite made no update (fp16's loss scaling skipped it)."""
        finite = norm.isfinite()
        self._line[3] += torch.where(finite, norm, 0.0)
        self._line[4] += finite
        self.changes += 1

    def load(self, saved: torch.Tensor, engine: Engine) -> None:
        """Load the sums of the ranks, a row each; with fewer ranks than before, some take the rows of several."""
        rows = saved.reshape(-1, saved.shape[-1])  # those of older versions have nothing of the epoch
        self.waiting.clear()
        self.changes += 1
        self.all_but_waiting.zero_()
        self.all_but_waiting[: rows.shape[1]] = rows[engine.world.rank :: engine.world.size].sum(0)

    def end_epoch(self, epoch: int, step: int, *, is_whole: bool = True) -> None:
        """Keep the sums of an epoch to be read later, and begin the next one if it ``is_whole``; waits for nothing."""
        self.count_waiting()
        self._ended.append((epoch, step, self._epoch.clone()))
        if is_whole:
            self._epoch.zero_()
            self.changes += 1

    def take_epochs(self, engine: Engine) -> list[EpochSums]:
        """Return the epochs that ended since the last call, over all ranks; waits for the device if there are any."""
        ended, self._ended = self._ended, []
        if not ended:
            return []
        rows = engine.sum(torch.stack([sums for _, _, sums in ended])).tolist()
        return [
            EpochSums(epoch, step, round(n), loss / (n or 1), right / (n or 1))  # 0: each was left out
            for (epoch, step, _), (loss, right, n) in zip(ended, rows, strict=True)
        ]

    def loss(self) -> float:
        """Return the sum of losses since the last log line; waits for the device."""
        return float(self.sums[0])

    def take(self, engine: Engine) -> tuple[float, float, float | None]:
        """Return mean loss, top-1 and mean gradient norm over all ranks, and start again; waits for the device."""
        self.count_waiting()
        loss, right, n, norm, updates = engine.sum(self._line).tolist()
        self._line.zero_()
        self.changes += 1
        return loss / n, right / n, norm / updates if updates else None


@dataclass
class State:
    """The live objects of a run.

    ``figure`` chooses the best weights; ``best`` is what theirs came to, times its sign (minus infinity: there are none
    yet), and ``best_loss`` their loss; ``evaluated`` the epoch of the last evaluation, ``misses`` how many there were
    since the best one, and ``plateau`` what a schedule that waits for them remembers; ``probe``: as ``best``, of a
    fitted classifier before any update, if there was one; ``lost_best``: updates of the best weights on the disk, if
    these are still to be made again.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    policy: Policy
    engine: Engine
    ema: Ema | None
    meters: Meters
    cursor: Cursor
    figure: str = "top1"
    best: float = -math.inf
    best_loss: float = math.inf
    evaluated: float = 0.0
    plateau: Plateau = field(default_factory=Plateau)
    misses: int = 0
    probe: float | None = None
    lost_best: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values for :mod:`steadytrain.training.checkpoints`; all ranks call it.

        Of what is divided among ranks, each has its part (:meth:`.Engine.parts`).
        """
        # Dropout and the like draw from torch's generators; the samples' own randomness needs no state.
        generators = {"cpu": torch.get_rng_state()}
        if self.engine.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.engine.device)
        if self.engine.world.size > 1:
            generators = {name: torch.stack(self.engine.all_gather(state)) for name, state in generators.items()}
        shared = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }
        return {
            **_merge_ranks(shared, self.engine),
            "policy": self.policy.state_dict(),
            "engine": self.engine.state_dict(),
            "meters": torch.stack(self.engine.all_gather(self.meters.sums)),
            "cursor": vars(self.cursor),
            "figure": self.figure,
            "best": self.best,
            "best_loss": self.best_loss,
            "evaluated": self.evaluated,
            "plateau": vars(self.plateau),
            "misses": self.misses,
            "probe": self.probe,
            "rng": generators,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            RunError: the state is of another model, or of none.
        """
        try:
            self._load(state)
        except RunError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise RunError(f"the checkpoint holds what no checkpoint of this run can ({what}): remove it") from error

    def _load(self, state: Mapping[str, Any]) -> None:
        shared = _own_part(state, self.engine)
        try:
            self.engine.load(self.module, self.optimizer, shared["model"], shared["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise RunError(f"the checkpoint is of another model: {str(error).splitlines()[-1].strip()}") from error
        self.policy.load_state_dict(state["policy"])
        self._take_masters(state["policy"].get("masters", {}), shared["model"])
        self.engine.load_state_dict(state["engine"])
        if self.ema is not None:
            self.ema.updates = int(shared["ema"]["updates"])
            self.engine.load_weights(self.ema.module, shared["ema"]["module"])
        self.meters.load(state["meters"], self.engine)
        self.cursor = Cursor(**state["cursor"])
        self.best, self.evaluated = state["best"], state["evaluated"]
        self.plateau = Plateau(**state.get("plateau", {}))  # earlier versions had none
        self.misses, self.probe = state.get("misses", 0), state.get("probe")  # not in those of older versions
        self.best_loss, self.lost_best = state.get("best_loss", math.inf), state.get("lost_best", 0)
        # Each rank's own generators; a rank that was not there before keeps those that it began with.
        rank, device = self.engine.world.rank, self.engine.device
        generators = {name: saved[None] if saved.dim() == 1 else saved for name, saved in state["rng"].items()}
        if rank < len(generators["cpu"]):
            try:
                torch.set_rng_state(generators["cpu"][rank].clone())
            except RuntimeError as error:  # of another size
                raise ValueError(f"rng: {error}") from error
        if device.type == "cuda" and rank < len(generators.get("cuda", ())):
            torch.cuda.set_rng_state(generators["cuda"][rank].clone(), device)

    @torch.no_grad()
    def _take_masters(self, masters: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
        """Take the fp32 masters of what was saved in 16 bits and is computed in fp32 now, in the optimizer's order."""
        were_halves = {
            id(parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.dtype == torch.float32 and saved[name].dtype in DTYPES.values()
        }
        if not masters or not were_halves:
            return
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        for number, parameter in enumerate(weight for weight in parameters if id(weight) in were_halves):
            parameter.copy_(masters[str(number)])


_LAYOUT: dict[str, Any] = {
    **dict.fromkeys(("model", "optimizer", "policy", "engine", "rng", "about.machine"), Mapping),
    **dict.fromkeys(("cursor.step", "cursor.position"), int),
    **dict.fromkeys(("best", "evaluated"), (int, float)),
    **dict.fromkeys(("about.digest", "about.train_digest"), str),
    "meters": torch.Tensor,
}
"""Parts of a checkpoint of any version that are read before its state is loaded, and their types."""


def misfit(saved: Any) -> str:
    """Return the part of what a checkpoint holds that no state has, however whole its bytes are; empty: none.

    >>> misfit({"model": 3}), misfit([])
    ('model', 'all of it')
    """
    if not isinstance(saved, dict):
        return "all of it"
    for name, kind in _LAYOUT.items():
        part, _, key = name.partition(".")
        value = saved.get(part)
        if key:
            value = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(value, kind):
            return part
    return ""


def _merge_ranks(shared: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return a state that any engine can load, and beside it, under ``ranks``, what makes each rank's own of it.

    Where ranks differ, as between two averages of the local engine, the state has their mean.
    """
    if engine.keeps_ranks_equal:
        return dict(shared)
    plain, tensors = split(shared)
    ranks: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        per_rank = torch.stack(engine.all_gather(tensor))
        if (per_rank != per_rank[0]).any():
            ranks[name] = per_rank
            tensors[name] = per_rank.mean(0) if per_rank.is_floating_point() else per_rank[0]
    return {**join(plain, tensors), "ranks": ranks}


def _own_part(state: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return this rank's own weights and optimizer of what :func:`_merge_ranks` made; the mean for other ranks."""
    shared = {name: state[name] for name in ("model", "optimizer", "ema")}
    ranks = state.get("ranks", {})
    if engine.keeps_ranks_equal or not ranks or len(next(iter(ranks.values()))) != engine.world.size:
        return shared
    plain, tensors = split(shared)
    of_rank = {name: per_rank[engine.world.rank] for name, per_rank in ranks.items()}
    return dict(join(plain, tensors | of_rank))


@contextmanager
def preserve_process(device: torch.device) -> Iterator[None]:
    """Restore on exit the random states of torch, NumPy and Python, and torch's threads and global settings."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark, python, numpy = torch.backends.cudnn.benchmark, random.getstate(), np.random.get_state()
    numbers = products()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports torch's compiler
                torch.use_deterministic_algorithms(deterministic)
            torch.backends.cudnn.benchmark = benchmark
            if products() != numbers:  # restoring would set torch's older switches, too
                restore_products(numbers)
            random.setstate(python)
            np.random.set_state(numpy)


def describe_nonfinite(module: nn.Module) -> str:
    """Describe the parameters that hold NaN or infinity; empty where none does.

    >>> layer = nn.Linear(2, 2)
    >>> describe_nonfinite(layer)
    ''
    >>> layer.bias.data[1] = float("nan")
    >>> describe_nonfinite(layer)
    '1 of 2 weights holds NaN or infinite values (bias: 1)'
    """
    parameters = dict(module.named_parameters())
    counts = {name: int((~value.detach().isfinite()).sum()) for name, value in parameters.items()}
    bad = [f"{name}: {number:,}" for name, number in counts.items() if number]
    if not bad:
        return ""
    verb = "holds" if len(bad) == 1 else "hold"
    return f"{len(bad):,} of {len(parameters):,} weights {verb} NaN or infinite values ({few(bad)})"


def buffers_of(*modules: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """List all buffers of modules, with the part that has it and its name there."""
    parts = [part for module in modules for part in module.modules()]
    return [(part, name, buffer) for part in parts for name, buffer in part.named_buffers(recurse=False)]


@contextmanager
def in_mode(module: nn.Module, mode: Literal["training", "evaluation"]) -> Iterator[None]:
    """Put all parts of a network into a mode, and each back into its own on exit."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(mode == "training")
    try:
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a network's buffers (running statistics) on exit, and drop its gradients."""
    before = [(part, name, buffer, buffer.clone()) for part, name, buffer in buffers_of(module)]
    try:
        yield
    finally:
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for part, name, buffer, value in before:
                setattr(part, name, buffer.copy_(value))  # some modules put another tensor in its place
