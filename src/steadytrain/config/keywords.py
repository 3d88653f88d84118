"""The flags that set the recipe's values, by name: ``--batch-size 32`` of a command is ``batch_size=32`` of Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

from steadytrain.config.foreign import advice
from steadytrain.config.recipe import by_keys, recipe_settings, synonym
from steadytrain.config.settings import Flag
from steadytrain.config.transforms import KINDS
from steadytrain.errors import RecipeError, did_you_mean

PART_ORDER = ("budget", "", "data", "model", "optim", "precision", "parallel", "every")
"""The order in which the flags of the recipe's parts are listed; each stands under its own heading."""


def _flags() -> Iterator[tuple[str, str, Flag]]:
    """Yield the flags that set the recipe's values: name, key, and what is known of it."""
    settings = recipe_settings()
    for key in sorted(settings, key=lambda key: PART_ORDER.index(key.rpartition(".")[0])):
        if (flag := settings[key].flag) is not None:
            yield flag.name.removeprefix("--").replace("-", "_"), key, flag


FLAGS = {name: (key, flag) for name, key, flag in _flags()}
"""The flags of the recipe by name: the key that each sets, and what is known of it."""
FLAG_NAMES = {other.lstrip("-"): name for name, (_, flag) in FLAGS.items() for other in flag.names.split()}
"""Each name of a flag, without its dashes -> the first one, as :data:`FLAGS` has it."""


class RecipeKeywords(TypedDict, total=False):
    """The keywords of ``finetune`` and ``train``: each flag of the recipe, and each transform by its name.

    Type checkers and editors need them written out; a test compares them with :data:`FLAGS`.
    """

    epochs: float
    patience: int
    batch_size: int
    seed: int
    val: Any
    test: Any
    holdout: float
    group_by: str
    classes: Any
    size: int
    grow_size: str | Sequence[str]
    transforms: str | Sequence[str]
    fit: Literal["crop", "squash", "pad"]
    root: Any
    labels: Any
    path_column: str
    label_column: str | Sequence[str]
    split_column: str
    zip_names: str
    balance: Literal["none", "classes"]
    weights: Any
    train: str
    folds: int
    optimizer: str
    lr: float
    weight_decay: float
    schedule: str
    warmup_epochs: float
    loss: Any
    class_weights: Literal["none", "balanced"]
    label_smoothing: float
    ema: float
    grow_batch: str | Sequence[str]
    precision: Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16", "pure-fp16"]
    compile: bool | Literal["none", "default", "reduce-overhead", "max-autotune"]
    device: str
    threads: int
    procs: int
    engine: Literal["ddp", "local", "async"]
    sync_every: int
    local_from: float
    deterministic: bool
    graph: bool
    recompute: bool
    price: str
    best: Literal["top1-loss", "top1", "top5", "loss", "macro-recall", "f1", "auc", "map"]
    notices: str
    track: str
    profile: int
    vflip: float
    rotate: float
    shear: float
    randaugment: bool | Sequence[float]
    trivialaugment: bool
    autoaugment: str
    augmix: bool | Sequence[float]
    color: float | Sequence[float]
    grey: float
    erase: float | Sequence[float]
    mixup: float
    cutmix: float


def flag_values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of the recipe by their keys, from those of flags by their names.

    None and False stand for a flag that is not given, and ``auto`` for one that is left to measuring.

    >>> flag_values({"epochs": 3, "lr": 0.2, "grow_size": "128@0,192@3", "batch_size": "auto"})
    {'budget.epochs': 3, 'budget.steps': None, 'data.grow_size': ['128@0', '192@3'], 'optim.lr': 0.2}
    """
    values: dict[str, Any] = {}
    for name, (key, flag) in FLAGS.items():
        value = flags.get(name)
        if value is None or value is False or (flag.is_measured and value == "auto"):
            continue
        is_typed = isinstance(value, flag.kind or str | int | float)  # Python may give what it is read as
        if flag.read is not None and is_typed:
            value = flag.read(value)
        elif isinstance(value, str) and flag.name == "--label-column":
            value = (value,)
        values |= {key: value, **dict(flag.implied)}
    return values


def keyword_values(
    keywords: Mapping[str, Any], changes: Mapping[str, Any] | None, *, function: str, others: Iterable[str] = ()
) -> dict[str, Any]:
    """Return a mapping of the recipe's keys together with the keywords of ``function``, which are flags or transforms.

    Raises:
        RecipeError: an unknown keyword, with what it is called here (``others``: those that are no flags); a value that
            only a command can have; or one key in both.

    >>> keyword_values({"epochs": 3, "mixup": 0.2}, {"optim.momentum": 0.8}, function="train")
    {'optim.momentum': 0.8, 'budget.epochs': 3, 'budget.steps': None, 'data.transforms': ('mixup:0.2',)}
    """
    changes = changes or {}
    if unknown := next((name for name in keywords if name not in FLAGS and name not in KINDS), None):
        raise RecipeError(f"{function}() has no keyword {unknown}.{keyword_hint(unknown, others)}")
    for name, value in keywords.items():
        if name in FLAGS and FLAGS[name][1].is_measured and value == "auto":
            flag = FLAGS[name][1].name
            raise RecipeError(f"{name} is 'auto', which the command measures (steady {function} {flag} auto): give it")
    if keywords.get("procs") not in (None, 1) or keywords.get("engine") == "async":
        raise RecipeError(f"{function}() trains in this process; several are started by steady {function} --procs N")
    values = flag_values(keywords)
    texts = [
        name if value is True else f"{name}:{','.join(map(str, value if isinstance(value, list | tuple) else [value]))}"
        for name, value in keywords.items()
        if name in KINDS and value not in (None, False)
    ]
    if texts:
        values["data.transforms"] = (*values.get("data.transforms", ()), *texts)
    named = {FLAGS[name][0] if name in FLAGS else "data.transforms": name for name in keywords}
    if twice := next((key for key in by_keys(changes) if key in named and key in values), None):
        raise RecipeError(f"{named[twice]}= and {twice!r} of the mapping are the same setting: give one of them")
    return {**changes, **values}


def keyword_hint(word: str, others: Iterable[str] = ()) -> str:
    """Return what an unknown keyword is called here, or what there is instead; the end of a message.

    >>> keyword_hint("learning_rate"), keyword_hint("epoch_"), keyword_hint("momentum")
    (' Did you mean lr?', ' Did you mean epochs?', " It has no flag: {'optim.momentum': VALUE} sets it.")
    """
    names = FLAG_NAMES | {key: name for name, (key, _) in FLAGS.items()}
    key = synonym(word) or next((key for key in recipe_settings() if word in (key, key.rpartition(".")[2])), "")
    if name := names.get(word.replace("_", "-")) or names.get(key):
        return f" Did you mean {name}?"
    if key:
        return f" It has no flag: {{{key!r}: VALUE}} sets it."
    return advice(word) or did_you_mean(word, [*FLAGS, *KINDS, *others])
