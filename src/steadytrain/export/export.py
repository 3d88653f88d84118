"""Export a trained classifier: written, described, and checked against its checkpoint before it gets its name.

A file in fp32 is kept if its logits are the checkpoint's, but for rounding. One with other numbers (``int8``, ``fp16``,
``bf16``) is kept if it is measured faster than the same file in fp32, and loses no more accuracy than allowed on the
whole validation set.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from steadytrain.data.arrays import Ints
from steadytrain.data.loader import Batch
from steadytrain.data.sources.find import require_there, source_name
from steadytrain.data.sources.select import draw_evenly
from steadytrain.data.storage.scratch import temporary_scratch
from steadytrain.errors import DataError, FailedError, InputError, ModelError, RunError, storage_error
from steadytrain.export.formats import installed_versions, write_module
from steadytrain.export.hub import model_card, timm_config
from steadytrain.export.preprocessing import add_preprocessing, check_preprocessing
from steadytrain.files import replacing
from steadytrain.format import Say, print_note
from steadytrain.models.engines.engine import KEY, KEY_OF_PIXELS, EngineFormat, StoredPrecision, require_library
from steadytrain.models.engines.torch_export import AOTINDUCTOR
from steadytrain.models.exported import (
    Description,
    engine_for,
    engines,
    is_exported,
    open_exported,
    open_module,
    suffixes,
)
from steadytrain.run import Run
from steadytrain.training import checkpoints
from steadytrain.training.build import evaluation_crop
from steadytrain.training.data import open_data
from steadytrain.training.evaluation import evaluate_module
from steadytrain.training.inference.inference import Files, open_evaluation_data
from steadytrain.training.inference.limits import Limits, limits_path, open_judge, write_limits
from steadytrain.training.inference.prior import Prior, with_prior
from steadytrain.training.inference.trained import Trained, Which, restore
from steadytrain.training.state import describe_nonfinite

WeightsKind = Literal["safetensors", "folder"]
"""Exports without an engine: the weights alone, for steadytrain, or for timm and the Hugging Face hub."""

WEIGHTS = "model.safetensors"
"""The weights in a folder as timm and the hub have them."""
CHECKED = 64
"""Images by which a file is compared with its checkpoint."""
CALIBRATED = 256
"""Images from which the scales of int8 follow."""
TOLERANCE = 1e-3
"""Largest difference of logits in fp32, as a share of the largest logit (at least 1). Engines stay below 1e-4; a wrong
operator or a lost weight gives more than a tenth."""
FASTER = 1.03
"""Times the images a second from which on a file counts as faster: turns of the same file differ by 2 %."""
TURNS, TURN_SECONDS, BATCH = 7, 0.6, 32


@dataclass(frozen=True)
class ParityRow:
    """A line of the table: the checkpoint, or a file.

    Args:
        format: ``checkpoint``, or the file's ending and numbers, such as ``onnx int8``.
        engine: that ran it.
        bytes: of the file, or files.
        images_per_second: the median of turns; None where it was not measured.
        n: images by which it was judged.
        score: top-1, or mAP of several labels, on these where they are labelled; else None.
        difference: the largest of any logit from the checkpoint's, on ``Exportation.num_compared`` of them.
        top1_agreement, top5_agreement: share of images whose likeliest class, and whose set of five likeliest classes,
            are the checkpoint's, on as many of them; of a file with other numbers those of the file in fp32, on all.
        num_classes: of a file in fp32.
    """

    format: str
    engine: str
    bytes: int
    images_per_second: float | None = None
    n: int | None = None
    score: float | None = None
    difference: float | None = None
    top1_agreement: float | None = None
    top5_agreement: float | None = None
    num_classes: int | None = None


@dataclass(frozen=True)
class Exportation:
    """The result of an export.

    Args:
        path: of the file or folder.
        is_kept: it is there; else nothing was written, and ``reason`` says why.
        images: by which it was judged, in words, such as ``64 validation images of runs/a``.
        num_compared: of how many of them logits were compared with the checkpoint's.
        tolerance: the largest difference of logits that was allowed; None for other numbers than fp32.
        rows: of the table; the last one is the file.
        reason: why it was not kept.
        levels: by which pixels may differ from the loader's, of 256, where the file preprocesses images.
    """

    path: Path
    is_kept: bool
    images: str
    num_compared: int
    tolerance: float | None
    rows: tuple[ParityRow, ...]
    reason: str = ""
    levels: float | None = None


@dataclass(frozen=True)
class CheckedSamples:
    """Images for the checks and the comparison.

    Args:
        checked: those by which logits are compared, decoded and cropped.
        read: gives all of them, in batches, as often as it is called; with the model's labels if ``is_labelled``.
        count: of all of them.
        what: they are, in words.
    """

    checked: list[Batch]
    read: Callable[[], Iterator[Batch]]
    count: int
    what: str
    is_labelled: bool

    @property
    def num_checked(self) -> int:
        """Number of images that logits are compared by."""
        return sum(map(len, self.checked))


def export_model(
    place: str | Path | Run | Trained,
    output: str | Path,
    *,
    which: Which = "best",
    model: str | None = None,
    classes: str | Path | Sequence[str] | None = None,
    numbers: StoredPrecision = "fp32",
    aot: bool = False,
    with_preprocessing: bool = False,
    device: str = "auto",
    data: str | Path | None = None,
    max_loss: float = 0.5,
    images: int | None = None,
    prior: Prior | None = None,
    say: Say = print_note,
) -> Exportation:
    """Export a run, a weights file or a pretrained model of timm.

    Args:
        place, which, model, classes: as for :func:`steadytrain.training.restore`.
        output: what to write: ``.onnx``, ``.xml`` (OpenVINO), ``.pt2`` (torch.export), ``.safetensors``, or a folder as
            timm and the Hugging Face hub have them. A file of that name is replaced.
        numbers: ``int8``, ``fp16`` or ``bf16`` instead of fp32: kept only where it is faster, and as accurate.
        aot: compile a ``.pt2`` by AOTInductor, for ``device``.
        with_preprocessing: put resizing, cropping and normalising into an ``.onnx`` in fp32, which then takes
            ``pixels``, uint8[N, H, W, 3] of any size, and gives ``probabilities`` beside ``logits``.
        device: where the network is written, checked and measured: ``auto`` (the CPU), ``cpu``, ``cuda``, ``cuda:1``. A
            :class:`Trained` is where it is already.
        data: images to check by (a folder, files, a ``.rec``), with labels where it is a data set; None: the run's
            validation data, else noise.
        max_loss: points of top-1 (or mAP) that other numbers may cost.
        images: by which other numbers are judged, drawn evenly from every class; None: all.
        prior: class frequencies that the file answers by, as of
            :func:`~steadytrain.training.inference.prior.with_prior`; None: as they are.
        say: takes a line each for what the user should know.

    Returns:
        What was measured, and whether the file was kept.

    Raises:
        InputError: a format that there is not, or numbers that it has not.
        ModelError: the network or a library for it; see :mod:`steadytrain.export.formats`.
        FailedError: the file computes something else than its checkpoint; it is removed.
        StorageError: it cannot be written.

    >>> import tempfile, timm
    >>> folder = Path(tempfile.mkdtemp())
    >>> torch.save(timm.create_model("test_resnet").state_dict(), folder / "stock.pth")
    >>> outcome = export_model(
    ...     folder / "stock.pth", folder / "net.pt2", model="timm/test_resnet", say=lambda line: None
    ... )
    >>> outcome.is_kept, outcome.images, restore(folder / "net.pt2").classes[285]
    (True, '64 images of noise', 'Egyptian cat')
    """
    path, kind = Path(output), kind_of(output, aot=aot)
    if numbers not in (kind.precisions if isinstance(kind, EngineFormat) else ("fp32",)):
        others = " or ".join(dict.fromkeys(row.suffix for row in engines().values() if numbers in row.precisions))
        raise InputError(f"{path} cannot be written in {numbers}: take {others}, or drop --{numbers}")
    if with_preprocessing and (path.suffix != ".onnx" or numbers != "fp32"):
        raise InputError(f"--with-preprocessing is for .onnx files in fp32, not for {path} in {numbers}: leave it out")
    devices = kind.devices if isinstance(kind, EngineFormat) else ()
    if devices and device != "auto" and device.partition(":")[0] not in devices:
        raise InputError(
            f"{path} is for {' or '.join(devices)}, and not for --device {device}: leave it out, or write .onnx or .pt2"
        )
    if isinstance(kind, EngineFormat):
        for package in kind.packages:  # before the network is read
            require_library(package, kind.extra)
    if not path.parent.is_dir() and kind != "folder":
        raise InputError(f"there is no folder {path.parent}: make it, or choose another")
    source = place.path if isinstance(place, Trained) else place.directory if isinstance(place, Run) else Path(place)
    if is_exported(source):
        raise ModelError(f"{source} is an exported file already: export the run or the weights that it is of")
    if isinstance(place, Trained):
        trained = place
    else:
        if device == "auto":
            device = devices[0] if devices else "cpu"
        trained = restore(place, which=which, model=model, classes=classes, precision="fp32", device=device, say=say)
    trained = trained if prior is None else with_prior(trained, prior, say=say)
    if fault := describe_nonfinite(trained.module):
        raise ModelError(
            f"{source} cannot be exported: {fault}; export other weights of the run (--weights last), or train it again"
            " with --precision fp32"
        )
    for line in trained.notes:
        say(line)
    if kind == "folder" and not trained.name.startswith("timm/"):
        raise ModelError(
            f"timm and the Hugging Face hub have no network {trained.name}: a folder for them is for networks of timm;"
            " take .onnx, .pt2 or .safetensors"
        )
    with open_samples(trained, data, CHECKED if numbers == "fp32" else images, say=say) as samples:
        judge = open_judge(trained, say=say)
        key, limits = KEY_OF_PIXELS if with_preprocessing else KEY, None if judge is None else judge.limits
        job = _Job(trained, _plain(trained.module), samples, data, limits, key)
        if not isinstance(kind, EngineFormat):
            outcome = _export_weights(job, path, kind)
        elif numbers == "fp32":
            outcome = _export_exactly(job, path, kind)
        else:
            outcome = _export_faster(job, path, kind, numbers, max_loss, say)
        place = limits_path(path / WEIGHTS if kind == "folder" else path)
        if outcome.is_kept and job.limits is not None:
            write_limits(place, job.limits)
            say(f"wrote {place}: which images are unlike the training images")
        return outcome


def kind_of(output: str | Path, *, aot: bool = False) -> EngineFormat | WeightsKind:
    """Return the engine of the file that a name asks for, or the kind of weights. Raises InputError.

    >>> kind_of("a.onnx").engine, kind_of("a.pt2", aot=True).engine, kind_of("hub/")
    ('onnxruntime', 'aotinductor', 'folder')
    """
    suffix = Path(output).suffix
    if not Path(output).name:
        raise InputError(f"-o {output} has no name: name a file, or a folder that is to be made")
    if aot and suffix != AOTINDUCTOR.suffix:
        raise InputError(f"--aot compiles a {AOTINDUCTOR.suffix} file, and -o is {output}: drop one of them")
    if suffix in ("", ".safetensors"):
        return "safetensors" if suffix else "folder"
    if not is_exported(output):
        raise InputError(
            f"-o {output} ends in {suffix}: it must end in {', '.join(suffixes())} or .safetensors, or be a folder"
        )
    return AOTINDUCTOR if aot else engine_for(output)


@dataclass(frozen=True)
class _Job:
    """An export under way: model, plain copy of its network, images to check by, their source, name of its text."""

    trained: Trained
    module: nn.Module
    samples: CheckedSamples
    data: str | Path | None
    limits: Limits | None
    key: str

    def write(self, path: Path, engine: EngineFormat, numbers: StoredPrecision) -> None:
        """Write the network, without a description."""
        input = self.trained.input
        assert input.size is not None
        example = torch.zeros(2, input.channels, input.size, input.size, device=self.trained.policy.device)
        images = partial(_calibration_images, self.trained, self.data)
        write_module(self.module, example, path, numbers, engine=engine, calibration=images)

    def open(self, path: Path, engine: EngineFormat, numbers: StoredPrecision) -> tuple[nn.Module, ParityRow]:
        """Open a file that was written, and begin its row of the table."""
        opened = open_module(path, device=str(self.trained.policy.device), precision=numbers)
        size = sum(file.stat().st_size for file in (path, *engine.more_files(path)))
        return opened.module, ParityRow(f"{engine.suffix[1:]} {numbers}", opened.engine, size)

    def describe(
        self, difference: float, numbers: StoredPrecision = "fp32", packages: Sequence[str] = ()
    ) -> Description:
        """Return the description to write into the file, with the versions of packages that made it."""
        return Description(
            **self.trained.described | {"limits": {} if self.limits is None else self.limits.document},
            model=self.trained.title,
            numbers=numbers,
            difference=difference,
            provenance=provenance(self.trained, packages),
        )

    def outcome(self, path: Path, tolerance: float, *rows: ParityRow, reason: str = "") -> Exportation:
        """Return what was measured; ``reason``: why the file is not kept."""
        return Exportation(path, not reason, self.samples.what, self.samples.num_checked, tolerance, rows, reason)


def _export_exactly(job: _Job, path: Path, engine: EngineFormat) -> Exportation:
    """Write a file in fp32; keep it if its logits are the checkpoint's, and its preprocessing, if any, the loader's."""
    trained, crop, levels = job.trained, evaluation_crop(job.trained.input), None
    with replacing(path) as part:
        job.write(part, engine, "fp32")
        row, tolerance = _compare(job, *job.open(part, engine, "fp32"), same=path)
        if job.key == KEY_OF_PIXELS:
            add_preprocessing(part, crop, trained.input, trained.temperature, is_multi_label=trained.is_multi_label)
            squares = np.concatenate([batch.images for batch in job.samples.checked])
            levels = check_preprocessing(part, trained, crop, job.module, squares, tolerance)
        _describe(job, part, engine, "fp32", row)
        if levels is None:
            open_exported(part, device=str(trained.policy.device))  # as it will be opened: description and all
    return replace(job.outcome(path, tolerance, row), levels=levels)


def _export_faster(
    job: _Job, path: Path, engine: EngineFormat, numbers: StoredPrecision, max_loss: float, say: Say
) -> Exportation:
    """Write a file with other numbers; keep it if it is faster than the same in fp32, and about as accurate."""
    with temporary_scratch() as folder:
        exact, other = folder / "exact" / path.name, folder / "other" / path.name
        modules, rows = {"checkpoint": job.module}, list[ParityRow]()
        written: tuple[tuple[StoredPrecision, Path], ...] = (("fp32", exact), (numbers, other))
        for name, file in written:
            file.parent.mkdir()
            job.write(file, engine, name)
            modules[name], row = job.open(file, engine, name)
            row, tolerance = _compare(job, modules[name], row, same=path if file is exact else None)
            rows.append(row)
        speeds = measure_speeds(modules, _checked(job)[:BATCH])
        rates = {name: median(figures) for name, figures in speeds.items()}
        rows = [replace(row, images_per_second=rates[name]) for name, row in zip(("fp32", numbers), rows, strict=True)]
        seconds = job.samples.count / rates["fp32"] + job.samples.count / rates[numbers]
        if seconds > 60:
            say(f"judging by {job.samples.count:,} images: about {seconds / 60:.0f} minutes (--images N takes fewer)")
        rows = _judge(job, rows, [modules["fp32"], modules[numbers]])
        ratio = median(b / a for a, b in zip(speeds["fp32"], speeds[numbers], strict=True))
        reason = _why_not(job, rows[0], rows[1], ratio, max_loss)
        if not reason:
            _describe(job, other, engine, numbers, rows[1])
            with replacing(path) as part:
                for file in other.parent.iterdir():
                    shutil.move(file, part.with_name(file.name))
    state_bytes = sum(value.nbytes for value in job.module.state_dict().values())
    checkpoint = ParityRow("checkpoint", "torch", state_bytes, rates["checkpoint"])
    return job.outcome(path, tolerance, checkpoint, *rows, reason=reason)


def _describe(job: _Job, path: Path, engine: EngineFormat, numbers: StoredPrecision, row: ParityRow) -> None:
    """Put the model's description into a file that was checked."""
    assert row.difference is not None
    engine.add_metadata(path, {job.key: job.describe(row.difference, numbers, engine.packages).to_json()})


