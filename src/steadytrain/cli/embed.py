"""``steady embed``."""

from __future__ import annotations

import csv
import mmap
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json
from steadytrain.cli.options import Json, NetworkOptions, PlaceOptions
from steadytrain.errors import InputError
from steadytrain.files import replacing
from steadytrain.format import printable

if TYPE_CHECKING:
    from steadytrain.training.loop.frozen import FrozenImages

ENDINGS = (".npy", ".parquet")
ROWS = 4096
"""Rows of features that are copied to the file at a time."""


def embed(
    data: str,
    /,
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"))],
    places: PlaceOptions = PlaceOptions(),  # noqa: B008 - frozen
    network: NetworkOptions = NetworkOptions(),  # noqa: B008 - frozen
    json: Json = False,
) -> None:
    """Write the features of images by a frozen network: for search, clustering, or a model of your own.

    Features are the input of the network's classifier; each image is cropped as in an evaluation. They are computed
    once and kept in the cache: a command that was stopped continues where it was, and steady finetune --train probe,
    with the same network on the same images, starts from them.

    Args:
        data: A .rec, or whatever steady pack takes. Where it has splits: the training images, then the validation
            images.
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
    if (is_parquet := out.suffix.lower() == ".parquet") and find_spec("pyarrow") is None:
        raise InputError("a .parquet needs pyarrow: pip install pyarrow, or name the file .npy")
    if not out.parent.is_dir():
        raise InputError(f"-o is {out}: there is no folder {out.parent}")
    table = out.with_suffix(".csv")
    is_input = table.resolve() in (Path(path).resolve() for path in (data, places.labels) if path)
    # With an OUT.npy beside it, an OUT.csv is an earlier call's and may be replaced; alone, it is the user's.
    if not is_parquet and table.exists() and (is_input or not out.exists()):
        raise InputError(f"{table} is there, and -o {out} would replace it: choose another name")
    with open_images(data, network, vars(places)) as images:
        tables = [table.values for table in images.tables()]
        n, columns = shape = sum(map(len, tables)), tables[0].shape[1]
        (_write_parquet if is_parquet else _write_npy)(out, images, tables, shape)
        model, path = images.trained.title, str(out)
    note(f"wrote {out}: {n:,} x {columns:,}, by {model}")
    if json:
        print_json({"path": path, "n": n, "features": columns, "model": model})


def _write_npy(out: Path, images: FrozenImages, tables: Sequence[Any], shape: tuple[int, int]) -> None:
    """Write the array block by block, since it may be larger than the memory, and the table of its rows."""
    import numpy as np

    with replacing(out) as part, part.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for block in _blocks(tables):
            file.write(block.astype("<f4", copy=False).tobytes())
        # In the same folder as the part, it takes its place together with it.
        form: dict[str, Any] = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}  # as files are named
        with part.with_name(out.with_suffix(".csv").name).open("w", **form) as table:
            writer = csv.writer(table, lineterminator="\n")
            writer.writerow(["name", "label"])
            writer.writerows(zip(images.names(), _labels(images), strict=True))


def _blocks(tables: Iterable[Any]) -> Iterator[Any]:
    """Yield mapped tables some rows at a time; after each block its pages may leave the memory."""
    for table in tables:
        for first in range(0, len(table), ROWS):
            yield table[first : first + ROWS]
            if hasattr(mmap, "MADV_DONTNEED"):
                table._mmap.madvise(mmap.MADV_DONTNEED)


def _labels(images: FrozenImages) -> Iterator[str]:
    """Yield each image's class by name, or the number where it has no name; several labels with semicolons between."""
    for part in images.parts:
        names, labels = part.class_list, part.labels
        for label in labels:
            if labels.ndim == 1:
                yield names[int(label)] if float(label).is_integer() and 0 <= label < len(names) else f"{label:g}"
            else:
                yield ";".join(name for name, value in zip(names, label.tolist(), strict=False) if value > 0)


def _write_parquet(out: Path, images: FrozenImages, tables: Sequence[Any], shape: tuple[int, int]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([("name", pa.string()), ("label", pa.string()), ("embedding", pa.list_(pa.float32(), shape[1]))])
    names, labels = map(printable, images.names()), map(printable, _labels(images))
    with replacing(out) as part, parquet.ParquetWriter(part, schema) as writer:
        for block in _blocks(tables):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), shape[1])
            text = [pa.array(list(islice(cells, len(block))), pa.string()) for cells in (names, labels)]
            writer.write_batch(pa.record_batch([*text, values], schema=schema))
