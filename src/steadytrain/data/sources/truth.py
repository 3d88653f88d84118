"""Labels in a file of their own, for images that lie in no folders of classes: ImageNet's ground truth in its forms.

Read are: the development kit as it is handed out (a tar), or its ground-truth text beside its ``meta.mat``; a text with
one label a line, in the order of the images' names; and Kaggle's ``LOC_val_solution.csv``. A table of paths and labels
is not this file's: :mod:`steadytrain.data.sources.table` reads it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources import archive, naming
from steadytrain.data.sources.container import open_plain
from steadytrain.data.sources.listing import is_image, shown
from steadytrain.data.sources.matfile import read_structs
from steadytrain.data.sources.members import Members, Say, few
from steadytrain.errors import DataError

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"

_MOST_BYTES = 64 << 20
_KAGGLE = ["imageid", "predictionstring"]


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
        """Class names and class numbers of images.

        Args:
            names: in the order of the images' names.
            classes: the class list; None makes one of the labels that occur.

        Raises:
            DataError: images without a label, labels without an image, names whose order is a matter of opinion, or
                labels that ``classes`` lacks.
        """
        texts = self._texts(names)
        if classes is not None:
            self._refuse_counted_from_one(texts, classes)
        return naming.from_texts(texts, classes=classes, where=str(self.where))

    def _texts(self, names: Sequence[str]) -> Sequence[str]:
        if self.named is None:
            if len(self.ordered) != len(names):
                raise DataError(
                    f"{self.where} has {len(self.ordered):,} labels for {len(names):,} images: they must agree"
                )
            self._require_order(names)
            return self.ordered
        stems = [_stem(name) for name in names]
        if missing := [name for name, stem in zip(names, stems, strict=True) if stem not in self.named]:
            raise DataError(f"{self.where} has no label for {len(missing):,} of the images ({few(missing)})")
        return [self.named[stem] for stem in stems]

    def _require_order(self, names: Sequence[str]) -> None:
        """Refuse ``10.jpg`` before ``2.jpg``: whoever wrote the labels may well have counted."""
        for name, after in pairwise(names):
            if _by_value(name) > _by_value(after):
                raise DataError(
                    f"{self.where} has a label a line and no names, and the images' order is not certain (by letters"
                    f" {shown(name)} comes before {shown(after)}, by number after it): give a table of names and labels"
                    " (name,label)"
                )

    def _refuse_counted_from_one(self, texts: Sequence[str], classes: Sequence[str]) -> None:
        numbers = {naming.whole(text) for text in set(texts)} - {None}
        if not set(texts) <= set(classes) and len(numbers) == len(classes) and max(numbers, default=0) == len(classes):  # type: ignore[type-var]
            raise DataError(
                f"{self.where} counts classes from 1, as ImageNet's development kit does in an order of its own: give"
                " the kit itself (ILSVRC2012_devkit_t12.tar.gz), or one WNID a line"
            )


def read_truth(path: Path, scratch: Path, say: Say) -> Truth | None:
    """Read a file of labels; None where it is a table.

    Raises:
        DataError: it cannot be read, or is not what it should be.
        StorageError: no room to decompress it.
    """
    plain = open_plain(path, scratch, say)
    if plain.kind in ("tar", "zip"):
        members = archive.read([plain])
        return Truth(path, ordered=_synsets(_member(members, GROUND_TRUTH, path), _member(members, META, path), path))
    if plain.kind != "text":
        raise DataError(f"{path} is no file of labels: give a table, a text with one label a line, or the devkit's tar")
    lines = _lines(_bounded(plain.at, path), path)
    if lines and [cell.strip().casefold() for cell in lines[0].split(",")] == _KAGGLE:
        return Truth(path, named=_boxes(lines, path))
    if not lines or any(mark in line for line in lines[:100] for mark in "\t,; "):
        return None
    if path.name != GROUND_TRUTH:
        return Truth(path, ordered=tuple(lines))
    meta = path.with_name(META)
    if not meta.is_file():
        raise DataError(f"{path} numbers classes as {META} does, which is not beside it: put it there, or give the kit")
    return Truth(path, ordered=_synsets("\n".join(lines).encode(), _bounded(meta, meta), path))


def _bounded(at: Path, told: Path) -> bytes:
    try:
        with at.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {told}: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise DataError(f"{told} has more than {_MOST_BYTES:,} bytes: it is no list of labels")
    return data


def _member(members: Members, name: str, path: Path) -> bytes:
    row = next((row for row, found in enumerate(members.names) if found.rpartition("/")[2] == name), None)
    if row is None:
        raise DataError(
            f"{path} holds no {name}: give the kit of the classification task, ILSVRC2012_devkit_t12.tar.gz"
        )
    if members.size(row) > _MOST_BYTES or members.is_deflated(row):
        raise DataError(f"{path}: its {name} cannot be used: give the kit as it is handed out")
    return members.piece(row).read()


def _lines(data: bytes, path: Path) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 at byte {error.start:,}: save it as UTF-8") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _synsets(truth: bytes, meta: bytes, path: Path) -> tuple[str, ...]:
    """The WNID of each image, from the kit's numbers."""
    try:
        told = read_structs(meta, "synsets", ("ILSVRC2012_ID", "WNID"))
    except DataError as error:
        raise DataError(f"{META} of {path} cannot be used: {error}") from None
    numbers = [(one["ILSVRC2012_ID"], str(one["WNID"])) for one in told]
    known = {f"{number:.0f}": wnid for number, wnid in numbers if isinstance(number, float)}
    lines = _lines(truth, path)
    if unknown := [line for line in lines if line not in known]:
        raise DataError(f"{path} has the class {unknown[0]!r}, which {META} does not tell of")
    return tuple(known[line] for line in lines)


def _boxes(lines: Sequence[str], path: Path) -> dict[str, str]:
    """Kaggle's form: after each image's name its boxes, the class before each box; the first one's is the image's."""
    named: dict[str, str] = {}
    for number, row in enumerate(csv.reader(lines[1:]), 2):
        if len(row) != 2 or not row[1].split():
            raise DataError(f"{path}: line {number} is not an image's name and its boxes")
        named[_stem(row[0])] = row[1].split()[0]
    return named


def _by_value(name: str) -> list[str | int]:
    """What sorts names by the value of the numbers in them: texts and numbers take turns."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split("([0-9]+)", name))]


def _stem(name: str) -> str:
    base = name.rpartition("/")[2]
    return base.rpartition(".")[0] if is_image(base) else base
