"""Dynamic batching: images of many requests in few passes of one network.

::

    submit -> decode (threads that release the GIL) -> ready -> batch -> network (one thread) -> futures
           -> decode, of large images (as many threads) ->

At most ``max_queue`` images stand before the network. A batch begins when it is full, when no other image is being
received or decoded, or when its first image has been ready for ``max_wait`` seconds: an image never waits for company
that is not on its way. While the network is busy the next batch gathers by itself. An image whose request was given up
is dropped before it is decoded, and again before it is computed. Large images have threads of their own: however many
of them wait, small ones are decoded meanwhile. Heat maps of a batch are made once its other images have their answers.

The squares and the outputs are those of :func:`steadytrain.training.predict`; in a batch of several the last
bits of an output may differ, as another kernel may compute them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steadytrain.data.arrays import Pixels
from steadytrain.data.images.decode import BadImageError
from steadytrain.data.loader.crop import Crop, packed_side
from steadytrain.data.loader.decode import Encoded, Scratch, cut_all, cut_into, probe
from steadytrain.data.sources.unpacked import upright
from steadytrain.errors import FailedError, first_line
from steadytrain.format import print_note
from steadytrain.machine.process import return_free_memory
from steadytrain.training import Trained
from steadytrain.training.build import evaluation_crop
from steadytrain.training.evaluation import logits_of
from steadytrain.training.inference.heat_maps import heat_maps
from steadytrain.training.inference.limits import Judge, Judgement, open_judge
from steadytrain.training.memory import PassLimit

MOST_IMAGES = 32
"""The most images of a batch, where the user names no number."""
MORE_COST = 1.1
"""Times the least cost of an image: the largest batch that costs no more is taken where the user names none. Too small
a one would cost throughput; too large a one is only filled under load."""
WARM_SECONDS = 8.0
"""Seconds after which no larger batch is tried before the server is ready."""
LARGE_PIXELS = 4_000_000
"""An image of more takes a tenth of a second and longer (a PNG of 25 million: 0.6 s), and waits for its like."""
_TRIM_SECONDS = 5.0
"""Seconds after the last large image before its memory is given back to the system."""
_NEWEST = 0.1  # weight of the newest pass in the rate


class Answer(NamedTuple):
    """Outputs for one image, on the host: logits float32 [K], probabilities float64 [K].

    ``lost``: what of its file is unused; ``judgement``: what limits say of it; ``heat_map``: of the likeliest output,
    where that was asked for, float32 [h, w].
    """

    logits: torch.Tensor
    probabilities: torch.Tensor
    lost: tuple[str, ...] = ()
    judgement: Judgement | None = None
    heat_map: NDArray[np.float32] | None = None


class BusyError(Exception):
    """The queue has no room. ``retry_after``: whole seconds until it should have, at the measured rate."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"try again in {retry_after} s")
        self.retry_after = retry_after


class TooManyPixelsError(BadImageError):
    """An image of more pixels than the server decodes."""


class PassError(FailedError):
    """The network failed on a batch; standard error says how."""


