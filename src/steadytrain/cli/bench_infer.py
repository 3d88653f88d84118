"""``steady bench infer``."""

from __future__ import annotations

import hashlib
import json as json_module
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text, progress_once_known
from steadytrain.cli.evaluate import AcceptLicence
from steadytrain.cli.options import (
    DeviceFlag,
    Json,
    LabelColumn,
    LabelsFlag,
    PathColumn,
    Root,
    SplitColumn,
    require_data,
    require_range,
    require_seconds,
)
from steadytrain.cli.schedule import draw, require_kind
from steadytrain.cli.train import require_licence
from steadytrain.config import Model
from steadytrain.config.plain import plain
from steadytrain.errors import InputError, ModelError, storage_error, storage_errors
from steadytrain.format import NONE, count, hide_columns, number, percent, rate, text_table, wrap
from steadytrain.machine import facts
from steadytrain.machine.process import spin_where_alone

if TYPE_CHECKING:
    from steadytrain.export.speed import EngineSpeed, InferencePlan, NetworkSpeed
    from steadytrain.reports.plots import Dots

EngineName = Literal["plain", "eager", "channels-last", "compile", "onnxruntime", "openvino", "tensorrt"]
NumberFormat = Literal["fp32", "bf16", "fp16", "int8"]

MAX_WIDTH, MAX_IMAGES = 120, 4096
FORMAT = "steadytrain-inference"
"""Of what ``--save`` writes."""


