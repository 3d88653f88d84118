"""The parts of a recipe, as frozen data: each is validated when it is constructed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from steadytrain.config import factories
from steadytrain.config.batches import parse_growth, parse_sizes
from steadytrain.config.factories import FACTORY
from steadytrain.config.foreign import our_value
from steadytrain.config.laws import LAWS, law_of
from steadytrain.config.losses import parse_loss
from steadytrain.config.phases import parse_train
from steadytrain.config.settings import (
    ABOVE_0,
    BELOW_1,
    DATA,
    FROM_1,
    IMAGES,
    LOSS,
    MODEL,
    NOT_NEGATIVE,
    OPTIMIZER,
    OUTPUT,
    RANKS,
    SPEED,
    UP_TO_1,
    Flag,
    ValueLimit,
    about,
    between,
    check,
    documented,
    file_keys,
    require,
    setting,
)
from steadytrain.config.stages import parse_schedule, parse_warmup
from steadytrain.config.transforms import parse_transforms, split_transforms
from steadytrain.errors import RecipeError, did_you_mean

MOST_EPOCHS = 1_000_000
MOST_STEPS = 2**40
SAVE_SHARE, SAVE_SECONDS = 0.01, 60.0
"""The most that checkpoints may take of the time by default, and the seconds that lie between two at least."""

ADAMS = ("adam", "adamw", "nadam", "radam", "adamax")
OPTIMIZERS = (*("sgd", "nag", *ADAMS, "rmsprop", "adagrad", "adadelta", "muon"), *factories.ROWS[factories.OPTIMIZERS])
"""Names of our optimizers; other packages add theirs, timm's are ``timm/NAME``, the user's own ``pkg.mod:factory``."""

TIMM_OPTIMIZERS = (
    *("adabelief", "adafactor", "adafactorbv", "adahessian", "adamc", "adamp", "adamuon", "adan", "adanw", "adopt"),
    *("adoptw", "cadamw", "cadan", "clion", "csgdw", "kron", "kronw", "lamb", "lambc", "lambw", "laprop", "larc"),
    *("lars", "lion", "madgrad", "madgradw", "mars", "nadamuon", "nadamw", "nlarc", "nlars", "novograd"),
    *("radabelief", "radamw", "rmsproptf", "sgdp", "sgdw"),
)
"""timm's optimizers that are asked for by their bare names."""


def optimizer_names() -> tuple[str, ...]:
    """Return the names of our optimizers and of other packages'."""
    return tuple(dict.fromkeys((*OPTIMIZERS, *factories.row_names(factories.OPTIMIZERS))))


def optimizer_name(name: str) -> str:
    """Return an optimizer's name as it is called here, of any trainer's spelling of one that is known.

    >>> optimizer_name("lamb"), optimizer_name("torch.optim.AdamW"), optimizer_name("timm/lion"), optimizer_name("lamp")
    ('timm/lamb', 'adamw', 'timm/lion', 'lamp')
    """
    plain, known = name.lower().removeprefix("torch.optim."), (*optimizer_names(), *TIMM_OPTIMIZERS)
    if plain not in known:
        plain = our_value("optimizer", plain)
    if plain not in known:
        plain = plain.replace("-", "").replace("_", "")
    return f"timm/{plain}" if plain in TIMM_OPTIMIZERS else plain if plain in known else name


Numbers = Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16", "pure-fp16"]
CompileMode = Literal["none", "default", "reduce-overhead", "max-autotune"]
GRAPH_OPTIMIZERS = ("sgd", "nag", "adam", "adamw")
"""Optimizers whose fused kernels read the learning rate and count updates on the device, as ``parallel.graph`` asks."""
Layout = Literal["channels-last", "channels-first"]
Scalar = str | int | float | bool | None
ImageFit = Literal["crop", "squash", "pad"]


def refuse_secrets(name: str, value: str | Path | None) -> None:
    """Refuse a URI with a password or a signature, since recipes are kept. Raises RecipeError, which has none of it."""
    if isinstance(value, str) and re.match(r"(?!hf:)\w+://[^/]*@|https?://[^?]*\?", value):
        shown = re.sub(r"//[^/]*@", "//...@", value).partition("?")[0]
        raise RecipeError(
            f"{name} is {shown} with a password or a query, such as a signature, which would be kept in the run: leave"
            " it out, and give credentials in the environment"
        )


def _split(text: str) -> list[str]:
    """Split what a flag says, such as ``2@30,2@60``; ``none`` is an empty list."""
    return [] if text == "none" else text.split(",")


FEW_IMAGES = 1_000
"""Images below which a fifth is held out by default: a tenth of them measures too little."""

_ONE_A_CHANNEL = ValueLimit(lambda numbers: len(numbers) in (1, 3), "1 or 3 numbers, one a channel")
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,4}(,[0-9]{1,4})*)?")


