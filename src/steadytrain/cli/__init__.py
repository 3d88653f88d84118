"""The command ``steady``: each verb is a function in a file of this folder, loaded only when it is typed."""

from __future__ import annotations

import errno
import inspect
import math
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from steadytrain import __version__
from steadytrain.cli.worded_errors import examples, is_assignment, worded_errors
from steadytrain.deprecation import Deprecation
from steadytrain.errors import WRONG_PLACES, FailedError, InputError, SteadyError, storage_error
from steadytrain.format import fold
from steadytrain.machine.platform import open_descriptor, soft_limit
from steadytrain.machine.process import SIGINT_ALONE, TO_END, interrupted_once, lasting_imports, share_cores

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from cyclopts import App

SUMMARY = "Train and fine-tune image classifiers, and find out what slows a run down."
VERBS = {
    "demo": "Run the whole workflow in half a minute, without a network or your own data.",
    "fetch": "Fetch public data sets by name, check them, and pack them with their known splits.",
    "pack": "Pack images from folders, lists, tables, archives or data set files into record files.",
    "check": "Find damaged and duplicate images, and with --suspects mislabelled ones, and what to do about them.",
    "feed": "Measure how fast images are read, decoded and cropped.",
    "bench": "Measure how fast a network trains here: batch sizes, number formats, layouts, compiled code.",
    "bench infer": "Measure latency and images per second of inference: networks, engines, batch sizes.",
    "tune": "Choose batch size, number format, threads and more by measuring; write a recipe with the reasons.",
    "bandwidth": "Measure how fast ranks exchange gradients.",
    "scale": "Predict speed, time and cost on several devices from measurements of one.",
    "train": "Train a classifier from scratch; the same command resumes it.",
    "finetune": "Adapt a pretrained model to your classes.",
    "resume": "Resume a run from its newest checkpoint; flags that are left out keep the run's values.",
    "sweep": "Train every combination of some values with several seeds, and compare the results.",
    "schedule": "Show a recipe's learning rate, momentum and batch size over a run, or find a learning rate.",
    "launch": "Start a training command on several processes or machines: ssh, MPI, Slurm, Kubernetes, ...",
    "evaluate": "Compute top-1, top-5 and loss on every image, with a confidence interval.",
    "predict": "Predict the classes of images.",
    "embed": "Write the features of images by a frozen network, as .npy or .parquet.",
    "export": "Write a trained model as ONNX, OpenVINO, torch.export or a folder for timm and the hub, checked.",
    "serve": "Serve predictions over HTTP; write a Dockerfile and a Kubernetes manifest for it.",
    "watch": "Watch a run, or any training process, live.",
    "diagnose": "Find what slows a run down, what to change, and what that saves.",
    "cost": "Compute what a run costs so far and in all, on spot and on other machines.",
    "replay": "Repeat one update of a run, to find what became NaN or infinite; save its images.",
    "runs": "List runs: filter, sort, compare, tag, clean up.",
    "report": "Write tables, curves and an HTML page on runs, or serve a page of them all.",
    "convert": "Convert MXNet checkpoints to weights of steadytrain, and back.",
    "models": "List models: parameters, multiply-adds, licences, and where the weights are.",
    "doctor": "Check this machine: what slows training down or keeps it off the GPU.",
    "help": "Explain a command, a cause that a verdict names, or an error.",
    "mxnet": "Translate and run command lines of MXNet's image-classification tools.",
}
START = {
    "steady demo": "everything once, in half a minute, without data",
    "steady check photos/": "a folder for each class: is it sound?",
    "steady finetune photos/": "train on it; --train probe: an answer in a minute",
    "steady report RUN": "how good it is, with its mistakes as pictures",
    "steady predict RUN cat.jpg": "use it; RUN is what finetune printed",
    "steady watch --pid PID": "why any training process is slow, from outside",
}
"""What a newcomer types first."""
HELP_GROUPS = {
    "Train": ("train", "finetune", "resume", "sweep", "schedule", "launch"),
    "Use a model": ("evaluate", "predict", "embed", "export", "serve", "models", "convert"),
    "Understand a run": ("runs", "report", "watch", "diagnose", "cost", "replay"),
    "Data": ("fetch", "check", "pack", "feed"),
    "This machine": ("doctor", "bench", "bench infer", "tune", "scale", "bandwidth"),
    "Help": ("help", "demo", "mxnet"),
}
"""The verbs as ``steady --help`` lists them: each once."""
MODULES = {
    **dict.fromkeys(("finetune", "resume"), "train"),
    **dict.fromkeys(("diagnose", "report"), "runs"),
    "predict": "evaluate",
    "bench infer": "bench_infer",
}
"""The module of a verb's function in this folder, where it is not called as the verb."""
TRAINING_VERBS = ("train", "finetune", "resume")
WITH_RANKS = (*TRAINING_VERBS, "replay", "evaluate", "bandwidth", "tune", "scale", "mxnet")
"""Verbs whose processes may wait for each other."""
_ZSH_WITHOUT_VALUES = r"""^(\s+(['"])(?:\*?\d*|\*?-[^[]*\[.*\]):(?:[^:\\]|\\.)*)(\2 \\)$"""
"""A word or the value of a flag of which the script for zsh only says what it is."""

