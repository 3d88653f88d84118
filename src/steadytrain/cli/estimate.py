"""What ``steady pack --estimate`` prints: ways of packing side by side, before anything is written."""

from __future__ import annotations

import json as json_module
import shutil
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.cli.lines import clock, size_of

if TYPE_CHECKING:
    from steadytrain.data.packing.encode import Settings
    from steadytrain.data.packing.estimate import Estimate, Sample


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
        stored: the settings asked for, by the names of :class:`~steadytrain.data.packing.encode.Settings`.
        chosen: which images, by the names of :class:`~steadytrain.data.sources.select.Selection`.
        json: print one JSON document.
    """
    from steadytrain.cli.console import note, progress
    from steadytrain.config import Data
    from steadytrain.data.loader import SMALL, crop_for
    from steadytrain.data.packing import estimate as trial
    from steadytrain.data.packing.encode import Settings
    from steadytrain.data.recordio.card import read_classes
    from steadytrain.data.sources.find import find_all
    from steadytrain.data.sources.select import Selection
    from steadytrain.errors import InputError
    from steadytrain.machine import cgroups

    if workers is not None and not 1 <= workers <= 1024:
        raise InputError(f"--workers is {workers}; it must be from 1 to 1024")
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
        sampled = trial.draw_sample(Selection(**chosen).of(listings, note))
        shorter, largest = trial.measure_sides(sampled)
        size = max(1, shorter) if largest <= SMALL else 224
        cut = crop_for(Data(train=what), size=size, channels=1 if settings.grey else 3, largest=largest)
        tried = trial.estimate(
            sampled, trial.alternatives(settings, shorter=shorter, largest=largest), cut, progress=shown
        )
    cores = workers or cgroups.cores()
    if json:
        print(json_module.dumps([_plain(one, cores) for one in tried], indent=2))
        return
    columns = shutil.get_terminal_size().columns
    work = f"feed: {cut.kind} to {cut.size} x {cut.size}, images/s of one core that decodes each image anew"
    print(f"{what}: {sampled.num_images:,} images, {size_of(round(sampled.mean_size * sampled.num_images))}")
    print(textwrap.fill(f"from {len(sampled.places)} of them; {work}", columns) + "\n")
    print("\n".join(_table(tried, sampled, cores, columns)))
    if bad := max(one.left_out for one in tried):
        left_out = f"{bad} of the {len(sampled.places)} cannot be used and would be left out: steady check names them"
        print("\n" + textwrap.fill(left_out, columns))


def _plain(one: Estimate, cores: int) -> dict[str, Any]:
    return {**vars(one), "settings": one.settings.to_dict(), "pack_seconds": one.pack_seconds / cores}


def _table(tried: Sequence[Estimate], sampled: Sample, cores: int, columns: int) -> list[str]:
    """A line for each way; of two where ``columns`` are few."""
    flags = [_flags(one.settings) for one in tried]
    figures = [_figures(one, sampled, cores) for one in tried]
    head = f"{'kB/image':>9}{'all':>15}{'to pack':>9}{'feed':>8}"
    wide = max(map(len, flags))
    if wide + len(head) > columns:
        return [head, *(line for pair in zip(flags, figures, strict=True) for line in pair)]
    return [" " * wide + head, *(f"{way:<{wide}}{told}" for way, told in zip(flags, figures, strict=True))]


def _figures(one: Estimate, sampled: Sample, cores: int) -> str:
    used = sampled.num_images * (1 - one.left_out / len(sampled.places))
    each = f"{one.num_bytes / used / 1000:.1f}" if used else ""
    rate = "" if one.images_per_cpu_second is None else f"{one.images_per_cpu_second:,.0f}"
    size = f"{size_of(round(one.num_bytes))} ±{1.96 * one.error / one.num_bytes:.0%}" if one.num_bytes else ""
    return f"{each:>9}{size:>15}{clock(one.pack_seconds / cores):>9}{rate:>8}"


def _flags(settings: Settings) -> str:
    """The options that ask for this."""
    from steadytrain.data.packing.encode import Settings as Plain

    default = Plain().to_dict()
    changed = {name: value for name, value in settings.to_dict().items() if value != default[name]}
    told = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in changed.items()]
    return " ".join(told) or "as they are"
