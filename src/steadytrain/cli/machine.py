"""``steady doctor``, ``feed``, ``bench`` and ``bandwidth``: what this machine is, and how fast its parts are."""

from __future__ import annotations

import json as json_module
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text, progress, progress_once_known
from steadytrain.cli.options import (
    DeviceFlag,
    Json,
    LabelColumn,
    LabelsFlag,
    PathColumn,
    Root,
    SplitColumn,
    require_range,
    require_seconds,
)
from steadytrain.config import CompileMode, Data, Layout, Model, Numbers, Recipe
from steadytrain.config.transforms import Transform, parse_transforms, split_transforms
from steadytrain.errors import InputError, RankLostError
from steadytrain.files import replace_file
from steadytrain.format import clean, count, hide_columns, rate, text_table
from steadytrain.format import size as bytes_text
from steadytrain.machine import facts
from steadytrain.machine.children import cause_of_death, python, run_steady
from steadytrain.machine.process import keep_memory, spin_where_alone

if TYPE_CHECKING:
    from steadytrain.data.loader import Crop, Speed
    from steadytrain.data.recordio.reader import Records
    from steadytrain.data.transforms import Augmentation
    from steadytrain.distributed.world import World

Augment = Literal["auto", "resized-crop", "pad-crop", "none"]
BackendFlag = Literal["auto", "gloo", "nccl"]
YesNo = Literal["yes", "no"]

MAX_COLUMNS = 100
FIGURES = [
    *("images/s", "p50 ms", "memory MB", "memory GB", "of peak", "compile s", "GFLOP/s", "forward ms", "backward ms"),
    *("p99 ms", "optimizer ms", "host ms", "p90 ms"),
]
"""Of a row of ``steady bench``, the most important first: what a narrow terminal has no room for is left out."""
_COLOURS = {"bold": "1", "bold red": "1;31", "yellow": "33", "cyan": "36"}
_WAYS = {
    "tensors": "tensor{} one by one",
    "buckets": "bucket{} at once",
    "fp16": "bucket{} as fp16",
    "bf16": "bucket{} as bf16",
    "2bit": "bucket{} as 2bit",
}


def doctor(
    *,
    against: Path | None = None,
    json: Json = False,
) -> int:
    """Check this machine: what slows training down or keeps it off the GPU, and what to do about it.

    Checks torch, its CUDA version and the driver, the GPUs, processors, memory, folders, decoders, settings and
    versions. It changes nothing. It takes some seconds, because it imports torch in a separate process. The exit code
    is 1 if a finding is bad.

    Args:
        against: A --json document of another machine, or an earlier one of this machine: print only the differences.

    Examples:
        steady doctor
        steady doctor --json > gpu7.json
        steady doctor --against gpu7.json
    """
    from steadytrain import doctor as examination

    other = None if against is None else examination.read(against)
    note("checking this machine (loading torch takes some seconds)")
    facts = examination.examine()
    findings = examination.findings(facts)
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    document: dict[str, Any] = examination.document(facts, findings)
    if other is None:
        lines = examination.lines(facts, findings, width=width)
    else:
        comparison = examination.compare(other, document)
        lines = examination.comparison_lines(comparison, width=width)
        document = examination.comparison_document(comparison)
    if json:
        print_json(document)
    else:
        is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
        for line in lines:
            text = clean(line.text)
            if is_coloured and line.style:
                text = f"\033[{_COLOURS[line.style]}m{text[: line.styled]}\033[0m{text[line.styled :]}"
            print(text)
    return 1 if any(finding.severity == "bad" for finding in findings) else 0


