"""Roots with ``/proc`` and ``/sys`` as real machines have them, cut down to the files that are read."""

from __future__ import annotations

from pathlib import Path


def tree(root: Path, *sets: dict[str, str]) -> Path:
    """A root with these files in it; a later set replaces files of an earlier one."""
    for files in sets:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return root


def block(number: int, package: int, core: int, flags: str) -> str:
    """One processor of ``/proc/cpuinfo`` on x86."""
    return "\n".join(
        [
            f"processor\t: {number}",
            "vendor_id\t: GenuineIntel",
            "model name\t: Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz",
            f"cpu MHz\t\t: {1000 + 100 * number}.000",
            f"physical id\t: {package}",
            f"core id\t\t: {core}",
            f"flags\t\t: {flags}",
        ]
    )


AVX512 = "fpu sse2 ht sse4_2 fma avx f16c avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni"

# Two sockets of two cores with two threads each, on bare metal, with its clock held down.
SERVER = {
    "proc/cpuinfo": "\n\n".join(block(n, n // 2 % 2, n % 2, AVX512) for n in range(8)),
    "proc/loadavg": "3.52 2.10 1.05 4/812 40211",
    "proc/stat": "cpu  1000 10 200 8000 50 0 20 40 700 0\ncpu0 500 5 100 4000 25 0 10 20 350 0",
    "proc/pressure/cpu": "some avg10=12.50 avg60=3.00 avg300=1.00 total=123\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0",
    "proc/pressure/io": "some avg10=1.99 avg60=0.50 avg300=0.10 total=77",
    "proc/meminfo": "MemTotal:       197616000 kB\nMemFree:        100000000 kB\nMemAvailable:   180000000 kB\n"
    "SwapTotal:        8388604 kB\nSwapFree:         8000000 kB\nHugePages_Total:       0",
    "proc/sys/vm/overcommit_memory": "0",
    "proc/sys/vm/swappiness": "60",
    "proc/sys/kernel/osrelease": "5.15.0-94-generic",
    "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope",
    "proc/1/cgroup": "0::/init.scope",
    "etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.4 LTS"\nNAME="Ubuntu"\nID=ubuntu',
    "sys/class/dmi/id/sys_vendor": "Dell Inc.",
    "sys/class/dmi/id/product_name": "PowerEdge R740",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet",
    **{f"sys/devices/system/node/node{n}/cpulist": "0-3" for n in range(2)},
    "sys/devices/system/cpu/smt/active": "1",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3900000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "2100000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1500000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "intel_pstate",
    "sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference": "balance_performance",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    "sys/kernel/mm/transparent_hugepage/defrag": "always defer defer+madvise [madvise] never",
    **{
        f"sys/devices/system/cpu/cpu{n}/topology/{name}": str(value)
        for n in range(8)
        for name, value in (("physical_package_id", n // 2 % 2), ("core_id", n % 2))
    },
}

# The same in a container with control groups of version 2, whose names end at the container's own root.
DOCKER = {
    ".dockerenv": "",
    "proc/self/cgroup": "0::/",
    "sys/fs/cgroup/cpu.max": "150000 100000",
    "sys/fs/cgroup/cpu.stat": "usage_usec 9000\nuser_usec 8000\nsystem_usec 1000\n"
    "nr_periods 400\nnr_throttled 100\nthrottled_usec 5000",
    "sys/fs/cgroup/memory.max": "8589934592",
    "sys/fs/cgroup/memory.current": "7000000000",
    "sys/fs/cgroup/memory.stat": "anon 5000000000\nfile 2000000000\ninactive_file 1500000000",
    "sys/fs/cgroup/memory.events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 2",
}

# A pod of a Kubernetes node that still has version 1.
POD = {
    "proc/self/cgroup": "11:memory:/kubepods/burstable/pod1f/c0ffee\n4:cpu,cpuacct:/kubepods/burstable/pod1f/c0ffee",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 1000\nnr_throttled 5\nthrottled_time 100",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000000000",
    "sys/fs/cgroup/memory/memory.stat": "cache 1000\ninactive_file 7\ntotal_inactive_file 1000000000",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
}

# Amazon's virtual machine on ARM, which has neither a hypervisor's flag nor a clock that can be read.
ARM = {
    "proc/cpuinfo": "\n\n".join(
        f"processor\t: {n}\nBogoMIPS\t: 243.75\n"
        "Features\t: fp asimd evtstrm aes crc32 asimdhp asimddp sve i8mm bf16\nCPU implementer\t: 0x41"
        for n in range(2)
    ),
    "proc/self/cgroup": "0::/system.slice/ssh.service",
    "sys/class/dmi/id/sys_vendor": "Amazon EC2",
    "sys/class/dmi/id/product_name": "c7g.large",
    **{f"sys/devices/system/cpu/cpu{n}/topology/physical_package_id": "0" for n in range(2)},
    **{f"sys/devices/system/cpu/cpu{n}/topology/core_id": str(n) for n in range(2)},
}

NVIDIA = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  "
    "Tue Jul 13 16:14:05 UTC 2021\n"
    "GCC version:  gcc version 9.3.0 (Ubuntu 9.3.0-17ubuntu1~20.04)",
    "proc/driver/nvidia/gpus/0000:62:00.0/information": "Model: \t\t Tesla V100-SXM2-32GB\nIRQ:   \t\t 10\n"
    "GPU UUID: \t GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b\nVideo BIOS: \t 88.00.43.00.03\nBus Type: \t PCIe\n"
    "Device Minor: \t 0",
    "sys/bus/pci/devices/0000:62:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:62:00.0/class": "0x030200",
    "sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086",
    "sys/bus/pci/devices/0000:00:1f.0/class": "0x060100",
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
}
OPEN_MODULE = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  "
    "(dvs-builder@U22-I3-AM02-24-3)  Sun Jul 27 07:17:53 UTC 2025\nGCC version:  gcc version 11.4.0",
}
