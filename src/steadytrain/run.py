"""A run is a directory; copying the directory copies the run. What its files hold: docs/reference/files.md.

>>> import tempfile
>>> from steadytrain.config import Budget, Data, Model, Recipe
>>> recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
>>> run = Run.create(tempfile.mkdtemp() + "/a", recipe)
>>> Run.open(run.directory).recipe == recipe
True
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from steadytrain.config import Data, Recipe
from steadytrain.config.strangers import FILE_KEYS, outside_notice
from steadytrain.errors import InputError, RecipeError, RunError, SteadyError, describe_type, storage_errors
from steadytrain.events import (
    Accounted,
    Ended,
    Evaluated,
    Event,
    EventLog,
    Failed,
    Halved,
    LogReader,
    MachineStats,
    Started,
    Step,
    Tested,
    Tried,
    Unreadable,
    count_names,
    read,
    refuse_link,
)
from steadytrain.files import (
    lock_at_once,
    lock_surely,
    open_lock,
    open_regular,
    other_spelling,
    read_text,
    remove_left,
    replacing,
    sync,
)
from steadytrain.format import count

REPEAT = "seed-"
"""The name of a repeat's folder before its seed."""

MAX_REPEATS = 1000

UNSTARTED = {
    "recipe.json",
    "lock",
    "split.npz",
    "checkpoints",
    "events.jsonl",
    "tuning.json",
}  # the last of an older version
"""Entries of a run that never started."""


def _require_folder(directory: object) -> str | os.PathLike[str]:
    """Return a run's folder as it is. Raises RunError for another object, with what it has that is one."""
    if isinstance(directory, str | os.PathLike):
        return directory
    what = f"{describe_type(directory)} is not a run"
    if isinstance(getattr(directory, "run", None), Run):
        raise RunError(f"{what}: its .run is")
    if isinstance(directory, Recipe):
        raise RunError(f"{what}: st.Run.create('runs/a', recipe) makes one of it")
    raise RunError(f"{what}: name its folder, such as 'runs/a'")


def _require_recipe(recipe: object) -> None:
    """Raise RecipeError for another object, with what has a recipe."""
    if isinstance(recipe, Recipe):
        return
    remedy = "its .recipe is one" if isinstance(recipe, Run) else "st.default_recipe('photos') returns one"
    raise RecipeError(f"the recipe is {describe_type(recipe)}; it must be a Recipe: {remedy}")


def _data_words(folder: Path) -> str:
    """Say how to train on a folder that may be data: one with folders in it, as of classes; nothing elsewhere."""
    try:
        with os.scandir(folder) as entries:
            first = list(itertools.islice(entries, 1000))
    except OSError:
        return ""
    if any(entry.name.startswith("step-") for entry in first) or not any(entry.is_dir() for entry in first):
        return ""
    return f"; to train on images in it: steady finetune {shlex.quote(str(folder))}"


