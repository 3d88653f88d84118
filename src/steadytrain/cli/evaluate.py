"""``steady evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter


def evaluate(
    place: Annotated[Path, Parameter(help="A run's folder, or a weights file.")],
    data: Annotated[str | None, Parameter(help="A .rec, or whatever steady pack takes; else the run's own.")] = None,
    /,
    *,
    root: Annotated[
        str | None, Parameter(help="The folder that the paths of a .lst or a table start from (default: its own).")
    ] = None,
    labels: Annotated[str | None, Parameter(help="A file of labels for images without folders of classes.")] = None,
    weights: Annotated[Literal["last", "best"], Parameter(help="Which of a run's weights.")] = "last",
    model: Annotated[str | None, Parameter(help="Name of the model, for files that do not say it.")] = None,
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"), help="Images at a time.")] = 128,
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], Parameter(help="Number format.")] = "fp32",
    device: Annotated[str, Parameter(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int | None, Parameter(name=("--threads", "-j"), help="Threads of the feed.")] = None,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="", show_default=False)] = False,
) -> None:
    """Top-1, top-5 and loss on every image of a data set, with a confidence interval and per class.

    Examples
    --------
    steady evaluate runs/a
    steady evaluate runs/a/best.safetensors more-photos/
    steady evaluate runs/a ILSVRC2012_img_val.tar --labels ILSVRC2012_devkit_t12.tar.gz
    """
    import json as json_module
    import time

    from steadytrain.cli.console import note, progress
    from steadytrain.cli.running import packing
    from steadytrain.data.loader import packed_side
    from steadytrain.data.packing.prepare import prepare
    from steadytrain.training import evaluate as evaluate_on
    from steadytrain.training import restore

    trained = restore(place, which=weights, model=model, device=device, numbers=precision)
    if weights == "last" and place.is_dir() and trained.path.name == "best.safetensors":
        note(f"{place} has not finished: these are its best weights so far")
    where: Path | None = None
    if data is not None:
        side = packed_side(trained.input.size)
        with packing(data) as advance:
            prepared = prepare(
                data,
                root=root,
                labels=labels,
                classes=trained.classes,
                one_class=True,
                only="val",
                shorter_side=side,
                say=note,
                progress=advance,
            )
        where = prepared.only("val")
    began = time.perf_counter()
    with progress("evaluating", 0) as advance:
        told = evaluate_on(trained, where, batch_size=batch_size, threads=threads, progress=advance)
    seconds = time.perf_counter() - began
    document = _document(told, trained.classes, seconds) | {"weights": str(trained.path), "model": trained.name}
    print(json_module.dumps(document, indent=2) if json else _text(document))


def _document(told: Any, classes: tuple[str, ...], seconds: float) -> dict[str, Any]:
    from steadytrain.reports import wilson

    interval = wilson(told.top1, told.n)
    per_class = [
        {"class": name, "n": n, "right": right, "top1": right / n if n else None}
        for name, n, right in zip(classes, told.total, told.right, strict=True)
    ]
    return {
        "n": told.n,
        "top1": told.top1,
        "top1_low": interval.low,
        "top1_high": interval.high,
        "top5": told.top5,
        "loss": told.loss,
        "seconds": seconds,
        "images_per_second": told.n / seconds,
        "classes": per_class,
    }


def _text(told: dict[str, Any]) -> str:
    rows = sorted(told["classes"], key=lambda row: (row["top1"] is None, row["top1"]))
    shown = rows if len(rows) <= 40 else [*rows[:20], None, *rows[-20:]]
    width = max(len(row["class"]) for row in rows)
    interval = f"95 % interval {told['top1_low']:.4f} to {told['top1_high']:.4f}"
    lines = [
        f"{told['model']}  {told['weights']}",
        f"top-1  {told['top1']:.4f}  ({interval}, n = {told['n']})",
        f"top-5  {told['top5']:.4f}",
        f"loss   {told['loss']:.4f}",
        f"{told['images_per_second']:.0f} images/s",
        "",
        f"{'class':{width}}  {'n':>6}  {'right':>6}  top-1",
    ]
    for row in shown:
        if row is None:
            lines.append(f"... {len(rows) - 40} more (--json has them all)")
            continue
        rate = "-" if row["top1"] is None else f"{row['top1']:.4f}"
        lines.append(f"{row['class']:{width}}  {row['n']:>6}  {row['right']:>6}  {rate}")
    return "\n".join(lines)
