"""Batches of decoded images for the bare training scripts, as many a PyTorch or MXNet user writes them.

Python 3.8 or later and NumPy. All images lie in memory; a batch is one gather from them.
"""

import json
import math
import sys

import numpy as np

MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
STD = np.array([0.2470, 0.2435, 0.2616], np.float32)
PAD = 4
BLOCKS = [(16, 16)] * 3 + [(16, 32)] + [(32, 32)] * 2 + [(32, 64)] + [(64, 64)] * 2
"""Filters before and in each block of ResNet-20."""


class Stream:
    """Training images in an endless order: each epoch a new permutation of them all, cut into full batches.

    Args:
        job: ``images`` names two files, ``IMAGES-train.npy`` uint8 [N, H, W, 3] and ``IMAGES-train-labels.npy``.
        rank, size: of each batch it gives the share of this rank.
    """

    def __init__(self, job, rank, size):
        images = np.load(job["images"] + "-train.npy")
        self.labels = np.load(job["images"] + "-train-labels.npy").astype(np.int64)
        self.side = images.shape[1]
        self.padded = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
        self.batch, self.own = job["batch"], slice(rank * job["batch"] // size, (rank + 1) * job["batch"] // size)
        self.drawn = np.random.default_rng(job["seed"])  # alike on all ranks
        self.order = np.empty(0, np.int64)

    def next(self):
        """Return images uint8 [B, H, W, 3], cropped from a padded one and perhaps mirrored, and labels int64 [B]."""
        while len(self.order) < self.batch:
            self.order = np.concatenate([self.order, self.drawn.permutation(len(self.labels))])
        ids, self.order = self.order[: self.batch], self.order[self.batch :]
        corners = self.drawn.integers(0, 2 * PAD + 1, (self.batch, 2))[self.own]
        mirrored = self.drawn.integers(0, 2, self.batch)[self.own] == 1
        ids, span = ids[self.own], np.arange(self.side)
        rows = corners[:, :1] + span
        columns = corners[:, 1:] + np.where(mirrored[:, None], span[::-1], span)
        return self.padded[ids[:, None, None], rows[:, :, None], columns[:, None, :]], self.labels[ids]


def held_out(job):
    """Return the images and labels to evaluate on."""
    return np.load(job["images"] + "-val.npy"), np.load(job["images"] + "-val-labels.npy").astype(np.int64)


def rate(job, step):
    """Return the learning rate of an update, from 0 on: half a cosine."""
    return job["lr"] * (1 + math.cos(math.pi * step / job["steps"])) / 2


def job():
    """Read the job: the JSON on the command line."""
    return json.loads(sys.argv[1])
