"""Rules about the environment's variables, threads, the allocator, decoders and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steadytrain.doctor.facts import Facts
from steadytrain.doctor.finding import Finding, Severity, some

_SET = ("1", "true", "on", "yes")
_PINNING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY")


def pinned(facts: Facts) -> Iterator[Finding]:
    """Loading torch leaves a process fewer processors than it had: its OpenMP pins the first thread.

    Threads that are started later inherit that: measured with torch 2.15 and OMP_PROC_BIND=true.
    """
    allowed, left = facts.processor.allowed, facts.torch.allowed
    if allowed is None or left is None or left >= allowed:
        return
    causes = [f"{name}={facts.variables[name]}" for name in _PINNING if name in facts.variables]
    by = f" ({', '.join(causes)})" if causes else ""
    what = f"loading torch leaves this process {some(left, 'core')} of {allowed}{by}"
    why = "The threads that decode images inherit it: all of them share what is left."
    remedy = (
        "unset " + " ".join(name for name in _PINNING if name in facts.variables)
        if causes
        else "unset OpenMP's pinning"
    )
    yield Finding("pinned", "bad", what, why, remedy)


def threads(facts: Facts) -> Iterator[Finding]:
    """torch computes with more threads than there are cores, or with fewer: by OMP_NUM_THREADS, or for a quota."""
    usable, started = facts.processor.usable, facts.torch.threads
    told = facts.variables.get("OMP_NUM_THREADS")
    asked = None if told is None else _first(told)
    others = "steady train takes no more than there are cores; steady evaluate, steady predict and other programs do."
    unset = f"export OMP_NUM_THREADS={usable}, or unset it"
    if usable is None:
        return
    if told is not None and not asked:
        why = "steady train takes one thread for each core; others take what their OpenMP makes of it."
        yield Finding("threads", "note", f"OMP_NUM_THREADS={told!r} is no number of threads", why, unset)
    elif asked and asked > usable:
        what = f"OMP_NUM_THREADS={told} on {some(usable, 'core')}"
        yield Finding("threads", "warn", what, f"Threads push each other off the cores. {others}", unset)
    elif asked and asked < usable:
        what = f"OMP_NUM_THREADS={told} keeps computing to {asked} of {usable} cores"
        why = "Training, evaluating and predicting on a CPU keep to it; the threads that decode images do not."
        remedy = "unset OMP_NUM_THREADS, unless many processes share the machine"
        yield Finding("threads", "note" if facts.torch.sees_gpu else "warn", what, why, remedy)
    elif told is None and started is not None and started > usable:
        what = f"torch starts with {some(started, 'thread')} on {some(usable, 'core')}: it does not know the quota"
        why = f"Threads push each other off the cores. {others}"
        yield Finding("threads", "warn", what, why, f"export OMP_NUM_THREADS={usable}")


@dataclass(frozen=True)
class Variable:
    """A variable of the environment that costs something where its value is such."""

    name: str
    costs: Callable[[str], bool]
    severity: Severity
    why: str


def _is_set(value: str) -> bool:
    return value.strip().lower() in _SET


def _is_given(value: str) -> bool:
    return bool(value.strip())


VARIABLES = (
    Variable(
        "CUDA_LAUNCH_BLOCKING", _is_set, "warn", "Each operation on a GPU waits for the one before: for debugging."
    ),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_given, "warn", "Each tensor on a GPU is allocated by the driver."),
    Variable(
        "NVIDIA_TF32_OVERRIDE", lambda value: value.strip() == "0", "note", "Products of float32 run without TF32."
    ),
    Variable("ATEN_CPU_CAPABILITY", _is_given, "warn", "torch is kept to older instructions than the processor's."),
    Variable("ONEDNN_MAX_CPU_ISA", _is_given, "warn", "Convolutions are kept to the instructions named."),
    Variable("DNNL_MAX_CPU_ISA", _is_given, "warn", "Convolutions are kept to the instructions named."),
    Variable("MKL_ENABLE_INSTRUCTIONS", _is_given, "warn", "Matrix products are kept to the instructions named."),
    Variable("JSIMD_FORCENONE", _is_set, "warn", "JPEGs are decoded without vector instructions."),
    Variable("JSIMD_FORCESSE2", _is_set, "warn", "JPEGs are decoded with older instructions than the processor's."),
    Variable("OMP_THREAD_LIMIT", _is_given, "note", "Operations on the CPU get no more threads than that."),
    Variable("OMP_WAIT_POLICY", lambda value: value.strip().lower() == "active", "warn", "Idle threads spin on cores."),
    Variable(
        "KMP_BLOCKTIME", lambda value: value.strip().lower() in ("infinite", "infinity"), "warn", "Idle threads spin."
    ),
    Variable("PYTHONDEVMODE", _is_given, "warn", "Python checks everything twice: for debugging."),
    Variable("PYTHONMALLOC", lambda value: value.endswith("debug"), "warn", "Python checks its memory: for debugging."),
    Variable(
        "PYTHONTRACEMALLOC", lambda value: value.strip() not in ("", "0"), "warn", "Python notes each allocation."
    ),
)


def set_variables(facts: Facts) -> Iterator[Finding]:
    """Variables that were set for debugging, or for another machine."""
    for variable in VARIABLES:
        value = facts.variables.get(variable.name)
        if value is not None and variable.costs(value):
            what = f"{variable.name}={value} is set"
            name = f"variable.{variable.name}"
            yield Finding(name, variable.severity, what, variable.why, f"unset {variable.name}")


def allocator(facts: Facts) -> Iterator[Finding]:
    """Another allocator was asked for and did not load, or is loaded in place of glibc's."""
    loaded = facts.allocator.preloaded or ()
    if missing := [name for name in loaded if name.endswith("(not loaded)")]:
        what = f"LD_PRELOAD names {', '.join(missing)}"
        why = "The loader could not open it and went on without."
        yield Finding("preload", "warn", what, why, "give the file's whole path, or unset LD_PRELOAD")
    elif loaded:
        what = f"{', '.join(loaded)} hands out memory in place of glibc"
        why = "What steadytrain sets for training on a CPU (keep freed memory, on huge pages) does not reach it."
        yield Finding("allocator", "note", what, why, "compare with LD_PRELOAD unset, by steady train on a CPU")