@documented
@dataclass(frozen=True, kw_only=True)
class Data:
    """The images: where they are, how they are split, and how samples are cropped."""

    train: str | Path = field(
        metadata=about(
            "Training data: a .rec file, a folder of classes, or any other source that steady pack reads.",
            limit=ValueLimit(bool, "a .rec file or a folder of classes"),
            example="photos/",
            usual="required",
        )
    )
    val: str | Path | None = setting(
        None,
        "Validation data, in any of these forms. None holds out the share data.holdout of the training data.",
        example="val.rec",
        usual="X-val.rec beside X-train.rec, val/ beside train/, else 10 % of each class",
        flag=Flag(DATA, "Validation data.", names="--val --data-val"),
    )
    test: str | Path | None = setting(
        None,
        "Test data, in any of these forms, on which the best weights are evaluated once, at the end. No choice"
        " depends on them, so the digest leaves them out.",
        example="test.rec",
        usual="X-test.rec beside X-train.rec, test/ beside train/, else none",
        flag=Flag(DATA, "Test data, evaluated once, at the end of the run.", names="--test --data-test --test-data"),
    )
    holdout: float | None = setting(
        None,
        "Share of each class that is held out where there are no validation data, at least 0, below 1; 0: none. "
        "None: a fifth of fewer than 1,000 images, else a tenth.",
        limit=ValueLimit(lambda share: 0 <= share < 1, "a fraction from 0 up to, not including, 1"),
        words="val-fraction val-split validation-split train-val-split valid-pct test-size",
        flag=Flag(DATA),
        example=0.2,
        usual="0.2 of fewer than 1,000 images, else 0.1",
    )
    group_by: str | None = setting(
        None,
        "Images that stay on one side of every split, beside copies and near copies: folder, those of one folder below "
        "that of their class (a patient, a series); a table's column; or a regular expression, those for whose names "
        "its first group is the same.",
        example=r"(patient\d+)_",
        words="group groups group-column group-key",
        flag=Flag(DATA, "Keep together in splits: folder, a table's column, or a regular expression with a group."),
    )
    classes: str | Path | None = setting(
        None,
        "A card (.json) whose class names, in their order, are used as the class list.",
        example="train.json",
        usual="the names of the folders, sorted",
        flag=Flag(DATA),
    )
    size: int | None = setting(
        None,
        "Side of the square input in pixels, 1 to 4096.",
        limit=between(1, 4096, "from 1 to 4096 pixels"),
        example=192,
        usual="the model's, or the images' if they are small",
        words="imgsz resolution val-crop-size",
        flag=Flag(IMAGES, names="--size --img-size"),
    )
    grow_size: tuple[str, ...] = setting(
        (),
        'Smaller training images at first (progressive resizing; page augmentation): ["128@0", "160@6"] has 128 '
        "pixels from the start and 160 from epoch 6 on. Before the first epoch given, and in evaluation, it is "
        "data.size.",
        example="128@0,160@6,192@12",
        flag=Flag(
            IMAGES,
            "Side of training images from some epochs on, such as 128@0,160@6,192@12; evaluation has --size.",
            kind=str,
            read=_split,
        ),
    )
    augment: Literal["auto", "resized-crop", "pad-crop", "none"] = setting(
        "auto",
        "Random crops of training images. resized-crop cuts out a random area and aspect ratio; pad-crop pads with "
        "zeros and cuts out a window; none crops as evaluation does. auto is pad-crop for images of up to 64 pixels,"
        " else resized-crop.",
        example="pad-crop",
    )
    area: tuple[float, float] = setting(
        (0.08, 1.0),
        "Smallest and largest share of the image area that resized-crop cuts out, above 0, up to 1.",
        limit=ValueLimit(lambda area: 0 < area[0] <= area[1] <= 1, "two rising fractions up to 1"),
        example=[0.25, 1],
    )
    ratio: tuple[float, float] = setting(
        (0.75, 4 / 3),
        "Smallest and largest aspect ratio (width / height) that resized-crop cuts out, above 0.",
        limit=ValueLimit(lambda ratio: 0 < ratio[0] <= ratio[1], "two rising numbers above 0"),
        example=[0.8, 1.25],
    )
    pad: int = setting(
        4,
        "Pixels of zeros that pad-crop adds on each side, 0 to 512.",
        limit=between(0, 512, "from 0 to 512 pixels"),
        example=8,
    )
    flip: bool | Literal["alternating"] | None = setting(
        None,
        "Mirror training images horizontally. true: each with probability 1/2; alternating: each in every other "
        "epoch; false: none. None mirrors colour images and leaves grey ones (digits, letters) alone.",
        example=True,
    )
    transforms: tuple[str, ...] = setting(
        (),
        'Further augmentation of training batches, such as ["randaugment:2,9", "mixup:0.2"] (page augmentation). '
        "They are applied in this order: vflip, rotate, shear, randaugment, trivialaugment, autoaugment, augmix, "
        "color, grey, pkg.mod:factory, erase, mixup, cutmix.",
        example="randaugment:2,9,mixup:0.2",
        flag=Flag(
            IMAGES,
            "Further augmentation, such as randaugment:2,9,mixup:0.2,erase:0.25; none: none (docs: augmentation).",
            kind=str,
            read=split_transforms,
        ),
    )
    fit: ImageFit | None = setting(
        None,
        "How images that are not square become square. crop takes the centre in evaluation, and random boxes in "
        "training; squash resizes the whole image, whatever its aspect ratio; pad resizes its longer side, and fills "
        "both sides of the shorter with the mean colour (letterbox). None is squash where the median image is more "
        "than twice as long as wide (or as wide as long), else crop.",
        example="squash",
        usual="squash for images that are mostly longer than 2:1, else crop",
        words="resize-mode resize-method crop-mode",
        flag=Flag(IMAGES, "How images become square: crop (their centre), squash or pad (all of them)."),
    )
    crop: float | None = setting(
        None,
        "Share of the shorter side that the centre crop of evaluation keeps, above 0, up to 1; with another data.fit "
        "than crop, of both sides. None uses the model's own, else 0.875, or 1 for images of up to 64 pixels and where"
        " data.fit shows whole images.",
        limit=ValueLimit(lambda share: 0 < share <= 1, "a fraction above 0, up to 1"),
        example=0.95,
        words="crop-pct",
    )
    interpolation: Literal["bilinear", "bicubic"] | None = setting(
        None,
        "Interpolation of every resize, always antialiased. None uses the model's own, else bilinear.",
        example="bicubic",
        words="interpolation",
    )
    mean: tuple[float, ...] | None = setting(
        None,
        "Mean of each channel (1 or 3 numbers) for pixel values from 0 to 1. None uses that of the pretrained "
        "weights, else that of the training data.",
        limit=_ONE_A_CHANNEL,
        example=[0.5, 0.5, 0.5],
    )
    std: tuple[float, ...] | None = setting(
        None,
        "Standard deviation of each channel, 1 or 3 numbers above 0, for pixel values from 0 to 1. None as for "
        "data.mean.",
        limit=_ONE_A_CHANNEL,
        example=[0.25, 0.25, 0.25],
    )
    root: str | Path | None = setting(
        None,
        "Folder that the paths in a list or a table are relative to.",
        example="images/",
        usual="the folder of the list",
        flag=Flag(DATA),
    )
    labels: str | Path | None = setting(
        None, "File of labels for images that are not in folders of classes.", example="labels.csv", flag=Flag(DATA)
    )
    path_column: str | None = setting(
        None,
        "Column of a table that has the images' paths, by its name or its number from 1 on.",
        example="filename",
        usual="found by name and content",
        words="input-key",
        flag=Flag(DATA),
    )
    label_column: tuple[str, ...] = setting(
        (),
        'Column of a table that has the labels; several, such as ["cat", "dog"], have a 1 for each label that an '
        'image has; "one-hot" makes classes of columns of which each image has one.',
        example="diagnosis",
        usual="found by name and content",
        words="target-key",
        flag=Flag(
            DATA,
            "A table's column of labels; may be given several times, for columns of 0 and 1; one-hot: each image has a"
            " 1 in one of them, its class.",
        ),
    )
    split_column: str | None = setting(
        None,
        "Column of a table that says which images are for training, validation and test; with the meaning of other"
        " values behind it: Usage:PublicTest=val,PrivateTest=test (none: not used). none: there is no such column.",
        usual="found by name and content",
        example="fold",
        flag=Flag(DATA),
    )
    zip_names: str | None = setting(
        None,
        "Code page of the names in a zip that tells none, as old Windows programs wrote them: gbk, cp932, cp1251.",
        usual="UTF-8, or cp437 for Latin letters",
        example="gbk",
        flag=Flag(DATA),
    )
    order: Literal["global", "blocks"] = setting(
        "global",
        "Order of training images. global shuffles all of them; blocks shuffles blocks and reads each in one go, for"
        " disks that are slow at random reads.",
        example="blocks",
    )
    balance: Literal["none", "classes"] = setting(
        "none",
        "classes: show all classes equally often. An epoch keeps its number of images: those of rare classes come "
        "several times, and only some of frequent ones. none: each image once an epoch.",
        flag=Flag(LOSS, "classes: show all classes equally often, images of rare ones several times an epoch."),
        example="classes",
    )
    repeats: int = setting(
        1,
        "How often each image comes in a row, each time with a new crop, flip and transform (repeated augmentation),"
        " 1 to 16. An epoch keeps its number of images: with 3, it shows a third of them.",
        limit=between(1, 16, "from 1 to 16"),
        example=3,
    )
    from_file: frozenset[str] = file_keys()

    def __post_init__(self) -> None:
        if isinstance(self.label_column, str):
            object.__setattr__(self, "label_column", (self.label_column,))
        check(self, "data")
        refuse_secrets("data.train", self.train)
        refuse_secrets("data.val", self.val)
        refuse_secrets("data.test", self.test)
        sizes = tuple(f"{size}@{epoch:g}" for size, epoch in parse_sizes(self.grow_size))
        object.__setattr__(self, "grow_size", sizes)
        object.__setattr__(self, "transforms", tuple(map(str, parse_transforms(self.transforms))))
        if self.group_by is not None:
            try:
                re.compile(self.group_by)
            except re.error as error:
                raise RecipeError(f"data.group_by is {self.group_by!r}, no regular expression: {error}") from None
        require(self.std is None or all(s > 0 for s in self.std), "data.std", self.std, "above 0 in every channel")

    def share_held_out(self, num_images: int) -> float:
        """Return the share of so many images that is held out where there are no validation data."""
        return self.holdout if self.holdout is not None else 0.2 if num_images < FEW_IMAGES else 0.1


