"""``steady demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, progress, status
from steadytrain.cli.options import Json
from steadytrain.cli.train import print_next_commands, train_visibly
from steadytrain.config import Budget, Data, Model, Optim, Recipe
from steadytrain.errors import InputError, storage_errors
from steadytrain.machine.process import spin_where_alone
from steadytrain.run import Run


def demo(
    folder: Path = Path("steady-demo"),
    /,
    *,
    seed: Annotated[int, Parameter(validator=Number(gte=0, lte=2**63 - 1))] = 0,
    json: Json = False,
) -> int:
    """Pack, train, evaluate and report 1,797 handwritten digits, in half a minute, without a network.

    The scans come with scikit-learn (Alpaydin and Kaynak 1998, at 8 x 8 pixels).

    Args:
        folder: Where everything is written.
        seed: Of initialisation, order and augmentation.

    Examples:
        steady demo
        steady demo elsewhere/ --seed 1
    """
    from steadytrain.data.packing.pack import pack
    from steadytrain.reports import report

    ours = {"images", "digits.rec", "digits.idx", "digits.json", "digits.lst", "digits.hashes", "runs", "report.html"}
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder for the demo")
    others = [path.name for path in folder.iterdir() if path.name not in ours] if folder.is_dir() else []
    if others:  # do not write among somebody's photographs
        raise InputError(f"{folder} holds other files ({min(others)}): name a new folder for the demo")
    spin_where_alone()
    rec = folder / "digits.rec"
    if not rec.exists():
        with status("loading scikit-learn"):
            images = _write_digits(folder / "images")
        with progress("packing", len(list(images.glob("*/*.png")))) as advance:
            pack(images, folder / "digits", progress=advance)
        note(f"packed {images} into {rec}")
    recipe = Recipe(
        data=Data(train=str(rec), pad=1, holdout=0.2),
        model=Model("digits"),
        optim=Optim("sgd", nesterov=True, lr=0.1, weight_decay=5e-4, warmup_epochs=1),
        budget=Budget(epochs=20),
        batch_size=64,
        seed=seed,
    )
    run = Run.create(folder / "runs" / (f"digits-seed-{seed}" if seed else "digits"), recipe)
    code = train_visibly(run, json=json)
    if code == 0:
        note(f"wrote {report([run], folder / 'report.html')}")
    print_next_commands(run, code, image=folder / "images" / "3" / "0003.png")
    return code


def _write_digits(folder: Path) -> Path:
    """Write the scans as grey PNG files, a folder for each digit."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "steady demo takes its images from scikit-learn, which is missing: pip install scikit-learn"
        ) from None
    import numpy as np
    from PIL import Image

    digits = load_digits()
    with storage_errors(folder):
        for i, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            path = folder / str(digit) / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            grey = np.round(pixels * (255 / 16)).astype(np.uint8)  # the scans count ink from 0 to 16
            Image.fromarray(grey).save(path)
    return folder
