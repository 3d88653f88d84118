"""Examine images before they are packed: a folder, a list, or whatever else packing takes."""

from __future__ import annotations

import os
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.classes import check_classes
from steadytrain.data.checking.duplicates import same
from steadytrain.data.checking.file_types import LOOK_AT, Foreign, recognise
from steadytrain.data.checking.findings import Findings, Report
from steadytrain.data.checking.listed import clashes, hidden, list_anyway
from steadytrain.data.checking.look import FINGERPRINT_BYTES, Look, fingerprint, look_at
from steadytrain.data.checking.reading import Extent, Progress
from steadytrain.data.checking.remedies import remedies_for_source
from steadytrain.data.packing.pixels import BadImageError
from steadytrain.data.packing.scratch import scratch_beside
from steadytrain.data.packing.tally import most_left_out
from steadytrain.data.packing.worker_pool import do_all
from steadytrain.data.sources.image_bytes import read_file, read_piece
from steadytrain.data.sources.listing import PORTION_FILES, Listing, is_image, shown
from steadytrain.data.sources.pieces import Piece

Item = str | Piece

FORMATS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "jpg"),
    **dict.fromkeys((".tif", ".tiff"), "tiff"),
    **dict.fromkeys((".ppm", ".pgm", ".pbm", ".pnm"), "ppm"),
    **{f".{name}": name for name in ("png", "bmp", "gif", "webp", "avif")},
}


def examine_source(
    source: str | Path | Sequence[str | Path],
    *,
    val: str | Path | None = None,
    root: Path | None = None,
    labels: Path | None = None,
    decode: bool = True,
    workers: int = 1,
    most: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], object] | None = None,
) -> Report:
    """Examine what would be packed.

    Args:
        source: anything that :func:`~steadytrain.data.packing.pack.pack` takes; several are one set.
        val: another source, of validation images: what it shares with the first is found. Of one that is split, its
            validation images count.
        root: the folder that a ``.lst``'s paths start from.
        labels: a file of labels, for images that lie in no folders of classes.
        decode: look at the images, too; else at names alone.
        workers: processes to decode with; 0 decodes here, where a decoder's crash is a crash.
        most: findings to keep of each kind; None: all.
        progress: called with the files done so far, and all there are.
        say: takes the report's remarks as they come: what lasts is told before it is begun.

    Raises:
        DataError: there is no such source.
        FailedError: no process can be started.
    """
    began = time.monotonic()
    found = Findings(most)
    remarks: list[str] = []
    sources = [str(one) for one in ([source] if isinstance(source, str | Path) else source)]

    def remark(text: str) -> None:
        remarks.append(text)
        if say is not None:
            say(text)

    # Whatever is decompressed is read from there until all is looked at.
    with scratch_beside(Path(tempfile.gettempdir(), "steady-check")) as place:
        listed = list_anyway(sources, root=root, labels=labels, scratch=place / "source", say=remark)
        if not listed.listings:
            return _other_file(sources, listed.refusal, found)
        listings = listed.listings
        if val is not None:
            others = list_anyway([str(val)], scratch=place / "val", say=remark).listings
            listings = _beside(listings, others)
        survey = _Survey(listings, found)
        survey.check_names(sources)
        survey.check_classes()
        if decode:
            survey.look(workers, progress or (lambda done, total: None))
            survey.check_same()
    bad = sum(found.counts[kind] for kind in _BAD)
    _judge(found, listed.refusal, bad, len(survey))
    return Report(
        path=_told(sources),
        what=_what(sources, listings, listed.refusal),
        findings=found,
        of_files=True,
        num_images=len(survey),
        num_sound=len(survey) - bad,
        bytes=sum(int(one.sizes[one.sizes > 0].sum()) for one in listings),
        classes=dict(zip(listings[0].classes, listings[0].counts(), strict=True)),
        split=listings[0].split,
        formats=dict(sorted(survey.formats.items())),
        width=survey.width.pair,
        height=survey.height.pair,
        facts=_facts(listings, decode=decode),
        remarks=tuple(remarks),
        remedies=remedies_for_source(sources, found, total=len(survey), bad=bad, root=root, labels=labels),
        seconds=time.monotonic() - began,
    )


_BAD = ("no-image", "damaged-image", "truncated-image", "unusable-image", "unreadable")


