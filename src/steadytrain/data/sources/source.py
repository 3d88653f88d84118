"""A kind of source: one row that tells whether what a user names is of this kind, and lists it.

A package adds a kind by an entry point of the group ``steadytrain.sources`` that names a :class:`SourceKind`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path

from steadytrain.config.factories import load_entry_point
from steadytrain.data.filenames import is_ignored, order_splits
from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.sources.archives import SourceFile, open_sources, read_archives
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.layout import FolderLook, look_on_disk
from steadytrain.data.sources.listing import FileList, Listing
from steadytrain.errors import DataError, InputError
from steadytrain.format import Say, few

GROUP = "steadytrain.sources"
"""The group of entry points by which other packages add kinds of sources: ``NAME = "package.module:SOURCE"``."""

ROOT, LABELS, COLUMNS = "--root", "--labels", "--label-column"
"""Options of which a kind takes some; the last one stands for all that name columns."""

_GOES_WITH = {ROOT: "a .lst or a table", LABELS: "a folder or an archive of images"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A source that a user names, and what goes with it; options as for :func:`~steadytrain.data.sources.find.find`.

    Args:
        source: as the user wrote it.
        where: the folder or the file that messages call it by.
        paths: the files that it names, such as those of a pattern; empty for a folder.
        list_part: lists a part of it as a source of its own.
        opened: the files that were recognised, and where need be decompressed, so far.
    """

    source: str
    where: Path
    paths: tuple[Path, ...]
    scratch: Path
    say: Say
    list_part: Callable[[Request], list[Listing]]
    root: Path | None = None
    labels: Path | None = None
    classes: Sequence[str] | None = None
    group: str | None = None
    columns: ColumnNames = field(default_factory=ColumnNames)
    opened: dict[Path, SourceFile] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        return not self.paths

    @cached_property
    def files(self) -> list[SourceFile]:
        """The files, recognised by their first bytes. Raises DataError where one is damaged, or known and not read."""
        closed = [path for path in self.paths if path not in self.opened]
        files = open_sources(closed, self.scratch, self.say, self.columns.zip_names)
        self.opened.update({file.path: file for file in files})
        return [self.opened[path] for path in self.paths]

    @property
    def kinds(self) -> set[str]:
        """The kinds of the files, as :class:`~steadytrain.data.sources.archives.SourceFile` has them."""
        return {file.kind for file in self.files}

    @property
    def is_archive(self) -> bool:
        return not self.is_folder and self.kinds <= {"tar", "zip"}

    @cached_property
    def members(self) -> FileList:
        """The files inside the archives."""
        return read_archives(self.files, self.say)

    @cached_property
    def entries(self) -> Sequence[str]:
        """Names in the folder, sorted, without what is ignored; or of the members of archives."""
        if self.is_folder:
            return sorted(entry.name for entry in self.where.iterdir() if not is_ignored(entry.name))
        return self.members.names if self.is_archive else ()

    @cached_property
    def has_folders(self) -> bool:
        return self.is_folder and any((self.where / name).is_dir() for name in self.entries)

    @cached_property
    def look(self) -> FolderLook:
        """Tells what lies in the folder and in those below it."""
        return look_on_disk(self.where)

    def part(self, where: Path, paths: Sequence[Path] = (), *, after: Sequence[Listing] = ()) -> Request:
        """Return the request for a part, which a split's training set ``after`` gives its classes and label column."""
        part = replace(self, where=where, paths=tuple(paths))
        if not after:
            return part
        first = after[0]
        names = first.classes or (LabelNames(first.label_names) if first.label_names else None)
        columns = replace(self.columns, trained=first.label_column)
        return replace(part, classes=self.classes or names, columns=columns)

    def in_order(self, listings: Sequence[Listing]) -> list[Listing]:
        """Put the listings of splits in order, the training set first; one alone is no split."""
        ordered = order_splits({listing.split: listing for listing in listings})
        if len(ordered) == 1:
            return [replace(listings[0], split="")]
        return [replace(listing, split=split) for split, listing in ordered.items()]


@dataclass(frozen=True)
class SourceKind:
    """A kind of source.

    Args:
        name: that users know it by.
        recognise: whether a request is of this kind; it reads no more than it has to. DataError: it is, and is refused.
        list: lists it: one listing, or one for each split, the training set first.
        takes: the options that apply: :data:`ROOT`, :data:`LABELS`, :data:`COLUMNS`.
        is_one_file: of the files of a pattern, each is a source of its own.
    """

    name: str
    recognise: Callable[[Request], bool]
    list: Callable[[Request], list[Listing]]
    takes: tuple[str, ...] = ()
    is_one_file: bool = False

    def refuse_unused(self, request: Request) -> None:
        """Raise DataError for an option, or for more files, that this kind does not take."""
        if self.is_one_file and len(request.paths) > 1:
            names = few([path.name for path in request.paths])
            raise DataError(f"{request.source} names several files ({names}), each {self.name}: give each alone")
        for flag, path in ((ROOT, request.root), (LABELS, request.labels)):
            if path is not None and flag not in self.takes:
                raise DataError(f"{flag} goes with {_GOES_WITH[flag]}, and {request.where} is none: drop it")
        if COLUMNS not in self.takes:
            refuse_columns(request)


def refuse_columns(request: Request) -> None:
    """Raise DataError for an option that names a column, where labels come from no table."""
    options = replace(request.columns, zip_names="").options()  # of which nothing is said where no zip needs it
    for flag, name in (*options, *((("--group-by", request.group),) if request.group else ())):
        raise DataError(
            f"{flag} {name} names a column of a table (CSV, TSV), and the labels of {request.source} do not come from"
            f" one: drop {flag}"
        )


def find_added(request: Request) -> SourceKind | None:
    """Find the kind among those that other packages add; ``say`` is told of a package that is broken."""
    for point in entry_points(group=GROUP):
        try:
            source = load_entry_point(point, SourceKind)
        except InputError as error:
            request.say(f"the source {point.name} cannot be used: {error}")
            continue
        if source.recognise(request):
            return source
    return None
