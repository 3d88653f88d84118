"""Number and memory formats of a network: one :class:`Policy`, and the fp32 masters of 16-bit parameters.

docs/precision.md has what each format keeps and computes in how many bits.

No host synchronisation, as read in torch 2.15: ``GradScaler.step`` calls ``.item()`` on its overflow flag, unless the
optimizer says ``_step_supports_amp_scaling`` (the fused ones do): then scale and flag are handed over as tensors, the
kernel divides by the one and leaves everything as it was where the other is set. ``GradScaler.update`` is a kernel too
(``_amp_update_scale_``). Only ``state_dict`` waits for the device, and an update by an optimizer that is not fused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from steadytrain.config import Precision
from steadytrain.errors import RecipeError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Numbers of 16 bits, by their names."""

_SMALL = 4096
"""Values of an image up to which constants are repeated for every pixel: two times 16 KB."""

_SERIAL = 32768
"""Values from which on torch wakes its other threads, for an operation of each value. Beside other work on the same
cores that takes longer than twice as many values do."""


def name_of(device: torch.device) -> str:
    """Name a device as its maker does; ``cpu`` for any processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else {"mps": "Apple GPU"}.get(device.type, "cpu")


def exact(values: Tensor) -> Tensor:
    """Return numbers as float64: on the CPU, where their device has none."""
    return (values.cpu() if values.is_mps else values).double()


def cpu_multiplies(name: str) -> bool:
    """Return whether this processor has instructions for numbers of 16 bits, ``bf16`` or ``fp16``."""
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: False)())  # no build for Macs has it


def set_products(spec: Precision, device: torch.device) -> None:
    """Have this process multiply fp32 as the recipe's precision says: ``fp32`` exactly, ``tf32`` with tensor cores.

    Torch alone lets a GPU's convolutions use them in either case. 16-bit precisions leave it as it is.
    """
    if device.type == "cuda" and spec.name in ("fp32", "tf32"):
        numbers = "ieee" if spec.name == "fp32" else "tf32"
        restore_products((numbers, numbers, numbers))


def products() -> tuple[str, ...]:
    """Return how this process multiplies fp32 on a GPU: in matrix products, convolutions and recurrent layers."""
    return tuple(backend.fp32_precision for backend in _backends())


def restore_products(numbers: Sequence[str]) -> None:
    """Multiply as :func:`products` returned it.

    Torch has two sets of switches, ``fp32_precision`` and the older ``allow_tf32``. Where only one is set, the others'
    getters raise, and Inductor reads the older ones (torch 2.10 to 2.14): so both are set.
    """
    torch.backends.cuda.matmul.allow_tf32 = numbers[0] == "tf32"
    torch.backends.cudnn.allow_tf32 = numbers[1] == "tf32"
    for backend, value in zip(_backends(), numbers, strict=True):
        if backend.fp32_precision != value:
            backend.fp32_precision = value


def _backends() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


class Policy:
    """Number and memory formats, loss scaling and masters of one network.

    ``notes`` are lines for the user about a choice that costs speed.

    Raises:
        RecipeError: ``fp16`` on a CPU without instructions for it (it would run many times slower than fp32), and
            ``tf32`` on a device without such units.
    """

    def __init__(self, spec: Precision, device: torch.device) -> None:
        remark = _remark(spec, device)
        self.device = device
        self.notes: tuple[str, ...] = () if remark is None else (remark,)
        self.channels_last = spec.channels_last and device.type != "mps"
        self._dtype = DTYPES.get(spec.products)
        self._scaler = torch.amp.GradScaler(device.type) if self._dtype is torch.float16 else None
        self._is_pure = spec.is_pure
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._constants: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """The 16-bit numbers that are multiplied; None: fp32."""
        return self._dtype

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of a forward pass (the loss is better computed in fp32: ``logits.float()``)."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)

    def prepare(self, module: nn.Module, *, moves: bool = True) -> nn.Module:
        """Move a module to the device and lay it out as the policy says; before its optimizer is built.

        ``moves``: False where an engine is to move parts of it, row-major.
        """
        if not moves:
            return module
        if self._is_pure and self._dtype is not None:
            store(module, self._dtype)
        module = module.to(self.device)
        return to_channels_last(module) if self.channels_last else module

    def master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer updates for a parameter of a prepared module: itself, or its fp32 master.

        A master has its parameter's memory format. An update of a 16-bit number by less than a 256th (bf16) or a
        2048th part of it would be lost; the master keeps it.
        """
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        if parameter not in self._masters:
            self._masters[parameter] = nn.Parameter(parameter.detach().float())
        return self._masters[parameter]

    def remark_on(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Add a note where the host waits for the device in each update, to see whether a gradient overflowed."""
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._scaler is not None and self.device.type == "cuda" and not is_fused:
            why = f"{name} is not one of torch's fused optimizers"
            self.notes += (
                f"fp16 waits for the GPU once in each update, to see whether a gradient overflowed ({why}):"
                " --precision bf16 does not",
            )

    def images(self, images_BHWC: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
        """Normalise images: ``(value / 255 - mean) / std``.

        Args:
            images_BHWC: uint8[B, H, W, C].
            mean, std: one value a channel, of values in [0, 1]; None for 0 and 1.

        Returns:
            float32[B, C, H, W] on the device, in channels-last strides if the policy has them.

        Raises:
            RecipeError: the number of values is not that of the images' channels.
        """
        if images_BHWC.device != self.device or not images_BHWC.is_contiguous():
            images_BHWC = images_BHWC.to(self.device, non_blocking=self.device.type == "cuda").contiguous()
        _, h, w, c = images_BHWC.shape
        scale, shift = self._scale_and_shift(tuple(mean or (0.0,) * c), tuple(std or (1.0,) * c), (h, w, c))
        if (
            self.device.type == "cpu"
            and _SERIAL <= images_BHWC.numel() < 2 * _SERIAL
            and not torch.compiler.is_compiling()
            and torch.get_num_threads() > 1
        ):
            values = torch.empty(images_BHWC.shape)
            for some, pixels in zip(values.chunk(2), images_BHWC.chunk(2), strict=True):
                torch.addcmul(shift, some.copy_(pixels), scale, out=some)
        elif self.device.type == "cpu":
            values = images_BHWC.to(torch.float32)
            torch.addcmul(shift, values, scale, out=values)
        else:
            values = torch.addcmul(shift, images_BHWC, scale)
        images = values.permute(0, 3, 1, 2)
        return images if self.channels_last else images.contiguous()

    def _scale_and_shift(
        self, mean: tuple[float, ...], std: tuple[float, ...], shape: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor]:
        """Scale and shift of values 0 to 255, float32, repeated over whole images if they are small, else over a row.

        Broadcast over C alone, the innermost loop has three turns and takes ten times as long on a CPU; over an image
        of few pixels it is one, of constants that stay in a core's cache.
        """
        key = (mean, std, shape)
        if key not in self._constants:
            height, width, channels = shape
            if len(mean) != channels or len(std) != channels:
                raise RecipeError(
                    f"data.mean has {len(mean)} values and data.std {len(std)}, and the images have {channels}"
                    f" channel{'s' * (channels > 1)}: give one value for each"
                )
            wide = torch.tensor([mean, std], dtype=torch.float64)
            pair = torch.stack([1 / (255 * wide[1]), -wide[0] / wide[1]]).to(torch.float32)
            rows = height if height * width * channels <= _SMALL else 1
            repeated = pair[:, None, None].expand(-1, rows, width, -1).contiguous()
            if self.device.type == "cuda":  # page-locked, or the host would wait for what the GPU has to do before
                repeated = repeated.pin_memory()
            self._constants[key] = tuple(repeated.to(self.device, non_blocking=True))
        return self._constants[key]

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call ``backward`` on."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the masters' gradients to their true size, to be clipped or measured; at most once before a step."""
        self._move_gradients()
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    @torch.no_grad()
    def _move_gradients(self) -> None:
        """Move each 16-bit parameter's gradient to its master."""
        stored, masters = [], []
        for parameter, master in self._masters.items():
            if parameter.grad is None:
                continue  # moved already, or it took no part
            if master.grad is None:
                master.grad = torch.empty_like(master)
            stored.append(parameter.grad)
            masters.append(master.grad)
            parameter.grad = None
        if stored:
            torch._foreach_copy_(masters, stored)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights, unless a scaled gradient overflowed; then adapt the scale, and drop the gradients."""
        if self._masters:
            self._move_gradients()
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, how long it has held, and the masters, where there are any. Waits for the device."""
        masters = {str(number): master.detach() for number, master in enumerate(self._masters.values())}
        scale = {} if self._scaler is None else self._scaler.state_dict()
        return scale | ({"masters": masters} if masters else {})

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; the parameters' own values come with the network's."""
        scale = dict(state)
        saved = scale.pop("masters", {})
        for number, master in enumerate(self._masters.values()):
            master.copy_(saved[str(number)])
        if self._scaler is not None:
            self._scaler.load_state_dict(scale)


def to_channels_last(module: nn.Module) -> nn.Module:
    """Lay out a module's tensors of four dimensions as NHWC; others, such as those of volumes, have no such layout.

    >>> to_channels_last(nn.Conv3d(1, 2, 3)).weight.is_contiguous()
    True
    """
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and tensor.dim() == 4:
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return module


def store(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert all floating-point parameters and buffers of a module to ``dtype``, but for those of batch norms.

    Their statistics are sums over many values, and their kernels take fp32 ones beside 16-bit images.

    >>> net = store(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.bfloat16)
    >>> net[0].weight.dtype, net[1].weight.dtype, net[1].running_mean.dtype
    (torch.bfloat16, torch.float32, torch.float32)
    """
    for part in module.modules():
        if isinstance(part, _NormBase) or isinstance(vars(part).get("forward"), _InFp32):
            continue
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module


def compute_in_fp32(module: nn.Module, policy: Policy) -> None:
    """Give a module of a 16-bit network a forward that computes in fp32; its own parameters in 16 bits become fp32.

    Its result has 16 bits, as the rest of the network expects. To be called before the network's optimizer is built.
    """
    assert policy.dtype is not None
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.dtype == policy.dtype:
            tensor.data = tensor.data.float()
    vars(module)["forward"] = _InFp32(module, policy.device.type, policy.dtype)


class _InFp32:
    """A forward in fp32. Copies of a network have copies of it."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        self.module, self.device_type, self.dtype = module, device_type, dtype
        self.before = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or partial(type(self.module).forward, self.module)
        if not torch.is_autocast_enabled(self.device_type):
            return forward(*args, **kwargs)
        args, kwargs = tree_map(partial(_convert, self.dtype, torch.float32), (args, kwargs))
        with torch.autocast(self.device_type, enabled=False):
            out = forward(*args, **kwargs)
        return tree_map(partial(_convert, torch.float32, self.dtype), out)


def _convert(before: torch.dtype, after: torch.dtype, leaf: object) -> object:
    return leaf.to(after) if isinstance(leaf, Tensor) and leaf.dtype == before else leaf


def _remark(spec: Precision, device: torch.device) -> str | None:
    name = spec.products
    if name == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        device_name = "a CPU" if device.type == "cpu" else f"a {name_of(device)}"
        raise RecipeError(
            f"precision.name is 'tf32', which {device_name} does not have: use fp32 (NVIDIA has it since Ampere)"
        )
    if name in ("fp32", "tf32"):
        return None
    if device.type == "mps":
        raise RecipeError(
            f"precision.name is {spec.name!r}, and --device mps computes in fp32 alone: use --precision fp32"
        )
    if device.type == "cuda":
        if name == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"this GPU has no bf16 instructions: --precision {spec.name.replace('bf16', 'fp16')} is faster here"
        return None
    if name == "fp16" and not cpu_multiplies(name):
        raise RecipeError(
            f"precision.name is {spec.name!r} and this CPU has no instructions for it: use fp32 (or a GPU)"
        )
    if name == "bf16" and not cpu_multiplies(name):
        return (
            "this CPU has no instructions for bf16 and emulates it, about ten times slower: --precision fp32 is better"
        )
    return None
