"""What a run takes with its process, and what compares values that a pretended GPU does not have."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from steadytrain.training import build
from steadytrain.training.profile.step_cost import StepMeasuring


@pytest.fixture(autouse=True)
def _as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back the variables that a run sets for its process. What compares values or times is left out."""
    before = dict(os.environ)
    monkeypatch.setattr(StepMeasuring, "is_due", lambda measuring, seconds: False)
    monkeypatch.setattr(build, "mend_kernels", lambda *args, **options: [])
    yield
    for name in os.environ.keys() - before.keys():
        if name.startswith(("CUBLAS_", "PYTORCH_")):
            del os.environ[name]
