"""Block matrix products whose memory layout avoids copies, and sums of outer products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def fast_products(wanted: bool = True) -> Iterator[None]:
    """On a GPU, compute matrix products on tensor cores (TF32, ten bits): for training, not for measurements.

    It does nothing if ``torch.backends.cuda.matmul.fp32_precision`` is "ieee".
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if not wanted or before == "ieee":
        yield
        return
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def factored_in(x: Tensor, weight: Tensor) -> Tensor:
    """h[b,d,c] = sum_s weight[c,d,s] x[b,c,s]: (B, C, S) to (B, D, C)."""
    return _In.apply(*_same(x, weight))


def factored_out(h: Tensor, weight: Tensor) -> Tensor:
    """y[b,d,t] = sum_c weight[d,t,c] h[b,d,c]: (B, D, C) to (B, D, T)."""
    return _Out.apply(*_same(h, weight))


def _same(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to the precision of autocast, if it is on: derivatives run without it, in the precision of saved tensors."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        return x.to(dtype), weight.to(dtype)
    return x, weight


def _along(product: Product, operands: tuple[Tensor, Tensor], tangents: tuple[Tensor | None, ...]) -> Tensor:
    """The derivative of a bilinear product along tangents of its operands; one of them may be None."""
    (x, weight), (dx, dweight) = operands, tangents
    terms = [product(*pair) for pair in ((dx, weight), (x, dweight)) if all(t is not None for t in pair)]
    return sum(terms[1:], terms[0])


# The blocks of one product run over c, of the other over d. A layout of h for one would make the other copy h and its gradient.
# With samples next to each other in memory, both read rows or columns without gaps.


class _Bilinear(torch.autograd.Function):
    """A product that saves both operands, for derivatives in forward and reverse mode."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


class _In(_Bilinear):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (weight @ x.permute(1, 2, 0)).permute(2, 1, 0)

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None) -> Tensor:
        return _along(factored_in, ctx.saved_tensors, tangents)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            (g.permute(2, 0, 1) @ weight).transpose(0, 1) if ctx.needs_input_grad[0] else None,
            g.permute(2, 1, 0) @ x.transpose(0, 1) if ctx.needs_input_grad[1] else None,
        )


class _Out(_Bilinear):
    @staticmethod
    def forward(h: Tensor, weight: Tensor) -> Tensor:
        return (h.transpose(0, 1) @ weight.mT).transpose(0, 1)

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None) -> Tensor:
        return _along(factored_out, ctx.saved_tensors, tangents)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        h, weight = ctx.saved_tensors
        return (
            (weight.mT @ g.permute(1, 2, 0)).permute(2, 0, 1) if ctx.needs_input_grad[0] else None,
            g.permute(1, 2, 0) @ h.transpose(0, 1) if ctx.needs_input_grad[1] else None,
        )


def gram(t: Tensor) -> Tensor:
    """sum over samples and positions of outer products: (B, S, K, d) -> (K, d, d)."""
    if t.shape[2] > 1 and t.stride(2) == 0:  # all blocks are one
        return gram(t[:, :, :1]).expand(t.shape[2], -1, -1)
    if t.shape[2] == 1 and t.shape[1] > t.shape[3]:  # sample by sample: positions may stay where they are in memory
        t = t[:, :, 0]
        return (t.mT @ t).sum(0, keepdim=True)
    if t.shape[2] == 1 and t.stride(1) < t.stride(3):  # positions are next to each other in memory: keep this layout
        t = t[:, :, 0].permute(2, 0, 1).flatten(1)
        return (t @ t.mT)[None]
    t = t.permute(2, 0, 1, 3).flatten(1, 2)
    if not in_strips(t):
        return t.mT @ t
    return mirrored(add_gram(t.new_zeros(1, t.shape[2], t.shape[2]), t))


def add_gram(total: Tensor, t: Tensor) -> Tensor:
    """total += t^T t for (K, n, d), in place. For large d on a CPU only the upper triangle, in strips (see ``mirrored``)."""
    if not in_strips(t):
        return total.baddbmm_(t.mT, t)
    for start in range(0, t.shape[2], STRIP):
        total[0, start : start + STRIP, start:].addmm_(t[0, :, start : start + STRIP].mT, t[0, :, start:])
    return total


def mirrored(total: Tensor) -> Tensor:
    """Complete symmetric matrices (K, d, d), in place, from their upper triangles. Complete ones, as on a GPU, do not change."""
    for start in () if total.is_cuda else range(STRIP, total.shape[2], STRIP):
        total[:, start:, start - STRIP : start] = total[:, start - STRIP : start, start:].mT
    return total


STRIP = 128  # columns of a symmetric product at a time


def in_strips(t: Tensor) -> bool:
    """Whether to compute only half of a symmetric product: if arithmetic dominates the cost."""
    return t.shape[0] == 1 and t.shape[2] > 2 * STRIP and not t.is_cuda
