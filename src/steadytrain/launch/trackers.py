"""Flags of MXNet's ``launch.py`` and dmlc's trackers: each is mapped to ours, left out with a reason, or refused.

>>> translate(["-n", "4", "-s", "2", "-H", "hosts", "--launcher", "ssh", "train", "a.rec"]).argv
('--on', 'ssh', '--hosts', 'hosts', '--set', 'ranks=4', '--', 'train', 'a.rec')
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from steadytrain.errors import InputError, did_you_mean

VALUES = ("--on", "--nodes", "--procs", "--hosts", "--sync", "--exclude", "--env", "--job", "--set", "-o", "--output")
SWITCHES = ("--dry-run", "--json", "--help", "-h")

_LAUNCHERS = ("local", "ssh", "mpi", "slurm", "kubernetes", "yarn")
_NO_SERVERS = "there are none: the ranks exchange gradients themselves"
_PRINTED = "what is printed is the log; a run's own is in its folder"
_JAVA = "it belongs to the trackers' own Java client"
_SHIPPED = "no files are shipped: --sync copies the working directory; images and shared disks hold the rest"

_RENAMED = {
    **dict.fromkeys(("-H", "--hostfile", "--host-file"), "--hosts"),
    **dict.fromkeys(("--sync-dst-dir", "--sync-dir"), "--sync"),
    **dict.fromkeys(("--env-worker",), "--env"),
}
_SET = {
    "--jobname": "name",
    **dict.fromkeys(("--host-ip", "-hip"), "address"),
    **dict.fromkeys(("--worker-cores", "--vcores"), "cpus"),
    "--local-num-attempt": "restarts",
    "--kube-namespace": "kubernetes.namespace",
    "--kube-worker-image": "image",
}
_LEFT_OUT = {
    **dict.fromkeys(("-s", "--num-servers", "--server-nodes", "--slurm-server-nodes", "--env-server"), _NO_SERVERS),
    **dict.fromkeys(
        ("--server-cores", "--server-memory", "--kube-server-image", "--kube-server-template"), _NO_SERVERS
    ),
    **dict.fromkeys(("--log-level", "--log-file", "--logdir", "--sge-log-dir"), _PRINTED),
    **dict.fromkeys(
        ("--hdfs-tempdir", "--tempdir", "--yarn-app-classpath", "--app-classpath", "--yarn-app-dir"), _JAVA
    ),
    **dict.fromkeys(("--ship-libcxx", "--libhdfs-opts", "--name-node", "--yarn-scripts", "-hb", "-Xmx128m"), _JAVA),
    **dict.fromkeys(("--auto-file-cache", "-ac", "--files", "-f", "--archives"), _SHIPPED),
}
_LEFT_OUT_SWITCHES = {"--p3": "it chose how servers send; " + _NO_SERVERS}
_REFUSED = {
    "--mesos-master": "there is no launcher for Mesos: take kubernetes, slurm, mpi or ssh",
    "--kube-worker-template": "write the manifests with --dry-run -o FOLDER, change them, and kubectl apply them",
}
_RANKS = ("-n", "--num-workers", "--nworker")
_ON = ("--launcher", "--cluster")
_NODES = "--slurm-worker-nodes"
_MEMORY = ("--worker-memory", "-mem")
_QUEUE = ("-q", "--queue")
_ATTEMPTS = "--max-attempts"
_OLD = {*_RENAMED, *_SET, *_LEFT_OUT, *_REFUSED, *_RANKS, *_ON, _NODES, *_MEMORY, *_QUEUE, _ATTEMPTS}


@dataclass(frozen=True, kw_only=True)
class Translated:
    """Words of ours, ``--`` before the command always; ``notes`` say what became of the old ones."""

    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass
class _Read:
    """What was read so far."""

    new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    old: dict[str, str] = field(default_factory=dict)


def translate(argv: Sequence[str]) -> Translated:
    """Old words and new ones, mixed as they may be, as new ones; the command begins after ``--``, or its first word.

    Raises:
        InputError: an old word that nothing here answers to, or a value that is missing.
    """
    read, rest = _Read(), list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word, equals, value = rest.pop(0).partition("=")
        if word in SWITCHES or word in _LEFT_OUT_SWITCHES:
            _take_switch(read, word)
        elif word in VALUES or word in _OLD:
            if not equals and not rest:
                raise InputError(f"{word} wants a value")
            _take(read, word, value if equals else rest.pop(0))
        else:  # unknown: the command line says so, with what is near
            read.new.append(f"{word}{equals}{value}")
    command = rest[1:] if rest[:1] == ["--"] else rest
    return Translated(argv=(*_placed(read), *read.new, *(["--", *command] if command else [])), notes=tuple(read.notes))


def _take_switch(read: _Read, word: str) -> None:
    if word in SWITCHES:
        read.new.append(word)
    else:
        read.notes.append(f"{word} is left out: {_LEFT_OUT_SWITCHES[word]}")


def _take(read: _Read, word: str, value: str) -> None:
    if word in _REFUSED:
        raise InputError(f"{word} {value}: {_REFUSED[word]}")
    if word in _LEFT_OUT:
        if value != "0":
            read.notes.append(f"{word} {value} is left out: {_LEFT_OUT[word]}")
    elif word in _SET:
        read.new += ["--set", f"{_SET[word]}={value}"]
    elif word in ("--env", *_RENAMED):
        name = _RENAMED.get(word, word)
        read.new += [name, _assignment(value) if name == "--env" else value]
        if name == "--hosts":
            read.old["hosts"] = value
    elif word in _MEMORY:
        read.new += ["--set", f"memory_gb={_gigabytes(word, value)}"]
    elif word in VALUES:
        read.new += [word, value]
        if word in ("--on", "--nodes", "--hosts"):
            read.old[word.removeprefix("--")] = value
    else:
        read.old[_place_of(word)] = value


def _place_of(word: str) -> str:
    named = {**dict.fromkeys(_RANKS, "ranks"), **dict.fromkeys(_ON, "launcher"), _NODES: "old nodes"}
    return {**named, **dict.fromkeys(_QUEUE, "queue"), _ATTEMPTS: "attempts"}[word]


def _placed(read: _Read) -> list[str]:
    """What depends on the launcher: first of all, which it is."""
    old, new = read.old, []
    if "launcher" in old:
        new += ["--on", _launcher(old["launcher"])]
    on = old.get("on", _launcher(old["launcher"]) if "launcher" in old else "ssh" if "hosts" in old else "local")
    if "hosts" in old and "--hosts" in read.new:
        at = read.new.index("--hosts")
        new += [read.new.pop(at), read.new.pop(at)]
    if "old nodes" in old:
        new += ["--nodes", old["old nodes"]]
        read.notes.append(f"{_NODES} {old['old nodes']} is --nodes")
    if "ranks" in old:
        is_one_each = on in ("slurm", "kubernetes", "yarn") and not {"nodes", "old nodes"} & old.keys()
        new += ["--nodes", old["ranks"]] if is_one_each else ["--set", f"ranks={old['ranks']}"]
        read.notes.append(f"{old['ranks']} workers are so many ranks" + ", one a machine" * is_one_each)
    if "queue" in old:
        new += ["--set", f"{'slurm.partition' if on == 'slurm' else 'yarn.queue'}={old['queue']}"]
    if "attempts" in old:
        new += ["--set", f"restarts={max(0, _whole(_ATTEMPTS, old['attempts']) - 1)}"]
    return new


def _launcher(name: str) -> str:
    if name in _LAUNCHERS:
        return name
    if name in ("sge", "mesos"):
        raise InputError(f"there is no launcher for {name}: take {', '.join(_LAUNCHERS)}")
    raise InputError(f"there is no launcher {name!r}: take {', '.join(_LAUNCHERS)}.{did_you_mean(name, _LAUNCHERS)}")


def _assignment(text: str) -> str:
    """``NAME:VALUE``, as dmlc wrote it, or ``NAME=VALUE``.

    >>> _assignment("OMP_NUM_THREADS:3"), _assignment("URL=http://a"), _assignment("TOKEN")
    ('OMP_NUM_THREADS=3', 'URL=http://a', 'TOKEN')
    """
    return re.sub(r"^(\w+):", r"\1=", text)


def _gigabytes(word: str, text: str) -> int:
    """``2g``, ``512m``, or megabytes, rounded up."""
    match = re.fullmatch(r"(\d+)([gm]?)b?", text.lower())
    if match is None:
        raise InputError(f"{word} is {text!r}; it must be a size such as 2g, 512m or 1024 (megabytes)")
    number = int(match[1])
    return number if match[2] == "g" else -(-number // 1024)


def _whole(word: str, text: str) -> int:
    if not text.isdigit():
        raise InputError(f"{word} is {text!r}; it must be a whole number")
    return int(text)
