"""One evidence step: the expensive pass at the present weights, then precisions and noise."""

import math
from typing import Any

import torch
from torch import nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.verification import Verified
from autosym.evidence import kernel, laplace
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace
from autosym.evidence.shares import symmetry
from autosym.runtime.batching import Data
from autosym.training.schedule import EvidenceStep

REST, MANY = 0.02, 16  # the part of the output Hessians that is sampled at the end of a fit too, of more than so many outputs


def estimate(
    model: nn.Module,
    data: Data,
    likelihood: Likelihood,
    prior: Prior,
    how: EvidenceStep,
    seed: int,
    memory: float | None = None,
    verified: Verified | None = None,
    rest: float = 0.0,
) -> Laplace | Kernel:
    """The expensive pass of the estimator that the settings ask for. ``rest`` is that of ``curvature.kfac``."""
    if how.kernel is not None:
        return kernel.at(model, data, likelihood, samples=how.kernel, outputs="one", seed=seed)
    options = {"sampled": how.sampled, "rest": rest, "subset": how.subset, "seed": seed, "memory": memory, "verified": verified}
    at = laplace.at(model, data, likelihood, **options)
    return at.with_scales(prior) if math.isfinite(prior.nu) else at


def improve(prior: Prior, likelihood: Likelihood, at: Laplace | Kernel, how: EvidenceStep) -> None:
    """A damped closed-form step of precisions and noise, or gradient steps, in place."""
    if how.step == "mackay":
        at.mackay(prior, how.damping, how.trust)
        return
    optimiser = torch.optim.Adam([*prior.parameters(), *likelihood.hyperparameters().values()], how.hyper_lr)
    for _ in range(how.hyper_steps):
        optimiser.zero_grad()
        (-at(prior).log_evidence).backward()
        optimiser.step()


def improved(prior: Prior, likelihood: Likelihood, at: Laplace | Kernel, how: EvidenceStep, times: int = 1) -> float:
    """So many steps of ``improve``; returns by how many nats they have changed the log evidence at these weights."""
    with torch.no_grad():
        before = float(at(prior).log_evidence)
    for _ in range(times):
        improve(prior, likelihood, at, how)
    with torch.no_grad():
        return abs(float(at(prior).log_evidence) - before)


def summary(model: nn.Module, likelihood: Likelihood, prior: Prior, at: Laplace | Kernel) -> dict[str, Any]:
    """What a line of the history says of an evidence step: evidence, its parts, precisions, effective parameters, shares."""
    with torch.no_grad():
        record = at(prior)
        found: dict[str, Any] = {
            "log_evidence": float(record.log_evidence),
            "log_likelihood": float(record.log_likelihood),
            "occam": float(record.occam),
            "precision": prior.precision(),
            "effective_parameters": dict(zip(at.names, at.effective_parameters(prior).tolist(), strict=True)),
            "free_share": {k: None if math.isnan(v) else v for k, v in symmetry(model, prior, at).free_share().items()},
        }
        return found | {
            key: value for key, value in likelihood.figures().items() if key not in (*found, "epoch", "loss", "seconds")
        }
