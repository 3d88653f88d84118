"""What is wrong with a machine is said in one line that names it and the remedy; the question runs on a bare Python."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadytrain import __version__
from steadytrain.errors import InputError
from steadytrain.launch import Job, render
from steadytrain.launch.ssh import Ssh, check_program, judge, require_same_torch
from steadytrain.machine.children import FinishedProgram

JOB = Job(words=("train", "a.rec"), python="/opt/python", port=29500)
GOOD: dict[str, Any] = {
    "python": "3.11.7",
    "machine": "n1",
    "rsync": True,
    "folder": True,
    "steadytrain": "1.0",
    "torch": "2.15.0",
    "gpus": 0,
    "address": "10.0.0.1",
    "busy": False,
    "checks_port": True,
}


def _answer(code: int = 0, errors: str = "", **changed: Any) -> FinishedProgram:
    output = "Welcome!\nsteadytrain check " + json.dumps(GOOD | changed) + "\n"
    return FinishedProgram(code, output, errors)


def test_a_good_machine_among_the_words_of_its_shell() -> None:
    assert judge(JOB, "gpu1", _answer(), "1.0", several=True) == GOOD


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_answer(255, "me@gpu1: Permission denied"), "gpu1: ssh cannot log in (me@gpu1: Permission denied)"),
        (_answer(127, "sh: /opt/python: not found"), "--set python=/path/to/python"),
        (_answer(1, "SyntaxError"), "could not check the machine (exit code 1): SyntaxError"),
        (_answer(steadytrain=None, steadytrain_error="ModuleNotFoundError: x"), "has no steadytrain"),
        (_answer(steadytrain="0.9"), "steadytrain is 0.9 there and 1.0 here"),
        (_answer(torch=None, torch_error="ImportError: libcuda"), "cannot load torch (ImportError: libcuda)"),
        (_answer(folder=False), "--sync FOLDER copies it"),
        (_answer(missing=["/photos"]), "/photos does not exist there: copy it there, --sync FOLDER copies"),
        (_answer(address=None), "--set address=10.0.0.1"),
        (_answer(address="127.0.1.1"), "which other machines cannot reach"),
        (_answer(busy=True), "port 29500 is in use"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(answer: FinishedProgram, message: str) -> None:
    with pytest.raises(InputError) as caught:
        judge(JOB, "gpu1", answer, "1.0", several=True)
    assert str(caught.value).startswith("gpu1: ") and message in str(caught.value)


def test_a_machine_without_the_data_is_found_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    job = Job(words=("train", "photos"), hosts=("gpu1",), folder=str(tmp_path), inputs=("photos", "more", "/no/val"))
    program = render("ssh", job).stages[0].commands[0].stdin
    done = subprocess.run([sys.executable, "-"], input=program, text=True, capture_output=True, check=True, cwd="/")
    facts = json.loads(done.stdout.partition("steadytrain check ")[2])
    assert facts["missing"] == [str(tmp_path / "more"), "/no/val"]


def test_paths_of_several_files_and_copied_ones_are_left_to_the_command(tmp_path: Path) -> None:
    job = Job(
        words=("train", "a"), hosts=("gpu1",), inputs=("a", "/s/x-{0..9}.tar", "/s/a.rec"), options=(Ssh(sync="cats"),)
    )
    assert "'paths': ['/s/a.rec']" in render("ssh", job).stages[0].commands[0].stdin
    with pytest.raises(InputError, match=r"\.\./photos is outside the working directory"):
        render("ssh", replace(job, inputs=("../photos",)))


def test_machines_with_different_torches_do_not_train_together() -> None:
    require_same_torch({"gpu1": GOOD, "gpu2": GOOD})
    with pytest.raises(InputError, match=r"torch is 2\.15\.0 on gpu1 and 2\.14\.0 on gpu2: install the same"):
        require_same_torch({"gpu1": GOOD, "gpu2": GOOD | {"torch": "2.14.0"}})


def test_this_machine_answers_and_a_port_in_use_is_seen(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = check_program(
            folder=str(tmp_path / "made"), make=True, address="localhost", port=server.getsockname()[1]
        )
        done = subprocess.run([sys.executable, "-"], input=program, text=True, capture_output=True, check=True, cwd="/")
    answer = FinishedProgram(0, done.stdout, "")
    with pytest.raises(InputError, match="is in use"):
        judge(JOB, "here", answer, __version__, several=False)
    free = replace(answer, output=done.stdout.replace('"busy": true', '"busy": false'))
    facts = judge(JOB, "here", free, __version__, several=False)
    assert (tmp_path / "made").is_dir()
    assert facts["steadytrain"] == __version__ and facts["address"] == "127.0.0.1"
