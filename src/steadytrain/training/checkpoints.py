"""Checkpoints and weights: nested tensors and plain values, to disk and back, whole or not at all.

A checkpoint is a directory ``step-00000120/`` holding ``state.safetensors`` (the tensors, bit for bit) and
``state.json`` (everything else, the tensors' checksum included). It is written beside its place, flushed
to the disk and renamed, so a kill leaves either the whole of it or nothing. Nothing is ever pickled.

>>> import tempfile, torch
>>> place = Path(tempfile.mkdtemp())
>>> plain, tensors = split({"model": {"w": torch.ones(2)}, "groups": [{"lr": 0.1}], "by_id": {0: "a"}})
>>> save(place, 120, plain, stage(tensors)).path.name
'step-00000120'
>>> state = load(newest(place))
>>> state["by_id"], state["model"]["w"].tolist()
({0: 'a'}, [1.0, 1.0])
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes

from steadytrain.errors import CheckpointError, FailedError, ModelError, describe_type, storage_error
from steadytrain.files import create, open_regular, read_text, replacing, require_regular, sync
from steadytrain.models.tensor_file import CHECKSUM, NO_CHECKSUM, other_weights, read_tensors, seal

VERSION = 1
_PART = ".part"
_TENSORS, _REST = "state.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8,})$")

ReadPieces = Callable[[str], Iterable[torch.Tensor]]
"""A function of a tensor's name. It returns its values on the host, in consecutive pieces. Called once for each: those
of many bytes a value first, and else in their order.
"""


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk: its directory and its size in bytes."""

    path: Path
    bytes: int


def save(
    directory: Path,
    step: int,
    plain: Any,
    tensors: dict[str, torch.Tensor],
    *,
    keep: int | None = None,
    pieces: ReadPieces | None = None,
) -> Written:
    """Write a state as the checkpoint of ``step``; it exists only when it is whole and on the disk.

    Args:
        directory: where checkpoints lie; made if need be, in a folder that exists.
        step: the number that names it.
        plain, tensors: of the state, as :func:`split` and :func:`stage` return them.
        keep: how many to leave: this one and the newest before it. None leaves all.
        pieces: of tensors that are never whole here; of ``tensors``, which may be meta, the shapes and dtypes count.

    Raises:
        StorageError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    place = directory / f"step-{step:08d}"
    part = directory / _PART
    try:
        remove_unfinished(directory)
        directory.mkdir(exist_ok=True)  # in the run's folder; where that was moved away, nothing is made in its place
        part.mkdir()
        _write_tensors(tensors, part / _TENSORS, pieces=pieces)
        content = {"version": VERSION, "step": step, "state": plain}
        content |= {"checksum": _checksum(part / _TENSORS), "rest_checksum": _text_checksum(plain)}
        (part / _REST).write_text(json.dumps(content), encoding="utf-8")
        for path in (part / _TENSORS, part / _REST, part):
            sync(path)
        size = sum((part / name).stat().st_size for name in (_TENSORS, _REST))
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
        sync(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise storage_error(_os_error(error), place) from error
    if keep is not None:
        remove_old(place, keep)
    return Written(place, size)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process left of a checkpoint; only the process that saves may call this."""
    shutil.rmtree(directory / _PART, ignore_errors=True)


