"""What starts the ranks of one machine: our own, which tells how they ended, or torchrun's agent.

torchrun's exit code is 1 whatever happened, so its agent is taken only where machines may come and go. By default it
shares a store with its ranks, in which those of the next attempt find addresses of the last one
(pytorch/pytorch#135712): ``ELASTIC`` has to be in its environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steadytrain.launch.job import Job, is_python

ELASTIC: Mapping[str, str] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONSAFEPATH": "1"}
_NODE = ("-P", "-m", "steadytrain.launch.node")
_RANK = ("-P", "-m", "steadytrain.launch.rank")


def node(job: Job, *flags: str, procs: int, address: str, port: int | None = None) -> tuple[str, ...]:
    """What follows the interpreter to start ``procs`` ranks of a job; ``flags``: which, and how they are held."""
    shape = ("--size", str(job.size), "--procs", str(procs), *flags)
    meeting = ("--address", address, "--port", str(port or job.meeting_port), "--grace", str(job.grace_seconds))
    return (*_NODE, *shape, *meeting, "--", *job.program)


def rank(job: Job) -> tuple[str, ...]:
    """What follows the interpreter where MPI or a scheduler starts each rank by itself.

    Verbs of steady read what those say of it; a program of the user's own is told in torchrun's words.
    """
    return (*_RANK, "--", *job.program) if is_python(job.words[0]) else job.program


def torchrun(job: Job, *flags: str, procs: int, meeting: Sequence[str]) -> tuple[str, ...]:
    """What follows the interpreter to start torchrun's agent; ``meeting``: its options for how the agents meet."""
    agent = ("-m", "torch.distributed.run", *meeting, f"--nproc-per-node={procs}", f"--max-restarts={job.restarts}")
    # After two dashes: torchrun would take --run for the beginning of its own --run-path.
    program = ("--", *job.program) if is_python(job.words[0]) else ("-m", "--", "steadytrain", *job.words)
    return (*_NODE, "--alone", *flags, "--grace", str(job.grace_seconds), "--", *agent, *program)
