"""Export a trained classifier: written, described, and checked against its checkpoint before it gets its name.

A file in fp32 is kept if its logits are the checkpoint's, but for rounding. One with other numbers (``int8``, ``fp16``,
``bf16``) is kept if it is measured faster than the same file in fp32, and loses no more accuracy than allowed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from steadytrain.data.loader import Batch
from steadytrain.data.packing.prepare import Say, print_note
from steadytrain.errors import DataError, FailedError, InputError, ModelError, RunError, storage_error
from steadytrain.export import formats
from steadytrain.export.hub import model_card, timm_config
from steadytrain.models.exported import KEY, SUFFIXES, Description, Numbers, open_exported, open_module
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.data import open_data
from steadytrain.training.evaluation import evaluate_module
from steadytrain.training.inference import (
    EvaluationData,
    Files,
    Trained,
    Which,
    open_evaluation_data,
    restore,
)

Kind = Literal["onnx", "xml", "pt2", "engine", "safetensors", "folder"]

CHECKED = 64
"""Images by which a file is compared with its checkpoint."""
JUDGED = 1000
"""Images by which the accuracy of a file with other numbers is judged, at most."""
CALIBRATED = 256
"""Images from which the scales of int8 follow."""
TOLERANCE = 1e-3
"""Largest difference of logits in fp32, as a share of the largest logit (at least 1). Engines stay below 1e-4; a wrong
operator or a lost weight gives more than a tenth."""
FASTER = 1.03
"""From how many times the images a second on a file counts as faster: turns of the same file differ by 2 %."""
TURNS, TURN_SECONDS, BATCH = 7, 0.6, 32


@dataclass(frozen=True)
class Row:
    """A line of the table: the checkpoint, or a file.

    Args:
        format: ``checkpoint``, or the file's ending and numbers, such as ``onnx int8``.
        engine: that ran it.
        bytes: of the file, or files.
        images_per_second: the median of turns; None where it was not measured.
        score: top-1, or mAP of several labels, on labelled images; None without them.
        difference: the largest of any logit from the checkpoint's.
        top1_agreement, top5_agreement: share of images whose likeliest class, and whose set of five likeliest classes,
            are the checkpoint's.
    """

    format: str
    engine: str
    bytes: int
    images_per_second: float | None = None
    score: float | None = None
    difference: float | None = None
    top1_agreement: float | None = None
    top5_agreement: float | None = None


@dataclass(frozen=True)
class Exportation:
    """What came of an export.

    Args:
        path: of the file or folder.
        is_kept: it is there; else nothing was written, and ``reason`` says why.
        images: by which it was checked, in words, such as ``64 validation images of runs/a``.
        num_compared: of how many of them logits were compared; the score is of all.
        tolerance: the largest difference of logits that was allowed; None for other numbers than fp32.
        rows: of the table; the last one is the file.
        reason: why it was not kept.
    """

    path: Path
    is_kept: bool
    images: str
    num_compared: int
    tolerance: float | None
    rows: tuple[Row, ...]
    reason: str = ""


@dataclass(frozen=True)
class Samples:
    """Images to check and judge by, decoded and cropped; ``is_labelled``: with the model's labels."""

    batches: list[Batch]
    what: str
    is_labelled: bool

    def __len__(self) -> int:
        return sum(map(len, self.batches))


