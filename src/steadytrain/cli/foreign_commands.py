"""Whole command lines of other tools, as the command of ours to type instead."""

from __future__ import annotations

import re
import shlex
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
PLACES = ("train", "finetune", "evaluate", "predict", "export")
"""Verbs of which the table says what stands without a flag."""
_ULTRALYTICS = re.compile(r"yolo\S*\.(pt|yaml)")


def _names(kind: str) -> list[str]:
    """Return words of other tools' command lines of one kind, which the table has."""
    names: str = foreign_table()["commands"][kind]
    return names.split()


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
    left = _with_mode_first(left)
    if not left:
        return []
    is_script, name = left[0].endswith((".py", ".sh")), plain_word(PurePath(left[0]).stem)
    if is_script and left[1:] and left[1] in _names("lightning"):  # main.py fit
        left, name = left[1:], left[1]
    elif name == "distributed-train" and left[1:]:
        name, ranks, left = "train", left[1], left[1:]
    same_verbs, program = words_of(foreign_table()["verbs"]), name.replace("-", "_")
    is_old = is_script or name not in same_verbs or name == "im2rec"
    if is_old and name not in verbs and ALIASES.get(program, program) in PROGRAMS:
        return ["steady", "mxnet", *left]
    if not (verb := name if name in verbs else same_verbs.get(name, "")):
        return []
    if verb not in ("train", "finetune") or (not ranks and not machines):
        return ["steady", *_command(verb, left[1:], 1)]
    number = (int(ranks) if ranks.isdecimal() else 1) * (int(machines) if machines.isdecimal() else 1)
    command = _command(verb, left[1:], number)
    if machines not in ("", "1"):
        where = ["--on", "ssh", "--hosts", "HOSTS", "--nodes", machines]
        return ["steady", "launch", *where, "--procs", ranks or "1", "--", *command]
    return ["steady", *command, "--procs", ranks or "1"]


def hint_of_assignments(tokens: Sequence[str], words: Sequence[str], verbs: Sequence[str]) -> str:
    """Return what to type in place of ``lr=0.1 epochs=3``, the manner of other tools; empty where no token is so."""
    if not (assigned := [word for word in tokens if is_assignment(word)]):
        return ""
    if words[0] in PLACES:
        return f": flags begin with dashes: {shlex.join(foreign_command(words, verbs))}"
    name, _, value = assigned[0].partition("=")
    return f": flags begin with dashes, such as --{name.replace('_', '-')} {value}; steady {words[0]} --help shows all"


def _without_starter(words: Sequence[str]) -> tuple[list[str], str, str]:
    """Leave out what starts a script: an interpreter, a launcher and its flags.

    Returns:
        The words left, how many ranks a machine has, and how many machines there are, each empty where it is not said.
    """
    left, is_launcher, said = deque(words), False, dict[str, str]()
    launchers = _names("launchers")
    while left:
        flag, _, value = left[0].partition("=")
        if left[0] in (*launchers, *_names("starters")) or re.fullmatch(
            r"[A-Z_]+=\S*", left[0]
        ):  # CUDA_VISIBLE_DEVICES=0
            is_launcher |= left.popleft() in launchers
        elif is_launcher and left[0] in ("launch", "model"):
            left.popleft()
        elif is_launcher and left[0].startswith("-"):
            left.popleft()
            if not value and left and not left[0].startswith("-") and not left[0].endswith(".py"):
                value = left.popleft()
            said[plain_word(flag)] = value
        else:
            break
    ranks = next((said[flag] if said[flag].isdecimal() else "auto" for flag in _names("ranks") if flag in said), "")
    machines = next((said[flag] for flag in _names("machines") if flag in said), "")
    if "num-processes" in said and ranks.isdecimal() and machines.isdecimal():  # accelerate counts all machines' ranks
        ranks = str(max(1, int(ranks) // max(1, int(machines))))
    return list(left), ranks, machines


def _with_mode_first(words: list[str]) -> list[str]:
    """Put Ultralytics' mode first, and leave out its task. Raises InputError for a task that is not ours."""
    first = words[0].removeprefix("task=") if words else ""
    if first in _names("tasks"):
        raise InputError(f"{first} is no task of steadytrain, which classifies images: steady train DATA")
    if first != "classify" and not first.startswith("mode="):
        return words
    words = [word.removeprefix("mode=") for word in words if word not in ("classify", "task=classify")]
    mode = next((word for word in words if word in _names("modes")), "predict")
    return [mode, *(word for word in words if word != mode)]


def _command(verb: str, words: Sequence[str], num_ranks: int) -> list[str]:
    """Put data, models and images where the verb has them, and keep the other words in their order.

    A batch is that of all ranks here, and that of one in scripts of which a launcher starts several; and their rate is
    that of the first batch, whatever its size.
    """
    if verb not in PLACES:
        return [*verb.split(), *words]
    places = {place: names.split() for place, names in _places(verb).items()}
    files: Mapping[str, str] = foreign_table()["files"]
    named, flags, bare, network = dict[str, str](), list[str](), list[str](), ""
    for name, values in _pairs(words):
        plain, is_flag, value = plain_word(name), name.startswith("-"), " ".join(values)
        known = {plain} if is_flag else {plain, f"={plain}"}
        place = next((place for place, names in places.items() if known & {*names}), "")
        if not name:
            bare.append(value)
        elif plain in ("model", "arch", "a"):
            if not _ULTRALYTICS.fullmatch(value):  # whose networks are not here; a .yaml starts without weights
                network = value
            elif verb == "train" and value.endswith(".pt"):
                verb = "finetune"
        elif plain == "pretrained":
            if verb in ("train", "finetune"):
                verb = "train" if value.lower() in OFF else "finetune"
        elif place:
            named.setdefault(place, value)
        elif verb == "export" and plain in ("format", "out", "output"):
            flags += ["-o", files.get(value, value)]
        elif "." in name and not is_flag:  # a key of a recipe
            flags += ["--set", f"{name}={value}"]
        elif not is_flag and verb in ("train", "finetune") and is_refused(plain):
            raise InputError(f"{name}={value} is in the manner of another tool.{advice(plain)}")
        elif plain in _names("batches") and num_ranks > 1 and value.isdecimal():
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
        flags += ["-o", files["onnx"]]
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
