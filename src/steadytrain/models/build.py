"""Build a network that is ready to be trained: for the data's classes, with its weights loaded, and tried once."""

from __future__ import annotations

import hashlib
import inspect
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from steadytrain.config import Model, Scalar
from steadytrain.config.factories import CHECKPOINTS, OBJECT, checkpoint_format, find_row, import_factory
from steadytrain.errors import ModelError, describe_type, did_you_mean, first_line
from steadytrain.format import duration
from steadytrain.machine.children import python, run_program
from steadytrain.machine.web import client
from steadytrain.models.class_names import imagenet_names
from steadytrain.models.nets import BUILTINS, HEADS, SIZES
from steadytrain.models.objects import find_given
from steadytrain.models.registry import ModelSource, current_name, fetched_file, find, licence_note
from steadytrain.models.weights import (
    NETWORK_ERRORS,
    Input,
    WeightsFile,
    find_head,
    head_note,
    load_weights,
    read_weights,
    rename_to_match,
    reset_head,
    under,
)

RESERVED = ("num_classes", "channels", "in_chans", "pretrained", "checkpoint_path", "features_only")
"""Options that follow from the data and the recipe's own keys, so that ``model.options`` may not set them."""
_FETCHED = ("weights", "weights_backbone", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay")
"""Options of timm and torchvision that say what is fetched from a network, and to where."""
_NOT_FETCHED = {
    "torchvision": "the weights of {name} are not fetched: give a file of them (--weights FILE), or take timm's model"
    " (steady models {inner})",
    "import": "steadytrain does not know where {inner} keeps its weights: give --weights FILE, or --set"
    " model.pretrained=false and the factory's own option (--set model.options.NAME=VALUE)",
    "built-in": "the hub has no weights for the built-in {inner}: train it from scratch (steady train), or give"
    " --weights FILE",
}
"""Kind of a model whose pretrained weights nobody fetches -> what to do."""

LARGE, LARGE_SIDE = 100_000_000, 256
"""Parameters and side in pixels from which shapes are checked on ``meta``, which imports torch's compiler (seconds)."""


@dataclass(frozen=True)
class Built:
    """A network and what belongs to it.

    Args:
        module: on the CPU, in fp32; the weights are loaded, the classifier has the data's classes.
        name: in full, such as ``timm/resnet50``.
        input: what its weights want to see; fields are None where nothing says so.
        head: names of the classifier's modules.
        licence: of the weights (``unknown`` where they do not say it); empty where the network starts from none.
        notes: for the user, a line each: what was replaced or adapted, what the licence restricts.
        weights: what it starts from: ``timm/resnet50.a1_in1k``, a file's path; empty where that is nothing.
        scaling_guessed: the mean and the standard deviation are the model's usual ones: the weights' file has none.
        symbol: the graph that it was made of, in the text of the framework that it comes from; empty elsewhere.
    """

    module: nn.Module
    name: str
    input: Input
    head: tuple[str, ...]
    licence: str = ""
    notes: tuple[str, ...] = ()
    weights: str = ""
    scaling_guessed: bool = False
    symbol: str = ""


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """A checkpoint of another framework, as far as it says itself.

    Args:
        num_outputs: of its classifier.
        channels, size: of the images that it takes; the side in pixels.
        classes, synsets: of its outputs, where its files name them.
    """

    num_outputs: int
    channels: int
    size: int
    classes: tuple[str, ...] = ()
    synsets: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointFormat:
    """A format of checkpoints of another framework: a row of :data:`steadytrain.config.factories.CHECKPOINTS`.

    Args:
        inspect: called with the name of a checkpoint, with or without its prefix, and the side of its images or None.
        make: called as :func:`make_network`: makes the network of a checkpoint, with its weights if they are asked for.
        load: called with a network that was built of another source, that source, the recipe's model and the classes
            of the data: loads the arrays of ``model.weights`` into it, which is the same network.
        rebuild: called with a model's name, ``Built.symbol``, channels and size: makes the network of its graph alone.
    """

    inspect: Callable[[str, int | None], ForeignCheckpoint]
    make: Callable[..., Built]
    load: Callable[[Built, ModelSource, Model, Sequence[str]], Built]
    rebuild: Callable[[str, str, int, int], Built]


def foreign_format(place: str | Path | None) -> CheckpointFormat | None:
    """Return the format of a checkpoint of another framework, by its name or its file; None for everything else."""
    name = checkpoint_format(str(place or ""))
    return find_row(CHECKPOINTS, name, CheckpointFormat) if name else None


def inspect_checkpoint(name: str, size: int | None = None) -> ForeignCheckpoint:
    """Read what a checkpoint of another framework says of itself.

    Args:
        name: with its prefix, such as ``mxnet:resnet-18``, or a file of it.
        size: side of its images in pixels, where it is no usual one.

    Raises:
        ModelError: no such files, or none that can be read.
    """
    format = foreign_format(name)
    assert format is not None, f"{name} is no checkpoint of another framework"
    return format.inspect(name, size)


def build(
    model: Model,
    *,
    num_classes: int,
    channels: int,
    size: int | None,
    classes: Sequence[str] = (),
    allow_import: bool = False,
    symbol: str = "",
) -> Built:
    """Build what the recipe names. Fresh parameters are drawn from torch's global generator: seed it before.

    Args:
        model: name, weights and options.
        num_classes: outputs.
        channels: of the images: 1 or 3.
        size: side of the images in pixels; None: that of the weights' file, else the model's own
            (``Built.input.size``), or 224.
        classes: names of the outputs, which the rows of the weights' classifier follow; empty: they stay in its order.
        allow_import: import a ``pkg.mod:factory``; only if the user named it on this command line.
        symbol: of a checkpoint of another framework, the graph that a weights file holds: its own files are not looked
            for.

    Raises:
        ModelError: no such model or option, weights that cannot be had or do not fit, images that it cannot take.
        RecipeError: a ``pkg.mod:factory`` that cannot be imported.
    """
    source = find(model.name, allow_import=allow_import)
    if symbol and (format := foreign_format(source.name)) is not None:
        return format.rebuild(source.name, symbol, channels, size or 224)
    file, foreign = None, foreign_format(model.weights)
    if model.weights is not None and foreign is None:
        file = read_weights(Path(model.weights))
        size = size or (None if file.input is None else file.input.size)
    built = make_network(source, model, num_classes=num_classes, channels=channels, size=size, classes=classes)
    side = size or built.input.size or 224
    try_forward(built.module, name=built.name, channels=channels, size=side, num_classes=num_classes)
    for name, value in built.module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"the state of {built.name} has {describe_type(value)} in it ({name}), and files of weights hold"
                " tensors alone: keep it in a buffer, or out of the state"
            )
    if file is not None:
        return _load_file(built, file, str(model.weights), classes)
    return built if foreign is None or source.kind == "checkpoint" else foreign.load(built, source, model, classes)


