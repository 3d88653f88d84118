"""Record the example outputs of the pages again, and say which are old.

A block of output stands behind its command, as it is typed in a folder of data::

    <!-- output of: steady check clothes/ -->
    ```text
    fine: clothes ...
    ```

``record.py`` runs the commands of each page in order, in one folder for all pages, and puts what they print into the
blocks; a pipe may shorten it (``| head -5``). ``recorded.json`` beside this script says of each block when, by which
version and on what machine it was recorded, and how busy that was. Without a network, ``--finetune "--weights FILE"``
adds words to every ``steady finetune``, which the pages do not show.

usage: python docs/record.py --data clothes=PATH [PAGE ...] [--work FOLDER]
       python docs/record.py --check      what is old: the version, the command or the text has changed since
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from steadytrain import __version__
from steadytrain.machine import facts

DOCS = Path(__file__).parent
RECORDS = DOCS / "recorded.json"
PAGES = (
    "start/first-model.md",
    "start/report.md",
    "start/stop-and-resume.md",
    "guides/few-photographs.md",
    "guides/slow-training.md",
    "index.md",
    "../README.md",
)
"""In the order in which their commands are run: later pages use the runs of those before."""
BLOCK = re.compile(r"^<!-- output of: (.+?) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BUSY = 0.25
"""The share of the processors, taken by others just before a command, from which a machine is not called quiet."""
WIDTH = 100
PACE = re.compile(r"images/s|images_per_second|seconds=|\b\d+(\.\d+)? (s|ms|min)\b")
"""What another machine, or a busy one, would have said otherwise."""


@dataclass(frozen=True)
class Block:
    """A block of output on a page, by its command."""

    page: str
    command: str
    text: str

    @property
    def key(self) -> str:
        """What names the block in the records."""
        return f"{self.page}: {self.command}"

    @property
    def digest(self) -> str:
        """A digest of the text, by which a change by hand is seen."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


def blocks() -> Iterator[Block]:
    """Yield the blocks of all pages, in the order of their commands."""
    for page in PAGES:
        for match in BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
            yield Block(page, match[1], match[2])


def old_blocks() -> list[str]:
    """Name the blocks that are old, each with the reason."""
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}
    found, rows = list(blocks()), []
    for block in found:
        record = records.get(block.key)
        if record is None:
            rows.append(f"{block.key}: the command is new")
        elif record["digest"] != block.digest:
            rows.append(f"{block.key}: the text was changed by hand")
        elif record["version"] != __version__:
            rows.append(f"{block.key}: recorded by {record['version']}, this is {__version__}")
        elif record["busy"] > BUSY and PACE.search(block.text):
            rows.append(f"{block.key}: recorded beside other programs ({record['busy']:.0%} of the processors)")
    return rows + [f"{key}: no such block any more" for key in records.keys() - {block.key for block in found}]


def run(command: str, folder: Path, finetune: str) -> str:
    """Run a line of shell where the data are; return what it prints. Raises RuntimeError where it fails."""
    steady = f'steady() {{ if [ "$1" = finetune ]; then "{sys.executable}" -m steadytrain "$@" {finetune};'
    steady += f' else "{sys.executable}" -m steadytrain "$@"; fi; }}\n'
    environment = os.environ | {"COLUMNS": str(WIDTH), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        ["bash", "-c", steady + command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join([*lines, ""]).lstrip("\n")


def record(pages: list[str], folder: Path, finetune: str) -> None:
    """Run the commands of these pages, and write their output into the pages and the records."""
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}
    for block in blocks():
        if pages and block.page not in pages:
            continue
        busy = round(psutil.cpu_percent(interval=2) / 100, 2)
        text = run(block.command, folder, finetune)
        page = DOCS / block.page
        page.write_text(
            BLOCK.sub(
                lambda match, command=block.command, text=text: (
                    f"<!-- output of: {command} -->\n```text\n{text}```" if match[1] == command else match[0]
                ),
                page.read_text(encoding="utf-8"),
            ),
            encoding="utf-8",
        )
        records[block.key] = {
            "date": datetime.now(UTC).date().isoformat(),
            "version": __version__,
            "machine": f"{facts.cpu_model()}, {platform.system()}",
            "cores": len(os.sched_getaffinity(0)),
            "busy": busy,
            "digest": Block(block.page, block.command, text).digest,
        }
        known = {block.key for block in blocks()}
        rows = {key: row for key, row in sorted(records.items()) if key in known}
        RECORDS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")  # now: a later command may fail
        print(f"recorded {block.key} ({busy:.0%} of the processors busy before)", flush=True)


def main() -> int:
    """Read the command line; the exit code is 1 where --check finds something old."""
    parser = argparse.ArgumentParser(description="Record the example outputs of the pages again, or say which are old.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as start/first-model.md; default: all")
    parser.add_argument("--check", action="store_true", help="say which are old; record nothing")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PATH", help="data that the pages name")
    parser.add_argument("--work", type=Path, help="folder that holds the runs, kept; default: a new one")
    parser.add_argument("--finetune", default="", help="words that are added to steady finetune")
    asked = parser.parse_args()
    if asked.check:
        print("\n".join(old_blocks()) or "every block is of this version, by its command, on a quiet machine")
        return 1 if old_blocks() else 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.work or Path(temporary)
        for name, _, path in (text.partition("=") for text in asked.data):
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(path).resolve())
        record(asked.pages, folder, asked.finetune)
    return 0


if __name__ == "__main__":
    sys.exit(main())
