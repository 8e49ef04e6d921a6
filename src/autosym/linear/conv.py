"""Convolutions as paths: patches are the columns, output positions are shared."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from autosym.linear.circular import CONVOLVE, circular_conv, circular_correlations, patches, shifted_correlations, wrap
from autosym.linear.grids import Grid, conv_on_grid
from autosym.linear.path import BORDERS, STRIDES, Kept, Path
from autosym.linear.plain import Convolution, Plain
from autosym.linear.products import add_gram, in_strips, mirrored

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)  # torch's own convolutions: these, and not their subclasses, can be read as ``Conv``


class Conv(Path):
    """Convolution (Eq. 3): patches are the columns, output positions are shared; K = groups.

    ``padding_mode`` is as in torch: "circular", "zeros", "reflect" or "replicate". With ``stride=1`` and circular padding it
    is exactly equivariant to translations. Maps have ``dims`` dimensions beside their channels: 1 for sequences (B, C, L), 2 for
    images, 3 for volumes. Tuples have one number for each.
    """

    keeps = Kept(equivariant=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...] = 3,
        stride: int | tuple[int, ...] = 1,
        padding: tuple[int, ...] | None = None,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        padding_mode: str = "circular",
        dims: int = 2,
    ):
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups={groups} must divide {in_channels} input and {out_channels} output channels")
        if padding_mode not in ("circular", "zeros", "reflect", "replicate"):
            raise ValueError(f"unknown padding_mode {padding_mode!r}: use circular, zeros, reflect or replicate")
        if dims not in CONVOLVE:
            raise ValueError(f"dims is {dims}: maps have 1, 2 or 3 dimensions beside their channels")
        kernel = _each("kernel_size", kernel_size, dims)
        fan_in = in_channels // groups * math.prod(kernel)
        super().__init__(groups, out_channels // groups, fan_in, bound=math.sqrt(6 / fan_in))
        self.kernel_size, self.stride, self.dilation = kernel, _each("stride", stride, dims), _each("dilation", dilation, dims)
        self.in_channels, self.groups, self.padding_mode, self.dims = in_channels, groups, padding_mode, dims
        if padding is None:  # keep the size; in the order of F.pad: left, right, top, bottom, front, back
            if any(k % 2 == 0 for k in self.kernel_size):
                sides = ", ".join(("left, right", "top, bottom", "front, back")[:dims])
                raise ValueError(f"kernel_size {self.kernel_size} is even: give padding=({sides})")
            half = [d * (k - 1) // 2 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            padding = tuple(side for side in reversed(half) for _ in range(2))
        if len(padding) != 2 * dims:
            raise ValueError(f"padding {padding} must have two numbers for each of {dims} dimensions, the last one first")
        self.padding = tuple(padding)

    @property
    def keeps_size(self) -> bool:
        """Whether the filter is centred and keeps the size of the map, without stride, dilation or groups."""
        half = tuple(k // 2 for k in reversed(self.kernel_size) for _ in range(2))
        centred = self.padding == half and all(k % 2 for k in self.kernel_size)
        return centred and set(self.stride) == set(self.dilation) == {1} and self.groups == 1

    @property
    def has_borders(self) -> bool:
        """Whether edges are treated differently from the inside: False if the filter wraps around or sees one position only."""
        reach = tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True))
        return self._padded() != reach or (self.padding_mode != "circular" and any(reach))

    @property
    def is_equivariant(self) -> bool:
        """Whether it commutes exactly with circular translations."""
        return set(self.stride) == {1} and not self.has_borders

    def pad(self, x: Tensor) -> Tensor:
        if self.keeps_size and self.padding_mode == "circular":
            return wrap(x, self.kernel_size)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self.padding, mode) if any(self.padding) else x

    def out_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """The size of the output map for an input map of ``size``, e.g. (height, width)."""
        axes = zip(size, self._padded(), self.kernel_size, self.dilation, self.stride, strict=True)
        return tuple((n + p - d * (k - 1) - 1) // s + 1 for n, p, k, d, s in axes)

    def columns(self, x: Tensor) -> Tensor:
        seen = self._patches(x)
        positions, offsets = range(2, 2 + self.dims), range(2 + self.dims, seen.dim())
        return seen.permute(0, *positions, 1, *offsets).reshape(x.shape[0], -1, self.groups, self.weight.shape[2])

    def gram(self, x: Tensor) -> Tensor:
        """Without patches if the filter keeps the size of the map: by the spectrum of a circular one, if that is no larger than the
        samples; or, on a CPU, by correlations of the map with its shifts, if it is large and has many channels.
        """
        if self.keeps_size and self.padding_mode == "circular" and 0 < x.shape[1] <= len(x):
            return circular_correlations(x, self.kernel_size)
        wide = not x.is_cuda and x.shape[1] >= {"circular": 8, "zeros": 32}.get(self.padding_mode, math.inf)
        large = all(n > 4 * (k // 2) for n, k in zip(x.shape[2:], self.kernel_size, strict=True))
        if self.dims < 3 and wide and self.keeps_size and large:
            height, width = (1, *self.kernel_size)[-2:]  # a sequence is a map of height 1
            return shifted_correlations(x[:, :, None] if self.dims == 1 else x, (height, width), self.padding_mode)
        t = self._rows_of_patches(x)
        return mirrored(add_gram(t.new_zeros(len(t), t.shape[1], t.shape[1]), t.mT)) if in_strips(t.mT) else t @ t.mT

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return h.flatten(2).mT.reshape(h.shape[0], -1, *self.out_size(x.shape[2:]))

    def rows(self, g: Tensor) -> Tensor:
        return g.flatten(2).mT.reshape(g.shape[0], -1, self.groups, self.weight.shape[1])

    def filters(self) -> Tensor:
        """The weight in torch's shape, e.g. (C', C / groups, height, width)."""
        return self.weight.view(-1, self.in_channels // self.groups, *self.kernel_size)

    def limits(self) -> tuple[str, ...]:
        return (*((BORDERS,) if self.has_borders else ()), *((STRIDES,) if set(self.stride) != {1} else ()))

    def plain(self, in_shape: Sequence[int] | None) -> Plain:
        return self.convolution()

    def convolution(self) -> Convolution:
        """The filters and the form."""
        return Convolution(self.filters(), self.padding, self.stride, self.dilation, self.groups, self.padding_mode)

    def forward(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """With a ``grid`` only what samples keep of the map."""
        return self.convolved(x, self.filters()) if grid is None else conv_on_grid(x, self.filters(), grid)

    def convolved(self, x: Tensor, filters: Tensor) -> Tensor:
        """The convolution of this form with other ``filters``, as many as there are."""
        if self.keeps_size and self.padding_mode == "circular":
            return circular_conv(x, filters)
        return CONVOLVE[self.dims](self.pad(x), filters, None, self.stride, 0, self.dilation, self.groups)

    def _padded(self) -> tuple[int, ...]:
        """By how much padding lengthens each axis."""
        return tuple(a + b for a, b in zip(self.padding[::2], self.padding[1::2], strict=True))[::-1]

    def _patches(self, x: Tensor) -> Tensor:
        return patches(self.pad(x), self.kernel_size, self.stride, self.dilation)

    def _rows_of_patches(self, x: Tensor) -> Tensor:
        """Patches of all samples and positions: (groups, in, B S)."""
        seen = self._patches(x)
        positions, offsets = range(2, 2 + self.dims), range(2 + self.dims, seen.dim())
        return seen.permute(1, *offsets, 0, *positions).reshape(self.groups, self.weight.shape[2], -1)


def form_of(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple:
    """The arguments of the ``Conv`` that equals a torch convolution without its bias."""
    padding = tuple(conv._reversed_padding_repeated_twice)  # torch's own reading of "same", "valid" and numbers
    form = (conv.kernel_size, conv.stride, padding, conv.dilation, conv.groups, conv.padding_mode, len(conv.kernel_size))
    return conv.in_channels, conv.out_channels, *form


def _each(name: str, value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    """One number for each dimension."""
    if isinstance(value, int):
        return (value,) * dims
    if len(value) != dims:
        raise ValueError(f"{name} {value} must have one number for each of {dims} dimensions: or give dims={len(value)}")
    return tuple(value)
