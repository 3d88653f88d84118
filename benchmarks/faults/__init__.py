"""The faults that :mod:`verdict` injects into real training: data, networks, faults, and runs with them."""
