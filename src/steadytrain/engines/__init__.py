"""How the work of one update is spread: each engine passes the same conformance suite."""

from steadytrain.engines.engine import Engine as Engine
from steadytrain.engines.engine import World as World
from steadytrain.engines.single import Single as Single
