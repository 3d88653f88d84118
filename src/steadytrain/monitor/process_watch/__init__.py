"""Watch a training process from outside, whatever it is written in: samples, their rhythm, and the likely cause."""

from __future__ import annotations

from steadytrain.machine.nvml import GpuLoad as GpuLoad
from steadytrain.monitor.process_watch.causes import Reading as Reading
from steadytrain.monitor.process_watch.causes import read as read
from steadytrain.monitor.process_watch.moments import MachineLoad as MachineLoad
from steadytrain.monitor.process_watch.moments import Moment as Moment
from steadytrain.monitor.process_watch.moments import ProcessLoad as ProcessLoad
from steadytrain.monitor.process_watch.moments import ThreadLoad as ThreadLoad
from steadytrain.monitor.process_watch.rhythm import rhythm as rhythm
from steadytrain.monitor.process_watch.sampler import Sampler as Sampler
from steadytrain.monitor.rules.cause import Cause as Cause