RECIPE_VERBS = (*TRAINING_VERBS, "sweep", "schedule")
"""Verbs that take the flags of a recipe."""
DEPRECATED_FLAGS: dict[tuple[str, str], Deprecation] = {}
"""(verb, flag) -> what the flag is called now; ``instead`` may hold a value: ``--precision fp16``."""
SHELLS = ("bash", "zsh", "fish")
INTERRUPTED = "interrupted: the same command resumes, or starts over"

_TORCHVISION = (
    "torchvision does not fit the torch that is installed ({}): install both again, in one command and from one index;"
    " steady doctor says which there are"
)
_NO_ROOM = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
"""Messages of the system's loader for a library that does not fit into memory."""


def module_of(verb: str) -> str:
    """Return the module that a verb's function is in."""
    return f"steadytrain.cli.{MODULES.get(verb, verb)}"


@cache
def app() -> App:
    """Build the command line, with all its verbs."""
    return _build_app(VERBS)


def _build_app(verbs: Iterable[str]) -> App:
    """Build a command line; the parser is imported here, as ``steady --help`` does without it."""
    from cyclopts import UNSET, App, CoercionError, Parameter, convert

    def convert_exactly(kind: Any, tokens: Sequence[Any]) -> Any:
        """Convert as cyclopts does, but refuse what it takes: an empty text, 1.5 for a whole number, nan, a URI."""
        kinds = get_args(kind) or (kind,)
        for token in tokens:
            is_refused = not token.value and token.implicit_value is UNSET
            with suppress(ValueError):
                is_refused |= float in kinds and not math.isfinite(float(token.value))
            if is_refused or (int in kinds and float not in kinds and "." in token.value):
                raise CoercionError(token=token, target_type=kind)
            if Path in kinds and "://" in token.value:  # a path would lose one of the slashes
                raise CoercionError(f"{token.value} is an address; a path on this machine is needed", token=token)
        return convert(kind, tokens)

    command = App(
        name="steady",
        help=SUMMARY,
        version=__version__,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        # A flag given again replaces what was given before; none has an opposite.
        default_parameter=Parameter(
            allow_repeating=True, converter=convert_exactly, negative="", show_default=default_text
        ),
    )
    for order, verb in enumerate(verbs):
        command.command(f"{module_of(verb)}:{verb.replace(' ', '_')}", name=verb, help=VERBS[verb], sort_key=order)
    return command


