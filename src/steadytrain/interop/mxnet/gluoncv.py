"""Command lines of Gluon's scripts: of GluonCV, some of which share their names with MXNet's and have flags of their
own, of MXNet's example for Gluon, and of those that Horovod starts.

Their batch size is that of each GPU, their images are cropped, flipped and changed in colour as usual, and their
networks are called ``resnet50_v1d``. Horovod's rate is that of one GPU.

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
    read_gpus,
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
    "log_interval": (int, 50), "mode": (str, None), "dataset": (str, None), "gpus": (str, ""), "seed": (int, 123),
    **dict.fromkeys(("eval_frequency", "start_epoch", "builtin_profiler"), (int, 0)), "drop_rate": (float, 0.0),
    **dict.fromkeys(("logging_dir", "resume_from", "save_plot_dir", "kvstore"), (str, "")),
}  # fmt: skip
_SPELT = {
    "num_epochs": "--epochs", "lr_decay_epoch": "--lr-steps", "lr_decay": "--lr-factor", "save_dir": "--prefix",
    "save_frequency": "--save-period", "resume_params": "--resume",
}  # fmt: skip
"""Flag -> its name in another of the scripts."""
_CIFAR = {"dataset": "cifar10"}
_MIXED = {**_CIFAR, "mixup": "", "mixup_alpha": 1.0, "mixup_off_epoch": 20}
_HOROVOD = {"batch_size": 128, "num_epochs": 90, "lr": 0.05, "warmup_epochs": 10, "model": "resnet50_v1"}
SCRIPTS: dict[str, dict[str, Any]] = {
    "train_imagenet": {}, "train_cifar10": _CIFAR, "train_mixup_cifar10": _MIXED, "train_cifar10_mixup": _MIXED,
    "train_horovod": {**_HOROVOD, "lr_mode": "cosine"}, "resnet50_imagenet": {**_HOROVOD, "lr_mode": "poly"},
    "image_classification": {"dataset": "cifar10", "num_epochs": 120, "lr_decay_epoch": "30,60,90"},
}  # fmt: skip
"""Script -> where its defaults differ from those of ``train_imagenet``."""
_PLAIN = ("resnet50_imagenet", "image_classification")  # without Nesterov's step
_SWITCHES = (
    *("use_rec", "use_pretrained", "use_se", "use_gn", "mixup", "label_smoothing", "no_wd", "last_gamma"),
    *("batch_norm", "no_cuda", "use_thumbnail", "auto_aug", "profile", "eval_epoch", "benchmark"),
)
_SHARED = frozenset(["batch_size", "dtype", "num_epochs", "lr", "wd", "warmup_epochs", "model"])
"""Flags that MXNet's script of the same name has, too, or that are the beginning of one (``--model-prefix``)."""

_MEAN, _STD = "[0.485,0.456,0.406]", "[0.229,0.224,0.225]"
_PIXELS = "[0.00392157,0.00392157,0.00392157]"  # of pixels from 0 to 255, less their mean
_CIFAR_MEAN, _CIFAR_STD = "[0.4914,0.4822,0.4465]", "[0.2023,0.1994,0.201]"
_NAMES = (  # GluonCV's pattern -> the name here
    (r"cifar_resnet(20|56|110)_v[12]", r"resnet\1"),
    (r"mobilenetv2_0\.(5|75)", r"timm/mobilenetv2_0\1"),
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
    (r"(vgg\d+(?:_bn)?|densenet\d+|xception|darknet53)", r"timm/\1"),
    (r"inceptionv3", "timm/inception_v3"),
    (r"squeezenet1\.([01])", r"torchvision/squeezenet1_\1"),
    (r"alexnet", "torchvision/alexnet"),
)


def is_gluoncv(words: Sequence[str]) -> bool:
    """Return whether flags are among these that MXNet's script of the same name lacks."""
    flags = {f"--{name.replace('_', '-')}" for name in (*_FLAGS, *_SWITCHES) if name not in _SHARED} | {"-j"}
    flags |= {"--num-workers", "--num-data-workers"}
    flags -= {"--gpus", "--benchmark"}
    typed = {word.partition("=")[0].replace("_", "-") for word in words}
    return bool(typed & flags) and not typed & {"--network", "--gpus", "--kv-store"}


