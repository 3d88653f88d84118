"""One network in one inference engine, in a process of its own: opened, timed, and its outputs compared.

The process answers requests, a dictionary each (:func:`answer_requests`); :class:`Worker` is the caller's side. What
crashes, hangs or takes all memory ends this process only, and the caller gets a sentence.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from steadytrain import models
from steadytrain.config import Model
from steadytrain.data.loader import ImageLoader
from steadytrain.errors import ModelError, SteadyError, did_you_mean, first_line
from steadytrain.export.formats import quantize_onnx, write_onnx, write_openvino, write_tensorrt
from steadytrain.export.networks import NETWORKS, BenchNetwork, settle
from steadytrain.format import tells_top5
from steadytrain.machine import facts
from steadytrain.machine.children import ChildEndedError, ForkServer, serve_forks
from steadytrain.machine.process import keep_memory
from steadytrain.models import Input
from steadytrain.models.class_names import imagenet_synsets, match_classes, names_of_synsets
from steadytrain.models.exported import NO_TELEMETRY, SUFFIXES, open_module
from steadytrain.models.registry import find
from steadytrain.models.weights import load_weights, read_weights
from steadytrain.training import build
from steadytrain.training.data import open_records
from steadytrain.training.inference.trained import restore
from steadytrain.training.precision import to_channels_last

RunEngine = Callable[[Tensor], Any]

MOST_TO_QUANTIZE = 64
"""Samples by which ranges of int8 are found."""
SAMPLES = 8
"""Drawn samples on which outputs are compared, where no images were given."""

START_SECONDS = 600.0
"""For importing torch and what the engines need, from a cold disk."""

SETTLING = 4
"""Samples whose statistics batch norms get."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, of networks that name none."""


@dataclass(frozen=True, kw_only=True)
class InferenceEngine:
    """A way to run a network.

    Args:
        title: as sentences call it.
        numbers: the formats that it computes in.
        needs: the modules that have to be installed beside torch.
        suffix: of the exported file that it runs; empty where it runs the module itself.
        gpu: whether it runs on a GPU: None, on either.
    """

    title: str
    numbers: tuple[str, ...] = ("fp32", "bf16", "fp16")
    needs: tuple[str, ...] = ()
    suffix: str = ""
    gpu: bool | None = None

    def file(self, numbers: str) -> str:
        """Return the name of the file that it runs; empty where it runs the module itself."""
        if numbers == "int8":
            return "int8.onnx"
        return f"{numbers}{self.suffix}" if self.suffix == ".engine" else self.suffix and f"model{self.suffix}"


ENGINES: dict[str, InferenceEngine] = {
    "plain": InferenceEngine(title="torch without its optimised backend", numbers=("fp32",)),
    "eager": InferenceEngine(title="torch"),
    "channels-last": InferenceEngine(title="torch with channels last"),
    "compile": InferenceEngine(title="torch.compile"),
    "onnxruntime": InferenceEngine(
        title="ONNX Runtime", numbers=("fp32", "int8"), needs=("onnxruntime", "onnxscript"), suffix=".onnx"
    ),
    "openvino": InferenceEngine(
        title="OpenVINO", numbers=("fp32", "bf16", "int8"), needs=("openvino",), suffix=".xml", gpu=False
    ),
    "tensorrt": InferenceEngine(
        title="TensorRT", numbers=("fp32", "fp16"), needs=("tensorrt",), suffix=".engine", gpu=True
    ),
}
"""By the name that the command line takes."""


def missing(engine: str, device: str) -> str:
    """Return why an engine cannot be had on a device, ``cpu`` or ``cuda``; empty where it can.

    >>> missing("eager", "cpu"), missing("tensorrt", "cpu")
    ('', 'TensorRT needs an NVIDIA GPU')
    """
    entry = ENGINES[engine]
    if entry.gpu is not None and entry.gpu != (device != "cpu"):
        return f"{entry.title} needs an NVIDIA GPU" if entry.gpu else f"{entry.title} is measured on the CPU only"
    absent = [name for name in entry.needs if importlib.util.find_spec(name) is None]
    return f"{entry.title} is not installed: pip install {' '.join(absent)}" if absent else ""


