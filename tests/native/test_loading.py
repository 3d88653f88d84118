"""Where the native decoder comes from: not built, built for other functions, or older than its sources."""

from __future__ import annotations

import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
MODULE = PROJECT / "src" / "steadytrain" / "native" / "__init__.py"
LIBRARY = MODULE.with_name("library.so")
built_in_place = pytest.mark.skipif(not LIBRARY.exists(), reason="the native decoder is not built in this checkout")


def load(path: Path) -> None:
    spec = spec_from_file_location("native_copy", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))


def test_a_package_without_the_library_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="installed without its native decoder"):
        load(Path(shutil.copy(MODULE, tmp_path)))


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"no library")
    with pytest.raises(ImportError, match=r"cannot load .*library\.so: .*; install steadytrain again"):
        load(Path(shutil.copy(MODULE, tmp_path)))


@built_in_place
def test_a_library_of_other_functions_is_refused_with_a_warning(tmp_path: Path) -> None:
    shutil.copy(LIBRARY, tmp_path)
    newer = tmp_path / "newer.py"
    newer.write_text(MODULE.read_text(encoding="utf-8").replace("VERSION = ", "VERSION = 1000 + "))
    with pytest.warns(RuntimeWarning, match="install steadytrain again"), pytest.raises(ImportError, match="not 10"):
        load(newer)


@built_in_place
def test_the_library_is_not_older_than_its_sources() -> None:
    sources = [PROJECT / "native" / "Cargo.toml", *(PROJECT / "native" / "src").glob("*.rs")]
    newer = [path.name for path in sources if path.stat().st_mtime > LIBRARY.stat().st_mtime]
    assert not newer, "build it again: pip install --no-deps -e ."
