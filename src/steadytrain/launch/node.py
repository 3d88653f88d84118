"""The ranks of one machine: started, heard, and ended together.

``python -m steadytrain.launch.node --size 4 --procs 2 --first 2 --address gpu1 --port 29500 -- -m steadytrain train``

Each rank is this interpreter with the words after the dashes; environment variables tell it which rank it is. Rank 0's
standard output is passed on as it is; every other line goes out behind ``[rank machine]``. Where a rank ends badly, or
this process is told to end, the others get SIGTERM, by which they save, and SIGKILL after the grace. With ``--held``
the first line of standard input holds further variables, as JSON, and its end is a request to end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from steadytrain.distributed.world import LAUNCHER
from steadytrain.launch.supervise import job_exit_code, killed_notice, rank_variables
from steadytrain.machine.children import exit_code, kill_at_last, start, start_copying, wait_together
from steadytrain.machine.process import take_signals

_SCHEDULERS = {"JOB_COMPLETION_INDEX": "Kubernetes", "SKYPILOT_NODE_RANK": "SkyPilot"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks and return the exit code of all of them."""
    args = _parse(argv)
    environment = dict(os.environ)
    if args.held:
        line = b""  # read without a buffer, which the thread that waits for the end would hold at exit
        while not line.endswith(b"\n") and (part := os.read(0, 1 << 16)):
            line += part
        environment |= json.loads(line or b"{}")
    environment[LAUNCHER] = next((_SCHEDULERS[name] for name in _SCHEDULERS if name in environment), "steady launch")
    processes: list[subprocess.Popen[bytes]] = []
    copying: list[threading.Thread] = []
    with take_signals(("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")) as requests, kill_at_last(processes):
        first = args.first if args.node is None else args.node * args.procs
        for rank in [None] if args.alone else range(first, first + args.procs):
            variables: Mapping[str, str] = {}
            if rank is not None:
                variables = rank_variables(
                    rank, args.size, args.port, first=first, local_size=args.procs, address=args.address
                )
            pipe, words = subprocess.PIPE, [sys.executable, *args.program]
            variables = {**environment, **variables}
            process = start(
                words, variables=variables, ends_with_us=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
            )
            processes.append(process)
            prefix = b"[%s] " % (args.name if rank is None else f"{rank} {args.name}").encode()
            assert process.stdout is not None and process.stderr is not None
            # torchrun's agent has rank 0's output among that of others; what comes from it is passed on as it is.
            copying.append(start_copying(process.stdout, sys.stdout.buffer, prefix if rank else b""))
            copying.append(start_copying(process.stderr, sys.stderr.buffer, prefix))
        if args.held:

            def await_silence() -> None:
                with suppress(OSError):
                    while os.read(0, 1 << 16):
                        pass
                requests.append(0)

            threading.Thread(target=await_silence, daemon=True).start()

        def terminate() -> None:
            for process in processes:
                process.terminate()

        def say_killed(place: int) -> None:
            if args.independent and (code := processes[place].returncode) < 0 and not requests:
                is_last = args.size == args.procs and all(process.poll() for process in processes)
                print(
                    f"[{args.name}] {killed_notice(first + place, code, is_last=is_last)}", file=sys.stderr, flush=True
                )

        ended = wait_together(
            processes,
            requests,
            ask_to_end=terminate,
            grace_seconds=args.grace,
            may_be_killed=args.procs - 1 if args.independent else 0,
            on_end=say_killed,
        )
        for thread in copying:
            thread.join()
    codes = [processes[place].returncode for place in ended]
    if args.independent:
        codes = [0] if 0 in codes else sorted(codes, key=lambda code: code < 0)  # an error says more than a kill
    return job_exit_code(map(exit_code, codes))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="steadytrain.launch.node", description="Start the ranks of one machine.")
    parser.add_argument("--size", type=int, default=1, help="ranks in all")
    parser.add_argument("--procs", type=int, default=1, help="ranks here")
    parser.add_argument("--first", type=int, default=0, help="the lowest rank here")
    parser.add_argument("--node", type=int, help="in its place, of machines with as many ranks each: which one this is")
    parser.add_argument("--address", default="127.0.0.1", help="of rank 0's machine")
    parser.add_argument("--port", type=int, default=29500, help="where the ranks meet")
    parser.add_argument("--name", default=platform.node(), help="of this machine, in front of lines")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds for ranks that are asked to end")
    parser.add_argument(
        "--held", action="store_true", help="variables from standard input, whose end is a request to end"
    )
    parser.add_argument("--alone", action="store_true", help="one process, which starts the ranks itself")
    parser.add_argument("--independent", action="store_true", help="where a rank is killed, the others do its work")
    parser.add_argument("program", nargs="+", help="what follows the interpreter")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
