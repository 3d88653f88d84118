"""Files on their way to a store: made in the cache, then sent a few at a time, each of them whole or not at all.

What was made and what was sent is noted beside them, so that a kill costs no more than the files that were being sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from steadytrain.data.storage.store import NoObjectError, ObjectPlace, Store, abort_uploads
from steadytrain.errors import DataError, StorageError, storage_errors
from steadytrain.files import lock_at_once, open_lock, read_table, replace_file
from steadytrain.format import size as size_words
from steadytrain.machine.facts import require_cache_folder

FILES_AT_ONCE = 4  # each of them in parts, as of ``store.PARTS_AT_ONCE``


class Outgoing:
    """A folder of the cache whose files are made for a place in a store.

    ``uri``: of one of the files; the others lie beside it.
    """

    def __init__(self, uri: str) -> None:
        self.place = ObjectPlace.parse(uri)
        self.folder = require_cache_folder() / "outgoing" / hashlib.sha256(uri.encode()).hexdigest()[:16]
        self.path = self.folder / self.place.name
        self._note = self.folder / ".note.json"

    def is_made(self, work: str) -> bool:
        """Return whether the files of this work are complete, and on their way."""
        return read_table(self._note).get("work") == work

    def require_free(self, paths: Sequence[Path]) -> None:
        """Refuse to replace objects. Raises DataError where one is there; or what the store says."""
        store = Store(self.place)
        for path in paths:
            with contextlib.suppress(NoObjectError):
                store.stat(place := self.place.sibling(path.name))
                raise DataError(f"{place} exists: choose another name, or give --force to replace")

    def send(self, work: str, groups: Sequence[Sequence[Path]], say: Callable[[str], None]) -> None:
        """Send files, each group when the one before is there; what an earlier process of this work sent is not resent.

        Raises:
            DataError: the store refuses them.
            StorageError: it does not answer, or another process is sending them.
        """
        with open_lock(self.folder / ".lock") as lock:
            if not lock_at_once(lock):
                raise StorageError(f"another process is sending {self.place}: wait for it, or end it")
            self._send(work, groups, say)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, work: str, groups: Sequence[Sequence[Path]], say: Callable[[str], None]) -> None:
        store = Store(self.place)
        note, noting = read_table(self._note), Lock()
        sent: dict[str, str] = note["sent"] if note.get("work") == work else {}
        paths = [path for group in groups for path in group]
        names = [path.name for path in paths]
        if note.get("begun"):
            abort_uploads(self.place, names, say)  # of the process that was killed
        self._write_note({"work": work, "sent": sent, "begun": True})
        total = sum(path.stat().st_size for path in paths)
        before = f", of which {len(sent)} were sent before" if sent else ""
        say(f"sending {len(paths)} files ({size_words(total)}) to {self.place.base}{before}")

        def send(path: Path) -> None:
            target = self.place.sibling(path.name)
            with contextlib.suppress(NoObjectError):
                if path.name in sent and store.stat(target).etag == sent[path.name]:
                    return
            etag = store.write(target, path)
            with noting:
                sent[path.name] = etag
                self._write_note({"work": work, "sent": sent, "begun": True})

        with ThreadPoolExecutor(FILES_AT_ONCE, "storage") as pool:
            try:
                for group in groups:
                    list(pool.map(send, group))
            except BaseException as error:
                is_interrupted = isinstance(error, KeyboardInterrupt)
                if is_interrupted:
                    store.stop()
                pool.shutdown(cancel_futures=True)
                if is_interrupted:
                    abort_uploads(self.place, names, say)
                raise
        if store.num_repeats:
            abort_uploads(self.place, names, say)  # of ours, that were begun again

    def mark_made(self, work: str) -> None:
        """Note that all files of this work are complete."""
        self._write_note({"work": work, "sent": {}})

    def _write_note(self, note: dict[str, Any]) -> None:
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._note, json.dumps(note))
