"""The images that a run holds out of its training data: chosen once, whole groups, and kept in the run."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from steadytrain.config import Data
from steadytrain.data.arrays import Ints
from steadytrain.data.recordio.hashes import find_shared
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import find
from steadytrain.data.sources.groups import group_images, group_keys, is_column, make_hashes
from steadytrain.data.sources.select import split_by_fraction
from steadytrain.data.storage.scratch import temporary_scratch
from steadytrain.data.storage.sources import local_sources
from steadytrain.errors import DataError, SteadyError, storage_errors
from steadytrain.files import replacing
from steadytrain.format import Say, few, printable
from steadytrain.run import Run

_EARLIER_SHARE = 0.1  # share of each class, that earlier versions held out by default
_MOST_BYTES = 1 << 28  # bytes of records whose images are decoded for no more than a remark


@dataclass(frozen=True)
class Split:
    """Record numbers to train on and those held out, int64, and the group of each record; None: all stand alone."""

    train_ids: Ints
    val_ids: Ints
    groups: Ints | None

    @cached_property
    def digest(self) -> str:
        """sha256 (12 hex digits) of the numbers that are held out."""
        return hashlib.sha256(self.val_ids.tobytes()).hexdigest()[:12]


def choose_split(train: Records, data: Data, *, seed: int, run: Run | None, say: Say = lambda line: None) -> Split:
    """Choose what is held out of records, or take what the run has kept; a run that begins keeps it.

    A run that an earlier version began has kept nothing: its split is by class alone.

    Raises:
        DataError: what the run has kept is gone and would be another by now, or ``data.group_by`` does not fit.
        StorageError: it cannot be kept.
    """
    begun = None if run is None else run.progress().started
    token = hashlib.sha256(json.dumps([train.digest, seed, data.holdout, data.group_by]).encode()).hexdigest()
    if run is not None and (found := _read(run.split, token, len(train))) is not None:
        return found
    if begun is not None and begun.data.get("held_out") and "split" not in begun.data:
        share = _EARLIER_SHARE if data.holdout is None else data.holdout
        return Split(*split_by_fraction(train.labels, fraction=share, seed=seed), None)
    groups = find_groups(train, data, say)
    share = data.share_held_out(len(train))
    split = Split(*split_by_fraction(train.labels, fraction=share, seed=seed, sets=groups), groups)
    if run is not None and begun is None:
        _keep(split, run.split, token)
    kept = {} if begun is None or begun.data.get("train_digest") != train.digest else begun.data
    if run is not None and (kept.get("split") or split.digest) != split.digest:
        raise DataError(f"{run.split} is missing or damaged, and other images would be held out now: put it back")
    return split


def _keep(split: Split, path: Path, token: str) -> None:
    groups = np.empty(0, np.int64) if split.groups is None else split.groups
    with storage_errors(path), replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, token=np.array(token), val_ids=split.val_ids, groups=groups)


def _read(path: Path, token: str, n: int) -> Split | None:
    """Read what was kept; None where there is none for these images and settings."""
    with suppress(Exception), np.load(path, allow_pickle=False) as file:  # of a damaged zip: zlib's, struct's and more
        val_ids, groups = file["val_ids"].astype(np.int64), file["groups"].astype(np.int64)
        if str(file["token"]) == token and len(groups) in (0, n):
            is_held_out = np.zeros(n, np.bool_)
            is_held_out[val_ids] = True
            return Split(np.flatnonzero(~is_held_out), val_ids, groups if len(groups) else None)
    return None


def find_groups(train: Records, data: Data, say: Say = lambda line: None, *, makes_hashes: bool = True) -> Ints | None:
    """Group records by their images and by ``data.group_by``: int64 [N]; None where each stands alone.

    ``makes_hashes``: decode all images where their hashes are not known; else copies are not.
    """
    hashes = make_hashes(train) if makes_hashes else train.hashes
    if hashes is None and makes_hashes:
        say("images in a store are compared only where pack has written their hashes (.hashes) beside them")
    keys = None if data.group_by is None else _keys_of(train, data, data.group_by)
    return group_images(hashes, train.labels, keys=keys, name=train.describe, say=say)


def _keys_of(train: Records, data: Data, group_by: str) -> list[str | None]:
    """Return what each record belongs to, by its file's name or by the table that it comes from."""
    if not is_column(group_by) or str(data.train).endswith(".rec"):
        return group_keys(train.names(), train.labels, train.classes, group_by)
    columns = ColumnNames.of(data.path_column, data.label_column, data.split_column, data.zip_names)
    lookup: dict[str, Any] = {"root": data.root, "labels": data.labels, "group": group_by, "columns": columns}
    if train.labels.ndim == 1 and len(np.unique(train.labels)) < 2:  # which is a source only with a list of classes
        lookup["classes"] = train.class_list
    lookup = {name: Path(value) if name in ("root", "labels") and value else value for name, value in lookup.items()}
    with temporary_scratch() as scratch, local_sources([str(data.train)], lambda line: None) as [source]:
        listings = find(source, **lookup, scratch=scratch, say=lambda line: None)
        pairs = (zip(listing.names, listing.groups or (), strict=False) for listing in listings)
        values = {printable(name): group for part in pairs for name, group in part}
    names = list(train.names())
    if lacking := [name for name in names if name not in values]:
        raise DataError(f"--group-by {group_by}: {few(lacking, 3)} of {data.train} have no value in that column")
    return [values[name] for name in names]


def count_seen(records: Records, *others: Records, ids: Ints | None = None) -> int | None:
    """Count images that are among others, ``ids`` of the first or all: of the same file, or stored as the same bytes.

    None where hashes are not known, and would take long to make.
    """
    parts = [make_hashes(part, most_bytes=_MOST_BYTES) for part in (records, *others)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    seen = known[1] if ids is None else known[1][ids]
    return len(find_shared(known[0], np.concatenate([seen, *known[2:]])))


def group_unseen(records: Records, data: Data) -> Ints | None:
    """Group images that are not trained on, as far as their hashes are known; by these alone where no key is found.

    ``data``: names the source of these images as what is trained on.
    """
    for settings in (data, replace(data, group_by=None)):
        with suppress(SteadyError):  # --group-by may fit the training data alone
            return find_groups(records, settings, makes_hashes=False)
    return None


def group_others(folder: Path, records: Records, source: str, **lookup: Any) -> Ints | None:
    """Group images of a source by the settings of the run in a folder, as :func:`group_unseen` does.

    ``lookup``: its root, labels and columns, as the fields of :class:`~steadytrain.config.Data`.
    """
    with suppress(SteadyError):
        return group_unseen(records, replace(Run.open(folder).data, train=source, **lookup))
    return None


def count_trained_on(folder: Path, records: Records) -> int | None:
    """Count images that the run in a folder was trained on, as :func:`count_seen`; None where that is not known."""
    with suppress(SteadyError, LookupError):
        run = Run.open(folder)
        if (begun := run.progress().started) is not None:
            with Records.open(run.locate(begun.data["train"])) as train:
                if train.digest == begun.data["train_digest"]:
                    is_split = begun.data["held_out"]
                    ids = choose_split(train, run.data, seed=run.recipe.seed, run=run).train_ids if is_split else None
                    return count_seen(records, train, ids=ids)
    return None
