"""The options that verbs share, and the recipe that those of ``train`` and ``finetune`` make.

The order of precedence, weakest first: defaults for the data, ``--recipe FILE``, flags, ``--set KEY=VALUE``.
"""

from __future__ import annotations

import json as json_module
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from steadytrain.config import Recipe
from steadytrain.config.defaults import apply_changes
from steadytrain.config.plain import leaves
from steadytrain.config.recipe import ASIDE
from steadytrain.config.synonyms import synonym
from steadytrain.config.transforms import split_transforms
from steadytrain.distributed.world import world_from_environment
from steadytrain.errors import InputError, RecipeError, did_you_mean

Json = Annotated[bool, Parameter(help="Print one JSON document.")]
Root = Annotated[
    str | None,
    Parameter(help="Folder that the paths in a .lst or table are relative to (default: the folder of the list)."),
]
LabelsFlag = Annotated[str | None, Parameter(help="A file of labels for images without folders of classes.")]
PathColumn = Annotated[
    str | None, Parameter(help="A table's column of paths, by its name or number (default: found by name and content).")
]
LabelColumn = Annotated[
    tuple[str, ...],
    Parameter(
        consume_multiple=False, help="A table's column of labels; may be given several times, for columns of 0 and 1."
    ),
]
SplitColumn = Annotated[str | None, Parameter(help="A table's column that says train, val or test.")]
DeviceFlag = Annotated[str, Parameter(help="auto, cpu, cuda or cuda:1.")]
WhichFlag = Annotated[
    Literal["best", "last"],
    Parameter(help="Which of a run's weights: the best by validation top-1, or the last."),
]
RepeatedFlag = Annotated[tuple[str, ...], Parameter(consume_multiple=False)]
"""``--set KEY=VALUE`` and its kin, which may be given several times."""

MAX_SECONDS, MAX_WORKERS = 3600, 1024

