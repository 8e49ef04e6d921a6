"""Paths: every linear map with its own prior.

Every path is one matrix, or K blocks of it, applied at S shared positions (the path law):

    path(x) == place(einsum("bski,koi->bsko", columns(x), weight), x)     weight: (K, out, in)
    <place(h, x), g> == <h, rows(g)>                                      rows is the adjoint of place

``columns`` and ``rows`` are the definition, and all that curvature needs; ``forward`` is the fast form of the same map.
(``place`` takes of ``x`` only its shape: the same convolution works on images of any size.)
What counts as a shared position is part of the definition: it fixes the Kronecker approximation.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.convolutions import circular_conv, patches, shifted_correlations, wrap
from autosym.groups import Group, grid_action
from autosym.products import factored_in, factored_out, gram


class Path(nn.Module):
    """One linear map, ``weight`` of shape (K, out, in), under one prior."""

    weight: nn.Parameter
    start_size = 0.0  # of weights that were set to zero at the start: the root mean square they would have had

    def __init__(self, blocks: int, rows: int, columns: int, bound: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, rows, columns).uniform_(-bound, bound))

    def size(self) -> float:
        """The size of the weights, in units of which relative steps are: their root mean square, or ``start_size``."""
        return float(self.weight.detach().square().mean().sqrt()) or self.start_size

    def columns(self, x: Tensor) -> Tensor:
        """The inputs of the matrix, (B, S, K, in)."""
        raise TypeError(f"{type(self).__name__} does not define columns")

    def gram(self, x: Tensor) -> Tensor:
        """sum over samples and positions of a a^T for the columns a of every block: (K, in, in)."""
        return gram(self.columns(x))

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        """Arrange the matrix's outputs (B, S, K, out) as the output of the path."""
        raise TypeError(f"{type(self).__name__} does not define place")

    def rows(self, g: Tensor) -> Tensor:
        """The adjoint of ``place``: a cotangent of the output, as (B, S, K, out)."""
        raise TypeError(f"{type(self).__name__} does not define rows")

    def forward(self, x: Tensor) -> Tensor:
        return self.place(torch.einsum("bski,koi->bsko", self.columns(x), self.weight), x)


class Dense(Path):
    """Fully connected, y = W x (Eq. 1); K = 1. Axes between the batch and ``in_shape`` are shared positions (none: S = 1)."""

    def __init__(self, in_shape: Sequence[int], out_shape: Sequence[int]):
        fan_in = math.prod(in_shape)
        super().__init__(1, math.prod(out_shape), fan_in, bound=fan_in**-0.5)
        self.in_shape, self.out_shape = tuple(in_shape), tuple(out_shape)

    def columns(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 1, self.weight.shape[2])

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h.reshape(*x.shape[: x.dim() - len(self.in_shape)], *self.out_shape)

    def rows(self, g: Tensor) -> Tensor:
        return g.reshape(g.shape[0], -1, 1, self.weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.place(F.linear(x.flatten(x.dim() - len(self.in_shape)), self.weight[0]), x)


class Pool(Path):
    """Dense on the mean over positions, y = W mean_p x[c, p], of flattened maps (B, C P): invariant to translations; K = S = 1."""

    def __init__(self, channels: int, positions: int, outputs: int):
        super().__init__(1, outputs, channels, bound=channels**-0.5)
        self.positions = positions

    def columns(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.positions)).mean(-1)[:, None, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, 0, 0]

    def rows(self, g: Tensor) -> Tensor:
        return g[:, None, None]


