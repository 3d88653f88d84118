"""Faults that nobody listed: something is slowed by a drawn amount, in a drawn part of the run, in drawn code.

Each draw is a function of a seed and a number. It is judged by its place: where the verdict's first cause says that the
time goes, among :data:`PLACES`, against where it was injected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from faults.around import missing
from faults.catalogue import BASES
from faults.fault import Fault, both

PLACES: dict[str, tuple[str, ...]] = {
    "input": ("threads", "decode", "augment", "gather", "waiting", "epoch_gap"),
    "compute": (
        "oversubscription",
        "compute_threads",
        "precision",
        "launch",
        "batch_size",
        "optimizer",
        "affinity",
        "quota",
    ),
    "host code": ("model_waits", "host_code", "busy_thread", "logging"),
    "other processes": ("noisy_neighbour",),
    "storage": ("storage", "storage_first_epoch", "storage_start"),
    "memory": ("memory", "allocator"),
    "start-up": ("startup", "compile", "warmup"),
    "evaluation": ("evaluation",),
    "checkpoints": ("checkpoint",),
    "ranks": ("straggler", "communication"),
    "stopped": ("stopped",),
    "growth": ("growth",),
    "unexplained": ("unexplained",),
}
"""Where time can go -> the causes that say so."""

TWO = " + "  # between the places of two faults at a time
COSTS, LEAST_SECONDS, NEAR = 0.10, 1.0, 0.08
"""A draw that truly costs more, and more than a second, is judged by its place; a share is near the truth within so
much."""
DISTURBED = NEAR
"""Cores: an update waits for the last of its threads, so whoever takes so much of one core can cost the run as large a
share. A run that lost more to what is none of the benchmark is counted apart."""

TIMES = {"small": 2, "photos": 2, "quick": 2, "ranks": 1}
LONG = {name: replace(BASES[name], images=times * BASES[name].images) for name, times in TIMES.items()}
"""The bases that draws are made with: sound runs of about ten seconds."""
OWN = {"quick": "launch"}
"""A cause that a base has by itself: of updates of a few milliseconds, 13 to 22 % goes into calling operations. It is
neither a false alarm of a sound run nor what was injected."""
UPDATE_SECONDS = {"small": 0.06, "photos": 0.06, "quick": 0.006, "ranks": 0.08}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One drawn fault, and where it lies.

    ``left``: the part of what it costs that the sound run has as well.
    """

    place: str
    fault: Fault
    left: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The outcome of one draw, or of a sound run (``place``: ``sound``); seconds are of the wall clock.

    ``clean`` and ``after``: of the sound runs just before and just after, which differ where the machine changes; None:
    there is no second one. ``counted``: seconds that were injected into the training thread, where nothing can hide
    them; None: others were. ``left``: as in :class:`Draw`. ``others``: cores that were taken by what is none of the
    benchmark, during that of the runs which lost most. ``run``: its folder.
    """

    number: int
    place: str
    about: str
    base: str
    clean: float
    faulty: float
    counted: float | None
    causes: Sequence[Sequence[Any]] = field(default_factory=tuple)
    run: str = ""
    after: float | None = None
    left: float = 0.0
    others: float = 0.0

    @property
    def true(self) -> float:
        """The share of the run that the fault takes: by the mean of the sound runs around it."""
        if self.place == "sound":
            return 0.0
        sound = self.clean if self.after is None else (self.clean + self.after) / 2
        return (self.faulty - sound if self.counted is None else self.counted) / self.faulty / (1 - self.left)

    @property
    def is_sure(self) -> bool:
        """Return whether both sound runs tell the truth to within :data:`NEAR`: else no verdict can be held to it."""
        if self.counted is not None:
            return True
        return self.after is not None and abs(self.after - self.clean) / self.faulty / (1 - self.left) <= NEAR

    @property
    def is_disturbed(self) -> bool:
        """Return whether others took so much that shares tell of them as well."""
        return self.others > DISTURBED

    @property
    def is_heavy(self) -> bool:
        """Return whether the fault is judged by its place."""
        return self.true > COSTS and self.true * self.faulty > LEAST_SECONDS

    @property
    def judged(self) -> list[Sequence[Any]]:
        """The causes that are told, without the one that the base has by itself."""
        return [cause for cause in self.causes if cause[0] != OWN.get(self.base)]

    @property
    def first(self) -> str:
        """The place that the verdict names first; empty where it says that nothing stands out."""
        name = self.judged[0][0] if self.judged else "nothing"
        return next((place for place, names in PLACES.items() if name in names), "")

    @property
    def is_right(self) -> bool:
        """Return whether the first cause lies at the place of the fault: of two at a time, at one of theirs."""
        return bool(self.judged) and any(self.judged[0][0] in PLACES.get(place, ()) for place in self.place.split(TWO))

    @property
    def told(self) -> float:
        """The largest share of a cause at the place of the fault; of two at a time, both."""
        places = [PLACES.get(place, ()) for place in dict.fromkeys(self.place.split(TWO))]
        told = [max((share for name, share in self.judged if name in names), default=0.0) for names in places]
        return min(1.0, sum(told))

    @property
    def is_near(self) -> bool:
        """Return whether the share that is told is near the true one."""
        return abs(self.told - self.true) <= NEAR


def draw(seed: int, number: int) -> Draw:
    """Draw the fault of this number."""
    chance = Random(f"{seed}-{number}")
    while True:
        drawn = chance.choice(_KINDS)(chance)
        if not missing(drawn.fault.around):
            return drawn


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the table: place by place what was right, and whether the bars are met; disturbed runs apart."""
    disturbed = [row for row in rows if row.is_disturbed]
    quiet = [row for row in rows if not row.is_disturbed]
    table = {
        place: _scores([row for row in quiet if place in (row.place, TWO if TWO in row.place else "")])
        for place in (*PLACES, TWO)
    }
    table["two at once"] = table.pop(TWO)
    return {
        **_scores(quiet),
        "disturbed": _scores(disturbed),
        "places": {place: row for place, row in table.items() if row["draws"]},
    }


