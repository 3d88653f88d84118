"""A call from Python beside a command: the keywords in its signature, and messages that name these."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar

from steadytrain.config.defaults import apply_changes, usual_recipe
from steadytrain.config.keywords import FLAGS, RecipeKeywords
from steadytrain.config.plain import fitted, is_plain
from steadytrain.errors import InputError, RecipeError, SteadyError

F = TypeVar("F", bound=Callable[..., Any])

_VALUE = r"'[^']*'|\"[^\"]*\"|(?:[^\s,;:()'\"]|[:,](?=[^\s,;:()'\"]))*[^\s.,;:()'\"]"
_FLAG = re.compile(rf"(?<![\w/.-])--([a-z][a-z-]*)(?:[ =]({_VALUE}))?")
_COMMAND = re.compile(rf"\bsteady ([a-z]+)((?: (?:--?[a-z][a-z-]*|{_VALUE}))*)")
_WORD = re.compile(rf" (--?[a-z][a-z-]*|{_VALUE})")
_CALLS = {name: name for name in ("train", "finetune", "evaluate", "predict", "report")} | {"resume": "train"}
_MOST_PLACES = {"evaluate": 2, "predict": 2}
_LIBRARIES = ("<frozen ", str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
"""Beginnings of files of code that is no user's own."""
_LOOKS_LIKE_VALUE = re.compile(r"[\d.]+(e-?\d+)?|.*[/'\"].*|.+\.\w+|[A-Z_.]+|\w+[:+,]\S+")


def checked(function: F, module: str = "") -> F:
    """Have a function refuse arguments, all but the first, that do not fit annotations of plain types (InputError).

    Lists and other iterables become tuples, and numbers of NumPy or torch plain ones. ``module``: its home for users.
    """

    @cache
    def hint_of(name: str) -> Any:
        with suppress(NameError):  # known to type checkers alone
            hint = eval(function.__annotations__.get(name, "Any"), vars(sys.modules[function.__module__]))
            return hint if is_plain(hint) else Any
        return Any

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        for name, value in list(bound.arguments.items())[1:]:
            is_labels = name == "changes" and not isinstance(value, Mapping)
            remedy = ": labels belong beside their images, (images, labels)" if is_labels else ""
            bound.arguments[name] = fitted(name, value, hint_of(name), InputError, remedy)
        return function(*bound.args, **bound.kwargs)

    call.__module__ = module or function.__module__
    return call  # type: ignore[return-value]


def public(function: F, module: str) -> F:
    """Return a function as users call it: it checks arguments, lists each keyword, and its errors speak Python."""
    call, signature = checked(function, module), inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    names = {each.name for each in parameters} | FLAGS.keys()

    @contextmanager
    def in_words_of_python() -> Iterator[None]:
        try:
            yield
        except SteadyError as error:
            error.args = (in_python(str(error), names), *error.args[1:])
            if _says_its_causes(error):
                error.__cause__, error.__suppress_context__ = None, True
            raise

    def in_turn(stream: Iterator[Any]) -> Iterator[Any]:
        with in_words_of_python():
            yield from stream

    @wraps(call)
    def translating(*args: Any, **kwargs: Any) -> Any:
        # Only at a prompt: a program may have a line of its own open on the terminal, or a bar.
        is_wanted = hasattr(sys, "ps1") and kwargs.get("progress") is not False
        with in_words_of_python(), shown_meanwhile("working", is_wanted):
            result = call(*args, **kwargs)
        if inspect.isgenerator(stream := getattr(result, "stream", None)):
            result.stream = in_turn(stream)
        return in_turn(result) if inspect.isgenerator(result) else result

    if len(parameters) < len(signature.parameters):
        only = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(name, only, default=None) for name in RecipeKeywords.__annotations__]
    translating.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return translating  # type: ignore[return-value]


