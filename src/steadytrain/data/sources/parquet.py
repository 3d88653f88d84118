"""Parquet and Arrow files with images in them, as Hugging Face's ``datasets`` publishes and saves them.

A column holds images, as bytes or a struct of bytes and a path; another their labels. Names of classes stand in the
schema's metadata (``huggingface``), else on the data set's card, ``README.md``.
"""

from __future__ import annotations

import contextlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from steadytrain.data.filenames import is_image, missing_shards, order_splits, split_of
from steadytrain.data.names import Names
from steadytrain.data.sources.archives import is_compressed, open_source, unpack
from steadytrain.data.sources.columns import LABELS, find_columns, plain
from steadytrain.data.sources.labels import class_name, classes_from_texts
from steadytrain.data.sources.layout import NO_CLASSES, read_entries
from steadytrain.data.sources.listing import FileList, Labels, Listing, Pieces
from steadytrain.data.sources.select import take
from steadytrain.data.sources.several import multi_hot
from steadytrain.data.sources.source import COLUMNS, Request, SourceKind
from steadytrain.data.storage.scratch import new_path
from steadytrain.errors import DataError, storage_errors
from steadytrain.format import Say, count, few

_ROWS_AT_ONCE, _SAMPLE = 32, 1000
_MOST_CARD = 4 << 20  # bytes
_IMAGE = re.compile(r"\w*binary\w*|struct<(.*, )?bytes: \w*binary.*>")
_CELL = re.compile(r"((large_)?list<\w+: )?(\w*string\w*|u?int\d+|bool)\b.*|float|double|dictionary<.*")


def find_files(folder: Path) -> list[Path]:
    """Find the Parquet and Arrow files in a folder; none where a folder in it holds images alone, or more of them."""
    files: list[Path] = []
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        folders, names = read_entries(place)
        tables = [name for name in names if re.fullmatch(r"(?!cache-).*\.(parquet|arrow)", name)]
        tables = [name for name in tables if f"{name.rpartition('.')[0]}.tar" not in names]  # which it tells of
        if (tables or place != folder) and sum(map(is_image, names)) > len(tables):
            return []
        files += [place / name for name in tables]
        inner = [place / name for name in reversed(folders) if name.casefold() not in NO_CLASSES]
        waiting += [path for path in inner if not path.is_symlink()]  # which may lead in a circle
    return files


def group_files(paths: Sequence[Path], root: Path, say: Say) -> dict[str, list[Path]]:
    """Group files by the split that their names or folders mention, the training set first.

    Raises:
        DataError: they are several sets, or splits without one to train with.
    """
    groups: dict[str, list[Path]] = {"train": [], "val": [], "test": [], "": []}
    sets: set[str] = set()
    for path in paths:
        folders = path.relative_to(root).parts[:-1]
        groups[next(filter(None, map(split_of, (path.name, *folders[::-1]))), "")].append(path)
        sets.add("/".join(name for name in folders if not split_of(name)))
    splits = {split: group for split, group in groups.items() if group}
    if len(sets) > 1 or (len(splits) > 1 and "train" not in splits):
        listed = few(sorted(sets) if len(sets) > 1 else [path.name for path in paths])
        raise DataError(f"{root} holds several sets, or splits and none to train with ({listed}): give one of them")
    if missing := missing_shards([str(path) for path in paths]):
        say(f"warning: {root}: {count(len(missing), 'file')} of the set missing ({few(missing, 3)}): download it again")
    if len(splits) > 1 and (others := splits.pop("", [])):
        say(f"{root}: left out: {few([path.name for path in others], 3)}, of no split that is known")
    return splits if len(splits) > 1 else {"": list(*splits.values())}


