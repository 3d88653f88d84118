"""Causes of an early stop: a signal to the process, a notice that the machine goes, or the same on another rank's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from steadytrain.config.parts import Every
from steadytrain.distributed.process_group import Group
from steadytrain.events import Noticed
from steadytrain.machine.notices import SIGNAL, MachineNotice, NoticeWatch, stop_reason, watching_notices
from steadytrain.machine.process import StopRequest
from steadytrain.training.session.saver import Saver
from steadytrain.training.session.session import Session


class Stopping:
    """The wish to stop, asked for before, between and within updates, evaluations and warm-up.

    Ranks agree after an update (:mod:`.consensus`). What takes long between two of these, such as an evaluation, asks
    here: this rank's wish goes to the others with its heartbeat, and theirs come with theirs.
    """

    def __init__(self, saver: Saver, stop: Callable[[], str | None], group: Group | None, watch: NoticeWatch) -> None:
        self._saver, self._stop, self._group, self._watch = saver, stop, group, watch
        self._is_told = False

    def __call__(self) -> str | None:
        """Return the name of a signal, or None."""
        if self._watch.wants_save:
            self._watch.wants_save = False
            self._saver.hurry()
        signal = self._stop() or (SIGNAL if self._watch.notice is not None else None)
        if self._group is None:
            return signal
        if signal is not None and not self._is_told:
            self._is_told = True
            notice = self._watch.notice
            about = {} if notice is None else {"what": notice.what, "deadline": notice.deadline}
            self._group.heartbeat.ask_to_stop(signal, about)
        return signal or self._group.heartbeat.stop

    def words(self) -> str:
        """Say which other rank has made this one stop, and why; empty where this one was asked itself."""
        asked = None if self._group is None or self._is_told else self._group.heartbeat.asked_to_stop()
        if asked is None:
            return ""
        what = f"rank {asked['rank']} on {asked['host']} was asked to stop by {asked['signal']}"
        if "what" not in asked:
            return what
        notice = MachineNotice(id="", what=f"{what}: {asked['what']}", deadline=asked["deadline"])
        return stop_reason(notice, time.time(), self._saver.seconds)

    @property
    def heard(self) -> str | None:
        """The same, as the watchdog asks it from another thread."""
        heard = self._stop.heard if isinstance(self._stop, StopRequest) else None
        return heard or (SIGNAL if self._watch.notice is not None else None)


@contextmanager
def stopping(session: Session, stop: Callable[[], str | None], group: Group | None, since: float) -> Iterator[Stopping]:
    """Watch for notices until the block is left, on one rank of each machine.

    ``since``: seconds since 1970; a file that is older is no notice.

    Raises:
        InputError: an environment variable of the notices holds what it cannot.
    """
    saver, outbox = session.saver, session.outbox  # the watchdog asks: it must not keep the whole session

    def say(line: str) -> None:
        outbox.append(Noticed(message=line))

    with ExitStack() as stack:
        watch = NoticeWatch(say, lambda: 0.0)
        if group is None or group.world.is_local_first:
            source = named_source(session.recipe.every, say)
            watching = watching_notices(source, say=say, save_seconds=lambda: saver.seconds, began=since)
            watch = stack.enter_context(watching)
        yield Stopping(saver, stop, group, watch)


def named_source(every: Every, say: Callable[[str], object]) -> str | None:
    """Return the source of notices that this command names, and put a line where only a file does."""
    if every.notices is None or "notices" not in every.from_file:
        return every.notices
    say(
        f"not asked for notices: a file asks for it (every.notices={every.notices}), and this command does not; to"
        f" ask, add --notices {every.notices}"
    )
    return None
