"""Command lines of GluonCV's ``train_imagenet.py``, which shares its name with MXNet's script and has flags of its own.

Its batch size is that of each GPU, its images are cropped, flipped and changed in colour as usual, and its networks are
called ``resnet50_v1d``.

>>> words = "--rec-train a.rec --rec-val b.rec --model resnet50_v1d --num-gpus 4 --batch-size 64 --lr 0.4"
>>> " ".join(translate_gluoncv(words.split()).commands[0][:8])
'train a.rec --val b.rec --model timm/resnet50d --size 224'
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steadytrain.errors import InputError, did_you_mean
from steadytrain.interop.mxnet.flags import (
    HELD_OUT,
    Draft,
    Flags,
    Parser,
    Translated,
    Words,
    flag_parser,
    read_precision,
)

_FLAGS: Flags = {
    **dict.fromkeys(("data_dir", "rec_train", "rec_val", "rec_train_idx", "rec_val_idx"), (str, None)),
    **dict.fromkeys(("model", "save_dir", "logging_file", "teacher", "lr_decay_epoch"), (str, None)),
    **dict.fromkeys(("resume_params", "resume_states"), (str, "")),
    **dict.fromkeys(("warmup_epochs", "lr_decay_period", "mixup_off_epoch", "num_gpus", "resume_epoch"), (int, 0)),
    **dict.fromkeys(("warmup_lr", "hard_weight", "temperature"), (float, 0.0)),
    "batch_size": (int, 32), "dtype": (str, "float32"), "num_epochs": (int, 3), "lr": (float, 0.1),
    "wd": (float, 1e-4), "momentum": (float, 0.9), "lr_mode": (str, "step"), "lr_decay": (float, 0.1),
    "input_size": (int, 224), "crop_ratio": (float, 0.875), "mixup_alpha": (float, 0.2), "save_frequency": (int, 10),
    "log_interval": (int, 50), "mode": (str, None),
}  # fmt: skip
_SWITCHES = (
    *("use_rec", "use_pretrained", "use_se", "use_gn", "mixup", "label_smoothing", "no_wd", "last_gamma"),
    "batch_norm",
)
_SHARED = frozenset(["batch_size", "dtype", "num_epochs", "lr", "wd", "warmup_epochs", "model"])
"""Flags that MXNet's script of the same name has, too, or that are the beginning of one (``--model-prefix``)."""

_MEAN, _STD = "[0.485,0.456,0.406]", "[0.229,0.224,0.225]"
"""Of ImageNet's images, which its script fixes."""
_NAMES = (  # GluonCV's pattern -> the name here
    (r"resnet(\d+)_v1b?(_gn)?", r"timm/resnet\1\2"),
    (r"resnet(\d+)_v1(c|d|s)", r"timm/resnet\1\2"),
    (r"resnet(\d+)_v2", r"timm/resnetv2_\1"),
    (r"(se_)?resnext(\d+)_(32x4d|64x4d)", r"timm/\1resnext\2_\3"),
    (r"se_resnet(\d+)_v1", r"timm/seresnet\1"),
    (r"senet_154", "timm/senet154"),
    (r"resnest(\d+)", r"timm/resnest\1d"),
    (r"mobilenet1\.0", "timm/mobilenetv1_100"),
    (r"mobilenetv2_1\.0", "timm/mobilenetv2_100"),
    (r"mobilenetv3_(large|small)", r"timm/mobilenetv3_\1_100"),
    (r"vgg(\d+(_bn)?)", r"timm/vgg\1"),
    (r"densenet(\d+)", r"timm/densenet\1"),
    (r"inceptionv3", "timm/inception_v3"),
    (r"xception", "timm/xception"),
    (r"darknet53", "timm/darknet53"),
    (r"squeezenet1\.([01])", r"torchvision/squeezenet1_\1"),
    (r"alexnet", "torchvision/alexnet"),
)


def is_gluoncv(words: Sequence[str]) -> bool:
    """Return whether flags are among these that MXNet's script of the same name lacks."""
    flags = {f"--{name.replace('_', '-')}" for name in (*_FLAGS, *_SWITCHES) if name not in _SHARED} | {"-j"}
    flags |= {"--num-workers", "--num-data-workers"}
    return any(word.partition("=")[0].replace("_", "-") in flags for word in words)


