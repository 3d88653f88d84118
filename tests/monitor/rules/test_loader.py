from __future__ import annotations

import pytest
from msgspec import structs
from tests.monitor.rules.made import changed, evidence, feed, find, ledger, machine, started, threads, times

from steadytrain.monitor import Evidence
from steadytrain.monitor.evidence import Stretch


def test_one_thread_that_decodes_beside_an_idle_core_is_too_few() -> None:
    # 65 s of updates and 35 s of waiting: one thread decodes all the time, and a second one has a core to run on.
    facts = evidence(ledger=ledger(input_decode=35.0), feed=feed(decode=95.0), machine=machine(cpu=1.1, idle=0.9))
    cause = find("threads", facts)
    assert cause is not None and cause.change == "--threads 2"
    assert cause.share == pytest.approx(0.35)
    assert cause.saves == pytest.approx(0.35, abs=0.01)
    assert "the only loader thread spends 95 % of the time decoding images while 0.9 cores are idle" in cause.sentence
    assert find("decode", facts) is None


def test_what_the_loop_makes_itself_is_no_matter_of_threads() -> None:
    # 65 s of updates and 35 s of making batches, one after the other: a second thread has nothing to do.
    changed = structs.replace(feed(seconds=35.0, augment=25.0, batch=10.0), by_loop=True, starved=0)
    facts = evidence(ledger=ledger(input_decode=35.0), feed=changed, machine=machine(cpu=1.0, idle=1.0))
    assert find("threads", facts) is None and find("waiting", facts) is None
    cut, gathered = find("augment", facts), find("gather", facts)
    assert cut is not None and cut.share == pytest.approx(0.25) and cut.change == "" and cut.saves == 0
    assert gathered is not None and gathered.share == pytest.approx(0.10)
    assert "the training loop makes them itself" in cut.sentence and "more threads would not help" in cut.sentence


def test_threads_are_not_to_blame_where_no_core_is_left_for_more_of_them() -> None:
    facts = evidence(ledger=ledger(input_decode=35.0), feed=feed(decode=95.0), machine=machine(cpu=1.95, idle=0.05))
    assert find("threads", facts) is None
    cause = find("decode", facts)
    assert cause is not None and cause.share == pytest.approx(0.35)
    assert "of what the cores do, and updates wait for them" in cause.sentence


def test_a_feed_that_keeps_up_may_still_cost_the_update_its_cores() -> None:
    # The loop waits for nothing. Of the 1.8 cores in use 0.4 decode: alone, the update would take 1.4 / (2 * 0.87).
    facts = evidence(
        feed=feed(seconds=65.0, decode=26.0, bytes_each=500_000),
        machine=machine(cpu=1.8, idle=0.2, pressure={"cpu": 0.3}),
    )
    cause = find("decode", facts)
    assert cause is not None and cause.share == pytest.approx(1 - 1.4 / 1.74, abs=0.01)
    assert "and updates wait for them" in cause.sentence and cause.change.startswith("steady pack")
    assert find("threads", facts) is None and find("waiting", facts) is None
    calm = changed(facts, machine=machine(cpu=1.8, idle=0.2, pressure={"cpu": 0.01}))
    assert find("decode", calm) is None, "nothing waited for a core"
    assert find("decode", changed(facts, started=started(device="H100"))) is None, "no processor computes the update"


def test_a_thread_of_the_update_that_has_no_core_holds_all_of_them_up() -> None:
    # Two threads compute; for half of an update one of them is queued behind the feed's, and the other spins meanwhile.
    facts = evidence(
        feed=feed(seconds=65.0, decode=45.0, bytes_each=500_000),
        machine=machine(cpu=1.9, idle=0.1),
        threads=threads(queued=16.0, compute=(45.0, 16.0)),
    )
    cause = find("decode", facts)
    waited = 1 - (1 - 16 / 65) ** 2
    assert cause is not None and cause.share == pytest.approx(waited, abs=0.03)
    assert cause.saves > 0.7 * waited


def test_where_more_threads_are_no_cure_the_stage_is_the_cause_and_they_are_what_to_do() -> None:
    # Decoding takes 180 s of one thread beside 20 s of updates: two threads halve it, and it is still the feed.
    facts = evidence(
        ledger=ledger(input_augment=160.0, forward=5.0, backward=10.0),
        feed=feed(seconds=180.0, augment=175.0),
        machine=machine(cpu=1.1, idle=0.9),
    )
    cause = find("augment", facts)
    assert cause is not None and cause.change == "--threads 2"
    assert cause.share == pytest.approx(160 / 180, abs=0.03)
    assert cause.saves == pytest.approx(0.45, abs=0.06)


def test_a_stage_that_waits_needs_more_threads_and_no_cores() -> None:
    facts = evidence(
        ledger=ledger(input_decode=135.0),
        feed=feed(seconds=200.0, decode=195.0, asleep=0.95),
        machine=machine(cpu=0.7, idle=1.3),
    )
    cause = find("decode", facts)
    assert cause is not None and "waiting, not computing" in cause.sentence
    assert cause.change == "--threads 3" and cause.saves == pytest.approx(135 / 200, abs=0.03)
    assert find("threads", facts) is None


