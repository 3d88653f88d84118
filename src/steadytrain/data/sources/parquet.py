"""Parquet and Arrow files with images in them, as Hugging Face's ``datasets`` publishes and saves them.

A column holds images, as bytes or a struct of bytes and a path; the others are a table, read as JSON lines are. Names
of classes stand in the schema's metadata (``huggingface``), else on the data set's card, ``README.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from steadytrain.data.filenames import is_ignored, is_image, missing_shards, split_of
from steadytrain.data.names import Names
from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.sources.archives import open_source, unpack
from steadytrain.data.sources.columns import SPLIT, ColumnNames, plain
from steadytrain.data.sources.labels import class_name
from steadytrain.data.sources.layout import NO_CLASSES
from steadytrain.data.sources.listing import FileList, Labels, Listing, Pieces
from steadytrain.data.storage.scratch import new_path
from steadytrain.errors import DataError
from steadytrain.format import Say, count, few

_ROWS_AT_ONCE = 32
_MOST_CARD = 4 << 20  # bytes
_IMAGE = re.compile(r"\w*binary\w*|struct<(.*, )?bytes: \w*binary.*>")
_CELL = re.compile(r"((large_)?list<\w+: )?(\w*string\w*|u?int\d+|bool)\b.*|float|double|dictionary<.*")


def find_files(folder: Path) -> list[Path]:
    """Find the Parquet and Arrow files in a folder; none where a folder in it holds images alone."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_ignored(name) and name.casefold() not in NO_CLASSES)
        tables = [name for name in sorted(names) if re.fullmatch(r"(?!\.|cache-).*\.(parquet|arrow)", name)]
        if not tables and Path(place) != folder and any(map(is_image, names)):
            return []
        found += [Path(place, name) for name in tables]
    return found


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


@dataclass(frozen=True)
class ImageTable:
    """The table of some files, as JSON lines, and their images, which its column ``column`` calls by their numbers.

    Args:
        stored_at: the table.
        classes: names of the classes of the columns that have them.
    """

    files: FileList
    root: Path
    stored_at: Path
    column: str
    classes: Mapping[str, tuple[str, ...]]

    @staticmethod
    def read(paths: Sequence[Path], root: Path, scratch: Path, say: Say, named: ColumnNames) -> ImageTable:
        """Read files; their images are written one behind the other, so that each can be read by itself.

        Raises:
            DataError: damaged files, paths for images, no column of images or several of them; or there is no pyarrow.
        """
        types, metadata = next(_rows(paths[0]))
        images = [name for name in types if _IMAGE.fullmatch(types[name]) and named.path in (None, name)]
        if len(images) != 1:
            listed = few([f"{name}: {kind}" for name, kind in types.items()], 9)
            raise DataError(
                f"{paths[0]} has {len(images) or 'no'} columns of images, bytes or structs of bytes and a path (its"
                f" columns: {listed}): {'choose one with --path-column' if images else 'write the images into one'}"
            )
        kept = [name for name in types if _CELL.fullmatch(types[name])]
        classes = {name: names for name, names in _classes_of_columns(metadata, paths[0]).items() if name in kept}
        if classes and not named.labels:
            kept = [name for name in kept if name in classes or plain(name) in SPLIT]
        stored_at, names, sizes, known = new_path(scratch, "table.jsonl"), Names(), array("q"), {None}

        def write() -> Iterator[bytes]:
            with stored_at.open("w", encoding="utf-8") as table:
                for path in paths:
                    for number, row in enumerate(_rows(path, [*kept, *images])):
                        value = row[images[0]]
                        data, name = (value["bytes"], value.get("path")) if isinstance(value, dict) else (value, None)
                        if name and data is None:
                            raise DataError(f"{path}:{number} holds the path of an image ({name}), not its bytes")
                        row |= {name: _named(row[name], classes[name]) for name in classes if name in row}
                        table.write(json.dumps(row | {images[0]: str(len(sizes))}) + "\n")
                        names.append(name if name not in known else f"{path.name}:{number}")
                        known.add(name)
                        sizes.append(len(data or b""))
                        yield data or b""

        status = [path.stat() for path in paths]
        blob = unpack(root, write(), scratch, say, sum(file.st_size for file in status))
        size = np.array(sizes, np.int64)
        pieces = Pieces((str(blob),), np.zeros(len(size), np.int32), np.cumsum(size) - size, size)
        files = FileList(names, size, np.full(len(size), max(file.st_mtime_ns for file in status)), pieces)
        lists = {name: LabelNames(names) if "list<" in types[name] else names for name, names in classes.items()}
        return ImageTable(files, root, stored_at, images[0], lists)

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing:
        """List the images of these numbers."""
        return self.files.listing([*map(int, names)], labels, root=self.root, classes=classes, split=split)


def _named(value: Any, names: Sequence[str]) -> Any:
    """The name of a class, or several; None for -1, which stands for no label."""
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None if value == -1 else value


def _classes_of_columns(metadata: bytes, path: Path) -> dict[str, tuple[str, ...]]:
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


def _rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The rows of a file, a few at a time in memory; without ``columns`` their types and the schema's metadata."""
    kind = open_source(path, path, lambda _: None).kind
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise DataError(f"{path} is read by pyarrow, which is missing: pip install 'steadytrain[parquet]'") from None
    try:
        if kind == "parquet":  # by pages: a group of rows may be the whole file
            file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        else:
            file = pa.ipc.open_stream(pa.memory_map(str(path)))
        with file:
            schema = file.schema_arrow if kind == "parquet" else file.schema
            if columns is None:
                metadata = (schema.metadata or {}).get(b"huggingface", b"")
                yield {field.name: str(field.type) for field in schema}, metadata
                return
            if missing := [name for name in columns if name not in schema.names]:
                raise DataError(f"{path} has no column {missing[0]}, which others of the set have")
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns) if kind == "parquet" else file:
                for at in range(0, len(batch), _ROWS_AT_ONCE):
                    yield from batch.select(columns).slice(at, _ROWS_AT_ONCE).to_pylist()
    except (pa.ArrowException, OSError) as error:
        why = str(error).partition("\n")[0][:120]
        raise DataError(f"{path} is damaged or cut short ({why}): copy or download it again") from error
