"""Relaxed layers: the mean of named paths, and downsampling that keeps equivariance.

    y = 1/n sum_i path_i(x)          (Eq. 4, with a mean for the sum)

Free paths emit the smaller map directly. Symmetric (convolutional) paths run at stride 1, and one polyphase grid of their
sum is kept per sample: the one with the largest L2 norm. A choice per path would break equivariance as soon as two paths
are convolutional, and a choice per batch would make a sample's output depend on its batchmates.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autosym.paths import Bias, Conv, Dense, FactoredIn, FactoredOut, Path


class Affine(nn.Module):
    """y = linear(x) + bias(x): two paths, two priors."""

    def __init__(self, linear: Path, bias: Bias):
        super().__init__()
        self.linear = linear
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.bias(x)


class Factored(nn.Module):
    """F-FC, y = theta_1 (theta_2 x + b_2) + b_1 (Eq. 5): a fully connected layer factored between input and output."""

    def __init__(self, in_shape: Sequence[int], out_shape: Sequence[int]):
        super().__init__()
        self.theta_2 = FactoredIn(in_shape, out_shape[0])
        self.b_2 = Bias((out_shape[0], 1), (out_shape[0], in_shape[0]))
        self.theta_1 = FactoredOut(in_shape[0], out_shape)
        self.b_1 = Bias((1, *out_shape[1:]), out_shape)

    def forward(self, x: Tensor) -> Tensor:
        h = self.theta_2(x) + self.b_2(x)
        return self.theta_1(h) + self.b_1(h)


def fc(in_shape: Sequence[int], out_shape: Sequence[int]) -> Affine:
    """FC (Eq. 1) with one bias for every output."""
    return Affine(Dense(in_shape, out_shape), Bias(out_shape))


def conv(in_shape: Sequence[int], out_shape: Sequence[int], kernel_size: int = 3) -> Affine:
    """CONV (Eq. 3) at stride 1 with circular padding and one bias for every channel: strictly equivariant."""
    full = (out_shape[0], *in_shape[1:])
    return Affine(Conv(in_shape[0], out_shape[0], kernel_size), Bias((out_shape[0], 1, 1), full))


class Relaxed(nn.ModuleDict):
    """The mean of named paths; ``symmetric`` ones emit the full map and are downsampled together, by one polyphase choice."""

    def __init__(self, symmetric: Mapping[str, nn.Module], free: Mapping[str, nn.Module], stride: int = 1):
        super().__init__({**symmetric, **free})
        if len(self) != len(symmetric) + len(free) or not self:
            raise ValueError("a relaxed layer needs at least one path, and a different name for each")
        self.symmetric, self.free, self.stride = tuple(symmetric), tuple(free), stride

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        if self.symmetric:
            total = sum(self[name](x) for name in self.symmetric)
            outputs.append(polyphase(total, self.stride))
        outputs += [self[name](x) for name in self.free]
        return sum(outputs[1:], outputs[0]) / len(self)

    def extra_repr(self) -> str:
        return f"symmetric={self.symmetric}, free={self.free}, stride={self.stride}"


def polyphase(y: Tensor, stride: int) -> Tensor:
    """Keep, for every sample, the polyphase grid of (B, ..., H, W) with the largest L2 norm: (B, ..., H/stride, W/stride).

    A circular shift of the input permutes the grids, so the choice moves with it (Chaman & Dokmanic 2021).
    """
    if stride == 1:
        return y
    height, width = y.shape[-2:]
    if height % stride or width % stride:
        raise ValueError(f"a map of {height}x{width} has no polyphase grids of stride {stride}: both sides must be multiples")
    grids = y.unflatten(-1, (-1, stride)).unflatten(-3, (-1, stride))  # (B, ..., H/s, s, W/s, s)
    grids = grids.movedim((-3, -1), (1, 2)).flatten(1, 2)  # (B, s*s, ..., H/s, W/s)
    chosen = grids.detach().square().flatten(2).sum(-1).argmax(-1)
    return grids[torch.arange(len(y), device=y.device), chosen]
