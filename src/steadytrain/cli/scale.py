"""``steady scale``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import (
    RECIPES,
    ClassesFlag,
    Json,
    ProcsFlag,
    SecondsFlag,
    SizeFlag,
    read_recipe,
    refuse_flags,
    require_alone,
)
from steadytrain.cli.options import DeviceFlag as DeviceName
from steadytrain.config import Recipe
from steadytrain.config.defaults import apply_changes, usual_recipe
from steadytrain.errors import InputError
from steadytrain.format import percent
from steadytrain.machine import facts
from steadytrain.machine.process import spin_where_alone
from steadytrain.run import Run
from steadytrain.tuning.scale import LINKS, MAX_DEVICES, parse_link

PositiveFlag = Annotated[float | None, Parameter(validator=Number(gt=0))]
DRAWN = "drawn"
"""Name of the data of a recipe whose images are drawn at random."""
BUSY = 0.1
"""Spread above which a note is printed: twice what explains published tables (benchmarks/scale_published.py)."""


def scale(
    *sources: Annotated[str, Parameter(show=True)],
    model: Annotated[str | None, Parameter(name=("--model", "--network"))] = None,
    devices: Annotated[int, Parameter(validator=Number(gte=1, lte=MAX_DEVICES))] = 8,
    link: str | None = None,
    per_machine: Annotated[int | None, Parameter(validator=Number(gte=1, lte=MAX_DEVICES))] = None,
    local_link: str | None = None,
    batch_size: Annotated[int | None, Parameter(name=("--batch-size", "-b"))] = None,
    size: SizeFlag = None,
    channels: Annotated[int, Parameter(validator=Number(gte=1, lte=1024))] = 3,
    classes: ClassesFlag = 1000,
    precision: Annotated[str | None, Parameter(name=("--precision", "--dtype"))] = None,
    device: DeviceName = "auto",
    procs: ProcsFlag = None,
    loader_rate: PositiveFlag = None,
    spread: Annotated[float | None, Parameter(validator=Number(gte=0, lte=1))] = None,
    price: PositiveFlag = None,
    epochs: Annotated[PositiveFlag, Parameter(name=("--epochs", "--num-epochs"))] = None,
    num_train: Annotated[int | None, Parameter(validator=Number(gte=1, lte=10**12))] = None,
    seconds: SecondsFlag = 10.0,
    measured: Path | None = None,
    json: Json = False,
) -> int:
    """Predict how fast several devices train together, and recommend how many to take; or compare measured runs.

    It measures one device here: forward pass, backward pass and update. With data, the loader is measured as well;
    with several GPUs or --procs, the link between ranks here. From that it predicts 1 to N devices on the given links,
    each with that batch: images per second, efficiency, time and money.

    Two or more runs or logs of other programs are compared instead: the speed-up over the one with the fewest devices,
    and what it is of the ideal. RUN@8 says the number of devices where a log does not.

    Links: 1GbE, 10GbE, 25GbE, 40GbE, 100GbE, edr, hdr, ndr, pcie3, pcie4, nvlink1 to nvlink4, or latency and bandwidth,
    such as "0.1 ms,10 Gbit/s".

    Args:
        sources: Training data, or a recipe file (.toml, .json, .yaml); or several runs or logs.
        model: timm/NAME, a built-in such as resnet20, or pkg.mod:factory.
        devices: The most devices to predict.
        link: Link between the devices, or between machines with several devices (default: as measured between ranks
            here).
        per_machine: Devices of a machine (default: 1 with a network, all with pcie or nvlink).
        local_link: Link between the devices of one machine (default: pcie3).
        batch_size: Images of one device (default: the recipe's, else 32).
        size: Side of the images, in pixels (default: the model's own, else 224).
        channels: Channels of the images.
        classes: Classes of the network.
        precision: fp32, tf32, bf16, fp16, pure-bf16 or pure-fp16 (default: the recipe's, else fp32).
        procs: Ranks between which the link is measured here, 2 or more (default: the GPUs, where there are several).
        loader_rate: Images per second that the loader of one machine gives (default: as measured, with data).
        spread: How much updates vary, as a share: all devices wait for the slowest (default: as measured).
        price: Price of a device and hour, in any currency.
        epochs: Passes over the training images, for time and cost (default: the recipe's).
        num_train: Training images, for time and cost (default: those of the data).
        seconds: How long to measure one device, about.
        measured: A --json document of an earlier measurement: measure nothing.

    Examples:
        steady scale --model timm/resnet50 --devices 16 --link 10GbE --per-machine 8
        steady scale photos-train.rec --model timm/resnet50 --link 25GbE --price 2.50
        steady scale --measured scale.json --link "0.05 ms,1 Gbit/s"
        steady scale --model resnet20 --procs 2 --json
        steady scale one-gpu.log eight-gpus.log
    """
    of_measuring: dict[str, object] = {"model": model, "batch_size": batch_size, "size": size, "precision": precision}
    of_measuring |= {"procs": procs}
    of_forecast = {"link": link, "per_machine": per_machine, "local_link": local_link, "loader_rate": loader_rate}
    of_forecast |= {"spread": spread, "price": price, "epochs": epochs, "num_train": num_train}
    if len(sources) > 1:
        flags = {**of_measuring, **of_forecast, "measured": measured}
        refuse_flags(f"{{}} belongs to a prediction, and {len(sources)} runs are compared: leave it out", **flags)
        return _compare(sources, json=json)
    source = sources[0] if sources else None
    require_alone("steady scale")
    from steadytrain.tuning.scaling import device_of, forecast, join, measure, read_document, to_text

    between, within = (None if name is None else parse_link(name) for name in (link, local_link))
    if measured is not None:
        if source is not None:
            raise InputError(f"--measured {measured} measures nothing, and {source} is named: leave one of them out")
        refuse_flags("--measured measures nothing: leave {} out", **of_measuring)
        document = read_document(measured)
    else:
        if procs is None and (num_gpus := len(facts.accelerators())) > 1:
            procs = num_gpus
        recipe = _recipe(source, model, {"batch_size": batch_size, "precision.name": precision}, device)
        if between is None and procs is None:
            raise InputError(
                f"nothing says what joins the devices: give --link {', '.join(LINKS)} or"
                ' "0.1 ms,10 Gbit/s", or --procs 2 to measure ranks here'
            )
        images = {"size": size or recipe.data.size, "channels": channels, "num_classes": classes}
        has_data = recipe.data.train != DRAWN and (source == recipe.data.train or Path(recipe.data.train).exists())
        spin_where_alone()
        document = measure(recipe, procs, seconds=seconds, images=images, feeds=has_data, say=note)
    cluster = join(between, within, document, per_machine, devices, name=str(measured))
    one_device = device_of(document["one"], spread)
    if spread is None and one_device.spread > BUSY:
        note(
            f"updates vary by {percent(one_device.spread)} here, as where other programs use the machine; published"
            " tables are explained by 3 to 6 %: --spread 0.05 predicts with that"
        )
    document |= {
        "loader_images_per_second": loader_rate or document.get("loader_images_per_second"),
        "price": price,
        "num_train": num_train or document.get("num_train"),
        "epochs": epochs or document.get("epochs") or 1,
    }
    if epochs is not None and not document["num_train"]:
        raise InputError("--epochs needs the number of images: give --num-train or data")
    forecast(document, one_device, cluster, devices)
    print_json(document) if json else print_text(to_text(document, shutil.get_terminal_size().columns))
    return 0


def _compare(sources: Sequence[str], *, json: bool) -> int:
    """Print what several devices reached together in measured runs."""
    from steadytrain.reports.measured_scaling import compare_runs, to_text

    document, remarks = compare_runs(sources)
    for remark in remarks:
        note(remark)
    print_json(document) if json else print_text(to_text(document))
    return 0


def _recipe(source: str | None, model: str | None, changes: Mapping[str, Any], device: str) -> Recipe:
    """Make the recipe of a file or of a command line. Raises InputError where nothing names the model."""
    path = None if source is None else Path(source)
    is_file = path is not None and path.suffix in RECIPES and not path.is_dir()
    values = read_recipe(path) if path is not None and is_file else {}
    in_file = values.get("model")
    name = model or (in_file.get("name") if isinstance(in_file, Mapping) else None)
    if name is None:
        if path is not None and not is_file and (Run.is_run(path) or path.is_file()):
            raise InputError(f"{source} is compared with another run or log: name that too")
        raise InputError("name the network whose scaling is wanted, such as --model timm/resnet50")
    train = DRAWN if source is None or is_file else source
    defaults = usual_recipe(train, model=name, finetune=False, small=False).with_({"batch_size": 32})
    flags = {key: value for key, value in changes.items() if value is not None}
    flags |= {"model.name": name} if model else {}
    return apply_changes(defaults, values, {**flags, "parallel.device": device})
