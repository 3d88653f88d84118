"""The CIFAR-10 residual networks of He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class CifarResNet(nn.Module):
    """A 3x3 convolution, three stages of ``(depth - 2) / 6`` basic blocks (16, 32, 64 filters), and a classifier.

    The shortcuts are option A of the paper: no parameters; where a stage begins, every second pixel is taken and the
    new filters are padded with zeros. Parameters are named as in the weights that circulate for these nets
    (``conv1``, ``bn1``, ``layer1.0.conv1``, ..., ``linear``).

    Args:
        num_classes: outputs.
        channels: of the images.
        size: side of the images in pixels; any from 1 on, and the same weights serve every size.
        depth: 6n + 2; the paper has 20, 32, 44, 56 and 110.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int | None = None, depth: int = 20) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth is {depth}; it must be 6n + 2, such as 20, 56 or 110")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al. 2015, as the paper says
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits float[B, num_classes]."""
        x = F.relu(self.bn1(self.conv1(images_BCHW)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.stride = stride
        self.added = num_out - num_in

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        if self.added:  # half the new filters before the old ones, half after: as the circulating weights have it
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return F.relu(y + x, inplace=True)


def _stage(num_in: int, num_out: int, blocks: int, *, stride: int) -> nn.Sequential:
    rest = [_Block(num_out, num_out, 1) for _ in range(blocks - 1)]
    return nn.Sequential(_Block(num_in, num_out, stride), *rest)
