"""Examine images before they are packed: a folder, a list, or whatever else packing takes."""

from __future__ import annotations

import os
import tempfile
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from steadytrain.data.checking.copies import ImageSet, find_alike_images, find_copies
from steadytrain.data.checking.findings import IMAGE_FAULTS, Findings, Report, remedies_for_source
from steadytrain.data.checking.images import ImageTally, check_classes
from steadytrain.data.filenames import is_image
from steadytrain.data.images.file_types import LOOK_AT, FileType, recognise
from steadytrain.data.images.look import Look, look_in_children
from steadytrain.data.packing.pack import default_max_bad
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import find_all
from steadytrain.data.sources.folder import list_folder, list_unclassed, scan_folder
from steadytrain.data.sources.layout import class_splits, flat_splits, look_on_disk
from steadytrain.data.sources.listing import PORTION_FILES, Listing, Piece, look_at_files
from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.errors import DataError
from steadytrain.format import OnProgress, Say, count, printable


def examine_source(
    source: str | Path | Sequence[str | Path],
    *,
    val: str | Path | None = None,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    path_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    split_column: str | None = None,
    zip_names: str | None = None,
    decode: bool = True,
    near: bool = False,
    workers: int = 1,
    most: int | None = None,
    progress: OnProgress | None = None,
    say: Say | None = None,
) -> Report:
    """Examine what would be packed.

    Args:
        source: anything that :func:`~steadytrain.data.packing.pack.pack` takes; several are one set.
        val: another source, of validation images: what it shares with the first is found. Of one that is split, its
            validation images count.
        root: the folder that a ``.lst``'s paths start from.
        labels: a file of labels, for images that lie in no folders of classes.
        path_column, label_column, split_column, zip_names: as for :func:`~steadytrain.data.packing.pack.pack`.
        decode, near, workers, most: as for :func:`.examine_records`; without decoding, names alone are looked at.
        progress: called with the files done so far, and all there are.
        say: takes the report's remarks as they come: what lasts is announced before it is begun.

    Raises:
        DataError: there is no such source, or ``val`` cannot be listed.
        FailedError: no process can be started.
    """
    began = time.monotonic()
    findings = Findings(most)
    images = ImageTally(findings)
    remarks: list[str] = []
    sources = [str(item) for item in ([source] if isinstance(source, str | Path) else source)]
    # By os.path here and below: the names of many files may be longer than a path may be, which pathlib raises.
    shown = " ".join(str(Path(item)) if os.path.exists(item) else item for item in sources)  # noqa: PTH110
    kind, file_type = _describe(sources)
    columns = ColumnNames.of(path_column, label_column, split_column, zip_names)

    def remark(text: str) -> None:
        remarks.append(text)
        if say is not None:
            say(text)

    # Whatever is decompressed is read from there until all is looked at.
    with scratch_beside(Path(tempfile.gettempdir(), "steady-check")) as scratch:
        lookup: dict[str, Any] = {"root": root, "labels": labels, "columns": columns}
        listings, refusal = _list_anyway(sources, **lookup, scratch=scratch / "source", say=remark)
        if not listings:  # packing does not take it: named for what it is, where that is known
            path = Path(sources[0])
            remedies: tuple[tuple[str, str], ...] = ()
            if file_type is None or file_type.packs:
                findings.add("refused", refusal)
            else:
                findings.add("other-file", file_type.name, name=path.name)
                remedies = ((refusal.partition(": ")[2], ""),)  # of what it is, as packing says it
            num_bytes = path.stat().st_size if len(sources) == 1 and path.is_file() else 0
            return Report(path=shown, what=kind, findings=findings, of_files=True, bytes=num_bytes, remedies=remedies)
        if val is not None:
            only_zip = ColumnNames(zip_names=columns.zip_names)
            others, why = _list_anyway([str(val)], columns=only_zip, scratch=scratch / "val", say=remark)
            if not others:
                raise DataError(why)
            chosen = [listing for listing in others if listing.split == "val"] or others[:1]
            listings = [replace(listings[0], split="train"), *(replace(part, split="val") for part in chosen)]
        total = sum(map(len, listings))
        _check_names(listings, findings)
        _check_class_sizes(listings, findings)
        if decode:
            look = partial(look_at_files, near=near)
            _look(listings, images, look, min(workers, 1 + total // PORTION_FILES), total, progress)
            images.add_depth()
            _find_duplicates(listings, images, findings)
    bad = sum(findings.counts[kind] for kind in (*IMAGE_FAULTS, "unreadable"))
    allowed = default_max_bad(total)
    if bad > allowed:
        findings.add("too-many-bad", f"{bad:,} of {total:,}; {allowed:,} may be left out (the larger of 1 % and 5)")
    if refusal and not (findings.counts["empty-class"] or findings.counts["class-only-val"]):
        findings.add("refused", refusal)
    splits = [listing.split for listing in listings if listing.split]
    if len(sources) == 1 and os.path.isdir(sources[0]):  # noqa: PTH112
        kind = f"a folder of {' and '.join(splits)}" if splits else "a folder of classes"
        kind = "a folder" if refusal else kind
    facts = [f"{listing.split}: {len(listing):,} images" for listing in listings if listing.split]
    if listings[0].labels.ndim > 1 and not findings.counts["label-vectors"]:
        without = sum(int((listing.labels.sum(1) == 0).sum()) for listing in listings)
        none = f"; {count(without, 'image has', 'images have')} none" if without else ""
        facts.append(f"several labels for each image{none}")
    if not decode:
        facts.append("the images themselves were not checked")
    facts += images.add_shape()
    return Report(
        path=shown,
        what=kind,
        findings=findings,
        of_files=True,
        num_images=total,
        num_sound=total - bad,
        bytes=sum(int(listing.sizes[listing.sizes > 0].sum()) for listing in listings),
        classes=_count_classes(listings[0]),
        is_multi_label=listings[0].labels.ndim > 1,
        split=listings[0].split,
        formats=dict(sorted(images.formats.items())),
        width=images.width,
        height=images.height,
        facts=tuple(facts),
        remarks=tuple(remarks),
        remedies=remedies_for_source(
            sources, findings, total=total, bad=bad, root=root, labels=labels, columns=columns.options()
        ),
        seconds=time.monotonic() - began,
    )


def _describe(sources: Sequence[str]) -> tuple[str, FileType | None]:
    """Describe sources that are no folder in a few words; return also the type of a single file that is no list."""
    path = Path(sources[0])
    if len(sources) > 1:
        return f"{len(sources):,} sources", None
    if not os.path.isfile(path):  # noqa: PTH113
        return "neither a file nor a folder" if os.path.exists(path) else "several files", None  # noqa: PTH110
    if path.suffix.lower() == ".lst":
        return "a list of images", None
    with path.open("rb") as file:
        file_type = recognise(file.read(LOOK_AT), path.stat().st_size)
    if file_type is None or file_type.name == "text":
        return f"a {path.suffix.lstrip('.').upper()} file" if path.suffix else "a file", file_type
    return file_type.name, file_type


def _list_anyway(
    sources: Sequence[str],
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    columns: ColumnNames | None = None,
    scratch: Path,
    say: Say,
) -> tuple[list[Listing], str]:
    """List sources as one set, what packing refuses by whatever classes there are; and why it refuses, or nothing."""
    path = Path(sources[0])
    try:
        return find_all(sources, root=root, labels=labels, columns=columns, scratch=scratch, say=say), ""
    except DataError as error:
        if not all(map(os.path.exists, sources)):
            raise
        refusal = str(error)
    if len(sources) > 1 or not path.is_dir():
        return [], refusal
    look = look_on_disk(path)
    try:
        if flat_splits(look):  # names of splits are no classes
            return [list_unclassed(*scan_folder(path), path)], refusal
        parts = class_splits(look, path).values() or [""]  # refuses folders that may be no classes
        names = [name for part in parts for name in look(part).folders]
        classes = sorted({unicodedata.normalize("NFC", printable(name)) for name in names})
        return list_folder(path, classes=classes), refusal
    except DataError:
        return [list_unclassed(*scan_folder(path), path)], refusal


def _check_names(listings: Sequence[Listing], findings: Findings) -> None:
    """Add what is passed over."""
    for listing in listings:
        for name in listing.passed_over:
            kind = "unclassed" if is_image(name) else "beside" if name.endswith("/") else "passed-over"
            findings.add(kind, name=printable(name))


def _count_classes(listing: Listing) -> dict[str, int]:
    """Count the images of each class, or with each label where an image may have several of them, which have names."""
    if listing.labels.ndim == 1:
        return dict(zip(listing.classes, listing.counts(), strict=True))
    is_binary = bool(((listing.labels == 0) | (listing.labels == 1)).all())
    return dict(zip(listing.label_names, listing.labels.sum(0).astype(int).tolist(), strict=True)) if is_binary else {}


def _check_class_sizes(listings: Sequence[Listing], findings: Findings) -> None:
    """Add what is notable about sizes of classes, and whether the splits have the same ones."""
    if listings[0].labels.ndim > 1:
        vectors = [listing.labels for listing in listings]
        others = sum(int((~((part == 0) | (part == 1)).all(1)).sum()) for part in vectors)
        if others:
            width = vectors[0].shape[1]
            findings.add("label-vectors", f"{width} labels for each image, not all 0 or 1 in {others:,} images")
        return
    for listing in listings:
        required = listing.split in ("", "train")
        check_classes(listing.classes, listing.counts(), findings, required=required, split=listing.split)
    sizes = [dict(zip(listing.classes, listing.counts(), strict=True)) for listing in listings]
    for listing, theirs in zip(listings[1:], sizes[1:], strict=True):
        for name in sorted(sizes[0].keys() | theirs.keys()):
            train, other = sizes[0].get(name, 0), theirs.get(name, 0)
            if train and not other:
                findings.add("class-only-train", f"{train:,} images in train, none in {listing.split}", name=name)
            elif other and not train:
                findings.add("class-only-val", f"{other:,} images in {listing.split}, none in train", name=name)


def _look(
    listings: Sequence[Listing],
    images: ImageTally,
    look_at_portion: Callable[[Sequence[str | Piece]], list[Look]],
    workers: int,
    total: int,
    progress: OnProgress | None,
) -> None:
    """Look at every image, in children."""
    portions = (listing.places(*portion) for listing in listings for portion in listing.portions())
    names = (name for listing in listings for name in listing.names)
    done = 0
    for looks in look_in_children(portions, look_at_portion, workers=workers):
        for number, look in enumerate(looks, done):
            images.add(look, number, name=printable(next(names)))
        done += len(looks)
        if progress is not None:
            progress(done, total)


def _find_duplicates(listings: Sequence[Listing], tally: ImageTally, findings: Findings) -> None:
    """Add images that are there more than once, and those that look alike: in one split, in two, in two classes."""
    starts = np.cumsum([0, *map(len, listings)])

    def locate(row: int) -> tuple[Listing, int]:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        return listings[number], row - int(starts[number])

    def name_of(row: int) -> str:
        listing, at = locate(row)
        return printable(listing.names[at])

    def class_of(row: int) -> str:
        listing, at = locate(row)
        label = listing.labels[at]
        if listing.labels.ndim > 1:
            names = listing.label_names
            return " and ".join(names[k] for k in np.flatnonzero(label).tolist() if names) or "no label"
        return listing.classes[int(label)] if listing.classes else ""

    images = ImageSet(tally.prints, tally.hashes, lambda row: {"name": name_of(row)}, name_of, class_of)
    find_copies(images, findings, lambda row: locate(row)[0].split)
    parts = [images.part(start, stop) for start, stop in pairwise(starts.tolist())]
    for number, part in enumerate(parts):
        find_alike_images(part, part, findings)
        if number and listings[0].split == "train":
            find_alike_images(part, parts[0], findings, kind="near-leak")
