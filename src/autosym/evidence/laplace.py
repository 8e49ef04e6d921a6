"""Laplace evidence with Kronecker-factored curvature (Eq. 9).

    log p(D) ~ log p(D | w) + log p(w) + P/2 log 2 pi - 1/2 log det H,      H = kron(G, A) / sigma^2 + delta I per path

With an isotropic prior only the eigenvalues lambda of G and mu of A are needed, so one expensive pass (``at``) gives a cheap,
differentiable function of every prior precision and of the noise.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.kronecker import Curvature, kfac
from autosym.curvature.owners import is_under, sites
from autosym.curvature.verification import Verified
from autosym.evidence import possible
from autosym.evidence.record import Evidence
from autosym.nn.layers import silent
from autosym.runtime import processes
from autosym.runtime.batching import Data

LOG_PRECISION_RANGE = (math.log(1e-8), math.log(1e12))  # closed-form steps stay inside: a path at 1e12 is gone
HALVINGS = 12  # of a closed-form step, at most, until the evidence does not fall


@dataclass(frozen=True)
class Laplace:
    """Evidence as a function of the prior, at fixed weights and data.

    ``laplace(prior)`` is differentiable in ``prior.log_precision`` and, for a Gaussian, in ``likelihood.log_variance``.
    """

    names: tuple[str, ...]
    eigenvalues: tuple[tuple[Tensor, Tensor], ...]  # lambda: (K, out) and mu: (K, in) of each path, at unit likelihood scale
    square_norms: Tensor
    sizes: Tensor
    parameters: dict[str, Tensor]  # the weights it was taken at
    curvature: Curvature
    likelihood: Likelihood
    left_out: tuple[
        str, ...
    ] = ()  # names whose path computes zero: they count for nothing, at any precision, and have no factors

    @property
    def samples(self) -> int:
        return self.curvature.samples

    @property
    def outputs(self) -> int:
        return self.curvature.outputs

    @property
    def fingerprint(self) -> Tensor | None:
        return self.curvature.fingerprint

    @property
    def classes_seen(self) -> int:
        return self.curvature.classes_seen

    @property
    def nbytes(self) -> int:
        """What its factors take."""
        return sum(f.nbytes for f in self.curvature.factors.values())

    def __call__(self, prior: Prior) -> Evidence:
        self._check(prior)
        delta, scale = prior.log_precision.exp(), self.likelihood.scale()
        log_det = (
            torch.stack([torch.log(scale * p + d).sum() for p, d in zip(self._products(), delta, strict=True)]).sum().cpu()
        )
        log_likelihood = self.likelihood.log_likelihood(self.curvature.statistic, self.samples * self.outputs)
        log_prior = prior.log_density(self.square_norms, self.sizes).sum()
        complexity = 0.5 * (log_det - self.sizes.sum() * math.log(2 * math.pi))
        bound = "the Laplace evidence under a Student-t prior" if math.isfinite(prior.nu) else None
        most = possible.most(self.likelihood, self.outputs, self.classes_seen)
        return Evidence(log_likelihood, log_prior + prior.mixture_bound, complexity, self.samples, bound, most)

    def effective_parameters(self, prior: Prior) -> Tensor:
        """gamma_i = sum lambda mu / (lambda mu + delta_i): how many parameters of each path the data determine."""
        self._check(prior)
        delta, scale = prior.log_precision.exp(), self.likelihood.scale()
        gammas = [(scale * p / (scale * p + d)).sum() for p, d in zip(self._products(), delta, strict=True)]
        return torch.stack(gammas).cpu()

    def mackay(self, prior: Prior, damping: float = 1.0, trust: float = math.inf) -> None:
        """MacKay's closed form, delta <- gamma / |w|^2 and sigma^2 <- SSE / (N D - gamma), in place.

        It holds at a mode only, so a step goes the fraction ``damping`` of the way in log space, at most ``trust`` nats. The
        precision of a path is left unchanged if its weights or its gamma are zero. If noise is learned, the evidence does not fall.
        """
        closed_form_step(self, prior, self.curvature.statistic, damping, trust)

    def with_scales(self, prior: Prior, iterations: int = 3) -> "Laplace":
        """EM steps for the scales of a Student-t prior, in place; returns the evidence with the new scales.

        With w' = tau^1/2 w the prior is isotropic again, so only G' = tau^-1/2 G tau^-1/2 and |w'|^2 change.
        """
        eigenvalues, square_norms = list(self.eigenvalues), self.square_norms.clone()
        bounds = [0.0] * len(self.names)
        for index, name in enumerate(self.names):
            if name in self.left_out:
                continue
            G, mu = self.curvature.factors[name].G.double(), self.eigenvalues[index][1]
            rows = self.parameters[name].double().reshape(*G.shape[:2], -1).square().sum(-1)
            delta, scale = float(prior.log_precision[index].detach().exp()), float(self.likelihood.scale().detach())
            tau = prior.scales.get(name, torch.ones_like(rows))
            for _ in range(iterations):
                root = tau.rsqrt()
                lam, vectors = torch.linalg.eigh(root[:, :, None] * G * root[:, None, :])
                traces = (1 / (scale * lam.clamp_min(0)[:, :, None] * mu[:, None, :] + delta)).sum(-1)
                spread = (vectors.square() @ traces[:, :, None])[..., 0] / tau  # tr of the posterior covariance of each row
                bounds[index] = prior.set_scales(name, rows + spread, mu.shape[1])
                tau = prior.scales[name]
            root = tau.rsqrt()
            eigenvalues[index] = (torch.linalg.eigvalsh(root[:, :, None] * G * root[:, None, :]).clamp_min(0), mu)
            square_norms[index] = (tau * rows).sum()
        prior.mixture_bound = sum(bounds)
        return replace(self, eigenvalues=tuple(eigenvalues), square_norms=square_norms)

    def _products(self) -> Iterator[Tensor]:
        """Eigenvalues lambda mu of each path's blocks: (K, out, in). Formed one at a time: there is one per parameter."""
        return (lam[:, :, None] * mu[:, None, :] for lam, mu in self.eigenvalues)

    def _check(self, prior: Prior) -> None:
        if prior.names != self.names:
            raise ValueError(f"this prior is over {prior.names}, the evidence over {self.names}: use Prior(evidence.names)")


