"""``steady evaluate`` and ``steady predict``."""

from __future__ import annotations

import csv as csv_module
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text, progress, progress_once_known, status
from steadytrain.cli.convert import read_colours
from steadytrain.cli.options import DeviceFlag, Json, PlaceOptions, SizeFlag, WhichFlag, refuse_flags
from steadytrain.cli.train import require_licence
from steadytrain.config import Model
from steadytrain.data.filenames import is_image, is_pattern
from steadytrain.errors import InputError, SteadyError, storage_errors
from steadytrain.files import near_name, replace_file, replacing
from steadytrain.format import (
    clean,
    count,
    count_images,
    num_columns,
    number,
    pad,
    percent,
    rate,
    score_name,
    tells_top5,
    text_table,
)
from steadytrain.run import Run

if TYPE_CHECKING:
    from steadytrain.data.arrays import Ints
    from steadytrain.training import Evaluation, Trained
    from steadytrain.training.inference.inference import EvaluationData, Prediction
    from steadytrain.training.inference.views import Tta

MAX_CLASSES = 40
FIGURES = ("distance", "distance_limit", "energy", "energy_limit")
"""What is written of an image by which it is unlike the training images."""
COVERAGES = (0.95, 0.9, 0.8, 0.5)
"""Shares of images, those with the surest answers, of which an evaluation says how many are right."""


NAME_COLUMNS = 24  # that a class's name is padded to where each image has a line

WeightsFlag = Annotated[
    str,
    Parameter(
        help="A run's folder, a weights or an exported file, or a pretrained model such as timm/resnet18.a1_in1k."
    ),
]
ModelName = Annotated[str | None, Parameter(help="Name of the model, for files that do not say it.")]
Size = Annotated[SizeFlag, Parameter(help="Side of the images, in pixels [default: as trained].")]
ViewsFlag = Annotated[
    Literal["flip", "five-crop", "ten-crop"] | None,
    Parameter(help="Average over views of each image (test-time augmentation)."),
]
Threshold = Annotated[
    float | None,
    Parameter(
        help="Where images may have several labels: those with a probability above it are predicted [default: 0.5].",
        validator=Number(gte=0, lt=1),
    ),
]
PriorFlag = Annotated[
    str | None,
    Parameter(
        help="Answer as if classes were as frequent as that: uniform, training (as they were there), or a JSON or CSV"
        " file of the frequency or count of each class."
    ),
]
AbstainAt = Annotated[
    float | None,
    Parameter(
        help="Say not sure of answers that are less probable than those of which so large a share is right, such as"
        " 0.95, on images that were held out (needs evaluate --limits).",
        validator=Number(gt=0, lt=1),
    ),
]
BatchSize = Annotated[int | None, Parameter(name=("--batch-size", "-b"), validator=Number(gte=1, lte=65_536))]
Threads = Annotated[int | None, Parameter(name=("--threads", "-j"))]
AcceptLicence = Annotated[
    bool, Parameter(help="Use weights whose licence forbids products and services; confirm on a terminal.")
]


