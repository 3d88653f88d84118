"""``steady watch``: a run as it goes on, on a terminal, in a log or in a browser."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import TerminalStream, note, print_json, print_text
from steadytrain.cli.options import refuse_flags
from steadytrain.errors import InputError
from steadytrain.format import clean, clock, duration, money, number, pairs, percent, rate, time_of_day, wrap

if TYPE_CHECKING:
    from steadytrain.cost.prices import Price
    from steadytrain.reports.watch import RunSnapshot, Watch
    from steadytrain.run import Run

RUNS = Path("runs")
LOOK_SECONDS = 1.0
LINE_SECONDS = 10.0


def watch(
    *target: Annotated[str, Parameter(show=True)],
    web: bool = False,
    port: int | None = None,
    price: str | None = None,
    seconds: Annotated[float | None, Parameter(validator=Number(gte=0))] = None,
    pid: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    json: bool = False,
) -> int:
    """Watch a run: curves, images/s, where the time goes, queues, processors, GPUs, the verdict, the time left.

    It only reads, so the run may be running, finished or not started, or a copy of its folder. It ends with the run;
    Ctrl-C stops watching, never the run. A terminal is redrawn every second; otherwise it prints key=value lines. With
    --web it serves a page to browsers on this machine until Ctrl-C.

    With --pid, or a command after --, it watches any process and names its bottleneck.

    Args:
        target: The run's folder, or a folder of runs: its newest running one (default: runs). After --, a command to
            start and watch instead.
        web: Show it in a browser: prints the page's address.
        port: Port of the page, on this machine only (default: 8321, or a free port if that is taken).
        price: Price of an hour of each machine, in place of what the run recorded: 2.40, 2.40 EUR, 0.30 EUR/kWh@450W,
            or an instance, such as p3.2xlarge@us-east-1:spot.
        seconds: Stop watching after this many seconds; 0: show the state once.
        pid: Watch this process instead, whatever it trains with.
        json: Print the figures as one JSON document at the end.

    Examples:
        steady watch runs/a
        steady watch runs/a --web
        steady watch --pid 4711
        steady watch -- python train.py --epochs 90
    """
    dashes = target.index("--") if "--" in target else len(target)
    runs, command = target[:dashes], target[dashes + 1 :]
    if pid is not None or command:
        if runs or web or port is not None or price is not None:
            raise InputError("--pid and a command after -- accept only --seconds and --json")
        from steadytrain.cli.watch_process import watch_process

        return watch_process(pid=pid, command=command, seconds=seconds, json=json)
    from steadytrain.cost.prices import parse_price

    paid = None if price is None else parse_price(price)
    if len(runs) > 1:
        raise InputError(f"watch shows one run at a time, not {len(runs)} (put a command after --)")
    if not runs and not RUNS.is_dir():
        raise InputError("name the run's folder: steady watch runs/NAME")
    from steadytrain.reports.files import pick

    picked = pick(runs[0] if runs else RUNS)
    run = picked.run
    if picked.others:
        names = ", ".join(str(other.directory) for other in picked.others)
        note(f"watching {run.directory}; also running (name one to watch it): {names}")
    if web or port is not None:
        refuse_flags("{} prints figures at the end, and --web serves a page: leave one of them out", json=json)
        serve_page(run, f"watching {run.directory}", port=port, price=paid, seconds=seconds)
    else:
        _watch_run(run, price=paid, seconds=seconds, json=json)
    return 0


def serve_page(
    shown: Run | Path, what: str, *, port: int | None, seconds: float | None, price: Price | None = None
) -> None:
    """Serve a page to browsers on this machine, and print its address and what it is about."""
    from steadytrain.reports.live import listening, serve

    with listening(port) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/", flush=True)
        note(f"{what}; the page is available on this machine only, until Ctrl-C")
        serve(shown, listener, price=price, seconds=seconds)


def _watch_run(run: Run, *, price: Price | None, seconds: float | None, json: bool) -> None:
    """Show a run until it is over, ``seconds`` have passed, or Ctrl-C; then print its figures."""
    from steadytrain.reports.watch import Watch, snapshot

    watched = Watch(run)
    began = reported = time.monotonic()
    for share in watched.read_in_parts():  # a long run's log takes a while
        if time.monotonic() - reported > 2.0:
            reported = time.monotonic()
            note(f"reading the events: {percent(share, 0)}")
    now = snapshot(watched, price=price)
    if not (now.signs.over or seconds == 0):
        with contextlib.suppress(KeyboardInterrupt), _view(quiet=json) as show:
            show(watched, now)
            while not now.signs.over and (seconds is None or time.monotonic() - began < seconds):
                time.sleep(LOOK_SECONDS if seconds is None else min(LOOK_SECONDS, max(0.05, seconds)))
                watched.read()
                now = snapshot(watched, price=price)
                show(watched, now)
    width = shutil.get_terminal_size().columns
    print_json(now.to_dict()) if json else print_text("\n".join(final_lines(now, width)))
    sys.stdout.flush()


def _view(*, quiet: bool) -> AbstractContextManager[Callable[[Watch, RunSnapshot], None]]:
    """Choose what shows each moment of a run."""
    stream = TerminalStream(sys.stderr)
    if quiet:
        return contextlib.nullcontext(lambda watched, now: None)
    if stream.isatty():
        return _screen(stream)
    return contextlib.nullcontext(Log(stream).show)


@contextlib.contextmanager
def _screen(stream: TerminalStream) -> Iterator[Callable[[Watch, RunSnapshot], None]]:
    """Take over a terminal, and give it back as it was; yield what shows a run at one moment, at the size of then."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=cast("TextIO", stream), force_terminal=True, highlight=False)

    def show(watched: Watch, now: RunSnapshot) -> None:
        width, height = console.size
        first, *others = screen_lines(now, width, height)
        live.update(Text("\n").join([Text(first, style="bold"), *map(Text, others)]), refresh=True)
        sys.stderr.flush()

    with Live(console=console, auto_refresh=False, screen=True, redirect_stdout=False) as live:
        yield show


