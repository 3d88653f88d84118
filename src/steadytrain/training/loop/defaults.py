"""Recipes from data and a few choices, and fine-tuned runs: what the command line does, for Python as well."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Unpack

import torch
from torch import nn

from steadytrain import models
from steadytrain.config import Precision, Recipe
from steadytrain.config.calls import in_python, shown_meanwhile
from steadytrain.config.defaults import (
    FEW_IMAGES,
    FINETUNED_MODELS,
    SMALL,
    WHOLE_AREA,
    WITHOUT_PROBE,
    apply_changes,
    fit_to_data,
    usual_recipe,
)
from steadytrain.config.factories import is_own_model
from steadytrain.config.keywords import RecipeKeywords, keyword_values
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import leaves
from steadytrain.data.fetching.catalogue import find_data_set
from steadytrain.data.filenames import find_records_beside, is_pattern
from steadytrain.data.packing.memory import class_list_beside, source_of
from steadytrain.data.packing.pack import mute
from steadytrain.data.recordio.card import card_for
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import require_there
from steadytrain.data.storage.object_cache import find_object_beside
from steadytrain.data.storage.store import is_uri, local_name
from steadytrain.distributed.peers import Peers
from steadytrain.errors import DataError, InputError, RecipeError, RunError
from steadytrain.events import Event, Started
from steadytrain.format import Say, few
from steadytrain.optim import check_name
from steadytrain.run import Run
from steadytrain.training.data import OpenedData, open_named
from steadytrain.training.device import choose_device
from steadytrain.training.inference.trained import weights_file
from steadytrain.training.loop.steering import OnEvent
from steadytrain.training.loop.steps import Outcome, run_steps, train_opened
from steadytrain.training.precision import cpu_multiplies
from steadytrain.training.progress import wants_progress


class RecipeByRanks(Protocol):
    """The recipe of a user's choices, by the number of ranks that share a batch.

    ``on_gpus``: each computes on a GPU of its own; None: by the recipe's device and what torch sees here.
    """

    def __call__(self, ranks: int = 1, *, on_gpus: bool | None = None) -> Recipe: ...


@dataclass(frozen=True)
class ChosenRecipe:
    """A user's choices: the recipe, and the data that it depends on, open until whoever asked closes them."""

    recipe: RecipeByRanks
    opened: OpenedData


@dataclass(frozen=True)
class _Facts:
    """Facts of training data that defaults depend on; ``largest_side`` in pixels, ``fit`` where none is chosen."""

    num_images: int
    num_classes: int
    largest_side: int
    is_multi_label: bool = False
    fit: str = "crop"


def default_recipe(
    data: object,
    changes: Mapping[str, object] | None = None,
    *,
    model: models.Given | None = None,
    finetune: bool = False,
    say: Say | None = None,
    **flags: Unpack[RecipeKeywords],
) -> Recipe:
    """Return the recipe of ``steady train DATA`` or, with ``finetune``, of ``steady finetune DATA``.

    Data that are no record files are packed into the cache first: the defaults depend on their size and number.

    Args:
        data: a ``.rec`` file, a folder of classes, or whatever else ``steady pack`` takes; or images in memory
            (:mod:`steadytrain.data.packing.memory`).
        changes: values of the recipe by their keys, as of :meth:`Recipe.with_`: ``{"optim.clip_norm": 1}``.
        model: the same as ``model.name`` among the changes: a name, a ``torch.nn.Module`` with an output for each
            class, which is copied with its weights, or a function that makes one, called as a ``pkg.mod:factory`` is.
            The recipe names it: ``pkg.mod:function`` where it can be imported; else ``object:...``, which is known in
            this process only, so that another one resumes the run by the same call.
        finetune: start from pretrained weights.
        say: is called with each line for the user: which model was chosen, which validation data were found.
        flags: the flags of the command, such as ``epochs=5, lr=1e-3, batch_size=32, val="photos/val"``, and each
            transform by its name, such as ``mixup=0.2``.

    Raises:
        DataError: the data cannot be used.
        ModelError: no such model, or weights that cannot be had.
        RecipeError: an unknown keyword or key, a setting that is given twice, or a value beyond its limit.
    """
    function = "finetune" if finetune else "train"
    choice = _choose(data, _merged(changes, flags, model, function), finetune=finetune, say=say or mute)
    choice.opened.close()
    return choice.recipe()


