"""Wrong values for every flag and argument of every verb, as the command line itself defines them.

usage: python -m tests.cli.wrong_values [VERB ...] [--flag=FLAG ...] [--jobs 2] [--work FOLDER]

Each command is a small sound one (``BASES``) with one value exchanged, run in a process forked from this one, in a
folder of its own with the files that ``make_files`` writes. It may take ``SECONDS``, and has no network. A fault is a
traceback, an exit code other than 0, 2, 75 and 130, a command that does not end, a refusal that names neither the value
nor the flag, or a file that a refused command leaves. All outcomes are in ``--work``, a line each: what is no fault
there may still be wrong, such as a value that is taken and never right.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from PIL import Image

from steadytrain.cli import VERBS, app, main

SECONDS = 20.0
TRAIN = "--model mlp --epochs 1 --batch-size 8 --size 8 --device cpu"
TRAINING_FLAGS = "train finetune resume schedule sweep"
BASES: dict[str, tuple[str, ...]] = {
    "demo": ("out --seed 1",),
    "fetch": ("mnist -o out",),
    "pack": ("photos out",),
    "check": ("photos",),
    "feed": ("photos.rec --seconds 0.1 --batch-size 4",),
    "bench": ("train --model mlp --size 8 --classes 3 --batch-size 4 --device cpu --seconds 0.1",),
    "bench infer": ("mlp --engines eager --batch-size 1 --images 8 --seconds 0.1 --device cpu",),
    "tune": ("photos.rec --model mlp --size 8 --minutes 0.0001 -o out.toml --device cpu",),
    "bandwidth": ("--model mlp --procs 200 --backend nccl --seconds 0.1",),
    "scale": ("--model mlp --size 8 --classes 3 --batch-size 4 --devices 2 --link 10GbE --seconds 0.1 --device cpu",),
    "train": (f"photos.rec --run out {TRAIN}",),
    "finetune": (f"photos.rec --run out {TRAIN} --weights none",),
    "resume": ("run",),
    "sweep": (f"photos.rec --over lr=0.1,0.2 --run out {TRAIN} --dry-run",),
    "schedule": (f"photos.rec {TRAIN}",),
    "launch": ("--on ssh --hosts hosts --dry-run train photos.rec",),
    "embed": ("photos.rec --weights run -o out.npy --device cpu",),
    "evaluate": ("run photos.rec --device cpu",),
    "predict": ("run cat.png --device cpu",),
    "export": ("run -o out.pt2 --device cpu",),
    "serve": ("run --write out",),
    "watch": ("run --seconds 0.1",),
    "diagnose": ("run",),
    "cost": ("run",),
    "replay": ("run --step 1 -o out",),
    "runs": (".",),
    "report": ("run -o out.html",),
    "convert": ("net-0000.params -o out.safetensors",),
    "models": ("mlp",),
    "doctor": ("",),
    "help": ("check",),
    "mxnet": ("im2rec photos photos",),
}
"""A verb's sound commands: what stands without a flag first."""

LONG = "x" * 300
NUMBERS = ("-1", "0", "1" + "0" * 30, "nan", "inf", "1.5", "\N{ARABIC-INDIC DIGIT THREE}", "\u00bd")
WORDS = ("nonsense", "", LONG, "a\nb", "a\x1b[2Jb", "\udcff")
PLACES = (
    "photos",
    "text.txt",
    "no/such/place",
    "pipe",
    "/dev/null",
    "loop",
    "locked",
    "locked/x",
    "cat.png/x",
    "s3://",
)
VALUES = (*NUMBERS, *WORDS, *PLACES)


