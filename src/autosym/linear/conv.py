"""Convolutions as paths: patches are the columns, output positions are shared."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from autosym.linear.circular import circular_conv, patches, shifted_correlations
from autosym.linear.path import BORDERS, Kept, Path
from autosym.linear.plain import Convolution


class Conv(Path):
    """Convolution (Eq. 3): patches are the columns, output positions are shared; K = groups.

    ``padding_mode`` is one of torch's ("circular", "zeros", "reflect", "replicate"). With ``stride=1`` and circular
    padding it is exactly equivariant to translations. With ``sequences`` it takes (B, C, L), read as maps of height 1.
    """

    keeps = Kept(equivariant=True)

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

    def limits(self) -> tuple[str, ...]:
        return () if self.is_equivariant else (BORDERS,)

    def plain(self, in_shape: Sequence[int] | None) -> Convolution:
        form = (self.padding, self.stride, self.dilation, self.groups, self.padding_mode, self.sequences)
        return Convolution(self.filters(), *form)

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


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value
