"""Command lines of MXNet 1.9.1's image-classification tools, read as command lines of ours.

Every flag of a trainer that somebody typed either becomes words of ours or is left out with a reason; none is passed
over silently. Defaults of the old scripts hold (80 epochs, a batch of 128, ...), but not their faults
(:data:`~steadytrain.interop.mxnet.trainers.NO_AUGMENTATION`).

>>> words = "--network resnet --num-layers 50 --data-train a.rec --batch-size 64 --lr 0.1 --lr-step-epochs 30,60"
>>> " ".join(translate("train_imagenet.py", words.split()).commands[0][:4])
'train a.rec --model timm/resnetv2_50'
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from steadytrain.errors import InputError, did_you_mean
from steadytrain.files import open_text
from steadytrain.format import count
from steadytrain.interop.mxnet.flags import (
    CUT,
    OF_OTHER_WEIGHTS,
    Draft,
    Flags,
    Parser,
    Translated,
    add_threads,
    flag_parser,
    read_gpus,
    read_precision,
    read_shape,
)
from steadytrain.interop.mxnet.gluoncv import SCRIPTS, translate_gluoncv
from steadytrain.interop.mxnet.networks import PUBLISHED, find_model, find_published
from steadytrain.interop.mxnet.trainers import TRAINERS, translate_trainer


def _score(words: Sequence[str]) -> Translated:
    table: Flags = {
        "model": (str, None), "gpus": (str, "0"), "batch_size": (int, 64), "rgb_mean": (str, "0,0,0"),
        "data_val": (str, None), "image_shape": (str, "3,224,224"), "data_nthreads": (int, 4),
        "label_name": (str, "softmax_label"), "max_num_examples": (int, None), "rgb_std": (str, "1,1,1"),
        "dtype": (str, "float32"), "load_epoch": (int, 0),
    }  # fmt: skip
    typed = vars(flag_parser("score", table).parse_args(list(words)))
    draft = Draft({**{name: value for name, (_, value) in table.items()}, **typed}, frozenset(typed))
    prefix, _, number = str(draft.values["model"] or "").partition(",")
    if not prefix or not draft.values["data_val"]:
        raise InputError("score needs --model PREFIX and --data-val FILE.rec")
    number = number.strip() or str(draft.values["load_epoch"])
    if not number.isdecimal() or len(number) > 9:
        raise InputError(f"--model is {draft.values['model']!r}; the epoch after the comma must be a number: PREFIX,0")
    params = f"{prefix}-{int(number):04d}.params"
    is_replaced = prefix in PUBLISHED and not Path(params).exists()
    model, why = find_published(prefix, params) if is_replaced else (params, "")
    draft.add(["model", "data_val"], "evaluate", model, draft.values["data_val"], why=why)
    draft.add(["batch_size"], "--batch-size", str(draft.values["batch_size"]))
    channels, side = read_shape(draft.values["image_shape"])
    draft.add(["image_shape"], "--size", str(side), why=CUT)
    for flag in ("rgb_mean", "rgb_std"):
        if is_replaced:
            draft.drop(flag, OF_OTHER_WEIGHTS)
        else:
            values = draft.values[flag].split(",")[:channels]  # of grey images the first
            draft.add([flag], f"--{flag.replace('_', '-')}", ",".join(values))
    gpus = read_gpus(draft)
    draft.add(["gpus"], "--device", f"cuda:{gpus[0]}" if gpus else "cpu", why="one GPU scores" * (len(gpus) > 1))
    if "dtype" in draft.typed:
        draft.add(["dtype"], "--precision", read_precision(draft))
    add_threads(draft)
    draft.drop("load_epoch", f"the file {params}")
    draft.drop("label_name", "labels have no name here")
    draft.drop("max_num_examples", "every image is scored")
    return Translated(commands=(tuple(draft.words),), rows=tuple(draft.rows))


_SWITCHES = ("list", "recursive", "no_shuffle", "pass_through", "center_crop", "pack_label")
_OF_LISTS = ("recursive", "no_shuffle", "shuffle", "exts", "chunks", "train_ratio", "test_ratio")
"""Flags of im2rec that belong to ``--list``, and say nothing where lists are packed."""


def im2rec_values(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line of ``im2rec.py``: prefix, root, and the flags that were typed."""
    parser = Parser(prog="im2rec", add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("prefix")
    parser.add_argument("root")
    for switch in _SWITCHES:
        parser.add_argument(f"--{switch.replace('_', '-')}", dest=switch, action="store_const", const="")
    parser.add_argument("--shuffle")  # before 1.0
    parser.add_argument("--exts", nargs="+")
    for name in ("chunks", "train_ratio", "test_ratio", "resize", "quality", "num_thread", "color"):
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=float if name.endswith("ratio") else int)
    parser.add_argument("--encoding")
    values = vars(parser.parse_args(_without_switch_values(words)))
    if values.pop("shuffle", "True") in _OFF:
        values["no_shuffle"] = ""
    return values


