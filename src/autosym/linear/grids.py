"""Polyphase grids: every stride-th position of a map, from one of stride^2 starts, which each sample chooses for itself.

A convolution that keeps one grid of its output has, as such, a gradient that is zero elsewhere. Moved so that the grid begins at 0, it is a
convolution with a stride, whose derivatives cost a stride^2-th: ``conv_on_grid``.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from autosym.linear.circular import transposed

LARGE = 2**15  # positions of all samples


class Grid(NamedTuple):
    """The grids that samples keep of a map (B, C, H, W), and the map itself, without a graph."""

    stride: int
    chosen: Tensor  # (B,)
    full: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """What is left of the map of one sample."""
        channels, height, width = self.full.shape[1:]
        return channels, height // self.stride, width // self.stride

    def without_map(self) -> "Grid":
        """The same, with nothing but the shape of the map: to be kept."""
        return self._replace(full=self.full.new_empty(()).expand_as(self.full))

    def spread(self, g: Tensor) -> Tensor:
        """The adjoint of ``on_grid``: a cotangent of what was kept, with zeros elsewhere, (B, C, H, W)."""
        height, width = self.full.shape[-2:]
        positions = _grids(height, width, self.stride, g.device)[self.chosen][:, None].expand(-1, g.shape[1], -1)
        return g.new_zeros(*g.shape[:2], height * width).scatter(2, positions, g.flatten(2)).unflatten(2, (height, width))


def largest_grid(y: Tensor, stride: int) -> Tensor:
    """For every sample of (B, ..., H, W) which of its stride^2 polyphase grids has the largest L2 norm: (B,)."""
    height, width = y.shape[-2:]
    if height % stride or width % stride:
        raise ValueError(f"a map of {height}x{width} has no polyphase grids of stride {stride}: both sides must be multiples")
    maps = y.detach().reshape(y.shape[0], -1, height, width)
    if maps.is_cuda:  # one kernel; torch takes such norms four times as slowly on a CPU
        split = maps.unflatten(-1, (-1, stride)).unflatten(-3, (-1, stride))
        return torch.linalg.vector_norm(split, dim=(1, 2, 4)).flatten(1).argmax(1)
    squares = (
        maps.to(torch.promote_types(maps.dtype, torch.float32))
        .square()
        .sum(1)
        .unflatten(-1, (-1, stride))
        .unflatten(-3, (-1, stride))
    )
    return squares.sum((1, 3)).flatten(1).argmax(1)


def on_grid(y: Tensor, stride: int, chosen: Tensor) -> Tensor:
    """Of (B, ..., H, W) the polyphase grid that was chosen for each sample, (B,): (B, ..., H/stride, W/stride)."""
    height, width = y.shape[-2:]
    maps = y.reshape(y.shape[0], -1, height, width)  # len() would fix the batch in torch.export
    traced = torch.compiler.is_compiling()  # e.g. by torch.export: the cache must not keep a tensor of the trace
    positions = (_grids.__wrapped__ if traced else _grids)(height, width, stride, y.device)[chosen]
    kept = maps.flatten(2).gather(2, positions[:, None].expand(-1, maps.shape[1], -1))
    return kept.reshape(*y.shape[:-2], height // stride, width // stride)


@cache
def _grids(height: int, width: int, stride: int, device: torch.device) -> Tensor:
    """The positions of each polyphase grid in a flat map: (stride^2, H W / stride^2)."""
    with torch.inference_mode(False), torch.device("cpu"):  # what is cached serves training too
        flat = torch.arange(height * width).reshape(height // stride, stride, width // stride, stride)
        return flat.permute(1, 3, 0, 2).reshape(stride**2, -1).to(device)


def conv_on_grid(x: Tensor, filters: Tensor, grid: Grid) -> Tensor:
    """``on_grid(circular_conv(x, filters))``, which is known everywhere as ``grid.full``: (B, C', H/stride, W/stride)."""
    return _ConvOnGrid.apply(x, filters, grid.full, grid.chosen, grid.stride)


class _ConvOnGrid(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, filters: Tensor, full: Tensor, chosen: Tensor, stride: int) -> Tensor:
        return on_grid(full, stride, chosen)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        x, filters, _, chosen, ctx.stride = inputs
        ctx.save_for_backward(x, filters, chosen)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, ...]:
        x, filters, chosen = ctx.saved_tensors
        form, of_x, of_filters = (x.shape[2], x.shape[3], ctx.stride, x.device), None, None
        if ctx.needs_input_grad[0]:
            of_x = _moved(_adjoint(g, filters, ctx.stride), _starts(*form, (0, 0), -1)[chosen])
        if ctx.needs_input_grad[1]:
            reach = (filters.shape[2] // 2, filters.shape[3] // 2)
            of_filters = conv2d_weight(_moved(x, _starts(*form, reach, 1)[chosen]), filters.shape, g, ctx.stride)
        return of_x, of_filters, None, None, None


def _moved(x: Tensor, positions: Tensor) -> Tensor:
    """The maps (B, C, H, W) at other positions for each sample, (B, H', W')."""
    index = positions.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, index).unflatten(2, positions.shape[1:])


