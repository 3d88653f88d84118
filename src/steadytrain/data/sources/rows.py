"""The rows of a table, whatever separates their cells: commas, tabs, blanks, or the keys of JSON lines.

Texts of blanks come in four forms: a path and a label, of which the last word is one (``a b.jpg 1``); a path without
blanks and a label that may have some (``0034309 Boeing 737-200``); columns (``a.jpg -1 1 1``), where the first line may
give names to those behind the path; and paths alone. A line of them that begins with ``#`` and names no image is a
remark.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

from steadytrain.config.plain import parse_json
from steadytrain.data.filenames import is_image
from steadytrain.data.sources.zip_names import readings
from steadytrain.errors import DataError, read_errors
from steadytrain.files import require_regular

Rows = Iterator[tuple[int, list[str]]]
DELIMITERS = "\t,;|"
LAST_BLANK, FIRST_BLANK, BLANKS, LINE, JSON_LINES = " ", "first blank", "blanks", "\n", "json lines"

_LONGEST_LINE = 1 << 20
_SAMPLE_LINES = 200
_MOST_REMARKS = 200  # before the first row
# Beside a label's number, or several, in a SageMaker manifest.
_METADATA, _CLASS_NAME, _CLASS_MAP = "-metadata", "class-name", "class-map"


def is_json_lines(start: bytes) -> bool:
    """Return whether a file begins with a JSON object in one line, by its first bytes.

    >>> is_json_lines(b'{"image": "a.jpg", "label": "cat"}\\n'), is_json_lines(b'{\\n "kind": "card"')
    (True, False)
    """
    line, end, _ = start.removeprefix(b"\xef\xbb\xbf").partition(b"\n")
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return not end and line.startswith(b'{"')  # the line is longer than what was read


def is_of_paths(path: Path) -> bool:
    """Return whether a ``.lst`` is no more than paths, whose folders are classes."""
    with read_errors(path):
        require_regular(path)
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            first = next((line for line in islice(file, _SAMPLE_LINES) if line.strip()), "").strip()
    return is_image(first) and "\t" not in first and not first.partition(" ")[0].isdigit()


def find_delimiter(lines: Sequence[str]) -> str:
    """The sign that gives most of these lines equally many cells; else one of the forms of blanks, or JSON lines.

    Raises:
        DataError: nothing separates anything.

    >>> find_delimiter(["a.jpg,cat", "b.jpg,dog;elk"]), find_delimiter(["a.jpg 0", "b c.jpg 1"])
    (',', ' ')
    >>> find_delimiter(["cat/1.jpg", "dog/2 b.jpg"])  # paths alone
    '\\n'
    >>> find_delimiter(["0034309 Boeing 737-200", "0034958 A320"]), find_delimiter(["a.jpg 1 -1", "b.jpg -1 1"])
    ('first blank', 'blanks')
    """
    if lines[0].lstrip("\ufeff").startswith("{"):
        return JSON_LINES
    best, share = "", 0
    for sign in DELIMITERS:
        try:
            widths = [len(next(csv.reader([line], delimiter=sign, skipinitialspace=True), [])) for line in lines]
        except csv.Error as error:
            raise DataError(_words_for(error)) from None
        width, count = Counter(widths).most_common(1)[0]
        if width == 1 < widths[0]:  # most lines are wrong, which will be reported
            count = 1
        if max(width, widths[0]) > 1 and count > share:
            best, share = sign, count
    if best:
        return best
    rows = _without_remarks(lines)
    if form := _form_of_blanks(rows[_head_of(rows)[1] :]):
        return form
    if all(is_image(line.strip()) or "/" in line.strip("/ \n") for line in lines[1:] or lines):
        return LINE
    raise DataError("only one column: each line needs a path and a label, separated by a comma or a tab")


def _form_of_blanks(lines: Sequence[str]) -> str:
    """The form of lines that blanks separate; empty where some have none."""
    words = [line.split() for line in lines]
    if not words or min(map(len, words)) < 2:
        return ""
    starts = sum(is_image(line[0]) for line in words)
    ends = sum(is_image(line[-1]) or is_image(text.rsplit(None, 1)[0]) for line, text in zip(words, lines, strict=True))
    widths = set(map(len, words))
    values = words[1:] if len(words) > 1 and not any(map(_is_number, words[0])) else words  # below names of columns
    if len(widths) == 1 and max(widths) > 2 and all(_is_number(cell) for line in values for cell in line[1:]):
        return BLANKS
    is_path_first = starts == len(words) if starts or ends else len(widths) > 1
    return FIRST_BLANK if is_path_first and max(widths) > 2 else LAST_BLANK


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()


def _is_remark(line: str) -> bool:
    words = [line.strip(), *line.split(), line.rsplit(None, 1)[0]]
    return words[0].startswith("#") and not any(map(is_image, words))


def _without_remarks(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line.strip() and not _is_remark(line)]


def _head_of(lines: Sequence[str]) -> tuple[list[str], int]:
    """Names of columns that lines of words begin with, with one for the path; and how many lines are no rows.

    The first line may be the number of rows, as in CelebA's list of attributes.
    """
    num_lines = 1 if len(lines) > 1 and lines[0].strip().isdigit() else 0
    if len(lines) < num_lines + 2:
        return [], num_lines
    first, second = lines[num_lines].split(), lines[num_lines + 1].split()
    is_named = len(second) == len(first) + 1 >= 3 and not any(map(_is_number, first)) and not any(map(is_image, first))
    if is_named and all(map(_is_number, second[1:])):
        return ["path", *first], num_lines + 1
    return [], num_lines


def read_rows(stored_at: Path, path: Path, delimiter: str) -> Rows:
    """Line number and cells of each row that is not blank.

    ``path``, ``stored_at``: the table as it was named, and where its bytes lie.

    Raises:
        DataError: a line that cannot be read, by its number.
    """
    lines = read_text(stored_at, path)
    if delimiter == JSON_LINES:
        yield from _read_objects(stored_at, path)
    elif delimiter == LINE:
        yield from ((number, [line.strip()]) for number, line in enumerate(lines, 1) if line.strip())
    elif delimiter in (LAST_BLANK, FIRST_BLANK, BLANKS):
        yield from _read_words(lines, delimiter)
    else:
        cell = re.compile(rf'(^|[{delimiter}]) *("[^"]*(?:""[^"]*)*") *(?=[{delimiter}\r\n]|$)')  # in its marks
        lines = (cell.sub(r"\1\2", line) if ' "' in line or '" ' in line else line for line in lines)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{path}: line {reader.line_num}: {_words_for(error)}") from None


def _words_for(error: csv.Error) -> str:
    is_long = "field limit" in str(error)
    return f"{error}: {'images in cells are not read, write each as a file' if is_long else 'fix its quotes'}"


def _read_words(lines: Iterator[str], delimiter: str) -> Rows:
    start = list(islice(lines, _MOST_REMARKS))
    names, num_skipped = _head_of(_without_remarks(start)) if delimiter == BLANKS else ([], 0)
    if names:
        yield 0, names
    for number, line in enumerate(chain(start, lines), 1):
        if not line.strip() or _is_remark(line):
            continue
        if num_skipped:
            num_skipped -= 1
        elif delimiter == BLANKS:
            yield number, line.split()
        else:
            yield number, line.rsplit(None, 1) if delimiter == LAST_BLANK else line.strip().split(None, 1)


def _read_objects(stored_at: Path, path: Path) -> Rows:
    """The keys of the first objects, and the values of each; of an object in an object, ``label.name``."""
    first = islice(_parse_objects(read_text(stored_at, path), path), _SAMPLE_LINES)
    names = {key: None for _, fields in first for key, value in fields.items() if not isinstance(value, dict)}
    yield 0, [*names]
    for number, fields in _parse_objects(read_text(stored_at, path), path):
        yield number, [_cell(fields, key) for key in names]


def _parse_objects(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields, why = parse_json(line), ""
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise DataError(f"{path}: line {number} holds {half}, half of a character: fix the table") from None
        except (ValueError, RecursionError) as error:
            fields, why = None, f" ({error})"
        if not isinstance(fields, dict):
            raise DataError(
                f"{path}: line {number} is not a JSON object{why}; each needs an image's path and its label"
            )
        inner = [key for key, value in fields.items() if isinstance(value, dict) and not key.endswith(_METADATA)]
        yield number, fields | {f"{key}.{name}": value for key in inner for name, value in fields[key].items()}


def _cell(fields: dict[str, object], key: str) -> str:
    value, beside = fields.get(key), fields.get(key + _METADATA)
    if isinstance(beside, dict) and isinstance(beside.get(_CLASS_NAME), str):
        return str(beside[_CLASS_NAME])
    if isinstance(value, list) and isinstance(beside, dict) and isinstance(names := beside.get(_CLASS_MAP), dict):
        value = [names.get(str(number), number) for number in value]
    if value is None or isinstance(value, dict):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def read_text(stored_at: Path, path: Path) -> Iterator[str]:
    """The lines of a text, of bounded length."""
    try:
        require_regular(stored_at)
        with stored_at.open(encoding="utf-8-sig", newline="") as file:
            for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), ""), 1):
                if len(line) == _LONGEST_LINE:
                    raise DataError(
                        f"{path}: line {number} is longer than {_LONGEST_LINE:,} characters: it is not a table"
                    )
                is_hint = number == 1 and line[:4].lower() == "sep=" and len(line.strip()) < 6  # Excel's
                yield "\n" if is_hint else line
    except UnicodeDecodeError as error:
        shown, form, data = "its first bytes are a mark of UTF-16", "UTF-16", error.object
        if data[:2] not in (b"\xff\xfe", b"\xfe\xff"):
            lines_of_bytes = data[data.rfind(b"\n", 0, error.start) + 1 :].splitlines()
            shown, form = readings(lines_of_bytes[:-1] or lines_of_bytes)  # the last one may be cut
            form = "cp1252" if re.search(rb"[A-Za-z][\x80-\xff][a-z]", data) else form
        copy = path.with_name(f"{path.stem}-utf8{path.suffix}")
        raise DataError(
            f"{path} is not UTF-8 text ({error.object[error.start]:#04x} found; {shown}): save it as UTF-8, or, with"
            f" the right code page, iconv -f {form} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(copy))}"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
