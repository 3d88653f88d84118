"""``steady bandwidth``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, progress
from steadytrain.cli.options import Json, require_seconds
from steadytrain.errors import InputError, RankLostError
from steadytrain.format import size as bytes_text
from steadytrain.machine import facts, process

if TYPE_CHECKING:
    from steadytrain.distributed.world import World

Backend = Literal["auto", "gloo", "nccl"]

_WAYS = {
    "tensors": "tensor{} one by one",
    "buckets": "bucket{} at once",
    "fp16": "bucket{} as fp16",
    "bf16": "bucket{} as bf16",
    "2bit": "bucket{} as 2bit",
}


def bandwidth(
    *,
    model: str = "resnet50",
    procs: Annotated[int | None, Parameter(name=("--procs", "-n"))] = None,
    backend: Backend = "auto",
    seconds: float = 5.0,
    json: Json = False,
) -> int:
    """Measure what the links between ranks give: all-reduce of a model's own tensors, whole and compressed.

    Alone it starts its own ranks on this machine. Started by torchrun, mpirun, srun or steady launch, it measures
    between the ranks of that launch.

    The tensors are exchanged one after another, and in buckets of 25 MB that are under way at the same time, as in
    training; the buckets also as fp16, bf16 and 2bit. GB/s per rank is MXNet's figure: 2 (n - 1) / n of the gradients'
    bytes, for n ranks, over the time. Push+pull is twice their bytes over the time. Compressed gradients count as the
    32-bit ones that they stand for. The error is that against a sum made without any exchange, relative to it.

    Args:
        model: Whose tensors to exchange: a name that steady train takes.
        procs: Ranks on this machine, 2 or more; else one for each GPU, or 2.
        backend: gloo: what is in CPUs' memory; nccl: what is in GPUs'; auto: all that there are.
        seconds: How long to measure, for each back end.

    Examples:
        steady bandwidth
        steady bandwidth --model timm/vit_base_patch16_224 --procs 4 --json
    """
    require_seconds(seconds)
    from steadytrain.distributed.world import world_from_environment

    world = world_from_environment(os.environ)
    if world.size == 1:
        return _start_ranks(model, procs, backend, seconds, json)
    if procs is not None:
        raise InputError(f"--procs is {procs}, and {world.launcher} has started {world.size} ranks: leave --procs out")
    try:
        document = _measure(world, model, backend, seconds)
    except (InputError, RankLostError) as error:
        if world.is_first:
            raise
        return error.exit_code  # the first rank says why
    if world.is_first and json:
        print_json(document)
    elif world.is_first:
        print(_text(document))
    return 0


def _start_ranks(model: str, procs: int | None, backend: Backend, seconds: float, json: bool) -> int:
    """Run the same command on ranks of its own on this machine."""
    from steadytrain.launch.supervise import keep_ranks

    gpus = len(facts.accelerators())
    if procs is not None and not 2 <= procs <= 256:
        raise InputError(f"--procs is {procs}; it must be from 2 to 256: a rank alone exchanges nothing")
    procs = procs or max(2, gpus)
    if backend == "nccl" and procs > gpus:
        raise InputError(f"--backend nccl needs a GPU for each of {procs} ranks, and there are {gpus}: use gloo")
    words = ["bandwidth", "--model", model, "--backend", backend, "--seconds", str(seconds)]
    command = [sys.executable, "-m", "steadytrain", *words, *(["--json"] if json else [])]
    return keep_ranks(command, procs, restarts=0, say=note)


def _measure(world: World, model: str, backend: Backend, seconds: float) -> dict[str, Any]:
    """Return the document, on every rank; only the first shows progress."""
    from steadytrain.config import Model
    from steadytrain.distributed.bandwidth import links
    from steadytrain.models.build import parameter_sizes

    def sizes() -> tuple[str, list[int]]:
        note(f"building {model}")
        return parameter_sizes(Model(model), allow_import=True)

    process.keep_memory(facts.memory_bytes() // world.local_size)  # as training does
    with ExitStack() as stack:
        advance = stack.enter_context(progress("measuring", 0, unit="ways")) if world.is_first else lambda *done: None
        measured = links(world, sizes, backend=backend, seconds=seconds, cores=facts.cores(), progress=advance)
    return {
        "model": measured.model,
        "tensors": len(measured.sizes),
        "parameters": sum(measured.sizes),
        "procs": world.size,
        "hosts": list(dict.fromkeys(measured.hosts)),
        "backends": [{**vars(link), "ways": [vars(way) for way in link.ways]} for link in measured.backends],
    }


def _text(document: Mapping[str, Any]) -> str:
    hosts, gradients = document["hosts"], bytes_text(4 * document["parameters"])
    lines = [
        f"{document['model']}: {document['parameters']:,} parameters, {gradients} of gradients",
        f"{document['procs']} ranks on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} machines'}",
    ]
    for link in document["backends"]:
        lines += ["", f"{link['backend']:<22} {'ms':>8} {'push+pull':>10} {'GB/s/rank':>9} {'error':>7}"]
        for way in link["ways"]:
            n = way["exchanges"]
            name, rate = f"{n} {_WAYS[way['way']].format('s' * (n != 1))}", f"{way['bytes_per_second'] / 1e6:,.0f} MB/s"
            figures = f"{way['gigabytes_per_second']:>9.3g} {way['error']:>7.0e}"
            lines.append(f"{name:<22} {way['seconds'] * 1000:>8,.2f} {rate:>10} {figures}")
        lines.append(f"{'a single number':<22} {link['latency_seconds'] * 1000:>8,.2f}")
    return "\n".join(lines)
