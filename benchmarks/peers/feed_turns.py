"""The side of a contender: it makes batches when it is told to. Python 3.8 or later, and nothing but its library.

A contender is a process, ``python feed_NAME.py JOB``, where JOB is JSON (its keys are in ``feed_works.job``). It opens
its loader, takes one batch, and then answers one JSON line for each line on its standard input:

- ``turn SECONDS``: drop the batches that lie ready, then take batches for so long;
- ``take IMAGES``: take batches until there are so many images;
- ``look PATH``: one image of each class, in the order of the classes, into an ``.npy`` file, uint8[n, H, W, 3].

Between two lines it only fills its queues. Its standard output belongs to the protocol: what a library prints goes to
standard error.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

TICKS = os.sysconf("SC_CLK_TCK")


def serve(open_batches):
    """Answer until standard input ends.

    Args:
        open_batches: job -> endless iterator of (images, labels), arrays of a batch in either layout.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    began = time.perf_counter()
    batches = iter(open_batches(job))
    images, _ = next(batches)
    seconds = time.perf_counter() - began
    images = array(images)
    values = {"first_batch_seconds": seconds, "shape": list(images.shape), "dtype": images.dtype.name}
    print(json.dumps(values), file=answers)
    for line in sys.stdin:
        verb, value = line.split()
        print(json.dumps(VERBS[verb](batches, value, job)), file=answers)
    os._exit(0)  # who waits for its workers would wait for batches that nobody takes


def turn(batches, seconds, job):
    """Return images, and seconds of wall clock and processors, of a while at the steady state."""
    for _ in range(2 * job["ahead"]):
        next(batches)
    return _measured(batches, float(seconds), 0)


def take(batches, num_images, job):
    """Return images, and seconds of wall clock and processors, for a number of images."""
    return _measured(batches, 0.0, int(num_images))


def look(batches, path, job):
    """Save the first image of each class, once each of them has come."""
    values = {}
    while len(values) < job["classes"]:
        images, labels = next(batches)
        images = array(images)
        for row, label in enumerate(array(labels).reshape(-1).astype(int).tolist()):
            if label not in values:
                values[label] = np.array(images[row] if images.shape[-1] == 3 else images[row].transpose(1, 2, 0))
    np.save(path, np.stack([values[label] for label in sorted(values)]))
    return {"images": len(values)}


def array(batch):
    """Convert a batch, or its labels, to numpy's array."""
    return batch.asnumpy() if hasattr(batch, "asnumpy") else np.asarray(batch)


def _measured(batches, least_seconds, least_images):
    images, cpu, began, passed = 0, cpu_seconds(), time.perf_counter(), 0.0
    while passed < least_seconds or images < least_images:
        images += len(next(batches)[1])
        passed = time.perf_counter() - began
    return {"images": images, "seconds": passed, "cpu_seconds": cpu_seconds() - cpu}


def cpu_seconds():
    """Return user and system time of this process and all it started."""
    cpu_began = time.process_time()  # finer than the ticks that the kernel tells of others
    return cpu_began + sum(_ticks(pid) for pid in descendants(os.getpid())) / TICKS


def descendants(root):
    """Return the living children of a process, and theirs."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(folder.name)
        if fields:
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    family, front = [], [root]
    while front:
        front = [child for parent in front for child in parents.get(parent, [])]
        family += front
    return family


def _ticks(pid):
    return sum(int(ticks) for ticks in _stat(pid)[11:15])


def _stat(pid):
    """Read the fields of /proc/PID/stat after the name; none where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


VERBS = {"turn": turn, "take": take, "look": look}
