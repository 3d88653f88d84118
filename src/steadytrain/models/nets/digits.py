"""A four-layer convolutional net for very small images, such as scans of digits of 8x8 pixels."""

from __future__ import annotations

from torch import Tensor, nn


class Digits(nn.Module):
    """Two 3x3 convolutions, 2x2 max-pooling, two wider 3x3 convolutions, global average pooling, a classifier.

    Every convolution is followed by batch normalisation and ReLU.

    Args:
        num_classes: outputs.
        channels: of the images.
        size: side of the images in pixels; any from 2 on, and the same weights serve every size.
        width: filters of the first two convolutions; the next two have twice as many.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int | None = None, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv(channels, width), *_conv(width, width), nn.MaxPool2d(2), *_conv(width, 2 * width),
            *_conv(2 * width, 2 * width), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits float[B, num_classes]."""
        logits: Tensor = self.fc(self.features(images_BCHW).flatten(1))
        return logits


def _conv(num_in: int, num_out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)
