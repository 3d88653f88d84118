"""What users hold on to: the public names, the verbs and their pages, and that watching needs no torch."""

from __future__ import annotations

import doctest
import linecache
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import steadytrain
from steadytrain.cli import VERBS, module_of

PROJECT = Path(__file__).parents[2]
SOURCE = PROJECT / "src" / "steadytrain"

NAMES = [
    "Budget",
    "Data",
    "Every",
    "ImageClassifier",
    "Model",
    "Optim",
    "Parallel",
    "Precision",
    "Recipe",
    "Run",
    "SetRate",
    "SteadyError",
    "Stop",
    "__version__",
    "bill",
    "calibrate",
    "data",
    "default_recipe",
    "diagnose",
    "evaluate",
    "export_model",
    "features",
    "finetune",
    "ledger",
    "pack",
    "predict",
    "repeat",
    "report",
    "restore",
    "runs",
    "steps",
    "train",
]
HEAVY = ["torch", "torchvision", "timm", "sklearn", "onnx", "onnxruntime", "openvino"]
WITH_TORCH = (
    "cli",
    "native",
    "interop.mxnet",
    "interop.sklearn",
    "data.loader",
    "data.transforms",
    "models",
    "optim",
    "distributed",
    "training",
    "tuning",
    "export",
)
# How a process says which heavy packages it has loaded, after a line of Python of its own.
ASK = "import sys\n{line}\nprint('loaded:', [name for name in {heavy} if sys.modules.get(name)], file=sys.stderr)"


def _names() -> dict[str, Path]:
    """Every module's dotted name and file."""
    paths = {path.relative_to(SOURCE.parent).with_suffix(""): path for path in sorted(SOURCE.rglob("*.py"))}
    return {".".join(short.parts).removesuffix(".__init__"): path for short, path in paths.items()}


def _torch_free() -> list[str]:
    """All modules but those that may use torch or may not be built, and of the command line's the verbs."""
    prefixes = tuple(f"steadytrain.{name}." for name in WITH_TORCH)
    watching = [name for name in _names() if not f"{name}.".startswith(prefixes)]
    return [*watching, "steadytrain.cli", "steadytrain.cli.console", *sorted(set(map(module_of, VERBS)))]


def _loaded_after(line: str) -> str:
    """The last line that a process writes, which has run ``line``: the heavy packages it has loaded."""
    process = subprocess.run(
        [sys.executable, "-c", ASK.format(line=line, heavy=HEAVY)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=True,
    )
    return process.stderr.splitlines()[-1]


def test_the_public_names_are_these() -> None:
    assert steadytrain.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert name in dir(steadytrain)
    held = getattr(steadytrain, name)
    assert isinstance(held, str) or held.__doc__


def test_the_loaders_names_are_in_data_and_where_they_were() -> None:
    assert steadytrain.data.__all__ == [
        "BlockShuffle",
        "Crop",
        "ImageLoader",
        "ImageLoaderDataset",
        "Records",
        "Unpacked",
    ]
    assert all(getattr(steadytrain, name) is getattr(steadytrain.data, name) for name in steadytrain.data.__all__)


def test_without_scikit_learn_all_other_names_are_there() -> None:
    code = """
import sys
sys.modules["sklearn"] = None
import inspect
import steadytrain as st
from steadytrain import *
assert train is st.train and not hasattr(st, "ImageClassifier") and "train" in dict(inspect.getmembers(st))
try:
    st.ImageClassifier
except AttributeError as error:
    print(error)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install scikit-learn" in shown.stdout, shown.stderr


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        steadytrain.nonsense  # noqa: B018


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_page(verb: str) -> None:
    page = PROJECT / "docs" / "cli" / f"{verb.replace(' ', '-')}.md"
    assert page.read_text(encoding="utf-8").startswith(f"# steady {verb}\n")


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert _loaded_after("import steadytrain; steadytrain.Recipe, steadytrain.Run") == "loaded: []"


def test_help_imports_nothing_heavy() -> None:
    pages = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
    line = f"from steadytrain.cli import main\nfor words in {pages}: assert main(words) == 0, words"
    assert _loaded_after(line) == "loaded: []"


def test_what_only_watches_works_where_torch_is_not_installed() -> None:
    line = f"sys.modules.update(dict.fromkeys({HEAVY}))\nimport {', '.join(_torch_free())}"
    assert _loaded_after(line) == "loaded: []"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "steadytrain.export.export" else ())  # as tests of it do
        for name, path in _names().items()
        if ">>> " in path.read_text(encoding="utf-8")
    ],
)
def test_the_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    linecache.clearcache()  # or each example begins with a look at every file of torch in it
    assert doctest.testmod(import_module(name)).failed == 0
