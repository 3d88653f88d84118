"""What torch and the decoders say of themselves, each in a process of its own."""

from __future__ import annotations

import importlib.metadata
import time
from importlib import metadata
from pathlib import Path

import pytest
from PIL import features

from steadytrain.data.images import resize
from steadytrain.doctor.facts import Torch
from steadytrain.doctor.probes import DECODERS, TORCH, ProbeAnswer, decoders, started, torch_build, wait_answer
from steadytrain.machine.gpus import covers


def test_what_is_told_comes_back() -> None:
    with started("values['a'] = [1, None, 'x']") as child:
        answer = wait_answer(child, 60)
    assert (answer.values, answer.failure) == ({"a": [1, None, "x"]}, None)


def test_what_a_library_prints_does_not_get_into_the_answer() -> None:
    with started("print('a banner'); os.system('echo another'); values['a'] = 1") as child:
        assert wait_answer(child, 60).values == {"a": 1}


def test_a_part_that_fails_is_told_by_name_and_the_rest_goes_on() -> None:
    with started("ask('a', lambda: 1 / 0)\nask('b', lambda: 2)") as child:
        assert wait_answer(child, 60).values == {"b": 2, "refused": {"a": "ZeroDivisionError: division by zero"}}


def test_a_long_answer_is_whole() -> None:
    with started("values['a'] = 'x' * 1_000_000") as child:
        assert len(wait_answer(child, 60).values["a"]) == 1_000_000


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV: no message"),
        ("sys.exit('no licence')", "exited with code 1: no licence"),
        ("raise OSError('libcudart.so.13: cannot open')", "exited with code 1: OSError: libcudart.so.13: cannot open"),
    ],
)
def test_a_process_that_ends_without_an_answer_says_how(code: str, failure: str) -> None:
    with started(code) as child:
        assert wait_answer(child, 60).failure == failure


def test_a_process_that_hangs_is_ended() -> None:
    began = time.monotonic()
    with started("import time; time.sleep(600)") as child:
        assert wait_answer(child, 0.2).failure == "no answer within 0.2 s"
    assert time.monotonic() - began < 60


def test_leaving_early_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt), started("import time; time.sleep(600)"):
        raise KeyboardInterrupt  # a process that was left would fail this test by name


def test_a_module_in_the_current_folder_is_not_taken_for_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with started("import psutil; values['version'] = psutil.__version__") as child:
        assert wait_answer(child, 60).failure is None


def test_the_installed_decoders() -> None:
    with started(DECODERS) as child:
        libraries = decoders(wait_answer(child, 240))
    assert (libraries.simplejpeg_error, libraries.pillow_error) == (None, None)
    assert libraries.pillow_turbo == features.version("libjpeg_turbo")


def test_one_that_cannot_be_loaded_does_not_hide_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "simplejpeg.py").write_text("raise ImportError('GLIBC_2.38 not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with started(DECODERS) as child:
        libraries = decoders(wait_answer(child, 240))
    assert libraries.simplejpeg_error == "ImportError: GLIBC_2.38 not found"
    assert libraries.pillow_error is None and libraries.pillow_turbo


def test_what_scales_images_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(DECODERS) as child:
        libraries = decoders(wait_answer(child, 240))
    assert libraries.resizer == (metadata.version("cykooz-resizer") if resize.wheel is not None else "no")
    for text, expected in (("raise ModuleNotFoundError('x')", ("no", None)), ("1 / 0", (None, "ZeroDivisionError"))):
        (tmp_path / "cykooz_resizer.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with started(DECODERS) as child:
            libraries = decoders(wait_answer(child, 240))
        assert libraries.resizer == expected[0] and (libraries.resizer_error or "").partition(":")[0] == (
            expected[1] or ""
        )


def test_the_jpeg_decoder_at_work_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        ("DECODES, VERSION = True, 5", ("native", "5", None)),
        ("DECODES, VERSION = False, 5", ("simplejpeg", "idle", None)),
        ("raise ModuleNotFoundError('x')", ("simplejpeg", "no", None)),
        ("raise ImportError('x')", ("simplejpeg", None, "ImportError: x")),
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "steadytrain").mkdir()
    (tmp_path / "steadytrain" / "__init__.py").touch()
    for text, expected in cases:
        (tmp_path / "steadytrain" / "native.py").write_text(text)
        with started(DECODERS) as child:
            libraries = decoders(wait_answer(child, 240))
        assert (libraries.jpeg, libraries.parts, libraries.parts_error) == expected


def test_a_crash_is_told_of_both() -> None:
    libraries = decoders(ProbeAnswer({}, "ended by SIGILL: without a word"))
    assert libraries.simplejpeg_error == libraries.pillow_error == "ended by SIGILL: without a word"


def test_another_libjpeg_in_pillow_is_told_apart_from_an_unknown_one() -> None:
    pillow = {"pillow_turbo": "no"}
    assert decoders(ProbeAnswer({"pillow": pillow})).pillow_turbo == "no"
    assert decoders(ProbeAnswer({})).pillow_turbo is None


def ask(seconds: float = 240) -> Torch:
    with started(TORCH) as child:
        return torch_build(wait_answer(child, seconds))


def instead(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Another torch, found before the installed one."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.slow
def test_the_installed_torch_is_described_without_being_imported_here() -> None:
    answer = ask()
    assert (answer.state, answer.error) == ("works", None)
    assert (answer.version or "").partition("+")[0] == importlib.metadata.version("torch").partition("+")[0]
    assert (answer.torchvision or "").partition("+")[0] == importlib.metadata.version("torchvision").partition("+")[0]
    assert answer.threads and answer.allowed and answer.isa
    assert bool(answer.built_for) == bool(answer.cuda or answer.rocm)
    assert answer.sees_gpu == bool(answer.devices)


def test_an_import_that_fails_is_broken_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "raise ImportError('libcudart.so.13: cannot open shared object file: No such file or directory')"
    instead(tmp_path, monkeypatch, body)
    answer = ask()
    assert answer.state == "broken" and (answer.error or "").startswith("ImportError: libcudart.so.13: cannot open")


def test_a_torch_that_misses_another_module_is_broken_and_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(tmp_path, monkeypatch, "import surely_not_installed")
    assert ask().state == "broken"


def test_a_torch_that_crashes_is_told_by_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    answer = ask()
    assert answer.state == "crashed" and "SIGILL" in (answer.error or "")


def test_a_torch_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(tmp_path, monkeypatch, "import time; time.sleep(600)")
    answer = ask(0.5)
    assert (answer.state, answer.error) == ("hangs", "no answer within 0.5 s")


def test_a_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = "import sys\nclass Hide:\n    def find_spec(self, name, *rest):\n        if name == 'torch':\n"
    hidden += "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    with started(f"{hidden}sys.meta_path.insert(0, Hide())\n{TORCH}") as child:
        assert torch_build(wait_answer(child, 60)).state == "missing"


def test_what_gpus_answer_is_kept_in_one_line_each() -> None:
    failure = "AcceleratorError: CUDA error: no kernel image is available for execution on the device\nCompile with ..."
    device = {"name": "Tesla P100", "capability": "6.0", "memory_bytes": 17_071_734_784, "failure": failure}
    values = {
        "state": "works",
        "cuda": "13.2",
        "cudnn": 8907,
        "nccl": [2, 30, 7],
        "sees_gpu": True,
        "devices": [device],
    }
    torch = torch_build(ProbeAnswer(values))
    assert torch.devices[0].failure == failure.splitlines()[0]
    assert (torch.cudnn, torch.nccl) == ("8.9.7", "2.30.7")


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