def _completion(shell: str) -> str:
    """Return the script by which a shell completes verbs of one word, flags, and otherwise files."""
    with _help_of("train"):
        command = _build_app(verb for verb in VERBS if " " not in verb)
        script = command.generate_completion(shell=shell)  # type: ignore[arg-type]
    if shell == "bash":
        return script.replace("complete -F", "complete -o default -F")
    if shell == "zsh":
        # The file _steady is the body of a function of that name, and has to call the one that it defines.
        script = script.replace("_cyclopts_steady()", "_steady()") + '\n_steady "$@"'
        return re.sub(_ZSH_WITHOUT_VALUES, r"\1:_files\3", script, flags=re.MULTILINE)
    return script  # fish completes files by itself


def default_text(value: object) -> str | None:
    """Format a flag's default for its help; None where it goes without saying.

    >>> default_text(("fp32",)), default_text(128), default_text(False), default_text(())
    ('fp32', '128', None, None)
    """
    if value is None or value is False or value == ():
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def usage(verb: str, command: App) -> str:
    """Write a verb's usage line: what stands without a flag comes first, then the flags.

    >>> usage("train", app()["train"]), usage("launch", app()["launch"])
    ('steady train DATA [OPTIONS]', 'steady launch [OPTIONS] [-- COMMAND...]')
    """
    arguments = command.assemble_argument_collection(default_parameter=app().default_parameter, parse_docstring=True)
    first: list[str] = []
    flags: list[str] = []
    last: list[str] = []
    for argument in arguments:
        name = argument.name
        if not argument.show:
            continue
        if name.startswith("-"):
            flags += [f"{name} VALUE"] if argument.required else []
            continue
        if argument.field_info.kind is inspect.Parameter.VAR_POSITIONAL and "..." not in name:
            name += "..."
        takes_flags = argument.parameter.allow_leading_hyphen
        name = f"-- {name}" if takes_flags and verb == "launch" else name
        is_required = argument.required or "[required" in (argument.parameter.help or "")
        (last if takes_flags else first).append(name if is_required else f"[{name}]")
    return " ".join(["steady", verb, *first, *flags, "[OPTIONS]", *last])