GROUPS = (
    "Data",
    "Model",
    "Images and augmentation",
    "Loss and rare classes",
    "Optimizer and schedule",
    "Precision and speed",
    "Ranks",
    "Run and output",
)
"""The headings that ``--help`` shows the training flags under, in their order."""
DATA, MODEL, IMAGES, LOSS, OPTIMIZER, SPEED, RANKS, OUTPUT = (
    Parameter(group=Group(name, sort_key=order)) for order, name in enumerate(GROUPS)
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The flags of ``train``, ``finetune`` and ``resume``; all else is in ``--recipe`` and ``--set``.

    Args:
        val: Validation data. [default: X-val.rec beside X-train.rec, val/ beside train/, else 10 % of each class]
        model: timm/NAME, a built-in such as resnet20, or pkg.mod:factory. [default: train: timm/resnet50, or resnet20
            for images up to 64 pixels; finetune: a small one whose weights are on this machine, else
            timm/mobilenetv3_large_100]
        weights: Start from this .safetensors or .pth file.
        train: What is trained: full, head, discriminative, gradual, probe (fits the classifier to features in one
            pass), head:1+full, probe+discriminative. [default: train: full; finetune: probe+discriminative]
        epochs: Passes over the training data. [default: train: 90, or 30 for images up to 64 pixels; finetune: 8]
        budget_minutes: finetune: choose method and epochs by what this machine does with the data, and end within so
            many minutes.
        patience: End the run when validation top-1 has not risen in so many evaluations. [default: never]
        batch_size: Images an update, over all devices; auto: what is fastest here, by measuring. [default: train: 128
            on each GPU; finetune: 16 on each GPU; fewer where that is more than a tenth of the images, but at least 2]
        lr: Peak learning rate, before it is scaled to the batch. [default: train: 0.1 for 256 images an update, or for
            128 if they are up to 64 pixels; finetune: 0.001]
        optimizer: sgd, nag, adam, adamw, signum, lbsgd, ... or timm/NAME (docs: optimizers). [default: train: sgd;
            finetune: adamw]
        weight_decay: Weight decay; norms and biases are exempt. [default: train: 5e-05, or 0.0005 for images up to 64
            pixels; finetune: 0.05]
        schedule: Learning-rate schedule: cosine, step, poly, one-cycle, plateau, "cosine:80 constant:15", ... (docs:
            schedules; steady schedule plots it). [default: cosine]
        warmup_epochs: Epochs in which the learning rate rises from 0 to its peak. [default: train: 5, or 0.5 for images
            up to 64 pixels; finetune: 0.5; at most a quarter of the run]
        grow_batch: Multiply the batch after so many epochs, such as 2@30,2@60, in place of a falling rate. [default:
            none]
        loss: Loss: cross-entropy, focal, binary, binary-focal, hinge, l1, l2 or pkg.mod:factory. [default:
            cross-entropy]
        class_weights: balanced: images of rare classes weigh more in the loss. [default: none]
        balance: classes: show all classes equally often, images of rare ones several times an epoch. [default: none]
        label_smoothing: Share of each target that is spread over all classes. [default: 0.1; train on images up to 64
            pixels: 0]
        ema: Decay per update of averaged weights, which are evaluated and exported; 0: none. [default: train: none;
            finetune: 0.99]
        transforms: Further augmentation, such as randaugment:2,9,mixup:0.2,erase:0.25; none: none (docs: augmentation).
            [default: none]
        holdout: Share of each class that is held out without validation data; 0: none. [default: 0.1]
        size: Side of the square input, in pixels. [default: the model's, or the images' if they are small]
        grow_size: Side of training images from some epochs on, such as 128@0,160@6,192@12; evaluation has --size.
            [default: --size]
        seed: Seed of initialisation, order and augmentation. [default: 0]
        repeats: Train with so many seeds, one run after another, and print the mean of their accuracies and its 95 %
            interval; the same command resumes and skips what is finished.
        precision: fp32, tf32, bf16, fp16, pure-bf16 or pure-fp16; auto: by measuring. [default: bf16 where the hardware
            computes in it, else fp32]
        compile: Compile the network first (torch.compile); other modes by --set precision.compile=MODE.
        device: auto, cpu, cuda or cuda:1; cuda:0,2: a rank on each of these GPUs. [default: auto]
        threads: Threads that load images; auto: by measuring. [default: by the number of cores]
        deterministic: Use only deterministic algorithms on a GPU; slower.
        graph: Replay each update as one CUDA graph: faster for small networks.
        recompute: Recompute activations in the backward pass: less memory, more time, same bits.
        procs: Ranks that train together on this machine; auto: one for each GPU. [default: 1]
        engine: How ranks train together: ddp exchanges gradients in every update; local averages weights once in
            --sync-every updates, for slow links (docs: engines); async lets workers push to servers, and wait for
            nobody (docs: async). [default: ddp]
        sync_every: Updates between two averages of the weights with --engine local. [default: 32]
        local_from: Epochs of exchanging gradients in every update before --engine local begins. [default: 0]
        workers: With --engine async, its workers, as --procs; else threads that load images, as --threads.
        servers: Servers of --engine async, which divide the parameters. [default: 1]
        staleness: Most updates that a push of --engine async may have missed; 0: all workers make each update together.
            [default: no bound]
        ray_address: Running Ray cluster for --engine async, such as 10.0.0.1:6379. [default: Ray is started here]
        join: Add workers to the run of this --run folder, which another command trains on the same --ray-address.
        price: Price of an hour of each machine: 2.40, 2.40 EUR, 0.30 EUR/kWh@450W, or an instance, such as p3.2xlarge
            or p3.2xlarge@us-east-1:spot; shows what the run costs. [default: $STEADYTRAIN_PRICE]
        notices: Save and stop in time when this machine is taken away: aws, gcp, azure, auto or file:PATH (docs: spot).
            [default: $STEADYTRAIN_NOTICES]
        root: Folder that the paths in a .lst or table are relative to. [default: the folder of the list]
        classes: A card (.json) whose class list, in its order, is used. [default: the names of the folders, sorted]
        run: Folder of the run; the same command resumes it. Of repeats: the folder that holds them. A URI, such as
            s3://bucket/runs/a: runs/a, kept there as well. [default: runs/MODEL-DATA-DIGEST, of repeats with -repeats]
        recipe: A recipe file: .toml, .json or .yaml. Flags overrule it.
        accept_licence: Use weights whose licence forbids commercial use, without being asked.
        probe: First measure how fast loading alone and updates alone are; the weights do not depend on it.
        explain: Print what would be trained, and in which number format each operation runs; train nothing.
        mxnet_log: Write the progress as MXNet's training scripts did, for tools that read their logs.
        set: Set any other value of the recipe: --set optim.clip_norm=1 (--help-recipe lists them).
        json: Print the outcome as one JSON document.
    """

    val: Annotated[str | None, Parameter(name=("--val", "--data-val")), DATA] = None
    model: Annotated[str | None, Parameter(name=("--model", "--network")), MODEL] = None
    weights: Annotated[
        str | None, Parameter(name=("--weights", "--initial-checkpoint", "--pretrained-model")), MODEL
    ] = None
    train: Annotated[str | None, MODEL] = None
    epochs: Annotated[float | None, Parameter(name=("--epochs", "--num-epochs")), OPTIMIZER] = None
    budget_minutes: Annotated[float | None, OPTIMIZER] = None
    patience: Annotated[int | None, OPTIMIZER] = None
    batch_size: Annotated[int | Literal["auto"] | None, Parameter(name=("--batch-size", "-b")), OPTIMIZER] = None
    lr: Annotated[float | None, OPTIMIZER] = None
    optimizer: Annotated[str | None, OPTIMIZER] = None
    weight_decay: Annotated[float | None, OPTIMIZER] = None
    schedule: Annotated[str | None, OPTIMIZER] = None
    warmup_epochs: Annotated[float | None, OPTIMIZER] = None
    grow_batch: Annotated[str | None, OPTIMIZER] = None
    loss: Annotated[str | None, LOSS] = None
    class_weights: Annotated[str | None, LOSS] = None
    balance: Annotated[str | None, LOSS] = None
    label_smoothing: Annotated[float | None, LOSS] = None
    ema: Annotated[float | None, OPTIMIZER] = None
    transforms: Annotated[str | None, IMAGES] = None
    holdout: Annotated[float | None, DATA] = None
    size: Annotated[int | None, Parameter(name=("--size", "--img-size")), IMAGES] = None
    grow_size: Annotated[str | None, IMAGES] = None
    seed: Annotated[int | None, OUTPUT] = None
    repeats: Annotated[int | None, OUTPUT] = None
    precision: Annotated[str | None, Parameter(name=("--precision", "--dtype")), SPEED] = None
    compile: Annotated[bool, Parameter(name=("--compile", "--torchcompile")), SPEED] = False
    device: Annotated[str | None, SPEED] = None
    threads: Annotated[int | Literal["auto"] | None, Parameter(name=("--threads", "--data-nthreads", "-j")), SPEED] = (
        None
    )
    deterministic: Annotated[bool, SPEED] = False
    graph: Annotated[bool, SPEED] = False
    recompute: Annotated[bool, Parameter(name=("--recompute", "--grad-checkpointing")), SPEED] = False
    procs: Annotated[int | Literal["auto"] | None, RANKS] = None
    engine: Annotated[str | None, RANKS] = None
    sync_every: Annotated[int | None, RANKS] = None
    local_from: Annotated[float | None, RANKS] = None
    workers: Annotated[int | Literal["auto"] | None, RANKS] = None
    servers: Annotated[int | None, RANKS] = None
    staleness: Annotated[int | None, RANKS] = None
    ray_address: Annotated[str | None, RANKS] = None
    join: Annotated[bool, RANKS] = False
    price: Annotated[str | None, OUTPUT] = None
    notices: Annotated[str | None, OUTPUT] = None
    root: Annotated[str | None, DATA] = None
    labels: Annotated[LabelsFlag, DATA] = None
    path_column: Annotated[PathColumn, DATA] = None
    label_column: Annotated[LabelColumn, DATA] = ()
    split_column: Annotated[SplitColumn, DATA] = None
    classes: Annotated[str | None, DATA] = None
    run: Annotated[str | None, OUTPUT] = None
    recipe: Annotated[Path | None, OUTPUT] = None
    accept_licence: Annotated[bool, MODEL] = False
    probe: Annotated[bool, SPEED] = False
    explain: Annotated[bool, OUTPUT] = False
    mxnet_log: Annotated[bool, OUTPUT] = False
    set: Annotated[RepeatedFlag, OUTPUT] = ()
    json: Annotated[bool, OUTPUT] = False

    def changes(self) -> dict[str, Any]:
        """Return what the flags and the ``--set`` values change, by the recipe's keys. Raises RecipeError."""
        flag_values = {key: getattr(self, flag) for flag, key in FLAGS.items()}
        flag_values["data.label_column"] = list(self.label_column) or None
        if self.workers is not None:
            flag_values["parallel.procs" if self._has_workers else "parallel.threads"] = self.workers
        values = {key: value for key, value in flag_values.items() if value is not None and key not in self.measured}
        values |= {f"parallel.{name}": True for name in ("deterministic", "graph", "recompute") if getattr(self, name)}
        if self.transforms is not None:
            values["data.transforms"] = list(split_transforms(self.transforms))
        for key, text in (("optim.grow_batch", self.grow_batch), ("data.grow_size", self.grow_size)):
            if text is not None:
                values[key] = [] if text == "none" else text.split(",")
        if self.ema == 0:
            values["optim.ema"] = None
        if self.compile:
            values["precision.compile"] = "default"
        if self.epochs is not None:
            values |= {"budget.epochs": self.epochs, "budget.steps": None}
        if self.weights is not None:
            values["model.pretrained"] = False
        values |= dict(parse_setting(text) for text in self.set)
        if values.get("budget.steps") and self.epochs is None:
            values["budget.epochs"] = None
        return values

    @property
    def measured(self) -> frozenset[str]:
        """The keys of the recipe that are left to measuring: ``--batch-size auto`` and its like."""
        flags = ["batch_size", "precision", "threads"]
        measured = {FLAGS[flag] for flag in flags if getattr(self, flag) == "auto"}
        return frozenset(
            measured | ({"parallel.threads"} if self.workers == "auto" and not self._has_workers else set())
        )

    @property
    def _has_workers(self) -> bool:
        """Whether ``--workers`` are processes that train."""
        table = self.file_values().get("parallel")
        in_file = table.get("engine") if isinstance(table, Mapping) else None
        named = dict(parse_setting(text) for text in self.set).get("parallel.engine")
        return (self.engine or named or in_file) == "async"

    @property
    def chosen(self) -> frozenset[str]:
        """The keys of the recipe that the user has chosen, by flags or by a file."""
        return frozenset({**dict(leaves(self.file_values())), **self.changes()})

    def file_values(self) -> dict[str, Any]:
        """Return what ``--recipe`` says; nothing where it is not given. Raises RecipeError."""
        return {} if self.recipe is None else read_recipe(self.recipe)

    def value(self, key: str) -> Any:
        """Look up what a key of the recipe will be by the flags, else by the recipe file; None where neither says it.

        >>> TrainingOptions(size=96).value("data.size")
        96
        """
        part, _, name = key.partition(".")
        table = self.file_values().get(part)
        in_file = table.get(name) if isinstance(table, Mapping) else None if name else table
        return self.changes().get(key, in_file)

    def recipe_over(self, defaults: Recipe) -> Recipe:
        """Lay the recipe file's values, and over those the flags' and ``--set`` values, over the defaults.

        Raises:
            RecipeError: an unknown key or a value that cannot be, by its name.
        """
        return apply_changes(defaults, self.file_values(), self.changes())

    @property
    def names_model(self) -> bool:
        """Whether the command line itself names the model, and so allows importing it."""
        return self.model is not None or any(parse_setting(text)[0] == "model.name" for text in self.set)


FLAGS = {
    "val": "data.val",
    "classes": "data.classes",
    "root": "data.root",
    "labels": "data.labels",
    "path_column": "data.path_column",
    "label_column": "data.label_column",
    "split_column": "data.split_column",
    "size": "data.size",
    "grow_size": "data.grow_size",
    "model": "model.name",
    "weights": "model.weights",
    "train": "model.train",
    "patience": "budget.patience",
    "lr": "optim.lr",
    "optimizer": "optim.name",
    "weight_decay": "optim.weight_decay",
    "schedule": "optim.schedule",
    "warmup_epochs": "optim.warmup_epochs",
    "grow_batch": "optim.grow_batch",
    "loss": "optim.loss",
    "class_weights": "optim.class_weights",
    "balance": "data.balance",
    "label_smoothing": "optim.label_smoothing",
    "ema": "optim.ema",
    "transforms": "data.transforms",
    "holdout": "data.holdout",
    "precision": "precision.name",
    "device": "parallel.device",
    "threads": "parallel.threads",
    "procs": "parallel.procs",
    "engine": "parallel.engine",
    "sync_every": "parallel.sync_every",
    "local_from": "parallel.local_from",
    "servers": "parallel.servers",
    "staleness": "parallel.staleness",
    "ray_address": "parallel.ray_address",
    "price": "parallel.price",
    "notices": "every.notices",
    "batch_size": "batch_size",
    "seed": "seed",
}
"""Flag -> the recipe's key that it sets."""


def own_defaults(verb: str, text: str) -> str:
    """Keep of the defaults in a help text those of one verb; of ``resume``, whose default is the run's value, none.

    >>> own_defaults("finetune", "Passes. [default: train: 90; finetune: 8; fewer if told]")
    'Passes. [default: 8; fewer if told]'
    >>> own_defaults("resume", "Passes. [default: train: 90; finetune: 8]")
    'Passes.'
    """
    if verb == "resume":
        return re.sub(r"\s*\[default:\s[^]]*\]", "", text)
    if verb not in ("train", "finetune"):
        return text
    other = "finetune" if verb == "train" else "train"

    def chosen(match: re.Match[str]) -> str:
        parts = re.split(r";\s+", match[1])
        defaults = [
            part.removeprefix(f"{verb}: ").removeprefix(f"{verb} ") for part in parts if not part.startswith(other)
        ]
        return f"[default: {'; '.join(defaults)}]"

    return re.sub(r"\[default:\s+([^]]*)\]", chosen, text)


@contextmanager
def help_of(verb: str) -> Iterator[None]:
    """Have the parser show the defaults of this verb; it takes the texts from the docstring of the options."""
    docstring = TrainingOptions.__doc__
    TrainingOptions.__doc__ = own_defaults(verb, docstring or "")
    try:
        yield
    finally:
        TrainingOptions.__doc__ = docstring


def flag_of(key: str) -> str:
    """Return the flag that sets a recipe's key; empty where only ``--set`` does."""
    keys = {"budget.epochs": "epochs", **{key: flag for flag, key in FLAGS.items()}}
    return f"--{keys[key].replace('_', '-')}" if key in keys else ""


def translate(words: Sequence[str]) -> list[str]:
    """Turn flags of other trainers that are exactly one of ours, or one of the recipe's keys, into those.

    >>> translate(["photos", "--wd", "0.1", "--momentum=0.8"])
    ['photos', '--weight-decay', '0.1', '--set', 'optim.momentum=0.8']
    """
    translated, waiting = [], list(words)
    while waiting:
        word, equals, value = waiting.pop(0).partition("=")
        is_theirs = word.startswith("--") and word != "--workers"  # that one is ours as well: of --engine async
        key = synonym(word) if is_theirs else ""
        if not key:
            translated.append(word + equals + value)
        elif flag := flag_of(key):
            translated.append(flag + equals + value)
        else:
            if not equals and not waiting:
                raise InputError(f"{word} needs a value: {word} VALUE, which is --set {key}=VALUE")
            translated += ["--set", f"{key}={value if equals else waiting.pop(0)}"]
    return translated


def read_table(path: Path, what: str = "a recipe") -> dict[str, Any]:
    """Read the values of a recipe file, or of another such table, by its extension. Raises RecipeError."""
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
        values = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {type(values).__name__}; {what} is a table of keys and values")
    return values


def read_recipe(path: Path) -> dict[str, Any]:
    """Read the values of a recipe file, without its tables that are no part of the recipe. Raises RecipeError."""
    return {name: value for name, value in read_table(path).items() if name not in ASIDE}


def parse_setting(text: str, *, example: str = "optim.lr=0.1") -> tuple[str, Any]:
    """Parse ``optim.lr=0.1`` as a key and a JSON value; what is no JSON is a text.

    >>> parse_setting("optim.lr=0.1"), parse_setting("optim.name=adamw"), parse_setting("data.flip=false")
    (('optim.lr', 0.1), ('optim.name', 'adamw'), ('data.flip', False))
    >>> parse_setting("optim.ema=none"), parse_setting("data.augment=none")  # nothing; the word, where it is a choice
    (('optim.ema', None), ('data.augment', 'none'))
    >>> parse_setting("model.freeze=conv_stem,blocks.0")  # a list needs neither brackets nor quotes
    ('model.freeze', ['conv_stem', 'blocks.0'])
    >>> parse_setting("data.mean=0.5,0.5,0.5")
    ('data.mean', [0.5, 0.5, 0.5])
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {text!r} must be KEY=VALUE, such as --set {example}")
    try:
        return key, json_module.loads(value)
    except ValueError:
        pass
    part, _, name = key.partition(".")
    owner = get_type_hints(Recipe).get(part)
    hint = get_type_hints(owner).get(name) if is_dataclass(owner) else None
    if hint == tuple[str, ...]:
        return key, list(split_transforms(value)) if name == "transforms" else value.split(",")
    kinds = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is tuple]
    if kinds and re.fullmatch(r"[\d.eE+,\s()-]+", value):  # 0.5,0.5,0.5
        with suppress(ValueError):
            return key, [json_module.loads(part) for part in value.strip(" ()").split(",") if part.strip()]
    words = get_args(hint)
    return key, None if value in ("none", "None") and value not in words else value


def require_range(name: str, value: float | None, most: int, *, least: int = 1) -> None:
    """Refuse a count outside of ``least`` to ``most``; None stands for the default. Raises InputError."""
    if value is not None and not least <= value <= most:
        raise InputError(f"{name} is {value}; it must be from {least} to {most}")


def require_alone(verb: str) -> None:
    """Refuse a launcher's ranks for a command that starts its own. Raises InputError."""
    if (world := world_from_environment(os.environ)).size > 1:
        raise InputError(f"{world.launcher} has started {world.size} ranks: {verb} starts its own, so run it once")


def require_seconds(seconds: float, flag: str = "--seconds") -> None:
    """Refuse a time to measure that is nothing or above an hour. Raises InputError."""
    if not 0 < seconds <= MAX_SECONDS:
        raise InputError(f"{flag} is {seconds}; it must be above 0, up to {MAX_SECONDS}")
