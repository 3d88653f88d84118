"""Settings of different parts of a recipe that exclude each other, such as an engine and a number format."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.config.losses import SOFTMAX, parse_loss
from steadytrain.config.parts import Budget, Data, Model, Optim, Parallel, Precision
from steadytrain.config.phases import parse_train

Conflict = tuple[str, str, str]
"""The keys of two settings, and why their values exclude each other, with the way out."""


def find_conflicts(
    data: Data, model: Model, optim: Optim, precision: Precision, budget: Budget, parallel: Parallel
) -> Iterator[Conflict]:
    """Yield the pairs of settings that exclude each other."""
    if optim.waits_for_evaluations and data.val is None and data.holdout == 0:
        why = "there is nothing to evaluate on; give --val or --holdout, or another schedule"
        yield "optim.schedule", "data.holdout", why
    yield from _of_exchange(data, model, optim, precision, parallel)
    yield from _of_samples(data, model, optim, budget)
    yield from _of_phases(model, precision, parallel)


def _of_exchange(
    data: Data, model: Model, optim: Optim, precision: Precision, parallel: Parallel
) -> Iterator[Conflict]:
    """Yield conflicts of compressed gradients, of engines, and of graphs that are recorded once."""
    records_graphs = parallel.graph or precision.records_graphs
    graph = "parallel.graph" if parallel.graph else "precision.compile"
    if parallel.compress == "powersgd" and precision.name == "fp16":
        why = "the loss scale changes what errors mean; use bf16, or compress=fp16"
        yield "parallel.compress", "precision.name", why
    if parallel.compress == "powersgd" and records_graphs:
        yield "parallel.compress", graph, "a graph records one way of exchanging; leave one of them out"
    if parallel.compress != "none" and precision.is_pure:
        yield "parallel.compress", "precision.name", "its gradients have 16 bits already; use compress=none"
    if parallel.engine == "local":
        yield from _of_local(model, precision, parallel)
    if parallel.engine == "async":
        yield from _of_async(model, optim, precision, parallel)
    if parallel.shard:
        yield from _of_shards(model, optim, precision, parallel)
    elif parallel.shard_ranks is not None or parallel.shard_gather != "fp32":
        name = "shard_ranks" if parallel.shard_ranks else "shard_gather"
        yield f"parallel.{name}", "parallel.shard", "it needs parallel.shard=true, or leave it out"
    if precision.compile == "reduce-overhead" and optim.accumulate > 1:
        why = "a CUDA graph reuses the memory of gradients that are to be added up; use compile=default"
        yield "precision.compile", "optim.accumulate", why
    if data.grow_size and records_graphs:
        yield "data.grow_size", graph, "a graph is recorded at one size of images; leave one of them out"
    if optim.grow_batch and records_graphs:
        yield "optim.grow_batch", graph, "it records one size of batch; leave one of them out"


def _of_samples(data: Data, model: Model, optim: Optim, budget: Budget) -> Iterator[Conflict]:
    """Yield conflicts over how often images are seen, and by what."""
    plan = parse_train(model.train)
    if budget.patience is not None and data.val is None and data.holdout == 0:
        yield "budget.patience", "data.holdout", "without validation images nothing says when to end"
    if data.balance != "none" and data.order == "blocks":
        yield "data.balance", "data.order", "a block is one class as a rule; leave one of them out"
    if data.balance != "none" and plan.probe_passes:
        yield "data.balance", "model.train", "a probe sees each image once; leave one of them out"
    if data.repeats > 1 and data.flip == "alternating":
        why = "alternating flips count the times that an image was seen; leave one of them out"
        yield "data.repeats", "data.flip", why
    if data.repeats > 1 and plan.probe_passes:
        yield "data.repeats", "model.train", "a probe sees each image once; leave one of them out"
    if model.folds and plan.main != "probe":
        why = "folds are answered by probes: add --train probe, or leave --folds out"
        yield "model.folds", "model.train", why
    if plan.main == "probe" and parse_loss(optim.loss).name not in SOFTMAX[:2]:
        why = "a probe is fitted by cross-entropy; --train probe+head trains on from it by any loss"
        yield "model.train", "optim.loss", why
    if plan.main == "probe" and optim.class_weights != "none":
        why = "a probe weighs all images alike; --train probe+head trains on with weights"
        yield "model.train", "optim.class_weights", why


def _of_phases(model: Model, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of fine-tuning in phases, of compiling and of CUDA graphs."""
    if parse_train(model.train).has_phases:
        why = "parameters join later, which is not compiled or recorded; leave one of them out"
        if precision.compile != "none":
            yield "model.train", "precision.compile", why
        if parallel.graph:
            yield "model.train", "parallel.graph", why
        if parallel.compress == "powersgd":
            why = "what is left to send of a parameter would be lost; use compress=fp16"
            yield "model.train", "parallel.compress", why
    if parallel.graph and precision.compile not in ("none", "default"):
        yield "precision.compile", "parallel.graph", "that mode records its own graphs; use compile=default"
    if precision.compile != "none" and model.batch_norm == "synchronous":
        why = "what ranks exchange inside a pass cannot be compiled; leave one of them out"
        yield "precision.compile", "model.batch_norm", why


