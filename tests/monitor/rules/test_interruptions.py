from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from tests.monitor.rules.made import (
    BATCH,
    changed,
    evidence,
    feed,
    find,
    ledger,
    machine,
    recipe,
    started,
    threads,
    times,
)

from steadytrain.events import Compiled


def test_evaluations_every_twentieth_of_an_epoch_are_too_frequent() -> None:
    facts = evidence(ledger=ledger(evaluation=65.0), evaluations=(50, 65.0), recipe=recipe(every__evaluate_epochs=0.05))
    cause = find("evaluation", facts)
    assert cause is not None and cause.share == pytest.approx(0.5)
    assert cause.change == "--set every.evaluate_epochs=1" and cause.saves == pytest.approx(0.5 * 0.96, abs=0.01)


def test_evaluation_each_epoch_may_take_a_tenth_of_the_time() -> None:
    assert find("evaluation", evidence(ledger=ledger(evaluation=6.0), evaluations=(3, 6.0))) is None
    cause = find("evaluation", evidence(ledger=ledger(evaluation=15.0), evaluations=(3, 15.0)))
    assert cause is not None and cause.change == "--set every.evaluate_epochs=5"


def test_the_one_evaluation_at_the_end_cannot_be_spared() -> None:
    short = evidence(ledger=ledger(forward=1.0, backward=2.0, evaluation=1.05), evaluations=(1, 1.05))
    cause = find("evaluation", short)
    assert cause is not None and cause.change == "" and cause.saves == 0 and cause.is_usual


def test_an_evaluation_that_is_slower_than_training_is_no_usual_one() -> None:
    # The forward passes of training take 0.8 s for as many images.
    cause = find("evaluation", evidence(ledger=ledger(evaluation=30.0), evaluations=(1, 30.0)))
    assert cause is not None and not cause.is_usual and cause.share == pytest.approx(28.4 / 95, abs=0.01)
    assert "slower than training's forward passes" in cause.sentence


def test_checkpoints_by_steps_are_left_to_the_minutes() -> None:
    facts = evidence(ledger=ledger(checkpoint=35.0), checkpoints=(100, 35.0), recipe=recipe(every__save_steps=10))
    cause = find("checkpoint", facts)
    assert cause is not None and cause.change == "--set every.save_steps=none"
    assert cause.saves == pytest.approx(0.35 * 0.99) and "every 10 updates" in cause.sentence


def test_checkpoints_that_take_a_minute_each_are_written_seldom() -> None:
    held = ledger(forward=2000.0, backward=4000.0, checkpoint=600.0)
    facts = evidence(ledger=held, checkpoints=(10, 600.0), recipe=recipe(every__save_minutes=10.0))
    cause = find("checkpoint", facts)
    assert cause is not None and cause.change == "--set every.save_minutes=40"


def test_the_last_checkpoint_stays() -> None:
    short = ledger(forward=2.0, backward=4.0, checkpoint=1.0)
    cause = find("checkpoint", evidence(ledger=short, checkpoints=(2, 1.0)))
    assert cause is not None and cause.change == "" and cause.is_usual
    # Three megabytes take five seconds: that is the disk, and not that the run is short.
    cause = find("checkpoint", evidence(ledger=ledger(checkpoint=5.0), checkpoints=(1, 5.0)))
    assert cause is not None and not cause.is_usual and "the disk is slow" in cause.sentence
    assert find("checkpoint", evidence(ledger=ledger(checkpoint=1.0), checkpoints=(100, 1.0))) is None


def test_lines_each_step_are_too_many() -> None:
    facts = evidence(ledger=ledger(logging=35.0), recipe=recipe(every__log_steps=1))
    cause = find("logging", facts)
    assert cause is not None and cause.change == "--set every.log_steps=64"
    assert cause.saves == pytest.approx(0.35 * 63 / 64)


def test_slow_folder_is_distinguished_from_slow_lines_by_the_time_of_a_line() -> None:
    cause = find("logging", evidence(ledger=ledger(logging=50.0)))  # a line of 20 updates: a second
    assert cause is not None and "--run FOLDER" in cause.change and cause.saves == cause.share
    cause = find("logging", evidence(ledger=ledger(logging=4.0)))  # 80 ms
    assert cause is not None and "every.log_steps" in cause.change


