"""Whether a machine can do it: the question that is sent to its interpreter, and what its answer comes to.

The question is a program on the interpreter's standard input, so that it needs nothing there but Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from steadytrain.errors import InputError
from steadytrain.launch.job import Job

_ASKED = dedent("""
    import importlib, json, os, platform, shutil, socket
    told = {"python": platform.python_version(), "machine": platform.node(), "rsync": shutil.which("rsync") is not None}
    if wanted["make"]:
        os.makedirs(wanted["folder"], exist_ok=True)
    told["folder"] = os.path.isdir(wanted["folder"])
    for name in ("steadytrain", "torch"):
        try:
            told[name] = importlib.import_module(name).__version__
        except Exception as error:
            told[name], told[name + "_error"] = None, f"{type(error).__name__}: {error}".splitlines()[0]
    if told["torch"]:
        import torch
        told["gpus"] = torch.cuda.device_count()
    try:
        told["address"] = socket.gethostbyname(wanted["address"])
    except OSError as error:
        told["address"] = None
    told["busy"], told["port_asked"] = False, bool(wanted["port"])
    if wanted["port"]:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", wanted["port"]))
            except OSError:
                told["busy"] = True
    print("steadytrain check", json.dumps(told))
""")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one machine said."""

    host: str
    code: int
    output: str
    errors: str


def question(*, folder: str, make: bool, address: str, port: int | None) -> str:
    """The program to send.

    Args:
        folder: that has to be there; ``make``: is made where it is not.
        address: that has to have an address.
        port: that has to be free; None: of no concern.
    """
    wanted = {"folder": folder, "make": make, "address": address, "port": port}
    return f"wanted = {wanted!r}\n{_ASKED}"


def judge(job: Job, answer: Answer, version: str, *, several: bool) -> dict[str, Any]:
    """The facts of a machine that can do it.

    Args:
        version: of steadytrain, here.
        several: whether other machines have to reach the first.

    Raises:
        InputError: it cannot; names the machine, what is wrong and what to do.
    """
    told = next((one for one in answer.output.splitlines() if one.startswith("steadytrain check ")), None)
    if answer.code or told is None:
        raise InputError(f"{answer.host}: {_without_answer(job, answer)}")
    facts: dict[str, Any] = json.loads(told.removeprefix("steadytrain check "))
    if wrong := _wrong(job, facts, version, several=several):
        raise InputError(f"{answer.host}: {wrong}")
    return facts


def agree(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """All machines have the same torch: ranks of different ones may not understand each other. Raises InputError."""
    versions = {told["torch"]: host for host, told in facts.items()}
    if len(versions) > 1:
        (one, here), (other, there), *_ = versions.items()
        raise InputError(f"torch is {one} on {here} and {other} on {there}: install the same on all machines")


def _without_answer(job: Job, answer: Answer) -> str:
    said = " ".join(answer.errors.split()) or "no answer"
    if answer.code == 255:
        return f"ssh cannot log in ({said}): try ssh {answer.host} by hand; a key without a question is needed"
    if answer.code in (126, 127):
        return f"{job.python} cannot be started ({said}): name the interpreter there, --set python=/path/to/python"
    return f"{job.python} could not look at the machine (exit code {answer.code}): {said}"


def _wrong(job: Job, facts: dict[str, Any], version: str, *, several: bool) -> str:
    python = f"{job.python} ({facts['python']})"
    if facts["steadytrain"] is None:
        return (
            f"{python} has no steadytrain ({facts['steadytrain_error']}): install {version} there, or --set python=..."
        )
    if facts["steadytrain"] != version:
        return f"steadytrain is {facts['steadytrain']} there and {version} here: install the same on both"
    if facts["torch"] is None:
        return f"{python} cannot load torch ({facts['torch_error']}): mend that, or --set python=..."
    if not facts["folder"]:
        return "the working directory is not there: --sync FOLDER copies it, and --set folder=PATH names another"
    if facts["address"] is None:
        return "it cannot find the first machine by its name: give its address, --set address=10.0.0.1"
    if several and job.address is None and facts["address"].startswith("127.") and facts["port_asked"]:
        return (
            f"its own name means {facts['address']} there, which no other machine reaches: --set address=10.0.0.1, as"
            " the others reach it"
        )
    if facts["busy"]:
        return f"port {job.meeting_port} is in use, perhaps by this same job: end it, or --set port=N"
    return ""
