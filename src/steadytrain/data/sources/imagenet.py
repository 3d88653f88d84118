"""ImageNet (ILSVRC2012) as its owners and Kaggle hand it out, and labels in a file of their own.

Classes are WNIDs, sorted, so that labels are the usual 0 to 999. The training set, a tar of one tar for each class, is
read as any tar of tars is. Labels of the validation set are read from the development kit as it is handed out (a tar),
or its ground-truth text beside its ``meta.mat``; from a text with one label a line, in the order of the images' names;
and from Kaggle's ``LOC_val_solution.csv``. A table of paths and labels is read by
:mod:`steadytrain.data.sources.tables`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.filenames import is_image
from steadytrain.data.sources.archives import SourceFile, read_archives
from steadytrain.data.sources.labels import classes_from_texts, whole_number
from steadytrain.data.sources.listing import FileList, Listing
from steadytrain.data.sources.rows import read_text
from steadytrain.data.sources.source import Request, SourceKind
from steadytrain.errors import DataError, read_errors
from steadytrain.files import open_regular
from steadytrain.format import few, printable

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
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
_KAGGLE_HEADER = ["imageid", "predictionstring"]
_MOST_BYTES, _SAMPLE = 64 << 20, 100
_MOST_META_BYTES = 256 << 10  # the real one has under 100 KB; deflated bytes inflate to at most 1,032 times as many


def find_parts(folder: Path) -> dict[str, Path]:
    """Find the parts of ImageNet in a folder, by split: the archives, or Kaggle's folders; nothing elsewhere."""
    for place in (folder / _KAGGLE, folder / _KAGGLE.partition("/")[2], folder):
        train, val = place / "train", place / "val"
        if train.is_dir() and val.is_dir() and _is_validation(path.name for path in val.iterdir()):
            return {"train": train, "val": val}
    tars = {"train": folder / TRAIN_TAR, "val": folder / VAL_TAR}
    return {split: path for split, path in tars.items() if path.is_file()}


def truth_beside(root: Path, names: Iterable[str] | None = None) -> Path | None:
    """The ground truth that lies beside the validation set, or a few folders above it; None where there is none.

    Args:
        root: the folder or the archive that holds the images.
        names: of the images; for another data set none is looked for. None: it is known to be the validation set.
    """
    if names is not None and not _is_validation(names):
        return None
    folder = root.absolute() if root.is_dir() else root.absolute().parent
    for place in [folder, *folder.parents][: _LEVELS_UP + 1]:
        for name in TRUTHS:
            # The kit's text alone says nothing: its numbers are explained by the file that lies beside it.
            has_meta = not name.endswith(GROUND_TRUTH) or (place / name).with_name(META).is_file()
            if has_meta and (place / name).is_file():
                return place / name
    return None


def _is_validation(names: Iterable[str]) -> bool:
    """Return whether these are images of the validation set, by the names that they are handed out under."""
    return any(_VAL_NAME.fullmatch(name) for name in names)


@dataclass(frozen=True)
class Truth:
    """Labels of images.

    Args:
        where: the file that they come from.
        ordered: one for each image, in the order of the images' names; empty where they are ``named``.
        named: by the image's name without folder and suffix.
    """

    where: Path
    ordered: tuple[str, ...] = ()
    named: Mapping[str, str] | None = None

    def label(
        self, names: Sequence[str], *, classes: Sequence[str] | None
    ) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Class names and class numbers of images, whose ``names`` are in order; without ``classes`` of what occurs.

        Raises:
            DataError: images without a label, labels without an image, names whose order is a matter of opinion, or
                labels that ``classes`` lacks.
        """
        texts: Sequence[str] = self.ordered
        if self.named is not None:
            stems = [_stem(name) for name in names]
            if missing := [name for name, stem in zip(names, stems, strict=True) if stem not in self.named]:
                raise DataError(f"{self.where} has no label for {len(missing):,} of the images ({few(missing)})")
            texts = [self.named[stem] for stem in stems]
        elif len(texts) != len(names):
            raise DataError(
                f"{self.where} has {len(texts):,} labels for {len(names):,} images: the two numbers must be equal"
            )
        elif pair := next((pair for pair in pairwise(names) if _by_value(pair[0]) > _by_value(pair[1])), None):
            # 10.jpg before 2.jpg: whoever wrote the labels may well have counted.
            raise DataError(
                f"{self.where} has one label per line without names, and the order of the images is ambiguous (in"
                f" alphabetical order {printable(pair[0])} comes before {printable(pair[1])}, but after it in numerical"
                " order): use a table of names and labels (name,label)"
            )
        if classes is not None and not set(texts) <= set(classes):
            numbers = {number for text in set(texts) if (number := whole_number(text)) is not None}
            if len(numbers) == len(classes) == max(numbers, default=0):
                raise DataError(
                    f"{self.where} counts classes from 1, as ImageNet's development kit does in an order of its own:"
                    " give the kit itself (ILSVRC2012_devkit_t12.tar.gz), or one WNID a line"
                )
        return classes_from_texts(texts, classes=classes, where=str(self.where))


def _by_value(name: str) -> list[str | int]:
    """A key that sorts names by the value of the numbers in them: texts and numbers take turns."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split("([0-9]+)", name))]


