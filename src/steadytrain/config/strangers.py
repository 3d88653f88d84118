"""The one table of gates: recipe keys that have no effect when only a file sets them.

A recipe file, a run's ``recipe.json`` or a launcher's job may come from anybody. What they say is read below their
folder, computed and trained with; a value of the keys below counts only where the command, or code, names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from steadytrain.config.factories import checkpoint_format


@dataclass(frozen=True)
class Gate:
    """A key of a recipe whose value leads out of the run: ``does``: what acting on it does; ``rule``: what happens."""

    part: str
    key: str
    does: str
    rule: str


_IMPORT = "a `pkg.mod:factory` runs code"
_NOT_IMPORTED = "refused; the flag, or `--set`, that names it allows it"
_READ = "a file, a folder or an address is read"
_SHOWN = "read; if it is outside the working folder, a line names it first"
_NOT_ASKED = f"{_SHOWN}; refused if it is an address of this machine or its network"

GATES = (
    Gate("model", "name", _IMPORT, _NOT_IMPORTED),
    Gate("model", "name", "an `mxnet:FILE` is read", _SHOWN),
    Gate("model", "weights", "a file is read, without running code", _SHOWN),
    Gate("model", "pretrained", "the weights of a timm model are fetched from the hub", "fetched, once"),
    Gate("optim", "name", _IMPORT, _NOT_IMPORTED),
    Gate("optim", "loss", _IMPORT, _NOT_IMPORTED),
    Gate("data", "transforms", _IMPORT, _NOT_IMPORTED),
    Gate("every", "upload", "the run is sent to a store", "not sent, and noted; `--set every.upload=URI` allows it"),
    Gate("every", "track", "the run is sent to a service", "not sent, and noted; `--track` allows it"),
    Gate("every", "notices", "a cloud's metadata, or a file, is asked", "not asked, and noted; `--notices` allows it"),
    Gate("data", "train", _READ, _NOT_ASKED),
    Gate("data", "val", _READ, _NOT_ASKED),
    Gate("data", "test", _READ, _NOT_ASKED),
    Gate("data", "root", _READ, _NOT_ASKED),
    Gate("data", "labels", _READ, _NOT_ASKED),
    Gate("data", "classes", _READ, _NOT_ASKED),
)
"""Every key of a recipe that acts outside of it; ``from_file`` of its part holds those whose values are a file's."""

FILE_KEYS = {
    part: tuple(dict.fromkeys(gate.key for gate in GATES if gate.part == part))
    for part in sorted({g.part for g in GATES})
}

_READ_KEYS = tuple(f"{gate.part}.{gate.key}" for gate in GATES if gate.rule.startswith(_SHOWN))
ADDRESS_KEYS = tuple(f"{gate.part}.{gate.key}" for gate in GATES if gate.rule == _NOT_ASKED)
PATH_KEYS = (*ADDRESS_KEYS, "model.weights")


def outside_notice(what: str, values: Mapping[str, object], locate: Callable[[str], Path] = Path) -> str:
    """Say what a file names outside of the working folder, before it is read; empty where there is nothing.

    Args:
        what: what reads it.
        values: keys of the recipe -> values that only a file says.
        locate: returns where a path leads.

    >>> outside_notice("this run", {"data.train": "/photos", "data.val": "val.rec", "model.weights": "/w.pth"})
    'this run reads data outside the current folder: the weights file /w.pth, /photos'
    """
    folder = Path.cwd().resolve()
    named = {key: str(value) for key in _READ_KEYS if (value := values.get(key)) is not None}
    if not checkpoint_format(named.get("model.name", "")):
        named.pop("model.name", None)
    label = {"model.weights": "the weights file ", "data.train": ""}
    shown = [
        f"{label.get(key, f'{key} ')}{text}"
        for key, text in named.items()
        if any(
            "://" in word or not Path(os.path.realpath(locate(word))).is_relative_to(folder)
            for word in text.removeprefix(f"{checkpoint_format(text)}:").split(",")
        )
    ]
    return f"{what} reads data outside the current folder: {', '.join(shown)}" if shown else ""
