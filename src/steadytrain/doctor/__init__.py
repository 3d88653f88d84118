"""Facts of this machine, its faults for training, and its differences from another machine.

MachineFacts are collected (:func:`examine`), rules are pure functions of them (:func:`findings`), and both go into one
document that another machine's can be compared with (:func:`compare`). torch is asked in a process of its own, so all
of this works where torch is missing, broken, or crashes.
"""

from steadytrain.doctor.collect import examine as examine
from steadytrain.doctor.comparison import compare as compare
from steadytrain.doctor.comparison import comparison_lines as comparison_lines
from steadytrain.doctor.facts import MachineFacts as MachineFacts
from steadytrain.doctor.rules import MachineFinding as MachineFinding
from steadytrain.doctor.rules import findings as findings
from steadytrain.doctor.text import document as document
from steadytrain.doctor.text import lines as lines
from steadytrain.doctor.text import read as read
