"""A source read where it lies, as if it were packed: folders of classes, tar and WebDataset shards, zip, lists, tables.

Images come out as packing would have stored them without loss, by the rule of ``pixels``. What a decoder reads as it
is, such as any upright JPEG, comes out as its file's own bytes; what has an orientation to be turned by becomes bare
pixels. No image is looked at beforehand: one that packing would leave out has a number, and is met when it is its turn.

Single files and members of plain tar and zip archives are read in place. A compressed tar has no places to read from:
it is decompressed once, to the cache, and the copy is removed by :meth:`Unpacked.close`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from steadytrain.config.calls import checked
from steadytrain.data.arrays import Ints
from steadytrain.data.images.decode import orientation, read_header
from steadytrain.data.images.encode import PackSettings, pack_bytes, to_ppm
from steadytrain.data.images.file_types import scan_of
from steadytrain.data.recordio.reader import Extents
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import find_all
from steadytrain.data.sources.listing import Listing, read_file, read_piece
from steadytrain.data.storage.scratch import scratch_beside, temporary_scratch
from steadytrain.data.storage.sources import local_sources
from steadytrain.errors import DataError, StorageError
from steadytrain.files import Closing, open_regular
from steadytrain.format import Say, print_note, printable
from steadytrain.machine.facts import require_cache_folder
from steadytrain.machine.platform import advise

# Of PNG, WebP and AVIF; as a PNG's text; and XMP of any of them.
_EXIF_TAGS = (b"eXIf", b"EXIF", b"Exif", b"exif", b"xmp", b"XMP ")


class Unpacked(Closing):
    """The images of one split of a source, by number.

    Made by :meth:`open`. Close it, or use it as a context manager. Threads may share it.

    ``hold``: closed with it.
    """

    def __init__(self, listing: Listing, hold: contextlib.ExitStack | None = None) -> None:
        self.listing = listing
        self.labels = listing.labels
        self.classes = listing.classes
        self._hold = hold or contextlib.ExitStack()

    @staticmethod
    @checked
    def open(
        source: str | Path,
        *,
        split: Literal["train", "val", "test"] = "train",
        root: str | Path | None = None,
        labels: str | Path | None = None,
        classes: Sequence[str] | None = None,
        path_column: str | None = None,
        label_column: str | Sequence[str] | None = None,
        split_column: str | None = None,
        zip_names: str | None = None,
        say: Say = print_note,
    ) -> Unpacked:
        """List a source; labels and classes are those that packing gives.

        Args:
            source, root, labels, classes, path_column, label_column, split_column, zip_names: as for
                :func:`~steadytrain.data.packing.pack.pack`.
            split: which part of a source that is split; one that is not is its training part.

        Raises:
            DataError: nothing there, of a kind that is not read, not fit to train on, or without this part.
            StorageError: no room to decompress.
        """
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(_scratch())
            sources = stack.enter_context(local_sources([str(source)], say))
            lookup: dict[str, Any] = {"root": root, "labels": labels, "classes": classes}
            columns = ColumnNames.of(path_column, label_column, split_column, zip_names)
            listings = find_all(sources, **lookup, columns=columns, scratch=scratch, say=say)
            parts = {listing.split or "train": listing for listing in listings}
            if split not in parts:
                raise DataError(f"{source} has no part for {split}: it has {' and '.join(parts)}")
            return Unpacked(parts[split], stack.pop_all())

    def __len__(self) -> int:
        return len(self.listing)

    def image(self, number: int) -> bytes:
        """The encoded image of one number, 0 to ``len(self) - 1``, upright.

        Raises:
            IndexError: there is no such image.
            BadImageError: it cannot be read, or cannot be turned upright; says why.
            StorageError: the system cannot read it, which is not the image's fault.
        """
        if not 0 <= number < len(self.listing):
            raise IndexError(f"image {number} of {self.listing.root}, which has {len(self.listing)}")
        (place,) = self.listing.places(number, number + 1)
        if isinstance(place, str):
            return upright(read_file(place))
        data = read_piece(place)
        return upright(data) if place.pixels is None else to_ppm(place.pixels.of(data))

    def name(self, number: int) -> str:
        """Return an image's name in its source."""
        return printable(self.listing.names[number])

    def describe(self, number: int) -> str:
        """Name an image in a message: its number, its source, and its name there."""
        return f"image {number} of {self.listing.root} ({self.name(number)})"

    def extents(self, numbers: Ints) -> Extents:
        """Return the places of the images ``numbers``, int64[n], on disk."""
        pieces = self.listing.pieces
        if pieces is not None:
            return Extents(
                pieces.paths, pieces.file[numbers].astype(np.int64), pieces.offset[numbers], pieces.size[numbers]
            )
        paths = [str(self.listing.places(number, number + 1)[0]) for number in numbers.tolist()]
        zeros = np.zeros_like(numbers)
        return Extents(paths, np.arange(len(numbers)), zeros, self.listing.sizes[numbers].clip(0))

    def scatter(self) -> None:
        """Do nothing: archives that stay open are read by exact ranges."""

    stays = True
    """The data are on this machine's disk."""

    def expect(self, stretches: Sequence[tuple[str, int, int]]) -> None:
        """Let the system begin to read stretches of files, each a path with its first byte and end."""
        for path, some in groupby(stretches, key=lambda stretch: stretch[0]):
            with contextlib.suppress(OSError), open_regular(Path(path)) as file:
                for _, start, end in some:
                    advise(file.fileno(), "WILLNEED", start, end - start)

    def settle(self, numbers: Ints) -> None:
        """Do nothing: readers of a file hold no lock."""

    def fill(self, needed: int) -> None:
        """Do nothing: all of it is here."""

    @property
    def record_ids(self) -> NDArray[np.int64]:
        """int64[N]: the ids that the source gives its images; else their numbers."""
        ids = self.listing.ids
        return np.arange(len(self)) if ids is None else ids

    def close(self) -> None:
        """Remove what was decompressed; closing twice is fine."""
        self._hold.close()

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the files itself; what was decompressed stays this one's to remove."""
        return {"listing": self.listing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["listing"])  # type: ignore[misc]


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Room to decompress: in the cache, or where that cannot be written elsewhere."""
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(scratch_beside(require_cache_folder() / "unpacked" / "images"))
        except StorageError:
            scratch = stack.enter_context(temporary_scratch())
        yield scratch


def upright(data: bytes, *, shorter_side: int | None = None) -> bytes:
    """Return an image file's own bytes, or, where its orientation is not upright, bare pixels that are.

    ``shorter_side``: in pixels, to which an image that has to be turned is scaled down on the way, as packing does;
    None: none is.

    Raises:
        BadImageError: it has to be turned, and cannot be decoded.
    """
    if data[:2] == b"\xff\xd8":
        header = scan_of(data)
        may_be_turned = data.find(b"Exif\0", 0, header) >= 0 or data.find(b"tiff:Orientation", 0, header) >= 0
    else:
        may_be_turned = data[:4] in (b"II*\0", b"MM\0*") or any(tag in data for tag in _EXIF_TAGS)
    if not may_be_turned:  # cheap, and the whole answer for most JPEGs
        return data
    try:
        image = read_header(data)
        if image.format == "PNG":
            image.load()  # the orientation may stand behind the pixels
        is_turned = orientation(image) != 1
    except Exception:  # noqa: BLE001 - a stranger's file: whoever decodes it says what is wrong with it
        return data
    return pack_bytes(data, PackSettings(encoding="raw", shorter_side=shorter_side)).data if is_turned else data
