from __future__ import annotations

from dataclasses import replace

import pytest
from tests.monitor.rules.made import (
    changed,
    evidence,
    feed,
    find,
    ledger,
    machine,
    measured,
    on_gpu,
    recipe,
    started,
    threads,
    times,
)

from steadytrain.events import Accounted
from steadytrain.monitor.evidence import Grant, PartTimes


def test_one_core_of_several_that_is_always_busy_is_affinity() -> None:
    facts = evidence(machine=machine(cores=1, machine_cores=2, cpu=0.99, idle=0.01))
    cause = find("affinity", facts)
    assert cause is not None and "1 core of the machine's 2" in cause.sentence
    assert cause.share == pytest.approx(0.40, abs=0.02)
    assert find("quota", facts) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"cores": 2, "machine_cores": 2, "cpu": 1.99, "idle": 0.01},
        {"cores": 2, "machine_cores": 8, "cpu": 1.2, "idle": 0.8},
    ],
    ids=["all cores", "idle ones"],
)
def test_affinity_is_no_cause_where_it_takes_nothing(changes: dict[str, float]) -> None:
    assert find("affinity", evidence(machine=machine(**changes))) is None


def test_quota_is_distinguished_from_affinity_by_the_visible_cores() -> None:
    facts = evidence(machine=machine(cores=1, machine_cores=2, cpu=0.99, idle=1.0, throttled_seconds=0.0))
    cause = find("quota", facts)
    assert cause is not None and find("affinity", facts) is None
    assert cause.share == pytest.approx(0.40, abs=0.02)
    assert "--cpus=2" in cause.change


def test_a_quota_beside_busy_neighbours_is_a_quota_still() -> None:
    facts = evidence(machine=machine(cores=1, machine_cores=2, cpu=0.64, others=1.36, idle=0.0))
    assert find("quota", facts) is not None and find("affinity", facts) is None and find("model_waits", facts) is None


def test_throttled_time_adds_to_what_a_quota_costs() -> None:
    facts = evidence(machine=machine(cores=1, machine_cores=2, cpu=0.5, idle=1.4, throttled_seconds=50.0))
    cause = find("quota", facts)
    assert cause is not None and cause.share == pytest.approx(1 - 0.5 * 0.60, abs=0.02)
    assert "it was throttled 50 % of the time" in cause.evidence


def test_more_threads_than_cores_cost_what_was_measured() -> None:
    facts = evidence(started=started(compute_threads=16), measured=measured(full=0.05, passes={"threads=2": 0.04}))
    cause = find("oversubscription", facts)
    assert cause is not None and cause.change == "--set parallel.compute_threads=2"
    assert cause.share == pytest.approx(60 / 65 / 3, abs=0.01)
    assert find("oversubscription", evidence(started=started(compute_threads=16))) is None, "cores are idle"
    assert find("oversubscription", evidence(measured=measured(passes={"threads=2": 0.01}))) is None, "as many as cores"


def test_too_many_threads_on_full_cores_are_found_without_a_measured_pass() -> None:
    facts = evidence(started=started(compute_threads=16), machine=machine(cpu=1.95, idle=0.05))
    cause = find("oversubscription", facts)
    assert cause is not None and cause.share == pytest.approx(60 / 65 * (1 - 8**-0.35))
    assert "(estimated)" in cause.evidence[0]
    assert find("oversubscription", changed(facts, started=started(compute_threads=3))) is None, "too few to say"
    assert find("oversubscription", changed(facts, measured=measured(full=0.06, passes={"threads=2": 0.06}))) is None


def test_four_threads_on_two_cores_are_found_by_their_waits_for_a_core() -> None:
    facts = evidence(started=started(compute_threads=4), machine=machine(cpu=1.7, idle=0.3))
    assert find("oversubscription", facts) is None
    cause = find("oversubscription", changed(facts, threads=threads(ran=33.0, queued=22.0)))
    assert cause is not None and cause.share == pytest.approx(60 / 65 * (1 - 2**-0.35))


