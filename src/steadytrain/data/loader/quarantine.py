"""Images that cannot be decoded: replaced in training by a rule, named once, refused when there are too many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from steadytrain.data.loader.sampler import Ints
from steadytrain.data.packing.pixels import BadImageError
from steadytrain.errors import FeedError, TooManyBadError

SHARE, COUNT = 0.01, 5  # more bad images than the larger of these is too many

_REMEDY = "steady check names all of them, and steady pack leaves them out"


@dataclass(frozen=True)
class BadImage:
    """A record that could not be decoded, why, and the record that was used instead."""

    id: int
    reason: str
    instead: int


class Quarantine:
    """The bad images of one feed. Safe from several threads.

    A bad sample is replaced by the next one, in the data's order and starting again after its end, that can be used:
    a rule that depends on the data alone, never on what was met before.

    Args:
        ids: int64[n], the record of each sample.
        replaces: whether bad samples are replaced (training) or end it all (evaluation).
        name: what the source calls a record; None where it has no names.

    ``met`` is all that was met; some of it with batches that were never taken.
    """

    def __init__(self, ids: Ints, *, replaces: bool, name: Callable[[int], str] | None = None) -> None:
        self.ids = ids
        self.replaces = replaces
        self.name = name
        self.samples: set[int] = set()
        self.met: list[BadImage] = []
        self._lock = threading.Lock()

    def replace(self, sample: int, fault: BadImageError, use: Callable[[int], None], met: list[BadImage]) -> int:
        """Find the sample that stands in for a bad one.

        Args:
            sample: the bad one.
            fault: what is wrong with it.
            use: tries another sample, and raises BadImageError where that is bad as well.
            met: gets the bad images that nobody has met before.

        Returns:
            The sample that was used.

        Raises:
            FeedError: this is an evaluation, or nothing of the data can be decoded.
            TooManyBadError: more than the larger of 1 % and 5 images are bad.
        """
        if not self.replaces:
            told = f"record {self.ids[sample]} cannot be decoded ({self._why(sample, fault)})"
            raise FeedError(f"{told}, and an evaluation counts every image: {_REMEDY}") from fault
        faults = {sample: fault}
        for step in range(1, len(self.ids)):
            self._limit(faults)
            other = (sample + step) % len(self.ids)
            try:
                use(other)
            except BadImageError as error:
                faults[other] = error
            else:
                met += self._note(faults, other)
                return other
        raise FeedError(f"none of the {len(self.ids):,} images can be decoded ({fault}): is this a file of images?")

    def _limit(self, faults: dict[int, BadImageError]) -> None:
        limit = max(COUNT, int(SHARE * len(self.ids)))
        if len(self.samples | faults.keys()) > limit:
            sample, fault = next(reversed(faults.items()))
            told = f"more than {limit} of {len(self.ids):,} images cannot be decoded"
            raise TooManyBadError(f"{told}, record {self.ids[sample]} ({self._why(sample, fault)}) for one: {_REMEDY}")

    def _note(self, faults: dict[int, BadImageError], instead: int) -> list[BadImage]:
        with self._lock:
            new = sorted(faults.keys() - self.samples)
            self.samples |= faults.keys()
            met = [BadImage(int(self.ids[s]), self._why(s, faults[s]), int(self.ids[instead])) for s in new]
            self.met += met
        return met

    def _why(self, sample: int, fault: BadImageError) -> str:
        return str(fault) if self.name is None else f"{self.name(int(self.ids[sample]))}: {fault}"
