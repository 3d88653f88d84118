"""The live view of a foreign process: what its GPUs, its processes and the machine do, the rhythm, the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from steadytrain.cli.foreign_text import shortened
from steadytrain.cli.lines import clean, clock
from steadytrain.cli.live import bar_line
from steadytrain.monitor.process_watch import Moment, ProcessLoad, Reading

_ROWS = 6
_MEANT_SECONDS = 2.0


def lines(name: str, moments: Sequence[Moment], reading: Reading | None, width: int, ascii_only: bool) -> list[Text]:
    """What a terminal of ``width`` columns shows now."""
    if not moments:
        return [Text(f"process {clean(name)}", style="bold"), Text("looking", style="bright_black")]
    last = [one for one in moments if moments[-1].at - one.at < _MEANT_SECONDS]
    found = [Text(f"{clock(moments[-1].at)}  process {shortened(name, width - 18)}", style="bold")]
    found += _bars(last, width, ascii_only)
    found += _strip(moments, reading, width, ascii_only)
    found += _processes(last)
    if reading is not None:
        first = reading.causes[0]
        told = textwrap.wrap(clean(f"{first.name}: {first.sentence}"), width - 1)
        found += [Text(text, style="yellow") for text in told]
    return found


def _bars(last: Sequence[Moment], width: int, ascii_only: bool) -> Iterator[Text]:
    for gpu in last[-1].gpus:
        if gpu.ours is not False and gpu.utilisation is not None:
            values = [one.utilisation or 0.0 for moment in last for one in moment.gpus if one.index == gpu.index]
            memory = "" if gpu.memory_bytes is None else f"  {gpu.memory_bytes / 1e9:.1f} GB"
            power = "" if gpu.power_watts is None else f"  {gpu.power_watts:.0f} W"
            share = sum(values) / len(values)
            yield bar_line(f"GPU {gpu.index}", share, f"{share:4.0%}{memory}{power}", width, ascii_only)
    machine = last[-1].machine
    cpu = sum(one.cpu for one in last) / len(last)
    around = [f"{word} {_mean(last, word):.1f}" for word in ("others", "idle", "iowait") if _mean(last, word) >= 0.05]
    right = f"{cpu:.1f} of {machine.cores} cores" + (f"  ({', '.join(around)})" if around else "")
    yield bar_line("CPU  ", cpu / machine.cores, right, width, ascii_only)


def _mean(last: Sequence[Moment], word: str) -> float:
    return float(sum(getattr(one.machine, word) or 0.0 for one in last) / len(last))


def _strip(moments: Sequence[Moment], reading: Reading | None, width: int, ascii_only: bool) -> Iterator[Text]:
    """Utilisation over the last half minute or so, a character a look, and the rhythm found in it."""
    used = [one.index for one in (reading.seen.gpus if reading and reading.seen else ())]
    values = [
        max((gpu.utilisation or 0.0 for gpu in one.gpus if gpu.index in used), default=one.cpu / one.machine.cores)
        for one in moments[-max(10, width - 8) :]
    ]
    marks = " .:-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
    yield Text("       " + "".join(marks[min(7, max(0, int(value * 8)))] for value in values), style="cyan")
    if reading is not None and reading.rhythm is not None:
        told = reading.rhythm
        yield Text(f"       period {told.period_seconds:.2g} s, high for {told.duty:.0%} of it")


def _processes(last: Sequence[Moment]) -> Iterator[Text]:
    """The busiest processes, the first one always: cores, state of the main thread and what it sleeps in."""
    newest = last[-1].processes
    used = {
        one.pid: sum(other.cpu for moment in last for other in moment.processes if other.pid == one.pid) / len(last)
        for one in newest
    }
    shown = sorted(newest, key=lambda one: (-round(used[one.pid], 1), one.pid))[:_ROWS]
    yield Text("    pid  cores  disk MB/s  threads  state", style="bright_black")
    for one in shown:
        yield Text(_row(one, used[one.pid]))
    if len(newest) > len(shown):
        rest = sum(used[one.pid] for one in newest if one not in shown)
        yield Text(f"  and {len(newest) - len(shown)} more with {rest:.1f} cores", style="bright_black")


def _row(one: ProcessLoad, cpu: float) -> str:
    disk = "-" if one.disk_read_bytes is None else f"{one.disk_read_bytes / 1e6:.1f}"
    state, place = (one.threads[0].state, one.threads[0].waits_in) if one.threads else ("?", "")
    return f"{one.pid:>7}  {cpu:5.2f}  {disk:>9}  {one.num_threads:>7}  {state} {clean(one.name)}  {clean(place)}"
