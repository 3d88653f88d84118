"""Locks of files: one holder alone, or several that share; they fall with the file."""

from __future__ import annotations

from pathlib import Path

from steadytrain.files import lock, lock_at_once, locked, unlock


def test_a_lock_is_one_holders_or_shared_and_falls_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path), path.open("rb") as other:
        assert not lock_at_once(other)
        assert not lock_at_once(other, shared=True)
    with locked(path, shared=True), path.open("rb") as other:
        assert lock_at_once(other, shared=True)
        assert not lock_at_once(other)
    with path.open("rb") as first, path.open("rb") as second:
        lock(first)
        assert not lock_at_once(second)
        unlock(first)
        assert lock_at_once(second)