def evaluate(
    run: WeightsFlag,
    data: str | None = None,
    /,
    *,
    places: PlaceOptions = PlaceOptions(),  # noqa: B008 - frozen
    weights: WhichFlag = "best",
    model: ModelName = None,
    classes: Path | None = None,
    restrict: bool = False,
    size: Size = None,
    rgb_mean: str | None = None,
    rgb_std: str | None = None,
    tta: ViewsFlag = None,
    batch_size: BatchSize = None,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None,
    device: DeviceFlag = "auto",
    threads: Threads = None,
    per_image: Path | None = None,
    threshold: Threshold = None,
    prior: PriorFlag = None,
    abstain_at: AbstainAt = None,
    calibrate: bool = False,
    limits: bool = False,
    accept_licence: AcceptLicence = False,
    json: Json = False,
) -> None:
    """Compute top-1, top-5, loss, precision, recall, F1 and calibration on a whole data set, and per class.

    The data may have fewer classes than the model: they are matched by name, by synset (n02124075) or by synonym.
    Top-1 is over all outputs of the model, unless --restrict is given. Where images may have several labels: mAP,
    precision, recall and F1 at a threshold, exact match and Hamming loss.

    Args:
        data: A .rec, or whatever steady pack takes; else the run's own.
        classes: A card (.json) or a text file with the name of each output on a line; or one with a class of the data,
            a tab and a class of the model on each line.
        restrict: Choose among the data's classes only, which is easier than among all of the model's.
        rgb_mean: Mean of the images as MXNet's tools take it, of pixels from 0 to 255, such as 123.68,116.78,103.94
            (default: as the weights say).
        rgb_std: Standard deviation, likewise; 1,1,1: pixels are not divided.
        batch_size: Images at a time (default: as in the run, else 128).
        precision: Number format (default: as in the run, else fp32).
        threads: Threads that load images.
        per_image: A CSV file to write, with a line for each image: file, shard and record, true and predicted class,
            the probability of both, loss, rank of the true class.
        calibrate: Fit a temperature, which corrects the model's probabilities, and keep it in the weights file where it
            pays: of a probe on its training images, answered out of fold, else on these images, 500 or more.
        limits: Measure which images are unlike the training images, and write that beside the weights: predict and
            serve say it.

    Examples:
        steady evaluate runs/a
        steady evaluate runs/a --per-image predictions.csv
        steady evaluate runs/a/best.safetensors more-photos/
        steady evaluate timm/resnet18.a1_in1k photos/
        steady evaluate runs/a --tta flip --size 288
        steady evaluate runs/a --calibrate
        steady evaluate runs/a --limits
        steady evaluate runs/a ILSVRC2012_img_val.tar --labels ILSVRC2012_devkit_t12.tar.gz
    """
    from steadytrain.data.results.predictions import require_writable
    from steadytrain.training import evaluate as evaluate_on
    from steadytrain.training.inference.inference import open_evaluation_data
    from steadytrain.training.inference.limits import open_judge
    from steadytrain.training.inference.trained import read_class_file
    from steadytrain.training.split import count_trained_on, group_others

    if data is None:
        nothing = "{} is about data, and none are named: name them after the run"
        refuse_flags(nothing, restrict=restrict, **vars(places))
    altered: dict[str, object] = {"restrict": restrict, "size": size, "tta": tta, "per_image": per_image}
    altered |= {"rgb_mean": rgb_mean, "rgb_std": rgb_std, "prior": prior}
    altered |= {"threshold": threshold, "abstain_at": abstain_at}
    altered |= {"batch_size": batch_size} if limits else {}
    if calibrate or limits:
        doing = "--calibrate fits a temperature to" if calibrate else "--limits measures"
        refuse_flags(f"{doing} the weights as they are, and no more: drop {{}}", **altered)
    if limits and (calibrate or data):
        raise InputError(f"--limits measures by the run's own images: drop {'--calibrate' if calibrate else data}")
    if per_image is not None:
        require_writable(per_image)
    named = None if classes is None else read_class_file(classes)
    mapping = named if isinstance(named, Mapping) else None
    names = None if isinstance(named, Mapping) else named
    trained = restore_weights(
        run, weights, model, device, prior, accepted=accept_licence, precision=precision, classes=names, size=size
    )
    trained, chosen = with_input(trained, size, tta)
    trained = _with_scaling(trained, rgb_mean, rgb_std)
    above = _threshold(trained, threshold)
    if data is None and (series := _parted_series(trained)):
        note(f"series: {series}")
    if limits:
        from steadytrain.training.features.held_out import make_limits
        from steadytrain.training.inference.heat_maps import map_mistakes

        with progress_once_known("features", resumes=True) as advance:
            made = make_limits(trained, threads=threads, progress=advance, say=note)
        with suppress(SteadyError), status("drawing what spoke for the mistakes"):  # the limits are whole without
            map_mistakes(Run.open(trained.path.parent))
        words = f"{clean(str(trained.path))}\n{made.words}"
        print_json({"weights": str(trained.path), **made.document}) if json else print_text(words)
        return
    judge = None if abstain_at is None else open_judge(trained, abstain_at, say=note)
    opened, seen = None, None
    if data is not None or not calibrate:
        with progress_once_known(f"packing {data}", resumes=True) as advance:
            options: dict[str, Any] = {"classes": mapping, "say": note, "progress": advance}
            opened = open_evaluation_data(trained, data, **vars(places), **options)
            if data is not None and (seen := count_trained_on(trained.path.parent, opened.records)):
                note(f"{seen:,} of these {len(opened.records):,} images were trained on (the same file or bytes)")
    if calibrate:
        _calibrate(trained, opened, batch_size, threads, json=json)
        return
    assert opened is not None
    if trained.calibrated_on == opened.digest:
        _flatters("the temperature was fitted", "their loss and ECE flatter it")
    if judge is not None and data is None and not trained.is_probe:
        _flatters("the least probability of a sure answer was chosen", "what is said of the answers kept flatters it")
    began = time.perf_counter()
    with progress("evaluating", 0) as advance:
        options = {"batch_size": batch_size, "threads": threads, "progress": advance, "say": note}
        result = evaluate_on(trained, opened, restrict=restrict, per_image=per_image, threshold=above, **options)
    seconds = time.perf_counter() - began
    if trained.is_multi_label:
        document = _label_figures(trained, result, above)
    else:
        groups = opened.groups
        if data is not None:
            groups = group_others(trained.path.parent, opened.records, data, **vars(places))
        document = _class_figures(trained, result, None if judge is None else judge.threshold, groups)
    document |= {
        "seconds": seconds,
        "images_per_second": result.n / seconds,
        "matched": dict(opened.matched),
        "restricted": restrict,
        "temperature": trained.temperature,
        "weights": str(trained.path),
        "model": trained.name,
        **chosen,
        **({} if data is None else {"trained_on": seen}),
    }
    if per_image is not None:
        note(f"wrote {per_image}")
    print_json(document) if json else print_text(_evaluation_text(document, trained.chosen))


