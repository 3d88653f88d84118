from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs
from tests.monitor.rules.made import (
    changed,
    evidence,
    feed,
    find,
    ledger,
    machine,
    measured,
    on_gpu,
    started,
    threads,
    times,
)

from steadytrain.monitor import Evidence, diagnose
from steadytrain.monitor.evidence import Company, PartTimes
from steadytrain.monitor.rules.host import loop_time

NET = "forward (mynets/net.py:12)"
REPORTER = ({"name": "reporter", "ran": 90.0, "place": "report (my/report.py:7)"},)


def first(evidence: Evidence) -> str:
    return diagnose(evidence).causes[0].name


def test_sleep_in_the_forward_pass_is_a_wait_not_decoding_or_launching() -> None:
    # 30 of 65 s are slept: the fixed cost of a pass, measured with the sleep in it, looks like many launches.
    facts = evidence(
        ledger=ledger(forward=5.0, backward=10.0, host=45.0),
        measured=measured(full=0.06, fixed=0.045, operations=50),
        feed=feed(decode=30.0),
        machine=machine(cpu=0.9, idle=1.1),
        threads=threads(("forward", "sleeps", NET, 45.0), ran=18.0),
    )
    cause = find("model_waits", facts)
    assert cause is not None and cause.share == pytest.approx(45 / 65, abs=0.01)
    assert NET in cause.sentence and NET in cause.change and first(facts) == "model_waits"
    assert find("launch", facts) is None and find("decode", facts) is None


def test_a_sound_network_beside_a_busy_machine_does_not_wait() -> None:
    # Half of the time its thread is ready to run, and another process has the core.
    facts = evidence(
        machine=machine(cpu=0.9, others=1.1, idle=0.0, pressure={"cpu": 0.95}),
        threads=threads(("backward", "python", NET, 2.0), ran=31.5, queued=33.0),
        feed=None,
    )
    assert find("model_waits", facts) is None and find("unexplained", facts) is None
    cause = find("noisy_neighbour", facts)
    assert cause is not None and cause.share == pytest.approx(32 / 65, abs=0.02)


def test_threads_that_take_turns_are_not_blamed_on_others() -> None:
    facts = evidence(
        machine=machine(cpu=1.9, others=0.1, idle=0.0),
        started=started(compute_threads=16),
        threads=threads(ran=30.0, queued=34.0),
        feed=None,
    )
    assert find("noisy_neighbour", facts) is None and find("oversubscription", facts) is not None


def test_a_wait_for_storage_beside_a_busy_machine_is_not_blamed_on_others() -> None:
    held = ledger(forward=5.0, backward=10.0, optimizer=5.0, input_storage=60.0)
    busy = machine(cpu=0.3, others=1.7, idle=0.0)
    reads = feed(seconds=80.0, read=70.0, asleep=0.95)
    facts = evidence(ledger=held, machine=busy, feed=reads, threads=threads(ran=64.0, queued=0.5, feed={"queued": 2.0}))
    assert find("noisy_neighbour", facts) is None and first(facts) == "storage"
    late = changed(facts, threads=threads(ran=64.0, queued=0.5, feed={"queued": 80.0}))
    assert find("noisy_neighbour", late) is not None, "here the loader's thread had no core to read with"


def test_neighbours_that_take_nothing_from_the_run_are_no_cause() -> None:
    # Two programs at nice 19 fill what is left: the machine is under pressure, the run's own threads never wait.
    facts = evidence(
        machine=machine(cpu=1.5, others=0.5, idle=0.0, pressure={"cpu": 0.99}),
        threads=threads(ran=62.0, queued=0.3),
    )
    assert find("noisy_neighbour", facts) is None
    assert find("noisy_neighbour", changed(facts, threads=None)) is not None, "by pressure, where nobody looked"


def test_neighbours_of_the_first_pass_alone_are_a_cause_too() -> None:
    facts = evidence(
        machine=machine(cpu=1.8, others=0.0, idle=0.2),  # of later passes
        whole=machine(cpu=1.3, others=0.65, idle=0.05),
        threads=threads(ran=37.0, queued=20.0),
    )
    cause = find("noisy_neighbour", facts)
    assert cause is not None and "take 0.7 cores" in cause.sentence and "the run uses 1.30" in cause.evidence[0]


