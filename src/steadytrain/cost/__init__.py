"""What runs cost: dated prices of machines, the bill of a run, spot against on demand, other machines."""
