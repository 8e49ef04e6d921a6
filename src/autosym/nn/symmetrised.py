"""Averaging a model over transformations drawn from a learned distribution (Learning Invariant Weights, Eqs. 1 to 6).

    f(x) = 1/S sum_s g(T_s x),      T_s = exp(sum_i eps_si eta_i G_i),      eps uniform on [-1, 1]^k

G_i are the generators of the affine group and eta_i >= 0 the widths. Width 0 is no invariance; rotation is full at pi. The
widths are hyperparameters in the forward pass. ``fit`` learns them by evidence (``evidence.differentiable``); the training loss
would shrink them to zero. The draws eps are state, the same for every sample of a batch. So a sample's output never depends on
the rest of its batch, and evidence at fixed draws is a differentiable function.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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

# Entries (row, column) of the generators, 3x3 matrices on (x, y, 1). In images x points right, y down; the centre is 0.
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
START = 0.1  # initial width: at 0 the evidence has no slope, because T and its inverse are equally likely
LIMITS = {"rotation": math.pi}  # a larger turn equals a smaller one
MOST = 1024  # most points of a grid, i.e. copies of every sample
LARGEST = 4096  # most pixels of an image whose resampling is stored as a matrix


@dataclass(frozen=True)
class Range:
    """The range of one transformation: ``width`` is eta, and ``value`` is the same range in ``unit``.

    ``start`` is the value that the last fit learned it from, on which it depends where the evidence is flat; None if none did.
    """

    name: str
    width: float
    value: float
    unit: str
    start: float | None = None

    def __str__(self) -> str:
        return self._of(self.value)

    @property
    def started(self) -> str:
        """The range that learning starts from; nothing if it is not learned."""
        return "" if self.start is None else self._of(self.start)

    def _of(self, value: float) -> str:
        return f"{self.name} by up to {value:.3g}" if self.unit == "factor" else f"{self.name} ±{value:.3g} {self.unit}"


class Transformations(nn.Module):
    """p_eta(T): T = exp(sum_i eps_i eta_i G_i). ``widths()`` is eta; ``draws`` are the eps (S, k) in use.

    eta = softplus(raw) is positive. Image coordinates start at the centre and have half of the longer side as their unit, so
    rotations work on images that are not square. Planar coordinates (B, 2) are used as they are. A width of 0 stays 0.
    """

    draws: Tensor
    generators: Tensor
    limits: Tensor
    started: Sequence[float] | None = None  # the widths from which the last fit learned them

    def __init__(
        self,
        symmetry: Symmetry,
        samples: int = 31,
        padding: Padding = "zeros",
        learn: bool = True,
        in_steps: int | None = None,
    ):
        super().__init__()
        widths = _widths(symmetry)
        if samples < 1:
            raise ValueError(f"samples, the copies to average over, must be at least 1, got {samples}")
        if in_steps is not None and not 1 <= in_steps <= samples:
            raise ValueError(f"in_steps, the copies of a step, must be between 1 and the {samples} of samples, got {in_steps}")
        if padding not in ("zeros", "border"):
            raise ValueError(f"padding {padding!r} is not 'zeros' or 'border': it fills images outside of their frame")
        self.names, self.samples = tuple(name for name in widths if widths[name] > 0), samples
        self.in_steps = samples if in_steps is None else in_steps
        self.lattice, self.step_lattice = (_lattice(n, len(self.names)) for n in (samples, self.in_steps))
        self.kept: dict[tuple[int, ...], Tensor] = {}  # the memory of draws of each shape
        self.padding, self.learn = padding, learn
        start = torch.tensor([widths[name] for name in self.names], dtype=torch.float64)
        # A hyperparameter, not a weight: it is frozen, so optimisers of weights, priors and curvature ignore it.
        self.raw = nn.Parameter((start + torch.log(-torch.expm1(-start))).float(), requires_grad=False)
        self.register_buffer("generators", _generators(self.names), persistent=False)
        limits = torch.tensor([LIMITS.get(name, math.inf) for name in self.names], dtype=torch.float64)
        self.register_buffer("limits", limits, persistent=False)
        self.register_buffer("draws", torch.empty(0), persistent=False)
        self.settle()
        self.size: tuple[int, int] | None = None  # height and width of the last images

    def widths(self) -> Tensor:
        """eta (k,), in the order of ``names``, in float64. Units: radians, half of the longer side, log-factors."""
        return torch.minimum(F.softplus(self.raw.double()), self.limits.double())

    @torch.no_grad()
    def limit(self) -> None:
        """After a step, move ``raw`` back to just below the limits: beyond them the slope is zero, so it could not return."""
        self.raw.copy_(torch.minimum(self.raw, self.limits.expm1().log().to(self.raw) - 1e-6))

    def redraw(self, seed: int) -> None:
        """New draws from a seed: a lattice of ``in_steps`` points with a random shift.

        Each draw is uniform; together they cover the cube evenly.
        """
        shift = torch.rand(len(self.names), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._set(2 * ((self.step_lattice + shift) % 1) - 1)

    def settle(self) -> None:
        """Fixed draws for inference: the lattice without a random shift. With one generator they are an even grid."""
        self._set(2 * self.lattice - 1)

    def grid(self, points: int) -> None:
        """Fixed draws for inference: a grid of ``points`` per dimension, at the centres of equal parts of [-1, 1]."""
        count = points ** len(self.names) if points >= 1 else 0
        if not 1 <= count <= MOST:
            raise ValueError(
                f"a grid of {points} points in each of {len(self.names)} dimensions has {count} of them, outside of 1 to {MOST}: "
                "use fewer points, or settle(), which has the same number of draws in any dimension"
            )
        line = (2 * torch.arange(points, dtype=torch.float64) + 1) / points - 1
        self._set(torch.cartesian_prod(*[line] * len(self.names)).reshape(count, len(self.names)))

    def matrices(self, draws: Tensor | None = None) -> Tensor:
        """T for every row of ``draws`` (S, k), by default ``self.draws``: (S, 3, 3) in float64, differentiable in ``raw``."""
        draws = self.draws if draws is None else draws
        return exponential(torch.einsum("sk,kij->sij", draws.double() * self.widths(), self.generators.double()))

    def forward(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """T_s x for every draw: images (B, C, H, W) as (B, S, C, H, W), coordinates (B, 2) as (B, S, 2).

        The value of x at p moves to T p. Between pixels, images are interpolated bilinearly.
        """
        draws = self.draws if draws is None else draws
        if self.check(x) == "coordinates":
            T = self.matrices(draws).to(x)
            return torch.einsum("sij,bj->bsi", T[:, :2, :2], x) + T[:, :2, 2]
        return self._resampled(x, draws)

    def adjoint(self, x: Tensor) -> Tensor:
        """R_s^T x for every draw, (B, S, C, H, W): with it, a first layer acts as if its weight images were resampled, R_s w.

        <R_s w, x> = <w, R_s^T x> is exact. Resampling the inputs, <w, R_s^-1 x>, differs by interpolation and by |det T|, the
        change of a pixel's area. For coordinates nothing is interpolated, and W (T x) is the same in both forms.
        """
        if self.check(x) == "coordinates":
            return self(x)
        height, width = x.shape[-2:]
        if height * width > LARGEST:
            raise ValueError(
                f"images of {height}x{width} have more than {LARGEST} pixels, the most for where='weights': resize them, "
                "or use where='input'"
            )
        R = resampling(self.matrices(-self.draws).to(x), height, width, self.padding)
        return torch.einsum("bcp,sqp->bscq", x.flatten(2), R).reshape(len(x), -1, *x.shape[1:])

    def ranges(self) -> dict[str, Range]:
        """The widths by name, in degrees, pixels (if images were seen) and factors."""
        half = max(self.size) / 2 if self.size else None
        started = self.started or (None,) * len(self.names)
        found = zip(self.names, self.widths().detach().tolist(), started, strict=True)
        return {name: _range(name, width, half, start) for name, width, start in found}

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.ranges().values())) or 'none'}; samples={self.samples}"

    def _resampled(self, x: Tensor, draws: Tensor) -> Tensor:
        """Images moved by every draw. All samples share one grid, so they are its channels."""
        flat = x.reshape(1, -1, *x.shape[2:]).expand(len(draws), -1, -1, -1)
        return warped(flat, self.matrices(-draws), self.padding).unflatten(1, x.shape[:2]).transpose(0, 1)

    def check(self, x: Tensor) -> str:
        """The kind of inputs, "images" or "coordinates"; others are refused."""
        if not x.is_floating_point():
            raise ValueError(f"inputs are {x.dtype}: convert them to floating point")
        if x.dim() == 4:
            self.size = (x.shape[2], x.shape[3])
            return "images"
        if x.dim() == 2 and x.shape[1] == 2:
            return "coordinates"
        raise ValueError(
            f"inputs {tuple(x.shape)} are neither images (B, C, H, W) nor coordinates in the plane (B, 2), so they cannot be "
            "transformed: give flattened images their shape, x.reshape(-1, C, H, W), and flatten them in the model"
        )

    def _set(self, draws: Tensor) -> None:
        """In the memory of the last draws of this shape, because a recorded CUDA graph keeps reading it."""
        if self.draws.shape != draws.shape:
            self.kept[tuple(self.draws.shape)] = self.draws
            before = self.kept.pop(tuple(draws.shape), None)
            self.draws = torch.empty_like(draws, device=self.raw.device) if before is None else before.to(self.raw.device)
        self.draws.copy_(draws)


class Symmetrised(nn.Module):
    """f(x) = 1/S sum_s g(T_s x), for the ``model`` g. Made by ``symmetrise``.

    ``transformations`` holds widths and draws: call its ``redraw(seed)`` before a training step, and its ``settle()`` or
    ``grid(points)`` before inference.
    """

    def __init__(self, model: nn.Module, transformations: Transformations, where: Where = "input"):
        super().__init__()
        if where not in ("input", "weights"):
            raise ValueError(f"where {where!r} is not 'input' or 'weights'")
        self.model, self.transformations, self.where = model, transformations, where

    @property
    def copies(self) -> int:
        """The number of copies of every sample in the batch of the inner model, next to each other."""
        return len(self.transformations.draws) if self.transformations.names else 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.transformations.names:
            return self.model(x)
        moved = self.transformations(x) if self.where == "input" else self.transformations.adjoint(x)
        return self.model(moved.flatten(0, 1)).unflatten(0, moved.shape[:2]).mean(1)

    def ranges(self) -> dict[str, Range]:
        """The learned ranges by name of transformation, in degrees, pixels and factors."""
        return self.transformations.ranges()

    def augmentation(self) -> "Augmentation":
        """The learned distribution as a separate transform, for other pipelines."""
        return Augmentation(self.transformations)


def symmetrise(
    model: nn.Module,
    symmetry: Symmetry = "affine",
    samples: int = 31,
    where: Where = "input",
    padding: Padding = "zeros",
    learn: bool = True,
    in_steps: int | None = None,
) -> Symmetrised:
    """f(x) = 1/S sum_s model(T_s x): average ``model`` over transformations of its input, with learned ranges.

    ``symmetry`` names generators ("x-translation", "y-translation", "rotation", "x-scale", "y-scale", "shear") or sets of them
    ("translation", "scale", "affine"). It may also give initial widths: {"rotation": 0.5}. Units are radians for rotation, half
    of the longer side for translations, and log-factors for scales and shear. A width of 0 means no transformation, and stays 0:
    with all widths 0 the model is unchanged. Inputs are images (B, C, H, W) or coordinates (B, 2). ``padding`` fills images
    outside of their frame.

    ``where="weights"`` transforms the weight images of the first layer, which must be linear, instead of the input. That layer
    sees the adjoint of resampling; ``Transformations.adjoint`` says how it differs from ``where="input"``. ``fit`` learns the
    widths by evidence, with new draws at every step, unless ``learn`` is False. The curvature reduces the averaged copies, which
    is exact for linear models. ``in_steps`` copies are averaged in a step, by default as many as ``samples``, which inference and the
    evidence at the end have: time is in proportion.
    """
    check_module(model)
    return Symmetrised(model, Transformations(symmetry, samples, padding, learn, in_steps), where)


def transformations(model: nn.Module) -> dict[str, Transformations]:
    """All ``Transformations`` of a model with at least one width above 0, by name of module."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Transformations) and m.names}


