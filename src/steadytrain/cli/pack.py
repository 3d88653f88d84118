"""``steady pack``: images into record files."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text, progress_once_known
from steadytrain.cli.options import GroupBy, PlaceOptions, RepeatedFlag, WorkersFlag
from steadytrain.distributed.world import World, world_from_environment
from steadytrain.errors import InputError
from steadytrain.format import clean, count
from steadytrain.format import size as bytes_text
from steadytrain.launch.supervise import keep_ranks
from steadytrain.machine.cgroups import cores as usable_cores

if TYPE_CHECKING:
    from steadytrain.data.packing.pack import PackedFile, PackRequest

MAX_CLASSES = 20
MAX_REJECTED = 20


def pack(
    *places: Annotated[str, Parameter(name="SOURCE... OUT", required=True)],
    lookup: PlaceOptions = PlaceOptions(),  # noqa: B008 - frozen
    classes: str | None = None,
    only: RepeatedFlag = (),
    exclude: RepeatedFlag = (),
    val_fraction: float | None = None,
    train_per_class: int | None = None,
    seed: int = 0,
    group: GroupBy = None,
    identical: Literal["near", "pixels", "bytes"] = "near",
    shards: int | None = None,
    shorter_side: int | None = None,
    quality: int = 95,
    encoding: Literal["auto", "jpg", "png", "webp", "raw", "pass"] = "auto",
    grey: bool = False,
    restart: int = 4,
    mark_kept: bool = False,
    subsampling: Literal["420", "444"] = "420",
    max_bad: int | None = None,
    workers: WorkersFlag = None,
    procs: WorkersFlag = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Pack images into record files, with an index, a metadata file (the card), and a list of the images' files.

    Unreadable files are left out and listed. All other images are checked, rotated upright and, if nothing has to
    change, stored as they are. After Ctrl-C, a kill or a full disk, the same command resumes.

    Args:
        places: What to pack: a folder of classes or of train, val and test; a .lst, a CSV or TSV; a tar, a zip or
            WebDataset shards (shards-{000..010}.tar); idx or CIFAR files; a .rec. Several are merged. The last
            argument is the output: OUT.rec, OUT.idx, OUT.json and OUT.lst; OUT-train.rec and so on for splits. Any of
            them may be a URI, such as s3://bucket/photos (docs: storage).
        classes: Use the class list of this card (.json), in its order: for validation data, the training set's.
        only: Keep only the classes named (--only cat --only dog).
        exclude: Leave out this class; may be given several times.
        val_fraction: Hold out this share of each class: OUT-train.rec and OUT-val.rec.
        train_per_class: Use this many images of each class for training, and the rest for validation.
        seed: Seed of the choice of images that are held out.
        group: Keep on one side of the split, beside copies, what belongs together (patients, series): folder, images of
            one folder below that of their class; a table's column; or a regular expression, whose first group is the
            same in their names.
        identical: Copies that stay on one side of the split: images that look alike (near), or have equal pixels, for
            both of which each is decoded once more; or equal bytes.
        shards: Write this many files for each split: OUT-00000-of-00004.rec and so on.
        shorter_side: Scale larger images down to this many pixels on their shorter side; smaller ones stay.
        quality: Quality of re-encoded JPEG and WebP images, 1 to 100.
        encoding: auto: PNG, lossless, for images of up to 64 x 64 pixels, else JPEG; jpg, png or webp: always that;
            raw: bare pixels, which need no decoding; pass: the files' own bytes. Whatever need not change is stored
            byte for byte.
        grey: Store one channel.
        restart: Distance of restart markers in re-encoded JPEGs, in units of 16 pixels: files are 1 % larger, and the
            native decoder skips what lies outside of a crop. 0: none.
        mark_kept: Add restart markers to JPEGs that are not re-encoded, too: same pixels, other bytes (needs the native
            decoder).
        subsampling: Chroma of re-encoded JPEGs: 420, half the resolution in each direction; 444, full resolution, for
            drawings and text in strong colours, in files 20 to 65 % larger.
        max_bad: Unusable files that may be left out before packing stops (default: the larger of 1 % and 5).
        workers: Number of processes that encode (default: one for each core; with --procs, a share of them).
        procs: Pack with this many processes, each of which reads, encodes and writes its own shards. More may join with
            the same command, on any machine that sees source and output (steady launch starts them). Default of
            --shards is then one for each 256 MB or 16,384 images.
        force: Replace existing files.
        json: Print the cards, as one JSON document.

    Examples:
        steady pack photos/ photos
        steady pack photos/ small --shorter-side 256 --val-fraction 0.1
        steady pack labels.csv photos --root images/
        steady pack new.tar new --classes photos-train.json
        steady pack s3://photos/raw/ s3://photos/packed --shards 512 --procs 8
    """
    *sources, out = places
    if not sources:
        raise InputError(f"one name only, {out}: name the images, then the output (steady pack {out} OUT)")
    if len(sources) > 1 and not Path(sources[0]).exists() and Path(joined := " ".join(sources)).exists():
        raise InputError(f"there is nothing called {sources[0]}: quote a path that has spaces ('{joined}')")
    from steadytrain.data.images.encode import PackSettings
    from steadytrain.data.packing.pack import PackRequest, pack_request
    from steadytrain.data.recordio.card import read_classes
    from steadytrain.data.sources.columns import ColumnNames
    from steadytrain.data.sources.select import Selection
    from steadytrain.data.storage.store import ObjectPlace, is_uri

    request = PackRequest(
        sources=tuple(sources),
        root=lookup.root,
        labels=lookup.labels,
        classes=None if classes is None else read_classes(classes),
        group=group,
        columns=ColumnNames.of(lookup.path_column, lookup.label_column, lookup.split_column, lookup.zip_names),
        selection=Selection(
            only, exclude, val_fraction=val_fraction, train_per_class=train_per_class, seed=seed, identical=identical
        ),
        settings=PackSettings(
            shorter_side=shorter_side,
            quality=quality,
            encoding=encoding,
            grey=grey,
            restart=restart,
            mark_kept=mark_kept,
            subsampling=subsampling,
        ),
    )
    world = world_from_environment(os.environ)
    options: dict[str, Any] = {"shards": shards, "max_bad": max_bad}
    is_shared = procs is not None or world.size > 1
    if is_shared:
        if force:
            raise InputError(
                "--force with several processes: those that join late cannot tell new files from old ones, so remove"
                " the shards of OUT first"
            )
        if procs is not None and procs > 1 and world.size == 1:
            killed: list[int] = []
            code = keep_ranks(sys.orig_argv, procs, restarts=0, independent=True, say=note, on_killed=killed.append)
            if code or 0 not in killed:  # else the rank is gone that prints the summary
                return code
        options["workers"] = workers or max(1, usable_cores() // world.local_size)
        packed = _pack_with_others(world, request, out, options)
    else:
        subject = sources[0] if len(sources) == 1 else f"{len(sources)} sources"
        with progress_once_known(f"packing {subject}", resumes=True) as advance:
            packed = pack_request(request, out, **options, workers=workers, force=force, progress=advance, say=note)
    if not world.is_first:
        return 0
    store = ObjectPlace.parse(out) if is_uri(out) else None
    names = [str(file.path if store is None else store.sibling(file.path.name)) for file in packed]
    if json:
        cards = zip(names, (json_module.loads(file.card.to_json()) for file in packed), strict=True)
        print_json([{"path": name, **card} for name, card in cards])
    elif is_shared:
        print_text("\n".join(clean(line) for line in _shards_summary(packed)))
    else:
        print_text(
            "\n".join(clean(line) for file, name in zip(packed, names, strict=True) for line in _summary(file, name))
        )
    return 0


def _pack_with_others(world: World, request: PackRequest, out: str, options: dict[str, Any]) -> list[PackedFile]:
    """Pack as one of several processes, of which the first speaks."""
    from steadytrain.data.packing.shard_packer import ShardPacker

    first = world.rank - world.local_rank
    options |= {"rank": world.rank, "size": world.size, "local_ranks": range(first, first + world.local_size)}
    if not world.is_first:
        packer = ShardPacker(request=request, out=out, **options)
        packed = packer.run()
        note(f"packed {len(packer.packed)} of {count(len(packed), 'shard')}")  # rank 0 may be gone
        return packed
    with progress_once_known(f"packing {request.source}", resumes=True) as advance:
        return ShardPacker(request=request, out=out, **options, progress=advance, say=note).run()


def _shards_summary(packed: Sequence[PackedFile]) -> Iterator[str]:
    """Yield what a person wants to know of shards that several processes have packed: a line for each split."""
    number = len("-00000-of-00000.rec")
    for stem, group in groupby(packed, key=lambda file: file.path.name[:-number]):
        files = list(group)
        name = files[0].path.name
        if len(files) > 1:
            name = f"{stem}-{{00000..{len(files) - 1:05}}}{name[-number + len('-00000') :]}"
        images, size = (sum(getattr(file.card, field) for file in files) for field in ("num_images", "bytes"))
        yield f"{name}: {count(images, 'image')}, {bytes_text(size)}"
    if num_rejected := sum(len(file.card.rejected) for file in packed):
        yield f"  left out  {num_rejected:,}, because they cannot be used: the .json of each file names them"


def _summary(packed: PackedFile, name: str) -> Iterator[str]:
    """Yield what a person wants to know of one file."""
    card = packed.card
    yield f"{name}: {count(card.num_images, 'image')}, {bytes_text(card.bytes)}, sha256 {card.digest[:12]}"
    if len(card.classes) > MAX_CLASSES:
        yield f"  classes   {len(card.classes):,}, of {min(card.counts):,} to {max(card.counts):,} images"
    elif card.classes:
        counts = zip(card.classes, card.counts, strict=True)
        yield f"  classes   {len(card.classes)}: {', '.join(f'{name} {n:,}' for name, n in counts)}"
    else:
        names = ", ".join(card.label_names[:MAX_CLASSES]) + ", ..." * (len(card.label_names) > MAX_CLASSES)
        yield f"  labels    vectors of {card.label_width}{f': {names}' if names else ''}"
    (low, middle, high), (narrow, medium, wide) = card.height, card.width
    is_one_size = (low, narrow) == (high, wide)
    sides = "" if is_one_size else f"{narrow} to {wide} wide, {low} to {high} high, median "
    yield f"  pixels    {sides}{medium} x {middle}"
    formats = ", ".join(f"{n:,} {name}" for name, n in card.encodings.items())
    yield f"  stored    {formats}; {card.kept:,} byte for byte"
    if card.mean:
        mean, std = ("(" + ", ".join(f"{value:.4f}" for value in values) + ")" for values in (card.mean, card.std))
        yield f"  channels  {card.channels}, mean {mean}, std {std}"
    if card.rejected:
        yield f"  left out  {len(card.rejected):,}, because they cannot be used:"
        yield from (f"    {file.name}: {file.reason}" for file in card.rejected[:MAX_REJECTED])
    if (more := len(card.rejected) - MAX_REJECTED) > 0:
        yield f"    and {more:,} more; {name.removesuffix('.rec')}.json names them all"
