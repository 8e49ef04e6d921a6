"""F-FC (Eq. 5): a dense map of maps, factored between input and output, as two paths."""

import math
from collections.abc import Sequence

from torch import Tensor

from autosym.linear.path import Path
from autosym.linear.products import factored_in, factored_out


class FactoredIn(Path):
    """The input factor of F-FC (Eq. 5), h[b,d,c] = sum_s x[b,c,s] theta_2[c,d,s]: K = C blocks, in = HW, out = C'."""

    in_shape: tuple[int, ...]

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

    def pictures(self) -> Tensor | None:
        return self.weight.reshape(-1, *self.in_shape[1:]) if len(self.in_shape) == 3 else None


class FactoredOut(Path):
    """The output factor of F-FC (Eq. 5), y[b,d,t] = sum_c h[b,d,c] theta_1[d,t,c]: K = C' blocks, in = C, out = H'W'."""

    factored = True

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

    def pictures(self) -> Tensor | None:
        return self.weight.mT.reshape(-1, *self.out_shape[1:]) if len(self.out_shape) == 3 else None
