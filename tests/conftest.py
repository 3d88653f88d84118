"""What every test stands on: the shared data, a cache of its own, no network, and nothing left behind.

Tests that need real data ask for ``data_folder`` or ``extracted`` and are skipped, by name, where
``STEADYTRAIN_TEST_DATA`` does not lead to it.
"""

from __future__ import annotations

import atexit
import gc
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import zstandard
from hypothesis import settings

# A busy machine fails no test, and the same few examples are tried everywhere: a change is judged by what it changes.
# HYPOTHESIS_PROFILE=explore tries many new ones.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell that starts tests in the background has them ignore SIGINT, and children inherit that: none would hear Ctrl-C.
# Under nohup none would hear a hangup.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# As the commands have it: threads of two test processes that spin while they wait take the cores from each other.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Networks here are small: a second thread in their operations mostly waits for a core that another test process has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.digits", "tests.store", "tests.data.storage.faults", "tests.cluster.machines"]

# Set by libraries when they are first imported (torch, scikit-learn, its OpenMP), or by pytest for each test.
NOT_OURS = {"TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTEST_CURRENT_TEST"}
GRACE_SECONDS = 60.0

T = TypeVar("T")


def pytest_configure(config: pytest.Config) -> None:
    """Collect once before several workers do, where nothing is compiled yet: each would compile all of it."""
    compiled = Path(cache_from_source(str(Path(__file__).parent / "cli" / "test_errors.py"))).parent
    if getattr(config.option, "numprocesses", None) and not (sys.dont_write_bytecode or compiled.exists()):
        command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-p", "no:cacheprovider", *config.args]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none, and ``slow`` and ``cluster`` where nobody asked for it."""
    missing = {} if any(Path("/dev").glob("nvidia[0-9]*")) else {"gpu": "no GPU here"}
    if not os.environ.get("STEADYTRAIN_TEST_SLOW"):
        missing["slow"] = "not asked for: STEADYTRAIN_TEST_SLOW=1 does"
    if not os.environ.get("STEADYTRAIN_TEST_CLUSTER"):
        missing["cluster"] = "not asked for: tests/cluster/run installs what it needs and runs it"
    for item in items:
        for name in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[name]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import the files of tests in another order than the workers beside this one.

    A file that is imported for the first time has its assertions rewritten, which takes longer than all the rest of
    collecting. In one order all workers would rewrite the same file at the same time; so each finds most of them done.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or session.config.args != session.config.getini("testpaths"):
        return
    number, count = (int(os.environ[f"PYTEST_XDIST_WORKER{suffix}"].strip("gw")) for suffix in ("", "_COUNT"))
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * number // count
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):  # which collecting reports
            import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


# Nor is there garbage to search for among what is being imported.
gc.disable()


def pytest_collection_finish() -> None:
    """Search no more for garbage among what has been imported: a collection of it all takes a second."""
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # triton says of what is left there that it leaked
    _count_frozen_once()


