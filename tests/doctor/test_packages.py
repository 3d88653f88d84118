"""Installed versions against the ranges of the packages' metadata."""

from __future__ import annotations

from importlib import metadata

import pytest

from steadytrain.doctor.packages import fits, package, packages, ranges


def test_what_is_installed_here_fits() -> None:
    told = packages("3.11.7")
    assert told["numpy"].version == metadata.version("numpy") and told["numpy"].fits
    assert {"torch", "torchvision", "timm", "pillow", "simplejpeg", "cyclopts"} <= told.keys()
    assert told["steadytrain"].version == metadata.version("steadytrain")
    assert not [name for name, one in told.items() if one.fits is False]
    assert "pytest" not in told and "sphinx" not in told


@pytest.mark.parametrize(("python", "good"), [("3.10.14", False), ("3.11.0", True), ("3.14.0", True)])
def test_python_has_its_range_too(python: str, good: bool) -> None:
    assert packages(python)["python"].fits is good


def test_torchvision_names_the_torch_it_was_built_for() -> None:
    asked = {
        "steadytrain": ["torch>=2.10", "torchvision>=0.25", "timm>=1.0.26", 'pytest>=8; extra == "test"'],
        "torchvision": ["numpy", "torch==2.14.0", "pillow!=8.3.*,>=5.3.0"],
        "timm": ["torch", "torchvision", "pyyaml"],
    }
    wanted = ranges(lambda name: asked.get(name))
    assert wanted == {"torch": ">=2.10,==2.14.0", "torchvision": ">=0.25", "timm": ">=1.0.26"}
    assert package("2.15.0+cu132", wanted["torch"]).fits is False
    assert package("2.14.0+cu132", wanted["torch"]).fits is True


def test_without_metadata_nothing_is_claimed() -> None:
    assert ranges(lambda name: None) == {}
    assert package("1.0", None).fits is None and package(None, ">=1").fits is None


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.10", ">=2.9", True),  # not by the alphabet
        ("2.9.1", ">=2.10", False),
        ("2.10.0a0+git1f", ">=2.10", False),  # a build before the release
        ("2.10.0.dev20260101", ">=2.10", False),
        ("2.10.0.post1", ">=2.10", True),
        ("2.10.0+cpu", "==2.10", True),
        ("8.3.2", "!=8.3.*,>=5.3.0", False),
        ("8.4.0", "!=8.3.*,>=5.3.0", True),
        ("3.1.6", "==3.1.*", True),
        ("3.0", "~=2.2", False),
        ("2.2.9", "~=2.2.1", True),
        ("2.3.0", "~=2.2.1", False),
    ],
)
def test_ranges_are_read_as_packages_write_them(version: str, wanted: str, expected: bool) -> None:
    assert fits(version, wanted) is expected
