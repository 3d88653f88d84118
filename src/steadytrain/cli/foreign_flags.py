"""Flags of timm, torchvision, Lightning and MXNet, read as flags and keys of ours.

Where the meaning is the same, a flag is read without a word; where it is nearly the same, or asks for what is done
anyway, a note says so; where there is nothing like it, an error names what comes nearest. Words that are exactly a
setting of the recipe stand at its field, those that nothing reads in :mod:`steadytrain.config.synonyms`;
``docs/generate_cli.py`` lists all of each tool.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from steadytrain.cli import augmentation_flags
from steadytrain.cli.augmentation_flags import FlagReading, Read, fixed, is_number, is_zero
from steadytrain.cli.options import key_of
from steadytrain.config.stages import OTHER_NAMES
from steadytrain.config.synonyms import plain_word
from steadytrain.errors import InputError
from steadytrain.format import count

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off", "none", "null")
ON_OFF = _TRUE + _FALSE
"""Words behind a switch that turn it on or off."""
_TIMM_EMA = "0.9998"
_STEPS = ("step", "steplr")
"""Names of a schedule that falls in steps of so many epochs, which another flag says."""


def read_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line with flags of ours in place of others', and notes about the difference.

    Raises:
        InputError: a flag without its value, or one that has no counterpart.

    >>> read_flags(["photos", "--reprob", "0.25", "--remode", "const", "--mixup=0.2", "--hflip", "0.5"])
    (['photos', '--transforms', 'erase:0.25,mixup:0.2', '--set', 'data.flip=true'], [])
    >>> read_flags(["photos", "--precision", "bf16-mixed", "--devices", "2", "--strategy", "ddp"])[0]
    ['photos', '--precision', 'bf16', '--procs', '2']
    """
    reading, left, waiting, transforms = FlagReading(), list[str](), list(words), None
    while waiting:
        word, equals, value = waiting.pop(0).partition("=")
        name = plain_word(word)
        if word.startswith("--") and "." in word and (key_of(name) or name in OTHER_VALUES):
            word = f"--{name}"  # LightningCLI's --data.batch_size
        if word == "--transforms":
            transforms = value if equals else waiting.pop(0) if waiting else ""
        elif not word.startswith("--"):
            left.append(word + equals + value)
        elif name in OTHER_VALUES:
            if not equals and waiting and not waiting[0].startswith("-"):
                value, equals = waiting.pop(0), " "
            _read_value(reading, left, word, equals, value)
        elif (read := READERS.get(name)) is None:
            left.append(word + equals + value)
        else:
            values = [value] if equals else _take_values(name, waiting)
            if not values and name not in SWITCHES and MOST_VALUES.get(name, 1):
                raise InputError(f"{word} needs a value: {word} VALUE")
            read(reading, word, values)
    _join_parts(reading, left)
    return left + reading.words(transforms), reading.notes


def _take_values(name: str, waiting: list[str]) -> list[str]:
    """Take the values of a flag from the words that follow it."""
    if name in SWITCHES:
        return [waiting.pop(0)] if waiting and waiting[0].lower() in ON_OFF else []
    values: list[str] = []
    if name in _PAIRS:
        while waiting and "=" in waiting[0] and not waiting[0].startswith("-"):
            values.append(waiting.pop(0))
        return values
    most = MOST_VALUES.get(name, 1)
    while waiting and len(values) < most and not (waiting[0].startswith("-") and not is_number(waiting[0])):
        if values and not is_number(waiting[0]):
            break
        values.append(waiting.pop(0))
    return values


def _read_value(reading: FlagReading, left: list[str], word: str, equals: str, value: str) -> None:
    """Read a flag of ours, or its synonym, whose value may be in another trainer's words."""
    name, text = plain_word(word), value.lower()
    known = OTHER_VALUES[name]
    if name == "weights" and re.fullmatch(r"\w+_Weights\.\w+|DEFAULT", value):
        raise InputError(
            f"{word} is {value!r}, torchvision's own. timm has many of them, such as --model"
            " timm/resnet50.tv2_in1k (steady models 'resnet50.tv*'); or give a file: --weights FILE"
        )
    if name in _OUR_SWITCHES:
        if equals and text in _FALSE:
            return
        if equals and text not in known:  # a switch of ours, and a word that is not its value
            left += [word, value]
        else:
            left.append(word)
    elif not equals:
        left.append(word)
    elif name in _SCHEDULES and text in _STEPS:
        reading.parts["schedule"] = f"{word} {value}"
    else:
        if name in _SCHEDULES:
            reading.parts["other schedule"] = f"{word} {value}"
        is_numbers = name == "device" and re.fullmatch(r"\d+(,\d+)*", value)  # Ultralytics' GPUs
        left += [word, f"cuda:{value}" if is_numbers else known.get(text, value)]


