"""The process keeps its memory, and a request to stop is seen, not suffered."""

from __future__ import annotations

import gc
import math
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from contextvars import copy_context
from pathlib import Path

import pytest

from steadytrain.machine import process
from steadytrain.machine.process import stop_requests

COUNT_FAULTS = """
import resource
from steadytrain.machine.process import keep_memory
prepared = keep_memory(8 << 30) if {tuned} else 0
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    block = bytearray(64 << 20); del block
before = faults()
for _ in range(10):
    block = bytearray(64 << 20); del block
print(prepared, faults() - before)
"""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@needs_glibc
def test_freed_memory_is_used_again_without_page_faults() -> None:
    prepared, faults = map(int, _run(COUNT_FAULTS.format(tuned=True)).split())
    assert prepared == 6 << 30
    assert faults < 100
    assert int(_run(COUNT_FAULTS.format(tuned=False)).split()[1]) > 10_000


@needs_glibc
def test_large_blocks_of_threads_go_back_to_the_system() -> None:
    code = (
        "import psutil; from concurrent.futures import ThreadPoolExecutor\n"
        "from steadytrain.machine.process import keep_no_large_blocks\n"
        "{}\n"
        "def resident(): return psutil.Process().memory_info().rss\n"
        "before = resident()\n"
        "with ThreadPoolExecutor(24) as pool: list(pool.map(lambda _: len(bytearray(4 << 20)), range(480)))\n"
        "print(resident() - before)"
    )
    assert int(_run(code.format("keep_no_large_blocks()"))) < 4 << 20 < int(_run(code.format("")))


@needs_glibc
def test_a_thread_keeps_what_it_frees_where_it_shares_the_heap() -> None:
    code = (
        "import resource, sys, threading; from steadytrain.machine.process import keep_memory\n"
        "keep_memory(8 << 30, all_threads={})\n"
        "def fill():\n"
        "    for turn in range(13):\n"
        "        block = bytearray(96 << 20); del block\n"
        "        if turn == 2: before.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)\n"
        "before = []; thread = threading.Thread(target=fill); thread.start(); thread.join()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before[0])"
    )
    shared, alone = (int(_run(code.format(shares))) for shares in (True, False))
    assert shared < 100 < alone


@needs_glibc
def test_huge_pages_are_asked_for_the_heap() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has no transparent huge pages")
    # Asked for: how many the kernel then gives depends on how fragmented memory is.
    code = (
        "from steadytrain.machine.process import keep_memory; keep_memory(8 << 30)\n"
        "areas = open('/proc/self/smaps').read().split('VmFlags:')\n"
        "sizes = [int(area.split('\\nSize:')[1].split()[0]) for area in areas[:-1]]\n"
        "print(max(size for size, flags in zip(sizes, areas[1:]) if 'hg' in flags.split('\\n')[0].split()))"
    )
    assert int(_run(code)) > 5 << 20  # KiB


