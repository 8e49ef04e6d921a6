"""Group convolutions as paths: every turned copy of the filter is a shared position."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autosym.linear.circular import circular_conv, patches, wrap
from autosym.linear.groups import Group, grid_action, nested
from autosym.linear.path import INTERPOLATION, Kept, Path
from autosym.linear.plain import Convolution


class GroupConv(Path):
    """Group convolution, y[c', g, p] = sum_{c,h,u} weight[c', c, h, u] x[c, g h, p + g u] (Cohen & Welling 2016).

    Lifted features (C, |G|) are C |G| channels. Every turned copy of the filter is a shared position: S = |G| H W,
    in = C |G| k^2. With ``lift=True`` the input is an image, without h. Padding is circular. Exactly equivariant if the
    group is exact.
    """

    understated = True  # docs/evidence.md
    turns: Tensor
    products: Tensor

    def __init__(self, group: Group, in_channels: int, out_channels: int, kernel_size: int = 3, lift: bool = False):
        order = 1 if lift else len(group)
        fan_in = in_channels * order * kernel_size**2
        super().__init__(1, out_channels, fan_in, bound=math.sqrt(6 / fan_in))
        self.group, self.lift, self.in_channels, self.kernel_size = group, lift, in_channels, kernel_size
        self.takes, self.lifted = None if lift else group, group
        turns, products = moves(group, kernel_size, lift)
        self.register_buffer("turns", turns, persistent=False)  # [g, v, u]: how g moves u to v
        self.register_buffer("products", products, persistent=False)  # [g, h]: g h

    @property
    def keeps(self) -> Kept:
        return Kept(equivariant=True, groups=nested(self.group))

    def columns(self, x: Tensor) -> Tensor:
        self.group.check_size(x.shape[-2:])
        return seen(x, self.turns, self.products).reshape(len(x), -1, 1, self.weight.shape[2])

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return to_fields(h, len(self.group), x.shape[-2:])

    def rows(self, g: Tensor) -> Tensor:
        return of_fields(g, len(self.group))

    def filters(self) -> Tensor:
        """The turned filters as one convolution, (C' |G|, C |G|, k, k): F[g, m, v] = sum_u turns[g, v, u] w[g^-1 m, u]."""
        order, k = self.products.shape[1], self.kernel_size
        weight = self.weight.view(-1, self.in_channels, order, k * k)
        return on_channels(torch.einsum("achu,gvu->agchv", weight, self.turns.to(weight)), self.products)

    def limits(self) -> tuple[str, ...]:
        return () if self.group.exact else (INTERPOLATION,)

    def plain(self, in_shape: Sequence[int] | None) -> Convolution:
        reach = self.kernel_size // 2
        return Convolution(self.filters(), (reach, reach, reach, reach))

    def forward(self, x: Tensor) -> Tensor:
        self.group.check_size(x.shape[-2:])
        return circular_conv(x, self.filters())


# ---- lifted features (C, |G|) as C |G| channels


def moves(group: Group, kernel_size: int, lift: bool) -> tuple[Tensor, Tensor]:
    """How every g moves the filter, [g, v, u] (u to v), and the index of g h, [g, h]; with ``lift`` there is one h."""
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size {kernel_size} is even: a filter must turn about its centre")
    with torch.device("cpu"):  # also if the path is built on the meta device
        turns = torch.stack([grid_action(matrix, kernel_size, kernel_size) for matrix in group.matrices])
        return turns, group.table if not lift else torch.zeros(len(group), 1, dtype=torch.long)


def seen(x: Tensor, turns: Tensor, products: Tensor) -> Tensor:
    """x[c, g h, p + g u], what the filter sees when g has turned it: (B, g, p, C, h, u)."""
    k, positions = math.isqrt(turns.shape[-1]), x.shape[-2] * x.shape[-1]
    maps = patches(wrap(x, (k, k)), (k, k)).permute(0, 1, 4, 5, 2, 3)
    maps = maps.reshape(len(x), x.shape[1] // products.shape[1], products.shape[1], k * k, positions)
    return torch.einsum("bcghvs,gvu->bgschu", maps[:, :, products], turns.to(x))


def on_channels(turned: Tensor, products: Tensor) -> Tensor:
    """Turned filters (C', g, C, h, v) as one convolution: F[g, m, v] = turned[g, g^-1 m, v], (C' |G|, C |G|, k, k)."""
    k = math.isqrt(turned.shape[-1])
    back = products.argsort(1)[None, :, None, :, None].expand(turned.shape)  # [g, m]: g^-1 m
    return turned.gather(3, back).reshape(len(turned) * len(products), -1, k, k)


def to_fields(h: Tensor, order: int, size: Sequence[int]) -> Tensor:
    """(B, |G| H W, 1, C') as lifted features (B, C' |G|, H, W)."""
    lifted = h.reshape(len(h), order, *size, h.shape[-1])  # (B, g, H, W, C')
    return lifted.permute(0, 4, 1, 2, 3).flatten(1, 2)


def of_fields(g: Tensor, order: int) -> Tensor:
    """The adjoint of ``to_fields``: (B, C' |G|, H, W) as (B, |G| H W, 1, C')."""
    lifted = g.unflatten(1, (-1, order))
    return lifted.permute(0, 2, 3, 4, 1).reshape(len(g), -1, 1, lifted.shape[1])
