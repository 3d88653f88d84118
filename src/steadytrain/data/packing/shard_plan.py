"""The plan by which several processes pack one source: which images go into which record file, in which order.

It is made once, by one of them, and follows from the source and the settings alone. ``OUT.plan.json`` beside the output
says what is to be packed and into which files; what each file is made of lies in a file of its own in a hidden folder,
so that a worker reads no more than the shards that it packs: a million images are 100 MB of names and places.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg

from steadytrain.data.arrays import Ints
from steadytrain.data.filenames import is_pattern
from steadytrain.data.names import Names
from steadytrain.data.packing.pack import LAYOUT, PackRequest, assign_files, remark_on_split
from steadytrain.data.packing.shared_folder import THREADS, SharedFolder
from steadytrain.data.sources.folder import ANNOTATIONS, build_tree, list_tree
from steadytrain.data.sources.layout import flat_splits
from steadytrain.data.sources.listing import FileList, Listing, Piece, Pieces, PixelShape, stat_file
from steadytrain.data.sources.select import END_BYTES
from steadytrain.data.storage.remote_file import remote_file_of
from steadytrain.data.storage.sources import local_sources
from steadytrain.data.storage.store import NoObjectError, ObjectFacts, ObjectPlace, Store, is_uri
from steadytrain.errors import DataError
from steadytrain.format import Say

KIND, VERSION = "steadytrain.shards", 1
SHARD_BYTES = 256 << 20  # of a source that go into a shard, and
SHARD_IMAGES = 16_384  # images, where nothing else is asked for

_SUFFIXES = (".rec", ".idx", ".json", ".lst")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True, kw_only=True)
class PlannedShard:
    """A record file of a plan.

    Args:
        file: its name.
        split: that it is a part of; empty where the source is not split.
        num_listed: images that are to go into it.
        listing: the file that says which.
        num_images, bytes, digest: those of its card, once all shards are packed.
    """

    file: str
    split: str
    num_listed: int
    listing: str
    num_images: int = 0
    bytes: int = 0
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A plan, and in the end what came of it.

    Args:
        request: what was asked for, by the names of the command's options, and what else the bytes depend on.
        source: the folder in a store that images are fetched from; empty where they lie in files.
        root: of names, as in a listing.
        classes, label_names: of all shards.
        counts: images of each class that were listed, by split.
        shards: in the order of the images.
        num_rejected: images that were left out; the shards' cards name them.
        is_complete: all shards are packed.
    """

    request: Mapping[str, Any]
    source: str = ""
    root: str = ""
    classes: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shards: tuple[PlannedShard, ...] = ()
    num_rejected: int = 0
    is_complete: bool = False

    @property
    def num_listed(self) -> int:
        """Images that are to be packed."""
        return sum(shard.num_listed for shard in self.shards)

    @property
    def num_images(self) -> int:
        """Images that were packed, once the plan is complete."""
        return sum(shard.num_images for shard in self.shards)

    @property
    def name(self) -> str:
        """A digest of what is planned, without what came of it."""
        planned = [(shard.file, shard.num_listed, shard.listing) for shard in self.shards]
        return hashlib.sha256(json.dumps([self.request, planned], sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Return indented JSON, the form of ``OUT.plan.json``."""
        return json.dumps({"kind": KIND, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: bytes, where: str) -> ShardPlan:
        """Read what :meth:`to_json` wrote; ``where`` it stood. Raises DataError where it is no plan."""
        try:
            members = json.loads(text)
            if members.pop("kind") != KIND or members.pop("version") != VERSION:
                raise ValueError
            members["shards"] = tuple(PlannedShard(**shard) for shard in members["shards"])
            members["counts"] = {split: tuple(counts) for split, counts in members["counts"].items()}
            for name in ("classes", "label_names"):
                members[name] = tuple(members[name])
            return ShardPlan(**members)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise DataError(
                f"{where} is no plan of this version of steadytrain: remove it, or choose another name than OUT"
            ) from None

    def require_same(self, request: Mapping[str, Any], where: str) -> None:
        """Require that a command asks for what this plan, which stands at ``where``, is of. Raises DataError."""
        asked = json.loads(json.dumps(request))
        for name in [*asked, *self.request]:
            planned, wanted = self.request.get(name), asked.get(name)
            if planned != wanted:
                option = f"--{name.replace('_', '-')}" if name not in (*_LIBRARIES, "layout", "source") else name
                remedy = (
                    f"install {name} {planned} here"
                    if name in _LIBRARIES
                    else "give the same options, or choose another name than OUT"
                )
                raise DataError(
                    f"{where} is the plan of another packing ({option} was {_shown(planned)} there, and is"
                    f" {_shown(wanted)} here): {remedy}. To pack again, remove that file"
                )


_LIBRARIES = {"Pillow": PIL.__version__, "simplejpeg": simplejpeg.__version__}


def _shown(value: Any) -> str:
    text = "not given" if value in (None, [], ()) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def described(request: PackRequest, shards: int | None) -> dict[str, Any]:
    """Return a request by the names of the command's options, with what else the bytes depend on."""
    options: dict[str, Any] = {"source": list(request.sources)}
    for name in ("root", "labels", "classes", "group", "path_column", "label_column", "split_column"):
        value = getattr(request, name)
        options[name] = str(value) if isinstance(value, Path) else value
    return {
        **options,
        **asdict(request.selection),
        **asdict(request.settings),
        "shards": shards,
        "layout": LAYOUT,
        **_LIBRARIES,
    }


def make_plan(
    request: PackRequest,
    stem: str,
    out: SharedFolder,
    state: SharedFolder,
    *,
    shards: int | None,
    scratch: Path,
    on_disk: Path | None,
    say: Say,
) -> ShardPlan:
    """List a source, divide it into shards, and write what each is made of; the plan itself is for the caller to write.

    Args:
        request: what to pack.
        stem: of the record files' names.
        out: the folder that they are for.
        state: takes the listings.
        shards: of each split; None: as many as :data:`SHARD_BYTES` and :data:`SHARD_IMAGES` come to.
        scratch: a folder to decompress into.
        on_disk: where ``out`` is, if it is a folder on a disk.
        say: takes remarks, a line each.

    Raises:
        DataError: the source cannot be used, or not by several processes; or a file is in the way.
    """
    if packed := [source for source in request.sources if source.lower().endswith(_COMPRESSED)]:
        raise _compressed(packed[0])
    folder = _folder_in_store(request)
    with local_sources([] if folder else request.sources, say) as places:
        if folder:
            listings = _list_in_store(request, folder, say)
        else:
            listings = request.listings(places, scratch, say)
        files = [
            pair
            for listing in listings
            for pair in assign_files([listing], (on_disk or Path()) / f"{stem}.rec", shards or _default_shards(listing))
        ]
        for _, parts in groupby((listing for _, listing in files), key=lambda listing: listing.split):
            remark_on_split(list(parts), say)
        existing = out.names()
        for path, _ in files:
            if taken := [f"{path.stem}{suffix}" for suffix in _SUFFIXES if f"{path.stem}{suffix}" in existing]:
                raise DataError(
                    f"{', '.join(taken)} exist{'s' * (len(taken) == 1)} already, and no {stem}.plan.json of this"
                    " packing: remove them, or choose another name than OUT"
                )
        uris = _uris(listings, scratch)

        def write(number: int) -> PlannedShard:
            path, listing = files[number]
            content = _to_bytes(listing, uris)
            name = f"{number:05}-{hashlib.sha256(content).hexdigest()[:12]}.npz"
            state.write(name, content)
            return PlannedShard(file=path.name, split=listing.split, num_listed=len(listing), listing=name)

        with ThreadPoolExecutor(THREADS, "storage") as pool:
            planned = tuple(pool.map(write, range(len(files))))
    return ShardPlan(
        request=described(request, shards),
        source=folder,
        root="" if all(listing.pieces is not None for listing in listings) else os.fspath(listings[0].root),
        classes=listings[0].classes,
        label_names=listings[0].label_names,
        counts={listing.split: listing.counts() for listing in listings},
        shards=planned,
    )


def _default_shards(listing: Listing) -> int:
    """Return the number of shards where none is asked for: by bytes and images alone, not by who packs."""
    num_bytes = int(listing.sizes.clip(0).sum())
    return max(1, -(-num_bytes // SHARD_BYTES), -(-len(listing) // SHARD_IMAGES))


# -- folders of images in a store ------------------------------------------------------------------------------------


def _folder_in_store(request: PackRequest) -> str:
    """Return the URI of a source that is a folder of objects; empty for any other."""
    for source in request.sources:
        if not is_uri(source) or is_pattern(source):
            continue
        is_folder = source.endswith("/")
        if not is_folder:
            place = ObjectPlace.parse(source)
            try:
                Store(place).stat(place)
            except NoObjectError:
                is_folder = True
        if is_folder:
            if len(request.sources) > 1:
                raise DataError(f"{source} is a folder in a store, which several processes pack alone: drop the others")
            return source.rstrip("/") + "/"
    return ""


def _list_in_store(request: PackRequest, uri: str, say: Say) -> list[Listing]:
    """List the images below a prefix, in folders of classes or of splits, as if they lay on a disk; fetch none."""
    place, selection = ObjectPlace.folder(uri), request.selection
    files = Store(place).list_all(place, _to_columns)
    if not len(files.names):
        raise NoObjectError(f"there is no object {place}, and nothing below it")
    loose = next((name for name in files.names if "/" not in name or name.endswith(f"/{ANNOTATIONS}")), None)
    if request.labels is not None or request.root is not None or loose is not None:
        problem = f"{uri}{loose} is in no class folder" if loose else "--labels and --root name files beside it"
        raise DataError(
            f"{problem}: several processes read folders of classes, archives and record files from a store. Pack {uri}"
            " with one process, or from a disk that all of them see"
        )
    is_split = selection.val_fraction is not None or selection.train_per_class is not None
    if is_split and selection.identical == "pixels":
        raise DataError(
            f"--identical pixels decodes all images of {uri} before they are split, which one process does for"
            " all: give --identical bytes, pack with one process, or put the images into folders train and val"
        )
    root = Path(place.name or place.base.rpartition("/")[2])
    top = build_tree(files, strip=False)
    folders = [name for names in flat_splits(top.look(files)).values() for name in names]
    if len(folders) > 1:
        raise DataError(
            f"the images in {uri} lie in no folders of classes ({', '.join(folders)} are splits): pack {uri} with one"
            " process, which reads the tables beside them, or from a disk that all of them see"
        )
    listings = list_tree(top, files, root=root, classes=request.classes)

    def read(listing: Listing, rows: Sequence[int], whole: bool) -> Iterator[memoryview]:
        starts = np.zeros(len(rows), np.int64) if whole else np.maximum(listing.sizes[rows] - END_BYTES, 0)
        yield from _fetch_images(listing, uri, rows, starts, lambda name, *_: _changed_while_listed(name))

    if is_split:
        say(f"comparing images of equal size in {uri}, so that duplicates stay on one side of the split")
    return selection.of(listings, say, read)


def _to_columns(objects: Iterator[tuple[str, ObjectFacts]]) -> FileList:
    """Put objects into columns, sorted by name: of a million, 45 bytes each stay and not 500."""
    names, sizes, versions = Names(), array("q"), array("q")
    before, is_sorted = "", True
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


def fetch_listing(listing: Listing, uri: str, blob: Path, plan_name: str) -> Listing:
    """Fetch the images of a listing from the folder at ``uri`` into one file; return where each lies in it.

    Raises:
        DataError: one is not there any more, or is another one.
        StorageError: the store does not answer, or the disk is full.
    """
    offsets = np.concatenate([[0], np.cumsum(listing.sizes)[:-1]]).astype(np.int64)
    rows, starts = range(len(listing)), np.zeros(len(listing), np.int64)
    with blob.open("wb") as file:
        for data in _fetch_images(listing, uri, rows, starts, partial(_changed, plan_name=plan_name)):
            file.write(data)
    pieces = Pieces((str(blob),), np.zeros(len(listing), np.int32), offsets, listing.sizes)
    return replace(listing, pieces=pieces)


def _fetch_images(
    listing: Listing, uri: str, rows: Sequence[int], starts: Ints, changed: Callable[[str, int, int], DataError]
) -> Iterator[memoryview]:
    """Fetch some images of a listing from the folder at ``uri``, each from a byte on; yield them in order.

    Args:
        rows: their numbers.
        starts: int64[n], the first byte that is wanted of each.
        changed: makes the error where one is not what was listed, of its URI, its bytes then and now (-1: gone).
    """
    place = ObjectPlace.folder(uri)
    store = Store(place)

    def fetch(row: int, start: int) -> memoryview:
        name, size = listing.names[row], int(listing.sizes[row])
        try:
            data, facts = store.read(ObjectPlace(place.base, place.key + name), *((start, size) if start else ()))
        except NoObjectError:
            if size:
                raise changed(f"{uri}{name}", size, -1) from None
            return memoryview(b"")  # of an empty object there is no byte to ask for
        if (facts.size, _version(facts)) != (size, listing.times[row]):
            raise changed(f"{uri}{name}", size, facts.size)
        return data

    with ThreadPoolExecutor(THREADS, "storage") as pool:
        for first, end in _blocks(listing.sizes[rows] - starts):
            yield from pool.map(fetch, rows[first:end], starts[first:end].tolist())


def _blocks(sizes: Ints) -> Iterator[tuple[int, int]]:
    """Divide images into portions of a thousand or of 16 MB, which are fetched at a time: yield first and end of each.

    Args:
        sizes: int64[n], bytes of each.
    """
    first, size = 0, 0
    for end, num_bytes in enumerate(sizes.tolist(), start=1):
        size += num_bytes
        if end - first >= 1024 or size >= 16 << 20 or end == len(sizes):
            yield first, end
            first, size = end, 0


# -- listings as files -----------------------------------------------------------------------------------------------


def _uris(listings: Sequence[Listing], scratch: Path) -> dict[str, str]:
    """Map the files of listings that came from a store to their URIs, under which other machines find them.

    Raises:
        DataError: they have been decompressed, and so are nowhere else.
    """
    uris: dict[str, str] = {}
    for listing in listings:
        for path in () if listing.pieces is None else listing.pieces.paths:
            if Path(path).is_relative_to(scratch):
                raise _compressed(Path(path).name)
            remote = remote_file_of(Path(path))
            if remote is not None:
                uris[path] = remote.uri
                remote.close()
    return uris


def _compressed(name: str) -> DataError:
    return DataError(
        f"{name} is compressed as a whole, and several processes read parts of it: decompress it first (gunzip,"
        " unzstd), or pack it with one process"
    )


def _to_bytes(listing: Listing, uris: Mapping[str, str]) -> bytes:
    """Write the columns of a shard's listing as NumPy's ``.npz``."""
    columns: dict[str, Any] = {name: getattr(listing, name) for name in ("labels", "sizes", "times", "ids")}
    columns |= _names_to_columns("names", listing.names)
    if (pieces := listing.pieces) is not None:
        used, path_of = np.unique(pieces.file, return_inverse=True)
        paths = [pieces.paths[number] for number in used]
        columns |= _names_to_columns("paths", [uris.get(path, path) for path in paths])
        columns["path_sizes"] = np.array([stat_file(path)[0] for path in paths], np.int64)
        columns["path_of"] = path_of.astype(np.int32)
        columns |= {name: getattr(pieces, name) for name in ("offset", "size", "deflated", "crc", "inflated")}
        columns["pixels"] = None if pieces.pixels is None else np.array(pieces.pixels, np.int64)
    content = io.BytesIO()
    np.savez(content, **{name: column for name, column in columns.items() if column is not None})
    return content.getvalue()


def read_listing(
    content: bytes, plan: ShardPlan, shard: PlannedShard, where: Callable[[str], str], plan_name: str
) -> Listing:
    """Read a shard's listing, and make sure that the files that it names are still the ones that were listed.

    Args:
        content: what :func:`make_plan` wrote.
        plan, shard: that it belongs to.
        where: returns the path here of a file or a URI that images lie in.
        plan_name: what the user calls the plan.

    Raises:
        DataError: a file has changed, or is not there; it says what to do.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as columns:
        table: dict[str, Any] = dict(columns)
    names, pieces = _names_from_columns("names", table), None
    if "path_of" in table:
        named = list(_names_from_columns("paths", table))
        paths = tuple(map(where, named))
        for name, path, size in zip(named, paths, table["path_sizes"].tolist(), strict=True):
            if (new_size := stat_file(path)[0]) != size:
                raise _changed(name, size, new_size, plan_name)
        pixels = None
        if "pixels" in table:
            height, width, channels, is_planar = table["pixels"].tolist()
            pixels = PixelShape(height, width, channels, bool(is_planar))
        columns_of_pieces = {name: table.get(name) for name in ("deflated", "crc", "inflated")}
        pieces = Pieces(paths, table["path_of"], table["offset"], table["size"], pixels=pixels, **columns_of_pieces)
    listing = Listing(
        split=shard.split,
        root=Path(plan.root),
        classes=plan.classes,
        names=names,
        labels=table["labels"],
        sizes=table["sizes"],
        times=table["times"],
        ids=table.get("ids"),
        pieces=pieces,
        label_names=plan.label_names,
    )
    if pieces is None and not plan.source:
        for place, size in zip(listing.places(0, len(listing)), listing.sizes.tolist(), strict=True):
            assert not isinstance(place, Piece)
            if (new_size := stat_file(place)[0]) != size:
                raise _changed(place, size, new_size, plan_name)
    return listing


def _changed_while_listed(uri: str) -> DataError:
    return DataError(
        f"{uri} was changed while its folder was listed: run the same command again when nothing writes there"
    )


def _changed(path: str, size: int, new_size: int, plan_name: str) -> DataError:
    state = "was written again since" if new_size == size else f"has {new_size:,} now"
    state = "is not there now" if new_size < 0 else state
    return DataError(
        f"{path} has changed: it had {size:,} bytes when {plan_name} was made, and {state}. Put it back, or remove"
        f" {plan_name} to list the source again"
    )


def _names_to_columns(name: str, names: Sequence[str]) -> dict[str, Any]:
    ends, content = (names if isinstance(names, Names) else Names(names)).parts()
    return {f"{name}_ends": np.frombuffer(ends, np.int64), name: np.frombuffer(content, np.uint8)}


def _names_from_columns(name: str, table: Mapping[str, Any]) -> Names:
    return Names.of(table[name].tobytes(), table[f"{name}_ends"])
