"""``steady doctor`` as users run it, on this machine: real runs, also where torch is missing, broken or slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from steadytrain.cli import main
from steadytrain.machine.cgroups import groups
from steadytrain.machine.procfs import ROOT

SOURCE = Path(__file__).parents[2] / "src"
WITHOUT = ("torch", "torchgen", "functorch", "torchvision", "timm")

Run = subprocess.CompletedProcess[str]


def doctor(*words: str, python: str = sys.executable, before: Sequence[str] = (), **variables: str) -> Run:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **variables}
    command = [*before, python, "-m", "steadytrain", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment of its own that has what this one has, but torch and what needs it."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    place = next(folder.glob("lib/python*/site-packages"))
    for path in Path(psutil.__file__).parents[1].iterdir():
        name = path.name.partition("-")[0].partition(".")[0].lower()
        if name not in WITHOUT and path.suffix != ".pth" and not (place / path.name).exists():
            (place / path.name).symlink_to(path)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def broken_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ``PYTHONPATH`` under which torch fails at once: for what is not about torch."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "torch.py").write_text("raise ImportError('not in this test')")
    return f"{folder}{os.pathsep}{SOURCE}"


ONE_CORE = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    """This machine's document, made on one of its processors."""
    ended = doctor("--json", before=ONE_CORE)
    document: dict[str, Any] = json.loads(ended.stdout)
    assert ended.returncode == int(any(finding["severity"] == "bad" for finding in document["findings"])), ended.stderr
    return document


def test_the_document_is_about_this_machine(here: dict[str, Any], broken_torch: str) -> None:
    assert (here["kind"], here["version"], here["torch"]["state"]) == ("steadytrain doctor", 1, "works")
    whole = json.loads(doctor("--json", PYTHONPATH=broken_torch).stdout)
    assert whole["processor"]["allowed"] == len(os.sched_getaffinity(0))
    assert here["places"]["cache"]["path"] == os.environ["STEADYTRAIN_CACHE"]
    assert here["decoders"]["pillow_turbo"]


def test_only_what_was_asked_for_is_on_standard_output(broken_torch: str) -> None:
    ended = doctor(COLUMNS="60", PYTHONPATH=broken_torch)
    assert "checking this machine" in ended.stderr and "looking" not in ended.stdout
    assert {"Machine", "Processor", "Memory", "Folders", "GPUs", "torch", "Decoders"} <= set(ended.stdout.splitlines())
    long = [line for line in ended.stdout.splitlines() if len(line) > 60]
    assert all("/" in line for line in long), "only a path may be wider"
    assert "\033" not in ended.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_affinity_is_obeyed_and_told(here: dict[str, Any]) -> None:
    assert (here["processor"]["allowed"], here["processor"]["usable"], here["torch"]["allowed"]) == (1, 1, 1)
    assert here["processor"]["logical"] > 1
    assert "affinity" in {finding["rule"] for finding in here["findings"]}


@pytest.fixture
def quota() -> Iterator[Path]:
    """A real control group of version 1 or 2 with a quota of half a processor; gone again afterwards."""
    name = f"steadytrain-test-{os.getpid()}"
    group = next((group / name for group in groups(ROOT, "cpu") if os.access(group, os.W_OK)), None)
    if group is None:
        pytest.skip("no control group of the processor that may be changed")
    group.mkdir()
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("50000")
        elif (group / "cpu.max").exists():
            (group / "cpu.max").write_text("50000 100000")
        else:
            pytest.skip("control groups of version 2 without the processor's controller")
        yield group
    finally:
        group.rmdir()


