"""Hidden folders for what lasts no longer than a command; those that a killed process left are removed."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from steadytrain.errors import storage_errors
from steadytrain.files import held_folder, remove_unheld
from steadytrain.machine.platform import user_id


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """Make ``.NAME.scratch-...`` beside ``path``, and remove it at the end, whatever that is.

    Folders that lead there are made if need be, and removed again where nothing else came into them.

    Raises:
        StorageError: it cannot be made.
    """
    folder = path.parent
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    prefix = f".{path.stem}.scratch-"
    try:
        with ExitStack() as stack:
            with storage_errors(path):
                for left in folder.glob(f"{glob.escape(prefix)}*"):
                    with suppress(OSError):  # gone meanwhile
                        if left.lstat().st_uid == user_id():  # in /tmp there may be those of other users
                            remove_unheld(left)
                scratch = None
                while scratch is None:
                    folder.mkdir(parents=True, exist_ok=True)
                    try:
                        scratch = stack.enter_context(held_folder(folder, prefix))
                    except FileNotFoundError:
                        if (
                            folder.exists()
                        ):  # and takes none, such as /proc; else another process has removed it just now
                            raise
            yield scratch
    finally:
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()


def temporary_scratch() -> AbstractContextManager[Path]:
    """Make such a folder among the temporary files (``TMPDIR``)."""
    return scratch_beside(Path(tempfile.gettempdir()) / "steadytrain")


def new_path(scratch: Path, name: str) -> Path:
    """Return a path in a scratch folder, made if need be, that ends in ``name`` and is no other file's."""
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch / f"{len(list(scratch.iterdir()))}-{name}"
