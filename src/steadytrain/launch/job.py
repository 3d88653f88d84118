"""Jobs: the command to start and the machines to start it on, as frozen data that is validated when it is made.

>>> job = Job(words=("train", "cats.rec", "--run", "runs/a"), hosts=("gpu1 slots=2", "gpu2"))
>>> [(machine.host.name, machine.procs, machine.first) for machine in job.machines], job.size
([('gpu1', 2, 0), ('gpu2', 1, 2)], 3)
>>> job.program
('-P', '-m', 'steadytrain', 'train', 'cats.rec', '--run', 'runs/a')
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError, did_you_mean

T = TypeVar("T")

_LINE = re.compile(
    r"(?:(?P<user>[A-Za-z_][\w.-]*)@)?"
    r"(?P<name>[A-Za-z0-9_][\w.-]*)"
    r"(?::(?P<port>\d+))?"
    r"(?P<rest>(?:\s+\w+\s*=\s*\d+)*)"
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine that ssh reaches; ``slots``: how many ranks it takes, None if the hosts file does not say."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host and the ranks that run on it: ``first`` to ``first + procs - 1``."""

    host: Host
    procs: int
    first: int


def read_hosts(text: str, where: str = "the hosts file") -> tuple[str, ...]:
    """Read the lines of a hosts file that name hosts; ``#`` begins a comment.

    >>> read_hosts("# two machines\\n10.0.0.1:2222\\n\\ngpu2 slots=4  # the big one\\n")
    ('10.0.0.1:2222', 'gpu2 slots=4')

    Raises:
        InputError: the file names no host, or one twice, or a line is not a host; the message has its number.
    """
    entries: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = " ".join(line.partition("#")[0].split())
        if not entry:
            continue
        try:
            parse_host(entry)
        except InputError as error:
            raise InputError(f"{where}, line {number}: {error}") from None
        name = entry.split()[0]
        if any(name == other.split()[0] for other in entries):
            raise InputError(f"{where}, line {number}: {name} is listed twice; list it once, with slots=N for N ranks")
        entries.append(entry)
    if not entries:
        raise InputError(f"{where} lists no hosts: write one per line, such as gpu1 or 10.0.0.1:22 or gpu1 slots=2")
    return tuple(entries)


def parse_host(line: str) -> Host:
    """Parse one line of a hosts file. Raises InputError.

    >>> parse_host("me@gpu1:2222 slots=2")
    Host(name='gpu1', user='me', port=2222, slots=2)
    """
    if line.strip().startswith("["):
        raise InputError(f"{line!r} is an IPv6 address, which is not supported: use the machine's name")
    match = _LINE.fullmatch(line.strip())
    if match is None:
        raise InputError(f"{line!r} is not a host: write name, user@name, name:port or name slots=2")
    options = dict(re.findall(r"(\w+)\s*=\s*(\d+)", match["rest"]))
    unknown = options.keys() - {"slots", "max_slots", "max-slots"}
    port, slots = (None if number is None else int(number) for number in (match["port"], options.get("slots")))
    if unknown or (port is not None and not 1 <= port <= 65535) or slots == 0:
        raise InputError(f"{line!r} is not a host: ports are 1 to 65535, and only slots=N (1 or more) may follow")
    return Host(name=match["name"], user=match["user"], port=port, slots=slots)