def list_files(request: Request, paths: Sequence[Path], split: str) -> list[Listing]:
    """List the files of a split; their images are written one behind the other, so that each can be read by itself.

    Raises:
        DataError: no pyarrow, damaged files, a row without a label, or columns that cannot be told apart.
    """
    root, named, say = request.where, request.columns, request.say
    types, metadata = next(_rows(paths[0]))
    images = [name for name in types if _IMAGE.fullmatch(types[name]) and named.path in (None, name)]
    image = _choose("--path-column", "images, bytes or a struct of bytes and a path", images, types, paths[0])
    names_of = _classes_of_columns(metadata, paths[0])
    cells = [name for name in types if _CELL.fullmatch(types[name])]
    known = [cell for name in (named.trained, *LABELS) for cell in cells if plain(cell) == name]
    of_classes = [name for name in known if name in names_of][:1] or [name for name in cells if name in names_of]
    likely = known[:1] if named.trained else of_classes or known[:1] or cells
    label = _choose("--label-column", "labels", named.labels or likely, types, paths[0])
    class_names = names_of.get(label, ())
    sample = [["", *map(str, row.values())] for row in islice(_rows(paths[0], cells), _SAMPLE)]
    chosen = replace(named, path=image, labels=(label,), split="none" if split else named.split)
    try:
        table = find_columns([[image, *cells], *sample], group=request.group, named=chosen, is_headed=True)
    except DataError as error:
        raise DataError(f"{paths[0]}: {error}") from None
    told, grouped = ([] if place is None else [table.names[place]] for place in (table.split, table.group))
    names, sizes, texts, used = Names(), array("q"), list[Any](), set[Any]()
    splits, groups = list[str](), Names()

    def write() -> Iterator[bytes]:
        for path in paths:
            for number, row in enumerate(_rows(path, list({image, label, *told, *grouped}))):
                value, where = row[image], f"{path}:{number}"
                data, name = (value["bytes"], value.get("path")) if isinstance(value, dict) else (value, "")
                if name and data is None:
                    raise DataError(f"{where} has an image's path ({name}) and not its bytes: save_to_disk writes them")
                splits.append(table.splits.get(str(row[told[0]]).casefold(), "") if told else split)
                if told and not splits[-1]:
                    raise DataError(f"{where}: {told[0]} is {row[told[0]]}: name its split with --split-column")
                groups.extend(str(row[name]) for name in grouped)
                texts.append(_label_of(row[label], class_names, f"{where}, in the column {label},"))
                names.append(name if name and name not in used else f"{path.name}:{number}")
                used.add(name)
                sizes.append(len(data or b""))
                yield data or b""

    status = [path.stat() for path in paths]
    quiet: Say = say if split in ("", "train") else lambda _: None
    blob = unpack(root, write(), request.scratch, quiet, sum(file.st_size for file in status))
    size, where, label_names = np.array(sizes, np.int64), str(root), tuple[str, ...]()
    pieces = Pieces((str(blob),), np.zeros(len(size), np.int32), np.cumsum(size) - size, size)
    files = FileList(names, size, np.full(len(size), max(file.st_mtime_ns for file in status)), pieces)
    if not texts:
        raise DataError(f"{paths[0]} has no rows: download it again")
    labels: Labels
    classes: Any = request.classes or class_names or None
    if isinstance(texts[0], list):
        (label_names, labels), classes = multi_hot(texts, where=where, classes=classes), ()
        say(f"{where}: several labels per image, in this order: {few(label_names, 20)}")
    else:
        classes, labels = classes_from_texts(texts, classes=classes, where=where, say=say)
    listing = files.listing(range(len(size)), labels, root=root, classes=classes, split=split)
    listing = replace(listing, label_names=label_names, label_column=plain(label), groups=groups or None)
    parts = {part: np.flatnonzero(np.array(splits) == part) for part in dict.fromkeys(splits)}
    return [replace(take(listing, rows), split=part) for part, rows in order_splits(parts).items()]


def is_of_paths(request: Request) -> bool:
    """Return whether a Parquet file is a table of paths: it holds no images."""
    if len(request.paths) != 1 or request.kinds != {"parquet"}:
        return False
    types = next(_rows(request.paths[0]))[0].values()
    return not any(map(_IMAGE.fullmatch, types)) and any("string" in kind for kind in types)


def as_text(path: Path, scratch: Path) -> Path:
    """Write a table in a Parquet file as JSON lines, labels by the names of their classes; return other files as is."""
    if path.suffix.casefold() != ".parquet":
        return path
    types, metadata = next(_rows(path))
    cells = [name for name in types if _CELL.fullmatch(types[name])]
    names_of = {name: names for name, names in _classes_of_columns(metadata, path).items() if name in cells}
    text = new_path(scratch, f"{path.name}.jsonl")
    with storage_errors(text), text.open("w", encoding="utf-8") as file:
        for number, row in enumerate(_rows(path, cells)):
            named = {name: _label_of(row[name], names, f"{path}:{number}") for name, names in names_of.items()}
            file.write(f"{json.dumps(row | named)}\n")
    return text


