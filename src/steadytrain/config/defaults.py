"""The recipe of a user who chooses nothing: what depends on the verb and on the images, and how choices change it."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Mapping
from typing import Any

from steadytrain.config.factories import FACTORY, is_own_model
from steadytrain.config.laws import law_of
from steadytrain.config.losses import parse_loss
from steadytrain.config.parts import Budget, Data, Model, Optim, optimizer_name, optimizer_names
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import leaves, to_toml
from steadytrain.config.recipe import Recipe
from steadytrain.config.stages import parse_schedule
from steadytrain.errors import RecipeError

SMALL = 64
"""Pixels of the longest side up to which images are small: they have a network, a crop and a schedule of their own."""

SMALL_MODEL, LARGE_MODEL = "resnet20", "timm/resnet50"
"""Trained from scratch by default, on small images and on larger ones."""

FINETUNED_MODELS = (
    "timm/mobilenetv3_large_100",
    "timm/mobilenetv2_100",
    "timm/efficientnet_b0",
    "timm/resnet18",
    "timm/resnet50",
)
"""Fine-tuned by default: the first whose weights are on this machine, else the first, fetched once (22 MB).

The smallest come first, so that a CPU can train them. The weights of all of them are Apache-2.0.
"""

FETCHED_MODELS = {
    "timm/mobilenetv3_large_100": (0.22, 5.5),
    "timm/tf_efficientnetv2_b0": (0.72, 7.1),
    "timm/convnext_nano": (2.45, 15.6),
    "timm/convnext_tiny": (4.46, 28.6),
    "timm/vit_small_patch14_dinov2": (6.12, 21.6),
}
"""Networks that ``--budget-minutes`` may fetch, with billions of multiplications at 224 pixels and millions of
parameters, the cheapest first. The weights of all of them are Apache-2.0.
"""

MUCH_UNSEEN = 0.5
"""Share of the pixels beyond which a line names the remedy: photographs of 3:2, 0.875 of them, leave out 49 %."""

FEW_IMAGES = 200
"""Photographs of a class, in the mean, below which training from scratch is advised against: a rule of thumb."""

WHOLE_AREA = (0.35, 1.0)
"""Share of the area of random crops by default where images are shown whole (``data.fit``), and trained from scratch:
smaller ones miss too often what shows at one end of a long image (docs/laboratory.md).
"""

MAX_BATCH_SHARE, MIN_BATCH = 0.1, 2
"""The largest default batch, as a share of the training images; and a batch that is never too large."""

MAX_WARMUP_SHARE = 0.25
"""The longest default warm-up, as a share of the run."""

GENTLE_WARMUP, GENTLE_EPOCHS = "power:3", 2.0
"""Warm-up after a probe, by default: its law, and the epochs that it takes at most, within a share of the run.

Through the first of two epochs the rate is on average a 32nd of its peak.

