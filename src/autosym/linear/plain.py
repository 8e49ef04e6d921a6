"""What a linear map is in plain torch: four kinds of value, of which those of one kind can be added up (``harden``)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LARGEST = 2**28  # weights of a matrix that is made of a map by itself


@dataclass(frozen=True, eq=False)
class Matrix:
    """``weight`` (out, in) of flattened inputs, and, where there is one, a flat ``constant`` that goes with it."""

    weight: Tensor
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    constant: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Pooled:
    """``weight`` (out, C) of the mean over ``positions`` of flattened maps (B, C P)."""

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
    """``filters`` (C', C / groups, height, width); ``padding`` is (left, right, top, bottom). Sequences are maps of height 1."""

    filters: Tensor
    padding: tuple[int, int, int, int]
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    padding_mode: str = "circular"
    sequences: bool = False

    @property
    def form(self) -> tuple:
        """What convolutions must have in common to be one."""
        kernel = tuple(self.filters.shape[-2:])
        return kernel, self.stride, self.padding, self.dilation, self.groups, self.padding_mode, self.sequences


Plain = Matrix | Pooled | Factors | Convolution


def units(in_shape: Sequence[int], like: Tensor) -> Tensor:
    """The unit vectors of inputs of one shape, as a batch."""
    size = math.prod(in_shape)
    return torch.eye(size).to(like).reshape(size, *in_shape)


@torch.no_grad()
def matrix_of(affine: nn.Module, in_shape: Sequence[int] | None, offset: Tensor | None = None) -> Matrix | None:
    """W and c of any map W x + c + offset, by what it makes of zero and of unit vectors; None if the shape of x is not known."""
    if in_shape is None:
        return None
    name, like, size = type(affine).__name__, next(affine.parameters()), math.prod(in_shape)
    some = torch.arange(size).to(like).cos()
    at_zero, at_some = affine(torch.stack([torch.zeros_like(some), some]).reshape(2, *in_shape))
    if size * at_zero.numel() > LARGEST:
        raise ValueError(
            f"{name} of inputs {tuple(in_shape)} would be a dense layer of {size * at_zero.numel()} weights: write its plain(), "
            "in a smaller form (autosym.linear.plain)"
        )
    weight = (affine(units(in_shape, like)) - at_zero).flatten(1).mT
    error = (weight @ some - (at_some - at_zero).flatten()).abs().max()
    if not error <= 1e-3 * (at_some.abs().max() + at_zero.abs().max()):
        raise ValueError(f"{name} is not linear in its input, up to a constant: keep what is not linear out of a relaxed layer")
    constant = (at_zero if offset is None else at_zero - offset).flatten()
    return Matrix(weight, tuple(in_shape), tuple(at_zero.shape), constant if constant.any() else None)
