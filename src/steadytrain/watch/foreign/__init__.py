"""Watching a training process from outside, torch or not: samples of it, their rhythm, and the cause that fits."""

from __future__ import annotations

from steadytrain.watch.foreign.facts import GpuLoad as GpuLoad
from steadytrain.watch.foreign.facts import MachineLoad as MachineLoad
from steadytrain.watch.foreign.facts import Moment as Moment
from steadytrain.watch.foreign.facts import ProcessLoad as ProcessLoad
from steadytrain.watch.foreign.facts import ThreadLoad as ThreadLoad
from steadytrain.watch.foreign.reading import Cause as Cause
from steadytrain.watch.foreign.reading import Reading as Reading
from steadytrain.watch.foreign.reading import read as read
from steadytrain.watch.foreign.rhythm import Rhythm as Rhythm
from steadytrain.watch.foreign.rhythm import rhythm as rhythm
from steadytrain.watch.foreign.sampler import Sampler as Sampler
