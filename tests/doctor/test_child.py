"""A question asked in a process of its own: what is answered, and what becomes of one that gives no answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from steadytrain.doctor.child import asked


def test_what_is_told_comes_back() -> None:
    with asked("told['a'] = [1, None, 'x']") as child:
        answer = child.answer(60)
    assert (answer.told, answer.failure) == ({"a": [1, None, "x"]}, None)


def test_what_a_library_prints_does_not_get_into_the_answer() -> None:
    with asked("print('a banner'); os.system('echo another'); told['a'] = 1") as child:
        assert child.answer(60).told == {"a": 1}


def test_a_part_that_fails_is_told_by_name_and_the_rest_goes_on() -> None:
    with asked("ask('a', lambda: 1 / 0)\nask('b', lambda: 2)") as child:
        assert child.answer(60).told == {"b": 2, "refused": {"a": "ZeroDivisionError: division by zero"}}


def test_a_long_answer_is_whole() -> None:
    with asked("told['a'] = 'x' * 1_000_000") as child:
        assert len(child.answer(60).told["a"]) == 1_000_000


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV: without a word"),
        ("sys.exit('no licence')", "ended with 1: no licence"),
        ("raise OSError('libcudart.so.13: cannot open')", "ended with 1: OSError: libcudart.so.13: cannot open"),
    ],
)
def test_a_process_that_ends_without_an_answer_says_how(code: str, failure: str) -> None:
    with asked(code) as child:
        assert child.answer(60).failure == failure


def test_a_process_that_hangs_is_ended() -> None:
    began = time.monotonic()
    with asked("import time; time.sleep(600)") as child:
        assert child.answer(0.2).failure == "no answer within 0.2 s"
    assert time.monotonic() - began < 60


def test_leaving_early_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt), asked("import time; time.sleep(600)"):
        raise KeyboardInterrupt  # a process that was left would fail this test by name


def test_a_module_in_the_current_folder_is_not_taken_for_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with asked("import psutil; told['version'] = psutil.__version__") as child:
        assert child.answer(60).failure is None