def test_threads_that_wait_for_each_other_are_no_sign_of_a_small_model() -> None:
    facts = evidence(ledger=ledger(host=40.0), measured=measured(fixed=0.04))
    assert find("launch", facts) is not None
    assert find("launch", changed(facts, started=started(compute_threads=8))) is None


def test_one_thread_that_computes_beside_an_idle_core() -> None:
    small = feed(decode=0.1)
    facts = evidence(started=started(compute_threads=1), machine=machine(cpu=1.0, idle=1.0), feed=small)
    cause = find("compute_threads", facts)
    assert cause is not None and cause.change == "--set parallel.compute_threads=2"
    assert find("compute_threads", evidence(started=started(compute_threads=1), machine=machine(idle=0.1))) is None
    tried = find("compute_threads", changed(facts, measured=measured(full=0.09, passes={"threads=2": 0.066})))
    assert tried is not None and tried.share == pytest.approx(60 / 65 * (1 - 66 / 90)), (
        "passes made one after the other"
    )
    assert find("compute_threads", changed(facts, measured=measured(full=0.09, passes={"threads=2": 0.09}))) is None


def test_a_second_compute_thread_gains_nothing_on_the_core_that_the_feed_needs() -> None:
    facts = evidence(
        started=started(compute_threads=1),
        machine=machine(cpu=1.45, idle=0.55),
        feed=feed(decode=29.0),  # 0.45 of a core
        measured=measured(full=0.06, passes={"threads=2": 0.046}),
    )
    cause = find("compute_threads", facts)
    assert cause is None or cause.share < 0.05, "passes alone would take 76 % of the time"
    fed = find("compute_threads", changed(facts, machine=machine(cpu=1.0, idle=1.0), feed=feed(decode=1.0)))
    assert fed is not None and fed.share == pytest.approx(60 / 65 * (1 - 46 / 60), abs=0.01)


def test_other_processes_on_a_full_machine_are_named_by_what_they_take() -> None:
    cause = find("noisy_neighbour", evidence(machine=machine(cpu=1.0, others=1.0, idle=0.0)))
    assert cause is not None and cause.share == pytest.approx(0.5, abs=0.01)
    assert "other processes" in cause.sentence.lower() and "stop the other processes" in cause.change


def test_the_processes_that_take_the_cores_are_named_in_the_verdict() -> None:
    burner = {"pid": 4242, "name": "python3", "user": "ann", "cores": 0.8}
    editor = {"pid": 77, "name": "vim", "user": "", "cores": 0.1}
    facts = evidence(machine=machine(cpu=1.0, others=1.0, idle=0.0, other_processes=(burner, editor)))
    cause = find("noisy_neighbour", facts)
    assert cause is not None
    assert "mostly python3 (pid 4242, user ann), take 1 core" in cause.sentence and "vim" not in cause.sentence
    assert cause.evidence[1:] == (
        "python3 (pid 4242, user ann) used 0.8 of 2 cores",
        "vim (pid 77) used 0.1 of 2 cores",
    )


def test_cores_taken_by_others_are_named_even_where_waits_of_threads_are_known() -> None:
    burner = {"pid": 4242, "name": "python3", "user": "", "cores": 1.0}
    editor = {"pid": 77, "name": "vim", "user": "", "cores": 0.1}
    full = machine(cpu=1.0, others=1.1, idle=0.0, other_processes=(burner, editor))
    cause = find("noisy_neighbour", evidence(machine=full, threads=threads(queued=30.0)))
    assert cause is not None
    assert "mostly python3 (pid 4242), take 1.1 cores that this run needs" in cause.sentence


def test_load_of_others_is_taken_from_all_ranks_of_the_machine() -> None:
    cause = find("noisy_neighbour", evidence(machine=machine(cpu=0.5, ranks=1.0, others=0.5, idle=0.0)))
    assert cause is not None and cause.share == pytest.approx(0.25, abs=0.01)


