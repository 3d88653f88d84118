"""Which files of a working directory go to other machines: all but history, results, caches and secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

NEVER = (
    *(".git", ".hg", ".svn", "runs", "launch", "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".tox"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store"),
)
"""Not copied: what is history, results of runs, environments and caches."""

SECRET = (
    *(".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_*", ".ssh", ".aws", ".azure", ".gnupg"),
    *(".kube", ".docker", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd", "kaggle.json"),
    *("credentials", "credentials.*", "*credentials.json", "secrets", "secrets.*", "*.tfstate"),
)
"""Not copied, and told: what usually holds keys or passwords. Nor is a file that begins as a private key does."""

_HEAD_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Files to copy, by their names from the folder, their bytes, and the files and folders left out as secret."""

    files: tuple[str, ...]
    bytes: int
    secret: tuple[str, ...]


def choose(folder: Path, exclude: Sequence[str] = ()) -> Chosen:
    """The files below a folder that go to other machines. Links stay links; what is neither file nor link is left out.

    Args:
        exclude: names, or paths from the folder, with ``*`` and ``?``.
    """
    files, secret, total = [], [], 0
    for entry, name in _below(folder, "", exclude):
        if _is(entry.name, name, SECRET) or _is_key(entry):
            secret.append(name)
        elif entry.is_symlink() or entry.is_file():
            files.append(name)
            total += entry.stat(follow_symlinks=False).st_size
    return Chosen(files=tuple(files), bytes=total, secret=tuple(secret))


def _below(folder: Path, inside: str, exclude: Sequence[str]) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Files, links, and folders that are secret, in order of their names."""
    with os.scandir(folder / inside) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{inside}{entry.name}"
        if _is(entry.name, name, (*NEVER, *exclude)):
            continue
        if entry.is_dir(follow_symlinks=False) and not _is(entry.name, name, SECRET):
            yield from _below(folder, f"{name}/", exclude)
        else:
            yield entry, name


def _is(name: str, path: str, patterns: Sequence[str]) -> bool:
    bare = [pattern.rstrip("/").removeprefix("./") for pattern in patterns]
    return any(fnmatchcase(name, one) or fnmatchcase(path, one) for one in bare)


def _is_key(entry: os.DirEntry[str]) -> bool:
    if entry.is_symlink() or not entry.is_file():
        return False
    try:
        with Path(entry).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False  # copying says what is wrong with it
    return head.startswith(b"-----BEGIN ") and b"PRIVATE KEY-----" in head