def test_a_stage_that_waits_for_a_core_is_slow_and_not_asleep() -> None:
    # The one thread decodes all the time, a fifth of it without a core: that is no waiting which more threads hide.
    slow = feed(seconds=160.0, decode=158.0, asleep=0.2)
    held, busy = ledger(input_decode=95.0), machine(cpu=1.5, others=0.25, idle=0.25)
    queued = threads(ran=40.0, queued=20.0, feed={"ran": 126.0, "queued": 31.0})
    cause = find("decode", evidence(ledger=held, feed=slow, machine=busy, threads=queued))
    asleep = find("decode", evidence(ledger=held, feed=slow, machine=busy, threads=threads(ran=40.0, queued=20.0)))
    assert cause is not None and asleep is not None and cause.share > 0.5 > 2 * asleep.share


def test_photographs_far_larger_than_needed_are_packed_smaller() -> None:
    facts = evidence(
        ledger=ledger(input_decode=135.0),
        feed=feed(seconds=200.0, decode=195.0, bytes_each=500_000),
        machine=machine(cpu=1.95, idle=0.05),
    )
    cause = find("decode", facts)
    assert cause is not None and cause.change == "steady pack photos.rec smaller --shorter-side 256"
    assert 0.3 < cause.saves <= cause.share


def test_small_images_are_stored_as_bare_pixels() -> None:
    facts = evidence(
        ledger=ledger(input_decode=25.0, forward=1.0, backward=2.0, optimizer=0.0),
        started=started(size=32),
        feed=feed(seconds=28.0, decode=27.0, bytes_each=2300),
        machine=machine(cpu=1.95, idle=0.05),
    )
    cause = find("decode", facts)
    assert cause is not None and cause.change == "steady pack photos.rec pixels --encoding raw"
    assert cause.saves == pytest.approx(cause.share, abs=0.05)


def test_a_decoder_that_is_far_slower_than_any_is_the_doctors_affair() -> None:
    facts = evidence(
        ledger=ledger(input_decode=1200.0),
        feed=feed(seconds=1265.0, decode=1260.0, bytes_each=20_000),
        machine=machine(cpu=1.95, idle=0.05),
    )
    cause = find("decode", facts)
    assert cause is not None and cause.change == "steady doctor"


def test_feed_work_that_nothing_waits_for_is_no_cause() -> None:
    facts = evidence(feed=feed(decode=30.0), machine=machine(cpu=1.97, idle=0.03))
    assert find("decode", facts) is None and find("threads", facts) is None and find("waiting", facts) is None


def test_waiting_below_three_percent_is_not_worth_a_word() -> None:
    def told(waited: float) -> Evidence:
        busy = feed(seconds=65 + waited, decode=64 + waited)
        return evidence(ledger=ledger(input_decode=waited), feed=busy, machine=machine(cpu=1.1, idle=0.9))

    assert find("threads", told(1.9)) is None
    assert find("threads", told(2.1)) is not None


def test_wait_with_no_busy_thread_is_a_cause_of_its_own() -> None:
    cause = find("waiting", evidence(ledger=ledger(input_other=20.0), feed=feed(decode=5.0)))
    assert cause is not None and "are busy only" in cause.sentence and "--probe" in cause.change
    cause = find("waiting", evidence(ledger=ledger(input_other=20.0), feed=None))
    assert cause is not None and cause.change == ""


def test_gathering_that_sleeps_is_named() -> None:
    facts = evidence(
        ledger=ledger(input_batch=35.0), feed=feed(batch=95.0, asleep=0.9), machine=machine(cpu=1.0, idle=1.0)
    )
    cause = find("gather", facts)
    assert cause is not None and cause.name == "gather"


def test_slow_first_passes_are_separated_from_later_ones() -> None:
    # Images are kept after the first pass: only there the feed is too slow.
    facts = evidence(
        ledger=ledger(input_decode=35.0),
        first=Stretch(
            shares={"input_decode": 0.58, "forward": 0.42},
            feed=feed(decode=95.0),
            machine=machine(cpu=1.1, idle=0.9),
        ),
        shares={"forward": 1.0},
        first_part=0.35 / 0.58,
        feed=feed(batch=2.0),
        machine=machine(cpu=1.9, idle=0.1),
    )
    cause = find("threads", facts)
    assert cause is not None and cause.share == pytest.approx(0.35, abs=0.01)


def test_updates_that_stand_still_around_an_epochs_first_batch_are_its_gap() -> None:
    # 390 updates an epoch: the ones before and after the first and the second begin with take 5 s instead of 65 ms.
    facts = evidence(
        ledger=ledger(input_other=10.0),
        updates=times(slowest={100: 0.07, 388: 5.07, 784: 5.07, 900: 0.07}),
        feed=feed(decode=5.0),
    )
    cause = find("epoch_gap", facts)
    assert cause is not None and cause.share == pytest.approx(10 / 75, abs=0.01)
    assert find("waiting", facts) is None
    facts = changed(facts, updates=times(slowest={100: 5.07, 600: 5.07}))
    assert find("epoch_gap", facts) is None and find("waiting", facts) is not None


