"""Paths that hold only what breaks a group: group convolutions times functions of the group element, without the constant.

    y[c', g, p] = sum_j phi_j(g) sum_{c,h,u} weight[c', j, c, h, u] x[c, g h, p + g u]

A convolution on lifted maps is a group convolution whose filter may differ for every g. It is equivariant to a subgroup H if the
filter is the same on every coset H g. So functions phi that are constant on the cosets of H, and have mean zero on the cosets of
a larger K, give what keeps H and is orthogonal to all that keeps K. A group convolution and one such path for each step of a
chain of subgroups, down to the identity, are all convolutions: each exactly once.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autosym.linear.circular import patches
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import Group, nested
from autosym.linear.path import Kept, Path
from autosym.linear.plain import Pooled


def contrasts(group: Group, breaks: Group, keeps: Group | None = None) -> Tensor:
    """phi_j(g), (|G|/|H| - |G|/|K|, |G|): constant on the cosets of H = ``keeps``, mean zero on those of K = ``breaks``.

    They are orthogonal with mean square 1 (Helmert's: each coset of H against those before it), so a weight moves as much of the
    filters as one of a group convolution does. Without ``keeps``, H is the identity alone.
    """
    if not group.exact:
        raise ValueError(
            f"{group.name} does not map the grid onto itself: its filters are interpolated, so no path is orthogonal to them; use "
            "a group that is exact, e.g. c4 or d4"
        )
    large, small = _cosets(group, breaks), _cosets(group, keeps)
    if keeps is not None and (len(keeps) == len(breaks) or breaks.elements(keeps) is None):
        raise ValueError(f"{keeps.name} is not a smaller group within {breaks.name}: what breaks {breaks.name} cannot keep it")
    rows = []
    for coset in large.unique():
        first, *others = small[large == coset].unique()
        before = (small == first).double()
        for part in others:
            own = (small == part).double()
            row = before / before.sum() - own / own.sum()
            rows.append(row / row.square().mean().sqrt())
            before += own
    return torch.stack(rows)


def _cosets(group: Group, subgroup: Group | None) -> Tensor:
    """By g, the least element of the coset H g."""
    if subgroup is None:
        return torch.arange(len(group), device="cpu")
    elements = group.elements(subgroup)
    if elements is None:
        raise ValueError(f"{subgroup.name} is not within {group.name}, whose fields the channels are: use a group within it")
    return group.table[elements].amin(0)


class GroupContrast(GroupConv):
    """A group convolution times contrasts of the group element: what breaks ``breaks`` and keeps ``keeps``, both within ``group``.

    In the formula above; S = |G| H W, in = J C |G| k^2 / groups, K = groups. ``breaks`` is the whole group by default. Without
    ``keeps`` only translations are kept. ``form`` is padding, dilation, groups and padding_mode, as for ``GroupConv``.
    """

    understated = False
    phi: Tensor

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        lift: bool = False,
        breaks: Group | None = None,
        keeps: Group | None = None,
        **form: Any,
    ):
        phi = contrasts(group, breaks or group, keeps)
        super().__init__(group, in_channels, out_channels, kernel_size, lift, **form)
        blocks, rows, columns = self.weight.shape
        bound = math.sqrt(6 / (len(phi) * columns))  # the sum over contrasts then has the variance of one group convolution
        self.weight = nn.Parameter(torch.empty(blocks, rows, len(phi) * columns).uniform_(-bound, bound))
        self.breaks, self.kept = breaks or group, keeps
        self.register_buffer("phi", phi, persistent=False)  # [j, g]

    @property
    def keeps(self) -> Kept:
        return Kept(equivariant=True, groups=nested(self.kept) if self.kept else ())

    def columns(self, x: Tensor) -> Tensor:
        maps = self.seen(x).unflatten(3, (self.groups, -1))
        found = torch.einsum("bgsqchu,jg->bgsqjchu", maps, self.phi.to(x))
        return found.reshape(len(x), -1, self.groups, self.weight.shape[2])

    def gram(self, x: Tensor) -> Tensor:
        """sum_g phi_j(g) phi_j'(g) A[g c, g c'], with A of patches, and g c where g moves the patch's place c.

        The patches of one g are those of another in another order, so one Gram matrix serves all.
        """
        self.group.check_size(x.shape[-2:])
        k, order = self.kernel_size, self.products.shape[1]
        maps = patches(self.pad(x), (k, k), dilation=(self.dilation, self.dilation)).permute(1, 4, 5, 0, 2, 3)
        maps = maps.reshape(self.groups, self.in_channels // self.groups * order * k * k, -1)
        whole = maps @ maps.mT
        places = torch.arange(whole.shape[1], device=x.device).reshape(-1, order, k * k)
        moved = [places[:, h][:, :, u].flatten() for h, u in zip(self.products, self.turns.argmax(1), strict=True)]
        each = torch.stack([whole[:, m][:, :, m] for m in moved])
        phi = self.phi.to(x)
        return torch.einsum("jg,lg,gqab->qjalb", phi, phi, each).reshape(self.groups, self.weight.shape[2], -1)

    def filters(self) -> Tensor:
        """The filters of all g as one convolution, (C' |G|, C |G| / groups, k, k)."""
        form = (self.in_channels // self.groups, self.products.shape[1], self.kernel_size**2)
        weight = self.weight.reshape(-1, len(self.phi), *form)
        return self.turned(torch.einsum("ajchu,jg->agchu", weight, self.phi.to(weight)))


class BiasContrast(Path):
    """y[c', g, p] = sum_j weight[c', j] phi_j(g): the part of a channel's bias that breaks a group; K = S = in = 1, so it is exact."""

    any_size = True
    phi: Tensor

    def __init__(self, group: Group, out_channels: int, breaks: Group | None = None, keeps: Group | None = None):
        phi = contrasts(group, breaks or group, keeps)
        super().__init__(1, out_channels * len(phi), 1, bound=0.0)
        self.lifted, self.kept = group, keeps
        self.register_buffer("phi", phi, persistent=False)  # [j, g]

    @property
    def keeps(self) -> Kept:
        return Kept(equivariant=True, invariant=True, groups=nested(self.kept) if self.kept else ())

    def columns(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), 1, 1, 1)

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        each = h.reshape(len(h), -1, len(self.phi)) @ self.phi.to(h)
        return each.flatten(1)[..., None, None].expand(-1, -1, *x.shape[-2:])

    def rows(self, g: Tensor) -> Tensor:
        each = g.sum((-2, -1)).unflatten(1, (-1, self.phi.shape[1])) @ self.phi.to(g).mT
        return each.reshape(len(g), 1, 1, -1)

    def plain(self, in_shape: Sequence[int] | None) -> None:
        """None: other layers add it as their ``offset``."""

    def values(self) -> Tensor:
        """b, (C', |G|, 1, 1)."""
        return (self.weight.view(-1, len(self.phi)) @ self.phi.to(self.weight))[..., None, None]


class PoolContrast(Path):
    """y = sum_{c,j} weight[:, c, j] mean_{g,p} phi_j(g) x[c, g, p], for flattened lifted maps (B, C |G| P): translation invariant.

    What breaks ``breaks`` and keeps ``keeps`` among dense maps of the mean over positions; K = S = 1. ``Pool`` over ``group``, one
    such path for each step of a chain, and ``Centred`` are all dense maps, and share nothing.
    """

    in_shape: tuple[int, ...]
    phi: Tensor

    def __init__(
        self,
        group: Group,
        channels: int,
        positions: int,
        outputs: int,
        breaks: Group | None = None,
        keeps: Group | None = None,
    ):
        phi = contrasts(group, breaks or group, keeps)
        columns = channels * len(phi)
        super().__init__(1, outputs, columns, bound=columns**-0.5)
        self.group, self.positions, self.kept = group, positions, keeps
        self.in_shape = (channels * len(group) * positions,)
        self.register_buffer("phi", phi, persistent=False)  # [j, g]

    @property
    def keeps(self) -> Kept:
        return Kept(invariant=True, groups=nested(self.kept) if self.kept else ())

    def columns(self, x: Tensor) -> Tensor:
        means = x.unflatten(1, (-1, len(self.group), self.positions)).mean(-1)  # (B, C, g)
        return (means @ self.phi.to(x).mT / len(self.group)).flatten(1)[:, None, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, 0, 0]

    def rows(self, g: Tensor) -> Tensor:
        return g[:, None, None]

    def plain(self, in_shape: Sequence[int] | None) -> Pooled:
        each = self.weight[0].unflatten(1, (-1, len(self.phi))) @ self.phi.to(self.weight) / len(self.group)
        return Pooled(each.flatten(1), self.positions)
