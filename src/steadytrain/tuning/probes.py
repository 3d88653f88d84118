"""Measurements in separate processes, cached on disk: a crash or a timeout is a result as well.

A server process imports torch once and forks for each measurement, which therefore starts at once and with empty
memory. Without ``fork`` the server measures itself, and a crash costs a new server.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from steadytrain.config import Recipe
from steadytrain.distributed.world import World
from steadytrain.errors import FailedError, SteadyError, first_line, storage_errors
from steadytrain.machine import facts
from steadytrain.machine.children import LineServer, call_in_fork, cause_of_death, die_with_parent, keep_output
from steadytrain.machine.process import lasting_imports, share_cores

What = Literal["facts", "updates", "loading", "both", "rate"]
Trouble = Literal["memory", "crash", "timeout", "refused", "failed"]

START_SECONDS = 120.0
"""The longest time that importing torch may take."""

GRACE_SECONDS = 5.0
"""How long a server that no longer answers may take to end by itself, which gives its exit code."""

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
        error: one line about the failure.
        limit_seconds: its time limit.
    """

    figures: Mapping[str, Any]
    trouble: Trouble | None = None
    error: str = ""
    limit_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        """The measured rate; 0 if it failed."""
        return float(self.figures.get("images_per_second", 0.0))


class Prober:
    """Makes measurements, one at a time, in children of a process that has imported torch.

    Entering it starts the server, which imports in the background; leaving it ends all of its processes.

    Args:
        world: the rank to measure: on its device, with its part of the machine's cores and memory.
    """

    def __init__(self, world: World = World()) -> None:  # noqa: B008 - frozen
        self._world = world
        self._server: LineServer | None = None
        self._is_ready = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def ask(
        self,
        what: What,
        recipe: Recipe,
        *,
        seconds: float,
        limit_seconds: float,
        settle_seconds: float = 0.0,
        updates: int = 0,
    ) -> ProbeOutcome:
        """Measure for at most ``limit_seconds``; the rest is as in :func:`steadytrain.tuning.measure.measure`.

        Raises:
            FailedError: no process can be started, or torch cannot be imported in it.
        """
        server = self._wait_until_ready()
        request = {
            "what": what,
            "recipe": recipe.to_dict(),
            "from_file": [recipe.model.from_file, sorted(recipe.optim.from_file), recipe.data.from_file],
            "seconds": seconds,
            "settle_seconds": settle_seconds,
            "updates": updates,
            "world": asdict(self._world),
        }
        line, is_late = server.ask(json.dumps(request), limit_seconds)
        if line:
            answer = json.loads(line)
            return ProbeOutcome(answer["figures"], answer["trouble"], answer["error"], limit_seconds)
        code = self._end(0.0 if is_late else GRACE_SECONDS)
        if is_late:
            return ProbeOutcome({}, "timeout", f"not done in {limit_seconds:.0f} s", limit_seconds)
        return ProbeOutcome({}, *_trouble_of(code), limit_seconds)

    def _wait_until_ready(self) -> LineServer:
        server = self._server or self._start()
        if not self._is_ready:
            line, _ = server.ask(None, START_SECONDS)
            if not line:
                code = self._end(GRACE_SECONDS)
                raise FailedError(
                    f"the process that measures ended with code {code} before it began: try steady doctor, or less load"
                )
            self._is_ready = True
        return server

    def _start(self) -> LineServer:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # the user's own modules as well
        self._server = LineServer("from steadytrain.tuning.probes import serve; serve()", variables)
        self._is_ready = False
        return self._server

    def _end(self, grace_seconds: float = 0.0) -> int:
        """End the server; return its exit code."""
        server, self._server = self._server, None
        return 0 if server is None else server.end(grace_seconds)


class RankProbers:
    """Makes each measurement on several ranks of this machine at the same time; the weakest one counts.

    Args:
        ranks: their number, each on its own GPU, or with its part of the cores.
    """

    def __init__(self, ranks: int) -> None:
        worlds = [World(rank=rank, size=ranks, local_rank=rank, local_size=ranks) for rank in range(ranks)]
        self._probers = [Prober(world) for world in worlds]

    def __enter__(self) -> Self:
        for prober in self._probers:
            prober.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for prober in self._probers:
            prober.__exit__(kind, error, at)

    def ask(self, what: What, recipe: Recipe, **limits: Any) -> ProbeOutcome:
        """Measure as :meth:`Prober.ask` does, on all ranks; return the :func:`weakest` outcome."""
        pool = ThreadPoolExecutor(len(self._probers))
        try:
            answers = [pool.submit(prober.ask, what, recipe, **limits) for prober in self._probers]
            return weakest([answer.result() for answer in answers])
        except BaseException:
            self.__exit__(None, None, None)  # ends the measurements, for which the threads wait
            raise
        finally:
            pool.shutdown()


