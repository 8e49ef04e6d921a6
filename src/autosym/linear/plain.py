"""Linear maps in plain torch: five kinds. ``harden`` adds up maps of the same kind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CHUNK = 2**24  # numbers of unit vectors at a time
LARGEST = 2**28  # most weights of a matrix that ``matrix_of`` computes


@dataclass(frozen=True, eq=False)
class Matrix:
    """``weight`` (out, in) for flattened inputs, and optionally a flat ``constant`` that belongs to it."""

    weight: Tensor
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    constant: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Pooled:
    """``weight`` (out, C) applied to the mean over ``positions`` of flattened maps (B, C P)."""

    weight: Tensor
    positions: int


@dataclass(frozen=True, eq=False)
class Factors:
    """theta_1 (theta_2 x + b_2) with theta_2: (C, C', P), b_2: (C', 1), theta_1: (C', P', C) (Eq. 5)."""

    theta_2: Tensor
    b_2: Tensor
    theta_1: Tensor
    out_shape: tuple[int, ...]

    @property
    def constant(self) -> Tensor:
        """What the inner bias adds to every output, flat."""
        return (self.theta_1.sum(2) * self.b_2).flatten()


@dataclass(frozen=True, eq=False)
class Convolution:
    """``filters`` (C', C / groups, height, width), or of other dimensions; ``padding`` is (left, right, top, bottom), last axis first.

    ``stride`` and ``dilation`` have one number for each axis, or are () for 1.
    """

    filters: Tensor
    padding: tuple[int, ...]
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "circular"

    @property
    def form(self) -> tuple:
        """What convolutions must have in common to be added up."""
        kernel = tuple(self.filters.shape[2:])
        ones = (1,) * len(kernel)
        return kernel, self.stride or ones, self.padding, self.dilation or ones, self.groups, self.padding_mode


@dataclass(frozen=True, eq=False)
class Modulated:
    """sum_k phi_k(p) (W_k * x)(p): ``convolution`` has the filters of all k, by group, then k; ``phi`` is (K, *size)."""

    convolution: Convolution
    phi: Tensor


Plain = Matrix | Pooled | Factors | Convolution | Modulated


def units(in_shape: Sequence[int], like: Tensor, which: Tensor | None = None) -> Tensor:
    """Unit vectors of shape ``in_shape``, as a batch: all of them, or those at the places ``which``."""
    size = math.prod(in_shape)
    which = torch.arange(size) if which is None else which
    found = torch.zeros(len(which), size).to(like)
    found[torch.arange(len(which)), which] = 1
    return found.reshape(-1, *in_shape)


@torch.no_grad()
def matrix_of(affine: nn.Module, in_shape: Sequence[int] | None, offset: Tensor | None = None) -> Matrix | None:
    """W and c of any map W x + c + offset, from its outputs for zero and unit vectors. None if ``in_shape`` is not known."""
    if in_shape is None:
        return None
    name, like, size = type(affine).__name__, next(affine.parameters()), math.prod(in_shape)
    some = torch.arange(size).to(like).cos()
    at_zero, at_some = affine(torch.stack([torch.zeros_like(some), some]).reshape(2, *in_shape))
    if size * at_zero.numel() > LARGEST:
        raise ValueError(
            f"{name} of inputs {tuple(in_shape)} would be a dense layer of {size * at_zero.numel()} weights, too many: "
            "write its plain() in a smaller form (autosym.linear.plain)"
        )
    parts = torch.arange(size).split(max(1, CHUNK // size))  # not all unit vectors at a time: they are size^2 numbers
    weight = torch.cat([affine(units(in_shape, like, part)) - at_zero for part in parts]).flatten(1).mT
    error = (weight @ some - (at_some - at_zero).flatten()).abs().max()
    if not error <= max(1e-3, 8 * torch.finfo(like.dtype).eps) * (at_some.abs().max() + at_zero.abs().max()):
        raise ValueError(
            f"{name} is not linear in its input, up to a constant: move the non-linear part out of the relaxed layer"
        )
    constant = (at_zero if offset is None else at_zero - offset).flatten()
    return Matrix(weight, tuple(in_shape), tuple(at_zero.shape), constant if constant.any() else None)
