"""Averaging a model over transformations drawn from a learned distribution (Learning Invariant Weights, Eqs. 1 to 6).

    f(x) = 1/S sum_s g(T_s x),      T_s = exp(sum_i eps_si eta_i G_i),      eps uniform on [-1, 1]^k

G_i are the generators of the affine group and eta_i >= 0 the widths: 0 is no invariance, rotation is full at pi. The widths are
hyperparameters: they enter the forward pass and are learned by evidence (``evidence.differentiable``), which ``fit`` does. By training
loss they would shrink to nothing. The draws eps are state, the same for every sample of a batch: a sample's output never depends on its
batchmates, and evidence at fixed draws is a function that can be differentiated.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.nn.warping import exponential, resampling, warped
from autosym.runtime.batching import check_module

Symmetry = str | Iterable[str] | Mapping[str, float]
Where = Literal["input", "weights"]
Padding = Literal["zeros", "border"]

# Entries (row, column) of the generators, 3x3 matrices on (x, y, 1): x to the right; y down in images, where rotation is about the centre.
GENERATORS: dict[str, dict[tuple[int, int], float]] = {
    "x-translation": {(0, 2): 1},
    "y-translation": {(1, 2): 1},
    "rotation": {(0, 1): -1, (1, 0): 1},
    "x-scale": {(0, 0): 1},
    "y-scale": {(1, 1): 1},
    "shear": {(0, 1): 1, (1, 0): 1},
}
SETS = {
    "translation": ("x-translation", "y-translation"),
    "scale": ("x-scale", "y-scale"),
    "affine": tuple(GENERATORS),
}
START = 0.1  # of a width: at 0 the evidence has no slope, as T and its inverse are equally likely
LIMITS = {"rotation": math.pi}  # a turn by more is one by less
MOST = 1024  # points of a grid, copies of every sample
LARGEST = 4096  # pixels of an image whose resampling is held as a matrix


@dataclass(frozen=True)
class Range:
    """How far one transformation goes: ``width`` is eta, ``value`` the same in ``unit``."""

    name: str
    width: float
    value: float
    unit: str

    def __str__(self) -> str:
        much = f"by up to {self.value:.3g}" if self.unit == "factor" else f"±{self.value:.3g} {self.unit}"
        return f"{self.name} {much}"


class Transformations(nn.Module):
    """p_eta(T): T = exp(sum_i eps_i eta_i G_i). ``widths()`` is eta; ``draws`` are the eps (S, k) in use.

    eta = softplus(raw) is positive. Coordinates of images are measured from their centre in halves of their longer side, so that a rotation
    is one on images that are no squares, too; planar coordinates (B, 2) are taken as they are. A width of 0 is left out: it stays 0.
    """

    draws: Tensor
    generators: Tensor
    limits: Tensor

    def __init__(self, symmetry: Symmetry, samples: int = 31, padding: Padding = "zeros", learn: bool = True):
        super().__init__()
        widths = _widths(symmetry)
        if samples < 1:
            raise ValueError(f"samples, the copies to average over, must be at least 1, got {samples}")
        if padding not in ("zeros", "border"):
            raise ValueError(f"padding {padding!r} is not 'zeros' or 'border': what images are outside of their frame")
        self.names, self.samples = tuple(name for name in widths if widths[name] > 0), samples
        self.lattice = _lattice(samples, len(self.names))
        self.padding, self.learn = padding, learn
        start = torch.tensor([widths[name] for name in self.names], dtype=torch.float64)
        # A hyperparameter, not a weight: frozen, so that optimisers of weights, priors and curvature leave it alone.
        self.raw = nn.Parameter((start + torch.log(-torch.expm1(-start))).float(), requires_grad=False)
        self.register_buffer("generators", _generators(self.names), persistent=False)
        limits = torch.tensor([LIMITS.get(name, math.inf) for name in self.names], dtype=torch.float64)
        self.register_buffer("limits", limits, persistent=False)
        self.register_buffer("draws", torch.empty(0), persistent=False)
        self.settle()
        self.size: tuple[int, int] | None = None  # height and width of the images seen last

    def widths(self) -> Tensor:
        """eta (k,), in the order of ``names``, in float64: radians, halves of the longer side, logarithms of factors."""
        return torch.minimum(F.softplus(self.raw.double()), self.limits.double())

    @torch.no_grad()
    def limit(self) -> None:
        """Bring ``raw`` back to just before widths end, after a step: beyond it there is no slope that would lead back."""
        self.raw.copy_(torch.minimum(self.raw, self.limits.expm1().log().to(self.raw) - 1e-6))

    def redraw(self, seed: int) -> None:
        """New draws, by a seed: a lattice with a random shift. Each of them is uniform, and together they cover the cube evenly."""
        shift = torch.rand(len(self.names), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._set(2 * ((self.lattice + shift) % 1) - 1)

    def settle(self) -> None:
        """The lattice without a random shift: the same draws every time, for inference. Of one generator they are an even grid."""
        self._set(2 * self.lattice - 1)

    def grid(self, points: int) -> None:
        """Deterministic draws for inference: ``points`` in every dimension, in the middle of even parts of [-1, 1]."""
        count = points ** len(self.names) if points >= 1 else 0
        if not 1 <= count <= MOST:
            raise ValueError(
                f"a grid of {points} points in each of {len(self.names)} dimensions has {count} of them, outside of 1 to {MOST}: "
                "take fewer, or settle(), whose number does not grow with dimensions"
            )
        line = (2 * torch.arange(points, dtype=torch.float64) + 1) / points - 1
        self._set(torch.cartesian_prod(*[line] * len(self.names)).reshape(count, len(self.names)))

    def matrices(self, draws: Tensor | None = None) -> Tensor:
        """T for every row of ``draws`` (S, k), by default those in use: (S, 3, 3) in float64, differentiable in ``raw``."""
        draws = self.draws if draws is None else draws
        return exponential(torch.einsum("sk,kij->sij", draws.double() * self.widths(), self.generators.double()))

    def forward(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """T_s x for every draw: images (B, C, H, W) as (B, S, C, H, W), coordinates (B, 2) as (B, S, 2).

        What is at p in x is at T p in T x; between pixels images are bilinear.
        """
        draws = self.draws if draws is None else draws
        if self.check(x) == "coordinates":
            T = self.matrices(draws).to(x)
            return torch.einsum("sij,bj->bsi", T[:, :2, :2], x) + T[:, :2, 2]
        return self._resampled(x, draws)

    def adjoint(self, x: Tensor) -> Tensor:
        """R_s^T x for every draw, (B, S, C, H, W): what a first layer sees whose weight images are resampled, R_s w, in place of x.

        <R_s w, x> = <w, R_s^T x> is exact, whereas resampling the inputs, <w, R_s^-1 x>, agrees with it up to interpolation and up to
        |det T|, the change of a pixel's area. Of coordinates, where nothing is interpolated, W (T x) is the same in both forms.
        """
        if self.check(x) == "coordinates":
            return self(x)
        height, width = x.shape[-2:]
        if height * width > LARGEST:
            raise ValueError(
                f"images of {height}x{width} have more than the {LARGEST} pixels of which where='weights' holds maps: resize them, "
                "or use where='input'"
            )
        R = resampling(self.matrices(-self.draws).to(x), height, width, self.padding)
        return torch.einsum("bcp,sqp->bscq", x.flatten(2), R).reshape(len(x), -1, *x.shape[1:])

    def ranges(self) -> dict[str, Range]:
        """What the widths are in degrees, pixels (where images were seen) and factors, by name."""
        half = max(self.size) / 2 if self.size else None
        return {name: _range(name, w, half) for name, w in zip(self.names, self.widths().detach().tolist(), strict=True)}

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.ranges().values())) or 'none'}; samples={self.samples}"

    def _resampled(self, x: Tensor, draws: Tensor) -> Tensor:
        """Images by every draw. The grid is one for all samples, which are its channels."""
        flat = x.reshape(1, -1, *x.shape[2:]).expand(len(draws), -1, -1, -1)
        return warped(flat, self.matrices(-draws), self.padding).unflatten(1, x.shape[:2]).transpose(0, 1)

    def check(self, x: Tensor) -> str:
        """What inputs are, "images" or "coordinates"; others are refused."""
        if not x.is_floating_point():
            raise ValueError(f"inputs are {x.dtype}: convert them to floating point")
        if x.dim() == 4:
            self.size = (x.shape[2], x.shape[3])
            return "images"
        if x.dim() == 2 and x.shape[1] == 2:
            return "coordinates"
        raise ValueError(
            f"inputs {tuple(x.shape)} are neither images (B, C, H, W) nor coordinates in the plane (B, 2), which these transformations "
            "move: give flattened images their shape, x.reshape(-1, C, H, W), and flatten them in the model"
        )

    def _set(self, draws: Tensor) -> None:
        """In place where there are as many: a recorded CUDA graph goes on reading them."""
        if self.draws.shape == draws.shape:
            self.draws.copy_(draws)
        else:
            self.draws = draws.to(self.raw.device)


class Symmetrised(nn.Module):
    """f(x) = 1/S sum_s g(T_s x), for the ``model`` g. Made by ``symmetrise``.

    ``transformations`` holds widths and draws: ``redraw(seed)`` before a training step, ``settle()`` or ``grid(points)`` for inference.
    """

    def __init__(self, model: nn.Module, transformations: Transformations, where: Where = "input"):
        super().__init__()
        if where not in ("input", "weights"):
            raise ValueError(f"where {where!r} is not 'input' or 'weights'")
        self.model, self.transformations, self.where = model, transformations, where

    @property
    def copies(self) -> int:
        """How many copies of every sample the inner model sees, next to each other in its batch."""
        return len(self.transformations.draws) if self.transformations.names else 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.transformations.names:
            return self.model(x)
        moved = self.transformations(x) if self.where == "input" else self.transformations.adjoint(x)
        return self.model(moved.flatten(0, 1)).unflatten(0, moved.shape[:2]).mean(1)

    def ranges(self) -> dict[str, Range]:
        """What was learned, in degrees, pixels and factors, by name of transformation."""
        return self.transformations.ranges()

    def augmentation(self) -> "Augmentation":
        """The learned distribution as a transform of its own, for other pipelines."""
        return Augmentation(self.transformations)


def symmetrise(
    model: nn.Module,
    symmetry: Symmetry = "affine",
    samples: int = 31,
    where: Where = "input",
    padding: Padding = "zeros",
    learn: bool = True,
) -> Symmetrised:
    """Average ``model`` over transformations of its input whose ranges are learned: f(x) = 1/S sum_s model(T_s x).

    ``symmetry`` names generators ("x-translation", "y-translation", "rotation", "x-scale", "y-scale", "shear") or sets of them
    ("translation", "scale", "affine"), or gives each its width at the start: {"rotation": 0.5} (radians; translations in halves of the
    longer side, scales and shear as logarithms of factors). A width of 0 is no transformation, and stays so: all at 0 give back the
    model exactly. Inputs are images (B, C, H, W) or coordinates (B, 2); outside of their frame images are ``padding``.

    ``where="weights"`` is the model with the weight images of its first, linear layer transformed in place of the input: that layer sees
    the adjoint of resampling, which equals it up to interpolation (``Transformations.adjoint``). ``fit`` learns the widths by evidence,
    with new draws at every step, unless ``learn`` is False; averaged copies are reduced in the curvature, which is exact for linear
    models.
    """
    check_module(model)
    return Symmetrised(model, Transformations(symmetry, samples, padding, learn), where)


def transformations(model: nn.Module) -> dict[str, Transformations]:
    """All distributions of transformations in a model that are in use, by name of module."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Transformations) and m.names}