def test_the_loader_holds_updates_up_no_longer_than_their_threads_wait_for_a_core() -> None:
    facts = evidence(
        feed=feed(seconds=65.0, decode=50.0, bytes_each=1000),
        machine=machine(cpu=1.99, idle=0.01, pressure={"cpu": 0.9}),
    )
    assert find("decode", facts) is not None
    assert find("decode", changed(facts, threads=threads(ran=64.0, queued=0.5))) is None


def test_code_that_runs_in_the_loop_is_named_by_file_and_line() -> None:
    facts = evidence(threads=threads(("forward", "runs", "crc (my/net.py:3)", 20.0), ran=63.0))
    cause = find("host_code", facts)
    assert (
        cause is not None and cause.share == pytest.approx(20 / 65, abs=0.01) and "crc (my/net.py:3)" in cause.sentence
    )
    # Python code is where a look finds it waiting for the lock, though the thread ran all the time.
    facts = evidence(threads=threads(("forward", "python", NET, 20.0), ran=64.5))
    cause = find("host_code", facts)
    assert cause is not None and cause.share == pytest.approx(20 / 65, abs=0.02)
    facts = evidence(threads=threads(("forward", "python", NET, 20.0), ran=44.0))
    cause = find("model_waits", facts)
    assert cause is not None and cause.share == pytest.approx(20 / 65, abs=0.02), "it did not run: it waits for a lock"


def test_python_code_between_operations_is_found_by_the_lock_it_holds() -> None:
    # It lets go of the lock only where it calls the next operation: whose it is shows where it was called from.
    facts = evidence(
        ledger=ledger(optimizer=25.0),
        threads=threads(("optimizer", "holds", "", 18.0), ("optimizer", "computes", "", 5.0), seconds=85.0, ran=84.0),
    )
    cause = find("host_code", facts)
    assert cause is not None and cause.share == pytest.approx(18 / 85, abs=0.01)
    assert "Python code of the optimizer part" in cause.sentence
    assert find("optimizer", facts) is None, "what is left of it is usual"


def test_python_code_of_a_backward_pass_is_found_by_the_lock_it_holds() -> None:
    # Frames of a backward pass show nothing of it: more looks than usual had to wait for the lock.
    facts = evidence(threads=threads(("backward", "holds", "", 40.0), ran=64.0))
    cause = find("host_code", facts)
    assert cause is not None and cause.share == pytest.approx(40 / 65 - 0.25, abs=0.01)
    assert "backward() in Python" in cause.sentence
    usual = evidence(threads=threads(("backward", "holds", "", 18.0), ran=64.0))
    assert find("host_code", usual) is None


def test_whoever_launches_operations_on_a_gpu_keeps_the_lock_and_is_no_code_of_others() -> None:
    looks = threads(("forward", "holds", NET, 20.0), ("forward", "holds", "", 10.0), ran=64.0)
    causes = diagnose(on_gpu(ledger=ledger(forward=2.0, backward=4.0, host=40.0), threads=looks)).causes
    assert causes[0].name == "launch" and "host_code" not in {cause.name for cause in causes}
    held = structs.replace(looks, loop={"forward": {"seconds": 10.0, "ran": 4.0, "queued": 0.0}})
    first_cause = diagnose(on_gpu(ledger=ledger(forward=2.0, backward=4.0, host=40.0), threads=held)).causes[0]
    assert any("waits 60 % of a forward pass for the interpreter's lock" in fact for fact in first_cause.evidence)
    assert any(fact.endswith("(other threads)") for fact in first_cause.evidence), "no loader's thread was seen here"
    fed = structs.replace(held, feed={"ran": 5.0, "queued": 0.0})
    first_cause = diagnose(on_gpu(ledger=ledger(forward=2.0, backward=4.0, host=40.0), threads=fed)).causes[0]
    assert any(fact.endswith("(the loader's threads)") for fact in first_cause.evidence)


def test_lines_that_call_torch_are_no_code_of_others() -> None:
    facts = evidence(threads=threads(("forward", "python", NET, 3.0), ("backward", "python", "", 5.0), ran=64.5))
    assert [cause.name for cause in diagnose(facts).causes] == ["nothing"]