def _why_not(job: _Job, exact: ParityRow, other: ParityRow, ratio: float, max_loss: float) -> str:
    """Return why a file with other numbers, so many times as fast as fp32, is not kept; empty where it is."""
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


def _export_weights(job: _Job, path: Path, kind: WeightsKind) -> Exportation:
    """Write weights with their description: a file for steadytrain, or a folder for timm and the Hugging Face hub."""
    trained, module = job.trained, job.module
    is_ours = trained.path.suffix == ".safetensors" and trained.path.is_file()
    about = {
        "model": {"name": trained.name, "options": {}},
        **(checkpoints.read_weights(trained.path)[1] if is_ours else {}),
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
    if trained.prior:
        about |= {"prior": trained.prior, "prior_shift": list(trained.prior_shift)}
    if kind == "safetensors":
        named = trained.name if ":" in trained.name and not trained.symbol else None  # a factory is imported by name
        with replacing(path) as part:
            checkpoints.write_weights(part, checkpoints.stage(module.state_dict()), about)
            again = restore(part, model=named, precision="fp32", device="cpu")
            row = ParityRow("safetensors fp32", "torch", part.stat().st_size)
            row, tolerance = _compare(job, _plain(again.module), row, same=path)
        return job.outcome(path, tolerance, row)
    if path.exists():  # is it no exported folder, or was something added to it since?
        files = {each.name for each in path.iterdir()} if path.is_dir() else {path.name}
        if files and files - {limits_path(path / WEIGHTS).name} != {"config.json", WEIGHTS, "README.md"}:
            raise InputError(
                f"{path} exists, and is no exported folder, or has more in it, which would be lost: choose another name"
            )
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        checkpoints.write_weights(part / WEIGHTS, checkpoints.stage(module.state_dict()), about)
        config = timm_config(job.describe(0.0), module, about["model"]["options"])
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        import timm

        loaded = timm.create_model(f"local-dir:{part}", pretrained=True).eval()
        row = ParityRow("folder fp32", "timm", (part / WEIGHTS).stat().st_size)
        row, tolerance = _compare(job, loaded, row, same=path)
        described = job.describe(row.difference or 0.0)
        (part / "README.md").write_text(model_card(described, _measured(trained), name=path.name), encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return job.outcome(path, tolerance, row)


# -- images ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_samples(
    trained: Trained, data: str | Path | None, most: int | None, *, say: Say = print_note
) -> Iterator[CheckedSamples]:
    """Open images to check by, at most so many, drawn evenly from every class: ``data``, validation data, or noise.

    Raises:
        DataError: ``data`` cannot be used.
    """
    opened, has_no_labels = None, data is not None and is_unlabelled(data)
    try:
        if not has_no_labels:
            opened = open_evaluation_data(trained, data, say=say)
    except DataError as error:
        if data is not None:
            say(f"without labels: {error}")
    if opened is None and data is None:
        say("no images to check by (--data FOLDER names some): noise is used")
        input, draw = trained.input, np.random.default_rng(0)
        assert input.size is not None
        pixels = draw.integers(0, 256, (CHECKED, input.size, input.size, input.channels), dtype=np.uint8)
        batch = Batch(pixels, np.zeros(CHECKED, np.int64), np.arange(CHECKED), np.arange(CHECKED))
        yield CheckedSamples([batch], lambda: iter([batch]), CHECKED, f"{CHECKED:,} images of noise", False)
        return
    with ExitStack() as stack:
        if opened is not None:
            source: Any = stack.enter_context(opened.records)
            numbers, relabel = opened.ids, opened.relabel
            what = f"images of {data}" if data is not None else f"validation images of {trained.path.parent}"
        else:
            assert data is not None
            source, numbers, relabel = stack.enter_context(Files(data)), None, lambda batch: batch
            what = f"images of {data}"

        def read(ids: Ints) -> Iterator[Batch]:
            with trained.feed(source, ids=ids, batch_size=BATCH, threads=None) as feed:
                yield from map(relabel, feed)

        chosen = draw_evenly(np.arange(len(source)) if numbers is None else numbers, source.labels, most)
        checked = list(read(draw_evenly(chosen, source.labels, CHECKED)))
        yield CheckedSamples(checked, partial(read, chosen), len(chosen), f"{len(chosen):,} {what}", opened is not None)


def is_unlabelled(data: str | Path) -> bool:
    """Return whether data are plainly images without labels: one file, or a folder without folders."""
    require_there(source_name(data))
    path = Path(data)
    is_list = path.suffix in (".rec", ".lst", ".csv", ".tsv", ".txt", ".tar", ".zip")
    return (path.is_file() and not is_list) or (path.is_dir() and not any(each.is_dir() for each in path.iterdir()))


def _calibration_images(trained: Trained, data: str | Path | None) -> list[Tensor]:
    """Load normalised images to calibrate by: the run's training images; without a run, ``data``."""
    try:
        run = Run.open(trained.path.parent)
        sets = open_data(run.data, run.recipe.model, seed=run.recipe.seed, run=run)
    except (RunError, DataError) as error:
        if data is None:
            raise DataError(f"int8 is calibrated on images, and there are none ({error}): give --data") from error
        source: Any = Files(data)
        numbers = None
    else:
        if sets.val is not None and sets.val is not sets.train:
            sets.val.close()
        source, numbers = sets.train, sets.train_ids
    with source:
        ids = draw_evenly(np.arange(len(source)) if numbers is None else numbers, source.labels, CALIBRATED)
        with trained.feed(source, ids=ids, batch_size=BATCH, threads=None) as feed:
            return [_normalised(trained, torch.from_numpy(batch.images)) for batch in feed]


def _normalised(trained: Trained, images_BHWC: Tensor) -> Tensor:
    return trained.policy.images(images_BHWC, trained.input.mean, trained.input.std).contiguous()


def _checked(job: _Job) -> Tensor:
    """Return the images that logits are compared by, normalised: float32 [n, C, H, W]."""
    return _normalised(job.trained, torch.from_numpy(np.concatenate([batch.images for batch in job.samples.checked])))


# -- judging -----------------------------------------------------------------------------------------------------------


def _compare(job: _Job, module: nn.Module, row: ParityRow, *, same: Path | None) -> tuple[ParityRow, float]:
    """Compare a file's logits with the checkpoint's, in batches of several sizes; and return what is allowed.

    ``same``: the export whose logits must be within that, or it fails (FailedError); None: they may be others.
    """
    images, sizes = _checked(job), [1, 3, *[BATCH] * (CHECKED // BATCH + 1)]
    ours, theirs = [], []
    with torch.no_grad():
        for size in sizes:
            part, images = images[:size], images[size:]
            if len(part):
                ours.append(job.module(part).float().cpu())
                theirs.append(module(part).float().cpu())
    expected, actual = torch.cat(ours), torch.cat(theirs)
    if actual.shape != expected.shape:
        raise FailedError(f"the {row.format} file gives logits {list(actual.shape)} instead of {list(expected.shape)}")
    five = min(5, expected.shape[1])
    tolerance, difference = TOLERANCE * max(1.0, float(expected.abs().max())), float((actual - expected).abs().max())
    if same is not None and not difference <= tolerance:  # of a NaN neither is true
        raise FailedError(
            f"{same} was removed: its logits differ from the checkpoint's by {difference:.3g}, and {tolerance:.3g} is"
            f" allowed; the engine ({row.engine}) computes this network wrong: take another format"
        )
    row = replace(row, n=len(actual), difference=difference, num_classes=expected.shape[1])
    return _with_agreement(row, actual.topk(five).indices, expected.topk(five).indices), tolerance


def _with_agreement(row: ParityRow, actual: Tensor, expected: Tensor) -> ParityRow:
    """Return a row that tells how often the likeliest classes, int64 [n, 5], agree."""
    return replace(
        row,
        top1_agreement=float((actual[:, 0] == expected[:, 0]).double().mean()),
        top5_agreement=float((actual.sort().values == expected.sort().values).all(1).double().mean()),
    )


class _Noting(nn.Module):
    """Wrapper of a network that records the likeliest classes of each image."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.likeliest = module, list[Tensor]()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.module(images)
        self.likeliest.append(logits.topk(min(5, logits.shape[1])).indices.cpu())
        return logits


def _judge(job: _Job, rows: Sequence[ParityRow], modules: Sequence[nn.Module]) -> list[ParityRow]:
    """Judge a file in fp32, and the same with other numbers, by all images: score, and agreement with the former."""
    trained, samples = job.trained, job.samples
    noting, scores = [_Noting(module) for module in modules], list[float | None]()
    for module in noting:
        if samples.is_labelled:
            policy, input, count = trained.policy, trained.input, samples.count
            options: dict[str, Any] = {"num_outputs": count, "is_multi_label": trained.is_multi_label}
            result = evaluate_module(module, samples.read(), policy, input, len(trained.classes), **options)
            scores.append(result.score)
            continue
        with torch.no_grad():
            for batch in samples.read():
                module(_normalised(trained, torch.from_numpy(batch.images)))
        scores.append(None)
    exact, other = (torch.cat(module.likeliest) for module in noting)
    judged = [replace(row, n=samples.count, score=score) for row, score in zip(rows, scores, strict=True)]
    return [judged[0], _with_agreement(judged[1], other, exact)]


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


def provenance(trained: Trained, packages: Sequence[str] = ()) -> dict[str, str]:
    """Return where weights come from: run, digests, the figure by which they are best, versions, date. No paths."""
    about: dict[str, str] = {}
    try:
        run = Run.open(trained.path.parent)
        about |= {"run": run.name, "recipe": run.recipe.digest}
        best = run.progress().best
        if trained.path.name == "best.safetensors" and best is not None and best.figure is not None:
            about["figure"] = best.figure
    except RunError:
        pass
    if trained.path.is_file():
        with trained.path.open("rb") as file:
            about |= {"weights": trained.path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    else:
        about["weights"] = str(trained.path)
    about |= installed_versions(("steadytrain", "torch", "timm", *packages))
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
