"""What a process of its own would take with it: variables that CUDA's libraries read once, and compile workers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch._inductor.config
from tqdm import tqdm


@pytest.fixture(autouse=True)
def _as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back the variables that a run sets for its process; compile kernels without workers and progress bars."""
    before = dict(os.environ)
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    yield
    for name in os.environ.keys() - before.keys():
        if name.startswith(("CUBLAS_", "PYTORCH_", "TRITON_")):
            del os.environ[name]