class Estimate(possible.Estimate, Protocol):
    """What a closed-form step needs to know of an estimator of evidence."""

    @property
    def square_norms(self) -> Tensor: ...

    @property
    def samples(self) -> int: ...


@torch.no_grad()
def closed_form_step(estimate: Estimate, prior: Prior, statistic: Tensor, damping: float, trust: float) -> None:
    """delta <- gamma / |w|^2 and sigma^2 <- SSE / (count - gamma), damped and within a trust region, in place.

    Less noise means more effective parameters, and these ask for more noise: where they are nearly as many as the data, full steps
    swing from one end to the other. Each part of a step goes uphill (d log Z / d log delta = (gamma - delta |w|^2) / 2, d log Z / d log
    sigma^2 = (SSE / sigma^2 - count + gamma) / 2), so where noise is learned it is halved until the evidence does not fall. Kronecker
    factors may count more effective parameters than data. The noise then takes the step of EM, sigma^2 <- (SSE + gamma sigma^2) / count.
    """
    gamma, square_norms, likelihood = estimate.effective_parameters(prior), estimate.square_norms, estimate.likelihood
    known = (gamma > 0) & (square_norms > 0)
    target = (gamma / square_norms.where(known, 1)).where(known, 1).log().where(known, prior.log_precision)
    count, effective = estimate.samples * estimate.outputs, float(gamma.sum())
    left = count - effective
    if left < 1:
        left = count / (1 + effective / max(float(statistic * likelihood.scale()), torch.finfo(torch.float64).tiny))
    begun = prior.log_precision.clone()
    noise = {name: tensor.clone() for name, tensor in likelihood.hyperparameters().items()}
    before = float(estimate(prior).log_evidence) if noise else -math.inf
    for part in (0.5**halvings for halvings in range(HALVINGS)):
        step = (part * damping * (target - begun)).clamp(-part * trust, part * trust)
        prior.log_precision.copy_((begun + step).clamp_(*LOG_PRECISION_RANGE))
        likelihood.update(statistic, left, part * damping, part * trust)
        if not noise or math.isnan(before) or float(estimate(prior).log_evidence) >= before:
            return
        for name, tensor in likelihood.hyperparameters().items():
            tensor.copy_(noise[name])
    prior.log_precision.copy_(begun)


def at(model: nn.Module, data: Data, likelihood: str | Likelihood = "categorical", **options: Any) -> Laplace:
    """The expensive pass: curvature of ``model`` on ``data``, decomposed. ``options`` go to ``autosym.curvature.kfac``."""
    likelihood, model = likelihoods.of(likelihood), processes.unwrapped(model)
    verified: Verified | None = options.get("verified")
    owned = sites(model) if verified is None else verified.sites
    names = tuple(site.name for site in owned)
    out = left_out(model, names)
    curvature = kfac(model, data, likelihood, without=out, **options)
    parameters = {site.name: site.parameter.detach().clone() for site in owned}
    known = curvature.eigenvalues()
    eigenvalues = tuple(known[name] if name in known else _zeros(parameters[name]) for name in names)
    square_norms = torch.stack([parameters[name].double().square().sum() * (name not in out) for name in names]).cpu()
    sizes = torch.tensor([parameters[name].numel() for name in names], dtype=torch.float64)
    return Laplace(names, eigenvalues, square_norms, sizes, parameters, curvature, likelihood, out)


def _zeros(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a path without factors, as many products as it has weights: lambda (1, weights) and mu (1, 1)."""
    zeros = parameter.new_zeros(1, parameter.numel(), dtype=torch.float64)
    return zeros, zeros[:, :1]


def left_out(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Those of ``names`` that the evidence leaves out: all factors and biases of paths that compute zero.

    Without them the network is the same, so its evidence has to be. (The factor of such a path that is not zero has no curvature,
    and its prior would cost hundreds of nats.)
    """
    paths = silent(model)
    return tuple(name for name in names if any(is_under(name, path) for path in paths))