def _merged(
    changes: Mapping[str, object] | None, flags: Mapping[str, Any], model: models.Given | None, function: str
) -> dict[str, Any]:
    """Return all changes by their keys; a model that is an object is named for the recipe. Raises RecipeError."""
    if model is not None and "model.name" in (changes or ()):
        raise RecipeError("model= and 'model.name' of the mapping are the same setting: give one of them")
    chosen = keyword_values(flags, changes, function=function, others=("model", "run", "say", "progress", "on_event"))
    return chosen if model is None else {**chosen, "model.name": model}


def _choose(data: object, chosen: dict[str, Any], *, finetune: bool, say: Say) -> ChosenRecipe:
    """Make the choices of :func:`default_recipe`."""
    choose_device(str(chosen.get("parallel.device", "auto")))  # before data are read
    named: Any = chosen.get("model.name")
    if named is not None and not isinstance(named, str):
        chosen = {"model.pretrained": False, **chosen, "model.name": models.name_model(named)}
        if isinstance(named, nn.Module) and models.lacks_statistics(named):
            chosen.setdefault("model.batch_norm", "train")  # there are none to keep
            if finetune:
                chosen.setdefault("model.train", WITHOUT_PROBE)  # nor features worth a fit
    columns = {name: chosen.get(f"data.{name}") for name in ("path_column", "label_column", "root")}
    listed: Any = chosen.get("data.classes")
    listed = None if listed is None or isinstance(listed, str | Path | Mapping) else list(map(str, listed))
    if listed and len({*listed}) < len(listed):
        twice = next(name for k, name in enumerate(listed) if name in listed[:k])
        raise DataError(f"classes= names {twice!r} twice: give each class a name of its own")
    train = source_of(data, **columns, classes=listed, say=say)
    if not isinstance(data, str | Path) and train.endswith(".rec"):  # packed: it has no columns any more
        if (split := chosen.get("data.split_column")) is not None:
            raise DataError(
                f"split_column={split!r} is for tables of paths, and these images are in memory: give"
                f" data[data[{split!r}] == 'train'] and val=data[data[{split!r}] == 'val']"
            )
        packed = {*columns} if listed is None else {*columns, "classes"}
        chosen = {key: value for key, value in chosen.items() if key.removeprefix("data.") not in packed}
    elif listed is not None and not isinstance(data, str | Path):
        chosen = {**chosen, "data.classes": class_list_beside(train, listed)}
    for key in ("data.val", "data.test"):
        if (other := chosen.get(key)) is not None and not isinstance(other, str | Path):
            card = card_for(Path(train))
            chosen[key] = source_of(other, **columns, classes=listed if card is None else card.class_list, say=say)
    return choose_recipe(train, {}, chosen, finetune=finetune, say=say)


def finetune(
    data: object,
    changes: Mapping[str, object] | None = None,
    *,
    model: models.Given | None = None,
    run: str | Path | None = None,
    say: Say | None = None,
    progress: bool | None = None,
    on_event: OnEvent | None = None,
    **flags: Unpack[RecipeKeywords],
) -> Outcome:
    """Fine-tune a pretrained model on your data with the defaults of ``steady finetune``; the same call resumes it.

    Args:
        data: as of :func:`default_recipe`.
        changes: as of :func:`default_recipe`.
        model: as of :func:`default_recipe`.
        run: folder of the run; None: ``runs/MODEL-DATA-DIGEST``.
        say: as of :func:`default_recipe`; None: what is chosen is shown where progress is.
        progress: show how far it is, and each evaluation; None: in a notebook and in a terminal.
        on_event: is called with each event after it was written, as :func:`steps` yields it, and may return
            ``st.Stop("why")`` or ``st.SetRate(0.5)``: half the schedule's rate from the next update on. The run keeps
            the decision: resumed without the function, it gives the same weights.
        flags: as of :func:`default_recipe`: ``epochs=5, lr=1e-3, train="probe"``.

    Returns:
        The outcome, whose ``run`` can be evaluated, reported and restored.

    Raises:
        SteadyError: as of :func:`default_recipe` and :func:`train`.

    >>> import steadytrain as st
    >>> from PIL import Image
    >>> for name, grey in (("dark", 20), ("light", 220)):
    ...     Path("photos", name).mkdir(parents=True)
    ...     for number in range(10):
    ...         Image.new("L", (16, 16), grey + number).save(Path("photos", name, f"{number}.png"))
    >>> first = st.train("photos", model="resnet20", epochs=2, device="cpu", run="runs/first")
    >>> weights = first.run.weights
    >>> tuned = st.finetune("photos", model="resnet20", weights=weights, epochs=2, device="cpu", run="runs/tuned")
    >>> tuned.status, tuned.run.recipe.optim.name, st.evaluate(tuned.run).n
    ('finished', 'adamw', 4)
    """
    begin = _begin(data, _merged(changes, flags, model, "finetune"), run, finetune=True, say=say, progress=progress)
    with begin as (begun, opened):
        return train_opened(begun, progress=progress, opened=opened, on_event=on_event)


