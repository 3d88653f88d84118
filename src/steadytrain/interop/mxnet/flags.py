"""Flags of MXNet's tools as they were typed, and words of ours in their place."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from steadytrain.errors import InputError, did_you_mean

Words = tuple[str, ...]
CUT = (
    "whole images are scaled and their middle is cut out; MXNet cut it out of images as they are stored, which shows"
    " less of those packed much larger: compare on images packed with --shorter-side"
)
HELD_OUT = "what lies beside it, else a tenth or a fifth of each class held out; MXNet trained on all (--holdout 0)"
OF_OTHER_WEIGHTS = "left out: it belongs to MXNet's network, and the weights in its place say how they want images"
_FIXED = ("data.interpolation=bilinear", "data.fit=crop", "optim.label_smoothing=0")
_TUNED = ("model.train=full", "model.batch_norm=train", "model.decay=1", "optim.ema=none")
"""Settings of the old scripts whatever their flags, which our commands do not have; the second part is that of scripts
that fine-tune.
"""
_FINETUNE = "fits the classifier first, keeps norms, lowers rates by layer, smooths, averages: usually better"


@dataclass(frozen=True, kw_only=True)
class Translated:
    """The translation of an old command line.

    Args:
        commands: of ours, to be run one after another, each without ``steady``.
        rows: old words (``--kv-store local``), and what they have become, or why they say nothing here.
    """

    commands: tuple[Words, ...]
    rows: tuple[tuple[str, str], ...]


@dataclass
class Draft:
    """A translated command line under construction, with the origin of each word."""

    values: Mapping[str, Any]
    typed: frozenset[str]
    words: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, flags: Sequence[str], *words: str, why: str = "") -> None:
        """Add words of ours in place of old flags; ``why``: what is worth knowing about it."""
        self.words += words
        shown = shlex.join(words)
        self.rows.append((self.old(flags), f"{shown}: {why}" if shown and why else shown or why))

    def drop(self, flag: str, why: str) -> None:
        """Leave an old flag out, if somebody typed it."""
        if flag in self.typed:
            self.rows.append((self.old([flag]), why))

    def old(self, flags: Sequence[str]) -> str:
        """Spell old flags as they were typed, or as their script's default."""
        values = [f"{value:g}" if isinstance(value := self.values[flag], float) else str(value) for flag in flags]
        quoted = [f" {shlex.quote(value)}" if value else "" for value in values]  # switches have none
        shown = [f"--{flag.replace('_', '-')}{value}" for flag, value in zip(flags, quoted, strict=True)]
        return " ".join(shown) + ("" if any(flag in self.typed for flag in flags) else " (default)")

    def fix(self, tool: str) -> None:
        """Set what ``tool`` does whatever its flags, where the new command's own values are others."""
        is_tuned, chosen = self.words[0] == "finetune", {word.partition("=")[0] for word in self.words}
        fixed = [each for each in _FIXED + _TUNED * is_tuned if each.partition("=")[0] not in chosen]
        words = [word for setting in fixed for word in ("--set", setting)]
        self.words += words
        self.rows.append((f"{tool}'s own", f"{shlex.join(words)}: what it does with every line"))
        if is_tuned:
            ours = shlex.join(["finetune", self.words[1], "--model", self.words[self.words.index("--model") + 1]])
            self.rows.append(("instead", f"steady {ours}: {_FINETUNE}"))


class Parser(argparse.ArgumentParser):
    """A parser of old flags, with dashes or underscores and by their beginnings, whose errors are ours."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words, whose underscores in flags are dashes: each flag has one spelling, so beginnings are clear."""
        return super().parse_known_args([_dashed(word) for word in args], namespace)

    def error(self, message: str) -> NoReturn:
        name, _, flags = message.partition("unrecognized arguments: ")
        near = ""
        if not name and flags.startswith("--"):
            near = did_you_mean(flags.split()[0], self._option_string_actions)
        raise InputError(f"{self.prog}: {message}.{near}")


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


Flags = Mapping[str, tuple[Callable[[str], Any], Any]]
"""Name -> how its value is read, and the script's default."""


def flag_parser(program: str, *tables: Flags) -> Parser:
    """Read flags as the old scripts did, beginnings of names included; only those that were typed."""
    parser = Parser(prog=program, add_help=False, argument_default=argparse.SUPPRESS)
    for name, (kind, _) in (item for table in tables for item in table.items()):
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind)
    return parser


def read_shape(text: str) -> tuple[int, int]:
    """Return channels and side of ``3,224,224``."""
    try:
        channels, height, width = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--image-shape is {text!r}; it must be three numbers, such as 3,224,224") from None
    if height != width:
        raise InputError(f"--image-shape is {text}: images are trained on as squares, such as 3,{height},{height}")
    return channels, height


def read_gpus(draft: Draft) -> tuple[int, ...]:
    """Return the numbers of ``--gpus 0,2``; none where it is empty."""
    text = draft.values["gpus"] or ""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and len(part) <= 4 for part in parts) or len({*map(int, parts)}) < len(parts):
        raise InputError(f"--gpus is {text!r}; it must be numbers of GPUs, each once, such as 0,2")
    return tuple(map(int, parts))


def read_precision(draft: Draft) -> str:
    dtype = draft.values["dtype"]
    if dtype not in ("float32", "float16"):
        raise InputError(f"--dtype is {dtype!r}; it must be float32 or float16")
    return "fp32" if dtype == "float32" else "fp16" if draft.values["gpus"] else "bf16"


def add_threads(draft: Draft, ranks: int = 1) -> None:
    """Add the threads that load images, of which a worker's ``ranks`` get an equal share each."""
    if "data_nthreads" in draft.typed:
        threads = draft.values["data_nthreads"]
        why = f"of each of the {ranks} ranks that a worker of MXNet's becomes" if ranks > 1 else ""
        draft.add(["data_nthreads"], "--threads", str(max(1, threads // ranks)), why=why)
