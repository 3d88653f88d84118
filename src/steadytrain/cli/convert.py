"""``steady convert``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import Json, SizeFlag, WhichFlag, refuse_flags
from steadytrain.errors import InputError
from steadytrain.format import count

Output = Annotated[
    Path, Parameter(name=("--output", "-o"), help="What to write: NAME.safetensors, or PREFIX-0000.params for MXNet.")
]


def convert(
    checkpoint: str,
    symbol: Path | None = None,
    /,
    *,
    output: Output,
    weights: WhichFlag = "best",
    model: str | None = None,
    keep_graph: bool = False,
    rgb_mean: str | None = None,
    rgb_std: str | None = None,
    bgr: bool = False,
    size: SizeFlag = None,
    data: Path | None = None,
    json: Json = False,
) -> None:
    """Turn MXNet checkpoints into weights of steadytrain, and weights into MXNet checkpoints.

    From MXNet: the names are those of timm's or torchvision's network where it is the same one (its outputs are
    compared), else the file holds MXNet's graph; both evaluate, predict and fine-tune. To MXNet: .params, symbol JSON
    and synset.txt, for MXNet 1.x; they are read back, and kept if their logits are the model's.

    Args:
        checkpoint: MXNet's .params file, or its -symbol.json (the newest .params beside it is taken), or mxnet:PREFIX;
            its .states file (momentum of SGD); or a run, or a weights file.
        symbol: MXNet's -symbol.json, where it is not beside the .params file.
        model: Name of the model, for weights files that do not say it.
        keep_graph: Keep MXNet's graph, even where timm or torchvision have the same network.
        rgb_mean: Mean of the images as MXNet's tools take it, of pixels from 0 to 255, such as 123.68,116.78,103.94.
        rgb_std: Standard deviation, likewise, such as 58.393,57.12,57.375; 1,1,1: pixels were not divided.
        bgr: The network was trained on BGR images (OpenCV, Caffe): turn its first layer round, so that it takes RGB.
        size: Side of the images, in pixels (default: what suits the weights).
        data: To MXNet: images to compare by (default: the run's validation data, else noise).

    Examples:
        steady convert model-0000.params model-symbol.json -o model.safetensors
        steady convert mxnet:resnext-50 -o resnext50.safetensors --rgb-mean 0,0,0 --rgb-std 1,1,1
        steady convert runs/a -o model-0000.params
        steady convert model.safetensors -o model-0000.params
    """
    if output.suffix not in (".params", ".safetensors"):
        raise InputError(f"--output is {output}: it must end with .safetensors, or with -0000.params for MXNet")
    mean, std = read_colours("--rgb-mean", rgb_mean), read_colours("--rgb-std", rgb_std, above=0.0)
    of_weights: dict[str, Any] = {"model": model, "data": data}
    of_mxnet: dict[str, Any] = {"keep_graph": keep_graph, "rgb_mean": mean, "rgb_std": std, "bgr": bgr, "size": size}
    if symbol is not None and checkpoint.endswith(".json"):
        checkpoint, symbol = str(symbol), Path(checkpoint)
    from steadytrain.config.factories import checkpoint_format
    from steadytrain.interop.mxnet import convert as conversion
    from steadytrain.training import restore

    if checkpoint.endswith(".states"):
        if symbol is None:
            raise InputError(
                f"name the symbol whose parameters {checkpoint} belongs to: steady convert {checkpoint} SYMBOL -o OUT"
            )
        refuse_flags("{} is for weights, and these are the states of an optimizer: drop it", **of_weights, **of_mxnet)
        num_arrays = conversion.convert_states(Path(checkpoint), symbol, output)
        text = f"wrote {output}: the momentum of {count(num_arrays, 'parameter')}"
        print_json({"files": [str(output)], "arrays": num_arrays}) if json else print_text(text)
        return
    if checkpoint_format(checkpoint) and output.suffix == ".safetensors":
        refuse_flags("{} is for what goes to MXNet: drop it", **of_weights)
        options: dict[str, Any] = {"keep_graph": keep_graph, "mean": mean, "std": std, "size": size, "bgr": bgr}
        converted = conversion.convert_from_mxnet(checkpoint, output, symbol=symbol, **options)
    elif output.suffix == ".params":
        import numpy as np

        from steadytrain.export.export import CHECKED, open_samples

        if symbol is not None:
            raise InputError(f"{symbol} is for a checkpoint of MXNet that is read: drop it")
        refuse_flags("{} is for a checkpoint of MXNet that is read: drop it", **of_mxnet)
        trained = restore(checkpoint, which=weights, model=model, device="cpu", precision="fp32", say=note)
        for line in trained.notes:
            note(line)
        with open_samples(trained, data, CHECKED, say=note) as samples:
            images = np.concatenate([batch.images for batch in samples.checked])
        converted = conversion.convert_to_mxnet(trained, output, images, what=samples.what)
    else:
        raise InputError(f"{checkpoint} is no checkpoint of MXNet: it is written as one with -o PREFIX-0000.params")
    for line in converted.notes:
        note(line)
    plain = vars(converted.input)
    document = {
        "files": [str(path) for path in converted.files],
        "model": converted.model,
        "classes": converted.num_classes,
        "values": converted.num_values,
        "difference": converted.difference,
        "compared_on": converted.compared_on,
        "input": plain,
    }
    print_json(document) if json else print_text(_text(document))


def read_colours(flag: str, text: str | None, *, above: float = -1.0) -> tuple[float, ...] | None:
    """Parse three values of pixels from 0 to 255; return them as of 0 to 1. Raises InputError."""
    if text is None:
        return None
    try:
        values = tuple(float(part) / 255 for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in (1, 3) or not all(above < value <= 255 for value in values):
        raise InputError(
            f"{flag} is {text!r}; it must be three numbers of pixels from 0 to 255, such as 123.68,116.78,103.94"
        )
    return values


def _text(document: Mapping[str, Any]) -> str:
    """Describe what was written, and the input that it takes."""
    input = document["input"]
    numbers = {key: ",".join(f"{255 * value:.6g}" for value in input[key]) for key in ("mean", "std")}
    difference, images = document["difference"], document["compared_on"]
    proof = (
        "" if difference is None else f" (largest difference of logits on {images}: {difference:.1e} of the largest)"
    )
    return (
        f"wrote {' '.join(document['files'])}\n"
        f"{document['model']}: {count(document['classes'], 'class', 'classes')}, {document['values']:,} values{proof}\n"
        f"images: RGB, {input['size']} pixels, mean {numbers['mean']}, std {numbers['std']} of pixels from 0 to 255"
        " (MXNet: --rgb-mean, --rgb-std)"
    )
