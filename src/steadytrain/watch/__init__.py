"""What a run does with its time: samples of the machine, the ledger of its seconds, the verdict. Needs no torch."""

from __future__ import annotations

from steadytrain.watch.book import Book as Book
from steadytrain.watch.causes import Cause as Cause
from steadytrain.watch.diagnose import Ceiling as Ceiling
from steadytrain.watch.diagnose import Diagnosis as Diagnosis
from steadytrain.watch.diagnose import diagnose as diagnose
from steadytrain.watch.evidence import Evidence as Evidence
from steadytrain.watch.ledger import Ledger as Ledger
from steadytrain.watch.reading import evidence as evidence
from steadytrain.watch.reading import ledger as ledger
from steadytrain.watch.slices import Slice as Slice
