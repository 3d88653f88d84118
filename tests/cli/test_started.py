"""A command started as its shell would start it: its files, its environment, signals, exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from steadytrain.cli.watch_process import started_command
from steadytrain.errors import InputError

OURS = """import sys; from steadytrain.cli.watch_process import started_command
with started_command(sys.argv[1:]) as process: pass
sys.exit(process.returncode)"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_output_goes_where_ours_goes_byte_for_byte(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        code = "import os; os.write(1, bytes(range(256))); os.write(2, b'\\rhalf a line')"
        subprocess.run([*_python(OURS), *_python(code)], stdout=out, stderr=err, check=True)
    assert (tmp_path / "out").read_bytes() == bytes(range(256))
    assert (tmp_path / "err").read_bytes() == b"\rhalf a line"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_and_it_ends_by_itself(number: signal.Signals) -> None:
    listens = (
        "import signal, sys, time\n"
        f"signal.signal({number:d}, lambda *_: (print('saved', flush=True), sys.exit(3)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    ours = subprocess.Popen(
        [*_python(OURS), *_python(listens)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
    )
    assert ours.stdout is not None
    with ours, ours.stdout:
        assert ours.stdout.readline() == b"ready\n"
        ours.send_signal(number)
        assert ours.stdout.readline() == b"saved\n"
    assert ours.returncode == 3


def test_leaving_waits_for_it_and_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    with started_command([*_python(waits), str(tmp_path / "go")]) as process:
        assert process.poll() is None
        threading.Timer(0.3, (tmp_path / "go").touch).start()
    assert process.returncode == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_we_set_for_ourselves_is_not_handed_down(tmp_path: Path) -> None:
    code = "from steadytrain.machine.process import share_cores; share_cores(); " + OURS
    child = "import os, sys; open(sys.argv[1], 'w').write(os.environ.get('GOMP_SPINCOUNT', 'none'))"
    for settings, expected in (({}, "none"), ({"GOMP_SPINCOUNT": "77"}, "77")):
        mine = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        subprocess.run([*_python(code), *_python(child), str(tmp_path / "env")], env={**mine, **settings}, check=True)
        assert (tmp_path / "env").read_text() == expected


def test_what_cannot_be_started_is_said_in_one_line(tmp_path: Path) -> None:
    plain = tmp_path / "notes.txt"
    plain.write_text("no program")
    for command, why in (
        (["no-such-program-here"], "no such command or file"),
        ([str(plain)], "Permission denied"),
        (["a\0b"], "null"),
    ):
        with pytest.raises(InputError, match=why) as caught, started_command(command):
            pass
        assert "\n" not in str(caught.value)


def test_a_command_that_ends_at_once_is_no_trouble() -> None:
    with started_command(["true"]) as process:
        time.sleep(0.2)
    assert process.returncode == 0