def num_outputs(model: Model, *, allow_import: bool = False) -> int:
    """Read how many classes a model's weights were trained for: a local file's, or timm's pretrained ones.

    Raises:
        ModelError: no weights, or no classifier in the file.
    """
    source = find(model.name, allow_import=allow_import)
    if model.pretrained and source.kind == "timm":
        import timm

        config: Any = timm.models.get_pretrained_cfg(source.inner)
        return int(config.num_classes)
    if checkpoint_format(str(model.weights)):
        return inspect_checkpoint(str(model.weights)).num_outputs
    if model.weights is None:
        raise ModelError(f"{model.name} has no weights file: give --weights FILE")
    # 997 is a number of outputs that no layer but the classifier is likely to have.
    weights = model.weights if source.kind == "checkpoint" else None  # they may hold its graph
    built = make_network(
        source, Model(model.name, weights=weights, options=model.options), num_classes=997, channels=3, size=None
    )
    state = rename_to_match(built.module, read_weights(Path(model.weights)).tensors, head=built.head)
    outputs = [tensor.shape[0] for key, tensor in state.items() if under(key, built.head) and tensor.ndim]
    if not outputs:
        raise ModelError(f"{model.weights} has no classifier of {source.name} ({', '.join(built.head) or 'unknown'})")
    return outputs[0]


