"""``steady help``: what a cause, an error or a command is, from the page of troubleshooting that is installed too."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from steadytrain.cli.console import print_text
from steadytrain.errors import InputError, did_you_mean

_SECTION = re.compile(r"^\((\S+)\)=\n### (.+?)\n\n(.*?)(?=^\(\S+\)=$|^## |\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^]]+)\]\((?:\.\./)*([^)]+?)(?:\.md)?(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Topic:
    """A section of the page. ``shown``: the code in its title: a cause, a kind of error, a piece of a message."""

    name: str
    title: str
    text: str

    @property
    def shown(self) -> list[str]:
        """Return what stands between backticks in the title.

        >>> Topic("disk-full", "`the disk is full`, `StorageError`", "").shown
        ['the disk is full', 'StorageError']
        """
        return re.findall(r"`([^`]+)`", self.title)


@cache
def topics() -> dict[str, Topic]:
    """Read the page; return its sections by name. docs/help/troubleshooting.md is the same file."""
    page = files("steadytrain.cli").joinpath("troubleshooting.md").read_text(encoding="utf-8")
    return {name: Topic(name, title, text.strip()) for name, title, text in _SECTION.findall(page)}


def topic_of(message: str, kind: str = "") -> str:
    """Return the name of the topic about an error, by a piece of its message, else by its kind; empty if there is none.

    >>> topic_of("runs is not a run: it has no recipe.json"), topic_of("x", "DivergedError"), topic_of("x")
    ('not-a-run', 'diverged', '')
    """
    pieces = [(topic.name, piece) for topic in topics().values() for piece in topic.shown]
    by_message = (name for name, piece in pieces if " " in piece and piece in message)
    return next(by_message, "") or next((name for name, piece in pieces if piece == kind), "")


def help(*name: str) -> None:
    """Explain a command, a cause in a verdict, or an error, without a network.

    Args:
        name: A command, a cause, an error's name, or a message; topics lists all names.

    Examples:
        steady help train
        steady help noisy_neighbour
        steady help topics
    """
    words = " ".join(name)
    width = max(40, min(100, shutil.get_terminal_size().columns))
    if words == "topics":
        print_text("\n".join(f"{topic.name:20} {topic.title.replace('`', '')}" for topic in topics().values()))
        return
    asked = _plain(words)
    known = {_plain(key): topic for topic in topics().values() for key in (*topic.shown, topic.name)}
    topic = known.get(asked) or topics().get(topic_of(words))
    if topic is None:
        word = re.compile(rf"\b{re.escape(asked)}\b")
        about = [topic for topic in topics().values() if word.search(_plain(topic.title))]
        about = about or [topic for topic in topics().values() if word.search(_plain(topic.text))]
        hint = did_you_mean(asked.replace(" ", "_"), topics())
        if len(about) != 1:
            names = ", ".join(f"steady help {topic.name}" for topic in about[:5])
            hint = hint or (f" See {names}." if names else "")
            raise InputError(f"no help on {words!r}.{hint} steady help topics lists all names")
        [topic] = about
    print_text("\n".join(_lines(topic, width)))


def _plain(words: str) -> str:
    """Return words as names are compared: ``noisy_neighbour``, ``noisy-neighbour`` and ``Noisy neighbour`` are one."""
    return re.sub(r"[\s_-]+", " ", words).strip().lower()


def _lines(topic: Topic, width: int) -> Iterator[str]:
    """Yield a section as lines of text: links as the names of their pages, code as it is."""
    yield from textwrap.wrap(topic.title, width)
    for paragraph in topic.text.split("\n\n"):
        yield ""
        words = _LINK.sub(r"\1 (docs/\2)", paragraph).replace("**", "")
        yield from textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)
