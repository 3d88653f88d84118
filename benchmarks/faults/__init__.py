"""What :mod:`verdict` injects into real training: data, networks, faults, and how one run of them is made."""
