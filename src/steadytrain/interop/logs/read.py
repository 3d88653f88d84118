"""Read a log of any trainer, whose format is found by its content."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Protocol, cast

from steadytrain.errors import DataError, read_errors
from steadytrain.files import open_regular, open_text
from steadytrain.format import count
from steadytrain.interop.logs.dllogger import DLLoggerLines
from steadytrain.interop.logs.mlperf import MLPerfLines
from steadytrain.interop.logs.mxnet import NO_MEMORY, MXNetLines
from steadytrain.interop.logs.run import LogRun
from steadytrain.interop.logs.settings import STAMP, add_setting, parse_json
from steadytrain.interop.logs.tables import JsonTable, Table
from steadytrain.interop.logs.torch_lines import TorchLines

CHUNK_BYTES = 1 << 20
MAX_LINE, MAX_FIGURES = 1 << 16, 1 << 12
"""Characters of a line that are looked at: of one that may hold arguments or JSON, and of one that holds figures."""
MAX_TEXT = 64 << 30
"""Characters of a log: a compressed file may be a trap."""

LOOKED_FOR = (
    "lines of MXNet, Gluon or Horovod (Epoch[0] Train-accuracy=0.5, [Epoch 0] validation: ...), timm"
    " (Train: 0 [  50/1251 (  4%)]), torchvision (Epoch: [0]  [  10/5005]), MLPerf (:::MLLOG {...}) or NVIDIA's"
    " DLLogger (DLLL {...}), nor a first line that names columns of a CSV file"
    " of Lightning, Keras, fastai, Ultralytics or timm (epoch, loss, val_accuracy, ...)"
)


class LineReader(Protocol):
    """Parser of one family of logs: it counts the lines with figures, and returns runs."""

    num_lines: int

    def take(self, line: str) -> bool:
        """Parse a line; return False if it is none of this family."""

    def runs(self) -> list[LogRun]:
        """Return the runs of the lines, each with an epoch at least."""


# Any line that a reader of lines knows holds one of these.
_MAY_MATTER = re.compile(
    r"Epoch\[|\[Epoch |Iter\[|Epoch: \[|Train: \d|Test|DLLL |@1 |Namespace\(|learning rate|Start training|"
    rf":::ML|param count|Scheduled epochs|start with arguments|Training begin|Train finished|{NO_MEMORY}"
)
# A line with a figure of training, whoever wrote it.
_FIGURE = re.compile(
    r"\b(?:acc(?:uracy)?|top-?[15]|err(?:or)?|loss|(?:samples|images|img)/s(?:ec)?)\b[^\d\n]{0,12}[=: \t]\s*[-+]?\d|"
    r"\d\s*(?:samples|images|img)/s",
    re.IGNORECASE,
)
# What a record of each family begins with: mails, slides and PDFs lose the ends of lines.
_RECORD = re.compile(
    r"(?P<mxnet>(?:Epoch|Iter)\[\d|\[Epoch \d)|(?P<mlperf>:::ML)|(?P<nvidia>DLLL )|"
    r"(?P<torch>Epoch: \[\d|Train: \d{1,7} \[|Test(?: \(EMA\))?:(?: EMA)?\s{1,9}\[| \* (?:Acc|Prec)@1)"
)
_TERMINAL = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>78])")
"""Colours, titles and character sets of a terminal."""
_MESSAGES = ("log", "message", "MESSAGE", "textPayload")  # of Docker, CloudWatch, journald and Google Cloud, as JSON


def read_log(path: str | Path) -> list[LogRun]:
    """Read all runs of a log file, which may be gzipped, in time and memory linear in its size.

    Raises:
        DataError: the file cannot be read, or it is no log of a program that is known here.
    """
    path = Path(path)
    with read_errors(path), open_regular(path) as file:
        runs = _read(file)
    if not runs:
        raise DataError(f"{path} is no training log that can be read: it has neither {LOOKED_FOR}")
    for index, run in enumerate(runs):
        run.directory = path if not index else path.with_name(f"{path.name}#{index + 1}")
        _add_settings_beside(run, path)
    return runs


def may_be_log(path: Path) -> bool:
    """Return whether a file begins with text, perhaps gzipped: whether it is worth reading as a log."""
    try:
        with open_regular(path) as file:
            start = file.read(4096)
            if start[:2] == b"\x1f\x8b":
                file.seek(0)
                start = gzip.GzipFile(fileobj=file).read(4096)
    except (OSError, EOFError, zlib.error):
        return False
    controls = sum(byte < 9 or 13 < byte < 27 for byte in start)
    return start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or controls <= len(start) // 10


def _read(file: IO[bytes]) -> list[LogRun]:
    readers: list[LineReader] = [MXNetLines(), TorchLines(), DLLoggerLines(), MLPerfLines()]
    unread, first_unread = 0, ""
    table: Table | JsonTable | None = None
    is_first, faults = True, list[str]()
    for line in _lines(file, faults):
        if is_first and line.strip():
            is_first = False
            table = Table.of_header(line) or JsonTable.of_line(line)
            if table is not None:
                continue
        if table is not None:
            table.take(line)
            continue
        for record in _records(line):
            has_figures, is_of_arguments = False, "Namespace(" in record
            short = record if is_of_arguments or "DLLL " in record else record[:MAX_FIGURES]
            for reader in readers if _MAY_MATTER.search(record) else ():
                has_figures |= reader.take(short)
                if has_figures and not is_of_arguments:
                    break
            if not has_figures and not is_of_arguments and _FIGURE.search(record, 0, MAX_FIGURES):
                unread, first_unread = unread + 1, first_unread or record.strip()[:80]
    runs, others = (table.runs(), 0) if table is not None else _chosen(readers)
    runs = [run for run in runs if run.epochs]
    for run in runs:
        for fault in faults:
            run.notice(fault)
    if runs and unread:
        runs[0].notice(f"{count(unread, 'line')} with figures not understood and left out, such as: {first_unread}")
    if runs and others:
        runs[0].notice(f"{count(others, 'line')} of other programs in the same file: left out")
    return runs


def _records(line: str) -> Iterator[str]:
    """Cut a line where records of one family follow each other, each with what stands before it as before the first."""
    marks = list(_RECORD.finditer(line))
    starts = [mark.start() for mark in marks if mark.lastgroup == marks[0].lastgroup]
    if len(starts) < 2:
        yield line
        return
    first = prefix = line[: starts[0]]
    words, is_named, records = len(first.split()), False, list[tuple[str, str]]()
    for start, end in pairwise([*starts, len(line)]):
        text, *own = line[start:end].rsplit(None, words) if words else [line[start:end]]
        following = " ".join(own)
        if end == len(line) or re.sub(r"\d+", "0", following) != re.sub(r"\d+", "0", " ".join(first.split())):
            text, following = line[start:end], STAMP.sub("", first)  # the same worker, at a moment that is not known
        else:
            is_named = True
        records.append((prefix, text))
        prefix = following
    yield from (f"{prefix} {text}" if is_named else text for prefix, text in records)  # else it is prose


def _chosen(readers: Sequence[LineReader]) -> tuple[list[LogRun], int]:
    """Return the runs of the program with most lines, with what MLPerf's say of them, and the number of lines left."""
    *programs, mlperf = readers
    used, stated = [max(programs, key=lambda reader: reader.num_lines)], mlperf.runs()
    runs = used[0].runs()
    pairs = list(zip(runs, stated, strict=False))
    if stated and len(runs) == len(stated) and all(len(run.epochs) >= len(of_all.epochs) for run, of_all in pairs):
        used.append(mlperf)
        for run, of_all in pairs:
            run.take_over(of_all)
    elif stated:
        runs, used = stated, [mlperf]
    return runs, sum(reader.num_lines for reader in readers if reader not in used)


