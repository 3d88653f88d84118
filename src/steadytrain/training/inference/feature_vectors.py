"""Features of images, as they enter a network's classifier: for search, clustering, or a model of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from steadytrain.errors import DataError
from steadytrain.run import Run
from steadytrain.training.data import load
from steadytrain.training.inference.classifier import classifier_of, features_and_logits
from steadytrain.training.inference.inference import Files, Images, open_feed
from steadytrain.training.inference.trained import Trained, restore
from steadytrain.training.memory import PassLimit


def features(
    place: str | Path | Run | Trained,
    images: Images | Sequence[Images] | Files,
    *,
    batch_size: int | None = None,
    threads: int | None = None,
) -> NDArray[np.float32]:
    """Compute the features of images: what the classifier, the network's last layer, is given.

    Images are prepared as for :func:`predict`, and the network is in evaluation mode.

    Args:
        place: a run, weights or a model's name, as for :func:`restore`, or what it returned.
        images: one or several, as for :func:`predict`.
        batch_size: images at a time; None: up to 64, on a CPU fewer of large images.
        threads: that load images; None chooses.

    Returns:
        float32 [N, D], a row for each image in its order.

    Raises:
        DataError: an image cannot be read; the message names it.
        ModelError: the network does not end in one linear layer.

    >>> import tempfile, timm
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> Image.new("RGB", (64, 64)).save(folder / "1.png")
    >>> torch.save(timm.create_model("test_resnet").state_dict(), folder / "stock.pth")
    >>> features(restore(folder / "stock.pth", model="timm/test_resnet"), folder / "1.png").shape
    (1, 96)
    """
    trained = place if isinstance(place, Trained) else restore(place)
    limit = PassLimit("evaluation", on_halved=lambda halved: None)
    rows: list[torch.Tensor] = []
    with ExitStack() as stack:
        source = images if isinstance(images, Files) else stack.enter_context(Files(images))
        if not len(source):
            return np.zeros((0, 0), np.float32)
        bad: dict[int, str] = {}
        head: nn.Module | None = None
        feed = stack.enter_context(open_feed(trained, source, batch_size, threads, bad.__setitem__))
        with torch.no_grad():
            for batch in load(feed, trained.policy.device):
                if bad:
                    number, reason = min(bad.items())
                    raise DataError(f"{source.path(number)}: {reason}: leave it out")
                head = head or classifier_of(trained)
                rows.append(features_and_logits(head, trained, batch.images, limit)[0].cpu())
    return torch.cat(rows).numpy()
