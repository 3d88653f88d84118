"""The command ``steady``: each verb is a file beside this one, loaded only when it is typed."""

from __future__ import annotations

import os
import sys

from cyclopts import App, CycloptsError

from steadytrain import __version__
from steadytrain.errors import SteadyError

VERBS = {
    "demo": "See all of it in half a minute: no network, no data.",
    "pack": "Pack a folder of images into one record file.",
    "feed": "Measure how fast images can be read, decoded and cut.",
    "train": "Train a classifier from scratch; the same command resumes it.",
    "finetune": "Adapt a pretrained model to your classes.",
    "evaluate": "Top-1, top-5 and loss on every image, with a confidence interval.",
    "predict": "The likeliest classes of single images.",
    "report": "Tables, curves and one HTML page from runs.",
}

app = App(
    name="steady",
    help="Train and fine-tune image classifiers at the steady state.",
    version=__version__,
    result_action="return_value",
)
for _verb, _summary in VERBS.items():
    app.command(f"steadytrain.cli.{_verb}:{_verb}", name=_verb, help=_summary)


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code (0 done, 1 failed, 2 usage, 75 preempted after saving)."""
    try:
        result = app(argv, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except SteadyError as error:
        return _fail(str(error), error.exit_code)
    except CycloptsError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    print(f"steady: {message}", file=sys.stderr)
    return code
