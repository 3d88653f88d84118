"""``steady feed``."""


def feed() -> None:
    """To be written."""
