"""Weights: reading a file of them without running anything that is in it, and loading them into a network.

A ``.safetensors`` file holds tensors alone. A ``.pth`` file is a pickle, which can run code: it is read by torch's
restricted reader (``weights_only=True``) and refused where that does not suffice. Loading accounts for every key; the
classifier stays fresh where the file's is for other classes.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from steadytrain.config.factories import checkpoint_format
from steadytrain.config.parts import ImageFit
from steadytrain.config.plain import check_types
from steadytrain.errors import ModelError, first_line
from steadytrain.files import near_name, require_content
from steadytrain.format import few
from steadytrain.models.class_names import OutputNames, imagenet_names, match_classes
from steadytrain.models.tensor_file import read_tensors

NETWORK_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ArithmeticError)
"""Errors that networks and their constructors raise for options, images and weights that they cannot take."""

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that normalize: their parameters and statistics begin with the same values in every network."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """The preprocessing that a model's weights were trained for; None where nothing says so.

    Args:
        size: side of the square images in pixels.
        mean, std: of each channel, of values in [0, 1].
        crop: evaluation takes the centre ``crop`` share of the shorter side, or of both sides, as ``fit`` says.
        interpolation: ``bilinear`` or ``bicubic``.
        channels: 1 (grey) or 3 (RGB).
        fit: how images become square: ``crop``, ``squash`` or ``pad``, as ``data.fit`` of a recipe.
    """

    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: float | None = None
    interpolation: str | None = None
    channels: int = 3
    fit: ImageFit = "crop"

    def __post_init__(self) -> None:
        check_types(self, "input")

    def filled(self, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Input:
        """A copy without None: these values, a crop of 0.875 and bilinear interpolation where nothing was said.

        >>> Input(size=160, channels=1).filled(224, (0.5,), (0.25,)).size
        160
        """
        return replace(
            self,
            size=self.size or size,
            mean=self.mean or mean,
            std=self.std or std,
            crop=self.crop or 0.875,
            interpolation=self.interpolation or "bilinear",
        )

    def with_channels(self, channels: int) -> Input:
        """A copy for images of another number of channels: a grey image gets the mean of the colours' values.

        >>> Input(mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2)).with_channels(1).mean
        (0.5,)
        """
        if channels == self.channels:
            return self
        mean, std = (values and (sum(values) / len(values),) * channels for values in (self.mean, self.std))
        return replace(self, mean=mean, std=std, channels=channels)


def find_head(module: nn.Module, num_classes: int) -> tuple[str, ...]:
    """Find the last linear layer or convolution that has ``num_classes`` outputs; empty if there is none."""
    names = [
        name
        for name, part in module.named_modules()
        if name
        and (
            (isinstance(part, nn.Linear) and part.out_features == num_classes)
            or (isinstance(part, nn.Conv2d) and part.out_channels == num_classes)
        )
    ]
    return tuple(names[-1:])


@torch.no_grad()
def reset_head(module: nn.Module, head: tuple[str, ...]) -> None:
    """Draw a classifier that begins almost without an opinion: weights of standard deviation 0.01, biases 0.

    What networks draw for themselves can be meant for training from scratch: timm's MobileNetV2 begins with weights up
    to 0.3 for ten classes, hence a loss of 7 where chance has 2.3, and the first updates tear the body apart (40 % on
    a thousand photographs after six epochs instead of 80 %). Not zero, because some classifiers end in a ReLU.
    """
    for name in head:
        part = module.get_submodule(name)
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.weight.normal_(std=0.01)
            if part.bias is not None:
                part.bias.zero_()


def head_note(before: int | None, now: int) -> str:
    """Return a note on a classifier that was not loaded; ``before`` is None or 0 if there was none."""
    if before:
        return f"the classifier of {before:,} classes was replaced by a fresh one for {now:,}"
    return f"no classifier in it: a fresh one for {now:,}"


def under(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether a parameter or module of this name belongs to one of the modules ``prefixes``.

    >>> under("fc.weight", ["fc"]), under("fc2.weight", ["fc"])
    (True, False)
    """
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that DataParallel, torch.compile, FSDP and activation checkpointing put in, at any place."""

_AVERAGES = ("ema", "swa", "averag", "teacher", "momentum")
"""Parts of the names of averaged weights, where a file holds a network twice."""

_LEAST_SHARE = 0.5
"""The least share of the network's names that a prefix must lead to: fewer are a coincidence, such as ``norm.weight``
of a block.
"""

_COUNTER = "n_averaged"
"""The buffer that torch's AveragedModel, used by torchvision's reference scripts, adds."""

_COUNTER_OF_BATCHES = "num_batches_tracked"
"""The buffer of batch norms that old files do not have."""

_BESIDE_SHARE = 0.01
"""The most that what lies beside a network may have, as a share of its numbers."""

_COUNTED = ("total_ops", "total_params")
"""Buffers that thop, a counter of operations, leaves in every layer."""

_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Second classifiers of Inception and GoogLeNet, which only their training from scratch used."""

