"""Measurements of the parts of training: bench, probe, the cost of a step, the learning rate found by a sweep."""
