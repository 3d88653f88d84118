"""The cost of runs: dated prices of machines, the bill of a run, spot against on demand, other machines."""
