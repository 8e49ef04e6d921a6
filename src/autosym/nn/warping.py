"""Images moved by affine maps of the plane: out(p) = x(T^-1 p), and exp of their generators."""

import torch
import torch.nn.functional as F
from torch import Tensor


def grid(inverse: Tensor, height: int, width: int, unit: float | None = None) -> Tensor:
    """T^-1 p for every pixel p of an image: (N, H, W, 2), in halves of each side from the centre, as ``grid_sample`` wants it.

    T^-1 (N, 2 or 3, 3) acts on (x, y, 1), x to the right and y down, in units of ``unit`` pixels: half of the longer side by default.
    """
    unit = max(height, width) / 2 if unit is None else unit
    side = torch.stack([inverse.new_full((), n / (2 * unit)) for n in (width, height, 2 * unit)])
    theta = inverse[:, :2] * side / side[:2, None]
    return F.affine_grid(theta, [len(inverse), 1, height, width], align_corners=False)


def warped(x: Tensor, inverse: Tensor, padding: str = "zeros", unit: float | None = None) -> Tensor:
    """out(p) = x(T^-1 p) of images (N, C, H, W), for T^-1 as in ``grid``, in whose precision places are computed; bilinear."""
    places = grid(inverse, x.shape[-2], x.shape[-1], unit).to(x)
    return F.grid_sample(x, places, padding_mode=padding, align_corners=False)


def resampling(inverse: Tensor, height: int, width: int, padding: str) -> Tensor:
    """``warped`` as matrices R (N, HW in, HW out): out = x R, of products of hats max(0, 1 - |distance|) along rows and columns.

    Their derivative in T is one of plain products, without the scattered sums of that of ``grid_sample``, which are slow on a GPU.
    """
    hats = []
    for place, size in zip(grid(inverse, height, width).flatten(1, 2).unbind(-1), (width, height), strict=True):
        where = ((place + 1) * size - 1) / 2  # in pixels
        where = where.clamp(0, size - 1) if padding == "border" else where
        pixels = torch.arange(size, dtype=where.dtype, device=where.device)
        hats.append((1 - (where[:, None] - pixels[:, None]).abs()).relu())  # (N, size, HW out)
    across, down = hats
    return (down[:, :, None] * across[:, None]).flatten(1, 2)


def exponential(M: Tensor) -> Tensor:
    """exp of (S, 3, 3) by scaling and squaring, with a fixed number of terms: nothing waits for a GPU to choose it.

    In double precision it is exact up to rounding, for norms of up to two turns. (``noether.conserved.recordable_exponential`` is for
    phase spaces, in single precision, which takes fewer products.)
    """
    M, total = M / 2**8, torch.eye(3, dtype=M.dtype, device=M.device)
    term = total
    for n in range(1, 10):
        term = term @ M / n
        total = total + term
    for _ in range(8):
        total = total @ total
    return total