def _lines(file: IO[bytes], faults: list[str]) -> Iterator[str]:
    """Yield the lines of a file, whatever ends them and however it is encoded; ``faults``: what is wrong with it."""
    start = file.read(4)
    file.seek(0)
    stream: IO[bytes] = cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if start[:2] == b"\x1f\x8b" else file
    decoder: codecs.IncrementalDecoder | None = None
    partial, total, before = "", 0, list[str]()
    while True:
        try:
            data = stream.read(CHUNK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            faults.append("the compressed file is cut short or damaged: what came before is read")
            data = b""
        if decoder is None:
            is_utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            decoder = codecs.getincrementaldecoder("utf-16" if is_utf16 else "utf-8-sig")(errors="replace")
        text = decoder.decode(data, final=not data)
        total += len(text)
        if total > MAX_TEXT:
            faults.append(f"only the first {MAX_TEXT >> 30} GiB are read")
            data = b""
        # A carriage return alone ends the lines of a progress bar.
        *complete, partial = (partial + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        before = complete or before
        for line in complete:
            yield _cleaned(line)
        if len(partial) > MAX_LINE:
            partial = partial[:MAX_LINE]
        if not data:
            if partial.strip():
                whole = _without_cut_figure(partial, before)
                faults += ["the log's last line is cut short: its last figure is left out"] * (whole != partial)
                yield _cleaned(whole)
            return


def _without_cut_figure(line: str, before: Sequence[str]) -> str:
    """Leave out the number at the end of a log without a last line end, if all of its kind before have more decimals.

    >>> _without_cut_figure("Epoch[1] Train-accuracy=0.", ["Epoch[0] Train-accuracy=0.350000"])
    'Epoch[1] Train-accuracy='
    """
    end = re.search(r"\d*\.?(\d*)$", line)
    if not end or not end[0] or not _MAY_MATTER.search(line):
        return line
    start = line[: end.start()]
    kind = re.compile(re.sub(r"\d+", lambda _: r"\d+", re.escape(start)) + r"\d*\.(\d+)")
    decimals = {len(match[1]) for match in map(kind.match, before) if match}
    return start if len(decimals) == 1 and len(end[1]) < min(decimals) else line


def _cleaned(line: str) -> str:
    line = line[:MAX_LINE]
    document = parse_json(line) if line.startswith("{") else None
    if isinstance(document, dict) and "epoch" not in document:  # which is a table's row
        messages = [text for key in _MESSAGES if isinstance(text := document.get(key), str)]
        line = f"{document.get('time', '')} {messages[0].rstrip()}".lstrip() if messages else line
    line = line.replace("#011", "\t")  # as syslog writes a tab
    return _TERMINAL.sub("", line) if "\x1b" in line else line


def _add_settings_beside(run: LogRun, path: Path) -> None:
    """Add the settings of timm's ``args.yaml`` or Lightning's ``hparams.yaml`` in the same folder."""
    if run.settings or run.format not in ("timm", "Lightning"):
        return
    for name in ("args.yaml", "hparams.yaml"):
        try:
            with open_text(path.parent / name, errors="replace") as file:
                lines = file.read(MAX_LINE).splitlines()
        except OSError:
            continue
        for line in lines:
            if match := re.fullmatch(r"([A-Za-z_]\w*): ([^\[{&*!|>].*)", line.rstrip()):
                value = parse_json(match[2])
                add_setting(run, match[1], value.strip("'") if isinstance(value, str) else value)