def export_model(
    place: str | Path | Run | Trained,
    output: str | Path,
    *,
    which: Which = "best",
    model: str | None = None,
    classes: str | Path | Sequence[str] | None = None,
    numbers: Numbers = "fp32",
    aot: bool = False,
    data: str | Path | None = None,
    max_loss: float = 0.5,
    say: Say = print_note,
) -> Exportation:
    """Export a run, a weights file or a pretrained model of timm.

    Args:
        place, which, model, classes: as for :func:`steadytrain.training.restore`.
        output: what to write: ``.onnx``, ``.xml`` (OpenVINO), ``.pt2`` (torch.export), ``.engine`` (TensorRT),
            ``.safetensors``, or a folder as timm and the Hugging Face hub have them. A file of that name is replaced.
        numbers: ``int8``, ``fp16`` or ``bf16`` instead of fp32: kept only where it is faster, and as accurate.
        aot: compile a ``.pt2`` by AOTInductor for this processor.
        data: images to check by (a folder, files, a ``.rec``), with labels where it is a data set; None: the run's
            validation data, else noise.
        max_loss: points of top-1 (or mAP) that other numbers may cost.
        say: takes a line each for what the user should know.

    Returns:
        What was measured, and whether the file was kept.

    Raises:
        InputError: a format that there is not, or numbers that it has not.
        ModelError: the network or a library for it; see :mod:`steadytrain.export.formats`.
        FailedError: the file computes something else than its checkpoint; it is removed.
        StorageError: it cannot be written.

    >>> import timm
    >>> folder = Path(tempfile.mkdtemp())
    >>> torch.save(timm.create_model("test_resnet").state_dict(), folder / "stock.pth")
    >>> told = export_model(
    ...     folder / "stock.pth", folder / "net.pt2", model="timm/test_resnet", say=lambda line: None
    ... )
    >>> told.is_kept, told.images, restore(folder / "net.pt2").classes[285]
    (True, '64 images of noise', 'Egyptian cat')
    """
    path, kind = Path(output), kind_of(output)
    _require_numbers(path, kind, numbers, aot)
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}: make it, or choose another")
    if isinstance(place, Trained):
        trained = place
    else:
        device = "cuda" if kind == "engine" else "cpu"
        trained = restore(place, which=which, model=model, classes=classes, numbers="fp32", device=device)
    if trained.path.suffix in SUFFIXES:
        raise ModelError(f"{trained.path} is an exported file already: export the run or the weights that it is of")
    for line in trained.notes:
        say(line)
    if kind == "folder" and not trained.name.startswith("timm/"):
        raise ModelError(
            f"timm and the Hugging Face hub have no network {trained.name}: a folder for them is for networks of timm;"
            " take .onnx, .pt2 or .safetensors"
        )
    samples = open_samples(trained, data, CHECKED if numbers == "fp32" else JUDGED, say=say)
    job = _Job(trained, _plain(trained.module), samples, kind, numbers, aot)
    if kind in ("safetensors", "folder"):
        return _export_weights(job, path)
    if numbers == "fp32":
        return _export_exactly(job, path)
    return _export_faster(job, path, data, max_loss)


def kind_of(output: str | Path) -> Kind:
    """Say what is to be written by the ending of a name. Raises InputError.

    >>> kind_of("a.onnx"), kind_of("hub/")
    ('onnx', 'folder')
    """
    suffix = Path(output).suffix
    if not Path(output).name:
        raise InputError(f"-o {output} has no name: name a file, or a folder that is to be made")
    kinds: dict[str, Kind] = {".safetensors": "safetensors", "": "folder", ".onnx": "onnx", ".xml": "xml"}
    kinds |= {".pt2": "pt2", ".engine": "engine"}
    if suffix not in kinds:
        raise InputError(
            f"-o {output} ends in {suffix}: it must end in {', '.join(SUFFIXES)} or .safetensors, or be a folder"
        )
    return kinds[suffix]


@dataclass(frozen=True)
class _Job:
    """What is exported: the model, the same network laid out plainly, images, and what is to be made of it."""

    trained: Trained
    module: nn.Module
    samples: Samples
    kind: Kind
    numbers: Numbers
    aot: bool

    @property
    def example(self) -> Tensor:
        """Two images of zeros."""
        input = self.trained.input
        assert input.size is not None
        return torch.zeros(2, input.channels, input.size, input.size, device=self.trained.policy.device)

    def write(self, path: Path, numbers: Numbers, *, exact: Path | None = None, data: str | Path | None = None) -> None:
        """Write the network, without a description; ``exact``: the same file in fp32, where there is one."""
        half = formats.Half(self.module, numbers) if numbers in ("fp16", "bf16") and self.kind == "pt2" else None
        module = half or self.module
        if self.kind == "pt2":
            (formats.write_aot if self.aot else formats.write_torch_export)(module, self.example, path)
        elif self.kind == "engine":
            assert numbers != "int8"
            formats.write_tensorrt(module, self.example, path, numbers=numbers)
        elif numbers == "int8":
            self._quantize(path, data)
        elif self.kind == "xml":
            formats.write_openvino(module, self.example, path, fp16=numbers == "fp16")
        elif numbers == "fp16":
            assert exact is not None
            formats.halve_onnx(exact, path)
        else:
            formats.write_onnx(module, self.example, path)

    def _quantize(self, path: Path, data: str | Path | None) -> None:
        images = _calibration_images(self.trained, data)
        with tempfile.TemporaryDirectory() as folder:
            exact, quantized = Path(folder, "exact.onnx"), Path(folder, "quantized.onnx")
            formats.write_onnx(self.module, self.example, exact)
            formats.quantize_onnx(exact, path if self.kind == "onnx" else quantized, images)
            if self.kind == "xml":
                formats.convert_onnx_to_openvino(quantized, path)

    def open(self, path: Path, numbers: Numbers) -> tuple[nn.Module, str]:
        """Open a file that was written, and name its engine."""
        opened = open_module(path, device=str(self.trained.policy.device), numbers=numbers)
        return opened.module, opened.engine

    def describe(self, difference: float, numbers: Numbers) -> Description:
        """Return what the file is to say of itself."""
        trained = self.trained
        return Description(
            model=trained.name,
            input=trained.input,
            classes=trained.classes,
            synsets=trained.synsets,
            is_multi_label=trained.is_multi_label,
            temperature=trained.temperature,
            calibrated_on=trained.calibrated_on,
            licence=trained.licence,
            numbers=numbers,
            difference=difference,
            provenance=provenance(trained),
        )


