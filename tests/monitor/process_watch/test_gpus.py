"""GPUs beside a foreign process, by a stand-in for NVIDIA's library whose samples swing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.doctor.recorded import GEFORCE, H100
from tests.monitor.process_watch.series import averaged, square
from tests.monitor.test_gpu import Driver

from steadytrain.monitor.process_watch.gpus import Gpus
from steadytrain.monitor.process_watch.rhythm import rhythm


def _used_by(*pids: int) -> dict[str, Any]:
    return {"ComputeRunningProcesses": [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]}


def test_a_look_tells_the_mean_of_the_drivers_samples_since_the_one_before() -> None:
    table = {**H100, "samples": [(1, 90), (2, 10)], **_used_by(7)}
    gpus = Gpus(Driver(table))
    assert gpus.look([7], set())[0].utilisation == 0.10
    assert gpus.look([7], set())[0].utilisation == 0.10  # nothing new
    table["samples"] += [(3, 40), (4, 60)]
    told = gpus.look([7], set())[0]
    assert told.utilisation == 0.50
    assert (told.name, told.power_watts, told.power_limit_watts) == ("NVIDIA H100 80GB HBM3", 71.4, 700.0)
    assert (told.memory_bytes, told.memory_total_bytes) == (620_809_984, 85_520_809_984)
    gpus.close()


def test_a_driver_without_samples_gives_its_newest_figure() -> None:
    assert Gpus(Driver(GEFORCE)).look([4242], set())[0].utilisation == 0.97


def test_the_rhythm_of_a_recorded_utilisation_is_found() -> None:
    swing = averaged(square(1.8, 0.6), 0.17)  # what a driver samples each sixth of a second
    table: dict[str, Any] = {**H100, "samples": [], **_used_by(7)}
    gpus, values, sent = Gpus(Driver(table)), [], 0
    for look in range(1, 200):
        while sent * 167 < look * 100:
            table["samples"].append((sent * 167_000 + 1, round(100 * swing(sent * 0.167))))
            sent += 1
        values.append(gpus.look([7], set())[0].utilisation or 0.0)
    found = rhythm(values, interval_seconds=0.1)
    assert found is not None and found.period_seconds == pytest.approx(1.8, rel=0.1)
    assert found.duty == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize(
    ("users", "held", "ours", "others"),
    [
        ({7, 9}, {"nvidia0"}, True, 1),
        ({9}, set(), False, 1),  # its file is not open: somebody else's
        ({4711}, {"nvidia0"}, True, None),  # a container: the driver counts in the machine's numbers
        (set(), {"nvidia0"}, None, None),
        ({9}, None, None, None),
    ],
)
def test_whose_gpu_it_is(users: set[int], held: set[str] | None, ours: bool | None, others: int | None) -> None:
    told = Gpus(Driver({**H100, "MinorNumber": 0, **_used_by(*users)})).look([7], held)[0]
    assert (told.ours, told.others) == (ours, others)


def test_a_gpu_that_tells_nothing_is_no_error() -> None:
    told = Gpus(Driver({})).look([7], None)[0]
    assert (told.name, told.utilisation, told.power_watts, told.ours) == ("NVIDIA GPU", None, None, None)


def test_no_driver_is_told_in_its_own_words() -> None:
    library = Driver()
    library.refuses = "Driver Not Loaded"
    gpus = Gpus(library)
    assert gpus.missing == "Driver Not Loaded" and gpus.look([7], set()) == ()
    gpus.close()


def test_the_library_is_let_go() -> None:
    library = Driver(H100)
    Gpus(library).close()
    assert library.open == 0
