"""Heartbeat: each rank tells every second that it lives and where it is, and watches the next rank.

A rank that was killed, or whose machine lost its power or its network, sends no farewell: those that wait for its
gradients would wait for half an hour. Here its beats stop, the rank before it notices, and every rank is told which one
it was. All of it goes through the rendezvous store, not through the collective that hangs. The store itself may be on a
machine that is gone, where every request hangs: a second thread watches whether its answers still come.

Beats also stop while native code holds the interpreter's lock, as for creating the context of a GPU. So each rank has a
witness, a small process that answers whoever connects with the rank's state as the system has it. A silent rank that
runs is waited for; one that is gone is lost at once; one that is stopped, or of which nobody answers, after a time.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from steadytrain.distributed.world import World
from steadytrain.errors import RankLostError
from steadytrain.machine.children import start_module
from steadytrain.machine.platform import poll
from steadytrain.machine.process_tree import read_stat

BEAT = 1.0
"""Seconds between two beats."""

SILENT = 30.0
"""Seconds without a beat after which a rank counts as lost, unless ``parallel.silent_seconds`` says otherwise."""

START_SILENT = 300.0
"""The same until all ranks have made an update, for a rank of which nobody can tell whether it lives."""

GRACE = 10.0
"""Seconds that a rank has, when another is lost, to leave the collective and end by itself."""

OWN_GRACE = 20.0
"""The same for a rank that failed itself."""

_FAILED, _LEFT, _STOP, _UPDATED = "failed", "left", "stop", "updated"
_RUNS, _STOPPED, _GONE = "runs", "stopped", "gone"
_STANDS = 10.0  # seconds at one place after which a rank tells what it exchanges
_AGAIN = ": the same command resumes the run"  # not where a rank failed: its own message says what to do
_AWAY = 3  # beats that a rank may miss, where a collective has failed, before it counts as gone
_LOOKS = 4
_TRIES = 60  # beats within which a witness has to have answered once: a firewall may be before it


class Heartbeat:
    """The signs of this rank, and what the others' say.

    Args:
        store: where all of them met, a ``torch.distributed.Store``.
        world: of this rank.
        hosts: the machine of each rank.
        address: by which the other ranks reach this machine; None: there is no witness of this rank.

    Attributes:
        at: returns what this rank is doing, in words, and for how many seconds; None: not known.
        has_updated: returns whether this rank has made an update.
        silent: seconds without a beat after which a rank counts as lost, once all have made an update.
        collectives: returns what this rank exchanges, plain, for the others to read; asked where it stands.
        on_failure: called once, in a thread of its own, when a rank is known to have failed.
        end: called in a thread of its own, where another rank was lost and this one does not leave the collective, with
            the message, and whether to print it: one rank of a machine does. By default it ends the process.
        stop: the signal by which any rank was asked to stop, a beat or two after that rank has told; None: none was.
    """

    def __init__(self, store: Any, world: World, hosts: Sequence[str], address: str | None = None) -> None:
        self.at: Callable[[], tuple[str, float]] | None = None
        self.has_updated: Callable[[], bool] = lambda: False
        self.silent = SILENT
        self.collectives: Callable[[], Any] = lambda: None
        self.on_failure: Callable[[], None] = lambda: None
        self.end: Callable[[str, bool], None] = _end
        self.stop: str | None = None
        self._store, self._world, self._hosts = store, world, hosts
        self._left = threading.Event()
        self._looked = threading.Condition()
        self._failed: str | None = None
        self._failed_rank = 0
        self._own_code: int | None = None  # where this rank itself has failed
        self._all_updated, self._is_counted = False, False
        self._number = 0
        self._reached: set[int] = set()  # ranks whose witness has answered this one
        self._witness = None if address is None else self._start_witness(address)
        self._threads = [
            threading.Thread(target=do, name=name, daemon=True)
            for name, do in (("steady-heartbeat", self._beat), ("steady-heartbeat-guard", self._guard))
        ]
        for thread in self._threads:
            thread.start()

    def fail(self, message: str, exit_code: int = 1) -> None:
        """Tell the others why this rank fails, and end with ``exit_code`` if it has not left ``OWN_GRACE`` s later."""
        self._own_code = exit_code
        self._report(self._world.rank, f"failed: {message}")

    def wait_until_heard(self) -> None:
        """Give the others time to read why the run fails, if it does: this rank's process may hold the store."""
        if self._failed is not None:
            time.sleep(2 * BEAT)

    def ask_to_stop(self, signal: str, about: Mapping[str, Any]) -> None:
        """Tell the others that this rank was asked to stop, and why: what it does may have no place to agree on it."""
        with suppress(RuntimeError):
            asked = {"rank": self._world.rank, "host": self._hosts[self._world.rank], "signal": signal, **about}
            self._store.compare_set(_STOP, "", json.dumps(asked))

    def asked_to_stop(self) -> Mapping[str, Any] | None:
        """Return which rank was the first to be asked to stop, its host, the signal and what it told; None: none."""
        with suppress(RuntimeError):
            if self._store.check([_STOP]):
                return dict(json.loads(self._store.get(_STOP)))
        return None

    def lost(self) -> str | None:
        """Say which rank was lost, where a collective has just failed, and what to do about it."""
        for _ in range(_LOOKS):
            before = self._all_beats()
            with self._looked:
                if self._looked.wait_for(lambda: self._failed is not None, _AWAY * BEAT):
                    return self._failed
            for rank, beat in self._all_beats().items():
                is_silent = beat == before.get(rank) and (beat is None or beat[0] != _LEFT)
                if is_silent and self._ask_witness(rank) != _RUNS:
                    self._report(rank, f"is gone{_at(beat)}{_AGAIN}")
                    return self._failed
        return None

    def where(self) -> dict[int, tuple[str, float]]:
        """Say what each other rank last reported to be doing, and for how many seconds."""
        return {rank: (str(beat[1]), float(beat[2])) for rank, beat in self._all_beats().items() if beat is not None}

    def records(self) -> dict[int, Any]:
        """Return what each other rank last reported to exchange, where it stands."""
        return {rank: beat[3] if beat and len(beat) > 3 else None for rank, beat in self._all_beats().items()}

    def close(self) -> None:
        """Stop beating; closing twice is fine."""
        if not self._left.is_set():
            with suppress(RuntimeError):
                self._store.set(f"sign/{self._world.rank}", json.dumps([_LEFT, "", 0.0]))
        self._left.set()
        for thread in self._threads:
            thread.join(5 * BEAT)
        if self._witness is not None:
            self._witness.kill()
            self._witness.communicate()

    def _beat(self) -> None:
        silent, before, looked = 0.0, None, time.monotonic()
        other = (self._world.rank + 1) % self._world.size
        while not self._left.wait(BEAT):
            self._number += 1
            # No more than a few beats of its own: a rank that was stopped knows nothing of others.
            passed, looked = min(time.monotonic() - looked, _AWAY * BEAT), time.monotonic()
            try:
                at = ("", 0.0) if self.at is None else self.at()
                standing = self.collectives() if at[1] > _STANDS else None
                self._store.set(f"sign/{self._world.rank}", json.dumps([self._number, *at, standing]))
                self._prepare(other)
                beat = self._read_beat(other)
                silent = silent + passed if beat == before and (beat is None or beat[0] != _LEFT) else 0.0
                before = beat
                if silent > _AWAY * BEAT and (lost := self._judge(other, silent)):
                    self._report(other, f"{lost}{_at(beat)}{_AGAIN}")
                self._look()
                if self.stop is None and (asked := self.asked_to_stop()) is not None:
                    self.stop = str(asked["signal"])
            except RuntimeError:  # the store is in a process of rank 0, or of its launcher
                self._fail(f"{self._place()} is gone{_AGAIN}")

    def _guard(self) -> None:
        """Watch that the store answers, and end this rank where another one is lost."""
        silent, before = 0, 0
        ended: float | None = None
        while not self._left.wait(BEAT):
            silent, before = silent + 1 if self._number == before else 0, self._number
            if silent * BEAT > (limit := self._limit()):
                self._fail(f"{self._place()} has not responded for {limit:.0f} s{_AGAIN}")
            if self._failed is not None:
                ended = ended or time.monotonic()
                if self._own_code is not None and time.monotonic() - ended > OWN_GRACE:
                    _end(f"{self._failed} (this rank did not end by itself)", exit_code=self._own_code)
                elif self._own_code is None and time.monotonic() - ended > GRACE:
                    self.end(self._failed, self.is_first_here())
                    return

    def is_first_here(self, lost: Iterable[int] = ()) -> bool:
        """Return whether no rank before this one on its machine is left to say what happened, but those ``lost``."""
        host, left = self._hosts[self._world.rank], set(range(self._world.rank)) - {self._failed_rank, *lost}
        return all(self._hosts[rank] != host for rank in left)

    def _prepare(self, other: int) -> None:
        """Exchange what is to be known before a rank is silent: who has made an update, which witness can be asked."""
        if not self._is_counted and self.has_updated():
            self._is_counted = self._store.add(_UPDATED, 1) > 0
        self._all_updated = self._all_updated or self._store.add(_UPDATED, 0) >= self._world.size
        if other not in self._reached and self._number < _TRIES:
            self._ask_witness(other)
        if self._witness is not None and self._witness.poll() is not None:  # its silence is to mean nothing
            self._store.delete_key(f"witness/{self._world.rank}")

    def _judge(self, rank: int, silent: float) -> str:
        """Say how a rank was lost that has sent no beat for so many seconds; empty where it may live."""
        state = self._ask_witness(rank)
        if state in (_RUNS, _GONE):
            return "is gone" if state == _GONE else ""
        if silent <= (limit := self.silent if state == _STOPPED else self._limit()):
            return ""
        return f"{'is stopped, and ' if state == _STOPPED else ''}has sent no heartbeat for {limit:.0f} s"

    def _limit(self) -> float:  # more until all have made an update
        return self.silent if self._all_updated else max(self.silent, START_SILENT)

    def _start_witness(self, address: str) -> subprocess.Popen[bytes] | None:
        """Start the witness of this rank, and tell the others where it answers; None where there can be none."""
        with suppress(OSError, RuntimeError), _listen(address) as server:
            # It ends when nobody is left to read what it never writes.
            process = start_module(__name__, stdin=server.fileno(), stdout=subprocess.PIPE)
            key = f"witness/{self._world.rank}"
            self._store.set(key, json.dumps([address, server.getsockname()[1], os.getpid()]))
            return process
        return None

    def _ask_witness(self, rank: int) -> str:
        """Ask the witness of a rank how that one is; empty where it does not answer, or never has."""
        key = f"witness/{rank}"
        if not self._store.check([key]):
            return ""
        host, port, pid = json.loads(self._store.get(key))
        try:
            with socket.create_connection((host, port), BEAT) as connection:
                about, state = connection.recv(64).decode().split()
        except ConnectionRefusedError:
            return _GONE if rank in self._reached else ""
        except (OSError, ValueError):
            return ""
        self._reached.add(rank)
        return {"T": _STOPPED, "t": _STOPPED}.get(state, _GONE if state in "ZX" or about != str(pid) else _RUNS)

    def _place(self) -> str:
        """The host of the store, in words for a message."""
        host = f" on {self._hosts[0]}" if self._hosts[0] else ""
        return f"rank 0{host}, or the launcher's rendezvous,"

    def _all_beats(self) -> dict[int, list[Any] | None]:
        """The last beat of each other rank: its number, what it was doing, for how many seconds."""
        with suppress(RuntimeError):
            return {rank: self._read_beat(rank) for rank in range(self._world.size) if rank != self._world.rank}
        return {}

    def _read_beat(self, rank: int) -> list[Any] | None:
        key = f"sign/{rank}"
        if not self._store.check([key]):
            return None
        beat = json.loads(self._store.get(key))
        return beat if isinstance(beat, list) else None

    def _report(self, rank: int, message: str) -> None:
        failure = json.dumps({"rank": rank, "message": message, "process": os.getpid()})
        with suppress(RuntimeError):
            self._store.compare_set(_FAILED, "", failure)
            self._look()

    def _look(self) -> None:
        if self._failed is None and self._store.check([_FAILED]):
            failure = json.loads(self._store.get(_FAILED))
            self._failed_rank = rank = int(failure["rank"])
            self._fail(f"rank {rank} on {self._hosts[rank]} {failure['message']}")

    def _fail(self, message: str) -> None:
        with self._looked:
            is_first, self._failed = self._failed is None, self._failed or message
            self._looked.notify_all()
        if is_first:
            threading.Thread(target=self.on_failure, name="steady-heartbeat-failure", daemon=True).start()


