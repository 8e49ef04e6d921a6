"""Exact evidence of models that are linear in their parameters, with Gaussian noise.

    y = Phi w + noise,      w ~ N(0, I / delta),  noise ~ N(0, sigma^2 I)
    log p(y) = log N(y | 0, Phi Phi^T / delta + sigma^2 I)

It is differentiable in everything, features included: a plain backward pass learns a hyperparameter inside the features.
"""

import math

import torch
from torch import Tensor

from autosym.evidence.record import Evidence


def at(features: Tensor, targets: Tensor, precision: Tensor | float = 1.0, variance: Tensor | float = 1.0) -> Evidence:
    """The evidence of ``targets`` (N,) or (N, D) given ``features`` (N, M). Each of the D outputs has its own weights.

    ``precision`` is the prior's: one for all weights, or one for each feature (M,). ``variance`` is the noise's. The terms of
    the record are taken at the posterior mean; their sum is exact.
    """
    y = targets[:, None] if targets.dim() == 1 else targets
    if features.dim() != 2 or y.dim() != 2 or len(y) != len(features):
        raise ValueError(f"features must be (N, M) and targets (N,) or (N, D), got {_shape(features)} and {_shape(targets)}")
    count, outputs = y.shape
    delta, sigma2 = (torch.as_tensor(t, dtype=features.dtype, device=features.device) for t in (precision, variance))
    delta = delta.expand(features.shape[1])
    if not ((delta > 0).all() and sigma2 > 0):
        raise ValueError("the precision of the prior and the variance of the noise must be positive")
    mean, root = posterior(features, y, delta, sigma2)
    residual = y - features @ mean
    log_likelihood = -0.5 * (residual.square().sum() / sigma2 + count * outputs * torch.log(2 * math.pi * sigma2))
    log_prior = 0.5 * (outputs * (delta / (2 * math.pi)).log().sum() - (delta[:, None] * mean.square()).sum())
    log_det = 2 * root.diagonal().log().sum()
    complexity = 0.5 * outputs * (log_det - len(delta) * math.log(2 * math.pi))
    return Evidence(log_likelihood, log_prior, complexity, count)


def posterior(features: Tensor, targets: Tensor, precision: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (M, D) of the weights, and the Cholesky root (M, M) of their precision Phi^T Phi / sigma^2 + diag(delta)."""
    root = torch.linalg.cholesky(features.mT @ features / variance + torch.diag(precision))
    return torch.cholesky_solve(features.mT @ targets / variance, root), root


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)
