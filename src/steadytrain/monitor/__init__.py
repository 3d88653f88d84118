"""A run's time: its history folded from events, the ledger of seconds, the verdict. Needs no torch."""

from __future__ import annotations

from steadytrain.monitor.evidence import Evidence as Evidence
from steadytrain.monitor.history import RunHistory as RunHistory
from steadytrain.monitor.history_reader import ledger as ledger
from steadytrain.monitor.history_reader import read_history as read_history
from steadytrain.monitor.ledger import Interruption as Interruption
from steadytrain.monitor.ledger import Ledger as Ledger
from steadytrain.monitor.ledger import Slice as Slice
from steadytrain.monitor.ledger import goodput as goodput
from steadytrain.monitor.rules import Cause as Cause
from steadytrain.monitor.rules.diagnose import Diagnosis as Diagnosis
from steadytrain.monitor.rules.diagnose import diagnose as diagnose
