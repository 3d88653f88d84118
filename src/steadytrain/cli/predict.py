"""``steady predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def predict(
    place: Annotated[Path, Parameter(help="A run's folder, or a weights file.")],
    /,
    *images: Annotated[Path, Parameter(help="Image files.")],
    top: Annotated[int, Parameter(help="Classes to show for each image.")] = 5,
    weights: Annotated[Literal["last", "best"], Parameter(help="Which of a run's weights.")] = "last",
    model: Annotated[str | None, Parameter(help="Name of the model, for files that do not say it.")] = None,
    device: Annotated[str, Parameter(help="auto, cpu, cuda or cuda:1.")] = "auto",
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="", show_default=False)] = False,
) -> int:
    """The likeliest classes of single images; 1 if one of them could not be read.

    Examples
    --------
    steady predict runs/a cat.jpg dog.jpg --top 3
    """
    import json as json_module

    from steadytrain.errors import InputError
    from steadytrain.training import predict as predict_each
    from steadytrain.training import restore

    if not images:
        raise InputError("name at least one image file")
    if top < 1:
        raise InputError(f"--top is {top}; it must be 1 or more")
    trained = restore(place, which=weights, model=model, device=device)
    failed = False
    documents = []
    for told in predict_each(trained, images, top=top):
        failed |= told.error is not None
        ranked = [{"class": name, "probability": p} for name, p in zip(told.classes, told.probabilities, strict=True)]
        documents.append({"image": str(told.path), "classes": ranked, "error": told.error})
        if not json:
            words = "  ".join(f"{one['class']} {one['probability']:.4f}" for one in ranked)
            print(f"{told.path}: {told.error or words}", flush=True)
    if json:
        print(json_module.dumps(documents, indent=2))
    return int(failed)
