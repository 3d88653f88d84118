"""The table of optimizers, by name, on the fused kernels where torch has them."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from steadytrain.config import Optim, factories
from steadytrain.config.factories import FACTORY, find_row, import_factory, row_names
from steadytrain.errors import RecipeError, did_you_mean, first_line

Groups: TypeAlias = list[dict[str, Any]]
Class = TypeVar("Class", bound=Optimizer)

_FUSED = ("cpu", "cuda")
"""Kinds of devices for which torch updates all tensors of a group in one kernel; of Adagrad's, the CPU alone."""


def eager(kind: type[Class]) -> type[Class]:
    """Derive the same optimizer, whose methods never import ``torch.compile``'s part of torch, which takes seconds.

    Torch keeps these methods out of compiled programs by wrappers that import the compiler when they are first called
    (0.9 s with torch 2.14 on two cores, 2.2 s from a cold disk). No compiled program of ours has an optimizer in it, so
    the methods here are those behind the wrappers.

    >>> optimizer = eager(SGD)([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> isinstance(optimizer, SGD), type(optimizer).__name__
    (True, 'SGD')
    """
    wrapped = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    step: Callable[..., Any] = inspect.unwrap(kind.step)
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(step)})


def sgd(
    groups: Groups,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> SGD:
    """Stochastic gradient descent with (Nesterov) momentum: ``m = momentum * m + g``, ``w -= lr * (g + momentum * m)``.

    Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning", in the form of
    ``torch.optim.SGD``; ``g`` includes ``weight_decay * w``. A change of rate acts at once on the whole momentum.
    Without momentum there is no state, and ``nesterov`` means nothing.

    The momentum starts as zeros rather than at the first step, which comes to the same: torch's fused kernel
    allocates it uninitialised at the first step, and leaves it so if fp16's loss scaling skips that step.
    """
    nesterov = nesterov and momentum > 0
    optimizer = eager(SGD)(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused, foreach=foreach)
    if momentum > 0:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def muon(groups: Groups, *, lr: float, **options: Any) -> Optimizer:
    """Momentum whose matrices are made orthogonal: Jordan et al. 2024, "Muon: An optimizer for hidden layers".

    timm's code, which takes every shape: filters are flattened to ``[out, in * height * width]``, and norms, biases and
    other vectors are updated by AdamW at the same rate (``torch.optim.Muon`` refuses both). Updates have the size of
    AdamW's (``adjust_lr_fn="match_rms_adamw"``), so that its learning rates and weight decays fit.
    """
    from timm.optim import Muon  # type: ignore[attr-defined]

    optimizer: Optimizer = Muon(groups, lr=lr, **options)
    return optimizer


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of the table.

    Args:
        make: called with groups, ``lr``, the ``constants`` and the recipe's ``optim.options``.
        decay: ``coupled`` weight decay is added to the gradient (L2); ``decoupled`` is taken off the weights beside it.
        constants: keys of ``recipe.Optim`` that it takes.
        fused: kinds of devices on which torch updates all tensors of a group in one kernel.
        takes_seed: draws random numbers, by the recipe's seed.
    """

    make: Callable[..., Optimizer]
    decay: Literal["coupled", "decoupled"]
    constants: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    takes_seed: bool = False


_ADAM = ("betas", "eps")

OPTIMIZERS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind(sgd, "coupled", ("momentum", "nesterov"), fused=_FUSED),
    "nag": OptimizerKind(partial(sgd, nesterov=True), "coupled", ("momentum",), fused=_FUSED),
    "adam": OptimizerKind(eager(torch.optim.Adam), "coupled", _ADAM, fused=_FUSED),
    "adamw": OptimizerKind(eager(torch.optim.AdamW), "decoupled", _ADAM, fused=_FUSED),
    "nadam": OptimizerKind(eager(torch.optim.NAdam), "coupled", _ADAM),
    "radam": OptimizerKind(eager(torch.optim.RAdam), "coupled", _ADAM),
    "adamax": OptimizerKind(eager(torch.optim.Adamax), "coupled", _ADAM),
    "rmsprop": OptimizerKind(eager(torch.optim.RMSprop), "coupled"),
    "adagrad": OptimizerKind(eager(torch.optim.Adagrad), "coupled", fused=("cpu",)),
    "adadelta": OptimizerKind(eager(torch.optim.Adadelta), "coupled"),
    "muon": OptimizerKind(muon, "decoupled"),
}
"""Optimizers by name; MXNet's, and other packages', are rows of the group ``steadytrain.optimizers``."""


def find_kind(name: str) -> OptimizerKind | None:
    """Return the row of an optimizer; None for timm's and the user's own. Raises InputError: it cannot be loaded."""
    return OPTIMIZERS.get(name) or find_row(factories.OPTIMIZERS, name, OptimizerKind)


def kinds() -> dict[str, OptimizerKind]:
    """Return all rows by name: ours, and other packages'. Raises InputError: one cannot be loaded."""
    names = (*OPTIMIZERS, *row_names(factories.OPTIMIZERS))
    return {name: kind for name in names if (kind := find_kind(name)) is not None}


_NOT_OPTIONS = {
    "params",
    "groups",
    "lr",
    "weight_decay",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
    "maximize",
}


def check_name(name: str) -> None:
    """Refuse an optimizer that there is not. Raises RecipeError with the nearest names."""
    if name in OPTIMIZERS or name in row_names(factories.OPTIMIZERS) or FACTORY.fullmatch(name):
        return
    from timm import optim as timm_optim

    known = timm_optim.list_optimizers()  # type: ignore[attr-defined]
    plain = name.removeprefix("timm/")
    if plain not in known:
        near = did_you_mean(name, [*OPTIMIZERS, *(f"timm/{optimizer}" for optimizer in known)])
        raise RecipeError(f"there is no optimizer {name!r}.{near} The built-in ones: {', '.join(OPTIMIZERS)}")
    if plain == name:
        raise RecipeError(f"optim.name is {name!r}, which is one of timm's: write timm/{name}")
    if timm_optim.get_optimizer_info(plain).second_order:  # type: ignore[attr-defined]
        raise RecipeError(f"optim.name is {name!r}, which needs second derivatives: choose another one")


def build(
    spec: Optim,
    groups: Groups,
    *,
    lr: float,
    device: torch.device,
    seed: int = 0,
    allow_import: bool = False,
) -> Optimizer:
    """Make the optimizer that the recipe names.

    Its ``state_dict`` comes back bit for bit, in the parameters' own memory format whatever format it was saved in:
    torch's fused kernels walk parameter and state in memory order, and would pair the wrong elements otherwise.

    Args:
        spec: name, constants and ``options``. An optimizer takes ``options``, and those of the recipe's constants that
            its row names; one of timm's has timm's defaults.
        groups: from :func:`steadytrain.models.parameter_groups`; parameters already on ``device`` and in their
            final memory format.
        lr: the peak learning rate; each group's own is ``lr * lr_scale``.
        device: where the parameters are.
        seed: of the noise of optimizers that add some.
        allow_import: import a ``pkg.mod:factory``, which is called with groups, ``lr`` and ``options``; only if the
            user's own code or command line named it.

    Raises:
        RecipeError: there is no such optimizer, ``options`` are not its own, or a factory may not be imported.
    """
    assert all(p.device.type == device.type for group in groups for p in group["params"]), "parameters not on device"
    check_name(spec.name)
    constants: dict[str, Any] = dict(spec.options)
    make: Callable[..., Optimizer]
    kind = find_kind(spec.name)
    if FACTORY.fullmatch(spec.name):
        what = {"key": "optim.name", "flag": "--optimizer", "what": "an optimizer"}
        make = import_factory(spec.name, **what, allow_import=allow_import)
    elif kind is None:
        from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]

        make = partial(create_optimizer_v2, opt=spec.name.removeprefix("timm/"))
    else:
        make = kind.make
        constants = {name: getattr(spec, name) for name in kind.constants} | constants
        is_part = any(
            hasattr(p, "full_tensor") for group in groups for p in group["params"]
        )  # torch has no kernel for it
        is_fused = device.type in kind.fused and not constants.get("foreach") and not is_part
        constants |= {"fused": True} if is_fused else {}
        constants |= {"seed": seed} if kind.takes_seed and "seed" not in constants else {}
    parameters = {id(parameter) for group in groups for parameter in group["params"]}
    try:
        optimizer = make(groups, lr=lr, **constants)
    except (TypeError, ValueError, AssertionError, ImportError) as error:
        options = ", ".join(f"{name}={value!r}" for name, value in spec.options.items())
        takes = "" if kind is None else ", ".join(sorted(set(inspect.signature(make).parameters) - _NOT_OPTIONS))
        raise RecipeError(
            f"optim.name={spec.name} with optim.options {options or '(none)'} is refused: {first_line(error)}"
            f"{takes and f' (its options: {takes})'}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        made = type(optimizer).__name__
        raise RecipeError(f"optim.name={spec.name} made a {made}: it must be a torch.optim.Optimizer")
    if parameters != {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
        raise RecipeError(f"optim.name={spec.name} left parameters out: pass it all groups that the factory is given")
    optimizer.register_load_state_dict_post_hook(_match_memory_formats)
    set_lr(optimizer, lr)
    return optimizer


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give each group ``lr`` times its own ``lr_scale``: host numbers, so nothing waits for the device.

    Rounded as a float32, which is what a graph of an update finds in the device's memory.
    """
    for group in optimizer.param_groups:
        group["lr"] = ctypes.c_float(lr * group.get("lr_scale", 1.0)).value


def set_momentum(optimizer: Optimizer, momentum: float) -> None:
    """Give each group this momentum, or this first beta where it has betas."""
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = (momentum, *group["betas"][1:])
        else:
            group["momentum"] = momentum


def _match_memory_formats(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
