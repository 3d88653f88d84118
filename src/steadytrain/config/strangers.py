"""The one table of gates: recipe keys that have no effect when only a file sets them.

A recipe file, a run's ``recipe.json`` or a launcher's job may come from anybody. What they say is read below their
folder, computed and trained with; a value of the keys below counts only where the command, or code, names it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """A key of a recipe whose value leads out of the run: ``does``: what acting on it does; ``rule``: what happens."""

    part: str
    key: str
    does: str
    rule: str


_IMPORT = "a `pkg.mod:factory` runs code"
_NOT_IMPORTED = "refused; the flag, or `--set`, that names it allows it"
_ADDRESS = "an address is asked for data"
_NOT_ASKED = "refused where it is of this machine or its network; elsewhere it is read"

GATES = (
    Gate("model", "name", _IMPORT, _NOT_IMPORTED),
    Gate("optim", "name", _IMPORT, _NOT_IMPORTED),
    Gate("optim", "loss", _IMPORT, _NOT_IMPORTED),
    Gate("data", "transforms", _IMPORT, _NOT_IMPORTED),
    Gate("every", "upload", "the run is sent to a store", "not sent, and noted; `--set every.upload=URI` allows it"),
    Gate("every", "track", "the run is sent to a service", "not sent, and noted; `--track` allows it"),
    Gate("every", "notices", "a cloud's metadata, or a file, is asked", "not asked, and noted; `--notices` allows it"),
    Gate("parallel", "ray_address", "a Ray cluster is joined", "refused; `--ray-address HOST:PORT` allows it"),
    Gate("data", "train", _ADDRESS, _NOT_ASKED),
    Gate("data", "val", _ADDRESS, _NOT_ASKED),
    Gate("data", "root", _ADDRESS, _NOT_ASKED),
    Gate("data", "labels", _ADDRESS, _NOT_ASKED),
    Gate("data", "classes", _ADDRESS, _NOT_ASKED),
)
"""Every key of a recipe that acts outside of it; ``from_file`` of its part holds those whose values are a file's."""

FILE_KEYS = {part: tuple(gate.key for gate in GATES if gate.part == part) for part in sorted({g.part for g in GATES})}
