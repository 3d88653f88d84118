"""The parts of a recipe, as frozen data: each is validated when it is constructed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from steadytrain.config.batches import parse_growth, parse_sizes
from steadytrain.config.factories import FACTORY
from steadytrain.config.losses import parse_loss
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import PLAIN, check_types
from steadytrain.config.stages import RISING, parse_schedule, parse_warmup
from steadytrain.config.transforms import parse_transforms
from steadytrain.errors import RecipeError, did_you_mean

MOST_EPOCHS = 1_000_000
MOST_STEPS = 2**40
SAVE_SHARE, SAVE_SECONDS = 0.01, 60.0
"""The most that checkpoints may take of the time by default, and the seconds that lie between two at least."""

ADAMS = ("adam", "adamw", "nadam", "radam", "adamax")
OPTIMIZERS = (
    *("sgd", "nag", *ADAMS, "rmsprop", "adagrad", "adadelta"),
    *("muon", "signum", "ftml", "dcasgd", "lbsgd", "ftrl", "sgld"),
)
"""Names of the optimizers that are built in; those of timm are ``timm/NAME``, the user's own ``pkg.mod:factory``."""

TIMM_OPTIMIZERS = (
    *("adabelief", "adafactor", "adahessian", "adamp", "adan", "adopt", "lamb", "lambc", "laprop", "lars", "lion"),
    *("madgrad", "mars", "momentum", "nadamw", "nesterov", "novograd", "radamw", "rmsproptf", "sgdp", "sgdw"),
)
"""Those of timm that are asked for by their bare names."""

Numbers = Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16", "pure-fp16"]
CompileMode = Literal["none", "default", "reduce-overhead", "max-autotune"]
GRAPH_OPTIMIZERS = ("sgd", "nag", "adam", "adamw")
"""Optimizers whose fused kernels read the learning rate and count updates on the device, as ``parallel.graph`` asks."""
Layout = Literal["channels-last", "channels-first"]
Scalar = str | int | float | bool | None


def require(holds: bool, name: str, value: object, limit: str) -> None:
    """Refuse a value beyond its limit. Raises RecipeError with the name, the value and the limit."""
    if not holds:
        raise RecipeError(f"{name} is {value!r}; it must be {limit}")