class Conv(Path):
    """Convolution (Eq. 3): patches are the columns, output positions are shared; K = groups.

    ``padding_mode`` is one of torch's ("circular", "zeros", "reflect", "replicate"). With ``stride=1`` and circular
    padding it is exactly equivariant to translations. With ``sequences`` it takes (B, C, L), read as maps of height 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: tuple[int, int, int, int] | None = None,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        padding_mode: str = "circular",
        sequences: bool = False,
    ):
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide {in_channels} input and {out_channels} output channels")
        if padding_mode not in ("circular", "zeros", "reflect", "replicate"):
            raise ValueError(f"padding_mode {padding_mode!r} is not circular, zeros, reflect or replicate")
        kernel = _pair(kernel_size)
        fan_in = in_channels // groups * math.prod(kernel)
        super().__init__(groups, out_channels // groups, fan_in, bound=math.sqrt(6 / fan_in))
        self.kernel_size, self.stride, self.dilation = kernel, _pair(stride), _pair(dilation)
        self.in_channels, self.groups, self.padding_mode, self.sequences = in_channels, groups, padding_mode, sequences
        if padding is None:  # the padding that keeps the size, as F.pad orders it: left, right, top, bottom
            if any(k % 2 == 0 for k in self.kernel_size):
                raise ValueError(f"kernel_size {self.kernel_size} is even: give padding=(left, right, top, bottom)")
            vertical, horizontal = (d * (k - 1) // 2 for d, k in zip(self.dilation, self.kernel_size, strict=True))
            padding = (horizontal, horizontal, vertical, vertical)
        self.padding = padding

    @property
    def keeps_size(self) -> bool:
        """Whether it is a plain centred filter: no stride, dilation or groups, and padding that keeps the size of the map."""
        height, width = (k // 2 for k in self.kernel_size)
        centred = self.padding == (width, width, height, height) and all(k % 2 for k in self.kernel_size)
        return centred and self.stride == self.dilation == (1, 1) and self.groups == 1

    @property
    def has_borders(self) -> bool:
        """Whether positions at an edge see something else than those inside: not where it wraps around, nor if it has no reach."""
        left, right, top, bottom = self.padding
        reach = tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True))
        return (top + bottom, left + right) != reach or (self.padding_mode != "circular" and any(reach))

    @property
    def is_equivariant(self) -> bool:
        """Whether it commutes exactly with translations, around the edges."""
        return self.stride == (1, 1) and not self.has_borders

    def pad(self, x: Tensor) -> Tensor:
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self.padding, mode) if any(self.padding) else x

    def out_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Height and width of the output for an input of height and width ``size``."""
        left, right, top, bottom = self.padding
        padded = (size[0] + top + bottom, size[1] + left + right)
        height, width = (
            (n - d * (k - 1) - 1) // s + 1
            for n, k, d, s in zip(padded, self.kernel_size, self.dilation, self.stride, strict=True)
        )
        return height, width

    def columns(self, x: Tensor) -> Tensor:
        seen = patches(self.pad(self._maps(x)), self.kernel_size, self.stride, self.dilation)
        return seen.permute(0, 2, 3, 1, 4, 5).reshape(x.shape[0], -1, self.groups, self.weight.shape[2])

    def gram(self, x: Tensor) -> Tensor:
        """Where the filter keeps the size of a larger map, from correlations of the map with its shifts instead of patches.

        Not on a GPU, which has arithmetic to spare: one large product is faster there than many with few rows.
        """
        x = self._maps(x)
        wide = not x.is_cuda and x.shape[1] >= {"circular": 8, "zeros": 32}.get(self.padding_mode, math.inf)
        if wide and self.keeps_size and all(n > 4 * (k // 2) for n, k in zip(x.shape[2:], self.kernel_size, strict=True)):
            return shifted_correlations(x, self.kernel_size, self.padding_mode)
        seen = patches(self.pad(x), self.kernel_size, self.stride, self.dilation)
        t = seen.permute(1, 4, 5, 0, 2, 3).reshape(self.groups, self.weight.shape[2], -1)
        return t @ t.mT

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        y = h.flatten(2).mT.reshape(h.shape[0], -1, *self.out_size(self._maps(x).shape[-2:]))
        return y.squeeze(2) if self.sequences else y

    def rows(self, g: Tensor) -> Tensor:
        return g.flatten(2).mT.reshape(g.shape[0], -1, self.groups, self.weight.shape[1])

    def filters(self) -> Tensor:
        """The weight as torch's convolutions take it, (C', C / groups, height, width)."""
        return self.weight.view(-1, self.in_channels // self.groups, *self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self._maps(x)
        if self.keeps_size and self.padding_mode == "circular":
            y = circular_conv(x, self.filters())
        else:
            y = F.conv2d(self.pad(x), self.filters(), None, self.stride, 0, self.dilation, self.groups)
        return y.squeeze(2) if self.sequences else y

    def _maps(self, x: Tensor) -> Tensor:
        return x[:, :, None] if self.sequences else x


def form_of(conv: nn.Conv1d | nn.Conv2d) -> tuple:
    """The arguments of the ``Conv`` that is one of torch's convolutions, but for its bias."""
    padding = tuple(conv._reversed_padding_repeated_twice)  # torch's own reading of "same", "valid" and numbers
    line = isinstance(conv, nn.Conv1d)
    kernel, stride, dilation = ((1, *t) if line else t for t in (conv.kernel_size, conv.stride, conv.dilation))
    padding = (*padding, 0, 0) if line else padding
    return conv.in_channels, conv.out_channels, kernel, stride, padding, dilation, conv.groups, conv.padding_mode, line


class FactoredIn(Path):
    """The input factor of F-FC (Eq. 5), h[b,d,c] = sum_s x[b,c,s] theta_2[c,d,s]: K = C blocks, in = HW, out = C'."""

    def __init__(self, in_shape: Sequence[int], out_channels: int):
        channels, *size = in_shape
        positions = math.prod(size)
        super().__init__(channels, out_channels, positions, bound=math.sqrt(3 / positions))
        self.in_shape = tuple(in_shape)

    def columns(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 1, self.weight.shape[0], -1)

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, 0].mT

    def rows(self, g: Tensor) -> Tensor:
        return g.mT[:, None]

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[2:]) != self.weight.shape[2] or x.shape[1] != self.weight.shape[0]:
            channels = len(self.weight)
            how = (
                "resize the inputs"
                if x.shape[1] == channels
                else f"channels differ, it takes {channels}, the inputs have {x.shape[1]}"
            )
            raise ValueError(f"this factored layer is of maps {('B', *self.in_shape)}, got {tuple(x.shape)}: {how}")
        return factored_in(x.flatten(2), self.weight)


class FactoredOut(Path):
    """The output factor of F-FC (Eq. 5), y[b,d,t] = sum_c h[b,d,c] theta_1[d,t,c]: K = C' blocks, in = C, out = H'W'."""

    def __init__(self, in_channels: int, out_shape: Sequence[int]):
        channels, *size = out_shape
        super().__init__(channels, math.prod(size), in_channels, bound=math.sqrt(3 / in_channels))
        self.out_shape = tuple(out_shape)

    def columns(self, x: Tensor) -> Tensor:
        return x[:, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h.reshape(h.shape[0], *self.out_shape)

    def rows(self, g: Tensor) -> Tensor:
        return g.reshape(g.shape[0], 1, *self.weight.shape[:2])

    def forward(self, x: Tensor) -> Tensor:
        return factored_out(x, self.weight).reshape(x.shape[0], *self.out_shape)


class Bias(Path):
    """One constant column, y = b broadcast from ``shape`` to ``out_shape``; K = in = 1.

    By default S = 1 and ``place`` broadcasts, so the block is the exact GGN. With ``expand`` the broadcast positions are
    shared instead (outer products are summed over them), as laplace-torch does: for comparison only.
    """

    def __init__(self, shape: Sequence[int], out_shape: Sequence[int] | None = None, expand: bool = False):
        super().__init__(1, math.prod(shape), 1, bound=0.0)
        self.shape, self.out_shape, self.expand = tuple(shape), tuple(out_shape or shape), expand
        fits = len(self.shape) == len(self.out_shape) and all(
            own in (1, full) for own, full in zip(self.shape, self.out_shape, strict=True)
        )
        if not fits:
            raise ValueError(f"a bias of shape {self.shape} does not broadcast to {self.out_shape}")
        # The output as (positions, own): the axes that are broadcast come first.
        axes = range(1, len(self.shape) + 1)
        self.order = sorted(axes, key=lambda axis: self.shape[axis - 1] == self.out_shape[axis - 1])
        self.positions = math.prod(self.out_shape) // math.prod(self.shape) if expand else 1

    def columns(self, x: Tensor) -> Tensor:
        return x.new_ones(x.shape[0], self.positions, 1, 1)

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        if not self.expand:
            return h.reshape(-1, *self.shape).expand(-1, *self.out_shape)
        permuted = h.reshape(-1, *(self.out_shape[axis - 1] for axis in self.order))
        return permuted.permute(0, *(self.order.index(axis) + 1 for axis in range(1, len(self.shape) + 1)))

    def rows(self, g: Tensor) -> Tensor:
        if not self.expand:
            return g.sum_to_size(g.shape[0], *self.shape).reshape(g.shape[0], 1, 1, -1)
        return g.permute(0, *self.order).reshape(g.shape[0], self.positions, 1, -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.view(1, *self.shape).expand(x.shape[0], *self.out_shape)


class GroupConv(Path):
    """Group convolution, y[c', g, p] = sum_{c,h,u} weight[c', c, h, u] x[c, g h, p + g u] (Cohen & Welling 2016).

    Lifted features (C, |G|) are C |G| channels. Every turned copy of the filter is a shared position: S = |G| H W,
    in = C |G| k^2. ``lift=True`` takes an image, without h. Circular padding; exactly equivariant if the group is exact.
    """

    turns: Tensor
    products: Tensor

    def __init__(self, group: Group, in_channels: int, out_channels: int, kernel_size: int = 3, lift: bool = False):
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {kernel_size} is even: a filter must turn about its centre")
        order = 1 if lift else len(group)
        fan_in = in_channels * order * kernel_size**2
        super().__init__(1, out_channels, fan_in, bound=math.sqrt(6 / fan_in))
        self.group, self.lift, self.in_channels, self.kernel_size = group, lift, in_channels, kernel_size
        with torch.device("cpu"):  # also where the path is only a definition, on the meta device
            turns = torch.stack([grid_action(matrix, kernel_size, kernel_size) for matrix in group.matrices])
            products = group.table if not lift else torch.zeros(len(group), 1, dtype=torch.long)
        self.register_buffer("turns", turns, persistent=False)  # [g, v, u]: how g moves u to v
        self.register_buffer("products", products, persistent=False)  # [g, h]: g h

    def columns(self, x: Tensor) -> Tensor:
        order, k = self.products.shape[1], self.kernel_size
        self.group.check_size(x.shape[-2:])
        seen = patches(wrap(x, (k, k)), (k, k)).permute(0, 1, 4, 5, 2, 3).reshape(len(x), self.in_channels, order, k * k, -1)
        seen = torch.einsum("bcghvs,gvu->bgschu", seen[:, :, self.products], self.turns.to(x))
        return seen.reshape(len(x), -1, 1, self.weight.shape[2])

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        lifted = h.reshape(len(h), len(self.group), *x.shape[-2:], -1)  # (B, g, H, W, C')
        return lifted.permute(0, 4, 1, 2, 3).flatten(1, 2)

    def rows(self, g: Tensor) -> Tensor:
        lifted = g.unflatten(1, (-1, len(self.group)))
        return lifted.permute(0, 2, 3, 4, 1).reshape(len(g), -1, 1, self.weight.shape[1])

    def filters(self) -> Tensor:
        """The turned filters as one convolution, (C' |G|, C |G|, k, k): F[g, m, v] = sum_u turns[g, v, u] w[g^-1 m, u]."""
        order, k = self.products.shape[1], self.kernel_size
        weight = self.weight.view(-1, self.in_channels, order, k * k)
        turned = torch.einsum("achu,gvu->agchv", weight, self.turns.to(weight))
        back = self.products.argsort(1)[None, :, None, :, None].expand(turned.shape)  # [g, m]: g^-1 m
        return turned.gather(3, back).reshape(-1, self.in_channels * order, k, k)

    def forward(self, x: Tensor) -> Tensor:
        self.group.check_size(x.shape[-2:])
        return circular_conv(x, self.filters())


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value
