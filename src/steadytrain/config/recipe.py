"""What to train, as frozen data: the parts of a recipe, each validated where it is made, and the recipe itself."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from steadytrain.config.plain import PLAIN, build, check_types, leaves, plain
from steadytrain.config.synonyms import advice, synonym
from steadytrain.errors import RecipeError, did_you_mean

MOST_EPOCHS = 1_000_000
MOST_STEPS = 2**40
SAVE_SHARE, SAVE_SECONDS = 0.01, 60.0
"""The most that checkpoints may take of the time by default, and the seconds that lie between two at least."""

OPTIMIZERS = (
    *("sgd", "nag", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta"),
    *("signum", "ftml", "dcasgd", "lbsgd", "ftrl", "sgld"),
)
"""Names of the optimizers that are built in; those of timm are ``timm/NAME``."""

Numbers = Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16", "pure-fp16"]
CompileMode = Literal["none", "default", "reduce-overhead", "max-autotune"]
Layout = Literal["channels-last", "channels-first"]
Scalar = str | int | float | bool | None


def require(holds: bool, name: str, value: object, limit: str) -> None:
    """Refuse a value beyond its limit. Raises RecipeError with the name, the value and the limit."""
    if not holds:
        raise RecipeError(f"{name} is {value!r}; it must be {limit}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images, and how a training or an evaluation sample is cut from one.

    Args:
        train: a ``.rec`` file or a folder of classes.
        val: the same for validation; None holds out ``holdout`` of ``train``, stratified by class.
        holdout: fraction of each class held out when ``val`` is None; 0 trains without validation.
        classes: a card (``.json``) whose class list, in its order, is to be used.
        size: side of the square that the model sees, in pixels; None: the model's own, or the images'.
        augment: ``resized-crop`` (random area and ratio), ``pad-crop`` (pad, then crop), ``none`` (as in
            evaluation); ``auto`` takes pad-crop for images up to 64 pixels and resized-crop above.
        area: smallest and largest share of the image's area that ``resized-crop`` takes.
        ratio: smallest and largest width / height that ``resized-crop`` takes.
        pad: pixels of zero padding on each side for ``pad-crop``.
        flip: mirror half of the training images; None: yes for colour, no for grey (digits, letters).
        crop: evaluation takes the centre ``crop`` share of the shorter side; None: the model's own, or 0.875
            (1 for images up to 64 pixels).
        interpolation: of every resize; None: the model's own, or bilinear. Always antialiased.
        mean, std: per channel, of values in [0, 1]; None: the pretrained model's own, or the card's.
        root: the folder that the paths of lists and tables start from; None: each one's own.
        labels: a file of labels for ``train``, where its images lie in no folders of classes.
        order: of training: ``global``, or ``blocks``, which reads a disk that is slow to seek in long stretches.
    """

    train: str | Path
    val: str | Path | None = None
    holdout: float = 0.1
    classes: str | Path | None = None
    size: int | None = None
    augment: Literal["auto", "resized-crop", "pad-crop", "none"] = "auto"
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)
    pad: int = 4
    flip: bool | None = None
    crop: float | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    root: str | Path | None = None
    labels: str | Path | None = None
    order: Literal["global", "blocks"] = "global"

    def __post_init__(self) -> None:
        check_types(self, "data")
        require(bool(self.train), "data.train", self.train, "a .rec file or a folder of classes")
        require(0 <= self.holdout < 1, "data.holdout", self.holdout, "a fraction from 0 up to, not including, 1")
        require(self.size is None or 1 <= self.size <= 4096, "data.size", self.size, "from 1 to 4096 pixels")
        require(0 < self.area[0] <= self.area[1] <= 1, "data.area", self.area, "two rising fractions up to 1")
        require(0 < self.ratio[0] <= self.ratio[1], "data.ratio", self.ratio, "two rising numbers above 0")
        require(0 <= self.pad <= 512, "data.pad", self.pad, "from 0 to 512 pixels")
        require(self.crop is None or 0 < self.crop <= 1, "data.crop", self.crop, "a fraction above 0, up to 1")
        require(self.mean is None or len(self.mean) in (1, 3), "data.mean", self.mean, "1 or 3 numbers, one a channel")
        require(self.std is None or len(self.std) in (1, 3), "data.std", self.std, "1 or 3 numbers, one a channel")
        require(self.std is None or all(s > 0 for s in self.std), "data.std", self.std, "above 0 in every channel")