def _runs_within(folder: Path) -> str:
    """Name the runs in a folder that is none itself, the newest first; nothing where it has none."""
    try:
        recipes = sorted(folder.glob("[!.]*/recipe.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return ""
    if not recipes:
        return ""
    names = ", ".join(str(path.parent) for path in recipes[:6])
    more = f" and {len(recipes) - 6} more" if len(recipes) > 6 else ""
    return f". It holds {count(len(recipes), 'run')}: {names}{more}; name one (steady report {folder} compares them)"


def _is_only_begun(path: Path) -> bool:
    """Return whether a folder holds at most what a run that was killed in its first moments leaves there."""

    def is_left(entry: Path) -> bool:
        if entry.name == "recipe.json":  # of no bytes: the power failed before they were on the disk
            return not entry.is_symlink() and entry.stat().st_size == 0
        return (entry.name == "checkpoints" and entry.is_dir() and not any(entry.iterdir())) or bool(
            re.fullmatch(r"\.recipe\.json\.\w+\.part", entry.name)
        )

    return path.is_dir() and all(map(is_left, path.iterdir()))


@dataclass
class RunProgress:
    """The progress of a run by its log: what a process needs to know before it trains on.

    ``attempt``: number of the newest; ``started``: how it began; ``ended``: how it ended well, None while it goes on
    and where it was killed; ``finished``: the end of the whole run, if it came to it. ``accounted``: the newest
    account. ``position``: samples that the newest attempt came to; ``time``: of the newest event. ``evaluated``: the
    newest evaluation; ``best``: the one whose weights were kept as the best. ``unreadable``: lines of the log that are
    no events. ``is_open``: the newest attempt has not said how it ended: it goes on, or was killed. ``machine``: its
    newest sample. ``spans``: number of each attempt -> how it began, and the seconds that it has taken. ``tested``: the
    evaluation on the test images of weights that the run still has; ``num_tested``: of all. ``failed``: how the newest
    attempt failed, if it did. ``images_at_once``: that memory had room for in an update; None: it never ran out.
    ``evaluations``: all that count; ``tried``: what the run has tried.
    """

    attempt: int = 0
    started: Started | None = None
    ended: Ended | None = None
    finished: Ended | None = None
    accounted: Accounted | None = None
    position: int = 0
    time: float = 0.0
    evaluated: Evaluated | None = None
    best: Evaluated | None = None
    tested: Tested | None = None
    num_tested: int = 0
    unreadable: int = 0
    is_open: bool = False
    machine: MachineStats | None = None
    spans: dict[int, tuple[Started, float]] = field(default_factory=dict)
    failed: Failed | None = None
    images_at_once: int | None = None
    evaluations: list[Evaluated] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)

    @property
    def probe(self) -> Evaluated | None:
        """The evaluation of a fitted classifier, before any update."""
        return next((event for event in self.evaluations if not event.step), None)

    def take(self, event: Event) -> None:
        """Take one event in."""
        if isinstance(event, Unreadable):
            self.unreadable += 1
            return
        if event.attempt in self.spans:
            started, seconds = self.spans[event.attempt]
            # An account has them by a clock that nobody sets, and that stops while the machine sleeps.
            seconds = event.wall_seconds if isinstance(event, Accounted) else seconds + max(0.0, event.time - self.time)
            self.spans[event.attempt] = started, seconds
        self.attempt, self.time = max(self.attempt, event.attempt), event.time
        match event:
            case Started():
                self.started, self.ended, self.failed, self.accounted = event, None, None, None
                self.tested = None if self.tested is None or self.tested.step > event.step else self.tested
                self.spans[event.attempt] = event, max(0.0, event.time - (event.began or event.time))
                self.is_open, self.machine = True, None
                self.evaluations = [before for before in self.evaluations if before.step <= event.step]
            case MachineStats():
                self.machine = event
            case Failed():
                self.is_open, self.failed = False, event
            case Halved(during="update", images=int(images)):
                self.images_at_once = min(images, self.images_at_once or images)
            case Step(position=int(position)):
                self.position = position
            case Accounted(images=int(images)) if self.started is not None:
                self.position, self.accounted = int(self.started.batches.position(self.started.step)) + images, event
            case Evaluated():
                self.evaluated = event
                self.evaluations.append(event)
                if event.replaces(self.best):
                    self.best = event
            case Tested():
                self.tested, self.num_tested = event, self.num_tested + 1
            case Tried():
                self.tried.append(event)
            case Ended():
                self.ended, self.is_open = event, False
                if event.status == "finished":
                    self.finished = event


def _longer(before: Run, started: Started) -> str:
    """Say what to give a command to train on from a run's weights; without any yet, where to begin anew."""
    weights = [path for path in (before.weights, before.directory / "best.safetensors") if path.exists()]
    if not weights:
        return f"to begin anew, give this command --run {shlex.quote(f'{before.directory}-more')}"
    more = f"--weights {shlex.quote(str(weights[0]))} --run {shlex.quote(f'{before.directory}-more')}"
    more += f" --size {started.model['size']}" if "size" in started.model else ""
    return f"to train on from its weights, as another run, give this command {more}"


@dataclass(frozen=True)
class Run:
    """A run's directory and its recipe. Make one with :meth:`create` or :meth:`open`."""

    directory: Path
    recipe: Recipe
    is_new: bool = field(default=False, compare=False, repr=False)
    """:meth:`create` has made its folder."""

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @functools.cached_property
    def _reader(self) -> LogReader:
        return LogReader(self.log_path())

    @functools.cached_property
    def _progress(self) -> RunProgress:
        return RunProgress()

    @staticmethod
    def create(directory: str | Path, recipe: Recipe) -> Run:
        """Make the directory, or take it up again if it holds the same recipe.

        ``parallel`` and ``every`` may differ: the new ones are used from now on. A run that never started (its data or
        its device were not there) takes any recipe.

        Raises:
            RunError: the directory holds a run of another recipe, or something that is no run.
            StorageError: it cannot be written.
        """
        path = Path(_require_folder(directory))
        _require_recipe(recipe)
        with storage_errors(path):
            before = Run.open(path) if Run.is_run(path) and not _is_only_begun(path) else None
            if before is not None:
                before.require_trainable()
            if before is not None and recipe.data.holdout is None and before.progress().started is not None:
                recipe = recipe.with_({"data.holdout": before.recipe.data.holdout})  # the default was 0.1 once
            is_another = before is not None and before.recipe.digest != recipe.digest
            if before is None and path.exists() and not _is_only_begun(path):
                raise RunError(f"{path} exists and is not a run (no recipe.json): choose another --run folder")
            if before is not None and is_another and before.progress().started is not None:
                raise before.refusal(recipe)
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            if before is not None and not is_another:  # what the run has decided stays
                kept = {
                    f"every.{name}": getattr(before.recipe.every, name)
                    for name in ("skip", "slower", "rates", "fp32", "best", "tries")
                    if not getattr(recipe.every, name)
                }
                recipe = recipe.with_(kept) if any(kept.values()) else recipe
            if before is None or before.recipe != recipe:
                # One that trains something else is written only while no process holds the run.
                held = before.lock() if before is not None and is_another else contextlib.nullcontext()
                with held, replacing(path / "recipe.json") as part:  # where it is a link, the link goes
                    part.write_text(recipe.to_json(), encoding="utf-8")
                sync(path.parent)  # or a power cut takes the folder
        return Run(path, recipe, is_new=before is None)

    def refusal(self, recipe: Recipe, *, keys: tuple[str, ...] = ("",)) -> RunError:
        """Return the error for a recipe that is not that of this run, which started; it names keys that begin so."""
        differences = [line for line in self.recipe.differences(recipe) if line.startswith(keys)]
        changes = [line for line in differences if not line.startswith(("parallel.", "every."))]
        remedy = "choose another --run folder, or repeat the command that made this one"
        is_longer = bool(changes) and all(line.startswith(("budget.", "optim.warmup")) for line in changes)
        if is_longer and (started := self.progress().started) is not None:
            resumed = f"steady resume {shlex.quote(str(self.directory))} finishes it as it was planned; or, "
            remedy = f"{'it is finished; ' if self.progress().finished else resumed}{_longer(self, started)}"
        listed = "; ".join(changes or differences)
        return RunError(f"{self.directory} holds a run of another recipe ({listed}): {remedy}")

    @staticmethod
    def is_run(path: str | Path) -> bool:
        """Return whether a path is the folder of a run."""
        return (Path(path) / "recipe.json").exists()

    @staticmethod
    def create_repeats(directory: str | Path, recipe: Recipe, number: int) -> tuple[Run, ...]:
        """Make, or take up again, a run for each of ``number`` seeds from the recipe's on: ``seed-0/`` and so on.

        Raises:
            InputError: fewer than two, or more than a thousand.
            RunError: the directory is itself a run, or holds runs of another recipe.
            StorageError: it cannot be written.
        """
        path = Path(_require_folder(directory))
        _require_recipe(recipe)
        if not isinstance(number, int) or not 2 <= number <= MAX_REPEATS:
            raise InputError(f"the number of repeats is {number!r}; it must be from 2 to {MAX_REPEATS:,}")
        if Run.is_run(path):
            raise RunError(f"{path} is a run; repeats need another folder: --run FOLDER")
        seeds = range(recipe.seed, recipe.seed + number)
        return tuple(Run.create(path / f"{REPEAT}{seed}", recipe.with_(seed=seed)) for seed in seeds)

    @staticmethod
    def open(directory: str | Path | Run) -> Run:
        """Open an existing run, unless it is one already. Raises RunError where there is none."""
        if isinstance(directory, Run):
            return directory
        path = Path(_require_folder(directory))
        try:
            text = read_text(path / "recipe.json", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            why = "is not a run: it has no recipe.json" if path.exists() else "does not exist"
            if not path.exists() and (other := other_spelling(str(directory))):
                why += f". Did you mean {other}?"
            raise RunError(f"{path} {why}{_runs_within(path) or _data_words(path)}") from None
        except OSError as error:
            raise RunError(f"cannot read {path / 'recipe.json'}: {error.strerror}") from error
        try:
            return Run(path, Recipe.from_json(text, of_past=True))
        except RecipeError as error:
            raise RunError(f"{path / 'recipe.json'} cannot be used: {error}") from error

    def require_trainable(self) -> None:
        """Raise RunError where the run began with a setting that was removed since: it cannot go on as it was."""
        path = self.directory / "recipe.json"
        try:
            Recipe.from_json(read_text(path, errors="replace"))
        except RecipeError as error:
            raise RunError(f"{path} cannot be used: {error}") from error

    def as_decided(self) -> Run:
        """Return the run with what it has decided since it was opened: where it began again from its probe."""
        stored = Run.open(self.directory).recipe
        decided = {"every.tries": stored.every.tries, "budget.epochs": stored.budget.epochs}
        decided |= {"optim.warmup_epochs": stored.optim.warmup_epochs, "every.rates": stored.every.rates}
        return replace(self, recipe=self.recipe.with_(decided)) if stored.every.tries or stored.every.rates else self

    @property
    def probe_weights(self) -> Path:
        """The weights of a probe, from which updates may begin again; only while the run trains."""
        return self.directory / "probe.safetensors"

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.directory.resolve().name

    def locate(self, path: str | Path) -> Path:
        """Find a path of the recipe: from here, else from a folder above the run, as it was started in one of them."""
        places = [Path(path), *(folder / path for folder in self.directory.resolve().parents)]
        return next((place for place in places if os.path.exists(place)), Path(path))  # noqa: PTH110 - of any length

    @property
    def data(self) -> Data:
        """The recipe's part on data, with paths that lead there from the working folder (see :meth:`locate`)."""
        data = self.recipe.data
        named = {name: getattr(data, name) for name in ("train", "val", "test", "root", "labels", "classes")}
        values: dict[str, Any] = {
            name: path if "://" in str(path) else str(self.locate(path))  # an object in a store is the same everywhere
            for name, path in named.items()
            if path is not None
        }
        return replace(data, **values)

    def outside_notice(self, *parts_read: str) -> str:
        """Say what only recipe.json names outside of the working folder, before it is read; empty for nothing.

        Args:
            parts_read: parts of the recipe whose files are read (default: all).
        """
        parts = {part: getattr(self.recipe, part) for part in parts_read or FILE_KEYS}
        values = {f"{name}.{key}": getattr(part, key) for name, part in parts.items() for key in part.from_file}
        return outside_notice("this run", values, self.locate)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.directory / "checkpoints"

    @property
    def weights(self) -> Path:
        """The last weights, once the run has finished."""
        return self.directory / "model.safetensors"

    @property
    def split(self) -> Path:
        """The file of what is held out of the training data."""
        return self.directory / "split.npz"

    @property
    def predictions(self) -> Path:
        """The file of the trained weights' predictions for each validation image, once the run has finished."""
        return self.directory / "predictions.csv"

    @property
    def maps(self) -> Path:
        """The file of pictures of the worst mistakes under heat maps, where these were made."""
        return self.directory / "best.maps.json"

    def events(self, rank: int = 0) -> Iterator[Event]:
        """Yield every event that one rank wrote, oldest first, also while the run goes on."""
        return read(self.log_path(rank))

    def log_path(self, rank: int = 0) -> Path:
        """The event log of one rank."""
        return self.directory / (f"events-{rank}.jsonl" if rank else "events.jsonl")

    def ranks(self) -> list[int]:
        """List the ranks that have an event log; 0 always does."""
        numbers = (path.stem.partition("-")[2] for path in self.directory.glob("events-*.jsonl"))
        return [0, *sorted(int(number) for number in numbers if number.isdecimal() and int(number))]

    def log(self, rank: int = 0, attempt: int | None = None) -> EventLog:
        """Open the log for a new attempt, numbered ``attempt``, or after the ones already in it."""
        return EventLog(self.log_path(rank), self.progress().attempt + 1 if attempt is None else attempt, rank)

    def log_beside(self) -> EventLog:
        """Open the log for what is measured while nobody trains: its events have attempt 0, which is none."""
        return EventLog(self.log_path(), 0)

    def add_to_account(self, seconds: float) -> None:
        """Add what was measured after the run's end, for its report, to its account. Raises StorageError."""
        progress = self.progress()
        if (account := progress.accounted) is not None:
            # The end came after the account; later events may be of days later, of what was measured then.
            rest = 0.0 if progress.ended is None else max(0.0, progress.ended.time - account.time)
            added, wall = {"measuring": seconds, "other": rest}, account.wall_seconds + rest + seconds
            buckets = {**account.seconds, **{name: account.seconds.get(name, 0.0) + s for name, s in added.items()}}
            with self.log(attempt=progress.attempt) as log:
                log.append(structs.replace(account, seconds=buckets, wall_seconds=wall))

    def finished(self) -> Ended | None:
        """Return the event that ended the run for good, or None if it is still to be finished."""
        return self.progress().finished

    def progress(self) -> RunProgress:
        """Return how far the run has come; reads only what was written since the last call."""
        generation = self._reader.generation
        for chunk in itertools.chain(self._reader.chunks(), [[]]):
            if generation != self._reader.generation:  # the log was replaced, or is gone
                generation = self._reader.generation
                vars(self._progress).update(vars(RunProgress()))
            for event, following in itertools.zip_longest(chunk, chunk[1:]):
                if not (type(event) is type(following) is Step and event.attempt == following.attempt):
                    self._progress.take(event)  # of updates in a row the newest says it all
        return replace(self._progress)

    @contextlib.contextmanager
    def gone_if_refused(self) -> Iterator[None]:
        """Remove a new run's folder where the block is refused before training starts: nothing in it is of use."""
        try:
            yield
        except InputError:
            with contextlib.suppress(OSError, SteadyError):
                names = {re.sub(r"events-\d+", "events", path.name) for path in self.directory.iterdir()}
                if self.is_new and names <= UNSTARTED and self.progress().started is None:
                    shutil.rmtree(self.directory)
                    if self.name.startswith(REPEAT):
                        self.directory.parent.rmdir()  # of repeats, once it is empty
            raise

    def refuse_links(self) -> None:
        """Raise RunError where a checkpoint is a link, or what lies in it: it may lead out of the run's folder."""
        for place in (self.checkpoints, *self.checkpoints.glob("*"), *self.checkpoints.glob("*/*")):
            refuse_link(place)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the run for this process; the system lets go of it however the process ends.

        Yields False on a file system without locks: nothing then keeps another process from holding it as well.

        Raises:
            RunError: another process holds it (its id is named), or the lock or a checkpoint is a link.
            StorageError: the directory cannot be written.
        """
        path = self.directory / "lock"
        self.refuse_links()
        with contextlib.ExitStack() as stack:
            with storage_errors(path):
                refuse_link(path)
                names = count_names(path)
                file = stack.enter_context(open_lock(path))
                if not lock_at_once(file):
                    started = self.progress().started
                    host = started.machine.get("host") if started else None
                    where = "" if host in (None, platform.node()) else f" on {host}"
                    raise RunError(
                        f"{self.directory} is in use by process {self.holder() or 'unknown'}{where}: wait for it, stop"
                        " it, or choose another --run folder"
                    )
                is_sure = lock_surely(file)
                if is_sure and names > 1:  # a backup of hard links stays as it is
                    with replacing(path) as part:
                        file = stack.enter_context(open_lock(part))
                        lock_at_once(file)
                if is_sure or names < 2:
                    os.ftruncate(file.fileno(), 0)
                    os.write(file.fileno(), str(os.getpid()).encode())
                if is_sure:
                    remove_left(self.directory)
                    self._keep_own_logs()
            yield is_sure

    def _keep_own_logs(self) -> None:
        """Copy the logs that have other names as well: a backup of hard links would change with them."""
        for log in self.directory.glob("events*.jsonl"):
            if not log.is_symlink() and count_names(log) > 1:
                with replacing(log) as part:
                    shutil.copyfile(log, part)

    def is_held(self) -> bool:
        """Return whether a process holds the run now, on a file system whose locks this machine sees; write nothing."""
        try:
            with open_regular(self.directory / "lock") as file:
                return not lock_at_once(file, shared=True)
        except OSError:
            return False

    def holder(self) -> int | None:
        """The id of the process that holds the run, or held it last; None where none ever did."""
        try:
            return int(read_text(self.directory / "lock"))
        except (OSError, ValueError):
            return None