def translate_gluoncv(words: Sequence[str]) -> Translated:
    """Read a command line of the script.

    Raises:
        InputError: a flag that it has not either, or what has no counterpart.
    """
    parser: Parser = flag_parser("train_imagenet (GluonCV's)", _FLAGS)
    for switch in _SWITCHES:
        parser.add_argument(f"--{switch.replace('_', '-')}", dest=switch, action="store_const", const="")
    parser.add_argument("-j", "--num-data-workers", "--num-workers", dest="num_workers", type=int)
    typed: dict[str, Any] = vars(parser.parse_args(list(words)))
    usual = {name: value for name, (_, value) in _FLAGS.items()}
    draft = Draft({**usual, **typed}, frozenset(typed))
    _data_and_network(draft)
    _length_and_rate(draft)
    _images_and_targets(draft)
    _machine(draft)
    for flag, why in _SAYS_NOTHING.items():
        draft.drop(flag, why)
    return Translated(commands=(tuple(draft.words),), rows=tuple(draft.rows))


_DECAYED = "of all but norms and biases, as with --no-wd; without it GluonCV decayed them too"
_SAYS_NOTHING = {
    **dict.fromkeys(("rec_train_idx", "rec_val_idx"), "the index is found by its name"),
    "use_rec": "the kind of the data is seen",
    "no_wd": "norms and biases are not decayed",
    "last_gamma": "residual networks of timm begin so",
    "save_frequency": "a checkpoint at every evaluation, and in between by time",
    "logging_file": "all that happens is in RUN/events.jsonl; steady report RUN makes a page of it",
    "mode": "--set precision.compile=default compiles the network",
    **dict.fromkeys(("temperature", "hard_weight"), "belongs to --teacher"),
    **dict.fromkeys(("resume_params", "resume_states", "resume_epoch"), "the same command resumes its run"),
}


def _data_and_network(draft: Draft) -> None:
    values = draft.values
    place = values["rec_train"] or values["data_dir"]
    if not place:
        raise InputError("name the data: --rec-train FILE.rec, or --data-dir with the folders train and val")
    draft.add(["rec_train" if values["rec_train"] else "data_dir"], "train", place)
    if values["rec_val"]:
        draft.add(["rec_val"], "--val", values["rec_val"])
    elif values["rec_train"]:
        draft.rows.append(("no --rec-val", HELD_OUT))
    for flag, remedy in {
        "teacher": "no distillation is built in: a loss of your own, --loss pkg.mod:factory, may hold the teacher",
        "use_se": "name the network with squeeze and excitation: steady models '*se*'",
        "use_gn": "name the network with group norms: --model resnet50_v1b_gn, or steady models '*gn*'",
    }.items():
        if flag in draft.typed:
            raise InputError(f"--{flag.replace('_', '-')}: {remedy}")
    draft.add(["model"], "--model", _model(values["model"], with_norms="batch_norm" in draft.typed))
    if "use_pretrained" in draft.typed:
        draft.add(["use_pretrained"], "--set", "model.pretrained=true")


def _model(name: str | None, *, with_norms: bool) -> str:
    """Return the name here of one of GluonCV's networks."""
    if not name:
        raise InputError("name the network: --model resnet50_v1d")
    name = name.lower()
    for pattern, ours in _NAMES:
        if (match := re.fullmatch(pattern, name)) is not None:
            ours = match.expand(ours).replace("se_resnext", "seresnext")
            return f"{ours}_bn" if with_norms and "vgg" in ours and not ours.endswith("_bn") else ours
    known = ["resnet50_v1d", "resnet50_v1b", "resnet50_v2", "mobilenetv2_1.0", "mobilenetv3_large"]
    raise InputError(
        f"--model is {name!r}, whose name here is not known: steady train ... --model NAME (steady models finds it)."
        f"{did_you_mean(name, known)}"
    )