def ranges(model: nn.Module) -> dict[str, Range]:
    """Every range in a model, by name of transformation; if there are several modules, their names come first."""
    parts = transformations(model)
    several = len(parts) > 1
    return {f"{n}.{k}" if several else k: r for n, part in parts.items() for k, r in part.ranges().items()}


def described(model: nn.Module) -> list[dict[str, Any]]:
    """Every range in a model, ready for JSON: name, width, value, unit, start, and readable texts."""
    return [asdict(r) | {"name": name, "text": str(r), "started": r.started} for name, r in ranges(model).items()]


def started(texts: Iterable[str]) -> str:
    """What learned ranges started from, by the ``texts`` of each, and what that means: nothing if none is learned."""
    known = [text for text in texts if text]
    return f"started from {', '.join(known)}: another start may end elsewhere" if known else ""


class Augmentation(nn.Module):
    """A random transformation of every sample, from a learned distribution: images (C, H, W) or (B, C, H, W), coordinates (B, 2).

    It is a plain transform for any pipeline. It draws from torch's generator, so ``torch.manual_seed`` repeats the draws.
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
            raise ValueError(f"no transformation is called {name!r}: use {', '.join((*GENERATORS, *SETS))}")
        if not 0 <= width < math.inf:
            raise ValueError(f"the width of {name} must be 0 or more and finite, got {width}")
        for part in parts:
            if width > LIMITS.get(part, math.inf):
                raise ValueError(
                    f"the width of {part} is {width}, more than pi: use at most pi (180 degrees), which covers all turns"
                )
            found[part] = float(width)
    return {name: found[name] for name in GENERATORS if name in found}


def _lattice(samples: int, k: int) -> Tensor:
    """Points (S, k) in [0, 1), even in every dimension: steps of 1/S in the first, by the generalised golden ratio in others."""
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


def _range(name: str, width: float, half: float | None, start: float | None) -> Range:
    unit, in_unit = _unit(name, half)
    return Range(name, width, in_unit(width), unit, None if start is None else in_unit(start))


def _unit(name: str, half: float | None) -> tuple[str, Callable[[float], float]]:
    """The unit of a range, and what a width is in it."""
    if name == "rotation":
        return "degrees", math.degrees
    if name.endswith("translation"):
        return "pixels" if half else "units of the coordinates", lambda width: width * (half or 1.0)
    return "factor", math.exp