def _parted_series(trained: Trained) -> str:
    """Return what the probe of a run said of series of photographs that its split may part; empty where nothing."""
    from steadytrain.events import Evaluated, ProbeProgress

    with suppress(SteadyError):
        events = takewhile(lambda event: not isinstance(event, Evaluated), Run.open(trained.path.parent).events())
        return next((event.series for event in events if isinstance(event, ProbeProgress) and event.series), "")
    return ""


def _flatters(what: str, how: str) -> None:
    note(f"{what} on these images, so {how}: name other data after the weights for figures that do not")


def _calibrate(
    trained: Trained, opened: EvaluationData | None, batch_size: int | None, threads: int | None, *, json: bool
) -> None:
    """Fit a temperature to data that were named, or to the run's own, and print what it does."""
    from steadytrain.training import calibrate

    with progress_once_known("evaluating") as advance:
        fitted = calibrate(trained, opened, batch_size=batch_size, threads=threads, progress=advance, say=note)
    document = {
        **vars(fitted),
        "score_name": score_name(trained.is_multi_label),
        "is_validation_data": opened is None and not trained.is_probe,
        "is_out_of_fold": opened is None and trained.is_probe,
        "weights": str(trained.path),
        "model": trained.name,
    }
    print_json(document) if json else print_text(_calibration_text(document, trained.chosen))


def _threshold(trained: Trained, threshold: float | None) -> float:
    """Return the threshold of labels. Raises InputError where there is one class an image."""
    if threshold is not None and not trained.is_multi_label:
        raise InputError(f"{trained.name} names one class for each image, the likeliest: drop --threshold")
    return 0.5 if threshold is None else threshold


def _class_figures(trained: Trained, result: Evaluation, least: float | None, groups: Ints | None) -> dict[str, Any]:
    """Return the figures of an evaluation where each image has one class."""
    from steadytrain.data.results.scores import class_ratio
    from steadytrain.training.metrics import calibration, class_scores, effective_n, macro

    assert result.outputs is not None
    worth = effective_n(result.outputs[:, 3] == 1, groups)
    scores, calibrated = class_scores(result), calibration(result)
    per_class = zip(trained.classes, result.total, result.right, scores, strict=True)
    return {
        "n": result.n,
        "effective_n": worth,
        **_top1_figures(result.top1, worth or result.n),
        "top5": result.top5,
        "loss": result.loss,
        **{f"macro_{name}": value for name, value in vars(macro(scores)).items()},
        "class_ratio": class_ratio(result.total),
        **calibrated.figures,
        "calibration": [vars(row) for row in calibrated.bins],
        "priors": _prior_rows(trained, result),
        **_coverage_figures(result, least, groups),
        "classes": [
            {"class": name, "n": n, "right": right, "top1": score.recall, **vars(score)}
            for name, n, right, score in per_class
        ],
    }


def _top1_figures(top1: float, n: float) -> dict[str, float]:
    from steadytrain.reports import wilson

    interval = wilson(top1, n)
    return {"top1": top1, "top1_low": interval.low, "top1_high": interval.high}


