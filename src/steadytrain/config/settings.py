"""Facts about a setting of the recipe, once, in the metadata of its field.

Flags, their help, the words of other trainers, the pages of the recipe and the limits are all made from it: a new
setting is its field, and the place that uses it.

>>> @dataclass(frozen=True)
... class Part:
...     '''A part.'''
...     rate: float = setting(0.1, "Learning rate, above 0.", limit=ABOVE_0, words="lr0", flag=Flag(OPTIMIZER))
>>> [(key, about.flag.name) for key, about in settings_of(Part, "part.")]
[('part.rate', '--rate')]
>>> check(Part(rate=0.0), "part")
Traceback (most recent call last):
steadytrain.errors.RecipeError: part.rate is 0.0; it must be above 0
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

from steadytrain.config.plain import PLAIN, check_types, hints_of
from steadytrain.errors import RecipeError

T = TypeVar("T")
SETTING = "setting"
"""Metadata of a field: its :class:`RecipeSetting`."""

GROUPS = (
    "Data",
    "Model",
    "Images and augmentation",
    "Loss and rare classes",
    "Optimizer and schedule",
    "Precision and speed",
    "Ranks",
    "Run and output",
)
"""The headings that ``--help`` shows the training flags under, in their order."""
DATA, MODEL, IMAGES, LOSS, OPTIMIZER, SPEED, RANKS, OUTPUT = GROUPS


class ValueLimit(NamedTuple):
    """A condition on a value, as a function and in words that follow "it must be"; None always holds."""

    holds: Callable[[Any], bool]
    words: str


def between(least: float, most: float, words: str = "") -> ValueLimit:
    """Make the limit of numbers from ``least`` to ``most``, both included."""
    return ValueLimit(lambda value: least <= value <= most, words or f"{least} to {most}")


ABOVE_0 = ValueLimit(lambda value: value > 0, "above 0")
NOT_NEGATIVE = ValueLimit(lambda value: value >= 0, "0 or more")
FROM_1 = ValueLimit(lambda value: value >= 1, "1 or more")
BELOW_1 = ValueLimit(lambda value: 0 <= value < 1, "from 0 up to, not including, 1")
UP_TO_1 = ValueLimit(lambda value: 0 < value <= 1, "above 0, up to 1")


@dataclass(frozen=True)
class Flag:
    """A flag of the verbs that train, which sets one value of the recipe.

    Args:
        group: one of :data:`GROUPS`.
        help: what ``--help`` says, without the default; empty: the setting's meaning.
        names: the flag and its other names, with spaces between; empty: that of the field.
        kind: what is typed; None: by the field's type.
        read: makes the recipe's value of what was typed.
        is_measured: it takes ``auto``, which leaves the value to measuring.
        implied: other keys of the recipe, and the values that they get.
    """

    group: str
    help: str = ""
    names: str = ""
    kind: Any = None
    read: Callable[[Any], object] | None = None
    is_measured: bool = False
    implied: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        """The flag with its dashes."""
        return self.names.split()[0]


@dataclass(frozen=True)
class RecipeSetting:
    """The description of a setting.

    Args:
        meaning: a sentence or more.
        limit: of its values.
        example: a value for the reference, where the default is nothing.
        usual: the default in words, where it is not the field's: of all verbs, or of ``train`` and of ``finetune``.
        words: what other trainers call exactly the same, with spaces between.
        flag: what sets it on the command line, other than ``--set``.
    """

    meaning: str
    limit: ValueLimit | None = None
    example: object = None
    usual: str | tuple[str, str] = ""
    words: str = ""
    flag: Flag | None = None

    def refuse_beyond_limit(self, key: str, value: object) -> None:
        """Raise RecipeError for a value beyond the limit, with its key, itself and the limit."""
        if self.limit is not None and value is not None:
            require(self.limit.holds(value), key, value, self.limit.words)


def about(meaning: str, **known: Any) -> dict[str, Any]:
    """Return the metadata of a setting that has no default; ``known``: as of :class:`RecipeSetting`."""
    return {SETTING: RecipeSetting(meaning, **known)}


def setting(default: T, meaning: str, **known: Any) -> T:
    """Return the field of a setting with its default."""
    usual: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    value: T = field(**usual, metadata=about(meaning, **known))
    return value


def file_keys() -> frozenset[str]:
    """Return the field of a part that says which of its gated values were read from a file: no setting itself."""
    keys: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={PLAIN: False})
    return keys


def settings_of(kind: type, prefix: str = "") -> Iterator[tuple[str, RecipeSetting]]:
    """Yield the settings of a part, or of a recipe and its parts, by their keys; each flag has its names."""
    for entry in fields(kind):
        inner, known = hints_of(kind).get(entry.name), entry.metadata.get(SETTING)
        if isinstance(inner, type) and is_dataclass(inner):
            yield from settings_of(inner, f"{prefix}{entry.name}.")
        elif known is not None:
            flag = known.flag
            if flag is not None and not flag.names:
                known = replace(known, flag=replace(flag, names=f"--{entry.name.replace('_', '-')}"))
            yield prefix + entry.name, known


def documented(kind: type[T]) -> type[T]:
    """Add what the settings of a part mean to its docstring."""
    known = [(entry.name, entry.metadata.get(SETTING)) for entry in fields(kind)]  # type: ignore[arg-type]
    text = inspect.cleandoc(kind.__doc__ or "")
    heading = [] if "Args:" in text else ["", "Args:"]
    text = "\n".join([text, *heading, *(f"    {name}: {about.meaning}" for name, about in known if about)])
    kind.__doc__ = re.sub(r"\bfile:\w+", r"``\g<0>``", text)  # no address to follow on a page
    return kind


def require(holds: bool, name: str, value: object, limit: str) -> None:
    """Refuse a value beyond its limit. Raises RecipeError with the name, the value and the limit."""
    if not holds:
        raise RecipeError(f"{name} is {value!r}; it must be {limit}")


def check(part: Any, where: str) -> None:
    """Refuse values that do not fit their types or are beyond their limits (for ``__post_init__``).

    Raises:
        RecipeError: names the field, its value and what it must be.
    """
    check_types(part, where)
    for entry in fields(part):
        if (known := entry.metadata.get(SETTING)) is not None:
            known.refuse_beyond_limit(f"{where}.{entry.name}".lstrip("."), getattr(part, entry.name))
