"""Choices of how an update is computed: timed passes, compiled code and graphs, recomputed activations."""
