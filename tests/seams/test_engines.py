"""An engine that another package adds by one row in one file: runs are exported to it, and its files are used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.seams.images import write_marks
from tests.seams.product import steady

from steadytrain.models import exported

pytest.importorskip("onnxruntime")

ROW = '''
"""Files of an engine of my own: ONNX, behind a mark of its own."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from steadytrain.models.engines.onnx import ONNXRUNTIME, quantize_onnx, write_onnx

MARK = b"mine"


def unwrapped(work):
    """Have work on an ONNX file done with one of mine."""

    def call(path, *values):
        with TemporaryDirectory() as folder:
            plain = Path(folder, "plain.onnx")
            plain.write_bytes(path.read_bytes().removeprefix(MARK))
            answer = work(plain, *values)
            path.write_bytes(MARK + plain.read_bytes())
        return answer

    return call


def write(module, inputs, path, numbers):
    write_onnx(module, inputs, path, numbers)
    path.write_bytes(MARK + path.read_bytes())


def quantize(module, inputs, path, batches):
    quantize_onnx(module, inputs, path, batches)
    path.write_bytes(MARK + path.read_bytes())


def open_(path, *options):
    assert path.read_bytes().startswith(MARK), "no file of mine"
    return replace(unwrapped(ONNXRUNTIME.open)(path, *options), engine="mine")


ROW = replace(
    ONNXRUNTIME,
    engine="mine",
    title="My engine",
    suffix=".mine",
    devices=("cpu",),
    write=write,
    quantize=quantize,
    add_metadata=unwrapped(ONNXRUNTIME.add_metadata),
    open=open_,
)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package, installed as one is: a module and its entry points."""
    site = tmp_path / "site"
    (site / "my_engine-1.dist-info").mkdir(parents=True)
    (site / "my_engine.py").write_text(ROW)
    (site / "my_engine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-engine\nVersion: 1\n")
    (site / "my_engine-1.dist-info" / "entry_points.txt").write_text("[steadytrain.engines]\nmine = my_engine:ROW\n")
    monkeypatch.syspath_prepend(site)
    for cached in (exported._added, exported._load):
        cached.cache_clear()
    yield
    for cached in (exported._added, exported._load):
        cached.cache_clear()
    sys.modules.pop("my_engine", None)


def test_a_run_is_exported_to_an_engine_of_another_package_and_used_there(package: None, tmp_path: Path) -> None:
    marks, run, file = write_marks(tmp_path / "marks", 60), tmp_path / "run", tmp_path / "net.mine"
    words = ["--model", "mlp", "--epochs", "1", "--batch-size", "20", "--device", "cpu", "--set", "optim.lr=0.1"]
    steady("train", marks, "--run", run, *words)
    assert "my_engine" not in sys.modules, "an engine is loaded for its files alone"
    [row] = steady("export", run, "-o", file, "--json").document["rows"]
    assert (row["format"], row["engine"]) == ("mine fp32", "mine") and file.read_bytes().startswith(b"mine")

    ours, theirs = (steady("evaluate", place, marks, "--json").document for place in (run, file))
    assert (theirs["n"], theirs["top1"]) == (ours["n"], ours["top1"]) and theirs["loss"] == pytest.approx(
        ours["loss"], 1e-3
    )
    image = next((marks / "class0").iterdir())
    [ours], [theirs] = (steady("predict", place, image, "--json").document for place in (run, file))
    assert [each["class"] for each in theirs["classes"]] == [each["class"] for each in ours["classes"]]

    assert "in bf16: take .xml or .pt2" in steady("export", run, "-o", file, "--bf16", code=2).err
    engines = ["--engines", "mine", "--precision", "fp32", "int8", "--seconds", "0.01", "--threads", "1"]
    [network] = steady("bench", "infer", run, *engines, "--device", "cpu", "--json").document["networks"]
    assert [(each["engine"], each["numbers"], each["error"]) for each in network["engines"]] == [
        ("mine", "fp32", ""),
        ("mine", "int8", ""),
    ]

    file.write_bytes(b"theirs")
    assert "net.mine is damaged or of another version (no file of mine)" in steady("predict", file, image, code=2).err


def test_an_engine_that_cannot_be_loaded_is_named_with_its_package(package: None, tmp_path: Path) -> None:
    (tmp_path / "site" / "my_engine.py").write_text("raise ImportError('no such library')")
    (tmp_path / "net.mine").write_bytes(b"mine")
    answer = steady("predict", tmp_path / "net.mine", write_marks(tmp_path / "marks", 1), code=2)
    assert "the engine for .mine files cannot be used: my_engine:ROW cannot be loaded (no such library)" in answer.err