def test_a_thread_that_keeps_pythons_lock_is_named() -> None:
    # The training thread ran for 6 of 65 s; no thread computed for it, and another one ran Python code all the time.
    facts = evidence(
        machine=machine(cpu=1.1, idle=0.9),
        threads=threads(
            ("forward", "python", NET, 25.0),
            ("backward", "python", "", 30.0),
            ran=6.0,
            compute=(5.0, 0.0),
            others=REPORTER,
            lock_seconds=5.0,
        ),
    )
    cause = find("busy_thread", facts)
    assert cause is not None and cause.share == pytest.approx(55 / 65, abs=0.02) and first(facts) == "busy_thread"
    assert "reporter" in cause.sentence and "report (my/report.py:7)" in cause.sentence
    assert "5.0 ms for Python's lock" in cause.evidence[2]


def test_unexplained_time_comes_first() -> None:
    # Updates take three times as long as the same passes alone, and an evaluation is all that is found.
    facts = evidence(
        ledger=ledger(evaluation=12.0),
        evaluations=(30, 12.0),
        measured=measured(full=0.015, fixed=0.001),
        threads=threads(ran=64.0),
    )
    causes = diagnose(facts).causes
    assert causes[0].name == "unexplained" and causes[0].share == pytest.approx(45 / 77, abs=0.01)
    assert causes[0].sentence.startswith("58 % of the time is unexplained") and "py-spy" in causes[0].change
    assert any("preempted" in figure for figure in causes[0].evidence)
    assert any("page faults" in figure for figure in causes[0].evidence)


@pytest.mark.parametrize(
    "changes",
    [
        {"started": started(threads_seconds={"1": 0.03, "2": 0.012})},
        {"updates": times(fast=0.02)},
    ],
    ids=["before the run", "the fastest quarter"],
)
def test_each_reference_shows_that_updates_take_too_long(changes: dict[str, object]) -> None:
    assert first(evidence(threads=threads(ran=64.0), **changes)) == "unexplained"


def test_explained_time_is_not_reported_as_unexplained() -> None:
    facts = evidence(
        measured=measured(full=0.03, fixed=0.001),
        machine=machine(cpu=0.9, others=1.1, idle=0.0),
        threads=threads(ran=33.0, queued=31.0),
    )
    assert find("unexplained", facts) is None and first(facts) == "noisy_neighbour"


def test_neighbours_that_leave_it_its_cores_may_slow_the_run_all_the_same() -> None:
    facts = evidence(
        measured=measured(full=0.03, fixed=0.001),
        machine=machine(cpu=1.0, others=0.9),
        threads=threads(ran=64.0, compute=(63.0, 0.0)),
    )
    cause = find("noisy_neighbour", facts)
    assert cause is not None and cause.share == pytest.approx(30 / 65, abs=0.01) and find("unexplained", facts) is None
    assert "Other processes use 0.9 cores, and updates take longer meanwhile" in cause.sentence
    large = machine(cores=64, machine_cores=64, cpu=1.0, others=0.9, idle=62.0)
    for alone in (
        changed(facts, machine=machine(cpu=1.0, others=0.0)),
        changed(facts, machine=large, started=started(compute_threads=64)),
    ):
        unexplained = find("unexplained", alone)
        assert find("noisy_neighbour", alone) is None and unexplained is not None
        assert any("the processor was slower" in figure for figure in unexplained.evidence)


def test_neighbours_cost_what_updates_take_longer_while_they_are_at_work() -> None:
    facts = evidence(
        measured=measured(full=0.03, fixed=0.001),
        machine=machine(cpu=1.0, others=0.9),
        threads=threads(ran=64.0, compute=(63.0, 0.0)),
    )
    slower = changed(facts, company=Company(alone=(1000, 10.0), beside=(4000, 55.0)))
    cause = find("noisy_neighbour", slower)
    assert cause is not None and cause.share == pytest.approx(15 / 65, abs=0.01)
    same = changed(facts, company=Company(alone=(1000, 13.0), beside=(4000, 52.0)))
    assert find("noisy_neighbour", same) is None, "updates took as long before they came"
    assert first(same) == "unexplained", "and what they take longer is not passed over"
    hardly = changed(facts, company=Company(alone=(10, 0.1), beside=(4990, 64.9)))
    assert find("noisy_neighbour", hardly) == find("noisy_neighbour", facts), "ten images are nothing to compare with"


def stretches(*times: tuple[float, float]) -> tuple[PartTimes, ...]:
    """Equal stretches: seconds of the forward and the backward pass."""
    return tuple(
        PartTimes(step=200 * number, images=200 * 128, seconds={"forward": forward, "backward": backward})
        for number, (forward, backward) in enumerate(times, 1)
    )