def _beside(listings: Sequence[Listing], others: Sequence[Listing]) -> list[Listing]:
    """The training images of one source, and the validation images of another."""
    chosen = [one for one in others if one.split == "val"] or others[:1]
    return [replace(listings[0], split="train"), *(replace(one, split="val") for one in chosen)]


def _facts(listings: Sequence[Listing], *, decode: bool) -> tuple[str, ...]:
    told = [f"{one.split}: {len(one):,} images" for one in listings if one.split]
    return tuple(told if decode else [*told, "the images themselves were not looked at"])


def _judge(found: Findings, refusal: str, bad: int, total: int) -> None:
    """What packing makes of the whole."""
    most = most_left_out(total)
    if bad > most:
        found.add("too-many-bad", f"{bad:,} of {total:,}; {most:,} may be left out (the larger of 1 % and 5)")
    if refusal and not (found.counts["empty-class"] or found.counts["class-only-val"]):
        found.add("refused", refusal)


def _told(sources: Sequence[str]) -> str:
    """Sources as a person reads them."""
    return " ".join(str(Path(one)) if Path(one).exists() else one for one in sources)


def _what(sources: Sequence[str], listings: Sequence[Listing], refusal: str) -> str:
    path = Path(sources[0])
    if len(sources) > 1 or not path.is_dir():
        return _name_of(sources)
    if refusal:
        return "a folder"
    splits = [one.split for one in listings if one.split]
    return f"a folder of {' and '.join(splits)}" if splits else "a folder of classes"


def _name_of(sources: Sequence[str]) -> str:
    """What sources are that are no folder."""
    path = Path(sources[0])
    if len(sources) > 1:
        return f"{len(sources):,} sources"
    if not path.is_file():
        return "neither a file nor a folder" if path.exists() else "several files"
    if path.suffix.lower() == ".lst":
        return "a list of images"
    told = _recognised(path)
    if told is None or told.name == "a text":
        return f"a {path.suffix.lstrip('.').upper()} file" if path.suffix else "a file"
    return told.name


def _recognised(path: Path) -> Foreign | None:
    with path.open("rb") as file:
        return recognise(file.read(LOOK_AT), path.stat().st_size)


def _other_file(sources: Sequence[str], refusal: str, found: Findings) -> Report:
    """What packing does not take: named for what it is, where that is known."""
    path = Path(sources[0])
    is_file = len(sources) == 1 and path.is_file()
    told = _recognised(path) if is_file else None
    advice: tuple[tuple[str, str], ...] = ()
    if told is None or told.packs or path.suffix.lower() == ".lst":
        found.add("refused", refusal)
    else:
        found.add("other-file", told.name, name=path.name)
        advice = ((told.advice, ""),)
    size = path.stat().st_size if is_file else 0
    return Report(
        path=_told(sources), what=_name_of(sources), findings=found, of_files=True, bytes=size, remedies=advice
    )


def look_at_files(items: Sequence[Item]) -> list[Look]:
    """Read and decode some images."""
    return [_look_at_file(item) for item in items]


def _look_at_file(item: Item) -> Look:
    try:
        data = read_file(item) if isinstance(item, str) else read_piece(item)
    except BadImageError as error:
        return Look("unreadable", str(error), bytes(FINGERPRINT_BYTES))
    if isinstance(item, Piece) and item.pixels is not None:
        return Look("", "", fingerprint(data), "raw", item.pixels.width, item.pixels.height)
    return look_at(data)


def _died(_: Item, how: str) -> list[Look]:
    return [Look("damaged-image", f"the decoder died of it ({how})", bytes(FINGERPRINT_BYTES))]


