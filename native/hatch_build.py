"""Build hooks of the package: compile the native decoder where cargo is found; elsewhere the wheel is pure Python.

The library needs nothing but memcpy and its like of the C library: one wheel serves every Python 3 of a platform. It is
linked without undefined names: a function that could panic would leave one, and the build fails.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LIBRARY = "src/steadytrain/native/library.so"  # by this name on every system: steadytrain.native loads it by its path
MIN_GLIBC = (2, 17)  # what pip has known tags for; the library itself asks for 2.14


class ProjectLinksHook(MetadataHookInterface):
    """Add the links of the package's page on an index: those of the repository whose workflow builds the release."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Name the repository, its issues, changelog and documents; nothing where no workflow of GitHub's builds."""
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            pages = {"Documentation": "tree/main/docs", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
            metadata["urls"] = {"Repository": address} | {name: f"{address}/{page}" for name, page in pages.items()}


class NativeDecoderHook(BuildHookInterface):
    """Add the library and its platform tag to a wheel; build it in place for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say so in one line where that cannot be."""
        root = Path(self.root)
        self.folder = tempfile.TemporaryDirectory()
        try:
            made = compile_library(root / "native", Path(self.folder.name))
            if version == "editable":
                # Renamed into place: a process may have the one that is there loaded.
                beside = shutil.copy(made, root / f"{LIBRARY}.new")
                Path(beside).replace(root / LIBRARY)
        except (OSError, RuntimeError) as error:
            self.app.display_warning(f"the native JPEG decoder was not built: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(made)] = LIBRARY.removeprefix("src/")
            build_data["tag"], build_data["pure_python"] = f"py3-none-{platform_tag(made)}", False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the build folder."""
        self.folder.cleanup()


def compile_library(source: Path, target: Path) -> Path:
    """Run cargo in ``source``, without a network, and return the library, somewhere under ``target``.

    Raises:
        RuntimeError: there is no cargo, or it failed; the text has one line.
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        raise RuntimeError("cargo was not found (Rust: https://rustup.rs)")
    command = [cargo, "rustc", "--release", "--offline", "--lib", "--crate-type", "cdylib", "--target-dir", str(target)]
    if sys.platform == "linux":
        command += ["--", "-C", "link-arg=-Wl,-z,defs", "-C", "link-arg=-lc"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = next((line for line in lines if line.startswith("error")), lines[-1] if lines else "no output")
        raise RuntimeError(f"cargo failed: {reason}")
    made = [path for path in (target / "release").iterdir() if path.suffix in (".so", ".dylib", ".dll")]
    if len(made) != 1:
        raise RuntimeError("cargo made no shared library for this system")
    return made[0]


def platform_tag(library: Path) -> str:
    """The wheel's platform: under glibc the oldest manylinux that the library's symbols allow."""
    if sys.platform == "linux":
        symbols = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
        if not symbols:  # another C library
            return f"linux_{platform.machine()}"
        major, minor = max(MIN_GLIBC, *((int(major), int(minor)) for major, minor in symbols))
        return f"manylinux_{major}_{minor}_{platform.machine()}"
    # cargo builds for one processor, a universal Python runs on two.
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return re.sub(r"[^a-z0-9]+", "_", name.lower())
