"""ImageNet (ILSVRC2012) as its owners and Kaggle hand it out: what a folder holds of it, and its flat validation set.

Classes are WNIDs, sorted, so that labels are the usual 0 to 999. The training set, a tar of one tar for each class, is
read as any tar of tars is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from steadytrain.data.sources.listing import Listing, is_ignored, is_image
from steadytrain.data.sources.truth import GROUND_TRUTH, META, Truth
from steadytrain.errors import DataError

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
TRUTHS = (
    "ILSVRC2012_devkit_t12.tar.gz",
    "ILSVRC2012_devkit_t12.tar",
    f"ILSVRC2012_devkit_t12/data/{GROUND_TRUTH}",
    f"data/{GROUND_TRUTH}",
    GROUND_TRUTH,
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
)

_VAL_NAME = re.compile(r"(?:.*/)?ILSVRC2012_val_\d{8}\.JPEG", re.I)
_KAGGLE = "ILSVRC/Data/CLS-LOC"
_LEVELS_UP = 4  # from Kaggle's folder of images to the one that holds its tables


def is_validation(names: Iterable[str]) -> bool:
    """Whether these are images of the validation set, by the names that they are handed out under."""
    return any(_VAL_NAME.fullmatch(name) for name in names)


def truth_beside(root: Path, names: Iterable[str]) -> Path | None:
    """The ground truth that lies beside the validation set, or a few folders above it; None where there is none.

    Args:
        root: the folder or the archive that holds the images.
        names: of the images; of another data set none is looked for.
    """
    if not is_validation(names):
        return None
    folder = root.absolute() if root.is_dir() else root.absolute().parent
    for place in [folder, *folder.parents][: _LEVELS_UP + 1]:
        for name in TRUTHS:
            # The kit's text alone says nothing: its numbers are told by the file that lies beside it.
            if (place / name).is_file() and (
                not name.endswith(GROUND_TRUTH) or (place / name).with_name(META).is_file()
            ):
                return place / name
    return None


def parts(folder: Path) -> dict[str, Path]:
    """What a folder holds of ImageNet, by split: the archives, or Kaggle's folders; nothing for another folder."""
    kaggle = [folder / _KAGGLE, folder / _KAGGLE.partition("/")[2], folder]
    for place in kaggle:
        train, val = place / "train", place / "val"
        if train.is_dir() and val.is_dir() and is_validation(path.name for path in val.iterdir()):
            return {"train": train, "val": val}
    found = {"train": folder / TRAIN_TAR, "val": folder / VAL_TAR}
    return {split: path for split, path in found.items() if path.is_file()}


def list_flat(folder: Path, known: Truth, *, classes: Sequence[str] | None) -> Listing:
    """List a folder of images without classes, in the order of their names.

    Args:
        folder: that holds the images.
        known: their labels.
        classes: the class list; None makes one of the labels that occur.

    Raises:
        DataError: no images, or labels that do not go with them.
    """
    paths = sorted(one for one in folder.iterdir() if is_image(one.name) and not is_ignored(one.name))
    if not paths:
        raise DataError(f"{folder} holds no images")
    about = [path.stat() for path in paths]
    names = [path.name for path in paths]
    listed, labels = known.label(names, classes=classes)
    return Listing(
        split="",
        root=folder,
        classes=listed,
        names=names,
        labels=labels,
        sizes=np.array([one.st_size for one in about], np.int64),
        times=np.array([one.st_mtime_ns for one in about], np.int64),
        ids=np.arange(len(names)),
    )


def without_truth(root: Path) -> DataError:
    """The error for a validation set without labels."""
    return DataError(
        f"{root} has images without labels: put {TRUTHS[0]} or LOC_val_solution.csv beside it, or give the ground truth"
        " with --labels FILE"
    )