def usual_size(model: Model) -> int | None:
    """Return the side that a model sees where the recipe names none, without building it; None of a user's own."""
    is_ours = str(model.weights).endswith(".safetensors")  # others do not say it
    if is_ours and (stated := read_weights(Path(str(model.weights))).input) is not None and stated.size:
        return stated.size
    source = find(model.name, allow_import=True)  # which imports nothing
    if source.kind == "timm":
        import timm

        config: Any = timm.models.get_pretrained_cfg(source.inner) or timm.models.PretrainedCfg()
        return int(config.input_size[-1])
    if source.kind == "torchvision":
        import torchvision

        preset: Any = torchvision.models.get_model_weights(source.inner)
        return int(next(iter(preset)).transforms.keywords["crop_size"])
    return inspect_checkpoint(model.name).size if source.kind == "checkpoint" else SIZES.get(source.inner)


def parameter_shapes(
    model: Model, *, num_classes: int = 1000, allow_import: bool = False
) -> tuple[str, list[list[int]]]:
    """List the shape of each trained parameter, in the network's order, beside the network's full name.

    The network is built without values where it can be, so this takes little memory and draws no random numbers.

    Args:
        model: name and options.
        num_classes: outputs.
        allow_import: import a ``pkg.mod:factory``; only if the user named it on this command line.

    Raises:
        ModelError: no such model or option.
    """
    state = torch.get_rng_state()
    shape: dict[str, Any] = {"num_classes": num_classes, "channels": 3, "size": None, "allow_import": allow_import}
    try:
        with torch.device("meta"):
            built = build(model, **shape)
    except ModelError:  # it reads values as it is built
        built = build(model, **shape)
    finally:
        torch.set_rng_state(state)
    return built.name, [list(parameter.shape) for parameter in built.module.parameters() if parameter.requires_grad]


def try_forward(module: nn.Module, *, name: str, channels: int, size: int, num_classes: int) -> None:
    """Run two images of zeros through the network, as evaluation and as training do, and leave no trace in it.

    A :data:`LARGE` network, and large images, are run on the ``meta`` device: shapes without arithmetic, unless they
    depend on values.

    Raises:
        ModelError: images too small or of a wrong number of channels, or an output that is not [2, num_classes].
    """

    def require_logits(output: object, when: str) -> None:
        if isinstance(output, Tensor) and output.shape == (2, num_classes):
            return
        kind = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        remedy = "set the option that makes it one (--set model.options.NAME=VALUE)"
        if name.startswith(OBJECT):
            remedy = "give it such a last layer, or give a function of num_classes"
        raise ModelError(
            f"{name} gives {kind} for two images{when}; a classifier for {num_classes} classes gives"
            f" [2, {num_classes}]: {remedy}"
        )

    def forward_zeros() -> object:
        # Parameters that wait for their shapes get them; buffers are left alone.
        parameters = {key: value for key, value in module.named_parameters() if not is_lazy(value)}

        def forward(replaced: Mapping[str, Tensor], device: str) -> object:
            buffers = [(key, value) for key, value in module.named_buffers() if not is_lazy(value)]
            copies = {key: value.to(device, copy=True) for key, value in (*replaced.items(), *buffers)}
            return functional_call(module, copies, (torch.zeros(2, channels, size, size, device=device),))

        if size > LARGE_SIDE or sum(value.numel() for value in parameters.values()) >= LARGE:
            with suppress(*NETWORK_ERRORS):
                return forward(parameters, "meta")
        return forward({}, "cpu")

    was_training = module.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module.eval()
            try:
                evaluated = forward_zeros()
            except NETWORK_ERRORS as error:
                raise ModelError(
                    f"{name} cannot take images of {size}x{size} pixels and {channels} channel{'s' * (channels > 1)}"
                    f" ({first_line(error)}): choose another --size, or another model"
                ) from error
            require_logits(evaluated, "")
            module.train()
            try:
                trained = forward_zeros()
            except NETWORK_ERRORS:
                return  # two images may be too few for it where a whole batch is not
            require_logits(trained, " in training")
    finally:
        module.train(was_training)


def require_size(source: ModelSource, options: Mapping[str, Scalar], size: int) -> None:
    """Refuse a side of images that a network whose parameters depend on it cannot take, before any image is read.

    The network is built without values, in about a second. What can be known only with values passes.

    Args:
        source: of the network.
        options: of the recipe's model.
        size: in pixels.

    Raises:
        ModelError: as of :func:`build`.
    """
    if source.kind != "timm":
        return
    import timm

    config: Any = timm.models.get_pretrained_cfg(source.inner)
    if config is None or not config.fixed_input_size:
        return
    spec = Model(source.name, options=options)
    with suppress(NotImplementedError):  # a value is asked for
        try:
            with torch.device("meta"), torch.no_grad():
                module = make_network(source, spec, num_classes=2, channels=3, size=size).module
                module.eval()(torch.zeros(1, 3, size, size))
        except (ModelError, *NETWORK_ERRORS):
            build(spec, num_classes=2, channels=3, size=size)