def train(
    data: object,
    changes: Mapping[str, object] | None = None,
    *,
    model: models.Given | None = None,
    run: str | Path | None = None,
    say: Say | None = None,
    allow_import: bool | None = None,
    progress: bool | None = None,
    on_event: OnEvent | None = None,
    **flags: Unpack[RecipeKeywords],
) -> Outcome:
    """Train from scratch with the defaults of ``steady train``, or a run to its end; it resumes by itself.

    Args:
        data: as of :func:`default_recipe`; or a run, as made by :meth:`Run.create`, or its folder: a finished one is
            left as it is.
        changes, model, flags: as of :func:`default_recipe`; of a run that began, what may differ: ``device``,
            ``threads`` and whatever else is not what it trains.
        run: as of :func:`finetune`.
        say: as of :func:`finetune`.
        allow_import: import the recipe's ``pkg.mod:factory`` model or loss; None: what your code named, not a file.
        progress, on_event: as of :func:`finetune`.

    Raises:
        SteadyError: what the run's ``Failed`` event says.
    """
    begin = _begin(data, _merged(changes, flags, model, "train"), run, finetune=False, say=say, progress=progress)
    with begin as (begun, opened):
        known: dict[str, Any] = {"allow_import": allow_import, "progress": progress, "on_event": on_event}
        return train_opened(begun, opened=opened, **known)


def steps(
    data: object,
    changes: Mapping[str, object] | None = None,
    *,
    model: models.Given | None = None,
    run: str | Path | None = None,
    stop: Callable[[], str | None] = lambda: None,
    allow_import: bool | None = None,
    say: Say = lambda message: None,
    began: float | None = None,
    probe: bool = False,
    group: Peers | None = None,
    opened: OpenedData | None = None,
    explains: bool = False,
    on_event: OnEvent | None = None,
    **flags: Unpack[RecipeKeywords],
) -> Iterator[Event]:
    """Train as :func:`train` does, yielding each event after it was written.

    Where loss or weights are not finite any more, it goes on as ``every.nonfinite`` says.

    Args:
        data, changes, model, flags: as of :func:`train`; a finished run yields nothing.
        run: as of :func:`finetune`.
        stop: asked before the first update and after each; the name of a signal asks the loop to save and end.
        allow_import: as of :func:`train`.
        say: as of :func:`default_recipe`; it also takes lines about numbers that were not finite.
        on_event: as of :func:`finetune`.
        began, probe, group, opened, explains: as of :func:`.run_steps`.

    Raises:
        DivergedError: loss or weights are not finite any more, and the recipe has no remedy left.
        RankLostError: another rank failed, or is gone.
        SteadyError: bad data, no room, a run in use; written as a ``Failed`` event first where that can be.
    """
    begin = _begin(data, _merged(changes, flags, model, "train"), run, finetune=False, say=say, progress=False)
    with begin as (begun, own):
        known: dict[str, Any] = {"stop": stop, "allow_import": allow_import, "began": began, "probe": probe}
        known["on_event"] = on_event
        yield from run_steps(begun, group=group, opened=opened or own, explains=explains, say=say, **known)


@contextmanager
def _begin(
    data: object,
    chosen: dict[str, Any],
    run: str | Path | None,
    *,
    finetune: bool,
    say: Say | None,
    progress: bool | None,
) -> Iterator[tuple[Run, OpenedData | None]]:
    """Yield the run that a call is about, made if need be, and its data, where these were opened for that."""
    if finetune and isinstance(data, str | Path) and (Path(data) / "events.jsonl").exists():
        raise RunError(
            f"{data} is a run, not data: steady train {data} resumes it, and --weights {data} starts from it"
        )
    if not finetune and (named := _open_run(data, chosen)) is not None:
        if run is not None:
            raise RunError(f"{named.directory} is a run, which goes on in its own folder: leave out run={str(run)!r}")
        changes = {key: models.name_model(value) if key == "model.name" else value for key, value in chosen.items()}
        yield Run.create(named.directory, named.recipe.with_(changes)) if changes else named, None
        return
    out = wants_progress(progress)

    def show(message: str) -> None:
        if out is not None:
            print(message, file=out, flush=True)

    with shown_meanwhile("reading", out is not None):
        choice = _choose(data, chosen, finetune=finetune, say=lambda message: (say or show)(in_python(message)))
    with closing(choice.opened):
        recipe = choice.recipe()
        created = Run.create(default_folder(recipe) if run is None else run, recipe)
        with created.gone_if_refused():
            yield created, choice.opened


