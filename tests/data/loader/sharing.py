"""One process of a launch that shares images. It is apart from its test because it needs neither torch nor pytest."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.recordio.reader import Records

CUT = Crop(kind="pad-crop", size=32, pad=4, flip=True)


def main(data: str, place: Any, batches: str, waits: str) -> None:
    """One process of a launch: leaves what it had beside the data; waits to be ended where it is told to."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (
        Records.open(data) as records,
        ImageLoader(
            records, CUT, batch_size=40, seed=3, stop=40 * world * int(batches), shard=(rank, world), place=place
        ) as feed,
    ):
        stream = iter(feed)
        taken = [next(stream)]
        if waits == str(rank):
            print("waiting", flush=True)
            time.sleep(100)
        taken += stream
        np.save(f"{data}.{rank}.npy", np.concatenate([batch.images for batch in taken]))
        ids = np.concatenate([batch.ids for batch in taken]).tolist()
        Path(f"{data}.{rank}.json").write_text(json.dumps({"ids": ids, **vars(feed.stats())}))
        print("done", flush=True)
        sys.stdin.readline()  # all have come so far
        print(_pss(), flush=True)
        sys.stdin.read()


def _pss() -> int:
    """Bytes of common memory that this process maps, each page divided by those who do."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    matches = [
        re.search(r"^Pss: +(\d+) kB", line, re.MULTILINE) for line in maps if os.environ["STEADYTRAIN_SHM"] in line
    ]
    return 1024 * sum(int(match[1]) for match in matches if match)
