"""Values that were frozen, and what of a document can be: parts that differ from run to run become their types."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ANY = "<any>"


class Frozen:
    """The file of frozen values: compares with it, or writes it again.

    Args:
        path: a JSON file of name -> value.
        freeze: take each value as the right one instead of comparing.
    """

    def __init__(self, path: Path, *, freeze: bool) -> None:
        self.path, self.freeze = path, freeze
        self.values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def __call__(self, name: str, value: Any) -> None:
        """Assert that ``value`` is what was frozen under ``name``."""
        value = json.loads(json.dumps(value))
        if self.freeze:
            self.values[name] = value
        assert name in self.values, f"{name} was never frozen: STEADYTRAIN_FREEZE=1 pytest tests/seams"
        difference = first_difference(self.values[name], value, name)
        assert difference is None, difference

    def encoded(self, name: str, value: Any) -> None:
        """The same where the encoders' versions are those of the frozen value."""
        self._keyed(name, f"pillow {version('pillow')}, simplejpeg {version('simplejpeg')}", value)

    def bits(self, name: str, value: Any) -> None:
        """The same where torch's version and the processor's instructions are those of the frozen value."""
        import torch  # here, so that tests of plans and errors start without it

        units = ", AMX" if torch.cpu._is_amx_tile_supported() else ""  # other kernels of oneDNN's for the same products
        self._keyed(name, f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}{units}", value)

    def _keyed(self, name: str, key: str, value: Any) -> None:
        if self.freeze or f"{name} ({key})" in self.values:
            self(f"{name} ({key})", value)

    def save(self) -> None:
        """Write the file anew if values were to be frozen."""
        if self.freeze:
            text = json.dumps(self.values, indent=1, sort_keys=True, ensure_ascii=False)
            self.path.write_text(text + "\n", encoding="utf-8")


def digest(content: bytes) -> str:
    """Sixteen hex digits that name these bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def digests(folder: Path) -> dict[str, str]:
    """The digest of each file in a folder, hidden ones included."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".hashes")  # of later on
    return {path.name: digest(path.read_bytes()) for path in files}


def first_difference(frozen: Any, value: Any, where: str) -> str | None:
    """Where and how two documents differ first; a frozen ``<any>`` is equal to everything."""
    if frozen == ANY or value == ANY:
        return None
    if isinstance(frozen, dict) and isinstance(value, dict):
        if gone := sorted(frozen.keys() - value.keys()):
            return f"{where}: keys {gone} are gone"
        if new := sorted(value.keys() - frozen.keys()):
            return f"{where}: keys {new} are new"
        differences = (first_difference(frozen[key], value[key], f"{where}.{key}") for key in frozen)
        return next((difference for difference in differences if difference), None)
    if isinstance(frozen, list) and isinstance(value, list) and len(frozen) == len(value):
        pairs = enumerate(zip(frozen, value, strict=True))
        differences = (first_difference(item, other, f"{where}[{at}]") for at, (item, other) in pairs)
        return next((difference for difference in differences if difference), None)
    return None if frozen == value and type(frozen) is type(value) else f"{where}: was {frozen!r}, is {value!r}"


def shape(document: Any, loose: Collection[str] = (), open_keys: Collection[str] = ()) -> Any:
    """A document whose measured parts are replaced by their types.

    Args:
        document: as JSON was parsed.
        loose: names of keys whose values, however deep, are compared by type only.
        open_keys: names of keys whose values may be anything: they depend on the machine.
    """
    if isinstance(document, dict):
        return {
            key: ANY
            if key in open_keys
            else types(value, open_keys)
            if key in loose
            else shape(value, loose, open_keys)
            for key, value in document.items()
        }
    if isinstance(document, list):
        return [shape(value, loose, open_keys) for value in document]
    return document


def types(value: Any, open_keys: Collection[str] = ()) -> Any:
    """The types of a value: of a list, of its items merged; None may be anything."""
    if isinstance(value, Mapping):
        return {key: ANY if key in open_keys else types(inner, open_keys) for key, inner in value.items()}
    if isinstance(value, list):
        kinds: list[Any] = []
        for kind in (types(inner, open_keys) for inner in value):
            kinds += [] if kind in kinds else [kind]
        return [merged(kinds)] if kinds else ANY
    if value is None:
        return ANY
    return "<bool>" if isinstance(value, bool) else "<number>" if isinstance(value, int | float) else "<text>"


def merged(kinds: list[Any]) -> Any:
    """One shape for the items of a list: of objects, the keys that all of them have."""
    if len(kinds) == 1:
        return kinds[0]
    if all(isinstance(kind, dict) for kind in kinds):
        keys = set.intersection(*(set(kind) for kind in kinds))
        return {key: merged([kind[key] for kind in kinds]) for key in sorted(keys)}
    return kinds[0] if all(kind == kinds[0] for kind in kinds) else ANY


def plain_text(text: str, places: Mapping[str, str]) -> str:
    """A text without this machine's paths, times and colours: each of ``places`` becomes its name."""
    for place, name in sorted(places.items(), key=lambda pair: -len(pair[0])):
        text = text.replace(place, name)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
