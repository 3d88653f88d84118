"""How fast the parts of training are: bench, probe, the cost of a step, the learning rate found by a sweep."""
