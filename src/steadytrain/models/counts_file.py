"""Where counts are kept between commands: one small JSON file for each set of versions. Losing it costs a recount."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import timm
import torch

from steadytrain import __version__
from steadytrain.machine.facts import cache_folder

LAYOUT = 1  # raised when the same network would be counted otherwise

Numbers = tuple[int, int]
"""Parameters and multiply-adds."""


def read(cache: Path | None) -> dict[str, Numbers]:
    """What was written earlier by the same versions; nothing where that cannot be read."""
    try:
        told = json.loads(_file(cache).read_bytes())
        return {str(key): (int(parameters), int(macs)) for key, (parameters, macs) in told.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write(cache: Path | None, counts: Mapping[str, Numbers]) -> None:
    """Keep counts, with those that another process has written meanwhile; does nothing where it cannot write."""
    with contextlib.suppress(OSError):
        file = _file(cache)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(read(cache) | dict(counts), indent=0, sort_keys=True)
        part = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


def _file(cache: Path | None) -> Path:
    """Raises FileNotFoundError where the user has no home."""
    cache = cache or cache_folder()
    if cache is None:
        raise FileNotFoundError("no folder for a cache")
    versions = f"timm-{timm.__version__}-torch-{torch.__version__}-steadytrain-{__version__}"
    return cache / "models" / f"counts-{LAYOUT}-{versions}.json"
