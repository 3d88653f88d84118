"""Who trains and who feeds, from trees of processes as the usual ways of starting them make."""

from __future__ import annotations

from steadytrain.monitor.process_watch import MachineLoad, Moment, ProcessLoad, ThreadLoad
from steadytrain.monitor.process_watch.summary import find_restarts, find_roles, group_workers

SPAWNED = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"
SERVER = "python -c from multiprocessing.forkserver import main; main(18, 19)"
TRACKER = "python -c from multiprocessing.resource_tracker import main;main(6)"


def process(pid: int, parent: int, command: str, cpu: float = 0.0, devices: tuple[str, ...] = ()) -> ProcessLoad:
    thread = ThreadLoad(tid=pid, name="python", cpu=cpu)
    return ProcessLoad(
        pid=pid,
        parent=parent,
        name=command.split()[0],
        command=command,
        cpu=cpu,
        threads=(thread,),
        memory_bytes=pid << 20,
        devices=devices,
    )


def moments(*processes: ProcessLoad) -> list[Moment]:
    machine = MachineLoad(cores=8, processors=8)
    return [Moment(at=0.1 * n, seconds=0.1, processes=processes, machine=machine) for n in range(1, 31)]


def test_forked_workers_run_their_parents_program() -> None:
    workers = [process(10 + n, 2, "python train.py", 0.9) for n in range(4)]
    tree = moments(process(1, 0, "bash run.sh"), process(2, 1, "python train.py", 0.1), *workers)
    assert find_roles(tree) == ({2}, {10, 11, 12, 13})
    assert [[process.pid for process, _ in group][:2] for group in group_workers(tree, {10, 11, 12, 13})] == [
        *([10, 10], [11, 11], [12, 12], [13, 13])
    ]


def test_spawned_workers_call_themselves_so_and_the_tracker_is_none() -> None:
    tree = moments(process(2, 1, "python train.py", 0.5), process(3, 2, TRACKER), process(4, 2, SPAWNED, 0.9))
    assert find_roles(tree) == ({2}, {4})


def test_a_server_that_forks_workers_is_not_whom_they_work_for() -> None:
    tree = moments(
        process(2, 1, "python train.py", 0.5),
        process(3, 2, SERVER),
        process(4, 3, SERVER, 0.9),
        process(5, 3, SERVER, 0.9),
    )
    assert find_roles(tree) == ({2}, {4, 5})


def test_spawned_ranks_that_hold_gpus_train_and_their_workers_work() -> None:
    gpus = ("nvidia0", "nvidia1")
    tree = moments(
        process(2, 1, "python train.py"),
        process(3, 2, SPAWNED, 0.6, gpus),
        process(4, 2, SPAWNED, 0.6, gpus),
        process(5, 3, SPAWNED, 0.9, gpus),  # forked by a rank
    )
    assert find_roles(tree) == ({3, 4}, {5})


def test_spawned_children_of_a_parent_that_only_waits_train() -> None:
    tree = moments(process(2, 1, "python train.py"), process(3, 2, SPAWNED, 1.0), process(4, 2, SPAWNED, 1.0))
    assert find_roles(tree) == ({3, 4}, set())


def test_ranks_of_a_launcher_train() -> None:
    ranks = [process(10 + n, 2, f"python -u train.py --rank {n}", 0.8) for n in range(2)]
    assert find_roles(moments(process(2, 1, "python torchrun train.py", 0.01), *ranks)) == ({10, 11}, set())


def test_a_process_that_sleeps_is_found_by_its_memory() -> None:
    assert find_roles(moments(process(2, 1, "bash run.sh"), process(30, 2, "python train.py"))) == ({30}, set())


def test_moments_after_a_restart_of_workers_are_marked() -> None:
    first = moments(process(2, 1, "python train.py", 0.5), process(4, 2, SPAWNED, 0.9))
    later = [
        Moment(
            at=child.at + 3.0,
            seconds=0.1,
            processes=(child.processes[0], process(7, 2, SPAWNED, 0.9)),
            machine=child.machine,
        )
        for child in first
    ]
    restarts = find_restarts([*first, *later], {4, 7}, 1.0)
    assert not any(restarts[:30]) and sum(restarts) in (10, 11) and all(restarts[30:40])
