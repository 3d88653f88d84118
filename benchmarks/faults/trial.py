"""One fault of one round: a sound run, the faulty one, its verdict, and the run after the verdict's advice."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import machine
from faults import data, sound
from faults.advice import PACKS, settings_of
from faults.catalogue import BASES
from faults.fault import Base, Fault
from faults.run import Done, command, run
from faults.score import Trial
from faults.sound import Advised
from steadytrain.monitor.rules import Cause
from steadytrain.monitor.rules.diagnose import Diagnosis, diagnose
from steadytrain.run import Run

FRESH_SECONDS = 30.0
"""A sound run is compared with faulty ones that begin so soon after it: machines change while one looks."""

NEIGHBOUR = "noisy_neighbour"
_OF_FILES = ("cold", "cold_start", "forgets")


@dataclass
class Bench:
    """The folder of the runs, and the last sound runs.

    Args:
        folder: for runs; each is removed when it has been read.
        files: names of data -> record files.
        keep: leave the runs' folders.
        crowded: other work is going on: that it is named is right, and no answer to what was injected.
    """

    folder: Path
    files: dict[str, Path]
    keep: bool = False
    crowded: bool = False
    details: list[dict[str, Any]] = field(default_factory=list)
    _sound: dict[Any, tuple[float, float]] = field(default_factory=dict)
    _advised: dict[str, tuple[dict[str, Any] | None, str]] = field(default_factory=dict)
    _number: int = 0

    @property
    def newest(self) -> str:
        """The folder of the newest run."""
        return f"run-{self._number}"

    def trial(self, fault: Fault, *, mend: bool, base: Base | None = None) -> Trial:
        """Make all runs of one fault in one round; ``base``: another one than the listed of that name."""
        base = base or BASES[fault.base]
        clean = self.sound(base, fault.clean)
        done, verdict = self._judged(base, fault.name, fault.settings, fault.patches, fault.around)
        remedied, mended = self._mended(base, fault, verdict, clean) if mend else (None, "")
        causes = _told(verdict)
        self.details[-1] |= {"clean_seconds": clean, "remedied_seconds": remedied, "mended": mended}
        return Trial(
            clean=clean,
            faulty=done.wall_seconds,
            remedied=remedied,
            counted=done.counted_seconds,
            causes=causes,
            mended=mended,
            others=done.others,
        )

    def advised(self, base: Base) -> list[Advised]:
        """Judge a run that nothing is wrong with, and follow each cause that names a change by a flag."""
        _, verdict = self._judged(base, base.name, {}, {}, {})
        rate = verdict.ledger.steady_images_per_second
        batch = int(base.settings["batch_size"])
        base = replace(base, images=max(base.images, round(sound.SECONDS * rate / batch) * batch))
        _, verdict = self._judged(base, base.name, {}, {}, {})
        rows = []
        for cause in verdict.causes:
            after = settings_of(cause.change)
            if cause.change.startswith("leave torch.set_num_threads"):
                after = {"model.options.threads": 2}
            if after is None or cause.saves <= 0:
                continue
            if (flags := after.pop(PACKS, None)) is not None:
                after["data"] = data.packed_again(self._file(base.data), flags)
            seconds = [
                [self._run(base, settings, {}, {})[0].wall_seconds for settings in ({}, after)]
                for _ in range(sound.ROUNDS)
            ]
            before, mended = (min(times) for times in zip(*seconds, strict=True))
            actual = 1 - mended / before
            rows.append(sound.Advised(base.name, cause.name, cause.change, cause.saves, actual, (before, mended)))
            machine.say(next(iter(sound.lines(rows[-1:]))))
        if not rows:
            machine.say(f"{base.name:70} {verdict.causes[0].name}: no change by a flag")
        return rows

    def clean_trial(self, base: Base, settings: Mapping[str, Any] | None = None) -> Trial:
        """Make a sound run and judge it; faults that begin a moment later are compared with it."""
        settings = settings or {}
        done, verdict = self._judged(base, f"clean {base.name}", settings, {}, {})
        wall = done.wall_seconds
        self._sound[base.name, tuple(settings.items())] = (time.monotonic(), wall)
        told = _told(verdict)
        return Trial(clean=wall, faulty=wall, remedied=None, counted=0.0, causes=told, others=done.others)

    def is_fresh(self, base: Base, settings: Mapping[str, Any]) -> bool:
        """Return whether a sound run was made a moment ago."""
        return time.monotonic() - self._sound.get((base.name, tuple(settings.items())), (-1e9, 0.0))[0] < FRESH_SECONDS

    def sound(self, base: Base, settings: Mapping[str, Any]) -> float:
        """Return wall seconds of a sound run, made now or a moment ago."""
        key = base.name, tuple(settings.items())
        if not self.is_fresh(base, settings):
            self._sound[key] = (time.monotonic(), self._run(base, settings, {}, {})[0].wall_seconds)
        return self._sound[key][1]

    def _mended(self, base: Base, fault: Fault, verdict: Diagnosis, clean: float) -> tuple[float, str]:
        """Return wall seconds with the advice applied; where that cannot be, of the sound run.

        The advice of the first round counts in the others as well: all of them measure one change.
        """
        causes = {cause.name: cause for cause in reversed(verdict.causes)}
        cause = next((causes[name] for name in fault.expected if name in causes), verdict.causes[0])
        if fault.name not in self._advised:
            self._advised[fault.name] = settings_of(cause.change), cause.change
        settings, change = self._advised[fault.name]
        if settings is None:
            return clean, "removed"
        after = {**fault.settings, **settings}
        if (flags := after.pop(PACKS, None)) is not None:
            after["data"] = data.packed_again(self._file(after.get("data", base.data)), flags)
        self.details[-1]["applied"] = change
        return self._run(base, after, fault.patches, fault.around)[0].wall_seconds, "advice"

    def _judged(
        self,
        base: Base,
        name: str,
        settings: Mapping[str, Any],
        patches: Mapping[str, Any],
        around: Mapping[str, Any],
    ) -> tuple[Done, Diagnosis]:
        done, folder = self._run(base, settings, patches, around, keep=True)
        verdict = diagnose(Run.open(folder))
        if self.crowded and not {"hogs", "neighbours"} & around.keys():
            causes = tuple(cause for cause in verdict.causes if cause.name != NEIGHBOUR)
            sound = Cause(name="nothing", share=0.0, sentence="")
            if all(cause.is_usual for cause in causes):
                causes = (sound, *causes)
            verdict = replace(verdict, causes=causes)
        ledger = verdict.ledger
        self.details.append(
            {
                "fault": name,
                "wall_seconds": done.wall_seconds,
                "counted_seconds": done.counted_seconds,
                "others": round(done.others, 3),
                "ledger_wall_seconds": ledger.wall_seconds,
                "ledger": {bucket: round(seconds, 3) for bucket, seconds in ledger.seconds.items() if seconds},
                "causes": [
                    {"name": c.name, "share": c.share, "saves": c.saves, "change": c.change, "sentence": c.sentence}
                    | {"evidence": list(c.evidence)}
                    for c in verdict.causes
                ],
            }
        )
        if not self.keep:
            self._remove(folder)
        return done, verdict

    def _run(
        self,
        base: Base,
        settings: Mapping[str, Any],
        patches: Mapping[str, Any],
        around: Mapping[str, Any],
        *,
        keep: bool = False,
    ) -> tuple[Done, Path]:
        """Run the base with these settings, for equally many images."""
        self._number += 1
        folder = self.folder / f"run-{self._number}"
        self._remove(folder)
        document = {"data": base.data, "val": base.val, "model": base.model, **base.settings, **settings}
        document["budget.steps"] = max(1, round(base.images / document["batch_size"]))
        train, val, model = (document.pop(key) for key in ("data", "val", "model"))
        if val is not None:
            document["data.val"] = str(self._file(val))
        patches = {name: str(self._file(value)) if name in _OF_FILES else value for name, value in patches.items()}
        done = run(
            command(folder, self._file(train), model, document),
            folder,
            patches=patches,
            around=around,
            ranks=base.ranks,
        )
        if not keep:
            self._remove(folder)
        return done, folder

    def _file(self, name: str | Path) -> Path:
        return name if isinstance(name, Path) else self.files[name]

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for beside in folder.parent.glob(f"{folder.name}.*"):
            beside.unlink()


def _told(verdict: Diagnosis) -> tuple[tuple[str, float, float], ...]:
    return tuple((cause.name, cause.share, cause.saves) for cause in verdict.causes)
