"""How the work of one update is spread: each engine passes the same conformance suite."""

from steadytrain.engines.engine import Engine as Engine
from steadytrain.engines.group import Group as Group
from steadytrain.engines.group import joined as joined
from steadytrain.engines.pulse import Pulse as Pulse
from steadytrain.engines.single import Single as Single
from steadytrain.engines.synchronous import Synchronous as Synchronous
