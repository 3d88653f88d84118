"""Every error that a user can meet, in one tree.

::

    SteadyError                      exit code 1
    ├── InputError (ValueError)      exit code 2: what was given cannot be used
    │   ├── RecipeError              a field, a key or a combination of a recipe
    │   ├── DataError                a folder, a record file, a card, a class list
    │   ├── ModelError               a model's name, weights that do not fit
    │   └── RunError                 a run folder: another recipe, in use, not a run
    └── FailedError (RuntimeError)   exit code 1: it was good when it started
        ├── TooManyBadError          more unreadable images than allowed
        ├── StorageError             disk full, gone; exit code 2 where a place to write to cannot be one
        ├── CheckpointError          nothing intact to resume from
        ├── FeedError                a feed thread could not go on
        ├── DivergedError            the loss is no number any more
        ├── StalledError             exit code 3: nothing moved any more
        └── RankLostError            exit code 4: another rank failed or is gone

A message holds the value, the limit and the remedy, in one line. The command line prints it and
exits with ``exit_code``; it never shows a traceback for one of these.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class SteadyError(Exception):
    """The root of the tree: catch this to catch them all.

    >>> str(DataError("no class in a\\nb.lst"))  # a file's name may have line breaks
    'no class in a b.lst'
    """

    exit_code = 1

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())


class InputError(SteadyError, ValueError):
    """An argument or an input file cannot be used."""

    exit_code = 2


class RecipeError(InputError):
    """A field, a key or a combination of a recipe is wrong."""


class DataError(InputError):
    """A folder, a record file, a card or a class list cannot be used."""


class ModelError(InputError):
    """No such model, or weights that do not fit it."""


class RunError(InputError):
    """A run folder cannot be used: another recipe, in use, or not a run."""


class FailedError(SteadyError, RuntimeError):
    """Something failed while it ran."""


class TooManyBadError(FailedError):
    """More images could not be read than was allowed."""


class StorageError(FailedError):
    """The disk is full, not writable or gone."""


class CheckpointError(FailedError):
    """No intact checkpoint is left."""


class FeedError(FailedError):
    """A thread of the feed could not go on."""


class DivergedError(FailedError):
    """The loss is no number any more."""


class StalledError(FailedError):
    """Nothing has moved for too long: a step, a thread of the feed or another rank hangs."""

    exit_code = 3


class RankLostError(FailedError):
    """Another rank of the run failed, is gone or never came.

    ``says_so``: whether this rank, of those on its machine, is to say so; None: its first one.
    """

    exit_code = 4
    says_so: bool | None = None


def describe_type(value: object) -> str:
    """Name a value's type for a message, with its article.

    >>> describe_type(3), describe_type({}), describe_type(None)
    ('an int', 'a dict', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def did_you_mean(value: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A hint that ends an error message: the nearest of ``choices``, or nothing.

    >>> did_you_mean("resnet5O", ["resnet50", "vgg16"])
    ' Did you mean resnet50?'
    >>> did_you_mean("xyz", ["resnet50"])
    ''
    """
    near = difflib.get_close_matches(value, list(choices), n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(near)}?" if near else ""


WRONG_PLACES = {errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of the system that mean that a path cannot be used: a user's mistake, with its exit code."""


def storage_error(error: OSError, path: Path) -> StorageError:
    """Describe in the user's words what an ``OSError`` on ``path`` means and what to do about it.

    >>> str(storage_error(OSError(errno.ENOSPC, "x"), Path("a/b")))
    'the disk is full at a/b: free some space or choose another folder and run the same command again'
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "your quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        problem = f"{what} at {path}: free some space or choose another folder"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        problem = f"{path} is not writable ({error.strerror}): choose another folder or change its permissions"
    elif error.errno == errno.ENOENT and (gone := [p for p in path.parents if not os.path.lexists(p)]):
        problem = f"cannot write {path}: there is no folder {gone[-1]} any more, or yet: put it there"
    elif error.errno in WRONG_PLACES:
        why = "it is no folder, and one is needed" if error.errno == errno.EEXIST else error.strerror
        problem = f"cannot write {path} ({why}): choose another place"
    else:
        problem = f"cannot write {path} ({error.strerror or error}): fix that"
    failure = StorageError(f"{problem} and run the same command again")
    failure.exit_code = InputError.exit_code if error.errno in WRONG_PLACES else failure.exit_code
    return failure


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise an ``OSError`` of the block as a :class:`StorageError` about ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


@contextmanager
def read_errors(path: object, kind: type[InputError] = DataError) -> Iterator[None]:
    """Raise an ``OSError`` of the block as an error of what was given: ``path`` cannot be read, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror or error}") from error


def first_line(error: BaseException) -> str:
    """The first line of what an error says, with its kind where that alone would say nothing.

    >>> first_line(KeyError("swsh")), first_line(AssertionError()), first_line(ValueError("no such pool.\\nSee ..."))
    ("KeyError: 'swsh'", 'AssertionError', 'no such pool')
    """
    line = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    kind = type(error).__name__
    return f"{kind}: {line}" if isinstance(error, KeyError) else line or kind
