"""The sampler on machines with eight GPUs: ``pynvml`` loads a library compiled here, as it loads NVIDIA's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.machine.nvml_scenes import STRANGER
from tests.monitor.rules.made import on_gpu, started

from steadytrain.events import DeviceStats
from steadytrain.monitor import Cause, diagnose
from steadytrain.monitor.rules import find_causes

COMPILER = shutil.which("cc")
SOURCE, ROOT = Path(__file__).with_name("nvml.c"), Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc), so no libnvidia-ml.so.1 of our own"),
    pytest.mark.skipif(sys.platform != "linux", reason="the library is a shared object of Linux"),
]
Scenes = dict[str, Any]


def play(folder: Path, *flags: str) -> Scenes:
    """Compile the library, and have a process with seven ranks beside it sample through it."""
    subprocess.run([str(COMPILER), *flags, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", SOURCE], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(7)]
    try:
        command = [sys.executable, "-m", "tests.machine.nvml_scenes", str(folder), *(str(rank.pid) for rank in ranks)]
        environment |= {"LD_LIBRARY_PATH": str(folder)}
        played = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    scenes: Scenes = json.loads(played.stdout)
    return scenes


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Scenes under a driver of today."""
    return play(tmp_path_factory.mktemp("new"), "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module")
def old_scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """The same under a driver of 2021, which lacks functions."""
    return play(tmp_path_factory.mktemp("old"), "-DOLD")


def stats(scene: list[dict[str, Any]]) -> tuple[DeviceStats, ...]:
    """The samples of the GPUs in a scene."""
    return tuple(msgspec.convert(event, DeviceStats) for event in scene if event["kind"] == "DeviceStats")


def causes(scene: list[dict[str, Any]]) -> list[Cause]:
    """What a sound run with these samples is told."""
    return find_causes(on_gpu(devices=stats(scene), started=started(device="NVIDIA H100 80GB HBM3", precision="bf16")))


def test_eight_ranks_on_eight_gpus_find_no_stranger_and_no_cause(scenes: Scenes) -> None:
    samples = stats(scenes["ranks"])
    assert [(sample.index, sample.processes) for sample in samples] == [(index, 0) for index in range(8)]
    assert causes(scenes["ranks"]) == []


def test_the_figures_come_through_the_librarys_structs(scenes: Scenes) -> None:
    sample = stats(scenes["ranks"])[5]
    assert (sample.name, sample.utilisation, sample.temperature) == ("NVIDIA H100 80GB HBM3", 0.94, 61)
    assert (sample.sm_active, sample.tensor_active) == (0.88, 0.55)
    assert (sample.memory_bytes, sample.memory_total_bytes) == (30 << 30, 80 << 30)
    assert (sample.power_limit_watts, sample.power_most_watts, sample.energy_joules) == (700, 700, 0.5)
    assert (sample.clock_hertz, sample.clock_limit_hertz, list(sample.missing)) == (1.755e9, 1.98e9, [])


def test_a_stranger_on_a_gpu_of_the_run_is_named(scenes: Scenes) -> None:
    (cause,) = causes(scenes["stranger"])
    assert cause.name == "device_shared" and "1 other process runs on GPU 2" in cause.sentence
    assert any(f"program-{STRANGER} (pid {STRANGER}" in figure for figure in cause.evidence)


def test_a_stranger_on_another_gpu_is_not_blamed(scenes: Scenes) -> None:
    assert [sample.index for sample in stats(scenes["elsewhere"])] == [0, 1, 2, 3]
    assert causes(scenes["elsewhere"]) == []


@pytest.mark.parametrize("scene", ["container", "hidden"])
def test_where_processes_have_other_numbers_nobody_is_blamed_and_it_is_said(scenes: Scenes, scene: str) -> None:
    samples = stats(scenes[scene])
    assert all(sample.processes is None and "processes" in sample.missing for sample in samples)
    evidence = on_gpu(devices=samples)
    assert causes(scenes[scene]) == []
    assert any("which processes on it are others'" in line for line in diagnose(evidence).not_measurable)


