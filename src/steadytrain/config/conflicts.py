"""Settings of different parts of a recipe that exclude each other, such as an engine and a number format."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.config.losses import SOFTMAX, parse_loss
from steadytrain.config.parts import Budget, Data, Model, Optim, Parallel, Precision
from steadytrain.config.phases import parse_train

Conflict = tuple[str, str, str]
"""Two settings as ``key=value``, and why they exclude each other, with the way out."""


def find_conflicts(
    data: Data, model: Model, optim: Optim, precision: Precision, budget: Budget, parallel: Parallel
) -> Iterator[Conflict]:
    """Yield the pairs of settings that exclude each other."""
    if optim.waits_for_evaluations and data.val is None and data.holdout == 0:
        why = "there is nothing to evaluate on; give --val or --holdout, or another schedule"
        yield f"optim.schedule={optim.schedule!r}", "data.holdout=0", why
    yield from _of_exchange(data, model, optim, precision, parallel)
    yield from _of_samples(data, model, optim, budget)
    yield from _of_phases(model, precision, parallel)


def _of_exchange(
    data: Data, model: Model, optim: Optim, precision: Precision, parallel: Parallel
) -> Iterator[Conflict]:
    """Yield conflicts of compressed gradients, of engines, and of graphs that are recorded once."""
    compress, accumulate = parallel.compress, optim.accumulate
    compressed, numbers = f"parallel.compress={compress!r}", f"precision.name={precision.name!r}"
    compiled = f"precision.compile={precision.compile!r}"
    records_graphs = parallel.graph or precision.records_graphs
    if compress == "powersgd" and precision.name == "fp16":
        yield compressed, numbers, "the loss scale changes what errors mean; use bf16, or compress=fp16"
    if compress == "powersgd" and records_graphs:
        graph = "parallel.graph=True" if parallel.graph else compiled
        yield compressed, graph, "a graph records one way of exchanging; leave one of them out"
    if compress != "none" and precision.is_pure:
        yield compressed, numbers, "its gradients have 16 bits already; use compress=none"
    if parallel.engine == "local":
        yield from _of_local(model, precision, parallel)
    if parallel.engine == "async":
        yield from _of_async(model, optim, precision, parallel)
    if parallel.shard:
        yield from _of_shards(model, optim, precision, parallel)
    elif parallel.shard_ranks is not None or parallel.shard_gather != "fp32":
        name, why = "shard_ranks" if parallel.shard_ranks else "shard_gather", "it needs parallel.shard=true"
        yield f"parallel.{name}={getattr(parallel, name)!r}", "parallel.shard=False", f"{why}, or leave it out"
    if precision.compile == "reduce-overhead" and accumulate > 1:
        why = "a CUDA graph reuses the memory of gradients that are to be added up; use compile=default"
        yield compiled, f"optim.accumulate={accumulate}", why
    if data.grow_size and records_graphs:
        sizes, graph = f"data.grow_size={','.join(data.grow_size)}", "parallel.graph=True"
        why = "a graph is recorded at one size of images; leave one of them out"
        yield sizes, graph if parallel.graph else compiled, why
    if optim.grow_batch:
        grown, why = f"optim.grow_batch={','.join(optim.grow_batch)}", "it records one size of batch"
        if records_graphs:
            graph = "parallel.graph=True" if parallel.graph else compiled
            yield grown, graph, f"{why}; leave one of them out"


def _of_samples(data: Data, model: Model, optim: Optim, budget: Budget) -> Iterator[Conflict]:
    """Yield conflicts over how often images are seen, and by what."""
    if budget.patience is not None and data.val is None and data.holdout == 0:
        why = "without validation images nothing says when to end"
        yield f"budget.patience={budget.patience}", "data.holdout=0", why
    balanced = "data.balance='classes'"
    if data.balance != "none" and data.order == "blocks":
        yield balanced, "data.order='blocks'", "a block is one class as a rule; leave one of them out"
    if data.balance != "none" and parse_train(model.train).probe_passes:
        why = "a probe sees each image once; leave one of them out"
        yield balanced, f"model.train={model.train!r}", why
    if data.repeats > 1 and data.flip == "alternating":
        why = "alternating flips count the times that an image was seen; leave one of them out"
        yield f"data.repeats={data.repeats}", "data.flip='alternating'", why
    if data.repeats > 1 and parse_train(model.train).probe_passes:
        why = "a probe sees each image once; leave one of them out"
        yield f"data.repeats={data.repeats}", f"model.train={model.train!r}", why
    if model.folds and parse_train(model.train).main != "probe":
        why = "folds are answered by probes: add --train probe, or leave --folds out"
        yield f"model.folds={model.folds}", f"model.train={model.train!r}", why
    if parse_train(model.train).main == "probe" and parse_loss(optim.loss).name not in SOFTMAX[:2]:
        why = "a probe is fitted by cross-entropy; --train probe+head trains on from it by any loss"
        yield f"model.train={model.train!r}", f"optim.loss={optim.loss!r}", why
    if parse_train(model.train).main == "probe" and optim.class_weights != "none":
        weights, why = f"optim.class_weights={optim.class_weights!r}", "a probe weighs all images alike"
        yield f"model.train={model.train!r}", weights, f"{why}; --train probe+head trains on with weights"


def _of_phases(model: Model, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of fine-tuning in phases, of compiling and of CUDA graphs."""
    compress = parallel.compress
    compressed, compiled = f"parallel.compress={compress!r}", f"precision.compile={precision.compile!r}"
    if parse_train(model.train).has_phases:
        trained, why = f"model.train={model.train!r}", "parameters join later, which is not compiled or recorded"
        if precision.compile != "none":
            yield trained, compiled, f"{why}; leave one of them out"
        if parallel.graph:
            yield trained, "parallel.graph=True", f"{why}; leave one of them out"
        if compress == "powersgd":
            yield trained, compressed, "what is left to send of a parameter would be lost; use compress=fp16"
    if parallel.graph and precision.compile not in ("none", "default"):
        yield compiled, "parallel.graph=True", "that mode records its own graphs; use compile=default"
    if precision.compile != "none" and model.batch_norm == "synchronous":
        why = "what ranks exchange inside a pass cannot be compiled; leave one of them out"
        yield compiled, "model.batch_norm='synchronous'", why


