"""One network in one inference engine, in a process of its own: opened, timed, and its outputs compared.

The process calls methods of :class:`BenchEngine` as it is asked; :class:`Worker` is the caller's side. What crashes,
hangs or takes all memory ends this process only, and the caller gets a sentence.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import update_bn

from steadytrain.errors import InputError, ModelError, SteadyError
from steadytrain.export.formats import write_module
from steadytrain.export.networks import NETWORKS, load_network, real_samples
from steadytrain.files import Closing
from steadytrain.format import tells_top5
from steadytrain.intervals import quantiles
from steadytrain.machine import facts
from steadytrain.machine.children import ChildEndedError, ForkServer, serve_forks
from steadytrain.machine.platform import peak_resident_bytes
from steadytrain.machine.process import keep_memory, return_free_memory
from steadytrain.models.engines.engine import NO_TELEMETRY
from steadytrain.models.exported import engines, open_module
from steadytrain.training.precision import DTYPES, to_channels_last

SAMPLES = 8
"""Drawn samples on which outputs are compared, where no images were given; and samples in a pass."""
MOST_TO_QUANTIZE = 64
"""Samples by which ranges of int8 are found."""
LONGEST_PASS = 8.0
"""Seconds of a pass: a batch that would take longer is measured with fewer samples."""
START_SECONDS, OPEN_SECONDS, ASK_SECONDS = 600.0, 1500.0, 600.0
"""Seconds that a start, from a cold disk, opening an engine, which may compile, and other requests may take."""

_TORCH = {"plain": ("fp32",), **dict.fromkeys(("eager", "channels-last", "compile"), ("fp32", "bf16", "fp16"))}


def bench_engines() -> dict[str, tuple[str, ...]]:
    """Return the number formats of the engines that are measured: torch's ways to run a module, then those of files.

    >>> list(bench_engines().items())[:2]
    [('plain', ('fp32',)), ('eager', ('fp32', 'bf16', 'fp16'))]
    """
    # Torch's own files are what eager runs.
    return {**_TORCH, **{name: row.precisions for name, row in engines().items() if row.packages}}


def missing(engine: str, device: str) -> str:
    """Return why an engine cannot be had on a device, ``cpu`` or ``cuda``; empty where it can.

    >>> missing("eager", "cpu"), missing("openvino", "cuda")
    ('', 'OpenVINO runs on cpu only')
    """
    if engine in _TORCH:
        return ""
    row = engines()[engine]
    if device not in row.devices:
        return f"{row.title} runs on {' or '.join(row.devices)} only"
    absent = [name for name in row.packages if importlib.util.find_spec(name) is None]
    return f"{row.title} is not installed: pip install {' '.join(absent)}" if absent else ""


@dataclass(frozen=True)
class BatchSpeed:
    """Passes of one batch size: their number, percentiles in seconds, and samples per second over all of them.

    ``cpu_seconds`` of all threads of the process, of a pass (median): on a busy machine they say more than the clock.
    """

    batch_size: int
    passes: int
    p50_seconds: float
    p99_seconds: float
    per_second: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Agreement of outputs with those of torch in fp32, on the same ``n`` samples.

    Args:
        cosine: of the outputs of a sample, the smallest.
        largest_difference: between two outputs.
        top1, top5: share of samples with the same likeliest class, and mean share of the same five likeliest.
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


def compare(outputs: Tensor, reference: Tensor, labels: Tensor | None = None) -> Parity:
    """Compare logits [N, K] with those of the reference, and with labels int64 [N], of which -1 are left out.

    >>> compare(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]]))
    Parity(n=1, cosine=0.8, largest_difference=1.0, top1=0.0, top5=1.0, labelled=0, right1=None, right5=None)
    """
    a, b = outputs.double(), reference.double()
    ours, theirs = (logits.topk(min(5, a.shape[1])).indices for logits in (a, b))
    parity = Parity(
        n=len(a),
        cosine=round(float(functional.cosine_similarity(a, b).min()), 7),
        largest_difference=float((a - b).abs().max()),
        top1=float((ours[:, 0] == theirs[:, 0]).double().mean()),
        top5=float((ours[:, :, None] == theirs[:, None, :]).any(2).double().mean()),
    )
    if labels is None or not (known := labels >= 0).any():
        return parity
    hits = (ours[known] == labels[known][:, None]).double()
    right5 = float(hits.sum(1).mean()) if tells_top5(a.shape[1]) else None
    return replace(parity, labelled=len(hits), right1=float(hits[:, 0].mean()), right5=right5)


@dataclass(frozen=True, kw_only=True)
class InferencePlan:
    """The measurements to make: engines with their numbers (or why they cannot be had), batch sizes, and so on.

    ``records``: a record file or a folder, so many ``images`` of which outputs are compared on; None: drawn samples.
    ``seconds``: for each engine and batch size.
    """

    engines: Mapping[tuple[str, str], str]
    device: str
    batches: tuple[int, ...] = (1, 32)
    threads: int = field(default_factory=facts.cores)
    seconds: float = 2.0
    records: str | None = None
    images: int = 64


class BenchTask(NamedTuple):
    """The work of a measuring process: a network, the folder of its files, and an engine with its numbers."""

    name: str
    folder: str
    plan: InferencePlan
    engine: str = "eager"
    numbers: str = "fp32"


class Worker(Closing):
    """A process that has one engine open. Its first failure ends it, and is its ``error``: a sentence."""

    def __init__(self, task: BenchTask, error: str = "") -> None:
        self.task, self.error = task, error
        if not error:
            try:
                self._child = _server().fork(START_SECONDS, ("timm", "torchvision", "onnxruntime"))
            except ChildEndedError as ended:
                _server.cache_clear()
                self.error = str(ended)

    def close(self) -> None:
        if not self.error:
            self._child.end()

    def ask(self, what: str, **values: Any) -> Any:
        """Return the answer of a method of :class:`BenchEngine`; once that or the process has failed, an empty one.

        Of a first failure it says whether that ``is_mistake``, of the user's.
        """
        if self.error:
            return {}
        try:
            seconds = OPEN_SECONDS if what == "open" else ASK_SECONDS
            self.error, answer = self._child.ask((self.task, what, values), seconds)
        except (TimeoutError, ChildEndedError) as error:
            self.error, answer = str(error), {}
        if self.error:
            self._child.end()
        return answer


@cache
def _server() -> ForkServer:
    """Start the server that forks workers, once: it has imported torch and more, and computed nothing."""
    # Not openvino: a thread of its telemetry would hold locks of imports, for which a forked child waits for ever.
    return ForkServer("from steadytrain.export.engines import serve; serve()")


def serve() -> None:
    """Be the server of :class:`Worker`."""
    os.environ.setdefault(NO_TELEMETRY, "1")
    serve_forks(_answer_requests)


def _answer_requests(connection: Connection) -> None:
    """Answer requests of a connection until it is closed, each by an error or a result."""
    keep_memory(facts.memory_bytes())  # as prediction and the server do
    engine: BenchEngine | None = None
    while True:
        try:
            task, what, values = connection.recv()
        except (EOFError, OSError):
            return
        try:
            engine = engine or BenchEngine(task)
            connection.send(("", getattr(engine, what)(**values)))
        except Exception as error:  # noqa: BLE001 - a network, an exporter or an engine may raise anything
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # exporters put a terminal's colours into their messages
            words = f"{type(error).__name__}: {' '.join(text.split())}"[:200]
            is_mistake = what == "prepare" and isinstance(error, InputError)
            connection.send((text if isinstance(error, SteadyError) else words, {"is_mistake": is_mistake}))


class BenchEngine:
    """A network in an engine, in a measuring process. Each public method answers one kind of request."""

    def __init__(self, task: BenchTask) -> None:
        torch.set_num_threads(task.plan.threads)
        self._task, self._device = task, torch.device(task.plan.device)
        self._state, self._reference = Path(task.folder, "state.pt"), Path(task.folder, "reference.pt")
        self._began_bytes = facts.resident_bytes()
        self._passes: dict[int, list[tuple[float, float]]] = {}  # seconds, and those of processors, by batch size

    def prepare(self) -> dict[str, Any]:
        """Build the network, and write its weights, samples and their outputs in fp32 for the engines to come."""
        name, plan = self._task.name, self._task.plan
        network, labels = load_network(name), None
        size, module, is_drawn = network.input.size or 224, network.module, not network.path.name
        shape = (network.input.channels, size, size)
        if is_drawn:  # else activations grow from layer to layer, until they overflow half precision
            update_bn([_draw(shape, SAMPLES, seed=1)], module)
            module.eval()
        samples = _draw(shape, SAMPLES, seed=2)
        if plan.records is not None:
            samples, labels = real_samples(network, plan.records, plan.images)
        with torch.inference_mode():
            outputs = torch.cat([module(part) for part in torch.split(samples, SAMPLES)]).float()
        torch.save(module.state_dict(), self._state)
        torch.save({"samples": samples, "outputs": outputs, "labels": labels}, self._reference)
        return {
            "title": NETWORKS.get(name.partition("=")[0], (network.name,))[0],
            "shape": shape,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "weights": "" if is_drawn else str(network.path),
            "real": plan.records is not None,
        }

    def open(self) -> None:
        """Open the engine with the prepared network, its file written first, and run one sample through it."""
        began, task, row = time.perf_counter(), self._task, engines().get(self._task.engine)
        samples: Tensor = torch.load(self._reference, weights_only=True)["samples"]
        self._shape, self._provider = samples.shape[1:], self._device.type.upper()
        module = load_network(task.name).module
        module.load_state_dict(torch.load(self._state, weights_only=True))
        if row is None:
            self._run = self._torch_engine(module)
        else:
            file = Path(task.folder, f"{task.engine}-{task.numbers}{row.suffix}")
            parts, numbers = torch.split(samples[:MOST_TO_QUANTIZE], SAMPLES), {"numbers": task.numbers}
            write_module(module, samples[:1], file, engine=row, calibration=lambda: parts, **numbers)  # type: ignore[arg-type]
            del module
            gc.collect()
            return_free_memory()
            self._began_bytes = facts.resident_bytes()
            options: dict[str, Any] = {"device": task.plan.device, "threads": task.plan.threads}
            options["precision"] = task.numbers
            opened = open_module(file, engine=task.engine, **options)
            self._run, self._provider = opened.module, opened.provider
        torch.inference_mode().__enter__()  # to the end of the process
        self._pass(samples[:1].to(self._device))
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak of memory begins anew
        self._open_seconds = time.perf_counter() - began

    def begin(self, batch_size: int) -> None:
        """Warm the engine up for a batch size, or for fewer samples where it is slow."""
        slowest = max((median(wall for wall, _ in passes) / n for n, passes in self._passes.items()), default=0.0)
        is_slow = batch_size * slowest > LONGEST_PASS
        size = 2 ** int(math.log2(max(1.0, LONGEST_PASS / slowest))) if is_slow else batch_size
        self._batch = _draw(self._shape, size).to(self._device)
        self._pass(self._batch)

    def measure(self, seconds: float) -> list[tuple[float, float]]:
        """Time passes of the batch, for so long; the first, which warms the caches up, counts only if it is alone."""
        end, passes = time.perf_counter() + seconds, list[tuple[float, float]]()
        while not passes or time.perf_counter() < end:
            cpu_began = time.process_time()
            wall = self._pass(self._batch)
            passes.append((wall, time.process_time() - cpu_began))
        self._passes.setdefault(len(self._batch), []).extend(passes[1:] or passes)
        return passes[1:] or passes

    def finish(self) -> dict[str, Any]:
        """Sum the turns up, and compare outputs; return values of an EngineSpeed."""
        memory = max(0, peak_resident_bytes() - self._began_bytes)
        if self._device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._device)
        batches = []
        for size, passes in self._passes.items():
            walls, processors = map(list, zip(*passes, strict=True))
            p50, p99 = quantiles(walls, 0.5, 0.99)
            batches.append(BatchSpeed(size, len(walls), p50, p99, size * len(walls) / sum(walls), median(processors)))
        figures = {"batches": tuple(batches), "memory_bytes": memory, "parity": self.parity()}
        return figures | {"open_seconds": self._open_seconds, "provider": self._provider}

    def parity(self) -> Parity:
        """Compare outputs with those of :meth:`prepare`."""
        stored = torch.load(self._reference, weights_only=True)
        together = 1 if self._task.engine == "compile" else SAMPLES  # for another size it would compile again
        parts = [self._run(part.to(self._device)) for part in torch.split(stored["samples"], together)]
        outputs = torch.cat([part.float().cpu() for part in parts])
        if outputs.shape != stored["outputs"].shape:
            raise ModelError(f"outputs of shape {list(outputs.shape)}, not {list(stored['outputs'].shape)}")
        return compare(outputs, stored["outputs"], stored["labels"])

    def _torch_engine(self, module: nn.Module) -> Callable[[Tensor], Any]:
        """Return a function that runs the module itself."""
        engine, dtype = self._task.engine, DTYPES.get(self._task.numbers, torch.float32)
        assert engine in _TORCH, f"there is no engine {engine}"
        if engine == "plain":  # to the end of the process
            torch.backends.mkldnn.enabled = torch.backends.cudnn.enabled = False  # type: ignore[assignment]
        layout = torch.contiguous_format if engine in ("plain", "eager") else torch.channels_last
        module = module.to(self._device, dtype).to(memory_format=torch.contiguous_format)
        run: Callable[[Tensor], Any] = module if layout is torch.contiguous_format else to_channels_last(module)
        if engine == "compile":
            from torch._inductor import config

            config.freezing = True
            run = torch.compile(run, dynamic=False)
        return lambda samples: run(samples.to(dtype).contiguous(memory_format=layout))

    def _pass(self, samples: Tensor) -> float:
        began = time.perf_counter()
        self._run(samples)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began


def _draw(shape: tuple[int, ...], num: int, seed: int = 0) -> Tensor:
    """Draw samples, the same for a seed: float32 [num, C, H, W]."""
    return torch.randn((num, *shape), generator=torch.Generator().manual_seed(seed))
