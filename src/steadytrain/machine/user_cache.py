"""Where lies between commands what could be made again: packed copies, counts of models, compiled code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(variables: Mapping[str, str] = os.environ) -> Path | None:
    """This user's own, for the caches of all programs; None for one without a home."""
    told = variables.get("XDG_CACHE_HOME")
    try:
        return Path(told) if told else Path.home() / ".cache"
    except RuntimeError:
        return None


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path | None:
    """``$STEADYTRAIN_CACHE``, else ``steadytrain`` in the user's; None for one without a home.

    >>> cache_folder({"STEADYTRAIN_CACHE": "/scratch/me"}), cache_folder({"XDG_CACHE_HOME": "/var/cache"})
    (PosixPath('/scratch/me'), PosixPath('/var/cache/steadytrain'))
    """
    told, user = variables.get("STEADYTRAIN_CACHE"), user_cache(variables)
    return Path(told) if told else user and user / "steadytrain"