def _of_shards(model: Model, optim: Optim, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of parameters that are divided among ranks (FSDP)."""
    shard = "parallel.shard=True"
    if parallel.engine != "ddp":
        why = "its ranks have all of the weights; leave one of them out"
        yield shard, f"parallel.engine={parallel.engine!r}", why
    if parallel.compress != "none":
        yield shard, f"parallel.compress={parallel.compress!r}", "its exchange is torch's own; use compress=none"
    if precision.name == "fp16" or precision.is_pure:
        yield shard, f"precision.name={precision.name!r}", "its parameters have 32 bits and no loss scale; use bf16"
    if parallel.graph:
        yield shard, "parallel.graph=True", "passes that wait for other ranks are not recorded; leave one of them out"
    if precision.compile not in ("none", "default"):
        why = "its blocks are compiled apart, and their memory changes; use compile=default"
        yield shard, f"precision.compile={precision.compile!r}", why
    if parallel.shard_gather == "bf16" and precision.name != "bf16":
        gather = f"parallel.shard_gather={parallel.shard_gather!r}"
        yield gather, f"precision.name={precision.name!r}", "it would multiply more exactly than it gathers; use bf16"
    if optim.name not in ("sgd", "nag", "adam", "adamw"):
        why = "it may need whole tensors; use sgd, nag, adam or adamw"
        yield shard, f"optim.name={optim.name!r}", why
    plan = parse_train(model.train)
    if plan.probe_passes:
        why = "a probe's passes are each rank's own; use full, head, head:1+full, discriminative or gradual"
        yield shard, f"model.train={model.train!r}", why


def _of_local(model: Model, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of the local engine."""
    local = "parallel.engine='local'"
    if parallel.compress != "none":
        why = "it exchanges weights, not gradients; use compress=none, and a larger parallel.sync_every"
        yield local, f"parallel.compress={parallel.compress!r}", why
    if precision.name == "fp16":
        yield local, "precision.name='fp16'", "each rank would have its own loss scale; use bf16"
    if precision.is_pure:
        why = "weights of 16 bits lose what is averaged; use bf16, which keeps them in 32"
        yield local, f"precision.name={precision.name!r}", why
    if model.batch_norm == "synchronous":
        why = "ranks would wait for each other in every pass; the running statistics are averaged anyway"
        yield local, "model.batch_norm='synchronous'", why
    if parallel.graph and parallel.local_from:
        why = "a graph records one way of exchanging; leave one of them out"
        yield f"parallel.local_from={parallel.local_from:g}", "parallel.graph=True", why


def _of_async(model: Model, optim: Optim, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of the asynchronous engine."""
    engine, plan = "parallel.engine='async'", parse_train(model.train)
    if precision.name == "fp16" or precision.is_pure:
        why = "the server keeps weights and gradients in 32 bits, without a loss scale; use bf16 or fp32"
        yield engine, f"precision.name={precision.name!r}", why
    if model.batch_norm == "synchronous":
        yield engine, "model.batch_norm='synchronous'", "batch norms would wait for other workers; use ddp"
    if parallel.graph:
        yield engine, "parallel.graph=True", "the server makes the update, which is not in the graph; use ddp"
    if optim.grow_batch:
        grown = f"optim.grow_batch={','.join(optim.grow_batch)}"
        yield engine, grown, "each push is an update of one size; raise the batch size, or use ddp"
    if optim.waits_for_evaluations:
        schedule = f"optim.schedule={optim.schedule!r}"
        yield engine, schedule, "workers train on while one evaluates; use another schedule"
    if optim.swa is not None:
        yield engine, f"optim.swa={optim.swa:g}", "use an EMA (--ema)"
    if plan.has_phases or plan.probe_passes:
        yield engine, f"model.train={model.train!r}", "all workers train the same parameters all the time; use ddp"