def _says_its_causes(error: BaseException) -> bool:
    """Return whether all that an error came from was a refusal of ours or the system's, which its message has."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        files = [frame.f_code.co_filename for frame, _ in walk_tb(cause.__traceback__)]
        if not isinstance(cause, SteadyError | OSError) or not all(file.startswith(_LIBRARIES) for file in files):
            return False  # a fault of code, a user's own maybe
        error = cause
    return True


@contextmanager
def shown_meanwhile(text: str, is_wanted: bool = True) -> Iterator[None]:
    """Show on a terminal, and nowhere else, what is waited for; any other line takes its place."""
    stream = sys.stderr if is_wanted and getattr(sys.stderr, "isatty", bool)() else None
    if stream is not None:
        print(text, end="\r", file=stream, flush=True)
    try:
        yield
    finally:
        if stream is not None:
            print(" " * len(text), end="\r", file=stream, flush=True)


def in_python(message: str, names: frozenset[str] | set[str] = frozenset(FLAGS)) -> str:
    """Return a message with keywords of ``names`` in place of flags, and calls in place of commands that have one.

    >>> in_python("give --val DATA, or --train probe --lr 0.1; set --set optim.clip_norm=1 (steady pack a --max-bad 3)")
    "give val=, or train='probe' lr=0.1; set {'optim.clip_norm': 1} (steady pack a --max-bad 3)"
    >>> in_python("steady resume runs/a finishes it; steady finetune photos --train head (--model NAME)")
    "st.train('runs/a') finishes it; st.finetune('photos', train='head') (model=)"
    >>> in_python("steady train a --lr 0.1 --set data.flip=false begins; steady evaluate RUN DATA --per-image FILE.csv")
    "st.train('a', {'data.flip': False}, lr=0.1) begins; steady evaluate RUN DATA --per-image FILE.csv"
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match[1].replace("-", "_"), match[2] or ""
        if name == "set" and (pair := re.fullmatch(r"([\w.]+)=(.+)", value)):
            return f"{{{pair[1]!r}: {_literal(pair[2])}}}"
        if name not in names:
            return match[0]
        if re.fullmatch(r"[A-Z_.]+", value):  # a name for any value
            return f"{name}="
        if not _is_value(name, value):
            return f"{name}{match[0][2 + len(name) :] or '='}"
        return f"{name}={_literal(value)}"

    def command(match: re.Match[str]) -> str:
        if (verb := match[1]) not in _CALLS:
            return match[0].replace("--", "\0")
        words, end, number, is_call = list(_WORD.finditer(match[2])), 0, 0, True
        places, keywords, pairs = list[str](), list[str](), list[str]()
        while number < len(words):
            word, follows = (words[at][1] if at < len(words) else "" for at in (number, number + 1))
            if word.startswith("-"):
                text, num_words = _keyword(word, follows)
                (pairs if word == "--set" else keywords).append(text)
                is_call, number = is_call and bool(text), number + num_words
            elif _LOOKS_LIKE_VALUE.fullmatch(word) or follows.startswith("-") or (not end and _ends(match, words)):
                places.append(_literal(word))
            else:
                break
            end, number = words[number].end(), number + 1
        rest = match[2][end:]
        if not is_call or not 0 < len(places) <= _MOST_PLACES.get(verb, 1):
            return f"steady {verb}{match[2][:end]}".replace("--", "\0") + rest
        mapping = [f"{{{', '.join(pairs)}}}"] if pairs else []
        return f"st.{_CALLS[verb]}({', '.join([*places, *mapping, *keywords])}){rest}"

    return _FLAG.sub(flag, _COMMAND.sub(command, message)).replace("\0", "--")


def _keyword(word: str, follows: str) -> tuple[str, int]:
    """Return a flag of a command as a keyword, empty where there is none, and how many of the next words it takes."""
    name, has_value = word.lstrip("-").replace("-", "_"), bool(follows) and not follows.startswith("-")
    if name == "set" and (pair := re.fullmatch(r"([\w.]+)=(.+)", follows)):
        return f"{pair[1]!r}: {_literal(pair[2])}", 1
    if name not in FLAGS:
        return "", int(has_value and bool(_LOOKS_LIKE_VALUE.fullmatch(follows)))
    is_switch = _accepts(name, "true") and not _accepts(name, "2")
    return (f"{name}={_literal(follows)}", 1) if has_value and not is_switch else (f"{name}=True", 0)


def _ends(match: re.Match[str], words: list[re.Match[str]]) -> bool:
    """Return whether nothing but one word stands between a command's verb and what ends a sentence."""
    return len(words) == 1 and bool(re.match(r"[,;:)]|\.?$", match.string[match.end() :]))


def _literal(text: str) -> str:
    text = text.strip("'\"")
    if text in ("true", "false"):
        return text.capitalize()
    return text if re.fullmatch(r"-?[\d.]+(e-?\d+)?|[A-Z]+|\[.*\]", text) else repr(text)


@cache
def _is_value(name: str, word: str) -> bool:
    """Return whether a word behind a flag is its value, and not the sentence's next word."""
    if not word or _LOOKS_LIKE_VALUE.fullmatch(word):
        return bool(word)

    return name in FLAGS and _accepts(name, word) and not _accepts(name, "zzz")


def _accepts(name: str, text: str) -> bool:
    try:
        apply_changes(usual_recipe("data", finetune=True, small=False), {}, {FLAGS[name][0]: text})
    except RecipeError:
        return False
    return True
