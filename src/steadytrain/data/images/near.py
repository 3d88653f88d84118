"""Find images that look the same: encoded again, scaled or mirrored, by a perceptual hash of 64 bits.

The hash is pHash's: the signs, about their median, of the 8 x 8 lowest frequencies but the constant ones, of the cosine
transform of the image in grey at 32 x 32 pixels (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash
Functions, 2010, section 3.2). Mirroring an image changes the sign of every other column of the transform, so the hash
of the mirrored image costs nothing. Hashes that differ in few bits are found by multi-index hashing (M. Norouzi,
A. Punjani and D. Fleet, Fast Search in Hamming Space with Multi-Index Hashing, CVPR 2012): of four bands of 16 bits,
one differs in at most one bit, so each hash is held against those in 4 x 17 buckets of 65,536 and not against all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.arrays import Ints, Pixels
from steadytrain.data.images.resize import resize

Hashes = NDArray[np.uint64]  # [N, 2]: of each image, and of it mirrored; zeros where there is none

MOST_BITS = 6  # bits in which two hashes may differ, at most 7 here; docs/laboratory.md has the measurement
LEAST_SIDE = 48  # pixels; scans of digits and letters below it look alike, and are compared by their bytes
SEEN_ROWS = 128  # that packing looks at; docs/laboratory.md

_SIDE, _BANDS, _BAND_BITS = 32, 4, 16
_DIGESTS_BYTES = 32
_MIRROR = np.resize([-1.0, 1.0], 8)
_LUMA = np.array([19, 38, 7], np.float32) / 64  # about those of Rec. 601, and exact in float32 in any order of summing
_FLAT = 1.0  # grey levels of standard deviation, below which rounding decides over the signs
_CHUNK = 1 << 21  # candidates that are compared at once
_SLICE, _ENOUGH = 256, 256  # of a bucket, hashes that are compared first; matches after which an image is linked well
_COSINES = np.cos(np.pi * np.outer(np.arange(1, 9), 2 * np.arange(_SIDE) + 1) / (2 * _SIDE))
_ONES = np.array([bin(word).count("1") for word in range(1 << _BAND_BITS)], np.uint8)


class Alike(NamedTuple):
    """An image that looks like an earlier one, or like one of another set."""

    row: int
    like: int
    is_mirrored: bool


def perceptual_hash(pixels: Image.Image | Pixels) -> bytes:
    """16 bytes: the hash of an upright image of 8 bits, and of the same mirrored; zeros for one without structure."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX))
    return _hash_all(grey[None]).tobytes()


def _hash_all(grey: Pixels | NDArray[np.floating]) -> Pixels:
    """Hash images that were shrunk to [M, 32, 32]: uint8 [M, 16]."""
    waves = _COSINES @ grey.astype(np.float64) @ _COSINES.T
    both = np.stack([waves, waves * _MIRROR], axis=1).reshape(-1, 2, 64)
    hashes = np.packbits(both > np.sort(both)[..., 31:33].mean(axis=2, keepdims=True), axis=2).reshape(-1, 16)
    hashes[grey.std(axis=(1, 2)) < _FLAT] = 0
    return hashes


def begin_hashes(pixels: Pixels, *, stored: bytes, source: bytes | None = None) -> bytes:
    """Return what :func:`end_hashes` makes the hashes of an image of.

    Args:
        pixels: upright, of 8 bits; those with a side below :data:`LEAST_SIDE` are not looked at.
        stored: the encoded image in the record.
        source: the content of its file; None: what is stored.
    """
    stored_digest = hashlib.sha256(stored).digest()[:16]
    source_digest = stored_digest if source in (None, stored) else hashlib.sha256(source or b"").digest()[:16]
    return source_digest + stored_digest + (_shrink(pixels) if min(pixels.shape[:2]) >= LEAST_SIDE else b"")


def end_hashes(begun: Sequence[bytes]) -> list[bytes]:
    """Return 48 bytes for each image: perceptual hash (or zeros), digest of its file, and of what is stored.

    Of many images at once: of one the calls would cost more than the work.
    """
    near = np.zeros((len(begun), 16), np.uint8)
    if rows := [row for row, part in enumerate(begun) if len(part) > _DIGESTS_BYTES]:
        small = np.frombuffer(b"".join(begun[row][_DIGESTS_BYTES:] for row in rows), np.uint8)
        near[rows] = _hash_all(small.reshape(-1, _SIDE, _SIDE, 3) @ _LUMA)
    return [near[row].tobytes() + part[:_DIGESTS_BYTES] for row, part in enumerate(begun)]