_ON, _OFF = ("True", "true", "1"), ("False", "false", "0")


def _without_switch_values(words: Sequence[str]) -> list[str]:
    """Spell switches as today: before 1.0 they had a value (``--list True``, ``--recursive=1``)."""
    arguments: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, _, value = word.partition("=")
        if not flag.startswith("--") or flag.lstrip("-").replace("-", "_") not in _SWITCHES:
            arguments.append(word)
            continue
        if not value and rest and rest[0] in (*_ON, *_OFF):
            value = rest.pop(0)
        if value not in _OFF:
            arguments.append(flag if value in (*_ON, "") else word)
    return arguments


def _im2rec(words: Sequence[str]) -> Translated:
    if any("=" in word and not word.startswith("-") for word in words) or (
        len(words) == 3 and words[0].endswith(".lst") and words[2].endswith(".rec")
    ):
        return _im2rec_binary(words)
    values = im2rec_values(words)
    draft = Draft(values, frozenset(values))
    prefix, root = values["prefix"], values["root"]
    if "list" in values:
        draft.rows.append(("--list", "the lists that im2rec.py writes, line for line; the same command without packs"))
        for flag in sorted(draft.typed - {"list", "prefix", "root", *_OF_LISTS}):
            draft.drop(flag, "belongs to packing, the same command without --list")
        return Translated(commands=(("mxnet", "im2rec", *words),), rows=tuple(draft.rows))
    lists = _lists_of(prefix)
    if not lists:
        raise InputError(
            f"there is no list {prefix}*.lst: write it first (steady mxnet im2rec --list --recursive"
            f" {shlex.quote(prefix)} {shlex.quote(root)}), or pack the folder without one: steady pack"
            f" {shlex.quote(root)} {shlex.quote(prefix)}"
        )
    for flag in _OF_LISTS:
        draft.drop(flag, "belongs to --list; each list is packed as it is")
    if "pack_label" not in values:
        draft.rows += [row for path in lists for row in _several_labels(path)]
    _add_packing(draft)
    return Translated(
        commands=tuple(("pack", str(path), str(path.with_suffix("")), "--root", root, *draft.words) for path in lists),
        rows=tuple(draft.rows),
    )


def _lists_of(prefix: str) -> list[Path]:
    """Return the lists that a prefix means: names that begin with it (a whole name is one), or those of a folder."""
    path = Path(prefix)
    inside = sorted(file for file in path.iterdir() if file.suffix == ".lst") if path.is_dir() else []
    if inside or not path.parent.is_dir():
        return inside
    names = sorted(file for file in path.parent.iterdir() if file.name.startswith(path.name))
    return [file for file in names if file.suffix == ".lst" and file.is_file()]


