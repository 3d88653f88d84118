"""``steady bandwidth``: how fast ranks exchange a model's tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from steadytrain.cli.console import note, print_json, print_text, progress
from steadytrain.cli.options import Json, ProcsFlag, SecondsFlag
from steadytrain.config import Model
from steadytrain.errors import InputError, RankLostError
from steadytrain.format import size as bytes_text
from steadytrain.format import text_table
from steadytrain.machine import facts
from steadytrain.machine.children import python
from steadytrain.machine.process import keep_memory

if TYPE_CHECKING:
    from steadytrain.distributed.world import World

BackendFlag = Literal["auto", "gloo", "nccl"]

_WAYS = {
    "tensors": "tensor{} one by one",
    "buckets": "bucket{} at once",
    "fp16": "bucket{} as fp16",
    "bf16": "bucket{} as bf16",
}


def bandwidth(
    *,
    model: str = "resnet50",
    procs: ProcsFlag = None,
    backend: BackendFlag = "auto",
    seconds: SecondsFlag = 5.0,
    json: Json = False,
) -> int:
    """Measure the links between ranks: all-reduce of a model's tensors, uncompressed and compressed.

    Without a launcher it starts ranks on this machine. Started by torchrun, mpirun, srun or steady launch, it measures
    between the ranks of that launch.

    The tensors are exchanged one after another, then in buckets of 25 MB that are sent at the same time, as in
    training. The buckets are also sent as fp16 and bf16. GB/s per rank is MXNet's figure: 2 (n - 1) / n of
    the gradients' bytes, for n ranks, over the time. Push+pull is twice their bytes over the time. Compressed
    gradients count with their 32-bit size.

    Args:
        model: The model whose tensors are exchanged: a name that steady train accepts.
        procs: Ranks on this machine, 2 or more (default: one for each GPU, or 2).
        backend: gloo: tensors in CPU memory; nccl: tensors in GPU memory; auto: all that are available.
        seconds: How long to measure each backend.

    Examples:
        steady bandwidth
        steady bandwidth --model timm/vit_base_patch16_224 --procs 4 --json
    """
    from steadytrain.distributed.world import world_from_environment

    world = world_from_environment(os.environ)
    if world.size == 1:
        from steadytrain.launch.supervise import keep_ranks

        gpus = len(facts.accelerators())
        procs = procs or max(2, gpus)
        if backend == "nccl" and procs > gpus:
            raise InputError(f"--backend nccl needs a GPU for each of {procs} ranks, but there are {gpus}: use gloo")
        words = ["bandwidth", "--model", model, "--backend", backend, "--seconds", str(seconds)]
        command = python("-m", "steadytrain", *words, *(["--json"] if json else []))
        return keep_ranks(command, procs, restarts=0, say=note)
    if procs is not None:
        raise InputError(f"--procs is {procs}, and {world.launcher} has started {world.size} ranks: omit --procs")
    try:
        document = _measure_links(world, model, backend, seconds)
    except (InputError, RankLostError) as error:
        if world.is_first:
            raise
        return error.exit_code  # the first rank says why
    if world.is_first:
        print_json(document) if json else print_text(_bandwidth_text(document))
    return 0


def _measure_links(world: World, model: str, backend: BackendFlag, seconds: float) -> dict[str, Any]:
    """Return the document, on every rank; only the first shows progress."""
    from steadytrain.models.build import parameter_shapes
    from steadytrain.tuning.bandwidth import measure_links

    def shapes() -> tuple[str, list[list[int]]]:
        note(f"building {model}")
        return parameter_shapes(Model(model), allow_import=True)

    keep_memory(facts.memory_bytes() // world.local_size)  # as training does
    with ExitStack() as stack:
        advance = stack.enter_context(progress("measuring", 0, unit="ways")) if world.is_first else lambda *done: None
        return measure_links(world, shapes, backend=backend, seconds=seconds, cores=facts.cores(), progress=advance)


def _bandwidth_text(document: Mapping[str, Any]) -> str:
    hosts, gradients = document["hosts"], bytes_text(4 * document["parameters"])
    lines = [
        f"{document['model']}: {document['parameters']:,} parameters, {gradients} of gradients",
        f"{document['procs']} ranks on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} machines'}",
    ]
    for link in document["backends"]:
        cells = [[link["backend"], "ms", "push+pull", "GB/s/rank"]]
        for way in link["ways"]:
            n, speed = way["exchanges"], f"{way['bytes_per_second'] / 1e6:,.0f} MB/s"
            figures = [f"{way['seconds'] * 1000:,.2f}", speed, f"{way['gigabytes_per_second']:.3g}"]
            cells.append([f"{n} {_WAYS[way['way']].format('s' * (n != 1))}", *figures])
        cells.append(["a single number", f"{link['latency_seconds'] * 1000:,.2f}", "", ""])
        lines += ["", text_table(cells, right=range(1, 4), least=(22, 8, 10, 9), gap=1)]
    return "\n".join(lines)
