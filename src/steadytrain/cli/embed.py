"""``steady embed``."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json
from steadytrain.cli.options import (
    Json,
    LabelColumn,
    LabelsFlag,
    NetworkOptions,
    PathColumn,
    Root,
    SplitColumn,
    ZipNames,
)
from steadytrain.errors import InputError
from steadytrain.files import replacing

if TYPE_CHECKING:
    from steadytrain.training.loop.frozen import FrozenImages

ENDINGS = (".npy", ".parquet")
ROWS = 4096
"""Rows that are written together."""


def embed(
    data: str,
    /,
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"))],
    root: Root = None,
    labels: LabelsFlag = None,
    path_column: PathColumn = None,
    label_column: LabelColumn = (),
    split_column: SplitColumn = None,
    zip_names: ZipNames = None,
    network: NetworkOptions = NetworkOptions(),  # noqa: B008 - frozen
    json: Json = False,
) -> None:
    """Write the features of images by a frozen network: for search, clustering, or a model of your own.

    Features are what the network's classifier is given, of the image as an evaluation crops it. They are computed once
    and kept in the cache: a command that was stopped goes on where it was, and steady finetune --train probe, with the
    same network on the same images, starts from them.

    Args:
        data: A .rec, or whatever steady pack takes; of a source with splits its training images, then those that
            validate.
        out: OUT.npy: float32 [N, D], and OUT.csv beside it with the name and the label of each row. OUT.parquet:
            columns name, label and embedding (needs pyarrow).

    Examples:
        steady embed photos/ -o photos.npy
        steady embed photos.rec --model timm/vit_small_patch14_dinov2.lvd142m -o photos.parquet
        steady embed photos/ --weights runs/a -o photos.npy
    """
    from steadytrain.cli.check import open_images

    if out.suffix.lower() not in ENDINGS:
        raise InputError(f"-o {out} ends in {out.suffix or 'nothing'}: name it {' or '.join(ENDINGS)}")
    if not out.parent.is_dir():
        raise InputError(f"-o is {out}: there is no folder {out.parent}")
    beside = out.with_suffix(".csv")
    is_read = beside.resolve() in (Path(place).resolve() for place in (data, labels) if place)
    if out.suffix.lower() == ".npy" and beside.exists() and (is_read or not out.exists()):  # it is of no earlier call
        raise InputError(f"{beside} is there, and -o {out} would replace it: choose another name")
    places: dict[str, Any] = {"root": root, "labels": labels, "path_column": path_column}
    places |= {"label_column": label_column, "split_column": split_column, "zip_names": zip_names}

    with open_images(data, network, places) as images:
        n, columns = _write(out, images)
        model, path = images.trained.title, str(out)
    note(f"wrote {out}: {n:,} x {columns:,}, by {model}")
    if json:
        print_json({"path": path, "n": n, "features": columns, "model": model})


def _write(out: Path, images: FrozenImages) -> tuple[int, int]:
    """Write the features, part by part, as the file's ending says; return rows and columns."""
    tables = [table.values for table in images.tables()]
    shape = sum(map(len, tables)), tables[0].shape[1]
    if out.suffix.lower() == ".parquet":
        _write_parquet(out, images, tables)
        return shape
    import numpy as np

    with replacing(out) as part, part.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in _blocks(tables):
            file.write(block.astype("<f4", copy=False).tobytes())
        with part.with_name(out.with_suffix(".csv").name).open("w", newline="", encoding="utf-8") as beside:
            writer = csv.writer(beside, lineterminator="\n")
            writer.writerow(["name", "label"])
            writer.writerows(zip(images.names(), _labels(images), strict=True))
    return shape


def _blocks(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield mapped tables some rows at a time: what was read is let go of."""
    for table in tables:
        for first in range(0, len(table), ROWS):
            yield table[first : first + ROWS]
            getattr(table._mmap, "madvise", id)(4)  # MADV_DONTNEED, on Linux as on macOS


def _labels(images: FrozenImages) -> Iterator[str]:
    """Yield the name of each image's class; of several labels, those that it has, with semicolons between."""
    for part in images.parts:
        names, labels = part.class_list, part.labels
        for label in labels:
            if labels.ndim == 1:
                yield names[int(label)] if float(label).is_integer() and 0 <= label < len(names) else f"{label:g}"
            else:
                yield ";".join(name for name, value in zip(names, label.tolist(), strict=False) if value > 0)


def _write_parquet(out: Path, images: FrozenImages, tables: Sequence[Any]) -> None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise InputError("a .parquet needs pyarrow: pip install pyarrow, or name the file .npy") from error
    columns = tables[0].shape[1]
    kind = pa.list_(pa.float32(), columns)
    schema = pa.schema([("name", pa.string()), ("label", pa.string()), ("embedding", kind)])
    names, labels = images.names(), _labels(images)
    with replacing(out) as part, parquet.ParquetWriter(part, schema) as writer:
        for block in _blocks(tables):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), columns)
            text = [pa.array(list(islice(cells, len(block))), pa.string()) for cells in (names, labels)]
            writer.write_batch(pa.record_batch([*text, values], schema=schema))
