"""A folder of images in a store as a source of several packing processes: listed, then fetched shard by shard."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from steadytrain.data.arrays import Ints
from steadytrain.data.filenames import is_pattern
from steadytrain.data.names import Names
from steadytrain.data.packing.pack import PackRequest
from steadytrain.data.sources.folder import ANNOTATIONS, build_tree, list_tree
from steadytrain.data.sources.layout import flat_splits
from steadytrain.data.sources.listing import FileList, Listing, Pieces
from steadytrain.data.storage.store import NoObjectError, ObjectFacts, ObjectPlace, Store, is_uri
from steadytrain.errors import DataError, storage_errors
from steadytrain.format import Say

THREADS = 24  # requests to a store that are made at a time

_FETCHED_IMAGES, _FETCHED_BYTES = 1024, 16 << 20  # images and bytes in memory at a time


def folder_in_store(request: PackRequest) -> str:
    """Return the URI of a source that is a folder of objects; empty for any other."""
    for source in request.sources:
        if not is_uri(source) or is_pattern(source) or not _is_folder(source):
            continue
        if len(request.sources) > 1:
            raise DataError(f"{source} is a folder in a store, which several processes pack alone: drop the others")
        return source.rstrip("/") + "/"
    return ""


def _is_folder(uri: str) -> bool:
    if uri.endswith("/"):
        return True
    place = ObjectPlace.parse(uri)
    try:
        Store(place).stat(place)
    except NoObjectError:
        return True
    return False


def list_in_store(request: PackRequest, uri: str, say: Say) -> list[Listing]:
    """List the images below a prefix, in folders of classes or of splits, as if they lay on a disk; fetch none."""
    place, selection = ObjectPlace.folder(uri), request.selection
    files = Store(place).list_all(place, _to_columns)
    if not len(files.names):
        raise NoObjectError(f"there is no object {place}, and nothing below it")
    if selection.val_fraction is not None or selection.train_per_class is not None:
        raise DataError(
            f"each of several processes would compare all images of {uri} to keep duplicates on one side of the split:"
            " pack with one process, or put the images into folders train and val"
        )
    top = build_tree(files, strip=False)
    loose = next((name for name in files.names if "/" not in name or name.endswith(f"/{ANNOTATIONS}")), None)
    splits = [name for names in flat_splits(top.look(files)).values() for name in names]
    problem = ""
    if loose is not None:
        problem = f"{uri}{loose} is in no class folder"
    elif request.labels is not None or request.root is not None:
        problem = "--labels and --root name files beside it"
    elif len(splits) > 1:
        problem = f"the images in {uri} lie in no folders of classes ({', '.join(splits)} are splits)"
    if problem:
        raise DataError(
            f"{problem}: several processes read folders of classes, archives and record files from a store. Pack {uri}"
            " with one process, or from a disk that all of them see"
        )
    root = Path(place.name or place.base.rpartition("/")[2])
    listings = list_tree(top, files, root=root, classes=request.classes, say=say)

    return selection.of(listings, say)


def _to_columns(objects: Iterator[tuple[str, ObjectFacts]]) -> FileList:
    """Put objects into columns, sorted by name: of a million, 45 bytes each stay and not 500."""
    names, sizes, versions = Names(), array("q"), array("q")
    before, is_sorted = "", True  # as S3's always are
    for name, facts in objects:
        names.append(name)
        sizes.append(facts.size)
        versions.append(_version(facts))
        before, is_sorted = name, is_sorted and before <= name
    order = np.arange(len(names)) if is_sorted else np.array(sorted(range(len(names)), key=names.__getitem__))
    return FileList(names if is_sorted else names.take(order), np.asarray(sizes)[order], np.asarray(versions)[order])


def _version(facts: ObjectFacts) -> int:
    """Return a number that changes with an object's content: it stands in for the time of a file."""
    text = facts.etag or facts.modified
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def fetch_images(listing: Listing, uri: str, blob: Path) -> Listing:
    """Fetch the images of a listing from the folder at ``uri`` into one file; return where each lies in it.

    Raises:
        DataError: one is not there any more, or is another one.
        StorageError: the store does not answer, or the disk is full.
    """
    offsets = np.concatenate([[0], np.cumsum(listing.sizes)[:-1]]).astype(np.int64)
    place = ObjectPlace.folder(uri)
    store = Store(place)

    def fetch(row: int) -> memoryview:
        name, size = listing.names[row], int(listing.sizes[row])
        try:
            data, facts = store.read(place.inside(name))
        except NoObjectError:
            if size:
                raise _changed(uri + name) from None
            return memoryview(b"")  # of an empty object there is no byte to ask for
        if (facts.size, _version(facts)) != (size, listing.times[row]):
            raise _changed(uri + name)
        return data

    with storage_errors(blob), blob.open("wb") as file, ThreadPoolExecutor(THREADS, "storage") as pool:
        for first, end in _blocks(listing.sizes):
            file.writelines(pool.map(fetch, range(first, end)))
    pieces = Pieces((str(blob),), np.zeros(len(listing), np.int32), offsets, listing.sizes)
    return replace(listing, pieces=pieces)


def _changed(name: str) -> DataError:
    return DataError(f"{name} was changed after it was listed: run the same command again when nothing writes there")


def _blocks(sizes: Ints) -> Iterator[tuple[int, int]]:
    """Divide images of so many bytes (int64[n]) into blocks that are fetched at a time: yield first and end of each."""
    first, size = 0, 0
    for end, num_bytes in enumerate(sizes.tolist(), start=1):
        size += num_bytes
        if end - first >= _FETCHED_IMAGES or size >= _FETCHED_BYTES or end == len(sizes):
            yield first, end
            first, size = end, 0