@documented
@dataclass(frozen=True)
class Model:
    """The network and its initial weights."""

    name: str = field(
        metadata=about(
            "timm/NAME, a built-in model (resnet20, mlp, ...), a plain timm name, torchvision/NAME, mxnet:FILE (an "
            "MXNet checkpoint), or pkg.mod:factory.",
            limit=ValueLimit(bool, "the name of a model"),
            usual=(
                "timm/resnet50, or resnet20 for images up to 64 pixels",
                "a small one whose weights are on this machine, else timm/mobilenetv3_large_100",
            ),
            words="architecture arch backbone encoder model-name model-name-or-path",
            flag=Flag(MODEL, names="--model --network"),
            example="timm/resnet18",
        )
    )
    _: KW_ONLY
    pretrained: bool = setting(
        False, "Start from the pretrained weights of the Hugging Face hub, which are downloaded once.", example=True
    )
    weights: str | Path | None = setting(
        None,
        "Start from this .safetensors, .pth or .params file, or from the best weights of this run.",
        example="resnet50.safetensors",
        words="pretrained-path",
        flag=Flag(
            MODEL, names="--weights --initial-checkpoint --pretrained-model", implied=(("model.pretrained", False),)
        ),
    )
    train: str = setting(
        "full",
        "What is trained. full: every parameter. head: only the classifier. discriminative: every parameter, with a "
        "learning rate that falls by the factor model.decay from each layer to the one below. gradual: the same, and"
        " layers join one by one from the top down, over half of the run (gradual:0.5: one each half epoch). probe: "
        "no updates; the classifier is fitted to the features of the frozen network (probe:3: to those of two "
        "augmented passes too). head:1+full trains the classifier alone for 1 epoch first; probe+discriminative "
        "begins with a fitted classifier.",
        flag=Flag(
            MODEL,
            "What is trained: full, head, discriminative, gradual, probe (fits the classifier to features in one "
            "pass), head:1+full, probe+discriminative.",
        ),
        example="head:1+full",
    )
    folds: int = setting(
        0,
        "Of a probe (model.train=probe), so many folds: each is answered by a classifier fitted to the others, groups "
        "together, which says how good the probe is on images that it has not seen, and how much that varies. 0: none.",
        words="fold k-fold kfold n-folds num-folds cv",
        limit=ValueLimit(lambda folds: folds == 0 or 2 <= folds <= 100, "0, or from 2 to 100"),
        flag=Flag(MODEL, "Of a probe: answer each of so many folds by a classifier fitted to the others."),
    )
    freeze: tuple[str, ...] = setting(
        (),
        'Parameters or modules that are not trained, by name, such as ["conv_stem", "blocks.[01].*"], with the '
        "wildcards of a shell. Batch norms whose parameters are frozen keep their statistics.",
        example="conv_stem,blocks.0",
    )
    decay: float = setting(
        0.75,
        "Factor of the learning rate from one layer to the one below, for discriminative and gradual, above 0, up to"
        " 1. With 0.75, the tenth layer from the top learns at 8 % of the rate.",
        limit=UP_TO_1,
        example=0.7,
    )
    batch_norm: Literal["train", "synchronous", "frozen"] = setting(
        "train",
        "Statistics that batch norms use in training. train: those of each micro-batch; synchronous: of all ranks "
        "together; frozen: those of the initial weights, which suits small batches.",
        example="frozen",
    )
    options: Mapping[str, Scalar] = setting(
        {}, 'Keyword arguments of the model\'s factory, such as {"pad_type": "same"}.', example={"drop_rate": 0.1}
    )
    from_file: frozenset[str] = file_keys()

    def __post_init__(self) -> None:
        check(self, "model")
        parse_train(self.train)
        if self.pretrained and self.weights:
            raise RecipeError(f"model.pretrained and model.weights={self.weights!r} exclude each other: drop one")


