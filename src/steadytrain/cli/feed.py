"""``steady feed``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.data.loader import Crop, Speed
    from steadytrain.data.recordio.reader import Records


def feed(
    data: Annotated[str, Parameter(help="A .rec, or whatever steady pack takes (packed once into the cache).")],
    /,
    *,
    root: Annotated[
        str | None, Parameter(help="The folder that the paths of a .lst or a table start from (default: its own).")
    ] = None,
    labels: Annotated[str | None, Parameter(help="A file of labels for images without folders of classes.")] = None,
    size: Annotated[
        int | None, Parameter(name=("--size", "--img-size"), help="Side of the square, in pixels; else the images'.")
    ] = None,
    augment: Annotated[
        Literal["auto", "resized-crop", "pad-crop", "none"], Parameter(help="How training samples are cut.")
    ] = "auto",
    evaluation: Annotated[
        bool, Parameter(name="--eval", help="Measure evaluation instead of training.", negative="", show_default=False)
    ] = False,
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"), help="Images in a batch.")] = 128,
    threads: Annotated[
        int | None,
        Parameter(name=("--threads", "--data-nthreads", "--workers", "-j"), help="Threads; else one for each core."),
    ] = None,
    seconds: Annotated[float, Parameter(help="How long to measure the steady state.")] = 10.0,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="", show_default=False)] = False,
) -> None:
    """Measure the feed alone: how fast batches are read, decoded and cut, and what the time goes into.

    Images that fit into memory are decoded once and kept, small ones in the first pass, others in the second: the
    first pass is then measured as well.

    Examples
    --------
    steady feed photos-train.rec
    steady feed photos/ --size 224 --threads 2 --seconds 5
    """
    import json as json_module

    from steadytrain.cli.console import note
    from steadytrain.data.loader import BadImage, ImageLoader, measure
    from steadytrain.data.recordio.card import record_files
    from steadytrain.data.recordio.reader import Records
    from steadytrain.errors import InputError
    from steadytrain.machine import facts

    if not 0 < seconds <= 3600:
        raise InputError(f"--seconds is {seconds}; it must be above 0, up to 3600")
    for name, value, most in (("--threads", threads, 256), ("--size", size, 4096), ("--batch-size", batch_size, 2**20)):
        if value is not None and not 1 <= value <= most:  # before anything is packed
            raise InputError(f"{name} is {value}; it must be from 1 to {most}")

    def on_bad(bad: BadImage) -> None:
        note(f"record {bad.id} cannot be decoded ({bad.reason}): {bad.instead} is used instead")

    with Records.open(_path(data, size, evaluation, root=root, labels=labels)) as records:
        cut = _cut(records, size, augment)
        threads = facts.cores() if threads is None else threads
        with ImageLoader(
            records, cut, batch_size=batch_size, train=not evaluation, threads=threads, on_bad=on_bad
        ) as made:
            note(f"measuring for {seconds:g} seconds")
            told = measure(made, seconds=seconds)
            kept_bytes = made.stats().kept_bytes
        document = {
            "data": str(records.path),
            "n": len(records),
            "bytes": sum(path.stat().st_size for path in record_files(records.path)),
            "work": _work(cut, evaluation),
            "size": cut.size,
            "batch_size": batch_size,
            "threads": threads,
            "cores": facts.cores(),
            "kept_bytes": kept_bytes,
            "first_batch_seconds": told.first_batch_seconds,
            "first_pass": None if told.first_pass is None else vars(told.first_pass),
            **vars(told.steady),
        }
    print(json_module.dumps(document, indent=2) if json else _text(document, told.steady))


def _path(data: str, size: int | None, evaluation: bool, *, root: str | None, labels: str | None) -> Path:
    """The record file to measure; all else is packed as training would pack it, with progress while it is."""
    from steadytrain.cli.console import note
    from steadytrain.cli.running import packing
    from steadytrain.data.loader import packed_side
    from steadytrain.data.packing.prepare import prepare

    with packing(data) as advance:
        prepared = prepare(
            data,
            root=root,
            labels=labels,
            only="val" if evaluation else None,
            shorter_side=packed_side(size),
            say=note,
            progress=advance,
        )
    return prepared.only("val" if evaluation else "train")


def _cut(records: Records, size: int | None, augment: Literal["auto", "resized-crop", "pad-crop", "none"]) -> Crop:
    """The cut that training would use on these images, at ``size`` or at their own where they are small."""
    from steadytrain.config import Data
    from steadytrain.data.loader import SMALL, crop_for

    shorter, largest = _sides(records)
    if size is None:
        size = shorter if largest <= SMALL else 224
    data = Data(train=str(records.path), augment=augment, size=size)
    return crop_for(data, size=size, channels=1 if records.channels == 1 else 3, largest=largest)


def _sides(records: Records) -> tuple[int, int]:
    """The median shorter side and the largest side: by the card, or by some images where there is none."""
    from statistics import median_low

    from steadytrain.data.loader.decode import probe
    from steadytrain.data.packing.images import BadImageError

    if records.card is not None and records.card.height[2]:
        height, width = records.card.height, records.card.width
        return min(height[1], width[1]), max(height[2], width[2])
    found: list[tuple[int, int]] = []
    for number in range(0, len(records), max(1, len(records) // 64)):
        try:
            image = probe(records.image(number))
        except BadImageError:
            continue
        found.append((image.height, image.width))
    return (median_low(map(min, found)), max(map(max, found))) if found else (224, 224)


def _work(cut: Crop, evaluated: bool) -> str:
    if evaluated:
        return f"evaluation: resize, centre {cut.size} x {cut.size}"
    flip = ", flip" if cut.flip else ""
    return f"training: {cut.kind} to {cut.size} x {cut.size}{flip}"


def _text(told: dict[str, Any], steady: Speed) -> str:
    from steadytrain.cli.lines import size_of

    size = f"{size_of(told['bytes'])}, {told['bytes'] / told['n'] / 1000:.1f} kB an image"
    lines = [
        f"{told['data']}: {told['n']:,} images, {size}",
        f"{told['work']}; batches of {told['batch_size']}, {told['threads']} threads on {told['cores']} cores",
        "",
        f"{steady.images_per_second:,.0f} images/s, {steady.images_per_second_per_thread:,.0f} per thread,"
        f" {steady.bytes_per_second / 1e6:,.1f} MB/s read; first batch after {told['first_batch_seconds']:.2f} s",
    ]
    if told["kept_bytes"]:
        first = told["first_pass"] and f"; first pass: {told['first_pass']['images_per_second']:,.0f} images/s"
        lines.append(f"(decoded images are kept, {size_of(told['kept_bytes'])}{first or ''})")
    shares = {
        "read": steady.read_share,
        "decode": steady.decode_share,
        "cut and resize": steady.augment_share,
        "batch": steady.batch_share,
        "blocked": steady.blocked_share,
    }
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    lines += ["", "share of the threads' time", *(f"  {name:<15}{share:7.1%}" for name, share in shares.items())]
    return "\n".join(lines)
