"""``steady feed``: how fast this machine reads, decodes and crops images."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text, progress_once_known, status
from steadytrain.cli.options import Json, PlaceOptions, SecondsFlag, SizeFlag, refuse_flags
from steadytrain.config import Data
from steadytrain.config.transforms import Transform, parse_transforms, split_transforms
from steadytrain.errors import InputError
from steadytrain.format import count, percent, rate, text_table, wrap
from steadytrain.format import size as bytes_text
from steadytrain.machine import facts
from steadytrain.machine.process import keep_memory

if TYPE_CHECKING:
    from steadytrain.data.loader import Crop, Speed
    from steadytrain.data.recordio.reader import Records
    from steadytrain.data.transforms import Augmentation

Augment = Literal["auto", "resized-crop", "pad-crop", "none"]


def feed(
    data: str,
    /,
    *,
    places: PlaceOptions = PlaceOptions(),  # noqa: B008 - frozen
    size: SizeFlag = None,
    augment: Augment = "auto",
    transforms: str | None = None,
    evaluation: Annotated[bool, Parameter(name="--eval")] = False,
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"), validator=Number(gte=1, lte=2**20))] = 128,
    threads: Annotated[
        int | None,
        Parameter(name=("--threads", "--data-nthreads", "--workers", "-j"), validator=Number(gte=1, lte=256)),
    ] = None,
    seconds: SecondsFlag = 10.0,
    show: Path | None = None,
    json: Json = False,
) -> None:
    """Measure the data loader alone: how fast it reads, decodes and crops images, and where the time goes.

    Images that fit into memory are decoded once and cached, small ones in the first pass, others in the second; the
    first pass is then measured as well.

    Args:
        data: A .rec file, or any source that steady pack accepts (packed once into the cache).
        size: Side of the square, in pixels (default: that of the images).
        augment: How training images are cropped.
        transforms: Measure these transforms of batches as well, as steady train has them, each alone and together; all:
            every one with its usual values (docs: augmentation).
        evaluation: Measure evaluation instead of training.
        batch_size: Images in a batch.
        threads: Number of threads (default: one for each core).
        seconds: How long to measure the steady state.
        show: Instead of measuring, write a batch as the model sees it, as a picture (.png).

    Examples:
        steady feed photos-train.rec
        steady feed photos/ --transforms randaugment:2,9,mixup:0.2 --show grid.png
        steady feed photos/ --size 224 --threads 2 --seconds 5
    """
    chosen = _transforms_of(transforms, evaluation=evaluation)
    if show is not None and show.suffix.lower() != ".png":
        raise InputError(f"--show is {show}: it must end with .png")
    if show is not None:
        refuse_flags("{} prints what is measured, and --show writes a picture instead: drop one of them", json=json)
    from steadytrain.data.loader import ImageLoader, measure, packed_side
    from steadytrain.data.packing.prepare import prepare
    from steadytrain.data.recordio.card import record_files
    from steadytrain.data.recordio.reader import Records

    side = packed_side(size)
    only: Literal["val"] | None = "val" if evaluation else None
    with progress_once_known(f"packing {data}", resumes=True) as advance:
        options: dict[str, Any] = {"only": only, "shorter_side": side, "say": note, "progress": advance}
        prepared = prepare(data, **vars(places), **options)
    with Records.open(prepared.only(only or "train")) as records:
        records.require_images(note)
        crop = _training_crop(records, size, augment)
        threads = facts.cores() if threads is None else threads
        work = f"training: {crop.kind} to {crop.size} x {crop.size}{', flip' if crop.flip else ''}"
        part = "centre" if crop.fit == "crop" else crop.fit
        work = f"evaluation: resize, {part} {crop.size} x {crop.size}" if evaluation else work
        if show is not None:
            _write_grid(show, records, crop, chosen, evaluation=evaluation, work=work)
            return
        with ImageLoader(
            records,
            crop,
            batch_size=batch_size,
            train=not evaluation,
            threads=threads,
            on_bad=lambda bad: note(str(bad)),
        ) as loader:
            note(f"measuring for {seconds:g} seconds")
            with status("reading, decoding and cropping"):
                measured = measure(loader, seconds=seconds)
            kept_bytes = loader.stats().kept_bytes
        speeds = _transform_speeds(records, crop, chosen, batch_size)
        fetched = records.traffic()
        document = {
            "data": str(data),
            "n": len(records),
            "bytes": sum(path.stat().st_size for path in record_files(records.path)),
            "work": work,
            "size": crop.size,
            "batch_size": batch_size,
            "threads": threads,
            "cores": facts.cores(),
            "kept_bytes": kept_bytes,
            **({} if fetched is None else {"store": vars(fetched)}),
            "first_batch_seconds": measured.first_batch_seconds,
            "first_pass": None if measured.first_pass is None else vars(measured.first_pass),
            **vars(measured.steady),
            **({"transforms": speeds} if speeds else {}),
        }
    columns = shutil.get_terminal_size().columns
    print_json(document) if json else print_text(_text(document, measured.steady, columns))


SHOWN_IMAGES = 32
"""Images that ``steady feed --show`` shows."""


def _transforms_of(text: str | None, *, evaluation: bool) -> tuple[Transform, ...]:
    """Read ``--transforms``. Raises RecipeError, or InputError where an evaluation would have them."""
    if text is None:
        return ()
    if evaluation:
        raise InputError("--transforms and --eval exclude each other: an evaluation has no transforms")
    if text == "all":
        from steadytrain.data.transforms.preview import every_transform

        return every_transform()
    return parse_transforms(split_transforms(text))


def _augmentation(
    records: Records, crop: Crop, transforms: tuple[Transform, ...], group: int, *, on_gpu: bool
) -> Augmentation | None:
    """Make the transforms as training would, on the data's own mean colour; ``on_gpu``: on the GPU, if there is one."""
    if not transforms:
        return None
    from steadytrain.data.transforms import Augmentation, make_own
    from steadytrain.data.transforms.preview import measuring_device

    card, classes = records.card, max(len(records.classes), int(records.labels.max(initial=0)) + 1)
    has_mean = card is not None and len(card.mean) == crop.channels
    fill = card.mean if card is not None and has_mean else (0.5,) * crop.channels
    shape = crop.size, crop.size, crop.channels
    device = measuring_device() if on_gpu else None
    imported = make_own(transforms, device, shape, allow_import=True)  # a flag names them
    return Augmentation(transforms, 0, fill, classes, group, imported)