@dataclass(frozen=True)
class Outcome:
    """A command, and what it did."""

    verb: str
    name: str
    value: str
    words: tuple[str, ...]
    code: int | None
    """None where it did not end in time."""
    seconds: float
    out: str
    error: str
    left: tuple[str, ...]

    @property
    def message(self) -> str:
        """The line of the refusal."""
        return next((line for line in self.error.splitlines() if line.startswith("steady: ")), "")

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, by kind."""
        faults = []
        if "Traceback (most recent call last)" in self.error + self.out:
            faults.append("traceback")
        if self.code is None:
            faults.append("hang")
        elif self.code not in (0, 1, 2, 75, 130):
            faults.append(f"exit code {self.code}")
        if self.code == 1:
            faults.append("exit code 1")
        if self.code == 2:
            if len([line for line in self.error.splitlines() if line.startswith("steady: ")]) != 1:
                faults.append("not one line")
            shown = (
                self.value,
                repr(self.value)[1:-1],
                self.value[:40],
                self.name.split()[0],
                self.value.split("\n")[0],
            )
            if not any(text and text in self.message for text in shown) and not _names_number(self.value, self.message):
                faults.append("value not named")
            if len(self.message) > 600:
                faults.append("long line")
        if self.code not in (0, None) and self.left:
            faults.append("files left")
        if any(ord(c) < 32 and c != "\n" for c in self.error.replace("\r", "").replace("\t", "")):
            faults.append("control characters")
        return faults


def _names_number(value: str, message: str) -> bool:
    with suppress(ValueError, OverflowError):
        return any(
            f(float(value)) in message for f in (str, lambda x: f"{x:g}", lambda x: f"{x:,.0f}", lambda x: f"{x:.0f}")
        )
    return False


def make_files(folder: Path) -> None:
    """Write the files that the commands are about; a run is trained, in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for label in range(3):
        (folder / "photos" / f"class{label}").mkdir(parents=True)
        for number in range(8):
            image = Image.new("RGB", (8, 8), (80 * label, 10 * number, 100))
            image.putpixel((number % 8, label), (255, 255, 255))
            image.save(folder / "photos" / f"class{label}" / f"{number}.png")
    shutil.copy(folder / "photos" / "class1" / "1.png", folder / "cat.png")
    rows = [f"photos/class{label}/{number}.png,class{label}" for label in range(3) for number in range(8)]
    (folder / "table.csv").write_text("\n".join(["path,label", *rows]))
    (folder / "text.txt").write_text("some words\n")
    (folder / "hosts").write_text("one\ntwo\n")
    (folder / "recipe.toml").write_text('[model]\nname = "mlp"\n')
    (folder / "empty").mkdir()
    (folder / "data").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "recipe.json").write_text("{")
    (folder / "broken" / "events.jsonl").write_text("{")
    (folder / "locked").mkdir()
    (folder / "locked.txt").write_text("x")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    for words in (
        "pack photos photos.rec --encoding png",
        f"train photos.rec --run run {TRAIN}",
        "convert run -o net-0000.params",
    ):
        outcome = run_one("", "", "", shlex.split(words), folder)
        if outcome.code != 0:
            raise SystemExit(f"steady {words} ends with {outcome.code}:\n{outcome.error}")


@dataclass(frozen=True)
class Argument:
    """A flag or an argument of a verb."""

    name: str
    hint: Any
    position: int | None = None


def arguments_of(verb: str) -> list[Argument]:
    """List what a verb takes, by the definitions of the command line."""
    arguments, place = [], 0
    for argument in app()[verb].assemble_argument_collection(parse_docstring=False):
        if argument.name == "*":
            continue
        if argument.name.startswith("-"):
            arguments.append(Argument(argument.name, argument.hint))
        elif argument.field_info.kind is not inspect.Parameter.KEYWORD_ONLY:
            arguments.append(Argument(argument.name, argument.hint, place))
            place += 1
    return arguments


