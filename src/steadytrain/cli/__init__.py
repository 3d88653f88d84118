"""The command ``steady``: each verb is a file beside this one, loaded only when it is typed."""

from __future__ import annotations

import errno
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, CycloptsError, Parameter, convert
from cyclopts.exceptions import UnusedCliTokensError

from steadytrain import __version__
from steadytrain.errors import SteadyError, storage_error
from steadytrain.machine.process import share_cores

VERBS = {
    "demo": "See all of it in half a minute: no network, no data.",
    "pack": "Pack images, whatever they lie in, into record files.",
    "check": "What is wrong with images or records, where, and what to do about it.",
    "feed": "Measure how fast images can be read, decoded and cut.",
    "bench": "Measure how fast a network trains here, by number formats, layouts, compiled code and batch sizes.",
    "bandwidth": "Measure how fast ranks exchange gradients.",
    "train": "Train a classifier from scratch; the same command resumes it.",
    "finetune": "Adapt a pretrained model to your classes.",
    "launch": "The same training on several processes and machines.",
    "evaluate": "Top-1, top-5 and loss on every image, with a confidence interval.",
    "predict": "The likeliest classes of single images.",
    "watch": "A run, or any training process, as it goes on.",
    "diagnose": "What holds a run back, what to change, and what that saves.",
    "report": "Tables, curves and one HTML page from runs.",
    "models": "Names, parameters, multiply-adds, licences, and where the weights are.",
    "doctor": "What this machine is, and what slows or stops training on it.",
}


def _exact(kind: Any, tokens: Sequence[Any]) -> Any:
    """Convert as cyclopts does, but refuse 1.5 for a whole number, which that would round."""
    kinds = get_args(kind) or (kind,)
    if int in kinds and float not in kinds and any("." in token.value for token in tokens):
        raise ValueError(f"{tokens[0].value} is no whole number")
    return convert(kind, tokens)


app = App(
    name="steady",
    help="Train and fine-tune image classifiers at the steady state.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    # A flag given again replaces what was given before.
    default_parameter=Parameter(allow_repeating=True, converter=_exact),
)
for _order, (_verb, _summary) in enumerate(VERBS.items()):
    app.command(f"steadytrain.cli.{_verb}:{_verb}", name=_verb, help=_summary, sort_key=_order)


def main(argv: list[str] | None = None) -> int:
    """Run one command line; the exit code (0 done, 1 failed, 2 usage, 3 stood still, 75 preempted after saving)."""
    _ready_output()
    if argv is None:  # a process of its own: what it is started with is its own as well
        share_cores()
    given = sys.argv[1:] if argv is None else argv
    try:
        result = app(_with_command(given), exit_on_error=False, print_error=False)
        _print_examples(given)
        sys.stdout.flush()
    except SteadyError as error:
        return _fail(str(error), error.exit_code)
    except UnusedCliTokensError as error:
        return _fail(f"one argument too many: {' '.join(error.unused_tokens or ())} (quote a path that has spaces)", 2)
    except CycloptsError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted: the same command goes on, or begins again", 130)
    except BrokenPipeError:
        _silence_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _silence_output()
        return _fail(str(storage_error(error, Path(error.filename or "standard output"))), 1)
    return result if isinstance(result, int) else 0


def _with_command(argv: Sequence[str]) -> list[str]:
    """``steady watch -- COMMAND``: the two dashes stay among the arguments, by which a command is told from a run.

    ``steady launch`` also takes the words of older trackers, which are put into ours.
    """
    if argv[:1] == ["launch"]:
        from steadytrain.cli.launch import with_new_words

        return ["launch", *with_new_words(argv[1:])]
    if argv[:1] != ["watch"] or "--" not in argv:
        return list(argv)
    at = argv.index("--")
    return [*argv[:at], "--", *argv[at:]]


def _print_examples(argv: Sequence[str]) -> None:
    """End the help of a verb with the examples of its function."""
    if argv and argv[0] in VERBS and not {"--help", "-h"}.isdisjoint(argv):
        shown = examples(inspect.getdoc(app[argv[0]].default_command) or "")[1]
        print("Examples:", *(f"  {one}" for one in shown), "", sep="\n")


def examples(docstring: str) -> tuple[str, list[str]]:
    """The text of a verb's docstring, and the commands under its heading Examples."""
    text, _, rest = re.sub(r"\n(Args|Raises|Returns):\n(    .*\n?|\n)*", "\n", docstring).partition("\nExamples\n")
    return text.strip(), [line.strip() for line in rest.splitlines() if line.strip().startswith("steady ")]


def _ready_output() -> None:
    """A name that the terminal's encoding lacks is escaped, and a closed standard output swallows what is printed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    elif hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _silence_output() -> None:
    """The interpreter flushes standard output once more when it exits: not into what has just failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    print(f"steady: {message}", file=sys.stderr)
    return code