def _coverage_figures(result: Evaluation, sure_from: float | None, groups: Ints | None) -> dict[str, Any]:
    """Return how many of the surest answers are right, and of those that are sure enough."""
    from steadytrain.data.results.scores import coverage_curve
    from steadytrain.training.metrics import effective_n

    assert result.outputs is not None
    p, is_right = result.outputs[:, 1], result.outputs[:, 3] == 1
    values, n, right = coverage_curve(p, is_right)
    rows = [min(int(n.searchsorted(share * result.n)), len(n) - 1) for share in COVERAGES] if len(n) else []
    curve = [{"coverage": n[row] / result.n, "top1": right[row] / n[row]} for row in rows]
    last = -1 if sure_from is None else int((values >= sure_from).sum()) - 1
    if last < 0:
        return {"coverage": curve, "abstention": None}
    num_kept, is_kept = int(n[last]), p >= values[last]
    worth = effective_n(is_right[is_kept], None if groups is None else groups[is_kept])
    kept = {
        "threshold": sure_from,
        "coverage": num_kept / result.n,
        **_top1_figures(float(right[last] / n[last]), worth or num_kept),
    }
    return {"coverage": curve, "abstention": kept}


def _prior_rows(trained: Trained, result: Evaluation) -> list[dict[str, Any]]:
    """Return the figures by the class frequencies of the answers, then by others; nothing where there are no others."""
    if result.other is None:
        return []
    (top1, recall), names = result.other, ("training", "uniform") if not trained.prior else (trained.prior, "training")
    answered = {"prior": names[0], "top1": result.top1, "macro_recall": result.macro.recall}
    return [answered, {"prior": names[1], "top1": top1, "macro_recall": recall}]


def _label_figures(trained: Trained, result: Evaluation, threshold: float) -> dict[str, Any]:
    """Return the figures of an evaluation where an image may have several labels."""
    from steadytrain.training.metrics import calibration, label_metrics

    metrics = label_metrics(result, threshold=threshold, temperature=trained.temperature)
    calibrated = calibration(result, temperature=trained.temperature)
    return {
        "n": result.n,
        "mean_ap": metrics.mean_ap,
        "threshold": threshold,
        **{f"micro_{name}": value for name, value in vars(metrics.micro).items()},
        **{f"macro_{name}": value for name, value in vars(metrics.macro).items()},
        "exact_match": metrics.exact_match,
        "hamming_loss": metrics.hamming_loss,
        "loss": result.loss,
        **calibrated.figures,
        "calibration": [
            {("share" if key == "top1" else key): value for key, value in vars(row).items()} for row in calibrated.bins
        ],
        "labels": [{"label": name, **vars(score)} for name, score in zip(trained.classes, metrics.labels, strict=True)],
    }