A classifier that was fitted is at rest, and Adam's first updates move weights by the rate, however small the gradient:
at 1e-3 from the start, ten of them took 15 to 80 points from three probes (docs/laboratory.md).
"""

LEAST_EPOCHS, SHORT_LR = 4, 1e-4
"""Epochs below which a run is too short for that and stays at this rate of AdamW; docs/laboratory.md has the runs."""

PROBE_FIRST, WITHOUT_PROBE = "probe+discriminative", "discriminative"
"""What fine-tuning trains by default, and what it trains where the recipe or the labels exclude a probe, or there are
no weights to start from.
"""

ALWAYS_WRITTEN = ("data.train", "model.name", "batch_size", "seed", "precision.name", "precision.channels_last")
"""Keys that a recipe file has although they may be the defaults: these depend on the machine, or say what it is for."""

COMMENT_WIDTH = 100
"""Columns of a comment in a recipe file."""

USUAL_VALUES: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "base_batch_size": None, "weight_decay": 0.05},
    **{
        name: {"lr": 1e-3, "base_batch_size": None, "weight_decay": 5e-5}
        for name in ("adam", "nadam", "radam", "adamax")  # their weight decay is coupled
    },
    **{name: {"lr": 0.01, "base_batch_size": None, "weight_decay": 5e-5} for name in ("sgd", "nag")},
}
"""Values for an optimizer that is not the default one, where no learning rate was chosen."""


def usual_crop(largest: int) -> float:
    """Return the share of the shorter side that evaluation keeps of images with no longer side than ``largest``."""
    return 1.0 if largest <= SMALL else 0.875


def usual_recipe(train: str, *, model: str | None = None, finetune: bool, small: bool) -> Recipe:
    """Return the recipe of a user who chooses nothing.

    Args:
        train: the training data.
        model: None: :data:`SMALL_MODEL` or :data:`LARGE_MODEL`, or the first of :data:`FINETUNED_MODELS`.
        finetune: start from pretrained weights instead of from scratch.
        small: whether no image is larger than :data:`SMALL` pixels.

    >>> usual_recipe("photos", finetune=False, small=False).model.name
    'timm/resnet50'
    """
    if finetune:
        # What served MobileNetV2 best on 640 photographs of ten classes: rates that fall from the head down (Howard &
        # Ruder 2018), the weights' own batch statistics at this small batch, and crops that keep most of the image.
        return Recipe(
            data=Data(train=train, area=(0.4, 1.0)),
            model=Model(
                model or FINETUNED_MODELS[0], pretrained=True, train=PROBE_FIRST, decay=0.8, batch_norm="frozen"
            ),
            optim=Optim("adamw", lr=1e-3, weight_decay=0.05, warmup_epochs=0.5, label_smoothing=0.1, ema=0.99),
            budget=Budget(epochs=8),
            batch_size=16,
        )
    if small:  # CIFAR's recipe: He et al. 2016, section 4.2, with a cosine instead of two drops
        model, epochs = model or SMALL_MODEL, 30
        optim = Optim("sgd", nesterov=True, lr=0.1, base_batch_size=128, weight_decay=5e-4, warmup_epochs=0.5)
    else:  # ImageNet's: Goyal et al. 2017, with the cosine and label smoothing of He et al. 2019
        model, epochs = model or LARGE_MODEL, 90
        optim = Optim(
            "sgd", nesterov=True, lr=0.1, base_batch_size=256, weight_decay=5e-5, warmup_epochs=5, label_smoothing=0.1
        )
    return Recipe(data=Data(train=train), model=Model(model), optim=optim, budget=Budget(epochs=epochs), batch_size=128)


def apply_changes(defaults: Recipe, file_values: Mapping[str, Any], changes: Mapping[str, Any]) -> Recipe:
    """Lay the values of a recipe file over the defaults, and the user's changes over both.

    Args:
        defaults: such as :func:`usual_recipe` gives.
        file_values: nested, as a recipe file holds them.
        changes: as of :meth:`Recipe.with_`.

    Raises:
        RecipeError: an unknown key or a value that cannot be, by its name.
    """
    values, chosen = defaults.to_dict(), dict(_table(file_values, "optim"))
    chosen |= {key.removeprefix("optim."): value for key, value in changes.items() if key.startswith("optim.")}
    optimizer = chosen.get("name")
    optimizer = optimizer_name(optimizer) if isinstance(optimizer, str) else optimizer
    is_usual = optimizer in (None, defaults.optim.name) or {optimizer, defaults.optim.name} == {"sgd", "nag"}
    if not is_usual and chosen.get("lr") is None:
        is_other = str(optimizer).startswith("timm/") or FACTORY.fullmatch(str(optimizer))
        if optimizer not in USUAL_VALUES and (is_other or optimizer in optimizer_names()):
            raise RecipeError(f"optim.name is {optimizer!r}, which has no usual learning rate: choose one with --lr")
        values["optim"] |= USUAL_VALUES.get(str(optimizer), {})  # SGD's rates are a hundred times too high for AdamW
    if optimizer == "sgd" and chosen.get("nesterov") is None:
        values["optim"]["nesterov"] = None  # by its name, it has none
    model = dict(_table(file_values, "model"))
    model |= {key.removeprefix("model."): value for key, value in changes.items() if key.startswith("model.")}
    has_weights = bool(model.get("pretrained", defaults.model.pretrained) or model.get("weights"))
    if not has_weights and not is_own_model(str(model.get("name", defaults.model.name))):
        values["model"]["batch_norm"] = Model.batch_norm  # there are no statistics to keep
        if defaults.model.train == PROBE_FIRST:
            values["model"]["train"] = WITHOUT_PROBE  # nor features worth a fit
    if parse_loss(str(chosen.get("loss", "auto"))).is_factory:
        values["optim"]["label_smoothing"] = 0.0  # the user's own loss smooths as it likes
    plan = parse_train(train := _train(file_values, changes) or defaults.model.train)
    if plan.main == "probe":  # which makes no updates
        values["model"]["train"] = train
        values["budget"] = {"epochs": 0, "steps": None}
        values["optim"] |= {"ema": None, "warmup_epochs": 0.0}
    if isinstance(law := chosen.get("schedule"), str) and law_of(parse_schedule(law)[0]).rises:
        values["optim"]["warmup_epochs"] = 0.0
    parts = chosen.get("accumulate")
    if isinstance(parts, int) and parts > 0 and values["batch_size"] % parts:  # a default is split as the user likes
        values["batch_size"] = parts * max(1, values["batch_size"] // parts)
    if chosen.get("swa") is not None and chosen.get("ema") is None:  # of two averages, the user's
        values["optim"]["ema"] = None
    if isinstance(budget := file_values.get("budget"), Mapping) and {"epochs", "steps"} & budget.keys():
        values["budget"] = {}  # epochs or steps: the file's choice, not one of each
    for part, value in file_values.items():
        is_table = isinstance(value, Mapping) and isinstance(values.get(part), dict)
        values[part] = {**values[part], **value} if is_table else value
    for key, other in (("budget.epochs", "budget.steps"), ("budget.steps", "budget.epochs")):
        if changes.get(key) is not None and other not in changes:  # they exclude each other: the named one holds
            changes = {**changes, other: None}
    try:
        return Recipe.from_dict(values).with_(changes)
    except RecipeError:
        if values["model"]["train"] != PROBE_FIRST or _train(file_values, changes):
            raise
        values["model"]["train"] = WITHOUT_PROBE
        return Recipe.from_dict(values).with_(changes)  # of settings that a probe excludes; or what is wrong is said


def write_toml(recipe: Recipe, usual: Recipe, reasons: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Write as TOML what a recipe has otherwise than the usual one, with the reason above a value.

    Args:
        recipe: to be written.
        usual: what holds for keys that the file does not have, as of :func:`usual_recipe`.
        reasons: key -> why; these keys are always written, and those of :data:`ALWAYS_WRITTEN`.

    Returns:
        The lines, and the keys that are nothing here and something by default, for which TOML has no word.

    >>> usual = usual_recipe("a.rec", finetune=False, small=True)
    >>> lines, _ = write_toml(usual.with_({"optim.lr": 0.2, "optim.clip_norm": 1.0}), usual, {"optim.lr": "found"})
    >>> lines[lines.index("[optim]") :][:4]
    ['[optim]', '# found', 'lr = 0.2', 'clip_norm = 1.0']
    """
    defaults = dict(leaves(usual.to_dict()))
    tables: dict[str, list[str]] = {"": []}
    unwritten = []
    for part, value in recipe.to_dict().items():
        place, table = (part, value) if isinstance(value, dict) else ("", {part: value})
        for field, setting in table.items():
            key = f"{place}.{field}".lstrip(".")
            default = defaults.get(key, {} if isinstance(setting, dict) else None)
            if key == "optim.base_batch_size" and setting is None and default is not None:
                tables.setdefault(place, []).extend(["# the rate is for this batch", f"{field} = {recipe.batch_size}"])
            elif setting is None:
                unwritten += [] if default is None or part == "budget" else [key]
            elif key in reasons or key in ALWAYS_WRITTEN or setting != default:
                comments = [f"# {line}" for line in textwrap.wrap(reasons.get(key, ""), COMMENT_WIDTH)]
                tables.setdefault(place, []).extend([*comments, f"{field} = {to_toml(setting)}"])
    lines = tables.pop("")
    for part, entries in tables.items():
        lines += ["", f"[{part}]", *entries]
    return lines, unwritten