def bench_infer(
    *networks: str,
    model: Annotated[tuple[str, ...], Parameter(name=("--model", "--network"), consume_multiple=1)] = (),
    engines: Annotated[tuple[EngineName, ...], Parameter(consume_multiple=1)] = (),
    batch_size: Annotated[tuple[int, ...], Parameter(name=("--batch-size", "--batch", "-b"), consume_multiple=1)] = (
        1,
        32,
    ),
    precision: Annotated[tuple[NumberFormat, ...], Parameter(name=("--precision", "--dtype"), consume_multiple=1)] = (),
    threads: int | None = None,
    device: DeviceFlag = "auto",
    data: str | None = None,
    root: Root = None,
    labels: LabelsFlag = None,
    path_column: PathColumn = None,
    label_column: LabelColumn = (),
    split_column: SplitColumn = None,
    images: int = 64,
    seconds: float = 2.0,
    minutes: float | None = None,
    plot: Path | None = None,
    save: Path | None = None,
    accept_licence: AcceptLicence = False,
    json: Json = False,
) -> int:
    """Measure how fast networks infer here, engine by engine: latency, images per second, memory, and equal outputs.

    Each engine runs in its own process, and the engines of a network take turns, so that noise affects all alike. A
    crash or a lack of memory only costs its row. Without names it measures AlexNet, VGG, Inception, ResNet, SqueezeNet,
    MobileNet, DenseNet, two SSDs, Faster R-CNN, a translation encoder and a DCGAN generator. Weights are random unless
    you name a file or a run; speed does not depend on them.

    Args:
        networks: Names of the table such as resnet50, timm/NAME, built-in nets, pkg.mod:factory, runs, weights files,
            or NAME=FILE for a network with the weights of a file.
        model: The same, behind a flag.
        engines: One or several. plain is torch without oneDNN (on a GPU: without cuDNN), eager torch as it is.
            [default: all installed ones except compile, which takes minutes]
        batch_size: The smallest shows latency, the largest throughput.
        precision: Number formats. [default: fp32, int8, and those that this processor or GPU supports in hardware]
        threads: Compute threads on a CPU. [default: one for each core]
        data: Compare outputs on these images, and score them by their labels: a folder, a .rec file, or any source that
            steady pack takes. [default: random samples]
        images: Number of images of --data to use, spread over all of it; they are held in memory.
        seconds: How long to measure each engine with each batch size.
        minutes: Start no further network after so many minutes.
        plot: Draw latency and throughput into this file: .svg or .html.
        save: Write all figures into this .json file; the same command resumes.

    Examples:
        steady bench infer resnet50 --engines eager openvino --batch-size 1 32
        steady bench infer runs/a --data photos/ --threads 2
        steady bench infer runs/a --data val.rec --images 1000
        steady bench infer --minutes 20 --save inference.json --plot inference.svg
    """
    require_seconds(seconds)
    networks += model
    for name, value, most in (("--threads", threads, 1024), *(("--batch-size", size, 65536) for size in batch_size)):
        require_range(name, value, most)
    if minutes is not None and not 0 < minutes <= 24 * 60:
        raise InputError(f"--minutes is {minutes:g}; it must be above 0 and at most {24 * 60}")
    if plot is not None:
        require_kind(plot)
    if save is not None and save.suffix.lower() != ".json":
        raise InputError(f"--save is {save}: it must end with .json")
    columns: dict[str, Any] = {"path_column": path_column, "label_column": label_column, "split_column": split_column}
    require_range("--images", images, MAX_IMAGES)
    require_data(data, "--data photos", root=root, labels=labels, **columns)
    records, labelled = (None, False) if data is None else _pack(data, root, labels, columns)
    spin_where_alone()
    for name in networks:
        _require_licence(name, accepted=accept_licence)
    from steadytrain.export.networks import NETWORKS
    from steadytrain.export.speed import bench_inference, make_plan
    from steadytrain.models.registry import find

    plan = make_plan(
        engines=engines,
        numbers=precision,
        batches=batch_size,
        threads=threads,
        device=device,
        seconds=seconds,
        records=records,
        most=images,
        labelled=labelled,
    )
    done = {} if save is None else _read(save, plan)
    for name in done:
        note(f"{name}: taken from {save}")
    speeds = list(done.values())

    def keep(speed: NetworkSpeed) -> None:
        speeds.append(speed)
        if save is not None:
            _write(save, plan, speeds)

    speeds = bench_inference(networks, plan, minutes=minutes, done=done, on_network=keep, say=note)
    if plot is not None:
        _draw(plot, speeds)
    if json:
        print_json(_document(plan, speeds))
    else:
        print_text("\n".join(table(speeds, min(shutil.get_terminal_size().columns, MAX_WIDTH))))
    is_measured = any(engine.batches for speed in speeds for engine in speed.engines)
    if not is_measured and networks and not any(Path(name).exists() or name in NETWORKS for name in networks):
        find(networks[0].partition("=")[0], allow_import=True)  # raises ModelError for the name of no network
    return int(not is_measured)


def _require_licence(name: str, *, accepted: bool) -> None:
    """Ask before weights of a non-commercial licence are fetched, and print what a licence restricts."""
    from steadytrain.export.engines import is_pretrained
    from steadytrain.models.registry import licence_note, pretrained_licence

    if not is_pretrained(name):
        return
    with suppress(ModelError):  # no such model: its row says so
        require_licence(Model(name, pretrained=True), accepted=accepted)
        if remark := licence_note(pretrained_licence(name)):
            note(f"{name}: {remark}")


def _pack(data: str, root: str | None, labels: str | None, columns: dict[str, Any]) -> tuple[Path, bool]:
    """Pack the images that outputs are compared on, unless they are packed already; False where they have no labels."""
    from steadytrain.data.loader import packed_side
    from steadytrain.data.packing.prepare import prepare

    plain_list = _list_plain_folder(data) if labels is None else None
    if plain_list is not None:
        data, root = str(plain_list), data
    with progress_once_known(f"packing {data}", resumes=True) as advance:
        options: dict[str, Any] = {"only": "val", "shorter_side": packed_side(299), "say": note, "progress": advance}
        prepared = prepare(data, root=root, labels=labels, **columns, **options)
    return prepared.only("val"), plain_list is None


