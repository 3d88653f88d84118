"""``steady bench``."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from steadytrain.cli.console import print_json, progress
from steadytrain.cli.options import Device, Json, require_seconds
from steadytrain.config import CompileMode, Data, Layout, Model, Numbers, Recipe
from steadytrain.format import clean, count, rate
from steadytrain.format import size as bytes_text
from steadytrain.machine.process import given_environment, spin_where_alone

What = Literal["train"]
YesNo = Literal["yes", "no"]


def bench(
    what: What,
    /,
    *,
    model: Annotated[str, Parameter(name=("--model", "--network"))],
    batch_size: Annotated[tuple[int, ...], Parameter(name=("--batch-size", "-b"), consume_multiple=True)] = (32,),
    precision: Annotated[tuple[Numbers, ...], Parameter(name=("--precision", "--dtype"), consume_multiple=True)] = (
        "fp32",
    ),
    layout: Annotated[tuple[Layout, ...], Parameter(consume_multiple=True)] = ("channels-last",),
    compile: Annotated[tuple[CompileMode, ...], Parameter(consume_multiple=True)] = ("none",),
    graph: Annotated[tuple[YesNo, ...], Parameter(consume_multiple=True)] = ("no",),
    recompute: Annotated[
        tuple[YesNo, ...], Parameter(name=("--recompute", "--grad-checkpointing"), consume_multiple=True)
    ] = ("no",),
    size: Annotated[int, Parameter(name=("--size", "--img-size"))] = 224,
    channels: Literal[1, 3] = 3,
    classes: Annotated[int, Parameter(name=("--classes", "--num-classes"))] = 1000,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    device: Device = "auto",
    threads: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (),
    seconds: float = 3.0,
    plot: Path | None = None,
    json: Json = False,
) -> int:
    """Measure how fast a network trains here: steady train's own updates, on drawn images that are in memory.

    Every combination of the values given is measured in a process of its own: one that runs out of memory costs its
    row and no more. A row tells images per second, the seconds of an update (p50, p90, p99) and of its parts, FLOP/s of
    convolutions and matrix products, their share of what a large matrix product reaches here, and the most memory.

    Args:
        what: What to measure.
        model: timm/NAME, a built-in such as resnet20, or pkg.mod:factory.
        batch_size: One or several.
        precision: One or several.
        layout: Of images in memory: one or several.
        compile: Modes of torch.compile: one or several.
        graph: Replay updates as one graph of the GPU's kernels: yes, no or both.
        recompute: Compute activations again in the backward pass: yes, no or both.
        size: Side of the images, in pixels.
        channels: Of the images.
        classes: Of the network.
        optimizer: What updates the weights.
        threads: Compute threads on a CPU: one number or several; else one for each core.
        seconds: How long to measure each combination, at least.
        plot: Write images per second over batch sizes as an HTML page.

    Examples:
        steady bench train --model resnet20 --size 32 --batch-size 32 64 128 256
        steady bench train --model timm/resnet50 --batch-size 64 256 --precision fp32 bf16 --compile none default
    """
    require_seconds(seconds)
    each = [
        _Setting(*values)
        for values in product(batch_size, precision, layout, compile, graph, recompute, threads or (None,))
    ]
    rows: list[dict[str, Any]] = []
    if len(each) == 1 and json:
        spin_where_alone()
        from steadytrain.training.profile.bench import measure

        changes = {"optim.name": optimizer, "parallel.device": device} | each[0].changes
        recipe = Recipe(data=Data(train="drawn"), model=Model(model)).with_(changes)
        speed = measure(recipe, size=size, channels=channels, num_classes=classes, seconds=seconds, allow_import=True)
        rows.append(vars(speed) | {"of_peak": speed.of_peak})
    else:
        command = [sys.executable, "-m", "steadytrain", "bench", "train", "--json", "--model", model]
        command += ["--size", str(size), "--channels", str(channels), "--classes", str(classes)]
        command += ["--optimizer", optimizer, "--device", device, "--seconds", str(seconds)]
        with progress("measuring", len(each), unit="combinations") as advance:
            for done, setting in enumerate(each, 1):
                rows.append(_measure_in_subprocess(command, setting))
                advance(done, len(each))
    if plot is not None:
        from steadytrain.reports.charts import speeds_page

        plot.write_text(speeds_page(rows), encoding="utf-8")
    if json:
        print_json({"rows": rows})
    else:
        print("\n".join(_table(rows)))
    return 1 if all("error" in row for row in rows) else 0


class _Setting(NamedTuple):
    """What a row is about."""

    batch_size: int
    precision: str
    layout: str
    compile: str
    graph: str
    recompute: str
    threads: int | None

    @property
    def changes(self) -> dict[str, Any]:
        """What it changes in a recipe."""
        return {
            "batch_size": self.batch_size,
            "precision.name": self.precision,
            "precision.compile": self.compile,
            "precision.channels_last": self.layout == "channels-last",
            "parallel.compute_threads": self.threads,
            "parallel.graph": self.graph == "yes",
            "parallel.recompute": self.recompute == "yes",
        }

    @property
    def words(self) -> list[str]:
        """The flags that give it alone."""
        values = {name: value for name, value in self._asdict().items() if value is not None}
        return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _measure_in_subprocess(command: Sequence[str], setting: _Setting) -> dict[str, Any]:
    """Measure one combination in a process of its own; what could not be measured has an ``error``."""
    done = subprocess.run(
        [*command, *setting.words], env=given_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        row: dict[str, Any] = json_module.loads(done.stdout)["rows"][0]
    elif done.returncode == -9:
        row = {"error": "killed by the system: the memory is not enough"}
    else:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        row = {"error": lines[-1].removeprefix("steady: ") if lines else f"ended with {done.returncode}"}
    return setting._asdict() | {"graph": setting.graph == "yes", "recompute": setting.recompute == "yes"} | row


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    measured = [row for row in rows if "error" not in row]
    if measured:
        first = measured[0]
        shape = f"{first['channels']}x{first['size']}x{first['size']}"
        yield f"{first['model']}: {first['parameters']:,} parameters, images {shape}, on {first['device']}"
        peaks = {}
        for row in measured:  # on a GPU threads say nothing
            threads = f" by {count(row['threads'], 'thread')}" if row["device"] == "cpu" else ""
            peaks[f"{row['precision']}{threads}"] = row["peak_flops"]
        yield f"a large matrix product reaches {', '.join(f'{_flops(peak)} in {how}' for how, peak in peaks.items())}"
        yield ""
    yield (
        f"{'precision':<10}{'layout':<8}{'compile':<16}{'threads':<8}{'graph':<6}{'recompute':<10}{'batch':>6}{'images/s':>11}"
        f"{'ms p50':>9}{'p90':>9}{'p99':>9}{'forward':>9}{'backward':>9}{'optim.':>8}{'host':>8}"
        f"{'FLOP/s':>9}{'of peak':>8}{'memory':>9}"
    )
    for row in rows:
        yield _line(row)
    for note in dict.fromkeys(note for row in rows for note in row.get("notes", ())):
        yield f"note: {note}"
    for place in dict.fromkeys(place for row in rows for place in row.get("breaks", ())):
        yield f"Python comes between compiled pieces at {place}"


def _line(row: Mapping[str, Any]) -> str:
    from steadytrain.reports.charts import LAYOUTS

    seconds = row.get("compile_seconds")
    compile = row["compile"] + ("" if seconds is None else f" ({seconds:.0f} s)")
    layout, threads = LAYOUTS[row["layout"]], "-" if row["threads"] is None else row["threads"]
    graph, recompute = ("yes" if row[name] else "no" for name in ("graph", "recompute"))
    head = f"{row['precision']:<10}{layout:<8}{compile:<16}{threads:<8}{graph:<6}{recompute:<10}{row['batch_size']:>6}"
    if "error" in row:
        return f"{head}  {clean(row['error'])}"
    steps, parts = row["step_seconds"], row["parts"]
    times = "".join(f"{_milliseconds(steps[name]):>9}" for name in ("p50", "p90", "p99"))
    widths = {"forward": 9, "backward": 9, "optimizer": 8, "host": 8}
    times += "".join(f"{_milliseconds(parts[name]):>{width}}" for name, width in widths.items())
    flops = "-" if row["flops_per_second"] is None else _flops(row["flops_per_second"])
    share = "-" if row["of_peak"] is None else f"{row['of_peak']:.0%}"
    return f"{head}{rate(row['images_per_second']):>11}{times}{flops:>9}{share:>8}{bytes_text(row['memory_bytes']):>9}"


def _milliseconds(seconds: float) -> str:
    """Word seconds in milliseconds of three digits.

    >>> _milliseconds(0.00012345), _milliseconds(1.5)
    ('0.123', '1500')
    """
    return f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"


def _flops(rate: float) -> str:
    """Word a rate in three digits.

    >>> _flops(95.2e9), _flops(1.2e15)
    ('95.2G', '1200T')
    """
    size, unit = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / size:.0f}{unit}" if rate >= 1000 * size else f"{rate / size:.3g}{unit}"
