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
from dataclasses import dataclass, field
from typing import Literal

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError, did_you_mean

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
CORES_PER_GPU = 4
"""To decode images for a GPU, where nothing says how many: nearly every machine with GPUs has as many for each."""
_PORTS = range(20000, 30000)  # below those that systems give away by themselves
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE", re.IGNORECASE)


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value!r}; it must be {limit}")


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """Options of ``--on ssh``.

    Args:
        sync: copy the working directory into this folder of each machine, and work there; a relative one starts from
            the home folder. None: the machines see the same working directory.
        exclude: names or paths, with ``*`` and ``?``, that are not copied, beside those that never are.
        options: options for ssh itself, such as ``["-F", "cluster.conf"]``.
        tool: ``rsync``, or ``tar`` through ssh, which is also taken where rsync is missing.
    """

    sync: str | None = None
    exclude: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    tool: Literal["rsync", "tar"] = "rsync"


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """Options of ``--on mpi``.

    Args:
        kind: whose MPI it is: their options differ. Intel's takes those of MPICH.
        program: the command that starts the ranks; None: ``mpirun`` or ``mpiexec``.
        options: further options for it.
    """

    kind: Literal["openmpi", "mpich"] = "openmpi"
    program: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Options of ``--on slurm``.

    Args:
        partition, account, qos: as sbatch calls them.
        signal_seconds: how long before the time limit the ranks are asked to save; the job is then queued again.
        options: further options for sbatch, each a line ``#SBATCH`` of the script.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    signal_seconds: int = 120
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """Options of ``--on kubernetes``.

    Args:
        kind: an Indexed ``job``, whose pods are replaced one by one; a ``jobset``, whose pods start anew together (that
            needs JobSet's controller in the cluster); a ``trainjob`` of Kubeflow Trainer 2; or a ``rayjob`` of KubeRay,
            for the asynchronous engine.
        runtime: of a TrainJob: the ClusterTrainingRuntime by which Kubeflow starts it.
        namespace: None: the one that kubectl is set to.
        claim: a PersistentVolumeClaim for data and runs, seen by all pods under ``mount``.
        secret: a Secret that holds the variables given without a value.
        selector: labels of the machines to take.
    """

    kind: Literal["job", "jobset", "trainjob", "rayjob"] = "job"
    runtime: str = "torch-distributed"
    namespace: str | None = None
    claim: str | None = None
    mount: str = "/data"
    secret: str | None = None
    selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Options of ``--on yarn``: the queue to submit to."""

    queue: str = "default"


@dataclass(frozen=True, kw_only=True)
class Sky:
    """Options of ``--on sky``.

    Args:
        infra: where: ``aws/us-east-1``, ``gcp``, ``k8s``; None: the cheapest place that SkyPilot has access to.
        accelerators: GPUs of each machine by name and number, such as ``H100:8``.
        spot: take machines that may be taken away.
        setup: a shell command that installs steadytrain on each machine, where the image does not have it.
        workdir: folder of this machine that is copied to each, which is then the working directory.
        mounts: a folder of the machines -> the bucket that is seen there, such as ``s3://photos``.
    """

    infra: str | None = None
    accelerators: str | None = None
    spot: bool = False
    setup: str | None = None
    workdir: str | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)


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
        restarts: how often at most the job is started again after a failure, from the newest checkpoint.
        keep: start it again whenever it has saved because it was asked to stop (exit code 75), without limit.
        grace_seconds: how long ranks that are asked to stop may take to save.
        minutes: the longest time that the job may run.
        cpus, memory_gb, gpus: to request for each machine from a scheduler.
        image: of the container.
        inputs: paths that the command reads and machines must find; ``steady launch`` takes them from the command.
        outputs: paths that it writes, which must not be lost with a machine; as ``inputs``.
        mounted: folders that the machines see without this job's doing, such as those of the image.
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
    restarts: int = 0
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
    ssh: Ssh = field(default_factory=Ssh)
    mpi: Mpi = field(default_factory=Mpi)
    slurm: Slurm = field(default_factory=Slurm)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    yarn: Yarn = field(default_factory=Yarn)
    sky: Sky = field(default_factory=Sky)

    def __post_init__(self) -> None:
        check_types(self, "")
        for name in ("ssh", "mpi", "slurm", "kubernetes", "yarn", "sky"):
            check_types(getattr(self, name), name)
        object.__setattr__(self, "words", _program(self.words))
        object.__setattr__(self, "tasks", tuple(map(_program, self.tasks)))
        for name in ("at_once", "nodes", "least", "procs", "ranks", "minutes", "cpus", "memory_gb"):
            value = getattr(self, name)
            _require(value is None or 1 <= value <= 100_000, name, value, "1 to 100000")
        _require(self.gpus is None or 0 <= self.gpus <= 1024, "gpus", self.gpus, "0 to 1024 per machine")
        _require(self.port is None or 1024 <= self.port <= 65535, "port", self.port, "1024 to 65535")
        _require(0 <= self.restarts <= 1000, "restarts", self.restarts, "0 to 1000")
        _require(1 <= self.grace_seconds <= 86400, "grace_seconds", self.grace_seconds, "1 to 86400")
        is_name = re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name)
        _require(
            bool(is_name), "name", self.name, "at most 40 lower-case letters, digits and dashes, starting with a letter"
        )
        sync = self.ssh.sync
        _require(sync is None or (bool(sync.strip()) and "://" not in sync), "ssh.sync", sync, "a folder's name")
        seconds, options = self.slurm.signal_seconds, self.slurm.options
        _require(1 <= seconds <= 65535, "slurm.signal_seconds", seconds, "1 to 65535")
        _require(all("\n" not in word for word in options), "slurm.options", options, "a single line")
        mount = self.kubernetes.mount
        _require(mount.startswith("/"), "kubernetes.mount", mount, "a path that starts with /")
        _require(bool(self.kubernetes.runtime), "kubernetes.runtime", self.kubernetes.runtime, "the name of a runtime")
        for place, bucket in self.sky.mounts.items():
            _require(place.startswith("/"), "sky.mounts", place, "a path that starts with /")
            _require("://" in bucket, f"sky.mounts.{place}", bucket, "a bucket, such as s3://photos")
        for name, value in self.env.items():
            _require(bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)), "--env", name, "a variable's name")
            if value is not None and _SECRET.search(name):
                raise InputError(
                    f"--env {name}=...: a secret would be visible in files and process lists; set the variable here and"
                    f" use --env {name}, which passes it on unseen"
                )
        # These become lines of scripts, and words that must not look like options.
        lines = {"python": self.python, "folder": self.folder, "address": self.address, "image": self.image}
        lines |= {f"slurm.{name}": getattr(self.slurm, name) for name in ("partition", "account", "qos")}
        lines |= {"ssh.sync": self.ssh.sync, "mpi.program": self.mpi.program}
        lines |= {f"sky.{name}": getattr(self.sky, name) for name in ("infra", "accelerators", "workdir")}
        for name, value in lines.items():
            is_line = value is None or (bool(value) and not value.startswith("-") and not re.search(r"[\0\n\r]", value))
            _require(is_line, name, value, "one line that does not begin with a dash")
        for words in (self.words, *self.tasks):
            _require(not any("\0" in word for word in words), "the command", words, "without NUL characters")
        if self.procs and self.ranks:
            raise InputError(
                f"procs={self.procs} and ranks={self.ranks}: set processes per machine or the total, not both"
            )
        if self.least and self.nodes and self.least > self.nodes:
            raise InputError(f"--nodes {self.least}:{self.nodes}: put the smaller number first")
        for line in self.hosts:
            parse_host(line)

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
        """Cores to ask a scheduler for on each machine; None: leave it to the scheduler."""
        return self.cpus or (CORES_PER_GPU * self.gpus if self.gpus else None)

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
        text = "\0".join((self.name, *self.words))
        return self.port or _PORTS[zlib.crc32(text.encode()) % len(_PORTS)]


def is_python(word: str) -> bool:
    """Return whether the first word of a command is a Python interpreter, which runs the user's own program.

    >>> is_python("python3"), is_python("train")
    (True, False)
    """
    return re.fullmatch(r"python[0-9.]*", word) is not None


def _program(words: tuple[str, ...]) -> tuple[str, ...]:
    words = words[1:] if words[:1] == ("steady",) else words
    if not words:
        raise InputError("no command to start: put it after two dashes, such as -- train data.rec --run runs/a")
    if is_python(words[0]):
        if len(words) == 1:
            raise InputError(f"{words[0]} needs a program, such as -- python train.py")
    elif words[0] not in VERBS:
        raise InputError(
            f"cannot launch {words[0]!r}: choose {', '.join(VERBS)}, or python and your program."
            f"{did_you_mean(words[0], VERBS)}"
        )
    elif "--procs" in words or any(word.startswith("--procs=") for word in words):
        raise InputError("--procs is after the two dashes: put it before them, where it means processes per machine")
    return words
