"""Messages in words of Python: each command that becomes a call is a whole one, in every message that there is."""

from __future__ import annotations

import ast
import io
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steadytrain
from steadytrain.config.calls import in_python, public
from steadytrain.errors import InputError

SOURCES = Path(steadytrain.__file__).parent


def messages() -> Iterator[tuple[str, str]]:
    """Yield each text of the sources that may be a message with a command or a flag, its places filled in."""
    for path in sorted(SOURCES.rglob("*.py")):
        if "cli" in path.relative_to(SOURCES).parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "runs/a" for part in node.values)
            else:
                continue
            if re.search(r"steady [a-z]+ |(?<![\w-])--[a-z]", text):
                yield f"{path.name}:{node.lineno}", text


def call_at(text: str, begin: int) -> str:
    depth = 0
    for end in range(text.index("(", begin), len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            return text[begin : end + 1]
    return text[begin:]


def test_every_call_in_a_message_is_python_and_has_all_that_the_command_had() -> None:
    seen = 0
    for place, text in messages():
        said = in_python(text)
        for match in re.finditer(r"\bst\.(train|finetune|evaluate|predict|report)\(", said):
            call = call_at(said, match.start())
            ast.parse(call, mode="eval")  # raises where it is none
            rest = said[match.start() + len(call) :]
            assert not re.match(r" (-|\w+=|[A-Z]{3,}|\{)", rest), (place, said)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize(
    ("message", "said"),
    {
        "use steady train a --lr 0.1 --set data.flip=false": "use st.train('a', {'data.flip': False}, lr=0.1)",
        "steady evaluate runs/a photos/test measures": "st.evaluate('runs/a', 'photos/test') measures",
        "(steady evaluate RUN --limits makes it)": "(steady evaluate RUN --limits makes it)",
        "steady report runs/a --to mlflow sends it": "steady report runs/a --to mlflow sends it",
        "steady pack a b --root c writes it": "steady pack a b --root c writes it",
        "steady train photos --group-by folder; then": "st.train('photos', group_by='folder'); then",
    }.items(),
)
def test_a_command_is_a_whole_call_or_stays(message: str, said: str) -> None:
    assert in_python(message) == said


FETCH = """
def fetch() -> None:
    try:
        raise {cause}
    except Exception as error:
        raise InputError(f"cannot fetch it ({{error}}): give --weights FILE") from error
"""


@pytest.mark.parametrize(
    ("place", "cause", "is_alone"),
    [
        (SOURCES, "OSError('no such host')", True),
        (SOURCES, "TypeError('a fault of ours')", False),
        (Path(__file__), "OSError('of the loss that a user wrote')", False),
    ],
)
def test_an_error_comes_alone_unless_code_is_at_fault(place: Path, cause: str, is_alone: bool) -> None:
    """What the system refused is in the message; who has to mend code needs the line that failed."""
    names: dict[str, Any] = {"InputError": InputError, "__name__": __name__}
    exec(compile(FETCH.format(cause=cause), place / "x.py", "exec"), names)
    with pytest.raises(InputError, match="weights=") as caught:
        public(names["fetch"], "steadytrain")()
    assert (len(re.findall("Traceback", "".join(traceback.format_exception(caught.value)))) == 1) == is_alone


def test_only_at_a_prompt_a_call_says_that_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have a line open on the terminal, or a bar, that such a word would write over."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    call = public(nothing, "steadytrain")
    call()
    assert not terminal.getvalue()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    call()
    assert terminal.getvalue() == "working\r       \r"


def nothing() -> None:
    """Do nothing."""
