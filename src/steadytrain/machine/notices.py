"""Notices that this machine is about to be taken away: by a file, or by the metadata service of a cloud.

One thread asks, from the first update to the end of an attempt, and only where the user said so.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias

from steadytrain.config.parts import NOTICE_FILE, is_notice_source
from steadytrain.errors import InputError
from steadytrain.format import duration
from steadytrain.machine.procfs import read
from steadytrain.machine.web import origin_of

VARIABLE, METADATA = "STEADYTRAIN_NOTICES", "STEADYTRAIN_METADATA"
"""Environment variables: what to ask where the recipe says nothing; another address of the service."""

SIGNAL = "NOTICE"
"""The word by which the loop is asked to stop, as by the name of a signal."""

POLL_SECONDS = 5.0
ERROR_SECONDS = 60.0
"""Seconds between two questions, as AWS and Google advise; and after one without an answer."""

LEAST_LEAD = 180.0
"""Seconds before the machine goes in which the run stops: a notice of 15 minutes does not cost 15 minutes."""

_LEAD_SAVES, _LEAD_MORE = 2, 60.0
_LARGEST_ANSWER = 1 << 20


@dataclass(frozen=True, kw_only=True)
class MachineNotice:
    """Words about what is to happen to this machine.

    Args:
        id: tells it from others of its source.
        what: in words, with its source.
        deadline: when the machine goes, seconds since 1970; None: nobody said.
        is_certain: it goes, or restarts; else it may go, so a checkpoint is worth its time.
    """

    id: str
    what: str
    deadline: float | None = None
    is_certain: bool = True


Ask: TypeAlias = Callable[[], list[MachineNotice]]
"""Return the notices that there are now. Raises OSError, ``http.client.HTTPException`` or ValueError."""


def _time(text: object) -> float | None:
    """Read a moment in ISO 8601, or as HTTP writes it; None for what is none.

    >>> _time("2026-11-26T12:00:00Z") == _time("Thu, 26 Nov 2026 12:00:00 GMT"), _time("soon"), _time("")
    (True, None, None)
    """
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            moment = parse(str(text))
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return None


def _read_aws(path: str, text: str, machine: str) -> Iterator[MachineNotice]:
    """Read that a spot machine is taken away, or that AWS advises to leave it."""
    answer = json.loads(text)
    if path.endswith("rebalance"):
        what = "aws: this machine has a higher risk than others to be taken away (rebalance recommendation)"
        yield MachineNotice(id=f"rebalance {answer.get('noticeTime')}", what=what, is_certain=False)
    else:
        verb = {"stop": "stopped", "hibernate": "hibernated"}.get(str(answer.get("action")), "terminated")
        when = str(answer.get("time"))
        yield MachineNotice(id=f"spot {when}", what=f"aws: this machine is {verb}", deadline=_time(when))


def _read_gcp(path: str, text: str, machine: str) -> Iterator[MachineNotice]:
    """Read that a machine is preempted, or stopped for maintenance of its host."""
    if text == "TRUE":
        deadline = time.time() + CLOUDS["gcp"].warning_seconds
        yield MachineNotice(id="preempted", what="gcp: this machine is preempted", deadline=deadline)
    elif text.startswith(("TERMINATE", "SHUTDOWN")):
        yield MachineNotice(id=text, what="gcp: this machine is stopped for maintenance of its host")


def _read_azure(path: str, text: str, machine: str) -> Iterator[MachineNotice]:
    """Read scheduled events of this machine; those of its neighbours are in the same list."""
    events = json.loads(text).get("Events", ())
    for event in events if isinstance(events, list) else ():
        if not isinstance(event, dict) or machine not in (event.get("Resources") or ()):
            continue
        status, verb = event.get("EventStatus"), _AZURE.get(str(event.get("EventType")))
        if verb is not None and status not in ("Completed", "Canceled"):
            deadline = _time(event.get("NotBefore")) or (time.time() if status == "Started" else None)
            yield MachineNotice(id=str(event.get("EventId")), what=f"azure: this machine is {verb}", deadline=deadline)


_AZURE = {"Preempt": "taken away", "Terminate": "deleted", "Reboot": "restarted", "Redeploy": "moved and restarted"}


class Cloud(NamedTuple):
    """A cloud's metadata service: its address, the header of each question, paths, and what reads their answers.

    ``warning_seconds``: from a notice to the end of a spot machine, as documented. ``name``: path of the machine's own
    name, where the reader needs it. An empty value in the header is a token, which is asked for. ``timeout``: seconds
    for the service to answer; Azure first starts it.
    """

    base: str
    header: tuple[str, str]
    paths: tuple[str, ...]
    read: Callable[[str, str, str], Iterator[MachineNotice]]
    warning_seconds: float
    name: str = ""
    timeout: float = 2.0


CLOUDS = {
    "aws": Cloud(
        "http://169.254.169.254",
        ("X-aws-ec2-metadata-token", ""),
        ("/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"),
        _read_aws,
        warning_seconds=120.0,
    ),
    "gcp": Cloud(
        "http://metadata.google.internal",
        ("Metadata-Flavor", "Google"),
        (  # the first is answered at once when it changes
            "/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec={poll:.0f}",
            "/computeMetadata/v1/instance/maintenance-event",
        ),
        _read_gcp,
        warning_seconds=30.0,
    ),
    "azure": Cloud(
        "http://169.254.169.254",
        ("Metadata", "true"),
        ("/metadata/scheduledevents?api-version=2020-07-01",),
        _read_azure,
        warning_seconds=30.0,
        name="/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        timeout=120.0,
    ),
}


class MetadataService:
    """The metadata service of this machine, which is spoken to without proxies and without following redirects.

    Args:
        cloud: a key of :data:`CLOUDS`.
        base: an address. Raises InputError if it is none.
    """

    def __init__(self, cloud: str, base: str) -> None:
        self.cloud, self.base = CLOUDS[cloud], base.rstrip("/")
        origin = origin_of(self.base)
        if origin is None or not self.base.startswith("http://"):
            raise InputError(f"{METADATA} is {base!r}; it must be an address, such as http://127.0.0.1:8080")
        self._header, self._machine = self.cloud.header, ""
        self._connection = http.client.HTTPConnection(*origin)
        self._is_closed = False

    def ask(self) -> list[MachineNotice]:
        """Return the notices that there are now; raises what :data:`Ask` does."""
        if self.cloud.name and not self._machine:
            self._machine = self._read(self.cloud.name) or ""
        notices: list[MachineNotice] = []
        for path in self.cloud.paths:
            if (text := self._read(path.format(poll=POLL_SECONDS))) is not None:
                try:
                    notices += self.cloud.read(path, text, self._machine)
                except (AttributeError, RecursionError) as error:  # JSON, but no table
                    raise ValueError(f"the answer is {text[:60]!r}") from error
        return notices

    def _read(self, path: str) -> str | None:
        """Return an answer's text, None for 404; a token that is missing or has run out is asked for."""
        for _ in range(2):
            if not self._header[1]:
                wanted = ("X-aws-ec2-metadata-token-ttl-seconds", "21600")
                status, token = self.request("/latest/api/token", wanted, method="PUT")
                if status != 200:
                    raise OSError(f"it gives no token (status {status})")
                self._header = (self._header[0], token)
            status, text = self.request(path, self._header)
            if status != 401:
                break
            self._header = self.cloud.header
        if status not in (200, 404):
            raise OSError(f"{path.partition('?')[0]}: status {status}")
        return text.strip() if status == 200 else None

    def request(self, path: str, header: tuple[str, str], *, method: str = "GET") -> tuple[int, str]:
        """Return the status and the text of an answer; raises what :data:`Ask` does."""
        if self._is_closed:
            raise OSError("closed")
        self._connection.timeout = POLL_SECONDS + self.cloud.timeout
        with contextlib.closing(self._connection) as connection:
            connection.request(method, path, headers=dict([header]))
            answer = connection.getresponse()
            return answer.status, answer.read(_LARGEST_ANSWER).decode("utf-8", "replace")

    def close(self) -> None:
        """End the question that is under way, from another thread."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            if self._connection.sock is not None:
                self._connection.sock.shutdown(socket.SHUT_RDWR)


def ask_file(path: Path, since: float) -> Ask:
    """Ask whether there is a file that was written after ``since``; it may hold the seconds left, or the moment."""

    def ask() -> list[MachineNotice]:
        try:
            written = path.stat().st_mtime
            text = path.open("rb").read(100).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return []
        if written < since:
            return []
        deadline = _time(text)
        with contextlib.suppress(ValueError):
            deadline = written + min(max(float(text), 0.0), 1e9)
        what = f"{path}: this machine is to be given up"
        return [MachineNotice(id=f"file {written}", what=what, deadline=deadline)]

    return ask


def cloud_of(root: Path = Path("/")) -> str | None:
    """Return whose machine this is, as its DMI tables say it; None where they name none of the three clouds."""
    names = ("sys_vendor", "bios_vendor", "bios_version", "product_name", "chassis_asset_tag")
    vendor, bios, version, product, tag = (read(root / "sys/class/dmi/id" / name) or "" for name in names)
    if "Amazon EC2" in (vendor, bios) or "amazon" in version:
        return "aws"
    if vendor == "Google" or product == "Google Compute Engine":
        return "gcp"
    if tag == "7783-7084-3265-9085-8269-3286-77":  # Azure's, not any Hyper-V's
        return "azure"
    return None


class NoticeWatch:
    """The newest notice, as the thread of :func:`watching_notices` learns it.

    Attributes:
        notice: by which the run is to stop now; None: none.
        wants_save: a checkpoint is worth its time now; whoever takes one sets it back.
    """

    def __init__(self, say: Callable[[str], None], save_seconds: Callable[[], float]) -> None:
        self.notice: MachineNotice | None = None
        self.wants_save = False
        self._say, self._save_seconds = say, save_seconds
        self._seen: set[str] = set()
        self._over = threading.Event()

    def take(self, notices: list[MachineNotice], now: float) -> None:
        """Take in what a source says at a moment."""
        lead = max(LEAST_LEAD, _LEAD_SAVES * self._save_seconds() + _LEAD_MORE)
        for notice in notices:
            is_new, left = notice.id not in self._seen, _left(notice, now)
            self._seen.add(notice.id)
            if notice.is_certain and (left is None or left <= lead):
                self._say(stop_reason(notice, now, self._save_seconds()))
                self.notice = notice
                return
            if is_new and notice.is_certain:
                self._say(f"{notice.what} in {duration(left)}: the run continues until {duration(lead)} before")
            elif is_new:
                self.wants_save = True
                self._say(f"{notice.what}: a checkpoint is written now, and the run continues")

    def run(self, ask: Ask, source: str, service: MetadataService | None) -> None:
        """Ask until a notice ends the run, or :meth:`close`."""
        is_cost_told, is_failing = False, False
        warning = 0.0 if service is None else service.cloud.warning_seconds
        while not self._over.is_set() and self.notice is None:
            began, pause = time.monotonic(), POLL_SECONDS
            try:
                self.take(ask(), time.time())
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not is_failing and not self._over.is_set():
                    place = source if service is None else f"{source} at {service.base}"
                    self._say(
                        f"no notices from {place} ({error}): if this machine is taken away, there is no warning; it is"
                        f" asked again every {ERROR_SECONDS:.0f} s"
                    )
                is_failing, pause = True, ERROR_SECONDS
            else:
                is_failing = False
            if warning and not is_cost_told and self._save_seconds() > warning:
                is_cost_told = True
                self._say(
                    f"a checkpoint takes {duration(self._save_seconds())}, and {source} warns {warning:.0f} s before it"
                    " takes a machine away: what is done since the newest checkpoint would be lost; put the run's"
                    " folder on a faster disk"
                )
            self._over.wait(max(0.0, began + pause - time.monotonic()))  # a service may have waited for a change

    def close(self) -> None:
        """Let the thread end."""
        self._over.set()


def stop_reason(notice: MachineNotice, now: float, save_seconds: float) -> str:
    """Say that a notice ends the run, when the machine goes, and whether a checkpoint fits in before.

    >>> notice = MachineNotice(id="a", what="aws: this machine is terminated", deadline=120.0)
    >>> stop_reason(notice, 0.0, 1.5)
    'aws: this machine is terminated in 120 s: saving and stopping (a checkpoint takes 1.50 s)'
    """
    left = _left(notice, now)
    when = "" if left is None else f" in {left:.0f} s" if left > 0 else " now"
    if not save_seconds:
        fits = "how long a checkpoint takes is not known yet"
    elif left is not None and save_seconds >= left:
        fits = (
            f"a checkpoint takes {duration(save_seconds)}: it may not be whole in time, and the newest whole one counts"
        )
    else:
        fits = f"a checkpoint takes {duration(save_seconds)}"
    return f"{notice.what}{when}: saving and stopping ({fits})"


def _left(notice: MachineNotice, now: float) -> float | None:
    return None if notice.deadline is None else max(0.0, notice.deadline - now)


@contextmanager
def watching_notices(
    source: str | None,
    *,
    say: Callable[[str], None],
    save_seconds: Callable[[], float],
    began: float,
    root: Path = Path("/"),
) -> Iterator[NoticeWatch]:
    """Ask a source in a thread until the block is left.

    Args:
        source: ``aws``, ``gcp``, ``azure``, ``auto`` (what this machine's DMI tables name) or ``file:PATH``; None: what
            the variable STEADYTRAIN_NOTICES says, and if it says nothing, nothing is asked.
        say: takes lines for the user, in that thread.
        save_seconds: how long a checkpoint takes; 0: not known.
        began: when the process started, seconds since 1970: an older file is no notice.

    Raises:
        InputError: an environment variable holds no source, or no address.
    """
    watch = NoticeWatch(say, save_seconds)
    source = source or os.environ.get(VARIABLE) or None
    if source is not None and not is_notice_source(source):
        raise InputError(f"{VARIABLE} is {source!r}; it must be aws, gcp, azure, auto or file:PATH")
    if source == "auto":
        source = cloud_of(root)
        if source is None:
            say("notices: auto: this machine's DMI tables name none of aws, gcp and azure: nothing is asked")
    if source is None:
        yield watch
        return
    service: MetadataService | None = None
    if source.startswith(NOTICE_FILE):
        path = Path(source.removeprefix(NOTICE_FILE)).absolute()
        ask, place = ask_file(path, began), f"the file {path}"
    else:
        service = MetadataService(source, os.environ.get(METADATA) or CLOUDS[source].base)
        ask, place = service.ask, f"{source} at {service.base}"
    say(f"notices: {place} is asked every {POLL_SECONDS:.0f} s whether this machine is taken away")
    thread = threading.Thread(target=watch.run, args=(ask, source, service), name="steady-notices", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.close()
        while thread.is_alive():
            if service is not None:
                service.close()
            thread.join(0.1)  # it may just have made another connection