def _open_run(data: object, chosen: Mapping[str, Any]) -> Run | None:
    """Open what names a run; None for data. Raises RunError for what has a run, or names nothing that is there."""
    if not isinstance(data, str | Path):
        is_near = isinstance(data, Run | Recipe) or isinstance(getattr(data, "run", None), Run)
        return Run.open(data) if is_near else None  # type: ignore[arg-type]
    is_there = is_uri(str(data)) or is_pattern(str(data)) or Path(data).exists()
    return Run.open(data) if Run.is_run(data) or not (is_there or chosen) else None


def choose_recipe(
    data: str,
    file_values: Mapping[str, Any],
    changes: Mapping[str, Any],
    *,
    finetune: bool,
    begun: Started | None = None,
    require_licence: Callable[[Recipe], None] = lambda recipe: None,
    say: Say,
    progress: Callable[[int, int], None] | None = None,
) -> ChosenRecipe:
    """Make the recipe of a user's choices, with defaults that suit the data; they are packed and opened for that.

    What can be wrong without the data is found before they are packed, which may take an hour.

    Args:
        data: the training data.
        file_values: of a recipe file, nested; ``changes`` go over them.
        changes: as of :meth:`Recipe.with_`.
        finetune: start from pretrained weights.
        require_licence: is called with a first recipe, before anything is fetched or packed.
        say: is called with each line for the user.
        progress: as of :func:`~steadytrain.data.packing.pack.pack`.
    """
    data = (
        data if is_uri(data) else str(Path(local_name(data)))
    )  # photos/ and ./photos are photos, and give the same run
    _require_data(data)
    chosen = {**dict(leaves(file_values)), **changes}
    changes = {**changes, "data.train": data}
    find_beside = find_object_beside if is_uri(data) else find_records_beside
    if chosen.get("data.val") is None and "data.holdout" not in chosen and (val := find_beside(data, "val")):
        say(f"validation data: {val}, found beside {data} (--holdout 0.1 holds out a part of {data} instead)")
        changes["data.val"] = str(val)
    is_free = chosen.get("data.test") is None
    if is_free and (test := find_beside(data, "test")) and str(test) != str(chosen.get("data.val")):
        changes["data.test"] = str(test)
    model, weights = chosen.get("model.name"), chosen.get("model.weights")
    if weights is not None:
        changes.setdefault("model.pretrained", False)
        if Run.is_run(str(weights)) or (Path(str(weights)) / "config.json").exists():  # the latter is the hub's
            changes["model.weights"] = weights = str(weights_file(Path(str(weights))))
    if model is None and (finetune or weights is not None):
        model = _choose_model(weights, say)
    precision = _precision(str(changes.get("parallel.device", "auto")))

    def recipe(facts: _Facts, ranks: int = 1, *, on_gpus: bool | None = None) -> Recipe:
        usual = usual_recipe(data, model=model, finetune=finetune, small=facts.largest_side <= SMALL)
        changed = apply_changes(replace(usual, precision=precision), file_values, changes)
        if facts.is_multi_label and "model.train" not in chosen and parse_train(changed.model.train).probe_passes:
            changed = changed.with_({"model.train": WITHOUT_PROBE})
        if (changed.data.fit or facts.fit) != "crop" and not finetune and "data.area" not in chosen:
            changed = changed.with_({"data.area": WHOLE_AREA})
        if on_gpus is None:  # ranks elsewhere may have the GPU that this machine lacks
            device = changed.parallel.device
            on_gpus = ranks > 1 and (device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()))
        return fit_to_data(changed, facts.num_images, chosen=chosen, ranks=ranks, on_gpus=on_gpus)

    draft = recipe(_Facts(num_images=10**6, num_classes=2, largest_side=1))
    check_name(draft.optim.name)
    unused = [key for key, value in chosen.items() if key.startswith("optim.") and value is not None]
    if unused and parse_train(draft.model.train).main == "probe":
        say(f"{few(unused)}: not used, since a probe makes no updates (--train probe+head trains on from it)")
    source = models.find(draft.model.name, allow_import="model.name" in changes)
    if not draft.model.pretrained and draft.model.weights is None and not is_own_model(draft.model.name):
        if draft.model.batch_norm == "frozen":
            raise RecipeError(
                f"model.batch_norm='frozen' keeps the statistics of the initial weights, and {draft.model.name} starts"
                " without any: leave it out, or start from weights (--weights FILE)"
            )
        if finetune:
            say(f"no weights to start from: {draft.model.name} is trained from scratch, for which steady train is made")
    require_licence(draft)
    if draft.data.size is not None:
        models.require_size(source, draft.model.options, draft.data.size)
    if draft.model.weights is not None:
        models.require_fit(source, draft.model, size=draft.data.size)
    if draft.model.pretrained:
        models.require_weights(source)
    opened = open_named(draft.data, draft.model, begun=begun, say=say, remark=say, say_reused=True, progress=progress)
    train = opened.train
    fit = "crop" if begun is not None and "fit" not in begun.model.get("input", {}) else train.usual_fit
    facts = _Facts(len(train), len(train.class_list), train.largest_side, train.labels.ndim > 1, fit)
    if not finetune and "model.name" not in chosen and (advice := _advice(draft, facts)):
        say(advice)
    return ChosenRecipe(partial(recipe, facts), opened)