def test_the_quota_of_a_real_control_group_is_told_with_its_fraction(quota: Path, broken_torch: str) -> None:
    join = ["sh", "-c", f'echo $$ >{quota}/cgroup.procs; exec "$@"', "sh"]
    document = json.loads(doctor("--json", before=join, PYTHONPATH=broken_torch).stdout)
    assert (document["processor"]["quota"], document["processor"]["usable"]) == (0.5, 1)
    [finding] = [finding for finding in document["findings"] if finding["rule"] == "quota"]
    assert finding["severity"] == "warn" and "quota (cgroup) is 0.5 cores of the machine's" in finding["what"]


def test_where_torch_is_not_installed_that_is_the_finding(without_torch: str) -> None:
    ended = doctor("--json", python=without_torch)
    document = json.loads(ended.stdout)
    assert (ended.returncode, document["torch"]["state"]) == (1, "missing")
    assert [finding["rule"] for finding in document["findings"] if finding["severity"] == "bad"][0] == "torch-missing"  # noqa: RUF015
    assert document["decoders"]["pillow_turbo"] and document["processor"]["usable"]


def test_where_torch_is_not_installed_it_is_readable_too(without_torch: str) -> None:
    ended = doctor(python=without_torch)
    first, _, second, *_ = ended.stdout.splitlines()
    assert first.startswith("cannot train, torch is missing: ")
    assert second == "bad   torch is not installed"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "broken"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
    ],
)
def test_a_broken_torch_is_found_and_does_not_break_the_doctor(tmp_path: Path, body: str, state: str) -> None:
    (tmp_path / "torch.py").write_text(body)
    ended = doctor("--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}")
    document = json.loads(ended.stdout)
    assert (ended.returncode, document["torch"]["state"]) == (1, state)
    assert document["findings"][0]["rule"] == "torch-broken"


@pytest.mark.slow
def test_against_itself_earlier(here: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "earlier.json").write_text(json.dumps(here))
    document = json.loads(doctor("--against", str(tmp_path / "earlier.json"), "--json", before=ONE_CORE).stdout)
    assert document["kind"] == "steadytrain doctor comparison"
    assert not [
        difference["key"]
        for difference in document["differences"]
        if difference["key"].startswith(("torch.", "packages.", "decoders."))
    ]


def test_against_another_machine(here: dict[str, Any], broken_torch: str, tmp_path: Path) -> None:
    other = {**here, "system": {**here["system"], "host": "fast"}, "processor": {**here["processor"], "usable": 999}}
    (tmp_path / "fast.json").write_text(json.dumps(other))
    ended = doctor("--against", str(tmp_path / "fast.json"), before=ONE_CORE, PYTHONPATH=broken_torch)
    assert ended.stdout.startswith("old: fast, ") and "Affects speed" in ended.stdout
    assert f"processor.usable: 999 -> {here['processor']['usable']} (x " in ended.stdout
    assert "Machine\n" not in ended.stdout


def test_a_names_control_characters_do_not_reach_the_terminal(
    here: dict[str, Any], broken_torch: str, tmp_path: Path
) -> None:
    other = {**here, "system": {**here["system"], "host": "a\033[2Jb", "kernel": "x\033]0;y\007"}}
    (tmp_path / "odd.json").write_text(json.dumps(other))
    assert "\033" not in doctor("--against", str(tmp_path / "odd.json"), PYTHONPATH=broken_torch).stdout


def test_a_wrong_file_is_refused_at_once_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text('{"model": "resnet18"}')
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("torch was asked first"))
    assert main(["doctor", "--against", str(tmp_path / "run.json")]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "was not written by steady doctor" in output.err


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_interrupt_ends_it_and_the_process_that_it_started(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    body = f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(f'{{os.getpid()}}.')\ntime.sleep(600)"
    (tmp_path / "torch.py").write_text(body)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    command = [sys.executable, "-m", "steadytrain", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as running:
        until(lambda: begun.exists() and begun.read_text().endswith("."))
        running.send_signal(signal.SIGINT)  # to it alone, as a supervisor would
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130 and out == b"" and b"Traceback" not in err
    assert not psutil.pid_exists(int(begun.read_text().rstrip(".")))
