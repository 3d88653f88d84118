"""What has gone into a record file so far, and the card that comes of it."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np

from steadytrain.errors import DataError
from steadytrain.records.card import Card, Rejected
from steadytrain.records.encode import Packed, Settings
from steadytrain.records.listing import Listing, shown
from steadytrain.records.stats import PixelCount, mean_and_std
from steadytrain.records.writer import RecordWriter

COUNTED_IMAGES = 50_000


class Tally:
    """Goes through a listing file by file: :meth:`next_record`, then :meth:`keep` or :meth:`reject`.

    Attributes:
        num_seen: files gone through.
        every: the pixels of every ``every``-th file are counted: of all of them up to 50,000.
        counts: of pixel values; see :class:`~steadytrain.records.stats.PixelCount`.
    """

    def __init__(self, listing: Listing) -> None:
        self.num_seen = 0
        self.every = max(1, -(-len(listing) // COUNTED_IMAGES))
        self.counts = PixelCount().totals()
        self._listing = listing
        self._rejected: list[Rejected] = []
        self._encodings: Counter[str] = Counter()
        self._num_kept = 0
        self._num_counted = 0
        self._colour = False
        # One entry an image, in arrays: a million Python objects would weigh more than the images in flight.
        self._heights, self._widths, self._numbers = array("i"), array("i"), array("q")

    @property
    def is_complete(self) -> bool:
        """Whether every file has been gone through."""
        return self.num_seen == len(self._listing)

    def next_record(self) -> tuple[str, int, float | list[float]]:
        """Name, id and label (or labels) of the next file."""
        number = self.num_seen
        self.num_seen += 1
        listing = self._listing
        id_ = len(self._numbers) if listing.ids is None else int(listing.ids[number])
        label = listing.labels[number].tolist()
        return listing.names[number], id_, label[0] if isinstance(label, list) and len(label) == 1 else label

    def keep(self, packed: Packed) -> None:
        """Count in an image that was written."""
        self._numbers.append(self.num_seen - 1)
        self._heights.append(packed.height)
        self._widths.append(packed.width)
        self._encodings[packed.format] += 1
        self._num_kept += packed.kept
        self._num_counted += (self.num_seen - 1) % self.every == 0
        self._colour = self._colour or packed.channels == 3

    def reject(self, name: str, reason: str) -> Rejected:
        """Count in a file that was left out."""
        self._rejected.append(Rejected(shown(name), reason))
        return self._rejected[-1]

    def require_images(self) -> None:
        """Raise DataError where nothing is left, or a class has lost every image that it had."""
        listing = self._listing
        where = f" in {listing.split}" if listing.split else ""
        told = "; ".join(f"{one.name} ({one.reason})" for one in self._rejected[:5])
        if not self._numbers:
            raise DataError(f"no image{where} can be used: {told}")
        lost = [
            name
            for name, had, has in zip(listing.classes, listing.counts(), self._class_counts(), strict=True)
            if had and not has
        ]
        if lost and listing.split in ("", "train"):
            raise DataError(
                f"no image of class {', '.join(lost[:5])}{where} can be used: {told}. Mend them, or remove the class"
            )

    def card(self, writer: RecordWriter, settings: Settings, *, source: str) -> Card:
        """The card of what has been written."""
        listing = self._listing
        channels = 3 if self._colour else 1
        mean, std = mean_and_std(self.counts, channels=channels)
        return Card(
            classes=listing.classes,
            counts=self._class_counts(),
            num_images=len(self._numbers),
            height=_spread(self._heights),
            width=_spread(self._widths),
            channels=channels,
            mean=mean,
            std=std,
            stats_images=self._num_counted,
            label_width=1 if listing.labels.ndim == 1 else listing.labels.shape[1],
            by_class=listing.ids is None,
            kept=self._num_kept,
            encodings=dict(sorted(self._encodings.items())),
            settings=settings.to_dict(),
            bytes=writer.num_bytes,
            digest=writer.digest,
            source=source,
            rejected=tuple(self._rejected),
        )

    def _class_counts(self) -> tuple[int, ...]:
        if not self._listing.classes:
            return ()
        labels = self._listing.labels[np.frombuffer(self._numbers, np.int64)] if self._numbers else np.empty(0)
        counts = np.bincount(labels.astype(np.int64), minlength=len(self._listing.classes))
        return tuple(counts.tolist())


def _spread(values: array[int]) -> tuple[int, int, int]:
    """Smallest, median (the lower one of two) and largest."""
    ordered = np.sort(np.frombuffer(values, np.int32))
    return int(ordered[0]), int(ordered[(len(ordered) - 1) // 2]), int(ordered[-1])
