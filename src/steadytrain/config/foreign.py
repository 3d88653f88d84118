"""Words of other tools and what each is here: the table ``foreign.toml``, which is read when a word is not ours.

Words that are exactly a setting of the recipe stand at its field (:mod:`steadytrain.config.parts`). A word is looked up
without its dashes: ``--weight-decay``, ``weight_decay`` and ``optim.weight_decay`` are the same.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from steadytrain.errors import did_you_mean

ON, OFF = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none", "null")
"""Words behind a switch that turn it on or off."""
SECTIONS = ("ours", "usual", "needless", "only", "instead", "absent")
"""The sections of the table that are about flags; of two that have a flag, the first counts."""

MOST_VALUES = {"names": 10, "numbers": 100, "options": 100, "side": 3}
"""Values that fill a place of a text, where it is not one."""


class ForeignFlag(NamedTuple):
    """A row of the table: a flag of another tool.

    Args:
        section: one of :data:`SECTIONS`.
        text: words of ours, with places for values in braces, or a sentence.
        most: values that follow the flag, at most.
        values: the only values that this is about, in small letters, with the wildcards of a shell; empty: any.
    """

    section: str
    text: str
    most: int = 0
    values: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The text without the backticks around commands."""
        return self.text.replace("`", "")

    def is_about(self, value: str) -> bool:
        """Return whether this is what the table says of the flag with a value, which is empty for a bare switch."""
        return not self.values or any(_is_same(value.lower(), known) for known in self.values)


def _is_same(value: str, known: str) -> bool:
    if known in ("on", "off"):
        return value in (OFF if known == "off" else ("", *ON))
    return fnmatchcase(value, known) or (is_number(value) and is_number(known) and float(value) == float(known))


def is_number(word: str) -> bool:
    """Return whether a word is a number, which may be below 0."""
    return bool(re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", word))


def plain_word(word: str) -> str:
    """Return a word as the table has it: without its part and dashes, in small letters."""
    return word.rpartition(".")[2].lstrip("-").replace("_", "-").lower()


@cache
def foreign_table() -> Mapping[str, Any]:
    """Read the table: its sections by name."""
    return tomllib.loads(files("steadytrain.config").joinpath("foreign.toml").read_text(encoding="utf-8"))


@cache
def foreign_flags() -> Mapping[str, tuple[ForeignFlag, ...]]:
    """Return what the table says of each flag."""
    known: dict[str, list[ForeignFlag]] = {}
    for section in SECTIONS:
        for text, flags in foreign_table()[section].items():
            places = sum(MOST_VALUES.get(place, 1) for place in re.findall(r"\{(\w+)\}", text))
            for flag in flags.split():
                name, equals, values = flag.partition("=")
                most = max(places, bool(equals) and values not in ("on", "off"))
                row = ForeignFlag(section, text, most, tuple(filter(None, values.split(","))))
                known.setdefault(name, []).append(row)
    return {name: tuple(sorted(rows, key=lambda row: not row.values)) for name, rows in known.items()}


def is_refused(flag: str) -> bool:
    """Return whether the table only says what to type instead of a flag, without its dashes."""
    rows = foreign_flags().get(flag, ())
    return bool(rows) and all(row.section in ("instead", "absent") and not row.values for row in rows)


def words_of(section: Mapping[str, str]) -> dict[str, str]:
    """Return the words of a section by what is ours: word -> ours, without the backticks around commands."""
    return {word: text.replace("`", "") for text, words in section.items() for word in words.split()}


def instead_in_python(name: str, names: Iterable[str]) -> str:
    """Say what to call in place of a name that ``st`` or a result lacks; empty where nothing is near.

    >>> instead_in_python("load_model", ["restore"]), instead_in_python("evaluat", ["evaluate"])
    (': st.restore(RUN)', '. Did you mean evaluate?')
    """
    instead = words_of(foreign_table()["python"]).get(plain_word(name))
    return f": {instead}" if instead else f".{near}" if (near := did_you_mean(name, names)) else ""


@cache
def our_value(flag: str, value: str) -> str:
    """Return a value in our words, of a flag of ours without its dashes; as it is where the table does not have it.

    >>> our_value("precision", "16-mixed"), our_value("schedule", "StepLR"), our_value("schedule", "cosine")
    ('fp16', 'StepLR', 'cosine')
    """
    known = {_bare(word): ours for word, ours in words_of(foreign_table()["values"].get(flag, {})).items()}
    return known.get(_bare(value), value)


def _bare(value: str) -> str:
    return re.sub(r"[-_]", "", value.lower().removeprefix("nn."))


def advice(word: str, verb: str = "train") -> str:
    """Say what to give a verb instead of a word of another tool, in a sentence; empty where nothing is known of it.

    >>> advice("--half"), advice("--jsd-loss")[:19], advice("vflip")
    (' Instead: --precision bf16, or fp16.', ' Not supported yet:', ' Instead: --transforms vflip:VALUE.')
    """
    rows = foreign_flags().get(plain_word(word), ())
    if not rows:
        return ""
    text = re.sub(r"\{\w*\}", "VALUE", re.sub(r"(,\{\})+$", "", rows[-1].words))
    text = text.replace("steady train DATA", f"steady {verb} DATA")
    starts = {"needless": "Leave it out", "absent": "Not supported yet"}
    return f" {starts.get(rows[-1].section, 'Instead')}: {text}."
