"""Parameters and multiply-adds of networks, counted on the network itself, by the shapes alone.

A network is built on torch's ``meta`` device, where tensors have shapes and no values, and one image goes through it.
Counted are the multiply-adds of convolutions, linear layers and matrix products, those of attention among them; not
norms, activations, pooling and additions. torchvision's tables and most papers do the same.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from steadytrain import __version__
from steadytrain.errors import StorageError, first_line
from steadytrain.files import read_table, replace_file
from steadytrain.machine.facts import cache_folder
from steadytrain.models.nets import BUILTINS
from steadytrain.models.registry import Entry
from steadytrain.models.weights import NETWORK_ERRORS

_LAYOUT = 1  # raised when the same network would be counted otherwise


@dataclass(frozen=True)
class ModelCounts:
    """Parameters and operations of a model.

    Args:
        parameters: all of them, trained or not, the classifier's among them.
        macs: multiply-adds of one image's forward pass; twice as many floating-point operations.
        error: why a number is None.
    """

    parameters: int | None = None
    macs: int | None = None
    error: str | None = None


def counts(
    entries: Iterable[Entry],
    *,
    most: int | None = None,
    cache: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, ModelCounts] | None:
    """Count networks, or recall what was counted earlier with the same timm, torch and steadytrain.

    Args:
        entries: which; those that differ in nothing but their weights are counted once.
        most: None is returned if more networks than this would have to be built; a built one takes 0.1 to 3 seconds.
        cache: where counts are kept; None: the user's own. It may be missing, damaged or not writable.
        progress: takes how many are counted, of how many; not called where all are remembered.

    Returns:
        name -> counts. A network that cannot be built or run has None, and the reason, in place of numbers.
    """
    entries = list(entries)
    known = {key: ModelCounts(*numbers) for key, numbers in _read_cache(cache).items()}
    missing = {_key(entry): entry for entry in entries if _key(entry) not in known}
    if most is not None and len(missing) > most:
        return None
    try:
        for done, (key, entry) in enumerate(missing.items(), 1):
            known[key] = count(entry)
            progress(done, len(missing))
    finally:  # what is counted stays counted, if it is interrupted too
        if missing:
            _write_cache(cache, {key: (p, m) for key, c in known.items() if (p := c.parameters) and (m := c.macs)})
    return {entry.name: known[_key(entry)] for entry in entries}


def count(entry: Entry) -> ModelCounts:
    """Build a network on ``meta`` and push one image through it, in evaluation mode."""
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            if entry.name in BUILTINS:
                size = {"num_classes": entry.num_classes, "channels": entry.channels, "size": entry.height}
                module = BUILTINS[entry.name](**size)
            else:
                module = timm.create_model(entry.name.removeprefix("timm/"))
    except NETWORK_ERRORS as error:
        return ModelCounts(error=f"cannot be built without values: {first_line(error)}")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    # FlopCounterMode's hooks stumble over parameters that want gradients where none are made.
    module.eval().requires_grad_(False)
    image = torch.empty(1, entry.channels, entry.height, entry.width, device="meta")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter, warnings.catch_warnings(action="ignore"):
            module(image)
    except NETWORK_ERRORS as error:
        return ModelCounts(parameters, error=f"cannot be run without values: {first_line(error)}")
    return ModelCounts(parameters, counter.get_total_flops() // 2)


def _key(entry: Entry) -> str:
    architecture = entry.name.partition(".")[0]
    return f"{architecture} {entry.channels}x{entry.height}x{entry.width} {entry.num_classes}"


def _read_cache(cache: Path | None) -> dict[str, tuple[int, int]]:
    """Parameters and multiply-adds that the same versions wrote earlier; nothing where that cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        table = read_table(_cache_file(cache))
        return {str(key): (int(parameters), int(macs)) for key, (parameters, macs) in table.items()}
    return {}


def _write_cache(cache: Path | None, counts: Mapping[str, tuple[int, int]]) -> None:
    """Keep counts, with those that another process has written meanwhile; does nothing where it cannot write."""
    with contextlib.suppress(OSError, StorageError):
        file = _cache_file(cache)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(_read_cache(cache) | dict(counts), indent=0, sort_keys=True))


def _cache_file(cache: Path | None) -> Path:
    """Return the file of these versions' counts. Raises FileNotFoundError where the user has no home."""
    cache = cache or cache_folder()
    if cache is None:
        raise FileNotFoundError("no folder for a cache")
    versions = f"timm-{timm.__version__}-torch-{torch.__version__}-steadytrain-{__version__}"
    return cache / "models" / f"counts-{_LAYOUT}-{versions}.json"