def _export_exactly(job: _Job, path: Path) -> Exportation:
    """Write a file in fp32; keep it if its logits are the checkpoint's."""
    with formats.replacing(path) as part:
        job.write(part, "fp32")
        module, engine = job.open(part, "fp32")
        row, tolerance = _compare(job, module, Row(f"{job.kind} fp32", engine, _bytes(part)))
        _require_same(path, row, tolerance)
        assert row.difference is not None
        formats.add_metadata(part, {KEY: job.describe(row.difference, "fp32").to_json()})
        open_exported(part, device=str(job.trained.policy.device))  # as it will be opened: description and all
    return Exportation(path, True, job.samples.what, min(CHECKED, len(job.samples)), tolerance, (row,))


def _export_faster(job: _Job, path: Path, data: str | Path | None, max_loss: float) -> Exportation:
    """Write a file with other numbers; keep it if it is faster than the same in fp32, and about as accurate."""
    with tempfile.TemporaryDirectory() as folder:
        exact, other = Path(folder, "exact", path.name), Path(folder, "other", path.name)
        exact.parent.mkdir()
        other.parent.mkdir()
        job.write(exact, "fp32")
        job.write(other, job.numbers, exact=exact, data=data)
        opened: dict[str, tuple[nn.Module, str]] = {
            "fp32": job.open(exact, "fp32"),
            job.numbers: job.open(other, job.numbers),
        }
        modules = {"checkpoint": job.module, **{numbers: module for numbers, (module, _) in opened.items()}}
        speeds = measure_speeds(modules, _images(job, 0, BATCH))
        rows = [Row("checkpoint", "torch", _state_bytes(job.module), median(speeds["checkpoint"]))]
        tolerance = None
        for numbers, (module, engine) in opened.items():
            size = _bytes(exact if numbers == "fp32" else other)
            row = Row(f"{job.kind} {numbers}", engine, size, median(speeds[numbers]))
            row, limit = _compare(job, module, row)
            if numbers == "fp32":
                tolerance = limit
                _require_same(path, row, limit)
            rows.append(replace(row, score=_score(job, module)))
        reason = _why_not(job, rows[1], rows[2], speeds, max_loss)
        if not reason:
            assert rows[2].difference is not None
            formats.add_metadata(other, {KEY: job.describe(rows[2].difference, job.numbers).to_json()})
            with formats.replacing(path) as part:
                for file in other.parent.iterdir():
                    shutil.move(file, part.with_name(file.name))
    return Exportation(
        path, not reason, job.samples.what, min(CHECKED, len(job.samples)), tolerance, tuple(rows), reason
    )


def _why_not(job: _Job, exact: Row, other: Row, speeds: Mapping[str, list[float]], max_loss: float) -> str:
    """Say why a file with other numbers is not kept; empty where it is."""
    ratio = median(b / a for a, b in zip(speeds["fp32"], speeds[job.numbers], strict=True))
    if exact.score is not None and other.score is not None:
        lost, of = 100 * (exact.score - other.score), "mAP" if job.trained.is_multi_label else "top-1"
    else:
        assert other.top1_agreement is not None
        lost, of = 100 * (1 - other.top1_agreement), "top-1 (the share of images with another likeliest class)"
    reasons = []
    if ratio < FASTER:
        reasons.append(f"it is {ratio:.2f} times as fast as fp32 here, and {FASTER:g} times is the least")
    if lost > max_loss:
        reasons.append(f"it loses {lost:.2f} points of {of}, and {max_loss:g} are allowed (--max-loss)")
    return " and ".join(reasons)


