"""Build the library, and a wheel with it: ``pip wheel native/``, or this file alone to build in place.

The library needs nothing but memcpy and its like of the C library: one wheel serves every Python of a platform, and on
Linux every glibc since 2.17. It is linked without undefined names: a function that could panic would leave one.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAME = {"win32": "steadytrain_jpeg.dll", "darwin": "libsteadytrain_jpeg.dylib"}.get(
    sys.platform, "libsteadytrain_jpeg.so"
)
OLDEST_GLIBC = (2, 17)

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # built in place, without hatchling
    BuildHookInterface = object  # type: ignore[assignment, misc]


def build(folder: Path) -> Path:
    """Compile into a folder; returns the library."""
    cargo = shutil.which("cargo")
    if cargo is None:
        sys.exit("building steadytrain-jpeg needs Rust (cargo): https://rustup.rs")
    with tempfile.TemporaryDirectory() as target:
        command = [cargo, "rustc", "--release", "--offline", "--lib", "--crate-type", "cdylib", "--target-dir", target]
        if sys.platform == "linux":
            command += ["--", "-C", "link-arg=-Wl,-z,defs", "-C", "link-arg=-lc"]
        subprocess.run(command, cwd=HERE, check=True)
        # Copied beside it and put in its place: a process may be running the one that is there.
        made = Path(shutil.copy(Path(target) / "release" / NAME, folder / f"{NAME}.new")).replace(folder / NAME)
    if sys.platform == "linux":
        _require_old_glibc(made)
    return made


def _require_old_glibc(library: Path) -> None:
    found = {tuple(map(int, one.split(b"."))) for one in re.findall(rb"GLIBC_([0-9.]+)\0", library.read_bytes())}
    if found and max(found) > OLDEST_GLIBC:
        sys.exit(f"{library} needs glibc {max(found)}, later than {OLDEST_GLIBC}")


def tag() -> str:
    """The wheel's: any Python 3, this platform."""
    if sys.platform == "linux":
        return f"py3-none-manylinux_{OLDEST_GLIBC[0]}_{OLDEST_GLIBC[1]}_{platform.machine()}"
    return "py3-none-" + re.sub(r"[^a-z0-9]+", "_", sysconfig.get_platform().lower())


class Hook(BuildHookInterface):
    """Puts the library into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile."""
        self.folder = tempfile.TemporaryDirectory()
        made = build(Path(self.folder.name))
        build_data["force_include"][str(made)] = f"steadytrain_jpeg/{NAME}"
        build_data["tag"], build_data["pure_python"] = tag(), False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Tidy up."""
        self.folder.cleanup()


if __name__ == "__main__":
    print(build(HERE / "steadytrain_jpeg"))
