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

from steadytrain.config import CompileMode, Layout, Numbers
from steadytrain.machine.process import given_environment, spin_where_alone

What = Literal["train"]
YesNo = Literal["yes", "no"]

_SWITCHES = ("graph", "recompute")
_PART = ("forward", "backward", "optimizer", "host")


def bench(
    what: Annotated[What, Parameter(help="What to measure.")],
    /,
    *,
    model: Annotated[
        str,
        Parameter(name=("--model", "--network"), help="timm/NAME, a built-in such as resnet20, or pkg.mod:factory."),
    ],
    batch_size: Annotated[
        tuple[int, ...], Parameter(name=("--batch-size", "-b"), help="One or several.", consume_multiple=True)
    ] = (32,),
    precision: Annotated[
        tuple[Numbers, ...], Parameter(name=("--precision", "--dtype"), help="One or several.", consume_multiple=True)
    ] = ("fp32",),
    layout: Annotated[
        tuple[Layout, ...], Parameter(help="Of images in memory: one or several.", consume_multiple=True)
    ] = ("channels-last",),
    compile: Annotated[
        tuple[CompileMode, ...], Parameter(help="Modes of torch.compile: one or several.", consume_multiple=True)
    ] = ("none",),
    graph: Annotated[
        tuple[YesNo, ...],
        Parameter(help="Replay updates as one graph of the GPU's kernels: yes, no or both.", consume_multiple=True),
    ] = ("no",),
    recompute: Annotated[
        tuple[YesNo, ...],
        Parameter(
            name=("--recompute", "--grad-checkpointing"),
            help="Compute activations again in the backward pass: yes, no or both.",
            consume_multiple=True,
        ),
    ] = ("no",),
    size: Annotated[int, Parameter(name=("--size", "--img-size"), help="Side of the images, in pixels.")] = 224,
    channels: Annotated[Literal[1, 3], Parameter(help="Of the images.")] = 3,
    classes: Annotated[int, Parameter(name=("--classes", "--num-classes"), help="Of the network.")] = 1000,
    optimizer: Annotated[Literal["sgd", "adamw"], Parameter(help="What updates the weights.")] = "sgd",
    device: Annotated[str, Parameter(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[
        tuple[int, ...],
        Parameter(
            help="Compute threads on a CPU: one number or several; else one for each core.", consume_multiple=True
        ),
    ] = (),
    seconds: Annotated[float, Parameter(help="How long to measure each combination, at least.")] = 3.0,
    plot: Annotated[Path | None, Parameter(help="Write images per second over batch sizes as an HTML page.")] = None,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="", show_default=False)] = False,
) -> int:
    """Measure how fast a network trains here: steady train's own updates, on drawn images that are in memory.

    Every combination of the values given is measured in a process of its own: one that runs out of memory costs its
    row and no more. A row tells images per second, the seconds of an update (p50, p90, p99) and of its parts, FLOP/s of
    convolutions and matrix products, their share of what a large matrix product reaches here, and the most memory.

    Examples
    --------
    steady bench train --model resnet20 --size 32 --batch-size 32 64 128 256
    steady bench train --model timm/resnet50 --batch-size 64 256 --precision fp32 bf16 --compile none default
    """
    from steadytrain.errors import InputError

    if not 0 < seconds <= 3600:
        raise InputError(f"--seconds is {seconds}; it must be above 0, up to 3600")
    common = ["--model", model, "--size", str(size), "--channels", str(channels), "--classes", str(classes)]
    common += ["--optimizer", optimizer, "--device", device, "--seconds", str(seconds)]
    each = [
        _Setting(*values)
        for values in product(batch_size, precision, layout, compile, graph, recompute, threads or (None,))
    ]
    if len(each) == 1 and json:
        told = {"optim.name": optimizer, "parallel.device": device}
        rows = [_measured(model, told | each[0].changes, size, channels, classes, seconds)]
    else:
        rows = list(_rows(common, each))
    if plot is not None:
        from steadytrain.reports.charts import speeds_page

        plot.write_text(speeds_page(rows), encoding="utf-8")
    print(json_module.dumps({"rows": rows}, indent=2) if json else "\n".join(_table(rows)))
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
        told: dict[str, Any] = {"name": self.precision, "compile": self.compile}
        told["channels_last"] = self.layout == "channels-last"
        told = {f"precision.{name}": value for name, value in told.items()}
        told |= {"parallel.compute_threads": self.threads}
        told |= {f"parallel.{name}": getattr(self, name) == "yes" for name in _SWITCHES}
        return {"batch_size": self.batch_size} | told

    @property
    def words(self) -> list[str]:
        """The flags that give it alone."""
        told = {name: value for name, value in self._asdict().items() if value is not None}
        return [word for name, value in told.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _measured(
    model: str, changes: Mapping[str, Any], size: int, channels: int, num_classes: int, seconds: float
) -> dict[str, Any]:
    """A row, measured in this process."""
    spin_where_alone()
    from steadytrain.config import Data, Model, Recipe
    from steadytrain.training.profile.bench import measure

    recipe = Recipe(data=Data(train="drawn"), model=Model(model)).with_(changes)
    speed = measure(recipe, size=size, channels=channels, num_classes=num_classes, seconds=seconds, allow_import=True)
    return vars(speed) | {"of_peak": speed.of_peak}


def _rows(common: Sequence[str], each: Sequence[_Setting]) -> Iterator[dict[str, Any]]:
    """A row for each combination, from a process of its own; one that could not be measured has an ``error``."""
    from steadytrain.cli.console import progress

    with progress("measuring", len(each), unit="combinations") as advance:
        for number, setting in enumerate(each):
            command = [sys.executable, "-m", "steadytrain", "bench", "train", *common, *setting.words, "--json"]
            done = subprocess.run(command, env=given_environment(), capture_output=True, text=True, check=False)
            told = {"error": _reason(done)} if done.returncode else json_module.loads(done.stdout)["rows"][0]
            asked = {name: getattr(setting, name) == "yes" for name in _SWITCHES}
            yield setting._asdict() | asked | told
            advance(number + 1, len(each))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process has measured nothing."""
    if done.returncode == -9:
        return "killed by the system: the memory is not enough"
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1].removeprefix("steady: ") if said else f"ended with {done.returncode}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    first = next((row for row in rows if "error" not in row), None)
    if first is not None:
        shape = f"{first['channels']}x{first['size']}x{first['size']}"
        yield f"{first['model']}: {first['parameters']:,} parameters, images {shape}, on {first['device']}"
        peaks = {(row["precision"], _threads(row)): row["peak_flops"] for row in rows if "error" not in row}
        told = ", ".join(f"{_flops(peak)} in {numbers}{threads}" for (numbers, threads), peak in peaks.items())
        yield f"a large matrix product reaches {told}"
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
    from steadytrain.cli.lines import clean, size_of
    from steadytrain.format import rate
    from steadytrain.reports.charts import LAYOUTS

    made = row.get("compile_seconds")
    compile = row["compile"] + ("" if made is None else f" ({made:.0f} s)")
    layout, threads = LAYOUTS[row["layout"]], "-" if row["threads"] is None else row["threads"]
    graph, again = ("yes" if row[name] else "no" for name in _SWITCHES)
    head = f"{row['precision']:<10}{layout:<8}{compile:<16}{threads:<8}{graph:<6}{again:<10}{row['batch_size']:>6}"
    if "error" in row:
        return f"{head}  {clean(row['error'])}"
    steps, parts = row["step_seconds"], row["parts"]
    times = "".join(f"{_ms(steps[name]):>9}" for name in ("p50", "p90", "p99"))
    times += "".join(f"{_ms(parts[name]):>{width}}" for name, width in zip(_PART, (9, 9, 8, 8), strict=True))
    work = "-" if row["flops_per_second"] is None else _flops(row["flops_per_second"])
    share = "-" if row["of_peak"] is None else f"{row['of_peak']:.0%}"
    return f"{head}{rate(row['images_per_second']):>11}{times}{work:>9}{share:>8}{size_of(row['memory_bytes']):>9}"


def _threads(row: Mapping[str, Any]) -> str:
    """What of a row's threads belongs beside a rate: nothing on a GPU."""
    if row["device"] != "cpu":
        return ""
    return f" by {row['threads']} thread{'s' * (row['threads'] != 1)}"


def _ms(seconds: float) -> str:
    """Three digits of milliseconds.

    >>> _ms(0.00012345), _ms(1.5)
    ('0.123', '1500')
    """
    return f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.3g}"


def _flops(rate: float) -> str:
    """Three digits of a rate.

    >>> _flops(95.2e9), _flops(1.2e15)
    ('95.2G', '1200T')
    """
    size, unit = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / size:.0f}{unit}" if rate >= 1000 * size else f"{rate / size:.3g}{unit}"
