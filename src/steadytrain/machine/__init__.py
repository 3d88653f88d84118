"""Facts and measurements of this machine. The only package that reads /proc, cgroups and NVML."""
