"""``steady bench train``: how fast a network trains on this machine."""

from __future__ import annotations

import json as json_module
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import print_json, print_text, progress
from steadytrain.cli.options import BatchSizesFlag, ClassesFlag, DeviceFlag, Json, SecondsFlag, SizeFlag
from steadytrain.config import CompileMode, Data, Layout, Model, Numbers, Recipe
from steadytrain.errors import InputError
from steadytrain.format import NONE, clean, count, hide_columns, percent, rate, text_table, wrap
from steadytrain.machine.children import cause_of_death, run_steady
from steadytrain.machine.process import spin_where_alone

YesNo = Literal["yes", "no"]


FIGURES = [
    *("images/s", "p50 ms", "memory MB", "memory GB", "of peak", "compile s", "GFLOP/s", "forward ms", "backward ms"),
    *("p99 ms", "optimizer ms", "host ms", "p90 ms"),
]
"""Columns of a row, the most important first: what a narrow terminal has no room for is left out."""


def bench(
    what: str = "train",
    /,
    *,
    model: Annotated[str | None, Parameter(name=("--model", "--network"))] = None,
    batch_size: BatchSizesFlag = (32,),
    precision: Annotated[tuple[Numbers, ...], Parameter(name=("--precision", "--dtype"), consume_multiple=1)] = (
        "fp32",
    ),
    layout: Annotated[tuple[Layout, ...], Parameter(consume_multiple=1)] = ("channels-last",),
    compile: Annotated[tuple[CompileMode, ...], Parameter(consume_multiple=1)] = ("none",),
    graph: Annotated[tuple[YesNo, ...], Parameter(consume_multiple=1)] = ("no",),
    recompute: Annotated[
        tuple[YesNo, ...], Parameter(name=("--recompute", "--grad-checkpointing"), consume_multiple=1)
    ] = ("no",),
    size: SizeFlag = None,
    channels: Literal[1, 3] = 3,
    classes: ClassesFlag = 1000,
    optimizer: str = "sgd",
    device: DeviceFlag = "auto",
    threads: Annotated[tuple[int, ...], Parameter(consume_multiple=1, validator=Number(gte=1, lte=1024))] = (),
    seconds: SecondsFlag = 3.0,
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
    width = shutil.get_terminal_size().columns
    print_json({"rows": rows}) if json else print_text("\n".join(_bench_table(rows, width)))
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
        yield from wrap(", ".join([head, *words]), width, "", "  ")
        reached = {}
        for row in measured:  # on a GPU threads say nothing
            by = f" by {count(row['threads'], 'thread')}" if row["device"] == "cpu" else ""
            reached[f"{row['precision']}{by}"] = row["peak_flops"]
        peaks = ", ".join(f"{_flops(peak)} in {how}" for how, peak in reached.items())
        yield from wrap(f"peak, measured here with a large matrix multiplication: {peaks}", width, "", "  ")
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
        yield from wrap(remark, width, "", "  ")


def _bench_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Format the figures of each row, a list for each column; units are in its head."""
    measured = [row for row in rows if "error" not in row]
    most = max((row["memory_bytes"] for row in measured), default=0)
    memory, unit = (1e9, "GB") if most >= 10e9 else (1e6, "MB")

    def column(cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return ["" if "error" in row else cell(row) for row in rows]

    def milliseconds(group: str, name: str) -> list[str]:
        return column(lambda row: milliseconds_text(row[group].get(name, 0.0)))

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
        "of peak": column(lambda row: "-" if row["of_peak"] is None else percent(row["of_peak"], 0)),
        f"memory {unit}": column(lambda row: f"{row['memory_bytes'] / memory:,.{1 if unit == 'GB' else 0}f}"),
        "compile s": compiled,
    }
    return figures if any(cell not in ("", "-") for cell in compiled) else dict(list(figures.items())[:-1])


def milliseconds_text(seconds: float | None) -> str:
    """Format seconds in milliseconds of three digits at least.

    >>> milliseconds_text(0.00012345), milliseconds_text(1.5)
    ('0.123', '1,500')
    """
    if seconds is None:
        return NONE
    return f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"


def _flops(rate: float) -> str:
    """Format floating-point operations per second in three digits.

    >>> _flops(95.2e9), _flops(1.2e15)
    ('95.2 GFLOP/s', '1200 TFLOP/s')
    """
    size, unit = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / size:.0f} {unit}FLOP/s" if rate >= 1000 * size else f"{rate / size:.3g} {unit}FLOP/s"
