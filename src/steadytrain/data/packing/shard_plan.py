"""The plan by which several processes pack one source: which images go into which record file, in which order.

It is made once, and follows from the source and the settings alone. ``OUT.plan.json`` beside the output says what is to
be packed and into which files; what each file is made of lies in a file of its own in a hidden folder, so that a
process reads no more than the shards that it packs: a million images are 100 MB of names and places.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg

from steadytrain.data.names import Names
from steadytrain.data.packing.pack import LAYOUT, PackRequest, assign_files, remark_on_split
from steadytrain.data.packing.shared_folder import THREADS, SharedFolder
from steadytrain.data.packing.store_images import folder_in_store, list_in_store
from steadytrain.data.sources.listing import Listing, Piece, Pieces, PixelShape, stat_file
from steadytrain.data.storage.remote_file import object_uri
from steadytrain.data.storage.scratch import temporary_scratch
from steadytrain.data.storage.sources import local_sources
from steadytrain.errors import DataError
from steadytrain.format import Say

KIND, VERSION = "steadytrain.shards", 1
SHARD_BYTES = 256 << 20  # of a source that go into a shard, and
SHARD_IMAGES = 16_384  # images, where nothing else is asked for

SUFFIXES = (".idx", ".lst", ".json", ".rec")
"""Endings of the files of a shard, in the order in which they appear."""

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

    @property
    def files(self) -> list[str]:
        """Names of its files, the records last."""
        return [f"{Path(self.file).stem}{suffix}" for suffix in SUFFIXES]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """A plan, and in the end what came of it.

    Args:
        request: what was asked for, by the names of the command's options, and what else the bytes depend on.
        source: the folder in a store that images are fetched from; empty where they lie in files.
        root: of names, as in a listing.
        classes, label_names, label_column: of all shards.
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
    label_column: str = ""
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
            if planned == wanted:
                continue
            option, remedy = f"--{name.replace('_', '-')}", "give the same options, or choose another name than OUT"
            if name in _LIBRARIES:
                option, remedy = name, f"install {name} {planned} here"
            elif name in ("layout", "source"):
                option = name
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
    places = ("root", "labels", "classes", "group", "path_column", "label_column", "split_column", "zip_names")
    for name in places:
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
    request: PackRequest, stem: str, out: SharedFolder, notes: SharedFolder, *, shards: int | None, say: Say
) -> ShardPlan:
    """List a source, divide it into shards, and write what each is made of; the plan itself is for the caller to write.

    Args:
        request: what to pack.
        stem: of the record files' names.
        out: the folder that they are for.
        notes: takes the listings.
        shards: of each split; None: as many as :data:`SHARD_BYTES` and :data:`SHARD_IMAGES` come to.
        say: takes remarks, a line each.

    Raises:
        DataError: the source cannot be used, or not by several processes; or a file is in the way.
    """
    if packed := [source for source in request.sources if source.lower().endswith(_COMPRESSED)]:
        raise _compressed(packed[0])
    folder = folder_in_store(request)
    with temporary_scratch() as scratch, local_sources([] if folder else request.sources, say) as places:
        listings = list_in_store(request, folder, say) if folder else request.listings(places, scratch, say)
        uris = _uris(listings, scratch)
        files: list[tuple[Path, Listing]] = []
        for listing in listings:
            parts = assign_files([listing], Path(f"{stem}.rec"), shards or _default_shards(listing))
            remark_on_split([part for _, part in parts], say)
            files += parts

        def plan_shard(number: int) -> PlannedShard:
            path, listing = files[number]
            content = _to_bytes(listing, uris)
            name = f"{number:05}-{hashlib.sha256(content).hexdigest()[:12]}.npz"
            notes.write(name, content)
            return PlannedShard(file=path.name, split=listing.split, num_listed=len(listing), listing=name)

        _require_free([path.stem for path, _ in files], out, stem)
        with ThreadPoolExecutor(THREADS, "storage") as pool:
            planned = tuple(pool.map(plan_shard, range(len(files))))
    return ShardPlan(
        request=described(request, shards),
        source=folder,
        root="" if all(listing.pieces is not None for listing in listings) else os.fspath(listings[0].root),
        classes=listings[0].classes,
        label_names=listings[0].label_names,
        label_column=listings[0].label_column,
        counts={listing.split: listing.counts() for listing in listings},
        shards=planned,
    )


def _require_free(stems: Sequence[str], out: SharedFolder, stem: str) -> None:
    """Require that no file of a shard is there, whose names begin with ``stems``. Raises DataError."""
    existing = out.sizes()
    for shard_stem in stems:
        if taken := [name for suffix in SUFFIXES if (name := f"{shard_stem}{suffix}") in existing]:
            raise DataError(
                f"{', '.join(taken)} exist{'s' * (len(taken) == 1)} already, and no {stem}.plan.json of this"
                " packing: remove them, or choose another name than OUT"
            )


def _default_shards(listing: Listing) -> int:
    """Return the number of shards where none is asked for: by bytes and images alone, not by who packs."""
    num_bytes = int(listing.sizes.clip(0).sum())
    return max(1, -(-num_bytes // SHARD_BYTES), -(-len(listing) // SHARD_IMAGES))


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
            if (uri := object_uri(Path(path))) is not None:
                uris[path] = uri
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
                raise changed(name, size, new_size, plan_name)
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
        label_column=plan.label_column,
    )
    if pieces is None and not plan.source:
        for place, size in zip(listing.places(0, len(listing)), listing.sizes.tolist(), strict=True):
            assert not isinstance(place, Piece)
            if (new_size := stat_file(place)[0]) != size:
                raise changed(place, size, new_size, plan_name)
    return listing


def changed(path: str, size: int, new_size: int, plan_name: str) -> DataError:
    """Make the error about a file or an object of ``new_size`` bytes now, -1 for none, that had ``size``."""
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
