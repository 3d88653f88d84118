"""The flags that ``train`` and ``finetune`` share, and the recipe that they make.

The order of precedence, weakest first: defaults for the data, ``--recipe FILE``, flags, ``--set KEY=VALUE``.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from cyclopts import Parameter

from steadytrain.config import Recipe
from steadytrain.errors import RecipeError, did_you_mean


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Choices:
    """What every user chooses; all else is in ``--recipe`` and ``--set``."""

    val: Annotated[
        str | None,
        Parameter(name=("--val", "--data-val"), help="Validation data; without it a stratified 10 % is held out."),
    ] = None
    model: Annotated[
        str | None,
        Parameter(name=("--model", "--network"), help="timm/NAME, a built-in such as resnet20, or pkg.mod:factory."),
    ] = None
    weights: Annotated[
        str | None,
        Parameter(
            name=("--weights", "--initial-checkpoint", "--pretrained-model"),
            help="A local .safetensors or .pth file to start from.",
        ),
    ] = None
    epochs: Annotated[float | None, Parameter(name=("--epochs", "--num-epochs"), help="Passes over the data.")] = None
    batch_size: Annotated[
        int | None, Parameter(name=("--batch-size", "-b"), help="Images an update, over all devices.")
    ] = None
    lr: Annotated[float | None, Parameter(help="Peak learning rate, at the recipe's base batch size.")] = None
    size: Annotated[
        int | None, Parameter(name=("--size", "--img-size"), help="Side of the square the model sees, in pixels.")
    ] = None
    seed: Annotated[int | None, Parameter(help="Of initialisation, order and augmentation.")] = None
    precision: Annotated[
        str | None, Parameter(name=("--precision", "--dtype"), help="fp32, tf32, bf16, fp16, pure-bf16 or pure-fp16.")
    ] = None
    compile: Annotated[
        bool,
        Parameter(
            name=("--compile", "--torchcompile"),
            help="Make code for this network on this machine first; other modes by --set precision.compile=MODE.",
            negative="",
            show_default=False,
        ),
    ] = False
    device: Annotated[str | None, Parameter(help="auto, cpu, cuda or cuda:1.")] = None
    threads: Annotated[
        int | None,
        Parameter(name=("--threads", "--data-nthreads", "--workers", "-j"), help="Threads of the feed."),
    ] = None
    deterministic: Annotated[
        bool,
        Parameter(help="The same bits each time on a GPU as well, which costs speed.", negative="", show_default=False),
    ] = False
    graph: Annotated[
        bool,
        Parameter(
            help="Replay each update as one recorded graph of the GPU's kernels: faster for small networks.",
            negative="",
            show_default=False,
        ),
    ] = False
    recompute: Annotated[
        bool,
        Parameter(
            name=("--recompute", "--grad-checkpointing"),
            help="Less memory for more time: compute activations again in the backward pass; no bit changes.",
            negative="",
            show_default=False,
        ),
    ] = False
    procs: Annotated[
        int | Literal["auto"] | None,
        Parameter(help="Ranks that train together on this machine; auto: one for each GPU."),
    ] = None
    root: Annotated[
        str | None, Parameter(help="The folder that the paths of a .lst or a table start from (default: its own).")
    ] = None
    labels: Annotated[str | None, Parameter(help="A file of labels for images without folders of classes.")] = None
    classes: Annotated[str | None, Parameter(help="A card whose class list, in its order, is to be used.")] = None
    run: Annotated[str | None, Parameter(help="Where the run lives; the same command resumes it.")] = None
    recipe: Annotated[Path | None, Parameter(help="A recipe: .toml, .json or .yaml.")] = None
    accept_licence: Annotated[
        bool,
        Parameter(
            help="Use weights whose licence forbids products and services; asked for on a terminal.",
            negative="",
            show_default=False,
        ),
    ] = False
    probe: Annotated[
        bool,
        Parameter(
            help="First measure how fast the feed alone and the updates alone can be; no weight depends on it.",
            negative="",
            show_default=False,
        ),
    ] = False
    explain: Annotated[
        bool,
        Parameter(
            help="Say what would be trained and in which numbers each operation computes; train nothing.",
            negative="",
            show_default=False,
        ),
    ] = False
    set: Annotated[
        tuple[str, ...],
        Parameter(
            help="Any other value of the recipe: --set optim.ema=0.999.",
            negative="",
            show_default=False,
            consume_multiple=False,
        ),
    ] = ()
    json: Annotated[
        bool, Parameter(help="Print the outcome as one JSON document.", negative="", show_default=False)
    ] = False


FLAGS = {
    "val": "data.val",
    "classes": "data.classes",
    "root": "data.root",
    "labels": "data.labels",
    "size": "data.size",
    "model": "model.name",
    "weights": "model.weights",
    "lr": "optim.lr",
    "precision": "precision.name",
    "device": "parallel.device",
    "threads": "parallel.threads",
    "procs": "parallel.procs",
    "batch_size": "batch_size",
    "seed": "seed",
}


def changes(choices: Choices) -> dict[str, Any]:
    """What the flags and the ``--set`` values change, by the recipe's keys. Raises RecipeError."""
    told = {key: getattr(choices, flag) for flag, key in FLAGS.items() if getattr(choices, flag) is not None}
    if choices.deterministic:
        told["parallel.deterministic"] = True
    if choices.graph:
        told["parallel.graph"] = True
    if choices.recompute:
        told["parallel.recompute"] = True
    if choices.compile:
        told["precision.compile"] = "default"
    if choices.epochs is not None:
        told |= {"budget.epochs": choices.epochs, "budget.steps": None}
    if choices.weights is not None:
        told["model.pretrained"] = False
    told |= dict(parse_setting(text) for text in choices.set)
    if told.get("budget.steps") and choices.epochs is None:
        told["budget.epochs"] = None
    return told


