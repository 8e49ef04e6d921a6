"""Circular convolutions with centred filters, and correlations of a map with its own shifts."""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}  # by the dimensions of a map
SPREAD = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
FEW_POSITIONS = 4  # of a map, where one large product is two to three times as fast in float64 (2x2 maps, 48 to 96 channels)
GRADIENTS = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}  # in the filters


def wrap(x: Tensor, kernel_size: Sequence[int]) -> Tensor:
    """Pad the map (..., H, W), or of other dimensions, circularly, by as much as a centred filter reaches."""
    reach, size = tuple(k // 2 for k in kernel_size), tuple(x.shape[-len(kernel_size) :])
    if any(r > n for r, n in zip(reach, size, strict=True)):
        raise ValueError(f"a {'x'.join(map(str, kernel_size))} filter reaches around a map of {size} more than once")
    if not any(reach):
        return x
    if not x.is_cuda:
        return F.pad(x, [r for side in reversed(reach) for r in (side, side)], "circular")
    positions = _around(size, reach, x.device)  # one gather is one kernel; copying the sides takes two for each side, and one
    return x.flatten(-len(size)).index_select(-1, positions.flatten()).unflatten(-1, positions.shape)


@cache
def _around(size: tuple[int, ...], reach: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions in a flat map, padded circularly."""
    with torch.inference_mode(False), torch.device("cpu"):  # what is cached serves training too
        positions = torch.zeros((), dtype=torch.long)
        for n, r in zip(size, reach, strict=True):
            positions = positions[..., None] * n + torch.arange(-r, n + r) % n
        return positions.to(device)


def patches(
    x: Tensor, kernel_size: Sequence[int], stride: Sequence[int] | None = None, dilation: Sequence[int] | None = None
) -> Tensor:
    """What a filter sees at every position of a (padded) map, without a copy: (B, C, H', W', height, width)."""
    dims = len(kernel_size)
    stride, dilation = stride or (1,) * dims, dilation or (1,) * dims
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[-dims:], kernel_size, stride, dilation, strict=True)]
    along = x.stride()
    steps = [by * a for steps in (stride, dilation) for by, a in zip(steps, along[-dims:], strict=True)]
    return x.as_strided((*x.shape[:-dims], *sizes, *kernel_size), (*along[:-dims], *steps))


def circular_conv(x: Tensor, filters: Tensor) -> Tensor:
    """y[c', p] = sum_{c, u} filters[c', c, u] x[c, p + u] for u centred at 0; positions wrap around."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, filters = x.to(dtype), filters.to(dtype)
    return _CircularConv.apply(x, filters)


class _CircularConv(torch.autograd.Function):
    """The adjoint in x is a circular convolution too, with flipped filters. This is cheaper than undoing the padding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, filters: Tensor) -> Tensor:
        if x.dtype == torch.float64 and not x.is_cuda and x.shape[2:].numel() <= FEW_POSITIONS:
            return _as_product(wrap(x, filters.shape[2:]), filters)
        return CONVOLVE[x.dim() - 2](wrap(x, filters.shape[2:]), filters)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, filters = ctx.saved_tensors
        (wants_x, wants_filters), dims = ctx.needs_input_grad, x.dim() - 2
        adjoint = transposed if g.is_cuda else _flipped
        return (
            adjoint(g, filters) if wants_x else None,
            GRADIENTS[dims](wrap(x, filters.shape[2:]), filters.shape, g) if wants_filters else None,
        )


def _flipped(g: Tensor, filters: Tensor) -> Tensor:
    """The adjoint of ``circular_conv`` in x."""
    return circular_conv(g, filters.flip([*range(2, filters.dim())]).transpose(0, 1))


def transposed(g: Tensor, filters: Tensor, stride: int = 1) -> Tensor:
    """The same by torch's transposed convolution, without what lies outside of the map: on a GPU it takes two kernels less.

    With a ``stride`` the adjoint of the convolution that computes every stride-th position.
    """
    reach = [-(-(k // 2) // stride) for k in filters.shape[2:]]  # in positions of g
    cut = [k // 2 + stride * r for k, r in zip(filters.shape[2:], reach, strict=True)]
    return SPREAD[g.dim() - 2](wrap(g, [2 * r + 1 for r in reach]), filters, None, stride, cut, stride - 1)


def _as_product(padded: Tensor, filters: Tensor) -> Tensor:
    """The convolution of a padded map as one product of all patches. In float64 torch convolves sample by sample on a CPU."""
    seen = padded
    for axis, size in enumerate(filters.shape[2:], 2):
        seen = seen.unfold(axis, size, 1)  # (B, C, positions..., offsets...)
    dims = filters.dim() - 2
    sizes = seen.shape[2 : 2 + dims]
    order = (1, *range(2 + dims, seen.dim()), 0, *range(2, 2 + dims))
    product = filters.flatten(1) @ seen.permute(order).reshape(filters.shape[1:].numel(), -1)
    return product.view(-1, len(padded), *sizes).transpose(0, 1).contiguous()


def circular_correlations(x: Tensor, kernel_size: Sequence[int]) -> Tensor:
    """sum over samples and positions p of x[c, p + u] x[c', p + v], for all u, v of a filter; positions wrap around: (1, C k^2, C k^2).

    It depends on the lag u - v alone, and for all lags together it is the inverse Fourier transform of sum_b f_c conj(f_c'). The map has
    one small product for each frequency, in place of one for each lag, or of one of all patches. All lags take C^2 H W numbers, however
    few samples there are.
    """
    size, axes = x.shape[2:], tuple(range(2, x.dim()))
    waves = torch.fft.rfftn(x, dim=axes)
    f = waves.flatten(2).permute(2, 1, 0).contiguous()  # (frequencies, C, B)
    power = (f @ f.mH).permute(1, 2, 0).unflatten(2, waves.shape[2:])
    by_lag = torch.fft.irfftn(power, s=size, dim=axes).flatten(2)
    blocks = by_lag[:, :, _lags(size, tuple(kernel_size), x.device)]  # (C, C, k^2, k^2)
    whole = blocks.permute(0, 2, 1, 3).reshape(1, x.shape[1] * blocks.shape[2], -1)
    return (whole + whole.mT) / 2


@cache
def _lags(size: tuple[int, ...], kernel_size: tuple[int, ...], device: torch.device) -> Tensor:
    """The place of u - v in a flat map, for all u, v of a filter: (k^2, k^2)."""
    with torch.inference_mode(False), torch.device("cpu"):
        offsets = torch.cartesian_prod(*(torch.arange(k) for k in kernel_size)).reshape(-1, len(kernel_size))
        places = torch.zeros(len(offsets), len(offsets), dtype=torch.long)
        for n, u in zip(size, offsets.unbind(1), strict=True):
            places = places * n + (u[:, None] - u) % n
        return places.to(device)


def shifted_correlations(x: Tensor, kernel_size: tuple[int, int], padding_mode: str) -> Tensor:
    """sum over samples and positions p of x[c, p + u] x[c', p + v], for all u, v of a centred filter: (1, C k^2, C k^2).

    Away from the border it depends only on the lag v - u. With zero padding, p = q - u must lie in the map, which excludes some
    of the first or last rows and columns q. So compute one product per lag (half of them, by symmetry), and split it into zones
    of q that are included or excluded together: the interior, and each line within reach of a side.
    """
    channels, (height, width) = x.shape[1], x.shape[2:]
    reach = [k // 2 for k in kernel_size]
    x = x.transpose(0, 1).contiguous()  # (C, B, H, W)
    pad = (2 * reach[1], 2 * reach[1], 2 * reach[0], 2 * reach[0])
    padded = wrap(x, [4 * r + 1 for r in reach]) if padding_mode == "circular" else F.pad(x, pad)
    offsets = [(i, j) for i in range(-reach[0], reach[0] + 1) for j in range(-reach[1], reach[1] + 1)]
    zones = (
        [[slice(0, height)], [slice(0, width)]]
        if padding_mode == "circular"
        else [_zones(n, r) for n, r in zip((height, width), reach, strict=True)]
    )
    inner = [max(side, key=lambda zone: zone.stop - zone.start) for side in zones]
    own = {(i, j): x[..., rows, columns].flatten(1) for i, rows in enumerate(zones[0]) for j, columns in enumerate(zones[1])}
    flat = min(height, width) >= 24 * max(reach)  # then longer products, with the padding, cost less than copies
    if flat:  # only the inner zone is non-zero: a shift of the flat canvas is a slice, without a copy
        canvas = torch.zeros_like(padded)
        canvas[..., _moved(inner[0], pad[2]), _moved(inner[1], pad[0])] = x[..., inner[0], inner[1]]

    @cache
    def correlation(lag: tuple[int, int], i: int, j: int) -> Tensor:
        rows, columns = zones[0][i], zones[1][j]
        if flat and [rows, columns] == inner:
            return _lagged(canvas.flatten(1), padded.flatten(1), lag[0] * padded.shape[-1] + lag[1])
        moved = padded[..., _moved(rows, pad[2] + lag[0]), _moved(columns, pad[0] + lag[1])]
        return own[i, j] @ moved.flatten(1).mT

    totals: dict[tuple, Tensor] = {}  # by lag and included zones, which many pairs of offsets share
    place = torch.empty(len(offsets), len(offsets), dtype=torch.long)
    for a, u in enumerate(offsets):
        inside = tuple(
            (i, j)
            for i, rows in enumerate(zones[0])
            for j, columns in enumerate(zones[1])
            if padding_mode == "circular" or (_inside(rows, u[0], height) and _inside(columns, u[1], width))
        )
        for b, v in enumerate(offsets[a:], a):
            lag = (v[0] - u[0], v[1] - u[1])
            if (lag, inside) not in totals:
                first, *others = (correlation(lag, *zone) for zone in inside)
                totals[lag, inside] = sum(others, first)
            place[a, b] = list(totals).index((lag, inside))
            place[b, a] = -place[a, b] - 1  # the transpose of (a, b)
    blocks = torch.stack(list(totals.values()))
    blocks = torch.cat([blocks, blocks.flip(0).mT])[place.to(x.device)]  # (k^2, k^2, C, C)
    return blocks.permute(2, 0, 3, 1).reshape(1, channels * len(offsets), -1)


def _lagged(x: Tensor, y: Tensor, lag: int) -> Tensor:
    """sum over q of x[:, q] y[:, q + lag]^T."""
    size = x.shape[1] - abs(lag)
    first, second = max(0, -lag), max(0, lag)
    return x[:, first : first + size] @ y[:, second : second + size].mT


def _moved(zone: slice, by: int) -> slice:
    return slice(zone.start + by, zone.stop + by)


def _zones(size: int, reach: int) -> list[slice]:
    """Zones along one axis: each of the first and last ``reach`` lines, and all lines between them."""
    edge = [slice(i, i + 1) for i in range(reach)]
    return [*edge, slice(reach, size - reach), *(slice(size - reach + i, size - reach + i + 1) for i in range(reach))]


def _inside(zone: slice, offset: int, size: int) -> bool:
    """Whether p = q - offset lies in the map for all q of a zone."""
    return zone.start - offset >= 0 and zone.stop - offset <= size
