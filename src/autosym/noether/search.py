"""``discover``: find conserved quantities in a user's trajectories, by the exact evidence of their velocities."""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from autosym.noether.candidates import cuts, least_drift, pairs_of_bodies
from autosym.noether.conserved import Measure, Quadratic
from autosym.noether.drift import Doubt, changes, drift_of, judged, motion, noise, noise_of
from autosym.noether.dynamics import residual
from autosym.noether.found import EVIDENT, NEAR, SAME, Discovery, Quantity, readable, standing_out
from autosym.noether.known import Known, catalogue, coordinates, symbols, unit
from autosym.noether.regression import Regression, stacked, unstacked
from autosym.noether.trajectories import checked, velocities, warn_of_axes, warn_of_order

ALL, PAIRS = "all coordinates", "pairs of bodies"  # what the features of a Hamiltonian may depend on
SIZES = (0.3, 1.0)  # of given quantities at first, in units of the data: the best is kept, as there are local optima
CHANCE = 0.25  # of the variance of a coordinate: if noise may have more, nothing can be said
STEPS = 100  # in which hyperparameters are learned again, once directions are taken out
FINAL = 1024  # number of tau in the reported evidence
SHOWN, SHOWN_STATES = 8, 100  # a report draws quantities along at most so many held-out trajectories, and states of each


Directions = Literal["learned", "least-drift"]


@dataclass(frozen=True)
class Plan:
    """The numbers of a search that depend on how directions are found."""

    quantities: int  # at once if learned, else at most
    points: int
    steps: int
    samples: int  # number of tau at each step
    features: int
    lengthscale: float  # of the Hamiltonian, in units of the data; learned from here unless directions are


@dataclass(frozen=True)
class Search:
    """How to search; None stands for a number of the ``plan``.

    ``learned`` directions ascend the evidence from several random starts; the best is kept. It is for few dimensions: in many, A
    and b have more values than the data. ``least-drift`` takes directions in closed form, in the order of their drift. The
    evidence then chooses how many, their size, and the features of the Hamiltonian.
    """

    quantities: int | None = None
    points: int | None = None
    starts: int = 3  # if learned
    steps: int | None = None
    samples: int | None = None
    features: int | None = None
    lengthscale: float | None = None
    start: float = 0.3  # the size of A and b at the start, if learned
    measure: Measure = "ball"
    window: int = 5  # number of states that a velocity is estimated from
    held_out: float = 0.2  # fraction of the trajectories, used to measure the drift
    directions: Directions | None = None  # learned for one or two positions, otherwise of least drift
    cuts: int = 4  # how many numbers of directions are tried, if of least drift

    def way(self, n: int) -> Directions:
        return self.directions or ("learned" if n <= 2 else "least-drift")

    def plan(self, n: int) -> Plan:
        """Numbers for n positions, where none are given."""
        if self.way(n) not in PLANS:
            raise ValueError(f"unknown directions {self.directions!r}: use {', '.join(PLANS)}")
        usual = PLANS[self.way(n)]
        if self.way(n) == "learned":
            usual = replace(usual, quantities=2 * n * n, samples=64 if n == 1 else 256)
        given = {field.name: getattr(self, field.name) for field in fields(Plan)}
        return replace(usual, **{key: value for key, value in given.items() if value is not None})


