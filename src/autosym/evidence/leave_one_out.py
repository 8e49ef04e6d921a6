"""Leave-one-out: what the other samples say of each one, without another fit, and how sure predictions of classes may be by it.

    V_-i = (V_i^-1 - Lambda_i)^-1,        f_-i = f_i + V_-i g_i

f_i are the outputs of sample i, V_i their covariance under the posterior, g_i and Lambda_i slope and curvature of its loss, all at a mode.
All other samples and the prior say N(f_-i, V_-i) of its outputs. That is exact for linear regression. Else it is one Newton step: the
curvature of the other samples is taken to stay as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autosym.bayes.likelihoods import Likelihood
from autosym.evidence.predictive import Link, drawn, predicted

LEAST = 1e-2  # of 1 - leverage: draws and rounding may make it negative
TEMPERATURES = (0.45, 0.55, 0.65, 0.75, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0)
SCALES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
WIDTH = 0.1  # at a temperature T < 1 the scale is at least so much of 1 - T: sharper outputs need some width
ERRORS = 1.0  # a gain has to be larger than so many of its standard errors
MOST, DRAWS = 2_000, 256  # samples that are looked at; draws of each where a link has no closed form


@dataclass(frozen=True)
class Tuning:
    """The class probabilities are the means of softmax(f / temperature) over f ~ N(mean, scale V). (1, 0) is the point estimate."""

    temperature: float = 1.0
    scale: float = 0.0


AS_IT_IS = Tuning(scale=1.0)  # the posterior, untuned


def cavity(f: Tensor, covariance: Tensor, slope: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """f_-i (N, D) and V_-i (N, D, D), from f_i, V_i, g_i and Lambda_i."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    kept, turned = torch.linalg.eigh(torch.eye(f.shape[1]).to(f) - root.mT @ hessian @ root)
    root = (root @ turned) / kept.clamp_min(LEAST).sqrt()[:, None]
    covariance = root @ root.mT
    return f + (covariance @ slope[:, :, None])[:, :, 0], covariance


def tune(
    likelihood: Likelihood, means: Sequence[Tensor], covariance: Tensor, y: Tensor, link: Link = "probit", seed: int = 0
) -> Tuning:
    """Temperature and scale with the least leave-one-out loss of classes ``y`` (N,), or the point estimate.

    Every one of the ``means`` (N, D) is an estimate of f_-i. What is minimised is the excess of loss over the point estimate's, plus its
    standard error, by the estimate that says most: so all have to agree on a gain.
    """
    if len(y) > MOST:
        chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:MOST].to(y.device)
        means, covariance, y = [mean[chosen] for mean in means], covariance[chosen], y[chosen]
    noise = drawn(torch.zeros_like(means[0]), covariance, DRAWS, seed)

    def losses(mean: Tensor, tuning: Tuning) -> Tensor:
        found = predicted_at(likelihood, mean, covariance, noise, link, tuning)["probabilities"]
        return -found.gather(1, y.reshape(-1, 1).long())[:, 0].clamp_min(torch.finfo(found.dtype).tiny).log()

    def bound(tuning: Tuning) -> float:
        excess = [losses(mean, tuning) - point for mean, point in zip(means, points, strict=True)]
        return max(float(e.mean() + ERRORS * e.std(correction=0) / max(len(e) - 1, 1) ** 0.5) for e in excess)

    points = [losses(mean, Tuning()) for mean in means]
    candidates = [Tuning(t, s) for t in TEMPERATURES for s in SCALES if s >= WIDTH * (1 - t)]
    best = min(candidates, key=bound)
    return best if bound(best) < 0 else Tuning()


def predicted_at(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, deviations: Tensor, link: Link, tuning: Tuning
) -> dict[str, Tensor]:
    """What is said of y if f ~ N(mean, scale V) / temperature; ``deviations`` (S, B, D) are draws of N(0, V)."""
    t, s = tuning.temperature, tuning.scale
    return predicted(likelihood, mean / t, covariance * (s / t**2), lambda: (mean + s**0.5 * deviations) / t, link)
