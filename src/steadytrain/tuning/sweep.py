"""Sweeps over values of one recipe: cases of several runs each, and the table of their results, best first.

Each run is an ordinary one, in ``FOLDER/CASE/seed-N``. All decisions follow from the logs of the runs: the same call
continues where it was interrupted, keeps what is finished, and ends with the same table.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from steadytrain.config import Recipe
from steadytrain.config.factories import FACTORY
from steadytrain.config.figures import FIGURES, SIGN, USUAL, figure_value
from steadytrain.config.plain import build, check_types, finite, leaves, plain
from steadytrain.config.settings import require
from steadytrain.config.strangers import GATES
from steadytrain.data.storage.store import refuse_inner_addresses
from steadytrain.errors import InputError, RecipeError, RunError, SteadyError
from steadytrain.files import replace_file
from steadytrain.format import NONE, duration, epoch, fit_table, money, percent, score_name
from steadytrain.intervals import Interval, Spread, spread
from steadytrain.reports import report
from steadytrain.reports.summary import Account, all_reached
from steadytrain.reports.tables import spread_text
from steadytrain.run import MAX_REPEATS, REPEAT, Run

MOST_RUNS = 10_000
CODE = ("model.name", "optim.name", "optim.loss", "data.transforms")
"""Keys that may name code of the user's own, which is imported where the command line names it."""
TABLE_FILE, PAGE_FILE = "sweep.json", "report.html"
MARK = "steadytrain-sweep"

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(?:[ ,:]+(log))?")


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, drawn evenly, or by their logarithm; integers if both ends are."""

    low: float
    high: float
    is_log: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether only integers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Values = list[Any] | Range
"""The values of a key: a list of them, or a range of numbers."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """The table ``[sweep]`` of a recipe file.

    Args:
        over: a key of the recipe -> its values, in every combination; the text of a range for a search.
        cases: a name -> values of several keys that belong together; each goes with every combination of ``over``.
        seeds: runs of each case, 1 to 1000.
        halving: stop the worst cases early; in a search, those worse than the median.
        search: the number of cases to try, each chosen by the results before; None: all combinations.
        target: top-1 (or mAP), a fraction: the table shows when it was reached.
    """

    over: Mapping[str, Any] = field(default_factory=dict)
    cases: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 1
    halving: bool = False
    search: int | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        check_types(self, "sweep")
        require(1 <= self.seeds <= MAX_REPEATS, "sweep.seeds", self.seeds, f"1 to {MAX_REPEATS:,}")
        searched, limit = self.search, f"1 to {MOST_RUNS:,}"
        require(searched is None or 1 <= searched <= MOST_RUNS, "sweep.search", searched, limit)
        require(self.target is None or 0 < self.target <= 1, "sweep.target", self.target, "above 0, up to 1")
        if self.search is not None and self.cases:
            raise RecipeError("a search draws from --over alone: leave out --search, or the cases of the recipe file")


@dataclass(frozen=True)
class Point:
    """A planned case: its name, which is that of its folder, and its changes to the recipe."""

    name: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A point with its runs, one for each seed."""

    point: Point
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Space:
    """The search space: the values of each key of ``over``, and the changes of each of the ``cases``."""

    over: Mapping[str, Values]
    cases: Mapping[str, Mapping[str, Any]]


def read_spec(values: Any, flags: Mapping[str, Any] | None = None) -> SweepSpec:
    """Read the table ``[sweep]`` of a recipe file. Raises RecipeError: an unknown key, or an invalid value.

    ``flags``: values that replace those of the file; None: none.
    """
    if isinstance(values, Mapping):
        values = {**values, **{name: value for name, value in (flags or {}).items() if value is not None}}
    return build(SweepSpec, values, "sweep")