def _scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what was right of these: of shares, those draws whose truth is known well enough count."""
    sound, draws = [row for row in rows if row.place == "sound"], [row for row in rows if row.place != "sound"]
    heavy, sure = [row for row in draws if row.is_heavy], [row for row in draws if row.is_sure]
    alarms = [row for row in sound if row.first]
    return {
        "draws": len(draws),
        "heavy": len(heavy),
        "right": sum(row.is_right for row in heavy),
        "named_first": dict(Counter(row.first or "nothing" for row in heavy)),
        "sure": len(sure),
        "share_near": sum(row.is_near for row in sure),
        "unsure_share_near": sum(row.is_near for row in draws if not row.is_sure),
        "sound": len(sound),
        "false_alarms": len(alarms),
        "alarms": dict(Counter(row.judged[0][0] for row in alarms)),
    }


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the summary as text."""
    yield f"{'place':16} {'draws':>6} {'over 10 %':>10} {'right':>6} {'share near':>11}  named first"
    for place, row in summary["places"].items():
        named = ", ".join(f"{name} {count}" for name, count in row["named_first"].items())
        near = f"{row['share_near']} of {row['sure']}"
        yield f"{place:16} {row['draws']:6} {row['heavy']:10} {row['right']:6} {near:>11}  {named}"
    for name, row in (("", summary), (f"disturbed (others took over {DISTURBED} cores): ", summary["disturbed"])):
        unsure = row["draws"] - row["sure"]
        near = f"shares within {NEAR:.0%}: {row['share_near']} of {row['sure']}"
        near += f" (and {row['unsure_share_near']} of {unsure} whose sound runs differ by more)" if unsure else ""
        yield f"{name}right {row['right']} of {row['heavy']}; {near}"
        yield f"{name}a cause told of {row['false_alarms']} of {row['sound']} sound runs {row['alarms'] or ''}".rstrip()


# -- the primitives ----------------------------------------------------------------------------------------------------


def _amount(chance: Random, low: float, high: float) -> float:
    """Draw from ``low`` to ``high``, as often in each factor of two."""
    return float(f"{low * (high / low) ** chance.random():.3g}")


