"""``steady evaluate`` and ``steady predict``."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text, progress, progress_once_known
from steadytrain.cli.options import Device, Json, Labels, Root, Which, require_range
from steadytrain.cli.train import require_licence
from steadytrain.config import Model
from steadytrain.errors import InputError
from steadytrain.format import clean, count, number, percent, rate, tells_top5

if TYPE_CHECKING:
    from steadytrain.training import Trained

MAX_CLASSES = 40
TELLING_GAP = 0.02
"""Between the mean top-1 probability and the accuracy, where it is also outside the accuracy's 95 % interval."""
NAME_COLUMNS = 24  # that a class's name is padded to where each image has a line

Weights = Annotated[
    str, Parameter(help="A run's folder, a weights file, or a pretrained model such as timm/resnet18.a1_in1k.")
]
ModelName = Annotated[str | None, Parameter(help="Name of the model, for files that do not say it.")]
Size = Annotated[
    str | None,
    Parameter(
        name=("--size", "--img-size"),
        help="Side of the images, in pixels; fixres: where objects look as large as in training [default: as trained].",
    ),
]
Views = Annotated[
    str | None,
    Parameter(help="Average over views of each image: flip, five-crop or ten-crop (test-time augmentation)."),
]
AcceptLicence = Annotated[
    bool, Parameter(help="Use weights whose licence forbids products and services; asked for on a terminal.")
]


def evaluate(
    place: Weights,
    data: str | None = None,
    /,
    *,
    root: Root = None,
    labels: Labels = None,
    weights: Which = "best",
    model: ModelName = None,
    classes: Path | None = None,
    restrict: bool = False,
    size: Size = None,
    tta: Views = None,
    batch_size: Annotated[int | None, Parameter(name=("--batch-size", "-b"))] = None,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None,
    device: Device = "auto",
    threads: Annotated[int | None, Parameter(name=("--threads", "-j"))] = None,
    per_image: Path | None = None,
    accept_licence: AcceptLicence = False,
    json: Json = False,
) -> None:
    """Top-1, top-5, loss, precision, recall, F1 and calibration on every image of a data set, and per class.

    The data may have fewer classes than the model: they are matched by name, by synset (n02124075) or by synonym.
    Top-1 is over all outputs of the model, unless --restrict is given.

    Args:
        data: A .rec, or whatever steady pack takes; else the run's own.
        classes: A card (.json) or a text with the name of each output on a line; or a text with a class of the data, a
            tab and a class of the model on each line.
        restrict: Choose among the data's classes only, which is easier than among all of the model's.
        batch_size: Images at a time (default: as in the run, else 128).
        precision: Number format (default: as in the run, else fp32).
        threads: Threads of the feed.
        per_image: A CSV file to write, with a line for each image: file, shard and record, true and predicted class,
            the probability of both, loss, rank of the true class.

    Examples:
        steady evaluate runs/a
        steady evaluate runs/a --per-image predictions.csv
        steady evaluate runs/a/best.safetensors more-photos/
        steady evaluate timm/resnet18.a1_in1k photos/
        steady evaluate runs/a --tta flip --size fixres
        steady evaluate runs/a ILSVRC2012_img_val.tar --labels ILSVRC2012_devkit_t12.tar.gz
    """
    from steadytrain.data.predictions import require_writable
    from steadytrain.reports import wilson
    from steadytrain.training import evaluate as evaluate_on
    from steadytrain.training.inference import open_evaluation_data, read_class_file
    from steadytrain.training.metrics import calibration, class_scores, macro

    if per_image is not None:
        require_writable(per_image)
    named = None if classes is None else read_class_file(classes)
    mapping = named if isinstance(named, Mapping) else None
    names = None if isinstance(named, Mapping) else named
    if restrict and data is None:
        raise InputError("--restrict needs data with fewer classes than the model: name them after the run")
    trained = _restore(place, weights, model, device, accepted=accept_licence, numbers=precision, classes=names)
    trained, seen = _seen(trained, size, tta)
    with progress_once_known(f"packing {data}", resumes=True) as advance:
        options: dict[str, Any] = {"root": root, "labels": labels, "classes": mapping, "progress": advance}
        opened = open_evaluation_data(trained, data, say=note, **options)
    options = {"restrict": restrict, "batch_size": batch_size, "threads": threads, "per_image": per_image}
    began = time.perf_counter()
    with progress("evaluating", 0) as advance:
        result = evaluate_on(trained, opened, **options, progress=advance)
    seconds, interval = time.perf_counter() - began, wilson(result.top1, result.n)
    scores, calibrated = class_scores(result), calibration(result)
    per_class = zip(trained.classes, result.total, result.right, scores, strict=True)
    document = {
        "n": result.n,
        "top1": result.top1,
        "top1_low": interval.low,
        "top1_high": interval.high,
        "top5": result.top5,
        "loss": result.loss,
        **{f"macro_{name}": value for name, value in vars(macro(scores)).items()},
        "ece": calibrated.ece,
        "confidence": calibrated.confidence,
        "calibration": [vars(row) for row in calibrated.bins],
        "seconds": seconds,
        "images_per_second": result.n / seconds,
        "classes": [
            {"class": name, "n": n, "right": right, "top1": score.recall, **vars(score)}
            for name, n, right, score in per_class
        ],
        "matched": dict(opened.matched),
        "restricted": restrict,
        "weights": str(trained.path),
        "model": trained.name,
        **seen,
    }
    if per_image is not None:
        note(f"wrote {per_image}")
    if json:
        print_json(document)
    else:
        print_text(_text(document, trained.chosen))


