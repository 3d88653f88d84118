"""``steady check``: the verdict on images or records, what was found, and what to do about it."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text, progress, progress_once_known
from steadytrain.cli.options import GroupBy, NetworkOptions, PlaceOptions, WorkersFlag, refuse_flags
from steadytrain.errors import DataError, InputError, read_errors
from steadytrain.files import open_text, replace_file
from steadytrain.format import clean, count, few, percent, printable, text_table, wrap
from steadytrain.format import size as bytes_text
from steadytrain.machine.facts import cores
from steadytrain.run import Run

if TYPE_CHECKING:
    from steadytrain.data.checking.findings import Finding, Report
    from steadytrain.data.checking.records import Examined
    from steadytrain.data.sources.columns import ColumnNames
    from steadytrain.training.features.suspects import Suspects
    from steadytrain.training.loop.frozen import FrozenImages

MAX_LOST, MAX_SHOWN, MAX_EQUAL, MAX_CLASSES, MAX_PICTURES, MAX_SAMPLE, MAX_PAIRS = 10, 20, 3, 8, 200, 200, 6
_SHARD = r"(-\d+-of-\d+)?"


def check(
    *paths: Annotated[str, Parameter(name="PATH", required=True)],
    val: Path | None = None,
    lookup: PlaceOptions = PlaceOptions(),  # noqa: B008 - frozen
    no_decode: bool = False,
    near: bool = False,
    index: bool = False,
    salvage: Path | None = None,
    suspects: bool = False,
    out: Annotated[Path | None, Parameter(name=("--csv", "-o"))] = None,
    leave_out: Path | None = None,
    group_by: GroupBy = None,
    network: NetworkOptions = NetworkOptions(),  # noqa: B008 - frozen
    force: bool = False,
    workers: WorkersFlag = None,
    json: bool = False,
) -> int:
    """Find what is wrong with images or records, where, and what to do about it; 1 if there is an error.

    Every frame, header and image is read. Nothing is changed without --index or --salvage. Each finding says how severe
    it is, and what happens to the image.

    Args:
        paths: A .rec, or whatever steady pack takes: a folder of classes, a .lst, an archive. Several .rec are checked
            one by one, and for images that are in two of them; other sources count as one set.
        val: Validation images, to find those that are also in PATH. For OUT-train.rec, OUT-val.rec is the default.
        no_decode: Check only framing, headers, index and card; of a folder only names.
        near: Also find images that look alike: compressed again, resized or mirrored.
        index: Write a missing or wrong .idx.
        salvage: Write the intact records into a new OUT.rec, with index, card and list.
        suspects: Also find labels that may be wrong: a classifier of a frozen network's features, fitted to the images
            of the other four of five folds, believes another class.
        out: With --suspects: a CSV file of them, and beside it a page (.html) with their pictures and the nearest
            images of both classes. With --leave-out: the table to write.
        leave_out: Such a CSV file, from which you have deleted the lines of labels that are right: write a table (-o)
            of all other images, which steady pack and steady train take.
        group_by: With --suspects: folder, a column or a regular expression; images of one group are in one fold.
        force: With --index: also where the index is good; with --salvage: replace OUT.
        workers: Processes to decode with (default: one for each core).
        json: Print every finding, as one JSON document.

    Examples:
        steady check photos-train.rec
        steady check photos/ --json
        steady check photos-*.rec
        steady check photos/ --near
        steady check photos/ --suspects -o suspects.csv
        steady check photos/ --leave-out suspects.csv -o clean.csv
        steady check old.rec --index
        steady check torn.rec --salvage whole
    """
    if salvage and len(paths) > 1:
        raise InputError(f"--salvage takes one record file, and {len(paths)} are given: give one")
    if near and no_decode:
        raise InputError("--near compares images, and --no-decode does not look at them: drop one of the two")
    if (suspects or leave_out) and len(paths) > 1:
        runs = [path for path in paths if Run.is_run(path)]
        instead = f": a run is --weights {runs[0]}" if runs else ": give one"
        raise InputError(f"--suspects and --leave-out take one source, and {len(paths)} are given{instead}")
    if not suspects and (flags := [f.name for f in fields(network) if getattr(network, f.name) != f.default]):
        raise InputError(f"--{flags[0].replace('_', '-')} is for the network of --suspects: add that, or drop it")
    if group_by is not None and not (suspects or leave_out):
        raise InputError(f"--group-by {group_by} keeps images in one fold of --suspects: add that")
    if out is not None and not (suspects or leave_out):
        raise InputError("-o writes what --suspects or --leave-out find: add one of them")
    if out is not None and out.suffix.lower() != ".csv":
        raise InputError(f"-o {out} ends in {out.suffix or 'nothing'}: it is a CSV file, name it so (.csv)")
    if out is not None and not out.parent.is_dir():
        raise InputError(f"-o is {out}: there is no folder {out.parent}")
    if out is not None and out.resolve() in (Path(p).resolve() for p in (paths[0], lookup.labels, leave_out) if p):
        raise InputError(f"-o {out} is what is read: choose another name")
    from steadytrain.data.checking.findings import KINDS
    from steadytrain.data.storage.sources import local_sources
    from steadytrain.data.storage.store import is_uri

    options: dict[str, Any] = {
        "decode": not no_decode,
        "near": near,
        "workers": workers or cores(),
        "most": None if json or salvage else MAX_SHOWN,
    }
    places = dict(vars(lookup))
    if not (index or salvage):
        refuse_flags("{} is for --index and --salvage: add one of them, or drop it", force=force)
    if leave_out is not None:
        if suspects or out is None:
            raise InputError("--leave-out FILE writes a table: name it with -o, and drop --suspects")
        checks = {"val": val, "near": near, "no_decode": no_decode, "index": index, "salvage": salvage, "json": json}
        refuse_flags("--leave-out writes a table, and checks nothing: drop {}", **checks)
        _write_rest(paths[0], leave_out, out, places)
        return 0
    documents: list[dict[str, Any]] = []
    code = 0
    writes = index or salvage is not None
    if writes and any(map(is_uri, paths)):
        raise InputError("--index and --salvage write beside a .rec, and not into a store: download it first")
    with local_sources(paths, note) as names:
        for report, examined in _reports(names, val, places, options, writes=writes):
            found: dict[str, Any] = {}
            if suspects:
                try:
                    report, found = _with_suspects(report, paths[0], places | {"group_by": group_by}, network, out)
                except DataError as error:
                    if report.is_usable:
                        raise
                    note(f"--suspects found nothing out, and wrote nothing: {error}")
            if not json:
                print_text("\n" * bool(documents) + report_text(report, width=shutil.get_terminal_size().columns))
            written = _write(examined, index, salvage, force, options["workers"]) if examined else {}
            documents.append({**report.to_dict(), "written": written, **found})
            errors = {kind for kind in report.findings.counts if KINDS[kind].severity == "error"}
            if any(not (written.get("index") and kind.startswith("index-")) for kind in errors):
                code = 1
    if json:
        print_json(documents[0] if len(documents) == 1 else documents)
    return code


def _reports(
    paths: Sequence[str], val: Path | None, places: dict[str, Any], options: dict[str, Any], *, writes: bool
) -> Iterator[tuple[Report, Examined | None]]:
    """Examine record files one by one; anything else as one set, of which nothing can be written."""
    from steadytrain.data.checking.records import examine_records
    from steadytrain.data.checking.sources import examine_source
    from steadytrain.data.filenames import split_of
    from steadytrain.data.recordio.card import record_files

    names: list[str] = []
    for pattern in paths:  # one may stand for several record files
        files = record_files(pattern) if pattern.endswith((".rec", ".rec}")) else []
        names += map(str, files) if len(files) > 1 else [pattern]
    if all(_is_records(Path(name)) for name in names):
        refuse_flags(f"{{}} goes with images, and {names[0]} is a record file: drop it", **places)
        done: list[Examined] = []
        for name in names:
            path = Path(name)
            if val is not None and not val.is_file():
                raise InputError(f"--val is {val}: give a .rec, as {path} is one")
            others: list[Path] = []
            train = re.fullmatch(rf"(.+)-train{_SHARD}", path.stem)
            if options["decode"] and val is not None:
                others = [val]
            elif options["decode"] and train is not None:  # splits that were packed with this one, in shards or not
                split = re.compile(rf"{re.escape(train[1])}-(val|test){_SHARD}")
                others = sorted(other for other in path.parent.glob("*.rec") if split.fullmatch(other.stem))
            before = [other for other in done if split_of(other.path.name) == split_of(path.name)]
            with progress_once_known(f"checking {path.name}", unit="MB") as advance:

                def show(done: int, total: int) -> None:
                    advance(-(-done // 10**6), -(-total // 10**6))

                examined = examine_records(path, others=others, before=before, progress=show, **options)
            done.append(examined)
            yield examined.report, examined
    elif writes:
        raise InputError(f"--index and --salvage are for a .rec, and {names[0]} is none: drop them")
    else:
        subject = Path(names[0]).name or names[0] if len(names) == 1 else f"{len(names)} sources"
        with progress_once_known(f"checking {subject}") as advance:
            report = examine_source(names, val=val, progress=advance, say=note, **{**places, **options})
        yield report, None


@contextmanager
def open_images(source: str, network: NetworkOptions, places: Mapping[str, Any]) -> Iterator[FrozenImages]:
    """Open images and a frozen network, with progress; ``places``: where paths and labels are."""
    from steadytrain.cli.train import require_licence
    from steadytrain.training.loop.frozen import open_frozen

    def licensed(recipe: Any) -> None:
        require_licence(recipe.model, accepted=network.accept_licence)

    packed, computed = (progress_once_known(what, resumes=True) for what in ("packing images", "features"))
    with packed as packing, computed as advance:
        options: dict[str, Any] = {"require_licence": licensed, "say": note, "packing": packing, "progress": advance}
        with open_frozen(source, network.changes(**places), **options) as images:
            yield images


def _with_suspects(
    report: Report, source: str, places: dict[str, Any], network: NetworkOptions, out: Path | None
) -> tuple[Report, dict[str, Any]]:
    """Add labels that may be wrong to a report; return it and what it says of them as a document."""
    from steadytrain.data.sources.layout import TABLES
    from steadytrain.training.features.series import find_series

    with open_images(source, network, places) as images:
        found = images.find_suspects()
        names, classes, p = list(images.names()), images.data.classes, found.probabilities
        rows: list[dict[str, Any]] = [
            {"path": names[row], "label": classes[label], "suggested": classes[other]}
            | {"p_label": float(p[row, label]), "p_suggested": float(p[row, other])}
            for row, label, other in zip(found.rows, found.labels[found.rows], found.suggested, strict=True)
        ]
        pairs = [(classes[given], classes[other], n) for given, other, n in found.pairs]
        fact = f"{percent(found.answers.top1, 1)} of {len(names):,} agree with a classifier that has not seen the"
        fact += f" image; {count(len(rows), 'label')} may be wrong"
        fact += "" if found.share is None else f" ({percent(found.share, 1)} of all)"
        facts = [f"labels: {fact}"]
        if (series := find_series(images.values, found.labels, names, groups=images.groups)) is not None:
            facts += [f"series: {series.words}; without it, a wrong label of a whole series is not found"]
        if out is not None:
            _write_csv(out, rows, ["path", "label", "suggested", "p_label", "p_suggested"])
            replace_file(
                out.with_suffix(".html"), _suspects_page(report.path, facts, images, found, rows, pairs[:MAX_PAIRS])
            )
            note(f"wrote {out} and {out.with_suffix('.html')}")
    for row in rows:
        detail = f"{row['label']} {row['p_label']:.3f}, {row['suggested']} {row['p_suggested']:.3f}"
        report.findings.add("suspect-label", detail, name=row["path"])
    mixed = few([f"{given} that may be {other} ({n})" for given, other, n in pairs], MAX_PAIRS)
    facts[1:1] = [f"mixed up: {mixed}"] if pairs else []
    file, again = shlex.quote(str(out or "suspects.csv")), shlex.join(["steady", "check", source, *_flags(places)])
    remedies: list[tuple[str, str]] = []
    if rows and not out:
        remedies = [(f"{again} --suspects -o {file}", "shows their pictures, and lists them")]
    if rows and (Path(source).is_dir() or Path(source).suffix.lower() in TABLES):
        why = "after you deleted the lines of labels that are right: writes a table of the other images"
        remedies += [(f"{again} --leave-out {file} -o clean.csv", why)]
    document: dict[str, Any] = {"n": len(rows), "share": found.share, "top1": found.answers.top1}
    document |= {"by_fold": list(found.answers.by_fold), "images": rows}
    document["pairs"] = [{"label": given, "suggested": other, "n": n} for given, other, n in pairs]
    report = replace(report, facts=(*report.facts, *facts), remedies=(*report.remedies, *remedies))
    return report, {"suspects": document}


def _suspects_page(
    path: str,
    facts: Sequence[str],
    images: FrozenImages,
    found: Suspects,
    rows: list[dict[str, Any]],
    pairs: Sequence[tuple[str, str, int]],
) -> str:
    """Return a page of the first suspects, each beside the nearest images of both classes."""
    from steadytrain.reports.mistakes import SuspectImage
    from steadytrain.reports.page import suspects_page

    shown = []
    for row, number, near in zip(rows, found.rows.tolist(), found.nearest(images.values, MAX_PICTURES), strict=False):
        own, other = (None if at is None else images.place(at) for at in near)
        shown.append(SuspectImage(**row, picture=images.place(number), near_label=own, near_suggested=other))
    text = "; ".join(facts)
    lede = f"{text[0].upper()}{text[1:]}. Look at each: a picture may be odd, and its label right."
    return suspects_page(f"Labels of {path} that may be wrong", lede, shown, pairs)


def _flags(places: Mapping[str, Any]) -> list[str]:
    """Return the flags that say where paths and labels are, as they were given."""
    named = {name: value if isinstance(value, tuple) else (value,) for name, value in places.items() if value}
    return [word for name, values in named.items() for v in values for word in (f"--{name.replace('_', '-')}", str(v))]


def _write_rest(source: str, leave_out: Path, out: Path, places: dict[str, Any]) -> None:
    """Write a table of all images of a source but those that a file names."""
    from steadytrain.data.sources.columns import ColumnNames
    from steadytrain.data.sources.find import find_all
    from steadytrain.data.storage.scratch import temporary_scratch

    with read_errors(leave_out), open_text(leave_out, newline="", encoding="utf-8-sig") as file:
        lines = list(csv.DictReader(file))
    if any(not row.get("path") for row in lines):
        raise InputError(f"{leave_out} has no column 'path' with the name of an image in each line")
    gone = {row["path"] for row in lines}
    columns = ColumnNames.of(*(places[name] for name in ("path_column", "label_column", "split_column", "zip_names")))
    with temporary_scratch() as scratch:
        lookup = {"root": places["root"], "labels": places["labels"], "columns": columns}
        listings = find_all([source], **lookup, scratch=scratch, say=note)
    if any(listing.pieces is not None or listing.labels.ndim > 1 for listing in listings):
        raise InputError(f"{source} is no folder or table of image files with one class each: unpack it first")
    if missing := sorted(gone.difference(printable(name) for listing in listings for name in listing.names)):
        raise InputError(f"{leave_out} names {count(len(missing), 'image')} that {source} has not: {few(missing)}")
    names = ((name, printable(name)) for listing in listings for name in listing.names)
    if odd := [shown for name, shown in names if shown != name and shown not in gone]:
        raise InputError(f"a table is UTF-8, and names of {source} are none: rename {few(odd)}")
    heads, further = _read_columns(source, places, columns)
    kept = [
        dict(zip(heads, (path, listing.classes[int(label)], listing.split), strict=True)) | further.get(name, {})
        for listing in listings
        for name, label in zip(listing.names, listing.labels.tolist(), strict=True)
        if printable(name) not in gone
        for path in [os.path.relpath(os.path.join(listing.root, name), out.parent)]  # noqa: PTH118 - a million names
    ]
    is_split = any(listing.split for listing in listings)
    _write_csv(out, kept, [*heads[: 2 + is_split], *dict.fromkeys(name for row in further.values() for name in row)])
    note(f"wrote {out}: {count(len(kept), 'image')}, without the {len(gone):,} of {leave_out}")
    note("images held out of these are easier than new ones: test on images that nobody has chosen (--test)")


def _read_columns(
    source: str, places: dict[str, Any], named: ColumnNames
) -> tuple[tuple[str, ...], dict[str, dict[str, str]]]:
    """Return what a table calls path, label and split, and the other cells of each image by the name of its file.

    Of a source that is no table, or one whose columns have no names, there are none.
    """
    from steadytrain.data.sources.columns import find_columns
    from steadytrain.data.sources.layout import TABLES, flat_splits, look_on_disk
    from steadytrain.data.sources.paths import NamedImages
    from steadytrain.data.sources.rows import JSON_LINES, find_delimiter, read_rows, read_text

    heads: tuple[str, ...] = ("path", "label", "split")
    table, prefixes = Path(places["labels"] or source), None
    if not table.is_file() or table.suffix.lower() not in TABLES:
        return heads, {}
    if places["labels"]:
        folders = flat_splits(look_on_disk(Path(source))).values()
        prefixes = ["", *(f"{folder}/" for paths in folders for folder in paths if folder)]
    images = NamedImages(Path(places["root"] or (source if prefixes else table.parent)), table=table, prefixes=prefixes)
    delimiter = find_delimiter([line for line in islice(read_text(table, table), MAX_SAMPLE) if line.strip()])
    rows = list(read_rows(table, table, delimiter))
    options: dict[str, Any] = {"numbered": rows, "is_headed": delimiter == JSON_LINES, "named": named}
    options["is_file"] = lambda name: images.find(name) is not None
    found = find_columns([row for _, row in rows[:MAX_SAMPLE]], **options)
    if not (names := [name.strip() for name in found.names]):
        return heads, {}
    places_of = found.path, found.labels[0] if len(found.labels) == 1 else None, found.split
    heads = tuple(head if at is None else names[at] for head, at in zip(heads, places_of, strict=True))
    left = sorted(set(range(found.width)).difference(places_of, found.labels))
    files = images.locate([found.cells(row)[0] for _, row in rows[1:]])[0]
    return heads, {file: {names[i]: row[i] for i in left} for file, (_, row) in zip(files, rows[1:], strict=True)}


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, text.getvalue())


def _is_records(path: Path) -> bool:
    """Return whether a path is to be read as a record file: by its name, or by how it begins."""
    from steadytrain.data.recordio.framing import MAGIC

    if not path.is_file() or path.suffix.lower() == ".rec":
        return path.is_file()
    with read_errors(path), path.open("rb") as file:
        return file.read(4) == MAGIC.to_bytes(4, "little")


def _write(examined: Examined, index: bool, salvage: Path | None, force: bool, workers: int) -> dict[str, Any]:
    """Write what was asked for, and say what was written."""
    from steadytrain.data.checking.salvage import salvage as salvage_records
    from steadytrain.data.checking.salvage import write_index
    from steadytrain.data.packing.pack import record_path

    written: dict[str, Any] = {}
    if index:
        path = write_index(examined, force=force)
        note(f"wrote {path}" if path else "the index is good: it stays as it is (--force writes it again)")
        written["index"] = None if path is None else str(path)
    if salvage is not None:
        out = record_path(salvage, examined.path)
        with progress("salvaging", 0) as advance:
            salvaged = salvage_records(examined, out, force=force, workers=workers, progress=advance)
        all_lost = salvaged.card.rejected
        omissions = "; not in it:" if all_lost else ", all there were"
        note(f"wrote {salvaged.path}: {count(salvaged.card.num_images, 'record')}{omissions}")
        for lost in all_lost[:MAX_LOST]:
            note(f"  {lost.name}: {lost.reason}")
        if len(all_lost) > MAX_LOST:
            note(f"  and {len(all_lost) - MAX_LOST:,} more; {salvaged.path.with_suffix('.json')} names them all")
        written["salvaged"] = {
            "path": str(salvaged.path),
            "n": salvaged.card.num_images,
            "lost": [lost._asdict() for lost in all_lost],
        }
    return written


def report_text(report: Report, *, width: int = 80) -> str:
    """Format a report in lines of at most ``width`` columns; paths and commands are not broken."""
    images = report.num_images
    subject = report.what
    if images:
        subject = f"{subject}, {count(images, 'image')}" if report.of_files else f"{images:,} {subject}"
    tally = report.findings
    errors, warnings = tally.num_kinds("error"), tally.num_kinds("warning")
    kinds = ", ".join(count(n, word) for n, word in ((errors, "error"), (warnings, "warning")) if n)
    num_places = tally.num("error") + tally.num("warning")
    places = f" in {num_places:,} places" if num_places > errors + warnings else ""
    verdict = f"{count(errors + warnings, 'finding')}{places} ({kinds})" if kinds else "fine"
    lines = [f"{verdict}: {clean(report.path)}: {subject}", *_facts(report, width)]
    for kind, n, findings in report.findings.by_kind():
        lines += ["", *_kind(kind, n, findings[:MAX_SHOWN], width, files=report.of_files)]
    if report.remedies:
        lines += ["", "to do"]
    for command, why in report.remedies:
        lines += [f"  {clean(command)}", *wrap(why, width, "    ")]
    return "\n".join(lines)


def _facts(report: Report, width: int) -> Iterator[str]:
    """Yield what is in the images or records."""
    facts = [bytes_text(report.bytes)] if report.bytes else []
    if report.num_sound < report.num_images:
        facts.append(f"{report.num_sound:,} of {report.num_images:,} can be used")
    if report.formats:
        facts.append(", ".join(f"{n:,} {name}" for name, n in report.formats.items()))
    if report.width and report.height:
        facts.append(f"{_range(report.width)} wide, {_range(report.height)} high")
    yield from wrap("; ".join(facts), width, "  ")
    if classes := report.classes:
        kind = ("label", "labels") if report.is_multi_label else ("class", "classes")
        text = count(len(classes), *kind) + (f" of {report.split}" if report.split else "")
        if len(classes) > MAX_CLASSES:
            text += f", {_range((min(classes.values()), max(classes.values())))} images each"
        else:
            text += ": " + ", ".join(f"{name} {n:,}" for name, n in classes.items())
        yield from wrap(text, width, "  ")
    for fact in report.facts:
        yield from wrap(fact, width, "  ")


def _kind(kind: str, n: int, findings: list[Finding], width: int, *, files: bool) -> Iterator[str]:
    """Yield one kind of finding: a heading, what becomes of it, and a line for each, or for many with one detail."""
    from steadytrain.data.checking.findings import KINDS

    about = KINDS[kind]
    times = f" ({n:,})" if n > 1 else ""
    yield from wrap(f"{about.severity}: {about.title}{times}", width, "", "    ")
    yield from wrap(about.packed if files and about.packed else about.then, width, "  ")
    if any(finding.offset is not None for finding in findings):
        # By byte, record and id, right-aligned, with what is known of each behind.
        rows, details = [("byte", "record", "id")], [""]
        for finding in findings:
            byte, record = ("-" if n is None else f"{n:,}" for n in (finding.offset, finding.record))
            rows.append((byte, record, "-" if finding.id is None else str(finding.id)))
            details.append(": ".join(part for part in (finding.name, finding.detail) if part))
        for line, detail in zip(text_table(rows, right=range(3)).splitlines(), details, strict=True):
            yield from wrap(detail, width, f"    {line}  ", " " * (len(line) + 6)) or [f"    {line}"]
    else:
        names: dict[str, list[str]] = {}
        for finding in findings:
            names.setdefault(finding.detail, []).append(finding.name or "")
        for detail, equal in names.items():
            for name in [few(equal, MAX_EQUAL)] if detail and len(findings) > MAX_EQUAL else equal:
                yield from wrap(": ".join(filter(None, (name, detail))), width, "    ", "      ")
    if n > len(findings):
        yield f"    and {n - len(findings):,} more; --json names them all"


def _range(pair: tuple[int, int]) -> str:
    return f"{pair[0]:,}" if pair[0] == pair[1] else f"{pair[0]:,} to {pair[1]:,}"
