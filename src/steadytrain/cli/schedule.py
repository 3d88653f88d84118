"""``steady schedule``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text, progress
from steadytrain.cli.options import RECIPES, TrainingOptions, refuse_flags
from steadytrain.config import Recipe
from steadytrain.config.defaults import SMALL, apply_changes, fit_to_data, usual_recipe
from steadytrain.config.timeline import Timeline
from steadytrain.errors import InputError, did_you_mean
from steadytrain.format import count
from steadytrain.machine.facts import accelerators
from steadytrain.machine.process import spin_where_alone
from steadytrain.run import Run

if TYPE_CHECKING:
    from steadytrain.reports.plots import Panel

KINDS = (".svg", ".html")
MOST_UPDATES = 10_000
"""The most updates of a search for a rate: more say no more."""


def schedule(
    source: str | None = None,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    num_train: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    finetune: bool = False,
    find_lr: bool = False,
    updates: Annotated[int, Parameter(validator=Number(gte=20, lte=MOST_UPDATES))] = 300,
    force: bool = False,
    options: TrainingOptions = TrainingOptions(),  # noqa: B008
) -> None:
    """Show what a recipe will do: learning rate, momentum and images of its updates; or find a learning rate.

    It takes the flags of steady train. A run's folder shows the schedule of that run; with --num-train the data need
    not be there.

    --find-lr trains a network from the recipe's initial weights for a few hundred updates while the rate rises, until
    it diverges. It suggests the rate at which the loss slows down, but at most a tenth of the one that diverged
    (Smith 2017). No run is touched.

    Args:
        source: A recipe file (.toml, .json, .yaml), a run's folder, or the training data.
        output: Draw it into this file: .svg or .html.
        num_train: Number of training images, where the data are not at hand.
        finetune: Begin with the defaults of steady finetune instead of those of steady train.
        find_lr: Find a learning rate: train for some hundred updates while it rises.
        updates: Most updates of --find-lr, 20 or more.
        force: Replace the output even if it is not an older report.

    Examples:
        steady schedule runs/a
        steady schedule recipe.toml --num-train 1281167 -o plot.svg
        steady schedule --find-lr photos/ --batch-size 64 -o rates.svg
        steady schedule --schedule "cosine:80,to=0.01 constant:10" --epochs 95 --num-train 50000
    """
    from steadytrain.reports.schedule import forecast, lines, panels

    of_runs = ("repeats", "budget_minutes", "fetch_models", "probe", "explain", "mxnet_log")
    refuse_flags("steady schedule trains no run: leave {} out", **{name: getattr(options, name) for name in of_runs})
    if output is not None:
        require_picture(output, force=force)
    if find_lr:
        if num_train is not None:
            raise InputError("--find-lr trains, so it needs the data: leave --num-train out, and name them")
        _find_rate(source, options, updates, output, finetune=finetune, force=force)
        return
    recipe, images = _recipe_and_images(source, options, num_train, finetune=finetune)
    if not recipe.batches(images).steps:
        raise InputError("this recipe fits a classifier without updates: it has no schedule")
    shown = forecast(recipe, images)
    if recipe.waits_for_evaluations:
        note("plateau lowers the rate by what evaluations say: shown is the rate without a drop")
    if output is not None:
        largest = shown.moments[-1].batch_size
        grown = f" to {largest:,}" if largest != recipe.batch_size else ""
        about = f"{shown.steps:,} updates of {recipe.batch_size:,}{grown} images; {shown.words}"
        draw(output, panels(shown), f"Schedule of {recipe.model.name}", about, force=force)
    print_json(asdict(shown)) if options.json else print_text("\n".join(lines(shown)))


def _find_rate(
    source: str | None, options: TrainingOptions, updates: int, output: Path | None, *, finetune: bool, force: bool
) -> None:
    """Find a learning rate, print it as a flag, and draw its curve."""
    spin_where_alone()
    recipe = _named_recipe(source, options, finetune=finetune)
    from steadytrain.reports.schedule import rate_panels
    from steadytrain.training.profile.rate_finder import find_rate

    with progress("finding a rate", updates, unit="updates") as advance:
        curve = find_rate(recipe, updates=updates, allow_import=options.names_model, say=note, progress=advance)
    flag = float(f"{curve.suggestion * recipe.optim.lr / Timeline(recipe, 0).peak:.2g}")
    end = "it did not diverge" if curve.diverged is None else f"it diverged at {curve.diverged:.2g}"
    why = (
        f"the loss falls fastest at {curve.steepest:.2g} and slows down at {curve.slowed:.2g}; {end}"
        f" ({count(len(curve.losses), 'update')})"
    )
    if output is not None:
        title = f"Learning rates for {recipe.model.name}"
        draw(output, rate_panels(curve.rates, curve.losses, curve.smoothed, curve.suggestion), title, why, force=force)
    if options.json:
        print_json({"lr": flag, **asdict(curve)})
        return
    scaled = "" if flag == curve.suggestion else f", which is {curve.suggestion:g} for batches of {recipe.batch_size}"
    print_text(f"--lr {flag:g}{scaled}\n{why}; the recipe has --lr {recipe.optim.lr:g}")


def draw(output: Path, panels: Sequence[Panel], title: str, lede: str, *, force: bool) -> None:
    """Draw charts into a picture or a page, by the name's suffix."""
    from steadytrain.reports.files import write
    from steadytrain.reports.plots import page, svg

    is_page = output.suffix.lower() == ".html"
    write(output, page(panels, title=title, lede=lede) if is_page else svg(panels, title=title), force=force)
    note(f"wrote {output}")