def _of_shards(model: Model, optim: Optim, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of parameters that are divided among ranks (FSDP)."""
    shard = "parallel.shard"
    if parallel.engine != "ddp":
        yield shard, "parallel.engine", "its ranks have all of the weights; leave one of them out"
    if parallel.compress != "none":
        yield shard, "parallel.compress", "its exchange is torch's own; use compress=none"
    if precision.name == "fp16" or precision.is_pure:
        yield shard, "precision.name", "its parameters have 32 bits and no loss scale; use bf16"
    if parallel.graph:
        yield shard, "parallel.graph", "passes that wait for other ranks are not recorded; leave one of them out"
    if precision.compile not in ("none", "default"):
        why = "its blocks are compiled apart, and their memory changes; use compile=default"
        yield shard, "precision.compile", why
    if parallel.shard_gather == "bf16" and precision.name != "bf16":
        yield "parallel.shard_gather", "precision.name", "it would multiply more exactly than it gathers; use bf16"
    if optim.name not in ("sgd", "nag", "adam", "adamw"):
        yield shard, "optim.name", "it may need whole tensors; use sgd, nag, adam or adamw"
    if parse_train(model.train).probe_passes:
        why = "a probe's passes are each rank's own; use full, head, head:1+full, discriminative or gradual"
        yield shard, "model.train", why


def _of_local(model: Model, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of the local engine."""
    local = "parallel.engine"
    if parallel.compress != "none":
        why = "it exchanges weights, not gradients; use compress=none, and a larger parallel.sync_every"
        yield local, "parallel.compress", why
    if precision.name == "fp16":
        yield local, "precision.name", "each rank would have its own loss scale; use bf16"
    if precision.is_pure:
        why = "weights of 16 bits lose what is averaged; use bf16, which keeps them in 32"
        yield local, "precision.name", why
    if model.batch_norm == "synchronous":
        why = "ranks would wait for each other in every pass; the running statistics are averaged anyway"
        yield local, "model.batch_norm", why
    if parallel.graph and parallel.local_from:
        why = "a graph records one way of exchanging; leave one of them out"
        yield "parallel.local_from", "parallel.graph", why


def _of_async(model: Model, optim: Optim, precision: Precision, parallel: Parallel) -> Iterator[Conflict]:
    """Yield conflicts of the asynchronous engine."""
    engine, plan = "parallel.engine", parse_train(model.train)
    if precision.name == "fp16" or precision.is_pure:
        why = "the server keeps weights and gradients in 32 bits, without a loss scale; use bf16 or fp32"
        yield engine, "precision.name", why
    if model.batch_norm == "synchronous":
        yield engine, "model.batch_norm", "batch norms would wait for other workers; use ddp"
    if parallel.graph:
        yield engine, "parallel.graph", "the server makes the update, which is not in the graph; use ddp"
    if optim.grow_batch:
        yield engine, "optim.grow_batch", "each push is an update of one size; raise the batch size, or use ddp"
    if optim.waits_for_evaluations:
        yield engine, "optim.schedule", "workers train on while one evaluates; use another schedule"
    if optim.swa is not None:
        yield engine, "optim.swa", "use an EMA (--ema)"
    if plan.has_phases or plan.probe_passes:
        yield engine, "model.train", "all workers train the same parameters all the time; use ddp"
