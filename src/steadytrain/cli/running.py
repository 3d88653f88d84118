"""What ``train``, ``finetune`` and ``demo`` do once the recipe is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from steadytrain.cli.choices import Choices, build_recipe, changes, read_recipe, value_of
from steadytrain.cli.console import Advance, Console, note, progress
from steadytrain.errors import InputError
from steadytrain.recipe import Recipe
from steadytrain.run import Run


def recipe_for(data: str | None, choices: Choices, *, finetune: bool) -> Recipe:
    """The recipe of a command line: the data are looked at first, so that its defaults suit them.

    Raises:
        InputError: nothing to train on, or a value that cannot be.
    """
    from steadytrain.training.data import look
    from steadytrain.training.defaults import default_recipe

    told: dict[str, Any] = {} if choices.recipe is None else read_recipe(choices.recipe)
    given = changes(choices)
    train = data or value_of("data.train", given, told)
    if not isinstance(train, str):
        raise InputError("name the data to train on: a folder of classes or a .rec file")
    classes, size = value_of("data.classes", given, told), value_of("data.size", given, told)
    with packing() as advance:
        facts = look(train, classes=classes, size=size, say=note, progress=advance)
    model = value_of("model.name", given, told)
    defaults = default_recipe(train, facts, model=model, finetune=finetune)
    return build_recipe(defaults, told, given | {"data.train": train})


@contextmanager
def packing() -> Iterator[Callable[[int, int], None]]:
    """A progress bar that appears only when something is packed."""
    with ExitStack() as stack:
        shown: list[Advance] = []

        def advance(done: int, total: int, /) -> None:
            if not shown:
                shown.append(stack.enter_context(progress("packing", total)))
            shown[0](done)

        yield advance


def run_folder(recipe: Recipe, named: str | None) -> Path:
    """``--run``, or a name made of the model, the data and the recipe's digest under ``runs/``."""
    if named is not None:
        return Path(named)
    model = recipe.model.name.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    return Path("runs") / f"{model}-{Path(recipe.data.train).stem}-{recipe.digest[:8]}"


def train_run(recipe: Recipe, choices: Choices) -> int:
    """Create or take up the run, train it before the user's eyes, and say how it came out; the exit code."""
    from steadytrain.reports import summarise, tables
    from steadytrain.supervise import supervise

    run = Run.create(run_folder(recipe, choices.run), recipe)
    ended = run.finished()
    if ended is not None:
        note(f"{run.directory} is finished ({ended.step} steps): change the recipe or name another --run to train anew")
        code = 0
    else:
        with Console(run.events(sparse=True)) as console:
            code = supervise(run, console.show, allow_import=choices.model is not None)
    told = [summarise(run)]
    print(tables.to_json(told) if choices.json else tables.to_text(told))
    _next_commands(run, code)
    sys.stdout.flush()
    return code


def _next_commands(run: Run, code: int) -> None:
    if code:
        note(f"saved; to go on, run the same command again ({run.directory})")
        return
    note("next:")
    for line in (
        f"evaluate {run.directory}",
        f"predict {run.directory} IMAGE...",
        f"report {run.directory} -o report.html",
    ):
        note(f"  steady {line}")
