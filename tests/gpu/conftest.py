"""What a process of its own would take with it: variables that CUDA's libraries read once, and compile workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _as_in_a_process_of_its_own() -> Iterator[None]:
    """Take back the variables that a run sets for its process, and end the workers that compile kernels."""
    before = dict(os.environ)
    yield
    if (compiler := sys.modules.get("torch._inductor.async_compile")) is not None:
        compiler.shutdown_compile_workers()
    for name in os.environ.keys() - before.keys():
        if name.startswith(("CUBLAS_", "PYTORCH_", "TRITON_")):
            del os.environ[name]
