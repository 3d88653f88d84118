"""The facts about a machine, by its files and by its packages' metadata."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from tests.machine.recorded import H100, Library
from tests.machine.trees import ARM, DOCKER, NVIDIA, OPEN_MODULE, POD, SERVER, tree

from steadytrain.data.packing.prepare import prepare
from steadytrain.doctor import findings, lines
from steadytrain.doctor.collect import (
    accelerators,
    is_network,
    load,
    memory,
    package,
    packages,
    places,
    processor,
    system,
    variables,
    wanted_versions,
)
from steadytrain.doctor.facts import MachineFacts
from steadytrain.machine.facts import cache_folder
from steadytrain.machine.procfs import processor_seconds, steal_share

MACHINES: dict[str, Mapping[str, str]] = {
    "docker": {**SERVER, **DOCKER},
    "pod": {**SERVER, **POD},
    "arm": ARM,
    "nvidia": {**SERVER, **NVIDIA},
}
JUNK = (None, "", "max", "abc def", "-1", "0", ":", "some avg10=")


def facts_of(root: Path) -> MachineFacts:
    """What can be known of a machine from its files alone."""
    return MachineFacts(
        system=system(root, {}),
        processor=processor(root),
        load=load(root),
        memory=memory(root),
        places=places(root, {}),
        accelerators=accelerators(root),
    )


def damage(path: Path, text: str | None) -> None:
    """Replace what a file of the kernel says; None: the file is not there."""
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", MACHINES)
def test_no_file_of_the_kernel_can_break_it(tmp_path: Path, name: str) -> None:
    files = {file: text for file, text in MACHINES[name].items() if not any(f"cpu{n}/" in file for n in range(2, 8))}
    root = tree(tmp_path, dict(MACHINES[name]))
    for file, text in files.items():
        for junk in JUNK:
            damage(root / file, junk)
            facts = facts_of(root)
            assert lines(facts, findings(facts), width=60)
            steal_share(processor_seconds(root), processor_seconds(root))
        tree(root, {file: text})


def test_of_an_empty_machine_nothing_is_claimed(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert (facts.processor.quota, facts.memory.limit_bytes, facts.load.load_1) == (None, None, None)
    assert facts.system.container is None
    assert not [finding for finding in findings(facts) if finding.severity == "bad"]
    assert "container" not in "".join(lines(facts, findings(facts), width=80))


def test_a_machine_without_a_container(tmp_path: Path) -> None:
    facts = system(tree(tmp_path, SERVER), {})
    assert facts.container == "none"
    assert (facts.distribution, facts.kernel) == ("Ubuntu 22.04.4 LTS", "5.15.0-94-generic")
    assert facts.hardware == "Dell Inc. PowerEdge R740"


OVERLAY = "722 565 0:59 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w"
HOSTNAME = "738 722 8:1 /var/lib/{0}/hostname /etc/hostname rw,relatime - ext4 /dev/sda1 rw"


@pytest.mark.parametrize(
    ("files", "variables", "kind"),
    [
        (DOCKER, {}, "docker"),
        (DOCKER, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        (POD, {}, "kubernetes"),
        ({"run/.containerenv": 'engine="podman-4.9.3"'}, {}, "podman"),
        ({"run/systemd/container": "lxc"}, {}, "lxc"),
        ({}, {"APPTAINER_CONTAINER": "/images/a.sif"}, "apptainer"),
        (
            {"proc/self/mountinfo": f"{OVERLAY}\n{HOSTNAME.format('docker/containers/4f1c')}"},
            {},
            "docker",
        ),
    ],
)
def test_a_container_is_named_by_its_evidence(
    tmp_path: Path, files: dict[str, str], variables: dict[str, str], kind: str
) -> None:
    facts = system(tree(tmp_path, SERVER, files), variables)
    assert facts.container == kind


def test_a_docker_host_is_no_container(tmp_path: Path) -> None:
    services = {"proc/self/cgroup": "0::/system.slice/docker.service", "proc/1/cgroup": "0::/init.scope"}
    assert system(tree(tmp_path, SERVER, services), {}).container == "none"


def test_where_nothing_can_be_read_nothing_is_claimed(tmp_path: Path) -> None:
    facts = system(tmp_path, {})
    assert (facts.container, facts.hardware) == (None, None)


def test_this_python_and_its_environment() -> None:
    facts = system(Path("/"), os.environ)
    assert (facts.python, facts.executable) == (platform.python_version(), sys.executable)
    assert facts.venv == (sys.prefix if sys.prefix != sys.base_prefix else None)


def test_processors_and_nodes_are_counted(tmp_path: Path) -> None:
    facts = processor(tree(tmp_path, SERVER))
    assert (facts.logical, facts.numa_nodes) == (8, 2)


def test_features_are_those_that_torch_has_code_for(tmp_path: Path) -> None:
    facts = processor(tree(tmp_path, SERVER))
    assert facts.isa == "avx512"
    assert facts.features == ("avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni")
    amx = SERVER["proc/cpuinfo"].replace("avx512_vnni", "avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8")
    assert processor(tree(tmp_path, {"proc/cpuinfo": amx})).features[-4:] == (
        "avx512_bf16",
        "amx_tile",
        "amx_int8",
        "amx_bf16",
    )


def test_an_arm_processor_tells_its_features_and_no_clock(tmp_path: Path) -> None:
    facts = processor(tree(tmp_path, ARM))
    assert facts.features == ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve")
    assert (facts.logical, facts.mhz_max, facts.governor, facts.numa_nodes) == (2, None, None, None)


def test_clocks_are_in_megahertz(tmp_path: Path) -> None:
    facts = processor(tree(tmp_path, SERVER))
    assert (facts.mhz_max, facts.mhz_allowed) == (3900, 2100)
    assert (facts.governor, facts.frequency_driver) == ("powersave", "intel_pstate")


@pytest.mark.parametrize(("files", "quota"), [({}, None), (DOCKER, 1.5), (POD, 2.5)])
def test_a_quota_keeps_its_fraction(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert processor(tree(tmp_path, SERVER, files)).quota == quota


def test_a_root_without_anything_gives_what_python_knows(tmp_path: Path) -> None:
    facts = processor(tmp_path)
    assert facts.logical == os.cpu_count() and facts.features == ()


def test_load_and_pressure_now(tmp_path: Path) -> None:
    facts = load(tree(tmp_path, SERVER))
    assert facts.load_1 == 3.52
    assert (facts.pressure_cpu_share, facts.pressure_memory_share, facts.pressure_io_share) == (0.125, 0.0, 0.0199)


@pytest.mark.parametrize(("files", "share"), [({}, None), (DOCKER, 0.25), (POD, 0.005)])
def test_how_often_the_quota_was_used_up(tmp_path: Path, files: dict[str, str], share: float | None) -> None:
    assert load(tree(tmp_path, SERVER, files)).throttled_share == share


def test_what_the_hypervisor_withheld_is_a_share_of_all_time(tmp_path: Path) -> None:
    before = processor_seconds(tree(tmp_path, SERVER))
    after = processor_seconds(tree(tmp_path, {"proc/stat": "cpu  0\ncpu0 550 5 100 4300 25 0 10 170 350 0"}))
    assert steal_share(before, after) == 0.3


def test_no_time_passed_or_no_kernel_that_tells_is_unknown(tmp_path: Path) -> None:
    now = processor_seconds(tree(tmp_path, SERVER))
    assert steal_share(now, now) is None and steal_share({}, now) is None
    assert load(tmp_path / "empty").load_1 is None


def test_memory_swap_and_huge_pages_of_a_machine(tmp_path: Path) -> None:
    facts = memory(tree(tmp_path, SERVER))
    assert (facts.total_bytes, facts.available_bytes) == (197_616_000 * 1024, 180_000_000 * 1024)
    assert (facts.swap_total_bytes, facts.swap_used_bytes) == (8_388_604 * 1024, 388_604 * 1024)
    assert facts.huge_pages == "never"
    assert (facts.limit_bytes, facts.group_used_bytes, facts.out_of_memory_kills) == (None, None, None)


@pytest.mark.parametrize(
    ("files", "limit", "used", "kills"),
    [(DOCKER, 8 << 30, 5_500_000_000, 2), (POD, 4 << 30, 3_000_000_000, 3)],
)
def test_a_control_group_leaves_its_limit_less_what_cannot_be_dropped(
    tmp_path: Path, files: dict[str, str], limit: int, used: int, kills: int
) -> None:
    facts = memory(tree(tmp_path, SERVER, files))
    assert (facts.limit_bytes, facts.group_used_bytes, facts.available_bytes) == (limit, used, limit - used)
    assert facts.out_of_memory_kills == kills


def test_a_limit_above_the_machines_memory_is_none(tmp_path: Path) -> None:
    no_limit = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert memory(tree(tmp_path, SERVER, POD, no_limit)).limit_bytes is None


def test_without_proc_what_is_not_known_is_none(tmp_path: Path) -> None:
    facts = memory(tmp_path)
    assert facts.total_bytes == psutil.virtual_memory().total and facts.available_bytes
    assert (facts.swap_used_bytes, facts.huge_pages) == (None, None)


def mounted(root: Path, *lines: str) -> Path:
    """A root whose process has these mounts."""
    return tree(root, {"proc/self/mountinfo": "\n".join(("1 0 254:0 / / rw - ext4 /dev/root rw", *lines))})


def test_a_folder_belongs_to_the_deepest_mount_around_it(tmp_path: Path) -> None:
    data = tmp_path / "with space" / "data"
    data.mkdir(parents=True)
    point = str(data.parent).replace(" ", "\\040")
    root = mounted(tmp_path / "root", f"9 1 0:44 / {point} rw,relatime shared:7 - nfs4 server:/export rw,vers=4.2")
    folders = places(root, {"STEADYTRAIN_CACHE": str(data)})
    assert (folders["cache"].kind, folders["cache"].network) == ("nfs4", True)
    assert (folders["here"].kind, folders["here"].network) == ("ext4", False)


def test_of_two_mounts_on_one_place_the_later_counts(tmp_path: Path) -> None:
    point = tmp_path.resolve()
    root = mounted(tmp_path / "root", f"8 1 0:44 / {point} rw - nfs a:/b rw", f"9 1 0:45 / {point} rw - tmpfs none rw")
    assert places(root, {"STEADYTRAIN_CACHE": str(tmp_path)})["cache"].kind == "tmpfs"


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    cache = places(mounted(tmp_path / "root"), {"STEADYTRAIN_CACHE": str(tmp_path / "not" / "yet")})["cache"]
    room = os.statvfs(tmp_path)
    assert cache.path == str(tmp_path / "not" / "yet") and cache.writable
    assert cache.total_bytes == room.f_blocks * room.f_frsize
    assert not (tmp_path / "not").exists()


def test_a_disk_that_takes_nothing_is_not_writable(read_only_disk: Path) -> None:
    cache = places(Path("/"), {"STEADYTRAIN_CACHE": str(read_only_disk / "cache")})["cache"]
    assert (cache.writable, cache.kind, cache.network) == (False, "tmpfs", False)


def test_the_room_of_a_small_disk(small_disk: Path) -> None:
    assert places(Path("/"), {"HF_HUB_CACHE": str(small_disk)})["weights"].total_bytes == 2 << 20


def test_a_current_folder_that_was_removed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "here" not in places(Path("/"), {})


def test_the_cache_is_where_packing_puts_it(digits_folder: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STEADYTRAIN_CACHE")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        prepared = prepare(digits_folder)
        assert prepared.train.is_relative_to(cache_folder(os.environ) or "none")


@pytest.mark.parametrize("kind", ["nfs", "cifs", "smb3", "lustre", "ceph", "9p", "fuse.sshfs", "fuse.gcsfuse"])
def test_network_file_systems_are_known_by_name(kind: str) -> None:
    assert is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "fuseblk", "fuse.ntfs-3g", "apfs"])
def test_local_ones_are_not_taken_for_them(kind: str) -> None:
    assert not is_network(kind)


def test_what_is_installed_here_fits() -> None:
    versions = packages("3.11.7")
    assert versions["numpy"].version == metadata.version("numpy") and versions["numpy"].fits
    assert {"torch", "torchvision", "timm", "pillow", "simplejpeg", "cyclopts"} <= versions.keys()
    assert versions["steadytrain"].version == metadata.version("steadytrain")
    assert not [name for name, version in versions.items() if version.fits is False]
    assert "pytest" not in versions and "sphinx" not in versions


@pytest.mark.parametrize(("python", "good"), [("3.10.14", False), ("3.11.0", True), ("3.14.0", True)])
def test_python_has_its_range_too(python: str, good: bool) -> None:
    assert packages(python)["python"].fits is good


def test_torchvision_names_the_torch_it_was_built_for() -> None:
    asked = {
        "steadytrain": ["torch>=2.10", "torchvision>=0.25", "timm>=1.0.26", 'pytest>=8; extra == "test"'],
        "torchvision": ["numpy", "torch==2.14.0", "pillow!=8.3.*,>=5.3.0"],
        "timm": ["torch", "torchvision", "pyyaml"],
    }
    wanted = wanted_versions(lambda name: asked.get(name))
    assert wanted == {"torch": ">=2.10,==2.14.0", "torchvision": ">=0.25", "timm": ">=1.0.26"}
    assert package("2.15.0+cu132", wanted["torch"]).fits is False
    assert package("2.14.0+cu132", wanted["torch"]).fits is True


def test_without_metadata_nothing_is_claimed() -> None:
    assert wanted_versions(lambda name: None) == {}
    assert package("1.0", None).fits is None and package(None, ">=1").fits is None


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.10", ">=2.9", True),  # not by the alphabet
        ("2.9.1", ">=2.10", False),
        ("2.10.0a0+git1f", ">=2.10", False),  # a build before the release
        ("2.10.0.dev20260101", ">=2.10", False),
        ("2.10.0.post1", ">=2.10", True),
        ("2.10.0+cpu", "==2.10", True),
        ("8.3.2", "!=8.3.*,>=5.3.0", False),
        ("8.4.0", "!=8.3.*,>=5.3.0", True),
        ("3.1.6", "==3.1.*", True),
        ("3.0", "~=2.2", False),
        ("2.2.9", "~=2.2.1", True),
        ("2.3.0", "~=2.2.1", False),
    ],
)
def test_ranges_are_read_as_packages_write_them(version: str, wanted: str, expected: bool) -> None:
    assert package(version, wanted).fits is expected


def test_what_changes_speed_is_kept_in_order() -> None:
    settings = variables({"PATH": "/bin", "OMP_NUM_THREADS": "1", "LD_PRELOAD": "", "CUDA_VISIBLE_DEVICES": ""})
    assert list(settings.items()) == [("CUDA_VISIBLE_DEVICES", ""), ("LD_PRELOAD", ""), ("OMP_NUM_THREADS", "1")]


def test_no_secret_gets_into_a_document() -> None:
    secrets = ("HF_TOKEN", "NVIDIA_API_KEY", "STEADYTRAIN_SECRET", "TORCH_PASSWORD", "CUDA_CREDENTIALS")
    assert variables(dict.fromkeys(secrets, "x")) == {}


def refusing(why: str = "NVML Shared Library Not Found") -> Library:
    return Library(refuses=why)


def test_the_library_is_asked_first(tmp_path: Path) -> None:
    gpus = accelerators(tree(tmp_path, SERVER, NVIDIA), Library(H100, H100))
    assert (gpus.driver, gpus.driver_by, len(gpus.gpus)) == ("580.65.06", "nvml", 2)
    assert (gpus.on_bus, gpus.device_files) == (("NVIDIA",), 1)


def test_without_the_library_the_kernels_module_tells(tmp_path: Path) -> None:
    gpus = accelerators(tree(tmp_path, NVIDIA), refusing())
    assert (gpus.driver, gpus.driver_by) == ("470.57.02", "proc")
    assert [gpu.name for gpu in gpus.gpus] == ["Tesla V100-SXM2-32GB"]
    assert gpus.driver_error == "NVML Shared Library Not Found"


def test_the_open_kernel_module_writes_its_version_elsewhere_in_the_line(tmp_path: Path) -> None:
    assert accelerators(tree(tmp_path, NVIDIA, OPEN_MODULE), refusing()).driver == "580.65.06"


def test_a_gpu_without_any_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    bus = {name: text for name, text in NVIDIA.items() if name.startswith("sys/bus")}
    amd = {"sys/bus/pci/devices/0000:83:00.0/vendor": "0x1002", "sys/bus/pci/devices/0000:83:00.0/class": "0x120000"}
    gpus = accelerators(tree(tmp_path, bus, amd), refusing())
    assert (gpus.driver, gpus.gpus, gpus.on_bus) == (None, (), ("NVIDIA", "AMD"))


def test_no_bus_and_no_device_files_to_look_at_is_unknown(tmp_path: Path) -> None:
    gpus = accelerators(tmp_path, refusing())
    assert (gpus.on_bus, gpus.device_files) == (None, None)


def test_compilers_are_those_that_torch_would_find(tmp_path: Path) -> None:
    for name in ("clang", "ccache", "g++"):
        (tmp_path / name).touch(mode=0o755)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "clang").touch(mode=0o755)
    assert system(tmp_path, {"PATH": str(tmp_path)}).compilers == ("C", "C++")
    assert system(tmp_path, {"PATH": str(tmp_path / "c")}).compilers == ("C",)
    assert system(tmp_path, {"PATH": str(tmp_path / "none")}).compilers == ()
    assert system(tmp_path, {"PATH": str(tmp_path / "none"), "CXX": str(tmp_path / "g++")}).compilers == ("C++",)
    assert system(tmp_path, {"PATH": str(tmp_path), "CC": " "}).compilers == ("C", "C++")


@pytest.mark.parametrize("is_there", [True, False])
def test_adapters_of_a_fast_network_and_their_library(
    tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load(name: str) -> object:
        asked.append(name)
        if not is_there:
            raise OSError(f"{name}: cannot open shared object file")
        return load

    monkeypatch.setattr("steadytrain.doctor.collect.ctypes.CDLL", load)
    files = {f"sys/class/infiniband/mlx5_{number}/node_type": "1: CA" for number in range(2)}
    facts = accelerators(tree(tmp_path, files))
    assert (facts.infiniband, facts.ibverbs, asked) == (("mlx5_0", "mlx5_1"), is_there, ["libibverbs.so.1"])
    alone = accelerators(tree(tmp_path / "other", SERVER))
    assert (alone.infiniband, alone.ibverbs) == ((), None) and len(asked) == 1
