"""Command lines of MXNet's four trainers, as command lines of ``steady train`` and ``steady finetune``."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steadytrain.errors import InputError, ModelError, did_you_mean
from steadytrain.interop.mxnet.flags import (
    CUT,
    HELD_OUT,
    OF_OTHER_WEIGHTS,
    Draft,
    Flags,
    Translated,
    Words,
    add_threads,
    flag_parser,
    read_gpus,
    read_precision,
    read_shape,
)
from steadytrain.interop.mxnet.gluoncv import is_gluoncv, translate_gluoncv
from steadytrain.interop.mxnet.networks import FAMILIES, MODEL_OPTIONS, PUBLISHED, find_model, find_published
from steadytrain.interop.mxnet.symbol import read_symbol
from steadytrain.run import Run

NO_AUGMENTATION = {
    "random_crop": ("random crops of {} of an image (up to 64 pixels: padded by 4)", "--set data.augment=none"),
    "random_mirror": ("flips", "--set data.flip=false"),
}
"""Flag that nobody typed -> what is done as usual here, and how to have it as in MXNet 1.9.1, which did neither."""


_FIT: Flags = {
    **dict.fromkeys(("network", "lr_step_epochs", "model_prefix", "data_dir"), (str, None)), "gpus": (str, ""),
    **dict.fromkeys(("num_layers", "load_epoch"), (int, None)), "kv_store": (str, "device"),
    "num_epochs": (int, 100), **dict.fromkeys(("lr", "lr_factor"), (float, 0.1)), "initializer": (str, "default"),
    "optimizer": (str, "sgd"), "mom": (float, 0.9), "wd": (float, 1e-4), "batch_size": (int, 128),
    "disp_batches": (int, 20), "save_period": (int, 1), "loss": (str, ""), "dtype": (str, "float32"),
    **dict.fromkeys(("monitor", "top_k", "test_io", "macrobatch_size", "use_imagenet_data_augmentation"), (int, 0)),
    "lr_factor_epoch": (float, 1.0), "gc_type": (str, "none"), "gc_threshold": (float, 0.5), "warmup_epochs": (int, 5),
    "warmup_strategy": (str, "linear"), **dict.fromkeys(("profile_worker_suffix", "profile_server_suffix"), (str, "")),
}  # fmt: skip
_DATA: Flags = {
    **dict.fromkeys(("data_train", "data_val"), (str, None)), "image_shape": (str, "3,224,224"),
    **dict.fromkeys(("data_train_idx", "data_val_idx"), (str, "")), "rgb_mean": (str, "123.68,116.779,103.939"),
    "rgb_std": (str, "1,1,1"), "pad_size": (int, 0), "fill_value": (int, 127), "data_nthreads": (int, 4),
    **dict.fromkeys(("num_classes", "num_examples"), (int, None)), "benchmark": (int, 0),
}  # fmt: skip
_AUGMENT: Flags = {
    **dict.fromkeys(("random_crop", "random_mirror", "random_resized_crop"), (int, 0)),
    **dict.fromkeys(("max_random_h", "max_random_s", "max_random_l"), (float, 0.0)),
    "min_random_aspect_ratio": (float, None),
    **dict.fromkeys(("max_random_aspect_ratio", "max_random_rotate_angle", "max_random_shear_ratio"), (float, 0.0)),
    **dict.fromkeys(("max_random_scale", "min_random_scale", "max_random_area", "min_random_area"), (float, 1.0)),
    **dict.fromkeys(("min_crop_size", "max_crop_size"), (int, -1)),
    **dict.fromkeys(("brightness", "contrast", "saturation", "pca_noise"), (float, 0.0)),
}
_OF_2015 = {
    "network": "inception-bn", "num_epochs": 20, "lr": 0.05, "lr_factor": 1.0, "wd": 1e-5, "batch_size": 32,
    "gpus": "0", "kv_store": "local", "lr_factor_epoch": 1.0, "lr_step_epochs": None,
}  # fmt: skip
"""Defaults of 2015's scripts, which had --data-dir and --lr-factor-epoch, where they differ."""
TRAINERS: dict[str, dict[str, Any]] = {
    "train_mnist": {
        "network": "mlp", "batch_size": 64, "disp_batches": 100, "num_epochs": 20, "lr": 0.05, "lr_step_epochs": "10",
        "image_shape": "1,28,28", "num_classes": 10, "num_examples": 60000, "data_train": "data",
    },
    "train_cifar10": {
        "network": "resnet", "num_layers": 110, "image_shape": "3,28,28", "num_classes": 10, "num_examples": 50000,
        "pad_size": 4, "num_epochs": 300, "lr": 0.05, "lr_step_epochs": "200,250",
        "data_train": "data/cifar10_train.rec", "data_val": "data/cifar10_val.rec",
    },
    "train_imagenet": {
        "network": "resnet", "num_layers": 50, "num_classes": 1000, "num_examples": 1281167, "num_epochs": 80,
        "lr_step_epochs": "30,60",
    },
    "fine_tune": {"num_epochs": 30, "lr": 0.01, "lr_step_epochs": "20", "wd": 0.0, "mom": 0.0},
}  # fmt: skip
"""Script -> where its defaults differ from those of all."""


