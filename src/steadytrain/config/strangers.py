"""What a recipe that was read from a file may not do by itself: the one table of gates.

A recipe file, a run's ``recipe.json`` or a launcher's job may come from anybody. What they say is read below their
folder, computed and trained with; a value of the keys below counts only where the command, or code, names it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from steadytrain.errors import RecipeError


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
    Gate("parallel", "ray_address", "a Ray cluster is joined", "refused; `--ray-address HOST:PORT` allows it"),
    Gate("data", "train", _ADDRESS, _NOT_ASKED),
    Gate("data", "val", _ADDRESS, _NOT_ASKED),
    Gate("data", "root", _ADDRESS, _NOT_ASKED),
    Gate("data", "labels", _ADDRESS, _NOT_ASKED),
    Gate("data", "classes", _ADDRESS, _NOT_ASKED),
)
"""Every key of a recipe that acts outside of it; ``from_file`` of its part holds those whose values are a file's."""

FILE_KEYS = {part: tuple(gate.key for gate in GATES if gate.part == part) for part in sorted({g.part for g in GATES})}


def refuse_inner_addresses(values: dict[str, str | Path | None], from_file: frozenset[str]) -> None:
    """Refuse an address within this machine or its network that only a file names: what answers there trusts us.

    Args:
        values: keys of ``data`` -> their values.
        from_file: the keys whose values are a file's.

    Raises:
        RecipeError: names the key and how to allow it.
    """
    for key in sorted(from_file & values.keys()):
        for address in _addresses(values[key]):
            if is_inner(address):
                raise RecipeError(
                    f"data.{key} of the recipe file leads to {address}, within this machine or its network, and this"
                    f" command does not name it; to read it, add --set data.{key}={values[key]}"
                )


def is_inner(uri: str) -> bool:
    """Return whether a web address leads to this machine, its network or a cloud's metadata, as far as its text says.

    >>> is_inner("http://169.254.169.254/a.rec"), is_inner("http://localhost/a"), is_inner("https://example.com/a.rec")
    (True, True, False)
    >>> is_inner("http://2852039166/a"), is_inner("http://[::ffff:10.0.0.1]/a"), is_inner("s3://bucket/a.rec")
    (True, True, False)
    """
    try:
        parts = urlsplit(uri)
        host = (parts.hostname or "").rstrip(".")
    except ValueError:
        return True  # nobody means such an address
    if parts.scheme.lower() not in ("http", "https"):
        return False
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        # No address: a name. One without a dot, or of digits alone, is the network's or an address in disguise.
        labels = host.lower().split(".")
        is_number = all(label.isdigit() or label.startswith("0x") for label in labels)
        return is_number or len(labels) == 1 or labels[-1] in ("internal", "local", "localhost", "lan", "home", "arpa")
    inner = getattr(address, "ipv4_mapped", None) or address
    return not inner.is_global or inner.is_multicast


def _addresses(value: str | Path | None) -> Iterator[str]:
    yield from (word for word in str(value or "").split(",") if "://" in word)