def space_of(
    spec: SweepSpec, over: Mapping[str, str], parse: Callable[[str, str], Any], *, source: Path | None = None
) -> Space:
    """Read the values of all keys.

    Args:
        over: a key -> its values as typed, which replace those of the file.
        parse: turns a text into a value of a key.

    Raises:
        RecipeError: an invalid value.
        InputError: there are none, or one acts outside of the runs, where only the file names it.
    """
    texts = {**dict(leaves(spec.over)), **over}
    values = {key: parse_values(key, value, partial(parse, key)) for key, value in texts.items()}
    cases = {}
    for name, changes in spec.cases.items():
        if not isinstance(changes, Mapping):
            raise RecipeError(f"sweep.cases.{name} is {changes!r}; it must be a table of keys and values")
        pairs = leaves(changes)
        cases[name] = {key: parse(key, value) if isinstance(value, str) else value for key, value in pairs}
    if not values and not cases:
        raise InputError(
            f"nothing is to be swept: give --over KEY=VALUE,VALUE, or a table [sweep] in {source or 'a recipe file'}"
        )
    space = Space(values, cases)
    for key, text in values_of_file(space, over):
        gate = next((gate for gate in GATES if f"{gate.part}.{gate.key}" == key), None)
        if key in CODE and FACTORY.fullmatch(text):
            raise InputError(f"{source} names the code {text}, which is not imported for a file: --over {key}=... does")
        if gate is None or key in CODE or gate.part == "model":
            continue
        if gate.part != "data":
            raise InputError(f"{source} varies {key} ({text}): {gate.does}, which a file alone does not; leave it out")
        refuse_inner_addresses({key: text})
    return space