@dataclass(frozen=True)
class Model:
    """The network and the weights that it starts from.

    Args:
        name: ``timm/<name>``, a built-in (``resnet20``, ``mlp``, ...), a plain timm name, or ``pkg.mod:factory``.
        pretrained: fetch the hub's weights (needs a network once).
        weights: a local ``.safetensors`` or ``.pth`` file to start from instead.
        train: ``full`` (every parameter), ``head`` (the classifier alone), ``discriminative`` (every parameter,
            with rates that fall by ``decay`` from each layer to the one below).
        decay: the factor of ``discriminative``.
        batch_norm: ``train`` (statistics of each micro-batch), ``synchronous`` (of those of all ranks together), or
            ``frozen``: those that the weights came with are kept, which serves small batches better than noisy ones.
        options: keyword arguments for the model's factory, such as ``{"pad_type": "same"}``.
    """

    name: str
    _: KW_ONLY
    pretrained: bool = False
    weights: str | Path | None = None
    train: Literal["full", "head", "discriminative"] = "full"
    decay: float = 0.75
    batch_norm: Literal["train", "synchronous", "frozen"] = "train"
    options: Mapping[str, Scalar] = field(default_factory=dict)
    from_file: bool = field(default=False, compare=False, repr=False, metadata={PLAIN: False})

    def __post_init__(self) -> None:
        check_types(self, "model")
        require(bool(self.name), "model.name", self.name, "the name of a model")
        require(0 < self.decay <= 1, "model.decay", self.decay, "above 0, up to 1")
        if self.pretrained and self.weights:
            raise RecipeError(f"model.pretrained and model.weights={self.weights!r} exclude each other: drop one")


@dataclass(frozen=True)
class Optim:
    """The optimizer, its schedule, and what else shapes an update.

    Args:
        name: one of :data:`OPTIMIZERS`, or ``timm/NAME`` for one of timm's.
        lr: the peak learning rate, at ``base_batch_size`` images an update if that is given.
        base_batch_size: the rate used is ``lr * batch_size / base_batch_size`` (linear scaling, Goyal et al. 2017).
        momentum, nesterov: of SGD.
        betas, eps: of AdamW.
        weight_decay: never applied to norms and biases.
        schedule: ``cosine``, ``step``, ``poly`` or ``constant``, evaluated at every update.
        warmup_epochs: linear from 0 to ``lr``.
        milestones, factor: of ``step``: multiply by ``factor`` at each of these epochs.
        power: of ``poly``.
        final: share of ``lr`` at the end of ``cosine`` and ``poly``.
        label_smoothing: share of the target spread over all classes (Szegedy et al. 2016).
        clip_norm: largest global norm of the gradient; None does not clip.
        ema: decay per update of the averaged weights that are evaluated and exported; None keeps none.
        accumulate: split each batch into this many equal parts (less memory, the same update; but batch norms see
            one part at a time).
        options: other keyword arguments of the optimizer, such as ``{"batch_scale": 4}`` for ``lbsgd``.
    """

    name: str = "sgd"
    _: KW_ONLY
    lr: float = 0.1
    base_batch_size: int | None = None
    momentum: float = 0.9
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 5e-4
    schedule: Literal["cosine", "step", "poly", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    milestones: tuple[float, ...] = ()
    factor: float = 0.1
    power: float = 2.0
    final: float = 0.0
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    ema: float | None = None
    accumulate: int = 1
    options: Mapping[str, Scalar | tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "optim")
        if self.name not in OPTIMIZERS and not self.name.startswith("timm/"):
            near = did_you_mean(self.name, OPTIMIZERS)
            raise RecipeError(
                f"optim.name is {self.name!r}; it must be one of {', '.join(OPTIMIZERS)}, or timm/NAME.{near}"
            )
        require(self.lr > 0, "optim.lr", self.lr, "above 0")
        base = self.base_batch_size
        require(base is None or base > 0, "optim.base_batch_size", base, "above 0")
        require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "from 0 up to, not including, 1")
        require(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas, "from 0 up to, not including, 1")
        require(self.eps > 0, "optim.eps", self.eps, "above 0")
        require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        require(self.warmup_epochs >= 0, "optim.warmup_epochs", self.warmup_epochs, "0 or more")
        rising = all(a < b for a, b in zip((0.0, *self.milestones), self.milestones, strict=False))
        require(rising, "optim.milestones", self.milestones, "rising epochs above 0")
        has_steps = self.schedule != "step" or bool(self.milestones)
        require(has_steps, "optim.milestones", self.milestones, "given for schedule=step")
        require(0 < self.factor <= 1, "optim.factor", self.factor, "above 0, up to 1")
        require(self.power > 0, "optim.power", self.power, "above 0")
        require(0 <= self.final <= 1, "optim.final", self.final, "a share of lr, 0 to 1")
        require(0 <= self.label_smoothing < 1, "optim.label_smoothing", self.label_smoothing, "0 up to 1")
        require(self.clip_norm is None or self.clip_norm > 0, "optim.clip_norm", self.clip_norm, "above 0")
        require(self.ema is None or 0 < self.ema < 1, "optim.ema", self.ema, "between 0 and 1, such as 0.999")
        require(self.accumulate >= 1, "optim.accumulate", self.accumulate, "1 or more")

    def scaled_lr(self, batch_size: int) -> float:
        """The peak learning rate for this many images an update."""
        return self.lr * batch_size / self.base_batch_size if self.base_batch_size else self.lr


