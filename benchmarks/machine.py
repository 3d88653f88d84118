"""What every benchmark says about the machine it ran on, and where its figures go."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from steadytrain.machine.facts import facts as machine_facts
from steadytrain.machine.procfs import processor_seconds, steal_share

RESULTS = Path(__file__).resolve().parent / "results"
LOAD_BEFORE = round(psutil.getloadavg()[0], 2)
SECONDS_BEFORE = processor_seconds()
PACKAGES = ("steadytrain", "torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg", "cykooz-resizer")


def facts() -> dict[str, Any]:
    """Machine, versions, date (UTC) and how busy the machine was. It gets published: it names no host and no kernel.

    ``load_average`` holds what stood in the machine's queue in the minute before the benchmark began, and at its end,
    when the benchmark itself counts. ``steal_share`` is what the hypervisor meanwhile withheld of the processors' time.
    """
    named = {name: value for name, value in machine_facts().items() if name not in ("host", "system")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}",
        **named,
        "packages": {name: _version(name) for name in PACKAGES},
        "load_average": {"before": LOAD_BEFORE, "after": round(psutil.getloadavg()[0], 2)},
        "steal_share": steal_share(SECONDS_BEFORE, processor_seconds()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def record(name: str, document: Mapping[str, Any], *, save: bool = False) -> dict[str, Any]:
    """Print a benchmark's figures with the machine's facts as one JSON document, and return it.

    Args:
        name: of the benchmark; the file is ``results/NAME.json``.
        document: the figures.
        save: also write the file, in place of an older one.
    """
    values = {"benchmark": name, **document, "machine": facts()}
    text = json.dumps(values, indent=2)
    print(text)
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return values


def of_cases(name: str, chosen: Sequence[str], known: Iterable[str]) -> str:
    """The name of a benchmark, with its cases where some were left out: their figures do not replace those of all.

    >>> of_cases("accuracy", ["demo"], ["demo", "cifar10"]), of_cases("accuracy", ["demo"], ["demo"])
    ('accuracy_demo', 'accuracy')
    """
    return name if set(chosen) == set(known) else "_".join((name, *chosen))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