@documented
@dataclass(frozen=True)
class Optim:
    """The optimizer, the learning-rate schedule, and the loss."""

    name: str = setting(
        "sgd",
        "Optimizer: sgd, nag, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta, signum, ftml, dcasgd, "
        "lbsgd, ftrl, sgld, muon, timm/NAME or your own function, pkg.mod:factory.",
        words="opt optim optimizer",
        flag=Flag(
            OPTIMIZER, "sgd, nag, adam, adamw, signum, lbsgd, ... or timm/NAME (docs: optimizers).", names="--optimizer"
        ),
        example="adamw",
    )
    _: KW_ONLY
    lr: float = setting(
        0.1,
        "Peak learning rate, above 0. If optim.base_batch_size is set, it is the rate for that many images an update.",
        limit=ABOVE_0,
        usual=("0.1 for 256 images an update, or for 128 if they are up to 64 pixels", "0.001"),
        words="learning-rate base-lr lr-base",
        flag=Flag(OPTIMIZER, "Peak learning rate, before it is scaled to the batch."),
        example=0.05,
    )
    base_batch_size: int | None = setting(
        None,
        "Batch size that optim.lr is meant for: lr * batch_size / base_batch_size is used (linear scaling, Goyal et "
        "al. 2017). None uses lr as it is.",
        limit=ABOVE_0,
        example=256,
        usual=("256, or 128 for images up to 64 pixels", "none"),
        words="lr-base-size",
    )
    momentum: float = setting(
        0.9, "Momentum of sgd and nag, from 0 to below 1.", limit=BELOW_1, words="momentum mom", example=0.95
    )
    nesterov: bool | None = setting(
        None, "Use Nesterov momentum in sgd; nag always does. None does not, as in torch and MXNet.", example=False
    )
    betas: tuple[float, float] = setting(
        (0.9, 0.999),
        "Decay rates of the averages of gradients and of their squares in Adam (AdamW, NAdam, ...), from 0 to below 1.",
        limit=ValueLimit(lambda betas: all(0 <= beta < 1 for beta in betas), BELOW_1.words),
        example=[0.9, 0.99],
    )
    eps: float = setting(
        1e-8,
        "Added to the denominator in Adam (AdamW, NAdam, ...), above 0, so that it is never 0.",
        limit=ABOVE_0,
        words="opt-eps",
        example=1e-06,
    )
    weight_decay: float = setting(
        5e-4,
        "Weight decay, 0 or more; norms and biases are exempt.",
        limit=NOT_NEGATIVE,
        usual=("5e-05, or 0.0005 for images up to 64 pixels", "0.05"),
        words="wd decay",
        flag=Flag(OPTIMIZER),
        example=0.01,
    )
    schedule: str = setting(
        "cosine",
        "Learning-rate schedule, evaluated at every update: a law, LAW,NAME=VALUE, or several with their epochs "
        f"(cosine:80 constant:15). Laws: {', '.join((*LAWS, *factories.ROWS[factories.SCHEDULES]))}.",
        words="sched scheduler lr-scheduler lr-schedule lr-scheduler-type",
        flag=Flag(
            OPTIMIZER,
            'Learning-rate schedule: cosine, step, poly, one-cycle, plateau, "cosine:80 constant:15", ... (docs: '
            "schedules; steady schedule plots it).",
        ),
        example="poly",
    )
    warmup_epochs: float = setting(
        0.0,
        "Epochs in which the learning rate rises from 0 to its peak.",
        limit=NOT_NEGATIVE,
        usual=("5, or 0.5 for images up to 64 pixels; at most a quarter of the run", "0.5"),
        words="warmup lr-warmup-epochs",
        flag=Flag(OPTIMIZER),
        example=3,
    )
    warmup: str = setting(
        "linear",
        "Shape of the warm-up: linear, linear:SHARE from a share of the peak, constant:SHARE at it, or power:EXPONENT.",
        example="power:2",
    )
    milestones: tuple[float, ...] = setting(
        (),
        "Epochs at which step and mxnet/multi-factor multiply the learning rate by optim.factor, in rising order.",
        limit=ValueLimit(lambda epochs: all(a < b for a, b in pairwise((0.0, *epochs))), "rising epochs above 0"),
        example=[30, 60, 80],
    )
    factor: float = setting(
        0.1,
        "What the schedules step, factor and plateau multiply the learning rate by, above 0, up to 1.",
        limit=UP_TO_1,
        words="decay-rate dr lr-factor lr-gamma gamma",
        example=0.2,
    )
    power: float = setting(
        2.0, "Exponent of the schedule poly, above 0; 1 falls in a straight line.", limit=ABOVE_0, example=1
    )
    final: float = setting(
        0.0,
        "Where falling schedules end, and below which none falls, as a share of the peak learning rate, 0 to 1.",
        limit=between(0, 1, "a share of lr, 0 to 1"),
        words="lrf",
        example=0.01,
    )
    loss: str = setting(
        "auto",
        "Loss: cross-entropy, focal (focal:2 sets gamma), binary (each label by itself), binary-focal, hinge "
        "(hinge:1 sets the margin), l1, l2 or pkg.mod:factory; auto is cross-entropy, and binary where images may "
        "have several labels.",
        usual="cross-entropy, or binary where images may have several labels",
        words="criterion loss-function objective",
        flag=Flag(LOSS),
        example="focal:2",
    )
    class_weights: Literal["none", "balanced"] = setting(
        "none",
        "balanced: in the loss, an image of a class with n of N images weighs N / (K n), for K classes. Of several "
        "labels, images that have one weigh (N - n) / n. none: all weigh alike.",
        words="class-weight",
        flag=Flag(LOSS, "balanced: images of rare classes weigh more in the loss."),
        example="balanced",
    )
    label_smoothing: float = setting(
        0.0,
        "Share of each target that is spread over all classes, from 0 to below 1 (Szegedy et al. 2016); with several "
        "labels, by which it moves towards 1/2.",
        limit=ValueLimit(BELOW_1.holds, "0 up to 1"),
        usual=("0.1, or 0 for images up to 64 pixels", "0.1"),
        words="smoothing label-smoothing-factor",
        flag=Flag(LOSS),
        example=0.05,
    )
    clip_norm: float | None = setting(
        None,
        "Largest norm of the whole gradient, above 0; a longer one is scaled down to it. None does not clip.",
        limit=ABOVE_0,
        example=1,
        words="clip-grad clip-grad-norm grad-clip gradient-clip-val max-grad-norm clip-norm",
    )
    ema: float | None = setting(
        None,
        "Keep an exponential moving average of the weights, with this decay per update, between 0 and 1. The average"
        " is evaluated and exported. None keeps no average.",
        limit=ValueLimit(lambda decay: 0 < decay < 1, "between 0 and 1, such as 0.999"),
        example=0.999,
        words="ema-decay model-ema-decay",
        flag=Flag(
            OPTIMIZER,
            "Decay per update of averaged weights, which are evaluated and exported; 0: none.",
            read=lambda decay: decay or None,
        ),
    )
    swa: float | None = setting(
        None,
        "Share of the run after which the weights of every update are averaged alike (stochastic weight averaging), "
        "from 0 to below 1. Until then the weights are evaluated as they are. None keeps no average.",
        limit=ValueLimit(BELOW_1.holds, "from 0 to below 1, such as 0.75"),
        example=0.75,
    )
    accumulate: int = setting(
        1,
        "Parts in which each batch is computed, one after another: less memory, same update. Batch norms see one "
        "part at a time.",
        limit=FROM_1,
        example=4,
    )
    grow_batch: tuple[str, ...] = setting(
        (),
        'Multiply the batch from some epochs on (page schedules): ["2@30", "2@60"] doubles it at epoch 30 and again '
        "at 60. It is made of more micro-batches of the same size, so that memory does not grow. The learning rate "
        "is not scaled to it.",
        example="2@30,2@60",
        flag=Flag(
            OPTIMIZER,
            "Multiply the batch after so many epochs, such as 2@30,2@60, in place of a falling rate.",
            kind=str,
            read=_split,
        ),
    )
    options: Mapping[str, Scalar] = setting(
        {},
        'Other keyword arguments of the optimizer, such as {"batch_scale": 4} for lbsgd.',
        example={"batch_scale": 4},
    )
    from_file: frozenset[str] = file_keys()

    def __post_init__(self) -> None:
        check(self, "optim")
        object.__setattr__(self, "name", optimizer_name(self.name))
        if self.nesterov is None:  # a recipe says which momentum; where it means nothing it is True, as it always was
            object.__setattr__(self, "nesterov", self.name != "sgd")
        is_other = self.name.startswith("timm/") or FACTORY.fullmatch(self.name)
        if self.name not in (names := optimizer_names()) and not is_other:
            near = did_you_mean(self.name.lower(), names)
            known = ", ".join(names)
            raise RecipeError(
                f"optim.name is {self.name!r}; it must be one of {known}, timm/NAME or pkg.mod:factory.{near}"
            )
        stages = parse_schedule(self.schedule)
        for stage in stages:
            has_steps = not law_of(stage).at_milestones or bool(self.milestones or stage.updates)
            require(has_steps, "optim.milestones", self.milestones, f"given for schedule={stage.law}")
            ends = stage.values.get("to", self.final)
            if stage.law == "exponential" and "factor" not in stage.values and not ends:
                raise RecipeError(
                    f"optim.schedule is {self.schedule!r}; exponential cannot fall to 0: write exponential,to=0.01, or"
                    " what it falls by in an epoch, exponential,factor=0.95"
                )
        if law_of(stages[0]).rises and self.warmup_epochs:
            raise RecipeError(
                f"optim.schedule={self.schedule!r} and optim.warmup_epochs={self.warmup_epochs:g} exclude each other:"
                f" {stages[0].law} begins low and rises by itself; leave one of them out (--warmup-epochs 0)"
            )
        parse_warmup(self.warmup)
        loss = parse_loss(self.loss)
        if loss.is_factory and (self.class_weights != "none" or self.label_smoothing):
            raise RecipeError(
                f"optim.loss={self.loss} does its own weighting and smoothing: set optim.class_weights=none and"
                " optim.label_smoothing=0"
            )
        if self.swa is not None and self.ema is not None:
            raise RecipeError(f"optim.swa={self.swa:g} and optim.ema={self.ema:g} exclude each other: give --ema 0")
        growths = parse_growth(self.grow_batch)
        object.__setattr__(self, "grow_batch", tuple(f"{growth.times}@{growth.epoch:g}" for growth in growths))
        if growths and (counts := [stage.law for stage in stages if law_of(stage).counts_updates]):
            raise RecipeError(
                f"optim.grow_batch={','.join(self.grow_batch)} and optim.schedule={self.schedule!r} exclude each other:"
                f" {counts[0]} counts updates, whatever their size; use another law"
            )

    @property
    def waits_for_evaluations(self) -> bool:
        """Return whether the learning rate depends on evaluations."""
        return parse_schedule(self.schedule)[-1].law == "plateau"


