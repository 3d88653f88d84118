"""A training of a few seconds that any launcher can start, and what must be true of its run.

120 images of CIFAR-10 in a ``.rec`` that MXNet wrote, in batches of 24: 5 updates an epoch.
"""

from __future__ import annotations

import io
import shlex
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from safetensors.numpy import load_file
from tests.cluster.machines import SCRIPTS, torchrun

from steadytrain import events
from steadytrain.data.recordio.reader import Records
from steadytrain.run import Run

PROJECT = SCRIPTS.parents[1]
BATCH_SIZE = 24
EPOCHS = 4
SETTINGS = {
    "data.holdout": "0",
    "data.augment": "none",
    "data.flip": "false",
    "data.crop": "1",
    "data.mean": "[0,0,0]",
    "data.std": "[1,1,1]",
    "every.save_steps": "2",
    "every.log_steps": "1",
    "parallel.compute_threads": "1",
    "parallel.threads": "1",
}


@dataclass(frozen=True)
class Training:
    """One ``steady train``: its data, its run folder, and where its network writes what it saw."""

    data: Path
    run: Path
    seen: Path

    def command(self, *more: str) -> list[str]:
        """The words that start it, the same for every launcher."""
        words = [
            sys.executable,
            "-m",
            "steadytrain",
            "train",
            str(self.data),
            "--run",
            str(self.run),
            "--device",
            "cpu",
        ]
        words += ["--model", "witness:net", "--batch-size", str(BATCH_SIZE), "--epochs", str(EPOCHS), "--lr", "0.05"]
        settings = {**SETTINGS, "model.options.folder": str(self.seen)}
        return [*words, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")), *more]

    def torchrun(self, *options: str) -> list[str]:
        """The words for torch's agent to start it."""
        # Without the two dashes it takes --run for the beginning of its own --run-path.
        return torchrun(*options, f"--log-dir={self.run.parent}", "-m", "--", *self.command()[2:])

    def shell(self, words: Sequence[str] = (), **variables: str) -> str:
        """The same, or other words, as a line for a shell on any host."""
        texts = [f"{name}={value}" for name, value in {**self.variables, **variables}.items()]
        return shlex.join(["exec", "env", *texts, *(words or self.command())])

    @property
    def variables(self) -> dict[str, str]:
        """What its processes need in their environment, on any host."""
        return {"PYTHONPATH": f"{SCRIPTS}:{PROJECT / 'src'}", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def weights(self) -> bytes:
        """Of the finished run, without the header, which names where the witness wrote."""
        content = (self.run / "model.safetensors").read_bytes()
        return content[8 + int.from_bytes(content[:8], "little") :]

    def parameters(self) -> dict[str, bytes]:
        """Of the finished run: all that was learned, and not the running statistics of the batch norms."""
        file = load_file(self.run / "model.safetensors")
        return {name: file[name].tobytes() for name in file if "running" not in name and "batches" not in name}

    def started(self) -> list[events.Started]:
        """The first event of each attempt that came so far."""
        return [e for e in Run.open(self.run).events() if isinstance(e, events.Started)]

    def step(self) -> int:
        """The newest step; 0 before the first."""
        if not (self.run / "events.jsonl").exists():
            return 0
        return max((e.step for e in Run.open(self.run).events() if isinstance(e, events.Step)), default=0)

    def ended(self) -> list[str]:
        """How each attempt ended that could say so; none before the first has written its recipe."""
        if not (self.run / "recipe.json").exists():
            return []
        return [e.status for e in Run.open(self.run).events() if isinstance(e, events.Ended)]

    def pace(self, seconds: float) -> None:
        """Make every micro-batch from now on last so many seconds longer."""
        (self.seen / "pace.part").write_text(str(seconds), encoding="ascii")
        (self.seen / "pace.part").replace(self.seen / "pace")

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        """Until it has come so far; fails where it does not."""
        wait_until(lambda: self.step() >= step, f"step {step} of {self.run}", seconds)

    def seen_by(self, rank: int) -> list[list[str]]:
        """Micro-batches that a rank's network saw, over all of its processes."""
        files = sorted(self.seen.glob(f"seen-{rank}-*"), key=lambda path: path.name.rpartition("-")[2])
        return [line.split() for path in files for line in path.read_text(encoding="ascii").splitlines()]

    def images(self) -> set[str]:
        """The checksum of every image of the data."""
        with Records.open(self.data) as records:
            pictures = (Image.open(io.BytesIO(records.image(number))).convert("RGB") for number in range(len(records)))
            return {f"{zlib.crc32(picture.tobytes()):08x}" for picture in pictures}

    def require_each_once(self, ranks: int) -> None:
        """Each epoch of a run that was never interrupted showed every image to exactly one rank."""
        images = self.images()  # a run also measures passes of images that it made up
        shares = [
            [image for batch in self.seen_by(rank) for image in batch if image in images] for rank in range(ranks)
        ]
        num_own = len(images) // ranks
        assert [len(share) for share in shares] == [num_own * EPOCHS] * ranks
        for epoch in range(EPOCHS):
            shown = [image for share in shares for image in share[epoch * num_own : (epoch + 1) * num_own]]
            assert len(shown) == len(images)
            assert set(shown) == images


def wait_until(true: Callable[[], bool], what: str, seconds: float = 120) -> None:
    """Look again and again; fails, naming ``what``, where it does not become so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def prepare(data_folder: Path, folder: Path, name: str) -> Training:
    """One that has not begun, of the same data as all others, with everything of it in ``folder``."""
    for suffix in (".rec", ".idx"):
        shutil.copy(data_folder / "mxnet-rec" / "im2rec" / f"cifar120{suffix}", folder)
    seen = folder / f"{name}-seen"
    seen.mkdir()
    return Training(folder / "cifar120.rec", folder / name, seen)