def remove_old(place: Path, keep: int) -> None:
    """Remove the checkpoints before one that is intact, but for ``keep`` with it."""
    step = step_of(place)
    # Newer ones, left by an attempt that went further, are damaged (or this one would not be): they do not count.
    for old in [path for path in saved(place.parent) if int(path.name[5:]) <= step][:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def saved(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first; unfinished ones are not among them."""
    return sorted(
        (path for path in directory.glob("step-*") if _NAME.match(path.name)), key=lambda path: int(path.name[5:])
    )


def step_of(place: Path) -> int:
    """Return the updates that a checkpoint was made after.

    >>> step_of(Path("checkpoints/step-00000120"))
    120
    """
    return int(place.name.rpartition("-")[2])


def newest(directory: Path, notice: Callable[[str], None] = lambda message: None) -> Path | None:
    """Find the newest intact checkpoint; None if there is none at all.

    Args:
        directory: where checkpoints lie.
        notice: called with one line for each checkpoint that is damaged.

    Raises:
        CheckpointError: there are checkpoints and every one is damaged.
    """
    places = saved(directory)
    for place in reversed(places):
        fault = damage(place)
        if fault is None:
            return place
        notice(f"{place} is damaged ({fault}): the one before it is used")
    if places:
        raise CheckpointError(
            f"all {len(places)} checkpoints in {directory} are damaged: delete that folder to start from the beginning"
        )
    return None


def damage(place: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every byte is as it was written."""
    try:
        content = json.loads(read_text(place / _REST, most=None))
        if content["version"] != VERSION:
            return f"version {content['version']}, this program reads {VERSION}"
        if content["checksum"] != _checksum(place / _TENSORS):
            return f"the checksum of {_TENSORS} does not match"
        if content["rest_checksum"] != _text_checksum(content["state"]):
            return f"the checksum of {_REST} does not match"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(place: Path) -> dict[str, Any]:
    """Read what was saved: the same tensors (on the CPU), values and structure. Raises CheckpointError on damage."""
    try:
        content = json.loads(read_text(place / _REST, most=None))
        state: dict[str, Any] = join(content["state"], load_file(place / _TENSORS))
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the checkpoint {place}: {error}") from error


def write_weights(
    path: Path, tensors: dict[str, torch.Tensor], about: Mapping[str, Any], *, pieces: ReadPieces | None = None
) -> None:
    """Write weights as one ``.safetensors`` file, whole or not at all.

    Args:
        path: the file; replaced if it is there.
        tensors: a module's ``state_dict``, as :func:`stage` returns it.
        about: plain values that go into the file's header, under ``steadytrain``; a checksum goes there, too.
        pieces: as of :func:`save`.

    Raises:
        StorageError: the disk is full or not writable; a file that was there is untouched.
    """
    try:
        with replacing(path) as part:  # in a folder of its own: what the library leaves there when it is killed goes
            metadata = {"format": "pt", "steadytrain": json.dumps(about), CHECKSUM: NO_CHECKSUM}
            _write_tensors(tensors, part, metadata, pieces)
            seal(part)
    except SafetensorError as error:
        raise storage_error(_os_error(error), path) from error


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the tensors of a ``.safetensors`` file, and what its header says under ``steadytrain`` (empty if nothing).

    Raises:
        CheckpointError: it cannot be read.
        ModelError: its checksum does not match.
    """
    try:
        require_regular(path)
        tensors, about = read_tensors(path)
        if not isinstance(about, dict):
            raise ValueError("its header holds no dictionary under steadytrain")
    except ModelError:
        raise
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the weights in {path} ({error}): {other_weights(path)}") from error
    return tensors, about


def split(state: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a state into plain values that are JSON, and its tensors by name; nothing is copied.

    Args:
        state: nested dictionaries (text or number keys), lists and tuples of tensors and plain values. That a tensor is
            channels-last is among the plain values.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(state, "", tensors), tensors


def _split(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    # No function within split: it would refer to itself, and keep the tensors until garbage is collected.
    if isinstance(value, torch.Tensor):
        assert name not in tensors, f"two tensors are called {name}"
        tensors[name] = value.detach()
        is_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return {"tensor": name} | ({"last": True} if is_last and not value.is_contiguous() else {})
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {"map": {k: _split(v, f"{name}/{k}", tensors) for k, v in value.items()}}
        return {"pairs": [[k, _split(v, f"{name}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_split(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    if value is not None and not isinstance(value, str | int | float | bool):  # of an optimizer of the user's, say
        what = f"{name.strip('/')} is {describe_type(value)}"
        raise FailedError(f"{what}, which no checkpoint holds: keep tensors, numbers, text, lists and tables there")
    return {"value": value}


def join(rest: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that :func:`split` was given."""
    [(kind, value), *more] = rest.items()
    if kind == "tensor":
        return tensors[value].contiguous(memory_format=torch.channels_last) if more else tensors[value]
    if kind == "map":
        return {k: join(v, tensors) for k, v in value.items()}
    if kind == "pairs":
        return {k: join(v, tensors) for k, v in value}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(join(v, tensors) for v in value)
    return rest["value"]


def stage(tensors: Mapping[str, torch.Tensor], memory: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Copy tensors to the host: contiguous and without a byte in common, as safetensors wants them.

    Args:
        tensors: of any device and layout; they may change as soon as this returns.
        memory: uint8 [n] on the host that the copies are put into, n at least the bytes of all; None: new memory.
    """
    if memory is None:
        memory = torch.empty(sum(value.nbytes for value in tensors.values()), dtype=torch.uint8)
    copies, end, devices = {}, 0, set()
    for name, value in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # so that all are aligned
        begin, end = end, end + value.nbytes
        part = memory[begin:end].view(value.dtype) if value.nbytes else memory.new_empty(0, dtype=value.dtype)
        copies[name] = part.view(value.shape).copy_(value.detach(), non_blocking=value.is_cuda)
        devices |= {value.device} if value.is_cuda else set()
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _write_tensors(
    tensors: dict[str, torch.Tensor],
    path: Path,
    metadata: dict[str, str] | None = None,
    pieces: ReadPieces | None = None,
) -> None:
    # safetensors makes its files for their owner alone: this one gets the mode that any new file has here.
    with create(path) as file:
        mode = os.fstat(file.fileno()).st_mode
    if pieces is None:
        save_file(tensors, path, metadata=metadata)
    else:
        _write_pieces(tensors, path, metadata, pieces)
    with contextlib.suppress(OSError):  # a file system without modes
        path.chmod(mode)


def _write_pieces(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None, pieces: ReadPieces
) -> None:
    """Write a safetensors file (header of JSON, then the bytes of all tensors) with no tensor whole in memory."""
    codes = {dtype: _code(dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that all are aligned
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": codes[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("r+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in pieces(name):
                values: NDArray[np.uint8] = piece.contiguous().view(-1).view(torch.uint8).numpy()
                file.write(values.data)
            assert file.tell() == 8 + len(text) + header[name]["data_offsets"][1], f"not all of {name} came"


def _code(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors' headers, as the library writes it."""
    empty = to_bytes({"value": torch.empty(0, dtype=dtype)})
    code: str = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])["value"]["dtype"]
    return code


def _checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text_checksum(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _os_error(error: OSError | SafetensorError) -> OSError:
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number.group(1)), os.strerror(int(number.group(1)))) if number else OSError(str(error))
