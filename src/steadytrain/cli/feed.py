"""``steady feed``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, progress_once_known
from steadytrain.cli.options import Json, Labels, Root, require_range, require_seconds
from steadytrain.format import size as bytes_text
from steadytrain.machine import facts

if TYPE_CHECKING:
    from steadytrain.data.loader import Crop, Speed
    from steadytrain.data.recordio.reader import Records

Augment = Literal["auto", "resized-crop", "pad-crop", "none"]


def feed(
    data: str,
    /,
    *,
    root: Root = None,
    labels: Labels = None,
    size: Annotated[int | None, Parameter(name=("--size", "--img-size"))] = None,
    augment: Augment = "auto",
    evaluation: Annotated[bool, Parameter(name="--eval")] = False,
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"))] = 128,
    threads: Annotated[int | None, Parameter(name=("--threads", "--data-nthreads", "--workers", "-j"))] = None,
    seconds: float = 10.0,
    json: Json = False,
) -> None:
    """Measure the feed alone: how fast batches are read, decoded and cut, and what the time goes into.

    Images that fit into memory are decoded once and kept, small ones in the first pass, others in the second: the
    first pass is then measured as well.

    Args:
        data: A .rec, or whatever steady pack takes (packed once into the cache).
        size: Side of the square, in pixels; else the images'.
        augment: How training samples are cut.
        evaluation: Measure evaluation instead of training.
        batch_size: Images in a batch.
        threads: Threads; else one for each core.
        seconds: How long to measure the steady state.

    Examples:
        steady feed photos-train.rec
        steady feed photos/ --size 224 --threads 2 --seconds 5
    """
    require_seconds(seconds)
    for name, value, most in (("--threads", threads, 256), ("--size", size, 4096), ("--batch-size", batch_size, 2**20)):
        require_range(name, value, most)  # before anything is packed
    from steadytrain.data.loader import BadImage, ImageLoader, measure, packed_side
    from steadytrain.data.packing.prepare import prepare
    from steadytrain.data.recordio.card import record_files
    from steadytrain.data.recordio.reader import Records

    def on_bad(bad: BadImage) -> None:
        note(f"record {bad.id} cannot be decoded ({bad.reason}): {bad.instead} is used instead")

    side = packed_side(size)
    only: Literal["val"] | None = "val" if evaluation else None
    with progress_once_known(f"packing {data}", resumes=True) as advance:
        prepared = prepare(data, root=root, labels=labels, only=only, shorter_side=side, say=note, progress=advance)
    with Records.open(prepared.only(only or "train")) as records:
        crop = _training_crop(records, size, augment)
        threads = facts.cores() if threads is None else threads
        with ImageLoader(
            records, crop, batch_size=batch_size, train=not evaluation, threads=threads, on_bad=on_bad
        ) as loader:
            note(f"measuring for {seconds:g} seconds")
            measured = measure(loader, seconds=seconds)
            kept_bytes = loader.stats().kept_bytes
        work = f"training: {crop.kind} to {crop.size} x {crop.size}{', flip' if crop.flip else ''}"
        document = {
            "data": str(records.path),
            "n": len(records),
            "bytes": sum(path.stat().st_size for path in record_files(records.path)),
            "work": f"evaluation: resize, centre {crop.size} x {crop.size}" if evaluation else work,
            "size": crop.size,
            "batch_size": batch_size,
            "threads": threads,
            "cores": facts.cores(),
            "kept_bytes": kept_bytes,
            "first_batch_seconds": measured.first_batch_seconds,
            "first_pass": None if measured.first_pass is None else vars(measured.first_pass),
            **vars(measured.steady),
        }
    if json:
        print_json(document)
    else:
        print(_text(document, measured.steady))


def _training_crop(records: Records, size: int | None, augment: Augment) -> Crop:
    """Return the crop that training would use on these images, at ``size`` or at their own where they are small."""
    from statistics import median_low

    from steadytrain.config import Data
    from steadytrain.data.loader import SMALL, crop_for
    from steadytrain.data.loader.decode import probe
    from steadytrain.data.packing.images import BadImageError

    card = records.card
    if card is not None and card.height[2]:
        shorter, largest = min(card.height[1], card.width[1]), max(card.height[2], card.width[2])
    else:  # without a card some images are looked at
        sides: list[tuple[int, int]] = []
        for index in range(0, len(records), max(1, len(records) // 64)):
            try:
                image = probe(records.image(index))
            except BadImageError:
                continue
            sides.append((image.height, image.width))
        shorter, largest = (median_low(map(min, sides)), max(map(max, sides))) if sides else (224, 224)
    if size is None:
        size = shorter if largest <= SMALL else 224
    data = Data(train=str(records.path), augment=augment, size=size)
    return crop_for(data, size=size, channels=1 if records.channels == 1 else 3, largest=largest)


def _text(document: dict[str, Any], steady: Speed) -> str:
    num_bytes, first_pass = document["bytes"], document["first_pass"]
    image = f"{num_bytes / document['n'] / 1000:.1f} kB an image"
    work = f"{document['work']}; batches of {document['batch_size']}"
    lines = [
        f"{document['data']}: {document['n']:,} images, {bytes_text(num_bytes)}, {image}",
        f"{work}, {document['threads']} threads on {document['cores']} cores",
        "",
        f"{steady.images_per_second:,.0f} images/s, {steady.images_per_second_per_thread:,.0f} per thread,"
        f" {steady.bytes_per_second / 1e6:,.1f} MB/s read; first batch after {document['first_batch_seconds']:.2f} s",
    ]
    if document["kept_bytes"]:
        first = f"; first pass: {first_pass['images_per_second']:,.0f} images/s" if first_pass else ""
        lines.append(f"(decoded images are kept, {bytes_text(document['kept_bytes'])}{first})")
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