def spread(hosts: Sequence[Host], procs: int | None, ranks: int | None) -> tuple[Machine, ...]:
    """Spread ranks over hosts: ``procs`` each, else each host's slots, or ``ranks`` in all as evenly as possible.

    >>> three = [Host(name=name) for name in "abc"]
    >>> [machine.procs for machine in spread(three, None, 5)], [machine.procs for machine in spread(three, None, 2)]
    ([2, 2, 1], [1, 1])
    """
    if ranks is None:
        counts = [procs or host.slots or 1 for host in hosts]
    else:
        counts = [ranks // len(hosts) + (index < ranks % len(hosts)) for index in range(len(hosts))]
    return tuple(
        Machine(host=host, procs=counts[index], first=sum(counts[:index]))
        for index, host in enumerate(hosts)
        if counts[index]
    )


VERBS = ("train", "finetune", "resume", "bandwidth", "pack")
CORES_PER_GPU, CORES_OF_RECORDS = 7, 4
"""Cores to ask for each GPU where nothing says how many: for 5,654 images/s (ResNet-50, compiled, on an H100), of which
a core decodes 850, or 2,550 of a ``.rec``. That is 6.7, or 2.2 and some for all else (docs/gpu.md)."""
RESTARTS = 3
_PORTS = range(20000, 30000)  # below those that systems give away by themselves
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE", re.IGNORECASE)


def require(holds: bool, name: str, value: object, limit: str) -> None:
    """Raise InputError with a value and its limit, unless it holds."""
    if not holds:
        raise InputError(f"{name} is {value!r}; it must be {limit}")


def options_name(kind: type[Any]) -> str:
    """Return what ``--set`` and job files call a kind of options: its name in lower case."""
    return kind.__name__.lower()


def require_lines(of: str, **values: str | None) -> None:
    """Refuse values, by name, that cannot be a line of a script, or a word that does not look like an option.

    Args:
        of: the launcher whose options they are; empty: the job's own.
        values: None is none.

    Raises:
        InputError: names the first.
    """
    for name, value in values.items():
        is_line = value is None or (bool(value) and not value.startswith("-") and not re.search(r"[\0\n\r]", value))
        require(is_line, f"{of}.{name}" if of else name, value, "one line that does not begin with a dash")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The command to start, and the machines to start it on.

    Args:
        words: the command: a verb of steady with its arguments, or ``python`` and a program that reads its rank from
            the environment.
        tasks: in place of ``words``, the command of each task of an array of independent jobs.
        at_once: tasks of the array that may run at a time; None: as the scheduler likes.
        nodes: machines; None: as many as there are hosts, or one.
        least: go on while so many machines are left (and take in those that come back); None: all are needed.
        procs: processes on each machine; None: a host's slots, or one.
        ranks: processes in all instead, spread over the machines.
        hosts: ``name``, ``user@name:port``, ``name slots=2``: one each.
        env: variables of all ranks. None: the value comes from the environment of ``steady launch`` and is written to
            no file and no command line.
        name: of the job: letters, digits and dashes.
        python: the interpreter there.
        folder: working directory of the ranks; None: the launcher's own choice.
        address: of the first machine, as all others reach it; None: its name in ``hosts``.
        port: of rank 0, to which all ranks connect; None: a number derived from the job.
        restarts: how often at most the job is started again after a failure, from the newest checkpoint; None: 3, and 0
            for a program of the user's own.
        keep: start it again whenever it has saved because it was asked to stop (exit code 75), without limit.
        grace_seconds: how long ranks that are asked to stop may take to save.
        minutes: the longest time that the job may run.
        cpus, memory_gb, gpus: to request for each machine from a scheduler.
        image: of the container.
        inputs: paths that the command reads and machines must find; ``steady launch`` takes them from the command.
        outputs: paths that it writes, which must not be lost with a machine; as ``inputs``.
        mounted: folders that the machines see without this job's doing, such as those of the image.
        options: options of launchers, at most one instance of each kind, such as ``Slurm(partition="gpu")``.
    """

    words: tuple[str, ...]
    tasks: tuple[tuple[str, ...], ...] = ()
    at_once: int | None = None
    nodes: int | None = None
    least: int | None = None
    procs: int | None = None
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    name: str = "steadytrain"
    python: str = "python3"
    folder: str | None = None
    address: str | None = None
    port: int | None = None
    restarts: int | None = None
    keep: bool = False
    grace_seconds: int = 60
    minutes: int | None = None
    cpus: int | None = None
    memory_gb: int | None = None
    gpus: int | None = None
    image: str | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    mounted: tuple[str, ...] = ()
    options: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "")
        kinds = [type(options) for options in self.options]
        is_sound = all(map(is_dataclass, kinds)) and len({*kinds}) == len(kinds)
        require(is_sound, "options", self.options, "options of launchers, one of each kind")
        for options in self.options:
            check_types(options, options_name(type(options)))
        object.__setattr__(self, "words", _program(self.words))
        object.__setattr__(self, "tasks", tuple(map(_program, self.tasks)))
        for name in ("at_once", "nodes", "least", "procs", "ranks", "minutes", "cpus", "memory_gb"):
            value = getattr(self, name)
            require(value is None or 1 <= value <= 100_000, name, value, "1 to 100000")
        require(self.gpus is None or 0 <= self.gpus <= 1024, "gpus", self.gpus, "0 to 1024 per machine")
        require(self.port is None or 1024 <= self.port <= 65535, "port", self.port, "1024 to 65535")
        require(0 <= self.num_restarts <= 1000, "restarts", self.restarts, "0 to 1000")
        require(1 <= self.grace_seconds <= 86400, "grace_seconds", self.grace_seconds, "1 to 86400")
        is_name = re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name)
        require(
            bool(is_name), "name", self.name, "at most 40 lower-case letters, digits and dashes, starting with a letter"
        )
        for name, value in self.env.items():
            require(bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)), "--env", name, "a variable's name")
            if value is not None and _SECRET.search(name):
                raise InputError(
                    f"--env {name}=...: a secret would be visible in files and process lists; set the variable here and"
                    f" use --env {name}, which passes it on unseen"
                )
        require_lines("", python=self.python, folder=self.folder, address=self.address, image=self.image)
        for words in (self.words, *self.tasks):
            require(not any("\0" in word for word in words), "the command", words, "without NUL characters")
        if self.procs and self.ranks:
            raise InputError(
                f"procs={self.procs} and ranks={self.ranks}: set processes per machine or the total, not both"
            )
        if self.least and self.nodes and self.least > self.nodes:
            raise InputError(f"--nodes {self.least}:{self.nodes}: put the smaller number first")
        for line in self.hosts:
            parse_host(line)

    def options_of(self, kind: type[T]) -> T:
        """Return the job's options of a kind; the defaults where it has none."""
        return next((options for options in self.options if isinstance(options, kind)), None) or kind()

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines of ``hosts`` that are used, with the ranks of each. Raises InputError if there are too few."""
        hosts = [parse_host(line) for line in self.hosts]
        if self.nodes is not None and self.nodes > len(hosts):
            raise InputError(f"--nodes is {self.nodes}, and {len(hosts)} hosts are listed: list more, or use fewer")
        return spread(hosts[: self.nodes or len(hosts)], self.procs, self.ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of machines, and of processes on each. Raises InputError if these cannot all be the same."""
        nodes = self.nodes or len(self.hosts) or 1
        if self.ranks is None:
            return nodes, self.procs or 1
        if self.ranks % nodes:
            raise InputError(f"{self.ranks} ranks cannot be spread evenly over {nodes} machines: change --nodes")
        return nodes, self.ranks // nodes

    @property
    def size(self) -> int:
        """Processes in all."""
        if self.hosts:
            return sum(machine.procs for machine in self.machines)
        nodes, procs = self.shape
        return nodes * procs

    @property
    def cores(self) -> int | None:
        """Cores to ask for on each machine, by the first path of the command; None: leave it to the scheduler."""
        data = next((word for word in (*self.inputs, *self.words[1:]) if not word.startswith("-")), "")
        return self.cpus or (self.gpus or 0) * (CORES_OF_RECORDS if data.endswith(".rec") else CORES_PER_GPU) or None

    @property
    def num_restarts(self) -> int:
        """Starts again after a failure, as ``restarts`` says."""
        return (0 if is_python(self.words[0]) else RESTARTS) if self.restarts is None else self.restarts

    @property
    def program(self) -> tuple[str, ...]:
        """The arguments of the Python interpreter that make it a rank."""
        return self.words[1:] if is_python(self.words[0]) else ("-P", "-m", "steadytrain", *self.words)

    @property
    def is_independent(self) -> bool:
        """Return whether the other ranks go on without a rank that is lost, and do its work."""
        return self.words[0] == "pack"

    @property
    def meeting_port(self) -> int:
        """``port``, or a number derived from the job, so that two jobs rarely share one."""
        return self.port or _PORTS[zlib.crc32("\0".join((self.name, *self.words)).encode()) % len(_PORTS)]


def is_python(word: str) -> bool:
    """Return whether the first word of a command is a Python interpreter, which runs the user's own program.

    >>> is_python("python3"), is_python("train")
    (True, False)
    """
    return re.fullmatch(r"python[0-9.]*", word) is not None


def _unknown_flag(word: str, following: str = "") -> str:
    """Say what to write instead of a flag that launch does not have: a value of the job is set by ``--set``."""
    flag, _, value = word.partition("=")
    value = value or (following if not following.startswith("-") else "")
    key = flag.lstrip("-").replace("-", "_")
    if key in (each.name for each in fields(Job)):
        return f"steady launch has no flag {flag}: write --set {key}={value or 'VALUE'}"
    return (
        f"steady launch has no flag {flag}: put flags of the command after the two dashes, and set values of the"
        " launcher as in --set slurm.partition=gpu"
    )


def _program(words: tuple[str, ...]) -> tuple[str, ...]:
    words = words[1:] if words[:1] == ("steady",) else words
    if not words:
        raise InputError("no command to start: put it after two dashes, such as -- train data.rec --run runs/a")
    if is_python(words[0]):
        if len(words) == 1:
            raise InputError(f"{words[0]} needs a program, such as -- python train.py")
    elif words[0].startswith("-"):
        raise InputError(_unknown_flag(*words[:2]))
    elif words[0] not in VERBS:
        raise InputError(
            f"cannot launch {words[0]!r}: choose {', '.join(VERBS)}, or python and your program."
            f"{did_you_mean(words[0], VERBS)}"
        )
    elif "--procs" in words or any(word.startswith("--procs=") for word in words):
        raise InputError("--procs is after the two dashes: put it before them, where it means processes per machine")
    return words
