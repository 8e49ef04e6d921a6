"""Dense maps: of all inputs, of the mean over positions, of the rest, and a constant."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from autosym.linear.grids import Grid
from autosym.linear.groups import Group, nested
from autosym.linear.path import Kept, Path
from autosym.linear.plain import Matrix, Pooled


class Dense(Path):
    """Fully connected, y = W x (Eq. 1); K = 1. Axes between the batch and ``in_shape`` are shared positions; S = 1 without them."""

    in_shape: tuple[int, ...]

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

    def plain(self, in_shape: Sequence[int] | None) -> Matrix:
        return Matrix(self.weight[0], self.in_shape, self.out_shape)


class Pool(Path):
    """Dense on the mean over positions, y = W mean_p x[c, p], for flattened maps (B, C P): translation invariant; K = S = 1.

    With ``group`` the maps are lifted, C fields of |G| channels, and ``positions`` count pairs (g, p): invariant to the group too.
    """

    keeps = Kept(invariant=True, every=True)  # any permutation of positions leaves it unchanged

    def __init__(self, channels: int, positions: int, outputs: int, group: Group | None = None):
        if group is not None and positions % len(group):
            raise ValueError(f"{positions} positions are not those of maps over {group.name}: take a multiple of {len(group)}")
        super().__init__(1, outputs, channels, bound=channels**-0.5)
        self.positions, self.group = positions, group
        if group is not None:
            self.keeps = Kept(invariant=True, groups=nested(group), every=True)

    def columns(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.positions)).mean(-1)[:, None, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, 0, 0]

    def rows(self, g: Tensor) -> Tensor:
        return g[:, None, None]

    def plain(self, in_shape: Sequence[int] | None) -> Pooled:
        return Pooled(self.weight[0], self.positions)


class Centred(Path):
    """Dense on what the mean over positions leaves, y = W (x[c, p] - mean_p x[c, p]), for flattened maps (B, C P); K = S = 1.

    ``Pool`` sees the mean and this path the rest, so they share nothing.
    """

    in_shape: tuple[int, ...]

    def __init__(self, channels: int, positions: int, outputs: int):
        super().__init__(1, outputs, channels * positions, bound=(channels * positions) ** -0.5)
        self.positions, self.in_shape = positions, (channels * positions,)

    def columns(self, x: Tensor) -> Tensor:
        return self._centred(x)[:, None, None]

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h[:, 0, 0]

    def rows(self, g: Tensor) -> Tensor:
        return g[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self._centred(x), self.weight[0])

    def plain(self, in_shape: Sequence[int] | None) -> Matrix:
        return Matrix(self._centred(self.weight[0]), self.in_shape, (self.weight.shape[1],))

    def _centred(self, x: Tensor) -> Tensor:
        maps = x.unflatten(1, (-1, self.positions))
        return (maps - maps.mean(-1, keepdim=True)).flatten(1)


class Bias(Path):
    """One constant column, y = b broadcast from ``shape`` to ``out_shape``; K = in = 1.

    By default S = 1 and ``place`` broadcasts, so the curvature block is the exact GGN. With ``expand`` the broadcast positions
    are shared: outer products are summed over them, as in laplace-torch. Use this only for comparison. With ``any_size`` its
    input is the tensor that it is added to, and ``out_shape`` is the shape of that.
    """

    any_size = False  # whether ``forward`` takes the output that it is added to, of any size, and not the layer's input

    def __init__(
        self, shape: Sequence[int], out_shape: Sequence[int] | None = None, expand: bool = False, any_size: bool = False
    ):
        super().__init__(1, math.prod(shape), 1, bound=0.0)
        self.any_size = self.any_size or any_size
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

    @property
    def keeps(self) -> Kept:
        """Invariant, as it does not depend on the input. Equivariant only if it is one number per channel."""
        constant = all(size == 1 for size in self.shape[1:])
        return Kept(equivariant=constant, invariant=True, every=constant)

    def columns(self, x: Tensor) -> Tensor:
        return x.new_ones(x.shape[0], self.positions, 1, 1)

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        if not self.expand:
            return h.reshape(-1, *self.shape).expand(-1, *self._full(x))
        permuted = h.reshape(-1, *(self.out_shape[axis - 1] for axis in self.order))
        return permuted.permute(0, *(self.order.index(axis) + 1 for axis in range(1, len(self.shape) + 1)))

    def rows(self, g: Tensor) -> Tensor:
        if not self.expand:
            if g.stride(0) == 1 and 1 in self.shape:  # samples side by side in memory: torch sums 30 times as slowly
                own = g.movedim(0, -1).sum([axis for axis, size in enumerate(self.shape) if size == 1], keepdim=True)
                return own.flatten(0, -2).mT[:, None, None]
            return g.sum_to_size(g.shape[0], *self.shape).reshape(g.shape[0], 1, 1, -1)
        return g.permute(0, *self.order).reshape(g.shape[0], -1, 1, self.weight.shape[1])

    def forward(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """With a ``grid`` only what samples keep of the map."""
        return self.weight.view(1, *self.shape).expand(x.shape[0], *(self._full(x) if grid is None else grid.shape))

    def plain(self, in_shape: Sequence[int] | None) -> None:
        """None: other layers add it as their ``offset``."""

    def values(self) -> Tensor:
        """b, in a shape that broadcasts to the output."""
        return self.weight.view(self.shape)

    def _full(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape[1:]) if self.any_size else self.out_shape
