"""The command ``steady``, and ``python -m steadytrain``."""

import os
import signal
import sys
from types import FrameType


def run() -> int:
    """The command line of this process; Ctrl-C while it is still being loaded ends it in one line too."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # where Ctrl-C is not ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from steadytrain.cli import main

        return main()
    except KeyboardInterrupt:
        print("steady: interrupted", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, unless torch is being loaded: its own code would meet the exception and abort."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        os.write(2, b"steady: interrupted\n")
        os._exit(130)
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    sys.exit(run())
