"""Flags of timm, torchvision, Lightning, MXNet and others, read as flags and keys of ours.

What each flag is stands in ``config/foreign.toml``: the same flag or key of ours is read without a word; where it is
nearly the same, or asks for what is done anyway, a note says so; where there is nothing like it, an error names what
comes nearest. ``docs/generate_cli.py`` lists all of each tool.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from steadytrain.cli.options import flag_of, is_switch, our_flag
from steadytrain.config.foreign import (
    OFF,
    ON,
    ForeignFlag,
    advice,
    foreign_flags,
    foreign_table,
    is_number,
    is_refused,
    our_value,
    plain_word,
)
from steadytrain.config.recipe import synonym
from steadytrain.config.transforms import split_transforms
from steadytrain.errors import InputError, did_you_mean
from steadytrain.format import count


def read_flags(words: Sequence[str], is_own: Callable[[str], bool] = lambda flag: False) -> tuple[list[str], list[str]]:
    """Return the words of a command line with flags of ours in place of others', and notes about the difference.

    Args:
        is_own: returns whether the verb has a flag, which no other tool's table is about then.

    Raises:
        InputError: a flag without its value, or one that has no counterpart; of several, all are in the message.

    >>> read_flags(["photos", "--vflip", "0.25", "--mixup=0.2", "--hflip", "0.5", "--wd", "0.1", "--momentum=0.8"])[0]
    ['photos', '--weight-decay', '0.1', '--set', 'optim.momentum=0.8', '--set', 'data.flip=true', '--transforms', \
'vflip:0.25,mixup:0.2']
    >>> read_flags(["photos", "--precision", "bf16-mixed", "--devices", "2", "--strategy", "ddp"])[0]
    ['photos', '--precision', 'bf16', '--procs', '2']
    """
    reading, waiting = FlagReading(), deque(words)
    while waiting:
        word = waiting.popleft()
        if not _is_long(word):
            reading.left.append(word)
            continue
        try:
            reading.read(word, waiting)
        except InputError as error:
            reading.problems.append(str(error))
    reading.refused = [word for word in reading.refused if not is_own(word)]
    reading.raise_problems(words[0])
    return reading.in_our_words(), reading.notes


def _is_long(word: str) -> bool:
    """Return whether a word is a flag of more than a letter; timm's ``-aa`` and ``-vb`` have one dash."""
    return len(word) > 2 and (word[:2] == "--" or (word[0] == "-" and plain_word(word) in foreign_flags()))


@dataclass
class FlagReading:
    """A translation so far.

    Args:
        left: words that stay as they are, and flags of ours.
        ours: words of ours in place of others'.
        usual: text of the table -> words of ours that hold unless another flag says otherwise.
        transforms: by name.
        notes: for the user.
        problems: what is wrong with a flag, in a sentence; ``refused``: flags to replace by hand, also in left.
    """

    left: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    usual: dict[str, list[str]] = field(default_factory=dict)
    transforms: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def raise_problems(self, verb: str) -> None:
        """Raise all that is wrong in one error; a lone refused flag is left to the parser, which knows near ones."""
        refused = [f"{word}:{advice(word, verb).removeprefix(' Instead:').rstrip('.')}" for word in self.refused]
        if len(problems := [*self.problems, *refused]) > 1:
            listed = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1))
            raise InputError(f"{len(problems)} flags are not taken as they are: {listed}")
        for problem in self.problems:
            raise InputError(problem)

    def read(self, word: str, waiting: deque[str]) -> None:
        """Read a flag, and its values from the words that follow it."""
        word, equals, value = word.partition("=")
        plain = plain_word(word)
        key = "" if our_flag(plain) else synonym(plain)
        flag = our_flag(plain) or flag_of(key)
        name = plain if plain in foreign_flags() else flag.removeprefix("--")
        rows = foreign_flags().get(name, ())
        values = [value] if equals else _take_values(rows, flag, word, waiting)
        if self._apply(name, rows, word, values, flag):
            return
        if flag == "--transforms":
            self._add_transforms(values[0] if values else "")
        elif flag:
            values = [our_value(flag.removeprefix("--"), value) for value in values]
            self.left += [f"{flag}={values[0]}"] if equals else [flag, *values]
        elif key:
            if not equals and not waiting:
                raise InputError(f"{word} needs a value: {word} VALUE, which is --set {key}=VALUE")
            self.left += ["--set", f"{key}={value if equals else waiting.popleft()}"]
        else:
            self.refused += [word] * is_refused(plain)
            self.left += [f"{word}={value}"] if equals else [word, *values]

    def _apply(self, name: str, rows: Sequence[ForeignFlag], word: str, values: list[str], flag: str) -> bool:
        """Do what the table says of a flag with these values; return whether it says anything."""
        value, typed = values[0].lower() if values else "", " ".join([word, *values])
        if is_switch(flag) and value in (*ON, *OFF):
            self.left += [flag] if value in ON else []
            return True
        for row in rows:
            if row.section == "only":
                if not row.values or not row.is_about(value):
                    raise InputError(f"{typed} has no counterpart here: {row.words}")
            elif not row.is_about(value):
                continue
            elif row.section == "needless":
                self.notes.append(f"{typed} is not needed: {row.words}")
            elif row.section in ("ours", "usual"):
                ours = _filled(row, rows, word, values)
                if ours:
                    self._add(
                        name, typed, ours, self.usual.setdefault(row.text, []) if row.section == "usual" else self.ours
                    )
            elif row.values:
                raise InputError(f"{typed} has no counterpart here: {row.words}")
            else:
                return False
            return True
        return False

    def _add(self, name: str, typed: str, ours: list[str], words: list[str]) -> None:
        """Add ours to words, with a note where the table has one."""
        about = foreign_table()["notes"].get(name, "")
        if ours[0] == "--transforms":
            self._add_transforms(ours[1])
            about = foreign_table()["notes"]["rand"] if " rand-" in typed else about
        else:
            words += [our_value(flag.removeprefix("--"), word) for flag, word in pairwise(["", *ours])]
        if about:
            self.notes.append(f"{typed} is read as {' '.join(ours)}: {about.replace('`', '')}")

    def _add_transforms(self, texts: str) -> None:
        self.transforms |= {text.partition(":")[0]: text for text in split_transforms(texts)}

    def in_our_words(self) -> list[str]:
        """Return the command line; of a flag that is there twice, the later one counts."""
        usual = [words for text in reversed(foreign_table()["usual"]) for words in self.usual.get(text, ())]
        transforms = ["--transforms", ",".join(self.transforms.values())] if self.transforms else []
        return [*self.left[:1], *usual, *self.left[1:], *self.ours, *transforms]


