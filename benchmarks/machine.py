"""The harness of the benchmarks: shared options, turns, kept results, the facts of the machine, and the JSON record."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from typing import Any, TypeVar

import psutil

from steadytrain.machine.facts import facts as machine_facts
from steadytrain.machine.procfs import processor_seconds, steal_share

RESULTS = Path(__file__).resolve().parent / "results"
LOAD_BEFORE = round(psutil.getloadavg()[0], 2)
SECONDS_BEFORE = processor_seconds()
PACKAGES = ("steadytrain", "torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg", "cykooz-resizer")
STEADY = [sys.executable, "-m", "steadytrain"]
Contender = TypeVar("Contender")


def parser(
    doc: str | None,
    *,
    data: str = "",
    needs_data: bool = True,
    work: str = "",
    choose: tuple[str, Iterable[str]] | None = None,
    rounds: int | None = None,
    mxnet: bool = False,
) -> argparse.ArgumentParser:
    """Return the parser of a script: its docstring as help, the options that scripts share, and ``--save``.

    Args:
        doc: docstring of the script.
        data: contents of the folder of ``--data``; empty: no such option.
        needs_data: refuse a command line without data.
        work: use of the folder of ``--work``, which must be named and is made; empty: no such option.
        choose: an option, and the names of which it takes some (default: all).
        rounds: default of ``--rounds``; None: no such option.
        mxnet: add ``--mxnet-python``.
    """
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data:
        default = os.environ.get("STEADYTRAIN_TEST_DATA")
        text = f"folder that holds {data} (default: $STEADYTRAIN_TEST_DATA)"
        is_required = needs_data and default is None
        options.add_argument("--data", type=Path, metavar="FOLDER", default=default, required=is_required, help=text)
    if work:
        options.add_argument("--work", type=_made, metavar="FOLDER", required=True, help=f"folder for {work}")
    if choose is not None:
        names = list(choose[1])
        options.add_argument(choose[0], nargs="+", choices=names, default=names, help="these (default: all)")
    if rounds is not None:
        options.add_argument("--rounds", type=int, default=rounds, help=f"turns of each contender ({rounds})")
    if mxnet:
        default = os.environ.get("STEADYTRAIN_MXNET_PYTHON")
        text = "Python that has MXNet 1.9.1 (default: $STEADYTRAIN_MXNET_PYTHON)"
        options.add_argument("--mxnet-python", metavar="PATH", default=default, help=text)
    options.add_argument("--save", action="store_true", help="also write the figures into benchmarks/results")
    return options


def parse_kept(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line of a script whose choice is ``only``; with ``--kept`` that is nothing.

    The cache lies in the folder of ``--work``, so that runs of the script share it.
    """
    options.add_argument("--kept", action="store_true", help="record what is kept, and measure nothing")
    args = options.parse_args()
    args.work, args.only = args.work.resolve(), [] if args.kept else args.only
    os.environ["STEADYTRAIN_CACHE"] = str(args.work / "cache")
    return args


def in_turns(contenders: Iterable[Contender], rounds: int) -> Iterator[tuple[int, Contender]]:
    """Yield each contender once a round, with the number of the round; each round begins with the next contender.

    >>> list(in_turns("ab", 2))
    [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    field = list(contenders)
    for number in range(rounds):
        first = number % len(field)
        for contender in (*field[first:], *field[:first]):
            yield number, contender


def kept(path: Path, measure: Callable[[], Any]) -> Any:
    """Return the result that is kept in a JSON file; measure it, and keep it, where there is no such file yet."""
    if not path.exists():
        result = json.dumps(measure())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result, encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def say(*words: object) -> None:
    """Print a line of progress to standard error."""
    print(*words, file=sys.stderr, flush=True)


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile; of a single value, that value."""
    return quantiles(values, n=4)[::2] if len(values) > 1 else [*values] * 2


def rounded(document: Any, digits: int = 3) -> Any:
    """Round all floats of a document to so many significant digits."""
    if isinstance(document, dict):
        return {key: rounded(value, digits) for key, value in document.items()}
    if isinstance(document, list):
        return [rounded(value, digits) for value in document]
    return float(f"{document:.{digits}g}") if isinstance(document, float) else document


def steady(*words: str) -> None:
    """Run a command of steadytrain; its output goes to standard error."""
    subprocess.run([*STEADY, *words], check=True, stdout=sys.stderr)


def ask(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Any:
    """Run a program and return its last line, read as JSON. End this one where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def cpu_seconds() -> float:
    """Return the processor seconds of all processes that this one has started and waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar, perhaps compressed by zstd, to read it from its beginning to its end."""
    if archive.suffix != ".zst":
        with tarfile.open(archive) as tar:
            yield tar
        return
    import zstandard

    with zstandard.open(archive, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        yield tar


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack an archive of images, unless that was done before; return the folder that holds ``train``."""
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.part")
        with opened(archive) as tar:
            tar.extractall(part, filter="data")
        part.rename(folder)
    return next(path.parent for path in sorted(folder.rglob("train")) if path.is_dir())


def facts() -> dict[str, Any]:
    """Return machine, versions, date (UTC) and load. They get published: they name no host and no kernel.

    ``load_average`` holds what stood in the machine's queue in the minute before the benchmark began, and at its end,
    when the benchmark itself counts. ``steal_share`` is what the hypervisor meanwhile withheld of the processors' time.
    """
    named = {name: value for name, value in machine_facts().items() if name not in ("host", "system")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        **named,
        "packages": {name: _version(name) for name in PACKAGES},
        "load_average": {"before": LOAD_BEFORE, "after": round(psutil.getloadavg()[0], 2)},
        "steal_share": steal_share(SECONDS_BEFORE, processor_seconds()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def record(name: str, document: Mapping[str, Any], *, save: bool = False) -> dict[str, Any]:
    """Print a benchmark's figures with the machine's facts as one JSON document, and return it.

    Args:
        name: of the benchmark; the file is ``results/NAME.json``.
        document: the figures.
        save: also write the file, in place of an older one.
    """
    values = {"benchmark": name, **document, "machine": facts()}
    text = json.dumps(values, indent=2)
    print(text)
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return values


def of_cases(name: str, chosen: Sequence[str], known: Iterable[str]) -> str:
    """Return the name of a benchmark, with its cases where some were left out: they do not replace the result of all.

    >>> of_cases("accuracy", ["demo"], ["demo", "cifar10"]), of_cases("accuracy", ["demo"], ["demo"])
    ('accuracy_demo', 'accuracy')
    """
    return name if set(chosen) == set(known) else "_".join((name, *chosen))


def _made(text: str) -> Path:
    folder = Path(text)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