def _span(chance: Random) -> tuple[float, float]:
    """Draw a part of the run: all of it in half of the draws, else a third of it or more."""
    if chance.random() < 0.5:
        return 0.0, 2.0
    begin = round(chance.uniform(0.0, 0.6), 2)
    return begin, round(begin + chance.uniform(0.35, 0.4 if begin > 0.5 else 0.8), 2)


def _when(span: tuple[float, float]) -> str:
    return "" if span == (0.0, 2.0) else f", from {span[0]:.0%} to {min(1.0, span[1]):.0%} of the updates"


def _made(place: str, about: str, base: str, truth: str = "wall", **settings: Any) -> Draw:
    steps = max(
        1, round(LONG[base].images / settings.get("settings", {}).get("batch_size", BASES[base].settings["batch_size"]))
    )
    patches = {"expect_updates": steps, **settings.pop("patches", {})}
    fault = Fault(name=about, about=about, base=base, expected=PLACES[place], truth=truth, patches=patches, **settings)
    return Draw(place=place, fault=fault)


def _slow_input(chance: Random) -> Draw:
    of, how = chance.choice(("decode", "augment", "gather")), chance.choice(("sleep", "burn"))
    base = "small" if of == "gather" else "photos"
    seconds = _amount(chance, 0.005, 0.4) if of == "gather" else _amount(chance, 0.001, 0.04)
    span = _span(chance)
    settings = {"of": of, "how": how, "seconds": seconds, "begin": span[0], "end": span[1]}
    return _made("input", f"{of} {how}s {seconds} s more{_when(span)}", base, patches={"slowed": settings})


def _slow_reads(chance: Random) -> Draw:
    span, seconds = _span(chance), _amount(chance, 0.001, 0.04)
    settings = {"of": "read", "how": "sleep", "seconds": seconds, "begin": span[0], "end": span[1]}
    return _made("storage", f"each read takes {seconds} s{_when(span)}", "photos", patches={"slowed": settings})


def _slow_device(chance: Random) -> Draw:
    rate = _amount(chance, 0.7e6, 6e6)
    if chance.random() < 0.5:
        about = f"a device of {2 * rate / 1e6:.1f} MB/s from the start"
        bare = {"data": "cifar_bare", "val": None}  # without a card it is read whole, once
        settings: Any = {"patches": {"cold_start": "cifar_bare"}, "around": {"slow_from_start": 2 * rate}}
        return _made("storage", about, "small", settings=bare, clean=bare, **settings)
    patches = {"cold": "photos"} | ({"forgets": "photos"} if chance.random() < 0.5 else {})
    about = f"a device of {rate / 1e6:.1f} MB/s from the first batch{' in every epoch' if len(patches) > 1 else ''}"
    return _made("storage", about, "photos", patches=patches, around={"slow_storage": rate})


def _slow_model(chance: Random) -> Draw:
    base, how = chance.choice(("small", "quick", "photos")), chance.choice(("sleep", "burn", "spin"))
    where, span = chance.choice(("forward", "forward", "backward")), _span(chance)
    seconds = _amount(chance, 0.05, 3.0) * UPDATE_SECONDS[base]
    seconds = float(f"{seconds:.2g}")
    options = {"where": where, "how": how, "seconds": seconds, "span": f"{span[0]}:{span[1]}"}
    settings = {"model": "faults.nets:slowed"} | {f"model.options.{key}": value for key, value in options.items()}
    about = f"the model's {where} pass {how}s {seconds} s{_when(span)}"
    return _made("host code", about, base, "counted", settings=settings)


def _slow_step(chance: Random) -> Draw:
    base, how, span = chance.choice(("small", "quick", "photos")), chance.choice(("sleep", "spin")), _span(chance)
    seconds = float(f"{_amount(chance, 0.05, 3.0) * UPDATE_SECONDS[base]:.2g}")
    settings = {"of": "optimizer", "how": how, "seconds": seconds, "begin": span[0], "end": span[1]}
    about = f"a hook of the optimizer {how}s {seconds} s{_when(span)}"
    return _made("host code", about, base, "counted", patches={"slowed": settings})


