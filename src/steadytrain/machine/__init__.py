"""What this machine is and does. The only package that reads /proc, cgroups and NVML."""
