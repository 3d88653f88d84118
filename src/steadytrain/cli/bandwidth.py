"""``steady bandwidth``: how fast ranks exchange a model's tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text, progress
from steadytrain.cli.options import Json, require_seconds
from steadytrain.config import Data, Model, Recipe
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
    procs: Annotated[int | None, Parameter(name=("--procs", "-n"))] = None,
    backend: BackendFlag = "auto",
    seconds: float = 5.0,
    step_seconds: float | None = None,
    batch_size: Annotated[int | None, Parameter(name=("--batch-size", "-b"))] = None,
    size: Annotated[int | None, Parameter(name=("--size", "--img-size"))] = None,
    json: Json = False,
) -> int:
    """Measure the links between ranks: all-reduce of a model's tensors, uncompressed and compressed.

    Without a launcher it starts ranks on this machine. Started by torchrun, mpirun, srun or steady launch, it measures
    between the ranks of that launch.

    The tensors are exchanged one after another, then in buckets of 25 MB that are sent at the same time, as in
    training. The buckets are also sent as fp16 and bf16. GB/s per rank is MXNet's figure: 2 (n - 1) / n of
    the gradients' bytes, for n ranks, over the time. Push+pull is twice their bytes over the time. Compressed
    gradients count with their 32-bit size. The error is relative to a sum that is computed without an exchange.

    From that it predicts how long an update takes with each engine (ddp, its compressions, local). It recommends the
    one that changes training least and is within 10 % of the fastest (docs: engines).

    Args:
        model: The model whose tensors are exchanged: a name that steady train accepts.
        procs: Ranks on this machine, 2 or more (default: one for each GPU, or 2).
        backend: gloo: tensors in CPU memory; nccl: tensors in GPU memory; auto: all that are available.
        seconds: How long to measure each backend.
        step_seconds: Computing time of an update, to choose the engine by. [default: 0.1, 1 and 10 s side by side]
        batch_size: Measure the computing time of an update of this many images, over all ranks.
        size: Side of those images. [default: the model's own, or 224]

    Examples:
        steady bandwidth
        steady bandwidth --model resnet20 --size 32 --batch-size 128
        steady bandwidth --model timm/vit_base_patch16_224 --procs 4 --json
    """
    require_seconds(seconds)
    if step_seconds is not None:
        require_seconds(step_seconds, "--step-seconds")
        if batch_size is not None:
            raise InputError("--step-seconds says how long an update computes, and --batch-size measures it: omit one")
    from steadytrain.distributed.world import world_from_environment

    world = world_from_environment(os.environ)
    if world.size == 1:
        from steadytrain.launch.supervise import keep_ranks

        gpus = len(facts.accelerators())
        if procs is not None and not 2 <= procs <= 256:
            raise InputError(f"--procs is {procs}; it must be from 2 to 256: a single rank has nothing to exchange")
        procs = procs or max(2, gpus)
        if backend == "nccl" and procs > gpus:
            raise InputError(f"--backend nccl needs a GPU for each of {procs} ranks, but there are {gpus}: use gloo")
        words = ["bandwidth", "--model", model, "--backend", backend, "--seconds", str(seconds)]
        options = {"--step-seconds": step_seconds, "--batch-size": batch_size, "--size": size}
        words += [word for flag, value in options.items() if value is not None for word in (flag, str(value))]
        command = python("-m", "steadytrain", *words, *(["--json"] if json else []))
        return keep_ranks(command, procs, restarts=0, say=note)
    if procs is not None:
        raise InputError(f"--procs is {procs}, and {world.launcher} has started {world.size} ranks: omit --procs")
    try:
        if batch_size is not None:
            step_seconds = _measure_step(world, model, batch_size, size)
        document = _measure_links(world, model, backend, seconds, step_seconds)
    except (InputError, RankLostError) as error:
        if world.is_first:
            raise
        return error.exit_code  # the first rank says why
    if world.is_first and json:
        print_json(document)
    elif world.is_first:
        print_text(_bandwidth_text(document))
    return 0


def _measure_step(world: World, model: str, batch_size: int, size: int | None) -> float:
    """Measure the median update of this rank's part of a batch, while the other ranks measure theirs."""
    from steadytrain.training.profile.bench import measure

    if not 0 < batch_size <= 1 << 20 or batch_size % world.size:
        raise InputError(f"--batch-size is {batch_size}; it must be a multiple of the {world.size} ranks")
    if world.is_first:
        note(f"measuring updates of {batch_size // world.size} images on each rank")
    threads = max(1, facts.cores() // world.local_size)
    has_gpus = len(facts.accelerators()) >= world.local_size  # else the ranks compute, and exchange, on CPUs
    device = f"cuda:{world.local_rank}" if has_gpus else "cpu"
    recipe = Recipe(data=Data(train="drawn"), model=Model(model), batch_size=batch_size // world.size)
    recipe = recipe.with_({"parallel.compute_threads": threads, "parallel.device": device})
    return measure(recipe, size=size, seconds=1.0, allow_import=True).step_seconds["p50"]


def _measure_links(
    world: World, model: str, backend: BackendFlag, seconds: float, step_seconds: float | None
) -> dict[str, Any]:
    """Return the document, on every rank; only the first shows progress."""
    from steadytrain.models.build import parameter_shapes
    from steadytrain.tuning.bandwidth import measure_links
    from steadytrain.tuning.engines import engines_document

    def shapes() -> tuple[str, list[list[int]]]:
        note(f"building {model}")
        return parameter_shapes(Model(model), allow_import=True)

    keep_memory(facts.memory_bytes() // world.local_size)  # as training does
    with ExitStack() as stack:
        advance = stack.enter_context(progress("measuring", 0, unit="ways")) if world.is_first else lambda *done: None
        document, exchanged = measure_links(
            world, shapes, backend=backend, seconds=seconds, cores=facts.cores(), progress=advance
        )
    return document | {"engines": engines_document(document, exchanged, step_seconds)}


def _bandwidth_text(document: Mapping[str, Any]) -> str:
    from steadytrain.tuning.engines import engines_text

    hosts, gradients = document["hosts"], bytes_text(4 * document["parameters"])
    lines = [
        f"{document['model']}: {document['parameters']:,} parameters, {gradients} of gradients",
        f"{document['procs']} ranks on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} machines'}",
    ]
    for link in document["backends"]:
        cells = [[link["backend"], "ms", "push+pull", "GB/s/rank", "error"]]
        for way in link["ways"]:
            n, speed = way["exchanges"], f"{way['bytes_per_second'] / 1e6:,.0f} MB/s"
            figures = [f"{way['seconds'] * 1000:,.2f}", speed, f"{way['gigabytes_per_second']:.3g}"]
            cells.append([f"{n} {_WAYS[way['way']].format('s' * (n != 1))}", *figures, f"{way['error']:.0e}"])
        cells.append(["a single number", f"{link['latency_seconds'] * 1000:,.2f}", "", "", ""])
        lines += ["", text_table(cells, right=range(1, 5), least=(22, 8, 10, 9, 7), gap=1)]
    return "\n".join([*lines, "", engines_text(document["engines"], 60)])