def _list_plain_folder(data: str) -> Path | None:
    """List the images of a folder without folders of classes, as a ``.lst``: outputs need no labels; None: another."""
    from steadytrain.data.filenames import is_image
    from steadytrain.data.recordio.lst import format_line
    from steadytrain.data.sources.folder import read_entries
    from steadytrain.data.storage.store import is_uri, local_name
    from steadytrain.machine.facts import require_cache_folder

    if is_uri(data) or not (folder := Path(local_name(data)).resolve()).is_dir():
        return None
    folders, files = read_entries(folder)
    images = [name for name in files if is_image(name) and name.isprintable()]
    if folders or not images:
        return None
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    path = require_cache_folder() / "lists" / f"{folder.name}-{digest}.lst"
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(format_line(number, number % 2, name) for number, name in enumerate(images)))
    return path


def _document(plan: InferencePlan, speeds: Sequence[NetworkSpeed]) -> dict[str, Any]:
    """Return all figures, with what they depend on."""
    from steadytrain.export.speed import versions

    machine = {name: value for name, value in facts.facts().items() if name not in ("host", "system")}
    return {
        "format": FORMAT,
        "version": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "packages": versions(),
        "settings": _settings(plan),
        "networks": [plain(speed) for speed in speeds],
    }


def _settings(plan: InferencePlan) -> dict[str, Any]:
    return {
        "engines": sorted(" ".join(pair) for pair in plan.engines),
        "batches": list(plan.batches),
        "threads": plan.threads,
        "device": plan.device,
        "seconds": plan.seconds,
        "records": plan.records,
        **({"images": plan.most} if plan.most != 64 else {}),
    }


def _read(path: Path, plan: InferencePlan) -> dict[str, NetworkSpeed]:
    """Read what an earlier command saved, by name. Raises InputError where that was something else."""
    from steadytrain.export.speed import from_plain

    if not path.exists():
        return {}
    try:
        document = json_module.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT or document["settings"] != _settings(plan):
            raise InputError(f"{path} holds figures of other settings, or something else: name another file")
        return {values["name"]: from_plain(values) for values in document["networks"]}
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no file of steady bench infer ({error}): name another file") from error


def _write(path: Path, plan: InferencePlan, speeds: Sequence[NetworkSpeed]) -> None:
    """Save all figures, whole or not at all. Raises StorageError."""
    from steadytrain.reports.files import write

    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json_module.dumps(_document(plan, speeds), indent=2) + "\n", force=True)


def table(speeds: Sequence[NetworkSpeed], width: int) -> Iterator[str]:
    """Yield lines of at most ``width`` columns: the engines of each network, then a line for each network."""
    for index, speed in enumerate(speeds):
        yield from [""] if index else []
        yield from _network_table(speed, width)
    if len([speed for speed in speeds if speed.engines]) > 1:
        yield ""
        yield from _summary(speeds, width)


def _network_table(speed: NetworkSpeed, width: int) -> Iterator[str]:
    """Yield the engines of a network, with as many of their figures as fit."""
    if speed.error:
        yield from wrap(f"{speed.title}: {speed.error}", width, "", "  ")
        return
    content = {"images": "images", "tokens": "tokens", "noise": "code"}[speed.kind]
    shape = " x ".join(map(str, speed.shape))
    where = count(speed.threads, "thread") if speed.device == "cpu" else speed.device
    head = f"{speed.title}: {speed.parameters / 1e6:.1f} M parameters, {content} {shape}, {where}"
    head += f", weights of {speed.weights}" if speed.weights else ", drawn weights"
    yield from wrap(f"{head}; {speed.remark}" if speed.remark else head, width, "", "  ")
    measured = [engine for engine in speed.engines if engine.batches]
    left_out: list[str] = []
    if measured:
        lines, left_out = _fit(_columns(speed, measured), width)
        yield from lines
    errors: dict[str, list[str]] = {}
    for engine in speed.engines:
        if engine.error:
            errors.setdefault(engine.error, []).append(_label(engine))
    remarks = [f"not measured ({', '.join(names)}): {error}" for error, names in errors.items()]
    remarks += _smaller_batches(measured)
    scored = {engine.parity.labelled for engine in measured if engine.parity}
    if most := max(scored, default=0):
        remarks.append(
            f"top-1, top-5: right answers on {count(most, 'image')} with labels; same: those of torch in fp32"
        )
    if left_out:
        remarks.append(f"left out at this width: {', '.join(left_out)} (--json or a wider terminal shows all)")
    for remark in remarks:
        yield from wrap(remark, width, "", "  ")