def translate_gluoncv(words: Sequence[str], script: str = "train_imagenet", workers: int = 1) -> Translated:
    """Read a command line of one of the scripts, of which so many workers share a batch.

    Raises:
        InputError: a flag that it has not either, or what has no counterpart.
    """
    parser: Parser = flag_parser(f"{script} (Gluon's)", {k: v for k, v in _FLAGS.items() if k not in _SPELT})
    for name, other in _SPELT.items():
        parser.add_argument(f"--{name.replace('_', '-')}", other, dest=name, type=_FLAGS[name][0])
    for switch in _SWITCHES:
        parser.add_argument(f"--{switch.replace('_', '-')}", dest=switch, action="store_const", const="")
    parser.add_argument("-j", "--num-data-workers", "--num-workers", "--num-worker", dest="num_workers", type=int)
    parser.add_argument("--data-nthreads", dest="num_workers", type=int)
    typed: dict[str, Any] = vars(parser.parse_args(list(words)))
    usual = {name: value for name, (_, value) in _FLAGS.items()} | SCRIPTS[script]
    data = (usual | typed)["dataset"]
    if data in ("cifar10", "mnist"):
        usual |= {"input_size": 32, "crop_ratio": 1.0}
    if data in ("cifar10", "mnist", "caltech101"):
        usual |= {"rec_train": f"{data}/{data}-train.rec", "rec_val": f"{data}/{data}-val.rec"}
    is_horovod = "horovod" in script or script == "resnet50_imagenet"
    workers = workers if is_horovod or typed.get("kvstore", "").startswith("dist") else 1
    typed |= {"gpus": ",".join(map(str, range(typed["num_gpus"])))} if "num_gpus" in typed else {}
    draft = Draft({**usual, **typed, "workers": workers}, frozenset(typed))
    _data_and_network(draft)
    _length_and_rate(draft, script)
    _images_and_targets(draft, script)
    _machine(draft, is_horovod=is_horovod)
    for flag, why in _SAYS_NOTHING.items():
        draft.drop(flag, why)
    flags = {word.partition("=")[0] for word in words}
    spelt = {f"--{name.replace('_', '-')}": other for name, other in _SPELT.items() if other in flags}
    rows = [(" ".join(spelt.get(word, word) for word in old.split(" ")), new) for old, new in draft.rows]
    return Translated(commands=(tuple(draft.words),), rows=tuple(rows))


_DECAYED = "of all but norms and biases, as with --no-wd; without it GluonCV decayed them too"
_REASONS = {
    "the index is found by its name": "rec_train_idx rec_val_idx",
    "the kind of the data is seen": "use_rec",
    "norms and biases are not decayed": "no_wd",
    "residual networks of timm begin so": "last_gamma",
    "a checkpoint at every evaluation, and in between by time": "save_frequency",
    "all that happens is in RUN/events.jsonl; steady report RUN makes a page of it": (
        "logging_file logging_dir save_plot_dir profile builtin_profiler"
    ),
    "--set precision.compile=default compiles the network": "mode",
    "belongs to --teacher": "temperature hard_weight",
    "the same command resumes its run": "resume_params resume_states resume_epoch resume_from start_epoch",
    "every epoch is evaluated": "eval_epoch eval_frequency",
    "ranks exchange gradients directly": "kvstore",
    "its files are named": "dataset",
    "--device cpu": "no_cuda",
    "--transforms autoaugment": "auto_aug",
    "the network's name says it": "batch_norm use_thumbnail drop_rate",
    "--set seed=N draws otherwise": "seed",
}
_SAYS_NOTHING = {word: text for text, words in _REASONS.items() for word in words.split()}


def _data_and_network(draft: Draft) -> None:
    values = draft.values
    is_folder = "data_dir" in draft.typed and "rec_train" not in draft.typed
    place, fetched = values["data_dir" if is_folder else "rec_train"], values["dataset"]
    if fetched == "dummy" or "benchmark" in draft.typed:
        raise InputError(
            f"random images measure speed: steady bench train --model {_model(values['model'], with_norms=False)}"
        )
    if place == f"{fetched}/{fetched}-train.rec":
        draft.rows.append((f"{fetched}, which was downloaded", f"steady fetch {fetched} writes these files"))
    if not place:
        raise InputError("name the data: --rec-train FILE.rec, or --data-dir with the folders train and val")
    draft.add(["data_dir" if is_folder else "rec_train"], "train", place)
    if values["rec_val"] and not is_folder:
        draft.add(["rec_val"], "--val", values["rec_val"])
    elif not is_folder:
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


