"""A GPU that is not there: the product's own code runs on it, and what would keep the host waiting is written down.

The host is real: its tensors have values, its threads run. What lies on the device has shape, dtype, strides and place
alone (torch's FakeTensorMode), and nothing is computed. So a run can be as it is, with transforms, autocast, backward
pass, optimizer, average and copies, where there is no driver; what it cannot show is values, speed and races.

Read back, each of a device's numbers is 1: what a set-up decides by such values is made up. While ``is_watching``,
these are faults, each with the place that asked for it:

- a wait for the device: a value that the host reads, a shape that depends on values, ``synchronize``;
- a copy that waits: without ``non_blocking``, or from memory that is not page-locked;
- an event that is recorded without a stream, or in the stream of another GPU;
- an operation on tensors of several devices.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

COUNT = 8
"""GPUs of the machine."""

_READS = {"aten::_local_scalar_dense", "aten::equal"}
_VALUE_SHAPES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive"}
_COPIES = {"aten::_to_copy", "aten::copy_"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_IN_PLACE = ("aten::_fused_", "aten::_amp_")
"""Kernels of optimizers and of loss scaling, which change what they are given; torch has no fake of them."""

_ELSEWHERE = (str(Path(torch.__file__).parent), str(Path(__file__)), str(Path(mock.__file__)))
_ONES = {torch.bool: True}


class Fault(NamedTuple):
    """What should not be in an update, and the innermost place outside of torch that asked for it."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} ({self.place})"


class Stream:
    """A stream of a pretended GPU: an order of work that nobody does."""

    def __init__(self, gpu: FakeGpu, device: object = None) -> None:
        self.device = gpu.resolve(device)
        self._gpu = gpu

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.note("a wait: Stream.synchronize")


class Event:
    """An event: it has passed as soon as it is recorded."""

    def __init__(self, gpu: FakeGpu, **options: Any) -> None:
        self._gpu = gpu
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter()
        if stream is None:
            self._gpu.note("an event without a stream")
        elif stream.device != self._gpu.device:
            self._gpu.note(f"an event in a stream of {stream.device}, and the run is on {self._gpu.device}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.note("a wait: Event.synchronize")

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other._at - self._at)


class _Fake(FakeTensorMode):  # type: ignore[misc]
    """Torch's mode, told that there is no driver to ask, though ``torch.cuda.is_available()`` says otherwise."""

    avoid_device_init = True


class FakeGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One of :data:`COUNT` GPUs, on which a run is.

    ``is_watching``: write down faults. ``raises``: raise a RuntimeError instead, as ``torch.cuda`` does under
    ``set_sync_debug_mode("error")``. ``faults``: what was met so far.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = torch.device("cuda", index)
        self.faults: list[Fault] = []
        self.current = 0
        self.is_watching = self.raises = False
        self._thread = threading.get_ident()
        self._fake = _Fake(allow_non_fake_inputs=True)
        self._streams: dict[torch.device, Stream] = {}
        self._pinned: list[torch.UntypedStorage] = []

    def note(self, what: str) -> None:
        """Write a fault down, or raise it, if the update is watched."""
        if threading.get_ident() != self._thread or not (self.is_watching or self.raises):
            return
        fault = Fault(what, _place())
        if self.raises:
            raise RuntimeError(str(fault))
        self.faults.append(fault)

    def set_sync_debug_mode(self, mode: str) -> None:
        """Raise at each fault, or no longer."""
        self.raises = mode == "error"

    def resolve(self, device: object = None) -> torch.device:
        """Return a device with its number: the current one where none is named."""
        if device is None:
            return torch.device("cuda", self.current)
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))
        return found if found.index is not None else torch.device("cuda", self.current)

    # -- operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        to = kwargs.get("device")
        if not on_device and (to is None or torch.device(to).type != "cuda"):
            return func(*args, **kwargs)
        if name in _READS:
            self.note(f"a wait: {name.removeprefix('aten::')} of {_words(on_device[0])}")
            return torch.ones((), dtype=on_device[0].dtype).item() if name != "aten::equal" else True
        if name in _VALUE_SHAPES:
            self.note(f"a wait: {name.removeprefix('aten::')} of {_words(on_device[0])}")
        elif name in _COPIES:
            self._check_copy(name, args, kwargs)
        else:
            self._check_places(name, args, tensors)
        if name.startswith(_IN_PLACE):
            return args[0] if name == "aten::_amp_update_scale_" else None
        if name == "aten::copy_" and not isinstance(args[0], FakeTensor):
            return args[0].fill_(1)
        with self._fake:
            out = func(*args, **kwargs)
        return tree_map_only(FakeTensor, _on_host, out)

    def _check_copy(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        source = args[1] if name == "aten::copy_" else args[0]
        target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or source.device)
        if target == source.device:
            return
        pair = f"{_words(source)} to {target}"
        if "cpu" not in (target.type, source.device.type):
            self.note(f"several devices: a copy of {pair}")
        elif not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])):
            self.note(f"a blocking copy of {pair}")
        elif source.device.type == "cuda" and name == "aten::_to_copy":
            pass  # torch makes page-locked memory for it
        elif not self._is_pinned(source if source.device.type == "cpu" else args[0]):
            self.note(f"a pageable copy of {pair}")

    def _check_places(self, name: str, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        if name in _INDEXED and args[0].device.type == "cuda":
            for index in (part for part in args[1] if part is not None):
                if index.device.type == "cpu":
                    self.note(f"a blocking copy of {_words(index)}, an index of {_words(args[0])}")
                if index.dtype in (torch.bool, torch.uint8):
                    self.note(f"a wait: nonzero of {_words(index)}, an index")
            tensors = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        places = {str(tensor.device) for tensor in tensors if tensor.dim() or tensor.device.type == "cuda"}
        if len(places) > 1:
            self.note(f"several devices: {name} of tensors on {' and '.join(sorted(places))}")

    # -- memory that is page-locked -----------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> Tensor:
        """Take a tensor's memory for page-locked from now on."""
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(memory.data_ptr() <= at < memory.data_ptr() + max(1, memory.nbytes()) for memory in self._pinned)

    # -- what torch asks of a device ----------------------------------------------------------------------------------

    def stream(self, device: object = None) -> Stream:
        """Return the current stream of a device."""
        where = self.resolve(device)
        return self._streams.setdefault(where, Stream(self, where))

    @contextmanager
    def within(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one of its device, and that the current device."""
        if stream is None:
            yield
            return
        before, current = self.stream(stream.device), self.current
        self._streams[stream.device], self.current = stream, stream.device.index
        try:
            yield
        finally:
            self._streams[stream.device], self.current = before, current

    def set_device(self, device: object) -> None:
        """Make a device the current one."""
        self.current = self.resolve(device).index

    @contextmanager
    def on(self, device: object) -> Iterator[None]:
        """Make a device the current one meanwhile."""
        before, self.current = self.current, self.resolve(device).index
        try:
            yield
        finally:
            self.current = before

    def _stubs(self) -> dict[str, Any]:
        """Return what stands in for the functions of ``torch.cuda`` meanwhile."""
        facts = SimpleNamespace(
            name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132
        )

        def properties(device: object = None) -> SimpleNamespace:
            return SimpleNamespace(**vars(facts), uuid=f"GPU-fake-{self.resolve(device).index}")

        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: COUNT,
            "current_device": lambda: self.current,
            "set_device": self.set_device,
            "device": self.on,
            "_sleep": lambda cycles: None,
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "get_device_capability": lambda device=None: (facts.major, facts.minor),
            "get_device_name": lambda device=None: facts.name,
            "get_device_properties": properties,
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_current_stream_capturing": lambda: False,
            "Stream": lambda device=None, **options: Stream(self, device),
            "Event": lambda **options: Event(self, **options),
            "stream": self.within,
            "current_stream": self.stream,
            "default_stream": self.stream,
            "synchronize": lambda device=None: self.note("a wait: torch.cuda.synchronize"),
            "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device=None: None,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "mem_get_info": lambda device=None: (0, facts.total_memory),
            **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda device=None: None),
            **dict.fromkeys(
                ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
                lambda device=None: 0,
            ),
        }

    @contextmanager
    def _stubbed(self) -> Iterator[None]:
        empty, new_generator, address = torch.empty, torch.Generator, torch.UntypedStorage.data_ptr

        def empty_pinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            made = empty(*sizes, **options)
            return self.pin(made) if pin_memory else made

        def generator(device: object = "cpu") -> torch.Generator:
            return new_generator()

        with ExitStack() as stack:
            for name, stub in self._stubs().items():
                stack.enter_context(mock.patch.object(torch.cuda, name, stub))
            for target, name, stub in (
                (torch, "empty", empty_pinned),
                (torch, "Generator", generator),
                (Tensor, "pin_memory", lambda tensor, device=None: self.pin(tensor.clone())),
                (Tensor, "is_pinned", lambda tensor, device=None: self._is_pinned(tensor)),
                (Tensor, "record_stream", lambda tensor, stream: None),
                (torch.UntypedStorage, "data_ptr", lambda storage: address(storage) or storage._cdata),
                (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
                (torch.autograd, "_engine_run_backward", run_backward),
            ):
                stack.enter_context(mock.patch.object(target, name, stub))
            yield


@contextmanager
def fake_gpu(index: int = 0) -> Iterator[FakeGpu]:
    """Pretend that this machine has :data:`COUNT` GPUs; the run is to be on the one of this index.

    What lies there is this thread's alone. Nothing is free on it, so that a loader copies no images there by itself.
    """
    gpu, lifts_cpu_alone = FakeGpu(index), torch._C._only_lift_cpu_tensors()
    torch._C._ensureCUDADeviceGuardSet()  # or torch asks the driver, which device is the current one
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made here, and copied
    try:
        with gpu._stubbed(), gpu:
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_alone)


def run_backward(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Do what autograd's engine does, one node after another: it asks the driver for streams, and there is none.

    The nodes are torch's own: what they compute, save and add up is that of any backward pass.
    """
    roots: list[Any] = [tensor.grad_fn for tensor in tensors]
    waits: Counter[Any] = Counter()
    stack, seen = list(roots), set(roots)
    while stack:
        for node, _ in stack.pop().next_functions:
            waits[node] += 1
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    given: defaultdict[Any, dict[int, Tensor]] = defaultdict(dict)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        given[tensor.grad_fn][tensor.output_nr] = gradient if gradient is not None else torch.ones_like(tensor)
    ready = list(dict.fromkeys(roots))
    with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", lambda: 1):  # recomputing asks for it
        while ready:
            node = ready.pop()
            inputs, number = given.pop(node, {}), len(node._input_metadata)
            outputs = node(*map(inputs.get, range(number))) if inputs else ()
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            for k, (after, place) in enumerate(node.next_functions):
                if after is None:
                    continue
                if k < len(outputs) and outputs[k] is not None:
                    _add_gradient(given[after], place, outputs[k], after._input_metadata[place])
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
    return ()


def _add_gradient(gradients: dict[int, Tensor], place: int, gradient: Tensor, wanted: Any) -> None:
    """Add a gradient to those of a node, in the shape and the numbers of what it is the gradient of."""
    if gradient.shape != wanted.shape:
        gradient = gradient.sum_to_size(wanted.shape)
    gradient = gradient.to(wanted.dtype)
    assert gradient.device == wanted.device, f"a gradient on {gradient.device} of a tensor on {wanted.device}"
    gradients[place] = gradients[place] + gradient if place in gradients else gradient


def _on_host(tensor: FakeTensor) -> Tensor:
    """Return what an operation left on the host as a real tensor, of ones."""
    return tensor if tensor.device.type == "cuda" else torch.ones(tensor.shape, dtype=tensor.dtype)


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_ELSEWHERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