def usual_numbers(device: str) -> tuple[str, ...]:
    """Return the number formats that a device multiplies fast, fp32 first."""
    if device != "cpu":
        return "fp32", "bf16", "fp16"
    return ("fp32", "bf16") if {"avx512_bf16", "amx_bf16"} & facts.cpu_features() else ("fp32",)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network to be measured, in fp32 on the CPU, in evaluation mode.

    Args:
        input: preprocessing of its images; None where it takes none.
        weights: where they come from, in words; empty where they are drawn.
        classes, synsets: of its outputs, as far as they are known.
    """

    module: nn.Module
    network: BenchNetwork
    input: Input | None
    weights: str = ""
    classes: tuple[str, ...] = ()
    synsets: tuple[str, ...] = ()


def is_pretrained(name: str) -> bool:
    """Return whether a name asks for pretrained weights of timm, which may have to be fetched.

    >>> is_pretrained("timm/resnet18.a1_in1k"), is_pretrained("timm/resnet18"), is_pretrained("resnet50")
    (True, False, False)
    """
    return name.startswith("timm/") and "." in name and "=" not in name and not Path(name).exists()


def load_subject(name: str) -> Subject:
    """Build the network that a user named.

    Args:
        name: of :data:`NETWORKS`; ``timm/NAME`` (with a tag: its pretrained weights), a built-in, ``pkg.mod:factory``;
            a run or a weights file; or ``NAME=FILE``, a network with the weights of a file.

    Raises:
        SteadyError: there is no such network, or its weights do not fit.

    >>> load_subject("dcgan").network.shape
    (100,)
    """
    torch.manual_seed(0)
    network_name, _, file = name.partition("=")
    if network_name in NETWORKS:
        network = NETWORKS[network_name]
        module = network.make()
        if file:
            load_weights(module, read_weights(Path(file)).tensors, head=(), what=f"{file} and {network_name}")
        usual_input = Input(size=network.shape[-1], mean=MEAN, std=STD, crop=0.875) if network.classes else None
        synsets = imagenet_synsets(1000) if file and network.classes else ()
        known = {"classes": names_of_synsets(synsets), "synsets": synsets}
        return Subject(module=module.eval(), network=network, input=usual_input, weights=file, **known)
    if file or Path(name).exists() or is_pretrained(name):
        if Path(file or name).suffix in SUFFIXES:
            raise ModelError(f"{file or name} runs on the engine that it is for alone: name the run or the weights")
        trained = restore(file or name, model=network_name if file else None, device="cpu", numbers="fp32")
        shape = (trained.input.channels, trained.input.size or 224, trained.input.size or 224)
        network = BenchNetwork(title=trained.name, make=lambda: trained.module, shape=shape)
        known = {} if trained.is_multi_label else {"classes": trained.classes, "synsets": trained.synsets}
        return Subject(module=trained.module, network=network, input=trained.input, weights=str(trained.path), **known)
    if "/" in name and ":" not in name and not name.startswith(("timm/", "torchvision/")):
        raise ModelError("there is no such file or folder: name a run, a weights file or a network (steady models)")
    try:
        built = models.build(Model(name), num_classes=1000, channels=3, size=None, allow_import=True)
    except ModelError as error:
        hint = "" if "Did you mean" in str(error) else did_you_mean(name, NETWORKS)
        raise ModelError(f"{error}{hint}") from error
    side = built.input.size or 224
    network = BenchNetwork(title=find(name, allow_import=True).name, make=lambda: built.module, shape=(3, side, side))
    return Subject(module=built.module.eval(), network=network, input=built.input.filled(side, MEAN, STD))


def real_samples(subject: Subject, records: Path, most: int) -> tuple[Tensor, Tensor]:
    """Read images as the network wants them, spread over a record file, and the outputs that are right for them.

    Returns:
        float32 [N, C, H, W], normalised; int64 [N], -1 where the network has no such class, or where it is not known.
    """
    assert subject.input is not None
    with open_records(records) as opened:
        ids = np.unique(np.linspace(0, len(opened) - 1, min(most, len(opened))).astype(np.int64))
        crop = build.evaluation_crop(subject.input)
        with ImageLoader(opened, crop, batch_size=len(ids), ids=ids, train=False) as loader:
            batch = next(iter(loader))
            images = torch.from_numpy(batch.images)
        labels = np.full(len(ids), -1)
        if subject.classes and batch.labels.ndim == 1:
            matches = match_classes(opened.class_list, subject.classes, synsets=subject.synsets)
            outputs = np.array([-1 if match.output is None else match.output for match in matches])
            labels = outputs[batch.labels]
    mean, std = (torch.tensor(values) for values in (subject.input.mean or MEAN, subject.input.std or STD))
    return ((images.float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Agreement of outputs with those of torch in fp32, on the same samples.

    Args:
        n: samples.
        cosine: of the outputs of a sample, the smallest.
        largest_difference: between two outputs.
        top1, top5: share of samples with the same likeliest class, and mean share of the five likeliest that are the
            same; None where the outputs are no scores of classes.
        labelled: samples whose right class is known.
        right1, right5: share of those whose right class is the likeliest, and among the five likeliest; None without
            such samples, and ``right5`` of five classes or fewer.
    """

    n: int
    cosine: float
    largest_difference: float
    top1: float | None = None
    top5: float | None = None
    labelled: int = 0
    right1: float | None = None
    right5: float | None = None


