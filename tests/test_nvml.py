"""One thing at a time from NVIDIA's library: a stand-in's answers, and where it is installed, its real names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.doctor.recorded import GEFORCE, H100, Library

from steadytrain.machine import nvml
from steadytrain.machine.nvml import REASONS, Reader, reasons, text, watts


def test_what_cannot_be_told_is_none() -> None:
    reader = Reader(Library(GEFORCE), GEFORCE)
    assert reader.read("Temperature", 0) == 88
    assert reader.read("EccMode") is None
    assert watts(reader.read("PowerUsage")) == 349.0 and watts(None) is None
    assert text(reader.read("Name")) == "NVIDIA GeForce RTX 3090"


def test_a_release_of_the_library_without_a_function() -> None:
    assert Reader(Library, H100).read("Name") is None


def test_reasons_by_the_new_name_and_by_the_old() -> None:
    assert reasons(Reader(Library(H100), H100)) == ("idle",)
    assert reasons(Reader(Library(GEFORCE), GEFORCE)) == ("power limit", "heat")
    assert reasons(Reader(Library({}), {})) is None


def test_the_names_and_bits_are_the_librarys() -> None:
    real = pytest.importorskip("pynvml")
    asked = set(re.findall(r'\bread\("(\w+)"', Path(nvml.__file__).read_text()))
    old = {"CurrentClocksThrottleReasons"}  # gone from the newest releases
    assert asked and all(hasattr(real, f"nvmlDeviceGet{name}") for name in asked - old - {"Name"})
    assert REASONS[real.nvmlClocksEventReasonSwPowerCap] == "power limit"
    assert REASONS[real.nvmlClocksEventReasonHwThermalSlowdown] == "heat (hardware)"
    assert REASONS[real.nvmlClocksEventReasonHwPowerBrakeSlowdown] == "power brake"
