"""The parts of JPEGs that boxes need, as smaller JPEGs: cut out without decoding.

With restart markers the coded pixels are a row of intervals, each of which can be decoded without the others: all
predictions start anew (ITU-T T.81, 1992, sections E.1.4, E.2.4 and F.2.1.3.1). Where the interval divides a row of
MCUs, those that a box touches are put together behind the header, which is told of the new height and width, and their
markers are numbered anew: a JPEG whose pixels are those of a full decode. An interval of some other length allows only
rows to be cut, at every so many rows.

Where the markers stand is found by looking at every byte. Nothing is cut unless they are exactly those that the header
announces, in order, and the end of the image after them: what is odd, damaged or cut short is left to a full decoder.

Many images are worked at together: each step is one of numpy for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.loader.jpeg import Head, Pixels

Ints = NDArray[np.int64]

WORTH_IT = 0.95  # share of the image's MCUs: above that, all of it is decoded as fast

_BLOCK = 8  # pixels
_FEWEST = 3  # MCUs in a row: chroma of one or two columns would be interpolated otherwise than in the whole image
_STRETCH = 1 << 17  # bytes that are looked at together: they and what is found in them stay in the processor's cache
_MARKER, _RESTART, _END = 0xFF, 0xD0, 0xD9  # a marker's first byte; the second of the first restart marker; of the end


class Spliced(NamedTuple):
    """A JPEG of a part of another.

    Args:
        data: its bytes.
        top, left: where its first pixel stands in the other's.
        height, width: in pixels.
    """

    data: Pixels
    top: int
    left: int
    height: int
    width: int


class _Grid(NamedTuple):
    """How the intervals of an image lie: in ``down`` by ``across`` fields, of ``intervals`` each."""

    down: int
    across: int
    height: int  # of a field, in pixels
    width: int
    fewest: int  # fields in a row that have to stay together
    intervals: int
    total: int  # intervals of the image


class _Cuts(NamedTuple):
    """What is to be cut, int64[n] each.

    An image's intervals are numbered from 0. What is wanted of them is ``runs`` times ``length``, ``step`` apart.
    """

    row: Ints  # of the image
    at: Ints  # where it begins in the memory
    end: Ints
    frame: Ints
    scan: Ints
    total: Ints  # intervals
    first: Ints  # interval that is wanted
    runs: Ints
    length: Ints
    step: Ints
    top: Ints  # in pixels, as what follows
    left: Ints
    height: Ints
    width: Ints

    def of(self, some: NDArray[np.bool_]) -> _Cuts:
        """Some of them."""
        return self if some.all() else _Cuts(*(column[some] for column in self))


def splice(memory: Pixels, at: Ints, heads: Sequence[Head | None], boxes: Ints, shrinks: Ints) -> list[Spliced | None]:
    """JPEGs of the parts that boxes need; None where that cannot be, or would save little.

    Args:
        memory: the bytes of all images, one behind the other.
        at: int64[n + 1], where each begins, and the last one ends.
        heads: their headers; None: no JPEG.
        boxes: int64[n, 4], left, top, right, bottom in pixels. Chroma is interpolated from its neighbours, so two
            (shrunk) pixels more on each side belong to the part.
        shrinks: int64[n], 1, 2, 4 or 8: it will be decoded with so many times fewer pixels in each direction.
    """
    made: list[Spliced | None] = [None] * len(heads)
    able = [(row, head) for row, head in enumerate(heads) if head is not None and head.restarts]
    if not able:
        return made
    cuts = _plan(able, at, boxes, shrinks)
    if not len(cuts.row):
        return made
    starts, first = _starts(memory, cuts)
    sound = _sound(memory, cuts, starts, first)
    cuts, first = cuts.of(sound), first[sound]
    if len(cuts.row):
        places = zip(cuts.top.tolist(), cuts.left.tolist(), cuts.height.tolist(), cuts.width.tolist(), strict=True)
        for row, data, place in zip(cuts.row.tolist(), _join(memory, cuts, starts, first), places, strict=True):
            made[row] = Spliced(data, *place)
    return made


@lru_cache(maxsize=1024)
def _grid(head: Head) -> _Grid:
    # A single colour is coded block by block, whatever its sampling says.
    sampling = head.sampling if len(head.sampling) > 1 else b"\x11"
    high, wide = _BLOCK * max(each & 15 for each in sampling), _BLOCK * max(each >> 4 for each in sampling)
    down, across, restarts = -(-head.height // high), -(-head.width // wide), head.restarts
    total = -(-down * across // restarts)
    if across % restarts == 0:
        return _Grid(down, across // restarts, high, wide * restarts, -(-_FEWEST // restarts), 1, total)
    both = math.gcd(restarts, across)
    rows = restarts // both  # after which an interval begins at the left again
    return _Grid(-(-down // rows), 1, high * rows, head.width, 1, across // both, total)


def _plan(able: list[tuple[int, Head]], at: Ints, boxes: Ints, shrinks: Ints) -> _Cuts:
    """What to cut of those that allow it, where it is worth it."""
    rows = np.array([row for row, _ in able])
    down, across, height, width, fewest, intervals, total = np.array([_grid(head) for _, head in able]).T
    image_height, image_width, frame, scan = np.array([(h.height, h.width, h.frame, h.scan) for _, h in able]).T
    margin = 2 * shrinks[rows]
    x0, y0, x1, y1 = boxes[rows].T
    top, bottom = (y0 - margin).clip(0) // height, np.minimum(-(-(y1 + margin) // height), down)
    left = np.minimum((x0 - margin).clip(0) // width, across - fewest).clip(0)
    right = np.minimum(np.maximum(-(-(x1 + margin) // width), left + fewest), across)
    whole, each = right - left == across, across * intervals
    y, x, begin = top * height, left * width, at[rows]
    cuts = _Cuts(
        row=rows,
        at=begin,
        end=at[rows + 1],
        frame=begin + frame,
        scan=begin + scan,
        total=total,
        first=top * each + left,
        runs=np.where(whole, 1, bottom - top),
        length=np.where(whole, (bottom - top) * each, right - left),
        step=each,
        top=y,
        left=x,
        height=np.minimum(bottom * height, image_height) - y,
        width=np.minimum(right * width, image_width) - x,
    )
    return cuts.of((bottom - top) * (right - left) <= WORTH_IT * down * across)


def _starts(memory: Pixels, cuts: _Cuts) -> tuple[Ints, Ints]:
    """What follows each marker in the memory, where intervals begin; and which of these is the first of each image."""
    begin, end = int(cuts.at[0]), int(cuts.end[-1])
    found = []
    for at in range(begin, end - 1, _STRETCH):
        stop = min(at + _STRETCH, end - 1)
        is_marker = memory[at + 1 : stop + 1] >= _RESTART  # zeros are stuffed behind any other 0xFF of coded pixels
        is_marker &= memory[at:stop] == _MARKER
        found.append(is_marker.nonzero()[0] + (at + 2))
    starts = np.concatenate([cuts.scan, *found])  # before the first interval there is no marker
    starts.sort(kind="stable")
    return starts, np.searchsorted(starts, cuts.scan)


def _sound(memory: Pixels, cuts: _Cuts, starts: Ints, first: Ints) -> NDArray[np.bool_]:
    """Whether an image has all of its markers and no others, in order, and its end behind them."""
    sound = np.searchsorted(starts, cuts.end, side="right") - first > cuts.total
    sound &= starts[np.minimum(first + 1, len(starts) - 1)] > cuts.scan  # the header does not end as a marker does
    if not sound.any():
        return sound
    totals = cuts.total[sound]
    owner, number, begin = _counted(totals)
    wanted = _RESTART + (number & 7)
    wanted[begin + totals - 1] = _END
    right = memory[starts[first[sound][owner] + number + 1] - 1] == wanted
    sound[sound] = np.logical_and.reduceat(right, begin)
    return sound


def _join(memory: Pixels, cuts: _Cuts, starts: Ints, first: Ints) -> list[Pixels]:
    """Headers, told of the new sizes, and runs of intervals, their markers numbered anew."""
    cut, run, headers = _counted(cuts.runs + 1)  # the header counts as a run before the others
    head = run == 0
    begin = (first + cuts.first)[cut] + (run - 1).clip(0) * cuts.step[cut]
    end = np.minimum(begin + cuts.length[cut], (first + cuts.total)[cut])
    source = np.where(head, cuts.at[cut], starts[begin])
    sizes = np.where(head, cuts.scan[cut], starts[end]) - source
    view = memory.data
    runs = zip(source.tolist(), (source + sizes).tolist(), strict=True)
    joined = np.frombuffer(bytearray().join([view[start:stop] for start, stop in runs]), np.uint8)
    moved = np.cumsum(sizes) - sizes
    owner, number, _ = _counted(np.where(head, 0, end - begin))
    markers = starts[begin[owner] + number + 1] + (moved - source)[owner] - 1
    # The runs of one image are numbered on.
    of_cut = np.bincount(cut[owner], minlength=len(headers))
    last = np.cumsum(of_cut)
    joined[markers] = _RESTART + (np.arange(len(markers)) - np.repeat(last - of_cut, of_cut) & 7)
    joined[markers[last - 1]] = _END
    bounds = moved[headers]
    ends = [*bounds[1:].tolist(), len(joined)]
    told = (cuts.height << 16 | cuts.width).astype(">u4").view(np.uint8).reshape(-1, 4)
    joined[(bounds + cuts.frame - cuts.at)[:, None] + np.arange(4)] = told
    return [joined[start:stop] for start, stop in zip(bounds.tolist(), ends, strict=True)]


def _counted(counts: Ints) -> tuple[Ints, Ints, Ints]:
    """Numbers so many things of each of several owners: the owner and number of each, and each owner's first thing.

    >>> [part.tolist() for part in _counted(np.array([2, 3]))]
    [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2], [0, 2]]
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    begin = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - begin[owner], begin
