"""What happens in a run, as small frozen facts; a run's truth is its ``events.jsonl``.

One JSON object a line: ``{"v": 1, "kind": "Step", "time": ..., "attempt": 1, "rank": 0, ...}``. Times are seconds
since 1970, durations seconds, sizes bytes, rates per second, accuracies fractions. A line is written (not fsynced)
before the event is yielded to anyone, so a killed process loses at most the line it was writing; the torn
tail is cut off when the file is next opened for writing, and never shown to a reader. Kinds that this version
does not know are kept as :class:`Unknown`.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
>>> with EventLog(path, attempt=1) as log:
...     _ = log.append(Step(step=1, position=128, n=128, seconds=0.25, wait_seconds=0.01, lr=0.1))
>>> [event.kind for event in read(path)]
['Step']
"""

from __future__ import annotations

from steadytrain.events.event import VERSION as VERSION
from steadytrain.events.event import Event as Event
from steadytrain.events.event import Unknown as Unknown
from steadytrain.events.log import KINDS as KINDS
from steadytrain.events.log import EventLog as EventLog
from steadytrain.events.log import from_json as from_json
from steadytrain.events.log import read as read
from steadytrain.events.log import repair as repair
from steadytrain.events.measured import BUCKETS as BUCKETS
from steadytrain.events.measured import UPDATING as UPDATING
from steadytrain.events.measured import Accounted as Accounted
from steadytrain.events.measured import Ceilings as Ceilings
from steadytrain.events.measured import Compiled as Compiled
from steadytrain.events.measured import DeviceStats as DeviceStats
from steadytrain.events.measured import FeedPlaced as FeedPlaced
from steadytrain.events.measured import FeedStats as FeedStats
from steadytrain.events.measured import MachineStats as MachineStats
from steadytrain.events.measured import Stalled as Stalled
from steadytrain.events.measured import StepMeasured as StepMeasured
from steadytrain.events.told import Ended as Ended
from steadytrain.events.told import Evaluated as Evaluated
from steadytrain.events.told import Failed as Failed
from steadytrain.events.told import Logged as Logged
from steadytrain.events.told import Noticed as Noticed
from steadytrain.events.told import Resumed as Resumed
from steadytrain.events.told import Saved as Saved
from steadytrain.events.told import Started as Started
from steadytrain.events.told import Step as Step
