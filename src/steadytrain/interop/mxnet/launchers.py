"""Flags of MXNet's ``launch.py``: each is mapped to ours, or left out with a reason.

>>> translate(["-n", "4", "-s", "2", "-H", "hosts", "--launcher", "ssh", "train", "a.rec"]).argv
('--on', 'ssh', '--hosts', 'hosts', '--set', 'ranks=4', '--', 'train', 'a.rec')
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.errors import InputError
from steadytrain.launch import launcher_name, launchers

VALUES = ("--on", "--nodes", "--procs", "--hosts", "--sync", "--exclude", "--env", "--job", "--set", "-o", "--output")
"""Flags of ``steady launch`` that are followed by a value."""

_NO_SERVERS = "ranks exchange gradients directly, and --engine async has one server"
_SERVERS = ("-s", "--num-servers")
_RENAMED = {
    **dict.fromkeys(("-H", "--hostfile"), "--hosts"),
    **dict.fromkeys(("--launcher", "--cluster"), "--on"),
    "--sync-dst-dir": "--sync",
    "--env-worker": "--env",
}
_RANKS = ("-n", "--num-workers")
_INSTEAD = {
    **dict.fromkeys(("--queue", "-q"), "--set slurm.partition=NAME"),
    **dict.fromkeys(("--worker-cores", "--vcores"), "--set cpus=N"),
    **dict.fromkeys(("--worker-memory", "-mem"), "--set memory_gb=N"),
    "--jobname": "--set name=NAME",
    "--host-ip": "--set address=HOST",
    "--slurm-worker-nodes": "--nodes N",
    "--kube-namespace": "--set kubernetes.namespace=NAME",
    "--kube-worker-image": "--set image=NAME",
    **dict.fromkeys(("--max-attempts", "--local-num-attempt"), "--set restarts=N"),
}
"""Flags of dmlc-submit that were taken once, and what does the same."""
_FIRST = ("--on", "--hosts")
_GONE = ("sge", "mesos", "yarn")
"""Launchers of MXNet's that are not here."""


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """Flags of ``steady launch``, ``--``, and the command; ``notes`` say what became of the old flags."""

    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()


def translate(argv: Sequence[str]) -> LaunchCommand:
    """Translate old flags, which may be mixed with new ones; the command begins after ``--``, or at the first non-flag.

    Raises:
        InputError: a launcher that is not supported, or a value that is missing.
    """
    ours: dict[str, list[str]] = {}  # flag -> its values, as often as it is given
    switches: list[str] = []
    notes: list[str] = []
    placed: list[str] = []
    ranks = ""
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word, equals, value = rest.pop(0).partition("=")
        if word == "--p3":
            notes.append(f"{word} is ignored: it chose how servers send; {_NO_SERVERS}")
            continue
        if word in _INSTEAD:
            raise InputError(f"{word} is no flag of steady launch: use {_INSTEAD[word]}")
        if word not in (*VALUES, *_RENAMED, *_RANKS, *_SERVERS, "--env-server"):
            switches.append(f"{word}{equals}{value}")  # one that is unknown the command line refuses
            continue
        if not equals and not rest:
            raise InputError(f"{word} needs a value")
        value = value if equals else rest.pop(0)
        if word in (*_SERVERS, "--env-server"):
            notes += [f"{word} {value} is ignored: {_NO_SERVERS}"] if value != "0" else []
        elif word in _RANKS:
            ranks = value
        else:
            flag = _RENAMED.get(word, word)
            value = re.sub(r"^(\w+):", r"\1=", value) if flag == "--env" else value  # dmlc's NAME:VALUE
            ours.setdefault(flag, []).append(_launcher(value) if flag == "--on" else value)
    if ranks:
        on = ours.get("--on", ["ssh" if "--hosts" in ours else "local"])[-1]
        is_one_each = launchers()[on].counts_machines and "--nodes" not in ours
        placed = ["--nodes", ranks] if is_one_each else ["--set", f"ranks={ranks}"]
        notes.append(f"{ranks} workers become as many ranks" + ", one per machine" * is_one_each)
    command = rest[1:] if rest[:1] == ["--"] else rest
    first, others = (
        [word for flag in flags for value in ours[flag] for word in (flag, value)]
        for flags in ([flag for flag in _FIRST if flag in ours], [flag for flag in ours if flag not in _FIRST])
    )
    argv = (*first, *placed, *others, *switches, *(["--", *command] if command else []))
    return LaunchCommand(argv=argv, notes=tuple(notes))


def _launcher(name: str) -> str:
    if name in _GONE and not any(name in (known, *launcher.names) for known, launcher in launchers().items()):
        raise InputError(f"{name} is not supported; Slurm comes nearest: choose {', '.join(launchers())}")
    return launcher_name(name)
