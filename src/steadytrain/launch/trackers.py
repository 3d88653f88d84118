"""Flags of MXNet's ``launch.py`` and dmlc's trackers: each is mapped to ours, left out with a reason, or refused.

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
SWITCHES = ("--dry-run", "--json", "--help", "-h")

_NO_SERVERS = "ranks exchange gradients directly, and --engine async has one server"
_PRINTED = "the output is the log; the run's event log is in its folder"
_JAVA = "it belongs to the tracker's Java client"
_SHIPPED = "files are not shipped: --sync copies the working directory; put other files into images or on shared disks"

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
    **dict.fromkeys(
        ("-s", "--num-servers", "--server-nodes", "--slurm-server-nodes", "--env-server", "--server-cores"), _NO_SERVERS
    ),
    **dict.fromkeys(("--server-memory", "--kube-server-image", "--kube-server-template"), _NO_SERVERS),
    **dict.fromkeys(("--log-level", "--log-file", "--logdir", "--sge-log-dir"), _PRINTED),
    **dict.fromkeys(
        ("--hdfs-tempdir", "--tempdir", "--yarn-app-classpath", "--app-classpath", "--yarn-app-dir"), _JAVA
    ),
    **dict.fromkeys(("--ship-libcxx", "--libhdfs-opts", "--name-node", "--yarn-scripts", "-hb", "-Xmx128m"), _JAVA),
    **dict.fromkeys(("--auto-file-cache", "-ac", "--files", "-f", "--archives"), _SHIPPED),
}
_LEFT_OUT_SWITCHES = {"--p3": "it chose how servers send; " + _NO_SERVERS}
_REFUSED = {
    "--mesos-master": "Mesos is not supported: use kubernetes, slurm, mpi or ssh",
    "--kube-worker-template": "write the manifests with --dry-run -o FOLDER, edit them, and run kubectl apply",
}
_MEMORY = ("--worker-memory", "-mem")
_PLACED = {
    **dict.fromkeys(("-n", "--num-workers", "--nworker"), "ranks"),
    **dict.fromkeys(("--launcher", "--cluster"), "launcher"),
    "--slurm-worker-nodes": "slurm nodes",
    **dict.fromkeys(("-q", "--queue"), "queue"),
    "--max-attempts": "attempts",
}
"""Old flags whose new form depends on the launcher."""
_WITH_VALUE = {*VALUES, *_RENAMED, *_SET, *_LEFT_OUT, *_REFUSED, *_MEMORY, *_PLACED}


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """Flags of ``steady launch``, ``--``, and the command; ``notes`` say what became of the old flags."""

    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()


def translate(argv: Sequence[str]) -> LaunchCommand:
    """Translate old flags, which may be mixed with new ones; the command begins after ``--``, or at the first non-flag.

    Raises:
        InputError: an old flag that has no equivalent, or a value that is missing.
    """
    new: list[str] = []
    notes: list[str] = []
    old: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word, equals, value = rest.pop(0).partition("=")
        if word in SWITCHES:
            new.append(f"{word}{equals}{value}")
        elif word in _LEFT_OUT_SWITCHES:
            notes.append(f"{word} is ignored: {_LEFT_OUT_SWITCHES[word]}")
        elif word not in _WITH_VALUE:  # unknown: the command line says so, with what is near
            new.append(f"{word}{equals}{value}")
        else:
            if not equals and not rest:
                raise InputError(f"{word} needs a value")
            value = value if equals else rest.pop(0)
            if word in _REFUSED:
                raise InputError(f"{word} {value}: {_REFUSED[word]}")
            if word in _PLACED:
                old[_PLACED[word]] = value
            elif word in _SET:
                new += ["--set", f"{_SET[word]}={value}"]
            elif word in _MEMORY:
                new += ["--set", f"memory_gb={_gigabytes(word, value)}"]
            elif word not in _LEFT_OUT:
                name = _RENAMED.get(word, word)
                value = launcher_name(value) if name == "--on" else value
                new += [name, re.sub(r"^(\w+):", r"\1=", value) if name == "--env" else value]  # dmlc's NAME:VALUE
                if name in ("--on", "--nodes", "--hosts"):
                    old[name] = value
            elif value != "0":
                notes.append(f"{word} {value} is ignored: {_LEFT_OUT[word]}")
    command = rest[1:] if rest[:1] == ["--"] else rest
    first = _placed(old, new, notes)
    return LaunchCommand(argv=(*first, *new, *(["--", *command] if command else [])), notes=tuple(notes))


def _placed(old: dict[str, str], new: list[str], notes: list[str]) -> list[str]:
    """Return the flags that depend on the launcher, which itself comes first."""
    first: list[str] = []
    launcher = old.get("launcher")
    if launcher in ("sge", "mesos") and launcher not in launchers():
        raise InputError(f"{launcher} is not supported; Slurm comes nearest: choose {', '.join(launchers())}")
    if launcher is not None:
        launcher = launcher_name(launcher)
        first += ["--on", launcher]
    on = old.get("--on") or launcher or ("ssh" if "--hosts" in old else "local")
    if "--hosts" in old:
        index = new.index("--hosts")
        first += [new.pop(index), new.pop(index)]
    if "slurm nodes" in old:
        first += ["--nodes", old["slurm nodes"]]
        notes.append(f"--slurm-worker-nodes {old['slurm nodes']} is --nodes")
    if "ranks" in old:
        is_one_each = launchers()[on].counts_machines and not {"--nodes", "slurm nodes"} & old.keys()
        first += ["--nodes", old["ranks"]] if is_one_each else ["--set", f"ranks={old['ranks']}"]
        notes.append(f"{old['ranks']} workers become as many ranks" + ", one per machine" * is_one_each)
    if "queue" in old:
        first += ["--set", f"{'slurm.partition' if on == 'slurm' else 'yarn.queue'}={old['queue']}"]
    if "attempts" in old:
        if not old["attempts"].isdigit():
            raise InputError(f"--max-attempts is {old['attempts']!r}; it must be a whole number")
        first += ["--set", f"restarts={max(0, int(old['attempts']) - 1)}"]
    return first


def _gigabytes(word: str, text: str) -> int:
    """Read ``2g``, ``512m`` or a number of megabytes; return gigabytes, rounded up."""
    match = re.fullmatch(r"(\d+)([gm]?)b?", text.lower())
    if match is None:
        raise InputError(f"{word} is {text!r}; it must be a size such as 2g, 512m or 1024 (megabytes)")
    number = int(match[1])
    return number if match[2] == "g" else -(-number // 1024)