@cache
def _starts(height: int, width: int, stride: int, device: torch.device, reach: tuple[int, int], sign: int) -> Tensor:
    """Positions that move each grid to the start of a map (sign 1) or back (-1), padded circularly: (stride^2, H', W')."""
    with torch.inference_mode(False), torch.device("cpu"):
        start = sign * torch.arange(stride)[:, None]
        rows = (torch.arange(-reach[0], height + reach[0]) + start) % height
        columns = (torch.arange(-reach[1], width + reach[1]) + start) % width
        return (rows[:, None, :, None] * width + columns[None, :, None, :]).flatten(0, 1).to(device)


def _adjoint(g: Tensor, filters: Tensor, stride: int) -> Tensor:
    """x[c, q] = sum over c', u of filters[c', c, u] g[c', p] for q = stride p + u, with u centred at 0; positions wrap around.

    On a CPU one product of all samples, whose terms are then added up, is two to ten times as fast as torch's convolution. On a GPU
    torch's is as fast as any on small maps, and up to 1.6 times as slow as ``_by_place`` on large ones.
    """
    if g.is_cuda:
        return (_by_place if g[:, 0].numel() >= LARGE else transposed)(g, filters, stride)
    flat = filters.flatten(1).mT @ g.transpose(0, 1).flatten(1)
    terms = flat.view(*filters.shape[1:], g.shape[0], *g.shape[2:])  # (C, height, width, B, H/stride, W/stride)
    return _added(_added(terms, stride), stride).transpose(0, 1)


def _by_place(g: Tensor, filters: Tensor, stride: int) -> Tensor:
    """The same: the stride^2 places q mod stride are channels of one convolution of g, with the few taps that a place has."""
    rows, columns, around, size = _taps(tuple(filters.shape[2:]), stride, (g.shape[2], g.shape[3]), g.device)
    every = F.pad(filters, (0, 1, 0, 1))[:, :, rows][..., columns]  # (C', C, stride, taps, stride, taps)
    by_place = every.permute(1, 2, 4, 0, 3, 5).reshape(-1, len(filters), rows.shape[1], columns.shape[1])
    return F.pixel_shuffle(F.conv2d(g.flatten(2).index_select(2, around).unflatten(2, size), by_place), stride)


@cache
def _taps(
    kernel: tuple[int, int], stride: int, size: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """By axis which offset of a filter each place has at each tap, (stride, taps), k where it has none; and positions of g that wrap."""
    offsets, reached = [], []
    with torch.inference_mode(False), torch.device("cpu"):
        for k, side in zip(kernel, size, strict=True):
            found = {divmod(u - k // 2, stride): u for u in range(k)}  # (by how far p moves, place)
            first, last = min(by for by, _ in found), max(by for by, _ in found)
            taps = [[found.get((-by, place), k) for by in range(-last, 1 - first)] for place in range(stride)]
            offsets.append(torch.tensor(taps, device=device))
            reached.append(torch.arange(-last, side - first) % side)
        around = (reached[0][:, None] * size[1] + reached[1]).flatten().to(device)
    return offsets[0], offsets[1], around, (len(reached[0]), len(reached[1]))


def _added(terms: Tensor, stride: int) -> Tensor:
    """y[..., q, ...] = sum of terms[:, u, ..., p, ...] over q = stride p + u: the offsets are axis 1, the positions axis 4."""
    sums: dict[int, Tensor] = {}
    for number in range(terms.shape[1]):
        by, place = divmod(number - terms.shape[1] // 2, stride)
        term = terms[:, number].roll(by, 3) if by else terms[:, number]
        sums[place] = sums[place] + term if place in sums else term
    every = [sums[place] if place in sums else torch.zeros_like(terms[:, 0]) for place in range(stride)]
    return torch.stack(every, 4).flatten(3, 4)
