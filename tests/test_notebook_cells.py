"""Cells as people of other tools type them in a notebook run as they are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

PRELUDE = """
import io, numpy as np, pandas as pd, torch
from PIL import Image
from torch import nn
from torch.utils.data import random_split
from torchvision.datasets import ImageFolder
from pathlib import Path
import steadytrain as st
small = dict(model="resnet20", device="cpu", size=16, progress=False)
"""
FIRST = """
small["weights"] = st.train("photos", epochs=1, run="base", **small).run.weights  # in place of fetched ones
result = st.finetune("photos", epochs=1, lr=1e-3, batch_size=8, seed=1, run="runs/nb", **small)
x = np.random.default_rng(0).integers(0, 255, (20, 16, 16, 3), dtype=np.uint8); y = np.arange(20) % 2
paths = sorted(map(str, Path("photos").rglob("*.png")))
df = pd.DataFrame({"filename": paths, "label": [Path(p).parent.name for p in paths]})
odd = df.rename(columns={"filename": "scan", "label": "dx"})
"""
CELLS = {
    "data is a keyword": 'st.finetune(data="photos", epochs=1, val="photos", **small).status == "finished"',
    "metrics": 'isinstance(result.metrics["top1"], float) and result.metrics["loss"] > 0',
    "history": 'result.history[-1]["epoch"] == 1.0 and list(result.history.to_frame().epoch) == [0.0, 1.0]',
    "evaluation": 'st.evaluate(result.run)["top1"] == st.evaluate("runs/nb").top1 == result.metrics["top1"]',
    "label": 'st.predict(result.run, "photos/dark/0.png")[0].label in ("dark", "light")',
    "next": 'next(st.predict("runs/nb", "photos/dark/0.png")).probability > 0.3',
    "PIL": 'len(st.predict(result.run, Image.open("photos/dark/0.png"))) == 1',
    "array": "len(st.predict(result.run, np.zeros((3, 20, 20, 3), np.uint8))) == 3",
    "tensor": "len(st.predict(result.run, torch.rand(4, 3, 20, 20))) == 4",
    "a list of many kinds": """
len(st.predict(result.run, ["photos", Image.new("L", (9, 9)), np.zeros((9, 9, 4), np.uint8)])) == 22
""",
    "an open file": """
files = [open("photos/dark/0.png", "rb"), open("photos/dark/0.png"), io.BytesIO(Path("photos/dark/0.png").read_bytes())]
assert st.predict(result.run, files)[2].label in ("dark", "light")
[len(st.predict(result.run, file)) for file in files] == [1, 1, 1]
""",
    "frame": 'list(st.predict(result.run, "photos").to_frame().columns)[:3] == ["path", "label", "probability"]',
    "DataFrame of predictions": 'len(pd.DataFrame(st.predict(result.run, "photos"))) == 20',
    "DataFrame in": """
st.finetune(df, epochs=1, **small).run.recipe.data.train.endswith(".csv") and len(st.predict(result.run, df)) == 20
""",
    "ImageFolder in": """
train, val = random_split(ImageFolder("photos"), [16, 4])
st.evaluate(st.finetune(train, epochs=1, val=val, **small).run).n == 4
""",
    "arrays in": """
assert st.evaluate(result.run, (x, ["dark"] * 20)).n == 20
st.train((x, y), epochs=1, val=(x, y), **small).metrics["n"] == 20
""",
    "own module": """
