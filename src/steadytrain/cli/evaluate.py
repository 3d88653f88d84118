"""``steady evaluate`` and ``steady predict``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, progress, progress_once_known
from steadytrain.cli.options import Device, Json, Labels, Root, Which
from steadytrain.errors import InputError

if TYPE_CHECKING:
    pass

MAX_CLASSES = 40

Weights = Annotated[Path, Parameter(help="A run's folder, or a weights file.")]
ModelName = Annotated[str | None, Parameter(help="Name of the model, for files that do not say it.")]


def evaluate(
    place: Weights,
    data: str | None = None,
    /,
    *,
    root: Root = None,
    labels: Labels = None,
    weights: Which = "last",
    model: ModelName = None,
    batch_size: Annotated[int, Parameter(name=("--batch-size", "-b"))] = 128,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32",
    device: Device = "auto",
    threads: Annotated[int | None, Parameter(name=("--threads", "-j"))] = None,
    per_image: Path | None = None,
    json: Json = False,
) -> None:
    """Top-1, top-5 and loss on every image of a data set, with a confidence interval and per class.

    Args:
        data: A .rec, or whatever steady pack takes; else the run's own.
        batch_size: Images at a time.
        precision: Number format.
        threads: Threads of the feed.
        per_image: A CSV file to write, with a line for each image: file, shard and record, true and predicted class,
            the probability of both, loss, rank of the true class.

    Examples:
        steady evaluate runs/a
        steady evaluate runs/a --per-image predictions.csv
        steady evaluate runs/a/best.safetensors more-photos/
        steady evaluate runs/a ILSVRC2012_img_val.tar --labels ILSVRC2012_devkit_t12.tar.gz
    """
    from steadytrain.data.loader import packed_side
    from steadytrain.data.packing.prepare import prepare
    from steadytrain.data.predictions import require_writable
    from steadytrain.reports import wilson
    from steadytrain.training import evaluate as evaluate_on
    from steadytrain.training import restore

    if per_image is not None:
        require_writable(per_image)
    trained = restore(place, which=weights, model=model, device=device, numbers=precision)
    if weights == "last" and place.is_dir() and trained.path.name == "best.safetensors":
        note(f"{place} has not finished: these are its best weights so far")
    records: Path | None = None
    if data is not None:
        with progress_once_known(f"packing {data}", resumes=True) as advance:
            prepared = prepare(
                data,
                root=root,
                labels=labels,
                classes=trained.classes,
                one_class=True,
                only="val",
                shorter_side=packed_side(trained.input.size),
                say=note,
                progress=advance,
            )
        records = prepared.only("val")
    began = time.perf_counter()
    with progress("evaluating", 0) as advance:
        result = evaluate_on(
            trained, records, batch_size=batch_size, threads=threads, progress=advance, per_image=per_image
        )
    seconds, interval = time.perf_counter() - began, wilson(result.top1, result.n)
    per_class = zip(trained.classes, result.total, result.right, strict=True)
    document = {
        "n": result.n,
        "top1": result.top1,
        "top1_low": interval.low,
        "top1_high": interval.high,
        "top5": result.top5,
        "loss": result.loss,
        "seconds": seconds,
        "images_per_second": result.n / seconds,
        "classes": [
            {"class": name, "n": n, "right": right, "top1": right / n if n else None} for name, n, right in per_class
        ],
        "weights": str(trained.path),
        "model": trained.name,
    }
    if per_image is not None:
        note(f"wrote {per_image}")
    if json:
        print_json(document)
    else:
        print(_text(document))


def predict(
    place: Weights,
    /,
    *images: Path,
    top: int = 5,
    weights: Which = "last",
    model: ModelName = None,
    device: Device = "auto",
    json: Json = False,
) -> int:
    """The likeliest classes of single images; 1 if one of them could not be read.

    Args:
        images: Image files, or folders of them.
        top: Classes to show for each image.

    Examples:
        steady predict runs/a cat.jpg dog.jpg --top 3
        steady predict runs/a new-photos/ --json
    """
    if not images:
        raise InputError("name at least one image file")
    if top < 1:
        raise InputError(f"--top is {top}; it must be 1 or more")
    from steadytrain.training import predict as predict_each
    from steadytrain.training import restore

    documents = []
    for result in predict_each(restore(place, which=weights, model=model, device=device), images, top=top):
        pairs = zip(result.classes, result.probabilities, strict=True)
        classes = [{"class": name, "probability": probability} for name, probability in pairs]
        documents.append({"image": str(result.path), "classes": classes, "error": result.error})
        if not json:
            words = "  ".join(f"{row['class']} {row['probability']:.4f}" for row in classes)
            print(f"{result.path}: {result.error or words}", flush=True)
    if json:
        print_json(documents)
    return int(any(document["error"] is not None for document in documents))


def _text(document: dict[str, Any]) -> str:
    """Word an evaluation; of many classes the worst and the best are listed."""
    rows = sorted(document["classes"], key=lambda row: (row["top1"] is None, row["top1"]))
    width = max(len(row["class"]) for row in rows)
    table = []
    for row in rows:
        top1 = "-" if row["top1"] is None else f"{row['top1']:.4f}"
        table.append(f"{row['class']:{width}}  {row['n']:>6}  {row['right']:>6}  {top1}")
    if (more := len(rows) - MAX_CLASSES) > 0:
        half = MAX_CLASSES // 2
        table[half:-half] = [f"... {more} more (--json has them all)"]
    interval = f"95 % interval {document['top1_low']:.4f} to {document['top1_high']:.4f}"
    return "\n".join(
        [
            f"{document['model']}  {document['weights']}",
            f"top-1  {document['top1']:.4f}  ({interval}, n = {document['n']})",
            f"top-5  {document['top5']:.4f}",
            f"loss   {document['loss']:.4f}",
            f"{document['images_per_second']:.0f} images/s",
            "",
            f"{'class':{width}}  {'n':>6}  {'right':>6}  top-1",
            *table,
        ]
    )
