"""A small network that writes down which images it was trained on: what ranks really saw, told by none of our code.

A model's factory, as a user's own: ``--model witness:net --set model.options.folder=FOLDER``. The images must reach it
as they are stored (no augmentation, ``data.mean`` of zeros and ``data.std`` of ones).
"""

from __future__ import annotations

import os
import platform
import time
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from steadytrain.distributed.world import world_from_environment


class Witness(nn.Module):
    """Two convolutions with batch norms.

    Every rank's process writes a file ``seen-RANK-...`` in ``folder``, a line for each micro-batch: the checksum of
    each image. A file ``pace`` there holds the seconds that each micro-batch is to last longer.
    """

    def __init__(self, num_classes: int, channels: int, folder: str) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, num_classes)
        self._folder = Path(folder)
        process = f"{world_from_environment(os.environ).rank}-{platform.node()}-{os.getpid()}-{time.time_ns()}"
        self._file = self._folder / f"seen-{process}"
        self._itself = id(self)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        # not where shapes are tried, not in evaluation, and not in the copies that passes are measured on
        if self.training and torch.is_grad_enabled() and self._itself == id(self):
            self._write_down(images_BCHW)
        out: Tensor = self.head(self.body(images_BCHW))
        return out

    def _write_down(self, images_BCHW: Tensor) -> None:
        images_BHWC = images_BCHW.detach().permute(0, 2, 3, 1).mul(255).round().to(torch.uint8).contiguous()
        with self._file.open("a", encoding="ascii") as file:
            file.write(" ".join(f"{zlib.crc32(image.numpy()):08x}" for image in images_BHWC) + "\n")
        pace = self._folder / "pace"
        if pace.exists():
            time.sleep(float(pace.read_text(encoding="ascii") or 0))


def net(num_classes: int, channels: int, folder: str) -> nn.Module:
    """The factory."""
    return Witness(num_classes, channels, folder)
