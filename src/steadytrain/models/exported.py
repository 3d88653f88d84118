"""Exported files: what one says of itself, and a module that runs it on the engine that it is for.

===========  ==============================================  ======================================
file         engine                                          where its description is
===========  ==============================================  ======================================
``.onnx``    ``onnxruntime``; ``openvino`` reads it as well  ``metadata_props``
``.xml``     ``openvino``; its weights are in the ``.bin``   ``rt_info``
``.pt2``     ``torch.export``, or ``aotinductor``            ``extra/steadytrain`` in the archive
``.engine``  ``tensorrt``                                    ``NAME.engine.json``
===========  ==============================================  ======================================

A ``.pt2`` file is code: torch evaluates expressions that stand in it, and a package of AOTInductor is machine code.
Open those that you trust. The other files hold data alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steadytrain.config.plain import build, check_types, parse_json, plain
from steadytrain.errors import ModelError, first_line
from steadytrain.machine import facts
from steadytrain.models.weights import Input

SUFFIXES = (".onnx", ".xml", ".pt2", ".engine")
"""Endings of exported files. (Weights alone, ``.safetensors``, are no program: a network is built for them.)"""

KEY = "steadytrain"
"""Under which a file's metadata has the description, as JSON."""

StoredNumbers = Literal["fp32", "fp16", "bf16", "int8"]
RuntimeName = Literal["onnxruntime", "openvino", "torch.export", "aotinductor", "tensorrt"]

CHECKSUM = "steadytrain_sha256"
"""Under which a file's metadata has the checksum of its weights. A ``.pt2`` file, which is a zip, has those of zips."""

_SEAL = b"\x72\xeb\x00\x0a\x12" + CHECKSUM.encode() + b"\x12\x55"
"""The last entry of an ``.onnx`` file's metadata, in the bytes of protobuf, up to its text of 85 bytes.

Its length, 107, takes two bytes: whoever writes the file anew, with this entry, writes one.
"""
_SEAL_BYTES = len(_SEAL) + 85

NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""The variable by which ONNX Runtime, from 1.32 on, does not report its use to its makers."""

_HALVES = (torch.float16, torch.bfloat16)

_TENSORS = {
    "float": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    **{name: getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")},
}
"""ONNX Runtime's names of numbers, as in ``tensor(float16)``."""

_TENSORRT = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}
"""TensorRT's, as in ``DataType.HALF``."""

_EXTRAS = {
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "openvino": "openvino",
}
"""Which extra of steadytrain has a library."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The description in an exported classifier: all that is needed to use it, and its origin.

    Args:
        model: name of the network, in full.
        input: size, crop, mean, standard deviation, interpolation and channels of its images.
        classes: names of its outputs, in their order.
        synsets: of its classes, where they are ImageNet's.
        is_multi_label: an image may have several of the classes, each of which has a probability of its own.
        temperature: by which logits are divided before they become probabilities.
        calibrated_on: the digest of the images that it was fitted on, empty where it was not.
        licence: of the weights; empty where they were trained from none.
        numbers: in which the network computes; ``int8``: where it was quantized, else fp32.
        difference: the largest of any logit from the checkpoint's, as it was checked when the file was written.
        provenance: run, digests of recipe and weights, versions, date.
        is_unnamed: its classes are called by numbers, their places in records that name none.

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
    numbers: StoredNumbers = "fp32"
    difference: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    is_unnamed: bool = False

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
            described = build(Description, {key: values[key] for key in _KNOWN if key in values})
            if not 0 < described.temperature < float("inf") or not described.classes or not described.input.size:
                raise ValueError("its temperature, size or classes cannot be used")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ModelError(f"the description in {where} is damaged ({first_line(error)}): export it again") from error
        return described


_KNOWN = tuple(each.name for each in fields(Description))


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
        module: as of :class:`Exported`; of files with several inputs or outputs it takes and returns as many tensors.
        metadata: text by name.
        engine: which runs it.
        device: on which.
    """

    module: EngineModule
    metadata: Mapping[str, str]
    engine: RuntimeName
    device: torch.device

    @property
    def provider(self) -> str:
        """The device that computes: ``CPU``, or ``CUDA``."""
        return self.device.type.upper()


