"""Adam's proximal step on a GPU, in three kernels.

    m <- beta m + (1 - beta) g,    v <- 0.999 v + 0.001 g^2,    w <- (w - rate m / unbiased / bound) / (1 + rate delta)

torch reads and writes all weights some twenty times for what ``Weights._move`` says; here every number is read when it is needed, and
two of the kernels end at the sums over paths that the next one begins with. A block of weights lies in one path. Its sums are kept, and
added in the same order by all who need them: equal steps are equal to the last bit. The kernels are in Triton, which comes with torch
where there is a GPU; where it does not, ``fused`` is None.
"""

import warnings
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from autosym.runtime import processes

BLOCK = 2048  # weights of one program
WARPS = 8


class FusedMoves:
    """``Weights._move`` of paths with ``counts`` weights, in the dtype and on the device of ``like``."""

    def __init__(self, kernels: SimpleNamespace, counts: Tensor, like: Tensor, momentum: float):
        blocks, starts = (counts + BLOCK - 1) // BLOCK, counts.cumsum(0) - counts
        path = torch.repeat_interleave(blocks)
        first = (blocks.cumsum(0) - blocks)[path]
        done = (torch.arange(len(path)) - first) * BLOCK  # of the path, by the blocks before
        rows = [starts[path] + done, (counts[path] - done).clamp_max(BLOCK), path, first, blocks[path], counts[path]]
        self.kernels, self.table = kernels, torch.stack(rows, 1).to(like.device)
        self.metrics, self.least, self.squares = (like.new_zeros(len(path)) for _ in range(3))
        self.beta, self.old = momentum, like.new_tensor([momentum, 0.999], dtype=torch.float64)

    def __call__(
        self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, delta: Tensor, lr: Tensor, rates: Tensor, steps: Tensor
    ) -> Tensor:
        """The new w; m and v change in place."""
        made, grid, size = self.kernels, (len(self.table),), {"BLOCK": BLOCK, "num_warps": WARPS}
        metrics, least, squares, table, moved = self.metrics, self.least, self.squares, self.table, torch.empty_like(w)
        start = self.old**steps  # what the moments still have of the zeros that they began with
        with torch.cuda.device_of(w):
            made.moments[grid](g, m, v, start, metrics, table, BETA=self.beta, **size)
            made.sizes[grid](m, v, start, metrics, least, squares, table, **size)
            made.move[grid](w, m, v, delta, moved, lr, rates, start, least, squares, table, **size)
        return moved


def fused(counts: Tensor, like: Tensor, momentum: float) -> FusedMoves | None:
    """Moves of weights like these on a GPU; None if they cannot be fused here, or in another process."""
    if not like.is_cuda or like.dtype not in (torch.float32, torch.float64) or not len(like):
        return None
    kernels = _compiled(like.dtype, like.device, momentum)
    lacking = like.new_tensor([kernels is None])
    if processes.count() > 1:  # all move alike: to the last bit
        processes.add(lacking)
    return None if kernels is None or bool(lacking) else FusedMoves(kernels, counts, like, momentum)


@cache
def _compiled(dtype: torch.dtype, device: torch.device, momentum: float) -> SimpleNamespace | None:
    """The kernels, after they have moved one weight: a step that has begun could not be left to others."""
    one = torch.ones(1, dtype=dtype, device=device)
    try:
        kernels = _kernels()
        if kernels is None:
            return None
        m, v, scalar = one.clone(), one.clone(), one[0].double()
        FusedMoves(kernels, torch.tensor([1]), one, momentum)(one, one, m, v, one, scalar, one, scalar)
    except Exception as error:  # of a compiler that is not there, or a GPU that it does not know
        warnings.warn(f"weights move by kernels of torch, which is slower: {error}", stacklevel=2)
        return None
    return kernels


@cache
def _kernels() -> SimpleNamespace | None:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def moments(g, m, v, start, metrics, table, BETA: tl.constexpr, BLOCK: tl.constexpr):
        """m and v of a block, and its sum of metrics."""
        row, lane = table + 6 * tl.program_id(0), tl.arange(0, BLOCK)
        here, there = tl.load(row) + lane, lane < tl.load(row + 1)
        new, second = tl.load(g + here, there, 0.0), tl.load(v + here, there, 0.0)
        tl.store(m + here, BETA * tl.load(m + here, there, 0.0) + (1 - BETA) * new, there)
        second += 0.001 * (new * new - second)
        tl.store(v + here, second, there)
        settled = (1 - tl.load(start + 1)).to(second.dtype)
        tl.store(metrics + tl.program_id(0), tl.sum(tl.sqrt(second / settled)))

    @triton.jit
    def sizes(m, v, start, metrics, least, squares, table, BLOCK: tl.constexpr):
        """The least metric of a block's path, and the block's sum of (m / metric)^2."""
        row, lane = table + 6 * tl.program_id(0), tl.arange(0, BLOCK)
        here, there = tl.load(row) + lane, lane < tl.load(row + 1)
        second, first, blocks = tl.load(v + here, there, 0.0), tl.load(row + 3), tl.load(row + 4)
        total, done = tl.zeros([BLOCK], second.dtype), 0
        while done < blocks:
            total += tl.load(metrics + first + done + lane, done + lane < blocks, 0.0)
            done += BLOCK
        low = 0.01 * (tl.sum(total) / tl.load(row + 5).to(second.dtype)) + 1e-8
        tl.store(least + tl.program_id(0), low)
        settled = (1 - tl.load(start + 1)).to(second.dtype)
        metric = tl.sqrt(second / settled)
        step = tl.load(m + here, there, 0.0) / tl.where(metric > low, metric, low)  # what is not a number stays so
        tl.store(squares + tl.program_id(0), tl.sum(step * step))

    @triton.jit
    def move(w, m, v, delta, moved, lr, rates, start, least, squares, table, BLOCK: tl.constexpr):
        """The new weights of a block."""
        row, lane = table + 6 * tl.program_id(0), tl.arange(0, BLOCK)
        here, there = tl.load(row) + lane, lane < tl.load(row + 1)
        second, first, blocks = tl.load(v + here, there, 0.0), tl.load(row + 3), tl.load(row + 4)
        total, done = tl.zeros([BLOCK], second.dtype), 0
        while done < blocks:
            total += tl.load(squares + first + done + lane, done + lane < blocks, 0.0)
            done += BLOCK
        unbiased = (1 - tl.load(start)).to(second.dtype)
        size = tl.sqrt(tl.sum(total) / tl.load(row + 5).to(second.dtype)) / unbiased
        bound = tl.where(size - 1 > 1e-5, size, 1.0)
        settled, low = (1 - tl.load(start + 1)).to(second.dtype), tl.load(least + tl.program_id(0))
        metric = tl.sqrt(second / settled)
        rate = tl.load(lr).to(second.dtype) * tl.load(rates + tl.load(row + 2)) / tl.where(metric > low, metric, low)
        new = tl.load(w + here, there, 0.0) - tl.load(m + here, there, 0.0) * rate / unbiased / bound
        shrink = 1 + tl.load(delta + here, there, 0.0) * rate
        # float32's / is rounded to one side or the other, which adds up over many steps
        new = tl.div_rn(new, shrink) if second.dtype == tl.float32 else new / shrink
        tl.store(moved + here, new, there)

    return SimpleNamespace(moments=moments, sizes=sizes, move=move)
