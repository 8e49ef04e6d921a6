"""Groups as data: the elements, their Cayley table, and their action on a grid.

An element is a matrix R and a circular shift t. It acts on an image by  (g x)(p) = x(g^-1 p),  g p = R p + t,  with pixels
counted from the centre of the grid. Generators define a new group: closure, inverses and the Cayley table follow.

    C4 = generated("c4", rotation(90))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Elements (n, 2, 2) and (n, 2) in float64, the identity first; ``size`` is the torus of its shifts, if it has shifts.

    Coordinates are (right, up), so rotations turn counter-clockwise. Elements are sorted by angle, with reflections last. A
    subgroup of rotations then acts on each half of a dihedral group as on its own elements.
    """

    name: str
    matrices: Tensor
    shifts: Tensor
    size: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.matrices)

    @property
    def exact(self) -> bool:
        """Whether it maps a square grid onto itself. If not, images are interpolated and equivariance is approximate."""
        return bool((self.matrices.abs().round() - self.matrices.abs()).abs().max() < 1e-9)

    @cached_property
    def table(self) -> Tensor:
        """The Cayley table: ``table[g, h]`` is the index of g h."""
        n = len(self)
        matrices = self.matrices[:, None] @ self.matrices[None]
        shifts = (self.matrices[:, None] @ self.shifts[None, :, :, None])[..., 0] + self.shifts[:, None]
        with torch.device("cpu"):  # a group stays on the CPU, also if a network is built on another device
            return torch.tensor([[self._index(matrices[g, h], shifts[g, h]) for h in range(n)] for g in range(n)])

    @cached_property
    def inverse(self) -> Tensor:
        """The index of every element's inverse."""
        return (self.table == 0).nonzero()[:, 1]

    def act(self, g: int, x: Tensor) -> Tensor:
        """g x for an image, or a batch of images, (..., H, W)."""
        self.check_size(x.shape[-2:])
        height, width = x.shape[-2:]
        matrix = self.matrices[g]
        if not torch.equal(matrix, torch.eye(2, dtype=torch.float64, device="cpu")):
            index, weight = sources(matrix, height, width)
            x = (x.flatten(-2)[..., index.to(x.device)] * weight.to(x)).sum(-2).reshape(x.shape)
        right, up = (int(s) for s in self.shifts[g].round())
        return x.roll((-up, right), (-2, -1)) if right or up else x

    def act_on_features(self, g: int, x: Tensor) -> Tensor:
        """g f for lifted features (B, C |G|, H, W): (g f)(h, p) = f(g^-1 h, g^-1 p)."""
        lifted = self.act(g, x).unflatten(1, (-1, len(self)))
        return lifted[:, :, self.table[self.inverse[g]]].flatten(1, 2)

    def elements(self, other: "Group") -> Tensor | None:
        """The index in this group of every element of ``other``; None if ``other`` is not within it."""
        near = (self.matrices - other.matrices[:, None]).abs().amax((2, 3)) + (self.shifts - other.shifts[:, None]).abs().amax(
            2
        )
        return near.argmin(1) if bool((near.amin(1) < 1e-6).all()) else None

    def nests(self, other: "Group") -> bool:
        """Whether ``other`` acts on every block of len(other) consecutive elements of this group as on its own elements."""
        found = self.elements(other)
        if found is None:
            return False
        stretches = torch.arange(0, len(self), len(other), device="cpu")[:, None]
        return all(torch.equal(self.table[g], (stretches + other.table[h]).flatten()) for h, g in enumerate(found))

    def check_size(self, size: Sequence[int]) -> None:
        """Refuse grids that the group does not act on."""
        height, width = size
        if height != width and (self.matrices[:, 0, 1].abs() > 1e-9).any():
            raise ValueError(
                f"{self.name} turns images, so they must be square, but this one is {height}x{width}: crop or pad it, or leave "
                f"{self.name} out"
            )
        if self.size is not None and self.size != (height, width):
            raise ValueError(f"{self.name} shifts on a torus of {self.size}, but this image is {height}x{width}")

    def _index(self, matrix: Tensor, shift: Tensor) -> int:
        if self.size is not None:
            shift = torch.remainder(shift.round(), torch.tensor([self.size[1], self.size[0]]))
        near = (self.matrices - matrix).abs().amax((1, 2)) + (self.shifts - shift).abs().amax(1)
        index = int(near.argmin())
        if near[index] > 1e-6:
            raise ValueError(f"{self.name} is not a group: a product of two elements is not among its {len(self)} elements")
        return index


