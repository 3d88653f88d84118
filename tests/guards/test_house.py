"""The house keeps its shape: who may import what, no cycles, small files and functions.

Imports are read from the syntax tree, so a lazy import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SOURCE = PROJECT / "src"
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.TryStar, ast.Match, ast.AsyncFor, ast.AsyncWith)

WORDS = {"errors", "typed", "recipe", "events", "run", "quotas", "children", "cache", "nvml", "world"}
# Every unit: the other units it may import (its own files and the words aside), and packages from elsewhere. A row for
# one file stands in place of its unit's.
LAYERS: dict[str, tuple[str, str]] = {
    # words: the standard library only; anyone may import them
    "errors": ("", ""),
    "typed": ("", ""),
    "recipe": ("", ""),
    "events": ("", ""),
    "run": ("", ""),
    "quotas": ("", ""),
    "children": ("", ""),
    "cache": ("", ""),
    "nvml": ("", ""),
    "world": ("", ""),
    # parts: know the words, not each other
    "native": ("", ""),
    "records": ("", "numpy PIL simplejpeg"),
    "records.resize": ("", "numpy cykooz_resizer"),
    "records.restarts": ("native", "numpy PIL simplejpeg"),
    "records.sources.container": ("", "zstandard compression"),
    "models": ("", "torch timm safetensors huggingface_hub"),
    "optim": ("", "torch"),
    "schedules": ("", ""),
    "precision": ("", "torch"),
    "checkpoints": ("", "torch safetensors"),
    "devices": ("", "psutil pynvml"),
    "process": ("", ""),
    "launch": ("", ""),
    "launch.kubernetes": ("", "yaml"),
    "engines": ("", "torch"),
    # compositions
    "feed": ("records devices", "numpy PIL simplejpeg torch"),
    "feed.jpeg": ("native", "numpy simplejpeg"),
    "watch": ("devices", "psutil pynvml"),
    "training": (
        "records devices process feed models optim schedules precision engines checkpoints watch",
        "numpy torch",
    ),
    "reports": ("watch", "jinja2 markupsafe plotly psutil starlette uvicorn"),
    "supervise": ("process training watch", ""),
    # tools
    "doctor": ("devices", "psutil pynvml"),
    "cli": ("doctor records models devices process launch feed training watch reports supervise", "cyclopts rich yaml"),
    "cli.bandwidth": ("devices process engines launch models", "cyclopts"),
    "cli.demo": ("process records reports", "cyclopts numpy PIL sklearn"),
    "cli.models": ("models", "cyclopts rich"),
    "__main__": ("cli", ""),
}
TORCH = {"models", "optim", "precision", "checkpoints", "engines", "feed", "training", "supervise"}
# Where a name is imported that is known only as it runs: public names here, a user's own model factory under models.
DYNAMIC = {"steadytrain", "steadytrain.children"}


@dataclass(frozen=True)
class Module:
    """One source file and what it imports."""

    path: Path

    @cached_property
    def name(self) -> str:
        return ".".join(self.path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")

    @cached_property
    def unit(self) -> str:
        return self.name.partition(".")[2].partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def imports(self) -> set[str]:
        """Dotted names: ``a`` for ``import a``, ``a.b`` for ``from a import b`` and ``import_module("a.b")``."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}:{node.lineno}: imports are absolute here"
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif name := _imported_by_call(node):
                found.add(name)
        return found

    @property
    def units(self) -> set[str]:
        """The other units of this package that are imported."""
        ours = {name.split(".")[1] for name in self.imports if name.startswith("steadytrain.")}
        return ours - {self.unit, "__version__"}

    @property
    def packages(self) -> set[str]:
        """The packages imported that are neither ours nor the standard library's."""
        return {name.split(".")[0] for name in self.imports} - sys.stdlib_module_names - {"steadytrain"}


MODULES = [Module(path) for path in sorted(SOURCE.rglob("*.py"))]
INSIDE = [module for module in MODULES if module.unit]


def test_every_unit_has_its_place_in_the_table() -> None:
    assert {module.unit for module in INSIDE} == {name.partition(".")[0] for name in LAYERS}


@pytest.mark.parametrize("module", INSIDE, ids=lambda module: module.name)
def test_a_unit_imports_only_what_the_table_allows(module: Module) -> None:
    units, packages = LAYERS.get(module.name.removeprefix("steadytrain."), LAYERS[module.unit])
    assert module.units - WORDS <= set(units.split()), "never upwards, never sideways, never lazily"
    assert module.packages <= set(packages.split())


def test_words_know_only_words() -> None:
    assert {other for module in INSIDE if module.unit in WORDS for other in module.units} <= WORDS


def test_torch_appears_only_where_it_may() -> None:
    kin = {"torch", "torchvision", "timm", "safetensors"}
    assert {module.unit for module in MODULES if module.packages & kin} <= TORCH
    assert all(module.unit not in TORCH for module in INSIDE if module.unit in WORDS)


def test_imports_by_a_computed_name_stand_only_where_they_must() -> None:
    computed = {module.name for module in MODULES for node in ast.walk(module.tree) if _imported_by_call(node) == ""}
    assert {name for name in computed if not name.startswith("steadytrain.models.")} <= DYNAMIC
    assert not [module.name for module in MODULES if "importlib.__import__" in module.imports]


def _imported_by_call(node: ast.AST) -> str | None:
    """The name in ``import_module("name")``; empty where it is computed, None where it is no such call."""
    called = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or called not in ("import_module", "__import__"):
        return None
    first = node.args[0]
    return str(first.value) if isinstance(first, ast.Constant) else ""


def test_no_import_cycles() -> None:
    names = {module.name for module in MODULES}

    def place(name: str) -> str:
        """The module that is meant: the longest beginning of a dotted name that is one."""
        return name if name in names or "." not in name else place(name.rpartition(".")[0])

    # The package's own file is left out: it names what others hold and loads nothing until it is asked.
    graph = {module.name: ({place(name) for name in module.imports} & names) - {module.name} for module in INSIDE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_no_drawer_for_odds_and_ends() -> None:
    drawers = {"util", "utils", "helper", "helpers", "common", "core", "misc", "base"}
    assert not [module.name for module in MODULES if set(module.name.split(".")) & drawers]


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "docs", "recipes"])
def test_files_are_at_most_400_lines(folder: str) -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (PROJECT / folder).rglob("*.py")}
    assert not {str(path.relative_to(PROJECT)): n for path, n in lines.items() if n > 400}


FUNCTIONS = [
    (module, node)
    for module in MODULES
    for node in ast.walk(module.tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]


def test_functions_are_short() -> None:
    sizes = {f"{module.name}.{node.name}": _num_lines(node) for module, node in FUNCTIONS}
    longest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
    assert _percentile_95([_num_lines(node) for _, node in FUNCTIONS]) <= 40, longest


def test_functions_are_shallow() -> None:
    assert _percentile_95([_depth(node) for _, node in FUNCTIONS]) <= 2, [
        f"{module.name}.{node.name}" for module, node in FUNCTIONS if _depth(node) > 2
    ]


def _num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, the docstring aside."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1


def _depth(node: ast.AST, level: int = 0) -> int:
    """How deep blocks stand within blocks; an ``elif`` is no deeper than its ``if``, an inner function starts anew."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, _depth(child, level + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def _percentile_95(values: list[int]) -> int:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
