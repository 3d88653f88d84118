"""The recipe of a run, as frozen data: its digest, its changes and its JSON."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any

from steadytrain.config.batches import (
    MOST_IMAGES,
    Batches,
    SizeStage,
    lay_out,
    lay_out_sizes,
    parse_growth,
    parse_sizes,
)
from steadytrain.config.conflicts import find_conflicts
from steadytrain.config.foreign import advice, plain_word
from steadytrain.config.parts import MOST_EPOCHS, Budget, Data, Every, Model, Optim, Parallel, Precision
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import build, hints_of, leaves, parse_json, plain, shorten
from steadytrain.config.settings import (
    OPTIMIZER,
    OUTPUT,
    Flag,
    RecipeSetting,
    ValueLimit,
    between,
    check,
    documented,
    require,
    setting,
    settings_of,
)
from steadytrain.config.strangers import FILE_KEYS
from steadytrain.errors import RecipeError, did_you_mean

ASIDE = ("sweep", "tuning")
"""Tables of a recipe file that are no part of the recipe: what is swept, and what older versions measured in tuning."""

_NO_TEXT = re.compile("[\\0\ud800-\udc7f\udd00-\udfff]")
"""Characters that no path and no printed word may have; the other surrogates stand for bytes that are no UTF-8."""

FIRST_KEYS = {
    "data": "train val holdout classes size augment area ratio pad flip crop interpolation mean std",
    "model": "name pretrained weights train decay batch_norm options",
    "optim": "name lr base_batch_size momentum nesterov betas eps weight_decay schedule warmup_epochs milestones "
    "factor power final label_smoothing clip_norm ema accumulate",
    "precision": "name channels_last",
    "budget": "epochs steps",
}
"""Keys, by part, that a digest has whatever they say. Any other is left out at its default: older digests stay."""

_REMOVED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "precision.blocked",
        lambda value: value is not False,
        "precision.blocked was removed: leave it out, and training computes with channels last",
    ),
    (
        "parallel.compress",
        lambda value: value == "2bit",
        "parallel.compress=2bit was removed: take bf16 (half the bytes, no setting) or powersgd (fewest bytes)",
    ),
    (
        "parallel.threshold",
        lambda value: False,  # with any other compression it meant nothing
        "parallel.threshold was removed with parallel.compress=2bit: leave it out",
    ),
    (
        "parallel.servers",
        lambda value: False,  # several servers made the same updates
        "parallel.servers was removed: one server has all parameters; leave it out",
    ),
    (
        "parallel.staleness",
        lambda value: value is not None,
        "parallel.staleness was removed: leave it out (parallel.staleness_power lowers the rate of a stale push), or"
        " take --engine ddp, where no gradient is stale",
    ),
    (
        "parallel.ray_address",
        lambda value: False,  # no command connected to the cluster that a file named
        "parallel.ray_address was removed: each run starts a Ray of its own; leave it out, and start workers on several"
        " machines by steady launch",
    ),
)
"""Keys that were removed or have lost a value: whether a value of a recipe was in use, and what to do instead."""


@documented
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a run that decide what is trained.

    Args:
        data: the images.
        model: the network and its initial weights.
        optim: the optimizer, the learning-rate schedule, and the loss.
        precision: number format, memory layout and compilation.
        budget: how long to train.
        parallel: devices, threads and processes.
        every: how often to log, evaluate and save.
    """

    data: Data
    model: Model
    optim: Optim = field(default_factory=Optim)
    precision: Precision = field(default_factory=Precision)
    budget: Budget = field(default_factory=lambda: Budget(epochs=10))
    parallel: Parallel = field(default_factory=Parallel)
    every: Every = field(default_factory=Every)
    batch_size: int = setting(
        128,
        "Images for each update, over all devices, 1 to 1,048,576.",
        limit=between(1, MOST_IMAGES),
        example=64,
        usual=(
            "128 on each GPU; at most a tenth of the images, but at least 2",
            "16 on each GPU; at most a tenth of the images, but at least 2",
        ),
        words="batch bs train-batch-size",
        flag=Flag(
            OPTIMIZER,
            "Images for each update, over all devices; auto: the fastest here, by measuring.",
            names="--batch-size -b",
            is_measured=True,
        ),
    )
    seed: int = setting(
        0,
        "Seed of initialisation, order and augmentation, 0 or more.",
        limit=ValueLimit(lambda seed: 0 <= seed < 2**63, "0 to 2**63 - 1"),
        example=1,
        words="seed-everything random-seed manual-seed random-state",
        flag=Flag(OUTPUT),
    )

    def __post_init__(self) -> None:
        check(self, "")
        largest = self.batch_size * math.prod(growth.times for growth in parse_growth(self.optim.grow_batch))
        require(largest <= MOST_IMAGES, "batch_size x optim.grow_batch", largest, f"up to {MOST_IMAGES}")
        is_probe, epochs = parse_train(self.model.train).main == "probe", self.budget.epochs
        require(is_probe or epochs != 0, "budget.epochs", epochs, f"above 0, up to {MOST_EPOCHS:,}")
        if is_probe and epochs != 0:
            raise RecipeError(
                f"model.train={self.model.train!r} makes no updates, so budget.epochs must be 0 (--epochs 0); to train"
                " on from the classifier that it fits: --train probe+head or probe+discriminative"
            )
        parts = self.data, self.model, self.optim, self.precision, self.budget, self.parallel
        for key, other, why in find_conflicts(*parts):
            raise RecipeError(f"{self._written(key)} and {self._written(other)} exclude each other: {why}")
        for key in ("skip", "fp32"):
            if getattr(self.every, key) and self.parallel.engine == "async":
                raise RecipeError(
                    f"every.{key} and parallel.engine='async' exclude each other: workers have no common order"
                )
        if self.batch_size % self.optim.accumulate:
            raise RecipeError(
                f"batch_size={self.batch_size} cannot be split into optim.accumulate="
                f"{self.optim.accumulate} equal parts: choose a divisor"
            )

    def _written(self, key: str) -> str:
        """Write a setting of a part as ``--set`` takes it."""
        part, _, name = key.partition(".")
        value = getattr(getattr(self, part), name)
        is_float, is_list = isinstance(value, float), isinstance(value, tuple)
        return f"{key}={','.join(value) if is_list else f'{value:g}' if is_float else repr(value)}"

    def batches(self, num_train: int) -> Batches:
        """Lay out the updates of the whole run on ``num_train`` images: enough to complete each epoch of the budget.

        Raises:
            RecipeError: the batch is to grow after the end of the run.
        """
        epochs, steps = self.budget.epochs or 0, self.budget.steps
        growths = parse_growth(self.optim.grow_batch)
        return lay_out(growths, batch_size=self.batch_size, num_train=num_train, epochs=epochs, steps=steps)

    def sizes(self, num_train: int, *, usual: int) -> tuple[SizeStage, ...]:
        """Lay out the sizes of training images in the whole run; before the first stage, they are ``usual``.

        Raises:
            RecipeError: a size is due after the end of the run.
        """
        return lay_out_sizes(
            parse_sizes(self.data.grow_size), self.batches(num_train), num_train=num_train, usual=usual
        )

    @property
    def waits_for_evaluations(self) -> bool:
        """Return whether the learning rate depends on evaluations, and so on how often there is one."""
        return self.optim.waits_for_evaluations

    @property
    def records_graphs(self) -> bool:
        """Return whether updates, or compiled code, are recorded as CUDA graphs."""
        return self.parallel.graph or self.precision.records_graphs

    @property
    def digest(self) -> str:
        """Twelve hex digits that name what is trained.

        ``parallel`` and ``every`` are left out, but for the evaluations that ``plateau`` waits for, and ``data.test``.
        """
        values = {name: part for name, part in self.to_dict().items() if name not in ("parallel", "every")}
        del values["data"]["test"]
        for part, names in FIRST_KEYS.items():
            first, usual = names.split(), _defaults(part)
            values[part] = {name: v for name, v in values[part].items() if name in first or v != usual[name]}
        if self.waits_for_evaluations:
            values["every"] = {"evaluate_epochs": self.every.evaluate_epochs}
            values["every"] |= {"best": self.every.best} if self.every.best else {}
        if self.budget.fill:
            del values["budget"]["epochs"], values["optim"]["warmup_epochs"]  # the run chooses them as it goes
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def after(self, step: int) -> Recipe:
        """Return the recipe by which the update after ``step`` of them is computed.

        In fp32, if ``every.fp32`` says so; at the rate of the newest of ``every.tries`` that has begun. Its digest may
        differ: runs have that of the recipe as it is.
        """
        recipe, begun = self, tuple(pair for pair in self.every.tries if pair[0] <= step)
        if any(step >= first - 1 for first in self.every.fp32):
            recipe = replace(recipe, precision=replace(self.precision, name="fp32"))
        if self.every.tries:
            lr = begun[-1][1] if begun else self.optim.lr
            recipe = replace(recipe, every=replace(self.every, tries=begun), optim=replace(self.optim, lr=lr))
        return recipe

    def with_(self, changes: Mapping[str, object] | None = None, /, **more: object) -> Recipe:
        """Return a copy with some values changed: ``recipe.with_({"optim.lr": 0.2}, batch_size=64)``.

        Raises:
            RecipeError: an unknown key (with the nearest known one) or a value that cannot be.
        """
        values, all_changes = self.to_dict(), {**(changes or {}), **more}
        for name, _, instead in _REMOVED:
            if name in all_changes and name not in recipe_settings():
                raise RecipeError(instead)
        for key, value in all_changes.items():
            *outer, last = key.split(".")
            table = values
            if not outer and key not in values:  # perhaps without its part: lr for optim.lr
                outer = [key]
            for name in outer:
                if not isinstance(table.get(name), dict):
                    known = (*(name for name, _ in leaves(values)), *values)
                    raise RecipeError(f"unknown key {key!r} in the recipe.{_key_hint(key, known)}")
                table = table[name]
            part = table.get(last) if not outer and isinstance(value, Mapping) else None
            table[last] = {**part, **plain(value)} if isinstance(part, dict) else plain(value)
        if "optim" not in all_changes and values["optim"]["name"] == "sgd" != self.optim.name:
            values["optim"]["nesterov"] = all_changes.get("optim.nesterov")  # another optimizer's means nothing
        recipe = Recipe.from_dict(values)
        parts = {
            part: replace(getattr(recipe, part), from_file=self._from_file(recipe, part, all_changes))
            for part in FILE_KEYS
        }
        return replace(recipe, **parts)

    def _from_file(self, recipe: Recipe, part: str, changes: Mapping[str, object]) -> frozenset[str]:
        """Return the gated keys of a part of ``recipe``, made by ``changes``, whose values are a file's."""
        before, after, change = getattr(self, part), getattr(recipe, part), changes.get(part)
        if isinstance(change, type(after)):
            keys: frozenset[str] = change.from_file
            return keys
        return frozenset(
            key
            for key in FILE_KEYS[part]
            if f"{part}.{key}" not in changes
            and (key in before.from_file or getattr(after, key) != getattr(before, key))
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and scalars."""
        values: dict[str, Any] = plain(self)
        return values

    def to_json(self) -> str:
        """Return indented JSON, the form of a run's ``recipe.json``."""
        return json.dumps(plain(self), indent=2) + "\n"

    @staticmethod
    def from_dict(values: Mapping[str, Any], *, of_past: bool = False) -> Recipe:
        """Build from what :meth:`to_dict` gives, or a part of it; raises RecipeError on a wrong key or value.

        ``of_past``: of a run that is looked at and not trained on: what was removed since is left out.
        """
        recipe = build(Recipe, _without_removed(values, of_past=of_past), hint=_key_hint)
        for name, text in leaves(recipe.to_dict()):
            if isinstance(text, str) and _NO_TEXT.search(text):
                raise RecipeError(f"{name} is {shorten(text)}: no path, name or text here has such a character")
        parts = {part: replace(getattr(recipe, part), from_file=frozenset(keys)) for part, keys in FILE_KEYS.items()}
        return replace(recipe, **parts)

    @staticmethod
    def from_json(text: str, *, of_past: bool = False) -> Recipe:
        """Read JSON, as :meth:`from_dict` does; raises RecipeError where it is not a recipe."""
        try:
            values = parse_json(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise RecipeError(f"the recipe is not JSON: {error}") from None
        return Recipe.from_dict(values, of_past=of_past)

    def differences(self, other: Recipe) -> list[str]:
        """Return what a change of recipe comes down to, a line each: ``optim.lr: 0.1 -> 0.2``."""
        values, others = dict(leaves(self.to_dict())), dict(leaves(other.to_dict()))
        keys = sorted(values.keys() | others.keys())
        return [f"{k}: {values.get(k)!r} -> {others.get(k)!r}" for k in keys if values.get(k) != others.get(k)]


@cache
def recipe_settings() -> Mapping[str, RecipeSetting]:
    """Return every setting of the recipe by its key: ``optim.lr``, ``seed``."""
    return dict(settings_of(Recipe))


def by_keys(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a recipe by dotted keys, where some are tables of parts.

    >>> by_keys({"optim": {"lr": 0.1}, "model.options": {"width": 64}})
    {'optim.lr': 0.1, 'model.options': {'width': 64}}
    """
    parts = {key.partition(".")[0] for key in recipe_settings() if "." in key}
    values: dict[str, Any] = {}
    for key, value in changes.items():
        is_part = key in parts and isinstance(value, Mapping)
        values |= {f"{key}.{name}": item for name, item in value.items()} if is_part else {key: value}
    return values


@cache
def _other_words() -> Mapping[str, str]:
    return {word: key for key, setting in recipe_settings().items() for word in setting.words.split()}


def synonym(word: str) -> str:
    """Return the recipe's key that a word of another trainer is exactly; empty where there is none.

    >>> synonym("--wd"), synonym("optim.learning_rate"), synonym("--amp")
    ('optim.weight_decay', 'optim.lr', '')
    """
    return _other_words().get(plain_word(word), "")


@cache
def _defaults(part: str) -> Mapping[str, Any]:
    """Return the defaults of a part's fields as plain data; those that must be given are left out."""
    defaults = {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in fields(hints_of(Recipe)[part])
    }
    return {name: plain(value) for name, value in defaults.items() if value is not MISSING}


def _key_hint(key: str, known: Iterable[str]) -> str:
    """Return what an unknown key is called here, what there is instead, or which known one is near."""
    last = key.rpartition(".")[2]
    known = list(dict.fromkeys(known))
    everywhere = dict.fromkeys([*known, *recipe_settings()])
    matches = [name for name in everywhere if name.rpartition(".")[2] == last]  # batch_size, for optim.batch_size
    if matches or (nearest := synonym(last)):
        return f" Did you mean {' or '.join(matches) or nearest}?"
    if hint := advice(last) or did_you_mean(key.partition(".")[0], [name for name in known if "." not in name]):
        return hint
    by_last = {name.rpartition(".")[2]: name for name in known}  # optim.lr, for lrr
    similar = difflib.get_close_matches(last, by_last, n=3) if "." not in key else []
    return f" Did you mean {' or '.join(by_last[name] for name in similar)}?" if similar else ""


def _without_removed(values: Mapping[str, Any], *, of_past: bool) -> Mapping[str, Any]:
    """Drop keys that only recipes of earlier versions have. Raises RecipeError where one was in use, if not of past."""
    for name, is_in_use, instead in _REMOVED:
        part, _, key = name.partition(".")
        table = values.get(part) if isinstance(values, Mapping) else None
        if not isinstance(table, Mapping) or key not in table:
            continue
        is_used = is_in_use(table[key])
        if is_used and not of_past:
            raise RecipeError(
                f"{instead}; a run that began with it cannot go on: start it again in another --run folder"
            )
        if is_used or name not in recipe_settings():
            values = {**values, part: {other: value for other, value in table.items() if other != key}}
    return values
