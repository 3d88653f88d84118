"""Events: small frozen facts about a run, one JSON object a line in its ``events.jsonl``.

A line is ``{"v": 1, "kind": "Step", "time": ..., "attempt": 1, "rank": 0, ...}``. Times are seconds since 1970,
durations seconds, sizes bytes, rates per second, accuracies fractions. Each line is written (not fsynced) before its
event is yielded, so a killed process loses at most the line it was writing. Readers never see a torn last line; it is
cut off when the file is next opened for writing. Kinds that this version does not know are kept as :class:`Unknown`;
a line in the middle that is no JSON object is an :class:`Unreadable`.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
>>> with EventLog(path, attempt=1) as log:
...     _ = log.append(Step(step=1, position=128, n=128, seconds=0.25, wait_seconds=0.01, lr=0.1))
>>> [event.kind for event in read(path)]
['Step']
"""

from __future__ import annotations

from steadytrain.events.log import KINDS as KINDS
from steadytrain.events.log import EventLog as EventLog
from steadytrain.events.log import LogReader as LogReader
from steadytrain.events.log import count_names as count_names
from steadytrain.events.log import from_json as from_json
from steadytrain.events.log import open_no_follow as open_no_follow
from steadytrain.events.log import read as read
from steadytrain.events.log import refuse_link as refuse_link
from steadytrain.events.log import repair as repair
from steadytrain.events.schema import BUCKETS as BUCKETS
from steadytrain.events.schema import UPDATING as UPDATING
from steadytrain.events.schema import Accounted as Accounted
from steadytrain.events.schema import Ceilings as Ceilings
from steadytrain.events.schema import Compiled as Compiled
from steadytrain.events.schema import DeviceStats as DeviceStats
from steadytrain.events.schema import Ended as Ended
from steadytrain.events.schema import EpochTrained as EpochTrained
from steadytrain.events.schema import Evaluated as Evaluated
from steadytrain.events.schema import Event as Event
from steadytrain.events.schema import Failed as Failed
from steadytrain.events.schema import FeedPlaced as FeedPlaced
from steadytrain.events.schema import FeedStats as FeedStats
from steadytrain.events.schema import Halved as Halved
from steadytrain.events.schema import Logged as Logged
from steadytrain.events.schema import MachineStats as MachineStats
from steadytrain.events.schema import Noticed as Noticed
from steadytrain.events.schema import ProbeProgress as ProbeProgress
from steadytrain.events.schema import Resumed as Resumed
from steadytrain.events.schema import Saved as Saved
from steadytrain.events.schema import Score as Score
from steadytrain.events.schema import ServerStats as ServerStats
from steadytrain.events.schema import Stalled as Stalled
from steadytrain.events.schema import Started as Started
from steadytrain.events.schema import Steered as Steered
from steadytrain.events.schema import Step as Step
from steadytrain.events.schema import StepMeasured as StepMeasured
from steadytrain.events.schema import Tested as Tested
from steadytrain.events.schema import ThreadStats as ThreadStats
from steadytrain.events.schema import Tried as Tried
from steadytrain.events.schema import Unknown as Unknown
from steadytrain.events.schema import Unreadable as Unreadable
from steadytrain.events.schema import top1_95 as top1_95
