"""``steady check``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.data.checking.findings import Report
    from steadytrain.data.checking.records import Examined


MOST_LOST = 10
_SHARD = r"(-\d+-of-\d+)?"


def check(
    *paths: Annotated[
        str,
        Parameter(
            name="PATH...",
            required=True,
            help="A .rec, or whatever steady pack takes: a folder of classes, a .lst, an archive. Several .rec are "
            "looked at one by one, and for images that are in two of them; several of the others as one set.",
        ),
    ],
    val: Annotated[
        Path | None,
        Parameter(
            help="Validation images, to find those that are in PATH too; for OUT-train.rec, OUT-val.rec is looked at."
        ),
    ] = None,
    root: Annotated[Path | None, Parameter(help="The folder that the paths of a .lst or a table start from.")] = None,
    labels: Annotated[
        Path | None, Parameter(help="A file of labels, for images that lie in no folders of classes.")
    ] = None,
    no_decode: Annotated[
        bool, Parameter(negative="", help="Look at framing, headers, index and card alone; of a folder at names.")
    ] = False,
    index: Annotated[bool, Parameter(negative="", help="Write a lost or wrong .idx.")] = False,
    salvage: Annotated[
        Path | None, Parameter(help="Write the sound records into a new OUT.rec, OUT.idx and OUT.json.")
    ] = None,
    force: Annotated[
        bool, Parameter(negative="", help="With --index: also where the index is good; with --salvage: replace OUT.")
    ] = False,
    workers: Annotated[int | None, Parameter(help="Processes to decode with (default: one for each core).")] = None,
    json: Annotated[bool, Parameter(negative="", help="Print every finding, as one JSON document.")] = False,
) -> int:
    """What is wrong with images or records, where, and what to do about it; 1 if there is an error.

    Every frame, header and image is read; nothing is changed unless --index or --salvage asks for it. What is an error,
    what a warning, and what becomes of it is told with each.

    Examples
    --------
    steady check photos-train.rec
    steady check photos/ --json
    steady check photos-*.rec
    steady check old.rec --index
    steady check torn.rec --salvage whole
    """
    import json as json_module
    import shutil

    from steadytrain.cli.verdict import MOST, text
    from steadytrain.errors import InputError
    from steadytrain.machine.facts import cores

    if workers is not None and not 1 <= workers <= 1024:
        raise InputError(f"--workers is {workers}; it must be from 1 to 1024")
    options: dict[str, Any] = {
        "decode": not no_decode,
        "workers": workers or cores(),
        "most": None if json or salvage else MOST,
    }
    if salvage and len(paths) > 1:
        raise InputError(f"--salvage takes one record file, and {len(paths)} are given: give one")
    places = {"root": root, "labels": labels}
    documents: list[dict[str, Any]] = []
    code = 0
    for report, examined in _examined(paths, val, places, options, writes=index or salvage is not None):
        if not json:
            print("\n" * bool(documents) + text(report, width=shutil.get_terminal_size().columns), flush=True)
        written = _write(examined, index, salvage, force, options["workers"]) if examined else {}
        documents.append({**report.to_dict(), "written": written})
        code = max(code, _exit_code(report, written))
    if json:
        print(json_module.dumps(documents[0] if len(documents) == 1 else documents, indent=2))
    return code


def _examined(
    paths: Sequence[str], val: Path | None, places: dict[str, Path | None], options: dict[str, Any], *, writes: bool
) -> Iterator[tuple[Report, Examined | None]]:
    """Record files one by one; anything else as one set, which nothing can be written of."""
    from steadytrain.data.sources.filenames import split_of
    from steadytrain.errors import InputError

    paths = [file for one in paths for file in _files(one)]
    if all(_is_records(Path(one)) for one in paths):
        for name, place in places.items():
            if place is not None:
                raise InputError(f"--{name} goes with images, and {paths[0]} is a record file: drop it")
        before: list[Examined] = []
        for one in paths:
            alike = [other for other in before if split_of(other.path.name) == split_of(Path(one).name)]
            examined = _records(Path(one), val, {**options, "before": alike})
            before.append(examined)
            yield examined.report, examined
    elif writes:
        raise InputError(f"--index and --salvage are for a .rec, and {paths[0]} is none: drop them")
    else:
        yield _source(paths, val, {**places, **options}), None


def _files(name: str) -> list[str]:
    """The record files that a pattern stands for; any other name as it is. Raises DataError where one is missing."""
    from steadytrain.data.recordio.card import record_files

    files = record_files(name) if name.endswith(".rec") else []
    return [str(path) for path in files] if len(files) > 1 else [name]


def _is_records(path: Path) -> bool:
    """Whether a path is to be read as a record file: by its name, or by how it begins."""
    from steadytrain.data.recordio.framing import MAGIC
    from steadytrain.errors import DataError

    if not path.is_file() or path.suffix.lower() == ".rec":
        return path.is_file()
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC.to_bytes(4, "little")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _records(path: Path, val: Path | None, options: dict[str, Any]) -> Examined:
    from steadytrain.data.checking.records import examine_records
    from steadytrain.errors import InputError

    if val is not None and not val.is_file():
        raise InputError(f"--val is {val}: give a .rec, as {path} is one")
    others = _beside(path) if val is None else [val]
    others = others if options["decode"] else []
    with _progress(path.name, unit="MB") as advance:
        return examine_records(
            path, others=others, progress=lambda done, total: advance(-(-done // 10**6), -(-total // 10**6)), **options
        )


def _beside(path: Path) -> list[Path]:
    """The record files of other splits that were packed with a training set, in shards or not."""
    name = re.fullmatch(rf"(.+)-train{_SHARD}", path.stem)
    if name is None:
        return []
    other = re.compile(rf"{re.escape(name[1])}-(val|test){_SHARD}")
    return sorted(one for one in path.parent.glob("*.rec") if other.fullmatch(one.stem))


def _source(paths: Sequence[str], val: Path | None, options: dict[str, Any]) -> Report:
    from steadytrain.cli.console import note
    from steadytrain.data.checking.sources import examine_source

    what = Path(paths[0]).name or paths[0] if len(paths) == 1 else f"{len(paths)} sources"
    with _progress(what) as advance:
        return examine_source(paths, val=val, progress=advance, say=note, **options)


@contextmanager
def _progress(what: str, unit: str = "images") -> Iterator[Callable[[int, int], object]]:
    """Progress that shows once there is some: nothing for what turns out to be a file of another kind."""
    from steadytrain.cli.console import Advance, progress

    with ExitStack() as stack:
        shown: list[Advance] = []

        def advance(done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(progress(f"checking {what}", total, unit=unit)))
            shown[0](done, total)

        yield advance


def _write(examined: Examined, index: bool, salvage: Path | None, force: bool, workers: int) -> dict[str, Any]:
    """Write what was asked for, and say what was written."""
    from steadytrain.cli.console import note, progress
    from steadytrain.data.checking.salvage import salvage as salvage_records
    from steadytrain.data.checking.salvage import write_index
    from steadytrain.data.packing.pack import record_path

    written: dict[str, Any] = {}
    if index:
        path = write_index(examined, force=force)
        note(f"wrote {path}" if path else "the index is good: it stays as it is (--force writes it anew)")
        written["index"] = None if path is None else str(path)
    if salvage is not None:
        with progress("salvaging", 0) as shown:
            done = salvage_records(
                examined, record_path(salvage, examined.path), force=force, workers=workers, progress=shown
            )
        plural, rest = "s" * (done.card.num_images != 1), "; not in it:" if done.lost else ", all there were"
        note(f"wrote {done.path}: {done.card.num_images:,} record{plural}{rest}")
        for one in done.lost[:MOST_LOST]:
            note(f"  {one.name}: {one.reason}")
        if len(done.lost) > MOST_LOST:
            note(f"  and {len(done.lost) - MOST_LOST:,} more; {done.path.with_suffix('.json')} names them all")
        written["salvaged"] = {
            "path": str(done.path),
            "n": done.card.num_images,
            "lost": [one._asdict() for one in done.lost],
        }
    return written


def _exit_code(report: Report, written: dict[str, Any]) -> int:
    """1 for errors, apart from those of an index that was written anew."""
    from steadytrain.data.checking.findings import KINDS

    errors = {kind for kind in report.findings.counts if KINDS[kind].severity == "error"}
    if written.get("index"):
        errors = {kind for kind in errors if not kind.startswith("index-")}
    return int(bool(errors))