def _length_and_rate(draft: Draft) -> None:
    values = draft.values
    for name, least in (("num_gpus", 0), ("batch_size", 1)):
        if values[name] < least:
            raise InputError(f"--{name.replace('_', '-')} is {values[name]}; it must be at least {least}")
    gpus, batch = max(1, values["num_gpus"]), values["batch_size"]
    draft.add(["input_size"], "--size", str(values["input_size"]))
    draft.add(["batch_size"], "--batch-size", str(batch * gpus), why=f"{batch} on each of {gpus} GPUs" * (gpus > 1))
    draft.add(["num_epochs"], "--epochs", str(values["num_epochs"]))
    draft.add(["lr"], "--lr", f"{values['lr']:g}", "--set", "optim.base_batch_size=none", why="of the whole batch")
    draft.add(["warmup_epochs"], "--warmup-epochs", str(values["warmup_epochs"]))
    if values["warmup_lr"] and values["lr"]:
        draft.add(["warmup_lr"], "--set", f"optim.warmup=linear:{values['warmup_lr'] / values['lr']:g}")
    else:
        draft.drop("warmup_lr", "the rate rises from 0")
    mode = values["lr_mode"]
    if mode == "step":
        period = values["lr_decay_period"]
        text = values["lr_decay_epoch"] or "40,60"
        steps = ",".join(map(str, range(period, values["num_epochs"], period))) if period > 0 else text
        if re.fullmatch(r"[\d.]+(,[\d.]+)*|", steps) is None:
            raise InputError(f"--lr-decay-epoch is {text!r}; it must be epochs, such as 40,60")
        flags = ["lr_mode", "lr_decay_period" if period > 0 else "lr_decay_epoch", "lr_decay"]
        if steps:
            schedule = ("--schedule", "mxnet/multi-factor", "--set", f"optim.milestones=[{steps}]")
            draft.add(flags, *schedule, "--set", f"optim.factor={values['lr_decay']:g}")
        else:
            draft.add(flags, "--schedule", "constant", why="the rate would fall after the last epoch")
    elif mode in ("cosine", "poly", "constant"):
        words = {"cosine": ("cosine",), "constant": ("constant",), "poly": ("mxnet/poly", "--set", "optim.power=2")}
        draft.add(["lr_mode"], "--schedule", *words[mode])
    else:
        raise InputError(f"--lr-mode is {mode!r}; it must be step, cosine, poly or constant")
    for flag in ("lr_decay", "lr_decay_epoch", "lr_decay_period"):
        if not any(f"--{flag.replace('_', '-')} " in f"{old} " for old, _ in draft.rows):
            draft.drop(flag, f"changes nothing with --lr-mode {mode}")
    draft.words += ["--optimizer", "nag", "--set", f"optim.momentum={values['momentum']:g}"]
    draft.rows.append((draft.old(["momentum"]), "--optimizer nag with it, as the script has"))
    draft.add(["wd"], "--weight-decay", f"{values['wd']:g}", why=("" if "no_wd" in draft.typed else _DECAYED))


def _images_and_targets(draft: Draft) -> None:
    values = draft.values
    draft.add(["crop_ratio"], "--set", f"data.crop={values['crop_ratio']:g}")
    transforms = ["color:0.4"]
    if "mixup" in draft.typed:
        transforms.append(f"mixup:{values['mixup_alpha']:g}")
        draft.rows.append(("--mixup", f"--transforms mixup:{values['mixup_alpha']:g}"))
        draft.drop("mixup_off_epoch", "mixing continues to the end")
    else:
        draft.drop("mixup_off_epoch", "belongs to --mixup")
    draft.drop("mixup_alpha", "the share of mixing" if "mixup" in draft.typed else "belongs to --mixup")
    draft.words += ["--transforms", ",".join(transforms), "--set", "data.augment=resized-crop"]
    words: Words = ("--set", "data.area=[0.08,1]", "--set", "data.ratio=[0.75,1.33333]", "--set", "data.flip=true")
    words += ("--set", f"data.mean={_MEAN}", "--set", f"data.std={_STD}")
    draft.words += words
    same = f"--transforms color:0.4 and data.augment=resized-crop, {shlex.join(words)}; without its PCA noise"
    draft.rows.append(("random crops, flips, colours and their scale", same))
    smoothing = "0.1" if "label_smoothing" in draft.typed else "0"
    draft.words += ["--set", f"optim.label_smoothing={smoothing}"]
    if "label_smoothing" in draft.typed:
        draft.rows.append(("--label-smoothing", "--set optim.label_smoothing=0.1"))
    draft.fix("train_imagenet.py")


def _machine(draft: Draft) -> None:
    values, gpus = draft.values, draft.values["num_gpus"]
    devices = f"cuda:{','.join(map(str, range(gpus)))}" if gpus else "cpu"
    draft.add(["num_gpus"], *(("--procs", str(gpus)) if gpus > 1 else ()), "--device", devices)
    numbers = read_precision(Draft({**values, "gpus": "0" if gpus else ""}, draft.typed))
    draft.add(["dtype"], "--precision", numbers)
    if "num_workers" in draft.typed:
        draft.add(["num_workers"], "--threads", str(max(1, values["num_workers"] // max(1, gpus))), why="of each rank")
    if values["save_dir"]:
        draft.add(["save_dir"], "--run", str(Path(values["save_dir"])), why="a folder; steady convert writes .params")
    draft.add(["log_interval"], "--set", f"every.log_steps={values['log_interval']}")
