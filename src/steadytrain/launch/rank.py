"""A program of the user's own as one rank: ``python -m steadytrain.launch.rank -- train.py --lr 0.1``.

This interpreter runs it, in this process. MPI, Slurm and Kubernetes each set variables of their own for the rank; the
program gets those that torchrun sets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from steadytrain.distributed.world import world_from_environment
from steadytrain.errors import InputError
from steadytrain.launch.supervise import free_port, rank_variables


def main(argv: Sequence[str]) -> None:
    """Replace this process by the program, with torchrun's variables in its environment."""
    _, *program = argv  # the two dashes
    try:
        world = world_from_environment(os.environ)
    except InputError as error:
        sys.exit(f"steady: {error}")
    variables = rank_variables(
        world.rank,
        world.size,
        world.port or free_port(),
        first=world.rank - world.local_rank,
        local_size=world.local_size,
        address=world.address,
    )
    os.execve(sys.executable, [sys.executable, *program], {**os.environ, **variables})


if __name__ == "__main__":
    main(sys.argv[1:])
