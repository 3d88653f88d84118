"""What ``steady pack --estimate`` prints: ways of packing side by side, before anything is written."""

from __future__ import annotations

import json as json_module
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.cli.lines import clock, size_of

if TYPE_CHECKING:
    from steadytrain.feed.estimate import Estimate
    from steadytrain.records.encode import Settings


def print_estimate(
    sources: Sequence[str],
    stored: dict[str, Any],
    chosen: dict[str, Any],
    *,
    root: str | None,
    labels: str | None,
    classes: str | None,
    workers: int | None,
    json: bool,
) -> None:
    """Try some ways of packing on a sample, and print what they would come to.

    Args:
        sources, root, labels, classes, workers: as packing takes them.
        stored: the settings asked for, by the names of :class:`~steadytrain.records.encode.Settings`.
        chosen: which images, by the names of :class:`~steadytrain.records.sources.select.Selection`.
        json: print one JSON document.
    """
    from steadytrain import quotas
    from steadytrain.cli.console import note, progress
    from steadytrain.feed import SMALL, cut_for
    from steadytrain.feed import estimate as trial
    from steadytrain.recipe import Data
    from steadytrain.records import read_classes
    from steadytrain.records.encode import Settings
    from steadytrain.records.sources import find_all
    from steadytrain.records.sources.select import Selection

    what, settings = " ".join(sources), Settings(**stored)
    with tempfile.TemporaryDirectory(prefix="steadytrain-") as scratch, progress("trying", 0, unit="steps") as shown:
        listings = find_all(
            sources,
            root=root,
            labels=labels,
            classes=None if classes is None else read_classes(classes),
            scratch=Path(scratch),
            say=note,
        )
        sampled = trial.sample(Selection(**chosen).of(listings, note))
        shorter, largest = trial.sides(sampled)
        size = max(1, shorter) if largest <= SMALL else 224
        cut = cut_for(Data(train=what), size=size, channels=3, largest=largest)
        tried = trial.estimate(sampled, trial.ways(settings, shorter=shorter, largest=largest), cut, progress=shown)
    cores = workers or quotas.cores()
    if json:
        print(json_module.dumps([_plain(one, cores) for one in tried], indent=2))
        return
    work = f"{cut.kind} to {cut.size} x {cut.size}"
    print(f"{what}: {sampled.num_images:,} images, {size_of(round(sampled.mean_size * sampled.num_images))}")
    print(f"from {len(sampled.places)} of them; feed: {work}, images/s of one core\n")
    print(f"{'':<38}{'kB/image':>9}{'all':>17}{'to pack':>9}{'feed':>7}")
    for one in tried:
        print(_row(one, sampled.num_images, cores))
    if bad := max(one.left_out for one in tried):
        print(f"\n{bad} of the {len(sampled.places)} cannot be used and would be left out: steady check names them")


def _plain(one: Estimate, cores: int) -> dict[str, Any]:
    return {**vars(one), "settings": one.settings.to_dict(), "pack_seconds": one.pack_seconds / cores}


def _row(one: Estimate, images: int, cores: int) -> str:
    per_image = one.num_bytes / images / 1000
    rate = "" if one.images_per_cpu_second is None else f"{one.images_per_cpu_second:,.0f}"
    size = f"{size_of(round(one.num_bytes))} ±{1.96 * one.error / one.num_bytes:.0%}" if one.num_bytes else ""
    return f"{_flags(one.settings):<38}{per_image:>9.1f}{size:>17}{clock(one.pack_seconds / cores):>9}{rate:>7}"


def _flags(settings: Settings) -> str:
    """The options that ask for this."""
    from steadytrain.records.encode import Settings as Plain

    default = Plain().to_dict()
    changed = {name: value for name, value in settings.to_dict().items() if value != default[name]}
    told = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in changed.items()]
    return " ".join(told) or "as they are"