_SHOWN = 8


def load_weights(
    module: nn.Module,
    state: Mapping[str, Tensor],
    *,
    head: tuple[str, ...],
    what: str,
    names: OutputNames | None = None,
    classes: Sequence[str] = (),
) -> tuple[str, ...]:
    """Copy ``state`` into the network; its classifier stays fresh where the file's is for other classes.

    Args:
        module: whose parameters and buffers are overwritten, in place.
        state: tensors by name, from :func:`read_weights`.
        head: names of the classifier's modules.
        what: ``FILE`` and ``MODEL`` for messages.
        names: of the outputs of the weights' classifier; None where nothing says them.
        classes: of the data, in the order of the network's outputs: each begins with the row of its name. Empty: the
            rows stay in the file's order.

    Returns:
        Notes for the user.

    Raises:
        ModelError: keys missing or not expected, or other shapes, the classifier's aside; all of them are listed.
    """
    target, renamed = module.state_dict(), rename_to_match(module, state, head=head)
    rows = _find_rows(renamed, target, head, names or OutputNames(), classes)
    renamed, notes = _fit(renamed, target, head, rows)
    notes = [*_prefix_note(state, target), *notes]
    state = renamed
    if wrong := mismatches(state, target, head):
        raise ModelError(f"{what} do not fit: {'; '.join(wrong)}. Are they the weights of another model?")
    module.load_state_dict(state, strict=False)
    if any(under(key, head) and key not in state for key in target):
        reset_head(module, head)
    return tuple(notes)


def rename_to_match(module: nn.Module, state: Mapping[str, Tensor], *, head: tuple[str, ...]) -> dict[str, Tensor]:
    """Name the tensors as the network does.

    Wrappers' prefixes are taken off; foreign layouts, and position embeddings of images of another size, are converted
    by timm's own rules, if that makes all fit but the classifier.
    """
    target = module.state_dict()
    plain = without_prefixes(state, target)
    convert = _find_converter(module)
    if convert is None:
        return plain
    if not mismatches(_fit(plain, target, head)[0], target, head):
        return plain
    try:
        converted = dict(convert(dict(plain), module))
    except NETWORK_ERRORS:
        return plain  # not a layout that it knows: the keys tell the user more
    return plain if mismatches(_fit(converted, target, head)[0], target, head) else converted


_CONVERTERS = ("checkpoint_filter_fn", "pretrained_filter_fn", "_filter_fn", "_filter_torchvision_pretrained")
_CONVERTER_OPTIONS: dict[str, dict[str, Any]] = {
    "flexivit": {"interpolation": "bilinear", "antialias": False},  # how its patches were resized in training
    "deit3": {"adapt_layer_scale": True},
}
"""Options of timm's rule for some architectures, by the beginning of their names."""


