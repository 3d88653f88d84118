"""The world that this process finds, as a line of JSON: what the launchers under test start."""

import dataclasses
import json
import os
import platform

from steadytrain.distributed.world import world_from_environment
from steadytrain.errors import InputError

try:
    values = dataclasses.asdict(world_from_environment(os.environ))
except InputError as error:
    values = {"rank": -1, "error": str(error)}
print(json.dumps(values | {"host": platform.node()}) + "\n", end="", flush=True)
