"""Paths that a user might write: nothing in the library knows them."""

import torch
from torch import Tensor

from autosym.linear import Bias, Dense, Kept, Path, Tangents
from autosym.linear.circular import patches, wrap
from autosym.linear.groups import GROUPS
from autosym.linear.plain import Convolution
from autosym.nn import Affine, Branch


class RowMean(Path):
    """y[c', p, q] = sum_{c, u} W[c', c, u] mean_q' x[c, p + u, q'], around the sides, for three u: S = H, K = 1."""

    keeps = Kept(equivariant=True)

    def __init__(self, in_channels, out_channels):
        super().__init__(1, out_channels, 3 * in_channels, bound=(2 / in_channels) ** 0.5)

    def columns(self, x: Tensor) -> Tensor:
        means = x.mean(-1)
        return torch.stack([means.roll(-u, 2) for u in (-1, 0, 1)], 2).flatten(1, 2).mT[:, :, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, :, 0].mT[..., None].expand(-1, -1, -1, x.shape[-1])

    def rows(self, g: Tensor) -> Tensor:
        return g.sum(-1).mT[:, :, None]

    def pictures(self) -> Tensor:
        return self.weight.reshape(-1, 3, 1)


class Cross(Path):
    """A convolution with a filter that is a cross of five weights; it knows that it is one."""

    keeps = Kept(equivariant=True)
    at = (1, 3, 4, 5, 7)

    def __init__(self, in_channels, out_channels):
        super().__init__(1, out_channels, 5 * in_channels, bound=(6 / (5 * in_channels)) ** 0.5)

    def columns(self, x: Tensor) -> Tensor:
        seen = patches(wrap(x, (3, 3)), (3, 3)).flatten(4)[..., self.at]  # (B, C, H, W, 5)
        return seen.permute(0, 2, 3, 1, 4).reshape(len(x), -1, 1, self.weight.shape[2])

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, :, 0].mT.unflatten(2, x.shape[-2:])

    def rows(self, g: Tensor) -> Tensor:
        return g.flatten(2).mT[:, :, None]

    def plain(self, in_shape):
        filters = self.weight.new_zeros(self.weight.shape[1], self.weight.shape[2] // 5, 9)
        filters[:, :, list(self.at)] = self.weight[0].unflatten(1, (-1, 5))
        return Convolution(filters.unflatten(2, (3, 3)), (1, 1, 1, 1))

    def limits(self):
        return ("the shape of a cross",)


class Gained(Path):
    """y = exp(gain) W x: the gain is a parameter with a prior of its own, which enters non-linearly."""

    def __init__(self, inputs, outputs):
        super().__init__(1, outputs, inputs, bound=inputs**-0.5)
        self.in_shape = (inputs,)
        self.gain = torch.nn.Parameter(torch.tensor(0.3))

    def columns(self, x: Tensor) -> Tensor:
        return (self.gain.detach().exp() * x)[:, None, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, 0, 0]

    def rows(self, g: Tensor) -> Tensor:
        return g[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.gain.exp() * x @ self.weight[0].mT

    def definition(self, name):
        if name != "gain":
            return super().definition(name)
        return lambda x: Tangents(self.forward(x)[:, None])  # the derivative of exp is exp


class Mix(Path):
    """y[c', g, p] = sum_{c, h} W[c', c, h] x[c, g h, p] of lifted features: a group convolution of one pixel, S = |G| H W."""

    keeps = Kept(equivariant=True, groups=("c4", "c2"))
    takes = lifted = GROUPS["c4"]

    def __init__(self, in_fields, out_fields):
        super().__init__(1, out_fields, 4 * in_fields, bound=(3 / (4 * in_fields)) ** 0.5)

    def columns(self, x: Tensor) -> Tensor:
        seen = x.unflatten(1, (-1, 4))[:, :, self.lifted.table].flatten(4)  # (B, C, g, h, H W)
        return seen.permute(0, 2, 4, 1, 3).reshape(len(x), -1, 1, self.weight.shape[2])

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, :, 0].unflatten(1, (4, *x.shape[-2:])).permute(0, 4, 1, 2, 3).flatten(1, 2)

    def rows(self, g: Tensor) -> Tensor:
        return g.unflatten(1, (-1, 4)).permute(0, 2, 3, 4, 1).reshape(len(g), -1, 1, self.weight.shape[1])


class LowRank(Branch):
    """y = up (down x + inside) + bias: a dense map of maps of a low rank, made of paths of ours."""

    constant = "bias"

    def __init__(self, in_shape, out_shape, rank):
        super().__init__()
        self.down, self.inside = Dense(in_shape, (rank,)), Bias((rank,))
        self.up, self.bias = Dense((rank,), out_shape), Bias((out_shape[0], 1, 1), out_shape)
        self.up.factored = True

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x) + self.inside(x)) + self.bias(x)


def row_mean(in_shape, out_shape):
    return Affine(RowMean(in_shape[0], out_shape[0]), Bias((out_shape[0], 1, 1), (out_shape[0], *in_shape[1:])))