def ranges(model: nn.Module) -> dict[str, Range]:
    """Every range in a model, by name of transformation, with that of its module before it where there are several."""
    parts = transformations(model)
    several = len(parts) > 1
    return {f"{n}.{k}" if several else k: r for n, part in parts.items() for k, r in part.ranges().items()}


def described(model: nn.Module) -> list[dict[str, Any]]:
    """Every range in a model as JSON takes it: name, width, value, unit, and text for people."""
    return [asdict(found) | {"name": name, "text": str(found)} for name, found in ranges(model).items()]


class Augmentation(nn.Module):
    """A random transformation of every sample, from a learned distribution: images (C, H, W) or (B, C, H, W), coordinates (B, 2).

    A plain transform for any pipeline; its draws are torch's own, so ``torch.manual_seed`` repeats them.
    """

    def __init__(self, transformations: Transformations):
        super().__init__()
        widths = dict(zip(transformations.names, transformations.widths().tolist(), strict=True))
        self.transformations = Transformations(widths, 1, transformations.padding, learn=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if not self.transformations.names:
            return x
        if x.dim() == 3:
            return self(x[None])[0]
        draws = 2 * torch.rand(len(x), len(self.transformations.names), dtype=torch.float64) - 1
        draws = draws.to(self.transformations.raw.device)
        if self.transformations.check(x) == "images":
            return warped(x, self.transformations.matrices(-draws), self.transformations.padding)
        T = self.transformations.matrices(draws).to(x)
        return torch.einsum("bij,bj->bi", T[:, :2, :2], x) + T[:, :2, 2]


def _widths(symmetry: Symmetry) -> dict[str, float]:
    """Width by name of generator, in the order of ``GENERATORS``."""
    if isinstance(symmetry, str):
        symmetry = (symmetry,)
    given = dict(symmetry) if isinstance(symmetry, Mapping) else dict.fromkeys(symmetry, START)
    found: dict[str, float] = {}
    for name, width in given.items():
        parts = SETS.get(name, (name,) if name in GENERATORS else ())
        if not parts:
            raise ValueError(f"no transformation is called {name!r}; there are {', '.join((*GENERATORS, *SETS))}")
        if not 0 <= width < math.inf:
            raise ValueError(f"the width of {name} must be 0 or more and finite, got {width}")
        for part in parts:
            if width > LIMITS.get(part, math.inf):
                raise ValueError(f"the width of {part} is {width}, more than pi: at pi (180 degrees) every turn is there")
            found[part] = float(width)
    return {name: found[name] for name in GENERATORS if name in found}


def _lattice(samples: int, k: int) -> Tensor:
    """Points (S, k) in [0, 1), even in every dimension: by S-ths in the first, by the generalised golden ratio in the others."""
    ratio = 2.0
    for _ in range(40):  # the root of r^k = r + 1
        ratio = (1 + ratio) ** (1 / max(k, 2))
    steps = torch.tensor([1 / samples, *(ratio**-j for j in range(1, k))], dtype=torch.float64)[:k]
    first = torch.tensor([0.5 / samples, *(0.5 for _ in range(1, k))], dtype=torch.float64)[:k]
    return (first + torch.arange(samples, dtype=torch.float64)[:, None] * steps) % 1


def _generators(names: tuple[str, ...]) -> Tensor:
    G = torch.zeros(len(names), 3, 3, dtype=torch.float64)
    for index, name in enumerate(names):
        for place, value in GENERATORS[name].items():
            G[index][place] = value
    return G


def _range(name: str, width: float, half: float | None) -> Range:
    if name == "rotation":
        return Range(name, width, math.degrees(width), "degrees")
    if name.endswith("translation"):
        return Range(name, width, width * (half or 1.0), "pixels" if half else "units of the coordinates")
    return Range(name, width, math.exp(width), "factor")