def _length_and_rate(draft: Draft, script: str) -> None:
    values, workers = draft.values, draft.values["workers"]
    for name, least in (("num_gpus", 0), ("batch_size", 1)):
        if values[name] < least:
            raise InputError(f"--{name.replace('_', '-')} is {values[name]}; it must be at least {least}")
    gpus, batch = max(1, len(read_gpus(draft))) * workers, values["batch_size"]
    draft.add(["input_size"], "--size", str(values["input_size"]))
    draft.add(["batch_size"], "--batch-size", str(batch * gpus), why=f"{batch} on each of {gpus} GPUs" * (gpus > 1))
    draft.add(["num_epochs"], "--epochs", str(values["num_epochs"]))
    why = f"that of one worker, {workers} times" if workers > 1 else "of the whole batch"
    draft.add(["lr"], "--lr", f"{values['lr'] * workers:g}", "--set", "optim.base_batch_size=none", why=why)
    draft.add(["warmup_epochs"], "--warmup-epochs", str(values["warmup_epochs"]))
    if values["warmup_lr"] and values["lr"]:
        draft.add(["warmup_lr"], "--set", f"optim.warmup=linear:{values['warmup_lr'] / values['lr'] / workers:g}")
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
    optimizer: Words = ("sgd", "--set", "optim.nesterov=false") if script in _PLAIN else ("nag",)
    draft.words += ["--optimizer", *optimizer, "--set", f"optim.momentum={values['momentum']:g}"]
    draft.rows.append((draft.old(["momentum"]), f"--optimizer {optimizer[0]} with it, as the script has"))
    draft.add(["wd"], "--weight-decay", f"{values['wd']:g}", why=("" if "no_wd" in draft.typed else _DECAYED))


def _images_and_targets(draft: Draft, script: str) -> None:
    values, transforms = draft.values, list[str]()
    draft.add(["crop_ratio"], "--set", f"data.crop={values['crop_ratio']:g}")
    if values["dataset"] in ("cifar10", "mnist"):
        is_padded = script != "image_classification"  # which cuts nothing
        crop = "pad-crop data.pad=4" if is_padded else "none"
        changes = f"data.augment={crop} data.flip={str(values['dataset'] != 'mnist').lower()}"
        changes += f" data.mean={_CIFAR_MEAN} data.std={_CIFAR_STD}" * is_padded
        draft.rows += [] if is_padded else [("--rgb-mean, --rgb-std", "mean and deviation of the data")]
    else:
        std = _PIXELS if script == "resnet50_imagenet" else _STD
        changes = "data.augment=resized-crop data.area=[0.08,1] data.ratio=[0.75,1.33333] data.flip=true"
        changes += f" data.mean={_MEAN} data.std={std}"
        transforms += ["autoaugment"] * ("auto_aug" in draft.typed) + ["color:0.4"]
    if "mixup" in values:
        transforms.append(f"mixup:{values['mixup_alpha']:g}")
        draft.rows.append(("--mixup", f"--transforms mixup:{values['mixup_alpha']:g}"))
        if values["mixup_off_epoch"]:
            draft.add(["mixup_off_epoch"], why="mixing continues to the end")
    else:
        draft.drop("mixup_off_epoch", "belongs to --mixup")
    draft.drop("mixup_alpha", "the share of mixing" if "mixup" in values else "belongs to --mixup")
    words = [word for change in changes.split() for word in ("--set", change)]
    words += ["--transforms", ",".join(transforms)] if transforms else []
    draft.words += words
    draft.rows.append(("random crops, flips, colours and their scale", f"{shlex.join(words)}; without PCA noise"))
    smoothing = "0.1" if "label_smoothing" in draft.typed else "0"
    draft.words += ["--set", f"optim.label_smoothing={smoothing}"]
    if "label_smoothing" in draft.typed:
        draft.rows.append(("--label-smoothing", "--set optim.label_smoothing=0.1"))
    draft.fix(f"{script}.py")


def _machine(draft: Draft, *, is_horovod: bool) -> None:
    values, gpus = draft.values, len(read_gpus(draft))
    devices = f"cuda:{values['gpus']}" if gpus else "cpu"
    if is_horovod and "no_cuda" not in draft.typed:
        draft.rows.append(("a worker's GPU", "each rank takes one"))
        values = {**values, "gpus": "0"}
    else:
        flag = "gpus" if "num_gpus" not in draft.typed and gpus else "num_gpus"
        draft.add([flag], *(("--procs", str(gpus)) if gpus > 1 else ()), "--device", devices)
    draft.add(["dtype"], "--precision", read_precision(Draft(values, draft.typed)))
    if "num_workers" in draft.typed:
        draft.add(["num_workers"], "--threads", str(max(1, values["num_workers"] // max(1, gpus))), why="of each rank")
    if values["save_dir"]:
        draft.add(["save_dir"], "--run", str(Path(values["save_dir"])), why="a folder; steady convert writes .params")
    draft.add(["log_interval"], "--set", f"every.log_steps={values['log_interval']}")