def _label(engine: EngineSpeed) -> str:
    provider = f" ({engine.provider})" if engine.provider else ""  # documents of older versions have none
    return f"{engine.engine} {engine.numbers}{provider}"


def _smaller_batches(measured: Sequence[EngineSpeed]) -> list[str]:
    largest = max((engine.batches[-1].batch_size for engine in measured), default=0)
    fewer = [engine for engine in measured if engine.batches[-1].batch_size < largest]
    sizes = sorted({engine.batches[-1].batch_size for engine in fewer})
    if not fewer:
        return []
    names, batches = ", ".join(map(_label, fewer)), ", ".join(map(str, sizes))
    return [f"in batches of {batches}, because larger ones would take long: {names}"]


EngineColumns = dict[str, tuple[int, list[str]]]
"""Cells by the head of their column, with its importance: 0 always stays."""


def _columns(speed: NetworkSpeed, measured: Sequence[EngineSpeed]) -> EngineColumns:
    """Format the figures of each engine."""
    from steadytrain.export.speed import BASE

    base, sample = speed.speed(BASE), "images" if speed.kind == "images" else "samples"
    first = measured[0].batches[0].batch_size
    columns: EngineColumns = {
        "engine": (0, [engine.engine for engine in measured]),
        "numbers": (0, [engine.numbers for engine in measured]),
        "on": (0, [engine.provider or NONE for engine in measured]),
        f"p50 ms at {first}": (0, [_milliseconds(engine.batches[0].p50_seconds) for engine in measured]),
        "p99 ms": (1, [_milliseconds(engine.batches[0].p99_seconds) for engine in measured]),
    }
    sizes = sorted({size for engine in measured for size in [max(b.batch_size for b in engine.batches)]})
    columns[f"{sample}/s at {sizes[-1]}"] = (0, [rate(engine.batches[-1].per_second) for engine in measured])
    if base is not None:
        most = base.batches[-1].per_second
        times = [f"{number(engine.batches[-1].per_second / most, 1)}x" for engine in measured]
        columns["times plain"] = (2, times)
    columns["memory MB"] = (5, [f"{engine.memory_bytes / 1e6:,.0f}" for engine in measured])
    if any(engine.parity for engine in measured):
        columns["cosine"] = (3, [_of(engine, lambda p: f"{p.cosine:.4f}") for engine in measured])
    if any(engine.parity and engine.parity.top1 is not None for engine in measured):
        columns["same top-1"] = (4, [_of(engine, lambda p: percent(p.top1)) for engine in measured])
        columns["same top-5"] = (6, [_of(engine, lambda p: percent(p.top5)) for engine in measured])
    if any(engine.parity and engine.parity.labelled for engine in measured):
        columns["top-1"] = (1, [_of(engine, lambda p: percent(p.right1, 2)) for engine in measured])
        if any(engine.parity and engine.parity.right5 is not None for engine in measured):
            columns["top-5"] = (2, [_of(engine, lambda p: percent(p.right5, 2)) for engine in measured])
    return columns


def _of(engine: EngineSpeed, word: Callable[[Any], str]) -> str:
    return NONE if engine.parity is None else word(engine.parity)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"


