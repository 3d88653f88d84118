"""Find the network that a file of weights is of, by the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadytrain.config import Model
from steadytrain.config.factories import checkpoint_format
from steadytrain.errors import ModelError
from steadytrain.files import read_table
from steadytrain.format import few
from steadytrain.models.build import build, make_network
from steadytrain.models.registry import BUILT_IN, ModelSource, find, torchvision_names
from steadytrain.models.weights import NETWORK_ERRORS, find_mismatches, read_weights, without_prefixes

_NUM_CLASSES = 997  # that no layer but the classifier is likely to have
_LEAST_SHARED = 0.5
"""The least share of a file's tensors that a family's network must have for it to be tried."""


def find_model(path: Path, say: Callable[[str], None] = lambda message: None) -> str:
    """Return the name of the network whose tensors are called and shaped as a file's, the classifier's aside.

    What the file's name, or a ``config.json`` beside it, mentions is tried first, and taken if it fits. Else all
    networks are tried whose family shares names with the file, which takes some ten seconds; they are built without
    values.

    Raises:
        ModelError: the file cannot be read; or no network fits, or several do.
    """
    file = read_weights(path)
    if file.model:
        return file.model
    architecture = read_table(path.with_name("config.json")).get("architecture", "")  # as the hub has it beside weights
    hint = f"{path.parent.name} {path.name} {architecture}"
    families = _families()
    names = [*BUILT_IN, *(name for names in families.values() for name in names)]
    mentioned = [
        name for name in names if re.search(rf"(?<![a-z0-9]){re.escape(name.rpartition('/')[2])}(?![a-z0-9])", hint)
    ]
    longest_first = sorted(mentioned, key=lambda name: -len(name.rpartition("/")[2]))
    if name := next(_fitting(longest_first, file.tensors), None):
        return name
    say(
        f"{path} does not say which model's weights it holds: looking for a network with such tensors, which takes some"
        " ten seconds (--model NAME spares it)"
    )
    near = [name for family in _near_families(families, file.tensors) for name in family]
    fits = list(_fitting([*BUILT_IN, *near], file.tensors))
    ours_or_timms = [name for name in fits if not name.startswith("torchvision/")]
    candidates = ours_or_timms or fits  # torchvision may have the same network
    if len(candidates) == 1:
        return candidates[0]
    finding = f"its tensors fit {few(fits, 8)}" if fits else "no network of steady models has such tensors"
    raise ModelError(f"{path} does not say which model's weights it holds, and {finding}: name it with --model NAME")


def require_fit(source: ModelSource, model: Model, *, size: int | None) -> None:
    """Refuse a file of weights that is not one, or does not fit its network, before any image is read.

    Where names and shapes agree, no values are needed, so that this is quick; foreign files are left for later.

    Raises:
        ModelError: as of :func:`~steadytrain.models.build.build`.
    """
    path = Path(str(model.weights))
    if source.kind not in ("timm", "torchvision", "built-in") or checkpoint_format(path.name):
        return
    file = read_weights(path)
    if source.kind == "built-in" and file.input is None:  # the images decide its shapes
        return
    target, head = _tensors(source, model.options)
    if not target or find_mismatches(file.tensors, target, head):
        channels = 3 if file.input is None else file.input.channels
        with torch.random.fork_rng(devices=[]):
            build(model, num_classes=_NUM_CLASSES, channels=channels, size=size)


def _families() -> Mapping[str, Sequence[str]]:
    """Return the names of timm's and torchvision's networks by the module that defines them."""
    import timm.models

    families: dict[str, list[str]] = defaultdict(list)
    for name in timm.models.list_models():
        families[timm.models.model_entrypoint(name).__module__].append(f"timm/{name}")
    for name in torchvision_names():
        import torchvision

        families[torchvision.models.get_model_builder(name).__module__].append(f"torchvision/{name}")
    return families


def _near_families(families: Mapping[str, Sequence[str]], state: Mapping[str, Tensor]) -> Iterable[Sequence[str]]:
    """Return the families whose shortest-named network is most like a file, the nearest first: :data:`_LEAST_SHARED`.

    A deeper network of a family has more tensors, a wider one larger ones: names and kernels count, by the smaller of
    the two.
    """
    shared = {}
    for family, names in families.items():
        target = _tensors(find(min(names, key=len)))[0]
        plain = without_prefixes(state, target)
        same = [name for name, value in plain.items() if name in target and _kernel(value) == _kernel(target[name])]
        shared[family] = len(same) / max(1, min(len(plain), len(target)))
    nearest_first = sorted(shared, key=lambda family: -shared[family])
    return [families[family] for family in nearest_first if shared[family] >= _LEAST_SHARED]


def _kernel(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.ndim, *tensor.shape[2:])


def _fitting(names: Iterable[str], state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the networks, of those of these names, that a file's tensors fill."""
    for name in names:
        target, head = _tensors(find(name))
        if target and not find_mismatches(state, target, head):
            yield name


def _tensors(
    source: ModelSource, options: Mapping[str, Any] | None = None
) -> tuple[Mapping[str, Tensor], tuple[str, ...]]:
    """Return the tensors of a network, without values, and its classifier; nothing where it cannot be built so."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model = Model(source.name, options=dict(options or {}))
            built = make_network(source, model, num_classes=_NUM_CLASSES, channels=3, size=None)
    except (ModelError, *NETWORK_ERRORS):
        return {}, ()
    return built.module.state_dict(), built.head
