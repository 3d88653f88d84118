"""The table: features of each image of a record file by a frozen network, computed once and mapped from the cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steadytrain.data.arrays import Ints
from steadytrain.data.loader import ImageLoader
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import StorageError, storage_errors
from steadytrain.files import lock, lock_at_once, lock_surely, open_lock, replacing, sync
from steadytrain.format import OnProgress, Say, count, print_note
from steadytrain.machine import facts
from steadytrain.machine.platform import pwrite
from steadytrain.training import build
from steadytrain.training.data import load
from steadytrain.training.inference.classifier import classifier_of, features_and_logits, num_features
from steadytrain.training.inference.trained import Trained
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import products

FEATURE_BATCH = 32
"""Images that are sent through the frozen network together, always as many: rounding depends on it."""

UNUSED_SECONDS = 30 * 86400.0
"""A table that nobody has read for so long is removed when another one is made."""

_FLUSH_SECONDS = 2.0
"""Seconds of work that a kill may cost."""

_VALUES, _DONE = "values.f32", "done.u8"


@dataclass(frozen=True)
class FeatureTable:
    """Features of images, as they enter the classifier of a frozen network.

    Args:
        values: float32 [N, D], mapped and read-only: a row for each record of the file, by its number. Rows that were
            not asked for may be zeros.
        path: the folder in the cache that holds them.
        num_computed: images that were sent through the network for this call; the other rows were there already.
    """

    values: NDArray[np.float32]
    path: Path
    num_computed: int = 0


def feature_table(
    trained: Trained,
    records: Records,
    *,
    ids: Ints | None = None,
    threads: int | None = None,
    progress: OnProgress | None = None,
    say: Say = print_note,
) -> FeatureTable:
    """Return the features of all images of a record file, from the cache as far as they are there.

    Images are cropped as for an evaluation. Rows are written as they are computed, so that a pass that was killed goes
    on where it was, and of several processes one computes them; memory does not grow with the number of images.

    Args:
        trained: the network, in evaluation mode; its classifier does not matter.
        records: stay open.
        ids: int64 numbers of the records whose rows are needed; None: all.
        threads: of the loader; None chooses.
        progress: called with the rows done, and all that are needed.
        say: takes a line on what is waited for, or is there already.

    Raises:
        ModelError: the network does not end in one linear layer.
        DataError: an image cannot be read.
        StorageError: the cache cannot be written.
    """
    needed = np.arange(len(records)) if ids is None else np.asarray(ids, np.int64)
    n, head = len(records), classifier_of(trained)
    folder = table_folder(trained, records, head)
    if (table := open_table(folder, n, needed)) is not None:
        say(f"features of {count(len(needed), 'image')} by {trained.title} are in the cache ({folder})")
        return table
    with TableWriter.open(folder, n, num_features(head), say) as writer:
        missing = needed[~writer.done[needed]]
        num_done = len(needed) - len(missing)
        if 0 < num_done < len(needed):
            say(f"features of {num_done:,} of {len(needed):,} images are in the cache already")
        if len(missing):
            feed = trained.feed(records, ids=missing, batch_size=FEATURE_BATCH, threads=threads)
            show = progress or (lambda done, total: None)
            _compute(trained, head, feed, missing, writer, lambda new: show(num_done + new, len(needed)))
    if (table := open_table(folder, n, needed)) is None:
        raise StorageError(f"{folder} was removed while it was used: run the command again")
    return replace(table, num_computed=len(missing))


def _compute(
    trained: Trained,
    head: nn.Module,
    feed: ImageLoader,
    ids: Ints,
    writer: TableWriter,
    show: Callable[[int], object],
) -> None:
    """Send images through the network in batches of one size, and write their rows."""
    limit, first = PassLimit("evaluation", on_halved=lambda halved: None), 0
    show(0)
    with feed, torch.no_grad():
        for batch in load(feed, trained.policy.device):
            images, n = batch.images, len(batch.images)
            if n < FEATURE_BATCH:
                images = torch.cat([images, images[-1:].expand(FEATURE_BATCH - n, *images.shape[1:])])
            values = features_and_logits(head, trained, images, limit)[0][:n]
            writer.write(ids[first : first + n], values.cpu().numpy())
            first += n
            show(first)


def table_folder(trained: Trained, records: Records, head: nn.Module) -> Path:
    """Return where the table of a network and record files lies, named after all that its values depend on.

    Args:
        head: the network's classifier, on which they do not depend.

    Raises:
        StorageError: this user has no home for a cache.
    """
    policy, device = trained.policy, trained.policy.device
    parts = [(name, part) for name, part in trained.module.named_modules(remove_duplicate=False) if part is not head]
    ends = tuple(f"{name}." for name, part in trained.module.named_modules(remove_duplicate=False) if part is head)
    described = [
        *(records.digest, trained.name, FEATURE_BATCH, build.evaluation_crop(trained.input)),
        *(trained.input.mean, trained.input.std, policy.dtype, policy.channels_last, torch.__version__, device.type),
        (torch.cuda.get_device_name(device), products()) if device.type == "cuda" else facts.isa(),
        [(name, type(part).__qualname__, part.extra_repr()) for name, part in parts],
    ]
    digest = hashlib.sha256(repr(described).encode())
    for name, tensor in trained.module.state_dict().items():
        if not name.startswith(ends):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", trained.title)[-40:]
    return facts.require_cache_folder() / "features" / f"{stem}-{digest.hexdigest()[:16]}"


def open_table(folder: Path, num_records: int, ids: Ints) -> FeatureTable | None:
    """Map a table in the cache; None where there is none, or it lacks rows of ``ids``."""
    try:
        done = np.fromfile(folder / _DONE, np.uint8)
        if len(done) != num_records or not done[ids].all():
            return None
        values = np.memmap(folder / _VALUES, np.float32, "r")
    except (OSError, ValueError):
        return None
    if not len(values) or len(values) % num_records:
        return None
    with suppress(OSError):  # a cache that is there to be read only
        os.utime(folder)
    return FeatureTable(values.reshape(num_records, -1), folder)


class TableWriter:
    """Writes rows of a table whose lock this process holds.

    Attributes:
        done: bool [N], the rows that are there.
    """

    def __init__(self, folder: Path, num_records: int, num_columns: int) -> None:
        self._folder, self._row_bytes, self._flushed = folder, 4 * num_columns, time.monotonic()
        table = open_table(folder, num_records, np.zeros(0, np.int64))
        if table is None or table.values.shape[1] != num_columns:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir()
            with (folder / _VALUES).open("wb") as file:
                file.truncate(num_records * self._row_bytes)
            np.zeros(num_records, np.bool_).tofile(folder / _DONE)
        self.done: NDArray[np.bool_] = np.fromfile(folder / _DONE, np.bool_)

    @classmethod
    @contextmanager
    def open(cls, folder: Path, num_records: int, num_columns: int, say: Say | None = None) -> Iterator[Self]:
        """Lock a table and open it for writing, with the rows that an earlier process left. Raises StorageError.

        ``say``: takes a line where another process has to be waited for; None: that raises StorageError.
        """
        with storage_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with open_lock(folder.with_name(f".{folder.name}.lock")) as file:
                if not lock_at_once(file):
                    if say is None:
                        raise StorageError(f"another process writes {folder}")
                    say("another process computes features of these images: waiting for it")
                    lock(file)
                remove_unused(folder.parent)
                writer = cls(folder, num_records, num_columns)
                try:
                    yield writer
                finally:
                    writer.flush()

    def write(self, ids: Ints, values: NDArray[np.float32]) -> None:
        """Write the float32 [B, D] rows of records ``ids``. Raises OSError."""
        with (self._folder / _VALUES).open("r+b", buffering=0) as file:
            for number, row in zip(ids.tolist(), np.ascontiguousarray(values, np.float32), strict=True):
                assert row.nbytes == self._row_bytes
                pwrite(file.fileno(), row.data, self._row_bytes * number)
        self.done[ids] = True
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Put the rows on the disk, then the note which of them are there. Raises OSError, StorageError."""
        sync(self._folder / _VALUES)
        with replacing(self._folder / _DONE) as part:
            self.done.tofile(part)
        self._flushed = time.monotonic()


def remove_unused(place: Path) -> None:
    """Remove tables that nobody has used for :data:`UNUSED_SECONDS`, nor writes now."""
    for folder in place.iterdir():
        with suppress(OSError):
            if not folder.is_dir() or time.time() - folder.stat().st_mtime < UNUSED_SECONDS:
                continue
            with open_lock(folder.with_name(f".{folder.name}.lock")) as file:
                if lock_surely(file):
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)
