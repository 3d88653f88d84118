"""Exported files: what one says of itself, and a module that runs it on the engine that it is for.

==========  ==================================================  ======================================
file        engine                                              where its description is
==========  ==================================================  ======================================
``.onnx``   ``onnxruntime``, or ``onnxruntime-tensorrt``        ``metadata_props``
``.xml``    ``openvino``; its weights are in the ``.bin``       ``rt_info``
``.pt2``    ``torch.export``, or ``aotinductor``                ``extra/steadytrain`` in the archive
==========  ==================================================  ======================================

A package adds an engine by an entry point of the group ``steadytrain.engines``: its name is the ending of the files
without the dot, and its object an :class:`EngineFormat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch

from steadytrain.config.factories import load_entry_point
from steadytrain.config.plain import build, check_types, parse_json, plain
from steadytrain.errors import InputError, ModelError, did_you_mean, first_line
from steadytrain.machine import facts
from steadytrain.models.engines.engine import (
    KEY,
    KEY_OF_PIXELS,
    EngineFormat,
    OpenedModule,
    StoredPrecision,
    no_device,
)
from steadytrain.models.engines.onnx import ONNXRUNTIME, ONNXRUNTIME_TENSORRT
from steadytrain.models.engines.openvino import OPENVINO
from steadytrain.models.engines.torch_export import AOTINDUCTOR, TORCH_EXPORT
from steadytrain.models.weights import Input

GROUP = "steadytrain.engines"
_OURS = (ONNXRUNTIME, ONNXRUNTIME_TENSORRT, OPENVINO, TORCH_EXPORT, AOTINDUCTOR)
"""Engines of steadytrain; the first with an ending is the usual one for such files."""

TENSORRT_GONE = (
    "engines of TensorRT (.engine) are not written or run any more: export the run as .onnx, which ONNX Runtime runs on"
    " a GPU, also by TensorRT (engine onnxruntime-tensorrt; docs: export)"
)
"""Refusal of what steadytrain once wrote."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The description in an exported classifier: all that is needed to use it, and its origin (docs/export.md).

    Args:
        calibrated_on: the digest of the images that the temperature was fitted on, empty where it was not.
        is_unnamed: its classes are called by numbers, their places in records that name none.
        class_counts: training images of each class; empty where they are not known.
        weighting: the setting that keeps these from being the frequencies that the model learned; empty: none does.
        prior: the frequencies that its logits have in them instead, by name; empty: those of its training images.
        prior_shift: what these have added to the logits, [K].
        limits: which images are unlike the training images, as ``steady predict`` uses it; empty: that is not known.

    >>> one = Description(model="digits", input=Input(size=8, channels=1), classes=("0", "1"))
    >>> Description.from_json(one.to_json(), where="a file") == one
    True
    """

    model: str
    input: Input
    classes: tuple[str, ...]
    synsets: tuple[str, ...] = ()
    is_multi_label: bool = False
    temperature: float = 1.0
    calibrated_on: str = ""
    licence: str = ""
    numbers: StoredPrecision = "fp32"
    difference: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    is_unnamed: bool = False
    class_counts: tuple[int, ...] = ()
    weighting: str = ""
    prior: str = ""
    prior_shift: tuple[float, ...] = ()
    limits: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "description")

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(plain(self), ensure_ascii=False)

    @staticmethod
    def from_json(text: str, *, where: str) -> Description:
        """Read what :meth:`to_json` wrote, also by a later version, whose new keys are left out.

        Raises:
            ModelError: it is damaged.
        """
        try:
            values = parse_json(text)
            known = [each.name for each in fields(Description) if each.name in values]
            described = build(Description, {name: values[name] for name in known})
            if not 0 < described.temperature < float("inf") or not described.classes or not described.input.size:
                raise ValueError("its temperature, size or classes cannot be used")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelError(f"the description in {where} is damaged ({first_line(error)}): export it again") from error
        return described


@dataclass(frozen=True)
class Exported(OpenedModule):
    """An exported classifier that is ready to run.

    Its module takes float32 images [B, C, H, W], already normalised, and returns float32 logits [B, K].
    """

    description: Description


@cache
def _added() -> Mapping[str, EntryPoint]:
    """Find the engines that other packages add, by the ending of their files; none is loaded."""
    return {f".{point.name}": point for point in entry_points(group=GROUP)}


@cache
def _load(point: EntryPoint) -> EngineFormat:
    try:
        row = load_entry_point(point, EngineFormat)
    except InputError as error:
        raise ModelError(f"the engine for .{point.name} files cannot be used: {error}") from error
    if row.suffix != f".{point.name}":
        raise ModelError(f"{point.value} is no EngineFormat for .{point.name} files: mend or remove its package")
    return row


def suffixes() -> tuple[str, ...]:
    """Return the endings of exported files. (Weights alone, ``.safetensors``, are no program: a network is built.)

    >>> suffixes()
    ('.onnx', '.xml', '.pt2')
    """
    return tuple(dict.fromkeys((*(row.suffix for row in _OURS), *_added())))


def is_exported(path: str | Path) -> bool:
    """Return whether a file is an exported one by its name, also of a kind that is not run any more.

    >>> is_exported("a.onnx"), is_exported("a.engine"), is_exported("a.safetensors")
    (True, True, False)
    """
    suffix = Path(path).suffix
    return suffix not in ("", ".safetensors") and suffix in (*suffixes(), ".engine")


def engines() -> dict[str, EngineFormat]:
    """Return all engines by their names, with those of other packages that can be loaded."""
    rows = [*_OURS]
    for point in _added().values():
        with suppress(ModelError):  # a file of that ending is refused with the reason
            rows.append(_load(point))
    return {row.engine: row for row in rows}


def engine_for(path: str | Path) -> EngineFormat:
    """Return the usual engine for a file, by its ending. Raises ModelError.

    >>> engine_for("a.xml").engine
    'openvino'
    """
    suffix = Path(path).suffix
    if (row := next((row for row in _OURS if row.suffix == suffix), None)) is not None:
        return row
    if suffix in _added():
        return _load(_added()[suffix])
    reason = TENSORRT_GONE if suffix == ".engine" else f"it must end in {', '.join(suffixes())}"
    raise ModelError(f"{path} is no exported file: {reason}")


def open_exported(path: str | Path, *, device: str = "cpu") -> Exported:
    """Open an exported classifier; arguments as of :func:`open_module`.

    Raises:
        ModelError: no such file, damaged, without a description, or its engine is not installed.
    """
    file, row = Path(path), engine_for(path)
    if row.read_metadata is not None and file.is_file():  # code: without a description it is not even opened
        try:
            metadata = row.read_metadata(file)
        except Exception as error:
            raise _damaged(file, error) from error
        _describe(metadata, file)
    opened = open_module(file, device=device)
    return Exported(**vars(opened), description=_describe(opened.metadata, file))


def _describe(metadata: Mapping[str, str], path: Path) -> Description:
    """Return the description in a file's metadata. Raises ModelError where there is none."""
    if KEY_OF_PIXELS in metadata:
        raise ModelError(
            f"{path} takes pixels, for programs of your own (--with-preprocessing): name the run, or export it once"
            " more without that flag"
        )
    if KEY not in metadata:
        raise ModelError(f"{path} does not describe its images and classes: export it with steady export")
    return Description.from_json(metadata[KEY], where=str(path))


