"""The command ``steady``, and ``python -m steadytrain``."""

import sys


def run() -> int:
    """The command line of this process; Ctrl-C while it is still being loaded ends it in one line too."""
    try:
        from steadytrain.cli import main

        return main()
    except KeyboardInterrupt:
        print("steady: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