@documented
@dataclass(frozen=True)
class Precision:
    """Number format, memory layout and compilation."""

    name: Numbers = setting(
        "fp32",
        "Number format. fp32; tf32: fp32 with products rounded by NVIDIA's tensor cores; bf16 or fp16: autocast, "
        "with loss scaling for fp16; pure-bf16 or pure-fp16: 16-bit parameters and gradients with fp32 master "
        "weights, as MXNet's multi_precision.",
        usual="bf16 where the hardware computes in it, else fp32",
        flag=Flag(
            SPEED,
            "fp32, tf32, bf16, fp16, pure-bf16 or pure-fp16; auto: by measuring.",
            names="--precision --dtype",
            is_measured=True,
        ),
        example="bf16",
    )
    _: KW_ONLY
    channels_last: bool = setting(
        True, "Store images as NHWC, which is faster for most convolutional networks.", example=False
    )
    compile: CompileMode = setting(
        "none",
        "Mode of torch.compile: default; reduce-overhead and max-autotune also record CUDA graphs, and max-autotune "
        "tries more kernels. none runs the network eagerly.",
        flag=Flag(
            SPEED,
            "Compile the network first (torch.compile); other modes by --set precision.compile=MODE.",
            names="--compile --torchcompile",
            kind=bool,
            read=lambda _: "default",
        ),
        example="default",
    )

    def __post_init__(self) -> None:
        check(self, "precision")

    @property
    def records_graphs(self) -> bool:
        """Return whether compiled code is recorded as CUDA graphs."""
        return self.compile in ("reduce-overhead", "max-autotune")

    @property
    def is_pure(self) -> bool:
        """Return whether parameters and gradients have 16 bits as well."""
        return self.name.startswith("pure-")

    @property
    def products(self) -> str:
        """The numbers that are multiplied: ``fp32``, ``tf32``, ``bf16`` or ``fp16``."""
        return self.name.removeprefix("pure-")

    @property
    def layout(self) -> Layout:
        """The memory format of images while a network is trained."""
        return "channels-last" if self.channels_last else "channels-first"


