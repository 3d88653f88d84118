"""Weights in ``.safetensors`` files: sealed with a checksum when they are written, and verified when they are read.

The checksum is the SHA-256 of the tensors' bytes and of all that the header says. It stands in the header's metadata,
which other programs pass over. A sealed header has its metadata last, which safetensors writes first: so a file that
another program wrote anew, with what the metadata said, is told from a damaged one. Files that others wrote are read as
they are.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "w.safetensors"
>>> save_file({"w": torch.ones(2)}, path, metadata={CHECKSUM: NO_CHECKSUM, "steadytrain": '{"step": 3}'})
>>> seal(path)
>>> read_tensors(path)
({'w': tensor([1., 1.])}, {'step': 3})
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save_file as save_file

from steadytrain.errors import ModelError

CHECKSUM = "steadytrain_sha256"
"""The key of a file's metadata under which its checksum stands."""

NO_CHECKSUM = 64 * "0"
"""Stands there until the file is sealed."""

_OTHERS = {
    "best.safetensors": ("model.safetensors", "the last weights"),
    "model.safetensors": ("best.safetensors", "the weights of the best evaluation"),
}
"""The other file of weights in a run's folder, for each of the two."""


def seal(path: Path) -> None:
    """Put the checksum into a file that has :data:`NO_CHECKSUM`, and its metadata in order behind the tensors.

    Equal weights give equal files: safetensors writes metadata in the random order of a hash table.
    """
    with path.open("r+b") as file:
        size, header = _read_header(file)
        header["__metadata__"] = metadata = header.pop("__metadata__")
        del metadata[CHECKSUM]
        header["__metadata__"] = dict(sorted({**metadata, CHECKSUM: _digest(header, file)}.items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= size, "the same header in another order is longer"
        file.seek(8)
        file.write(text.ljust(size))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Read the tensors of a file, on the CPU, and the JSON that its header holds under ``steadytrain`` ({} if none).

    Raises:
        ModelError: bytes of it are not those that were written.
        OSError, ValueError, RecursionError, SafetensorError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if (written := metadata.get(CHECKSUM)) is not None:
            with path.open("rb") as stream:
                _, header = _read_header(stream)
                is_sealed = list(header)[-1] == "__metadata__"
                del header["__metadata__"][CHECKSUM]
                actual = _digest(header, stream)
            if is_sealed and actual != written:
                raise ModelError(
                    f"{path} is damaged: its bytes have the SHA-256 {actual[:12]}..., and it was written with"
                    f" {written[:12]}...: {other_weights(path)}"
                )
        about = json.loads(metadata.get("steadytrain", "{}"))
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118


def other_weights(path: Path) -> str:
    """Say which weights to take in place of a file that is damaged.

    >>> other_weights(Path("nowhere/best.safetensors"))
    'take another copy of it'
    """
    name, what = _OTHERS.get(path.name, (path.name, ""))
    other = path.with_name(name)
    return f"take {other}, {what}" if other != path and other.exists() else "take another copy of it"


def _read_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    size = int.from_bytes(file.read(8), "little")
    return size, json.loads(file.read(size))


def _digest(header: dict[str, Any], file: BinaryIO) -> str:
    """Return the checksum of a header, in the order of its keys, and of the rest of a file whose header was read."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