def test_steal_time_is_named_as_other_virtual_machines() -> None:
    cause = find("noisy_neighbour", evidence(machine=machine(cpu=1.2, steal=0.8, idle=0.0)))
    assert cause is not None and "other virtual machines" in cause.sentence.lower() and "another host" in cause.change


@pytest.mark.parametrize("idle", [0.5, 1.0])
def test_a_neighbour_beside_idle_cores_takes_nothing(idle: float) -> None:
    assert find("noisy_neighbour", evidence(machine=machine(cpu=1.0, others=1.0 - idle / 2, idle=idle))) is None


def test_beside_a_gpu_processors_cost_no_more_than_the_waiting_for_the_feed() -> None:
    facts = on_gpu(ledger=ledger(input_decode=10.0), machine=machine(cpu=1.0, others=1.0, idle=0.0))
    cause = find("noisy_neighbour", facts)
    assert cause is not None and cause.share <= 10 / 75


def test_pages_that_come_back_from_a_disk_are_memory_that_is_short() -> None:
    cause = find("memory", evidence(machine=machine(major_faults=1500.0, swap_bytes=6e6)))
    assert cause is not None and cause.share == pytest.approx(0.3)
    assert "1,500 pages per second" in cause.evidence[0]


def test_major_faults_of_mapped_files_are_no_want_of_memory() -> None:
    assert find("memory", evidence(machine=machine(major_faults=1500.0))) is None


def test_pressure_counts_where_it_is_more() -> None:
    cause = find("memory", evidence(machine=machine(pressure={"memory": 0.4})))
    assert cause is not None and cause.share == pytest.approx(0.4)
    assert find("memory", evidence(machine=machine(pressure={"memory": 0.02}))) is None


def test_run_that_fills_its_memory_limit_is_advised_to_split_batches() -> None:
    full = machine(pressure={"memory": 0.4}, memory_bytes=9 * 10**9, memory_limit_bytes=10**10, available_bytes=10**8)
    cause = find("memory", evidence(machine=full))
    assert cause is not None and cause.change == "--set optim.accumulate=2"
    cause = find("memory", evidence(machine=full, recipe=recipe(batch_size=25)))
    assert cause is not None and "stop other processes" in cause.change


def test_thousands_of_page_faults_and_a_busy_kernel_point_to_the_allocator() -> None:
    thrashing = machine(minor_faults=150_000.0, system_share=0.34)
    cause = find("allocator", evidence(machine=thrashing))
    assert cause is not None and cause.share == pytest.approx(0.48, abs=0.015)
    assert "150,000 page faults per second" in cause.evidence
    assert find("allocator", on_gpu(machine=thrashing)) is None


@pytest.mark.parametrize("changes", [{"minor_faults": 150_000.0}, {"system_share": 0.3}], ids=["cheap", "few"])
def test_one_sign_of_the_allocator_is_not_enough(changes: dict[str, float]) -> None:
    assert find("allocator", evidence(machine=machine(**changes))) is None


def test_others_that_take_hardly_a_core_are_never_a_cause() -> None:
    waits = threads(ran=30.0, queued=25.0)
    facts = evidence(machine=machine(cpu=1.6, others=0.03, idle=0.1), threads=waits)
    assert find("noisy_neighbour", facts) is None
    cause = find("noisy_neighbour", changed(facts, machine=machine(cpu=1.6, others=0.2, idle=0.1)))
    assert cause is not None and "take 0.2 cores" in cause.sentence
    assert cause.share <= 0.2, "nobody waited longer for others than they had a core"


def test_processes_are_called_most_of_it_only_where_they_are() -> None:
    others = [{"pid": pid, "name": f"job{pid}", "user": "ann", "cores": 0.25} for pid in (1, 2)]
    facts = evidence(machine=machine(cpu=0.8, others=1.2, idle=0.0, other_processes=others))
    cause = find("noisy_neighbour", facts)
    assert cause is not None and "among them job1 (pid 1, user ann), job2" in cause.sentence
    facts = evidence(machine=machine(cpu=0.8, others=0.6, idle=0.0, other_processes=others))
    cause = find("noisy_neighbour", facts)
    assert cause is not None and "mostly job1" in cause.sentence


