"""``discover``: find conserved quantities in a user's trajectories, by the exact evidence of their velocities."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autosym.noether.conserved import Measure, Quadratic
from autosym.noether.dynamics import residual
from autosym.noether.found import DRIFTS, SAME, Discovery, Quantity, count_directions, readable
from autosym.noether.known import Known, catalogue, coordinates, symbols
from autosym.noether.regression import Regression, stacked
from autosym.noether.trajectories import checked, velocities

FINAL = 1024  # number of tau in the reported evidence
SHOWN, SHOWN_STATES = 8, 100  # a report draws quantities along at most so many held-out trajectories, and states of each


@dataclass(frozen=True)
class Search:
    """How to search: ``quantities`` at once (by default 2 n^2, twice the dimension of U(n)), from several starts; the best is kept."""

    quantities: int | None = None
    points: int = 40
    starts: int = 3
    steps: int = 250
    samples: int | None = None  # number of tau at each step; by default 64 for n = 1, else 256
    features: int = 128
    lengthscale: float = 2.5  # of the Hamiltonian, in units of the data
    start: float = 0.3  # the size of A and b at the start; choose it smaller in many dimensions
    measure: Measure = "ball"
    window: int = 5  # number of states that a velocity is estimated from
    held_out: float = 0.2  # fraction of the trajectories, used to measure the drift


def discover(
    trajectories: object,
    dt: object,
    derivatives: object = None,
    space: int = 1,
    search: Search | None = None,
    seed: int = 0,
) -> Discovery:
    """The conserved quantities of degree two of ``trajectories`` (N, T, 2n): positions first, then as many momenta.

    ``dt`` is the time step (or all T times). ``derivatives`` (N, T, 2n) are the velocities if you know them; otherwise they are
    estimated. To name quantities, coordinates are read as bodies in ``space`` dimensions. Choose units that give q and p similar
    sizes.
    """
    search = search or Search()
    x, step = checked(trajectories, dt)
    n = x.shape[2] // 2
    if n % space or not 1 <= space <= 3:
        raise ValueError(f"{n} coordinates cannot be bodies in {space} dimensions: space must be 1, 2 or 3, and divide {n}")
    if derivatives is None:
        states, rates = velocities(x, step, search.window)
    else:
        states, rates = x, checked(derivatives, dt)[0]
        if rates.shape != states.shape:
            raise ValueError(
                f"derivatives have shape {tuple(rates.shape)}: give the shape of the trajectories, {tuple(x.shape)}"
            )
    train, test = _split(len(x), search.held_out)
    generator = torch.Generator().manual_seed(seed)
    flat = [t[train].flatten(0, 1) for t in (states, rates)]
    chosen = torch.randperm(len(flat[0]), generator=generator)[: search.points]
    points, targets, scale = _normalised(flat[0][chosen], flat[1][chosen])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, reached, plain = _best(points, targets, search, n, seed)
        return _read(model, points, targets, plain, reached, x[test], catalogue(n, space), coordinates(n, space), scale, search)


def _split(count: int, part: float) -> tuple[slice, slice]:
    """Trajectories to learn from, and to measure drift on; a single trajectory serves for both."""
    kept = count - math.ceil(part * count) if count > 1 else 1
    return slice(0, max(1, kept)), slice(max(1, kept), None) if count > 1 else slice(None)


def _normalised(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, float]:
    """x and v scaled to root mean square 1, in single precision, and the scale of x. One scale for q and p keeps the form of J."""
    sizes = [float(t.square().mean().sqrt()) for t in x.chunk(2, 1)]
    if min(sizes) <= 0 or max(sizes) > 30 * min(sizes):
        raise ValueError(
            f"positions have size {sizes[0]:.3g} and momenta have size {sizes[1]:.3g}: choose units that make them similar "
            "(q / a and p / b have the same dynamics, in another unit of energy)"
        )
    speed = float(v.square().mean().sqrt())
    scale = float(x.square().mean().sqrt())
    if speed <= 1e-12 * scale:
        raise ValueError("nothing moves in these trajectories, all velocities are zero: give trajectories that move")
    return (x / scale).float(), (v / speed).float(), scale


def _best(x: Tensor, v: Tensor, search: Search, n: int, seed: int) -> tuple[Regression, list[float], float]:
    """The model of the best start, the log evidence of each start, and the log evidence without symmetry for the same features."""
    quantities = search.quantities or 2 * n * n
    samples = search.samples or (64 if n == 1 else 256)
    models, reached = [], []
    for start in range(search.starts):
        model = Regression(
            2 * n, Quadratic(2 * n, quantities, search.start), search.features, search.measure, search.lengthscale
        )
        model.fit(x, v, search.steps, samples, seed=seed + 10_000 * start)
        models.append(model)
        reached.append(_log_evidence(model, x, v))
    best = models[reached.index(max(reached))]
    plain = Regression(2 * n, None, search.features, search.measure, search.lengthscale)
    plain.omega, plain.phase = best.omega, best.phase
    plain.fit(x, v, search.steps, 1)
    return best, reached, _log_evidence(plain, x, v)


def _log_evidence(model: Regression, x: Tensor, v: Tensor) -> float:
    """The log evidence with the same tau for every model, so that models can be compared."""
    with torch.no_grad():
        return float(model.evidence(x, v, model.times(FINAL, 0)).log_evidence)


def _read(
    model: Regression,
    x: Tensor,
    v: Tensor,
    plain: float,
    reached: list[float],
    held_out: Tensor,
    known: list[Known],
    names: list[str],
    scale: float,
    search: Search,
) -> Discovery:
    assert model.conserved is not None
    values, vectors = torch.linalg.svd(stacked(model.conserved).double(), full_matrices=False)[1:]
    count = count_directions(values, max(reached) - plain)
    basis = readable(vectors[:count], known, scale)
    lost = [max(reached) - _without(model, x, v, direction[None]) for direction in basis]
    quantities = [
        _quantity(direction, nats, known, names, scale, held_out) for direction, nats in zip(basis, lost, strict=True)
    ]
    left = residual(_mean_features(model, x, v), model.conserved, x, model.times(256, 1), model.times(64, 2) / 2)
    drifts = torch.tensor([q.drift > DRIFTS for q in quantities], dtype=torch.bool)
    if drifts.any() and _without(model, x, v, torch.linalg.qr(basis[drifts].mT)[0].mT) <= plain:
        drifts[:] = True  # the others have no evidence by themselves
    conserved, drifting = (
        tuple(q for q, drift in zip(quantities, drifts, strict=True) if drift == which) for which in (False, True)
    )
    return Discovery(
        conserved, drifting, tuple(values.tolist()), vectors, max(reached), plain, tuple(reached), left, len(x), scale
    )


def _without(model: Regression, x: Tensor, v: Tensor, directions: Tensor, steps: int = 30) -> float:
    """The log evidence with orthonormal directions projected out, after precision and noise are learned again for a few steps."""
    kept = {name: t.detach().clone() for name, t in model.named_parameters(recurse=False)}
    with model.without(directions):
        assert model.conserved is not None
        model.conserved.requires_grad_(False)
        model.fit(x, v, steps, 64)
        found = _log_evidence(model, x, v)
    with torch.no_grad():
        for name, t in model.named_parameters(recurse=False):
            t.copy_(kept[name])
    return found


def _mean_features(model: Regression, x: Tensor, v: Tensor):
    """F at the posterior mean of its weights."""
    weights = model.posterior_mean(x, v, model.times(256, 1))
    return lambda y: model.values(y) @ weights


def _quantity(v: Tensor, nats: float, known: list[Known], names: list[str], scale: float, held_out: Tensor) -> Quantity:
    cosines = [float(one.vector(scale) @ v) for one in known]
    nearest = max(range(len(known)), key=lambda i: abs(cosines[i]))
    cosine, matched = cosines[nearest], known[nearest]
    dimension = len(names)
    A, b = v[: dimension**2].reshape(dimension, dimension), v[dimension**2 :] * scale
    same = abs(cosine) >= SAME
    if same:  # sign and size are free: take them from the known quantity
        size = (A.square().sum() + b.square().sum()).sqrt() / (matched.A.square().sum() + matched.b.square().sum()).sqrt()
        A, b = (t / size * math.copysign(1.0, cosine) for t in (A, b))
    else:
        largest = torch.cat([A.flatten(), b]).abs().max()
        A, b = A / largest, b / largest
    angle = math.degrees(math.acos(min(1.0, abs(cosine))))
    quantity = Quadratic.of(A[None], b[None])
    along = changes(quantity, held_out[:SHOWN, :: math.ceil(held_out.shape[1] / SHOWN_STATES)])
    return Quantity(
        symbols(A, b, names),
        tuple(map(tuple, A.tolist())),
        tuple(b.tolist()),
        matched.name if same else None,
        angle,
        drift_of(quantity, held_out),
        nats,
        tuple(map(tuple, along.tolist())),
    )


def changes(quantity: Quadratic, trajectories: Tensor) -> Tensor:
    """(C - its mean along a trajectory) / (rms |grad C| rms |x - mean x| / sqrt M), (N, T), along trajectories (N, T, M).

    0 means conserved. A move of that size in any direction would change C by about 1.
    """
    with torch.no_grad():
        x = trajectories.to(quantity.b)
        C = quantity(x)[..., 0]
        slopes = torch.einsum("ij,ntj->nti", quantity.A[0], x) + quantity.b[0]
        moved = (x - x.mean(1, keepdim=True)).square().sum(-1).mean()
        usual = slopes.square().sum(-1).mean() * moved / x.shape[2]
        return (C - C.mean(1, keepdim=True)) / usual.clamp_min(torch.finfo(x.dtype).tiny).sqrt()


def drift_of(quantity: Quadratic, trajectories: Tensor) -> float:
    """The root mean square of ``changes``."""
    return float(changes(quantity, trajectories).square().mean().sqrt())
