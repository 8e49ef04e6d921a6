"""Posterior predictive of the linearised model, and its calibration.

    f(x) ~ N(f(x; w*), J Sigma J^T),       Sigma = (kron(G, A) / sigma^2 + delta I)^-1 per path

The likelihood turns it into the predictive of y (``Likelihood.predict``), in closed form or by Monte Carlo. A Gaussian adds its
noise. A categorical averages the softmax over f, by the probit approximation softmax(f / sqrt(1 + pi/8 v)) or by draws. For that the
covariance may be multiplied by a scale: with 0 the prediction is that of the point estimate.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.verification import linearised, refuse_batch_dependence
from autosym.runtime.batching import check_finite

Link = Literal["probit", "monte-carlo"]


@dataclass(frozen=True)
class Predictive:
    """Outputs f as a Gaussian: ``mean`` (B, D), ``covariance`` (B, D, D), as the posterior has them, at any scale of the prediction.

    ``expected`` and ``variance`` are the mean and variance of y, noise included (Gaussian, Poisson). ``probabilities`` (B, K)
    are over classes (categorical, Bernoulli). Fields that do not apply are None.
    """

    mean: Tensor
    covariance: Tensor
    variance: Tensor | None = None
    probabilities: Tensor | None = None
    expected: Tensor | None = None


def predictive(
    model: nn.Module,
    x: Tensor,
    eigenvectors: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    prior: Prior,
    likelihood: Likelihood,
    link: Link = "probit",
    samples: int = 256,
    seed: int = 0,
    scale: float = 1.0,
) -> Predictive:
    """The predictive at ``x``, from the decomposed curvature of the model (``Curvature.eigenvectors``).

    ``link`` "probit" uses the likelihood's closed form, if it has one. "monte-carlo" takes ``samples`` draws of the outputs. What is said
    of y goes by ``scale`` times the covariance.
    """
    check_link(link)
    x = checked_inputs(model, x)
    precision = prior.precision()
    known = float(likelihood.scale().detach())
    with torch.no_grad():
        outputs = model(x[:1]).shape[1]
    largest = max(products.numel() for products, _, _ in eigenvectors.values())
    step = max(1, 2**25 // (largest * outputs))  # 256 MiB for the largest Jacobian, or one sample at a time
    parts = [_linearised(model, part, eigenvectors, precision, known) for part in x.split(step)]
    mean, covariance = (torch.cat(part) for part in zip(*parts, strict=True))
    width = scale * covariance
    found = predicted(likelihood, mean, width, lambda: drawn(mean, width, samples, seed), link)
    return Predictive(mean, covariance, **found)


def predicted(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, draws: Callable[[], Tensor], link: Link
) -> dict[str, Tensor]:
    """What the likelihood says of y if f ~ N(mean, covariance): in closed form if there is one and it is asked for, else by draws."""
    found = likelihood.predict(mean, covariance, None) if link == "probit" else None
    found = likelihood.predict(mean, covariance, draws()) if found is None else found
    return found or {}


def check_link(link: str) -> None:
    if link not in ("probit", "monte-carlo"):
        raise ValueError(f"link must be 'probit' or 'monte-carlo', got {link!r}")


def checked_inputs(model: nn.Module, x: Tensor) -> Tensor:
    """Inputs (B, ...) as the model takes them. Refuse others, and models whose outputs depend on batchmates or on chance."""
    refuse_batch_dependence(model)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"the inputs of the predictive are a {type(x).__name__}: give a tensor (B, ...), e.g. torch.as_tensor(array)"
        )
    if not len(x):
        raise ValueError("the inputs of the predictive are empty: give at least one sample, (B, ...)")
    check_finite(x, "the inputs of the predictive")
    return x.to(next(model.parameters()))


def _linearised(
    model: nn.Module,
    x: Tensor,
    eigenvectors: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    precision: Mapping[str, float],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of f: J Sigma J^T is summed over paths in the eigenbasis of each."""
    f, found = linearised(model, x, lambda f: torch.diag_embed(torch.ones_like(f)))
    covariance = torch.zeros(len(x), f.shape[1], f.shape[1], dtype=torch.float64, device=f.device)
    for name, (products, U, V) in eigenvectors.items():
        columns, rows = found[name]
        a = torch.einsum("bski,kij->bskj", columns.double(), V)
        for_block = torch.einsum("bcsko,kop->bcskp", rows.double(), U)
        jacobian = torch.einsum("bcsko,bski->bckoi", for_block, a) * (scale * products + precision[name]).rsqrt()
        jacobian = jacobian.flatten(2)
        covariance += jacobian @ jacobian.mT
    return f.double(), covariance


def drawn(mean: Tensor, covariance: Tensor, samples: int, seed: int) -> Tensor:
    """(samples, B, D) from N(mean, covariance)."""
    # All inputs share the same noise, so that an input's probabilities do not depend on its batchmates.
    noise = torch.randn(samples, mean.shape[1], dtype=mean.dtype, generator=torch.Generator().manual_seed(seed))
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]
    return mean + torch.einsum("bij,nj->nbi", root, noise.to(mean.device))


@dataclass(frozen=True)
class Scores:
    """Scores of logits: accuracy, its standard error, mean negative log-likelihood, and calibration error of the softmax."""

    accuracy: float
    standard_error: float
    nll: float
    calibration_error: float


def scores(logits: Tensor, labels: Tensor) -> Scores:
    """How well ``logits`` (B, D) predict the classes ``labels`` (B,)."""
    correct = (logits.argmax(1) == labels).double()
    error = float(correct.std(correction=0)) / math.sqrt(max(len(labels) - 1, 1))
    return Scores(
        float(correct.mean()), error, float(F.cross_entropy(logits, labels)), calibration_error(logits.softmax(1), labels)
    )


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: |accuracy - confidence| in equal bins of confidence, weighted by their counts."""
    if not isinstance(probabilities, Tensor):
        raise TypeError(
            f"probabilities are a {type(probabilities).__name__}: "
            "give a tensor (N, classes), e.g. fit.predictive(x).probabilities"
        )
    confidence, correct, which = _binned(probabilities, labels, bins)
    gap = torch.zeros(bins, dtype=confidence.dtype, device=confidence.device).index_add_(0, which, correct - confidence)
    return float(gap.abs().sum() / len(labels))


def _binned(probabilities: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each sample its confidence, whether it is right (1) or wrong (0), and its bin."""
    confidence, predicted = probabilities.max(-1)
    correct = (predicted == labels.to(predicted.device)).to(confidence.dtype)
    return confidence, correct, (confidence * bins).long().clamp_max(bins - 1)


def reliability(probabilities: Tensor, labels: Tensor, bins: int = 15) -> list[dict[str, float | None]]:
    """The bins of ``calibration_error``: bounds, count, mean confidence and accuracy (None if a bin is empty)."""
    confidence, correct, which = _binned(probabilities, labels, bins)
    rows: list[dict[str, float | None]] = []
    for index in range(bins):
        inside = which == index
        count = int(inside.sum())
        mean = {"confidence": float(confidence[inside].mean()), "accuracy": float(correct[inside].mean())} if count else {}
        rows.append(
            {"from": index / bins, "to": (index + 1) / bins, "count": count, "confidence": None, "accuracy": None, **mean}
        )
    return rows
