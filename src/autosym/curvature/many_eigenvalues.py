"""Eigenvalues of many symmetric matrices of one size at a time, on a GPU.

    A -> Q^T A Q = T, tridiagonal (Householder)        eigenvalues of T by bisection (Sturm counts)

torch's solver takes one matrix after the other, and each leaves most of a GPU idle. Here all matrices take each step together. A step
reads every matrix once: its reflections (v, w), A <- A - v w^T - w v^T, are kept, and applied after every ``KEPT`` steps. All is in
float64. The kernels are in Triton, which comes with torch where there is a GPU; where it does not, ``eigenvalues`` is None.
"""

import warnings
from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

KEPT = 16  # reflections
BITS = 54  # bisections
ROWS, COLUMNS = 8, 256  # of a matrix, that one program has at a time
LANES = 128  # eigenvalues of one program
EXACT = 1e-9  # how far the sums of eigenvalues and of their squares may be from those of the matrix


def eigenvalues(matrices: Tensor) -> Tensor | None:
    """(B, n), ascending, of symmetric matrices (B, n, n) in float64 on a GPU; None if it cannot be done here.

    Sums that were made in float32 are symmetric to its rounding alone, and the kernels read both halves: theirs is the mean of the two.
    """
    kernels = _kernels()
    if kernels is None or not matrices.is_cuda or matrices.dtype != torch.float64:
        return None
    matrices = torch.lerp(matrices, matrices.mT, 0.5)
    trace, square = matrices.diagonal(dim1=1, dim2=2).sum(1), matrices.square().sum((1, 2))
    try:
        with torch.cuda.device(matrices.device):
            found = bisected(kernels, *tridiagonal(kernels, matrices))
    except Exception as error:  # of a compiler that is not there, or a GPU that it does not know: others can do it too
        warnings.warn(f"eigenvalues are found one matrix after the other, which is slower: {error}", stacklevel=2)
        return None
    if not agree(found, trace, square):
        warnings.warn(
            "eigenvalues that were found together are not those of their matrices, so they are found again", stacklevel=2
        )
        return None
    return found


def agree(found: Tensor, trace: Tensor, square: Tensor) -> bool:
    """Whether eigenvalues (B, n) have the traces and the squared Frobenius norms of their matrices."""
    traces = (found.sum(1) - trace).abs() <= EXACT * square.sqrt() * found.shape[1]
    return bool((traces & ((found.square().sum(1) - square).abs() <= EXACT * square)).all())