def predict(
    place: Weights,
    /,
    *images: Path,
    top: int | None = None,
    weights: Which = "best",
    model: ModelName = None,
    classes: Path | None = None,
    size: Size = None,
    tta: Views = None,
    device: Device = "auto",
    accept_licence: AcceptLicence = False,
    json: Json = False,
) -> int:
    """The likeliest classes of single images; 1 if one of them could not be read.

    Args:
        images: Image files, or folders of them.
        top: Classes to show for each image (default: 5; of several images as many as fit on a terminal's line).
        classes: A card (.json) or a text with the name of each output on a line, for weights without names.

    Examples:
        steady predict runs/a cat.jpg dog.jpg --top 3
        steady predict runs/a new-photos/ --json
        steady predict timm/resnet18.a1_in1k cat.jpg
        steady predict resnet18.pth --model timm/resnet18 cat.jpg
    """
    if not images:
        raise InputError("name at least one image file")
    if top is not None and top < 1:
        raise InputError(f"--top is {top}; it must be 1 or more")
    from steadytrain.training import predict as predict_each
    from steadytrain.training.inference import image_files

    files = image_files(images)
    trained = _restore(place, weights, model, device, accepted=accept_licence, classes=classes)
    trained, _ = _seen(trained, size, tta)
    if trained.chosen and not json:
        note(f"weights: {trained.path} ({trained.chosen})")
    names = max(len(clean(str(file))) for file in files)
    width = min(NAME_COLUMNS, max(len(clean(name)) for name in trained.classes))
    shown = top or 5
    if top is None and len(files) > 1 and not json and sys.stdout.isatty():
        shown = max(1, min(shown, (shutil.get_terminal_size().columns - names) // (width + 10)))
    documents = []
    for result in predict_each(trained, files, top=shown):
        pairs = zip(result.classes, result.probabilities, strict=True)
        found = [{"class": name, "probability": probability} for name, probability in pairs]
        documents.append({"image": str(result.path), "classes": found, "error": result.error})
        if not json:
            print_text(_image_text(documents[-1], names, width, is_alone=len(files) == 1))
    if json:
        print_json(documents)
    return int(any(document["error"] is not None for document in documents))


def _seen(trained: Trained, size: str | None, tta: str | None) -> tuple[Trained, dict[str, object]]:
    """Return weights that see images at another size, or in several views; and what was chosen, for the document."""
    if size is None and tta is None:
        return trained, {}
    from steadytrain.training.views import with_size, with_views

    chosen: dict[str, object] = {}
    if size is not None:
        if size != "fixres" and not size.isdigit():
            raise InputError(f"--size is {size!r}; it must be a number of pixels, or fixres")
        if size != "fixres":
            require_range("--size", int(size), 4096)
        trained = with_size(trained, "fixres" if size == "fixres" else int(size))
        chosen["size"] = trained.input.size
        note(f"images are seen at {trained.input.size} pixels")
    if tta is not None:
        trained, chosen["tta"] = with_views(trained, tta), tta
    return trained, chosen


def _restore(
    place: str,
    weights: Literal["best", "last"],
    model: str | None,
    device: str,
    *,
    accepted: bool,
    numbers: str | None = None,
    classes: Path | Sequence[str] | None = None,
) -> Trained:
    """Load weights, once their licence is accepted, and print what the user should know of them."""
    from steadytrain.training import restore
    from steadytrain.training.inference import find_pretrained

    if (name := find_pretrained(place)) is not None:
        require_licence(Model(name, pretrained=True), accepted=accepted)
    trained = restore(place, which=weights, model=model, device=device, numbers=numbers, classes=classes)
    for line in trained.notes:
        note(line)
    return trained


def _image_text(document: Mapping[str, Any], columns: int, width: int, *, is_alone: bool) -> str:
    """Word the classes of an image: of a single one below its name, else behind it, aligned with other images'."""
    name = clean(document["image"])
    if document["error"] is not None:
        return f"{name}: {clean(document['error'])}"
    cells = [(percent(row["probability"], 1).rjust(7), clean(row["class"])) for row in document["classes"]]
    if is_alone:
        return "\n".join([name, *(f"  {share}  {label}" for share, label in cells)])
    return f"{name:{columns}}{''.join(f' {share} {label:{width}}' for share, label in cells)}".rstrip()


def _text(document: Mapping[str, Any], chosen: str) -> str:
    """Word an evaluation; of many classes the worst and the best are listed, and none without images."""
    rows = sorted((row for row in document["classes"] if row["n"]), key=lambda row: row["top1"])
    outputs, names = len(document["classes"]), {row["class"]: clean(row["class"]) for row in rows}
    width = max(len(name) for name in ["class", *names.values()])
    table = [
        f"{names[row['class']]:{width}}  {row['n']:>6}  {row['right']:>6}"
        f"  {percent(row['recall'], 2):>8}  {percent(row['precision'], 2):>9}  {percent(row['f1'], 2):>8}"
        for row in rows
    ]
    if (more := len(rows) - MAX_CLASSES) > 0:
        half = MAX_CLASSES // 2
        table[half:-half] = [f"... {more} more (--json has them all)"]
    interval = f"{100 * document['top1_low']:.2f} to {percent(document['top1_high'], 2)}"
    among = f", {count(document['n'], 'image')}"
    if len(rows) < outputs:
        what = f"the data's {count(len(rows), 'class', 'classes')}" if document["restricted"] else f"all {outputs:,}"
        among += f", chosen among {what}" + ("" if document["restricted"] else f"; the data has {len(rows):,} of them")
    means = [percent(document[f"macro_{name}"], 2) for name in ("precision", "recall", "f1")]
    return "\n".join(
        [
            f"{clean(document['model'])}  {clean(document['weights'])}{f' ({chosen})' if chosen else ''}",
            f"top-1  {percent(document['top1'], 2)}  (95 % interval {interval}{among})",
            *([f"top-5  {percent(document['top5'], 2)}"] if tells_top5(outputs) else []),
            f"loss   {number(document['loss'], 4)}",
            f"macro  precision {means[0]}, recall {means[1]}, F1 {means[2]}  (means over classes)",
            f"ECE    {percent(document['ece'], 2)}  (calibration error, {len(document['calibration'])} equal-width bins"
            " of the top-1 probability)",
            *_confidence_text(document),
            f"{rate(document['images_per_second'])} images/s",
            "",
            f"{'class':{width}}  {'n':>6}  {'right':>6}  {'recall':>8}  {'precision':>9}  {'F1':>8}",
            *table,
        ]
    )


def _confidence_text(document: Mapping[str, Any]) -> list[str]:
    """Word a mean top-1 probability that is far from the accuracy, and further than chance explains."""
    confidence, top1 = document["confidence"], document["top1"]
    is_chance = document["top1_low"] <= confidence <= document["top1_high"]
    if is_chance or not abs(confidence - top1) >= TELLING_GAP:
        return []
    kind = "overconfident" if confidence > top1 else "underconfident"
    return [f"The model is {kind}: it claims {percent(confidence)} and is right {percent(top1)}."]
