"""Modules and functions that Python code gives as models, and the names by which recipes call them.

A recipe is data, so it holds a name. A function that can be imported is ``pkg.mod:function``, in every process. A
module, and a function without such a place (a lambda, one inside another function), is ``object:KIND-DIGEST``: it is
found in the process to which it was given, and a later process has to give it again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from steadytrain.config.factories import FACTORY, OBJECT
from steadytrain.errors import ModelError, describe_type
from steadytrain.models.weights import NORMS

Given: TypeAlias = str | nn.Module | Callable[..., nn.Module]
"""A model: its name, a module, or a function that makes one, called as a ``pkg.mod:factory`` is."""

_GIVEN: dict[str, Any] = {}
"""Objects that were given in this process, by name; of two alike (the same layers, shapes and norms) the later one."""


def name_model(model: Given) -> str:
    """Return the name of a model for a recipe, and keep an object that is found by nothing else.

    Raises:
        ModelError: it is none of these, or a class of modules.

    >>> name_model("resnet20"), name_model(nn.Flatten()).partition("-")[0]
    ('resnet20', 'object:Flatten')
    """
    if isinstance(model, str):
        return model
    if not callable(model):
        raise ModelError(f"the model is {describe_type(model)}; it must be a name, a torch.nn.Module or a function")
    if isinstance(model, nn.Module):
        shapes = [(key, *value.shape) for key, value in model.named_parameters() if not nn.parameter.is_lazy(value)]
        kind, content = type(model).__name__, f"{model!r} {shapes} {_norms_digest(model)}"
    else:
        if (path := _import_path(model)) is not None:
            return path
        base: Any = model.func if isinstance(model, partial) else model
        kind = getattr(base, "__qualname__", type(base).__name__).rpartition(".")[2].strip("<>")
        code = getattr(base, "__code__", None)
        arguments = (model.args, sorted(model.keywords.items())) if isinstance(model, partial) else ()
        content = f"{kind} {None if code is None else (code.co_code, code.co_names)} {arguments}"
    name = f"{OBJECT}{kind}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    _GIVEN[name] = model
    return name


def find_given(name: str) -> Any:
    """Return the module or function of a name ``object:...``.

    Raises:
        ModelError: it was not given in this process.
    """
    if name not in _GIVEN:
        kind = name.removeprefix(OBJECT).rpartition("-")[0]
        raise ModelError(
            f"{name} is a Python object ({kind}), and was not given in this process: give it again, in Python as in the"
            " call that began the run (the same call resumes it), or to use its weights as model= of st.restore; on the"
            " command line evaluate, predict and export take --model pkg.mod:factory, a function that makes it"
        )
    return _GIVEN[name]


def _norms_digest(module: nn.Module) -> str:
    """Tell networks that were trained apart by the values of their norms, which are the same in all fresh ones."""
    digest = hashlib.sha256()
    for part in module.modules():
        if isinstance(part, NORMS):
            for value in part.state_dict().values():
                if not nn.parameter.is_lazy(value):
                    digest.update(value.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def _import_path(function: Callable[..., Any]) -> str | None:
    """Return ``pkg.mod:name`` where that is this function; None elsewhere."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    path = f"{module}:{name}"
    is_there = FACTORY.fullmatch(path) and getattr(sys.modules.get(str(module)), name, None) is function
    return path if is_there else None