def test_lost_work_asks_for_checkpoints_as_often_as_they_pay() -> None:
    held = ledger(forward=2000.0, backward=4000.0, lost=1500.0)
    facts = evidence(ledger=held, checkpoints=(5, 5.0), attempts=2)
    cause = find("restart", facts)
    # Young: sqrt(2 x 1 s x 3752 s) = 87 s apart, at 6 s an update.
    assert cause is not None and cause.change == "--set every.save_steps=14"
    assert cause.share == pytest.approx(1500 / 7505, abs=0.01) and 0.9 * cause.share < cause.saves < cause.share


def test_a_loss_that_no_checkpoint_would_have_spared_changes_nothing() -> None:
    cause = find("restart", evidence(ledger=ledger(lost=4.0), checkpoints=(2, 4.0), attempts=2))
    assert cause is not None and cause.change == ""
    assert find("restart", evidence()) is None


def test_a_probe_that_was_interrupted_asks_for_no_checkpoints() -> None:
    held = ledger(forward=2000.0, backward=4000.0, lost=1500.0)
    cause = find("restart", evidence(ledger=held, checkpoints=(5, 5.0), attempts=2, lost_before_updates=1500.0))
    assert cause is not None and cause.change == "" and "checkpoint" not in str(cause)


def test_a_short_runs_start_is_nothing_to_mend() -> None:
    parts = {"process": 6.0, "model": 2.0, "data": 0.1}
    cause = find("startup", evidence(ledger=ledger(startup=8.0), started=started(startup=parts)))
    assert cause is not None and cause.is_usual and cause.evidence[0] == "process: 6.00 s"
    assert find("startup", evidence(ledger=ledger(startup=1.0))) is None


def test_a_model_that_takes_long_to_make_is_a_cause_of_its_own() -> None:
    parts = {"process": 6.0, "model": 12.5, "data": 0.1}
    cause = find("startup", evidence(ledger=ledger(startup=19.0), started=started(startup=parts)))
    assert cause is not None and not cause.is_usual
    assert cause.share == pytest.approx(12.5 / 84) and cause.sentence.startswith("Building the model took 12.5 s")


def _compiled(seconds: float, eager: float, compiled: float) -> Compiled:
    return Compiled(
        step=0,
        mode="default",
        seconds=seconds,
        graphs=1,
        breaks=("net.py:7: a print",),
        images=BATCH,
        eager_seconds=eager,
        compiled_seconds=compiled,
    )


def test_warming_up_is_usual_in_a_short_run() -> None:
    facts = evidence(ledger=ledger(warmup=10.0))
    assert find("compile", facts) is None, "nothing was compiled"
    cause = find("warmup", facts)
    assert cause is not None and cause.is_usual


def test_compiling_counts_against_a_run_that_is_too_short_to_earn_it() -> None:
    """A thousand updates that save 5 ms each: 5 s of the 20 that it took."""
    facts = evidence(ledger=ledger(warmup=35.0), compiled=_compiled(20.0, 0.065, 0.060))
    cause = find("compile", facts)
    assert cause is not None and not cause.is_usual
    assert cause.share == pytest.approx(0.2) and cause.saves == pytest.approx(0.15)
    assert "512,000 images; this run has 128,000" in cause.sentence and "net.py:7: a print" in cause.evidence
    assert find("compile", changed(facts, compiled=_compiled(4.9, 0.065, 0.060))) is None, "earned again"


def test_compiling_that_makes_it_slower_costs_more_than_its_own_seconds() -> None:
    cause = find("compile", evidence(ledger=ledger(warmup=35.0), compiled=_compiled(10.0, 0.060, 0.065)))
    assert cause is not None and cause.share == cause.saves == pytest.approx(0.15)
    assert "never pays off" in cause.sentence


def test_compiling_is_no_part_of_the_start() -> None:
    parts = {"process": 4.0, "model": 1.0, "compile": 30.0}
    cause = find("startup", evidence(ledger=ledger(startup=5.0, warmup=30.0), started=started(startup=parts)))
    assert cause is not None and "Starting took 5" in cause.sentence
    assert not any("compile" in figure for figure in cause.evidence)


