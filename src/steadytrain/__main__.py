"""The command ``steady``, and ``python -m steadytrain``."""

import atexit
import os
import signal
import sys
from types import FrameType


def run() -> int:
    """The command line of this process; Ctrl-C while it is still being loaded ends it in one line too."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # where Ctrl-C is not ignored
        signal.signal(signal.SIGINT, _interrupt)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Python takes itself apart without handlers
    try:
        from steadytrain.cli import main

        return main()
    except KeyboardInterrupt:
        print("steady: interrupted", file=sys.stderr)
        return 130
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:  # the work is done: what Python ends by needs no traceback
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
        exec("")  # clears the mark of an interrupt within one, as of a dataclass: ``python -m`` would end by the signal


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, unless torch is being loaded: its own code would meet the exception and abort.

    A part of torch or triton may be loaded later than torch itself, by what first needs it.
    """
    loaded = [module for name, module in sys.modules.copy().items() if name.partition(".")[0] in ("torch", "triton")]
    if any(getattr(getattr(module, "__spec__", None), "_initializing", False) for module in loaded):
        os.write(2, b"steady: interrupted\n")
        os._exit(128 + number)
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    sys.exit(run())