def _is_zero(value: str) -> bool:
    return is_number(value) and float(value) == 0


def _take_values(rows: Sequence[ForeignFlag], flag: str, word: str, waiting: deque[str]) -> list[str]:
    """Take the values of a flag from the words that follow it; those of most flags of ours stay where they are."""
    first, most = waiting[0].lower() if waiting else "", max((row.most for row in rows), default=1)
    if is_switch(flag) or not most:
        is_ours = first in (*ON, *OFF) or any(row.values and first and row.is_about(first) for row in rows)
        return [waiting.popleft()] if is_ours else []
    if not rows and flag.removeprefix("--") not in foreign_table()["values"]:
        return []
    values: list[str] = []
    while waiting and len(values) < most and (is_number(waiting[0]) or not waiting[0].startswith("-")):
        is_listed = any(row.values and row.is_about(waiting[0].lower()) for row in rows)
        if values and not is_listed and not is_number(waiting[0]) and "=" not in waiting[0]:
            break
        values.append(waiting.popleft())
    if not values and rows and not is_refused(plain_word(word)):
        raise InputError(f"{word} needs a value: {word} VALUE")
    return values


def _filled(row: ForeignFlag, rows: Sequence[ForeignFlag], word: str, values: list[str]) -> list[str]:
    """Return the words of ours that a row has for these values; none where they ask for nothing."""
    names = re.findall(r"\{(\w+)\}", row.text)
    if not names:
        if row.values or not values or values[0].lower() not in OFF:
            return row.text.split()
        return row.text.replace("=true", "=false").split() if row.text.endswith("=true") else []
    if names == ["options"]:
        return [part.format(options=value) for value in values for part in row.text.split()]
    read, must = PLACES[names[0]]
    texts = [read(word, [value]) for value in values] if names[1:] else [read(word, values)]
    if len(texts) != len(names) or None in texts:
        if nearest := [row for row in rows if row.section == "only"]:
            raise InputError(f"{word} {' '.join(values)} has no counterpart here: {nearest[0].words}")
        must = f"{len(names)} {must.removeprefix('a ')}s" if names[1:] else must
        raise InputError(f"{word} is {' '.join(values)!r}; it must be {must}")
    if row.text.startswith("--transforms") and _is_zero(str(texts[0])):
        return []
    remaining = map(str, texts)
    return re.sub(r"\{\w+\}", lambda _: next(remaining), row.text).split()


# What stands in braces in the table: a function of the flag and its values, None for values that it cannot read.


def _matching(pattern: str) -> Callable[[str, Sequence[str]], str | None]:
    return lambda word, values: values[0] if re.fullmatch(pattern, values[0]) else None


