from __future__ import annotations

from dataclasses import replace

import pytest
from tests.monitor.rules.made import evidence, feed, ledger, machine

from steadytrain.monitor import Evidence
from steadytrain.monitor.rules.feed import decode, threads
from steadytrain.monitor.rules.storage import first_epoch, storage


def slow() -> Evidence:
    return evidence(
        ledger=ledger(input_storage=135.0),
        feed=feed(seconds=200.0, read=180.0, decode=15.0, asleep=0.92),
        machine=machine(cpu=0.7, idle=1.0, iowait=0.3, disk_read_bytes=12e6),
    )


def test_reading_that_waits_in_every_epoch_is_storage() -> None:
    cause = storage(slow())
    assert cause is not None and cause.share == pytest.approx(135 / 200, abs=0.03)
    assert cause.saves == cause.share and "cp photos.rec" in cause.change
    assert first_epoch(slow()) is None and threads(slow()) is None and decode(slow()) is None


def test_reading_that_waits_in_the_first_epoch_only_is_told_as_such() -> None:
    # The first of two and a half passes waits for 135 s of its 161, and its thread reads all the time.
    told = evidence(
        ledger=ledger(input_storage=135.0),
        first_epoch={"input_storage": 0.84, "forward": 0.16},
        later={"forward": 1.0},
        feed_first=feed(seconds=161.0, read=150.0, asleep=0.95, images=50_000),
        machine_first=machine(cpu=0.3, idle=1.0, iowait=0.7),
        feed=feed(decode=20.0),
    )
    cause = first_epoch(told)
    assert cause is not None and cause.name == "storage_first_epoch" and "afterwards" in cause.sentence
    assert cause.share == pytest.approx(135 / 200, abs=0.03)
    assert "cat photos.rec" in cause.change and storage(told) is None


def test_a_page_of_a_mapped_file_that_is_waited_for_while_decoding_is_storage_all_the_same() -> None:
    told = evidence(
        ledger=ledger(input_decode=135.0),
        feed=feed(seconds=200.0, decode=195.0, asleep=0.92, bytes_each=20_000),
        machine=machine(cpu=0.7, idle=0.8, iowait=0.5, disk_read_bytes=12e6),
    )
    cause = storage(told)
    assert cause is not None and decode(told) is None
    assert "12.0 MB a second come from a disk" in cause.evidence


def test_images_that_are_far_away_and_on_no_disk_want_more_threads() -> None:
    told = replace(slow(), machine=machine(cpu=0.7, idle=1.3))
    cause = storage(told)
    assert cause is not None and cause.change == "--threads 3" and cause.saves == pytest.approx(cause.share, abs=0.05)


def test_reading_waits_on_full_cores_as_well() -> None:
    told = replace(slow(), machine=machine(cpu=0.6, others=1.4, idle=0.0))
    cause = storage(told)
    assert cause is not None and cause.share == pytest.approx(135 / 200, abs=0.05)


def test_reading_from_memory_is_no_fault_of_storage() -> None:
    told = evidence(ledger=ledger(input_storage=35.0), feed=feed(read=95.0), machine=machine(cpu=1.1, idle=0.9))
    assert storage(told) is None and threads(told) is not None
