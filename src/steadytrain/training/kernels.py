"""Kernels that compute wrongly: each product of a network is tried once before it is trained, in 16 bits and in fp32.

torch leaves convolutions and matrix products to libraries (oneDNN, cuDNN), whose kernels differ by shape, number format
and processor; now and then one of them returns memory that nobody set. In a run that is a loss of NaN, or weights that
are wrong without a word. So a pass of a few images shows which products there are, each distinct one is computed on
drawn numbers in both formats, forwards and backwards, and the modules whose results differ by more than rounding
compute in fp32 from then on. What was found is kept in the cache for the machine, torch's version and the shapes.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadytrain.format import count
from steadytrain.machine import facts
from steadytrain.machine.facts import cache_folder
from steadytrain.models.weights import NETWORK_ERRORS
from steadytrain.training.precision import Policy, compute_in_fp32, name_of
from steadytrain.training.state import in_mode, preserve_buffers, preserve_process

TOLERANCE = 0.03
"""Largest difference from fp32, as a share of the largest value. Sound kernels stay below 0.005 in bf16, and what is
not set gives anything."""
OPERATIONS, PER_VALUE, LEAST_IMAGES = 2e7, 40.0, 2
"""A product is tried on as many images of a micro-batch as these multiplications, or this number for each value of the
images, allow, and on two at least. Kernels go wrong at the edges of small images, so many small ones are tried.
"""
SECONDS = 5.0
"""Seconds after which no further product is tried, the small ones first."""
ROUNDS = 2
"""Tries of a small product: what memory held before differs in each."""

_IMAGES_IN = {"aten::convolution": (0,), "aten::addmm": (1,), "aten::mm": (0,), "aten::bmm": (0, 1)}
"""Products that are tried, with the arguments whose first dimension is of images."""


@dataclass(frozen=True)
class _Drawn:
    """A tensor to be drawn: its shape, and its dimensions in their order in memory."""

    shape: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A convolution or a matrix product, by its shapes: ``arguments`` are those of ``name``, with tensors described."""

    name: str
    arguments: tuple[Any, ...]

    @property
    def tensors(self) -> list[_Drawn]:
        return [argument for argument in self.arguments if isinstance(argument, _Drawn)]

    def of_images(self, images: int) -> Product:
        """Return the same product of so many images, instead of :data:`LEAST_IMAGES`."""
        arguments = list(self.arguments)
        for place in _IMAGES_IN[self.name]:
            shape, order = arguments[place].shape, arguments[place].order
            if shape[0] % LEAST_IMAGES == 0:
                arguments[place] = _Drawn((shape[0] // LEAST_IMAGES * images, *shape[1:]), order)
        return Product(self.name, tuple(arguments))

    @property
    def multiplications(self) -> float:
        """About how many a forward pass makes."""
        if self.name == "aten::convolution":
            image, weight, _, stride = self.arguments[:4]
            return float(math.prod(image.shape) / image.shape[1] * math.prod(weight.shape) / math.prod(stride))
        first, second = self.tensors[-2:]
        return math.prod(first.shape) * second.shape[-1]


def _is_narrow(product: Product) -> bool:
    """Return whether images are narrower than the stride of a kernel with taps that see only padding."""
    if product.name != "aten::convolution" or product.arguments[6]:
        return False
    image, weight, _, stride, padding = product.arguments[:5]
    return bool(image.shape[-1] < stride[-1] and weight.shape[-1] > 1 and padding[-1] > 0)


KNOWN: tuple[tuple[str, torch.dtype, Callable[[Product], bool]], ...] = (
    # torch 2.14.1 with its oneDNN, on CPUs with AVX-512 bf16: the weight gradient is not set in taps that see only
    # padding.
    ("cpu", torch.bfloat16, _is_narrow),
)
"""Kernels that are known to compute wrongly: on which device, in which numbers, of which products. What memory held
before decides whether a trial shows it."""


def mend_kernels(
    module: nn.Module,
    policy: Policy,
    shapes: Sequence[tuple[int, int, int]],
    *,
    images: int,
    sum_ranks: Callable[[Tensor], Tensor] = lambda flags: flags,
) -> list[str]:
    """Have those modules compute in fp32 whose 16-bit kernels compute wrongly here; return a line about it, if any.

    No number of the network changes, and no bit of what is sound.

    Args:
        module: prepared by the policy; in no optimizer yet.
        policy: says in which numbers it computes. In fp32 there is nothing to try.
        shapes: heights, widths and channels of the images that it will see.
        images: of a micro-batch.
        sum_ranks: sums a tensor over the ranks, which all compute alike; each calls it once.
    """
    dtype = policy.dtype
    if dtype is None:
        return []
    parts = dict(module.named_modules())
    with preserve_process(policy.device), preserve_buffers(module):
        used = products_of(module, policy, shapes)
        wrong = _wrong_products([*used], images, dtype, policy.device)
    affected = {name for product in wrong for name in used[product]}
    flags = torch.tensor([float(name in affected) for name in parts], device=policy.device)
    names = [name for name, flag in zip(parts, sum_ranks(flags).tolist(), strict=True) if flag]
    for name in names:
        compute_in_fp32(parts[name], policy)
    if not names:
        return []
    numbers = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    which = ", ".join(name or "the whole network" for name in names[:3]) + ", ..." * (len(names) > 3)
    what = f" ({_words(wrong[0])})" if wrong else ""
    return [
        f"{count(len(names), 'layer is', 'layers are')} computed in fp32: {which}{what}: the {numbers} kernels that"
        f" torch {torch.__version__} has for this machine compute them wrongly; --precision fp32 computes all so"
    ]


def products_of(module: nn.Module, policy: Policy, shapes: Sequence[tuple[int, int, int]]) -> dict[Product, list[str]]:
    """Return the 16-bit products of a network and the names of the modules that compute each, as two images show.

    Both modes are looked at: in training, a network may leave out parts. What a network refuses, it will refuse in the
    first pass, and is not told here.
    """
    watch = _Products()
    with ExitStack() as hooks, suppress(*NETWORK_ERRORS, MemoryError), in_mode(module, "training"), torch.no_grad():
        for name, part in module.named_modules():
            hooks.callback(part.register_forward_pre_hook(partial(watch.enter, name)).remove)
            hooks.callback(part.register_forward_hook(watch.leave, always_call=True).remove)
        for is_training in (False, True):
            module.train(is_training)
            for shape in shapes:
                images = policy.images(torch.zeros(LEAST_IMAGES, *shape, dtype=torch.uint8), None, None)
                with policy.autocast(), watch:
                    module(images)
    return watch.products


class _Products(TorchDispatchMode):
    """A mode that keeps each 16-bit product and which module computed it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: dict[Product, list[str]] = {}
        self._stack: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of training.profile.step_cost.Operations

    def enter(self, name: str, *_: object) -> None:
        self._stack.append(name)

    def leave(self, *_: object) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in _IMAGES_IN and not kwargs and self._stack and _is_16_bit(args):
            names = self.products.setdefault(Product(name, tuple(map(_described, args))), [])
            if self._stack[-1] not in names:
                names.append(self._stack[-1])
        return func(*args, **(kwargs or {}))


def _is_16_bit(args: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) for value in args)


def _described(value: Any) -> Any:
    """Describe an argument by what can be compared."""
    if isinstance(value, Tensor):
        return _Drawn(tuple(value.shape), tuple(sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])))
    return tuple(value) if isinstance(value, list) else value


def _wrong_products(products: list[Product], images: int, dtype: torch.dtype, device: torch.device) -> list[Product]:
    """Return those that are known or seen to be computed wrongly on this machine."""
    known = [matches for kind, numbers, matches in KNOWN if kind == device.type and numbers == dtype]
    wrong = [product for product in products if any(matches(product) for matches in known)]
    tried = sorted({_resized(product, images) for product in products if product not in wrong}, key=repr)
    if not tried:
        return wrong
    cache = cache_folder()
    machine = facts.cpu_model() if device.type == "cpu" else name_of(device)
    key = [machine, torch.__version__, torch.get_num_threads(), str(dtype), *map(repr, tried)]
    file = None if cache is None else cache / "kernels" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"
    names: set[str] | None = None
    if file is not None:
        with suppress(OSError, ValueError, TypeError):
            names = set(json.loads(file.read_text(encoding="utf-8")))
    if names is None:
        names, until = set(), time.perf_counter() + SECONDS
        for product in sorted(tried, key=lambda product: product.multiplications):
            if time.perf_counter() > until:
                file = None
                break
            if differs(product, dtype, device):
                names.add(repr(product))
        if file is not None:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(sorted(names)), encoding="utf-8")
    return [*wrong, *(product for product in products if repr(_resized(product, images)) in names)]


def _resized(product: Product, images: int) -> Product:
    """Return a product of as many images as are tried."""
    values = math.prod(product.arguments[_IMAGES_IN[product.name][0]].shape)
    each = max(product.multiplications, PER_VALUE * values) / LEAST_IMAGES
    return product.of_images(max(LEAST_IMAGES, min(images, int(OPERATIONS / each))))


def differs(product: Product, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a product in ``dtype``, or one of its gradients, differs from fp32 by more than rounding.

    A product that cannot be computed so alone, or has no memory, does not.

    >>> conv = (_Drawn((2, 8, 9, 9), (0, 2, 3, 1)), _Drawn((4, 8, 3, 3), (0, 1, 2, 3)), None)
    >>> sound = Product("aten::convolution", (*conv, (1, 1), (1, 1), (1, 1), False, (0, 0), 1))
    >>> differs(sound, torch.bfloat16, torch.device("cpu"))
    False
    """
    generator, convolves = torch.Generator().manual_seed(0), product.name == "aten::convolution"
    tensors = [_draw(tensor, generator).to(device) for tensor in product.tensors]
    weight = tensors[1 if convolves else -1]
    weight *= (weight[0].numel() if convolves else weight.shape[-2]) ** -0.5  # so that results are about 1
    rounded = [tensor.to(dtype) for tensor in tensors]
    try:
        right = _with_gradients(product, [tensor.float() for tensor in rounded])
        for _ in range(ROUNDS if product.multiplications <= OPERATIONS else 1):
            _spoil_memory([*right, *rounded], dtype)
            if not all(map(_is_near, _with_gradients(product, rounded), right)):
                return True
    except (RuntimeError, MemoryError):
        return False
    return False


def _draw(tensor: _Drawn, generator: torch.Generator) -> Tensor:
    """Draw numbers of mean 0 and variance 1, laid out in memory as they were seen."""
    values = torch.randn([tensor.shape[dim] for dim in tensor.order], generator=generator)
    return values.permute(*(tensor.order.index(dim) for dim in range(len(tensor.shape))))


def _with_gradients(product: Product, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Compute a product, and the gradient of each of its tensors where that of the result is drawn, the same always."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    drawn = iter(inputs)
    arguments = [next(drawn) if isinstance(value, _Drawn) else value for value in product.arguments]
    operation = getattr(torch.ops.aten, product.name.removeprefix("aten::"))
    with torch.enable_grad():
        value: Tensor = operation(*arguments)
    order = _described(value)
    slope = _draw(order, torch.Generator().manual_seed(1)).to(value.device, tensors[0].dtype)
    return [value.detach(), *torch.autograd.grad(value, inputs, slope)]


def _spoil_memory(like: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Fill memory that the allocator gives out next with NaN: what a kernel does not set is seen."""
    junk = [torch.full_like(tensor, math.nan, dtype=kind) for tensor in like for kind in (dtype, torch.float32)]
    del junk


def _is_near(value: Tensor, right: Tensor) -> bool:
    """Return whether a result is the one in fp32 but for rounding; NaN never is."""
    return bool((value.float() - right).abs().max() <= TOLERANCE * right.abs().max())


def _words(product: Product) -> str:
    """Describe a product for the user."""
    if product.name != "aten::convolution":
        return " by ".join("x".join(map(str, tensor.shape)) for tensor in product.tensors[-2:])
    image, weight, _, stride = product.arguments[:4]
    sides, of = ("x".join(map(str, tensor.shape[2:])) for tensor in (weight, image))
    step = stride[0] if len(set(stride)) == 1 else "x".join(map(str, stride))
    return f"{sides}, stride {step}, on maps of {of}"
