"""``steady demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steadytrain.config import Budget, Data, Model, Optim, Recipe
from steadytrain.machine.process import spin_where_alone


def demo(
    folder: Annotated[Path, Parameter(help="Where everything is written.")] = Path("steady-demo"),
    /,
    *,
    seed: Annotated[int, Parameter(help="Of initialisation, order and augmentation.")] = 0,
) -> int:
    """Pack, train, evaluate and report 1,797 handwritten digits: no network, no data, half a minute.

    The scans come with scikit-learn (Alpaydin and Kaynak 1998, at 8 x 8 pixels).

    Examples
    --------
    steady demo
    steady demo elsewhere/ --seed 1
    """
    from steadytrain.cli.console import note, progress
    from steadytrain.cli.running import name_next, train_visibly
    from steadytrain.data.packing.pack import pack
    from steadytrain.reports import report
    from steadytrain.run import Run

    _refuse_strangers(folder)
    spin_where_alone()
    rec = folder / "digits.rec"
    if not rec.exists():
        images = _write_digits(folder / "images")
        with progress("packing", len(list(images.glob("*/*.png")))) as advance:
            pack(images, folder / "digits", progress=advance)
        note(f"packed {images} into {rec}")
    run = Run.create(folder / "runs" / (f"digits-seed-{seed}" if seed else "digits"), _recipe(rec, seed))
    code = train_visibly(run)
    if code == 0:
        note(f"wrote {report([run], folder / 'report.html')}")
    name_next(run, code, image=folder / "images" / "3" / "0003.png")
    return code


def _refuse_strangers(folder: Path) -> None:
    """Write into a new folder, an empty one or that of an earlier demo, not among somebody's photographs."""
    from steadytrain.errors import InputError

    ours = {"images", "digits.rec", "digits.idx", "digits.json", "runs", "report.html"}
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder for the demo")
    strangers = [one.name for one in folder.iterdir() if one.name not in ours] if folder.is_dir() else []
    if strangers:
        raise InputError(f"{folder} holds other files ({min(strangers)}): name a new folder for the demo")


def _write_digits(folder: Path) -> Path:
    """The scans as grey PNG files, a folder for each digit."""
    from steadytrain.errors import InputError, storage_error

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "steady demo takes its images from scikit-learn, which is missing: pip install scikit-learn"
        ) from None
    import numpy as np
    from PIL import Image

    digits = load_digits()
    try:
        for i, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            place = folder / str(digit)
            place.mkdir(parents=True, exist_ok=True)
            grey = np.round(pixels * (255 / 16)).astype(np.uint8)  # the scans count ink from 0 to 16
            Image.fromarray(grey).save(place / f"{i:04d}.png")
    except OSError as error:
        raise storage_error(error, folder) from error
    return folder


def _recipe(rec: Path, seed: int) -> Recipe:
    return Recipe(
        data=Data(train=str(rec), pad=1, holdout=0.2),
        model=Model("digits"),
        optim=Optim("sgd", lr=0.1, weight_decay=5e-4, warmup_epochs=1),
        budget=Budget(epochs=20),
        batch_size=64,
        seed=seed,
    )
