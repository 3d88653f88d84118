"""Measurements in separate processes, cached on disk: a crash or a timeout is a result as well.

A server process imports torch once and forks for each measurement, which therefore starts at once and with empty
memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from steadytrain.config import Recipe
from steadytrain.distributed.world import World
from steadytrain.errors import FailedError, SteadyError, first_line, storage_errors
from steadytrain.files import Closing, read_table, replace_file
from steadytrain.machine import facts
from steadytrain.machine.children import ChildEndedError, Forked, ForkServer, serve_forks
from steadytrain.machine.process import lasting_imports, share_cores

What = Literal["facts", "updates", "loading", "both"]
Trouble = Literal["memory", "crash", "timeout", "refused", "failed"]

START_SECONDS = 120.0
"""The longest time that importing torch may take."""

_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI", "MPI_", "SLURM_", "JOB_COMPLETION_INDEX"),
)
"""Prefixes of the variables that launchers set for ranks; a measurement is not one of them."""


@dataclass(frozen=True)
class ProbeOutcome:
    """The outcome of a measurement: its figures, or why it failed.

    Args:
        figures: as :func:`steadytrain.tuning.measure.measure` returns them; empty if it failed.
        trouble: None: it succeeded. ``memory``: too little of it. ``crash``: the process died. ``timeout``: it was not
            done in time. ``refused``: the recipe is invalid. ``failed``: anything else.
    """

    figures: Mapping[str, Any]
    trouble: Trouble | None = None
    error: str = ""
    limit_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        """The measured rate; 0 if it failed."""
        return float(self.figures.get("images_per_second", 0.0))

    @property
    def failure(self) -> str:
        """The fault, a line; empty where there was none."""
        return "" if self.trouble is None else self.error or self.trouble


class Prober(Closing):
    """Makes measurements, one at a time, in children of a process that has imported torch.

    It starts that server, which imports in the background; closing it ends all of its processes.

    ``world``: the rank to measure for: its device, and its part of the machine's cores and memory.
    """

    def __init__(self, world: World = World()) -> None:  # noqa: B008 - frozen
        self._world = world
        self._server: ForkServer | None = None
        self._start()

    def close(self) -> None:
        """End all processes."""
        if self._server is not None:
            self._server.end()
            self._server = None

    def ask(
        self, what: What, recipe: Recipe, *, seconds: float, limit_seconds: float, settle_seconds: float = 0.0
    ) -> ProbeOutcome:
        """Measure for at most ``limit_seconds``; the rest is as in :func:`steadytrain.tuning.measure.measure`.

        Raises:
            FailedError: no process can be started, or torch cannot be imported in it.
        """
        needs = ["timm"] if recipe.model.name.startswith("timm/") else []  # takes seconds, once and not in every child
        request: dict[str, Any] = {"what": what, "recipe": recipe, "seconds": seconds, "world": self._world}
        child = self._fork(needs)
        try:
            child.send({**request, "settle_seconds": settle_seconds})
            outcome: ProbeOutcome = child.receive(limit_seconds)
            return replace(outcome, limit_seconds=limit_seconds)
        except TimeoutError:
            return ProbeOutcome({}, "timeout", f"not done in {limit_seconds:.0f} s", limit_seconds)
        except ChildEndedError as error:
            return ProbeOutcome({}, "memory" if error.code == -9 else "crash", str(error), limit_seconds)
        finally:
            child.end()

    def _fork(self, needs: Sequence[str]) -> Forked:
        try:
            return (self._server or self._start()).fork(START_SECONDS, needs)
        except ChildEndedError as error:
            self._server = None
            raise FailedError(
                f"the process that measures ended with code {error.code} before it began: try steady doctor, or less"
                " load"
            ) from error

    def _start(self) -> ForkServer:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the user's own modules as well
        self._server = ForkServer("from steadytrain.tuning.probes import serve; serve()", variables)
        return self._server


class ProbeCache(dict[str, ProbeOutcome]):
    """Outcomes by key, and on disk, one line each, written at once, so that a Ctrl-C loses no measurement.

    ``path``: of the file; None keeps them in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path
        with contextlib.suppress(OSError):
            for line in [] if path is None else path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that was torn by a kill
                    value = json.loads(line)
                    self[value["key"]] = ProbeOutcome(**value["outcome"])

    def clear(self) -> None:
        """Forget all outcomes. Raises StorageError if the file cannot be removed."""
        super().clear()
        with storage_errors(self.path or Path()):
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    def put(self, key: str, outcome: ProbeOutcome) -> None:
        """Add an outcome. Raises StorageError if it cannot be written."""
        self[key] = outcome
        if self.path is None:
            return
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "outcome": vars(outcome)}) + "\n")


def cache_path(recipe: Recipe, identity: Mapping[str, Any], without: Iterable[str]) -> Path | None:
    """Return the cache file for this machine, model, data and versions; None if there is no folder for caches.

    Args:
        identity: facts of data, device and versions, as measured.
        without: keys of the recipe that are tuned, or that do not change its speed; a part's name: all its keys.
    """
    folder, values = facts.cache_folder(), recipe.to_dict()
    for key in without:
        part, _, name = key.partition(".")
        (values[part] if name else values).pop(name or part, None)
    return folder and folder / "tune" / f"{_digest({'recipe': values, 'known': identity})}.jsonl"


def load_choices(recipe: Recipe, free: Iterable[str], ranks: int) -> dict[str, Any] | None:
    """Return earlier automatic choices for such a recipe on this machine, so that the same command resumes its run."""
    path = _choices_path(recipe, free, ranks)
    return None if path is None else read_table(path) or None


def save_choices(recipe: Recipe, free: Iterable[str], ranks: int, choices: Mapping[str, Any]) -> None:
    """Store automatic choices. Raises StorageError if they cannot be written."""
    if (path := _choices_path(recipe, free, ranks)) is not None:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(choices))


def _choices_path(recipe: Recipe, free: Iterable[str], ranks: int) -> Path | None:
    folder = facts.cache_folder()
    values = {"recipe": recipe.to_dict(), "free": sorted(free), "ranks": ranks}
    return folder and folder / "tune" / f"auto-{_digest(values)}.json"


def _digest(values: Mapping[str, Any]) -> str:
    """Return a digest of values and of this machine."""
    machine = {name: value for name, value in facts.facts().items() if name not in ("host", "system")}
    identity = {**values, "machine": machine, "quota": facts.quota()}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def serve() -> None:
    """Be the server of a :class:`Prober`."""
    share_cores()  # as a command that trains does, unless the caller's has
    with lasting_imports():
        from steadytrain.tuning import measure  # noqa: F401 - takes seconds, once

    serve_forks(_measure)


def _measure(connection: Connection) -> None:
    """Measure what is asked for; whatever goes wrong is part of the answer."""
    from steadytrain.training.memory import is_out_of_memory
    from steadytrain.tuning.measure import measure

    request = connection.recv()
    try:
        outcome = ProbeOutcome(measure(request.pop("what"), request.pop("recipe"), **request))
    except SteadyError as error:
        outcome = ProbeOutcome({}, "refused", str(error))
    except Exception as error:  # noqa: BLE001 - a network or a library may raise anything, and that is the result
        outcome = ProbeOutcome({}, "memory" if is_out_of_memory(error) else "failed", first_line(error))
    connection.send(outcome)
