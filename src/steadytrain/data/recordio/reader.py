"""Read a ``.rec``, or several as one set: images by number, and columns for labels and ids.

Reads need no lock and no file position, so any number of threads may share one :class:`Records`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.recordio.card import Card, together
from steadytrain.data.recordio.extents import Extents, of_files
from steadytrain.data.recordio.record_file import RecordFile
from steadytrain.data.recordio.shards import record_files
from steadytrain.errors import DataError

MOST_CLASSES = 1_000_000

_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")


class Records:
    """The images of one ``.rec`` or of several, by number. Make one with :meth:`open`; close it, or use it as a context
    manager.

    ``len(records)`` is the number of images; number i is the i-th in the file, and the files follow each other. Views
    that :meth:`image` gave stay good after :meth:`close`: the map lives as long as the last of them.

    >>> import tempfile
    >>> from steadytrain.data.recordio.framing import pack_header
    >>> from steadytrain.data.recordio.writer import RecordWriter
    >>> path = Path(tempfile.mkdtemp()) / "two.rec"
    >>> with RecordWriter(path) as writer:
    ...     for i in range(2):
    ...         writer.write(pack_header(i, id=10 + i) + b"not an image", key=10 + i)
    >>> with Records.open(path) as records:
    ...     print(len(records), bytes(records.image(1)), records.labels, records.record_ids, records.classes)
    2 b'not an image' [0 1] [10 11] ('0', '1')
    """

    def __init__(self, path: Path, files: Sequence[RecordFile]) -> None:
        self.path = path
        self._place = path.absolute()  # whoever opens it again may stand elsewhere
        self.card = _card(files)
        self._files = tuple(files)
        self._starts = [0, *accumulate(map(len, files))]

    @staticmethod
    def open(path: str | Path) -> Records:
        """Open a ``.rec`` by its ``.idx``, or by scanning where there is none.

        Args:
            path: of the file; or of several, as ``OUT-{00000..00003}-of-00004.rec`` or ``OUT-*.rec``.

        Raises:
            DataError: no such file, not a record file, cut short, an index or a card of another file, or several files
                with different classes.
        """
        files: list[RecordFile] = []
        try:
            for one in record_files(path):
                files.append(RecordFile.open(one))
            return Records(Path(path), files)
        except BaseException:
            for file in files:
                file.close()
            raise

    def __reduce__(self) -> tuple[Callable[[Path], Records], tuple[Path]]:
        """Pickled, it is opened anew where it arrives."""
        return Records.open, (self._place,)

    def __len__(self) -> int:
        return self._starts[-1]

    def image(self, number: int) -> memoryview:
        """The encoded image of record ``number``, 0 to ``len(self) - 1``: a view, not a copy, unless it lies in parts.

        Raises:
            IndexError: there is no such record.
            DataError: the file is damaged there, or closed.
        """
        if len(self._files) == 1:
            return self._files[0].image(number)
        if not 0 <= number < len(self):
            raise IndexError(f"record {number} of {self.path}, which has {len(self)}")
        at = bisect_right(self._starts, number) - 1
        return self._files[at].image(number - self._starts[at])

    def scatter(self) -> None:
        """Tell the system that records are read in no order, and asked for by whoever reads them."""
        _ = self.labels  # they may lie all over the file, and are read in its order
        for file in self._files:
            file.scatter()

    def settle(self, numbers: NDArray[np.int64]) -> None:
        """Wait for what :meth:`image` looks at of some records, int64[n], without holding the interpreter's lock."""
        if len(self._files) == 1:
            self._files[0].settle(numbers)
            return
        files = np.searchsorted(self._starts, numbers, side="right") - 1
        for at in np.unique(files).tolist():
            self._files[at].settle(numbers[files == at] - self._starts[at])

    def extents(self, numbers: NDArray[np.int64]) -> Extents:
        """Where the records ``numbers``, int64[n], lie on disk."""
        parts = [(str(file.path), *file.extents) for file in self._files]
        return of_files(parts, self._starts, numbers)

    @cached_property
    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """int64[N] class numbers; float32[N, L] where a record has several labels, or one that is no class number.

        Raises:
            DataError: records differ in how many labels they have, one is beyond the card's classes, or a header is
                damaged.
        """
        parts = [file.labels for file in self._files]
        if len({part.shape[1:] for part in parts}) > 1:
            raise DataError(f"{self.path}: some of its files have labels of another kind: give them one by one")
        labels: NDArray[np.int64] | NDArray[np.float32] = parts[0] if len(parts) == 1 else _joined(parts)
        labels.setflags(write=False)  # one array serves every reader
        return labels

    @cached_property
    def record_ids(self) -> NDArray[np.int64]:
        """int64[N]: the id in each record's header; of several files whose ids meet, the images' numbers."""
        parts = [file.record_ids for file in self._files]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(parts) > 1 and len(np.unique(ids)) < len(ids):
            ids = np.arange(len(ids))
        ids.setflags(write=False)
        return ids

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The card's class names; without a card "0" to the largest label; nothing for label vectors."""
        if self.card is not None:
            return self.card.classes
        if self.labels.ndim > 1:
            return ()
        largest = int(self.labels.max(initial=0))
        if largest >= MOST_CLASSES:
            raise DataError(f"{self.path}: labels run up to {largest:,}; {MOST_CLASSES:,} classes are the most")
        return tuple(str(number) for number in range(largest + 1))

    @cached_property
    def channels(self) -> int:
        """1 when the images are grey, else 3: the card's word, or that of a few images spread over the file."""
        if self.card is not None:
            return self.card.channels
        few = [mode for file in self._files for mode, _ in file.few]
        return 1 if few and all(mode in _GREY for mode in few) else 3

    @cached_property
    def largest_side(self) -> int:
        """Pixels of the longest side: the card's word, or that of a few images spread over the file."""
        if self.card is not None:
            return max(self.card.height[2], self.card.width[2])
        return max((side for file in self._files for _, side in file.few), default=0)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the file: the card's, or computed when it is first asked for; of several, that of theirs."""
        digests = [file.digest for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def close(self) -> None:
        """Let go of the files; closing twice is fine."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _card(files: Sequence[RecordFile]) -> Card | None:
    """One card for all. Raises DataError where their classes differ."""
    cards = [file.card for file in files if file.card is not None]
    if not cards:
        return None
    if len(cards) < len(files):
        without = next(file.path for file in files if file.card is None)
        raise DataError(f"{without} has no card, and others have: pack it again, or read it alone")
    first = files[0]
    for file, card in zip(files, cards, strict=True):
        if card.classes != cards[0].classes:
            raise DataError(
                f"{file.path} has other classes than {first.path}: pack it again with --classes"
                f" {first.path.with_suffix('.json')}, or pack both into one: steady pack {first.path} {file.path} OUT"
            )
    return together(cards)


def _joined(parts: Sequence[Any]) -> NDArray[np.int64] | NDArray[np.float32]:
    joined: NDArray[np.int64] | NDArray[np.float32] = np.concatenate(parts)
    return joined
