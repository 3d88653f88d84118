"""``steady fetch``: public data sets by name, fetched, checked and packed with their known splits."""

from __future__ import annotations

import json as json_module
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text, progress, progress_once_known
from steadytrain.cli.options import RepeatedFlag, WorkersFlag
from steadytrain.errors import InputError
from steadytrain.format import count, number, size, text_table

if TYPE_CHECKING:
    from steadytrain.cli.console import ReportProgress
    from steadytrain.data.packing.pack import PackedFile


def fetch(
    name: str | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    mirror: RepeatedFlag = (),
    shorter_side: int | None = None,
    workers: WorkersFlag = None,
    force: bool = False,
    json: bool = False,
) -> None:
    """Fetch a public data set, check it, and pack it with its known split: NAME-train.rec, NAME-val.rec.

    Without a name: list the data sets, with size, images, classes, licence and source. After Ctrl-C, a kill or a lost
    connection, the same command resumes.

    Args:
        name: The data set (steady fetch lists them).
        output: The folder to write to (default: one of the data set's name). Files as they came lie in its folder
            downloads, which may be deleted afterwards.
        mirror: The address of a folder that has the files, tried before their own; may be given several times.
        shorter_side: Scale larger images down to this many pixels on their shorter side; smaller ones stay.
        workers: Number of processes that encode (default: one for each core).
        force: Pack again over existing record files.
        json: Print the data sets, or the cards of what was packed, as one JSON document.

    Examples:
        steady fetch
        steady fetch imagenette-160
        steady fetch caltech256 -o data/caltech256 --shorter-side 256
    """
    if name is None:
        if output or mirror or force or workers or shorter_side:
            raise InputError("no data set named: steady fetch NAME (steady fetch alone lists them)")
        _print_catalogue(json=json)
        return
    from steadytrain.data.fetching import prepare

    with progress_once_known(f"packing {name}", resumes=True) as packed, ExitStack() as stack:
        files = prepare.fetch(
            name,
            output or name.lower(),
            mirrors=mirror,
            shorter_side=shorter_side,
            workers=workers,
            force=force,
            advance=prepare.FetchProgress(fetched=_Fetched(stack), packed=packed),
            say=note,
        )
    if json:
        print_json([{"path": str(f.path), **json_module.loads(f.card.to_json())} for f in files])
    else:
        print_text("\n".join(_line(file) for file in files))


class _Fetched:
    """Shows how far each file is, in megabytes, with the rate and the time left; one that is there is not shown."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._name = ""
        self._began = 0
        self._advance: ReportProgress | None = None

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self._name:
            self._stack.close()
            self._name, self._began, self._advance = name, done, None
            return
        if self._advance is None:
            left = max(1, round((total - self._began) / 1e6))
            self._advance = self._stack.enter_context(progress(f"fetching {name}", left, unit="MB"))
        self._advance(round((done - self._began) / 1e6))


def _line(file: PackedFile) -> str:
    card = file.card
    images, classes = count(card.num_images, "image"), count(len(card.classes), "class", "classes")
    return f"{file.path}: {images} of {classes}, {size(card.bytes)}, sha256 {card.digest[:12]}"


def _print_catalogue(*, json: bool) -> None:
    """List the data sets."""
    from steadytrain.data.fetching.catalogue import catalogue

    sets = list(catalogue().values())
    if json:
        print_json(
            [{**vars(entry), "files": [vars(file) for file in entry.files], "bytes": entry.bytes} for entry in sets]
        )
        return
    rows = [
        [entry.name, size(entry.bytes), number(entry.images), number(entry.classes), entry.licence, entry.source]
        for entry in sets
    ]
    rows.append(
        ["imagenet", "154.7 GB", number(1_331_167), number(1000), "its own", "https://image-net.org (to members)"]
    )
    table = text_table([["name", "size", "images", "classes", "licence", "source"], *rows])
    if max(map(len, table.splitlines())) > shutil.get_terminal_size().columns:
        heads = ["name", "size", "images", "classes", "licence"]
        table = text_table([heads, *(row[:5] for row in rows)])
    print_text(table + "\n\nsteady fetch NAME fetches and packs one; steady fetch --json says where each is from")
