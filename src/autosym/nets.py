"""The architectures of the experiments (App. F): relaxed blocks with ReLU, global pooling, a two-layer head.

Eight blocks of width a, 2a, 2a, 4a, 4a, 8a, 8a, 16a and strides 1, 2, 1, 2, 1, 2, 2, 2, then Linear(16a, 64a), ReLU,
Linear(64a, K). The last map of a 32x32 image is 1x1; of larger images it is averaged, which keeps translation invariance.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autosym import layers
from autosym.layers import Affine, Relaxed
from autosym.paths import Bias, Dense

SYMMETRIC = {"conv": layers.conv}
FREE = {"fc": layers.fc, "f-fc": layers.Factored}
NAMES = ("fc", "conv", "fc+conv", "f-fc", "f-fc+conv")


class Net(nn.Module):
    """Blocks of relaxed layers with ReLU, the mean over positions, and a head of two dense layers; returns logits."""

    def __init__(self, blocks: Sequence[Relaxed], features: int, hidden: int, classes: int, in_shape: tuple[int, ...]):
        super().__init__()
        self.in_shape = in_shape
        self.blocks = nn.ModuleList(blocks)
        self.hidden = Affine(Dense((features,), (hidden,)), Bias((hidden,)))
        self.output = Affine(Dense((hidden,), (classes,)), Bias((classes,)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.in_shape:
            raise ValueError(f"this network was built for inputs {('B', *self.in_shape)}, got {tuple(x.shape)}")
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.output(torch.relu(self.hidden(x.mean((-2, -1)))))


def build(
    name: str,
    in_shape: Sequence[int],
    classes: int,
    width: int = 10,
    channels: Sequence[int] = (1, 2, 2, 4, 4, 8, 8, 16),
    strides: Sequence[int] = (1, 2, 1, 2, 1, 2, 2, 2),
    hidden: int = 64,
) -> Net:
    """A network whose every block has the paths that ``name`` lists, e.g. ``"f-fc+conv"``.

    ``channels`` and ``hidden`` are in multiples of ``width``; ``in_shape`` is (channels, height, width).
    """
    paths = name.split("+")
    unknown = [path for path in paths if path not in SYMMETRIC | FREE]
    if unknown or len(set(paths)) != len(paths):
        raise ValueError(f"unknown network {name!r}: join different paths of {', '.join([*SYMMETRIC, *FREE])} by '+'")
    if len(in_shape) != 3:
        raise ValueError(f"in_shape must be (channels, height, width), got {tuple(in_shape)}")
    if len(channels) != len(strides):
        raise ValueError(f"{len(channels)} channels and {len(strides)} strides: one of each per block")
    total = math.prod(strides)
    for side, size in zip(("height", "width"), in_shape[1:], strict=True):
        if size % total:
            raise ValueError(
                f"{side} {size} is not divisible by the product of strides {total}: an odd map has no polyphase grids "
                f"of equal size; pad or resize the images to a multiple of {total}, or pass other strides"
            )
    blocks = []
    shape = tuple(in_shape)
    for multiple, stride in zip(channels, strides, strict=True):
        out_shape = (width * multiple, shape[1] // stride, shape[2] // stride)
        symmetric = {path: SYMMETRIC[path](shape, out_shape) for path in paths if path in SYMMETRIC}
        free = {path: FREE[path](shape, out_shape) for path in paths if path in FREE}
        blocks.append(_with_gain(Relaxed(symmetric, free, stride), math.sqrt(len(paths))))
        shape = out_shape
    return Net(blocks, shape[0], width * hidden, classes, tuple(in_shape))


@torch.no_grad()
def _with_gain(layer: Relaxed, gain: float) -> Relaxed:
    """Scale the initial outputs of the paths, so that the mean of n independent ones has the variance of one (gain sqrt n)."""
    for path in layer.values():
        (path.theta_1 if isinstance(path, layers.Factored) else path.linear).weight.mul_(gain)  # type: ignore[operator,union-attr]
    return layer