def _numbers(word: str, values: Sequence[str]) -> str | None:
    numbers = [number for value in values for number in re.split(r"[,\s()\[\]]+", value) if number]
    return ",".join(numbers) if numbers and all(map(is_number, numbers)) else None


def _pixels(word: str, values: Sequence[str]) -> str | None:
    numbers = _numbers(word, values)
    return numbers and ",".join(f"{float(number) / 255:.6g}" for number in numbers.split(","))


def _side(word: str, values: Sequence[str]) -> str | None:
    """Read channels, height and width (``3 224 224``) as the side of the square."""
    sides = [number for value in values for number in re.findall(r"\d+", value)]
    return sides[-1] if len(sides) == 1 or (len(sides) in (2, 3) and sides[-1] == sides[-2]) else None


def _minutes(word: str, values: Sequence[str]) -> str | None:
    """Read days, hours, minutes and seconds (``00:12:00:00``) as minutes."""
    if not re.fullmatch(r"\d+:\d+:\d+:\d+", values[0]):
        return None
    days, hours, minutes, seconds = map(int, values[0].split(":"))
    return f"{1440 * days + 60 * hours + minutes + seconds / 60:g}"


def _devices(word: str, values: Sequence[str]) -> str | None:
    """Read a count of devices, all of them (``-1``, ``auto``), or some by their numbers (``0,2``).

    Raises:
        InputError: one number of ``--gpus``, which may be a count or a GPU's own.
    """
    value, numbers = values[0], re.findall(r"\d+", values[0])
    are_gpus = plain_word(word) == "gpus"
    if value.lower() in ("-1", "auto", "all"):
        return "--procs auto --device cuda" if are_gpus and value.lower() != "auto" else "--procs auto"
    if value.isdecimal() and are_gpus:
        many = f"--procs {value} computes on {count(int(value), 'GPU')}" if value != "0" else "--device cpu for none"
        raise InputError(f"{word} is {value}: {many}, and --device cuda:{value} on GPU {value} (the first is cuda:0)")
    if value.isdecimal():
        return f"--procs {value}" if value != "1" else ""
    return f"--device cuda:{','.join(numbers)}" if numbers else None


def _policy(word: str, values: Sequence[str]) -> str | None:
    """Read a policy in timm's words (``rand-m9-mstd0.5-inc1``) or torchvision's (``ta_wide``)."""
    text = values[0].lower()
    name, *sections = text.split("-")
    if text in ("none", ""):
        return "0"
    if name not in ("rand", "augmix"):
        if (ours := our_value("transforms", text)) == text:
            near = did_you_mean(text, ("rand-m9", "augmix-m3-w3"))
            raise InputError(f"{word} is {text!r}; it must be {PLACES['policy'][1]}.{near}")
        return ours
    parsed = dict[str, str]()
    for section in sections:
        match = re.fullmatch(r"(m|mstd|n|p|inc|w|d)([0-9]*\.?[0-9]+)", section)
        if match is None:
            raise InputError(
                f"the part {section!r} of {text!r} has no counterpart here: leave it out (docs: augmentation)"
            )
        parsed[match[1]] = match[2]
    if name == "augmix":
        return f"augmix:{parsed.get('m', '3')},{parsed.get('w', '3')},{parsed.get('d', '3')}"
    magnitude, deviation = 3 * float(parsed.get("m", "10")), 3 * float(parsed.get("mstd", "0"))
    return f"randaugment:{parsed.get('n', '2')},{min(magnitude, 30):g},{min(deviation, 10):g},{parsed.get('p', '0.5')}"


PLACES: dict[str, tuple[Callable[[str, Sequence[str]], str | None], str]] = {
    "value": (_matching(r".+"), "a value"),
    "names": (lambda word, values: ",".join(values), "names"),
    "number": (lambda word, values: values[0] if is_number(values[0]) else None, "a number"),
    "whole": (_matching(r"[0-9]+"), "a whole number"),
    "fraction": (_matching(r"0?\.[0-9]+|1\.0+"), "a fraction"),
    "numbers": (_numbers, "numbers, such as 0.5 0.5 0.5"),
    "pixels": (_pixels, "numbers from 0 to 255, such as 123.68,116.779,103.939"),
    "side": (_side, "the side of a square, such as 224: images are squares here"),
    "minutes": (_minutes, "DD:HH:MM:SS, or minutes: --set budget.minutes=60"),
    "devices": (_devices, "a number: --procs 2 computes on two GPUs, --device cuda:0,2 on these"),
    "policy": (_policy, "ra, ta_wide, augmix, imagenet, cifar10, svhn, rand-m9-mstd0.5 or augmix-m3-w3-d3"),
}
"""Place in a text of the table -> what reads its values, and what they must be."""
