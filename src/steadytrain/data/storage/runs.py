"""A run kept in a store: its folder is sent in the background, seen whole or not at all, and fetched elsewhere.

Beside the files lies ``uploaded.json``, which names them with their bytes. It is written last, in one request, and only
if nobody else wrote it meanwhile: a reader takes what it names, and nothing else. What it no longer names is removed
after it was written. A log may grow meanwhile: its first bytes are what was named. Any other file that has changed gets
another key, so that the one that is named stays until the next ``uploaded.json`` is there, also after a kill.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from steadytrain.config import Recipe
from steadytrain.data.storage.store import WRITE_BYTES, ChangedError, NoObjectError, ObjectPlace, Store
from steadytrain.errors import DataError, RecipeError, RunError, SteadyError, StorageError, storage_error
from steadytrain.files import create, locked

MANIFEST = "uploaded.json"
KIND = "steadytrain.uploaded"


@dataclass(frozen=True)
class Uploaded:
    """A file in a store: its bytes, its key in the folder, and its ETag, empty for a log, which grows."""

    bytes: int
    key: str
    etag: str


@dataclass(frozen=True)
class Manifest:
    """The files of a folder in a store, by name; ``etag`` is of the manifest itself, empty where there is none."""

    files: dict[str, Uploaded] = field(default_factory=dict)
    etag: str = ""

    def to_json(self) -> bytes:
        files = {name: asdict(file) for name, file in self.files.items()}
        return json.dumps({"kind": KIND, "version": 1, "files": files}, indent=1).encode()


def read_manifest(uri: str) -> Manifest:
    """Read what a folder in a store holds; nothing, where there is no such folder.

    Raises:
        DataError: it is none that was uploaded, or is refused.
        StorageError: the store does not answer.
    """
    place = ObjectPlace.folder(uri)
    try:
        data, facts = Store(place).read(place.inside(MANIFEST))
    except NoObjectError:
        return Manifest()
    try:
        content = json.loads(bytes(data))
        if content["kind"] != KIND:
            raise ValueError("of another kind")
        files = {name: Uploaded(int(f["bytes"]), str(f["key"]), str(f["etag"])) for name, f in content["files"].items()}
        return Manifest(files, facts.etag)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{place}{MANIFEST} is damaged, or was not written by steadytrain ({error})") from error


def fetch_folder(uri: str, folder: Path) -> Manifest:
    """Fetch what was uploaded into a new folder, which appears when all is in it.

    Raises:
        DataError: there is nothing.
        StorageError: the store does not answer, or the disk is full.
    """
    place = ObjectPlace.folder(uri)
    store = Store(place)
    part = folder.with_name(f".{folder.name}.fetched")
    if part.is_symlink():  # not ours: what is fetched would be written where it leads
        part.unlink()
    for _ in range(5):  # a newer one may be uploaded meanwhile, which removes files of this one
        manifest = read_manifest(uri)
        if not manifest.files:
            raise DataError(f"there is no run at {uri}: nothing was uploaded there")
        try:
            for name, file in manifest.files.items():
                path = part / name
                if not path.resolve().is_relative_to(part.resolve()):
                    raise DataError(f"{place}{MANIFEST} names {name}, a place outside of the folder")
                path.parent.mkdir(parents=True, exist_ok=True)
                _fetch_file(store, place.inside(file.key), path, file)
            for path in sorted(part.rglob("*"), reverse=True):  # of another checkpoint, where this is another attempt
                if path.is_file() and path.relative_to(part).as_posix() not in manifest.files:
                    path.unlink()
                elif path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
            folder.parent.mkdir(parents=True, exist_ok=True)
            part.replace(folder)
        except OSError as error:
            raise storage_error(error, folder) from error
        except (NoObjectError, ChangedError):
            continue
        return manifest
    raise StorageError(f"{uri} was uploaded again each time that it was fetched: run the same command again")


def _fetch_file(store: Store, place: ObjectPlace, path: Path, file: Uploaded) -> None:
    """Fetch an object in parts, or the beginning of one that grows."""
    with create(path) as out:
        for start in range(0, file.bytes, WRITE_BYTES):
            data, facts = store.read(place, start, min(start + WRITE_BYTES, file.bytes))
            if file.etag and (facts.etag, facts.size) != (file.etag, file.bytes):
                raise ChangedError(f"{place} has changed since it was uploaded")
            out.write(data)
    if path.stat().st_size != file.bytes:
        raise ChangedError(f"{place} has {path.stat().st_size:,} bytes and should have {file.bytes:,}")


class FolderUpload:
    """Sends a folder to a store whenever asked, in a thread of its own. Use it as a context manager.

    Args:
        folder: of files that appear whole, and then only grow or go.
        uri: where to.
        say: takes a line when sending fails, and when it works again.

    Raises:
        DataError, StorageError: what is there cannot be read.
    """

    def __init__(self, folder: Path, uri: str, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.uri = uri
        self.say = say
        self.error: SteadyError | None = None
        self._place = ObjectPlace.folder(uri)
        self._store = Store(self._place)
        self._sent: dict[str, tuple[tuple[int, int], Uploaded]] = {}
        self._links: set[Path] = set()
        self._manifest = read_manifest(uri)
        self._asked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Send what has changed, soon; while it is being sent, once more after that."""
        self._asked.set()

    def close(self) -> None:
        """Send what has changed since, and end the thread.

        Raises:
            StorageError, DataError: not all could be sent; what was sent before is whole.
        """
        self._closed = True
        self._asked.set()
        self._thread.join()
        if self.error is not None:
            raise type(self.error)(f"{self.folder} is complete, but not all of it at {self.uri}: {self.error}")

    def _work(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            is_last = self._closed
            before, self.error = self.error, None
            try:
                self._send()
            except SteadyError as error:
                self.error = error
            except OSError as error:
                self.error = storage_error(error, self.folder)
            if self.error is not None and before is None:
                self.say(f"not uploaded: {self.error} (it is tried again with the next checkpoint)")
            elif self.error is None and before is not None:
                self.say(f"uploaded to {self.uri} again")
            if is_last:
                return

    def _send(self) -> None:
        """Send new and grown files, then the manifest; then remove what it no longer names."""
        for _ in range(3):
            files = self._files()
            try:
                sent = {name: self._send_file(name, *state) for name, state in files.items()}
                break
            except FileNotFoundError:  # a checkpoint was removed meanwhile: there is a newer one; or a file changed
                continue
        else:
            if self._closed:
                raise StorageError(f"files of {self.folder} changed while they were sent: run the same command again")
            return  # with the next checkpoint
        etag = self._store.write(self._place.inside(MANIFEST), Manifest(sent).to_json(), replaces=self._manifest.etag)
        before, self._manifest = self._manifest, Manifest(sent, etag)
        for key in sorted({file.key for file in before.files.values()} - {file.key for file in sent.values()}):
            self._store.remove(self._place.inside(key))

    def _send_file(self, name: str, size: int, time: int) -> Uploaded:
        """Send a file, unless it is there as it is. Raises FileNotFoundError where it is gone, or another by now."""
        there = self._manifest.files.get(name)
        if (before := self._sent.get(name)) is not None and before[0] == (size, time):
            return before[1]
        is_log = name.endswith(".jsonl")
        key = f"{name}~" if there is not None and there.key == name and not is_log else name
        etag = self._store.write(self._place.inside(key), self.folder / name)
        stat = (self.folder / name).stat()
        if not is_log and (stat.st_size, stat.st_mtime_ns) != (size, time):
            raise FileNotFoundError(name)
        uploaded = Uploaded(size, key, "" if is_log else etag)
        self._sent[name] = (size, time), uploaded
        return uploaded

    def _files(self) -> dict[str, tuple[int, int]]:
        """List what there is to send: name -> bytes and time. Hidden files, locks and links stay."""
        files: dict[str, tuple[int, int]] = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            if any(part.startswith(".") for part in name.parts) or name.name == "lock":
                continue
            if path.is_symlink():
                if name not in self._links:
                    self._links.add(name)
                    self.say(f"{path} is a link to {path.readlink()}: not uploaded")
            elif path.is_file() and path.resolve().is_relative_to(self.folder.resolve()):
                stat = path.stat()
                files[name.as_posix()] = stat.st_size, stat.st_mtime_ns
        return files


def upload_notice(recipe: Recipe) -> str:
    """Say where a run is uploaded to, or why it is not where its recipe asks for it; empty where it does not."""
    uri = recipe.every.upload
    if uri is None:
        return ""
    if "upload" in recipe.every.from_file:
        return (
            f"not uploaded to {uri}: a file asks for it (every.upload), and this command does not; to upload there, add"
            f" --set every.upload={uri}"
        )
    return f"also kept at {uri}: uploaded after each checkpoint"


def require_same_run(folder: Path, recipe: Recipe, uri: str) -> None:
    """Refuse to upload a run over another one, or over a later state of itself.

    Raises:
        RunError: it would be.
        DataError, StorageError: what is there cannot be read.
    """
    manifest = read_manifest(uri)
    if not manifest.files:
        return
    place = ObjectPlace.folder(uri)
    if "recipe.json" not in manifest.files:
        raise RunError(f"at {uri} is something else than a run: choose another URI")
    text = bytes(Store(place).read(place.inside(manifest.files["recipe.json"].key))[0]).decode("utf-8", "replace")
    try:
        differences = Recipe.from_json(text).differences(recipe)
    except RecipeError as error:
        raise RunError(f"the recipe of the run at {uri} cannot be used: {error}") from error
    if changes := [change for change in differences if not change.startswith(("parallel.", "every."))]:
        raise RunError(f"at {uri} is a run of another recipe ({'; '.join(changes)}): choose another URI")
    there = newest_step(manifest.files)
    local = newest_step(path.relative_to(folder).as_posix() for path in folder.glob("checkpoints/step-*/*"))
    if there > local:
        raise RunError(
            f"the run at {uri} has come to step {there:,}, and {folder} to step {local:,}: rename {folder}, and run"
            f" steady resume {uri}"
        )


def newest_step(names: Iterable[str]) -> int:
    """Return the step of the newest checkpoint among some files of a run; 0 without any."""
    steps = (re.match(r"checkpoints/step-(\d+)/", name) for name in names)
    return max((int(match[1]) for match in steps if match), default=0)


def local_run(uri: str, say: Callable[[str], None]) -> Path:
    """Return the folder on this machine of a run that is kept at a URI: ``runs/NAME``, fetched if it is not here yet.

    Any number of processes may ask at once.

    Raises:
        DataError, StorageError: it cannot be fetched.
    """
    folder = Path("runs") / ObjectPlace.folder(uri).name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists() and read_manifest(uri).files:
            say(f"fetching the run at {uri} into {folder}")
            fetch_folder(uri, folder)
    return folder
