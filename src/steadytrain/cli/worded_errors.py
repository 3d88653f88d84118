"""Errors of the command-line parser in a user's words, each with what to type instead."""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from steadytrain.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

    from cyclopts import App


@contextmanager
def worded_errors(
    words: Sequence[str], command: App, hint_of: Callable[[Sequence[str]], str], *, trains: bool
) -> Iterator[None]:
    """Turn the parser's errors about words, the verb first, into InputError, with what to type instead.

    ``hint_of``: returns that for words that are too many. ``trains``: the verb takes the flags of a recipe.
    """
    from cyclopts import CycloptsError
    from cyclopts.exceptions import (
        CoercionError,
        MissingArgumentError,
        UnknownCommandError,
        UnknownOptionError,
        UnusedCliTokensError,
        ValidationError,
    )

    verb = words[0]
    try:
        yield
    except UnknownOptionError as error:
        word = error.token.keyword or error.token.value
        hint = _flag_hint(verb, word, error, trains=trains)
        raise InputError(f"Unknown option: {word}.{hint}") from None
    except UnknownCommandError:
        from steadytrain.config.foreign import foreign_table, words_of

        instead = words_of(foreign_table()["verbs-instead"])
        about = f" Instead: {instead[verb]}." if verb in instead else ""
        verbs = [name for name in command if not name.startswith("-")]
        near = about or did_you_mean(verb, verbs) or f" There are: {', '.join(verbs)}."
        raise InputError(f'Unknown command "{verb}".{near}') from None
    except UnusedCliTokensError as error:
        tokens = [str(token) for token in error.unused_tokens or ()]
        hint = hint_of(tokens) or " (quote a path that has spaces)"
        raise InputError(f"one argument too many: {' '.join(tokens)}{hint}") from None
    except CoercionError as error:
        raise InputError(_wrong_value(error) or str(error)) from None
    except ValidationError as error:
        raise InputError(_beyond_limit(error)) from None
    except MissingArgumentError as error:
        raise InputError(_missing(words, error, inspect.getdoc(command[verb].default_command) or "")) from None
    except CycloptsError as error:
        raise InputError(str(error)) from None


def _flag_hint(verb: str, word: str, error: Any, *, trains: bool) -> str:
    """Return what an unknown flag is called here, what there is instead, or which known one is near."""
    from steadytrain.cli.options import flag_of
    from steadytrain.config.foreign import advice, foreign_table, plain_word, words_of
    from steadytrain.config.recipe import synonym

    each = ((name, argument.names) for argument in error.argument_collection for name in argument.names)
    names = [name for name, others in each if name in others[:1] or "--no-" in name]
    plain = plain_word(word)
    if word in names:  # an option's name is none behind two dashes
        module = f"torchrun's belong before the module: torchrun --nproc-per-node=2 -m -- steadytrain {verb} ..."
        return f" Behind two dashes nothing is an option: leave them out; {module}"
    if (known := f"--{plain}") in names:  # with one dash, or in capitals
        return f" Did you mean {known}?"
    if (key := synonym(word)) and (flag := flag_of(key)) in names:
        return f" Did you mean {flag}?"
    if key and "--set" in names:
        return f" Instead: --set {key}=VALUE."
    if not trains and (text := words_of(foreign_table()["elsewhere"]).get(plain)):
        return f" Instead: {text}."
    long = [name.lstrip("-") for name in names if name.startswith("--")]
    near = did_you_mean(plain, long, cutoff=0.65).replace(" mean ", " mean --").replace(" or ", " or --")
    return (advice(word, verb) if trains else "") or near or f" steady {verb} --help shows all."


def is_assignment(word: str) -> bool:
    """Return whether a word is ``lr=0.1``, the manner of other tools, and no file's name.

    >>> is_assignment("lr=0.1"), is_assignment("photos/a=b"), is_assignment("--lr=0.1")
    (True, False, False)
    """
    return bool(re.fullmatch(r"[A-Za-z][\w.-]*=.*", word)) and not os.path.exists(word)  # noqa: PTH110 - a long word is no path, and no error


def _kinds(kind: Any) -> list[str]:
    """Say what may be given for a type: its words, or a number."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return [text for inner in get_args(kind) for text in _kinds(inner)]
    if get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    return [words[kind]] if kind in words else []


def _wrong_value(error: Any) -> str:
    """Say what a value has to be, without the names of types; empty where nothing better is known."""
    token, argument = error.token, error.argument
    hint = argument.hint if argument is not None else error.target_type
    kinds = list(dict.fromkeys(_kinds(hint) or _kinds(error.target_type)))
    if token is None or error.msg is not None:
        return ""
    name = token.keyword or (argument.name.lstrip("-").upper() if argument is not None else "the value")
    value = token.value
    if not value:
        return f"{'one of ' * (' ' in name)}{name} is empty (an unset variable?)"
    if not {"a number", "a whole number", "true or false"} & set(kinds):
        return ""
    several = f", or several: {name} {' '.join(value.replace(',', ' ').split())}"
    meant = several if "," in value and get_origin(hint) in (list, tuple) else ""
    near = did_you_mean(value, [kind for kind in kinds if " " not in kind])
    return f"{name} is {value!r}; it must be {' or '.join(kinds)}{meant}{'.' * bool(near)}{near}"


def _beyond_limit(error: Any) -> str:
    """Say what a number has to be, by the limits of its flag (``cyclopts.validators.Number``)."""
    [limit], tokens = error.argument.parameter.validator, error.argument.tokens

    def is_beyond(value: str) -> bool:
        with suppress(ValueError):
            limit(float, float(value))
            return False
        return True

    token = next((token for token in tokens if is_beyond(token.value)), tokens[-1])
    ends = (("from ", limit.gte), ("above ", limit.gt), (" to " if limit.gt is None else ", up to ", limit.lte))
    words = "".join(f"{word}{value}" for word, value in (*ends, (" to below ", limit.lt)) if value is not None)
    if limit.lte is None and limit.lt is None and limit.gte is not None:
        words = f"{limit.gte} or more"
    return f"{token.keyword} is {token.value}; it must be {words}"


def _missing(words: Sequence[str], error: Any, docstring: str) -> str:
    """Say which argument is missing, with the words typed where its value is among them, else an example."""
    verb = words[0]
    if error.keyword:
        return f"{error.keyword} needs a value: {error.keyword} VALUE"
    if error.tokens_so_far:
        return str(error)
    lines = examples(docstring)[1]
    names = [name for name in error.argument.names if name.startswith("-")]
    fitting = [line for line in lines if not names or set(names) & set(line.split())]
    what = f"steady {verb} needs {error.argument.name}"
    if names and len(words) > 2 and not any(word.startswith("-") for word in words[-2:]):  # a place too many
        fitting = [shlex.join(["steady", *words[:-1], min(names, key=len), words[-1]])]
    return f"{what}, such as: {fitting[0]}" if fitting else what


def examples(docstring: str) -> tuple[str, list[str]]:
    """Return the text of a verb's docstring, and the commands under its heading Examples."""
    text, *sections = re.split(r"^(\w+):\n", docstring, flags=re.MULTILINE)
    lines = dict(zip(sections[::2], sections[1::2], strict=True)).get("Examples", "").splitlines()
    return text.strip(), [line.strip() for line in lines if line.strip()]
