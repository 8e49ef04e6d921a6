"""Features for a last layer: random Fourier features (fixed), and a hidden layer of ReLU (trained)."""

import math

import torch
from torch import Tensor, nn


class RandomFeatures(nn.Module):
    """phi(x) = sqrt(2/M) cos(omega x + b) with omega ~ N(0, frequency^2) and b uniform: fixed, with unit norm on average."""

    omega: Tensor
    phase: Tensor

    def __init__(self, inputs: int, features: int = 1024, frequency: float = 0.3, seed: int = 0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.register_buffer("omega", frequency * torch.randn(features, inputs, generator=draw))
        self.register_buffer("phase", 2 * math.pi * torch.rand(features, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(2 / len(self.phase)) * torch.cos(x.flatten(1) @ self.omega.T + self.phase)


class ReluFeatures(nn.Module):
    """phi(x) = sqrt(2/M) max(W x + b, 0): trained, from Xavier's initial weights."""

    def __init__(self, inputs: int, features: int = 1024):
        super().__init__()
        self.linear = nn.Linear(inputs, features)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(2 / self.linear.out_features) * self.linear(x.flatten(1)).relu()
