"""``steady pack``: images into record files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.data.packing.pack import PackedFile

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
    restart: Annotated[
        int,
        Parameter(
            help="JPEGs that are encoded anew get restart markers at most so many times 16 pixels apart: files 1 % "
            "larger, of which the native decoder leaves out what a crop does not show. 0: none."
        ),
    ] = 4,
    mark_kept: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Add them to JPEGs that need not change, too: same pixels, other bytes (needs the native decoder).",
        ),
    ] = False,
    max_bad: Annotated[
        int | None,
        Parameter(help="Files that may be left out because they cannot be used (default: the larger of 1 % and 5)."),
    ] = None,
    workers: Annotated[int | None, Parameter(help="Processes to encode with (default: one for each core).")] = None,
    force: Annotated[bool, Parameter(negative="", show_default=False, help="Replace what is there.")] = False,
    estimate: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Write nothing: try this and other sizes, qualities and encodings on some of the images, and tell "
            "bytes on disk, time to pack and images/s of the feed. OUT may be left out.",
        ),
    ] = False,
    json: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print the cards, or estimates, as one JSON document.")
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
    steady pack photos/ --estimate
    steady pack new.tar new --classes photos-train.json
    """
    import json as json_module

    sources, out = _places(places, estimate=estimate)
    found: dict[str, Any] = {"root": root, "labels": labels, "classes": classes}
    chosen: dict[str, Any] = {"only": only, "exclude": exclude}
    chosen |= {"val_fraction": val_fraction, "train_per_class": train_per_class, "seed": seed}
    stored: dict[str, Any] = {"shorter_side": shorter_side, "quality": quality, "encoding": encoding, "grey": grey}
    stored |= {"restart": restart, "mark_kept": mark_kept}
    if estimate:
        from steadytrain.cli.estimate import print_estimate

        print_estimate(sources, stored, chosen, **found, workers=workers, json=json)
        return
    what = sources[0] if len(sources) == 1 else f"{len(sources)} sources"
    with _progress(f"packing {what}") as told:
        from steadytrain.data.packing.pack import pack as pack_records

        options: dict[str, Any] = {"shards": shards, "max_bad": max_bad, "workers": workers, "force": force}
        packed = pack_records(sources, out, **found, **chosen, **stored, **options, **told)
    if json:
        print(json_module.dumps([{"path": str(one.path), **json_module.loads(one.card.to_json())} for one in packed]))
        return
    for one in packed:
        print("\n".join(_summary(one)))


def _places(places: tuple[str, ...], *, estimate: bool) -> tuple[list[str], str]:
    """What to pack and where to; an estimate needs no place to write to. Raises InputError."""
    from steadytrain.errors import InputError

    *sources, out = places
    if estimate and (not sources or Path(out).exists()):
        sources = list(places)
    if not sources:
        raise InputError(f"one name only, {out}: give what to pack, then where to (steady pack {out} OUT)")
    if len(sources) > 1 and not Path(sources[0]).exists() and Path(whole := " ".join(sources)).exists():
        raise InputError(f"there is nothing called {sources[0]}: quote a path that has spaces ('{whole}')")
    return sources, out


@contextmanager
def _progress(what: str) -> Iterator[dict[str, Any]]:
    """How packing tells how far it is, and what it remarks."""
    from steadytrain.cli.console import note, progress

    began = -1
    with progress(what, 0) as shown:

        def advance(done: int, total: int, /) -> None:
            nonlocal began
            began = done if began < 0 else began  # what was packed before says nothing of the pace
            shown(done - began, total - began)

        yield {"progress": advance, "say": note}


def _summary(packed: PackedFile) -> list[str]:
    """What a person wants to know of one file."""
    from steadytrain.cli.lines import size_of

    card = packed.card
    (low, middle, high), (narrow, medium, wide) = card.height, card.width
    lines = [f"{packed.path}: {card.num_images:,} images, {size_of(card.bytes)}, sha256 {card.digest[:12]}"]
    lines += _classes(card.classes, card.counts) if card.classes else [_vectors(card.label_names, card.label_width)]
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


def _vectors(names: tuple[str, ...], width: int) -> str:
    told = ", ".join(names[:MOST_CLASSES]) + ", ..." * (len(names) > MOST_CLASSES)
    return f"  labels    vectors of {width}{f': {told}' if names else ''}"