net = nn.Sequential(nn.LazyConv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
st.finetune("photos", epochs=1, **small | {"model": net, "weights": None}).status == "finished"
""",
    "a row of a data set": 'len(st.predict(result.run, {"image": Image.new("RGB", (9, 9)), "label": 1})) == 1',
    "bfloat16": "len(st.predict(result.run, torch.rand(4, 3, 20, 20).bfloat16())) == 4",
    "no say": 'st.default_recipe("photos", say=None, model="resnet20", device="cpu").model.name == "resnet20"',
    "tables of parts": """
assert result.run.recipe.with_({"optim": {"lr": 0.3}}).optim.lr == 0.3
st.default_recipe("photos", {"optim": {"lr": 0.3}}, model="resnet20").optim.lr == 0.3
""",
    "names for numbers": """
st.restore(st.train((x, y), classes=["dark", "light"], epochs=1, **small).run).classes == ("dark", "light")
""",
    "labels of a DataFrame": """
st.train((pd.Series(list(x)), pd.DataFrame({"a": y, "b": 1 - y, "c": y})), epochs=1, **small).status == "finished"
""",
    "columns of an evaluation": """
st.evaluate(result.run, odd, path_column="scan", label_column="dx").n == 20
""",
    "filtered rows": """
half = df[df.label == "dark"]
frame = st.predict(result.run, half.filename).to_frame().set_index(half.index)
list(frame.index) == list(half.index) and list(frame.path) == list(half.filename)
""",
    "runs": 'st.runs()[0]["name"] and "runs/nb" in set(st.runs().to_frame().directory)',
    "a run prints short": "repr(st.Run.open('runs/nb')) == \"Run('runs/nb')\"",
    "callback": """
stop = lambda event: st.Stop("enough") if getattr(event, "epoch", 0) >= 1 else None
st.finetune("photos", epochs=3, batch_size=8, on_event=stop, **small).step == 2
""",
    "augmentation": """
st.default_recipe("photos", model="resnet20", mixup=0.2).data.transforms == ("mixup:0.2",)
""",
    "network": "isinstance(st.restore(result.run).module, nn.Module)",
    "loader": "st.data.Crop is st.Crop",
}
WRONG = {
    'st.finetune("photos", learning_rate=1e-3)': "Did you mean lr?",
    'st.finetune("photos", {"epochs": 1})': "Did you mean budget.epochs?",
    'st.finetune("photos", half=True)': "Instead: precision='bf16'",
    'st.finetune("photos", val="nowhere", **small)': "nowhere",
    'st.finetune("photos", model="resnet20", device="cpu")': "give weights=",
    'st.train("runs/nb", epochs=2)': "weights='runs/nb/model.safetensors' run='runs/nb-more'",
    "list(st.predict(result.run, np.zeros((3, 3, 3)) - 1))": "undo the normalisation",
    'st.train(pd.DataFrame({"image": list(x), "label": y, "set": "val"}), split_column="set")': "val=data[data['set']",
    "len(st.predict(result.run, odd))": "data.rename(columns=",
    "st.predict(result.run, {})[0]": "data.rename(columns=",
    'st.finetune("runs/nb")': "runs/nb is a run, not data: st.train('runs/nb') resumes it, and weights='runs/nb'",
    "st.finetune(paths, list(df.label))": "labels belong beside their images, (images, labels)",
    'st.finetune("photos", optimizer=torch.optim.Adam)': "give a name, such as 'adam'",
    'st.predict(result.run, "https://example.org/cat.jpg")[0]': "fetch the image first",
    'st.pack(df, "packed.rec")': "save images that are in memory",
    'st.train("photos", gpus=2)': "steady train --procs auto",
    'st.finetune("photos", model=nn.Linear(3, 2), run="runs/bad", device="cpu")': "",
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("notebook")
    random = np.random.default_rng(0)
    for number in range(20):
        path = folder / "photos" / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 120, (20, 24, 3), np.uint8) + np.uint8(130 * (number % 2))).save(path)
    space: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("STEADYTRAIN_CACHE", str(folder / "cache"))
        exec(PRELUDE + FIRST, space)
        yield space
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _here(notebook: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(str(notebook["result"].run.directory.resolve())).parents[1]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(folder / "cache"))


@pytest.mark.parametrize("name", CELLS)
def test_cells_run_as_typed(notebook: dict[str, Any], name: str) -> None:
    *lines, last = CELLS[name].strip().splitlines()
    exec("\n".join(lines), notebook)
    assert eval(last, notebook)


@pytest.mark.parametrize("cell", WRONG)
def test_mistakes_are_told_in_words_of_python(notebook: dict[str, Any], cell: str) -> None:
    runs = set(Path("runs").iterdir())
    with pytest.raises(notebook["st"].SteadyError) as caught:
        exec(cell, notebook)
    assert WRONG[cell] in str(caught.value) and " --" not in f" {caught.value}".replace("steady train --procs", "")
    assert set(Path("runs").iterdir()) == runs


@pytest.mark.parametrize(
    ("cell", "instead"),
    {
        "st.fit": "st.finetune(DATA, epochs=5)",
        "st.load_model": "st.restore(RUN)",
        "st.evaluat": "Did you mean evaluate?",
        "result.predict": "st.predict(RUN, IMAGES)",
        "result.accuracy": "result.metrics",
        "result.metricz": "Did you mean metrics?",
        'st.evaluate(result.run)["accuracy"]': "there are n, loss, top1",
    }.items(),
)
def test_names_of_other_libraries_are_answered_with_ours(notebook: dict[str, Any], cell: str, instead: str) -> None:
    with pytest.raises((AttributeError, KeyError)) as caught:
        eval(cell, notebook)
    assert instead in str(caught.value)


@pytest.mark.slow
def test_ipython_completes_the_keywords() -> None:
    code = "import steadytrain as st, inspect; print([*inspect.signature(st.finetune).parameters])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"epochs", "batch_size", "mixup", "on_event"} <= set(eval(shown))


def test_a_probe_that_its_network_refuses_leaves_no_run(notebook: dict[str, Any]) -> None:
    nn = notebook["nn"]
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(2), nn.ReLU())
    with pytest.raises(notebook["st"].SteadyError, match=r"not one linear layer.*use train='head'"):
        notebook["st"].finetune(
            "photos", model=net, train="probe", device="cpu", size=16, run="runs/no", progress=False
        )
    assert not Path("runs/no").exists()