PLANS = {
    "learned": Plan(quantities=2, points=40, steps=250, samples=256, features=128, lengthscale=2.5),
    "least-drift": Plan(quantities=24, points=60, steps=60, samples=128, features=256, lengthscale=1.0),
}


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
    x, step = checked(trajectories, dt)
    warn_of_axes(x)
    n = x.shape[2] // 2
    search = search or Search()
    plan = search.plan(n)
    if n % space or not 1 <= space <= 3:
        raise ValueError(f"{n} coordinates cannot be bodies in {space} dimensions: space must be 1, 2 or 3, and divide {n}")
    if len(x) == 1:
        raise ValueError(
            "there is one trajectory: directions chosen by their drift along it drift little there, conserved or not. Give several "
            "trajectories from different starts, so that the drift is measured along others"
        )
    if derivatives is None:
        states, rates = velocities(x, step, search.window)
    else:
        states, rates = x, checked(derivatives, dt)[0]
        if rates.shape != states.shape:
            raise ValueError(
                f"derivatives have shape {tuple(rates.shape)}: give the shape of the trajectories, {tuple(x.shape)}"
            )
    warn_of_order(states, rates, coordinates(n, space))
    train, test = _split(len(x), search.held_out)
    generator = torch.Generator().manual_seed(seed)
    flat = [t[train].flatten(0, 1) for t in (states, rates)]
    chosen = torch.randperm(len(flat[0]), generator=generator)[: plan.points]
    points, targets, scale = _normalised(flat[0][chosen], flat[1][chosen])
    _check_steps(x, coordinates(n, space))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if search.way(n) == "learned":
            fitted = _best(points, targets, search, plan, seed)
        else:
            fitted = _in_order(points, targets, x[train] / scale, search, plan, n // space, seed)
        return _read(fitted, points, targets, x[train], x[test], catalogue(n, space), coordinates(n, space), scale)


def _check_steps(x: Tensor, names: list[str]) -> None:
    """Refuse states that change from one to the next as if by chance."""
    part = noise(x)[1] / x.flatten(0, 1).var(0).clamp_min(torch.finfo(x.dtype).tiny)
    worst = int(part.argmax())
    if part[worst] > CHANCE:
        raise ValueError(
            f"{names[worst]} changes from one state to the next as if by chance, by {float(part[worst]):.0%} of its variance: steps are "
            "too long to follow the motion, states are too noisy, or all trajectories are alike. Give shorter steps, or less noise"
        )


def _split(count: int, part: float) -> tuple[slice, slice]:
    """Trajectories to learn from, and others to measure drift on: at least one of each."""
    kept = min(max(1, count - math.ceil(part * count)), count - 1)
    return slice(0, kept), slice(kept, None)


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


@dataclass(frozen=True)
class _Fitted:
    """The model with most evidence, the evidence that each start (or each number of directions) reached, and without symmetry."""

    model: Regression
    reached: list[float]
    plain: float
    features: str


def _best(x: Tensor, v: Tensor, search: Search, plan: Plan, seed: int) -> _Fitted:
    """The best of several random starts, from which A and b are learned; without symmetry, the features are the same."""
    dimension, made = x.shape[1], (plan.features, search.measure, plan.lengthscale)
    models, reached = [], []
    for start in range(search.starts):
        model = Regression(dimension, Quadratic(dimension, plan.quantities, search.start), *made)
        model.fit(x, v, plan.steps, plan.samples, seed=seed + 10_000 * start)
        models.append(model)
        reached.append(_log_evidence(model, x, v))
    best = models[reached.index(max(reached))]
    plain = Regression(dimension, None, *made)
    plain.omega, plain.phase = best.omega, best.phase
    plain.fit(x, v, plan.steps, 1)
    return _Fitted(best, reached, _log_evidence(plain, x, v), ALL)


def _in_order(x: Tensor, v: Tensor, trajectories: Tensor, search: Search, plan: Plan, bodies: int, seed: int) -> _Fitted:
    """Features by the evidence without symmetry; then the number of directions of least drift by the evidence with them."""
    space = x.shape[1] // (2 * bodies)
    sees: dict[str, Tensor | None] = {ALL: None}
    if bodies > 2:
        sees[PAIRS] = pairs_of_bodies(plan.features, bodies, space)
    given = partial(_given, x, v, search.measure, plan, seed)
    plain = {name: _log_evidence(given(None, seen), x, v) for name, seen in sees.items()}
    features = max(plain, key=plain.__getitem__)
    drifts, directions = least_drift(trajectories)
    most = min(plan.quantities, len(drifts) - 1)
    models = [given(directions[:m], sees[features]) for m in cuts(drifts, most, search.cuts)]
    reached = [_log_evidence(model, x, v) for model in models]
    return _Fitted(models[reached.index(max(reached))], reached, plain[features], features)


def _given(
    x: Tensor, v: Tensor, measure: Measure, plan: Plan, seed: int, directions: Tensor | None, sees: Tensor | None
) -> Regression:
    """The model whose quantities are an orthonormal basis of ``directions``; their size and the lengthscale are learned."""
    conserved = None
    if directions is not None:
        conserved = unstacked(torch.linalg.qr(directions.mT)[0].mT.float()).requires_grad_(False)
    torch.manual_seed(seed)  # just before: the same features for every model
    model = Regression(x.shape[1], conserved, plan.features, measure, plan.lengthscale, sees)
    model.log_lengthscale.requires_grad_(True)
    model.log_size.requires_grad_(conserved is not None)
    model.fit(x, v, plan.steps, plan.samples, lr=0.1, seed=seed)
    if conserved is not None:
        with torch.no_grad():
            for part in conserved.parameters():
                part.mul_(model.log_size.exp())
            model.log_size.zero_()
    return model


def _log_evidence(model: Regression, x: Tensor, v: Tensor) -> float:
    """The log evidence with the same tau for every model, so that models can be compared."""
    with torch.no_grad():
        return float(model.evidence(x, v, model.times(FINAL, 0)).log_evidence)


def _read(
    fitted: _Fitted, x: Tensor, v: Tensor, train: Tensor, held_out: Tensor, known: list[Known], names: list[str], scale: float
) -> Discovery:
    model = fitted.model
    assert model.conserved is not None
    values, vectors = torch.linalg.svd(stacked(model.conserved).double(), full_matrices=False)[1:]
    without, only = partial(_without, model, x, v), partial(_only, model, x, v)
    whole, none = without(vectors[:0]), max(fitted.plain, without(vectors))
    still, unclear = settled(train / scale, held_out / scale)
    alone, size = max((only(size * still, none), size) for size in SIZES)
    evident = alone - none >= EVIDENT
    quantity = partial(_quantity, known=known, names=names, scale=scale, train=train, held_out=held_out)
    settle = [quantity(one, alone - only(size * _others(still, one[None]), none)) for one in readable(still, known, scale)]
    sure = [one for one in settle if evident and not one.doubt]
    beside, base = (still, alone) if evident else (still[:0], none)
    unsettled = [quantity(one, only(size * _with(beside, one), none) - base) for one in unclear]
    doubted = [_doubted(one, "evidence") for one in settle if one not in sure] + [_doubted(one, "unclear") for one in unsettled]
    found = vectors[: standing_out(values.tolist()) if whole > none else 0]
    basis = torch.linalg.qr(torch.cat([still, unclear]).mT)[0].mT
    apart = [one for one in readable(found, known, scale) if (basis @ one).norm() < SAME]
    drifting = [replace(quantity(one, whole - without(one[None])), doubt="changes") for one in apart]
    left = residual(_mean_features(model, x, v), model.conserved, x, model.times(256, 1), model.times(64, 2) / 2)
    return Discovery(
        tuple(sure),
        tuple(doubted),
        tuple(drifting),
        tuple(values.tolist()),
        vectors,
        alone if sure else whole,
        none,
        tuple(fitted.reached),
        left,
        len(x),
        scale,
        fitted.features,
    )


def settled(train: Tensor, held_out: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (n, M M + M): an orthonormal basis of quantities that do not change, and those of which it is not known."""
    directions = least_drift(train)[1]
    doubts = [judged(unstacked(direction[None]), train, held_out) for direction in directions]
    still, unclear = ([i for i, doubt in enumerate(doubts) if doubt in kinds] for kinds in (("",), ("unclear", "alike")))
    return torch.linalg.qr(directions[still].mT)[0].mT, directions[unclear]


def _doubted(quantity: Quantity, otherwise: Doubt) -> Quantity:
    """The quantity with why it is undecided. What little it was turned by to be read may have changed what was judged before."""
    return (
        quantity
        if quantity.doubt in ("unclear", "alike")
        else replace(quantity, doubt="unclear" if quantity.doubt else otherwise)
    )


def _with(span: Tensor, one: Tensor) -> Tensor:
    """The orthonormal rows of ``span``, and what is left of ``one`` without them, as a unit row."""
    return torch.cat([span, unit(one - span.mT @ (span @ one))[None]])


def _others(span: Tensor, kept: Tensor) -> Tensor:
    """Orthonormal directions of the span of ``span`` (orthonormal rows) that are orthogonal to the rows of ``kept``, which lie in it."""
    inside = kept @ span.mT
    return torch.linalg.svd(inside)[2][len(kept) :] @ span


def _without(model: Regression, x: Tensor, v: Tensor, directions: Tensor) -> float:
    """The log evidence with orthonormal directions projected out of the quantities."""
    with model.without(directions):
        return _learned_again(model, x, v)


def _only(model: Regression, x: Tensor, v: Tensor, rows: Tensor, none: float) -> float:
    """The log evidence with the quantities of these orthogonal rows alone; ``none`` if there are none."""
    if not len(rows):
        return none
    with model.holding(unstacked(rows.float())):
        return _learned_again(model, x, v)


def _learned_again(model: Regression, x: Tensor, v: Tensor) -> float:
    """The log evidence after all hyperparameters but A and b are learned again.

    The lengthscale is among them: a flow that is no symmetry smooths the Hamiltonian. If the lengthscale is too short, that alone
    raises the evidence. Every set of directions starts here from the same values, so that the evidence of two can be compared.
    """
    scalars = dict(model.named_parameters(recurse=False))
    kept = {name: (t.detach().clone(), t.requires_grad) for name, t in scalars.items()}
    for t in scalars.values():
        t.requires_grad_(True)
    model.fit(x, v, STEPS, 64, lr=0.1)
    found = _log_evidence(model, x, v)
    for name, t in scalars.items():
        t.requires_grad_(kept[name][1])
        t.data.copy_(kept[name][0])
    return found


def _mean_features(model: Regression, x: Tensor, v: Tensor):
    """F at the posterior mean of its weights."""
    weights = model.posterior_mean(x, v, model.times(256, 1))
    return lambda y: model.values(y) @ weights


def _quantity(
    v: Tensor, nats: float, known: list[Known], names: list[str], scale: float, train: Tensor, held_out: Tensor
) -> Quantity:
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
        largest = torch.cat([A.flatten(), b]).abs().max().copysign(A.trace())  # energies are positive
        A, b = A / largest, b / largest
    angle = math.degrees(math.acos(min(1.0, abs(cosine))))
    quantity, every = Quadratic.of(A[None], b[None]), torch.cat([train, held_out])
    moves = motion(every)
    along = changes(quantity, held_out[:SHOWN, :: math.ceil(held_out.shape[1] / SHOWN_STATES)], moves)
    return Quantity(
        symbols(A, b, names, every.flatten(0, 1)),
        tuple(map(tuple, A.tolist())),
        tuple(b.tolist()),
        (matched.name if angle < NEAR else f"near {matched.name}") if same else None,
        angle,
        drift_of(quantity, held_out, moves),
        nats,
        tuple(map(tuple, along.tolist())),
        noise_of(quantity, held_out, moves)[0],
        judged(quantity, train, held_out),
    )
