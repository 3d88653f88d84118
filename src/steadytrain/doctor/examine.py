"""Collecting all facts about this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from steadytrain.doctor import decoders, memory, torch_build
from steadytrain.doctor.accelerators import accelerators
from steadytrain.doctor.child import asked
from steadytrain.doctor.facts import Facts
from steadytrain.doctor.packages import packages
from steadytrain.doctor.places import places
from steadytrain.doctor.processor import load, processor, stolen, ticks
from steadytrain.doctor.system import system
from steadytrain.doctor.variables import variables
from steadytrain.machine.cgroups import ROOT


def examine(root: Path = ROOT, environment: Mapping[str, str] | None = None) -> Facts:
    """All facts about this machine, in a few seconds: most of them for importing torch in a process of its own.

    Args:
        root: where ``proc``, ``sys``, ``dev``, ``etc`` and ``run`` lie.
        environment: variables; None: this process's own.
    """
    environment = os.environ if environment is None else environment
    # What torch's process takes of the machine must not be taken for somebody else's load.
    gpus, before = accelerators(root), ticks(root)
    now = load(root)
    with asked(torch_build.QUESTION) as torch, asked(decoders.QUESTION) as images:
        rest = Facts(
            system=system(root, environment),
            processor=processor(root),
            memory=memory.memory(root),
            places=places(root, environment),
            limits=memory.limits(),
            allocator=memory.allocator(root, environment),
            variables=variables(environment),
            accelerators=gpus,
            packages=packages(platform.python_version()),
            decoders=decoders.decoders(images.answer(decoders.SECONDS)),
            torch=torch_build.torch_build(torch.answer(torch_build.SECONDS)),
        )
    return replace(rest, load=replace(now, steal_share=stolen(before, ticks(root))))
