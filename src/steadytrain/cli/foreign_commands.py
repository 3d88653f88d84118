"""Whole command lines of other tools, as the command of ours to type instead."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from steadytrain.cli.worded_errors import is_assignment
from steadytrain.config.foreign import (
    OFF,
    ON,
    advice,
    foreign_flags,
    foreign_table,
    is_number,
    is_refused,
    plain_word,
    words_of,
)
from steadytrain.errors import InputError
from steadytrain.interop.mxnet.tools import ALIASES, PROGRAMS

OWN_VALUES = {"train": "smoothed labels", "finetune": "a probe first, frozen norms, smoothed labels, averages"}
"""Verb -> its own values where another tool's line is silent, which are not the other tool's."""
_STARTERS = ("python", "python3", "yolo", "uv", "run", "-m", "steady")
_LAUNCHERS = (
    *("torchrun", "accelerate", "deepspeed", "lightning", "fabric"),
    *("torch.distributed.launch", "torch.distributed.run"),
)
_RANKS = ("nproc-per-node", "num-processes", "num-gpus", "devices")
_MACHINES = ("nnodes", "num-machines", "num-nodes")
"""Flags of launchers for the ranks of a machine, and for the machines."""
_MODES = ("train", "val", "predict", "export", "benchmark")
_LIGHTNING = ("fit", "validate", "test", "predict")
_TASKS = ("detect", "segment", "pose", "obb", "track")
_NETWORK = ("model", "arch", "a")
PLACES = ("train", "finetune", "evaluate", "predict", "export")
"""Verbs of which the table says what stands without a flag."""
_FORMATS = {"onnx": "model.onnx", "openvino": "model.xml", "engine": "model.engine", "torchscript": "model.pt2"}
_ULTRALYTICS = re.compile(r"yolo\S*\.(pt|yaml)")
_BATCHES = ("b", "bs", "batch", "batch-size", "train-batch-size", "per-device-train-batch-size", "batch-size-per-gpu")


def foreign_command(words: Sequence[str], verbs: Sequence[str]) -> list[str]:
    """Return the command that comes nearest to another tool's command line; nothing where no verb of ours is like it.

    Flags stay in the other tool's words where the verb reads them.

    Args:
        words: as typed behind ``steady``.
        verbs: of ours.

    Raises:
        InputError: a task that is not the classification of images.

    >>> verbs = ("train", "finetune", "evaluate", "predict")
    >>> " ".join(foreign_command("yolo classify train data=photos model=resnet18 epochs=3".split(), verbs))
    'steady train photos --model resnet18 --epochs 3'
    >>> " ".join(foreign_command("torchrun --nproc_per_node=8 train.py --data-path photos -b 32".split(), verbs))
    'steady train photos -b 256 --procs 8'
    """
    left, ranks, machines = _without_starter(words)
    if left and _is_task(left[0]):  # classify train, task=classify mode=train
        left = _mode_first(left)
    if not left:
        return []
    name, is_script = _program(left[0]), left[0].endswith((".py", ".sh"))
    if name == "distributed-train" and left[1:]:
        name, ranks, left = "train", left[1], ["train", *left[2:]]
    old = name.replace("-", "_")
    same_verbs = words_of(foreign_table()["verbs"])
    is_old = is_script or name not in same_verbs or name == "im2rec"
    if is_old and name not in verbs and ALIASES.get(old, old) in PROGRAMS:
        return ["steady", "mxnet", *left]
    if is_script and left[1:] and left[1] in _LIGHTNING:  # main.py fit
        left, name = left[1:], left[1]
    verb = name if name in verbs else same_verbs.get(name, "")
    if not verb:
        return []
    number = (int(ranks) if ranks.isdecimal() else 1) * (int(machines) if machines.isdecimal() else 1)
    if verb not in ("train", "finetune") or (not ranks and not machines):
        return ["steady", *_command(verb, left[1:], 1)]
    command = _command(verb, left[1:], number)
    if machines not in ("", "1"):
        where = ["--on", "ssh", "--hosts", "HOSTS", "--nodes", machines]
        return ["steady", "launch", *where, "--procs", ranks or "1", "--", *command]
    return ["steady", *command, "--procs", ranks or "1"]


def _program(word: str) -> str:
    return plain_word(PurePath(word).name.removesuffix(".py").removesuffix(".sh"))


def _without_starter(words: Sequence[str]) -> tuple[list[str], str, str]:
    """Leave out what starts a script: an interpreter, a launcher and its flags.

    Returns:
        The words left, how many ranks a machine has, and how many machines there are, each empty where it is not said.
    """
    left, ranks, machines, is_launcher, is_total = list(words), "", "", False, False
    while left:
        word = left[0]
        flag, _, value = word.partition("=")
        if re.fullmatch(r"[A-Z_]+=\S*", word) or word in (*_STARTERS, *_LAUNCHERS):
            is_launcher |= word in _LAUNCHERS
            left.pop(0)
        elif is_launcher and word in ("launch", "model"):
            left.pop(0)
        elif is_launcher and word.startswith("-"):
            left.pop(0)
            if not value and left and not left[0].startswith("-") and not left[0].endswith(".py"):
                value = left.pop(0)
            if plain_word(flag) in _RANKS:
                ranks, is_total = value if value.isdecimal() else "auto", plain_word(flag) == "num-processes"
            machines = value if plain_word(flag) in _MACHINES else machines
        else:
            break
    if is_total and ranks.isdecimal() and machines.isdecimal():  # accelerate counts those of all machines
        ranks = str(max(1, int(ranks) // max(1, int(machines))))
    return left, ranks, machines


def _is_task(word: str) -> bool:
    """Return whether a word names Ultralytics' task, or its mode. Raises InputError for a task that is not ours."""
    name = word.removeprefix("task=")
    if name in _TASKS:
        raise InputError(f"{name} is no task of steadytrain, which classifies images: steady train DATA")
    return name == "classify" or word.startswith("mode=")


