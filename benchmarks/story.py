"""The ImageNet story at small scale: a training that waits for its disk is found, fixed and priced, all by commands.

Photographs are trained on from a disk that gives too few bytes a second; ``steady diagnose`` says what limits the run,
``steady pack`` makes the images smaller, so that the same disk suffices, and ``steady cost`` prints what each run cost.
The commands run as a user types them; every figure is read from what they print.

The disk is throttled by a control group (version 1, ``blkio``), which needs root. Where that cannot be, or with
``--slow-reads``, each image comes after a wait instead, as from a network disk.

    python benchmarks/story.py --data FOLDER [--save]

``FOLDER`` holds ``clothing-10.tar``: 1,165 photographs of about 400 x 533 pixels.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from faults.around import missing
from faults.run import run as train

STALLED_SHARE = 0.57  # of the possible rate: 400 of 700 images/s, as in the article
COPIES = 6  # of each photograph, so that a pass takes longer than a start
SIDE, SIZE = 48, 32
INSTANCE = "p2.16xlarge"  # the article's machine
THREADS = 2
TRAIN = ["--model", "resnet20", "--size", str(SIZE), "--epochs", "2", "--batch-size", "64", "--holdout", "0"]
TRAIN += ["--threads", str(THREADS), "--device", "cpu", "--price", INSTANCE]


class Story:
    """Runs the commands in a folder, and keeps them.

    Args:
        folder: of the data and the runs.
        slow_reads: wait before each image instead of throttling the disk.
    """

    def __init__(self, folder: Path, *, slow_reads: bool) -> None:
        self.folder, self.slow_reads = folder, slow_reads
        self.commands: list[str] = []

    def steady(self, *words: str) -> str:
        """Run one command; return its output."""
        self._tell(words)
        argv = [*machine.STEADY, *words]
        return subprocess.run(argv, cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True).stdout

    def _tell(self, words: Sequence[str]) -> None:
        self.commands.append(shlex.join(["steady", *words]))
        machine.say("$", self.commands[-1])

    def train(self, data: str, run: str, *, bytes_per_second: float | None = None, rate: float = 0.0) -> dict[str, Any]:
        """Train on records of which the memory keeps nothing; return what the run's report, verdict and bill say.

        Args:
            data: the records.
            run: its folder.
            bytes_per_second: of the disk; None: as it is.
            rate: images a second that slow reads allow; 0: as they are.
        """
        file = str(self.folder / data)
        patches: dict[str, Any] = {"cold": file, "forgets": file}
        around: dict[str, Any] = {}
        if self.slow_reads and rate:
            patches["far_source"] = THREADS / rate
        elif bytes_per_second is not None:
            around["slow_storage"] = bytes_per_second
        self._tell(["train", data, "--run", run, *TRAIN])
        (self.folder / run).parent.mkdir(exist_ok=True)
        train(
            ["train", file, "--run", str(self.folder / run), *TRAIN], self.folder / run, patches=patches, around=around
        )
        report = json.loads(self.steady("report", run, "--json"))["runs"][0]
        verdict = json.loads(self.steady("diagnose", run, "--json"))
        bill = json.loads(self.steady("cost", run, "--instance", INSTANCE, "--json"))
        causes = [{key: cause[key] for key in ("name", "share", "sentence", "change")} for cause in verdict["causes"]]
        return {
            "images": report["num_train"],
            "images_per_second": report["images_per_second"],
            "wait_share": report["wait_share"],
            "seconds": report["seconds"],
            "causes": causes[:3],
            "usd": bill["so_far"],
            "usd_per_epoch": bill["shares"]["per_epoch"],
            "price": bill["price"],
        }


def unpack(archive: Path, folder: Path, copies: int) -> None:
    """Unpack the photographs, each so many times."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "all", filter="data")
    for path in sorted((folder / "all").glob("*/*/*.jpg")):
        place = folder / "photos" / path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        for copy in range(copies):  # in files of their own: the disk has to read each
            (place / f"{path.stem}-{copy}.jpg").write_bytes(path.read_bytes())


def main() -> None:
    """Run the commands of the story, and record what they print."""
    parser = machine.parser(__doc__, data="clothing-10.tar")
    parser.add_argument("--work", type=Path, help="folder of data and runs (default: a temporary one)")
    parser.add_argument("--copies", type=int, default=COPIES, help="of each photograph")
    parser.add_argument("--share", type=float, default=STALLED_SHARE, help="of the possible rate that the disk allows")
    parser.add_argument("--slow-reads", action="store_true", help="wait before each image; throttle no disk")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="story-") as name:
        slow_reads = arguments.slow_reads or bool(missing({"slow_storage": 0.0}))
        story = Story(Path(name), slow_reads=slow_reads)
        unpack(arguments.data / "clothing-10.tar", story.folder, arguments.copies)
        story.steady("pack", "photos", "originals", "--encoding", "pass")
        size = (story.folder / "originals.rec").stat().st_size
        possible = story.train("originals.rec", "runs/possible")
        rate = arguments.share * possible["images_per_second"]
        expected = rate * size / possible["images"]
        stalled = story.train("originals.rec", "runs/stalled", bytes_per_second=expected, rate=rate)
        story.steady("pack", "photos", "small", "--shorter-side", str(SIDE))
        fixed_size = (story.folder / "small.rec").stat().st_size
        # A disk that is slow by its bytes gives small files sooner; slow reads are left behind: a copy on a fast disk.
        fixed = story.train("small.rec", "runs/fixed", bytes_per_second=None if slow_reads else expected)
        document = {
            "throttled": "reads" if slow_reads else "disk",
            "allowed_share": arguments.share,
            "disk_bytes_per_second": None if slow_reads else round(expected),
            "bytes": {"originals": size, "small": fixed_size},
            "runs": {"possible": possible, "stalled": stalled, "fixed": fixed},
            "stalled_of_possible": stalled["images_per_second"] / possible["images_per_second"],
            "fixed_of_stalled": fixed["images_per_second"] / stalled["images_per_second"],
            "usd_per_epoch_saved": 1 - fixed["usd_per_epoch"] / stalled["usd_per_epoch"],
            "commands": story.commands,
        }
        machine.record("story", document, save=arguments.save)


if __name__ == "__main__":
    main()
