"""Environments of other systems, made when they are asked for: a Python of the right version and pinned packages.

Each lies in a folder of its own and is made once; other pins make it anew. What cannot be had is told with its reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PINS = "pins.json"


class UnavailableError(Exception):
    """An environment that cannot be had here; its text is the reason, in one line."""


@dataclass(frozen=True)
class Environment:
    """The packages of an environment.

    Args:
        packages: as pip takes them, pinned.
        check: a statement that fails if they do not work.
        python: the version that they need, such as ``3.8``; None: the running one.
        build: further packages that must be there before the others are built from source, without isolation.
    """

    packages: tuple[str, ...]
    check: str
    python: str | None = None
    build: tuple[str, ...] = ()


ENVIRONMENTS = {
    "mxnet": Environment(("mxnet==1.9.1", "numpy==1.23.5"), "import mxnet", python="3.8"),
    "dali": Environment(("nvidia-dali-cuda120==2.4.0", "numpy==2.4.6"), "import nvidia.dali"),
    "torch": Environment(
        (
            *("torch==2.15.0", "torchvision==0.29.2", "numpy==2.4.6", "pillow==13.0.0"),
            *("timm==1.0.31", "webdataset==1.0.2", "spdl==0.8.0", "spdl-io==0.8.0", "av==18.1.0"),
        ),
        "import torchvision",
    ),
    "ffcv": Environment(
        # Source only: pkg-config has to find OpenCV 4 and libjpeg-turbo.
        ("ffcv==1.0.2", "torch==2.15.0", "torchvision==0.29.2", "numba==0.68.1"),
        "import ffcv",
        build=("setuptools", "wheel"),
    ),
    "serve": Environment(  # LitServe brings FastAPI and uvicorn
        ("litserve==0.2.19", "torch==2.15.0", "torchvision==0.29.2", "timm==1.0.31"),
        "import litserve, fastapi, uvicorn, timm",
    ),
    "autogluon": Environment(
        # === takes the build of that name alone: torchvision's operators are not in a +cpu build of another index.
        ("autogluon.multimodal==1.6.3", "torch===2.13.0", "torchvision==0.28.0"),
        "from autogluon.multimodal import MultiModalPredictor",
    ),
}


def make(name: str, folder: Path, pythons: dict[str, str]) -> Path:
    """Return the Python of an environment, which is made if it is not there.

    Args:
        name: one of ``ENVIRONMENTS``.
        folder: that holds the environments.
        pythons: version -> interpreter, where one is not to be looked for.

    Raises:
        UnavailableError: there is no such Python, or its packages cannot be installed or imported.
    """
    wanted, home = ENVIRONMENTS[name], folder / name
    python = home / "bin" / "python"
    pins = json.dumps([wanted.python or sys.version, *wanted.build, *wanted.packages])
    if not (home / PINS).exists() or (home / PINS).read_text(encoding="utf-8") != pins:
        shutil.rmtree(home, ignore_errors=True)
        print(f"making the environment {name} in {home}", file=sys.stderr, flush=True)
        _run([find_python(wanted.python, pythons), "-m", "venv", str(home)])
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-cache-dir"]
        if wanted.build:
            _run([*pip, *wanted.build])
        _run([*pip, *(["--no-build-isolation"] if wanted.build else []), *wanted.packages])
        _run([str(python), "-c", wanted.check])
        (home / PINS).write_text(pins, encoding="utf-8")
    return python


def find_python(version: str | None, pythons: dict[str, str]) -> str:
    """Find an interpreter of a version: the one that was given, one on the path, or one that pyenv has."""
    if version is None:
        return sys.executable
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [pythons.get(version), shutil.which(f"python{version}"), *sorted(kept.glob(f"{version}.*/bin/python"))]
    for python in filter(None, candidates):
        asked = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return str(python)
    raise UnavailableError(f"no Python {version} was given or found")


def _run(command: list[str]) -> None:
    """Run one step; its last words are the reason if it fails."""
    done = subprocess.run(["nice", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"it ended with {done.returncode}"]
        raise UnavailableError(next((line for line in lines if "ERROR" in line or "Error:" in line), lines[-1]).strip())