def _find_converter(module: nn.Module) -> Callable[[dict[str, Tensor], nn.Module], Mapping[str, Tensor]] | None:
    """Find timm's own rule for foreign layouts and other sizes of images of one of its networks; None elsewhere."""
    place = type(module).__module__
    if not place.startswith("timm."):
        return None
    rules = (getattr(sys.modules[place], name, None) for name in _CONVERTERS)
    rule: Any = next(filter(None, rules), None)
    config: Any = getattr(module, "pretrained_cfg", None) or {}
    name = str(config.get("architecture", ""))
    options = next((value for begin, value in _CONVERTER_OPTIONS.items() if name.startswith(begin)), None)
    return rule if rule is None or options is None else partial(rule, **options)


def mismatches(state: Mapping[str, Tensor], target: Mapping[str, Tensor], head: tuple[str, ...]) -> list[str]:
    """List what keeps ``state`` from filling ``target``, except the classifier."""
    missing = [k for k in target if k not in state and not under(k, head) and not k.endswith(_COUNTER_OF_BATCHES)]
    unexpected = [k for k in state if k not in target]
    reshaped = [
        f"{k} {tuple(v.shape)} instead of {tuple(target[k].shape)}"
        for k, v in state.items()
        if k in target and v.shape != target[k].shape
    ]
    lines = []
    for kind, keys in {"missing": missing, "not expected": unexpected, "of another shape": reshaped}.items():
        lines += [f"{len(keys)} {kind} ({few(keys, _SHOWN)})"] if keys else []
    return lines


def find_mismatches(state: Mapping[str, Tensor], target: Mapping[str, Tensor], head: tuple[str, ...]) -> list[str]:
    """List what keeps a file's tensors from filling a network: wrappers' prefixes and the classifier may differ."""
    return mismatches(_fit(without_prefixes(state, target), target, head)[0], target, head)


