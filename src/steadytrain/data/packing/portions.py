"""Encode images where they lie, portion by portion, in child processes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from steadytrain.data.arrays import Ints
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.images.encode import PackedImage, PackSettings, pack_bytes, pack_pixels
from steadytrain.data.images.near import end_hashes
from steadytrain.data.images.statistics import PixelCount
from steadytrain.data.sources.listing import Piece, read_file, read_piece
from steadytrain.machine.worker_pool import map_in_children

Portion = Sequence[tuple[str | Piece, bool]]  # images to encode, each with whether its pixels are counted


def pack_file(place: str | Piece, settings: PackSettings, count: PixelCount | None = None) -> PackedImage | str:
    """Read and encode one image; return the reason, in a few words, where it cannot be used.

    Args:
        place: the path of an image file, or where an image lies inside a file.
        count: takes the pixels in, before compression.
    """
    try:
        if isinstance(place, str):
            return pack_bytes(read_file(place), settings, count)
        data = read_piece(place)
        if place.pixels is not None:
            return pack_pixels(place.pixels.of(data), settings, count)
        return pack_bytes(data, settings, count)
    except BadImageError as error:
        return str(error)
    except MemoryError:
        return "too large for this machine's memory"


@dataclass(frozen=True, slots=True)
class EncodedPortion:
    """Encoded images of a portion: what to store of each, or why not; and the counts of the pixels to be counted."""

    results: tuple[PackedImage | str, ...]
    counts: Ints


def encode_portion(portion: Portion, settings: PackSettings) -> EncodedPortion:
    """Encode one portion in this process."""
    count = PixelCount()
    results = [pack_file(place, settings, count if counted else None) for place, counted in portion]
    hashes = iter(end_hashes([image.hashes for image in results if not isinstance(image, str)]))
    hashed = (image if isinstance(image, str) else image._replace(hashes=next(hashes)) for image in results)
    return EncodedPortion(tuple(hashed), count.totals())


def encode_all(portions: Iterable[Portion], settings: PackSettings, *, workers: int) -> Generator[EncodedPortion]:
    """Encode portions in so many children, which small images need most, or in this process (``workers`` 0).

    Results come in the order of the portions, whatever their number; a portion on which a child died comes in parts. A
    file on which two children have died is given up, with the reason. Close the iterator to end it early.

    Raises:
        FailedError: no child could be started.
    """

    def on_crash(_: tuple[str | Piece, bool], ending: str) -> EncodedPortion:
        return EncodedPortion((f"the decoder crashed ({ending})",), PixelCount().totals())

    encode = partial(encode_portion, settings=settings)
    yield from map_in_children(portions, encode, on_crash, workers=workers)