def feed(
    data: str,
    /,
    *,
    root: Root = None,
    labels: LabelsFlag = None,
    path_column: PathColumn = None,
    label_column: LabelColumn = (),
    split_column: SplitColumn = None,
    size: Annotated[int | None, Parameter(name=("--size", "--img-size"))] = None,
    augment: Augment = "auto",
    transforms: str | None = None,
    evaluation: Annotated[bool, Parameter(name="--eval")] = False,
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"))] = 128,
    threads: Annotated[int | None, Parameter(name=("--threads", "--data-nthreads", "--workers", "-j"))] = None,
    seconds: float = 10.0,
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
        show: Instead of measuring, write a batch as the model sees it, as a picture (.png) or a page (.html).

    Examples:
        steady feed photos-train.rec
        steady feed photos/ --transforms randaugment:2,9,mixup:0.2 --show grid.png
        steady feed photos/ --size 224 --threads 2 --seconds 5
    """
    require_seconds(seconds)
    for name, value, most in (("--threads", threads, 256), ("--size", size, 4096), ("--batch-size", batch_size, 2**20)):
        require_range(name, value, most)  # before anything is packed
    chosen = _transforms_of(transforms, evaluation=evaluation)
    if show is not None and show.suffix.lower() not in (".png", ".html"):
        raise InputError(f"--show is {show}: it must end with .png or .html")
    from steadytrain.data.loader import ImageLoader, measure, packed_side
    from steadytrain.data.packing.prepare import prepare
    from steadytrain.data.recordio.card import record_files
    from steadytrain.data.recordio.reader import Records

    side = packed_side(size)
    only: Literal["val"] | None = "val" if evaluation else None
    with progress_once_known(f"packing {data}", resumes=True) as advance:
        options: dict[str, Any] = {"only": only, "shorter_side": side, "say": note, "progress": advance}
        options |= {"path_column": path_column, "label_column": label_column, "split_column": split_column}
        prepared = prepare(data, root=root, labels=labels, **options)
    with Records.open(prepared.only(only or "train")) as records:
        records.require_images(note)
        crop = _training_crop(records, size, augment)
        threads = facts.cores() if threads is None else threads
        work = f"training: {crop.kind} to {crop.size} x {crop.size}{', flip' if crop.flip else ''}"
        work = f"evaluation: resize, centre {crop.size} x {crop.size}" if evaluation else work
        if show is not None:
            _write_grid(show, str(data), records, crop, chosen, evaluation=evaluation, work=work)
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
            measured = measure(loader, seconds=seconds)
            kept_bytes = loader.stats().kept_bytes
        speeds = _transform_speeds(records, crop, chosen, batch_size)
        if faults := records.new_faults():
            note(faults)
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
    if json:
        print_json(document)
    else:
        print_text(_feed_text(document, measured.steady, shutil.get_terminal_size().columns))


SHOWN_IMAGES = 32
"""Of ``steady feed --show``."""


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
    path: Path,
    data: str,
    records: Records,
    crop: Crop,
    transforms: tuple[Transform, ...],
    *,
    evaluation: bool,
    work: str,
) -> None:
    """Write the first images of the stream as the model will see them."""
    from steadytrain.data.loader import ImageLoader
    from steadytrain.data.transforms.preview import write_grid
    from steadytrain.reports.plots import html_page

    with ImageLoader(records, crop, batch_size=min(SHOWN_IMAGES, len(records)), train=not evaluation) as loader:
        batch = next(iter(loader))
    augmentation = _augmentation(records, crop, transforms, len(batch), on_gpu=False)
    lede = ", ".join([f"{data}: {work}", *map(str, transforms)])

    def page(figures: str, width: int) -> str:
        css = (
            "figure { display: inline-block; margin: 0 8px 8px 0; vertical-align: top; }"
            f" figcaption {{ max-width: {width}px; margin: 0; font-weight: 400; overflow-wrap: anywhere; }}"
        )
        return html_page(figures, title="What the model will see", lede=lede, css=css)

    write_grid(path, batch, augmentation, records.class_list, page)
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
    return crop_for(data, size=size, channels=1 if records.channels == 1 else 3, largest=largest)


def _wrap(text: str, width: int) -> list[str]:
    """Break a sentence into lines of ``width`` columns between words; a path stays whole."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _feed_text(document: dict[str, Any], steady: Speed, width: int) -> str:
    num_bytes, first_pass = document["bytes"], document["first_pass"]
    image = f"{num_bytes / document['n'] / 1000:.1f} kB per image"
    threads = f"{count(document['threads'], 'thread')} on {count(document['cores'], 'core')}"
    lines = [
        *_wrap(f"{document['data']}: {document['n']:,} images, {bytes_text(num_bytes)}, {image}", width),
        *_wrap(f"{document['work']}; batches of {document['batch_size']}, {threads}", width),
        "",
        *_wrap(
            f"{steady.images_per_second:,.0f} images/s, {steady.images_per_second_per_thread:,.0f} per thread,"
            f" {steady.bytes_per_second / 1e6:,.1f} MB/s read; first batch after"
            f" {document['first_batch_seconds']:.2f} s",
            width,
        ),
    ]
    if document["kept_bytes"]:
        first = f"; first pass: {first_pass['images_per_second']:,.0f} images/s" if first_pass else ""
        lines.append(f"(decoded images are cached, {bytes_text(document['kept_bytes'])}{first})")
    shares = {
        "read": steady.read_share,
        "decode": steady.decode_share,
        "crop and resize": steady.augment_share,
        "batch": steady.batch_share,
        "blocked": steady.blocked_share,
    }
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    cells = [[f"  {name}", f"{share:.1%}"] for name, share in shares.items()]
    lines += ["", "share of the threads' time", text_table(cells, right=(1,), least=(17, 7), gap=0)]
    if speeds := document.get("transforms"):
        where = "on the CPU" if speeds[0]["device"] == "cpu" else "on the GPU"
        lines += ["", f"transforms of a batch of {document['batch_size']}, {where}, at the start of an update"]
        cells = [
            ["", s["transform"], f"{s['seconds'] * 1000:8.2f} ms", f"{s['images_per_second']:>12,.0f} images/s"]
            for s in speeds
        ]
        lines.append(text_table(cells))
    return "\n".join(lines)


def bench(
    what: str = "train",
    /,
    *,
    model: Annotated[str | None, Parameter(name=("--model", "--network"))] = None,
    batch_size: Annotated[tuple[int, ...], Parameter(name=("--batch-size", "-b"), consume_multiple=1)] = (32,),
    precision: Annotated[tuple[Numbers, ...], Parameter(name=("--precision", "--dtype"), consume_multiple=1)] = (
        "fp32",
    ),
    layout: Annotated[tuple[Layout, ...], Parameter(consume_multiple=1)] = ("channels-last",),
    compile: Annotated[tuple[CompileMode, ...], Parameter(consume_multiple=1)] = ("none",),
    graph: Annotated[tuple[YesNo, ...], Parameter(consume_multiple=1)] = ("no",),
    recompute: Annotated[
        tuple[YesNo, ...], Parameter(name=("--recompute", "--grad-checkpointing"), consume_multiple=1)
    ] = ("no",),
    size: Annotated[int | None, Parameter(name=("--size", "--img-size"))] = None,
    channels: Literal[1, 3] = 3,
    classes: Annotated[int, Parameter(name=("--classes", "--num-classes"))] = 1000,
    optimizer: str = "sgd",
    device: DeviceFlag = "auto",
    threads: Annotated[tuple[int, ...], Parameter(consume_multiple=1)] = (),
    seconds: float = 3.0,
    plot: Path | None = None,
    json: Json = False,
) -> int:
    """Measure how fast a network trains here, with the updates of steady train, on random images in memory.

    Every combination of values is measured in a separate process; one that runs out of memory loses only its row. A row
    shows images per second, the time of an update (p50, p90, p99) and of its parts, FLOP/s of convolutions and matrix
    multiplications, their share of the peak (of a large matrix multiplication here), and peak memory.

    Args:
        what: train, or the network to measure; steady bench infer measures inference.
        model: timm/NAME, a built-in such as resnet20, or pkg.mod:factory.
        batch_size: One or several.
        precision: One or several.
        layout: Memory layout of the images: one or several.
        compile: Modes of torch.compile: one or several.
        graph: Replay each update as one CUDA graph: yes, no or both.
        recompute: Recompute activations in the backward pass: yes, no or both.
        size: Side of the images, in pixels (default: the model's own, such as 32 for resnet20, else 224).
        channels: Channels of the images.
        classes: Classes of the network.
        optimizer: sgd, adamw, muon, ... or timm/NAME (docs: optimizers).
        threads: Compute threads on a CPU: one number or several (default: one for each core).
        seconds: How long to measure each combination, at least.
        plot: Write images per second over batch sizes as an HTML page.

    Examples:
        steady bench train --model resnet20 --batch-size 32 64 128 256
        steady bench train --model timm/resnet50 --batch-size 64 256 --precision fp32 bf16 --compile none default
    """
    if model is None and what != "train":
        what, model = "train", what
    if what != "train":
        raise InputError(f"steady bench measures train, or infer, not {what!r}: name one network, by --model {model}")
    if model is None:
        raise InputError("name the network to measure, such as steady bench resnet20")
    require_seconds(seconds)
    if plot is not None and plot.suffix.lower() != ".html":
        raise InputError(f"--plot is {plot}; it must end in .html")
    for name, value, most in (("--size", size, 4096), ("--channels", channels, 1024), ("--classes", classes, 10**6)):
        require_range(name, value, most)
    names = ("batch_size", "precision", "layout", "compile", "graph", "recompute", "threads")
    values = product(batch_size, precision, layout, compile, graph, recompute, threads or (None,))
    settings: list[dict[str, Any]] = [dict(zip(names, combination, strict=True)) for combination in values]
    rows: list[dict[str, Any]] = []
    if len(settings) == 1 and json:
        spin_where_alone()
        from steadytrain.training.profile.bench import measure

        [setting] = settings
        changes = {
            "batch_size": setting["batch_size"],
            "optim.name": optimizer,
            "precision.name": setting["precision"],
            "precision.compile": setting["compile"],
            "precision.channels_last": setting["layout"] == "channels-last",
            "parallel.device": device,
            "parallel.compute_threads": setting["threads"],
            "parallel.graph": setting["graph"] == "yes",
            "parallel.recompute": setting["recompute"] == "yes",
        }
        recipe = Recipe(data=Data(train="drawn"), model=Model(model)).with_(changes)
        speed = measure(recipe, size=size, channels=channels, num_classes=classes, seconds=seconds, allow_import=True)
        rows.append(vars(speed) | {"of_peak": speed.of_peak})
    else:
        words = ["bench", "train", "--json", "--model", model, "--channels", str(channels), "--classes", str(classes)]
        words += [] if size is None else ["--size", str(size)]
        words += ["--optimizer", optimizer, "--device", device, "--seconds", str(seconds)]
        with progress("measuring", len(settings), unit="combinations") as advance:
            for done, setting in enumerate(settings, 1):
                rows.append(_bench_in_subprocess(words, setting))
                advance(done, len(settings))
    if all(row.get("exit_code") == InputError.exit_code for row in rows):  # the command's mistake, not a combination's
        raise InputError(rows[0]["error"])
    if json:
        print_json({"rows": rows})
    else:
        print_text("\n".join(_bench_table(rows, shutil.get_terminal_size().columns)))
    if plot is not None:  # after what was measured is printed: it is not lost where the page cannot be written
        from steadytrain.reports.plots import speeds_page

        replace_file(plot, speeds_page(rows))
    return 1 if all("error" in row for row in rows) else 0


def _bench_in_subprocess(words: Sequence[str], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one combination in a process of its own; what could not be measured has an ``error``."""
    flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in setting.items() if value is not None]
    ended = run_steady([*words, *(word for flag in flags for word in flag)])
    if ended.code == 0:
        row: dict[str, Any] = json_module.loads(ended.output)["rows"][0]
    elif ended.code == -9:
        row = {"error": cause_of_death(ended.code)}
    else:
        row = {"error": ended.last_line or f"exited with code {ended.code}", "exit_code": ended.code}
    return {**setting, "graph": setting["graph"] == "yes", "recompute": setting["recompute"] == "yes", **row}


def _bench_table(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield lines of at most ``width`` columns: what all rows share, and as many figures of each as fit."""
    from steadytrain.reports.charts import LAYOUTS

    measured = [row for row in rows if "error" not in row]
    is_gpu = any(row["device"] != "cpu" for row in measured)
    known = {row["threads"] for row in measured}
    threads = [next(iter(known)) if row["threads"] is None and len(known) == 1 else row["threads"] for row in rows]
    settings: dict[str, list[str]] = {
        "precision": [row["precision"] for row in rows],
        "layout": [LAYOUTS[row["layout"]] for row in rows],
        "compile": [row["compile"] for row in rows],
        "threads": ["-" if is_gpu or num is None else str(num) for num in threads],
        "graph": ["yes" if row["graph"] else "no" for row in rows],
        "recompute": ["yes" if row["recompute"] else "no" for row in rows],
        "batch": [f"{row['batch_size']:,}" for row in rows],
    }
    shared = {name: cells[0] for name, cells in settings.items() if len(set(cells)) == 1 and name != "batch"}
    settings = {name: cells for name, cells in settings.items() if name not in shared}
    words = [f"{name} {cell}" for name, cell in shared.items() if cell not in ("-", "no")]
    if measured:
        first = measured[0]
        shape = f"{first['channels']} x {first['size']} x {first['size']}"
        head = f"{first['model']}: {first['parameters']:,} parameters, images {shape}, on {first['device']}"
        yield from _wrap(", ".join([head, *words]), width)
        reached = {}
        for row in measured:  # on a GPU threads say nothing
            by = f" by {count(row['threads'], 'thread')}" if row["device"] == "cpu" else ""
            reached[f"{row['precision']}{by}"] = row["peak_flops"]
        peaks = ", ".join(f"{_flops(peak)} in {how}" for how, peak in reached.items())
        yield from _wrap(f"peak, measured here with a large matrix multiplication: {peaks}", width)
        yield ""
    figures = _bench_figures(rows)
    columns = settings | figures
    hidden = hide_columns(columns, sorted(figures, key=FIGURES.index), width)
    lines = [[name, *cells] for name, cells in columns.items() if name not in hidden]
    right = range(len(settings) - 1, len(lines))  # from the batch size on
    yield from text_table(list(zip(*lines, strict=True)), right=right).splitlines()
    errors: dict[str, list[str]] = {}
    for row, setting in zip(rows, zip(*settings.values(), strict=True), strict=True):
        if "error" in row:
            which = ", ".join(f"{name} {cell}" for name, cell in zip(settings, setting, strict=True))
            errors.setdefault(clean(row["error"]), []).append(which)
    remarks = [f"not measured ({'; '.join(which)}): {error}" for error, which in errors.items()]
    remarks += [f"note: {remark}" for remark in dict.fromkeys(note for row in rows for note in row.get("notes", ()))]
    breaks = dict.fromkeys(place for row in rows for place in row.get("breaks", ()))
    remarks += [f"Python comes between compiled pieces at {place}" for place in breaks]
    if left_out := [name for name in figures if name in hidden]:
        remarks.append(f"left out at this width: {', '.join(left_out)} (--json or a wider terminal shows all)")
    for remark in remarks:
        yield from _wrap(remark, width)


def _bench_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Format the figures of each row, a list for each column; units are in its head."""
    measured = [row for row in rows if "error" not in row]
    most = max((row["memory_bytes"] for row in measured), default=0)
    memory, unit = (1e9, "GB") if most >= 10e9 else (1e6, "MB")

    def column(cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return ["" if "error" in row else cell(row) for row in rows]

    def milliseconds(group: str, name: str) -> list[str]:
        return column(lambda row: _milliseconds(row[group].get(name, 0.0)))

    def gigaflops(row: Mapping[str, Any]) -> str:
        flops = row["flops_per_second"]
        return "-" if flops is None else f"{flops / 1e9:,.0f}" if flops >= 100e9 else f"{flops / 1e9:.3g}"

    is_recorded = any("update" in row.get("parts", ()) for row in rows)
    parts = ("forward", "backward", "optimizer", *(["update"] if is_recorded else []), "host")
    compiled = column(lambda row: "-" if row["compile_seconds"] is None else f"{row['compile_seconds']:.0f}")
    figures = {
        "images/s": column(lambda row: rate(row["images_per_second"])),
        **{f"{name} ms": milliseconds("step_seconds", name) for name in ("p50", "p90", "p99")},
        **{f"{name} ms": milliseconds("parts", name) for name in parts},
        "GFLOP/s": column(gigaflops),
        "of peak": column(lambda row: "-" if row["of_peak"] is None else f"{row['of_peak']:.0%}"),
        f"memory {unit}": column(lambda row: f"{row['memory_bytes'] / memory:,.{1 if unit == 'GB' else 0}f}"),
        "compile s": compiled,
    }
    return figures if any(cell not in ("", "-") for cell in compiled) else dict(list(figures.items())[:-1])


def _milliseconds(seconds: float) -> str:
    """Format seconds in milliseconds of three digits.

    >>> _milliseconds(0.00012345), _milliseconds(1.5)
    ('0.123', '1500')
    """
    return f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"


def _flops(rate: float) -> str:
    """Format floating-point operations per second in three digits.

    >>> _flops(95.2e9), _flops(1.2e15)
    ('95.2 GFLOP/s', '1200 TFLOP/s')
    """
    size, unit = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / size:.0f} {unit}FLOP/s" if rate >= 1000 * size else f"{rate / size:.3g} {unit}FLOP/s"


def bandwidth(
    *,
    model: str = "resnet50",
    procs: Annotated[int | None, Parameter(name=("--procs", "-n"))] = None,
    backend: BackendFlag = "auto",
    seconds: float = 5.0,
    step_seconds: float | None = None,
    batch_size: Annotated[int | None, Parameter(name=("--batch-size", "-b"))] = None,
    size: Annotated[int | None, Parameter(name=("--size", "--img-size"))] = None,
    json: Json = False,
) -> int:
    """Measure the links between ranks: all-reduce of a model's tensors, uncompressed and compressed.

    Without a launcher it starts ranks on this machine. Started by torchrun, mpirun, srun or steady launch, it measures
    between the ranks of that launch.

    The tensors are exchanged one after another, then in buckets of 25 MB that are sent at the same time, as in
    training. The buckets are also sent as fp16, bf16 and 2bit. GB/s per rank is MXNet's figure: 2 (n - 1) / n of
    the gradients' bytes, for n ranks, over the time. Push+pull is twice their bytes over the time. Compressed
    gradients count with their 32-bit size. The error is relative to a sum that is computed without an exchange.

    From that it predicts how long an update takes with each engine (ddp, its compressions, local). It recommends the
    one that changes training least and is within 10 % of the fastest (docs: engines).

    Args:
        model: The model whose tensors are exchanged: a name that steady train accepts.
        procs: Ranks on this machine, 2 or more (default: one for each GPU, or 2).
        backend: gloo: tensors in CPU memory; nccl: tensors in GPU memory; auto: all that are available.
        seconds: How long to measure each backend.
        step_seconds: Computing time of an update, to choose the engine by. [default: 0.1, 1 and 10 s side by side]
        batch_size: Measure the computing time of an update of this many images, over all ranks.
        size: Side of those images. [default: the model's own, or 224]

    Examples:
        steady bandwidth
        steady bandwidth --model resnet20 --size 32 --batch-size 128
        steady bandwidth --model timm/vit_base_patch16_224 --procs 4 --json
    """
    require_seconds(seconds)
    if step_seconds is not None:
        require_seconds(step_seconds, "--step-seconds")
        if batch_size is not None:
            raise InputError("--step-seconds says how long an update computes, and --batch-size measures it: omit one")
    from steadytrain.distributed.world import world_from_environment

    world = world_from_environment(os.environ)
    if world.size == 1:
        from steadytrain.launch.supervise import keep_ranks

        gpus = len(facts.accelerators())
        if procs is not None and not 2 <= procs <= 256:
            raise InputError(f"--procs is {procs}; it must be from 2 to 256: a single rank has nothing to exchange")
        procs = procs or max(2, gpus)
        if backend == "nccl" and procs > gpus:
            raise InputError(f"--backend nccl needs a GPU for each of {procs} ranks, but there are {gpus}: use gloo")
        words = ["bandwidth", "--model", model, "--backend", backend, "--seconds", str(seconds)]
        options = {"--step-seconds": step_seconds, "--batch-size": batch_size, "--size": size}
        words += [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
        command = python("-m", "steadytrain", *words, *(["--json"] if json else []))
        return keep_ranks(command, procs, restarts=0, say=note)
    if procs is not None:
        raise InputError(f"--procs is {procs}, and {world.launcher} has started {world.size} ranks: omit --procs")
    try:
        if batch_size is not None:
            step_seconds = _measure_step(world, model, batch_size, size)
        document = _measure_links(world, model, backend, seconds, step_seconds)
    except (InputError, RankLostError) as error:
        if world.is_first:
            raise
        return error.exit_code  # the first rank says why
    if world.is_first and json:
        print_json(document)
    elif world.is_first:
        print_text(_bandwidth_text(document))
    return 0


def _measure_step(world: World, model: str, batch_size: int, size: int | None) -> float:
    """Measure the median update of this rank's part of a batch, while the other ranks measure theirs."""
    from steadytrain.training.profile.bench import measure

    if not 0 < batch_size <= 1 << 20 or batch_size % world.size:
        raise InputError(f"--batch-size is {batch_size}; it must be a multiple of the {world.size} ranks")
    if world.is_first:
        note(f"measuring updates of {batch_size // world.size} images on each rank")
    threads = max(1, facts.cores() // world.local_size)
    has_gpus = len(facts.accelerators()) >= world.local_size  # else the ranks compute, and exchange, on CPUs
    device = f"cuda:{world.local_rank}" if has_gpus else "cpu"
    recipe = Recipe(data=Data(train="drawn"), model=Model(model), batch_size=batch_size // world.size)
    recipe = recipe.with_({"parallel.compute_threads": threads, "parallel.device": device})
    return measure(recipe, size=size, seconds=1.0, allow_import=True).step_seconds["p50"]


def _measure_links(
    world: World, model: str, backend: BackendFlag, seconds: float, step_seconds: float | None
) -> dict[str, Any]:
    """Return the document, on every rank; only the first shows progress."""
    from steadytrain.distributed.bandwidth import links
    from steadytrain.models.build import parameter_shapes
    from steadytrain.tuning.engines import engines_document

    def shapes() -> tuple[str, list[list[int]]]:
        note(f"building {model}")
        return parameter_shapes(Model(model), allow_import=True)

    keep_memory(facts.memory_bytes() // world.local_size)  # as training does
    with ExitStack() as stack:
        advance = stack.enter_context(progress("measuring", 0, unit="ways")) if world.is_first else lambda *done: None
        measured = links(world, shapes, backend=backend, seconds=seconds, cores=facts.cores(), progress=advance)
    document: dict[str, Any] = {
        "model": measured.model,
        "tensors": len(measured.shapes),
        "parameters": sum(map(prod, measured.shapes)),
        "procs": world.size,
        "hosts": list(dict.fromkeys(measured.hosts)),
        "backends": [{**vars(link), "ways": [vars(way) for way in link.ways]} for link in measured.backends],
    }
    return document | {"engines": engines_document(document, measured.shapes, step_seconds)}


def _bandwidth_text(document: Mapping[str, Any]) -> str:
    from steadytrain.tuning.engines import engines_text

    hosts, gradients = document["hosts"], bytes_text(4 * document["parameters"])
    lines = [
        f"{document['model']}: {document['parameters']:,} parameters, {gradients} of gradients",
        f"{document['procs']} ranks on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} machines'}",
    ]
    for link in document["backends"]:
        cells = [[link["backend"], "ms", "push+pull", "GB/s/rank", "error"]]
        for way in link["ways"]:
            n, speed = way["exchanges"], f"{way['bytes_per_second'] / 1e6:,.0f} MB/s"
            figures = [f"{way['seconds'] * 1000:,.2f}", speed, f"{way['gigabytes_per_second']:.3g}"]
            cells.append([f"{n} {_WAYS[way['way']].format('s' * (n != 1))}", *figures, f"{way['error']:.0e}"])
        cells.append(["a single number", f"{link['latency_seconds'] * 1000:,.2f}", "", "", ""])
        lines += ["", text_table(cells, right=range(1, 5), least=(22, 8, 10, 9, 7), gap=1)]
    return "\n".join([*lines, "", engines_text(document["engines"], 60)])
