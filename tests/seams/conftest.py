"""Seam tests: what users of steadytrain hold on to, frozen, so that its insides may change.

They touch the public Python API (``product.py`` has its names), the command line and files, never an internal
module. Frozen values lie in ``tests/golden/seams.json``: digests of bytes, and small JSON. After a change that is
meant to alter what users see, freeze anew and read the difference::

    STEADYTRAIN_FREEZE=1 pytest tests/seams; git diff tests/golden/seams.json

Three kinds of value:

* ``frozen(name, value)``: the same on every machine (packs, batches, plans, errors, documents);
* ``frozen.encoded``: depends on the libraries that encode PNG and JPEG, and is keyed by their versions;
* ``frozen.bits``: depends on torch's version and the processor's instructions (losses, weights), and is keyed by them.

A keyed value is compared where its key was frozen. What holds everywhere (resumed equals uninterrupted, two ranks
equal one process that accumulates, a child process gives the batches of threads) is asserted besides, on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.seams.frozen import Frozen

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of frozen values, images and runs."""
    return GOLDEN


@pytest.fixture(scope="session")
def frozen() -> Iterator[Frozen]:
    """``frozen("packs/folder", value)``: what was frozen under this name is what is there now."""
    values = Frozen(GOLDEN / "seams.json", freeze=bool(os.environ.get("STEADYTRAIN_FREEZE")))
    yield values
    values.save()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of the test's own: relative paths keep outputs the same on every machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path