def _fit(columns: EngineColumns, width: int) -> tuple[list[str], list[str]]:
    """Lay columns out, without the least important ones that do not fit; their heads come second."""
    optional = sorted((head for head in reversed(columns) if columns[head][0]), key=lambda head: columns[head][0])
    left_out = hide_columns({head: cells for head, (_, cells) in columns.items()}, optional, width, in_order=True)
    shown = [[head, *cells] for head, (_, cells) in columns.items() if head not in left_out]
    right = [k for k, (head, *_) in enumerate(shown) if head not in ("engine", "numbers", "on", "network", "fastest")]
    return text_table(list(zip(*shown, strict=True)), right=right).splitlines(), left_out


def _summary(speeds: Sequence[NetworkSpeed], width: int) -> Iterator[str]:
    """Yield the table of the old articles: each network without and with an optimised engine."""
    from steadytrain.export.speed import BASE, SAME

    rows = [(speed, speed.speed(BASE), speed.fastest(latency=True), speed.fastest(latency=False)) for speed in speeds]
    rows = [row for row in rows if row[2] is not None]
    if not rows:
        return
    text = (
        f"plain: torch without its optimised backend; best: the fastest engine whose outputs agree (cosine {SAME} up)"
    )
    yield from wrap(text, width, "", "  ")
    columns: EngineColumns = {"network": (0, []), "plain ms": (2, []), "best ms": (0, []), "times": (1, [])}
    columns |= {"plain /s": (3, []), "best /s": (0, []), "times ": (1, []), "fastest": (0, [])}
    for speed, base, quick, wide in rows:
        assert quick is not None and wide is not None
        ms, per = (None, None) if base is None else (base.batches[0].p50_seconds, base.batches[-1].per_second)
        best_ms, best_per = quick.batches[0].p50_seconds, wide.batches[-1].per_second
        names = _label(quick) if quick is wide else f"{_label(quick)}; {_label(wide)}"
        cells = [speed.title, _milliseconds(ms) if ms else NONE, _milliseconds(best_ms)]
        cells += [f"{number(ms / best_ms, 1)}x" if ms else NONE, rate(per), rate(best_per)]
        cells += [f"{number(best_per / per, 1)}x" if per else NONE, names]
        for (_, column), cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    lines, left_out = _fit(columns, width)
    yield from (line[:width] for line in lines)
    if left_out:
        yield from wrap(f"left out at this width: {', '.join(map(str.strip, left_out))}", width, "", "  ")


def panels(speeds: Sequence[NetworkSpeed]) -> list[Dots]:
    """Draw every engine with every network: latency at the smallest batch, samples per second at the largest."""
    from steadytrain.reports.plots import Dots

    shown = [speed for speed in speeds if any(engine.batches for engine in speed.engines)]
    labels = list(dict.fromkeys(_label(engine) for speed in shown for engine in speed.engines if engine.batches))

    def values(take: Callable[[EngineSpeed], float]) -> dict[str, list[float | None]]:
        by_network = [{_label(engine): take(engine) for engine in speed.engines if engine.batches} for speed in shown]
        return {label: [figures.get(label) for figures in by_network] for label in labels}

    names = [speed.title for speed in shown]
    latency = values(lambda engine: 1000 * engine.batches[0].p50_seconds)
    throughput = values(lambda engine: engine.batches[-1].per_second)
    sizes = {engine.batches[-1].batch_size for speed in shown for engine in speed.engines if engine.batches}
    return [
        Dots("Latency of one sample (median; left is better)", names, latency, "milliseconds"),
        Dots(f"Throughput in batches of up to {max(sizes)} (right is better)", names, throughput, "samples per second"),
    ]


def _draw(path: Path, speeds: Sequence[NetworkSpeed]) -> None:
    if not any(engine.batches for speed in speeds for engine in speed.engines):
        note(f"{path} is not written: nothing was measured")
        return
    machine = facts.facts()
    where = f"{machine['cpu']} ({machine['isa']}), {count(speeds[0].threads, 'thread')}"
    lede = f"{where}, {datetime.now(UTC):%Y-%m-%d}; plain is torch without its optimised backend"
    draw(path, panels(speeds), "Inference, engine by engine", lede, force=False)