def _busy_thread(chance: Random) -> Draw:
    base, duty, span = chance.choice(("small", "quick", "photos")), _amount(chance, 0.2, 1.0), _span(chance)
    settings = {"how": "spin", "duty": duty, "begin": span[0], "end": span[1]}
    about = f"a thread runs Python code {duty:.0%} of the time{_when(span)}"
    return _made("host code", about, base, patches={"thread": settings})


def _slow_log(chance: Random) -> Draw:
    seconds = _amount(chance, 0.002, 0.2)
    return _made("host code", f"each event takes {seconds} s", "small", "counted", patches={"slow_log": seconds})


def _neighbours(chance: Random) -> Draw:
    base, number = chance.choice(("small", "quick", "photos")), chance.choice((1, 2, 3, 4))
    nice, delay = chance.choice((0, 0, 0, 5, 19)), round(chance.choice((0.0, chance.uniform(2, 4))), 1)
    work = chance.choice(("pass", "sum(range(1000))", "bytearray(1 << 23)"))
    seconds = round(chance.choice((600.0, chance.uniform(4, 8))), 1)
    settings = {"number": number, "nice": nice, "delay": delay, "seconds": seconds, "work": work}
    about = f"{number} programs at nice {nice} ({work}), from {delay} s for {seconds} s"
    return _made("other processes", about, base, around={"neighbours": settings})


def _threads(chance: Random) -> Draw:
    number, base = chance.choice((1, 1, 4, 8)), "small"
    settings = {"parallel.compute_threads": number}
    clean = {"parallel.compute_threads": 2}
    return _made("compute", f"{number} compute threads", base, settings=settings, clean=clean)


def _fewer_cores(chance: Random) -> Draw:
    if chance.random() < 0.4:
        return _made("compute", "affinity to one core", "small", patches={"affinity": 1})
    cores = round(chance.uniform(0.5, 1.6), 2)
    return _made("compute", f"a quota of {cores} cores", "small", around={"quota": cores})


def _tiny_batches(chance: Random) -> Draw:
    """Draw a batch whose updates mostly have the cost that each update has: the sound run has fewer, but has it too."""
    size = chance.choice((8, 16))
    made = _made("compute", f"batches of {size}", "small", settings={"batch_size": size})
    return replace(made, left=size / int(BASES["small"].settings["batch_size"]))


def _allocator(chance: Random) -> Draw:
    return _made("memory", "freed memory goes back to the system", "quick", patches={"bare_malloc": True})


def _slow_start(chance: Random) -> Draw:
    how, seconds = chance.choice(("sleep", "burn", "spin")), _amount(chance, 0.5, 16.0)
    settings = {"model": "faults.nets:late", "model.options.seconds": seconds, "model.options.how": how}
    return _made("start-up", f"making the model {how}s {seconds} s", "small", "counted", settings=settings)


def _evaluation(chance: Random) -> Draw:
    if chance.random() < 0.4:
        period = _amount(chance, 0.05, 0.4)
        return _made(
            "evaluation", f"an evaluation every {period} epochs", "small", settings={"every.evaluate_epochs": period}
        )
    how, seconds = chance.choice(("sleep", "burn", "spin")), _amount(chance, 0.1, 2.0)
    options = {"where": "evaluation", "how": how, "seconds": seconds, "span": "0:2"}
    settings = {"model": "faults.nets:slowed"} | {f"model.options.{key}": value for key, value in options.items()}
    about = f"the model {how}s {seconds} s for each batch of an evaluation"
    return _made("evaluation", about, "small", "counted", settings=settings)


def _checkpoints(chance: Random) -> Draw:
    steps, seconds = chance.choice((5, 10, 20, 40)), _amount(chance, 0.02, 0.5)
    about = f"a checkpoint every {steps} updates, {seconds} s for each flush"
    settings, patches = {"every.save_steps": steps}, {"slow_disk": seconds}
    return _made("checkpoints", about, "small", settings=settings, patches=patches)


