"""Exit codes of several processes that are one job, as one."""

from __future__ import annotations

from collections.abc import Iterable

from steadytrain.errors import InputError, RankLostError

USAGE = InputError.exit_code
RANK_LOST = RankLostError.exit_code
PREEMPTED = 75
INTERRUPTED = 130
_FOLLOW = {RANK_LOST, 128 + 15}  # what ranks end with because others did


def verdict(codes: Iterable[int]) -> int:
    """The exit code of all, from those of each in the order in which they ended.

    The first that failed by itself decides, not one that was stopped because of it. Ranks that were asked to stop and
    have saved make it 75, if nothing else happened.

    >>> verdict([0, 0]), verdict([4, 1, 143]), verdict([75, 0]), verdict([143, 143]), verdict([75, 137])
    (0, 1, 75, 143, 137)
    """
    bad = [code for code in codes if code]
    for kind in ({*bad} - _FOLLOW - {PREEMPTED}, {PREEMPTED}, {RANK_LOST}, {*bad}):
        found = [code for code in bad if code in kind]
        if found:
            return found[0]
    return 0


def is_mended_by_restart(code: int) -> bool:
    """Whether another start can come to another end.

    >>> [code for code in (0, 1, 2, 4, 75, 130, 137) if is_mended_by_restart(code)]
    [1, 4, 137]
    """
    return code not in (0, USAGE, PREEMPTED, INTERRUPTED)


def exit_code(returned: int) -> int:
    """A process's return code as a shell tells it: 128 and the signal's number where one ended it.

    >>> exit_code(-9), exit_code(3)
    (137, 3)
    """
    return 128 - returned if returned < 0 else returned
