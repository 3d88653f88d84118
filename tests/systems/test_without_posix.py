"""A run on a system without POSIX: what Windows lacks is taken away from our modules, and a user's commands work.

It is no run on Windows: other libraries, the file system and the processes are this system's.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import steadytrain
from steadytrain.run import Run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="names of POSIX are taken away")

SOURCE = Path(steadytrain.__file__).parent


def names_in(body: list[ast.stmt], platform: str) -> Iterator[str]:
    """Yield what a stub defines on a platform."""
    for node in body:
        if isinstance(node, ast.If):
            known = {"sys": SimpleNamespace(platform=platform, version_info=sys.version_info)}
            fits = eval(compile(ast.Expression(node.test), "stub", "eval"), known)
            yield from names_in(node.body if fits else node.orelse, platform)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname for alias in node.names if alias.asname)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id != "__all__")


def missing_on_windows() -> dict[str, list[str] | None]:
    """Return what each module of the standard library that we import lacks there; None: there is no such module."""
    stubs = Path(pytest.importorskip("mypy").__file__).parent / "typeshed/stdlib"
    imported = {
        name.partition(".")[0]
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    lacks: dict[str, list[str] | None] = {}
    for module in sorted(imported & sys.stdlib_module_names):
        for stub in (stubs / f"{module}.pyi", stubs / module / "__init__.pyi"):
            if stub.exists():
                body = ast.parse(stub.read_text(encoding="utf-8")).body
                there, here = ({*names_in(body, platform)} for platform in ("win32", "linux"))
                lacks[module] = sorted(here - there) if there or not here else None
    return lacks


def test_the_stubs_say_what_windows_lacks() -> None:
    lacks = missing_on_windows()
    assert lacks["fcntl"] is None
    assert {"pread", "fork", "O_NOFOLLOW", "geteuid", "register_at_fork"} <= {*(lacks["os"] or ())}
    assert {"SIGKILL", "SIGHUP", "pthread_sigmask"} <= {*(lacks["signal"] or ())}
    assert lacks["json"] == [] and "getpid" not in (lacks["os"] or ())


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "STEADYTRAIN_TEST_LACKS": json.dumps(missing_on_windows()),
    }


def run_without_posix(environment: dict[str, str], folder: Path, *commands: list[str]) -> list[tuple[int, str, str]]:
    """Run commands in one process, which loads torch once; return each one's exit code, output and errors."""
    program = (
        "import contextlib, io, json, sys\nfrom steadytrain.cli import main\nresults = []\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        code = main(words)\n"
        "    results.append((code, out.getvalue(), err.getvalue()))\n"
        "print(json.dumps(results))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, json.dumps(commands)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: list[tuple[int, str, str]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small colour images in a folder for each class, beside which the commands run."""
    folder, numbers = tmp_path_factory.mktemp("systems"), np.random.default_rng(0)
    for label in range(3):
        (folder / "photos" / "abc"[label]).mkdir(parents=True)
        for number in range(16):
            pixels = numbers.integers(0, 80, (32, 32, 3), np.uint8)
            pixels[:, :, label] += 150
            Image.fromarray(pixels).save(folder / "photos" / "abc"[label] / f"{number}.png")
    return folder


def test_the_commands_of_one_process_work(environment: dict[str, str], photographs: Path) -> None:
    network = ["--model", "quick8", "--batch-size", "8", "--device", "cpu", "--threads", "2"]
    commands = [
        ["check", "photos"],
        ["pack", "photos", "set"],
        ["train", "set.rec", "--run", "runs/a", "--epochs", "2", "--until", "1", *network],
        ["train", "set.rec", "--run", "runs/a", "--epochs", "2", *network],
        ["evaluate", "runs/a"],
        ["predict", "runs/a", "photos/a/0.png"],
        ["report", "runs/a", "-o", "report.html"],
        ["export", "runs/a", "-o", "model.pt2"],
        ["diagnose", "runs/a"],
        ["runs"],
    ]
    results = run_without_posix(environment, photographs, *commands)
    for words, (code, _, errors) in zip(commands, results, strict=True):
        assert code == (75 if "--until" in words else 0), (words, errors)
    assert Run.open(photographs / "runs/a").progress().finished
    notes = [line for _, _, errors in results for line in errors.splitlines() if "POSIX" in line or "Windows" in line]
    assert not notes, "what falls back says nothing"


def test_what_needs_posix_is_refused_by_name(environment: dict[str, str], photographs: Path) -> None:
    (photographs / "hosts").write_text("a\nb\n", encoding="utf-8")
    refused = {
        "training with several ranks": ["train", "photos", "--procs", "2", "--device", "cpu"],
        "steady launch without --dry-run": ["launch", "--hosts", "hosts", "--", "train", "photos"],
        "measuring in a process of its own": ["tune", "photos", "--device", "cpu"],
    }
    results = run_without_posix(environment, photographs, *refused.values())
    for what, (code, _, errors) in zip(refused, results, strict=True):
        assert code == 2 and f"{what} needs Linux or macOS" in errors