def _slow_rank(chance: Random) -> Draw:
    if chance.random() < 0.3:
        rate = _amount(chance, 50e6, 500e6)
        return _made("ranks", f"a link of {rate / 1e6:.0f} Mbit/s", "ranks", around={"slow_link": rate})
    seconds = float(f"{_amount(chance, 0.2, 1.5) * UPDATE_SECONDS['ranks']:.2g}")
    patches = {"of_last_rank": {"slow_updates": seconds}}
    return _made("ranks", f"the last of two ranks waits {seconds} s more", "ranks", "counted", patches=patches)


def _stopped(chance: Random) -> Draw:
    base, number = chance.choice(("small", "quick", "photos")), chance.choice((1, 1, 2, 4))
    seconds = _amount(chance, 0.7, 6.0)
    settings = {"number": number, "seconds": seconds, "apart": round(chance.uniform(0.5, 1.5), 2)}
    times = "once" if number == 1 else f"{number} times"
    return _made("stopped", f"stopped {times} for {seconds} s", base, patches={"stopped": settings})


def _growing_code(chance: Random) -> Draw:
    base, how = chance.choice(("small", "quick", "photos")), chance.choice(("sleep", "burn", "spin"))
    where, seconds = chance.choice(("forward", "backward")), _amount(chance, 0.2, 2.0) * UPDATE_SECONDS[base]
    options = {"where": where, "how": how, "seconds": float(f"{seconds:.2g}"), "span": "0:2:grows"}
    settings = {"model": "faults.nets:slowed"} | {f"model.options.{key}": value for key, value in options.items()}
    about = f"the model's {where} pass {how}s longer at each update, {seconds:.2g} s on the average"
    return _made("host code", about, base, "counted", settings=settings)


def _keeps_tensors(chance: Random) -> Draw:
    rows = chance.choice((128, 256, 512, 1024))
    settings = {"model": "faults.nets:keeping", "model.options.rows": rows}
    return _made(
        "growth",
        f"the model keeps {rows} rows of each batch and computes on all of them",
        "small",
        "counted",
        settings=settings,
    )


def _sets_threads(chance: Random) -> Draw:
    begin = round(chance.choice((0.0, chance.uniform(0.0, 0.5))), 2)
    settings = {"model": "faults.nets:threaded", "model.options.threads": 1, "model.options.begin": begin}
    clean = {"parallel.compute_threads": 2}
    return _made("compute", f"the model sets one thread, from {begin:.0%} on", "small", settings=settings, clean=clean)


def _cores_taken_late(chance: Random) -> Draw:
    span = _span(chance) if chance.random() < 0.3 else (round(chance.uniform(0.1, 0.5), 2), 2.0)
    settings = {"cores": 1, "begin": span[0], "end": span[1]}
    return _made("compute", f"affinity to one core{_when(span)}", "small", patches={"affinity_late": settings})


def _two_at_once(chance: Random) -> Draw:
    """Draw two faults of one base that touch nothing in common."""
    while True:
        first, other = chance.choice(_KINDS[:-1])(chance), chance.choice(_KINDS[:-1])(chance)
        a, b = first.fault, other.fault
        parts = (a.settings, b.settings), (a.around, b.around), (a.patches, b.patches)
        shared = [key for one, two in parts for key in one.keys() & two.keys() if key != "expect_updates"]
        if (
            a.base == b.base
            and not shared
            and not a.clean
            and not b.clean
            and "batch_size" not in {*a.settings, *b.settings}
        ):
            about = f"{a.about}; {b.about}"
            fault = replace(both(a, b), name=about, about=about, truth="wall")
            return Draw(place=f"{first.place}{TWO}{other.place}", fault=fault)


_KINDS: tuple[Callable[[Random], Draw], ...] = (
    *(
        _slow_input,
        _slow_input,
        _slow_reads,
        _slow_device,
        _slow_model,
        _slow_model,
        _slow_step,
        _busy_thread,
        _slow_log,
    ),
    *(
        _neighbours,
        _neighbours,
        _threads,
        _fewer_cores,
        _tiny_batches,
        _allocator,
        _slow_start,
        _evaluation,
        _checkpoints,
    ),
    *(_stopped, _stopped, _growing_code, _keeps_tensors, _sets_threads, _cores_taken_late, _cores_taken_late),
    *(_slow_input, _evaluation, _slow_rank, _two_at_once),
)