def tridiagonal(kernels: SimpleNamespace, A: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal (B, n) and the entries beside it (B, n), of which the first is 0; A is overwritten."""
    count, n = A.shape[:2]
    v, w = (A.new_zeros(count, KEPT + 1, n) for _ in range(2))
    product, d, beside, scale = A.new_zeros(count, n), A.new_zeros(count, n), A.new_zeros(count, n), A.new_zeros(count)
    block, kept = 1 << (n - 1).bit_length(), 0
    for column in range(n):
        kernels.reflect[(count,)](A, v, w, product, d, beside, scale, n, column, kept, KEPT=KEPT, BLOCK=block, num_warps=8)
        if column == n - 1:
            break
        first, full = (column + 1) // ROWS, kept == KEPT
        grid = (count, -(-n // ROWS) - first)
        kernels.multiply[grid](A, v, w, product, n, first, kept, full, KEPT=KEPT, ROWS=ROWS, COLUMNS=COLUMNS)
        if full:
            v[:, 0] = v[:, KEPT]
        kept = 1 if full else kept + 1
    return d, beside


def bisected(kernels: SimpleNamespace, d: Tensor, beside: Tensor) -> Tensor:
    """The eigenvalues (B, n) of tridiagonal matrices, ascending."""
    count, n = d.shape
    radius = beside.abs() + F.pad(beside.abs(), (0, 1))[:, 1:]
    low, high, found = (d - radius).amin(1), (d + radius).amax(1), torch.empty_like(d)
    kernels.bisect[(count, -(-n // LANES))](d, beside.square(), low, high, found, n, BITS, BLOCK=LANES)
    return found


@cache
def _kernels() -> SimpleNamespace | None:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit(do_not_specialize=["column", "kept"])
    def reflect(A, v, w, product, d, beside, scale, n, column, kept, KEPT: tl.constexpr, BLOCK: tl.constexpr):
        """Ends the last reflection (its w, by the product A v), and makes the one that clears ``column``."""
        matrix = tl.program_id(0).to(tl.int64)
        row = tl.arange(0, BLOCK)
        there = row < n
        v += matrix * (KEPT + 1) * n
        w += matrix * (KEPT + 1) * n
        if kept > 0:
            last = tl.load(v + (kept - 1) * n + row, there, 0.0)
            p = tl.load(product + matrix * n + row, there & (row >= column), 0.0)
            for k in range(kept - 1):
                one, other = tl.load(v + k * n + row, there, 0.0), tl.load(w + k * n + row, there, 0.0)
                p -= one * tl.sum(other * last) + other * tl.sum(one * last)
            tau = tl.load(scale + matrix)
            p = tl.where(row >= column, tau * p, 0.0)
            p -= 0.5 * tau * tl.sum(p * last) * last
            tl.store(w + (kept - 1) * n + row, p, there)
            tl.debug_barrier()
        c = tl.load(A + (matrix * n + column) * n + row, there & (row >= column), 0.0)
        for k in range(kept):
            one, other = tl.load(v + k * n + row, there, 0.0), tl.load(w + k * n + row, there, 0.0)
            c -= one * tl.load(w + k * n + column) + other * tl.load(v + k * n + column)
        tl.store(d + matrix * n + column, tl.sum(tl.where(row == column, c, 0.0)))
        if column < n - 1:
            x = tl.where(row > column, c, 0.0)
            first = tl.sum(tl.where(row == column + 1, x, 0.0))
            rest = tl.sum(tl.where(row == column + 1, 0.0, x * x))
            norm = tl.sqrt(first * first + rest)
            end = tl.where(rest > 0, tl.where(first < 0, norm, -norm), first)
            x = tl.where(row == column + 1, first - end, x)
            square = tl.where(rest > 0, (first - end) * (first - end) + rest, 1.0)
            tl.store(beside + matrix * n + column + 1, end)
            tl.store(scale + matrix, tl.where(rest > 0, 2.0 / square, 0.0))
            tl.store(v + kept * n + row, x, there)

    @triton.jit(do_not_specialize=["first", "kept", "full"])
    def multiply(A, v, w, product, n, first, kept, full, KEPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """product = A v for the newest v; if ``full``, all reflections before it are applied to A first."""
        matrix = tl.program_id(0).to(tl.int64)
        row = (first + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
        A += matrix * n * n
        v += matrix * (KEPT + 1) * n
        w += matrix * (KEPT + 1) * n
        total = tl.zeros([ROWS, COLUMNS], tl.float64)
        for start in range(first * ROWS, n, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            there = (row < n)[:, None] & (column < n)[None, :]
            a = tl.load(A + row[:, None] * n + column[None, :], there, 0.0)
            if full:
                for k in range(KEPT):
                    v_row, v_column = tl.load(v + k * n + row, row < n, 0.0), tl.load(v + k * n + column, column < n, 0.0)
                    w_row, w_column = tl.load(w + k * n + row, row < n, 0.0), tl.load(w + k * n + column, column < n, 0.0)
                    a -= v_row[:, None] * w_column[None, :] + w_row[:, None] * v_column[None, :]
                tl.store(A + row[:, None] * n + column[None, :], a, there)
            total += a * tl.load(v + kept * n + column, column < n, 0.0)[None, :]
        tl.store(product + matrix * n + row, tl.sum(total, 1), row < n)

    @triton.jit
    def bisect(d, squares, low, high, found, n, BITS, BLOCK: tl.constexpr):
        """Each eigenvalue by itself: x is above as many of them as the Sturm sequence of T - x has negative members."""
        matrix = tl.program_id(0).to(tl.int64)
        number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        below, above = tl.load(low + matrix), tl.load(high + matrix)
        least = (above - below) * 1e-30 + 1e-300
        a, b = below + tl.zeros([BLOCK], tl.float64), above + tl.zeros([BLOCK], tl.float64)
        for _ in range(BITS):
            x = (a + b) * 0.5
            q = tl.full([BLOCK], 1.0, tl.float64)
            count = tl.zeros([BLOCK], tl.int32)
            for i in range(n):
                q = tl.load(d + matrix * n + i) - x - tl.load(squares + matrix * n + i) / q
                q = tl.where(tl.abs(q) < least, -least, q)
                count += (q < 0).to(tl.int32)
            up = count <= number
            a, b = tl.where(up, x, a), tl.where(up, b, x)
        tl.store(found + matrix * n + number, (a + b) * 0.5, number < n)

    return SimpleNamespace(reflect=reflect, multiply=multiply, bisect=bisect)
