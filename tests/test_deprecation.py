"""Deprecations: one wording, a standard warning, and none that outlives the version it names."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from typing_extensions import deprecated

import steadytrain
from steadytrain import cli
from steadytrain.deprecation import Deprecation, renamed_parameter

SOURCE = Path(steadytrain.__file__).parent
WORDING = r".+ is deprecated since (\S+) and goes with (\S+): use .+"


def _named_in_source() -> list[tuple[str, str, str]]:
    """Place, since and until of every Deprecation and renamed parameter in the source."""
    rows = []
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Deprecation", "renamed_parameter"):
                words = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
                if {"since", "until"} <= words.keys():
                    place = f"{path.relative_to(SOURCE)}:{call.lineno}"
                    rows.append((place, str(words["since"]), str(words["until"])))
    return rows


def test_nothing_deprecated_outlives_the_version_it_names() -> None:
    """And it works for two minor versions, as the page promises."""
    rows = [*_named_in_source(), *((flag, row.since, row.until) for flag, row in cli.DEPRECATED_FLAGS.items())]
    assert rows
    for place, since, until in rows:
        assert Version(steadytrain.__version__) < Version(until), f"{place}: remove it, and say so in what-went.md"
        assert Version(until).minor >= Version(since).minor + 2, place


def test_every_decorator_takes_the_one_wording() -> None:
    for path in SOURCE.rglob("*.py"):
        text = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert all(words.startswith("str(Deprecation(") for words in re.findall(r"@deprecated\((.*)", text)), path


def test_a_deprecated_function_works_and_warns_where_it_is_called() -> None:
    @deprecated(str(Deprecation("old", since="0.3", until="0.5", instead="new")))
    def old() -> int:
        return 3

    with pytest.warns(DeprecationWarning, match=WORDING) as caught:
        assert old() == 3
    assert caught[0].filename == __file__


def test_a_renamed_parameter_works_by_both_names_and_not_by_both_at_once() -> None:
    @renamed_parameter("colour", "color", since="0.3", until="0.5")
    def paint(*, color: str) -> str:
        return color

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paint(color="red") == "red"
    old: dict[str, str] = {"colour": "red"}
    with pytest.warns(DeprecationWarning, match=r"^paint\(colour=...\) is deprecated .* use color=...$") as caught:
        assert paint(**old) == "red"
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="not both"):
        paint(color="red", **old)


def test_restore_takes_the_earlier_name_of_precision() -> None:
    """It gets as far as the file, which is not there."""
    old: dict[str, Any] = {"numbers": "fp32"}
    with pytest.warns(DeprecationWarning, match="use precision=") as caught, pytest.raises(steadytrain.SteadyError):
        steadytrain.restore("no-such-file.safetensors", **old)
    assert caught[0].filename == __file__


def test_a_deprecated_flag_works_and_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Deprecation("--order", since="0.3", until="0.5", instead="--sort")
    monkeypatch.setitem(cli.DEPRECATED_FLAGS, ("runs", "--order"), row)
    for words in (["--order", "top1"], ["--order=top1"]):
        assert cli.parse(["runs", *words]) == cli.parse(["runs", "--sort", "top1"])
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and re.match(WORDING, said.err) and not said.out
    assert cli.main(["evaluate", "--order", "x"]) == 2  # another verb's flag is not this one
