"""``steady bench infer``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.bench import milliseconds_text
from steadytrain.cli.console import note, print_json, print_text, progress_once_known
from steadytrain.cli.evaluate import AcceptLicence
from steadytrain.cli.options import BatchSizesFlag, DeviceFlag, Json, PlaceOptions, SecondsFlag, refuse_flags
from steadytrain.cli.train import require_licence
from steadytrain.config import Model
from steadytrain.config.plain import plain
from steadytrain.errors import InputError, ModelError
from steadytrain.format import NONE, count, hide_columns, number, percent, rate, text_table, wrap
from steadytrain.machine import facts
from steadytrain.machine.process import spin_where_alone

if TYPE_CHECKING:
    from steadytrain.export.engines import InferencePlan
    from steadytrain.export.speed import EngineSpeed, NetworkSpeed

NumberFormat = Literal["fp32", "bf16", "fp16", "int8"]

MAX_WIDTH, MAX_IMAGES = 120, 4096
FORMAT = "steadytrain-inference"
"""The format of the document that ``--json`` prints."""


def bench_infer(
    *networks: str,
    model: Annotated[tuple[str, ...], Parameter(name=("--model", "--network"), consume_multiple=1)] = (),
    engines: Annotated[tuple[str, ...], Parameter(consume_multiple=1)] = (),
    batch_size: BatchSizesFlag = (1, 32),
    precision: Annotated[tuple[NumberFormat, ...], Parameter(name=("--precision", "--dtype"), consume_multiple=1)] = (),
    threads: Annotated[int | None, Parameter(validator=Number(gte=1, lte=1024))] = None,
    device: DeviceFlag = "auto",
    data: str | None = None,
    places: PlaceOptions = PlaceOptions(),  # noqa: B008 - frozen
    images: Annotated[int, Parameter(validator=Number(gte=1, lte=MAX_IMAGES))] = 64,
    seconds: SecondsFlag = 2.0,
    accept_licence: AcceptLicence = False,
    json: Json = False,
) -> int:
    """Measure how fast networks infer here, engine by engine: latency, images per second, memory, and equal outputs.

    Each engine runs in its own process, and the engines of a network take turns, so that noise affects all alike. A
    crash or a lack of memory only costs its row. Without names it measures AlexNet, VGG, Inception, ResNet, SqueezeNet,
    MobileNet and DenseNet. Weights are random unless you name a file or a run; speed does not depend on them.

    Args:
        networks: Names of the table such as resnet50, timm/NAME, built-in nets, pkg.mod:factory, runs, weights files,
            or NAME=FILE for a network with the weights of a file.
        model: The same, behind a flag.
        engines: One or several of plain (torch without oneDNN, on a GPU without cuDNN), eager (torch as it is),
            channels-last, compile, onnxruntime, onnxruntime-tensorrt and openvino. [default: all installed ones except
            compile, which takes minutes]
        batch_size: The smallest shows latency, the largest throughput.
        precision: Number formats. [default: fp32, int8, and those that this processor or GPU supports in hardware]
        threads: Compute threads on a CPU. [default: one for each core]
        data: Compare outputs on these images, and score them by their labels: a folder, a .rec file, or any source that
            steady pack takes. [default: random samples]
        images: Number of images of --data to use, spread over all of it; they are held in memory.
        seconds: How long to measure each engine with each batch size.

    Examples:
        steady bench infer resnet50 --engines eager openvino --batch-size 1 32
        steady bench infer runs/a --data photos/ --threads 2
        steady bench infer runs/a --data val.rec --images 1000
        steady bench infer resnet50 mobilenet-v2 --json > inference.json
    """
    networks += model
    if data is None:
        refuse_flags("{} is about data, and none are named: --data photos", **vars(places))
    spin_where_alone()
    for name in networks:
        _require_licence(name, accepted=accept_licence)
    from steadytrain.export.speed import bench_inference, make_plan

    options: dict[str, Any] = {"batches": tuple(sorted(set(batch_size))), "seconds": seconds, "images": images}
    options["records"] = None if data is None else _pack(data, places)
    options |= {} if threads is None else {"threads": threads}
    plan = make_plan(engines=engines, numbers=precision, device=device, **options)
    shown = list(bench_inference(networks, plan, say=note))
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    print_json(_document(plan, shown)) if json else print_text("\n".join(table(shown, width)))
    is_measured = any(speed.measured for speed in shown)
    if not is_measured and all(speed.is_mistake for speed in shown):
        raise InputError(shown[0].error)
    return int(not is_measured)


def _require_licence(name: str, *, accepted: bool) -> None:
    """Ask before weights of a non-commercial licence are fetched, and print what a licence restricts."""
    from steadytrain.export.networks import is_pretrained
    from steadytrain.models.registry import find, licence_note

    if not is_pretrained(name):
        return
    with suppress(ModelError):  # no such model: its row says so
        require_licence(Model(name, pretrained=True), accepted=accepted)
        if remark := licence_note(find(name).licence):
            note(f"{name}: {remark}")


def _pack(data: str, places: PlaceOptions) -> str:
    """Pack the images that outputs are compared on, unless they are packed already, or a folder without classes."""
    from steadytrain.data.loader import packed_side
    from steadytrain.data.packing.prepare import prepare
    from steadytrain.export.export import is_unlabelled

    if places.labels is None and is_unlabelled(data):
        return data
    with progress_once_known(f"packing {data}", resumes=True) as advance:
        options: dict[str, Any] = {"only": "val", "shorter_side": packed_side(299), "say": note, "progress": advance}
        return str(prepare(data, **vars(places), **options).only("val"))


def _document(plan: InferencePlan, speeds: Sequence[NetworkSpeed]) -> dict[str, Any]:
    """Return all figures, with what they depend on."""
    from steadytrain.export.formats import installed_versions
    from steadytrain.models.exported import engines

    packages = ("torch", "torchvision", "timm", *(name for row in engines().values() for name in row.packages))
    return {
        "format": FORMAT,
        "version": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {name: value for name, value in facts.facts().items() if name not in ("host", "system")},
        "packages": installed_versions(packages),
        "settings": plain(plan) | {"engines": sorted(" ".join(pair) for pair in plan.engines)},
        "networks": [plain(speed) for speed in speeds],
    }


def table(speeds: Sequence[NetworkSpeed], width: int) -> Iterator[str]:
    """Yield lines of at most ``width`` columns: the engines of each network, then a line for each network."""
    for index, speed in enumerate(speeds):
        yield from [""] if index else []
        yield from _network_table(speed, width)
    if len([speed for speed in speeds if speed.engines]) > 1:
        yield ""
        yield from _summary(speeds, width)


def _network_table(speed: NetworkSpeed, width: int) -> Iterator[str]:
    """Yield the engines of a network, with as many of their figures as fit, and remarks."""
    if speed.error:
        yield from wrap(f"{speed.title}: {speed.error}", width, "", "  ")
        return
    shape, where = " x ".join(map(str, speed.shape)), speed.device
    where = count(speed.threads, "thread") if where == "cpu" else where
    weights = f"weights of {speed.weights}" if speed.weights else "drawn weights"
    parameters = f"{speed.parameters / 1e6:.1f} M parameters"
    yield from wrap(f"{speed.title}: {parameters}, images {shape}, {where}, {weights}", width, "", "  ")
    if speed.measured:
        yield from _fit(_rows(speed), (0, 0, 0, 0, 1, 0, 2, 5, 3, 4, 6, 1, 2), width)
    causes: dict[str, list[str]] = {}
    largest = max((engine.batches[-1].batch_size for engine in speed.measured), default=0)
    for engine in speed.engines:
        last = engine.batches[-1].batch_size if engine.batches else largest
        if cause := engine.error or (f"more than {last} in a batch would take long" if last < largest else ""):
            causes.setdefault(cause, []).append(_label(engine))
    for cause, labels in causes.items():
        yield from wrap(f"not measured ({', '.join(labels)}): {cause}", width, "", "  ")
    if most := max((engine.parity.labelled for engine in speed.measured if engine.parity), default=0):
        text = f"top-1, top-5: right answers on {count(most, 'image')} with labels; same: those of torch in fp32"
        yield from wrap(text, width, "", "  ")


def _label(engine: EngineSpeed) -> str:
    provider = f" ({engine.provider})" if engine.provider else ""  # documents of older versions have none
    return f"{engine.engine} {engine.numbers}{provider}"


def _rows(speed: NetworkSpeed) -> list[list[str]]:
    """Format the figures of each engine below their heads."""
    from steadytrain.export.speed import BASE

    measured, base = speed.measured, speed.speed(BASE)
    base_rate = base.batches[-1].per_second if base else None
    first, last = (max(engine.batches[at].batch_size for engine in measured) for at in (0, -1))
    head = ["engine", "numbers", "on", f"p50 ms at {first}", "p99 ms", f"images/s at {last}", "times plain"]
    rows = [[*head, "memory MB", "cosine", "same top-1", "same top-5", "top-1", "top-5"]]
    for engine in measured:
        small, large, parity = engine.batches[0], engine.batches[-1], engine.parity
        row = [engine.engine, engine.numbers, engine.provider or NONE, milliseconds_text(small.p50_seconds)]
        row += [milliseconds_text(small.p99_seconds), rate(large.per_second)]
        row += [_times(large.per_second, base_rate), f"{engine.memory_bytes / 1e6:,.0f}"]
        if parity is not None:
            row += [f"{parity.cosine:.4f}", percent(parity.top1), percent(parity.top5)]
            row += [percent(parity.right1, 1), percent(parity.right5, 1)]
        rows.append(row + [NONE] * (len(rows[0]) - len(row)))
    return rows


def _fit(rows: list[list[str]], ranks: Sequence[int], width: int) -> Iterator[str]:
    """Lay a table out, without columns of no figures and the least important ones (rank 0 stays) that do not fit."""
    columns = {head: cells for head, *cells in zip(*rows, strict=True) if set(cells) != {NONE}}
    heads = dict(zip(rows[0], ranks, strict=True))
    optional = sorted((head for head in columns if heads[head]), key=lambda head: heads[head])
    hidden = hide_columns(columns, optional, width, in_order=True)
    shown = {head: cells for head, cells in columns.items() if head not in hidden}
    lines = list(zip(*([head, *cells] for head, cells in shown.items()), strict=True))
    right = [k for k, head in enumerate(shown) if head not in ("engine", "numbers", "on", "network", "fastest")]
    yield from (line[:width] for line in text_table(lines, right=right).splitlines())
    if hidden:
        text = f"left out at this width: {', '.join(hidden)} (--json or a wider terminal shows all)"
        yield from wrap(text, width, "", "  ")


def _times(value: float | None, base: float | None) -> str:
    return f"{number(value / base, 1)}x" if value and base else NONE


def _summary(speeds: Sequence[NetworkSpeed], width: int) -> Iterator[str]:
    """Yield the table of the old articles: each network without and with an optimised engine."""
    from steadytrain.export.speed import BASE, SAME

    rows = [["network", "plain ms", "best ms", "ms ratio", "plain /s", "best /s", "/s ratio", "fastest"]]
    for speed in speeds:
        base, quick, wide = speed.speed(BASE), speed.fastest(latency=True), speed.fastest(latency=False)
        if quick is not None and wide is not None:
            ms, per_second = (base.batches[0].p50_seconds, base.batches[-1].per_second) if base else (None, None)
            best_ms, best_per_second = quick.batches[0].p50_seconds, wide.batches[-1].per_second
            row = [speed.title, milliseconds_text(ms), milliseconds_text(best_ms), _times(ms, best_ms)]
            row += [rate(per_second), rate(best_per_second), _times(best_per_second, per_second)]
            rows.append([*row, "; ".join(dict.fromkeys((_label(quick), _label(wide))))])
    if rows[1:]:
        text = f"best: the fastest engine whose outputs agree (cosine {SAME} up); plain: torch without its backend"
        yield from wrap(text, width, "", "  ")
        yield from _fit(rows, (0, 2, 0, 1, 3, 0, 1, 0), width)
