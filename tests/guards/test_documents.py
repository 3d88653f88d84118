"""The pages about commands and events say what the code says."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from steadytrain.events import KINDS, Event

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_of_the_commands_are_up_to_date() -> None:
    told: dict[str, str] = runpy.run_path(str(DOCS / "generate_cli.py"))["pages"]()
    written = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "cli").glob("*.md")}
    stale = [name for name in told.keys() | written.keys() if told.get(name) != written.get(name)]
    assert not stale, "run: python docs/generate_cli.py"


@pytest.mark.parametrize("kind", [Event, *KINDS.values()])
def test_every_field_of_every_event_is_on_the_page(kind: type[Event]) -> None:
    section = re.search(rf"^## {kind.__name__}\n(.*?)(?=^## |\Z)", (DOCS / "events.md").read_text(), re.M | re.S)
    assert section, f"docs/events.md has no section {kind.__name__}"
    rows = re.findall(r"^\| `(\w+)` \| ((?:[^|\\]|\\\|)+) \|", section[1], re.M)
    common = set() if kind is Event else {field.name for field in fields(Event)}
    told = [(field.name, str(field.type).replace('"', "'")) for field in fields(kind) if field.name not in common]
    assert [(name, hint.replace("\\|", "|").strip()) for name, hint in rows] == told


def test_the_tree_on_the_page_is_the_tree() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^    (\S+?)/?  ", text[text.index("src/steadytrain/") :], re.M))
    package = DOCS.parent / "src" / "steadytrain"
    there = {path.name for path in package.glob("*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert drawn == there - {"__init__.py"}


def test_every_benchmark_is_on_its_page() -> None:
    folder = DOCS.parent / "benchmarks"
    told = set(re.findall(r"^\| `(\w+\.py)` \|", (folder / "README.md").read_text(encoding="utf-8"), re.M))
    assert told == {path.name for path in folder.glob("*.py")} - {"machine.py"}


def test_every_page_is_in_the_index() -> None:
    told = (DOCS / "index.md").read_text(encoding="utf-8").partition("```{toctree}")[2]
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} == set(re.findall(r"^([\w-]+)$", told, re.M))