def screen_lines(now: RunSnapshot, width: int, height: int) -> list[str]:
    """Return what a terminal of that size shows of a run: its figures; what has no room at the end is left out."""
    lines = final_lines(now, width)
    if now.notice:
        lines[1:1] = wrap(f"notice: {now.notice}", width, "")[:3]
    shown = [part for line in lines for part in ([line] if len(line) < width else wrap(line, width, "", "  "))]
    return shown[: max(1, height - 1)]


class Log:
    """A ``key=value`` line every ten seconds, and one for each thing that happens in between."""

    def __init__(self, stream: TerminalStream) -> None:
        self._stream = stream
        self._last = -float("inf")
        self._written: set[str] | None = None

    def show(self, watched: Watch, now: RunSnapshot) -> None:
        """Write what is new."""
        evaluations = []
        for event in watched.history.evaluated[-50:]:
            name = "top1" if event.mean_ap is None else "mean_ap"
            scores = {name: f"{event.score:.4f}", "loss": f"{event.loss:.4f}"}
            evaluations.append("evaluated " + pairs({"step": event.step, "epoch": f"{event.epoch:.2f}"} | scores))
        if self._written is None:  # what was evaluated before the watch began is no news
            self._written = set(evaluations)
        # Alarms are written once, though their figures go on changing.
        lines = [*evaluations, *([f"notice: {clean(now.notice)}"] if now.notice else [])]
        if now.stalled is not None:
            lines.append(f"stalled: {clean(now.stalled.what)}: {clean(now.stalled.culprit)}")
        if now.signs.silent:
            lines.append(f"silent: no events since {time_of_day(now.signs.last)}")
        news = [line for line in lines if line not in self._written]
        self._written.update(news)
        if time.monotonic() - self._last >= LINE_SECONDS or now.signs.over:
            self._last = time.monotonic()
            news.append(state_line(now))
        if news:
            self._stream.write("\n".join(news) + "\n")
            self._stream.flush()