def _train(file_values: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return the ``model.train`` that a user chose; empty where there is none."""
    train = changes.get("model.train", _table(file_values, "model").get("train"))
    return train if isinstance(train, str) else ""


def _table(file_values: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return a part of a recipe file; empty where it has none, or something else in its place."""
    table = file_values.get(part)
    return table if isinstance(table, Mapping) else {}


def fit_to_data(
    recipe: Recipe, num_images: int, *, chosen: Container[str], ranks: int = 1, on_gpus: bool = False
) -> Recipe:
    """Fit the batch and the warm-up, where the user left them open, to the ranks, the images and the epochs.

    A default batch is one for each GPU, and one for all ranks on CPUs together. It is halved until it is at most
    :data:`MAX_BATCH_SHARE` of the images to train on, as long as each micro-batch keeps :data:`MIN_BATCH` images; all
    micro-batches have equally many. The warm-up is at most :data:`MAX_WARMUP_SHARE` of the run.

    Args:
        recipe: a default one with the user's values.
        num_images: of the training data, those held out included.
        chosen: keys of the recipe that the user chose: these stay.
        ranks: that train it.
        on_gpus: each rank computes on a GPU of its own.

    >>> recipe = usual_recipe("photos", finetune=False, small=False)
    >>> [fit_to_data(recipe, 10**6, chosen=(), ranks=n, on_gpus=True).batch_size for n in (1, 3, 8)]
    [128, 384, 1024]
    >>> [fit_to_data(recipe, 10**6, chosen=(), ranks=n).batch_size for n in (1, 3, 8)]
    [128, 126, 128]
    """
    num_train = num_images * (1 if recipe.data.val is not None else 1 - recipe.data.share_held_out(num_images))
    batch, parts = recipe.batch_size, recipe.optim.accumulate * ranks
    if "batch_size" not in chosen:
        size = batch * (ranks if on_gpus else 1) // parts  # of a micro-batch
        while size * parts > num_train * MAX_BATCH_SHARE and size >= 2 * MIN_BATCH:
            size //= 2
        batch = parts * (size if ranks == 1 else max(size, MIN_BATCH))
    epochs = recipe.budget.epochs or (recipe.budget.steps or 0) * batch / max(1.0, num_train)
    return fit_to_epochs(recipe.with_(batch_size=batch), epochs, chosen=chosen)


def fit_to_epochs(recipe: Recipe, epochs: float, *, chosen: Container[str]) -> Recipe:
    """Fit warm-up and rate, where the user left them open, to the number of epochs, and to a probe that comes first.

    The warm-up is at most :data:`MAX_WARMUP_SHARE` of the run. After a probe, it is :data:`GENTLE_WARMUP` over up to
    :data:`GENTLE_EPOCHS`; in less than :data:`LEAST_EPOCHS`, AdamW's rate is at most :data:`SHORT_LR` instead.

    >>> recipe = usual_recipe("photos", finetune=True, small=False)
    >>> optim = fit_to_epochs(recipe, 8, chosen=()).optim
    >>> optim.lr, optim.warmup, optim.warmup_epochs, fit_to_epochs(recipe, 2, chosen=()).optim.lr
    (0.001, 'power:3', 2.0, 0.0001)
    >>> fit_to_epochs(recipe.with_({"optim.warmup": "power:5"}), 8, chosen=("optim.warmup",)).optim.warmup_epochs
    2.0
    """
    optim, plan, changes = recipe.optim, parse_train(recipe.model.train), dict[str, object]()
    longest = optim.warmup_epochs
    if plan.probe_passes and plan.main != "probe":
        if epochs < LEAST_EPOCHS:
            if optim.name == "adamw" and "optim.lr" not in chosen:
                changes["optim.lr"] = min(optim.lr, SHORT_LR)
        elif not law_of(parse_schedule(optim.schedule)[0]).rises:
            longest = GENTLE_EPOCHS
            if "optim.warmup" not in chosen:
                changes["optim.warmup"] = GENTLE_WARMUP
    if "optim.warmup_epochs" not in chosen:
        changes["optim.warmup_epochs"] = min(longest, MAX_WARMUP_SHARE * epochs)
    return recipe.with_(changes)
