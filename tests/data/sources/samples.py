"""Small sources made on the spot, and what a listing of them must say."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.data.packing.pictures import picture

from steadytrain.data.sources.find import find
from steadytrain.data.sources.listing import Listing


def encoded(number: int, form: str = "PNG") -> bytes:
    """A small picture, different for each number."""
    file = io.BytesIO()
    picture(number, (12, 10)).save(file, form)
    return file.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes] | Iterable[tuple[str, bytes]], **kind: Any) -> Path:
    """A tar of these members, by the standard library."""
    pairs = files.items() if isinstance(files, Mapping) else files
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **kind) as tar:
        for name, data in pairs:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def found(source: object, scratch: Path, messages: list[str] | None = None, **options: Any) -> list[Listing]:
    """What ``find`` makes of a source; remarks go to ``said``."""
    say = (lambda _: None) if messages is None else messages.append
    return find(str(source), scratch=scratch, say=say, **options)


def content(listing: Listing, number: int) -> bytes:
    """The bytes of one image, wherever they lie."""
    if listing.pieces is not None:
        return listing.pieces[number].read()
    return (listing.root / listing.names[number]).read_bytes()


def told(listing: Listing) -> dict[str, Any]:
    """All that a listing says of its images, the place of their bytes and their times aside."""
    return {
        "split": listing.split,
        "classes": listing.classes,
        "names": list(listing.names),
        "labels": listing.labels.tolist(),
        "sizes": listing.sizes.tolist(),
        "ids": None if listing.ids is None else listing.ids.tolist(),
        "passed over": listing.passed_over,
    }


def require_same(listings: list[Listing], others: list[Listing], *, every: int = 1) -> None:
    """The same images in the same order, with the same bytes (of every ``every``-th)."""
    assert [told(part) for part in listings] == [told(part) for part in others]
    for listing, other in zip(listings, others, strict=True):
        for number in range(0, len(listing), every):
            assert content(listing, number) == content(other, number)
        assert np.all(listing.times > 0)