def weakest(outcomes: Sequence[ProbeOutcome]) -> ProbeOutcome:
    """Merge the outcomes of several ranks: one that failed, else the slowest, with the largest memory that one needs.

    Facts are merged to the least memory, and the number formats that all ranks have.

    >>> weakest([ProbeOutcome({"images_per_second": 9.0, "memory_bytes": 5}),
    ...          ProbeOutcome({"images_per_second": 7.0, "memory_bytes": 4})]).figures
    {'images_per_second': 7.0, 'memory_bytes': 5}
    """
    if (failed := next((outcome for outcome in outcomes if outcome.trouble is not None), None)) is not None:
        return failed
    slowest, rows = min(outcomes, key=lambda outcome: outcome.images_per_second), [row.figures for row in outcomes]
    joined = dict(slowest.figures)
    if "precisions" in joined:
        joined["memory_bytes"] = min(row["memory_bytes"] for row in rows)
        common = [name for name in joined["precisions"] if all(name in row["precisions"] for row in rows)]
        joined["precisions"] = common or ["fp32"]
        joined["device"] = ", ".join(dict.fromkeys(row["device"] for row in rows))
    elif "memory_bytes" in joined:
        joined["memory_bytes"] = max(row["memory_bytes"] for row in rows)
    return replace(slowest, figures=joined)


def _trouble_of(code: int) -> tuple[Trouble, str]:
    return ("memory" if code == -9 else "crash"), cause_of_death(code)


class ProbeCache:
    """Outcomes on disk, one line each, written at once, so that a Ctrl-C loses no measurement.

    Args:
        path: of the file; None keeps them in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._outcomes: dict[str, ProbeOutcome] = {}
        with contextlib.suppress(OSError):
            for line in [] if path is None else path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that was torn by a kill
                    value = json.loads(line)
                    self._outcomes[value["key"]] = ProbeOutcome(**value["outcome"])

    def get(self, key: str) -> ProbeOutcome | None:
        """Return an earlier outcome; None: not measured."""
        return self._outcomes.get(key)

    def clear(self) -> None:
        """Forget all outcomes. Raises StorageError if the file cannot be removed."""
        self._outcomes.clear()
        with storage_errors(self.path or Path()):
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    def put(self, key: str, outcome: ProbeOutcome) -> None:
        """Add an outcome. Raises StorageError if it cannot be written."""
        self._outcomes[key] = outcome
        if self.path is None:
            return
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "outcome": vars(outcome)}) + "\n")


def cache_path(recipe: Recipe, identity: Mapping[str, Any], without: Iterable[str]) -> Path | None:
    """Return the cache file for this machine, model, data and versions; None if there is no folder for caches.

    Args:
        recipe: the recipe to tune.
        identity: facts of data, device and versions, as measured.
        without: keys of the recipe that are tuned, or that do not change its speed; a part's name: all its keys.
    """
    folder = facts.cache_folder()
    if folder is None:
        return None
    values = recipe.to_dict()
    for key in without:
        part, _, name = key.partition(".")
        if name:
            values[part].pop(name, None)
        else:
            values.pop(part, None)
    return folder / "tune" / f"{_digest({'recipe': values, 'known': identity})}.jsonl"


def load_choices(recipe: Recipe, free: Iterable[str], ranks: int) -> dict[str, Any] | None:
    """Return earlier automatic choices for such a recipe on this machine, so that the same command resumes its run."""
    path = _choices_path(recipe, free, ranks)
    try:
        choices = None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return choices if isinstance(choices, dict) else None


def save_choices(recipe: Recipe, free: Iterable[str], ranks: int, choices: Mapping[str, Any]) -> None:
    """Store automatic choices. Raises StorageError if they cannot be written."""
    path = _choices_path(recipe, free, ranks)
    if path is None:
        return
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(choices), encoding="utf-8")


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
    """Answer requests from standard input, a line each, until it is closed."""
    answers = keep_output()
    die_with_parent()
    share_cores()  # as a command that trains does, unless the caller's has
    with lasting_imports():
        from steadytrain.tuning import measure  # noqa: F401 - takes seconds, once

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if json.loads(line)["recipe"]["model"]["name"].startswith("timm/"):
            with contextlib.suppress(ImportError):
                import timm  # noqa: F401 - takes seconds, once and not in every child
        answer = _answer_in_fork(line) if sys.platform == "linux" else _answer(line)
        print(json.dumps(answer), file=answers, flush=True)


def _answer_in_fork(line: str) -> dict[str, Any]:
    text = call_in_fork(lambda: json.dumps(_answer(line)))
    if isinstance(text, str):
        answer: dict[str, Any] = json.loads(text)
        return answer
    trouble, error = _trouble_of(text)
    return {"figures": {}, "trouble": trouble, "error": error}


def _answer(line: str) -> dict[str, Any]:
    """Measure what a line asks for; whatever goes wrong is part of the answer."""
    from steadytrain.training.memory import is_out_of_memory
    from steadytrain.tuning.measure import measure

    request = json.loads(line)
    recipe = Recipe.from_dict(request["recipe"])
    model, optim, data = request["from_file"]  # what the user's command named may be imported
    recipe = replace(
        recipe,
        model=replace(recipe.model, from_file=model),
        optim=replace(recipe.optim, from_file=frozenset(optim)),
        data=replace(recipe.data, from_file=data),
    )
    try:
        figures = measure(
            request["what"],
            recipe,
            seconds=request["seconds"],
            settle_seconds=request["settle_seconds"],
            updates=request["updates"],
            world=World(**request["world"]),
        )
    except SteadyError as error:
        return {"figures": {}, "trouble": "refused", "error": str(error)}
    except Exception as error:  # noqa: BLE001 - a network or a library may raise anything, and that is the result
        trouble = "memory" if is_out_of_memory(error) else "failed"
        return {"figures": {}, "trouble": trouble, "error": first_line(error)}
    return {"figures": figures, "trouble": None, "error": ""}
