"""What is said of variables, threads, allocators, decoders and versions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from steadytrain import devices
from steadytrain.doctor import Facts, Finding, findings
from steadytrain.doctor.facts import Allocator, Decoders, Package, Processor, Torch
from steadytrain.doctor.software_rules import VARIABLES
from steadytrain.training.build import _own_threads

FOUR = Processor(logical=4, allowed=4, usable=4)


def only(facts: Facts) -> Finding:
    """The one finding that there is."""
    (found,) = findings(facts)
    return found


def test_pinning_is_bad_by_what_is_left_and_not_by_the_variable() -> None:
    pinned = {"OMP_PROC_BIND": "true"}
    told = only(Facts(processor=FOUR, torch=Torch(allowed=1), variables=pinned))
    assert (told.severity, told.what) == ("bad", "loading torch leaves this process 1 core of 4 (OMP_PROC_BIND=true)")
    assert told.remedy == "unset OMP_PROC_BIND"
    assert findings(Facts(processor=FOUR, torch=Torch(allowed=4), variables=pinned)) == []


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_that_is_started_after_torch_inherits_the_pinning() -> None:
    """What the rule says, seen: with GNU's OpenMP, which torch's own wheels for Linux carry."""
    code = (
        "import os, threading, torch\n(torch.ones(256, 256) @ torch.ones(256, 256)).sum()\n"
        "told = []\nthread = threading.Thread(target=lambda: told.append(len(os.sched_getaffinity(0))))\n"
        "thread.start(); thread.join(); print(len(os.sched_getaffinity(0)), *told)"
    )
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    told = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split()
    assert told[0] == told[1] and int(told[0]) < len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("value", "torch", "severity"),
    [
        ("1", 1, "warn"),
        ("3", 3, "warn"),
        ("64", 64, "warn"),
        ("8,2", 8, "warn"),
        ("many", 4, "note"),
        ("0", 4, "note"),
        ("4", 4, None),
        (None, 64, "warn"),  # a quota, of which torch does not know
        (None, 4, None),
    ],
)
def test_threads_beside_cores(value: str | None, torch: int, severity: str | None) -> None:
    variables = {} if value is None else {"OMP_NUM_THREADS": value}
    found = findings(Facts(processor=FOUR, torch=Torch(threads=torch), variables=variables))
    assert [one.severity for one in found] == ([severity] if severity else [])


def test_few_threads_matter_little_beside_a_gpu() -> None:
    facts = Facts(processor=FOUR, torch=Torch(threads=1, sees_gpu=True), variables={"OMP_NUM_THREADS": "1"})
    assert (only(facts).severity, only(facts).what) == ("note", "OMP_NUM_THREADS=1 keeps computing to 1 of 4 cores")


def test_what_is_said_of_training_and_threads_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = devices.cores()
    for value, threads in (("1", 1), (str(cores + 5), cores), ("many", cores), ("0", cores)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert _own_threads() == threads


def test_one_thread_on_one_core_is_as_it_should_be() -> None:
    one = Processor(logical=1, allowed=1, usable=1)
    assert findings(Facts(processor=one, torch=Torch(threads=1), variables={"OMP_NUM_THREADS": "1"})) == []


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
        ("NVIDIA_TF32_OVERRIDE", "1", False),
        ("OMP_WAIT_POLICY", "ACTIVE", True),
        ("OMP_WAIT_POLICY", "PASSIVE", False),
        ("KMP_BLOCKTIME", "200", False),
        ("JSIMD_FORCENONE", "1", True),
        ("PYTHONMALLOC", "malloc_debug", True),
        ("PYTHONMALLOC", "malloc", False),
        ("PYTHONTRACEMALLOC", "0", False),
        ("ATEN_CPU_CAPABILITY", "default", True),
    ],
)
def test_variables_cost_by_their_value(name: str, value: str, found: bool) -> None:
    assert [one.rule for one in findings(Facts(variables={name: value}))] == ([f"variable.{name}"] if found else [])


def test_an_empty_variable_costs_nothing() -> None:
    assert findings(Facts(variables={one.name: "" for one in VARIABLES})) == []


def test_other_allocators() -> None:
    assert only(Facts(allocator=Allocator(preloaded=("libjemalloc.so.2",)))).severity == "note"
    told = only(Facts(allocator=Allocator(preloaded=("libtcmalloc.so.4 (not loaded)",))))
    assert (told.rule, told.severity) == ("preload", "warn")


def test_vector_code_older_than_the_processor() -> None:
    avx512 = Processor(isa="avx512")
    assert only(Facts(processor=avx512, torch=Torch(isa="AVX2"))).rule == "vector-code"
    assert findings(Facts(processor=avx512, torch=Torch(isa="AVX512"))) == []
    forced = Facts(processor=avx512, torch=Torch(isa="DEFAULT"), variables={"ATEN_CPU_CAPABILITY": "default"})
    assert only(forced).rule == "variable.ATEN_CPU_CAPABILITY"


@pytest.mark.parametrize(
    ("decoders", "rules"),
    [
        (Decoders(simplejpeg_error="ImportError: no"), ["simplejpeg"]),
        (Decoders(simplejpeg_error="ended by SIGILL", pillow_error="ended by SIGILL"), ["simplejpeg"]),
        (Decoders(simplejpeg_simd=False), ["simplejpeg-simd"]),
        (Decoders(pillow_error="ImportError: no"), ["pillow"]),
        (Decoders(pillow_turbo="no", pillow_webp=False), ["pillow-webp", "pillow-turbo"]),
        (Decoders(simplejpeg_simd=True, pillow_turbo="3.1.2", pillow_webp=True, pillow_avif=False), []),
        (Decoders(resizer="no"), ["resizer"]),
        (Decoders(resizer_error="ImportError: no"), ["resizer"]),
        (Decoders(resizer="4.0.1"), []),
        (Decoders(parts="no"), []),  # on a processor that is not known
        (Decoders(parts_error="OSError: no"), ["parts"]),
        (Decoders(parts="5"), []),
    ],
)
def test_decoders(decoders: Decoders, rules: list[str]) -> None:
    assert [one.rule for one in findings(Facts(decoders=decoders))] == rules


@pytest.mark.parametrize(("isa", "rules"), [("avx2", ["parts"]), ("avx512", ["parts"]), ("sse4.2", [])])
def test_parts_of_jpegs_are_missed_where_the_processor_could_decode_them(isa: str, rules: list[str]) -> None:
    facts = Facts(processor=Processor(isa=isa), decoders=Decoders(parts="no"))
    assert [one.rule for one in findings(facts) if one.rule == "parts"] == rules


def test_versions_out_of_range_and_missing_packages() -> None:
    packages = {
        "steadytrain": Package(version=None),  # run from its source
        "torch": Package(version="2.4.0", wanted=">=2.10", fits=False),
        "python": Package(version="3.10.1", wanted=">=3.11", fits=False),
        "safetensors": Package(version=None, wanted=">=0.5"),
        "numpy": Package(version="2.4.6", wanted=">=1.26", fits=True),
        "triton": Package(version="3.9.0"),
    }
    told = {one.rule: one for one in findings(Facts(packages=packages))}
    assert list(told) == ["missing.safetensors", "version.torch", "version.python"]
    assert told["version.torch"].what == "torch 2.4.0 is outside of >=2.10"
    assert told["missing.safetensors"].remedy == "pip install 'safetensors>=0.5'"
