"""The networks of real.py, in plain torch, as users write them: build(name, channels, classes, width)."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """Six circular 3x3 convolutions with batch normalisation and a mean over positions: exactly equivariant between strides."""

    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        self.conv, self.norm = nn.ModuleList(), nn.ModuleList()
        for times, stride in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)):
            self.conv.append(nn.Conv2d(channels, times * width, 3, stride, 1, padding_mode="circular", bias=False))
            self.norm.append(nn.BatchNorm2d(times * width))
            channels = times * width
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.conv, self.norm, strict=True):
            x = F.relu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A basic block of a ResNet; a 1x1 convolution is its shortcut where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        changes = channels != out or stride != 1
        shortcut = [nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)] if changes else []
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


def resnet20(channels: int, classes: int, width: int) -> nn.Module:
    """The ResNet-20 of CIFAR-10: three stages of three basic blocks, zero padding."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for block in range(3):
            layers.append(Block(channels, width << stage, 2 if stage and not block else 1))
            channels = width << stage
    return nn.Sequential(*layers, *_head(channels, classes))


def depthwise(channels: int, classes: int, width: int) -> nn.Module:
    """Five depthwise-separable convolutions after a plain one, ReLU6, zero padding: 85,386 weights at width 32."""
    layers = _normalised(nn.Conv2d(channels, width, 3, 1, 1, bias=False))
    for a, b, stride in ((1, 2, 2), (2, 4, 2), (4, 4, 1), (4, 4, 1), (4, 8, 2)):
        layers += _normalised(nn.Conv2d(a * width, a * width, 3, stride, 1, groups=a * width, bias=False))
        layers += _normalised(nn.Conv2d(a * width, b * width, 1, bias=False))
    return nn.Sequential(*layers, *_head(8 * width, classes))


class Sequence1d(nn.Module):
    """Three 1-d convolutions (stride, dilation, zero padding), a residual connection and a mean over time."""

    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(channels, width, 5, padding=2), nn.BatchNorm1d(width)
        self.conv2, self.norm2 = nn.Conv1d(width, 2 * width, 5, stride=2, padding=2), nn.BatchNorm1d(2 * width)
        self.conv3, self.head = nn.Conv1d(2 * width, 2 * width, 3, padding=2, dilation=2), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.gelu(self.norm2(self.conv2(F.gelu(self.norm1(self.conv1(x)))))), 2)
        return self.head((x + F.gelu(self.conv3(x))).mean(2))


def _normalised(conv: nn.Conv2d) -> list[nn.Module]:
    return [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU6()]


def _head(channels: int, classes: int) -> Sequence[nn.Module]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)


NETWORKS: dict[str, tuple[Callable[[int, int, int], nn.Module], int]] = {  # and their width, as users have them
    "cnn": (CNN, 32),
    "resnet20": (resnet20, 16),
    "depthwise": (depthwise, 32),
    "sequence": (Sequence1d, 16),
}


def build(name: str, channels: int, classes: int, width: int | None = None) -> nn.Module:
    """A network by name, in its usual width or another."""
    made, usual = NETWORKS[name]
    return made(channels, classes, width or usual)