def predict(
    run: WeightsFlag,
    /,
    *images: Path,
    top: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    threshold: Threshold = None,
    prior: PriorFlag = None,
    abstain_at: AbstainAt = None,
    weights: WhichFlag = "best",
    model: ModelName = None,
    classes: Path | None = None,
    size: Size = None,
    tta: ViewsFlag = None,
    batch_size: BatchSize = None,
    device: DeviceFlag = "auto",
    threads: Threads = None,
    accept_licence: AcceptLicence = False,
    csv: Path | None = None,
    explain: Path | None = None,
    json: Json = False,
) -> int:
    """Predict the classes of images, the most likely first, or their labels; exit code 1 if an image could not be read.

    Args:
        images: Image files, folders of them, patterns (quoted), .rec files; -: standard input, with a path on each
            line, or the bytes of one image.
        top: Classes to show for each image at most (default: 5; of several labels all above the threshold).
        classes: A card (.json) or a text file with the name of each output on a line, for weights without names.
        batch_size: Images at a time, fewer where memory runs out (default: up to 64, on a CPU fewer of large images).
        threads: Threads that load images.
        csv: A CSV file to write instead (-: standard output), with a line for each image: its name, what is wrong with
            it, and its classes with their probabilities, the likeliest first.
        explain: A folder for a picture of each image under a heat map of the places that spoke for its class; with
            --top 3 of each of three classes, of several labels of each that is predicted.

    Examples:
        steady predict runs/a cat.jpg dog.jpg --top 3
        steady predict runs/a new-photos/ --json
        steady predict model.onnx 'photos/*.jpg' more.rec --csv predictions.csv
        steady predict runs/a - --csv predictions.csv
        steady predict runs/a new-photos/ --explain maps/
        steady predict timm/resnet18.a1_in1k cat.jpg
        steady predict resnet18.pth --model timm/resnet18 cat.jpg
    """
    if not images:
        alone = f"{run} stands alone: name a run, weights or a model, and images after it: steady predict RUN IMAGE..."
        inside = islice(Path(run).rglob("*"), 1000)  # an image, or a folder of some
        if is_image(run) or (not Run.is_run(run) and any(is_image(file.name) for file in inside)):
            alone = f"{run} holds images, and no model was named: steady predict RUN {shlex.quote(run)}"
        raise InputError(alone)
    if csv is not None and json:
        raise InputError("--csv and --json exclude each other: drop one of them")
    from steadytrain.data.images.statistics import DeepImages
    from steadytrain.training.inference.heat_maps import MEANING
    from steadytrain.training.inference.inference import Files
    from steadytrain.training.inference.inference import predict as predict_each
    from steadytrain.training.inference.limits import open_judge

    if explain is not None and explain.exists() and not explain.is_dir():
        raise InputError(f"--explain is {explain}, which is a file; it must be a folder, which is made if need be")
    if csv is not None and str(csv) != "-" and (csv.suffix.lower() != ".csv" or not csv.parent.is_dir()):
        raise InputError(f"--csv is {csv}; it must be a name that ends in .csv, in a folder that is there, or -")
    if images.count(Path("-")) > 1:
        raise InputError("- stands for standard input, which can be read once: name it once")
    places = [place for image in images for place in (_read_input() if str(image) == "-" else [image])]
    with Files(places) as files:
        trained = restore_weights(
            run, weights, model, device, prior, accepted=accept_licence, classes=classes, size=size
        )
        if not any(str(image) == "-" or is_pattern(str(image)) or image.exists() for image in images):
            raise InputError(f"there is no file or folder {images[0]}.{near_name(str(images[0]))}")
        trained, _ = with_input(trained, size, tta)
        above = _threshold(trained, threshold)
        is_text = csv is None and not json
        if trained.chosen and is_text:
            note(f"weights: {trained.path} ({trained.chosen})")
        if trained.temperature != 1 and is_text:
            note(f"probabilities are calibrated: temperature {trained.temperature:.4g}")
        judge = open_judge(trained, abstain_at, say=note)
        if abstain_at is not None and (series := _parted_series(trained)):
            note(f"series: {series}")
        names = max(num_columns(clean(str(files.path(number)))) for number in range(len(files))) if is_text else 0
        width = min(NAME_COLUMNS, max(num_columns(clean(name)) for name in trained.classes))
        shown = min(top or (len(trained.classes) if trained.is_multi_label else 5), len(trained.classes))
        mapped = 0 if explain is None else shown if top or trained.is_multi_label else 1
        if explain is not None:
            with storage_errors(explain):
                explain.mkdir(parents=True, exist_ok=True)
        documents: list[dict[str, Any]] = []
        num_bad, num_maps, began = 0, 0, time.perf_counter()
        options: dict[str, Any] = {"top": shown, "threshold": above, "batch_size": batch_size, "threads": threads}
        options |= {"explain": mapped, "judge": judge}
        known: tuple[str, ...] = () if judge is None else ("unlike", *FIGURES, *["sure"] * (abstain_at is not None))
        known += tuple(f"map{rank}" for rank in range(1, mapped + 1))
        with (
            _write_csv(csv, shown, known) as write,
            nullcontext() if is_text else progress("predicting", len(files)) as done,
        ):
            results = predict_each(trained, files, **options).stream
            with status("predicting") if is_text else nullcontext():  # what else is written shows its progress
                first = list(islice(results, int(is_text)))
            for number, result in enumerate(chain(first, results), start=1):
                paths = [] if explain is None else _write_maps(explain, f"{number:0{len(str(len(files)))}}", result)
                pairs = list(zip(result.classes, result.probabilities, strict=True))
                num_bad += result.error is not None
                num_maps += len(paths)
                if done is not None:
                    done(number)
                if csv is not None:
                    cells = [cell for name, probability in pairs for cell in (name, f"{probability:.6g}")]
                    cells += [""] * (2 * shown - len(cells)) if known else []
                    figures: dict[str, Any] = {} if result.judgement is None else dict(result.judgement.document)
                    figures |= {f"map{rank}": path for rank, path in enumerate(paths, start=1)}
                    limits = [_limit_cell(figures.get(name)) for name in known]
                    write([result.path, result.error or "", *cells, *limits])
                    continue
                ranked: list[dict[str, Any]] = [{"class": name, "probability": p} for name, p in pairs]
                for row, path in zip(ranked, paths, strict=False):
                    row["map"] = path
                document: dict[str, Any] = {"image": str(result.path), "classes": ranked, "error": result.error}
                document |= {} if result.judgement is None else result.judgement.document
                if json:
                    documents.append(document)
                    continue
                nothing = f"no label above {percent(above)}"
                text = _image_text(document, names, width, is_alone=len(files) == 1, nothing=nothing)
                remark = "  ".join(filter(None, ["" if result.judgement is None else result.judgement.words, *paths]))
                print_text(f"{text}  {remark}" if remark else text)
        if json:
            print_json(documents)
        if num_maps:
            note(f"wrote {count(num_maps, 'heat map')} into {explain}. {MEANING}")
        for line in DeepImages(lost=files.lost).remarks():
            note(line)
        if not is_text and (num_bad or csv is not None):
            bad = f", {num_bad:,} of which could not be read" if num_bad else ""
            speed = rate(len(files) / (time.perf_counter() - began))
            note(f"{count(len(files), 'image')}{bad}, {speed} images/s{'' if csv is None else f': wrote {csv}'}")
    return int(num_bad > 0)


