"""``python -m steadytrain`` is ``steady``."""

import sys

from steadytrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
