"""``steady mxnet``: command lines of MXNet's image-classification tools."""

from __future__ import annotations

import os
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, convert

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import TrainingOptions
from steadytrain.distributed.world import world_from_environment
from steadytrain.errors import InputError
from steadytrain.format import count, whole_number
from steadytrain.interop.mxnet.flags import Translated
from steadytrain.interop.mxnet.tools import im2rec_values, translate

OURS = ("--dry-run", "--mxnet-log", "--json", "--force")
"""Flags that the old tools did not have."""


def mxnet(program: str, /, *words: Annotated[str, Parameter(allow_leading_hyphen=True, converter=convert)]) -> int:
    """Run a command line of MXNet 1.9.1's image-classification tools: train_imagenet, fine-tune, im2rec, ...

    Each old flag is shown with what it has become, then the new command, which is run. With --dry-run nothing is run,
    and the recipe is printed. With --mxnet-log training writes the lines of MXNet's Speedometer, which old tools
    read. With --force im2rec replaces files. --json prints what the command prints as a document; with --dry-run the
    command itself.

    Args:
        program: train_mnist, train_cifar10, train_imagenet, fine-tune, score, im2rec, rec2idx, parse_log, launch or
            bandwidth, with or without .py.
        words: What followed it.

    Examples:
        steady mxnet train_imagenet.py --network resnet --num-layers 50 --data-train train.rec --gpus 0,1 --dry-run
        steady mxnet train_cifar10 --data-train train.rec --data-val val.rec --network resnet --num-layers 20
        steady mxnet im2rec --list --recursive --train-ratio 0.9 photos images/
        steady mxnet im2rec photos images/ --resize 256 --quality 95 --num-thread 16
        steady mxnet parse_log train.log
    """
    flags = [word for word in words if word in OURS]
    read = translate(program, [word for word in words if word not in OURS], workers=_num_workers())
    commands = [[*command, *_own_flags(command, flags)] for command in read.commands]
    if "--dry-run" in flags:
        return _show(read, commands, json="--json" in flags)
    from steadytrain.cli import _run

    for line in _lines(read):
        note(line)
    for command in commands:
        if command[0] == "mxnet":
            _run_tool(command, json="--json" in flags)
            continue
        note(f"steady {shlex.join(command)}")
        code = _run(command)
        if isinstance(code, int) and code:
            return code
    return 0


def _run_tool(command: Sequence[str], *, json: bool) -> None:
    """Do what no verb of ours does: write lists and indices as MXNet's tools, print the table of ``parse_log.py``."""
    _, tool, file, *others = command
    if tool == "rec2idx":
        from steadytrain.data.recordio.index import write_index

        note(f"wrote {write_index(Path(file), Path(others[0]))}")
        return
    if tool == "im2rec":
        _write_lists(im2rec_values(command[2:]), json=json)
        return
    from steadytrain.interop.logs import format_epochs, read_log

    runs = read_log(file)
    if json:
        from steadytrain.reports import accounts, tables

        print_text(tables.to_json(accounts(runs)))
        return
    _, form, _, *metrics = others
    for run in runs:  # the old tool took several runs in a file for workers
        if run.format != "MXNet":
            raise InputError(f"{file} is a log of {run.format}, and parse_log reads MXNet's: steady report {file}")
        print(format_epochs(run, metrics, markdown=form == "markdown"))  # its tabs are what a parser splits at


def _write_lists(values: dict[str, Any], *, json: bool) -> None:
    """Write what ``im2rec.py --list`` writes, and print what it printed: each folder with its label."""
    from steadytrain.interop.mxnet.image_lists import write_image_lists

    lists = write_image_lists(
        Path(values["prefix"]),
        Path(values["root"]),
        recursive="recursive" in values,
        extensions=values.get("exts", (".jpeg", ".jpg", ".png")),
        chunks=values.get("chunks", 1),
        train_ratio=values.get("train_ratio", 1.0),
        test_ratio=values.get("test_ratio", 0.0),
        shuffle="no_shuffle" not in values,
    )
    if json:
        print_json({"lists": {str(path): number for path, number in lists.counts.items()}, "folders": lists.folders})
        return
    print_text("\n".join(f"{folder} {label}" for label, folder in enumerate(lists.folders)))
    for path, number in lists.counts.items():
        note(f"wrote {path}: {count(number, 'image')}")


def _num_workers() -> int:
    """Return how many processes train together, as a launcher of either kind says."""
    text = os.environ.get("DMLC_NUM_WORKER", "1")
    if (number := whole_number(text)) is None:
        raise InputError(f"DMLC_NUM_WORKER is {text!r}; it must be a whole number of workers")
    return max(world_from_environment(os.environ).size, number)


def _trained(command: Sequence[str]) -> Sequence[str]:
    """Return the command that trains, itself or behind ``launch ... --``; nothing of other commands."""
    inner = command[command.index("--") + 1 :] if command[0] == "launch" and "--" in command else command
    return inner if inner and inner[0] in ("train", "finetune") else ()


def _own_flags(command: tuple[str, ...], flags: list[str]) -> list[str]:
    trains = bool(_trained(command))
    if "--mxnet-log" in flags and not trains:
        raise InputError(f"--mxnet-log belongs to training; steady {command[0]} writes no such lines")
    if "--force" in flags and command[0] != "pack":
        raise InputError(f"--force belongs to packing; steady {command[0]} replaces no files")
    return [flag for flag in flags if flag != "--dry-run" and command[0] != "mxnet"]


def _show(read: Translated, commands: list[list[str]], *, json: bool) -> int:
    """Print what a command line has become, and the recipe where something would be trained."""
    recipes = [_recipe(command) for command in commands]
    if commands and commands[0][0] == "launch":
        from steadytrain.interop.mxnet.launchers import translate as translate_launcher

        launcher = translate_launcher(commands[0][1:])
        commands = [["launch", *launcher.argv]]
        read = replace(read, rows=(*read.rows, *(("launch", line) for line in launcher.notes)))
    if json:
        rows = [{"old": old, "new": new} for old, new in read.rows]
        print_json({"commands": commands, "rows": rows, "recipes": recipes})
        return 0
    lines = [*_lines(read), *(f"steady {shlex.join(command)}" for command in commands)]
    for recipe in recipes:
        lines += ["", recipe] if recipe else []
    print_text("\n".join(lines))
    return 0


def _recipe(command: Sequence[str]) -> str | None:
    """Return the recipe of a command that trains, as TOML; None for others, and where the data are not here."""
    command = _trained(command)
    if not command:
        return None
    from steadytrain.cli import parse
    from steadytrain.cli.train import recipe_for
    from steadytrain.config.defaults import write_toml

    try:
        recipe = recipe_for(command[1], parse(command)["options"], finetune=command[0] == "finetune")
        usual = recipe_for(command[1], TrainingOptions(), finetune=False)  # of steady train --recipe
        return "\n".join(write_toml(recipe, usual, {})[0])
    except InputError as error:
        note(f"no recipe yet: {error}")
        return None


def _lines(read: Translated) -> list[str]:
    """Format old flags on the left and what they have become on the right, in the terminal's width."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    lines, left = [], min(32, width // 3)
    for old, new in read.rows:
        wrapped = textwrap.wrap(new, width - left - 2, break_on_hyphens=False, break_long_words=False)
        if len(old) > left:
            lines += textwrap.wrap(old, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
            old = ""
        lines += [
            f"{head:<{left}}  {line}".rstrip() for head, line in zip([old, *[""] * len(wrapped)], wrapped, strict=False)
        ]
    return lines