def _join_parts(reading: FlagReading, left: list[str]) -> None:
    """Say what several flags say together: steps of a schedule, a warm-up, devices, averaged weights."""
    parts = reading.parts
    if every := parts.get("every"):
        number = every.split()[-1]
        if "other schedule" in parts:
            reading.notes.append(f"{every} is left out: it belongs to --sched step, not to {parts['other schedule']}")
        else:
            reading.flags += ["--schedule", f"factor,every={number}"]
    elif "schedule" in parts:
        reading.flags += ["--schedule", "step"]
    if "warmup method" in parts or "warmup share" in parts:
        reading.keys["optim.warmup"] = f"{parts.get('warmup method', 'constant')}:{parts.get('warmup share', '0.01')}"
    if devices := parts.get("devices", ""):
        numbers = re.findall(r"\d+", devices)
        if devices.lower() in ("-1", "auto", "all"):
            reading.flags += ["--procs", "auto"]
        elif not numbers:
            raise InputError(f"devices are {devices}: --procs 2 computes on two GPUs, --device cuda:0,2 on these")
        elif not re.fullmatch(r"\d+", devices):
            parts["device"] = f"cuda:{','.join(numbers)}"
        elif devices != "1":
            reading.flags += ["--procs", devices]
    if device := parts.get("device"):
        reading.flags += ["--device", device]
    names = {plain_word(word.partition("=")[0]) for word in left if word.startswith("--")}
    if (ema := parts.get("ema")) and not names & {"ema", "model-ema-decay", "ema-decay"}:
        reading.flags += ["--ema", _TIMM_EMA]
        reading.notes.append(f"{ema} is read as --ema {_TIMM_EMA}, timm's decay; at first it is less, as ever here")
    if (amp := parts.get("amp")) and not names & {"precision", "dtype"}:
        precision = parts.get("amp dtype", "bf16")
        reading.flags += ["--precision", precision]
        if "amp dtype" not in parts:
            reading.notes.append(f"{amp} is read as --precision bf16; fp16, with its loss scaling, is --precision fp16")


def _key(key: str) -> Read:
    """Read a value as one of the recipe's."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        reading.keys[key] = values[0]

    return read


def _numbers(key: str) -> Read:
    """Read numbers, with spaces, commas or brackets, as a list of the recipe's."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        numbers = [number for value in values for number in re.split(r"[,\s()\[\]]+", value) if number]
        if not numbers or not all(map(is_number, numbers)):
            raise InputError(f"{word} is {' '.join(values)!r}; it must be numbers, such as {word} 0.5 0.5 0.5")
        reading.keys[key] = f"[{','.join(numbers)}]"

    return read


def _options(key: str) -> Read:
    """Read ``NAME=VALUE ...`` as options of a factory."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        reading.keys |= {f"{key}.{name}": value for name, _, value in (text.partition("=") for text in values)}

    return read


def _switch(key: str, value: str, note: str = "", *, off: str = "") -> Read:
    """Read a switch, which may have a word that turns it off, as a value of the recipe; ``off``: the value then."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        if is_on(values):
            reading.keys[key] = value
            reading.notes += [note] if note else []
        elif off:
            reading.keys[key] = off

    return read


def is_on(values: Sequence[str]) -> bool:
    """Return whether a switch is turned on: alone, or by the word behind it.

    >>> is_on([]), is_on(["true"]), is_on(["0"])
    (True, True, False)
    """
    return not values or values[0].lower() not in _FALSE


def _needless(why: str) -> Read:
    """Leave out a flag that asks for what is done anyway, or that nothing here depends on, and say why."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        reading.notes.append(f"{' '.join([word, *values])} is not needed: {why}")

    return read


def _part(name: str, *, whole: bool = False) -> Read:
    """Keep what one of several flags says until all are read; ``whole``: with the flag, as it was typed."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        if not values or values[0].lower() not in _FALSE:
            reading.parts[name] = " ".join([word, *values]) if whole else values[0]

    return read