@dataclass
class _Survey:
    """Listings, and what has been seen of their files so far."""

    listings: list[Listing]
    found: Findings
    prints: bytearray = field(default_factory=bytearray)
    formats: Counter[str] = field(default_factory=Counter)
    width: Extent = field(default_factory=Extent)
    height: Extent = field(default_factory=Extent)

    def __len__(self) -> int:
        return sum(len(one) for one in self.listings)

    def check_names(self, sources: Sequence[str]) -> None:
        """What is passed over, and names that are alike."""
        for one in self.listings:
            for name in one.passed_over:
                self.found.add("unclassed" if is_image(name) else "passed-over", name=shown(name))
            for first, second in clashes(one.names):
                same = unicodedata.normalize("NFC", first) == unicodedata.normalize("NFC", second)
                form = ", in another Unicode form" * same
                self.found.add("name-clash", f"and {shown(second)}{form}", name=shown(first))
        if self.listings:
            for first, second in clashes(self.listings[0].classes):
                self.found.add("name-clash", f"and {second}, both classes", name=first)
        for source in sources:
            for name in hidden(source):
                self.found.add("hidden", name=shown(name))

    def check_classes(self) -> None:
        """Sizes of classes, and whether the splits have the same ones."""
        if self.listings[0].labels.ndim > 1:
            self.found.add("label-vectors", f"{self.listings[0].labels.shape[1]} labels for each image")
            return
        for one in self.listings:
            required = one.split in ("", "train")
            check_classes(one.classes, one.counts(), self.found, required=required, split=one.split)
        filled = [dict(zip(one.classes, one.counts(), strict=True)) for one in self.listings]
        for one, theirs in zip(self.listings[1:], filled[1:], strict=True):
            for name in sorted(filled[0].keys() | theirs.keys()):
                train, other = filled[0].get(name, 0), theirs.get(name, 0)
                if train and not other:
                    self.found.add("class-only-train", f"{train:,} images in train, none in {one.split}", name=name)
                elif other and not train:
                    self.found.add("class-only-val", f"{other:,} images in {one.split}, none in train", name=name)

    def look(self, workers: int, progress: Progress) -> None:
        """Look at every image, in children."""
        names = ((one, name) for one in self.listings for name in one.names)
        workers = min(workers, 1 + len(self) // PORTION_FILES)
        done = 0
        with closing(do_all(self._portions(), look_at_files, _died, workers=workers)) as answers:
            for looks in answers:
                for look in looks:
                    self._take(look, shown(next(names)[1]))
                done += len(looks)
                progress(done, len(self))

    def _portions(self) -> Iterator[Sequence[Item]]:
        for one in self.listings:
            for start, stop in one.portions():
                yield one.places(start, stop)

    def _take(self, look: Look, name: str) -> None:
        self.prints += look.fingerprint if not look.fault else bytes(FINGERPRINT_BYTES)
        if look.fault:
            self.found.add(look.fault, look.detail, name=name)
            return
        self.formats[look.format] += 1
        self.width.add(look.width)
        self.height.add(look.height)
        suffix = FORMATS.get(os.path.splitext(name)[1].lower())  # noqa: PTH122
        if suffix and look.format in FORMATS.values() and suffix != look.format:
            self.found.add("wrong-suffix", look.format.upper(), name=name)
        for kind, detail in look.odd:
            self.found.add(kind, detail, name=name)

    def check_same(self) -> None:
        """Images that are there more than once: in one split, in two, in two classes."""
        prints = np.frombuffer(bytes(self.prints), np.uint8).reshape(-1, FINGERPRINT_BYTES)
        rows = np.flatnonzero(prints.any(axis=1))
        starts = np.cumsum([0, *(len(one) for one in self.listings)])
        for group in same(prints[rows]):
            self._tell_same([self._place(int(row), starts) for row in rows[group]])

    def _place(self, row: int, starts: NDArray[np.int64]) -> _Place:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        one = self.listings[number]
        at = row - int(starts[number])
        label = int(one.labels[at]) if one.labels.ndim == 1 else 0
        return _Place(shown(one.names[at]), one.split, one.classes[label] if one.classes else "")

    def _tell_same(self, places: list[_Place]) -> None:
        first = places[0]
        for one in places[1:]:
            kind = "leak" if first.split == "train" and one.split != "train" else "duplicate"
            self.found.add(kind, f"as {first.name}", name=one.name)
        by_class = {one.name_of_class: one for one in reversed(places)}
        if len(by_class) > 1:
            told = ", ".join(f"{name}: {one.name}" for name, one in sorted(by_class.items())[:4])
            self.found.add("conflicting-labels", told + ", ..." * (len(by_class) > 4), name=first.name)


@dataclass(frozen=True)
class _Place:
    """Where an image lies."""

    name: str
    split: str
    name_of_class: str
