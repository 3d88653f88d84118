"""The programs of the page for production answer as ``steady predict``, without steadytrain."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import steadytrain as st
from steadytrain.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "production.md"
WITHOUT_US = "import sys; sys.modules['steadytrain'] = None\n"


@pytest.mark.parametrize(
    ("file", "flags"), [("model.pt2", ()), ("pixels.onnx", ("--with-preprocessing",))], ids=["torch", "onnxruntime"]
)
def test_the_program_of_the_page_gives_the_models_answers(file: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    if file.endswith(".onnx"):
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [program] = [text for text in programs if f'"{file}"' in text]
    torch.manual_seed(3)
    network: Any = timm.create_model("test_resnet")
    torch.nn.init.normal_(network.get_classifier().weight, std=3.0)  # answers that are sure of themselves
    torch.save(network.state_dict(), tmp_path / "stock.pth")
    shape = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(shape).resize((310, 220), Image.Resampling.BICUBIC).save(tmp_path / "cat.jpg", quality=95)
    export = ["export", str(tmp_path / "stock.pth"), "--model", "timm/test_resnet", "-o", str(tmp_path / file)]
    assert main([*export, *flags]) == 0
    model = st.restore(tmp_path / "stock.pth", model="timm/test_resnet", device="cpu")
    [expected] = st.predict(model, [tmp_path / "cat.jpg"], top=3)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_US + program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    answers = [line.split("% ", 1) for line in done.stdout.splitlines()]
    assert [name for _, name in answers] == list(expected.classes)
    for (percent, _), probability in zip(answers, expected.probabilities, strict=True):
        assert float(percent) == pytest.approx(100 * probability, abs=1.0)