def _flag(flag: str, *, suffix: str = "") -> Read:
    """Read a value as that of a flag of ours."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        reading.flags += [flag, values[0] + suffix]

    return read


def _words(*ours: str) -> Read:
    """Read a switch as words of ours."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        reading.flags += ours if is_on(values) else ()

    return read


def _choice(known: dict[str, Sequence[str]], nearest: str) -> Read:
    """Read one of some words as words of ours; any other has no counterpart, and the nearest is named."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        if values[0].lower() not in known:
            raise InputError(f"{word} {values[0]} has no counterpart here: {nearest}")
        reading.flags += known[values[0].lower()]

    return read


def _square(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read channels, height and width (``3 224 224``) as the side of the square."""
    numbers = [number for value in values for number in re.findall(r"\d+", value)]
    if len(numbers) not in (1, 2, 3) or (len(numbers) > 1 and numbers[-1] != numbers[-2]):
        raise InputError(f"{word} is {' '.join(values)}; images are squares here: --size 224 is the side")
    reading.flags += ["--size", numbers[-1]]


def _of_255(key: str) -> Read:
    """Read numbers for pixels from 0 to 255 as those for pixels from 0 to 1."""

    def read(reading: FlagReading, word: str, values: list[str]) -> None:
        numbers = [number for number in re.split(r"[,\s()\[\]]+", values[0]) if number]
        if not numbers or not all(map(is_number, numbers)):
            raise InputError(
                f"{word} is {values[0]!r}; it must be numbers from 0 to 255, such as 123.68,116.779,103.939"
            )
        reading.keys[key] = f"[{','.join(f'{float(number) / 255:.6g}' for number in numbers)}]"

    return read


