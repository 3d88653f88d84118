"""The loop from the first update of an attempt to its last: steps, evaluation, saving, and how all of it ends."""