def state_line(now: RunSnapshot) -> str:
    """Describe where the run stands as one ``key=value`` line.

    >>> import tempfile
    >>> from steadytrain.config import Budget, Data, Model, Recipe
    >>> from steadytrain.reports.watch import Watch, snapshot
    >>> from steadytrain.run import Run
    >>> recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
    >>> state_line(snapshot(Watch(Run.create(tempfile.mkdtemp() + "/a", recipe))))
    'status=waiting'
    """
    from steadytrain.monitor.ledger import INPUT

    progress, values = now.progress, dict[str, object](status=now.signs.status)
    if progress.steps:
        values |= {"step": f"{progress.step}/{progress.steps}", "epoch": f"{progress.epoch:.2f}"}
    if now.probe is not None and not progress.step:
        values["features"] = f"{now.probe.images}/{now.probe.total}"
    if now.logged is not None:
        right = "exact_match" if now.is_multi_label else "top1"
        values |= {"loss": f"{now.logged.loss:.4f}", right: f"{now.logged.top1:.4f}"}
    if now.last is not None:
        values["val_mean_ap" if now.is_multi_label else "val_top1"] = f"{now.last.value:.4f}"
    rates = {"images_per_second": now.images_per_second.now}
    rates |= {"steady": now.images_per_second.steady, "overall": now.images_per_second.overall}
    values |= {name: f"{value:.1f}" for name, value in rates.items() if value is not None}
    if now.ledger is not None and now.ledger.wall_seconds > 0:
        values["input"] = f"{now.ledger.share(*INPUT, 'epoch_gap'):.3f}"
    if now.feed is not None:
        values |= {"ready": f"{now.feed.ready:.1f}/{now.feed.depth:.0f}", "starved": f"{now.feed.starved:.2f}"}
    if now.machine is not None and now.machine.cpu is not None:
        values["cpu"] = f"{now.machine.cpu:.2f}/{now.machine.cores}"
    for device in now.devices:
        if device.utilisation is not None:
            values[f"gpu{device.index}"] = f"{device.utilisation:.2f}"
    if now.diagnosis is not None:
        cause = now.diagnosis.causes[0]
        values |= {"cause": cause.name, "share": f"{cause.share:.2f}"}
    if now.remaining_seconds is not None:
        values["eta_seconds"] = f"{now.remaining_seconds:.0f}"
    if now.cost is not None:
        values |= {"cost": money(now.cost.so_far), "currency": now.cost.currency}
        if now.cost.at_end is not None:
            values["cost_at_end"] = money(now.cost.at_end)
    return pairs(values)


def final_lines(now: RunSnapshot, width: int) -> list[str]:
    """Return the figures of a run, those that matter most first, in lines of ``width`` columns but for the verdict."""
    from steadytrain.reports.time_spent import largest_buckets
    from steadytrain.reports.verdict import verdict_sentences

    lines = [clean(f"{now.run.name}: {now.model}, {now.signs}")]
    ledger, rates, progress = now.ledger, now.images_per_second, now.progress
    if now.bar is not None:
        step = f"step {progress.step:,} of {progress.steps:,}, " if progress.step else ""
        lines.append(f"{step}{now.bar[1]}, after {clock(now.seconds)}")
    if rates.overall is not None:
        newest = "" if rates.now is None else f"{rate(rates.now)} images/s now, "
        overall = f"{rate(rates.overall)}{' images/s' * (not newest)} overall"
        lines.append(f"{newest}{overall}, {rate(rates.steady)} in the steady state")
    if now.best is not None:
        best = now.best
        lines.append(f"{best.best_label} {best.words} {best.when}")
    if now.test is not None:
        lines += wrap(f"test, {now.test.seen}: {now.test.words}", width, "", "  ")
    if now.logged is not None:
        right = "exact match" if now.is_multi_label else "top-1"
        lines.append(f"train loss {number(now.logged.loss, 4)}, train {right} {percent(now.logged.top1, 1)}")
    if now.remaining_seconds is not None:
        lines.append(f"about {clock(now.remaining_seconds)} left")
    if now.cost is not None:
        lines += wrap(f"cost: {now.cost}, at {now.cost.price}", width, "", "  ")
    lines += map(clean, now.alarms())
    if now.diagnosis is not None:
        lines += ["", *verdict_sentences(now.diagnosis)]
    if ledger is not None and ledger.wall_seconds > 0:
        lines += ["", "where the time went"]
        for name in largest_buckets(ledger):
            share, took = percent(ledger.share(name), 1), duration(ledger.seconds[name])
            lines.append(f"  {now.label(name):24}{share:>8}  {took}"[: max(20, width)])
    resources = now.resources
    lines += ["", *(f"  {name:24}{words}" for name, words in resources.items())] if resources else []
    return lines
