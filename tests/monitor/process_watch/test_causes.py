"""The causes that fit a watch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.monitor.process_watch.series import Part, Scene, averaged, square

from steadytrain.monitor.process_watch import Reading, read

BEAT = averaged(square(1.8, 0.6), 0.2)
IDLE_WORKER = Part(cpu=0.05, asleep_in="read pipe")
DECODER = Part(cpu=0.98)
READER = Part(cpu=0.08, disk=0.85)

SCENES = {
    "decode": Scene(gpu=BEAT, main=Part(cpu=0.1, asleep_in="poll"), workers=[DECODER] * 8),
    "storage": Scene(gpu=BEAT, main=Part(cpu=0.1, asleep_in="poll"), workers=[READER] * 4, disk_read_bytes=9e6),
    "threads": Scene(gpu=BEAT, main=Part(cpu=0.1, asleep_in="poll"), workers=[DECODER] * 2),
    "single_thread": Scene(gpu=BEAT, main=Part(cpu=0.99)),
    "launch": Scene(gpu=0.35, main=Part(cpu=0.99), workers=[IDLE_WORKER] * 4),
    "waiting": Scene(gpu=BEAT, main=Part(cpu=0.1, asleep_in="poll"), workers=[Part(asleep_in="clock_nanosleep")] * 2),
    "network": Scene(gpu=BEAT, main=Part(cpu=0.1, asleep_in="poll"), workers=[Part(asleep_in="recvfrom socket")] * 4),
    "compute": Scene(gpu=0.98, main=Part(cpu=0.6), workers=[Part(cpu=0.4)] * 4, power_watts=650),
    "quota": Scene(gpu=BEAT, main=Part(cpu=0.2), workers=[Part(cpu=0.5)] * 4, quota=2.2, throttled=0.9),
    "noisy_neighbour": Scene(
        gpu=BEAT, main=Part(cpu=0.1), workers=[Part(cpu=0.3, queued=0.6)] * 4, others=6.6, cores=8
    ),
    "oversubscription": Scene(
        main=Part(cpu=0.25, queued=0.7), helpers=[Part(cpu=0.25, queued=0.7)] * 15, cores=4, others=0.0
    ),
    "memory": Scene(
        gpu=BEAT, main=Part(cpu=0.1), memory_pressure=0.5, swap_in_bytes=40e6, swapped_bytes=3 << 30, workers=[READER]
    ),
    "communication": Scene(gpu=1.0, main=Part(cpu=1.0), workers=[Part(asleep_in="futex")] * 2, power_watts=130),
    "hung": Scene(gpu=0.0, main=Part(asleep_in="futex"), workers=[Part(asleep_in="read pipe")] * 2),
    "stopped": Scene(main=Part(), state="T"),
}


@pytest.mark.parametrize("name", SCENES)
def test_the_classic_picture_gets_its_name(name: str) -> None:
    assert read(SCENES[name].moments()).causes[0].name == name


CPU_ONLY = {
    "compute": Scene(main=Part(cpu=0.98), helpers=[Part(cpu=0.98)] * 7, workers=[IDLE_WORKER] * 2),
    "decode": Scene(main=Part(cpu=square(2.0, 0.4)), workers=[Part(cpu=0.9)] * 2, cores=2),
    "threads": Scene(main=Part(cpu=square(2.0, 0.4), asleep_in="poll"), workers=[DECODER]),
    "storage": Scene(main=Part(cpu=square(2.0, 0.4), asleep_in="poll"), workers=[READER] * 2),
    "single_thread": Scene(main=Part(cpu=0.99)),
    "waiting": Scene(main=Part(cpu=square(2.0, 0.4), asleep_in="poll"), workers=[Part()] * 2),
    # MXNet: the main thread waits for engine threads; whether they compute or decode is not visible.
    "busy": Scene(main=Part(cpu=0.1), helpers=[Part(cpu=0.95)] * 4, cores=4),
}


@pytest.mark.parametrize("name", CPU_ONLY)
def test_without_a_gpu_the_training_process_is_what_waits_or_computes(name: str) -> None:
    assert read(CPU_ONLY[name].moments()).causes[0].name == name


def test_the_sentence_tells_the_period_the_duty_and_who_works_meanwhile() -> None:
    reading = read(SCENES["decode"].moments())
    assert reading.causes[0].sentence == (
        "the GPU works 60 % of each 1.8 s period; meanwhile 8 worker processes burn 7.8 of 8 cores: decoding or "
        "augmenting limits it (CPU-bound input)"
    )
    assert reading.rhythm is not None and reading.rhythm.period_seconds == pytest.approx(1.8, rel=0.1)


def test_the_share_is_the_time_in_which_the_gpu_idles() -> None:
    for name in ("decode", "storage", "threads"):
        assert read(SCENES[name].moments()).causes[0].share == pytest.approx(0.41, abs=0.02)


def test_storage_names_the_file_the_rate_and_the_waiting_cores() -> None:
    evidence = "\n".join(read(SCENES["storage"].moments()).causes[0].evidence)
    assert "waits most often in pread64 /data/train.tar" in evidence
    assert "45.0 MB/s from disk" in evidence
    assert "4 worker processes: 0.3 of 8 cores; each works, or could, 8 % of the time and waits for files 8" in evidence
    assert "of 8 cores idle for I/O" in evidence


def test_main_thread_that_reads_is_distinguished_from_workers_that_read() -> None:
    alone = Scene(main=Part(cpu=0.3, disk=0.65), disk_read_bytes=50e6)
    first = read(alone.moments()).causes[0]
    assert first.name == "storage" and "its main thread waits for storage" in first.sentence


def test_a_hang_names_what_each_thread_sleeps_in() -> None:
    first = read(SCENES["hung"].moments()).causes[0]
    assert "no activity for 30 s" in first.sentence
    assert first.evidence[0] == "main thread sleeps in: futex 100 % of the time"
    assert first.evidence[1] == "python 200 sleeps in: read pipe 100 % of the time"


def test_a_pause_shorter_than_ten_seconds_is_no_hang() -> None:
    moments = SCENES["compute"].moments(20) + [
        replace(moment, at=moment.at + 20) for moment in SCENES["hung"].moments(8, seed=1)
    ]
    assert "hung" not in {cause.name for cause in read(moments).causes}


def test_one_busy_worker_among_idle_ones_is_not_the_crowd() -> None:
    scene = Scene(gpu=BEAT, main=Part(cpu=0.1), workers=[DECODER, *[Part(cpu=0.12)] * 5])
    first = read(scene.moments()).causes[0]
    assert first.name == "threads" and "one of them works 97 % of the time" in first.sentence


def test_threads_of_the_process_itself_are_named_where_it_has_no_workers() -> None:
    first = read(Scene(gpu=BEAT, main=Part(cpu=0.1), helpers=[DECODER] * 8, name="java").moments()).causes[0]
    assert first.name == "decode" and "8 threads burn 7.8 of 8 cores" in first.sentence


def test_a_shell_around_it_is_not_the_training_process() -> None:
    def wrapped(reading_of: Scene) -> Reading:
        changes = []
        for moment in reading_of.moments():
            shell = replace(moment.processes[0], pid=50, parent=1, command="bash run.sh", name="bash", cpu=0.0)
            shell = replace(shell, threads=(replace(shell.threads[0], tid=50, cpu=0.0, state="S", waits_in="wait4"),))
            inner = replace(moment.processes[0], parent=50)
            changes.append(replace(moment, processes=(shell, inner, *moment.processes[1:])))
        return read(changes)

    lines = wrapped(SCENES["decode"])
    assert lines.causes[0].name == "decode"
    assert lines.seen is not None and len(lines.seen.workers) == 8 and lines.seen.trainers == 1


def test_ranks_are_distinguished_from_their_workers() -> None:
    changes = []
    for moment in SCENES["decode"].moments():
        ranks = [replace(moment.processes[0], pid=pid, parent=50, command=f"python t.py {pid}") for pid in (100, 101)]
        crew = [
            replace(w, parent=100 + n % 2, command=f"python t.py {100 + n % 2}")
            for n, w in enumerate(moment.processes[1:])
        ]
        changes.append(replace(moment, processes=(*ranks, *crew)))
    reading = read(changes)
    assert reading.seen is not None and reading.seen.trainers == 2 and len(reading.seen.workers) == 8
    assert reading.causes[0].name == "decode"


def test_workers_that_each_epoch_starts_anew_are_counted_once_and_the_gap_is_named() -> None:
    gap = Scene(gpu=square(5.0, 0.8), main=Part(cpu=0.1, asleep_in="poll"), workers=[Part(cpu=0.3)] * 4)
    changes = []
    for moment in gap.moments(40):
        epoch = int((moment.at + 1.0) / 5.0)  # they start as the gap begins
        workers = [replace(worker, pid=worker.pid + 10 * epoch) for worker in moment.processes[1:]]
        changes.append(replace(moment, processes=(moment.processes[0], *workers)))
    reading = read(changes)
    assert reading.seen is not None and len(reading.seen.workers) == 4 and reading.seen.renewals == 8
    first = next(cause for cause in reading.causes if cause.name == "epoch_gap")
    assert first.share == pytest.approx(0.2, abs=0.03)
    assert "4 worker processes ended and restarted about every 5 s" in first.sentence


def test_short_watch_gives_no_verdict() -> None:
    for moments in ([], SCENES["decode"].moments(1.0)):
        reading = read(moments)
        assert reading.causes[0].name == "unknown" and reading.seen is None


def test_unmeasurable_figures_are_named() -> None:
    hidden = [replace(moment, missing=("what is read from disk (closed)",)) for moment in SCENES["decode"].moments()]
    not_measurable = read(hidden).not_measurable
    assert not_measurable[0] == "what is read from disk (closed)" and "loss, images per second" in not_measurable[-1]


def test_figures_that_are_missing_are_not_taken_for_zero() -> None:
    bare = [
        replace(
            moment,
            machine=replace(moment.machine, idle=None, iowait=None, others=None, swap_in_bytes=None, pressure={}),
            processes=tuple(replace(p, disk_read_bytes=None) for p in moment.processes),
        )
        for moment in SCENES["storage"].moments()
    ]
    reading = read(bare)
    assert reading.causes[0].name == "storage"
    assert not [line for line in reading.causes[0].evidence if "MB/s" in line or "idle for I/O" in line]
