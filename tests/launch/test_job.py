"""A job that cannot be started cannot be made, and hosts files are read as the old trackers and MPI read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.config.plain import build, plain
from steadytrain.errors import InputError
from steadytrain.launch import Job
from steadytrain.launch.job import Host, parse_host, read_hosts, spread


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"words": ()}, "-- train data.rec"),
        ({"words": ("trian",)}, "Did you mean train?"),
        ({"words": ("--restarts=0", "--", "train")}, "no flag --restarts: write --set restarts=0"),
        ({"words": ("--partition", "gpu")}, "no flag --partition: put flags"),
        ({"words": ("python",)}, "needs a program"),
        ({"words": ("train", "--procs", "2")}, "put it before them"),
        ({"words": ("train", "--procs=2")}, "put it before them"),
        ({"procs": 0}, "procs is 0"),
        ({"procs": 2, "ranks": 4}, "set processes per machine or the total, not both"),
        ({"least": 3, "nodes": 2}, "put the smaller number first"),
        ({"name": "My Job"}, "lower-case"),
        ({"env": {"A-B": "1"}}, "a variable's name"),
        ({"env": {"WANDB_API_KEY": "1"}}, "use --env WANDB_API_KEY, which passes it on unseen"),
        ({"folder": "a\nrm"}, "one line"),
        ({"python": "-c"}, "does not begin with a dash"),
        ({"hosts": ("a b",)}, "is not a host"),
        ({"hosts": ("-oProxyCommand=x",)}, "is not a host"),
        ({"restarts": -1}, "0 to 1000"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        Job(**{"words": ("train", "a.rec"), **values})


def test_a_job_goes_through_plain_data() -> None:
    job = Job(words=("steady", "train", "a.rec"), hosts=("gpu1 slots=2",), env={"A": None, "B": "1"})
    assert build(Job, plain(job)) == job
    assert job.words == ("train", "a.rec")


def test_jobs_meet_at_ports_of_their_own() -> None:
    first, other = (Job(words=("train", "a.rec", "--run", run)) for run in ("runs/a", "runs/b"))
    assert first.meeting_port != other.meeting_port and 20000 <= first.meeting_port < 30000
    assert Job(words=("train",), port=29500).meeting_port == 29500


HOSTS_FILE = """\
# gpus
10.0.0.1
node2:2222       # another port
me@node3 slots=4
node4 slots = 2 max_slots = 8
"""


def test_hosts_files_of_trackers_and_mpi_are_read() -> None:
    assert [parse_host(line) for line in read_hosts(HOSTS_FILE)] == [
        Host(name="10.0.0.1"),
        Host(name="node2", port=2222),
        Host(name="node3", user="me", slots=4),
        Host(name="node4", slots=2),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n# nobody\n", "lists no host"),
        ("a\nb c\n", "hosts, line 2: 'b c' is not a host"),
        ("a\na\n", "hosts, line 2: a is listed twice"),
        ("a slots=2\na slots=4\n", "hosts, line 2: a is listed twice"),
        ("a:70000\n", "ports are 1 to 65535"),
        ("[fe80::1]:22\n", "use the machine's name"),
        ("a slots=0\n", "slots=N (1 or more)"),
        ("a cores=2\n", "may follow"),
        ("$(touch x)\n", "is not a host"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_hosts(text, "hosts")
    assert message in str(caught.value)


@given(st.integers(1, 8), st.integers(1, 64))
def test_each_rank_has_one_place(hosts: int, ranks: int) -> None:
    machines = spread([Host(name=f"n{place}") for place in range(hosts)], None, ranks)
    assert [rank for machine in machines for rank in range(machine.first, machine.first + machine.procs)] == list(
        range(ranks)
    )
    counts = [machine.procs for machine in machines]
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
