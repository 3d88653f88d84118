"""``steady export``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text, status
from steadytrain.cli.evaluate import AcceptLicence, ModelName, PriorFlag, WeightsFlag
from steadytrain.cli.options import DeviceFlag, Json, WhichFlag, refuse_flags
from steadytrain.cli.train import require_licence
from steadytrain.config import Model
from steadytrain.errors import InputError
from steadytrain.format import NONE, clean, number, percent, rate, text_table

if TYPE_CHECKING:
    from steadytrain.export.export import Exportation

ExportNumbers = Literal["fp32", "int8", "fp16", "bf16"]


def export(
    run: WeightsFlag,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    data: Path | None = None,
    int8: bool = False,
    fp16: bool = False,
    bf16: bool = False,
    max_loss: float = 0.5,
    images: Annotated[int | None, Parameter(validator=Number(gte=1, lte=10**8))] = None,
    aot: bool = False,
    with_preprocessing: bool = False,
    device: DeviceFlag = "auto",
    prior: PriorFlag = None,
    weights: WhichFlag = "best",
    model: ModelName = None,
    classes: Path | None = None,
    accept_licence: AcceptLicence = False,
    json: Json = False,
) -> int:
    """Write a trained model as a file that other programs run, checked against its checkpoint.

    Preprocessing, class names, calibration, licence and provenance are in the file; the batch may have any size. The
    file is kept if its logits are the checkpoint's, on the run's validation images (or --data, or drawn ones). In
    other number formats than fp32 it must also be faster, and lose no more accuracy than --max-loss. If it is not
    kept, the exit code is 1. evaluate and predict take exported files.

    Args:
        output: What to write: .onnx, .xml (OpenVINO), .pt2 (torch.export), .safetensors, or a folder that timm and the
            Hugging Face hub load.
        data: Images to check by, with labels where it is a data set (default: the run's validation data, else noise).
        int8: Quantize to 8 bits, calibrated on the run's training images (or --data): .onnx, .xml.
        fp16: Compute in 16 bits: .onnx, .xml (weights), .pt2.
        bf16: Compute in bfloat16: .xml, .pt2.
        max_loss: Points of top-1 (or mAP) that --int8, --fp16 or --bf16 may cost on the validation images (or --data).
        images: Judge --int8, --fp16 or --bf16 by so many of these, the same share of each class (default: all).
        aot: Compile the .pt2 file for the processor, or for the GPU of --device, by AOTInductor.
        with_preprocessing: Put resizing, cropping and normalising into the .onnx file, for other programs: it takes
            uint8 RGB images of any size, upright, [N, H, W, 3], and gives logits and probabilities.
        device: Where the file is written, checked and measured: cpu, cuda or cuda:1; auto: the CPU.
        classes: A card (.json) or a text file with the name of each output on a line, for weights without names.

    Examples:
        steady export runs/a -o model.onnx
        steady export runs/a -o model.onnx --int8
        steady export runs/a -o hub/my-model
        steady export timm/resnet18.a1_in1k -o resnet18.pt2 --data photos/
    """
    flags: dict[ExportNumbers, bool] = {"int8": int8, "fp16": fp16, "bf16": bf16}
    chosen = [name for name, flag in flags.items() if flag]
    if len(chosen) > 1:
        raise InputError(f"--{chosen[0]} and --{chosen[1]} exclude each other: drop one of them")
    if not 0 <= max_loss <= 100:
        raise InputError(f"--max-loss is {max_loss:g}; it must be from 0 to 100 points")
    if not chosen:
        refuse_flags("{} judges --int8, --fp16 or --bf16: add one of them, or drop it", images=images)
    from steadytrain.export.export import export_model, kind_of
    from steadytrain.training.inference.trained import find_pretrained

    kind_of(output)
    if (source := find_pretrained(run)) is not None:
        require_licence(Model(source.name, pretrained=True), accepted=accept_licence)
    with status(f"exporting {run} to {output}"):
        result = export_model(
            run,
            output,
            which=weights,
            model=model,
            classes=classes,
            numbers=chosen[0] if chosen else "fp32",
            aot=aot,
            with_preprocessing=with_preprocessing,
            device=device,
            data=data,
            max_loss=max_loss,
            images=images,
            prior=prior,
            say=note,
        )
    print_json(asdict(result) | {"path": str(result.path)}) if json else print_text(_text(result))
    if not result.is_kept:
        note(f"{result.path} was not kept: {result.reason}")
    return int(not result.is_kept)


def _text(result: Exportation) -> str:
    """Describe an export: how it was checked, and the table of measurements, if any."""
    last, lines = result.rows[-1], []
    if len(result.rows) > 1:
        cells = [["format", "engine", "MB", "images/s", "images", "top-1", "difference", "same 5"]]
        for row in result.rows:
            difference = NONE if row.difference is None else f"{row.difference:.2g}"
            speed = [f"{row.bytes / 1e6:.1f}", rate(row.images_per_second), number(row.n)]
            agreement = [percent(row.score, 1), difference, percent(row.top5_agreement, 1)]
            cells.append([row.format, row.engine, *speed, *agreement])
        lines.append(text_table(cells, right=range(2, 8), least=(12, 12, 7, 9, 7, 8, 10, 8), gap=1))
        numbers = last.format.rpartition(" ")[2]
        few = f"on {result.num_compared} of these"
        lines += [
            f"judged by {result.images}; difference: of logits from the checkpoint's, {few};",
            f"same 5 likeliest classes: fp32 as the checkpoint, {few}, and {numbers} as fp32, on all",
            "",
        ]
    else:
        same = f"five likeliest classes for {percent(last.top5_agreement, 1)}"
        if last.num_classes is not None and last.num_classes <= 5:  # these are always the same five
            same = f"likeliest class for {percent(last.top1_agreement, 1)}"
        lines.append(
            f"checked against the checkpoint on {result.images}: largest difference of logits {last.difference:.2g}"
            f" ({result.tolerance:.2g} is allowed), the same {same}"
        )
    if result.levels is not None:
        lines.append(
            f"images of 1 x 1 to 3000 x 200: pixels differ from predict's by {result.levels:.2g} of 256 levels"
        )
    if result.is_kept:
        lines.append(f"wrote {clean(str(result.path))} ({last.bytes / 1e6:.1f} MB, runs on {last.engine})")
    return "\n".join(lines)
