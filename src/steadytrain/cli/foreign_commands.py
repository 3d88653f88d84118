"""Command lines of other tools: the verb of ours that does what they did."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from steadytrain.cli.worded_errors import is_assignment
from steadytrain.config.foreign import foreign_table, plain_word, words_of
from steadytrain.config.recipe import recipe_settings
from steadytrain.errors import InputError
from steadytrain.interop.mxnet.tools import ALIASES, PROGRAMS
from steadytrain.run import Run

TASKS = ("detect", "segment", "pose", "obb", "track")
"""Tasks of Ultralytics that are not the classification of images."""


def foreign_command(words: Sequence[str], verbs: Sequence[str]) -> list[str]:
    """Return the command that does what another tool's did; nothing where no verb of ours is like it.

    What starts a script (``python``, ``torchrun``) and its flags are passed over.

    Args:
        words: as typed behind ``steady``.
        verbs: of ours.

    Returns:
        The whole command where ours reads the line, as of MXNet's tools, a training of Ultralytics (which begins with
        pretrained weights) and behind another name of a verb; else the verb alone, since the same flags mean other
        things from tool to tool.

    Raises:
        InputError: a task that is not the classification of images.

    >>> verbs = ("train", "finetune", "evaluate", "predict")
    >>> foreign_command("torchrun --nproc_per_node=8 train.py --data-path photos".split(), verbs)
    ['steady', 'train']
    >>> foreign_command("fine-tune photos --epochs 3".split(), verbs)
    ['steady', 'finetune', 'photos', '--epochs', '3']
    """
    same_verbs = words_of(foreign_table()["verbs"])
    likely = ""
    for place, word in enumerate(words):
        plain = word.removeprefix("mode=").removeprefix("task=")
        if plain in TASKS:
            raise InputError(f"{plain} is no task of steadytrain, which classifies images: steady train DATA")
        name, is_script = plain_word(PurePath(plain).stem), word.endswith((".py", ".sh"))
        program = name.replace("-", "_")
        is_old = is_script or name not in same_verbs or name == "im2rec"
        if is_old and (is_script or name not in verbs) and ALIASES.get(program, program) in PROGRAMS:
            return ["steady", "mxnet", *words[place:]]
        verb = name if name in verbs else same_verbs.get(name, "train" if is_script and "train" in name else "")
        if verb and name == "classify":  # of Ultralytics, whose mode follows
            likely = likely or verb
        elif verb == "train" and any(map(is_assignment, words)) and not is_script:
            is_new = any(word.startswith("model=") and word.endswith(".yaml") for word in words)
            is_new &= not any(word.startswith("pretrained=") and word.lower() != "pretrained=false" for word in words)
            known = ("mode=", "task=", "model=yolo", "pretrained=")
            rest = [word for word in words[place + 1 :] if not word.startswith(known)]
            return ["steady", "train" if is_new else "finetune", *_dashed(rest)]
        elif verb and (verb != "launch" or not place):  # accelerate launch starts a script
            is_ours = not (place or is_script or any(map(is_assignment, words)))
            return ["steady", *verb.split(), *(words[1:] if is_ours else _assigned_places(words))]
    return ["steady", *likely.split()] if likely else []


def _assigned_places(words: Sequence[str]) -> list[str]:
    """Return the files and folders that ``data=photos`` and the like name, if they are there."""
    values = [word.partition("=")[2] for word in words if is_assignment(word)]
    return [value for value in values if os.path.exists(value)]  # noqa: PTH110 - a long word is no path, and no error


def hint_of_places(words: Sequence[str], tokens: Sequence[str]) -> str:
    """Say how a place that is one too many is given; empty where no token is the name of something that is there.

    Args:
        words: the whole command.
        tokens: those of it that are too many.
    """
    verb, places = words[0], [word for word in words[1:] if os.path.exists(word)]  # noqa: PTH110 - as above
    if not set(tokens) & set(places):
        return ""
    if verb in ("train", "finetune"):
        return f": one source is trained on; --val {shlex.quote(tokens[0])} validates by another"
    runs = [place for place in places if Run.is_run(place)]
    if verb in ("embed", "check") and runs:
        images = [place for place in places if place not in runs]
        return f": a run is named by a flag: {shlex.join(['steady', verb, *images, '--weights', runs[0]])}"
    return f": steady {verb} takes {shlex.quote(places[0])} alone; steady {verb} --help shows all"


def hint_of_assignments(tokens: Sequence[str], verb: str, *, is_whole: bool = False) -> str:
    """Say how ``lr=0.1 epochs=3``, the manner of other tools, is written here; empty where no token is so.

    Args:
        is_whole: the tokens are all that follows the verb.
    """
    if not any(map(is_assignment, tokens)):
        return ""
    if verb not in ("train", "finetune"):
        if places := _assigned_places(tokens):
            return f": files and folders are named without a word: {shlex.join(['steady', verb, *places])}"
        return f": flags begin with dashes; steady {verb} --help shows all"
    ours = _dashed(tokens)
    flags = ours[next((k for k, word in enumerate(ours) if word.startswith("-")), len(ours)) :]
    if flags:
        return f": flags begin with dashes: {shlex.join(['steady', verb, *ours] if is_whole else flags)}"
    name, _, value = next(word for word in tokens if is_assignment(word)).partition("=")
    if value:
        return f": the data come first: {shlex.join(['steady', verb, value])}"
    return f": it needs a value, and flags begin with dashes: --{plain_word(name)} VALUE"


def _dashed(words: Sequence[str]) -> list[str]:
    """Write ``data=photos epochs=3`` as the data and flags; keys of the recipe as settings.

    >>> _dashed(["data=photos", "trainer.max_epochs=3", "optim.momentum=0.8", "cos_lr=True"])
    ['photos', '--max-epochs', '3', '--set', 'optim.momentum=0.8', '--cos-lr', 'True']
    """
    ours = list[str]()
    for word in words:
        name, _, value = word.partition("=")
        if not is_assignment(word):
            ours.append(word)
        elif name in recipe_settings():
            ours += ["--set", word]
        elif value:
            ours = [value, *ours] if plain_word(name) == "data" else [*ours, f"--{plain_word(name)}", value]
    return ours