def values_of_file(space: Space, over: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield keys and texts that only the recipe file names (``over``: what the command names), those in tables too."""
    pairs: list[tuple[str, Any]] = [(key, values) for key, values in space.over.items() if key not in over]
    pairs += [pair for changes in space.cases.values() for pair in changes.items()]
    for key, value in pairs:  # which grows
        if isinstance(value, Mapping):
            pairs += [(f"{key}.{name}", item) for name, item in value.items()]
        elif isinstance(value, list | tuple):
            pairs += [(key, item) for item in value]
        elif isinstance(value, str) and value != "none":
            yield key, value


def parse_values(key: str, value: Any, parse: Callable[[str], Any]) -> Values:
    """Read the values of a key: a list, ``64,256``, ``a;b`` where values hold commas, or ``1e-3..1e-1 log``.

    Raises:
        RecipeError: no value, one of them twice, or an invalid range.

    >>> parse_values("optim.lr", "0.1,0.2", float), parse_values("optim.lr", "1e-3..1e-1 log", float)
    ([0.1, 0.2], Range(low=0.001, high=0.1, is_log=True))
    >>> parse_values("optim.schedule", "cosine;factor,every=3", str), parse_values("batch_size", "8..64", str)
    (['cosine', 'factor,every=3'], Range(low=8, high=64, is_log=False))
    """
    if isinstance(value, str):
        if match := _RANGE.fullmatch(value.strip()):
            low, high = (float(text) if re.search("[.eE]", text) else int(text) for text in match.groups()[:2])
            if not low < high < math.inf or (match[3] and low <= 0):
                limit = "rise, and begin above 0 for log" if match[3] else "rise"
                raise RecipeError(f"the range of {key} is {value!r}; it must {limit}, such as {key}=1e-3..1e-1 log")
            return Range(low, high, bool(match[3]))
        items: list[Any] = list(value.split(";" if ";" in value else ","))
    else:
        items = value if isinstance(value, list) else [value]
    values = [parse(item) if isinstance(item, str) else item for item in items]
    texts = [json.dumps(item) for item in values]
    if not values or "" in values:
        raise RecipeError(f"{key} has an empty value in {value!r}: put a value between any two commas")
    if repeated := [text for text in dict.fromkeys(texts) if texts.count(text) > 1]:
        raise RecipeError(f"{key} has {', '.join(repeated)} more than once: list each value once")
    return values


def points(over: Mapping[str, Values], cases: Mapping[str, Mapping[str, Any]] | None = None) -> list[Point]:
    """List every combination of values, with each of the named cases.

    Raises:
        InputError: a range among the values, too many combinations, or a key both in ``over`` and in a case.

    >>> [point.name for point in points({"batch_size": [64, 128], "optim.lr": [0.1]})]
    ['batch_size=64,lr=0.1', 'batch_size=128,lr=0.1']
    >>> [(point.name, dict(point.changes)) for point in points({}, {"no decay": {"optim.weight_decay": 0}})]
    [('no-decay', {'optim.weight_decay': 0})]
    """
    cases = cases or {}
    lists: dict[str, list[Any]] = {}
    for key, values in over.items():
        if isinstance(values, Range):
            raise InputError(f"{key} has a range, from which a search draws: add --search N, or name its values")
        if named := [name for name, changes in cases.items() if key in changes]:
            raise InputError(f"{key} is set by the case {named[0]!r}, too: leave it out of one of them")
        lists[key] = values
    combinations = math.prod(map(len, lists.values())) * max(1, len(cases))
    if combinations > MOST_RUNS:
        raise InputError(f"{combinations:,} combinations are too many (at most {MOST_RUNS:,}): name fewer values")
    last = [key.rpartition(".")[2] for key in lists]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(lists, last, strict=True)}
    listed = []
    for (name, changes), *combination in itertools.product(cases.items() or [("", {})], *lists.values()):
        chosen = dict(zip(lists, combination, strict=True))
        parts = [folder_name(name)] if name else []
        parts += [f"{short[key]}={_word(value)}" for key, value in chosen.items()]
        listed.append(Point(folder_name(",".join(parts) or "as it is"), {**changes, **chosen}))
    if len({point.name for point in listed}) < len(listed):  # values that differ in what a folder's name cannot hold
        listed = [Point(f"{number:03d},{point.name}", point.changes) for number, point in enumerate(listed)]
    return listed


def require_values(over: Mapping[str, Values], make_recipe: Callable[[Mapping[str, Any]], Recipe]) -> None:
    """Refuse a key, a value or an end of a range that makes no recipe, alone or with one of another key.

    Raises:
        SteadyError: of the value alone.
    """
    listed = {key: (v.low, v.high) if isinstance(v, Range) else v for key, v in over.items()}

    def makes_recipe(changes: Mapping[str, Any]) -> bool:
        with suppress(SteadyError):
            make_recipe(changes)
            return True
        return False

    for key, values in listed.items():
        others = [{other: value} for other in listed.keys() - {key} for value in listed[other]]
        for value in values:
            if not any(makes_recipe({key: value, **other}) for other in [{}, *others]):
                make_recipe({key: value})


def _word(value: Any) -> str:
    """Return a value as text for the name of a case.

    >>> _word(0.1), _word(None), _word("cosine"), _word([1, 2]), _word(0.0123456789)
    ('0.1', 'none', 'cosine', '[1, 2]', '0.01235')
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def folder_name(text: str) -> str:
    """Return a name that is valid in any file system.

    >>> folder_name("model=timm/resnet18,lr=0.1"), folder_name("constant, batch x 4")
    ('model=timm-resnet18,lr=0.1', 'constant-batch-x-4')
    """
    name = re.sub(r"-*,-*", ",", re.sub(r"[^\w.=+,-]+", "-", text)).replace(",-", "-").strip("-,.")
    name = re.sub(r",(?=[^=]*(,|$))", "-", name)  # a comma stands between pairs alone
    return name if len(name) <= 100 else f"{name[:90]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def create_cases(
    folder: Path,
    chosen: Sequence[Point],
    make_recipe: Callable[[Mapping[str, Any]], Recipe],
    seeds: int,
    *,
    writes: bool = True,
) -> list[Case]:
    """Create the runs of some points, or reopen them; nothing is created if one of the recipes is invalid.

    ``writes``: False: create no folders, for showing what would be trained.

    Raises:
        InputError: an invalid key or value, with the case's name; or a run of another recipe in its folder.
    """
    recipes = []
    for point in chosen:
        try:
            recipes.append(make_recipe(point.changes))
        except InputError as error:
            raise type(error)(f"case {point.name}: {error}") from error
    if Run.is_run(folder):
        raise RunError(f"{folder} is a run; a sweep needs another folder: --run FOLDER")
    cases = []
    for point, recipe in zip(chosen, recipes, strict=True):
        numbers = range(recipe.seed, recipe.seed + seeds)
        create = Run.create if writes else Run
        runs = [create(folder / point.name / f"{REPEAT}{seed}", recipe.with_(seed=seed)) for seed in numbers]
        cases.append(Case(point, tuple(runs)))
    return cases