def _require_data(data: str) -> None:
    """Refuse data that lead nowhere, with the command that fetches a public data set of that name."""
    try:
        require_there(data)
    except DataError as error:
        name = Path(data).name
        with suppress(InputError):
            name = find_data_set(name).name
            hint = f"steady fetch {name} fetches the public data set of that name"
            error = DataError(f"{str(error).rstrip('.')}; {hint}")
        raise error from None


def default_folder(recipe: Recipe) -> Path:
    """Return the folder of a run that was given none: ``runs/MODEL-DATA-DIGEST``."""
    model = recipe.model.name.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    data = Path(recipe.data.train)
    data = data.resolve() if data.name in ("", "..") else data
    stem = re.sub(r"[][*?{},]+", "_", data.stem)  # several files by one name
    return Path("runs") / f"{model}-{stem}-{recipe.digest[:8]}"


def _precision(device: str) -> Precision:
    """bf16 where the hardware multiplies it natively, fp32 elsewhere."""
    if device == "mps":
        return Precision("fp32")
    if torch.cuda.is_available():
        has_bf16 = torch.cuda.get_device_capability() >= (8, 0)
    else:
        has_bf16 = cpu_multiplies("bf16")
    return Precision("bf16" if has_bf16 else "fp32")


def _choose_model(weights: object, say: Say) -> str:
    """Choose the network: that of the weights, else one to fine-tune. Raises ModelError where none or several fit."""
    if weights is not None:
        name = models.find_model(Path(str(weights)), say)
        say(f"model: {name}, whose weights are in {weights}")
        return name
    local = next((name for name in FINETUNED_MODELS if models.has_local_weights(name)), None)
    name = local or FINETUNED_MODELS[0]
    where = "are on this machine" if local else "are fetched once (22 MB)"
    say(f"model: {name} (Apache-2.0), whose weights {where}; --model NAME chooses another")
    return name


def _advice(recipe: Recipe, facts: _Facts) -> str:
    """Advise fine-tuning, with the command, where photographs are few to train from scratch; empty elsewhere."""
    per_class = facts.num_images / facts.num_classes
    is_scratch = not recipe.model.pretrained and recipe.model.weights is None
    if not is_scratch or facts.largest_side <= SMALL or per_class >= FEW_IMAGES:
        return ""
    data = recipe.data
    words = ["steady", "finetune", str(data.train)]
    for flag in ("val", "test", "root", "labels", "classes"):
        words += [] if (value := getattr(data, flag)) is None else [f"--{flag}", str(value)]
    columns = ColumnNames.of(data.path_column, data.label_column, data.split_column, data.zip_names)
    words += [word for option in columns.options() for word in option]
    too_few = f"{per_class:,.0f} images a class are few to train from scratch"
    return f"{too_few}; fine-tuning does better: {shlex.join(words)}"
