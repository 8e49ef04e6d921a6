"""Laplace evidence with the Gauss-Newton matrix of the whole network: no blocks, no Kronecker factors.

    log det (I + D^-1/2 H D^-1/2),        H = sum_n J_n^T Lambda_n J_n,  D the prior precisions

It is exact where either the weights or the rows (samples times outputs) are few (``factorised``). Else it is estimated by random probes
(``probes``): they have a standard error, and the number of their steps a bound of its own. Both give the effective parameters of paths.
The work of each is counted (``costs``).
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.gauss_newton import GaussNewton
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass, alike
from autosym.curvature.verification import refuse_batch_dependence
from autosym.evidence import costs, laplace
from autosym.evidence.costs import How
from autosym.evidence.factorised import by_rows, by_weights
from autosym.evidence.laplace import Laplace
from autosym.evidence.probes import FEWEST, LEAST_STEPS, Allowance, by_probes
from autosym.evidence.record import Evidence
from autosym.evidence.whitened import prepared
from autosym.runtime import arithmetic, processes
from autosym.runtime.batching import Data

PRODUCTS = 4_000  # with the matrix: at most so many
MISSED = 0.15  # of the truncation: by so much the evidence is too small, about (0.03 to 0.35 where more steps told)
LEAST = FEWEST * LEAST_STEPS  # products: fewer steps of fewer probes tell nothing


class OtherData(ValueError):
    """Data that are not those of the factors: those of another fit, or of a loader that shows them in another way each time."""


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

    @property
    def missed(self) -> float:
        """By how many nats too few steps make the evidence too small, about; ``truncation`` is the most."""
        return MISSED * self.truncation

    @property
    def doubt(self) -> float:
        """The standard error of the evidence and what was ``missed``, which may be none or twice as much."""
        return math.hypot(self.evidence.standard_error or 0.0, self.missed)

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
    products: int = PRODUCTS,
    seconds: float | None = None,
    offset: Tensor | None = None,
    batch_size: int | None = None,
    memory: float | None = None,
    tf32: bool = False,
) -> Whole:
    """The evidence at ``prior`` of the weights and data that ``laplace`` was taken at, or of the linearised network at an ``offset``.

    Probes are drawn by ``seed`` until two standard errors are at most ``nats``, or there are as many as ``probes``. Steps are made
    until truncation is at most half of ``nats``. Both stop where so many ``products`` with the matrix were made, or ``seconds`` have
    passed (then the number depends on the machine); ``standard_error`` and ``truncation`` say what was reached. By default the way
    of the least work is taken (``evidence.costs``); ``how`` decides otherwise. ``batch_size``, ``memory`` and ``tf32`` are those of
    ``curvature.kfac``.
    """
    begun = time.perf_counter()
    if not nats > 0 or probes < FEWEST or products < LEAST or (seconds is not None and not seconds > 0):
        raise ValueError(
            f"nats and seconds must be positive, got {nats} and {seconds}, and there must be {FEWEST} probes and {LEAST} products at "
            f"least, got {probes} and {products}"
        )
    if how not in (None, "weights", "rows", "probes"):
        raise ValueError(f"how must be 'weights', 'rows', 'probes' or None, got {how!r}")
    model = processes.unwrapped(model)
    refuse_batch_dependence(model)
    refuse_other(model, data, laplace, prior)
    H = GaussNewton(model, data, laplace.likelihood, batch_size=batch_size, memory=memory, tf32=tf32)
    H.offset = offset
    precision = prior.precision()
    how = costs.of(model, data, laplace, memory).cheapest if how is None else how
    with arithmetic.true_float32(not tf32):
        if how == "probes":
            whitened = prepared(H, laplace, precision, memory)
            found = by_probes(whitened, nats, seed, probes, memory, Allowance(H, products, seconds, begun))
        else:
            found = (by_weights if how == "weights" else by_rows)(H, laplace, precision, memory)
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


def refuse_other(model: nn.Module, data: Data, laplace: Laplace, prior: Prior) -> None:
    """Refuse weights or data that ``laplace`` was not taken at, and a prior that is not over its paths, or not Gaussian."""
    if prior.names != laplace.names:
        raise ValueError(f"this prior is over {prior.names}, the evidence over {laplace.names}: use Prior(evidence.names)")
    if math.isfinite(prior.nu):
        raise ValueError("the Gauss-Newton matrix of the whole network is for Gaussian priors: pass nu=inf")
    moved = [
        site.name for site in sites(model) if not torch.equal(site.parameter, laplace.parameters[site.name].to(site.parameter))
    ]
    if moved:
        raise ValueError(f"{', '.join(moved[:3])} changed since the evidence was taken: take it again at the present weights")
    shown = Pass(model, data, laplace.likelihood)
    with processes.agreeing():
        for _, y, _, _ in shown:
            laplace.likelihood.check(laplace.outputs, y)
    shown.finish()
    if shown.samples != laplace.samples or not alike(shown.fingerprint, laplace.fingerprint):
        raise OtherData(
            f"these {shown.samples} samples are not the {laplace.samples} that the evidence was computed on: pass the data of the fit"
        )
