"""The files beside the weights in a folder for timm and the Hugging Face hub: ``config.json`` and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from steadytrain.format import count, epoch, number, percent, tells_top5
from steadytrain.models.exported import Description
from steadytrain.models.registry import licence_note

_HUB_LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "bsd-2-clause", "cc-by-4.0", "cc0-1.0", "cc-by-nc-4.0")
"""Names of licences that the hub knows, among those of timm's weights; any other is ``other`` there."""
_SHOWN = 20
_FITTED = {"crop": "the shorter side is", "squash": "both sides are", "pad": "the longer side is"}


def timm_config(described: Description, module: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` by which timm and transformers build a network and prepare its images.

    Args:
        described: the model.
        module: the network, built by timm.
        options: of it, as the recipe has them.
    """
    input, usual = described.input, dict(module.pretrained_cfg)
    usual = {key: usual[key] for key in ("first_conv", "classifier", "fixed_input_size", "pool_size") if usual.get(key)}
    arguments = {**options, **({"in_chans": input.channels} if input.channels != 3 else {})}
    if usual.get("fixed_input_size"):
        arguments["img_size"] = input.size
    return {
        "architecture": described.model.removeprefix("timm/").partition(".")[0],
        "num_classes": len(described.classes),
        "num_features": module.num_features,
        "label_names": list(described.classes),
        **({"problem_type": "multi_label_classification"} if described.is_multi_label else {}),
        **({"model_args": arguments} if arguments else {}),
        "pretrained_cfg": {
            **usual,
            "custom_load": False,
            "input_size": [input.channels, input.size, input.size],
            "interpolation": input.interpolation,
            "crop_pct": input.crop,
            "crop_mode": {"crop": "center", "squash": "squash", "pad": "border"}[input.fit],
            "mean": list(input.mean or ()),
            "std": list(input.std or ()),
            "num_classes": len(described.classes),
            "license": described.licence or "unknown",
        },
    }


def model_card(described: Description, measured: Mapping[str, Any], *, name: str) -> str:
    """Write the card: what the model is, its licence, its measured accuracy, its images, classes, and how to load it.

    Args:
        described: the model.
        measured: ``n``, ``top1``, ``top5``, ``mean_ap`` and ``epoch`` of the run's evaluation; empty where none is
            known.
        name: of the folder.

    >>> from steadytrain.models import Input
    >>> input = Input(size=8, mean=(0.5,), std=(0.5,), crop=1.0, interpolation="bilinear", channels=1)
    >>> description = Description(model="timm/test_vit", input=input, classes=("a", "b"), licence="mit")
    >>> print(model_card(description, {}, name="small").split("\\n\\n")[2])
    `timm/test_vit`, an image classifier with 2 classes, exported by steadytrain.
    """
    input, licence, classes = described.input, described.licence, described.classes
    note = licence_note(licence) if licence else None
    origin = "It was trained from no other weights."
    origin = f"Of its weights, or of those that it was trained from: {licence}." if licence else origin
    listed, num_more = ", ".join(f"`{each}`" for each in classes[:_SHOWN]), len(classes) - _SHOWN
    remarks = [f"Probabilities are calibrated: divide the logits by {described.temperature:.4g}."]
    remarks = remarks if described.temperature != 1 else []
    if described.prior:
        remarks.append(f"The logits are those of class frequencies `{described.prior}`, not the training images'.")
    if described.limits:
        remarks.append(
            f"An image is unlike the training images where the tenth nearest of them is farther than"
            f" {described.limits['distance']:.3g} (features of length 1, in `model.limits.safetensors`), or the log of"
            f" the sum of exponentials of its logits is below {described.limits['energy']:.3g}: that keeps 95 % of"
            f" {described.limits['held_out']}."
        )
    text = (Path(__file__).parent / "texts" / "model_card.md").read_text(encoding="utf-8")
    return Template(text).substitute(
        vars(input),
        name=name,
        model=described.model,
        num_classes=count(len(classes), "class", "classes"),
        license=licence if licence in _HUB_LICENCES else "other",
        license_name=f"license_name: {licence}\n" if licence and licence not in _HUB_LICENCES else "",
        origin=f"{origin}{f' {note[0].upper()}{note[1:]}.' if note else ''}",
        accuracy=_accuracy(measured, described),
        colours="grey" if input.channels == 1 else "RGB",
        fitted=_FITTED[input.fit],
        filled=" and filled up with the mean colour" if input.fit == "pad" else "",
        crop=number(input.crop, 3),
        mean=list(input.mean or ()),
        std=list(input.std or ()),
        remarks="".join(f"{remark}\n\n" for remark in remarks),
        classes=f"{listed} and {num_more:,} more (`label_names` in `config.json`)" if num_more > 0 else listed,
        provenance="\n".join(f"- {key}: `{value}`" for key, value in described.provenance.items()),
    )


def _accuracy(measured: Mapping[str, Any], described: Description) -> str:
    if not measured:
        return "Not measured."
    if described.is_multi_label:
        score = f"mAP {percent(measured['mean_ap'], 1)}"
    else:
        score = f"top-1 {percent(measured['top1'], 1)}"
        score += f", top-5 {percent(measured['top5'], 1)}" if tells_top5(len(described.classes)) else ""
    epochs = epoch(measured["epoch"])
    when = f"after {epochs} epoch{'s' * (epochs != '1')}" if measured["epoch"] else "by the probe"
    return f"{score} on {count(measured['n'], 'validation image')}, {when}."
