"""``steady report``."""


def report(*runs: str, output: str = "report.html", json: bool = False) -> None:
    """Tables, curves and one HTML page from runs."""