def is_diverged(run: Run) -> bool:
    """Return whether a run has diverged, to a loss that is not finite; that is its result."""
    failed = run.progress().failed
    return failed is not None and failed.error == "DivergedError"


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """The results of a case. Accuracies are fractions: top-1, or mAP of several labels; None if not known.

    ``best`` and ``last``: means over seeds of each run's best and last evaluation; their spreads, of two seeds or more;
    ``goodness``: the mean that cases are sorted by (:attr:`.Evaluated.goodness`), in words ``chosen``.
    ``interval``: of the best evaluation of a single run (Wilson). ``epochs`` and ``seconds``: means over seeds of what
    was trained. ``reached``: seeds that came to the target; ``epochs_to_target``, ``seconds_to_target``,
    ``cost_to_target``: means over those. ``cost``: of all seeds, in ``currency``, where a price is known. ``why``: it
    has failed.
    """

    name: str
    changes: Mapping[str, Any]
    status: str
    seeds: int
    finished: int
    best: float | None = None
    goodness: float = -math.inf
    chosen: str = ""
    last: float | None = None
    best_spread: Spread | None = None
    last_spread: Spread | None = None
    interval: Interval | None = None
    epochs: float | None = None
    seconds: float | None = None
    reached: int = 0
    epochs_to_target: float | None = None
    seconds_to_target: float | None = None
    cost: float | None = None
    cost_to_target: float | None = None
    currency: str = ""
    is_multi_label: bool = False
    why: str = ""


def rows(
    cases: Sequence[Case],
    *,
    target: float | None = None,
    stopped: Mapping[str, float] | None = None,
    failures: Mapping[Path, str] | None = None,
    not_made: Sequence[tuple[Point, str]] = (),
) -> list[CaseRow]:
    """Return the results of the cases, best first; cases that were stopped early, or failed, come last.

    Args:
        stopped: epochs at which cases were stopped, by their names.
        failures: folders of runs that failed, other than by diverging -> their messages.
        not_made: points that have no valid recipe, each with the reason.
    """
    table = [_row(case, target, (stopped or {}).get(case.point.name), failures or {}) for case in cases]
    table += [
        CaseRow(name=point.name, changes=dict(point.changes), status="failed", seeds=0, finished=0, why=why)
        for point, why in not_made
    ]
    return sorted(table, key=lambda row: (row.status != "finished", -row.goodness))


def _row(case: Case, target: float | None, stopped: float | None, failures: Mapping[Path, str]) -> CaseRow:
    accounts, chosen = [], [event for run in case.runs if (event := run.progress().best)]
    figure, goodness = chosen[0].figure if chosen else None, fmean([event.goodness for event in chosen] or [-math.inf])
    for run in case.runs:
        with suppress(RunError):  # nothing was started
            accounts.append(Account.of(run))
    summaries = [account.summary for account in accounts]
    scores = [summary.quality for summary in summaries]
    best = [score.best.value for score in scores if score.best and math.isfinite(score.best.value)]
    last = [score.last.value for score in scores if score.last and math.isfinite(score.last.value)]
    hits = all_reached(accounts, target)
    bills = [summary.cost for summary in summaries if summary.cost is not None]
    statuses = [summary.course.status for summary in summaries]
    return CaseRow(
        name=case.point.name,
        changes=dict(case.point.changes),
        status=_status(case, statuses, stopped, failures),
        seeds=len(case.runs),
        finished=statuses.count("finished"),
        best=_mean(best),
        goodness=goodness,
        chosen=""
        if figure in (None, USUAL, "top1", "map")
        else f" {FIGURES[figure]} {figure_value(figure, SIGN[figure] * goodness)}",
        last=_mean(last),
        best_spread=spread(best, are_shares=True),
        last_spread=spread(last, are_shares=True),
        interval=scores[0].best.interval if len(scores) == 1 and scores[0].best else None,
        epochs=_mean([summary.progress.epoch for summary in summaries]),
        seconds=_mean([summary.speed.seconds for summary in summaries]),
        reached=len(hits),
        epochs_to_target=_mean([hit.epoch for hit in hits]),
        seconds_to_target=_mean([hit.seconds for hit in hits]),
        cost=sum(bill.so_far for bill in bills) if bills else None,
        cost_to_target=_mean([hit.cost for hit in hits if hit.cost is not None]),
        currency=bills[0].currency if bills else "",
        is_multi_label=any(score.is_multi_label for score in scores),
        why=next((failures[run.directory] for run in case.runs if run.directory in failures), ""),
    )


