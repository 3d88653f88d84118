"""CPU time that ``steady --help`` and ``steady report --help`` take to answer, beside Python and torch alone.

And until something was trained: a run of four updates, with its checkpoint, log and exported weights, beside the
shortest PyTorch program that makes as many.

User and system seconds of the whole process and its children, as the kernel counts them: other work on the machine
hardly shows. The commands take turns; the median of all turns counts.

usage: python benchmarks/startup.py [--rounds 9] [--save]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import machine
from train_step import write_records

FOUR_UPDATES = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(torch.rand(64, 784)), torch.arange(64) % 10).backward()
    optimizer.step()
"""
COMMAND = str(Path(sys.executable).parent / "steady")
BAR_SECONDS = 0.4
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "python -c 'import steadytrain'": [sys.executable, "-c", "import steadytrain"],
    "steady --help": [COMMAND, "--help"],
    "steady report --help": [COMMAND, "report", "--help"],
    "steady train --help": [COMMAND, "train", "--help"],
}


def main() -> int:
    """Measure, record, and return 1 where the bar is missed."""
    parser = machine.parser(__doc__, rounds=9)
    args = parser.parse_args()
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        records = write_records(Path(folder) / "data", 28, 1, 320)
        for turn in range(args.rounds + 1):
            run = [COMMAND, "train", str(records), "--run", f"{folder}/run{turn}", "--model", "mlp", "--device", "cpu"]
            trained = {
                "python: four updates": [sys.executable, "-c", FOUR_UPDATES],
                "steady train: four updates": [*run, "--batch-size", "64", "--set", "budget.steps=4"],
            }
            for name, command in (COMMANDS | trained).items():
                before = machine.cpu_seconds()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                if turn:  # the first turn compiles and fills the page cache
                    taken.setdefault(name, []).append(machine.cpu_seconds() - before)
    figures = {name: {"cpu_seconds": round(median(all_), 3), "rounds": len(all_)} for name, all_ in taken.items()}
    met = figures["steady --help"]["cpu_seconds"] < BAR_SECONDS
    machine.record("startup", {"commands": figures, "bar_seconds": BAR_SECONDS, "met": met}, save=args.save)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