def refuse_secrets(name: str, value: str | Path | None) -> None:
    """Refuse a URI with a password or a signature, since recipes are kept. Raises RecipeError, which has none of it."""
    if isinstance(value, str) and re.match(r"(?!hf:)\w+://[^/]*@|https?://[^?]*\?", value):
        shown = re.sub(r"//[^/]*@", "//...@", value).partition("?")[0]
        raise RecipeError(
            f"{name} is {shown} with a password or a query, such as a signature, which would be kept in the run: leave"
            " it out, and give credentials in the environment"
        )


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images: where they are, how they are split, and how samples are cropped.

    Args:
        train: training data: a ``.rec`` file, a folder of classes, or any other source that ``steady pack`` reads.
        val: validation data, in any of these forms. None holds out the share ``holdout`` of the training data.
        holdout: share of each class that is held out for validation if ``val`` is None: at least 0, below 1. 0 trains
            without validation.
        classes: a card (``.json``) whose class names, in their order, are used as the class list.
        size: side of the square input in pixels, 1 to 4096. None uses the model's own size, or the images' if they are
            small.
        grow_size: side of training images from some epochs on, such as ``["128@0", "160@6", "192@12"]`` (progressive
            resizing; page augmentation). Before the first, and in evaluation always, it is ``size``.
        augment: random cropping of training images: ``resized-crop`` (random area and aspect ratio), ``pad-crop`` (pad
            with zeros, then crop) or ``none`` (crop as in evaluation). ``auto`` is ``pad-crop`` for images of up to 64
            pixels and ``resized-crop`` for larger ones.
        area: smallest and largest share of the image area that ``resized-crop`` takes, above 0, up to 1.
        ratio: smallest and largest aspect ratio (width / height) that ``resized-crop`` takes, above 0.
        pad: zero padding on each side for ``pad-crop``, 0 to 512 pixels.
        flip: flip half of the training images horizontally; ``alternating`` draws them once, and flips the other half
            in every other epoch. None flips colour images and leaves grey ones (digits, letters) alone.
        transforms: further augmentation of training batches, such as ``["randaugment:2,9", "mixup:0.2"]`` (page
            augmentation): ``vflip``, ``rotate``, ``shear``, ``randaugment``, ``trivialaugment``, ``autoaugment``,
            ``augmix``, ``color``, ``grey``, ``pkg.mod:factory``, ``erase``, ``mixup``, ``cutmix``, applied in this
            order.
        crop: share of the shorter side that the centre crop of evaluation takes, above 0, up to 1. None uses the
            model's own, else 0.875, or 1 for images of up to 64 pixels.
        interpolation: used for every resize, always antialiased. None uses the model's own, else bilinear.
        mean: mean of each channel (1 or 3 numbers) for pixel values from 0 to 1. None uses that of the pretrained
            weights, else that of the training data.
        std: standard deviation of each channel (1 or 3 numbers above 0); None as for ``mean``.
        root: folder that the paths in a list or a table are relative to. None uses the folder of the list.
        labels: file of labels for ``train``, for images that are not in class folders.
        path_column: column of a table that has the images' paths, by its name or its number from 1 on. None finds it.
        label_column: column of a table that has the labels; several, such as ``["cat", "dog"]``, have a 1 for each
            label that an image has. None finds it.
        split_column: column of a table that says which images are for training, validation and test. None finds it.
        order: order of training images: ``global`` shuffles all of them; ``blocks`` shuffles blocks and reads each in
            one go, for disks that are slow at random reads.
        balance: ``classes`` shows all classes equally often: an epoch has as many images as without, but those of rare
            classes several times and only some of frequent ones. ``none`` shows each image once an epoch.
        repeats: show each image so many times in a row, each time cropped, flipped and transformed anew (repeated
            augmentation), 1 to 16. An epoch has as many images as without, so that ``3`` shows a third of them, and
            three epochs show each.
        from_file: not part of a recipe file: the keys of ``strangers.GATES`` whose values were read from a file rather
            than written in code.
    """

    train: str | Path
    val: str | Path | None = None
    holdout: float = 0.1
    classes: str | Path | None = None
    size: int | None = None
    grow_size: tuple[str, ...] = ()
    augment: Literal["auto", "resized-crop", "pad-crop", "none"] = "auto"
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)
    pad: int = 4
    flip: bool | Literal["alternating"] | None = None
    transforms: tuple[str, ...] = ()
    crop: float | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    root: str | Path | None = None
    labels: str | Path | None = None
    path_column: str | None = None
    label_column: tuple[str, ...] = ()
    split_column: str | None = None
    order: Literal["global", "blocks"] = "global"
    balance: Literal["none", "classes"] = "none"
    repeats: int = 1
    from_file: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={PLAIN: False})

    def __post_init__(self) -> None:
        if isinstance(self.label_column, str):
            object.__setattr__(self, "label_column", (self.label_column,))
        check_types(self, "data")
        refuse_secrets("data.train", self.train)
        refuse_secrets("data.val", self.val)
        require(bool(self.train), "data.train", self.train, "a .rec file or a folder of classes")
        require(0 <= self.holdout < 1, "data.holdout", self.holdout, "a fraction from 0 up to, not including, 1")
        require(self.size is None or 1 <= self.size <= 4096, "data.size", self.size, "from 1 to 4096 pixels")
        sizes = tuple(f"{size}@{epoch:g}" for size, epoch in parse_sizes(self.grow_size))
        object.__setattr__(self, "grow_size", sizes)
        require(0 < self.area[0] <= self.area[1] <= 1, "data.area", self.area, "two rising fractions up to 1")
        require(0 < self.ratio[0] <= self.ratio[1], "data.ratio", self.ratio, "two rising numbers above 0")
        require(0 <= self.pad <= 512, "data.pad", self.pad, "from 0 to 512 pixels")
        require(1 <= self.repeats <= 16, "data.repeats", self.repeats, "from 1 to 16")
        object.__setattr__(self, "transforms", tuple(map(str, parse_transforms(self.transforms))))
        require(self.crop is None or 0 < self.crop <= 1, "data.crop", self.crop, "a fraction above 0, up to 1")
        require(self.mean is None or len(self.mean) in (1, 3), "data.mean", self.mean, "1 or 3 numbers, one a channel")
        require(self.std is None or len(self.std) in (1, 3), "data.std", self.std, "1 or 3 numbers, one a channel")
        require(self.std is None or all(s > 0 for s in self.std), "data.std", self.std, "above 0 in every channel")


@dataclass(frozen=True)
class Model:
    """The network and its initial weights.

    Args:
        name: ``timm/NAME``, a built-in model (``resnet20``, ``mlp``, ...), a plain timm name, ``torchvision/NAME``,
            ``mxnet:FILE`` (an MXNet checkpoint), or ``pkg.mod:factory``.
        pretrained: start from the pretrained weights of the Hugging Face hub, which are downloaded once.
        weights: start from this ``.safetensors``, ``.pth`` or ``.params`` file instead.
        train: what is trained: ``full`` (every parameter), ``head`` (only the classifier), ``discriminative`` (every
            parameter, with a learning rate that falls by the factor ``decay`` from each layer to the one below),
            ``gradual`` (so too, and layers join one by one from the top down, over half of the run; ``gradual:0.5``:
            one each half epoch) or ``probe`` (the classifier is fitted to the features of the frozen network, without
            updates; ``probe:3``: to those of two augmented passes too). ``head:1+full`` trains the classifier alone for
            1 epoch first; ``probe+discriminative`` begins with a fitted classifier.
        freeze: names of parameters or modules that are not trained, such as ``["conv_stem", "blocks.[01].*"]``, with
            the wildcards of a shell; batch norms whose parameters are frozen keep their statistics.
        decay: factor of the learning rate between two layers for ``discriminative`` and ``gradual``, above 0, up to 1.
        batch_norm: statistics that batch norms use in training: ``train`` (of each micro-batch), ``synchronous`` (of
            all ranks together) or ``frozen`` (those of the initial weights, which suits small batches).
        options: keyword arguments of the model's factory, such as ``{"pad_type": "same"}``.
        from_file: not part of a recipe file: the keys of ``strangers.GATES`` whose values were read from a file rather
            than written in code.
    """

    name: str
    _: KW_ONLY
    pretrained: bool = False
    weights: str | Path | None = None
    train: str = "full"
    freeze: tuple[str, ...] = ()
    decay: float = 0.75
    batch_norm: Literal["train", "synchronous", "frozen"] = "train"
    options: Mapping[str, Scalar] = field(default_factory=dict)
    from_file: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={PLAIN: False})

    def __post_init__(self) -> None:
        check_types(self, "model")
        require(bool(self.name), "model.name", self.name, "the name of a model")
        parse_train(self.train)
        require(0 < self.decay <= 1, "model.decay", self.decay, "above 0, up to 1")
        if self.pretrained and self.weights:
            raise RecipeError(f"model.pretrained and model.weights={self.weights!r} exclude each other: drop one")


@dataclass(frozen=True)
class Optim:
    """The optimizer, the learning-rate schedule, and the loss.

    Args:
        name: optimizer, ``sgd``, ``nag``, ``adam``, ``adamw``, ``nadam``, ``radam``, ``adamax``, ``rmsprop``,
            ``adagrad``, ``adadelta``, ``signum``, ``ftml``, ``dcasgd``, ``lbsgd``, ``ftrl``, ``sgld``, ``muon``,
            ``timm/NAME`` or ``pkg.mod:factory``.
        lr: peak learning rate, above 0; for ``base_batch_size`` images an update if that is set.
        base_batch_size: scale the learning rate linearly: ``lr * batch_size / base_batch_size`` is used (Goyal et al.
            2017). None uses ``lr`` as it is.
        momentum: momentum of ``sgd`` and ``nag``, from 0 to below 1.
        nesterov: use Nesterov momentum in ``sgd``. None does not, as in torch and MXNet; ``nag`` always does.
        betas: the two decay rates of Adam's moments (and AdamW's, NAdam's, ...), from 0 to below 1.
        eps: added to the denominator of the same optimizers, above 0.
        weight_decay: weight decay, 0 or more; norms and biases are exempt.
        schedule: learning-rate schedule, evaluated at every update: a law, ``LAW,NAME=VALUE``, or several with their
            epochs (``cosine:80 constant:15``). Laws: ``constant``, ``linear``, ``cosine``, ``restarts``, ``poly``,
            ``exponential``, ``inverse-sqrt``, ``step``, ``factor``, ``one-cycle``, ``triangular``, ``plateau``,
            ``mxnet/factor``, ``mxnet/multi-factor``, ``mxnet/poly``, ``mxnet/cosine``.
        warmup_epochs: epochs in which the learning rate rises from 0 to its peak.
        warmup: how it rises: ``linear``, ``linear:SHARE`` from a share of the peak, ``constant:SHARE`` at it, or
            ``power:EXPONENT``.
        milestones: epochs at which ``step`` and ``mxnet/multi-factor`` multiply the learning rate by
            ``factor``, in rising order.
        factor: what ``step``, ``factor`` and ``plateau`` multiply the learning rate by, above 0, up to 1.
        power: exponent of ``poly``, above 0.
        final: where the laws that fall end, and below which none falls, as a share of the peak, 0 to 1.
        loss: ``cross-entropy``, ``focal`` (``focal:2`` sets gamma), ``binary`` (each label by itself),
            ``binary-focal``, ``hinge`` (``hinge:1`` sets the margin), ``l1``, ``l2`` or ``pkg.mod:factory``; ``auto``
            is ``cross-entropy``, and ``binary`` where images may have several labels.
        class_weights: ``balanced`` lets an image weigh N / (K n) in the loss, where n of N images have its class, one
            of K; of several labels, those that have one weigh (N - n) / n. ``none`` weighs all alike.
        label_smoothing: share of each target that is spread over all classes, from 0 to below 1 (Szegedy et al. 2016);
            of several labels, that is drawn towards 1/2.
        clip_norm: clip the gradient to this global norm, above 0. None does not clip.
        ema: decay per update of an exponential moving average of the weights, which is evaluated and exported, between
            0 and 1. None keeps no average.
        swa: share of the run after which the weights of every update are averaged alike (stochastic weight averaging),
            from 0 to below 1, such as 0.75; until then the weights are evaluated as they are. None keeps no average.
        accumulate: compute each batch in this many equal parts: less memory, same update, but batch norms see one part
            at a time.
        grow_batch: multiply the batch after so many epochs, such as ``["2@30", "2@60"]`` (page schedules); it is made
            of more micro-batches of the same size, so that memory does not grow. The learning rate is not scaled to it.
        options: other keyword arguments of the optimizer, such as ``{"batch_scale": 4}`` for ``lbsgd``.
        from_file: not part of a recipe file: the keys of ``strangers.GATES`` whose values were read from a file rather
            than written in code.
    """

    name: str = "sgd"
    _: KW_ONLY
    lr: float = 0.1
    base_batch_size: int | None = None
    momentum: float = 0.9
    nesterov: bool | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup_epochs: float = 0.0
    warmup: str = "linear"
    milestones: tuple[float, ...] = ()
    factor: float = 0.1
    power: float = 2.0
    final: float = 0.0
    loss: str = "auto"
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    ema: float | None = None
    swa: float | None = None
    accumulate: int = 1
    grow_batch: tuple[str, ...] = ()
    options: Mapping[str, Scalar] = field(default_factory=dict)
    from_file: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={PLAIN: False})

    def __post_init__(self) -> None:
        check_types(self, "optim")
        if self.nesterov is None:  # a recipe says which momentum; where it means nothing it is True, as it always was
            object.__setattr__(self, "nesterov", self.name != "sgd")
        is_other = self.name.startswith("timm/") or FACTORY.fullmatch(self.name)
        if self.name not in OPTIMIZERS and not is_other:
            name = re.sub(r"[-_ ]", "", self.name.lower())
            near = f" Did you mean timm/{name}, with --lr?" if name in TIMM_OPTIMIZERS else ""
            near = near or did_you_mean(name, OPTIMIZERS)
            known = ", ".join(OPTIMIZERS)
            raise RecipeError(
                f"optim.name is {self.name!r}; it must be one of {known}, timm/NAME or pkg.mod:factory.{near}"
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
        stages = parse_schedule(self.schedule)
        for stage in stages:
            has_steps = stage.law not in ("step", "mxnet/multi-factor") or bool(self.milestones or stage.updates)
            require(has_steps, "optim.milestones", self.milestones, f"given for schedule={stage.law}")
            ends = stage.numbers.get("to", self.final)
            if stage.law == "exponential" and "factor" not in stage.numbers and not ends:
                raise RecipeError(
                    f"optim.schedule is {self.schedule!r}; exponential cannot fall to 0: write exponential,to=0.01, or"
                    " what it falls by in an epoch, exponential,factor=0.95"
                )
        if stages[0].law in RISING and self.warmup_epochs:
            raise RecipeError(
                f"optim.schedule={self.schedule!r} and optim.warmup_epochs={self.warmup_epochs:g} exclude each other:"
                f" {stages[0].law} begins low and rises by itself; leave one of them out (--warmup-epochs 0)"
            )
        parse_warmup(self.warmup)
        require(0 < self.factor <= 1, "optim.factor", self.factor, "above 0, up to 1")
        require(self.power > 0, "optim.power", self.power, "above 0")
        require(0 <= self.final <= 1, "optim.final", self.final, "a share of lr, 0 to 1")
        loss = parse_loss(self.loss)
        if loss.is_factory and (self.class_weights != "none" or self.label_smoothing):
            raise RecipeError(
                f"optim.loss={self.loss} does its own weighting and smoothing: set optim.class_weights=none and"
                " optim.label_smoothing=0"
            )
        require(0 <= self.label_smoothing < 1, "optim.label_smoothing", self.label_smoothing, "0 up to 1")
        require(self.clip_norm is None or self.clip_norm > 0, "optim.clip_norm", self.clip_norm, "above 0")
        require(self.ema is None or 0 < self.ema < 1, "optim.ema", self.ema, "between 0 and 1, such as 0.999")
        require(self.swa is None or 0 <= self.swa < 1, "optim.swa", self.swa, "from 0 to below 1, such as 0.75")
        if self.swa is not None and self.ema is not None:
            raise RecipeError(f"optim.swa={self.swa:g} and optim.ema={self.ema:g} exclude each other: give --ema 0")
        require(self.accumulate >= 1, "optim.accumulate", self.accumulate, "1 or more")
        growths = parse_growth(self.grow_batch)
        object.__setattr__(self, "grow_batch", tuple(f"{growth.times}@{growth.epoch:g}" for growth in growths))
        if growths and (counts := [stage.law for stage in stages if stage.law.startswith("mxnet/")]):
            raise RecipeError(
                f"optim.grow_batch={','.join(self.grow_batch)} and optim.schedule={self.schedule!r} exclude each other:"
                f" {counts[0]} counts updates, whatever their size; use another law"
            )

    @property
    def waits_for_evaluations(self) -> bool:
        """Whether the learning rate depends on evaluations."""
        return parse_schedule(self.schedule)[-1].law == "plateau"

    def scaled_lr(self, batch_size: int) -> float:
        """The peak learning rate for this many images an update."""
        return self.lr * batch_size / self.base_batch_size if self.base_batch_size else self.lr


@dataclass(frozen=True)
class Precision:
    """Number format, memory layout and compilation.

    Args:
        name: ``fp32``; ``tf32`` (fp32 with products rounded by NVIDIA's tensor cores); ``bf16`` or ``fp16`` (autocast,
            with loss scaling for fp16); ``pure-bf16`` or ``pure-fp16`` (16-bit parameters and gradients with fp32
            master weights, as MXNet's ``multi_precision``).
        channels_last: store images as NHWC, which is faster for most convolutional networks.
        compile: mode of ``torch.compile``; ``none`` runs the network eagerly.
    """

    name: Numbers = "fp32"
    _: KW_ONLY
    channels_last: bool = True
    compile: CompileMode = "none"

    def __post_init__(self) -> None:
        check_types(self, "precision")

    @property
    def records_graphs(self) -> bool:
        """Whether compiled code is recorded as CUDA graphs."""
        return self.compile in ("reduce-overhead", "max-autotune")

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
    """How long to train: set exactly one of epochs and steps.

    Args:
        epochs: passes over the training data, above 0, up to 1,000,000; may be a fraction; 0 for ``model.train=probe``.
        steps: updates instead of epochs, 1 or more.
        patience: end the run early when validation top-1 has not risen in so many evaluations, 1 or more. None never
            does. The learning rate falls as planned for the whole run.
        minutes: end the run early after so many minutes, start and evaluations included, above 0; what it does to the
            weights depends on the machine. None never does.
    """

    epochs: float | None = None
    steps: int | None = None
    patience: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_types(self, "budget")
        if (self.epochs is None) == (self.steps is None):
            raise RecipeError(f"budget needs epochs or steps, not both: epochs={self.epochs} steps={self.steps}")
        epochs, steps = self.epochs, self.steps
        limit = f"above 0, up to {MOST_EPOCHS:,}"
        require(epochs is None or 0 <= epochs <= MOST_EPOCHS, "budget.epochs", epochs, limit)
        require(steps is None or 0 < steps <= MOST_STEPS, "budget.steps", steps, f"above 0, up to {MOST_STEPS:,}")
        require(self.patience is None or self.patience >= 1, "budget.patience", self.patience, "1 or more evaluations")
        require(self.minutes is None or self.minutes > 0, "budget.minutes", self.minutes, "above 0")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Devices, threads and processes. Not part of the digest: it does not say *what* is trained.

    Args:
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``; ``cuda:0,2`` starts a rank on each.
        threads: threads that load images, 1 to 256. None chooses by the cores that this process may use.
        compute_threads: threads of torch operations on a CPU, 1 to 1024. None uses one for each core, shared among the
            ranks.
        procs: ranks to start on this machine, 1 to 256; ``auto`` starts one for each GPU. None starts none.
        restarts: how often ranks are restarted after one was killed, 0 to 1000.
        engine: how ranks train together: ``ddp`` exchanges gradients in every update, ``local`` averages weights once
            in ``sync_every`` updates, for slow links, ``async`` lets workers push to servers, and wait for nobody.
        shard: keep a part of parameters, gradients and the optimizer's state on each rank (FSDP), where the model does
            not fit one device.
        sync_every: updates between two averages of the weights with ``local``, 1 or more.
        local_from: epochs of exchanging gradients in every update before ``local`` begins (post-local SGD), 0 or more.
        outer: what ``local`` does with the averaged weights: ``average`` takes them, ``diloco`` makes a step of
            Nesterov's momentum towards them.
        outer_lr: learning rate of ``diloco``'s step, above 0.
        outer_momentum: momentum of ``diloco``'s step, 0 to below 1.
        servers: servers of ``async``, among which the parameters are divided, 1 to 64.
        staleness: most updates that a push of ``async`` may have missed: 0 makes it synchronous, else at least one for
            each other worker. None: there is no bound.
        staleness_power: ``async`` divides the learning rate of a push by ``(1 + staleness) ** staleness_power``, 0 or
            more; 0 uses it whole.
        ray_address: running Ray cluster that ``async`` uses, such as ``10.0.0.1:6379`` or ``auto``. None starts Ray on
            this machine.
        deterministic: use only deterministic algorithms on a GPU; slower.
        graph: record each update as a CUDA graph and replay it.
        recompute: recompute activations in the backward pass: less memory, more time, same bits.
        compress: format in which ranks exchange gradients: ``none``, ``fp16``, ``bf16``, ``2bit`` or ``powersgd``.
        threshold: threshold of ``2bit``, above 0, in units of the summed gradient of a rank's images, as in MXNet.
        power_rank: columns of ``powersgd``'s matrices, 1 to 128: more are more exact, and more bytes.
        power_from: epochs of exchanging whole gradients before ``powersgd`` begins, 0 or more.
        price: price of an hour of each machine, such as ``2.40``, ``2.40 EUR``, ``0.30 EUR/kWh@450W`` or an instance:
            ``p3.2xlarge@us-east-1:spot``. None: what the variable STEADYTRAIN_PRICE says, if anything.
        from_file: not part of a recipe file: the keys of ``strangers.GATES`` whose values were read from a file rather
            than written in code.
    """

    device: str = "auto"
    threads: int | None = None
    compute_threads: int | None = None
    procs: int | Literal["auto"] | None = None
    restarts: int = 3
    engine: Literal["ddp", "local", "async"] = "ddp"
    shard: bool = False
    sync_every: int = 32
    local_from: float = 0.0
    outer: Literal["average", "diloco"] = "average"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    servers: int = 1
    staleness: int | None = None
    staleness_power: float = 1.0
    ray_address: str | None = None
    deterministic: bool = False
    graph: bool = False
    recompute: bool = False
    compress: Literal["none", "fp16", "bf16", "2bit", "powersgd"] = "none"
    threshold: float = 0.5
    power_rank: int = 2
    power_from: float = 0.0
    price: str | None = None
    from_file: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={PLAIN: False})

    def __post_init__(self) -> None:
        if isinstance(self.price, int | float) and not isinstance(self.price, bool):  # price = 2.40 in a recipe file
            object.__setattr__(self, "price", f"{self.price:g}")
        check_types(self, "parallel")
        is_device = re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4}(,[0-9]{1,4})*)?", self.device)
        require(bool(is_device), "parallel.device", self.device, "auto, cpu, cuda or cuda:<number>")
        procs = self.procs
        require(not isinstance(procs, int) or 1 <= procs <= 256, "parallel.procs", procs, "1 to 256, or auto")
        require(0 <= self.restarts <= 1000, "parallel.restarts", self.restarts, "0 to 1000")
        require(self.sync_every >= 1, "parallel.sync_every", self.sync_every, "1 or more")
        require(0 <= self.local_from < float("inf"), "parallel.local_from", self.local_from, "0 or more")
        require(0 < self.outer_lr < float("inf"), "parallel.outer_lr", self.outer_lr, "above 0")
        require(0 <= self.outer_momentum < 1, "parallel.outer_momentum", self.outer_momentum, "0 to below 1")
        require(1 <= self.power_rank <= 128, "parallel.power_rank", self.power_rank, "1 to 128")
        require(0 <= self.power_from < float("inf"), "parallel.power_from", self.power_from, "0 or more")
        require(1 <= self.servers <= 64, "parallel.servers", self.servers, "1 to 64")
        require(self.staleness is None or self.staleness >= 0, "parallel.staleness", self.staleness, "0 or more")
        power = self.staleness_power
        require(0 <= power < float("inf"), "parallel.staleness_power", power, "0 or more")
        require(0 < self.threshold < float("inf"), "parallel.threshold", self.threshold, "above 0")
        require(self.threads is None or 1 <= self.threads <= 256, "parallel.threads", self.threads, "1 to 256")
        compute = self.compute_threads
        require(compute is None or 1 <= compute <= 1024, "parallel.compute_threads", compute, "1 to 1024")


