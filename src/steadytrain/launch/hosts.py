"""Hosts files, as MXNet's trackers and MPI read them, and how ranks are spread over hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.errors import InputError

_LINE = re.compile(
    r"(?:(?P<user>[A-Za-z_][\w.-]*)@)?"
    r"(?P<name>[A-Za-z0-9_][\w.-]*)"
    r"(?::(?P<port>\d+))?"
    r"(?P<rest>(?:\s+\w+\s*=\s*\d+)*)"
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine that ssh reaches, and how many ranks it takes (None: not said)."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host with its ranks: ``first`` to ``first + procs - 1``."""

    host: Host
    procs: int
    first: int


def read_hosts(text: str, where: str = "the hosts file") -> tuple[str, ...]:
    """The lines of a hosts file that name hosts; ``#`` begins a comment.

    >>> read_hosts("# two machines\\n10.0.0.1:2222\\n\\ngpu2 slots=4  # the big one\\n")
    ('10.0.0.1:2222', 'gpu2 slots=4')

    Raises:
        InputError: no host, one twice, or a line that is none, by its number.
    """
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        told = " ".join(line.partition("#")[0].split())
        if not told:
            continue
        try:
            parse_host(told)
        except InputError as error:
            raise InputError(f"{where}, line {number}: {error}") from None
        if told in found:
            raise InputError(f"{where}, line {number}: {told} is listed twice; say how many ranks it takes by slots=2")
        found.append(told)
    if not found:
        raise InputError(f"{where} lists no host: write one a line, such as gpu1 or 10.0.0.1:22 or gpu1 slots=2")
    return tuple(found)


def parse_host(line: str) -> Host:
    """One line of a hosts file. Raises InputError.

    >>> parse_host("me@gpu1:2222 slots=2")
    Host(name='gpu1', user='me', port=2222, slots=2)
    """
    if line.strip().startswith("["):
        raise InputError(f"{line!r} is an IPv6 address, which ranks cannot meet at: give the machine's name")
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise InputError(f"{line!r} is no host: write name, user@name, name:port or name slots=2")
    told = dict(re.findall(r"(\w+)\s*=\s*(\d+)", found["rest"]))
    unknown = told.keys() - {"slots", "max_slots", "max-slots"}
    port, slots = (None if number is None else int(number) for number in (found["port"], told.get("slots")))
    if unknown or (port is not None and not 1 <= port <= 65535) or slots == 0:
        raise InputError(f"{line!r} is no host: ports are 1 to 65535, and slots=N, from 1, is all that may follow")
    return Host(name=found["name"], user=found["user"], port=port, slots=slots)


def spread(hosts: Sequence[Host], procs: int | None, ranks: int | None) -> tuple[Machine, ...]:
    """Ranks on hosts: ``procs`` each, else as many as each has slots, or ``ranks`` in all as evenly as can be.

    >>> three = [Host(name=name) for name in "abc"]
    >>> [one.procs for one in spread(three, None, 5)], [one.procs for one in spread(three, None, 2)]
    ([2, 2, 1], [1, 1])
    """
    if ranks is None:
        each = [procs or host.slots or 1 for host in hosts]
    else:
        each = [ranks // len(hosts) + (place < ranks % len(hosts)) for place in range(len(hosts))]
    machines = zip(hosts, each, strict=True)
    return tuple(
        Machine(host=host, procs=count, first=sum(each[:place]))
        for place, (host, count) in enumerate(machines)
        if count
    )