class PixelRoom:
    """A semaphore over pixels that are decoded at the same time; a single image always has room.

    A decoder takes up to 16 bytes for each pixel (docs/odd-images.md has the table).
    """

    def __init__(self, pixels: int) -> None:
        self._pixels, self._taken, self._condition = pixels, 0, threading.Condition()

    @contextlib.contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Wait for room, and hold it."""
        with self._condition:
            self._condition.wait_for(lambda: not self._taken or self._taken + pixels <= self._pixels)
            self._taken += pixels
        try:
            yield
        finally:
            with self._condition:
                self._taken -= pixels
                self._condition.notify_all()


@dataclass(slots=True, eq=False)
class _Item:
    """An image on its way. ``waited``: seconds before its decoding began; ``ready``: when it was decoded."""

    data: bytes
    answer: asyncio.Future[Answer]
    submitted: float
    waited: float = 0.0
    ready: float = 0.0
    pixels: Pixels | None = None
    lost: tuple[str, ...] = ()
    explain: bool = False


class Batcher:
    """Batch what the event loop submits, and compute it on a thread of its own, which also loads the model.

    Args:
        load: gives the model; called on the network's thread, and so are all passes.
        max_batch: images in a pass at most; None: chosen by measuring, up to :data:`MOST_IMAGES`.
        max_wait: seconds, as above.
        max_queue: images before the network at most.
        max_pixels: of an image; a larger one is refused by its header, before it is decoded. Of large images that are
            decoded at the same time there are no more in all, and as many of small ones.
        threads: that decode small images, and as many large ones.
        observe: called with what took how long: ``queue``, ``decode`` (seconds of an image), ``network`` (seconds of a
            pass) and ``batch`` (images of a pass); from several threads.
        abstain_at: the share of answers that are to be right: the others are not sure.

    Attributes:
        trained: the model, once ``is_ready``.
        judge: of its limits, where they lie beside its weights.
        failure: what ``load`` or the first pass raised.
        rates: images per second by batch, as measured before the first request.
        queued: images before the network.
    """

    def __init__(
        self,
        load: Callable[[], Trained],
        *,
        max_batch: int | None,
        max_wait: float,
        max_queue: int,
        max_pixels: int,
        threads: int,
        observe: Callable[[str, float], None],
        abstain_at: float | None = None,
    ) -> None:
        self.max_batch, self.max_wait, self.max_queue, self.max_pixels = max_batch, max_wait, max_queue, max_pixels
        self.trained: Trained | None = None
        self.judge: Judge | None = None
        self._abstain_at = abstain_at
        self.failure: BaseException | None = None
        self.is_ready = False
        self.rates: dict[int, float] = {}
        self.rate = math.nan
        self.queued = 0
        self._load, self._observe = load, observe
        self._limit = PassLimit("evaluation", on_halved=lambda halved: print_note(halved.message))
        self._condition = threading.Condition()  # guards queued, and the next three
        self._ready: deque[_Item] = deque()
        self._coming = 0  # requests being received, and images being decoded or waiting for it
        self._is_closed = False
        self._pool = ThreadPoolExecutor(threads, "steady-decode")
        self._large_pool = ThreadPoolExecutor(threads, "steady-decode-large")
        self._scratch = threading.local()
        self._room, self._large_room = PixelRoom(max_pixels), PixelRoom(max_pixels)
        self._trim: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._work, name="steady-network")

    def start(self) -> None:
        """Begin to load the model; called in the event loop that will submit images."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End all threads; what is still queued gets no answer."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._pool.shutdown(cancel_futures=True)
        self._large_pool.shutdown(cancel_futures=True)
        if self._thread.ident is not None:
            self._thread.join()
        gc.unfreeze()  # or what is left at the end of the process counts as leaked

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Count a request that is being received: a batch may wait for its images."""
        self._come(1)
        try:
            yield
        finally:
            self._come(-1)

    def _come(self, count: int) -> None:
        with self._condition:
            self._coming += count
            self._condition.notify_all()

    def submit(self, images: Sequence[bytes], *, explain: bool = False) -> list[asyncio.Future[Answer]]:
        """Queue encoded images; each future gets an Answer, a BadImageError or a PassError.

        An image is dropped where its future is cancelled. ``explain``: make heat maps.

        Raises:
            BusyError: there is no room for all of them.
        """
        with self._condition:
            if self.queued + len(images) > self.max_queue:
                raise BusyError(max(1, math.ceil(self.queued / self.rate)))
            self.queued += len(images)
            self._coming += len(images)
        now = time.perf_counter()
        items = [_Item(data, self._loop.create_future(), now, explain=explain) for data in images]
        for item in items:
            self._pool.submit(self._decode, item)
        return [item.answer for item in items]

    # -- decoding threads ----------------------------------------------------------------------------------------------

    def _decode(self, item: _Item, *, is_large: bool = False) -> None:
        began, error = time.perf_counter(), None
        item.waited = began - item.submitted
        if not item.answer.cancelled():
            try:
                encoded = open_image(item.data, max_pixels=self.max_pixels)
                if not is_large and encoded.height * encoded.width > LARGE_PIXELS:
                    self._large_pool.submit(self._decode, item, is_large=True)
                    return
                if encoded.opened is not None:
                    item.lost = tuple(encoded.opened.info.get("lost", {}).values())
                # What is kept for the next image would be as large as the largest so far.
                scratch = Scratch() if is_large else self._scratch.__dict__.setdefault("scratch", Scratch())
                room, is_dropped = self._large_room if is_large else self._room, item.answer.cancelled
                item.pixels = decode_square(item.data, encoded, self._crop, scratch, room, is_dropped=is_dropped)
            except BadImageError as fault:
                error = fault
            except Exception as fault:  # noqa: BLE001 - a thread's edge: decoders of strangers' files raise anything
                error = BadImageError(first_line(fault))
            self._observe("decode", time.perf_counter() - began)
        item.data, item.ready = b"", time.perf_counter()
        with self._condition:
            self._coming -= 1
            if item.pixels is None:
                self.queued -= 1
            else:
                self._ready.append(item)
            self._condition.notify_all()
        if error is not None:
            self._deliver([(item, error)])
        if is_large:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._trim_later)

    def _trim_later(self) -> None:
        """Give the memory of large images back, once no more of them come: ``malloc`` would keep it for ever."""
        if self._trim is not None:
            self._trim.cancel()
        self._trim = self._loop.call_later(_TRIM_SECONDS, lambda: self._loop.run_in_executor(None, return_free_memory))

    # -- the network's thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self.trained = self._load()
            self.judge = open_judge(self.trained, self._abstain_at)
            self._crop = evaluation_crop(self.trained.input)
            self._warm()
            gc.collect()
            gc.freeze()  # torch's objects stay: to look at them all again took 0.2 s, in which nothing was answered
        except BaseException as error:  # noqa: BLE001 - a thread's edge: whoever started it raises it
            self.failure = error
            return
        self.is_ready = True
        while batch := self._next():
            self._compute(batch)

    def _warm(self) -> None:
        """Compute batches of 1, 2, 4 ... images of noise, time them, and choose ``max_batch`` where it is None.

        On a CPU an image costs processor time: of that, decoding leaves the network less, and other processes' work
        does not count.
        """
        assert self.trained is not None
        most, began = self.max_batch or MOST_IMAGES, time.perf_counter()
        shape = (most, self._crop.size, self._crop.size, self._crop.channels)
        self._memory = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        clock = time.process_time if self.trained.policy.device.type == "cpu" else time.perf_counter
        costs = dict[int, float]()
        for size in [*(2**k for k in range(most.bit_length()) if 2**k < most), most]:
            self._run(size)  # kernels are chosen and memory is found in the first pass of a size
            seconds, spent = list[float](), list[float]()
            for _ in range(2):
                since, before = time.perf_counter(), clock()
                self._run(size)
                seconds.append(time.perf_counter() - since)
                spent.append(clock() - before)
            self.rates[size], costs[size] = size / min(seconds), min(spent) / size
            if self._is_closed or time.perf_counter() - began > WARM_SECONDS:
                break
        if self.max_batch is None:
            most_cost = MORE_COST * min(costs.values())
            self.max_batch = max(size for size, cost in costs.items() if cost <= most_cost)
        self.rate = max(rate for size, rate in self.rates.items() if size <= self.max_batch)

    def _next(self) -> list[_Item]:
        """Wait for a batch; empty where the batcher was closed."""
        assert self.max_batch is not None
        with self._condition:
            while True:
                while not (self._ready or self._is_closed):
                    self._condition.wait()
                if self._is_closed:
                    return []
                end = self._ready[0].ready + self.max_wait
                while len(self._ready) < self.max_batch and self._coming and not self._is_closed:
                    if (left := end - time.perf_counter()) <= 0:
                        break
                    self._condition.wait(left)
                ready = [self._ready.popleft() for _ in range(min(len(self._ready), self.max_batch))]
                self.queued -= len(ready)
                if batch := [item for item in ready if not item.answer.cancelled()]:
                    return batch

    def _compute(self, batch: list[_Item]) -> None:
        began = time.perf_counter()
        for row, item in zip(self._memory, batch, strict=False):
            row[...] = item.pixels
            item.pixels = None
            self._observe("queue", item.waited + began - item.ready)
        answers: Sequence[Answer | PassError]
        try:
            answers = self._run(len(batch))
        except Exception as error:  # noqa: BLE001 - whatever an engine raises: these images fail, the next are computed
            print_note(f"the network failed: {first_line(error)}")  # not for clients: it may name files of the server
            answers = [PassError("the network failed on a batch: the server's messages say why")] * len(batch)
        seconds = time.perf_counter() - began
        self.rate += _NEWEST * (len(batch) / seconds - self.rate) if len(batch) * 2 >= (self.max_batch or 1) else 0
        self._observe("network", seconds)
        self._observe("batch", len(batch))
        answered = list(zip(batch, answers, strict=True))
        self._deliver([(item, answer) for item, answer in answered if not item.explain])
        for row, (item, answer) in enumerate(answered):
            if item.explain:
                self._deliver([(item, self._explained(row, item, answer))])

    def _run(self, count: int) -> list[Answer]:
        """Compute the first ``count`` images in memory, as ``predict`` does."""
        trained, pixels = self.trained, torch.from_numpy(self._memory[:count])
        assert trained is not None
        judged: Sequence[Judgement | None] = [None] * count
        with torch.no_grad():
            if self.judge is None:
                logits = logits_of(trained.module, pixels, trained.policy, trained.input, self._limit)
            else:
                logits, judged = self.judge.answer(pixels.to(trained.policy.device), self._limit)
            rows = zip(logits.cpu(), trained.probabilities(logits).cpu(), judged, strict=True)
            return [Answer(row, likely, judgement=judgement) for row, likely, judgement in rows]

    def _explained(self, row: int, item: _Item, answer: Answer | PassError) -> Answer | PassError:
        """Add the heat map of an image in memory, unless its request was given up."""
        if isinstance(answer, PassError) or item.answer.cancelled():
            return answer
        assert self.trained is not None
        try:
            images = torch.from_numpy(self._memory[row : row + 1]).to(self.trained.policy.device)
            output, limit = answer.logits.argmax().view(1, 1).to(images.device), PassLimit("evaluation", lambda _: None)
            return answer._replace(heat_map=heat_maps(self.trained, images, output, limit)[0, 0])
        except Exception as error:  # noqa: BLE001 - as of a pass; the other images of the batch have their answers
            print_note(f"no heat map could be made: {first_line(error)}")
            return PassError("no heat map could be made: the server's messages say why")

    def _deliver(self, answers: Sequence[tuple[_Item, Answer | Exception]]) -> None:
        def settle() -> None:
            for item, answer in answers:
                if item.answer.done():
                    continue
                if isinstance(answer, Exception):
                    item.answer.set_exception(answer)
                else:
                    item.answer.set_result(answer._replace(lost=item.lost))

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(settle)


def open_image(data: bytes, *, max_pixels: int) -> Encoded:
    """Read an image file's header.

    Raises:
        TooManyPixelsError: it has more than ``max_pixels``.
        BadImageError: it cannot be decoded.
    """
    encoded = probe(np.frombuffer(data, np.uint8).copy())  # the decoder may write into it
    if encoded.height * encoded.width > max_pixels:
        raise TooManyPixelsError(f"{encoded.height * encoded.width:,} pixels, more than {max_pixels:,}")
    return encoded


def decode_square(
    data: bytes,
    encoded: Encoded,
    crop: Crop,
    scratch: Scratch,
    room: PixelRoom,
    *,
    is_dropped: Callable[[], bool] = lambda: False,
) -> Pixels:
    """Decode an image file, upright, into the square of an evaluation, uint8[S, S, C]: the bytes that predict sees.

    Args:
        data: the whole file.
        encoded: from :func:`open_image`.
        crop: without anything random.
        scratch: of this thread.
        room: of all threads that decode such images.
        is_dropped: whether nobody wants it any more, which is asked once there is room.

    Raises:
        BadImageError: it cannot be decoded, or nobody wants it.
    """
    memory = encoded.data
    plan = crop.plan(np.array([encoded.size]), np.empty((1, 0)))
    # A baseline JPEG is decoded in strips; of any other the decoder holds all.
    shrunk = int(plan.shrinks[0]) if encoded.head is not None and encoded.head.scan else 1
    with room.take(encoded.height * encoded.width // shrunk**2):
        if is_dropped():
            raise BadImageError("the request was given up")
        if (turned := upright(data, shorter_side=packed_side(crop.size))) is not data:
            memory = np.frombuffer(turned, np.uint8).copy()
            encoded = probe(memory)
            plan = crop.plan(np.array([encoded.size]), np.empty((1, 0)))
        out = np.empty((1, crop.size, crop.size, crop.channels), np.uint8)
        if not cut_all(out, [encoded], memory, np.array([0, len(memory)]), crop, plan, scratch)[0]:
            cut_into(out[0], encoded, crop, plan, 0, scratch, crop.needed(plan)[0].tolist())
    square: Pixels = out[0]
    return square