def _shrink(pixels: Pixels) -> bytes:
    """Shrink an image to uint8 [32, 32, 3], of about :data:`SEEN_ROWS` of its rows: in half the time of all."""
    step = max(1, round(len(pixels) / SEEN_ROWS))
    small = resize(pixels[step // 2 :: step], (_SIDE, _SIDE), "bilinear")
    return (small if small.ndim == 3 else np.repeat(small, 3)).tobytes()


def find_alike(hashes: Hashes, others: Hashes | None = None) -> list[Alike]:
    """Find for each image the one that it looks like most, if any; of several the first.

    ``others``: the set to look in; None: the images before it.
    """
    targets = hashes if others is None else others
    keys, first = np.unique(targets[:, 0], return_index=True)
    keys, first = keys[keys > 0], first[keys > 0]
    rows = np.flatnonzero(hashes[:, 0])
    pairs: list[Alike] = []
    if others is None:  # equal hashes are one entry, however many there are
        earlier = first[np.searchsorted(keys, hashes[rows, 0])]
        pairs = [
            Alike(row, like, False) for row, like in zip(rows.tolist(), earlier.tolist(), strict=True) if like < row
        ]
        rows = rows[earlier == rows]
    none = np.iinfo(np.int64).max
    best = np.full(len(hashes), none)  # bits that differ, whether mirrored, number: the smallest counts
    for at, like, bits, is_mirrored in _candidates(hashes, rows, keys, first):
        fits = np.ones(len(at), np.bool_) if others is not None else like < at
        np.minimum.at(best, at[fits], ((bits << 40) | (is_mirrored << 39) | like)[fits])
    for row in np.flatnonzero(best != none).tolist():
        code = int(best[row])
        pairs.append(Alike(row, code & ((1 << 39) - 1), bool(code >> 39 & 1)))
    return sorted(pairs)


def near_pairs(hashes: Hashes) -> Iterator[Ints]:
    """Yield pairs of images that look alike, each with the bits that differ: int64 [M, 3], some millions at a time.

    Of images with one hash each is paired with the first alone; a pair of two that look like hundreds of others may be
    missing. A pair may come several times.
    """
    keys, first, number = np.unique(hashes[:, 0], return_index=True, return_inverse=True)
    likes = first[number]
    equal = np.flatnonzero((likes < np.arange(len(hashes))) & (hashes[:, 0] > 0))
    yield np.stack([likes[equal], equal, 0 * equal], axis=1)
    rows = np.flatnonzero((likes == np.arange(len(hashes))) & (hashes[:, 0] > 0))
    for at, like, bits, _ in _candidates(hashes, rows, keys[keys > 0], first[keys > 0]):
        yield np.stack([like, at, bits], axis=1)[like < at]


def _candidates(
    hashes: Hashes, rows: Ints, keys: NDArray[np.uint64], first: Ints
) -> Iterator[tuple[Ints, Ints, Ints, int]]:
    """Yield which of ``rows`` look like which of ``first``, whose hashes are ``keys``; bits, and whether mirrored.

    Of a bucket the images that come first are compared first; a row that looks like :data:`_ENOUGH` of them, in a
    cluster of which all pairs would be too many, is compared with no others.
    """
    num_found = np.zeros(len(rows), np.int64)
    for band in range(_BANDS):
        shift = np.uint64(band * _BAND_BITS)
        words = _word(keys, shift)
        order = np.lexsort((first, words))
        starts = np.searchsorted(words[order], np.arange((1 << _BAND_BITS) + 1))
        for is_mirrored in (0, 1):
            queries = hashes[rows, is_mirrored]
            word = _word(queries, shift)
            for flip in (0, *(1 << bit for bit in range(_BAND_BITS))):
                begin, end = starts[word ^ flip], starts[(word ^ flip) + 1]
                while len(left := np.flatnonzero((begin < end) & (num_found < _ENOUGH))):
                    stop = np.minimum(begin[left] + _SLICE, end[left])
                    for number, place in _ranges(begin[left], stop):
                        at, key = left[number], order[place]
                        bits = count_bits(queries[at] ^ keys[key])
                        fits = bits <= MOST_BITS
                        num_found += np.bincount(at[fits], minlength=len(rows))
                        yield rows[at[fits]], first[key[fits]], bits[fits], is_mirrored
                    begin[left] = stop


def count_bits(words: NDArray[np.uint64]) -> Ints:
    """Count the bits that are set: int64 of the same shape."""
    parts = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, _BANDS)
    return np.asarray(_ONES[parts].sum(axis=-1), np.int64)


def _ranges(starts: Ints, ends: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the places from ``starts[n]`` to ``ends[n] - 1``, each with its n, some millions at a time."""
    counts = ends - starts
    stops = np.cumsum(counts)
    total = int(stops[-1]) if len(stops) else 0
    cuts = np.searchsorted(stops, np.arange(0, total, _CHUNK), side="right").tolist()
    for first, last in pairwise([*cuts, len(counts)]):
        part = slice(first, last)
        number = np.repeat(np.arange(first, last), counts[part])
        before = np.repeat(np.cumsum(counts[part]) - counts[part], counts[part])
        yield number, starts[number] + np.arange(len(number)) - before


def _word(hashes: NDArray[np.uint64], shift: np.uint64) -> NDArray[np.int64]:
    return ((hashes >> shift) & np.uint64((1 << _BAND_BITS) - 1)).astype(np.int64)