def _read_input() -> list[Path | bytes]:
    """Read standard input: a path on each line, or the bytes of one image."""
    data = sys.stdin.buffer.read()
    if not data.strip():
        raise InputError("standard input is empty: a path on each line is expected, or the bytes of one image")
    is_image = b"\0" in data or re.match(rb"P[1-6]\s+[#\d]", data)  # a PPM may have no zero in it
    return [data] if is_image else [Path(line) for line in os.fsdecode(data).splitlines() if line.strip()]


def _write_maps(folder: Path, number: str, result: Prediction) -> list[str]:
    """Write an image's heat maps, as ``017-cat.jpg``, ``017-cat-2.jpg`` and so on. Returns their paths."""
    stem = re.sub(r"[^\w.-]", "_", f"{number}-{result.path.name.removesuffix(result.path.suffix)}")
    stem = stem.encode()[:100].decode(errors="ignore").rstrip("-")  # file systems count bytes
    paths = [folder / f"{stem}{f'-{rank}' if rank > 1 else ''}.jpg" for rank in range(1, len(result.maps) + 1)]
    for path, picture in zip(paths, result.maps, strict=True):
        replace_file(path, picture)
    return [str(path) for path in paths]


def _limit_cell(value: float | bool | str | None) -> str:
    """Write what a model's limits say of an image, or the path of a map: nothing where that is not known."""
    if isinstance(value, str):
        return value
    return "" if value is None else ("yes" if value else "no") if isinstance(value, bool) else f"{value:.6g}"


@contextmanager
def _write_csv(
    path: Path | None, classes: int, more: Sequence[str] = ()
) -> Iterator[Callable[[Sequence[object]], object]]:
    """Give what writes a line of a CSV file, whole or not at all, or of standard output; None: nothing."""
    head = ["image", "error", *(f"{name}{k}" for k in range(1, classes + 1) for name in ("class", "probability"))]
    head += more
    if path is None:
        yield lambda row: None
        return
    if str(path) == "-":
        writer = csv_module.writer(sys.stdout, lineterminator="\n")
        writer.writerow(head)
        yield writer.writerow
        return
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv_module.writer(file, lineterminator="\n")
        writer.writerow(head)
        yield writer.writerow


def with_input(trained: Trained, size: int | None, tta: Tta | None) -> tuple[Trained, dict[str, object]]:
    """Return weights that see images at another size, or in several views; and what was chosen, for the document."""
    from steadytrain.training.inference.views import with_size, with_views

    chosen: dict[str, object] = {}
    if size is not None:
        trained, chosen["size"] = with_size(trained, size), size
        note(f"images are seen at {size} pixels")
    if tta is not None:
        trained, chosen["tta"] = with_views(trained, tta), tta
    return trained, chosen


def _with_scaling(trained: Trained, rgb_mean: str | None, rgb_std: str | None) -> Trained:
    """Return weights whose images are scaled as MXNet's tools were told."""
    if rgb_mean is None and rgb_std is None:
        return trained
    from steadytrain.models.exported import is_exported

    input, scaling = trained.input, dict[str, Any]()
    for flag, key, text, above in (("--rgb-mean", "mean", rgb_mean, -1.0), ("--rgb-std", "std", rgb_std, 0.0)):
        if (values := read_colours(flag, text, above=above)) is None:
            continue
        if is_exported(trained.path):
            raise InputError(f"{flag} is {text}, and {trained.path} scales its images itself: drop it")
        if len(values) not in (1, input.channels):
            raise InputError(f"{flag} has {len(values)} values, and the network takes {input.channels} channels")
        scaling[key] = values if len(values) == input.channels else values * input.channels
    return replace(trained, input=replace(input, **scaling))