def test_code_compiled_anew_shows_in_slow_updates_all_over_the_run() -> None:
    slow, long = ledger(forward=60.0, backward=50.0), times(seconds=(0.05, 0.055, 1.5))
    facts = evidence(ledger=slow, started=started(compile=True), updates=long)
    cause = find("recompile", facts)
    assert cause is not None and cause.share == pytest.approx(110 / 115 * (1 - 0.055 / 0.115), abs=0.01)
    assert find("recompile", evidence(ledger=slow, updates=long)) is None, "nothing is compiled"


def test_reading_the_data_before_the_first_update_is_storage() -> None:
    # 18 MB at 2 MB/s: half of a run of 18 s, and no part of the process's own start.
    held = replace(ledger(forward=2.0, backward=4.0, optimizer=2.0, startup=10.0))
    began = started(startup={"process": 1.0, "data": 9.0}, startup_waits={"data": 8.8}, startup_disk_bytes=18_000_000)
    cause = find("storage_start", evidence(ledger=held, started=began))
    assert cause is not None and cause.share == pytest.approx(8.8 / 18) and not cause.is_usual
    assert "18.0 MB from a disk, 2.0 MB per second" in cause.sentence
    packing = structs.replace(began, startup_disk_bytes=4096)
    assert find("storage_start", evidence(ledger=held, started=packing)) is None, "other processes were at work"


def test_waits_of_a_start_on_crowded_cores_are_not_the_disks() -> None:
    held = replace(ledger(forward=2.0, backward=4.0, optimizer=2.0, startup=10.0))
    began = started(startup={"process": 1.0, "data": 9.0}, startup_waits={"data": 8.8}, startup_disk_bytes=18_000_000)
    crowded = machine(pressure={"cpu": 1.0, "io": 0.03, "memory": 0.0})
    facts = evidence(ledger=held, started=began, whole=crowded)
    assert find("storage_start", facts) is None
    cause = find("startup", facts)
    assert cause is not None and cause.sentence.startswith("Opening the data took 9.00 s") and not cause.change
    both = machine(pressure={"cpu": 1.0, "io": 0.6, "memory": 0.0})
    assert find("storage_start", evidence(ledger=held, started=began, whole=both)) is not None, "the disk is, too"


def test_the_longest_part_of_a_start_is_in_its_sentence() -> None:
    held = replace(ledger(forward=100.0, startup=60.0))
    cause = find("startup", evidence(ledger=held, started=started(startup={"process": 45.8, "data": 13.3})))
    assert cause is not None and cause.share == pytest.approx(held.share("startup"))
    assert cause.sentence == "Starting took 1 min 00 s, 29 % of the time: process 45.8 s, data 13.3 s."
    usual = find("startup", evidence(ledger=held, started=started(startup={"process": 8.0, "data": 13.3})))
    assert usual is not None and usual.sentence.startswith("Opening the data took 13.3 s")


def test_code_and_checkpoints_that_wait_for_the_disk_of_the_images_are_storage_as_well() -> None:
    held = ledger(input_storage=100.0, checkpoint=13.0, measuring=7.0)
    facts = evidence(
        ledger=held,
        feed=feed(seconds=150.0, read=140.0, decode=5.0, asleep=0.92),
        machine=machine(cpu=0.7, idle=1.0, iowait=0.3, disk_read_bytes=12e6),
        checkpoints=(1, 13.0),
    )
    alone = find("storage", facts)
    looks = [("checkpoint", "disk", "", 12.5), ("measuring", "python", "<module> (triton/knobs.py:15)", 6.0)]
    looks += [("forward", "disk", "", 1.5), ("forward", "python", "<module> (sympy/core.py:1)", 9.0)]
    cause = find("storage", changed(facts, threads=threads(*looks, ran=60.0)))
    assert alone is not None and cause is not None
    assert cause.share == pytest.approx(alone.share + 20.0 / held.wall_seconds, abs=0.001)
    assert "waited another 20.0 s for it" in cause.sentence
    assert find("checkpoint", changed(facts, threads=threads(*looks, ran=60.0))) is None, "it is said already"
    assert find("checkpoint", facts) is not None


