"""Group convolutions as paths: every turned copy of the filter is a shared position."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autosym.linear.circular import circular_conv, patches, wrap
from autosym.linear.groups import Group, grid_action, nested
from autosym.linear.path import BORDERS, INTERPOLATION, Kept, Path
from autosym.linear.plain import Convolution

MODES = ("circular", "zeros", "reflect", "replicate")  # of padding, as in torch: they turn with the map


class GroupConv(Path):
    """Group convolution, y[c', g, p] = sum_{c,h,u} weight[c', c, h, u] x[c, g h, p + g u] (Cohen & Welling 2016).

    Lifted features (C, |G|) are C |G| channels. Every turned copy of the filter is a shared position: S = |G| H W,
    in = C |G| k^2 / groups, K = groups. With ``lift=True`` the input is an image, without h. ``groups`` divide the fields C and C'. By
    default padding is circular and keeps the size of the map. Exactly equivariant if the group is exact; to shifts if padding is
    circular and keeps the size.
    """

    understated = True  # docs/evidence.md
    turns: Tensor
    products: Tensor

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        lift: bool = False,
        padding: int | None = None,
        dilation: int = 1,
        groups: int = 1,
        padding_mode: str = "circular",
    ):
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size {kernel_size} is even: a filter must turn about its centre")
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide {in_channels} input and {out_channels} output fields")
        if padding_mode not in MODES:
            raise ValueError(f"unknown padding_mode {padding_mode!r}: use {', '.join(MODES)}")
        order = 1 if lift else len(group)
        fan_in = in_channels // groups * order * kernel_size**2
        super().__init__(groups, out_channels // groups, fan_in, bound=math.sqrt(6 / fan_in))
        self.group, self.lift, self.in_channels, self.kernel_size = group, lift, in_channels, kernel_size
        self.dilation, self.groups, self.padding_mode = dilation, groups, padding_mode
        self.padding = dilation * (kernel_size // 2) if padding is None else padding
        self.takes, self.lifted = None if lift else group, group
        with torch.device("cpu"):  # also if the path is built on the meta device
            turns = torch.stack([grid_action(matrix, kernel_size, kernel_size) for matrix in group.matrices])
            products = group.table if not lift else torch.zeros(len(group), 1, dtype=torch.long)
        self.register_buffer("turns", turns, persistent=False)  # [g, v, u]: how g moves u to v
        self.register_buffer("products", products, persistent=False)  # [g, h]: g h

    @property
    def keeps(self) -> Kept:
        return Kept(equivariant=True, groups=nested(self.group))

    @property
    def wraps(self) -> bool:
        """Whether padding is circular and keeps the size of the map, without dilation and groups."""
        return self.padding_mode == "circular" and self.padding == self.kernel_size // 2 and self.dilation == self.groups == 1

    @property
    def has_borders(self) -> bool:
        """Whether edges are treated differently from the inside: False if the filter wraps around or sees one position only."""
        reach = self.dilation * (self.kernel_size // 2)
        return self.padding != reach or (self.padding_mode != "circular" and reach > 0)

    def pad(self, x: Tensor) -> Tensor:
        if self.wraps:
            return wrap(x, (self.kernel_size, self.kernel_size))
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, (self.padding,) * 4, mode) if self.padding else x

    def columns(self, x: Tensor) -> Tensor:
        return self.seen(x).reshape(len(x), -1, self.groups, self.weight.shape[2])

    def seen(self, x: Tensor) -> Tensor:
        """x[c, g h, p + g u], what the filter sees when g has turned it: (B, g, p, C, h, u)."""
        order, k = self.products.shape[1], self.kernel_size
        self.group.check_size(x.shape[-2:])
        maps = patches(self.pad(x), (k, k), dilation=(self.dilation, self.dilation)).permute(0, 1, 4, 5, 2, 3)
        maps = maps.reshape(len(x), self.in_channels, order, k * k, maps.shape[-2] * maps.shape[-1])
        return torch.einsum("bcghvs,gvu->bgschu", maps[:, :, self.products], self.turns.to(x))

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        smaller = self.dilation * (self.kernel_size - 1) - 2 * self.padding
        height, width = (n - smaller for n in x.shape[-2:])
        lifted = h.reshape(len(h), len(self.group), height, width, -1)  # (B, g, H, W, C')
        return lifted.permute(0, 4, 1, 2, 3).flatten(1, 2)

    def rows(self, g: Tensor) -> Tensor:
        lifted = g.unflatten(1, (-1, len(self.group)))
        return lifted.permute(0, 2, 3, 4, 1).reshape(len(g), -1, self.groups, self.weight.shape[1])

    def filters(self) -> Tensor:
        """The turned filters as one convolution, (C' |G|, C |G| / groups, k, k): F[g, m, v] = sum_u turns[g, v, u] w[g^-1 m, u]."""
        each = self.weight.view(-1, 1, self.in_channels // self.groups, self.products.shape[1], self.kernel_size**2)
        return self.turned(each.expand(-1, len(self.group), -1, -1, -1))

    def turned(self, each: Tensor) -> Tensor:
        """As one convolution: the filter (C', g, C / groups, h, u) of every g, turned by g."""
        found = torch.einsum("agchu,gvu->agchv", each, self.turns.to(each))
        back = self.products.argsort(1)[None, :, None, :, None].expand(found.shape)  # [g, m]: g^-1 m
        k = self.kernel_size
        return found.gather(3, back).reshape(len(found) * len(self.group), -1, k, k)

    def limits(self) -> tuple[str, ...]:
        borders = (BORDERS,) if self.has_borders else ()
        return borders if self.group.exact else (*borders, INTERPOLATION)

    def plain(self, in_shape: Sequence[int] | None) -> Convolution:
        dilation, side = (self.dilation, self.dilation), self.padding
        return Convolution(self.filters(), (side, side, side, side), (1, 1), dilation, self.groups, self.padding_mode)

    def forward(self, x: Tensor) -> Tensor:
        self.group.check_size(x.shape[-2:])
        if self.wraps:
            return circular_conv(x, self.filters())
        return F.conv2d(self.pad(x), self.filters(), None, 1, 0, self.dilation, self.groups)