def _choose(flag: str, what: str, columns: Sequence[str], types: Mapping[str, str], path: Path) -> str:
    if len(columns) == 1 and columns[0] in types:
        return columns[0]
    listed = ", ".join(f"{name} {kind}" for name, kind in types.items())
    raise DataError(f"{path}: {few(columns) or 'no column'} for {what}: give one by {flag} (the columns: {listed})")


def _label_of(value: Any, names: Sequence[str], where: str) -> Any:
    """A label as a text, or a list of several, by the name of its class where there are names."""
    if isinstance(value, list):
        return [_label_of(item, names, where) for item in value]
    if value is None or value != value or value == "" or (names and value == -1):
        raise DataError(f"{where} has no label: take such rows out, or give another column by --label-column")
    if not names or isinstance(value, str):
        return str(value)
    if not 0 <= value < len(names):
        raise DataError(f"{where} has label {value}, beyond its {len(names)} classes: download it again")
    return names[int(value)]


def _classes_of_columns(metadata: bytes | None, path: Path) -> dict[str, tuple[str, ...]]:
    """Names of classes of the columns that have them: by the schema, else by the card above the file."""
    features: dict[str, Any] = {}
    with contextlib.suppress(yaml.YAMLError, AttributeError, TypeError, ValueError, LookupError, RecursionError):
        features = json.loads(metadata)["info"]["features"] if metadata else {}
        cards = [card for folder in path.absolute().parents[:3] if (card := folder / "README.md").is_file()]
        if not any(map(_names_in, features.values())) and cards and cards[0].stat().st_size < _MOST_CARD:
            infos = yaml.safe_load(cards[0].read_text("utf-8", "replace").split("---", 2)[1])["dataset_info"]
            infos = infos if isinstance(infos, list) else [infos]
            infos.sort(key=lambda info: info.get("config_name") in path.parts)
            features = {feature["name"]: feature for info in infos for feature in info["features"]}
    return {column: names for column, feature in features.items() if (names := _names_in(feature))}


def _names_in(feature: Any) -> tuple[str, ...]:
    """The names of classes in the description of a column, as ``datasets`` writes it into schemas and cards."""
    if isinstance(feature, dict):
        names = feature.get("names")
        names = [names[number] for number in sorted(names, key=int)] if isinstance(names, dict) else names
        if isinstance(names, list):
            return tuple(class_name(str(name)) for name in names)
        feature = list(feature.values())
    return next(filter(None, map(_names_in, feature)), ()) if isinstance(feature, list) else ()


def _rows(path: Path, columns: Sequence[str] = ()) -> Iterator[Any]:
    """The rows of a file, a few at a time in memory; without ``columns`` their types and the schema's metadata."""
    kind = "" if is_compressed(path) else open_source(path, path, lambda _: None).kind
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if kind == "parquet":  # by pages: a group of rows may be the whole file
            file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        else:
            file = pa.ipc.open_stream(pa.memory_map(str(path)))
        with file:
            schema = file.schema_arrow if kind == "parquet" else file.schema
            if not columns:
                yield {field.name: str(field.type) for field in schema}, (schema.metadata or {}).get(b"huggingface")
            if missing := [name for name in columns if name not in schema.names]:
                raise DataError(f"{path} has no column {missing[0]}, which others of the set have")
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns) if kind == "parquet" else file:
                for at in range(0, len(batch), _ROWS_AT_ONCE):
                    yield from batch.select(columns).slice(at, _ROWS_AT_ONCE).to_pylist()
    except ModuleNotFoundError:
        raise DataError(f"{path} is read by pyarrow, which is missing: pip install 'steadytrain[parquet]'") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        why = str(error).partition("\n")[0][:120]
        raise DataError(f"{path} is damaged or cut short ({why}): copy or download it again") from error


def _list_request(request: Request) -> list[Listing]:
    """List files, by the splits that their names and folders mention."""
    where, paths = request.where, request.paths or find_files(request.where)
    listings: list[Listing] = []
    for split, group in group_files(paths, where, request.say).items():
        try:
            listings += list_files(request.part(where, group, after=listings), group, split)
        except DataError as error:
            if split != "test":
                raise
            request.say(f"skipped: {error}")  # of a contest: its images have no labels
    return request.in_order(listings)


def _is_parquet(request: Request) -> bool:
    if request.is_folder:
        return bool(find_files(request.where))
    return request.kinds <= {"parquet", "arrow"} and not is_of_paths(request)


PARQUET = SourceKind("Parquet or Arrow files", _is_parquet, _list_request, (COLUMNS,))