def _count_frozen_once() -> None:
    """Count frozen objects when they change: each run asks whether there are any, and a walk over all takes 0.1 s."""
    count, counts = gc.get_freeze_count, list[int]()

    def frozen() -> int:
        counts.extend([] if counts else [count()])
        return counts[0]

    def forgetting(change: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            counts.clear()
            change()

        return changed

    gc.get_freeze_count, gc.freeze, gc.unfreeze = frozen, forgetting(gc.freeze), forgetting(gc.unfreeze)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real images, logs and golden files; skips where there is none."""
    value = os.environ.get("STEADYTRAIN_TEST_DATA")
    if not value:
        pytest.skip("STEADYTRAIN_TEST_DATA is not set: it names the folder of test data")
    if not Path(value).is_dir():
        pytest.skip(f"STEADYTRAIN_TEST_DATA={value} is not a folder")
    return Path(value).resolve()


@pytest.fixture(scope="session")
def mxnet_python() -> str:
    """The Python of an environment with MXNet 1.9.1, for tests marked ``peer``; skips where there is none."""
    python = os.environ.get("STEADYTRAIN_MXNET_PYTHON")
    if not python:
        pytest.skip("STEADYTRAIN_MXNET_PYTHON is not set: it names the Python of an environment with MXNet 1.9.1")
    return python


@pytest.fixture(scope="session")
def extracted(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``extracted("clothing-10.tar")``: a folder with an archive's files, unpacked once a session; only to be read."""
    root = tmp_path_factory.mktemp("extracted")

    def extract(name: str) -> Path:
        folder = root / name.split(".")[0]
        if not folder.exists():
            with _opened(data_folder / name) as tar:
                tar.extractall(folder, filter="data")
        return folder

    return extract


@pytest.fixture(scope="session")
def some_cifar(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ten images of each class of CIFAR-10, of those to train on and of those to test on; to be read."""
    folder, seen = tmp_path_factory.mktemp("cifar"), Counter[str]()
    with _opened(data_folder / "cifar10-png.tar.zst") as tar:
        for member in tar:
            place = Path(member.name).parent.as_posix()
            if member.isfile() and seen[place] < 10:
                seen[place] += 1
                tar.extract(member, folder, filter="data")
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 2 MB of room; skips where this user may not mount one."""
    with _mounted(tmp_path / "small-disk") as folder:
        yield folder


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system that not even root can write to; skips where this user may not mount one."""
    with _mounted(tmp_path / "read-only-disk") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder


@contextmanager
def _mounted(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs Linux and root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """A tar, perhaps compressed, to be read once from its beginning; skips where it is missing."""
    if not archive.exists():
        pytest.skip(f"{archive} is missing")
    with archive.open("rb") as raw:
        file = zstandard.ZstdDecompressor().stream_reader(raw) if archive.suffix == ".zst" else raw
        with tarfile.open(fileobj=file, mode="r|") as tar:
            yield tar


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache that starts empty, and a closed door instead of a proxy, so that children stay offline as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEADYTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")
        patch.setenv("no_proxy", "localhost,127.0.0.1,::1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Refuse every name and address but this machine's own, as a machine without a network would."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(str(address[0])):
            raise ConnectionRefusedError(f"tests use no network: {address}")
        connect(self, address)

    def guarded_look_up(host: Any, *rest: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is not None and not _is_local(name):
            raise socket.gaierror(socket.EAI_NONAME, f"tests use no network: {name}")
        return look_up(host, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_look_up)
        yield


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "")
    return address.is_loopback or address.is_unspecified


@pytest.fixture(scope="session", autouse=True)
def _decode_here() -> Iterator[None]:
    """Decode and encode images in this process: each child that does takes half a second to load what it needs."""
    users = [import_module(f"steadytrain.data.{name}") for name in ("images.look", "packing.portions")]
    users.append(import_module("steadytrain.data.checking.salvage"))
    map_in_children = import_module("steadytrain.machine.worker_pool").map_in_children

    def map_here(*arguments: Any, workers: int) -> Any:
        return map_in_children(*arguments, workers=workers if _IN_CHILDREN else 0)

    with pytest.MonkeyPatch.context() as patch:
        for user in users:
            patch.setattr(user, "map_in_children", map_here)
        yield


_IN_CHILDREN = list[bool]()


@pytest.fixture
def in_children() -> Iterator[None]:
    """Decode and encode in children all the same, where they are the fact."""
    _IN_CHILDREN.append(True)
    yield
    _IN_CHILDREN.pop()


@pytest.fixture(autouse=True)
def _nothing_left_behind(_own_cache: None, _no_network: None) -> Iterator[None]:
    """Fail the test that leaves a thread, a child process, an environment variable or another working directory."""
    folder, variables = Path.cwd(), _variables()
    threads, children = set(_threads()), set(_children())
    yield
    left = [f"thread {thread.name}" for thread in _gone(lambda: set(_threads()) - threads)]
    left += [f"child process {child.pid}" for child in _gone(lambda: _begun_since(children))]
    now = _variables()
    for name in sorted(name for name in variables.keys() | now.keys() if variables.get(name) != now.get(name)):
        left.append(f"environment variable {name}={now.get(name)} (was {variables.get(name)})")
        os.environ.pop(name, None)
        os.environ.update({name: variables[name]} if name in variables else {})
    if Path.cwd() != folder:
        left.append(f"working directory {Path.cwd()}")
        os.chdir(folder)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Compute with one thread, whatever a run in this process has set for itself before."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The child processes that the test has started and that still live, and nobody else's."""
    before = set(_children())
    return lambda: [child for child in _children() if child not in before]


def _gone(remaining: Callable[[], set[T]]) -> set[T]:
    """What still remains after a moment's grace: a thread that was told to end may be ending."""
    end = time.monotonic() + GRACE_SECONDS
    while (left := remaining()) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


def _threads() -> list[threading.Thread]:
    # Dummies stand for threads that native code made (autograd's on a GPU): nobody can join those.
    return [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]


def _children() -> list[psutil.Process]:
    return [child for child in _descendants() if not _is_tracker(child)]


def _descendants() -> list[psutil.Process]:
    """As psutil has it, which looks at every process of the machine: milliseconds, twice in each test."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return psutil.Process().children(recursive=True)
    pids = _children_of(os.getpid())
    for pid in pids:  # which grows meanwhile
        pids += _children_of(pid)
    processes = list[psutil.Process]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def _children_of(pid: int) -> list[int]:
    """What the threads of a process have started and that still lives."""
    pids = list[int]()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                pids += map(int, (task / "children").read_bytes().split())
    return pids


def _begun_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Children that are new, but for those of one that was there before: a browser that serves several tests, say."""
    owners, new = {child.pid for child in before}, set()
    for child in set(_children()) - before:
        with suppress(psutil.Error):
            if child.ppid() not in owners:
                new.add(child)
    return new


def _is_tracker(child: psutil.Process) -> bool:
    """Whether it is multiprocessing's own: its book-keeper, or what it forks ranks from; they live as long as we do."""
    try:
        words = " ".join(child.cmdline())
        forks = "multiprocessing.forkserver" in words or "from steadytrain.export.engines import serve" in words
        forks = forks and child.ppid() == os.getpid()
        return "multiprocessing.resource_tracker" in words or forks
    except psutil.Error:
        return True