def test_a_processor_that_is_slower_for_a_while_is_nothing_that_the_run_does() -> None:
    # A core of a virtual machine is half as fast while another guest computes on the same one: nothing waits for it.
    facts = evidence(updates=times(fast=0.035), threads=threads(ran=64.0, compute=(63.0, 0.0)))
    evenly = stretches((0.012, 0.023), (0.024, 0.046), (0.024, 0.046), (0.023, 0.047), (0.012, 0.023))
    assert first(facts) == "unexplained"
    verdict = diagnose(changed(facts, parts=evenly)).causes[0]
    assert verdict.name == "nothing" and "70 ms instead of 35 ms" in verdict.evidence[-1].replace(".0", "")
    assert "the processor was slower" in verdict.evidence[-1]
    beside = diagnose(changed(facts, parts=evenly, feed=None, machine=machine(cpu=1.0, others=1.0, idle=0.0)))
    assert "the processor was slower" in beside.causes[0].evidence[-1], "whatever else there is"
    unevenly = stretches((0.012, 0.023), (0.012, 0.058), (0.012, 0.058), (0.012, 0.058), (0.012, 0.023))
    assert first(changed(facts, parts=unevenly)) == "unexplained", "one part alone took longer"
    waited = changed(facts, parts=evenly, threads=threads(("backward", "python", "", 30.0), ran=36.0))
    assert first(waited) == "unexplained", "its thread was on no processor"
    never = changed(facts, parts=evenly, measured=measured(full=0.01, fixed=0.001))
    assert first(never) == "unexplained", "not even its fastest updates come near the passes alone"


def test_of_three_references_one_alone_proves_nothing() -> None:
    facts = evidence(
        measured=measured(full=0.02, fixed=0.001),
        started=started(threads_seconds={"1": 0.11, "2": 0.055}),
        threads=threads(ran=64.0),
    )
    assert first(changed(facts, updates=times(fast=0.06))) == "nothing"
    assert first(changed(facts, updates=times(fast=0.03))) == "unexplained"


def test_a_few_looks_at_python_code_are_chance() -> None:
    code = ("forward", "runs", NET, 5.0)
    assert find("host_code", evidence(threads=threads(code, ran=63.0, looks=150))) is None
    assert find("host_code", evidence(threads=threads(code, ran=63.0, looks=5000))) is not None


def test_waiting_for_a_core_is_explained_even_where_nothing_can_be_done() -> None:
    facts = evidence(updates=times(fast=0.03), feed=None, machine=machine(cpu=2.0, others=0.0, idle=0.0))
    assert find("unexplained", changed(facts, threads=threads(ran=64.0))) is not None
    assert find("unexplained", changed(facts, threads=threads(ran=40.0, queued=24.0))) is None


def test_a_pass_is_late_where_any_of_its_threads_is() -> None:
    # Each of two waits a third of the time for a core, at moments of its own.
    loop = loop_time(evidence(threads=threads(ran=44.0, queued=21.67, compute=(40.0, 21.67))))
    assert loop is not None and loop.queued / loop.passes == pytest.approx(1 - (2 / 3) ** 2, abs=0.01)


def test_a_wait_that_nothing_is_known_of_is_unexplained() -> None:
    facts = evidence(threads=threads(("backward", "python", "", 30.0), ran=36.0))
    cause = find("unexplained", facts)
    assert cause is not None and cause.share == pytest.approx(29 / 65, abs=0.02)


def test_below_three_points_or_a_second_nothing_stands_out() -> None:
    held = {name: value / 10 for name, value in ledger().seconds.items()}
    short = replace(ledger(), seconds=held, wall_seconds=6.5)  # 4 % of it are 0.26 s
    facts = evidence(ledger=short, threads=threads(("forward", "sleeps", NET, 2.6), ran=62.0))
    assert first(facts) == "nothing"
    long = evidence(threads=threads(("forward", "sleeps", NET, 2.6), ran=62.0))
    assert first(long) == "model_waits"


def test_a_run_that_was_not_looked_at_has_no_such_causes() -> None:
    assert loop_time(evidence()) is None
    assert not {"model_waits", "host_code", "busy_thread"} & {cause.name for cause in diagnose(evidence()).causes}