def translate_trainer(script: str, words: Sequence[str], workers: int) -> Translated:
    if script in ("train_imagenet", "train_cifar10") and is_gluoncv(words):
        return translate_gluoncv(words, script, workers)
    tuned: Flags = {"pretrained_model": (str, None), "layer_before_fullc": (str, "flatten0")}
    tables = (_FIT, _DATA, _AUGMENT, *((tuned,) if script == "fine_tune" else ()))
    parser = flag_parser(script, *tables)
    if script == "train_mnist":
        parser.add_argument("--add-stn", nargs="?", const="")
    typed = vars(parser.parse_args(list(words)))
    usual = {name: value for table in tables for name, (_, value) in table.items()} | TRAINERS[script]
    if typed.keys() & {"data_dir", "lr_factor_epoch"}:
        usual |= _OF_2015 if script == "train_imagenet" else {"lr_factor": 1.0, "lr_factor_epoch": 1.0}
        every, last = typed.get("lr_factor_epoch", 1.0), (usual | typed)["num_epochs"]
        usual["lr_step_epochs"] = ",".join(f"{every * k:g}" for k in range(1, math.ceil(last / every)))
        if place := typed.get("data_dir"):
            val = Path(place) / ("test.rec" if script == "train_cifar10" else "val.rec")
            usual |= {"data_train": str(Path(place) / "train.rec"), "data_val": str(val)}
    draft = Draft({**usual, **typed}, frozenset(typed))
    shape = read_shape(draft.values["image_shape"])
    if draft.values["test_io"]:
        _only_io(draft, shape)
    elif draft.values["benchmark"]:
        _only_updates(draft, shape)
    else:
        _training(draft, script, shape, workers)
    shown = " ".join(f"{old} " for old, _ in draft.rows)
    for flag in sorted(draft.typed):
        if f"--{flag.replace('_', '-')} " not in shown:
            draft.drop(flag, "changes nothing here")
    return Translated(commands=(tuple(draft.words),), rows=tuple(draft.rows))


def _data_file(draft: Draft, flag: str) -> str | None:
    place: str | None = draft.values[flag]
    if place and place.startswith("hdfs:"):
        raise InputError(f"{draft.old([flag])}: hdfs:// is not read: copy it to a disk (hdfs dfs -get), or to s3://")
    if place and ";" in place:
        files = " ".join(shlex.quote(part) for part in place.split(";"))
        raise InputError(f"{draft.old([flag])}: pack the files into one first: steady pack {files} merged")
    return place


def _train_file(draft: Draft) -> str:
    place = _data_file(draft, "data_train")
    if not place:
        raise InputError("name the data: --data-train FILE.rec, or a folder of classes")
    return place


def _only_io(draft: Draft, shape: tuple[int, int]) -> None:
    """``--test-io 1``: measure loading alone."""
    draft.add(["test_io", "data_train"], "feed", _train_file(draft), why="loads and cuts images, and trains nothing")
    draft.add(
        ["image_shape"], *(("--size", str(shape[1])) if shape[1] > 32 else ()), why=_SMALL if shape[1] <= 32 else ""
    )
    draft.add(["batch_size"], "--batch-size", str(draft.values["batch_size"]))
    add_threads(draft)
    for flag in sorted(draft.typed - {"test_io", "data_train", "image_shape", "batch_size", "data_nthreads"}):
        draft.drop(flag, "says nothing of loading")