def compare(outputs: Tensor, reference: Tensor, *, classes: bool, labels: Tensor | None = None) -> Parity:
    """Compare outputs [N, ...] with those of the reference, and with labels int64 [N], of which -1 are left out.

    >>> compare(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]]), classes=True)
    Parity(n=1, cosine=0.8, largest_difference=1.0, top1=0.0, top5=1.0, labelled=0, right1=None, right5=None)
    """
    a, b = outputs.double().flatten(1), reference.double().flatten(1)
    norms = (a.norm(dim=1) * b.norm(dim=1)).clamp_min(torch.finfo(torch.float64).tiny)
    cosine = float(((a * b).sum(1) / norms).min())
    top1 = top5 = right1 = right5 = None
    known = torch.zeros(len(a), dtype=torch.bool) if labels is None else labels >= 0
    if classes:
        five = min(5, a.shape[1])
        ours, theirs = a.topk(five).indices, b.topk(five).indices
        top1 = float((ours[:, 0] == theirs[:, 0]).double().mean())
        top5 = float((ours[:, :, None] == theirs[:, None, :]).any(2).double().mean())
        if labels is not None and known.any():
            hits = ours[known] == labels[known][:, None]
            right1 = float(hits[:, 0].double().mean())
            right5 = float(hits.any(1).double().mean()) if tells_top5(a.shape[1]) else None
    largest = float((a - b).abs().max())
    return Parity(
        n=len(a),
        cosine=round(cosine, 7),
        largest_difference=largest,
        top1=top1,
        top5=top5,
        labelled=int(known.sum()) if right1 is not None else 0,
        right1=right1,
        right5=right5,
    )


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Codes for a terminal's colours, which exporters put into their messages."""


class WorkerError(Exception):
    """The failure of a measuring process, in a sentence."""


