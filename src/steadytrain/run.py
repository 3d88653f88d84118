"""A run is a directory; copying the directory copies the run.

::

    recipe.json          what is trained
    events.jsonl         all that happened (events-1.jsonl, ... for the other ranks)
    checkpoints/         step-00000120/, ... whole or absent
    model.safetensors    the trained weights, with the model's name, classes and preprocessing inside
    lock                 held while a process trains here

>>> import tempfile
>>> from steadytrain.config import Budget, Data, Model, Recipe
>>> recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
>>> run = Run.create(tempfile.mkdtemp() + "/a", recipe)
>>> Run.open(run.directory).recipe == recipe
True
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from steadytrain.config import Recipe
from steadytrain.errors import RecipeError, RunError, storage_error
from steadytrain.events import Ended, Event, EventLog, Started, read

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Run:
    """A run's directory and its recipe. Make one with :meth:`create` or :meth:`open`."""

    directory: Path
    recipe: Recipe

    @staticmethod
    def create(directory: str | Path, recipe: Recipe) -> Run:
        """Make the directory, or take it up again if it holds the same recipe.

        ``parallel`` and ``every`` may differ: the new ones are used from now on. A run that never started (its data or
        its device were not there) takes any recipe.

        Raises:
            RunError: the directory holds a run of another recipe, or something that is no run.
            StorageError: it cannot be written.
        """
        path = Path(directory)
        try:
            _refuse_another(path, recipe)
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            if not (path / "recipe.json").exists():
                _write(path / "recipe.json", recipe.to_json())
            elif (told := Run.open(path)).recipe != recipe:
                told._become(recipe)
        except OSError as error:
            raise storage_error(error, path) from error
        return Run(path, recipe)

    @staticmethod
    def open(directory: str | Path) -> Run:
        """Open an existing run. Raises RunError where there is none."""
        path = Path(directory)
        try:
            text = (path / "recipe.json").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"{path} is not a run: it has no recipe.json") from None
        except OSError as error:
            raise RunError(f"cannot read {path / 'recipe.json'}: {error.strerror}") from error
        try:
            return Run(path, Recipe.from_json(text))
        except RecipeError as error:
            raise RunError(f"{path / 'recipe.json'} cannot be used: {error}") from error

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.directory.resolve().name

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.directory / "checkpoints"

    @property
    def weights(self) -> Path:
        """The trained weights, once the run has finished."""
        return self.directory / "model.safetensors"

    def events(self, rank: int = 0, *, sparse: bool = False) -> Iterator[Event]:
        """Every event that one rank wrote, oldest first; also while the run is going on.

        ``sparse``: of the steps between two other events only the last, much faster (see :func:`events.read`).
        """
        path = self._log_path(rank)
        return read(path, sparse=sparse) if path.exists() else iter(())

    def log(self, rank: int = 0, attempt: int | None = None) -> EventLog:
        """Open the log for a new attempt, numbered after the ones already in it, or as it is told."""
        if attempt is None:
            attempt = max((event.attempt for event in self.events(rank, sparse=True)), default=0) + 1
        return EventLog(self._log_path(rank), attempt, rank)

    def log_beside(self) -> EventLog:
        """Open the log for what is measured while nobody trains: its events are of attempt 0, which is none."""
        return EventLog(self._log_path(0), 0)

    @property
    def has_started(self) -> bool:
        """Whether it ever came as far as its first step: from then on it is bound to its recipe."""
        return any(isinstance(event, Started) for event in self.events(sparse=True))

    def finished(self) -> Ended | None:
        """The event that ended the run for good, or None if it is still to be finished."""
        ended = (e for e in self.events(sparse=True) if isinstance(e, Ended) and e.status == "finished")
        return next(ended, None)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; the system lets go of it however the process ends.

        Raises:
            RunError: another process holds it (its id is named).
            StorageError: the directory cannot be written.
        """
        path = self.directory / "lock"
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise storage_error(error, path) from error
        with file:
            try:
                _hold(file)
            except BlockingIOError:
                raise RunError(
                    f"{self.directory} is in use by {self._holder(file)}: wait for it, stop it, or choose another"
                    " --run folder"
                ) from None
            except OSError as error:
                raise storage_error(error, path) from error
            yield

    def is_held(self) -> bool:
        """Whether a process holds the run right now, on a file system whose locks this machine sees; writes nothing."""
        try:
            file = (self.directory / "lock").open("rb")
        except OSError:
            return False
        with file:
            return _is_held(file)

    def holder(self) -> int | None:
        """The id of the process that holds the run, or held it last; None where none ever did."""
        try:
            return int((self.directory / "lock").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def _become(self, recipe: Recipe) -> None:
        """Write another recipe, unless a process works with this one: that is told when it is tried."""
        if recipe.digest == self.recipe.digest:
            _write(self.directory / "recipe.json", recipe.to_json())
            return
        with self.lock():
            _write(self.directory / "recipe.json", recipe.to_json())

    def _holder(self, file: IO[bytes]) -> str:
        file.seek(0)
        number = file.read().decode("ascii", "replace").strip() or "unknown"
        hosts = [event.machine.get("host") for event in self.events(sparse=True) if isinstance(event, Started)]
        elsewhere = hosts and hosts[-1] not in (None, platform.node())
        return f"process {number}" + (f" on {hosts[-1]}" if elsewhere else "")

    def _log_path(self, rank: int) -> Path:
        return self.directory / ("events.jsonl" if rank == 0 else f"events-{rank}.jsonl")


def _refuse_another(path: Path, recipe: Recipe) -> None:
    if (path / "recipe.json").exists():
        run = Run.open(path)
        if run.recipe.digest != recipe.digest and run.has_started:
            changes = [d for d in run.recipe.differences(recipe) if not d.startswith(("parallel.", "every."))]
            raise RunError(
                f"{path} holds a run of another recipe ({'; '.join(changes)}): choose another --run folder,"
                f" or repeat the command that made this one"
            )
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{path} exists and is not a run (no recipe.json): choose another --run folder")


def _hold(file: IO[bytes]) -> None:
    if fcntl is None:
        return
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.truncate(0)
    file.write(str(os.getpid()).encode())


def _is_held(file: IO[bytes]) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
