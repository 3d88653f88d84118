"""What has gone into a record file so far, and the card that comes of it."""

from __future__ import annotations

import base64
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from steadytrain.data.packing.encode import Packed, Settings
from steadytrain.data.packing.pixel_stats import PixelCount, mean_and_std
from steadytrain.data.recordio.card import Card, Rejected, digest_of_spots
from steadytrain.data.recordio.writer import RecordWriter, packed, unpacked
from steadytrain.data.sources.filenames import printable
from steadytrain.data.sources.listing import Listing
from steadytrain.errors import DataError

COUNTED_IMAGES = 50_000


class Tally:
    """Goes through a listing file by file: :meth:`next_record`, then :meth:`keep` or :meth:`reject`.

    What has been gone through can be noted, and taken up by the tally of another process.

    Attributes:
        listing: the files.
        num_seen: files gone through.
        every: the pixels of every ``every``-th file are counted: of all of them up to 50,000.
        counts: of pixel values; see :class:`~steadytrain.data.packing.pixel_stats.PixelCount`.
        rejected: files left out.
    """

    def __init__(self, listing: Listing) -> None:
        self.num_seen = 0
        self.every = max(1, -(-len(listing) // COUNTED_IMAGES))
        self.counts = PixelCount().totals()
        self.listing = listing
        self.rejected: list[Rejected] = []
        self._encodings: Counter[str] = Counter()
        self._num_kept = 0
        self._num_counted = 0
        self._colour = False
        # One entry an image, in arrays: a million Python objects would weigh more than the images in flight.
        self._heights, self._widths, self._numbers = array("i"), array("i"), array("q")
        self._noted = (0, 0)  # images and rejected files that stand in notes

    @property
    def is_complete(self) -> bool:
        """Whether every file has been gone through."""
        return self.num_seen == len(self.listing)

    def next_record(self) -> tuple[int, float | list[float]]:
        """Id and label (or labels) of the next file."""
        number = self.num_seen
        self.num_seen += 1
        listing = self.listing
        id_ = len(self._numbers) if listing.ids is None else int(listing.ids[number])
        label = listing.labels[number].tolist()
        return id_, label[0] if isinstance(label, list) and len(label) == 1 else label

    def keep(self, packed: Packed) -> None:
        """Count in an image that was written."""
        self._numbers.append(self.num_seen - 1)
        self._heights.append(packed.height)
        self._widths.append(packed.width)
        self._encodings[packed.format] += 1
        self._num_kept += packed.kept
        self._num_counted += (self.num_seen - 1) % self.every == 0
        self._colour = self._colour or packed.channels == 3

    def reject(self, reason: str) -> Rejected:
        """Count in a file that was left out."""
        self.rejected.append(Rejected(printable(self.listing.names[self.num_seen - 1]), reason))
        return self.rejected[-1]

    def note(self) -> dict[str, Any]:
        """All that has come since the last note, and the totals, as plain data."""
        images, rejected = self._noted
        self._noted = len(self._numbers), len(self.rejected)
        columns = (self._numbers, self._heights, self._widths)
        return {
            "seen": self.num_seen,
            "columns": [packed(column[images:]) for column in columns],
            "rejected": self.rejected[rejected:],
            "encodings": self._encodings,
            "totals": [self._num_kept, self._num_counted, self._colour],
            "counts": base64.b64encode(self.counts.tobytes()).decode(),
        }

    def take_up(self, notes: Sequence[dict[str, Any]]) -> None:
        """Be where the tally was that wrote these notes, all of them and in this order."""
        for note in notes:
            for column, text in zip((self._numbers, self._heights, self._widths), note["columns"], strict=True):
                unpacked(text, column)
            self.rejected += (Rejected(*one) for one in note["rejected"])
        if notes:
            self.num_seen = notes[-1]["seen"]
            self._encodings = Counter(notes[-1]["encodings"])
            self._num_kept, self._num_counted, self._colour = notes[-1]["totals"]
            told = np.frombuffer(base64.b64decode(notes[-1]["counts"]), np.int64)
            self.counts = told.reshape(self.counts.shape).copy()
        self._noted = len(self._numbers), len(self.rejected)

    def card(self, writer: RecordWriter, settings: Settings, *, source: str) -> Card:
        """The card of what has been written."""
        listing = self.listing
        channels = 3 if self._colour else 1
        mean, std = mean_and_std(self.counts, channels=channels)
        return Card(
            classes=listing.classes,
            counts=self.class_counts(),
            num_images=len(self._numbers),
            height=spread(self._heights),
            width=spread(self._widths),
            channels=channels,
            mean=mean,
            std=std,
            stats_images=self._num_counted,
            label_width=1 if listing.labels.ndim == 1 else listing.labels.shape[1],
            label_names=listing.label_names,
            by_class=listing.ids is None,
            kept=self._num_kept,
            encodings=dict(sorted(self._encodings.items())),
            settings=settings.to_dict(),
            bytes=writer.num_bytes,
            digest=writer.digest,
            spots=digest_of_spots(writer.read, writer.num_bytes),
            source=source,
            rejected=tuple(self.rejected),
        )

    @property
    def num_images(self) -> int:
        """Images that were kept."""
        return len(self._numbers)

    def class_counts(self) -> tuple[int, ...]:
        """Images of each class that were kept."""
        if not self.listing.classes:
            return ()
        labels = self.listing.labels[np.frombuffer(self._numbers, np.int64)] if self._numbers else np.empty(0)
        counts = np.bincount(labels.astype(np.int64), minlength=len(self.listing.classes))
        return tuple(counts.tolist())


def require_images(tallies: Sequence[Tally]) -> None:
    """Raise DataError where nothing is left of one split, or a class has lost every image that it had.

    Args:
        tallies: of all that is packed of the split: its shards.
    """
    listing = tallies[0].listing
    where = f" in {listing.split}" if listing.split else ""
    rejected = [one for tally in tallies for one in tally.rejected]
    told = "; ".join(f"{one.name} ({one.reason})" for one in rejected[:5])
    if not all(tally.num_images for tally in tallies):
        raise DataError(f"no image{where} can be used: {told}")
    had = np.sum([tally.listing.counts() for tally in tallies], axis=0)
    has = np.sum([tally.class_counts() for tally in tallies], axis=0)
    lost = [name for name, before, after in zip(listing.classes, had, has, strict=True) if before and not after]
    if lost and listing.split in ("", "train"):
        raise DataError(
            f"no image of class {', '.join(lost[:5])}{where} can be used: {told}. Mend them, or remove the class"
        )


def most_left_out(total: int) -> int:
    """Files of so many that may be left out, where nobody says otherwise: the larger of 1 % and 5."""
    return max(total // 100, 5)


def spread(values: array[int]) -> tuple[int, int, int]:
    """Smallest, median (the lower one of two) and largest of int32 values; zeros where there are none."""
    if not values:
        return 0, 0, 0
    ordered = np.sort(np.frombuffer(values, np.int32))
    return int(ordered[0]), int(ordered[(len(ordered) - 1) // 2]), int(ordered[-1])
