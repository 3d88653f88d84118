"""Messages in words of Python: each command that becomes a call is a whole one, in every message that there is."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

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


def test_an_error_comes_without_those_that_it_came_from() -> None:
    """Their tracebacks would stand before the one line that a user needs, which has their words."""

    def fetch() -> None:
        try:
            raise OSError("no such host")
        except OSError as error:
            raise InputError(f"cannot fetch it ({error}): give --weights FILE") from error

    with pytest.raises(InputError, match="weights=") as caught:
        public(fetch, "steadytrain")()
    assert "no such host" not in "".join(traceback.format_exception(caught.value)).replace(str(caught.value), "")
