"""Installed packages, and whether their versions are those that steadytrain and its libraries ask for.

All of it is read from the packages' metadata: nothing is imported.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from importlib import metadata

from steadytrain.doctor.facts import Package

OURS = "steadytrain"
# Whose requirements count: ours, and those of the two libraries that must fit torch.
_ASKING = (OURS, "torchvision", "timm")
_ALSO = ("nvidia-ml-py", "huggingface_hub", "triton", "scikit-learn")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_SPECIFIER = re.compile(r"(~=|===|==|!=|<=|>=|<|>)\s*([\w.+!*-]+)")
_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "===": operator.eq,
    "!=": operator.ne,
}

Requires = Callable[[str], list[str] | None]
Version = Callable[[str], str | None]


def packages(python: str) -> dict[str, Package]:
    """The facts about packages, by name; Python itself is one of them, with the range that steadytrain supports.

    Args:
        python: its version.
    """
    wanted = ranges(_requires)
    told = {name: package(_version(name), wanted[name]) for name in wanted}
    told |= {name: Package(version=version) for name in _ALSO if name not in told and (version := _version(name))}
    return {OURS: Package(version=_version(OURS)), "python": package(python, _python_range()), **told}


def ranges(requires: Requires) -> dict[str, str]:
    """What is asked of each package that steadytrain needs: all that is asked for it, joined by commas.

    Args:
        requires: a package's requirements as its metadata writes them; None where it is not installed.

    >>> asked = {"steadytrain": ["torch>=2.10", 'pytest>=8; extra == "test"'], "torchvision": ["torch==2.15.0"]}
    >>> ranges(lambda name: asked.get(name))
    {'torch': '>=2.10,==2.15.0'}
    """
    found: dict[str, list[str]] = {}
    for asking in _ASKING:
        for name, specifiers in _parsed(requires(asking) or []):
            if asking == OURS or name in found:
                found.setdefault(name, []).extend(s for s in [specifiers] if s and s not in found.get(name, []))
    return {name: ",".join(parts) for name, parts in found.items()}


def package(version: str | None, wanted: str | None) -> Package:
    """An installed version beside the range it should lie in."""
    return Package(version=version, wanted=wanted or None, fits=fits(version, wanted) if version and wanted else None)


def fits(version: str, wanted: str) -> bool:
    """Whether a version lies in a range. A build's own label (``+cu132``) does not count, a pre-release is earlier.

    >>> fits("2.15.0+cu132", ">=2.10,==2.15.0"), fits("2.9.1", ">=2.10"), fits("3.0rc1", ">=3"), fits("2.4", "~=2.2")
    (True, False, False, True)
    """
    ours = _key(version)
    return all(_holds(ours, sign, text) for sign, text in _SPECIFIER.findall(wanted))


def _holds(ours: tuple[int, ...], sign: str, text: str) -> bool:
    if text.endswith(".*"):
        start = _numbers(text[:-2])
        same = ours[: len(start)] == start
        return same if sign == "==" else not same
    if sign == "~=":
        start = _numbers(text)[:-1]
        return ours >= _key(text) and ours[: len(start)] == start
    return _COMPARE[sign](ours, _key(text))


def _key(version: str) -> tuple[int, ...]:
    """Six numbers and whether it is a release: ``2.10rc1`` is (2, 10, 0, 0, 0, 0, 0)."""
    public = version.partition("+")[0]
    numbers = _numbers(public)
    early = re.search(r"\d[._-]?(a|b|c|rc|alpha|beta|pre|preview|dev)[._-]?\d*", public) is not None
    return (*(numbers + (0,) * 6)[:6], 0 if early else 1)


def _numbers(text: str) -> tuple[int, ...]:
    start = re.match(r"\d+(\.\d+)*", text.partition("!")[2] or text)
    return tuple(int(part) for part in start[0].split(".")) if start else ()


def _parsed(requirements: list[str]) -> Iterator[tuple[str, str]]:
    """Names and ranges, but not those that hold for an extra only, or on another system."""
    for line in requirements:
        match = _REQUIREMENT.match(line)
        if match and not match[3]:
            yield match[1].lower().replace("_", "-"), match[2].replace(" ", "")


def _requires(name: str) -> list[str] | None:
    try:
        return metadata.requires(name)
    except metadata.PackageNotFoundError:
        return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python_range() -> str | None:
    try:
        told = metadata.metadata(OURS).get_all("Requires-Python")
        return told[0] if told else None
    except metadata.PackageNotFoundError:
        return None
