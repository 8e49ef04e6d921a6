"""Paths: every linear map with its own prior.

Every path is one matrix, or K blocks of it, applied at S shared positions (the path law):

    path(x) == place(einsum("bski,koi->bsko", columns(x), weight), x)     weight: (K, out, in)
    <place(h, x), g> == <h, rows(g)>                                      rows is the adjoint of place

``columns`` and ``rows`` are the definition, and all that curvature needs; ``forward`` is the fast form of the same map.
(``place`` takes of ``x`` only its shape: the same convolution works on images of any size.)
What counts as a shared position is part of the definition: it fixes the Kronecker approximation.
What else is to be known of a path, it says itself, by values and methods that have a default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from autosym.linear.frames import Frame
from autosym.linear.groups import Group
from autosym.linear.plain import Convolution, Matrix, Plain, matrix_of
from autosym.linear.products import gram

BORDERS, INTERPOLATION = "borders and strides", "interpolation"


class Definition(Protocol):
    """The part of a path that curvature asks for."""

    def columns(self, x: Tensor) -> Tensor: ...

    def gram(self, x: Tensor) -> Tensor: ...

    def rows(self, g: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Kept:
    """What a linear map keeps: by default nothing.

    ``equivariant`` and ``invariant`` are to translations; a map that is constant in space is both. ``groups`` names the groups that it is
    equivariant to as well, its own first, then those within it. ``every``: whichever group it is, as for the mean over all positions.
    """

    equivariant: bool = False
    invariant: bool = False
    groups: tuple[str, ...] = ()
    every: bool = False

    def __contains__(self, group: str) -> bool:
        return self.every or group in self.groups

    def __and__(self, other: "Kept") -> "Kept":
        """What both keep."""
        common = tuple(group for group in self.groups or other.groups if group in self and group in other)
        translations = self.equivariant and other.equivariant, self.invariant and other.invariant
        return Kept(*translations, common, self.every and other.every)

    @property
    def group(self) -> str:
        """Its own group, if it has one."""
        return self.groups[0] if self.groups else ""


NOTHING = Kept()


class Path(nn.Module):
    """One linear map, ``weight`` of shape (K, out, in), under one prior."""

    weight: nn.Parameter
    start_size = 0.0  # of weights that were set to zero at the start: the root mean square they would have had
    in_shape: tuple[int, ...] | None = None  # of one input, if it takes no other
    takes: Group | None = None  # the group whose fields the input's channels are, if of any
    lifted: Group | None = None  # the group whose fields the output's channels are, if of any
    factored = False  # whether its map is multiplied by that of another path: Laplace depends on how it is factored
    understated = False  # whether its Kronecker curvature is smaller, against the exact one, than that of other paths

    def __init__(self, blocks: int, rows: int, columns: int, bound: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, rows, columns).uniform_(-bound, bound))

    @property
    def keeps(self) -> Kept:
        """Which symmetry the map has, whatever its weights: nothing, unless the path says so."""
        return NOTHING

    def size(self) -> float:
        """The size of the weights, in units of which relative steps are: their root mean square, or ``start_size``."""
        return float(self.weight.detach().square().mean().sqrt()) or self.start_size

    def columns(self, x: Tensor) -> Tensor:
        """The inputs of the matrix, (B, S, K, in)."""
        raise TypeError(f"{type(self).__name__} does not define columns")

    def gram(self, x: Tensor) -> Tensor:
        """sum over samples and positions of a a^T for the columns a of every block: (K, in, in)."""
        return gram(self.columns(x))

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        """Arrange the matrix's outputs (B, S, K, out) as the output of the path."""
        raise TypeError(f"{type(self).__name__} does not define place")

    def rows(self, g: Tensor) -> Tensor:
        """The adjoint of ``place``: a cotangent of the output, as (B, S, K, out)."""
        raise TypeError(f"{type(self).__name__} does not define rows")

    def forward(self, x: Tensor) -> Tensor:
        return self.place(torch.einsum("bski,koi->bsko", self.columns(x), self.weight), x)

    def definition(self, name: str) -> Callable[[Tensor], Definition] | None:
        """Given an input, the columns and rows of the parameter ``name``; None if the path does not define it."""
        return (lambda _: self) if name == "weight" else None

    def frame(self) -> Frame | None:
        """The coordinates that steps of the weights are taken in, if not in the weights themselves."""
        return None

    def limits(self) -> tuple[str, ...]:
        """Where it stands for a symmetry: up to what it is equivariant."""
        return ()

    def pictures(self) -> Tensor | None:
        """Its weights as maps (n, height, width), by its plain form if that needs no shape; None if they have no positions."""
        form = self.plain(None)
        if isinstance(form, Convolution):
            return form.filters.flatten(0, 1)
        return form.weight.reshape(-1, *form.in_shape[1:]) if isinstance(form, Matrix) and len(form.in_shape) == 3 else None

    def plain(self, in_shape: Sequence[int] | None) -> Plain | None:
        """What it is in plain torch, for inputs of one shape, if that is known: a dense matrix, or what a path says is smaller."""
        return matrix_of(self, in_shape)

    def parts(self) -> dict[str, tuple[str, ...]]:
        """As one of the paths of a relaxed layer: the parts of it that may be dropped, by the names of their paths."""
        return {"weights": ("",)}

    def offset(self) -> Tensor | None:
        """The bias that is added last: none."""
        return None


class Tangents:
    """A few scalars that enter a path non-linearly, seen through its derivatives in them: S = K = in = 1, so the block is exact.

    ``tangents`` (B, scalars, ...) are the derivatives of the output.
    """

    def __init__(self, tangents: Tensor):
        self.tangents = tangents

    def columns(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), 1, 1, 1)

    def gram(self, x: Tensor) -> Tensor:
        return x.new_full((1, 1, 1), len(x))

    def rows(self, g: Tensor) -> Tensor:
        return torch.einsum("bmo,bo->bm", self.tangents.flatten(2), g.flatten(1))[:, None, None]