def _stem(name: str) -> str:
    base = name.rpartition("/")[2]
    return base.rpartition(".")[0] if is_image(base) else base


def read_truth(source: SourceFile) -> Truth | None:
    """Read a file of labels; None where it is a table. Raises DataError: it is not what it should be."""
    path = source.path
    if source.kind in ("tar", "zip"):
        files = read_archives([source], lambda _: None)
        truth, meta = (_read_member(files, name, path) for name in (GROUND_TRUTH, META))
        return Truth(path, ordered=_wnids(truth.decode("utf-8", "replace").split(), meta, path))
    if source.kind == "parquet":
        return None
    if source.kind != "text":
        raise DataError(
            f"{path} is not a file of labels: use a table, a text file with one label per line, or the"
            " development kit's tar"
        )
    rest = (line.strip() for line in read_text(source.stored_at, path) if line.strip())
    first = list(islice(rest, _SAMPLE))
    if first and [cell.strip().casefold() for cell in first[0].split(",")] == _KAGGLE_HEADER:
        # After each image's name its boxes, the class before each box; the first one's is the image's.
        named: dict[str, str] = {}
        for number, row in enumerate(csv.reader([*first[1:], *rest]), 2):
            if len(row) != 2 or not row[1].split():
                raise DataError(f"{path}: line {number} is not an image name followed by boxes")
            named[_stem(row[0])] = row[1].split()[0]
        return Truth(path, named=named)
    # Paths are a table, too; a class may begin with a slash.
    if not first or any(line.find("/") > 0 or any(mark in line for mark in "\t,; ") for line in first):
        return None
    lines = (*first, *rest)
    if path.name != GROUND_TRUTH:
        return Truth(path, ordered=lines)
    meta_path = path.with_name(META)
    if not meta_path.is_file():
        raise DataError(f"{path} numbers classes as {META} does, which is not beside it: put it there, or give the kit")
    with read_errors(meta_path), open_regular(meta_path) as file:
        return Truth(path, ordered=_wnids(lines, file.read(_MOST_META_BYTES + 1), path))


def _read_member(files: FileList, name: str, path: Path) -> bytes:
    row = next((row for row, member in enumerate(files.names) if member.rpartition("/")[2] == name), None)
    if row is None:
        raise DataError(
            f"{path} holds no {name}: give the kit of the classification task, ILSVRC2012_devkit_t12.tar.gz, or unpack"
            f" it, and give the file of labels in it ({few(files.names, 3)})"
        )
    if files.sizes[row] > _MOST_BYTES:
        raise DataError(f"{path}: its {name} cannot be used: use the kit as it was published")
    return files.read(row)


def _wnids(lines: Sequence[str], meta: bytes, path: Path) -> tuple[str, ...]:
    """The WNID of each image, from the kit's numbers."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError:
        raise DataError(
            f"{META} of {path} is a MATLAB file, which scipy reads: pip install scipy, or give one WNID a line"
        ) from None
    if len(meta) > _MOST_META_BYTES:
        raise DataError(f"{META} of {path} cannot be used: {len(meta):,} bytes, more than {_MOST_META_BYTES:,}")
    try:
        synsets = loadmat(io.BytesIO(meta), squeeze_me=True, variable_names=["synsets"])["synsets"]
        known = {f"{float(row['ILSVRC2012_ID']):.0f}": str(row["WNID"]) for row in np.atleast_1d(synsets)}
    except Exception as error:
        raise DataError(f"{META} of {path} cannot be used: it is damaged, or not such a file ({error!r})") from error
    if unknown := [line for line in lines if line not in known]:
        raise DataError(f"{path} has the class {unknown[0]!r}, which {META} does not list")
    return tuple(known[line] for line in lines)


def _list_parts(request: Request) -> list[Listing]:
    parts = find_parts(request.where)
    listings: list[Listing] = []
    for split, path in parts.items():
        truth = truth_beside(path) if split == "val" else None
        if split == "val" and truth is None:
            raise DataError(
                f"{path} has images without labels: put {TRUTHS[0]} or LOC_val_solution.csv beside it, or"
                " give the ground truth with --labels FILE"
            )
        part = request.part(path, () if path.is_dir() else (path,), after=listings)
        listing = request.list_part(replace(part, labels=truth))[0]
        listings.append(replace(listing, split=split if len(parts) > 1 else ""))
    return listings


def _find_truth(request: Request) -> Path | None:
    return truth_beside(request.where, request.entries) if request.is_folder else None


IMAGENET = SourceKind("ImageNet", lambda request: request.is_folder and bool(find_parts(request.where)), _list_parts)
VALIDATION = SourceKind(
    "ImageNet's validation images",
    lambda request: _find_truth(request) is not None,
    lambda request: request.list_part(replace(request, labels=_find_truth(request))),
)