def test_memory_is_not_said_to_be_read_back_where_no_page_is() -> None:
    cause = find("memory", evidence(machine=machine(pressure={"memory": 0.2}, major_faults=0.0)))
    assert cause is not None and "processes wait for it 20 % of the time" in cause.sentence
    cause = find("memory", evidence(machine=machine(pressure={"memory": 0.04}, major_faults=1000.0)))
    assert cause is not None and "reading evicted pages back" in cause.sentence


def grant(step: int, cores: int, seconds: float, quota: float = 0.0) -> Grant:
    return Grant(step=step, cores=cores, quota=quota, images=500 * 128, seconds=seconds)


def test_cores_that_were_taken_away_during_the_run_are_named_with_their_step() -> None:
    facts = evidence(grants=(grant(0, 2, 20.0), grant(500, 1, 45.0)), machine=machine(cores=1, cpu=0.9, idle=0.1))
    cause = find("affinity", facts)
    assert cause is not None and cause.share == pytest.approx(25 / 65)
    assert "CPU affinity changed while it trained: from step 500 it might use 1 core instead of 2" in cause.sentence
    assert cause.evidence[0] == "an update takes 90.0 ms with 1 core, 40.0 ms with 2 cores"


def test_updates_just_before_cores_were_taken_away_may_be_slow_already() -> None:
    fast = replace(times(), seconds=(0.03, 0.09, 0.1))
    facts = evidence(grants=(grant(0, 2, 20.0), grant(500, 1, 45.0)), updates=fast)
    cause = find("affinity", facts)
    assert cause is not None and cause.share == pytest.approx((45 - 500 * 0.03) / 65)
    assert cause.evidence[0] == "an update takes 90.0 ms with 1 core, 30.0 ms with 2 cores"


def test_a_quota_that_was_lifted_during_the_run_is_named_with_its_step() -> None:
    facts = evidence(grants=(grant(0, 2, 45.0, quota=1.2), grant(500, 2, 20.0)))
    cause = find("quota", facts)
    assert cause is not None and "until step 500 it might use 1.2 cores instead of 2" in cause.sentence
    assert find("affinity", facts) is None


def test_what_grows_meanwhile_is_not_put_down_to_cores_that_were_taken_away() -> None:
    parts = tuple(
        PartTimes(step=200 * at, images=200 * 128, seconds={"forward": forward / 4, "backward": backward / 4})
        for at, forward, backward in ((1, 0.03, 0.05), (2, 0.11, 0.1), (3, 0.15, 0.1), (4, 0.19, 0.1), (5, 0.23, 0.1))
    )
    facts = evidence(
        grants=(grant(0, 2, 12.0), grant(500, 1, 53.0)), machine=machine(cores=1, cpu=0.9, idle=0.1), parts=parts
    )
    shares = [cause.share if (cause := find(name, facts)) else 0.0 for name in ("affinity", "growth")]
    assert min(shares) > 0 and sum(shares) == pytest.approx(41 / 65), "together what updates take longer"


def test_cores_that_were_not_missed_are_no_cause() -> None:
    facts = evidence(grants=(grant(0, 2, 32.0), grant(500, 1, 33.0)))
    assert find("affinity", facts) is None and find("quota", facts) is None


def test_threads_that_the_models_code_has_set_are_named() -> None:
    accounted = Accounted(step=1000, images=128_000, wall_seconds=65.0, seconds={}, compute_threads=1)
    facts = evidence(machine=machine(cpu=1.0, idle=1.0), events={Accounted: accounted})
    cause = find("compute_threads", facts)
    assert cause is not None and "1 thread computes while 1 core are idle" not in cause.sentence
    assert cause.evidence[0] == "the run began with 2: its code has called torch.set_num_threads"
    assert cause.change == "leave torch.set_num_threads(1) out of the model's code"
    assert find("compute_threads", evidence(machine=machine(cpu=1.0, idle=1.0))) is None
