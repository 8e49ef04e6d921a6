"""Laplace evidence with Kronecker-factored curvature (Eq. 9).

    log p(D) ~ log p(D | w) + log p(w) + P/2 log 2 pi - 1/2 log det H,      H = kron(G, A) / sigma^2 + delta I per path

With an isotropic prior only the eigenvalues lambda of G and mu of A are needed, so one expensive pass (``at``) gives a cheap,
differentiable function of every prior precision and of the noise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosym import likelihoods
from autosym.batching import Data
from autosym.curvature import kfac, sites
from autosym.evidence.record import Evidence
from autosym.likelihoods import Gaussian, Likelihood
from autosym.priors import Prior

LOG_PRECISION_RANGE = (math.log(1e-8), math.log(1e12))  # closed-form steps stop there: a path at 1e12 is gone


@dataclass(frozen=True)
class Laplace:
    """Evidence as a function of the prior, at the weights and data it was taken at.

    ``laplace(prior)`` is differentiable in ``prior.log_precision`` and, for a Gaussian, in ``likelihood.log_variance``.
    """

    names: tuple[str, ...]
    products: tuple[Tensor, ...]  # eigenvalues of the GGN blocks at unit likelihood scale, lambda mu: (K, out, in)
    square_norms: Tensor
    sizes: Tensor
    statistic: Tensor
    samples: int
    outputs: int
    likelihood: Likelihood

    def __call__(self, prior: Prior) -> Evidence:
        self._check(prior)
        delta, scale = prior.log_precision.exp(), self.likelihood.scale()
        log_det = sum(
            (torch.log(scale * p + d).sum() for p, d in zip(self.products, delta, strict=True)), torch.zeros(())
        ).cpu()
        log_likelihood = self.likelihood.log_likelihood(self.statistic, self.samples * self.outputs)
        log_prior = prior.log_density(self.square_norms, self.sizes).sum()
        complexity = 0.5 * (log_det - self.sizes.sum() * math.log(2 * math.pi))
        return Evidence(log_likelihood, log_prior, complexity, self.samples)

    def effective_parameters(self, prior: Prior) -> Tensor:
        """gamma_i = sum lambda mu / (lambda mu + delta_i): how many parameters of each path the data determine."""
        self._check(prior)
        delta, scale = prior.log_precision.exp(), self.likelihood.scale()
        gammas = [(scale * p / (scale * p + d)).sum() for p, d in zip(self.products, delta, strict=True)]
        return torch.stack(gammas).cpu()

    def mackay(self, prior: Prior, damping: float = 1.0, trust: float = math.inf) -> None:
        """MacKay's closed form, delta <- gamma / |w|^2 and sigma^2 <- SSE / (N D - gamma), in place.

        It holds at a mode, so it moves only the fraction ``damping`` of the way in log space, at most ``trust`` nats. A path
        whose weights or gamma are zero says nothing of its precision and is left alone.
        """
        with torch.no_grad():
            gamma = self.effective_parameters(prior)
            known = (gamma > 0) & (self.square_norms > 0)
            target = (gamma / self.square_norms.where(known, 1)).where(known, 1).log().where(known, prior.log_precision)
            step = (damping * (target - prior.log_precision)).clamp(-trust, trust)
            prior.log_precision.add_(step).clamp_(*LOG_PRECISION_RANGE)
            if isinstance(self.likelihood, Gaussian):
                left = self.samples * self.outputs - gamma.sum()
                variance = (self.statistic / left.clamp_min(1)).clamp_min(torch.finfo(torch.float64).tiny)
                step = (damping * (variance.log() - self.likelihood.log_variance)).clamp(-trust, trust)
                self.likelihood.log_variance.add_(step)

    def _check(self, prior: Prior) -> None:
        if prior.names != self.names:
            raise ValueError(
                f"this prior is over {prior.names}, the evidence over {self.names}: make it by Prior(evidence.names)"
            )


def at(model: nn.Module, data: Data, likelihood: str | Likelihood = "categorical", **options: Any) -> Laplace:
    """The expensive pass: curvature of ``model`` on ``data``, decomposed. ``options`` are those of ``curvature.kfac``."""
    likelihood = likelihoods.of(likelihood)
    curvature = kfac(model, data, likelihood, **options)
    eigenvalues = curvature.eigenvalues()
    parameters = {site.name: site.parameter.detach() for site in sites(model)}
    products = tuple(lam[:, :, None] * mu[:, None, :] for lam, mu in eigenvalues.values())
    square_norms = torch.stack([parameters[name].double().square().sum() for name in eigenvalues]).cpu()
    sizes = torch.tensor([parameters[name].numel() for name in eigenvalues], dtype=torch.float64)
    names = tuple(eigenvalues)
    return Laplace(names, products, square_norms, sizes, curvature.statistic, curvature.samples, curvature.outputs, likelihood)


def log_evidence(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    prior_precision: float | Mapping[str, float] = 1.0,
    **options: Any,
) -> float:
    """The log marginal likelihood of ``model`` on all of ``data``, in nats, by Laplace at its present weights.

    ``data`` is a pair of tensors (inputs, targets), a dataset or a loader. ``prior_precision`` is one precision, or one by name
    of path. The model is any of torch's made of Linear and Conv2d, or one of autosym's. It should be trained with the same
    prior: the approximation holds at a mode of the posterior. ``options`` are those of ``autosym.curvature.kfac``.
    """
    evidence = at(model, data, likelihood, **options)
    return float(evidence(Prior(evidence.names, prior_precision)).log_evidence.detach())
