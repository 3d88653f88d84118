"""The processor by the kernel's files, and the load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.doctor.trees import ARM, DOCKER, POD, SERVER, tree

from steadytrain.doctor.processor import load, processor, stolen, ticks


def test_sockets_cores_and_threads_are_counted_apart(tmp_path: Path) -> None:
    told = processor(tree(tmp_path, SERVER))
    assert (told.sockets, told.physical, told.logical, told.smt, told.numa_nodes) == (2, 4, 8, True, 2)


def test_sockets_and_cores_where_only_cpuinfo_is_there(tmp_path: Path) -> None:
    told = processor(tree(tmp_path, {"proc/cpuinfo": SERVER["proc/cpuinfo"]}))
    assert (told.sockets, told.physical, told.logical, told.smt, told.numa_nodes) == (2, 4, 8, True, None)


def test_features_are_those_that_torch_has_code_for(tmp_path: Path) -> None:
    told = processor(tree(tmp_path, SERVER))
    assert told.isa == "avx512"
    assert told.features == ("avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni")
    amx = SERVER["proc/cpuinfo"].replace("avx512_vnni", "avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8")
    assert processor(tree(tmp_path, {"proc/cpuinfo": amx})).features[-4:] == (
        "avx512_bf16",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    )


def test_an_arm_processor_tells_its_features_and_no_clock(tmp_path: Path) -> None:
    told = processor(tree(tmp_path, ARM))
    assert told.features == ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve")
    assert (told.logical, told.physical, told.sockets, told.smt) == (2, 2, 1, False)
    assert (told.mhz, told.mhz_max, told.governor, told.numa_nodes) == (None, None, None, None)


def test_clocks_are_in_megahertz(tmp_path: Path) -> None:
    told = processor(tree(tmp_path, SERVER))
    assert (told.mhz, told.mhz_max, told.mhz_allowed) == (1500, 3900, 2100)
    assert (told.governor, told.frequency_driver) == ("powersave", "intel_pstate")
    assert processor(tree(tmp_path / "b", {"proc/cpuinfo": SERVER["proc/cpuinfo"]})).mhz == 1350  # their mean


@pytest.mark.parametrize(("files", "quota"), [({}, None), (DOCKER, 1.5), (POD, 2.5)])
def test_a_quota_keeps_its_fraction(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert processor(tree(tmp_path, SERVER, files)).quota == quota


def test_a_root_without_anything_gives_what_python_knows(tmp_path: Path) -> None:
    told = processor(tmp_path)
    assert told.logical == os.cpu_count() and told.features == () and told.mhz is None


def test_load_and_pressure_now(tmp_path: Path) -> None:
    told = load(tree(tmp_path, SERVER))
    assert (told.load_1, told.load_5, told.load_15) == (3.52, 2.10, 1.05)
    assert (told.pressure_cpu_share, told.pressure_memory_share, told.pressure_io_share) == (0.125, 0.0, 0.0199)


@pytest.mark.parametrize(("files", "share"), [({}, None), (DOCKER, 0.25), (POD, 0.005)])
def test_how_often_the_quota_was_used_up(tmp_path: Path, files: dict[str, str], share: float | None) -> None:
    assert load(tree(tmp_path, SERVER, files)).throttled_share == share


def test_what_the_hypervisor_withheld_is_a_share_of_all_time(tmp_path: Path) -> None:
    before = ticks(tree(tmp_path, SERVER))
    after = ticks(tree(tmp_path, {"proc/stat": "cpu  1100 10 200 8600 50 0 20 340 700 0"}))
    assert before == (40, 9320) and stolen(before, after) == 0.3


def test_no_time_passed_or_no_kernel_that_tells_is_unknown(tmp_path: Path) -> None:
    now = ticks(tree(tmp_path, SERVER))
    assert stolen(now, now) is None and stolen(ticks(tmp_path / "empty"), now) is None
    assert load(tmp_path / "empty").load_1 is None