def without_prefixes(state: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Take off what wrappers put into the names, and the prefix under which the network of ``wanted`` lies.

    What lies elsewhere, such as a loss beside the network of a Lightning module, is left out.

    >>> list(without_prefixes({"n_averaged": None, "module._orig_mod.fc.bias": None}, ["fc.bias"]))
    ['fc.bias']
    >>> list(without_prefixes({"net.fc.bias": None, "criterion.weight": None}, ["fc.bias"]))
    ['fc.bias']
    """
    names = set(wanted)
    state = {name: value for name, value in _unwrapped(state, names).items() if name in names or name != _COUNTER}
    prefix = next(iter(find_prefixes(state, names)), "")
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def find_prefixes(state: Mapping[str, Tensor], wanted: Collection[str]) -> list[str]:
    """List the prefixes under which most names of ``wanted`` are found, those of averages first; mostly it is one.

    Empty where no prefix leads to more than :data:`_LEAST_SHARE` of them.
    """
    names, counts = set(wanted), Counter[str]()
    for name in state:
        parts = name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in names:
                counts["".join(f"{part}." for part in parts[:start])] += 1
    most = max(counts.values(), default=0)
    if not most > _LEAST_SHARE * len(names):
        return []
    best = [prefix for prefix, count in counts.items() if count == most]
    return sorted(best, key=lambda prefix: (prefix != "", not _is_average(prefix)))


def _is_average(name: str) -> bool:
    return any(word in name.casefold() for word in _AVERAGES)


def _unwrapped(state: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """Take the names of wrappers out of the names of tensors, unless the network itself has parts of such names."""
    parts = {part for name in wanted for part in name.split(".")}
    wrappers = [wrapper for wrapper in _WRAPPERS if wrapper not in parts]
    return {".".join(part for part in name.split(".") if part not in wrappers): value for name, value in state.items()}


def _prefix_note(state: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> list[str]:
    """Say which of several networks in a file is taken, and what beside it is left out."""
    state = {name: value for name, value in _unwrapped(state, target).items() if name != _COUNTER}
    prefixes = find_prefixes(state, target)
    if not prefixes or not prefixes[0]:
        return []
    notes, rest = [], [name for name in state if not name.startswith(tuple(prefixes))]
    if len(prefixes) > 1:
        others = ", ".join(prefix.rstrip(".") for prefix in prefixes[1:])
        notes.append(f"the weights under {prefixes[0].rstrip('.')} are used, not those under {others}")
    if rest:
        notes.append(f"tensors beside the network are left out: {few(rest)}")
    return notes


@dataclass(frozen=True)
class ClassifierRows:
    """First weights of a classifier: the row of the loaded weights for each class of the data, and a line for the user.

    ``sources`` has None for a class that begins with a fresh row; it is empty where all rows stay as they are.
    """

    sources: tuple[int | None, ...] = ()
    note: str = ""

    @property
    def is_fresh(self) -> bool:
        """Return whether no class has a row of the loaded weights."""
        return bool(self.sources) and all(source is None for source in self.sources)


def rows_by_name(classes: Sequence[str], outputs: OutputNames) -> ClassifierRows:
    """Find the row of each class of the data in a classifier whose outputs have names.

    Names match as they do in an evaluation (:func:`.class_names.match_classes`), but numbers are places of ImageNet's
    classes only: digits are no colours.

    >>> rows_by_name(["bus", "car"], OutputNames(("car", "bus")))
    ClassifierRows(sources=(1, 0), note="the classifier's rows were put into the order of the data's classes")
    >>> rows_by_name(["bus", "van"], OutputNames(("car", "bus")))
    ClassifierRows(sources=(1, None), note='the classifier keeps the rows of 1 of 2 classes, by name (bus); new: van')
    >>> rows_by_name(["0", "1"], OutputNames(("car", "bus"))).is_fresh
    True
    """
    if tuple(classes) == outputs.names:
        return ClassifierRows()
    matches = match_classes(classes, outputs.names, synsets=outputs.synsets)
    is_numbers = all(match.how == "number" for match in matches)
    sources = tuple(None if is_numbers and not outputs.synsets else match.output for match in matches)
    kept = [name for name, source in zip(classes, sources, strict=True) if source is not None]
    new = [name for name, source in zip(classes, sources, strict=True) if source is None]
    if sources == tuple(range(len(outputs.names))):  # the same classes, spelt otherwise
        note = "the data's classes are numbers: they are taken for the places of ImageNet's" if is_numbers else ""
        return ClassifierRows(note=note)
    if not kept:
        note = (
            f"the classifier of {few(outputs.names)} was replaced by a fresh one for {few(classes)}: no class has the"
            " same name"
        )
    elif new:
        num_kept = f"{len(kept):,} of {len(classes):,} classes"
        note = f"the classifier keeps the rows of {num_kept}, by name ({few(kept)}); new: {few(new)}"
    elif len(classes) < len(outputs.names):
        num_kept = f"the data's {len(classes):,} classes of {len(outputs.names):,}"
        note = f"the classifier keeps the rows of {num_kept}, by name"
    else:
        note = "the classifier's rows were put into the order of the data's classes"
    return ClassifierRows(sources, note)


def _find_rows(
    state: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    head: tuple[str, ...],
    outputs: OutputNames,
    classes: Sequence[str],
) -> ClassifierRows:
    """Find what the classifier begins with; by place, and said, where the weights do not name their outputs."""
    keys = [key for key in target if under(key, head)]
    sizes = {state[key].shape[:1] for key in keys if key in state}
    if not classes or not keys or len(sizes) != 1 or any(key not in state for key in keys):
        return ClassifierRows()
    num_outputs = math.prod(next(iter(sizes)))
    if len(outputs.names) == num_outputs:
        return rows_by_name(classes, outputs)
    if num_outputs != len(classes):
        return ClassifierRows()
    if (imagenet := imagenet_names(num_outputs)).names:
        rows = rows_by_name(classes, imagenet)
        if not rows.is_fresh:
            assumed = "the weights name no classes: they are taken for ImageNet's"
            return replace(rows, note=f"{assumed}{rows.note and '; '}{rows.note}")
    return ClassifierRows(
        note=f"the weights name no classes: their {num_outputs:,} outputs are taken for {few(classes)}, in this order"
    )


def _pick_rows(tensor: Tensor, rows: ClassifierRows) -> Tensor:
    """Order the rows of a classifier's weight or bias; what is new begins as in :func:`reset_head`."""
    picked = torch.zeros(len(rows.sources), *tensor.shape[1:], dtype=tensor.dtype)
    for place, source in enumerate(rows.sources):
        if source is not None:
            picked[place] = tensor[source]
        elif tensor.ndim > 1:
            picked[place].normal_(std=0.01)
    return picked


def _fit(
    state: Mapping[str, Tensor],
    target_state: Mapping[str, Tensor],
    head: tuple[str, ...],
    rows: ClassifierRows | None = None,
) -> tuple[dict[str, Tensor], list[str]]:
    """Adapt what may differ, with a note of each: the first convolution's channels, and classifiers."""
    state, notes = dict(state), []
    for key, value in state.items():
        target = target_state.get(key)
        if target is None or target.ndim != 4 or value.ndim != 4:
            continue
        is_kernel_same = (value.shape[0], value.shape[2:]) == (target.shape[0], target.shape[2:])
        if is_kernel_same and (value.shape[1], target.shape[1]) in ((3, 1), (1, 3)):
            # What the convolution gives for a grey image stays the same.
            grey = target.shape[1] == 1
            state[key] = value.sum(1, keepdim=True) if grey else value.expand(-1, 3, -1, -1) / 3
            notes.append(f"{key} was adapted to {'grey' if grey else 'colour'} images")
            break
    keys = [key for key in target_state if under(key, head)]
    if rows is not None:
        notes += [rows.note] if rows.note else []
        if rows.is_fresh:
            state = {key: value for key, value in state.items() if not under(key, head)}
            keys = []
        elif rows.sources:
            state |= {key: _pick_rows(state[key], rows) for key in keys}
    if any(key not in state or state[key].shape != target_state[key].shape for key in keys):
        before = next((state[key].shape[0] for key in keys if key in state and state[key].ndim), None)
        notes.append(head_note(before, target_state[keys[0]].shape[0]))
        state = {key: value for key, value in state.items() if not under(key, head)}
    auxiliary = [key for key in state if key.startswith(_AUXILIARY) and key not in target_state]
    if auxiliary:
        notes.append("its auxiliary classifiers are left out")
        state = {key: value for key, value in state.items() if key not in auxiliary}
    state = {key: value for key, value in state.items() if key in target_state or key.split(".")[-1] not in _COUNTED}
    if beside := _beside(state, target_state):
        notes.append(f"tensors beside the network are left out: {few(beside)}")
        state = {key: value for key, value in state.items() if key not in beside}
    return state, notes


def _beside(state: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> list[str]:
    """List small tensors beside a complete network, such as a loss's weights, in parts that the network does not have.

    Further layers of a part that it has are those of a larger network.
    """
    parts = {name.partition(".")[0] for name in target}
    beside = [name for name in state if name not in target and name.partition(".")[0] not in parts]
    numbers = sum(value.numel() for value in target.values())
    is_small = sum(state[name].numel() for name in beside) <= _BESIDE_SHARE * numbers
    is_complete = all(name in state or name.endswith(_COUNTER_OF_BATCHES) for name in target)
    return beside if is_small and is_complete else []


_PICKLES = (".pth", ".th", ".pt", ".bin", ".ckpt", ".tar")

_SUFFIXES = (".safetensors", *_PICKLES, ".params")

_INNER = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the weights, those of an average first: they are what was evaluated. Of a file
with other keys it is the table with the most tensors."""

_NO_WEIGHTS = ("optim", "sched", "scaler", "loss", "criterion")
"""Parts of the keys of tables that hold other tensors than weights."""


@dataclass(frozen=True)
class WeightsFile:
    """The contents of a file: ``tensors`` on the CPU, by name; the key of the average if it is one; and what a file of
    steadytrain's own says beside them: the input that they were trained for (None elsewhere), the licence of the
    weights that they come from (``unknown`` elsewhere), their model's name (empty elsewhere), of a network of another
    framework its graph, and the names of the outputs."""

    tensors: dict[str, Tensor]
    averaged: str | None = None
    input: Input | None = None
    licence: str = "unknown"
    model: str = ""
    symbol: str = ""
    names: OutputNames = field(default_factory=OutputNames)


def read_weights(path: Path) -> WeightsFile:
    """Read ``.safetensors``, or a pickle of tensors as training scripts write it.

    Raises:
        ModelError: no such file, not a weights file, damaged, or one that would run code.
    """
    if path.is_dir():
        files = islice(chain(path.glob("*"), path.glob("*/*")), 10_000)  # it may be a folder of a million images
        inside = next((file for file in files if file.suffix in _SUFFIXES), None)
        remedy = f"name a file in it, such as {inside}" if inside else "it holds no weights file"
        raise ModelError(f"{path} is a folder: {remedy}")
    if not path.exists():
        raise ModelError(f"there is no weights file {path}: check --weights.{near_name(str(path))}")
    require_content(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in _PICKLES:
        return _read_pickle(path)
    if kind := checkpoint_format(path.name):  # what its arrays are called follows from the files beside it
        return WeightsFile({}, model=f"{kind}:{path}")
    raise ModelError(f"{path} is no weights file that is known: it must end in .safetensors, .pth, .th, .pt or .params")


def _read_safetensors(path: Path) -> WeightsFile:
    try:
        tensors, about = read_tensors(path)
        about = about if isinstance(about, Mapping) else {}
        plain, input = about.get("input"), None
        if isinstance(plain, Mapping):
            known = plain.keys() & {field.name for field in fields(Input)}
            values: dict[str, Any] = {name: plain[name] for name in known}
            input = Input(**values)
        model = about.get("model")
        name = model.get("name") if isinstance(model, Mapping) else None
        licence, symbol = str(about.get("licence", "unknown")), str(about.get("symbol", ""))
        names = OutputNames(*(tuple(map(str, about.get(key) or ())) for key in ("classes", "synsets")))
        return WeightsFile(tensors, None, input, licence, str(name or ""), symbol, names)
    except ModelError:
        raise
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged or no weights file ({error}): fetch it again") from error


class _Placeholder(list[Any]):
    """Stands for an object of a class in a pickle, which is neither imported nor made: its values are dropped."""

    def __new__(cls, *values: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *values: Any) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        """Drop the object's values."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def _placeholder(name: str, plain: type[Any] | None) -> type[_Placeholder]:
    """Make the class that stands for one of this name; ``plain``: its objects keep what they hold, as such ones."""
    made = {} if plain is None else {"__new__": lambda cls, *values: plain()}
    return type(name, (_Placeholder,), {"__module__": "placeholder", **made})


_VALUE_MODULES = ("numpy", "collections", "datetime", "decimal", "uuid", "pathlib", "copyreg", "copy_reg")
_VALUES = (
    *("list", "dict", "set", "frozenset", "tuple", "int", "float", "str", "bool", "complex", "bytes", "bytearray"),
    *("slice", "range", "object", "functools.partial"),
)
_SYSTEM_MODULES = (
    "os",
    "posix",
    "nt",
    "sys",
    "subprocess",
    "builtins",
    "importlib",
    "runpy",
    "shutil",
    "socket",
    "ctypes",
)


def _is_value(name: str) -> bool:
    """Return whether a name in a pickle is that of a class, whose objects hold values, rather than of a function.

    >>> [_is_value(name) for name in ("numpy.dtype", "pathlib.PosixPath", "train.Config", "os.system", "eval")]
    [True, True, True, False, False]
    """
    name = name.removeprefix("builtins.")
    module, _, last = name.rpartition(".")
    root = module.partition(".")[0]
    return name in _VALUES or root in _VALUE_MODULES or (last[:1].isupper() and root not in ("", *_SYSTEM_MODULES))


def _load_tensors(path: Path) -> tuple[object, list[str]]:
    """Read a pickle of torch by its restricted reader; return its content, and the classes that are placeholders in it.

    The reader makes tensors and plain values. Objects of other classes, such as a path among the arguments of a script,
    become placeholders: nothing that a file names is imported or called.

    Raises:
        UnpicklingError: a function instead of a class, or what torch refuses.
    """
    kinds: dict[str, type[Any] | None] = {}
    with suppress(*NETWORK_ERRORS, pickle.UnpicklingError):  # saves reading the file once for each
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        kinds = {name: None for name in unknown if _is_value(name)}
    while True:
        types = {name: _placeholder(name, plain) for name, plain in kinds.items()}
        pairs: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
            (kind, full) for name, kind in types.items() for full in {name, name if "." in name else f"builtins.{name}"}
        ]
        try:
            with torch.serialization.safe_globals(pairs):
                return torch.load(path, map_location="cpu", weights_only=True), list(kinds)
        except pickle.UnpicklingError as error:
            message = str(error)
            filled = re.search(r"(SETITEM|append|extend).*<class 'placeholder\.(\S+)'>", message)
            if filled is not None and filled[2] in kinds:
                kinds[filled[2]] = OrderedDict if filled[1] == "SETITEM" else list  # torch 2.10 fills no others
            elif (name := re.search(r"GLOBAL (\S+)", message)) and name[1] not in kinds and _is_value(name[1]):
                kinds[name[1]] = None
            else:
                raise


def _tables(content: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """Yield the tables of tensors in a file, with the keys that lead there: at most three."""
    if not isinstance(content, Mapping):
        return
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if tensors:
        yield path, tensors
    for key, value in content.items() if len(path) < 3 else ():
        if not any(word in str(key).casefold() for word in _NO_WEIGHTS):
            yield from _tables(value, (*path, str(key)))


def _read_pickle(path: Path) -> WeightsFile:
    try:
        content, classes = _load_tensors(path)
    except pickle.UnpicklingError as error:
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            raise _more_than_weights(path, name[1]) from error
        raise ModelError(f"{path} is damaged or no weights file: fetch it again") from error
    except (*NETWORK_ERRORS, OSError, EOFError, MemoryError, struct.error, zipfile.BadZipFile) as error:
        raise ModelError(f"{path} is damaged or no weights file ({first_line(error)}): fetch it again") from error
    tables = dict(_tables(content))
    known = next(((key,) for key in _INNER if (key,) in tables), None)
    if tables:
        keys = known or max(tables, key=lambda keys: (len(tables[keys]), _is_average(".".join(keys)), -len(keys)))
        key = ".".join(keys)
        return WeightsFile(tables[keys], key if _is_average(key) else None)
    if classes:
        raise _more_than_weights(path, next((name for name in classes if name.startswith("torch.nn.")), classes[0]))
    raise ModelError(f"{path} holds no weights: a table of names and tensors is expected")


def _more_than_weights(path: Path, name: str) -> ModelError:
    return ModelError(
        f"{path} holds more than weights ({name}), and reading that can run code hidden in it: where you trust it, save"
        " its state_dict alone (safetensors.torch.save_file) and give that file"
    )
