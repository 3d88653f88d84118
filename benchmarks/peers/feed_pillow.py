"""Pillow and threads, as one would write it by hand, as a contender; see ``feed_turns``."""

import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
from feed_crops import centre, random_box, shorter_side
from feed_turns import serve
from PIL import Image, ImageOps


def batches(job):
    work = partial(batch, job=job)
    orders = in_batches(samples(job["files"]), job)
    if job["setting"]["threads"] == 0:
        yield from map(work, orders)
    with ThreadPoolExecutor(job["setting"]["threads"]) as pool:
        ahead = deque(pool.submit(work, next(orders)) for _ in range(job["ahead"]))
        while True:
            yield ahead.popleft().result()
            ahead.append(pool.submit(work, next(orders)))


def samples(folder):
    """Return (path, label) of every file, class by class."""
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    return [(str(path), label) for label, home in enumerate(classes) for path in sorted(home.iterdir())]


def in_batches(samples, job):
    """Yield lists of samples without end, each epoch in another order when training."""
    endless = forever(samples) if job["train"] else cycle(samples)
    while True:
        yield [next(endless) for _ in range(job["batch_size"])]


def forever(samples):
    while True:
        yield from random.sample(samples, len(samples))


def batch(some, job):
    cut = {"crop": crop, "pad": pad}[job["kind"]] if job["train"] else evaluated
    images = np.empty((len(some), job["size"], job["size"], 3), dtype=np.uint8)
    for row, (path, _) in enumerate(some):
        images[row] = cut(Image.open(path).convert("RGB"), job)
    return images, np.array([label for _, label in some])


def evaluated(image, job):
    """Return the evaluation by Pillow that every contender's is compared with."""
    resized = image.resize(shorter_side(*image.size, job["resize"]), Image.Resampling.BILINEAR)
    left, top = centre(*resized.size, job["size"])
    return resized.crop((left, top, left + job["size"], top + job["size"]))


def crop(image, job):
    box = random_box(*image.size)
    return flip(image.resize((job["size"], job["size"]), Image.Resampling.BILINEAR, box=box))


def pad(image, job):
    left, top = random.randint(0, 2 * job["pad"]), random.randint(0, 2 * job["pad"])
    return flip(ImageOps.expand(image, job["pad"]).crop((left, top, left + job["size"], top + job["size"])))


def flip(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


if __name__ == "__main__":
    serve(batches)