def restore_weights(
    place: str,
    weights: Literal["best", "last"],
    model: str | None,
    device: str,
    prior: str | None = None,
    *,
    accepted: bool,
    precision: str | None = None,
    classes: Path | Sequence[str] | None = None,
    size: int | None = None,
) -> Trained:
    """Load weights, once their licence is accepted, and print what the user should know of them."""
    from steadytrain.models.exported import engine_for, is_exported
    from steadytrain.training import restore
    from steadytrain.training.inference.prior import with_prior
    from steadytrain.training.inference.trained import find_pretrained

    if (source := find_pretrained(place)) is not None:
        require_licence(Model(source.name, pretrained=True), accepted=accepted)
    if is_exported(place) and engine_for(place).read_metadata is not None:
        note(f"{place} is code, which runs as it is opened: use only files that you trust (.onnx is data alone)")
    options: dict[str, Any] = {"precision": precision, "classes": classes, "size": size, "say": note}
    with status("reading the weights"):
        trained = restore(place, which=weights, model=model, device=device, **options)
    for line in trained.notes:
        note(line)
    return trained if prior is None else with_prior(trained, prior, say=note)


def _image_text(document: Mapping[str, Any], columns: int, width: int, *, is_alone: bool, nothing: str) -> str:
    """Describe the classes of an image: of a single one below its name, else behind it, aligned with other images'."""
    name = clean(document["image"])
    if document["error"] is not None:
        error = clean(document["error"])
        return error if error.startswith(f"cannot read {name}: ") else f"{name}: {error}"
    if not document["classes"]:
        return f"{pad(name, columns)}  {nothing}"
    cells = [(percent(row["probability"], 1).rjust(7), clean(row["class"])) for row in document["classes"]]
    if is_alone:
        return "\n".join([name, *(f"  {share}  {label}" for share, label in cells)])
    return f"{pad(name, columns)}{''.join(f' {share} {pad(label, width)}' for share, label in cells)}".rstrip()


def _evaluation_text(document: Mapping[str, Any], chosen: str) -> str:
    """Describe an evaluation; of many classes or labels the worst and the best are listed, and none without images."""
    is_multi_label = "labels" in document
    noun, counts, first = ("label", ("n",), "ap") if is_multi_label else ("class", ("n", "right"), "top1")
    known = document["labels" if is_multi_label else "classes"]
    rows = sorted((row for row in known if row["n"]), key=lambda row: row[first])
    scores = {"AP": "ap"} if is_multi_label else {}
    scores |= {"recall": "recall", "precision": "precision", "F1": "f1"}
    cells = [[noun, *counts, *scores]]
    for row in rows:
        cells.append(
            [clean(row[noun]), *(str(row[key]) for key in counts), *(percent(row[key], 1) for key in scores.values())]
        )
    figures = (_label_figures_text if is_multi_label else _class_figures_text)(document, len(rows), len(known))
    is_calibrated = document["temperature"] != 1
    calibrated = f"Loss and ECE are of calibrated probabilities: temperature {document['temperature']:.4g}."
    return "\n".join(
        [
            f"{clean(document['model'])}  {clean(document['weights'])}{f' ({chosen})' if chosen else ''}",
            *figures,
            *[calibrated] * is_calibrated,
            f"{rate(document['images_per_second'])} images/s",
            "",
            *_worst_and_best(cells, least=(0, 6, 8 if is_multi_label else 6, 8, 9, 8)),
        ]
    )


def _means(document: Mapping[str, Any], kind: str) -> str:
    names = (("precision", "precision"), ("recall", "recall"), ("F1", "f1"))
    return ", ".join(f"{word} {percent(document[f'{kind}_{name}'], 1)}" for word, name in names)


def _class_figures_text(document: Mapping[str, Any], num_found: int, num_classes: int) -> Iterator[str]:
    """Yield the figures of an evaluation where each image has one class."""
    from steadytrain.data.results.scores import UNEVEN

    interval = f"{100 * document['top1_low']:.1f} to {percent(document['top1_high'], 1)}"
    images = count_images(document["n"], document["effective_n"])
    yield f"top-1  {percent(document['top1'], 1)}  (95 % interval {interval}, {images})"
    if document["class_ratio"] >= UNEVEN:
        differ = f"of sizes that differ {document['class_ratio']:.3g}-fold"
        yield f"recall {percent(document['macro_recall'], 1)}  (macro: the mean over classes, {differ})"
    if num_found < num_classes and document["restricted"]:
        yield f"       chosen among the data's {count(num_found, 'class', 'classes')}"
    elif num_found < num_classes:
        yield f"       chosen among all {num_classes:,}; the data has {num_found:,} of them"
    if tells_top5(num_classes):
        yield f"top-5  {percent(document['top5'], 1)}"
    yield f"loss   {number(document['loss'], 4)}"
    yield f"macro  {_means(document, 'macro')}  (means over classes)"
    bins = f"{len(document['calibration'])} equal-width bins of the top-1 probability"
    yield f"ECE    {percent(document['ece'], 1)}  (calibration error, {bins})"
    yield _chance_line(document)
    surest = {percent(row["coverage"]): percent(row["top1"], 1) for row in document["coverage"]}
    if surest:
        yield f"sure   right in the surest {', '.join(f'{share}: {top1}' for share, top1 in surest.items())}"
    if (kept := document["abstention"]) is not None:
        interval = f"{100 * kept['top1_low']:.1f} to {percent(kept['top1_high'], 1)}"
        words = f"kept from a probability of {percent(kept['threshold'], 1)} on: {percent(kept['coverage'], 1)}"
        yield f"       {words}, {percent(kept['top1'], 1)} of them right ({interval})"
    known = {"training": "as in training", "uniform": "equal: --prior uniform"}
    for row in document["priors"]:
        figures = f"top-1 {percent(row['top1'], 1)}, recall {percent(row['macro_recall'], 1)}"
        frequencies = known.get(row["prior"], f"of {clean(row['prior'])}")
        yield f"prior  {figures}  (class frequencies {frequencies})"


