"""Measure one device and the link between several on this machine, predict 1 to N devices, and print a table.

The model that predicts is in :mod:`steadytrain.tuning.scale`. Everything measured is a document of plain data, ready
for JSON, from which another command can predict without measuring again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steadytrain.config import Recipe
from steadytrain.errors import FailedError, InputError
from steadytrain.files import read_text
from steadytrain.format import Say, count, duration, fold, number, percent, rate, size, text_table
from steadytrain.intervals import quantiles
from steadytrain.machine import facts
from steadytrain.machine.children import run_steady
from steadytrain.tuning.scale import (
    LINKS,
    Gradient,
    MachineCluster,
    MeasuredDevice,
    NetworkLink,
    ScalePrediction,
    advise,
    counts,
    even_gradients,
    fit_link,
    predict,
)

MILLION = 1_000_000
"""Images for which time and cost are given if the size of the training set is unknown."""

P90 = 1.2816
"""Standard deviations from the median to the 90th percentile of normal numbers: what is rare and late counts little."""

MEASURED = ("one", "fitted", "epochs", "loader_images_per_second", "num_train")
"""Keys of a document that hold what was measured; all others are predicted anew."""

FEED_SECONDS = 5.0
"""Seconds for measuring the loader, and the link between ranks."""


def measure(
    recipe: Recipe, procs: int | None, *, seconds: float, images: Mapping[str, Any], feeds: bool, say: Say
) -> dict[str, Any]:
    """Measure one device in this process, and the link between ranks and the loader in others.

    Args:
        recipe: the batch of one device, the network and how it computes.
        procs: ranks on this machine between which the link is measured, 2 or more; None: no link.
        seconds: how long to measure one device, about.
        images: their ``size`` (None: the model's own), ``channels`` and ``num_classes``.
        feeds: measure the loader on the recipe's data.

    Raises:
        InputError: the network cannot be trained so.
        FailedError: the loader or the link could not be measured.
    """
    if procs is not None and not facts.accelerators() and recipe.parallel.compute_threads is None:
        # A rank has a part of the cores here: one device alone gets as many.
        recipe = recipe.with_({"parallel.compute_threads": max(1, facts.cores() // procs)})
    say(f"measuring {recipe.model.name} on one device, {count(recipe.batch_size, 'image')}")
    document = {"one": measure_alone(recipe, seconds, images, say), "fitted": None, "epochs": recipe.budget.epochs}
    if procs is not None:
        say(f"measuring the link between {procs} ranks here")
        backends = _run_verb("bandwidth", "--model", recipe.model.name, "--procs", str(procs))["backends"]
        fastest = next((row for row in backends if row["backend"] == "nccl"), backends[0])
        document["fitted"] = asdict(fit_link(fastest, procs))
    if feeds:
        train = str(recipe.data.train)
        say(f"measuring the loader on {train}")
        size = [] if images["size"] is None else ["--size", str(images["size"])]
        fed = _run_verb("feed", train, "--batch-size", str(recipe.batch_size), *size)
        document |= {"loader_images_per_second": fed["images_per_second"], "num_train": fed["n"]}
    return document


def measure_alone(recipe: Recipe, seconds: float, images: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Measure the updates of one device.

    Returns:
        ``model``, ``device``, ``threads``, ``size``, ``parameters``, ``batch_size``, ``precision``; seconds of the
        median update as ``forward_seconds``, ``backward_seconds`` and ``update_seconds``; ``spread``: the standard
        deviation of an update over the median, by its 90th percentile; ``gradients``: bytes, and the share of the
        backward pass after which each is ready.
    """
    from steadytrain.training.data import random_batch
    from steadytrain.training.device import prepare_device
    from steadytrain.training.profile.bench import set_up, time_updates

    device, notes = prepare_device(recipe), list[str]()
    # What a flag or the user's own file names may be imported.
    trained = set_up(recipe, device, notes, **images, allow_import=True)
    for line in notes:
        say(line)
    batch = random_batch(recipe.batch_size, trained.update.image_shape, device, num_classes=images["num_classes"])
    steps, parts = time_updates(trained.update, trained.state, batch, seconds)
    middle, late = quantiles(steps, 0.5, 0.9)
    times = middle * len(steps) / sum(steps)
    forward, backward = times * parts["forward"], times * parts["backward"]
    parameters = list(trained.built.module.parameters())
    sizes = [each.numel() * each.element_size() for each in parameters if each.requires_grad]
    return {
        "model": trained.built.name,
        "device": trained.machine["device"],
        "threads": trained.machine["compute_threads"],
        "size": trained.size,
        "parameters": sum(each.numel() for each in parameters),
        "batch_size": recipe.batch_size,
        "precision": recipe.precision.name,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "update_seconds": middle - forward - backward,
        "spread": (late / middle - 1) / P90,
        "gradients": [(each.bytes, each.ready) for each in even_gradients(sizes)],
    }


def _run_verb(*words: str) -> dict[str, Any]:
    """Run another verb in a process of its own and return its document. Raises FailedError."""
    ended = run_steady([*words, "--seconds", str(FEED_SECONDS), "--json"])
    if ended.code:
        kind = InputError if ended.code == InputError.exit_code else FailedError
        raise kind(ended.last_line or f"{words[0]} ended with {ended.code}")
    document: dict[str, Any] = json.loads(ended.output)
    return document


def read_document(path: Path) -> dict[str, Any]:
    """Read what a document of ``steady scale --json`` says was measured. Raises InputError if the file is not one."""
    try:
        document: dict[str, Any] = json.loads(read_text(path))
        device_of(document["one"])
        return {name: document[name] for name in MEASURED if name in document}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not a document of steady scale --json: measure again") from error


def device_of(figures: Mapping[str, Any], spread: float | None = None) -> MeasuredDevice:
    """Read the measured times of one device from a document; ``spread`` replaces the measured one."""
    names = ("forward_seconds", "backward_seconds", "update_seconds")
    return MeasuredDevice(
        batch_size=int(figures["batch_size"]),
        **{name: float(figures[name]) for name in names},
        spread=float(figures["spread"]) if spread is None else spread,
        gradients=tuple(Gradient(bytes=int(num), ready=float(ready)) for num, ready in figures["gradients"]),
    )


def join(
    link: NetworkLink | None,
    local: NetworkLink | None,
    document: Mapping[str, Any],
    per_machine: int | None,
    devices: int,
    *,
    name: str,
) -> MachineCluster:
    """Return the cluster in which ``link`` joins machines, and ``local`` the devices of each.

    Args:
        link: None: the one that was measured between ranks, in the document.
        local: None: PCIe.
        document: of :func:`measure`.
        per_machine: devices of a machine; None: one if the link is a network, else all.
        devices: the most that are predicted.
        name: of the document, for a message.

    Raises:
        InputError: no link is known, or it cannot join devices of several machines.
    """
    if link is None:
        if document.get("fitted") is None:
            raise InputError(f"{name} has no measured link between ranks: add --link, such as --link 10GbE")
        link = NetworkLink(**document["fitted"])
    if per_machine is None:
        per_machine = devices if link.is_local else 1
    if link.is_local and per_machine < devices:
        raise InputError(
            f"{link.name} joins devices of one machine, and {devices} devices with {per_machine} a machine are on"
            f" several: give the network as --link, such as 10GbE, and --local-link {link.name}"
        )
    within = link if link.is_local else local or LINKS["pcie3"]
    return MachineCluster(between=link, per_machine=per_machine, within=within if per_machine > 1 else None)


def forecast(document: dict[str, Any], device: MeasuredDevice, cluster: MachineCluster, devices: int) -> None:
    """Predict 1 to ``devices`` devices, each with the measured batch, and add the predictions to the document.

    ``document``: of :func:`measure`, with ``loader_images_per_second``, ``price``, ``num_train`` and ``epochs``.
    """
    loader = document["loader_images_per_second"] or math.inf
    images = document["epochs"] * (document["num_train"] or 0)
    rows = [predict(device, n, cluster, loader_images_per_second=loader) for n in range(1, devices + 1)]
    advice = advise(rows)
    shown = counts(devices, advice.devices, advice.fastest, advice.worse_from or 1)
    document |= {
        "devices": devices,
        "link": asdict(cluster.between),
        "per_machine": cluster.per_machine,
        "local_link": None if cluster.within is None else asdict(cluster.within),
        "spread": device.spread,
        "images": images or None,
        "advice": {"weak": asdict(advice)},
        "weak": [_row(row, images, document["price"]) for row in rows if row.devices in shown],
    }


def _row(prediction: ScalePrediction, images: float, price: float | None) -> dict[str, Any]:
    """Return a prediction as plain data, with the time and the cost of a run and of a million images."""
    row = asdict(prediction)
    for num, suffix in ((images, ""), (MILLION, "_per_million")):
        seconds = num / prediction.images_per_second if num else None
        row[f"seconds{suffix}"] = seconds
        row[f"cost{suffix}"] = price * prediction.devices * seconds / 3600 if seconds and price else None
    return row


def to_text(document: Mapping[str, Any], width: int) -> str:
    """Return the document as text of at most ``width`` columns."""
    text = [fold(line, width) for line in _heads(document)]
    text += ["", f"{count(document['one']['batch_size'], 'image')} on each device", _table(document)]
    text += [fold(sentence, width) for sentence in document["advice"]["weak"]["words"]]
    return "\n".join(text)


def _heads(document: Mapping[str, Any]) -> list[str]:
    """Return lines about the measured device and the links of the prediction."""
    alone, link, local = document["one"], document["link"], document["local_link"]
    threads = f" by {count(alone['threads'], 'thread')}" if alone["device"] == "cpu" else ""
    step = alone["forward_seconds"] + alone["backward_seconds"] + alone["update_seconds"]
    gradients = sum(num for num, _ in alone["gradients"])
    heads = [
        f"{alone['model']}: {alone['parameters']:,} parameters, {size(gradients)} of gradients, on"
        f" {alone['device']}{threads} in {alone['precision']}",
        f"one device, {count(alone['batch_size'], 'image')}: {rate(alone['batch_size'] / step)} images/s; forward"
        f" {duration(alone['forward_seconds'])}, backward {duration(alone['backward_seconds'])}, update"
        f" {duration(alone['update_seconds'])}; updates vary by {percent(document['spread'])}",
        f"link {_link_text(link)}",
    ]
    if local is not None and local != link:
        heads[-1] += f"; within a machine of {document['per_machine']} {_link_text(local)}"
    if (loader := document["loader_images_per_second"]) is not None:
        heads.append(f"loader: {rate(loader)} images/s a machine")
    if document["images"]:
        heads.append(f"time: of {document['epochs']:g} epochs of {count(document['num_train'], 'image')}")
    return heads


def _link_text(link: Mapping[str, Any]) -> str:
    return f"{link['name']}: {duration(link['latency_seconds'])}, {size(link['bytes_per_second'])}/s"


def _table(document: Mapping[str, Any]) -> str:
    suffix, has_price = "" if document["images"] else "_per_million", document["price"] is not None
    heads = ["devices", "images/s", "efficiency", "step ms", "wait ms", "limit", "1M images" if suffix else "time"]
    lines = [heads + ["cost"] * has_price]
    for row in document["weak"]:
        digits = 1 if row["step_seconds"] < 0.1 else 0
        cells = [str(row["devices"]), rate(row["images_per_second"]), percent(row["efficiency"])]
        cells += [number(1000 * row[name], digits) for name in ("step_seconds", "exposed_seconds")]
        cells += [str(row["limit"]), duration(row[f"seconds{suffix}"])]
        lines.append(cells + [number(row[f"cost{suffix}"], 2)] * has_price)
    return text_table(lines, right=range(len(lines[0])))
