"""The ranks of one machine really run: each knows its place, they end together, and nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import yaml

from steadytrain.launch import Job, render
from steadytrain.launch.supervise import job_exit_code

NODE = [sys.executable, "-m", "steadytrain.launch.node"]
SHOW = """
import json, os
from steadytrain.distributed.world import world_from_environment
print(json.dumps(vars(world_from_environment(os.environ))), flush=True)
"""
# Says that it is ready, and on SIGTERM that it saves.
SAVES = """
import os, signal, sys, time
def save(*_):
    os.write(2, f"saved {os.environ.get('RANK')}\\n".encode())
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


def _node(*flags: str, program: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [*NODE, "--name", "gpu1", *flags, "--", "-c", textwrap.dedent(program)]
    return subprocess.run(command, input=stdin, text=True, capture_output=True, timeout=60, check=False)


def test_each_rank_finds_its_world() -> None:
    flags = ["--size", "5", "--procs", "2", "--first", "3", "--address", "gpu0", "--port", "29500"]
    done = _node(*flags, program=SHOW)
    assert done.returncode == 0, done.stderr
    values = dict(line.split("] ", 1) for line in done.stdout.splitlines())
    assert values.keys() == {"[3 gpu1", "[4 gpu1"}
    assert json.loads(values["[4 gpu1"]) == {
        "rank": 4,
        "size": 5,
        "local_rank": 1,
        "local_size": 2,
        "address": "gpu0",
        "port": 29500,
        "launcher": "steady launch",
    }


def test_a_task_of_skypilot_starts_its_ranks() -> None:
    """As SkyPilot starts them: in a shell."""
    job = Job(words=("python", "-c", SHOW), nodes=2, procs=2, image="a", python=sys.executable, port=29500)
    script = yaml.safe_load(render("sky", job).files[0].text)["run"]
    places = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}
    sky = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **places}, text=True, capture_output=True, check=True
    )
    worlds = [json.loads(line.partition("] ")[2]) for line in sorted(sky.stdout.splitlines())]
    assert [(world["rank"], world["size"], world["address"]) for world in worlds] == [
        *((2, 4, "10.0.0.1"), (3, 4, "10.0.0.1")),
    ]
    assert {world["launcher"] for world in worlds} == {"SkyPilot"}


def test_machines_with_as_many_ranks_go_by_number() -> None:
    done = _node("--size", "4", "--procs", "2", "--node", "1", program="import os; print(os.environ['RANK'])")
    assert sorted(done.stdout.splitlines()) == ["[2 gpu1] 2", "[3 gpu1] 3"]


def test_what_rank_0_prints_is_passed_on_as_it_is() -> None:
    program = "import os, sys; print('{}', end=''); print('note', file=sys.stderr)"
    done = _node("--size", "2", "--procs", "2", program=program)
    assert sorted(done.stdout.splitlines()) == ["[1 gpu1] {}", "{}"]
    assert sorted(done.stderr.splitlines()) == ["[0 gpu1] note", "[1 gpu1] note"]


def test_variables_come_by_standard_input_and_are_in_no_list_of_processes() -> None:
    program = """
        import os, psutil
        told = [" ".join(one.cmdline()) for one in psutil.Process().parents()]
        print(os.environ["TOKEN"], any("never" + " shown" in one for one in told))
    """
    done = _node("--held", program=program, stdin=json.dumps({"TOKEN": "never shown"}) + "\n")
    assert done.stdout == "never shown False\n" or done.returncode == 143, "its end may come before the first line"


def _begin(*flags: str, program: str = SAVES) -> subprocess.Popen[str]:
    command = [*NODE, "--name", "gpu1", *flags, "--", "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def _wait_for_ready(process: subprocess.Popen[str], ranks: int) -> list[psutil.Process]:
    assert process.stderr is not None
    for _ in range(ranks):
        assert "ready" in process.stderr.readline()
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("how", ["silence", "SIGTERM", "SIGINT"])
def test_ranks_that_are_asked_to_end_save_first(how: str) -> None:
    with _begin("--size", "2", "--procs", "2", "--held") as process:
        assert process.stdin is not None
        process.stdin.write("{}\n")
        process.stdin.flush()
        _wait_for_ready(process, 2)
        if how != "silence":
            process.send_signal(getattr(signal, how))
        _, errors = process.communicate(timeout=60)  # closes its standard input
    assert process.returncode == 75
    assert sorted(errors.splitlines()) == ["[0 gpu1] saved 0", "[1 gpu1] saved 1"]


def test_one_that_fails_ends_the_others_and_decides(tmp_path: Path) -> None:
    program = f"""{SAVES.replace("time.sleep(60)", "")}
ready = {str(tmp_path / "ready")!r}
if os.environ["RANK"] == "0":
    open(ready, "w").close()
    time.sleep(60)
while not os.path.exists(ready):
    time.sleep(0.01)
sys.exit(7)
"""
    with _begin("--size", "2", "--procs", "2", program=program) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "[0 gpu1] saved 0" in errors.splitlines()


def test_one_that_will_not_end_is_killed_after_the_grace() -> None:
    program = (
        "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('ready', file=sys.stderr); time.sleep(60)"
    )
    with _begin("--grace", "0.2", program=program) as process:
        _wait_for_ready(process, 1)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the parent's death signal")
def test_ranks_do_not_outlive_a_killed_parent() -> None:
    with _begin("--size", "2", "--procs", "2") as process:
        ranks = _wait_for_ready(process, 2)
        process.kill()
        process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(gone) == 2 and not alive


def test_codes_of_several_as_one() -> None:
    assert job_exit_code([]) == job_exit_code([0, 0]) == 0
    assert job_exit_code([4, 4, 3]) == 3, "who stood still, not who lost it"
    assert job_exit_code([143, 75, 75]) == 75
    assert job_exit_code([75, 1]) == 1
    assert job_exit_code([4, 143]) == 4


def test_one_of_independent_ranks_that_is_killed_ends_no_other() -> None:
    program = """
        import os, signal, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        print("done")
    """
    flags = ["--size", "3", "--procs", "3", "--independent"]
    done = _node(*flags, program=program)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[1 gpu1] done", "[2 gpu1] done"])
    assert done.stderr == "[gpu1] rank 0 was killed by SIGKILL: the others do its work\n"
    assert _node(*flags, program=program.replace("print", "exit(3)  #")).returncode == 3