def test_cutting_that_takes_far_more_than_usual_is_lost_where_the_cores_are_full() -> None:
    full = machine(cpu=1.97, idle=0.03, pressure={"cpu": 0.7})
    facts = evidence(feed=feed(augment=60.0), started=started(size=64), machine=full)
    cause = find("augment", facts)
    assert cause is not None and cause.change == "" and 0.2 < cause.share < 0.5
    assert find("augment", changed(facts, feed=feed(augment=20.0))) is None


def test_gap_between_epochs_is_reported_with_its_length() -> None:
    cause = find("epoch_gap", evidence(ledger=ledger(epoch_gap=10.0)))
    assert cause is not None and cause.evidence == ("5.00 s at each of 2 epochs",)
    assert find("epoch_gap", evidence(ledger=ledger(epoch_gap=1.0))) is None


def slow() -> Evidence:
    return evidence(
        ledger=ledger(input_storage=135.0),
        feed=feed(seconds=200.0, read=180.0, decode=15.0, asleep=0.92),
        machine=machine(cpu=0.7, idle=1.0, iowait=0.3, disk_read_bytes=12e6),
    )


def test_reading_that_waits_in_every_epoch_is_storage() -> None:
    cause = find("storage", slow())
    assert cause is not None and cause.share == pytest.approx(135 / 200, abs=0.03)
    assert cause.saves == cause.share and "cp photos.rec" in cause.change
    assert (
        find("storage_first_epoch", slow()) is None
        and find("threads", slow()) is None
        and find("decode", slow()) is None
    )


def test_who_uses_the_disks_beside_the_run_is_named() -> None:
    backup = {"pid": 12, "name": "rsync", "user": "root", "cores": 0.0, "disk_bytes": 90e6}
    editor = {"pid": 77, "name": "vim", "user": "ann", "cores": 0.1, "disk_bytes": 1e6}
    facts = slow()
    assert facts.machine is not None
    cause = find("storage", changed(facts, machine=structs.replace(facts.machine, other_processes=(backup, editor))))
    assert cause is not None
    assert cause.sentence.endswith("rsync (pid 12, user root) uses the disks of this machine as well.")
    assert "rsync (pid 12, user root) reads and writes 90.0 MB per second" in cause.evidence
    assert cause.change.startswith("stop the other processes that use the disk, or copy the images to a faster disk")


def test_reads_that_wait_only_in_the_first_epoch_are_reported_so() -> None:
    # The first of two and a half passes waits for 135 s of its 161, and its thread reads all the time.
    facts = evidence(
        ledger=ledger(input_storage=135.0),
        first=Stretch(
            shares={"input_storage": 0.84, "forward": 0.16},
            feed=feed(seconds=161.0, read=150.0, asleep=0.95, images=50_000),
            machine=machine(cpu=0.3, idle=1.0, iowait=0.7),
        ),
        shares={"forward": 1.0},
        first_part=0.8,
        feed=feed(decode=20.0),
    )
    cause = find("storage_first_epoch", facts)
    assert cause is not None and cause.name == "storage_first_epoch" and "afterwards" in cause.sentence
    assert cause.share == pytest.approx(135 / 200, abs=0.03)
    assert "cat photos.rec" in cause.change and find("storage", facts) is None


def test_page_fault_of_a_mapped_file_while_decoding_counts_as_storage() -> None:
    facts = evidence(
        ledger=ledger(input_decode=135.0),
        feed=feed(seconds=200.0, decode=195.0, asleep=0.92, bytes_each=20_000),
        machine=machine(cpu=0.7, idle=0.8, iowait=0.5, disk_read_bytes=12e6),
    )
    cause = find("storage", facts)
    assert cause is not None and find("decode", facts) is None
    assert "12.0 MB per second are read from a disk" in cause.evidence


def test_images_that_are_far_away_and_on_no_disk_want_more_threads() -> None:
    facts = changed(slow(), machine=machine(cpu=0.7, idle=1.3))
    cause = find("storage", facts)
    assert cause is not None and cause.change == "--threads 3" and cause.saves == pytest.approx(cause.share, abs=0.05)


def test_reading_waits_on_full_cores_as_well() -> None:
    facts = changed(slow(), machine=machine(cpu=0.6, others=1.4, idle=0.0))
    cause = find("storage", facts)
    assert cause is not None and cause.share == pytest.approx(135 / 200, abs=0.05)


def test_reading_from_memory_is_no_fault_of_storage() -> None:
    facts = evidence(ledger=ledger(input_storage=35.0), feed=feed(read=95.0), machine=machine(cpu=1.1, idle=0.9))
    assert find("storage", facts) is None and find("threads", facts) is not None