def _load_file(built: Built, file: WeightsFile, path: str, classes: Sequence[str]) -> Built:
    notes = list(built.notes)
    if file.averaged:
        notes.append(f"the averaged weights ({file.averaged}) of {path} are used")
    names = built.module.state_dict() if built.symbol else file.tensors.keys()  # a cut graph has fewer
    tensors = {name: value for name, value in file.tensors.items() if name in names}
    what = f"the weights of {path} and {built.name}"
    notes += load_weights(built.module, tensors, head=built.head, what=what, names=file.names, classes=classes)
    if file.licence not in ("", "unknown") and (note := licence_note(file.licence)):
        notes.append(note)
    guessed = file.input is None and built.input.mean is not None
    input = (file.input or built.input).with_channels(built.input.channels)
    return replace(built, input=input, licence=file.licence, notes=tuple(notes), weights=path, scaling_guessed=guessed)


def _make_torchvision(source: ModelSource, model: Model, *, num_classes: int, channels: int) -> Built:
    """Build torchvision's network; its weights are not fetched."""
    import torchvision

    if channels != 3:
        raise ModelError(f"{source.name} takes colour images, and these have {channels} channel: choose a timm model")
    # The second classifiers of two nets of 2014 are for their training from scratch as it was done then.
    has_two = source.inner in ("googlenet", "inception_v3")
    shape = {"num_classes": num_classes} | ({"aux_logits": False, "init_weights": True} if has_two else {})
    factory = torchvision.models.get_model_builder(source.inner)
    module: nn.Module = _call_factory(source.name, factory, model.options, shape, refused=_FETCHED)
    input = Input(size=usual_size(Model(source.name)), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return Built(module, source.name, input, find_head(module, num_classes))


def make_network(
    source: ModelSource, model: Model, *, num_classes: int, channels: int, size: int | None, classes: Sequence[str] = ()
) -> Built:
    """The network as its maker gives it, without the user's weights file."""
    if source.kind == "timm":
        return _make_timm(source, model, num_classes=num_classes, channels=channels, size=size, classes=classes)
    if (foreign := foreign_format(source.name)) is not None:
        return foreign.make(source, model, num_classes=num_classes, channels=channels, size=size, classes=classes)
    if model.pretrained:
        require_weights(source)
    if source.kind == "torchvision":
        return _make_torchvision(source, model, num_classes=num_classes, channels=channels)
    if source.kind == "object":
        return _make_object(source, model, num_classes=num_classes, channels=channels, size=size)
    if source.kind == "import":
        # The code runs: the caller has made sure that the user named the factory.
        factory = import_factory(source.inner, key="model.name", flag="--model", what="a model", allow_import=True)
        return _call_own(source.inner, factory, model, num_classes=num_classes, channels=channels, size=size)
    name = source.inner
    factory = BUILTINS[name]
    known = [p for p in inspect.signature(factory).parameters if p not in ("num_classes", "channels", "size", "depth")]
    for option in model.options:
        if option not in known and option not in RESERVED:
            has = ", ".join(known) or "none"
            raise ModelError(f"{name} has no option {option!r}, it has {has}.{did_you_mean(option, known)}")
    shape = {"num_classes": num_classes, "channels": channels, "size": size or SIZES[name]}
    module = _call_factory(name, factory, model.options, shape)
    return Built(module, name, Input(size=SIZES[name], channels=channels), (HEADS[name],))


def _call_factory(
    name: str,
    factory: Callable[..., Any],
    options: Mapping[str, Scalar],
    arguments: Mapping[str, object],
    *,
    refused: Sequence[str] = (),
) -> Any:
    """Call a factory. Raises ModelError for an option that it does not know or may not have, or a value it refuses."""
    for option in options:
        if option in refused:
            raise ModelError(
                f"model.options.{option} cannot be set: weights come from --weights FILE, or the hub (model.pretrained)"
                " by way of its cache; drop it"
            )
        if option in RESERVED:
            raise ModelError(f"model.options.{option} cannot be set: it follows from the data and the recipe; drop it")
    try:
        return factory(**arguments, **options)
    except NETWORK_ERRORS as error:
        shown = " ".join(f"{key}={value!r}" for key, value in options.items()) or "none given"
        raise ModelError(f"{name} cannot be built: {first_line(error)} (model.options: {shown})") from error


def _make_object(source: ModelSource, model: Model, *, num_classes: int, channels: int, size: int | None) -> Built:
    """Copy the module that Python code gave, with its weights, or call its function."""
    model_object = find_given(source.name)
    if not isinstance(model_object, nn.Module):
        return _call_own(source.name, model_object, model, num_classes=num_classes, channels=channels, size=size)
    if model.options:
        raise ModelError(f"model.options are arguments of a function, and {source.name} is a module: leave them out")
    try:
        module = deepcopy(model_object).to("cpu", torch.float32)
    except (RuntimeError, TypeError, ValueError) as error:  # a buffer without a shape, as of LazyBatchNorm2d
        line = first_line(error).partition(". ")[0]
        raise ModelError(f"{source.name} cannot be copied ({line}): give a function that makes it") from error
    for parameter in module.parameters():
        if not is_lazy(parameter):  # one that is still without a shape is trained
            parameter.requires_grad_(True)
    return Built(module, source.name, Input(channels=channels), find_head(module, num_classes))


def _call_own(
    inner: str, factory: Callable[..., Any], model: Model, *, num_classes: int, channels: int, size: int | None
) -> Built:
    """Call a user's function with ``num_classes``, the recipe's options, and channels and size if it takes them."""
    try:
        takes = set(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # made in C
        takes = set()
    arguments: dict[str, Any] = {"num_classes": num_classes}
    arguments |= {key: channels for key in ("channels", "in_chans", "in_channels") if key in takes}
    if size is not None:
        arguments |= {
            key: size for key in ("size", "img_size", "image_size") if key in takes and key not in model.options
        }
    module: object = _call_factory(inner, factory, model.options, arguments)
    if not isinstance(module, nn.Module):
        raise ModelError(f"{inner} gave a {type(module).__name__}; a model's factory gives a torch.nn.Module")
    return Built(module, inner, Input(channels=channels), find_head(module, num_classes))


def _make_timm(
    source: ModelSource, model: Model, *, num_classes: int, channels: int, size: int | None, classes: Sequence[str]
) -> Built:
    """Build timm's network, with the hub's weights if the recipe asks for them.

    ``size`` is passed on only to networks whose parameters depend on it (their configuration says so).
    """
    import timm

    name = source.name
    config: Any = timm.models.get_pretrained_cfg(source.inner) or timm.models.PretrainedCfg()
    arguments: dict[str, Any] = {"model_name": source.inner, "num_classes": num_classes, "in_chans": channels}
    if size is not None and config.fixed_input_size and "img_size" not in model.options:
        arguments["img_size"] = size
    if model.pretrained:
        arguments |= {"pretrained": True, "pretrained_cfg_overlay": _cached_weights(name, config)}
    try:
        module: nn.Module = _call_factory(name, timm.create_model, model.options, arguments, refused=_FETCHED)
    except OSError as error:
        raise _unreachable(name, error) from error
    except SafetensorError as error:
        raise _damaged(name, config, first_line(error)) from error
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # what the hub's client lets through of its transport
            raise
        raise _unreachable(name, error) from error
    if model.pretrained:
        _require_stated_digest(name, config)
    input = Input(
        size=int(config.input_size[-1]),
        mean=tuple(float(v) for v in config.mean),
        std=tuple(float(v) for v in config.std),
        crop=float(config.crop_pct),
        interpolation=config.interpolation if config.interpolation in ("bilinear", "bicubic") else None,
        channels=int(config.input_size[0]),
    )
    names = (config.classifier,) if isinstance(config.classifier, str) else tuple(config.classifier or ())
    modules = dict(module.named_modules())
    head = tuple(part for part in names if part in modules) or find_head(module, num_classes)
    plain = model.name.removeprefix("timm/")
    notes = [] if current_name(plain) == plain else [f"{plain} is an old name of timm's: it is {name} now"]
    built = Built(module, name, input.with_channels(channels), head, notes=tuple(notes))
    if not model.pretrained:
        return built
    licence = config.license or "unknown"
    notes += [note for note in (licence_note(licence),) if note]
    if num_classes != config.num_classes:
        reset_head(module, head)
        notes.append(head_note(config.num_classes, num_classes))
    elif classes:
        outputs, state = imagenet_names(num_classes), module.state_dict()
        notes += load_weights(module, state, head=head, what=f"the weights of {name}", names=outputs, classes=classes)
    tag = f".{config.tag}" if config.tag else ""
    return replace(built, licence=licence, notes=tuple(notes), weights=f"timm/{config.architecture}{tag}")


def require_weights(source: ModelSource) -> None:
    """Make sure that the weights of a model by its name are on this machine, or can be fetched from the hub.

    Raises:
        ModelError: the model has none there, or the hub cannot be reached.
    """
    if source.kind in _NOT_FETCHED:
        raise ModelError(_NOT_FETCHED[source.kind].format(name=source.name, inner=source.inner))
    if source.kind != "timm":
        return
    import timm

    _cached_weights(source.name, timm.models.get_pretrained_cfg(source.inner) or timm.models.PretrainedCfg())


def fetch_weights(source: ModelSource, *, seconds: float) -> None:
    """Fetch the hub's weights of one of timm's models into its cache, within so many seconds.

    Raises:
        ModelError: it has none, the hub cannot be reached, the seconds are over, or what came is damaged.
    """
    import timm

    require_weights(source)
    config: Any = timm.models.get_pretrained_cfg(source.inner)
    code = "import sys, huggingface_hub; huggingface_hub.hf_hub_download(*sys.argv[1:])"
    file = config.hf_hub_filename or "model.safetensors"
    fetched = run_program(python("-c", code, config.hf_hub_id, file), seconds=max(0.0, seconds), own_group=True)
    if fetched.is_late or fetched.code:
        why = f"not within {duration(seconds)}" if fetched.is_late else fetched.last_line
        raise _unreachable(source.name, why)
    _require_stated_digest(source.name, config)


def _cached_weights(name: str, config: Any) -> dict[str, str]:
    """The file of weights fetched earlier, if there is one, so that no network is needed; else nothing."""
    from huggingface_hub import constants

    if not config.has_weights:
        raise ModelError(
            f"timm has no weights for {name}: train it from scratch (steady train), or give --weights FILE"
        )
    if not config.hf_hub_id:
        return {}
    if not config.custom_load and (file := fetched_file(config)):
        return {"file": str(file)}
    # The hub's own client tries for three quarters of a minute before it gives up: ask whether it can be reached.
    if constants.HF_HUB_OFFLINE:
        raise _unreachable(name, "HF_HUB_OFFLINE is set")
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with client(trusted=None, on_redirect=bool).open(request, timeout=10):
            return {}
    except urllib.error.HTTPError:
        return {}  # it answers, if only with an error
    except OSError as error:
        raise _unreachable(name, error) from error


def _require_stated_digest(name: str, config: Any) -> None:
    """Compare fetched weights with the sha256 that the hub stated: its cache calls them by that.

    The hub's own client compares the number of bytes.

    Raises:
        ModelError: they are others.
    """
    file = fetched_file(config)
    stated = "" if file is None else file.resolve().name
    if file is None or re.fullmatch("[0-9a-f]{64}", stated) is None:
        return
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != stated:
        raise _damaged(name, config, f"sha256 {digest[:12]}, the hub stated {stated[:12]}")


def _damaged(name: str, config: Any, how: str) -> ModelError:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE, "models--" + str(config.hf_hub_id).replace("/", "--"))
    return ModelError(
        f"the weights of {name} were fetched, and are damaged ({how}): delete {cache} and run the same command again"
    )


def _unreachable(name: str, why: object) -> ModelError:
    reason = getattr(why, "reason", why)
    shown = first_line(reason) if isinstance(reason, BaseException) else reason
    return ModelError(
        f"cannot fetch the weights of {name} ({shown}): connect to a network once, give a file of them (--weights FILE"
        " to train, FILE --model NAME to evaluate and predict), or choose a model whose weights are on this machine"
        " (steady models)"
    )