def main() -> None:
    """Be the witness of the process that started this one, which has made standard input the server, until it ends."""
    rank = os.getppid()
    polled = poll()
    polled.register(0, getattr(select, "POLLIN", 1))
    polled.register(1, 0)  # reports by itself that nobody can read it
    with socket.socket(fileno=0) as server:
        while 1 not in (ready := [file for file, _ in polled.poll(1000 * BEAT)]) and os.getppid() == rank:
            with suppress(OSError):
                if ready:
                    client, _ = server.accept()
                    with client:
                        stat = read_stat(f"/proc/{rank}")  # None: a system without /proc
                        client.sendall(f"{rank} {'S' if stat is None else stat.state}".encode())


def _listen(address: str) -> socket.socket:
    """Listen at an address of this machine; at all, where it is a host's name or another machine's, as behind a NAT."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        socket.inet_pton(family, address)  # a name may stand for the loopback here
        return socket.create_server((address, 0), family=family)
    return socket.create_server(("", 0), family=family)


def _at(beat: list[Any] | None) -> str:
    return f", at {beat[1]}" if beat and beat[1] else ""


def _end(message: str, is_printed: bool = True, exit_code: int = RankLostError.exit_code) -> None:
    if is_printed:
        os.write(2, f"steady: {message}\n".encode(errors="replace"))
    os._exit(exit_code)
