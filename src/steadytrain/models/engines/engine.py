"""The row of an engine that runs exported files, and what its functions take and return."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steadytrain.errors import ModelError, first_line

StoredPrecision = Literal["fp32", "fp16", "bf16", "int8"]
Metadata = Mapping[str, str]
Inputs = tuple[Tensor, ...]

KEY, KEY_OF_PIXELS = "steadytrain", "steadytrain-pixels"
"""Name of the description, JSON in a file's metadata; another where the file preprocesses images, which 0.2 refuses."""

NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""Variable by which ONNX Runtime, from 1.32 on, does not report its use to its makers."""

_HALVES = (torch.float16, torch.bfloat16)


class EngineModule(nn.Module):
    """A network in an exported file, called with tensors: float32 in and out, whatever engine runs it.

    It has no parameters. ``onnxruntime`` may be called from several threads at a time, the other engines from one.

    Args:
        run: the engine, from a list of tensors to a list of tensors.
    """

    def __init__(self, run: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output of the file, on the device of the first input; a tuple where it has several."""
        with torch.no_grad():
            outputs = [
                output.to(inputs[0].device, torch.float32 if output.dtype in _HALVES else output.dtype)
                for output in self._run(inputs)
            ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


@dataclass(frozen=True)
class OpenedModule:
    """An exported file that is ready to run, described or not.

    Args:
        module: takes and returns as many tensors as the file has inputs and outputs.
        metadata: text by name.
        engine: which runs it.
        device: on which.
    """

    module: EngineModule
    metadata: Metadata
    engine: str
    device: torch.device

    @property
    def provider(self) -> str:
        """The device that computes: ``CPU``, or ``CUDA``."""
        return self.device.type.upper()


@dataclass(frozen=True, kw_only=True)
class EngineFormat:
    """An engine and the files that it runs: a row of the table in :mod:`steadytrain.models.exported`.

    Args:
        engine: its name on the command line and in documents.
        title: its name in sentences.
        suffix: of its files, such as ``.onnx``.
        precisions: in which a network can be written, fp32 first.
        devices: kinds of devices that it runs on, the usual one first.
        write: writes a network in evaluation mode, of any batch size, by example inputs; in fp32 or 16 bits.
        add_metadata: puts text by name into a file that was written.
        open: opens a file on a device, ``auto`` included, with so many threads of its own, in the precision that was
            asked for, where it can choose. All that it raises but ModelError means damage.
        packages: modules that have to be installed beside torch.
        extra: of steadytrain, which has these packages; empty: none.
        quantize: writes a network in int8, from inputs by whose ranges its scales are chosen; None: it has no int8.
        read_metadata: reads the text in a file that is code, before it is run; None: its files are data alone.
        more_files: the paths of files that belong to one, beside it.
        is_halved_first: the network computes in 16 bits before it is written so; else ``write`` converts it.
    """

    engine: str
    title: str
    suffix: str
    precisions: tuple[StoredPrecision, ...]
    devices: tuple[str, ...]
    write: Callable[[nn.Module, Inputs, Path, StoredPrecision], None]
    add_metadata: Callable[[Path, Metadata], None]
    open: Callable[[Path, str, int, StoredPrecision | None], OpenedModule]
    packages: tuple[str, ...] = ()
    extra: str = ""
    quantize: Callable[[nn.Module, Inputs, Path, Iterable[Tensor]], None] | None = None
    read_metadata: Callable[[Path], Metadata] | None = None
    more_files: Callable[[Path], tuple[Path, ...]] = lambda path: ()
    is_halved_first: bool = False


def any_batch(inputs: Inputs) -> tuple[dict[int, Any], ...]:
    """Return inputs' dynamic shapes for torch's exporters: the first dimension of each, the same for all."""
    batch = torch.export.Dim("batch", min=1)
    return tuple({0: batch} for _ in inputs)


def no_device(path: Path, engine: str, device: str, remedy: str) -> ModelError:
    """Format the refusal of a device that an engine does not have."""
    return ModelError(f"{path} cannot run on {device}: {engine} here has no such device; {remedy}")


def require_library(name: str, extra: str = "") -> Any:
    """Import a library that an engine needs. Raises ModelError, which says how to install it (``extra``: which has it).

    >>> require_library("json").__name__
    'json'
    """
    if name == "openvino":  # it would report its use to its makers, over the network
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    package = name.partition(".")[0]
    try:
        with _silent_onnxruntime() if package == "onnxruntime" else nullcontext():
            return importlib.import_module(name)
    except ImportError as error:
        remedy = f'pip install "steadytrain[{extra}]"' if extra else f"pip install {package}"
        raise ModelError(f"{package} is not installed here ({first_line(error)}): {remedy}") from error


@contextmanager
def _silent_onnxruntime() -> Iterator[None]:
    """Keep ONNX Runtime from reporting its use: it looks for the variable while it is imported."""
    is_given = NO_TELEMETRY in os.environ
    os.environ.setdefault(NO_TELEMETRY, "1")
    try:
        yield
    finally:
        if not is_given:
            os.environ.pop(NO_TELEMETRY, None)


def seal(path: Path) -> str:
    """Return the size and the checksum of a file, as text of 85 characters."""
    size = path.stat().st_size
    return f"{size:020} {_digest(path, size)}"


def require_sealed(path: Path, weights: Path, size: int, text: str) -> None:
    """Refuse weights of the size that was sealed, but other bytes: a program that writes them anew keeps the text."""
    sealed, _, written = text.partition(" ")
    if sealed == f"{size:020}" and (digest := _digest(weights, size)) != written:
        raise ModelError(
            f"{path} is damaged: its weights have the SHA-256 {digest[:12]}..., and were written with"
            f" {written[:12]}...: export it again"
        )


def _digest(path: Path, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes of a file."""
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while block := file.read(min(1 << 20, left)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
