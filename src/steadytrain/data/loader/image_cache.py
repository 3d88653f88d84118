"""Images decoded once and kept, if all of them fit into a budget of memory. The bytes of a batch are the same.

Decoding a small PNG costs fifty times what copying its pixels does. Small images of one size are kept as they are first
used; a batch is then one gather. Larger ones, and those of several sizes, are kept from the second pass over the data
on, decoded as a whole, which pays only where they are used often; whether they fit is judged by the headers of some.
:class:`ImageCache` gives up at the first image that would not give the same bytes (a JPEG so large that it is shrunk
while it is decoded), or does not fit.

The memory may be common to the ranks of a machine (``rank_cache``). With a device, kept images of one size that are
only shifted are copied there once, if they take no more than an eighth of what is free (:class:`DeviceCache`); from
then on a batch is a :class:`ResidentBatch`: which samples, from which row and column, mirrored or not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import Floats, Ints, Pixels
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.loader.batch import Batch
from steadytrain.data.loader.crop import NEVER_SHRUNK, Crop
from steadytrain.data.loader.decode import cut_from
from steadytrain.data.loader.rank_cache import RankMemory
from steadytrain.machine import facts

if TYPE_CHECKING:
    import torch

SURVEYED = 256  # images whose headers tell whether all fit
MARGIN = 1.1  # times the surveyed images' mean size that the mean of all may be
MISJUDGED = 2  # times the expected bytes that are had, within the budget, where sizes differ
GATHERED_BYTES = 2**18  # of images gathered at a time: it stays in a core's cache, and is never returned to the system
DEVICE_SHARE = 8  # at most one part in so many of a device's free memory is used
_ALIGNED = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedImages:
    """Decoded images: those of one size in ``pixels`` uint8[n, H, W, C], others one behind the other in ``loose``.

    ``filled`` bool[n] says which are there. Where a sample is unreadable, ``steps`` int64[n] leads from it to the one
    that replaces it, and is 0 elsewhere; ``any_steps`` bool[1] says whether there is one. In ``loose``, uint8[bytes],
    each begins ``at`` int64[n]; ``sizes`` int64[n, 2] are heights and widths; ``end`` int64[1] is where the next one
    goes. All of it may lie in memory ``shared`` with other ranks.
    """

    filled: NDArray[np.bool_]
    steps: Ints
    any_steps: NDArray[np.bool_]
    shared: RankMemory | None
    channels: int
    pixels: Pixels | None = None
    loose: Pixels
    at: Ints
    sizes: Ints
    end: Ints

    def image(self, sample: int) -> Pixels:
        """Return one image, uint8[H, W, C]."""
        if self.pixels is not None:
            image: Pixels = self.pixels[sample]
            return image
        at, (height, width) = int(self.at[sample]), self.sizes[sample].tolist()
        return self.loose[at : at + height * width * self.channels].reshape(height, width, self.channels)

    def replaced(self, samples: Ints) -> Ints:
        """Return the samples that stand for these: themselves, but for unreadable ones."""
        return samples + self.steps[samples] if self.any_steps[0] else samples


class ImageCache:
    """The decoded images of one loader. Safe from several threads: the same sample always has the same pixels.

    Args:
        n: samples.
        budget_bytes: the most that all of them may take.
        share: gives memory that other ranks have, too, by what it holds and its size; raises OSError. None: this
            process has its own.
        survey: heights and widths of some of the images, int64[k, 2], or None where some cannot be kept; without it all
            are taken to be as large as the first.
    """

    def __init__(
        self,
        n: int,
        budget_bytes: int,
        share: Callable[[str, int], RankMemory] | None = None,
        survey: Callable[[], Ints | None] | None = None,
    ) -> None:
        self.n = n
        self.budget_bytes = budget_bytes
        self.share = share
        self.survey = survey
        self.not_shared = ""
        """Why this process has its own memory, though others were to have it, too."""
        self.images: CachedImages | None = None
        self.given_up = budget_bytes <= 0
        self._any_size = self._surveyed = False
        self._lock = threading.Lock()
        self._full = False

    @property
    def full(self) -> bool:
        """Return whether every sample is in memory."""
        images = self.images
        if not self._full and images is not None:
            self._full = bool(images.filled.all())
        return self._full

    @property
    def bytes(self) -> int:
        """Return the bytes of the images that are kept."""
        images = self.images
        if images is None:
            return 0
        if images.pixels is None:
            return min(int(images.end[0]), len(images.loose))
        return (self.n if self.full else int(images.filled.sum())) * math.prod(images.pixels.shape[1:])

    @property
    def is_shared(self) -> bool:
        """Return whether it lies in memory that other ranks have, too."""
        return self.images is not None and self.images.shared is not None

    def keep_any_size(self) -> None:
        """Keep large images, and those of several sizes, from now on as well."""
        with self._lock:
            if not self._any_size:
                self._any_size, self.given_up = True, self.budget_bytes <= 0

    def give_up(self) -> None:
        """Keep nothing."""
        with self._lock:
            self.images, self.given_up = None, True

    def has(self, sample: int) -> bool:
        """Return whether a sample is kept. Raises BadImageError where it is known to be bad."""
        images = self.images
        if images is None or not images.filled[sample]:
            return False
        if images.steps[sample]:
            raise BadImageError("decoding it failed before")
        return True

    def missing(self, samples: Ints, bad: set[int]) -> Ints:
        """Return those of some samples, int64[b], that are not kept, or that another rank alone knows to be bad."""
        images = self.images
        if images is None:
            return samples
        missing: Ints = samples[~images.filled[samples]]
        if not images.any_steps[0]:
            return missing
        unheard = [sample for sample in samples[images.steps[samples] != 0].tolist() if sample not in bad]
        return np.concatenate((missing, np.array(unheard, dtype=np.int64)))

    def room_for(self, shape: tuple[int, int, int]) -> bool:
        """Return whether images of this shape (H, W, C) are kept; if not, none is from now on."""
        with self._lock:
            if self.images is None and not self.given_up:
                self.images = self._allocate(shape)
            if self._differs(shape) and self._any_size and not self._surveyed:  # begun when only one size could be kept
                self.images = self._allocate(shape)
            if self.images is None or self._differs(shape):
                self.images, self.given_up = None, True
            return not self.given_up

    def put(self, sample: int, pixels: Pixels) -> None:
        """Keep a sample, once :meth:`room_for` has agreed to its shape."""
        images = self.images
        if images is None:  # another thread met an image that does not fit
            return
        if images.pixels is not None:
            images.pixels[sample] = pixels
        elif not self._put_loose(images, sample, pixels):
            return
        with self._lock:  # no other processor may see this before the pixels
            images.filled[sample] = True

    def replace(self, sample: int, by: int) -> None:
        """Let ``by``, which is kept, stand for a sample that cannot be read."""
        images = self.images
        if images is not None:
            images.steps[sample] = by - sample
            images.any_steps[0] = True
            with self._lock:
                images.filled[sample] = True

    def _differs(self, shape: tuple[int, int, int]) -> bool:
        return self.images is not None and self.images.pixels is not None and self.images.pixels.shape[1:] != shape

    def _allocate(self, shape: tuple[int, int, int]) -> CachedImages | None:
        """Make room for all images, of which one has this shape; None where they do not fit, or must not yet."""
        if not self._any_size and max(shape[:2]) > NEVER_SHRUNK:
            return None
        self._surveyed = self._any_size
        sizes = self.survey() if self._any_size and self.survey is not None else np.array([shape[:2]])
        if sizes is None:
            return None
        n, is_one_size = self.n, bool((sizes == shape[:2]).all())
        all_bytes = n * math.prod(shape)
        if not is_one_size:
            all_bytes = int(MARGIN * n * float(sizes.prod(axis=1).mean()) * shape[2])
        if all_bytes > self.budget_bytes:
            return None
        room = all_bytes if is_one_size else min(self.budget_bytes, MISJUDGED * all_bytes)
        loose = 0 if is_one_size else n
        fields: list[Any] = [("filled", np.bool_, (n,)), ("steps", np.int64, (n,)), ("any_steps", np.bool_, (1,))]
        fields += [("end", np.int64, (1,)), ("at", np.int64, (loose,)), ("sizes", np.int64, (loose, 2))]
        what = f"images of {shape}" if is_one_size else "images of several sizes"
        try:
            notes: Any = np.dtype(fields, align=True)
            begin = -(-notes.itemsize // _ALIGNED) * _ALIGNED
            memory, shared = self._memory(what, begin + room)
        except (MemoryError, ValueError):  # more than the system gives, or than numpy can describe
            return None
        views, images = memory[: notes.itemsize].view(notes)[0], memory[begin:]
        return CachedImages(
            **{name: views[name] for name in notes.names},
            pixels=images.reshape(n, *shape) if is_one_size else None,
            loose=images,
            shared=shared,
            channels=shape[2],
        )

    def _memory(self, what: str, size: int) -> tuple[Pixels, RankMemory | None]:
        """Return zeros, uint8[size], common to several ranks where they can be."""
        if self.share is not None:
            try:
                shared = self.share(what, size)
                return shared.memory, shared
            except OSError as error:
                self.not_shared = f"{size / 1e6:,.1f} MB: {error.strerror or error}"
        return np.zeros(size, dtype=np.uint8), None  # the system gives it as it is written to

    def _put_loose(self, images: CachedImages, sample: int, pixels: Pixels) -> bool:
        """Put a sample behind the others; another thread, or rank, may be doing so with the same one."""
        with self._lock, nullcontext() if images.shared is None else images.shared.alone():
            at = int(images.end[0])
            end = at + pixels.size
            fits = end <= len(images.loose)
            if fits:
                images.end[0] = end
        if not fits:
            self.give_up()
            return False
        images.loose[at:end] = pixels.reshape(-1)
        with self._lock:
            if not images.filled[sample]:
                images.at[sample], images.sizes[sample] = at, pixels.shape[:2]
        return True


@dataclass(frozen=True, eq=False)
class Shifts:
    """Places of squares that are only shifted: ``samples``, ``rows`` and ``columns`` int64[b], ``flips`` bool[b].

    Rows and columns are those of the image with its padding around; a mirrored square is cut first.
    """

    samples: Ints
    rows: Ints
    columns: Ints
    flips: NDArray[np.bool_]

    def __getitem__(self, some: slice) -> Shifts:
        return Shifts(self.samples[some], self.rows[some], self.columns[some], self.flips[some])


def shifts_of(crop: Crop, height: int, width: int, samples: Ints, draws: Floats) -> Shifts:
    """Return where the squares of samples lie, all of them images of one size that ``crop`` only shifts.

    >>> crop = Crop(kind="pad-crop", size=32, pad=4)
    >>> shifts = shifts_of(crop, 32, 32, np.array([7]), np.array([[0.0, 0.0, 0.99]]))
    >>> shifts.rows.tolist(), shifts.columns.tolist(), shifts.flips.tolist()
    ([8], [0], [False])
    """
    n = len(samples)
    rows, columns = np.broadcast_to(crop.corners(np.array([[height, width]]), draws) + _padding(crop), (n, 2)).T
    return Shifts(samples, rows, columns, crop.flips(draws, n))


def _padding(crop: Crop) -> int:
    """Pixels of zeros around each image."""
    return crop.pad if crop.kind == "pad-crop" else 0


class GatherScratch:
    """Memory of one thread to gather through: images as they are, and between borders of zeros."""

    def __init__(self) -> None:
        self.rows = 0
        self._made_for: tuple[int, ...] = ()

    def fit(self, height: int, width: int, channels: int, pad: int, side: int) -> None:
        """Make room for ``rows`` images of this shape, padded by ``pad``, and squares of ``side``."""
        layout = (height, width, channels, pad, side)
        if layout == self._made_for:
            return
        self.rows = max(1, GATHERED_BYTES // (height * width * channels))
        self.images = np.empty((self.rows, height, width, channels), dtype=np.uint8)
        padded = np.zeros((self.rows, height + 2 * pad, width + 2 * pad, channels), dtype=np.uint8)
        self.inside = padded[:, pad : pad + height, pad : pad + width]
        # Views of whole lines, as numpy copies bytes in runs: half the time of one by one.
        image, row, column, _ = padded.strides
        line, part = (np.dtype((np.void, pixels * channels)) for pixels in (width, side))
        self.image_lines = lines(self.images)
        self.inside_lines = np.ndarray((self.rows, height), line, padded, pad * (row + column), (image, row))
        # Those of every square of every image: [n, rows, columns, side].
        shape = (self.rows, height + 2 * pad - side + 1, width + 2 * pad - side + 1, side)
        self.square_lines = np.ndarray(shape, part, padded, 0, (image, row, column, row))
        self._made_for = layout


def lines(pixels: Pixels) -> NDArray[np.void]:
    """View contiguous images uint8[n, H, W, C] as lines [n, H] of bytes."""
    n, height, width, channels = pixels.shape
    return pixels.reshape(n, height, width * channels).view(np.dtype((np.void, width * channels)))[..., 0]


def gather(out: Pixels, images: CachedImages, samples: Ints, crop: Crop, draws: Floats, scratch: GatherScratch) -> None:
    """Write the squares of kept samples, uint8[b, S, S, C], as :func:`~steadytrain.data.loader.decode.cut_into` would.

    Args:
        images: hold every one of ``samples``.
        samples: int64[b].
        draws: float64[b, num_draws] of these samples.
    """
    if images.pixels is None:
        sizes = images.sizes[samples]
    else:
        height, width = images.pixels.shape[1:3]
        if crop.only_shifts(height, width):
            gather_shifted(out, images.pixels, shifts_of(crop, height, width, samples, draws), crop, scratch)
            return
        sizes = np.broadcast_to([[height, width]], (len(samples), 2))
    plan = crop.plan(sizes, draws)
    for row, sample in enumerate(samples.tolist()):
        cut_from(out[row], images.image(sample), crop, plan, row)


def gather_shifted(out: Pixels, pixels: Pixels, where: Shifts, crop: Crop, scratch: GatherScratch) -> None:
    """Write the squares, uint8[b, S, S, C], of images uint8[n, H, W, C] that are only shifted."""
    height, width, channels = pixels.shape[1:]
    if crop.kind == "none" and not crop.flip and height == width == crop.size:
        np.take(pixels, where.samples, axis=0, out=out, mode="clip")
        return
    pad = _padding(crop)
    scratch.fit(height, width, channels, pad, crop.size)
    squares, columns = lines(out), where.columns
    if crop.flip:
        columns = np.where(where.flips, width + 2 * pad - crop.size - columns, columns)  # in a mirrored image
    for at in range(0, len(columns), scratch.rows):
        some = slice(at, at + scratch.rows)
        samples = where.samples[some]
        plain = n = len(samples)
        place = np.arange(n)
        if crop.flip:  # the mirrored samples go last, so that both halves are copied by one slice each
            flips = where.flips[some]
            plain = n - int(np.count_nonzero(flips))
            order = np.argsort(flips, kind="stable")
            samples, place[order] = samples[order], np.arange(n)
        images = scratch.images[:n]
        np.take(pixels, samples, axis=0, out=images, mode="clip")
        scratch.inside_lines[:plain] = scratch.image_lines[:plain]
        for channel in range(channels if crop.flip else 0):  # runs of single bytes: four times as fast as of three
            scratch.inside[plain:n, ..., channel] = images[plain:, :, ::-1, channel]
        squares[some] = scratch.square_lines[place, where.rows[some], columns[some]]


class DeviceCache:
    """The images of one loader on a device, as soon as they are there. Safe from several threads.

    Args:
        device: any that torch knows; the CPU, too, where it is merely another copy.
        budget_bytes: the most that the images may take; None: an eighth of what is free when they are copied.
    """

    def __init__(self, device: torch.device, crop: Crop, *, budget_bytes: int | None = None) -> None:
        self.device = device
        self.crop = crop
        self.budget_bytes = budget_bytes
        self.source: Pixels | None = None
        """The images on the host, uint8[n, H, W, C], once they are on the device."""
        self.is_settled = False
        """True once it is known whether they will be."""
        self._images: torch.Tensor | None = None
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Return the bytes that lie on the device."""
        images = self._images
        return 0 if images is None else images.numel()

    def load(self, cache: ImageCache) -> None:
        """Copy the images of a full cache to the device, once, if they are only shifted and fit."""
        import torch

        with self._lock:
            pixels = None if cache.images is None else cache.images.pixels
            if self.is_settled or pixels is None or not self.crop.only_shifts(*pixels.shape[1:3]):
                self.is_settled = True
                return
            budget = self.budget_bytes
            if budget is None:  # the machine's memory where the device cannot say what is free
                ask = getattr(torch.get_device_module(self.device), "mem_get_info", None)
                budget = (facts.memory_bytes() if ask is None else int(ask(self.device)[0])) // DEVICE_SHARE
            if pixels.size <= budget:
                with suppress(torch.OutOfMemoryError):  # somebody else was faster
                    self._images = _copy_to(self.device, pixels)
                    self.source = pixels
            self.is_settled = True

    def gather(self, where: Shifts) -> torch.Tensor:
        """Gather squares, uint8[b, S, S, C], in the device's current stream; the caller does not wait for it."""
        import torch
        from torch.nn.functional import pad

        assert self._images is not None, "nothing was loaded"
        numbers = torch.from_numpy(np.stack((where.samples, where.rows, where.columns, where.flips)).astype(np.int64))
        if self.device.type == "cuda":
            numbers = numbers.pin_memory()  # or the host would wait for the copy; its memory is reused after it
            self._images.record_stream(torch.cuda.current_stream(self.device))
        samples, rows, columns, flips = numbers.to(self.device, non_blocking=True)
        images = self._images.index_select(0, samples)
        side, around = self.crop.size, _padding(self.crop)
        if images.shape[1:3] != (side, side) or around:
            images = pad(images, (0, 0, around, around, around, around))
            b, height, width, channels = images.shape
            row, line = width * channels, side * channels
            shape = (b, height - side + 1, width - side + 1, side, line)  # every square of every image, not copied
            windows = images.as_strided(shape, (height * row, row, channels, row, 1))
            squares = windows[torch.arange(b, device=self.device), rows, columns]
            images = squares.view(b, side, side, channels)
        return torch.where(flips.bool()[:, None, None, None], images.flip(2), images) if self.crop.flip else images


