"""``steady pack``: images into record files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.records import PackedFile

MOST_CLASSES = 20
MOST_REJECTED = 20


_Names = Annotated[tuple[str, ...], Parameter(negative="", show_default=False, consume_multiple=False)]


def pack(
    *places: Annotated[
        str,
        Parameter(
            name="SOURCE... OUT",
            required=True,
            help="What to pack: a folder of classes or of train, val and test; a .lst, a CSV or TSV; a tar, a zip or "
            "WebDataset shards (shards-{000..010}.tar); idx or CIFAR files; a .rec. Several are merged. And, last, "
            "where to: OUT.rec, OUT.idx and OUT.json; OUT-train.rec and so on for splits.",
        ),
    ],
    root: Annotated[
        str | None, Parameter(help="The folder that the paths of a .lst or a table start from (default: its own).")
    ] = None,
    labels: Annotated[
        str | None, Parameter(help="A file of labels (CSV, ImageNet's ground truth) for images without folders.")
    ] = None,
    classes: Annotated[
        str | None,
        Parameter(
            help="A card (.json) whose class list, in its order, is to be used: the training set's, for validation."
        ),
    ] = None,
    only: Annotated[_Names, Parameter(help="Keep this class and others so named (--only cat --only dog).")] = (),
    exclude: Annotated[_Names, Parameter(help="Leave this class out; may be given several times.")] = (),
    val_fraction: Annotated[
        float | None, Parameter(help="Hold out this share of each class: OUT-train.rec and OUT-val.rec.")
    ] = None,
    train_per_class: Annotated[
        int | None, Parameter(help="Train with so many images of each class; the rest validates.")
    ] = None,
    seed: Annotated[int, Parameter(help="Chooses which images are held out.")] = 0,
    shards: Annotated[
        int | None, Parameter(help="Write so many files for each split: OUT-00000-of-00004.rec and so on.")
    ] = None,
    shorter_side: Annotated[
        int | None,
        Parameter(help="Scale larger images down to this many pixels on their shorter side; smaller ones stay."),
    ] = None,
    quality: Annotated[int, Parameter(help="Of JPEG and WebP images that are encoded anew, 1 to 100.")] = 95,
    encoding: Annotated[
        Literal["auto", "jpg", "png", "webp", "raw", "pass"],
        Parameter(
            help="auto: PNG, lossless, for images of up to 64 x 64 pixels, else JPEG; jpg, png or webp: always that; "
            "raw: bare pixels, which need no decoding; pass: the files' own bytes. Whatever need not change is stored "
            "byte for byte."
        ),
    ] = "auto",
    grey: Annotated[bool, Parameter(negative="", show_default=False, help="Store one channel.")] = False,
    max_bad: Annotated[
        int | None,
        Parameter(help="Files that may be left out because they cannot be used (default: the larger of 1 % and 5)."),
    ] = None,
    workers: Annotated[int | None, Parameter(help="Processes to encode with (default: one for each core).")] = None,
    force: Annotated[bool, Parameter(negative="", show_default=False, help="Replace what is there.")] = False,
    json: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print the cards as one JSON document.")
    ] = False,
) -> None:
    """Pack images into record files, with an index and a card that says what is in them.

    A file that cannot be read is left out and named; all other images are checked, brought upright and, where nothing
    has to change, stored as they are. After Ctrl-C, a kill or a full disk the same command goes on.

    Examples
    --------
    steady pack photos/ photos
    steady pack photos/ small --shorter-side 256 --val-fraction 0.1
    steady pack labels.csv photos --root images/
    steady pack new.tar new --classes photos-train.json
    """
    import json as json_module

    from steadytrain.cli.console import note, progress
    from steadytrain.errors import InputError

    *sources, out = places
    if not sources:
        raise InputError(f"one name only, {out}: give what to pack, then where to (steady pack {out} OUT)")
    if len(sources) > 1 and not Path(sources[0]).exists() and Path(whole := " ".join(sources)).exists():
        raise InputError(f"there is nothing called {sources[0]}: quote a path that has spaces ('{whole}')")
    what = sources[0] if len(sources) == 1 else f"{len(sources)} sources"
    began = -1
    with _children(workers), progress(f"packing {what}", 0) as shown:
        from steadytrain import records

        def advance(done: int, total: int, /) -> None:
            nonlocal began
            began = done if began < 0 else began  # what was packed before says nothing of the pace
            shown(done - began, total - began)

        packed = records.pack(
            sources,
            out,
            root=root,
            labels=labels,
            classes=classes,
            only=only,
            exclude=exclude,
            val_fraction=val_fraction,
            train_per_class=train_per_class,
            seed=seed,
            shards=shards,
            shorter_side=shorter_side,
            quality=quality,
            encoding=encoding,
            grey=grey,
            max_bad=max_bad,
            workers=workers,
            force=force,
            progress=advance,
            say=note,
        )
    if json:
        print(json_module.dumps([{"path": str(one.path), **json_module.loads(one.card.to_json())} for one in packed]))
        return
    for one in packed:
        print("\n".join(_summary(one)))


@contextmanager
def _children(workers: int | None) -> Iterator[None]:
    """Processes that encode, started before this one loads what it needs itself."""
    from steadytrain import children, quotas

    count = quotas.cores() if workers is None else workers
    with children.early(count if 1 < count <= quotas.cores() else 0, "steadytrain.records.workers"):
        yield


def _summary(packed: PackedFile) -> list[str]:
    """What a person wants to know of one file."""
    card = packed.card
    (low, middle, high), (narrow, medium, wide) = card.height, card.width
    lines = [f"{packed.path}: {card.num_images:,} images, {_bytes(card.bytes)}, sha256 {card.digest[:12]}"]
    lines += _classes(card.classes, card.counts) if card.classes else [f"  labels    vectors of {card.label_width}"]
    size = f"{medium} x {middle}" if (low, narrow) == (high, wide) else ""
    lines += [f"  pixels    {size or f'{narrow} to {wide} wide, {low} to {high} high, median {medium} x {middle}'}"]
    formats = ", ".join(f"{count:,} {name}" for name, count in card.encodings.items())
    lines += [f"  stored    {formats}; {card.kept:,} byte for byte"]
    if card.mean:
        mean, std = ("(" + ", ".join(f"{value:.4f}" for value in told) + ")" for told in (card.mean, card.std))
        lines += [f"  channels  {card.channels}, mean {mean}, std {std}"]
    if card.rejected:
        lines += [f"  left out  {len(card.rejected):,}, because they cannot be used:"]
        lines += [f"    {one.name}: {one.reason}" for one in card.rejected[:MOST_REJECTED]]
    if (more := len(card.rejected) - MOST_REJECTED) > 0:
        lines += [f"    and {more:,} more; {packed.path.with_suffix('.json')} names them all"]
    return lines


def _classes(names: tuple[str, ...], counts: tuple[int, ...]) -> list[str]:
    if len(names) > MOST_CLASSES:
        return [f"  classes   {len(names):,}, of {min(counts):,} to {max(counts):,} images"]
    listed = ", ".join(f"{name} {count:,}" for name, count in zip(names, counts, strict=True))
    return [f"  classes   {len(names)}: {listed}"]


def _bytes(count: int) -> str:
    """Bytes as people read them.

    >>> _bytes(999), _bytes(22_243_816), _bytes(140_840_960_000)
    ('999 bytes', '22.2 MB', '140.8 GB')
    """
    if count < 1000:
        return f"{count} bytes"
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power or power == 1:
            return f"{count / 1000**power:.1f} {unit}"
    raise AssertionError
