"""Correctness of verdicts: faults are injected into real training, one and two at a time, and have to be found.

Every run is a process of its own that trains as ``steady train`` does, with a fault in it: see ``faults/catalogue.py``.
For each fault, round by round: a sound run, the faulty one, its verdict, and a run with the change applied that the
verdict advises, as it advises it; where that is nothing a command line can do (more cores, another disk), the fault is
taken away instead, and the sound run counts (``mended_by``). All train on the same number of images; wall seconds are
those of the process, from its start to its end.

- ``right_first``: in how many runs one of the expected causes was named first; of pairs, in how many both were among
  the first two (``right_two``). Sound runs have to be told ``nothing``.
- ``share_true``: the share of the faulty run that the fault takes: 1 - sound / faulty in wall seconds, of the fastest
  run of each kind; or, where the fault waits in the training thread itself and nothing can hide it, the seconds that
  the injecting code counted (``truth``: ``wall`` or ``counted``). ``share_true_spread``: half of what it differs by
  between the rounds, since machines do not run equally fast. ``share_told``: the verdict's, the median of the rounds.
- ``saving_measured``: 1 - mended / faulty, of the fastest as well; ``saving_predicted``: the verdict's, the median.
  Where a verdict has no change to offer it predicts no saving, and none is compared.

The runs need two cores with nothing else on them. Faults that need control groups use those of version 1; where they
cannot be made, and for what needs a GPU or several machines, ``not_injected`` says why. Those are never counted.

``--drawn N`` runs another set instead: N faults that are drawn, not listed (``faults/drawn.py``), each judged by its
place, against the sound runs just before and just after it. Where these differ by more than a share may be off, the
truth is not known well enough, and the draw's share counts apart; so does a draw, or a sound run, during which others
took the cores. Each result is a line of a file in ``--out``, so that the same command goes on where it was stopped;
``--minutes`` stops it by the clock.

``--advice N`` makes N runs that nothing is wrong with (``faults/sound.py``: ten networks, batches of 8 to 256, one and
two threads, fed and starved) and follows each change that their verdicts name: ``predicted`` beside ``actual``.

usage: python benchmarks/verdict.py --data FOLDER [--drawn N | --advice N [--seed S] [--minutes M]]
                                    [--rounds 3] [--only NAME ...]
                                    [--quick] [--work FOLDER]
                                    [--save [NAME]]
       FOLDER holds imagenet-sample-200.tar and cifar10-png.tar.zst
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from steadytrain.machine.process import share_cores, spin_where_alone

share_cores()  # as the command does, before torch is loaded
spin_where_alone()

import machine  # noqa: E402
from faults import data, drawn, score, sound  # noqa: E402
from faults.around import missing  # noqa: E402
from faults.catalogue import BASES, NOT_INJECTED, PAIRS, SINGLES  # noqa: E402
from faults.fault import Base, Fault  # noqa: E402
from faults.run import RunFailedError  # noqa: E402
from faults.score import Trial  # noqa: E402
from faults.trial import Bench  # noqa: E402

QUICK = ("slow_decoder", "one_core", "oversubscription", "waiting_model", "frequent_evaluation", "slow_log")
CLEAN = "clean "
Trials = dict[str, list[Trial]]


def measure(bench: Bench, names: list[str], rounds: int, out: Path | None) -> tuple[Trials, dict[str, str]]:
    """Run all of them in turns; return the trials, and which failed, with the reason."""
    trials: Trials = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in names:
            began = time.monotonic()
            try:
                trials[name].append(one(bench, name))
            except RunFailedError as error:
                failed[name] = str(error)
                machine.say(f"round {number + 1}  {name}: FAILED {str(error)[-400:]}")
                continue
            machine.say(f"round {number + 1}  {line(name, trials[name][-1])}  [{time.monotonic() - began:.0f} s]")
            if out is not None:
                (out / "details.json").write_text(json.dumps(bench.details, indent=1))
                (out / "matrix.json").write_text(json.dumps(document(trials, failed), indent=1))
    return trials, failed


def one(bench: Bench, name: str) -> Trial:
    """Make one round of a sound run, a fault or a pair."""
    if name.startswith(CLEAN):
        return bench.clean_trial(BASES[name.removeprefix(CLEAN)])
    return bench.trial(fault(name), mend=name in SINGLES)


def fault(name: str) -> Fault:
    """Return a fault by its name."""
    return SINGLES[name] if name in SINGLES else PAIRS[name]


BLOCK = 8  # draws that are sorted by the sound runs which they are compared with


def measure_drawn(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Make the draws that are not made yet, each between two sound runs, and sum them up."""
    file = (args.out or bench.folder) / f"drawn-{args.seed}.jsonl"
    rows = [drawn.Row(**json.loads(text)) for text in file.read_text().splitlines()] if file.exists() else []
    began, there = time.monotonic(), {row.number for row in rows if row.place != "sound"}
    numbers = [number for number in range(args.drawn) if number not in there]
    blocks = [numbers[at : at + BLOCK] for at in range(0, len(numbers), BLOCK)]
    draws = [(number, drawn.draw(args.seed, number)) for number in numbers]
    failed: dict[str, str] = {}
    before_it: drawn.Row | None = None

    def keep(row: drawn.Row) -> drawn.Row:
        rows.append(row)
        _keep(file, row)
        return row

    for block in blocks:
        mine = [(number, fault) for number, fault in draws if number in block]
        for number, draw in sorted(mine, key=lambda item: (item[1].fault.base, str(item[1].fault.clean))):
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                break
            base, clean = drawn.LONG[draw.fault.base], draw.fault.clean
            try:
                if before_it is None or not bench.is_fresh(base, clean):
                    before_it = keep(_sound(bench, base, clean))
                trial = bench.trial(draw.fault, mend=False, base=base)
                row = _row(number, draw, base.name, trial, bench.newest)
                before, before_it = before_it, keep(_sound(bench, base, clean))
            except RunFailedError as error:
                failed[f"{number}: {draw.fault.about}"] = str(error)
                machine.say(f"{number} {draw.fault.about}: FAILED {str(error)[-400:]}")
                continue
            keep(replace(row, after=before_it.clean, others=max(row.others, before.others, before_it.others)))
    summary = drawn.summary(rows)
    machine.say("\n".join(drawn.lines(summary)))
    return {"seed": args.seed, **summary, "failed": failed, "rows": [asdict(row) for row in rows]}