def _only_updates(draft: Draft, shape: tuple[int, int]) -> None:
    """``--benchmark 1``: measure updates on images in memory."""
    channels, side = shape
    if not draft.values["network"]:
        raise InputError("--benchmark 1 measures a network by its name: add --network, such as --network resnet")
    draft.add(["benchmark"], "bench", "train", why="updates on random images in memory, and no data")
    _network(draft, side)
    draft.add(["image_shape"], "--size", str(side), *(() if channels == 3 else ("--channels", str(channels))))
    gpus = read_gpus(draft)
    share = max(1, draft.values["batch_size"] // max(1, len(gpus)))
    draft.add(["batch_size"], "--batch-size", str(share), why="the share of each GPU" * (len(gpus) > 1))
    if draft.values["num_classes"]:
        draft.add(["num_classes"], "--classes", str(draft.values["num_classes"]))
    draft.add(["dtype"], "--precision", read_precision(draft))
    draft.add(["optimizer"], "--optimizer", _optimizer_name(draft.values["optimizer"]))
    draft.add(["gpus"], "--device", f"cuda:{gpus[0]}" if gpus else "cpu", why=_FIRST if len(gpus) > 1 else "")
    used = {"benchmark", "network", "num_layers", "image_shape", "batch_size", "num_classes", "dtype", "optimizer"}
    for flag in sorted(draft.typed - used - {"gpus"}):
        draft.drop(flag, "says nothing of an update's speed")


_FIRST = "updates of one GPU are measured; steady scale says what several give"
_SMALL = "images of up to 64 pixels keep their side"


def _training(draft: Draft, script: str, shape: tuple[int, int], workers: int) -> None:
    values = draft.values
    if not {"data_train", "data_dir"} & draft.typed and not Path(_train_file(draft)).exists():
        name = script.removeprefix("train_")
        draft.rows.append(("no --data-train", f"steady fetch {name} fetches it: --data-train {name}/{name}-train.rec"))
    draft.add(["data_train"], "finetune" if script == "fine_tune" else "train", _train_file(draft))
    if val := _data_file(draft, "data_val"):
        draft.add(["data_val"], "--val", val)
    else:
        draft.rows.append(("no --data-val", HELD_OUT))
    if script == "fine_tune":
        _pretrained(draft)
        for flag in ("network", "num_layers"):
            draft.drop(flag, "the pretrained model is the network")
    else:
        _network(draft, shape[1])
    if shape[1] > 32:
        draft.add(["image_shape"], "--size", str(shape[1]), why=CUT if val else "")
    else:
        cuts = script == "train_cifar10" and shape[1] == 28
        draft.add(["image_shape"], why=_SMALL + " (MXNet cut 28 of 32 pixels out)" * cuts)
    batch, asked_workers = values["batch_size"], workers
    is_async = values["kv_store"].startswith("dist_async") and workers > 1 and find_spec("ray") is not None
    workers = workers if values["kv_store"].startswith("dist") and not is_async else 1  # that share a batch
    meaning = f"{batch} of each of {workers} workers" if workers > 1 else ""
    ranks = max(1, len(read_gpus(draft)))
    if odd := batch % ranks:
        batch = max(ranks, batch - odd)
        meaning = f"{batch * workers} divide among {ranks * workers} GPUs, {values['batch_size'] * workers} do not"
    draft.add(["batch_size"], "--batch-size", str(batch * workers), why=meaning)
    if workers < asked_workers and not is_async:
        draft.rows.append((f"{asked_workers} workers, --kv-store {values['kv_store']}", _NOT_ALONE))
    passed = _length(draft)
    _rate(draft, passed)
    _optimizer(draft, workers)
    _numbers(draft)
    _devices(draft, is_async=is_async, is_alone=asked_workers == 1)
    _augmentation(draft, script, shape[1])
    _normalised(draft, script)
    add_threads(draft, ranks)
    draft.add(["disp_batches"], "--set", f"every.log_steps={values['disp_batches']}")
    draft.fix(f"{script.replace('fine_', 'fine-')}.py")
    for flag, why in _SAYS_NOTHING.items():
        draft.drop(flag, why)


_NOT_ALONE = (
    "one training, whose ranks share each batch; MXNet's workers each trained a model of their own on all of the data,"
    " and wrote over each other's files (--kv-store dist_sync: one training with the batch of every worker)"
)
_REASONS = {
    "its train.rec and val.rec (CIFAR's test.rec), and the other defaults of 2015": "data_dir",
    "a step of the schedule each so many epochs": "lr_factor_epoch",
    "the index is found by its name; the order is global without it too": "data_train_idx data_val_idx",
    "counted in the data": "num_classes num_examples",
    "each network has its own initial weights": "initializer",
    "a checkpoint at every evaluation, and in between by time": "save_period",
    "no statistics of arrays; --set optim.clip_norm=... shows the gradient's norm": "monitor",
    "top-5 is evaluated anyway": "top_k",
    "the mean loss is shown anyway; here --loss says what is minimised, there it was only shown": "loss",
    "steady diagnose RUN says where the time went": "profile_worker_suffix profile_server_suffix",
    "a spatial transformer has no counterpart here": "add_stn",
}
_SAYS_NOTHING = {word: text for text, words in _REASONS.items() for word in words.split()}


def _network(draft: Draft, side: int) -> None:
    name, layers = draft.values["network"], draft.values["num_layers"]
    flags = ["network", *(["num_layers"] if name in FAMILIES else [])]
    model, why = find_model(name, layers, side)
    depth = ("--set", f"model.options.depth={layers}") if model == "resnet20" and layers != 20 else ()
    draft.add(flags, "--model", model, *depth, *MODEL_OPTIONS.get(model, ()), why=why)


def _pretrained(draft: Draft) -> None:
    """Draft the weights that fine-tuning begins with: MXNet's files where they exist, else those published today."""
    name, number = draft.values["pretrained_model"], draft.values["load_epoch"] or 0
    if not name:
        raise InputError("fine-tune needs --pretrained-model: MXNet's files (PREFIX of PREFIX-symbol.json), or a name")
    if Path(f"{name}-symbol.json").exists():
        flags = ["pretrained_model", *(["load_epoch"] if "load_epoch" in draft.typed else [])]
        draft.add(flags, "--model", f"mxnet:{name}-{number:04d}.params")
        layer, why = _layer_before(Path(f"{name}-symbol.json"), draft)
        if layer:
            words = ("--layer-before-fullc", layer, "--set", "model.options.classifier_init=kaiming")
            draft.add(["layer_before_fullc"], *words, why=f"a new classifier stands there{why}")
    elif name in PUBLISHED:
        model, why = find_published(name, f"{name}-symbol.json")
        draft.add(["pretrained_model"], "--model", model, why=why)
        draft.drop("layer_before_fullc", "what stands before the classifier is known")
    else:
        near = did_you_mean(name, PUBLISHED)
        raise InputError(
            f"--pretrained-model is {name!r}: there is no {name}-symbol.json, nor a model of that name.{near}"
        )


def _layer_before(symbol: Path, draft: Draft) -> tuple[str, str]:
    """Return the layer behind which the new classifier stands, and what is worth knowing of it."""
    layer: str = draft.values["layer_before_fullc"]
    if "layer_before_fullc" in draft.typed:
        return layer, ""
    try:
        nodes = read_symbol(symbol).nodes
    except ModelError:
        return "", ""  # whoever opens the network says what is wrong
    heads = [node for node in nodes if node.op in ("FullyConnected", "Convolution") and node.inputs]
    if not heads or any(node.name == layer for node in nodes):
        return layer, ""
    return nodes[heads[-1].inputs[0][0]].name, f"; this network has no {layer}"


def _length(draft: Draft) -> int:
    """The epochs that are trained; return how many of the old schedule are over."""
    values, prefix = draft.values, draft.values["model_prefix"]
    loaded = values["load_epoch"]
    if prefix:
        draft.add(["model_prefix"], "--run", prefix, why="a folder; steady convert writes .params of its weights")
    epochs, params = values["num_epochs"], Path(f"{prefix}-{loaded or 0:04d}.params")
    if loaded is None or "pretrained_model" in values:  # fine-tune.py began to count there, which was a fault
        draft.add(["num_epochs"], "--epochs", str(epochs))
        return 0
    if prefix and Run.is_run(prefix):
        draft.add(["num_epochs"], "--epochs", str(epochs))
        draft.drop("load_epoch", "the run resumes from its newest checkpoint, momentum included")
        return 0
    if not prefix:
        raise InputError(f"--load-epoch is {loaded}, of no model: --model-prefix names a run's folder, or a prefix")
    if not params.exists():
        problem = f"there is neither a run in {prefix} nor a file {params}"
        raise InputError(f"--load-epoch is {loaded}: {problem}: name another epoch or prefix")
    if loaded >= epochs:
        raise InputError(
            f"--num-epochs is {epochs}, the last epoch, and --load-epoch {loaded}: nothing is left to train"
        )
    words: Words = ("--model", f"mxnet:{params}", "--set", "model.pretrained=true")
    if not Path(f"{prefix}-symbol.json").exists():
        words = ("--weights", str(params))
    draft.add(["load_epoch"], *words, why="without momentum, which MXNet's scripts did not save")
    draft.add(["num_epochs"], "--epochs", str(epochs - loaded), why=f"{epochs} is the last one, and {loaded} are over")
    return int(loaded)


def _rate(draft: Draft, passed: int) -> None:
    """Learning rate and schedule, ``passed`` epochs after its beginning."""
    values, steps = draft.values, draft.values["lr_step_epochs"]
    lr, factor = values["lr"], values["lr_factor"]
    exact = ("--set", "optim.base_batch_size=none", "--warmup-epochs", "0")
    if steps and "pow" in steps and factor < 1:
        power = re.sub("pow[- ]*", "", steps)
        if re.fullmatch(r"\d+(\.\d*)?|\.\d+", power) is None:
            raise InputError(f"--lr-step-epochs is {steps!r}; it must be epochs, such as 30,60, or pow2")
        draft.add(["lr"], "--lr", f"{lr:g}", *exact, why="as it is, from the first update")
        draft.add(["lr_step_epochs"], "--schedule", "mxnet/poly", "--set", f"optim.power={power}")
        return
    steps = "" if factor >= 1 else steps or ""
    try:
        epochs = [float(part) for part in steps.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"--lr-step-epochs is {steps!r}; it must be epochs, such as 30,60, or pow2") from None
    if not epochs:
        draft.add(["lr"], "--lr", f"{lr:g}", *exact, "--schedule", "constant", why="it never falls")
        draft.drop("lr_step_epochs", f"with --lr-factor {factor:g} the rate never falls")
        return
    over, left = [e for e in epochs if e <= passed], [e - passed for e in epochs if e > passed]
    why = f"after {len(over)} of {len(epochs)} steps" if over else "as it is, from the first update"
    draft.add(["lr"], "--lr", f"{lr * factor ** len(over):g}", *exact, why=why)
    if left:
        shown = ",".join(f"{epoch:g}" for epoch in left)
        draft.add(
            ["lr_step_epochs", "lr_factor"],
            *("--schedule", "mxnet/multi-factor", "--set", f"optim.milestones=[{shown}]"),
            *("--set", f"optim.factor={factor:g}"),
        )
    else:
        draft.add(["lr_step_epochs"], "--schedule", "constant", why="all of its steps are over")


_OPTIMIZERS = {
    "ccsgd": "sgd",
    "lars": "timm/lars",
    "lamb": "timm/lamb",
    **{name: name for name in ("sgd", "nag", "adam", "adagrad", "adadelta", "rmsprop", "adamax", "nadam")},
    **{name: name for name in ("signum", "ftml", "dcasgd", "lbsgd", "ftrl", "sgld")},
}
_OPTIONS = {
    "sgd": "nesterov=false", "rmsprop": "options.alpha=0.9", "adagrad": "options.eps=1e-07",
    "adadelta": "options.eps=1e-05",
}  # fmt: skip
"""Optimizer -> MXNet's value, where ours is another."""
_WITH_MOMENTUM = ("sgd", "nag", "signum", "dcasgd", "lbsgd")


def _optimizer_name(name: str) -> str:
    if name.lower() not in _OPTIMIZERS:
        near = did_you_mean(name.lower(), _OPTIMIZERS)
        raise InputError(f"--optimizer is {name!r}; MXNet has {', '.join(sorted(_OPTIMIZERS))}.{near}")
    return _OPTIMIZERS[name.lower()]


def _optimizer(draft: Draft, workers: int) -> None:
    values, name = draft.values, _optimizer_name(draft.values["optimizer"])
    plain = ("--set", f"optim.{_OPTIONS[name]}") if name in _OPTIONS else ()
    draft.add(["optimizer"], "--optimizer", name, *plain)
    if name in ("sgd", "nag"):
        draft.add(["mom"], "--set", f"optim.momentum={values['mom']:g}")
    elif name in _WITH_MOMENTUM:
        draft.add(["mom"], "--set", f"optim.options.momentum={values['mom']:g}")
    else:
        draft.drop("mom", f"{name} has none")
    draft.add(
        ["wd"], "--weight-decay", f"{values['wd']:g}", why="of all but norms and biases; MXNet decayed gammas too"
    )
    if name == "lbsgd":
        batch = values["batch_size"] * workers
        scale = math.ceil(max(values["macrobatch_size"], batch) / batch)
        strategy = values["warmup_strategy"]
        draft.add(["macrobatch_size"], "--set", f"optim.options.batch_scale={scale}")
        draft.add(["warmup_strategy"], "--set", f"optim.options.warmup_strategy={strategy}")
        draft.add(["warmup_epochs"], "--set", f"optim.options.warmup_epochs={values['warmup_epochs']}")
    else:
        for flag in ("macrobatch_size", "warmup_epochs", "warmup_strategy"):
            draft.drop(flag, "belongs to lbsgd")


def _numbers(draft: Draft) -> None:
    why = {
        "fp32": "",
        "fp16": "with scaled losses and weights in fp32, as multi_precision",
        "bf16": "16 bits on a CPU; weights stay in fp32, as with multi_precision",
    }
    numbers = read_precision(draft)
    draft.add(["dtype"], "--precision", numbers, why=why[numbers])
    if draft.values["gc_type"] == "2bit":
        instead = "2bit, which learned more slowly, is not here: bf16 has half the bytes and no threshold"
        draft.add(["gc_type", "gc_threshold"], "--set", "parallel.compress=bf16", why=instead)
    elif draft.values["gc_type"] != "none":
        raise InputError(f"--gc-type is {draft.values['gc_type']!r}; it must be none or 2bit")
    else:
        draft.drop("gc_threshold", "only with --gc-type 2bit")


_STORES = (
    *("local", "device", "nccl", "dist_sync", "dist_async", "dist_device_sync", "dist_sync_device"),
    *("dist_async_device", "dist", "horovod", "byteps"),
)


def _devices(draft: Draft, *, is_async: bool, is_alone: bool) -> None:
    gpus, store = read_gpus(draft), draft.values["kv_store"]
    if len(gpus) > 1:
        why = "a rank on each of these GPUs"
        draft.add(["gpus"], "--procs", str(len(gpus)), "--device", f"cuda:{','.join(map(str, gpus))}", why=why)
    else:
        draft.words += ["--device", f"cuda:{gpus[0]}" if gpus else "cpu"]
        draft.rows.append((draft.old(["gpus"]) if gpus else "no --gpus", shlex.join(draft.words[-2:])))
    if store not in _STORES:
        near = did_you_mean(store, _STORES)
        raise InputError(
            f"--kv-store is {store!r}, which MXNet would have taken for local: {', '.join(_STORES)}.{near}"
        )
    if is_async:
        draft.add(
            ["kv_store"], "--engine", "async", why="each worker's batch is an update; no worker waits for another"
        )
    elif store.startswith("dist_async") and is_alone:
        draft.drop("kv_store", "one worker has nobody to wait for: launch -n 2 starts several, which do not either")
    elif store.startswith("dist_async"):
        draft.drop(
            "kv_store",
            "synchronous, the batches of all workers make one update: pip install 'steadytrain[async]' makes it"
            " asynchronous (--engine async)",
        )
    elif store.startswith("dist"):
        draft.drop("kv_store", "ranks exchange gradients directly, without servers; steady launch starts them")
    else:
        draft.drop("kv_store", "devices exchange gradients directly")


def _augmentation(draft: Draft, script: str, side: int) -> None:
    values, usual = draft.values, {name: value for name, (_, value) in _AUGMENT.items()}
    changed = {name for name in draft.typed & usual.keys() if values[name] != usual[name]}
    if values["use_imagenet_data_augmentation"]:  # as it was meant
        meant = {"random_resized_crop": 1, **dict.fromkeys(("brightness", "contrast", "saturation"), 0.4)}
        meant |= {"min_random_area": 0.08, "min_random_aspect_ratio": 3 / 4, "max_random_aspect_ratio": 4 / 3}
        values = {**values, **{name: value for name, value in meant.items() if name not in draft.typed}}
        changed |= {"random_resized_crop", "brightness"}
        draft.drop("use_imagenet_data_augmentation", "as it was meant; in MXNet 1.9.1 it changed nothing")
    is_padded = script == "train_cifar10" or values["pad_size"] > 0
    if is_padded:
        draft.add(["pad_size"], "--set", "data.augment=pad-crop", "--set", f"data.pad={values['pad_size']}")
    draft.drop("fill_value", "what is empty gets the mean colour")
    is_sized = bool(changed & _SIZED)
    if not is_sized and not is_padded and values["random_crop"] and side > 32:
        is_sized, changed = True, changed | {"random_crop"}
    untyped = {"random_crop", "random_mirror"} - draft.typed - ({"random_crop"} if is_sized else set())
    if untyped:
        share = "40 to 100 %" if script == "fine_tune" else "8 to 100 %"
        done, without = zip(*(NO_AUGMENTATION[flag] for flag in sorted(untyped)), strict=True)
        names = " ".join(f"--{flag.replace('_', '-')}" for flag in sorted(untyped)) if changed else "augmentation flags"
        why = f"{' and '.join(done)}, as usual here; MXNet 1.9.1 had none unless it was asked to"
        draft.rows.append((f"no {names}", f"{why.format(share)} ({' '.join(without)})"))
    if "random_mirror" in draft.typed:
        draft.add(["random_mirror"], "--set", f"data.flip={'true' if values['random_mirror'] else 'false'}")
    if "min_random_scale" in changed:
        draft.drop("min_random_scale", "left out: images are not made smaller than what is cut out of them")
    if is_sized:
        flags = sorted(changed & (_SIZED | {"random_crop"}) & draft.typed)
        words = ("--set", "data.augment=resized-crop", *_areas(values, changed))
        draft.words += words
        draft.rows += [(draft.old(flags), f"{shlex.join(words)}{_area_difference(values, changed)}")] if flags else []
        if "random_crop" not in changed:
            draft.drop("random_crop", "is part of it")
    elif is_padded:
        draft.drop("random_crop", "a place in the padded image is drawn")
    elif "random_crop" in draft.typed and not values["random_crop"]:
        draft.add(["random_crop"], "--set", "data.augment=none")
    else:
        draft.drop("random_crop", "random crops, as usual here, of a random size")
    transforms = list(_transforms(values))
    for flags, text, why in transforms:
        draft.rows.append((draft.old(flags), f"--transforms {text}{f': {why}' if why else ''}"))
    if transforms:
        draft.words += ["--transforms", ",".join(text for _, text, _ in transforms)]
    draft.drop("pca_noise", "no PCA noise; --transforms color changes brightness, contrast, saturation and hue")


_CROP_SIZES = {"min_crop_size", "max_crop_size"}
_OTHER_AREAS = _CROP_SIZES | {"random_resized_crop", "min_random_area", "max_random_area", "max_random_scale"}
_SIZED = _OTHER_AREAS | {"max_random_aspect_ratio", "min_random_aspect_ratio"}
_SHARE = 0.57, 0.77
"""Shares that a crop sees of an image of 4:3 and of a square one, whose shorter side is 8/7 of the crop's, as 256 is of
224.
"""


def _areas(values: Mapping[str, Any], changed: set[str]) -> Iterator[str]:
    low, high = values["min_random_area"], min(values["max_random_area"], 1.0)
    if "max_random_scale" in changed:  # an image that is made larger shows less of itself
        low, high = 1 / max(1.0, values["max_random_scale"]) ** 2, 1.0
    if changed & _CROP_SIZES:
        low, high = 0.08, 1
    elif not changed & _OTHER_AREAS:
        low, high = _SHARE
    yield from ("--set", f"data.area=[{low:.4g},{high:g}]")
    most, least = values["max_random_aspect_ratio"], values["min_random_aspect_ratio"]
    if most:
        ratios = (1 - most, 1 + most) if least is None else (least, most)
        yield from ("--set", f"data.ratio=[{ratios[0]:.6g},{ratios[1]:.6g}]")
    else:
        yield from ("--set", "data.ratio=[1,1]")


def _area_difference(values: Mapping[str, Any], changed: set[str]) -> str:
    """Say what crops are not MXNet's."""
    if changed & _CROP_SIZES:
        return (
            ": squares of 8 to 100 % of an image's area; MXNet's sides are pixels of images as they are stored:"
            " --set data.area=[LEAST,MOST] says their share"
        )
    if not changed & _OTHER_AREAS:
        return (
            ": nearly: MXNet kept the scale of stored images, and cut this share out of those packed at 256 pixels for"
            " 224; --set data.area=[LEAST,MOST] says another"
        )
    if values["random_resized_crop"] and values["min_random_area"] >= 1:
        return ": whole images, as MXNet's areas of 1 mean; --min-random-area 0.08 is what is usual"
    return ""


_HSL = {"h": 180, "s": 255, "l": 255}
"""Letter -> the steps of the whole scale, in OpenCV's HLS."""


def _transforms(values: Mapping[str, Any]) -> Iterator[tuple[list[str], str, str]]:
    """Yield flags, the transform that they are, and what differs."""
    hue, saturation, light = (float(f"{values[f'max_random_{name}'] / most:.2g}") for name, most in _HSL.items())
    jitter = ["brightness", "contrast", "saturation"]
    flags = [*jitter] if any(values[name] for name in jitter) else []
    shares = [max(light, values["brightness"]), values["contrast"], max(saturation, values["saturation"])]
    if hue or saturation or light:
        flags += [f"max_random_{name}" for name in _HSL]
        shares.append(min(hue, 0.5))  # half a circle either way is all of it
        yield flags, f"color:{','.join(f'{share:g}' for share in shares)}", "nearly: shares instead of steps of HSL"
    elif flags:
        yield flags, f"color:{','.join(f'{share:g}' for share in shares)}", ""
    if values["max_random_rotate_angle"]:
        yield ["max_random_rotate_angle"], f"rotate:{values['max_random_rotate_angle']:g}", ""
    if values["max_random_shear_ratio"]:
        yield ["max_random_shear_ratio"], f"shear:{values['max_random_shear_ratio']:g}", ""


def _normalised(draft: Draft, script: str) -> None:
    """Mean and standard deviation, of 255 here and of 1 there."""
    if script == "fine_tune" and not any(word.startswith("mxnet:") for word in draft.words):
        for flag in ("rgb_mean", "rgb_std"):
            draft.add([flag], why=OF_OTHER_WEIGHTS)
        return
    if script == "train_mnist" or not {"rgb_mean", "rgb_std"} & draft.typed:
        draft.rows.append(("--rgb-mean, --rgb-std (default)", "mean and deviation of the data, or of the weights"))
        return
    for flag, key in (("rgb_mean", "data.mean"), ("rgb_std", "data.std")):
        try:
            numbers = [float(part) / 255 for part in draft.values[flag].split(",")]
        except ValueError:
            raise InputError(
                f"{draft.old([flag])}: three numbers from 0 to 255, such as 123.68,116.779,103.939"
            ) from None
        draft.add([flag], "--set", f"{key}=[{','.join(f'{number:.6g}' for number in numbers)}]")
