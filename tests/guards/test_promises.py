"""What strangers look for before they rely on something: licence, telemetry, security, promises, forms, names."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import steadytrain
from steadytrain.machine.children import run_program

PROJECT = Path(__file__).parents[2]
METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((PROJECT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SCREEN = 30


def _text(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def test_the_first_screen_says_the_licence_and_that_nothing_is_sent() -> None:
    screen = "\n".join(_text("README.md").splitlines()[:SCREEN])
    assert METADATA["license"] in screen and "No telemetry" in screen and "docs/promises.md" in screen


def test_every_test_that_a_promise_names_is_there() -> None:
    text = _text("docs/promises.md")
    named = re.findall(r"`((?:tests/[\w/]*)?test_\w+\.py)`", text)
    folders = [PROJECT / "tests" / "seams", PROJECT]
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert len(named) > 8 and not missing


def test_the_citation_is_of_this_version() -> None:
    """The whole schema is checked by hand: ``cffconvert --validate``."""
    citation = yaml.safe_load(_text("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert citation["version"] == steadytrain.__version__ and citation["license"] == METADATA["license"]
    assert citation["authors"] == METADATA["authors"] and citation["abstract"] == METADATA["description"]


def test_what_is_shipped_holds_licence_and_notice() -> None:
    assert METADATA["license-files"] == ["LICENSE", "NOTICE"]
    assert _text("LICENSE").split()[:2] == ["Apache", "License"]


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem)
def test_a_form_for_issues_is_one_that_github_takes(form: Path) -> None:
    """As its documents have it: name, description and body; parts of known types with unique ids and labels."""
    document = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= document.keys() <= {"name", "description", "labels", "body", "title"}
    parts = document["body"]
    assert all(part["type"] in ("textarea", "input", "dropdown", "checkboxes") for part in parts)
    for values in ([part["id"] for part in parts], [part["attributes"]["label"] for part in parts]):
        assert len({*values}) == len(values)
    assert all({*part} <= {"type", "id", "attributes", "validations"} for part in parts)
    assert "steady doctor" in form.read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["steady", "steadytrain"])
def test_both_names_of_the_script_are_one_program_that_calls_itself_steady(script: str, tmp_path: Path) -> None:
    """``uvx steadytrain`` finds the command by the package's name; what to type next is spelt one way everywhere."""
    assert METADATA["scripts"][script] == "steadytrain.__main__:run"
    program = tmp_path / script
    program.write_text("import sys\nfrom steadytrain.__main__ import run\nsys.exit(run())\n")
    for words, line in ([], "Usage: steady COMMAND"), (["runs", "--help"], "Usage: steady runs"):
        ended = run_program([sys.executable, str(program), *words])
        assert ended.code == 0 and ended.output.startswith(line)
    ended = run_program([sys.executable, str(program), "evaluate"])
    assert ended.code == 2 and ended.errors.startswith("steady: ")
