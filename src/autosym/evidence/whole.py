"""Laplace evidence with the Gauss-Newton matrix of the whole network: no blocks, no Kronecker factors.

    log det (I + D^-1/2 H D^-1/2),        H = sum_n J_n^T Lambda_n J_n,  D the prior precisions

It is exact where either the weights or the rows (samples times outputs) are few. Else it is estimated by random probes z and conjugate
gradients, preconditioned by the Kronecker factors M: E z^T log(B^T (H + D) B) z with B B^T = M^-1 (stochastic Lanczos quadrature). The
same run gives the effective parameters of every path. Probes have a standard error, and the number of steps a bound of its own.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.gauss_newton import GaussNewton
from autosym.curvature.krylov import Solution, solve
from autosym.curvature.passes import Pass, alike, budget
from autosym.evidence import laplace
from autosym.evidence.kernel import rows_of
from autosym.evidence.laplace import Laplace
from autosym.evidence.record import Evidence
from autosym.runtime import arithmetic, processes
from autosym.runtime.batching import Data

FEW = 6_000  # weights or rows: a matrix of that size is factorised at once
WORK = {"cpu": 4e12, "cuda": 4e14}  # multiplications that may be spent on it
STRENGTH = 0.4  # of the Kronecker factors in the preconditioner, as they are too large: least spread between probes
FIRST, STEPS = 8, 120  # probes at once (fewer tell too little of their spread), and at most so many steps of each
BATCH = 64  # samples whose Jacobian is formed at once

How = Literal["weights", "rows", "probes"]


@dataclass(frozen=True)
class Whole:
    """The evidence of the whole network at one prior, in place of its Kronecker approximation ``laplace``.

    ``gamma`` are the effective parameters of every path. ``how`` it was found: exactly, by a matrix of ``weights`` or of ``rows``, or
    by ``probes``. ``truncation`` is the most by which too few steps may make the evidence too small, in nats.
    """

    laplace: Laplace
    log_precision: Tensor
    evidence: Evidence
    gamma: Tensor
    how: How
    probes: int = 0
    steps: int = 0
    truncation: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return self.laplace.names

    @property
    def sizes(self) -> Tensor:
        return self.laplace.sizes

    @property
    def likelihood(self) -> Likelihood:
        return self.laplace.likelihood

    @property
    def samples(self) -> int:
        return self.laplace.samples

    @property
    def outputs(self) -> int:
        return self.laplace.outputs

    @property
    def fingerprint(self) -> Tensor | None:
        return self.laplace.fingerprint

    def __call__(self, prior: Prior) -> Evidence:
        self._check(prior)
        return self.evidence

    def effective_parameters(self, prior: Prior) -> Tensor:
        """How many parameters of each path the data determine."""
        self._check(prior)
        return self.gamma

    def _check(self, prior: Prior) -> None:
        if prior.names != self.names or not torch.equal(prior.log_precision.detach(), self.log_precision):
            raise ValueError("the evidence of the whole network is known at one prior only: refine the fit again")


@dataclass(frozen=True)
class _Found:
    """log det (I + D^-1/2 H D^-1/2), the effective parameters by name, and how sure the former is."""

    log_det: float
    gamma: Mapping[str, float]
    standard_error: float = 0.0  # of the evidence, as truncation
    truncation: float = 0.0
    probes: int = 0
    steps: int = 0


@arithmetic.true_float32()
def at(
    model: nn.Module,
    data: Data,
    laplace: Laplace,
    prior: Prior,
    *,
    nats: float = 5.0,
    seed: int = 0,
    how: How | None = None,
    probes: int = 64,
    offset: Tensor | None = None,
    batch_size: int | None = None,
    memory: float | None = None,
) -> Whole:
    """The evidence at ``prior`` of the weights and data that ``laplace`` was taken at, or of the linearised network at an ``offset``.

    Probes are drawn by ``seed`` until the standard error is at most ``nats``, or there are as many as ``probes``. Steps are made until
    truncation is at most half of that. By default a matrix is factorised where that is cheap; ``how`` decides otherwise. ``batch_size``
    and ``memory`` are those of ``curvature.kfac``.
    """
    if prior.names != laplace.names:
        raise ValueError(f"this prior is over {prior.names}, the evidence over {laplace.names}: use Prior(evidence.names)")
    if math.isfinite(prior.nu):
        raise ValueError("the evidence of the whole network is for Gaussian priors: pass nu=inf")
    if not nats > 0 or probes < 2:
        raise ValueError(f"nats must be positive, got {nats}, and there must be two probes at least, got {probes}")
    model = processes.unwrapped(model)
    refuse_other_data(model, data, laplace)
    H = GaussNewton(model, data, laplace.likelihood, batch_size=batch_size, memory=memory)
    H.offset = offset
    precision = dict(zip(prior.names, prior.log_precision.detach().exp().tolist(), strict=True))
    how = route(model, laplace, memory) if how is None else how
    if how == "probes":
        found = _by_probes(Whitened(H, laplace, precision), nats, seed, probes)
    elif how in ("weights", "rows"):
        found = (_by_weights if how == "weights" else _by_rows)(H, laplace, precision)
    else:
        raise ValueError(f"how must be 'weights', 'rows', 'probes' or None, got {how!r}")
    with torch.no_grad():
        record, sizes = _record(H, laplace, prior), laplace.sizes
        complexity = 0.5 * (found.log_det + (sizes * (prior.log_precision - math.log(2 * math.pi))).sum())
    gamma = torch.tensor([found.gamma.get(name, 0.0) for name in prior.names], dtype=torch.float64)
    evidence = replace(record, complexity=complexity, standard_error=found.standard_error)
    sure = (found.probes, found.steps, found.truncation)
    gamma = gamma.clamp(torch.zeros_like(sizes), sizes)
    return Whole(laplace, prior.log_precision.detach().clone(), evidence, gamma, how, *sure)


def _record(H: GaussNewton, laplace: Laplace, prior: Prior) -> Evidence:
    """Log-likelihood and log-prior: of the weights, or of the linearised network at the offset."""
    if H.offset is None:
        return laplace(prior)
    moved = dict(zip([site.name for site in H.sites], H.offset.split(H.sizes), strict=True))
    norms = [(laplace.parameters[name].double().flatten() + moved[name]).square().sum().cpu() for name in prior.names]
    counted = torch.tensor([name not in laplace.left_out for name in prior.names])
    curvature = replace(laplace.curvature, statistic=H.slope()[0])
    return replace(laplace, square_norms=torch.stack(norms) * counted, curvature=curvature)(prior)


def log_evidence(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    prior_precision: float | Mapping[str, float] = 1.0,
    curvature: Literal["kronecker", "whole"] = "kronecker",
    **options: Any,
) -> float:
    """The log marginal likelihood of ``model`` on all of ``data``, in nats, by Laplace at its present weights.

    ``data`` is a pair of tensors (inputs, targets), a dataset or a loader. ``prior_precision`` is one number for all paths, or
    one by name of path. The model is a torch model made of Linear, Conv1d, Conv2d and normalisation layers, or one of autosym's.
    Train it with the same prior: the approximation holds at a mode of the posterior. The noise is not learned but fixed at
    ``Gaussian(sigma_noise)``, 1 by default; ``fit`` learns it. ``options`` go to ``autosym.curvature.kfac``. With ``curvature`` "whole"
    it is that of the whole network, to 5 nats (``evidence.whole``), not of Kronecker factors for each path.

    At a given precision the evidence depends on the size of weights that a normalisation follows, though the function does not. It
    does not at precisions that ``fit`` learns, or where batch normalisation is folded: ``relax(model, x, paths={}, fold=True)``.
    """
    if curvature not in ("kronecker", "whole"):
        raise ValueError(f"curvature must be 'kronecker' or 'whole', got {curvature!r}")
    estimate = laplace.at(model, data, likelihood, **options)
    prior = Prior(estimate.names, prior_precision)
    found = estimate(prior) if curvature == "kronecker" else at(model, data, estimate, prior).evidence
    return float(found.log_evidence.detach())


def route(model: nn.Module, laplace: Laplace, memory: float | None = None, times: int = 1) -> How:
    """How the evidence is found, ``times`` times: by the smaller matrix if it can be formed and factorised, else by probes."""
    device = next(model.parameters()).device
    weights, rows = int(laplace.sizes.sum()), laplace.samples * laplace.outputs
    few, work = min(weights, rows), weights * rows * min(weights, rows)
    room = 4 * rows * weights + 24 * rows**2 if rows < weights else 24 * weights**2
    if few > FEW or times * work > WORK["cuda" if device.type == "cuda" else "cpu"] or room > 2 * budget(memory, device):
        return "probes"
    return "rows" if rows < weights else "weights"


def refuse_other_data(model: nn.Module, data: Data, laplace: Laplace) -> None:
    """Refuse data other than those that ``laplace`` was taken at."""
    shown = Pass(model, data, laplace.likelihood)
    for _, y, _, _ in shown:
        laplace.likelihood.check(laplace.outputs, y)
    shown.finish()
    if shown.samples != laplace.samples or not alike(shown.fingerprint, laplace.fingerprint):
        raise ValueError(
            f"these {shown.samples} samples are not the {laplace.samples} that the evidence was computed on: pass the data of the fit"
        )


# ---- exactly


def _by_weights(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float]) -> _Found:
    """A matrix of all weights, summed over samples."""
    names = [site.name for site in H.sites if site.name not in laplace.left_out]
    total: Tensor | None = None
    outputs = None if H.offset is None else H.outputs()
    for x, _, _, places in Pass(H.model, H.data, H.likelihood, BATCH, alone=True):
        at = None if outputs is None else outputs[places.to(outputs.device)]
        rows = {path.name: path for path in rows_of(H.model, x, H.likelihood, None, BATCH, at)}
        whitened = torch.cat([rows[name].dense().double() * precision[name] ** -0.5 for name in names], 1)
        total = whitened.mT @ whitened if total is None else total.addmm_(whitened.mT, whitened)
    assert total is not None
    root = _root(float(H.likelihood.scale().detach()) * total)
    kept = torch.cholesky_inverse(root).diagonal()  # of (I + H)^-1: what the data leave to the prior
    sizes = [laplace.parameters[name].numel() for name in names]
    gamma = {name: float((1 - part).sum()) for name, part in zip(names, kept.split(sizes), strict=True)}
    return _Found(2 * float(root.diagonal().log().sum()), gamma)


def _by_rows(H: GaussNewton, laplace: Laplace, precision: Mapping[str, float]) -> _Found:
    """A matrix of all samples and outputs, summed over paths. Its parts are formed twice, as they are too large to keep."""
    shown = [(x, places) for x, _, _, places in Pass(H.model, H.data, H.likelihood, BATCH, alone=True)]
    x, places = torch.cat([x for x, _ in shown]), torch.cat([places for _, places in shown])
    at = None if H.offset is None else H.outputs()[places.to(H.device)]
    scale, total = float(H.likelihood.scale().detach()), None
    paths = [path for path in rows_of(H.model, x, H.likelihood, None, BATCH, at) if path.name not in laplace.left_out]
    for path in paths:
        part = path.kernel().mul_(scale / precision[path.name])
        total = part if total is None else total.add_(part)
    assert total is not None
    root = _root(total)
    inverse = torch.cholesky_inverse(root)
    gamma = {path.name: scale / precision[path.name] * float((inverse * path.kernel()).sum()) for path in paths}
    return _Found(2 * float(root.diagonal().log().sum()), gamma)


def _root(matrix: Tensor) -> Tensor:
    """The Cholesky factor of I + ``matrix``, which is overwritten."""
    matrix.diagonal().add_(1)
    return torch.linalg.cholesky(matrix)


# ---- by probes


def _by_probes(whitened: "Whitened", nats: float, seed: int, most: int) -> _Found:
    """Probes in groups, until their standard error is small enough: twice as many, as often as needed."""
    values: list[Tensor] = []
    gammas: list[Tensor] = []
    steps, group, error, truncation = STEPS, min(FIRST, most), math.inf, 0.0

    def enough(found: Solution) -> bool:  # the first group finds the number of steps, for all
        lower, upper = found.log_bracket(whitened.least)
        return not values and float((upper - lower).mean()) / 2 <= nats / 2

    while error > nats and len(values) < most:
        z = whitened.probes(seed, len(values), group)
        found = solve(whitened, z, enough, steps)
        lower, upper = found.log_bracket(whitened.least)
        values += list(upper)
        gammas += list(whitened.gammas(z, found.x).cpu())
        steps, truncation = found.steps, max(truncation, float((upper - lower).mean()) / 2)
        error = 0.5 * float(torch.stack(values).std()) / math.sqrt(len(values))
        wanted = math.ceil(len(values) * (error / nats) ** 2)
        group = min(max(wanted - len(values), 1), len(values), most - len(values))
    log_det = whitened.log_det + float(torch.stack(values).mean())
    mean = torch.stack(gammas).mean(0)
    gamma = {site.name: float(g) for site, g in zip(whitened.H.sites, mean, strict=True)}
    return _Found(log_det, gamma, error, truncation, len(values), steps)


class Whitened:
    """v -> B^T (H + D) B v, with B B^T = (t kron(G, A) + D)^-1 for every path: near to the identity.

    B is U (t lambda mu + delta)^-1/2 V^T in the eigenbasis of the factors. D becomes ``kept``, the diagonal delta / (t lambda mu +
    delta), so no eigenvalue is below its ``least``. Weights that the evidence leaves out stay zero.
    """

    def __init__(self, H: GaussNewton, laplace: Laplace, precision: Mapping[str, float]):
        self.H, self.scale = H, float(laplace.likelihood.scale().detach())
        self.names, self.left_out = [site.name for site in H.sites], laplace.left_out
        self.parts: list[tuple[Tensor, Tensor, Tensor] | None] = []
        kept: list[Tensor] = []
        self.log_det = 0.0
        decomposed = laplace.curvature.eigenvectors({})
        for site in H.sites:
            if site.name in laplace.left_out:
                self.parts.append(None)
                kept.append(torch.ones(site.parameter.numel(), dtype=torch.float64, device=H.device))
                continue
            products, U, V = (t.to(H.device) for t in decomposed[site.name])
            ratio = STRENGTH * self.scale / precision[site.name] * products
            self.log_det += float(ratio.log1p().sum())
            self.parts.append((((1 + ratio) * precision[site.name]).rsqrt(), U, V))
            kept.append((1 / (1 + ratio)).flatten())
        self.kept = torch.cat(kept)
        self.least = float(self.kept.min()) * (1 - 1e-6)

    def __call__(self, v: Tensor) -> Tensor:
        return self.kept * v + self.scale * self.turned(self.H(self.turned(v, back=False)), back=True)

    def turned(self, vectors: Tensor, back: bool) -> Tensor:
        """B v, or B^T v, for each row v."""
        found = []
        for part, piece in zip(self.parts, vectors.split(self.H.sizes, 1), strict=True):
            if part is None:
                found.append(torch.zeros_like(piece))
                continue
            d, U, V = part
            w = piece.view(len(piece), *d.shape)
            found.append(((U.mT @ w @ V) * d if back else U @ (w * d) @ V.mT).flatten(1))
        return torch.cat(found, 1)

    def probes(self, seed: int, begin: int, count: int) -> Tensor:
        """Random signs (count, weights). A path of the same name and size has the same ones in another network."""
        found = []
        for name, size in zip(self.names, self.H.sizes, strict=True):
            signs = []
            for number in range(begin, begin + count):
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {number} {name}".encode()))
                signs.append(2.0 * torch.randint(2, (size,), generator=generator) - 1)
            found.append(torch.stack(signs) * (name not in self.left_out))
        return torch.cat(found, 1).to(self.H.device, torch.float64)

    def gammas(self, z: Tensor, x: Tensor) -> Tensor:
        """The effective parameters (k, paths) by each probe, from x = A^-1 z: sum of 1 - kept z x over a path."""
        spent = (z.square() - self.kept * z * x).split(self.H.sizes, 1)
        return torch.stack([part.sum(1) for part in spent], 1)