def rotation(degrees: float) -> Tensor:
    """The matrix that turns (right, up) counter-clockwise."""
    angle = math.radians(degrees)
    matrix = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    return torch.where(matrix.abs() < 1e-12, 0.0, torch.where((matrix.abs() - 1).abs() < 1e-12, matrix.sign(), matrix))


def generated(name: str, *generators: Tensor) -> Group:
    """The finite group that 2x2 matrices generate."""
    elements = [torch.eye(2, dtype=torch.float64)]
    for element in elements:  # the list grows during the loop
        for generator in generators:
            product = generator @ element
            if all((product - known).abs().max() > 1e-6 for known in elements):
                elements.append(product)
            if len(elements) > 64:
                raise ValueError(f"the generators of {name} give more than 64 elements: not a group for a grid")

    def order(matrix: Tensor) -> tuple[bool, float]:
        return float(torch.linalg.det(matrix)) < 0, math.atan2(matrix[1, 0], matrix[0, 0]) % (2 * math.pi - 1e-9)

    elements.sort(key=order)
    return Group(name, torch.stack(elements), torch.zeros(len(elements), 2, dtype=torch.float64))


def translations(height: int, width: int) -> Group:
    """All circular shifts of a height x width grid."""
    with torch.device("cpu"):
        up, right = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        shifts = torch.stack([right, up], -1).reshape(-1, 2).double()
        return Group("translations", torch.eye(2, dtype=torch.float64).expand(len(shifts), 2, 2), shifts, (height, width))


def with_translations(group: Group, height: int, width: int) -> Group:
    """The semidirect product of a point group with all circular shifts (p4 of C4, p4m of D4)."""
    shifts = translations(height, width)
    group.check_size((height, width))
    matrices = group.matrices.repeat_interleave(len(shifts), 0)
    return Group(f"{group.name} with translations", matrices, shifts.shifts.repeat(len(group), 1), (height, width))


def sources(matrix: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Where g x reads x: (g x)(p) = x(g^-1 p) = sum_i weight[i, p] x(index[i, p]), bilinear, zero outside of the grid.

    Index and weight are (1, HW) for a matrix that maps the grid onto itself, else (4, HW).
    """
    with torch.device("cpu"):  # a group stays there, whatever torch.set_default_device says
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        points = torch.stack([column - (width - 1) / 2, (height - 1) / 2 - row], -1).reshape(-1, 2).double()
        source = points @ torch.linalg.inv(matrix).mT
        place = torch.stack([(height - 1) / 2 - source[:, 1], source[:, 0] + (width - 1) / 2], -1)
        exact = bool((place - place.round()).abs().max() < 1e-9)
        place = place.round() if exact else place
        corners = place.floor() + torch.tensor([[0, 0]] if exact else [[0, 0], [0, 1], [1, 0], [1, 1]])[:, None]
        inside = ((corners >= 0) & (corners < torch.tensor([height, width]))).all(-1)
        weight = torch.where(inside, (1 - (place - corners).abs()).clamp_min(0).prod(-1), 0.0)
        index = corners[..., 0].clamp(0, height - 1) * width + corners[..., 1].clamp(0, width - 1)
    return index.long(), weight


def grid_action(matrix: Tensor, height: int, width: int) -> Tensor:
    """The (HW, HW) matrix A with (g x)(p) = sum_q A[p, q] x(q)."""
    index, weight = sources(matrix, height, width)
    action = torch.zeros(height * width, height * width, dtype=torch.float64, device="cpu")
    for i, w in zip(index, weight, strict=True):
        action[torch.arange(len(i), device="cpu"), i] += w
    return action


FLIP_HORIZONTAL = torch.tensor([[-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
FLIP_VERTICAL = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)

GROUPS = {
    "c2": generated("c2", rotation(180)),
    "c4": generated("c4", rotation(90)),
    "d4": generated("d4", rotation(90), FLIP_VERTICAL),
    "flip-horizontal": generated("flip-horizontal", FLIP_HORIZONTAL),
    "flip-vertical": generated("flip-vertical", FLIP_VERTICAL),
    "c8": generated("c8", rotation(45)),  # interpolates, so equivariance is approximate
}


def nested(group: Group) -> tuple[str, ...]:
    """Names of the groups that a map over ``group`` is equivariant to: its own, and those of ``GROUPS`` within it, largest first."""
    within = [other for other in GROUPS.values() if group.elements(other) is not None]
    return tuple(dict.fromkeys([group.name, *(other.name for other in sorted(within, key=len, reverse=True))]))