def _mode_first(words: Sequence[str]) -> list[str]:
    """Put Ultralytics' mode first, and leave out its task; nothing where it has no mode that is ours."""
    left = [word for word in words if word not in ("classify", "task=classify")]
    mode = next((word for word in left if word.removeprefix("mode=") in _MODES), "")
    left = [word for word in left if word != mode]
    return [mode.removeprefix("mode="), *left] if mode else ["predict", *left]


def _command(verb: str, words: Sequence[str], num_ranks: int) -> list[str]:
    """Put data, models and images where the verb has them, and keep the other words in their order.

    A batch is that of all ranks here, and that of one in scripts of which a launcher starts several; and their rate is
    that of the first batch, whatever its size.
    """
    if verb not in PLACES:
        return [*verb.split(), *words]
    places = {place: names.split() for place, names in _places(verb).items()}
    named: dict[str, str] = {}
    flags: list[str] = []
    bare: list[str] = []
    network = ""
    for name, values in _pairs(words):
        plain, is_flag, value = plain_word(name), name.startswith("-"), " ".join(values)
        known = {plain} if is_flag else {plain, f"={plain}"}
        place = next((place for place, names in places.items() if known & {*names}), "")
        if not name:
            bare.append(value)
        elif plain in _NETWORK and not _ULTRALYTICS.fullmatch(value):
            network = value
        elif plain in _NETWORK:  # these networks are not here; a .yaml starts without weights
            verb = "finetune" if verb == "train" and value.endswith(".pt") else verb
        elif plain == "pretrained":
            if verb in ("train", "finetune"):
                verb = "train" if value.lower() in OFF else "finetune"
        elif place:
            named.setdefault(place, value)
        elif verb == "export" and plain in ("format", "out", "output"):
            flags += ["-o", _FORMATS.get(value, value)]
        elif "." in name and not is_flag:  # a key of a recipe
            flags += ["--set", f"{name}={value}"]
        elif not is_flag and verb in ("train", "finetune") and is_refused(plain):
            raise InputError(f"{name}={value} is in the manner of another tool.{advice(plain)}")
        elif plain in _BATCHES and num_ranks > 1 and value.isdecimal():
            flags += [name if plain in ("b", "batch-size") else "--batch-size", str(num_ranks * int(value))]
        elif plain != "task" and (plain, value) not in (("mode", "train"), ("mode", "training")):
            flags += [name if is_flag else f"--{name}", *values]
    if network and "RUN" in places and "RUN" not in named:
        named["RUN"] = network
    elif network:
        flags = ["--model", network, *flags]
    ours = []
    for place in places:
        value = named.get(place) or (bare.pop(0) if bare else "")
        ours += [value or place] if value or (verb, place) != ("evaluate", "DATA") else []
    if verb == "export" and "-o" not in flags:
        flags += ["-o", _FORMATS["onnx"]]
    if verb == "train" and {"lr", "learning-rate", "lr0"} & set(map(plain_word, flags)):
        flags += ["--set", "optim.base_batch_size=none"]
    return [verb, *ours, *bare, *flags]


def _places(verb: str) -> Mapping[str, str]:
    """Return what stands without a flag in a verb, and the words that name it elsewhere."""
    places: Mapping[str, str] = foreign_table()["places"]["train" if verb == "finetune" else verb]
    return places


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield flags, and words such as ``lr=0.1``, with their values; other words without a name."""
    left = deque(words)
    while left:
        word = left.popleft()
        name, equals, value = word.partition("=")
        if not word.startswith("-") and not is_assignment(word):
            yield "", [word]
            continue
        values = [value] if equals else []
        rows = foreign_flags().get(plain_word(name), ())
        takes_any = not rows or any(row.most for row in rows) or is_refused(plain_word(name))
        if not equals and left and not left[0].startswith("-") and (takes_any or left[0].lower() in (*ON, *OFF)):
            values.append(left.popleft())
            while left and is_number(left[0]):  # --betas 0.9 0.999
                values.append(left.popleft())
        yield name, values
