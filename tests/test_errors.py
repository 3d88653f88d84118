"""Errors: what a user catches, the exit code, and messages that say what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from steadytrain import errors
from steadytrain.errors import (
    FailedError,
    InputError,
    RankLostError,
    StalledError,
    SteadyError,
    did_you_mean,
    storage_error,
)

EVERY = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SteadyError)]


@pytest.mark.parametrize("kind", EVERY)
def test_wrong_input_exits_with_2_a_hang_with_3_a_lost_rank_with_4_and_failure_with_1(kind: type[SteadyError]) -> None:
    own_codes: dict[type[SteadyError], int] = {StalledError: 3, RankLostError: 4}
    assert kind.exit_code == (2 if issubclass(kind, InputError) else own_codes.get(kind, 1))


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_is_drawn_in_the_tree(kind: type[SteadyError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


def test_the_standard_kinds_catch_ours() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(FailedError, RuntimeError)


def test_a_typo_finds_the_nearest_names() -> None:
    assert did_you_mean("momentun", ["momentum", "nesterov"]) == " Did you mean momentum?"
    assert did_you_mean("resnet11", ["resnet10", "resnet18", "vgg"]) == " Did you mean resnet18 or resnet10?"
    assert did_you_mean("anything", []) == ""


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "the disk is full at out/a.rec: free some space"),
        (errno.EDQUOT, "your quota is used up at out/a.rec: free some space"),
        (errno.EACCES, "out/a.rec is not writable (Permission denied): choose another folder"),
        (errno.EROFS, "out/a.rec is not writable (Read-only file system): choose another folder"),
        (errno.ENOENT, "cannot write out/a.rec: there is no folder out any more, or yet: put it there"),
        (errno.EIO, "cannot write out/a.rec (Input/output error)"),
    ],
)
def test_a_storage_error_names_the_path_the_cause_and_the_remedy(number: int, says: str) -> None:
    error = storage_error(OSError(number, os.strerror(number)), Path("out/a.rec"))
    assert str(error).startswith(says)
    assert str(error).endswith("run the same command again")
    assert "\n" not in str(error)