def listed_gpus(device: str) -> tuple[int, ...]:
    """Return the numbers of the GPUs that a device lists, one for each rank of a machine; none of any other device.

    >>> listed_gpus("cuda:0,2"), listed_gpus("cuda:1")
    ((0, 2), ())
    """
    kind, _, numbers = device.partition(":")
    parts = numbers.split(",")
    is_list = kind == "cuda" and len(parts) > 1 and all(re.fullmatch("[0-9]{1,4}", part) for part in parts)
    return tuple(map(int, parts)) if is_list else ()


NOTICE_FILE = "file:"


def is_notice_source(text: str) -> bool:
    """Return whether a text names what may tell that a machine is taken away.

    >>> is_notice_source("aws"), is_notice_source("file:/run/preempted"), is_notice_source("file:")
    (True, True, False)
    """
    return text in ("aws", "gcp", "azure", "auto") or (text.startswith(NOTICE_FILE) and text != NOTICE_FILE)


@dataclass(frozen=True, kw_only=True)
class Every:
    """How often to log, evaluate and save. Not part of the digest: no weight depends on it but for skip and slower.

    Args:
        log_steps: updates between two log lines, 1 or more.
        evaluate_epochs: epochs between two evaluations, above 0; the last update is always evaluated.
        save_steps: updates between two checkpoints, 1 or more. None saves at evaluations and by time.
        save_minutes: minutes between two checkpoints, above 0; the last update is always saved. None saves so often
            that checkpoints take at most 1 % of the time. See :meth:`seconds_between_saves`.
        keep: newest checkpoints to keep, 1 or more.
        stall_minutes: end a run that makes no progress for this many minutes after a warning. 0 or None never ends it.
        upload: a URI (``s3://bucket/runs/a``) that the run is kept at as well: what is new is sent in the background
            after each checkpoint.
        notices: what says that this machine is about to be taken away, so that the run saves and stops in time: aws,
            gcp or azure, whose metadata service is asked, auto for the one that this machine names, or file:PATH. None:
            what the variable STEADYTRAIN_NOTICES says, if anything.
        nonfinite: what becomes of a run of one process whose loss or weights are not finite any more: stop ends it,
            with the evidence saved; skip and slower go back to the newest checkpoint, leave out the update that it
            came from, or halve the learning rate from there on, and go on, up to 5 times.
        skip: updates that are left out: the images of each are passed over.
        slower: updates from each of which on the learning rate is halved.
        from_file: not part of a recipe file: the keys of ``strangers.GATES`` whose values were read from a file rather
            than written in code.
    """

    log_steps: int = 20
    evaluate_epochs: float = 1.0
    save_steps: int | None = None
    save_minutes: float | None = None
    keep: int = 2
    stall_minutes: float | None = 15.0
    upload: str | None = None
    notices: str | None = None
    nonfinite: Literal["stop", "skip", "slower"] = "stop"
    skip: tuple[int, ...] = ()
    slower: tuple[int, ...] = ()
    from_file: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={PLAIN: False})

    def __post_init__(self) -> None:
        check_types(self, "every")
        if self.upload is not None:
            require("://" in self.upload, "every.upload", self.upload, "a URI, such as s3://bucket/runs/a")
            refuse_secrets("every.upload", self.upload)
        for name, updates in (("every.skip", self.skip), ("every.slower", self.slower)):
            require(all(step >= 1 for step in updates), name, list(updates), "numbers of updates, which begin at 1")
        is_source = self.notices is None or is_notice_source(self.notices)
        require(is_source, "every.notices", self.notices, "aws, gcp, azure, auto or file:PATH")
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