def _gpus(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read GPUs by number (``0,1``), or all; one number may be a count or a GPU's own, so it is refused."""
    value = values[0].lower()
    if value.isdecimal():
        many = f"--procs {value} computes on {count(int(value), 'GPU')}" if value != "0" else "--device cpu for none"
        raise InputError(f"{word} is {value}: {many}, and --device cuda:{value} on GPU {value} (the first is cuda:0)")
    reading.parts["devices"] = value


def _accelerator(reading: FlagReading, word: str, values: list[str]) -> None:
    kind = values[0].lower()
    if kind not in ("auto", "cpu", "gpu", "cuda"):
        raise InputError(f"{word} {values[0]} has no counterpart here: --device cpu or cuda (NVIDIA's GPUs)")
    if kind != "auto":
        reading.parts.setdefault("device", "cuda" if kind in ("gpu", "cuda") else "cpu")


def _split_name(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read Keras's share of the images; timm's name of a split has no counterpart."""
    if not is_number(values[0]):
        raise InputError(
            f"{word} {values[0]} has no counterpart here: --val DATA names the validation data; a folder val/ or"
            " validation/ beside train/ is found"
        )
    reading.flags += ["--holdout", values[0]]


def _layer_decay(reading: FlagReading, word: str, values: list[str]) -> None:
    reading.flags += ["--train", "discriminative"]
    reading.keys["model.decay"] = values[0]


def _recovery_interval(reading: FlagReading, word: str, values: list[str]) -> None:
    if not is_zero(values[0]) and values[0] != "-1":  # these ask for nothing
        reading.keys["every.save_steps"] = values[0]


def _max_time(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read days, hours, minutes and seconds (``00:12:00:00``) as minutes."""
    parts = values[0].split(":")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise InputError(f"{word} is {values[0]!r}; it must be DD:HH:MM:SS, or minutes: --set budget.minutes=60")
    days, hours, minutes, seconds = map(int, parts)
    reading.keys["budget.minutes"] = f"{1440 * days + 60 * hours + minutes + seconds / 60:g}"


def _validation_interval(reading: FlagReading, word: str, values: list[str]) -> None:
    """Read a share of an epoch; a number of batches has no counterpart."""
    value = values[0]
    if not is_number(value) or not 0 < float(value) <= 1 or value == "1":
        raise InputError(
            f"{word} {value} has no counterpart here: --set every.evaluate_epochs=0.25 evaluates four times an epoch"
        )
    reading.keys["every.evaluate_epochs"] = value


def _no_augmentation(reading: FlagReading, word: str, values: list[str]) -> None:
    if is_on(values):
        reading.keys |= {"data.augment": "none", "data.flip": "false"}


_SCHEDULES = ("schedule", "sched", "scheduler", "lr-scheduler", "lr-schedule")
_LAWS = {
    **OTHER_NAMES, "multisteplr": "step", "cosineannealinglr": "cosine", "cosineannealingwarmrestarts": "restarts",
    "exponentiallr": "exponential", "onecyclelr": "one-cycle", "polynomiallr": "poly", "cycliclr": "triangular",
}  # fmt: skip
_PRECISIONS = {
    **dict.fromkeys(("32", "32-true", "float32", "fp32-true", "full"), "fp32"),
    **dict.fromkeys(("16", "16-mixed", "fp16-mixed", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16-mixed", "bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("16-true", "fp16-true"), "pure-fp16"),
    "bf16-true": "pure-bf16",
}
_OUR_SWITCHES = ("deterministic", "compile", "torchcompile")
OTHER_VALUES: dict[str, dict[str, str]] = {
    **dict.fromkeys(_SCHEDULES, _LAWS),
    **dict.fromkeys(("precision", "dtype"), _PRECISIONS),
    "device": {"gpu": "cuda"},
    "loss": {
        **dict.fromkeys(("ce", "crossentropyloss", "nn.crossentropyloss", "crossentropylossflat"), "cross-entropy"),
        **dict.fromkeys(("categorical_crossentropy", "sparse_categorical_crossentropy"), "cross-entropy"),
        **dict.fromkeys(("bce", "binary_crossentropy", "bcewithlogitsloss", "nn.bcewithlogitsloss"), "binary"),
    },
    "deterministic": dict.fromkeys((*_TRUE, "warn"), ""),
    **dict.fromkeys(("compile", "torchcompile"), dict.fromkeys((*_TRUE, "inductor"), "")),
    "weights": {},
}
"""Flag of ours, or its synonym -> values in other trainers' words, and ours."""

_ELSEWHERE = "--set model.decay=0.75 is the one factor of all layers"
_NODES = "steady launch --on ssh (slurm, mpi, kubernetes, ...) --nodes 2 --procs 4 -- train DATA starts machines"
_SHARDS = "--set parallel.shard=true divides the state among ranks, --engine local exchanges it rarely"

_NEEDLESS = {
    "the samples are counted": "train-num-samples val-num-samples num-examples",
    "the data say how many classes there are": "num-classes",
    "images get the channels that the data and the network have": "input-img-mode",
    "no code of a data set is run": "dataset-trust-remote-code",
    "an index is found beside its records, or made": "data-train-idx data-val-idx",
    "rank 0's statistics count, and all ranks evaluate with them; --set model.batch_norm=synchronous joins them": (
        "dist-bn no-ddp-bb"
    ),
    "the launcher's environment says it (RANK, LOCAL_RANK)": "local-rank rank",
    "--procs or a launcher starts ranks, and they share training and evaluation": (
        "distributed multiprocessing-distributed dist-eval"
    ),
    "the launcher's environment says it (MASTER_ADDR, MASTER_PORT)": "dist-url",
    "updates are timed without waiting for each": "synchronize-step",
    "cuDNN's algorithms are measured; steady bench train takes synthetic images": "benchmark cudnn-benchmark",
    "evaluation computes no gradients": "inference-mode",
    "each rank gets its share of each batch": "use-distributed-sampler",
    "the rate is evaluated at every update": "sched-on-updates",
    "the decay rises at first, to n / (n + 9) at update n": "model-ema-warmup",
    "evaluation takes --batch-size images at a time": "validation-batch-size vb",
    "evaluation takes --batch-size images": "per-device-eval-batch-size val-batch-size",
    "data and network are tried before the first update": "num-sanity-val-steps",
    "the newest checkpoints and the best weights are kept, --set every.keep=2 says how many": "save-period",
    "a terminal shows progress, a file gets lines; recipe.json and events.jsonl have all of it": (
        "enable-progress-bar enable-model-summary enable-autolog-hparams"
    ),
    "a terminal shows progress, a file gets lines": "verbose",
    "every metric that the labels allow is computed": "metrics class-mode",
    "training images are shuffled, and every batch is full": "shuffle drop-last",
    "a run trains, and evaluates after each epoch": "do-train do-eval",
    "the best and the last weights are always kept, and the same command resumes its run": (
        "remove-unused-columns load-best-model-at-end save-total-limit"
    ),
    "a terminal shows progress, a file gets lines, and the best weights are the best by top-1": (
        "logging-strategy disable-tqdm metric-for-best-model greater-is-better"
    ),
    "--procs or steady launch starts ranks": "launcher dist-backend",
    "the best and the last weights are always saved": "save-model",
    "steady report RUN draws them": "plots",
    "a classifier for other classes is replaced": "ignore-mismatched-sizes",
    "images are not joined to mosaics": "close-mosaic",
    "images that fit into memory are decoded once": "cache",
    "each sample's draws come from the seed and its position, not from a worker": "worker-seeding",
    "the loader works by threads that share memory, reads ahead and keeps going from epoch to epoch": (
        "pin-mem no-prefetcher use-multi-epochs-loader reload-dataloaders-every-n-epochs use-v2 pin-memory "
        "persistent-workers prefetch-factor use-multiprocessing dataloader-drop-last"
    ),
    "JPEG is decoded natively, other images by Pillow": "backend",
    "no file's code is run": "weights-only",
    "what measures does not wait for the device": "barebones",
}
"""Why flags are left out -> these flags."""

TRAINING_READERS: dict[str, Read] = {
    **{flag: _needless(why) for why, flags in _NEEDLESS.items() for flag in flags.split()},
    # data
    "val-split": _split_name,
    **dict.fromkeys(("input-size", "image-shape", "image-size", "target-size"), _square),
    "train-crop-size": _flag("--grow-size", suffix="@0"),
    "mean": _numbers("data.mean"),
    "std": _numbers("data.std"),
    "rgb-mean": _of_255("data.mean"),
    "rgb-std": _of_255("data.std"),
    "no-aug": _no_augmentation,
    "train-crop-mode": _choice(
        {"rrc": ("--set", "data.augment=resized-crop"), "none": ()},
        "--set data.augment=resized-crop, pad-crop or none",
    ),
    # model
    "pretrained": _switch(
        "model.pretrained",
        "true",
        "--pretrained: steady finetune has rates and epochs that suit pretrained weights",
        off="false",
    ),
    "channels-last": _switch("precision.channels_last", "true"),
    "model-kwargs": _options("model.options"),
    "torchcompile-mode": _key("precision.compile"),
    **dict.fromkeys(("sync-bn", "sync-batchnorm"), _switch("model.batch_norm", "synchronous")),
    # numbers and devices
    "amp": _part("amp", whole=True),
    "amp-dtype": lambda reading, word, values: reading.parts.update(
        {"amp": f"{word} {values[0]}", "amp dtype": _PRECISIONS.get(values[0].lower(), values[0])}
    ),
    "model-dtype": _choice(
        {
            "float32": ("--precision", "fp32"),
            "bfloat16": ("--precision", "pure-bf16"),
            "float16": ("--precision", "pure-fp16"),
        },
        "--precision fp32, pure-bf16 or pure-fp16",
    ),
    "accelerator": _accelerator,
    **dict.fromkeys(("devices", "num-gpus"), _part("devices")),
    "num-nodes": fixed("1", nearest=_NODES),
    "strategy": _choice(
        {
            **dict.fromkeys(("auto", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "single_device"), ()),
            **dict.fromkeys(("ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false"), ()),
            "fsdp": ("--set", "parallel.shard=true"),
        },
        _SHARDS,
    ),
    "gpus": _gpus,
    "kv-store": _choice(
        dict.fromkeys(("local", "device", "nccl", "local_allreduce_cpu", "local_allreduce_device"), ()),
        "steady launch starts ranks on several machines; --engine async has workers and servers",
    ),
    "gc-type": _choice({"none": (), "2bit": ("--set", "parallel.compress=2bit")}, "--set parallel.compress=2bit"),
    "gc-threshold": _key("parallel.threshold"),
    "no-cuda": _words("--device", "cpu"),
    "use-deterministic-algorithms": _words("--deterministic"),
    # optimizer and schedule
    "opt-betas": _numbers("optim.betas"),
    "opt-kwargs": _options("optim.options"),
    **dict.fromkeys(
        ("clip-mode", "gradient-clip-algorithm"), fixed("norm", nearest="--set optim.clip_norm=1 clips the global norm")
    ),
    "macrobatch-size": fixed("0", nearest="--set optim.accumulate=4 computes a batch in four parts"),
    "warmup-strategy": fixed("linear", nearest="--set optim.warmup=constant:0.1 or power:2"),
    "layer-decay": _layer_decay,
    "layer-decay-min-scale": fixed("0", nearest=_ELSEWHERE),
    "layer-decay-no-opt-scale": fixed(nearest=_ELSEWHERE),
    **dict.fromkeys(
        ("norm-weight-decay", "bias-weight-decay"), fixed("0", nearest="norms and biases are exempt from weight decay")
    ),
    "transformer-embedding-decay": fixed(nearest="--weight-decay decays embeddings as it does other weights"),
    "lr-base-scale": fixed(
        "linear", "", nearest="the rate is scaled linearly; --set optim.base_batch_size=none does not"
    ),
    "lr-k-decay": fixed("1", nearest="--schedule poly,power=2 falls in another way (docs: schedules)"),
    "decay-milestones": _numbers("optim.milestones"),
    **dict.fromkeys(("milestones", "lr-step-epochs"), _numbers("optim.milestones")),
    **dict.fromkeys(("decay-epochs", "lr-step-size", "step-size"), _part("every", whole=True)),
    "lr-warmup-method": _part("warmup method"),
    "lr-warmup-decay": _part("warmup share"),
    "max-time": _max_time,
    "bce-loss": _words("--loss", "binary"),
    "cos-lr": _words("--schedule", "cosine"),
    "model-ema": _part("ema", whole=True),
    "model-ema-steps": fixed(
        "1", nearest="--ema counts every update; the decay of 32 of them is its 32nd root for each"
    ),
    # evaluating, saving, logging
    **dict.fromkeys(
        ("eval-metric", "monitor"), fixed("top1", "acc1", "0", nearest="the best weights are the best by top-1")
    ),
    "val-check-interval": _validation_interval,
    "recovery-interval": _recovery_interval,
    "enable-checkpointing": fixed(*_TRUE, nearest="a run always saves; --set every.save_minutes=60 makes it rare"),
    "torch-compile": _words("--compile"),
}
READERS = {**augmentation_flags.READERS, **TRAINING_READERS}
"""Flag, without its dashes -> what reads it."""

SWITCHES = frozenset((
    "ra-sampler", "repeated-aug", "dataset-trust-remote-code", "no-aug", "pretrained", "channels-last", "sync-bn",
    "sync-batchnorm", "amp", "no-ddp-bb", "synchronize-step", "benchmark", "inference-mode",
    "use-distributed-sampler", "use-deterministic-algorithms", "sched-on-updates", "bce-loss", "model-ema",
    "model-ema-warmup", "enable-checkpointing", "enable-progress-bar", "enable-model-summary",
    "enable-autolog-hparams", "pin-mem", "no-prefetcher", "use-multi-epochs-loader", "use-v2", "weights-only",
    "barebones", "distributed", "multiprocessing-distributed", "dist-eval", "no-cuda", "cudnn-benchmark", "cos-lr",
    "plots", "ignore-mismatched-sizes", "torch-compile", "verbose", "shuffle", "drop-last", "do-train", "do-eval",
    "save-model", "remove-unused-columns", "load-best-model-at-end", "disable-tqdm", "greater-is-better",
    "use-multiprocessing", "dataloader-drop-last", "pin-memory", "persistent-workers",
))  # fmt: skip
"""Flags that need no value, and may have a word that turns them on or off."""

MOST_VALUES = {
    **augmentation_flags.MOST_VALUES,
    **dict.fromkeys(("mean", "std", "input-size", "image-shape", "image-size", "target-size"), 3),
    "opt-betas": 3,
    **dict.fromkeys(("decay-milestones", "milestones", "lr-step-epochs"), 100),
}
"""Values that a flag may have, where it is not one."""

_PAIRS = ("model-kwargs", "opt-kwargs")
"""Flags that have any number of ``NAME=VALUE``."""
