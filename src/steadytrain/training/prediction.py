"""Classes for single image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from steadytrain.data.packing.pixels import BadImageError
from steadytrain.errors import DataError, SteadyError
from steadytrain.training.inference import Trained
from steadytrain.training.transfer import load


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one file, best first, with their probabilities; or why there are none."""

    path: Path
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


class Files:
    """Image files as a source for the feed: record i is the i-th file, every label 0."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.labels: NDArray[np.int64] = np.zeros(len(paths), np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, i: int) -> bytes:
        """The bytes of file ``i``. Raises DataError."""
        try:
            return self.paths[i].read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {self.paths[i]}: {error.strerror}") from error


def predict(trained: Trained, paths: Sequence[Path], *, top: int = 5) -> Iterator[Prediction]:
    """The ``top`` classes of each file, in order; a file that cannot be read says so and the next one follows."""
    for path in paths:
        try:
            yield _predict_one(trained, path, min(top, len(trained.classes)))
        except SteadyError as error:
            why = error.__cause__ if isinstance(error.__cause__, BadImageError) else error
            yield Prediction(path, error=str(why))


def _predict_one(trained: Trained, path: Path, top: int) -> Prediction:
    with trained.feed(Files([path]), batch_size=1, threads=1) as feed, torch.no_grad():
        (batch,) = load(feed, trained.policy.device)
        with trained.policy.autocast():
            images = trained.policy.images(batch.images, trained.input.mean, trained.input.std)
            logits = trained.module(images).float()
    likely = logits.softmax(1).topk(top)
    names = tuple(trained.classes[k] for k in likely.indices[0].tolist())
    return Prediction(path, names, tuple(likely.values[0].tolist()))