@documented
@dataclass(frozen=True, kw_only=True)
class Budget:
    """The length of training: set exactly one of epochs and steps."""

    epochs: float | None = setting(
        None,
        "Passes over the training data, above 0, up to 1,000,000; may be a fraction; 0 for model.train=probe.",
        limit=between(0, MOST_EPOCHS, f"above 0, up to {MOST_EPOCHS:,}"),
        usual=("90, or 30 for images up to 64 pixels", "8"),
        words="max-epochs n-epochs nb-epochs num-train-epochs",
        flag=Flag(OPTIMIZER, names="--epochs --num-epochs", implied=(("budget.steps", None),)),
        example=30,
    )
    steps: int | None = setting(
        None,
        "Number of updates, 1 or more, in place of budget.epochs.",
        limit=between(1, MOST_STEPS, f"above 0, up to {MOST_STEPS:,}"),
        example=10000,
        words="max-steps num-steps steps",
    )
    patience: int | None = setting(
        None,
        "End the run early when validation (every.best) has not improved in this many evaluations, 1 or more. The "
        "learning rate falls as planned for the whole run.",
        limit=ValueLimit(FROM_1.holds, "1 or more evaluations"),
        example=3,
        usual="never",
        flag=Flag(OPTIMIZER),
    )
    minutes: float | None = setting(
        None,
        "End the run early after this many minutes, start and evaluations included, above 0; the weights then depend "
        "on the machine's speed. None sets no limit.",
        limit=ABOVE_0,
        example=60,
    )
    fill: bool = setting(
        False,
        "Use all of budget.minutes: while time is left, updates begin again from the probe, at another learning rate "
        "or for longer, and the best weights are kept. finetune --budget-minutes sets it.",
        example=True,
    )

    def __post_init__(self) -> None:
        check(self, "budget")
        if (self.epochs is None) == (self.steps is None):
            raise RecipeError(f"budget needs epochs or steps, not both: epochs={self.epochs} steps={self.steps}")


