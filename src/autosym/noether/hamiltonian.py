"""F as a network with ELU, and its dynamics averaged over flows: many sets of weights at once, with matrix products alone.

    y_0 = x,   y_l = ELU(W_l y_(l-1) + b_l),   F(x) = v . y_L
    grad F = W_1^T D_1 W_2^T D_2 ... W_L^T D_L v,         D_l = diag ELU'(z_l) = diag(1 + min(y_l, 0))
    x' = J grad H(x),                                     grad H(x) = mean_s R_s^T grad F(R_s x + t_s)

In this form a field is a few products. They are differentiated once, and can be recorded as a CUDA graph.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.linear.dense import Bias, Dense
from autosym.noether.dynamics import apply_j

Moves = tuple[Tensor, Tensor]  # R (S, M, M) and t (S, M): the flows that F is averaged over


class Layer(nn.Module):
    """y = W x + b, as two paths, each with its own prior."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear, self.bias = Dense((inputs,), (outputs,)), Bias((outputs,))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.bias(x)


def network(dimension: int, layers: int, width: int) -> nn.Sequential:
    """F: an MLP with ELU and one output. The last layer has no bias, as a constant moves nothing."""
    widths = (dimension, *(width,) * (layers - 1))
    parts = [part for i, o in pairwise(widths) for part in (Layer(i, o), nn.ELU())]
    return nn.Sequential(*parts, Dense((width,), (1,)))


def slope(weights: Mapping[str, Tensor], y: Tensor) -> Tensor:
    """grad F at points (W, N, M), for W sets of weights of ``network``, by name."""
    count = len(weights) // 2
    hidden = [tuple(weights[f"{2 * i}.{kind}.weight"][:, 0] for kind in ("linear", "bias")) for i in range(count)]
    derivatives = []
    for matrix, bias in hidden:
        y = F.elu(torch.baddbmm(bias.mT, y, matrix.mT))
        derivatives.append(y.clamp_max(0) + 1)
    found = weights[f"{2 * count}.weight"][:, 0] * derivatives[-1]
    for (matrix, _), derivative in zip(hidden[:0:-1], derivatives[-2::-1], strict=True):
        found = (found @ matrix) * derivative
    return found @ hidden[0][0]


def field(weights: Mapping[str, Tensor], moves: Moves | None) -> Callable[[Tensor], Tensor]:
    """x' = J grad H for each set of weights, (W, B, M) to (W, B, M); without ``moves``, H is F itself."""

    def velocity(x: Tensor) -> Tensor:
        if moves is None:
            return apply_j(slope(weights, x))
        matrices, shifts = moves
        points = torch.einsum("sij,wbj->wsbi", matrices, x) + shifts[:, None]
        slopes = slope(weights, points.flatten(1, 2)).reshape(points.shape)
        return apply_j(torch.einsum("sij,wsbi->wbj", matrices, slopes) / len(matrices))

    return velocity