@dataclass(frozen=True)
class Exported:
    """An exported classifier that is ready to run.

    Args:
        module: takes float32 images [B, C, H, W], already normalised, and returns float32 logits [B, K].
        description: what the file says of itself.
        engine: which runs it.
        device: on which.
    """

    module: EngineModule
    description: Description
    engine: RuntimeName
    device: torch.device


def open_exported(path: str | Path, *, device: str = "cpu") -> Exported:
    """Open an exported classifier; arguments as of :func:`open_module`.

    Raises:
        ModelError: no such file, damaged, without a description, or its engine is not installed.
    """
    file = Path(path)
    if file.suffix == ".pt2" and file.is_file():  # code: without a description it is not even opened
        _engine_of(file)
        _describe(_archived_metadata(file), file)
    opened = open_module(file, device=device)
    return Exported(opened.module, _describe(opened.metadata, file), opened.engine, opened.device)


def _describe(metadata: Mapping[str, str], path: Path) -> Description:
    """Return the description in a file's metadata. Raises ModelError where there is none."""
    if KEY not in metadata:
        raise ModelError(
            f"{path} does not describe its images and classes: export it with steady export, which puts them into it"
        )
    return Description.from_json(metadata[KEY], where=str(path))


def open_module(
    path: str | Path,
    *,
    device: str = "cpu",
    threads: int | None = None,
    engine: RuntimeName | None = None,
    numbers: StoredNumbers | None = None,
) -> OpenedModule:
    """Open any exported network, described or not.

    Args:
        path: ``.onnx``, ``.xml``, ``.pt2`` or ``.engine``.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto``: a GPU where the engine finds one.
        threads: of ONNX Runtime and OpenVINO; None: a thread for each core. Torch's engines take
            ``torch.set_num_threads``.
        engine: ``openvino`` for an ``.onnx`` file; None: the usual one for the file.
        numbers: in which OpenVINO computes (``bf16`` where the processor has it); None: as the file was exported.

    Raises:
        ModelError: no such file, damaged, or its engine is not installed.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelError(f"there is no exported file {file}")
    chosen = engine or _engine_of(file)
    threads = threads or facts.cores()
    try:
        if file.suffix == ".onnx":
            _verify_onnx(file)
        if chosen == "onnxruntime":
            return _open_onnxruntime(file, device, threads)
        if chosen == "openvino":
            return _open_openvino(file, device, threads, numbers)
        if chosen == "tensorrt":
            return _open_tensorrt(file, device)
        return _open_torch(file, device, chosen)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{file} is damaged or of another version ({first_line(error)}): export it again") from error


def seal(path: Path, metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return metadata with the checksum of an ``.xml`` file's weights, which lie beside it, or of an ``.engine``."""
    return {**metadata, CHECKSUM: _seal_text(_weights_of(path))}


def seal_onnx(path: Path) -> None:
    """Append the size and the checksum of a complete ``.onnx`` file to it, as one more text of its metadata."""
    text = _seal_text(path)
    with path.open("ab") as file:
        file.write(_SEAL + text.encode())


def _seal_text(path: Path) -> str:
    size = path.stat().st_size
    return f"{size:020} {_digest(path, size)}"