def _write_grid(
    path: Path, records: Records, crop: Crop, transforms: tuple[Transform, ...], *, evaluation: bool, work: str
) -> None:
    """Write the first images of the stream as the model will see them."""
    from steadytrain.data.loader import ImageLoader
    from steadytrain.data.transforms.preview import write_grid

    with ImageLoader(records, crop, batch_size=min(SHOWN_IMAGES, len(records)), train=not evaluation) as loader:
        batch = next(iter(loader))
    augmentation = _augmentation(records, crop, transforms, len(batch), on_gpu=False)
    write_grid(path, batch, augmentation, records.class_list)
    note(f"wrote {path}: {count(len(batch), 'image')}, {', '.join([work, *map(str, transforms)])}")


def _transform_speeds(
    records: Records, crop: Crop, transforms: tuple[Transform, ...], batch_size: int
) -> list[dict[str, Any]]:
    """Measure transforms on a batch, on the device that training would use."""
    augmentation = _augmentation(records, crop, transforms, batch_size, on_gpu=True)
    if augmentation is None:
        return []
    from steadytrain.data.loader import ImageLoader
    from steadytrain.data.transforms.preview import measure_transforms

    with ImageLoader(records, crop, batch_size=batch_size) as loader:
        batch = next(iter(loader))
    keep_memory(facts.memory_bytes())  # as training does
    note("measuring transforms")
    return [vars(speed) for speed in measure_transforms(augmentation, batch)]


def _training_crop(records: Records, size: int | None, augment: Augment) -> Crop:
    """Return the crop that training would use on these images, at ``size`` or at their own where they are small."""
    from statistics import median_low

    from steadytrain.data.images.decode import BadImageError
    from steadytrain.data.loader import SMALL, crop_for
    from steadytrain.data.loader.decode import probe

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
    channels: Literal[1, 3] = 1 if records.channels == 1 else 3
    return crop_for(data, size=size, channels=channels, largest=largest, fit=records.usual_fit)


def _text(document: dict[str, Any], steady: Speed, width: int) -> str:
    num_bytes, first_pass = document["bytes"], document["first_pass"]
    images = f"{count(document['n'], 'image')}, {bytes_text(num_bytes)}, {num_bytes / document['n'] / 1000:.1f} kB"
    threads = f"{count(document['threads'], 'thread')} on {count(document['cores'], 'core')}"
    speed = f"{rate(steady.images_per_second)} images/s, {rate(steady.images_per_second_per_thread)} per thread,"
    speed += f" {steady.bytes_per_second / 1e6:,.1f} MB/s read"
    lines = [
        *wrap(f"{document['data']}: {images} per image", width, "", "  "),
        *wrap(f"{document['work']}; batches of {document['batch_size']}, {threads}", width, "", "  "),
        "",
        *wrap(f"{speed}; first batch after {document['first_batch_seconds']:.2f} s", width, "", "  "),
    ]
    if document["kept_bytes"]:
        first = f"; first pass: {rate(first_pass['images_per_second'])} images/s" if first_pass else ""
        lines.append(f"(decoded images are cached, {bytes_text(document['kept_bytes'])}{first})")
    shares = {
        "read": steady.read_share,
        "decode": steady.decode_share,
        "crop and resize": steady.augment_share,
        "batch": steady.batch_share,
        "blocked": steady.blocked_share,
    }
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    cells = [[f"  {name}", percent(share, 1)] for name, share in shares.items()]
    lines += ["", "share of the threads' time", text_table(cells, right=(1,), least=(17, 7), gap=0)]
    if speeds := document.get("transforms"):
        where = "on the CPU" if speeds[0]["device"] == "cpu" else "on the GPU"
        lines += ["", f"transforms of a batch of {document['batch_size']}, {where}, at the start of an update"]
        cells = [
            ["", s["transform"], f"{s['seconds'] * 1000:8.2f} ms", f"{rate(s['images_per_second']):>12} images/s"]
            for s in speeds
        ]
        lines.append(text_table(cells))
    return "\n".join(lines)