def open_module(
    path: str | Path,
    *,
    device: str = "cpu",
    threads: int | None = None,
    engine: str | None = None,
    precision: StoredPrecision | None = None,
) -> OpenedModule:
    """Open any exported network, described or not.

    Args:
        path: a file whose ending is one of :func:`suffixes`.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto``: a GPU where the engine finds one.
        threads: of ONNX Runtime and OpenVINO; None: a thread for each core. Torch's engines take
            ``torch.set_num_threads``.
        engine: ``onnxruntime-tensorrt`` for an ``.onnx`` file; None: the usual one for the file.
        precision: in which OpenVINO computes (``bf16`` where the processor has it); None: as the file was exported.

    Raises:
        ModelError: no such file, damaged, or its engine is not installed.
    """
    file = Path(path)
    rows = {} if engine is None else engines()
    if engine is not None and engine not in rows:
        reason = f"there is no engine {engine!r}: {', '.join(rows)}.{did_you_mean(engine, rows)}"
        raise ModelError(TENSORRT_GONE if engine == "tensorrt" else reason)
    row = engine_for(file) if engine is None else rows[engine]
    if not file.is_file():
        raise ModelError(f"there is no exported file {file}")
    if file.suffix != row.suffix:
        raise ModelError(f"{file} is no file for {row.title}, which runs {row.suffix}")
    if device != "auto" and torch.device(device).type not in row.devices:
        raise no_device(file, row.title, device, f"take --device {row.devices[0]}")
    try:
        return row.open(file, device, threads or facts.cores(), precision)
    except ModelError:
        raise
    except Exception as error:
        raise _damaged(file, error) from error


def _damaged(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} is damaged or of another version ({first_line(error)}): export it again")
