"""A perceptron of two hidden layers, the plainest net of the field's MNIST recipes."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Flatten, two hidden layers with ReLU, and a linear classifier.

    Args:
        num_classes: outputs.
        channels: of the images.
        size: side of the images in pixels; the first layer has ``channels * size**2`` inputs.
        hidden: units of the first hidden layer; the second has half as many.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int, hidden: int = 128) -> None:
        super().__init__()
        if hidden < 2:
            raise ValueError(f"hidden is {hidden}; it must be 2 or more")
        self.hidden1 = nn.Linear(channels * size * size, hidden)
        self.hidden2 = nn.Linear(hidden, hidden // 2)
        self.fc = nn.Linear(hidden // 2, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits float[B, num_classes]."""
        x = self.hidden1(images_BCHW.flatten(1)).relu()
        logits: Tensor = self.fc(self.hidden2(x).relu())
        return logits
