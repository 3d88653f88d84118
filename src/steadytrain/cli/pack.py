"""``steady pack``."""


def pack() -> None:
    """To be written."""