def _chance_line(document: Mapping[str, Any]) -> str:
    from steadytrain.data.results.scores import chance_words

    return f"       {chance_words(document['ece_by_chance'], document['ece_by_chance_high'], document['n'])}"


def _label_figures_text(document: Mapping[str, Any], num_found: int, num_labels: int) -> Iterator[str]:
    """Yield the figures of an evaluation where an image may have several labels."""
    few = f" of {num_labels:,}: the others have no image" if num_found < num_labels else ""
    at = f"at a threshold of {document['threshold']:g}"
    images = count(document["n"], "image")
    yield f"mAP    {percent(document['mean_ap'], 1)}  (over {count(num_found, 'label')}{few}; {images})"
    yield f"micro  {_means(document, 'micro')}  ({at})"
    yield f"macro  {_means(document, 'macro')}  (means over labels)"
    yield f"exact  {percent(document['exact_match'], 1)}  (images with every label right {at})"
    yield f"wrong  {percent(document['hamming_loss'], 1)}  (of all labels of all images: the Hamming loss)"
    yield f"loss   {number(document['loss'], 4)}"
    bins = f"{len(document['calibration'])} bins"
    yield f"ECE    {percent(document['ece'], 1)}  (calibration error of each label's probability, {bins})"
    yield _chance_line(document)


def _worst_and_best(cells: Sequence[Sequence[str]], least: Sequence[int]) -> list[str]:
    """Lay out a table, heads first; of more than :data:`MAX_CLASSES` rows the first and the last."""
    lines = text_table(cells, right=range(1, len(cells[0])), least=least).splitlines()
    if (more := len(cells) - 1 - MAX_CLASSES) > 0:
        half = MAX_CLASSES // 2
        lines[half + 1 : -half] = [f"... {more:,} more (--json has them all)"]
    return lines


def _calibration_text(document: Mapping[str, Any], chosen: str) -> str:
    """Describe what a temperature does."""
    images = f"{count(document['n'], 'training image')}, out of fold" if document["is_out_of_fold"] else ""
    fitted = f"fitted on {images or count(document['n'], 'image')}, kept with the weights"
    if document["left"]:
        fitted = f"left at 1, because {document['left']}"
    halves = " and ".join(f"{value:.4g}" for value in document["halves"])
    score = percent(document["score"], 1)
    cells = [
        ["", "before", "after"],
        ["NLL", number(document["nll_before"], 4), number(document["nll"], 4)],
        ["ECE", percent(document["ece_before"], 1), percent(document["ece"], 1)],
        ["by chance", percent(document["ece_by_chance_before"], 1), percent(document["ece_by_chance"], 1)],
        [document["score_name"], score, score],
    ]
    lines = [
        f"{clean(document['model'])}  {clean(document['weights'])}{f' ({chosen})' if chosen else ''}",
        f"temperature {document['temperature']:.4g}: {fitted}",
        text_table(cells, right=(1, 2), least=(5, 8, 8)),
        "After: each half of the images by the temperature fitted on the other half",
        f"({halves}). By chance: the ECE that a perfectly calibrated model shows.",
    ]
    if document["ece"] > document["ece_before"]:
        lines.append("The ECE is no smaller: a temperature makes these probabilities no truer.")
    if document["is_validation_data"]:
        lines += [
            "These images also chose the weights, which flatters both columns a little:",
            "steady evaluate RUN DATA, on images that the run has not seen, is fairer.",
        ]
    return "\n".join(lines)