def _verify(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a file whose weights are not those that were sealed. Others of another size pass. Raises ModelError."""
    if path.suffix in (".xml", ".engine") and CHECKSUM in metadata:
        _require_sealed(path, _weights_of(path), _weights_of(path).stat().st_size, metadata[CHECKSUM])


def _verify_onnx(path: Path) -> None:
    """Refuse an ``.onnx`` file that is not as it was sealed. One that another program has written anew passes."""
    size = path.stat().st_size - _SEAL_BYTES
    with path.open("rb") as file:
        file.seek(max(0, size))
        last = file.read()
    if last.startswith(_SEAL):
        _require_sealed(path, path, size, last.removeprefix(_SEAL).decode("ascii", "replace"))


def _weights_of(path: Path) -> Path:
    return path.with_suffix(".bin") if path.suffix == ".xml" else path


def _digest(path: Path, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes of a file."""
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while block := file.read(min(1 << 20, left)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _require_sealed(path: Path, weights: Path, size: int, text: str) -> None:
    """Refuse weights of the size that was sealed, but other bytes: a program that writes them anew keeps the text."""
    sealed, _, written = text.partition(" ")
    if sealed == f"{size:020}" and (actual := _digest(weights, size)) != written:
        raise ModelError(
            f"{path} is damaged: its weights have the SHA-256 {actual[:12]}..., and were written with {written[:12]}"
            "...: export it again"
        )


def require_library(name: str) -> Any:
    """Import a library that an engine needs. Raises ModelError, which says how to install it.

    >>> require_library("json").__name__
    'json'
    """
    if name == "openvino":  # it would report its use to its makers, over the network
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        with _silent_onnxruntime() if name.partition(".")[0] == "onnxruntime" else nullcontext():
            return importlib.import_module(name)
    except ImportError as error:
        extra = _EXTRAS.get(name.partition(".")[0])
        remedy = f'pip install "steadytrain[{extra}]"' if extra else f"pip install {name.partition('.')[0]}"
        raise ModelError(f"{name.partition('.')[0]} is not installed here ({first_line(error)}): {remedy}") from error


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


def _engine_of(path: Path) -> RuntimeName:
    engines: dict[str, RuntimeName] = {".onnx": "onnxruntime", ".xml": "openvino", ".engine": "tensorrt"}
    if path.suffix in engines:
        return engines[path.suffix]
    if path.suffix != ".pt2":
        raise ModelError(f"{path} is no exported file: it must end in {', '.join(SUFFIXES)}")
    try:
        with zipfile.ZipFile(path) as archive:
            is_compiled = any("/aotinductor/" in name for name in archive.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{path} is damaged or no .pt2 file ({first_line(error)}): export it again") from error
    return "aotinductor" if is_compiled else "torch.export"


def _no_device(path: Path, engine: str, device: str, remedy: str) -> ModelError:
    return ModelError(f"{path} cannot run on {device}: {engine} here has no such device; {remedy}")


def _open_onnxruntime(path: Path, device: str, threads: int) -> OpenedModule:
    ort = require_library("onnxruntime")
    has_cuda = "CUDAExecutionProvider" in ort.get_available_providers()
    where = torch.device(("cuda" if has_cuda and torch.cuda.is_available() else "cpu") if device == "auto" else device)
    providers: list[Any] = ["CPUExecutionProvider"]
    stream = None
    if where.type == "cuda":
        if not has_cuda:
            raise _no_device(path, "ONNX Runtime", device, "install onnxruntime-gpu, or take --device cpu")
        stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        on_gpu = {"device_id": where.index or 0, "user_compute_stream": str(stream.cuda_stream)}
        providers.insert(0, ("CUDAExecutionProvider", on_gpu))
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(str(path), options, providers=providers)
    first = session.get_providers()[0]
    if where.type == "cuda" and first != "CUDAExecutionProvider":  # it falls back without an error
        if device != "auto":
            raise ModelError(
                f"{path} cannot run on {device}: ONNX Runtime runs it by its {first}, since its CUDA libraries do not"
                " load here; install the CUDA and cuDNN that this onnxruntime-gpu is built for, or take --device cpu"
            )
        where, stream = torch.device("cpu"), None
    run = _bound_session(ort, session, where, stream)
    return OpenedModule(EngineModule(run), session.get_modelmeta().custom_metadata_map, "onnxruntime", where)


def _bound_session(
    ort: Any, session: Any, where: torch.device, stream: torch.cuda.Stream | None
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that runs a session of ONNX Runtime on tensors where they lie; no host waits for a GPU.

    The shapes of its outputs are learned by the first inputs of a shape, whose outputs come by way of the host.
    """
    takes = [(each.name, _tensor_dtype(each.type)) for each in session.get_inputs()]
    gives = [each.name for each in session.get_outputs()]
    symbols = {dim for each in session.get_inputs() for dim in each.shape if isinstance(dim, str)}
    # Other dimensions, such as the number of boxes, depend on what is in an image.
    is_fixed = all(isinstance(dim, int) or dim in symbols for each in session.get_outputs() for dim in each.shape)
    learned: dict[tuple[torch.Size, ...], list[tuple[torch.Size, torch.dtype]]] = {}
    at_once, lock = ort.RunOptions(), nullcontext() if stream is None else threading.Lock()
    if stream is not None:
        at_once.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        tensors = [
            tensor.detach().to(where, dtype).contiguous() for tensor, (_, dtype) in zip(inputs, takes, strict=True)
        ]
        shapes = tuple(tensor.shape for tensor in tensors)
        binding, place = session.io_binding(), (where.type, where.index or 0)
        for (name, dtype), tensor in zip(takes, tensors, strict=True):
            binding.bind_input(name, *place, _element_type(dtype), list(tensor.shape), tensor.data_ptr())
        with lock, _ordered(stream, tensors):
            if (known := learned.get(shapes)) is not None:
                outputs = [torch.empty(shape, dtype=dtype, device=where) for shape, dtype in known]
                for name, output in zip(gives, outputs, strict=True):
                    element = _element_type(output.dtype)
                    binding.bind_output(name, *place, element, list(output.shape), output.data_ptr())
                session.run_with_iobinding(binding, at_once)
                return outputs
            for name in gives:
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            outputs = [torch.from_numpy(array) for array in binding.copy_outputs_to_cpu()]
        if is_fixed and all(output.numel() for output in outputs):
            learned[shapes] = [(output.shape, output.dtype) for output in outputs]
        return outputs

    return run


def _tensor_dtype(kind: str) -> torch.dtype:
    """Return the numbers of ONNX Runtime's ``tensor(float16)``. Raises ModelError for what is no tensor of numbers."""
    dtype: torch.dtype | None = _TENSORS.get(kind.removeprefix("tensor(").removesuffix(")"))
    if dtype is None:
        raise ModelError(f"its input is a {kind}, and only tensors of {', '.join(_TENSORS)} are passed to it")
    return dtype


def _element_type(dtype: torch.dtype) -> Any:
    """Return numbers as ONNX Runtime's bindings take them: of NumPy's type, or ONNX's number of bfloat16."""
    return 16 if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype.type


@contextmanager
def _ordered(stream: torch.cuda.Stream | None, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Let a GPU's stream of an engine take its place in the order of torch's; None: there is none to wait for."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    yield
    current.wait_stream(stream)
    for tensor in inputs:
        tensor.record_stream(stream)  # its memory is not given to others before the engine has read it


def _open_openvino(path: Path, device: str, threads: int, numbers: StoredNumbers | None) -> OpenedModule:
    openvino = require_library("openvino")
    if device not in ("cpu", "auto"):
        raise _no_device(path, "OpenVINO", device, "take --device cpu")
    core = openvino.Core()
    network = core.read_model(str(path))
    if path.suffix == ".onnx":
        properties = require_library("onnx").load(str(path), load_external_data=False).metadata_props
        metadata = {each.key: each.value for each in properties}
    else:
        values = {name: getattr(value, "value", value) for name, value in network.get_rt_info().items()}
        metadata = {name: value for name, value in values.items() if isinstance(value, str)}
        _verify(path, metadata)
    if numbers is None and KEY in metadata:
        numbers = Description.from_json(metadata[KEY], where=str(path)).numbers
    # Left alone, it computes in bf16 where the processor can, whatever numbers the file has.
    hint = {"bf16": "bf16", "fp16": "f16"}.get(numbers or "fp32", "f32")
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
    request = core.compile_model(network, "CPU", options).create_infer_request()
    outputs = range(len(network.outputs))

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        arrays = [tensor.detach().cpu().contiguous().numpy() for tensor in inputs]
        results = request.infer(arrays, share_inputs=True)
        return [torch.from_numpy(results[number]) for number in outputs]

    return OpenedModule(EngineModule(run), metadata, "openvino", torch.device("cpu"))


def _open_torch(path: Path, device: str, engine: RuntimeName) -> OpenedModule:
    """Open a program of torch.export, or a package of AOTInductor, which is for the device that it was compiled for."""
    with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums of its members
        if (name := archive.testzip()) is not None:
            raise ModelError(f"{path} is damaged: the checksum of {name} in it does not match: export it again")
    metadata = _archived_metadata(path)
    if engine == "aotinductor":
        from torch._inductor import aoti_load_package

        compiled = aoti_load_package(str(path))
        where = torch.device(compiled.get_metadata().get("AOTI_DEVICE_KEY", "cpu"))
        if device != "auto" and torch.device(device).type != where.type:
            raise _no_device(path, "AOTInductor", device, f"it was compiled for {where.type}: export it there")
        call: Callable[..., Any] = compiled
    else:
        program = torch.export.load(str(path))
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        if where.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, str(where))
        call = program.module(check_guards=False)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        outputs = call(*(tensor.to(where).contiguous() for tensor in inputs))
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    return OpenedModule(EngineModule(run), metadata, engine, where)


def _archived_metadata(path: Path) -> dict[str, str]:
    """Read the text by name in a ``.pt2`` file."""
    with zipfile.ZipFile(path) as archive:
        places = {name.rpartition("/extra/")[2]: name for name in archive.namelist() if "/extra/" in name}
        return {name: archive.read(place).decode() for name, place in places.items()}


def _open_tensorrt(path: Path, device: str) -> OpenedModule:
    """Open an engine of TensorRT. Written to its documentation; it has never run, for want of a GPU."""
    trt = require_library("tensorrt")
    where = torch.device("cuda" if device == "auto" else device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise _no_device(path, "TensorRT", device, "it needs an NVIDIA GPU")
    sidecar = path.with_name(f"{path.name}.json")
    metadata = json.loads(sidecar.read_text(encoding="utf-8")) if sidecar.exists() else {}
    _verify(path, metadata)
    with torch.cuda.device(where):
        network = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(path.read_bytes())
        context = network.create_execution_context()
    names = [network.get_tensor_name(number) for number in range(network.num_io_tensors)]
    takes = [name for name in names if network.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    dtypes = {name: _TENSORRT[str(network.get_tensor_dtype(name)).rpartition(".")[2]] for name in names}
    stream = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]  # on the default stream TensorRT waits itself
    return OpenedModule(
        EngineModule(_bound_context(context, takes, dtypes, where, stream)), metadata, "tensorrt", where
    )


def _bound_context(
    context: Any,
    takes: Sequence[str],
    dtypes: Mapping[str, torch.dtype],
    where: torch.device,
    stream: torch.cuda.Stream | None,
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that runs an execution context of TensorRT on tensors where they lie; the host never waits.

    Args:
        context: of the engine.
        takes: names of its inputs; the other names of ``dtypes`` are its outputs.
        dtypes: numbers of each, as the engine tells them.
        where: the device of all.
        stream: that it runs on.
    """
    gives = [name for name in dtypes if name not in takes]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        tensors = [tensor.to(where, dtypes[name]).contiguous() for name, tensor in zip(takes, inputs, strict=True)]
        for name, tensor in zip(takes, tensors, strict=True):
            context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        outputs = [
            torch.empty(tuple(context.get_tensor_shape(name)), dtype=dtypes[name], device=where) for name in gives
        ]
        for name, output in zip(gives, outputs, strict=True):
            context.set_tensor_address(name, output.data_ptr())
        with _ordered(stream, tensors):
            context.execute_async_v3(0 if stream is None else stream.cuda_stream)
        return outputs

    return run
