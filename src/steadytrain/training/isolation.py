"""What is done beside the updates of a run leaves no trace in it, and a run leaves none in its process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Put random states (torch's, NumPy's and Python's own) and torch's threads back as they were."""
    threads, python, numpy = torch.get_num_threads(), random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Put a network's buffers (running statistics) back as they were, and drop the gradients."""
    each = [(part, name, one) for part in module.modules() for name, one in part.named_buffers(recurse=False)]
    before = [(part, name, buffer, buffer.clone()) for part, name, buffer in each]
    try:
        yield
    finally:
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for part, name, buffer, value in before:
                setattr(part, name, buffer.copy_(value))  # some modules have put another one in its place


@contextmanager
def torch_put_back(device: torch.device) -> Iterator[None]:
    """Leave torch's random state, number of threads and ways to multiply as they are now."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    is_choosing = torch.backends.cudnn.benchmark
    products = [(one, one.fp32_precision) for one in (torch.backends.cuda.matmul, torch.backends.cudnn.conv)]  # type: ignore[attr-defined]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            if torch.are_deterministic_algorithms_enabled() != deterministic:  # to say it imports torch's compiler
                torch.use_deterministic_algorithms(deterministic)
            torch.backends.cudnn.benchmark = is_choosing
            for one, before in products:
                one.fp32_precision = before


def foreign_random() -> tuple[object, ...]:
    """Where the generators stand that are not torch's."""
    told: Any = np.random.get_state(legacy=True)
    return random.getstate(), bytes(told[1]), *told[2:]