def _export_weights(job: _Job, path: Path) -> Exportation:
    """Write weights with their description: a file for steadytrain, or a folder for timm and the Hugging Face hub."""
    trained, module = job.trained, job.module
    about = {
        "model": {"name": trained.name, "options": {}},
        **_about(trained),
        "licence": trained.licence,
        "classes": list(trained.classes),
        "synsets": list(trained.synsets),
        "multi_label": trained.is_multi_label,
        "input": vars(trained.input),
        "provenance": provenance(trained),
    }
    if trained.symbol:
        about["symbol"] = trained.symbol
    if trained.temperature != 1:
        about["calibration"] = {"temperature": trained.temperature, "data": trained.calibrated_on}
    if trained.symbol:
        about["symbol"] = trained.symbol
    if job.kind == "safetensors":
        named = trained.name if ":" in trained.name and not trained.symbol else None  # a factory is imported by name
        with formats.replacing(path) as part:
            checkpoints.write_weights(part, module.state_dict(), about)
            again = restore(part, model=named, numbers="fp32", device="cpu")
            row, tolerance = _compare(job, _plain(again.module), Row("safetensors fp32", "torch", _bytes(part)))
            _require_same(path, row, tolerance)
        return Exportation(path, True, job.samples.what, min(CHECKED, len(job.samples)), tolerance, (row,))
    _require_free(path)
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        checkpoints.write_weights(part / "model.safetensors", module.state_dict(), about)
        config = timm_config(job.describe(0.0, "fp32"), module, about["model"]["options"])
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        import timm

        loaded = timm.create_model(f"local-dir:{part}", pretrained=True).eval()
        row, tolerance = _compare(job, loaded, Row("folder fp32", "timm", _bytes(part / "model.safetensors")))
        _require_same(path, row, tolerance)
        described = job.describe(row.difference or 0.0, "fp32")
        (part / "README.md").write_text(model_card(described, _measured(trained), name=path.name), encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Exportation(path, True, job.samples.what, min(CHECKED, len(job.samples)), tolerance, (row,))


def _require_free(path: Path) -> None:
    """Refuse to replace a folder that was not exported, or that something was added to since."""
    if not path.exists():
        return
    files = {each.name for each in path.iterdir()} if path.is_dir() else {path.name}
    if files and files != {"config.json", "model.safetensors", "README.md"}:
        raise InputError(
            f"{path} exists, and is no exported folder, or has more in it, which would be lost: choose another name"
        )


def _require_numbers(path: Path, kind: Kind, numbers: Numbers, aot: bool) -> None:
    """Refuse numbers that a format has not. Raises InputError."""
    if aot and kind != "pt2":
        raise InputError(f"--aot compiles a .pt2 file, and -o is {path}: drop one of them")
    has: dict[Kind, tuple[Numbers, ...]] = {
        "onnx": ("fp32", "fp16", "int8"),
        "xml": ("fp32", "fp16", "bf16", "int8"),
        "pt2": ("fp32", "fp16", "bf16"),
        "engine": ("fp32", "fp16", "bf16"),
    }
    if numbers not in has.get(kind, ("fp32",)):
        others = " or ".join(f".{other}" for other, all_ in has.items() if numbers in all_)
        why = " (ONNX Runtime has no convolutions in bf16 for processors)" if kind == "onnx" else ""
        raise InputError(f"{path} cannot be written in {numbers}{why}: take {others}, or drop --{numbers}")


# -- images ------------------------------------------------------------------------------------------------------------


def open_samples(trained: Trained, data: str | Path | None, most: int, *, say: Say = print_note) -> Samples:
    """Load images to check by, at most so many, spread over the data: ``data``, the run's validation data, or noise.

    Raises:
        DataError: ``data`` cannot be used.
    """
    opened: EvaluationData | None = None
    try:
        if data is None or not _is_unlabelled(data):
            opened = open_evaluation_data(trained, data, say=say)
    except DataError as error:
        if data is not None:
            say(f"without labels: {error}")
    if opened is not None:
        with opened.records as records:
            numbers = np.arange(len(records)) if opened.ids is None else opened.ids
            chosen = _spread(numbers, most)
            batches = [opened.relabel(batch) for batch in _load(trained, records, chosen)]
            kind = "validation images of" if data is None else "images of"
            where = trained.path.parent if data is None else data
            return Samples(batches, f"{len(chosen):,} {kind} {where}", True)
    if data is not None:
        with Files(data) as files:
            chosen = _spread(np.arange(len(files)), most)
            return Samples(_load(trained, files, chosen), f"{len(chosen):,} images of {data}", False)
    say("no images to check by (--data FOLDER names some): noise is used")
    input, draw, count = trained.input, np.random.default_rng(0), min(most, CHECKED)
    assert input.size is not None
    images = draw.integers(0, 256, (count, input.size, input.size, input.channels), dtype=np.uint8)
    zeros = np.zeros(count, np.int64)
    batch = Batch(images, zeros, np.arange(count), np.arange(count))
    return Samples([batch], f"{count:,} images of noise", False)


def _is_unlabelled(data: str | Path) -> bool:
    """Whether data are plainly images without labels: one file, or a folder without folders."""
    path = Path(data)
    is_list = path.suffix in (".rec", ".lst", ".csv", ".tsv", ".txt", ".tar", ".zip")
    return (path.is_file() and not is_list) or (path.is_dir() and not any(each.is_dir() for each in path.iterdir()))


def _calibration_images(trained: Trained, data: str | Path | None) -> list[Tensor]:
    """Load normalised images to calibrate by: the run's training images; without a run, ``data``."""
    try:
        run = Run.open(trained.path.parent)
        sets = open_data(run.data, seed=run.recipe.seed)
    except (RunError, DataError) as error:
        if data is None:
            raise DataError(f"int8 is calibrated on images, and there are none ({error}): give --data") from error
        with Files(data) as files:
            batches = _load(trained, files, _spread(np.arange(len(files)), CALIBRATED))
    else:
        try:
            numbers = np.arange(len(sets.train)) if sets.train_ids is None else sets.train_ids
            batches = _load(trained, sets.train, _spread(numbers, CALIBRATED))
        finally:
            sets.close()
    return [_normalised(trained, torch.from_numpy(batch.images)) for batch in batches]


def _spread(numbers: Any, most: int) -> Any:
    """Return at most so many numbers, evenly spread."""
    return numbers if len(numbers) <= most else numbers[np.linspace(0, len(numbers) - 1, most).astype(np.int64)]


def _load(trained: Trained, source: Any, ids: Any) -> list[Batch]:
    with trained.feed(source, ids=ids, batch_size=BATCH, threads=None) as feed:
        return list(feed)


def _normalised(trained: Trained, images_BHWC: Tensor) -> Tensor:
    return trained.policy.images(images_BHWC, trained.input.mean, trained.input.std).contiguous()


def _images(job: _Job, first: int, count: int) -> Tensor:
    """Return some normalised samples, float32 [n, C, H, W]."""
    images = np.concatenate([batch.images for batch in job.samples.batches[: 1 + (first + count) // BATCH]])
    return _normalised(job.trained, torch.from_numpy(images[first : first + count]))


# -- judging -----------------------------------------------------------------------------------------------------------


def _compare(job: _Job, module: nn.Module, row: Row) -> tuple[Row, float]:
    """Compare a file's logits with the checkpoint's, in batches of several sizes; and return what is allowed."""
    ours, theirs = [], []
    sizes = [1, 3, *[BATCH] * (len(job.samples) // BATCH + 1)]
    # Without labels, how often the likeliest classes agree decides whether other numbers are kept: on all images.
    most = min(CHECKED, len(job.samples)) if job.samples.is_labelled else len(job.samples)
    first = 0
    with torch.no_grad():
        for size in sizes:
            if first >= most:
                break
            images = _images(job, first, min(size, most - first))
            first += len(images)
            ours.append(job.module(images).float().cpu())
            theirs.append(module(images).float().cpu())
    expected, found = torch.cat(ours), torch.cat(theirs)
    if found.shape != expected.shape:
        raise FailedError(f"the {row.format} file gives logits {list(found.shape)} instead of {list(expected.shape)}")
    five = min(5, expected.shape[1])
    same5 = expected.topk(five).indices.sort().values == found.topk(five).indices.sort().values
    tolerance = TOLERANCE * max(1.0, float(expected.abs().max()))
    return replace(
        row,
        difference=float((found - expected).abs().max()),
        top1_agreement=float((found.argmax(1) == expected.argmax(1)).float().mean()),
        top5_agreement=float(same5.all(1).float().mean()),
    ), tolerance


def _require_same(path: Path, row: Row, tolerance: float) -> None:
    difference = row.difference
    if difference is None or not difference <= tolerance:  # of a NaN neither is true
        raise FailedError(
            f"{path} was removed: its logits differ from the checkpoint's by {difference:.3g}, and {tolerance:.3g} is"
            f" allowed; the engine ({row.engine}) computes this network wrong: take another format"
        )


def _score(job: _Job, module: nn.Module) -> float | None:
    """Return top-1, or mAP, on the samples; None where they have no labels."""
    if not job.samples.is_labelled:
        return None
    trained = job.trained
    starts = np.cumsum([0, *map(len, job.samples.batches)])
    batches = (
        replace(batch, positions=np.arange(start, start + len(batch)))
        for start, batch in zip(starts[:-1].tolist(), job.samples.batches, strict=True)
    )
    return evaluate_module(
        module,
        batches,
        trained.policy,
        trained.input,
        len(trained.classes),
        num_outputs=len(job.samples),
        is_multi_label=trained.is_multi_label,
    ).score


def measure_speeds(modules: Mapping[str, nn.Module], images: Tensor) -> dict[str, list[float]]:
    """Measure images a second of several networks, in turns, so that whatever disturbs the machine disturbs all.

    Returns:
        By name, a figure for each turn.
    """
    rates: dict[str, list[float]] = {name: [] for name in modules}
    with torch.no_grad():
        for turn in range(TURNS + 1):
            for name, module in modules.items():
                began, passes = time.perf_counter(), 0
                while (seconds := time.perf_counter() - began) < TURN_SECONDS or not passes:
                    module(images)
                    passes += 1
                if turn:  # the first one warms up
                    rates[name].append(passes * len(images) / seconds)
    return rates


# -- facts -------------------------------------------------------------------------------------------------------------


def _plain(module: nn.Module) -> nn.Module:
    """Return a copy of a network without channels-last strides and gradients, in evaluation mode."""
    copied = copy.deepcopy(module).to(memory_format=torch.contiguous_format)
    return copied.eval().requires_grad_(False)


def _about(trained: Trained) -> dict[str, Any]:
    """Return what the header of a weights file of steadytrain's says; empty for others."""
    if trained.path.suffix != ".safetensors" or not trained.path.is_file():
        return {}
    return checkpoints.read_weights(trained.path)[1]


def provenance(trained: Trained) -> dict[str, str]:
    """Say where weights come from: run, digests of its recipe and of the weights, versions, date. No paths."""
    about: dict[str, str] = {}
    try:
        run = Run.open(trained.path.parent)
        about |= {"run": run.name, "recipe": run.recipe.digest}
    except RunError:
        pass
    if trained.path.is_file():
        with trained.path.open("rb") as file:
            about |= {"weights": trained.path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    else:
        about["weights"] = str(trained.path)
    for package in ("steadytrain", "torch", "timm", "onnx", "onnxruntime", "openvino"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            continue
    return about | {"date": datetime.now(UTC).date().isoformat()}


def _measured(trained: Trained) -> dict[str, Any]:
    """Return what the run of some weights measured: best evaluation and number of images; empty without a run."""
    try:
        progress = Run.open(trained.path.parent).progress()
    except RunError:
        return {}
    event = progress.best if trained.path.name == "best.safetensors" else progress.evaluated
    if event is None:
        return {}
    return {"n": event.n, "top1": event.top1, "top5": event.top5, "mean_ap": event.mean_ap, "epoch": event.epoch}


def _bytes(path: Path) -> int:
    """Return the size of a file, with that of the files that belong to it."""
    beside = [path.with_suffix(".bin")] if path.suffix == ".xml" else []
    return sum(file.stat().st_size for file in (path, *beside))


def _state_bytes(module: nn.Module) -> int:
    return sum(value.nbytes for value in module.state_dict().values())
