"""Takes away from modules of steadytrain what Windows lacks: a folder of PYTHONPATH, so that children have it too.

Each gets a view of ``os``, ``signal`` and so on in which names are missing and ``sys.platform`` is ``win32``; other
libraries see this system. What is missing comes from ``STEADYTRAIN_TEST_LACKS`` (JSON), which the test reads out of the
stubs of the standard library.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
import os
import signal
import subprocess
from types import ModuleType
from typing import Any


class _View(ModuleType):
    """A module without some names, and with others in their place."""

    def __init__(self, module: ModuleType, lacks: list[str], **instead: Any) -> None:
        vars(self).update(_module=module, _lacks=frozenset(lacks), _instead=instead, __name__=module.__name__)

    def __getattr__(self, name: str) -> Any:
        held = vars(self)
        if name in held["_instead"]:
            return held["_instead"][name]
        if name in held["_lacks"]:
            raise AttributeError(f"Windows has no {self.__name__}.{name}", name=name, obj=self)
        return getattr(held["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)


class _Popen(subprocess.Popen[bytes]):
    """Starts a program with what Windows can do."""

    def __init__(self, *args: Any, creationflags: int = 0, **options: Any) -> None:
        if options.get("preexec_fn") is not None or options.get("pass_fds"):
            raise ValueError("preexec_fn and pass_fds are not supported on Windows platforms")
        super().__init__(*args, **options)


def _open(path: Any, flags: int, mode: int = 0o777) -> int:
    """Open a file; Windows opens no folder."""
    if os.path.isdir(path):  # noqa: PTH112
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return os.open(path, flags, mode)


def _fsync(file: int) -> None:
    """Write a file through; Windows asks for the right to write."""
    if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    os.fsync(file)


def _locking(file: int, mode: int, size: int) -> None:
    """Lock bytes where the file stands, as ``msvcrt.locking`` does."""
    operation = (fcntl.LOCK_UN, fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB)[mode]
    fcntl.lockf(file, operation, size, os.lseek(file, 0, os.SEEK_CUR))


def _set_wakeup_fd(file: int, *, warn_on_full_buffer: bool = True) -> int:
    """Write signals to a pipe; this system takes only one that never waits, Windows any."""
    if file >= 0:
        os.set_blocking(file, False)
    return signal.set_wakeup_fd(file, warn_on_full_buffer=warn_on_full_buffer)


_LACKS: dict[str, list[str] | None] = json.loads(os.environ["STEADYTRAIN_TEST_LACKS"])
_INSTEAD: dict[str, dict[str, Any]] = {
    "os": {"name": "nt", "open": _open, "fsync": _fsync, "O_BINARY": 0},
    "signal": {"set_wakeup_fd": _set_wakeup_fd},
    "sys": {"platform": "win32"},
    "subprocess": {"Popen": _Popen, "CREATE_NEW_PROCESS_GROUP": 0x200},
}
_VIEWS = {
    name: _View(__import__(name), lacks, **_INSTEAD.get(name, {}))
    for name, lacks in _LACKS.items()
    if lacks is not None and (lacks or name in _INSTEAD)
}
_VIEWS["msvcrt"] = _View(ModuleType("msvcrt"), [], locking=_locking, LK_UNLCK=0, LK_LOCK=1, LK_NBLCK=2)
_import = builtins.__import__


def _import_as_there(name: str, given: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
    if str((given or {}).get("__name__", "")).startswith("steadytrain"):
        if (first := name if fromlist else name.partition(".")[0]) in _VIEWS:
            return _VIEWS[first]
        if _LACKS.get(name, ()) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, given, local, fromlist, level)


builtins.__import__ = _import_as_there  # type: ignore[assignment]