def vector_code(facts: Facts) -> Iterator[Finding]:
    """torch computes with older instructions than the processor has."""
    isa, torch = facts.processor.isa, facts.torch
    older = {"avx512": ("AVX2", "DEFAULT"), "avx2": ("DEFAULT",)}.get(isa or "", ())
    if torch.isa in older and "ATEN_CPU_CAPABILITY" not in facts.variables:  # which is told by itself
        what = f"torch uses {torch.isa} on a processor with {isa}"
        why = "Its own operations on a CPU are slower than they could be; oneDNN and MKL choose for themselves."
        yield Finding("vector-code", "note", what, why, "nothing, where the build of torch decides so")


def decoders(facts: Facts) -> Iterator[Finding]:
    """A decoder, or what scales images, that is missing or slower than it could be."""
    told = facts.decoders
    anew = "pip install --force-reinstall --no-cache-dir"
    if told.simplejpeg_error:
        both = told.pillow_error == told.simplejpeg_error
        what = f"simplejpeg {'and Pillow ' if both else ''}cannot be loaded: {told.simplejpeg_error}"
        remedy = f"{anew} simplejpeg{' pillow' if both else ''}"
        yield Finding("simplejpeg", "bad", what, "No image can be read.", remedy)
    elif told.simplejpeg_simd is False:
        what = "simplejpeg is built without libjpeg-turbo's vector code"
        yield Finding("simplejpeg-simd", "warn", what, "JPEGs are decoded several times slower.", "install its wheel")
    if told.pillow_error and told.pillow_error != told.simplejpeg_error:
        what = f"Pillow cannot be loaded: {told.pillow_error}"
        yield Finding("pillow", "bad", what, "No image can be read.", f"{anew} pillow")
    elif told.pillow_turbo == "no":
        what = "Pillow is built without libjpeg-turbo"
        why = "JPEGs that are left to it (CMYK, damaged ones) are slower; the others are simplejpeg's."
        yield Finding("pillow-turbo", "note", what, why, "install Pillow's own wheel, not the system's package")
    if told.pillow_error is None and told.pillow_webp is False:
        what = "Pillow is built without WebP"
        yield Finding("pillow-webp", "warn", what, "WebP images cannot be read.", "install Pillow's own wheel")
    if told.resizer == "no" or told.resizer_error:
        what = (
            f"cykooz-resizer {f'cannot be loaded: {told.resizer_error}' if told.resizer_error else 'is not installed'}"
        )
        why = "Packing scales images down by numpy, to the same bytes in about ten times the time."
        remedy = f"{anew if told.resizer_error else 'pip install'} cykooz-resizer, where it has a wheel for this system"
        yield Finding("resizer", "warn", what, why, remedy)
    if told.parts_error or (told.parts == "no" and facts.processor.isa in ("avx2", "avx512")):
        what = f"the native decoder {f'cannot be loaded: {told.parts_error}' if told.parts_error else 'was not built'}"
        why = "The feed decodes more of a JPEG than is seen: a core feeds little more than half as many photographs."
        remedy = "install Rust (https://rustup.rs), then steadytrain again from its sources: pip install ."
        yield Finding("parts", "note", what, why, remedy)


def versions(facts: Facts) -> Iterator[Finding]:
    """Packages that are missing or out of range."""
    for name, package in facts.packages.items():
        if package.version is None and name not in ("torch", "steadytrain"):
            why = "What needs it fails when it is first used."
            yield Finding(
                f"missing.{name}", "bad", f"{name} is not installed", why, f"pip install '{name}{package.wanted or ''}'"
            )
        elif package.fits is False:
            what = f"{name} {package.version} is outside of {package.wanted}"
            why = "steadytrain and its libraries are not made for it."
            remedy = f"install Python {package.wanted}" if name == "python" else f"pip install '{name}{package.wanted}'"
            yield Finding(f"version.{name}", "warn", what, why, remedy)


def _first(text: str) -> int | None:
    """The first of OpenMP's numbers: ``4,2`` is four threads, with two more inside each."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdigit() else None
