"""What a run does with its time: samples of the machine, the ledger of its seconds, the verdict. Needs no torch."""

from __future__ import annotations

from steadytrain.monitor.diagnose import Ceiling as Ceiling
from steadytrain.monitor.diagnose import Diagnosis as Diagnosis
from steadytrain.monitor.diagnose import diagnose as diagnose
from steadytrain.monitor.evidence import Evidence as Evidence
from steadytrain.monitor.history import RunHistory as RunHistory
from steadytrain.monitor.ledger import Ledger as Ledger
from steadytrain.monitor.reading import evidence as evidence
from steadytrain.monitor.reading import ledger as ledger
from steadytrain.monitor.rules import Cause as Cause
from steadytrain.monitor.slices import Slice as Slice