class ResidentBatch(Batch):
    """A batch whose images lie on a device: :meth:`gather` makes its squares there.

    ``images`` gathers the same squares on the host, when it is first asked for.
    """

    _device_cache: DeviceCache
    _where: Shifts

    def __init__(
        self,
        device_cache: DeviceCache,
        where: Shifts,
        labels: NDArray[np.int64] | NDArray[np.float32],
        ids: Ints,
        positions: Ints,
    ) -> None:
        vars(self).update(labels=labels, ids=ids, positions=positions, _device_cache=device_cache, _where=where)

    @cached_property
    def images(self) -> Pixels:
        pixels, side = self._device_cache.source, self._device_cache.crop.size
        assert pixels is not None
        out = np.empty((len(self), side, side, pixels.shape[3]), dtype=np.uint8)
        gather_shifted(out, pixels, self._where, self._device_cache.crop, GatherScratch())
        return out

    def gather(self) -> torch.Tensor:
        """Return the images, uint8[B, H, W, C] on the device."""
        return self._device_cache.gather(self._where)


def _copy_to(device: torch.device, pixels: Pixels) -> torch.Tensor:
    """Copy images to a device and wait for that; what is queued there goes on meanwhile."""
    import torch

    host = torch.from_numpy(pixels)
    if device.type != "cuda":
        return host.to(device, copy=True)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        images = host.to(device, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
    copied.synchronize()
    return images