def require_picture(output: Path, *, force: bool) -> None:
    """Raise InputError for a file whose suffix is not that of a picture, or that may not be written."""
    from steadytrain.reports.files import require_replaceable

    kind = output.suffix.lower()
    if kind not in KINDS:
        raise InputError(
            f"{output} ends in {kind or 'no suffix'}; a plot ends in {' or '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
        )
    require_replaceable(output, force=force)


def _recipe_and_images(
    source: str | None, options: TrainingOptions, num_train: int | None, *, finetune: bool
) -> tuple[Recipe, int]:
    """Find the recipe and the number of training images. Raises InputError where they cannot be known."""
    data, options = _sorted_source(source, options)
    begun = options.begun_run() if data is None else None
    if num_train is not None and begun is None:
        return _recipe_without_data(data, options, num_train, finetune=finetune), num_train
    recipe = _named_recipe(source, options, finetune=finetune)
    if num_train is None and begun is not None and (started := begun.progress().started):
        num_train = int(started.data["num_train"])
    if num_train:
        return recipe, num_train
    from contextlib import closing

    from steadytrain.training.data import open_data

    with closing(open_data(recipe.data, recipe.model, seed=recipe.seed, say=note)) as sets:
        return recipe, sets.num_train


def _sorted_source(source: str | None, options: TrainingOptions) -> tuple[str | None, TrainingOptions]:
    """Tell a recipe file and a run's folder, which become options, from data."""
    if source is not None and Path(source).suffix in RECIPES and not Path(source).is_dir():
        return None, replace(options, recipe=Path(source))
    if source is not None and Run.is_run(source):
        return None, replace(options, run=source)
    return source, options


def _named_recipe(source: str | None, options: TrainingOptions, *, finetune: bool) -> Recipe:
    """Make the recipe of a run, or of data, as training does. Raises InputError where none is named."""
    data, options = _sorted_source(source, options)
    if data is None and (begun := options.begun_run()) is not None:
        return begun.recipe.with_(options.changes)
    if data is None and options.value("data.train") is None:
        raise InputError("name the data, or how many images there are to train on: --num-train 50000")
    from steadytrain.cli.train import open_draft, ranks_of_batch, require_device

    require_device(options)
    with open_draft(data, options, finetune=finetune, ranks=ranks_of_batch(data, options)) as draft:
        return draft.recipe


def _recipe_without_data(data: str | None, options: TrainingOptions, num_train: int, *, finetune: bool) -> Recipe:
    """Make the recipe of a command line as training does, but that the data are not looked at."""
    in_file, changes = options.file_values, options.changes
    size = options.value("data.size")
    train = data or str(options.value("data.train") or "DATA")
    small = isinstance(size, int) and size <= SMALL
    model = options.value("model.name")
    usual = usual_recipe(train, model=str(model) if model else None, finetune=finetune, small=small)
    recipe = apply_changes(usual, in_file, {**changes, "data.train": train})
    images = (
        num_train if recipe.data.val is not None else round(num_train / (1 - recipe.data.share_held_out(num_train)))
    )
    from steadytrain.cli.train import ranks_of_batch

    ranks, device = ranks_of_batch(data, options), recipe.parallel.device
    on_gpus = bool(accelerators()) if device == "auto" else device.startswith("cuda")
    return fit_to_data(recipe, images, chosen=options.chosen, ranks=ranks, on_gpus=on_gpus)