def measure_advice(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Follow the advice of drawn sound runs, and sum up what it brought."""
    began, rows, failed, runs = time.monotonic(), list[sound.Advised](), dict[str, str](), 0
    for number in range(args.advice):
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            break
        base = sound.draw(args.seed, number)
        try:
            rows += bench.advised(base)
            runs += 1
        except RunFailedError as error:
            failed[base.name] = str(error)[-400:]
            machine.say(f"{base.name}: FAILED {failed[base.name]}")
    outcome = sound.summary(rows, runs)
    machine.say(str(outcome))
    return {"seed": args.seed, **outcome, "failed": failed, "rows": [asdict(row) for row in rows]}


def _sound(bench: Bench, base: Base, settings: Mapping[str, Any]) -> drawn.Row:
    trial = bench.clean_trial(base, settings)
    return _row(-1, None, base.name, trial, bench.newest)


def _row(number: int, draw: drawn.Draw | None, base: str, trial: Trial, run: str) -> drawn.Row:
    is_counted = draw is not None and draw.fault.truth == "counted"
    return drawn.Row(
        number=number,
        place="sound" if draw is None else draw.place,
        about="" if draw is None else draw.fault.about,
        base=base,
        clean=round(trial.clean, 3),
        faulty=round(trial.faulty, 3),
        counted=round(trial.counted, 3) if is_counted else None,
        causes=tuple((name, round(share, 4)) for name, share, _ in trial.causes),
        run=run,
        left=0.0 if draw is None else draw.left,
        others=round(trial.others, 3),
    )


def _keep(file: Path, row: drawn.Row) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(row)) + "\n")
    causes = ", ".join(f"{name} {share:.0%}" for name, share in row.causes[:3])
    right = "" if not row.is_heavy else "right" if row.is_right else "WRONG"
    right += "  disturbed" if row.is_disturbed else ""
    what = f"{row.number:4} {row.place:15} {row.about} ({row.base})" if row.place != "sound" else f"sound {row.base}"
    machine.say(f"{what:100} {row.clean:5.1f} / {row.faulty:5.1f} s  true {row.true:.0%}  told {causes}  {right}")


def document(trials: Trials, failed: dict[str, str]) -> dict[str, Any]:
    """Return the confusion matrix, and how near shares and savings come."""
    had = {name: of_fault for name, of_fault in trials.items() if of_fault}
    clean = {
        name: score.single(of_fault, ("nothing",), "wall") for name, of_fault in had.items() if name.startswith(CLEAN)
    }
    singles = {
        name: {"about": fault(name).about, "truth": fault(name).truth}
        | score.single(of_fault, fault(name).expected, fault(name).truth)
        for name, of_fault in had.items()
        if name in SINGLES
    }
    pairs = {
        name: score.pair(of_fault, [SINGLES[part].expected for part in fault(name).parts])
        for name, of_fault in had.items()
        if name in PAIRS
    }
    return {
        "summary": score.summary(singles, pairs) | {"clean_right": _clean_right(clean)},
        "clean": clean,
        "singles": singles,
        "pairs": pairs,
        "not_injected": NOT_INJECTED
        | {name: why for name in (*SINGLES, *PAIRS) if (why := missing(fault(name).around))},
        "failed": failed,
    }


def _clean_right(clean: dict[str, Any]) -> str:
    return f"{sum(row['right_first'] for row in clean.values())} of {sum(row['trials'] for row in clean.values())}"


def line(name: str, trial: Trial) -> str:
    """Format one trial in one line."""
    real = trial.counted / trial.faulty if name in SINGLES and fault(name).truth == "counted" else None
    real = 1 - trial.clean / trial.faulty if real is None else real
    causes = ", ".join(f"{name} {share:.0%}" for name, share, _ in trial.causes[:3])
    after = "" if trial.remedied is None else f" -> {trial.remedied:.1f} s ({trial.mended})"
    return f"{name:42} {trial.clean:5.1f} / {trial.faulty:5.1f} s{after}  truth {real:.0%}  told {causes}"


def table(document: dict[str, Any]) -> Iterator[str]:
    """Format the matrix as text."""
    yield f"{'fault':30} {'right':>6} {'first':26} {'share':>13} {'saves':>13}"
    for name, row in (document["clean"] | document["singles"]).items():
        share = f"{_percent(row['share_told'])} of {_percent(row['share_true'])}"
        saves = f"{_percent(row['saving_predicted'])} of {_percent(row['saving_measured'])}"
        right = f"{row['right_first']} / {row['trials']}"
        yield f"{name:30} {right:>6} {_counts(row['named_first']):26} {share:>13} {saves:>13}"
    yield f"{'pair':42} {'right':>6} {'first':26} second"
    for name, row in document["pairs"].items():
        right = f"{row['right_two']} / {row['trials']}"
        yield f"{name:42} {right:>6} {_counts(row['named_first']):26} {_counts(row['named_second'])}"
    yield from (f"{key}: {value}" for key, value in document["summary"].items())


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" if len(counts) > 1 else name for name, n in counts.items())


@contextmanager
def folder_at(place: Path | None) -> Iterator[Path]:
    """Make a folder that stays, or one that goes."""
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        yield place
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def end(number: int, frame: object) -> None:
    """End as on Ctrl-C, so that nothing is left behind."""
    raise KeyboardInterrupt


def preload() -> None:
    """Load what each run needs, once: they are forked from this process, and no run waits for the imports."""
    import torch._dynamo  # noqa: F401

    import steadytrain.cli.train
    import steadytrain.models.registry
    import steadytrain.reports
    import steadytrain.training.loop.attempt  # noqa: F401


def chosen(args: argparse.Namespace) -> list[str]:
    """Return the names to measure, in the order of the table."""
    names = [f"{CLEAN}{name}" for name in BASES] + [*SINGLES, *PAIRS]
    if args.quick:
        names = [f"{CLEAN}small", *QUICK]
    if args.only:
        names = [name for name in names if any(name == wanted or f"{CLEAN}{wanted}" == name for wanted in args.only)]
    if args.singles:
        names = [name for name in names if name not in PAIRS]
    return [name for name in names if name.startswith(CLEAN) or not missing(fault(name).around)]


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("STEADYTRAIN_TEST_DATA"))
    parser.add_argument("--drawn", type=int, metavar="N", help="make the first N draws instead of the listed faults")
    parser.add_argument("--advice", type=int, metavar="N", help="follow the advice of N drawn sound runs instead")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (1)")
    parser.add_argument("--minutes", type=float, help="begin no further draw after so long")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults, pairs, and bases as sound runs, by name")
    parser.add_argument("--singles", action="store_true", help="no pairs")
    parser.add_argument("--quick", action="store_true", help=f"one round of {', '.join(QUICK)}")
    parser.add_argument("--work", type=Path, help="keep the packed data here, for the next time")
    parser.add_argument("--out", type=Path, help="write what is known so far into this folder after each trial")
    parser.add_argument("--keep", action="store_true", help="leave the runs of the faults in --work")
    parser.add_argument(
        "--crowded", action="store_true", help="a rehearsal on a busy machine: noisy_neighbour is overlooked"
    )
    parser.add_argument(
        "--save", nargs="?", const="verdict", metavar="NAME", help="also write benchmarks/results/NAME.json (verdict)"
    )
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data, the folder that holds imagenet-sample-200.tar and cifar10-png.tar.zst")
    rounds = 1 if args.quick else args.rounds
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)  # also where a shell started it in the background
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    with folder_at(args.work) as work, tempfile.TemporaryDirectory(dir=work) as runs:
        files = data.make(Path(args.data), work)
        preload()
        bench = Bench(work if args.keep else Path(runs), files, keep=args.keep, crowded=args.crowded)
        if args.drawn is not None:
            outcome = {"crowded": args.crowded, **measure_drawn(bench, args)}
            machine.record(args.save or "verdict_drawn", outcome, save=args.save is not None)
            return
        if args.advice is not None:
            outcome = {"crowded": args.crowded, **measure_advice(bench, args)}
            outcome = json.loads(json.dumps(outcome).replace(f"{work}/", ""))  # where the files lay says nothing
            machine.record(args.save or "verdict_advice", outcome, save=args.save is not None)
            return
        trials, failed = measure(bench, chosen(args), rounds, args.out)
        result = document(trials, failed)
    machine.say("\n".join(table(result)))
    details = json.loads(json.dumps(bench.details).replace(f"{work}/", ""))  # where the files lay says nothing
    result = {"rounds": rounds, "crowded": args.crowded, **result, "details": details}
    machine.record(args.save or "verdict", result, save=args.save is not None)


if __name__ == "__main__":
    main()
