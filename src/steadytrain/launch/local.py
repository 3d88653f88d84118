"""This machine: ``steady train --procs N``, which starts its ranks by itself."""

from __future__ import annotations

from steadytrain.errors import InputError
from steadytrain.launch.job import Job, is_python
from steadytrain.launch.plan import Command, Launcher, Plan, PlanStage, node_command


def render(job: Job) -> Plan:
    """Render one command."""
    nodes, procs = job.shape
    if nodes != 1 or job.hosts:
        raise InputError(
            f"--on local starts ranks on this machine only, not on {nodes}: use --procs N, or --on ssh "
            "with --hosts FILE"
        )
    if is_python(job.words[0]):
        argv = (job.python, *node_command(job, "--first", "0", procs=procs, address="127.0.0.1"))
        restarts = job.num_restarts
    else:
        verb, *rest = job.words
        words = (verb, "--procs", str(procs), *rest)
        restarts = job.num_restarts if job.is_independent else 0
        if job.restarts is not None and verb not in ("bandwidth", "pack"):
            words += ("--set", f"parallel.restarts={job.restarts}")
        argv = (job.python, "-P", "-m", "steadytrain", *words)
    run = PlanStage(kind="run", commands=(Command(argv=argv, variables=job.env),), restarts=restarts)
    return Plan(stages=(run,))


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"ranks", "port", "restarts", "keep", "grace_seconds"}),
)
