"""Children: the same results in the same order, and an end to all of them, whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.data.packing.pictures import write_folder

from steadytrain.data.images.encode import PackedImage, PackSettings
from steadytrain.data.packing.portions import EncodedPortion, Portion, encode_all
from steadytrain.errors import FailedError

pytestmark = pytest.mark.usefixtures("in_children")
Children = Callable[[], list[psutil.Process]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Forty pictures and one file that is none."""
    folder = write_folder(tmp_path_factory.mktemp("pictures"), {"a": 40})
    (folder / "a" / "0020.png").write_text("no picture")
    return [str(path) for path in sorted((folder / "a").iterdir())]


def _tasks(files: list[str], each: int = 3) -> list[Portion]:
    return [[(file, True) for file in files[at : at + each]] for at in range(0, len(files), each)]


def _all(done: Iterator[EncodedPortion]) -> tuple[list[PackedImage | str], int]:
    parts = list(done)
    return [result for part in parts for result in part.results], int(sum(part.counts.sum() for part in parts))


def test_children_give_what_one_process_gives_in_the_same_order(files: list[str]) -> None:
    settings = PackSettings(shorter_side=20)
    alone = _all(encode_all(_tasks(files), settings, workers=0))
    together = _all(encode_all(_tasks(files), settings, workers=3))
    assert alone == together
    assert len(alone[0]) == 40
    assert alone[0][20] == "text, not an image"


def test_ending_early_ends_the_children(files: list[str], children: Children) -> None:
    done = encode_all(_tasks(files), PackSettings(), workers=2)
    next(done)
    assert len(children()) == 2
    done.close()
    assert not children()


def test_a_child_that_dies_is_replaced_and_nothing_is_lost(files: list[str], children: Children) -> None:
    done = encode_all(_tasks(files, 1), PackSettings(), workers=2)
    first, _ = next(done), next(done)  # both children are up
    for child in children():
        child.kill()
    rest = [result for part in done for result in part.results]
    assert len(rest) == 38
    assert not [result for result in rest if isinstance(result, str) and "died" in result]
    assert isinstance(first.results[0], PackedImage)


def test_only_the_file_that_kills_its_decoder_is_given_up(files: list[str], tmp_path: Path) -> None:
    # A decoder that crashes on one file, put in place of the real one in the children alone.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'machine.worker_pool\\')' in ' '.join(sys.orig_argv):\n"
        "    from steadytrain.data.packing import portions\n"
        "    whole = portions.pack_file\n"
        "    def pack_file(path, *rest):\n"
        "        return os.kill(os.getpid(), 11) if path.endswith('0007.png') else whole(path, *rest)\n"
        "    portions.pack_file = pack_file\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        results, _ = _all(encode_all(_tasks(files, 8), PackSettings(), workers=2))
    assert results[7] == "the decoder crashed (SIGSEGV)"
    assert sum(isinstance(result, str) for result in results) == 2
    assert len(results) == 40


def test_children_that_cannot_start_are_an_error_not_forty_bad_images(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('broken')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        with pytest.raises(FailedError, match=r"ended before it began.*--workers 1"):
            _all(encode_all(_tasks(files), PackSettings(), workers=2))


SCRIPT = """
import sys
from steadytrain.data.images.encode import PackSettings
from steadytrain.data.packing.portions import encode_all
print("main", flush=True)
files = sys.argv[1:]
done = encode_all(([(path, False)] for path in files * 1000), PackSettings(), workers=2)
for part in done:
    print(len(part.results), flush=True)
"""


def _start(tmp_path: Path, files: list[str]) -> subprocess.Popen[str]:
    (tmp_path / "main.py").write_text(SCRIPT)  # no guard: children must not run it again
    command = [sys.executable, str(tmp_path / "main.py"), *files[:5]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["main\n", "1\n", "1\n"]
    return process


def _wait_for_end(children: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_a_parent_that_is_killed(files: list[str], tmp_path: Path, ending: signal.Signals) -> None:
    with _start(tmp_path, files) as process:
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        process.send_signal(ending)
        assert process.communicate()[1] == ""
    assert _wait_for_end(children)


def test_an_interrupt_ends_all_without_noise_from_the_children(files: list[str], tmp_path: Path) -> None:
    with _start(tmp_path, files) as process:
        children = psutil.Process(process.pid).children()
        for child in [*children, psutil.Process(process.pid)]:  # as a terminal does
            child.send_signal(signal.SIGINT)
        assert process.communicate()[1].count("Traceback") == 1  # the main program's own
    assert _wait_for_end(children)
