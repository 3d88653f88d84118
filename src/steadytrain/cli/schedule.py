"""``steady schedule``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import TrainingOptions
from steadytrain.config import Recipe
from steadytrain.config.defaults import SMALL, apply_changes, fit_to_data, usual_recipe
from steadytrain.config.plain import leaves
from steadytrain.errors import InputError, did_you_mean
from steadytrain.run import Run

FILES = (".toml", ".json", ".yaml", ".yml")
"""Suffixes of recipe files."""

KINDS = (".svg", ".html")


def schedule(
    source: str | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    num_train: int | None = None,
    finetune: bool = False,
    force: bool = False,
    options: TrainingOptions = TrainingOptions(),  # noqa: B008
) -> None:
    """Show what a recipe will do: learning rate, momentum and images of its updates. Nothing is trained.

    It takes the flags of steady train. A run's folder shows the schedule of that run; with --num-train the data need
    not be there.

    Args:
        source: A recipe file (.toml, .json, .yaml), a run's folder, or the training data.
        output: Draw it into this file: .svg or .html.
        num_train: Number of training images, where the data are not at hand.
        finetune: Begin with the defaults of steady finetune instead of those of steady train.
        force: Replace the output even if it is not an older report.

    Examples:
        steady schedule runs/a
        steady schedule recipe.toml --num-train 1281167 -o plot.svg
        steady schedule --schedule "cosine:80,to=0.01 constant:10" --epochs 95 --num-train 50000
    """
    from steadytrain.reports.files import write
    from steadytrain.reports.plots import page, svg
    from steadytrain.reports.schedule import forecast, lines, panels

    kind = "" if output is None else _kind_of(output)
    recipe, images = _recipe_and_images(source, options, num_train, finetune=finetune)
    if not recipe.num_steps(images):
        raise InputError("this recipe fits a classifier without updates: it has no schedule")
    shown = forecast(recipe, images)
    if recipe.waits_for_evaluations:
        note("plateau lowers the rate by what evaluations say: shown is the rate without a drop")
    if output is not None:
        about = f"{shown.steps:,} updates of {recipe.batch_size:,} images; {shown.words}"
        drawn, title = panels(shown), f"Schedule of {recipe.model.name}"
        text = svg(drawn, title=title) if kind == ".svg" else page(drawn, title=title, lede=about)
        write(output, text, force=force)
        note(f"wrote {output}")
    if options.json:
        print_json(asdict(shown))
    else:
        print_text("\n".join(lines(shown)))


def _kind_of(output: Path) -> str:
    """Return the suffix of a picture's file. Raises InputError for one that is not known."""
    kind = output.suffix.lower()
    if kind not in KINDS:
        raise InputError(
            f"{output} ends in {kind or 'nothing'}; a plot ends in {' or '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
        )
    return kind


def _recipe_and_images(
    source: str | None, options: TrainingOptions, num_train: int | None, *, finetune: bool
) -> tuple[Recipe, int]:
    """Find the recipe and the number of training images. Raises InputError where they cannot be known."""
    if num_train is not None and num_train < 1:
        raise InputError(f"--num-train is {num_train}; it must be 1 or more")
    if source is not None and Path(source).suffix in FILES and not Path(source).is_dir():
        options, source = replace(options, recipe=Path(source)), None
    elif source is not None and (Path(source) / "recipe.json").exists():
        options, source = replace(options, run=source), None
    if source is None and options.run is not None and (Path(options.run) / "recipe.json").exists():
        run = Run.open(options.run)
        recipe, started = run.recipe.with_(options.changes()), run.progress().started
        if num_train is None and started is not None:
            num_train = int(started.data["num_train"])
    elif num_train is not None:
        recipe = _recipe_without_data(source, options, num_train, finetune=finetune)
    else:
        if source is None and options.value("data.train") is None:
            raise InputError("name the data, or how many images there are to train on: --num-train 50000")
        from steadytrain.cli.train import recipe_for

        recipe = recipe_for(source, options, finetune=finetune)
    return recipe, num_train or _count_images(recipe)


def _recipe_without_data(data: str | None, options: TrainingOptions, num_train: int, *, finetune: bool) -> Recipe:
    """Make the recipe of a command line as training does, but that the data are not looked at."""
    in_file, changes = options.file_values(), options.changes()
    size = options.value("data.size")
    train = data or str(options.value("data.train") or "DATA")
    small = isinstance(size, int) and size <= SMALL
    model = options.value("model.name")
    usual = usual_recipe(train, model=str(model) if model else None, finetune=finetune, small=small)
    recipe = apply_changes(usual, in_file, {**changes, "data.train": train})
    chosen = {**dict(leaves(in_file)), **changes}
    images = num_train if recipe.data.val is not None else round(num_train / (1 - recipe.data.holdout))
    return fit_to_data(recipe, images, chosen=chosen)


def _count_images(recipe: Recipe) -> int:
    from contextlib import closing

    from steadytrain.training.data import open_data

    with closing(open_data(recipe.data, seed=recipe.seed, say=note)) as data:
        return data.num_train