def test_libraries_that_come_from_a_slow_disk_are_storage_as_well() -> None:
    held = ledger(forward=2.0, backward=4.0, optimizer=2.0, startup=16.0)
    began = started(
        startup={"process": 1.0, "data": 5.0, "model": 9.0},
        startup_waits={"data": 4.8, "model": 8.8},
        startup_disk_bytes=18_000_000,
    )
    facts = evidence(ledger=held, started=began, threads=threads(("startup", "disk", "", 8.0), ran=60.0))
    cause = find("storage_start", facts)
    assert cause is not None and cause.share == pytest.approx(13.6 / 24) and find("startup", facts) is None
    assert "the data and the code" in cause.sentence
    asleep = changed(facts, threads=threads(("startup", "sleeps", "", 8.0), ran=60.0))
    cause = find("startup", asleep)
    assert cause is not None and cause.share == pytest.approx(9 / 24), "what waits for something else is no storage"


def test_a_start_that_waits_is_no_usual_one() -> None:
    held = ledger(forward=2.0, backward=4.0, optimizer=2.0, startup=4.0)
    began = started(startup={"process": 1.0, "model": 3.0}, startup_waits={"model": 2.9})
    cause = find("startup", evidence(ledger=held, started=began))
    assert cause is not None and not cause.is_usual and cause.share == pytest.approx(2.9 / 12)
    assert cause.sentence.startswith("Building the model waited 2.90 s")
    cause = find("startup", evidence(ledger=held, started=structs.replace(began, startup_waits={"model": 0.1})))
    assert cause is not None and cause.is_usual


def test_a_gpu_that_loads_its_kernels_waits_for_no_disk_or_lock() -> None:
    held = ledger(forward=2.0, backward=4.0, optimizer=2.0, startup=10.0)
    began = started(startup={"device": 3.0, "state": 6.0}, startup_waits={"state": 4.0}, device="H100")
    cause = find("startup", evidence(ledger=held, started=began))
    assert cause is not None and cause.is_usual and "because the run is short" in cause.sentence
    assert "device: 3.00 s" in cause.evidence
    slow = structs.replace(began, startup_waits={"model": 2.9})
    cause = find("startup", evidence(ledger=held, started=slow))
    assert cause is not None and cause.sentence.startswith("Building the model waited 2.90 s")


def test_code_that_runs_while_the_model_is_built_is_named() -> None:
    held = ledger(forward=2.0, backward=4.0, optimizer=2.0, startup=4.0)
    seen = threads(("startup", "python", "make (my/net.py:3)", 2.5), ran=60.0)
    cause = find("startup", evidence(ledger=held, started=started(startup={"model": 3.0}), threads=seen))
    assert cause is not None and not cause.is_usual and cause.share == pytest.approx(2.5 / 12)
    assert "make (my/net.py:3): 2.50 s" in cause.evidence


def test_a_process_that_was_stopped_says_so() -> None:
    cause = find("stopped", evidence(ledger=ledger(other=35.0), stopped=30.0))
    assert cause is not None and cause.share == pytest.approx(0.3)
    assert cause.sentence.startswith("The process was stopped for 30.0 s, 30 % of the time")
    throttled = machine(throttled_seconds=50.0)
    assert find("stopped", evidence(ledger=ledger(other=35.0), stopped=30.0, machine=throttled)) is None


def test_a_start_quotes_the_seconds_that_its_share_is_of() -> None:
    begun = started(startup={"model": 8.0, "process": 2.0}, startup_waits={"model": 1.5})
    cause = find("startup", evidence(ledger=ledger(startup=10.0), started=begun))
    assert cause is not None and cause.share == pytest.approx(8 / 75)
    assert cause.sentence == "Building the model took 8.00 s, 11 % of the time."
    assert "it waited 1.50 s for a network, a disk or a lock" in cause.evidence


def test_a_checkpoint_that_is_being_written_is_not_said_to_be_none() -> None:
    cause = find("checkpoint", evidence(ledger=ledger(checkpoint=20.0), checkpoints=(0, 0.0)))
    assert cause is not None and "Writing 1 checkpoint takes" in cause.sentence and cause.evidence == ()
