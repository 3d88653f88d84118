"""All of a recipe: to and from JSON and TOML, its digest, and changes of it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from steadytrain.config.parts import Budget, Data, Every, Model, Optim, Parallel, Precision, require
from steadytrain.config.plain import build, check_types, leaves, plain
from steadytrain.errors import RecipeError, did_you_mean

USUAL = (
    ("data", "order", "global"),
    ("data", "root", None),
    ("data", "labels", None),
    ("precision", "compile", "none"),
)
"""What goes without saying: keys that came later than the first digests."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that says what to train. ``batch_size`` is global: images an update, over every device."""

    data: Data
    model: Model
    optim: Optim = field(default_factory=Optim)
    precision: Precision = field(default_factory=Precision)
    budget: Budget = field(default_factory=lambda: Budget(epochs=10))
    parallel: Parallel = field(default_factory=Parallel)
    every: Every = field(default_factory=Every)
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self, "")
        require(1 <= self.batch_size <= 2**20, "batch_size", self.batch_size, f"1 to {2**20}")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2**63 - 1")
        for one, other, why in self._conflicts():
            raise RecipeError(f"{one} and {other} exclude each other: {why}")
        if self.batch_size % self.optim.accumulate:
            raise RecipeError(
                f"batch_size={self.batch_size} cannot be split into optim.accumulate="
                f"{self.optim.accumulate} equal parts: choose a divisor"
            )

    def _conflicts(self) -> Iterator[tuple[str, str, str]]:
        """Pairs of values that cannot be together, and the reason with the way out."""
        precision, compress, accumulate = self.precision, self.parallel.compress, self.optim.accumulate
        compressed, numbers = f"parallel.compress={compress!r}", f"precision.name={precision.name!r}"
        compiled = f"precision.compile={precision.compile!r}"
        if compress == "2bit" and precision.name == "fp16":
            why = "the loss scale changes what a threshold means; use bf16, or compress=fp16"
            yield compressed, numbers, why
        if compress != "none" and precision.is_pure:
            yield compressed, numbers, "its gradients have 16 bits already; use compress=none"
        if precision.compile == "reduce-overhead" and accumulate > 1:
            why = "a CUDA graph reuses the memory of gradients that are to be added up; use compile=default"
            yield compiled, f"optim.accumulate={accumulate}", why
        if self.parallel.graph and precision.compile not in ("none", "default"):
            yield compiled, "parallel.graph=True", "that mode records graphs of its own; use compile=default"
        if precision.compile != "none" and self.model.batch_norm == "synchronous":
            why = "what ranks exchange inside a pass cannot be compiled; leave one of them out"
            yield compiled, "model.batch_norm='synchronous'", why

    @property
    def records_graphs(self) -> bool:
        """Whether updates, or compiled code, are recorded as CUDA graphs."""
        return self.parallel.graph or self.precision.compile in ("reduce-overhead", "max-autotune")

    @property
    def digest(self) -> str:
        """Twelve hex digits that name what is trained (``parallel`` and ``every`` left out)."""
        told = {name: part for name, part in self.to_dict().items() if name not in ("parallel", "every")}
        for part, name, usual in USUAL:
            if told[part][name] == usual:
                del told[part][name]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    def with_(self, changes: Mapping[str, object] | None = None, /, **more: object) -> Recipe:
        """A copy with some values changed: ``recipe.with_({"optim.lr": 0.2}, batch_size=64)``.

        Raises:
            RecipeError: an unknown key (with the nearest known one) or a value that cannot be.
        """
        told = self.to_dict()
        for key, value in {**(changes or {}), **more}.items():
            *outer, last = key.split(".")
            if not outer and key not in told:
                raise RecipeError(f"unknown key {key!r} in the recipe.{_nearest(key, told)}")
            inner = told
            for name in outer:
                inner = _descend(inner, name, key)
            inner[last] = plain(value)
        return Recipe.from_dict(told)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and scalars."""
        told: dict[str, Any] = plain(self)
        return told

    def to_json(self) -> str:
        """Indented JSON, the form of a run's ``recipe.json``."""
        return json.dumps(plain(self), indent=2) + "\n"

    @staticmethod
    def from_dict(told: Mapping[str, Any]) -> Recipe:
        """Build from what :meth:`to_dict` gives, or a part of it; raises RecipeError on a wrong key or value."""
        return build(Recipe, _without_removed_keys(told))

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Read JSON; raises RecipeError where it is not a recipe."""
        try:
            told = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecipeError(f"the recipe is not JSON: {error}") from None
        return Recipe.from_dict(told)

    @staticmethod
    def from_toml(text: str) -> Recipe:
        """Read TOML; raises RecipeError where it is not a recipe."""
        try:
            return Recipe.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"the recipe is not TOML: {error}") from None

    def differences(self, other: Recipe) -> list[str]:
        """What a change of recipe comes down to, a line each: ``optim.lr: 0.1 -> 0.2``."""
        mine, theirs = dict(leaves(self.to_dict())), dict(leaves(other.to_dict()))
        keys = sorted(mine.keys() | theirs.keys())
        return [f"{k}: {mine.get(k)!r} -> {theirs.get(k)!r}" for k in keys if mine.get(k) != theirs.get(k)]


def _without_removed_keys(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop keys that recipes of earlier versions have. Raises RecipeError where one of them was in use."""
    precision = told.get("precision") if isinstance(told, Mapping) else None
    if not isinstance(precision, Mapping) or "blocked" not in precision:
        return told
    if precision["blocked"] is not False:
        raise RecipeError(
            "precision.blocked was removed: leave it out, and training computes with channels last; a run that began"
            " with it cannot go on: start it again in another --run folder"
        )
    return {**told, "precision": {name: value for name, value in precision.items() if name != "blocked"}}


def _nearest(name: str, told: Mapping[str, Any]) -> str:
    """A hint for a key without its part: ``lr`` for ``optim.lr``."""
    whole = [key for key, _ in leaves(told) if key.rpartition(".")[2] == name]
    return f" Did you mean {' or '.join(whole)}?" if whole else did_you_mean(name, told)


def _descend(told: dict[str, Any], name: str, key: str) -> dict[str, Any]:
    inner = told.get(name)
    if not isinstance(inner, dict):
        raise RecipeError(f"unknown key {key!r} in the recipe.{did_you_mean(name, told)}")
    return inner