@documented
@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Devices, threads and processes. Not part of the digest: it does not say *what* is trained."""

    device: str = setting(
        "auto",
        "auto (a GPU if there is one), cpu, cuda, cuda:1; cuda:0,2 starts a rank on each; mps: a Mac's GPU.",
        limit=ValueLimit(lambda device: _DEVICE.fullmatch(device) is not None, "auto, cpu, mps, cuda or cuda:<number>"),
        flag=Flag(SPEED),
        example="cuda:1",
    )
    threads: int | None = setting(
        None,
        "Threads that read, decode and crop images, 1 to 256.",
        limit=between(1, 256),
        example=4,
        usual="by the number of cores",
        words="num-workers workers dataloader-num-workers preprocess-threads",
        flag=Flag(
            SPEED,
            "Threads that load images; auto: by measuring.",
            names="--threads --data-nthreads -j",
            is_measured=True,
        ),
    )
    compute_threads: int | None = setting(
        None,
        "Threads of torch operations on a CPU, 1 to 1024. None uses one for each core, shared among the ranks.",
        limit=between(1, 1024),
        example=8,
    )
    procs: int | Literal["auto"] | None = setting(
        None,
        "Ranks that train together on this machine, 1 to 256; auto: one for each GPU.",
        limit=ValueLimit(lambda procs: procs == "auto" or 1 <= procs <= 256, "1 to 256, or auto"),
        example="auto",
        usual="1",
        flag=Flag(RANKS),
    )
    restarts: int = setting(
        3, "How often the ranks are started again after one was killed, 0 to 1000.", limit=between(0, 1000), example=10
    )
    silent_seconds: float = setting(
        30.0,
        "Seconds without a heartbeat after which a rank counts as lost, 5 to 3600; a rank whose process runs is waited "
        "for.",
        limit=between(5, 3600),
        example=120,
    )
    engine: Literal["ddp", "local", "async"] = setting(
        "ddp",
        "How ranks train together: ddp exchanges gradients in every update; local averages weights once in "
        "--sync-every updates, for slow links (docs: engines); async lets workers push gradients to a server "
        "without waiting for each other (docs: async).",
        flag=Flag(RANKS),
        example="local",
    )
    shard: bool = setting(
        False,
        "Divide parameters, gradients and the optimizer's state among the ranks (FSDP), for a model that does not "
        "fit one device.",
        example=True,
    )
    shard_ranks: int | None = setting(
        None,
        "Consecutive ranks that have one copy of the parameters in parts (parallel.shard), such as the GPUs of a "
        "machine, 1 or more: machines then exchange gradients alone.",
        limit=FROM_1,
        example=8,
        usual="all ranks",
    )
    shard_gather: Literal["fp32", "bf16"] = setting(
        "fp32",
        "Numbers in which ranks gather parameters (parallel.shard): bf16 takes half of the time and the memory, and "
        "rounds the weights of norms, which are otherwise computed in fp32.",
        example="bf16",
    )
    sync_every: int = setting(
        32,
        "Updates between two averages of the weights with --engine local, 1 or more.",
        limit=FROM_1,
        flag=Flag(RANKS),
        example=64,
    )
    local_from: float = setting(
        0.0,
        "Epochs of exchanging gradients in every update before --engine local begins (post-local SGD), 0 or more.",
        limit=NOT_NEGATIVE,
        flag=Flag(RANKS),
        example=5,
    )
    outer: Literal["average", "diloco"] = setting(
        "average",
        "What --engine local does with the averaged weights: average takes them; diloco makes a step of Nesterov's "
        "momentum towards them.",
        example="diloco",
    )
    outer_lr: float = setting(
        0.7, "Learning rate of diloco's step (parallel.outer), above 0.", limit=ABOVE_0, example=0.5
    )
    outer_momentum: float = setting(
        0.9,
        "Momentum of diloco's step (parallel.outer), 0 to below 1.",
        limit=ValueLimit(BELOW_1.holds, "0 to below 1"),
        example=0.8,
    )
    staleness_power: float = setting(
        1.0,
        "--engine async divides the learning rate of a push by (1 + staleness) ** staleness_power, 0 or more; 0 uses"
        " it whole.",
        limit=NOT_NEGATIVE,
        example=0.5,
    )
    deterministic: bool = setting(
        False, "Use only deterministic algorithms on a GPU; slower.", flag=Flag(SPEED), example=True
    )
    graph: bool = setting(
        False,
        "Record each update as a CUDA graph and replay it: faster for small networks.",
        flag=Flag(SPEED),
        example=True,
    )
    recompute: bool = setting(
        False,
        "Recompute activations in the backward pass: less memory, more time, same bits.",
        flag=Flag(SPEED, names="--recompute --grad-checkpointing"),
        example=True,
    )
    compress: Literal["none", "fp16", "bf16", "powersgd"] = setting(
        "none",
        "Format in which ranks exchange gradients (page compression): fp16 or bf16 (half the bytes of fp32), "
        "powersgd (low-rank matrices), or none.",
        example="fp16",
    )
    power_rank: int = setting(
        2,
        "Rank of powersgd's matrices, 1 to 128: a higher one is more exact, and takes more bytes.",
        limit=between(1, 128),
        example=4,
    )
    power_from: float = setting(
        0.0,
        "Epochs in which whole gradients are exchanged before powersgd begins, 0 or more.",
        limit=NOT_NEGATIVE,
        example=2,
    )
    price: str | None = setting(
        None,
        "Price of an hour of each machine: 2.40, 2.40 EUR, 0.30 EUR/kWh@450W or an instance, such as p3.2xlarge or "
        "p3.2xlarge@us-east-1:spot; shows what the run costs.",
        example="p3.2xlarge@us-east-1",
        usual="$STEADYTRAIN_PRICE",
        flag=Flag(OUTPUT),
    )

    def __post_init__(self) -> None:
        if isinstance(self.price, int | float) and not isinstance(self.price, bool):  # price = 2.40 in a recipe file
            object.__setattr__(self, "price", f"{self.price:g}")
        check(self, "parallel")


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


_UPDATES = ValueLimit(lambda updates: all(step >= 1 for step in updates), "numbers of updates, which begin at 1")


@documented
@dataclass(frozen=True, kw_only=True)
class Every:
    """Intervals of logging, evaluating and saving, and updates that are made otherwise. Not part of the digest."""

    log_steps: int = setting(
        20,
        "Updates between two log lines, 1 or more.",
        limit=FROM_1,
        words="log-interval log-every-n-steps log-freq logging-steps disp-batches print-freq",
        example=100,
    )
    evaluate_epochs: float = setting(
        1.0,
        "Epochs between two evaluations, above 0; 0.5 evaluates twice an epoch. The last update is always evaluated.",
        limit=ABOVE_0,
        words="check-val-every-n-epoch val-interval",
        example=2,
    )
    save_steps: int | None = setting(
        None,
        "Updates between two checkpoints, 1 or more. None saves at evaluations and by time.",
        limit=FROM_1,
        example=500,
    )
    save_minutes: float | None = setting(
        None,
        "Minutes between two checkpoints, above 0; the last update is always saved. None saves so often that "
        "checkpoints take at most 1 % of the time.",
        limit=ABOVE_0,
        example=10,
    )
    keep: int = setting(
        2,
        "How many of the newest checkpoints to keep, 1 or more; the best weights are kept, too.",
        limit=FROM_1,
        words="checkpoint-hist",
        example=5,
    )
    best: Literal["top1-loss", "top1", "top5", "loss", "macro-recall", "f1", "auc", "map"] | None = setting(
        None,
        "The figure of the validation images by which the best weights are chosen; top1-loss: the highest top-1, and "
        "within its standard error the lowest loss (docs: metrics). budget.patience, plateau and sweeps follow it.",
        example="macro-recall",
        usual="top1-loss; map where an image may have several labels",
        words="metric eval-metric monitor metric-for-best-model early-stopping-metric",
        flag=Flag(OPTIMIZER),
    )
    stall_minutes: float | None = setting(
        15.0,
        "End a run that makes no progress for this many minutes after a warning, and for a third of it, at least 5, "
        "where ranks wait in an exchange. 0 or None never ends it.",
        limit=ValueLimit(NOT_NEGATIVE.holds, "0 or more; 0: never"),
        example=60,
    )
    upload: str | None = setting(
        None,
        "A URI (s3://bucket/runs/a) that the run is uploaded to, in the background after each checkpoint.",
        example="s3://bucket/runs/a",
    )
    notices: str | None = setting(
        None,
        "Save and stop in time before this machine is taken away, by notices of aws, gcp or azure; auto: of the cloud "
        "that this machine is in; or by a file, file:PATH (docs: spot).",
        limit=ValueLimit(is_notice_source, "aws, gcp, azure, auto or file:PATH"),
        example="auto",
        usual="$STEADYTRAIN_NOTICES",
        flag=Flag(OUTPUT),
    )
    track: str | None = setting(
        None,
        "Trackers to send the run to while it trains: tensorboard, mlflow, wandb or trackio; several: "
        "tensorboard,mlflow. A tracker that fails or is not installed never stops the training (docs: trackers).",
        example="tensorboard",
        flag=Flag(OUTPUT),
    )
    profile: int | None = setting(
        None,
        "Trace so many updates after the warm-up by torch.profiler, and a GPU's memory, into the run's folder profile.",
        limit=FROM_1,
        example=10,
        flag=Flag(SPEED),
    )
    profile_ranks: Literal["first", "all"] = setting("first", "Whose updates every.profile traces.", example="all")
    nonfinite: Literal["stop", "skip", "slower", "fp32"] = setting(
        "stop",
        "What to do when a loss or a weight is NaN or infinite: stop ends the run, with the evidence saved. The others "
        "return to the newest checkpoint and continue: skip leaves that update out, slower halves the learning rate "
        "from there on (each up to 5 times), fp32 computes in fp32 from the checkpoint on.",
        example="skip",
    )
    skip: tuple[int, ...] = setting(
        (), "Updates, by their numbers, that are left out with their images.", limit=_UPDATES, example=[120]
    )
    slower: tuple[int, ...] = setting(
        (),
        "Updates, by their numbers, at each of which the learning rate is halved, for the rest of the run.",
        limit=_UPDATES,
        example=[120],
    )
    rates: tuple[tuple[int, float], ...] = setting(
        (),
        "From which update on the schedule's learning rate is multiplied by what; 0 ends the run before that update. "
        "The decisions of a program's on_event are written here.",
        limit=ValueLimit(
            lambda rates: all(first >= 1 and times >= 0 for first, times in rates), "pairs of updates and factors"
        ),
        example=[[120, 0.5]],
    )
    fp32: tuple[int, ...] = setting(
        (),
        "Updates, by their numbers: the first of them and all later ones are computed in fp32, with any "
        "precision.name.",
        limit=_UPDATES,
        example=[120],
    )
    undone: Literal["restart", "continue"] = setting(
        "restart",
        "What to do when updates undo the probe (by 3 standard errors of validation top-1, in the first 3 epochs): "
        "restart begins again from the probe at 0.3 of the learning rate, continue trains on.",
        example="continue",
    )
    tries: tuple[tuple[int, float], ...] = setting(
        (),
        "Where updates began again from the probe: after how many updates, and at which learning rate. The run itself "
        "writes it.",
        limit=ValueLimit(
            lambda tries: all(step >= 1 and ABOVE_0.holds(lr) for step, lr in tries),
            "pairs of updates and rates above 0",
        ),
        example=[[120, 0.0003]],
    )
    from_file: frozenset[str] = file_keys()

    def __post_init__(self) -> None:
        check(self, "every")
        if self.upload is not None:
            require("://" in self.upload, "every.upload", self.upload, "a URI, such as s3://bucket/runs/a")
            refuse_secrets("every.upload", self.upload)

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