def _status(case: Case, statuses: Sequence[str], stopped: float | None, failures: Mapping[Path, str]) -> str:
    """Return the status of a case from those of its runs that were started."""
    if statuses.count("finished") == len(case.runs):
        return "finished"
    if any(is_diverged(run) for run in case.runs):
        return "diverged"
    if any(run.directory in failures for run in case.runs):  # perhaps before its log began
        return "failed"
    if stopped is not None:
        return f"stopped at epoch {stopped:g}"
    return next((status for status in statuses if status != "finished"), "not started")


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def to_text(table: Sequence[CaseRow], *, target: float | None = None, width: int = 80) -> str:
    """Return the table as text, of at most ``width`` columns."""
    name = score_name(any(row.is_multi_label for row in table))
    heads = ["case", f"best {name}", f"last {name}", "epochs", "wall time"]
    heads += [] if target is None else [f"epochs to {percent(target, 1)}", "time to it"]
    has_cost = any(row.cost is not None for row in table)
    heads += ["cost to it"] * (has_cost and target is not None) + ["cost"] * has_cost
    lines = [[*heads, "status"]]
    for row in table:
        best = spread_text(row.best_spread, percents=True) if row.best_spread else percent(row.best, 1)
        best += f" ({row.interval.words})" if row.interval and not row.best_spread else ""
        best += row.chosen
        last = f"{percent(row.last, 1)}{f' ± {100 * row.last_spread.std:.1f}' if row.last_spread else ''}"
        cells = [row.name, best, last, NONE if row.epochs is None else epoch(row.epochs), duration(row.seconds)]
        if target is not None:
            num_reached = f" ({row.reached} of {row.seeds})" if 0 < row.reached < row.seeds else ""
            epochs = NONE if row.epochs_to_target is None else f"{epoch(row.epochs_to_target)}{num_reached}"
            cells += [epochs, duration(row.seconds_to_target)]
            cells += [_money(row.cost_to_target, row.currency)] * has_cost
        cells += [_money(row.cost, row.currency)] * has_cost
        is_partial = 0 < row.finished < row.seeds
        lines.append([*cells, row.status + f" ({row.finished} of {row.seeds} seeds)" * is_partial])
    text = fit_table(lines, width)
    if any(row.best_spread for row in table):
        text += "\n± standard deviation over seeds, and in brackets the 95 % interval of their mean (Student)"
    return text


def _money(value: float | None, currency: str) -> str:
    return NONE if value is None else f"{money(value)} {currency}"


def document(table: Sequence[CaseRow], *, target: float | None = None) -> dict[str, Any]:
    """Return the table as plain data for JSON."""
    values = {"format": MARK, "version": 1, "target": target, "rows": [plain(row) for row in table]}
    result: dict[str, Any] = finite(values)
    return result


def write(folder: Path, cases: Sequence[Case], table: Sequence[CaseRow], *, target: float | None) -> Path | None:
    """Write the table as JSON and a report on all runs; return the path of the report, None if no run was started.

    Raises:
        InputError: there is a file of that name that is not a report.
        StorageError: they cannot be written.
    """
    replace_file(folder / TABLE_FILE, json.dumps(document(table, target=target), indent=2) + "\n")
    started = [run for case in cases for run in case.runs if run.progress().started]
    return report(started, folder / PAGE_FILE, target=target) if started else None