def commands(verb: str, flags: Sequence[str] = ()) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name of a flag, a value and the words of a command that has it."""
    for base in BASES.get(verb, ()):
        words = shlex.split(base)
        yield "base", "", words
        firsts = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
        for argument in arguments_of(verb):
            if flags and argument.name not in flags:
                continue
            for value in _values(argument):
                if argument.position is None:
                    last = [words.index("train")] if verb == "launch" else [len(words)]
                    yield argument.name, value, [*words[: last[0]], f"{argument.name}={value}", *words[last[0] :]]
                elif not value.startswith("-"):
                    given = words[:firsts]
                    at = min(argument.position, len(given))
                    yield argument.name, value, [*given[:at], value, *given[at + 1 :], *words[firsts:]]
            if argument.position is None and argument.hint is not bool:
                yield argument.name, "", [*words, argument.name]


def _values(argument: Argument) -> Iterable[str]:
    kinds = {argument.hint, *get_args(argument.hint)}
    if argument.hint is bool:
        return ("nonsense", "", "2", "no such")
    inner = {get_origin(kind) or kind for kind in (*kinds, *(arg for kind in kinds for arg in get_args(kind)))}
    if inner & {str, Path}:
        return VALUES
    if inner & {int, float}:
        return (*NUMBERS, *WORDS[:3], "photos", "1e400", "1,5")
    return (*NUMBERS[:4], *WORDS) if Literal in inner else VALUES


def run_one(verb: str, name: str, value: str, words: Sequence[str], files: Path) -> Outcome:
    """Run a command to its end."""
    child = Child(verb, name, value, words, files)
    while not child.poll():
        time.sleep(0.01)
    return child.outcome()


class Child:
    """A command in a forked process, in a copy of the files."""

    def __init__(self, verb: str, name: str, value: str, words: Sequence[str], files: Path) -> None:
        self.asked = verb, name, value, tuple(words)
        self.folder = Path(tempfile.mkdtemp(prefix="wrong-values-"))
        self.place = files if not verb else self.folder / "w"
        if verb:
            shutil.copytree(files, self.place, symlinks=True, copy_function=_copy)
            for locked in ("locked", "locked.txt"):
                (self.place / locked).chmod(0)
        self.before = _tree(self.place)
        self.code: int | None = None
        self.begun = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            self._run([*verb.split(), *words], is_ours=not verb)

    def _run(self, words: list[str], *, is_ours: bool) -> None:
        code = 70
        try:
            os.setsid()
            for number, name in enumerate(("in", "out", "error")):
                where = os.devnull if number == 0 else str(self.folder / name)
                os.dup2(os.open(where, os.O_CREAT | os.O_RDWR), number)
            os.chdir(self.place)
            os.environ.update(HOME=str(self.folder / "home"), XDG_CACHE_HOME=str(self.folder / "cache"))
            os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="200")
            sys.stdout, sys.stderr = open(1, "w", errors="surrogateescape"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
            if not is_ours:
                _drop_capabilities()
            socket.socket.connect = _refuse  # type: ignore[assignment, method-assign]
            code = main(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - the edge of the process
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - self.begun < SECONDS * (1 if self.asked[0] else 6):
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        return True

    def outcome(self) -> Outcome:
        out, error = ((self.folder / name).read_text(errors="backslashreplace") for name in ("out", "error"))
        seconds = time.monotonic() - self.begun
        left = tuple(sorted(_tree(self.place) - self.before))
        shutil.rmtree(self.folder, ignore_errors=True)
        return Outcome(*self.asked, self.code, seconds, out, error, left)


def _drop_capabilities() -> None:
    """Make a process of root an ordinary one, which may not open what its modes forbid; of no effect for others."""
    libc = ctypes.CDLL(None)
    libc.prctl(28, 1, 0, 0, 0)  # PR_SET_SECUREBITS, SECBIT_NOROOT: nor do its children
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def _refuse(self: socket.socket, address: object) -> None:
    raise OSError(101, "Network is unreachable")


def _copy(source: str, target: str) -> None:
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _tree(folder: Path) -> set[str]:
    return {os.path.relpath(os.path.join(root, name), folder) for root, _, names in os.walk(folder) for name in names}  # noqa: PTH118


def run_all(work: Iterable[tuple[str, str, str, list[str]]], files: Path, jobs: int) -> Iterator[Outcome]:
    """Run commands, ``jobs`` at a time."""
    running: list[Child] = []
    for words in work:
        while len(running) >= jobs:
            for child in [child for child in running if child.poll()]:
                running.remove(child)
                yield child.outcome()
            time.sleep(0.005)
        running.append(Child(*words, files))
    while running:
        for child in [child for child in running if child.poll()]:
            running.remove(child)
            yield child.outcome()
        time.sleep(0.005)


def load() -> None:
    """Import what the children would each import anew."""
    for name in ("timm", "torch._dynamo", "torchvision", *(f"steadytrain.{name}" for name in ("export", "tuning"))):
        import_module(name)


def report() -> int:
    """Run what the command line asks for; print the faults, and the counts by kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verbs", nargs="*")
    parser.add_argument("--flag", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "wrong-values")
    asked = parser.parse_args()
    load()
    files = asked.work / "files"
    if not files.exists():
        make_files(files)
    verbs = asked.verbs or [verb for verb in VERBS if verb not in ("train", "finetune", "resume", "schedule")]
    for verb in verbs:
        log = asked.work / f"{verb.replace(' ', '-')}.jsonl"
        begun, count = time.monotonic(), 0
        kinds: dict[str, int] = {}
        work = [(verb, *command) for command in commands(verb, asked.flag)]
        with log.open("a" if asked.flag else "w") as file:
            for outcome in run_all(work, files, asked.jobs):
                count += 1
                print(json.dumps({**asdict(outcome), "faults": outcome.faults}), file=file, flush=True)
                for fault in outcome.faults:
                    kinds[fault] = kinds.get(fault, 0) + 1
        flags = len({words[1] for words in work})
        print(f"{verb}: {flags} flags, {count} commands, {time.monotonic() - begun:.0f} s, {kinds}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report())