class TorchImports:
    """A finder of modules that shows on the terminal when torch is loaded, and then that the command works.

    Torch takes seconds, and so does what is read and built after it: whichever command it is, and whatever imports it,
    no such time passes without a word.

    Args:
        stack: is closed at the command's end.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the specification of torch, which says that it is loaded; None for other modules."""
        if name != "torch":
            return None
        from importlib.util import find_spec

        from steadytrain.cli.console import is_waiting, status

        sys.meta_path.remove(self)
        if (spec := find_spec(name)) is None or spec.loader is None:
            return spec
        execute, is_shown, imports = spec.loader.exec_module, is_waiting(), ExitStack()
        imports.enter_context(lasting_imports())

        def exec_module(module: ModuleType) -> None:
            with imports, nullcontext() if is_shown else status("loading torch"):
                execute(module)
            if not is_shown:
                self._stack.enter_context(status("working"))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(argv: list[str] | None = None) -> int:
    """Run one command line; the exit code (0 done, 1 failed, 2 usage, 3 stood still, 75 stopped after saving)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: read from nothing, print into nothing
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
    if hasattr(sys.stdout, "reconfigure"):  # escape names that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    if argv is None:  # a process of its own: its cores and its environment are ours to set up
        share_cores()
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about strangers' files, of which we say what is wrong
        for harmless in (
            "Attempting to run cuBLAS, but there was no current CUDA context",
            "The given buffer is not",
            "`torch.distributed.all_gather_into_tensor` is deprecated",
        ):
            warnings.filterwarnings("ignore", message=harmless)  # of torch, about its own threads and files
    words = sys.argv[1:] if argv is None else argv
    # Ranks wait for each other in code that no handler interrupts: the system ends them at once.
    with interrupted_once(SIGINT_ALONE if {*words[:1]} & {*WITH_RANKS} else TO_END) as received, ExitStack() as stack:
        if argv is None:
            sys.meta_path.insert(0, TorchImports(stack))
        code = _code_of(words)
    if received and received[0] != signal.SIGINT:  # whoever waits for this process is to see what ended it
        with suppress(OSError):
            sys.stdout.flush()
        os.kill(os.getpid(), received[0])
    if argv is None:
        for name in TO_END if code == 75 else ():  # srun asks again while Python ends: the code is to say "saved"
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        _end_where_ranks_are_left(code)
    return code


def _end_where_ranks_are_left(code: int) -> None:
    """End this process at once where an error has left a group of ranks open: taking it apart may never end."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _code_of(words: Sequence[str]) -> int:
    """Run a command line; its exit code, where it fails after a line that says why."""
    try:
        result = _run(words)
        sys.stdout.flush()
    except SteadyError as error:
        kind = type(error).__name__ if isinstance(error, FailedError) else ""
        return _fail(f"{error} ({gone})" if (gone := _gone_words()) else str(error), error.exit_code, kind)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as ended:  # a rank whose error another one prints
        if not isinstance(ended.code, int):
            raise
        return ended.code
    except RuntimeError as error:
        if str(error).startswith(("operator torchvision::", "Symlink loop")):  # pathlib, before Python 3.13
            return _fail(str(error), 2) if "Symlink" in str(error) else _fail(_TORCHVISION.format(error), 1)
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return _interrupted()  # Ctrl-C within a condition's own code, which then misses its lock
    except BrokenPipeError:
        _silence_output()
        return 0
    except (ImportError, MemoryError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return _fail("torch is not installed here: pip install torch, then the same command", 1)
        if isinstance(error, ImportError) and not any(words in str(error) for words in _NO_ROOM):
            raise
        return _fail(_no_memory(error), 1)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = str(error.filename)
            return _fail(f"{name[:60]}... is no path: of {len(name):,} characters no name of a file may be", 2)
        if problem := _system_words(error):
            return _fail(problem, 1)
        if error.errno in WRONG_PLACES and error.filename:
            return _fail(f"cannot use {error.filename} ({error.strerror}): name another, or change its permissions", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _silence_output()
        return _fail(str(storage_error(error, Path(error.filename or "standard output"))), 1)
    return result if isinstance(result, int) else 0


def _run(words: Sequence[str]) -> object:
    """Parse a command line and call its verb. Raises InputError where it cannot be parsed."""
    words = _help_words(words)
    if list(words) in ([], ["--help"], ["-h"]):
        _print_help()
        return 0
    if words[0] == "--completion":
        if len(words) != 2 or words[1] not in SHELLS:
            raise InputError(f"--completion takes the name of a shell: {', '.join(SHELLS)}")
        print(_completion(words[1]))
        return 0
    words = join_verb(words)
    verb = words[0]
    if verb in RECIPE_VERBS and "--help-recipe" in words:
        return _print_recipe_help(words[words.index("--help-recipe") + 1 :])
    if verb == "watch" and "--" in words:
        # The parser drops the first two dashes: a second pair tells a command from a run.
        words.insert(words.index("--"), "--")
    elif verb == "launch":
        from steadytrain.cli.console import note
        from steadytrain.interop.mxnet.launchers import translate

        translated = translate(words[1:])  # the words of older trackers
        for line in translated.notes:
            note(line)
        words = [verb, *translated.argv]
    if verb not in VERBS and not verb.startswith("-"):
        from steadytrain.cli.foreign_commands import foreign_command

        if ours := foreign_command(words, tuple(VERBS)):
            raise InputError(f'Unknown command "{verb}". Instead: {shlex.join(ours)} (docs: help/other-tools)')
    elif any(map(is_assignment, words[1:2])):
        from steadytrain.cli.foreign_commands import hint_of_assignments

        raise InputError(f"{words[1]} has no dashes{hint_of_assignments(words[1:], verb, is_whole=True)}")
    words = _own_words(words)
    is_help = not {"--help", "-h"}.isdisjoint(words)
    if verb in VERBS and is_help:
        command = app()[verb]
        command.usage = f"Usage: {usage(verb, command)}"
    with _worded_errors(words), _help_of(verb) if is_help and verb in RECIPE_VERBS else nullcontext():
        result = app()(words, exit_on_error=False, print_error=False)
    if verb in VERBS and is_help:
        lines = examples(inspect.getdoc(app()[verb].default_command) or "")[1]
        print("Examples:", *(f"  {line}" for line in lines), "", sep="\n")
    return result


def _print_help() -> None:
    """Print all verbs in groups, after those that a newcomer types first, in the terminal's width."""
    width = max(40, min(100, shutil.get_terminal_size().columns))
    print(f"Usage: steady COMMAND\n\n{SUMMARY}")
    flags = {"--help, -h": "Show this text; after a command, all that it takes.", "--version": "Show the version."}
    flags["--completion"] = f"Print the completion of commands for a shell: {', '.join(SHELLS)}."
    groups = {group: {verb: VERBS[verb] for verb in verbs} for group, verbs in HELP_GROUPS.items()}
    for heading, rows in {"Start here": START, **groups, "Flags": flags}.items():
        print(f"\n{heading}:")
        indent = 4 + max(map(len, rows))
        for name, text in rows.items():
            print(textwrap.fill(text, width, initial_indent=f"  {name:{indent - 2}}", subsequent_indent=" " * indent))
    print("\nA command's flags and examples: steady COMMAND --help")


def _help_words(words: Sequence[str]) -> list[str]:
    """Replace ``help VERB`` by ``VERB --help``, and ``help`` alone by ``--help``."""
    if list(words) == ["help"]:
        return ["--help"]
    verb = " ".join(words[1:])
    if not words or words[0] != "help" or verb not in VERBS:
        return list(words)
    from steadytrain.cli.help import topics

    return list(words) if verb in topics() else [verb, "--help"]  # launch is a cause as well


def join_verb(words: Sequence[str]) -> list[str]:
    """Make one word of a verb of two.

    >>> join_verb(["bench", "infer", "resnet50"]), join_verb(["bench", "train"])
    (['bench infer', 'resnet50'], ['bench', 'train'])
    """
    verb = " ".join(words[:2])
    return [verb, *words[2:]] if verb in VERBS else list(words)


def _help_of(verb: str) -> AbstractContextManager[None]:
    from steadytrain.cli.options import help_of

    return help_of(verb)


def _print_recipe_help(words: Sequence[str]) -> int:
    """Print the keys of the recipe, or of the part that is the first word, in the terminal's width."""
    from steadytrain.config.reference import recipe_keys

    width = max(40, min(120, shutil.get_terminal_size().columns))
    for row in recipe_keys(words[0] if words and not words[0].startswith("-") else ""):
        print(textwrap.fill(f"{row.key}: {row.type}", width, subsequent_indent=" " * 8))
        usual = row.train if row.train == row.finetune else f"{row.train} (train), {row.finetune} (finetune)"
        for text in (row.meaning, f"Default: {usual}. Example: {row.example}"):
            indent = " " * 4
            print(textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))
    return 0


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line without running it; return the arguments of its verb's function. Raises InputError."""
    with _worded_errors(words):
        bound = app().parse_args(_own_words(words), exit_on_error=False, print_error=False)[1]
    return bound.arguments


def _own_words(words: Sequence[str]) -> list[str]:
    """Replace deprecated flags; in verbs that train, flags of other trainers; in predict ``-``, standard input."""
    words = _current_flags(words)
    if words[0] == "predict":  # the parser takes a single dash for a flag, and the path is the same
        return ["./-" if word == "-" else word for word in words]
    if words[0] not in RECIPE_VERBS:
        return list(words)
    from steadytrain.cli.console import note
    from steadytrain.cli.foreign_flags import read_flags

    def is_own(flag: str) -> bool:
        return any(flag in argument.names for argument in app()[verb].assemble_argument_collection())

    verb = words[0]
    words, notes = read_flags(words, is_own)
    for line in notes:
        note(line)
    return words


def _current_flags(words: Sequence[str]) -> list[str]:
    """Replace the deprecated flags of a verb by what they are now; one line about each."""
    current, rest = list[str](words[:1]), words[1:]
    own = rest.index("--") if "--" in rest else len(rest)
    for word in rest[:own]:
        flag, equals, value = word.partition("=")
        if (known := DEPRECATED_FLAGS.get((words[0], flag))) is None:
            current.append(word)
            continue
        from steadytrain.cli.console import note

        note(str(known))
        current += [f"{known.instead}={value}"] if equals else known.instead.split()
    return [*current, *rest[own:]]


def _worded_errors(words: Sequence[str]) -> AbstractContextManager[None]:
    """Turn the parser's errors into InputError, with what a user should type instead."""

    def hint_of(tokens: Sequence[str]) -> str:
        from steadytrain.cli.foreign_commands import hint_of_assignments, hint_of_places

        return hint_of_assignments(tokens, words[0]) or hint_of_places(words, tokens)

    return worded_errors(words, app(), hint_of, trains=words[0] in RECIPE_VERBS)


def _no_memory(error: ImportError | MemoryError) -> str:
    """Return a sentence saying that a library cannot be loaded, or an array not be made, for want of memory."""
    from steadytrain.format import size
    from steadytrain.machine import facts

    problem = "memory ran out" if isinstance(error, MemoryError) else f"no memory to load a library ({error})"
    limit, remedy = f"{size(facts.memory_bytes())} of memory may be used here", "use a machine, or a job, with more"
    if most := soft_limit("AS"):
        limit, remedy = (
            f"{limit}, and {size(most)} of address space (ulimit -v)",
            "raise the limit (ulimit -v unlimited)",
        )
    return f"{problem}: {limit}; {remedy}"


def _system_words(error: OSError) -> str:
    """Say what this process may not have, or what is gone from under it; empty where that is not the fault."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most = soft_limit("NOFILE")
        limit = f"{most:,} files may be open at once (ulimit -n)" if most else str(error.strerror)
        return (
            f"no further file can be opened: {limit}; raise the limit (ulimit -n 1024) and run the same command again"
        )
    if error.filename is not None and str(error.filename).startswith("/proc/"):
        return f"cannot read {error.filename} ({error.strerror}): mount /proc here (mount -t proc proc /proc)"
    return _gone_words()


def _gone_words() -> str:
    """Say that the working folder was deleted, from where no name leads anywhere; empty where it was not."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return "the folder that this command was started in is gone: change to one that is there"
    return ""


def _silence_output() -> None:
    """Keep the interpreter, which flushes standard output once more when it exits, from failing a second time."""
    os.dup2(open_descriptor(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted() -> int:
    """Say that the command was interrupted, once for all ranks of a job."""
    from steadytrain.distributed.world import world_from_environment

    is_first = True
    with suppress(InputError):  # ranks that are misnamed are no job
        is_first = world_from_environment(os.environ).is_first
    with suppress(OSError):  # the terminal may be gone
        if is_first:
            _fail(INTERRUPTED, 130)
    return 130


def _fail(message: str, code: int, kind: str = "") -> int:
    """Print an error, on a terminal with the command that explains it; ``kind``: the name of its class."""
    if (console := sys.modules.get("steadytrain.cli.console")) is not None:
        console.give_way()
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    print(fold(f"steady: {message}", columns), file=sys.stderr)
    if columns is not None:
        from steadytrain.cli.help import topic_of

        if name := topic_of(message, kind):
            print(f"  more: steady help {name}", file=sys.stderr)
    return code