@needs_glibc
def test_preparing_takes_address_space_not_memory() -> None:
    code = (
        "from steadytrain.machine.process import keep_memory; import resource\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; keep_memory(8 << 30)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    assert int(_run(code)) < 16 << 10


@pytest.mark.slow
def test_importing_the_package_leaves_the_allocator_alone() -> None:
    code = (
        "import ctypes; libc = ctypes.CDLL(None); asked = []\n"
        "class Library:\n"
        "    def __getattr__(self, name): return asked.append(name) or getattr(libc, name)\n"
        "ctypes.CDLL = lambda name, *more, open=ctypes.CDLL, **options: Library() if name is None else open(name)\n"
        "import steadytrain.machine.process, steadytrain.training\n"
        "assert 'mallopt' not in asked, 'the allocator was set by an import'; print('ok')"
    )
    assert _run(code) == "ok"


@pytest.mark.parametrize(
    ("values", "spins"),
    [({}, "1000"), pytest.param({"OMP_WAIT_POLICY": "active"}, None, marks=pytest.mark.slow)],
)
def test_a_command_shares_its_cores_unless_the_user_says_otherwise(values: dict[str, str], spins: str | None) -> None:
    code = (
        "import os, sys; sys.argv[1:] = ['no-such-verb']\n"
        "from steadytrain.cli import main; main()\n"
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | values, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(spins)


def test_a_call_from_python_shortens_spins_before_it_loads_torch() -> None:
    loads = "import os, steadytrain as st; st.train; print(os.environ['GOMP_SPINCOUNT'])"
    has = "import os, torch, steadytrain as st; st.train; print(os.environ.get('GOMP_SPINCOUNT'))"
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for code, given, spins in ((loads, {}, "20000"), (loads, {"GOMP_SPINCOUNT": "77"}, "77"), (has, {}, "None")):
        done = subprocess.run([sys.executable, "-c", code], env=clean | given, stdout=subprocess.PIPE, check=True)
        assert done.stdout.decode().strip() == spins


HOG = "while True: pass"
SPINS = (
    "import os, time; from steadytrain.machine import process\n"
    "process.share_cores(); process.spin_where_alone()\n"
    "print(os.environ.get('GOMP_SPINCOUNT'), process.given_environment().get('GOMP_SPINCOUNT'))"
)


def _spins(**text: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", SPINS], env=clean | text, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat")
def test_threads_spin_no_longer_beside_a_busy_neighbour() -> None:
    with subprocess.Popen([sys.executable, "-c", HOG]) as hog:
        try:
            assert _spins() == "1000 None"
        finally:
            hog.kill()


@pytest.mark.parametrize(("others", "spins"), [(0.0, "20000"), (0.29, "20000"), (0.31, "1000"), (math.nan, "1000")])
def test_threads_spin_as_the_cores_are_used(monkeypatch: pytest.MonkeyPatch, others: float, spins: str) -> None:
    """``others``: cores in use by other processes; what no system tells is no reason to take what may be theirs."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setattr(process, "_set_here", lambda: {"GOMP_SPINCOUNT"})  # not by the user
    monkeypatch.setattr(process, "_used_by_others", lambda: others * 10)
    monkeypatch.setattr("steadytrain.machine.cgroups.quota", lambda: None)

    def command() -> None:
        process._COMMAND.set(process._Command(started=0.0, looked=time.perf_counter() - 10, used_by_others=0.0))
        process.spin_where_alone()

    copy_context().run(command)
    assert os.environ["GOMP_SPINCOUNT"] == spins


def test_what_the_user_says_of_spins_stays() -> None:
    assert _spins(GOMP_SPINCOUNT="77") == "77 77"
    assert _spins(OMP_WAIT_POLICY="passive") == "None None"


@pytest.mark.skipif(not Path("/proc/uptime").exists(), reason="no /proc")
def test_a_command_that_a_shell_became_did_not_start_with_the_shell() -> None:
    """As in a job's script, or a container's: ``sh -c "fetch the data && exec steady train"``."""
    code = (
        "import sys, time; from steadytrain.machine import platform, process; process.share_cores()\n"
        "print(platform.seconds_since_boot() - time.perf_counter() + process.own_start(), *sys.argv[1:])"
    )
    shell = 'read before rest < /proc/uptime; sleep 2; read after rest < /proc/uptime; exec "$@" $before $after'
    words = ["sh", "-c", shell, "sh", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    start, before, after = map(float, done.stdout.split())
    assert start > (before + after) / 2


@pytest.mark.parametrize("is_command", [True, False])
def test_what_a_command_imports_to_stay_is_never_searched_for_garbage(is_command: bool) -> None:
    code = f"""
        import gc
        from steadytrain.machine import process
        if {is_command}:
            process.share_cores()
        with process.lasting_imports():
            print(gc.isenabled())
        print(gc.isenabled(), gc.get_freeze_count() > 1000)
    """
    words = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert words.stdout.split() == (["False", "True", "True"] if is_command else ["True", "True", "False"])


class _Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_old_garbage_goes_when_it_is_asked_for_and_young_garbage_by_itself() -> None:
    with process.collecting_by_hand() as collect:
        collect()
        young, old = _Node(), _Node()
        gone = [weakref.ref(node) for node in (young, old)]
        del young
        # Python searches the young now and then, and makes old what they leave.
        kept: list[list[int]] = [[] for _ in range(30 * 700 * 11)]
        assert gone[0]() is None
        del old
        assert gone[1]() is not None
        collect()
        assert gone[1]() is None and kept


@pytest.mark.parametrize("is_frozen", [False, True])
def test_collection_is_as_it_was_after_a_run_of_any_end(is_frozen: bool) -> None:
    (gc.freeze if is_frozen else gc.unfreeze)()
    before = gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()
    try:
        with pytest.raises(KeyError), process.collecting_by_hand() as collect:
            assert gc.get_freeze_count() > 1000 and gc.get_threshold() != before[0]
            collect()
            raise KeyError
        assert gc.get_freeze_count() <= before[2]  # some were let go of
        assert (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 0) == (*before[:2], is_frozen)
    finally:
        gc.freeze()


def test_what_a_user_has_set_of_collection_stays() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.disable()
    try:
        with process.collecting_by_hand() as collect:
            node = weakref.ref(_Node())
            collect()
            assert node() is not None and gc.get_freeze_count() == frozen and gc.get_threshold() == thresholds
    finally:
        gc.enable()
    try:
        with process.collecting_by_hand():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold() == (500, 5, 5)
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_becomes_a_request(name: str) -> None:
    with stop_requests() as stop:
        assert not stop
        os.kill(os.getpid(), getattr(signal, name))
        assert stop.signal == name


def test_a_hangup_stays_ignored_where_nohup_has_it_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_GRACE", 60)  # a machine that stands still meanwhile does not end these tests
    with pytest.raises(KeyboardInterrupt), stop_requests():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(3 * process._SAME_SIGNAL)  # the handler may have been called later than the listener
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_an_interrupt_that_comes_by_two_ways_still_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SAME_SIGNAL", 60)
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGINT)  # of whoever signals all of a group
        signal.raise_signal(signal.SIGINT)  # of the parent
        assert stop.signal == "SIGINT"


LONG_CALL = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 30_000_000)"  # one operation of many seconds


def test_a_request_is_answered_while_an_operation_runs_and_a_second_one_ends_it() -> None:
    code = (
        "import signal, steadytrain.machine.process as process\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with process.stop_requests(lambda text: print(text, flush=True)) as stop:\n"
        f"    stop.last_words = lambda: print('last words', flush=True); print('ready', flush=True)\n    {LONG_CALL}\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)  # until the operation has begun
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline().startswith(
        "Ctrl-C: finishing this update, then saving and stopping; a second Ctrl-C"
    )
    time.sleep(process._SAME_SIGNAL + 0.1)
    child.send_signal(signal.SIGINT)
    assert child.stdout.read() == "Ctrl-C again: stopping now, without saving\nlast words\n"
    assert child.wait() == 130


def test_a_request_within_a_probe_says_that_nothing_of_it_is_saved() -> None:
    said: list[str] = []
    with stop_requests(said.append) as stop:
        stop.is_probing = lambda: True
        signal.raise_signal(signal.SIGINT)
        while not said:
            time.sleep(0.01)
    assert said == ["Ctrl-C: ending the probe, of which nothing is saved, and stopping; a second Ctrl-C stops at once"]


def test_while_there_is_nothing_to_save_the_first_interrupt_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), stop_requests() as stop:
        stop.saves = False
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with stop_requests():
        pass
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_while_there_is_nothing_to_save_a_request_ends_the_work_at_once() -> None:
    """Whoever takes a machine away waits for seconds, and a start may take minutes."""
    with stop_requests() as stop:
        stop.saves = False
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")
    assert stop.signal == "SIGTERM" and not stop.saves


def test_a_forked_child_dies_of_the_signal_instead_of_asking() -> None:
    ready, tell = os.pipe()
    with stop_requests() as stop:
        child = os.fork()
        if child == 0:
            os.write(tell, b"!")  # a signal before this would be cleared as the child's interpreter comes up
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
    assert not stop


def test_outside_the_main_thread_nothing_is_changed() -> None:
    seen: list[object] = []

    def enter() -> None:
        with stop_requests() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]


def test_gpu_memory_grows_unless_the_user_or_a_graph_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in process.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(process, "IS_LINUX", True)
    assert process.grow_segments(recorded=True) == "fixed"
    assert [process.grow_segments(recorded=False) for _ in range(2)] == ["growing", "growing"]
    assert process.ALLOCATOR_VARIABLES[0] not in process.given_environment()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert process.grow_segments(recorded=False) == "PYTORCH_CUDA_ALLOC_CONF"