def _several_labels(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the row of a list with several labels in its first line, of which im2rec stored one unless asked."""
    try:
        with open_text(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            num_labels = file.readline().count("\t") - 1
    except OSError:
        return  # packing says it
    if num_labels > 1:
        yield str(path), f"all {num_labels} labels of a line are stored; MXNet stored the first one unless it was asked"


def _add_packing(draft: Draft) -> None:
    """Add flags of packing, in both spellings of im2rec."""
    values = draft.values
    if values.get("resize", 0) > 0:
        draft.add(["resize"], "--shorter-side", str(values["resize"]), why="smaller images stay as they are")
    if "quality" in values and values.get("encoding", ".jpg") != ".png":
        draft.add(["quality"], "--quality", str(values["quality"]))
    elif "quality" in values:
        draft.add(["quality"], why="PNG is lossless")
    if values.get("num_thread", 0) > 0:
        draft.add(["num_thread"], "--workers", str(values["num_thread"]))
    if "encoding" in values:
        draft.add(["encoding"], "--encoding", {".png": "png"}.get(values["encoding"], "jpg"))
    if values.get("color", 1) == 0:
        draft.add(["color"], "--grey")
    elif "color" in values:
        draft.add(["color"], why="images keep their channels; those with alpha are read as colour later")
    if "pass_through" in values:
        draft.add(["pass_through"], "--encoding", "pass")
    if "center_crop" in values:
        draft.add(["center_crop"], why="whole images are kept; training and evaluation cut squares out")
    if "pack_label" in values:
        draft.add(["pack_label"], why="several labels are stored where the list has several")
    for flag in ("resize", "num_thread"):
        if values.get(flag, 1) <= 0:
            draft.add([flag], why="as without it")


def _im2rec_binary(words: Sequence[str]) -> Translated:
    """The C++ program: ``im2rec image.lst root out.rec key=value ...``."""
    places = [word for word in words if "=" not in word]
    if len(places) != 3:
        raise InputError("im2rec takes a list, a folder and a file: im2rec image.lst root/ out.rec resize=256")
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    if pairs.get("nsplit", "1") != "1":
        raise InputError(
            f"nsplit is {pairs['nsplit']}, which packs a part of the list: steady pack {places[0]}"
            f" {Path(places[2]).with_suffix('')} --root {places[1]} --shards {pairs['nsplit']} writes all parts at once"
        )
    names = ("resize", "quality", "encoding", "color", "center_crop")
    try:
        values = {key: value if key == "encoding" else int(value) for key, value in pairs.items() if key in names}
    except ValueError:
        raise InputError(f"{' '.join(words)}: a value is no whole number") from None
    if not values.get("center_crop"):
        values.pop("center_crop", None)
    if pairs.get("unchanged") == "1":
        values["pass_through"] = "1"
    draft = Draft(values, frozenset(values))
    for key in sorted(pairs.keys() - {*names}):
        known = {"label_width", "pack_label", "nsplit", "part", "inter_method", "unchanged"}
        if key not in known:
            raise InputError(f"im2rec has no {key}=.{did_you_mean(key, [*names, *known])}")
        if key != "unchanged":
            draft.rows.append((f"{key}={pairs[key]}", "changes nothing here: labels and files are the list's"))
    listed, root, out = places
    if pairs.get("label_width", "1") == "1":
        draft.rows += _several_labels(Path(listed))
    _add_packing(draft)
    argv = ("pack", listed, str(Path(out).with_suffix("")), "--root", root, *draft.words)
    return Translated(commands=(argv,), rows=tuple(draft.rows))


def _rec2idx(words: Sequence[str]) -> Translated:
    if len(words) not in (1, 2):
        raise InputError("rec2idx takes a record file and, after it, the index to write")
    index = words[1] if len(words) == 2 else str(Path(words[0]).with_suffix(".idx"))
    row = (" ".join(words), "keys from 0 on, as rec2idx.py wrote; records are read without an index, too")
    return Translated(commands=(("mxnet", "rec2idx", words[0], index),), rows=(row,))


def _parse_log(words: Sequence[str]) -> Translated:
    parser = flag_parser("parse_log", {"format": (str, "markdown")})
    parser.add_argument("logfile")
    parser.add_argument("--metric-names", nargs="+", default=["accuracy"])
    values = {"format": "markdown", **vars(parser.parse_args(list(words)))}
    form, log = values["format"], values["logfile"]
    if form not in ("markdown", "none"):
        raise InputError(f"--format is {form!r}; it must be markdown, or none for tabs between the columns")
    row = (
        f"parse_log {log}",
        f"the same table; steady report {shlex.quote(log)} writes a page with all figures and curves",
    )
    command = ("mxnet", "parse_log", log, "--format", form, "--metric-names", *values["metric_names"])
    return Translated(commands=(command,), rows=(row,))


def _launch(words: Sequence[str]) -> Translated:
    """``launch.py -n 4 -H hosts python train_imagenet.py ...``: the launcher's words stay, its command is read.

    A worker had several GPUs (``--gpus 0,1``), a rank has one: there are as many ranks as the workers had GPUs.
    """
    flags, program = _cut(words)
    if not program or program[0] in _OURS:
        return Translated(commands=(("launch", *words),), rows=())
    parser = Parser(prog="launch", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", "--num-workers", "--nworker", type=int, default=1)
    parser.add_argument("-s", "--num-servers", "--server-nodes", type=int)
    parsed, others = parser.parse_known_args(flags)
    workers: int = parsed.num_workers
    places = Parser(prog="launch", add_help=False, allow_abbrev=False)
    places.add_argument("--launcher", "--cluster", "--on", dest="place")
    places.add_argument("-H", "--hostfile", "--host-file", "--hosts", dest="hosts")
    named = places.parse_known_args(others)[0]
    before, script, arguments = _find_script(program)
    rows = [(shlex.join(before), _BEFORE)] if before else []
    others += [word for name in before if re.fullmatch(r"[A-Za-z_]\w*=.*", name) for word in ("--env", name)]
    if script not in PROGRAMS:
        rows.append((" ".join(program), _own_program(script)))
        return Translated(commands=(("launch", *others, "-n", str(workers), "--", *arguments),), rows=tuple(rows))
    inner = translate(script, arguments, workers=workers)
    command, rows = list(inner.commands[0]), [*rows, *inner.rows]
    ranks, is_on_gpus = workers, any(word.startswith("cuda:") for word in command)
    if "--procs" in command:  # the launcher starts the ranks
        at = command.index("--procs")
        gpus = int(command[at + 1])
        del command[at : at + 2]
        if named.place in ("slurm", "kubernetes"):  # where -n counts machines
            others += ["--procs", str(gpus)]
        else:
            ranks *= gpus
        rows.append((f"-n {workers}", f"{workers * gpus} ranks: {count(workers, 'worker')} of {gpus} GPUs"))
    if workers > 1 and not named.hosts and named.place in (None, "local") and is_on_gpus:
        raise InputError(
            f"{workers} workers on this machine would share the GPUs of --gpus: start one rank on each instead, without"
            f" launch: steady mxnet {script} --gpus 0,1,... and {workers} times the --batch-size"
        )
    others += [] if parsed.num_servers is None else ["-s", str(parsed.num_servers)]
    return Translated(commands=(("launch", *others, "-n", str(ranks), "--", *command),), rows=tuple(rows))


_OURS = ("steady", "train", "finetune", "resume", "bandwidth", "pack")
_BEFORE = "left out, but for variables (--env): steadytrain binds threads itself (--threads)"
_OWN = "your own program, which gets RANK and WORLD_SIZE; without MXNet's kvstore (docs: own-mxnet-script)"
_SHELL = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[1]])"
"""Python that becomes a shell, which runs the words of a command joined, as MXNet's launcher had them run."""


def _cut(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut a launcher's line into its flags and the program."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or re.fullmatch(r"-[nsH].+|--(p3|keep)?", words[at]) else 2
    return [word for word in words[:at] if word != "--"], list(words[at:])


def _find_script(program: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]]:
    """Return what stands before the interpreter (``env``), the old tool and its words; of none: what starts it."""
    if re.search(r"(^|/)(ba)?sh$", program[0]) and program[1:2] == ["-c"] and len(program) > 2:
        program = program[2:]
    if " " in program[0] and not re.search(r"[;&|<>$`]", program[0]):
        with suppress(ValueError):  # a quotation mark that is not closed, as the shell will say
            program = shlex.split(" ".join(program))
    at = next((i for i, word in enumerate(program) if re.fullmatch(r"python[\d.]*", Path(word).name)), -1)
    if at < 0 and re.fullmatch(r"\S+\.py", program[0]):  # started by its own first line
        program, at = ("python", *program), 0
    if at < 0 or any(word.endswith(".sh") for word in program[:at]):
        script = next((word for word in program if word.endswith(".sh")), program[0])
        return (), script, ("python", "-c", _SHELL, " ".join(program))
    first = next((i for i, word in enumerate(program) if i > at and not word.startswith("-")), at)
    name = _tool(program[first]) if program[first].endswith(".py") else ""
    if name in PROGRAMS:
        return program[:at], name, program[first + 1 :]
    return program[:at], program[first], ("python", *program[at + 1 :])


def _own_program(script: str) -> str:
    """Say what a user's own program gets. Raises InputError where it needs MXNet's servers."""
    text = Path(script).read_text(encoding="utf-8", errors="replace") if Path(script).is_file() else ""
    is_mxnets = script.endswith(".sh") or re.search(r"^\s*(import|from) mxnet\b", text, re.MULTILINE)
    if is_mxnets and re.search(r"kv[-_]?store|\bkv\.create|horovod", text, re.IGNORECASE):
        raise InputError(
            f"{script} trains through MXNet's kvstore or Horovod, which are not here: change about twenty lines"
            " (docs: own-mxnet-script), or put steady mxnet before each of MXNet's lines in it"
        )
    return _OWN


def _tool(program: str) -> str:
    """Name a script as :data:`PROGRAMS` does."""
    name = Path(program).name.removesuffix(".py").replace("-", "_")
    return ALIASES.get(name, name)


def _bandwidth(words: Sequence[str]) -> Translated:
    table: Flags = {
        "network": (str, "resnet"), "num_layers": (int, 152), "gpus": (str, "0,1"), "kv_store": (str, "device"),
        "num_batches": (int, 5), "disp_batches": (int, 1), "test_results": (int, 1), "image_shape": (str, "3,224,224"),
        "num_classes": (int, 1000), "optimizer": (str, "None"), "gc_type": (str, "none"),
    }  # fmt: skip
    typed = vars(flag_parser("bandwidth", table).parse_args(list(words)))
    draft = Draft({**{name: value for name, (_, value) in table.items()}, **typed}, frozenset(typed))
    model = find_model(draft.values["network"], draft.values["num_layers"], 224)[0]
    draft.add(["network", "num_layers"], "bandwidth", "--model", model)
    gpus = read_gpus(draft)
    if len(gpus) < 2:
        raise InputError(f"--gpus is {draft.values['gpus']!r}: a single GPU has nothing to exchange; name two or more")
    why = "a rank for each"
    if gpus != tuple(range(len(gpus))):
        why += f"; CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))} before the command chooses these"
    draft.add(["gpus"], "--procs", str(len(gpus)), why=why)
    for flag in ("num_batches", "disp_batches"):
        draft.drop(flag, "--seconds says how long to measure")
    draft.drop("test_results", "sums are compared anyway")
    draft.drop("gc_type", "fp16 and bf16 are measured too")
    for flag in ("kv_store", "image_shape", "num_classes", "optimizer"):
        draft.drop(flag, "does not matter: ranks exchange the gradients, and each updates its weights")
    return Translated(commands=(tuple(draft.words),), rows=tuple(draft.rows))


def _tracker(place: str) -> Callable[[Sequence[str]], Translated]:
    """Read a command line of a tracker of 2015, such as ``dmlc_ssh.py``, which is ``launch.py`` for one place."""
    return lambda words: _launch(["--launcher", place, *words])


def _mpi(words: Sequence[str]) -> Translated:
    """``mpirun -np 4 -x NCCL_DEBUG=INFO python train.py ...``, and ``horovodrun``: MPI's own flags are left out."""
    at = next((i for i, word in enumerate(words) if re.search(r"(^|/)python[\d.]*$|\.py$", word)), len(words))
    flags, kept = list(words[:at]), list[str]()
    for flag, value in pairwise([*flags, ""]):
        if flag in ("-H", "-host", "--host", "--hosts") and "," in value:
            raise InputError(f"{flag} {value}: write each as a line NAME slots=N of a file: --hostfile FILE")
        kept += [_OF_MPI[flag.lstrip("-")], value] if flag.startswith("-") and flag.lstrip("-") in _OF_MPI else []
    read = _launch([*kept, *words[at:]])
    return replace(read, rows=((shlex.join(flags), f"{shlex.join(kept)}: ranks find each other"), *read.rows))


_OF_MPI = {"np": "-n", "n": "-n", "hostfile": "-H", "machinefile": "-H", "x": "--env"}
ALIASES = {"measure": "bandwidth", "finetune": "fine_tune"}
"""Other names of the old tools."""
TOOLS: dict[str, Callable[[Sequence[str]], Translated]] = {
    "score": _score, "im2rec": _im2rec, "rec2idx": _rec2idx, "parse_log": _parse_log, "launch": _launch,
    "bandwidth": _bandwidth, **dict.fromkeys(("mpirun", "mpiexec", "horovodrun"), _mpi),
    **{f"dmlc_{place}": _tracker(place) for place in ("local", "ssh", "mpi")},
}  # fmt: skip
"""Name -> what reads its command line."""
PROGRAMS = (*TRAINERS, *TOOLS, *sorted(SCRIPTS.keys() - TRAINERS))
"""Names of the old tools, without ``.py``."""
_INSTEAD = {
    **dict.fromkeys(("benchmark_score", "benchmark_gluon"), "bench infer"),
    "test_score": "evaluate MODEL DATA",
    "make_list": "pack FOLDER OUT",
    "kill_mxnet": "launch (Ctrl-C ends its ranks)",
    **dict.fromkeys(("gluon_mnist", "module_mnist"), "train mnist/mnist-train.rec --model lenet"),
    "cifar10_dist": "launch -- train cifar10/cifar10-train.rec",
    "diagnose": "doctor",
    "benchmark": "scale --model NAME --devices N --link LINK",
}
"""Old tools whose flags are not read -> the command that does what they did."""


def translate(program: str, words: Sequence[str], *, workers: int = 1) -> Translated:
    """Read an old command line.

    Args:
        program: such as ``train_imagenet``, with or without ``.py``, with dashes or underscores.
        words: that followed it.
        workers: processes that train together: a batch was that of each.

    Raises:
        InputError: a program, a flag or a value that the old tools did not have either, or that has no counterpart.
    """
    name = _tool(program)
    if name in TRAINERS:
        return translate_trainer(name, words, workers)
    if name in SCRIPTS:
        return translate_gluoncv(words, name, workers)
    if name in _INSTEAD:
        raise InputError(f"the flags of {program} are not read: steady {_INSTEAD[name]} does what it did")
    if name not in PROGRAMS:
        before, script, arguments = _find_script([program, *words])  # python train_mnist.py, env A=1 python ...
        if _tool(script) in (*PROGRAMS, *_INSTEAD):
            read = translate(script, arguments, workers=workers)
            row = [(shlex.join(before), "belongs before steady mxnet")] if before else []
            return replace(read, rows=(*row, *read.rows))
        _own_program(script)
        near = did_you_mean(name, PROGRAMS)
        raise InputError(f"no tool of MXNet's is called {program!r}: there are {', '.join(PROGRAMS)}.{near}")
    return TOOLS[name](words)