def names_model(choices: Choices) -> bool:
    """Whether the command line itself names the model, and so allows importing it."""
    return choices.model is not None or any(parse_setting(text)[0] == "model.name" for text in choices.set)


def value_of(key: str, given: Mapping[str, Any], told: Mapping[str, Any]) -> Any:
    """What a key will be by the flags, else by the recipe file; None where neither says it.

    >>> value_of("data.size", {}, {"data": {"size": 96}})
    96
    """
    part, _, name = key.partition(".")
    inner = told.get(part)
    return given.get(key, inner.get(name) if isinstance(inner, Mapping) else None)


def build_recipe(defaults: Recipe, told: Mapping[str, Any], given: Mapping[str, Any]) -> Recipe:
    """Lay the recipe file's values, and over those the given ones, over the defaults.

    Raises:
        RecipeError: an unknown key or a value that cannot be, by its name.
    """
    under = defaults.to_dict()
    if "budget" in told:
        under["budget"] = {}  # epochs or steps: the file's choice, not one of each
    return Recipe.from_dict(_merged(under, told)).with_(given)


def read_recipe(path: Path, what: str = "a recipe") -> dict[str, Any]:
    """The values of a recipe file, or of another such table, by its extension. Raises RecipeError."""
    import tomllib

    import yaml

    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": json_module.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
    }
    if path.suffix not in readers:
        near = did_you_mean(path.suffix, readers)
        raise RecipeError(f"{path} has the extension {path.suffix!r}; {what} is .toml, .json or .yaml.{near}")
    try:
        told = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(told, dict):
        raise RecipeError(f"{path} holds {type(told).__name__}; {what} is a table of keys and values")
    return told


def parse_setting(text: str) -> tuple[str, Any]:
    """``optim.lr=0.1`` as a key and a JSON value; what is no JSON is a text.

    >>> parse_setting("optim.lr=0.1"), parse_setting("optim.name=adamw"), parse_setting("data.flip=false")
    (('optim.lr', 0.1), ('optim.name', 'adamw'), ('data.flip', False))
    >>> parse_setting("optim.ema=none"), parse_setting("data.augment=none")  # nothing; the word, where it is a choice
    (('optim.ema', None), ('data.augment', 'none'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {text!r} must be KEY=VALUE, such as --set optim.lr=0.1")
    try:
        return key, json_module.loads(value)
    except ValueError:
        return key, None if value in ("none", "None") and value not in _words(key) else value


def _words(key: str) -> tuple[Any, ...]:
    """The words that the recipe takes at this key; empty where it takes others, or has no such key."""
    part, _, name = key.partition(".")
    owner = get_type_hints(Recipe).get(part)
    return get_args(get_type_hints(owner).get(name)) if is_dataclass(owner) else ()


def _merged(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(under.get(key), dict)
        both[key] = _merged(under[key], value) if nested else value
    return both
