"""The causes that a verdict can name, a file a topic; each a pure function ``Evidence -> Cause | None``.

A cause is a model with numbers in it: what the fault costs now, and what the one change would leave of it. What cannot
be told from the evidence is not guessed: then there is no cause, and the diagnosis lists what is not measurable.
"""

from __future__ import annotations

from steadytrain.monitor.rules.cause import Cause as Cause
from steadytrain.monitor.rules.rules import RULES as RULES
