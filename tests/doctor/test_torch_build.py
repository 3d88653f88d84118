"""torch as it answers: the installed one, one that is missing, one that fails, one that crashes."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from steadytrain.doctor.child import Answer, asked
from steadytrain.doctor.facts import Torch
from steadytrain.doctor.torch_build import QUESTION, covers, torch_build


def ask(seconds: float = 240) -> Torch:
    with asked(QUESTION) as child:
        return torch_build(child.answer(seconds))


def instead(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Another torch, found before the installed one."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_the_installed_torch_is_described_without_being_imported_here() -> None:
    told = ask()
    assert (told.state, told.error) == ("works", None)
    assert (told.version or "").partition("+")[0] == importlib.metadata.version("torch").partition("+")[0]
    assert (told.torchvision or "").partition("+")[0] == importlib.metadata.version("torchvision").partition("+")[0]
    assert told.threads and told.allowed and told.isa
    assert bool(told.built_for) == bool(told.cuda or told.rocm)
    assert told.sees_gpu == bool(told.devices)


def test_an_import_that_fails_is_broken_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "raise ImportError('libcudart.so.13: cannot open shared object file: No such file or directory')"
    instead(tmp_path, monkeypatch, body)
    told = ask()
    assert told.state == "broken" and (told.error or "").startswith("ImportError: libcudart.so.13: cannot open")


def test_a_torch_that_misses_another_module_is_broken_and_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(tmp_path, monkeypatch, "import surely_not_installed")
    assert ask().state == "broken"


def test_a_torch_that_crashes_is_told_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    told = ask()
    assert told.state == "crashed" and "SIGILL" in (told.error or "")


def test_a_torch_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(tmp_path, monkeypatch, "import time; time.sleep(600)")
    told = ask(0.5)
    assert (told.state, told.error) == ("hangs", "no answer within 0.5 s")


def test_a_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = "import sys\nclass Hide:\n    def find_spec(self, name, *rest):\n        if name == 'torch':\n"
    hidden += "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    with asked(f"{hidden}sys.meta_path.insert(0, Hide())\n{QUESTION}") as child:
        assert torch_build(child.answer(60)).state == "missing"


def test_what_gpus_answer_is_kept_in_one_line_each() -> None:
    failure = "AcceleratorError: CUDA error: no kernel image is available for execution on the device\nCompile with ..."
    device = {"name": "Tesla P100", "capability": "6.0", "memory_bytes": 17_071_734_784, "failure": failure}
    told = {"state": "works", "cuda": "13.2", "cudnn": 8907, "nccl": [2, 30, 7], "sees_gpu": True, "devices": [device]}
    made = torch_build(Answer(told))
    assert made.devices[0].failure == failure.splitlines()[0]
    assert (made.cudnn, made.nccl) == ("8.9.7", "2.30.7")


@pytest.mark.parametrize(
    ("built_for", "capability", "expected"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", "8.9", True),  # Ada runs Ampere's code
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", "7.0", False),  # Volta is older than all
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", "12.1", True),
        ("sm_80 sm_90a", "9.0", True),
        ("sm_80 sm_100a", "10.3", False),  # code for one chip only
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", "12.0", False),  # Blackwell with a build of 2024
        ("sm_80 compute_80", "12.0", True),  # portable code is translated
        ("sm_90 compute_90", "8.0", False),
    ],
)
def test_which_gpus_a_build_has_code_for(built_for: str, capability: str, expected: bool) -> None:
    assert covers(tuple(built_for.split()), capability) is expected
