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
from autosym.likelihoods import Likelihood
from autosym.priors import Prior


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
        log_det = sum((torch.log(scale * p + d).sum() for p, d in zip(self.products, delta, strict=True)), torch.zeros(()))
        log_likelihood = self.likelihood.log_likelihood(self.statistic, self.samples * self.outputs)
        log_prior = prior.log_density(self.square_norms, self.sizes).sum()
        complexity = 0.5 * (log_det - self.sizes.sum() * math.log(2 * math.pi))
        return Evidence(log_likelihood, log_prior, complexity, self.samples)

    def effective_parameters(self, prior: Prior) -> Tensor:
        """gamma_i = sum lambda mu / (lambda mu + delta_i): how many parameters of each path the data determine."""
        self._check(prior)
        delta, scale = prior.log_precision.exp(), self.likelihood.scale()
        gammas = [(scale * p / (scale * p + d)).sum() for p, d in zip(self.products, delta, strict=True)]
        return torch.stack(gammas)

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
    square_norms = torch.stack([parameters[name].double().square().sum() for name in eigenvalues])
    sizes = torch.tensor([parameters[name].numel() for name in eigenvalues], dtype=torch.float64, device=square_norms.device)
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
