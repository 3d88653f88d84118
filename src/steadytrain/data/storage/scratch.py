"""Hidden folders for what lasts no longer than a command; those that a killed process left are removed."""

from __future__ import annotations

import errno
import glob
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from steadytrain.errors import storage_errors
from steadytrain.files import lock_at_once, lock_surely
from steadytrain.machine.platform import opened_folder, user_id


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
    with ExitStack() as stack:
        with storage_errors(path):
            for left in folder.glob(f"{glob.escape(prefix)}*"):
                with suppress(OSError), _locked(left, lock_surely) as owner:  # another process holds it
                    if owner == user_id():  # in /tmp there may be those of other users
                        shutil.rmtree(left, ignore_errors=True)
            scratch = stack.enter_context(_locked_folder(folder, prefix))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
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


@contextmanager
def _locked_folder(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a folder that this process holds. Raises OSError: it cannot be made."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)  # another process may have made it, and removed it just now
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        with ExitStack() as stack:
            try:
                stack.enter_context(_locked(scratch))
            except (FileNotFoundError, BlockingIOError):
                continue  # before it was locked, another process took it for one that a kill has left
            if scratch.exists():
                yield scratch
                return


@contextmanager
def _locked(folder: Path, lock: Callable[[int], bool] = lock_at_once) -> Iterator[int]:
    """Lock a folder; yield its owner. Raises OSError where another process holds it, or it is no folder."""
    with opened_folder(folder) as file:
        if not lock(file):
            raise BlockingIOError(errno.EAGAIN, "another process holds it", str(folder))
        yield folder.lstat().st_uid
