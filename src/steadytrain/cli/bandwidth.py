"""``steady bandwidth``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

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
    model: Annotated[str, Parameter(help="Whose tensors to exchange: a name that steady train takes.")] = "resnet50",
    procs: Annotated[
        int | None,
        Parameter(name=("--procs", "-n"), help="Ranks on this machine, 2 or more; else one for each GPU, or 2."),
    ] = None,
    backend: Annotated[
        Backend,
        Parameter(help="gloo: what is in CPUs' memory; nccl: what is in GPUs'; auto: all that there are."),
    ] = "auto",
    seconds: Annotated[float, Parameter(help="How long to measure, for each back end.")] = 5.0,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="", show_default=False)] = False,
) -> int:
    """Measure what the links between ranks give: all-reduce of a model's own tensors, whole and compressed.

    Alone it starts its own ranks on this machine. Started by torchrun, mpirun, srun or steady launch, it measures
    between the ranks of that launch.

    The tensors are exchanged one after another, and in buckets of 25 MB that are under way at the same time, as in
    training; the buckets also as fp16, bf16 and 2bit. GB/s per rank is MXNet's figure: 2 (n - 1) / n of the gradients'
    bytes, for n ranks, over the time. Push+pull is twice their bytes over the time. Compressed gradients count as the
    32-bit ones that they stand for. The error is that against a sum made without any exchange, relative to it.

    Examples
    --------
    steady bandwidth
    steady bandwidth --model timm/vit_base_patch16_224 --procs 4 --json
    """
    from steadytrain.distributed.world import world_from_environment
    from steadytrain.errors import InputError, RankLostError

    if not 0 < seconds <= 3600:
        raise InputError(f"--seconds is {seconds}; it must be above 0, up to 3600")
    world = world_from_environment(os.environ)
    if world.size == 1:
        return _with_own_ranks(model, procs, backend, seconds, json)
    if procs is not None:
        raise InputError(f"--procs is {procs}, and {world.launcher} has started {world.size} ranks: leave --procs out")
    try:
        document = _measured(world, model, backend, seconds)
    except (InputError, RankLostError) as error:
        if world.is_first:
            raise
        return error.exit_code  # the first rank tells
    if world.is_first:
        import json as json_module

        print(json_module.dumps(document, indent=2) if json else _text(document))
    return 0


def _with_own_ranks(model: str, procs: int | None, backend: Backend, seconds: float, json: bool) -> int:
    from steadytrain.cli.console import note
    from steadytrain.errors import InputError
    from steadytrain.launch.supervise import keep_ranks
    from steadytrain.machine import facts

    gpus = len(facts.accelerators())
    if procs is not None and not 2 <= procs <= 256:
        raise InputError(f"--procs is {procs}; it must be from 2 to 256: a rank alone exchanges nothing")
    procs = procs or max(2, gpus)
    if backend == "nccl" and procs > gpus:
        raise InputError(f"--backend nccl needs a GPU for each of {procs} ranks, and there are {gpus}: use gloo")
    words = ["bandwidth", "--model", model, "--backend", backend, "--seconds", str(seconds)]
    command = [sys.executable, "-m", "steadytrain", *words, *(["--json"] if json else [])]
    return keep_ranks(command, procs, restarts=0, say=note)


def _measured(world: World, model: str, backend: Backend, seconds: float) -> dict[str, Any]:
    """The document, on every rank; only the first says what it is at."""
    import contextlib

    from steadytrain.cli.console import note, progress
    from steadytrain.config import Model
    from steadytrain.distributed.bandwidth import links
    from steadytrain.machine import facts, process
    from steadytrain.models.build import parameter_sizes

    def sizes() -> tuple[str, list[int]]:
        note(f"building {model}")
        return parameter_sizes(Model(model), allow_import=True)

    process.keep_memory(facts.memory_bytes() // world.local_size)  # as training does
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress("measuring", 0, unit="ways")) if world.is_first else lambda *done: None
        told = links(world, sizes, backend=backend, seconds=seconds, cores=facts.cores(), progress=advance)
    return {
        "model": told.model,
        "tensors": len(told.sizes),
        "parameters": sum(told.sizes),
        "procs": world.size,
        "hosts": list(dict.fromkeys(told.hosts)),
        "backends": [{**vars(link), "ways": [vars(way) for way in link.ways]} for link in told.backends],
    }


def _text(document: Mapping[str, Any]) -> str:
    from steadytrain.cli.lines import size_of

    n, hosts = document["procs"], document["hosts"]
    weight = size_of(4 * document["parameters"])
    lines = [
        f"{document['model']}: {document['parameters']:,} parameters, {weight} of gradients",
        f"{n} ranks on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} machines'}",
    ]
    for one in document["backends"]:
        lines += ["", f"{one['backend']:<22} {'ms':>8} {'push+pull':>10} {'GB/s/rank':>9} {'error':>7}"]
        lines += [_row(way) for way in one["ways"]]
        lines.append(f"{'a single number':<22} {one['latency_seconds'] * 1000:>8,.2f}")
    return "\n".join(lines)


def _row(way: Mapping[str, Any]) -> str:
    rate = f"{way['bytes_per_second'] / 1e6:,.0f} MB/s"
    n = way["exchanges"]
    name = f"{n} {_WAYS[way['way']].format('s' * (n != 1))}"
    return (
        f"{name:<22} {way['seconds'] * 1000:>8,.2f} {rate:>10} {way['gigabytes_per_second']:>9.3g} {way['error']:>7.0e}"
    )
