"""Files on their way to a store: made in the cache, then sent one by one, each of them whole or not at all.

What was made and what was sent is noted beside them, so that a kill costs no more than the file that was being sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from steadytrain.data.storage.store import Fault, NoObjectError, Place, Store, faults_words
from steadytrain.errors import DataError, StorageError, storage_error
from steadytrain.format import size as size_words
from steadytrain.machine.facts import cache_folder


class Outgoing:
    """A folder of the cache whose files are made for a place in a store.

    Args:
        uri: of one of the files; the others lie beside it.
    """

    def __init__(self, uri: str) -> None:
        self.place = Place.parse(uri)
        cache = cache_folder()
        if cache is None:
            raise StorageError("this user has no home folder for a cache: set STEADYTRAIN_CACHE to a folder")
        self.folder = cache / "outgoing" / hashlib.sha256(uri.encode()).hexdigest()[:16]
        self.path = self.folder / self.place.name
        self._note = self.folder / ".note.json"

    def uri(self, path: Path) -> str:
        """Return where a file of the folder goes."""
        return str(self.place.sibling(path.name))

    def is_made(self, work: str) -> bool:
        """Tell whether the files of this work are complete, and on their way."""
        return self._read_note().get("work") == work

    def require_free(self, paths: Sequence[Path]) -> None:
        """Refuse to replace objects. Raises DataError where one is there; or what the store says."""
        store = Store(self.place)
        for path in paths:
            with contextlib.suppress(NoObjectError):
                store.stat(self.place.sibling(path.name))
                raise DataError(f"{self.uri(path)} exists: choose another name, or give --force to replace")

    def send(self, work: str, paths: Sequence[Path], say: Callable[[str], None]) -> None:
        """Send files, in this order; those that an earlier process of this work sent are not sent again.

        Raises:
            DataError: the store refuses them.
            StorageError: it does not answer.
        """
        faults: Counter[Fault] = Counter()
        store = Store(self.place, lambda fault: faults.update([fault]))
        note = self._read_note()
        sent: dict[str, str] = note["sent"] if note.get("work") == work else {}
        total = sum(path.stat().st_size for path in paths)
        say(f"sending {len(paths)} files ({size_words(total)}) to {self.place.base}")
        for path in paths:
            target = self.place.sibling(path.name)
            with contextlib.suppress(NoObjectError):
                if sent.get(path.name) and store.stat(target).etag == sent[path.name]:
                    continue
            sent[path.name] = store.write(target, path)
            self._write_note({"work": work, "sent": sent})
        if faults:
            say(f"{self.place.base}: {faults_words(faults)}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def mark_made(self, work: str) -> None:
        """Note that all files of this work are complete."""
        self._write_note({"work": work, "sent": {}})

    def _read_note(self) -> dict[str, Any]:
        try:
            note: dict[str, Any] = json.loads(self._note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return note

    def _write_note(self, note: dict[str, Any]) -> None:
        part = self._note.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(note), encoding="utf-8")
            part.replace(self._note)
        except OSError as error:
            raise storage_error(error, self.folder) from error