class Worker:
    """A process that has one engine open. Leaving the context ends it."""

    def __init__(self) -> None:
        try:
            self._child = _server().fork(START_SECONDS, ("timm", "torchvision", "onnxruntime"))
        except ChildEndedError as error:
            _server.cache_clear()
            raise WorkerError(str(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def ask(self, what: str, *, limit_seconds: float, **values: Any) -> dict[str, Any]:
        """Send a request; return its figures. Raises WorkerError if it fails, dies or takes too long."""
        try:
            answer: dict[str, Any] = self._child.ask({"what": what, **values}, limit_seconds)
        except (TimeoutError, ChildEndedError) as error:
            raise WorkerError(str(error)) from error
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process: it goes by itself where it waits for a request."""
        self._child.end()


@cache
def _server() -> ForkServer:
    """Start the server that forks workers, once: it has imported torch and more, and computed nothing."""
    # Not openvino: a thread of its telemetry would hold locks of imports, for which a forked child waits for ever.
    return ForkServer("from steadytrain.export.engines import serve; serve()")


def serve() -> None:
    """Be the server of :class:`Worker`."""
    os.environ.setdefault(NO_TELEMETRY, "1")
    serve_forks(answer_requests)


def answer_requests(connection: Connection) -> None:
    """Answer requests of a connection until it is closed; errors are answers, too."""
    keep_memory(facts.memory_bytes())  # as prediction and the server do
    holder = Holder()
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = getattr(holder, request.pop("what"))(**request)
        except SteadyError as error:
            answer = {"error": _COLOUR.sub("", str(error))}
        except Exception as error:  # noqa: BLE001 - a network, an exporter or an engine may raise anything
            answer = {"error": _sentence(error)}
        connection.send(answer)


def _sentence(error: Exception) -> str:
    """Describe what an engine raised: its kind and its first lines up to a reason, in 200 characters at most.

    >>> _sentence(RuntimeError("Exception from infer.cpp:224:\\nno such shape"))
    'Exception from infer.cpp:224: no such shape'
    """
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    places = next((at for at, line in enumerate(lines) if not line.endswith(":")), 0)
    text = " ".join(lines[: places + 1]) or first_line(error)
    kind = type(error).__name__
    return (text if kind in ("RuntimeError", "Exception") else f"{kind}: {text}")[:200]


class Holder:
    """State of a measuring process. Each method answers one kind of request."""

    def __init__(self) -> None:
        self._began_bytes = facts.resident_bytes()
        self._run: RunEngine | None = None
        self._device = torch.device("cpu")
        self._network: BenchNetwork | None = None
        self._options = contextlib.ExitStack()
        self._together = SAMPLES

    def prepare(
        self, *, name: str, folder: str, records: str | None, most: int, threads: int, labelled: bool = True
    ) -> dict[str, Any]:
        """Build the network, and write its weights, samples and their outputs in fp32 for the engines to come."""
        torch.set_num_threads(threads)
        subject, place = load_subject(name), Path(folder)
        network = subject.network
        if not subject.weights:
            settle(subject.module, network.draw(min(SETTLING, network.most or SETTLING), seed=1))
        if records is not None and subject.input is not None:
            samples, labels = real_samples(subject, Path(records), most)
            labels = labels if labelled else torch.full_like(labels, -1)
        else:
            labels = None
            samples = network.draw(min(SAMPLES, network.most or SAMPLES), seed=2)
        with torch.inference_mode():
            outputs = torch.cat([subject.module(part) for part in torch.split(samples, network.most or SAMPLES)])
        takes = {"shape": network.shape, "kind": network.kind, "most": network.most, "classes": network.classes}
        torch.save(subject.module.state_dict(), place / "state.pt")
        reference = {"samples": samples, "outputs": outputs.float(), "labels": labels, "takes": takes}
        torch.save(reference, place / "reference.pt")
        return {
            **takes,
            "title": network.title,
            "remark": network.remark,
            "comparable": network.comparable,
            "parameters": sum(parameter.numel() for parameter in subject.module.parameters()),
            "weights": subject.weights,
            "real": records is not None and subject.input is not None,
        }

    def convert(self, *, name: str, folder: str, engine: str, numbers: str, threads: int) -> dict[str, Any]:
        """Write the file that an engine runs."""
        torch.set_num_threads(threads)
        began = time.perf_counter()
        write_file(name, Path(folder), engine, numbers)
        return {"seconds": time.perf_counter() - began}

    def open(self, *, name: str, folder: str, engine: str, numbers: str, device: str, threads: int) -> dict[str, Any]:
        """Open an engine with the prepared network and run one sample through it; say what computes."""
        torch.set_num_threads(threads)
        began, place = time.perf_counter(), Path(folder)
        self._device = torch.device(device)
        self._options.enter_context(torch.inference_mode())
        if file := ENGINES[engine].file(numbers):
            opened = open_module(
                place / file,
                device=device,
                threads=threads,
                engine="openvino" if engine == "openvino" else None,
                numbers="bf16" if numbers == "bf16" else None,
            )
            self._run, provider = opened.module, opened.provider
        else:
            provider = self._device.type.upper()
            self._run = self._torch_engine(engine, _module(name, place), numbers)
        reference = _reference(place)
        self._network = BenchNetwork(title=name, make=nn.Identity, **reference["takes"])
        self._pass(reference["samples"][:1].to(self._device))
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak of memory begins anew
        return {"seconds": time.perf_counter() - began, "provider": provider}

    def measure(self, *, batch_size: int, seconds: float) -> dict[str, Any]:
        """Time passes of a batch, for so long; the first, which warms the caches up, counts only if it is alone."""
        network = self._network
        assert network is not None
        batch = network.draw(batch_size).to(self._device)
        end, passes = time.perf_counter() + seconds, list[tuple[float, float]]()
        while not passes or time.perf_counter() < end:
            cpu_began = time.process_time()
            wall = self._pass(batch)
            passes.append((wall, time.process_time() - cpu_began))
        counted = passes[1:] or passes
        return {"seconds": [wall for wall, _ in counted], "cpu_seconds": [cpu for _, cpu in counted]}

    def warm(self, *, batch_size: int) -> dict[str, Any]:
        """Run a batch once: engines compile and allocate for its shape."""
        assert self._network is not None
        return {"seconds": self._pass(self._network.draw(batch_size).to(self._device))}

    def parity(self, *, folder: str) -> dict[str, Any]:
        """Compare outputs with those that :meth:`prepare` wrote."""
        network = self._network
        assert network is not None and self._run is not None
        stored = _reference(Path(folder))
        parts: list[Tensor] = []
        for samples in torch.split(stored["samples"], network.most or self._together):
            output = self._run(samples.to(self._device))
            output = output[0] if isinstance(output, tuple | list) else output
            parts.append(torch.as_tensor(output).float().cpu())
        outputs = torch.cat(parts)
        if outputs.shape != stored["outputs"].shape:
            raise ModelError(f"outputs of shape {list(outputs.shape)}, not {list(stored['outputs'].shape)}")
        return vars(compare(outputs, stored["outputs"], classes=network.classes, labels=stored["labels"]))

    def memory(self) -> dict[str, Any]:
        """Return the peak of memory since the engine was opened, without what the process had before."""
        if self._device.type == "cuda":
            return {"bytes": int(torch.cuda.max_memory_allocated(self._device))}
        return {"bytes": max(0, facts.peak_resident_bytes() - self._began_bytes)}

    def _torch_engine(self, engine: str, module: nn.Module, numbers: str) -> RunEngine:
        """Return a function that runs the module itself."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[numbers]
        module = module.to(self._device, dtype)
        if engine == "plain":
            off = torch.backends.cudnn if self._device.type == "cuda" else torch.backends.mkldnn
            self._options.enter_context(off.flags(enabled=False))
        layout = torch.contiguous_format if engine in ("plain", "eager") else torch.channels_last
        is_last = layout is torch.channels_last
        module = to_channels_last(module) if is_last else module.to(memory_format=layout)
        run: RunEngine = module
        if engine == "compile":
            from torch._inductor import config

            config.freezing = True
            self._together = 1  # for another size it would compile again
            run = torch.compile(module, dynamic=False)

        def call(samples: Tensor) -> Any:
            if samples.is_floating_point():
                samples = samples.to(dtype)
            if samples.ndim == 4:
                samples = samples.contiguous(memory_format=layout)
            return run(samples)

        return call

    def _pass(self, samples: Tensor) -> float:
        began = time.perf_counter()
        assert self._run is not None
        self._run(samples)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began


def _reference(place: Path) -> dict[str, Any]:
    """Read the files of :meth:`Holder.prepare`: ``samples``, their ``outputs``, and what the network ``takes``."""
    stored: dict[str, Any] = torch.load(place / "reference.pt", weights_only=True)
    return stored


def _module(name: str, place: Path) -> nn.Module:
    module = load_subject(name).module
    module.load_state_dict(torch.load(place / "state.pt", weights_only=True))
    return module


def write_file(name: str, place: Path, engine: str, numbers: str) -> None:
    """Write the network as the file of an engine, for batches of any size; int8 from the file in fp32."""
    path, samples = place / ENGINES[engine].file(numbers), _reference(place)["samples"]
    if numbers == "int8":
        source = place / ENGINES["onnxruntime"].file("fp32")
        if not source.exists():
            write_onnx(_module(name, place), samples[:1], source)
        quantize_onnx(source, path, torch.split(samples[:MOST_TO_QUANTIZE], SAMPLES))
    elif path.suffix == ".onnx":
        write_onnx(_module(name, place), samples[:1], path)
    elif path.suffix == ".xml":
        write_openvino(_module(name, place), samples[:1], path)
    else:
        write_tensorrt(_module(name, place), samples[:1], path, numbers="fp16" if numbers == "fp16" else "fp32")
