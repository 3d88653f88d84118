"""The house keeps its shape: which package may import which, no cycles, torch only where it may be.

Imports are read from the syntax tree, so a lazy import inside a function counts like any other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from steadytrain.config import factories

PROJECT = Path(__file__).parents[2]
SOURCE = PROJECT / "src"

# A package imports from the rows above its own; those of the first row know each other as well.
# One module lies below all: what differs between systems. It knows errors alone, and files stand on it.
GROUND = "machine.platform"
LAYERS = (
    {"errors", "deprecation", "config", "events", "files", "format", "intervals", "run"},
    {"machine", "native"},
    {"data", "models", "optim", "distributed"},
    {"monitor"},
    {"cost"},
    {"training"},
    {"reports", "launch"},
    {"doctor", "tuning", "export"},
    {"interop"},
    {"cli"},
    {"__main__"},
)
# The same for the rooms inside a package ("": the package's own modules). Those of one row do not know each other.
FLOORS = {
    "data": (
        {""},
        {"images"},
        {"storage"},
        {"recordio"},
        {"sources", "results"},
        {"packing"},
        {"checking", "loader", "fetching"},
        {"transforms"},
    ),
    "monitor": ({""}, {"rules"}, {"process_watch"}),
    "training": ({""}, {"compute", "inference"}, {"features"}, {"session"}, {"profile", "finetuning"}, {"loop"}),
    "interop": ({""}, {"mxnet"}, {"logs"}),
}
# What has no need of torch must not import what has.
TORCH = (
    "data.loader",
    "data.transforms",
    "interop.mxnet",
    "models",
    "optim",
    "distributed",
    "training",
    "tuning",
    "export",
)
TORCH_FREE = {"monitor", "cost", "reports", "launch", "doctor"}
# Where a name is imported that is known only as it runs: public names here, a user's own model factory under models.
DYNAMIC = {
    "steadytrain",
    "steadytrain.machine.children",
    "steadytrain.config.factories",
}
# What stands above those that call it is loaded by its name: rows of config.factories alone may lead there.
LOADED_BY_NAME = {
    "steadytrain.interop.logs.read",
    "steadytrain.interop.mxnet.optimizers",
    "steadytrain.interop.mxnet.schedules",
    "steadytrain.interop.mxnet.weights",
}


@dataclass(frozen=True)
class Module:
    """One source file and what it imports."""

    path: Path

    @cached_property
    def name(self) -> str:
        return ".".join(self.path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")

    @cached_property
    def short(self) -> str:
        return self.name.partition(".")[2]

    @cached_property
    def package(self) -> str:
        return self.short.partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @cached_property
    def imports(self) -> set[str]:
        """Dotted names: ``a`` for ``import a``, ``a.b`` for ``from a import b`` and ``import_module("a.b")``."""
        names: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}:{node.lineno}: imports are absolute here"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif name := _imported_by_call(node):
                names.add(name)
        return names

    @cached_property
    def room(self) -> str:
        """The folder that it lies in: ``data.loader`` of ``data.loader.crop``, ``data`` of ``data.names``."""
        return self.short if self.path.name == "__init__.py" else self.short.rpartition(".")[0]

    @property
    def packages(self) -> set[str]:
        """The other packages of steadytrain that are imported."""
        known = {name.replace("steadytrain.machine.platform", "steadytrain.machine:platform") for name in self.imports}
        ours = {name.split(".")[1] for name in known if name.startswith("steadytrain.")}
        return ours - {self.package, "machine:platform", "__version__"}


MODULES = [Module(path) for path in sorted(SOURCE.rglob("*.py"))]
INSIDE = [module for module in MODULES if module.package]
NAMED = {module.name: module for module in MODULES}


def test_every_package_has_its_row() -> None:
    assert {module.package for module in INSIDE} == set().union(*LAYERS)


@pytest.mark.parametrize("row", range(len(LAYERS)), ids=lambda row: "-".join(sorted(LAYERS[row])))
def test_packages_import_only_from_the_rows_above(row: int) -> None:
    allowed = set().union(*LAYERS[:row]) | (LAYERS[0] if row == 0 else set())
    wrong = {m.short: sorted(m.packages - allowed) for m in INSIDE if m.package in LAYERS[row] and m.packages - allowed}
    assert not wrong


def test_what_differs_between_systems_stands_on_errors_alone() -> None:
    imports = NAMED[f"steadytrain.{GROUND}"].imports
    assert {name.rpartition(".")[0] for name in imports if name.startswith("steadytrain.")} == {"steadytrain.errors"}


def _arrows() -> dict[tuple[str, str], set[str]]:
    """Rooms of one package, the importing one first, with the modules that import.

    A package's own ``__init__.py`` is left out: it names what others hold.
    """
    facades = {f"steadytrain.{package}" for package in set().union(*LAYERS)}
    arrows: dict[tuple[str, str], set[str]] = {}
    for module in INSIDE:
        for name in module.imports:
            imported = NAMED.get(name) or NAMED.get(name.rpartition(".")[0], module)
            if imported.package == module.package and not {imported.name, module.name} & facades:
                arrows.setdefault((module.room, imported.room), set()).add(module.short)
    return arrows


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_only_from_the_floors_above(package: str) -> None:
    floors = FLOORS[package]
    level = {f"{package}.{room}".rstrip("."): row for row, rooms in enumerate(floors) for room in rooms}
    assert set(level) == {module.room for module in INSIDE if module.package == package}
    assert not {
        (importing, imported): modules
        for (importing, imported), modules in _arrows().items()
        if importing != imported and importing in level and level[imported] >= level[importing]
    }


def test_no_two_rooms_import_each_other() -> None:
    arrows = set(_arrows())
    assert not {(a, b) for a, b in arrows if a < b and (b, a) in arrows}


def _types(tree: ast.Module) -> Iterator[str]:
    """Yield the public classes and type names that a module defines."""
    for node in tree.body:
        targets = (
            [node] if isinstance(node, ast.ClassDef) else getattr(node, "targets", [getattr(node, "target", None)])
        )
        for name in (getattr(target, "name", getattr(target, "id", "_")) for target in targets):
            if name[0].isupper() and not name.isupper():
                yield name


def test_a_public_type_name_has_one_home() -> None:
    homes: dict[str, list[str]] = {}
    for module in MODULES:
        for name in _types(module.tree):
            homes.setdefault(name, []).append(module.package)
    assert not {name: packages for name, packages in homes.items() if len(packages) > 1}


def test_torch_appears_only_where_it_may() -> None:
    kin = {"torch", "torchvision", "timm", "safetensors"}
    users = {module.short for module in MODULES if kin & {name.split(".")[0] for name in module.imports}}
    assert not {short for short in users if not f"{short}.".startswith(tuple(f"{name}." for name in TORCH))}
    reaching = {m.short for m in INSIDE if m.package in TORCH_FREE and "training" in m.packages}
    assert not reaching


def test_imports_by_a_computed_name_stand_only_where_they_must() -> None:
    computed = {module.name for module in MODULES for node in ast.walk(module.tree) if _imported_by_call(node) == ""}
    assert {name for name in computed if not name.startswith("steadytrain.models.")} <= DYNAMIC
    assert not [module.name for module in MODULES if "importlib.__import__" in module.imports]


def test_a_row_of_ours_leads_to_what_it_names_and_nothing_else_below_names_it() -> None:
    rows = {value for group in factories.ROWS.values() for value in group.values()}
    assert {row.partition(":")[0] for row in rows} == LOADED_BY_NAME
    for group, values in factories.ROWS.items():
        assert all(factories.find_row(group, name, object) is not None for name in values), group
    written = {
        module.short
        for module in INSIDE
        if module.package not in ("interop", "cli") and "steadytrain.interop" in module.path.read_text(encoding="utf-8")
    }
    assert written == {"config.factories"}


def test_what_stands_on_top_is_loaded_when_it_is_asked_for() -> None:
    code = "import sys, steadytrain.cli.options, steadytrain.reports, steadytrain.training, steadytrain.optim"
    check = "sys.exit(any(name.startswith('steadytrain.interop') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=False).returncode == 0


def _imported_by_call(node: ast.AST) -> str | None:
    """The name in ``import_module("name")``; empty where it is computed, None where it is no such call."""
    called = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or called not in ("import_module", "__import__"):
        return None
    first = node.args[0]
    return str(first.value) if isinstance(first, ast.Constant) else ""


def test_no_import_cycles() -> None:
    names = {module.name for module in MODULES}

    def module_of(name: str) -> str:
        """The longest beginning of a dotted name that is a module."""
        return name if name in names or "." not in name else module_of(name.rpartition(".")[0])

    # The package's own file is left out: it names what others hold and loads nothing until it is asked.
    graph = {module.name: ({module_of(name) for name in module.imports} & names) - {module.name} for module in INSIDE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_no_drawer_for_odds_and_ends() -> None:
    drawers = {"util", "utils", "helper", "helpers", "common", "core", "misc", "base"}
    assert not [module.name for module in MODULES if set(module.name.split(".")) & drawers]


@pytest.mark.parametrize(
    ("call", "home"),
    [
        ("subprocess.Popen(", "machine.children"),
        ("subprocess.run(", "machine.children"),
        ("os.fork(", "machine.children"),
        ("fcntl.", "machine.platform"),
        ("sys.platform", "machine.platform"),
        ("os.open(", "machine.platform"),
        ("preexec_fn", ""),
        ("build_opener(", "machine.web"),
        (".is_global", "machine.web"),
    ],
)
def test_a_mechanism_has_one_home(call: str, home: str) -> None:
    assert not [m.short for m in INSIDE if m.short != home and call in m.path.read_text(encoding="utf-8")]


def test_this_python_is_started_in_one_way() -> None:
    """What lies in the working folder is imported by no child of ours: a user's own program alone starts without -P."""
    own_programs = {"launch.node", "launch.rank"}
    starts = {module.short for module in INSIDE if "[sys.executable" in module.path.read_text(encoding="utf-8")}
    assert starts - own_programs == {"machine.children"}


def test_no_string_stands_behind_a_docstring() -> None:
    """Two strings in a row are the rest of a merge: the second describes nothing."""
    doubled = [
        f"{module.short}:{second.lineno}"
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for first, second in pairwise(node.body)
        if _is_string(first) and _is_string(second)
    ]
    assert not doubled


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