@dataclass(frozen=True)
class Precision:
    """Number formats, how images lie in memory, and by which code it is computed.

    Args:
        name: ``fp32``; ``tf32``, the same numbers with products rounded by NVIDIA's tensor cores; ``bf16`` and
            ``fp16``, which convert what convolutions and matrix products take (autocast, with dynamic loss scaling for
            fp16); ``pure-bf16`` and ``pure-fp16``, whose parameters and gradients have 16 bits too, beside fp32 masters
            for the optimizer (MXNet's ``multi_precision``).
        channels_last: lay images out as NHWC, which is faster wherever convolutions dominate.
        compile: have ``torch.compile`` make code for this network on this machine, in the mode of this name, before the
            first update; ``none``: torch's own kernels, one after another.
    """

    name: Numbers = "fp32"
    _: KW_ONLY
    channels_last: bool = True
    compile: CompileMode = "none"

    def __post_init__(self) -> None:
        check_types(self, "precision")

    @property
    def is_pure(self) -> bool:
        """Whether parameters and gradients have 16 bits as well."""
        return self.name.startswith("pure-")

    @property
    def products(self) -> str:
        """The numbers that are multiplied: ``fp32``, ``tf32``, ``bf16`` or ``fp16``."""
        return self.name.removeprefix("pure-")

    @property
    def layout(self) -> Layout:
        """How images lie in memory while a network is trained."""
        return "channels-last" if self.channels_last else "channels-first"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: ``epochs`` (a fraction is fine) or ``steps`` (updates); exactly one of them."""

    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        check_types(self, "budget")
        if (self.epochs is None) == (self.steps is None):
            raise RecipeError(f"budget needs epochs or steps, not both: epochs={self.epochs} steps={self.steps}")
        epochs, steps = self.epochs, self.steps
        limit = f"above 0, up to {MOST_EPOCHS:,}"
        require(epochs is None or 0 < epochs <= MOST_EPOCHS, "budget.epochs", epochs, limit)
        require(steps is None or 0 < steps <= MOST_STEPS, "budget.steps", steps, f"above 0, up to {MOST_STEPS:,}")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """What the work is spread over. Not part of the digest: it does not say *what* is trained.

    Args:
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:1``.
        threads: threads of the feed; None: chosen from the cores that this process may use.
        compute_threads: threads inside operations on a CPU; None: one for each core, shared among the ranks there.
        procs: ranks that the command starts on this machine, where no launcher has; ``auto``: one for each GPU.
        restarts: so often a command that has started ranks starts them anew where one was killed.
        deterministic: on a GPU, only algorithms that give the same bits each time, and no choosing by speed.
        graph: record what an update asks of a GPU as one graph of kernels, and replay it.
        recompute: keep less of each forward pass, and compute it again in the backward pass: less memory, more time.
        compress: what gradients are exchanged as: ``none`` (as they are), ``fp16``, ``bf16``, ``2bit``.
        threshold: of ``2bit``, in the unit of the sum of the gradients of a rank's images, as MXNet has it.
    """

    device: str = "auto"
    threads: int | None = None
    compute_threads: int | None = None
    procs: int | Literal["auto"] | None = None
    restarts: int = 3
    deterministic: bool = False
    graph: bool = False
    recompute: bool = False
    compress: Literal["none", "fp16", "bf16", "2bit"] = "none"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_types(self, "parallel")
        procs = self.procs
        require(not isinstance(procs, int) or 1 <= procs <= 256, "parallel.procs", procs, "1 to 256, or auto")
        require(0 <= self.restarts <= 1000, "parallel.restarts", self.restarts, "0 to 1000")
        require(0 < self.threshold < float("inf"), "parallel.threshold", self.threshold, "above 0")
        require(self.threads is None or 1 <= self.threads <= 256, "parallel.threads", self.threads, "1 to 256")
        compute = self.compute_threads
        require(compute is None or 1 <= compute <= 1024, "parallel.compute_threads", compute, "1 to 1024")


@dataclass(frozen=True, kw_only=True)
class Every:
    """How often things are written. Not part of the digest: no weight depends on it.

    Args:
        log_steps: updates between two log lines.
        evaluate_epochs: epochs between two evaluations (one always ends the run).
        save_steps: updates between two checkpoints; None: at evaluations and by time.
        save_minutes: minutes between two checkpoints (one always ends the run); None: as often as costs at most
            :data:`SAVE_SHARE` of the time. See :meth:`seconds_between_saves`.
        keep: newest checkpoints to keep.
        stall_minutes: minutes that a run may stand still, after that was noticed, before it is ended; None or 0: never.
    """

    log_steps: int = 20
    evaluate_epochs: float = 1.0
    save_steps: int | None = None
    save_minutes: float | None = None
    keep: int = 2
    stall_minutes: float | None = 15.0

    def __post_init__(self) -> None:
        check_types(self, "every")
        require(self.log_steps >= 1, "every.log_steps", self.log_steps, "1 or more")
        require(self.evaluate_epochs > 0, "every.evaluate_epochs", self.evaluate_epochs, "above 0")
        require(self.save_steps is None or self.save_steps >= 1, "every.save_steps", self.save_steps, "1 or more")
        minutes = self.save_minutes
        require(minutes is None or minutes > 0, "every.save_minutes", minutes, "above 0")
        require(self.keep >= 1, "every.keep", self.keep, "1 or more")
        stall = self.stall_minutes
        require(stall is None or 0 <= stall < float("inf"), "every.stall_minutes", stall, "0 or more; 0: never")

    def seconds_between_saves(self, cost: float, *, evaluated: bool = False) -> float:
        """Seconds after which a checkpoint is due again, where one takes ``cost`` seconds.

        By default saving takes at most :data:`SAVE_SHARE` of the time, and without an evaluation at least
        :data:`SAVE_SECONDS` lie between two. ``evaluated``: right after an evaluation.

        >>> Every().seconds_between_saves(0.05), Every().seconds_between_saves(2.0)
        (60.0, 200.0)
        >>> Every().seconds_between_saves(0.05, evaluated=True), Every(save_minutes=5).seconds_between_saves(2.0)
        (5.0, 300.0)
        """
        if self.save_minutes is not None:
            return 60 * self.save_minutes
        earliest = 0.0 if evaluated and self.save_steps is None else SAVE_SECONDS
        return max(earliest, cost / SAVE_SHARE)


LATER_KEYS: tuple[tuple[str, str, object], ...] = (
    ("data", "order", "global"),
    ("data", "root", None),
    ("data", "labels", None),
    ("precision", "compile", "none"),
    ("optim", "options", {}),
)
"""Keys that came later than the first digests, with the value that leaves a digest as it was."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that says what to train. ``batch_size`` is global: images an update, over every device."""

    data: Data
    model: Model
    optim: Optim = field(default_factory=Optim)
    precision: Precision = field(default_factory=Precision)
    budget: Budget = field(default_factory=lambda: Budget(epochs=10))
    parallel: Parallel = field(default_factory=Parallel)
    every: Every = field(default_factory=Every)
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self, "")
        require(1 <= self.batch_size <= 2**20, "batch_size", self.batch_size, f"1 to {2**20}")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2**63 - 1")
        for value, other, why in self._conflicts():
            raise RecipeError(f"{value} and {other} exclude each other: {why}")
        if self.batch_size % self.optim.accumulate:
            raise RecipeError(
                f"batch_size={self.batch_size} cannot be split into optim.accumulate="
                f"{self.optim.accumulate} equal parts: choose a divisor"
            )

    def _conflicts(self) -> Iterator[tuple[str, str, str]]:
        """Yield pairs of values that cannot be together, and the reason with the way out."""
        precision, compress, accumulate = self.precision, self.parallel.compress, self.optim.accumulate
        compressed, numbers = f"parallel.compress={compress!r}", f"precision.name={precision.name!r}"
        compiled = f"precision.compile={precision.compile!r}"
        if compress == "2bit" and precision.name == "fp16":
            why = "the loss scale changes what a threshold means; use bf16, or compress=fp16"
            yield compressed, numbers, why
        if compress != "none" and precision.is_pure:
            yield compressed, numbers, "its gradients have 16 bits already; use compress=none"
        if precision.compile == "reduce-overhead" and accumulate > 1:
            why = "a CUDA graph reuses the memory of gradients that are to be added up; use compile=default"
            yield compiled, f"optim.accumulate={accumulate}", why
        if self.parallel.graph and precision.compile not in ("none", "default"):
            yield compiled, "parallel.graph=True", "that mode records graphs of its own; use compile=default"
        if precision.compile != "none" and self.model.batch_norm == "synchronous":
            why = "what ranks exchange inside a pass cannot be compiled; leave one of them out"
            yield compiled, "model.batch_norm='synchronous'", why

    @property
    def records_graphs(self) -> bool:
        """Whether updates, or compiled code, are recorded as CUDA graphs."""
        return self.parallel.graph or self.precision.compile in ("reduce-overhead", "max-autotune")

    @property
    def digest(self) -> str:
        """Twelve hex digits that name what is trained (``parallel`` and ``every`` left out)."""
        values = {name: part for name, part in self.to_dict().items() if name not in ("parallel", "every")}
        for part, name, usual in LATER_KEYS:
            if values[part][name] == usual:
                del values[part][name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def with_(self, changes: Mapping[str, object] | None = None, /, **more: object) -> Recipe:
        """Return a copy with some values changed: ``recipe.with_({"optim.lr": 0.2}, batch_size=64)``.

        Raises:
            RecipeError: an unknown key (with the nearest known one) or a value that cannot be.
        """
        values, all_changes = self.to_dict(), {**(changes or {}), **more}
        for key, value in all_changes.items():
            *outer, last = key.split(".")
            table = values
            if not outer and key not in values:  # perhaps without its part: lr for optim.lr
                outer = [key]
            for name in outer:
                if not isinstance(table.get(name), dict):
                    known = (*(name for name, _ in leaves(values)), *values)
                    raise RecipeError(f"unknown key {key!r} in the recipe.{_key_hint(key, known)}")
                table = table[name]
            table[last] = plain(value)
        recipe, model = Recipe.from_dict(values), all_changes.get("model")
        if "model.name" in all_changes:
            from_file = False
        elif isinstance(model, Model):
            from_file = model.from_file
        else:
            from_file = self.model.from_file or recipe.model.name != self.model.name
        return replace(recipe, model=replace(recipe.model, from_file=from_file))

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and scalars."""
        values: dict[str, Any] = plain(self)
        return values

    def to_json(self) -> str:
        """Return indented JSON, the form of a run's ``recipe.json``."""
        return json.dumps(plain(self), indent=2) + "\n"

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        """Build from what :meth:`to_dict` gives, or a part of it; raises RecipeError on a wrong key or value."""
        recipe = build(Recipe, _without_removed_keys(values), hint=_key_hint)
        return replace(recipe, model=replace(recipe.model, from_file=True))

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Read JSON; raises RecipeError where it is not a recipe."""
        try:
            return Recipe.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise RecipeError(f"the recipe is not JSON: {error}") from None

    @staticmethod
    def from_toml(text: str) -> Recipe:
        """Read TOML; raises RecipeError where it is not a recipe."""
        try:
            return Recipe.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"the recipe is not TOML: {error}") from None

    def differences(self, other: Recipe) -> list[str]:
        """Return what a change of recipe comes down to, a line each: ``optim.lr: 0.1 -> 0.2``."""
        mine, theirs = dict(leaves(self.to_dict())), dict(leaves(other.to_dict()))
        keys = sorted(mine.keys() | theirs.keys())
        return [f"{k}: {mine.get(k)!r} -> {theirs.get(k)!r}" for k in keys if mine.get(k) != theirs.get(k)]


def _key_hint(key: str, known: Iterable[str]) -> str:
    """Say what an unknown key is called here, what there is instead, or which known one is near."""
    last = key.rpartition(".")[2]
    known = list(dict.fromkeys(known))
    whole = [name for name in known if name.rpartition(".")[2] == last]  # optim.lr, for lr or train.lr
    if whole or (nearest := synonym(last)):
        return f" Did you mean {' or '.join(whole) or nearest}?"
    return advice(last) or did_you_mean(key.partition(".")[0], [name for name in known if "." not in name])


def _without_removed_keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop keys that recipes of earlier versions have. Raises RecipeError where one of them was in use."""
    precision = values.get("precision") if isinstance(values, Mapping) else None
    if not isinstance(precision, Mapping) or "blocked" not in precision:
        return values
    if precision["blocked"] is not False:
        raise RecipeError(
            "precision.blocked was removed: leave it out, and training computes with channels last; a run that began"
            " with it cannot go on: start it again in another --run folder"
        )
    return {**values, "precision": {name: value for name, value in precision.items() if name != "blocked"}}