def test_what_this_user_may_not_ask_is_missing_and_the_rest_is_there(scenes: Scenes) -> None:
    (sample,) = stats(scenes["denied"])
    assert {"utilisation", "power_watts", "energy_joules"} <= set(sample.missing)
    assert (sample.memory_bytes, sample.temperature, sample.sm_active) == (30 << 30, 61, 0.88)


def test_a_lost_gpu_leaves_the_others_with_their_numbers(scenes: Scenes) -> None:
    assert [sample.index for sample in stats(scenes["lost"])] == [0, 1, 3]


def test_a_slice_has_its_own_memory_and_processes_and_the_clock_of_its_gpu(scenes: Scenes) -> None:
    (sample,) = stats(scenes["slice"])
    assert (sample.index, sample.name) == (0, "NVIDIA H100 80GB HBM3 MIG 3g.40gb")
    assert (sample.processes, sample.memory_total_bytes, sample.clock_hertz) == (0, 40 << 30, 1.755e9)
    assert {"utilisation", "power_watts", "energy_joules"} <= set(sample.missing), "the whole GPU's are not the run's"


def test_a_driver_of_another_version_is_told_once_and_sampling_goes_on(scenes: Scenes) -> None:
    (notice,) = scenes["mismatch"]
    assert notice["kind"] == "Noticed" and "not measurable" in notice["message"]
    assert "version mismatch" in notice["message"] and "restart the machine" in notice["message"]
    assert any("no samples of them" in line for line in diagnose(on_gpu(devices=())).not_measurable)


def test_a_run_on_the_cpu_samples_no_gpu(scenes: Scenes) -> None:
    assert scenes["cpu"] == []


def test_the_gpus_that_cuda_shows_are_counted_by_number_id_and_slice(scenes: Scenes) -> None:
    shown = {name: [uuid[4:12] + uuid[-1] for uuid in uuids] for name, uuids in scenes["shown"].items()}
    first, second = "000000000", "000000001"
    assert len(shown["all"]) == 8 and shown["two"] == ["000000050", "000000020"] and shown["none"] == []
    assert shown["sliced"] == [first], "one slice, and nothing else"
    assert shown["beside"] == ["000000030", "000000040"]
    assert shown["named"] == shown["older name"] == [second]


def test_doctors_facts_say_what_cuda_hides_and_who_is_there(scenes: Scenes) -> None:
    gpus = scenes["facts"]["gpus"]
    assert [gpu["index"] for gpu in gpus if gpu["visible"]] == [1, 7]
    assert [gpu["index"] for gpu in gpus if gpu["exclusive"]] == [7]
    assert all(len(gpu["processes"]) == 1 and gpu["capability"] == "9.0" and gpu["mig"] is False for gpu in gpus)
    assert gpus[0]["power_most_watts"] == 700 and gpus[0]["pcie_width"] == 16


def test_a_watched_process_has_its_gpu_and_strangers_theirs(scenes: Scenes) -> None:
    assert scenes["watched"] == [True, False, False, False]


def test_an_older_driver_tells_processes_memory_and_clocks_by_its_own_functions(old_scenes: Scenes) -> None:
    assert old_scenes["facts"]["version"] == "470.57.02"
    samples = stats(old_scenes["ranks"])
    assert [sample.processes for sample in samples] == [0] * 8
    assert all(sample.memory_bytes == 31 << 30 and not sample.throttled for sample in samples)
    assert set(samples[0].missing) == {"sm_active", "tensor_active"}
    assert [cause.name for cause in causes(old_scenes["stranger"])] == ["device_shared"]


def test_what_is_taken_from_the_library_is_given_back(scenes: Scenes, old_scenes: Scenes) -> None:
    assert scenes["open"] == old_scenes["open"] == 0
